"""What a transfer has done so far, for whoever shows progress, and how it is to be done.

A Tally is written by the transfer on its event loop and read by anybody at any time; its numbers only grow.
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
"""A chunk of the default size: one message to one target, and small enough that 32 of them in flight are no burden."""

FAILURES_KEPT_MAX = 1000


class TransferOptions(NamedTuple):
    parallel: int = 32
    """Files at once. Small files wait for round trips and syncs, which are shared: below 16 a drive idles."""
    verify: bool = True
    """Read back what was written and compare its CRC32C with that of the source."""
    compare: bool = False
    """Of an import: read also what is there with the size and time of its source, and write what differs."""
    owners: bool = os.geteuid() == 0
    """Give files their owners; only root can."""
    exclude: tuple[str, ...] = ()
    """Names, as shell patterns, of files and folders below the source that are left out, with all that is in them."""

    def leaves_out(self, name: bytes) -> bool:
        return any(fnmatchcase(os.fsdecode(name), pattern) for pattern in self.exclude)


class Failure(NamedTuple):
    path: str
    text: str


@dataclass
class Tally:
    files: int = 0
    """Done, those left out because they were there already included."""
    bytes: int = 0
    """Of their contents, holes included; grows while a file is under way."""
    directories: int = 0
    symlinks: int = 0
    hard_links: int = 0
    special: int = 0
    skipped_files: int = 0
    """Were there already, with size and times."""
    skipped_bytes: int = 0
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)
    """The first of them."""
    attributes_not_kept: int = 0
    """Extended attributes that the destination does not take."""
    files_total: int = 0
    bytes_total: int = 0
    counted: bool = False
    """The totals are final."""
    current: str = ""

    def fail(self, path: builtins.bytes, error: BaseException) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT_MAX:
            self.failures.append(Failure(os.fsdecode(path), str(error)))

    def summary(self) -> dict[str, Any]:
        """For --json."""
        found = asdict(self)
        del found["current"], found["counted"]
        found["failures"] = [failure._asdict() for failure in self.failures]
        return found


def count_local(path: bytes, tally: Tally, options: TransferOptions) -> None:
    """Grow the totals by all regular files at and below `path`. Runs in a thread; what can not be read is not counted."""
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
                            tally.bytes_total += entry.stat(follow_symlinks=False).st_size
                            tally.files_total += 1
                    except OSError:
                        continue
        except OSError:
            continue
    tally.counted = True


def xattrs_of(place: bytes | int) -> list[tuple[bytes, bytes]]:
    """Extended attributes of a local file; of the system's own only access control lists, which a pool keeps too."""
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
