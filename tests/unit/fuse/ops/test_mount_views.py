"""Request handling of a subtree mount and of a read-only mount, on an in-memory file system."""

import asyncio
import errno
import os

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import InvalidRequest, NotADirectory, NotFound, NotSupported, ReadOnly
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices
from nvpool.fuse.ops.mount_views import directory_at, parts_of
from nvpool.fuse.ops.operations import FuseOps, errno_of
from nvpool.testing.fakes.vfs import MemoryVfs

ME = Caller(0, 0)


def on_a_tree(look):
    """`look(vfs)` over /outside and /a/b/f."""

    async def run():
        vfs = MemoryVfs()
        await vfs.mkdir(1, b"outside", 0o755, ME)
        a = await vfs.mkdir(1, b"a", 0o755, ME)
        b = await vfs.mkdir(a.inode, b"b", 0o755, ME)
        await vfs.symlink(a.inode, b"link", b"/outside", ME)
        _, handle = await vfs.create(b.inode, b"f", 0o644, os.O_WRONLY, ME)
        await vfs.release(handle)
        await look(vfs)

    asyncio.run(run())


def test_subtree_path_is_names_from_the_root():
    assert parts_of("/") == parts_of("") == parts_of("//./") == ()
    assert parts_of("/a//b/") == parts_of("a/b") == (b"a", b"b")
    for wrong in ("/..", "/a/../b", "a\0b"):
        with pytest.raises(InvalidRequest):
            parts_of(wrong)


def test_subtree_is_found_by_its_path_without_links():
    async def look(vfs):
        a = await directory_at(vfs, "/a")
        assert await directory_at(vfs, "/") == 1 and a == (await vfs.lookup(1, b"a")).inode
        for path, error, said in (
            ("/a/none/x", NotFound, "/a/none does not exist"),
            ("/a/b/f", NotADirectory, "/a/b/f is not"),
            ("/a/link", NotADirectory, "symbolic link"),
            ("/a/../outside", InvalidRequest, "without"),
        ):
            with pytest.raises(error, match=said):
                await directory_at(vfs, path)

    on_a_tree(look)


def test_kernel_root_is_the_subtree_in_each_request():
    async def look(vfs):
        a = await directory_at(vfs, "/a")
        ops = FuseOps(vfs, root=a)
        assert (await ops.getattr(1)).inode == a
        assert (await ops.lookup(1, b"b")).inode == (await vfs.lookup(a, b"b")).inode
        assert await ops.lookup(1, b"outside") is None
        made = await ops.mkdir(1, b"d", 0o755, ME)
        assert made.parent == a
        await ops.symlink(1, b"l", b"t", ME)
        await ops.mknod(1, b"n", 0o100644, 0, ME)
        _, opened = await ops.create(1, b"c", 0o644, os.O_RDWR, ME)
        assert ops.write_now(opened.handle, 0, b"x", False, 0) or await ops.write(opened.handle, 0, b"x") == 1
        await ops.rename(1, b"c", made.inode, b"c", 0, ME)
        await ops.rename(made.inode, b"c", 1, b"c2", 0, ME)
        file = await ops.lookup(1, b"c2")
        await ops.link(file.inode, 1, b"hard", ME)
        await ops.unlink(1, b"hard", ME)
        await ops.rmdir(1, b"d", ME)
        await ops.setattr(1, ME, None, mode=0o700)
        await ops.setxattr(1, b"user.x", b"1", 0, ME)
        assert await ops.getxattr(1, b"user.x") == b"1" and await ops.listxattr(1) == [b"user.x"]
        await ops.removexattr(1, b"user.x", ME)
        await ops.access(1, os.R_OK, ME)
        await ops.statfs()
        assert (await vfs.getattr(a)).mode & 0o7777 == 0o700 != (await vfs.getattr(1)).mode & 0o7777
        listed = {}
        handle = await ops.opendir(1)
        await ops.readdir(handle, 0, lambda name, attr, _: listed.setdefault(name, attr.inode) is not None)
        assert listed[b"."] == listed[b".."] == a  # no entry outside is shown, not even an inode number
        assert {b"b", b"link", b"l", b"n", b"c2"} == listed.keys() - {b".", b".."}
        for name in (b".", b".."):
            with pytest.raises(NotSupported):
                await ops.lookup(1, name)
        with pytest.raises(NotFound):
            await vfs.lookup(1, b"c2")

    on_a_tree(look)


def test_notices_to_the_kernel_use_its_own_root():
    async def look(vfs):
        a = await directory_at(vfs, "/a")
        ops = FuseOps(vfs, root=a)
        notices = []
        ops.notices.connect(invalidate_attributes=notices.append)

        async def invalidate(names, inodes):
            notices.append((list(names), list(inodes)))

        ops.notices.connect(invalidate=invalidate)
        ops.notices.invalidate_attributes(a)
        ops.notices.invalidate_attributes(77)
        await ops.notices.invalidate(dict.fromkeys([(a, b"x"), (77, b"y")]), (a, 77))
        assert notices == [1, 77, ([(1, b"x"), (77, b"y")], [1, 77])]

    on_a_tree(look)


def test_plain_mount_takes_requests_as_they_are():
    ops = FuseOps(MemoryVfs())
    assert ops.view.is_plain
    assert ops.lookup_now == ops.metadata.lookup_now and ops.rename == ops.metadata.rename
    assert ops.open_now == ops.files.open_now and ops.write == ops.writes.write


def test_later_connection_keeps_the_other_notices():
    notices = KernelNotices(root=7)
    seen = []

    async def drop(*what):
        seen.append(what)

    notices.connect(invalidate_attributes=seen.append)
    notices.connect(drop=drop)
    notices.invalidate_attributes(7)
    asyncio.run(notices.drop(8, 0, 4096))
    assert seen == [1, (8, 0, 4096)]


def test_read_only_mount_refuses_each_change():
    async def look(vfs):
        a = await directory_at(vfs, "/a")
        for ops, b in ((FuseOps(vfs, root=a, read_only=True), b"b"), (FuseOps(vfs, read_only=True), b"a")):
            inode = (await ops.lookup(1, b)).inode
            file = (await vfs.lookup(await directory_at(vfs, "/a/b"), b"f")).inode
            for change in (
                ops.setattr(1, ME, None, mode=0),
                ops.mknod(1, b"x", 0o100644, 0, ME),
                ops.mkdir(1, b"x", 0, ME),
                ops.symlink(1, b"x", b"y", ME),
                ops.link(file, 1, b"x", ME),
                ops.unlink(1, b"f", ME),
                ops.rmdir(1, b, ME),
                ops.rename(1, b, 1, b"x", 0, ME),
                ops.create(1, b"x", 0, 0, ME),
                ops.open(file, os.O_WRONLY, ME),
                ops.open(file, os.O_RDWR, ME),
                ops.write(1, 0, b"x"),
                ops.open(file, os.O_RDONLY | os.O_TRUNC, ME),
                ops.fallocate(1, 0, 1, 0, ME),
                ops.copy_file_range(1, 0, 1, 0, 1, 0, ME),
                ops.setxattr(1, b"user.x", b"", 0, ME),
                ops.removexattr(1, b"user.x", ME),
            ):
                with pytest.raises(ReadOnly) as refused:
                    await change
                assert errno_of(refused.value, "any") == errno.EROFS
            for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC):
                with pytest.raises(ReadOnly):
                    ops.open_now(file, flags, ME)
            with pytest.raises(ReadOnly):
                ops.write_now(1, 0, b"x", False, 0)
            opened = await ops.open(file, os.O_RDONLY, ME)
            assert bytes(await ops.read(opened.handle, 0, 10)) == b""
            await ops.flush(opened.handle)
            await ops.release(opened.handle)
            assert inode

    on_a_tree(look)
