"""Fast path for metadata changes: sends the request immediately and completes in the reply callback.

If a session, a free slot and a live connection are ready, and the shard has no standbys, no task is created
and no event-loop iteration passes; the caller may answer its own request before it updates its state.
Otherwise `begin` returns None, has no side effect, and the caller awaits `MetaClient.change`.

A submitted change that gets anything but a reply of the service continues in `MetaClient.change` under the
same request id. So this module never retries, and a change is executed exactly once as always. A part of
`client/rpc/meta_client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from nvpool.client.rpc.shard_session import ShardSession
from nvpool.core.errors import CorruptFrame, Refused, Stale, StaleEpoch, StaleSession, WrongShard
from nvpool.core.ids import partition_of
from nvpool.rpc.api import Reply

if TYPE_CHECKING:
    from nvpool.client.rpc.meta_client import MetaClient

OnEnd = Callable[[Any, BaseException | None], None]
_TO_BE_MENDED = (StaleSession, StaleEpoch, WrongShard)


class SentChange(NamedTuple):
    """A change that another module has sent as `begin` does, with its slot noted before.

    `message` is the encoded request.
    """

    message: bytes
    sent_s: float
    deadline_s: float
    connection: Any
    number: int
    state: ShardSession
    slot: int
    sequence: int
    generation: int


class SubmittedChange:
    """A submitted change. `on_end` is called once, with (reply, None) or (None, error).

    `on_end` is never called before `begin` has returned. The slot is free again when `on_end` returns, unless
    `leave` passed it to the kernel's request before.
    """

    __slots__ = (
        "meta",
        "on_end",
        "inode",
        "method",
        "request",
        "reply_type",
        "file",
        "unique",
        "state",
        "slot",
        "sequence",
        "generation",
        "deadline_s",
        "error",
        "_connection",
        "_number",
        "_task",
        "_ended",
        "_left",
    )

    def __init__(
        self,
        meta: MetaClient,
        on_end: OnEnd,
        inode: int,
        method: int,
        request,
        reply_type,
        file,
        unique: int,
        state: ShardSession,
        slot: int,
        sequence: int,
        deadline_s: float,
    ) -> None:
        self.meta = meta
        self.on_end = on_end
        self.inode = inode
        self.method = method
        self.request = request
        self.reply_type = reply_type
        self.file = file
        self.unique = unique
        self.state = state
        self.slot = slot
        self.sequence = sequence
        self.generation = state.generation
        self.deadline_s = deadline_s
        self.error: BaseException | None = None
        """The error with which the change continues in `MetaClient.change`."""
        self._connection = None
        self._number = 0
        self._task: asyncio.Task | None = None
        self._ended = self._left = False

    def send(self, connection) -> None:
        self._connection = connection
        self._number = connection.submit(
            self.method, self.request.SerializeToString(), deadline_s=self.deadline_s, on_done=self.answered
        )

    def was_sent(self, sent: SentChange) -> None:
        """Record that the change was sent already; replaces `send`."""
        self._connection, self._number, self.generation = sent.connection, sent.number, sent.generation

    def leave(self) -> None:
        """Keep the slot until the kernel's request is answered, as that request needs more work."""
        if not self._left:
            self._leave()

    def _leave(self) -> None:
        self._left = True
        self.meta.leave(self.unique, self.state, self.slot, self.sequence, self.generation)

    def cancel(self) -> bool:
        """Call `on_end` with CancelledError, now or when the slow path has ended.

        The change may be executed all the same. False: it has ended already.
        """
        if self._ended:
            return False
        if self._task is not None:
            return self._task.cancel()
        self._connection.give_up(self._number)
        self.meta.lost_sight()
        self._end(None, asyncio.CancelledError())
        return True

    def answered(self, reply: Reply | None, error: BaseException | None) -> None:
        """Handle the result of the request, once."""
        if self._ended or self._task is not None:
            return
        if error is None:
            message = reply.message
            try:
                answer = self.reply_type.FromString(message if type(message) is bytes else bytes(message))
            except DecodeError:
                error = CorruptFrame(f"an answer is no {self.reply_type.DESCRIPTOR.name}")
            else:
                self._end(answer, None)
                return
        if isinstance(error, Refused | Stale) and not isinstance(error, _TO_BE_MENDED):
            self._end(None, error)
            return
        self.error = error
        self._left = True  # the slow path releases the slot
        self._task = asyncio.get_running_loop().create_task(self.meta.go_on(self))
        self._task.add_done_callback(self._gone_on)

    def take_error(self) -> BaseException | None:
        error, self.error = self.error, None
        return error

    def _gone_on(self, task: asyncio.Task) -> None:
        if self.error is not None:  # cancelled before its first step
            self._leave()
            self.meta.lost_sight()
        if task.cancelled():
            self._end(None, asyncio.CancelledError())
        elif task.exception() is not None:
            self._end(None, task.exception())
        else:
            self._end(task.result(), None)

    def _end(self, answer: Any, error: BaseException | None) -> None:
        self._ended = True
        try:
            self.on_end(answer, error)
        finally:
            if not self._left:
                self.meta.give_back_answered(
                    self.unique, self.state, self.slot, self.sequence, self.generation
                )


class Begins:
    """The part of `MetaClient` that submits changes without a task."""

    def begin(
        self: MetaClient,
        inode: int,
        method: int,
        request,
        reply_type,
        on_end: OnEnd,
        *,
        uid: int = 0,
        gid: int = 0,
        file=None,
        unique: int = 0,
    ) -> SubmittedChange | None:
        """Submit a change without a task if nothing has to be awaited; else return None.

        None: there was no side effect. `unique`: the number of the kernel's request for which the change is
        made exactly once (see client/rpc/exactly_once). `on_end` gets the errors that `change` raises.
        """
        pool_map = self._view.map
        state = self._shards.get(pool_map.shard_of_partition[partition_of(inode)])
        if state is None or not state.session or not state.slots or state.waiting or self._closed:
            return None
        if file is not None and file.lost:
            return None
        shard = pool_map.shard_by_id.get(state.shard)
        if shard is None or shard.standbys:
            return None
        connection = self._dialer.live(shard.endpoints)
        if connection is None or connection is not state.met:
            return None
        once = self.once if unique else None
        if once is not None and once.knows(unique):
            return None
        self.counters["changes"] += 1
        slot, sequence = state.slots.popleft()
        sequence += 1
        if once is not None:
            once.note(state.record, slot, sequence, method, unique)
        else:
            unique = 0
        change = request.change
        change.uid, change.gid = uid, gid
        change.session, change.slot, change.sequence, change.map_epoch = (
            state.session,
            slot,
            sequence,
            pool_map.epoch,
        )
        begun = SubmittedChange(
            self,
            on_end,
            inode,
            method,
            request,
            reply_type,
            file,
            unique,
            state,
            slot,
            sequence,
            self._clock.boottime_s() + self._options.deadline_s,
        )
        begun.send(connection)
        return begun

    def go_on_with(
        self: MetaClient,
        sent: SentChange,
        inode: int,
        method: int,
        request_type,
        reply_type,
        on_end: OnEnd,
        unique: int,
    ) -> SubmittedChange:
        """The object that `begin` would have returned for a change sent by another module.

        The caller passes the result of the request to its `answered`.
        """
        begun = SubmittedChange(
            self,
            on_end,
            inode,
            method,
            request_type.FromString(sent.message),
            reply_type,
            None,
            unique,
            sent.state,
            sent.slot,
            sent.sequence,
            sent.deadline_s,
        )
        begun.was_sent(sent)
        return begun

    async def go_on(self: MetaClient, begun: SubmittedChange):
        """Continue a submitted change that met `begun.error`, as `change` does."""
        change = begun.request.change
        return await self.change(
            begun.inode,
            begun.method,
            begun.request,
            begun.reply_type,
            uid=change.uid,
            gid=change.gid,
            file=begun.file,
            begun=begun,
        )

    def give_back_answered(
        self: MetaClient, unique: int, state: ShardSession, slot: int, sequence: int, generation: int
    ) -> None:
        """Release the slot of a change. Its kernel's request, if there is one, has been answered."""
        if state.generation == generation:
            if unique:
                self.once.clear(state.record, slot)
            state.slots.append((slot, sequence))
            if state.waiting:
                state.wake()
