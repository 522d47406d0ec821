"""RPC statistics: requests that this process answered and sent, by method, for its metrics.

`rpc/multiplexer` updates them once for each request, which may be a batch of thousands; no other module does.
A process has one instance, as it has one clock. A peer cannot make it grow: an unknown method counts as
method 0.
"""

from __future__ import annotations

from functools import lru_cache

from nvpool.core import primitives
from nvpool.core.errors import every_error
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import SLOTS, Times
from nvpool.rpc.v1.wire_pb2 import Method

_KNOWN = frozenset(Method.values())


class _Answered:
    """Statistics of one method over one transport."""

    __slots__ = ("times", "bytes_in", "bytes_out")

    def __init__(self) -> None:
        self.times = Times()
        self.bytes_in = self.bytes_out = 0


class ReplyStats:
    """Statistics of the requests answered over one transport."""

    __slots__ = ("by_method", "begun", "ended", "given_up", "errors")

    def __init__(self) -> None:
        self.by_method: dict[int, _Answered] = {}
        self.begun = self.ended = self.given_up = 0
        self.errors: dict[tuple[int, int], int] = {}

    def served(self, method: int, seconds: float) -> None:
        """Count a request without a payload that is answered already, successfully."""
        self.begun += 1
        found = self.by_method.get(method)
        if found is None:
            self.answered(method, seconds, 0, 0, 0)
            return
        self.ended += 1
        times = found.times
        times.counts[primitives.duration_slot(seconds)] += 1
        times.sum_s += seconds

    def answered(self, method: int, seconds: float, status: int, bytes_in: int, bytes_out: int) -> None:
        """Count a response to a request that was counted in `begun`."""
        self.ended += 1
        found = self.by_method.get(method)
        if found is None:
            if method not in _KNOWN:
                self.answered(0, seconds, status, bytes_in, bytes_out)
                self.ended -= 1
                return
            found = self.by_method[method] = _Answered()
        times = found.times
        times.counts[primitives.duration_slot(seconds)] += 1
        times.sum_s += seconds
        found.bytes_in += bytes_in
        found.bytes_out += bytes_out
        if status:
            key = method, status
            self.errors[key] = self.errors.get(key, 0) + 1


class Calls:
    """Statistics of the requests that this process sent, over all connections."""

    __slots__ = ("by_method", "begun", "ended", "errors")

    def __init__(self) -> None:
        self.by_method: dict[int, Times] = {}
        self.begun = self.ended = 0
        self.errors: dict[tuple[int, int], int] = {}

    def answered(self, method: int, seconds: float, status: int) -> None:
        times = self.by_method.get(method)
        if times is None:
            times = self.by_method[method] = Times()  # bounded: this process sends only methods that it knows
        times.counts[int(seconds * 1e6).bit_length() if seconds > 0 else 0] += 1
        times.sum_s += seconds
        if status:
            self.failed(method, status)

    def failed(self, method: int, status: int) -> None:
        """Count a request that ended with this error, answered or not."""
        key = method, status
        self.errors[key] = self.errors.get(key, 0) + 1


class RpcStats:
    def __init__(self) -> None:
        self.answers: dict[str, ReplyStats] = {}
        self.calls = Calls()
        self.limits_met: dict[str, int] = {}

    def limit_met(self, limit: str) -> None:
        """Count a peer that was refused, paused or disconnected.

        `limit` is the limit's key in the section [limits]."""
        self.limits_met[limit] = self.limits_met.get(limit, 0) + 1

    def over(self, transport: str) -> ReplyStats:
        """Statistics of that transport, shared by all its connections."""
        return self.answers.setdefault(transport, ReplyStats())

    def measure(self, page: Page) -> None:
        for transport, answers in self.answers.items():
            for method, answered in answers.by_method.items():
                op = op_of(method)
                page.times(metrics.REQUEST_SECONDS, answered.times, op=op, transport=transport)
                for direction, count in (("in", answered.bytes_in), ("out", answered.bytes_out)):
                    if count:
                        page.set(
                            metrics.REQUEST_BYTES, count, op=op, transport=transport, direction=direction
                        )
            for (method, status), count in answers.errors.items():
                page.set(metrics.REQUEST_ERRORS, count, op=op_of(method), error=error_of(status))
            page.set(metrics.REQUESTS_GIVEN_UP, answers.given_up, transport=transport)
            page.set(
                metrics.REQUESTS_IN_WORK,
                answers.begun - answers.ended - answers.given_up,
                transport=transport,
            )
        for method, times in self.calls.by_method.items():
            page.times(metrics.CALL_SECONDS, times, op=op_of(method))
        for (method, status), count in self.calls.errors.items():
            page.set(metrics.CALL_ERRORS, count, op=op_of(method), error=error_of(status))
        for limit, count in self.limits_met.items():
            page.set(metrics.LIMITS_MET, count, limit=limit)
        page.set(metrics.CALLS_IN_FLIGHT, self.calls.begun - self.calls.ended)


RPC_STATS = RpcStats()


@lru_cache(maxsize=1024)
def op_of(method: int) -> str:
    return Method.Name(method).lower() if method in _KNOWN else "unknown"


@lru_cache(maxsize=1)
def _errors() -> dict[int, str]:
    return {cls.wire_code: cls.__name__ for cls in every_error()}


def error_of(status: int) -> str:
    return _errors().get(status, "unknown")


assert SLOTS == 64  # the bit length of a time in microseconds stays below it for half a million years
