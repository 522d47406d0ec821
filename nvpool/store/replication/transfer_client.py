"""Client side of chunk transfer: requests chunk versions and chunks from other targets of the pool.

The client authorizes itself with a service grant that it signs with the pool's secret. It never repeats a
request. Every call has a deadline. A call ends earlier if the map says that the called target no longer
serves. The users are `store/replication/resync` and `store/maintenance/repair`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from google.protobuf.message import DecodeError

from nvpool.core.clock import Clock
from nvpool.core.errors import BY_WIRE_CODE, CorruptFrame, Damaged, NvpoolError
from nvpool.core.grants import SERVICE, Grant, sign
from nvpool.core.units import BLOCK_BYTES
from nvpool.poolmap.chains.tables import ChainSet, encode_chains
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.api import Reply
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.target_calls import TargetCalls
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import ChunkCopy, ChunkVersion, InodeCut
from nvpool.store.replication.transfer_server import (
    FETCH_BYTES,
    decode_fetched,
    decode_versions,
    wanted_entries,
)

CALL_S = 15.0
AUTHORITY_S = 600.0
_PIECE_BLOCKS = FETCH_BYTES // BLOCK_BYTES

Wanted = tuple[int, int, int]
"""Inode, chunk index, chain table."""


class ChunkListing(NamedTuple):
    chunks: list[ChunkVersion]
    inodes: list[InodeCut]
    end: tuple[int, int] | None
    """The last chunk that this listing covers; None: no chunk follows."""
    busy: bool
    used_bytes: int


class Fetched(NamedTuple):
    copy: ChunkCopy
    pending: bool
    """Whether a write to the chunk was undecided at the source."""
    damage: NvpoolError | None
    """Reason why the source cannot read the chunk; `copy` is meaningless then."""


class OtherTargets:
    def __init__(self, dialer: Dialer, secret: bytes, clock: Clock) -> None:
        self._calls = TargetCalls(dialer)
        self._secret = secret
        self._clock = clock
        self._authority = b""
        self._authority_ends_ms = 0

    def update_map(self, pool_map: PoolMap) -> None:
        self._calls.use_map(pool_map)

    async def versions(
        self, target: int, chains: ChainSet, after: tuple[int, int] | None, limit: int = 0
    ) -> ChunkListing:
        """List chunks of these chains on the target, after `after`.

        Any NvpoolError: of the connection, or as the target answers.
        """
        inode, index = after or (0, 0)
        request = pb.VersionsRequest(
            chains=encode_chains(chains),
            begun=after is not None,
            after_inode=inode,
            after_index=index,
            limit=limit,
        )
        answer = await self._ask(target, Method.DATA_VERSIONS, request)
        reply = _parsed(pb.VersionsReply, answer)
        chunks, inodes = decode_versions(reply)
        end = (reply.end_inode, reply.end_index) if reply.more else None
        if end is not None and after is not None and end <= after:
            raise CorruptFrame(f"target {target} goes in circles with its versions")
        return ChunkListing(chunks, inodes, end, reply.busy, reply.used_bytes)

    async def fetch(self, target: int, wanted: Sequence[Wanted]) -> tuple[list[Fetched], bool]:
        """Fetch chunks: the first ones of `wanted`, at least one, each complete.

        Also returns whether client requests wait at the target.
        """
        parts, busy = await self._parts(target, [(*one, 0, _PIECE_BLOCKS) for one in wanted])
        found = []
        for (inode, index, table), part in zip(wanted, parts, strict=False):
            if (part.copy.inode, part.copy.index) != (inode, index):
                raise CorruptFrame(f"target {target} answers with other chunks than were asked for")
            found.append(await self._whole(target, table, part))
        return found, busy

    async def blocks(self, target: int, wanted: Wanted, first: int, count: int) -> Fetched:
        """Fetch blocks of one chunk."""
        parts, _ = await self._parts(target, [(*wanted, first, count)])
        return parts[0]

    async def _whole(self, target: int, table: int, part: Fetched) -> Fetched:
        """Return the chunk that starts with `part`, with its other parts, all of one version."""
        parts, begun = [part.copy], part
        while parts[-1].more:
            first = len(parts) * _PIECE_BLOCKS
            (further, *_), _ = await self._parts(
                target, [(part.copy.inode, part.copy.index, table, first, _PIECE_BLOCKS)]
            )
            if further.damage is not None or further.copy.version != part.copy.version:
                # The chunk has changed in between. Mark it as having an undecided write, so that it is
                # requested again.
                return (
                    further
                    if further.damage is not None
                    else begun._replace(pending=True, copy=replace(part.copy, more=False))
                )
            parts.append(further.copy)
            begun = further
        if len(parts) == 1:
            return part
        whole = replace(
            parts[-1],
            runs=tuple([run for one in parts for run in one.runs]),
            checksums=b"".join([one.checksums for one in parts]),
            content=b"".join([one.content for one in parts]),
            bad=tuple([block for one in parts for block in one.bad]),
        )
        return begun._replace(copy=whole)

    async def _parts(
        self, target: int, wanted: Iterable[tuple[int, int, int, int, int]]
    ) -> tuple[list[Fetched], bool]:
        answer = await self._ask(target, Method.DATA_FETCH, pb.FetchRequest(chunks=wanted_entries(wanted)))
        reply = _parsed(pb.FetchReply, answer)
        found = []
        for one, copy in decode_fetched(reply, answer.payload):
            error = (
                BY_WIRE_CODE.get(one.status, NvpoolError)(f"target {target} cannot read it")
                if one.status
                else None
            )
            if error is not None and not isinstance(error, Damaged):
                raise error
            found.append(Fetched(copy, one.pending, error))
        if not found:
            raise CorruptFrame(f"target {target} answers with no chunk")
        return found, reply.busy

    async def _ask(self, target: int, method: int, request) -> Reply:
        pool_map = self._calls.map
        request.target, request.map_epoch, request.authority = (
            target,
            pool_map.epoch if pool_map else 0,
            self._right(),
        )
        return await self._calls.call(
            target, method, request.SerializeToString(), deadline_s=self._clock.boottime_s() + CALL_S
        )

    def _right(self) -> bytes:
        now_ms = self._clock.wall_ns() // 1_000_000
        if self._authority_ends_ms - now_ms < AUTHORITY_S * 500:
            self._authority_ends_ms = now_ms + int(AUTHORITY_S * 1000)
            self._authority = sign(Grant(SERVICE, 0, 0, 0, 0, self._authority_ends_ms), self._secret)
        return self._authority


def _parsed(kind, answer: Reply):
    try:
        return kind.FromString(bytes(answer.message))
    except DecodeError:
        raise CorruptFrame(f"no {kind.DESCRIPTOR.name} came") from None
