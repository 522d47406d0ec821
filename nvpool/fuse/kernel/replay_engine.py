"""Kernel engine with a request log, for kernels that cannot resend requests.

Those are the kernels of Linux before 6.9.

After the death of a process its successor replays the unanswered requests itself. Requests are read into
shared memory that outlives the process (shm/request_log). Pending ones stay there until the kernel has their
replies, and the successor takes them from there as if the kernel had sent them again. For each, it first
checks whether the kernel still waits for the reply, since a process may also be killed between the reply and
its record. The check is a reply to an interrupt (the request's number with the lowest bit set) that says
EAGAIN. The kernel refuses it with ENOENT if no caller waits, and with EINVAL if a caller waits that nothing
has interrupted. Otherwise the kernel sends the interrupt again, which the dead process may have received too.

The compiled fast path reads and replies by itself, so it is not used here: this is slower, with the same
results. Made by fuse/engines.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from nvpool.fuse.dispatch import FIRST
from nvpool.fuse.kernel.connection import FLAGS, KernelEngine
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import PAGE, RESENT, UNANSWERED, Init
from nvpool.shm.mount_state import Word
from nvpool.shm.request_log import Unanswered

_INTERRUPT_BIT = 1
"""FUSE_INT_REQ_BIT; no request's number has it."""


class ReplayEngine(KernelEngine):
    flags = FLAGS & ~Init.HAS_RESEND

    def __init__(
        self,
        ops: FuseOps,
        mount_point: Path | None,
        options: MountOptions,
        on_ready: Callable[[], None],
        on_burst: Callable[[], None],
        keep: Callable[[int], Unanswered],
    ) -> None:
        """`keep(bytes of the longest request)` opens the log, that of the predecessor or a new one."""
        self._keep = keep
        super().__init__(ops, mount_point, options, on_ready, on_burst)
        self._pages = min(self._pages, self._kept_requests.request_bytes // PAGE - 1)

    def _memory(self, byte_count: int) -> memoryview:
        self._kept_requests = kept = self._keep(byte_count)
        return kept.buffer

    def _begin_plain_reads(self) -> None:
        """Start no compiled reads: they reply where they read, without the log."""

    def _following(self, most: int) -> tuple[int, int]:
        if not self._kept_requests.has_room:
            self._stop_reading()  # until a request has ended
            return 0, 0
        return super()._following(most)

    def _keep_in_work(self, step, unique: int, name: str, answer: Callable) -> None:
        length, *_ = requests.HEADER.unpack_from(self._buffer)
        self._kept_requests.keep(unique & FIRST, self._view[:length])
        super()._keep_in_work(step, unique, name, answer)

    def _step_ended(
        self, unique: int, name: str, answer: Callable, result, error: BaseException | None
    ) -> None:
        super()._step_ended(unique, name, answer, result, error)
        self._kept_requests.forget(unique & FIRST)

    def _on_release(self, count: int) -> None:
        """Release immediately, not late: a late request would have to be logged."""
        fields = requests.decode_release(self._buffer, count)
        self._start(fields[2], "release", self._ops.release(fields[9], fields[2] > FIRST), self._done)

    # -- requests that the predecessor left ------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        if self._ops.kept.word(Word.GREETED):
            self._agreed(Init(self._ops.kept.word(Word.INIT_FLAGS)))
            self._ops.invalidate_inherited()
            self._on_ready()
        # in a callback: no step can start inside the task that runs now
        self._loop.call_soon(self._take_left)

    def _read_on(self) -> None:
        if not self._asked_again:
            super()._read_on()

    def _take_left(self) -> None:
        """Handle logged requests as if the kernel had sent them again, before all others."""
        if self._stopped or self._leaving:
            return
        self._taking = True
        self._on_burst()
        self._ops.burst()
        try:
            for unique, request in self._kept_requests.left(FIRST):
                self._take_one_left(unique, request)
        finally:
            self._ops.burst_over()
            self._taking = False
        self._asked_again = False
        self._ops.all_came_again({unique & FIRST for unique in self._work})
        self._read_on()

    def _take_one_left(self, unique: int, request: bytes) -> None:
        length, opcode, _, *others = requests.HEADER.unpack_from(request)
        if opcode not in UNANSWERED and self._is_awaited(unique):
            again = unique | RESENT
            self._kept_requests.put(
                requests.HEADER.pack(length, opcode, again, *others) + request[requests.HEADER_BYTES :]
            )
            self._begin_run()
            try:
                self._table[opcode](length)
            except Exception as error:
                self._broken(error)
            self._end_run(opcode, 1)
            if again in self._work:
                return
        self._kept_requests.forget(unique)

    def _is_awaited(self, unique: int) -> bool:
        """Whether the kernel waits for the reply to that request."""
        try:
            os.write(
                self._fd, replies.HEADER.pack(replies.HEADER_BYTES, -errno.EAGAIN, unique | _INTERRUPT_BIT)
            )
        except OSError as error:
            return error.errno == errno.EINVAL
        return True

    # -- the kernel does not know that these requests were repeated ------------------------------------------------------

    def _send(self, head: bytes, *more) -> None:
        length, error, unique = replies.HEADER.unpack_from(head)
        if unique > FIRST:
            head = replies.HEADER.pack(length, error, unique & FIRST) + head[replies.HEADER_BYTES :]
        super()._send(head, *more)

    def _interrupt(self, unique: int) -> bool:
        return super()._interrupt(unique) or super()._interrupt(unique | RESENT)
