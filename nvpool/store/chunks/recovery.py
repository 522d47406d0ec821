"""Recovery after an unclean stop: checks the blocks that replayed index records name.

If a block does not match its checksum, the previous blocks stay valid. Only a loss of power can leave such a
record: the journal reached the drive and the data did not. Then nothing of that write was flushed. The blocks
that it replaced are untouched, since the store allocates blocks again only when data and index of the change
that freed them are durable. Only blocks that are named at the end of the replay are checked: a block that a
later change freed may already hold the bytes of another chunk, perhaps of a write that never got its record.

Data covered by a flush (which leaves a mark in the journal) was on the drive. A mismatch there means damage:
the replay ignores it, and a read of the block gets an error, not older bytes.

Recovery has two steps, because a replay sees records and not the free map:

1. The kv calls `ReplayCheck` with all replayed changes. It reads the blocks that they wrote and that are
   still named. If one does not match, its change is rejected as a whole (a write is applied completely or
   not at all): its blocks are replaced by the previous ones, which are then read too. A record changed in
   this way is stored merged, and in its original form under another key (r…).
2. `settle_rejected`, after the index is open, adapts the free map, which was replayed according to the newer
   record, to the merged record, in one change for each segment. After an interruption it continues at the
   next start. The chunk's requests are dropped, so that a repeated request is written and not answered from
   the record. The chunk gets a version that no head ever assigns, above the one whose bytes it lost, so that
   other targets of its chain do not count as equal.

Matching blocks are written once more, with the same bytes. If the store ended because the drive failed to
sync, the kernel still shows these blocks but has forgotten that the drive does not have them. The next sync
then covers all of them.

`block_store` calls this module when it opens a store. The module reads blocks synchronously, which is
acceptable because the store does not serve yet.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import NamedTuple

from nvpool.core.checksum import ZERO_BLOCK_CHECKSUM, crc32c
from nvpool.core.errors import NvpoolError
from nvpool.core.ids import version, version_parts
from nvpool.core.units import BLOCK_BYTES
from nvpool.kv.api import Effect, Kv
from nvpool.store.disk.allocator import Allocator, Transaction
from nvpool.store.disk.index_records import (
    FLUSHED_KEY,
    NO_BLOCKS,
    Head,
    IndexSegment,
    decode_flushed,
    decode_rejected,
    decode_segment,
    encode_rejected,
    encode_segment,
    fresh_of,
    segment_key,
    split_segment_key,
)

log = logging.getLogger(__name__)

ReadWhole = Callable[[int, int], memoryview]
Write = Callable[[list, int], None]


class _Block(NamedTuple):
    """Block of a segment: disk block (0: a hole), checksum, and writer.

    The writer is the number of the change that wrote the block, -1 for one before the journal.
    """

    place: int
    checksum: bytes
    writer: int


_OF_NO_WRITE = 1 << 31
"""Bit in the counter of a version.

A head's counters restart with each epoch of its chain and stay below this bit.
"""
_HOLE = _Block(0, ZERO_BLOCK_CHECKSUM.to_bytes(4, "little"), -1)


class ReplayCheck:
    """The `on_replay` callback of a store's kv."""

    def __init__(self, read_whole: ReadWhole, write: Write | None = None):
        self._read_whole = read_whole
        self._write = write
        self._sound: set[int] = set()
        """Places whose blocks were read and match."""
        self._flushed = -1
        """The last change that a flush covered."""
        self.checked_blocks = 0

    def __call__(
        self, changes: list[list[Effect]], stored: Callable[[bytes], bytes | None]
    ) -> list[list[Effect]]:
        """Return the valid changes. `stored` returns the value that the long-term store has for a key."""
        self._flushed = _last_flushed(changes)
        rejected: set[int] = set()
        segments = _segments_at_the_end(changes, stored, rejected)
        while found := self._writers_of_bad_blocks(segments):
            rejected |= found
            segments = _segments_at_the_end(changes, stored, rejected)
        return _merged(changes, segments) if rejected else changes

    def _writers_of_bad_blocks(self, segments: dict[bytes, list[_Block]]) -> set[int]:
        return {
            block.writer
            for blocks in segments.values()
            for block in blocks
            if block.writer > self._flushed
            and block.place
            and block.place not in self._sound
            and not self._fits(block)
        }

    def _fits(self, block: _Block) -> bool:
        self.checked_blocks += 1
        try:
            whole = self._read_whole(block.place * BLOCK_BYTES, BLOCK_BYTES)
        except NvpoolError as error:
            log.error("block %d cannot be read: %s", block.place, error)
            return False
        if crc32c(whole) != int.from_bytes(block.checksum, "little"):
            return False
        if self._write is not None:
            # The block may be only in the kernel's memory: after a failed sync, pages count as written. So it
            # is written again for the next sync.
            self._write([whole], block.place * BLOCK_BYTES)
        self._sound.add(block.place)
        return True


def _last_flushed(changes: list[list[Effect]]) -> int:
    last = -1
    for number, effects in enumerate(changes):
        for key, raw in effects:
            if key == FLUSHED_KEY and raw is not None:
                flushed, own = decode_flushed(raw)
                last = max(last, number - (own - flushed))
    return last


def _segments_at_the_end(
    changes: list[list[Effect]], stored: Callable[[bytes], bytes | None], rejected: set[int]
) -> dict[bytes, list[_Block]]:
    """Return the blocks of each changed segment after all changes except the rejected ones."""
    writers: dict[int, int] = {}
    segments: dict[bytes, list[_Block]] = {}
    for number, effects in enumerate(changes):
        for key, raw in effects:
            if key[:1] != b"c":
                continue
            if raw is None:
                segments[key] = []
                continue
            segment = decode_segment(key, raw)[0]
            first, count = fresh_of(raw)
            writers.update(dict.fromkeys(segment.disk[first : first + count], number))
            before = segments.get(key)
            if before is None and rejected:
                before = _blocks(key, stored(key))
            blocks = []
            for at, place in enumerate(segment.disk):
                writer = writers.get(place, -1) if place else -1
                if writer in rejected:
                    blocks.append(before[at] if at < len(before) else _HOLE)
                else:
                    blocks.append(_Block(place, segment.crcs[at * 4 : at * 4 + 4], writer))
            segments[key] = blocks
    return segments


def _blocks(key: bytes, raw: bytes | None) -> list[_Block]:
    if raw is None:
        return []
    segment = decode_segment(key, raw)[0]
    return [_Block(place, segment.crcs[at * 4 : at * 4 + 4], -1) for at, place in enumerate(segment.disk)]


def _merged(changes: list[list[Effect]], segments: dict[bytes, list[_Block]]) -> list[list[Effect]]:
    """Return the changes with merged records for the segments that a rejection affects.

    Only the last record of each such segment is merged. The original record is stored beside the merged one.
    """
    found: list[list[Effect]] = []
    seen: set[bytes] = set()
    for effects in reversed(changes):
        standing: list[Effect] = []
        for key, raw in effects:
            if key[:1] == b"c" and key not in seen:
                seen.add(key)
                if raw is not None:
                    newer, head = decode_segment(key, raw)
                    blocks = segments[key]
                    mask = sum(1 << at for at, block in enumerate(blocks) if block.place != newer.disk[at])
                    if mask:
                        standing.append((b"r" + key[1:], encode_rejected(mask, raw)))
                        raw = encode_segment(_segment_of(blocks), head)
            standing.append((key, raw))
        found.append(standing)
    found.reverse()
    return found


def _segment_of(blocks: list[_Block]) -> IndexSegment:
    while blocks and not blocks[-1].place:
        blocks = blocks[:-1]
    return (
        IndexSegment(array("Q", [b.place for b in blocks]), b"".join([b.checksum for b in blocks]))
        if blocks
        else NO_BLOCKS
    )


def settle_rejected(kv: Kv, allocator: Allocator, until: float = 0.0) -> int:
    """Complete the merge that ReplayCheck prepared; return the number of records.

    The call may be repeated. `until` is the time until which clients may read under location leases of the
    previous process.
    """
    settled = 0
    while pairs := kv.scan(b"r", b"s", 100):
        for aside, raw in pairs:
            _settle(kv, allocator, until, aside, *decode_rejected(raw))
            settled += 1
    return settled


def _settle(
    kv: Kv, allocator: Allocator, until: float, aside: bytes, rejected: int, newer_raw: bytes
) -> None:
    key = b"c" + aside[1:]
    inode, index, number = split_segment_key(key)
    newer, newer_head = decode_segment(key, newer_raw)
    sound_raw = kv.get(key)
    sound, sound_head = decode_segment(key, sound_raw) if sound_raw is not None else (NO_BLOCKS, None)
    disk = array("Q")
    crcs = []
    transaction = Transaction()
    transaction.until = until
    for block in range(max(len(newer.disk), len(sound.disk))):
        now = newer.disk[block] if block < len(newer.disk) else 0
        before = sound.disk[block] if block < len(sound.disk) else 0
        from_sound = bool(rejected >> block & 1)
        place = before if from_sound else now
        disk.append(place)
        crcs.append((sound if from_sound else newer).crcs[block * 4 : block * 4 + 4] or bytes(4))
        if place != now:
            if place:
                transaction.taken.append((place, 1))
            if now:
                transaction.free((now, 1))
    while disk and not disk[-1]:
        disk.pop()
        crcs.pop()
    merged = IndexSegment(disk, b"".join(crcs)) if disk else NO_BLOCKS
    head_key = segment_key(inode, index, 0)
    effects: list[Effect] = [(aside, None)]
    if number == 0:
        head = newer_head or sound_head or Head(1)
        effects.append((key, encode_segment(merged, _of_no_write(head, merged))))
    else:
        effects.append((key, encode_segment(merged, None) if disk else None))
        head_raw = kv.get(head_key)
        if head_raw is not None:
            first, head = decode_segment(head_key, head_raw)
            effects.append((head_key, encode_segment(first, _of_no_write(head, merged))))
    allocator.take_back(transaction)
    effects += allocator.effects(transaction)
    allocator.commit(transaction, kv.apply(effects, reclaims=True))  # the store must open on a full drive too


def _of_no_write(head: Head, merged: IndexSegment) -> Head:
    """Return the head of a chunk whose bytes are the result of no single write.

    31 bits of the version are a checksum of these bytes: two targets that lost different writes get different
    versions.
    """
    epoch, counter = version_parts(head.version)
    content = crc32c(merged.crcs + merged.disk.tobytes(), counter) & _OF_NO_WRITE - 1
    return head._replace(version=version(epoch, _OF_NO_WRITE | content), requests=())
