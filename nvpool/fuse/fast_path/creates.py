"""Fast path for new files: one compiled step from the request to the shard's frame, and one back.

Files that are created by the thousand are small, and half of the mount's work for such a file is its
creation: a dozen layers, each with little to do. Here they are one step, if the compiled module was built
(`_creates`). The reference implementation is the slow path of every request (fuse/dispatch to
client/vfs/files and client/rpc/change_fast_path). Both keep the same order: the slot is recorded in the mount
state (shared memory that outlives this process) before the request is sent, the handle before the kernel gets
the reply, and the kernel gets the reply before the caches here are updated.

The fast path covers a session with a free slot at a shard whose primary is connected by frames, over TCP or a
unix socket. It also needs a reply by which the file is new, in its directory's shard, in no volume
and not open here. Any other outcome (an error, a file that existed, a file of another shard, a connection
that ends, a deadline, a caller that dies) is passed to the slow path, as the outcome of a change that was
started there. Only the slow path handles errors.

CreateFastPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.client.rpc.change_fast_path import SentChange
from nvpool.client.state.vfs_types import Caller
from nvpool.client.vfs.filesystem import Vfs
from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.dispatch import KernelRequests
from nvpool.fuse.ops.inline_completions import Creating
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX, PendingRequests
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState

_creates = load_compiled("nvpool.fuse.fast_path._creates")


class CreateFastPath:
    """Handler of CREATE, with `compiled`, which takes one in the buffer if it can.

    `compiled` is None without the compiled module, without a mount state, and if there are no shards below.
    `slow` handles a CREATE that it declines; `take_requests` reads and answers the requests that wait.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        pending: PendingRequests,
        take_requests: Callable[[], None],
        slow: KernelRequests,
    ) -> None:
        self.requests = requests
        self._ops = ops
        self._replies = replies
        self._pending = pending
        self._slow_create = slow.on_create
        self.compiled: Any = None
        self._vfs: Vfs
        # called by the compiled module, with `create_otherwise` and `create_failed`
        self.answer_refused = replies.answer_refused
        self.some_ended: Callable[[], None] = pending.some_ended
        self.take_requests = take_requests

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        ops = self._ops
        if _creates is None or not ops.view.is_plain or ops.kept is None:
            return
        vfs = ops.knows_by
        if isinstance(vfs, Vfs) and ops.clock is vfs.clock:
            self._vfs = vfs
            self.compiled = _creates.Creates(self, ops, vfs, IN_WORK_MAX)

    def on_create(self, count: int) -> None:
        """Handle a CREATE."""
        if self.compiled is None or not self.compiled.begin(count):
            self._slow_create(count)

    def stop(self) -> None:
        """Send what is collected. Replies that arrive later go to the slow path."""
        compiled, self.compiled = self.compiled, None
        if compiled is not None:
            compiled.close()

    def create_otherwise(
        self, unique: int, parent: int, name: bytes, mode: int, flags: int, caller: Caller, sent: SentChange
    ) -> Creating:
        """Continue, on the slow path, a file creation that was started by the compiled module."""
        creating = Creating(self._ops.files, parent, name, flags, caller, unique)
        creating.begun = self._vfs.go_on_creating(sent, parent, name, mode, flags, caller, unique, creating)
        self._pending.replace(unique, creating, "create", self._replies.created)
        creating.hold()
        return creating

    def create_failed(self, unique: int, error: BaseException) -> None:
        """Reply with an error to a CREATE that was started by the compiled module."""
        self._pending.ended(unique, "create", self._replies.created, None, error)
