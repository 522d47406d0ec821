"""Which volumes are seen in mount name spaces other than our own: in those of containers.

Called by bridge/volumes when it finds out which references are still somebody's. Reads /proc only, touches no mount. Sees the
processes of this PID name space, so that the bridge runs in that of the host.
"""

from __future__ import annotations

import os
from pathlib import PurePath

from nvpool.base.mounts import mount_of


def volumes_in_containers(below: str) -> set[str]:
    """Names of the volumes of which any other mount name space has a mount; volumes are in the directory `below` of a pool.

    Of two pools on one machine either counts, and a mount that is dead too: a name too many is a reference kept too long, one
    too few a volume that is removed under a container."""
    found: set[str] = set()
    spaces = {_space("self")}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or (space := _space(entry)) in spaces or space is None:
            continue
        try:
            with open(f"/proc/{entry}/mountinfo", "rb") as file:
                seen = [mount_of(line) for line in file if b"nvpool" in line]
        except OSError:
            continue  # it has ended; another one of its name space will do
        spaces.add(space)
        for mount in seen:
            if mount.ours and mount.root.is_relative_to(below) and mount.root != PurePath(below):
                found.add(mount.root.relative_to(below).parts[0])
    return found


def _space(entry: str) -> str | None:
    try:
        return os.readlink(f"/proc/{entry}/ns/mnt")
    except OSError:
        return None
