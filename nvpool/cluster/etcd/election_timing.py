"""Election timing: which candidate may lead next and when, from the leader's heartbeats that it sees.

The leader writes heartbeats, and its lease counts from the sending of the last one. A candidate counts the
lease from the moment at which it sees that heartbeat, which is later. So when the candidate has seen no new
heartbeat for a whole lease, the lease has ended at the leader. Heartbeats that the candidate has not seen yet
are covered by the condition of its transaction: a candidate names the last heartbeat that it has seen, and
etcd refuses it if there is a later one.

A candidate whose name only it can use (its process holds a lock) does not wait for a heartbeat of another
process under that name. That process has ended, and etcd refuses its pending changes once this candidate
leads. Leases that it has granted to others may still be valid. No clock and no I/O. Used by
cluster/etcd/coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class LeaderHeartbeat:
    """The leader's last heartbeat; an empty one: there is no leader. Revisions are etcd's."""

    name: str = ""
    leader_revision: int = 0
    """Revision at which the leadership began."""
    renewed: int = 0
    """Revision of this heartbeat."""
    lease_s: float = inf
    """Lease in seconds; inf: an earlier version's leadership, under an etcd lease.

    Its key disappears when that lease ends."""
    token: str = ""
    """Token of the attempt that began the leadership."""
    led_s: float = 0.0
    """Seconds since the leadership began, as the leader reports."""


class ElectionTiming:
    def __init__(self, only: str = "") -> None:
        """`only`: a leader name that only this process, and its predecessors that have ended, use."""
        self.seen = LeaderHeartbeat()
        self._only = only
        self._begun: str | None = None
        self._since_s = 0.0
        self._ended: dict[str, str | None] = {}

    def see(self, sign: LeaderHeartbeat, now_s: float) -> bool:
        """Record a heartbeat read from etcd at `now_s`; return whether the leadership has changed."""
        if sign == self.seen:
            return False
        before, self.seen, self._since_s = self.seen, sign, now_s
        return before.leader_revision != sign.leader_revision

    def begins(self, token: str) -> None:
        """Record this process's attempt with that token; its earlier attempts have ended."""
        self._begun = token

    def _is_of_the_dead(self) -> bool:
        """Whether the last heartbeat is that of a predecessor of this process."""
        seen = self.seen
        return (
            bool(self._only)
            and seen.name == self._only
            and bool(seen.token)
            and seen.token != self._begun
            and seen.token not in self._ended
        )

    def has_ended(self, token: str, former: str | None) -> None:
        """Record that this process's leadership with that token has ended, and all leases under it.

        Nobody needs to wait for it. `former` is the result of `former` for the next leader.
        """
        self._ended = {known: of for known, of in self._ended.items() if known == self.seen.token} | {
            token: former
        }

    def free_in_s(self, now_s: float) -> float:
        """Seconds until another candidate may acquire the leadership; 0: now."""
        if not self.seen.leader_revision or self.seen.token in self._ended or self._is_of_the_dead():
            return 0.0
        return max(0.0, self._since_s + self.seen.lease_s - now_s)

    def former(self) -> str | None:
        """Previous leader for a candidate that acquires the leadership now, or None.

        The result is a name if that leader's whole lease has expired. None if that leader released its
        leadership, so that leases under it may still be valid.
        """
        if not self.seen.leader_revision or self._is_of_the_dead():
            return None
        return self._ended.get(self.seen.token, self.seen.name)

    def led_s(self, now_s: float) -> float:
        """Least number of seconds since the leadership of `former` began; 0: not known.

        It is the time in the last heartbeat plus the age of that heartbeat.
        """
        known = self.former() is not None and self.seen.token not in self._ended
        return self.seen.led_s + now_s - self._since_s if known else 0.0

    def leader(self, now_s: float) -> str | None:
        """Name of the leader, as known here."""
        return self.seen.name if self.free_in_s(now_s) > 0 else None
