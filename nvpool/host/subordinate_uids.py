"""Owners of subordinate user ids: the ranges that /etc/subuid gives to users for their containers.

A user with such a range can act as each user in it (newuidmap(1)), so limits that count by user count the
whole range for one. The user is `rpc/peer_limits`. Ranges from other sources (nsswitch, `subid:`) are not known.
"""

from __future__ import annotations

from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK, Clock

PATH = Path("/etc/subuid")
LOOK_S = 5.0
"""Shortest time between two looks at the file."""
KNOWN_MAX = 65_536
RANGES_MAX = 10_000
"""Ranges that are used; further ones are ignored."""


class SubordinateUids:
    """Ranges of one file, read again when it changes."""

    def __init__(self, path: Path = PATH, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = path
        self._clock = clock
        self._next_s = 0.0
        self._seen: tuple[int, int, int] | None = None
        self._ranges: tuple[tuple[int, int, str], ...] = ()
        self._owners: dict[int, str] = {}

    def owner_of(self, uid: int) -> str:
        """Return the user to whom the file gives this user id, by name or number as the file says; else "".

        Looks at the file only for a user id that is new here, and not more often than every LOOK_S. A changed
        range counts from the next look on. Never raises: an unreadable file gives nothing.
        """
        owner = self._owners.get(uid)
        if owner is not None:
            return owner
        now_s = self._clock.boottime_s()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            self._look()
        owner = next((owner for first, end, owner in self._ranges if first <= uid < end), "")
        if len(self._owners) >= KNOWN_MAX:
            self._owners.clear()
        self._owners[uid] = owner
        return owner

    def _look(self) -> None:
        """Read the file again if it was changed."""
        try:
            found = self._path.stat()
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen == self._seen:
                return
            text = self._path.read_text(errors="replace")
        except OSError:
            seen, text = None, ""
        self._seen = seen
        ranges = read_ranges(text)
        if ranges != self._ranges:
            self._ranges = ranges
            self._owners.clear()


def read_ranges(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return (first id, end, owner) of each line `owner:first:count` (subuid(5)); other lines are skipped."""
    found: list[tuple[int, int, str]] = []
    for line in text.splitlines():
        owner, _, numbers = line.strip().partition(":")
        first, _, count = numbers.partition(":")
        if owner and first.isdecimal() and count.isdecimal() and len(found) < RANGES_MAX:
            found.append((int(first), int(first) + int(count), owner))
    return tuple(found)
