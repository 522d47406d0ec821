"""Who may lead next, and when: the signs of life of who leads, as one candidate sees them.

Who leads writes a sign of life again and again. His lease counts from the sending of one; a candidate counts it from the moment
at which he has seen it, which is later: so when he has seen nothing new for the whole of it, it has ended there. What he has
not seen yet counts through the guard: who takes the lead names the last sign that he has seen, and is refused where there is a
later one. A candidate under whose name only he can lead (its process holds a lock) waits for no sign under it that is not his:
that process has ended, and what it had under way in etcd is refused from when he leads. What it has lent others may be left.
No clock and no I/O. Used by cluster/etcd/coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Sign:
    """The last sign of life of who leads; without anything in it: nobody leads. Revisions are etcd's."""

    name: str = ""
    reign: int = 0
    """Revision at which he has begun."""
    renewed: int = 0
    """Revision of this sign."""
    lease_s: float = inf
    """inf: it ends by other means, and the sign vanishes then (an earlier version's, under a lease of etcd)."""
    token: str = ""
    """Of the attempt by which he has begun."""
    led_s: float = 0.0
    """Seconds since this lead began, as the leading node says."""


class Succession:
    def __init__(self, only: str = "") -> None:
        """`only`: the name under which nobody leads but this process, and those before it, which have ended."""
        self.seen = Sign()
        self._only = only
        self._begun: str | None = None
        self._since_s = 0.0
        self._ended: dict[str, str | None] = {}

    def see(self, sign: Sign, now_s: float) -> bool:
        """What etcd has said, seen at `now_s`; whether another one leads than before, or nobody."""
        if sign == self.seen:
            return False
        before, self.seen, self._since_s = self.seen, sign, now_s
        return before.reign != sign.reign

    def begins(self, token: str) -> None:
        """An attempt with this token is made by this process; its earlier ones have ended."""
        self._begun = token

    def _is_of_the_dead(self) -> bool:
        """Whether the last sign is of a process before this one."""
        seen = self.seen
        return bool(self._only) and seen.name == self._only and bool(seen.token) and seen.token != self._begun \
            and seen.token not in self._ended

    def has_ended(self, token: str, former: str | None) -> None:
        """The reign with this token was this process's own, and nothing that was given under it is left: it need not be waited
        for. `former`: as of `former`, for who follows it."""
        self._ended = {known: of for known, of in self._ended.items() if known == self.seen.token} | {token: former}

    def free_in_s(self, now_s: float) -> float:
        """From when on somebody else may take the lead; 0: from now on."""
        if not self.seen.reign or self.seen.token in self._ended or self._is_of_the_dead():
            return 0.0
        return max(0.0, self._since_s + self.seen.lease_s - now_s)

    def former(self) -> str | None:
        """For who takes the lead now: who led before, where all of his time has gone by; None where he has given it up, so that
        some of it may be left to whom he has lent it."""
        if not self.seen.reign or self._is_of_the_dead():
            return None
        return self._ended.get(self.seen.token, self.seen.name)

    def led_s(self, now_s: float) -> float:
        """Seconds since the lead of `former` began, at least: what its last sign says, and the sign's age; 0: not known."""
        known = self.former() is not None and self.seen.token not in self._ended
        return self.seen.led_s + now_s - self._since_s if known else 0.0

    def leader(self, now_s: float) -> str | None:
        """Who leads, as far as is known here."""
        return self.seen.name if self.free_in_s(now_s) > 0 else None
