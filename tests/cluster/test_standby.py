"""Metadata shards with a standby each: primaries killed repeatedly or stopped for longer than their lease, a standby killed.

Real processes under a checking load on a real mount. The application sees no error, no acknowledged change is lost.
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from nvpool.host.pool_directory import holder_of
from nvpool.poolmap.shards.members import node_and_path, process_name
from nvpool.sdk.filesystem import FileSystem
from nvpool.testing.env.nvpool_command import CommandPool, nvpool
from nvpool.testing.env.pool import end_process
from nvpool.testing.loads.data_verification import CheckingLoad, ClientLoad, Pauses

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]
SHARDS = 3
DIRECTORIES = 6
"""Directories of each load: spread over the shards by hash."""
DEADLINE_S = 120.0


class Pool(CommandPool):
    @property
    def shards(self):
        return self.map.shards

    @property
    def shard(self):
        """The only shard."""
        (shard,) = self.shards
        return shard

    def pid(self, member, shard=1):
        state = self.directory.state_of(process_name(shard, member))
        return state.pid if state is not None else 0

    def until(self, holds, what, wait_s=DEADLINE_S):
        end = time.monotonic() + wait_s
        while not holds():
            assert time.monotonic() < end, f"not within {wait_s} s: {what}\n{self.shards}\n{self.said()}"
            time.sleep(0.02)

    def until_up(self):
        self.until(
            lambda: all(standby.state == "up" for shard in self.shards for standby in shard.standbys),
            "the standbys are up",
        )

    def said(self):
        return "\n".join(
            f"-- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:])
            for path in sorted(self.directory.log.glob("meta*.log"))
        )


@contextmanager
def running(top, *words):
    made = Pool(top)
    with made.up("--standbys", 1, *words):
        made.until_up()
        yield made


@pytest.fixture
def pool(tmp_path_factory):
    with running(tmp_path_factory.mktemp("standby")) as made:
        yield made


@pytest.fixture
def pool_of_three_shards(tmp_path_factory):
    with running(tmp_path_factory.mktemp("standbys"), "--shards", SHARDS) as made:
        yield made


def kill_primaries(pool, kills, seed):
    """Of one shard or, each fifth time, of two together. Each kill waits until the shard has its standby again."""
    chance, pauses, killed = random.Random(seed), [], 0
    directories = [pool.mountpoint / f"pauses-{number}" for number in range(DIRECTORIES)]
    for directory in directories:
        directory.mkdir()
    with (
        CheckingLoad(pool.mountpoint, threads=2, seed=seed, directories=DIRECTORIES) as mounted,
        ClientLoad(lambda: FileSystem(pool.path), threads=1, names=2) as programs,
    ):
        while killed < kills:
            for load in (mounted, programs):
                load.goes_on(2)
            places = [directory / f"after-{killed}" for directory in directories]
            for place in places:
                place.mkdir()
            with contextlib.ExitStack() as stack:
                watching = [stack.enter_context(Pauses(place)) for place in places]
                lost = chance.sample(pool.shards, 2 if chance.random() < 0.2 else 1)
                time.sleep(chance.uniform(0.0, 0.3))
                for shard in lost:
                    os.kill(pool.pid(shard.member, shard.id), signal.SIGKILL)
                pool.until(
                    lambda lost=lost: all(pool.shards[was.id - 1].term > was.term for was in lost),
                    "other members are the primaries",
                )
                for one in watching:
                    one.goes_on(2)
            for one in watching:
                one.verify()
            pauses += [max(one.longest_s for one in watching)]
            killed += len(lost)
            if len(pauses) % 10 == 0:
                print(
                    f"{killed} killed: pauses of {median(pauses):.2f} s as a median, {max(pauses):.2f} s at most",
                    flush=True,
                )
            pool.until_up()
        for load in (mounted, programs):
            load.goes_on()  # after the last kill, too
    for load in (mounted, programs):
        load.verify()
    pool.check()
    longest = max(mounted, programs, key=lambda load: load.longest_s)
    print(
        f"{killed} primaries of {SHARDS} shards killed in {len(pauses)} turns under {mounted.operations} operations on a "
        f"mount and {programs.operations} of programs: pauses of {median(pauses):.2f} s as a median, {max(pauses):.2f} s at "
        f"most; no operation took longer than {longest.longest_s:.2f} s ({longest.longest})"
    )
    return killed


@pytest.mark.timeout(900)
def test_kills_of_primaries_lose_nothing(pool_of_three_shards):
    pool = pool_of_three_shards
    killed = kill_primaries(pool, kills=8, seed=1)
    assert sum(shard.term for shard in pool.shards) >= killed + SHARDS


@pytest.mark.soak
def test_hundreds_of_kills_of_primaries_lose_nothing(pool_of_three_shards):
    kill_primaries(pool_of_three_shards, kills=200, seed=2)


def test_stopped_primary_returns_without_stale_answers(pool):
    with CheckingLoad(pool.mountpoint, threads=3, seed=3) as load:
        for _ in range(2):
            was, directory = pool.shard, pool.mountpoint / f"stop-{pool.shard.term}"
            directory.mkdir()
            with Pauses(directory) as pause:
                stopped = pool.pid(was.member)
                os.kill(stopped, signal.SIGSTOP)
                try:
                    pool.until(lambda was=was: pool.shard.term > was.term, "another member is the primary")
                    pause.goes_on(20)
                finally:
                    os.kill(stopped, signal.SIGCONT)
                pool.until(
                    lambda stopped=stopped, was=was: pool.pid(was.member) not in (0, stopped),
                    "it began again",
                )
                pool.until_up()
            pause.verify()
            print(f"primary stopped: pause of {pause.longest_s:.2f} s")
        load.finish()
    load.verify()
    pool.check()


def test_failed_standby_causes_a_short_pause_and_returns(pool):
    with CheckingLoad(pool.mountpoint, threads=3, seed=4) as load, Pauses(pool.mountpoint) as pause:
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            standby, term = pool.shard.standbys[0].member, pool.shard.term
            pid = pool.pid(standby)
            os.kill(pid, number)
            pause.goes_on(20)
            if number == signal.SIGSTOP:
                pool.until(
                    lambda: pool.shard.standbys[0].state == "syncing",
                    "the standby was taken out of the shard",
                )
                os.kill(pid, signal.SIGCONT)
            else:
                pool.until(
                    lambda pid=pid, standby=standby: pool.pid(standby) not in (0, pid),
                    "the standby was restarted",
                )
            pool.until_up()
            assert pool.shard.term == term
        load.finish()
    pause.verify()
    print(f"standby killed and stopped: pause of {pause.longest_s:.2f} s")
    end_process(pool.pid(pool.shard.member))  # all changes that the member received since are there
    pool.until(lambda: pool.shard.term > term, "the standby is the primary")
    load.verify()
    pool.check()


@pytest.mark.smoke
def test_ending_primary_does_not_wait_for_locks(pool):
    """A waiting lock request would delay its end by supervisor.drain_s: it waits for a release, which is not accepted any
    more.
    """
    name, taken = pool.mountpoint / "locked", threading.Event()
    with open(name, "w") as holder, open(name) as waiter:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=lambda: (fcntl.flock(waiter, fcntl.LOCK_EX), taken.set()), daemon=True
        )
        waiting.start()
        time.sleep(1)
        was = pool.shard
        os.kill(pool.pid(was.member), signal.SIGTERM)
        pool.until(lambda: pool.shard.term > was.term, "another member is the primary", 7.0)
        assert not taken.is_set()
        fcntl.flock(holder, fcntl.LOCK_UN)
        assert taken.wait(DEADLINE_S)
        waiting.join()


def test_status_shows_a_standby_that_does_not_follow(pool):
    found = json.loads(nvpool("status", pool.path, "--json").stdout)
    members = {
        process["member"]: process["in_map"] for process in found["processes"] if process["role"] == "meta"
    }
    assert members == {0: "primary", 1: "up"} and found["problems"] == []
    standby = pool.pid(1)
    os.kill(standby, signal.SIGSTOP)
    try:
        (pool.mountpoint / "made").touch()
        done = nvpool("status", pool.path, "--json", check=False)
        found = json.loads(done.stdout)
        assert done.returncode == 3 == found["health"]["exit_code"]
        (problem,) = found["health"]["problems"]
        assert (problem["kind"], problem["shard"], problem["member"]) == (
            "shard-no-standby",
            1,
            1,
        ) and problem["remedy"]
        assert any("meta-1.1" in problem for problem in found["problems"]), found["problems"]
    finally:
        os.kill(standby, signal.SIGCONT)


def records_of(pool, member):
    path = node_and_path(pool.shard, member)[1]
    return Path(path) if path else pool.directory.shard(1)


def status_of(pool):
    """Exit code and what status says in fields."""
    done = nvpool("status", pool.path, "--json", check=False)
    return done.returncode, json.loads(done.stdout)["health"]["problems"]


def test_members_with_removed_records_are_refilled(pool):
    (pool.mountpoint / "kept").write_text("kept")
    assert status_of(pool) == (0, [])
    standby, primary = 1, 0
    for lost in (standby, primary):
        shutil.rmtree(records_of(pool, lost))
        os.kill(pool.pid(lost), signal.SIGKILL)
        pool.until(lambda lost=lost: pool.shard.member != lost, "the other member is the primary")
        (pool.mountpoint / f"made-without-{lost}").touch()
        code, problems = status_of(pool)
        if problems:  # else the member was already filled
            (problem,) = problems
            assert code == 3 and (problem["kind"], problem["shard"], problem["node"]) == (
                "shard-no-standby",
                1,
                1,
            )
            assert "nvpool shard standbys" in problem["remedy"] and problem["since_ms"]
        pool.until_up()
    pool.until(lambda: status_of(pool) == (0, []), "all is well")
    assert sorted(os.listdir(pool.mountpoint)) == ["kept", "made-without-0", "made-without-1"]
    assert (pool.mountpoint / "kept").read_text() == "kept"
    pool.check()


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "emptied"])
def test_standby_emptied_while_stopped_never_leads(pool, is_removed):
    (pool.mountpoint / "kept").write_text("kept")
    nvpool("umount", pool.mountpoint)
    supervisor = holder_of(pool.directory.lock).pid
    os.kill(supervisor, signal.SIGTERM)
    pool.until(lambda: holder_of(pool.directory.lock) is None, "the pool is stopped")
    (place,) = (records_of(pool, standby.member) for standby in pool.shard.standbys)
    shutil.rmtree(place)
    if not is_removed:
        place.mkdir()
    nvpool("dev", "up", pool.path, "--mount", pool.mountpoint)
    assert (pool.mountpoint / "kept").read_text() == "kept"
    pool.until_up()
    assert (pool.mountpoint / "kept").read_text() == "kept" and os.listdir(pool.mountpoint) == ["kept"]
    pool.check()


def test_status_names_a_missing_copy_and_its_remedy(pool):
    target = pool.directory.state_of("target-2").pid
    os.kill(target, signal.SIGSTOP)
    try:
        pool.until(
            lambda: {one["kind"] for one in status_of(pool)[1]} >= {"process-down"},
            "status reports the store",
        )
        done = nvpool("status", pool.path, check=False)
        problem = next(one for one in status_of(pool)[1] if one["kind"] == "process-down")
        assert done.returncode == 3 and "problem: target-2" in done.stderr and "remedy: " in done.stderr
        assert (problem["node"], problem["target"], problem["drive"]) == (1, 2, 2)
        assert f"kill -9 {target}" in problem["remedy"]
        os.kill(target, signal.SIGKILL)  # as the remedy says
        pool.until(lambda: status_of(pool) == (0, []), "the remedy works")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGCONT)
