"""Request statistics of the bridge for Prometheus: durations and errors, by service and call.

The Docker service and the CSI service add to them; daemons/bridge reads them.
"""

from __future__ import annotations

from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import Times


class BridgeMetrics:
    """Durations and errors of known calls. Unknown calls do not count, so clients cannot add names."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], Times] = {}
        self._errors: dict[tuple[str, str, str], int] = {}

    def done(self, transport: str, op: str, seconds: float, error: str = "") -> None:
        """Record a finished call. `error` is the name of the error class or code; empty after a success."""
        self._times.setdefault((transport, op), Times()).add(seconds)
        if error:
            key = transport, op, error
            self._errors[key] = self._errors.get(key, 0) + 1

    def measure(self, page: Page) -> None:
        for (transport, op), times in self._times.items():
            page.times(metrics.BRIDGE_SECONDS, times, op=op, transport=transport)
        for (transport, op, error), count in self._errors.items():
            page.set(metrics.BRIDGE_ERRORS, count, op=op, transport=transport, error=error)
