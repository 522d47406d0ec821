"""Operations on ranges at stores: extents (allocated blocks) and copies between chunks.

The guarantees are those of `chunk_client`, whose target queues, request ids and retries are used: a copy has
one request id, and is retried under that id until the store answers; every operation ends by its deadline.
Used by vfs.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from nvpool.client.data.chunk_client import ChunkClient
from nvpool.client.data.unstable_writes import Stored
from nvpool.client.rpc.backoff import reason_of
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core.errors import (
    CorruptFrame,
    NotSupported,
    NvpoolError,
    Stale,
    StaleCut,
    StaleEpoch,
    StaleGrant,
    Unavailable,
)
from nvpool.core.grants import READ, WRITE
from nvpool.core.units import BLOCK_BITS
from nvpool.poolmap.chains.data_loss import may_have_lost
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, wire_pb2

_EXTENT = struct.Struct("<III")
PATIENCE_S = 2.0
"""Time for a target's reply about extents, before another replica is asked.

It doubles with each failed attempt at a target, as the target may have much to report.
"""
_LONGER_MAX = 4


class Extents(NamedTuple):
    """The allocated ranges of a file between the bytes `begin` and `end`.

    `runs` are (first byte, byte behind the last), in order; no two of them touch.
    """

    begin: int
    end: int
    runs: list[tuple[int, int]]


class ExtentClient:
    """Extents and copies at stores."""

    def __init__(self, chunks: ChunkClient, dialer, clock):
        self._chunks = chunks
        self._dialer = dialer
        self._clock = clock

    async def extents(self, file: OpenInode, begin: int, end: int, deadline_s: float) -> Extents:
        """Fetch the extents of the file, starting with the chunk of byte `begin`.

        The result ends at `end`, or before that if one reply does not hold more. Asks each target once,
        unless some are silent.
        """
        chunks = range(begin >> file.chunk_bits, (end - 1 >> file.chunk_bits) + 1)
        failures: Counter[int] = Counter()
        while True:
            epoch = self._chunks.epoch
            holders = self._chunks.replicas.holders(file, chunks, failures)
            targets = sorted(set(holders.values()))
            # No target is waited for to the deadline: while one is silent, another replica may answer or the
            # map change.
            patience_s = PATIENCE_S * 2 ** min(max(failures[target] for target in targets), _LONGER_MAX)
            until_s = min(deadline_s, self._clock.boottime_s() + patience_s)
            asked = asyncio.gather(
                *[self._ask(file, target, chunks, until_s) for target in targets], return_exceptions=True
            )
            try:
                answers = await self._chunks.unless_moved(
                    asked, partial(self._have_moved, file, chunks, holders)
                )
            except StaleEpoch:
                continue
            failed = {
                target: error
                for target, error in zip(targets, answers, strict=True)
                if isinstance(error, BaseException)
            }
            for target, error in failed.items():
                if not isinstance(error, Unavailable) or self._clock.boottime_s() >= deadline_s:
                    raise error
                failures[target] += 1
            # otherwise a chunk may have moved to a target that was not asked
            if not failed and epoch == self._chunks.epoch:
                break
        # a target may have chunks of other chains, which are not its own any more, or not yet
        if len(targets) > 1:
            answers = [
                ([extent for extent in extents if holders[chain_of(file.inode, extent[0])] == target], upto)
                for target, (extents, upto) in zip(targets, answers, strict=True)
            ]
        until = min((upto for _, upto in answers), default=chunks.stop)
        found = sorted(
            {extent for extents, _ in answers for extent in extents if extent[0] < until}
            | set(self._lost(file, range(chunks.start, until)))
        )
        runs: list[tuple[int, int]] = []
        for index, first, count in found:
            start = (index << file.chunk_bits) + (first << BLOCK_BITS)
            stop = start + (count << BLOCK_BITS)
            if runs and runs[-1][1] >= start:
                runs[-1] = runs[-1][0], max(runs[-1][1], stop)
            else:
                runs.append((start, stop))
        return Extents(chunks.start << file.chunk_bits, min(end, until << file.chunk_bits), runs)

    def _lost(self, file: OpenInode, chunks: range) -> Iterator[tuple[int, int, int]]:
        """Chunks that may have lost data. They must not count as holes: a read of them reports the loss."""
        pool_map = self._chunks.replicas.pool_map
        if pool_map.losses:
            for index in chunks:
                if may_have_lost(pool_map, self._chunks.chain(file, index), file.inode):
                    yield index, 0, file.chunk_mask + 1 >> BLOCK_BITS

    def _have_moved(self, file: OpenInode, chunks: range, holders: Mapping[int, int]) -> bool:
        return any(
            target not in self._chunks.replicas.of_chain(file, number).readable
            for number, target in holders.items()
        )

    async def _ask(self, file: OpenInode, target: int, chunks: range, deadline_s: float) -> tuple[list, int]:
        tries = 0
        while True:
            request = data_pb2.ExtentsRequest(
                map_epoch=self._chunks.epoch,
                target=target,
                grant=file.grant,
                inode=file.inode,
                first=chunks.start,
                until=chunks.stop,
            )
            try:
                raw = await self._chunks.ask_target(target, wire_pb2.DATA_EXTENTS, request, deadline_s)
                break
            except StaleGrant as error:
                tries += 1
                await self._chunks.mend(file, error, error, tries, deadline_s, file.grant_rights)
        reply = decoded(data_pb2.ExtentsReply, raw)
        if len(reply.extents) % _EXTENT.size or (reply.more and not chunks.start < reply.next <= chunks.stop):
            raise CorruptFrame("malformed reply about extents")
        return list(_EXTENT.iter_unpack(reply.extents)), reply.next if reply.more else chunks.stop

    def one_target(self, source: OpenInode, from_index: int, file: OpenInode, index: int) -> bool:
        """Whether one target can copy between the chunks: it is the only target of both."""
        chain, other = self._chunks.chain(file, index), self._chunks.chain(source, from_index)
        return len(chain.targets) == 1 and not chain.joining and other.targets == chain.targets

    async def copy(
        self,
        source: OpenInode,
        from_offset: int,
        file: OpenInode,
        offset: int,
        length: int,
        deadline_s: float,
    ) -> tuple[Stored, int]:
        """Copy whole blocks within a chunk of `source` to a chunk of `file` on the same target.

        Returns the unstable write to commit, and the number of bytes that were not holes. StaleCut, NoSpace:
        as for writes. ChecksumMismatch: the source is damaged. BytesLost: one of the chunks may have lost
        data.
        """
        return await self._chunks.named(
            lambda *name: self._copy(source, from_offset, file, offset, length, *name, deadline_s), deadline_s
        )

    async def _copy(
        self,
        source: OpenInode,
        from_offset: int,
        file: OpenInode,
        offset: int,
        length: int,
        slot: int,
        sequence: int,
        deadline_s: float,
    ) -> tuple[Stored, int]:
        chunks = self._chunks
        tries = 0
        reason: NvpoolError | None = None
        while True:
            try:
                index, from_index = offset >> file.chunk_bits, from_offset >> source.chunk_bits
                if not self.one_target(source, from_index, file, index):
                    raise NotSupported("the chunks are no longer on one target alone")
                chain = chunks.chain(file, index)
                lane, cut = chunks.lane(chain.targets[0]), file.cut
                request = data_pb2.CopyRequest(
                    map_epoch=chunks.epoch,
                    target=lane.target,
                    read_grant=source.grant,
                    write_grant=file.grant,
                    from_inode=source.inode,
                    from_index=from_index,
                    from_offset=from_offset & source.chunk_mask,
                    inode=file.inode,
                    index=index,
                    offset=offset & file.chunk_mask,
                    length=length,
                    cut=cut,
                    session=file.grant_session,
                    slot=slot,
                    sequence=sequence,
                )
                source.grant_used = file.grant_used = True
                call = self._dialer.call(
                    lane.endpoints, wire_pb2.DATA_COPY, request.SerializeToString(), deadline_s=deadline_s
                )
                reply = await chunks.unless_moved(call, lambda: chunks.chain(file, index) != chain)  # noqa: B023
                chunks.short.forget_chunk(file, index)
                answer = decoded(data_pb2.CopyReply, reply.message)
                return chunks.replicas.stored(file, index, chain.epoch, cut), answer.bytes
            except StaleCut:
                raise
            except (Stale, Unavailable, CorruptFrame) as error:
                tries, reason = tries + 1, reason_of(error, reason)
                if isinstance(error, StaleGrant):
                    await chunks.mend(source, error, reason, tries, deadline_s, READ)
                await chunks.mend(file, error, reason, tries, deadline_s, WRITE)
