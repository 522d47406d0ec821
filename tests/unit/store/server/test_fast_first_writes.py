"""Fast path for first writes of new files: same bytes, records and counts as the slow path, or left to the slow
path."""

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
from nvpool.core.errors import Busy, DriveFailed, Fenced, NoSpace
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
from nvpool.store.server import fast_first_writes
from nvpool.store.server.service import WRITE, StoreService
from tests.unit.store.server.test_reads import SECRET, Ordinary, pool_map

pytestmark = pytest.mark.compiled

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
    """A store whose service uses the fast path first, or never."""

    def __init__(self, path, store, clock, uses_fast_path):
        self.path, self.store, self.clock = path, store, clock
        self.service = StoreService(store, target=1, grant_secret=SECRET, clock=clock)
        self.service.update_map(pool_map(5))
        self.ordinary = DirectService(self.service)
        self.counters = self.ordinary.reply_stats
        self.uses_fast_path = uses_fast_path
        self.taken = 0
        store.allocator.is_used(0)  # the first group of the free map is in memory

    def ask(self, frame, in_work=None):
        if self.uses_fast_path:
            out = []
            taken = self.service.fast_path.answer(
                bytearray(frame), len(frame), in_work or {}, self.counters, out
            )
            if taken:
                assert taken == len(frame)
                self.taken += 1
                (reply,) = out
                return reply
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
    secret=SECRET,
    extra=b"",
):
    ends_ms = clock.wall_ns() // 1_000_000 + int(life_s * 1000)
    owner = inode if grant_of is None else grant_of
    right = grants.sign(grants.Grant(rights, 0, grant_session, owner, grant_cut, ends_ms, table), secret)
    entry = WRITE.pack(
        inode, cut, sequence, index, offset, len(data) if length is None else length, place, flags
    )
    sums = piece_checksums(data, offset) if checksums is None else checksums
    message = encode_write_request(epoch, target, right, entry, sums, session, slot) + extra
    return pack_head(REQUEST, method, number, deadline_ms, message, len(data)) + data


@asynccontextmanager
async def opened(path, uses_fast_path=True, clock=None, size=64 << 20, **options):
    if not (path / "t").exists():
        path.mkdir(exist_ok=True)
        create_chunk_store(path / "t", 1, "pool", size)
    clock = clock or ManualClock()
    store = await open_chunk_store(path / "t", 1, StoreOptions(**options) if options else None, clock=clock)
    one = One(path, store, clock, uses_fast_path)
    try:
        yield one
    finally:
        await one.service.close()


@asynccontextmanager
async def both(path, **options):
    path.mkdir(exist_ok=True)
    async with opened(path / "new", True, **options) as new, opened(path / "old", False, **options) as old:
        yield new, old


PLAIN = (
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
)
NOT_PLAIN = (
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


@pytest.mark.parametrize("write", PLAIN, ids=str)
def test_plain_write_matches_the_slow_path(tmp_path, write):
    async def scene():
        async with both(tmp_path) as (new, old):
            assert new.said(**write) == old.said(**write)
            assert new.taken == 1
            assert new.state() == old.state() and new.data() == old.data()
            assert new.counts()[:3] == old.counts()[:3]
            asked = new.said(**write)  # replay: done already
            assert asked == old.said(**write)
            assert new.taken == 1 and new.state() == old.state()

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
            assert new.taken == (40 if left == 2000 else 39 if left else 2)
            assert new.state() == old.state() and new.data() == old.data()

    asyncio.run(scene())


@pytest.mark.parametrize("write", NOT_PLAIN, ids=str)
def test_other_write_is_left_without_side_effects(tmp_path, write):
    async def scene():
        async with both(tmp_path) as (new, old):
            asked = frame(new.clock, **write)
            before = new.state()
            assert new.service.fast_path.answer(bytearray(asked), len(asked), {}, new.counters, []) == 0
            assert new.state() == before
            assert new.ask(asked) == old.ask(asked)
            assert not new.taken and new.state() == old.state()

    asyncio.run(scene())


def test_incomplete_or_changed_frame_is_left(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            whole = frame(one.clock)
            for end in (*range(200), len(whole) - 1):
                assert one.service.fast_path.answer(bytearray(whole), end, {}, one.counters, []) == 0
            for at in range(164 + 3):
                for bit in (1, 128):
                    changed = bytearray(whole)
                    changed[at] ^= bit
                    assert one.service.fast_path.answer(changed, len(changed), {}, one.counters, []) == 0, at
            assert (
                one.service.fast_path.answer(bytearray(whole), len(whole), {7: None}, one.counters, []) == 0
            )
            many = dict.fromkeys(range(100, 100 + IN_FLIGHT_MAX))
            assert one.service.fast_path.answer(bytearray(whole), len(whole), many, one.counters, []) == 0
            no_time = frame(one.clock, deadline_ms=0)
            assert one.service.fast_path.answer(bytearray(no_time), len(no_time), {}, one.counters, []) == 0
            assert not one.store.write_count
            assert one.service.fast_path.answer(
                bytearray(whole), len(whole), {8: None}, one.counters, []
            ) == len(whole)

    asyncio.run(scene())


def test_batched_frames_are_answered_in_order(tmp_path):
    async def scene():
        async with both(tmp_path) as (new, old):
            frames = [
                frame(new.clock, inode=100 + n, number=n, sequence=n, data=BLOCK[: 100 + n])
                for n in range(1, 20)
            ]
            frames.insert(10, frame(new.clock, inode=101, number=50, offset=4096))  # for the slow path
            together, out = bytearray(b"".join(frames)), []
            taken = new.service.fast_path.answer(together, len(together), {}, new.counters, out)
            assert taken == sum(map(len, frames[:10])) and out == [old.ask(one) for one in frames[:10]]
            assert new.ask(frames[10]) == old.ask(frames[10])
            rest = bytearray(b"".join(frames[11:]))
            out.clear()
            assert new.service.fast_path.answer(rest, len(rest), {}, new.counters, out) == len(rest)
            assert out == [old.ask(one) for one in frames[11:]]
            assert new.state() == old.state() and new.data() == old.data()

    asyncio.run(scene())


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_writes_leave_the_same_state_on_both_paths(tmp_path, seed):
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
                        write |= dice.choice((*PLAIN, *NOT_PLAIN[:-2]))
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
            assert not one.taken  # they are known
            assert one.store.allocator.used_blocks == used and not one.store.write_count
            assert one.said(inode=1300, sequence=9) and one.taken == 1

    asyncio.run(scene())


WRITER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.unit.store.server.test_fast_first_writes import *
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


def test_drive_error_is_reported_by_the_slow_path(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            write, one.store.device.fd = one.store.device.fd, os.open(one.store.device.path, os.O_RDONLY)
            one.service.fast_path.writes = None
            fast_first_writes.answer_new_writes(one.service, SECRET)  # with the read-only descriptor
            code = int.from_bytes(one.said()[32 + 11 : 32 + 13], "little")
            assert code == DriveFailed.wire_code and not one.taken
            os.close(one.store.device.fd)
            one.store.device.fd = write

    asyncio.run(scene())


def test_fenced_closed_full_or_watched_store_uses_no_fast_path(tmp_path):
    async def scene():
        async with opened(tmp_path) as one:
            asked, store, service = frame(one.clock), one.store, one.service

            def is_left():
                before = (
                    store.kv.sequence,
                    store.written_bytes,
                    one.counters.begun,
                    store.allocator.used_blocks,
                )
                assert service.fast_path.answer(bytearray(asked), len(asked), {}, one.counters, []) == 0
                return (
                    store.kv.sequence,
                    store.written_bytes,
                    one.counters.begun,
                    store.allocator.used_blocks,
                ) == before

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
            assert left_with(service.serving_lease, "shared", True)
            assert left_with(service.serving_lease, "vouched", False)
            assert left_with(service.replica, "shares", True)
            assert left_with(service.replica, "pending", {(7, 7): None})
            assert left_with(service.fast_path, "open", False)
            assert left_with(service.fast_path, "epoch", 0)
            assert left_with(store.device, "direct_write_bytes", 4096)
            assert left_with(store.quarantine, "chunks", {(1, 0)})
            assert left_with(store.allocator, "available_blocks", 0)
            assert left_with(store.allocator, "reserve_blocks", store.block_count)
            assert left_with(store.allocator, "cached_groups", {})
            assert left_with(store.index, "young", {(1, 0): None})
            assert left_with(store.index, "old", {(1, 0): None})
            epochs = service.replica.chain_epochs[1]
            mine = epochs[chain_of(1, 0)]
            epochs[chain_of(1, 0)] = 0  # the chain belongs to another target
            assert is_left()
            epochs[chain_of(1, 0)] = 3
            assert one.ask(asked) and one.taken == 1
            assert store.index.chunk(1, 0).version == 3 << 32 | 1
            epochs[chain_of(1, 0)] = mine

    asyncio.run(scene())


def test_full_index_uses_no_fast_path(tmp_path):
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
            asked = frame(one.clock, inode=3)
            assert one.service.fast_path.answer(bytearray(asked), len(asked), {}, one.counters, []) == 0

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
            asked = frame(one.clock, inode=50)
            assert one.service.fast_path.answer(bytearray(asked), len(asked), {}, one.counters, []) == 0

    asyncio.run(scene())


def test_write_over_a_connection_uses_the_fast_path(tmp_path):
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
            assert len(handled) < 20, "frames that came in parts may have used the slow path"
            for n in range(80):
                assert one.blocks(n + 1)[1] == [BLOCK[: 4000 + n] + bytes(96 - n)]
            await connection.close()
            await listener.close()

    asyncio.run(scene())


def test_writes_are_left_while_rights_are_revoked(tmp_path):
    async def main():
        async with opened(tmp_path) as one:
            now_ms = one.clock.wall_ns() // 1_000_000
            one.said()
            assert one.taken == 1
            one.service.update_map(taken(pool_map(5), 77, "", grants.WRITE, now_ms, 5000))
            one.said(inode=2, epoch=6)
            assert one.taken == 1, "the fast path does not check revoked rights"
            one.clock.advance(6.0)
            one.service.verified_grants.tend()
            one.said(inode=3, epoch=6)
            assert one.taken == 2

    asyncio.run(main())
