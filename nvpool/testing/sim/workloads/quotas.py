"""Workload in volumes with quotas: create, write, truncate, rename and remove files, resize and remove
volumes.

Each file is changed by one client only. Checks: acknowledged changes never exceed a quota, in files and in
bytes. In the end the counted usage is what a walk finds, names are those of the replies, and EDQUOT comes
exactly at the limit. A removed volume leaves no inode and no chunk, and no name in it is made or changed any
more. Nothing is renamed across a volume's border. Not checked: bytes of a removed file that a client reads by
its inode number, until the file is collected. Used by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace

from nvpool.client.pool_client import Client
from nvpool.core.errors import (
    CrossesVolumes,
    InvariantBroken,
    NotFound,
    NvpoolError,
    QuotaExceeded,
    Refused,
    Unavailable,
)
from nvpool.sdk.volumes import AsyncVolumes
from nvpool.sdk.volumes import Volume as Shown
from nvpool.testing.sim.pool import CHUNK_BYTES, SimPool
from nvpool.testing.sim.virtual_time_loop import VirtualLoop
from nvpool.testing.sim.workloads.file_data import CALLER, ROOT, Act, SimulatedClient, Workload

FILES, BYTES = (5, 14), (2 * CHUNK_BYTES, 8 * CHUNK_BYTES)
"""Ranges of quotas, small enough to be reached all the time."""
NAMES_EACH = 6
KINDS = {"create": 8, "write": 10, "cut": 4, "rename": 3, "unlink": 4, "cross": 1, "resize": 2}
REMOVED_S = 120
"""Time in which nothing is left of a removed volume, once faults have ended: a sweep (pool.SWEEP_S) removes
what a power loss brought back."""
SETTLED_S = 65.0
"""Time after which no session has reserved bytes or open files, once all is quiet: three renewals of
sessions, and a little.

The first renewal may have failed. With the next one the client learns what the shard still holds for it, and
with the third one it releases that.
"""


async def with_pool_errors(work: Awaitable):
    """Return the result of `work`; raise the pool's error that caused an OSError."""
    try:
        return await work
    except OSError as error:
        if isinstance(error.__cause__, NvpoolError):
            raise error.__cause__ from None
        raise


def volumes_of(client: Client) -> AsyncVolumes:
    return AsyncVolumes(SimpleNamespace(vfs=client.vfs, client=client))


class _Volume:
    """Expected state of one volume.

    `sure`: names with their inodes. `unsure`: names with unknown state. `least`: inode -> bytes that
    certainly exist. `limits`: quotas that may be in force, in files and in bytes.
    """

    def __init__(self, name: str, inode: int, files: int, size: int) -> None:
        self.name, self.inode = name, inode
        self.limits = [(files, size)]
        self.sure: dict[bytes, int] = {}
        self.unsure: set[bytes] = set()
        self.least: dict[int, int] = {}
        self.ever: set[int] = {inode}
        self.begun = 0
        """Number of attempts to create a file."""
        self.resizing = self.ending = False
        self.gone_s: float | None = None


class Quotas(Workload):
    """`remove_s`: time at which the last volume is removed; None: never."""

    def __init__(
        self,
        loop: VirtualLoop,
        done: dict[str, int],
        losses: Sequence[float],
        pool: SimPool,
        count: int,
        remove_s: float | None,
    ) -> None:
        super().__init__(loop, done, losses)
        self._pool = pool
        self._count = count
        self._remove_s = remove_s
        self._volumes: list[_Volume] = []
        self._wrong: list[str] = []

    async def prepare(self, client: Client) -> None:
        await super().prepare(client)
        for number in range(1, self._count + 1):
            files, size = FILES[1] - number, BYTES[1] // number
            made = await with_pool_errors(
                volumes_of(client).create(f"v{number}", bytes_max=size, files_max=files)
            )
            self._volumes.append(_Volume(made.name, made.inode, files, size))
        if self._remove_s is not None:
            self._remove_s += self._loop.time()

    def acts(self) -> list[tuple[int, Act]]:
        return [(10, self._act)]

    async def _act(self, worker: SimulatedClient) -> None:
        chance = worker.chance
        volume = chance.choice(self._volumes)
        if self._remove_s is not None and self._loop.time() > self._remove_s:
            volume = self._volumes[-1]
            if volume.gone_s is None:
                await self._remove(worker, volume)
                return
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        name, other = (
            b"%s-%d" % (worker.name.encode(), number) for number in chance.sample(range(NAMES_EACH), 2)
        )
        ended, begin = volume.ending, self._loop.time()
        try:
            if await getattr(self, f"_{kind}")(worker, volume, name, other):
                self._done["volumes"] += 1
                if volume.gone_s is not None and volume.gone_s < begin and kind not in ("write", "cut"):
                    self._wrong.append(f"{kind} in volume {volume.name}, which was removed before")
        except NotFound:
            if not ended and not volume.ending and name in volume.sure:
                raise InvariantBroken(f"{kind}: {name!r} of volume {volume.name} is not there") from None
        self._look_at_limits(volume)

    def _look_at_limits(self, volume: _Volume) -> None:
        """Check that the certain content is within the largest quota that may be in force."""
        if volume.ending:
            return
        there, size = len(volume.least), sum(volume.least.values())
        if there > max(files for files, _ in volume.limits):
            self._wrong.append(f"volume {volume.name} has {there} files, its quotas were {volume.limits}")
        if size > max(most for _, most in volume.limits):
            self._wrong.append(f"volume {volume.name} has {size} bytes, its quotas were {volume.limits}")

    async def _create(self, worker: SimulatedClient, volume: _Volume, name: bytes, _: bytes) -> bool:
        if name in volume.sure or name in volume.unsure:
            return False
        volume.unsure.add(name)
        volume.begun += 1
        try:
            attr, handle = await worker.client.vfs.create(
                volume.inode, name, 0o644, os.O_RDWR | os.O_EXCL, CALLER
            )
        except QuotaExceeded:
            self._done["quotas"] += 1
            volume.unsure.discard(name)
            volume.begun -= 1
            if volume.begun < min(files for files, _ in volume.limits):
                self._wrong.append(
                    f"EDQUOT for file {volume.begun + 1} of volume {volume.name}: {volume.limits}"
                )
            return False
        volume.unsure.discard(name)
        volume.sure[name] = attr.inode
        volume.least[attr.inode] = 0
        volume.ever.add(attr.inode)
        await worker.client.vfs.release(handle)
        return True

    async def _write(self, worker: SimulatedClient, volume: _Volume, name: bytes, _: bytes) -> bool:
        inode = volume.sure.get(name)
        if inode is None:
            return False
        vfs, chance = worker.client.vfs, worker.chance
        handle = await vfs.open(inode, os.O_RDWR, CALLER)
        try:
            offset, size = chance.randrange(2 * CHUNK_BYTES), chance.randrange(1, CHUNK_BYTES)
            try:
                count = await vfs.write(handle, offset, b"v" * size)
            except QuotaExceeded:
                self._done["quotas"] += 1
                return False
            await vfs.fsync(handle, True)
            volume.least[inode] = max(volume.least[inode], offset + count)
        finally:
            await vfs.release(handle)
        return True

    async def _cut(self, worker: SimulatedClient, volume: _Volume, name: bytes, _: bytes) -> bool:
        inode = volume.sure.get(name)
        if inode is None:
            return False
        size = worker.chance.randrange(2 * CHUNK_BYTES)
        volume.least[inode] = min(volume.least[inode], size)
        try:
            await worker.client.vfs.setattr(inode, size=size, caller=CALLER)
        except QuotaExceeded:
            self._done["quotas"] += 1
            return False
        volume.least[inode] = size
        return True

    async def _rename(self, worker: SimulatedClient, volume: _Volume, name: bytes, other: bytes) -> bool:
        inode = volume.sure.get(name)
        if inode is None or other in volume.unsure:
            return False
        over = volume.sure.pop(other, None)
        if over is not None:
            volume.least.pop(over)
        del volume.sure[name]
        volume.unsure |= {name, other}
        size = volume.least.pop(inode)  # not counted while the outcome is unknown
        await worker.client.vfs.rename(volume.inode, name, volume.inode, other, 0, CALLER)
        volume.unsure -= {name, other}
        volume.sure[other], volume.least[inode] = inode, size
        return True

    async def _unlink(self, worker: SimulatedClient, volume: _Volume, name: bytes, _: bytes) -> bool:
        inode = volume.sure.pop(name, None)
        if inode is None:
            return False
        volume.unsure.add(name)
        volume.least.pop(inode)
        await worker.client.vfs.unlink(volume.inode, name, CALLER)
        volume.unsure.discard(name)
        return True

    async def _cross(self, worker: SimulatedClient, volume: _Volume, name: bytes, _: bytes) -> bool:
        """Rename a file out of the volume, which must fail."""
        if name not in volume.sure:
            return False
        place = worker.chance.choice([ROOT, *(other.inode for other in self._volumes if other is not volume)])
        try:
            await worker.client.vfs.rename(volume.inode, name, place, name, 0, CALLER)
        except CrossesVolumes:
            return True
        raise InvariantBroken(f"{name!r} of volume {volume.name} was renamed into {place}")

    async def _resize(self, worker: SimulatedClient, volume: _Volume, _name: bytes, _other: bytes) -> bool:
        """Resize the volume, one client at a time.

        If more is used the request is refused, and the quota may be the former one.
        """
        if volume.resizing or volume.ending:
            return False
        new = worker.chance.randint(*FILES), worker.chance.randint(*BYTES)
        volume.resizing = True
        before = len(volume.limits)
        volume.limits.append(new)
        try:
            await with_pool_errors(
                volumes_of(worker.client).resize(volume.name, files_max=new[0], bytes_max=new[1])
            )
        except Refused:
            return False
        finally:
            volume.resizing = False
        if before == 1:
            volume.limits = [new]
        return True

    async def _remove(self, worker: SimulatedClient, volume: _Volume) -> None:
        """Remove the volume. Refused while a file in it is open."""
        volume.ending = True
        await with_pool_errors(volumes_of(worker.client).remove(volume.name))
        if volume.gone_s is None:
            volume.gone_s = self._loop.time()
            self._done["removed"] += 1

    # -- final checks

    async def look(self, judge: SimulatedClient) -> None:
        await asyncio.sleep(SETTLED_S)
        volumes = volumes_of(judge.client)
        there = {shown.inode: shown for shown in await with_pool_errors(volumes.list())}
        for volume in self._volumes:
            shown = there.get(volume.inode)
            if shown is not None and volume.gone_s is not None:
                self._wrong.append(f"volume {volume.name} was removed, and is listed")
            elif shown is not None:
                await self._look_into(judge, volume, shown)
            elif not volume.ending:
                self._wrong.append(f"volume {volume.name} is not there, and nobody removed it")
            else:
                await self._look_for_rests(judge, volume)

    async def _look_into(self, judge: SimulatedClient, volume: _Volume, shown: Shown) -> None:
        listed = await judge.listed(volume.inode)
        names = dict(listed)
        if (
            len(names) != len(listed)
            or any(names.get(name) != inode for name, inode in volume.sure.items())
            or names.keys() - volume.sure.keys() - volume.unsure
        ):
            self._wrong.append(
                f"volume {volume.name} lists {listed}, acknowledged were {volume.sure}, perhaps {volume.unsure}"
            )
        sizes = {inode: (await judge.client.vfs.getattr(inode)).size for inode in names.values()}
        if (shown.files_used, shown.bytes_used) != (len(sizes), sum(sizes.values())):
            self._wrong.append(
                f"volume {volume.name} counts {shown.files_used} files with {shown.bytes_used} bytes, and has "
                f"{len(sizes)} with {sum(sizes.values())}"
            )
        if shown.files_used > shown.files_max or shown.bytes_used > shown.bytes_max:
            self._wrong.append(f"volume {volume.name} is beyond its quota: {shown}")
        if (shown.files_max, shown.bytes_max) not in volume.limits:
            self._wrong.append(f"volume {volume.name} has other quotas than {volume.limits}: {shown}")
        for inode, least in volume.least.items():
            if sizes.get(inode, 0) < least:
                self._wrong.append(
                    f"inode {inode:#x} of volume {volume.name} has {sizes.get(inode)} bytes, {least} were acknowledged"
                )
        await self._fill(judge, volume, shown)

    async def _fill(self, judge: SimulatedClient, volume: _Volume, shown: Shown) -> None:
        """Check that EDQUOT comes exactly when the quota is reached."""
        vfs, made, grown = judge.client.vfs, 0, 0
        try:
            while made <= shown.files_max:
                _, handle = await vfs.create(
                    volume.inode, b"judge-%d" % made, 0o644, os.O_RDWR | os.O_EXCL, CALLER
                )
                made += 1
                await vfs.release(handle)
        except QuotaExceeded:
            pass
        if made != shown.files_max - shown.files_used:
            self._wrong.append(f"volume {volume.name} takes {made} files more: {shown}")
        names = await judge.listed(volume.inode)
        inode = names[0][1]
        begin = (await vfs.getattr(inode)).size
        free = shown.bytes_max - shown.bytes_used
        for more in (free, free + 1):
            try:
                await vfs.setattr(inode, size=begin + more, caller=CALLER)
                grown = more
            except QuotaExceeded:
                break
        if grown != free:
            self._wrong.append(f"volume {volume.name} takes {grown} bytes more of {free}: {shown}")

    async def _look_for_rests(self, judge: SimulatedClient, volume: _Volume) -> None:
        for _ in range(REMOVED_S):
            rests = await self._rests(judge, volume)
            if not rests:
                return
            await asyncio.sleep(1.0)
        self._wrong.append(f"volume {volume.name} is removed, and {REMOVED_S} s later there are {rests}")

    async def _rests(self, judge: SimulatedClient, volume: _Volume) -> list[str]:
        try:
            found = [
                f"chunk {index} of {inode:#x} on target {target}"
                for target, store in self._pool.stores.items()
                for inode, index in store.chunks()
                if inode in volume.ever
            ]
        except Unavailable as error:
            found = [str(error)]
        if await with_pool_errors(volumes_of(judge.client).removing(volume.inode)) is not None:
            found.append("its record")
        for inode in sorted(volume.ever):
            try:
                await judge.client.vfs.getattr(inode)
            except NotFound:
                continue
            found.append(f"inode {inode:#x}")
        return found

    def problems(self) -> list[str]:
        return self._wrong
