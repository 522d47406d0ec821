"""Published files: which open files of a mount its read workers may read, and until when.

A file is published at an open for reading if nobody can change it without the knowledge of this process: it
has a lease, no writer has it open in this mount, all data written here is stored, and no process here has a
lock on it. When one of these conditions ends, all handles of the file are withdrawn, before any request is
answered that could have changed it; then the file stays with the serving process until the next open. So a
file that a worker opened in between is never older than what the kernel was given. Used by
`fuse/ops/operations` and its parts.
"""

from __future__ import annotations

from nvpool.fuse.ops.handles import Handles


class PublishedFiles:
    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self.on = False
        """Whether there are read workers."""
        self.handles_of: dict[int, set[int]] = {}
        """inode -> published handles."""
        self.barred: dict[int, int] = {}
        """inode -> number of reasons not to publish it."""
        self.writing: set[int] = set()
        """Handles that may write."""

    def add(self, inode: int, handle: int) -> None:
        """Record that the handle is published."""
        self.handles_of.setdefault(inode, set()).add(handle)

    def take_back(self, inode: int) -> None:
        """Withdraw all handles of the file.

        Workers answer no request that is read from the kernel after this.
        """
        for handle in self.handles_of.pop(inode, ()):
            self._handles.take_back(handle)

    def opened_to_write(self, inode: int, handle: int) -> None:
        """Bar the file from publishing until the handle is closed."""
        self.writing.add(handle)
        self.bar(inode)

    def closed(self, inode: int, handle: int) -> None:
        """Note that the handle is closed and all data written through it is stored."""
        if handle in self.writing:
            self.writing.remove(handle)
            self.unbar(inode)
        handles = self.handles_of.get(inode)
        if handles is not None:
            handles.discard(handle)
            if not handles:
                del self.handles_of[inode]

    def is_barred(self, inode: int) -> bool:
        return inode in self.barred

    def bar(self, inode: int) -> None:
        """Withdraw the file: a process here may change it, until `unbar`."""
        self.barred[inode] = self.barred.get(inode, 0) + 1
        self.take_back(inode)

    def unbar(self, inode: int) -> None:
        self.barred[inode] -= 1
        if not self.barred[inode]:
            del self.barred[inode]
