"""Parts of a shard's service: what its request handlers share.

`ShardParts` is made by `meta/server/service` when the service starts, and again after a load. `ServiceStatus`
lives as long as the service.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nvpool.core.clock import Clock
from nvpool.kv.api import Kv
from nvpool.meta.admin_jobs import AdminJobs
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.gc.collector import Collector
from nvpool.meta.gc.truncations import Truncations
from nvpool.meta.migration.ownership import PartitionOwnership
from nvpool.meta.options import MetaOptions
from nvpool.meta.requests.local_user_permissions import LocalUsers
from nvpool.meta.sessions.lease_table import LeaseTable
from nvpool.meta.sessions.lock_service import LockService
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.snapshot_barrier import SnapshotBarrier
from nvpool.meta.state.append_reservations import AppendOrder
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.quota import QuotaLedger
from nvpool.meta.state.transaction import View
from nvpool.meta.store_client import Targets
from nvpool.meta.transactions.service import CrossShardTransactions
from nvpool.meta.volumes.right_revocation import Revocations
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.access_control import Callers


@dataclass(slots=True)
class ServiceStatus:
    """State of the service, its pool map and its request counters."""

    state: str = "starting"
    """starting, loading, serving, draining or fenced."""
    reason: str = ""
    """Reason why an operator must look at this service although it serves."""
    incarnation: int = 0
    """0 until the service has started."""
    pool_map: PoolMap | None = None
    counters: dict[str, float] = field(
        default_factory=lambda: {"requests": 0, "changes": 0, "repeated": 0, "refused": 0}
    )

    def map_epoch(self) -> int:
        """Epoch of the pool map; 0 without one."""
        return self.pool_map.epoch if self.pool_map is not None else 0


@dataclass(frozen=True, slots=True)
class ShardParts:
    """Parts of a shard, by name."""

    shard: int
    secret: bytes
    options: MetaOptions
    clock: Clock
    callers: Callers
    status: ServiceStatus
    kv: Kv
    sessions: Sessions
    users: LocalUsers
    numbers: Numbers
    runs: AdminJobs
    targets: Targets
    waits: DeferredReplies
    revocations: Revocations
    # from here on: made again after a load
    view: View
    rooms: QuotaLedger
    appends: AppendOrder
    locks: LockService
    cuts: Truncations
    collector: Collector
    watches: LeaseTable
    ranges: PartitionOwnership
    cross_shard: CrossShardTransactions
    moment: SnapshotBarrier
