"""Opens of listed files on the fast path: file, handle, shared state and the state after the close are as on the slow path."""

import asyncio
import errno
import os
import random
import time
from contextlib import asynccontextmanager

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import FileHandle, ReadAheadState
from nvpool.core import grants
from nvpool.fuse.fast_path.cached_replies import CachedReplies
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import Op
from nvpool.fuse.protocol.requests import FORMS, FuseRequest
from nvpool.rpc.messages.direntries import pack_entry
from nvpool.rpc.v1.meta_pb2 import Attr
from nvpool.shm.mount_records import HANDLES_MAX
from nvpool.shm.mount_state import KeptMemory
from tests.fuse.test_cached_replies import CAPABILITY, Both, reply_count, state_of, theirs
from tests.unit.client.data.test_short_circuit import ME, QUICK, Host, run_whole

ENDS_MS = int(time.time() * 1000) + 3_600_000


class StatefulHost(Host):
    """Its client keeps the state that survives its process."""

    async def __aenter__(self):
        await super().__aenter__()
        self.descriptor = KeptMemory.make(1 << 24)
        self.kept = KeptMemory(self.descriptor)
        self.client = await Client.open(self.pool.pool_map, "keeper", QUICK, kept=self.kept)
        self.pool.clients.append(self.client)
        self.vfs = self.client.vfs
        return self

    async def __aexit__(self, *failure):
        os.close(self.descriptor)
        await super().__aexit__(*failure)


@asynccontextmanager
async def mounted(kept):
    async with (StatefulHost if kept else Host)() as host, Both(host) as kernel:
        yield kernel


def on_a_mount(test):
    def run(kept):
        async def all_of_it():
            async with mounted(kept) as kernel:
                await test(kernel, random.Random(31))

        run_whole(all_of_it(), 300)

    run.__name__ = test.__name__
    return pytest.mark.parametrize("kept", (False, True), ids=("stateless", "stateful"))(run)


NOT_COMPARED = ("file", "ahead", "number", "attr_born_s", "grant_half_ms")


def slots_of(thing):
    """The attributes of an object, with types, except other objects and times."""
    found = {name: getattr(thing, name) for name in type(thing).__slots__ if name not in NOT_COMPARED}
    if "attr" in found:
        found["attr"] = found["attr"].SerializeToString()
    found["ahead"] = slots_of(thing.ahead) if type(thing) is FileHandle else getattr(thing, "ahead", None)
    return {name: (type(value), value) for name, value in found.items()}


def listed(rng, inode, *, mode=0o100000, cut=0, punches=0):
    """Attributes of a regular file as a listing reports them, of any size."""
    word = lambda bits: rng.choice((0, 1, rng.getrandbits(bits), (1 << bits) - 1))  # noqa: E731
    return Attr(
        inode=inode,
        mode=mode | rng.getrandbits(12),
        links=1 + word(31),
        uid=word(32),
        gid=word(32),
        size=word(40),
        blocks=word(64),
        atime_ns=word(63) - word(62),
        mtime_ns=word(63),
        ctime_ns=-word(62),
        change=word(64),
        cut=cut,
        rdev=word(32),
        table=word(16),
        chunk_bits=rng.randrange(12, 63),
        flags=word(8) & ~32,
        parent=word(64),
        punches=punches,
    )


def list_with(kernel, inode, attr, rights=grants.READ, cut=0):
    """Listed with these attributes and that right."""
    grant = grants.sign(grants.Grant(rights, 7, 1 << 63 | 5, inode, cut, ENDS_MS), b"secret")
    leases = kernel.vfs.leases.by_inode
    leases[inode] = leases[inode].replaced(kernel.vfs.clock.boottime_s() + 1000, grant)
    leases[inode].watch.until_s = kernel.vfs.clock.boottime_s() + 1000
    kernel.vfs.cache.attrs[inode] = pack_entry(5, attr, True, b""), kernel.vfs.clock.boottime_s()


def stored_handles(kernel):
    """The open files that the next process would find, except their numbers."""
    memory = kernel.ops.kept
    return None if memory is None else [record[1:-2] for record in memory.handles.valid()]


@on_a_mount
async def test_listed_files_open_and_close_as_on_the_slow_path(kernel, rng):
    inode = await theirs(kernel, b"f", b"x")
    step, meta = kernel.engine.fast_paths.cached_replies.replies, kernel.vfs.meta
    meta.report_opens_soon = lambda state: asyncio.sleep(600)  # the time of the report is arbitrary
    for turn in range(60):
        cut = rng.choice((0, 3, 1 << 40))
        attr = listed(rng, inode, cut=cut, punches=rng.choice((0, cut // 3, cut)))
        rights = rng.choice(
            (grants.READ, grants.READ | grants.WRITE, grants.WRITE, grants.READ | grants.ENCRYPTED)
        )
        found, later = [], rng.choice((0, 2))
        for way in (None, step):
            list_with(kernel, inode, attr, rights, cut + later)
            kernel.ops.cached_pages.seen.pop(inode, None)
            kernel.engine.fast_paths.cached_replies.replies = way
            before = reply_count(step)
            opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
            assert (reply_count(step) > before) == (way is not None)
            handle = kernel.ops.files.by_handle[opened.fh]
            assert (
                type(handle) is FileHandle
                and type(handle.file) is OpenInode
                and type(handle.ahead) is ReadAheadState
            )
            assert handle.number == opened.fh and kernel.vfs.cache.open[inode] is handle.file
            if kernel.ops.kept is not None:
                assert kernel.ops.kept.handles.valid()[-1][-1] == opened.fh
            books = [
                opened.open_flags,
                slots_of(handle),
                slots_of(handle.file),
                state_of(kernel, inode),
                stored_handles(kernel),
            ]
            now_ms = time.time() * 1000
            assert abs(handle.file.grant_half_ms - now_ms - (ENDS_MS - now_ms) / 2) < 60_000
            assert abs(handle.file.attr_born_s - kernel.vfs.clock.boottime_s()) < 60
            for part in (handle.file.lanes, handle.file.located, handle.file.ahead, handle.ahead.units):
                assert not part and type(part)() is not part
            await kernel.request(Op.RELEASE, (opened.fh, 0, 0, 0), node=inode)
            kept_attr = kernel.vfs.cache.attrs[inode][0]
            assert kept_attr.SerializeToString() == attr.SerializeToString() and handle.closed
            found.append((*books, state_of(kernel, inode), stored_handles(kernel)))
        assert found[0] == found[1], turn


@on_a_mount
async def test_open_files_share_nothing(kernel, rng):
    one, other = await theirs(kernel, b"f", b"x"), await theirs(kernel, b"g", b"y")
    files = []
    for inode in (one, other):
        list_with(kernel, inode, listed(rng, inode))
        files.append(
            kernel.ops.files.by_handle[
                replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode)).fh
            ]
        )
    assert (
        sum(kernel.engine.fast_paths.cached_replies.replies.all_taken.get(int(op), 0) for op in (Op.OPEN,))
        == 2
    )
    for name in ("lanes", "located", "ahead"):
        assert getattr(files[0].file, name) is not getattr(files[1].file, name)
    assert files[0].ahead is not files[1].ahead and files[0].ahead.units is not files[1].ahead.units


@on_a_mount
async def test_files_without_a_read_grant_are_left(kernel, rng):
    inode = await theirs(kernel, b"f", b"x")
    nameless = listed(rng, inode)
    nameless.links = 0
    plain = listed(rng, inode)
    for attr, grant in (
        (listed(rng, inode, mode=0o040000), None),
        (listed(rng, inode, mode=0o120000), None),
        (nameless, None),
        (listed(rng, inode, cut=4), None),
        (plain, b""),
        (plain, b"x" * 59),
        (plain, b"x" * grants.GRANT_BYTES),
    ):
        list_with(kernel, inode, attr, cut=3)
        if grant is not None:
            leases = kernel.vfs.leases.by_inode
            leases[inode] = leases[inode].replaced(leases[inode].until_s, grant)
        before = state_of(kernel, inode), dict(kernel.vfs.cache.attrs), stored_handles(kernel)
        assert kernel.on_fast_path(Op.OPEN, (os.O_RDONLY, 0), inode, ()) is None
        assert kernel.ops.open_now(inode, os.O_RDONLY, ME) is None
        assert (
            state_of(kernel, inode),
            dict(kernel.vfs.cache.attrs),
            stored_handles(kernel),
        ) == before and not kernel.vfs.cache.open


@on_a_mount
async def test_last_close_forgets_a_locked_last_page(kernel, rng):
    """An inode whose last page could not be dropped in time is closed by its handler."""
    inode = await theirs(kernel, b"f", b"x")
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode)).fh
    kernel.ops.bypass.locked[inode] = 1, 1
    await kernel.request(Op.RELEASE, (opened, 0, 0, 0), node=inode)
    assert not kernel.ops.bypass.locked and not kernel.vfs.cache.open


def test_open_without_a_free_record_leaves_nothing():
    async def all_of_it():
        async with mounted(True) as kernel:
            inode = await theirs(kernel, b"f", b"x")
            list_with(kernel, inode, listed(random.Random(1), inode))
            table = kernel.ops.kept.handles
            free, used = list(table.freed), table.used
            table.freed.clear()
            table.used = HANDLES_MAX
            error, _ = await kernel.once(Op.OPEN, (os.O_RDONLY, 0), node=inode)
            assert error < 0 and not kernel.ops.files.by_handle and not kernel.vfs.cache.open
            assert not kernel.vfs.meta.shard_session(inode).open.get(inode)
            table.freed.extend(free)
            table.used = used
            opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
            assert [record[-1] for record in table.valid()] == [opened.fh]
            await kernel.request(Op.RELEASE, (opened.fh, 0, 0, 0), node=inode)
            assert table.valid() == []

    run_whole(all_of_it(), 300)


@on_a_mount
async def test_malformed_requests_are_refused_on_both_paths(kernel, rng):
    """Every request of the fast path: truncated anywhere, with a wrong length, with an invalid name."""
    inode = await theirs(kernel, b"f", b"x")
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode)).fh
    mine, handle = await kernel.create_in(1, b"own")
    paths = kernel.engine.fast_paths
    steps = paths.cached_replies.replies, paths.creates.creates
    assert steps[0] is not None and (steps[1] is not None) == (kernel.ops.kept is not None)

    async def said(raw):
        kernel.ours.send(raw)
        return await kernel.receive()

    for opcode, body, node, names, payload in (
        (Op.LOOKUP, (), 1, (b"f",), b""),
        (Op.GETATTR, (0, 0, 0), inode, (), b""),
        (Op.OPEN, (os.O_RDONLY, 0), inode, (), b""),
        (Op.GETXATTR, (100, 0), inode, (CAPABILITY,), b""),
        (Op.READ, (opened, 0, 10, 0, 0, 0), inode, (), b""),
        (Op.FLUSH, (opened, 0, 0, 7), inode, (), b""),
        (Op.RELEASE, (1 << 60, 0, 0, 7), inode, (), b""),
        (Op.CREATE, (os.O_RDWR | os.O_CREAT, 0o100640, 0o22, 0), 1, (b"new",), b""),
        (Op.WRITE, (handle, 0, 4, 0, 0, 0), mine, (), b"abcd"),
    ):
        form = FORMS[opcode]
        count = form.body and len(form.body._fields)
        whole = form.body(*(*body, 0, 0)[:count]) if form.body else None
        raw = requests.encode(FuseRequest(opcode, 777, node, 0, 0, 0, whole, names, payload))
        broken = [
            length.to_bytes(4, "little") + raw[4:length] for length in range(requests.HEADER_BYTES, len(raw))
        ]
        broken += [(len(raw) + more).to_bytes(4, "little") + raw[4:] for more in (-1, 1, 1 << 20)]
        broken += [raw.replace(name, bytes(len(name))) for name in names]
        for one in broken:
            paths.cached_replies.replies, paths.creates.creates = steps
            compiled = await said(one)
            paths.cached_replies.replies = paths.creates.creates = None
            assert compiled[:2] == (await said(one))[:2] == (777, -errno.EINVAL), (opcode, one)
        paths.cached_replies.replies, paths.creates.creates = steps
    assert (await kernel.attributes(inode))[0] == 0
    assert await kernel.request(Op.WRITE, (handle, 0, 4, 0, 0, 0), node=mine, payload=b"abcd")


@on_a_mount
async def test_opens_of_squashed_root_need_a_message(kernel, rng):
    """Also for cached attributes, and for a file that a permitted user has open here."""
    inode = await theirs(kernel, b"f", b"x")
    step, meta = kernel.engine.fast_paths.cached_replies.replies, kernel.vfs.meta
    asked, change = [], meta.change

    async def counted(*words, uid=0, **more):
        asked.append(uid)
        return await change(*words, uid=uid, **more)

    meta.change = counted
    for squashes, uid, count in ((False, 0, 0), (True, 1000, 0), (True, 0, 1)):
        kernel.vfs.parts.squashes_root = squashes
        compiled = CachedReplies(
            kernel.engine.fast_paths.cached_replies,
            kernel.ops,
            kernel.vfs,
            False,
            kernel.engine.fast_paths.takers(),
        )
        for way in (None, compiled):
            kernel.engine.fast_paths.cached_replies.replies = way
            asked.clear()
            first = replies.read(
                "open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode, uid=1000)
            )
            before = len(asked)
            opened = replies.read(
                "open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode, uid=uid)
            )
            assert asked[before:] == [uid] * count, (squashes, uid, way)
            for handle in (first, opened):
                await kernel.request(Op.RELEASE, (handle.fh, 0, 0, 0), node=inode)
    kernel.engine.fast_paths.cached_replies.replies = step
