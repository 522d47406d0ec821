"""Progress and options of a transfer.

The transfer updates a TransferProgress on its event loop. Any thread may read it at any time to show progress; its
numbers only grow.
"""

from __future__ import annotations

import builtins
import os
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from nvpool.core.posix import acl
from nvpool.core.units import MIB

PIECE_BYTES = MIB
"""Bytes of a file that are copied in one step. This is a chunk of the default size: one message to one
target, and 32 of them in flight are no burden."""

FAILURES_KEPT_MAX = 1000


class TransferOptions(NamedTuple):
    parallel: int = 32
    """Parallel files. Small files wait for round trips and syncs, which they share: below 16 a drive
    idles."""
    verify: bool = True
    """Read the written data back and compare its CRC32C with that of the source."""
    compare: bool = False
    """Import only: compare also files with the size and time of their source. The parts that differ are
    written."""
    owners: bool = os.geteuid() == 0
    """Keep the owners of files; only root can."""
    exclude: tuple[str, ...] = ()
    """Shell patterns of names to skip below the source. A folder is skipped with everything in it."""

    def leaves_out(self, name: bytes) -> bool:
        return any(fnmatchcase(os.fsdecode(name), pattern) for pattern in self.exclude)


class Failure(NamedTuple):
    path: str
    text: str


@dataclass
class TransferProgress:
    files: int = 0
    """Completed files, including those that were skipped."""
    bytes: int = 0
    """Bytes of completed files, holes included; grows while a file is copied."""
    directories: int = 0
    symlinks: int = 0
    hard_links: int = 0
    special: int = 0
    skipped_files: int = 0
    """Files that were already in the destination, with the same size and times."""
    skipped_bytes: int = 0
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)
    """The first failures; FAILURES_KEPT_MAX at most."""
    attributes_not_kept: int = 0
    """Extended attributes that the destination refused."""
    files_total: int = 0
    bytes_total: int = 0
    counted: bool = False
    """Whether the totals are final."""
    current: str = ""

    def fail(self, path: builtins.bytes, error: BaseException) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT_MAX:
            self.failures.append(Failure(os.fsdecode(path), str(error)))

    def summary(self) -> dict[str, Any]:
        """The result as a JSON object, for --json."""
        found = asdict(self)
        del found["current"], found["counted"]
        found["failures"] = [failure._asdict() for failure in self.failures]
        return found


def count_local(path: bytes, progress: TransferProgress, options: TransferOptions) -> None:
    """Add all regular files at and below `path` to the totals. Runs in a thread. Unreadable entries are
    not counted."""
    waiting = [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    try:
                        if options.leaves_out(entry.name):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            progress.bytes_total += entry.stat(follow_symlinks=False).st_size
                            progress.files_total += 1
                    except OSError:
                        continue
        except OSError:
            continue
    progress.counted = True


def xattrs_of(place: bytes | int) -> list[tuple[bytes, bytes]]:
    """Extended attributes of a local file. Of the "system." attributes only access control lists are
    returned, because a pool stores those too."""
    found: list[tuple[bytes, bytes]] = []
    try:
        names = os.listxattr(place)
    except OSError:
        return found
    for name in names:
        if not name.startswith("system.") or os.fsencode(name) in acl.NAMES:
            try:
                found.append((os.fsencode(name), os.getxattr(place, name)))
            except OSError:
                continue
    return found
