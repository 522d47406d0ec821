"""Detection of volumes that containers use: mounts in mount name spaces other than our own.

bridge/volumes uses it to find references without a container. Reads only /proc and accesses no mount. Only
processes of this PID name space are visible, so the bridge must run in that of the host.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from nvpool.host.mountinfo import mount_of


def volumes_in_containers(below: str, own: PurePath, proc: Path = Path("/proc")) -> set[str]:
    """Return the names of volumes that are mounted in any other mount name space.

    `below` is the directory of a pool with the volumes. Binds below `own` belong to the bridge and do not
    count: a system service with its own name space has copies of them, but uses no volume. Mounts of any
    pool of this machine count, and dead mounts too: a name too many keeps a reference too long, but a missing
    name lets a volume be removed while a container uses it.
    """
    found: set[str] = set()
    spaces = {_space(proc / "self")}
    for entry in os.listdir(proc):
        if not entry.isdigit() or (space := _space(proc / entry)) in spaces or space is None:
            continue
        try:
            with open(proc / entry / "mountinfo", "rb") as file:
                seen = [mount_of(line) for line in file if b"nvpool" in line]
        except OSError:
            continue  # the process has ended; another process of its name space will do
        spaces.add(space)
        for mount in seen:
            if mount.ours and str(own) not in str(mount.point) and mount.root.is_relative_to(below):
                found.update(mount.root.relative_to(below).parts[:1])
    return found


def _space(process: Path) -> str | None:
    try:
        return os.readlink(process / "ns" / "mnt")
    except OSError:
        return None
