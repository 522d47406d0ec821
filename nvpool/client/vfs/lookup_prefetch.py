"""Policy of look-up prefetch: when a look-up also asks for the names that follow it.

A program that lists a directory and then looks at each name, or opens the names in that order, would send one
request for each. Names that are neighbours in listing order come with their attributes in one reply. So a
look-up that misses also asks for the names behind it: first a few, then more while they are used, up to
WINDOW_MAX. If they are not used, as with names at random, the prefetch stops, and tries again after more and
more misses (a few tries in a hundred thousand).

When a look-up reaches the middle of such a reply, the next names are requested, so they arrive in time.

Names in no order do not predict the next one. For them the policy counts how much of a directory was looked
up name by name, and when it is time to ask for all of it (`directory_prefetch`).

The bookkeeping is bounded and sends nothing. Used by `vfs/namespace`, `vfs/lookup_batcher` and `vfs/directory_prefetch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.rpc.messages.direntries import DirectoryPage

MISSES_MIN, MISSES_MAX = 4, 1024
"""Misses before names are prefetched: at first, and after useless prefetches."""
WINDOW_MIN, WINDOW_MAX = 32, 512
"""Names in one reply: 512 take the shard five milliseconds."""
SHARE = 8
"""Share of a directory's names (1/8) to be looked up singly before a prefetch of the rest.

The order of the look-ups does not matter. A prefetched name costs a third of a look-up, so names that are
never used cost at most about three times the cost spent until then.
"""
LOOKS_BETWEEN = 32
"""Missed look-ups between two checks of that share."""
DIRECTORIES_MAX = 256
PAUSE_S = 30.0


class _Directory:
    """The prefetch state of one directory."""

    __slots__ = (
        "name",
        "misses",
        "patience",
        "window",
        "hits",
        "last_s",
        "asking",
        "middle",
        "cursor",
        "ahead",
        "coming",
        "asked_for",
        "share",
        "through",
        "learned",
        "used",
    )

    def __init__(self) -> None:
        # the last name that missed; a directory on the way to others is looked up again and again
        self.name = b""
        self.misses = 0
        self.patience = MISSES_MIN
        self.window = 0  # names of the last reply; 0: none were prefetched
        self.hits = 0  # since that reply
        self.last_s = 0.0
        self.asking = False
        self.middle = b""  # a look-up of this name requests the names behind the last reply
        self.cursor = 0  # where those names start
        self.ahead = 0  # names of the last reply
        self.coming: asyncio.Task | None = None
        self.asked_for = 0  # missed look-ups since the last prefetch of all names
        self.share = SHARE
        self.through = False  # whether all names are being prefetched
        # names that the last prefetch brought (one at least), and look-ups that were answered since
        self.learned = self.used = 0


class LookupPrefetch:
    """Prefetch state of the directories of a client.

    `ask_on(directory, cursor, count)` requests the names behind the cursor; `asked` must be called at its
    end.
    """

    def __init__(self, clock: Clock, ask_on: Callable[[int, int, int], asyncio.Task]) -> None:
        self._clock = clock
        self._ask_on = ask_on
        self.directories: dict[int, _Directory] = {}

    def hit(self, directory: int, name: bytes) -> None:
        """Record a look-up that was answered from the cache."""
        known = self.directories.get(directory)
        if known is not None:
            known.hits += 1
            known.used += 1
            if name == known.middle:
                known.middle = b""
                known.coming = self._ask_on(directory, known.cursor, min(known.ahead * 4, WINDOW_MAX))

    def coming(self, directory: int) -> asyncio.Task | None:
        """The request for the next names, if one is in flight; else None."""
        known = self.directories.get(directory)
        return (
            known.coming
            if known is not None and known.coming is not None and not known.coming.done()
            else None
        )

    def missed_alone(self, directory: int, name: bytes) -> bool:
        """As `missed`, if that would return 1; return whether it was. False: there was no side effect."""
        return self._missed(directory, name, True) == 1

    def missed(self, directory: int, name: bytes) -> int:
        """Record a missed look-up; return how many names to request, this one included.

        After more than one name the caller must call `asked`.
        """
        return self._missed(directory, name, False)

    def _missed(self, directory: int, name: bytes, alone: bool) -> int:
        now_s = self._clock.boottime_s()
        known = self.directories.get(directory)
        if known is None or known.last_s + PAUSE_S < now_s:
            known = _Directory()
        used = known.hits * 2 >= known.window
        if (
            alone
            and not known.asking
            and name != known.name
            and (used if known.window else known.misses + 1 >= known.patience)
        ):
            return 0
        self.directories.pop(directory, None)
        self.directories[directory] = known
        if len(self.directories) > DIRECTORIES_MAX:
            del self.directories[next(iter(self.directories))]
        known.last_s = now_s
        known.asked_for += 1
        if known.asking or name == known.name:
            return 1
        known.name = name
        if known.window:
            known.patience = MISSES_MIN if used else min(known.patience * 4, MISSES_MAX)
            known.window = min(known.window * 4, WINDOW_MAX) if used else 0
            known.misses = 0
        known.hits = 0
        if not known.window:
            known.misses += 1
            if known.misses < known.patience:
                return 1
            known.window = WINDOW_MIN
        known.asking = True
        return known.window

    def is_time_to_look(self, directory: int) -> bool:
        """Whether to call `is_to_be_known` now, after a missed look-up."""
        known = self.directories.get(directory)
        return known is not None and not known.asked_for % LOOKS_BETWEEN

    def is_to_be_known(self, directory: int, entries: int) -> bool:
        """Whether to prefetch all names of a directory with that many entries now.

        True when look-ups have asked for a share of the names singly; then `went_through` must be called at
        the end. If most names of the last prefetch were not used, a larger share is needed the next time.
        """
        known = self.directories.get(directory)
        if known is None or known.through or known.asked_for * known.share < entries:
            return False
        if known.learned > known.used * 2:
            known.share, known.learned = known.share / 4, 0
            return self.is_to_be_known(directory, entries)
        known.through, known.asked_for, known.learned, known.used = True, 0, 0, 0
        return True

    def went_through(self, directory: int, learned: int) -> None:
        known = self.directories.get(directory)
        if known is not None:
            known.through, known.asked_for, known.learned = False, 0, max(1, learned)

    def asked(self, directory: int, listed: DirectoryPage, more: bool) -> None:
        """Record the end of a request for several names.

        `listed` may be empty after an error; `more`: further names follow behind it.
        """
        known = self.directories.get(directory)
        if known is not None:
            known.asking = False
            known.ahead = count = len(listed)
            known.middle, known.cursor = (
                (listed.names[count // 2], listed.cursor(-1)) if more and count else (b"", 0)
            )
