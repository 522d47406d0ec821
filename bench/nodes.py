"""Pools of several nodes on one machine: gain and cost of nodes, replicas and certificates.

    make bench-nodes                                    three rounds of everything, and failures.py
    python bench/nodes.py --rounds 1 --quick            a first look, some four minutes
    python bench/nodes.py --only scaling                one of: scaling, tls, replicas, balance, growth

A node is a network namespace with an address, a machine-id and mounts of its own (nvpool/testing/env/namespaces.py); so is a
client.

* scaling: 1, 2 and 4 nodes with as many clients, each node's cable limited to the same rate in both directions (`tc tbf`), so
  that the cables are what is measured and not the processors, which all share (the table says how busy they were). Each client
  reads blocks at random from a file of its own, whose chunks lie on all nodes, none twice. Floor, in turns: as many plain TCP
  streams over the same cables.
* tls: one node and one client, cables without a limit, with certificates and in plain text, in turns.
* replicas: 2 against 1, in a pool of one node (two drives, its own mount) and of two nodes (a client's mount), in turns:
  all rounds of reading, of what is in memory, before any of writing: after a write and a removal a drive is busy for a while.
* balance: a drive is added to a pool with data: chunks moved over those that had to, and how even the drives are afterwards.
* growth: a third drive is added to two, each on a node of its own whose limited cable stands for what a drive gives: what three
  clients read and write together before and after, and by how much that has grown beside the drive's share.

What is read was written or read just before. A figure is the median of the rounds. Needs root. Ends and removes all it
started, also when interrupted. A whole run writes nodes.json and nodes.md to bench/results; others where
--results says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from nvpool.core.programs import Program, command

sys.path.insert(0, str(Path(__file__).resolve().parent))
import loads
import throughput
from balance import balance
from report import commit, judged, machine, put_into_readme
from subjects.contract import MARK, Failed, run, wait_until
from workspace import (
    busy_share,
    can_keep_awake,
    minutes,
    not_final,
    processors_awake,
    say,
    warn_of_others,
    workspace,
)

from nvpool.core.units import KIB, MIB
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.multi_node_pool import NodeMachine, Pool
from nvpool.testing.env.namespaces import Machine, Machines
from nvpool.testing.env.pool import RealPool

HERE = Path(__file__).resolve().parent
PARTS = ("scaling", "tls", "replicas", "balance", "growth")
COUNTS = (1, 2, 4)
BLOCK = 256 * KIB
IN_FLIGHT = 64
"""Reads in flight of each client: enough that each of four nodes always has requests."""
PORT = 7999
STARTED_S = 1.5
"""Seconds until the clients of a load have started."""
BUSY_MAX = 0.9
"""Busy share of the processors above which they limit the figures, and not the cables."""
WARMING = 4
"""Threads that each read as many random blocks as there are: then 98 % of the blocks are in memory."""
GROWN = 0.9
"""Least growth of throughput, in shares of a drive: chunks fall on drives at random, and the busiest is waited for."""
NO_LIMIT_MIB_S = 4000.0
WRITE_S_MAX = 300.0

WRITE = """
import os, sys, nvpool
with nvpool.connect(sys.argv[1]) as pool, pool.open(sys.argv[2], "wb", buffering=0) as file:
    for _ in range(int(sys.argv[3])):
        file.write(os.urandom(1 << 20))
    file.fsync()
"""
WRITE_TIMED = """
import json, os, sys, time, nvpool
piece, count = os.urandom(1 << 20), int(sys.argv[3])
with nvpool.connect(sys.argv[1]) as pool, pool.open(sys.argv[2], "wb", buffering=0) as file:
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for _ in range(count):
        file.write(piece)
    file.fsync()
    rate = count / (time.perf_counter() - begin)
print(json.dumps({"rate": rate, "bytes_rate": rate * (1 << 20), "p50_us": 0, "p99_us": 0}))
"""
SEND = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    while True:
        to, _ = server.accept()
        with to:
            try:
                while True:
                    to.sendall(bytes(1 << 18))
            except OSError:
                pass
"""
RECEIVE = """
import json, socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as link:
    link.recv(1)
    print("ready", flush=True)
    sys.stdin.readline()
    into, count, begin = memoryview(bytearray(1 << 20)), 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < float(sys.argv[3]):
        count += link.recv_into(into)
print(json.dumps({"rate": count / (now - begin), "bytes_rate": count / (now - begin), "p50_us": 0, "p99_us": 0}))
"""


class Cluster:
    """`nodes` of a pool and `clients` that have joined it, each with a machine of its own; machines that do nothing yet."""

    def __init__(self, hosts: Machines, pool: Pool, clients: list[NodeMachine], spare: list[Machine]) -> None:
        self.hosts, self.pool, self.nodes, self.clients, self._spare = hosts, pool, pool.nodes, clients, spare

    def add_node(self) -> None:
        """Join a spare machine with its drives; on return it has its share of the chunks."""
        node = NodeMachine(self._spare.pop())
        self.nodes.append(node)
        self.pool.join(node, self.nodes[0].json("node", "token", str(self.nodes[0].path)))
        self.nodes[0].nvpool("pool", "rebalance", str(self.nodes[0].path), "--wait")

    def command(self, client: NodeMachine, *words: object) -> list[str]:
        return client.machine.command(*map(str, (sys.executable, "-P", *words)))

    def write(self, file_mib: int) -> None:
        """Write a file for each client, one after the other."""
        for number, client in enumerate(self.clients):
            client.machine.run(
                sys.executable,
                "-P",
                "-c",
                WRITE,
                str(client.path),
                f"/file-{number}",
                str(file_mib),
                timeout_s=600,
            )

    def read(
        self,
        file_mib: int,
        seconds: float,
        *,
        verb: str = "flight",
        block: int = BLOCK,
        in_flight: int = IN_FLIGHT,
    ) -> dict:
        commands = [
            self.command(
                client,
                HERE / "sdk_loads.py",
                verb,
                client.path,
                f"/file-{number}",
                "--region",
                f"{file_mib}MiB",
                "--block",
                block,
                "--in-flight",
                in_flight,
                "--seconds",
                seconds,
                "--cold",
                "--wait",
            )
            for number, client in enumerate(self.clients)
        ]
        return throughput.together(commands, dict(os.environ), seconds)

    def write_timed(self, name: str, file_mib: int) -> dict:
        """Write a new file from each client at the same time, with fsync."""
        return throughput.together(
            [
                self.command(client, "-c", WRITE_TIMED, client.path, f"/{name}-{number}", file_mib)
                for number, client in enumerate(self.clients)
            ],
            dict(os.environ),
            WRITE_S_MAX,
        )

    def floor(self, seconds: float) -> dict:
        """Throughput of plain TCP from each node to its own client, all at the same time."""
        senders = [
            node.machine.popen(sys.executable, "-c", SEND, node.machine.address, str(PORT))
            for node in self.nodes
        ]
        try:
            for node in self.nodes:
                wait_until(
                    lambda node=node: f":{PORT}" in node.machine.run("ss", "-Hltn").stdout,
                    "a sender does not listen",
                )
            commands = [
                self.command(client, "-c", RECEIVE, node.machine.address, PORT, seconds)
                for node, client in zip(self.nodes, self.clients, strict=True)
            ]
            return throughput.together(commands, dict(os.environ), seconds)
        finally:
            for sender in senders:
                sender.kill()
                sender.wait()

    def lies(self) -> list[float]:
        """Share of each drive in the written bytes."""
        used = [drive["used_bytes"] for drive in self.nodes[0].until_all_serve()["drives"]]
        return [one / sum(used) for one in used]

    def mount(self, client: NodeMachine) -> Path:
        place = client.machine.place / "mount"
        place.mkdir()
        client.nvpool("mount", str(client.path), str(place))
        return place


@contextlib.contextmanager
def cluster(
    directory: Path,
    nodes: int,
    clients: int,
    *words: str,
    plain: bool = False,
    capacity: str = "8G",
    drives: int = 1,
    spare: int = 0,
) -> Iterator[Cluster]:
    """Yield a pool; `words` are arguments of `nvpool pool create`. All chains are in their places."""
    hosts = Machines(nodes + clients + spare, directory)
    with hosts as made:
        pool = Pool(made[:nodes], plain, drives=drives, capacity=capacity)
        joined = [NodeMachine(one) for one in made[nodes : nodes + clients]]
        try:
            join = pool.found(*words)
            for node in pool.nodes[1:]:
                pool.join(node, join)
                join = pool.nodes[0].json("node", "token", str(pool.nodes[0].path))
            pool.nodes[0].nvpool("pool", "rebalance", str(pool.nodes[0].path), "--wait")
            for client in joined:
                pool.client(client)
            yield Cluster(hosts, pool, joined, made[nodes + clients :])
        finally:
            for node in (*pool.nodes, *joined):
                node.kill_all()


class Rounds:
    """Figures by name, one for each round."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add(self, name: str, value: float, unit: str) -> None:
        self.found.setdefault(name, []).append(value)
        say(f"round {len(self.found[name])}: {name}: {value:,.1f} {unit}")

    def median(self, name: str) -> float:
        return median(self.found[name])


# -- the parts ---------------------------------------------------------------------------------------------------------


def scaling(directory: Path, options: argparse.Namespace) -> dict:
    rounds, lies = Rounds(), {}
    for count in COUNTS:
        with cluster(directory, count, count, "--chunk-size", "256KiB") as made:
            made.write(options.file_mib)
            lies[count] = made.lies()
            for number in range(1, count + 1):
                made.hosts.limit(number, options.rate)
            for _ in range(options.rounds):
                rounds.add(f"floor {count}", made.floor(options.seconds)["bytes_rate"] / MIB, "MiB/s")
                found, busy = busy_while(
                    lambda made=made: made.read(options.file_mib, options.seconds), options.seconds
                )
                rounds.add(f"nodes {count}", found["bytes_rate"] / MIB, "MiB/s")
                rounds.add(f"busy {count}", 100 * busy, "% of the processors")
    one = rounds.median("nodes 1")
    rows = [
        {
            "nodes": count,
            "mib_s": rounds.median(f"nodes {count}"),
            "floor_mib_s": rounds.median(f"floor {count}"),
            "of_linear": rounds.median(f"nodes {count}") / (count * one),
            "busy": rounds.median(f"busy {count}") / 100,
            "lies": lies[count],
        }
        for count in COUNTS
    ]
    return {"rate_mib_s": options.rate, "rows": rows, "rounds": rounds.found}


def busy_while(work: Callable[[], dict], seconds: float) -> tuple[dict, float]:
    """Run `work`, a load of so many seconds; return its result and the busy share of the processors in its middle.

    Other processes of the machine are included in that share.
    """
    shares: list[float] = []

    def look() -> None:
        time.sleep(STARTED_S)
        shares.append(busy_share(seconds / 2))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        found = work()
    finally:
        thread.join()
    return found, shares[0]


def growth(directory: Path, options: argparse.Namespace) -> dict:
    rounds, before = Rounds(), 2
    file_mib = round(options.rate * options.seconds)
    for turn in range(options.rounds):
        place = directory / f"growth-{turn}"
        place.mkdir()
        with cluster(place, before, before + 1, "--chunk-size", "256KiB", spare=1) as made:
            made.write(options.file_mib)
            cables = (*range(1, before + 1), len(made.nodes) + len(made.clients) + 1)
            for count in (before, before + 1):
                for number in cables:
                    made.hosts.limit(number, options.rate)
                for what, work in (
                    ("read", lambda made=made: made.read(options.file_mib, options.seconds)),
                    ("write", lambda made=made, count=count: made.write_timed(f"timed-{count}", file_mib)),
                ):
                    found, busy = busy_while(work, options.seconds)
                    rounds.add(f"{what} {count}", found["bytes_rate"] / MIB, "MiB/s")
                    rounds.add(f"busy {what} {count}", 100 * busy, "% of the processors")
                if count == before:
                    for number in cables:
                        made.hosts.limit(number, NO_LIMIT_MIB_S)
                    made.add_node()
    rows = [
        {
            "what": what,
            "before": rounds.median(f"{what} {before}"),
            "after": rounds.median(f"{what} {before + 1}"),
            "share": 1 / before,
            "busy": rounds.median(f"busy {what} {before + 1}") / 100,
        }
        for what in ("read", "write")
    ]
    return {"rate_mib_s": options.rate, "rows": rows, "rounds": rounds.found}


def tls(directory: Path, options: argparse.Namespace) -> dict:
    rounds = Rounds()
    with cluster(directory, 1, 1) as secured, cluster(directory, 1, 1, plain=True) as plain:
        both = {"TLS": secured, "plain text": plain}
        for made in both.values():
            made.write(options.file_mib)
        for turn in range(options.rounds):
            for name, made in list(both.items())[:: -1 if turn % 2 else 1]:
                found = made.read(options.file_mib, options.seconds, block=MIB, in_flight=16)
                rounds.add(f"{name}: 1 MiB, 16 in flight", found["bytes_rate"] / MIB, "MiB/s")
                found = made.read(options.file_mib, options.seconds, verb="one", block=4 * KIB, in_flight=1)
                rounds.add(f"{name}: 4 KiB, one at a time, p50", found["p50_us"], "µs")
                found = made.read(options.file_mib, options.seconds, block=4 * KIB)
                rounds.add(f"{name}: 4 KiB, 64 in flight", found["rate"], "reads/s")
    rows = []
    for load, unit in (
        ("1 MiB, 16 in flight", "MiB/s"),
        ("4 KiB, 64 in flight", "reads/s"),
        ("4 KiB, one at a time, p50", "µs"),
    ):
        rows.append({"load": load, "unit": unit, **{name: rounds.median(f"{name}: {load}") for name in both}})
    return {"rows": rows, "rounds": rounds.found}


def replicas(directory: Path, options: argparse.Namespace) -> dict:
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        mounts = {}
        for count in (1, 2):
            mounts["one node", count] = (
                stack.enter_context(one_node(directory / f"replicas-{count}", count)),
                [],
            )
            made = stack.enter_context(cluster(directory, 2, 1, "--replicas", str(count), drives=2))
            mounts["two nodes", count] = made.mount(made.clients[0]), made.clients[0].machine.command()
        for place, prefix in mounts.values():
            written(place / "read", options, prefix)
            # Large reads and writes go past the page cache. What is here and there not in it makes one four times the other.
            loads.fio(
                place / "read",
                "randread",
                4 * KIB,
                WARMING,
                600,
                size_bytes=options.file_mib * MIB // 2,
                once=True,
                prefix=prefix,
            )
        orders = [list(mounts.items())[:: -1 if turn % 2 else 1] for turn in range(options.rounds)]
        run("sync")
        for order in orders:
            for (where, count), (place, prefix) in order:
                found = loads.fio(
                    place / "read",
                    "randread",
                    4 * KIB,
                    16,
                    options.seconds,
                    prefix=prefix,
                    size_bytes=options.file_mib * MIB // 2,
                )
                rounds.add(f"{where}, {count}: random read, reads/s", found["rate"], "reads/s")
        for order in orders:
            for (where, count), (place, prefix) in order:
                run("sync")
                found = written(place / "written", options, prefix)
                rounds.add(f"{where}, {count}: sequential write, MiB/s", found["bytes_rate"] / MIB, "MiB/s")
                run(*prefix, "rm", place / "written")
    rows = []
    for where in ("one node", "two nodes"):
        for load, goal in (("sequential write, MiB/s", 0.5), ("random read, reads/s", 0.95)):
            one, two = (rounds.median(f"{where}, {count}: {load}") for count in (1, 2))
            rows.append(
                {"where": where, "load": load, "one": one, "two": two, "ratio": two / one, "goal": goal}
            )
    return {"rows": rows, "rounds": rounds.found}


@contextlib.contextmanager
def one_node(directory: Path, count: int) -> Iterator[Path]:
    directory.mkdir()
    with RealPool(directory / "pool", sizes=(8 << 30,) * 2, replicas=count) as pool:
        pool.make()
        pool.start()
        place = directory / "mount"
        place.mkdir()
        words = tuple(command(Program.CLI))
        try:
            run(*words, "mount", pool.path, place)
            yield place
        finally:
            with contextlib.suppress(Failed):
                run(*words, "umount", "--lazy", place)


def written(path: Path, options: argparse.Namespace, prefix: list[str]) -> dict:
    """One pass, and fsync."""
    return loads.fio(
        path,
        "write",
        MIB,
        1,
        600,
        direct=False,
        size_bytes=options.file_mib * MIB,
        sync_at_end=True,
        prefix=prefix,
    )


# -- what is said of it ------------------------------------------------------------------------------------------------


def markdown(results: dict) -> str:
    parts = [
        f"{results['date']}, {results['machine']}; nvpool {results['commit']}; medians of {results['rounds']} rounds of "
        f"{results['seconds']:g} s.{not_final(results['busy_before'])}"
    ]
    if "scaling" in results:
        found = results["scaling"]
        rows = [
            f"| nodes and clients, {found['rate_mib_s']:g} MiB/s each | read, MiB/s | share of linear | plain TCP, MiB/s | "
            "share of it | processors busy |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        rows += [
            f"| {row['nodes']} | {row['mib_s']:,.1f} | {judged(row['of_linear'], 0.95)} | {row['floor_mib_s']:,.1f} | "
            f"{row['mib_s'] / row['floor_mib_s']:.0%} | {busy_text(row['busy'])} |"
            for row in found["rows"]
        ]
        parts.append("\n".join(rows))
    if "tls" in results:
        rows = ["| one client, one node | TLS | plain text | TLS ÷ plain text |", "|---|---:|---:|---:|"]
        rows += [
            f"| {row['load']} ({row['unit']}) | {row['TLS']:,.0f} | {row['plain text']:,.0f} | "
            f"{row['TLS'] / row['plain text']:.2f} |"
            for row in results["tls"]["rows"]
        ]
        parts.append("\n".join(rows))
    if "replicas" in results:
        rows = ["| through a mount | 1 replica | 2 replicas | 2 ÷ 1 |", "|---|---:|---:|---:|"]
        rows += [
            f"| {row['where']}: {row['load']} | {row['one']:,.0f} | {row['two']:,.0f} | "
            f"{judged(row['ratio'], row['goal'])} |"
            for row in results["replicas"]["rows"]
        ]
        parts.append("\n".join(rows))
    if "balance" in results:
        rows = [
            "| a drive is added | chunks | moved | had to | moved ÷ had to | used, least–most | points between them |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        rows += [
            f"| {row['case']} | {row['chunks']:,} | {row['moved']:,} | {row['least']:,.0f} | "
            f"{judged(row['moved'] / row['least'], 1.1, True)} | {min(row['used']):.1%}–{max(row['used']):.1%} | "
            f"{judged(100 * (max(row['used']) - min(row['used'])), 5, True)} |"
            for row in results["balance"]["rows"]
        ]
        parts.append("\n".join(rows))
    if "growth" in results:
        found = results["growth"]
        rows = [
            f"| a third drive beside two, {found['rate_mib_s']:g} MiB/s each | before, MiB/s | after | grown by | "
            "of its share | processors busy |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for row in found["rows"]:
            grown = row["after"] / row["before"] - 1
            rows.append(
                f"| {row['what']} | {row['before']:,.1f} | {row['after']:,.1f} | {grown:.0%} of {row['share']:.0%} | "
                f"{judged(grown / row['share'], GROWN)} | {busy_text(row['busy'])} |"
            )
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def busy_text(share: float) -> str:
    return f"{share:.0%}" + (" (they were the limit)" if share > BUSY_MAX else "")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="short loads on small files: what is said is rough"
    )
    parser.add_argument("--seconds", type=float, help="of each load [6, quick 2]")
    parser.add_argument("--file-mib", type=int, help="the file of each client [512, quick 160]")
    parser.add_argument(
        "--rate", type=float, default=10.0, help="of each node's cable, MiB/s [10]: two processors serve four"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; repeat it")
    parser.add_argument("--directory", type=Path, default=HERE.parent / "build", help="on the drive to use")
    parser.add_argument("--results", type=Path, help="write nodes.json and nodes.md there")
    parser.add_argument(
        "--write", action="store_true", help="and put the tables of a whole run into bench/README.md"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    options = parser.parse_args(words)
    options.seconds = options.seconds or (2.0 if options.quick else 6.0)
    options.file_mib = options.file_mib or (160 if options.quick else 512)
    missing = namespaces.missing() or real_etcd.missing()
    if missing:
        raise SystemExit(f"this cannot run here: {missing}")
    wanted = [name for name in PARTS if not options.only or name in options.only]
    results: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "file_mib": options.file_mib,
        "busy_before": warn_of_others(),
    }
    parts = dict(zip(PARTS, (scaling, tls, replicas, balance, growth), strict=True))
    begin = time.monotonic()
    with workspace(options.directory) as (directory, _), processors_awake(can_keep_awake()):
        os.environ[MARK] = str(directory)  # what namespaces hold is ended with the rest
        for name in wanted:
            say(f"{name}, {minutes(time.monotonic() - begin)} since the beginning")
            try:
                results[name] = parts[name](directory, options)
            except (Failed, AssertionError) as error:
                say(f"{name} could not be measured: {error}")
    results["took_s"] = round(time.monotonic() - begin)
    whole = (
        not options.only
        and not options.quick
        and options.rounds >= 3
        and all(name in results for name in wanted)
    )
    print(json.dumps(results, indent=1) if options.json else markdown(results))
    kept = options.results or (HERE / "results" if whole else None)
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "nodes.json").write_text(json.dumps(results, indent=1) + "\n")
        (kept / "nodes.md").write_text(markdown(results))
        say(f"written to {kept}")
    if options.write and all(name in results for name in PARTS):
        put_into_readme("nodes", markdown(results))
    return 0 if all(name in results for name in wanted) else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
