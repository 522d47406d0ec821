"""Chain tables: one for each replica count that directories of the pool hand down.

A pool begins with that of its own count; another one is made when a directory is first to have it. Pure functions, as in
`rebalance`.
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
    """InvalidRequest, with the remedy, where the pool can not keep so many copies in failure domains of their own: nodes, or
    the drives of a pool on one node."""
    if not 1 <= replicas <= REPLICAS_MAX:
        raise InvalidRequest(f"1 to {REPLICAS_MAX} replicas can be kept of a file, not {replicas}")
    here = usable(pool_map.targets)
    if len(here) < replicas:
        raise InvalidRequest(f"{replicas} replicas need as many drives, and the pool has {len(here)} that can be used; first: "
                             f"nvpool drive add POOL PATH")
    nodes = len({target.node for target in here})
    if 1 < nodes < replicas:
        raise InvalidRequest(f"{replicas} replicas need as many nodes with drives, and the pool has {nodes}; let one "
                             f"join with drives first: nvpool node token POOL")


def with_table(pool_map: PoolMap, replicas: int, answering: Collection[int]) -> PoolMap:
    """The map with a chain table for `replicas`; the same where it has one. Each chain begins with one target that answers,
    where there is one; the others join it as any target does that is new, although there is nothing to copy: so none is read
    before each knows that it needs a lease. InvalidRequest as check_replicas."""
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
