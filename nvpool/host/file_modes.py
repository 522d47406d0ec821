"""Modes of the files and directories of a pool: what other users of the machine may read, list and lock.

flock(2) needs no right to write: a file that others may open is one that they can lock, and so keep a daemon from starting.
Therefore locks are 0600, logs and the pool map 0640. The pool directory and run/ are 0751: another user reaches a socket in
them by its name, and lists nothing. Directories of records are 0750, log/ too, secret/ 0700. Members of the operator group
(`access.operators` in node.toml) read the logs and the map.

Called where a pool or a member is made, and by the supervisor at its start, which mends pools of earlier versions. Only takes
rights away, but for the group's; never follows a symbolic link.
"""

from __future__ import annotations

import grp
import logging
import os
import stat
from pathlib import Path

from nvpool.core.errors import BadConfiguration
from nvpool.host.log_files import LOG_MODE
from nvpool.host.pool_directory import MAP_MODE, PASSED_THROUGH_MODE, PRIVATE_MODE, RECORDS_MODE, PoolDirectory

_RUN_MODES = {".lock": PRIVATE_MODE, ".json": MAP_MODE, ".ended": PRIVATE_MODE, ".fenced": PRIVATE_MODE}
"""By the ending of the name in run/. Sockets have modes of their own, which say who may connect."""

log = logging.getLogger("nvpool.host.file_modes")


def group_number(name: str, setting: str) -> int | None:
    """The number of the group that `setting` of node.toml names, by name or number; None for no name. BadConfiguration."""
    if not name:
        return None
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise BadConfiguration(f"{setting}: this system has no group {name}; make it, or name another one") from None


def protect(directory: PoolDirectory, operators: int | None = None) -> None:
    """Take from other users what the modes above do not give them; `operators`: the group that reads logs and the map.

    May be repeated. What is not ours to change stays as it is, with a warning: a pool on such a file system works.
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
        log.warning("modes and groups in %s could not all be set as they should be, so other users may have rights there, or "
                    "the operators none: %s", directory.path, "; ".join(refused[:3]))


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _restrict(path: Path, mode: int, group: int | None) -> list[str]:
    """Leave at most `mode` to a regular file or directory, and the group; why that could not be, else nothing."""
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
