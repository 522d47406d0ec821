"""What the kernel's requests for locks mean: a part of `fuse/ops/operations`, where the rest of a request's meaning is.

A lock is a moment of consistency for the kernel too. Before it is answered the kernel loses what it may have learned before
the last holder gave the lock back: attributes (the size!), pages where somebody else has changed the file, and the absence of
names, since who has a lock looks whether a journal is there. It keeps names that it has seen, for the usual second.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Coroutine

from nvpool.core.errors import InvalidRequest
from nvpool.core.posix.byte_ranges import EXCLUSIVE, SHARED, UNLOCKED
from nvpool.fuse.ops.kernel_cache import CachedOps

MODES = {fcntl.F_RDLCK: SHARED, fcntl.F_WRLCK: EXCLUSIVE, fcntl.F_UNLCK: UNLOCKED}
KINDS = {mode: kind for kind, mode in MODES.items()}

ABSENT_MAX = 1 << 16
"""Names of which the kernel may believe that they do not exist, where it is to keep those at all: beyond it, no more."""


class LockOps(CachedOps):
    def __init__(self, vfs, options, clock) -> None:
        super().__init__(vfs, options, clock)
        self._absent: dict[tuple[int, bytes], float] = {}  # name -> when it was told, oldest first
        self._dropping: dict[int, asyncio.Task] = {}  # inode -> until this is done the kernel may have pages of before
        self._told_until_s = 0.0  # until then the kernel may remember what the process before us has told it

    async def getlk(self, handle: int, owner: int, start: int, end: int, kind: int, pid: int) -> tuple[int, int, int, int]:
        """(kind, start, end, pid) of a lock in the way; kind F_UNLCK where there is none, pid 0 where it is another node's."""
        found = await self._vfs.getlk(self._files[handle], owner, start, end, _mode(kind))
        return (KINDS[found.mode], found.start, found.end, found.pid) if found else (fcntl.F_UNLCK, start, end, pid)

    async def setlk(self, handle: int, owner: int, start: int, end: int, kind: int, pid: int, wait: bool) -> None:
        """A lock of fcntl(2) on the bytes start to end, both included. Cancelled while it waits, nothing has changed."""
        file = self._files[handle]
        changed = await self._vfs.setlk(file, owner, start, end, _mode(kind), pid, wait=wait)
        if kind != fcntl.F_UNLCK:
            self.published.take_back(file.inode)
            await self._to_the_end(self._look_anew(file, changed))

    async def flock(self, handle: int, owner: int, kind: int, pid: int, wait: bool) -> None:
        file = self._files[handle]
        changed = await self._vfs.flock(file, owner, _mode(kind), pid, wait=wait)
        if kind != fcntl.F_UNLCK:
            self.published.take_back(file.inode)
            await self._to_the_end(self._look_anew(file, changed))

    async def _to_the_end(self, looking: Coroutine) -> None:
        """Also when the caller is interrupted meanwhile: he has the lock now, and must not be told anything else."""
        task = self._own(looking)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise
        task.result()

    async def _look_anew(self, file, changed: bool) -> None:
        if self._told.get(file.inode) != file.attr.change:
            self.invalidate_attributes(file.inode)
        wait_s = self._told_until_s - self._clock.boottime_s()
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
        elif file.inode in self._dropping:  # for another process of this node, that had its lock a moment before
            await asyncio.wait((self._dropping[file.inode],))

    def _tell_absent(self, parent: int, name: bytes) -> bool:
        """Note that the kernel is told of a name that does not exist. False where it must not remember that."""
        if not self.options.negative_timeout_s:
            return True
        self._drop_old_absent()
        if len(self._absent) >= ABSENT_MAX:
            return False
        self._absent.pop((parent, name), None)
        self._absent[parent, name] = self._clock.boottime_s()
        return True

    def _drop_old_absent(self) -> None:
        oldest_s = self._clock.boottime_s() - self.options.negative_timeout_s
        absent = self._absent
        while absent and absent[place := next(iter(absent))] <= oldest_s:
            del absent[place]


def _mode(kind: int) -> int:
    if kind not in MODES:
        raise InvalidRequest(f"there is no lock of type {kind}")
    return MODES[kind]
