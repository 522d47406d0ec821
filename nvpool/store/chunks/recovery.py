"""After an unclean stop: the blocks that replayed index records name are read; where one does not fit, the old ones stand.

Only a loss of power can leave such a record: the journal reached the drive and the data did not. Then nothing of that write was
flushed, and the blocks that it replaced are untouched, since the store gives blocks out again only when data and index of the
change that freed them are durable. For the same reason only blocks that are named *at the end* of the replay may be judged: one
that a later change freed can hold the bytes of another chunk by now, perhaps of a write that never came to its record.

What a flush covered (it leaves a mark in the journal) was on the drive: a block of it that does not fit is damaged, is no
business of a replay, and gives an error to whoever reads it, not older bytes.

Two steps, because a replay sees records and not the free map:

1. `ReplayCheck`, called by the kv with all replayed changes, reads the blocks that they wrote and that still count. Where one
does
   not fit, its change is rejected as a whole (a write is there wholly or not at all): its blocks give way to those before them,
   which count from then on and are read too. A record that so changes is stored as merged, and as it was under another key
   (r…).
2. `settle_rejected`, after the index is open, brings the free map, which was replayed as the newer record says, in line with
the
   merged record, in one change a segment. Interrupted, it goes on at the next start. The chunk's requests are forgotten, so
   that a repetition is written and not answered from the record; and it gets a version that no head ever gives, above the one
   whose bytes it lost, so that other targets of its chain are not taken for equal.

Blocks that fit are written once more, with the same bytes: where the store ended because the drive refused to sync, the kernel
shows them and has forgotten that the drive does not have them. The sync that follows is one of all of them.

Called by block_chunkstore when a store is opened. Reads blocks and waits for them: nobody is served yet.
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
    Segment,
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
    """A block of a segment: its disk block (0 a hole), its checksum, the change that wrote it (-1: one before the journal)."""

    place: int
    checksum: bytes
    writer: int


_OF_NO_WRITE = 1 << 31
"""In the counter of a version: a head's counters begin anew with each epoch of its chain and stay below it."""
_HOLE = _Block(0, ZERO_BLOCK_CHECKSUM.to_bytes(4, "little"), -1)


class ReplayCheck:
    """The on_replay of a store's kv."""

    def __init__(self, read_whole: ReadWhole, write: Write | None = None):
        self._read_whole = read_whole
        self._write = write
        self._sound: set[int] = set()
        """Places that were read and fit."""
        self._flushed = -1
        """The last change that a flush covered."""
        self.checked_blocks = 0

    def __call__(self, changes: list[list[Effect]], stored: Callable[[bytes], bytes | None]) -> list[list[Effect]]:
        """The changes as they stand. `stored` gives what the long-term store holds under a key."""
        self._flushed = _last_flushed(changes)
        rejected: set[int] = set()
        segments = _segments_at_the_end(changes, stored, rejected)
        while found := self._writers_of_bad_blocks(segments):
            rejected |= found
            segments = _segments_at_the_end(changes, stored, rejected)
        return _merged(changes, segments) if rejected else changes

    def _writers_of_bad_blocks(self, segments: dict[bytes, list[_Block]]) -> set[int]:
        return {block.writer for blocks in segments.values() for block in blocks
                if block.writer > self._flushed and block.place and block.place not in self._sound and not self._fits(block)}

    def _fits(self, block: _Block) -> bool:
        self.checked_blocks += 1
        try:
            whole = self._read_whole(block.place * BLOCK_BYTES, BLOCK_BYTES)
        except NvpoolError as error:
            log.error("block %d can not be read: %s", block.place, error)
            return False
        if crc32c(whole) != int.from_bytes(block.checksum, "little"):
            return False
        if self._write is not None:
            # It may be in the kernel's memory alone: after a failed sync pages count as written. So the next sync writes it.
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


def _segments_at_the_end(changes: list[list[Effect]], stored: Callable[[bytes], bytes | None],
                         rejected: set[int]) -> dict[bytes, list[_Block]]:
    """What each segment that the changes touch is after all of them but the rejected."""
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
            writers.update(dict.fromkeys(segment.disk[first:first + count], number))
            before = segments.get(key)
            if before is None and rejected:
                before = _blocks(key, stored(key))
            blocks = []
            for at, place in enumerate(segment.disk):
                writer = writers.get(place, -1) if place else -1
                if writer in rejected:
                    blocks.append(before[at] if at < len(before) else _HOLE)
                else:
                    blocks.append(_Block(place, segment.crcs[at * 4:at * 4 + 4], writer))
            segments[key] = blocks
    return segments


def _blocks(key: bytes, raw: bytes | None) -> list[_Block]:
    if raw is None:
        return []
    segment = decode_segment(key, raw)[0]
    return [_Block(place, segment.crcs[at * 4:at * 4 + 4], -1) for at, place in enumerate(segment.disk)]


def _merged(changes: list[list[Effect]], segments: dict[bytes, list[_Block]]) -> list[list[Effect]]:
    """The changes with the last record of each segment that a rejection changed stored merged, and beside it as it was."""
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


def _segment_of(blocks: list[_Block]) -> Segment:
    while blocks and not blocks[-1].place:
        blocks = blocks[:-1]
    return Segment(array("Q", [b.place for b in blocks]), b"".join([b.checksum for b in blocks])) if blocks else NO_BLOCKS


def settle_rejected(kv: Kv, allocator: Allocator, until: float = 0.0) -> int:
    """Merge what ReplayCheck put aside; returns how many records that were. May be repeated. `until`: what the process before
    us has lent may be read so long."""
    settled = 0
    while pairs := kv.scan(b"r", b"s", 100):
        for aside, raw in pairs:
            _settle(kv, allocator, until, aside, *decode_rejected(raw))
            settled += 1
    return settled


def _settle(kv: Kv, allocator: Allocator, until: float, aside: bytes, rejected: int, newer_raw: bytes) -> None:
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
        crcs.append((sound if from_sound else newer).crcs[block * 4:block * 4 + 4] or bytes(4))
        if place != now:
            if place:
                transaction.taken.append((place, 1))
            if now:
                transaction.free((now, 1))
    while disk and not disk[-1]:
        disk.pop()
        crcs.pop()
    merged = Segment(disk, b"".join(crcs)) if disk else NO_BLOCKS
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
    allocator.commit(transaction, kv.apply(effects, reclaims=True))  # the store opens on a full drive too


def _of_no_write(head: Head, merged: Segment) -> Head:
    """The head of a chunk whose bytes are those of no write. Which ones they are is in the version, as far as 31 bits can say
    it: two targets that lost different writes differ in it."""
    epoch, counter = version_parts(head.version)
    content = crc32c(merged.crcs + merged.disk.tobytes(), counter) & _OF_NO_WRITE - 1
    return head._replace(version=version(epoch, _OF_NO_WRITE | content), requests=())
