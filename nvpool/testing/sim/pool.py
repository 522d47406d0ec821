"""SimPool: metadata, stores and clients as processes of simulated nodes, on one virtual loop.

What is real: services, clients, transport contract, formats of messages. What is simulated: time, network, drives (the twins in
memory, behind doors at which a process can die) and who tells of the pool map. Called by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import random

from nvpool.base.clock import Clock
from nvpool.base.units import MIB
from nvpool.client.options import ClientOptions
from nvpool.client.session import Client
from nvpool.kv.memory import MemoryKv
from nvpool.logic.placement import build_table
from nvpool.logic.poolmap import MAP_FORMAT, Drive, Node, PartitionRange, PoolMap, Settings, Shard, Target
from nvpool.meta.options import MetaOptions
from nvpool.meta.service import MetaService
from nvpool.store.memory import MemoryChunkStore
from nvpool.store.service import StoreService
from nvpool.testing.sim.doors import KV_STEPS, STORE_STEPS, Door, Killed, Process
from nvpool.testing.sim.loop import VirtualClock, VirtualLoop
from nvpool.testing.sim.network import Network, SimTransport
from nvpool.wire.dial import Dialer
from nvpool.wire.transport import Greeting

SHARD = 1
CHUNK_BYTES = 64 * 1024


class SimPool:
    """`targets` stores on as many nodes, the shard on node 1, each client on a node of its own. Use as an async context."""

    def __init__(self, loop: VirtualLoop, seed: str, *, targets: int = 3, options: ClientOptions | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.chance = random.Random(f"{seed} faults")
        self.network = Network(loop, f"{seed} network")
        self._clocks = 0
        self.clock = self._clock("pool")
        self.secret = bytes(range(32))
        self.failures: list[str] = []
        self.processes: dict[str, Process] = {}
        self.stores = {number: MemoryChunkStore(64 * MIB) for number in range(1, targets + 1)}
        self.kv = MemoryKv()
        self.pool_map = self._first_map(targets)
        self._services: dict[str, MetaService | StoreService] = {}
        self._clients: dict[str, Client] = {}
        self._dialers: dict[str, Dialer] = {}
        self._ending: set[asyncio.Task] = set()
        self._options = options or ClientOptions(deadline_s=30.0, transport="inproc", short_cut=False)
        loop.set_exception_handler(self._went_wrong)

    def _first_map(self, count: int) -> PoolMap:
        nodes = tuple(Node(number, f"node-{number}", f"host-{number}", ()) for number in range(1, count + 1))
        drives = tuple(Drive(number, number, f"memory-{number}", 64 * MIB) for number in range(1, count + 1))
        targets = tuple(Target(number, number, number, 64 * MIB, (f"inproc://target-{number}",))
                        for number in range(1, count + 1))
        return PoolMap(format=MAP_FORMAT, pool_id="simulated", name="simulated", epoch=1, settings=Settings(CHUNK_BYTES, 1),
                       nodes=nodes, drives=drives, targets=targets, tables=(build_table(targets, 1),),
                       shards=(Shard(SHARD, 1, (f"inproc://meta-{SHARD}",)),), partitions=(PartitionRange(0, 4096, SHARD),))

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
        self._dialers[process.name] = Dialer(Greeting(process.name, self.pool_map.fingerprint), clock=clock,
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
        for number in self.stores:
            await self.start_store(number)
        await self.start_shard()
        return self

    async def __aexit__(self, *_) -> None:
        for client in self._clients.values():
            await client.close()
        for name in [name for name, process in self.processes.items() if process.alive and name in self._services]:
            self.processes[name].kill()
        while self._ending:
            await asyncio.wait(list(self._ending))
        for dialer in self._dialers.values():
            await dialer.close()

    async def start_store(self, number: int) -> None:
        process = self._process(f"target-{number}", f"node-{number}")
        clock = self._clock(process.name)
        service = StoreService(Door(self.stores[number], process, STORE_STEPS, self._disk_s), target=number,
                               grant_secret=self.secret, clock=clock)
        await self._serve(process, clock, service, f"inproc://target-{number}")

    async def start_shard(self) -> None:
        process = self._process(f"meta-{SHARD}", "node-1")
        clock = self._clock(process.name)
        service = MetaService(Door(self.kv, process, KV_STEPS, self._disk_s), shard=SHARD, grant_secret=self.secret,
                              dialer=self._dialer(process, clock), clock=clock, options=MetaOptions(tick_s=0.5))
        await self._serve(process, clock, service, f"inproc://meta-{SHARD}")

    async def _serve(self, process: Process, clock: Clock, service, endpoint: str) -> None:
        self._services[process.name] = service
        service.update_map(self.pool_map)
        try:
            await service.start()
            greeting = Greeting(process.name, self.pool_map.fingerprint)
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
        service = self._services.pop(process.name, None)
        if service is not None:
            self._later(self._bury(service))

    async def _bury(self, service) -> None:
        try:
            await service.close(0.0)
        except Killed:
            pass

    async def start_again(self, name: str) -> None:
        role, _, number = name.partition("-")
        await (self.start_shard() if role == "meta" else self.start_store(int(number)))
