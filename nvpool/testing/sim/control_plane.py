"""Management of a simulated pool: one manager on the embedded coordinator, or a supervisor on each node with
etcd.

Coordinators, `node/coordination/leadership`, the manager, and the parts that keep shards and remove them are
real. etcd (`sim/etcd`) and the start of processes are simulated. Both kinds can `start` one of their
processes again, `change` the map as an operator does, and handle the end of the pool's processes. Made by
`sim/pool`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nvpool.cluster.chain_manager import Manager, change
from nvpool.cluster.coordinator_api import LEASE_S_MIN, CoordinatorLease, MapCoordinator
from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, StaleLease, Unavailable
from nvpool.kv.memory_engine import MemoryKv
from nvpool.node.admin.shards import MetaShards
from nvpool.node.coordination.leadership import Leadership, Leading
from nvpool.node.coordination.shard_failover import ShardFailover
from nvpool.node.coordination.standby_checks import has_records
from nvpool.poolmap.model import PoolMap, decode_map, encode_map
from nvpool.rpc.api import Call, Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.testing.sim.etcd import MEMBERS, SimCalls, SimEtcd
from nvpool.testing.sim.invariants import Invariants
from nvpool.testing.sim.network import SimulatedNetwork
from nvpool.testing.sim.simulated_process import KV_STEPS, CrashPointProxy, Killed, Process, ProcessHandler
from nvpool.testing.sim.stream_transport import (
    SimulatedTransport,
    endpoint_of,
    supervisor_endpoints,
    transports_of,
)
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

FOLLOW_S = 2.0
AGAIN_S = 0.05

Decide = Callable[[PoolMap], PoolMap]


class ManagedPool(Protocol):
    """Interface of the simulated pool that the control plane uses (sim/pool)."""

    loop: VirtualLoop
    seed: str
    chance: random.Random
    network: SimulatedNetwork
    invariants: Invariants
    processes: dict[str, Process]
    secret: bytes
    first_map: PoolMap

    @property
    def directory(self) -> Path:
        """Directory of the sockets."""

    def process(self, name: str, node: str) -> Process:
        """Start a process on the node."""

    def own(self, process: Process, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the work in the process until it dies."""

    def new_clock(self, name: str) -> Clock:
        """Return a clock for a process."""

    def new_dialer(self, process: Process, clock: Clock) -> Dialer:
        """Return a dialer for a process, in place of that of its predecessor."""

    def disk_s(self) -> float:
        """Return the time of one write to a drive."""

    def pid_of(self, target: int, node: int) -> int | None:
        """Return the pid of a target's process on that node; None if the target is on another node."""

    async def start_again(self, name: str) -> None:
        """Start the process and return when it runs."""


class ControlPlane(Protocol):
    @property
    def pool_map(self) -> PoolMap:
        """The newest map, even if only one process knows it."""

    def endpoints(self, node: int) -> tuple[str, ...]:
        """Endpoints of the supervisor for processes of that node."""

    async def begin(self, first_map: PoolMap) -> None:
        """Start all processes."""

    async def start(self, name: str) -> None:
        """Start a successor of that process, which has ended."""

    async def change(self, decide: Decide, node: int = 0) -> PoolMap:
        """Try once to change the map, through the supervisor of that node, or any; a dead one is started
        first.

        Killed, and the errors of cluster/chain_manager.change.
        """

    def target_died(self, process: Process, target: int, pid: int) -> None:
        """Let a supervisor notice the end of a target's process, and report it if it can."""

    def member_ended(self, node: int, shard: int, member: int) -> None:
        """Let a supervisor notice the end of a shard member's process."""

    def power_lost(self, name: str) -> None:
        """Handle a power loss of one of its processes, which has ended."""

    def close(self) -> None: ...


async def until_changed(managing: ControlPlane, decide: Decide) -> PoolMap:
    """Change the map, with retries, and return the map when the change is known. Raises the errors of
    `decide`."""
    while True:
        with suppress(Killed, Unavailable, StaleLease):
            return await managing.change(decide)
        await asyncio.sleep(AGAIN_S)


async def answer_map(coordinator: MapCoordinator, call: Call) -> None:
    request = pool_pb2.MapRequest.FromString(bytes(call.message))
    newest = await coordinator.watch(request.newer_than, min(request.wait_s, FOLLOW_S))
    call.reply(pool_pb2.MapReply(map=encode_map(newest) if newest is not None else b"").SerializeToString())


class _Embedded(EmbeddedCoordinator):
    """Coordinator that reports each map to the invariants."""

    invariants: Invariants

    async def replace(self, new: PoolMap, leader: CoordinatorLease | None = None) -> None:
        await super().replace(new, leader)
        self.invariants.map_is(self.pool_map)


class _Leads:
    """The part of Leadership that node/admin/shards uses, for one manager."""

    def __init__(self, coordinator: EmbeddedCoordinator, manager: Manager) -> None:
        self.manager = manager
        self._coordinator = coordinator
        self.change_as_leader = partial(change, coordinator)

    @property
    def pool_map(self) -> PoolMap:
        return self._coordinator.pool_map


class OneManager:
    """The process "manager" on its own node."""

    NAME = "manager"

    def __init__(self, pool: ManagedPool) -> None:
        self._pool = pool
        self._kv = MemoryKv()
        self._coordinator: _Embedded | None = None
        self._manager: Manager | None = None
        self._keeper: ShardFailover | None = None

    @property
    def pool_map(self) -> PoolMap:
        return self._coordinator.pool_map if self._coordinator is not None else self._pool.first_map

    def endpoints(self, node: int) -> tuple[str, ...]:
        return (endpoint_of(self.NAME),)

    async def begin(self, first_map: PoolMap) -> None:
        await self.start(self.NAME)

    async def start(self, name: str) -> None:
        pool = self._pool
        process = pool.process(name, "node-of-manager")
        clock = pool.new_clock(name)
        kv = CrashPointProxy(self._kv, process, KV_STEPS, pool.disk_s)
        try:
            await kv.sync()  # as a real engine does when it opens existing data
            self._coordinator = coordinator = await (
                _Embedded.open(kv)
                if self._kv.get(b"map") is not None
                else _Embedded.found(kv, pool.first_map)
            )
        except Killed:
            return
        coordinator.invariants = pool.invariants
        pool.invariants.map_is(coordinator.pool_map)
        lease = await coordinator.lead("1", LEASE_S_MIN, 0.0)
        assert lease is not None
        leadership = Leadership(lease)
        self._manager = manager = Manager(coordinator, clock=clock)
        dialer = pool.new_dialer(process, clock)
        self._keeper = keeper = ShardFailover(
            lambda: coordinator.pool_map,
            partial(change, coordinator),
            clock,
            lambda: pool.secret,
            lambda: leadership,
            has_records=partial(has_records, dialer, clock),
        )
        shards = MetaShards(
            None, None, 0, _Leads(coordinator, manager), dialer, start=lambda: None, clock=clock
        )
        for work in (manager.run(), keeper.run(), shards.run(), self._look(coordinator, manager)):
            pool.own(process, work)
        await SimulatedTransport(pool.network, name, clock).listen(
            self.endpoints(0)[0],
            Greeting(name, pool.first_map.fingerprint),
            partial(self._answer, process, coordinator),
        )

    @staticmethod
    async def _look(coordinator: MapCoordinator, manager: Manager) -> None:
        epoch = -1
        while True:
            newest = await coordinator.watch(epoch, FOLLOW_S)
            if newest is not None:
                epoch = newest.epoch
                manager.look()

    def _answer(self, process: Process, coordinator: MapCoordinator, call: Call) -> None:
        if call.method == wire_pb2.POOL_ALIVE:
            call.reply(
                self._manager.alive(pool_pb2.AliveRequest.FromString(bytes(call.message))).SerializeToString()
            )
        elif call.method in ShardFailover.METHODS:
            self._pool.own(process, self._answer_member(self._keeper, call))
        else:
            self._pool.own(process, answer_map(coordinator, call))

    @staticmethod
    async def _answer_member(keeper: ShardFailover, call: Call) -> None:
        try:
            call.reply(await keeper.answer(call.method, bytes(call.message)))
        except NvpoolError as error:
            call.fail(error)

    @property
    def _lives(self) -> bool:
        return self._pool.processes[self.NAME].alive

    async def change(self, decide: Decide, node: int = 0) -> PoolMap:
        if not self._lives:
            await self.start(self.NAME)
        return await change(self._coordinator, decide)

    def target_died(self, process: Process, target: int, pid: int) -> None:
        if self._lives and not self._pool.network.is_cut(process.name, self.NAME):
            self._manager.died({target: pid})

    def member_ended(self, node: int, shard: int, member: int) -> None:
        if self._lives:
            self._keeper.member_ended(shard, member)

    def power_lost(self, name: str) -> None:
        self._kv.crash()

    def close(self) -> None:
        pass


class _Supervisor:
    """Objects of one supervisor, made once etcd has answered."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ready = asyncio.Event()
        self.coordinator: EtcdCoordinator | None = None
        self.leading: Leading | None = None
        self.keeper: ShardFailover | None = None


class Supervisors:
    """Processes "supervisor-N", one on each node, and "etcd-N", three on the first nodes or on their own."""

    def __init__(self, pool: ManagedPool, nodes: int) -> None:
        self._pool = pool
        self._nodes = nodes
        self._apart = pool.chance.random() < 0.5
        self._supervisors: dict[int, _Supervisor] = {}
        self._etcd = SimEtcd(pool.loop, pool.network, f"{pool.seed} etcd", self._put)
        self._newest: tuple[bytes, PoolMap] | None = None
        self._key = b""

    @property
    def pool_map(self) -> PoolMap:
        return self._newest[1] if self._newest is not None else self._pool.first_map

    def _put(self, key: bytes, value: bytes) -> None:
        if key == self._key:
            self._newest = value, decode_map(value)
            self._pool.invariants.map_is(self._newest[1])

    def endpoints(self, node: int) -> tuple[str, ...]:
        return supervisor_endpoints(self._pool.directory, node)

    async def begin(self, first_map: PoolMap) -> None:
        self._key = b"nvpool/" + first_map.pool_id.encode() + b"/map"
        self._etcd.put(self._key, encode_map(first_map))
        for number in range(1, MEMBERS + 1):
            await self.start(f"etcd-{number}")
        self._etcd.start()
        for node in range(1, self._nodes + 1):
            await self.start(f"supervisor-{node}")
        for supervisor in self._supervisors.values():
            await supervisor.ready.wait()

    async def start(self, name: str) -> None:
        role, _, number = name.partition("-")
        if role == "etcd":
            place = f"node-of-{name}" if self._apart else f"node-{(int(number) - 1) % self._nodes + 1}"
            self._etcd.members[name] = self._pool.process(name, place)
            return
        process = self._pool.process(name, f"node-{number}")
        self._supervisors[int(number)] = supervisor = _Supervisor(process)
        self._pool.own(process, self._run(supervisor, int(number)))

    async def _run(self, supervisor: _Supervisor, node: int) -> None:
        """Run a supervisor as node/supervisor does."""
        pool, process = self._pool, supervisor.process
        clock = pool.new_clock(process.name)
        dialer = pool.new_dialer(process, clock)
        coordinator = None
        while coordinator is None:
            with suppress(Unavailable):
                coordinator = await EtcdCoordinator.over(
                    SimCalls(self._etcd, process, clock), pool.first_map.pool_id, clock=clock, only=str(node)
                )
        supervisor.coordinator = coordinator
        supervisor.leading = leading = Leading(
            coordinator, node, dialer, lambda target: pool.pid_of(target, node), clock=clock
        )
        supervisor.keeper = keeper = ShardFailover(
            lambda: coordinator.pool_map,
            leading.change_as_leader,
            clock,
            lambda: pool.secret,
            lambda: leading.leadership,
            change_anywhere=leading.change,
            has_records=partial(has_records, dialer, clock),
        )
        shards = MetaShards(None, None, node, leading, dialer, start=lambda: None, clock=clock)
        for work in (leading.run(), keeper.run(), shards.run()):
            pool.own(process, work)
        transports, greeting = (
            transports_of(pool.network, process.name, clock),
            Greeting(process.name, pool.first_map.fingerprint),
        )
        for endpoint in self.endpoints(node):
            await transports[endpoint.partition(":")[0]].listen(
                endpoint, greeting, ProcessHandler(process, partial(self._answer, supervisor))
            )
        supervisor.ready.set()

    def _answer(self, supervisor: _Supervisor, call: Call) -> None:
        if call.method == wire_pb2.POOL_ALIVE:
            try:
                supervisor.leading.alive(call)
            except NvpoolError as error:
                call.fail(error)
        elif call.method in ShardFailover.METHODS:
            self._pool.own(supervisor.process, self._answer_member(supervisor, call))
        else:
            self._pool.own(supervisor.process, answer_map(supervisor.coordinator, call))

    @staticmethod
    async def _answer_member(supervisor: _Supervisor, call: Call) -> None:
        try:
            answer = await supervisor.leading.ask_leader(call)
            if answer is None:
                answer = await supervisor.keeper.answer(call.method, bytes(call.message))
            call.reply(answer)
        except NvpoolError as error:
            call.fail(error)

    async def change(self, decide: Decide, node: int = 0) -> PoolMap:
        pool = self._pool
        node = node or pool.chance.randint(1, self._nodes)
        if not self._supervisors[node].process.alive:
            await pool.start_again(f"supervisor-{node}")
        supervisor = self._supervisors[node]
        if not supervisor.ready.is_set():
            raise Unavailable(f"supervisor {node} does not know the map yet")
        changing = supervisor.leading.change(decide)
        return await asyncio.get_running_loop().create_task(changing, context=supervisor.process.context)

    def target_died(self, process: Process, target: int, pid: int) -> None:
        supervisor = self._supervisors[int(process.node[5:])]
        if supervisor.process.alive and supervisor.ready.is_set():
            supervisor.process.context.run(supervisor.leading.died, target, pid)

    def member_ended(self, node: int, shard: int, member: int) -> None:
        supervisor = self._supervisors[node]
        if supervisor.process.alive and supervisor.ready.is_set():
            supervisor.keeper.member_ended(shard, member)

    def power_lost(self, name: str) -> None:
        """Do nothing: what etcd has committed is durable."""

    def close(self) -> None:
        self._etcd.close()
