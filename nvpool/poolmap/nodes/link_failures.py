"""Broken network links between nodes that both reach the leader: selects the targets that leave their chains.

One of the two nodes must give way. Its targets leave their chains as silent targets do, after their leases
have ended, and join again when the link works. Pure functions, called by cluster/chain_manager; no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from nvpool.poolmap.model import PoolMap

BROKEN = "its node and another one do not reach each other"
"""Reason that is reported to a target that gives way, for its status."""


def cut_off(
    pool_map: PoolMap, reports: Mapping[int, Collection[int]], before: Collection[int]
) -> frozenset[int]:
    """Return the targets that give way: for each broken link, those of one node.

    `reports` maps a target to the targets that it cannot reach. `before` is the previous result, so that the
    same targets stay excluded while the link is broken. Of two nodes, the node with more broken links gives
    way, because it is the likely cause. Next criteria: the node that is reported more often, then the node
    with the higher number.
    """
    node_of = {target.id: target.node for target in pool_map.targets if not target.is_over}
    broken = [
        (reporter, other)
        for reporter, others in reports.items()
        for other in others
        if reporter in node_of and other in node_of and node_of[reporter] != node_of[other]
    ]
    links = {frozenset((node_of[reporter], node_of[other])) for reporter, other in broken}
    reported = Counter(node_of[other] for _, other in broken)
    giving_way = []
    kept = {node_of[target] for target in before if target in node_of}
    while links:
        count = Counter(node for link in links for node in link)
        node = max(count, key=lambda node: (node in kept, count[node], reported[node], node))
        giving_way.append(node)
        links = {link for link in links if node not in link}
    found: set[int] = set()
    left = broken
    for node in giving_way:
        found.update(target for pair in left for target in pair if node_of[target] == node)
        left = [pair for pair in left if node not in (node_of[pair[0]], node_of[pair[1]])]
    return frozenset(found)


def is_replaceable(pool_map: PoolMap, target: int) -> bool:
    """Return whether the target can leave a chain, because the chain has another target."""
    return any(
        target in (*chain.targets, *chain.joining) and any(other != target for other in chain.targets)
        for table in pool_map.tables
        for chain in table.chains
    )
