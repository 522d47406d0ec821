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

from nvpool.core.errors import InvalidRequest
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, SHARED, UNLOCKED
from nvpool.fuse.ops.kernel_cache import CachedOps

MODES = {fcntl.F_RDLCK: SHARED, fcntl.F_WRLCK: EXCLUSIVE, fcntl.F_UNLCK: UNLOCKED}
KINDS = {mode: kind for kind, mode in MODES.items()}

ABSENT_MAX = 1 << 16
"""Most absent names that the kernel may cache, if it caches them at all."""


class LockOps(CachedOps):
    def __init__(self, vfs, options, clock) -> None:
        super().__init__(vfs, options, clock)
        # name -> when the kernel was given it, oldest first
        self._absent: dict[tuple[int, bytes], float] = {}
        # inode -> until this is done the kernel may have old pages
        self._dropping: dict[int, asyncio.Task] = {}
        self._inherited_until_s = 0.0  # until then the kernel may cache absent names from the predecessor

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
            self.published.take_back(file.inode)
            await self._to_the_end(self._revalidate(file, changed))

    async def flock(self, handle: int, owner: int, kind: int, pid: int, wait: bool) -> None:
        file = self._files[handle]
        changed = await self._vfs.flock(file, owner, _mode(kind), pid, wait=wait)
        if kind != fcntl.F_UNLCK:
            self.published.take_back(file.inode)
            await self._to_the_end(self._revalidate(file, changed))

    async def _to_the_end(self, looking: Coroutine) -> None:
        """Complete `looking` even if the caller is interrupted.

        The caller has the lock now, so the reply must say so.
        """
        task = self._own(looking)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise
        task.result()

    async def _revalidate(self, file, changed: bool) -> None:
        if self._sent_changes.get(file.inode) != file.attr.change:
            self.invalidate_attributes(file.inode)
        wait_s = self._inherited_until_s - self.clock.boottime_s()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        self._drop_old_absent()
        absent, self._absent = self._absent, {}
        if absent or changed:
            work = self._own(self.invalidate(absent, (file.inode,) if changed else ()))
            if changed:
                self._dropping[file.inode] = work
            await work
            if self._dropping.get(file.inode) is work:
                del self._dropping[file.inode]
        elif file.inode in self._dropping:  # for another process of this node, which got its lock just before
            await asyncio.wait((self._dropping[file.inode],))

    def _record_absent(self, parent: int, name: bytes) -> bool:
        """Record that the kernel learns that a name is absent. False: it must not cache that."""
        if not self.options.negative_timeout_s:
            return True
        self._drop_old_absent()
        if len(self._absent) >= ABSENT_MAX:
            return False
        self._absent.pop((parent, name), None)
        self._absent[parent, name] = self.clock.boottime_s()
        return True

    def _drop_old_absent(self) -> None:
        oldest_s = self.clock.boottime_s() - self.options.negative_timeout_s
        absent = self._absent
        while absent and absent[place := next(iter(absent))] <= oldest_s:
            del absent[place]


def _mode(kind: int) -> int:
    if kind not in MODES:
        raise InvalidRequest(f"there is no lock of type {kind}")
    return MODES[kind]
