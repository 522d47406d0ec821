"""Handlers of checks, dumps, snapshots and collections. Made by `meta/server/service`.

Long work runs in steps, so that other requests get their turn.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core.errors import InvalidRequest
from nvpool.meta.admin_jobs import JobReply, dump_step, fsck_step, settle_sums
from nvpool.meta.dump import Dump
from nvpool.meta.fsck.directory_connectivity import climb
from nvpool.meta.fsck.walker import Fsck
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.internal_changes import InternalChanges
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.rpc.api import Call
from nvpool.rpc.messages.fsck_sums import pack_bits
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire


class AdminHandlers:
    """Requests of tools that check, dump or clean a shard."""

    def __init__(self, parts: ShardParts, replies: CallReplies, internal: InternalChanges) -> None:
        self._shard = parts.shard
        self._clock = parts.clock
        self._kv = parts.kv
        self._view = parts.view
        self._sessions = parts.sessions
        self._numbers = parts.numbers
        self._runs = parts.runs
        self._watches = parts.watches
        self._collector = parts.collector
        self._cuts = parts.cuts
        self._ranges = parts.ranges
        self._moment = parts.moment
        self._waits = parts.waits
        self._replies = replies
        self._internal = internal

    def routes(self) -> dict[int, Callable[[Call], None]]:
        """Handlers by method."""
        return {
            wire.META_COLLECT: self._collect,
            wire.META_FSCK: self._fsck,
            wire.META_FSCK_SUMS: self._fsck_sums,
            wire.META_FSCK_CLIMB: self._fsck_climb,
            wire.META_MOMENT: self._take_moment,
            wire.META_DUMP: self._dump,
        }

    def _collect(self, call: Call) -> None:
        async def run() -> None:
            removed, left = await self._collector.run_once()
            removed += await self._collector.sweep_all()
            call.reply(pb.CollectReply(inodes=removed, left=left).SerializeToString())

        self._waits.add(call, run, lambda: None)

    def _make_fsck(self, repair: bool, partitions: tuple[int, ...] | None = None) -> Fsck:
        return Fsck(
            self._kv,
            self._view,
            self._sessions,
            self._collector,
            self._cuts.begin,
            self._clock.wall_ns,
            repair,
            partitions,
        )

    def _fsck(self, call: Call) -> None:
        request = pb.FsckRequest.FromString(bytes(call.message))
        self._replies.reply_job(
            call,
            fsck_step(
                self._runs,
                request,
                self._kv,
                self._view,
                self._numbers,
                self._make_fsck,
                self._internal.carry_out,
            ),
            self._watches.end_all if request.repair else None,
        )

    def _fsck_sums(self, call: Call) -> None:
        request = pb.FsckSumsRequest.FromString(bytes(call.message))
        self._replies.reply_job(
            call,
            settle_sums(request, self._kv, self._make_fsck(request.repair, ()), self._internal.carry_out),
            self._watches.end_all if request.repair else None,
        )

    def _fsck_climb(self, call: Call) -> None:
        request = pb.FsckClimbRequest.FromString(bytes(call.message))
        work = self._make_fsck(False, ())

        async def run() -> JobReply:
            return JobReply(await climb(request, work.tree, self._kv, work.is_here, self._internal.carry_out))

        self._replies.reply_job(call, run(), self._watches.end_all if request.loose else None)

    def _take_moment(self, call: Call) -> None:
        request, moment = pb.MomentRequest.FromString(bytes(call.message)), self._moment
        if request.stage == pb.MomentRequest.QUIET:
            self._replies.reply_after(
                call, lambda: moment.quiet(request.id), pb.MomentReply().SerializeToString()
            )
            return
        reply = pb.MomentReply()
        if request.stage not in (pb.MomentRequest.TAKE, pb.MomentRequest.END):
            raise InvalidRequest(f"a moment has no stage {request.stage}")
        if request.stage == pb.MomentRequest.TAKE:
            moment.take(request.id)
            self._runs.make_room()
            reply.cursor = self._runs.cursor(
                Dump(self._view, self._shard) if request.dump else self._make_fsck(request.repair)
            )
            reply.partitions = pack_bits(self._ranges.ours())
        else:
            reply.stood = moment.end(request.id)
            self._runs.drop(request.drop)
        call.reply(reply.SerializeToString())

    def _dump(self, call: Call) -> None:
        request = pb.DumpRequest.FromString(bytes(call.message))
        answer = dump_step(self._runs, request, self._view, self._shard)
        call.reply(answer.message.SerializeToString(), (answer.payload,) if answer.payload else ())
