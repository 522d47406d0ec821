"""Rebalancing: desired holders of each chain when targets change, and the order of filling.

Pure functions from a pool map to a map of the same epoch, as in `transitions`. `with_goals` computes the
goals of all chains together. Callers use `with_goals` only when the operator adds, drains, removes or
replaces targets, or when a target was absent for so long that it is given up; so nothing else moves without a
request. `next_steps` starts a bounded number of copies at a time: chains with the fewest copies first, a
missing copy before a mere move. The map records what is done and what is left, so any leader can continue at
any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import CHAINS_PER_TABLE, format_bytes
from nvpool.poolmap.chains.placement import Placing, Spread, usable
from nvpool.poolmap.chains.transitions import ChainName, settled, with_chains, with_targets
from nvpool.poolmap.file_layout import chunk_hash
from nvpool.poolmap.model import Chain, PoolMap

JOINING_MAX = 256
"""Chains that are filled simultaneously, in the pool and (below) on one target. The bound is low enough that
each chain regains its copies soon, and high enough that a heartbeat round and a new map, about a second, is
short compared to the copying."""
JOINING_OF_TARGET_MAX = 128


def with_goals(pool_map: PoolMap) -> PoolMap:
    """Return the map with the best goals on the usable targets and the fewest chunks to move.

    A chain that already has its desired holders has no goal, nor has a chain whose holders are all lost.
    InvalidRequest: there are fewer usable targets than replicas.
    """
    goals = wanted_goals(pool_map)
    over = {target.id for target in pool_map.targets if target.is_over}
    return with_chains(
        pool_map,
        lambda name, chain: with_goal(chain, goals[name] if set(chain.targets) - over else chain.targets),
    )


def wanted_goals(pool_map: PoolMap) -> dict[ChainName, tuple[int, ...]]:
    """Return the desired holders of each chain, including lost chains; InvalidRequest as in `with_goals`."""
    goals: dict[ChainName, tuple[int, ...]] = {}
    for table in pool_map.tables:
        wanted = [chain.goal or chain.targets for chain in table.chains]
        present = [(*chain.targets, *chain.joining) for chain in table.chains]
        placing = Placing(wanted, present, pool_map.targets, pool_map.nodes, table.id)
        goals |= {(table.id, number): goal for number, goal in enumerate(placing.balance())}
    return goals


def with_goal(chain: Chain, goal: tuple[int, ...]) -> Chain:
    """Return the chain with this goal.

    Targets that were joining for another goal stop joining; targets that were leaving but are in the new goal
    stay.
    """
    goal = tuple(
        sorted(goal, key=lambda t: chain.targets.index(t) if t in chain.targets else len(chain.targets))
    )
    return settled(
        replace(
            chain,
            goal=goal,
            joining=tuple(t for t in chain.joining if t in goal),
            leaving=tuple(t for t in chain.leaving if t not in goal),
        )
    )


def next_steps(
    pool_map: PoolMap,
    *,
    joining_max: int = JOINING_MAX,
    of_target_max: int = JOINING_OF_TARGET_MAX,
    serving: frozenset[int] | None = None,
) -> PoolMap:
    """Return the map in which more chains are joined by their desired holders, within the bounds.

    The bounds are `joining_max` in the pool and `of_target_max` for each target. They do not count chains
    without a target that is up: nothing can fill these, and they would delay all others. While moving is
    paused, only chains with a missing copy are filled. Only targets that are up, and in `serving` if given,
    join or are joined.
    """
    up = {
        target.id
        for target in pool_map.targets
        if target.state == "up" and (serving is None or target.id in serving)
    }
    joining = Counter(
        target
        for table in pool_map.tables
        for chain in table.chains
        if not up.isdisjoint(chain.targets)
        for target in chain.joining
    )
    left = joining_max - joining.total()
    waiting = []
    for table in pool_map.tables:
        for number, chain in enumerate(table.chains):
            for target in chain.goal:
                if (
                    target in up
                    and target not in chain.targets
                    and target not in chain.joining
                    and any(holder in up for holder in chain.targets)
                ):
                    missing = len(chain.targets) + len(chain.joining) < len(chain.goal)
                    if missing or not pool_map.moving.paused:
                        copies = len(chain.targets) if missing else len(chain.goal) + 1
                        waiting.append((copies, chunk_hash(table.id, number), table.id, number, target))
    joins: dict[ChainName, tuple[int, ...]] = {}
    for _, _, table_id, number, target in sorted(waiting):
        if left <= 0:
            break
        if joining[target] < of_target_max:
            joins[table_id, number] = (*joins.get((table_id, number), ()), target)
            joining[target] += 1
            left -= 1
    if not joins:
        return pool_map
    return with_chains(
        pool_map,
        lambda name, chain: (
            replace(chain, joining=(*chain.joining, *joins[name])) if name in joins else chain
        ),
    )


def given_up(pool_map: PoolMap, ids: Collection[int], used_bytes: Mapping[int, int]) -> PoolMap:
    """Return the map in which the copies of long-absent targets are recreated elsewhere.

    The targets are to hold nothing until they return. Targets with another desired state are not changed.
    InvalidRequest: the remaining targets are too few or too small. `used_bytes` has the last reported value
    of each target.
    """
    away = {
        target.id
        for target in pool_map.targets
        if target.id in ids and target.state == "down" and target.desired_state == "share"
    }
    if not away:
        return pool_map
    wanted = with_targets(pool_map, away, desired_state="away")
    check_room(wanted, dict(used_bytes))
    return with_goals(wanted)


def taken_back(pool_map: PoolMap, ids: Collection[int]) -> PoolMap:
    """Give a share, as for new targets, to targets that were given up and serve again."""
    back = {target.id for target in pool_map.targets if target.id in ids and target.desired_state == "away"}
    return with_goals(with_targets(pool_map, back, desired_state="share")) if back else pool_map


class ChainCounts(NamedTuple):
    """Numbers of chains by state, over all tables, used or not."""

    chains: int
    full: int
    short: int
    """Chains with fewer copies than desired."""
    filled: int
    """Chains that are being filled, because of a missing copy or a move."""
    without: int
    """Chains without a serving target."""
    to_copy: int
    """Copies of chains that still have to be made."""


def standing(pool_map: PoolMap, serving: frozenset[int], table: int | None = None) -> ChainCounts:
    """Count the chains of the whole map, or of one table; `serving` are the targets that respond."""
    counts: Counter[str] = Counter()
    for one in pool_map.tables:
        if table is not None and one.id != table:
            continue
        for chain in one.chains:
            live = sum(target in serving for target in chain.targets)
            counts["chains"] += 1
            counts["full"] += live >= one.id
            counts["short"] += 0 < live < one.id
            counts["without"] += not live
            counts["filled"] += bool(chain.joining)
            counts["to_copy"] += sum(target not in chain.targets for target in chain.goal)
    return ChainCounts(
        counts["chains"],
        counts["full"],
        counts["short"],
        counts["filled"],
        counts["without"],
        counts["to_copy"],
    )


def missing_copies(pool_map: PoolMap) -> Counter[int]:
    """Return target -> number of incomplete chains, by the map, that lack the copy of this target."""
    missing: Counter[int] = Counter()
    for table in pool_map.tables:
        for chain in table.chains:
            if len(chain.targets) < table.id:
                missing.update(target for target in chain.goal if target not in chain.targets)
    return missing


def check_room(pool_map: PoolMap, used_bytes: dict[int, int]) -> None:
    """Verify that the stored data fits on the targets that should hold it.

    `used_bytes` has the values of the targets that responded; the chains of a silent target are assumed to
    hold the average. Each target keeps a tenth of its capacity free. The capacity is exhausted when the first
    target is full: of two nodes that both hold a copy of everything, the smaller one counts, twice.
    InvalidRequest: the data does not fit, or there are too few targets.
    """
    here = usable(pool_map.targets)
    most = max((table.id for table in pool_map.tables), default=1)
    if len(here) < most:
        raise InvalidRequest(
            f"the pool keeps {most} cop{'y' if most == 1 else 'ies'} of each chunk and {len(here)} "
            f"target{'' if len(here) == 1 else 's'} would be left; add a drive first: nvpool drive add "
            "POOL PATH"
        )
    used = sum(used_bytes.values()) + _silent_bytes(pool_map, used_bytes)
    replicas = pool_map.settings.replicas
    quota = Spread(here, pool_map.nodes, replicas).quota
    room = min(
        int(target.capacity_bytes * 0.9 * CHAINS_PER_TABLE * replicas / quota[target.id])
        for target in here
        if quota[target.id]
    )
    if used > room:
        raise InvalidRequest(
            f"{format_bytes(used)} are stored and the drives that would be left have room for "
            f"{format_bytes(room)}; add a drive first: nvpool drive add POOL PATH"
        )


def _silent_bytes(pool_map: PoolMap, used_bytes: Mapping[int, int]) -> int:
    """Estimate the bytes on targets that did not report, without those of lost targets."""
    chains = [chain for table in pool_map.tables for chain in table.chains]
    reported = sum(target in used_bytes for chain in chains for target in chain.targets)
    silent = {target.id for target in pool_map.targets if not target.is_over} - used_bytes.keys()
    unreported = sum(target in silent for chain in chains for target in chain.goal or chain.targets)
    return sum(used_bytes.values()) * unreported // reported if reported else 0
