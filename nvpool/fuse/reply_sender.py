"""Replies of the kernel engine: encode and send them, and handle those that the kernel refuses.

Used by `fuse/dispatch` and the fast paths. A reply goes to the descriptor that its request was read from.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from typing import Any

from nvpool.core import primitives
from nvpool.fuse.ops.inline_completions import OpenReply
from nvpool.fuse.ops.operations import FuseOps, errno_of
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import Opening
from nvpool.fuse.request_state import RequestState
from nvpool.rpc.messages.meta_messages import Attr

log = logging.getLogger(__name__)

_DIRECT_IO, _KEEP_CACHE, _NOFLUSH = Opening.DIRECT_IO.value, Opening.KEEP_CACHE.value, Opening.NOFLUSH.value


class ReplySender:
    """Sender of all replies of one mount; see the module."""

    def __init__(self, requests: RequestState, ops: FuseOps) -> None:
        self._requests = requests
        self._ops = ops
        self._keep_attr, self._keep_entry = requests.keep_attr, requests.keep_entry
        self._keep_absent = requests.keep_absent

    def send(self, head: bytes, payload: bytes | memoryview | None = None) -> None:
        """Send a reply, in one part or two; its header says to which request it belongs."""
        requests: Any = self._requests
        fd: int = self._back(head) if requests.forwarded else requests.fd
        if payload is None:
            code = primitives.write_whole(fd, head)
            if code:
                self._not_taken(OSError(code, os.strerror(code)), (head,))
            return
        try:
            os.writev(fd, (head, payload))
        except OSError as error:
            self._not_taken(error, (head, payload))

    def _back(self, head: bytes) -> int:
        """Descriptor to which a reply or notification is written while workers have forwarded requests."""
        return self._requests.forwarded.get(replies.HEADER.unpack_from(head)[2], self._requests.fd)

    def _not_taken(self, error: OSError, parts: Sequence[bytes | memoryview]) -> None:
        """Handle a refused reply: its caller would wait forever, so send EIO instead."""
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
            return  # no caller waits for it any more
        length, _, unique = replies.HEADER.unpack_from(parts[0])
        log.error("an answer of %d bytes was refused by the kernel: %s", length, error)
        if len(parts) > 1 or length > replies.HEADER_BYTES:
            self.send(replies.failed(unique, errno.EIO))

    def answer_refused(self, unique: int, code: int, length: int) -> None:
        """Handle a reply of `length` bytes, sent by a compiled module, that the kernel has refused."""
        self._not_taken(OSError(code, os.strerror(code)), [replies.HEADER.pack(length, 0, unique)])

    def fail(self, unique: int, error: BaseException, name: str) -> None:
        """Reply with the error number for `error`; `name`: the operation, for the log."""
        self.send(replies.failed(unique, errno_of(error, name)))

    def done(self, unique: int, _result: object = None) -> None:
        """Reply with success."""
        self.send(replies.done(unique))

    def data(self, unique: int, payload: bytes | memoryview) -> None:
        """Reply with bytes."""
        length = len(payload)
        self._requests.read_bytes += length
        self.send(replies.data(unique, length), payload)

    def attributes(self, unique: int, attr: Attr) -> None:
        """Reply with attributes."""
        self.send(replies.attributes(unique, attr, self._keep_attr))

    def statx(self, unique: int, found: tuple[Attr, Any]) -> None:
        """Reply with attributes and the time of birth."""
        attr, born = found
        self.send(replies.statx(unique, attr, self._keep_attr, born))

    def entry(self, unique: int, attr: Attr | None) -> None:
        """Reply with the attributes of a name; None: the name is absent."""
        if attr is not None:
            keep = self._keep_entry if self._ops.cached_names.name_is_kept else replies.NOT_KEPT
            self.send(replies.entry(unique, attr, keep, self._keep_attr))
        elif self._keep_absent > (0, 0):
            self.send(replies.absent(unique, self._keep_absent))
        else:
            self.send(replies.failed(unique, errno.ENOENT))

    def opened(self, unique: int, opened: OpenReply) -> None:
        """Reply with an open file."""
        self.send(replies.opened(unique, opened.handle, _opening(opened)))

    def opened_directory(self, unique: int, handle: int) -> None:
        """Reply with the handle of a directory."""
        self.send(replies.opened(unique, handle, 0))

    def created(self, unique: int, result: tuple[Attr, OpenReply]) -> None:
        """Reply with a new file: (attributes, the open file)."""
        attr, opened = result
        keep = self._keep_entry if self._ops.cached_names.name_is_kept else replies.NOT_KEPT
        self.send(replies.created(unique, attr, keep, self._keep_attr, opened.handle, _opening(opened)))

    def count(self, unique: int, size: int) -> None:
        """Reply with a number of bytes."""
        self.send(replies.count(unique, size))

    def number(self, unique: int, value: int) -> None:
        """Reply with an offset, or a long number of bytes."""
        self.send(replies.number(unique, value))

    def space(self, unique: int, space: Any) -> None:
        """Reply with the space of the file system."""
        self.send(
            replies.space(
                unique,
                space.blocks_total,
                space.blocks_free,
                space.blocks_available,
                space.files_total,
                space.files_free,
                space.block_bytes,
                space.name_bytes_max,
            )
        )

    def value(self, room: int, unique: int, value: bytes) -> None:
        """Reply with an extended attribute, or a list of them.

        `room`: bytes that the caller has for it; 0: the caller requests the size.
        """
        if not room:
            self.count(unique, len(value))
        elif len(value) > room:
            self.send(replies.failed(unique, errno.ERANGE))
        else:
            self.data(unique, value)

    def lock(self, unique: int, found: tuple[int, int, int, int]) -> None:
        """Reply with a lock that another caller has: (kind, start, end, pid)."""
        kind, start, end, pid = found
        self.send(replies.lock(unique, start, end, kind, pid))


def _opening(opened: OpenReply) -> int:
    return (
        _DIRECT_IO * bool(opened.direct_io)
        | _KEEP_CACHE * bool(opened.keep_cache)
        | _NOFLUSH * bool(opened.no_flush)
    )
