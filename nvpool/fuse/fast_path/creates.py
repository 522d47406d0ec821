"""New files in one compiled step each way: from the kernel's request to the shard's frame, and from the frame of the answer to
the kernel's and to our books.

What is made by the thousand are small files, and of the work of a mount for one half was that it was made: a dozen layers, each
of which has little to do. Here it is done together where a compiler was (`_creates`); its twin is the way of every request
(kernel_requests to client/vfs/files and client/rpc/fast_changes), which keeps the same promises: the slot is noted in the
memory that outlives this process before the request is sent, the handle before the kernel hears of it, and the kernel is
answered before our books are kept.

Only plain sailing: a session with a free slot at a shard without standbys that is connected by frames, over TCP or a unix
socket; and an answer by which the file is new, in its directory's shard, in no volume and not open here. Whatever else comes of
it (an error, a file that was there, one of another shard, a connection that ends, a deadline, a caller who dies) is what has
come of a change that was begun the ordinary way, which alone has errors, and goes on from there.

CreatesAtOnce is what fuse/kernel/connection has of it, on its loop, above fuse/fast_path/local_reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nvpool.client.rpc.fast_changes import Sent
from nvpool.client.state.types import Caller
from nvpool.client.vfs.files import Files
from nvpool.core.compiled import load_compiled
from nvpool.fuse.fast_path.local_reads import PlainReading
from nvpool.fuse.ops.inline_completions import Creating
from nvpool.fuse.ops.operations import FuseOps

_creates = load_compiled("nvpool.fuse.fast_path._creates")


class CreatesAtOnce(PlainReading):
    """`_creates` takes a CREATE that is in `_buffer`, where it can; None where that can not be here: no compiler, nothing that
    outlives this process, no shards below."""

    _creates: Any = None

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        ops = self._ops
        if _creates is None or type(ops) is not FuseOps or ops.kept is None:
            return
        vfs = ops._vfs
        if isinstance(vfs, Files) and ops._clock is vfs.clock:
            self._creates = _creates.Creates(self, ops, vfs, self.in_work_max)

    def _on_create(self, count: int) -> None:
        if self._creates is None or not self._creates.begin(count):
            super()._on_create(count)

    def _submit_plain_reads(self) -> None:
        """At the end of a burst."""
        if self._creates is not None:
            self._creates.send()
        super()._submit_plain_reads()

    async def _end_plain_reads(self) -> None:
        creates, self._creates = self._creates, None
        if creates is not None:
            creates.close()
        await super()._end_plain_reads()

    # -- called by _creates ----------------------------------------------------------------------------------------------

    def create_otherwise(self, unique: int, parent: int, name: bytes, mode: int, flags: int, caller: Caller,
                         sent: Sent) -> Creating:
        """A file that was begun there goes the way of all others from here."""
        ops = self._ops
        creating = Creating(ops, parent, name, flags, caller, unique)
        creating.begun = ops._vfs.go_on_creating(sent, parent, name, mode, flags, caller, unique, creating)
        creating.on_end = partial(self._step_ended, unique, "create", self._created)
        self._work[unique] = creating, *self._work[unique][1:]
        creating.hold()
        return creating
