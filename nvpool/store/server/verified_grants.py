"""Grants that this store has verified, and those that it refuses because a right was taken back.

A grant's signature is verified once; later requests look only at its end. When the pool map takes rights back
(poolmap/grant_revocation) all that was verified is forgotten, so each grant is looked at anew with its next request. Used by
store/server/service; `known` is shared with the compiled paths (store/server/fast_reads, store/server/fast_first_writes) and
with store/server/io_stats, which look a grant up by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import StaleGrant
from nvpool.core.grants import CLOCK_SKEW_S, Grant, verify
from nvpool.poolmap.grant_revocation import RightsTaken
from nvpool.poolmap.model import RightTaken

KEPT_MAX = 65_536


class Rights:
    def __init__(self, secret: bytes, clock: Clock, on_taken: Callable[[bool], None]) -> None:
        """`on_taken(whether)` is called when rights were taken back, and with False when the last of them is past."""
        self.known: dict[bytes, Grant] = {}
        """Verified grants by their bytes. Always the same object."""
        self._secret = secret
        self._clock = clock
        self._on_taken = on_taken
        self._entries: tuple[RightTaken, ...] = ()
        self._taken = RightsTaken()

    def grant(self, raw: bytes, now_ms: int) -> Grant | None:
        """The grant, or None when it is not valid (any more)."""
        found = self.known.get(raw)
        if found is None:
            try:
                found = verify(raw, self._secret, now_ms)
            except StaleGrant:
                return None
            if self._taken and self._taken.refuses(found):
                return None
            if len(self.known) >= KEPT_MAX:
                self.known.clear()
            self.known[raw] = found
        return found if found.ends_ms + CLOCK_SKEW_S * 1000 >= now_ms else None

    def use(self, entries: tuple[RightTaken, ...]) -> None:
        """What the newest map says was taken back."""
        if entries != self._entries:
            self._entries = entries
            self._take()

    def tend(self) -> None:
        """Drop what is past. Called each second."""
        if self._taken and self._taken.until_ms <= self._clock.wall_ns() // 1_000_000:
            self._take()

    def _take(self) -> None:
        was = bool(self._taken)
        self._taken = RightsTaken(self._entries, self._clock.wall_ns() // 1_000_000)
        self.known.clear()
        if was or self._taken:
            self._on_taken(bool(self._taken))
