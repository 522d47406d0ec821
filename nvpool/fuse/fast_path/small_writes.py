"""The first WRITE of a small new file and the FLUSH of what was written, from the kernel's request to what
client/write/fast_writes does with them, and their answers: compiled steps.

Where a compiler was (`_writes`); the twin is the way of every request, by kernel_requests, ops and vfs/files; it does the same.
Only plain sailing: what was asked for the first time, of this process, by who drops no set-id bits; a FLUSH of a file without
locks here, which begins as `Files.begin_flush` says. All else is left to the ordinary way before anything has happened; errors
are told by it.

WritesAtOnce is what fuse/kernel/connection has of it, on its loop.
"""

from __future__ import annotations

from typing import Any

from nvpool.core.compiled import load_compiled
from nvpool.fuse.kernel.dispatch import KernelRequests

_small_writes = load_compiled("nvpool.fuse.fast_path._small_writes")


class WritesAtOnce(KernelRequests):
    """`_writes` takes a WRITE or a FLUSH that is in `_buffer`, where it can; None where that can not be here: no compiler,
    nothing below that keeps what is written."""

    _writes: Any = None
    in_work_max: int

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        vfs = self._ops.knows_by
        if _small_writes is not None and vfs is not None and vfs.writer.plain is not None:
            self._writes = _small_writes.Writes(self, self._ops, vfs, self.in_work_max)

    def _on_write(self, count: int) -> None:
        if self._writes is None or not self._writes.write(count):
            super()._on_write(count)

    def _on_flush(self, count: int) -> None:
        if self._writes is None or not self._writes.flush(count):
            super()._on_flush(count)
