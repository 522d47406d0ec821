"""FuseOps, the layer between engine and Vfs, without a kernel."""

import asyncio
import errno
import os
import stat

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core import errors
from nvpool.core.clock import ManualClock
from nvpool.core.units import MIB
from nvpool.fuse.ops.listing import AHEAD_MAX, LIST_BATCH, SEEK_BATCH
from nvpool.fuse.ops.operations import BY_INODE, FuseOps, FuseOptions, errno_of
from nvpool.shm.mount_state import KeptMemory
from nvpool.testing.fakes.in_process_pool import run
from nvpool.testing.fakes.vfs import MemoryVfs

ME = Caller(0, 0)
ROOT = 1


class CountingVfs(MemoryVfs):
    """Counts the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if not name.startswith("_") and callable(found):
            self.calls[name] = self.calls.get(name, 0) + 1
        return found


class Driven:
    """FuseOps over memory; each request runs to its end."""

    def __init__(self, options=None):
        self.vfs = CountingVfs()
        self.clock = ManualClock()
        self.ops = FuseOps(self.vfs, options, clock=self.clock)

    def __getattr__(self, name):
        method = getattr(self.ops, name)

        def call(*arguments, **fields):
            async def run():
                answer = method(*arguments, **fields)
                return await answer if asyncio.iscoroutine(answer) else answer

            return asyncio.run(run())

        return call

    def listed(self, handle, cursor=0, room=1 << 30):
        found = []

        def add(name, attr, behind):
            if len(found) == room:
                return False
            found.append((name, behind))
            return True

        self.readdir(handle, cursor, add)
        return found


@pytest.fixture
def fs():
    return Driven()


@pytest.mark.parametrize("kind", errors.every_error(), ids=lambda kind: kind.__name__)
def test_errors_have_an_errno_that_the_kernel_accepts(kind):
    number = errno_of(kind(), "read")
    assert number == (errno.ESTALE if kind is errors.DirectoryGone else kind.errno)
    assert 0 < number < 512 and number in errno.errorcode


def test_missing_is_stale_by_inode_and_enoent_by_name():
    assert errno_of(errors.NotFound(), "getattr") == errno.ESTALE
    assert errno_of(errors.NotFound(), "unlink") == errno.ENOENT
    assert all(hasattr(FuseOps(MemoryVfs()), name) for name in BY_INODE)


def test_unknown_error_is_eio_with_a_traceback(caplog):
    assert errno_of(ZeroDivisionError(), "read") == errno.EIO
    assert errno_of(MemoryError(), "read") == errno.ENOMEM
    assert "unexpected ZeroDivisionError" in caplog.text


def test_missing_name_is_none(fs):
    assert fs.lookup(ROOT, b"missing") is None
    with pytest.raises(errors.NameTooLong):
        fs.lookup(ROOT, b"x" * 256)


def test_dot_and_dot_dot_are_found(fs):
    inside = fs.mkdir(ROOT, b"d", 0o755, ME)
    assert fs.lookup(inside.inode, b".").inode == inside.inode
    assert fs.lookup(inside.inode, b"..").inode == ROOT


def test_pages_are_kept_while_nothing_changes(fs):
    attr, opened = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    assert not opened.keep_cache
    assert fs.open(attr.inode, os.O_RDONLY, ME).keep_cache
    fs.write(opened.handle, 0, b"new")
    assert not fs.open(attr.inode, os.O_RDONLY, ME).keep_cache
    assert fs.open(attr.inode, os.O_RDONLY, ME).keep_cache
    fs.forget([(attr.inode, 4)])
    assert not fs.open(attr.inode, os.O_RDONLY, ME).keep_cache


def test_changed_attributes_are_invalidated_at_open(fs):
    invalidated = []
    fs.ops.notices.connect(invalidate_attributes=invalidated.append)
    attr, opened = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    fs.open(attr.inode, os.O_RDONLY, ME)
    assert invalidated == []
    asyncio.run(fs.vfs.setattr(attr.inode, size=10, caller=ME))  # another node
    fs.open(attr.inode, os.O_RDONLY, ME)
    assert invalidated == [attr.inode]
    fs.getattr(attr.inode)
    fs.open(attr.inode, os.O_RDONLY, ME)
    assert invalidated == [attr.inode]


def test_unlinked_file_can_be_opened_only_while_open(fs):
    attr, opened = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    fs.unlink(ROOT, b"f", ME)
    again = fs.open(attr.inode, os.O_RDONLY, ME)
    held = asyncio.run(fs.vfs.open(attr.inode, os.O_RDONLY, ME))  # by another node
    fs.release(opened.handle)
    fs.release(again.handle)
    with pytest.raises(errors.NotFound):
        fs.open(attr.inode, os.O_RDONLY, ME)
    asyncio.run(fs.vfs.release(held))
    assert attr.inode not in fs.vfs.nodes


def test_appending_handles_bypass_the_page_cache(fs):
    attr, _ = fs.create(ROOT, b"f", 0o644, os.O_WRONLY, ME)
    assert fs.open(attr.inode, os.O_WRONLY | os.O_APPEND, ME).direct_io
    assert fs.open(attr.inode, os.O_RDWR | os.O_APPEND, ME).direct_io
    assert not fs.open(attr.inode, os.O_RDONLY | os.O_APPEND, ME).direct_io
    assert not fs.open(attr.inode, os.O_WRONLY, ME).direct_io


class Pages:
    """Records the calls of the engine that invalidate or fill pages."""

    def __init__(self, fs):
        self.calls = []
        for name in ("drop", "store", "forget"):
            fs.ops.notices.connect(**{name: self.recorder(name)})

    def recorder(self, name):
        async def record(*what):
            self.calls.append((name, *what))

        return record

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


def test_direct_write_drops_pages_where_another_reads_them(fs):
    attr, direct = fs.create(ROOT, b"f", 0o644, os.O_RDWR | os.O_DIRECT, ME)
    pages, flags = Pages(fs), os.O_RDWR | os.O_DIRECT
    assert fs.write(direct.handle, 0, b"x" * 4096, flags=flags) == 4096
    assert not fs.has_pages(direct.handle) and not pages.taken()
    other = fs.open(attr.inode, os.O_RDONLY, ME)
    assert fs.has_pages(direct.handle)
    fs.write(direct.handle, 4096, b"y" * 4096, flags=flags)
    assert pages.taken() == [("drop", attr.inode, 4096, 4096)]
    fs.write(direct.handle, 0, b"z", flags=os.O_RDWR)  # after an F_SETFL that cleared the flag
    assert not pages.taken()
    fs.release(other.handle)
    assert not fs.has_pages(direct.handle)


def test_direct_writes_beside_direct_descriptors_cost_no_notice(fs):
    """The kernel does not report a descriptor that reads through pages after all; the semantics page says so."""
    attr, direct = fs.create(ROOT, b"f", 0o644, os.O_RDWR | os.O_DIRECT, ME)
    pages, flags = Pages(fs), os.O_RDWR | os.O_DIRECT
    second = fs.open(attr.inode, flags, ME)
    for handle in (direct.handle, second.handle):
        fs.write(handle, 0, b"x" * 4096, flags=flags)
        assert not fs.has_pages(handle) and not pages.taken()
    plain = fs.open(attr.inode, os.O_RDONLY, ME)  # now the pages are dropped, for all that read them
    fs.write(second.handle, 0, b"y" * 4096, flags=flags)
    assert pages.taken() == [("drop", attr.inode, 0, 4096)]
    fs.release(plain.handle)
    fs.release(second.handle)
    assert not fs.has_pages(direct.handle)


def test_flags_of_a_write_decide_its_offset(fs):
    attr, opened = fs.create(ROOT, b"f", 0o644, os.O_RDWR | os.O_APPEND, ME)
    reader = fs.open(attr.inode, os.O_RDONLY, ME)
    pages = Pages(fs)
    fs.write(opened.handle, 0, b"0123456789", flags=os.O_RDWR | os.O_APPEND)
    fs.write(opened.handle, 2, b"AB", flags=os.O_RDWR)
    fs.write(opened.handle, 0, b"end")
    assert fs.read(reader.handle, 0, 100) == b"01AB456789end"
    assert pages.taken() == [
        ("drop", attr.inode, 0, 10),
        ("drop", attr.inode, 2, 2),
        ("drop", attr.inode, 10, 3),
    ]
    plain = fs.open(attr.inode, os.O_RDWR, ME)
    assert fs.write(plain.handle, 5, b"!", flags=os.O_RDWR | os.O_APPEND) == 1
    assert fs.read(reader.handle, 0, 100) == b"01AB456789end!"
    assert pages.taken() == [("drop", attr.inode, 5, 0)], "the kernel has it in its page at 5"


def test_growth_clears_the_rest_of_the_last_page(fs):
    attr, opened = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    pages = Pages(fs)
    fs.write(opened.handle, 0, b"x" * 5000)
    fs.setattr(attr.inode, ME, None, size=5100)
    fs.setattr(attr.inode, ME, opened.handle, size=9000)
    assert pages.taken() == [
        ("store", attr.inode, 5000, bytes(100)),
        ("store", attr.inode, 5100, bytes(8192 - 5100)),
    ]
    fs.write(opened.handle, 20_000, b"E")
    fs.write(opened.handle, 20_101, b"F")
    fs.fallocate(opened.handle, 0, 30_000, 0, ME)
    assert pages.taken() == [
        ("store", attr.inode, 9000, bytes(12288 - 9000)),
        ("drop", attr.inode, 20_001, 100),
        ("store", attr.inode, 20_102, bytes(20480 - 20_102)),
    ]
    fs.setattr(attr.inode, ME, None, size=4096)
    fs.write(opened.handle, 4096, b"x")
    fs.setattr(attr.inode, ME, None, size=4096)
    fs.setattr(attr.inode, ME, None, size=8192)
    assert not pages.taken(), "nothing is left of a page that the file has whole"
    fs.release(opened.handle)
    opened = fs.open(attr.inode, os.O_WRONLY, ME)
    fs.write(opened.handle, 8192, b"x")
    fs.write(opened.handle, 20_000, b"x")
    assert not pages.taken(), "no process can have mapped the file"


def test_capability_query_before_a_write_needs_no_request(fs):
    attr, opened = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    before = fs.vfs.calls.get("getxattr", 0)
    with pytest.raises(errors.NoAttribute):
        fs.getxattr(attr.inode, b"security.capability")
    assert fs.vfs.calls.get("getxattr", 0) == before
    fs.setxattr(attr.inode, b"security.capability", b"caps", 0, ME)
    assert fs.getxattr(attr.inode, b"security.capability") == b"caps"


def test_access_control_lists_are_refused(fs):
    for call in (
        lambda: fs.setxattr(ROOT, b"system.posix_acl_access", b"x", 0, ME),
        lambda: fs.getxattr(ROOT, b"system.posix_acl_access"),
    ):
        with pytest.raises(errors.NotSupported):
            call()


def test_unknown_rename_flags_are_refused(fs):
    fs.mkdir(ROOT, b"a", 0o755, ME)
    for flags in (3, 4, 8):
        with pytest.raises(errors.InvalidRequest):
            fs.rename(ROOT, b"a", ROOT, b"b", flags, ME)


def make_names(fs, count):
    for number in range(count):
        fs.mkdir(ROOT, b"n%05d" % number, 0o755, ME)


@pytest.mark.parametrize("room", [1, 2, 3, 20, 1 << 20])
def test_listing_is_complete_for_any_buffer_size(fs, room):
    make_names(fs, 50)
    handle = fs.opendir(ROOT)
    cursor, names = 0, []
    while part := fs.listed(handle, cursor, room):
        names += [name for name, _ in part]
        cursor = part[-1][1]
    assert names == [b".", b".."] + [b"n%05d" % number for number in range(50)]


def test_listing_reads_batches_once(fs):
    make_names(fs, LIST_BATCH + 10)
    handle = fs.opendir(ROOT)
    before = fs.vfs.calls.get("readdir", 0)
    cursor = 0
    while part := fs.listed(handle, cursor, 20):
        cursor = part[-1][1]
    assert fs.vfs.calls["readdir"] - before == 2


def test_prefetched_entries_expire_and_follow_changes(fs):
    make_names(fs, 30)
    handle = fs.opendir(ROOT)
    cursor = fs.listed(handle, 0, 12)[-1][1]
    fs.rmdir(ROOT, b"n00020", ME)
    rest = [name for name, _ in fs.listed(handle, cursor)]
    assert rest == [b"n%05d" % number for number in range(10, 30) if number != 20]

    before = fs.vfs.calls["readdir"]
    cursor = fs.listed(handle, cursor, 1)[-1][1]
    cursor = fs.listed(handle, cursor, 1)[-1][1]
    assert fs.vfs.calls["readdir"] == before, "an entry of the last batch is found in the batch"
    fs.clock.advance(2.0)
    fs.listed(handle, cursor, 1)
    assert fs.vfs.calls["readdir"] == before + 1


class LeasedVfs(MemoryVfs):
    """Names have a lease where `covers` says so."""

    covers = True

    def name_cover(self, parent, name, inode):
        return inode if self.covers else 0


def test_name_without_a_lease_is_not_cached_by_the_kernel():
    async def run():
        vfs = LeasedVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        invalidated = []

        async def invalidate(names, inodes):
            invalidated.extend(names)

        ops.notices.connect(invalidate=invalidate)
        inode = (await ops.mknod(ROOT, b"f", 0o100644, 0, ME)).inode
        assert ops.name_is_kept
        vfs.covers = False
        await ops.link(inode, ROOT, b"g", ME)
        assert not ops.name_is_kept
        await ops.recalls.recalled([inode])
        assert invalidated == [(ROOT, b"f")], "the kernel requests the other name each time"

    asyncio.run(run())


def test_open_by_an_invalidated_name_is_stale_once():
    async def run():
        vfs = LeasedVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        inode = (await ops.mknod(ROOT, b"f", 0o100644, 0, ME)).inode
        await ops.rename(ROOT, b"f", ROOT, b"g", 0, ME)
        invalidated = []

        async def invalidate(names, inodes):
            invalidated.extend(names)

        ops.notices.connect(invalidate=invalidate)
        await ops.recalls.recalled([inode])
        assert sorted(invalidated) == [(ROOT, b"f"), (ROOT, b"g")], (
            "the kernel caches the file by its new name"
        )
        thread, other = Caller(0, 0, 7), Caller(0, 0, 8)
        with pytest.raises(errors.NotFound):
            await ops.open(inode, os.O_RDONLY, thread)
        await ops.lookup(ROOT, b"g")  # the kernel looks the path up again, and meanwhile another change comes
        await ops.recalls.recalled([inode])
        await ops.open(inode, os.O_RDONLY, thread)
        with pytest.raises(errors.NotFound):
            await ops.open(inode, os.O_RDONLY, other)
        await ops.lookup(ROOT, b"g")
        await ops.open(inode, os.O_RDONLY, other)
        await ops.recalls.recalled([inode])
        await ops.lookup(ROOT, b"g")
        await ops.open(inode, os.O_RDONLY, Caller(0, 0, 9))

    asyncio.run(run())


def test_names_are_invalidated_when_all_leases_end():
    async def run():
        vfs = LeasedVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        invalidated = []

        async def invalidate(names, inodes):
            invalidated.extend(names)

        ops.notices.connect(invalidate=invalidate)
        inode = (await ops.mknod(ROOT, b"f", 0o100644, 0, ME)).inode
        vfs.on_unleased()
        await asyncio.sleep(0)
        assert invalidated == [(ROOT, b"f")]
        with pytest.raises(errors.NotFound):
            await ops.open(inode, os.O_RDONLY, ME)
        await ops.recalls.recalled([inode])
        assert len(invalidated) == 1

    asyncio.run(run())


def test_recall_does_not_wait_for_a_busy_directory():
    async def run():
        vfs, blocked = LeasedVfs(), asyncio.Event()
        ops = FuseOps(vfs, clock=ManualClock())

        async def invalidate(names, inodes):
            await blocked.wait()  # as the kernel does while it has the directory locked

        async def unlink(parent, name, caller, unlink=vfs.unlink):
            await recalled.wait()  # the other node changes it first
            await unlink(parent, name, caller)

        ops.invalidate, vfs.unlink = invalidate, unlink
        recalled = asyncio.Event()
        inode = (await ops.mknod(ROOT, b"f", 0o100644, 0, ME)).inode
        removing = asyncio.ensure_future(ops.unlink(ROOT, b"f", ME))
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(ops.recalls.recalled([inode]))), 60)
        assert not blocked.is_set() and not removing.done()
        recalled.set()
        await removing
        blocked.set()
        assert not ops.cached_names.locked

    asyncio.run(run())


def test_removed_directory_is_stale_once_and_then_missing():
    async def run():
        vfs = LeasedVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        kept = (await ops.mkdir(ROOT, b"kept", 0o755, ME)).inode
        vfs.covers = False
        asked = (await ops.mkdir(ROOT, b"asked", 0o755, ME)).inode
        for name in (b"kept", b"asked"):
            await vfs.rmdir(ROOT, name, ME)  # by another node
        vfs.mkdir = gone

        async def answer(directory):
            with pytest.raises(errors.DirectoryGone) as refused:
                await ops.mkdir(directory, b"x", 0o755, ME)
            return errno_of(refused.value, "mkdir")

        assert [await answer(kept) for _ in range(3)] == [errno.ESTALE, errno.ENOENT, errno.ENOENT]
        assert [await answer(asked) for _ in range(2)] == [errno.ENOENT] * 2
        assert not ops.cached_names.locked

    async def gone(*_):
        raise errors.DirectoryGone()

    asyncio.run(run())


def test_seek_in_a_listing_requests_few_entries():
    async def run():
        vfs, asked = MemoryVfs(), []

        async def readdir(handle, cursor, limit, answered=None, list_some=vfs.readdir):
            asked.append(limit)
            return await list_some(handle, cursor, limit, answered)

        vfs.readdir = readdir
        ops = FuseOps(vfs, clock=ManualClock())
        for number in range(4 * LIST_BATCH):
            await vfs.mknod(ROOT, b"f%05d" % number, 0o100644, 0, ME)
        handle = await ops.opendir(ROOT)
        places, behind = [], 0

        async def some(cursor, count):
            entries = []
            await ops.readdir(
                handle,
                cursor,
                lambda name, _, place: len(entries) < count and not entries.append((name, place)),
            )
            return entries

        while entries := await some(behind, 100):
            places += entries
            behind = entries[-1][1]
        assert len(places) == 4 * LIST_BATCH + 2
        for number in (5, 3 * LIST_BATCH, 700, 2 * LIST_BATCH, 2 * LIST_BATCH + 3):
            del asked[:]
            assert await some(places[number][1], 1) == [places[number + 1]]
            await asyncio.sleep(0)
            assert sum(asked) <= SEEK_BATCH
        del asked[:]
        entries, behind = [], places[100][1]
        while part := await some(behind, 100):
            entries += part
            behind = part[-1][1]
        assert entries == places[101:] and asked[:3] == [SEEK_BATCH, 4 * SEEK_BATCH, LIST_BATCH]
        await ops.releasedir(handle)

    asyncio.run(run())


def test_rewound_listing_shows_the_present_directory(fs):
    make_names(fs, 3)
    handle = fs.opendir(ROOT)
    assert len(fs.listed(handle)) == 5
    fs.vfs.drop_name(fs.vfs.nodes[ROOT], b"n00001")  # as another node would
    assert [name for name, _ in fs.listed(handle)] == [b".", b"..", b"n00000", b"n00002"]


def test_truncation_gets_its_time_from_the_service(fs):
    attr, _ = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    assert fs.setattr(attr.inode, ME, None, size=10, mtime_ns=5).mtime_ns != 5
    assert fs.setattr(attr.inode, ME, None, mtime_ns=5).mtime_ns == 5


def test_drain_flushes_and_releases_open_files(fs):
    attr, _ = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    fs.open(attr.inode, os.O_RDONLY, ME)
    fs.unlink(ROOT, b"f", ME)
    assert fs.ops.open_files == 2
    fs.drain()
    assert fs.ops.open_files == 0
    assert attr.inode not in fs.vfs.nodes


def test_handle_numbers_are_not_reused(fs):
    attr, first = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    fs.release(first.handle)
    assert fs.open(attr.inode, os.O_RDONLY, ME).handle != first.handle
    assert stat.S_ISREG(fs.getattr(attr.inode).mode)


@pytest.mark.parametrize(
    ("uid", "mode", "left"), [(7, 0o6777, 0o777), (7, 0o2666, 0o666), (0, 0o6777, 0o6777)]
)
def test_append_clears_set_id_bits_except_for_root(fs, uid, mode, left):
    attr, made = fs.create(ROOT, b"f", 0o777, os.O_WRONLY | os.O_CREAT, ME)
    fs.release(made.handle)
    fs.setattr(attr.inode, ME, None, mode=mode)
    invalidated = []
    fs.ops.notices.connect(invalidate_attributes=invalidated.append)
    opened = fs.open(attr.inode, os.O_WRONLY | os.O_APPEND, Caller(uid, uid))
    invalidated.clear()
    fs.write(opened.handle, 0, b"changed")
    assert stat.S_IMODE(fs.getattr(attr.inode).mode) == left
    assert bool(invalidated) == (left != mode), "the cached mode of the kernel is invalidated"
    fs.release(opened.handle)


def test_set_gid_stays_for_group_members(fs):
    attr, made = fs.create(ROOT, b"f", 0o777, os.O_RDWR | os.O_CREAT, ME)
    for caller, left in ((Caller(7, ME.gid), 0o2666), (Caller(7, 7, 1 << 30), 0o666)):
        fs.setattr(attr.inode, ME, None, mode=0o6666)
        fs.fallocate(made.handle, 0, 10, 0, caller)
        assert stat.S_IMODE(fs.getattr(attr.inode).mode) == left
        fs.setattr(attr.inode, ME, None, mode=0o6666)
        fs.setattr(attr.inode, caller, None, gid=attr.gid)
        assert stat.S_IMODE(fs.getattr(attr.inode).mode) & stat.S_ISGID == left & stat.S_ISGID


def test_far_times_are_clamped(fs):
    attr, _ = fs.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    found = fs.setattr(
        attr.inode, ME, None, atime_ns=-11_644_473_600 * 10**9, mtime_ns=253_402_300_799 * 10**9
    )
    assert (found.atime_ns, found.mtime_ns) == (-1 << 63, (1 << 63) - 1)


def test_append_removes_file_capabilities(fs):
    attr, made = fs.create(ROOT, b"f", 0o755, os.O_WRONLY | os.O_CREAT | os.O_APPEND, ME)
    fs.setxattr(attr.inode, b"security.capability", b"all", 0, ME)
    fs.setxattr(attr.inode, b"user.a", b"kept", 0, ME)
    fs.write(made.handle, 0, b"changed")
    fs.write(made.handle, 0, b"again")
    assert fs.listxattr(attr.inode) == [b"user.a"]


def test_long_listing_prefetches_the_next_batch():
    """Prefetched entries are not returned after a change of this mount."""

    async def run():
        vfs = CountingVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        for number in range(6 * LIST_BATCH):
            await vfs.mknod(ROOT, b"f%05d" % number, 0o100644, 0, ME)
        handle = await ops.opendir(ROOT)
        names, behind = [], 0

        async def some():
            nonlocal behind
            last = len(names) + 100

            def add(name, attr, cursor):
                nonlocal behind
                if len(names) == last:
                    return False
                names.append(name)
                behind = cursor
                return True

            await ops.readdir(handle, behind, add)
            return len(names) == last

        while len(names) < LIST_BATCH + 200:
            assert await some()
        for _ in range(10):
            await asyncio.sleep(0)
        assert vfs.calls["readdir"] == 2 + AHEAD_MAX, "the next batches are requested early, and no more"
        await ops.mknod(ROOT, b"zz-new", 0o100644, 0, ME)
        while await some():
            pass
        assert b"zz-new" in names and len(names) == len(set(names)) == 6 * LIST_BATCH + 3
        await ops.releasedir(handle)

    asyncio.run(run())


# -- write-back ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_APPEND]
)
@pytest.mark.parametrize("made", [True, False], ids=["created", "opened"])
def test_writeback_handles_are_readable_and_positional(flags, made):
    fs = Driven(FuseOptions(writeback=True))
    attr, opened = fs.create(ROOT, b"f", 0o644, flags | os.O_CREAT if made else os.O_RDWR, ME)
    if not made:
        opened = fs.open(attr.inode, flags, ME)
    assert (opened.direct_io, opened.keep_cache) == (False, True)
    fs.write(opened.handle, 10, b"behind")
    fs.write(opened.handle, 0, b"0123456789")
    assert bytes(fs.read(opened.handle, 0, 100)) == b"0123456789behind"
    assert not fs.open(attr.inode, os.O_RDONLY | os.O_APPEND, ME).direct_io


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_APPEND])
def test_handles_of_an_older_process_write_positionally_too(flags):
    """The older process had stored the flags as given by the kernel."""

    async def main(pool):
        descriptor = KeptMemory.make(16 * MIB)

        async def process(options):
            client = await Client.open(
                pool.pool_map, "mount", ClientOptions(), clock=pool.clock, kept=KeptMemory(descriptor)
            )
            return client, FuseOps(client.vfs, options, pool.clock)

        older, ops = await process(FuseOptions())
        attr, opened = await ops.create(ROOT, b"f", 0o644, flags | os.O_CREAT, ME)
        assert opened.direct_io == bool(flags & os.O_APPEND)
        await older.vfs.meta.close(0.0, say_so=False)
        client, ops = await process(FuseOptions(writeback=True))
        await ops.take_over()
        assert not ops.open_again(opened.handle).direct_io
        await ops.write(opened.handle, 10, b"behind")
        await ops.write(opened.handle, 0, b"0123456789")
        await ops.flush(opened.handle)
        assert bytes(await ops.read(opened.handle, 0, 100)) == b"0123456789behind"
        assert (await ops.getattr(attr.inode)).size == 16
        await ops.release(opened.handle)
        await client.close()
        await older.close()
        os.close(descriptor)

    run(main)
