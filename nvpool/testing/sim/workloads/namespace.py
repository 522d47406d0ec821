"""Workload on names: create, link, rename, also over existing names, unlink, look up; in plain and striped
directories.

The check is a search, so each directory has few calls. Used by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from math import inf

from nvpool.client.pool_client import Client
from nvpool.client.state.vfs_types import RENAME_NOREPLACE
from nvpool.core.errors import AlreadyExists, InvariantBroken, NotFound, NvpoolError, Refused
from nvpool.testing.sim.linearizability import (
    NOT_LOOKED_AT,
    NameCall,
    Names,
    names_problems,
    without_what_was_seen_too_early,
)
from nvpool.testing.sim.virtual_time_loop import VirtualLoop
from nvpool.testing.sim.workloads.file_data import CALLER, ROOT, Act, SimulatedClient, Workload

NAMES = [b"0a", b"0b", b"1a", b"1b"]
"""Names in the first and second of two directories, which may be in two shards."""
CALLS_PER_DIRECTORY = 21
WIDE_SHARE = 0.4
"""Share of striped directories."""
KINDS = {"create": 4, "unlink": 2, "rename": 1, "replace": 2, "link": 2, "lookup": 3}


class NamespaceWorkload(Workload):
    """All clients work in the newest two directories, until these have had enough calls."""

    def __init__(
        self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float], one_shard: bool
    ) -> None:
        super().__init__(loop, done, losses)
        self._one_shard = one_shard
        self._pairs: list[tuple[list[int], list[NameCall]]] = []
        self._final: list[Names] = []
        self._wrong: list[str] = []
        self._tries = 0
        self._releasing: set[asyncio.Task] = set()

    def acts(self) -> list[tuple[int, Act]]:
        return [(8, self._act)]

    async def _act(self, worker: SimulatedClient) -> None:
        vfs, chance = worker.client.vfs, worker.chance
        if not self._pairs or len(self._pairs[-1][1]) >= CALLS_PER_DIRECTORY:
            self._tries += 1
            made = [
                (
                    await vfs.mkdir(
                        ROOT,
                        b"d%d-%d" % (self._tries, number),
                        0o755,
                        CALLER,
                        wide=chance.random() < WIDE_SHARE,
                    )
                ).inode
                for number in range(2)
            ]
            self._pairs.append((made, []))
            return
        directories, history = self._pairs[-1]
        kind, (name, other) = chance.choices(list(KINDS), list(KINDS.values()))[0], chance.sample(NAMES, 2)
        known = sorted({call.inode for call in history if call.inode})
        inode = chance.choice(known) if kind == "link" and known else 0
        if kind == "link" and not inode:
            kind = "create"
        begin, place = self._loop.time(), len(history)
        history.append(NameCall(kind, name, other, None, begin, inf, worker.name, inode))
        links, outcome = 0, "ok"
        place_of, place_of_other = (directories[name[0] - 48], name), (directories[other[0] - 48], other)
        try:
            if kind == "create":
                attr, made = await vfs.create(*place_of, 0o644, os.O_RDWR | os.O_EXCL, CALLER)
                inode = attr.inode
                self._release(worker.client, made)
            elif kind == "link":
                await vfs.link(inode, *place_of, CALLER)
            elif kind == "unlink":
                await vfs.unlink(*place_of, CALLER)
            elif kind == "lookup":
                attr = await vfs.look(*place_of)
                inode, links = attr.inode, attr.links if self._one_shard else NOT_LOOKED_AT
            else:
                await vfs.rename(
                    *place_of, *place_of_other, RENAME_NOREPLACE if kind == "rename" else 0, CALLER
                )
        except AlreadyExists:
            outcome = "exists"
        except NotFound:
            outcome = "missing"
        except Refused as error:
            raise InvariantBroken(f"{kind} {name!r} {other!r}: {error!r}") from error
        history[place] = NameCall(
            kind, name, other, outcome, begin, self._loop.time(), worker.name, inode, links
        )
        self._done["names"] += 1

    def _release(self, client: Client, handle) -> None:
        async def release() -> None:
            with contextlib.suppress(NvpoolError):
                await client.vfs.release(handle)

        task = self._loop.create_task(release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def look(self, judge: SimulatedClient) -> None:
        for directories, _ in self._pairs:
            there = set()
            for name in NAMES:
                with contextlib.suppress(NotFound):
                    there.add((name, (await judge.client.vfs.look(directories[name[0] - 48], name)).inode))
            self._final.append(frozenset(there))
            for number, directory in enumerate(directories):
                here = {name: inode for name, inode in there if name[0] - 48 == number}
                listed, size = await judge.listed(directory), (await judge.client.vfs.getattr(directory)).size
                if sorted(listed) != sorted(here.items()) or size != len(here):
                    self._wrong.append(
                        f"directory {directory:#x} lists {listed}, reports {size} names, and has {here}"
                    )

    def problems(self) -> list[str]:
        return [
            *self._wrong,
            *(
                f"directories {directories[0]:#x} and {directories[1]:#x}: {problem}"
                for (directories, history), final in zip(self._pairs, self._final, strict=True)
                for problem in names_problems(
                    without_what_was_seen_too_early(
                        history,
                        self._losses,
                        lambda call: call.kind != "lookup" and call.outcome in ("ok", None),
                    ),
                    final,
                )
            ),
        ]
