"""Pauses of applications when a part of a pool of several nodes fails; an error is a failure of the run.

    make bench-nodes                                       each failure five times (after nodes.py)
    python bench/failures.py --times 1 --quick             a first look, some three minutes
    python bench/failures.py --only 'target killed'        one case; repeat it

Three nodes in network namespaces have two drives each, two replicas of each chunk and a standby of the metadata. A
client has a mount on a fourth. One thread of it reads blocks at random (O_DIRECT), one writes and flushes blocks, one
creates files, with short pauses; each compares what it reads, and all data is compared at the end. A case is caused
again after the pool has recovered. A pause is the longest step of a thread after the failure. Detection is the time from
the failure until the pool map no longer names the failed part, or another node leads. "nothing" is the floor: the same
measurement without a failure.

Needs root. Ends and removes all it started, also when interrupted. A whole run writes failures.json and failures.md to
bench/results; others where --results says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
from nodes import Cluster, cluster
from report import commit, judged, machine, put_into_readme
from subjects.contract import MARK, Failed
from workspace import can_keep_awake, not_final, processors_awake, say, warn_of_others, workspace

from nvpool.poolmap.shards.members import process_name
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.multi_node_pool import NodeMachine
from nvpool.testing.env.pool import end_process
from nvpool.testing.loads.data_verification import Pauses

HERE = Path(__file__).resolve().parent
KINDS = ("read", "write", "create")
REPLICAS = 2
WAIT_S = 240.0
STOPPED_S = 5.0
"""Seconds that are longer than a target's lease."""


def watch(place: str) -> None:
    """Run the client's process: print `taken` for each line that is sent to it, and the errors at the end."""
    with Pauses(Path(place), KINDS) as pauses:
        pauses.goes_on(5, WAIT_S)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(pauses.taken()), flush=True)
        pauses.goes_on(5, WAIT_S) if not pauses.errors else None
    try:
        pauses.verify()
        wrong = ""
    except AssertionError as error:
        wrong = str(error)
    print(
        json.dumps(
            {"operations": {worker.name: worker.operations for worker in pauses.workers}, "wrong": wrong}
        ),
        flush=True,
    )


class Watch:
    def __init__(self, client: NodeMachine, place: Path) -> None:
        words = (sys.executable, "-P", str(HERE / "failures.py"), "--watch", str(place))
        self._process = subprocess.Popen(
            client.machine.command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._hear() != "ready":
            raise Failed("the client does not begin")

    def _hear(self) -> str:
        if not select.select([self._process.stdout], [], [], WAIT_S)[0]:
            raise Failed(f"the client says nothing for {WAIT_S:.0f} s")
        return self._process.stdout.readline().strip()

    def taken(self) -> dict[str, float]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._hear())

    def end(self) -> dict:
        self._process.stdin.close()
        return json.loads(self._hear())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Failing:
    """A pool of three nodes, and the failures that can be caused in it.

    Each case returns a check whether the pool has detected the failure, and a function that repairs the pool.
    """

    def __init__(self, made: Cluster, seed: int) -> None:
        self.nodes, self.chance = made.nodes, random.Random(seed)
        self.down: NodeMachine | None = None

    def map(self):
        return (self.nodes[0] if self.down is not self.nodes[0] else self.nodes[1]).map()

    def _chains(self):
        return self.map().table_by_id[REPLICAS].chains

    def _target(self) -> tuple[int, int]:
        """Return a target and the pid of its process."""
        chosen = self.chance.choice(self.map().targets)
        return chosen.id, self.nodes[chosen.node - 1].directory.state_of(f"target-{chosen.id}").pid

    def _gone(self, targets: set[int]) -> Callable[[], bool]:
        return lambda: not any(targets & set(chain.targets) for chain in self._chains())

    def nothing(self):
        return None, lambda: time.sleep(3.0)

    def target_killed(self):
        number, pid = self._target()
        end_process(pid)
        return self._gone({number}), None

    def target_stopped(self):
        number, pid = self._target()
        os.kill(pid, signal.SIGSTOP)

        def go_on():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return self._gone({number}), go_on

    def primary_killed(self):
        shard = self.map().shards[0]
        node = self.nodes[shard.node - 1]
        end_process(node.directory.state_of(process_name(shard.id, shard.member)).pid)
        return (lambda: self.map().shards[0].term > shard.term), None

    def leader_killed(self):
        leader = max(self.nodes, key=led_since)
        before = led_since(leader)
        end_process(leader.directory.supervisor().pid)
        return (lambda: any(led_since(node) > before for node in self.nodes)), None

    def node_killed(self):
        shard = self.map().shards[0]
        holds = {shard.node} | {standby.node for standby in shard.standbys}
        number = (
            shard.node if len(holds) > 1 else self.chance.choice([at for at in (1, 2, 3) if at not in holds])
        )
        self.down = node = self.nodes[number - 1]
        node.kill_all()
        targets = {target.id for target in self.map().targets if target.node == number}

        def start():
            node.serve()
            node.until_all_serve(WAIT_S)
            self.down = None

        return self._gone(targets), start

    def whole(self) -> bool:
        return all(len(chain.targets) == REPLICAS and not chain.joining for chain in self._chains()) and all(
            standby.state == "up" for shard in self.map().shards for standby in shard.standbys
        )


CASES = {
    "nothing": Failing.nothing,
    "target killed": Failing.target_killed,
    "target stopped": Failing.target_stopped,
    "metadata primary killed": Failing.primary_killed,
    "leader's supervisor killed": Failing.leader_killed,
    "whole node killed": Failing.node_killed,
}
GOALS = {
    "target killed": ("after detection", 1.0),
    "target stopped": ("after detection", 1.0),
    "metadata primary killed": ("in all", 5.0),
}


def led_since(node: NodeMachine) -> str:
    """Time of the last log line that says that the node leads; "" if there is none."""
    lines = (node.directory.log / "nvpoold.log").read_text(errors="replace").splitlines()
    return max((line[:30] for line in lines if "this node leads the pool" in line), default="")


def until(holds: Callable[[], object], what: str) -> float:
    """Wait for the condition; return the seconds."""
    begin = time.monotonic()
    while not holds():
        if time.monotonic() - begin > WAIT_S:
            raise Failed(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - begin


def caused(failing: Failing, name: str, watching: Watch) -> dict:
    """Cause one failure; return the time of detection, the longest pause of each thread and the time of recovery."""
    until(failing.whole, "the pool is whole")
    time.sleep(1.0)
    watching.taken()
    begin = time.monotonic()
    noticed, mend = CASES[name](failing)
    detected = None
    if noticed is not None:
        until(noticed, f"{name}: it is noticed")
        detected = time.monotonic() - begin
        time.sleep(max(0.0, STOPPED_S - detected))
    if mend is not None:
        mend()
    until(failing.whole, f"{name}: the pool is whole again")
    whole = time.monotonic() - begin
    time.sleep(1.0)
    return {
        "detected_s": detected,
        "whole_s": whole if noticed is not None else None,
        "pauses_s": watching.taken(),
    }


def summary(name: str, found: list[dict]) -> dict:
    worst = {kind: max(one["pauses_s"][kind] for one in found) for kind in KINDS}
    whole = [one["whole_s"] for one in found if one["whole_s"] is not None]
    after = {
        kind: max(
            (
                max(0.0, one["pauses_s"][kind] - one["detected_s"])
                for one in found
                if one["detected_s"] is not None
            ),
            default=None,
        )
        for kind in KINDS
    }
    return {
        "case": name,
        "times": len(found),
        "worst_s": worst,
        "each": found,
        "median_s": {kind: median(one["pauses_s"][kind] for one in found) for kind in KINDS},
        "detected_s": max(
            (one["detected_s"] for one in found if one["detected_s"] is not None), default=None
        ),
        "after_s": after,
        "whole_s": max(whole, default=None),
    }


def markdown(results: dict) -> str:
    rows = [
        "| failure | times | reader, worst (median) | writer | creator | detection, at most | after it: reader · writer | "
        "whole again |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["cases"]:
        which, goal = GOALS.get(row["case"], ("", None))
        cells = [f"{row['worst_s'][kind]:.2f} ({row['median_s'][kind]:.2f})" for kind in KINDS]
        if which == "in all":
            after = f"in all {judged(max(row['worst_s'].values()), goal, True)}"
        else:
            after = f"{judged(row['after_s']['read'], goal, True)} · {judged(row['after_s']['write'], None)}"
        goal = 3.0 if row["case"].startswith("target") else None
        detected = "–" if row["detected_s"] is None else judged(row["detected_s"], goal, True)
        whole = "–" if row["whole_s"] is None else f"{row['whole_s']:.1f}"
        rows.append(
            f"| {row['case']} | {row['times']} | {' | '.join(cells)} | {detected} | {after} | {whole} |"
        )
    return (
        f"{results['date']}, {results['machine']}; nvpool {results['commit']}. Seconds."
        f"{not_final(results['busy_before'])} Errors: {results['wrong'] or 'none'}; "
        f"{sum(results['operations'].values()):,} operations, all compared at the end.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def measure(directory: Path, wanted: list[str], options: argparse.Namespace) -> dict:
    found: dict[str, list[dict]] = {name: [] for name in wanted}
    with cluster(
        directory, 3, 1, "--replicas", str(REPLICAS), "--standbys", "1", drives=2, capacity="2G"
    ) as made:
        failing = Failing(made, options.seed)
        place = made.mount(made.clients[0])
        watching = Watch(made.clients[0], place)
        try:
            for turn in range(options.times):
                for name in wanted:
                    found[name].append(one := caused(failing, name, watching))
                    pauses = ", ".join(f"{kind} {one['pauses_s'][kind]:.2f} s" for kind in KINDS)
                    noticed = (
                        ""
                        if one["detected_s"] is None
                        else (
                            f", detected after {one['detected_s']:.2f} s, whole after {one['whole_s']:.1f} s"
                        )
                    )
                    say(f"{turn + 1}: {name}: {pauses}{noticed}")
            ended = watching.end()
        finally:
            watching.kill()
    return {"cases": [summary(name, each) for name, each in found.items()], **ended}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", "--rounds", type=int, default=5, help="how often each failure is caused")
    parser.add_argument(
        "--quick", action="store_true", help="once, without the stop of a target and the death of a node"
    )
    parser.add_argument("--only", choices=CASES, action="append", help="one case; repeat it")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of targets and nodes")
    parser.add_argument("--directory", type=Path, default=HERE.parent / "build", help="on the drive to use")
    parser.add_argument("--results", type=Path, help="write failures.json and failures.md there")
    parser.add_argument(
        "--write", action="store_true", help="and put the table of a whole run into bench/README.md"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--watch", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.watch:
        watch(options.watch)
        return 0
    missing = namespaces.missing() or real_etcd.missing()
    if missing:
        raise SystemExit(f"this cannot run here: {missing}")
    if options.quick:
        options.times = 1
    left_out = ("target stopped", "whole node killed") if options.quick else ()
    wanted = options.only or [name for name in CASES if name not in left_out]
    results: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "busy_before": warn_of_others(),
    }
    with workspace(options.directory) as (directory, _), processors_awake(can_keep_awake()):
        os.environ[MARK] = str(directory)  # what namespaces hold is ended with the rest
        try:
            results |= measure(directory, wanted, options)
        except (Failed, AssertionError) as error:
            say(f"could not be measured: {error}")
    if "cases" not in results:
        return 1
    print(json.dumps(results, indent=1) if options.json else markdown(results))
    kept = options.results or (
        HERE / "results" if not options.only and not options.quick and options.times >= 3 else None
    )
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "failures.json").write_text(json.dumps(results, indent=1) + "\n")
        (kept / "failures.md").write_text(markdown(results))
        say(f"written to {kept}")
    if options.write and len(wanted) == len(CASES):
        put_into_readme("failures", markdown(results))
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
