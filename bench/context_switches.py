"""Context switches and processor time of one operation, by process and thread.

    python bench/context_switches.py                                      three rounds of everything, some twelve minutes
    python bench/context_switches.py --rounds 1 --count 200 --seconds 2   a first look, some three minutes
    python bench/context_switches.py --only lock --pool plain --busy 0 --threads     one operation on an idle machine
    python bench/context_switches.py --write                              and put the first table into bench/README.md

Two pools of one host, one after the other in each round: `plain` has one drive, one replica and no standby; `replicated` has
two drives, `--replicas 2 --standbys 1`. Each is new, mounted as `nvpool mount` does it by itself, and used by this process, the
application, with one operation at a time: first on an idle machine, then beside --busy processes that only compute, because
the processors of a node with GPUs are busy. They are stopped while files are prepared and while the mount is replaced.

An operation's figures are the differences of counters before and after all operations of a load, divided by their number:

    voluntary, involuntary   /proc/PID/task/TID/status: the thread waited for something; the kernel preempted it
    run, queued, timeslices  /proc/PID/task/TID/schedstat: time on a processor, runnable without one

Wall time is the median of the operations. "nothing" is the pool without a request, per second: subtract its share where an
operation takes long. Work that the pool does later (checkpoints, removed chunks) is counted only as far as it runs until the
end of the load. A thread that ends during a load is not counted. Python names no threads for the kernel: they have numbers in
the order in which they were started, and the kernel's name where it differs from that of the process.

Warm: read before through the same mount; the kernel's names and attributes have expired (1 s), its pages have not. Cold: the
file system is mounted again and the page cache of the machine is dropped, no name is used twice. Files are read, examined and
removed in random order. Needs root: it mounts, and drops the page cache. Ends and removes all it started, also when
interrupted. A whole run writes context-switches.json and context-switches.md to bench/results; others where --results says.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import commit, machine, put_into_readme
from subjects.contract import MARK, PROBE, Failed, wait_until
from subjects.pool import Pool, Variant
from workspace import minutes, not_final, say, warn_of_others, workspace

from nvpool.core.programs import Program, processes, program_of
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import PoolMap, decode_map

HERE = Path(__file__).resolve().parent
CONTENT = os.urandom(4096)
BLOCKS = 1024
"""Blocks of 4 KiB in the file that is written and synced."""
SETTLE_S = 1.5
"""Seconds before each load: a checkpoint comes every second, and the kernel's names and attributes expire."""
GRACE_S = 0.02
"""Seconds before the application's counters are read.

The kernel adds a timeslice to schedstat at the next tick or when the thread leaves the processor. After a load, daemons
finish the work that follows their last reply.
"""
SPREAD_S = 0.2
"""Seconds after busy processes continue, until the kernel has spread them over the processors."""
SHOWN_SWITCHES, SHOWN_US = 0.01, 0.5
"""A process or thread with less of both in every operation is left out of the tables."""
NOTHING = "nothing, for a second"
IDLE = "idle machine"
APPLICATION = "application"
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

PROCESSES = {
    Program.MOUNT: "mount daemon",
    Program.META: "metadata",
    Program.STORE: "store",
    Program.SUPERVISOR: "supervisor",
    Program.MOUNT_HOLDER: "mount holder",
    Program.MOUNT_FORK_SERVER: "mount forkserver",
    Program.MOUNT_NOTIFIER: "mount notifier",
    Program.MOUNT_WORKER: "mount read worker",
}
"""Names in the tables, in the order of the columns, after the application."""


class Counters(NamedTuple):
    """Counters of one thread since its start; after a division, of one operation. `run`, `queued`: microseconds."""

    voluntary: float = 0.0
    involuntary: float = 0.0
    run_us: float = 0.0
    queued_us: float = 0.0
    slices: float = 0.0

    @property
    def switches(self) -> float:
        return self.voluntary + self.involuntary

    @property
    def is_shown(self) -> bool:
        return self.switches >= SHOWN_SWITCHES or self.run_us >= SHOWN_US


Threads = dict[str, dict[str, Counters]]
"""Process -> thread -> counters."""


# -- the pools ---------------------------------------------------------------------------------------------------------


class HostPool(Pool):
    """A pool of one host, with a drive for each replica."""

    def __init__(self, name: str, replicas: int, standbys: int) -> None:
        super().__init__(Variant(name), targets=replicas)
        self.replicas, self.standbys = replicas, standbys

    def start_servers(self) -> None:
        self._command(
            "dev",
            "up",
            self.pool(),
            *["--size=4G"] * self.targets,
            f"--replicas={self.replicas}",
            f"--standbys={self.standbys}",
        )
        wait_until(self.is_whole, f"{self.name} does not have all its replicas and standbys")

    def map(self) -> PoolMap:
        return decode_map(PoolDirectory(self.pool()).poolmap.read_bytes())

    def is_whole(self) -> bool:
        pool_map = self.map()
        chains = pool_map.table_by_id[self.replicas].chains
        standbys = [standby.state for shard in pool_map.shards for standby in shard.standbys]
        return standbys == ["up"] * self.standbys and all(
            len(chain.targets) == self.replicas and not chain.joining for chain in chains
        )

    def processes(self) -> dict[str, int]:
        """Return the pids of the pool's and its mount's processes, by their names in the tables."""
        found: dict[str, int] = {}
        shards = self.map().shard_by_id
        for pid, words in processes(naming=self.pool()):
            program = program_of(words)
            arguments = words[words.index(program.title) + 1 :]
            name = PROCESSES.get(program, program.name.lower())
            if program is Program.META:  # DIR SHARD [MEMBER]
                shard, member = int(arguments[1]), int((*arguments[2:], "0")[0])
                name += " primary" if member == shards[shard].member else f" standby {member}"
            elif program is Program.STORE:  # DIR TARGET …
                name += f" {arguments[1]}"
            found[name if name not in found else f"{name}, pid {pid}"] = pid
        return found


POOLS = {"plain": (1, 0), "replicated": (2, 1)}
"""Name -> replicas, standbys."""
TITLES = {"plain": "1 replica, no standby", "replicated": "2 replicas, 1 standby"}


class BusyProcesses:
    """Processes that compute while the context manager `running` is open, and are stopped otherwise.

    Each has a session of its own, so that a kernel that shares processors among sessions (autogroup of sched(7)) counts them
    one by one, like the daemons. A process ends by itself when its parent has ended.
    """

    PROGRAM = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100_000):\n        pass\n"

    def __init__(self, count: int) -> None:
        self._processes: list[subprocess.Popen] = []
        for _ in range(count):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", self.PROGRAM, str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                )
            )
            self._processes[-1].send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            self._send(signal.SIGCONT)
            time.sleep(SPREAD_S)
            if any(process.poll() is not None for process in self._processes):
                raise Failed("a busy process has ended")
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()


# -- the loads ---------------------------------------------------------------------------------------------------------

Step = Callable[[int], None]
"""Run one operation; its number counts from 0."""


def numbered(place: Path, count: int) -> list[str]:
    return [f"{place}/{number}" for number in range(count)]


def small_files(place: Path, count: int) -> list[str]:
    """Create so many files of 4 KiB; the result is in random order."""
    names = numbered(place, count)
    for name in names:
        write_new(name)
    random.Random(count).shuffle(names)
    return names


def write_new(name: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(file, CONTENT)
    os.close(file)


def read_whole(name: str) -> None:
    file = os.open(name, os.O_RDONLY)
    os.read(file, len(CONTENT))
    os.close(file)


@contextlib.contextmanager
def create(place: Path, count: int) -> Iterator[Step]:
    names = numbered(place, count)
    yield lambda number: write_new(names[number])


@contextlib.contextmanager
def create_empty(place: Path, count: int) -> Iterator[Step]:
    names = numbered(place, count)
    yield lambda number: os.close(os.open(names[number], os.O_WRONLY | os.O_CREAT | os.O_EXCL))


@contextlib.contextmanager
def read_warm(place: Path, count: int) -> Iterator[Step]:
    names = small_files(place, count)
    for name in names:
        read_whole(name)
    yield lambda number: read_whole(names[number])


@contextlib.contextmanager
def read_cold(place: Path, count: int) -> Iterator[Step]:
    names = small_files(place, count)
    yield lambda number: read_whole(names[number])


@contextlib.contextmanager
def stat_cold(place: Path, count: int) -> Iterator[Step]:
    names = small_files(place, count)

    def step(number: int) -> None:
        os.stat(names[number])

    yield step


@contextlib.contextmanager
def unlink(place: Path, count: int) -> Iterator[Step]:
    names = small_files(place, count)
    yield lambda number: os.unlink(names[number])


@contextlib.contextmanager
def write_and_sync(place: Path, count: int) -> Iterator[Step]:
    """Write 4 KiB at a random block of a file whose blocks were all written before, then fsync."""
    chance = random.Random(count)
    offsets = [chance.randrange(BLOCKS) * len(CONTENT) for _ in range(count)]
    file = os.open(place / "data", os.O_RDWR | os.O_CREAT)

    def step(number: int) -> None:
        os.pwrite(file, CONTENT, offsets[number])
        os.fsync(file)

    try:
        for block in range(BLOCKS):
            os.pwrite(file, CONTENT, block * len(CONTENT))
        os.fsync(file)
        yield step
    finally:
        os.close(file)


@contextlib.contextmanager
def lock(place: Path, count: int) -> Iterator[Step]:
    """Acquire and release an exclusive fcntl(2) lock of one byte."""
    file = os.open(place / "locked", os.O_RDWR | os.O_CREAT)

    def step(number: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, number)
        fcntl.lockf(file, fcntl.LOCK_UN, 1, number)

    try:
        yield step
    finally:
        os.close(file)


class Load(NamedTuple):
    """`prepare` makes what the operations need in an empty directory, on an idle machine. With `cold` the mount is replaced
    after that, so `prepare` must have no file open."""

    title: str
    prepare: Callable[[Path, int], contextlib.AbstractContextManager[Step]]
    cold: bool = False


LOADS = {
    "create": Load("create, write, close 4 KiB", create),
    "create-empty": Load("create, close an empty file", create_empty),
    "read-warm": Load("open, read, close 4 KiB, warm", read_warm),
    "read-cold": Load("open, read, close 4 KiB, cold", read_cold, cold=True),
    "stat-cold": Load("stat, cold", stat_cold, cold=True),
    "unlink": Load("unlink a file of 4 KiB", unlink),
    "write-fsync": Load("write 4 KiB, fsync", write_and_sync),
    "lock": Load("lock and unlock one byte", lock),
}


# -- counting ----------------------------------------------------------------------------------------------------------


class Thread(NamedTuple):
    """A thread; `name` is its name in the kernel."""

    name: str
    counters: Counters


def counters_of(task: Path) -> Counters:
    """Counters of a thread from /proc/PID/task/TID: proc(5), and Documentation/scheduler/sched-stats.rst of Linux."""
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
    run_ns, queued_ns, slices = map(int, (task / "schedstat").read_text().split())
    return Counters(
        int(status["voluntary_ctxt_switches"]),
        int(status["nonvoluntary_ctxt_switches"]),
        run_ns / 1e3,
        queued_ns / 1e3,
        slices,
    )


def snapshot(pids: dict[str, int]) -> dict[tuple[str, int], Thread]:
    """(process, TID) -> thread, for the current threads."""
    found = {}
    for process, pid in pids.items():
        with contextlib.suppress(OSError):  # the process has ended; `counted` compares processes afterwards
            for task in Path("/proc", str(pid), "task").iterdir():
                with contextlib.suppress(OSError):  # the thread has ended
                    name = (task / "comm").read_text().strip()
                    found[process, int(task.name)] = Thread(name, counters_of(task))
    return found


def differences(
    before: dict[tuple[str, int], Thread],
    after: dict[tuple[str, int], Thread],
    pids: dict[str, int],
    operations: float,
) -> Threads:
    """Counters of one operation. Threads without any change are left out."""
    found: Threads = {}
    for process, pid in pids.items():
        tids = sorted(tid for one, tid in after if one == process and tid != pid)
        names = {pid: "main"} | {tid: f"thread {number}" for number, tid in enumerate(tids, 1)}
        title = after[process, pid].name if (process, pid) in after else ""
        for tid, name in names.items():
            if (process, tid) not in after:
                continue
            now = after[process, tid]
            was = before[process, tid].counters if (process, tid) in before else Counters()
            if tid != pid and now.name != title:
                name += f" ({now.name})"
            if now.counters != was:
                found.setdefault(process, {})[name] = Counters(
                    *((new - old) / operations for new, old in zip(now.counters, was, strict=True))
                )
    return found


def timed(step: Step, count: int, seconds: float) -> tuple[float, float]:
    """The number of operations, at most `count` and for `seconds`, and their median in microseconds."""
    took_ns, clock = [], time.perf_counter_ns
    begin = clock()
    end = begin + int(seconds * 1e9)
    for number in range(count):
        step(number)
        now = clock()
        took_ns.append(now - begin)
        begin = now
        if now > end:
            break
    return len(took_ns), median(took_ns) / 1e3


def rested(seconds: float) -> tuple[float, None]:
    """Wait; return the seconds that have passed, without a median."""
    begin = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begin, None


def counted(
    pool: HostPool,
    work: Callable[[], tuple[float, float | None]],
    neighbors: contextlib.AbstractContextManager,
) -> dict:
    """One round of a load. A process that is started meanwhile counts from its start. Failed when one is replaced, or when
    the primary changes."""
    daemons, own = pool.processes(), {APPLICATION: os.getpid()}
    with neighbors:
        before = snapshot(daemons)
        time.sleep(GRACE_S)
        before |= snapshot(own)
        operations, wall_us = work()
        time.sleep(GRACE_S)
        after = snapshot(own)
        daemons_after = pool.processes()
        after |= snapshot(daemons_after)
    if not daemons.items() <= daemons_after.items():
        raise Failed("a process of the pool was replaced, or the primary changed")
    return {
        "operations": operations,
        "wall_us": wall_us,
        "threads": differences(before, after, own | daemons_after, operations),
    }


def measure(
    pool: HostPool,
    key: str,
    place: Path,
    options: argparse.Namespace,
    neighbors: contextlib.AbstractContextManager,
) -> dict:
    if key == NOTHING:
        time.sleep(SETTLE_S)
        return counted(pool, partial(rested, options.seconds), neighbors)
    load = LOADS[key]
    place.mkdir()
    with load.prepare(place, options.count) as step:
        if load.cold:
            pool.forget()
        time.sleep(SETTLE_S)
        return counted(pool, partial(timed, step, options.count, options.seconds), neighbors)


Found = dict[tuple[str, str], dict[str, list[dict]]]
"""(pool, machine) -> load -> one result of `counted` a round."""


def measure_all(
    directory: Path,
    ends: list[Callable[[], None]],
    options: argparse.Namespace,
    pools: list[str],
    keys: list[str],
    found: Found,
    failures: list[str],
) -> None:
    """Add to `found` and `failures` as it goes. Failed when a pool does not start or its mount goes away."""
    busy = BusyProcesses(options.busy)
    ends.append(busy.end)
    machines: dict[str, Callable[[], contextlib.AbstractContextManager]] = {IDLE: contextlib.nullcontext}
    if options.busy:
        machines[f"{options.busy} busy processes"] = busy.running
    for turn in range(options.rounds):
        for name in pools[:: -1 if turn % 2 else 1]:
            pool = HostPool(name, *POOLS[name])
            ends.append(pool.stop)
            mount = pool.start(directory / f"{name}-{turn}")
            (mount / PROBE).write_bytes(CONTENT)
            for at, (state, neighbors) in enumerate(machines.items()):
                for key in keys:
                    where = f"round {turn + 1}: {TITLES[name]}, {state}: {key}"
                    try:
                        one = measure(pool, key, mount / f"{key}-{at}", options, neighbors())
                    except (Failed, OSError) as error:
                        say(f"{where}: {error}")
                        failures.append(f"{where}: {error}")
                        if not pool.attached():
                            raise Failed(f"{where}: the mount went away") from error
                        continue
                    found.setdefault((name, state), {}).setdefault(key, []).append(one)
                    everything = total_of(one)
                    wall = "" if one["wall_us"] is None else f", {one['wall_us']:,.0f} µs"
                    say(
                        f"{where}: {figure(everything.switches)} switches, {figure(everything.run_us)} µs of processor "
                        f"time{wall}"
                    )
            pool.stop()


# -- the results -------------------------------------------------------------------------------------------------------


def total(threads: dict[str, Counters]) -> Counters:
    return Counters(*map(sum, zip(*threads.values(), strict=True))) if threads else Counters()


def total_of(one: dict) -> Counters:
    """Sum of all processes in a result of `counted`."""
    return total({name: total(threads) for name, threads in one["threads"].items()})


def medians(values: list[Counters]) -> Counters:
    return Counters(*map(median, zip(*values, strict=True)))


def as_json(counters: Counters) -> dict[str, float]:
    return {name: round(value, 3) for name, value in counters._asdict().items()}


def summary(key: str, rounds: list[dict]) -> dict:
    """One row: medians of the rounds. A process or thread that a round did not have counts as nothing there."""
    names = {
        process: dict.fromkeys(name for one in rounds for name in one["threads"].get(process, {}))
        for process in dict.fromkeys(process for one in rounds for process in one["threads"])
    }
    walls = [one["wall_us"] for one in rounds if one["wall_us"] is not None]
    return {
        "load": key,
        "title": LOADS[key].title if key in LOADS else key,
        "operations": round(median(one["operations"] for one in rounds), 1),
        "wall_us": round(median(walls), 2) if walls else None,
        "all": as_json(medians([total_of(one) for one in rounds])),
        "processes": {
            process: as_json(medians([total(one["threads"].get(process, {})) for one in rounds]))
            for process in names
        },
        "threads": {
            process: {
                name: as_json(
                    medians([one["threads"].get(process, {}).get(name, Counters()) for one in rounds])
                )
                for name in found
            }
            for process, found in names.items()
        },
        "rounds": [
            {
                "operations": round(one["operations"], 1),
                "wall_us": one["wall_us"] and round(one["wall_us"], 2),
                "processes": {process: as_json(total(found)) for process, found in one["threads"].items()},
            }
            for one in rounds
        ],
    }


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(found: dict[str, float] | None) -> str:
    if found is None:
        return "–"
    return f"{figure(found['voluntary'])} + {figure(found['involuntary'])} · {figure(found['run_us'])}"


def column(process: str) -> tuple[int, str]:
    """Place of a process among the columns."""
    if process == APPLICATION:
        return 0, process
    order = list(PROCESSES.values())
    return next((at for at, name in enumerate(order, 1) if process.startswith(name)), len(order) + 1), process


def process_table(rows: list[dict]) -> str:
    names = sorted(
        {name for row in rows for name, one in row["processes"].items() if Counters(**one).is_shown},
        key=column,
    )
    text = [
        f"| operation | operations | wall, µs | all | {' | '.join(names)} |",
        "|---|---:|---:|---:|" + "---:|" * len(names),
    ]
    for row in rows:
        wall = "–" if row["wall_us"] is None else figure(row["wall_us"])
        operations = "–" if row["load"] == NOTHING else f"{row['operations']:,.0f}"
        cells = [cell(row["processes"].get(name)) for name in names]
        text.append(f"| {row['title']} | {operations} | {wall} | {cell(row['all'])} | {' | '.join(cells)} |")
    return "\n".join(text)


def thread_table(rows: list[dict]) -> str:
    text = [
        "| operation | process | thread | voluntary | involuntary | timeslices | run, µs | queued, µs |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for process in sorted(row["threads"], key=column):
            for name, one in row["threads"][process].items():
                found = Counters(**one)
                if found.is_shown:
                    figures = (
                        found.voluntary,
                        found.involuntary,
                        found.slices,
                        found.run_us,
                        found.queued_us,
                    )
                    text.append(
                        f"| {row['title']} | {process} | {name} | {' | '.join(map(figure, figures))} |"
                    )
    return "\n".join(text)


def heading(table: dict) -> str:
    return f"{TITLES[table['pool']]}, {table['machine']}"


def overview(results: dict) -> str:
    """Table of the sums over all processes, for bench/README.md."""
    tables = results["tables"]
    text = [
        f"| switches · processor µs · wall µs | {' | '.join(map(heading, tables))} |",
        "|---|" + "---:|" * len(tables),
    ]
    rows = [{row["load"]: row for row in table["rows"]} for table in tables]
    titles = {key: row["title"] for by_load in rows for key, row in by_load.items()}
    for key, title in titles.items():
        cells = []
        for by_load in rows:
            if key not in by_load:
                cells.append("–")
                continue
            one, wall_us = Counters(**by_load[key]["all"]), by_load[key]["wall_us"]
            wall = "–" if wall_us is None else figure(wall_us)
            cells.append(f"{figure(one.switches)} · {figure(one.run_us)} · {wall}")
        text.append(f"| {title} | {' | '.join(cells)} |")
    return (
        f"{results['date']}, {results['machine']}; nvpool {results['commit']}; medians of {results['rounds']} rounds, at most "
        f"{results['count']:,} operations and {results['seconds']:g} s each; {minutes(results['took_s'])}. All processes "
        f"together, of one operation.{not_final(results['busy_before'])}\n\n" + "\n".join(text) + "\n"
    )


def markdown(results: dict, threads: bool) -> str:
    parts = [
        overview(results).rstrip(),
        "By process: voluntary + involuntary context switches · µs of processor time, of one operation.",
    ]
    for one in results["tables"]:
        parts += [f"## {heading(one)}", process_table(one["rows"])]
        if threads:
            parts.append(thread_table(one["rows"]))
    if results["failures"]:
        parts.append("Not measured: " + "; ".join(results["failures"]) + ".")
    return "\n\n".join(parts) + "\n"


def expected_s(options: argparse.Namespace, pools: list[str], keys: list[str]) -> float:
    """Preparing takes about a millisecond a file, replacing a mount and dropping caches some three seconds, a new pool six."""
    cold = sum(3.0 for key in keys if key in LOADS and LOADS[key].cold)
    once = cold + len(keys) * (SETTLE_S + 1e-3 * options.count)
    idle = once + len(keys) * min(options.seconds, 1.5e-3 * options.count)
    busy = once + len(keys) * (options.seconds + SPREAD_S) if options.busy else 0.0
    return 5 + options.rounds * len(pools) * (6 + idle + busy)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=1000, help="most operations of a load in a round [1000]")
    parser.add_argument("--seconds", type=float, default=5.0, help="most seconds of a load in a round [5]")
    parser.add_argument("--busy", type=int, default=8, help="busy processes; 0: an idle machine only [8]")
    parser.add_argument("--only", choices=LOADS, action="append", help="one operation; repeat it")
    parser.add_argument("--pool", choices=POOLS, action="append", help="one pool; repeat it")
    parser.add_argument("--threads", action="store_true", help="print a table of threads too")
    parser.add_argument("--directory", type=Path, default=HERE.parent / "build", help="on the drive to use")
    parser.add_argument(
        "--results", type=Path, help="write context-switches.json and context-switches.md there"
    )
    parser.add_argument(
        "--write", action="store_true", help="and put the first table of a whole run into bench/README.md"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    options = parser.parse_args(words)
    if os.geteuid() != 0:
        raise SystemExit("this needs root: to drop the page cache, and to mount")
    if missing := HostPool("plain", 1, 0).missing():
        raise SystemExit(f"this cannot run here: {missing}")
    pools = [name for name in POOLS if not options.pool or name in options.pool]
    keys = [NOTHING, *(key for key in LOADS if not options.only or key in options.only)]
    whole = len(pools) == len(POOLS) and len(keys) == 1 + len(LOADS) and options.busy > 0
    say(f"this takes about {minutes(expected_s(options, pools, keys))}")
    results: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "busy_before": warn_of_others(),
        "autogroup": AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else None,
        "rounds": options.rounds,
        "count": options.count,
        "seconds": options.seconds,
        "busy": options.busy,
        "failures": [],
    }
    found: Found = {}
    begin, ended = time.monotonic(), False
    try:
        with workspace(options.directory) as (directory, ends):
            os.environ[MARK] = str(directory)  # busy processes are ended with the rest too
            measure_all(directory, ends, options, pools, keys, found, results["failures"])
            ended = True
    except Failed as error:
        say(f"could not be measured: {error}")
    results["took_s"] = round(time.monotonic() - begin)
    results["tables"] = [
        {"pool": name, "machine": state, "rows": [summary(key, rounds) for key, rounds in by_load.items()]}
        for (name, state), by_load in sorted(found.items(), key=lambda item: list(POOLS).index(item[0][0]))
    ]
    print(json.dumps(results, indent=1) if options.json else markdown(results, options.threads))
    whole = whole and ended and not results["failures"]
    kept = options.results or (HERE / "results" if whole and options.rounds >= 3 else None)
    if kept is not None and ended:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "context-switches.json").write_text(json.dumps(results, indent=1) + "\n")
        (kept / "context-switches.md").write_text("# Context switches\n\n" + markdown(results, True))
        say(f"written to {kept}")
    if options.write and whole:
        put_into_readme("context-switches", overview(results))
    return 0 if ended and not results["failures"] else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
