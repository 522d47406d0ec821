"""Server side of chunk transfer between chain members, and the encoding of transferred chunks.

The server answers only services of the pool, only for chains that this target holds by its own map, and only
if the requester does not know a newer map. So the requester gets the state of the chain, and every write
after the answer is passed on to the requester.

The users are `store/server/service` (`TransferServer`) and `store/replication/resync` (the rest).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nvpool.core.errors import Busy, CorruptFrame, InvalidRequest, NvpoolError, WrongTarget
from nvpool.core.units import BLOCK_BYTES, MIB
from nvpool.poolmap.chains.protocol import of_old_floor
from nvpool.poolmap.chains.tables import decode_chains
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.api import CHUNK_BLOCKS_MAX, ChunkCopy, ChunkStore, ChunkVersion, InodeCut
from nvpool.store.replication.role import Replica

CHUNK_VERSION = struct.Struct("<QIIQQB")
INODE_CUT = struct.Struct("<QQQI")
WANTED = struct.Struct("<QIIII")
_REQUEST = struct.Struct("<QQH")
_RUN = struct.Struct("<II")
VERSIONS_MAX = 4096
"""Chunk versions in one answer: 135 KiB."""
FETCH_BYTES = 4 * MIB
"""Bytes in one answer, and in one piece of a chunk.

An answer below this limit may exceed it with its last chunk.
"""
FETCH_CHUNKS_MAX = 64


class TransferServer:
    """Handlers of transfer requests.

    The service supplies these callbacks: `parse` decodes and checks the message of a call, `authority` raises
    AccessDenied unless the caller is a service, and `later` runs the work of a call in a task.
    """

    def __init__(
        self,
        store: ChunkStore,
        replica: Replica,
        target: int,
        *,
        parse: Callable[[Any, Call], Any],
        authority: Callable[[bytes], None],
        later: Callable[[Call, Coroutine], None],
        busy: Callable[[], bool],
    ) -> None:
        self._store = store
        self._replica = replica
        self._target = target
        self._parse, self._authority, self._later, self._busy = parse, authority, later, busy
        self._map: PoolMap | None = None
        self._turns = asyncio.Semaphore(2)
        """Further fetches wait: requests of clients are more important than a target that catches up."""
        self.active = 0
        self._cuts: dict[int, int] = {}

    def update_map(self, pool_map: PoolMap) -> None:
        self._map = pool_map

    @contextmanager
    def cutting(self, inode: int) -> Iterator[None]:
        """Mark the inode as being truncated here: its chunks may still have bytes to be removed."""
        self._cuts[inode] = self._cuts.get(inode, 0) + 1
        try:
            yield
        finally:
            self._cuts[inode] -= 1
            if not self._cuts[inode]:
                del self._cuts[inode]

    def versions(self, call: Call) -> None:
        request = self._parse(pb.VersionsRequest, call)
        self._authority(request.authority)
        chains = decode_chains(request.chains)
        self._check(request.map_epoch, chains)
        if any(chain in chains for chain in self._replica.settling()):
            raise Busy("a write from before somebody joined the chain is not decided", retry_after_s=0.02)
        after = (request.after_inode, request.after_index) if request.begun else None
        step = self._store.versions(after, max(1, min(request.limit or VERSIONS_MAX, VERSIONS_MAX)), chains)
        end = step.end or (0, 0)
        call.reply(
            pb.VersionsReply(
                map_epoch=self._epoch,
                more=step.end is not None,
                end_inode=end[0],
                end_index=end[1],
                chunks=b"".join(
                    [
                        CHUNK_VERSION.pack(inode, index, blocks, version, cut, table)
                        for inode, index, table, version, cut, blocks in step.chunks
                    ]
                ),
                inodes=b"".join([INODE_CUT.pack(*one) for one in step.inodes]),
                busy=self._busy(),
                used_bytes=self._store.status()["used_bytes"],
                split_floors=True,
            ).SerializeToString()
        )

    def fetch(self, call: Call) -> None:
        request = self._parse(pb.FetchRequest, call)
        self._authority(request.authority)
        if len(request.chunks) % WANTED.size or not 0 < len(request.chunks) <= FETCH_CHUNKS_MAX * WANTED.size:
            raise InvalidRequest(f"{len(request.chunks)} bytes are not 1 to {FETCH_CHUNKS_MAX} whole entries")
        wanted = list(WANTED.iter_unpack(request.chunks))
        self._check(
            request.map_epoch, ((table, chain_of(inode, index)) for inode, index, table, _, _ in wanted)
        )
        self._later(call, self._fetch(call, wanted))

    async def _fetch(self, call: Call, wanted: list[tuple[int, int, int, int, int]]) -> None:
        self.active += 1
        try:
            async with self._turns:
                chunks, payload = await self._copies(call, wanted)
        finally:
            self.active -= 1
        call.reply(
            pb.FetchReply(map_epoch=self._epoch, chunks=chunks, busy=self._busy()).SerializeToString(),
            payload,
        )

    async def _copies(
        self, call: Call, wanted: list[tuple[int, int, int, int, int]]
    ) -> tuple[list[pb.FetchedChunk], list]:
        chunks: list[pb.FetchedChunk] = []
        payload, total = [], 0
        for inode, index, _, first, blocks in wanted:
            if total >= FETCH_BYTES or call.cancelled:
                break
            pending = inode in self._cuts or self._replica.is_pending([(inode, index)])
            try:
                copy = await self._store.fetch(
                    inode,
                    index,
                    min(first, CHUNK_BLOCKS_MAX),
                    max(1, min(blocks, FETCH_BYTES // BLOCK_BYTES)),
                )
            except NvpoolError as error:
                chunks.append(pb.FetchedChunk(inode=inode, index=index, status=error.wire_code))
                continue
            # A write that was pending when the bytes were read is still pending, or was decided since; both
            # count.
            pending = pending or inode in self._cuts or self._replica.is_pending([(inode, index)])
            chunks.append(encode_copy(copy, pending))
            payload.append(copy.content)
            total += len(copy.content)
            await asyncio.sleep(0)
        return chunks, payload

    @property
    def _epoch(self) -> int:
        return self._map.epoch if self._map is not None else 0

    def _check(self, epoch: int, chains: Iterable[tuple[int, int]]) -> None:
        """Check a request's map and chains.

        Busy: our map is older than the caller's. WrongTarget: by our map, a chain is not held here.
        """
        if self._map is None:
            return
        if epoch > self._epoch:
            raise Busy(f"this target knows the map {self._epoch}, not yet {epoch}", retry_after_s=0.1)
        for table, number in chains:
            of_table = self._map.table_by_id.get(table)
            if of_table is None or self._target not in of_table.chains[number].targets:
                raise WrongTarget(f"chain {number} of table {table} is not held here")


def encode_copy(copy: ChunkCopy, pending: bool) -> pb.FetchedChunk:
    """Encode a chunk without its content."""
    return pb.FetchedChunk(
        inode=copy.inode,
        index=copy.index,
        pending=pending,
        version=copy.version,
        table=copy.table,
        cut=copy.cut,
        requests=b"".join(
            [_REQUEST.pack(session, sequence, slot) for session, slot, sequence in copy.requests]
        ),
        inode_cut=copy.known.cut,
        floor=copy.known.floor,
        chunk_bits=copy.known.chunk_bits,
        runs=b"".join([_RUN.pack(*run) for run in copy.runs]),
        checksums=copy.checksums,
        bad=copy.bad,
        more=copy.more,
        split_floor=True,
    )


def decode_copy(one: pb.FetchedChunk, content: memoryview) -> ChunkCopy:
    try:
        return ChunkCopy(
            one.inode,
            one.index,
            one.version,
            one.table or 1,
            one.cut,
            tuple(
                [(session, slot, sequence) for session, sequence, slot in _REQUEST.iter_unpack(one.requests)]
            ),
            InodeCut(
                one.inode,
                one.inode_cut,
                one.floor if one.split_floor else of_old_floor(one.floor),
                one.chunk_bits,
            ),
            tuple(_RUN.iter_unpack(one.runs)),
            one.checksums,
            content,
            tuple(one.bad),
            one.more,
        )
    except struct.error:
        raise CorruptFrame("a fetched chunk that cannot be read came") from None


def decode_versions(reply: pb.VersionsReply) -> tuple[list[ChunkVersion], list[InodeCut]]:
    try:
        return (
            [
                ChunkVersion(inode, index, table, version, cut, blocks)
                for inode, index, blocks, version, cut, table in CHUNK_VERSION.iter_unpack(reply.chunks)
            ],
            [
                InodeCut(inode, cut, floor if reply.split_floors else of_old_floor(floor), chunk_bits)
                for inode, cut, floor, chunk_bits in INODE_CUT.iter_unpack(reply.inodes)
            ],
        )
    except struct.error:
        raise CorruptFrame("a listing of versions that cannot be read came") from None


def decode_fetched(reply: pb.FetchReply, payload: memoryview) -> list[tuple[pb.FetchedChunk, ChunkCopy]]:
    """Return the chunks of an answer, each with its part of the payload.

    CorruptFrame: the sizes do not match.
    """
    found, at = [], 0
    for one in reply.chunks:
        length = len(one.checksums) // 4 * BLOCK_BYTES
        found.append((one, decode_copy(one, payload[at : at + length])))
        at += length
    if at != len(payload):
        raise CorruptFrame(f"{len(payload)} bytes came with chunks of {at}")
    return found


def wanted_entries(chunks: Iterable[tuple[int, int, int, int, int]]) -> bytes:
    """Encode (inode, index, table, first block, blocks) entries."""
    return b"".join([WANTED.pack(*one) for one in chunks])
