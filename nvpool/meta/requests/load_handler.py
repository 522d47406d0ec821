"""Handler of META_LOAD: fill an empty shard from a dump. Made by `meta/server/service`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nvpool.core.errors import InUse, InvalidRequest
from nvpool.meta.admin_jobs import JobReply, Load
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.state.shard_identity import has_root, take_identity
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire


class LoadHandler:
    """The load of a shard, in parts."""

    def __init__(
        self, parts: ShardParts, replies: CallReplies, begin_again: Callable[[], Awaitable[None]]
    ) -> None:
        """`begin_again` makes the shard serve the records that were loaded."""
        self._shard = parts.shard
        self._secret = parts.secret
        self._clock = parts.clock
        self._status = parts.status
        self._kv = parts.kv
        self._view = parts.view
        self._sessions = parts.sessions
        self._runs = parts.runs
        self._replies = replies
        self._begin_again = begin_again
        self._loading: Load | None = None

    def routes(self) -> dict[int, Callable[[Call], None]]:
        """Handlers by method."""
        return {wire.META_LOAD: self._load}

    def _load(self, call: Call) -> None:
        self._replies.reply_job(
            call, self._load_step(pb.LoadRequest.FromString(bytes(call.message)), bytes(call.payload))
        )

    async def _load_step(self, request: pb.LoadRequest, payload: bytes) -> JobReply:
        if request.first:
            if self._status.state == "serving" and (self._view.inode_count > 1 or self._sessions.by_number):
                raise InUse(
                    "metadata can only be loaded into a new pool: this one has files, or clients that are connected; "
                    "make an empty one with: nvpool pool create DIR --drive PATH"
                )
            self._status.state = "loading"
            self._runs.end_all()
            identity = take_identity(
                self._kv, self._shard, self._secret, self._status.pool_map, self._clock.wall_ns()
            )
            self._loading = Load(self._kv, identity, self._view, has_root(self._shard, self._status.pool_map))
            await self._loading.begin()
        load = self._loading
        if load is None:
            raise InvalidRequest("no load is under way; begin with the first part")
        try:
            await load.take(payload, request.first)
            if request.last:
                await load.end()
        except BaseException:
            self._loading = None  # the records are incomplete; only a load from the beginning completes them
            raise
        if request.last:
            self._loading = None
            await self._begin_again()
        return JobReply(pb.LoadReply(records=load.records))
