"""Which volumes are seen in mount name spaces other than our own: in those of containers.

Called by bridge/volumes when it finds out which references are still somebody's. Reads /proc only, touches no mount. Sees the
processes of this PID name space, so that the bridge runs in that of the host.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from nvpool.host.mountinfo import mount_of


def volumes_in_containers(below: str, own: PurePath, proc: Path = Path("/proc")) -> set[str]:
    """Names of the volumes of which any other mount name space has a mount; volumes are in the directory `below` of a pool.

    Binds below `own` are the bridge's: a service with a name space of its own has copies of them, and uses no volume. Of two
    pools on one machine either counts, and a mount that is dead too: a name too many is a reference kept too long, one too few
    a volume that is removed under a container."""
    found: set[str] = set()
    spaces = {_space(proc / "self")}
    for entry in os.listdir(proc):
        if not entry.isdigit() or (space := _space(proc / entry)) in spaces or space is None:
            continue
        try:
            with open(proc / entry / "mountinfo", "rb") as file:
                seen = [mount_of(line) for line in file if b"nvpool" in line]
        except OSError:
            continue  # it has ended; another one of its name space will do
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
