"""SimPool: manager, metadata, stores and clients as processes of simulated nodes, on one virtual loop.

What is real: services, clients, manager and coordinator, transport contract, formats of messages. What is simulated: time,
network, drives (the twins in memory, behind doors at which a process can die), and the supervisors that start processes and
tell the manager of deaths. Called by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import random

from nvpool.base.clock import Clock
from nvpool.base.errors import NvpoolError
from nvpool.base.units import MIB
from nvpool.client.options import ClientOptions
from nvpool.client.session import Client
from nvpool.cluster.embedded import EmbeddedCoordinator
from nvpool.cluster.manager import BEAT_S, EQUAL, Manager, change
from nvpool.kv.memory import MemoryKv
from nvpool.logic.layout import chain_of
from nvpool.logic.placement import build_table
from nvpool.logic.poolmap import (
    MAP_FORMAT,
    Drive,
    Node,
    PartitionRange,
    PoolMap,
    Settings,
    Shard,
    Target,
    decode_map,
    encode_map,
)
from nvpool.logic.transitions import restarted
from nvpool.meta.options import MetaOptions
from nvpool.meta.service import MetaService
from nvpool.store.memory import MemoryChunkStore
from nvpool.store.service import StoreService
from nvpool.store.tenure import Tenure
from nvpool.testing.sim.doors import KV_STEPS, STORE_STEPS, Door, Killed, Process
from nvpool.testing.sim.loop import VirtualClock, VirtualLoop
from nvpool.testing.sim.network import Network, SimTransport
from nvpool.wire.dial import Dialer
from nvpool.wire.transport import Call, Greeting
from nvpool.wire.v1 import pool_pb2, wire_pb2

SHARD = 1
CHUNK_BYTES = 64 * 1024
MANAGER = ("inproc://manager",)
FOLLOW_S = 2.0
TOLD_S = 0.3
"""After which a supervisor has told of a death, where it reaches the manager."""


class SimPool:
    """`targets` stores on as many nodes, the shard on node 1, the manager and each client on nodes of their own. Use as an
    async context."""

    def __init__(self, loop: VirtualLoop, seed: str, *, targets: int = 3, replicas: int = 1,
                 options: ClientOptions | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.replicas = replicas
        self.chance = random.Random(f"{seed} faults")
        self.network = Network(loop, f"{seed} network")
        self._clocks = 0
        self.clock = self._clock("pool")
        self.secret = bytes(range(32))
        self.failures: list[str] = []
        self.processes: dict[str, Process] = {}
        self.stores = {number: MemoryChunkStore(64 * MIB) for number in range(1, targets + 1)}
        self.kv = MemoryKv()
        self.map_kv = MemoryKv()
        self.first_map = self._first_map(targets)
        self.coordinator: EmbeddedCoordinator | None = None
        self.manager: Manager | None = None
        self._newest: tuple[bytes, PoolMap | None] = b"", None
        self._services: dict[str, MetaService | StoreService] = {}
        self._tasks: dict[str, list[asyncio.Task]] = {}
        self._pids: dict[int, int] = {}
        self._clients: dict[str, Client] = {}
        self._dialers: dict[str, Dialer] = {}
        self._ending: set[asyncio.Task] = set()
        self._options = options or ClientOptions(deadline_s=30.0, transport="inproc", short_cut=False)
        loop.set_exception_handler(self._went_wrong)

    def _first_map(self, count: int) -> PoolMap:
        nodes = tuple(Node(number, f"node-{number}", f"host-{number}", MANAGER) for number in range(1, count + 1))
        drives = tuple(Drive(number, number, f"memory-{number}", 64 * MIB) for number in range(1, count + 1))
        targets = tuple(Target(number, number, number, 64 * MIB, (f"inproc://target-{number}",))
                        for number in range(1, count + 1))
        tables = tuple(build_table(targets, number) for number in range(1, self.replicas + 1))
        return PoolMap(format=MAP_FORMAT, pool_id="simulated", name="simulated", epoch=1,
                       settings=Settings(CHUNK_BYTES, self.replicas), nodes=nodes, drives=drives, targets=targets,
                       tables=tables, shards=(Shard(SHARD, 1, (f"inproc://meta-{SHARD}",)),),
                       partitions=(PartitionRange(0, 4096, SHARD),))

    @property
    def pool_map(self) -> PoolMap:
        return self.coordinator.pool_map if self.coordinator is not None else self.first_map

    def _went_wrong(self, loop, context: dict) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.failures.append(f"{context.get('message')}: {error!r}")

    def _clock(self, name: str) -> Clock:
        """A process that is started again draws other numbers; its node's clock is as wrong as before."""
        self._clocks += 1
        return VirtualClock(self.loop, f"{self.seed} {name} {self._clocks}",
                            random.Random(f"{self.seed} {name}").uniform(-0.5, 0.5))

    def _dialer(self, process: Process, clock: Clock) -> Dialer:
        old = self._dialers.pop(process.name, None)
        if old is not None:
            self._later(old.close())
        transport = SimTransport(self.network, process.name, clock)
        self._dialers[process.name] = Dialer(Greeting(process.name, self.first_map.fingerprint), clock=clock,
                                             transports={"inproc": transport})
        return self._dialers[process.name]

    def _process(self, name: str, node: str) -> Process:
        self.network.places[name] = node
        self.processes[name] = process = Process(name, node, self._died)
        return process

    def _disk_s(self) -> float:
        return self.chance.uniform(0.0001, 0.003)

    def _later(self, work) -> None:
        task = self.loop.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), Killed):
            self.failures.append(f"ending a process: {task.exception()!r}")

    # -- life

    async def __aenter__(self) -> SimPool:
        await self.start_manager()
        for number in self.stores:
            await self.start_store(number)
        await self.start_shard()
        return self

    async def __aexit__(self, *_) -> None:
        for client in self._clients.values():
            await client.close()
        for name in sorted(self.processes, key=lambda name: name == "manager"):
            if self.processes[name].alive and not name.startswith("client") and name != "judge":
                self.processes[name].kill()
        while self._ending:
            await asyncio.wait(list(self._ending))
        for dialer in self._dialers.values():
            await dialer.close()

    async def start_manager(self) -> None:
        process = self._process("manager", "node-of-manager")
        clock = self._clock(process.name)
        kv = Door(self.map_kv, process, KV_STEPS, self._disk_s)
        try:
            self.coordinator = await (EmbeddedCoordinator.open(kv) if self.map_kv.get(b"map") is not None
                                      else EmbeddedCoordinator.found(kv, self.first_map))
        except Killed:
            return
        self.manager = manager = Manager(self.coordinator, clock=clock)
        self._own(process, manager.run())
        self._own(process, self._look(self.coordinator, manager))
        transport = SimTransport(self.network, process.name, clock)
        await transport.listen(MANAGER[0], Greeting("manager", self.first_map.fingerprint),
                               lambda call: self._answer(process, manager, call))

    @staticmethod
    async def _look(coordinator: EmbeddedCoordinator, manager: Manager) -> None:
        epoch = -1
        while True:
            newest = await coordinator.watch(epoch, FOLLOW_S)
            if newest is not None:
                epoch = newest.epoch
                manager.look()

    def _answer(self, process: Process, manager: Manager, call: Call) -> None:
        if call.method == wire_pb2.POOL_ALIVE:
            call.reply(manager.alive(pool_pb2.AliveRequest.FromString(bytes(call.message))).SerializeToString())
        else:
            self._own(process, self._answer_map(manager, call))

    async def _answer_map(self, manager: Manager, call: Call) -> None:
        request = pool_pb2.MapRequest.FromString(bytes(call.message))
        newest = await manager._coordinator.watch(request.newer_than, min(request.wait_s, FOLLOW_S))
        call.reply(pool_pb2.MapReply(map=encode_map(newest) if newest is not None else b"").SerializeToString())

    def _own(self, process: Process, work) -> None:
        tasks = self._tasks.setdefault(process.name, [])
        tasks[:] = [task for task in tasks if not task.done()]
        tasks.append(self.loop.create_task(work))

    async def start_store(self, number: int) -> None:
        """As a supervisor does: its chains have the next epoch before it serves. A manager that is dead is started first."""
        while not await self._restarted(number):  # noqa: ASYNC110 - a supervisor tries again, too
            await asyncio.sleep(0.05)
        process = self._process(f"target-{number}", f"node-{number}")
        clock = self._clock(process.name)
        dialer = self._dialer(process, clock)
        tenure = Tenure(number, clock)
        self._pids[number] = self._clocks
        asked = asyncio.Event()
        service = StoreService(Door(self.stores[number], process, STORE_STEPS, self._disk_s), target=number,
                               grant_secret=self.secret, clock=clock, dialer=dialer, refresh_map=asked.set, tenure=tenure)
        await self._serve(process, clock, service, f"inproc://target-{number}")
        self._own(process, self._beat(number, service, tenure, dialer, clock, self._pids[number]))
        self._own(process, self._follow(service, dialer, clock, asked))

    async def _restarted(self, number: int) -> bool:
        if not self.processes["manager"].alive:
            await self.start_manager()
        try:
            await change(self.coordinator, lambda pool_map: restarted(pool_map, number))
        except (Killed, NvpoolError):
            return False
        return True

    async def _beat(self, number: int, service: StoreService, tenure: Tenure, dialer: Dialer, clock: Clock, pid: int) -> None:
        """As run/beating does."""
        while True:
            sent_s = clock.boottime_s()
            equal = service.upkeep.resync.equal
            request = pool_pb2.AliveRequest(target=number, pid=pid, epoch=tenure.epoch,
                                            equal=b"".join([EQUAL.pack(*chain, epoch) for chain, epoch in equal.items()]))
            try:
                reply = await dialer.call(MANAGER, wire_pb2.POOL_ALIVE, request.SerializeToString(), deadline_s=sent_s + 1.0)
                answer = pool_pb2.AliveReply.FromString(bytes(reply.message))
                tenure.renewed(sent_s, answer.lease_s, answer.epoch_min)
            except NvpoolError:
                pass
            await asyncio.sleep(max(0.05, sent_s + BEAT_S - clock.boottime_s()))

    async def _follow(self, service, dialer: Dialer, clock: Clock, asked: asyncio.Event) -> None:
        epoch = 0
        while True:
            request = pool_pb2.MapRequest(newer_than=epoch, wait_s=FOLLOW_S)
            try:
                reply = await dialer.call(MANAGER, wire_pb2.POOL_MAP, request.SerializeToString(),
                                          deadline_s=clock.boottime_s() + FOLLOW_S + 1.0)
                raw = pool_pb2.MapReply.FromString(bytes(reply.message)).map
                if raw:
                    newest = self._decoded(raw)
                    epoch = newest.epoch
                    service.update_map(newest)
            except NvpoolError:
                await asyncio.sleep(0.2)
            asked.clear()

    def _decoded(self, raw: bytes) -> PoolMap:
        """One map for all processes, as a value that nobody edits may be."""
        if self._newest[0] != raw:
            self._newest = raw, decode_map(raw)
        return self._newest[1]

    async def start_shard(self) -> None:
        process = self._process(f"meta-{SHARD}", "node-1")
        clock = self._clock(process.name)
        dialer = self._dialer(process, clock)
        service = MetaService(Door(self.kv, process, KV_STEPS, self._disk_s), shard=SHARD, grant_secret=self.secret,
                              dialer=dialer, clock=clock, options=MetaOptions(tick_s=0.5))
        await self._serve(process, clock, service, f"inproc://meta-{SHARD}")
        self._own(process, self._follow(service, dialer, clock, asyncio.Event()))

    async def _serve(self, process: Process, clock: Clock, service, endpoint: str) -> None:
        self._services[process.name] = service
        service.update_map(self.pool_map)
        try:
            await service.start()
            greeting = Greeting(process.name, self.first_map.fingerprint)
            await SimTransport(self.network, process.name, clock).listen(endpoint, greeting, service.handle)
        except Killed:
            pass  # it died while it started

    async def client(self, name: str) -> Client:
        process = self._process(name, f"node-of-{name}")
        clock = self._clock(name)
        client = await Client.open(self.pool_map, name, self._options, clock=clock, dialer=self._dialer(process, clock))
        self._clients[name] = client
        return client

    # -- faults

    def _died(self, process: Process) -> None:
        self.network.hang_up(process.name)
        for task in self._tasks.pop(process.name, ()):
            task.cancel()
        service = self._services.pop(process.name, None)
        if service is not None:
            self._later(self._bury(service))
        if process.name.startswith("target-"):
            number = int(process.name[7:])
            self.loop.call_later(self.chance.uniform(0.0, TOLD_S), self._tell_of_death, process, number, self._pids[number])

    def _tell_of_death(self, process: Process, number: int, pid: int) -> None:
        """Who is cut off, or finds no manager, can not tell; then the lease does."""
        if self.processes["manager"].alive and not self.network.is_cut(process.name, "manager"):
            self.manager.died({number: pid})

    async def _bury(self, service) -> None:
        try:
            await service.close(0.0)
        except Killed:
            pass

    async def start_again(self, name: str) -> None:
        role, _, number = name.partition("-")
        if role == "manager":
            await self.start_manager()
        else:
            await (self.start_shard() if role == "meta" else self.start_store(int(number)))

    # -- looking

    def is_whole(self) -> bool:
        """Whether each chain has all its copies, and nobody is on the way."""
        return all(len(chain.targets) == min(table.id, len(self.stores)) and not chain.joining and not chain.leaving
                   for table in self.pool_map.tables for chain in table.chains)

    def replica_problems(self) -> list[str]:
        """Which chunks are not the same on all targets of their chain, or are where they do not belong; when all is quiet."""
        problems = []
        pool_map = self.pool_map
        for (inode, index), table in sorted({(name, chunk.table or 1) for store in self.stores.values()
                                             for name, chunk in store._chunks.items()}):
            targets = pool_map.chain(table, chain_of(inode, index)).targets
            held = {target: self.stores[target]._chunks.get((inode, index)) for target in targets}
            kinds = {None if chunk is None else (chunk.version, tuple(sorted(chunk.blocks.items()))) for chunk in held.values()}
            if len(kinds) > 1:
                said = {target: None if chunk is None else f"{chunk.version:#x}" for target, chunk in held.items()}
                problems.append(f"chunk {index} of inode {inode:#x} differs over its targets: {said}")
        return problems
