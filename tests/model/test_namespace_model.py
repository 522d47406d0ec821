"""Name space and file contents, through the Vfs of a whole pool, against a plain directory of this machine.

A state machine does the same to both and compares results, errnos, listings, stat results and every byte. Two clients take
part: after a close each sees the changes of the other (close-to-open).
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvpool.client.state.metadata_cache import WIDE_FLAG
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import RENAME_NOREPLACE, Caller
from nvpool.core.errors import DirectoryNotEmpty, IsADirectory, NotADirectory, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.sdk.fsck.check import FsckReport, check_metadata
from nvpool.shm.mount_state import KeptMemory
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

ME = Caller(os.getuid(), os.getgid())
CHUNK = 64 * KIB
NAMES = st.sampled_from([b"a", b"b", b"c", b"\xff\xfe"])
DIRS = st.sampled_from([(), (b"d",), (b"d", b"e"), (b"a",)])
OFFSETS = st.one_of(
    st.integers(0, 3 * CHUNK), st.sampled_from([0, 1, 4095, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
)
LENGTHS = st.one_of(st.integers(1, 9000), st.sampled_from([1, 4096, CHUNK, CHUNK + 4096, 2 * CHUNK + 17]))


async def _plain(pool: InProcessPool, target: int) -> PlainStore:
    return PlainStore(target, pool.grant_secret)


class Pool:
    """One loop, one pool and two clients; every call runs to its end."""

    def __init__(self, make_store=_plain, shards: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.local = InProcessPool(
            chunk_bytes=CHUNK, make_store=make_store, capacities=(64 * MIB, 96 * MIB), shards=shards
        )
        self.run(self.local.__aenter__())
        options = ClientOptions(
            attr_s=0.0,
            fresh_s=0.0,
            deadline_s=20.0,
            write_buffer_bytes=256 * KIB,
            write_flight_bytes=128 * KIB,
            read_ahead_bytes=256 * KIB,
        )
        # as of mounts: a close of a new file completes before its data is at the stores
        self.memories = [KeptMemory.make(16 * MIB) for _ in range(2)]
        self.clients = [
            self.run(self.local.client(f"client {n}", options, kept=KeptMemory(memory)))
            for n, memory in enumerate(self.memories)
        ]

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    def close(self) -> None:
        self.run(self.local.__aexit__())
        self.run(asyncio.sleep(0))
        self.loop.close()
        for memory in self.memories:
            os.close(memory)


class NamespaceMachine(RuleBasedStateMachine):
    make_store = staticmethod(_plain)
    shards = 0
    top = ROOT_INODE
    """The plain directory that the pool is compared with."""
    has_wide = True

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(prefix="nvpool-model-").encode()
        self.pool = Pool(self.make_store, self.shards)
        self.open: list[tuple[int, int, object]] = []  # (client, descriptor, handle)

    def teardown(self) -> None:
        for _, descriptor, _ in self.open:
            os.close(descriptor)
        self.pool.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- both sides ------------------------------------------------------------------------------------------------------

    def vfs(self, client: int):
        return self.pool.clients[client].vfs

    def path(self, directory: tuple[bytes, ...], name: bytes = b"") -> bytes:
        place = self.root
        for part in directory:
            place = os.path.join(place, part)
            if os.path.islink(place):
                raise NotADirectoryError(errno.ENOTDIR, "the Vfs follows no symbolic link; its callers do")
        return os.path.join(place, name) if name else place

    def is_symlink(self, directory: tuple[bytes, ...], name: bytes) -> bool:
        try:
            return os.path.islink(self.path(directory, name))
        except NotADirectoryError:
            return False

    async def find(self, vfs, directory: tuple[bytes, ...]) -> int:
        inode = self.top
        for name in directory:
            attr = await vfs.lookup(inode, name)
            if not stat.S_ISDIR(attr.mode):
                raise NotADirectory("the kernel walks to a place before it looks at the next one")
            inode = attr.inode
        return inode

    def both(self, plain, ours):
        """Do `plain()` and run `ours`; both give the same errno, or both a result."""
        try:
            expected, wrong = plain(), 0
        except OSError as error:
            expected, wrong = None, error.errno
        try:
            found, ours_wrong = self.pool.run(ours), 0
        except NvpoolError as error:
            found, ours_wrong = None, error.errno
        assert errno.errorcode.get(ours_wrong) == errno.errorcode.get(wrong)
        return expected, found, not wrong

    # -- names -----------------------------------------------------------------------------------------------------------

    @initialize()
    def make_directories(self) -> None:
        os.mkdir(self.path((b"d",)))
        self.pool.run(self.vfs(0).mkdir(self.top, b"d", 0o755, ME, wide=self.has_wide))

    @rule(
        client=st.integers(0, 1),
        directory=DIRS,
        name=NAMES,
        mode=st.sampled_from([0o755, 0o700]),
        wide=st.booleans(),
    )
    def mkdir(self, client, directory, name, mode, wide) -> None:
        async def ours():
            vfs = self.vfs(client)
            return await vfs.mkdir(
                await self.find(vfs, directory), name, mode, ME, wide=wide and self.has_wide
            )

        self.both(lambda: os.mkdir(self.path(directory, name), mode), ours())

    @precondition(lambda self: self.has_wide)
    @rule(client=st.integers(0, 1), directory=DIRS)
    def spread(self, client, directory) -> None:
        """An empty directory becomes a striped one, which a plain file system does not have."""

        async def ours():
            vfs = self.vfs(client)
            inode = await self.find(vfs, directory)
            if not (await vfs.getattr(inode)).flags & WIDE_FLAG or not os.listdir(self.path(directory)):
                await vfs.spread(inode, ME)
            else:
                raise DirectoryNotEmpty("one that is wide stays so, whatever is in it")

        def plain():
            if os.listdir(self.path(directory)):
                raise OSError(errno.ENOTEMPTY, "only an empty directory becomes wide")

        self.both(plain, ours())

    @rule(client=st.integers(0, 1), directory=DIRS, name=NAMES)
    def rmdir(self, client, directory, name) -> None:
        async def ours():
            vfs = self.vfs(client)
            await vfs.rmdir(await self.find(vfs, directory), name, ME)

        self.both(lambda: os.rmdir(self.path(directory, name)), ours())

    @rule(client=st.integers(0, 1), directory=DIRS, name=NAMES)
    def unlink(self, client, directory, name) -> None:
        async def ours():
            vfs = self.vfs(client)
            await vfs.unlink(await self.find(vfs, directory), name, ME)

        self.both(lambda: os.unlink(self.path(directory, name)), ours())

    @rule(
        client=st.integers(0, 1),
        directory=DIRS,
        name=NAMES,
        text=st.sampled_from([b"a", b"../b", b"x" * 300]),
    )
    def symlink(self, client, directory, name, text) -> None:
        async def ours():
            vfs = self.vfs(client)
            await vfs.symlink(await self.find(vfs, directory), name, text, ME)

        self.both(lambda: os.symlink(text, self.path(directory, name)), ours())

    @rule(client=st.integers(0, 1), directory=DIRS, name=NAMES)
    def readlink(self, client, directory, name) -> None:
        async def ours():
            vfs = self.vfs(client)
            return await vfs.readlink((await vfs.lookup(await self.find(vfs, directory), name)).inode)

        expected, found, _ = self.both(lambda: os.readlink(self.path(directory, name)), ours())
        assert found == expected

    @rule(client=st.integers(0, 1), directory=DIRS, name=NAMES, other=DIRS, new=NAMES, keep=st.booleans())
    def rename(self, client, directory, name, other, new, keep) -> None:
        if (*other, new) == (*directory, name)[: len(other) + 1] and len(other) < len(directory):
            return  # onto a directory above: the kernel itself refuses it (ENOTEMPTY), no file system is called

        async def ours():
            vfs = self.vfs(client)
            source, place = await self.find(vfs, directory), await self.find(vfs, other)
            await vfs.rename(source, name, place, new, RENAME_NOREPLACE if keep else 0, ME)

        def plain():
            for parent in (directory, other):
                if not stat.S_ISDIR(os.lstat(self.path(parent)).st_mode):
                    raise NotADirectoryError(
                        errno.ENOTDIR, "both parents are walked before any name is looked at"
                    )
            if keep and not os.path.lexists(self.path(directory, name)):
                os.lstat(self.path(directory, name))
            if keep and os.path.lexists(self.path(other, new)):
                raise FileExistsError(errno.EEXIST, "exists")
            os.rename(self.path(directory, name), self.path(other, new))

        self.both(plain, ours())

    @rule(client=st.integers(0, 1), directory=DIRS, name=NAMES, other=DIRS, new=NAMES)
    def link(self, client, directory, name, other, new) -> None:
        async def ours():
            vfs = self.vfs(client)
            attr = await vfs.lookup(await self.find(vfs, directory), name)
            return await vfs.link(attr.inode, await self.find(vfs, other), new, ME)

        def plain():
            found = os.lstat(self.path(directory, name))
            if stat.S_ISDIR(found.st_mode) and stat.S_ISDIR(os.lstat(self.path(other)).st_mode):
                raise PermissionError(
                    errno.EPERM, "whether the new name exists is looked at later here than in the kernel"
                )
            os.link(self.path(directory, name), self.path(other, new), follow_symlinks=False)

        self.both(plain, ours())

    @rule(
        client=st.integers(0, 1),
        directory=DIRS,
        name=NAMES,
        mode=st.sampled_from([0o644, 0o600, 0o755, 0o4755]),
    )
    def chmod(self, client, directory, name, mode) -> None:
        if self.is_symlink(directory, name):
            return

        async def ours():
            vfs = self.vfs(client)
            attr = await vfs.lookup(await self.find(vfs, directory), name)
            await vfs.setattr(attr.inode, mode=mode, caller=ME)

        self.both(lambda: os.chmod(self.path(directory, name), mode), ours())

    @rule(
        client=st.integers(0, 1),
        directory=DIRS,
        name=NAMES,
        atime=st.integers(0, 1 << 40),
        mtime=st.integers(0, 1 << 60),
    )
    def utime(self, client, directory, name, atime, mtime) -> None:
        async def ours():
            vfs = self.vfs(client)
            attr = await vfs.lookup(await self.find(vfs, directory), name)
            return await vfs.setattr(attr.inode, atime_ns=atime, mtime_ns=mtime, caller=ME)

        def plain():
            os.utime(self.path(directory, name), ns=(atime, mtime), follow_symlinks=False)

        _, attr, worked = self.both(plain, ours())
        if worked:
            assert attr.mtime_ns == mtime

    # -- contents --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 6)
    @rule(
        client=st.integers(0, 1),
        directory=DIRS,
        name=NAMES,
        flags=st.sampled_from([0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_CREAT | os.O_TRUNC, os.O_TRUNC]),
    )
    def open_file(self, client, directory, name, flags) -> None:
        self.settle()
        if self.is_symlink(directory, name) or (flags & os.O_TRUNC and self.is_open(directory, name)):
            return

        async def ours():
            vfs = self.vfs(client)
            place = await self.find(vfs, directory)
            if flags & os.O_CREAT:
                return (await vfs.create(place, name, 0o644, os.O_RDWR | flags, ME))[1]
            attr = await vfs.lookup(place, name)
            if stat.S_ISDIR(attr.mode):
                raise IsADirectory
            return await vfs.open(attr.inode, os.O_RDWR | flags, ME)

        descriptor, handle, worked = self.both(
            lambda: os.open(self.path(directory, name), os.O_RDWR | flags, 0o644), ours()
        )
        if worked:
            self.open.append((client, descriptor, handle))

    def is_open(self, directory: tuple[bytes, ...], name: bytes) -> bool:
        try:
            inode = os.lstat(self.path(directory, name)).st_ino
        except OSError:
            return False
        return any(os.fstat(descriptor).st_ino == inode for _, descriptor, _ in self.open)

    def settle(self) -> None:
        """Store all written bytes, so that every client sees them, as after a close."""
        for client, _, handle in self.open:
            self.pool.run(self.vfs(client).flush(handle))

    def alone(self, which: int) -> bool:
        """Whether no other client has the file open: between two writers close-to-open promises nothing."""
        client, descriptor, _ = self.open[which]
        inode = os.fstat(descriptor).st_ino
        return all(other == client or os.fstat(d).st_ino != inode for other, d, _ in self.open)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), offset=OFFSETS, length=LENGTHS, seed=st.integers(0, 255))
    def write(self, which, offset, length, seed) -> None:
        which %= len(self.open)
        if not self.alone(which):
            return
        client, descriptor, handle = self.open[which]
        content = bytes((seed + i * 7) & 255 for i in range(min(length, 256))) * (length // 256 + 1)
        content = content[:length]
        self.both(
            lambda: os.pwrite(descriptor, content, offset),
            self.vfs(client).write(handle, offset, bytearray(content)),
        )

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), offset=OFFSETS, length=LENGTHS)
    def read(self, which, offset, length) -> None:
        which %= len(self.open)
        if not self.alone(which):
            return
        client, descriptor, handle = self.open[which]
        ours = self.vfs(client).read(handle, offset, length)
        expected, found, _ = self.both(lambda: os.pread(descriptor, length, offset), ours)
        assert bytes(found) == expected

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 5),
        places=st.lists(st.tuples(OFFSETS, st.integers(1, 9000)), min_size=1, max_size=6),
    )
    def read_many(self, which, places) -> None:
        which %= len(self.open)
        if not self.alone(which):
            return
        client, descriptor, handle = self.open[which]
        into = bytearray(sum(length for _, length in places))
        lengths = self.pool.run(
            self.vfs(client).read_many([(handle, *place) for place in places], memoryview(into))
        )
        at = 0
        for (offset, length), count in zip(places, lengths, strict=True):
            assert bytes(into[at : at + count]) == os.pread(descriptor, length, offset)
            at += length

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 5),
        offset=OFFSETS,
        count=st.integers(2, 12),
        length=st.sampled_from([4096, 20000, CHUNK]),
    )
    def read_in_sequence(self, which, offset, count, length) -> None:
        for number in range(count):
            self.read(which, offset + number * length, length)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), size=st.one_of(OFFSETS, LENGTHS))
    def truncate(self, which, size) -> None:
        which %= len(self.open)
        if not self.alone(which):
            return
        client, descriptor, handle = self.open[which]
        _, attr, _ = self.both(
            lambda: os.ftruncate(descriptor, size),
            self.vfs(client).setattr(handle.inode, size=size, caller=ME, handle=handle),
        )
        assert attr.size == size

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5))
    def stat_open(self, which) -> None:
        which %= len(self.open)
        if not self.alone(which):
            return
        client, descriptor, handle = self.open[which]
        attr = self.pool.run(self.vfs(client).getattr(handle.inode))
        expected = os.fstat(descriptor)
        assert (attr.size, attr.links, attr.mode) == (expected.st_size, expected.st_nlink, expected.st_mode)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), datasync=st.booleans())
    def fsync(self, which, datasync) -> None:
        client, _, handle = self.open[which % len(self.open)]
        self.pool.run(self.vfs(client).fsync(handle, datasync))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5))
    def close(self, which) -> None:
        client, descriptor, handle = self.open.pop(which % len(self.open))
        os.close(descriptor)
        self.pool.run(self.vfs(client).flush(handle))
        self.pool.run(self.vfs(client).release(handle))

    @rule(client=st.integers(0, 1))
    def background(self, client) -> None:
        self.pool.run(self.vfs(client).run_once())

    # -- the whole tree --------------------------------------------------------------------------------------------------

    @invariant()
    def every_client_sees_the_same_names(self) -> None:
        for client in range(2):
            self.pool.run(self.compare(self.vfs(client), self.top, self.root, contents=False))

    @precondition(lambda self: not self.open)
    @rule(client=st.integers(0, 1))
    def contents_are_the_same(self, client) -> None:
        self.pool.run(self.compare(self.vfs(client), self.top, self.root, contents=True))

    async def compare(self, vfs, inode: int, path: bytes, contents: bool) -> None:
        listing = await vfs.opendir(inode)
        entries, cursor, more = {}, 0, True
        while more:
            part, more = await vfs.readdir(listing, cursor, 2)
            for entry in part:
                assert entry.name not in entries
                entries[entry.name] = entry.attr
                cursor = entry.cursor
        expected = {entry.name: entry for entry in os.scandir(path)}
        assert entries.keys() == expected.keys()
        directory, below = await vfs.getattr(inode), sum(stat.S_ISDIR(attr.mode) for attr in entries.values())
        assert (directory.size, directory.links) == (len(entries), 2 + below)
        for name, attr in entries.items():
            found = expected[name].stat(follow_symlinks=False)
            assert attr.mode == found.st_mode
            if stat.S_ISDIR(attr.mode):
                await self.compare(vfs, attr.inode, os.path.join(path, name), contents)
                continue
            assert attr.links == found.st_nlink
            if stat.S_ISLNK(attr.mode):
                assert attr.size == found.st_size
            elif contents:
                assert attr.size == found.st_size
                handle = await vfs.open(attr.inode, os.O_RDONLY, ME)
                content = whole(os.path.join(path, name))
                at = 0
                while part := content[at : at + 50_000]:
                    assert bytes(await vfs.read(handle, at, 50_000)) == part
                    at += len(part)
                assert not len(await vfs.read(handle, at, 10))
                await vfs.release(handle)


def whole(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


SUPPRESSED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TestNamespace = NamespaceMachine.TestCase
TestNamespace.settings = settings(
    max_examples=6, stateful_step_count=40, deadline=None, suppress_health_check=SUPPRESSED, print_blob=True
)


class OverRealStores(NamespaceMachine):
    make_store = staticmethod(InProcessPool.open_real_store)


TestNamespaceOverRealStores = OverRealStores.TestCase
TestNamespaceOverRealStores.settings = settings(TestNamespace.settings, max_examples=4)


class OverThreeShards(NamespaceMachine):
    """Most directories are on another shard than the directories below them."""

    shards = 3

    def teardown(self) -> None:
        async def sound() -> None:
            checkup = FsckReport()
            await check_metadata(self.pool.clients[0], checkup)
            assert not checkup.problems

        try:
            self.pool.run(sound())
        finally:
            super().teardown()


class InAVolume(NamespaceMachine):
    """All in a volume with quotas that are not reached: nothing else differs, and the counted use is the real one."""

    has_wide = False

    def __init__(self) -> None:
        super().__init__()
        self.volumes = AsyncFileSystem(self.pool.clients[0], Caller(0, 0)).volumes
        self.top = self.pool.run(self.volumes.create("v", bytes_max=1 << 50, files_max=1 << 20)).inode
        os.chmod(self.root, 0o777)

    def teardown(self) -> None:
        async def sound() -> None:
            for _, _, handle in self.open:
                await handle_closed(handle)
            inodes = {
                (found.st_dev, found.st_ino): found
                for path, names, files in os.walk(self.root)
                for name in names + files
                for found in [os.lstat(os.path.join(path, name))]
            }
            there = len(inodes), sum(one.st_size for one in inodes.values() if stat.S_ISREG(one.st_mode))
            for _ in range(200):
                for client in self.pool.clients:
                    await client.vfs.meta.release_now(self.top)
                counted = await self.volumes.show("v")
                if (counted.files_used, counted.bytes_used) == there:
                    break
                await asyncio.sleep(0.01)
            assert (counted.files_used, counted.bytes_used) == there
            checkup = FsckReport()
            await check_metadata(self.pool.clients[0], checkup)
            assert not checkup.problems

        async def handle_closed(handle) -> None:
            client = next(client for client, _, one in self.open if one is handle)
            await self.vfs(client).release(handle)

        try:
            self.pool.run(sound())
        finally:
            super().teardown()


TestNamespaceInAVolume = InAVolume.TestCase
TestNamespaceInAVolume.settings = settings(TestNamespace.settings)


@pytest.mark.few(0)
class TestNamespaceWide(NamespaceMachine.TestCase):
    settings = settings(TestNamespace.settings, max_examples=12)


@pytest.mark.few(0)
class TestNamespaceOverRealStoresWide(OverRealStores.TestCase):
    settings = settings(TestNamespace.settings, max_examples=8)


@pytest.mark.few(0)
class TestNamespaceInAVolumeWide(InAVolume.TestCase):
    settings = settings(TestNamespace.settings, max_examples=12)


@pytest.mark.t3  # a minute
class TestNamespaceOverThreeShards(OverThreeShards.TestCase):
    settings = settings(TestNamespace.settings, max_examples=12)


@pytest.mark.soak
class TestNamespaceOverThreeShardsLong(OverThreeShards.TestCase):
    settings = settings(
        max_examples=700,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=SUPPRESSED,
        print_blob=True,
    )


@pytest.mark.soak
class TestNamespaceLong(NamespaceMachine.TestCase):
    settings = settings(
        max_examples=1500,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=SUPPRESSED,
        print_blob=True,
    )
