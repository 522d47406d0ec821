"""Fast path for new files: one compiled step from the request to the shard's frame, and one back.

Files that are created by the thousand are small, and half of the mount's work for such a file is its
creation: a dozen layers, each with little to do. Here they are one step, if the compiled module was built
(`_creates`). The reference implementation is the slow path of every request (fuse/dispatch to
client/vfs/files and client/rpc/change_fast_path). Both keep the same order: the slot is recorded in the mount
state (shared memory that outlives this process) before the request is sent, the handle before the kernel gets
the reply, and the kernel gets the reply before the caches here are updated.

The fast path covers a session with a free slot at a shard without standbys that is connected by frames, over
TCP or a unix socket. It also needs a reply by which the file is new, in its directory's shard, in no volume
and not open here. Any other outcome (an error, a file that existed, a file of another shard, a connection
that ends, a deadline, a caller that dies) is passed to the slow path, as the outcome of a change that was
started there. Only the slow path handles errors.

CreateFastPath is the part of fuse/kernel/connection that uses this, on its loop, above
fuse/fast_path/local_reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nvpool.client.rpc.change_fast_path import SentChange
from nvpool.client.state.vfs_types import Caller
from nvpool.client.vfs.filesystem import Vfs
from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.fast_path.local_reads import LocalReadPath
from nvpool.fuse.ops.inline_completions import Creating

_creates = load_compiled("nvpool.fuse.fast_path._creates")


class CreateFastPath(LocalReadPath):
    """Adds `_creates`, which takes a CREATE in `_buffer` if it can.

    `_creates` is None without the compiled module, without a mount state, and if there are no shards below.
    """

    _creates: Any = None
    _vfs: Vfs

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        ops = self._ops
        if _creates is None or not ops.view.is_plain or ops.kept is None:
            return
        vfs = ops.knows_by
        if isinstance(vfs, Vfs) and ops.clock is vfs.clock:
            self._vfs = vfs
            self._creates = _creates.Creates(self, ops, vfs, self.in_work_max)

    def _on_create(self, count: int) -> None:
        if self._creates is None or not self._creates.begin(count):
            super()._on_create(count)

    def _submit_plain_reads(self) -> None:
        """Send the collected requests, at the end of a burst."""
        if self._creates is not None:
            self._creates.send()
        super()._submit_plain_reads()

    async def _end_plain_reads(self) -> None:
        creates, self._creates = self._creates, None
        if creates is not None:
            creates.close()
        await super()._end_plain_reads()

    # -- called by _creates ----------------------------------------------------------------------------------------------

    def create_otherwise(
        self, unique: int, parent: int, name: bytes, mode: int, flags: int, caller: Caller, sent: SentChange
    ) -> Creating:
        """Continue, on the slow path, a file creation that was started there."""
        ops = self._ops
        creating = Creating(ops.files, parent, name, flags, caller, unique)
        creating.begun = self._vfs.go_on_creating(sent, parent, name, mode, flags, caller, unique, creating)
        creating.on_end = partial(self._step_ended, unique, "create", self._created)
        self._work[unique] = creating, *self._work[unique][1:]
        creating.hold()
        return creating
