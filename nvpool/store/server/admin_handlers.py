"""Handlers of admin requests: a scrub step, a scrub round, the copy of a chunk from another target.

`store/server/service` creates them. The service checks access and reports their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine

from nvpool.core.errors import NotSupported
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.maintenance.background import BackgroundWork


class StoreAdminHandlers:
    def __init__(
        self,
        store: ChunkStore,
        upkeep: BackgroundWork | None,
        *,
        parse: Callable,
        authority: Callable[[bytes], None],
        later: Callable[[Call, Coroutine], None],
        epoch: Callable[[], int],
    ) -> None:
        self._store = store
        self._upkeep = upkeep
        self._parse = parse
        self._authority = authority
        self._later = later
        self._epoch = epoch

    def scrub(self, call: Call) -> None:
        request = self._parse(pb.ScrubRequest, call)
        self._later(call, self._scrub(call, request))

    async def _scrub(self, call: Call, request: pb.ScrubRequest) -> None:
        step = await self._store.scrub(request.cursor, request.blocks, request.repair)
        if request.repair and step.bad and self._upkeep is not None:
            good = await self._upkeep.repair.repaired(step.bad)
            step = step._replace(
                bad=[one for one in step.bad if one not in good],
                mended=[
                    *step.mended,
                    *[
                        f"block {one.block} of chunk {one.index} of inode {one.inode} {one.text}; it is rewritten"
                        for one in good
                    ],
                ],
            )
        reply = pb.ScrubReply(
            cursor=step.cursor,
            done=step.done,
            blocks=step.blocks,
            problems=step.problems,
            mended=step.mended,
            map_epoch=self._epoch(),
            bad=[pb.BadBlock(**one._asdict()) for one in step.bad],
        )
        call.reply(reply.SerializeToString())

    def scrub_order(self, call: Call) -> None:
        request = self._parse(pb.ScrubOrderRequest, call)
        self._authority(request.authority)
        rounds = self._of_others().rounds
        rounds.order(request.order)
        call.reply(pb.ScrubOrderReply(map_epoch=self._epoch(), scrubbing=rounds.status()).SerializeToString())

    def pull(self, call: Call) -> None:
        request = self._parse(pb.PullRequest, call)
        self._authority(request.authority)
        self._of_others()
        self._later(call, self._pull(call, request))

    async def _pull(self, call: Call, request: pb.PullRequest) -> None:
        version = await self._of_others().resync.level(
            request.table, request.inode, request.index, request.source
        )
        call.reply(pb.PullReply(map_epoch=self._epoch(), version=version).SerializeToString())

    def _of_others(self) -> BackgroundWork:
        if self._upkeep is None:
            raise NotSupported("this store does nothing by itself")
        return self._upkeep
