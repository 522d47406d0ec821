"""Broken links between two nodes of which both reach the leader: which targets leave the chains that cross the link.

One of the two nodes has to give way, and its targets leave their chains as silent ones do, after their leases have ended. They
join again when the link works. Decided here, called by cluster/manager; no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from nvpool.poolmap.model import PoolMap

BROKEN = "its node and another one do not reach each other"
"""What a target that gives way is told, for the status."""


def cut_off(pool_map: PoolMap, reports: Mapping[int, Collection[int]], before: Collection[int]) -> frozenset[int]:
    """The targets that give way, of each broken link those of one node. `reports`: target -> those that it cannot reach;
    `before`: what this returned last, so that the same ones stay out while the link is broken.

    Of two nodes the one with more broken links gives way, which is likely to be the cause. Then the one that is reported more
    often, then the one with the higher number.
    """
    node_of = {target.id: target.node for target in pool_map.targets if not target.is_over}
    broken = [(reporter, other) for reporter, others in reports.items() for other in others
              if reporter in node_of and other in node_of and node_of[reporter] != node_of[other]]
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
    """Whether the target takes part in a chain that has another target, so that it can leave it."""
    return any(target in (*chain.targets, *chain.joining) and any(other != target for other in chain.targets)
               for table in pool_map.tables for chain in table.chains)
