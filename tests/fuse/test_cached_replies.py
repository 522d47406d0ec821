"""Requests of a mount that need no message: the compiled fast path gives the same bytes and state as the slow path."""

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import struct
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.dirty_file import DirtyFile
from nvpool.client.state.leases import NEVER_S, InodeLease, ShardWatch
from nvpool.client.state.metadata_cache import CompleteDirectory, OpenInode, typed_attr
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core import errors
from nvpool.fuse.ops.metadata import ASK
from nvpool.fuse.ops.operations import FuseOps, FuseOptions
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import Op, Opening, Valid
from nvpool.fuse.protocol.requests import FORMS, FuseRequest
from nvpool.rpc.messages.direntries import pack_entry
from nvpool.rpc.messages.meta_messages import Attr
from tests.fuse.read_kernel import Reading
from tests.unit.client.data.test_short_circuit import ME, Host, run_whole

CAPABILITY = b"security.capability"
NEW = (os.O_WRONLY | os.O_CREAT, 0o100640, 0o22, 0)


def reply_count(step):
    return sum(step.all_taken.values())


class Both(Reading):
    """Each request is handled by the fast path and by its handler."""

    @property
    def ops(self):
        return self.engine.ops

    async def once(self, opcode, body, **more):
        self.send(opcode, body, **more)
        _, error, answer = await self.receive()
        return error, answer

    def client_state(self):
        ops = self.ops
        return (
            dict(ops.cached_names.sent_changes),
            [one for named in ops.cached_names.groups for one in named.names],
            dict(ops.cached_pages.seen),
        )

    async def both(self, opcode, body=(), *, here=True, **more):
        """(error, reply) of the request, which is `here` if the fast path handles it."""
        step, (notified, named, _) = self.engine.fast_paths.cached_replies.replies, self.client_state()
        before = reply_count(step)
        compiled = await self.once(opcode, body, **more)
        assert (reply_count(step) > before) == here
        compiled_notified, compiled_named, compiled_seen = self.client_state()
        self.ops.cached_names.sent_changes.clear()
        self.ops.cached_names.sent_changes.update(notified)
        self.engine.fast_paths.cached_replies.replies = None
        ordinary = await self.once(opcode, body, **more)
        self.engine.fast_paths.cached_replies.replies = step
        ordinary_notified, ordinary_named, ordinary_seen = self.client_state()
        assert compiled == ordinary
        assert (compiled_notified, compiled_seen) == (ordinary_notified, ordinary_seen)
        count = len(compiled_named)
        assert ordinary_named[count:] == compiled_named[len(named) :]
        return compiled

    async def attributes(self, node, *, here=True):
        return await self.both(Op.GETATTR, (0, 0), node=node, here=here)

    async def name(self, parent, name, *, here=True):
        return await self.both(Op.LOOKUP, (), node=parent, names=(name,), here=here)

    async def create_in(self, parent, name, flags=os.O_RDWR):
        answer = replies.read(
            "create",
            await self.request(
                Op.CREATE, (flags | os.O_CREAT, 0o100640, 0o22, 0), node=parent, names=(name,)
            ),
        )
        return answer.nodeid, answer.fh

    async def created_by(self, parent, count, makers):
        """[(inode, handle)] of that many new files, created by each of these threads in turn."""
        made = []
        for number in range(count):
            answer = replies.read(
                "create",
                await self.request(
                    Op.CREATE,
                    NEW,
                    node=parent,
                    names=(b"by turns %d" % number,),
                    pid=makers[number % len(makers)],
                ),
            )
            made.append((answer.nodeid, answer.fh))
        return made

    async def answers(self, count):
        """The next replies: {unique: reply}, in the order of their arrival."""
        found = {}
        for _ in range(count):
            unique, error, answer = await self.receive()
            assert not error and unique not in found
            found[unique] = answer
        return found

    async def close(self, inode, handle):
        await self.request(Op.FLUSH, (handle, 0, 0), node=inode)
        await self.request(Op.RELEASE, (handle, 0, 0, 0), node=inode)

    def _put(self, opcode, body, node, names):
        form = FORMS[opcode]
        raw = requests.encode(
            FuseRequest(opcode, 77, node, 0, 0, 0, form.body(*body) if form.body else None, names, b"")
        )
        self.engine.requests.view[: len(raw)] = raw
        return len(raw)

    def _answer(self):
        while True:
            unique, error, answer = replies.parse(self.ours.recv(1 << 20))
            if unique == 77:
                return error, bytes(answer)

    def on_fast_path(self, opcode, body, node, names):
        """The reply of the fast path now; None if it declines."""
        known = self.engine.fast_paths.cached_replies.replies
        return self._answer() if known.take(self._put(opcode, body, node, names)) else None

    def on_slow_path(self, opcode, body, node, names):
        """The reply of the handler, if it needs no message; else None."""
        if opcode == Op.LOOKUP:
            found = self.ops.lookup_now(node, names[0])
            if found is ASK:
                return None
            self.engine.replies.entry(77, found)
        else:
            found = self.ops.getattr_now(node)
            if found is None:
                return None
            self.engine.replies.attributes(77, found)
        return self._answer()


@asynccontextmanager
async def mounted(options=None, root=None):
    host = Host()
    async with host:
        if root is not None:
            top = (await host.vfs.mkdir(1, root, 0o755, ME)).inode
        async with Both(host) as kernel:
            if options is not None or root is not None:
                ops = (
                    FuseOps(host.vfs, options, root=top)
                    if root is not None
                    else type(kernel.ops)(host.vfs, options)
                )
                engine = type(kernel.engine)(ops, None, kernel.engine.options)
                engine.adopt(kernel.theirs.fileno())
                kernel.engine.stop()
                await kernel.serving
                kernel.engine = engine
                await kernel.__aenter__()
            await kernel.init()
            yield kernel


def on_a_mount(*arguments):
    def decorated(test):
        def run():
            async def all_of_it():
                async with mounted(*arguments) as kernel:
                    await test(kernel)

            run_whole(all_of_it(), 300)

        run.__name__ = test.__name__
        return run

    return decorated


async def directory(kernel, name=b"d"):
    """Created here, and leased by its shard, which grants leases to listening clients only."""
    there = replies.read("entry", await kernel.request(Op.MKDIR, (0o755, 0), names=(name,))).nodeid
    async with asyncio.timeout(60):
        while kernel.vfs.leases.held(there) is None:
            kernel.vfs.cache.forget_attr(there)
            await kernel.vfs.getattr(there)
            await asyncio.sleep(0.01)
    return there


@on_a_mount()
async def test_attributes_and_names_of_new_files_are_known(kernel):
    there = await directory(kernel)
    await kernel.attributes(there)
    for number in range(20):
        name = b"file %d" % number
        assert await kernel.name(there, name) == (-errno.ENOENT, b"")
        inode, handle = await kernel.create_in(there, name)
        await kernel.attributes(there)
        await kernel.attributes(inode)
        assert replies.read("entry", (await kernel.name(there, name))[1]).nodeid == inode
        await kernel.both(Op.FLUSH, (handle, 0, 0), node=inode)
        await kernel.request(Op.RELEASE, (handle, 0, 0, 0), node=inode)
        await kernel.attributes(inode)


@on_a_mount()
async def test_close_is_delayed_for_alternating_threads(kernel):
    there = await directory(kernel)
    for turn in range(3):
        ((inode, handle),) = (await kernel.created_by(there, 2, (11, 12)))[1:]
        close = kernel.send(Op.FLUSH, (handle, 0, 0), node=inode, pid=12)
        look = kernel.send(Op.GETATTR, (0, 0), node=there, pid=11)
        find = kernel.send(Op.LOOKUP, node=there, names=(b"by turns 0",), pid=11)
        make = kernel.send(Op.CREATE, NEW, node=there, names=(b"next %d" % turn,), pid=11)
        answers = await kernel.answers(4)
        assert list(answers) == [look, find, close, make] and answers[close] == b""
        for number in range(2):
            await kernel.request(Op.UNLINK, node=there, names=(b"by turns %d" % number,))


@on_a_mount()
async def test_close_is_immediate_for_a_single_thread(kernel):
    there = await directory(kernel)
    for inode, handle in await kernel.created_by(there, 3, (11,)):
        close = kernel.send(Op.FLUSH, (handle, 0, 0), node=inode, pid=11)
        look = kernel.send(Op.GETATTR, (0, 0), node=there, pid=11)
        assert list(await kernel.answers(2)) == [close, look]


@on_a_mount()
async def test_each_close_is_replied_once(kernel):
    there = await directory(kernel)
    made = await kernel.created_by(there, 40, (11, 12, 13))
    spent = kernel.engine.requests.spent
    before = sum(spent.times[Op.FLUSH].counts) if spent.times[Op.FLUSH] else 0
    closes = [kernel.send(Op.FLUSH, (handle, 0, 0), node=inode, pid=11) for inode, handle in made]
    look = kernel.send(Op.GETATTR, (0, 0), node=there)
    order = list(await kernel.answers(len(closes) + 1))
    put_off = order[order.index(look) + 1 :]
    assert sorted(order) == sorted([*closes, look]) and put_off == closes[:16]  # no more of them are delayed
    again = [
        kernel.send(Op.FLUSH, (handle, 0, 0), node=inode, pid=11) for inode, handle in made
    ]  # each create delays one close
    look = kernel.send(Op.GETATTR, (0, 0), node=there)
    assert list(await kernel.answers(len(again) + 1)) == [*again, look]
    assert sum(spent.times[Op.FLUSH].counts) == before + 80


@on_a_mount()
async def test_close_without_a_successor_is_replied(kernel):
    there = await directory(kernel)
    for inode, handle in await kernel.created_by(there, 6, (11, 12)):
        assert await kernel.request(Op.FLUSH, (handle, 0, 0), node=inode, pid=11) == b""


@on_a_mount()
async def test_file_under_write_is_left_to_the_slow_path(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    assert await kernel.both(Op.GETXATTR, (0,), node=inode, names=(CAPABILITY,)) == (-errno.ENODATA, b"")
    await kernel.request(Op.WRITE, (handle, 0, 9000, 0, 0, 0), node=inode, payload=bytes(9000))
    error, answer = await kernel.once(Op.GETATTR, (0, 0), node=inode)
    assert not error and replies.read("attr", answer).size == 9000
    await kernel.request(Op.FLUSH, (handle, 0, 0), node=inode)
    await kernel.both(Op.FLUSH, (handle, 0, 0), node=inode, here=False)
    assert replies.read("attr", (await kernel.attributes(inode))[1]).size == 9000
    await kernel.request(Op.RELEASE, (handle, 0, 0, 0), node=inode)


@on_a_mount()
async def test_listed_attributes_are_served_without_decoding(kernel):
    writer = await kernel.host.writer()
    there = (await writer.mkdir(1, b"theirs", 0o755, ME)).inode
    made = {}
    for number in range(40):
        _, handle = await writer.create(there, b"%d" % number, 0o600, os.O_RDWR, Caller(1000 + number, 7))
        made[b"%d" % number] = handle.inode
        await writer.release(handle)
    await kernel.once(Op.LOOKUP, (), names=(b"theirs",))
    opened = await kernel.request(Op.OPENDIR, (0, 0), node=there)
    await kernel.request(Op.READDIR, (int.from_bytes(opened[:8], "little"), 0, 65536, 0, 0, 0), node=there)
    kept = kernel.vfs.cache.attrs
    assert all(type(kept[inode][0]) is bytes for inode in made.values())
    for name, inode in made.items():
        step = kernel.engine.fast_paths.cached_replies.replies
        compiled = await kernel.once(Op.LOOKUP, (), node=there, names=(name,))
        assert reply_count(step) and type(kept[inode][0]) is bytes
        assert (await kernel.name(there, name)) == compiled
        await kernel.attributes(inode)
    assert all(type(kept[inode][0]) is bytes for inode in made.values())


@on_a_mount()
async def test_odd_names_are_left_to_the_slow_path(kernel):
    there = await directory(kernel)
    await kernel.name(there, b"x" * 255)
    assert await kernel.name(there, b"x" * 256, here=False) == (-errno.ENAMETOOLONG, b"")
    assert await kernel.name(there, b"...") == (-errno.ENOENT, b"")
    for name in (b".", b".."):
        assert (await kernel.name(there, name, here=False))[0] == 0
    for body in (b"", b"a", b"a\0b\0", b"\0"):
        kernel.ours.send(
            struct.pack("=IIQQIIIHH", 40 + len(body), Op.LOOKUP, 99, there, 0, 0, 0, 0, 0) + body
        )
        assert (await kernel.receive())[1] == -errno.EINVAL


@on_a_mount()
async def test_uncached_attributes_are_fetched(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    await kernel.close(inode, handle)
    cache, leases = kernel.vfs.cache, kernel.vfs.leases
    await kernel.attributes(inode)
    for one in (inode, there):
        cache.forget_attr(one)
    before = reply_count(kernel.engine.fast_paths.cached_replies.replies)
    assert (await kernel.once(Op.GETATTR, (0, 0), node=inode))[0] == 0
    assert (await kernel.once(Op.LOOKUP, (), node=there, names=(b"none",)))[0] == -errno.ENOENT
    assert (await kernel.once(Op.LOOKUP, (), node=there, names=(b"f",)))[0] == 0
    assert reply_count(kernel.engine.fast_paths.cached_replies.replies) == before
    assert leases.held(inode) and leases.held(there)
    await kernel.attributes(inode)
    await kernel.name(there, b"f")
    for watch in {lease.watch for lease in leases.by_inode.values()}:  # the shard is silent from now on
        watch.until_s = 0.0
    cache.distrust()
    before = reply_count(kernel.engine.fast_paths.cached_replies.replies)
    assert (await kernel.once(Op.GETATTR, (0, 0), node=inode))[0] == 0
    assert reply_count(kernel.engine.fast_paths.cached_replies.replies) == before


async def theirs(kernel, name, content):
    """A file of another client that was looked up with the right to read it."""
    vfs = await kernel.host.writer()
    handle = await kernel.host.file(content, vfs, name)
    await vfs.release(handle)
    inode = replies.read("entry", await kernel.request(Op.LOOKUP, names=(name,))).nodeid
    async with asyncio.timeout(60):
        while (lease := kernel.vfs.leases.held(inode)) is None or not lease.grant:
            kernel.vfs.cache.forget_attr(inode)
            kernel.vfs.cache.entries.clear()
            await kernel.vfs.lookup(1, name)
            await asyncio.sleep(0.01)
    return inode


def state_of(kernel, inode):
    """State of an inode, open or not, except for numbers and times."""
    vfs, ops = kernel.vfs, kernel.ops
    file = vfs.cache.open.get(inode)
    shard = vfs.meta.shard_session(inode)
    lease = vfs.leases.by_inode.get(inode)
    opened = (
        None
        if file is None
        else (file.handles, file.opened, file.unreported, file.grant, file.grant_rights, file.attr.change)
    )
    return (
        opened,
        inode in vfs.cache.attrs,
        shard.open.get(inode),
        shard.unreported.get(inode),
        lease and lease.grant,
        inode in ops.cached_pages.paged,
        ops.cached_pages.seen.get(inode),
        ops.cached_names.sent_changes.get(inode),
        len(ops.files.by_handle),
        dict(ops.published.barred),
    )


@on_a_mount()
async def test_open_read_close_leaves_the_same_state(kernel):
    content = os.urandom(3000)
    inode = await theirs(kernel, b"f", content)
    step = kernel.engine.fast_paths.cached_replies.replies
    left = {}
    for turn in range(6):
        for way in (None, step):
            kernel.engine.fast_paths.cached_replies.replies = way
            before = reply_count(step)
            opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
            assert (reply_count(step) > before) == (way is not None)
            again = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
            both = state_of(kernel, inode)
            assert await kernel.read(opened.fh, 0, 4096) == content
            kernel.engine.fast_paths.cached_replies.replies = way
            await kernel.request(Op.RELEASE, (opened.fh, 0, 0, 0), node=inode)
            one = state_of(kernel, inode)
            await kernel.request(Op.RELEASE, (again.fh, 0, 0, 0), node=inode)
            left.setdefault(turn, []).append(
                (opened.open_flags, again.open_flags, both, one, state_of(kernel, inode))
            )
            kernel.engine.fast_paths.cached_replies.replies = step
    for ordinary, compiled in list(left.values())[1:]:  # in the first turn the kernel has no pages yet
        assert ordinary == compiled


@on_a_mount()
async def test_open_that_needs_a_message_is_left(kernel):
    inode = await theirs(kernel, b"f", b"x")
    step = kernel.engine.fast_paths.cached_replies.replies
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDONLY | os.O_TRUNC):
        before = reply_count(step)
        opened = replies.read("open", await kernel.request(Op.OPEN, (flags, 0), node=inode))
        assert reply_count(step) == before
        await kernel.close(inode, opened.fh)
    kernel.vfs.leases.forget(inode)
    before = reply_count(step)
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
    assert reply_count(step) == before
    await kernel.close(inode, opened.fh)
    assert not kernel.ops.files.by_handle and not kernel.vfs.cache.open


@on_a_mount()
async def test_dirty_file_is_released_on_the_slow_path(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    await kernel.request(Op.WRITE, (handle, 0, 5000, 0, 0, 0), node=inode, payload=bytes(range(250)) * 20)
    assert (
        await kernel.request(Op.RELEASE, (handle, 0, 0, 0), node=inode) == b""
    )  # closed without a FLUSH, as by a mapping
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
    assert await kernel.read(opened.fh, 0, 5000) == bytes(range(250)) * 20


@on_a_mount()
async def test_close_with_locks_is_immediate(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    await kernel.request(Op.SETLK, (handle, 7, 0, 100, fcntl.F_WRLCK, 1, 0), node=inode)
    await kernel.both(Op.FLUSH, (handle, 8, 0), node=inode, here=False)
    taken = kernel.engine.fast_paths.cached_replies.replies.take
    assert not taken(0) and kernel.vfs.is_locked(inode)
    await kernel.request(Op.RELEASE, (handle, 0, 0, 0), node=inode)
    assert not kernel.vfs.is_locked(inode)


@on_a_mount(FuseOptions(negative_timeout_s=0.5))
async def test_negative_entry_is_recorded_on_the_slow_path(kernel):
    there = await directory(kernel)
    error, answer = await kernel.name(there, b"none", here=False)
    assert not error and replies.read("entry", answer).entry_valid_nsec == 500_000_000
    assert (there, b"none") in kernel.ops.absent_names


@on_a_mount(FuseOptions(attr_timeout_s=2.5, entry_timeout_s=0.0))
async def test_cache_timeouts_are_reported(kernel):
    there = await directory(kernel)
    await kernel.once(Op.LOOKUP, (), names=(b"d",))
    entry = replies.read("entry", (await kernel.name(1, b"d"))[1])
    assert (entry.nodeid, entry.entry_valid, entry.attr_valid, entry.attr_valid_nsec) == (
        there,
        0,
        2,
        500_000_000,
    )


@on_a_mount(None, b"top")
async def test_subtree_root_is_looked_up_on_the_slow_path(kernel):
    there = await directory(kernel)
    await kernel.attributes(there)
    await kernel.attributes(1, here=False)
    await kernel.name(1, b"d", here=False)
    assert await kernel.name(there, b"none") == (-errno.ENOENT, b"")


@on_a_mount()
async def test_times_before_1970_and_large_numbers(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    await kernel.close(inode, handle)
    attr = typed_attr(kernel.vfs.cache.attrs[inode][0])
    chance = random.Random(5)
    for change in range(1, 200):
        for field, least, most in (
            ("size", 0, 1 << 63),
            ("blocks", 0, 1 << 63),
            ("atime_ns", -1 << 62, 1 << 62),
            ("mtime_ns", -3 * 10**9, 3 * 10**9),
            ("ctime_ns", -(10**9), 10**9),
            ("mode", 0, 1 << 16),
            ("links", 1, 1 << 32),
            ("uid", 0, 1 << 32),
            ("gid", 0, 1 << 32),
            ("rdev", 0, 1 << 32),
        ):
            setattr(attr, field, chance.choice([least, most - 1, chance.randrange(least, most)]))
        attr.change = change + 1 << 20
        other = Attr.FromString(attr.SerializeToString())
        kernel.vfs.cache.attrs[inode] = other, kernel.vfs.clock.boottime_s()
        await kernel.attributes(inode)


@on_a_mount()
async def test_forgotten_inode_is_forgotten(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    await kernel.close(inode, handle)
    await kernel.attributes(inode)
    assert inode in kernel.ops.cached_names.sent_changes and inode in kernel.ops.cached_pages.seen
    kernel.send(Op.FORGET, (1,), node=inode)
    await kernel.expect_no_reply()
    assert inode not in kernel.ops.cached_names.sent_changes and inode not in kernel.ops.cached_pages.seen


@on_a_mount()
async def test_resent_request_is_left_to_its_handler(kernel):
    there = await directory(kernel)
    before = reply_count(kernel.engine.fast_paths.cached_replies.replies)
    kernel.send(Op.GETATTR, (0, 0), node=there, unique=1 << 63 | 12)
    assert (await kernel.receive())[0] == 1 << 63 | 12
    assert reply_count(kernel.engine.fast_paths.cached_replies.replies) == before


@on_a_mount()
async def test_durations_are_counted_by_operation(kernel):
    there = await directory(kernel)
    await kernel.once(Op.GETATTR, (0, 0), node=there)
    times = kernel.engine.requests.spent.times[Op.GETATTR]
    counted, spent = sum(times.counts), times.sum_s
    for _ in range(50):
        await kernel.once(Op.GETATTR, (0, 0), node=there)
    assert sum(times.counts) == counted + 50 and times.sum_s > spent


@on_a_mount()
async def test_oldest_possible_time_is_reported(kernel):
    there = await directory(kernel)
    inode, handle = await kernel.create_in(there, b"f")
    await kernel.close(inode, handle)
    await kernel.request(
        Op.SETATTR, (int(Valid.MTIME), 0, 0, 0, 0, -9223372037, 0, 0, 500_000_000, 0, 0, 0, 0), node=inode
    )
    await kernel.attributes(inode)


def on_both_paths(test):
    """Run the test with and without the fast path."""

    @pytest.mark.parametrize("way", ("ordinary", "compiled"))
    def run(way):
        async def all_of_it():
            async with mounted() as kernel:
                if way == "ordinary":
                    kernel.engine.fast_paths.cached_replies.replies = None
                await test(kernel)

        run_whole(all_of_it(), 60)

    run.__name__ = test.__name__
    return run


@contextlib.contextmanager
def no_numbers(kernel):
    """No handle numbers are left for open files."""

    def take(*_, **__):
        raise errors.TooManyOpen("as many as there may be")

    kernel.ops.handles.take = take
    yield
    del kernel.ops.handles.take


@on_both_paths
async def test_open_without_a_free_handle_leaves_nothing(kernel):
    inode = await theirs(kernel, b"f", b"x")
    for flags in (os.O_RDONLY, os.O_RDWR):
        with no_numbers(kernel):
            assert (await kernel.once(Op.OPEN, (flags, 0), node=inode))[0] == -errno.ENFILE
        async with asyncio.timeout(60):
            while kernel.vfs.cache.open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not kernel.ops.files.by_handle
    await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode)


@on_both_paths
async def test_failed_open_keeps_no_pages(kernel):
    inode = await theirs(kernel, b"f", b"x")
    kernel.ops.cached_pages.seen[inode] = (
        kernel.vfs.cache.newer(inode, 0).change - 1,
        True,
    )  # the kernel's pages are older
    with no_numbers(kernel):
        assert (await kernel.once(Op.OPEN, (os.O_RDONLY, 0), node=inode))[0] == -errno.ENFILE
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
    assert not opened.open_flags & Opening.KEEP_CACHE


@on_both_paths
async def test_locks_survive_a_failed_open(kernel):
    inode = await theirs(kernel, b"f", b"x")
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
    await kernel.request(Op.SETLK, (opened.fh, 7, 0, 100, fcntl.F_RDLCK, 1, 0), node=inode)
    async with asyncio.timeout(60):
        while kernel.vfs.leases.held(inode) is None:
            kernel.vfs.cache.forget_attr(inode)
            await kernel.vfs.getattr(inode)
            await asyncio.sleep(0.01)
    with no_numbers(kernel):
        assert (await kernel.once(Op.OPEN, (os.O_RDONLY, 0), node=inode))[0] == -errno.ENFILE
    async with asyncio.timeout(60):
        while kernel.vfs.cache.open[inode].handles > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert kernel.vfs.is_locked(inode)


@on_both_paths
async def test_bug_in_a_release_does_not_lose_later_ones(kernel):
    inode = await theirs(kernel, b"f", b"x" * 100)
    handles = [
        replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode)).fh for _ in range(3)
    ]
    give_back = kernel.ops.handles.give_back

    def broken(number):
        if number == handles[0]:
            raise RuntimeError("a bug")
        give_back(number)

    kernel.ops.handles.give_back = broken
    for handle in handles:
        kernel.send(Op.RELEASE, (handle, 0, 0, 0), node=inode)
    assert [(await kernel.receive())[1] for _ in handles] == [-errno.EIO, 0, 0]
    await kernel.expect_no_reply()


@on_both_paths
async def test_reads_from_memory_are_counted(kernel):
    handle = await kernel.open_theirs()
    await kernel.host.located(kernel.handle(handle), 2)
    await kernel.read(handle, 8192, 4096)
    await kernel.expect_no_reply()
    times = kernel.engine.requests.spent.times[Op.READ]
    before = sum(times.counts)
    for number in range(40):
        await kernel.read(handle, number % 2 * 8192, 4096)
    await kernel.expect_no_reply()
    assert sum(times.counts) == before + 40


@on_a_mount()
async def test_random_states_agree_with_the_slow_path(kernel):
    """Random states of the cache, consistent or not, with each request on both paths where it stands."""
    there = await directory(kernel)
    names = [b"a", b"b", b"x" * 255, b"x" * 256, b"...", b"..a"]
    vfs, chance, said = kernel.vfs, random.Random(1), Counter()
    cache, leases, watch = vfs.cache, vfs.leases, vfs.meta.shard_session(there).watch
    directories, inodes = [there, there + 1000], [there + 2000 + number for number in range(4)]
    other, until_s = ShardWatch(), watch.until_s
    tables = (cache.attrs, cache.entries, cache.complete_dirs, cache.open, leases.by_inode, watch.ended)
    for _ in range(1500):
        now_s = vfs.clock.boottime_s()
        for table in tables:
            table.clear()
        watch.floor_s = chance.choice([NEVER_S, now_s - 10, now_s + 10])
        watch.until_s = chance.choice([now_s + 100, now_s + 100, now_s - 1])
        other.until_s = chance.choice([now_s + 100, now_s - 1, NEVER_S])
        cache.trusted_from_s = chance.choice([NEVER_S, NEVER_S, now_s - 5, now_s + 5, now_s])
        for inode in directories + inodes:
            if chance.random() < 0.6:
                leases.by_inode[inode] = InodeLease(
                    now_s + chance.choice([-1, 100, 100]),
                    now_s + chance.choice([-20, -1]),
                    b"",
                    chance.choice([watch, watch, other]),
                    chance.choice([1, 2]),
                )
            if chance.random() < 0.3:
                watch.ended[inode] = now_s + chance.choice([-30, -3, 3])
            if chance.random() < 0.9:
                attr = Attr(
                    inode=inode,
                    mode=0o100644,
                    links=chance.choice([0, 1]),
                    size=chance.choice([0, 5000]),
                    change=chance.choice([1, 7]),
                    mtime_ns=chance.choice([-1, 1, 10**18]),
                    chunk_bits=20,
                )
                born_s = now_s + chance.choice([-1000, -0.02, 0, NEVER_S])
                if chance.random() < 0.3:
                    file = cache.open[inode] = OpenInode(attr)
                    file.attr_born_s, file.handles = born_s, 1
                    if chance.random() < 0.4:
                        file.written = DirtyFile(file)
                        file.written.wrote = chance.random() < 0.4
                else:
                    cache.attrs[inode] = (
                        (pack_entry(0, attr, True, b"") if chance.random() < 0.5 else attr),
                        born_s,
                    )
        for one in directories:
            if chance.random() < 0.5:
                cache.complete_dirs[one] = CompleteDirectory(
                    chance.choice([1, 7]), chance.choice([None, None, set()])
                )
                cache.complete_dirs[one].names = {name for name in names if chance.random() < 0.3}
            for name in names:
                if chance.random() < 0.6:
                    cache.entries[one, name] = (
                        chance.choice([0, *inodes]),
                        now_s + chance.choice([-1000, -0.02, 0]),
                        now_s + chance.choice([-15, -0.5, 0]),
                        chance.choice(
                            [None, InodeLease(0, 0, b"", watch, 1), InodeLease(0, 0, b"", watch, 2)]
                        ),
                    )
        for name in names:
            for request in (
                (Op.LOOKUP, (), chance.choice(directories), (name,)),
                (Op.GETATTR, (0, 0), chance.choice(directories + inodes), ()),
            ):
                for _ in range(3):  # an entry may expire between the two
                    kernel.ops.cached_names.sent_changes.clear()
                    compiled = kernel.on_fast_path(*request), dict(kernel.ops.cached_names.sent_changes)
                    kernel.ops.cached_names.sent_changes.clear()
                    plain = kernel.on_slow_path(*request), dict(kernel.ops.cached_names.sent_changes)
                    if compiled == plain:
                        break
                assert compiled == plain
                said[None if compiled[0] is None else compiled[0][0]] += 1
    assert min(said[answer] for answer in (None, 0, -errno.ENOENT)) > 200
    for table in tables:
        table.clear()
    watch.floor_s, watch.until_s, cache.trusted_from_s = NEVER_S, until_s, NEVER_S


def test_client_without_leases_trusts_its_cache_briefly():
    async def all_of_it():
        host = Host()
        async with host:
            client = await host.pool.client(
                "unlent", ClientOptions(leases=False, short_circuit=False, fresh_s=3600.0)
            )
            host.vfs = client.vfs
            async with Both(host) as kernel:
                await kernel.init()
                inode, handle = await kernel.create_in(1, b"f")
                await kernel.close(inode, handle)
                await kernel.attributes(inode)
                await kernel.once(Op.LOOKUP, (), names=(b"f",))
                await kernel.name(1, b"f")
                client.vfs.cache.distrust()
                before = reply_count(kernel.engine.fast_paths.cached_replies.replies)
                for _ in range(2):
                    assert (await kernel.once(Op.GETATTR, (0, 0), node=inode))[0] == 0
                assert reply_count(kernel.engine.fast_paths.cached_replies.replies) == before + 1

    run_whole(all_of_it(), 120)
