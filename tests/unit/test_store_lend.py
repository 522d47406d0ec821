"""What a store lends to clients of its host: no block is used again before every lifetime has ended that may name it, whoever
dies in between; and every change is told by the table before it is answered."""

import asyncio
import json
import os
import random
import shutil
import struct
import tempfile
from array import array
from pathlib import Path

import pytest

from nvpool.core import errors, grants
from nvpool.core.checksum import crc32c
from nvpool.core.clock import ManualClock
from nvpool.core.units import MIB
from nvpool.host.processes import boot_id
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import MAP_FORMAT, PoolMap, PoolSettings
from nvpool.rpc import fd_passing
from nvpool.rpc.messages import data_codec
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks import location_leases as lend
from nvpool.store.chunks.api import LEND_S, LocatedBlocks, StoreOptions
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.chunks.recovery import ReplayCheck
from nvpool.store.disk.allocator import SpacePending, Transaction
from nvpool.store.disk.device import MemoryDevice
from nvpool.store.disk.index_records import decode_held, encode_held, held_key
from nvpool.store.server.service import StoreService
from nvpool.testing.contracts.chunk_store import content, is_sound, put, some_bytes
from nvpool.testing.fakes.meta_shard import PEER

BLOCK = 4096
GOLDEN = Path(__file__).parents[1] / "golden" / "short-cut.json"
SECRET = b"k" * 32


class Lending:
    """A store over the memory device, a real index and a clock that moves when told to; `die` leaves what kill -9 leaves."""

    def __init__(self, blocks=2048):
        self.directory = Path(tempfile.mkdtemp(prefix="store-"))
        self.blocks = blocks
        self.device = MemoryDevice(blocks * BLOCK)
        self.clock = ManualClock()
        self.memory = -1
        """Of the table, where somebody keeps it, and since when."""
        self.since_s = 0.0

    async def begin(self):
        kept = lend.KeptTable(os.dup(self.memory), self.since_s) if self.memory >= 0 else None
        self.store = BlockChunkStore(
            self.device, self.blocks, target=1, options=StoreOptions(kept_table=kept), clock=self.clock
        )
        options = LmdbOptions(
            sync_interval_s=30, checkpoint_interval_s=30, journal_bytes=1 << 20, map_bytes=1 << 20
        )
        kv = await LmdbKv.open(
            self.directory / "index",
            options,
            before_checkpoint=self.store.sync_data,
            on_replay=ReplayCheck(self.device.read_whole, self.device.write),
            on_fence=self.store.fence,
        )
        await self.store.attach(kv)
        return self.store

    def keep_table(self):
        self.memory, self.since_s = os.memfd_create("kept", os.MFD_ALLOW_SEALING), self.clock.boottime_s()

    async def die(self):
        await self.store.abandon()
        return await self.begin()

    async def close(self):
        await self.store.abandon()
        shutil.rmtree(self.directory)
        if self.memory >= 0:
            os.close(self.memory)

    def lend(self, inode, index=0, blocks=256):
        return self.store.locate(inode, index, blocks, 60.0)

    def places(self, inode, index=0):
        return set(places_of(lend.located(self.store.index, self.store.index.chunk(inode, index), 4096))) - {
            0
        }

    def free(self) -> set[int]:
        """All blocks that would be given to a write now."""
        transaction = Transaction()
        try:
            while True:
                self.store.allocator.allocate(transaction, 1, grows=False)
        except (SpacePending, errors.NoSpace):
            return {place for place, _ in transaction.taken}
        finally:
            self.store.allocator.drop(transaction)


def places_of(found: LocatedBlocks) -> list[int]:
    places = []
    for run in found.runs:
        place, count = run >> 12, (run & 4095) + 1
        places += range(place, place + count) if place else [0] * count
    assert len(places) == found.blocks and len(found.checksums) == 4 * found.blocks
    return places


def lending(test):
    def run():
        async def main():
            one = Lending()
            await one.begin()
            try:
                await test(one)
            finally:
                await one.close()

        asyncio.run(asyncio.wait_for(main(), 120))

    run.__name__ = test.__name__
    return run


@lending
async def test_an_overwritten_block_is_given_out_again_when_the_last_lifetime_that_names_it_has_ended_and_not_before(
    one,
):
    await put(one.store, 1, 0, 0, some_bytes(8 * BLOCK))
    old = one.places(1)
    one.lend(1)
    one.clock.advance(LEND_S - 1)
    one.lend(1)  # once more: this one counts
    await put(one.store, 1, 0, 0, some_bytes(8 * BLOCK, 2))
    await one.store.flush()
    assert one.store.allocator.resting_changes == 1
    assert not old & one.free()
    one.clock.advance(LEND_S - 0.01)
    await one.store.tend()
    assert not old & one.free()
    one.clock.advance(0.02)
    await one.store.tend()
    assert one.store.allocator.resting_changes == 0
    assert old <= one.free()


@lending
async def test_what_was_never_lent_or_was_written_after_the_last_location_is_free_with_the_next_flush(one):
    await put(one.store, 1, 0, 0, some_bytes(BLOCK))
    await put(one.store, 2, 0, 0, some_bytes(BLOCK))
    one.lend(2)
    free = one.places(1)
    await put(one.store, 1, 0, 0, some_bytes(BLOCK, 2))
    await one.store.flush()
    assert free <= one.free()
    one.clock.advance(2 * LEND_S + 0.1)
    gone = one.places(2)
    await put(one.store, 2, 0, 0, some_bytes(BLOCK, 2))
    await one.store.flush()
    assert gone <= one.free(), "its lifetime had ended before it was overwritten"


@lending
async def test_a_cut_a_removal_and_a_truncated_tail_rest_as_well_and_holes_are_punched_after_it(one):
    punched = []

    async def discard(ranges):
        punched.extend(ranges)

    one.device.discard = discard
    one.store.kind = "directory"
    await put(one.store, 1, 0, 0, some_bytes(MIB))
    await put(one.store, 1, 1, 0, some_bytes(MIB))
    await put(one.store, 2, 0, 0, some_bytes(MIB))
    old = one.places(1) | one.places(1, 1) | one.places(2)
    for inode, index in ((1, 0), (1, 1), (2, 0)):
        assert one.lend(inode, index)
    kept = sorted(one.places(1))[:2]
    await one.store.cut(1, 2 * BLOCK + 100, 1, 20)
    await one.store.remove([2])
    await one.store.flush()
    assert not punched and not old & one.free()
    one.clock.advance(LEND_S)
    await one.store.tend()
    assert sum(length for _, length in punched) >= 2 * MIB
    assert old - set(kept) <= one.free()


@lending
async def test_after_a_death_and_after_two_nothing_that_was_lent_is_used_before_its_time(one):
    await put(one.store, 1, 0, 0, some_bytes(4 * BLOCK))
    await put(one.store, 2, 0, 0, some_bytes(4 * BLOCK))
    first, second = one.places(1), one.places(2)
    one.lend(1)
    one.lend(2)
    one.clock.advance(1)
    await put(
        one.store, 1, 0, 0, some_bytes(4 * BLOCK, 2)
    )  # rests until its first lifetime would end, 6 s from the beginning
    await one.die()
    one.clock.advance(1)
    # lent by the dead process, freed by this one, which knows of no lifetime of its own
    await put(one.store, 2, 0, 0, some_bytes(4 * BLOCK, 2))
    await one.store.flush()
    assert not (first | second) & one.free()
    await one.die()
    assert not (first | second) & one.free()
    one.clock.advance(LEND_S - 1.01)
    await one.store.tend()
    assert not first & one.free() and not second & one.free()
    one.clock.advance(2)
    await one.store.tend()
    assert first | second <= one.free()
    assert await content(one.store, 1, 0, 4 * BLOCK) == some_bytes(4 * BLOCK, 2)
    await is_sound(one.store)


@lending
async def test_a_death_without_lifetimes_and_a_reboot_hold_nothing_back(one):
    await put(one.store, 1, 0, 0, some_bytes(BLOCK))
    old = one.places(1)
    await one.die()
    assert one.store.lender.dead_until_s <= one.clock.boottime_s()
    await put(one.store, 1, 0, 0, some_bytes(BLOCK, 2))
    await one.store.flush()
    assert old <= one.free()
    one.lend(1)
    old = one.places(1)
    await put(one.store, 1, 0, 0, some_bytes(BLOCK, 3))
    lend.boot_id, real = lambda: "another boot", lend.boot_id
    try:
        await one.die()
        assert old <= one.free()
    finally:
        lend.boot_id = real


@lending
async def test_blocks_that_rest_are_waited_for_and_scarce_space_is_not_lent(one):
    size = 1024
    await put(one.store, 1, 0, 0, some_bytes(size * BLOCK))
    assert one.lend(1)
    await put(one.store, 1, 0, 0, some_bytes(900 * BLOCK, 2))
    assert one.store.allocator.scarce and one.lend(1) is None
    writing = asyncio.ensure_future(put(one.store, 1, 0, 0, some_bytes(900 * BLOCK, 3)))
    await asyncio.wait([writing], timeout=0.3)
    assert not writing.done(), "the only free blocks may be read still"
    one.clock.advance(LEND_S)
    await asyncio.wait_for(writing, 120)
    assert await content(one.store, 1, 0, 900 * BLOCK) == some_bytes(900 * BLOCK, 3)


@lending
async def test_a_cut_soon_after_a_death_is_answered_when_the_clients_of_the_dead_process_can_not_read_any_more(
    one,
):
    for inode in (1, 2):
        await put(one.store, inode, 0, 0, some_bytes(8 * BLOCK))
        one.lend(inode)
    await one.die()
    cutting = asyncio.ensure_future(one.store.cut(1, 10, 1, 20))
    punching = asyncio.ensure_future(one.store.cut(2, BLOCK, 1, 20, 2 * BLOCK))
    await asyncio.wait([cutting, punching], timeout=0.2)
    assert not cutting.done() and not punching.done()
    one.clock.advance(LEND_S)
    await asyncio.wait_for(cutting, 120)
    assert await asyncio.wait_for(punching, 120) == BLOCK
    await asyncio.wait_for(one.store.cut(1, 5, 2, 20), 120)


@lending
async def test_a_cut_after_an_orderly_end_waits_for_no_client_and_after_a_death_that_follows_it_does_again(
    one,
):
    for inode in (1, 2):
        await put(one.store, inode, 0, 0, some_bytes(8 * BLOCK))
    old = one.places(1)
    _, slot, stamp, _ = one.lend(1)
    seen = one.store.lender.table()  # as a client has it
    await one.store.close()
    assert struct.unpack("<I", os.pread(seen, 4, 4 * slot))[0] != stamp, "the client returns nothing any more"
    os.close(seen)
    await one.begin()
    assert one.store.kv.get(b"E") == boot_id().encode()
    assert await asyncio.wait_for(one.store.cut(1, 0, 1, 20), 120) == 8 * BLOCK
    await one.store.flush()
    assert not old & one.free(), "who is reading there at this moment finds no other file's bytes"
    await one.die()  # it has lent nothing
    assert await asyncio.wait_for(one.store.cut(2, 4 * BLOCK, 1, 20), 120) == 4 * BLOCK
    one.lend(2)
    assert one.store.kv.get(b"E") is None
    await one.die()
    cutting = asyncio.ensure_future(one.store.cut(2, 10, 2, 20))
    await asyncio.wait([cutting], timeout=0.2)
    assert not cutting.done()
    cutting.cancel()
    await one.store.close()  # not the end of those of the one before
    await one.begin()
    again = asyncio.ensure_future(one.store.cut(2, 10, 2, 20))
    await asyncio.wait([again], timeout=0.2)
    assert not again.done()
    one.clock.advance(LEND_S)
    await asyncio.wait_for(again, 120)
    await is_sound(one.store)


@lending
async def test_a_cut_after_a_death_waits_for_no_client_where_all_tables_are_one_that_outlives_the_processes(
    one,
):
    for inode in (1, 2):
        await put(one.store, inode, 0, 0, some_bytes(8 * BLOCK))
    old = one.places(2)
    one.lend(1)
    one.clock.advance(2)
    one.keep_table()
    await one.die()  # with a table of its own: its clients see nothing of ours
    one.clock.advance(1)
    _, slot, stamp, _ = one.lend(2)
    seen = one.store.lender.table()  # as a client has it
    cutting = asyncio.ensure_future(one.store.cut(1, 10, 1, 20))
    await asyncio.wait([cutting], timeout=0.2)
    assert not cutting.done()
    one.store.lender.serve_until(one.clock.boottime_s())
    await one.die()  # with the table that is kept
    assert struct.unpack("<I", os.pread(seen, 4, 4 * slot))[0] != stamp, (
        "the client of the dead returns nothing any more"
    )
    again = asyncio.ensure_future(one.store.cut(1, 5, 2, 20))
    await asyncio.wait([again], timeout=0.2)
    assert not again.done(), "a client of the first process may read yet"
    one.clock.advance(LEND_S - 1)
    await asyncio.wait_for(again, 120)
    one.lend(2)
    await one.die()
    assert await asyncio.wait_for(one.store.cut(2, 0, 1, 20), 120) == 8 * BLOCK
    await one.store.flush()
    assert not old & one.free()  # who is reading there at this moment finds no other file's bytes
    one.clock.advance(LEND_S)
    await one.store.tend()
    assert old <= one.free()
    os.close(seen)
    await is_sound(one.store)


@lending
async def test_each_change_of_a_chunk_shows_in_the_table_before_it_is_answered_and_reading_does_not(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(3 * BLOCK))
    await put(store, 1, 1, 0, some_bytes(3 * BLOCK))
    stamps = [store.lender.stamp(1, index) for index in (0, 1)]
    assert [one.lend(1, index)[1:3] for index in (0, 1)] == stamps
    await content(store, 1, 0, BLOCK)
    await store.flush()
    assert [store.lender.stamp(1, index) for index in (0, 1)] == stamps
    for change in (
        lambda: put(store, 1, 0, 5, b"x"),
        lambda: store.cut(1, MIB + 100, 1, 20),
        lambda: store.cut(1, 100, 2, 20),
        lambda: store.remove([1]),
    ):
        before = store.lender.stamp(1, 0), store.lender.stamp(1, 1)
        await change()
        assert (store.lender.stamp(1, 0), store.lender.stamp(1, 1)) != before
    assert one.lend(1) is None


@lending
async def test_holes_and_copies_show_in_the_table_for_each_chunk_that_they_change_before_it_does(one):
    store = one.store
    for index in range(4):
        await put(store, 1, index, 0, some_bytes(4 * BLOCK, index))
    await put(store, 2, 0, 0, some_bytes(2 * BLOCK))
    await put(store, 2, 0, 3 * BLOCK, some_bytes(BLOCK))
    old = [one.places(1, index) for index in range(4)]
    assert all(one.lend(1, index) for index in range(4))
    seen = []
    applied = store.kv.apply

    def apply(effects, **words):
        seen.append([store.lender.stamp(1, index)[1] for index in range(4)])
        return applied(effects, **words)

    store.kv.apply = apply
    for change, of in (
        (lambda: store.cut(1, 10, 1, 20, 2 * BLOCK + 10), {0}),
        (lambda: store.cut(1, MIB + 5, 2, 20, 2 * MIB + 2 * BLOCK + 5), {1, 2}),
        (lambda: store.copy((2, 0, 0), 1, 3, 0, 2 * BLOCK, cut=2), {3}),
        (lambda: store.copy((2, 0, 0), 1, 3, 0, 4 * BLOCK, cut=2), {3}),
    ):
        before = [store.lender.stamp(1, index)[1] for index in range(4)]
        del seen[:]
        await change()
        after = [store.lender.stamp(1, index)[1] for index in range(4)]
        assert {index for index in range(4) if after[index] != before[index]} == of
        for index in of:
            assert any(stamps[index] == after[index] for stamps in seen), "told only when it had changed"
    del store.kv.apply
    await store.flush()
    gone = [places - one.places(1, index) for index, places in enumerate(old)]
    assert all(gone) and not set.union(*gone) & one.free(), (
        "they may be read until their lifetimes have ended"
    )
    one.clock.advance(LEND_S + 1)
    await store.flush()
    await store.tend()
    assert set.union(*gone) <= one.free()
    await is_sound(store)


@lending
async def test_places_and_checksums_are_those_of_the_index_whatever_holes_there_are(one):
    chance = random.Random(5)
    for inode in range(1, 12):
        model: dict[int, bytes] = {}
        for step in range(chance.randrange(1, 12)):
            block, count = chance.randrange(200), chance.choice([1, 2, 70])
            data = some_bytes(count * BLOCK, inode * 100 + step)
            await put(one.store, inode, 0, block * BLOCK, data)
            for at in range(count):
                model[block + at] = data[at * BLOCK : at * BLOCK + BLOCK]
        blocks = chance.choice([256, 300, max(model) // 2 + 1])
        found = one.lend(inode, 0, blocks)
        within = [block for block in model if block < blocks]
        if not within:
            assert found is None
            continue
        places = places_of(found[3])
        assert max(within) < found[3].blocks <= blocks
        for block, place in enumerate(places):
            assert bool(place) == (block in model)
            if place:
                assert one.device.read_whole(place * BLOCK, BLOCK) == model[block]
                assert struct.unpack_from("<I", found[3].checksums, 4 * block)[0] == crc32c(model[block])
        for inode_before in range(1, inode):
            await one.store.remove([inode_before])


class Asked:
    peer = PEER

    def __init__(self, message):
        self.method, self.message, self.payload = (
            Method.DATA_LOCATE,
            message.SerializeToString(),
            memoryview(b""),
        )
        self.deadline_s, self.cancelled = float("inf"), False
        self.answer = None

    def reply(self, message=b"", payload=()):
        self.answer = pb.LocateReply.FromString(message)


def ask(one, entries, rights=grants.READ, inode=1, left_s=60.0, token=None):
    service = StoreService(one.store, target=1, grant_secret=SECRET, clock=one.clock)
    ends = one.clock.wall_ns() // 1_000_000 + int(left_s * 1000)
    request = pb.LocateRequest(
        target=1,
        token=one.store.lender.token if token is None else token,
        grants=[grants.sign(grants.Grant(rights, 0, 9, inode, 0, ends), SECRET)],
        entries=b"".join(data_codec.LOCATE_ENTRY.pack(*entry) for entry in entries),
    )
    call = Asked(request)
    service.handle(call)
    return (
        list(data_codec.LOCATE_RESULT.iter_unpack(call.answer.results)),
        array("Q", call.answer.runs),
        call.answer.checksums,
    )


@lending
async def test_places_are_told_to_whom_the_descriptors_were_given_under_a_grant_and_no_longer_than_it_lasts(
    one,
):
    await put(one.store, 1, 0, 0, some_bytes(4 * BLOCK))
    version = await put(one.store, 1, 1, 0, some_bytes(2 * BLOCK))
    results, runs, checksums = ask(
        one, [(1, 0, 256, 0, 0), (1, 1, 256, 0, version), (1, 2, 256, 0, 0), (2, 0, 1, 0, 0), (1, 0, 1, 7, 0)]
    )
    assert [
        (status, flags, run_count, blocks, life)
        for status, flags, run_count, blocks, life, _, _, _ in results
    ] == [
        (0, 0, 1, 4, 5000),
        (0, data_codec.SAME_VERSION, 0, 0, 5000),
        (0, 0, 0, 0, 0),
        (errors.StaleGrant.wire_code, 0, 0, 0, 0),
        (errors.StaleGrant.wire_code, 0, 0, 0, 0),
    ]
    assert len(runs) == 1 and len(checksums) == 16 and results[1][7] == version
    assert ask(one, [(1, 0, 256, 0, 0)], left_s=-3.0)[0][0][4] == 2000, (
        "the clocks of two machines may differ by five seconds"
    )
    with pytest.raises(errors.AccessDenied):
        ask(one, [(1, 0, 256, 0, 0)], token=b"guess")
    assert ask(one, [(1, 0, 256, 0, 0)], rights=grants.WRITE)[0][0][0] == errors.StaleGrant.wire_code
    with pytest.raises(errors.InvalidRequest):
        ask(one, [(1, 0, 256, 0, 0)] * 257)
    place = next(iter(one.places(1)))
    one.device.flip(place)
    one.store.quarantine.note(1, 0, 0, "was found bad")
    assert ask(one, [(1, 0, 256, 0, 0)])[0][0][4] == 0, "a chunk with bad blocks is read through the store"


@lending
async def test_locations_are_called_in_when_a_right_is_taken(one):
    await put(one.store, 1, 0, 0, some_bytes(BLOCK))
    ((_, _, _, _, _, slot, stamp, _),) = ask(one, [(1, 0, 256, 0, 0)])[0]
    assert one.store.lender._table[slot] == stamp
    service = StoreService(one.store, target=1, grant_secret=SECRET, clock=one.clock)
    service.update_map(
        taken(
            PoolMap(MAP_FORMAT, "p", "p", 5, PoolSettings()),
            77,
            "",
            grants.READ,
            one.clock.wall_ns() // 1_000_000,
            60_000,
        )
    )
    assert one.store.lender._table[slot] != stamp


def test_more_inodes_than_can_be_remembered_count_as_lent_altogether(monkeypatch):
    monkeypatch.setattr(lend, "INODES_MAX", 10)

    async def main():
        one = Lending()
        await one.begin()
        for inode in range(1, 40):
            await put(one.store, inode, 0, 0, some_bytes(BLOCK))
            one.lend(inode)
        now_s = one.clock.boottime_s()
        assert all(one.store.lender.until(inode) >= now_s + LEND_S for inode in range(1, 40))
        one.clock.advance(2 * LEND_S + 1)
        assert not any(one.store.lender.until(inode) for inode in range(1, 40))
        await one.close()

    asyncio.run(main())


def golden() -> dict[str, str]:
    entries = data_codec.LOCATE_ENTRY.pack(7, 1, 256, 0, 9)
    said = lend.encode_said(3, bytes(range(16)), 1234.5)
    return {
        "entry": entries.hex(),
        "result": data_codec.LOCATE_RESULT.pack(0, 1, 2, 256, 5000, 65535, 0xFFFFFFFF, 9).hex(),
        "LocateRequest": pb.LocateRequest(
            map_epoch=1, target=2, grants=[b"g"], token=b"t" * 16, entries=entries
        )
        .SerializeToString()
        .hex(),
        "LocateReply": pb.LocateReply(map_epoch=1, results=b"r", runs=b"p" * 8, checksums=b"cccc")
        .SerializeToString()
        .hex(),
        "said with the descriptors": (
            fd_passing._HEAD.pack(fd_passing._MAGIC, fd_passing._VERSION, 0) + said
        ).hex(),
        "slots": json.dumps(
            [lend.slot_of(1, 0), lend.slot_of(1, 1), lend.slot_of((1 << 63) - 1, 0xFFFFFFFF)]
        ),
        "held record": (held_key(5) + encode_held(1234.5678, [((1 << 42) - 1, 1), (16, 65536)])).hex(),
    }


def test_the_formats_of_the_short_cut_are_what_they_were():
    assert golden() == json.loads(GOLDEN.read_text())
    assert decode_held(held_key(5), encode_held(2.0, [(16, 65536)])) == (5, 2.0, [(16, 65536)])
    with pytest.raises(errors.CorruptRecord):
        decode_held(held_key(5), b"1234567")
    assert boot_id()
