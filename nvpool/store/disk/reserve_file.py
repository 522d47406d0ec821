"""Room on the file system below a data file, set aside for what must work when that file system is full.

The data file is sparse, so a block that is free in our map may have nothing behind it. A cut within a block writes one block
anew, and a full drive must take it. So a file `reserve` beside the data file holds room; a cut that finds none gives a piece of
it back to the file system and tries again, and `tend` takes it back once there is some. While some is missing the store gives
back every freed block and not only long runs: the block that a cut replaces fills the reserve again, however many cuts come.

The room is taken by whoever is first: between our giving it back and our write another program may get it. Then the next piece
is given, and when all are gone the cut fails and is tried again later by the shard.

Called by the block store; none is kept for a block device, which has all its blocks. Never touches the data file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from nvpool.core.errors import NoSpace, from_os_error
from nvpool.core.units import KIB, MIB

RESERVE_BYTES = MIB
"""256 cuts at once, before the first of them gives its old block back."""
PIECE_BYTES = 32 * KIB
"""More than a block: the file system may need some for its own tables."""
AGAIN_BYTES = 8 * MIB
"""More than the largest write of a client with its tables: else one that is refused leaves room enough to say that there is
some, and the next is refused too."""

log = logging.getLogger(__name__)


class HostRoom:
    def __init__(self, path: Path | None, what: str):
        """`path`: of the reserve, None to have none. `what`: for the log."""
        self.path = path
        self._what = what
        self.full = False
        """A write has found no room, and there has been none for the reserve and AGAIN_BYTES since."""
        self.missing = False
        """The reserve is not whole."""
        self.spending = False
        """A write is being tried with what was given back: `keep`, in its thread, takes nothing then."""

    def refused(self) -> None:
        """A write to the data file has found no room."""
        if not self.full and self.path is not None:
            self.full = True
            log.warning("%s: %s", self._what, self.told)

    @property
    def told(self) -> str:
        """For `status`; empty while there is room."""
        if not self.full or self.path is None:
            return ""
        return (f"the file system below {self.path.parent} is full: writes are refused, files can be removed and truncated; "
                "make room there, or remove files of the pool")

    def with_reserve(self, write: Callable[[], None]) -> None:
        """`write`; where there is no room, again and again with a piece of the reserve given back. NoSpace: all are spent."""
        try:
            while True:
                try:
                    return write()
                except NoSpace:
                    self.spending = True
                    self._spend()
        finally:
            self.spending = False

    def _spend(self) -> None:
        """Give a piece of the reserve to the file system. NoSpace: it is spent."""
        self.refused()
        try:
            have = os.stat(self.path).st_size if self.path is not None else 0
            if not have:
                raise NoSpace(f"{self._what}: the file system below it is full, and what was set aside for cuts is spent")
            self.missing = True
            os.truncate(self.path, max(0, have - PIECE_BYTES))
        except OSError as error:
            raise from_os_error(error, f"giving back {self.path}") from None

    def tend(self) -> None:
        """Make the reserve whole if there is room; see whether there is. Waits for the file system: in a thread."""
        if self.path is None or not (self.missing or self.full):
            return
        was_full = self.full  # a write that finds no room while we are at it is not answered by what we find
        try:
            self.keep()
        except NoSpace:
            return
        if was_full and not self.missing:
            self.full = False
            log.info("%s: there is room again on the file system below it", self._what)

    def keep(self) -> None:
        """The reserve is whole, and there are AGAIN_BYTES beside it while it is `full`. NoSpace: it holds what there was."""
        if self.path is None:
            return
        self.missing = True
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while not self.spending and (have := os.fstat(fd).st_size) < RESERVE_BYTES:
                    os.posix_fallocate(fd, have, min(PIECE_BYTES, RESERVE_BYTES - have))
                self.missing = os.fstat(fd).st_size < RESERVE_BYTES
                if self.full and not self.missing:
                    try:
                        os.posix_fallocate(fd, RESERVE_BYTES, AGAIN_BYTES)
                    finally:
                        os.ftruncate(fd, RESERVE_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"setting aside room in {self.path}") from None
