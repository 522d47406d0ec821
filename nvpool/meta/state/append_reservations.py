"""Order of appends to one file: one client at a time has an unreported reservation.

A reservation gives a client the bytes behind the file's end, but does not move the end: the file grows when
the client reports that the stores have the bytes. Until then other clients that append wait, so no reader
ever sees a size that covers bytes which are still on their way. The wait is bounded by APPEND_S: a client
that died, hangs, or cannot store for longer loses its turn. The next record is then placed behind its
reservation, which reads as zeros until it is written.

The reservation itself is durable (`Inode.reserved`); the waits are in memory only. After a restart, or a
migration of the partition, the time of an open reservation counts from the first request that meets it. Used
by `operations/open` and `meta/server/service`.
"""

from __future__ import annotations

import asyncio
import logging

from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.ids import partition_of
from nvpool.meta.state.records import Inode

_log = logging.getLogger(__name__)

APPEND_S = 10.0
"""Limit of a wait: longer than the pool needs to remove a silent store, shorter than the deadline of a
client's request."""
SHARED_S = 1.0
"""Time during which all clients that append to a file report immediately, after one had to wait."""
_FILES_MAX = 4096
"""Files with a remembered open reservation. If one is dropped, its time counts from the beginning again."""


class AppendInProgress(Exception):
    """The decision needs another client's append to be reported first.

    Only the service sees it, waits, and decides again.
    """

    def __init__(self, inode: int) -> None:
        self.inode = inode


class _Open:
    """Open reservation of one file, and the requests that wait for it.

    `since_s`: time since which it ends at `end`; `session`: its session (0: not known).
    """

    __slots__ = ("end", "since_s", "session", "waiting", "is_wanted")

    def __init__(self, end: int, since_s: float, session: int) -> None:
        self.end = end
        self.since_s = since_s
        self.session = session
        self.is_wanted = False  # another client waits: the reservation is not extended any more
        self.waiting: list[asyncio.Future[None]] = []


class AppendOrder:
    """Open append reservations of a shard's files."""

    def __init__(self, clock: Clock, append_s: float = APPEND_S) -> None:
        self._clock = clock
        self._append_s = append_s
        self._open: dict[int, _Open] = {}
        self._shared_until_s: dict[int, float] = {}

    def check(self, inode: Inode, own: int) -> None:
        """Check that a client may append now. AppendInProgress: another client's reservation is open.

        `own`: end of the client's own open reservation (0: none).
        """
        if inode.reserved <= inode.size:
            return
        found = self._found(inode)
        if own == inode.reserved and not found.is_wanted:
            return
        if self._clock.boottime_s() < found.since_s + self._append_s:
            found.is_wanted = True
            raise AppendInProgress(inode.number)
        _log.warning(
            "inode %d: an append was not reported within %g s; the next record is placed behind it",
            inode.number,
            self._append_s,
        )

    def _found(self, inode: Inode) -> _Open:
        found = self._open.get(inode.number)
        if found is None:
            found = self._begin(inode.number, inode.reserved)
        elif found.end != inode.reserved:  # another shard has given the reservation
            found.end, found.since_s, found.session = inode.reserved, self._clock.boottime_s(), 0
        return found

    def _begin(self, number: int, end: int, session: int = 0) -> _Open:
        found = self._open[number] = _Open(end, self._clock.boottime_s(), session)
        for old in too_old(self._open, _FILES_MAX):
            self._wake(self._open.pop(old))
        return found

    def given(self, number: int, end: int, session: int) -> None:
        """Note that the session has a reservation up to `end`."""
        found = self._open.get(number)
        if found is None:
            self._begin(number, end, session)
        else:
            found.end, found.since_s, found.session, found.is_wanted = (
                end,
                self._clock.boottime_s(),
                session,
                False,
            )

    def is_of(self, inode: Inode, session: int) -> bool:
        """Whether the open reservation is known to be the session's."""
        found = self._open.get(inode.number)
        return found is not None and found.end == inode.reserved and found.session == session

    def ended(self, number: int) -> None:
        """Note that the file has no open reservation, and wake the requests that wait for it."""
        found = self._open.pop(number, None)
        if found is not None:
            self._wake(found)

    def forget(self, partitions: frozenset[int]) -> None:
        """Forget the files of partitions that belong to another shard now.

        Requests that wait for their reservations are handled again, and learn which shard to ask: the report
        that they wait for is sent there too.
        """
        for number in [number for number in self._open if partition_of(number) in partitions]:
            self.ended(number)

    @staticmethod
    def _wake(found: _Open) -> None:
        for future in found.waiting:
            if not future.done():
                future.set_result(None)

    def is_shared(self, number: int) -> bool:
        """Whether several clients append to the file."""
        return self._shared_until_s.get(number, 0.0) > self._clock.boottime_s()

    async def wait(self, number: int) -> None:
        """Return when the open reservation has ended, or its time is over."""
        now_s = self._clock.boottime_s()
        self._shared_until_s.pop(number, None)
        self._shared_until_s[number] = now_s + SHARED_S
        for old in too_old(self._shared_until_s, _FILES_MAX):
            del self._shared_until_s[old]
        found = self._open.get(number)
        if found is None:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found.waiting.append(future)
        try:
            async with asyncio.timeout(max(0.0, found.since_s + self._append_s - now_s)):
                await future
        except TimeoutError:
            pass
        finally:
            found.waiting.remove(future)
