"""One seed: clients change and look, processes die between two steps, nodes are cut off; then all that was told must be true.

    python -m nvpool.testing.sim.scenario 4711            one seed, with what went wrong
    python -m nvpool.testing.sim.scenario --seeds 1000    from 1 on; ends at the first that violates something

Judged: each block of a file is a register, its history linearizable; the names of a directory likewise; what is there in the
end is what the histories say; nobody waits for ever; no process met an error that is a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import sys
import traceback
from collections.abc import Iterator
from math import inf

from nvpool.base.errors import AlreadyExists, Bug, InvariantBroken, NotFound, NvpoolError, Refused
from nvpool.client.session import Client
from nvpool.client.vfs import RENAME_NOREPLACE, Caller
from nvpool.logic import chainset
from nvpool.testing.sim.faults import Faults
from nvpool.testing.sim.linear import Access, NameCall, names_problems, register_problems
from nvpool.testing.sim.loop import VirtualLoop
from nvpool.testing.sim.pool import CHUNK_BYTES, SimPool

ROOT = 1
BLOCK = 4096
BLOCKS = 3 * CHUNK_BYTES // BLOCK
CALLER = Caller(0, 0, (0,))
NAMES = [b"a", b"b", b"c"]
CHAINS = 32
"""In a table."""
WHOLE_S = 120
"""In which all chains have all their copies, once nothing fails any more."""
CALLS_PER_DIRECTORY = 7
"""Of each client: histories of names are judged by search."""


class Scenario:
    def __init__(self, loop: VirtualLoop, seed: int, *, seconds: float = 30.0, clients: int = 3,
                 replicas: int | None = None, standbys: int | None = None, kinds: dict[str, int] | None = None,
                 of: str = "") -> None:
        self._loop = loop
        self._seed = seed
        self._seconds = seconds
        self._count = clients
        self._chance = random.Random(f"{seed} scenario")
        replicas = self._chance.choice((1, 2, 2, 3)) if replicas is None else replicas
        self._pool = SimPool(loop, str(seed), targets=replicas + self._chance.choice((0, 1, 2)), replicas=replicas,
                             standbys=self._chance.choice((0, 1, 1, 2)) if standbys is None else standbys)
        self._aim = kinds, of
        self._blocks: dict[int, list[Access]] = {}
        self._directories: dict[int, tuple[int, list[NameCall]]] = {}
        self._values = self._directory_tries = 0
        self._over = False
        self.done = {"writes": 0, "reads": 0, "names": 0, "unknown": 0, "deaths": 0, "stops": 0, "cuts": 0, "terms": 0}

    async def run(self) -> list[str]:
        """What was violated, as sentences; none when all held."""
        try:
            return await self._run()
        except Exception as error:  # shown with what else is known of the seed
            said = traceback.format_exc().splitlines()[-6:]
            return [f"the simulation ends with {error!r}", *said, *self._pool.truths.problems]

    async def _run(self) -> list[str]:
        async with self._pool as pool:
            faults = Faults(pool, self._chance, lambda: self._over, self.done, *self._aim)
            clients = [await pool.client(f"client-{number}") for number in range(1, self._count + 1)]
            _, handle = await clients[0].vfs.create(ROOT, b"file", 0o644, os.O_RDWR, CALLER)
            await clients[0].vfs.setattr(handle.inode, size=BLOCKS * BLOCK, caller=CALLER)
            pool.network.reset_share = self._chance.choice((0.0, 0.0005, 0.003))
            breaking = self._loop.create_task(faults.run())
            work = [self._loop.create_task(self._work(client, number, handle.inode)) for number, client in enumerate(clients)]
            await asyncio.sleep(self._seconds)
            self._over = True
            await breaking
            await faults.mend()
            _, late = await asyncio.wait(work, timeout=300.0)
            problems = [f"{len(late)} clients still wait, five minutes after all was mended"] if late else []
            for task in work:
                if task.done() and task.exception() is not None:
                    problems.append(f"a client broke: {task.exception()!r}")
                task.cancel()
            if not problems:
                try:
                    await self._look_at_the_end(await pool.client("judge"), handle.inode)
                except NvpoolError as error:
                    problems.append(f"who looks at what there is in the end gets {error!r}")
                else:
                    problems += self._judge()
                problems += await self._look_at_replicas()
        self.done["terms"] += sum(shard.term for shard in pool.pool_map.shards)
        return problems + pool.failures + pool.truths.problems

    # -- work

    async def _work(self, client: Client, number: int, inode: int) -> None:
        chance = random.Random(f"{self._seed} client {number}")
        handle = None
        acts = [self._write, self._read, self._name]
        shares = (4, 5, 4) if number or self._seed % 2 else (0, 8, 2)  # who writes nothing is told of no new map by that
        while not self._over:
            await asyncio.sleep(chance.expovariate(20))
            try:
                if handle is None:
                    handle = await client.vfs.open(inode, os.O_RDWR, CALLER)
                await chance.choices(acts, shares)[0](client, f"client-{number + 1}", handle, chance)
            except (Bug, InvariantBroken):
                raise
            except NvpoolError:
                self.done["unknown"] += 1

    async def _write(self, client: Client, who: str, handle, chance: random.Random) -> None:
        self._values += 1
        value, block, begin = self._values, chance.randrange(BLOCKS), self._loop.time()
        history = self._blocks.setdefault(block, [])
        place = len(history)
        history.append(Access("write", value, begin, inf, who))
        await client.vfs.write(handle, block * BLOCK, value.to_bytes(8, "little") * (BLOCK // 8))
        await client.vfs.fsync(handle, True)
        history[place] = Access("write", value, begin, self._loop.time(), who)
        self.done["writes"] += 1

    async def _read(self, client: Client, who: str, handle, chance: random.Random) -> None:
        block = chance.randrange(BLOCKS)
        value, begin = await self._stored(client, handle, block)
        self._blocks.setdefault(block, []).append(Access("read", value, begin, self._loop.time(), who))
        self.done["reads"] += 1

    async def _stored(self, client: Client, handle, block: int) -> tuple[int, float]:
        """What a store says, whatever the client remembers; and when it was asked."""
        begin, offset = self._loop.time(), block * BLOCK
        found = bytes(await client.vfs.chunks.read(handle.file, offset // CHUNK_BYTES, offset % CHUNK_BYTES, BLOCK))
        if found != found[:8] * (BLOCK // 8):
            raise InvariantBroken(f"block {block} is a mixture")
        return int.from_bytes(found[:8], "little"), begin

    async def _name(self, client: Client, who: str, handle, chance: random.Random) -> None:
        """In turn each client works in the newest directory, until it has seen enough calls."""
        if not self._directories or len(self._newest()[1]) >= CALLS_PER_DIRECTORY * self._count:
            self._directory_tries += 1
            made = await client.vfs.mkdir(ROOT, b"d%d-%d" % (len(self._directories), self._directory_tries), 0o755, CALLER)
            self._directories[len(self._directories)] = made.inode, []
            return
        directory, history = self._newest()
        kind, name, other = chance.choice(("create", "create", "unlink", "rename", "lookup")), *chance.sample(NAMES, 2)
        begin, place = self._loop.time(), len(history)
        history.append(NameCall(kind, name, other, None, begin, inf, who))
        try:
            if kind == "create":
                _, made = await client.vfs.create(directory, name, 0o644, os.O_RDWR | os.O_EXCL, CALLER)
                outcome = "ok"
                self._loop.create_task(_released(client, made))
            elif kind == "unlink":
                outcome = await client.vfs.unlink(directory, name, CALLER) or "ok"
            elif kind == "rename":
                outcome = await client.vfs.rename(directory, name, directory, other, RENAME_NOREPLACE, CALLER) or "ok"
            else:
                await client.vfs.look(directory, name)
                outcome = "ok"
        except AlreadyExists:
            outcome = "exists"
        except NotFound:
            outcome = "missing"
        except Refused as error:
            raise InvariantBroken(f"{kind} {name!r} {other!r}: {error!r}") from error
        history[place] = NameCall(kind, name, other, outcome, begin, self._loop.time(), who)
        self.done["names"] += 1

    def _newest(self) -> tuple[int, list[NameCall]]:
        return self._directories[len(self._directories) - 1]

    # -- judging

    async def _look_at_the_end(self, judge: Client, inode: int) -> None:
        handle = await judge.vfs.open(inode, os.O_RDONLY, CALLER)
        for block in range(BLOCKS):
            value, begin = await self._stored(judge, handle, block)
            self._blocks.setdefault(block, []).append(Access("read", value, begin, self._loop.time(), "judge"))
        await judge.vfs.release(handle)
        self._final = {}
        for number, (directory, _) in self._directories.items():
            there = set()
            for name in NAMES:
                with contextlib.suppress(NotFound):
                    await judge.vfs.look(directory, name)
                    there.add(name)
            self._final[number] = frozenset(there)

    async def _look_at_replicas(self) -> list[str]:
        for _ in range(WHOLE_S * 2):
            if self._pool.is_whole():
                await asyncio.sleep(5.0)
                return self._pool.replica_problems()
            await asyncio.sleep(0.5)
        lacking = [(table.id, number, chain) for table in self._pool.pool_map.tables
                   for number, chain in enumerate(table.chains)
                   if len(chain.targets) < table.id or chain.joining or chain.leaving]
        return [f"{len(lacking)} chains are not whole {WHOLE_S} s after all was mended, the first is {lacking[0]}"]

    def _judge(self) -> list[str]:
        problems = []
        for block, history in sorted(self._blocks.items()):
            problems += [f"block {block}: {problem}" for problem in register_problems(history)]
        for number, (directory, history) in self._directories.items():
            found = names_problems(history, self._final[number])
            problems += [f"directory {directory:#x}: {problem}" for problem in found]
        return problems


async def _released(client: Client, handle) -> None:
    with contextlib.suppress(NvpoolError):
        await client.vfs.release(handle)


def simulate(seed: int, **named) -> tuple[list[str], dict[str, int]]:
    """Run one seed: what was violated, and how much was done. The same seed gives the same."""
    problems, done, _ = simulated(seed, **named)
    return problems, done


def simulated(seed: int, **named) -> tuple[list[str], dict[str, int], list[str]]:
    """And the last things that happened."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    with _few_chains():
        try:
            scenario = Scenario(loop, seed, **named)
            problems = loop.run_until_complete(scenario.run())
            scenario.done["frames"] = scenario._pool.network.frames
            return problems, scenario.done, list(scenario._pool.truths.events)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _few_chains() -> Iterator[None]:
    """Half of a simulation's time went into maps of 1,024 chains, which a handful of chunks needs as little as it shows."""
    having = [module for name, module in sys.modules.items()
              if name.startswith("nvpool.") and hasattr(module, "CHAINS_PER_TABLE")]
    before, raw_before = having[0].CHAINS_PER_TABLE, chainset._TABLE_BYTES
    try:
        chainset._TABLE_BYTES = 1 + CHAINS // 8
        for module in having:
            module.CHAINS_PER_TABLE = CHAINS
        yield
    finally:
        chainset._TABLE_BYTES = raw_before
        for module in having:
            module.CHAINS_PER_TABLE = before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="that many, from SEED on")
    parser.add_argument("--verbose", action="store_true", help="with the log of all processes")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.DEBUG)
    else:
        logging.disable()
    total: dict[str, int] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        problems, done, events = simulated(seed)
        total = {name: total.get(name, 0) + count for name, count in done.items()}
        if problems:
            print("the last that happened:", *events, sep="\n  ")
            print(f"seed {seed} violates {len(problems)} promises:", *problems[:20], sep="\n  ")
            print(f"shown again by: {sys.executable} -m nvpool.testing.sim.scenario {seed}")
            return 1
    print(f"{options.seeds} seeds from {options.seed} on, nothing violated:",
          ", ".join(f"{count:,} {name}" for name, count in total.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
