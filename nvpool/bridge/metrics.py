"""What the bridge has been asked for, by face and call, and how it ended: for Prometheus. Both faces add, daemons/bridge
asks."""

from __future__ import annotations

from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import Times


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
