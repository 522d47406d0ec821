"""Space reserve on a data file's file system, for truncations on a full drive.

The data file is sparse, so a block that is free in our free map may have no space behind it. A truncation
within a block rewrites one block, and a full drive must accept this write. So a file `reserve` beside the
data file holds space. A truncation without space gives a piece of the reserve back to the file system and
tries again; `tend` takes the space back once there is some. While a part is missing, the store punches out
every freed block and not only long runs. So the block that a truncation replaces fills the reserve again, for
any number of truncations.

The space is not guaranteed: between our release and our write another program may take it. Then the next
piece is released. When no piece is left, the truncation fails and the shard tries again later.

The user is the block store. A block device needs no reserve, since it has all its blocks. This module never
touches the data file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from nvpool.core.errors import NoSpace, from_os_error
from nvpool.core.units import KIB, MIB

RESERVE_BYTES = MIB
"""Size of the reserve: 256 concurrent truncations, before the first of them frees its old block."""
PIECE_BYTES = 32 * KIB
"""Size of a released piece.

More than a block, since the file system may need some space for its own tables.
"""
AGAIN_BYTES = 8 * MIB
"""Free space besides the reserve before the file system no longer counts as full.

This is more than the largest write of a client with its metadata. Otherwise a refused write would leave
enough space to end the full state, and the next write would be refused too.
"""

log = logging.getLogger(__name__)


class SpaceReserve:
    def __init__(self, path: Path | None, what: str):
        """Create the reserve.

        `path` is the reserve file, None for no reserve. `what` names the target in the log.
        """
        self.path = path
        self._what = what
        self.full = False
        """Set when a write finds no space.

        Cleared when there is space for the reserve and AGAIN_BYTES.
        """
        self.missing = False
        """Set while the reserve is incomplete."""
        self.spending = False
        """Set while a write is tried with released space.

        Then `keep`, which runs in a thread, takes no space.
        """

    def refused(self) -> None:
        """Record that a write to the data file found no space."""
        if not self.full and self.path is not None:
            self.full = True
            log.warning("%s: %s", self._what, self.full_message)

    @property
    def full_message(self) -> str:
        """Sentence for `status`; empty while there is space."""
        if not self.full or self.path is None:
            return ""
        return (
            f"the file system below {self.path.parent} is full: writes are refused, files can be removed and truncated; "
            "make room there, or remove files of the pool"
        )

    def with_reserve(self, write: Callable[[], None]) -> None:
        """Call `write`; while it finds no space, release a piece of the reserve and call it again.

        NoSpace: all pieces are released.
        """
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
        """Release a piece of the reserve to the file system. NoSpace: no piece is left."""
        self.refused()
        try:
            have = os.stat(self.path).st_size if self.path is not None else 0
            if not have:
                raise NoSpace(
                    f"{self._what}: the file system below it is full, and what was set aside for cuts is spent"
                )
            self.missing = True
            os.truncate(self.path, max(0, have - PIECE_BYTES))
        except OSError as error:
            raise from_os_error(error, f"giving back {self.path}") from None

    def tend(self) -> None:
        """Complete the reserve if there is space, and update `full`.

        Blocks on the file system: run in a thread.
        """
        if self.path is None or not (self.missing or self.full):
            return
        was_full = self.full  # a write that finds no space during this check must keep `full` set
        try:
            self.keep()
        except NoSpace:
            return
        if was_full and not self.missing:
            self.full = False
            log.info("%s: there is room again on the file system below it", self._what)

    def keep(self) -> None:
        """Complete the reserve; while `full` is set, also check for AGAIN_BYTES besides it.

        NoSpace: the reserve holds the space that there was.
        """
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
