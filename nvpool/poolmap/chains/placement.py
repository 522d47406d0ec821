"""Placement of chains on targets: weighted by capacity, with as few moves as possible when targets change.

New pool: weighted rendezvous hashing (Thaler and Ravishankar 1998, with the logarithmic weights of
Schindelhauer and Schomaker 2005) orders the targets for each chain. Quotas by capacity then remove the
sampling noise of only 1,024 chains. Pool with changed targets: each target keeps its chains up to its quota,
and only the excess above a quota moves to targets below their quota (`Placing`). Both methods are
deterministic on every machine.

Copies of a chain are spread over racks, within racks over nodes, within nodes over targets: a rack gets at
most replicas divided by racks (rounded up), and a node at most replicas divided by nodes. A node without a
rack label is its own rack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.file_layout import chunk_hash
from nvpool.poolmap.model import Chain, ChainTable, Node, Target

_Name = TypeVar("_Name", int, str)
"""Number of a node or target, or name of a rack."""

_ROUNDS_MAX = 8
_NEAR = 2.0
"""Deviation from a quota, in chains, that is too small to justify a move: a balanced pool stays unchanged."""


def _score(chain: int, target: Target) -> float:
    fraction = (chunk_hash(target.id, chain) + 1) / (1 << 64)
    return -math.log(fraction) / target.capacity_bytes


def build_table(targets: Sequence[Target], replicas: int, previous: ChainTable | None = None) -> ChainTable:
    """Return the chain table for `replicas` copies over `targets`; chains with unchanged members keep their
    epoch.

    Each target holds a share of the chains proportional to its capacity, up to rounding. Targets of one node
    share a chain only if there are fewer nodes than replicas. InvalidRequest: there are fewer targets than
    replicas.
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
    """Return the targets that should hold their share of the chains, including those that are temporarily
    down."""
    return [
        target
        for target in targets
        if target.state != "gone" and target.desired_state == "share" and target.capacity_bytes > 0
    ]


class Spread:
    """Limits of placement: copies of one chain on a rack and on a node, and the quota of chains of each
    target."""

    def __init__(self, targets: Sequence[Target], nodes: Sequence[Node], replicas: int) -> None:
        """Compute the limits; InvalidRequest if there are fewer targets than replicas."""
        if len(targets) < replicas or replicas < 1:
            raise InvalidRequest(f"{replicas} replicas need as many targets, there are {len(targets)}")
        rack_of_node = {node.id: node.rack or f"node {node.id}" for node in nodes}
        self.node = {t.id: t.node for t in targets}
        self.rack = {t.id: rack_of_node.get(t.node, f"node {t.node}") for t in targets}
        self.on_rack = -(-replicas // len(set(self.rack.values())))
        self.on_node = -(-replicas // len(set(self.node.values())))
        # Racks or nodes with too few targets cannot take their part, so the others take more.
        while (room := self._room(targets)) < replicas and max(self.on_rack, self.on_node) < replicas:
            self.on_node += 1
            if self._room(targets) == room:
                self.on_rack += 1
        self.quota = self._quotas(targets, replicas)

    def _room(self, targets: Sequence[Target]) -> int:
        """Return the largest possible number of copies of one chain."""
        on_node = {node: min(count, self.on_node) for node, count in Counter(t.node for t in targets).items()}
        on_rack: Counter[str] = Counter()
        for node, rack in {(t.node, self.rack[t.id]) for t in targets}:
            on_rack[rack] += on_node[node]
        return sum(min(count, self.on_rack) for count in on_rack.values())

    def _quotas(self, targets: Sequence[Target], replicas: int) -> dict[int, float]:
        """Return the quota of each target, divided by capacity over racks, nodes and targets.

        The limit of copies of one chain may prevent a rack or node from taking its part; the others get the
        rest.
        """
        nodes: dict[int, list[Target]] = {}
        racks: dict[str, set[int]] = {}
        for target in targets:
            nodes.setdefault(target.node, []).append(target)
            racks.setdefault(self.rack[target.id], set()).add(target.node)
        weight = {node: sum(t.capacity_bytes for t in held) for node, held in nodes.items()}
        most = {node: CHAINS_PER_TABLE * min(self.on_node, len(held)) for node, held in nodes.items()}
        of_racks = _filled(
            CHAINS_PER_TABLE * replicas,
            {
                rack: (
                    sum(weight[n] for n in held),
                    min(CHAINS_PER_TABLE * self.on_rack, sum(most[n] for n in held)),
                )
                for rack, held in racks.items()
            },
        )
        quota: dict[int, float] = {}
        for rack, held in racks.items():
            for node, part in _filled(of_racks[rack], {n: (weight[n], most[n]) for n in held}).items():
                quota |= _filled(part, {t.id: (t.capacity_bytes, CHAINS_PER_TABLE) for t in nodes[node]})
        return quota

    def fits(self, target: int, others: Sequence[int]) -> bool:
        """Return whether a chain with copies on `others` may also have one on `target`."""
        node, rack = self.node[target], self.rack[target]
        on_node = on_rack = 0
        for other in others:
            if other == target:
                return False
            on_node += self.node[other] == node
            on_rack += self.rack[other] == rack
        return on_node < self.on_node and on_rack < self.on_rack


def _filled(amount: float, wants: Mapping[_Name, tuple[float, float]]) -> dict[_Name, float]:
    """Divide `amount` by weight over name -> (weight, maximum); no name gets more than its maximum."""
    parts: dict[_Name, float] = {}
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
    """The balancing of one table's chains: `wanted[chain]` lists the desired holders of a chain."""

    def __init__(
        self,
        wanted: Sequence[Sequence[int]],
        present: Sequence[Sequence[int]],
        targets: Sequence[Target],
        nodes: Sequence[Node],
        replicas: int,
    ) -> None:
        """Start from the current desired holders.

        `wanted` lists the desired holders of each chain so far. `present` lists the targets that have all or
        most of a chain's bytes and are preferred. InvalidRequest: there are fewer usable targets than
        replicas.
        """
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
        """Return the new desired holders of each chain.

        Previous holders come first, in their previous order.
        """
        self._part()
        self._fill()
        if all(abs(self._over(target)) < _NEAR for target in self._ids):
            return [tuple(chain) for chain in self.wanted]
        # Each round reduces the total excess over the quotas; usually one or two rounds suffice.
        for _ in range(_ROUNDS_MAX):
            before = [tuple(chain) for chain in self.wanted]
            for enough in (self._too_many, lambda target: self._over(target) > 0):
                for receiver in sorted(self._ids, key=self._over):
                    self._take(receiver, enough)
            for source in sorted(self._ids, key=lambda t: -self._over(t)):
                self._give(source)
            for source in self._ids:
                self._give_by_way_of_another(source)
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
        """Return whether the target has no bytes of the chain yet.

        Then taking the chain away from the target costs nothing.
        """
        return target not in self._present[chain]

    def _chains_of(self, target: int) -> list[int]:
        """Return the chains of a target, those that cost nothing to take away first."""
        return sorted(
            (n for n, chain in enumerate(self.wanted) if target in chain),
            key=lambda n: not self._new(n, target),
        )

    def _part(self) -> None:
        """Remove copies that violate the limits of racks and nodes."""
        for chain in self.wanted:
            kept: list[int] = []
            for target in sorted(chain, key=self._over):
                if len(kept) < self._replicas and self._spread.fits(target, kept):
                    kept.append(target)
                else:
                    self.held[target] -= 1
            chain[:] = [target for target in chain if target in kept]

    def _fill(self) -> None:
        """Add holders to chains with too few copies.

        Targets are chosen by weighted rendezvous hashing among those below quota, so the chains of a removed
        target spread over all others.
        """
        short = [number for number, chain in enumerate(self.wanted) if len(chain) < self._replicas]
        choice = {
            number: sum(self._over(t) < 0 and self._spread.fits(t, self.wanted[number]) for t in self._ids)
            for number in short
        }
        # The chain with the fewest options chooses first.
        for number in sorted(short, key=lambda n: choice[n]):
            chain = self.wanted[number]
            while len(chain) < self._replicas:
                can = [t for t in self._ids if self._spread.fits(t, chain)]
                if not can:  # the existing copies prevent a placement within the limits
                    can = [t for t in self._ids if t not in chain]
                wanting = [t for t in can if self._over(t) < 0]
                if wanting:
                    chosen = min(
                        wanting,
                        key=lambda t: (
                            t not in self._present[number],
                            _score(number, self._weights[t])
                            * self._weights[t].capacity_bytes
                            / -self._over(t),
                        ),
                    )
                else:
                    chosen = min(can, key=lambda t: (self._over(t), t))
                chain.append(chosen)
                self.held[chosen] += 1

    def _move(self, number: int, source: int, receiver: int) -> None:
        chain = self.wanted[number]
        chain.remove(source)
        chain.append(receiver)
        self.held[source] -= 1
        self.held[receiver] += 1

    def _can(self, number: int, source: int, receiver: int) -> bool:
        chain = self.wanted[number]
        return source in chain and self._spread.fits(receiver, [t for t in chain if t != source])

    def _take(self, receiver: int, enough: Callable[[int], bool]) -> None:
        """Fill `receiver` up to its quota from targets that have `enough`, preferring the largest excess."""
        if not self._too_few(receiver):
            return
        able = {
            number: sources
            for number, chain in enumerate(self.wanted)
            if (sources := [t for t in chain if enough(t) and self._can(number, t, receiver)])
        }
        score = {number: _score(number, self._weights[receiver]) for number in able}
        for number in sorted(
            able, key=lambda n: (self._new(n, receiver) - any(self._new(n, t) for t in able[n]), score[n])
        ):
            sources = [t for t in able[number] if enough(t)]
            if sources:
                self._move(
                    number, max(sources, key=lambda t: (self._new(number, t), self._over(t))), receiver
                )
                if not self._too_few(receiver):
                    return

    def _give(self, source: int) -> None:
        """Move the source's excess above its quota to targets below theirs."""
        if not self._too_many(source):
            return
        for number in self._chains_of(source):
            receivers = [t for t in self._ids if self._over(t) < 0 and self._can(number, source, t)]
            if receivers:
                self._move(
                    number, source, min(receivers, key=lambda t: (self._new(number, t), self._over(t)))
                )
                if not self._too_many(source):
                    return

    def _give_by_way_of_another(self, source: int) -> None:
        """Move excess through a third target.

        Used if no chain of the source may move directly to a target below quota. The third target takes a
        chain of the source and moves one of its own chains on.
        """
        if not self._too_many(source):
            return
        onward = {between: self._onward(between) for between in self._ids if between != source}
        for number in self._chains_of(source):
            for between, found in onward.items():
                if found is None or not self._can(number, source, between):
                    continue
                if not self._can(found[0], between, found[1]) or self._over(found[1]) >= 0:
                    found = onward[between] = self._onward(between)  # the earlier result is outdated
                if found is not None and found[0] != number:
                    other, receiver = found
                    self._move(number, source, between)
                    self._move(other, between, receiver)
                    onward[between] = self._onward(between)
                    break
            if not self._too_many(source):
                return

    def _onward(self, between: int) -> tuple[int, int] | None:
        """Return a chain that `between` can move to a target below its quota, and that destination."""
        receivers = sorted((t for t in self._ids if self._over(t) < 0), key=self._over)
        for number in self._chains_of(between):
            for receiver in receivers:
                if self._can(number, between, receiver):
                    return number, receiver
        return None
