"""Which open files of a mount its other processes may read (fuse/ops/worker), and when they may not any more.

A file is published at an open for reading while nobody can change it without our knowledge: there is a lease on it, nobody has
it open for writing here, nothing of ours is unstored, nobody here has a lock on it. It is taken back, for all its handles and
before anybody is answered who could have changed it, when one of these ends; and then stays with us until it is opened anew.
What was opened elsewhere in between is thus never older than what the kernel was told. Called by `fuse/ops/operations` and its
parts.
"""

from __future__ import annotations

from nvpool.fuse.ops.handles import Handles


class Published:
    def __init__(self) -> None:
        self.on = False
        """Whether there are other processes."""
        self._handles: Handles
        self._of: dict[int, set[int]] = {}   # inode -> handles
        self._barred: dict[int, int] = {}    # inode -> reasons
        self._writing: set[int] = set()      # handles

    def begin(self, handles: Handles) -> None:
        self._handles = handles

    def add(self, inode: int, handle: int) -> None:
        """The handle is published."""
        self._of.setdefault(inode, set()).add(handle)

    def take_back(self, inode: int) -> None:
        """Requests that are taken from the kernel from now on are not answered elsewhere."""
        for handle in self._of.pop(inode, ()):
            self._handles.take_back(handle)

    def opened_to_write(self, inode: int, handle: int) -> None:
        """Until it is closed."""
        self._writing.add(handle)
        self.bar(inode)

    def closed(self, inode: int, handle: int) -> None:
        """And what was written through it is stored."""
        if handle in self._writing:
            self._writing.remove(handle)
            self.unbar(inode)
        handles = self._of.get(inode)
        if handles is not None:
            handles.discard(handle)
            if not handles:
                del self._of[inode]

    def is_barred(self, inode: int) -> bool:
        return inode in self._barred

    def bar(self, inode: int) -> None:
        """Somebody here may change the file, until `unbar`."""
        self._barred[inode] = self._barred.get(inode, 0) + 1
        self.take_back(inode)

    def unbar(self, inode: int) -> None:
        self._barred[inode] -= 1
        if not self._barred[inode]:
            del self._barred[inode]
