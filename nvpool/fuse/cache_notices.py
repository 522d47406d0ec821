"""Notifications of the kernel engine: make the kernel drop or store names, attributes and pages.

`fuse/ops` decides which. Those that may wait go through a notifier (`fuse/notify`). Made by
`fuse/kernel/connection`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from nvpool.fuse.notify import ProcessNotifier, ThreadNotifier
from nvpool.fuse.protocol import replies
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState


class CacheNotices:
    """Sender of all notifications of one mount; see the module."""

    def __init__(self, requests: RequestState, sender: ReplySender) -> None:
        self._requests = requests
        self._sender = sender
        self._notifier: ThreadNotifier | ProcessNotifier = ThreadNotifier()

    async def send_by_process(self, connection: socket.socket, descriptor: int) -> None:
        """Send by the process at the other end of the connection from now on; see ProcessNotifier.

        `descriptor` is that of /dev/fuse.
        """
        self._notifier.close()
        self._notifier = notifier = ProcessNotifier()
        await notifier.begin(connection, descriptor)

    def close(self) -> None:
        """Send no more notifications that may wait."""
        self._notifier.close()

    def invalidate_attributes(self, inode: int) -> None:
        """Make the kernel mark the attributes as old. Without pages it returns immediately."""
        self._sender.send(replies.inval_inode(inode, -1, 0))

    async def invalidate(self, names: Iterable[tuple[int, bytes]], inodes: Iterable[int]) -> None:
        """Make the kernel query these names again, and drop all pages of these inodes."""
        notices = [replies.inval_entry(parent, name, expire_only=True) for parent, name in names]
        notices += [replies.inval_inode(inode, 0, 0) for inode in inodes]
        await self._notifier.write(self._requests.fd, notices)

    async def drop_pages(self, inode: int, offset: int, length: int) -> None:
        """Make the kernel drop its pages of that part of a file."""
        await self._notifier.write(self._requests.fd, [replies.inval_inode(inode, offset, length)])

    async def store_pages(self, inode: int, offset: int, content: bytes) -> None:
        """Put these bytes of a file into the kernel's pages."""
        notice = replies.store(inode, offset, len(content)) + content
        await self._notifier.write(self._requests.fd, [notice])

    async def forget_names(self, names: list[tuple[int, bytes]]) -> None:
        """Make the kernel drop these names (directory, name)."""
        notices = [replies.inval_entry(parent, name) for parent, name in names]
        await self._notifier.write(self._requests.fd, notices)
