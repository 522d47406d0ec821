"""Requests from frames: same bytes, records and counters as the same requests from calls."""

import asyncio
import hashlib
import os
import random
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.errors import Busy, DriveFailed, Fenced, NoSpace, NotFound, TooManyOpen
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.server.shard_member import MemberFastPath
from nvpool.meta.state import records
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import decode_error
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX, ServerConnection
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transport_registry import transport
from nvpool.rpc.transports.frame import EMPTY, HELLO, REPLY, REQUEST, pack_head, read_head
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map

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
    """Connection through which a request comes to the service as a call."""

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
    """A shard that takes requests from frames (`quick`), or from calls; all have the same clock and secrets."""

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
        taken = self.service.dispatch.answer(
            bytearray(frame), len(frame), in_work or {}, self.stats, out, self.ordinary
        )
        return taken, out

    async def ask(self, method, request, number=7):
        """(status, message) of the reply."""
        message = request if type(request) is bytes else request.SerializeToString()
        frame = pack_head(REQUEST, method, number, 1000, message, 0)
        taken, out = self.ask_fast(frame) if self.quick else (0, [])
        if taken:
            assert taken == len(frame)
            self.taken += 1
            for _ in range(100):
                if out or self.ordinary.sent:
                    break
                await asyncio.sleep(0.01)
            out = out or [self.ordinary.sent.pop()]
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
    """Decorator: run the test with one shard that takes requests from frames."""

    def run(tmp_path):
        async def served():
            async with a_shard(tmp_path / "kv", quick=True) as bench:
                await test(bench)

        asyncio.run(served())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def with_both(test):
    """Decorator: run the test from frames and from calls, and compare results and state."""

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


async def some_requests(path, seed, quick):
    """Replies to 1,500 random requests, the state after them, how many came from frames, and findings of fsck."""
    clock = ManualClock(3)
    async with a_shard(path, quick, clock, watch=seed != 1) as bench:
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
                # the other client never delays a change
                bench.service.parts.watches.by_session[other.session].until_s = 0
            clock.advance(draw.choice((0.0, 0.001, 1.0)))
            if not draw.randrange(200):
                await bench.kv.checkpoint()
        problems = await bench.client.fsck()
        return replies, bench.state(), bench.taken, problems


@pytest.mark.few(3)  # the last two of these are special
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_give_the_same_replies_and_state(tmp_path, seed):
    replies, state, taken, problems = asyncio.run(some_requests(tmp_path / "frames", seed, True))
    slow_replies, slow_state, _, _ = asyncio.run(some_requests(tmp_path / "calls", seed, False))
    for number, (one, other) in enumerate(zip(replies, slow_replies, strict=True)):
        assert one == other, number

    assert state == slow_state
    assert taken > 1000 and not problems
    assert len({status for status, _ in replies}) > 4  # with several kinds of refusals


def digest_of(path) -> str:
    """Digest of replies and state of some requests."""
    replies, state, *_ = asyncio.run(some_requests(path, 0, True))
    return hashlib.sha256(repr((replies, state)).encode()).hexdigest()


@pytest.mark.compiled
def test_interpreted_modules_give_the_same_bytes(tmp_path):
    module = "tests.unit.meta.server.test_request_dispatch"
    code = f"from {module} import digest_of; print(digest_of({str(tmp_path / 'interpreted')!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[4],
        env=os.environ | {"NVPOOL_PURE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert done.stdout.split()[-1] == digest_of(tmp_path / "compiled")


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
    first = await bench.ask(CREATE, request)
    again = await bench.ask(CREATE, request)
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


# -- states of a shard ------------------------------------------------------------------------------------------------


def a_create(bench, name=b"new", **fields):
    return pb.CreateRequest(
        **{"change": bench.client.change(5), "parent": bench.home, "name": name, "mode": FILE, **fields}
    )


def same_in_state(prepare):
    """Run a create, a report and a look-up in a state of the shard, from frames and from calls; compare."""

    async def served(path, quick):
        async with a_shard(path, quick) as bench:
            there = await bench.make(b"there")
            await prepare(bench, there)
            change = bench.client.change
            return [
                await bench.ask(CREATE, a_create(bench, open=True, rights=2)),
                await bench.ask(
                    REPORT, pb.ReportRequest(change=change(6), inode=there, end=9, wrote=True, sync=True)
                ),
                await bench.ask(UNLINK, pb.UnlinkRequest(change=change(7), parent=bench.home, name=b"there")),
                await bench.ask(
                    LOOKUP, pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"new")
                ),
            ], bench.state()

    def run(tmp_path):
        from_frames = asyncio.run(served(tmp_path / "frames", True))
        assert from_frames == asyncio.run(served(tmp_path / "calls", False))
        return [status for status, _ in from_frames[0]]

    return run


def test_shard_that_stops_refuses_frames_as_calls(tmp_path):
    async def stop(bench, there):
        bench.service.status.state = "draining"

    assert all(same_in_state(stop)(tmp_path))


def test_synced_answers_are_equal(tmp_path):
    async def sync(bench, there):
        bench.kv.sync_before_answer = True

    assert not any(same_in_state(sync)(tmp_path))


def test_leases_of_others_are_recalled(tmp_path):
    async def watch(bench, there):
        other = await ShardClient(bench.service).begin(watch=True)
        bench.service.parts.watches.end_delegation(there)
        assert (await other.lookup(bench.home, b"there")).lease_ms
        assert (await other.getattr(bench.home)).lease_ms
        bench.service.parts.watches.by_session[other.session].until_s = 0

    assert not any(same_in_state(watch)(tmp_path))


def test_volume_with_a_quota_is_counted(tmp_path):
    async def served(path, quick):
        async with a_shard(path, quick) as bench:
            client = bench.client
            made = await client.create(
                bench.home, b"v", stat.S_IFDIR | 0o755, volume=pb.VolumePolicy(files_max=2, bytes_max=5000)
            )
            bench.home = made.entry.attr.inode
            inode = await bench.make(b"one")
            replies = [await bench.ask(CREATE, a_create(bench, b"two"))]
            for end in (4096, 6000):
                request = pb.ReportRequest(change=client.change(7), inode=inode, end=end, wrote=True)
                replies.append(await bench.ask(REPORT, request))
            request = pb.UnlinkRequest(change=client.change(8), parent=bench.home, name=b"one")
            replies.append(await bench.ask(UNLINK, request))
            assert not await client.fsck()
            return replies, bench.state()

    from_frames = asyncio.run(served(tmp_path / "frames", True))
    assert from_frames == asyncio.run(served(tmp_path / "calls", False))
    assert len({status for status, _ in from_frames[0]}) == 2  # one beyond the quota is refused


@with_shard
async def test_locked_record_delays_the_reply_to_a_frame(bench):
    await bench.make(b"there")
    holds = bench.service.parts.cross_shard.holds
    holds.take((9, 9, 9), 0, [records.inode_key(bench.home)])
    frame = pack_head(REQUEST, CREATE, 7, 1000, a_create(bench).SerializeToString(), 0)
    assert bench.ask_fast(frame, bench.ordinary.in_work) == (len(frame), [])
    assert list(bench.ordinary.in_work) == [7]
    await asyncio.sleep(0.02)
    assert not bench.ordinary.sent
    holds.release((9, 9, 9))
    for _ in range(100):
        await asyncio.sleep(0.01)
        if bench.ordinary.sent:
            break
    (frame,) = bench.ordinary.sent
    _, status, number, _, message, _ = read_head(bytearray(frame), 0, len(frame), 0)
    assert not status and number == 7 and pb.CreateReply.FromString(message).created
    assert not bench.ordinary.in_work


@with_shard
async def test_delayed_request_can_be_cancelled(bench):
    holds = bench.service.parts.cross_shard.holds
    holds.take((9, 9, 9), 0, [records.inode_key(bench.home)])
    frame = pack_head(REQUEST, CREATE, 7, 1000, a_create(bench).SerializeToString(), 0)
    assert bench.ask_fast(frame)[0]
    bench.ordinary.cancel_request(7)
    holds.release((9, 9, 9))
    await asyncio.sleep(0.05)
    assert not bench.ordinary.sent and not bench.ordinary.in_work
    assert await bench.client.names(bench.home) == set()


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
    ):
        assert bench.ask_fast(other) == (0, [])
    assert bench.ask_fast(frame, {7: None}) == (0, [])
    assert bench.ask_fast(frame, dict.fromkeys(range(1000, 1000 + IN_FLIGHT_MAX))) == (0, [])
    with pytest.raises(ValueError, match="outside"):
        bench.service.dispatch.answer(bytearray(frame), len(frame) + 1, {}, bench.stats, [], bench.ordinary)


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
            apply = bench.kv.apply

            def refuse(*effects, **more):
                raise error

            bench.kv.apply = refuse
            request = a_create(bench, open=True, rights=2)
            replies = [await bench.ask(CREATE, request)]
            assert replies[0][0], "refused"
            bench.kv.apply = apply
            replies += [await bench.ask(CREATE, request), await bench.ask(CREATE, a_create(bench, b"other"))]
            if bench.service.died.done():
                bench.service.died.exception()
            stats = bench.stats if quick else bench.ordinary.reply_stats
            return replies, bench.state(), dict(stats.errors)

    assert asyncio.run(served(True)) == asyncio.run(served(False))


@with_shard
async def test_session_of_another_peer_is_refused(bench):
    inode = await bench.make(b"f")
    session = bench.service.parts.sessions.by_number[bench.client.session]
    request = pb.GetAttrRequest(session=bench.client.session, inode=inode)
    session.owner = "client/alice.1"
    for member, refused in (("client/mallory.1", True), ("client/alice.1", False), ("node/alpha", False)):
        bench.ordinary.peer = bench.ordinary.peer._replace(member=member)
        assert bool((await bench.ask(GETATTR, request))[0]) is refused, member


@with_shard
async def test_listener_hands_frames_to_the_dispatch(bench):
    asked = []

    def handle(call):
        asked.append(call.method)
        bench.service.handle(call)

    class Handling:
        __call__ = staticmethod(handle)
        fast_path = staticmethod(bench.service.dispatch.answer)

    stream = transport("stream")
    greeting = Greeting("test", "f")
    listener = await stream.listen("stream://127.0.0.1:0", greeting, Handling())
    deadline_s = SYSTEM_CLOCK.boottime_s() + 20
    connection = await stream.connect(listener.endpoint, greeting, deadline_s=deadline_s)

    async def ask(method, request):
        return (await connection.call(method, request.SerializeToString(), deadline_s=deadline_s)).message

    creates = [
        a_create(bench, b"%d" % number, change=bench.client.change(10 + number)) for number in range(40)
    ]
    made = [
        pb.CreateReply.FromString(reply)
        for reply in await asyncio.gather(*(ask(CREATE, create) for create in creates))
    ]
    assert all(reply.created for reply in made) and not asked
    with pytest.raises(NotFound):
        await ask(LOOKUP, pb.LookupRequest(session=bench.client.session, parent=bench.home, name=b"missing"))
    assert await bench.client.names(bench.home) == {b"%d" % number for number in range(40)}
    await connection.close()
    await listener.close()


@with_shard
async def test_member_hands_frames_to_its_commit_gate(bench):
    class Member:
        service, handle = None, None

    member, gated = Member(), []
    look = pb.LookupRequest(session=bench.client.session, parent=1, name=b"home").SerializeToString()
    frame = pack_head(REQUEST, LOOKUP, 7, 1000, look, 0)

    def taken():
        out = []
        MemberFastPath(member).answer(bytearray(frame), len(frame), {}, bench.stats, out, bench.ordinary)
        return len(out)

    assert not taken()
    member.service, member.handle = bench.service, gated.append
    assert not taken() and len(gated) == 1 and list(bench.ordinary.in_work) == [7]
    bench.service.handle(gated[0])  # the gate opens
    assert len(bench.ordinary.sent) == 1 and not bench.ordinary.in_work
    member.handle = bench.service.handle
    assert taken() == 1
