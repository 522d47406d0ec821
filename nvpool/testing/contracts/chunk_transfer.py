"""Contract of a ChunkStore for whole chunks: list versions, export, import. Checks as in `chunk_store`."""

from __future__ import annotations

from dataclasses import replace

from nvpool.core import errors
from nvpool.core.checksum import block_checksums
from nvpool.core.ids import RequestId, version
from nvpool.core.units import BLOCK_BYTES, KIB, MIB
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.poolmap.file_layout import chain_of
from nvpool.store.chunks.api import ChunkCopy, ChunkState, ChunkStore, InodeCut
from nvpool.testing.contracts.chunk_store import (
    Check,
    ChunkStoreSubject,
    content,
    get,
    is_sound,
    put,
    refused,
    scrubbed,
    some_bytes,
)

CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def listed(
    store: ChunkStore, limit: int = 1000, wanted: ChainSet | None = None, until=None
) -> tuple[list, list[InodeCut]]:
    chunks, inodes, after = [], {}, None
    for _ in range(10_000):
        step = store.versions(after, limit, wanted, until)
        assert len(step.chunks) <= limit
        chunks += step.chunks
        inodes |= {one.inode: one for one in step.inodes}
        after = step.end
        if after is None:
            assert [one[:2] for one in chunks] == sorted({one[:2] for one in chunks}), "in order, none twice"
            return chunks, list(inodes.values())
    raise AssertionError("the listing does not end")


def a_copy(inode: int, index: int, its_version: int, blocks: dict[int, bytes], **fields) -> ChunkCopy:
    data = b"".join(blocks[number] for number in sorted(blocks))
    return ChunkCopy(
        inode,
        index,
        its_version,
        runs=tuple((number, 1) for number in sorted(blocks)),
        checksums=block_checksums(data) if data else b"",
        content=data,
        **fields,
    )


async def installed(store: ChunkStore, copy: ChunkCopy) -> bool:
    return (await store.install([(copy, store.state(copy.inode, copy.index))]))[0]


async def everything(store: ChunkStore) -> dict[tuple[int, int], ChunkCopy]:
    """Return the content of the store in a form that can be compared: runs of one block each."""
    found = {}
    for one in listed(store)[0]:
        copy = await store.fetch(one.inode, one.index)
        assert (copy.version, copy.table, copy.cut) == (one.version, one.table, one.cut)
        assert one.blocks == len(copy.checksums) // 4
        runs = tuple((number, 1) for first, count in copy.runs for number in range(first, first + count))
        found[one[:2]] = replace(
            copy, runs=runs, content=bytes(copy.content), known=InodeCut(one.inode, *copy.known[1:3], 0)
        )
    return found


@check
async def versions_are_listed_in_order_in_steps(subject: ChunkStoreSubject) -> None:
    store = subject.store
    given = {}
    for inode in (3, 1, 7, 1 << 62):
        for index in (5, 0, 1, 300):
            given[inode, index] = await put(
                store, inode, index, 8 * KIB, some_bytes(5000, index), epoch=2, cut=inode % 5
            )
    await put(store, 1, 0, 300 * KIB, some_bytes(9000), epoch=9, cut=1)
    for limit in (1, 2, 5, 1000):
        chunks, inodes = listed(store, limit)
        assert {one[:2]: one.version for one in chunks} == given | {(1, 0): version(9, 1)}
        assert not inodes
        assert {one.cut for one in chunks if one.inode == 7} == {2}
        assert [one.blocks for one in chunks if one[:2] in ((1, 0), (1, 5))] == [5, 2]
    assert [one[:2] for one in listed(store, 2, until=(3, 5))[0]] == [
        (1, 0),
        (1, 1),
        (1, 5),
        (1, 300),
        (3, 0),
        (3, 1),
        (3, 5),
    ]


@check
async def versions_are_listed_of_the_chains_that_are_asked_for(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for inode in range(1, 40):
        await put(store, inode, 0, 0, b"x", table=1 + inode % 3)
        await put(store, inode, 1, 10_000, b"y" * 500, table=1 + inode % 3)
    await put(store, 4, 0, 0, b"z" * 5000)
    every, _ = listed(store)
    assert {one.table for one in every} == {1, 2, 3}
    assert all(one.table == 1 + one.inode % 3 for one in every), "and a write that does not say it leaves it"
    wanted = ChainSet(
        [(1 + 4 % 3, chain_of(4, 0)), (1 + 5 % 3, chain_of(5, 1)), (1 + 5 % 3 % 3 + 1, chain_of(6, 1))]
    )
    assert [one for one in every if wanted.has_chunk(one.table, *one[:2])] == listed(store, 1, wanted)[0]
    assert {(4, 0), (5, 1)} <= {one[:2] for one in listed(store, 1000, wanted)[0]}
    assert not listed(store, 5, ChainSet())[0]
    await subject.restart()
    assert listed(subject.store)[0] == every


@check
async def the_cuts_of_inodes_are_listed_too(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for inode in (1, 2, 3):
        await put(store, inode, 0, 0, some_bytes(20_000), epoch=4)
    await store.cut(2, 0, 7, 20)
    await store.cut(3, 5000, 8, 20)
    for limit in (1, 50):
        chunks, inodes = listed(store, limit)
        assert [one.inode for one in chunks] == [1, 3]
        assert [one[:3] for one in sorted(inodes)] == [(2, 7, version(4, 1)), (3, 8, 0)]
    assert store.state(2, 0) == ChunkState(0, 7) and store.state(1, 0) == ChunkState(version(4, 1), 0)


@check
async def a_chunk_is_the_same_in_the_store_that_it_is_copied_to(subject: ChunkStoreSubject) -> None:
    store = subject.store
    request = RequestId(9, 3, 77)
    await put(store, 1, 0, 5000, some_bytes(70_000), epoch=3, request=request, cut=2, table=2)
    await put(store, 1, 0, 700 * KIB, some_bytes(4096, 2), epoch=3, request=RequestId(9, 3, 78), cut=2)
    await store.cut(1, MIB, 5, 20)
    copy = await store.fetch(1, 0)
    assert (copy.version, copy.table, copy.cut) == (version(3, 2), 2, 2) and not copy.bad and not copy.more
    assert copy.requests == ((9, 3, 78),) and copy.known[:3] == (1, 5, 0)
    before = await content(store, 1, 0)
    assert await installed(store, replace(copy, inode=8, index=4, known=InodeCut(8, *copy.known[1:])))
    for _ in range(2):
        store = subject.store
        assert await content(store, 8, 4) == before
        assert (await get(store, 8, 4)).version == copy.version
        again = await store.fetch(8, 4)
        assert (again.runs, again.checksums, bytes(again.content)) == (
            copy.runs,
            copy.checksums,
            bytes(copy.content),
        )
        assert again.requests == copy.requests and again.known.cut == 5 and again.table == 2
        await refused(errors.StaleCut, put(store, 8, 4, 0, b"late", cut=4))
        assert await put(store, 8, 4, 0, b"again", request=RequestId(9, 3, 78), cut=5) == copy.version, (
            "answered, not done"
        )
        await subject.restart()
    await is_sound(subject.store)


@check
async def what_is_fetched_in_parts_is_the_whole(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for place in (0, 70, 71, 140, 255):
        await put(store, 1, 0, place * BLOCK_BYTES, some_bytes(BLOCK_BYTES, place))
    whole = await store.fetch(1, 0)
    for size in (1, 60, 64, 71, 256):
        parts, first = [], 0
        while True:
            part = await store.fetch(1, 0, first, size)
            parts.append(part)
            first += size
            if not part.more:
                break
        assert b"".join(bytes(part.content) for part in parts) == bytes(whole.content)
        assert b"".join(part.checksums for part in parts) == whole.checksums
        assert [
            block for part in parts for first, count in part.runs for block in range(first, first + count)
        ] == [0, 70, 71, 140, 255]
    assert not (await store.fetch(1, 1)).version and not (await store.fetch(2, 0)).version


@check
async def a_copy_replaces_whatever_is_there(subject: ChunkStoreSubject) -> None:
    """It also replaces a higher version, and removes blocks that the copy does not have."""
    store = subject.store
    old = some_bytes(900 * KIB, 5)
    await put(store, 1, 0, 0, old, epoch=9)
    await put(store, 1, 1, 0, b"neighbour")
    copy = a_copy(
        1, 0, version(2, 5), {3: some_bytes(BLOCK_BYTES, 3), 200: some_bytes(BLOCK_BYTES, 4)}, cut=3
    )
    assert await installed(store, copy)
    expected = bytearray(MIB)
    expected[3 * BLOCK_BYTES : 4 * BLOCK_BYTES] = some_bytes(BLOCK_BYTES, 3)
    expected[200 * BLOCK_BYTES : 201 * BLOCK_BYTES] = some_bytes(BLOCK_BYTES, 4)
    for _ in range(2):
        assert await content(subject.store, 1, 0) == expected
        assert (await get(subject.store, 1, 0)).version == version(2, 5)
        assert (await content(subject.store, 1, 1, 9)) == b"neighbour"
        assert subject.store.status()["used_bytes"] == 3 * BLOCK_BYTES
        await subject.restart()
    assert await put(subject.store, 1, 0, 0, b"on", epoch=10, cut=3) == version(10, 1)
    assert await installed(subject.store, ChunkCopy(1, 0))
    assert not listed(subject.store, until=(1, 0))[0] and not (await get(subject.store, 1, 0)).data
    assert subject.store.status()["used_bytes"] == BLOCK_BYTES
    await is_sound(subject.store)


@check
async def a_chunk_that_changed_meanwhile_is_left_alone(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, b"old")
    seen, absent = store.state(1, 0), store.state(1, 1)
    copy, other = (
        a_copy(1, 0, version(5, 1), {0: some_bytes(4096)}),
        a_copy(1, 1, version(5, 1), {0: some_bytes(4096)}),
    )
    await put(store, 1, 0, 0, b"new")
    await put(store, 1, 1, 0, b"came")
    further = replace(copy, index=2), ChunkState(0, 0)
    assert await store.install([(copy, seen), (other, absent), further]) == [False, False, True]
    assert await content(store, 1, 0, 3) == b"new" and await content(store, 1, 1, 4) == b"came"
    assert await content(store, 1, 2, 4096) == some_bytes(4096)
    seen = store.state(1, 0)
    await store.cut(1, 3 * MIB, 4, 20)
    assert await store.install([(copy, seen)]) == [False], "the inode was cut"
    assert store.status()["used_bytes"] == 3 * BLOCK_BYTES
    await is_sound(store)


@check
async def an_installed_chunk_survives_what_a_written_one_survives(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, some_bytes(300 * KIB, 8), epoch=2)
    await put(store, 2, 0, 0, some_bytes(8192, 9), epoch=2)
    await store.flush()
    before = await content(store, 1, 0), await content(store, 2, 0)
    copies = [
        a_copy(1, 0, version(7, 1), {number: some_bytes(4096, number) for number in range(0, 90, 3)}),
        a_copy(2, 0, version(7, 2), {0: some_bytes(4096, 1)}),
        a_copy(3, 0, version(7, 3), {1: some_bytes(4096, 2)}),
    ]
    assert await store.install([(copy, store.state(copy.inode, 0)) for copy in copies]) == [True] * 3
    after = [await content(store, inode, 0) for inode in (1, 2, 3)]
    await subject.lose_power()
    store = subject.store
    for inode, old, new in ((1, before[0], after[0]), (2, before[1], after[1]), (3, bytes(MIB), after[2])):
        found = await get(store, inode, 0)
        assert (await content(store, inode, 0), found.version) in (
            (old, version(2, 1) if inode < 3 else 0),
            (new, version(7, inode)),
        )
    await store.install([(copy, store.state(copy.inode, 0)) for copy in copies])
    await store.flush()
    await subject.lose_power()
    assert [await content(subject.store, inode, 0) for inode in (1, 2, 3)] == after
    assert [await get_version(subject.store, inode) for inode in (1, 2, 3)] == [
        version(7, number) for number in (1, 2, 3)
    ]
    await is_sound(subject.store)


async def get_version(store: ChunkStore, inode: int) -> int:
    return (await get(store, inode, 0)).version


@check
async def a_bad_block_is_bad_in_the_copy_too(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, some_bytes(40_960))
    await put(store, 1, 0, 600 * KIB, some_bytes(8192, 3))
    await store.flush()
    subject.flip(1, 0, 4)
    subject.flip(1, 0, 151)
    copy = await store.fetch(1, 0)
    assert sorted(copy.bad) == [4, 151] and copy.content[4 * BLOCK_BYTES : 5 * BLOCK_BYTES] == bytes(
        BLOCK_BYTES
    )
    assert {one[:3] for one in store.bad_blocks()} == {(1, 0, 4), (1, 0, 151)}
    await refused(errors.ChecksumMismatch, installed(store, replace(copy, index=9, bad=(4,))))
    assert not store.state(1, 9).version
    assert await installed(store, replace(copy, index=1))
    for _ in range(2):
        store = subject.store
        assert {one[:3] for one in store.bad_blocks()} >= {(1, 1, 4), (1, 1, 151)}
        assert (
            await get(store, 1, 1, 4 * BLOCK_BYTES, BLOCK_BYTES, verify=True)
        ).status == errors.ChecksumMismatch.wire_code
        assert (
            await get(store, 1, 1, 4 * BLOCK_BYTES, BLOCK_BYTES)
        ).status == errors.ChecksumMismatch.wire_code
        assert (await get(store, 1, 1, 5 * BLOCK_BYTES, BLOCK_BYTES)).data == some_bytes(40_960)[
            20_480:24_576
        ]
        assert {one[:3] for one in (await scrubbed(store))[1]} == {
            (1, 0, 4),
            (1, 0, 151),
            (1, 1, 4),
            (1, 1, 151),
        }
        await subject.restart()
    good = a_copy(1, 1, version(8, 1), {4: some_bytes(4096, 4)})
    assert await installed(subject.store, good)
    assert {one[:2] for one in subject.store.bad_blocks()} == {(1, 0)}
    assert (await get(subject.store, 1, 1, 4 * BLOCK_BYTES, BLOCK_BYTES)).data == some_bytes(4096, 4)


@check
async def what_does_not_fit_or_makes_no_sense_is_refused_and_changes_nothing(
    subject: ChunkStoreSubject,
) -> None:
    store = subject.store
    await put(store, 1, 0, 0, b"here")
    good = a_copy(1, 0, version(5, 1), {0: some_bytes(4096), 2: some_bytes(4096, 2)})
    for wrong in (
        replace(good, runs=((2, 1), (0, 1))),
        replace(good, runs=((0, 1),)),
        replace(good, content=good.content[1:]),
        replace(good, checksums=good.checksums[4:]),
        replace(good, runs=((0, 1), (4096, 1))),
        replace(good, table=0),
        replace(good, table=9),
        replace(good, version=0),
        replace(good, more=True),
        replace(good, runs=((0, 0), (1, 2))),
        replace(good, known=InodeCut(2, 1, 1, 20)),
        replace(good, index=1 << 32),
    ):
        await refused(errors.InvalidRequest, store.install([(wrong, store.state(1, 0))]))
    await refused(
        errors.ChecksumMismatch,
        installed(store, replace(good, checksums=good.checksums[4:] + good.checksums[:4])),
    )
    used = store.status()["used_bytes"]
    subject.fail_next_write()
    await refused(errors.DriveFailed, installed(store, good))
    big = [
        (
            a_copy(5, index, version(1, 1), {number: some_bytes(4096, number) for number in range(4096)}),
            store.state(5, index),
        )
        for index in range(3)
    ]
    await refused(errors.NoSpace, store.install(big))
    assert await content(store, 1, 0, 4) == b"here"
    assert store.status()["used_bytes"] == used
    assert await installed(store, good)
    await is_sound(store)


@check
async def cuts_are_raised_and_never_lowered(subject: ChunkStoreSubject) -> None:
    store = subject.store
    await put(store, 1, 0, 0, b"x")
    await store.cut(2, 0, 9, 20)
    await store.raise_cuts([InodeCut(1, 5, version(3, 3), 20), InodeCut(2, 7, 0, 20), InodeCut(4, 2, 0, 20)])
    for _ in range(2):
        await refused(errors.StaleCut, put(subject.store, 1, 0, 0, b"late", cut=4))
        await refused(errors.StaleCut, put(subject.store, 2, 0, 0, b"late", cut=8))
        await refused(errors.StaleCut, put(subject.store, 4, 0, 0, b"late", cut=1))
        assert await content(subject.store, 1, 0, 1) == b"x"
        await subject.restart()
    assert await put(subject.store, 1, 7, 0, b"on time", cut=5, epoch=2) == version(2, 4)
    await subject.store.raise_cuts([InodeCut(1, 5, version(2, 8), 20)])
    assert await put(
        subject.store, 1, 8, 0, b"epoch and counter are raised apart", cut=5, epoch=3
    ) == version(3, 9)


@check
async def a_decided_write_is_carried_out_whatever_was_raised(subject: ChunkStoreSubject) -> None:
    """Other members of the chain have the write. A later truncation request removes it."""
    store = subject.store
    await put(store, 1, 0, 0, b"first", version=version(12, 1))
    await store.raise_cuts([InodeCut(1, 5, version(14, 120), 20)])
    assert await put(store, 1, 0, 0, b"decided", version=version(12, 2)) == version(12, 2)
    assert await content(store, 1, 0, 7) == b"decided"
    await refused(errors.StaleEpoch, put(store, 1, 0, 0, b"again", version=version(12, 2)))
    await store.cut(1, 0, 5, 20)
    assert await content(store, 1, 0, 7) == bytes(7)
    assert await put(store, 1, 0, 0, b"next", cut=5, epoch=12) == version(12, 121)


@check
async def a_discarded_chunk_is_gone_and_its_neighbours_are_not(subject: ChunkStoreSubject) -> None:
    store = subject.store
    for index in range(3):
        await put(store, 1, index, 0, some_bytes(500 * KIB, index))
    assert await store.discard(1, 1, lambda: False) == 0
    assert await store.discard(1, 1, lambda: True) == 500 * KIB
    assert await store.discard(1, 1) == 0
    await subject.restart()
    assert [one.index for one in listed(subject.store)[0]] == [0, 2]
    assert await content(subject.store, 1, 2, 500 * KIB) == some_bytes(500 * KIB, 2)
    await is_sound(subject.store)


@check
async def a_bad_block_is_mended_by_bytes_that_fit_its_checksum_and_by_no_others(
    subject: ChunkStoreSubject,
) -> None:
    store = subject.store
    data = some_bytes(40_960)
    request = RequestId(1, 1, 1)
    await put(store, 1, 0, 0, data, request=request, table=2, epoch=4)
    await store.flush()
    subject.flip(1, 0, 3)
    reported: list[int] = []
    store.on_bad = lambda: reported.append(1)
    assert (await get(store, 1, 0, verify=True)).status == errors.ChecksumMismatch.wire_code
    assert reported and store.table_of(1, 0) == 2 and store.table_of(1, 1) == 0
    block = data[3 * BLOCK_BYTES : 4 * BLOCK_BYTES]
    assert not await store.mend(1, 0, 3, data[:BLOCK_BYTES])
    assert not await store.mend(1, 0, 3, block[1:]) and not await store.mend(1, 0, 77, block)
    assert not await store.mend(1, 1, 3, block)
    assert (await get(store, 1, 0, verify=True)).status == errors.ChecksumMismatch.wire_code
    assert await store.mend(1, 0, 3, block)
    for _ in range(2):
        store = subject.store
        found = await get(store, 1, 0, verify=True)
        assert (found.status, found.version, found.data) == (
            0,
            version(4, 1),
            data,
        ) and not store.bad_blocks()
        copy = await store.fetch(1, 0)
        assert copy.requests == (tuple(request),) and copy.table == 2
        await is_sound(store)
        await subject.lose_power()


async def two_replicas(
    subject: ChunkStoreSubject, data: bytes, bad: tuple[int, ...], before: tuple[int, ...] = (1, 2)
) -> None:
    """Make chunks of two inodes, as if on two stores; some blocks of the first one are bad."""
    for inode in before:
        await put(subject.store, inode, 0, 0, data, epoch=4)
    await subject.store.flush()
    for block in bad:
        subject.flip(1, 0, block)


async def mended_by_the_other(store: ChunkStore, block: int) -> bool:
    copy = await store.fetch(2, 0, block, 1)
    return await store.mend(1, 0, block, copy.content, checksum=bytes(copy.checksums), version=copy.version)


def what_it_is(copy: ChunkCopy) -> tuple:
    blocks = [block for first, count in copy.runs for block in range(first, first + count)]
    return copy.version, copy.cut, blocks, bytes(copy.checksums), bytes(copy.content), copy.bad


@check
async def a_bad_block_that_is_cut_is_good_again_by_who_has_cut_it_too(subject: ChunkStoreSubject) -> None:
    zeros_first = some_bytes(3 * BLOCK_BYTES) + bytes(2000) + some_bytes(40_960, 2)
    for size, end, data, bad, rounds in (
        (3 * BLOCK_BYTES + 1000, 0, some_bytes(40_960), (3,), 1),
        (3 * BLOCK_BYTES + 1000, 3 * BLOCK_BYTES + 2000, some_bytes(40_960), (3,), 2),
        (2 * BLOCK_BYTES + 5, 5 * BLOCK_BYTES + 9, some_bytes(40_960), (2, 5), 1),
        (62 * BLOCK_BYTES + 5, 70 * BLOCK_BYTES + 9, some_bytes(400_000), (62, 64, 70), 1),
        (3 * BLOCK_BYTES + 1000, 0, zeros_first, (3,), 3),
    ):
        await two_replicas(subject, data, bad)
        uncut = {block: await subject.store.fetch(2, 0, block, 1) for block in bad}
        for number in range(1, rounds + 1):
            for inode in (1, 2):
                await subject.store.cut(inode, size, number, 20, end)
        edges = [block for block in bad if block != 64]
        for _ in range(2):
            store = subject.store
            assert {one[:3] for one in store.bad_blocks()} == {(1, 0, block) for block in edges}
            ours = store.state(1, 0).version
            assert ours == store.state(2, 0).version
            for block in edges:
                assert (
                    await get(store, 1, 0, block * BLOCK_BYTES, BLOCK_BYTES, verify=True)
                ).status == errors.ChecksumMismatch.wire_code
                old = uncut[block]
                assert not await store.mend(1, 0, block, old.content)
                assert not await store.mend(
                    1, 0, block, old.content, checksum=bytes(old.checksums), version=old.version
                )
                assert not await store.mend(1, 0, block, old.content, checksum=bytes(4), version=ours)
            await subject.lose_power()
        store = subject.store
        for block in edges:
            assert await mended_by_the_other(store, block)
        await store.flush()
        for _ in range(2):
            store = subject.store
            assert not store.bad_blocks()
            assert what_it_is(await store.fetch(1, 0)) == what_it_is(await store.fetch(2, 0))
            whole = bytearray(data.ljust(MIB, b"\0"))
            whole[size : end or MIB] = bytes((end or MIB) - size)
            assert await content(store, 1, 0, MIB) == whole
            await is_sound(store)
            await subject.lose_power()
        await subject.store.remove([1, 2])


@check
async def a_block_that_is_bad_after_a_cut_is_mended_as_any_other(subject: ChunkStoreSubject) -> None:
    await two_replicas(subject, some_bytes(40_960), ())
    for inode in (1, 2):
        await subject.store.cut(inode, 3 * BLOCK_BYTES + 1000, 1, 20)
    subject.flip(1, 0, 3)
    assert (await get(subject.store, 1, 0, verify=True)).status == errors.ChecksumMismatch.wire_code
    assert await mended_by_the_other(subject.store, 3)
    assert what_it_is(await subject.store.fetch(1, 0)) == what_it_is(await subject.store.fetch(2, 0))


@check
async def a_bad_block_that_is_cut_can_only_be_written_as_a_whole(subject: ChunkStoreSubject) -> None:
    data = some_bytes(40_960)
    await two_replicas(subject, data, (3,), (1,))
    await subject.store.cut(1, 3 * BLOCK_BYTES + 1000, 1, 20)
    for _ in range(2):
        store = subject.store
        await refused(errors.ChecksumMismatch, put(store, 1, 0, 3 * BLOCK_BYTES + 500, b"part", cut=1))
        assert (
            await get(store, 1, 0, 3 * BLOCK_BYTES, BLOCK_BYTES, verify=True)
        ).status == errors.ChecksumMismatch.wire_code
        copy = await store.fetch(1, 0)
        assert copy.bad == (3,) and copy.content[3 * BLOCK_BYTES :] == bytes(BLOCK_BYTES)
        await subject.lose_power()
    store = subject.store
    await put(store, 1, 0, 3 * BLOCK_BYTES, data[:BLOCK_BYTES], cut=1)
    assert not store.bad_blocks() and await content(store, 1, 0, MIB) == (
        data[: 3 * BLOCK_BYTES] + data[:BLOCK_BYTES]
    ).ljust(MIB, b"\0")
    await is_sound(store)
