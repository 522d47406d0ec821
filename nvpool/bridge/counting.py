"""What the bridge has been asked for, by face and call, and how it ended: for Prometheus. Both faces add, run/bridge_daemon
asks."""

from __future__ import annotations

from nvpool.base import metrics
from nvpool.base.metrics import Times
from nvpool.base.metrics_page import Page


class Counts:
    """Of calls that the faces know: a stranger can not make new names."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], Times] = {}
        self._errors: dict[tuple[str, str, str], int] = {}

    def done(self, transport: str, op: str, seconds: float, error: str = "") -> None:
        """A call has been answered; `error`: the name of the class or code that it was refused by."""
        self._times.setdefault((transport, op), Times()).add(seconds)
        if error:
            key = transport, op, error
            self._errors[key] = self._errors.get(key, 0) + 1

    def measure(self, page: Page) -> None:
        for (transport, op), times in self._times.items():
            page.times(metrics.BRIDGE_SECONDS, times, op=op, transport=transport)
        for (transport, op, error), count in self._errors.items():
            page.set(metrics.BRIDGE_ERRORS, count, op=op, transport=transport, error=error)
