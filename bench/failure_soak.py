"""Many failures of a pool of three nodes, one after the other, each measured against bounds.

    python bench/failure_soak.py --rounds 1000 --results bench/results        (root; about an hour and a half on two cores)
    python bench/failure_soak.py --rounds 20 --seed 7 --keep-going            a first look
    python bench/failure_soak.py --first 312 --rounds 1 --seed 7              round 312 of seed 7 again
    python bench/failure_soak.py --rounds 500 --continue bench/results/failure-soak.json   the next 500 rounds, in one table

Three nodes in network namespaces with TLS between them, two drives each, two replicas of each chunk, a standby of the
metadata; a client with a mount on a fourth. A checking load writes, truncates, renames and reads on the mount all the time, and
compares. A round kills processes, or has for some seconds a link cut, one way only, slow or late or a process stopped, or both;
every tenth round does so in the middle of the drain of a drive. nvpool/testing/faults/node_faults.py lists the faults. The seed
and the number of a round decide all choices. A daemon that was killed is restarted as systemd does it.

Measured of each round, and its bound:

* change: the longest time that a create, rename or unlink took, counted from the latest fault (kill, begin of a condition):
  5 s. While the client's own link to the primary's node is cut, counted from the end of the cut.
* whole: from the end of the fault until the pool map has all copies of all chains and a standby that has everything, nothing
  moves, and `nvpool status --check` ends with 0: 60 s.
* drain: `drive drain --wait` ends with 0 within 60 s of the end of the fault, and `--cancel --wait` within 60 s.
* start: `nvpoold` of a node ends as often as it is killed: it is never refused when it is restarted.
* status: never 0 while the map has been without copies for 5 s or more; on an untouched node never 10 s without an answer.
* data: no error at the load, no wrong byte, all names there; `nvpool fsck` finds nothing (every 25 rounds and after a round
  that missed a bound).

Ends with 1 when a round missed a bound. Without --keep-going that round is the last. Writes below --results: each round as a
line of failure-soak.jsonl, failure-soak.json and the table failure-soak.md at the end, and the logs of at most 20 rounds that
missed a bound to round-N.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import select
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import commit, machine, put_into_readme
from subjects.contract import MARK, Failed
from workspace import PREFIX, minutes, say, workspace

from nvpool.core.errors import NvpoolError
from nvpool.host.pool_directory import SOCKET_PATH_BYTES_MAX, PoolDirectory
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.command_forkserver import CommandServer
from nvpool.testing.env.multi_node_pool import NVPOOL, NodeMachine
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.service_manager import ServiceManager
from nvpool.testing.faults.node_faults import (
    CONDITIONS,
    VICTIMS,
    NodeFaults,
    NotNow,
    is_settled,
    missing_copies,
    newest_map,
)
from nvpool.testing.loads.data_verification import CheckingLoad, Pauses
from nvpool.testing.loads.mounted_nodes import PoolInUse

HERE = Path(__file__).resolve().parent
PLACES = HERE.parent / "build", Path("/var/tmp")
"""Parent directories of pools; the second is short, and on a drive."""
CHANGE_S, WHOLE_S, DRAIN_S = 5.0, 60.0, 60.0
NOTICED_S = 5.0
"""Seconds after a change of the map by which `status` must report it."""
STATUS_S = 240.0
"""Seconds after which a command is killed."""
NEWER_S = 1.0
"""Seconds until a map that a node knows is on its disk."""
EPOCHS_KEPT = 100
UNANSWERED_S = 10.0
GIVEN_UP_S = 180.0
"""Seconds, longer than any bound, after which a pool that has not recovered is replaced."""
HELD_S = (4.0, 6.0)
"""Seconds of a condition: longer than any lease."""
USED_SHARE_MAX = 0.4
"""Largest used share of the pool before a round: a drain needs room for a drive's content on the others."""
CHECKED_ROUNDS = 25
POOLS_TRIED = 3
LOGS_KEPT, LOG_BYTES = 20, 256 << 10

KILLS = {
    "primary": 8,
    "leader": 6,
    "primary and leader": 3,
    "primary and its supervisor": 3,
    "supervisor": 3,
    "all supervisors": 2,
    "standby": 2,
    "standby and its supervisor": 2,
    "store": 2,
    "etcd": 1,
    "leader and its etcd": 2,
    "node of the primary": 1,
}
"""Weights of the random choice of a kill."""
ALONE, BOTH = 0.3, 0.55
"""Shares of rounds with a kill alone, and with a kill during a condition; the rest is a condition alone."""
DRAINS = 0.1
CLIENT_CUT = "client cut from primary"


def chosen(seed: int, number: int) -> tuple[random.Random, str, str, bool]:
    """The choices of a round: what is killed ("nobody"), what lasts meanwhile, and whether a drive is drained."""
    chance = random.Random(f"{seed}-{number}")
    kind, drains = chance.random(), chance.random() < DRAINS
    victim = chance.choices(list(KILLS), list(KILLS.values()))[0]
    condition = chance.choice([name for name in CONDITIONS if name != "nothing else"])
    if kind < ALONE:
        condition = "nothing else"
    elif kind > ALONE + BOTH:
        victim = "nobody"
    return chance, victim, condition, drains


class Sampled(threading.Thread):
    """Calls `look` repeatedly until it is stopped. `look` must have its own deadline."""

    def __init__(self, look, rest_s: float) -> None:
        super().__init__(daemon=True)
        self._look, self._rest_s, self._end = look, rest_s, threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            self._look()
            self._end.wait(self._rest_s)

    def stop(self) -> None:
        self._end.set()
        self.join(60)


class Truth:
    """State in the pool map, read from the disks of the nodes, with the time of each change."""

    def __init__(self, pool: PoolInUse) -> None:
        self._pool = pool
        self.missing_since: float | None = None
        """None while no copy is missing."""
        self.missing = ""
        self.settled = False
        self.by_epoch: dict[int, tuple[str, float | None]] = {}
        """Epoch of each of the last maps -> its missing copies, and since when copies are missing."""
        self._sampled = Sampled(self._look, 0.1)

    def __enter__(self) -> Truth:
        self._look()
        self._sampled.start()
        return self

    def __exit__(self, *_exc) -> None:
        self._sampled.stop()

    def _look(self) -> None:
        try:
            seen = newest_map(self._pool)
        except (OSError, NvpoolError):
            return
        self.missing = missing_copies(seen)
        self.settled = is_settled(seen)
        if not self.missing:
            self.missing_since = None
        elif self.missing_since is None:
            self.missing_since = time.monotonic()
        self.by_epoch[seen.epoch] = self.missing, self.missing_since
        while len(self.by_epoch) > EPOCHS_KEPT:
            del self.by_epoch[next(iter(self.by_epoch))]


class Watch:
    """Repeated `nvpool status --check` of one node, compared with the true state."""

    def __init__(self, truth: Truth, node: NodeMachine, commands: CommandServer, noticed_s: float) -> None:
        self._truth, self._node, self._commands, self._noticed_s = truth, node, commands, noticed_s
        self.wrong: list[str] = []
        self.words: set[str] = set()
        self.codes: set[int] = set()
        self._answered_s = time.monotonic()
        self.unanswered_s = 0.0
        self._sampled = Sampled(self._look, 1.0)

    def __enter__(self) -> Watch:
        self._sampled.start()
        return self

    def __exit__(self, *_exc) -> None:
        self._sampled.stop()

    def _look(self) -> None:
        began, since = time.monotonic(), self._truth.missing_since
        code, seen, said = asked(self._node, self._commands)
        if not seen:
            self.unanswered_s = max(self.unanswered_s, time.monotonic() - self._answered_s)
            self.words.add(f"no answer: {said[-200:]}")
            return
        self._answered_s = time.monotonic()
        self.codes.add(code)
        self.words.update(map(in_general, seen["problems"]))
        if code and seen["problems"]:
            return
        missing, its_since = self._truth.by_epoch.get(seen["pool"]["epoch"], ("", None))
        if its_since is None and since is not None:  # it may know a newer map than the disk, or an old one
            time.sleep(NEWER_S)
            missing, its_since = self._truth.missing, since if self._truth.missing_since == since else None
        if its_since is not None and began - its_since > self._noticed_s:
            self.wrong.append(
                f"status ended with {code} and {len(seen['problems'])} problems, though for "
                f"{began - its_since:.1f} s the map has been without: {missing}"
            )


def in_general(problem: str) -> str:
    """The sentence without its numbers of chains."""
    return re.sub(r"\b\d+ (?=chains|of|are)", "N ", problem)[:200]


def last_line(path: Path) -> str:
    return next(iter(path.read_text(errors="replace").splitlines()[::-1]), "")[-300:]


def asked(node: NodeMachine, commands: CommandServer) -> tuple[int, dict, str]:
    """Exit code and answer of `nvpool status --check` there; an empty answer where there is none."""
    try:
        done = commands.call("status", str(node.path), "--json", "--check", timeout_s=STATUS_S)
    except subprocess.TimeoutExpired as error:
        return -1, {}, str(error)
    with contextlib.suppress(ValueError):
        seen = json.loads(done.stdout)
        if isinstance(seen, dict) and "problems" in seen:
            return done.returncode, seen, ""
    return done.returncode, {}, (done.stdout + done.stderr).strip()


def load(place: Path, seed: int) -> None:
    """Run the process of the load: report observations since each time that it is sent, and problems at the end.

    It must start no process: before its exec a child flushes the files that are open here, and all threads wait for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the program, which ends this
    (place / "names").mkdir(parents=True)
    changing = CheckingLoad(place, threads=2, seed=seed, file_bytes_max=1 << 20, rest_s=0.05)
    names = Pauses(place / "names", ("change",))
    with changing, names:
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            waits = list(names.waits_since(float(line)))
            print(json.dumps({"waits": waits, "errors": changing.errors + names.errors}), flush=True)
    found = []
    for one in (names, changing):
        try:
            one.verify()
        except (AssertionError, OSError) as error:
            found.append(f"data: {error}"[:600])
    if not found:
        shutil.rmtree(place)
    print(json.dumps({"wrong": found}), flush=True)


class Load:
    """The load, a process on the client's machine."""

    def __init__(self, client: NodeMachine, name: str, seed: int) -> None:
        words = (
            sys.executable,
            "-P",
            str(HERE / "failure_soak.py"),
            "--load",
            str(client.machine.place / "mount" / name),
            "--seed",
            str(seed),
        )
        self._process = subprocess.Popen(
            client.machine.command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._hear()

    def _hear(self) -> dict:
        if not select.select([self._process.stdout], [], [], GIVEN_UP_S)[0]:
            raise Failed(f"the load says nothing for {GIVEN_UP_S:.0f} s")
        return json.loads(
            self._process.stdout.readline() or '{"waits": [], "errors": ["the load has ended"], "wrong": []}'
        )

    def seen(self, since: float) -> dict:
        """`waits` for changes of names that ended after that moment of the monotonic clock, and `errors` of all of it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{since}\n")
            self._process.stdin.flush()
        return self._hear()

    def end(self) -> list[str]:
        """End the load; return the problems. A load without problems has removed its files."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._hear()["wrong"]
        except Failed as error:
            return [f"data: {error}"]
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Soak:
    """One pool under its load, and the rounds on it."""

    def __init__(self, directory: Path, seed: int, held_s: tuple[float, float], patience: float) -> None:
        """`patience`: factor of all bounds."""
        self._directory, self._seed, self._held_s, self._patience = directory, seed, held_s, patience
        self._loads = self._leads = 0
        self._why = ""

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        switch = Machines(4, self._directory)
        with switch as hosts:
            self._pool = PoolInUse(switch, hosts)
            managers = self._managers = [ServiceManager(node) for node in self._pool.nodes[:3]]
            # One for each node that is watched; the last asks a node whether all is whole, while it is watched too.
            asking = self._commands = [
                CommandServer(node.machine) for node in (*self._pool.nodes[:3], self._pool.nodes[1])
            ]
            try:
                first, second, third, _ = self._pool.nodes
                self._pool.join(second, self._pool.found("--chunk-size", "256KiB"))
                self._pool.join(third, first.json("node", "token", str(first.path)))
                self._pool.until_whole()
                for manager in managers:
                    manager.take_over()
                self._pool.until_whole()
                self._pool.mount_client()
                with Truth(self._pool) as self._truth:
                    assert self._until_whole(time.monotonic()) is not None, f"not whole: {self._why}"
                    self._begin_load()
                    try:
                        yield
                    finally:
                        self._load.kill()
            finally:
                for server in asking:
                    server.stop()
                for manager in managers:
                    manager.stop()
                self._pool.end()
                for manager in managers:
                    manager.close()

    # -- load --------------------------------------------------------------------------------------------------------------

    def _begin_load(self) -> None:
        self._loads += 1
        self._load = Load(self._pool.client_node, f"load-{self._loads}", self._seed * 100 + self._loads)

    def check(self) -> list[str]:
        """End the load and run fsck; return the problems. A new load runs afterwards."""
        found = self._load.end()
        try:
            self._pool.check(moved=True)
        except (AssertionError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            found.append(f"fsck: {error!r}"[:600])
        self._begin_load()
        return found

    # -- rounds ------------------------------------------------------------------------------------------------------------

    def round(self, number: int, chance: random.Random, victim: str, condition: str, drains: bool) -> dict:
        """Cause the faults of a round and measure it. `missed` of the result names the bounds that it missed, `whole_s` is None
        when the pool was not whole after GIVEN_UP_S."""
        faults = NodeFaults(self._pool, chance, self._leads)
        row: dict = {
            "round": number,
            "seed": self._seed,
            "victim": victim,
            "condition": condition,
            "drain": drains,
            "at": time.strftime("%H:%M:%S"),
            "missed": [],
            "notes": faults.notes,
        }
        missed, moments = row["missed"], []
        draining = Draining(self._pool, chance) if drains else None
        began = ended = time.monotonic()
        ends = [manager.ended for manager in self._managers]
        with contextlib.ExitStack() as watching:
            watch = None
            try:
                if draining is not None:
                    draining.begin()
                    time.sleep(chance.uniform(0.2, 1.5))
                held = chance.uniform(*self._held_s)
                lasts = condition != "nothing else" and "over TCP" not in condition
                moments.append(time.monotonic())
                with CONDITIONS[condition](faults):
                    watched = self._pool.nodes[
                        chance.choice(sorted({1, 2, 3} - faults.touched) or [1, 2, 3]) - 1
                    ]
                    commands = self._commands[self._pool.nodes.index(watched)]
                    watch = watching.enter_context(
                        Watch(self._truth, watched, commands, NOTICED_S * self._patience)
                    )
                    if victim != "nobody":
                        time.sleep(chance.uniform(0.0, held * 0.6) if lasts else 0.0)
                        moments.append(time.monotonic())
                        faults.kill(victim)
                    time.sleep(max(0.0, moments[0] + held - time.monotonic()) if lasts else 1.0)
                ended = time.monotonic()
                if condition == CLIENT_CUT:
                    moments = [ended]
            except NotNow as error:
                row["skipped"], ended = str(error), time.monotonic()
            whole = self._until_whole(ended)
        row["whole_s"] = whole
        if whole is None or whole > WHOLE_S * self._patience:
            missed.append(f"whole: not within {WHOLE_S * self._patience:.0f} s: {self._why}")
        if whole is not None and draining is not None:
            missed += draining.end(row, ended, DRAIN_S * self._patience)
            self._until_whole(time.monotonic())
        if watch is not None:
            row["status"] = {"codes": sorted(watch.codes), "words": sorted(watch.words)[:8]}
            missed += [f"status: {text}" for text in watch.wrong[:3]]
            if watch.unanswered_s > UNANSWERED_S * self._patience:
                missed.append(
                    f"status: no answer for {watch.unanswered_s:.1f} s on node {watched.machine.name}"
                )
        change = self._change(began, moments)
        row["change_s"], row["changed"] = round(change[0], 2), change[1]
        if "skipped" not in row and change[0] > CHANGE_S * self._patience:
            missed.append(f"change: {change[1]} took {change[0]:.1f} s")
        missed += [f"data: {error}"[:400] for error in self._load.seen(began)["errors"]]
        for number, (manager, before) in enumerate(zip(self._managers, ends, strict=True), 1):
            if (count := manager.ended - before) > faults.supervisors_killed[number]:
                missed.append(
                    f"start: nvpoold of node {number} ended {count} times and was killed "
                    f"{faults.supervisors_killed[number]} times: {last_line(manager.errors)}"
                )
        row["took_s"] = round(time.monotonic() - began, 1)
        row["load"] = round(os.getloadavg()[0], 1)
        return row

    def _change(self, began: float, moments: list[float]) -> tuple[float, str]:
        """The longest change of a name, counted from the latest fault before its end, and the kind of change."""
        longest = (0.0, "")
        for start, end, what in self._load.seen(began)["waits"]:
            fault = max((moment for moment in moments if moment < end), default=None)
            if fault is not None and end - max(start, fault) > longest[0]:
                longest = end - max(start, fault), what
        return longest

    def _until_whole(self, since: float) -> float | None:
        """Seconds from `since` until the pool has recovered and `status` reports it; None after GIVEN_UP_S."""
        while time.monotonic() - since < GIVEN_UP_S:
            if self._truth.settled and not self._truth.missing:
                code, seen, said = asked(self._pool.nodes[1], self._commands[3])
                leads = next((one["node"] for one in seen.get("nodes", ()) if one["leads"]), 0)
                if not code and seen and not seen["problems"] and leads:
                    self._leads = leads
                    return round(time.monotonic() - since, 2)
                self._why = (
                    f"status ended with {code}: {seen.get('problems') or said[-300:] or 'no node leads'}"
                )
                time.sleep(0.3)
            else:
                self._why = self._truth.missing or "chains are being filled or moved"
                time.sleep(0.1)
        return None

    def wait_for_room(self) -> None:
        """Pause the faults while the pool is more than USED_SHARE_MAX full: a primary frees removed files only a session's
        lease after its start, which kills every few seconds put off. The next round says if that does not help."""
        until = time.monotonic() + GIVEN_UP_S
        while time.monotonic() < until:
            space = os.statvfs(self._pool.mount)
            if space.f_bfree >= space.f_blocks * (1 - USED_SHARE_MAX):
                return
            time.sleep(1.0)

    def keep_logs(self, to: Path) -> None:
        """The ends of all logs of the nodes and of the client."""
        for node in self._pool.nodes:
            for path in node.directory.log.glob("*.log"):
                place = to / node.machine.name
                place.mkdir(parents=True, exist_ok=True)
                with open(path, "rb") as file:
                    file.seek(max(0, path.stat().st_size - LOG_BYTES))
                    (place / path.name).write_bytes(file.read())
        for node, manager in zip(self._pool.nodes, self._managers, strict=False):
            for path in (node.directory.poolmap, manager.errors):
                with contextlib.suppress(OSError):
                    shutil.copy(path, to / node.machine.name)


class Draining:
    """A drive that is drained during a round and filled again afterwards."""

    def __init__(self, pool: PoolInUse, chance: random.Random) -> None:
        self._node = pool.nodes[chance.choice([1, 2, 3]) - 1]
        drives = [target.drive for target in newest_map(pool).targets if not target.is_over]
        self._words = ("drive", "drain", str(self._node.path), str(chance.choice(drives)))
        self._command: subprocess.Popen | None = None

    def _start(self, *more: str) -> subprocess.Popen:
        return self._node.machine.popen(
            *NVPOOL,
            *self._words,
            *more,
            "--wait",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def begin(self) -> None:
        self._command = self._start()

    def end(self, row: dict, since: float, bound_s: float) -> list[str]:
        """Wait for the drain, then fill the drive again; the bounds that were missed."""
        missed = []
        for verb, more in (("drain", ()), ("undrain", ("--cancel",))):
            if verb == "undrain":
                since, self._command = time.monotonic(), self._start(*more)
            said, again = "", 0
            while True:
                try:
                    said = self._command.communicate(timeout=max(0.1, since + GIVEN_UP_S - time.monotonic()))[
                        0
                    ]
                except subprocess.TimeoutExpired:
                    self._command.kill()
                    said = f"killed after {GIVEN_UP_S:.0f} s: " + self._command.communicate()[0]
                    missed.append(f"drain: {verb} did not end: {said[-300:]}")
                    break
                if not self._command.returncode:
                    break
                again += 1
                row.setdefault("drain_said", []).append(said[-300:])
                if again > 3 or time.monotonic() - since > GIVEN_UP_S:
                    missed.append(f"drain: {verb} ended with {self._command.returncode}: {said[-300:]}")
                    break
                time.sleep(1.0)
                self._command = self._start(*more)
            took = row[f"{verb}_s"] = round(time.monotonic() - since, 2)
            row["drain_again"] = row.get("drain_again", 0) + again
            if not missed and took > bound_s:
                missed.append(f"drain: {verb} took {took:.1f} s")
        return missed


# -- what is said of it ------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> str:
    """Median, 95th percentile and largest."""
    if not values:
        return "–"
    ordered = sorted(values)
    picked = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95)]
    return " · ".join(f"{value:.1f}" for value in (*picked, ordered[-1]))


def runs_in(path: Path) -> list[dict]:
    """The runs of a failure-soak.json. SystemExit: it cannot be read."""
    try:
        found = json.loads(path.read_text())
        return found.get("runs", [found])
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"{path} holds no results of earlier rounds: {error}") from None


def markdown(runs: list[dict], brief: bool = False) -> str:
    """The table of all rounds of `runs`, which came one after the other; `brief`: what was killed and what happened meanwhile
    apart, not in all combinations."""
    rounds = [one for run in runs for one in run["each"]]
    timed = [one for one in rounds if "skipped" not in one]
    untimed = [one for one in rounds if "skipped" in one]
    head = (
        "| killed | meanwhile | rounds | change, s: median · 95 % · longest | whole again, s | missed a bound |\n"
        "|---|---|---:|---:|---:|---:|"
    )
    lines = [head]

    def line(victim: str, condition: str, ones: list[dict]) -> str:
        figures = [one for one in ones if "skipped" not in one]
        return (
            f"| {victim} | {condition} | {len(ones)} | {spread([one['change_s'] for one in figures])} | "
            f"{spread([one['whole_s'] for one in figures if one['whole_s'] is not None])} | "
            f"{sum(bool(one['missed']) for one in ones) or ''} |"
        )

    groups: dict[tuple[str, str], list[dict]] = {}
    for one in timed:
        victim, condition = one["victim"], link_of(one["condition"])
        for pair in ((victim, ""), ("", condition)) if brief else ((victim, condition),):
            groups.setdefault(pair, []).append(one)
    victims, links = [*VICTIMS, "nobody", ""], ["", *LINKS]
    for victim, condition in sorted(groups, key=lambda pair: (victims.index(pair[0]), links.index(pair[1]))):
        lines.append(line(victim, condition, groups[victim, condition]))
    if untimed:
        lines.append(line("not measured", "", untimed))
    lines.append(line("**all**", "", rounds))
    drains = [one for one in timed if one["drain"]]
    if drains:
        lines.append(
            f"\n{len(drains)} of them during a drain: drained after "
            f"{spread([one['drain_s'] for one in drains if 'drain_s' in one])} s, filled again after "
            f"{spread([one['undrain_s'] for one in drains if 'undrain_s' in one])} s (median · 95 % · longest)."
        )
    failed = sum(bool(one["missed"]) for one in rounds)
    measured_on = "; then ".join(
        f"{run['date']}, {run['machine']}; nvpool {run['commit']}; seed {run['seed']}, {len(run['each'])} rounds on "
        f"{run['pools']} pool{'s' if run['pools'] > 1 else ''} in {minutes(run['took_s'])}"
        for run in runs
    )
    unmeasured = (
        f" {len(untimed)} round{'' if len(untimed) == 1 else 's'} could not be measured." if untimed else ""
    )
    return (
        f"{measured_on}. {failed} of {len(rounds)} rounds "
        f"missed a bound (change {CHANGE_S:.0f} s, whole and drains {WHOLE_S:.0f} s, status, data).{unmeasured}\n\n"
        + "\n".join(lines)
        + "\n"
    )


def measured(row: dict) -> dict:
    """Part of a round's result that tables and later comparisons use."""
    kept = (
        "round",
        "victim",
        "condition",
        "drain",
        "change_s",
        "whole_s",
        "drain_s",
        "undrain_s",
        "skipped",
        "missed",
    )
    return {key: row[key] for key in kept if key in row}


LINKS = (
    "nothing else",
    "link cut",
    "link one way",
    "link slow or late",
    "process stopped",
    "connected over TCP",
    "client's link cut",
)


def link_of(condition: str) -> str:
    """The kind of a condition, a row of the table."""
    if condition == CLIENT_CUT:
        return "client's link cut"
    for word, kind in (
        ("one way", "link one way"),
        ("deaf", "link one way"),
        ("mute", "link one way"),
        ("cut", "link cut"),
        ("slow", "link slow or late"),
        ("late", "link slow or late"),
        ("stopped", "process stopped"),
        ("TCP", "connected over TCP"),
    ):
        if word in condition:
            return kind
    return condition


# -- the program ---------------------------------------------------------------------------------------------------------------


def rounds_of(options: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Every --pools-th round, from --first + --share on. A pool that is not whole again or has lost data is replaced."""
    numbers = list(range(options.first + options.share, options.first + options.rounds, options.pools))
    held_s = HELD_S if options.held is None else (options.held, options.held)
    failures = kept = 0
    while numbers and failures < POOLS_TRIED:
        soak = Soak(directory, options.seed, held_s, options.patience)
        try:
            with soak.pool():
                failures = 0
                for row in rounds_on(soak, numbers, options):
                    if row["missed"] and kept < LOGS_KEPT:
                        kept += 1
                        soak.keep_logs(options.results / f"round-{row['round']}")
                    yield row
        except (AssertionError, Failed, OSError, subprocess.SubprocessError) as error:
            failures += 1
            yield broken(
                numbers[0] if numbers else options.first,
                f"a pool could not be made or ended: {error!r}"[-1500:],
            )


def rounds_on(soak: Soak, numbers: list[int], options: argparse.Namespace) -> Iterator[dict]:
    """Take numbers of rounds and run them, until the pool has to be replaced."""
    while numbers:
        number = numbers.pop(0)
        chance, victim, condition, drains = chosen(options.seed, number)
        try:
            soak.wait_for_room()
            row = soak.round(
                number,
                chance,
                options.victim or victim,
                options.condition or condition,
                options.drain or drains,
            )
            last = not numbers or row["whole_s"] is None
            if row["whole_s"] is not None and (
                row["missed"] or last or (number + 1) % CHECKED_ROUNDS < options.pools
            ):
                row["missed"] += soak.check()
        except Exception:  # whatever it is, the round is kept with its logs
            row = broken(number, traceback.format_exc()[-1500:])
        yield row
        if row["whole_s"] is None or any(one.startswith("data") for one in row["missed"]):
            return


def broken(number: int, why: str) -> dict:
    """A round that the program could not measure."""
    return {
        "round": number,
        "victim": "nobody",
        "condition": "nothing else",
        "drain": False,
        "whole_s": None,
        "change_s": 0.0,
        "skipped": "not measured",
        "missed": [f"program: {why}"],
    }


def summary_of(row: dict) -> str:
    """One line for a round."""
    whole = "never" if row["whole_s"] is None else f"{row['whole_s']:.1f} s"
    figures = f"change {row.get('change_s', 0):.1f} s, whole {whole}"
    drained = (
        f", drained {row['drain_s']:.1f} s, filled {row.get('undrain_s', 0):.1f} s"
        if "drain_s" in row
        else ""
    )
    return (
        f"round {row['round']}: {row['victim']} killed, {row['condition']}: {row.get('skipped') or figures + drained}"
        f"{'; MISSED ' + '; '.join(row['missed']) if row['missed'] else ''}"
    )


def shared(words: list[str], pools: int, directory: Path) -> Iterator[dict]:
    """The rounds of as many processes as there are pools, as they come. Their directories lie below `directory`."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), *words, "--directory", str(directory)]
    workers = [
        subprocess.Popen([*command, "--share", str(share)], stdout=subprocess.PIPE, text=True)
        for share in range(pools)
    ]
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.stdout, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    line = key.fileobj.readline()
                    if not line:
                        selector.unregister(key.fileobj)
                    elif line.startswith("{"):
                        yield json.loads(line)
        for worker in workers:
            if worker.wait() not in (0, 1):
                yield broken(0, f"a process of it ended with {worker.returncode}")
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def short_enough(parent: Path, pools: int) -> bool:
    """Whether the paths of unix sockets in pools below `parent` are short enough."""
    workspaces = [PREFIX + 8 * "x"] * (2 if pools > 1 else 1)
    pool = PoolDirectory(parent.resolve().joinpath(*workspaces, namespaces.PREFIX + 8 * "x", "m1", "pool"))
    return pool.socket_directory() == pool.run


def place_of_pools(wanted: Path | None, pools: int) -> Path:
    """Parent directory of pools: `wanted`, or the first of PLACES that is short enough. SystemExit: `wanted` is not."""
    if wanted is None:
        return next(place for place in PLACES if short_enough(place, pools))
    if not short_enough(wanted, pools):
        raise SystemExit(
            f"--directory {wanted} is too long: unix sockets of pools below it would have paths of more than "
            f"{SOCKET_PATH_BYTES_MAX} bytes; give a shorter one, for instance --directory {PLACES[-1]}"
        )
    return wanted


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1, help="number of the first round [1]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pools", type=int, default=1, help="so many pools side by side, each in a process of its own [1]"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a round that missed a bound")
    parser.add_argument("--victim", choices=[*VICTIMS, "nobody"], help="kill this in every round")
    parser.add_argument("--condition", choices=CONDITIONS, help="and have this meanwhile")
    parser.add_argument(
        "--held", type=float, help=f"seconds that a condition lasts [{HELD_S[0]:g} to {HELD_S[1]:g}]"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="all bounds are so many times longer, beside other work on the machine [1]",
    )
    parser.add_argument("--drain", action="store_true", help="drain a drive in every round")
    parser.add_argument(
        "--results", type=Path, default=HERE.parent / "build" / "failure-soak", help="[build/failure-soak]"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help=f"of the pools [build; {PLACES[-1]} where that lies too deep for unix sockets]",
    )
    parser.add_argument(
        "--write", action="store_true", help="and put the table into bench/README.md and results/"
    )
    parser.add_argument(
        "--continue",
        type=Path,
        dest="earlier",
        metavar="JSON",
        help="failure-soak.json of an earlier run: go on after its last round, and count its rounds in the table",
    )
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    if options.load:
        load(options.load, options.seed)
        return 0
    if options.share is None:
        options.directory = place_of_pools(options.directory, options.pools)
    if missing := namespaces.missing() or real_etcd.missing():
        raise SystemExit(f"this cannot run here: {missing}")
    earlier = runs_in(options.earlier) if options.earlier and options.share is None else []
    if any(run["seed"] != options.seed for run in earlier):
        raise SystemExit(
            f"{options.earlier} has rounds of another seed; continue with --seed {earlier[0]['seed']}"
        )
    if earlier:
        options.first = 1 + max(one["round"] for run in earlier for one in run["each"])
        words = [*words, "--first", str(options.first)]  # of the processes with a pool each
    options.results.mkdir(parents=True, exist_ok=True)
    results: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "seed": options.seed,
        "pools": options.pools,
        "each": [],
    }
    worker, began, whole = options.share is not None, time.monotonic(), False
    options.share = options.share or 0
    with workspace(options.directory) as (directory, _):
        os.environ[MARK] = str(directory)
        found = (
            shared(words, options.pools, directory)
            if options.pools > 1 and not worker
            else rounds_of(options, directory)
        )
        with (
            contextlib.closing(found),
            open(os.devnull if worker else options.results / "failure-soak.jsonl", "w") as file,
        ):
            for row in found:
                if worker:
                    print(json.dumps(row), flush=True)
                else:
                    print(json.dumps(row), file=file, flush=True)
                    say(summary_of(row))
                results["each"].append(row)
                if row["missed"] and not options.keep_going:
                    break
            whole = True
    results["took_s"] = round(time.monotonic() - began)
    results["each"] = list(map(measured, results["each"]))
    runs = [*earlier, *([results] if results["each"] else [])]
    if not worker and runs:
        table = markdown(runs)
        print(table)
        for place in (options.results, *([HERE / "results"] if options.write else [])):
            (place / "failure-soak.md").write_text(table)
            (place / "failure-soak.json").write_text(json.dumps({"runs": runs}) + "\n")
        if options.write:
            put_into_readme("failure-soak", markdown(runs, brief=True))
    return 0 if whole and not any(row["missed"] for row in results["each"]) else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
