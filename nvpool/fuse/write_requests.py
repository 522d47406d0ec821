"""WRITE and FLUSH of the kernel engine: decode the request, call `fuse/ops/operations`, send the reply.

A part of `fuse/dispatch`. A request that need not wait is answered before its handler returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any

from nvpool.client.state.vfs_types import Caller
from nvpool.core.primitives import ByteReader
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import ASIDE
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.protocol import requests
from nvpool.fuse.protocol.constants import WRITE_KILL_SUIDGID
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState

_WRITE_BYTES = requests.WRITE_BYTES
_FLUSH_BYTES = requests.RELEASE_BYTES
_FIRST, _KILL, _ASIDE, _APPEND, _SYNC = FIRST, WRITE_KILL_SUIDGID, ASIDE, os.O_APPEND, os.O_DSYNC


class WriteRequests:
    """Handlers of WRITE and FLUSH; each is called with the length of the request in the buffer.

    `keep` and `start` are those of KernelRequests.
    """

    def __init__(
        self,
        ops: FuseOps,
        state: RequestState,
        sender: ReplySender,
        keep: Callable[[Any, int, str, Callable[[int, Any], None]], None],
        start: Callable[[int, str, Coroutine[Any, Any, Any], Callable[[int, Any], None]], None],
    ) -> None:
        self._ops = ops
        self._state = state
        self._replies = sender
        self._count, self._done = sender.count, sender.done
        self._keep = keep
        self._start = start
        self._buffer, self._view = state.buffer, state.view
        self._keeps = ops.kept is not None
        self._in = ByteReader()

    def _open(self, count: int) -> ByteReader:
        """Read the numbers of the request, which has at least `count` bytes."""
        if type(self._buffer) is bytearray:
            self._in.open_part(self._buffer, 0, count)
        else:
            self._in.open(bytes(self._view[:count]))
        return self._in

    def on_write(self, count: int) -> None:
        """Handle a WRITE."""
        if not _WRITE_BYTES <= count <= len(self._view):
            requests.decode_write(self._buffer, count)  # raises Malformed
        source = self._open(_WRITE_BYTES)
        length = source.u32()
        source.u32()
        unique = source.u64()
        source.u64()
        uid = source.u32()
        gid = source.u32()
        pid = source.u32()
        source.u32()
        handle: Any = source.u64()
        offset = source.u64()
        size = source.u32()
        flags = source.u32()
        source.u64()
        open_flags = source.u32()
        if length != count or _WRITE_BYTES + size != count:
            requests.decode_write(self._buffer, count)  # raises Malformed
        if unique > _FIRST and self._is_answered_again(unique, handle, open_flags):
            return
        number: Any = unique
        state = self._state
        payload: Any = self._view[_WRITE_BYTES:count]
        state.written_bytes += size
        if not self._keeps:
            payload = bytes(payload)
        caller = Caller(uid, gid, pid) if flags & _KILL else None
        if not open_flags & _ASIDE or not (open_flags & _APPEND or self._ops.has_pages(handle)):
            try:
                taken = self._ops.write_now(handle, offset, payload, caller, unique & _FIRST)
            except Exception as error:
                self._replies.fail(number, error, "write")
                return
            if taken:
                self._replies.count(number, size)
                return
        writing = self._ops.write(
            handle, offset, bytes(payload), caller, self._syncs(handle, open_flags), open_flags
        )
        self._start(number, "write", writing, self._count)

    def _syncs(self, handle: Any, open_flags: int) -> bool:
        """Whether O_SYNC and O_DSYNC must be carried out here."""
        return bool(open_flags & _SYNC) and self._ops.syncs_itself(handle)

    def _is_answered_again(self, unique: int, handle: Any, open_flags: int) -> bool:
        """Reply to a resent WRITE whose bytes the predecessor has taken; False: it has not."""
        taken = self._ops.written_before(unique & _FIRST)
        if taken is None:
            return False
        if self._syncs(handle, open_flags):
            self._start(unique, "write", self._ops.synced(handle, taken), self._count)
        else:
            self._replies.count(unique, taken)
        return True

    def on_flush(self, count: int) -> None:
        """Handle a FLUSH."""
        if count != _FLUSH_BYTES or count > len(self._view):
            requests.decode_release(self._buffer, count)  # raises Malformed
        source = self._open(_FLUSH_BYTES)
        length = source.u32()
        source.u32()
        unique: Any = source.u64()
        source.u64()
        source.u64()
        source.u64()
        handle: Any = source.u64()
        source.u64()
        owner = source.u64()
        if length != count:
            requests.decode_release(self._buffer, count)  # raises Malformed
        begun = self._ops.begin_flush(handle)
        if begun is True:
            self._replies.done(unique)
        elif begun is not None:
            self._keep(begun, unique, "flush", self._done)
        else:
            self._start(unique, "flush", self._ops.flush(handle, owner), self._done)
