"""Pending requests of the kernel engine: replies when they end, interrupts, and callers that die.

The table itself is in `fuse/request_state`: the compiled fast paths put requests there and take them out.
Made by `fuse/kernel/connection`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.core.clock import stopwatch_s
from nvpool.core.errors import Unavailable
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.protocol.constants import Op
from nvpool.fuse.protocol.requests import HEADER
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState, Step

IN_WORK_MAX = 1024
"""Pending requests at a time; others wait in the kernel. Background requests are fewer: max_background."""

DYING_LOOK_S = 0.5
"""Interval of the check on callers of interrupted requests: the kernel reports the first signal only."""

EXIT_S = 3.0
"""How long a killed process may store its written data while it exits.

The kernel interrupts those requests immediately. Then the thread has already taken the signal that kills it,
and only the death of the process is pending.
"""

ONLY_LOOKS = frozenset(
    (
        Op.LOOKUP,
        Op.GETATTR,
        Op.READLINK,
        Op.READ,
        Op.READDIR,
        Op.READDIRPLUS,
        Op.GETXATTR,
        Op.LISTXATTR,
        Op.STATFS,
        Op.ACCESS,
    )
)
"""Requests that change nothing. When the mount is gone, they are not waited for."""

SIGKILL_BIT = 1 << 8
_IN_WORK, _SETLKW = IN_WORK_MAX, int(Op.SETLKW)

Answer = Callable[[int, Any], None]
"""Sends the reply: called with the number of the request and the result."""


def is_dying(pid: int, *, exiting: bool = False) -> bool:
    """Whether the thread `pid` is gone, or has a pending signal that kills it; signal(7), proc(5).

    `exiting`: also if it is already exiting because of that signal.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if (
                    line.startswith((b"SigPnd:", b"ShdPnd:")[: 1 + exiting])
                    and int(line[7:], 16) & SIGKILL_BIT
                ):
                    return True
                if line.startswith(b"ShdPnd:"):
                    return False
    except (OSError, ValueError):
        return True
    return False


class PendingRequests:
    """See the module.

    `on_full` is called when the table is full, `some_ended` when pending requests have ended.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        on_full: Callable[[], None],
        some_ended: Callable[[], None],
    ) -> None:
        self._requests = requests
        self._ops = ops
        self._replies = replies
        self._on_full = on_full
        self.some_ended = some_ended
        self.lock_waits = 0
        """Pending lock requests.

        The limit excludes them: they may wait forever, and must not keep out the requests that they wait for.
        """

    def keep(self, step: Step, unique: int, name: str, answer: Answer) -> None:
        """Register `step`, the operation that a pending request waits for; send the reply when it ends."""
        requests = self._requests
        step.on_end = partial(self.ended, unique, name, answer)
        header = HEADER.unpack_from(requests.buffer)
        opcode = header[1]
        work = requests.work
        work[unique] = step, header[6], header[1], requests.since_s
        requests.deferred += 1
        if opcode == _SETLKW:
            self.lock_waits += 1
        elif len(work) - self.lock_waits >= _IN_WORK:
            self._on_full()

    def ended(self, unique: int, name: str, answer: Answer, result: Any, error: BaseException | None) -> None:
        """Reply to a pending request with answer(unique, result), or with the error."""
        requests = self._requests
        work = requests.work
        _, _, opcode, since_s = work.pop(unique)
        code = opcode
        if code == _SETLKW:
            self.lock_waits -= 1
            if requests.stopped and isinstance(error, asyncio.CancelledError):
                error = Unavailable("the mount ends")  # EINTR is for a caller with a signal to handle
        if error is None:
            try:
                answer(unique, result)
            except Exception as bug:
                self._replies.fail(unique, bug, name)
        else:
            self._replies.fail(unique, error, name)
        requests.spent.add(opcode, stopwatch_s() - since_s)
        if requests.interrupted:
            requests.interrupted.pop(unique, None)
        if requests.forwarded:
            requests.forwarded.pop(unique, None)
        if requests.held:
            self._ops.answered(unique & FIRST)
        self.some_ended()

    def replace(self, unique: int, step: Step, name: str, answer: Answer) -> None:
        """Let a pending request wait for `step` instead, which answers it."""
        work = self._requests.work
        step.on_end = partial(self.ended, unique, name, answer)
        work[unique] = step, *work[unique][1:]

    # -- interrupts ----------------------------------------------------------------------------------------------------

    def interrupt(self, unique: int) -> bool:
        """Handle an interrupt. False: the request is not pending here."""
        requests = self._requests
        found = requests.work.get(unique)
        if found is None:
            return False
        if found[2] == Op.SETLKW:
            found[0].cancel()
            return True
        if not requests.interrupted:
            requests.loop.call_later(DYING_LOOK_S, self._look_for_dying)
        requests.interrupted[unique] = found[1]
        self._cancel_if_dying(unique, found[1])
        return True

    def _look_for_dying(self) -> None:
        requests = self._requests
        for unique, pid in list(requests.interrupted.items()):
            self._cancel_if_dying(unique, pid)
        if requests.interrupted and not requests.stopped:
            requests.loop.call_later(DYING_LOOK_S, self._look_for_dying)

    def _cancel_if_dying(self, unique: int, pid: int) -> None:
        found = self._requests.work.get(unique)
        if found is not None and is_dying(pid, exiting=stopwatch_s() - found[3] > EXIT_S):
            found[0].cancel()

    # -- the end of the mount ------------------------------------------------------------------------------------------

    def cancel_lock_waits(self) -> None:
        """Cancel the requests that wait for locks."""
        for step, _, opcode, _ in list(self._requests.work.values()):
            if opcode == Op.SETLKW:
                step.cancel()

    def cancel_looks(self) -> None:
        """Cancel the requests that change nothing."""
        for step, _, opcode, _ in list(self._requests.work.values()):
            if opcode in ONLY_LOOKS:
                step.cancel()

    def cancel_all(self) -> None:
        """Cancel all pending requests."""
        for step, _, _, _ in list(self._requests.work.values()):
            step.cancel()
