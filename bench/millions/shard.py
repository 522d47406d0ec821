"""Metadata shard as a process below a pool directory without a supervisor, and its use of the machine.

This process holds the lock of the pool directory, as a supervisor would, so only the benchmark starts and kills the
daemon. The daemon's query for a newer map stays without a reply, as when there is none. If nobody listened, the daemon
would repeat the query, and read the map's file, twice a second.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NvpoolError
from nvpool.core.programs import Program, command
from nvpool.host.pool_directory import Flock
from nvpool.host.process_identity import host_id
from nvpool.rpc.api import Call, Connection, Greeting, Listener
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.runtime.daemon_lifecycle import listen_on
from nvpool.testing.env.pool import RealPool

CONFIGURATION = "[meta]\nsession_lease_s = 3600\ngrant_s = 3600\n"
"""A session that nobody renews lives as long as any measurement; all else as a daemon has it by itself."""
START_S = 120.0
LOOK_S = 0.002
"""Between two tries to reach a daemon that starts."""
SAMPLE_S = 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A daemon did not do what was asked of it; the text is for the user."""


class Shard:
    """`directory` gets a pool. The records are those of `records`, a shard's directory that is moved into it, or none."""

    def __init__(
        self, directory: Path, records: Path | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self.pool = RealPool(directory, sizes=(64 << 20,), config=CONFIGURATION)
        self._environment = os.environ | (environment or {})
        self.pool.make(environment)
        self.path = self.pool.directory.shard(1)
        if records is not None:
            shutil.rmtree(self.path)
            os.rename(records, self.path)
        self._lock = Flock.take(self.pool.directory.lock, "the pool of the benchmark")
        self._process: subprocess.Popen | None = None
        self._dialer: Dialer | None = None
        self._node: list[Listener] = []
        self._kept: list[Call] = []

    @property
    def database(self) -> Path:
        return self.path / "data.mdb"

    # -- life ------------------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[Connection, float]:
        """A connection to the daemon, and the seconds from the start of its process to its first answer."""
        pool_map = self.pool.pool_map
        if not self._node:
            self.pool.directory.make_socket_directory()
            greeting = Greeting("supervisor", pool_map.fingerprint)
            self._node = await listen_on(pool_map.nodes[0].endpoints[:1], greeting, self._kept.append)
        endpoints = pool_map.shard_by_id[1].endpoints
        began_s = time.monotonic()
        self._spawn()
        self._dialer = Dialer(Greeting("bench", pool_map.fingerprint), host_id=host_id())
        while True:
            try:
                connection = await self._dialer.connect(endpoints, SYSTEM_CLOCK.boottime_s() + 5)
                reply = await connection.call(
                    wire.META_STATUS, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + START_S
                )
                if pb.MetaStatusReply.FromString(bytes(reply.message)).pid != self._process.pid:
                    raise Failed("another daemon answers for this shard")
                return connection, time.monotonic() - began_s
            except NvpoolError as error:
                if self._process.poll() is not None or time.monotonic() - began_s > START_S:
                    raise Failed(f"the shard does not serve: {error}\n{self.pool.said('meta-1')}") from None
            await asyncio.sleep(LOOK_S)

    def _spawn(self) -> None:
        self._process = subprocess.Popen(
            command(Program.META, str(self.pool.path), "1"),
            env=self._environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def close(self) -> None:
        """The supervisor's place is free; before `end`, on the loop that started it."""
        for listener in self._node:
            await listener.close()

    async def stop(self) -> float:
        """In order; the seconds that it took."""
        began_s = time.monotonic()
        await self._end(signal.SIGTERM)
        if self._process.returncode:
            raise Failed(f"the shard ended with {self._process.returncode}\n{self.pool.said('meta-1')}")
        return time.monotonic() - began_s

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def _end(self, number: int) -> None:
        self._process.send_signal(number)
        await asyncio.to_thread(self._process.wait, START_S)
        await self._dialer.close()

    def end(self) -> None:
        """However it stands: the process is gone, then the lock is given up. May be called at any time and twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(20)
        self._lock.release()
        self.pool.end()

    # -- looking ---------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Resident bytes: what the process has for itself, and its pages of mapped files (LMDB's file and programs), which the
        kernel takes back when it likes."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return {
            name: int(re.search(rf"Rss{kind}:\s+(\d+)", text)[1]) << 10
            for name, kind in (("anonymous_bytes", "Anon"), ("mapped_bytes", "File"))
        }

    def spent(self) -> tuple[float, int]:
        """Of all its threads so far: seconds of processors, pages of mapped files that were waited for (major faults)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S, int(fields[9])

    async def most_anonymous(self, work) -> tuple[object, int]:
        """(What `work` gives, the most memory that the process had for itself meanwhile.)"""
        task, most = asyncio.ensure_future(work), 0
        try:
            while not task.done():
                most = max(most, self.memory()["anonymous_bytes"])
                await asyncio.wait([task], timeout=SAMPLE_S)
        finally:
            task.cancel()
        return await task, most


def forget(path: Path) -> None:
    """Drop the pages of the file from memory, except those that a process has mapped."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_whole(path: Path, progress) -> None:
    """Read every page of the file into memory, as far as there is room."""
    size, buffer, done = path.stat().st_size, bytearray(4 << 20), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            done += count
            progress(done / size)
