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
from typing import NamedTuple

from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.ids import COUNTER_BITS

NEVER_S = float("-inf")
_ENDED_MAX = 16384
WATCH_SHARE = 0.95
"""Share of the announced times that is used, as two hosts' clocks run at different rates."""


class ShardWatch:
    """State of the lease protocol between this client and one shard."""

    __slots__ = ("number", "seen", "until_s", "linger_s", "floor_s", "ended", "used")

    def __init__(self) -> None:
        self.number = 0  # WatchReply.watch
        self.seen = 0
        self.until_s = NEVER_S  # all leases of the shard end by then
        self.linger_s = 0.0  # how long a file keeps its bytes after it was unlinked
        self.floor_s = NEVER_S  # replies to requests sent before start no lease
        self.ended: dict[int, float] = {}  # inode -> when its lease ended, or would have
        self.used = False


class InodeLease(NamedTuple):
    """A lease on one inode, or on many inodes of one listing.

    `grant` came with the lease or later: the right to read the inode, or b"". A lease that continues another
    one without a gap keeps its `number`.
    """

    until_s: float
    since_s: float
    grant: bytes
    watch: ShardWatch
    number: int


class Leases:
    """The lease table of a client. `watch_of(inode)` returns the watch of the inode's shard."""

    def __init__(self, clock: Clock, count_max: int, watch_of: Callable[[int], ShardWatch]) -> None:
        self._clock = clock
        self.count_max = count_max
        self._watch_of = watch_of
        self.by_inode: dict[int, InodeLease] = {}
        self.last_number = 0
        self.on_end_all: Callable[[], None] = lambda: None
        """Called when all leases of a shard end together, without a recall of each inode. Must not wait."""

    def held(self, inode: int) -> InodeLease | None:
        """The lease on the inode if it is held now; else None."""
        lease = self.by_inode.get(inode)
        if lease is None:
            return None
        now_s = self._clock.boottime_s()
        if now_s >= lease.until_s or now_s >= lease.watch.until_s:
            return None
        lease.watch.used = True
        return lease

    def keeps_bytes(self, inode: int) -> bool:
        """Whether the file's bytes still exist even if another client has unlinked the file.

        True while the lease is held, and for the watch's `linger_s` after it.
        """
        lease = self.by_inode.get(inode)
        return lease is not None and (
            self._clock.boottime_s() < min(lease.until_s, lease.watch.until_s) + lease.watch.linger_s
        )

    def take(self, inode: int, lease_ms: int, sent_s: float, grant: bytes = b"") -> InodeLease | None:
        """Record the lease of a reply to a request sent at `sent_s`. Return the lease if it is held now."""
        watch = self._watch_of(inode)
        if not lease_ms or sent_s <= watch.floor_s or sent_s <= watch.ended.get(inode, NEVER_S):
            return None
        now_s = self._clock.boottime_s()
        until_s = sent_s + lease_ms * WATCH_SHARE / 1000
        leases = self.by_inode
        before = leases.pop(inode, None)
        if before is not None and now_s < before.until_s:  # the earlier lease has not ended in between
            lease = before._replace(until_s=max(before.until_s, until_s), grant=grant or before.grant)
        else:
            lease = InodeLease(until_s, now_s, grant, watch, self._next())
        leases[inode] = lease
        if len(leases) > self.count_max:
            for old in too_old(leases, self.count_max):
                del leases[old]
        if now_s >= lease.until_s or now_s >= watch.until_s:
            return None
        watch.used = True
        return lease

    def _next(self) -> int:
        self.last_number += 1
        return self.last_number

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
        lease = InodeLease(
            sent_s + lease_ms * WATCH_SHARE / 1000, self._clock.boottime_s(), b"", watch, self._next()
        )
        until_s, since_s, _, _, number = lease
        leases = (
            [lease] * len(inodes)
            if not grants
            else [InodeLease(until_s, since_s, grant, watch, number) for grant in grants]
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
            self.by_inode[inode] = lease._replace(grant=grant)

    def lacks_grant(self, inode: int) -> bool:
        """Whether there is a lease on the inode that came without the right to read."""
        lease = self.by_inode.get(inode)
        return lease is not None and not lease.grant

    def is_news(self, inode: int, sent_s: float) -> bool:
        """Whether a request sent at `sent_s` is later than this client's last change of the inode."""
        watch = self._watch_of(inode)
        return sent_s > watch.floor_s and sent_s > watch.ended.get(inode, NEVER_S)

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
        self._end(self._watch_of(inode), inode, self._clock.boottime_s())

    def end(self, watch: ShardWatch, inodes: Iterable[int]) -> None:
        """End the leases that the shard has recalled."""
        now_s = self._clock.boottime_s()
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
        watch.floor_s = self._clock.boottime_s()
        watch.ended.clear()
        self.on_end_all()
        for inode in [inode for inode, lease in self.by_inode.items() if lease.watch is watch]:
            del self.by_inode[inode]
