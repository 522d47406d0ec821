"""Mount points and mount options: check a point before a mount, and unmount, even if its daemon is dead.

Used by mountd/server and tests. No call here waits longer than a probe of a mount (host/mountinfo). The only
exception is an `unmount` that is not lazy: the kernel writes dirty pages back through the mount before it
returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

from nvpool.core.errors import (
    AccessDenied,
    InUse,
    InvalidRequest,
    NotADirectory,
    NotFound,
    NvpoolError,
    Unavailable,
)
from nvpool.host.mountinfo import OUR_TYPE, Mount, look_at, mount_at, place_of

_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


class MountOptions(NamedTuple):
    """Options of one mount: those of mount(8), and how the kernel reads and writes."""

    pool: str
    read_only: bool = False
    allow_other: bool = True
    extra: tuple[str, ...] = ()
    """Further options of mount(8): noexec, suid, dev, …"""
    max_read: int = 0
    """Bytes in one READ; 0: as many as the kernel allows.

    Only engine `kernel` uses this and the fields below.
    """
    max_background: int = 128
    """Pending background requests (read-ahead, write-back, large direct I/O); more wait in the kernel.

    No application waits for these.
    """
    congestion_threshold: int = 0
    """Pending background requests from which on the kernel reads less ahead.

    0: three quarters of max_background.
    """
    writeback: bool = False
    """Let the kernel cache written pages and write them later.

    Only if no other client changes the mounted files.
    """
    source: str = ""
    """Name of the mount's source in /proc/mounts; "": nvpool:POOL."""

    acl: bool = True
    """Let the kernel enforce access control lists.

    It queries them when a user other than the owner needs a right.
    """

    @property
    def shown(self) -> str:
        """Name of the mount's source in /proc/mounts."""
        return self.source or f"nvpool:{self.pool}"


def check_mount_point(path: Path, *, force: bool = False) -> Path:
    """Check a mount point and return its path: an empty directory with nothing mounted on it.

    Each error says why the directory is refused and what to do. `force` first removes a dead or hung mount of
    nvpool. Nothing else is changed.

    Raises NotFound, NotADirectory, InUse (a mount is there, or files), AccessDenied, Unavailable (no
    /dev/fuse, or the directory cannot be read).
    """
    place = place_of(path)
    for _ in range(2):
        there = mount_at(place)
        if there is None or there.type == "autofs":  # autofs waits for this mount and admits nobody before
            break
        state = look_at(place) if there.type.startswith("fuse") else "alive"
        if state == "alive":
            raise InUse(
                f"{place} has {there.source} ({there.type}) mounted on it; choose another directory, or unmount that"
                + (f" with: nvpool umount {place}" if there.type == OUR_TYPE else "")
            )
        if not force:
            raise InUse(
                f"{place} has a {state} mount of {there.source} on it (its process is gone or does not answer); clean "
                f"it with: nvpool umount {place}, or mount with --force"
            )
        unmount(place, lazy=True)
    try:
        found = os.stat(place)
    except FileNotFoundError:
        raise NotFound(f"{place} does not exist; make it with: mkdir -p {place}") from None
    except PermissionError:
        raise AccessDenied(f"{place} cannot be looked at by this user") from None
    except OSError as error:
        raise Unavailable(f"{place} cannot be looked at: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectory(f"{place} is not a directory; a mount needs an empty directory")
    try:
        first = None
        if there is None:
            with os.scandir(place) as entries:
                first = next(entries, None)
    except PermissionError:
        raise AccessDenied(f"{place} cannot be listed by this user") from None
    if first is not None:
        raise InUse(
            f"{place} is not empty ({first.name!r} is in it), and a mount would hide that; choose an empty directory"
        )
    check_fuse()
    return place


def check_fuse() -> None:
    """Check that this process can mount.

    Raises Unavailable or AccessDenied, with the remedy, if it cannot.
    """
    if not os.path.exists("/dev/fuse"):
        raise Unavailable(
            "there is no /dev/fuse here; load the kernel module (modprobe fuse), or give it to this container "
            "with: --device /dev/fuse --cap-add SYS_ADMIN"
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise AccessDenied(
            "/dev/fuse cannot be opened by this user; let root mount the pool, or allow it to all with: "
            "chmod 666 /dev/fuse"
        )


def unmount(path: Path, *, lazy: bool = False) -> None:
    """Unmount the uppermost mount at `path`. On return no new request can reach that mount.

    `lazy` takes the mount out of the name space immediately, even if it is in use or its daemon is dead.

    InvalidRequest: nothing is mounted there.
    InUse: files of the mount are open, or a process has its current directory there (never when lazy).
    AccessDenied: this user may not unmount it.
    Unavailable: any other failure.
    """
    place = place_of(path)
    if mount_at(place) is None:
        raise InvalidRequest(f"nothing is mounted at {place}")
    if os.geteuid():
        _unmount_as_user(place, lazy)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(place), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT) and mount_at(place) is None:
        return  # another process unmounted it first
    raise _refusal(place, number)


def _refusal(place: Path, number: int) -> NvpoolError:
    if number == errno.EBUSY:
        return InUse(
            f"{place} is in use; close what is open there (see: fuser -vm {place}), or unmount with --lazy"
        )
    if number == errno.EPERM:
        return AccessDenied(f"{place} cannot be unmounted by this user")
    return Unavailable(f"{place} could not be unmounted: {os.strerror(number)}")


def _unmount_as_user(place: Path, lazy: bool) -> None:
    try:
        done = subprocess.run(
            ["fusermount3", "-u", *(["-z"] if lazy else []), "--", os.fspath(place)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise AccessDenied("only root can unmount without fusermount3 (Debian package fuse3)") from None
    if done.returncode:
        busy = mount_at(place) is not None and "busy" in done.stderr
        raise (
            _refusal(place, errno.EBUSY)
            if busy
            else Unavailable(done.stderr.strip() or f"{place} could not be unmounted")
        )


def set_read_ahead(mount: Mount, byte_count: int) -> bool:
    """Set how many bytes the kernel reads ahead for sequential readers of this mount.

    The kernel's default for FUSE is 128 KiB, an eighth of what one request can carry. False: not permitted
    (the user is not root, or /sys is read-only).
    """
    try:
        Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb").write_text(str(byte_count >> 10))
    except OSError:
        return False
    return True
