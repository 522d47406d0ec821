"""All measurements of one shard, in order: cold, warm, growing, killed, listed; then its engine alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.poolmap.file_layout import Layout

from .build import pages
from .loads import Client, at_random, engine_creates, engine_look_ups, until
from .shard import Failed, Shard, forget, read_whole
from .tree import Tree

COLD_LOOK_UPS = 4000
"""So few that, with a million files, hardly one finds a page that another one has read."""
NEW_DIRECTORIES = 400
"""Directories that are made beforehand for the files that are added."""
KILLED_AFTER_S = 0.7
"""Seconds, less than between two checkpoints, so that the journal has content."""
LISTED_AT_LEAST = 1_000_000
"""Entries of a directory that is not listed whole."""
WARM_S, WARM_READS_MAX = 15.0, 4
COPY_BYTES = 64 << 20


class Options:
    def __init__(self, seconds: float, list_whole: int) -> None:
        self.seconds = seconds
        self.list_whole = list_whole
        """A directory of so many files at most is listed from beginning to end."""


async def measured(
    work: Path,
    kept: Path | None,
    made: dict,
    options: Options,
    environment: dict[str, str],
    progress: Callable[[str], Callable[[float], None]],
) -> dict:
    """The figures of the shard whose records are at `kept`, measured on a copy below `work`; of an empty one without."""
    copy = None
    if kept is not None:
        copy = work / "copy"
        copy_shard(kept, copy, progress("copying"))
    shard = Shard(work / "pool", copy, environment)
    try:
        return await _Measuring(shard, made, options, progress).all()
    finally:
        await shard.close()
        shard.end()
        shutil.rmtree(work / "pool", ignore_errors=True)


def copy_shard(source: Path, target: Path, progress: Callable[[float], None]) -> None:
    """All files of a shard; where the file system can share blocks, it does. The source is not left in memory."""
    target.mkdir()
    for path in source.iterdir():
        done, size = 0, path.stat().st_size
        with open(path, "rb") as old, open(target / path.name, "wb") as new:
            while moved := os.copy_file_range(old.fileno(), new.fileno(), COPY_BYTES):
                os.posix_fadvise(old.fileno(), done, moved, os.POSIX_FADV_DONTNEED)
                done += moved
                progress(done / size)
            os.fsync(new.fileno())


class _Measuring:
    def __init__(
        self, shard: Shard, made: dict, options: Options, progress: Callable[[str], Callable[[float], None]]
    ) -> None:
        self._shard, self._options, self._progress = shard, options, progress
        self._tree = Tree(made["files"], made["per_directory"], bytes.fromhex(made["name_key"]), Layout())
        self._figures: dict = {}
        self._memory: dict[str, int] = {}
        self._next = 0
        self._parents: list[int] = []

    async def all(self) -> dict:
        shard, figures = self._shard, self._figures
        forget(shard.database)
        connection, figures["start_cold_s"] = await shard.start()
        if not self._tree.files:
            self._see("started")
            figures["stop_s"] = await shard.stop()
            _, figures["start_s"] = await shard.start()
            await shard.kill()
            return figures | {"memory": self._memory}
        tree = self._tree
        client = await Client(connection).begin()
        numbers = at_random(tree.files, 1)
        figures["cold_look_ups"] = await self._rate(
            client.look_up(tree.parent_of, islice(numbers, COLD_LOOK_UPS))
        )
        await shard.stop()

        await self._warm()
        connection, figures["start_s"] = await shard.start()
        self._see("started")
        client = await Client(connection).begin()
        seconds = self._options.seconds
        for name, ask, seed in (
            ("look_ups", client.look_up, 2),
            ("look_ups_together", client.look_up_together, 3),
        ):
            await self._warm()
            numbers = until(at_random(tree.files, seed), seconds, self._progress(name))
            figures[name] = await self._rate(ask(tree.parent_of, numbers))
        self._see("after look-ups")
        await self._warm()
        await self._grow(client, seconds)
        await self._killed(client)
        figures["stop_s"] = await shard.stop()
        figures["after"] = pages(shard.path)
        await self._engine()
        return figures | {"memory": self._memory}

    def _see(self, when: str, most: int = 0) -> None:
        memory = self._shard.memory()
        self._memory[when] = {**memory, "anonymous_bytes": max(most, memory["anonymous_bytes"])}

    async def _warm(self) -> None:
        """Before each load, and again where it took long: there are machines that take pages away from who has not used them
        for half a minute."""
        for _ in range(WARM_READS_MAX):
            began_s = time.monotonic()
            await asyncio.to_thread(read_whole, self._shard.database, self._progress("reading into memory"))
            if time.monotonic() - began_s < WARM_S:
                break

    async def _rate(self, work) -> dict:
        """{a second, µs of the shard's processor for one, pages read from the drive for one, how many}."""
        spent_s, pages_read = self._shard.spent()
        began_s = time.monotonic()
        done = await work
        took_s, (spent_now_s, pages_now) = time.monotonic() - began_s, self._shard.spent()
        each = max(done, 1)
        return {
            "per_s": done / took_s,
            "processor_us": 1e6 * (spent_now_s - spent_s) / each,
            "pages_read": (pages_now - pages_read) / each,
            "count": done,
        }

    # -- growing ---------------------------------------------------------------------------------------------------------

    async def _grow(self, client: Client, seconds: float) -> None:
        tree, shard = self._tree, self._shard
        size = tree.per_directory
        self._next = tree.directories * size or tree.files
        if size:
            for number in range(NEW_DIRECTORIES):
                self._parents.append(await client.make_directory(tree.home, b"added-%04d" % number))
        numbers = until(count(self._next), seconds, self._progress("creates"))
        self._figures["creates"], most = await shard.most_anonymous(
            self._rate(client.make_files(self._parent, numbers))
        )
        self._next += self._figures["creates"]["count"]
        self._see("after creates", most)

    def _parent(self, number: int) -> int:
        tree = self._tree
        if not self._parents:
            return tree.home
        return self._parents[
            (number - tree.directories * tree.per_directory) // tree.per_directory % NEW_DIRECTORIES
        ]

    async def _killed(self, client: Client) -> None:
        """While it makes files; then the first start, what it replays, and whether all is there that was acknowledged."""
        shard, acknowledged = self._shard, []
        making = asyncio.ensure_future(
            client.make_files(self._parent, count(self._next), acknowledged.append)
        )
        await asyncio.wait([making], timeout=KILLED_AFTER_S)
        await shard.kill()
        await asyncio.gather(making, return_exceptions=True)
        connection, self._figures["start_after_kill_s"] = await shard.start()
        client = await Client(connection).begin()
        status = await client.status()
        self._figures["replayed"] = int(status.counters["kv_replayed"])
        self._figures["files_after"] = (
            status.inodes - self._tree.inode_count + self._tree.files - len(self._parents)
        )
        if await client.look_up(self._parent, iter(acknowledged)) < len(acknowledged):
            raise Failed("the daemon was killed, and files that it had acknowledged are not there")
        await self._listed(client)

    # -- listing ---------------------------------------------------------------------------------------------------------

    async def _listed(self, client: Client) -> None:
        tree, options = self._tree, self._options
        entries = tree.directories or tree.files
        whole = entries <= options.list_whole
        wanted = 1 << 60 if whole else LISTED_AT_LEAST
        before = self._shard.memory()["anonymous_bytes"]
        for name, attributes in (("list", False), ("list_with_attributes", True)):
            work = client.list(tree.home, entries, wanted, attributes, self._progress(name))
            found, most = await self._shard.most_anonymous(self._rate(work))
            if whole and found["count"] < entries:
                raise Failed(f"{entries} entries are in the directory, {found['count']} were listed")
            self._figures[name] = found | {"whole": whole, "grew_bytes": max(0, most - before)}
        self._see("after listing", most)

    # -- the engine ------------------------------------------------------------------------------------------------------

    async def _engine(self) -> None:
        await self._warm()
        kv = await LmdbKv.open(self._shard.path, LmdbOptions())
        try:
            seconds = self._options.seconds / 2
            self._figures["engine_look_ups"] = {"per_s": engine_look_ups(kv, self._tree, seconds)}
            await self._warm()
            rate = await engine_creates(kv, self._tree, 2 * self._next, seconds)
            self._figures["engine_creates"] = {"per_s": rate}
        finally:
            await kv.close()
