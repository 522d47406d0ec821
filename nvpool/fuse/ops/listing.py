"""Directory listings: a part of `fuse/ops/operations`.

'.' and '..' are added here. Entries are read ahead in batches, and used only while they are young and nothing
was changed through this mount since. The kernel caches the attributes of a listing, so they must not be older
than those that it already has.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container
from typing import Any

from nvpool.client.state.vfs_types import DirHandle
from nvpool.core.clock import Clock
from nvpool.core.errors import DirectoryGone, NotFound
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.notices import OwnedTasks
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.rpc.messages.direntries import NOTHING_LISTED, DirectoryPage
from nvpool.rpc.messages.meta_messages import Attr

S_IFDIR = 0o040000

LIST_BATCH = 512
"""Entries in one request: a message of 60 KiB.

The kernel takes 20 of them (4 KiB buffer) to 390 (64 KiB) in one of its requests.
"""

SEEK_BATCH = 32
"""Entries in the first request after a seek; each batch that follows in order is four times as large."""

AHEAD_MAX = 2
"""Batches read ahead of the kernel: the shard makes one while another is on its way, or waits here."""


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a read-ahead task, so that asyncio does not log it.

    A reader that waits for the batch gets the error from the task.
    """
    if not task.cancelled():
        task.exception()


def _add_each(
    add: Callable[[bytes, Attr, int], bool],
    entries: DirectoryPage,
    first: int,
    names: CachedNames,
    untrue: Container[int],
) -> int:
    for at in range(first, len(entries)):
        names.name_is_kept = entries.inodes[at] not in untrue
        if not add(entries.names[at], entries.attr(at), entries.cursor(at)):
            return at
    return len(entries)


class _EntryBatch:
    """Entries after `cursor`, requested at `asked_s`, when this mount had made `changes` changes.

    `behind`: the cursor after the last entry, known once the reply arrives; None if there are no more
    entries.
    """

    __slots__ = ("cursor", "asked_s", "changes", "task", "behind")

    def __init__(self, cursor: int, asked_s: float, changes: int) -> None:
        self.cursor = cursor
        self.asked_s = asked_s
        self.changes = changes
        self.task: asyncio.Task[tuple[DirectoryPage, bool]]
        self.behind: int | None = None


class _OpenDirectory:
    """Position in an open directory, and its batches.

    `entries[at:]` were read ahead and follow `cursor`; all `entries` follow `begin`; the batches `coming`
    follow them. `newest`: the batch that was requested last; `batch`: how many entries it may have.
    """

    __slots__ = (
        "inode",
        "handle",
        "entries",
        "at",
        "begin",
        "cursor",
        "more",
        "read_s",
        "changes",
        "coming",
        "newest",
        "batch",
    )

    def __init__(self, inode: int, handle: DirHandle) -> None:
        self.inode = inode
        self.handle = handle
        self.entries = NOTHING_LISTED
        self.at = 0
        self.begin = self.cursor = -1
        self.more = True
        self.read_s = 0.0
        self.changes = -1
        self.coming: deque[_EntryBatch] = deque()
        self.newest: _EntryBatch | None = None
        self.batch = LIST_BATCH

    def try_seek(self, cursor: int) -> bool:
        """Move to a cursor within the entries that were read last. False: it is not among them."""
        entries = self.entries
        # entries are ordered by cursor
        at = 0 if cursor == self.begin else bisect_left(entries.words, (cursor,)) + 1
        if at > len(entries) or (at and entries.cursor(at - 1) != cursor):
            return False
        self.at, self.cursor = at, cursor
        return True


class DirectoryListings:
    """Open directories of one mount and their listings."""

    def __init__(
        self,
        vfs: Any,
        options: FuseOptions,
        clock: Clock,
        root: int,
        handles: Handles,
        changes: ChangeCount,
        names: CachedNames,
        tasks: OwnedTasks,
    ) -> None:
        """`root`: the inode of the directory that is shown as the root of the mount."""
        self._vfs = vfs
        self._options = options
        self._clock = clock
        self._root = root
        self._handles = handles
        self._changes = changes
        self._names = names
        self._tasks = tasks
        self._directories: dict[int, _OpenDirectory] = {}

    async def opendir(self, inode: int) -> int:
        """Open a directory; returns its handle."""
        if self._names.is_withdrawn(inode):
            raise NotFound(f"directory {inode:#x} may have another name by now")
        opened = await self._vfs.opendir(inode)
        handle = self._handles.directory(inode)
        self.add(handle, inode, opened)
        return handle

    def add(self, handle: int, inode: int, opened: DirHandle) -> None:
        """Record that the directory is open under this handle."""
        self._directories[handle] = _OpenDirectory(inode, opened)

    def is_listed(self, inode: int) -> bool:
        """Whether the directory is open in this mount."""
        return any(directory.inode == inode for directory in self._directories.values())

    async def readdir(
        self,
        handle: int,
        cursor: int,
        add: Callable[[bytes, Attr, int], bool],
        add_all: Callable[[DirectoryPage, int, set[int]], int] | None = None,
    ) -> None:
        """Pass the entries after `cursor` to add(name, attr, cursor after it), until it returns False or none
        is left.

        If `add_all` is given, it is called instead as add_all(entries, index of the first, inodes whose
        attributes are outdated). It takes as many entries as it can, and returns the index of the first that
        it did not take.

        Cursors: 0 the beginning, 1 after '.', 2 after '..'; all others come from the metadata service, and
        are valid in any process, at any time, while the directory changes. A name that exists all the time is
        returned once. Memory use is 1 + AHEAD_MAX batches.
        """
        try:
            await self._list(self._directories[handle], cursor, add, add_all)
        except DirectoryGone as error:
            raise NotFound(*error.args) from None

    async def _list(
        self,
        directory: _OpenDirectory,
        cursor: int,
        add: Callable[[bytes, Attr, int], bool],
        add_all: Callable[[DirectoryPage, int, set[int]], int] | None,
    ) -> None:
        if cursor < 2:
            own = await self._vfs.getattr(directory.inode)
            if cursor == 0 and not add(b".", Attr(inode=own.inode, mode=S_IFDIR), 1):
                return
            if not add(b"..", Attr(inode=self._above(own), mode=S_IFDIR), 2):
                return
            # a listing from the beginning shows the current directory
            directory.begin = directory.cursor = -1
            directory.entries, directory.at = NOTHING_LISTED, 0
            self._drop_coming(directory)
            cursor = 2
        while True:
            if self._is_old(directory.changes, directory.read_s) or (
                cursor != directory.cursor and not directory.try_seek(cursor)
            ):
                await self._read_batch(directory, cursor)
            entries, first = directory.entries, directory.at
            if first < len(entries):
                untrue = self._vfs.outdated(entries.inodes, directory.read_s) | self._vfs.unpromised(entries)
                directory.at = (
                    add_all(entries, first, untrue)
                    if add_all is not None
                    else _add_each(add, entries, first, self._names, untrue)
                )
                if directory.at > first:
                    self._names.record_page(directory.inode, entries, first, directory.at, untrue)
                    directory.cursor = cursor = entries.cursor(directory.at - 1)
                if directory.at < len(entries):
                    return
            if not directory.more:
                return
            directory.changes = -1

    def _above(self, attr: Attr) -> int:
        """The inode number that a listing of that directory shows for '..'."""
        return attr.inode if attr.inode == self._root else attr.parent or attr.inode

    def _is_old(self, changes: int, read_s: float) -> bool:
        """Whether entries read at that time are too old for a listing."""
        return (
            changes != self._changes.count or self._clock.boottime_s() - read_s > self._options.attr_timeout_s
        )

    async def _read_batch(self, directory: _OpenDirectory, cursor: int) -> None:
        """Get the batch after `cursor`. The batch behind it is requested before this one is delivered."""
        coming = directory.coming
        first = coming[0] if coming else None
        if (
            first is None
            or first.cursor != cursor
            or first.task.cancelled()
            or self._is_old(first.changes, first.asked_s)
        ):
            self._drop_coming(directory)
            if cursor == 2:
                directory.batch = LIST_BATCH
            elif cursor != directory.cursor:
                directory.batch = SEEK_BATCH
            else:
                directory.batch = min(4 * directory.batch, LIST_BATCH)
            self._ask_batch(directory, cursor)
        batch = coming.popleft()
        self._ask_on(directory)
        directory.entries, directory.more = await batch.task
        directory.at, directory.begin = 0, cursor
        directory.cursor, directory.changes, directory.read_s = cursor, batch.changes, batch.asked_s

    def _ask_batch(self, directory: _OpenDirectory, cursor: int) -> None:
        batch = _EntryBatch(cursor, self._clock.boottime_s(), self._changes.count)

        def answered(behind: int | None) -> None:
            batch.behind = behind
            if directory.newest is batch:
                self._ask_on(directory)

        batch.task = self._tasks.start(
            self._vfs.readdir(directory.handle, 0 if cursor == 2 else cursor, directory.batch, answered)
        )
        batch.task.add_done_callback(_seen)
        directory.coming.append(batch)
        directory.newest = batch

    def _ask_on(self, directory: _OpenDirectory) -> None:
        """Request one more batch, if its cursor is known and AHEAD_MAX permits it."""
        newest = directory.newest
        if (
            newest is not None
            and newest.behind is not None
            and len(directory.coming) < AHEAD_MAX
            and directory.batch == LIST_BATCH
        ):
            self._ask_batch(directory, newest.behind)

    @staticmethod
    def _drop_coming(directory: _OpenDirectory) -> None:
        directory.newest = None
        while directory.coming:
            directory.coming.pop().task.cancel()

    async def releasedir(self, handle: int, again: bool = False) -> None:
        """Close the directory. `again`: the predecessor may have done this already."""
        if again and handle not in self._directories:
            return
        directory = self._directories.pop(handle)
        self._handles.give_back(handle)
        self._drop_coming(directory)
        await self._vfs.releasedir(directory.handle)

    async def fsyncdir(self, handle: int) -> None:
        """Make changes of names in the directory durable."""
        await self._vfs.fsyncdir(self._directories[handle].inode)
