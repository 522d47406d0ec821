"""Changes that are begun without a task: sent at once, and told of in the callback of their answer. A part of
`client/rpc/meta_client`.

Most changes find all that they need: a session, a free slot, a connection, a shard without standbys. Those cost neither a
coroutine nor a turn of the loop here, and whoever began one may answer before he keeps his books. What does not find it is not
begun: it goes the way of `MetaClient.change`, before anything has happened. What was begun and meets anything but an answer of
the service goes on there too, under the name that it has: so nothing here repeats, and a change is made once as always.
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


class Sent(NamedTuple):
    """A change that somebody else has sent as `begin` does, its slot noted before: `message` is the request's."""

    message: bytes
    sent_s: float
    deadline_s: float
    connection: Any
    number: int
    state: ShardSession
    slot: int
    sequence: int
    generation: int


class Begun:
    """A change on its way. `on_end` is called once with (answer, None) or (None, error), never before `begin` has returned. The
    slot is free again when that returns, unless it was left to the kernel's request before."""

    __slots__ = ("meta", "on_end", "inode", "method", "request", "reply_type", "file", "unique", "state", "slot", "sequence",
                 "generation", "deadline_s", "error", "_connection", "_number", "_task", "_ended", "_left")

    def __init__(self, meta: MetaClient, on_end: OnEnd, inode: int, method: int, request, reply_type, file, unique: int,
                 state: ShardSession, slot: int, sequence: int, deadline_s: float) -> None:
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
        """With which it goes on in `MetaClient.change`."""
        self._connection = None
        self._number = 0
        self._task: asyncio.Task | None = None
        self._ended = self._left = False

    def send(self, connection) -> None:
        self._connection = connection
        self._number = connection.submit(self.method, self.request.SerializeToString(), deadline_s=self.deadline_s,
                                         on_done=self.answered)

    def was_sent(self, sent: Sent) -> None:
        """Instead of `send`."""
        self._connection, self._number, self.generation = sent.connection, sent.number, sent.generation

    def leave(self) -> None:
        """The slot is held until the kernel's request is answered: more is done for that."""
        if not self._left:
            self._leave()

    def _leave(self) -> None:
        self._left = True
        self.meta.leave(self.unique, self.state, self.slot, self.sequence, self.generation)

    def cancel(self) -> bool:
        """`on_end` is told a CancelledError, now or when what goes on has ended; it may be carried out all the same. False
        where it has ended."""
        if self._ended:
            return False
        if self._task is not None:
            return self._task.cancel()
        self._connection.give_up(self._number)
        self.meta.lost_sight()
        self._end(None, asyncio.CancelledError())
        return True

    def answered(self, reply: Reply | None, error: BaseException | None) -> None:
        """What came of it, once."""
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
        self._left = True  # what goes on sees to the slot
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
                self.meta.give_back_answered(self.unique, self.state, self.slot, self.sequence, self.generation)


class Begins:
    def begin(self: MetaClient, inode: int, method: int, request, reply_type, on_end: OnEnd, *, uid: int = 0, gid: int = 0,
              file=None, unique: int = 0) -> Begun | None:
        """`change`, sent already, where that can be done on the spot; else None, and nothing has happened. `unique`: of the
        kernel's request, where it is to be made once for that (client/rpc/exactly_once). Errors come to `on_end` as `change`
        raises them."""
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
        change.session, change.slot, change.sequence, change.map_epoch = state.session, slot, sequence, pool_map.epoch
        begun = Begun(self, on_end, inode, method, request, reply_type, file, unique, state, slot, sequence,
                      self._clock.boottime_s() + self._options.deadline_s)
        begun.send(connection)
        return begun

    def go_on_with(self: MetaClient, sent: Sent, inode: int, method: int, request_type, reply_type, on_end: OnEnd,
                   unique: int) -> Begun:
        """What `begin` would have returned for it. What has come of it is to be told to its `answered`."""
        begun = Begun(self, on_end, inode, method, request_type.FromString(sent.message), reply_type, None, unique, sent.state,
                      sent.slot, sent.sequence, sent.deadline_s)
        begun.was_sent(sent)
        return begun

    async def go_on(self: MetaClient, begun: Begun):
        """What was begun has met `begun.error`: go on with it as `change` does."""
        change = begun.request.change
        return await self.change(begun.inode, begun.method, begun.request, begun.reply_type, uid=change.uid, gid=change.gid,
                                 file=begun.file, begun=begun)

    def give_back_answered(self: MetaClient, unique: int, state: ShardSession, slot: int, sequence: int,
                           generation: int) -> None:
        """The slot of a change whose request of the kernel, if there is one, was answered."""
        if state.generation == generation:
            if unique:
                self.once.clear(state.record, slot)
            state.slots.append((slot, sequence))
            if state.waiting:
                state.wake()

