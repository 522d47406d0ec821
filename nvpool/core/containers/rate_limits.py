"""Rate limits by key: each key may take a burst, and a steady rate from then on (token buckets).

Used where one peer must not use up what all peers share: the audit log and the signing of certificates.
"""

from __future__ import annotations

from nvpool.core.clock import SYSTEM_CLOCK, Clock

KEYS_MAX = 4096
"""Keys with a limit of their own. While all of them are in use, further keys share one limit."""
_OTHERS = ""


class RateLimits:
    """Token buckets of the same size. A bucket that is full again is forgotten when space is needed."""

    def __init__(self, burst: int, per_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """Key -> what was left for it, and when."""

    def take(self, key: str = _OTHERS) -> bool:
        """Take one for this key; return whether there was one."""
        now_s = self._clock.boottime_s()
        if key not in self._buckets and len(self._buckets) >= KEYS_MAX:
            self._buckets = {
                one: bucket
                for one, bucket in self._buckets.items()
                if self._left(bucket, now_s) < self._burst
            }
            if len(self._buckets) >= KEYS_MAX:
                key = _OTHERS
        left = self._left(self._buckets.get(key, (self._burst, now_s)), now_s)
        self._buckets[key] = (left - 1 if left >= 1 else left), now_s
        return left >= 1

    def _left(self, bucket: tuple[float, float], now_s: float) -> float:
        left, since_s = bucket
        return min(self._burst, left + (now_s - since_s) * self._per_s)
