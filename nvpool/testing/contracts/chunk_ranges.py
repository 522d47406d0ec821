"""Contract of a ChunkStore for ranges: holes, extents, copies. Second part of the suite in
`contracts/chunk_store`."""

from __future__ import annotations

import contextlib
import random

from nvpool.core import errors
from nvpool.core.ids import RequestId, version, version_parts
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX, KIB, MIB
from nvpool.testing.contracts.chunk_store import (
    Check,
    ChunkStoreSubject,
    content,
    get,
    is_sound,
    put,
    refused,
    some_bytes,
)

CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


async def holds(subject: ChunkStoreSubject, expected: dict[int, bytes | bytearray]) -> None:
    """Assert that chunks of inode 1 hold these bytes and zeros behind them, also after a restart."""
    for _ in range(2):
        for index, data in expected.items():
            assert await content(subject.store, 1, index) == bytes(data).ljust(MIB, b"\0"), index
        await is_sound(subject.store)
        await subject.restart()


async def fill(store) -> None:
    """Write chunks of inode 1 until the store is full."""
    index = 0
    with contextlib.suppress(errors.NoSpace):
        while True:
            await put(store, 1, index, 0, some_bytes(MIB, index))
            index += 1


@check
async def a_hole_is_zeros_and_gives_its_blocks_back(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = bytearray(some_bytes(MIB))
    await put(store, 1, 0, 0, bytes(data))
    number = 0
    for begin, end, freed in (
        (8192, 16384, 2),
        (100, 200, 0),
        (4000, 4200, 0),
        (4096 * 10 + 1, 4096 * 13, 2),
        (4096 * 20, 4096 * 22 + 7, 2),
        (4096 * 30 + 5, 4096 * 33 + 9, 2),
        (4096 * 62, 4096 * 130, 68),
        (4096 * 62 - 1, 4096 * 130 + 1, 0),
        (4096 * 61, 4096 * 62 - 1, 1),
        (MIB - 1, MIB, 0),
        (MIB - 5000, MIB, 1),
    ):
        number += 1
        used = store.status()["used_bytes"]
        assert await store.cut(1, begin, number, 20, end) == freed * BLOCK_BYTES, (begin, end)
        assert await store.cut(1, begin, number, 20, end) == 0
        data[begin:end] = bytes(end - begin)
        assert store.status()["used_bytes"] == used - freed * BLOCK_BYTES
        assert await content(store, 1, 0) == data, (begin, end)
    await holds(subject, {0: data})
    assert await subject.store.cut(1, 0, number + 1, 20, MIB) > 0
    assert subject.store.status()["used_bytes"] == 0 and subject.store.inodes(0, 9) == ([], False)


@check
async def a_hole_over_chunks_takes_what_lies_between_and_nothing_else(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    for index in range(6):
        await put(store, 1, index, 0, data)
    await put(store, 2, 3, 0, data)
    assert await store.cut(1, MIB + 5000, 1, 20, 4 * MIB + 6000) == 3 * MIB - BLOCK_BYTES
    await holds(subject, {0: data, 1: data[:5000], 2: b"", 3: b"", 4: bytes(6000) + data[6000:], 5: data})
    store = subject.store
    assert await content(store, 2, 3) == data
    assert await store.cut(1, 4 * MIB, 2, 20, 5 * MIB) == MIB - BLOCK_BYTES
    assert [one.index for one in store.describe(1, 0, 9)[0]] == [0, 1, 5]
    assert await store.cut(1, 7 * MIB, 3, 20, 1 << 52) == 0
    for begin, end in ((5, 5), (6, 5), (0, (1 << 52) + 1)):
        await refused(errors.InvalidRequest, store.cut(1, begin, 4, 20, end))


@check
async def a_write_from_before_a_hole_does_not_bring_bytes_back(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    request = RequestId(7, 1, 1)
    await put(store, 1, 0, 0, data, request=request)
    await store.cut(1, 4096, 1, 20, 8192)
    await refused(errors.StaleCut, put(store, 1, 0, 4096, data[:4096], cut=0, request=RequestId(7, 2, 2)))
    await put(store, 1, 0, 0, data, request=request)  # a repeated request: already executed
    await put(store, 1, 0, 5000, b"new", cut=1)
    await store.cut(1, 4096, 1, 20, 8192)  # repeated, or out of order
    expected = bytearray(data)
    expected[4096:8192] = bytes(4096)
    expected[5000:5003] = b"new"
    await holds(subject, {0: expected})
    await refused(errors.StaleCut, subject.store.cut(1, 0, 0, 20, 4096))


@check
async def a_hole_is_durable_when_it_is_answered(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(MIB)
    for index in range(3):
        await put(store, 1, index, 0, data)
    await store.flush()
    await store.cut(1, MIB - 5000, 1, 20, 2 * MIB + 5000)
    await subject.lose_power()
    assert await content(subject.store, 1, 0) == data[:-5000] + bytes(5000)
    assert await content(subject.store, 1, 1) == bytes(MIB)
    assert await content(subject.store, 1, 2) == bytes(5000) + data[5000:]
    await refused(errors.StaleCut, put(subject.store, 1, 1, 0, data))
    await is_sound(subject.store)


@check
async def a_bad_block_at_the_edge_of_a_hole_stays_bad_and_one_in_it_is_gone(
    subject: ChunkStoreSubject,
) -> None:
    store = subject.store
    await put(store, 1, 0, 0, some_bytes(5 * BLOCK_BYTES))
    await store.flush()
    subject.flip(1, 0, 1)
    subject.flip(1, 0, 2)
    await store.cut(1, BLOCK_BYTES + 10, 1, 20, 3 * BLOCK_BYTES)
    assert (
        await get(store, 1, 0, BLOCK_BYTES, BLOCK_BYTES, verify=True)
    ).status == errors.ChecksumMismatch.wire_code
    assert (await get(store, 1, 0, 2 * BLOCK_BYTES, BLOCK_BYTES, verify=True)).data in (
        b"",
        bytes(BLOCK_BYTES),
    )
    assert [bad[:3] for bad in store.bad_blocks()] == [(1, 0, 1)]


@check
async def a_hole_can_be_made_where_there_is_no_room(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await fill(store)
    await store.cut(1, 5000, 1, 20, MIB + 6000)
    assert await content(store, 1, 0) == some_bytes(MIB, 0)[:5000].ljust(MIB, b"\0")
    assert await content(store, 1, 1) == bytes(6000) + some_bytes(MIB, 1)[6000:]
    await put(store, 1, 0, 5000, b"room", cut=1)
    await is_sound(store)


@check
async def extents_name_what_is_no_hole(subject: ChunkStoreSubject) -> None:
    store = subject.store
    assert store.extents(1, 0, 1 << 32) == ([], 1 << 32)
    await put(store, 1, 0, 0, some_bytes(70 * BLOCK_BYTES))
    await put(store, 1, 0, 100 * BLOCK_BYTES, b"x")
    await put(store, 1, 0, 127 * BLOCK_BYTES, some_bytes(3 * BLOCK_BYTES))
    await put(store, 1, 7, MIB - 1, b"x")
    await put(store, 1, (1 << 32) - 1, 4096, b"x")
    await put(store, 2, 0, 0, b"x")
    everything = [(0, 0, 70), (0, 100, 1), (0, 127, 3), (7, 255, 1), ((1 << 32) - 1, 1, 1)]
    assert store.extents(1, 0, 1 << 32) == (everything, 1 << 32)
    assert store.extents(1, 1, 8) == (everything[3:4], 8) and store.extents(1, 8, 100) == ([], 100)
    await store.cut(1, 10 * BLOCK_BYTES, 1, 20, 69 * BLOCK_BYTES)
    await subject.restart()
    assert subject.store.extents(1, 0, 1) == ([(0, 0, 10), (0, 69, 1), (0, 100, 1), (0, 127, 3)], 1)


@check
async def many_extents_are_listed_in_steps(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for index in range(1100):
        await put(store, 1, index, 0, b"x")
    found, first = [], 0
    while first < 1 << 32:
        some, goes_on = store.extents(1, first, 1 << 32)
        assert goes_on > first
        found += some
        first = goes_on
    assert found == [(index, 0, 1) for index in range(1100)]


@check
async def what_is_copied_is_there_twice_and_neither_follows_the_other(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = bytearray(some_bytes(MIB))
    await put(store, 1, 3, 0, bytes(data))
    first, copied = await store.copy((1, 3, 0), 2, 0, 0, MIB, epoch=4)
    assert (version_parts(first), copied) == ((4, 1), MIB)
    assert (await get(store, 2, 0, verify=True)).data == data and store.status()["used_bytes"] == 2 * MIB
    second, copied = await store.copy((1, 3, 8192), 2, 0, 12288, 4096 * 70, epoch=4)
    assert (second, copied) == (version(4, 2), 4096 * 70)
    expected = bytearray(data)
    expected[12288 : 12288 + 4096 * 70] = data[8192 : 8192 + 4096 * 70]
    await put(store, 1, 3, 0, some_bytes(MIB, 2))
    assert await content(store, 2, 0) == expected
    await store.copy((2, 0, 0), 2, 0, 4096, 8192)  # source and destination are the same chunk and overlap
    expected[4096:12288] = expected[:8192]
    await subject.restart()
    assert await content(subject.store, 2, 0) == expected
    await subject.store.flush()
    await subject.lose_power()
    assert await content(subject.store, 2, 0) == expected
    await is_sound(subject.store)


@check
async def holes_are_copied_as_holes(subject: ChunkStoreSubject) -> None:
    store = subject.store
    data = some_bytes(3 * BLOCK_BYTES)
    await put(store, 1, 0, 10 * BLOCK_BYTES, data)
    await put(store, 1, 0, 100 * BLOCK_BYTES, data)
    await put(store, 2, 0, 0, some_bytes(200 * BLOCK_BYTES, 2))
    assert (await store.copy((1, 0, 0), 2, 0, 5 * BLOCK_BYTES, 150 * BLOCK_BYTES))[1] == 6 * BLOCK_BYTES
    assert store.extents(2, 0, 1)[0] == [(0, 0, 5), (0, 15, 3), (0, 105, 3), (0, 155, 45)]
    assert (await store.copy((1, 0, 0), 3, 0, 0, 10 * BLOCK_BYTES)) == (0, 0) and store.describe(3, 0, 1) == (
        [],
        False,
    )
    assert (await store.copy((9, 9, 0), 2, 0, 0, BLOCK_BYTES))[1] == 0
    await subject.lose_power()
    found = await content(subject.store, 2, 0, 200 * BLOCK_BYTES)
    assert found[15 * BLOCK_BYTES : 18 * BLOCK_BYTES] == data or not any(found), "all of the copy, or nothing"
    await is_sound(subject.store)


@check
async def a_copy_is_refused_as_a_write_is(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, some_bytes(MIB))
    for source, offset, length in (
        (0, 0, 0),
        (1, 0, 4096),
        (0, 1, 4096),
        (0, 0, 4095),
        (0, CHUNK_BYTES_MAX, 4096),
        (-4096, 0, 4096),
        (CHUNK_BYTES_MAX, 0, 4096),
    ):
        await refused(errors.InvalidRequest, store.copy((1, 0, source), 2, 0, offset, length))
    await store.cut(2, 0, 5, 20)
    await refused(errors.StaleCut, store.copy((1, 0, 0), 2, 0, 0, MIB, cut=4))
    await refused(errors.Cancelled, store.copy((1, 0, 0), 2, 0, 0, MIB, cut=5, given_up=lambda: True))
    assert store.describe(2, 0, 1) == ([], False)
    request = RequestId(9, 1, 5)
    first, _ = await store.copy((1, 0, 0), 2, 0, 0, MIB, cut=5, request=request)
    await put(store, 1, 0, 0, some_bytes(MIB, 2))
    assert await store.copy((1, 0, 0), 2, 0, 0, MIB, cut=5, request=request) == (first, MIB)
    assert await content(store, 2, 0) == some_bytes(MIB), "a repetition is answered and not made"
    await store.flush()
    subject.flip(1, 0, 7)
    await refused(errors.ChecksumMismatch, store.copy((1, 0, 0), 2, 0, 0, MIB, cut=5))
    assert [bad[:3] for bad in store.bad_blocks()] == [(1, 0, 7)]
    assert await content(store, 2, 0) == some_bytes(MIB)
    subject.fail_next_write()
    await refused(errors.NvpoolError, store.copy((1, 0, 8 * 4096), 2, 0, 0, 4096, cut=5))
    assert await content(store, 2, 0) == some_bytes(MIB)


@check
async def a_full_store_copies_nothing_that_grows(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await fill(store)
    await refused(errors.NoSpace, store.copy((1, 0, 0), 2, 0, 0, MIB))
    await store.copy((1, 0, 0), 1, 1, 0, 64 * KIB)
    assert (await content(store, 1, 1))[: 64 * KIB] == some_bytes(MIB, 0)[: 64 * KIB]
    await is_sound(store)


@check
async def writes_holes_and_copies_in_any_order_are_what_a_model_says(subject: ChunkStoreSubject) -> None:
    store = subject.store
    dice = random.Random(11)
    model = {name: bytearray(MIB) for name in ((1, 0), (1, 1), (2, 0))}
    cuts = {1: 0, 2: 0}
    for turn in range(150):
        name = inode, index = dice.choice(list(model))
        kind = dice.choice(("write", "write", "hole", "copy", "restart" if not turn % 10 else "copy"))
        begin = dice.choice((dice.randrange(MIB), dice.randrange(256) * BLOCK_BYTES))
        length = min(dice.choice((1, 5000, BLOCK_BYTES, 90 * BLOCK_BYTES)), MIB - begin)
        if kind == "write":
            data = dice.randbytes(length)
            await put(store, inode, index, begin, data, cut=cuts[inode])
            model[name][begin : begin + length] = data
        elif kind == "hole":
            cuts[inode] += 1
            await store.cut(inode, index * MIB + begin, cuts[inode], 20, index * MIB + begin + length)
            model[name][begin : begin + length] = bytes(length)
        elif kind == "copy":
            source = dice.choice(list(model))
            begin, from_ = begin // BLOCK_BYTES * BLOCK_BYTES, dice.randrange(256) * BLOCK_BYTES
            length = min(-(-length // BLOCK_BYTES) * BLOCK_BYTES, MIB - begin, MIB - from_)
            await store.copy((*source, from_), inode, index, begin, length, cut=cuts[inode])
            model[name][begin : begin + length] = model[source][from_ : from_ + length]
        else:
            await subject.restart()
            store = subject.store
    for (inode, index), expected in model.items():
        found = await content(store, inode, index)
        assert found == expected
        for _, first, count in store.extents(inode, index, index + 1)[0]:
            found = (
                found[: first * BLOCK_BYTES]
                + bytes(count * BLOCK_BYTES)
                + found[(first + count) * BLOCK_BYTES :]
            )
        assert not any(found), "bytes outside of every extent"
    await is_sound(store)
