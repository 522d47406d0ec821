"""Reset of lost chains: gives up the data of a chain without holders, and starts the chain empty.

A chain is lost when the operator has given up all of its targets. The chain gets a new member under a new
epoch, and records which inodes existed at that time. For such an inode, a block that the chain does not have
may have been lost, so a read returns an error and never zeros. Blocks written after the reset are readable,
and inodes created later have holes as usual. A version with an epoch before `begun` is a leftover on a target
that has become a member again, and also counts as lost. Therefore `begun` is above every epoch that any chain
of the pool has had.

Pure functions from a map to a map of the same epoch, as in `transitions`. Called by
node/coordination/chain_reset. The caller first ensures that former members can serve nobody, and only then
queries the shards, which issue inode numbers, for their counters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from nvpool.poolmap.chains.rebalance import wanted_goals
from nvpool.poolmap.chains.transitions import ChainName, retired
from nvpool.poolmap.model import Births, Chain, Loss, PoolMap


def ownerless(pool_map: PoolMap) -> dict[ChainName, frozenset[int]]:
    """Return the chains without any target in the pool, each with its former holders."""
    over = {target.id for target in pool_map.targets if target.is_over}
    return {
        (table.id, number): frozenset(chain.targets)
        for table in pool_map.tables
        if over
        for number, chain in enumerate(table.chains)
        if over.issuperset(chain.targets)
    }


def losing(pool_map: PoolMap) -> dict[int, frozenset[int]]:
    """Return the chains of each table that have lost data, including those not reset yet.

    Other tables are absent.
    """
    found = {
        table.id: {number for number, chain in enumerate(table.chains) if chain.loss}
        for table in pool_map.tables
    }
    for table, number in ownerless(pool_map):
        found[table].add(number)
    return {table: frozenset(numbers) for table, numbers in found.items() if numbers}


def births_of(pool_map: PoolMap, next_counters: Mapping[int, int]) -> Loss:
    """Return which inodes exist.

    `next_counters` maps a shard to the next inode counter that it will issue.
    """
    return Loss(
        tuple(Births(part.first, part.count, next_counters[part.shard]) for part in pool_map.partitions)
    )


def with_reset_chains(
    pool_map: PoolMap, names: Collection[ChainName], loss: Loss, serving: Collection[int]
) -> PoolMap:
    """Return the map in which the lost chains among `names` are reset.

    Each gets one new member out of `serving`; the other targets of its goal join as for any missing copy.
    `loss` was recorded after the former members had stopped serving. InvalidRequest: there are fewer usable
    targets than replicas.
    """
    wanted = ownerless(pool_map).keys() & set(names)
    if not wanted:
        return pool_map
    goals = wanted_goals(pool_map)
    # Above the epochs of all chains: older builds sometimes gave a version the epoch of another chain of the
    # file.
    epoch = 1 + max(chain.epoch for table in pool_map.tables for chain in table.chains)
    up = {target.id for target in pool_map.targets if target.state == "up" and target.id in serving}
    number = len(pool_map.losses) + 1

    def decide(name: ChainName, chain: Chain) -> Chain:
        first = next((target for target in goals[name] if target in up), None) if name in wanted else None
        if first is None:
            return chain
        return Chain(
            epoch,
            (first,),
            goal=goals[name] if len(goals[name]) > 1 else (),
            intact=epoch,
            begun=epoch,
            loss=number,
        )

    tables = tuple(
        replace(table, chains=tuple(decide((table.id, at), chain) for at, chain in enumerate(table.chains)))
        for table in pool_map.tables
    )
    if tables == pool_map.tables:
        return pool_map
    return retired(replace(pool_map, tables=tables, losses=(*pool_map.losses, loss)))


def may_have_lost(pool_map: PoolMap, chain: Chain, inode: int) -> bool:
    """Return whether a block of the inode that is absent from the chain may have been lost."""
    return bool(chain.loss) and pool_map.losses[chain.loss - 1].had(inode)
