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

from nvpool.fuse.kernel.connection import FLAGS, KernelEngine
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import PendingRequests
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import PAGE, RESENT, UNANSWERED, Init, Op
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState
from nvpool.shm.mount_state import Word
from nvpool.shm.request_log import Unanswered

_INTERRUPT_BIT = 1
"""FUSE_INT_REQ_BIT; no request's number has it."""


class FirstNumberReplies(ReplySender):
    """Replies under the kernel's own numbers: the kernel does not know that requests were repeated."""

    def send(self, head: bytes, payload: bytes | memoryview | None = None) -> None:
        """Send a reply under the number that the kernel knows."""
        length, error, unique = replies.HEADER.unpack_from(head)
        if unique > FIRST:
            head = replies.HEADER.pack(length, error, unique & FIRST) + head[replies.HEADER_BYTES :]
        super().send(head, payload)


class LoggedRequests(PendingRequests):
    """Pending requests that stay in the log until the kernel has their replies."""

    def __init__(
        self,
        state: RequestState,
        ops: FuseOps,
        sender: ReplySender,
        on_full: Callable[[], None],
        some_ended: Callable[[], None],
        request_log: Unanswered,
    ) -> None:
        super().__init__(state, ops, sender, on_full, some_ended)
        self._view = state.view
        self._log = request_log

    def keep(self, step, unique: int, name: str, answer: Callable) -> None:
        """Log the request, and register it as PendingRequests does."""
        length, *_ = requests.HEADER.unpack_from(self._view)
        self._log.keep(unique & FIRST, self._view[:length])
        super().keep(step, unique, name, answer)

    def ended(self, unique: int, name: str, answer: Callable, result, error: BaseException | None) -> None:
        """Reply, and remove the request from the log."""
        super().ended(unique, name, answer, result, error)
        self._log.forget(unique & FIRST)

    def interrupt(self, unique: int) -> bool:
        """Handle an interrupt of a request, or of its repetition."""
        return super().interrupt(unique) or super().interrupt(unique | RESENT)


class ReplayEngine(KernelEngine):
    flags = FLAGS & ~Init.HAS_RESEND
    uses_fast_paths = False  # they reply where they read, without the log

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
        self._pages = min(self._pages, self.kept_requests.request_bytes // PAGE - 1)

    def _make_buffer(self, byte_count: int) -> memoryview:
        self.kept_requests = kept = self._keep(byte_count)
        return kept.buffer

    def _make_replies(self) -> ReplySender:
        return FirstNumberReplies(self.requests, self.ops)

    def _make_pending(self) -> PendingRequests:
        return LoggedRequests(
            self.requests,
            self.ops,
            self.replies,
            self._stop_reading,
            self._some_ended,
            self.kept_requests,
        )

    def _make_table(self) -> list[Callable[[int], None]]:
        table = super()._make_table()
        table[Op.RELEASE] = self._on_release
        return table

    def _following(self, most: int) -> tuple[int, int]:
        if not self.kept_requests.has_room:
            self._stop_reading()  # until a request has ended
            return 0, 0
        return super()._following(most)

    def _on_release(self, count: int) -> None:
        """Release immediately, not late: a late request would have to be logged."""
        fields = requests.decode_release(self.requests.buffer, count)
        self._handlers.start(
            fields[2], "release", self.ops.release(fields[9], fields[2] > FIRST), self.replies.done
        )

    # -- requests that the predecessor left ------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        if self.ops.kept.word(Word.GREETED):
            self._agreed(Init(self.ops.kept.word(Word.INIT_FLAGS)))
            self.ops.invalidate_inherited()
            self._on_ready()
        # in a callback: no step can start inside the task that runs now
        self.requests.loop.call_soon(self._take_left)

    def _read_on(self) -> None:
        if not self.asked_again:
            super()._read_on()

    def _take_left(self) -> None:
        """Handle logged requests as if the kernel had sent them again, before all others."""
        if self.requests.stopped or self.requests.leaving:
            return
        self.requests.taking = True
        self._on_burst()
        self.ops.burst()
        try:
            for unique, request in self.kept_requests.left(FIRST):
                self._take_one_left(unique, request)
        finally:
            self.ops.burst_over()
            self.requests.taking = False
        self.asked_again = False
        self.ops.all_came_again({unique & FIRST for unique in self.requests.work})
        self._read_on()

    def _take_one_left(self, unique: int, request: bytes) -> None:
        length, opcode, _, *others = requests.HEADER.unpack_from(request)
        if opcode not in UNANSWERED and self.is_awaited(unique):
            again = unique | RESENT
            self.kept_requests.put(
                requests.HEADER.pack(length, opcode, again, *others) + request[requests.HEADER_BYTES :]
            )
            self._begin_run()
            try:
                self.table[opcode](length)
            except Exception as error:
                self._broken(error)
            self._end_run(opcode, 1)
            if again in self.requests.work:
                return
        self.kept_requests.forget(unique)

    def is_awaited(self, unique: int) -> bool:
        """Whether the kernel waits for the reply to that request."""
        try:
            os.write(
                self.requests.fd,
                replies.HEADER.pack(replies.HEADER_BYTES, -errno.EAGAIN, unique | _INTERRUPT_BIT),
            )
        except OSError as error:
            return error.errno == errno.EINVAL
        return True
