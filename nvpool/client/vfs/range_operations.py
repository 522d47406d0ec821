"""Ranges of open files: fallocate, holes, lseek, and copies made by the stores."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from typing import NamedTuple

from nvpool.client.data.chunk_ranges import Extents
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, FileHandle
from nvpool.client.vfs.attributes import PoolSpace
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.files import FileData
from nvpool.core.errors import (
    BadHandle,
    BeyondData,
    BytesLost,
    ChecksumMismatch,
    InvalidRequest,
    LockLost,
    NoSpace,
    NotSupported,
    StaleCut,
)
from nvpool.core.grants import WRITE
from nvpool.core.units import BLOCK_BYTES, MIB
from nvpool.poolmap.file_layout import check_range
from nvpool.rpc.v1 import meta_pb2, wire_pb2

COPY_BYTES_MAX = 64 * MIB
"""Bytes copied by one call, in a tenth of a second. Then the calling program may do something else."""
_COPIES_IN_PARALLEL = 8
_PIECE_BYTES = 4 * MIB
"""Bytes copied by a store in one request. Meanwhile the store does nothing else for some milliseconds."""
EXTENTS_S = 1.0
"""How long extents of a file are cached while no change is known.

A program that looks for holes asks for one place after the other.
"""
_EXTENTS_KEPT = 16


class _Seen(NamedTuple):
    change: int
    born_s: float
    extents: Extents


class _Piece(NamedTuple):
    """A part of a copy: offsets, length, and whether one store can copy it by itself."""

    source: int
    target: int
    length: int
    by_store: bool


class RangeOperations:
    """The operations on ranges of open files."""

    def __init__(self, parts: ClientParts, data: FileData, space: PoolSpace) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._meta = parts.meta
        self._cache = parts.cache
        self._chunks = parts.chunks
        self._ranges = parts.ranges
        self._reader = parts.reader
        self._writer = parts.writer
        self._rooms = parts.rooms
        self._inodes = parts.inodes
        self._unreported = parts.unreported
        self._data = data
        self._space = space
        self._extents_seen: dict[int, _Seen] = {}

    # -- fallocate -----------------------------------------------------------------------------------------------------

    async def fallocate(self, handle: FileHandle, offset: int, length: int, mode: int) -> None:
        """Allocate or punch a range of the file, as fallocate(2).

        PUNCH_HOLE (with KEEP_SIZE) and ZERO_RANGE make a hole of [offset, offset + length): on return no
        reader on any client sees the old bytes, and no power loss brings them back. ZERO_RANGE and mode 0
        extend the file to at least offset + length, unless KEEP_SIZE is given.

        Blocks are never reserved, since every write goes to new blocks. So mode 0 only checks that there is
        space now (else NoSpace) and sets the size. NotSupported: other modes (collapse, insert, unshare).
        """
        if not handle.writable or handle.closed:
            raise BadHandle("the handle is not open for writing")
        hole = bool(mode & (PUNCH_HOLE | ZERO_RANGE))
        if mode & ~(KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE) or (
            mode & PUNCH_HOLE and mode != PUNCH_HOLE | KEEP_SIZE
        ):
            raise NotSupported(f"fallocate with the mode {mode:#x}")
        if offset < 0 or length <= 0:
            raise InvalidRequest(f"{length} bytes at {offset} cannot be allocated")
        file = handle.file
        _check_locks(file)
        check_range(file.layout, offset, length)
        grow = not mode & KEEP_SIZE
        if not hole:
            await self._check_room(file, offset, length)
            if not grow or offset + length <= file.size:
                return
        if file.volume and grow:
            await self._unreported.settle(file.inode)  # the volume must count the bytes once
        request = meta_pb2.AllocateRequest(
            inode=file.inode, offset=offset, length=length, punch=hole, grow=grow, rights=file.grant_rights
        )
        if hole:
            # Written data is stored first, not dropped: if the service refuses the hole, the data must be
            # there.
            await self._writer.store(file)
            _check_locks(file)
            self._reader.changed(file)
            await self._writer.pause(file)
        try:
            self._inodes.take(
                await self._unreported.grow(
                    file,
                    lambda: self._meta.change(
                        file.inode, wire_pb2.META_ALLOCATE, request, meta_pb2.Entry, file=file, once=True
                    ),
                )
            )
        finally:
            if hole:
                self._writer.end_cut(file)
                self._reader.changed(file)
                self._cache.forget_attr(file.inode)  # the number of freed blocks is known only now

    async def _check_room(self, file: OpenInode, offset: int, length: int) -> None:
        """Raise NoSpace if the holes in the range do not fit into the free space."""

        def room() -> bool:
            return length <= space.blocks_available * space.block_bytes

        space = await self._space.statfs_of_pool()
        if room():
            return
        await self._unreported.settle(file.inode)
        place = end = offset + length
        size = min(end, file.size)
        if offset < size:
            place = offset
        while place < size:
            seen = await self._extents(file, place, size)
            length -= sum(max(0, min(last, size) - max(first, place)) for first, last in seen.runs)
            place = seen.end
        self._space.forget()
        space = await self._space.statfs_of_pool()
        if not room():
            raise NoSpace(
                f"{length} bytes are to be allocated, {space.blocks_available * space.block_bytes} are free"
            )

    # -- lseek ---------------------------------------------------------------------------------------------------------

    async def seek(self, handle: FileHandle, offset: int, whence: int) -> int:
        """The first offset at or behind `offset` with data (os.SEEK_DATA) or a hole (os.SEEK_HOLE).

        The unit is a block of 4 KiB; there is a hole behind the end of the file. BeyondData: there is no such
        place, or `offset` is outside the file.
        """
        if handle.closed:
            raise BadHandle("the handle is closed")
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise InvalidRequest(f"{whence} is neither SEEK_DATA nor SEEK_HOLE")
        file = handle.file
        _check_locks(file)
        await self._unreported.settle(file.inode)
        size = file.size
        if offset >= size and file.attr_born_s + self._options.attr_s <= self._clock.boottime_s():
            await self._inodes.look(file)
            size = file.size
        if not 0 <= offset < size:
            raise BeyondData
        place = offset
        while place < size:
            seen = await self._extents(file, place, size)
            number = bisect_right(seen.runs, place, key=lambda run: run[0]) - 1
            within = number >= 0 and place < seen.runs[number][1]
            if whence == os.SEEK_DATA:
                if within:
                    return place
                if number + 1 < len(seen.runs):
                    place = seen.runs[number + 1][0]
                    break
                place = seen.end
            elif not within:
                return place
            else:
                place = seen.runs[number][1]
        if place < size:
            return place
        if whence == os.SEEK_DATA:
            raise BeyondData
        return size

    async def _extents(self, file: OpenInode, place: int, size: int) -> Extents:
        """Extents around `place`, which is in the file.

        The caller has settled the file's writes; other writes are concurrent with this call.
        """
        now_s = self._clock.boottime_s()
        seen = self._extents_seen.get(file.inode)
        settled = file.written is None or not file.written.unsettled
        if (
            seen is not None
            and settled
            and seen.change == file.attr.change
            and self._cache.is_believed(seen.born_s, EXTENTS_S)
            and seen.extents.begin <= place < seen.extents.end
        ):
            return seen.extents
        change = file.attr.change
        found = await self._ranges.extents(file, place, size, now_s + self._options.deadline_s)
        self._extents_seen.pop(file.inode, None)
        if settled and (file.written is None or not file.written.unsettled) and file.attr.change == change:
            self._extents_seen[file.inode] = _Seen(change, now_s, found)
            if len(self._extents_seen) > _EXTENTS_KEPT:
                del self._extents_seen[next(iter(self._extents_seen))]
        return found

    # -- copy_file_range -----------------------------------------------------------------------------------------------

    async def copy_range(
        self, source: FileHandle, offset: int, target: FileHandle, to: int, length: int
    ) -> int:
        """Copy `length` bytes from `offset` of `source` to `to` of `target`; return the bytes copied.

        The result is smaller at the end of the source, above COPY_BYTES_MAX, or if the rest met an error; 0
        if `offset` is behind the end of the source.

        The store copies whole blocks of chunks that lie on one target, with the checksums of their writer;
        these bytes do not travel to the client. All other bytes are read and written, and their errors are
        reported later, as those of a write. Holes stay holes behind the old end of `target`. Earlier writes
        of this client to both files are included. InvalidRequest: the ranges overlap in one file.
        """
        if not source.readable or source.closed or not target.writable or target.append or target.closed:
            raise BadHandle("the handles are not open for reading and for writing at a place")
        if offset < 0 or to < 0 or length < 0:
            raise InvalidRequest(f"{length} bytes from {offset} to {to}")
        origin, file = source.file, target.file
        for one in {id(origin): origin, id(file): file}.values():
            _check_locks(one)
            await self._writer.store(one)
        if origin.written is not None and origin.written.error is not None:
            # the bytes to copy do not exist; the source's own descriptor reports it too
            raise origin.written.error
        self._writer.raise_error(file)
        length = await self._data.up_to_end(origin, offset, min(length, COPY_BYTES_MAX))
        if length <= 0:
            return 0
        check_range(file.layout, to, length)
        if to + length > file.paid:
            length = await self._rooms.have(file, to, to + length) - to
        if origin is file and abs(offset - to) < length:
            raise InvalidRequest("a range cannot be copied over itself")
        pieces = self._pieces(origin, offset, file, to, length)
        runs = (
            await self._runs(origin, offset, offset + length)
            if len(pieces) > 1
            else [(offset, offset + length)]
        )
        end = file.size
        self._reader.changed(file)
        try:
            return await self._copy_all(origin, file, pieces, runs, end)
        finally:
            self._reader.changed(file)

    def _pieces(self, origin: OpenInode, offset: int, file: OpenInode, to: int, length: int) -> list[_Piece]:
        """Split the copy at chunk borders, and by whether a store can copy the part."""
        pieces = []
        aligned = (offset - to) % BLOCK_BYTES == 0
        at = 0
        while at < length:
            source, target = offset + at, to + at
            step = min(length - at, file.chunk_mask + 1 - (target & file.chunk_mask))
            by_store = False
            if aligned:
                step = min(step, origin.chunk_mask + 1 - (source & origin.chunk_mask))
                edge = -target % BLOCK_BYTES
                if edge:
                    step = min(step, edge)
                elif step >= BLOCK_BYTES:
                    step -= step % BLOCK_BYTES
                    by_store = self._ranges.one_target(
                        origin, source >> origin.chunk_bits, file, target >> file.chunk_bits
                    )
            step = min(step, _PIECE_BYTES if by_store else MIB)
            pieces.append(_Piece(source, target, step, by_store))
            at += step
        return pieces

    async def _runs(self, origin: OpenInode, place: int, end: int) -> list[tuple[int, int]]:
        """The ranges between the two offsets that are not holes."""
        runs: list[tuple[int, int]] = []
        while place < end:
            seen = await self._extents(origin, place, end)
            runs += [
                (max(first, place), min(last, seen.end))
                for first, last in seen.runs
                if first < seen.end and last > place
            ]
            place = seen.end
        return runs

    async def _copy_all(
        self, origin: OpenInode, file: OpenInode, pieces: list[_Piece], runs: list[tuple[int, int]], end: int
    ) -> int:
        """Copy the pieces to `file`, whose size was `end`. Return how many bytes from the start are complete.

        Only `runs` of the source are not holes.
        """
        gate = asyncio.Semaphore(_COPIES_IN_PARALLEL)

        async def one(piece: _Piece) -> None:
            async with gate:
                first, last = piece.source, piece.source + piece.length
                border = min(max(first, first + end - piece.target), last)
                # Before the border `file` may have bytes, which a hole of the source must overwrite.
                there = ([(first, border)] if first < border else []) + _within(runs, border, last)
                if there and piece.by_store and await self._copy_by_store(origin, file, piece):
                    return
                for first, last in there:
                    data = await self._chunks.read_range(origin, first, last - first)
                    _check_locks(origin)
                    _check_locks(file)
                    await self._writer.write(file, piece.target + first - piece.source, data)
                self._writer.was_copied(file, piece.target + piece.length, 0, file.cut)

        tasks = [asyncio.ensure_future(one(piece)) for piece in pieces]
        try:
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
        done = 0
        for piece, outcome in zip(pieces, ended, strict=True):
            if isinstance(outcome, BaseException):
                if not done:
                    raise outcome
                break
            done += piece.length
        return done

    async def _copy_by_store(self, origin: OpenInode, file: OpenInode, piece: _Piece) -> bool:
        """Copy one piece at the store; return whether the store copied it.

        False: the store has no good bytes to copy, or the data has moved to other targets. The caller then
        reads the bytes, which finds another replica or reports the damage.
        """
        deadline_s = self._clock.boottime_s() + self._options.deadline_s
        while True:
            cut = file.cut
            try:
                place, copied = await self._ranges.copy(
                    origin, piece.source, file, piece.target, piece.length, deadline_s
                )
            except (BytesLost, ChecksumMismatch, NotSupported):
                return False
            except StaleCut:
                if self._clock.boottime_s() > deadline_s:
                    raise
                await self._inodes.refresh(file, WRITE)
                if file.cut == cut:
                    await asyncio.sleep(self._options.retry_first_s)
                continue
            # locks lost meanwhile: other clients may have changed both files, so discard the copy
            _check_locks(origin)
            _check_locks(file)
            self._writer.was_copied(file, piece.target + piece.length, copied, place.cut, place)
            return True


def _check_locks(file: OpenInode) -> None:
    if file.lost:
        raise LockLost()


def _within(runs: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The parts of the sorted `runs` that lie between the two offsets."""
    found = []
    for number in range(bisect_right(runs, first, key=lambda run: run[1]), len(runs)):
        begin, end = max(runs[number][0], first), min(runs[number][1], last)
        if begin >= end:
            break
        found.append((begin, end))
    return found
