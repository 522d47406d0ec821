"""Cache of verified access tokens (grants), with a check for revoked rights.

The store verifies the signature of a grant once; later requests check only its expiry. When the pool map
revokes rights (poolmap/grant_revocation), the cache is cleared, so the next request with a grant verifies it
again.

The users are `store/server/service` and `store/server/writes`. `store/server/reads` and `store/server/io_stats` share
`known` and look a grant up by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest

from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.core.errors import AccessDenied, StaleGrant
from nvpool.core.grants import BODY_BYTES, CLOCK_SKEW_S, SERVICE, Grant, keyed_hash
from nvpool.poolmap.grant_revocation import RevokedRights
from nvpool.poolmap.model import RevokedRight

KEPT_MAX = 65_536
_SKEW_MS, _BODY_BYTES = CLOCK_SKEW_S * 1000, BODY_BYTES


class VerifiedGrants:
    def __init__(self, secret: bytes, clock: Clock, on_taken: Callable[[bool], None]) -> None:
        """Create an empty cache.

        The cache calls `on_taken(True)` when rights are revoked, and `on_taken(False)` when the last
        revocation has expired.
        """
        self.known: dict[bytes, Grant] = {}
        """Verified grants by their bytes. Always the same dict object, because other modules share it."""
        self._keyed = keyed_hash(secret)
        self._clock = clock
        self._on_taken = on_taken
        self._entries: tuple[RevokedRight, ...] = ()
        self._taken = RevokedRights()

    def grant(self, raw: bytes, now_ms: int) -> Grant | None:
        """Return the grant, or None if it is not valid or no longer valid."""
        found = self.known.get(raw)
        if found is None:
            try:
                found = grants.read(raw)
            except StaleGrant:
                return None
            state = self._keyed()
            state.update(raw[:_BODY_BYTES])
            if not compare_digest(state.digest(), raw[_BODY_BYTES:]):
                return None
            if found.ends_ms + _SKEW_MS < now_ms:
                return None
            if self._taken and self._taken.refuses(found):
                return None
            if len(self.known) >= KEPT_MAX:
                self.known.clear()
            self.known[raw] = found
        return found if found.ends_ms + _SKEW_MS >= now_ms else None

    def check_service(self, raw: bytes) -> None:
        """Check that this is a grant of a service. StaleGrant: it is not valid. AccessDenied: it is a client's."""
        grant = self.grant(raw, self._clock.wall_ns() // 1_000_000)
        if grant is None:
            raise StaleGrant
        if not grant.rights & SERVICE:
            raise AccessDenied("only a metadata service may do this")

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
