"""Program that makes or removes one bind mount, in a process of its own.

`python -P -m nvpool.bridge.bind_helper` reads a JSON request from stdin and writes a JSON reply to stdout.
bridge/bind_mounts starts it for each bind: a process that accesses a hung mount hangs too, and this process
can be killed at a deadline. Guarantees:

- Only a directory of the volume is bound. openat2(2) resolves the path beneath the volume's directory and
  without symbolic links, and exactly the opened directory is bound (open_tree(2), move_mount(2)), so a
  container that changes the volume meanwhile cannot redirect the bind.
- A read-only bind is read-only from its creation.
- Every request may be repeated.

Needs Linux 5.12 or later.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

from nvpool.core.errors import (
    AccessDenied,
    InUse,
    InvalidRequest,
    NotADirectory,
    NotFound,
    NotSupported,
    NvpoolError,
    TooManySymlinks,
    Unavailable,
    every_error,
)
from nvpool.host.mountinfo import Mount, mounts

_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
"""System call numbers, the same on every architecture since Linux 5.0."""
_OPEN_TREE_CLONE, _AT_EMPTY_PATH = 1, 0x1000
_MOVE_F_EMPTY_PATH, _MOVE_T_EMPTY_PATH = 4, 0x40
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_libc = ctypes.CDLL(None, use_errno=True)


def bind(root: str, volume: str, subpath: str, target: str, read_only: bool, make: bool = False) -> bool:
    """Bind the directory `subpath` of a volume at `target`; return False if that bind existed already.

    `volume` is the path of the volume below the pool's mount `root`. `target` is created if it is missing.
    Another bind of a volume at `target`, for example of a mount that is gone, is unmounted first; processes
    with open files there keep these. `make`: missing directories of `subpath` are created.

    Unavailable         the pool is not mounted at `root`
    NotFound, NotADirectory, TooManySymlinks   the path must be a directory, without symbolic links on the way
    InUse               a mount at `target`, or over it, is no bind of a volume
    """
    whole = _uppermost(root)
    if whole is None or not whole.ours:
        raise Unavailable(f"the pool is not mounted at {root}")
    wanted = os.path.normpath(f"{whole.root}/{volume}/{subpath}")
    tree = -1
    outer = _open(
        os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), volume, f"the volume's directory {volume}"
    )
    try:
        if make:
            _make(outer, subpath)
        inner = _open(os.dup(outer), subpath, f"subpath {subpath!r}") if subpath else os.dup(outer)
    finally:
        os.close(outer)
    try:
        there = _uppermost(target)
        if there is not None:
            if (there.device, str(there.root), there.read_only) == (whole.device, wanted, read_only):
                return False
            unbind(target, volume.partition("/")[0])
        os.makedirs(target, mode=0o700, exist_ok=True)
        tree = _call(
            _OPEN_TREE, inner, b"", _OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC, doing="bind the volume"
        )
        attributes = struct.pack(
            "=QQQQ", _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0), 0, 0, 0
        )
        _call(
            _MOUNT_SETATTR,
            tree,
            b"",
            _AT_EMPTY_PATH,
            attributes,
            len(attributes),
            doing="make the bind read-only",
        )
        place = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _call(
                _MOVE_MOUNT,
                tree,
                b"",
                place,
                b"",
                _MOVE_F_EMPTY_PATH | _MOVE_T_EMPTY_PATH,
                doing=f"bind the volume at {target}",
            )
        finally:
            os.close(place)
    finally:
        os.close(inner)
        if tree >= 0:
            os.close(tree)
    return True


def unbind(target: str, volumes: str, remove: bool = False) -> bool:
    """Unmount the binds of volumes at `target`; return False if there was none.

    `volumes` is the directory in the root of the pool that contains all volumes. `remove`: remove the
    directory `target` too, if it is empty. The unmount is lazy, so it does not hang, and processes with open
    files there keep these. InUse: the mount is no bind of a volume, or lies under another mount.
    """
    done = False
    while (there := _uppermost(target)) is not None:
        if not there.ours:
            raise InUse(
                f"{target} has {there.source} ({there.type}) mounted on it, which is not of nvpool; unmount that first"
            )
        if there.root == Path("/"):  # a bind shows a directory of the pool; this is a mount of the whole pool
            raise InUse(
                f"{target} is a mount of the pool {there.source} itself, and no volume's; end it with: nvpool umount "
                f"{target}"
            )
        if there.root.parts[1] != volumes:
            raise InUse(
                f"{target} shows {there.root} of the pool {there.source}, which is not a volume; unmount that first"
            )
        if _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW):
            number = ctypes.get_errno()
            if number not in (errno.EINVAL, errno.ENOENT):  # another process unmounted it first
                raise _error(number, f"unmount {target}")
            if _uppermost(target) == there:
                raise InUse(
                    f"what is mounted at {target} cannot be reached: another mount lies over the path; unmount that "
                    f"first"
                )
        done = True
    if remove:
        try:
            os.rmdir(target)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOTDIR):  # files that others put there stay
                raise _error(error.errno or 0, f"remove {target}") from error
    return done


def _uppermost(target: str) -> Mount | None:
    place = Path(os.path.realpath(os.path.dirname(target))) / os.path.basename(target)
    return next((mount for mount in reversed(mounts()) if mount.point == place), None)


def _open(parent: int, path: str, what: str) -> int:
    """Open the directory `path` beneath the descriptor `parent`, and close `parent`."""
    how = struct.pack(
        "=QQQ",
        os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC,
        0,
        _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS | _NO_XDEV,
    )
    try:
        return _call(_OPENAT2, parent, os.fsencode(path), how, len(how), doing=f"open {what}")
    finally:
        os.close(parent)


def _make(outer: int, subpath: str) -> None:
    here = os.dup(outer)
    try:
        for name in subpath.split("/") if subpath else ():
            try:
                os.mkdir(name, 0o755, dir_fd=here)
            except FileExistsError:
                pass  # may be a symbolic link; `_open` does not follow it
            closed, here = here, -1
            here = _open(closed, name, f"subpath {subpath!r}")
    finally:
        if here >= 0:
            os.close(here)


def _call(number: int, *arguments: Any, doing: str) -> int:
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        raise _error(ctypes.get_errno(), doing)
    return result


def _error(number: int, doing: str) -> NvpoolError:
    text = f"{doing}: {os.strerror(number)}"
    match number:
        case errno.ENOENT:
            return NotFound(f"{text}; make it first")
        case errno.ENOTDIR | errno.EEXIST:
            return NotADirectory(text)
        case errno.ELOOP:
            return TooManySymlinks(
                f"{doing}: there is a symbolic link in it, and those are not followed out of a container's "
                "volume; name the directory itself"
            )
        case errno.EXDEV:
            return InvalidRequest(f"{doing}: it leads out of the volume")
        case errno.EPERM | errno.EACCES:
            return AccessDenied(f"{text}; the bridge runs as root, with CAP_SYS_ADMIN")
        case errno.ENOSYS | errno.EOPNOTSUPP:
            return NotSupported(f"{text}; Linux 5.12 or later is needed")
        case errno.EBUSY:
            return InUse(text)
    return Unavailable(text)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request and return the reply: {"done": …}, or {"error": wire code, "text": …}."""
    verbs = {"bind": bind, "unbind": unbind}
    try:
        return {"done": verbs[request.pop("verb")](**request)}
    except NvpoolError as error:
        return {"error": error.wire_code, "text": str(error)}
    except OSError as error:
        ours = _error(error.errno or 0, f"use {error.filename or 'the mount'}")
        return {"error": ours.wire_code, "text": str(ours)}


def error_of(reply: dict[str, Any]) -> NvpoolError:
    """Return the error that `answer` put into a reply."""
    found = next((cls for cls in every_error() if cls.wire_code == reply.get("error")), Unavailable)
    return found(str(reply.get("text", "")))


if __name__ == "__main__":
    os.umask(0o022)  # for directories in a volume; the umask of the bridge is for its own files
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
