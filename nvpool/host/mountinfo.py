"""Mount table of this mount namespace: mounted file systems, nvpool mounts, and whether a mount responds.

Used by the modules that mount, unmount, or must not write into a mount: fuse/mount_point, cli/mount/control,
provision/create. Reads /proc/self/mountinfo (proc(5)). Accessing a mounted path may hang, so only a separate
program with a deadline accesses one. This module never mounts or unmounts anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvpool.core.programs import Program, processes

LOOK_S = 3.0
"""Time within which a mounted file system must answer `stat` of its root; a slower one counts as hung."""

OUR_TYPE = "fuse.nvpool"
_LINKS_MAX = 40


class Mount(NamedTuple):
    """One line of mountinfo."""

    device: str
    """Device number as major:minor, as in /sys/class/bdi."""
    point: Path
    type: str
    source: str
    options: str
    root: Path = Path("/")
    """Mounted directory of the file system; other than / for a bind mount."""

    @property
    def read_only(self) -> bool:
        """Whether the mount itself is read-only, regardless of the file system."""
        return "ro" in self.options.split(",")

    @property
    def ours(self) -> bool:
        return self.type.startswith("fuse") and "nvpool" in f"{self.type} {self.source}"


def mounts() -> list[Mount]:
    """Return all mounts of this mount namespace.

    A later mount covers an earlier one at the same mount point.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        return [mount_of(line) for line in file]


def mount_of(line: bytes) -> Mount:
    front, _, back = line.rstrip(b"\n").partition(b" - ")
    fields, behind = front.split(b" "), back.split(b" ")
    return Mount(
        fields[2].decode(),
        Path(_plain(fields[4])),
        _plain(behind[0]),
        _plain(behind[1]),
        _plain(fields[5]),
        Path(_plain(fields[3])),
    )


def _plain(field: bytes) -> str:
    """Decode a field: spaces, tabs, newlines and backslashes are written as octal escapes."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field))


def options_in(text: str) -> list[str]:
    """Split the argument of -o at commas outside double quotes; quoted ones belong to SELinux contexts."""
    return re.findall(r'(?:[^,"]|"[^"]*")+', text)


def mount_at(path: str | os.PathLike[str]) -> Mount | None:
    """Return the uppermost mount exactly at `path`, or None."""
    place = place_of(path)
    return next((mount for mount in reversed(mounts()) if mount.point == place), None)


def mount_over(path: str | os.PathLike[str]) -> Mount | None:
    """Return the mount that contains `path`, without accessing the mounted file system."""
    place = place_of(path)
    over = [mount for mount in mounts() if place.is_relative_to(mount.point)]
    return max(reversed(over), key=lambda mount: len(mount.point.parts), default=None)


def pool_of(mount: Mount) -> tuple[str, str] | None:
    """Return the mounted pool (directory or address) and its mounted directory; "/" stands for the whole
    pool.

    The source is the command line of the process that serves the mount. None if no such process is visible,
    as in a container.
    """
    if mount.root != Path("/"):
        return None  # a bind mount of a part of it
    for place in (mount.point, *(other.point for other in mounts() if other.device == mount.device)):
        for words in serving(str(place)):
            shown = [word.removeprefix("--subtree=") for word in words if word.startswith("--subtree=")]
            return words[-2], "/" + shown[-1].strip("/") if shown else "/"
    return None


def serving(place: str) -> Iterator[list[str]]:
    """Yield the command lines of the mount daemons and holders of the mount point `place`."""
    for _, words in processes(Program.MOUNT, Program.MOUNT_HOLDER, naming=place):
        if words[-1] == place:
            yield words


def mounts_below(path: str | os.PathLike[str]) -> list[Mount]:
    """Return the mounts at `path` and below it, the uppermost first."""
    place = place_of(path)
    return [mount for mount in reversed(mounts()) if mount.point.is_relative_to(place)]


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return `path` absolute, with symbolic links resolved, without accessing a mounted (perhaps dead) file
    system."""
    points = {mount.point for mount in mounts()}
    place = Path(os.path.abspath(path))
    for _ in range(_LINKS_MAX):
        place = place.parent.resolve() / place.name
        if place in points or not place.is_symlink():
            break
        place = Path(os.path.normpath(place.parent / os.readlink(place)))
    return place


def look_at(path: str | os.PathLike[str]) -> str:
    """Return 'alive', 'dead' (the daemon has ended) or 'hung' (another process's `stat` got no answer within
    LOOK_S)."""
    # Not cached: for about a second the kernel would answer for a dead daemon. Not statfs: it queries all
    # stores.
    looking = subprocess.Popen(
        ["stat", "--cached=never", "--", os.fspath(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return "alive" if looking.wait(LOOK_S) == 0 else "dead"
    except subprocess.TimeoutExpired:
        looking.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            looking.wait(0.1)  # no longer: `stat` cannot end before the mount's daemon answers
        return "hung"
