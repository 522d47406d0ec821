"""Authentication between the services of a pool: an access token (grant) signed with the pool's key.

The grant covers everything. `meta/store_client`, `meta/server/replication_rpc` and the clients of other
shards send it; the receiving services and the pool map's coordinator check it.
"""

from __future__ import annotations

from nvpool.core.clock import Clock
from nvpool.core.errors import StaleGrant
from nvpool.core.grants import CLOCK_SKEW_S, SERVICE, Grant, sign, verify

AUTHORITY_S = 600.0


class ServiceRight:
    """Grant that shard `number` signs for itself; it is renewed at half of its lifetime."""

    def __init__(self, clock: Clock, secret: bytes, number: int) -> None:
        self._clock = clock
        self._secret = secret
        self._number = number
        self._signed = b""
        self._ends_ms = 0

    def __call__(self) -> bytes:
        now_ms = self._clock.wall_ns() // 1_000_000
        if self._ends_ms - now_ms < AUTHORITY_S * 500:
            self._ends_ms = now_ms + int(AUTHORITY_S * 1000)
            self._signed = sign(Grant(SERVICE, 0, self._number, 0, 0, self._ends_ms), self._secret)
        return self._signed


class AuthorityCheck:
    """Verification of the grants that other services sign.

    Every message carries a grant, so the last valid grant is cached.
    """

    def __init__(self, clock: Clock, secret: bytes) -> None:
        self._clock = clock
        self._secret = secret
        self._good = b""
        self._ends_ms = 0

    def __call__(self, raw: bytes) -> None:
        """Check the grant `raw`. StaleGrant: it is not a valid grant of a service."""
        now_ms = self._clock.wall_ns() // 1_000_000
        if raw == self._good and now_ms < self._ends_ms:
            return
        grant = verify(raw, self._secret, now_ms)
        if not grant.rights & SERVICE:
            raise StaleGrant("only services of the pool may say this")
        self._good, self._ends_ms = raw, grant.ends_ms + CLOCK_SKEW_S * 1000
