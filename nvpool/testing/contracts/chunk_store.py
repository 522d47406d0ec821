"""Contract of a ChunkStore: for each `check` of CHECKS, run `await check(subject)` with a new
`ChunkStoreSubject`.

A subject makes the store under test and can simulate its crashes. Used by tests/contract/test_chunkstore.py
and by authors of other stores. Checks raise AssertionError; they never wait for time to pass.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from nvpool.core import errors
from nvpool.core.checksum import first_bad_block, piece_checksums
from nvpool.core.ids import LIFE_BITS, RequestId, version, version_parts
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX, KIB, MIB
from nvpool.store.chunks.api import ALL_INODES, NO_INODE, TABLE_MAX, UNCHECKED, ChunkStore

READ = struct.Struct("<QIIIHH")
RESULT = struct.Struct("<HHIQ")
CAPACITY_BYTES = 40 * MIB
"""Capacity of a subject's store."""


class ChunkStoreSubject(Protocol):
    store: ChunkStore
    """At first an empty store of CAPACITY_BYTES."""

    async def restart(self) -> None:
        """Kill the process that owns `store` (kill -9) and open the data again as `store`."""

    async def lose_power(self) -> None:
        """Restart, and lose what was not synced if this subject can lose it."""

    def fail_next_sync(self) -> None: ...

    def fail_next_write(self) -> None:
        """Let the next write to the drive fail with EIO after a part of it was written."""

    def flip(self, inode: int, index: int, block: int) -> None:
        """Change a bit of the block on the drive."""


class Outcome(NamedTuple):
    status: int
    flags: int
    version: int
    data: bytes


Check = Callable[[ChunkStoreSubject], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


async def refused(error: type[errors.NvpoolError], waiting: Awaitable[object]) -> None:
    try:
        await waiting
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def some_bytes(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


async def put(store: ChunkStore, inode: int, index: int, offset: int, data: bytes, **named) -> int:
    return await store.write(inode, index, offset, memoryview(data), piece_checksums(data, offset), **named)


async def get_many(
    store: ChunkStore, reads: list[tuple[int, int, int, int]], verify: bool = False
) -> list[Outcome]:
    """Read with a grant for all inodes; compare each returned block with its checksum."""
    batch = store.read_now(b"".join(READ.pack(*read, 0, 0) for read in reads), [ALL_INODES], verify)
    if batch.missed:
        await store.finish_read(batch)
    data = b"".join(batch.payload)
    assert len(batch.checksums) * BLOCK_BYTES == len(data) * 4
    assert not data or first_bad_block(data, batch.checksums) < 0
    return outcomes(batch)


def outcomes(batch) -> list[Outcome]:
    data, at, found = b"".join(batch.payload), 0, []
    for status, flags, length, its_version in RESULT.iter_unpack(batch.results):
        found.append(Outcome(status, flags, its_version, data[at : at + length]))
        at += length
    assert at == len(data)
    return found


async def get(
    store: ChunkStore, inode: int, index: int, offset: int = 0, length: int = MIB, verify: bool = False
) -> Outcome:
    return (await get_many(store, [(inode, index, offset, length)], verify))[0]


async def content(store: ChunkStore, inode: int, index: int, length: int = MIB) -> bytes:
    """Return the first `length` bytes of the chunk, holes as zeros."""
    found = await get(store, inode, index, 0, -(-length // BLOCK_BYTES) * BLOCK_BYTES)
    assert not found.status, found.status
    return found.data.ljust(length, b"\0")[:length]


async def scrubbed(store: ChunkStore, blocks: int = 1 << 14) -> tuple[int, list, list[str]]:
    cursor, checked, bad, problems = b"", 0, [], []
    while True:
        step = await store.scrub(cursor, blocks)
        checked += step.blocks
        bad += step.bad
        problems += step.problems
        if step.done:
            return checked, bad, problems
        cursor = step.cursor


async def is_sound(store: ChunkStore) -> None:
    """Assert that no block is bad and that index and free map agree."""
    _, bad, problems = await scrubbed(store)
    assert not bad and not problems, (bad, problems)


@check
async def a_new_one_is_empty(subject: ChunkStoreSubject) -> None:
    store = subject.store
    assert await get(store, 1, 0) == Outcome(0, 0, 0, b"")
    assert store.inodes(0, 10) == ([], False) and store.describe(1, 0, 10) == ([], False)
    assert store.status()["used_bytes"] == 0 and store.status()["state"] == "serving"
    assert await scrubbed(store) == (0, [], [])


@check
async def what_is_written_is_read_with_the_checksums_of_its_writer(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    first = await put(store, 7, 3, 0, data)
    assert version_parts(first) == (1, 1)
    whole = await get(store, 7, 3)
    assert whole == Outcome(0, UNCHECKED, first, data)
    part = await get(store, 7, 3, 260 * KIB, 8 * KIB)
    assert part.data == data[260 * KIB : 268 * KIB]
    assert (await get(store, 7, 3, 4 * KIB, 4 * KIB, verify=True)) == Outcome(
        0, 0, first, data[4 * KIB : 8 * KIB]
    )
    assert store.status()["used_bytes"] == MIB


@check
async def a_batch_is_answered_in_order_and_each_read_by_itself(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(64 * KIB)
    await put(store, 1, 0, 0, data)
    await put(store, 2, 9, 8 * KIB, data[: 4 * KIB])
    found = await get_many(
        store,
        [
            (2, 9, 0, 64 * KIB),
            (1, 0, 60 * KIB, 4 * KIB),
            (3, 0, 0, 4 * KIB),
            (1, 0, 4, 4 * KIB),
            (1, 0, 0, 8 * KIB),
            (1, 0, 60 * KIB, 8 * KIB),
            (1, 0, 64 * KIB, 4 * KIB),
            (1, 0, 0, 0),
        ],
    )
    bad = errors.InvalidRequest.wire_code
    assert [one.status for one in found] == [0, 0, 0, bad, 0, 0, 0, bad]
    assert [one.data for one in found] == [
        bytes(8 * KIB) + data[: 4 * KIB],
        data[60 * KIB :],
        b"",
        b"",
        data[: 8 * KIB],
        data[60 * KIB :],
        b"",
        b"",
    ]
    assert found[0].version and not found[2].version


@check
async def nobody_reads_without_a_right(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, some_bytes(4 * KIB))
    reads = b"".join(READ.pack(1, 0, 0, 4 * KIB, grant, 0) for grant in range(5))
    batch = store.read_now(reads, [1, 2, NO_INODE, ALL_INODES])
    if batch.missed:
        await store.finish_read(batch)
    stale, bad = errors.StaleGrant.wire_code, errors.InvalidRequest.wire_code
    assert [one.status for one in outcomes(batch)] == [0, stale, stale, 0, bad]


@check
async def a_batch_that_is_none_is_refused(subject: ChunkStoreSubject) -> None:
    for reads in (b"x" * 23, b"".join(READ.pack(1, 0, 0, CHUNK_BYTES_MAX, 0, 0) for _ in range(3))):
        try:
            subject.store.read_now(reads, [ALL_INODES])
        except errors.InvalidRequest:
            continue
        assert len(reads) % 24 == 0  # nothing was allocated, so nothing is counted


@check
async def pieces_of_any_size_are_merged_with_what_is_there(subject: ChunkStoreSubject) -> None:
    store = subject.store
    random_ = random.Random(5)
    expected = bytearray(MIB)
    for turn in range(60):
        length = random_.choice([1, 100, 4095, 4096, 4097, 9000, 70000, 300000])
        offset = random_.choice([0, 1, 4095, 4096, 256 * KIB - 10, random_.randrange(MIB)])
        data = some_bytes(min(length, MIB - offset), turn)
        await put(store, 1, 0, offset, data)
        expected[offset : offset + len(data)] = data
    assert await content(store, 1, 0) == expected
    await is_sound(store)


@check
async def holes_are_zeros_and_cost_nothing(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(100)
    await put(store, 1, 0, CHUNK_BYTES_MAX - 100, data)
    await put(store, 1, 0, 600 * KIB, data)
    assert store.status()["used_bytes"] == 2 * BLOCK_BYTES
    found = await get(store, 1, 0, 0, CHUNK_BYTES_MAX)
    expected = bytearray(CHUNK_BYTES_MAX)
    expected[600 * KIB : 600 * KIB + 100] = expected[-100:] = data
    assert found.data == expected
    assert len((await get(store, 1, 0, 0, 8 * MIB)).data) == 604 * KIB
    (described,), more = store.describe(1, 0, 10)
    assert (described.blocks, described.end, more) == (2, CHUNK_BYTES_MAX, False)


@check
async def a_piece_that_is_not_what_its_writer_summed_changes_nothing(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(12 * KIB)
    await put(store, 1, 0, 0, data)
    for offset, length in ((0, 4 * KIB), (100, 50), (100, 9000), (4 * KIB, 6 * KIB)):
        other = some_bytes(length, 2)
        checksums = bytearray(piece_checksums(other, offset))
        checksums[-1] ^= 1
        await refused(errors.ChecksumMismatch, store.write(1, 0, offset, memoryview(other), bytes(checksums)))
        await refused(
            errors.InvalidRequest, store.write(1, 0, offset, memoryview(other), bytes(checksums[:-4]))
        )
    assert await content(store, 1, 0, 12 * KIB) == data
    assert store.status()["used_bytes"] == 12 * KIB and not store.bad_blocks()


@check
async def a_write_outside_of_a_chunk_is_refused(subject: ChunkStoreSubject) -> None:
    for offset, length in ((CHUNK_BYTES_MAX, 1), (CHUNK_BYTES_MAX - 1, 2), (-1, 1), (0, 0)):
        data = bytes(length)
        await refused(errors.InvalidRequest, subject.store.write(1, 0, offset, memoryview(data), bytes(4)))
    assert subject.store.inodes(0, 1) == ([], False)


@check
async def a_chain_table_that_no_record_can_name_is_refused_and_nothing_is_written(
    subject: ChunkStoreSubject,
) -> None:
    store, data = subject.store, memoryview(bytes(4 * KIB))
    sums = piece_checksums(data, 0)
    await put(store, 1, 0, 0, some_bytes(4 * KIB), table=TABLE_MAX)
    assert store.table_of(1, 0) == TABLE_MAX
    before = store.status()["used_bytes"]
    for table in (TABLE_MAX + 1, 16, 255):
        await refused(errors.InvalidRequest, store.write(2, 0, 0, data, sums, table=table))
        await refused(errors.InvalidRequest, store.write(1, 0, 0, data, sums, table=table))
        await refused(errors.InvalidRequest, store.copy((1, 0, 0), 2, 0, 0, 4 * KIB, table=table))
    assert (
        store.inodes(0, 9)[0] == [1]
        and store.status()["used_bytes"] == before
        and store.table_of(1, 0) == TABLE_MAX
    )
    assert await content(store, 1, 0, 4 * KIB) == some_bytes(4 * KIB)


@check
async def what_an_earlier_process_of_a_session_sent_does_not_come_behind_a_later_one(
    subject: ChunkStoreSubject,
) -> None:
    store, life = subject.store, 1 << LIFE_BITS
    await put(store, 1, 0, 0, b"a" * 8192, request=RequestId(9, 1, life + 70))
    last = await put(store, 1, 0, 4096, b"b" * 4096, request=RequestId(9, 2, 2 * life + 1))
    assert await put(store, 1, 0, 0, b"c" * 8192, request=RequestId(9, 3, life + 71)) == last, (
        "answered, not done"
    )
    assert await put(store, 1, 0, 0, b"d" * 4096, request=RequestId(8, 3, life + 71)) > last, (
        "another session has its own"
    )
    await put(store, 1, 1, 0, b"e" * 4096, request=RequestId(9, 3, life + 71))
    assert await content(store, 1, 0, 8192) == b"d" * 4096 + b"b" * 4096
    assert await content(store, 1, 1, 4096) == b"e" * 4096, "of another chunk nobody has said that"


@check
async def a_repeated_request_is_answered_from_its_record(subject: ChunkStoreSubject) -> None:
    store = subject.store
    first = await put(store, 1, 0, 0, b"a" * 4096, request=RequestId(9, 1, 5))
    second = await put(store, 1, 0, 0, b"b" * 4096, request=RequestId(9, 2, 1))
    assert second > first
    assert await put(store, 1, 0, 0, b"a" * 4096, request=RequestId(9, 1, 5)) == second
    assert await put(store, 1, 0, 0, b"a" * 4096, request=RequestId(9, 1, 4)) == second, (
        "of before is done too"
    )
    await subject.restart()
    store = subject.store
    assert await put(store, 1, 0, 0, b"a" * 4096, request=RequestId(9, 1, 5)) == second
    assert await content(store, 1, 0, 4096) == b"b" * 4096
    third = await put(store, 1, 0, 0, b"c" * 4096, request=RequestId(9, 1, 6))
    assert third > second and await content(store, 1, 0, 4096) == b"c" * 4096
    for session in range(100, 130):
        last = await put(store, 1, 0, 0, b"d" * 4096, request=RequestId(session, 0, 1))
    assert await put(store, 1, 0, 0, b"e" * 4096, request=RequestId(114, 0, 1)) == last, "sixteen are kept"
    assert await content(store, 1, 0, 4096) == b"d" * 4096


@check
async def versions_grow_with_the_epoch_and_never_return(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(4096)
    assert await put(store, 1, 0, 0, data, epoch=3) == version(3, 1)
    assert await put(store, 1, 0, 0, data, epoch=3) == version(3, 2)
    assert await put(store, 1, 0, 0, data, epoch=4) == version(4, 1)
    assert await put(store, 1, 0, 0, data, epoch=3) == version(4, 2)
    assert await put(store, 1, 0, 0, data, version=version(4, 7)) == version(4, 7)
    await refused(errors.StaleEpoch, put(store, 1, 0, 0, data, version=version(4, 7)))
    await store.cut(1, 0, 1, 20)
    assert await put(store, 1, 0, 0, data, cut=1, epoch=4) == version(4, 8)
    await subject.restart()
    await subject.store.cut(1, 0, 2, 20)
    assert await put(subject.store, 1, 0, 0, data, cut=2, epoch=4) == version(4, 9)


@check
async def a_version_has_the_epoch_of_its_own_chain(subject: ChunkStoreSubject) -> None:
    """Chunks of one inode belong to chains with different epochs, also after a truncation."""
    for _ in range(5):
        await put(subject.store, 1, 0, 0, b"old", epoch=3)
    await put(subject.store, 1, 1, 0, b"young", epoch=9)
    await subject.store.cut(1, 0, 1, 20)
    await subject.restart()
    assert await put(subject.store, 1, 0, 0, b"new", epoch=3, cut=1) == version(3, 6)
    assert await put(subject.store, 1, 1, 0, b"new", epoch=9, cut=1) == version(9, 6)
    assert await put(subject.store, 1, 2, 0, b"new", epoch=10, cut=1) == version(10, 1)


@check
async def a_write_that_knew_an_older_cut_is_refused(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(4096)
    await put(store, 1, 0, 0, data)
    await store.cut(1, 4096, 5, 20)
    await refused(errors.StaleCut, put(store, 1, 0, 4096, data, cut=4))
    await refused(errors.StaleCut, put(store, 1, 7, 0, data))
    await put(store, 1, 0, 8192, data, cut=6)
    await put(store, 1, 0, 4096, data, cut=5)
    await put(store, 2, 0, 0, data)
    await subject.restart()
    store = subject.store
    await refused(errors.StaleCut, put(store, 1, 0, 4096, data, cut=4))
    await refused(errors.StaleCut, store.cut(1, 0, 4, 20))
    assert await content(store, 1, 0, 12 * KIB) == data * 3


@check
async def cut_bytes_are_never_seen_again(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    for index in range(4):
        await put(store, 1, index, 0, data)
    await put(store, 2, 3, 0, data)
    cut = 0
    expected = 4 * MIB
    for size in (
        3 * MIB + 300 * KIB + 77,
        3 * MIB + 300 * KIB,
        3 * MIB + 5,
        2 * MIB,
        2 * MIB - 1,
        4097,
        4096,
        10,
        0,
    ):
        cut += 1
        await store.cut(1, size, cut, 20)
        await store.cut(1, size, cut, 20)
        expected = size
        for index in range(4):
            kept = max(0, min(MIB, expected - index * MIB))
            assert await content(store, 1, index) == data[:kept].ljust(MIB, b"\0"), (size, index)
        await is_sound(store)
        assert store.status()["used_bytes"] == -(-size // 4096) * 4096 + MIB
        await subject.restart()
        store = subject.store
    assert await content(store, 2, 3) == data


@check
async def a_cut_that_comes_again_leaves_what_was_written_after_it(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    for index in range(3):
        await put(store, 1, index, 0, data)
    await store.cut(1, MIB + 100, 1, 20)
    await put(store, 1, 1, 5000, b"new", cut=1)
    await put(store, 1, 2, 0, b"new", cut=1)
    await store.cut(1, MIB + 100, 1, 20)
    await subject.restart()
    store = subject.store
    await store.cut(1, MIB + 100, 1, 20)
    assert await content(store, 1, 1) == (data[:100] + bytes(4900) + b"new").ljust(MIB, b"\0")
    assert await content(store, 1, 2) == b"new".ljust(MIB, b"\0")
    await store.cut(1, MIB + 100, 2, 20)
    assert await content(store, 1, 1) == data[:100].ljust(MIB, b"\0")
    assert await content(store, 1, 2) == bytes(MIB)
    last = (1 << 32) - 1
    await put(store, 1, last, 0, data, cut=2)
    await store.cut(1, MIB, 2, 20)
    await store.cut(1, (last << 20) + 5000, 3, 20)
    assert await content(store, 1, last) == data[:5000].ljust(MIB, b"\0")
    await is_sound(store)


@check
async def what_is_cut_and_grown_again_is_zeros(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, b"x" * 9000)
    await store.cut(1, 5000, 1, 20)
    await put(store, 1, 0, 8500, b"y", cut=1)
    assert await content(store, 1, 0, 9000) == b"x" * 5000 + bytes(3500) + b"y" + bytes(499)


@check
async def removed_inodes_are_gone_and_their_room_is_back(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    for index in range(3):
        await put(store, 1, index, 0, data)
    await put(store, 2, 0, 0, data[:5000])
    await put(store, 3, 0, 0, data[:5000])
    await store.cut(3, 4096, 9, 20)
    assert await store.remove([1, 3, 99]) == (4, 3 * MIB + 4096)
    assert await store.remove([1]) == (0, 0)
    assert store.inodes(0, 10) == ([2], False)
    assert store.status()["used_bytes"] == 8 * KIB
    assert (await get(store, 1, 0)).data == b""
    await is_sound(store)
    await store.flush()
    await subject.lose_power()
    assert subject.store.inodes(0, 10) == ([2], False)
    assert await content(subject.store, 2, 0, 5000) == data[:5000]
    await is_sound(subject.store)


@check
async def chunks_and_inodes_are_listed_in_steps(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for inode in (5, 3, 1 << 62, 4):
        for index in (0, 2, 1 << 31):
            await put(store, inode, index, 0, b"x", cut=inode % 7)
    assert store.inodes(0, 2) == ([3, 4], True)
    assert store.inodes(4, 2) == ([5, 1 << 62], False)
    described, more = store.describe(5, 0, 2)
    assert [one.index for one in described] == [0, 2] and more
    described, more = store.describe(5, 3, 2)
    assert [(one.index, one.blocks, one.end, one.cut) for one in described] == [
        (1 << 31, 1, 4096, 5)
    ] and not more
    assert store.describe(6, 0, 2) == ([], False)


@check
async def a_full_one_refuses_and_works_again_when_there_is_room(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    written = 0
    try:
        for index in range(CAPACITY_BYTES // MIB + 1):
            await put(store, 1, index, 0, data)
            written += 1
    except errors.NoSpace:
        pass
    room = store.status()["capacity_bytes"]
    assert room - 2 * MIB < written * MIB == store.status()["used_bytes"] <= room
    small = 0
    try:
        for _ in range(1000):
            await put(store, 2, 0, small * 4096, data[:4096])
            small += 1
    except errors.NoSpace:
        pass
    assert store.status()["used_bytes"] <= room
    await refused(errors.NoSpace, put(store, 3, 0, 0, b"x"))
    assert store.inodes(0, 10)[0] == [1, 2]
    for turn in range(30):
        await put(store, 1, 0, turn * 4096, data[:4096])
        await put(store, 1, 1, turn * 100, data[:50])
    await store.cut(1, 5 * MIB + 100, 1, 20)
    assert await content(store, 1, 5) == data[:100].ljust(MIB, b"\0")
    await put(store, 3, 0, 0, data)
    await store.remove([1, 2])
    assert await content(store, 3, 0) == data
    for index in range(written - 1):
        await put(store, 4, index, 0, data)
    await is_sound(store)


@check
async def what_was_answered_survives_the_death_of_the_process(subject: ChunkStoreSubject) -> None:
    store = subject.store
    expected = {}
    for turn in range(40):
        index, offset = turn % 3, turn * 5000
        data = some_bytes(6000, turn)
        await put(store, 1, index, offset, data)
        whole = expected.setdefault(index, bytearray(MIB))
        whole[offset : offset + 6000] = data
        if turn % 13 == 12:
            await subject.restart()
            store = subject.store
    for index, whole in expected.items():
        assert await content(store, 1, index) == whole
    await is_sound(store)


@check
async def what_was_flushed_survives_the_loss_of_power(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    await put(store, 1, 0, 0, data)
    await put(store, 1, 0, 10_000, b"flushed")
    await store.flush()
    await put(store, 1, 0, 10_000, b"forgott")
    await put(store, 2, 0, 0, data)
    await subject.lose_power()
    store = subject.store
    found = await content(store, 1, 0)
    assert found[:10_000] == data[:10_000] and found[10_007:] == data[10_007:]
    assert found[10_000:10_007] in (b"flushed", b"forgott")
    assert await content(store, 2, 0) in (data, bytes(MIB))
    await is_sound(store)
    await put(store, 1, 0, 10_000, b"again..")
    assert (await content(store, 1, 0))[10_000:10_007] == b"again.."


@check
async def a_failed_sync_fences(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, b"old" * 2000)
    await store.flush()
    await put(store, 1, 0, 0, b"new" * 2000)
    subject.fail_next_sync()
    await refused(errors.Fenced, store.flush())
    for again in (store.flush(), put(store, 1, 0, 0, b"x"), store.cut(1, 0, 1, 20), store.remove([1])):
        await refused(errors.Fenced, again)
    try:
        store.read_now(READ.pack(1, 0, 0, 4096, 0, 0), [1])
        raise AssertionError("a fenced store was read")
    except errors.Fenced:
        pass
    assert store.status()["state"] == "fenced" and "sync" in store.status()["fenced_because"]
    await subject.lose_power()
    assert await content(subject.store, 1, 0, 6000) in (b"old" * 2000, b"new" * 2000)
    await is_sound(subject.store)


@check
async def a_failed_write_leaves_nothing_half_done(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(64 * KIB)
    before = await put(store, 1, 0, 0, data)
    used = store.status()["used_bytes"]
    subject.fail_next_write()
    await refused(errors.DriveFailed, put(store, 1, 0, 1000, some_bytes(40_000, 2)))
    subject.fail_next_write()
    await refused(errors.DriveFailed, put(store, 2, 0, 0, data))
    found = await get(store, 1, 0)
    assert (found.version, found.data) == (before, data)
    assert store.status()["used_bytes"] == used and store.inodes(0, 5) == ([1], False)
    await put(store, 1, 0, 1000, b"works")
    await is_sound(store)


@check
async def a_flipped_bit_is_never_returned_once_it_is_looked_at(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(64 * KIB)
    await put(store, 1, 0, 0, data)
    await store.flush()
    subject.flip(1, 0, 3)
    mismatch = errors.ChecksumMismatch.wire_code
    batch = store.read_now(READ.pack(1, 0, 0, 64 * KIB, 0, 0), [1])
    if batch.missed:
        await store.finish_read(batch)
    assert first_bad_block(b"".join(batch.payload), batch.checksums) == 3, (
        "the reader sees it by the checksum"
    )
    assert (await get(store, 1, 0, 0, 64 * KIB, verify=True)).status == mismatch
    (bad,) = store.bad_blocks()
    assert bad[:3] == (1, 0, 3)
    found = await get_many(store, [(1, 0, 3 * 4096, 4096), (1, 0, 0, 3 * 4096)])
    assert [one.status for one in found] == [mismatch, 0]
    await refused(errors.ChecksumMismatch, put(store, 1, 0, 3 * 4096 + 5, b"x"))
    _, found_bad, problems = await scrubbed(store)
    assert [one[:3] for one in found_bad] == [(1, 0, 3)] and not problems
    await subject.restart()
    store = subject.store
    assert (await get(store, 1, 0, 3 * 4096, 4096)).status == mismatch, "remembered"
    await put(store, 1, 0, 3 * 4096, data[:4096])
    assert not store.bad_blocks()
    assert (await get(store, 1, 0, 3 * 4096, 4096)).data == data[:4096]
    await is_sound(store)


@check
async def a_scrub_goes_in_steps(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for inode in range(1, 20):
        await put(store, inode, 0, 0, some_bytes(20_000, inode))
    assert await scrubbed(store, 7) == (19 * 5, [], [])
    await refused(errors.InvalidRequest, store.scrub(b"nonsense", 1))
