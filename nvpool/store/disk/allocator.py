"""Block allocator: a stored free map as bitmaps in groups of 8,192 blocks (32 MiB), loaded on demand.

A group is two records: its bitmap (1,028 bytes: format u8 = 1, u8, used u16, the bits), and the list of
changes since the bitmap (format u8 = 1, count u8, used u16 after the changes, 4 bytes for each change). A
write adds its changes to the list in the same kv change as its index records; the 25th change folds the list
into the bitmap. So a write journals about 50 bytes of free map, 110 with the folding, and nothing is ever
rebuilt. At the start only the counts of the lists are read (12,208 small records for 100 million blocks).

A change is a u32: bits 0..12 are the first block in the group, bits 13..25 are count - 1, bit 31 set means
freed, clear means used.

Guarantees:

* A block is given to one transaction only.
* Blocks that a change freed are *held*: they are not allocated until `release` confirms that the change and
  its data are durable, and until clients may no longer read the blocks (location_leases.py). Such blocks also
  have a record, for the process that opens the store next.
* A dropped transaction leaves no trace.

Memory: 3 bytes for each group, 3 KiB for each of at most GROUPS_CACHED loaded groups, and the held runs (the
store flushes when they are many).

The block store calls this module on the event loop. The module never waits and reads only the kv.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections import deque

from nvpool.core.errors import CorruptRecord, InvariantBroken, NoSpace
from nvpool.core.primitives import ByteWriter
from nvpool.kv.api import Effect, Kv
from nvpool.store.disk import index_records
from nvpool.store.disk.index_records import (
    check_format,
    decode_held,
    encode_held,
    group_of_key,
    held_key,
)

GROUP_BITS = 13
GROUP_BLOCKS = 1 << GROUP_BITS
_GROUP_MASK = GROUP_BLOCKS - 1
_GROUP_BITS, _GROUP_BLOCKS = GROUP_BITS, GROUP_BLOCKS
_ONE: int = 1
"""One, as a Python number: a C number shifted by up to 8,191 overflows where this module is compiled."""
DELTAS_MAX = 24
"""Changes in a list before folding.

The journal bytes of a group's change, 2 n for the list and 1,024 / n for the folding, are least for n near
23.
"""
_DELTAS_MAX = DELTAS_MAX
FOLDED_MAX = 512
"""Bitmaps in one change, as long as the lists allow it: half a MiB of journal."""
_DELTAS_LIMIT = 200
"""Longest list; its count is one byte."""
GROUPS_CACHED = 2048
LARGE_RUN_BLOCKS = 16
"""Size from which runs have their own cursor.

So small files do not fragment the space of large ones.
"""
ROOMY_BLOCKS = GROUP_BLOCKS // 8
RESTING_MAX = 50_000
"""Changes whose blocks wait for leases to end: some 20 MB.

Above this limit no leases are issued, so the wait ends within one lease lifetime.
"""
_ALL = (1 << GROUP_BLOCKS) - 1
_FREED = 1 << 31
_FULL, _SOME, _ROOMY = 0, 1, 2
_out = ByteWriter()
_NO_DELTAS = array("I")
RESERVED_BLOCKS = 16
"""Blocks at the front of the drive: the superblock, and space for a later format."""

Run = tuple[int, int]
"""First disk block and count. Runs that this module allocates lie within one group."""


class SpacePending(Exception):
    """There is space, but it is held until the changes that freed it are durable: flush, then repeat."""


class _Group:
    __slots__ = ("used", "deltas")

    def __init__(self, used: int, deltas: array):
        self.used = used
        self.deltas = deltas


def _mask(start: int, count: int) -> int:
    return ((1 << count) - 1) << start


def find_run(free: int, count: int) -> int:
    """Return the lowest position of `count` one bits in a row, or -1.

    The mask is combined with itself, shifted, in doubling steps.
    """
    have = 1
    while have < count and free:
        step = min(have, count - have)
        free &= free >> step
        have += step
    return (free & -free).bit_length() - 1 if free else -1


def encode_bitmap(used: int) -> bytes:
    return struct.pack("<BxH", 1, used.bit_count()) + used.to_bytes(GROUP_BLOCKS // 8, "little")


def decode_bitmap(key: bytes, raw: bytes) -> int:
    check_format(key, raw, 4 + GROUP_BLOCKS // 8)
    return int.from_bytes(raw[4:], "little")


def encode_deltas(deltas: array, used: int, last: int = -1) -> bytes:
    """Encode the list of a group that has `used` blocks in use after these changes.

    `last`: one more change after those of the list; -1 for none.
    """
    _out.begin()
    _out.u8(1)
    _out.u8(len(deltas) + (last >= 0))
    _out.u16(used)
    _out.raw(deltas.tobytes())
    if last >= 0:
        _out.u32(last)
    return _out.take()


def used_count(key: bytes, raw: bytes) -> int:
    check_format(key, raw, 4)
    return int.from_bytes(raw[2:4], "little")


def decode_deltas(key: bytes, raw: bytes) -> array:
    check_format(key, raw, 4)
    deltas = array("I", raw[4:])
    if len(deltas) != raw[1]:
        raise CorruptRecord(f"the free map record {key.hex()} contradicts itself")
    return deltas


def with_deltas(used: int, deltas: array) -> int:
    for delta in deltas:
        mask = _mask(delta & _GROUP_MASK, (delta >> 13 & _GROUP_MASK) + 1)
        used = used & ~mask if delta & _FREED else used | mask
    return used


class Transaction:
    """Blocks allocated and freed by one change. Ended by Allocator.commit or Allocator.drop, exactly once."""

    __slots__ = ("taken", "freed", "until", "held_record", "groups_after")

    def __init__(self) -> None:
        self.taken: list[Run] = []
        self.freed: list[Run] = []
        self.until = 0.0
        """Time on CLOCK_BOOTTIME until which clients may read the freed blocks, 0 for none.

        Set it before Allocator.effects.
        """
        self.held_record = b""
        """Key of the record of the freed blocks, set by Allocator.effects; empty without `until`."""
        self.groups_after: dict[int, tuple[int, array | None]] = {}
        """Bitmap and changes of each group after the change, set by Allocator.effects."""

    def free(self, run: Run) -> None:
        """Free blocks that the change no longer names; they stay untouched until the change is durable."""
        self.freed.append(run)

    def free_places(self, places) -> None:
        """Free single disk blocks; neighbours become one run; 0 is skipped."""
        begin = count = 0
        for place in places:
            if count and place == begin + count:
                count += 1
                continue
            if count:
                self.freed.append((begin, count))
            begin, count = place, 1 if place else 0
        if count:
            self.freed.append((begin, count))


class Allocator:
    def __init__(self, kv: Kv, block_count: int, reserve_blocks: int) -> None:
        """Load the counts of all groups. CorruptRecord: a free map record is malformed."""
        self._kv = kv
        self.block_count = block_count
        self.reserve_blocks = reserve_blocks
        groups = (block_count + GROUP_BLOCKS - 1) >> GROUP_BITS
        self.group_count = groups
        self.spare = array("H", [GROUP_BLOCKS]) * groups
        """Blocks of each group that can be allocated now: neither used nor held."""
        self.cached_groups: dict[int, _Group] = {}
        """Decoded free map of the groups used last."""
        self.held_masks: dict[int, int] = {}
        """Held blocks by group: allocated by a running change, or freed and not reusable yet."""
        self._waiting: deque[tuple[int, float, bytes, list[Run]]] = deque()
        self._resting: deque[tuple[float, bytes, list[Run]]] = deque()
        """Durably freed runs that clients may still read: end time, key of their record, runs."""
        self._held_number = max(
            (decode_held(key, raw)[0] for key, raw in self._records(b"h", b"i")), default=0
        )
        self.held_blocks = 0
        self.changed_groups: dict[int, int] | None = None
        """While a scrub needs it: the blocks of each group that were allocated since."""
        self.small_group = 0
        """Group from which small runs are allocated."""
        self.large_group = 0
        self.fixed_blocks = sum(self._fixed_mask(group).bit_count() for group in self._fixed_groups())
        self.fixed_blocks -= (groups << GROUP_BITS) - block_count
        """The part of `used_blocks` in the reserved front."""
        self._load_counts()
        self.used_blocks = block_count - sum(self.spare)
        self.available_blocks = block_count - self.used_blocks
        """Sum of `spare`."""
        self.levels = bytearray(
            _ROOMY if spare >= ROOMY_BLOCKS else _SOME if spare else _FULL for spare in self.spare
        )
        """Class of each group by its spare blocks, for a fast search."""

    def _load_counts(self) -> None:
        for group in self._fixed_groups():
            self.spare[group] = GROUP_BLOCKS - self._fixed_mask(group).bit_count()
        for key, raw in self._records(b"d", b"e"):
            group = group_of_key(key)
            used = used_count(key, raw)
            if group >= self.group_count or used > GROUP_BLOCKS:
                raise CorruptRecord(
                    f"the free map says {used} blocks of group {group} of {self.group_count} are used"
                )
            self.spare[group] = GROUP_BLOCKS - used

    def _records(self, first: bytes, end: bytes):
        while pairs := self._kv.scan(first, end, 1000):
            yield from pairs
            first = pairs[-1][0] + b"\0"

    def _fixed_groups(self) -> set[int]:
        return {0, self.group_count - 1}

    def _fixed_mask(self, group: int) -> int:
        """Return the blocks that are never allocated.

        These are the reserved front, and blocks after the end of the drive.
        """
        mask = _mask(0, min(RESERVED_BLOCKS, self.block_count)) if group == 0 else 0
        if group == self.group_count - 1:
            inside = self.block_count - (group << GROUP_BITS)
            mask |= _ALL & ~_mask(0, inside)
        return mask

    def _group(self, group: int) -> _Group:
        found = self.cached_groups.get(group)
        if found is None:
            key = index_records.group_key(group)
            raw = self._kv.get(key)
            used = self._fixed_mask(group) | (decode_bitmap(key, raw) if raw is not None else 0)
            key = index_records.delta_key(group)
            raw = self._kv.get(key)
            deltas = decode_deltas(key, raw) if raw is not None else array("I")
            if raw is not None and with_deltas(used, deltas).bit_count() != used_count(key, raw):
                raise CorruptRecord(
                    f"bitmap and changes of group {group} of the free map do not fit one another"
                )
            while len(self.cached_groups) >= GROUPS_CACHED:
                del self.cached_groups[next(iter(self.cached_groups))]
            found = self.cached_groups[group] = _Group(with_deltas(used, deltas), deltas)
        return found

    def is_used(self, place: int) -> bool:
        """Whether the stored map says that the block is in use."""
        return bool(self._group(place >> GROUP_BITS).used >> (place & _GROUP_MASK) & 1)

    def used_mask(self, group: int) -> int:
        """Return the stored map of a group, without the blocks that are never allocated."""
        return self._group(group).used & ~self._fixed_mask(group)

    def has_used(self, group: int) -> bool:
        """Whether blocks of the group are in use or held."""
        return self.spare[group] < GROUP_BLOCKS

    # -- allocation --------------------------------------------------------------------------------------------------

    def allocate(self, transaction: Transaction, count: int, *, grows: bool = True) -> list[Run]:
        """Allocate `count` blocks in as few runs as possible.

        `grows` says that the change needs more blocks than it frees; such a change is refused if it would use
        the reserve.

        NoSpace: nothing was allocated. Waiting: enough blocks are free, but held; nothing was allocated.
        """
        if count == 1:
            place = self.find_block()
            if place:
                self.hold_block(place)
                run = (place, 1)
                transaction.taken.append(run)
                return [run]
        if self.used_blocks + count > self.block_count - (self.reserve_blocks if grows else 0):
            raise NoSpace("the target is full")
        if count > self.available_blocks:
            if count <= self.available_blocks + self.held_blocks:
                raise SpacePending
            raise NoSpace("the target is full")
        large = count >= LARGE_RUN_BLOCKS
        group = self.large_group if large else self.small_group
        taken: list[Run] = []
        for _ in range(8):
            if self.spare[group] >= count:
                at = find_run(self._free_mask(group), count)
                if at >= 0:
                    self.take(taken, group, at, count)
                    break
            group = self._next(group + 1, _ROOMY)
            if group < 0:
                break
        if taken:
            if large:
                self.large_group = group
            else:
                self.small_group = group
        else:
            self._gather(taken, count)
        transaction.taken += taken
        return taken

    def find_block(self) -> int:
        """Return the block that `allocate` takes for one block, without holding it; 0 if it has to be searched.

        The block stays free until something is allocated, that is, at least until the caller waits.
        """
        number = self.small_group
        group = self.cached_groups.get(number)
        if (
            group is None
            or self.available_blocks < 1
            or not self.spare[number]
            or self.used_blocks + 1 > self.block_count - self.reserve_blocks
        ):
            return 0
        used = group.used
        held = self.held_masks.get(number)
        if held is not None:
            used |= held
        free = ~used & used + 1
        at = free.bit_length() - 1
        return number << _GROUP_BITS | at if at < _GROUP_BLOCKS else 0

    def hold_block(self, place: int) -> None:
        """Hold this block, found by `find_block`, for a later change."""
        number = place >> _GROUP_BITS
        self.held_masks[number] = self.held_masks.get(number, 0) | _ONE << (place & _GROUP_MASK)
        self.available_blocks -= 1
        self.count_spare(number, -1)

    def _next(self, group: int, level: int) -> int:
        found = self.levels.find(level, group)
        return found if found >= 0 else self.levels.find(level, 0, group)

    def _gather(self, taken: list[Run], count: int) -> None:
        """Allocate `count` blocks from any groups; there are enough."""
        want = count
        for level in (_ROOMY, _SOME):
            group = self._next(self.large_group, level)
            while want and group >= 0:
                free = self._free_mask(group)
                while want and free:
                    at = (free & -free).bit_length() - 1
                    shifted = free >> at
                    length = min(want, (~shifted & shifted + 1).bit_length() - 1)
                    self.take(taken, group, at, length)
                    free &= ~_mask(at, length)
                    want -= length
                group = self._next(group + 1, level) if want else -1
        if want:
            raise InvariantBroken(f"{want} of {count} blocks that are counted as free were not found")

    def _free_mask(self, group: int) -> int:
        return _ALL ^ (self._group(group).used | self.held_masks.get(group, 0))

    def take(self, taken: list[Run], group: int, at: int, count: int) -> None:
        """Hold this free run of a group and append it to `taken`, the runs of a transaction."""
        self.held_masks[group] = self.held_masks.get(group, 0) | _mask(at, count)
        self.available_blocks -= count
        self.count_spare(group, -count)
        taken.append((group << GROUP_BITS | at, count))

    def count_spare(self, group: int, change: int) -> None:
        """Add `change` to the spare blocks of a group, and update its level."""
        spare = self.spare[group] = self.spare[group] + change
        self.levels[group] = _ROOMY if spare >= ROOMY_BLOCKS else _SOME if spare else _FULL

    def _unhold(self, run: Run, give_back: bool) -> None:
        place, count = run
        group = place >> GROUP_BITS
        rest = self.held_masks[group] & ~_mask(place & _GROUP_MASK, count)
        if rest:
            self.held_masks[group] = rest
        else:
            del self.held_masks[group]
        if give_back:
            self.available_blocks += count
            self.count_spare(group, count)

    def claim(self, transaction: Transaction, place: int) -> bool:
        """Allocate this block, which the stored map calls free.

        False, with nothing done, if the block is held: by a transaction that is about to use it, or for one
        that freed it.
        """
        group, at = place >> GROUP_BITS, place & _GROUP_MASK
        if self.held_masks.get(group, 0) >> at & 1:
            return False
        self.take(transaction.taken, group, at, 1)
        return True

    def take_back(self, transaction: Transaction) -> None:
        """Allocate exactly the runs in `transaction.taken`, for a replay before any other allocation."""
        for place, count in transaction.taken:
            self.take([], place >> GROUP_BITS, place & _GROUP_MASK, count)

    # -- ending a transaction ----------------------------------------------------------------------------------------

    def effects(self, transaction: Transaction) -> list[Effect]:
        """Return the free map effects for the kv change.

        Call commit or drop next, without an await in between.

        InvariantBroken: a block to be freed is not in use.
        """
        place = self._only_block(transaction)
        if place:
            return self.block_effects(place)
        after = transaction.groups_after = {}
        for run in transaction.taken:
            self._note(after, run, 0)
        for place, count in transaction.freed:
            while count:
                part = min(count, GROUP_BLOCKS - (place & _GROUP_MASK))
                self._note(after, (place, part), _FREED)
                place += part
                count -= part
        effects: list[Effect] = []
        folded = 0
        for group, (used, deltas) in after.items():
            key = index_records.delta_key(group)
            if len(deltas) > DELTAS_MAX and (folded < FOLDED_MAX or len(deltas) > _DELTAS_LIMIT):
                folded += 1
                page = index_records.group_key(group)
                effects.append((page, encode_bitmap(used)))
                deltas = array("I")
                after[group] = used, deltas
            effects.append((key, encode_deltas(deltas, used.bit_count())))
        if transaction.until and transaction.freed:
            self._held_number += 1
            transaction.held_record = held_key(self._held_number)
            effects.append((transaction.held_record, encode_held(transaction.until, transaction.freed)))
        return effects

    def block_effects(self, place: int) -> list[Effect]:
        """Return the free map effects of a change that takes one block: found by `find_block`, or held.

        Call `commit_block` after the change, without an await in between. If the change is refused, nothing has to
        be undone.
        """
        number, at = place >> _GROUP_BITS, place & _GROUP_MASK
        group = self._group(number)
        used = group.used | _ONE << at
        if len(group.deltas) < _DELTAS_MAX:
            return [(index_records.delta_key(number), encode_deltas(group.deltas, used.bit_count(), at))]
        return [
            (index_records.group_key(number), encode_bitmap(used)),
            (index_records.delta_key(number), encode_deltas(_NO_DELTAS, used.bit_count())),
        ]

    def commit_block(self, place: int, is_held: bool) -> None:
        """Record that a change with `block_effects` was applied; `is_held`: the block was held for it."""
        number, at = place >> _GROUP_BITS, place & _GROUP_MASK
        group, bit = self._group(number), _ONE << at
        group.used |= bit
        if len(group.deltas) < _DELTAS_MAX:
            group.deltas.append(at)
        else:
            group.deltas = array("I")
        self.used_blocks += 1
        if is_held:
            self._unhold((place, 1), give_back=False)
        else:
            self.available_blocks -= 1
            self.count_spare(number, -1)
        if self.changed_groups is not None:
            self.changed_groups[number] = self.changed_groups.get(number, 0) | bit

    def _only_block(self, transaction: Transaction) -> int:
        """Block of a transaction that takes one block and frees none, otherwise 0."""
        if len(transaction.taken) != 1 or transaction.freed:
            return 0
        run = transaction.taken[0]
        return run[0] if run[1] == 1 else 0

    def _note(self, after: dict, run: Run, freed: int) -> None:
        place, count = run
        group = place >> GROUP_BITS
        at = place & _GROUP_MASK
        if group in after:
            used, deltas = after[group]
        else:
            now = self._group(group)
            used, deltas = now.used, now.deltas[:]
        mask = _mask(at, count)
        if freed:
            if used & mask != mask or self._fixed_mask(group) & mask:
                raise InvariantBroken(f"blocks {place}..{place + count - 1} are freed but not in use")
            used &= ~mask
        else:
            used |= mask
        deltas.append(at | count - 1 << 13 | freed)
        after[group] = used, deltas

    def commit(self, transaction: Transaction, sequence: int) -> None:
        """Record that the change was applied as `sequence`.

        Its freed blocks are held until release(sequence).
        """
        place = self._only_block(transaction)
        if place:
            self.commit_block(place, True)
            return
        for group, (used, deltas) in transaction.groups_after.items():
            now = self._group(group)
            now.used, now.deltas = used, deltas
        for run in transaction.taken:
            self._unhold(run, give_back=False)
            self.used_blocks += run[1]
            if self.changed_groups is not None:
                group = run[0] >> GROUP_BITS
                self.changed_groups[group] = self.changed_groups.get(group, 0) | _mask(
                    run[0] & _GROUP_MASK, run[1]
                )
        freed: list[Run] = []
        for place, count in transaction.freed:
            while count:
                part = min(count, GROUP_BLOCKS - (place & _GROUP_MASK))
                group = place >> GROUP_BITS
                self.held_masks[group] = self.held_masks.get(group, 0) | _mask(place & _GROUP_MASK, part)
                freed.append((place, part))
                self.held_blocks += part
                self.used_blocks -= part
                place += part
                count -= part
        if freed:
            self._waiting.append((sequence, transaction.until, transaction.held_record, freed))

    def drop(self, transaction: Transaction) -> None:
        """Undo the transaction: the change was not applied."""
        for run in transaction.taken:
            self._unhold(run, give_back=True)

    def releasable(self, sequence: int, now_s: float = math.inf) -> list[Run]:
        """Return the runs that release(sequence, now_s) would make free."""
        runs: list[Run] = []
        for until, _, freed in self._resting:
            if until > now_s:
                break
            runs += freed
        for change, until, _, freed in self._waiting:
            if change > sequence:
                break
            if until <= now_s:
                runs += freed
        return runs

    def release(self, sequence: int, now_s: float = math.inf) -> list[bytes]:
        """Release blocks that durable changes, those up to `sequence`, have freed.

        Blocks that clients may still read stay held.

        Returns the keys of obsolete records; the caller removes them at some later time.
        """
        past: list[bytes] = []
        resting = self._resting
        while resting and resting[0][0] <= now_s:
            _, key, freed = resting.popleft()
            past.append(key)
            self._give_back(freed)
        waiting = self._waiting
        while waiting and waiting[0][0] <= sequence:
            _, until, key, freed = waiting.popleft()
            if until > now_s:
                resting.append((until, key, freed))
            else:
                if key:
                    past.append(key)
                self._give_back(freed)
        return past

    def _give_back(self, runs: list[Run]) -> None:
        for run in runs:
            self.held_blocks -= run[1]
            self._unhold(run, give_back=True)

    def rest(self, now_s: float, until_max_s: float) -> list[bytes]:
        """Hold blocks that the previous process freed and that clients may still read.

        The records of that process list the blocks. They are held until `until_max_s` at most. Call before
        any allocation. Returns the keys of obsolete records.
        """
        past: list[bytes] = []
        found: list[tuple[float, bytes, list[Run]]] = []
        for key, raw in self._records(b"h", b"i"):
            _, until, runs = decode_held(key, raw)
            until = min(until, until_max_s)
            held: list[Run] = []
            for place, count in runs if until > now_s else ():
                # One block at a time, since only few blocks have such records.
                for block in range(place, min(place + count, self.block_count)):
                    group, at = block >> GROUP_BITS, block & GROUP_BLOCKS - 1
                    if self._free_mask(group) >> at & 1:
                        self.take([], group, at, 1)
                        self.held_blocks += 1
                        held.append((block, 1))
            if held:
                found.append((until, key, held))
            else:
                past.append(key)
        self._resting.extend(sorted(found))
        return past

    @property
    def resting_changes(self) -> int:
        return len(self._resting)

    @property
    def next_rest_s(self) -> float:
        """Time when the next blocks stop being readable by clients; infinite if there are none."""
        return self._resting[0][0] if self._resting else math.inf

    @property
    def scarce(self) -> bool:
        """Whether space is too scarce for new leases, which delay the reuse of blocks."""
        return self.available_blocks < self.block_count >> 4 or len(self._resting) > RESTING_MAX

    @property
    def waiting_changes(self) -> int:
        return len(self._waiting)
