"""Notifications to the kernel: drop attributes, names or pages that it caches.

The engine of a mount connects its functions when it is made; a notification that an engine cannot send does
nothing. All parts of `fuse/ops/operations` notify the kernel through this. They name a directory by its
inode. To the kernel the root of the mount is ROOT_INODE, whichever directory that is (`fuse/ops/mount_views`),
so the numbers are translated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from nvpool.core.ids import ROOT_INODE

Place = tuple[int, bytes]
"""A name: its directory, and its bytes in that directory."""

Notice = Coroutine[Any, Any, None]

_Result = TypeVar("_Result")


def _no_attributes(inode: int) -> None:
    """Default of an engine that cannot invalidate."""


async def _nothing(*_: object) -> None:
    """Default of an engine that cannot do this."""


class KernelNotices:
    """Functions by which the parts of a mount notify the kernel; all but the first may wait."""

    def __init__(self, root: int = ROOT_INODE) -> None:
        """`root`: the inode of the directory that is shown as the root of the mount."""
        self._root = root
        self.invalidate_attributes: Callable[[int], None] = _no_attributes
        """Make the kernel query the attributes of an inode again."""
        self.invalidate: Callable[[Iterable[Place], Iterable[int]], Notice] = _nothing
        """Invalidate these names, and drop all pages of these inodes.

        Waits for requests that lock the directories of the names, and for pages that are being read or
        written.
        """
        self.drop: Callable[[int, int, int], Notice] = _nothing
        """Drop the pages of (inode, offset, length). Waits for pages that are being read."""
        self.store: Callable[[int, int, bytes], Notice] = _nothing
        """Put bytes of (inode, offset) into the pages. Waits as `drop` does."""
        self.forget: Callable[[list[Place]], Notice] = _nothing
        """Make the kernel forget names.

        With its last name the kernel drops an inode that is not open.
        """

    def connect(
        self,
        *,
        invalidate_attributes: Callable[[int], None] | None = None,
        invalidate: Callable[[Iterable[Place], Iterable[int]], Notice] | None = None,
        drop: Callable[[int, int, int], Notice] | None = None,
        store: Callable[[int, int, bytes], Notice] | None = None,
        forget: Callable[[list[Place]], Notice] | None = None,
    ) -> None:
        """Use these functions of an engine from now on. They get the kernel's inode numbers.

        None: the function stays as it is.
        """
        there, is_whole = self._there, self._root == ROOT_INODE
        if invalidate_attributes is not None:
            self.invalidate_attributes = (
                invalidate_attributes if is_whole else lambda inode: invalidate_attributes(there(inode))
            )
        if invalidate is not None:
            self.invalidate = (
                invalidate
                if is_whole
                else lambda names, inodes: invalidate(self._places(names), [there(inode) for inode in inodes])
            )
        if forget is not None:
            self.forget = forget if is_whole else lambda names: forget(self._places(names))
        # these concern files, which are no root
        self.drop, self.store = drop or self.drop, store or self.store

    def _there(self, inode: int) -> int:
        """The number by which the kernel knows an inode."""
        return ROOT_INODE if inode == self._root else inode

    def _places(self, names: Iterable[Place]) -> list[Place]:
        return [(self._there(parent), name) for parent, name in names]


class OwnedTasks:
    """Tasks that a mount has started and that nothing else refers to; each is kept until it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Run the coroutine as a task; returns the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
