"""POSIX access control lists: encoding, rules and storage; files without names; birth times."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core import errors
from nvpool.core.ids import ROOT_INODE
from nvpool.core.posix import acl
from nvpool.core.posix.acl import GROUP, GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, AclEntry
from nvpool.meta.state import records
from nvpool.sdk.dump import dump, load
from nvpool.sdk.fsck.check import FsckReport, check_metadata
from nvpool.sdk.transfer.export_tree import export_tree
from nvpool.sdk.transfer.import_tree import import_tree
from nvpool.sdk.transfer.progress import TransferOptions, TransferProgress
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 100)
MASKED = Caller(1000, 100, umask=0o077)
OPTIONS = ClientOptions(deadline_s=20.0)
MINIMAL = (AclEntry(USER_OBJ, 6), AclEntry(GROUP_OBJ, 4), AclEntry(OTHER, 4))
NAMED = (
    AclEntry(USER_OBJ, 7),
    AclEntry(USER, 7, 2001),
    AclEntry(GROUP_OBJ, 5),
    AclEntry(GROUP, 6, 3001),
    AclEntry(MASK, 7),
    AclEntry(OTHER, 0),
)


def encoded(*entries, version=2):
    return version.to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + bits.to_bytes(2, "little") + number.to_bytes(4, "little")
        for tag, bits, number in entries
    )


# -- encoding and rules ----------------------------------------------------------------------------------------------------


def test_acl_encoding_is_that_of_the_kernel():
    nobody = 0xFFFFFFFF
    value = encoded(
        (1, 7, nobody), (2, 7, 2001), (4, 5, nobody), (8, 6, 3001), (16, 7, nobody), (32, 0, nobody)
    )
    assert acl.encode_acl(NAMED) == value and acl.decode_acl(value) == NAMED
    assert acl.decode_acl(encoded()) == ()
    assert acl.decode_acl(encoded((1, 6, 7), (4, 4, 8), (32, 4, 9))) == MINIMAL


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\2\0\0",
        encoded((1, 6, 0), (4, 4, 0), (32, 4, 0), version=1),
        encoded((1, 6, 0), (4, 4, 0), (32, 4, 0))[:-1],
        encoded((1, 6, 0), (4, 4, 0)),
        encoded((4, 4, 0), (1, 6, 0), (32, 4, 0)),
        encoded((1, 8, 0), (4, 4, 0), (32, 4, 0)),
        encoded((1, 6, 0), (1, 6, 0), (4, 4, 0), (32, 4, 0)),
        encoded((1, 6, 0), (4, 4, 0), (32, 4, 0), (32, 4, 0)),
        encoded((1, 6, 0), (2, 7, 5), (4, 4, 0), (32, 4, 0)),
        encoded((1, 6, 0), (4, 4, 0), (8, 7, 5), (32, 4, 0)),
        encoded((1, 6, 0), (2, 7, 0xFFFFFFFF), (4, 4, 0), (16, 7, 0), (32, 4, 0)),
        encoded((1, 6, 0), (4, 4, 0), (16, 7, 0), (16, 7, 0), (32, 4, 0)),
        encoded((1, 6, 0), (4, 4, 0), (3, 7, 0), (32, 4, 0)),
        encoded((1, 6, 0), (4, 4, 0), (2, 7, 5), (16, 7, 0), (32, 4, 0)),
    ],
)
def test_invalid_acl_is_refused(value):
    with pytest.raises(errors.InvalidRequest):
        acl.decode_acl(value)


def test_acl_larger_than_a_page_is_refused():
    entries = [(1, 7, 0), *[(2, 7, number) for number in range(508)], (4, 5, 0), (16, 7, 0), (32, 0, 0)]
    with pytest.raises(errors.TooBig):
        acl.decode_acl(encoded(*entries))
    assert len(acl.decode_acl(encoded(*entries[:-4], *entries[-3:]))) == 511


def test_mode_and_acl_are_converted_both_ways():
    assert acl.mode_of(MINIMAL) == 0o644 and acl.is_minimal(MINIMAL)
    assert acl.mode_of(NAMED) == 0o770 and not acl.is_minimal(NAMED)
    assert acl.changed_by_mode(NAMED, 0o640) == (
        AclEntry(USER_OBJ, 6),
        *NAMED[1:4],
        AclEntry(MASK, 4),
        AclEntry(OTHER, 0),
    )
    assert acl.changed_by_mode(MINIMAL, 0o751) == (
        AclEntry(USER_OBJ, 7),
        AclEntry(GROUP_OBJ, 5),
        AclEntry(OTHER, 1),
    )


def test_inherited_acl_is_limited_by_the_mode():
    assert acl.inherited(NAMED, 0o100664) == (
        0o100660,
        (AclEntry(USER_OBJ, 6), *NAMED[1:4], AclEntry(MASK, 6), AclEntry(OTHER, 0)),
    )
    assert acl.inherited(MINIMAL, 0o102777) == (0o102644, ())
    only_a_mask = (AclEntry(USER_OBJ, 7), AclEntry(GROUP_OBJ, 7), AclEntry(MASK, 5), AclEntry(OTHER, 5))
    assert acl.inherited(only_a_mask, 0o100777) == (0o100755, only_a_mask)


@given(st.integers(0, 0o777), st.permutations([2, 8]), st.integers(0, 0o777))
def test_acl_after_chmod_has_that_mode(mode, _, bits):
    for one in (NAMED, MINIMAL):
        assert acl.mode_of(acl.changed_by_mode(one, mode)) == mode
        kept, access = acl.inherited(one, bits)
        assert kept & ~bits == 0 and (not access or acl.mode_of(access) == kept)
        assert acl.decode_acl(acl.encode_acl(acl.changed_by_mode(one, mode))) == acl.changed_by_mode(
            one, mode
        )


# -- in a pool -----------------------------------------------------------------------------------------------------------


def in_a_pool(main, **options):
    """Run main(pool, vfs, directory inode), then check that the metadata has no problems."""

    async def whole():
        async with InProcessPool(**options) as pool:
            client = await pool.client("acl", OPTIONS)
            top = (await client.vfs.mkdir(ROOT_INODE, b"top", 0o755, ME)).inode
            await main(pool, client.vfs, top)
            checkup = FsckReport()
            await check_metadata(await pool.client("check"), checkup)
            assert not checkup.problems

    asyncio.run(whole())


async def get(vfs, inode, name=acl.ACCESS):
    return acl.decode_acl(await vfs.getxattr(inode, name))


async def put(vfs, inode, value, name=acl.ACCESS, flags=0):
    await vfs.setxattr(inode, name, acl.encode_acl(value), flags, ME)


async def make(vfs, parent, name, mode=0o666, caller=MASKED):
    attr, handle = await vfs.create(parent, name, mode, os.O_RDWR | os.O_EXCL, caller)
    await vfs.release(handle)
    return attr


def test_access_acl_sets_the_mode_and_follows_chmod():
    async def main(pool, vfs, top):
        inode = (await make(vfs, top, b"f")).inode
        assert stat.S_IMODE((await vfs.getattr(inode)).mode) == 0o600
        with pytest.raises(errors.NoAttribute):
            await get(vfs, inode)
        await put(vfs, inode, NAMED)
        found = await vfs.getattr(inode)
        assert (
            stat.S_IMODE(found.mode) == 0o770
            and found.flags & records.HAS_ACL
            and found.flags & records.HAS_XATTRS
        )
        assert await vfs.listxattr(inode) == [acl.ACCESS]
        await vfs.setattr(inode, mode=0o2640, caller=ME)
        assert await get(vfs, inode) == (
            AclEntry(USER_OBJ, 6),
            *NAMED[1:4],
            AclEntry(MASK, 4),
            AclEntry(OTHER, 0),
        )
        await put(vfs, inode, NAMED)
        assert stat.S_IMODE((await vfs.getattr(inode)).mode) == 0o2770
        await put(vfs, inode, NAMED, flags=4)
        assert stat.S_IMODE((await vfs.getattr(inode)).mode) == 0o770
        await put(vfs, inode, MINIMAL)  # the mode expresses it completely
        found = await vfs.getattr(inode)
        assert stat.S_IMODE(found.mode) == 0o644 and not found.flags & (records.HAS_ACL | records.HAS_XATTRS)
        await put(vfs, inode, NAMED)
        await vfs.setxattr(inode, b"user.a", b"1", 0, ME)
        await vfs.removexattr(inode, acl.ACCESS, ME)
        found = await vfs.getattr(inode)
        assert stat.S_IMODE(found.mode) == 0o770 and found.flags & 255 == records.HAS_XATTRS
        with pytest.raises(errors.NoAttribute):
            await vfs.removexattr(inode, acl.ACCESS, ME)

    in_a_pool(main)


def test_acl_is_refused_on_objects_without_acls():
    async def main(pool, vfs, top):
        file, link, valid = (
            await make(vfs, top, b"f"),
            await vfs.symlink(top, b"l", b"f", ME),
            acl.encode_acl(NAMED),
        )
        for inode, name, value, error in (
            (file.inode, acl.DEFAULT, valid, errors.AccessDenied),
            (top, acl.ACCESS, b"x", errors.InvalidRequest),
            (top, acl.DEFAULT, b"", errors.InvalidRequest),
            (link.inode, acl.ACCESS, valid, errors.NotSupported),
            (top, b"system.nfs4_acl", b"", errors.NotSupported),
        ):
            with pytest.raises(error):
                await vfs.setxattr(inode, name, value, 0, ME)
        await put(vfs, file.inode, (), acl.DEFAULT)
        assert await vfs.listxattr(file.inode) == []

    in_a_pool(main)


def test_default_acl_replaces_the_umask():
    async def main(pool, vfs, top):
        await put(vfs, top, NAMED, acl.DEFAULT)
        assert stat.S_IMODE((await vfs.getattr(top)).mode) == 0o755
        file = await make(vfs, top, b"f")
        assert stat.S_IMODE(file.mode) == 0o660
        assert await get(vfs, file.inode) == (
            AclEntry(USER_OBJ, 6),
            *NAMED[1:4],
            AclEntry(MASK, 6),
            AclEntry(OTHER, 0),
        )
        assert await vfs.listxattr(file.inode) == [acl.ACCESS]
        pipe = await vfs.mknod(top, b"p", stat.S_IFIFO | 0o666, 0, MASKED)
        assert stat.S_IMODE(pipe.mode) == 0o660 and await vfs.listxattr(pipe.inode) == [acl.ACCESS]
        below = await vfs.mkdir(top, b"d", 0o777, MASKED)
        assert stat.S_IMODE(below.mode) == 0o770
        assert await get(vfs, below.inode) == NAMED and await get(vfs, below.inode, acl.DEFAULT) == NAMED
        deeper = await make(vfs, below.inode, b"f", 0o600)
        assert stat.S_IMODE(deeper.mode) == 0o600
        assert await get(vfs, deeper.inode) == (
            AclEntry(USER_OBJ, 6),
            *NAMED[1:4],
            AclEntry(MASK, 0),
            AclEntry(OTHER, 0),
        )
        link = await vfs.symlink(top, b"l", b"f", MASKED)
        assert stat.S_IMODE(link.mode) == 0o777 and await vfs.listxattr(link.inode) == []
        await vfs.removexattr(top, acl.DEFAULT, ME)
        assert stat.S_IMODE((await make(vfs, top, b"plain")).mode) == 0o600
        await put(vfs, top, MINIMAL, acl.DEFAULT)
        plain = await make(vfs, top, b"minimal", 0o777)
        assert stat.S_IMODE(plain.mode) == 0o644 and await vfs.listxattr(plain.inode) == []

    in_a_pool(main)


def test_default_acl_is_inherited_across_shards(tmp_path):
    async def main(pool, vfs, top):
        await put(vfs, top, NAMED, acl.DEFAULT)
        shards = set()
        for number in range(12):  # directories are placed on any shard
            below = await vfs.mkdir(top, b"d%d" % number, 0o777, MASKED)
            shards.add(vfs.meta.shard_of(below.inode))
            assert await get(vfs, below.inode) == NAMED and await get(vfs, below.inode, acl.DEFAULT) == NAMED
            assert stat.S_IMODE((await make(vfs, below.inode, b"f")).mode) == 0o660
        assert len(shards) == 3
        await dump(await pool.client(), tmp_path / "dump")

    in_a_pool(main, shards=3)

    async def loaded():
        async with InProcessPool(shards=3) as pool:
            await load(await pool.client(), tmp_path / "dump")
            vfs = (await pool.client("again", OPTIONS)).vfs
            below = await vfs.lookup((await vfs.lookup(ROOT_INODE, b"top")).inode, b"d5")
            assert await get(vfs, below.inode) == NAMED
            assert stat.S_IMODE((await make(vfs, below.inode, b"g")).mode) == 0o660
            checkup = FsckReport()
            await check_metadata(await pool.client("check"), checkup)
            assert not checkup.problems

    asyncio.run(loaded())


@pytest.mark.parametrize("shards", [1, 3])
def test_striped_directory_passes_on_its_default_acl(shards):
    async def main(pool, vfs, top):
        striped = (await vfs.mkdir(top, b"wide", 0o777, ME, wide=True)).inode
        for number in range(12):
            await make(vfs, striped, b"before%d" % number)
        await put(vfs, striped, NAMED, acl.DEFAULT)
        for number in range(12):
            assert stat.S_IMODE((await make(vfs, striped, b"with%d" % number)).mode) == 0o660
        await put(vfs, striped, NAMED)
        await vfs.setattr(striped, mode=0o700, caller=ME)
        assert acl.mode_of(await get(vfs, striped)) == 0o700
        await vfs.removexattr(striped, acl.DEFAULT, ME)
        for number in range(12):
            assert stat.S_IMODE((await make(vfs, striped, b"after%d" % number)).mode) == 0o600
        assert (await vfs.getattr(striped)).size == 36

    in_a_pool(main, shards=shards)


def test_acl_change_reaches_other_clients():
    async def main(pool, vfs, top):
        other = (await pool.client("other", OPTIONS)).vfs
        for value, mode in ((NAMED, 0o660), (MINIMAL, 0o644)):
            await other.getattr(top)
            await put(vfs, top, value, acl.DEFAULT)
            assert stat.S_IMODE((await make(other, top, b"f%o" % mode)).mode) == mode

    in_a_pool(main)


def test_check_repairs_acls_and_their_flags():
    async def main(pool, vfs, top):
        inodes = [(await make(vfs, top, b"f%d" % number)).inode for number in range(4)]
        for inode in inodes:
            await put(vfs, inode, NAMED)
        kv = pool.kvs[1]

        def change(number, **fields):
            inode = records.decode_inode(number, kv.get(records.inode_key(number)))
            for field, value in fields.items():
                setattr(inode, field, value)
            kv.apply([(records.inode_key(number), records.encode_inode(inode))])

        change(inodes[0], flags=records.HAS_XATTRS)
        change(inodes[1], mode=0o100755)
        kv.apply(
            [
                (records.xattr_key(inodes[2], acl.ACCESS), records.XATTR_HEAD + b"no list"),
                (records.xattr_key(inodes[3], acl.ACCESS), None),
            ]
        )
        checkup = FsckReport()
        await check_metadata(await pool.client("repair"), checkup, repair=True)
        assert sum(problem.kind == "acl" for problem in checkup.problems) == 4 and all(
            one.repaired for one in checkup.problems
        )
        fresh = (await pool.client("fresh", OPTIONS)).vfs
        assert (await fresh.getattr(inodes[0])).flags & records.HAS_ACL
        assert acl.mode_of(await get(fresh, inodes[1])) == 0o755
        for inode in inodes[2:]:
            assert not (await fresh.getattr(inode)).flags & (records.HAS_ACL | records.HAS_XATTRS)

    in_a_pool(main, shards=1)


# -- files without names, birth times ---------------------------------------------------------------------------------------


async def names(vfs, directory):
    listed, _ = await vfs.readdir(await vfs.opendir(directory), 0, 100)
    return listed.names


@pytest.mark.parametrize("shards", [1, 3])
def test_link_gives_an_unnamed_file_a_name(shards):
    async def main(pool, vfs, top):
        await put(vfs, top, NAMED, acl.DEFAULT)
        other = (await vfs.mkdir(top, b"elsewhere", 0o755, ME)).inode
        attr, handle = await vfs.create_unnamed(top, 0o666, os.O_RDWR, MASKED)
        assert (
            attr.links == 0 and stat.S_IMODE(attr.mode) == 0o660 and await names(vfs, top) == [b"elsewhere"]
        )
        await vfs.write(handle, 0, b"bytes")
        await vfs.fsync(handle, False)
        named = await vfs.link(attr.inode, other, b"f", ME)
        assert named.links == 1 and await names(vfs, other) == [b"f"]
        await vfs.release(handle)
        for meta in pool.metas.values():
            await meta.parts.collector.run_once()
        again = await vfs.open((await vfs.lookup(other, b"f")).inode, os.O_RDONLY, ME)
        assert bytes(await vfs.read(again, 0, 10)) == b"bytes"
        await vfs.release(again)
        await vfs.unlink(other, b"f", ME)
        with pytest.raises(errors.NotFound):
            await vfs.link(attr.inode, other, b"g", ME)

    in_a_pool(main, shards=shards)


def test_unnamed_file_is_deleted_when_closed():
    async def main(pool, vfs, top):
        attr, handle = await vfs.create_unnamed(top, 0o600, os.O_RDWR | os.O_EXCL, ME)
        await vfs.write(handle, 0, b"x" * 5000)
        await vfs.flush(handle)
        with pytest.raises(errors.NotFound):
            await vfs.link(attr.inode, top, b"f", ME)
        meta = pool.metas[1]
        meta.parts.collector.orphans[attr.inode] = 0.0
        await meta.parts.collector.run_once()
        assert bytes(await vfs.read(handle, 0, 1)) == b"x"
        await vfs.release(handle)
        await pool.clients[0].close()
        meta.parts.collector.orphans[attr.inode] = 0.0
        await meta.parts.collector.run_once()
        assert pool.kvs[1].get(records.inode_key(attr.inode)) is None

    in_a_pool(main, shards=1)


def test_unnamed_file_counts_against_its_quota():
    async def main(pool, vfs, top):
        from nvpool.sdk.async_filesystem import AsyncFileSystem

        fs = AsyncFileSystem(await pool.client("fs", OPTIONS), Caller(0, 0))
        inode = (await fs.volumes.create("v", bytes_max=1 << 20, files_max=1)).inode
        attr, handle = await vfs.create_unnamed(inode, 0o600, os.O_RDWR, ME)
        with pytest.raises(errors.QuotaExceeded):
            await vfs.create_unnamed(inode, 0o600, os.O_RDWR, ME)
        await vfs.write(handle, 0, b"x" * 5000)
        await vfs.flush(handle)
        used = await fs.volumes.show("v")
        assert (used.files_used, used.bytes_used) == (1, 5000)
        with pytest.raises(errors.CrossesVolumes):
            await vfs.link(attr.inode, top, b"f", ME)
        await vfs.link(attr.inode, inode, b"f", ME)
        await vfs.release(handle)
        used = await fs.volumes.show("v")
        assert (used.files_used, used.bytes_used) == (1, 5000)
        await pool.clients[0].close()
        await fs.remove("/volumes/v/f")
        used = await fs.volumes.show("v")
        assert (used.files_used, used.bytes_used) == (0, 0)

    in_a_pool(main, shards=1)


def test_birth_time_survives_other_changes():
    async def main(pool, vfs, top):
        attr = await make(vfs, top, b"f")
        born = await vfs.birth_ns(attr.inode)
        assert born == attr.ctime_ns
        for change in (
            {"mtime_ns": 5},
            {"mtime_ns": born + 10},
            {"mtime_ns": 1 << 62},
            {"mode": 0o600},
            {"size": 100},
        ):
            await vfs.setattr(attr.inode, caller=ME, **change)
            assert await vfs.birth_ns(attr.inode) == born
        assert await vfs.birth_ns(top) < born

    in_a_pool(main)


# -- import and export -----------------------------------------------------------------------------------------------------


def test_import_and_export_preserve_acls(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "d").mkdir(parents=True)
    (source / "f").write_bytes(b"x")
    (source / "plain").write_bytes(b"y")
    os.chmod(source / "plain", 0o640)
    try:
        os.setxattr(source / "f", acl.ACCESS, acl.encode_acl(NAMED))
        os.setxattr(source / "d", acl.DEFAULT, acl.encode_acl(NAMED))
    except OSError as error:
        pytest.skip(f"this file system keeps no access control lists: {error}")

    async def main(pool, vfs, top):
        await put(vfs, top, NAMED, acl.DEFAULT)
        progress = TransferProgress()
        await import_tree(vfs, source, b"/top/there", progress=progress, options=TransferOptions())
        assert not progress.failures and not progress.attributes_not_kept
        there = (await vfs.lookup(top, b"there")).inode
        found = {name: await vfs.lookup(there, name) for name in (b"f", b"d", b"plain")}
        assert (
            await get(vfs, found[b"f"].inode) == NAMED
            and await get(vfs, found[b"d"].inode, acl.DEFAULT) == NAMED
        )
        assert await vfs.listxattr(there) == await vfs.listxattr(found[b"plain"].inode) == []
        assert stat.S_IMODE(found[b"plain"].mode) == 0o640
        assert await vfs.listxattr(top) == [acl.DEFAULT]
        await export_tree(vfs, b"/top/there", out, progress=progress, options=TransferOptions())
        assert not progress.failures and not progress.attributes_not_kept
        assert (
            os.getxattr(out / "f", acl.ACCESS) == os.getxattr(out / "d", acl.DEFAULT) == acl.encode_acl(NAMED)
        )
        assert os.listxattr(out / "plain") == []

    in_a_pool(main)
