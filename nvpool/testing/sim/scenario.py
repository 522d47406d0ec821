"""One seed: clients change and read while processes die and nodes are cut off; then all promises are checked.

    python -m nvpool.testing.sim.scenario 4711            one seed, with its violations
    python -m nvpool.testing.sim.scenario --seeds 1000    from 1 on; ends at the first violation

Checked are: replies to clients about blocks, names, sizes, appended records, locks (`sim/workloads/file_data`,
`sim/workloads/namespace`, `sim/workloads/listing`), new files (`sim/workloads/closed_files`) and volumes
(`sim/workloads/quotas`); the final content; that fsck finds nothing, replicas are equal, and chains and
partitions are complete at the end; that drains end (`sim/workloads/drains`); that no client waits for ever
and no process gets an error that is a bug; and the invariants of `sim/invariants` all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import sys
import traceback
from collections.abc import Iterator

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.core.errors import Bug, InvariantBroken, NvpoolError, WritesLost
from nvpool.poolmap.chains import tables
from nvpool.sdk.fsck.check import FsckReport, check_metadata
from nvpool.testing.sim.faults import (
    KINDS,
    KINDS_OF_ETCD,
    KINDS_OF_ROT,
    KINDS_OF_STANDBYS,
    KINDS_WITH_FULL,
    KINDS_WITH_POWER,
    BrokenLinks,
    EndpointFaults,
    SimulatedFaults,
)
from nvpool.testing.sim.pool import SimPool
from nvpool.testing.sim.virtual_time_loop import VirtualLoop
from nvpool.testing.sim.workloads.closed_files import ClosedFiles
from nvpool.testing.sim.workloads.drains import Drains
from nvpool.testing.sim.workloads.file_data import (
    AppendWorkload,
    Blocks,
    LockWorkload,
    SimulatedClient,
    Sizes,
    Workload,
)
from nvpool.testing.sim.workloads.listing import Listings
from nvpool.testing.sim.workloads.namespace import NamespaceWorkload
from nvpool.testing.sim.workloads.quotas import Quotas
from nvpool.testing.sim.workloads.shard_changes import ShardOperator

OPTIONS = ClientOptions(deadline_s=30.0, transport="stream", short_circuit=False, fresh_s=0.0, attr_s=0.0)
CHAINS = 32
"""Chains of a table."""
MOVING_SHARE = 0.5
"""Share of seeds in which shards are added and removed."""
ETCD_SHARE = 0.34
VOLUMES_SHARE = 0.4
"""Share of seeds with volumes. Drawn separately, so that other seeds behave as before."""
DRAINING_SHARE = 0.5
"""Share of seeds with more targets than replicas in which drives are drained. Drawn separately, too."""
QUIET_S = 5.0
WHOLE_S = 120
"""Time in which all chains have all their copies, once faults have ended."""
COUNTED = (
    "writes",
    "reads",
    "cuts_made",
    "names",
    "listed",
    "sizes",
    "appends",
    "locks",
    "closed",
    "unknown",
    "deaths",
    "stops",
    "cuts",
    "endpoints",
    "power",
    "full",
    "rotten",
    "etcd",
    "shards",
    "moved",
    "terms",
    "volumes",
    "quotas",
    "removed",
    "drains",
)


class Scenario:
    """One simulation. Arguments that are not given are chosen by the seed.

    `kinds`, `of`: faults, see SimulatedFaults. `replicas`, `standbys`, `shards`: numbers at the beginning.
    `moving`: whether shards are added and removed. `etcd`: whether etcd keeps the map. `only`: kinds of work.
    `volumes`: whether there are any. `draining`: whether drives are drained; then there are more targets than
    replicas.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        seconds: float = 20.0,
        clients: int = 3,
        replicas: int | None = None,
        standbys: int | None = None,
        shards: int | None = None,
        moving: bool | None = None,
        etcd: bool | None = None,
        kinds: dict[str, int] | None = None,
        of: str = "",
        only: tuple[type[Workload], ...] = (),
        volumes: bool | None = None,
        draining: bool | None = None,
    ) -> None:
        self._loop = loop
        self._seed = seed
        self._seconds = seconds
        self._count = clients
        self._chance = chance = random.Random(f"{seed} scenario")
        replicas = chance.choice((1, 2, 2, 3)) if replicas is None else replicas
        targets, members = replicas + chance.choice((0, 1, 2)), chance.choice((0, 1, 1, 2))
        chosen = kinds is None
        kinds = (
            kinds
            or chance.choices(
                (KINDS, KINDS_WITH_POWER, KINDS_WITH_FULL, KINDS_OF_ROT if replicas > 1 else KINDS),
                (10, 5, 2, 1),
            )[0]
        )
        shards = chance.choice((1, 1, 2, 3)) if shards is None else shards
        self._moving = chance.random() < MOVING_SHARE if moving is None else moving
        etcd = chance.random() < ETCD_SHARE if etcd is None else etcd
        if etcd and chosen and kinds is not KINDS_OF_ROT:
            kinds = kinds | KINDS_OF_ETCD
        if members and standbys is None and chosen and kinds is not KINDS_OF_ROT:
            kinds = kinds | KINDS_OF_STANDBYS
        targets = max(targets, replicas + 1) if draining else targets
        share = DRAINING_SHARE if targets > replicas else 0.0
        self._draining = random.Random(f"{seed} drains").random() < share if draining is None else draining
        self.pool = SimPool(
            loop,
            str(seed),
            targets=targets,
            replicas=replicas,
            options=OPTIONS,
            standbys=members if standbys is None else standbys,
            shards=shards,
            etcd=etcd,
            durability="always" if "power" in kinds else "interval",
        )
        self._aim = kinds, of
        self._breaks_links = chosen and kinds is not KINDS_OF_ROT
        self._breaks_endpoints = etcd and chosen and kinds is not KINDS_OF_ROT
        self._over = False
        self.done = dict.fromkeys(COUNTED, 0)
        shared = loop, self.done, self.pool.power_losses
        works = [
            Blocks(*shared, cuts=chance.random() < 0.5),
            NamespaceWorkload(*shared, shards == 1 and not self._moving),
            Listings(*shared),
            Sizes(*shared),
            AppendWorkload(*shared),
            LockWorkload(*shared),
            ClosedFiles(*shared),
        ]
        apart = random.Random(f"{seed} volumes")
        if apart.random() < VOLUMES_SHARE if volumes is None else volumes:
            works.append(
                Quotas(
                    *shared,
                    self.pool,
                    apart.randint(1, 2),
                    apart.uniform(0.3, 0.9) * seconds if apart.random() < 0.5 else None,
                )
            )
        self._works: list[Workload] = [work for work in works if not only or isinstance(work, only)]

    async def run(self) -> list[str]:
        """Run the simulation and return the violations, as sentences."""
        try:
            return await self._run()
        except Exception as error:  # reported with all else that is known of the seed
            said = traceback.format_exc().splitlines()[-6:]
            return [f"the simulation ends with {error!r}", *said, *self.pool.invariants.problems]

    async def _run(self) -> list[str]:
        async with self.pool as pool:
            faults = SimulatedFaults(pool, self._chance, lambda: self._over, self.done, *self._aim)
            clients = [await pool.client(f"client-{number}") for number in range(1, self._count + 1)]
            for work in self._works:
                await work.prepare(clients[0])
            pool.network.reset_share = self._chance.choice((0.0, 0.0005, 0.003))
            breaking = self._loop.create_task(faults.run())
            operator = ShardOperator(
                pool, random.Random(f"{self._seed} wishes"), lambda: self._over, self.done
            )
            operating = self._loop.create_task(operator.run() if self._moving else asyncio.sleep(0))
            endpoints = EndpointFaults(
                pool, random.Random(f"{self._seed} endpoints"), lambda: self._over, self.done
            )
            misleading = self._loop.create_task(
                endpoints.run() if self._breaks_endpoints else asyncio.sleep(0)
            )
            links = BrokenLinks(pool, random.Random(f"{self._seed} links"), lambda: self._over, self.done)
            parting = self._loop.create_task(links.run() if self._breaks_links else asyncio.sleep(0))
            drains = Drains(pool, random.Random(f"{self._seed} drained"), lambda: self._over, self.done)
            draining = self._loop.create_task(drains.run() if self._draining else asyncio.sleep(0))
            working = [
                self._loop.create_task(self._work(client, number)) for number, client in enumerate(clients)
            ]
            await asyncio.sleep(self._seconds)
            self._over = True
            await breaking
            await misleading
            await parting
            await faults.mend()
            await operating
            await draining
            _, late = await asyncio.wait(working, timeout=300.0)
            problems = [f"{len(late)} clients still wait, five minutes after all was mended"] if late else []
            for task in working:
                if task.done() and task.exception() is not None:
                    problems.append(f"a client broke: {task.exception()!r}")
                task.cancel()
            if not problems:
                problems += await operator.until_at_rest()
            if self._draining and not problems:
                problems += await drains.until_ended()
            if not problems:
                judge = await pool.client("judge")
                problems += await self._look(judge) + await self._check(judge)
                problems += await self._look_at_replicas()
        self.done["moved"] += pool.invariants.moved
        self.done["terms"] += sum(shard.term for shard in pool.pool_map.shards)
        return problems + pool.failures + pool.invariants.problems

    async def _work(self, client: Client, number: int) -> None:
        """Let a client work until the end. One that only reads blocks gets no new map in replies to its
        writes."""
        worker = SimulatedClient(
            client, f"client-{number + 1}", random.Random(f"{self._seed} client {number}"), {}
        )
        only_reads = not number and self._seed % 2 == 0
        acts = [
            (share, act)
            for work in self._works
            for share, act in work.acts()
            if not only_reads or not isinstance(work, Blocks) or act == work.read
        ]
        while not self._over:
            await asyncio.sleep(worker.chance.expovariate(20))
            try:
                await worker.chance.choices([act for _, act in acts], [share for share, _ in acts])[0](worker)
            except (Bug, InvariantBroken):
                raise
            except NvpoolError as error:
                if isinstance(error, WritesLost) and not self.pool.has_lost:
                    raise InvariantBroken(
                        "a client got an error for lost writes, and no drive has lost any"
                    ) from error
                self.done["unknown"] += 1

    # -- final checks

    async def _look(self, client: Client) -> list[str]:
        judge = SimulatedClient(client, "judge", self._chance, {})
        try:
            for work in self._works:
                await work.look(judge)
        except NvpoolError as error:
            return [
                f"who looks at what there is in the end gets {error!r}",
                *traceback.format_exc().splitlines()[-6:],
            ]
        return [problem for work in self._works for problem in work.problems()]

    async def _check(self, client: Client) -> list[str]:
        """Return the problems that fsck finds, after time for collectors and cross-shard transactions."""
        await asyncio.sleep(QUIET_S)
        checkup = FsckReport()
        try:
            await check_metadata(client, checkup)
        except NvpoolError as error:
            return [f"fsck ends with {error!r}"]
        return [f"fsck of {problem.where}: {problem.kind} {problem.text}" for problem in checkup.problems]

    async def _look_at_replicas(self) -> list[str]:
        for _ in range(WHOLE_S * 2):
            if self.pool.is_whole():
                problems = await self.pool.scrub()
                await asyncio.sleep(5.0)
                return problems + self.pool.replica_problems()
            await asyncio.sleep(0.5)
        lacking = [
            (table.id, number, chain)
            for table in self.pool.pool_map.tables
            for number, chain in enumerate(table.chains)
            if len(chain.targets) < table.id or chain.joining or chain.leaving
        ]
        return [
            f"{len(lacking)} chains are not whole {WHOLE_S} s after all was mended, the first is {lacking[0]}"
        ]


def simulate(seed: int, **named) -> tuple[list[str], dict[str, int]]:
    """Run one seed and return the violations and the counts of operations. The same seed has the same result."""
    problems, done, _ = simulated(seed, **named)
    return problems, done


def simulated(seed: int, **named) -> tuple[list[str], dict[str, int], list[str]]:
    """Like `simulate`, with the last events."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    with few_chains():
        try:
            scenario = Scenario(loop, seed, **named)
            problems = loop.run_until_complete(scenario.run())
            scenario.done["fast"] = scenario.pool.invariants.fast_requests
            scenario.done["segments"] = scenario.pool.network.segments
            return problems, scenario.done, list(scenario.pool.invariants.events)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def few_chains() -> Iterator[None]:
    """Use fewer chains: maps of 1,024 chains take half of a simulation's time, and its few chunks do not need
    them."""
    having = [
        module
        for name, module in sys.modules.items()
        if name.startswith("nvpool.") and hasattr(module, "CHAINS_PER_TABLE")
    ]
    before, raw_before = having[0].CHAINS_PER_TABLE, tables.TABLE_BYTES
    try:
        tables.TABLE_BYTES = 1 + CHAINS // 8
        for module in having:
            module.CHAINS_PER_TABLE = CHAINS
        yield
    finally:
        tables.TABLE_BYTES = raw_before
        for module in having:
            module.CHAINS_PER_TABLE = before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    print(
        f"{options.seeds} seeds from {options.seed} on, nothing violated:",
        ", ".join(f"{count:,} {name}" for name, count in total.items()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
