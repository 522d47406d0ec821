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

LocalReadPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nvpool.core.clock import stopwatch_s
from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.fast_path.read_fallback import ReadFallback
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState

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


class LocalReadPath:
    """Has `compiled`, which takes a READ in the buffer if it can.

    `compiled` is None without the compiled module, without io_uring, on a processor without the instruction
    for checksums, and in a mount without short-circuit reads. `take_requests` reads and answers the requests
    that wait.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        fallback: ReadFallback,
        some_ended: Callable[[], None],
        take_requests: Callable[[], None],
    ) -> None:
        self.requests = requests
        self._ops = ops
        self.compiled: Any = None
        # called by the compiled module
        self.read_ended = fallback.read_ended
        self.read_otherwise = fallback.read_otherwise
        self.answer_refused = replies.answer_refused
        self.some_ended = some_ended
        self.take_requests = take_requests

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        short_circuit = self._ops.short_circuit
        if (
            _local_reads is None
            or not _local_reads.is_of_use()
            or short_circuit is None
            or not short_circuit.on
        ):
            return
        try:
            self.compiled = _local_reads.LocalReads(self, self._ops, short_circuit)
        except OSError:  # no io_uring here
            return
        self.requests.loop.add_reader(self.compiled.fileno, self._reap)

    @property
    def read_bytes(self) -> int:
        """Bytes read since `start`; 0 after `stop`, which counts them in the state."""
        return self.compiled.read_bytes if self.compiled is not None else 0

    def _reap(self) -> None:
        """Answer reads that the drive has completed, and take new requests in between.

        With several readers those are many. A few at a time: so the drive has the next requests of the first
        readers while the last are answered.
        """
        requests = self.requests
        done = 0
        while done < BURST_MAX and (count := self.compiled.reap(REAP_MAX, REAP_BYTES)):
            done += count
            self.some_ended()
            if requests.work and requests.reading and not requests.taking:
                self.take_requests()
                done += requests.took

    async def stop(self) -> None:
        """Take no more requests, and wait for the drive's reads, at most DRIVE_WAIT_S."""
        compiled = self.compiled
        if compiled is None:
            return
        self.requests.loop.remove_reader(compiled.fileno)
        until_s = stopwatch_s() + DRIVE_WAIT_S
        while compiled.waiting and not self.requests.leaving:
            compiled.submit()
            while compiled.reap(BURST_MAX, REAP_BYTES):  # until then the kernel writes into their memory
                pass
            if stopwatch_s() >= until_s:  # after the reap: the loop may have stood still, not the drive
                break
            await asyncio.sleep(0.001)
        self.requests.read_bytes += compiled.read_bytes
        self.compiled = None
        compiled.close()
