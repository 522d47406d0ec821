"""What happens to chains when targets die, return, catch up, come and go: functions from a pool map to the next one.

Guarantees, for any order of events: a chain never loses its last target; a target becomes one of `targets` only from `joining`,
and only when it reported that it holds what the tail holds at the chain's epoch of this moment; those that stay keep their
order, so of two of them the first has every write that the second has; epochs of chains grow with each change of who takes
part. So no two targets ever become the only one of a chain with different contents.

Each function returns a map of the same epoch, with what changed (the same object where nothing did); `sealed` makes of all the
changes of a batch one map with the next epoch. Called by cluster/manager, which says when; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.model import Chain, PoolMap, Target, check_map
from nvpool.poolmap.shards.placement import beside

ChainName = tuple[int, int]
"""Table, number of the chain in it."""


def sealed(now: PoolMap, new: PoolMap) -> PoolMap | None:
    """`new` as the map that follows `now`, or None when they say the same. InvalidRequest when it contradicts itself."""
    if new is now or replace(new, epoch=now.epoch) == now:
        return None
    new = replace(new, epoch=now.epoch + 1)
    if problems := check_map(new):
        raise InvalidRequest("; ".join(problems))
    return new


def with_chains(pool_map: PoolMap, decide: Callable[[ChainName, Chain], Chain]) -> PoolMap:
    """Each chain replaced by what is decided of it; one whose targets, joining or leaving have changed gets the next epoch."""
    tables, any_changed = [], False
    for table in pool_map.tables:
        chains = []
        for number, chain in enumerate(table.chains):
            new = decide((table.id, number), chain)
            if new is not chain and new != chain:
                any_changed = True
                same = (new.targets, new.joining, new.leaving) == (chain.targets, chain.joining, chain.leaving)
                new = replace(new, epoch=chain.epoch if same else chain.epoch + 1)
            chains.append(new)
        tables.append(replace(table, chains=tuple(chains)))
    return replace(pool_map, tables=tuple(tables)) if any_changed else pool_map


def with_targets(pool_map: PoolMap, ids: Collection[int], **fields: Any) -> PoolMap:
    """`fields` of these targets replaced; of those that are gone nothing."""
    targets = tuple(replace(target, **fields) if target.id in ids and target.state != "gone" else target
                    for target in pool_map.targets)
    return pool_map if targets == pool_map.targets else replace(pool_map, targets=targets)


def _without(members: tuple[int, ...], who: Collection[int]) -> tuple[int, ...]:
    return tuple(member for member in members if member not in who)


def shared(pool_map: PoolMap) -> frozenset[int]:
    """Targets that hold a chain with others, or hold one that somebody joins: those that serve under a lease."""
    return frozenset(target for table in pool_map.tables for chain in table.chains
                     if len(chain.targets) > 1 or chain.joining for target in (*chain.targets, *chain.joining))


# -- deaths and returns ----------------------------------------------------------------------------------------------------


def died(pool_map: PoolMap, ids: Collection[int]) -> PoolMap:
    """These targets do not serve any more, all at this moment: each leaves the chains that have another target that does.

    Where all of a chain's have died the tail stays alone, which committed all that anybody has committed; the others join it
    when they return. A target that leaves no chain stays `up`: nobody could take its place, so nobody has to know.
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
        return settled(replace(chain, targets=targets, joining=joining, goal=chain.goal or chain.targets,
                               leaving=() if len(leaving) == len(targets) else leaving))

    return with_targets(with_chains(pool_map, decide), left, state="down")


def restarted(pool_map: PoolMap, target: int) -> PoolMap:
    """Target's process is started anew: it has left what others hold too, and each chain that is still its own has the next
    epoch. What it gave versions to and forgot with a loss of power is never mistaken for what it gives them to from now on. To
    be published before it serves."""
    pool_map = died(pool_map, {target})
    return replace(pool_map, tables=tuple(replace(table, chains=tuple(
        replace(chain, epoch=chain.epoch + 1) if target in (*chain.targets, *chain.joining) else chain
        for chain in table.chains)) for table in pool_map.tables))


def vouched(pool_map: PoolMap, target: int, verifier: int) -> PoolMap:
    """Target, started anew, has this verifier. Where it had another one, the chains that it still holds may have lost what was
    not flushed; those that others went on with have not. To be published before it answers anybody."""
    known = pool_map.target_by_id.get(target)
    if known is None or known.verifier == verifier:
        return pool_map
    pool_map = with_targets(pool_map, {target}, verifier=verifier)
    if not known.verifier:  # nobody was ever answered
        return pool_map
    return with_chains(pool_map, lambda _, chain: replace(chain, intact=chain.epoch) if target in chain.targets else chain)


def begun(pool_map: PoolMap) -> PoolMap:
    """All targets are started after they have ended in order, equal and with everything durable: nobody leaves, each chain has
    the next epoch."""
    return replace(pool_map, tables=tuple(replace(table, chains=tuple(replace(chain, epoch=chain.epoch + 1)
                                                                      for chain in table.chains)) for table in pool_map.tables))


def returned(pool_map: PoolMap, ids: Collection[int]) -> PoolMap:
    """These targets serve again: they join the chains that want for them. Chains with all their copies, which they are to take
    over from others, are left to `rebalance.next_steps`."""
    back = {target.id for target in pool_map.targets if target.id in ids and target.state == "down"
            and target.wish != "lost"}
    if not back:
        return pool_map
    pool_map = with_targets(pool_map, back, state="up")

    def decide(_: ChainName, chain: Chain) -> Chain:
        missing = len(chain.goal) - len(chain.targets) - len(chain.joining)
        joins = [target for target in chain.goal if target in back and target not in chain.targets
                 and target not in chain.joining]
        return replace(chain, joining=(*chain.joining, *joins[:missing])) if joins and missing > 0 else chain

    return with_chains(pool_map, decide)


# -- catching up and leaving -----------------------------------------------------------------------------------------------


def joined(pool_map: PoolMap, target: int, equal: Iterable[tuple[int, int, int]]) -> PoolMap:
    """Target holds what the tail holds of these chains (table, number, epoch of the chain when that was so), durably. Those of
    an older epoch say nothing: somebody came or went since. Who joins before the target in the chain would stand behind it
    then: it leaves, and joins again as one that is new. Where all of the goal is there, who is not of it begins to leave.
    """
    reported = {(table, number): epoch for table, number, epoch in equal}
    up = pool_map.target_by_id.get(target)
    if up is None or up.state != "up":
        return pool_map

    def decide(name: ChainName, chain: Chain) -> Chain:
        if reported.get(name) != chain.epoch or target not in chain.joining:
            return chain
        behind = chain.joining[chain.joining.index(target) + 1:]
        return settled(replace(chain, targets=(*chain.targets, target), joining=behind))

    return with_chains(pool_map, decide)


def settled(chain: Chain) -> Chain:
    """The chain, with those leaving that its goal does not need any more; without a goal when that is reached."""
    if not chain.goal or not set(chain.goal) <= set(chain.targets):
        return chain
    leaving = _without(chain.targets, chain.goal)
    return replace(chain, leaving=leaving, joining=(), goal=chain.goal if leaving else ())


def departed(pool_map: PoolMap, left: Callable[[ChainName, int], bool]) -> PoolMap:
    """Who is leaving has left: of a chain those that `left` says know that they are not read from any more."""
    def decide(name: ChainName, chain: Chain) -> Chain:
        gone = [target for target in chain.leaving if left(name, target)]
        if not gone:
            return chain
        return settled(replace(chain, targets=_without(chain.targets, gone), leaving=_without(chain.leaving, gone)))

    return with_chains(pool_map, decide)


# -- the operator's wishes -------------------------------------------------------------------------------------------------


def wished(pool_map: PoolMap, target: int, wish: str) -> PoolMap:
    """Target with this wish. Goals are to be made anew. A lost one leaves its chains when it has died, or is silent: it gets no
    lease any more."""
    return with_targets(pool_map, {target}, wish=wish)


def named(pool_map: PoolMap) -> frozenset[int]:
    """Targets that hold a chain, join one, or shall."""
    return frozenset(target for table in pool_map.tables for chain in table.chains
                     for target in (*chain.targets, *chain.joining, *chain.goal))


def retired(pool_map: PoolMap) -> PoolMap:
    """Targets that are to leave the pool and that no chain names are gone; not while metadata lies beside them that can still
    be read, as one does of a drive that is not lost."""
    wanted = {target.id for target in pool_map.targets if target.state != "gone" and (
        target.wish == "lost" or (target.wish == "remove" and not beside(pool_map, target.drive)))}
    return with_targets(pool_map, wanted - named(pool_map), state="gone") if wanted else pool_map


def only_copies(pool_map: PoolMap, target: int, table: int = 0) -> int:
    """Chains, of one table or of all, of which no other target than this one holds every byte."""
    return sum(chain.targets == (target,) for one in pool_map.tables if table in (0, one.id) for chain in one.chains)


def remaining(pool_map: PoolMap) -> list[Target]:
    """Targets that are in the pool."""
    return [target for target in pool_map.targets if target.state != "gone"]
