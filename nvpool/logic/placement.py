"""Which targets form which chains: weighted by capacity, moving as little as possible when the set of targets changes.

Weighted rendezvous hashing (Thaler and Ravishankar 1998, with the logarithmic weights of Schindelhauer and Schomaker 2005)
orders the targets for each chain; quotas by capacity then take out the sampling noise of only 1,024 chains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nvpool.base.errors import InvalidRequest
from nvpool.base.units import CHAINS_PER_TABLE
from nvpool.logic.layout import chunk_hash
from nvpool.logic.poolmap import Chain, ChainTable, Target


def _score(chain: int, target: Target) -> float:
    fraction = (chunk_hash(target.id, chain) + 1) / (1 << 64)
    return -math.log(fraction) / target.capacity_bytes


def build_table(targets: Sequence[Target], replicas: int, previous: ChainTable | None = None) -> ChainTable:
    """The chain table for `replicas` copies over `targets`; chains whose members stay keep their epoch.

    Each target holds as many chains as its share of the capacity says, up to rounding. Targets of one node share a chain
    only when there are fewer nodes than replicas. InvalidRequest when there are fewer targets than replicas.
    """
    usable = [t for t in targets if t.state != "gone" and t.capacity_bytes > 0]
    if len(usable) < replicas or replicas < 1:
        raise InvalidRequest(f"{replicas} replicas need as many targets, there are {len(usable)}")
    by_node = len({t.node for t in usable}) >= replicas
    total = sum(t.capacity_bytes for t in usable)
    left = {t.id: math.ceil(CHAINS_PER_TABLE * replicas * t.capacity_bytes / total) for t in usable}
    chains = []
    for chain in range(CHAINS_PER_TABLE):
        chosen: list[Target] = []
        ordered = sorted(usable, key=lambda t: (left[t.id] <= 0, _score(chain, t)))
        for target in ordered:
            if len(chosen) == replicas:
                break
            if by_node and target.node in {t.node for t in chosen}:
                continue
            chosen.append(target)
            left[target.id] -= 1
        members = tuple(t.id for t in chosen)
        epoch = 1
        if previous is not None:
            before = previous.chains[chain]
            epoch = before.epoch if before.targets == members else before.epoch + 1
        chains.append(Chain(epoch, members))
    return ChainTable(replicas, tuple(chains))
