"""What giver and taker reach into of the shard that they work for. Made by `meta/service`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple

from nvpool.base.clock import Clock
from nvpool.kv.contract import Kv
from nvpool.logic.poolmap import PoolMap
from nvpool.meta.cuts import Cuts
from nvpool.meta.gc import Collector
from nvpool.meta.leases import Sessions
from nvpool.meta.lockwaits import LockWaits
from nvpool.meta.moving.ranges import Ranges
from nvpool.meta.numbers import Numbers
from nvpool.meta.view import View
from nvpool.meta.watches import Watches


class Inside(NamedTuple):
    shard: int
    kv: Kv
    view: View
    ranges: Ranges
    numbers: Numbers
    sessions: Sessions
    locks: LockWaits
    collector: Collector
    cuts: Cuts
    watches: Watches
    clock: Clock
    use_map: Callable[[PoolMap], None]
    """Make a newer map known to the whole shard, these modules too."""
    take_volumes: Callable[[Iterable[int], bool], None]
    forget_volumes: Callable[[frozenset[int]], None]
    quiet: Callable[[Collection[int]], Awaitable[None]]
    """Returns when nothing is under way in these partitions, which are closed, that outlives a request."""
