"""Chain tables: one for each replica count that directories of the pool use.

A pool starts with the table of its own replica count. Another table is created when a directory first gets
another count. Pure functions, as in `rebalance`.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.chains.placement import Placing, usable
from nvpool.poolmap.model import Chain, ChainTable, PoolMap

REPLICAS_MAX = 3


def check_replicas(pool_map: PoolMap, replicas: int) -> None:
    """Verify that the pool can store this many copies in separate failure domains.

    Failure domains are nodes, or the drives of a pool on one node. InvalidRequest: there are too few; the
    text has the remedy.
    """
    if not 1 <= replicas <= REPLICAS_MAX:
        raise InvalidRequest(f"1 to {REPLICAS_MAX} replicas can be kept of a file, not {replicas}")
    here = usable(pool_map.targets)
    if len(here) < replicas:
        raise InvalidRequest(
            f"{replicas} replicas need as many drives, and the pool has {len(here)} that can be used; first: "
            f"nvpool drive add POOL PATH"
        )
    nodes = len({target.node for target in here})
    if 1 < nodes < replicas:
        raise InvalidRequest(
            f"{replicas} replicas need as many nodes with drives, and the pool has {nodes}; let one "
            f"join with drives first: nvpool node token POOL"
        )


def with_table(pool_map: PoolMap, replicas: int, answering: Collection[int]) -> PoolMap:
    """Return the map with a chain table for `replicas`; the same map if it has one.

    Each chain starts with one responding target, if there is one. The others join as any new target does,
    although there is nothing to copy: so a target is read only after it knows that it needs a serving lease.
    InvalidRequest as in `check_replicas`.
    """
    if replicas in pool_map.table_by_id:
        return pool_map
    check_replicas(pool_map, replicas)
    none: list[tuple[int, ...]] = [()] * CHAINS_PER_TABLE
    up = {target.id for target in pool_map.targets if target.state == "up" and target.id in answering}
    chains = []
    for goal in Placing(none, none, pool_map.targets, pool_map.nodes, replicas).balance():
        first = next((target for target in goal if target in up), goal[0])
        others = tuple(target for target in goal if target != first)
        joining = tuple(target for target in others if target in up)
        chains.append(Chain(1, (first,), joining, (first, *others) if others else ()))
    tables = sorted((*pool_map.tables, ChainTable(replicas, tuple(chains))), key=lambda table: table.id)
    return replace(pool_map, tables=tuple(tables))
