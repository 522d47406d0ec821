"""Cache of verified access tokens (grants), with a check for revoked rights.

The store verifies the signature of a grant once; later requests check only its expiry. When the pool map
revokes rights (poolmap/grant_revocation), the cache is cleared, so the next request with a grant verifies it
again.

The user is `store/server/service`. The reads and the compiled writes (store/server/reads,
store/server/fast_first_writes) and store/server/io_stats share `known` and look a grant up by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import StaleGrant
from nvpool.core.grants import CLOCK_SKEW_S, Grant, verify
from nvpool.poolmap.grant_revocation import RevokedRights
from nvpool.poolmap.model import RevokedRight

KEPT_MAX = 65_536


class VerifiedGrants:
    def __init__(self, secret: bytes, clock: Clock, on_taken: Callable[[bool], None]) -> None:
        """Create an empty cache.

        The cache calls `on_taken(True)` when rights are revoked, and `on_taken(False)` when the last
        revocation has expired.
        """
        self.known: dict[bytes, Grant] = {}
        """Verified grants by their bytes. Always the same dict object, because other modules share it."""
        self._secret = secret
        self._clock = clock
        self._on_taken = on_taken
        self._entries: tuple[RevokedRight, ...] = ()
        self._taken = RevokedRights()

    def grant(self, raw: bytes, now_ms: int) -> Grant | None:
        """Return the grant, or None if it is not valid or no longer valid."""
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

    def use(self, entries: tuple[RevokedRight, ...]) -> None:
        """Set the revoked rights of the newest map."""
        if entries != self._entries:
            self._entries = entries
            self._take()

    def tend(self) -> None:
        """Drop expired revocations. Called once a second."""
        if self._taken and self._taken.until_ms <= self._clock.wall_ns() // 1_000_000:
            self._take()

    def _take(self) -> None:
        was = bool(self._taken)
        self._taken = RevokedRights(self._entries, self._clock.wall_ns() // 1_000_000)
        self.known.clear()
        if was or self._taken:
            self._on_taken(bool(self._taken))
