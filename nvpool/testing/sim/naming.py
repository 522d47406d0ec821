"""What the clients of a simulated pool do with names: create, link, rename, also over what is there, unlink, look. Judged by
search, so each directory has few calls. Called by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from math import inf

from nvpool.base.errors import AlreadyExists, InvariantBroken, NotFound, NvpoolError, Refused
from nvpool.client.session import Client
from nvpool.client.vfs import RENAME_NOREPLACE
from nvpool.testing.sim.linear import NameCall, Names, names_problems, without_what_was_seen_too_early
from nvpool.testing.sim.loop import VirtualLoop
from nvpool.testing.sim.works import CALLER, ROOT, Act, Work, Worker

NAMES = [b"a", b"b", b"c"]
CALLS_PER_DIRECTORY = 21
KINDS = {"create": 4, "unlink": 2, "rename": 1, "replace": 2, "link": 2, "lookup": 3}


class Naming(Work):
    """In turn all clients work in the newest directory, until it has seen enough calls."""

    def __init__(self, loop: VirtualLoop, done: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(loop, done, losses)
        self._directories: list[tuple[int, list[NameCall]]] = []
        self._final: dict[int, Names] = {}
        self._tries = 0
        self._releasing: set[asyncio.Task] = set()

    def acts(self) -> list[tuple[int, Act]]:
        return [(8, self._act)]

    async def _act(self, worker: Worker) -> None:
        vfs, chance = worker.client.vfs, worker.chance
        if not self._directories or len(self._directories[-1][1]) >= CALLS_PER_DIRECTORY:
            self._tries += 1
            made = await vfs.mkdir(ROOT, b"d%d-%d" % (len(self._directories), self._tries), 0o755, CALLER)
            self._directories.append((made.inode, []))
            return
        directory, history = self._directories[-1]
        kind, (name, other) = chance.choices(list(KINDS), list(KINDS.values()))[0], chance.sample(NAMES, 2)
        known = sorted({call.inode for call in history if call.inode})
        inode = chance.choice(known) if kind == "link" and known else 0
        if kind == "link" and not inode:
            kind = "create"
        begin, place = self._loop.time(), len(history)
        history.append(NameCall(kind, name, other, None, begin, inf, worker.name, inode))
        links, outcome = 0, "ok"
        try:
            if kind == "create":
                attr, made = await vfs.create(directory, name, 0o644, os.O_RDWR | os.O_EXCL, CALLER)
                inode = attr.inode
                self._release(worker.client, made)
            elif kind == "link":
                await vfs.link(inode, directory, name, CALLER)
            elif kind == "unlink":
                await vfs.unlink(directory, name, CALLER)
            elif kind == "lookup":
                attr = await vfs.look(directory, name)
                inode, links = attr.inode, attr.links
            else:
                await vfs.rename(directory, name, directory, other, RENAME_NOREPLACE if kind == "rename" else 0, CALLER)
        except AlreadyExists:
            outcome = "exists"
        except NotFound:
            outcome = "missing"
        except Refused as error:
            raise InvariantBroken(f"{kind} {name!r} {other!r}: {error!r}") from error
        history[place] = NameCall(kind, name, other, outcome, begin, self._loop.time(), worker.name, inode, links)
        self._done["names"] += 1

    def _release(self, client: Client, handle) -> None:
        async def release() -> None:
            with contextlib.suppress(NvpoolError):
                await client.vfs.release(handle)

        task = self._loop.create_task(release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def look(self, judge: Worker) -> None:
        for directory, _ in self._directories:
            there = set()
            for name in NAMES:
                with contextlib.suppress(NotFound):
                    there.add((name, (await judge.client.vfs.look(directory, name)).inode))
            self._final[directory] = frozenset(there)

    def problems(self) -> list[str]:
        return [f"directory {directory:#x}: {problem}" for directory, history in self._directories
                for problem in names_problems(without_what_was_seen_too_early(
                    history, self._losses, lambda call: call.kind != "lookup" and call.outcome in ("ok", None)),
                    self._final[directory])]
