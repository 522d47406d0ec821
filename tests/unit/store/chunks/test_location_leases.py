"""Location leases of a store: no block is reused before every lease that names it has ended, whichever process dies in
between; and the table shows each change before its reply."""

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
from nvpool.host.process_identity import boot_id
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import MAP_FORMAT, PoolMap, PoolSettings
from nvpool.rpc import fd_passing
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks import location_leases as lease
from nvpool.store.chunks.api import LOCATION_LEASE_S, LocatedBlocks, StoreOptions
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.chunks.read_batch import located
from nvpool.store.chunks.recovery import ReplayCheck
from nvpool.store.disk.allocator import SpacePending, Transaction
from nvpool.store.disk.device import MemoryDevice
from nvpool.store.disk.index_records import decode_held, encode_held, held_key
from nvpool.store.server.service import StoreService
from nvpool.testing.contracts.chunk_store import content, is_sound, put, some_bytes
from nvpool.testing.fakes.meta_shard import PEER

BLOCK = 4096
GOLDEN = Path(__file__).parents[3] / "golden" / "short-cut.json"
SECRET = b"k" * 32


class LeasingStore:
    """A store over the memory device, a real index and a manual clock; `die` leaves what kill -9 leaves."""

    def __init__(self, blocks=2048):
        self.directory = Path(tempfile.mkdtemp(prefix="store-"))
        self.blocks = blocks
        self.device = MemoryDevice(blocks * BLOCK)
        self.clock = ManualClock()
        self.memory = -1
        """Descriptor of the table, if it is kept, and since when."""
        self.since_s = 0.0

    async def begin(self):
        kept = lease.KeptTable(os.dup(self.memory), self.since_s) if self.memory >= 0 else None
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

    def lease(self, inode, index=0, blocks=256):
        return self.store.locate(inode, index, blocks, 60.0)

    def places(self, inode, index=0):
        return set(places_of(located(self.store.index, self.store.index.chunk(inode, index), 4096))) - {0}

    def free(self) -> set[int]:
        """All blocks that a write could get now."""
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


def on_a_leasing_store(test):
    def run():
        async def main():
            one = LeasingStore()
            await one.begin()
            try:
                await test(one)
            finally:
                await one.close()

        asyncio.run(asyncio.wait_for(main(), 120))

    run.__name__ = test.__name__
    return run


@on_a_leasing_store
async def test_overwritten_block_is_reused_after_its_last_lease(
    one,
):
    await put(one.store, 1, 0, 0, some_bytes(8 * BLOCK))
    old = one.places(1)
    one.lease(1)
    one.clock.advance(LOCATION_LEASE_S - 1)
    one.lease(1)  # a second lease: this one counts
    await put(one.store, 1, 0, 0, some_bytes(8 * BLOCK, 2))
    await one.store.flush()
    assert one.store.allocator.resting_changes == 1
    assert not old & one.free()
    one.clock.advance(LOCATION_LEASE_S - 0.01)
    await one.store.tend()
    assert not old & one.free()
    one.clock.advance(0.02)
    await one.store.tend()
    assert one.store.allocator.resting_changes == 0
    assert old <= one.free()


@on_a_leasing_store
async def test_unleased_block_is_free_with_the_next_flush(one):
    await put(one.store, 1, 0, 0, some_bytes(BLOCK))
    await put(one.store, 2, 0, 0, some_bytes(BLOCK))
    one.lease(2)
    free = one.places(1)
    await put(one.store, 1, 0, 0, some_bytes(BLOCK, 2))
    await one.store.flush()
    assert free <= one.free()
    one.clock.advance(2 * LOCATION_LEASE_S + 0.1)
    gone = one.places(2)
    await put(one.store, 2, 0, 0, some_bytes(BLOCK, 2))
    await one.store.flush()
    assert gone <= one.free(), "its lease had ended before it was overwritten"


@on_a_leasing_store
async def test_truncated_and_removed_blocks_wait_for_leases(one):
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
        assert one.lease(inode, index)
    kept = sorted(one.places(1))[:2]
    await one.store.cut(1, 2 * BLOCK + 100, 1, 20)
    await one.store.remove([2])
    await one.store.flush()
    assert not punched and not old & one.free()
    one.clock.advance(LOCATION_LEASE_S)
    await one.store.tend()
    assert sum(length for _, length in punched) >= 2 * MIB
    assert old - set(kept) <= one.free()


@on_a_leasing_store
async def test_leased_blocks_are_kept_across_crashes(one):
    await put(one.store, 1, 0, 0, some_bytes(4 * BLOCK))
    await put(one.store, 2, 0, 0, some_bytes(4 * BLOCK))
    first, second = one.places(1), one.places(2)
    one.lease(1)
    one.lease(2)
    one.clock.advance(1)
    await put(
        one.store, 1, 0, 0, some_bytes(4 * BLOCK, 2)
    )  # rests until its first lease would end, 6 s from the start
    await one.die()
    one.clock.advance(1)
    # leased by the dead process, freed by this one, which has granted no lease itself
    await put(one.store, 2, 0, 0, some_bytes(4 * BLOCK, 2))
    await one.store.flush()
    assert not (first | second) & one.free()
    await one.die()
    assert not (first | second) & one.free()
    one.clock.advance(LOCATION_LEASE_S - 1.01)
    await one.store.tend()
    assert not first & one.free() and not second & one.free()
    one.clock.advance(2)
    await one.store.tend()
    assert first | second <= one.free()
    assert await content(one.store, 1, 0, 4 * BLOCK) == some_bytes(4 * BLOCK, 2)
    await is_sound(one.store)


@on_a_leasing_store
async def test_crash_without_leases_or_reboot_keeps_no_blocks(one):
    await put(one.store, 1, 0, 0, some_bytes(BLOCK))
    old = one.places(1)
    await one.die()
    assert one.store.location_leases.dead_until_s <= one.clock.boottime_s()
    await put(one.store, 1, 0, 0, some_bytes(BLOCK, 2))
    await one.store.flush()
    assert old <= one.free()
    one.lease(1)
    old = one.places(1)
    await put(one.store, 1, 0, 0, some_bytes(BLOCK, 3))
    lease.boot_id, real = lambda: "another boot", lease.boot_id
    try:
        await one.die()
        assert old <= one.free()
    finally:
        lease.boot_id = real


@on_a_leasing_store
async def test_write_waits_for_leases_and_scarce_space_gets_none(one):
    size = 1024
    await put(one.store, 1, 0, 0, some_bytes(size * BLOCK))
    assert one.lease(1)
    await put(one.store, 1, 0, 0, some_bytes(900 * BLOCK, 2))
    assert one.store.allocator.scarce and one.lease(1) is None
    writing = asyncio.ensure_future(put(one.store, 1, 0, 0, some_bytes(900 * BLOCK, 3)))
    await asyncio.wait([writing], timeout=0.3)
    assert not writing.done(), "the only free blocks may still be read"
    one.clock.advance(LOCATION_LEASE_S)
    await asyncio.wait_for(writing, 120)
    assert await content(one.store, 1, 0, 900 * BLOCK) == some_bytes(900 * BLOCK, 3)


@on_a_leasing_store
async def test_truncation_after_a_crash_waits_for_old_leases(
    one,
):
    for inode in (1, 2):
        await put(one.store, inode, 0, 0, some_bytes(8 * BLOCK))
        one.lease(inode)
    await one.die()
    cutting = asyncio.ensure_future(one.store.cut(1, 10, 1, 20))
    punching = asyncio.ensure_future(one.store.cut(2, BLOCK, 1, 20, 2 * BLOCK))
    await asyncio.wait([cutting, punching], timeout=0.2)
    assert not cutting.done() and not punching.done()
    one.clock.advance(LOCATION_LEASE_S)
    await asyncio.wait_for(cutting, 120)
    assert await asyncio.wait_for(punching, 120) == BLOCK
    await asyncio.wait_for(one.store.cut(1, 5, 2, 20), 120)


@on_a_leasing_store
async def test_truncation_after_an_orderly_stop_does_not_wait(
    one,
):
    for inode in (1, 2):
        await put(one.store, inode, 0, 0, some_bytes(8 * BLOCK))
    old = one.places(1)
    _, slot, stamp, _ = one.lease(1)
    seen = one.store.location_leases.table()  # as a client sees it
    await one.store.close()
    assert struct.unpack("<I", os.pread(seen, 4, 4 * slot))[0] != stamp, "the client stops returning bytes"
    os.close(seen)
    await one.begin()
    assert one.store.kv.get(b"E") == boot_id().encode()
    assert await asyncio.wait_for(one.store.cut(1, 0, 1, 20), 120) == 8 * BLOCK
    await one.store.flush()
    assert not old & one.free(), "a reader at this moment finds no other file's bytes"
    await one.die()  # it has granted no lease
    assert await asyncio.wait_for(one.store.cut(2, 4 * BLOCK, 1, 20), 120) == 4 * BLOCK
    one.lease(2)
    assert one.store.kv.get(b"E") is None
    await one.die()
    cutting = asyncio.ensure_future(one.store.cut(2, 10, 2, 20))
    await asyncio.wait([cutting], timeout=0.2)
    assert not cutting.done()
    cutting.cancel()
    await one.store.close()  # does not end the leases of the process before
    await one.begin()
    again = asyncio.ensure_future(one.store.cut(2, 10, 2, 20))
    await asyncio.wait([again], timeout=0.2)
    assert not again.done()
    one.clock.advance(LOCATION_LEASE_S)
    await asyncio.wait_for(again, 120)
    await is_sound(one.store)


@on_a_leasing_store
async def test_truncation_after_a_crash_with_a_kept_table_is_immediate(
    one,
):
    for inode in (1, 2):
        await put(one.store, inode, 0, 0, some_bytes(8 * BLOCK))
    old = one.places(2)
    one.lease(1)
    one.clock.advance(2)
    one.keep_table()
    await one.die()  # with its own table: its clients do not see ours
    one.clock.advance(1)
    _, slot, stamp, _ = one.lease(2)
    seen = one.store.location_leases.table()  # as a client sees it
    cutting = asyncio.ensure_future(one.store.cut(1, 10, 1, 20))
    await asyncio.wait([cutting], timeout=0.2)
    assert not cutting.done()
    one.store.location_leases.serve_until(one.clock.boottime_s())
    await one.die()  # with the table that is kept
    assert struct.unpack("<I", os.pread(seen, 4, 4 * slot))[0] != stamp, (
        "the dead process's client stops returning bytes"
    )
    again = asyncio.ensure_future(one.store.cut(1, 5, 2, 20))
    await asyncio.wait([again], timeout=0.2)
    assert not again.done(), "a client of the first process may still read"
    one.clock.advance(LOCATION_LEASE_S - 1)
    await asyncio.wait_for(again, 120)
    one.lease(2)
    await one.die()
    assert await asyncio.wait_for(one.store.cut(2, 0, 1, 20), 120) == 8 * BLOCK
    await one.store.flush()
    assert not old & one.free()  # a reader at this moment finds no other file's bytes
    one.clock.advance(LOCATION_LEASE_S)
    await one.store.tend()
    assert old <= one.free()
    os.close(seen)
    await is_sound(one.store)


@on_a_leasing_store
async def test_each_change_updates_the_table_before_its_reply(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(3 * BLOCK))
    await put(store, 1, 1, 0, some_bytes(3 * BLOCK))
    stamps = [store.location_leases.stamp(1, index) for index in (0, 1)]
    assert [one.lease(1, index)[1:3] for index in (0, 1)] == stamps
    await content(store, 1, 0, BLOCK)
    await store.flush()
    assert [store.location_leases.stamp(1, index) for index in (0, 1)] == stamps
    for change in (
        lambda: put(store, 1, 0, 5, b"x"),
        lambda: store.cut(1, MIB + 100, 1, 20),
        lambda: store.cut(1, 100, 2, 20),
        lambda: store.remove([1]),
    ):
        before = store.location_leases.stamp(1, 0), store.location_leases.stamp(1, 1)
        await change()
        assert (store.location_leases.stamp(1, 0), store.location_leases.stamp(1, 1)) != before
    assert one.lease(1) is None


@on_a_leasing_store
async def test_holes_and_copies_update_the_table_before_the_change(one):
    store = one.store
    for index in range(4):
        await put(store, 1, index, 0, some_bytes(4 * BLOCK, index))
    await put(store, 2, 0, 0, some_bytes(2 * BLOCK))
    await put(store, 2, 0, 3 * BLOCK, some_bytes(BLOCK))
    old = [one.places(1, index) for index in range(4)]
    assert all(one.lease(1, index) for index in range(4))
    seen = []
    applied = store.kv.apply

    def apply(effects, **words):
        seen.append([store.location_leases.stamp(1, index)[1] for index in range(4)])
        return applied(effects, **words)

    store.kv.apply = apply
    for change, of in (
        (lambda: store.cut(1, 10, 1, 20, 2 * BLOCK + 10), {0}),
        (lambda: store.cut(1, MIB + 5, 2, 20, 2 * MIB + 2 * BLOCK + 5), {1, 2}),
        (lambda: store.copy((2, 0, 0), 1, 3, 0, 2 * BLOCK, cut=2), {3}),
        (lambda: store.copy((2, 0, 0), 1, 3, 0, 4 * BLOCK, cut=2), {3}),
    ):
        before = [store.location_leases.stamp(1, index)[1] for index in range(4)]
        del seen[:]
        await change()
        after = [store.location_leases.stamp(1, index)[1] for index in range(4)]
        assert {index for index in range(4) if after[index] != before[index]} == of
        for index in of:
            assert any(stamps[index] == after[index] for stamps in seen), "shown only after it had changed"
    del store.kv.apply
    await store.flush()
    gone = [places - one.places(1, index) for index, places in enumerate(old)]
    assert all(gone) and not set.union(*gone) & one.free(), "they may be read until their leases have ended"
    one.clock.advance(LOCATION_LEASE_S + 1)
    await store.flush()
    await store.tend()
    assert set.union(*gone) <= one.free()
    await is_sound(store)


@on_a_leasing_store
async def test_locations_and_checksums_match_the_index(one):
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
        found = one.lease(inode, 0, blocks)
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
        token=one.store.location_leases.token if token is None else token,
        grants=[grants.sign(grants.Grant(rights, 0, 9, inode, 0, ends), SECRET)],
        entries=b"".join(read_write_codec.LOCATE_ENTRY.pack(*entry) for entry in entries),
    )
    call = Asked(request)
    service.handle(call)
    return (
        list(read_write_codec.LOCATE_RESULT.iter_unpack(call.answer.results)),
        array("Q", call.answer.runs),
        call.answer.checksums,
    )


@on_a_leasing_store
async def test_report_of_short_circuit_reads_is_bounded(one):
    service = StoreService(one.store, target=1, grant_secret=SECRET, clock=one.clock)
    most = read_write_codec.PAST_ENTRIES_MAX
    request = pb.LocateRequest(target=1, token=one.store.location_leases.token)
    request.past = read_write_codec.PAST_READS.pack(1, 1, 4096) * most
    service.handle(Asked(request))
    assert service.use.past_reads == most
    request.past += read_write_codec.PAST_READS.pack(1, 1, 4096)
    with pytest.raises(errors.InvalidRequest, match=str(most)):
        service.handle(Asked(request))


@on_a_leasing_store
async def test_locations_need_the_descriptor_token_and_a_valid_grant(
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
        (0, read_write_codec.SAME_VERSION, 0, 0, 5000),
        (0, 0, 0, 0, 0),
        (errors.StaleGrant.wire_code, 0, 0, 0, 0),
        (errors.StaleGrant.wire_code, 0, 0, 0, 0),
    ]
    assert len(runs) == 1 and len(checksums) == 16 and results[1][7] == version
    assert ask(one, [(1, 0, 256, 0, 0)], left_s=-3.0)[0][0][4] == 2000, (
        "clocks of two machines may differ by five seconds"
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


@on_a_leasing_store
async def test_locations_are_recalled_when_a_right_is_revoked(one):
    await put(one.store, 1, 0, 0, some_bytes(BLOCK))
    ((_, _, _, _, _, slot, stamp, _),) = ask(one, [(1, 0, 256, 0, 0)])[0]
    assert one.store.location_leases.stamps[slot] == stamp
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
    assert one.store.location_leases.stamps[slot] != stamp


def test_too_many_leased_inodes_count_as_leased_together(monkeypatch):
    monkeypatch.setattr(lease, "INODES_MAX", 10)

    async def main():
        one = LeasingStore()
        await one.begin()
        for inode in range(1, 40):
            await put(one.store, inode, 0, 0, some_bytes(BLOCK))
            one.lease(inode)
        now_s = one.clock.boottime_s()
        assert all(
            one.store.location_leases.until(inode) >= now_s + LOCATION_LEASE_S for inode in range(1, 40)
        )
        one.clock.advance(2 * LOCATION_LEASE_S + 1)
        assert not any(one.store.location_leases.until(inode) for inode in range(1, 40))
        await one.close()

    asyncio.run(main())


def golden() -> dict[str, str]:
    entries = read_write_codec.LOCATE_ENTRY.pack(7, 1, 256, 0, 9)
    said = lease.encode_said(3, bytes(range(16)), 1234.5)
    return {
        "entry": entries.hex(),
        "result": read_write_codec.LOCATE_RESULT.pack(0, 1, 2, 256, 5000, 65535, 0xFFFFFFFF, 9).hex(),
        "LocateRequest": pb.LocateRequest(
            map_epoch=1, target=2, grants=[b"g"], token=b"t" * 16, entries=entries
        )
        .SerializeToString()
        .hex(),
        "LocateReply": pb.LocateReply(map_epoch=1, results=b"r", runs=b"p" * 8, checksums=b"cccc")
        .SerializeToString()
        .hex(),
        "said with the descriptors": (
            fd_passing.HEAD.pack(fd_passing.MAGIC, fd_passing.VERSION, 0) + said
        ).hex(),
        "slots": json.dumps(
            [lease.slot_of(1, 0), lease.slot_of(1, 1), lease.slot_of((1 << 63) - 1, 0xFFFFFFFF)]
        ),
        "held record": (held_key(5) + encode_held(1234.5678, [((1 << 42) - 1, 1), (16, 65536)])).hex(),
    }


def test_short_circuit_formats_match_the_golden_file():
    assert golden() == json.loads(GOLDEN.read_text())
    assert decode_held(held_key(5), encode_held(2.0, [(16, 65536)])) == (5, 2.0, [(16, 65536)])
    with pytest.raises(errors.CorruptRecord):
        decode_held(held_key(5), b"1234567")
    assert boot_id()
