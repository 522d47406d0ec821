"""What holds an answer of a primary back until it may be given: every change that it may speak of is on all standbys that
count, and the primary's lease lives when it leaves.

Requests are decided without a wait, one upon the other, and each answer waits for the last change of the moment when it
was made: so nobody is told of what a promotion could undo. The lease is looked at last: a process that was stopped can not
speak for the past. A shard without standbys has no gate. Used by `meta/server/member`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvpool.core.clock import Clock
from nvpool.core.errors import StaleEpoch, Unavailable
from nvpool.kv.replication_log import History
from nvpool.rpc.api import Buffer, Call

HELD_MAX = 16_384
"""Answers that wait; behind it requests are refused before they are decided."""


class Gate:
    def __init__(self, history: History, clock: Clock, needs_lease: Callable[[], bool]) -> None:
        self._history = history
        self._clock = clock
        self._needs_lease = needs_lease
        self.lease_until_s = 0.0
        self.closed = False

    def open(self) -> bool:
        """Whether an answer that were ready now might be given."""
        return not self.closed and (self._clock.boottime_s() < self.lease_until_s or not self._needs_lease())

    def handle(self, handle: Callable[[Call], None], call: Call) -> None:
        """Have `handle` answer the call through the gate."""
        if not self.open():
            call.fail(StaleEpoch("this member of the shard is not known to be its primary at the moment"))
        elif self._history.waiting >= HELD_MAX:
            call.fail(Unavailable("too many answers wait for standbys", retry_after_s=0.1))
        else:
            handle(_HeldCall(self, call))

    def answer(self, call: Call, give: Callable[[], None]) -> None:
        """`give` now, or when all that has been changed by now is committed; fail the call where that will not be."""
        history = self._history

        def when(known: bool) -> None:
            if known and self.open():
                give()
            else:
                call.fail(Unavailable("the shard changes its primary; what was asked for may have been done",
                                      may_be_applied=True))

        history.when(history.last.sequence, when)


class _HeldCall:
    """A Call whose answer goes through the gate."""

    __slots__ = ("method", "message", "payload", "since_s", "deadline_s", "peer", "_call", "_gate", "_answered")

    def __init__(self, gate: Gate, call: Call) -> None:
        self.method = call.method
        self.message = call.message
        self.payload = call.payload
        self.since_s = call.since_s
        self.deadline_s = call.deadline_s
        self.peer = call.peer
        self._call = call
        self._gate = gate
        self._answered = False

    @property
    def cancelled(self) -> bool:
        return self._call.cancelled

    def room(self, byte_count: int) -> memoryview | None:
        return None  # the answer leaves later

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        if not self._answered:
            self._answered = True
            self._gate.answer(self._call, lambda: self._call.reply(message, payload))

    def fail(self, error: BaseException) -> None:
        if not self._answered:
            self._answered = True
            self._gate.answer(self._call, lambda: self._call.fail(error))

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._call.on_cancel(callback)
