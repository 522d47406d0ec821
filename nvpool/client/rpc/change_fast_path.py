"""Fast path for metadata changes: sends the request immediately and completes in the reply callback.

If a session, a free slot and a live connection to the shard's primary are ready, no task is created and no
event-loop iteration passes; the caller may answer its own request before it updates its state. Otherwise
`MetaClient.begin` returns None, has no side effect, and the caller awaits `MetaClient.change`.

A submitted change that gets anything but a reply of the service continues in `MetaClient.change` under the
same request id. So this module never retries, and a change is executed exactly once as always. A part of
`client/rpc/meta_client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from nvpool.client.rpc.slot_journal import SlotJournal
from nvpool.client.state.shard_session import ShardSession
from nvpool.core import primitives
from nvpool.core.clock import Clock, SystemClock
from nvpool.core.errors import CorruptFrame, Refused, Stale, StaleEpoch, StaleSession, WrongShard
from nvpool.core.ids import COUNTER_BITS
from nvpool.rpc.api import Reply
from nvpool.rpc.transports import request_submission

OnEnd = Callable[[Any, BaseException | None], None]
_TO_BE_MENDED = (StaleSession, StaleEpoch, WrongShard)
_COUNTER_BITS = COUNTER_BITS


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


class ChangeOwner(Protocol):
    """Interface of the metadata client that its submitted changes use."""

    def leave(self, unique: int, state: ShardSession, slot: int, sequence: int, generation: int) -> None:
        """Release the slot when the kernel's request is answered."""

    @property
    def once(self) -> SlotJournal | None:
        """The record of kernel requests with changes."""

    def lost_sight(self) -> None:
        """End all leases after a change with an unknown outcome."""

    async def go_on(self, begun: SubmittedChange) -> Any:
        """Continue a submitted change that met `begun.error`, as `change` does."""


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
        "task",
        "_ended",
        "_left",
    )

    def __init__(
        self,
        meta: ChangeOwner,
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
        self.task: asyncio.Task | None = None
        self._ended = self._left = False

    def send(self, connection: Any, now_s: float) -> None:
        """Send the request."""
        self._connection = connection
        message: bytes = self.request.SerializeToString()
        self._number = request_submission.submit(
            connection, self.method, message, None, self.deadline_s, now_s, self
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
        if self.task is not None:
            return self.task.cancel()
        self._connection.give_up(self._number)
        self.meta.lost_sight()
        self._end(None, asyncio.CancelledError())
        return True

    def __call__(self, reply: Reply | None, error: BaseException | None) -> None:
        """As `answered`."""
        self.answered(reply, error)

    def answered(self, reply: Reply | None, error: BaseException | None) -> None:
        """Handle the result of the request, once."""
        if self._ended or self.task is not None:
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
        self.task = asyncio.get_running_loop().create_task(self.meta.go_on(self))
        self.task.add_done_callback(self._gone_on)

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
                once = self.meta.once if self.unique else None
                give_back(once, self.state, self.slot, self.sequence, self.generation)


def give_back(once: SlotJournal | None, state: Any, slot: int, sequence: int, generation: int) -> None:
    """Release the slot of a change that is over, if its session is still the present one.

    `once`: has a record of the slot, for a kernel request that has been answered; None: there is no record.
    """
    if state.generation == generation:
        if once is not None:
            once.clear(state.record, slot)
        state.slots.append((slot, sequence))
        if state.waiting:
            state.wake()


class ChangeSubmitter:
    """Submits changes for `meta`, whose sessions and slots it uses."""

    def __init__(self, meta: Any, clock: Clock) -> None:
        self._meta = meta
        self._clock = clock
        self._is_system = type(clock) is SystemClock
        self._shards: dict[int, ShardSession] = meta.shards
        self._counters: dict[str, int] = meta.counters
        self._view, self._dialer, self._once = meta.view, meta.dialer, meta.once

    def begin(
        self,
        inode: int,
        method: int,
        request: Any,
        reply_type: Any,
        on_end: OnEnd,
        uid: int,
        gid: int,
        file: Any,
        unique: int,
    ) -> SubmittedChange | None:
        """As MetaClient.begin."""
        meta = self._meta
        pool_map: Any = self._view.map
        state: Any = self._shards.get(pool_map.shard_of_partition[inode >> _COUNTER_BITS])
        if state is None or not state.session or not state.slots or state.waiting or meta.closed:
            return None
        if file is not None and file.lost:
            return None
        shard: Any = pool_map.shard_by_id.get(state.shard)
        if shard is None:
            return None
        connection: Any = self._dialer.by_endpoints.get(shard.endpoints)
        if connection is None or connection is not state.met or connection.closed:
            return None
        once: Any = self._once if unique else None
        if once is not None and once.knows(unique):
            return None
        self._counters["changes"] += 1
        slot, sequence = state.slots.popleft()
        sequence += 1
        if once is not None:
            once.note(state.record, slot, sequence, method, unique)
        else:
            unique = 0
        change = request.change
        change.uid, change.gid = uid, gid
        change.session, change.slot, change.sequence = state.session, slot, sequence
        change.map_epoch = pool_map.epoch
        now_s = primitives.boottime_s() if self._is_system else self._clock.boottime_s()
        begun = SubmittedChange(
            meta,
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
            now_s + meta.options.deadline_s,
        )
        begun.send(connection, now_s)
        return begun
