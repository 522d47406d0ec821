"""Chain transitions: changes of the pool map when targets fail, return, catch up, join or leave.

The guarantees, for any order of events: A chain never loses its last target. A target becomes one of
`targets` only from `joining`, and only after it reported that it holds what the tail holds at the current
epoch of the chain. Remaining targets keep their order, so of two targets the first has every write that the
second has. The epoch of a chain grows with each change of its members. Together: two targets with different
contents can never each become the only target of the same chain.

Each function returns a map of the same epoch with the changes, or the same object if nothing changed.
`sealed` turns all changes of a batch into one map with the next epoch. Called by cluster/chain_manager, which
decides when; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.model import Chain, PoolMap, Target, check_map
from nvpool.poolmap.shards.placement import beside

ChainName = tuple[int, int]
"""(table, number of the chain in the table)."""


def sealed(now: PoolMap, new: PoolMap) -> PoolMap | None:
    """Return `new` as the successor of `now`, or None if they are equal; InvalidRequest if `new` is
    inconsistent."""
    if new is now or replace(new, epoch=now.epoch) == now:
        return None
    new = replace(new, epoch=now.epoch + 1)
    if problems := check_map(new):
        raise InvalidRequest("; ".join(problems))
    return new


def with_chains(pool_map: PoolMap, decide: Callable[[ChainName, Chain], Chain]) -> PoolMap:
    """Replace each chain by the result of `decide`.

    A chain with changed targets, joining or leaving gets the next epoch.
    """
    tables, any_changed = [], False
    for table in pool_map.tables:
        chains = []
        for number, chain in enumerate(table.chains):
            new = decide((table.id, number), chain)
            if new is not chain and new != chain:
                any_changed = True
                same = (new.targets, new.joining, new.leaving) == (
                    chain.targets,
                    chain.joining,
                    chain.leaving,
                )
                new = replace(new, epoch=chain.epoch if same else chain.epoch + 1)
            chains.append(new)
        tables.append(replace(table, chains=tuple(chains)))
    return replace(pool_map, tables=tuple(tables)) if any_changed else pool_map


def with_targets(pool_map: PoolMap, ids: Collection[int], **fields: Any) -> PoolMap:
    """Replace `fields` of these targets, except of those that are gone."""
    targets = tuple(
        replace(target, **fields) if target.id in ids and target.state != "gone" else target
        for target in pool_map.targets
    )
    return pool_map if targets == pool_map.targets else replace(pool_map, targets=targets)


def _without(members: tuple[int, ...], who: Collection[int]) -> tuple[int, ...]:
    return tuple(member for member in members if member not in who)


def shared(pool_map: PoolMap) -> frozenset[int]:
    """Return the targets that need a serving lease: those that share a chain, or hold one that a target
    joins."""
    return frozenset(
        target
        for table in pool_map.tables
        for chain in table.chains
        if len(chain.targets) > 1 or chain.joining
        for target in (*chain.targets, *chain.joining)
    )


# -- failures and returns ---------------------------------------------------------------------------------


def died(pool_map: PoolMap, ids: Collection[int]) -> PoolMap:
    """Remove failed targets: each leaves the chains that have another serving target.

    All targets of `ids` fail at the same time. If all targets of a chain have failed, the tail stays alone,
    because it has committed everything that any target has committed; the others join it when they return. A
    target that leaves no chain stays `up`: no other target could replace it, so the map does not change.
    """
    left: set[int] = set()

    def decide(_: ChainName, chain: Chain) -> Chain:
        members = (*chain.targets, *chain.joining)
        dead = [member for member in members if member in ids]
        if not dead or len(members) == 1:
            return chain
        targets = _without(chain.targets, ids) or chain.targets[-1:]
        joining = _without(chain.joining, ids)
        left.update(member for member in dead if member not in targets)
        leaving = tuple(target for target in chain.leaving if target in targets)
        return settled(
            replace(
                chain,
                targets=targets,
                joining=joining,
                goal=chain.goal or chain.targets,
                leaving=() if len(leaving) == len(targets) else leaving,
            )
        )

    return with_targets(with_chains(pool_map, decide), left, state="down")


def restarted(pool_map: PoolMap, target: int) -> PoolMap:
    """Return the map for a restarted target process.

    The target has left its shared chains, and each chain that it still holds has the next epoch. So a version
    that the target issued and forgot in a power loss is never confused with a version that it issues from now
    on. The map must be published before the target serves.
    """
    pool_map = died(pool_map, {target})
    return replace(
        pool_map,
        tables=tuple(
            replace(
                table,
                chains=tuple(
                    replace(chain, epoch=chain.epoch + 1)
                    if target in (*chain.targets, *chain.joining)
                    else chain
                    for chain in table.chains
                ),
            )
            for table in pool_map.tables
        ),
    )


def vouched(pool_map: PoolMap, target: int, verifier: int) -> PoolMap:
    """Record the write verifier of a restarted target.

    If the verifier has changed, the chains that the target still holds may have lost unstable writes; chains
    that other targets continued have not. The map must be published before the target answers requests.
    """
    known = pool_map.target_by_id.get(target)
    if known is None or known.verifier == verifier:
        return pool_map
    pool_map = with_targets(pool_map, {target}, verifier=verifier)
    if not known.verifier:  # the target has never answered a request
        return pool_map
    return with_chains(
        pool_map, lambda _, chain: replace(chain, intact=chain.epoch) if target in chain.targets else chain
    )


def begun(pool_map: PoolMap) -> PoolMap:
    """Return the map for a start of all targets after a clean stop with equal, durable data.

    No target leaves; each chain gets the next epoch.
    """
    return replace(
        pool_map,
        tables=tuple(
            replace(table, chains=tuple(replace(chain, epoch=chain.epoch + 1) for chain in table.chains))
            for table in pool_map.tables
        ),
    )


def returned(pool_map: PoolMap, ids: Collection[int]) -> PoolMap:
    """Mark targets as serving again; they join the chains that lack their copy.

    Chains with all copies, which these targets are to take over from others, are left to
    `rebalance.next_steps`.
    """
    back = {
        target.id
        for target in pool_map.targets
        if target.id in ids and target.state == "down" and target.desired_state != "lost"
    }
    if not back:
        return pool_map
    pool_map = with_targets(pool_map, back, state="up")

    def decide(_: ChainName, chain: Chain) -> Chain:
        missing = len(chain.goal) - len(chain.targets) - len(chain.joining)
        joins = [
            target
            for target in chain.goal
            if target in back and target not in chain.targets and target not in chain.joining
        ]
        return replace(chain, joining=(*chain.joining, *joins[:missing])) if joins and missing > 0 else chain

    return with_chains(pool_map, decide)


# -- catching up and leaving -----------------------------------------------------------------------------------------------


def joined(pool_map: PoolMap, target: int, equal: Iterable[tuple[int, int, int]]) -> PoolMap:
    """Make a target a full member of the chains of which it durably holds what the tail holds.

    `equal` lists (table, number, epoch of the chain at that time). A report for an older epoch is ignored:
    the members have changed since. Members that joined before the target would then stand after it: they
    leave, and join again as new ones. When all of the goal are targets, the targets outside of the goal begin
    to leave.
    """
    reported = {(table, number): epoch for table, number, epoch in equal}
    up = pool_map.target_by_id.get(target)
    if up is None or up.state != "up":
        return pool_map

    def decide(name: ChainName, chain: Chain) -> Chain:
        if reported.get(name) != chain.epoch or target not in chain.joining:
            return chain
        behind = chain.joining[chain.joining.index(target) + 1 :]
        return settled(replace(chain, targets=(*chain.targets, target), joining=behind))

    return with_chains(pool_map, decide)


def settled(chain: Chain) -> Chain:
    """Let targets outside of a complete goal leave; clear the goal when it is reached."""
    if not chain.goal or not set(chain.goal) <= set(chain.targets):
        return chain
    leaving = _without(chain.targets, chain.goal)
    return replace(chain, leaving=leaving, joining=(), goal=chain.goal if leaving else ())


def departed(pool_map: PoolMap, left: Callable[[ChainName, int], bool]) -> PoolMap:
    """Remove leaving targets that know that they are not read from any more, as `left` confirms."""

    def decide(name: ChainName, chain: Chain) -> Chain:
        gone = [target for target in chain.leaving if left(name, target)]
        if not gone:
            return chain
        return settled(
            replace(chain, targets=_without(chain.targets, gone), leaving=_without(chain.leaving, gone))
        )

    return with_chains(pool_map, decide)


# -- desired states ---------------------------------------------------------------------------------------


def with_desired_state(pool_map: PoolMap, target: int, desired_state: str) -> PoolMap:
    """Set the desired state of a target; the caller then recomputes the goals.

    A lost target leaves its chains when it has failed or is silent: it gets no lease any more.
    """
    return with_targets(pool_map, {target}, desired_state=desired_state)


def named(pool_map: PoolMap) -> frozenset[int]:
    """Return the targets that hold a chain, join one, or should hold one."""
    return frozenset(
        target
        for table in pool_map.tables
        for chain in table.chains
        for target in (*chain.targets, *chain.joining, *chain.goal)
    )


def retired(pool_map: PoolMap) -> PoolMap:
    """Retire targets that should leave the pool and that no chain refers to.

    A target with metadata beside it stays until the metadata is gone, unless its drive is lost.
    """
    wanted = {
        target.id
        for target in pool_map.targets
        if target.state != "gone"
        and (
            target.desired_state == "lost"
            or (target.desired_state == "remove" and not beside(pool_map, target.drive))
        )
    }
    return with_targets(pool_map, wanted - named(pool_map), state="gone") if wanted else pool_map


def only_copies(pool_map: PoolMap, target: int, table: int = 0) -> int:
    """Return the number of chains, in one table or in all, that only this target holds completely."""
    return sum(
        chain.targets == (target,) for one in pool_map.tables if table in (0, one.id) for chain in one.chains
    )


def remaining(pool_map: PoolMap) -> list[Target]:
    """Return the targets that are in the pool."""
    return [target for target in pool_map.targets if target.state != "gone"]
