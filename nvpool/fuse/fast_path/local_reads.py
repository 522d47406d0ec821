"""Fast path for short-circuit reads: one compiled step from the kernel's request to the reply.

The work of a random short-circuit read (client/data/short_circuit) is two dozen small decisions, a preadv and
a writev. In Python, with a call for each layer, the decisions take half of the processor time. Here they are
made together, if the compiled module was built (`_local_reads`). The reference implementation is the slow
path of every request (fuse/dispatch to client/data/short_circuit), which gives the same results.

The fast path covers up to 128 KiB of one chunk whose block location is known, in one piece on the drive; in a
file with no data written here; at an offset that does not continue where the handle has read before. Data in
memory is sent immediately. Other data is read from the drive, the reads of a burst submitted together. They
bypass the page cache if that contains less than half of the data (the kernel keeps the mount's own pages).
Exception: a small read of a place that was read in the same way a short time before. All is checked as the
short-circuit reads do, after the bytes have come. In every other case (a late read, a change, a checksum, an
error of the drive) the slow path reads again; only that reports errors.

LocalReadPath is the part of fuse/kernel/connection that uses this, on its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.core.clock import stopwatch_s
from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.fast_path.remote_reads import RemoteReadPath
from nvpool.fuse.ops.eager_coroutine import WAITS, EagerCoroutine

_local_reads = load_compiled("nvpool.fuse.fast_path._local_reads")

BURST_MAX = 64
"""Requests taken, or answered, before other events of the loop are handled."""

REAP_MAX = 4
"""Completed drive reads that are answered before new requests are taken.

If all were answered first, drive and mount would work in turns: 16 readers of 4 KiB, cold, 39,000 reads a
second, and 49,000 to 55,000 by fours; with those of 128 KiB by fours 870 MiB/s, by twos 970.
"""
REAP_BYTES = 192 << 10
"""Bytes after which no further read is answered before new requests are taken."""

DRIVE_WAIT_S = 3.0
"""How long a mount that ends waits for reads that its drive does not complete."""


class LocalReadPath(RemoteReadPath):
    """Adds `_plain`, which takes a READ in `_buffer` if it can.

    `_plain` is None without the compiled module, without io_uring, on a processor without the instruction for
    checksums, and in a mount without short-circuit reads.
    """

    _plain: Any = None
    _loop: asyncio.AbstractEventLoop
    _reading: bool
    _taking: bool
    _took: int
    _leaving: bool
    _some_ended: Callable[[], None]
    _take: Callable[[], None]

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        short_circuit = self._ops.short_circuit
        if (
            _local_reads is None
            or not _local_reads.is_of_use()
            or short_circuit is None
            or not short_circuit.on
        ):
            return
        try:
            self._plain = _local_reads.LocalReads(self, self._ops, short_circuit)
        except OSError:  # no io_uring here
            return
        self._loop.add_reader(self._plain.fileno, self._reap)

    def _on_read(self, count: int) -> None:
        if self._plain is None or not self._plain.take(count):
            super()._on_read(count)

    def _submit_plain_reads(self) -> None:
        """Submit the collected reads, at the end of a burst."""
        if self._plain is not None:
            self._plain.submit()
        super()._submit_plain_reads()

    @property
    def _plain_bytes(self) -> int:
        return super()._plain_bytes + (self._plain.read_bytes if self._plain is not None else 0)

    def _reap(self) -> None:
        """Answer reads that the drive has completed, and take new requests in between.

        With several readers those are many. A few at a time: so the drive has the next requests of the first
        readers while the last are answered.
        """
        done = 0
        while done < BURST_MAX and (count := self._plain.reap(REAP_MAX, REAP_BYTES)):
            done += count
            self._some_ended()
            if self._work and self._reading and not self._taking:
                self._take()
                done += self._took

    async def _end_plain_reads(self) -> None:
        await super()._end_plain_reads()
        plain = self._plain
        if plain is None:
            return
        self._loop.remove_reader(plain.fileno)
        until_s = stopwatch_s() + DRIVE_WAIT_S
        while plain.waiting and not self._leaving:
            plain.submit()
            while plain.reap(BURST_MAX, REAP_BYTES):  # until then the kernel writes into their memory
                pass
            if stopwatch_s() >= until_s:  # after the reap: the loop may have stood still, not the drive
                break
            await asyncio.sleep(0.001)
        self.read_bytes += plain.read_bytes
        self._plain = None
        plain.close()

    # -- called by _local_reads ----------------------------------------------------------------------------------------

    def read_otherwise(self, unique: int, handle: int, offset: int, size: int) -> None:
        """Pass a read that was started there to the slow path.

        Soon, not immediately: a task may be running, in which a step cannot start.
        """
        self._loop.call_soon(self._read_otherwise, unique, handle, offset, size)

    def _read_otherwise(self, unique: int, handle: int, offset: int, size: int) -> None:
        if unique not in self._work:  # the read was cancelled
            return
        step = EagerCoroutine(self._loop)
        step.on_end = partial(self._step_ended, unique, "read", self._data)
        self._work[unique] = step, *self._work[unique][1:]
        try:
            found = step.begin(self._ops.read(handle, offset, size))
        except Exception as error:
            step.on_end(None, error)
        else:
            if found is not WAITS:
                step.on_end(found, None)
