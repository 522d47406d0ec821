"""File locks: a part of `fuse/ops/operations`.

A lock is a point of consistency for the kernel too. Before the lock request is answered, the kernel drops
what it may have cached before the last holder released the lock: attributes (the size!), pages if another
client has changed the file, and absent names, because a program that gets a lock checks whether a journal
exists. The kernel keeps cached names of existing files, for the usual second.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Coroutine
from typing import Any

from nvpool.client.state.vfs_types import FileHandle
from nvpool.core.clock import Clock
from nvpool.core.errors import InvalidRequest
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, SHARED, UNLOCKED
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks, Place
from nvpool.fuse.ops.kernel_cache.options import FuseOptions
from nvpool.fuse.ops.open_files import OpenFiles
from nvpool.fuse.ops.read_worker_files import PublishedFiles

MODES = {fcntl.F_RDLCK: SHARED, fcntl.F_WRLCK: EXCLUSIVE, fcntl.F_UNLCK: UNLOCKED}
KINDS = {mode: kind for kind, mode in MODES.items()}

ABSENT_MAX = 1 << 16
"""Most absent names that the kernel may cache, if it caches them at all."""


class AbsentNames:
    """Names that the kernel may cache as absent, for options.negative_timeout_s."""

    def __init__(self, options: FuseOptions, clock: Clock) -> None:
        self._timeout_s = options.negative_timeout_s
        self._clock = clock
        # name -> when the kernel was given it, oldest first
        self._given_s: dict[Place, float] = {}
        self._inherited_until_s = 0.0  # until then the kernel may cache absent names from the predecessor

    def __contains__(self, place: Place) -> bool:
        return place in self._given_s

    def record(self, parent: int, name: bytes) -> bool:
        """Record that the kernel learns that a name is absent. False: it must not cache that."""
        if not self._timeout_s:
            return True
        self._drop_old()
        if len(self._given_s) >= ABSENT_MAX:
            return False
        self._given_s.pop((parent, name), None)
        self._given_s[parent, name] = self._clock.boottime_s()
        return True

    def take_all(self) -> dict[Place, float]:
        """Return all absent names, and remove them from the record: the caller invalidates them."""
        self._drop_old()
        given, self._given_s = self._given_s, {}
        return given

    def inherit(self) -> None:
        """Note that until now a predecessor gave the kernel absent names, which are unknown here."""
        self._inherited_until_s = self._clock.boottime_s() + self._timeout_s

    @property
    def inherited_for_s(self) -> float:
        """For how long the kernel may still cache absent names from a predecessor; not positive: no more."""
        return self._inherited_until_s - self._clock.boottime_s()

    def _drop_old(self) -> None:
        oldest_s = self._clock.boottime_s() - self._timeout_s
        given = self._given_s
        while given and given[place := next(iter(given))] <= oldest_s:
            del given[place]


class LockRequests:
    """Lock requests of one mount."""

    def __init__(
        self,
        vfs: Any,
        files: OpenFiles,
        names: CachedNames,
        absent: AbsentNames,
        published: PublishedFiles,
        notices: KernelNotices,
        tasks: OwnedTasks,
    ) -> None:
        self._vfs = vfs
        self._files = files.by_handle
        self._names = names
        self._absent = absent
        self._published = published
        self._notices = notices
        self._tasks = tasks
        # inode -> until this is done the kernel may have old pages
        self._dropping: dict[int, asyncio.Task[None]] = {}

    async def getlk(
        self, handle: int, owner: int, start: int, end: int, kind: int, pid: int
    ) -> tuple[int, int, int, int]:
        """Query a conflicting lock: (kind, start, end, pid).

        kind is F_UNLCK if there is none; pid is 0 if the lock belongs to another node.
        """
        found = await self._vfs.getlk(self._files[handle], owner, start, end, _mode(kind))
        return (
            (KINDS[found.mode], found.start, found.end, found.pid)
            if found
            else (fcntl.F_UNLCK, start, end, pid)
        )

    async def setlk(
        self, handle: int, owner: int, start: int, end: int, kind: int, pid: int, wait: bool
    ) -> None:
        """Set a lock of fcntl(2) on the bytes start to end, both included.

        If cancelled while waiting, nothing changes.
        """
        file = self._files[handle]
        changed = await self._vfs.setlk(file, owner, start, end, _mode(kind), pid, wait=wait)
        if kind != fcntl.F_UNLCK:
            self._published.take_back(file.inode)
            await self._to_the_end(self._revalidate(file, changed))

    async def flock(self, handle: int, owner: int, kind: int, pid: int, wait: bool) -> None:
        """Set a lock of flock(2), as `setlk` does."""
        file = self._files[handle]
        changed = await self._vfs.flock(file, owner, _mode(kind), pid, wait=wait)
        if kind != fcntl.F_UNLCK:
            self._published.take_back(file.inode)
            await self._to_the_end(self._revalidate(file, changed))

    async def _to_the_end(self, looking: Coroutine[Any, Any, None]) -> None:
        """Complete `looking` even if the caller is interrupted.

        The caller has the lock now, so the reply must say so.
        """
        task = self._tasks.start(looking)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise
        task.result()

    async def _revalidate(self, file: FileHandle, changed: bool) -> None:
        if self._names.sent_changes.get(file.inode) != file.attr.change:
            self._notices.invalidate_attributes(file.inode)
        wait_s = self._absent.inherited_for_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        absent = self._absent.take_all()
        if absent or changed:
            work = self._tasks.start(self._notices.invalidate(absent, (file.inode,) if changed else ()))
            if changed:
                self._dropping[file.inode] = work
            await work
            if self._dropping.get(file.inode) is work:
                del self._dropping[file.inode]
        elif file.inode in self._dropping:  # for another process of this node, which got its lock just before
            await asyncio.wait((self._dropping[file.inode],))


def _mode(kind: int) -> int:
    if kind not in MODES:
        raise InvalidRequest(f"there is no lock of type {kind}")
    return MODES[kind]
