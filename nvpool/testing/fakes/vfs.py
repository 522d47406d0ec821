"""In-memory implementation of the client's Vfs, for the FUSE adapter without a pool.

Tests of `fuse/ops/operations` run on it without a kernel. `bench/fuse_floor` mounts it, to measure the cost
of FUSE and Python alone. It keeps the contract of `client/vfs` (names, errors, attributes, unlinked open
files, stable cursors) and nothing else: no permissions beyond the kernel's checks, no durability, one node.
"""

from __future__ import annotations

import asyncio
import os
import stat
from typing import NamedTuple

from nvpool.client.state.vfs_types import (
    KEEP_SIZE,
    NOW,
    PUNCH_HOLE,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    XATTR_CREATE,
    XATTR_REPLACE,
    ZERO_RANGE,
    StatFs,
)
from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.ids import ROOT_INODE
from nvpool.core.posix.byte_range_locks import LAST_BYTE, RECORD, UNLOCKED, WHOLE, LockRange
from nvpool.core.units import BLOCK_BYTES, GIB, NAME_BYTES_MAX, SYMLINK_BYTES_MAX, clamp_time_ns
from nvpool.meta.state.lock_table import LockTable, Owner, Waiter
from nvpool.rpc.messages.direntries import DirectoryPage, pack_entry
from nvpool.rpc.v1.meta_pb2 import Attr

HAS_XATTRS = 1
FILE_BYTES_MAX = GIB
"""Files are limited because they are in memory."""


class _Node:
    __slots__ = ("attr", "content", "names", "order", "xattrs", "handles")

    def __init__(self, attr: Attr) -> None:
        self.attr = attr
        self.content: bytes | bytearray = bytearray() if stat.S_ISREG(attr.mode) else b""
        self.names: dict[bytes, tuple[int, int]] = {}  # name -> (inode, cursor)
        self.order: dict[int, bytes] = {}  # cursor -> name, in order
        self.xattrs: dict[bytes, bytes] = {}
        self.handles = 0


class FakeFileHandle:
    __slots__ = ("inode", "flags", "attr", "node", "file", "flocks", "number")  # as in client/state/vfs_types

    def __init__(self, node: _Node, flags: int) -> None:
        self.inode = node.attr.inode
        self.flags = flags
        self.attr = node.attr
        self.node = self.file = node
        self.flocks: set[int] = set()

    @property
    def size(self) -> int:
        return len(self.node.content)


class FakeDirHandle(NamedTuple):
    inode: int


class MemoryVfs:
    squashes_root = False

    def __init__(self, clock=SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.lock_table = LockTable(clock, 0.0)
        self.lock_table.on_turn = self._give_turn
        self._turns: dict[int, asyncio.Future] = {}
        self._last_inode = ROOT_INODE
        self._last_cursor = 3
        now = clock.wall_ns()
        self.nodes = {
            ROOT_INODE: _Node(
                Attr(
                    inode=ROOT_INODE,
                    mode=stat.S_IFDIR | 0o755,
                    links=2,
                    parent=ROOT_INODE,
                    atime_ns=now,
                    mtime_ns=now,
                    ctime_ns=now,
                )
            )
        }

    def lease_until_s(self, inode: int) -> float:
        return float("inf")

    def is_open(self, inode: int) -> bool:
        return inode in self.nodes and self.nodes[inode].handles > 0

    def begin_create(self, *_) -> None:
        """Nothing to wait for."""

    begin_unlink = begin_flush = begin_create

    def is_flushed(self, handle: FakeFileHandle) -> bool:
        return False

    def hold_reads(self) -> None:
        """Nothing to send."""

    def send_reads(self) -> None:
        pass

    # -- shared helpers ----------------------------------------------------------------------------------------------

    def _node(self, inode: int) -> _Node:
        try:
            return self.nodes[inode]
        except KeyError:
            raise errors.NotFound() from None

    def _directory(self, inode: int) -> _Node:
        node = self._node(inode)
        if not stat.S_ISDIR(node.attr.mode):
            raise errors.NotADirectory()
        return node

    def _child(self, parent: _Node, name: bytes) -> _Node:
        if len(name) > NAME_BYTES_MAX:
            raise errors.NameTooLong()
        try:
            return self.nodes[parent.names[name][0]]
        except KeyError:
            raise errors.NotFound() from None

    def touch(self, *nodes: _Node, content: bool = True) -> None:
        now = self._clock.wall_ns()
        for node in nodes:
            node.attr.ctime_ns = now
            node.attr.change += 1
            if content:
                node.attr.mtime_ns = now

    def _add(self, parent: _Node, name: bytes, inode: int) -> None:
        self._last_cursor += 1
        parent.names[name] = (inode, self._last_cursor)
        parent.order[self._last_cursor] = name
        self.touch(parent)

    def drop_name(self, parent: _Node, name: bytes) -> None:
        del parent.order[parent.names.pop(name)[1]]
        self.touch(parent)

    def _birth(self, parent_inode: int, name: bytes, mode: int, caller, rdev: int = 0) -> _Node:
        parent = self._directory(parent_inode)
        if len(name) > NAME_BYTES_MAX:
            raise errors.NameTooLong()
        if name in parent.names:
            raise errors.AlreadyExists()
        if not parent.attr.links:
            raise errors.NotFound()
        self._last_inode += 1
        now = self._clock.wall_ns()
        gid = caller.gid
        if not stat.S_ISLNK(mode):
            mode ^= caller.masked(mode)
        if parent.attr.mode & stat.S_ISGID:
            gid = parent.attr.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        directory = stat.S_ISDIR(mode)
        node = _Node(
            Attr(
                inode=self._last_inode,
                mode=mode,
                links=2 if directory else 1,
                uid=caller.uid,
                gid=gid,
                rdev=rdev,
                atime_ns=now,
                mtime_ns=now,
                ctime_ns=now,
                chunk_bits=20,
                table=1,
                parent=parent_inode if directory else 0,
            )
        )
        self.nodes[self._last_inode] = node
        self._add(parent, name, self._last_inode)
        if directory:
            parent.attr.links += 1
        return node

    def _lose_name(self, node: _Node, parent: _Node) -> None:
        if stat.S_ISDIR(node.attr.mode):
            node.attr.links = 0
            parent.attr.links -= 1
        else:
            node.attr.links -= 1
            self.touch(node, content=False)
        self._collect(node)

    def _collect(self, node: _Node) -> None:
        if not node.attr.links and not node.handles:
            self.nodes.pop(node.attr.inode, None)

    # -- names -------------------------------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Attr:
        return self._child(self._directory(parent), name).attr

    def lookup_now(self, parent: int, name: bytes) -> None:
        return None  # here and below None: benchmarks on this class measure the slow path

    def begin_lookup(self, parent: int, name: bytes) -> None:
        return None

    def getattr_now(self, inode: int) -> None:
        return None

    async def getattr(self, inode: int) -> Attr:
        return self._node(inode).attr

    async def birth_ns(self, inode: int) -> int:
        return 0

    async def create_unnamed(self, parent: int, mode: int, flags: int, caller) -> tuple[Attr, FakeFileHandle]:
        raise errors.NotSupported("no files without names")

    async def setattr(
        self,
        inode: int,
        *,
        mode=None,
        uid=None,
        gid=None,
        size=None,
        atime_ns=None,
        mtime_ns=None,
        ctime_ns=None,
        caller,
        handle=None,
    ) -> Attr:
        node = self._node(inode)
        attr = node.attr
        if size is not None:
            self._resize(node, size)
        if mode is not None:
            attr.mode = stat.S_IFMT(attr.mode) | stat.S_IMODE(mode)
        if uid is not None:
            attr.uid = uid
        if gid is not None:
            attr.gid = gid
        self.touch(node, content=size is not None)
        if atime_ns is not None:
            attr.atime_ns = self._clock.wall_ns() if atime_ns == NOW else clamp_time_ns(atime_ns)
        if mtime_ns is not None:
            attr.mtime_ns = self._clock.wall_ns() if mtime_ns == NOW else clamp_time_ns(mtime_ns)
        return attr

    @staticmethod
    def _resize(node: _Node, size: int) -> None:
        if size > FILE_BYTES_MAX:
            raise errors.FileTooLarge()
        if size < len(node.content):
            del node.content[size:]
        else:
            node.content.extend(bytes(size - len(node.content)))
        node.attr.size = size
        node.attr.blocks = -(-size // 512)

    async def readlink(self, inode: int) -> bytes:
        return bytes(self._node(inode).content)

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller) -> Attr:
        return self._birth(parent, name, mode, caller, rdev).attr

    async def mkdir(self, parent: int, name: bytes, mode: int, caller, wide: bool = False) -> Attr:
        return self._birth(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller).attr

    async def symlink(self, parent: int, name: bytes, target: bytes, caller) -> Attr:
        if not target or len(target) > SYMLINK_BYTES_MAX:
            raise errors.NameTooLong()
        node = self._birth(parent, name, stat.S_IFLNK | 0o777, caller)
        node.content = target
        node.attr.size = len(target)
        return node.attr

    async def link(self, inode: int, parent: int, name: bytes, caller) -> Attr:
        node = self._node(inode)
        directory = self._directory(parent)
        if len(name) > NAME_BYTES_MAX:
            raise errors.NameTooLong()
        if stat.S_ISDIR(node.attr.mode):
            raise errors.NotPermitted()
        if name in directory.names:
            raise errors.AlreadyExists()
        self._add(directory, name, inode)
        node.attr.links += 1
        self.touch(node, content=False)
        return node.attr

    async def unlink(self, parent: int, name: bytes, caller) -> None:
        directory = self._directory(parent)
        node = self._child(directory, name)
        if stat.S_ISDIR(node.attr.mode):
            raise errors.IsADirectory()
        self.drop_name(directory, name)
        self._lose_name(node, directory)

    async def rmdir(self, parent: int, name: bytes, caller) -> None:
        directory = self._directory(parent)
        node = self._child(directory, name)
        if not stat.S_ISDIR(node.attr.mode):
            raise errors.NotADirectory()
        if node.names:
            raise errors.DirectoryNotEmpty()
        self.drop_name(directory, name)
        self._lose_name(node, directory)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller
    ) -> tuple[int, int]:
        old, new = self._directory(parent), self._directory(new_parent)
        moved = self._child(old, name)
        there = self.nodes[new.names[new_name][0]] if new_name in new.names else None
        if len(new_name) > NAME_BYTES_MAX:
            raise errors.NameTooLong()
        if there is None and flags & RENAME_EXCHANGE:
            raise errors.NotFound()
        if there is not None and flags & RENAME_NOREPLACE:
            raise errors.AlreadyExists()
        inodes = moved.attr.inode, there.attr.inode if there is not None else 0
        if there is moved:
            return inodes
        is_directory = stat.S_ISDIR(moved.attr.mode)
        if is_directory:
            above = new_parent
            while above != ROOT_INODE:
                if above == moved.attr.inode:
                    raise errors.WouldLoop()
                above = self.nodes[above].attr.parent
        if flags & RENAME_EXCHANGE:
            for node, before, after in ((moved, old, new), (there, new, old)):
                if stat.S_ISDIR(node.attr.mode):
                    node.attr.parent = after.attr.inode
                    before.attr.links -= 1
                    after.attr.links += 1
            old.names[name], new.names[new_name] = (
                (there.attr.inode, old.names[name][1]),
                (moved.attr.inode, new.names[new_name][1]),
            )
            self.touch(old, new)
            self.touch(moved, there, content=False)
            return inodes
        if there is not None:
            if stat.S_ISDIR(there.attr.mode):
                if not is_directory:
                    raise errors.IsADirectory()
                if there.names:
                    raise errors.DirectoryNotEmpty()
            elif is_directory:
                raise errors.NotADirectory()
            self.drop_name(new, new_name)
            self._lose_name(there, new)
        self.drop_name(old, name)
        self._add(new, new_name, moved.attr.inode)
        if is_directory:
            moved.attr.parent = new_parent
            old.attr.links -= 1
            new.attr.links += 1
        self.touch(moved, content=False)
        return inodes

    # -- file data ---------------------------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, caller) -> FakeFileHandle:
        node = self._node(inode)
        if stat.S_ISDIR(node.attr.mode):
            raise errors.IsADirectory()
        if flags & os.O_TRUNC:
            self._resize(node, 0)
            self.touch(node)
        node.handles += 1
        return FakeFileHandle(node, flags)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller
    ) -> tuple[Attr, FakeFileHandle]:
        directory = self._directory(parent)
        if name in directory.names and not flags & os.O_EXCL:
            handle = await self.open(directory.names[name][0], flags, caller)
            return handle.node.attr, handle
        node = self._birth(parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller)
        node.handles = 1
        return node.attr, FakeFileHandle(node, flags)

    def open_now(self, inode: int, flags: int) -> None:
        return None

    def read_now(self, handle: FakeFileHandle, offset: int, size: int) -> None:
        return None

    def begin_read(self, handle: FakeFileHandle, offset: int, size: int) -> None:
        return None

    async def read(self, handle: FakeFileHandle, offset: int, size: int) -> bytes | memoryview:
        content = handle.node.content
        return bytes(memoryview(content)[offset : offset + size])

    def write_now(self, handle: FakeFileHandle, offset: int, buffer, unique: int = 0) -> bool:
        return False

    def size_here(self, inode: int) -> int | None:
        node = self.nodes.get(inode)
        return len(node.content) if node is not None and node.handles else None

    async def append(self, handle: FakeFileHandle, buffer) -> int:
        place = handle.size
        await self.write(handle, place, buffer, False)
        return place

    async def write(self, handle: FakeFileHandle, offset: int, buffer, append: bool | None = None) -> int:
        node = handle.node
        if handle.flags & os.O_APPEND and append is not False:
            offset = len(node.content)
        end = offset + len(buffer)
        if end > len(node.content):
            self._resize(node, end)
        node.content[offset:end] = buffer
        self.touch(node)
        return len(buffer)

    async def fallocate(self, handle: FakeFileHandle, offset: int, length: int, mode: int) -> None:
        if mode & ~(KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE) or (
            mode & PUNCH_HOLE and mode != PUNCH_HOLE | KEEP_SIZE
        ):
            raise errors.NotSupported()
        if offset < 0 or length <= 0:
            raise errors.InvalidRequest()
        node, end = handle.node, offset + length
        if not mode & KEEP_SIZE and end > len(node.content):
            self._resize(node, end)
        if mode & (PUNCH_HOLE | ZERO_RANGE):
            end = min(end, len(node.content))
            node.content[offset:end] = bytes(max(0, end - offset))
        self.touch(node)

    async def seek(self, handle: FakeFileHandle, offset: int, whence: int) -> int:
        """Report blocks of zeros as holes."""
        content = handle.node.content
        if not 0 <= offset < len(content):
            raise errors.BeyondData()
        for place in range(offset - offset % BLOCK_BYTES, len(content), BLOCK_BYTES):
            if any(content[place : place + BLOCK_BYTES]) == (whence == os.SEEK_DATA):
                return max(place, offset)
        if whence == os.SEEK_DATA:
            raise errors.BeyondData()
        return len(content)

    async def copy_range(
        self, source: FakeFileHandle, offset: int, target: FakeFileHandle, to: int, length: int
    ) -> int:
        if source.node is target.node and abs(offset - to) < length:
            raise errors.InvalidRequest()
        data = bytes(memoryview(source.node.content)[offset : offset + length])
        return await self.write(target, to, data) if data else 0

    async def flush(self, handle: FakeFileHandle, owner: int | None = None) -> None:
        if owner is not None and handle.inode in self.lock_table.files:
            await self.setlk(handle, owner, 0, LAST_BYTE, UNLOCKED)

    async def fsync(self, handle: FakeFileHandle, datasync: bool) -> None:
        pass

    def is_locked(self, inode: int) -> bool:
        return inode in self.lock_table.files

    async def getlk(
        self, handle: FakeFileHandle, owner: int, start: int, end: int, mode: int
    ) -> LockRange | None:
        found = next(
            self.lock_table.in_the_way(handle.inode, Owner(RECORD, 0, owner), start, end, mode), None
        )
        return found.span if found else None

    async def setlk(
        self,
        handle: FakeFileHandle,
        owner: int,
        start: int,
        end: int,
        mode: int,
        pid: int = 0,
        *,
        wait: bool = False,
    ) -> bool:
        return await self._lock(handle, Owner(RECORD, 0, owner), start, end, mode, pid, wait)

    async def flock(
        self, handle: FakeFileHandle, owner: int, mode: int, pid: int = 0, *, wait: bool = False
    ) -> bool:
        handle.flocks.add(owner)
        return await self._lock(handle, Owner(WHOLE, 0, owner), 0, LAST_BYTE, mode, pid, wait)

    async def _lock(
        self, handle: FakeFileHandle, owner: Owner, start: int, end: int, mode: int, pid: int, wait: bool
    ) -> bool:
        ticket = 0
        try:
            while True:
                step = self.lock_table.decide(handle.inode, owner, start, end, mode, pid, wait, ticket)
                self.lock_table.commit(step)
                if step.granted:
                    return False
                if not wait:
                    raise errors.WouldBlock()
                ticket = step.waiter.ticket
                turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
                await turn
        finally:
            self._turns.pop(ticket, None)
            waiter = self.lock_table.waiter(0, ticket)
            if waiter is not None:
                self.lock_table.give_up(waiter)

    def _give_turn(self, waiter: Waiter) -> None:
        if waiter.ticket in self._turns and not self._turns[waiter.ticket].done():
            self._turns[waiter.ticket].set_result(None)

    def release_now(self, handle: FakeFileHandle) -> bool:
        if handle.flocks:
            return False
        handle.node.handles -= 1
        self._collect(handle.node)
        return True

    async def release(self, handle: FakeFileHandle) -> None:
        for owner in list(handle.flocks):
            await self.flock(handle, owner, UNLOCKED)
        handle.node.handles -= 1
        self._collect(handle.node)

    # -- directories -------------------------------------------------------------------------------------------------

    async def opendir(self, inode: int) -> FakeDirHandle:
        self._directory(inode)
        return FakeDirHandle(inode)

    async def readdir(
        self, handle: FakeDirHandle, cursor: int, limit: int, answered=None
    ) -> tuple[DirectoryPage, bool]:
        node = self._directory(handle.inode)
        behind = [(place, name) for place, name in node.order.items() if place > cursor]
        more = len(behind) > limit
        if answered is not None:
            answered(behind[limit - 1][0] if more else None)
        return DirectoryPage(
            b"".join(
                [
                    pack_entry(place, self.nodes[node.names[name][0]].attr, False, name)
                    for place, name in behind[:limit]
                ]
            )
        ), more

    def outdated(self, inodes: list[int], since_s: float) -> set[int]:
        return set()

    def unpromised(self, listed: DirectoryPage) -> set[int]:
        return set()

    def name_cover(self, parent: int, name: bytes, inode: int) -> int:
        return inode

    def known_attr(self, inode: int) -> None:
        return None

    async def releasedir(self, handle: FakeDirHandle) -> None:
        pass

    async def fsyncdir(self, inode: int) -> None:
        pass

    # -- other operations --------------------------------------------------------------------------------------------

    async def statfs(self, inode: int = ROOT_INODE) -> StatFs:
        return StatFs(1 << 30, 1 << 29, 1 << 29, 4096, 1 << 32, (1 << 32) - len(self.nodes), NAME_BYTES_MAX)

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        try:
            return self._node(inode).xattrs[name]
        except KeyError:
            raise errors.NoAttribute() from None

    async def setxattr(self, inode: int, name: bytes, value: bytes, flags: int, caller) -> None:
        if name.startswith(b"system."):
            raise errors.NotSupported("no access control lists")
        node = self._node(inode)
        if flags & XATTR_CREATE and name in node.xattrs:
            raise errors.AlreadyExists()
        if flags & XATTR_REPLACE and name not in node.xattrs:
            raise errors.NoAttribute()
        node.xattrs[name] = value
        node.attr.flags |= HAS_XATTRS
        self.touch(node, content=False)

    async def listxattr(self, inode: int) -> list[bytes]:
        return list(self._node(inode).xattrs)

    async def removexattr(self, inode: int, name: bytes, caller) -> None:
        node = self._node(inode)
        if node.xattrs.pop(name, None) is None:
            raise errors.NoAttribute()
        if not node.xattrs:
            node.attr.flags &= ~HAS_XATTRS
        self.touch(node, content=False)

    async def access(self, inode: int, mask: int, caller) -> None:
        self._node(inode)
