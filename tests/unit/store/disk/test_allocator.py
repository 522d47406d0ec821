"""Free map of a store: each block is allocated once, freed blocks return when durable, and a restart rebuilds no state."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core.errors import InvariantBroken, NoSpace
from nvpool.kv.memory_engine import MemoryKv
from nvpool.store.disk.allocator import (
    DELTAS_MAX,
    GROUP_BLOCKS,
    RESERVED_BLOCKS,
    Allocator,
    SpacePending,
    Transaction,
    find_run,
)


def run_of(mask, count, limit=200):
    return next((at for at in range(limit) if all(mask >> at + n & 1 for n in range(count))), -1)


@given(st.integers(0, 2**150 - 1), st.integers(1, 40))
@settings(max_examples=200)
def test_lowest_run_is_found(mask, count):
    mask |= (1 << 90) - (1 << 60) if count < 31 else 0
    assert find_run(mask, count) == run_of(mask, count)


def take(allocator, kv, *counts):
    transaction = Transaction()
    runs = [run for count in counts for run in allocator.allocate(transaction, count)]
    sequence = kv.apply(allocator.effects(transaction))
    allocator.commit(transaction, sequence)
    return runs


def give(allocator, kv, runs):
    transaction = Transaction()
    for run in runs:
        transaction.free(run)
    sequence = kv.apply(allocator.effects(transaction))
    allocator.commit(transaction, sequence)
    return sequence


def test_large_writes_get_contiguous_runs_in_a_fresh_store():
    kv = MemoryKv()
    allocator = Allocator(kv, 10 * GROUP_BLOCKS, 0)
    for _ in range(200):
        assert len(take(allocator, kv, 256)) == 1
        assert len(take(allocator, kv, 1)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_history_allocates_each_block_once(seed):
    chance = random.Random(seed)
    kv = MemoryKv()
    blocks = chance.choice([3 * GROUP_BLOCKS + 77, 500, GROUP_BLOCKS])
    allocator = Allocator(kv, blocks, blocks // 50)
    owned: list = []
    unreleased: list = []
    for _ in range(400):
        held = {place + n for _, runs in unreleased for place, count in runs for n in range(count)}
        used = {place + n for place, count in owned for n in range(count)}
        assert allocator.used_blocks - allocator.fixed_blocks == len(used)
        assert allocator.held_blocks == len(held)
        what = chance.random()
        if what < 0.55:
            count = chance.choice([1, 1, 2, 30, 256])
            transaction = Transaction()
            try:
                runs = allocator.allocate(transaction, count)
            except NoSpace:
                assert len(used) + count + allocator.fixed_blocks > blocks - blocks // 50
                continue
            except SpacePending:
                assert held
                continue
            taken = [place + n for place, length in runs for n in range(length)]
            assert len(taken) == count == len(set(taken)) and not set(taken) & (used | held)
            assert min(taken) >= RESERVED_BLOCKS and max(taken) < blocks
            if chance.random() < 0.2:
                allocator.drop(transaction)
                continue
            allocator.commit(transaction, kv.apply(allocator.effects(transaction)))
            owned += runs
        elif what < 0.85 and owned:
            runs = [owned.pop(chance.randrange(len(owned))) for _ in range(min(len(owned), 3))]
            unreleased.append((give(allocator, kv, runs), runs))
        elif what < 0.95 and unreleased:
            upto = unreleased[len(unreleased) // 2][0]
            allocator.release(upto)
            unreleased = [one for one in unreleased if one[0] > upto]
        else:  # the process dies
            allocator = Allocator(kv, blocks, blocks // 50)
            unreleased = []
    again = Allocator(kv, blocks, blocks // 50)
    assert again.used_blocks == allocator.used_blocks
    for place, count in owned:
        assert all(again.is_used(place + n) for n in range(count))
    assert sum(again.used_mask(group).bit_count() for group in range(again.group_count)) == sum(
        c for _, c in owned
    )


def test_freed_blocks_are_reused_only_when_durable():
    kv = MemoryKv()
    allocator = Allocator(kv, 300, 0)
    runs = take(allocator, kv, 284)
    sequence = give(allocator, kv, runs)
    with pytest.raises(SpacePending):
        allocator.allocate(Transaction(), 1)
    allocator.release(sequence - 1)
    with pytest.raises(SpacePending):
        allocator.allocate(Transaction(), 1)
    assert allocator.releasable(sequence) == runs
    allocator.release(sequence)
    assert take(allocator, kv, 284) == runs


def test_only_growth_stops_at_the_space_reserve():
    kv = MemoryKv()
    allocator = Allocator(kv, 1016, 100)
    take(allocator, kv, 900)
    with pytest.raises(NoSpace):
        allocator.allocate(Transaction(), 1)
    transaction = Transaction()
    allocator.allocate(transaction, 100, grows=False)
    with pytest.raises(NoSpace):
        allocator.allocate(transaction, 1, grows=False)
    allocator.drop(transaction)
    assert allocator.used_blocks == 916


def test_free_of_an_unused_block_is_refused():
    kv = MemoryKv()
    allocator = Allocator(kv, 1000, 0)
    ((place, _),) = take(allocator, kv, 2)
    for run in ((place + 1, 2), (3, 1), (999, 1)):
        transaction = Transaction()
        transaction.free(run)
        with pytest.raises(InvariantBroken):
            allocator.effects(transaction)
    give(allocator, kv, [(place, 2)])


def test_write_journals_little_of_the_free_map():
    kv = MemoryKv()
    allocator = Allocator(kv, 100 * GROUP_BLOCKS, 0)
    total = 0
    kept = take(allocator, kv, 5000)
    for _ in range(1000):
        transaction = Transaction()
        runs = allocator.allocate(transaction, 1)
        place, count = kept.pop(0)
        transaction.free((place, 1))
        if count > 1:
            kept.insert(0, (place + 1, count - 1))
        effects = allocator.effects(transaction)
        total += sum(len(key) + len(value or b"") for key, value in effects)
        allocator.commit(transaction, kv.apply(effects))
        kept += runs
    assert total / 1000 < 160


def test_group_list_is_merged_into_its_bitmap():
    kv = MemoryKv()
    allocator = Allocator(kv, GROUP_BLOCKS * 2, 0)
    for _ in range(3 * DELTAS_MAX):
        take(allocator, kv, 1)
        found = kv.scan(b"d", b"e", 10)
        assert len(found) <= 1 and all(len(value) <= 4 + 4 * DELTAS_MAX for _, value in found)
    assert kv.scan(b"g", b"h", 10)


def test_change_of_many_groups_fits_the_journal():
    kv = MemoryKv()
    allocator = Allocator(kv, 1200 * GROUP_BLOCKS, 0)
    owned = []
    for group in range(1200):
        transaction = Transaction()
        for n in range(30):
            transaction.taken.append((group * GROUP_BLOCKS + 100 + 2 * n, 1))
        allocator.take_back(transaction)
        allocator.commit(transaction, kv.apply(allocator.effects(transaction)))
        owned.append(transaction.taken)
    largest = 0
    for n in range(30):
        transaction = Transaction()
        for runs in owned:
            transaction.free(runs[n])
        effects = allocator.effects(transaction)
        largest = max(largest, sum(len(value or b"") for _, value in effects))
        allocator.commit(transaction, kv.apply(effects))
    assert largest < 800_000
    again = Allocator(kv, 1200 * GROUP_BLOCKS, 0)
    assert again.used_blocks == allocator.used_blocks == allocator.fixed_blocks
