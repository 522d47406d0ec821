"""Work of one request about many inodes that runs in steps: checked directories, and searches for names.

The checks of directories are kept for a short time, so that the steps of a request do not check the same path
again and again. A search for names scans a part of a partition in each step. Used by
`meta/requests/local_user_permissions`.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core.errors import CorruptRecord, NvpoolError
from nvpool.meta.state import records
from nvpool.meta.state.transaction import View

SEARCHED_MAX = 20_000
"""Directory entries that are searched for the name of a file that is not cached: 15 ms."""
SEARCH_STEP = 500
"""Names that a request about many files searches in one step: a third of a millisecond."""
SEARCHED_PER_REQUEST_MAX = 4 * SEARCHED_MAX
"""As SEARCHED_MAX, for all files of a request about many. Files beyond it count as unknown; a request about
one of them searches for that one."""
STEP_WORK = 24
"""Inodes checked and directories read in one step of a request about many inodes: a quarter of a millisecond.
A scanned entry counts as a tenth."""
CHECK_KEPT_NS = 50_000_000
"""How long a check of a directory counts in a request that runs in steps: a change of its mode during the request
takes effect so much later at most. Without it, each step would check the whole path again."""


class SearchPaused(Exception):
    """The search for names of a request about many inodes goes on in the next step; then ask for the inode again."""


class Walks:
    """Work of one request about many inodes: directories checked lately, and names found by searches."""

    __slots__ = ("checked", "wanted", "names", "searches", "work", "entries_left", "_now_ns", "_checked_ns")

    def __init__(self, now_ns: Callable[[], int], wanted: frozenset[int] = frozenset()) -> None:
        """`wanted`: inodes of the request whose names may be searched."""
        self.checked: dict[tuple[int, int], NvpoolError | None] = {}
        """By user and directory: None if `entered` has let the user pass lately, else its error."""
        self._now_ns, self._checked_ns = now_ns, now_ns()
        self.wanted = wanted
        self.names: dict[int, list[tuple[int, bytes]]] = {}
        """Directories and names of the wanted inodes, when they were found; each use looks them up again."""
        self.searches: dict[int, tuple[bytes, int]] = {}
        """By partition: the key from which its names are to be scanned, and how many more; 0 if there are no more."""
        self.work = 0
        self.entries_left = SEARCHED_PER_REQUEST_MAX

    @property
    def is_due(self) -> bool:
        """Whether other requests should get their turn."""
        return self.work >= STEP_WORK

    def begin_step(self) -> None:
        """Forget checks that are too old: modes may have changed while other requests had their turn."""
        self.work = 0
        now_ns = self._now_ns()
        if not 0 <= now_ns - self._checked_ns < CHECK_KEPT_NS:
            self.checked.clear()
            self._checked_ns = now_ns

    def search(self, view: View, partition: int) -> None:
        """Scan the partition once for names of all wanted inodes, as far as the request may scan more.

        SearchPaused: there is more to scan than one step may.
        """
        first, left = self.searches.get(partition) or (
            records.prefix(partition, records.DENTRY),
            SEARCHED_MAX,
        )
        if left <= 0 or self.entries_left <= 0:
            return
        end = records.prefix(partition, records.DENTRY + 1)
        wanted = min(SEARCH_STEP, left, self.entries_left)
        pairs = view.scan(first, end, wanted)
        self.entries_left -= len(pairs)
        self.work = STEP_WORK if len(pairs) == wanted else self.work + 1 + len(pairs) // 10
        is_over = len(pairs) < wanted
        self.searches[partition] = (pairs[-1][0] + b"\0" if pairs else first, 0 if is_over else left - wanted)
        for key, raw in pairs:
            try:
                number = records.decode_dentry(partition, raw)[0]
            except CorruptRecord:
                continue
            if number in self.wanted:
                place = records.directory_of_key(key), key[records.NAME_AT :]
                self.names.setdefault(number, []).append(place)
        if not is_over:
            raise SearchPaused
