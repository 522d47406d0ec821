"""The mounts of this mount name space: what is mounted where, what is ours, and whether it answers.

Called by whoever mounts, unmounts, or must not write into a mount: fuse/mount_point, cli/mount/control, provision/create. Reads
/proc/self/mountinfo (proc(5)). A path that is mounted may hang whoever touches it, so that it is touched by another program
with a deadline only. Never mounts or unmounts anything.
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
"""How long a mounted file system may take to answer `stat` of its root before it counts as hung."""

OUR_TYPE = "fuse.nvpool"
_LINKS_MAX = 40


class Mount(NamedTuple):
    """A line of mountinfo."""

    device: str
    """major:minor, as in /sys/class/bdi."""
    point: Path
    type: str
    source: str
    options: str
    root: Path = Path("/")
    """What of the file system is seen there: another one than / of a bind mount."""

    @property
    def read_only(self) -> bool:
        """By the mount itself, whatever the file system allows."""
        return "ro" in self.options.split(",")

    @property
    def ours(self) -> bool:
        return self.type.startswith("fuse") and "nvpool" in f"{self.type} {self.source}"


def mounts() -> list[Mount]:
    """All mounts of this mount name space; a later one lies over an earlier one of the same point."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [mount_of(line) for line in file]


def mount_of(line: bytes) -> Mount:
    front, _, back = line.rstrip(b"\n").partition(b" - ")
    fields, behind = front.split(b" "), back.split(b" ")
    return Mount(fields[2].decode(), Path(_plain(fields[4])), _plain(behind[0]), _plain(behind[1]), _plain(fields[5]),
                 Path(_plain(fields[3])))


def _plain(field: bytes) -> str:
    """Space, tab, newline and backslash are written as octal escapes."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field))


def options_in(text: str) -> list[str]:
    """What stands behind -o: parted at commas, but not at those in double quotes, which belong to contexts of SELinux."""
    return re.findall(r'(?:[^,"]|"[^"]*")+', text)


def mount_at(path: str | os.PathLike[str]) -> Mount | None:
    """What is mounted exactly at `path` (the uppermost), or None."""
    place = place_of(path)
    return next((mount for mount in reversed(mounts()) if mount.point == place), None)


def mount_over(path: str | os.PathLike[str]) -> Mount | None:
    """The mount that `path` lies in, found without touching what is mounted there."""
    place = place_of(path)
    over = [mount for mount in mounts() if place.is_relative_to(mount.point)]
    return max(reversed(over), key=lambda mount: len(mount.point.parts), default=None)


def pool_of(mount: Mount) -> tuple[str, str] | None:
    """The pool that is mounted (its directory or address) and the directory of it that is shown, "/" for all of it.

    Told by the command line of the process that serves the mount. None where no such process can be seen, as in a container.
    """
    if mount.root != Path("/"):
        return None  # a bind mount of something in it
    for place in (mount.point, *(other.point for other in mounts() if other.device == mount.device)):
        for words in serving(str(place)):
            shown = [word.removeprefix("--subtree=") for word in words if word.startswith("--subtree=")]
            return words[-2], "/" + shown[-1].strip("/") if shown else "/"
    return None


def serving(place: str) -> Iterator[list[str]]:
    """The command lines of the mount daemons and holders of the mount point `place`."""
    for _, words in processes(Program.MOUNT, Program.MOUNT_HOLDER, naming=place):
        if words[-1] == place:
            yield words


def mounts_below(path: str | os.PathLike[str]) -> list[Mount]:
    """What is mounted at `path` or below it, the uppermost first."""
    place = place_of(path)
    return [mount for mount in reversed(mounts()) if mount.point.is_relative_to(place)]


def place_of(path: str | os.PathLike[str]) -> Path:
    """`path` absolute with its symbolic links followed, without touching what is mounted there, which may be dead."""
    points = {mount.point for mount in mounts()}
    place = Path(os.path.abspath(path))
    for _ in range(_LINKS_MAX):
        place = place.parent.resolve() / place.name
        if place in points or not place.is_symlink():
            break
        place = Path(os.path.normpath(place.parent / os.readlink(place)))
    return place


def look_at(path: str | os.PathLike[str]) -> str:
    """'alive', 'dead' (its daemon is gone) or 'hung' (no answer within LOOK_S to the `stat` of another process)."""
    # For a second or so the kernel would answer for a daemon that is dead. Not statfs, which asks all stores of a pool.
    looking = subprocess.Popen(["stat", "--cached=never", "--", os.fspath(path)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return "alive" if looking.wait(LOOK_S) == 0 else "dead"
    except subprocess.TimeoutExpired:
        looking.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            looking.wait(0.1)  # no longer: it can not die before the mount's daemon answers
        return "hung"
