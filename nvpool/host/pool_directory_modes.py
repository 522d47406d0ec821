"""File modes of a pool directory: what other users of the machine may read, list and lock.

flock(2) needs no write permission: a user who can open a file can lock it, and so prevent a daemon from
starting. Therefore lock files are 0600, logs and the pool map 0640. The pool directory and run/ are 0751:
other users can reach a socket in them by its name, but cannot list them. Directories of records and log/ are
0750, secret/ is 0700. Members of the operator group (`access.operators` in node.toml) may read the logs and
the map.

Called when a pool or a member is created, and by the supervisor at its start, to repair pools of earlier
versions. The module only removes permissions, except those of the group, and never follows a symbolic link.
"""

from __future__ import annotations

import grp
import logging
import os
import stat
from pathlib import Path

from nvpool.core.errors import BadConfiguration
from nvpool.host.log_files import LOG_MODE
from nvpool.host.pool_directory import (
    MAP_MODE,
    PASSED_THROUGH_MODE,
    PRIVATE_MODE,
    RECORDS_MODE,
    PoolDirectory,
)

_RUN_MODES = {".lock": PRIVATE_MODE, ".json": MAP_MODE, ".ended": PRIVATE_MODE, ".fenced": PRIVATE_MODE}
"""Mode by file name suffix in run/. Sockets have their own modes, which control who may connect."""

log = logging.getLogger("nvpool.host.pool_directory_modes")


def group_number(name: str, setting: str) -> int | None:
    """Return the number of the group in `setting` of node.toml; None if `name` is empty.

    `name` is a group name or number. BadConfiguration: the system has no such group.
    """
    if not name:
        return None
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise BadConfiguration(
            f"{setting}: this system has no group {name}; make it, or name another one"
        ) from None


def protect(directory: PoolDirectory, operators: int | None = None) -> None:
    """Remove permissions of other users beyond the modes above; `operators` is the group that reads logs and
    the map.

    May be repeated. A mode that this process cannot change stays, with a warning: a pool on such a file
    system works.
    """
    refused = []
    for path in (directory.path, directory.run, directory.socket_directory()):
        refused += _restrict(path, PASSED_THROUGH_MODE, operators)
    for path in (directory.log, directory.map, directory.path / "meta", directory.path / "targets"):
        refused += _restrict(path, RECORDS_MODE, operators if path == directory.log else None)
    refused += _restrict(directory.poolmap, MAP_MODE, operators)
    for path in (directory.lock, directory.reserve):
        refused += _restrict(path, PRIVATE_MODE, None)
    for entry in _entries(directory.log):
        refused += _restrict(entry, LOG_MODE, operators)
    for entry in _entries(directory.run):
        if (mode := _RUN_MODES.get(entry.suffix)) is not None:
            refused += _restrict(entry, mode, operators if mode == MAP_MODE else None)
    if refused:
        log.warning(
            "modes and groups in %s could not all be set as they should be, so other users may have rights there, or "
            "the operators none: %s",
            directory.path,
            "; ".join(refused[:3]),
        )


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _restrict(path: Path, mode: int, group: int | None) -> list[str]:
    """Limit a regular file or directory to `mode`, and set its group; return the reasons for failures."""
    try:
        found = os.lstat(path)
        if not (stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)):
            return []
        wanted = found.st_mode & 0o7777 & (mode | 0o7000)
        if group is not None:
            wanted |= mode & 0o070 | (stat.S_ISGID if stat.S_ISDIR(found.st_mode) else 0)
        if wanted == stat.S_IMODE(found.st_mode) and group in (None, found.st_gid):
            return []
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not os.path.samestat(found, os.fstat(descriptor)):
                return [f"{path} was replaced meanwhile"]
            if group not in (None, found.st_gid):
                os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, wanted)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        pass
    except OSError as error:
        return [f"{path}: {error.strerror or error}"]
    return []
