"""Notices to the kernel that may have to wait: for directories that are being changed and pages that are being read, which wait
for answers of who serves the mount.

So they are written by threads; and where the mount outlives its process, by threads of another one. Such a write can not be
interrupted: a killed process that is in it is not gone before it returns, and its successor, for whose answer it waits, does
not begin before it is gone. Called by fuse/kernel/dispatch, and by the programs of a mount.
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
"""Threads. Each may stand at a notice that waits for a request, as long as that waits for a store."""
_FRAME = struct.Struct("=II")
"""number, bytes of the notices that follow"""
_NUMBER = struct.Struct("=I")

log = logging.getLogger(__name__)


class ByThreads:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NOTICERS, thread_name_prefix="fuse-notice")

    async def write(self, descriptor: int, notices: list[bytes]) -> None:
        """The kernel has been told when this returns, or will not be. `descriptor` may be closed meanwhile."""
        descriptor = os.dup(descriptor)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, _write_all, descriptor, notices)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class ByProcess(asyncio.Protocol):
    """By a process that runs `write_for` with the other end of the connection. By threads when that has died."""

    def __init__(self) -> None:
        self._otherwise = ByThreads()
        self._transport: asyncio.Transport | None = None
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._numbers = count()
        self._received = b""

    async def begin(self, connection: socket.socket, descriptor: int) -> None:
        """From now on; `descriptor` is that of /dev/fuse."""
        try:
            socket.send_fds(connection, [b"."], [descriptor])
        except ConnectionError:
            connection.close()
            return
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    async def write(self, descriptor: int, notices: list[bytes]) -> None:
        """As ByThreads.write."""
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
        await self._otherwise.write(descriptor, notices)  # twice does no harm

    def data_received(self, data: bytes) -> None:
        self._received += data
        whole = len(self._received) // _NUMBER.size * _NUMBER.size
        for number, in _NUMBER.iter_unpack(self._received[:whole]):
            self._told(number, True)
        self._received = self._received[whole:]

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        for number in list(self._asked):
            self._told(number, False)

    def _told(self, number: int, written: bool) -> None:
        done = self._asked.get(number)
        if done is not None and not done.done():
            done.set_result(written)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._otherwise.close()


def write_for(connection: socket.socket) -> int:
    """Write what a ByProcess says until its end; the exit code. What is being written then is not waited for."""
    said, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not said:
        return 0
    threads = ThreadPoolExecutor(NOTICERS)

    def write(number: int, notices: list[bytes]) -> None:
        _write_all(descriptors[0], notices)
        connection.send(_NUMBER.pack(number))  # whole or not at all: it is one piece of the socket's memory

    file = connection.makefile("rb")
    with contextlib.suppress(ConnectionError):  # it has died before it took an answer
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            number, length = _FRAME.unpack(frame)
            content = file.read(length)
            if len(content) == length:
                threads.submit(partial(write, number, _taken_apart(content)))
    return 0


def _taken_apart(content: bytes) -> list[bytes]:
    """Each begins with its length."""
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
            if error.errno != errno.ENOENT:  # which is what the kernel does not know any more
                log.error("the kernel has not taken a notice: %s", error)
