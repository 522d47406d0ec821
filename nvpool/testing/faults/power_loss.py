"""Possible contents of a drive after a power loss at a given moment, computed from the record of `record.c`.

The model is a page cache over a journaling file system, in the strictest interpretation:

* A completed fsync or fdatasync makes the earlier writes durable; so is a write with O_DSYNC.
* Any other page (4 KiB) of a file has its content as of any moment since then, independently and in any order.
* So has the size of a file.
* Renames, unlinks, creations and links since the last fsync of a directory reached the drive in their order, up to
  any one of them; fsync of a file also makes its own creation durable.
* A sync that lied makes nothing durable.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

_RECORD = struct.Struct("<IIQQQQQQII")
_MAGIC = 0x4E565046
OPEN, WRITE, TRUNCATE, RENAME, UNLINK, SYNC_BEGIN, SYNC_END, MKDIR, RMDIR, LINK, ALLOCATE, LIED = range(1, 13)
PAGE = 4096


class RecordedCall:
    __slots__ = ("kind", "time_ns", "identity", "offset", "length", "extra", "path", "data", "process")

    def __init__(self, kind, time_ns, identity, offset, length, extra, path, data, process):
        self.kind, self.time_ns, self.identity, self.offset = kind, time_ns, identity, offset
        self.length, self.extra, self.path, self.data, self.process = length, extra, path, data, process


class _RecordedFile:
    """One file under all its names: writes since the first image, in order."""

    def __init__(self, base: Path | None) -> None:
        self.base = base
        self.size = base.stat().st_size if base else 0
        self.moment = 0
        self.durable = 0  # everything up to this moment is on the drive
        self.pages: dict[int, list[tuple[int, int, bytes]]] = defaultdict(
            list
        )  # page -> (moment, offset in the page, bytes)
        self.page_durable: dict[int, int] = {}
        self.sizes: list[tuple[int, int]] = [(0, self.size)]
        self.syncs: dict[int, list[int]] = defaultdict(list)
        self.created_by = -1

    def write(self, offset: int, data: bytes, durable: bool) -> None:
        self.moment += 1
        at = 0
        while at < len(data):
            page, start = divmod(offset + at, PAGE)
            part = data[at : at + PAGE - start]
            self.pages[page].append((self.moment, start, part))
            if durable:
                self.page_durable[page] = self.moment
            at += len(part)
        self.resize(max(self.size, offset + len(data)))
        if durable:
            self.sizes = [(0, self.size)]

    def zero(self, offset: int, end: int) -> None:
        for page in [p for p in self.pages if offset <= p * PAGE + PAGE and p * PAGE < end] or ():
            a, b = max(offset - page * PAGE, 0), min(end - page * PAGE, PAGE)
            if b > a:
                self.pages[page].append((self.moment, a, bytes(b - a)))
        first, last = offset // PAGE, (min(end, self.size) - 1) // PAGE
        if self.base:
            for page in range(first, last + 1):
                if page not in self.pages:
                    a, b = max(offset - page * PAGE, 0), min(end - page * PAGE, PAGE)
                    self.pages[page].append((self.moment, a, bytes(max(b - a, 0))))

    def resize(self, size: int) -> None:
        if size < self.size:
            self.zero(size, self.size)
        self.size = size
        self.sizes.append((self.moment, size))

    def materialize(self, path: Path, chance: random.Random, eagerness: float) -> None:
        """Write one possible state. `eagerness`: share of the unsynced writes that reached the drive, from 0
        to 1."""

        def moment_after(durable: int, moments: list[int]) -> int:
            later = [m for m in moments if m > durable]
            if not later or chance.random() > eagerness:
                return durable
            return chance.choice(later) if eagerness < 1 else later[-1]

        if self.base and not path.exists():
            subprocess.run(
                ["cp", "-a", "--sparse=always", "--reflink=auto", str(self.base), str(path)],
                check=True,
                timeout=600,
            )
        with path.open("r+b" if path.exists() else "w+b") as file:
            at = moment_after(self.durable, [m for m, _ in self.sizes])
            size = self.sizes[max(bisect_right([m for m, _ in self.sizes], at) - 1, 0)][1]
            for page, versions in self.pages.items():
                durable = max(self.durable, self.page_durable.get(page, 0))
                until = moment_after(durable, [m for m, _, _ in versions])
                for moment, start, data in versions:
                    if moment <= until:
                        file.seek(page * PAGE + start)
                        file.write(data)
            file.flush()
            os.ftruncate(file.fileno(), size)


def read_records(log: Path) -> list[RecordedCall]:
    """Return the records of all processes in order of time.

    The last record of a process is left out if a kill has truncated it.
    """
    found = []
    for file in sorted(Path(log).glob("*.log")):
        raw = file.read_bytes()
        place, process = 0, int(file.stem)
        while place + _RECORD.size <= len(raw):
            magic, kind, time_ns, device, inode, offset, length, extra, path_bytes, data_bytes = (
                _RECORD.unpack_from(raw, place)
            )
            if magic != _MAGIC:
                raise ValueError(f"{file} is not a record of faults at byte {place}")
            place += _RECORD.size
            if place + path_bytes + data_bytes > len(raw):
                break
            path = raw[place : place + path_bytes].decode("utf-8", "surrogateescape")
            data = raw[place + path_bytes : place + path_bytes + data_bytes]
            place += path_bytes + data_bytes
            found.append(
                RecordedCall(kind, time_ns, (device, inode), offset, length, extra, path, data, process)
            )
    found.sort(key=lambda r: r.time_ns)
    return found


class PowerLoss:
    """Rebuilds `root` as of moments of a record. Reads the record once; `rebuild` may be called for many
    moments."""

    def __init__(self, root: Path, base: Path, log: Path) -> None:
        self.root, self.base = Path(root).resolve(), Path(base)
        self.records = read_records(log)

    def times(self) -> tuple[int, int]:
        """Return CLOCK_MONOTONIC nanoseconds of the first and the last record."""
        return self.records[0].time_ns, self.records[-1].time_ns

    def rebuild(self, into: Path, at_ns: int, seed: int) -> None:
        """Write to `into` one state that `root` could have after a power loss at `at_ns`.

        The same seed gives the same state.
        """
        chance = random.Random(seed)
        eagerness = chance.choice((0.0, 0.3, 0.7, 1.0))
        into = Path(into)
        first_names: dict[str, _RecordedFile] = {}
        for directory, _, names in os.walk(self.base):
            for name in names:
                whole = Path(directory) / name
                if whole.is_file() and not whole.is_symlink():
                    first_names[str(self.root / whole.relative_to(self.base))] = _RecordedFile(whole)
        names, by_identity = dict(first_names), {}
        changes: list[list] = []  # [is durable, kind, path, other path, file]
        for record in self.records:
            if record.time_ns > at_ns:
                break
            self._take(record, names, by_identity, changes)
        if into.exists():
            shutil.rmtree(into)
        into.mkdir(parents=True)
        for directory, directories, _ in os.walk(self.base):
            for name in directories:
                (into / Path(directory).relative_to(self.base) / name).mkdir(exist_ok=True)
        final = dict(first_names)
        prefix = len(changes) if eagerness == 1 else chance.randint(0, len(changes)) if eagerness else 0
        for index, (durable, kind, path, other, file) in enumerate(changes):
            if not (durable or index < prefix):
                continue
            if kind == OPEN:
                final[path] = file
            elif kind == RENAME and path in final:
                final[other] = final.pop(path)
            elif kind == LINK and path in final:
                final[other] = final[path]
            elif kind == UNLINK:
                final.pop(path, None)
            elif kind == MKDIR:
                (into / Path(path).relative_to(self.root)).mkdir(exist_ok=True, parents=True)
        for path, file in final.items():
            place = into / Path(path).relative_to(self.root)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.materialize(place, chance, eagerness)

    @staticmethod
    def _take(record: RecordedCall, names: dict, by_identity: dict, changes: list[list]) -> None:
        kind, path = record.kind, record.path
        if kind == OPEN:
            file = names.get(path)
            if file is None or record.extra & 1:
                file = _RecordedFile(None)
                names[path] = file
                file.created_by = len(changes)
                changes.append([False, OPEN, path, "", file])
            by_identity[record.identity] = file
            if record.extra & 2:
                file.moment += 1
                file.resize(0)
        elif kind in (RENAME, LINK, UNLINK, MKDIR, RMDIR):
            other = record.data.decode("utf-8", "surrogateescape")
            changes.append([False, kind, path, other, None])
            if kind == RENAME and path in names:
                names[other] = names.pop(path)
            elif kind == LINK and path in names:
                names[other] = names[path]
            elif kind == UNLINK:
                names.pop(path, None)
        elif kind in (SYNC_BEGIN, SYNC_END, LIED):
            file = by_identity.get(record.identity)
            if file is None:  # a directory: its name changes so far are durable
                if kind == SYNC_END:
                    for change in changes:
                        if os.path.dirname(change[2]) == path or os.path.dirname(change[3]) == path:
                            change[0] = True
            elif kind == SYNC_BEGIN:
                file.syncs[record.process].append(file.moment)
            elif kind == SYNC_END and file.syncs[record.process]:
                file.durable = max(file.durable, file.syncs[record.process].pop(0))
                if file.created_by >= 0:
                    changes[file.created_by][0] = True
        else:
            file = by_identity.get(record.identity)
            if file is None:
                return
            if kind == WRITE:
                file.write(record.offset, record.data, bool(record.extra))
            elif kind == TRUNCATE:
                file.moment += 1
                file.resize(record.length)
            elif kind == ALLOCATE:
                file.moment += 1
                if record.extra & 2:
                    file.zero(record.offset, record.offset + record.length)
                elif not record.extra & 1 and record.offset + record.length > file.size:
                    file.resize(record.offset + record.length)
