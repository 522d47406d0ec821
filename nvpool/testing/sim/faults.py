"""Random faults of a simulated pool from a seed, and their repair.

Processes die between two steps or are stopped; nodes are cut off or lose their power. Used by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from nvpool.core.endpoint import parse_endpoint
from nvpool.poolmap.shards.members import process_name
from nvpool.testing.sim.pool import SimPool
from nvpool.testing.sim.stream_transport import address_of, supervisor_endpoints

NEVER_BROKEN = ("client", "judge")


KINDS = {"kill": 2, "kill_node": 1, "die": 4, "cut": 2, "isolate": 2, "stop": 1, "stop_asked": 2, "fade": 1}
"""Relative frequency of each kind."""
KINDS_OF_ETCD = {"majority": 2, "alone": 2}
"""Additional faults if etcd keeps the map."""
KINDS_OF_STANDBYS = {"orphan": 2}
"""Additional faults if shards have standbys."""
KINDS_WITH_POWER = KINDS | {"power": 5}
KINDS_WITH_FULL = {"fill": 4, "kill": 1, "die": 2, "cut": 1}
KINDS_OF_ROT = {"rot": 1}
"""The only kind in its runs: a copy that rots must not be the last one."""


LINK_SHARE = 0.2
"""Share of seeds in which links between two nodes break and no other node notices it."""
LINK_S = (8.0, 40.0)
"""Duration of a broken link; the longest is longer than clients wait."""


ENDPOINTS_GONE_SHARE = 0.4
"""Share of seeds in which no supervisor has a unix socket when the load ends and the final checks run."""
ENDPOINT_FAULTS = ("gone", "refuses", "silent")


class BrokenLinks:
    """Break the link between two nodes that have targets, in one direction or both, until `over()`."""

    def __init__(
        self, pool: SimPool, chance: random.Random, over: Callable[[], bool], done: dict[str, int]
    ) -> None:
        self._pool = pool
        self._chance = chance
        self._over = over
        self._done = done

    async def run(self) -> None:
        pool, chance = self._pool, self._chance
        nodes = sorted({pool.processes[name].node for name in pool.processes if name.startswith("target")})
        if (
            chance.random() >= LINK_SHARE or len(nodes) < 3
        ):  # with fewer nodes, one of them does not reach the leader
            return
        while not self._over():
            await asyncio.sleep(chance.expovariate(0.3))
            one, other = chance.sample(nodes, 2)
            ways = [(one, other), (other, one)][: chance.choice((1, 1, 2))]
            until_s = asyncio.get_running_loop().time() + chance.uniform(*LINK_S)
            pool.invariants.happened(asyncio.get_running_loop().time(), f"links are broken: {ways}")
            self._done["cuts"] += 1
            pool.network.break_link(*ways)
            while not self._over() and asyncio.get_running_loop().time() < until_s:  # noqa: ASYNC110 - on virtual time
                await asyncio.sleep(0.5)
            pool.network.mend_links()


class EndpointFaults:
    """Break endpoints of supervisors, one or two of a node, until `over()`.

    Connections to a broken endpoint end, except for some of those to silent ones, which survive.
    """

    def __init__(
        self, pool: SimPool, chance: random.Random, over: Callable[[], bool], done: dict[str, int]
    ) -> None:
        self._pool = pool
        self._chance = chance
        self._over = over
        self._done = done
        self._stays = chance.random() < ENDPOINTS_GONE_SHARE

    async def run(self) -> None:
        chance, nodes = self._chance, [node.id for node in self._pool.first_map.nodes]
        while not self._over():
            await asyncio.sleep(chance.expovariate(0.4))
            node = chance.choice(nodes)
            endpoints = supervisor_endpoints(self._pool.directory, node)[: chance.choice((1, 1, 2))]
            mode = chance.choice(ENDPOINT_FAULTS)
            lasts_s = chance.uniform(0.2, 9.0)
            self._record_event(
                f"{len(endpoints)} endpoints of supervisor-{node} are {mode} for {lasts_s:.1f} s"
            )
            self._done["endpoints"] += 1
            for endpoint in endpoints:
                self._break(endpoint, mode)
            await asyncio.sleep(lasts_s)
            for endpoint in endpoints:
                self._mend(endpoint)
        if self._stays:
            self._record_event("the unix sockets of all supervisors are gone")
            for node in nodes:
                self._break(supervisor_endpoints(self._pool.directory, node)[0], "gone")

    def _record_event(self, event: str) -> None:
        self._pool.invariants.happened(asyncio.get_running_loop().time(), event)

    def _break(self, endpoint: str, mode: str) -> None:
        where = parse_endpoint(endpoint)
        address = address_of(where)
        self._pool.network.broken[address] = mode
        if mode == "gone" and where.scheme.endswith("+unix"):
            Path(where.path).unlink(missing_ok=True)
        if mode != "silent" or self._chance.random() < 0.5:
            self._pool.network.hang_up_at(address)

    def _mend(self, endpoint: str) -> None:
        where = parse_endpoint(endpoint)
        self._pool.network.broken.pop(address_of(where), None)
        if where.scheme.endswith("+unix"):
            Path(where.path).touch()


class SimulatedFaults:
    """Injects faults until `over()`; `done` counts them. `kinds`, `of`: only these kinds, for processes with
    these names."""

    def __init__(
        self,
        pool: SimPool,
        chance: random.Random,
        over: Callable[[], bool],
        done: dict[str, int],
        kinds: dict[str, int],
        of: str = "",
    ) -> None:
        self._pool = pool
        self._chance = chance
        self._over = over
        self._done = done
        self._kinds = kinds
        self._of = of
        self._rotten: set[tuple[int, int]] = set()  # inode and index: at most one copy of each chunk rots

    async def run(self) -> None:
        chance, pool = self._chance, self._pool
        while not self._over():
            await asyncio.sleep(chance.expovariate(0.7))
            name = chance.choice(
                [
                    name
                    for name in pool.processes
                    if name.startswith(self._of) and not name.startswith(NEVER_BROKEN)
                ]
            )
            kind = chance.choices(list(self._kinds), list(self._kinds.values()))[0]
            await getattr(self, f"_{kind}")(name)
            await asyncio.sleep(chance.expovariate(2))
            await self.start_dead(chance.random() < 0.3)

    def _record_event(self, event: str) -> None:
        self._pool.invariants.happened(asyncio.get_running_loop().time(), event)

    async def _kill(self, name: str) -> None:
        self._pool.processes[name].kill()

    async def _kill_node(self, name: str) -> None:
        """Kill all processes of a node."""
        node = self._pool.processes[name].node
        for process in list(self._pool.processes.values()):
            if process.node == node:
                process.kill()

    async def _power(self, name: str) -> None:
        """One node, or all nodes of the pool together, lose their power; the clients survive."""
        pool = self._pool
        nodes = {
            process.node for other, process in pool.processes.items() if not other.startswith(NEVER_BROKEN)
        }
        nodes = nodes if self._chance.random() < 0.4 else {pool.processes[name].node}
        self._record_event(f"power is lost on {sorted(nodes)}")
        self._done["power"] += 1
        pool.lose_power(nodes)

    async def _fill(self, _name: str) -> None:
        """A drive has no free space for a while."""
        store = self._pool.stores[self._chance.choice(list(self._pool.stores))]
        self._record_event("a drive is full")
        self._done["full"] += 1
        store.fill(True)
        await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        store.fill(False)

    async def _rot(self, _name: str) -> None:
        """One bit of a block changes on a drive, while others have good copies of it."""
        pool = self._pool
        if not pool.is_whole():
            return
        held = [
            (number, name, block)
            for number, store in pool.stores.items()
            for name in store.chunks()
            for block in store.blocks(*name)
            if name not in self._rotten
        ]
        if held:
            number, (inode, index), block = self._chance.choice(held)
            self._rotten.add((inode, index))
            self._record_event(f"block {block} of chunk {index} of inode {inode:#x} rots on target {number}")
            self._done["rotten"] += 1
            pool.stores[number].flip(inode, index, block)

    async def _die(self, name: str) -> None:
        """The process dies between two of its next steps."""
        process = self._pool.processes[name]
        process.die_after = process.steps + self._chance.randint(1, 12)

    async def _stop(self, name: str) -> None:
        """The process is stopped, for shorter or longer than a lease."""
        process, lasts_s = self._pool.processes[name], self._chance.uniform(0.2, 8.0)
        self._record_event(f"{name} is stopped for {lasts_s:.1f} s")
        self._done["stops"] += 1
        process.stop()
        await asyncio.sleep(lasts_s)
        process.go_on()

    async def _majority(self, _name: str) -> None:
        """Most members of etcd are stopped or dead: etcd commits nothing."""
        members = sorted(name for name in self._pool.processes if name.startswith("etcd"))
        some, lasts_s = self._chance.sample(members, 2), self._chance.uniform(0.5, 12.0)
        self._record_event(f"{some} are silent for {lasts_s:.1f} s")
        self._done["etcd"] += 1
        for name in some:
            process = self._pool.processes[name]
            if self._chance.random() < 0.5:
                process.kill()
            else:
                process.stop()
        await asyncio.sleep(lasts_s)
        for name in some:
            self._pool.processes[name].go_on()

    async def _alone(self, _name: str) -> None:
        """One node reaches no member of etcd, nor the nodes of etcd's members if these have no nodes of their
        own."""
        network = self._pool.network
        places = {name: place for name, place in network.places.items() if name.startswith("etcd")}
        node = self._chance.choice(
            sorted(
                {
                    self._pool.processes[name].node
                    for name in self._pool.processes
                    if name.startswith("supervisor")
                }
            )
        )
        for place in places.values():
            network.cut(node, place)
        self._done["etcd"] += 1
        await self._cut_off(f"{node} does not reach etcd", self._chance.uniform(0.5, 9.0))

    async def _stop_asked(self, name: str) -> None:
        """The process is stopped for longer than a lease, after it has received a request and before it has
        replied."""
        process, stopped = self._pool.processes[name], asyncio.Event()

        def stop() -> None:
            process.stop()
            stopped.set()

        process.when_asked = stop
        try:
            await asyncio.wait_for(stopped.wait(), 3.0)
        except TimeoutError:
            process.when_asked = None
            return
        self._done["stops"] += 1
        lasts_s = self._chance.uniform(3.5, 8.0)
        self._record_event(f"{name} is stopped for {lasts_s:.1f} s, directly after it was asked")
        await asyncio.sleep(lasts_s)
        process.go_on()

    async def _isolate(self, _name: str) -> None:
        """One node is cut off from all but the clients for longer than a lease; its clients do not notice."""
        network = self._pool.network
        alone = self._chance.choice(
            sorted(
                {
                    process.node
                    for name, process in self._pool.processes.items()
                    if name.startswith(self._of or ("target", "meta"))
                }
            )
        )
        for node in sorted(set(network.places.values())):
            if not node.startswith("node-of-client"):
                network.cut(alone, node)
        await self._cut_off(f"{alone} is alone with the clients", self._chance.uniform(3.0, 9.0))

    async def _fade(self, name: str) -> None:
        """A node is cut off from all but the clients, and its process dies before anybody notices."""
        process, network = self._pool.processes[name], self._pool.network
        for node in sorted(set(network.places.values())):
            if not node.startswith("node-of-client"):
                network.cut(process.node, node)
        await self._cut_off(
            f"{process.node} is alone with the clients", self._chance.uniform(0.1, 1.4), process.kill
        )

    async def _orphan(self, _name: str) -> None:
        """A node with standbys is cut off from all but the clients.

        Before the primary of one of them can remove the standby from the map, the primary's process dies, and
        is started again before the node is back.
        """
        network, pool, chance = self._pool.network, self._pool, self._chance
        pairs = [
            (shard, standby)
            for shard in pool.pool_map.shards
            for standby in shard.standbys
            if standby.state == "up" and standby.node != shard.node
        ]
        if not pairs:
            return
        shard, standby = chance.choice(pairs)
        alone, primary = f"node-{standby.node}", process_name(shard.id, shard.member)
        for node in sorted(set(network.places.values())):
            if not node.startswith("node-of-client"):
                network.cut(alone, node)
        await asyncio.sleep(chance.uniform(0.0, 1.4))
        if primary in pool.processes:
            pool.processes[primary].kill()
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            again = asyncio.ensure_future(pool.start_again(primary))
            await self._cut_off(
                f"{alone} is alone with the clients, and {primary} has died", chance.uniform(1.0, 6.0)
            )
            await again
        else:
            network.heal()

    async def _cut(self, _name: str) -> None:
        network = self._pool.network
        nodes = sorted(set(network.places.values()))
        pairs = [self._chance.sample(nodes, 2) for _ in range(self._chance.randint(1, 3))]
        for pair in pairs:
            network.cut(*pair)
        await self._cut_off(f"cut off from one another: {pairs}", self._chance.uniform(0.1, 8.0))

    async def _cut_off(self, event: str, lasts_s: float, then: Callable[[], None] | None = None) -> None:
        self._record_event(f"{event}, for {lasts_s:.1f} s")
        self._done["cuts"] += 1
        await asyncio.sleep(lasts_s)
        if then is not None:
            then()
        self._pool.network.heal()

    # -- repair

    async def start_dead(self, fragile: bool = False) -> None:
        """Start all dead processes at the same time, as supervisors of several nodes do."""
        dead = [name for name, process in self._pool.processes.items() if not process.alive]
        self._done["deaths"] += len(dead)
        await asyncio.gather(*[self._pool.start_again(name) for name in dead])
        if fragile:
            for name in dead:
                if name in self._pool.processes:  # otherwise its shard has left the pool
                    self._pool.processes[name].die_after = self._chance.randint(1, 6)

    async def mend(self) -> None:
        pool = self._pool
        self._record_event("all is mended")
        pool.network.heal()
        pool.network.reset_share = 0.0
        for process in pool.processes.values():
            process.die_after = None
            process.go_on()
        await self.start_dead()
