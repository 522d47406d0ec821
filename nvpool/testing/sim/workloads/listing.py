"""Workload on many names in striped directories: make, rename and remove files and directories, list, remove
the directory.

Each name is changed by one client only. So all clients know at each moment whether it exists, unless a change
of it is in progress or its outcome is unknown. A listing has each name once that existed all the time, and
none that never existed; a directory is removed only when it is empty, and has no names after that. Used by
`sim/scenario`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field

from nvpool.client.pool_client import Client
from nvpool.core.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    InvariantBroken,
    NotFound,
    NvpoolError,
    Refused,
)
from nvpool.testing.sim.workloads.file_data import CALLER, Act, SimulatedClient, Workload

NAMES_EACH = 8
"""Names of one client in a directory."""
CALLS_PER_DIRECTORY = 90
STEP_MAX = 5
"""Most entries in one reply to a listing."""
KINDS = {"change": 10, "look": 3, "list": 4, "stat": 1, "chmod": 1, "rmdir": 1}


@dataclass
class Name:
    """State of a name. `changes` grows when a change of it begins, and when it has ended.

    A client that does not know the outcome of a change does not use the name again: it is `lost` from then
    on.
    """

    inode: int = 0
    """0: the name does not exist."""
    directory: bool = False
    changes: int = 0
    lost: bool = False

    @property
    def is_known(self) -> bool:
        return not self.lost and not self.changes % 2


@dataclass
class Directory:
    name: bytes
    inode: int
    names: dict[bytes, Name] = field(default_factory=dict)
    calls: int = 0
    removed: bool = False
    doubtful: bool = False
    """A client tried to remove it, with an unknown outcome."""

    def known(self) -> dict[bytes, tuple[int, int]]:
        """Return the certain names: name -> number of its changes, its inode."""
        return {name: (one.changes, one.inode) for name, one in self.names.items() if one.is_known}


class Listings(Workload):
    def __init__(self, *shared) -> None:
        super().__init__(*shared)
        self._directories: list[Directory] = []
        self._problems: list[str] = []
        self._tries = 0

    def acts(self) -> list[tuple[int, Act]]:
        return [(6, self._act)]

    async def prepare(self, client: Client) -> None:
        await super().prepare(client)
        await self._make_directory(client)

    async def _make_directory(self, client: Client) -> None:
        self._tries += 1
        name = b"wide-%d" % self._tries
        attr = await client.vfs.mkdir(self._home, name, 0o755, CALLER, wide=True)
        self._directories.append(Directory(name, attr.inode))

    async def _act(self, worker: SimulatedClient) -> None:
        chance = worker.chance
        directory = self._directories[-1]
        if directory.calls >= CALLS_PER_DIRECTORY or directory.removed:
            await self._make_directory(worker.client)
            return
        directory.calls += 1
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "rmdir":
            directory = chance.choice(self._directories)
        own = [b"%s-%d" % (worker.name.encode(), number) for number in range(NAMES_EACH)]
        for name in own:
            directory.names.setdefault(name, Name())
        try:
            if kind == "change":
                await self._change(worker, directory, own)
            else:
                await getattr(self, f"_{kind}")(worker, directory)
        except Refused as error:
            raise InvariantBroken(f"{kind} in {directory.name!r}: {error!r}") from error
        self._done["listed"] += 1

    def _wrong(self, directory: Directory, what: str) -> None:
        self._problems.append(
            f"{self._loop.time():.4f} s, {directory.name.decode()} ({directory.inode:#x}): {what}"
        )

    # -- changes -----------------------------------------------------------------------------------------------------

    async def _change(self, worker: SimulatedClient, directory: Directory, own: list[bytes]) -> None:
        vfs, chance = worker.client.vfs, worker.chance
        name = chance.choice(own)
        one = directory.names[name]
        if not one.is_known:
            return
        if not one.inode:
            is_directory = chance.random() < 0.25
            await self._changed(
                directory, [name], self._birth(worker, directory, name, is_directory), is_directory
            )
            return
        free = [
            other for other in own if directory.names[other].is_known and not directory.names[other].inode
        ]
        if free and chance.random() < 0.4:
            other = chance.choice(free)
            await self._changed(
                directory, [name, other], vfs.rename(directory.inode, name, directory.inode, other, 0, CALLER)
            )
        elif one.directory:
            await self._changed(directory, [name], vfs.rmdir(directory.inode, name, CALLER))
        else:
            await self._changed(directory, [name], vfs.unlink(directory.inode, name, CALLER))

    async def _birth(
        self, worker: SimulatedClient, directory: Directory, name: bytes, is_directory: bool
    ) -> int:
        vfs = worker.client.vfs
        if is_directory:
            return (await vfs.mkdir(directory.inode, name, 0o755, CALLER)).inode
        attr, handle = await vfs.create(directory.inode, name, 0o644, os.O_RDWR | os.O_EXCL, CALLER)
        try:
            await vfs.release(handle)
        except NvpoolError:
            pass  # the file was made
        return attr.inode

    async def _changed(
        self, directory: Directory, names: list[bytes], work, is_directory: bool = False
    ) -> None:
        """Record a change of names. One name is made or removed; of two, the first is renamed to the second."""
        some = [directory.names[name] for name in names]
        for one in some:
            one.changes += 1
        there = some[0].inode
        try:
            inode = await work
        except NotFound as error:
            if there or not (directory.removed or directory.doubtful):
                self._wrong(directory, f"{names} are not there: {error!r}")
        except AlreadyExists:
            self._wrong(directory, f"{names[-1]} is there, and nobody made it")
        except NvpoolError:
            for one in some:
                one.lost = True
            raise
        else:
            if len(some) == 2:
                some[1].inode, some[1].directory, some[0].inode = there, some[0].directory, 0
            else:
                some[0].inode, some[0].directory = (0, False) if there else (inode, is_directory)
            if directory.removed and some[-1].inode:
                self._wrong(directory, f"{names[-1]} was made though it had been removed")
        finally:
            for one in some:
                one.changes += 1

    async def _rmdir(self, worker: SimulatedClient, directory: Directory) -> None:
        if directory.removed or directory.doubtful:
            return
        before, directory.doubtful = directory.known(), True
        try:
            await worker.client.vfs.rmdir(self._home, directory.name, CALLER)
        except DirectoryNotEmpty:
            directory.doubtful = False
            after = directory.known()
            if all(
                not inode and after.get(name) == (changes, inode) for name, (changes, inode) in before.items()
            ) and len(before) == len(directory.names):
                self._wrong(directory, "is said not to be empty")
            return
        directory.removed = True
        if there := [name for name, (_, inode) in directory.known().items() if inode]:
            self._wrong(directory, f"was removed with {there} in it")

    # -- queries -----------------------------------------------------------------------------------------------------

    async def _look(self, worker: SimulatedClient, directory: Directory) -> None:
        name = worker.chance.choice(list(directory.names))
        before = directory.known()
        found = await self._found(worker, directory, name)
        self._compare(directory, before, {name: found} if found else {}, [name], "is looked for")

    async def _found(self, worker: SimulatedClient, directory: Directory, name: bytes) -> int:
        try:
            return (await worker.client.vfs.look(directory.inode, name)).inode
        except NotFound:
            return 0

    async def _list(self, worker: SimulatedClient, directory: Directory) -> None:
        before = directory.known()
        found = await self._listed(worker, directory)
        if found is not None:
            self._compare(directory, before, found, list(before), "is listed")

    async def _listed(self, worker: SimulatedClient, directory: Directory) -> dict[bytes, int] | None:
        try:
            found = await worker.listed(directory.inode, STEP_MAX)
        except NotFound:
            if not (directory.removed or directory.doubtful):
                self._wrong(directory, "is not there to be listed")
            return None
        if len(dict(found)) != len(found):
            self._wrong(directory, f"lists names twice: {sorted(found)}")
        return dict(found)

    def _compare(
        self,
        directory: Directory,
        before: dict[bytes, tuple[int, int]],
        found: dict[bytes, int],
        names: list[bytes],
        how: str,
    ) -> None:
        after = directory.known()
        for name in names:
            state = before.get(name)
            if (
                state is not None
                and after.get(name) == state
                and found.get(name, 0) != state[1]
                and not directory.doubtful
            ):
                self._wrong(
                    directory, f"{name} {how}: {found.get(name, 0):#x}, and is {state[1]:#x} all the time"
                )
        if unexpected := found.keys() - directory.names.keys():
            self._wrong(directory, f"has names that nobody made: {unexpected}")

    async def _stat(self, worker: SimulatedClient, directory: Directory) -> None:
        try:
            attr = await worker.client.vfs.getattr(directory.inode)
        except NotFound:
            if not (directory.removed or directory.doubtful):
                self._wrong(directory, "is not there")
            return
        if not stat.S_ISDIR(attr.mode):
            self._wrong(directory, f"has mode {attr.mode:o}")

    async def _chmod(self, worker: SimulatedClient, directory: Directory) -> None:
        """Change the mode, which also moves the shards' statistics of the directory into its record."""
        try:
            await worker.client.vfs.setattr(
                directory.inode, mode=worker.chance.choice((0o700, 0o755)), caller=CALLER
            )
        except NotFound:
            if not (directory.removed or directory.doubtful):
                self._wrong(directory, "is not there")

    async def look(self, judge: SimulatedClient) -> None:
        for directory in self._directories:
            found = await self._listed(judge, directory)
            if directory.removed:  # its record may wait for the collector
                with contextlib.suppress(NotFound):
                    attr = await judge.client.vfs.look(self._home, directory.name)
                    self._wrong(directory, f"was removed, and its name leads to {attr.inode:#x}")
                if found:
                    self._wrong(directory, f"was removed, and has {found}")
                continue
            if found is None:
                continue
            self._compare(directory, directory.known(), found, list(directory.names), "is listed in the end")
            for name in directory.names:
                if (inode := await self._found(judge, directory, name)) != found.get(name, 0):
                    self._wrong(directory, f"{name} is {inode:#x}, and is listed as {found.get(name, 0):#x}")
            attr = await judge.client.vfs.getattr(directory.inode)
            below = [
                inode
                for inode in found.values()
                if stat.S_ISDIR((await judge.client.vfs.getattr(inode)).mode)
            ]
            if (attr.size, attr.links) != (len(found), 2 + len(below)):
                self._wrong(
                    directory,
                    f"reports {attr.size} entries and {attr.links} links, and has {len(found)} names, "
                    f"{len(below)} of directories",
                )

    def problems(self) -> list[str]:
        return self._problems
