"""File creation on the compiled fast path: messages, replies, state and errors as on the slow path, in every case."""

import asyncio
import contextlib
import errno
import os
import random
import socket
from contextlib import asynccontextmanager

import pytest
from google.protobuf.message import DecodeError
from msgspec.structs import replace

from nvpool.client.pool_client import Client
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.core import errors, grants
from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.primitives import request_frame
from nvpool.fuse.fast_path import creates
from nvpool.fuse.ops.kernel_cache.options import FuseOptions
from nvpool.fuse.protocol import replies, reply_encoder, requests
from nvpool.fuse.protocol.constants import Op, Opening
from nvpool.fuse.protocol.requests import FORMS, FuseRequest
from nvpool.poolmap.model import StandbyMember
from nvpool.rpc.messages import meta_messages
from nvpool.rpc.messages.direntries import attr_of
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.transports import frame, frame_fast_path
from nvpool.rpc.v1.meta_pb2 import Attr, CreateReply, CreateRequest
from nvpool.rpc.v1.wire_pb2 import META_CREATE
from nvpool.shm.mount_records import HANDLES_MAX
from nvpool.shm.mount_state import KeptMemory
from tests.fuse.read_kernel import WAYS, Reading, path_decorators, until
from tests.unit.client.data.test_short_circuit import Host, run_whole

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
MADE_BYTES = replies.SHAPES["create"][1].size
NO_PROCESS = 1 << 22
"""There is no such process."""


class ShardProxy:
    """Handles requests of the shard's listener: passes them to the service, unless a test replies to a create itself."""

    def __init__(self, service):
        self.service = service
        self.heard = []
        self.instead = None

    def __call__(self, call):
        if call.method == META_CREATE:
            self.heard.append(bytes(call.message))
            if self.instead is not None:
                self.instead(call)
                return
        self.service.handle(call)


class ChangedCall:
    """A call whose reply differs from the service's."""

    def __init__(self, call, change):
        self._call, self._change = call, change

    def __getattr__(self, name):
        return getattr(self._call, name)

    def reply(self, message=b"", payload=()):
        self._call.reply(self._change(bytes(message)))


class HeldCall:
    """A call whose reply is held back."""

    def __init__(self, call, said):
        self._call, self._said = call, said

    def __getattr__(self, name):
        return getattr(self._call, name)

    def reply(self, message=b"", payload=()):
        self._said.append(bytes(message))


async def carry_out(kernel, call):
    """Carry out the call; its reply, which is not sent yet."""
    said = []
    kernel.proxy.service.handle(HeldCall(call, said))
    async with asyncio.timeout(60):
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return said[0]


class StatefulHost(Host):
    """Its client keeps the state that survives its process. `shard_fast_path`: the shard replies on its own fast path where
    it can.
    """

    def __init__(self, clock, options, shard_fast_path):
        super().__init__(shards=1)
        self.clock, self.client_options, self.shard_fast_path = clock, options, shard_fast_path

    async def __aenter__(self):
        await self.pool.__aenter__()
        listener = self.pool.listeners["meta", 1]
        self.proxy = ShardProxy(
            listener.handler.__self__ if hasattr(listener.handler, "__self__") else listener.handler
        )
        if not self.shard_fast_path:
            self.proxy.service = self.pool.meta
            listener.handler = self.proxy
        self.descriptor = KeptMemory.make(1 << 24)
        self.kept = KeptMemory(self.descriptor)
        self.client = await Client.open(
            self.pool.pool_map, "maker", self.client_options, clock=self.clock, kept=self.kept
        )
        self.pool.clients.append(self.client)
        self.vfs = self.client.vfs
        return self

    async def __aexit__(self, *failure):
        os.close(self.descriptor)
        await super().__aexit__(*failure)


class Mounted(Reading):
    def __init__(self, host, writeback=False):
        super().__init__(host, FuseOptions(writeback=writeback), host.clock)
        self.answers = []

    @property
    def ops(self):
        return self.engine.ops

    @property
    def state(self):
        return self.vfs.meta.shards[1]

    @property
    def proxy(self):
        return self.host.proxy

    @property
    def compiled_creates(self):
        creates = self.engine.fast_paths.creates.creates
        return creates.made if creates is not None else 0

    def send_create(self, name, flags=NEW, mode=0o100644, pid=0, uid=0, gid=0, unique=None, node=1):
        self.last += 2
        unique = self.last if unique is None else unique
        body = FORMS[Op.CREATE].body(flags, mode, 0o22, 0)
        self.ours.send(
            requests.encode(FuseRequest(Op.CREATE, unique, node, uid, gid, pid, body, (name,), b""))
        )
        return unique

    async def receive(self):
        unique, error, answer = await super().receive()
        if len(answer) == MADE_BYTES:
            times = dict.fromkeys(("atime", "mtime", "ctime", "atimensec", "mtimensec", "ctimensec"), 0)
            self.answers.append((unique, error, replies.read("create", answer)._replace(**times)))
        else:
            self.answers.append((unique, error, len(answer)))
        return unique, error, answer

    async def create_file(self, name, flags=NEW, **more):
        unique = self.send_create(name, flags, **more)
        heard, error, answer = await self.receive()
        assert heard == unique
        if error:
            raise OSError(-error, os.strerror(-error))
        made = replies.read("create", answer)
        if self.host.clock is SYSTEM_CLOCK:
            attr = self.ops.files.by_handle[made.fh].attr
            assert (
                made.mtime * 10**9 + made.mtimensec == attr.mtime_ns and made.ctime == attr.ctime_ns // 10**9
            )
        return made

    async def close_file(self, handle):
        unique = self.send(Op.RELEASE, (handle, 0, 0, 0))
        assert (await self.receive())[:2] == (unique, 0)

    async def pending_create(self, name, flags=NEW, **more):
        """The request is with the shard, which does not reply yet."""
        calls = []
        self.proxy.instead = calls.append
        unique = self.send_create(name, flags, **more)
        async with asyncio.timeout(60):
            while not calls:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        self.proxy.instead = None
        return unique, calls[0]

    def grant_of(self, file):
        if not file.grant:
            return False, file.grant_session, file.grant_half_ms
        now_ms = self.host.clock.wall_ns() // 1_000_000
        ends_ms = grants.read(file.grant).ends_ms
        # of a clock that differs, for a short time, between a file and the check of the state
        half_ms = file.grant_half_ms - (now_ms + (ends_ms - now_ms) // 2)
        return file.grant_session == self.state.session, file.grant[:4], abs(half_ms) < 30_000

    def client_state(self):
        """All state of the client, in its order."""
        vfs, ops, cache, leases = self.vfs, self.ops, self.vfs.cache, self.vfs.leases
        slots = [
            slot
            for slot in OpenInode.__slots__
            if slot not in ("attr", "grant", "grant_session", "grant_half_ms", "delegation")
        ]
        connection = self.state.met
        return {
            "open": [
                (
                    inode,
                    untimed(file.attr),
                    [getattr(file, slot) for slot in slots],
                    *self.grant_of(file),
                    file.delegation is None,
                )
                for inode, file in cache.open.items()
            ],
            "attrs": [(inode, untimed(attr), born_s) for inode, (attr, born_s) in cache.attrs.items()],
            "entries": [(place, found[:3], lease_of(found[3])) for place, found in cache.entries.items()],
            "renamed": list(cache.renamed_s.items()),
            "floor": cache.renamed_floor_s,
            "whole": [
                (inode, whole.change, sorted(whole.names), whole.ours)
                for inode, whole in cache.complete_dirs.items()
            ],
            "whole names": cache.whole_names,
            "leases": [(inode, lease_of(lease)) for inode, lease in leases.by_inode.items()],
            "number": leases.last_number,
            "watch": (
                self.state.watch.floor_s,
                dict(self.state.watch.ended),
            ),  # not `used`: the watch itself resets it
            "registered": dict(self.state.open),
            "slots": list(self.state.slots),
            "waiting": list(self.state.waiting),
            "noted": self.host.kept.slots(self.state.record),
            "handles": self.host.kept.handles.valid(),
            "files": [
                (
                    number,
                    [
                        getattr(file, slot)
                        for slot in ("inode", "flags", "readable", "writable", "append", "closed", "number")
                    ],
                )
                for number, file in ops.files.by_handle.items()
            ],
            "shared": all(file.file is cache.open[file.inode] for file in ops.files.by_handle.values()),
            "notified": dict(ops.cached_names.sent_changes),
            "seen": dict(ops.cached_pages.seen),
            "appending": dict(ops.files.appending),
            "changes": ops.changes.count,
            "named": list(ops.cached_names.naming.names),
            "barred": dict(ops.published.barred),
            "writing": set(ops.published.writing),
            "counters": {name: vfs.meta.counters[name] for name in ("changes", "repeats", "sessions")},
            "made names": dict(vfs.complete_dirs.made_names),
            "work": list(self.engine.requests.work),
            "held": dict(vfs.meta.once.held),
            "spent": sum(times.counts)
            if (times := self.engine.requests.spent.times[Op.CREATE]) is not None
            else 0,
            "in flight": len([one for one in connection.in_flight.values() if one[4] == META_CREATE]),
            "calls": (RPC_STATS.calls.begun - RPC_STATS.calls.ended) - len(connection.in_flight),
        }


def lease_of(lease):
    return None if lease is None else (lease.until_s, lease.since_s, lease.grant[:4], lease.number)


def untimed(attr):
    """Without its times, which the shard sets."""
    without = Attr.FromString((attr_of(attr) if type(attr) is bytes else attr).SerializeToString())
    without.atime_ns = without.mtime_ns = without.ctime_ns = 0
    return without.SerializeToString(deterministic=True)


OPTIONS = ClientOptions(deadline_s=20.0, retry_first_s=0.001)


@asynccontextmanager
async def mounted(
    way="compiled", options=OPTIONS, clock=SYSTEM_CLOCK, shard_fast_path=False, writeback=False
):
    async with StatefulHost(clock, options, shard_fast_path) as host, Mounted(host, writeback) as kernel:
        await kernel.init()
        if way == "ordinary":
            await kernel.engine.fast_paths.stop()
        await kernel.close_file((await kernel.create_file(b"the first one, by which there is a session")).fh)
        kernel.way, before = way, kernel.compiled_creates
        yield kernel
        kernel.proxy.instead = None
        assert not kernel.engine.requests.work
        assert way == "ordinary" or kernel.compiled_creates > before or not kernel.expects_some, (
            "none was created on the fast path"
        )


Mounted.expects_some = True
on_a_mount, on_both_paths, on_fast_path = path_decorators(mounted)


# -- messages ----------------------------------------------------------------------------------------------------------------


def some_number(chance, bits):
    return chance.getrandbits(chance.randrange(bits) + 1) if chance.random() < 0.8 else 0


def test_request_bytes_are_those_of_protobuf():
    chance = random.Random(1)
    for _ in range(3000):
        fields = {
            "parent": some_number(chance, 63),
            "name": chance.randbytes(chance.choice([1, 7, 127, 128, 255])),
            "mode": 0o100000 | some_number(chance, 12),
            "open": True,
            "rights": chance.choice([1, 3]),
            "exclusive": chance.random() < 0.5,
            "truncate": chance.random() < 0.5,
            "masked": some_number(chance, 9),
        }
        request, typed = CreateRequest(**fields), meta_messages.CreateRequest(**fields)
        for change in (request.change, typed.change):
            state = chance.getstate()
            change.session, change.slot, change.sequence = (
                some_number(chance, 64),
                chance.randrange(64),
                some_number(chance, 62),
            )
            change.map_epoch, change.uid, change.gid = (
                some_number(chance, 40),
                some_number(chance, 32),
                some_number(chance, 32),
            )
            if change is request.change:
                chance.setstate(state)
        message = request.SerializeToString()
        assert typed.SerializeToString() == message
        number, left_ms = chance.getrandbits(32), chance.getrandbits(32)
        assert request_frame(META_CREATE, number, left_ms, message) == frame.pack_head_plain(
            frame.REQUEST, META_CREATE, number, left_ms, message, 0
        )


def some_attr(chance, mode):
    attr = Attr(
        inode=1 + some_number(chance, 60),
        mode=mode,
        change=1 + some_number(chance, 40),
        chunk_bits=20,
        table=1,
    )
    for field, bits in (
        ("links", 32),
        ("uid", 32),
        ("gid", 32),
        ("blocks", 60),
        ("atime_ns", 62),
        ("mtime_ns", 62),
        ("ctime_ns", 62),
        ("rdev", 32),
        ("cut", 60),
        ("flags", 16),
        ("parent", 62),
        ("punches", 30),
    ):
        setattr(attr, field, some_number(chance, bits))
    return attr


def some_reply(chance):
    reply = CreateReply(created=True)
    reply.entry.attr.CopyFrom(some_attr(chance, 0o100000 | some_number(chance, 12)))
    reply.entry.grant = b"\1" + chance.randbytes(59)
    reply.entry.lease_ms = some_number(chance, 31)
    reply.parent.CopyFrom(some_attr(chance, 0o040755))
    return reply


def fast_path_form(reply):
    """As the shard's fast path writes a reply: the lease after the stored part."""
    lease = CreateReply()
    lease.entry.lease_ms, before = reply.entry.lease_ms, CreateReply()
    before.CopyFrom(reply)
    before.ClearField("parent")
    before.entry.ClearField("lease_ms")
    after = CreateReply()
    after.parent.CopyFrom(reply.parent)
    lease.entry.SetInParent()
    return before.SerializeToString() + lease.SerializeToString() + after.SerializeToString()


KEEP = (1, 5), (2, 999)


def fast_reply(message):
    """The reply to the kernel for a message of the shard; None: it does not describe a new file."""
    try:
        reply = meta_messages.CreateReply.FromString(message)
    except DecodeError:
        return None
    if not creates.is_new_file(reply):
        return None
    return reply_encoder.created(77, reply.entry.attr, *KEEP[0], *KEEP[1], 0x1234567890, 5)


def test_reply_is_the_one_made_from_protobuf():
    chance = random.Random(2)
    for _ in range(2000):
        reply = some_reply(chance)
        reply.entry.lease_ms = reply.entry.lease_ms or 1
        expected = replies.created(77, reply.entry.attr, *KEEP, 0x1234567890, 5)
        assert fast_reply(reply.SerializeToString()) == fast_reply(fast_path_form(reply)) == expected


def test_incomplete_replies_are_left_to_the_slow_path():
    reply = some_reply(random.Random(3))

    def left(change):
        other = CreateReply()
        other.CopyFrom(reply)
        change(other)
        assert fast_reply(other.SerializeToString()) is None

    left(lambda it: setattr(it, "created", False))
    left(lambda it: it.ClearField("parent"))
    left(lambda it: it.ClearField("entry"))
    left(lambda it: it.entry.ClearField("attr"))
    left(lambda it: it.entry.ClearField("grant"))
    left(lambda it: setattr(it.entry, "grant", it.entry.grant[:-1]))
    left(lambda it: setattr(it.entry, "grant", b"\2" + it.entry.grant[1:]))
    left(lambda it: setattr(it.entry, "elsewhere", True))
    left(lambda it: setattr(it.entry.attr, "mode", 0o040755))
    left(lambda it: setattr(it.entry.attr, "size", 1))
    left(lambda it: setattr(it.entry.attr, "inode", 0))
    left(lambda it: setattr(it.parent, "inode", 0))
    whole = reply.SerializeToString()
    assert (
        fast_reply(b"") is None and fast_reply(whole[:-3]) is None and fast_reply(whole + b"\x22\1") is None
    )
    assert fast_reply(CreateReply(entry={"attr": {"inode": 1, "change": 1}}).SerializeToString()) is None


def test_unusual_replies_are_read_like_protobuf():
    """With unknown fields, parts that come twice, times before 1970, in a volume."""
    reply = some_reply(random.Random(3))
    reply.entry.lease_ms = 30_000
    whole = reply.SerializeToString()
    expected = fast_reply(whole)
    for message in (whole + whole, whole + b"\x20\1", whole + b"\x22\0", whole + b"\x0a\2\x78\1"):
        assert (
            fast_reply(message) == expected == replies.created(77, reply.entry.attr, *KEEP, 0x1234567890, 5)
        )
    reply.entry.attr.mtime_ns, reply.entry.attr.volume, reply.parent.volume = -1, 5, 5
    expected = replies.created(77, reply.entry.attr, *KEEP, 0x1234567890, 5)
    assert fast_reply(reply.SerializeToString()) == expected


def test_arbitrary_bytes_are_parsed_as_protobuf_does():
    chance = random.Random(4)
    read = 0
    for turn in range(20_000):
        message = bytearray(
            fast_path_form(some_reply(chance)) if turn % 2 else some_reply(chance).SerializeToString()
        )
        if turn % 3 == 0:
            del message[chance.randrange(len(message)) :]
        for _ in range(turn % 4 if message else 0):
            message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
        found = fast_reply(bytes(message))
        if found is None:
            continue
        read += 1
        reply = CreateReply.FromString(bytes(message))
        assert found == replies.created(77, reply.entry.attr, *KEEP, 0x1234567890, 5)
        assert (
            reply.created
            and reply.HasField("parent")
            and len(reply.entry.grant) == 60
            and not reply.entry.elsewhere
        )
        assert reply.parent.inode
    assert read > 1000


# -- equivalence of both paths ---------------------------------------------------------------------------------------------


async def create_in_all_ways(kernel, clock):
    """Create files in all ways; the message, reply and state of each."""
    seen = []

    async def make(name, flags, **more):
        try:
            made = await kernel.create_file(name, flags, **more)
        except OSError as error:
            made = error.errno
        if kernel.vfs.parts.tasks.running:  # the directory's names are listed concurrently
            await asyncio.wait(set(kernel.vfs.parts.tasks.running))
        seen.append((name, kernel.client_state()))
        clock.now_s += 0.25
        return made

    first = await make(b"new", NEW)
    await make(b"read", os.O_RDONLY | os.O_CREAT | os.O_EXCL)
    await make(
        b"append", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, uid=1000, gid=70000, pid=os.getpid()
    )
    await make(b"read and append", os.O_RDONLY | os.O_CREAT | os.O_APPEND)
    await make(b"cut", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode=0o106755, uid=5)
    await make(b"append only", NEW | os.O_APPEND)
    await make(b"x" * 255, os.O_RDWR | os.O_CREAT)
    await make(b"new", NEW)
    await make(b"new", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    await make(b"new", os.O_RDWR | os.O_CREAT)
    await make(b"new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for name in (b".", b"..", b"a/b", b"x" * 256):
        await make(name, NEW)
    await make(b"no access", os.O_CREAT | 3)
    await make(b"nowhere", NEW, node=first.nodeid)
    directory = replies.read(
        "entry", await kernel.request(Op.MKDIR, (0o755, 0o22), names=(b"directory",))
    ).nodeid
    for number in range(9):  # a complete directory
        await make(b"%d" % number, NEW, node=directory)
    for number in range(40):  # and the other one becomes complete
        await make(b"one of many %d" % number, NEW)
    await kernel.close_file(first.fh)
    again = await make(b"behind a close", NEW)
    seen.append(again.fh)
    await kernel.request(Op.UNLINK, names=(b"new",))
    await make(b"new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    return seen


def without_session(messages):
    """These messages, independent of the number of their session."""
    requests = [CreateRequest.FromString(message) for message in messages]
    assert len({request.change.session for request in requests}) == 1
    for request, message in zip(requests, messages, strict=True):
        assert request.SerializeToString() == message
        request.change.session = 1
    return requests


@pytest.mark.parametrize("writeback", [False, True], ids=["write-through", "write-back"])
def test_messages_replies_and_state_agree_on_both_paths(writeback):
    found, began_s = {}, SYSTEM_CLOCK.boottime_s()  # deadlines also apply to a connection

    async def seen(way):
        clock = ManualClock(7, began_s)
        async with mounted(
            way,
            clock=clock,
            options=OPTIONS._replace(cached_entries=24, deadline_s=300.0),
            writeback=writeback,
        ) as kernel:
            kinds = await create_in_all_ways(kernel, clock)
            found[way] = kinds, without_session(kernel.proxy.heard), kernel.answers, kernel.compiled_creates

    for way in ("ordinary", "compiled"):
        run_whole(seen(way), 300)
    (kinds, heard, answers, _), (kinds_fast, heard_fast, answers_fast, made) = (
        found["ordinary"],
        found["compiled"],
    )
    assert made > 50
    assert heard_fast == heard
    assert answers_fast == answers
    for one, other in zip(kinds, kinds_fast, strict=True):
        if isinstance(one, tuple):
            assert other[0] == one[0]
            for book in one[1]:
                assert other[1][book] == one[1][book], (one[0], book)
        else:
            assert one == other


@pytest.mark.parametrize("shard_fast_path", (False, True), ids=("shard-slow-path", "shard-fast-path"))
@pytest.mark.parametrize("way", WAYS)
def test_created_files_exist_for_all(way, shard_fast_path):
    async def many(kernel):
        asked = {}
        for turn in range(12):
            for number in range(16):
                name = b"%d-%d" % (turn, number)
                asked[kernel.send_create(name, uid=number, gid=turn)] = name
            while asked:
                unique, error, answer = await kernel.receive()
                assert not error
                made, name = replies.read("create", answer), asked.pop(unique)
                assert (made.mode, made.nlink, made.size, b"%d-%d" % (made.gid, made.uid)) == (
                    0o100644,
                    1,
                    0,
                    name,
                )
                assert kernel.ops.files.by_handle[made.fh].inode == made.nodeid
        assert len(kernel.state.open) == 12 * 16
        for number in list(kernel.ops.files.by_handle):
            await kernel.close_file(number)
        other = await kernel.host.writer()
        for turn, number in ((0, 0), (11, 15), (5, 7)):
            attr = await other.lookup(1, b"%d-%d" % (turn, number))
            assert (attr.uid, attr.gid, attr.mode) == (number, turn, 0o100644)
        assert kernel.host.kept.slots(kernel.state.record) == [] and kernel.host.kept.handles.valid() == []
        assert len(kernel.state.slots) == kernel.state.slot_count and not kernel.vfs.cache.open

    on_a_mount(many, OPTIONS, SYSTEM_CLOCK, shard_fast_path)(way)


@on_both_paths
async def test_request_slot_is_held_until_the_reply(kernel):
    slots = len(kernel.state.slots)
    unique, call = await kernel.pending_create(b"f")
    change = CreateRequest.FromString(bytes(call.message)).change
    assert kernel.host.kept.slots(kernel.state.record) == [
        (change.slot, change.sequence, META_CREATE, unique)
    ]
    assert len(kernel.state.slots) == slots - 1 and list(kernel.engine.requests.work) == [unique]
    assert not kernel.ops.files.by_handle and not kernel.host.kept.handles.valid()
    other = await kernel.create_file(b"g")  # meanwhile
    kernel.proxy.service.handle(call)
    heard, error, answer = await kernel.receive()
    made = replies.read("create", answer)
    assert (heard, error) == (unique, 0) and set(kernel.ops.files.by_handle) == {made.fh, other.fh}
    assert kernel.host.kept.slots(kernel.state.record) == [] and len(kernel.state.slots) == slots
    assert [(record[1], record[-2]) for record in kernel.host.kept.handles.valid()] in (
        [(other.nodeid, unique + 2), (made.nodeid, unique)],
        [(made.nodeid, unique), (other.nodeid, unique + 2)],
    )


@pytest.mark.parametrize("fails", [False, True], ids=["fast-path", "slow-path"])
@pytest.mark.parametrize("way", WAYS)
def test_writeback_create_is_readable_and_has_no_append(way, fails):
    """The kernel handles O_APPEND then. `fails`: the reply does not fit the fast path."""

    async def write_back(kernel):
        unique, call = await kernel.pending_create(b"f", NEW | os.O_APPEND, uid=7)
        if fails:
            call = ChangedCall(call, lambda message: message + b"\x78\x01")  # an unknown field
        kernel.proxy.service.handle(call)
        heard, error, answer = await kernel.receive()
        assert (heard, error) == (unique, 0)
        made = replies.read("create", answer)
        assert made.open_flags == Opening.KEEP_CACHE
        file = kernel.ops.files.by_handle[made.fh]
        assert file.readable and file.writable and not file.append and not kernel.ops.files.appending
        assert [record[2] for record in kernel.host.kept.handles.valid()] == [
            os.O_RDWR | os.O_CREAT | os.O_EXCL
        ]
        # written back in an order of the kernel
        for offset, content in ((4096, b"b" * 10), (0, b"a" * 5000)):
            await kernel.request(
                Op.WRITE, (made.fh, offset, len(content), 0, 0, 0), node=made.nodeid, payload=content
            )
        assert await kernel.request(Op.READ, (made.fh, 4090, 4096, 0, 0, 0), node=made.nodeid) == b"a" * 910
        await kernel.close_file(made.fh)
        await kernel.create_file(b"g")

    on_a_mount(write_back, OPTIONS, SYSTEM_CLOCK, False, True)(way)


# -- other replies --------------------------------------------------------------------------------------------------------


def changed_reply(change):
    def edit(message):
        reply = CreateReply.FromString(message)
        change(reply)
        return reply.SerializeToString()

    return edit


ODD = {
    "not created": changed_reply(lambda reply: setattr(reply, "created", False)),
    "without the directory": changed_reply(lambda reply: reply.ClearField("parent")),
    "without a lease": changed_reply(lambda reply: reply.entry.ClearField("lease_ms")),
    "in a volume": changed_reply(lambda reply: setattr(reply.entry.attr, "volume", 1)),
    "of a newer version": lambda message: message + b"\xc2\x3e\3abc",
    "the directory is older": changed_reply(lambda reply: setattr(reply.parent, "change", 1)),
    "the right is none to read": changed_reply(
        lambda reply: setattr(reply.entry, "grant", reply.entry.grant[:1] + b"\2" + reply.entry.grant[2:])
    ),
    "cut off": lambda message: message[:-3],
    "nothing": lambda message: b"",
    "no message": lambda message: b"\xff" * 20,
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_replies_have_the_same_outcome_on_both_paths(odd):
    found, began_s = {}, SYSTEM_CLOCK.boottime_s()  # deadlines also apply to a connection

    async def seen(way):
        clock = ManualClock(7, began_s)
        async with mounted(way, clock=clock, options=OPTIONS._replace(deadline_s=300.0)) as kernel:
            kernel.expects_some = False
            calls = []

            def instead(call):
                kernel.proxy.instead = None
                calls.append(bytes(call.message))
                kernel.proxy.service.handle(ChangedCall(call, ODD[odd]))

            kernel.proxy.instead = instead
            with contextlib.suppress(OSError):
                await kernel.create_file(b"odd", os.O_RDWR | os.O_CREAT)
            seen = kernel.client_state()
            await kernel.create_file(b"after")
            found[way] = kernel.answers, seen, kernel.client_state(), without_session(kernel.proxy.heard)

    for way in ("ordinary", "compiled"):
        run_whole(seen(way), 120)
    for one, other in zip(found["ordinary"], found["compiled"], strict=True):
        assert one == other


@pytest.mark.few(6)  # all on the compiled path
@pytest.mark.parametrize(
    "error",
    [
        errors.AlreadyExists,
        errors.NotADirectory,
        errors.AccessDenied,
        errors.NoSpace,
        errors.DirectoryGone,
        errors.QuotaExceeded,
    ],
)
@pytest.mark.parametrize("way", WAYS[::-1])
def test_refused_create_is_an_error_and_frees_its_slot(way, error):
    @on_a_mount
    async def refused(kernel):
        slots = len(kernel.state.slots)
        unique, call = await kernel.pending_create(b"f")
        call.fail(error())
        heard, code, _ = await kernel.receive()
        assert (heard, code) == (unique, -error.errno), "also in a removed directory: no such name"
        assert kernel.host.kept.slots(kernel.state.record) == [] and len(kernel.state.slots) == slots
        await kernel.create_file(b"f")

    refused(way)


TEMPORARY = [
    (error, sent) for sent in (True, False) for error in (errors.StaleEpoch, errors.Busy, errors.Draining)
]
# these mean that the request was not carried out
TEMPORARY += [(errors.StaleSession, False), (errors.WrongShard, False)]


@pytest.mark.few(len(TEMPORARY))  # all on the compiled path
@pytest.mark.parametrize(
    ("error", "sent"), TEMPORARY, ids=lambda of: of.__name__ if isinstance(of, type) else f"sent-{of}"
)
@pytest.mark.parametrize("way", WAYS[::-1])
def test_temporary_refusal_is_retried_and_carried_out_once(way, error, sent):
    @on_a_mount
    async def refused(kernel):
        unique, call = await kernel.pending_create(b"f")
        if sent:
            await carry_out(kernel, call)
        call.fail(error())
        heard, code, answer = await kernel.receive()
        assert (heard, code) == (unique, 0)
        made = replies.read("create", answer)
        assert kernel.state.open[made.nodeid] == 1 and kernel.host.kept.slots(kernel.state.record) == []
        messages = [CreateRequest.FromString(message) for message in kernel.proxy.heard[-2:]]
        assert [message.name for message in messages] == [b"f", b"f"]
        if error is not errors.StaleSession and error is not errors.WrongShard:
            assert messages[0].change == messages[1].change, "with the same request id"
        await kernel.create_file(b"g")
        await kernel.close_file(made.fh)

    refused(way)


@on_both_paths
async def test_creates_survive_lost_connections(kernel):
    calls = []
    kernel.proxy.instead = calls.append
    asked = {kernel.send_create(b"%d" % number): b"%d" % number for number in range(20)}
    kernel.engine.take_requests()
    async with asyncio.timeout(60):
        while len(calls) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    kernel.proxy.instead = None
    for call in calls[::2]:  # carried out, and the reply is lost
        await carry_out(kernel, call)
    kernel.state.met.frames.transport.abort()
    inodes = set()
    while asked:
        unique, error, answer = await kernel.receive()
        assert not error and asked.pop(unique)
        inodes.add(replies.read("create", answer).nodeid)
    assert len(inodes) == 20 and all(kernel.state.open[inode] == 1 for inode in inodes)
    assert (
        kernel.host.kept.slots(kernel.state.record) == []
        and len(kernel.state.slots) == kernel.state.slot_count
    )
    await kernel.create_file(b"after")
    await kernel.create_file(b"after that")


@pytest.mark.parametrize("way", WAYS)
def test_silent_shard_is_an_error_at_the_deadline(way):
    async def silent(kernel):
        kernel.expects_some = False
        kernel.proxy.instead = lambda call: None
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(OSError) as refused:
            await kernel.create_file(b"f")
        took_s = asyncio.get_running_loop().time() - began_s
        assert refused.value.errno == errors.DeadlineExceeded.errno and 1.5 < took_s < 5.5
        assert kernel.host.kept.slots(kernel.state.record) == []
        kernel.proxy.instead = None
        await kernel.create_file(b"f")

    on_a_mount(silent, OPTIONS._replace(deadline_s=2.0))(way)


@on_both_paths
async def test_interrupted_create_ignores_its_late_reply(kernel):
    slots = sorted(slot for slot, _ in kernel.state.slots)
    unique, call = await kernel.pending_create(b"f", pid=NO_PROCESS)
    kernel.send(Op.INTERRUPT, (unique,))
    assert (await kernel.receive())[:2] == (unique, -errno.EINTR)
    assert not kernel.engine.requests.work and kernel.host.kept.slots(kernel.state.record) == []
    assert sorted(slot for slot, _ in kernel.state.slots) == slots
    kernel.proxy.service.handle(call)
    await asyncio.sleep(0.02)
    await until(lambda: not kernel.ops.files.by_handle and not kernel.vfs.cache.open)
    for number in range(2 * len(slots)):
        await kernel.close_file((await kernel.create_file(b"%d" % number)).fh)
    await kernel.expect_no_reply()


@on_both_paths
async def test_create_without_a_free_handle_is_an_error(kernel):
    unique, call = await kernel.pending_create(b"f")
    table = kernel.host.kept.handles
    free, used = list(table.freed), table.used
    table.freed.clear()
    table.used = HANDLES_MAX
    kernel.proxy.service.handle(call)
    assert (await kernel.receive())[:2] == (unique, -errors.TooManyOpen.errno)
    table.freed.extend(free)
    table.used = used
    assert (
        not kernel.ops.files.by_handle
        and not kernel.vfs.cache.open
        and kernel.host.kept.slots(kernel.state.record) == []
    )
    await kernel.create_file(b"g")


@on_both_paths
async def test_reply_of_an_ended_session_frees_no_slot(kernel):
    unique, call = await kernel.pending_create(b"f")
    kernel.state.generation += 1
    slots = list(kernel.state.slots)
    kernel.proxy.service.handle(call)
    heard, error, answer = await kernel.receive()
    assert (heard, error) == (unique, 0) and list(kernel.state.slots) == slots
    assert kernel.ops.files.by_handle[replies.read("create", answer).fh].inode in kernel.vfs.cache.open
    await kernel.create_file(b"g")


@on_both_paths
async def test_file_opened_meanwhile_has_one_open_inode(kernel):
    unique, call = await kernel.pending_create(b"f", os.O_RDWR | os.O_CREAT)
    said = await carry_out(kernel, call)
    inode = CreateReply.FromString(said).entry.attr.inode
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
    call.reply(said)
    heard, error, answer = await kernel.receive()
    made = replies.read("create", answer)
    assert (heard, error, made.nodeid) == (unique, 0, inode) and kernel.vfs.cache.open[inode].handles == 2
    assert kernel.ops.files.by_handle[made.fh].file is kernel.ops.files.by_handle[opened.fh].file
    await kernel.create_file(b"g")


@on_fast_path
async def test_create_that_would_wait_is_left_to_the_slow_path(kernel):
    state, meta, engine = kernel.state, kernel.vfs.meta, kernel.engine
    fast_path = engine.fast_paths.creates.creates
    request = requests.encode(
        FuseRequest(Op.CREATE, 900, 1, 0, 0, 0, FORMS[Op.CREATE].body(NEW, 0o100644, 0o22, 0), (b"f",), b"")
    )

    def begins(raw=request):
        engine.requests.buffer[: len(raw)] = raw
        return fast_path.begin(len(raw))

    def left(raw=request):
        before, noted = dict(meta.counters), kernel.host.kept.slots(state.record)
        slots, entries, renamed = (
            list(state.slots),
            dict(kernel.vfs.cache.entries),
            dict(kernel.vfs.cache.renamed_s),
        )
        assert not begins(raw)
        assert (
            meta.counters == before
            and kernel.host.kept.slots(state.record) == noted
            and not engine.requests.work
        )
        assert (
            list(state.slots) == slots
            and kernel.vfs.cache.entries == entries
            and kernel.vfs.cache.renamed_s == renamed
        )

    def other(**more):
        fields = {"flags": NEW, "mode": 0o100644, "name": b"f", "unique": 900, "node": 1, **more}
        return requests.encode(
            FuseRequest(
                Op.CREATE,
                fields["unique"],
                fields["node"],
                0,
                0,
                0,
                FORMS[Op.CREATE].body(fields["flags"], fields["mode"], 0o22, 0),
                (fields["name"],),
                b"",
            )
        )

    for raw in (
        other(name=b"."),
        other(name=b".."),
        other(name=b"a/b"),
        other(name=b"x" * 256),
        other(flags=os.O_CREAT | 3),
        other(unique=1 << 63 | 900),
        request[:-1],
        request + b"x",
        request[:56],
        request[:-2] + b"\0\0",
    ):
        left(raw)
    for place, value in (
        (state, ("session", 0)),
        (state, ("met", None)),
        (meta, ("closed", True)),
        (state, ("waiting", [1])),
        (state.met, ("closed", True)),
        (state.met, ("writable", False)),
        (state.met, ("upgraded", True)),
        (engine.requests, ("forwarded", {1: 1})),
        (engine.requests, ("leaving", True)),
    ):
        name, wrong = value
        right = getattr(place, name)
        setattr(place, name, wrong)
        left()
        setattr(place, name, right)
    slots = list(state.slots)
    state.slots.clear()
    left()
    state.slots.extend(slots)
    meta.once.held[900] = None
    left()
    del meta.once.held[900]
    table = kernel.host.kept.handles
    free, used = list(table.freed), table.used
    table.freed.clear()
    table.used = HANDLES_MAX - 4096
    left()
    table.used = used
    table.freed.extend(free)
    assert begins()
    fast_path.send()
    assert (await kernel.receive())[:2] == (900, 0)


@on_both_paths
async def test_bug_in_the_client_state_is_reported(kernel):
    reported, slots = [], len(kernel.state.slots)
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )
    directories = kernel.vfs.complete_dirs
    made_in, directories.made_in = directories.made_in, lambda *_: 1 // 0
    unique = kernel.send_create(b"f")
    assert (await kernel.receive())[:2] == (unique, 0)
    directories.made_in = made_in
    async with asyncio.timeout(60):
        while not reported:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert [type(error) for error in reported] == [ZeroDivisionError]
    assert (
        len(kernel.state.slots) == slots
        and kernel.host.kept.slots(kernel.state.record) == []
        and not kernel.engine.requests.work
    )
    asyncio.get_running_loop().set_exception_handler(None)
    kernel.vfs.cache.open.clear()
    await kernel.create_file(b"g")


@on_fast_path
async def test_files_of_a_shard_with_standbys_are_created(kernel):
    view, made = kernel.vfs.meta.view, kernel.compiled_creates
    shards = (replace(view.map.shards[0], standbys=(StandbyMember(1, 1, (), "up"),)),)
    assert view.offer(replace(view.map, epoch=view.map.epoch + 1, shards=shards))
    await kernel.create_file(b"f")
    assert kernel.compiled_creates == made + 1
    unique, call = await kernel.pending_create(b"g")
    call.fail(errors.Unavailable("the shard changes its primary", may_be_applied=True))
    assert (await kernel.receive())[:2] == (unique, 0), "sent again under the same name"
    assert kernel.compiled_creates == made + 1 and not kernel.vfs.meta.once.held


@on_fast_path
async def test_bug_before_the_reply_fails_one_request(kernel):
    handles = kernel.ops.handles
    unique, call = await kernel.pending_create(b"f")
    other, later = await kernel.pending_create(b"g")
    last, handles.last = handles.last, None
    kernel.proxy.service.handle(call)
    assert (await kernel.receive())[:2] == (unique, -errno.EIO)
    handles.last = last
    kernel.proxy.service.handle(later)
    assert (await kernel.receive())[:2] == (other, 0)
    assert len(kernel.state.slots) == kernel.state.slot_count and not kernel.host.kept.slots(
        kernel.state.record
    )


@on_fast_path
async def test_mount_stops_after_a_bug_in_a_last_reply(kernel):
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    kernel.expects_some = False
    unique, call = await kernel.pending_create(b"f")
    kernel.engine.requests.stopped = True
    kernel.vfs.complete_dirs.made_in = lambda *_: 1 // 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_fast_path, "compiled", None)
        kernel.proxy.service.handle(call)
        assert (await kernel.receive())[:2] == (unique, 0)
    async with asyncio.timeout(60):
        await asyncio.shield(kernel.engine.ended)


@on_both_paths
async def test_replies_arrive_in_pieces(kernel):
    chance = random.Random(4)
    for most in (40, 700, 3000):
        reader, connection = kernel.state.met.frames.reader, kernel.state.met
        connection.get_buffer = lambda hint, most=most, reader=reader: reader.get_buffer(hint)[
            : chance.randrange(1, most)
        ]
        connection.frames.transport.set_protocol(connection)
        asked = {}
        for number in range(40):
            name = b"%d-%d" % (most, number) + b"x" * chance.randrange(240)
            asked[kernel.send_create(name)] = 0
            if number % 4 == 1:
                asked[kernel.send_create(name)] = -errno.EEXIST
            elif number % 4 == 2:
                asked[kernel.send(Op.UNLINK, names=(b"no" + name,))] = -errno.ENOENT
        while asked:
            unique, error, _ = await kernel.receive()
            assert error == asked.pop(unique)
        assert len(kernel.state.slots) == kernel.state.slot_count and not kernel.engine.requests.work


@on_both_paths
async def test_many_creates_pass_a_small_socket_buffer(kernel):
    kernel.state.met.frames.transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 1
    )
    for turn in range(3):
        asked = {kernel.send_create(b"%d-%03d" % (turn, number) + b"x" * 240): number for number in range(60)}
        kernel.engine.take_requests()
        while asked:
            unique, error, _ = await kernel.receive()
            assert not error
            del asked[unique]
    names = [CreateRequest.FromString(message).name[:5] for message in kernel.proxy.heard[-180:]]
    assert sorted(names) == [b"%d-%03d" % (turn, number) for turn in range(3) for number in range(60)]
