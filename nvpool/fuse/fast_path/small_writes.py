"""Fast path for writing a small new file: its first WRITE and the FLUSH that follows.

Compiled steps from the kernel's request to client/write/fast_writes, and from there to the reply. Used if the
compiled module was built (`_writes`); the reference implementation is the slow path of every request, by
fuse/dispatch, fuse/ops and client/vfs/files, which does the same.

The fast path covers a request that is not resent, of this process, by a caller that drops no set-id bits; and
a FLUSH of a file without locks here, which starts as `FileData.begin_flush` says. All other requests are left to
the slow path without side effects; errors are reported by it.

WriteFastPath is the part of fuse/kernel/connection that uses this, on its loop.
"""

from __future__ import annotations

from typing import Any

from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.dispatch import KernelRequests

_small_writes = load_compiled("nvpool.fuse.fast_path._small_writes")


class WriteFastPath(KernelRequests):
    """Adds `_writes`, which takes a WRITE or FLUSH in `_buffer` if it can.

    `_writes` is None without the compiled module, and if the layer below keeps no written data.
    """

    _writes: Any = None
    in_work_max: int

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        vfs = self._ops.knows_by
        if _small_writes is not None and vfs is not None and vfs.writer.plain is not None:
            self._writes = _small_writes.SmallWrites(self, self._ops, vfs, self.in_work_max)

    def _on_write(self, count: int) -> None:
        if self._writes is None or not self._writes.write(count):
            super()._on_write(count)

    def _on_flush(self, count: int) -> None:
        if self._writes is None or not self._writes.flush(count):
            super()._on_flush(count)
