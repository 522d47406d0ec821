"""Writes that arrive as frames give the same replies, bytes, records and counts as the same writes by calls."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nvpool.core import grants
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.errors import Busy, DriveFailed, Fenced, NoSpace, StaleGrant, StaleTenure, WrongTarget
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.grant_revocation import taken
from nvpool.rpc.api import Greeting
from nvpool.rpc.messages.read_write_codec import encode_write_request
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transport_registry import transport
from nvpool.rpc.transports.frame import REQUEST, pack_head, read_head
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE
from nvpool.store.chunks.api import InodeCut, StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.disk.allocator import GROUP_BLOCKS, Transaction
from nvpool.store.disk.index_records import segment_key
from nvpool.store.server.service import StoreService
from nvpool.store.server.writes import WRITE
from tests.unit.store.server.test_reads import SECRET, Ordinary, pool_map

BLOCK = bytes(range(256)) * 16
PARTITION = 1 << 51
OWN_KEYS = (b"F", b"V")
"""Numbers and verifier of the index, which differ between stores."""


class DirectService(Ordinary):
    def ask(self, frame):
        kind, method, number, deadline_ms, message, payload_bytes = read_head(
            bytearray(frame), 0, len(frame), 0
        )
        assert kind == REQUEST
        self.arrived(number, method, deadline_ms, message, memoryview(frame)[len(frame) - payload_bytes :])
        return self.sent.pop() if self.sent else None  # the request has to wait


class One:
    """A store whose service gets its requests as frames, or as calls."""

    def __init__(self, path, store, clock, takes_frames):
        self.path, self.store, self.clock = path, store, clock
        self.service = StoreService(store, target=1, grant_secret=SECRET, clock=clock)
        self.service.update_map(pool_map(5))
        self.ordinary = DirectService(self.service)
        self.counters = self.ordinary.reply_stats
        self.takes_frames = takes_frames
        self.taken = 0
        store.allocator.is_used(0)  # the first group of the free map is in memory

    def take(self, frame, end=None, in_work=None):
        """Pass the frame to the service; return how many bytes it took, and the replies."""
        out, side = [], self.ordinary
        end = len(frame) if end is None else end
        in_work = side.in_work if in_work is None else in_work
        return self.service.fast_path.answer(bytearray(frame), end, in_work, self.counters, out, side), out

    def ask(self, frame):
        if self.takes_frames:
            taken, out = self.take(frame)
            if taken:
                assert taken == len(frame)
                self.taken += 1
                return out.pop() if out else None  # the request has to wait
            assert not out
        return self.ordinary.ask(frame)

    def said(self, **write):
        return self.ask(frame(self.clock, **write))

    def blocks(self, inode, index=0):
        """Record and blocks of the chunk, from the index and the drive."""
        chunk = self.store.index.chunk(inode, index)
        places = self.store.index.places(chunk, 0, 2)
        return chunk.version, [os.pread(self.store.device.fd, 4096, place << 12) for place in places if place]

    def state(self):
        """State of the store, in memory and in its index."""
        store, allocator = self.store, self.store.allocator
        index = [pair for pair in store.kv.scan(b"\0", b"\xff", 1 << 20) if pair[0] not in OWN_KEYS]
        chunks = {
            name: (
                one.inode,
                one.index,
                one.version,
                one.cut,
                one.requests,
                one.table,
                [segment and (segment.disk.tolist(), segment.crcs, segment.base) for segment in one.segments],
            )
            for name, one in {**store.index.old, **store.index.young}.items()
            if one.version
        }
        return {
            "index": index,
            "chunks": chunks,
            "used": allocator.used_blocks,
            "available": allocator.available_blocks,
            "held": allocator.held_masks,
            "spare": allocator.spare.tolist(),
            "level": bytes(allocator.levels),
            "small": allocator.small_group,
            "scrub": allocator.changed_groups,
            "groups": {
                number: (group.used, group.deltas.tolist())
                for number, group in allocator.cached_groups.items()
            },
            "written": store.written_bytes,
            "writes": store.write_count,
            "sequence": store.kv.sequence,  # not the journal's offset: the checkpoint of each second resets it
            "run": (store.device.run_start, store.device.run_end),
            "table": bytes(store.location_leases.stamps),
        }

    def data(self):
        raw = os.pread(self.store.device.fd, os.fstat(self.store.device.fd).st_size, 0)
        return raw[16 << 12 :]

    def counts(self):
        answered = self.counters.by_method.get(DATA_WRITE)
        return (
            self.counters.begun,
            self.counters.ended,
            self.counters.errors,
            answered and (answered.bytes_in, answered.bytes_out, answered.times.counts, answered.times.sum_s),
        )


def frame(
    clock,
    *,
    inode=1,
    index=0,
    offset=0,
    data=BLOCK,
    cut=0,
    sequence=1,
    session=9,
    slot=3,
    epoch=5,
    target=1,
    number=7,
    deadline_ms=1000,
    checksums=None,
    length=None,
    place=0,
    flags=0,
    method=DATA_WRITE,
    grant_of=None,
    grant_session=9,
    grant_cut=5,
    rights=grants.READ | grants.WRITE,
    life_s=60,
    table=1,
    volume=0,
    secret=SECRET,
    extra=b"",
):
    ends_ms = clock.wall_ns() // 1_000_000 + int(life_s * 1000)
    owner = inode if grant_of is None else grant_of
    grant = grants.Grant(rights, 0, grant_session, owner, grant_cut, ends_ms, table, volume=volume)
    right = grants.sign(grant, secret)
    entry = WRITE.pack(
        inode, cut, sequence, index, offset, len(data) if length is None else length, place, flags
    )
    sums = piece_checksums(data, offset) if checksums is None else checksums
    message = encode_write_request(epoch, target, right, entry, sums, session, slot) + extra
    return pack_head(REQUEST, method, number, deadline_ms, message, len(data)) + data


@asynccontextmanager
async def opened(path, takes_frames=True, clock=None, size=64 << 20, **options):
    if not (path / "t").exists():
        path.mkdir(exist_ok=True)
        create_chunk_store(path / "t", 1, "pool", size)
    clock = clock or ManualClock()
    store = await open_chunk_store(path / "t", 1, StoreOptions(**options) if options else None, clock=clock)
    one = One(path, store, clock, takes_frames)
    try:
        yield one
    finally:
        await one.service.close()


@asynccontextmanager
async def both(path, **options):
    path.mkdir(exist_ok=True)
    async with opened(path / "new", True, **options) as new, opened(path / "old", False, **options) as old:
        yield new, old


WRITES = (
    {},
    {"data": b"a part"},
    {"data": b"at its end", "offset": 4086},
    {"data": BLOCK[:-1]},
    {"data": b"x", "offset": 1},
    {"index": 3},
    {"index": 0xFFFFFFFF},
    {"cut": 5},
    {"slot": 127},
    {"sequence": (1 << 63) + 5},
    {"table": 8},
    {"flags": 1},
    {"inode": 5 * PARTITION + 77},
    {"inode": (1 << 63) - 1},
    {"inode": 1 << 63},
    {"life_s": -4.9},
    {"number": 0xFFFFFFFF},
    {"rights": grants.WRITE},
    {"session": 1, "grant_session": 1},
    {"grant_cut": 1 << 60, "cut": 1 << 60},
    {"offset": 4096},
    {"data": BLOCK * 2},
    {"offset": 4095, "data": b"xy"},
    {"session": 0},
    {"slot": 0},
    {"slot": 128},
    {"epoch": 4},
    {"epoch": 6},
    {"target": 2},
    {"grant_of": 2},
    {"rights": grants.READ},
    {"grant_session": 8},
    {"cut": 6},
    {"rights": grants.SERVICE | grants.WRITE},
    {"life_s": -6},
    {"secret": b"z" * 32},
    {"place": 1},
    {"length": 4095},
    {"length": 0},
    {"data": b""},
    {"checksums": b"bad!"},
    {"checksums": b""},
    {"checksums": bytes(8)},
    {"extra": b"\x48\1"},
    {"table": 9},
    {"inode": 0},
)


@pytest.mark.parametrize("write", WRITES, ids=str)
def test_write_from_a_frame_matches_the_call(tmp_path, write):
    async def scene():
        async with both(tmp_path) as (new, old):
            assert new.said(**write) == old.said(**write)
            assert new.taken == 1
            assert new.state() == old.state() and new.data() == old.data()
            assert new.counts()[:3] == old.counts()[:3]
            assert new.said(**write) == old.said(**write)  # replay: done already
            assert new.taken == 2 and new.state() == old.state()

    asyncio.run(scene())


@pytest.mark.parametrize("left", (2000, 1, 0))
def test_free_map_group_is_filled_and_the_next_one_started(tmp_path, left):
    async def scene():
        async with both(tmp_path, size=128 << 20) as (new, old):
            for one in (new, old):
                allocator = one.store.allocator
                transaction = (
                    Transaction()
                )  # all of the second group but the last blocks, as if used by other writes
                allocator.small_group = 1
                allocator.take(transaction.taken, 1, 0, GROUP_BLOCKS - left)
                effects = allocator.effects(transaction)
                allocator.commit(transaction, one.store.kv.apply(effects))
            for n in range(40 if left else 3):
                write = {"inode": n + 1, "sequence": n, "data": n.to_bytes(4, "big") * 700}
                assert new.said(**write) == old.said(**write)
                for one in (new, old):
                    (place,) = one.store.index.places(one.store.index.chunk(n + 1, 0), 0, 1)
                    assert place >> 13 == (1 if n < left else 2) and one.store.allocator.is_used(place)
            assert new.taken == (40 if left else 3)
            assert new.state() == old.state() and new.data() == old.data()

    asyncio.run(scene())


def test_incomplete_or_changed_frame_is_left(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            whole = frame(one.clock)
            for end in (*range(200), len(whole) - 1):
                assert one.take(whole, end) == (0, [])
            for at in range(164):
                for bit in (1, 128):
                    changed = bytearray(whole)
                    changed[at] ^= bit
                    assert one.take(changed) == (0, []), at
            assert one.take(whole, in_work={7: None}) == (0, [])
            assert one.take(whole, in_work=dict.fromkeys(range(100, 100 + IN_FLIGHT_MAX))) == (0, [])
            assert one.take(frame(one.clock, deadline_ms=0)) == (0, [])
            assert one.take(frame(one.clock, data=BLOCK * 17)) == (0, []), "too large for the receive buffer"
            assert not one.store.write_count
            assert one.take(whole, in_work={8: None})[0] == len(whole)

    asyncio.run(scene())


def test_frame_without_a_connection_to_reply_later_is_left(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            whole, out = bytearray(frame(one.clock)), []
            assert not one.service.fast_path.answer(whole, len(whole), {}, one.counters, out)
            assert not out and not one.store.write_count

    asyncio.run(scene())


def test_batched_frames_are_answered_in_order(tmp_path):
    async def scene():
        async with both(tmp_path) as (new, old):
            frames = [
                frame(new.clock, inode=100 + n, number=n, sequence=n, data=BLOCK[: 100 + n])
                for n in range(1, 20)
            ]
            frames.insert(10, frame(new.clock, inode=101, number=50, offset=4096))
            together = b"".join(frames)
            taken, out = new.take(together)
            assert taken == len(together) and out == [old.ask(one) for one in frames]
            assert new.state() == old.state() and new.data() == old.data()

    asyncio.run(scene())


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_writes_leave_the_same_state_both_ways(tmp_path, seed):
    """With all other changes of a store between the writes, on a store that is full at times."""

    async def scene():
        dice = random.Random(seed)
        size = dice.choice((2 << 20, 40 << 20, 80 << 20))
        async with both(tmp_path, size=size, cached_segments=dice.choice((40, 1 << 16))) as (new, old):
            inode, known = 1, [1]
            for step in range(500):
                fate = dice.random()
                if fate < 0.7:
                    inode += dice.choice((1, 1, 1, 2, -1, 700))
                    write = {
                        "inode": dice.randrange(3) * PARTITION + max(inode, 1),
                        "sequence": step,
                        "slot": dice.randrange(1, 5),
                        "data": dice.choice(
                            (BLOCK, dice.randbytes(4096), dice.randbytes(dice.randrange(1, 300)))
                        ),
                    }
                    if dice.random() < 0.1:
                        write |= dice.choice(WRITES[:-2])
                    known.append(write["inode"])
                elif fate < 0.85:
                    write = {
                        "inode": dice.choice(known),
                        "offset": dice.choice((0, 4096, 81920)),
                        "sequence": dice.randrange(step + 1),
                        "slot": dice.randrange(1, 5),
                        "cut": dice.choice((0, 0, 4)),
                        "index": dice.choice((0, 0, 1)),
                    }
                else:
                    target = dice.choice(known)
                    what = dice.choice(CHANGES)
                    for one in (new, old):
                        await changed(one, what, target, step)
                    continue
                answer = new.said(**write)
                assert answer == old.said(**write), write
                if (
                    answer is None
                ):  # all free blocks are held; or the file system does not report cached pages
                    break
                for one in (new, old):
                    one.clock.advance(0.01)
            assert new.taken > 50 or answer is None
            assert new.state() == old.state()
            assert new.data() == old.data()
            assert new.counts()[:3] == old.counts()[:3]
            contents = {name: new.blocks(*name) for name in new.state()["chunks"]}
        async with opened(tmp_path / "new") as new:
            assert {name: new.blocks(*name) for name in contents} == contents

    asyncio.run(scene())


CHANGES = "flush", "checkpoint", "remove", "cut", "lend", "tend", "time", "scrub", "raise", "forget"


async def changed(one, what, inode, step):
    store = one.store
    if what == "flush":
        await store.flush()
    elif what == "checkpoint":
        await store.kv.checkpoint()
    elif what == "remove":
        await store.remove([inode])
    elif what == "cut":
        await store.cut(inode, 0, step + 10, 20)
    elif what == "lend":
        store.locate(inode, 0, 1, 5.0)
    elif what == "tend":
        await store.tend()
    elif what == "time":
        one.clock.advance(7)
    elif what == "scrub":
        store.allocator.changed_groups = {} if store.allocator.changed_groups is None else None
    elif what == "raise":
        await store.raise_cuts([InodeCut(inode + 3, step, step << 32, 20)])
    elif what == "forget":
        store.index.clear()


def test_acknowledged_writes_survive_a_crash_once(tmp_path):
    async def scene():
        clock = ManualClock()
        frames = [
            frame(clock, inode=1000 + n, sequence=n, data=random.Random(n).randbytes(4096 - n % 7))
            for n in range(300)
        ]
        create_chunk_store(tmp_path / "t", 1, "pool", 64 << 20)
        store = await open_chunk_store(tmp_path / "t", 1, clock=clock)
        one = One(tmp_path, store, clock, True)
        said = [one.ask(each) for each in frames]
        assert one.taken == 300
        was = {n: one.blocks(1000 + n) for n in range(300)}
        used = store.allocator.used_blocks
        await store.abandon()
        async with opened(tmp_path, clock=clock) as one:
            assert {n: one.blocks(1000 + n) for n in range(300)} == was
            assert [one.ask(each) for each in frames] == said
            assert one.taken == 300  # they are known
            assert one.store.allocator.used_blocks == used and not one.store.write_count
            assert one.said(inode=1300, sequence=9) and one.store.write_count == 1

    asyncio.run(scene())


WRITER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.unit.store.server.test_write_frames import *
async def main():
    async with opened(Path({path!r}), sync_interval_s=.05) as one:
        print("ready", flush=True)
        for n in range(10**6):
            assert one.said(inode=n + 1, sequence=n + 1, data=n.to_bytes(8, "little") * 512)[6:8] == bytes(2)
            assert one.taken == n + 1
            print(n, flush=True)
            if not n % 50:
                await asyncio.sleep(0.002)
asyncio.run(main())
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("lines", (1, 400, 3000))
def test_killed_process_keeps_all_acknowledged_writes(tmp_path, lines):
    code = WRITER.format(tests=str(Path(__file__).parents[4]), path=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        answered = lines + len([line for line in process.stdout.read().split("\n") if line])
        process.wait()

    async def scene():
        async with opened(tmp_path) as one:
            for n in range(answered - 1):  # the last line may be incomplete
                assert one.blocks(n + 1) == (one.blocks(1)[0], [n.to_bytes(8, "little") * 512]), n

    asyncio.run(scene())


@pytest.mark.parametrize(
    "error", (NoSpace("full"), Fenced("gone"), Busy("later"), DriveFailed("broken"), ValueError("a bug"))
)
def test_engine_refusal_is_reported_and_changes_no_data(tmp_path, error, caplog):
    async def scene():
        async with both(tmp_path) as (new, old):
            assert new.said() == old.said()
            before = new.state()

            def refuse(effects, **_):
                raise error

            for one in (new, old):
                one.apply, one.store.kv.apply = one.store.kv.apply, refuse
            assert new.said(inode=2, sequence=2) == old.said(inode=2, sequence=2)
            assert new.taken == 2 and new.counts()[:3] == old.counts()[:3]
            for one in (new, old):
                one.store.kv.apply = one.apply
            after = new.state()
            assert after == old.state()
            changed_parts = (
                "written",
                "run",
                "table",
            )  # bytes were being written, and readers have to query again
            assert {**after, **dict.fromkeys(changed_parts)} == {**before, **dict.fromkeys(changed_parts)}
            assert new.said(inode=2, sequence=2) == old.said(inode=2, sequence=2)
            assert new.taken == 3 and new.state() == old.state() and new.data() == old.data()

    asyncio.run(scene())
    assert ("a bug" in caplog.text) == isinstance(error, ValueError)
    caplog.clear()


def test_drive_error_is_reported(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            write, one.store.device.fd = one.store.device.fd, os.open(one.store.device.path, os.O_RDONLY)
            code = int.from_bytes(one.said()[32 + 11 : 32 + 13], "little")
            assert code == DriveFailed.wire_code and one.taken == 1
            assert not one.store.allocator.held_masks and not one.store.index.chunk(1, 0).version
            os.close(one.store.device.fd)
            one.store.device.fd = write

    asyncio.run(scene())


def test_fenced_closed_or_watched_store_takes_no_frames(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            asked, store, service = frame(one.clock), one.store, one.service

            def is_left():
                before = one.state(), one.counters.begun
                return one.take(asked) == (0, []) and before == (one.state(), one.counters.begun)

            def left_with(owner, name, value):
                kept = getattr(owner, name)
                setattr(owner, name, value)
                try:
                    return is_left()
                finally:
                    setattr(owner, name, kept)

            assert left_with(store, "fenced_because", "for a test")
            assert left_with(store, "closed", True)
            assert left_with(service.use, "on", True)
            assert left_with(service.serving_lease, "vouched", False)
            assert left_with(service.fast_path, "open", False)
            assert left_with(service.fast_path, "epoch", 0)

    asyncio.run(scene())


def test_version_has_the_epoch_of_the_chain(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            epochs = one.service.replica.chain_epochs[1]
            epochs[chain_of(1, 0)] = 0  # the chain belongs to another target
            code = int.from_bytes(one.said()[32 + 11 : 32 + 13], "little")
            assert code == WrongTarget.wire_code and not one.store.write_count
            epochs[chain_of(1, 0)] = 3
            one.said()
            assert one.store.index.chunk(1, 0).version == 3 << 32 | 1

    asyncio.run(scene())


def test_lease_that_ends_during_the_write_is_no_acknowledgement(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            lease = one.service.serving_lease
            lease.shared, lease.until_s = True, one.clock.boottime_s() + 1
            assert one.said()[4:6] == bytes(2)
            one.clock.advance(2)
            reply = one.said(inode=2)
            assert int.from_bytes(reply[4:6], "little") == StaleTenure.wire_code

    asyncio.run(scene())


def test_write_to_a_full_index_waits_and_is_answered_once(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            store = one.store
            store.kv.start_checkpoint = lambda: None
            store.kv.entries_max = 1
            one.said()
            assert store.kv.frozen is not None
            del store.kv.start_checkpoint
            assert one.said(inode=2) and one.taken == 2
            store.kv.entries_max = 1
            assert store.kv.full
            assert one.said(inode=3) is None
            assert list(one.ordinary.in_work) == [7] and one.service.waiting_count == 1
            async with asyncio.timeout(30):
                while not one.ordinary.sent:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.001)
            assert one.ordinary.sent.pop()[4:6] == bytes(2) and not one.ordinary.in_work
            await asyncio.sleep(0.01)  # the task ends after its reply
            assert one.blocks(3)[1] == [BLOCK] and not one.service.waiting_count

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("others", "byte"),
    [((), 1), ((), 0), ((1 << 51,), 0)],
    ids=["a higher partition", "another kind", "beside the first number of the next partition"],
)
def test_damaged_index_reports_no_inode_as_unknown(tmp_path, others, byte):
    async def scene():
        async with opened(tmp_path) as one:
            for n, inode in enumerate((*range(1, 51), *others)):
                one.said(inode=inode, sequence=n)
            await one.store.kv.checkpoint()
        path = tmp_path / "t" / "index" / "data.mdb"
        raw = bytearray(path.read_bytes())
        key = segment_key(50, 0, 0)
        at = raw.find(key)
        while at >= 0:  # its key has a different value now
            raw[at + byte] ^= 0x20
            at = raw.find(key, at)
        path.write_bytes(raw)
        async with opened(tmp_path) as one:
            unknown = one.store.index.unknown
            assert 50 not in unknown and 51 not in unknown

    asyncio.run(scene())


def test_writes_over_a_connection_arrive_as_frames(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            handled = []

            def handler(call):
                handled.append(call.method)
                one.service.handle(call)

            handler.fast_path = one.service.fast_path.answer
            carrier = transport("stream+unix")
            greeting = Greeting("test", "f")
            listener = await carrier.listen(f"stream+unix://{tmp_path}/s", greeting, handler)
            connection = await carrier.connect(
                listener.endpoint, greeting, deadline_s=SYSTEM_CLOCK.boottime_s() + 30
            )

            async def write(n):
                whole = frame(one.clock, inode=n + 1, sequence=n, data=BLOCK[: 4000 + n])
                message = read_head(bytearray(whole), 0, len(whole), 0)[4]
                reply = await connection.call(
                    DATA_WRITE,
                    message,
                    (memoryview(whole)[32 + len(message) :],),
                    deadline_s=SYSTEM_CLOCK.boottime_s() + 30,
                )
                assert reply.message[11:13] == bytes(2)

            for n in range(40):
                await write(n)
            assert not handled and one.store.write_count == 40
            await asyncio.gather(*map(write, range(40, 80)))
            assert len(handled) < 20, "frames that came in parts may have become calls"
            for n in range(80):
                assert one.blocks(n + 1)[1] == [BLOCK[: 4000 + n] + bytes(96 - n)]
            await connection.close()
            await listener.close()

    asyncio.run(scene())


def test_revoked_right_is_refused_in_a_frame(tmp_path):
    async def main():
        async with opened(tmp_path) as one:
            now_ms, volume = one.clock.wall_ns() // 1_000_000, grants.volume_tag(77)
            assert one.said(volume=volume)[32 + 11 : 32 + 13] == bytes(2)
            one.service.update_map(taken(pool_map(5), 77, "", grants.WRITE, now_ms, 5000))
            code = int.from_bytes(one.said(inode=2, epoch=6, volume=volume)[32 + 11 : 32 + 13], "little")
            assert code == StaleGrant.wire_code
            assert one.said(inode=2, epoch=6)[32 + 11 : 32 + 13] == bytes(2)
            assert one.taken == 3 and one.store.write_count == 2

    asyncio.run(main())
