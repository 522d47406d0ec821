"""Commit gate: holds back a primary's answer until the answer cannot be undone.

An answer is sent when every change that it may reflect is on all standbys that count, and the primary lease
is still valid at that moment. Requests are decided without waiting, one on top of the other, and each answer
waits for the last change that existed when the answer was made. So no client learns of a change that a
promotion could undo. The primary lease is checked last, so that a process that was stopped for a while cannot answer
from an outdated state. A shard without standbys has no gate. Used by `meta/server/shard_member`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvpool.core.clock import Clock
from nvpool.core.errors import StaleEpoch, Unavailable
from nvpool.kv.replication_log import ReplicationHistory
from nvpool.rpc.api import Buffer, Call

HELD_MAX = 16_384
"""Highest number of answers that wait; beyond it requests are refused before they are decided."""


class CommitGate:
    """The commit gate of one primary."""

    def __init__(self, history: ReplicationHistory, clock: Clock, needs_lease: Callable[[], bool]) -> None:
        self._history = history
        self._clock = clock
        self._needs_lease = needs_lease
        self.lease_until_s = 0.0
        self.closed = False

    def open(self) -> bool:
        """Whether an answer that is ready now may be sent."""
        return not self.closed and (self._clock.boottime_s() < self.lease_until_s or not self._needs_lease())

    def handle(self, handle: Callable[[Call], None], call: Call) -> None:
        """Let `handle` process the call, with its answer passing through the gate."""
        if not self.open():
            call.fail(StaleEpoch("this member of the shard is not known to be its primary at the moment"))
        elif self._history.waiting >= HELD_MAX:
            call.fail(Unavailable("too many answers wait for standbys", retry_after_s=0.1))
        else:
            handle(HeldCall(self, self._history, call))


class HeldCall:
    """A Call whose answer passes through the gate: the answer waits for all changes that exist when it is made."""

    __slots__ = (
        "method",
        "message",
        "payload",
        "since_s",
        "deadline_s",
        "peer",
        "_call",
        "_gate",
        "_history",
        "_is_answered",
        "_reply",
        "_payload",
        "_error",
    )

    def __init__(self, gate: CommitGate, history: ReplicationHistory, call: Call) -> None:
        self.method, self.message, self.payload = call.method, call.message, call.payload
        self.since_s, self.deadline_s = call.since_s, call.deadline_s
        self.peer = call.peer
        self._gate, self._history, self._call = gate, history, call
        self._is_answered = False
        self._error: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        """As in rpc/api.Call."""
        return self._call.cancelled

    def room(self, byte_count: int) -> memoryview | None:
        """None: the answer is sent later, so it cannot be built in place."""
        return None

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        """As in rpc/api.Call."""
        if not self._is_answered:
            self._is_answered = True
            self._reply, self._payload = message, payload
            self._history.when(self._history.last[0], self)

    def fail(self, error: BaseException) -> None:
        """As in rpc/api.Call."""
        if not self._is_answered:
            self._is_answered = True
            self._error = error
            self._history.when(self._history.last[0], self)

    def __call__(self, is_committed: bool) -> None:
        """Send the answer, if the changes before it are committed, and the member is still the primary."""
        error = self._error
        if not is_committed or not self._gate.open():
            error = Unavailable(
                "the shard changes its primary; the request may have been executed", may_be_applied=True
            )
        if error is None:
            self._call.reply(self._reply, self._payload)
        else:
            self._call.fail(error)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """As in rpc/api.Call."""
        self._call.on_cancel(callback)
