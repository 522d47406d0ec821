"""After an unclean stop: the blocks that replayed index records name are read; where one does not fit, the old ones stand.

Only a loss of power can leave such a record: the journal reached the drive and the data did not. Then nothing of that write was
flushed, and the blocks that it replaced are untouched, since the store gives blocks out again only when data and index of the
change that freed them are durable.

Two steps, because a replay sees changes and not what was before them:

1. `ReplayCheck`, called by the kv with each replayed change, reads the *fresh* blocks of its segment records. When one does not
   fit, all blocks of that change are rejected (a write is there wholly or not at all). A record that names a rejected block is
   put under another key (r…), so the last sound record stays in its place; later records of the segment too, while they name
   it.
2. `settle_rejected`, after the index is open, merges the two: rejected blocks from the sound record, all others from the newer
one.
   One change does this for a segment, with the free map, which was replayed as the newer record says. Interrupted, it goes on
   at the next start. The chunk's requests are forgotten, so that a repetition is written and not answered from the record.

Called by block_chunkstore when a store is opened. Reads blocks and waits for them: nobody is served yet.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

from nvpool.base.checksum import crc32c
from nvpool.base.errors import NvpoolError
from nvpool.base.units import BLOCK_BYTES
from nvpool.kv.contract import Effect, Kv
from nvpool.store.allocator import Allocator, Transaction
from nvpool.store.records import (
    NO_BLOCKS,
    Head,
    Segment,
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


class ReplayCheck:
    """The on_replay of a store's kv."""

    def __init__(self, read_whole: ReadWhole):
        self._read_whole = read_whole
        self._rejected: set[int] = set()
        self._aside: set[bytes] = set()
        self.checked_blocks = 0

    def __call__(self, sequence: int, effects: list[Effect]) -> list[Effect]:
        segments = {}
        fresh: list[int] = []
        bad = False
        for key, raw in effects:
            if key[:1] != b"c" or raw is None:
                continue
            segment = segments[key] = decode_segment(key, raw)[0]
            first, count = fresh_of(raw)
            for block in range(first, first + count):
                place = segment.disk[block] if block < len(segment.disk) else 0
                if place:
                    fresh.append(place)
                    bad = bad or not self._fits(place, segment.crcs[block * 4:block * 4 + 4])
        if not bad and not self._rejected and not self._aside:
            return effects
        if bad:
            self._rejected.update(fresh)
        else:
            self._rejected.difference_update(fresh)
        return [changed for effect in effects for changed in self._judged(effect, segments.get(effect[0]))]

    def _judged(self, effect: Effect, segment: Segment | None) -> list[Effect]:
        key, raw = effect
        if key[:1] != b"c":
            return [effect]
        aside = b"r" + key[1:]
        rejected = 0
        if segment is not None:
            for block, place in enumerate(segment.disk):
                if place in self._rejected:
                    rejected |= 1 << block
        if rejected:
            self._aside.add(aside)
            return [(aside, encode_rejected(rejected, raw))]
        if aside in self._aside:
            self._aside.discard(aside)
            return [effect, (aside, None)]
        return [effect]

    def _fits(self, place: int, checksum: bytes) -> bool:
        self.checked_blocks += 1
        try:
            return crc32c(self._read_whole(place * BLOCK_BYTES, BLOCK_BYTES)) == int.from_bytes(checksum, "little")
        except NvpoolError as error:
            log.error("block %d can not be read: %s", place, error)
            return False


def settle_rejected(kv: Kv, allocator: Allocator) -> int:
    """Merge what ReplayCheck put aside; returns how many records that were. May be repeated."""
    settled = 0
    while pairs := kv.scan(b"r", b"s", 100):
        for aside, raw in pairs:
            _settle(kv, allocator, aside, *decode_rejected(raw))
            settled += 1
    return settled


def _settle(kv: Kv, allocator: Allocator, aside: bytes, rejected: int, newer_raw: bytes) -> None:
    key = b"c" + aside[1:]
    inode, index, number = split_segment_key(key)
    newer, newer_head = decode_segment(key, newer_raw)
    sound_raw = kv.get(key)
    sound, sound_head = decode_segment(key, sound_raw) if sound_raw is not None else (NO_BLOCKS, None)
    disk = array("Q")
    crcs = []
    transaction = Transaction()
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
        effects.append((key, encode_segment(merged, head._replace(requests=()))))
    else:
        effects.append((key, encode_segment(merged, None) if disk else None))
        head_raw = kv.get(head_key)
        if head_raw is not None:
            first, head = decode_segment(head_key, head_raw)
            effects.append((head_key, encode_segment(first, head._replace(requests=()))))
    allocator.take_back(transaction)
    effects += allocator.effects(transaction)
    allocator.commit(transaction, kv.apply(effects))
