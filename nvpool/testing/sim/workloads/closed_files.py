"""Workload on new files that are written once and closed: every client that opens one afterwards reads all of it.

A close completes before the data is at the stores (`client/write/late_closes`); a shard that shows the file to
another client recalls it first. Only from a client that is silent for the time of its watch a file may be seen
empty. Used by `sim/scenario`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.vfs_types import FileHandle
from nvpool.core.errors import NotFound, NvpoolError
from nvpool.testing.sim.virtual_time_loop import VirtualLoop
from nvpool.testing.sim.workloads.file_data import CALLER, Act, SimulatedClient, Workload

RECENT = 8
"""Files that are read; others are looked at in the end."""
BYTES_MAX = 20_000
KEPT_S = 1.0
"""A watch that lasts so long at the beginning of a read, and a read that takes no longer: the shard has waited."""


@dataclass
class ClosedFile:
    """`closed_s`: when its close had completed."""

    name: bytes
    content: bytes
    maker: SimulatedClient
    file: OpenInode
    closed_s: float

    @property
    def is_reported(self) -> bool:
        """Whether the shard has all of its data."""
        return self.file.written is None or not self.file.written.unsettled

    @property
    def has_failed(self) -> bool:
        """Whether an error of its data was logged, as for a pool that was full suddenly."""
        return self.file.inode in self.maker.client.vfs.parts.late_closes.errors

    def watched_s(self) -> float:
        """Time for which the leases of its maker hold, without a further word of the shard."""
        client = self.maker.client.vfs
        return client.meta.shard_session(self.file.inode).watch.until_s - client.clock.boottime_s()


class ClosedFiles(Workload):
    """New files that one client writes and closes, and the others read."""

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(loop, done, losses)
        self._files: list[ClosedFile] = []
        self._tries = 0
        self._problems: list[str] = []

    def acts(self) -> list[tuple[int, Act]]:
        """As in `Workload`."""
        return [(4, self._write), (4, self._read)]

    async def _write(self, worker: SimulatedClient) -> None:
        self._tries += 1
        name, chance = b"%d" % self._tries, worker.chance
        content = (b"%d " % self._tries) * chance.randint(1, BYTES_MAX // 8)
        vfs = worker.client.vfs
        _, handle = await vfs.create(self._home, name, 0o644, os.O_WRONLY | os.O_EXCL, CALLER)
        try:
            half = chance.choice((len(content), len(content), len(content) // 2))
            await vfs.write(handle, 0, content[:half])
            if half < len(content):
                await vfs.write(handle, half, content[half:])
            await vfs.flush(handle)
            self._files.append(ClosedFile(name, content, worker, handle.file, self._loop.time()))
            self._done["closed"] += 1
        finally:
            self._loop.create_task(self._release(worker, handle))

    async def _release(self, worker: SimulatedClient, handle: FileHandle) -> None:
        try:
            await worker.client.vfs.release(handle)
        except NvpoolError:
            self._files = [one for one in self._files if one.file is not handle.file]

    async def _read(self, worker: SimulatedClient) -> None:
        recent = [one for one in self._files[-RECENT:] if one.maker is not worker]
        if recent:
            await self._look_at(worker, worker.chance.choice(recent))

    async def _look_at(self, worker: SimulatedClient, one: ClosedFile) -> None:
        vfs, begin_s = worker.client.vfs, self._loop.time()
        was_reported, watched_s = one.is_reported, one.watched_s()
        try:
            attr = await vfs.look(self._home, one.name)
            handle = await vfs.open(attr.inode, os.O_RDONLY, CALLER)
        except NotFound:
            self._problems.append(f"{one.name!r} is not there")
            return
        try:
            content = b""
            while part := bytes(await vfs.read(handle, len(content), 1 << 20)):
                content += part
        finally:
            await vfs.release(handle)
        if (
            content == one.content
            or one.has_failed
            or any(loss >= one.closed_s - 1.0 for loss in self._losses)
        ):
            return
        took_s = self._loop.time() - begin_s
        if was_reported or content or (watched_s > KEPT_S and took_s < KEPT_S):
            self._problems.append(
                f"{worker.name} reads {len(content)} of {len(one.content)} bytes of {one.name!r}, which "
                f"{one.maker.name} has closed {begin_s - one.closed_s:g} s before"
            )

    async def look(self, judge: SimulatedClient) -> None:
        """As in `Workload`."""
        for one in self._files:
            await self._look_at(judge, one)

    def problems(self) -> list[str]:
        """As in `Workload`."""
        return self._problems
