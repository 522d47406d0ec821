"""File descriptor passing: a unix socket that sends one message to each connection and closes it.

Used for short-circuit reads: a store passes the descriptors of its data to clients on its host. Access is
decided by the mode of the socket file, and then by the credentials of the peer process (SO_PEERCRED,
SO_PEERGROUPS), which the kernel reports and a process cannot forge. Asyncio's transports cannot carry
descriptors, so this is a second socket beside the one for requests. The message, little-endian, with a golden
file in tests/golden/short-cut.json:

    magic "NPfd" · version u16 = 2 · status u16 (0, or an error's wire code) · server's text, up to 256 bytes

The server never waits for a peer: a response fits into the socket's buffer, and a peer that has disconnected
loses it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Container, Sequence

from nvpool.core import errors
from nvpool.core.errors import (
    AccessDenied,
    CorruptFrame,
    NotSupported,
    NvpoolError,
    Unavailable,
    Unreachable,
    from_os_error,
)
from nvpool.rpc.peer_roles import credentials_of

log = logging.getLogger(__name__)

HEAD = struct.Struct("<4sHH")
MAGIC, VERSION = b"NPfd", 2
SAID_BYTES_MAX = 256
DESCRIPTORS_MAX = 4
_ACCEPTS_A_TURN = 16


def path_beside(path: str) -> str:
    """Path of the descriptor socket beside the request socket `path`; never longer than `path`."""
    return path.removesuffix(".sock") + ".fd"


class Handover:
    """Server side. Sends descriptors to root, the user of this process and members of `group` only.

    `give()` returns the text to send and the descriptors, which are closed after they are sent. An
    NvpoolError that `give()` raises is sent to the client.
    """

    def __init__(
        self, path: str, give: Callable[[], tuple[bytes, Sequence[int]]], *, group: int | None = None
    ) -> None:
        self.path = path
        self._give = give
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None

    def start(self) -> None:
        """Listen; a socket that an earlier process left at the path is replaced.

        AccessDenied, DriveFailed: as the file system reports.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(self.path, follow_symlinks=False).st_mode):
                    os.unlink(self.path)
            sock.bind(self.path)
            os.chmod(self.path, 0o600)
            if self._group is not None:
                os.chown(self.path, -1, self._group)
                os.chmod(self.path, 0o660)
            sock.listen(128)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise from_os_error(error, f"listening at {self.path}") from None
        self._sock = sock
        self._loop.add_reader(sock.fileno(), self._accept)

    def allows(self, uid: int, groups: Container[int]) -> bool:
        return uid in (0, os.geteuid()) or (self._group is not None and self._group in groups)

    def _accept(self) -> None:
        listening = self._sock
        if listening is None:
            return
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = listening.accept()
            except OSError:  # no more clients; or no free descriptor: served when there is one
                return
            with sock:
                self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        descriptors: Sequence[int] = ()
        try:
            sock.setblocking(False)
            uid, groups, _ = credentials_of(sock)
            try:
                if not self.allows(uid, groups):
                    raise AccessDenied(f"user {uid} is not of the pool's group")
                said, descriptors = self._give()
                socket.send_fds(sock, [HEAD.pack(MAGIC, VERSION, 0) + said], descriptors)
            except NvpoolError as error:
                log.info("%s: %s", self.path, error)
                sock.send(HEAD.pack(MAGIC, VERSION, error.wire_code))
        except OSError as error:
            log.debug("%s: %s", self.path, error)  # the client has disconnected
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
            with contextlib.suppress(OSError):
                os.unlink(self.path)


async def take(path: str, timeout_s: float) -> tuple[bytes, list[int]]:
    """Receive the text and the descriptors that the server at `path` sends.

    The caller must close the descriptors; child processes do not inherit them.

    AccessDenied       the server refuses this process
    NotSupported       no socket exists there, or the server speaks another version
    Unreachable        nobody listens there, or nobody answered in time
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, path)
                return await _received(loop, sock)
        except PermissionError:
            raise AccessDenied(f"{path} is not for this user") from None
        except FileNotFoundError:
            raise NotSupported(f"nothing is given at {path}") from None
        except OSError as error:  # TimeoutError is one
            raise Unreachable(f"{path}: {error.strerror or 'timed out'}") from None


async def _received(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> tuple[bytes, list[int]]:
    while True:
        try:
            said, ancillary, _, _ = sock.recvmsg(
                HEAD.size + SAID_BYTES_MAX, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX), socket.MSG_CMSG_CLOEXEC
            )
            break
        except BlockingIOError:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(sock.fileno(), _set_ready, ready)
            try:
                await ready
            finally:
                loop.remove_reader(sock.fileno())
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors += array.array("i", content[: len(content) // 4 * 4])
    try:
        if not said:
            raise OSError(errno.ECONNRESET, "the other side has hung up")
        try:
            magic, version, status = HEAD.unpack_from(said)
        except struct.error:
            raise CorruptFrame("what came with descriptors is too short") from None
        if magic != MAGIC or version != VERSION:
            raise NotSupported(f"descriptors come in version {version} here, this nvpool knows {VERSION}")
        if status:
            raise errors.BY_WIRE_CODE.get(status, Unavailable)(f"refused with {status}")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return said[HEAD.size :], descriptors


def _set_ready(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
