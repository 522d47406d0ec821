"""Sending of notifications to the kernel, which may have to wait.

A notification waits for directories that are being changed and for pages that are being read; those in turn
wait for replies of the serving process. So threads write the notifications; if the mount outlives its
process, threads of another process do. Such a write cannot be interrupted: a process that is killed during
the write is not gone before it returns. And the successor, whose reply the write waits for, does not start
before the process is gone. Used by fuse/cache_notices and by the programs of a mount.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

NOTICERS = 4
"""Threads.

Each may be blocked by a notification that waits for a request, as long as that waits for a store.
"""
_FRAME = struct.Struct("=II")
"""number, bytes of the notifications that follow"""
_NUMBER = struct.Struct("=I")

log = logging.getLogger(__name__)


class ThreadNotifier:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NOTICERS, thread_name_prefix="fuse-notice")

    async def write(self, descriptor: int, notices: list[bytes]) -> None:
        """Send notifications.

        On return the kernel has received them, or never will. `descriptor` may be closed meanwhile.
        """
        descriptor = os.dup(descriptor)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, _write_all, descriptor, notices)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class ProcessNotifier(asyncio.Protocol):
    """Sender in another process, which runs `write_for` with the other end of the connection.

    After that process has died, threads of this one send.
    """

    def __init__(self) -> None:
        self._otherwise = ThreadNotifier()
        self._transport: asyncio.Transport | None = None
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._numbers = count()
        self._received = b""

    async def begin(self, connection: socket.socket, descriptor: int) -> None:
        """Start to send by that process; `descriptor` is that of /dev/fuse."""
        try:
            socket.send_fds(connection, [b"."], [descriptor])
        except ConnectionError:
            connection.close()
            return
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: self, sock=connection
        )

    async def write(self, descriptor: int, notices: list[bytes]) -> None:
        """Send notifications as ThreadNotifier.write does."""
        if self._transport is not None:
            number = next(self._numbers) & 0xFFFFFFFF
            done = self._asked[number] = asyncio.get_running_loop().create_future()
            content = b"".join(notices)
            self._transport.write(_FRAME.pack(number, len(content)) + content)
            try:
                if await done:
                    return
            finally:
                del self._asked[number]
        await self._otherwise.write(descriptor, notices)  # sending one twice does no harm

    def data_received(self, data: bytes) -> None:
        self._received += data
        whole = len(self._received) // _NUMBER.size * _NUMBER.size
        for (number,) in _NUMBER.iter_unpack(self._received[:whole]):
            self._complete(number, True)
        self._received = self._received[whole:]

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        for number in list(self._asked):
            self._complete(number, False)

    def _complete(self, number: int, written: bool) -> None:
        done = self._asked.get(number)
        if done is not None and not done.done():
            done.set_result(written)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._otherwise.close()


def write_for(connection: socket.socket) -> int:
    """Write notifications for a ProcessNotifier until it closes the connection; returns the exit code.

    Does not wait for a write that is in progress then.
    """
    said, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not said:
        return 0
    threads = ThreadPoolExecutor(NOTICERS)

    def write(number: int, notices: list[bytes]) -> None:
        _write_all(descriptors[0], notices)
        # sent completely or not at all: it is one piece of the socket's memory
        connection.send(_NUMBER.pack(number))

    file = connection.makefile("rb")
    with contextlib.suppress(ConnectionError):  # the peer died before it took a reply
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            number, length = _FRAME.unpack(frame)
            content = file.read(length)
            if len(content) == length:
                threads.submit(partial(write, number, _taken_apart(content)))
    return 0


def _taken_apart(content: bytes) -> list[bytes]:
    """Split notifications; each begins with its length."""
    notices = []
    while content:
        length = int.from_bytes(content[:4], sys.byteorder)
        notices.append(content[:length])
        content = content[length:]
    return notices


def _write_all(descriptor: int, notices: list[bytes]) -> None:
    for notice in notices:
        try:
            os.write(descriptor, notice)
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                return
            if error.errno != errno.ENOENT:  # ENOENT: the kernel does not know the name or inode any more
                log.error("the kernel has not taken a notice: %s", error)
