"""Mounting without libfuse: mount(2) as root, fusermount3 as another user.

Returns the descriptor of /dev/fuse. On return there are a mount and its descriptor; on an error neither. Used
by `fuse/kernel/connection`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import socket
import stat
import subprocess
from pathlib import Path

from nvpool.core.errors import AccessDenied, InvalidRequest, Unavailable
from nvpool.fuse.mount_point import OUR_TYPE, MountOptions
from nvpool.host.mountinfo import options_in

DEVICE = "/dev/fuse"
FUSERMOUNT = "fusermount3"
_ANSWER_S = 30.0
"""Longest wait for fusermount3, which checks the mount point; that may be on a slow file system."""

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _SYNCHRONOUS, _DIRSYNC, _NOATIME, _NODIRATIME = (
    1,
    2,
    4,
    8,
    16,
    128,
    1024,
    2048,
)
FLAG_OF_OPTION = {
    "ro": (_RDONLY, True),
    "rw": (_RDONLY, False),
    "nosuid": (_NOSUID, True),
    "suid": (_NOSUID, False),
    "nodev": (_NODEV, True),
    "dev": (_NODEV, False),
    "noexec": (_NOEXEC, True),
    "exec": (_NOEXEC, False),
    "sync": (_SYNCHRONOUS, True),
    "async": (_SYNCHRONOUS, False),
    "dirsync": (_DIRSYNC, True),
    "noatime": (_NOATIME, True),
    "atime": (_NOATIME, False),
    "nodiratime": (_NODIRATIME, True),
    "diratime": (_NODIRATIME, False),
}
PASSED_OPTIONS = frozenset(("allow_other", "default_permissions"))
PASSED_VALUES = ("context=", "fscontext=", "defcontext=", "rootcontext=")
"""Options of a security module; passed on unchanged."""


def attach(mount_point: Path, options: MountOptions) -> int:
    """Mount there; returns the descriptor, non-blocking and closed by exec.

    InvalidRequest: an unknown option.
    AccessDenied: this user may not mount, or not with these options.
    Unavailable: there is no FUSE here, or the kernel refuses.
    """
    flags, words = parsed(options)
    descriptor = (
        _as_root(mount_point, options, flags, words)
        if not os.geteuid()
        else _as_user(mount_point, options, words)
    )
    os.set_blocking(descriptor, False)
    return descriptor


def parsed(options: MountOptions) -> tuple[int, list[str]]:
    """Flags of mount(2), and options of the file system."""
    flags = _NOSUID | _NODEV | _RDONLY * options.read_only
    words = ["default_permissions"]
    if options.allow_other:
        words.append("allow_other")
    if options.max_read:
        words.append(f"max_read={options.max_read}")
    for word in (word for extra in options.extra for word in options_in(extra)):
        if word in FLAG_OF_OPTION:
            flag, on = FLAG_OF_OPTION[word]
            flags = flags | flag if on else flags & ~flag
        elif word in PASSED_OPTIONS or word.startswith(PASSED_VALUES):
            if word not in words:
                words.append(word)
        else:
            raise InvalidRequest(
                f"{word!r} is not an option of a mount; there are {', '.join([*FLAG_OF_OPTION, *sorted(PASSED_OPTIONS)])}"
            )
    return flags, words


def _as_root(mount_point: Path, options: MountOptions, flags: int, words: list[str]) -> int:
    try:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"{DEVICE} cannot be opened: {error.strerror}") from None
    words = [
        f"fd={descriptor}",
        f"rootmode={stat.S_IFDIR:o}",
        f"user_id={os.getuid()}",
        f"group_id={os.getgid()}",
        *words,
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(
        os.fsencode(options.shown),
        os.fsencode(mount_point),
        OUR_TYPE.encode(),
        ctypes.c_ulong(flags),
        ",".join(words).encode(),
    ):
        number = ctypes.get_errno()
        os.close(descriptor)
        reason = f"{mount_point} could not be mounted: {os.strerror(number)}"
        if number in (errno.EPERM, errno.EACCES):
            raise AccessDenied(f"{reason}; a container needs --cap-add SYS_ADMIN")
        if number == errno.ENODEV:
            raise Unavailable(f"{reason}; load the kernel module with: modprobe fuse")
        raise Unavailable(reason)
    return descriptor


def _as_user(mount_point: Path, options: MountOptions, words: list[str]) -> int:
    """Mount by fusermount3.

    The program opens the device, mounts, and sends the descriptor through the socket that _FUSE_COMMFD names.
    """
    shown = options.shown.replace("\\", r"\\").replace(",", r"\,")
    said = [f"fsname={shown}", f"subtype={OUR_TYPE.partition('.')[2]}", *words]
    said += ["ro"] * options.read_only + [
        word for extra in options.extra for word in options_in(extra) if word in FLAG_OF_OPTION
    ]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(_ANSWER_S)
        try:
            program = subprocess.Popen(
                [FUSERMOUNT, "-o", ",".join(said), "--", os.fspath(mount_point)],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError:
            raise AccessDenied(f"only root can mount without {FUSERMOUNT} (Debian package fuse3)") from None
        theirs.close()
        descriptor = -1
        try:
            descriptor = _received(ours)
            _, stderr = program.communicate(timeout=_ANSWER_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            program.kill()
            _, stderr = program.communicate()
            stderr = stderr or str(error)
        if descriptor < 0 or program.returncode:
            if descriptor >= 0:
                os.close(descriptor)
            raise AccessDenied(
                f"{mount_point} could not be mounted: {stderr.strip() or 'fusermount3 says no more'}"
            )
    return descriptor


def _received(channel: socket.socket) -> int:
    """The descriptor that comes with one byte; -1: the other end sends nothing."""
    numbers = array.array("i")
    with contextlib.suppress(ConnectionError):
        _, more, _, _ = channel.recvmsg(1, socket.CMSG_LEN(numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in more:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return numbers[0] if numbers else -1
