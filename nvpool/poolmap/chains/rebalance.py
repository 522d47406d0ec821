"""Who shall hold which chain when targets are added, drained, lost or replaced, and which chains are filled next.

Pure functions from a pool map to one of the same epoch, as in `transitions`. `with_goals` decides for all chains at once what
is to be reached; it is asked only when the operator changes who is there, or one is away for so long that it is given up, so
that nothing else moves by itself. `next_steps` lets a
bounded number of chains begin at a time: those with the fewest copies first, a missing copy before a mere move. What has been
done and what is left stands in the map, so that anybody can go on with it at any time.
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
from nvpool.poolmap.layout import chunk_hash
from nvpool.poolmap.model import Chain, PoolMap

JOINING_MAX = 256
"""Chains that are filled at a time, in the pool and (below) on one target: few enough that each has its copies again soon,
enough that a round of heartbeats and a map, about a second, is short beside what they copy."""
JOINING_OF_TARGET_MAX = 128


def with_goals(pool_map: PoolMap) -> PoolMap:
    """The map in which every chain's goal is what the usable targets can hold best, with the fewest chunks to be moved. Chains
    that are where they shall be have no goal, nor have those that only lost targets hold. InvalidRequest when there are fewer
    usable targets than replicas."""
    goals = wanted_goals(pool_map)
    over = {target.id for target in pool_map.targets if target.is_over}
    return with_chains(pool_map, lambda name, chain: with_goal(chain, goals[name] if set(chain.targets) - over
                                                               else chain.targets))


def wanted_goals(pool_map: PoolMap) -> dict[ChainName, tuple[int, ...]]:
    """Who shall hold each chain, also those that nobody holds any more. InvalidRequest as `with_goals`."""
    goals: dict[ChainName, tuple[int, ...]] = {}
    for table in pool_map.tables:
        wanted = [chain.goal or chain.targets for chain in table.chains]
        present = [(*chain.targets, *chain.joining) for chain in table.chains]
        placing = Placing(wanted, present, pool_map.targets, pool_map.nodes, table.id)
        goals |= {(table.id, number): goal for number, goal in enumerate(placing.balance())}
    return goals


def with_goal(chain: Chain, goal: tuple[int, ...]) -> Chain:
    """The chain with this goal: who joined for another one does not any more, who was leaving and is wanted stays."""
    goal = tuple(sorted(goal, key=lambda t: chain.targets.index(t) if t in chain.targets else len(chain.targets)))
    return settled(replace(chain, goal=goal, joining=tuple(t for t in chain.joining if t in goal),
                           leaving=tuple(t for t in chain.leaving if t not in goal)))


def next_steps(pool_map: PoolMap, *, joining_max: int = JOINING_MAX, of_target_max: int = JOINING_OF_TARGET_MAX,
               serving: frozenset[int] | None = None) -> PoolMap:
    """The map in which more chains are joined by who shall hold them, as far as the bounds go: at most `joining_max` in the
    pool, and of each target at most `of_target_max`, not counting those that nobody who is up could fill: else they would keep
    all others waiting. While moving is paused, only chains that want for a copy. Only targets that are up, and among `serving`
    where that is known, join or are joined."""
    up = {target.id for target in pool_map.targets if target.state == "up" and (serving is None or target.id in serving)}
    joining = Counter(target for table in pool_map.tables for chain in table.chains if not up.isdisjoint(chain.targets)
                      for target in chain.joining)
    left = joining_max - joining.total()
    waiting = []
    for table in pool_map.tables:
        for number, chain in enumerate(table.chains):
            for target in chain.goal:
                if target in up and target not in chain.targets and target not in chain.joining \
                        and any(holder in up for holder in chain.targets):
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
    return with_chains(pool_map, lambda name, chain: replace(chain, joining=(*chain.joining, *joins[name])) if name in joins
                       else chain)


def given_up(pool_map: PoolMap, ids: Collection[int], used_bytes: Mapping[int, int]) -> PoolMap:
    """The map in which others make again what these targets held, which have been down for long: until they return they are to
    hold nothing. Those of which the operator wishes something are left as they are. InvalidRequest where the others are too
    few, or have no room (`used_bytes` of all that have ever said it)."""
    away = {target.id for target in pool_map.targets if target.id in ids and target.state == "down" and target.wish == "share"}
    if not away:
        return pool_map
    wanted = with_targets(pool_map, away, wish="away")
    check_room(wanted, dict(used_bytes))
    return with_goals(wanted)


def taken_back(pool_map: PoolMap, ids: Collection[int]) -> PoolMap:
    """The map in which these targets, which were given up and serve again, get their share as new ones do."""
    back = {target.id for target in pool_map.targets if target.id in ids and target.wish == "away"}
    return with_goals(with_targets(pool_map, back, wish="share")) if back else pool_map


class Standing(NamedTuple):
    """How a pool's chains are, counted over all tables that are in use or not."""

    chains: int
    full: int
    short: int
    """Chains with fewer copies than they shall have."""
    filled: int
    """Chains that are being filled, for a missing copy or to be moved."""
    without: int
    """Chains of which no target serves."""
    to_copy: int
    """Copies of chains that are still to be made."""


def standing(pool_map: PoolMap, serving: frozenset[int], table: int | None = None) -> Standing:
    """Of the whole map, or of one table; `serving` are the targets that answer."""
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
    return Standing(counts["chains"], counts["full"], counts["short"], counts["filled"], counts["without"], counts["to_copy"])


def missing_copies(pool_map: PoolMap) -> Counter[int]:
    """Target -> chains that have fewer copies than they shall, by the map, and lack the one of this target."""
    missing: Counter[int] = Counter()
    for table in pool_map.tables:
        for chain in table.chains:
            if len(chain.targets) < table.id:
                missing.update(target for target in chain.goal if target not in chain.targets)
    return missing


def check_room(pool_map: PoolMap, used_bytes: dict[int, int]) -> None:
    """InvalidRequest when what is stored has no room on the targets that shall hold it, or these are too few. `used_bytes` of
    the targets that answered: of a silent one it is taken that its chains hold as much as theirs on average. Each target keeps
    a tenth of its capacity free. There is room until the first of them is full: of two nodes that have a copy of everything the
    smaller one counts, twice."""
    here = usable(pool_map.targets)
    most = max((table.id for table in pool_map.tables), default=1)
    if len(here) < most:
        raise InvalidRequest(f"the pool keeps {most} cop{'y' if most == 1 else 'ies'} of each chunk and {len(here)} "
                             f"target{'' if len(here) == 1 else 's'} would be left; add a drive first: nvpool drive add "
                                 "POOL PATH")
    used = sum(used_bytes.values()) + _silent_bytes(pool_map, used_bytes)
    replicas = pool_map.settings.replicas
    quota = Spread(here, pool_map.nodes, replicas).quota
    room = min(int(target.capacity_bytes * 0.9 * CHAINS_PER_TABLE * replicas / quota[target.id])
               for target in here if quota[target.id])
    if used > room:
        raise InvalidRequest(f"{format_bytes(used)} are stored and the drives that would be left have room for "
                             f"{format_bytes(room)}; add a drive first: nvpool drive add POOL PATH")


def _silent_bytes(pool_map: PoolMap, used_bytes: Mapping[int, int]) -> int:
    """What targets are to hold that did not say it; nothing of those that are lost."""
    chains = [chain for table in pool_map.tables for chain in table.chains]
    told = sum(target in used_bytes for chain in chains for target in chain.targets)
    silent = {target.id for target in pool_map.targets if not target.is_over} - used_bytes.keys()
    untold = sum(target in silent for chain in chains for target in chain.goal or chain.targets)
    return sum(used_bytes.values()) * untold // told if told else 0
