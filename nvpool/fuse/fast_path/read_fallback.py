"""Slow path for reads that a fast path has started and cannot finish. Used by the fast paths of reads."""

from __future__ import annotations

from nvpool.fuse.ops.eager_coroutine import WAITS, EagerCoroutine
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import PendingRequests
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState, Step


class ReadFallback:
    """See the module."""

    def __init__(
        self, requests: RequestState, ops: FuseOps, replies: ReplySender, pending: PendingRequests
    ) -> None:
        self._requests = requests
        self._ops = ops
        self._replies = replies
        self._pending = pending

    def read_ended(self, unique: int, error: BaseException) -> None:
        """Reply with an error to a read that was started by a fast path."""
        self._pending.ended(unique, "read", self._replies.data, None, error)

    def read_done(self, unique: int, found: memoryview) -> None:
        """Reply with its bytes to a read that was started by a fast path."""
        self._pending.ended(unique, "read", self._replies.data, found, None)

    def read_otherwise(self, unique: int, handle: int, offset: int, size: int) -> None:
        """Pass a read that was started by a fast path to the slow path.

        Soon, not immediately: a task may be running, in which a step cannot start.
        """
        self._requests.loop.call_soon(self._read, unique, handle, offset, size)

    def _read(self, unique: int, handle: int, offset: int, size: int) -> None:
        if unique not in self._requests.work:  # the read was cancelled
            return
        step = EagerCoroutine(self._requests.loop)
        self.wait_for(step, unique)
        try:
            found = step.begin(self._ops.read(handle, offset, size))
        except Exception as error:
            self.read_ended(unique, error)
        else:
            if found is not WAITS:
                self._pending.ended(unique, "read", self._replies.data, found, None)

    def wait_for(self, step: Step, unique: int) -> None:
        """Let a read that was started by a fast path wait for `step`, whose result is its bytes."""
        self._pending.replace(unique, step, "read", self._replies.data)
