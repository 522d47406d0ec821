"""RealPool: a temporary pool of real processes for tests that kill, stop and restrict them.

Making and starting it are separate, so that a test can copy the directory in between and give the daemons an
environment (the preloaded faults) or limits. Leaving the `with` block ends every process that names the
directory, however the test ended. If only the state of the drive matters, `opened` serves a directory in the
calling process instead, which takes a tenth of the time of starting daemons. Used by tests; never by the
product.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core import programs
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NvpoolError, Unavailable
from nvpool.core.programs import DAEMONS, Program, command
from nvpool.core.units import MIB
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import host_id, identity_of
from nvpool.kv.engine import LmdbKv
from nvpool.poolmap.model import PoolMap, decode_map
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.v1.pool_pb2 import PoolStatusReply, PoolStatusRequest
from nvpool.rpc.v1.wire_pb2 import POOL_STATUS
from nvpool.sdk.filesystem import FileSystem
from nvpool.sdk.fsck.check import FsckReport, check
from nvpool.testing.fakes.in_process_pool import InProcessPool, shards_wanted

SIZES = (64 * MIB, 96 * MIB)
PLAIN_TCP = '[network]\nhost = "127.0.0.1"\nplain_text = true\n'
"""For node.toml: TCP on loopback without TLS, in addition to the unix sockets."""
TCP = '[network]\nhost = "127.0.0.1"\n'
"""The same with TLS: for pools that keep their map in etcd, or that others join."""


class RealPool:
    """A pool of real processes in `directory`.

    `config` is the text of node.toml. `drives` are paths of directories or devices in addition to the drives
    of `sizes` in the pool directory. `shards` 0: as the environment says (testing/fakes/in_process_pool).
    """

    def __init__(
        self,
        directory: Path,
        *,
        sizes: tuple[int, ...] = SIZES,
        config: str = "",
        drives: tuple[str, ...] = (),
        replicas: int = 1,
        standbys: int = 0,
        shards: int = 0,
    ):
        self.directory = PoolDirectory(directory)
        self._replicas = replicas
        self.path = self.directory.path
        self._sizes, self._config, self._drives, self._standbys = sizes, config, drives, standbys
        self._shards = shards or shards_wanted()
        self._connected: list[FileSystem] = []
        self._supervisors: list[subprocess.Popen] = []

    def __enter__(self) -> RealPool:
        return self

    def __exit__(self, *_exc) -> None:
        for pool in self._connected:
            try:
                pool.close(timeout_s=0.5)
            except (OSError, NvpoolError):
                pass  # the pool may be damaged
        self.end()

    # -- start and stop --------------------------------------------------------------------------------------------------

    def request(self) -> dict[str, Any]:
        """Return the request for provision/create."""
        drives: list[dict] = [{"path": path} for path in self._drives]
        drives += [
            {"path": str(self.directory.target(len(drives) + number)), "capacity_bytes": size}
            for number, size in enumerate(self._sizes, 1)
        ]
        return {
            "verb": "pool",
            "directory": str(self.path),
            "name": "faulty",
            "chunk_bytes": MIB,
            "replicas": self._replicas,
            "config": self._config,
            "drives": drives,
            "standbys": self._standbys,
            "shards": self._shards,
            "throw_away": True,
        }

    def make(self, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(
            command(Program.POOL_MAKER),
            input=json.dumps(self.request()),
            text=True,
            env=os.environ | (environment or {}),
            capture_output=True,
            timeout=240,
            check=environment is None,
        )

    def start(
        self,
        environment: dict[str, str] | None = None,
        *,
        prefix: tuple[str, ...] = (),
        wait_s: float = 120.0,
    ) -> None:
        """Start the supervisor and wait until every process serves. `prefix` comes before the command, such
        as prlimit."""
        self.launch(environment, prefix=prefix)
        self.wait(wait_s)

    def launch(
        self, environment: dict[str, str] | None = None, *, prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen:
        words = [*prefix, *command(Program.SUPERVISOR, str(self.path), "--log", "file")]
        supervisor = subprocess.Popen(
            words,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            text=True,
        )
        self._supervisors.append(supervisor)
        return supervisor

    def end(self) -> None:
        """Kill every process of the pool, also stopped ones.

        All are stopped first, so that none of them can start another.
        """
        self.end_daemons(*DAEMONS)
        for supervisor in self._supervisors:
            supervisor.wait(120)
            if supervisor.stderr is not None:
                supervisor.stderr.close()
        self._supervisors.clear()

    def end_daemons(self, *programs: Program) -> None:
        """Kill supervisor, shards and stores together; mounts survive."""
        programs = programs or (Program.SUPERVISOR, Program.META, Program.STORE)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.processes(*programs):
                end_process(pid, number)

    def stop(self, wait_s: float = 120.0) -> None:
        """Send SIGTERM to the supervisor and wait until everything has ended in order."""
        os.kill(self.pid("supervisor"), signal.SIGTERM)
        self.until(lambda: not self.processes(), "all have ended", wait_s)

    def processes(self, *wanted: Program) -> list[int]:
        """Return every daemon of this pool, also those that others started, or only those that run one of these programs."""
        return sorted(
            pid for pid, _ in programs.processes(*wanted, naming=self.path) if identity_of(pid) is not None
        )

    # -- queries ---------------------------------------------------------------------------------------------------------

    @property
    def pool_map(self) -> PoolMap:
        return decode_map(self.directory.poolmap.read_bytes())

    def status(self, wait_s: float = 60.0) -> dict[str, Any]:
        """Return the output of `nvpool status --json`. Unavailable while no supervisor answers."""

        async def ask() -> dict[str, Any]:
            dialer, request = (
                Dialer(Greeting("test"), host_id=host_id()),
                PoolStatusRequest().SerializeToString(),
            )
            try:
                reply = await dialer.call(
                    self.pool_map.nodes[0].endpoints,
                    POOL_STATUS,
                    request,
                    deadline_s=SYSTEM_CLOCK.boottime_s() + wait_s,
                )
                return json.loads(PoolStatusReply.FromString(bytes(reply.message)).status)
            finally:
                await dialer.close()

        return asyncio.run(ask())

    def serving(self) -> dict[str, Any] | None:
        """Return the status if every process serves, else None."""
        try:
            seen = self.status(10.0)
        except Unavailable:
            return None
        return seen if all(process["state"] == "serving" for process in seen["processes"]) else None

    def wait(self, wait_s: float = 120.0) -> dict[str, Any]:
        return self.until(self.serving, "all processes serve", wait_s)

    def until(self, holds: Callable[[], Any], what: str, wait_s: float = 120.0) -> Any:
        """Return the value of `holds` once it is true. AssertionError, with the ends of all logs, after
        `wait_s`."""
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        while not (found := holds()):
            if SYSTEM_CLOCK.boottime_s() > deadline_s:
                raise AssertionError(f"not within {wait_s} s: {what}\n{self.said()}")
            select.select([], [], [], 0.05)
        return found

    def pid(self, name: str) -> int:
        state = self.directory.state_of(name)
        assert state is not None, f"{name} has not announced itself"
        return state.pid

    def said(self, name: str = "*", lines: int = 15) -> str:
        """Return the last lines of the logs."""
        return "\n".join(
            f"-- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for path in sorted(self.directory.log.glob(f"{name}.log"))
        )

    def restarts(self) -> int:
        return sum(process["restarts"] for process in self.status()["processes"])

    # -- use -------------------------------------------------------------------------------------------------------------

    def connect(self, deadline_s: float = 20.0) -> FileSystem:
        """Connect a client; it is closed with the pool."""
        pool = nvpool.connect(str(self.path), options=ClientOptions(deadline_s=deadline_s))
        self._connected.append(pool)
        return pool

    def fsck(self, *, repair: bool = False) -> list[str]:
        """Check everything and return the problems as sentences; with `repair` those that are not repaired."""

        async def look() -> list[str]:
            from nvpool.client.pool_client import Client

            client = await Client.open(str(self.path), "fsck", ClientOptions(deadline_s=30.0))
            try:
                return await problems_of(client, self.directory.grant_key.read_bytes() if repair else None)
            finally:
                await client.close()

        return asyncio.run(look())


def end_process(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process and, if that kills it, wait until it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, number)
        if number == signal.SIGKILL and not select.select([pidfd], [], [], 60)[0]:
            raise AssertionError(f"process {pid} does not die")
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


async def problems_of(client, grant_secret: bytes | None = None) -> list[str]:
    """Return the problems that fsck finds, as sentences.

    With the grant key it repairs, and returns what it could not repair.
    """
    checkup = FsckReport()
    await check(client, checkup, repair=grant_secret is not None, grant_secret=grant_secret)
    return [
        f"{problem.kind}: {problem.where}: {problem.text}"
        for problem in checkup.problems
        if not problem.repaired
    ]


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[InProcessPool]:
    """Serve the pool in `directory` (of a RealPool, or rebuilt from a record of one) in this process.

    Everything that a start opens is opened: format, the coordinator's records, shard, stores.
    """
    place = PoolDirectory(directory)
    place.check()
    kv = await LmdbKv.open(place.map)
    coordinator = await EmbeddedCoordinator.open(kv)
    pool_map = coordinator.pool_map
    await coordinator.close()
    pool = InProcessPool(place.path)
    pool.grant_secret = place.grant_key.read_bytes()
    pool.pool_map = msgspec.structs.replace(
        pool_map,
        targets=tuple(
            msgspec.structs.replace(t, endpoints=(pool.endpoints("target", t.id),)) for t in pool_map.targets
        ),
        shards=tuple(
            msgspec.structs.replace(s, endpoints=(pool.endpoints("meta", s.id),)) for s in pool_map.shards
        ),
    )
    async with pool:
        yield pool
