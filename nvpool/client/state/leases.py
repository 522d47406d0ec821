"""Leases of a client: inodes that no other client changes without notice to this one.

A lease is held until its own time or that of its shard's watch (`client/rpc/lease_watch`) ends. Both count
from the sending of the request, on a clock that goes on while this process or the machine is suspended. While
a lease is held, no other client has changed the inode since the lease began, and this client misses no open,
close or change of others that ended before now. A name that was learned under the lease stands for its inode
as long, because every removal of a name changes the inode.

Replies may overtake one another: a reply to a request sent before a lease ended starts no new lease. The
table is bounded. Filled by vfs; leases end by the watch and by this client's own changes. This module sends
no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nvpool.core import primitives
from nvpool.core.clock import Clock, SystemClock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.ids import COUNTER_BITS

NEVER_S = float("-inf")
_ENDED_MAX = 16384
WATCH_SHARE = 0.95
"""Share of the announced times that is used, as two hosts' clocks run at different rates."""
_NEVER_S, _SHARE, _NS_PER_MS = NEVER_S, WATCH_SHARE, 1_000_000


class ShardWatch:
    """State of the lease protocol between this client and one shard."""

    __slots__ = ("number", "seen", "until_s", "linger_s", "floor_s", "ended", "used", "delegates")

    def __init__(self) -> None:
        self.number = 0  # WatchReply.watch
        self.seen = 0
        self.until_s = NEVER_S  # all leases of the shard end by then
        self.linger_s = 0.0  # how long a file keeps its bytes after it was unlinked
        self.floor_s = NEVER_S  # replies to requests sent before start no lease
        self.ended: dict[int, float] = {}  # inode -> when its lease ended, or would have
        self.used = False
        self.delegates = False  # whether the shard delegates new files, as WatchReply says


class InodeLease:
    """A lease on one inode, or on many inodes of one listing. It never changes.

    `grant` came with the lease or later: the right to read the inode, or b"". A lease that continues another
    one without a gap keeps its `number`.
    """

    __slots__ = ("until_s", "since_s", "grant", "watch", "number")

    def __init__(self, until_s: float, since_s: float, grant: bytes, watch: ShardWatch, number: int) -> None:
        self.until_s = until_s
        self.since_s = since_s
        self.grant = grant
        self.watch = watch
        self.number = number

    def replaced(self, until_s: float, grant: bytes) -> InodeLease:
        """This lease with another end and another grant."""
        return InodeLease(until_s, self.since_s, grant, self.watch, self.number)


class Leases:
    """The lease table of a client. `watch_of(inode)` returns the watch of the inode's shard."""

    def __init__(self, clock: Clock, count_max: int, watch_of: Callable[[int], ShardWatch]) -> None:
        self._clock = clock
        self._is_system = type(clock) is SystemClock
        self.count_max = count_max
        self._watch_of = watch_of
        self.by_inode: dict[int, InodeLease] = {}
        self.last_number = 0
        self.on_end_all: Callable[[], None] = _nothing
        """Called when all leases of a shard end together, without a recall of each inode. Must not wait."""

    def now_s(self) -> float:
        """The present time of the client's clock."""
        return primitives.boottime_s() if self._is_system else self._clock.boottime_s()

    def now_ms(self) -> int:
        """The present wall time in milliseconds, in which grants end."""
        wall_ns = primitives.wall_ns() if self._is_system else self._clock.wall_ns()
        return wall_ns // _NS_PER_MS

    def held(self, inode: int) -> InodeLease | None:
        """The lease on the inode if it is held now; else None."""
        return self.held_at(inode, self.now_s())

    def held_at(self, inode: int, now_s: float) -> InodeLease | None:
        """As `held`, for a caller that has just read the clock."""
        lease = self.by_inode.get(inode)
        if lease is None:
            return None
        watch = lease.watch
        if now_s >= lease.until_s or now_s >= watch.until_s:
            return None
        watch.used = True
        return lease

    def keeps_bytes(self, inode: int) -> bool:
        """Whether the file's bytes still exist even if another client has unlinked the file.

        True while the lease is held, and for the watch's `linger_s` after it.
        """
        lease = self.by_inode.get(inode)
        if lease is None:
            return False
        watch = lease.watch
        until_s = lease.until_s if lease.until_s < watch.until_s else watch.until_s
        return self.now_s() < until_s + watch.linger_s

    def take(self, inode: int, lease_ms: int, sent_s: float, grant: bytes = b"") -> InodeLease | None:
        """Record the lease of a reply to a request sent at `sent_s`. Return the lease if it is held now."""
        return self.take_at(self._watch_of(inode), inode, lease_ms, sent_s, grant, self.now_s())

    def take_at(
        self, watch: ShardWatch, inode: int, lease_ms: int, sent_s: float, grant: bytes, now_s: float
    ) -> InodeLease | None:
        """As `take`, for a caller that knows the watch of the inode's shard and has just read the clock."""
        if not lease_ms or not _is_news(watch, inode, sent_s):
            return None
        until_s = sent_s + lease_ms * _SHARE / 1000
        leases = self.by_inode
        before = leases.pop(inode, None)
        if before is not None and now_s < before.until_s:  # the earlier lease has not ended in between
            if before.until_s > until_s:
                until_s = before.until_s
            lease = before.replaced(until_s, grant or before.grant)
        else:
            self.last_number += 1
            lease = InodeLease(until_s, now_s, grant, watch, self.last_number)
        leases[inode] = lease
        if len(leases) > self.count_max:
            for old in too_old(leases, self.count_max):
                del leases[old]
        if now_s >= lease.until_s or now_s >= watch.until_s:
            return None
        watch.used = True
        return lease

    def take_all(
        self, inodes: list[int], lease_ms: int, sent_s: float, grants: list[bytes] | None = None
    ) -> list[InodeLease | None]:
        """As `take` for each inode.

        Inodes without earlier state share one lease, or get one each if there are `grants`.
        """
        if not lease_ms or not inodes:
            return [None] * len(inodes)
        watch = self._only_watch_of(inodes)
        if (
            watch is None
            or sent_s <= watch.floor_s
            or not (self.by_inode.keys().isdisjoint(inodes) and watch.ended.keys().isdisjoint(inodes))
        ):
            return [
                self.take(inode, lease_ms, sent_s, grants[at] if grants else b"")
                for at, inode in enumerate(inodes)
            ]
        until_s, now_s = sent_s + lease_ms * WATCH_SHARE / 1000, self.now_s()
        self.last_number += 1
        number = self.last_number
        leases = (
            [InodeLease(until_s, now_s, grant, watch, number) for grant in grants]
            if grants
            else [InodeLease(until_s, now_s, b"", watch, number)] * len(inodes)
        )
        self.by_inode.update(zip(inodes, leases, strict=True))
        for old in too_old(self.by_inode, self.count_max):
            del self.by_inode[old]
        return leases if self.held(inodes[-1]) is not None else [None] * len(inodes)

    def unknown(self, inodes: list[int]) -> set[int]:
        """The inodes without a lease, held or expired."""
        known = self.by_inode  # may be very large, so only the given inodes are examined
        return {inode for inode in inodes if inode not in known}

    def keep_grant(self, inode: int, grant: bytes) -> None:
        """Keep the grant with the inode's lease, if it is held, for the next open."""
        known = self.by_inode.get(inode)
        if known is None or known.grant == grant:
            return
        lease = self.held(inode)
        if lease is not None:
            self.by_inode[inode] = lease.replaced(lease.until_s, grant)

    def lacks_grant(self, inode: int) -> bool:
        """Whether there is a lease on the inode that came without the right to read."""
        lease = self.by_inode.get(inode)
        return lease is not None and not lease.grant

    def is_news(self, inode: int, sent_s: float) -> bool:
        """Whether a request sent at `sent_s` is later than this client's last change of the inode."""
        return _is_news(self._watch_of(inode), inode, sent_s)

    def outdated(self, inodes: list[int], sent_s: float) -> set[int]:
        """The inodes for which `is_news` is false."""
        watch = self._only_watch_of(inodes)
        if watch is not None and sent_s > watch.floor_s and watch.ended.keys().isdisjoint(inodes):
            return set()
        return {inode for inode in inodes if not self.is_news(inode, sent_s)}

    def _only_watch_of(self, inodes: list[int]) -> ShardWatch | None:
        """The watch of all these inodes. None if they are of several shards, or there are none."""
        watches = {
            self._watch_of(partition << COUNTER_BITS)
            for partition in {inode >> COUNTER_BITS for inode in inodes}
        }
        return watches.pop() if len(watches) == 1 else None

    def forget(self, inode: int) -> None:
        """End the lease after this client changed the inode and does not know its new state."""
        self._end(self._watch_of(inode), inode, self.now_s())

    def end(self, watch: ShardWatch, inodes: Iterable[int]) -> None:
        """End the leases that the shard has recalled."""
        now_s = self.now_s()
        for inode in inodes:
            self._end(watch, inode, now_s)

    def _end(self, watch: ShardWatch, inode: int, now_s: float) -> None:
        self.by_inode.pop(inode, None)
        ended = watch.ended
        ended.pop(inode, None)
        ended[inode] = now_s
        for old in too_old(ended, _ENDED_MAX):
            watch.floor_s = max(watch.floor_s, ended.pop(old))

    def end_all(self, watch: ShardWatch) -> None:
        """End all leases of one shard."""
        watch.floor_s = self.now_s()
        watch.ended.clear()
        self.on_end_all()
        for inode in [inode for inode, lease in self.by_inode.items() if lease.watch is watch]:
            del self.by_inode[inode]


def _is_news(watch: ShardWatch, inode: int, sent_s: float) -> bool:
    """Whether a request sent at `sent_s` is later than the end of the inode's last lease."""
    if sent_s <= watch.floor_s:
        return False
    if not watch.ended:
        return True
    ended_s = watch.ended.get(inode, _NEVER_S)
    return sent_s > ended_s


def _nothing() -> None:
    """Default callback for the end of all leases: nothing is kept under a lease."""
