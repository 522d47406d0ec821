"""InProcessPool: a whole pool in one process and on one event loop, for tests and experiments.

It has one or several metadata shards, targets of different sizes, and no coordinator: the pool map is a
value. Clients use the in-process transport, or others on request; everything but the processes is real.
Services can be killed and started again as a supervisor does. With a directory their state survives that; in
memory it lives as long as the pool. Used by tests and benchmarks, never by the product.
"""

from __future__ import annotations

import asyncio
import os
import struct
from functools import cache
from itertools import count

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import StaleEpoch, StaleTerm, Unavailable
from nvpool.core.units import MIB
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.chains.transitions import sealed
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import (
    MAP_FORMAT,
    ChainTable,
    Drive,
    Node,
    PoolMap,
    PoolSettings,
    Shard,
    Target,
    encode_map,
)
from nvpool.poolmap.shards.members import dealt, primary_began
from nvpool.poolmap.shards.partition_moves import moved
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.fd_passing import path_beside
from nvpool.rpc.transport_registry import listen
from nvpool.rpc.v1 import wire_pb2
from nvpool.rpc.v1.meta_pb2 import TakeRightRequest
from nvpool.rpc.v1.moving_pb2 import MovedReply, MovedRequest
from nvpool.rpc.v1.pool_pb2 import MapReply, MapRequest
from nvpool.security.volume_keys import PoolKeys
from nvpool.shm.mount_state import KeptMemory

SHARD = 1
SHARDS_VARIABLE = "NVPOOL_TEST_SHARDS"
_numbers = count(1)


def shards_wanted() -> int:
    """Number of metadata shards in tests that do not set it: NVPOOL_TEST_SHARDS of the environment."""
    return int(os.environ.get(SHARDS_VARIABLE) or 1)


@cache
def chain_tables(capacities: tuple[int, ...], replicas: int) -> tuple[ChainTable, ...]:
    """Return the tables of a new pool on one node, for 1 to `replicas` copies.

    Tests make thousands of equal pools. Tables are immutable, and the placement does not depend on endpoints.
    """
    targets = tuple(Target(number, number, 1, capacity, ()) for number, capacity in enumerate(capacities, 1))
    return tuple(build_table(targets, number) for number in range(1, replicas + 1))


class InProcessPool:
    """A pool in one process; see the module.

    `directory` None: everything is in memory. `endpoints(role, number)` returns an endpoint for each listener
    instead of an inproc one. `key_file`: file of pool keys.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        capacities: tuple[int, ...] = (64 * MIB, 96 * MIB),
        chunk_bytes: int = MIB,
        meta_options: MetaOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
        endpoints=None,
        make_store=None,
        replicas: int = 1,
        serves_map: bool = False,
        shards: int = 0,
        key_file: str = "",
    ):
        self.directory = None if directory is None else os.fspath(directory)
        self.clock = clock
        self.grant_secret = bytes(range(32))
        self._name = f"local-{os.getpid()}-{next(_numbers)}"
        self.key_file = key_file
        self.endpoints = endpoints or (lambda role, number: f"inproc://{self._name}-{role}-{number}")
        self._meta_options = meta_options or MetaOptions()
        self._make_store = make_store or self.open_real_store
        self._serves_map = serves_map or replicas > 1
        self.pool_map = self._map(capacities, chunk_bytes, replicas, shards or shards_wanted())
        self.metas: dict[int, MetaService] = {}
        self.stores: dict[int, object] = {}
        self.kvs: dict[int, object] = {}
        self.listeners: dict[tuple[str, int], object] = {}
        self._dialers: list[Dialer] = []
        self.clients: list[Client] = []
        self.memory: dict[tuple[str, int], object] = {}
        """Engines and stores in memory by role and number; they outlive the daemons that use them."""
        self._started: set[int] = set()
        self.deaf: set[int] = set()
        """Shards that do not get a new map from the pool; they learn of it from requests. For tests."""
        self.unaware: set[int] = set()
        """Targets that are reported not to know the newest map. For tests."""
        self.loses_moved = lambda: ""
        """Message that is lost when a shard hands over partitions: "question", "answer" or "". For tests."""

    def _map(self, capacities: tuple[int, ...], chunk_bytes: int, replicas: int, shards: int) -> PoolMap:
        targets = tuple(
            Target(number, number, 1, capacity, (self.endpoints("target", number),))
            for number, capacity in enumerate(capacities, 1)
        )
        drives = tuple(
            Drive(t.id, 1, self._path("targets", str(t.id)) or f"memory-{t.id}", t.capacity_bytes)
            for t in targets
        )
        return PoolMap(
            format=MAP_FORMAT,
            pool_id=self._name,
            name=self._name,
            epoch=1,
            settings=PoolSettings(chunk_bytes, replicas),
            nodes=(Node(1, "here", "", (self.endpoints("node", 1),) if self._serves_map else ()),),
            drives=drives,
            targets=targets,
            tables=chain_tables(tuple(capacities), replicas),
            shards=tuple(
                Shard(number, 1, (self.endpoints("meta", number),)) for number in range(1, shards + 1)
            ),
            partitions=dealt(shards),
        )

    def _path(self, *parts: str) -> str | None:
        return None if self.directory is None else os.path.join(self.directory, *parts)

    # -- start and stop --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> InProcessPool:
        if self.pool_map.nodes[0].endpoints:
            await self.listen("node", 1, self._answer_map)
        for target in self.pool_map.targets:
            await self.start_store(target.id)
        for shard in self.pool_map.shards:
            await self.start_shard(shard.id)
        return self

    async def __aexit__(self, *_) -> None:
        for client in self.clients:
            await client.close()
        for target in list(self.stores):
            await self.stop_store(target)
        for shard in list(self.metas):
            await self.stop_shard(shard=shard)
        if ("node", 1) in self.listeners:
            await self.hang_up("node", 1, 0.0)
        for dialer in self._dialers:
            await dialer.close()
        for closing in self.memory.values():
            await closing.close()

    async def client(
        self, name: str = "test", options: ClientOptions | None = None, kept: KeptMemory | None = None
    ) -> Client:
        """Return a client with its own session. The pool closes it."""
        client = await Client.open(self.pool_map, name, options, clock=self.clock, kept=kept)
        self.clients.append(client)
        return client

    def _dialer(self, name: str) -> Dialer:
        dialer = Dialer(Greeting(name, self.pool_map.fingerprint), clock=self.clock)
        self._dialers.append(dialer)
        return dialer

    async def listen(self, role: str, number: int, handler) -> None:
        """Serve the member's endpoints with `handler`. Derived classes intercept the calls of a member here."""
        greeting = Greeting(f"{role} {number}", self.pool_map.fingerprint)
        self.listeners[role, number] = await listen(self.endpoints(role, number), greeting, handler)

    async def hang_up(self, role: str, number: int, drain_s: float) -> None:
        """Stop serving the member's endpoints. With `drain_s` 0 the calls in progress are dropped."""
        listener = self.listeners.pop((role, number))
        if not drain_s and hasattr(listener, "kill"):
            listener.kill()
        else:
            await listener.close(drain_s)

    # -- shards ----------------------------------------------------------------------------------------------------------

    @property
    def meta(self) -> MetaService | None:
        """Service of the root's shard; the only shard by default."""
        return self.metas.get(SHARD)

    @property
    def kv(self):
        """Engine of the root's shard."""
        return self.kvs.get(SHARD)

    async def start_shard(self, shard: int = SHARD) -> None:
        """Start the shard as a new process does: in a new term."""
        if shard in self._started and len(self.pool_map.shards) > 1:
            await self.change_map(lambda now: primary_began(now, shard, 0))
        self._started.add(shard)
        if self.directory is None:
            kv = self.memory.get(("meta", shard)) or MemoryKv()
            self.memory["meta", shard] = kv
        else:
            from nvpool.kv.engine import LmdbKv, LmdbOptions

            path = self._path("meta", f"shard-{shard}")
            os.makedirs(path, exist_ok=True)
            kv = await LmdbKv.open(path, LmdbOptions())
        self.kvs[shard] = kv
        meta = MetaService(
            kv,
            shard=shard,
            grant_secret=self.grant_secret,
            dialer=self._dialer(f"shard {shard}"),
            clock=self.clock,
            options=self._meta_options,
            take_right=self._take_right,
            pool_keys=PoolKeys(key_file=self.key_file),
        )
        meta.update_map(self.pool_map)
        await meta.start()
        self.metas[shard] = meta
        await self.listen("meta", shard, meta.handle)

    async def stop_shard(self, drain_s: float = 0.0, shard: int = SHARD) -> None:
        """Stop the shard; without a drain as if its process was killed: connections end without further
        replies."""
        meta = self.metas.pop(shard)
        await self.hang_up("meta", shard, drain_s)
        await meta.close(drain_s)
        if self.directory is not None:
            await self.kvs[shard].close()

    # -- stores ----------------------------------------------------------------------------------------------------------

    async def start_store(self, target: int) -> None:
        service = await self._make_store(self, target)
        service.update_map(self.pool_map)
        await service.start()
        self.stores[target] = service
        await self.listen("target", target, service.handle)

    async def stop_store(self, target: int, drain_s: float = 0.0) -> None:
        service = self.stores.pop(target)
        await self.hang_up("target", target, drain_s)
        await service.close(drain_s)

    @staticmethod
    async def open_real_store(pool: InProcessPool, target: int):
        from nvpool.store.chunks.api import create_chunk_store
        from nvpool.store.chunks.block_store import open_chunk_store
        from nvpool.store.server.service import StoreService

        capacity = pool.pool_map.target_by_id[target].capacity_bytes
        if pool.directory is None:
            from nvpool.store.chunks.memory_store import MemoryChunkStore

            store = pool.memory.get(("target", target)) or MemoryChunkStore(capacity)
            pool.memory["target", target] = store
        else:
            path = pool._path("targets", str(target))
            if not _exists(path):
                create_chunk_store(path, target, pool.pool_map.pool_id, capacity)
            store = await open_chunk_store(path, target=target, clock=pool.clock)
        endpoint = pool.endpoints("target", target)
        path = path_beside(parse_endpoint(endpoint).path) if endpoint.startswith("stream+unix:") else ""
        dialer = pool._dialer(f"target {target}")
        return StoreService(
            store,
            target=target,
            grant_secret=pool.grant_secret,
            clock=pool.clock,
            handover_path=path,
            dialer=dialer,
            refresh_map=lambda: pool._give_map(target),
            pool_keys=PoolKeys(key_file=pool.key_file),
        )

    def _give_map(self, target: int) -> None:
        if target in self.stores:
            self.stores[target].update_map(self.pool_map)

    def _answer_map(self, call) -> None:
        """Answer a map request as a supervisor does, but without waiting."""
        if call.method == wire_pb2.META_MOVED:
            self._hand_over(call)
            return
        newer = self.pool_map.epoch > MapRequest.FromString(bytes(call.message)).newer_than
        call.reply(MapReply(map=encode_map(self.pool_map) if newer else b"").SerializeToString())

    def _hand_over(self, call) -> None:
        """Hand over partitions as the coordinator does. `loses_moved` can lose the request or the reply."""
        request = MovedRequest.FromString(bytes(call.message))
        partitions = struct.unpack(f"<{len(request.partitions) // 2}H", request.partitions)
        loss = self.loses_moved()
        try:
            if loss != "question":
                now = self.pool_map
                new = sealed(
                    now,
                    moved(
                        now, request.source, request.term, request.destination, partitions, request.map_epoch
                    ),
                )
                if new is not None:
                    self._publish_map(new)
        except StaleTerm as error:
            call.fail(error)
            return
        except StaleEpoch:
            pass
        if loss:
            call.fail(Unavailable("lost on the way", may_be_applied=True))
        else:
            call.reply(MovedReply(map=encode_map(self.pool_map)).SerializeToString())

    def _publish_map(self, pool_map: PoolMap) -> None:
        self.pool_map = pool_map
        for number, meta in list(self.metas.items()):
            if number not in self.deaf:
                meta.update_map(pool_map)
        for target in list(self.stores):
            self._give_map(target)

    async def _take_right(self, request: TakeRightRequest) -> list[int]:
        """Grant a right as the coordinator does; `unaware` targets do not know of it."""
        if request.rights:
            now_ms = self.clock.wall_ns() // 1_000_000
            await self.change_map(
                lambda now: taken(
                    now, request.volume, request.member, request.rights, now_ms, request.life_ms
                )
            )
        return list(self.unaware)

    async def change_map(self, change) -> PoolMap:
        """Make `change(map)` the next map, and give it to shards and stores.

        Clients get it with their next request for the map.
        """
        new = change(self.pool_map)
        self._publish_map(
            new if new.epoch > self.pool_map.epoch else sealed(self.pool_map, new) or self.pool_map
        )
        return self.pool_map

    def new_shard(self, number: int) -> Shard:
        """Return a shard for the map; `start_shard` starts it."""
        return Shard(number, 1, (self.endpoints("meta", number),))


def _exists(path: str) -> bool:
    return os.path.exists(os.path.join(path, "FORMAT"))


def run(main) -> None:
    """Run `main(pool)` in a pool in memory, for a first try."""

    async def whole() -> None:
        async with InProcessPool() as pool:
            await main(pool)

    asyncio.run(whole())
