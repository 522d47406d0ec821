"""SimPool: management, metadata, stores and clients as processes of simulated nodes, on one virtual loop.

Services, clients, management (`sim/control_plane`), block stores, members of shards, the engines of both (on
files in a directory in memory), and connections with their frames and fast paths are real. Time, the byte
streams of the network, etcd, the drives of stores (`sim/drive`), and the start and the monitoring of processes
are simulated. Used by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.cluster.chain_manager import BEAT_S, EQUAL
from nvpool.core.clock import Clock
from nvpool.core.errors import Bug, Damaged, Fenced, NvpoolError, Unavailable
from nvpool.core.units import MIB
from nvpool.meta.options import MetaOptions
from nvpool.meta.server.service import MetaService
from nvpool.meta.server.shard_member import MemberOptions, ShardMember
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.chains.transitions import restarted
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Drive,
    Node,
    PoolMap,
    PoolSettings,
    Shard,
    StandbyMember,
    Target,
    decode_map,
)
from nvpool.poolmap.shards import partition_moves
from nvpool.poolmap.shards.members import dealt, node_and_path, process_name
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.lease_renewal import LeaseCalls
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.security.tls import PLAIN_TEXT
from nvpool.shm.mount_state import KeptMemory
from nvpool.store.replication.reachability import ReachabilityProbe
from nvpool.store.server.service import StoreService
from nvpool.store.server.serving_lease import ServingLease
from nvpool.testing.sim.control_plane import FOLLOW_S, ControlPlane, OneManager, Supervisors, until_changed
from nvpool.testing.sim.invariants import Invariants
from nvpool.testing.sim.network import SimulatedNetwork
from nvpool.testing.sim.shard_members import (
    MemberDrive,
    OverheardMember,
    SimulatedEngineRuntime,
    bury,
    engine_options,
    make_primary,
)
from nvpool.testing.sim.simulated_process import Killed, Process, ProcessHandler, is_death
from nvpool.testing.sim.stores import SimulatedStore
from nvpool.testing.sim.stream_transport import (
    SimulatedTransport,
    endpoint_of,
    host_of,
    member_of,
    transports_of,
)
from nvpool.testing.sim.virtual_time_loop import VirtualClock, VirtualLoop

CHUNK_BYTES = 64 * 1024
MOUNT_STATE_BYTES = 16 * MIB
"""Memory for unstored writes of each client, as of a mount."""
CAPACITY_BYTES = 64 * MIB
"""Capacity of each drive; its blocks take memory only when they are written."""
MANAGING = ("manager", "supervisor", "etcd")
"""Name prefixes of the processes that `managing` starts."""
ENDS_S = 5.0
"""Time in which the remaining work of killed processes reaches its next step."""
SWEEP_S = 45.0
"""An hour in production: the sweep must remove chunks that a power loss brought back within a simulation."""
REPORT_S = 0.3
"""Time in which a supervisor has reported a death, if it reaches the manager."""


def _shard(number: int, standbys: int, nodes: int) -> Shard:
    """Return a shard whose members are on different nodes, as far as there are enough."""

    def place(member: int) -> tuple[int, tuple[str, ...]]:
        return (number + member - 1) % nodes + 1, (endpoint_of(process_name(number, member)),)

    return Shard(
        number,
        *place(0),
        standbys=tuple(StandbyMember(member, *place(member), "syncing") for member in range(1, standbys + 1)),
    )


class SimPool:
    """A simulated pool, used as an async context manager.

    It has `targets` stores on as many nodes, the members of the shards on these nodes, and each client on its
    own node. The manager has its own node too, or, with `etcd`, supervisors run on the nodes of the targets,
    with etcd's members.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: str,
        *,
        targets: int = 3,
        replicas: int = 1,
        standbys: int = 0,
        shards: int = 1,
        options: ClientOptions | None = None,
        durability: str = "interval",
        etcd: bool = False,
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.replicas = replicas
        self.chance = random.Random(f"{seed} faults")
        self.network = SimulatedNetwork(loop, f"{seed} network")
        self._clocks = 0
        self.clock = self.new_clock("pool")
        self.secret = bytes(range(32))
        self.failures: list[str] = []
        self.processes: dict[str, Process] = {}
        self.invariants = Invariants()
        self.power_losses: list[float] = []
        self._standbys = standbys
        self._durability = durability
        memory = Path("/dev/shm")
        self._directory = Path(
            tempfile.mkdtemp(prefix="nvpool-sim-", dir=memory if memory.is_dir() else None)
        )
        self.stores = {
            number: SimulatedStore(loop, number, self._directory, CAPACITY_BYTES, seed)
            for number in range(1, targets + 1)
        }
        self.drives = {
            (shard, member): MemberDrive(self._directory / process_name(shard, member))
            for shard in range(1, shards + 1)
            for member in range(standbys + 1)
        }
        self.managing: ControlPlane = Supervisors(self, targets) if etcd else OneManager(self)
        self.first_map = self._first_map(targets, standbys, shards)
        self._starting: dict[str, asyncio.Task] = {}
        self._burials: dict[str, asyncio.Task] = {}
        self._members: dict[str, ShardMember] = {}
        self._member_of = {process_name(*place): place for place in self.drives}
        self.closing = False
        self._newest: tuple[bytes, PoolMap | None] = b"", None
        self._services: dict[str, StoreService] = {}
        self._tasks: dict[str, list[asyncio.Task]] = {}
        self._pids: dict[int, int] = {}
        self._clients: dict[str, Client] = {}
        self._mount_states: dict[str, int] = {}
        self._dialers: dict[str, Dialer] = {}
        self._ending: set[asyncio.Task] = set()
        self._options = options or ClientOptions(deadline_s=30.0, transport="stream", short_circuit=False)
        loop.set_exception_handler(self._went_wrong)

    def _first_map(self, count: int, standbys: int, shards: int) -> PoolMap:
        nodes = tuple(
            Node(
                number,
                f"node-{number}",
                f"host-{number}",
                self.managing.endpoints(number),
                member=member_of(f"node-{number}"),
            )
            for number in range(1, count + 1)
        )
        drives = tuple(
            Drive(number, number, f"memory-{number}", CAPACITY_BYTES) for number in range(1, count + 1)
        )
        targets = tuple(
            Target(number, number, number, CAPACITY_BYTES, (endpoint_of(f"target-{number}"),))
            for number in range(1, count + 1)
        )
        tables = tuple(build_table(targets, number) for number in range(1, self.replicas + 1))
        all_shards = tuple(_shard(number, standbys, count) for number in range(1, shards + 1))
        return PoolMap(
            format=MAP_FORMAT,
            pool_id="simulated",
            name="simulated",
            epoch=1,
            settings=PoolSettings(CHUNK_BYTES, self.replicas),
            nodes=nodes,
            drives=drives,
            targets=targets,
            tables=tables,
            shards=all_shards,
            partitions=dealt(shards),
        )

    @property
    def pool_map(self) -> PoolMap:
        return self.managing.pool_map

    @property
    def directory(self) -> Path:
        """Directory in memory for the files of this pool."""
        return self._directory

    def _went_wrong(self, loop, context: dict) -> None:
        error = context.get("exception")
        if not is_death(error):
            work = context.get("task") or context.get("future")
            of = f" of {work.get_coro().__qualname__}" if isinstance(work, asyncio.Task) else ""
            self.failures.append(f"{context.get('message')}{of}: {error!r}")

    def new_clock(self, name: str) -> Clock:
        """Return a clock for a process.

        A process that is started again draws other numbers; the error of its node's clock stays the same.
        """
        self._clocks += 1
        return VirtualClock(
            self.loop,
            f"{self.seed} {name} {self._clocks}",
            random.Random(f"{self.seed} {name}").uniform(-0.5, 0.5),
        )

    def new_dialer(self, process: Process, clock: Clock) -> Dialer:
        old = self._dialers.pop(process.name, None)
        if old is not None:
            self._later(old.close())
        self._dialers[process.name] = self._another_dialer(process, clock)
        return self._dialers[process.name]

    def _another_dialer(self, process: Process, clock: Clock) -> Dialer:
        return Dialer(
            Greeting(process.name, self.first_map.fingerprint, identity=PLAIN_TEXT),
            clock=clock,
            host_id=host_of(process.node),
            transports=transports_of(self.network, process.name, clock),
        )

    def process(self, name: str, node: str) -> Process:
        self.network.places[name] = node
        self.processes[name] = process = Process(self.loop, name, node, self._died)
        self.network.contexts[name] = process.context
        return process

    def pid_of(self, target: int, node: int) -> int | None:
        """Return the pid of a target's process on that node; None if the target is on another node."""
        return self._pids.get(target, 0) if target == node else None

    def disk_s(self) -> float:
        return self.chance.uniform(0.0001, 0.003)

    def _later(self, work) -> asyncio.Task:
        task = self.loop.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None and not is_death(task.exception()):
            self.failures.append(f"ending a process: {task.exception()!r}")

    # -- start and stop

    async def __aenter__(self) -> SimPool:
        await self.managing.begin(self.first_map)
        for number in self.stores:
            await self.start_store(number)
        for shard, member in self.drives:
            await self._make_member(shard, member)
            await self.start_member(shard, member)
        return self

    async def __aexit__(self, *_) -> None:
        for client in self._clients.values():
            await client.close()
        for descriptor in self._mount_states.values():
            os.close(descriptor)
        for name in sorted(self.processes, key=lambda name: name.startswith(MANAGING)):
            if self.processes[name].alive and not name.startswith("client") and name != "judge":
                self.processes[name].kill()
        self.closing = True
        self.managing.close()
        while self._ending:
            await asyncio.wait(list(self._ending))
        for dialer in self._dialers.values():
            await dialer.close()
        await asyncio.sleep(ENDS_S)
        shutil.rmtree(self._directory)

    def own(self, process: Process, work) -> asyncio.Task:
        tasks = self._tasks.setdefault(process.name, [])
        tasks[:] = [task for task in tasks if not task.done()]
        tasks.append(self.loop.create_task(work, context=process.context))
        return tasks[-1]

    async def start_store(self, number: int) -> None:
        """Start a store as a supervisor does: its chains get the next epoch before it serves.

        A dead supervisor is started first.
        """
        while not await self._restarted(number):  # noqa: ASYNC110 - a supervisor retries, too
            await asyncio.sleep(0.05)
        while (burial := self._burials.pop(f"target-{number}", None)) is not None:  # power was lost meanwhile
            await asyncio.wait([burial])
        process = self.process(f"target-{number}", f"node-{number}")
        clock = self.new_clock(process.name)
        self._pids[number] = self._clocks
        await asyncio.wait([self.own(process, self._run_store(process, number, clock))])

    async def _run_store(self, process: Process, number: int, clock: Clock) -> None:
        """Open a store and serve it as daemons/store does. Returns when it serves, or when it cannot."""
        dialer = self.new_dialer(process, clock)
        try:
            store = await self.stores[number].open(process, clock, partial(self._ends, process))
        except Killed:
            return
        except NvpoolError as error:
            if isinstance(error, (Damaged, Bug)):
                self.failures.append(f"{process.name} cannot begin: {error!r}")
            self._ends(process, str(error))
            return
        serving_lease = ServingLease(number, clock, store.location_leases, verifier=store.verifier)
        asked = asyncio.Event()
        service = StoreService(
            store,
            target=number,
            grant_secret=self.secret,
            clock=clock,
            dialer=dialer,
            refresh_map=asked.set,
            serving_lease=serving_lease,
        )
        await self._serve(process, clock, service, endpoint_of(process.name))
        if not process.alive:
            return
        reach = ReachabilityProbe(
            service.replica.peers, self._another_dialer(process, clock), clock, on_change=lambda: None
        )
        self.own(process, reach.run())
        self.own(
            process, self._beat(number, service, serving_lease, dialer, clock, self._pids[number], reach)
        )
        self.own(process, self._follow(process, service, dialer, clock, asked))

    async def _restarted(self, number: int) -> bool:
        try:
            await self.managing.change(lambda pool_map: restarted(pool_map, number), number)
        except (Killed, NvpoolError):
            return False
        return True

    async def _beat(
        self,
        number: int,
        service: StoreService,
        serving_lease: ServingLease,
        dialer: Dialer,
        clock: Clock,
        pid: int,
        reach: ReachabilityProbe,
    ) -> None:
        """Send heartbeats as daemons/store_heartbeat does."""
        endpoints, calls = self.managing.endpoints(number), LeaseCalls(dialer, clock)
        while True:
            sent_s = clock.boottime_s()
            equal = service.upkeep.resync.equal
            request = pool_pb2.AliveRequest(
                target=number,
                pid=pid,
                epoch=serving_lease.epoch,
                verifier=serving_lease.verifier,
                unreachable=sorted(reach.unreachable),
                equal=b"".join([EQUAL.pack(*chain, epoch) for chain, epoch in equal.items()]),
            )
            try:
                reply = await calls.call(
                    endpoints, wire_pb2.POOL_ALIVE, request.SerializeToString(), deadline_s=sent_s + 1.0
                )
                answer = pool_pb2.AliveReply.FromString(bytes(reply.message))
                serving_lease.renewed(sent_s, answer.lease_s, answer.epoch_min, answer.epoch)
            except NvpoolError:
                pass
            await asyncio.sleep(max(0.05, sent_s + BEAT_S - clock.boottime_s()))

    async def _follow(
        self, process: Process, service, dialer: Dialer, clock: Clock, asked: asyncio.Event
    ) -> None:
        epoch, endpoints = 0, self.managing.endpoints(int(process.node[5:]))
        while True:
            request = pool_pb2.MapRequest(newer_than=epoch, wait_s=FOLLOW_S)
            try:
                reply = await dialer.call(
                    endpoints,
                    wire_pb2.POOL_MAP,
                    request.SerializeToString(),
                    deadline_s=clock.boottime_s() + FOLLOW_S + 1.0,
                )
                raw = pool_pb2.MapReply.FromString(bytes(reply.message)).map
                if raw:
                    newest = self._decoded(raw)
                    self.invariants.followed(process.name, epoch, newest.epoch)
                    epoch = newest.epoch
                    service.update_map(newest)
            except NvpoolError:
                await asyncio.sleep(0.2)
            asked.clear()

    def _decoded(self, raw: bytes) -> PoolMap:
        """Return one map object for all processes: the map is immutable."""
        if self._newest[0] != raw:
            self._newest = raw, decode_map(raw)
        return self._newest[1]

    async def add_shard(self) -> int:
        """Add a shard with as many standbys as the others, and return its number. Partitions begin to move to
        it."""
        number = partition_moves.shards_given(self.pool_map) + 1
        new = _shard(number, self._standbys, len(self.stores))
        for member in range(self._standbys + 1):
            self.drives[number, member] = MemberDrive(self._directory / process_name(number, member))
            self._member_of[process_name(number, member)] = number, member
            await self._make_member(number, member)
        await until_changed(
            self.managing,
            lambda now: now if number in now.shard_by_id else partition_moves.shard_added(now, new),
        )
        for member in range(self._standbys + 1):
            await self.start_member(number, member)
        return number

    async def _make_member(self, shard: int, member: int) -> None:
        path = self.drives[shard, member].path
        path.mkdir()
        if not member:
            process = Process(self.loop, f"making of {process_name(shard, member)}", "node-1", lambda _: None)
            floor = SimulatedEngineRuntime(self.loop, process, self.drives[shard, member], self.disk_s)
            await make_primary(path, engine_options(floor=floor))

    async def start_member(self, shard: int, member: int) -> None:
        """Start a process of the member. It serves or becomes a standby later, by itself."""
        name = process_name(shard, member)
        node, _ = node_and_path(self.pool_map.shard_by_id[shard], member)
        process = self.process(name, f"node-{node}")
        self.own(process, self._run_member(process, shard, member, node))

    async def _run_member(self, process: Process, shard: int, member: int, node: int) -> None:
        """Run a member as daemons/meta does."""
        clock = self.new_clock(process.name)
        dialer = self.new_dialer(process, clock)
        drive = self.drives[shard, member]

        def make_service(kv) -> MetaService:
            self.invariants.begins(shard, member, kv)
            self.invariants.happened(
                self.loop.time(), f"{process.name} is the primary in term {kv.term}, {kv.sequence} changes"
            )
            service = MetaService(
                kv,
                shard=shard,
                grant_secret=self.secret,
                dialer=dialer,
                clock=clock,
                options=MetaOptions(tick_s=0.5, sweep_s=SWEEP_S),
            )
            service.died.add_done_callback(partial(self._service_died, process))
            return service

        fail = partial(self._ends, process)
        engine = engine_options(
            floor=SimulatedEngineRuntime(self.loop, process, drive, self.disk_s), durability=self._durability
        )
        options = MemberOptions(node, shard, member, drive.path, engine, self.secret, mark=drive.mark)
        serving = ShardMember(options, self.pool_map, dialer, clock, make_service, fail)
        self._members[process.name] = serving
        try:
            serving.update_map(self.pool_map)
            await serving.start()
        except Killed:
            return
        except NvpoolError as error:
            if isinstance(error, (Damaged, Bug)):
                self.failures.append(f"{process.name} cannot begin: {error!r}")
            fail(str(error))
            return
        overheard = OverheardMember(serving, member, shard, self.invariants)
        await SimulatedTransport(self.network, process.name, clock).listen(
            endpoint_of(process.name),
            Greeting(process.name, self.first_map.fingerprint),
            ProcessHandler(process, overheard.handle, overheard.answer_fast),
        )
        self.own(process, self._follow(process, serving, dialer, clock, asyncio.Event()))

    def _service_died(self, process: Process, died: asyncio.Future) -> None:
        if died.cancelled() or isinstance(died.exception(), Killed):
            return
        if not isinstance(died.exception(), Fenced):
            self.failures.append(f"the service of {process.name} has stopped: {died.exception()!r}")
        self._ends(process, f"the service has stopped: {died.exception()}")

    def _ends(self, process: Process, reason: str) -> None:
        """Record that a process ends by itself, and start it again somewhat later."""
        self.invariants.happened(self.loop.time(), f"{process.name} ends: {reason}")
        if "could not be carried out" in reason and "already" in reason:
            self.invariants.violated(f"{process.name}, a healthy store, fences itself: {reason}")
        if process.alive:
            process.kill()
            self.loop.call_later(self.chance.uniform(0.1, 0.6), self._supervise, process)

    def _supervise(self, process: Process) -> None:
        if self.processes.get(process.name) is process and not self.closing:
            self._later(self.start_again(process.name))

    async def _serve(self, process: Process, clock: Clock, service, endpoint: str) -> None:
        self._services[process.name] = service
        service.update_map(self.pool_map)
        try:
            await service.start()
            greeting = Greeting(process.name, self.first_map.fingerprint)
            await SimulatedTransport(self.network, process.name, clock).listen(
                endpoint,
                greeting,
                ProcessHandler(process, service.handle, service.fast_path and service.fast_path.answer),
            )
        except Killed:
            pass  # the process died while it started

    async def client(self, name: str) -> Client:
        process = self.process(name, f"node-of-{name}")
        clock = self.new_clock(name)
        self._mount_states[name] = descriptor = KeptMemory.make(MOUNT_STATE_BYTES)
        client = await Client.open(
            self.pool_map,
            name,
            self._options,
            clock=clock,
            dialer=self.new_dialer(process, clock),
            kept=KeptMemory(descriptor),
        )
        self._clients[name] = client
        return client

    # -- faults

    def _died(self, process: Process) -> None:
        self.invariants.happened(self.loop.time(), f"{process.name} has died")
        self.network.hang_up(process.name)
        tasks = self._tasks.pop(process.name, [])
        for task in tasks:
            task.cancel()
        member = self._members.pop(process.name, None)
        if member is not None:
            self._burials[process.name] = self._later(bury(member))
        if process.name.startswith("target-"):
            number = int(process.name[7:])
            service = self._services.pop(process.name, None)
            self._burials[process.name] = self._later(self._bury_store(number, service, tasks))
            self.loop.call_later(
                self.chance.uniform(0.0, REPORT_S),
                self.managing.target_died,
                process,
                number,
                self._pids[number],
            )
        elif member is not None:
            shard, number = self._member_of[process.name]
            kv = member.kv or (member.standby and member.standby.kv)
            if kv is not None:
                self.drives[shard, number].synced_sequence = kv.synced_sequence
            # The supervisor of its node reports it before it starts another process; or nobody does, and its
            # lease ends.
            if self.chance.random() < 0.5:
                self.managing.member_ended(int(process.node[5:]), shard, number)

    async def _bury_store(self, number: int, service: StoreService | None, tasks: list[asyncio.Task]) -> None:
        if tasks:
            await asyncio.wait(tasks)
        if service is not None:
            with suppress(Killed):
                await service.close(0.0)
        await self.stores[number].abandon()

    async def start_again(self, name: str) -> None:
        """Start the process and return when it runs; do nothing if it is alive or is being started."""
        if self.processes[name].alive or name in self._starting:
            return
        self._starting[name] = asyncio.current_task()
        try:
            burial = self._burials.pop(name, None)
            if burial is not None:
                await asyncio.wait([burial])
            role, _, number = name.partition("-")
            if role in MANAGING:
                await self.managing.start(name)
            elif role == "target":
                await self.start_store(int(number))
            elif self._member_of[name][0] in self.pool_map.shard_by_id:
                await self.start_member(*self._member_of[name])
            else:
                del self.processes[name]  # its shard has left the pool
        finally:
            del self._starting[name]

    async def _lose_journal(self, name: str, burial: asyncio.Task | None) -> None:
        drive = self.drives[self._member_of[name]]
        if burial is not None:
            await asyncio.wait([burial])
        drive.lose_power(self.chance)
        self.invariants.power_lost(*self._member_of[name], drive.synced_sequence)

    async def _lose_blocks(self, number: int, burial: asyncio.Task | None) -> None:
        if burial is not None:
            await asyncio.wait([burial])
        self.stores[number].lose_power()

    def lose_power(self, nodes: set[str]) -> None:
        """End all processes of these nodes. Their drives keep what was synced, and perhaps more."""
        self.power_losses.append(self.loop.time())
        for name, process in list(self.processes.items()):
            if process.node in nodes:
                self.network.lose_power(name)
                process.kill()
                if name in self._member_of:
                    self._burials[name] = self._later(self._lose_journal(name, self._burials.get(name)))
                elif name.startswith("target-"):
                    self._burials[name] = self._later(
                        self._lose_blocks(int(name[7:]), self._burials.get(name))
                    )
                elif name.startswith(MANAGING):
                    self.managing.power_lost(name)

    # -- queries

    async def scrub(self) -> list[str]:
        """Read all blocks of all drives; bad ones are repaired later. Return the contradictions of free maps and
        indexes."""
        try:
            return [problem for store in self.stores.values() for problem in await store.scrubbed()]
        except Unavailable as error:
            return [str(error)]

    @property
    def has_lost(self) -> bool:
        """Whether any store may have lost unsynced writes."""
        return any(len(store.verifiers) > 1 for store in self.stores.values())

    def is_whole(self) -> bool:
        """Whether each chain has all its copies, and no target joins or leaves one."""
        return all(
            len(chain.targets) == min(table.id, len(self.stores)) and not chain.joining and not chain.leaving
            for table in self.pool_map.tables
            for chain in table.chains
        )

    def replica_problems(self) -> list[str]:
        """Return chunks that differ between the targets of their chain, or that are misplaced. Call it when
        all is quiet."""
        problems = []
        pool_map = self.pool_map
        try:
            chunks = {number: store.chunks() for number, store in self.stores.items()}
        except Unavailable as error:
            return [str(error)]
        for (inode, index), table in sorted(
            {(name, chunk.table or 1) for found in chunks.values() for name, chunk in found.items()}
        ):
            targets = pool_map.chain(table, chain_of(inode, index)).targets
            held = {target: chunks[target].get((inode, index)) for target in targets}
            kinds = {
                None
                if chunk is None
                else (chunk.version, tuple(sorted(self.stores[target].blocks(inode, index).items())))
                for target, chunk in held.items()
            }
            if len(kinds) > 1:
                said = {
                    target: None if chunk is None else f"{chunk.version:#x}" for target, chunk in held.items()
                }
                problems.append(f"chunk {index} of inode {inode:#x} differs over its targets: {said}")
        return problems
