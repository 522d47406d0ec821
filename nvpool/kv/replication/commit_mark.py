"""The commit mark: which change was committed last, in memory that outlives the process but not the machine.

A primary that was killed has every change that it acknowledged, since its journal is at least in the kernel's memory. After a
loss of power, or of the drive, it may lack some. A new process can not see the difference in its records alone; the mark shows
it. The primary raises the mark before a change counts as committed. A process that finds all changes up to the mark in its
records has everything that was acknowledged in the term of the mark, and needs no standby to be sure of it.

The mark lies on a tmpfs, of which nothing is left after a loss of power. It is never behind what was acknowledged; it may be
ahead of it. Where there is none, or any doubt about it, nothing is proven. Used by kv/replication_log and meta/server/member.

The file, in the byte order of the machine: magic u64 · device and inode of the directory of records u64 each · term u64 ·
sequence u64.
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
    """Every change that was acknowledged up to and in `term` has at most the number `sequence`."""

    term: int
    sequence: int


class CommitMark:
    """The mark of one primary in one term; only its process writes it."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    @classmethod
    def begin(cls, path: Path, records: Path, term: int, sequence: int) -> CommitMark | None:
        """The mark of a primary that begins `term` with all changes up to `sequence`. It replaces an earlier one as a whole.

        None where none can be made: there is no memory left, or the file is another user's.
        """
        new, descriptor = path.with_name(f"{path.name}.new"), -1
        try:
            place = os.stat(records)
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, _LAYOUT.size)  # a full tmpfs says so here, and not with a SIGBUS later
            os.pwrite(descriptor, _LAYOUT.pack(_MAGIC, place.st_dev, place.st_ino, term, sequence), 0)
            numbers = memoryview(mmap.mmap(descriptor, _LAYOUT.size)).cast("Q")
            new.rename(path)
        except OSError as error:
            log.warning("no commit mark at %s (%s): if this process is killed, the next one waits for a standby", path, error)
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return cls(numbers)

    def raise_to(self, sequence: int) -> None:
        """Say that changes up to this one may be acknowledged from now on."""
        if sequence > self._numbers[_SEQUENCE]:
            self._numbers[_SEQUENCE] = sequence


def read_mark(path: Path, records: Path) -> Marked | None:
    """The mark that a primary with these records has left; None where there is none that can be relied on.

    Its process has ended: the caller holds what only one process of the member has.
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
    """Leave nothing behind, and prove nothing to the next process. A file of another user's stays, and is never believed."""
    with contextlib.suppress(OSError):
        path.unlink()


def _is_ours(descriptor: int) -> bool:
    """Whether nobody else can have written it: the directory may be open to all users."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077 and found.st_nlink == 1
