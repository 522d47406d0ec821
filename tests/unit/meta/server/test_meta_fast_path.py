"""Fast path of a shard's requests: same bytes, records and counters as the slow path, or left to that."""

import asyncio
import os
import random
import stat
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.errors import Bug, Busy, CorruptRecord, DriveFailed, Fenced, NoSpace, NotFound, TooManyOpen
from nvpool.core.grants import EPOCH_MASK, read, volume_tag
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server import fast_path as meta_fast_path
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.server.shard_member import MemberFastPath
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import fill_attr
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import decode_error
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX, ServerConnection
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transport_registry import transport
from nvpool.rpc.transports.frame import EMPTY, HELLO, REPLY, REQUEST, pack_head, read_head
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map

pytestmark = pytest.mark.compiled
FILE = stat.S_IFREG | 0o644
CREATE, UNLINK, REPORT, LOOKUP, GETATTR = (
    wire.META_CREATE,
    wire.META_UNLINK,
    wire.META_REPORT,
    wire.META_LOOKUP,
    wire.META_GETATTR,
)
MESSAGES = {
    CREATE: pb.CreateRequest,
    UNLINK: pb.UnlinkRequest,
    REPORT: pb.ReportRequest,
    LOOKUP: pb.LookupRequest,
    GETATTR: pb.GetAttrRequest,
}


class Ordinary(ServerConnection):
    """Replies of the service to a frame by the slow path."""

    def __init__(self, service):
        super().__init__(service.handle, Peer("test", "", True), service.parts.clock)
        self.reply_stats = ReplyStats()
        self.sent = []

    def _send_answer(self, number, status, message, payload, payload_bytes):
        self.sent.append(pack_head(REPLY, status, number, 0, message, payload_bytes) + b"".join(payload))

    async def ask(self, frame):
        _, method, number, deadline_ms, message, _ = read_head(bytearray(frame), 0, len(frame), 0)
        self.arrived(number, method, deadline_ms, message, EMPTY)
        for _ in range(100):
            if self.sent:
                break
            await asyncio.sleep(0.01)
        return self.sent.pop()


class Bench:
    """A shard that uses the fast path where it can (`quick`), or never; all have the same clock and secrets."""

    def __init__(self, kv, service, quick):
        self.kv, self.service, self.quick = kv, service, quick
        self.ordinary, self.stats = Ordinary(service), ReplyStats()
        self.taken = 0

    async def begin(self, watch=True):
        self.client = await ShardClient(self.service, 1000, 1000).begin(watch)
        self.home = (await self.client.mkdir(1, b"home")).inode
        for slot in range(64):
            self.service.parts.sessions.slot(self.service.parts.sessions.get(self.client.session), slot)
        return self

    def ask_fast(self, frame, in_work=None):
        out = []
        taken = self.service.fast_path.answer(
            bytearray(frame), len(frame), in_work or {}, self.stats, out, self.ordinary
        )
        return taken, out

    async def ask(self, method, request, number=7):
        """(status, message) of the reply."""
        message = request if type(request) is bytes else request.SerializeToString()
        frame = pack_head(REQUEST, method, number, 1000, message, 0)
        taken, out = self.ask_fast(frame) if self.quick else (0, [])
        if taken:
            assert taken == len(frame) and len(out) == 1
            self.taken += 1
        else:
            assert not out
            out = [await self.ordinary.ask(frame)]
        kind, status, of, _, message, _ = read_head(bytearray(out[0]), 0, len(out[0]), 0)
        assert kind == REPLY and of == number
        return status, message

    async def ordinary_client(self):
        return await ShardClient(self.service).begin()

    async def make(self, name, **fields):
        """Create and open a file; return its inode number."""
        request = pb.CreateRequest(
            change=self.client.change(),
            parent=self.home,
            name=name,
            mode=FILE,
            open=True,
            rights=2,
            exclusive=True,
            **fields,
        )
        status, message = await self.ask(CREATE, request)
        assert not status, decode_error(status, message)
        return pb.CreateReply.FromString(message).entry.attr.inode

    def state(self):
        """All state of the shard, on the drive and in memory."""
        service, journal = self.service, self.kv.journal
        sessions = [
            (
                session.number,
                session.opens,
                session.brought,
                [
                    (
                        slot.sequence,
                        slot.waits_for,
                        slot.answer,
                        slot.mark,
                        repr(slot.error),
                        slot.restored,
                        slot.opened,
                        slot.awaited,
                    )
                    for slot in session.slots
                    if slot is not None
                ],
            )
            for session in service.parts.sessions.by_number.values()
        ]
        return {
            "records": self.kv.scan(b"", b"\xff" * 12, 1_000_000),
            "sequence": self.kv.sequence,
            "journal": os.pread(journal.files[journal.generation & 1], journal.offset, 0),
            "sessions": sessions,
            "holders": service.parts.sessions.holders,
            "orphans": service.parts.collector.orphans,
            "counters": service.status.counters,
            "numbers": (service.parts.view.next_number, service.parts.view.inode_count),
            "state": service.status.state,
            "cool": service.parts.watches.cool,
            "leases": (bytes(service.parts.watches.table.new), bytes(service.parts.watches.table.old)),
        }


@asynccontextmanager
async def a_shard(path, quick, clock=None, watch=True, options=None):
    kv = await LmdbKv.open(path, options or LmdbOptions(sync_interval_s=1000, checkpoint_interval_s=1000))
    service = MetaService(
        kv,
        grant_secret=b"s" * 32,
        clock=clock or ManualClock(3),
        dialer=StoreRecorder(),
        options=MetaOptions(session_lease_s=3600, watch_s=3600, tick_s=1000),
    )
    await service.start()
    service.update_map(small_map())
    try:
        yield await Bench(kv, service, quick).begin(watch)
    finally:
        await service.close()
        await kv.close()


def with_shard(test):
    """Decorator: run the test with one shard that uses the fast path."""

    def run(tmp_path):
        async def served():
            async with a_shard(tmp_path / "kv", quick=True) as bench:
                await test(bench)

        asyncio.run(served())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def with_both(test):
    """Decorator: run the test with and without the fast path, and compare results and state."""

    def run(tmp_path):
        async def served(quick):
            async with a_shard(tmp_path / f"kv-{quick}", quick) as bench:
                replies = await test(bench)
                return replies, bench.state(), bench.taken

        replies, state, taken = asyncio.run(served(True))
        slow_replies, slow_state, _ = asyncio.run(served(False))
        assert replies == slow_replies and state == slow_state
        assert taken

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# -- same results ------------------------------------------------------------------------------------------------------


@with_both
async def test_file_operations_give_the_same_bytes(bench):
    client, replies = bench.client, []

    async def ask(method, **fields):
        replies.append(await bench.ask(method, MESSAGES[method](**fields)))
        assert not replies[-1][0], decode_error(*replies[-1])
        return replies[-1][1]

    for number, (opened, rights, mode) in enumerate(
        (
            (True, 2, 0o644),
            (True, 1, 0o600),
            (True, 3, 0o4755),
            (True, 0, 0),
            (False, 0, 0o666),
            (False, 2, 0o640),
        )
    ):
        name = b"%d" % number
        made = pb.CreateReply.FromString(
            await ask(
                CREATE,
                change=client.change(number),
                parent=bench.home,
                name=name,
                open=opened,
                mode=stat.S_IFREG | mode,
                rights=rights,
                exclusive=bool(number & 1),
            )
        )
        inode = made.entry.attr.inode
        assert made.created and made.parent.size == number + 1 and made.entry.lease_ms
        await ask(
            REPORT, change=client.change(9), inode=inode, end=1000 * number + 1, wrote=True, release=opened
        )
        await ask(REPORT, change=client.change(9), inode=inode, end=1, wrote=True, blocks_delta=7)
        await ask(REPORT, change=client.change(9), inode=inode, end=1 << 30, blocks_delta=80)
        for wanted in (0, 1, 2, 3):
            await ask(LOOKUP, session=client.session, parent=bench.home, name=name, rights=wanted)
            await ask(GETATTR, session=client.session, inode=inode, rights=wanted)
        await ask(GETATTR, session=client.session, inode=bench.home)
    assert bench.taken == len(replies) or not bench.quick
    for number in range(6):
        await ask(UNLINK, change=client.change(63), parent=bench.home, name=b"%d" % number)
    assert bench.taken == len(replies) or not bench.quick
    return replies


@with_both
async def test_open_file_limit_is_enforced(bench):
    async def make(name, opened):
        request = pb.CreateRequest(
            change=bench.client.change(), parent=bench.home, name=name, mode=FILE, open=opened, rights=1
        )
        return await bench.ask(CREATE, request)

    replies = [await make(b"a", True)]
    (session,) = bench.service.parts.sessions.by_number.values()
    session.peer, session.opens_max = "uid 1000", 0
    replies += [await make(b"b", True), await make(b"c", False)]
    assert [bool(status) for status, _ in replies] == [False, True, False]
    assert isinstance(decode_error(*replies[1]), TooManyOpen) and list(session.opens.values()) == [1]
    return replies


@with_both
async def test_requests_of_one_buffer_are_answered_in_order(bench):
    frames = []
    for number in range(20):
        request = pb.CreateRequest(
            change=bench.client.change(number), parent=bench.home, name=b"%d" % number, mode=FILE
        )
        frames.append(pack_head(REQUEST, CREATE, number, 1000, request.SerializeToString(), 0))
    cut_off = frames[0][:-1]
    if bench.quick:
        taken, out = bench.ask_fast(b"".join(frames) + cut_off)
        assert taken == sum(map(len, frames))
        bench.taken += len(out)
    else:
        out = [await bench.ordinary.ask(frame) for frame in frames]
    return out


@pytest.mark.few(3)  # the last two of these are special
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_give_the_same_replies_and_state(tmp_path, seed):
    async def served(quick):
        clock = ManualClock(3)
        async with a_shard(tmp_path / f"kv-{quick}", quick, clock, watch=seed != 1) as bench:
            draw, replies = random.Random(seed), []
            if seed == 2:  # another client takes and releases leases
                other = await ShardClient(bench.service, 7, 7).begin(watch=True)
            for step in range(1500):
                method, request = some_request(draw, bench)
                replies.append(await bench.ask(method, request, number=step))
                if method == CREATE and not replies[-1][0]:
                    bench.inodes.append(pb.CreateReply.FromString(replies[-1][1]).entry.attr.inode)
                if seed == 2 and not draw.randrange(10):
                    await other.getattr(draw.choice(bench.inodes[:3]))
                    bench.service.parts.watches.by_session[
                        other.session
                    ].until_s = 0  # the other client never delays a change
                clock.advance(draw.choice((0.0, 0.001, 1.0)))
                if not draw.randrange(200):
                    await bench.kv.checkpoint()
            problems = await bench.client.fsck()
            return replies, bench.state(), bench.taken, problems

    replies, state, taken, problems = asyncio.run(served(True))
    slow_replies, slow_state, _, _ = asyncio.run(served(False))
    for number, (one, other) in enumerate(zip(replies, slow_replies, strict=True)):
        assert one == other, number

    assert state == slow_state
    assert taken > 100 and not problems
    assert len({status for status, _ in replies}) > 4  # with several kinds of refusals


def some_request(draw, bench):
    """A request of the fast path, in many forms, some of them invalid; or another request."""
    client = bench.client
    if not hasattr(bench, "inodes"):
        bench.inodes = [bench.home, 1]
    names = [b"a", b"b", b"name with blanks", b"x" * 255, b"\xff\xfe"]
    name = (
        draw.choice(names)
        if draw.randrange(20)
        else draw.choice((b"", b".", b"..", b"a/b", b"a\0", b"x" * 256))
    )
    parent = bench.home if draw.randrange(10) else draw.choice((1, 2, 0, 1 << 63, *bench.inodes))
    inode = draw.choice(bench.inodes) if draw.randrange(20) else draw.choice((0, 2, 1 << 62, (1 << 64) - 1))
    change = client.change(draw.randrange(3))
    if not draw.randrange(15):
        change.sequence = max(0, change.sequence - draw.randrange(3))
    if not draw.randrange(30):
        change.session += 99
    change.map_epoch, change.uid, change.gid = (
        draw.choice((0, 1, 1 << 40)),
        draw.choice((0, 1000, 70_000)),
        draw.choice((0, 7)),
    )
    rights, flag = draw.choice((0, 1, 2, 3, 4, 7)), lambda: bool(draw.randrange(2))
    kind = draw.randrange(100)
    if kind < 30:
        mode = draw.choice(
            (FILE,) * 8 + (stat.S_IFDIR | 0o2755, stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o600, 0o644, 1 << 20)
        )
        more = {"target": b"where"} if stat.S_ISLNK(mode) else {}
        return CREATE, pb.CreateRequest(
            change=change,
            parent=parent,
            name=name,
            mode=mode,
            open=flag(),
            rights=rights,
            exclusive=flag(),
            truncate=not draw.randrange(10),
            **more,
        )
    if kind < 50:
        return UNLINK, pb.UnlinkRequest(change=change, parent=parent, name=name)
    if kind < 70:
        return REPORT, pb.ReportRequest(
            change=change,
            inode=inode,
            cut=draw.choice((0, 0, 0, 1, 2)),
            end=draw.choice((0, 1, 4096, 10_000, 1 << 40, 1 << 52)),
            wrote=flag(),
            release=flag(),
            sync=not draw.randrange(10),
            blocks_delta=draw.choice((0, 8, 1 << 20)),
        )
    if kind < 78:
        return LOOKUP, pb.LookupRequest(session=change.session, parent=parent, name=name, rights=rights)
    if kind < 86:
        return GETATTR, pb.GetAttrRequest(
            session=change.session, inode=inode, rights=rights, map_epoch=change.map_epoch
        )
    if kind < 90:
        return wire.META_SETATTR, pb.SetAttrRequest(
            change=change,
            inode=inode,
            valid=draw.choice((1, 2, 4, 8, 16, 32)),
            mode=draw.choice((0o2777, 0o600)),
            uid=5,
            gid=6,
            size=draw.choice((0, 5000)),
            atime_ns=draw.choice((-5, 1 << 60)),
            mtime_ns=draw.choice((0, -(1 << 40))),
        )
    if kind < 92:
        return wire.META_LINK, pb.LinkRequest(
            change=change, inode=inode, parent=parent, name=draw.choice(names)
        )
    if kind < 94:
        return wire.META_RENAME, pb.RenameRequest(
            change=change, parent=parent, name=name, new_parent=bench.home, new_name=draw.choice(names)
        )
    if kind < 96:
        return wire.META_OPEN, pb.OpenRequest(change=change, inode=inode, rights=rights)
    if kind < 98:
        return wire.META_RMDIR, pb.UnlinkRequest(change=change, parent=parent, name=name)
    return wire.META_RELEASE, pb.ReleaseRequest(session=client.session, inodes=inode.to_bytes(8, "little"))


@with_both
async def test_replayed_request_gets_its_kept_reply(bench):
    request = pb.CreateRequest(
        change=bench.client.change(5), parent=bench.home, name=b"a", mode=FILE, open=True, rights=3
    )
    first, taken = await bench.ask(CREATE, request), bench.taken
    again = await bench.ask(CREATE, request)
    assert bench.taken == taken
    assert first[1].startswith(again[1]) and pb.CreateReply.FromString(again[1]).created
    request.change.sequence -= 1
    return first, again, await bench.ask(CREATE, request)


def test_answered_changes_survive_a_crash(tmp_path):
    async def check():
        clock = ManualClock(3)
        async with a_shard(tmp_path / "kv", True, clock) as bench:
            made = [await bench.make(b"%d" % number) for number in range(50)]
            await bench.ask(
                UNLINK, pb.UnlinkRequest(change=bench.client.change(), parent=bench.home, name=b"7")
            )
            assert bench.taken == 51
            session, sequence = bench.client.session, bench.client.sequences[0]
            await bench.kv.abandon()
        kv = await LmdbKv.open(tmp_path / "kv")
        service = MetaService(kv, grant_secret=b"s" * 32, clock=clock, dialer=StoreRecorder())
        await service.start()
        after = await Bench(kv, service, True).ordinary_client()
        assert await after.names(bench.home) == {b"%d" % number for number in range(50) if number != 7}
        assert (await after.lookup(bench.home, b"9")).attr.inode == made[9]
        assert service.parts.sessions.slot(service.parts.sessions.get(session), 0).sequence == sequence
        assert not await after.fsck()
        await service.close()
        await kv.close()

    asyncio.run(check())


@with_shard
async def test_loaded_names_are_found_with_the_dumps_name_key(bench):
    there = await bench.make(b"there")
    reply = await bench.client.ask("DUMP", pb.DumpRequest())
    lines = bench.client.payload
    assert reply.done
    kv = MemoryKv()
    service = MetaService(
        kv, grant_secret=b"another secret" * 3, clock=ManualClock(3), dialer=StoreRecorder()
    )
    await service.start()
    await ShardClient(service).ask("LOAD", pb.LoadRequest(first=True, last=True), lines)
    loaded = Bench(kv, service, True)
    client = loaded.client = await ShardClient(service).begin()
    service.parts.sessions.slot(service.parts.sessions.get(client.session), 0)
    status, message = await loaded.ask(
        LOOKUP, pb.LookupRequest(session=client.session, parent=bench.home, name=b"there")
    )
    assert not status and pb.Entry.FromString(message).attr.inode == there
    loaded.home = bench.home
    new = await loaded.make(b"new")
    assert loaded.taken == 2
    assert (await client.lookup(bench.home, b"new")).attr.inode == new and not await client.fsck()
    await service.close()


# -- left to the slow path ------------------------------------------------------------------------------------------------


def is_left(bench, method, request, in_work=None):
    """Whether the request gets no reply by the fast path, and nothing is changed."""
    before = bench.state()
    taken, out = bench.ask_fast(pack_head(REQUEST, method, 7, 1000, request.SerializeToString(), 0), in_work)
    if not taken:
        assert not out and bench.state() == before
    return not taken


def a_create(bench, name=b"new", **fields):
    return pb.CreateRequest(
        **{"change": bench.client.change(5), "parent": bench.home, "name": name, "mode": FILE, **fields}
    )


@with_shard
async def test_special_requests_are_left_without_side_effects(bench):
    client, service, home = bench.client, bench.service, bench.home
    there = await bench.make(b"there")
    await client.create(home, b"link", stat.S_IFLNK | 0o777, target=b"there")
    assert not is_left(bench, CREATE, a_create(bench, b"plain"))
    for fields in (
        {"rdev": 1},
        {"target": b"x"},
        {"wide": True},
        {"spread": True},
        {"volume": pb.VolumePolicy()},
        {"mode": stat.S_IFDIR | 0o755},
        {"name": b"there"},
        {"name": b"link"},
        {"parent": there},
        {"parent": 99},
    ):
        assert is_left(bench, CREATE, a_create(bench, **fields)), fields
    change = client.change(5)
    for name in (b"missing", b"..", b""):
        assert is_left(bench, UNLINK, pb.UnlinkRequest(change=change, parent=home, name=name))
        assert is_left(bench, LOOKUP, pb.LookupRequest(session=client.session, parent=home, name=name))
    assert is_left(bench, UNLINK, pb.UnlinkRequest(change=change, parent=1, name=b"home"))
    assert is_left(bench, UNLINK, pb.UnlinkRequest(change=change, parent=home, name=b"there", spread=True))
    for fields in (
        {"sync": True},
        {"cut": 1},
        {"end": 0, "wrote": False},
        {"end": 1 << 52},
        {"inode": home},
        {"inode": 99},
    ):
        assert is_left(
            bench,
            REPORT,
            pb.ReportRequest(**{"change": change, "inode": there, "end": 9, "wrote": True, **fields}),
        )
    for parent in (there, 99, 0, 1 << 63):
        assert is_left(bench, LOOKUP, pb.LookupRequest(session=client.session, parent=parent, name=b"there"))
    never_written = (await client.file(home, b"never written")).inode
    assert is_left(bench, GETATTR, pb.GetAttrRequest(session=client.session, inode=never_written, rights=2))
    assert not is_left(
        bench, GETATTR, pb.GetAttrRequest(session=client.session, inode=never_written, rights=1)
    )
    # the session and the request slot
    assert is_left(bench, LOOKUP, pb.LookupRequest(session=client.session + 1, parent=home, name=b"there"))
    for strange in (
        {"session": client.session + 1},
        {"slot": 64},
        {"slot": 1 << 31},
        {"sequence": 0},
        {"sequence": 1},
    ):
        wrong = client.change(5)
        for field, value in strange.items():
            setattr(wrong, field, value)
        assert is_left(bench, CREATE, a_create(bench, change=wrong)), strange
    service.parts.sessions.get(client.session).slots[5].awaited = True
    assert is_left(bench, CREATE, a_create(bench))
    service.parts.sessions.get(client.session).slots[5].awaited = False
    assert is_left(bench, CREATE, a_create(bench), in_work={7: None})
    assert is_left(bench, CREATE, a_create(bench), in_work=dict.fromkeys(range(1000, 1000 + IN_FLIGHT_MAX)))
    assert not is_left(bench, CREATE, a_create(bench, b"last"), in_work={8: None})


@with_shard
async def test_shard_in_a_special_state_leaves_requests(bench):
    service = bench.service
    there = await bench.make(b"there")

    def all_left():
        return [
            is_left(bench, CREATE, a_create(bench)),
            is_left(
                bench, REPORT, pb.ReportRequest(change=bench.client.change(5), inode=there, end=9, wrote=True)
            ),
            is_left(
                bench,
                LOOKUP,
                pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"there"),
            ),
        ]

    for state in ("draining", "fenced", "loading"):
        service.status.state = state
        assert all(all_left())
        service.status.state = "serving"
    hold = service.parts.cross_shard.holds.take((9, 9, 9), 0, [b"held"])
    assert all(all_left())
    service.parts.cross_shard.holds.release((9, 9, 9))
    assert hold.done.done()
    service.parts.ranges.set_foreign((77,), True)
    assert all(all_left())
    service.parts.ranges.set_foreign((77,), False)
    service.parts.ranges.close((88,))
    assert all(all_left())
    service.parts.ranges.open((88,))
    service.parts.view.access.restricted[12] = object()
    assert all(all_left())
    service.parts.view.access.restricted.clear()
    bench.kv.sync_before_answer = True
    assert all(all_left())
    bench.kv.sync_before_answer = False
    service.parts.view.owners = (1,) * 4095 + (2,)
    assert all(all_left())
    service.parts.view.owners = ()
    service.parts.moment.changes_wait = True
    assert all_left() == [True, True, False]
    service.parts.moment.changes_wait = False
    service.parts.view.next_number, before = (
        service.parts.numbers.bounds.inode,
        service.parts.view.next_number,
    )
    assert all_left() == [True, True, False]
    service.parts.view.next_number = before
    service.parts.view.cutting[there] = asyncio.get_running_loop().create_future()
    assert all_left() == [False, False, True]  # a report still changes the size
    service.parts.view.cutting.clear()
    assert all_left() == [True, False, False]  # the name exists by now


@with_shard
async def test_volumes_with_quotas_are_left(bench):
    client = bench.client
    volume = await client.create(bench.home, b"v", stat.S_IFDIR | 0o755, volume=pb.VolumePolicy())
    root = volume.entry.attr.inode
    inside = (await client.file(root, b"inside")).inode
    change = client.change(5)
    assert is_left(bench, CREATE, a_create(bench, parent=root))
    assert is_left(bench, UNLINK, pb.UnlinkRequest(change=change, parent=root, name=b"inside"))
    assert is_left(bench, REPORT, pb.ReportRequest(change=change, inode=inside, end=9, wrote=True))
    assert not is_left(bench, LOOKUP, pb.LookupRequest(session=client.session, parent=root, name=b"inside"))


@with_shard
async def test_grant_in_a_volume_equals_the_slow_paths(bench):
    client = bench.client
    volume = await client.create(bench.home, b"v", stat.S_IFDIR | 0o755, volume=pb.VolumePolicy())
    root = volume.entry.attr.inode
    inside = (await client.file(root, b"inside")).inode
    for epoch in (0x1_0203, 0x7_1234_5678):
        bench.service.update_map(replace(small_map(), epoch=epoch))
        request = pb.LookupRequest(
            session=client.session, parent=root, name=b"inside", rights=1
        ).SerializeToString()
        frame = pack_head(REQUEST, LOOKUP, 7, 1000, request, 0)
        taken, out = bench.ask_fast(frame)
        assert taken and out == [await bench.ordinary.ask(frame)]
        _, _, _, _, message, _ = read_head(bytearray(out[0]), 0, len(out[0]), 0)
        grant = read(pb.Entry.FromString(message).grant)
        assert (grant.inode, grant.epoch, grant.volume) == (
            inside,
            epoch & EPOCH_MASK,
            volume_tag(root),
        ) and not grant.member


@with_shard
async def test_change_with_leases_of_others_is_left(bench):
    there = await bench.make(b"there")
    other = await ShardClient(bench.service).begin(watch=True)
    assert not is_left(bench, CREATE, a_create(bench, b"unshared"))  # the other client has no lease yet
    assert (await other.lookup(bench.home, b"there")).lease_ms
    change = bench.client.change(5)
    assert is_left(bench, REPORT, pb.ReportRequest(change=change, inode=there, end=9, wrote=True))
    assert is_left(bench, UNLINK, pb.UnlinkRequest(change=change, parent=bench.home, name=b"there"))
    assert not is_left(bench, CREATE, a_create(bench, b"in a directory that he has not"))
    assert (await other.getattr(bench.home)).lease_ms
    assert is_left(bench, CREATE, a_create(bench))
    bench.service.parts.watches.after_restart([other.session])
    assert is_left(bench, CREATE, a_create(bench))


@with_shard
async def test_damaged_records_are_left(bench):
    there = await bench.make(b"there")
    get = bench.kv.get

    def damaged(key):
        if key == records.inode_key(there):
            raise CorruptRecord("damaged")
        return get(key)

    bench.kv.get = damaged
    bench.service.parts.ranges.choose_readers()
    look = pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"there")
    assert is_left(bench, LOOKUP, look)
    assert is_left(
        bench, UNLINK, pb.UnlinkRequest(change=bench.client.change(5), parent=bench.home, name=b"there")
    )
    status, message = await bench.ask(LOOKUP, look)
    assert isinstance(decode_error(status, message), CorruptRecord)
    bench.kv.get = get
    for raw in (b"", b"\x01", bytes(40), b"\xff" * 40):
        bench.kv.apply([(records.inode_key(there), raw)])
        bench.service.parts.ranges.choose_readers()
        assert is_left(bench, LOOKUP, look)


@with_shard
async def test_bug_is_reported_by_the_slow_path(bench):
    there = await bench.make(b"there")
    get = bench.kv.get

    def broken(key):
        if key == records.inode_key(there):
            raise ValueError("a bug")
        return get(key)

    bench.kv.get = broken
    bench.service.parts.ranges.choose_readers()
    for method, request in (
        (LOOKUP, pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"there")),
        (GETATTR, pb.GetAttrRequest(session=bench.client.session, inode=there)),
        (UNLINK, pb.UnlinkRequest(change=bench.client.change(5), parent=bench.home, name=b"there")),
        (REPORT, pb.ReportRequest(change=bench.client.change(5), inode=there, end=9, wrote=True)),
    ):
        assert is_left(bench, method, request)
        assert isinstance(decode_error(*await bench.ask(method, request)), Bug)


@with_shard
async def test_failure_after_a_change_returns_the_kept_reply(bench):
    there = await bench.make(b"there")
    before = bench.kv.sequence

    def fail(inode):
        raise CorruptRecord("damaged")

    bench.service.parts.sessions.on_free = fail
    status, message = await bench.ask(
        REPORT, pb.ReportRequest(change=bench.client.change(5), inode=there, end=9, wrote=True, release=True)
    )
    assert not status and pb.AttrReply.FromString(message).attr.size == 9
    assert bench.kv.sequence == before + 1 and not bench.service.parts.sessions.holders.get(there)


@with_shard
async def test_other_or_damaged_frames_are_left(bench):
    await bench.make(b"there")
    message = pb.LookupRequest(
        session=bench.client.session, parent=bench.home, name=b"there"
    ).SerializeToString()
    frame = pack_head(REQUEST, LOOKUP, 7, 1000, message, 0)
    assert bench.ask_fast(frame)[0] == len(frame)
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit >> 3] ^= 1 << (bit & 7)
        assert bench.ask_fast(bytes(changed)) == (0, []), bit
    for short in range(len(frame)):
        assert bench.ask_fast(frame[:short]) == (0, [])
    for other in (
        pack_head(HELLO, 0, 7, 0, message, 0),
        pack_head(REPLY, 0, 7, 0, message, 0),
        pack_head(REQUEST, LOOKUP, 7, 1000, message, 5) + bytes(5),
        pack_head(REQUEST, wire.META_STATUS, 7, 1000, b"", 0),
        pack_head(REQUEST, LOOKUP, 7, 1000, message + b"\x0a" * 2000, 0),
    ):
        assert bench.ask_fast(other) == (0, [])
    with pytest.raises(ValueError, match="outside"):
        bench.service.fast_path.answer(bytearray(frame), len(frame) + 1, {}, bench.stats, [], bench.ordinary)


@with_shard
async def test_listener_uses_the_fast_path_first(bench):
    asked = []

    def handle(call):
        asked.append(call.method)
        bench.service.handle(call)

    class Handling:
        __call__ = staticmethod(handle)
        fast_path = staticmethod(bench.service.fast_path.answer)

    stream = transport("stream")
    greeting = Greeting("test", "f")
    listener = await stream.listen("stream://127.0.0.1:0", greeting, Handling())
    deadline_s = SYSTEM_CLOCK.boottime_s() + 20
    connection = await stream.connect(listener.endpoint, greeting, deadline_s=deadline_s)

    async def ask(method, request):
        return (await connection.call(method, request.SerializeToString(), deadline_s=deadline_s)).message

    made = pb.CreateReply.FromString(await ask(CREATE, a_create(bench, b"first", open=True, rights=2)))
    assert made.created and not asked
    creates = [
        a_create(bench, b"%d" % number, change=bench.client.change(10 + number)) for number in range(40)
    ]
    creates[20].mode = stat.S_IFDIR | 0o755
    made = [
        pb.CreateReply.FromString(reply)
        for reply in await asyncio.gather(*(ask(CREATE, create) for create in creates))
    ]
    assert all(reply.created for reply in made) and 0 < len(asked) < 40
    with pytest.raises(NotFound):
        await ask(LOOKUP, pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"missing"))
    assert await bench.client.names(bench.home) == {b"first", *(b"%d" % number for number in range(40))}
    await connection.close()
    await listener.close()


@with_shard
async def test_session_of_another_peer_is_left(bench):
    inode = await bench.make(b"f")
    change = bench.client.change()
    frames = [
        pack_head(REQUEST, method, 7, 1000, request.SerializeToString(), 0)
        for method, request in (
            (GETATTR, pb.GetAttrRequest(session=bench.client.session, inode=inode)),
            (LOOKUP, pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"f")),
            (REPORT, pb.ReportRequest(change=change, inode=inode, end=100, wrote=True)),
            (UNLINK, pb.UnlinkRequest(change=change, parent=bench.home, name=b"f")),
            (CREATE, pb.CreateRequest(change=change, parent=bench.home, name=b"g", mode=FILE)),
        )
    ]
    before = bench.state()
    session = bench.service.parts.sessions.by_number[bench.client.session]
    session.owner = "client/alice.1"
    bench.ordinary.peer = bench.ordinary.peer._replace(member="client/mallory.1")
    for frame in frames:
        assert bench.ask_fast(frame) == (0, [])
    session.owner = None  # a record without an owner: the slow path binds it
    assert bench.ask_fast(frames[0]) == (0, [])
    assert (
        bench.service.fast_path.answer(bytearray(frames[0]), len(frames[0]), {}, bench.stats, []) == 0
    )  # without a known peer
    assert bench.state() == before
    for owner, member in (("client/alice.1", "client/alice.1"), ("", ""), ("client/alice.1", "node/alpha")):
        session.owner = owner
        bench.ordinary.peer = bench.ordinary.peer._replace(member=member)
        assert bench.ask_fast(frames[0])[0] == len(frames[0])


@with_shard
async def test_session_bound_to_a_user_is_left(bench):
    look = pb.LookupRequest(session=bench.client.session, parent=1, name=b"home").SerializeToString()
    frame = pack_head(REQUEST, LOOKUP, 7, 1000, look, 0)
    session, ours = bench.service.parts.sessions.by_number[bench.client.session], bench.ordinary.peer
    uid = os.geteuid() + 1000
    user = ours._replace(credentials=Credentials(uid, frozenset((uid,)), 1))
    for peer, owner in (
        (user, f"uid/{uid}"),
        *((ours._replace(member=name), name) for name in ("client/a.0a1b2c3d.u1000-50", "client/a.0a1b2c3d")),
    ):
        bench.ordinary.peer, session.owner = peer, owner
        assert (bench.ask_fast(frame) == (0, [])) is (owner != "client/a.0a1b2c3d"), owner


@with_shard
async def test_member_uses_the_fast_path_only_as_ungated_primary(bench):
    class Member:
        service, handle = None, None

    member = Member()
    look = pb.LookupRequest(session=bench.client.session, parent=1, name=b"home").SerializeToString()
    frame = pack_head(REQUEST, LOOKUP, 7, 1000, look, 0)

    def taken():
        return MemberFastPath(member).answer(
            bytearray(frame), len(frame), {}, bench.stats, [], bench.ordinary
        )

    assert not taken()
    member.service, member.handle = bench.service, lambda call: None  # behind a commit gate, or deposed
    assert not taken()
    member.handle = bench.service.handle
    assert taken() == len(frame)


# -- refusals of the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        NoSpace("full"),
        Busy("later", retry_after_s=0.1),
        DriveFailed("broken"),
        Fenced("over"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refusal_of_the_engine_is_answered_and_kept(tmp_path, error):
    async def served(quick):
        async with a_shard(tmp_path / f"kv-{quick}", quick) as bench:
            apply, calls = bench.kv.apply, []

            def refuse(*effects, **more):
                calls.append((effects, more))
                raise error

            bench.kv.apply = refuse
            request = a_create(bench, open=True, rights=2)
            replies = [await bench.ask(CREATE, request)]
            assert len(calls) == 1
            bench.kv.apply = apply
            replies += [await bench.ask(CREATE, request), await bench.ask(CREATE, a_create(bench, b"other"))]
            if bench.service.died.done():
                bench.service.died.exception()
            return (
                replies,
                calls,
                bench.state(),
                dict(bench.stats.errors) if quick else dict(bench.ordinary.reply_stats.errors),
            )

    quick, ordinary = asyncio.run(served(True)), asyncio.run(served(False))
    assert quick[:3] == ordinary[:3]
    if not isinstance(error, Fenced):
        assert next(iter(quick[3].values())) == 1
    assert quick[0][0][0]


@with_shard
async def test_full_engine_delays_changes_but_not_look_ups(bench):
    await bench.make(b"there")
    kind = type(bench.kv)

    class Full(kind):
        full = True

    bench.kv.__class__ = Full
    assert is_left(bench, CREATE, a_create(bench))
    assert not is_left(
        bench, LOOKUP, pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"there")
    )
    bench.kv.__class__ = kind


# -- decoding and encoding -----------------------------------------------------------------------------------------------


def inodes():
    number = st.integers
    time = st.one_of(
        number(-(1 << 33), 1 << 33),
        number(1_700_000_000 * 10**9, 1_700_000_010 * 10**9),
        number(-(1 << 61), 1 << 61),
    )
    owner = st.one_of(st.just(0), number(0, 0xFFFF), number(0, 0xFFFFFFFF))
    small = st.one_of(st.just(0), number(0, 300), number(0, (1 << 63) - 1))
    mode = st.builds(
        lambda kind, bits: kind << 12 | bits, st.sampled_from(sorted(records.KINDS - {10})), number(0, 0o7777)
    )
    links = st.one_of(st.just(1), number(0, 0xFFFFFFFF))
    return st.builds(
        Inode,
        number(1, (1 << 63) - 1),
        mode,
        links=links,
        uid=owner,
        gid=owner,
        size=small,
        blocks=small,
        atime_ns=time,
        mtime_ns=time,
        ctime_ns=time,
        change=small,
        cut=small,
        rdev=owner,
        table=number(0, 255),
        chunk_bits=st.one_of(st.just(20), number(0, 255)),
        flags=number(0, 0x1FF),
        parent=small,
        punches=small,
        volume=small,
        birth_ns=st.one_of(st.just(0), time),
    )


@given(inodes())
def test_inode_codec_equals_the_python_one(inode):
    raw = records.encode_inode(inode)
    record, attr = meta_fast_path.compiled.recoded(inode.number, raw)
    assert record == raw
    inode.flags &= ~records.TRASHED
    said = pb.Attr()
    fill_attr(said, inode)
    if not raw[4:6] or not records.decode_inode(inode.number, raw).flags & records.TRASHED:
        assert attr == said.SerializeToString()
    target = b"over there"
    link = Inode(
        inode.number,
        0o120777,
        size=len(target),
        atime_ns=inode.atime_ns,
        mtime_ns=inode.mtime_ns,
        ctime_ns=inode.ctime_ns,
        target=target,
    )
    raw = records.encode_inode(link)
    assert meta_fast_path.compiled.recoded(inode.number, raw)[0] == raw


@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(
            lambda head, rest: (1 | head << 8).to_bytes(4, "little") + rest,
            st.integers(0, (1 << 22) - 1),
            st.binary(max_size=90),
        ),
    )
)
def test_invalid_inode_records_are_refused(raw):
    found = meta_fast_path.compiled.recoded(5, raw)
    try:
        inode = records.decode_inode(5, raw)
    except CorruptRecord:
        assert found is None
    else:
        if found is not None:
            assert found[0] == records.encode_inode(inode)


@given(st.integers(0, 4095), st.binary(max_size=10))
def test_entry_decoder_equals_the_python_one(partition, raw):
    for value in (raw, b"\x18" + raw, b"\x14" + raw):
        try:
            inode, _ = records.decode_dentry(partition, value)
        except CorruptRecord:
            inode = 0
        assert meta_fast_path.compiled.entry_of(partition, value) == inode


def requests():
    number = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, (1 << 64) - 1))
    small = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, (1 << 32) - 1))
    flag, name = st.booleans(), st.binary(max_size=20)
    change = st.builds(
        pb.Change, session=number, slot=small, sequence=number, map_epoch=number, uid=small, gid=small
    )
    return st.one_of(
        st.tuples(
            st.just(CREATE),
            st.builds(
                pb.CreateRequest,
                change=change,
                parent=number,
                name=name,
                mode=small,
                open=flag,
                rights=small,
                exclusive=flag,
                truncate=flag,
                masked=small,
            ),
        ),
        st.tuples(st.just(UNLINK), st.builds(pb.UnlinkRequest, change=change, parent=number, name=name)),
        st.tuples(
            st.just(REPORT),
            st.builds(
                pb.ReportRequest,
                change=change,
                inode=number,
                cut=number,
                end=number,
                wrote=flag,
                sync=flag,
                release=flag,
                blocks_delta=number,
            ),
        ),
        st.tuples(
            st.just(LOOKUP),
            st.builds(
                pb.LookupRequest, session=number, map_epoch=number, parent=number, name=name, rights=small
            ),
        ),
        st.tuples(
            st.just(GETATTR),
            st.builds(pb.GetAttrRequest, session=number, map_epoch=number, inode=number, rights=small),
        ),
    )


def fields_of(method, request):
    """Fields of a request under the names of request_of."""
    change = request.change if hasattr(request, "change") else request
    of = lambda what, name: getattr(what, name, b"" if name == "name" else 0)  # noqa: E731
    found = {name: of(change, name) for name in ("session", "slot", "sequence", "uid", "gid")}
    found |= {
        name: of(request, name)
        for name in (
            "name",
            "mode",
            "open",
            "rights",
            "cut",
            "end",
            "wrote",
            "sync",
            "release",
            "blocks_delta",
        )
    }
    return found | {"inode": of(request, "inode" if method in (REPORT, GETATTR) else "parent")}


@given(requests())
def test_request_decoder_equals_protobuf(asked):
    method, request = asked
    found = meta_fast_path.compiled.request_of(method, request.SerializeToString())
    numbers = [fields_of(method, request)[name] for name in ("sequence", "cut", "end", "blocks_delta")]
    if found is None:
        assert max(numbers) >= 1 << 63
    else:
        assert found == fields_of(method, request)


@given(
    requests(),
    st.lists(
        st.tuples(
            st.integers(0, 200), st.integers(0, 255), st.sampled_from(("change", "insert", "cut", "double"))
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_broken_request_is_decoded_like_protobuf_or_refused(asked, faults):
    method, request = asked
    raw = bytearray(request.SerializeToString())
    for at, byte, what in faults:
        at = at % (len(raw) + 1)
        if what == "change" and at < len(raw):
            raw[at] = byte
        elif what == "insert":
            raw.insert(at, byte)
        elif what == "cut":
            del raw[at : at + byte % 4]
        elif what == "double":
            raw[at:at] = raw[at : at + byte % 12]
    found = meta_fast_path.compiled.request_of(method, bytes(raw))
    if found is not None:
        read = MESSAGES[method].FromString(bytes(raw))  # raises if it cannot be decoded
        assert found == fields_of(method, read)
        for field, value in read.ListFields():  # and no other field was in it
            known = ("change", "map_epoch", "exclusive", "truncate", "masked", "parent", *found)
            assert field.name in known, (field.name, value)
