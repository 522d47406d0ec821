"""Shard context: the parts of a shard that a migration uses. Made by `meta/server/service`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple

from nvpool.core.clock import Clock
from nvpool.kv.api import Kv
from nvpool.meta.gc.collector import Collector
from nvpool.meta.gc.truncations import Truncations
from nvpool.meta.migration.ownership import PartitionOwnership
from nvpool.meta.sessions.lease_table import LeaseTable
from nvpool.meta.sessions.lock_service import LockService
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.state.append_reservations import AppendOrder
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.transaction import View
from nvpool.poolmap.model import PoolMap


class ShardContext(NamedTuple):
    """Parts of a shard, by name."""

    shard: int
    kv: Kv
    view: View
    ranges: PartitionOwnership
    numbers: Numbers
    sessions: Sessions
    locks: LockService
    appends: AppendOrder
    collector: Collector
    cuts: Truncations
    watches: LeaseTable
    clock: Clock
    use_map: Callable[[PoolMap], None]
    """Make a newer map known to the whole shard, including the migration modules."""
    take_volumes: Callable[[Iterable[int], bool], None]
    forget_volumes: Callable[[frozenset[int]], None]
    quiet: Callable[[Collection[int]], Awaitable[None]]
    """Returns when no work that outlives a request is in progress in these closed partitions."""
