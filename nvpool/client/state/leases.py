"""What the shards have promised to tell us of before others change it, and for how long they have.

A lease is held while its own time and that of the shard's watch (`client/rpc/lease_watch`) have not run out; both count from
the sending of what was answered, on a clock that goes on while this process or the machine is stopped. Who asks here asks for
this moment: no other client has changed the inode since the lease began and no open, close or change of others that ended
before now is missed. A name that was learned under a lease stands for its inode as long, since whatever takes a name away
changes the inode.

Answers may overtake one another: what is told after a lease has ended, by a request sent before, begins no new one. Bounded.
Filled by vfs, ended by watch and by our own changes; never asks anybody.
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
"""Of the times that we are told: clocks of two hosts do not go at the same rate."""


class ShardWatch:
    """What one shard and we have said to one another about leases."""

    __slots__ = ("number", "seen", "until_s", "linger_s", "floor_s", "ended", "used")

    def __init__(self) -> None:
        self.number = 0          # WatchReply.watch
        self.seen = 0
        self.until_s = NEVER_S   # no lease holds longer
        self.linger_s = 0.0      # a file that has been unlinked since then keeps its bytes so long
        self.floor_s = NEVER_S   # what was asked before begins no lease
        self.ended: dict[int, float] = {}   # inode -> when its lease ended, or would have
        self.used = False


class Lease(NamedTuple):
    """On one inode, or on many that were listed together. `grant` was given with it or since: the right to read it, or nothing.
    `number` is that of the lease which this one goes on, without a moment between them."""

    until_s: float
    since_s: float
    grant: bytes
    watch: ShardWatch
    number: int


class Leases:
    """`watch_of(inode)` is that of the shard which has the inode."""

    def __init__(self, clock: Clock, count_max: int, watch_of: Callable[[int], ShardWatch]) -> None:
        self._clock = clock
        self._count_max = count_max
        self._watch_of = watch_of
        self._leases: dict[int, Lease] = {}
        self._number = 0
        self.on_end_all: Callable[[], None] = lambda: None
        """Called when all leases of a shard end together, without a recall of each inode. Must not wait."""

    def held(self, inode: int) -> Lease | None:
        """The lease, where it holds now."""
        lease = self._leases.get(inode)
        if lease is None:
            return None
        now_s = self._clock.boottime_s()
        if now_s >= lease.until_s or now_s >= lease.watch.until_s:
            return None
        lease.watch.used = True
        return lease

    def keeps_bytes(self, inode: int) -> bool:
        """Whether the file had a name so short a time ago that its bytes are still there, whoever has unlinked it since."""
        lease = self._leases.get(inode)
        return lease is not None and (
            self._clock.boottime_s() < min(lease.until_s, lease.watch.until_s) + lease.watch.linger_s)

    def take(self, inode: int, lease_ms: int, sent_s: float, grant: bytes = b"") -> Lease | None:
        """An answer to a request sent at `sent_s` promised so much; the lease, where it holds."""
        watch = self._watch_of(inode)
        if not lease_ms or sent_s <= watch.floor_s or sent_s <= watch.ended.get(inode, NEVER_S):
            return None
        now_s = self._clock.boottime_s()
        until_s = sent_s + lease_ms * WATCH_SHARE / 1000
        leases = self._leases
        before = leases.pop(inode, None)
        if before is not None and now_s < before.until_s:  # it has not ended in between
            lease = before._replace(until_s=max(before.until_s, until_s), grant=grant or before.grant)
        else:
            lease = Lease(until_s, now_s, grant, watch, self._next())
        leases[inode] = lease
        if len(leases) > self._count_max:
            for old in too_old(leases, self._count_max):
                del leases[old]
        if now_s >= lease.until_s or now_s >= watch.until_s:
            return None
        watch.used = True
        return lease

    def _next(self) -> int:
        self._number += 1
        return self._number

    def take_all(self, inodes: list[int], lease_ms: int, sent_s: float,
                 grants: list[bytes] | None = None) -> list[Lease | None]:
        """As `take` of each. Those of which nothing was known get one lease together, each with its grant where there are
        `grants`."""
        if not lease_ms or not inodes:
            return [None] * len(inodes)
        watch = self._only_watch_of(inodes)
        if watch is None or sent_s <= watch.floor_s or not (
                self._leases.keys().isdisjoint(inodes) and watch.ended.keys().isdisjoint(inodes)):
            return [self.take(inode, lease_ms, sent_s, grants[at] if grants else b"") for at, inode in enumerate(inodes)]
        lease = Lease(sent_s + lease_ms * WATCH_SHARE / 1000, self._clock.boottime_s(), b"", watch, self._next())
        until_s, since_s, _, _, number = lease
        leases = [lease] * len(inodes) if not grants else [Lease(until_s, since_s, grant, watch, number) for grant in grants]
        self._leases.update(zip(inodes, leases, strict=True))
        for old in too_old(self._leases, self._count_max):
            del self._leases[old]
        return leases if self.held(inodes[-1]) is not None else [None] * len(inodes)

    def unknown(self, inodes: list[int]) -> set[int]:
        """Those on which there is no lease, held or run out."""
        known = self._leases  # of which there may be very many: none but these is looked at
        return {inode for inode in inodes if inode not in known}

    def keep_grant(self, inode: int, grant: bytes) -> None:
        """With the lease on the inode, where it holds: for the next who opens it."""
        known = self._leases.get(inode)
        if known is None or known.grant == grant:
            return
        lease = self.held(inode)
        if lease is not None:
            self._leases[inode] = lease._replace(grant=grant)

    def lacks_grant(self, inode: int) -> bool:
        """Whether there is a lease on the inode that came without the right to read it."""
        lease = self._leases.get(inode)
        return lease is not None and not lease.grant

    def is_news(self, inode: int, sent_s: float) -> bool:
        """Whether what a request sent then tells of the inode is not older than our own last change of it."""
        watch = self._watch_of(inode)
        return sent_s > watch.floor_s and sent_s > watch.ended.get(inode, NEVER_S)

    def outdated(self, inodes: list[int], sent_s: float) -> set[int]:
        """Those of which that is not so."""
        watch = self._only_watch_of(inodes)
        if watch is not None and sent_s > watch.floor_s and watch.ended.keys().isdisjoint(inodes):
            return set()
        return {inode for inode in inodes if not self.is_news(inode, sent_s)}

    def _only_watch_of(self, inodes: list[int]) -> ShardWatch | None:
        """That of all of them; None where they are of several shards, or there are none."""
        watches = {self._watch_of(partition << COUNTER_BITS) for partition in {inode >> COUNTER_BITS for inode in inodes}}
        return watches.pop() if len(watches) == 1 else None

    def forget(self, inode: int) -> None:
        """We have changed it, and do not know what it is now."""
        self._end(self._watch_of(inode), inode, self._clock.boottime_s())

    def end(self, watch: ShardWatch, inodes: Iterable[int]) -> None:
        """The shard has said so."""
        now_s = self._clock.boottime_s()
        for inode in inodes:
            self._end(watch, inode, now_s)

    def _end(self, watch: ShardWatch, inode: int, now_s: float) -> None:
        self._leases.pop(inode, None)
        ended = watch.ended
        ended.pop(inode, None)
        ended[inode] = now_s
        for old in too_old(ended, _ENDED_MAX):
            watch.floor_s = max(watch.floor_s, ended.pop(old))

    def end_all(self, watch: ShardWatch) -> None:
        """Of one shard."""
        watch.floor_s = self._clock.boottime_s()
        watch.ended.clear()
        self.on_end_all()
        for inode in [inode for inode, lease in self._leases.items() if lease.watch is watch]:
            del self._leases[inode]
