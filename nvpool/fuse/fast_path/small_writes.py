"""Fast path for writing a small new file: its first WRITE and the FLUSH that follows.

Compiled steps from the kernel's request to client/write/fast_writes, and from there to the reply. Used if the
compiled module was built (`_writes`); the reference implementation is the slow path of every request, by
fuse/dispatch, fuse/ops and client/vfs/files, which does the same.

The fast path covers a request that is not resent, of this process, by a caller that drops no set-id bits; and
a FLUSH of a file without locks here, which starts as `FileData.begin_flush` says. All other requests are left to
the slow path without side effects; errors are reported by it.

WriteFastPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.dispatch import KernelRequests
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX, PendingRequests
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState

compiled = load_compiled("nvpool.fuse.fast_path._small_writes")


class WriteFastPath:
    """Handlers of WRITE and FLUSH, with `compiled`, which takes one in the buffer if it can.

    `compiled` is None without the compiled module, and if the layer below keeps no written data. `slow`
    handles the requests that it declines.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        pending: PendingRequests,
        slow: KernelRequests,
    ) -> None:
        self.requests = requests
        self._ops = ops
        self._replies = replies
        self._pending = pending
        self._slow_write, self._slow_flush = slow.on_write, slow.on_flush
        self.compiled: Any = None
        # called by the compiled module, with `flush_failed`
        self.fail = replies.fail
        self.answer_refused = replies.answer_refused
        self.some_ended: Callable[[], None] = pending.some_ended

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        vfs = self._ops.knows_by
        if compiled is not None and vfs is not None and vfs.fast_writes is not None:
            self.compiled = compiled.SmallWrites(self, self._ops, vfs, IN_WORK_MAX)

    def on_write(self, count: int) -> None:
        """Handle a WRITE."""
        if self.compiled is None or not self.compiled.write(count):
            self._slow_write(count)

    def on_flush(self, count: int) -> None:
        """Handle a FLUSH."""
        if self.compiled is None or not self.compiled.flush(count):
            self._slow_flush(count)

    def flush_failed(self, unique: int, error: BaseException) -> None:
        """Reply with an error to a FLUSH that was started by the compiled module."""
        self._pending.ended(unique, "flush", self._replies.done, None, error)
