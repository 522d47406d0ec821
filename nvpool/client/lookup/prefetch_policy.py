"""Look-ups of one name after another in a directory: when to ask for many at once.

Who lists a directory and then looks at each name, or opens them in that order, would ask once for each. Names that follow one
another in the order of listings come with their attributes in one answer, so a look-up that misses asks for the ones behind its
name too: first a few, then more while they are used, up to WINDOW_MAX; where they are not, as with names at random, it stops
and tries again after ever more misses, a few in a hundred thousand.

Names in no order tell nothing of the next one; there it is counted how much of a directory was asked for name by name, and
when it is time to ask for all of it (`through`).

Who gets to the middle of such an answer will mostly want the next one: it is asked for then, and is here in time. Bookkeeping
only, bounded. Used by names and through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.rpc.messages.direntries import Listed

MISSES_MIN, MISSES_MAX = 4, 1024
"""Look-ups that miss before names are asked for in advance: at first, and where that was of no use."""
WINDOW_MIN, WINDOW_MAX = 32, 512
"""Names in one answer: 512 take the shard five milliseconds."""
SHARE = 8
"""Where an eighth of a directory's names had to be asked for, in whatever order, the others are asked for together: at a third
of the price for each, so what is never looked at costs at most about three times what was spent till then."""
LOOKS_BETWEEN = 32
"""Look-ups that had to ask, between two looks whether that is so."""
DIRECTORIES_MAX = 256
PAUSE_S = 30.0


class _Directory:
    __slots__ = ("name", "misses", "patience", "window", "hits", "last_s", "asking", "middle", "cursor", "ahead", "coming",
                 "asked_for", "share", "through", "learned", "used")

    def __init__(self) -> None:
        self.name = b""    # the last that missed: a directory on the way to others is looked up again and again
        self.misses = 0
        self.patience = MISSES_MIN
        self.window = 0    # names of the last answer; 0: none was asked for
        self.hits = 0      # since it came
        self.last_s = 0.0
        self.asking = False
        self.middle = b""  # who looks this name up will go on behind the last answer
        self.cursor = 0    # which leads on there
        self.ahead = 0     # names of the last answer
        self.coming: asyncio.Task | None = None
        self.asked_for = 0   # look-ups that had to ask, since all names were last asked for
        self.share = SHARE
        self.through = False  # they are being asked for
        self.learned = self.used = 0  # names that this has brought, one at least; look-ups that were answered since


class Siblings:
    """`ask_on(directory, cursor, count)` asks for the names behind the cursor; `asked` is to be called at its end."""

    def __init__(self, clock: Clock, ask_on: Callable[[int, int, int], asyncio.Task]) -> None:
        self._clock = clock
        self._ask_on = ask_on
        self._directories: dict[int, _Directory] = {}

    def hit(self, directory: int, name: bytes) -> None:
        """A look-up in it was answered from here."""
        known = self._directories.get(directory)
        if known is not None:
            known.hits += 1
            known.used += 1
            if name == known.middle:
                known.middle = b""
                known.coming = self._ask_on(directory, known.cursor, min(known.ahead * 4, WINDOW_MAX))

    def coming(self, directory: int) -> asyncio.Task | None:
        """The next names are on their way."""
        known = self._directories.get(directory)
        return known.coming if known is not None and known.coming is not None and not known.coming.done() else None

    def missed_alone(self, directory: int, name: bytes) -> bool:
        """Whether `missed` would say one name; then it is as if it had been asked, else nothing has happened."""
        return self._missed(directory, name, True) == 1

    def missed(self, directory: int, name: bytes) -> int:
        """A look-up in it has to ask: for how many names, itself included. `asked` is to be called after more than one."""
        return self._missed(directory, name, False)

    def _missed(self, directory: int, name: bytes, alone: bool) -> int:
        now_s = self._clock.boottime_s()
        known = self._directories.get(directory)
        if known is None or known.last_s + PAUSE_S < now_s:
            known = _Directory()
        used = known.hits * 2 >= known.window
        if alone and not known.asking and name != known.name and (used if known.window else known.misses + 1 >= known.patience):
            return 0
        self._directories.pop(directory, None)
        self._directories[directory] = known
        if len(self._directories) > DIRECTORIES_MAX:
            del self._directories[next(iter(self._directories))]
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
        """Whether `is_to_be_known` is to be asked, after a look-up that had to ask."""
        known = self._directories.get(directory)
        return known is not None and not known.asked_for % LOOKS_BETWEEN

    def is_to_be_known(self, directory: int, entries: int) -> bool:
        """Whether to ask now for all names of a directory that has so many: look-ups have asked for a share of them one by one.
        Then `went_through` is to be called at the end. Where most of what that has brought was of no use, a larger share counts
        the next time."""
        known = self._directories.get(directory)
        if known is None or known.through or known.asked_for * known.share < entries:
            return False
        if known.learned > known.used * 2:
            known.share, known.learned = known.share / 4, 0
            return self.is_to_be_known(directory, entries)
        known.through, known.asked_for, known.learned, known.used = True, 0, 0, 0
        return True

    def went_through(self, directory: int, learned: int) -> None:
        known = self._directories.get(directory)
        if known is not None:
            known.through, known.asked_for, known.learned = False, 0, max(1, learned)

    def asked(self, directory: int, listed: Listed, more: bool) -> None:
        """The answer is here, `more` names follow behind it; or there is none."""
        known = self._directories.get(directory)
        if known is not None:
            known.asking = False
            known.ahead = count = len(listed)
            known.middle, known.cursor = (listed.names[count // 2], listed.cursor(-1)) if more and count else (b"", 0)
