"""Chains that nobody holds any more: what they held is given up, and they begin anew with nothing.

A chain of which all targets are over (given up by the operator) gets a new member under a new epoch, and remembers which inodes
had been born until then: of those a block that it does not have may have been lost, so who reads it gets an error, never zeros.
What is written since is there; inodes that were born later have holes as everywhere. A version of an epoch before `begun` is a
remainder of earlier days on a target that has become a member again, and counts as lost, too. So `begun` is above every epoch
that any chain of the pool has had.

Pure functions from a map to one of the same epoch, as in `transitions`. Called by node/coordination/chain_reset, which sees to
it that nobody can be served by former members any more, and that whoever gives inode numbers was asked after that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from nvpool.poolmap.chains.rebalance import wanted_goals
from nvpool.poolmap.chains.transitions import ChainName, retired
from nvpool.poolmap.model import Births, Chain, Loss, PoolMap


def ownerless(pool_map: PoolMap) -> dict[ChainName, frozenset[int]]:
    """The chains of which no target is in the pool any more, each with those that held it."""
    over = {target.id for target in pool_map.targets if target.is_over}
    return {(table.id, number): frozenset(chain.targets) for table in pool_map.tables if over
            for number, chain in enumerate(table.chains) if over.issuperset(chain.targets)}


def losing(pool_map: PoolMap) -> dict[int, frozenset[int]]:
    """Of each table the chains that have lost something; tables without such are left out."""
    found = {table.id: {number for number, chain in enumerate(table.chains) if chain.loss} for table in pool_map.tables}
    for table, number in ownerless(pool_map):
        found[table].add(number)
    return {table: frozenset(numbers) for table, numbers in found.items() if numbers}


def births_of(pool_map: PoolMap, next_counters: Mapping[int, int]) -> Loss:
    """What has been born, where shard -> the next counter that it will give."""
    return Loss(tuple(Births(part.first, part.count, next_counters[part.shard]) for part in pool_map.partitions))


def begun_anew(pool_map: PoolMap, names: Collection[ChainName], loss: Loss, serving: Collection[int]) -> PoolMap:
    """The map in which these chains, as far as nobody holds them, have one new member each, out of `serving`; the others of
    their goal join it as any copy that is missing is made. `loss` was taken when none of the old members could serve any more.
    InvalidRequest where there are fewer usable targets than replicas."""
    wanted = ownerless(pool_map).keys() & set(names)
    if not wanted:
        return pool_map
    goals = wanted_goals(pool_map)
    # Above the epochs of all chains: older builds gave a chunk's versions the epoch of another chain of its file at times.
    epoch = 1 + max(chain.epoch for table in pool_map.tables for chain in table.chains)
    up = {target.id for target in pool_map.targets if target.state == "up" and target.id in serving}
    number = len(pool_map.losses) + 1

    def decide(name: ChainName, chain: Chain) -> Chain:
        first = next((target for target in goals[name] if target in up), None) if name in wanted else None
        if first is None:
            return chain
        return Chain(epoch, (first,), goal=goals[name] if len(goals[name]) > 1 else (), intact=epoch, begun=epoch, loss=number)

    tables = tuple(replace(table, chains=tuple(decide((table.id, at), chain) for at, chain in enumerate(table.chains)))
                   for table in pool_map.tables)
    if tables == pool_map.tables:
        return pool_map
    return retired(replace(pool_map, tables=tables, losses=(*pool_map.losses, loss)))


def may_have_lost(pool_map: PoolMap, chain: Chain, inode: int) -> bool:
    """Whether a block of the inode that the chain does not have may have been lost."""
    return bool(chain.loss) and pool_map.losses[chain.loss - 1].had(inode)
