"""Which targets form which chains: weighted by capacity, moving as little as possible when the set of targets changes.

A new pool: weighted rendezvous hashing (Thaler and Ravishankar 1998, with the logarithmic weights of Schindelhauer and
Schomaker 2005) orders the targets for each chain; quotas by capacity then take out the sampling noise of only 1,024 chains.
A pool whose targets have changed: each keeps what it has up to its quota, and only what is above one quota moves to where
there is less than another (`Placing`). Both give the same for the same question, on every machine.

Copies of a chain are spread over racks, in these over nodes, in these over targets: not more on one rack than replicas divided
by racks (rounded up), nor on one node than replicas divided by nodes. A node without a rack label is a rack of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.layout import chunk_hash
from nvpool.poolmap.model import Chain, ChainTable, Node, Target

_ROUNDS_MAX = 8
_NEAR = 2.0
"""Chains above or below a quota that are not worth a move: so what was balanced once stays as it is."""


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


def usable(targets: Sequence[Target]) -> list[Target]:
    """Those that shall hold their share of the chains; one that is down for a while is among them."""
    return [target for target in targets if target.state != "gone" and target.wish == "share" and target.capacity_bytes > 0]


class Spread:
    """How many copies of one chain a rack and a node may hold, and how many chains each target shall."""

    def __init__(self, targets: Sequence[Target], nodes: Sequence[Node], replicas: int):
        """InvalidRequest when there are fewer targets than replicas."""
        if len(targets) < replicas or replicas < 1:
            raise InvalidRequest(f"{replicas} replicas need as many targets, there are {len(targets)}")
        rack_of_node = {node.id: node.rack or f"node {node.id}" for node in nodes}
        self.node = {t.id: t.node for t in targets}
        self.rack = {t.id: rack_of_node.get(t.node, f"node {t.node}") for t in targets}
        self.on_rack = -(-replicas // len(set(self.rack.values())))
        self.on_node = -(-replicas // len(set(self.node.values())))
        # Where some have too few targets for their part, the others take more.
        while (room := self._room(targets)) < replicas and max(self.on_rack, self.on_node) < replicas:
            self.on_node += 1
            if self._room(targets) == room:
                self.on_rack += 1
        self.quota = self._quotas(targets, replicas)

    def _room(self, targets: Sequence[Target]) -> int:
        """The most copies that one chain can have."""
        on_node = {node: min(count, self.on_node) for node, count in Counter(t.node for t in targets).items()}
        on_rack: Counter[str] = Counter()
        for node, rack in {(t.node, self.rack[t.id]) for t in targets}:
            on_rack[rack] += on_node[node]
        return sum(min(count, self.on_rack) for count in on_rack.values())

    def _quotas(self, targets: Sequence[Target], replicas: int) -> dict[int, float]:
        """By capacity, from racks to nodes to targets; what one can not take, since a chain is not to have more copies there,
        goes to the others."""
        nodes: dict[int, list[Target]] = {}
        racks: dict[str, set[int]] = {}
        for target in targets:
            nodes.setdefault(target.node, []).append(target)
            racks.setdefault(self.rack[target.id], set()).add(target.node)
        weight = {node: sum(t.capacity_bytes for t in held) for node, held in nodes.items()}
        most = {node: CHAINS_PER_TABLE * min(self.on_node, len(held)) for node, held in nodes.items()}
        of_racks = _filled(CHAINS_PER_TABLE * replicas, {rack: (sum(weight[n] for n in held), min(
            CHAINS_PER_TABLE * self.on_rack, sum(most[n] for n in held))) for rack, held in racks.items()})
        quota: dict[int, float] = {}
        for rack, held in racks.items():
            for node, part in _filled(of_racks[rack], {n: (weight[n], most[n]) for n in held}).items():
                quota |= _filled(part, {t.id: (t.capacity_bytes, CHAINS_PER_TABLE) for t in nodes[node]})
        return quota

    def fits(self, target: int, others: Sequence[int]) -> bool:
        """Whether a chain that `others` hold may have a copy on the target as well."""
        node, rack = self.node[target], self.rack[target]
        on_node = on_rack = 0
        for other in others:
            if other == target:
                return False
            on_node += self.node[other] == node
            on_rack += self.rack[other] == rack
        return on_node < self.on_node and on_rack < self.on_rack


def _filled(amount: float, wants: dict) -> dict:
    """`amount` divided by weight over name -> (weight, most), none above its most."""
    parts: dict = {}
    left = dict(wants)
    while left:
        total = sum(weight for weight, _ in left.values())
        full = {name: most for name, (weight, most) in left.items() if amount * weight / total > most}
        if not full:
            return parts | {name: amount * weight / total for name, (weight, _) in left.items()}
        parts |= full
        amount -= sum(full.values())
        for name in full:
            del left[name]
    return parts


class Placing:
    """The chains of one table on their way to balance: `wanted[chain]` is who shall hold it."""

    def __init__(self, wanted: Sequence[Sequence[int]], present: Sequence[Sequence[int]], targets: Sequence[Target],
                 nodes: Sequence[Node], replicas: int):
        """`wanted`: who shall hold each chain until now; `present`: who has its bytes, or most of them, and is preferred.
        InvalidRequest when there are fewer usable targets than replicas."""
        here = usable(targets)
        self._ids = [target.id for target in here]
        self._replicas = replicas
        self._spread = Spread(here, nodes, replicas)
        self.quota = self._spread.quota
        self._present = present
        self._weights = {target.id: target for target in here}
        self.wanted = [[t for t in chain if t in self._weights] for chain in wanted]
        self.held = Counter(dict.fromkeys(self._ids, 0))
        for chain in self.wanted:
            self.held.update(chain)

    def balance(self) -> list[tuple[int, ...]]:
        """Who shall hold each chain from now on; who held it already stands first, in the old order."""
        self._part()
        self._fill()
        if all(abs(self._over(target)) < _NEAR for target in self._ids):
            return [tuple(chain) for chain in self.wanted]
        for _ in range(_ROUNDS_MAX):  # each makes the sum of what is above the quotas smaller; one or two are the rule
            before = [tuple(chain) for chain in self.wanted]
            for enough in (self._too_many, lambda target: self._over(target) > 0):
                for receiver in sorted(self._ids, key=self._over):
                    self._take(receiver, enough)
            for giver in sorted(self._ids, key=lambda t: -self._over(t)):
                self._give(giver)
            for giver in self._ids:
                self._give_by_way_of_another(giver)
            if before == [tuple(chain) for chain in self.wanted]:
                break
        return [tuple(chain) for chain in self.wanted]

    def _over(self, target: int) -> float:
        return self.held[target] - self.quota[target]

    def _too_few(self, target: int) -> bool:
        return self.held[target] < math.floor(self.quota[target] + 1e-6)

    def _too_many(self, target: int) -> bool:
        return self.held[target] > math.ceil(self.quota[target] - 1e-6)

    def _new(self, chain: int, target: int) -> bool:
        """Whether the target would have to get the chain's bytes: what is not there yet is given up for nothing."""
        return target not in self._present[chain]

    def _chains_of(self, target: int) -> list[int]:
        """Those that cost nothing to be given up first."""
        return sorted((n for n, chain in enumerate(self.wanted) if target in chain), key=lambda n: not self._new(n, target))

    def _part(self) -> None:
        """Copies that are too near one another."""
        for chain in self.wanted:
            kept: list[int] = []
            for target in sorted(chain, key=self._over):
                if len(kept) < self._replicas and self._spread.fits(target, kept):
                    kept.append(target)
                else:
                    self.held[target] -= 1
            chain[:] = [target for target in chain if target in kept]

    def _fill(self) -> None:
        """Chains with too few: from those that have least, by weighted rendezvous, so that what one had goes to all."""
        short = [number for number, chain in enumerate(self.wanted) if len(chain) < self._replicas]
        choice = {number: sum(self._over(t) < 0 and self._spread.fits(t, self.wanted[number]) for t in self._ids)
                  for number in short}
        for number in sorted(short, key=lambda n: choice[n]):  # who can choose least chooses first
            chain = self.wanted[number]
            while len(chain) < self._replicas:
                can = [t for t in self._ids if self._spread.fits(t, chain)]
                if not can:  # what is there stands in the way of a spread that would fit
                    can = [t for t in self._ids if t not in chain]
                wanting = [t for t in can if self._over(t) < 0]
                if wanting:
                    chosen = min(wanting, key=lambda t: (t not in self._present[number],
                                                         _score(number, self._weights[t])
                                                         * self._weights[t].capacity_bytes / -self._over(t)))
                else:
                    chosen = min(can, key=lambda t: (self._over(t), t))
                chain.append(chosen)
                self.held[chosen] += 1

    def _move(self, number: int, giver: int, receiver: int) -> None:
        chain = self.wanted[number]
        chain.remove(giver)
        chain.append(receiver)
        self.held[giver] -= 1
        self.held[receiver] += 1

    def _can(self, number: int, giver: int, receiver: int) -> bool:
        chain = self.wanted[number]
        return giver in chain and self._spread.fits(receiver, [t for t in chain if t != giver])

    def _take(self, receiver: int, enough: Callable[[int], bool]) -> None:
        """Up to its quota, from those that have enough, most from whoever is furthest above."""
        if not self._too_few(receiver):
            return
        able = {number: givers for number, chain in enumerate(self.wanted)
                if (givers := [t for t in chain if enough(t) and self._can(number, t, receiver)])}
        score = {number: _score(number, self._weights[receiver]) for number in able}
        for number in sorted(able, key=lambda n: (self._new(n, receiver) - any(self._new(n, t) for t in able[n]), score[n])):
            givers = [t for t in able[number] if enough(t)]
            if givers:
                self._move(number, max(givers, key=lambda t: (self._new(number, t), self._over(t))), receiver)
                if not self._too_few(receiver):
                    return

    def _give(self, giver: int) -> None:
        """What is above its quota, to those below theirs."""
        if not self._too_many(giver):
            return
        for number in self._chains_of(giver):
            takers = [t for t in self._ids if self._over(t) < 0 and self._can(number, giver, t)]
            if takers:
                self._move(number, giver, min(takers, key=lambda t: (self._new(number, t), self._over(t))))
                if not self._too_many(giver):
                    return

    def _give_by_way_of_another(self, giver: int) -> None:
        """Where no chain of the giver may go to who has too few: a third takes it, and gives one of its own."""
        if not self._too_many(giver):
            return
        onward = {between: self._onward(between) for between in self._ids if between != giver}
        for number in self._chains_of(giver):
            for between, found in onward.items():
                if found is None or not self._can(number, giver, between):
                    continue
                if not self._can(found[0], between, found[1]) or self._over(found[1]) >= 0:
                    found = onward[between] = self._onward(between)  # what was found has moved meanwhile
                if found is not None and found[0] != number:
                    other, taker = found
                    self._move(number, giver, between)
                    self._move(other, between, taker)
                    onward[between] = self._onward(between)
                    break
            if not self._too_many(giver):
                return

    def _onward(self, between: int) -> tuple[int, int] | None:
        """A chain that `between` can give to one below its quota, and that one."""
        takers = sorted((t for t in self._ids if self._over(t) < 0), key=self._over)
        for number in self._chains_of(between):
            for taker in takers:
                if self._can(number, between, taker):
                    return number, taker
        return None
