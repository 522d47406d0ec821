"""Commit mark: number of the last committed change, in memory that survives the process.

After a kill, the primary still has every change that it acknowledged, since its journal is at least in the
kernel's memory. After a loss of power or of the drive, changes may be missing. A new process cannot
distinguish these cases by its records; the mark makes the difference. The primary raises the mark before a
change counts as committed. If a new process finds all changes up to the mark in its records, it has
everything that was acknowledged in the term of the mark, and needs no standby as a proof.

The mark is on a tmpfs, which is empty after a power loss. The mark is never below the last acknowledged
change; it may be above it. A missing or doubtful mark proves nothing. Used by kv/replication_log and
meta/server/shard_member.

The file, in the byte order of the machine: magic u64 · device and inode of the directory of records u64 each
· term u64 · sequence u64.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

_MAGIC = 0x31_4B_52_41_4D_50_56_4E  # NVPMARK1
_LAYOUT = struct.Struct("=QQQQQ")
_SEQUENCE = 4

log = logging.getLogger(__name__)


class Marked(NamedTuple):
    """Every change that was acknowledged up to and in `term` has a number of at most `sequence`."""

    term: int
    sequence: int


class CommitMark:
    """The mark of one primary in one term; only the primary's process writes it."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    @classmethod
    def begin(cls, path: Path, records: Path, term: int, sequence: int) -> CommitMark | None:
        """Create the mark of a primary that begins `term` with all changes up to `sequence`; replace an
        earlier mark atomically.

        None if it cannot be created: the memory is full, or the file belongs to another user.
        """
        new, descriptor = path.with_name(f"{path.name}.new"), -1
        try:
            place = os.stat(records)
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # A full tmpfs fails here, instead of with SIGBUS later.
            os.posix_fallocate(descriptor, 0, _LAYOUT.size)
            os.pwrite(descriptor, _LAYOUT.pack(_MAGIC, place.st_dev, place.st_ino, term, sequence), 0)
            numbers = memoryview(mmap.mmap(descriptor, _LAYOUT.size)).cast("Q")
            new.rename(path)
        except OSError as error:
            log.warning(
                "no commit mark at %s (%s): if this process is killed, the next one waits for a standby",
                path,
                error,
            )
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return cls(numbers)

    def raise_to(self, sequence: int) -> None:
        """Allow changes up to `sequence` to be acknowledged from now on."""
        if sequence > self._numbers[_SEQUENCE]:
            self._numbers[_SEQUENCE] = sequence


def read_mark(path: Path, records: Path) -> Marked | None:
    """Return the mark that a former primary with these records left; None if there is no reliable one.

    The former process has ended: the caller holds the lock that only one process of the member can hold.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not _is_ours(descriptor):
            return None
        raw, place = os.pread(descriptor, _LAYOUT.size, 0), os.stat(records)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(raw) < _LAYOUT.size:
        return None
    magic, device, inode, term, sequence = _LAYOUT.unpack(raw)
    if magic != _MAGIC or (device, inode) != (place.st_dev, place.st_ino):
        return None
    return Marked(term, sequence)


def remove_mark(path: Path) -> None:
    """Delete the mark, so that it proves nothing to the next process.

    Another user's file stays, but is never trusted.
    """
    with contextlib.suppress(OSError):
        path.unlink()


def _is_ours(descriptor: int) -> bool:
    """Return whether only this user can have written the file: the directory may be open to all users."""
    found = os.fstat(descriptor)
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & 0o077
        and found.st_nlink == 1
    )
