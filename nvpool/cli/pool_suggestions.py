"""Pools of this machine, to suggest when a command could not find its pool.

Finds the pools that run here, those that are mounted here, and pool directories beside the path that the
user named. Reads /proc and one directory, and never raises.
"""

from __future__ import annotations

import contextlib
import os
from difflib import get_close_matches

from nvpool.core.programs import Program, processes, program_of
from nvpool.host.mountinfo import mount_over, place_of, pool_of
from nvpool.host.pool_directory import PoolDirectory

_SHOWN_MAX = 8
_BESIDE_MAX = 1000


def remedy_for(named: str) -> str:
    """Return the remedy for a wrong POOL: pools that the user may have meant, or how to name a pool."""
    path = os.path.abspath(named)
    here = running()
    beside = [pool for pool in _beside(path) if pool not in here]
    known = [*here, *beside]
    near = get_close_matches(path, known, 1, 0.8) or get_close_matches(os.path.basename(path), known, 1, 0.8)
    words = [f"did you mean {near[0]}?"] if near else []
    if known:
        shown = ", ".join(known[:_SHOWN_MAX]) + (
            f" and {len(known) - _SHOWN_MAX} more" if len(known) > _SHOWN_MAX else ""
        )
        words.append(f"pools on this machine: {shown}")
    else:
        words.append(
            "no pool runs on this machine; name the directory of a pool, or HOST:PORT of any of its nodes"
        )
    return " ".join(words)


def running() -> list[str]:
    """Return the directories and addresses of pools that visible processes of this machine serve or mount."""
    found: dict[str, None] = {}
    for _, words in processes(Program.SUPERVISOR, Program.MOUNT, Program.MOUNT_HOLDER):
        if program_of(words) is not Program.SUPERVISOR:
            found[words[-2]] = None
        elif (after := words.index(Program.SUPERVISOR.title) + 1) < len(words):
            found[words[after]] = None
    return sorted(pool for pool in found if not pool.startswith("/") or os.path.isdir(pool))


def _beside(path: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        with os.scandir(os.path.dirname(path)) as entries:
            for _, entry in zip(range(_BESIDE_MAX), entries, strict=False):
                if entry.is_dir() and PoolDirectory(entry.path).exists():
                    found.append(entry.path)
    return sorted(found)


def pool_behind(named: str) -> str:
    """Return the pool that is mounted at `named`; `named` itself if it is not the mount point of a pool."""
    if "://" in named or not os.path.isdir(named) or PoolDirectory(named).exists():
        return named
    mount = mount_over(named)
    if mount is None or not mount.ours or place_of(named) != mount.point:
        return named
    behind = pool_of(mount)
    return behind[0] if behind is not None else named
