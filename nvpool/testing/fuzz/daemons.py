"""Fuzz targets: a supervisor, and a standby of a shard, each with one caller that sends random requests.

No caller changes the supervisor's pool map; callers without a certificate may ask how to join, clients may ask
for the map. A standby keeps its records. Used by `runner`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core.config import AccessConfig, Config
from nvpool.host.pool_directory import PoolDirectory
from nvpool.kv.memory_engine import MemoryKv
from nvpool.kv.options import LmdbOptions
from nvpool.meta.server.shard_member import MemberOptions, ShardMember
from nvpool.meta.service_auth import ServiceRight
from nvpool.node.supervisor import Supervisor
from nvpool.rpc.access_control import Callers
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.runtime.daemon_process import Stop
from nvpool.testing.contracts.coordinator import first_map
from nvpool.testing.fuzz.connections import FuzzFailure
from nvpool.testing.fuzz.harness import FuzzTarget
from nvpool.testing.fuzz.messages import REQUESTS

SECRET = b"s" * 32
OPERATORS = 4711
PEERS = {
    "client": Peer("fuzz", "192.0.2.1:1", False, "client/fuzz.0a1b2c3d"),
    "user": Peer("fuzz", "unix", True, "", Credentials(1000, frozenset((1000, 50)), 1)),
    "unauthenticated": Peer("fuzz", "192.0.2.1:1", False),
}
NODE = Peer("fuzz", "192.0.2.1:1", False, "node/fuzz")
SUPERVISOR_METHODS = [method for method in REQUESTS if method >= 200]
STANDBY_METHODS = (wire.META_SHIP, wire.META_FOLLOW, wire.META_STATUS)


class _Daemon(FuzzTarget):
    async def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="nvpool-fuzz-"))
        await self._start()

    async def _start(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError

    def _methods(self) -> list[int] | tuple[int, ...]:
        raise NotImplementedError

    def request(self, only: int | None) -> tuple[int, bytes, bytes]:
        chance = self._chance
        method = only or chance.choice(self._methods())
        if only is None and chance.random() < 0.05:
            method = chance.choice(tuple(REQUESTS))
        message = self._generator.fill(REQUESTS[method]()).SerializeToString()
        return (
            method,
            message,
            chance.randbytes(chance.choice((1, 60, 4096))) if chance.random() < 0.3 else b"",
        )

    async def end(self) -> None:
        try:
            await self.answer_all()
            self._wire.hang_up()
            self.check()
        finally:
            await self._stop()
        self._witness.check()


class SupervisorPlace(_Daemon):
    name = "supervisor"
    deadline_ms = 2000

    async def _start(self) -> None:
        (self._path / "log").mkdir()
        self._coordinator = await EmbeddedCoordinator.found(MemoryKv(), first_map())
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked_to_stop = Stop()
        config = Config(access=AccessConfig(operators=str(OPERATORS)))
        self._supervisor = Supervisor(
            PoolDirectory(self._path), config, self._coordinator, self._asked_to_stop, self._failed
        )
        here = self.kind == "user"
        self.connect(self._supervisor.handle if here else self._supervisor.handle_secured, PEERS[self.kind])
        chance = self._chance
        self._known.draw.update(
            known_epoch=lambda: 0,
            epoch=lambda: chance.choice((0, 0, 0, 1)),
            wait_s=lambda: chance.choice((0.0, -1.0, 0.01)),
            verb=lambda: chance.choice(
                ("drive-add", "drive-remove", "node-remove", "revoke", "token", "x" * 300)
            ),
            node=lambda: chance.choice((0, 1, 2)),
            token=lambda: chance.choice((b"", b"x" * 32)),
        )

    def _methods(self) -> list[int]:
        return SUPERVISOR_METHODS

    def check(self) -> None:
        super().check()
        if self._coordinator.pool_map != first_map():
            raise FuzzFailure(f"{self.kind} has changed the pool map")
        if self._asked_to_stop.asked.is_set() or self._failed.done():
            raise FuzzFailure(f"{self.kind} has stopped the supervisor")

    async def _stop(self) -> None:
        await self._supervisor.close()


class StandbyPlace(_Daemon):
    """The caller is a node, sometimes with the right of a service: such callers ship records."""

    name = "standby"

    async def _start(self) -> None:
        options = MemberOptions(
            1, 1, 1, self._path / "shard", LmdbOptions(), SECRET, callers=Callers(OPERATORS)
        )
        self._lost: list[str] = []
        self._member = ShardMember(options, first_map(), None, self._clock, None, self._lost.append)
        self._member.stand_by()
        self._right = ServiceRight(self._clock, SECRET, 1)
        self.connect(self._member.handle, NODE if self.kind == "node" else PEERS[self.kind])
        chance = self._chance
        self._known.draw.update(
            authority=lambda: self._right() if self.kind == "node" and chance.random() < 0.8 else b"\0" * 60,
            shard=lambda: 1,
            member=lambda: 1,
            term=lambda: max(0, self._member.standby.term + chance.choice((-1, 0, 0, 0, 0, 0, 0, 1))),
            step=lambda: chance.randrange(7),
            sequence=lambda: chance.randrange(4),
            sequence_term=lambda: chance.randrange(2),
            pairs=lambda: chance.random() < 0.5,
            committed=lambda: chance.randrange(3),
        )
        self._known.always = {"term", "shard", "member"}

    def _methods(self) -> tuple[int, ...]:
        return STANDBY_METHODS

    def check(self) -> None:
        super().check()
        if self._lost:
            raise FuzzFailure(f"{self.kind} has ended the standby: {self._lost[0]}")

    async def _stop(self) -> None:
        await self._member.close()


def kinds_of(place: Any) -> tuple[str, ...]:
    return tuple(PEERS) if place is SupervisorPlace else ("client", "node")
