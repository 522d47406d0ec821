"""A metadata shard with a standby, real processes under a checking load on a real mount: the primary killed again and again,
stopped for longer than its lease, the standby killed, its drive full. No error at the application, nothing acknowledged is
lost."""

import json
import os
import random
import signal
import time

import pytest

from nvpool.logic.shards import process_name
from nvpool.testing.command import CommandPool, nvpool
from nvpool.testing.load import CheckingLoad, Pauses
from nvpool.testing.real_pool import end_process

pytestmark = [pytest.mark.mount, pytest.mark.skipif(not os.path.exists("/dev/fuse") or os.geteuid() != 0,
                                                    reason="a mount needs /dev/fuse and root")]
DEADLINE_S = 120.0


class Pool(CommandPool):
    @property
    def shard(self):
        return self.map.shards[0]

    def pid(self, member):
        state = self.directory.state_of(process_name(1, member))
        return state.pid if state is not None else 0

    def until(self, holds, what, wait_s=DEADLINE_S):
        end = time.monotonic() + wait_s
        while not holds():
            assert time.monotonic() < end, f"not within {wait_s} s: {what}\n{self.shard}\n{self.said()}"
            time.sleep(0.02)

    def until_up(self):
        self.until(lambda: all(standby.state == "up" for standby in self.shard.standbys), "the standby is up")

    def said(self):
        return "\n".join(f"-- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:])
                         for path in sorted(self.directory.log.glob("meta*.log")))


@pytest.fixture
def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("standby"))
    with made.up("--standbys", 1):
        made.until_up()
        yield made


def kill_primaries(pool, kills, seed):
    chance, pauses = random.Random(seed), []
    with CheckingLoad(pool.mountpoint, threads=3, seed=seed) as load:
        for kill in range(kills):
            directory = pool.mountpoint / f"kill-{kill}"
            directory.mkdir()
            with Pauses(directory) as pause:
                time.sleep(chance.uniform(0.1, 0.6))
                shard = pool.shard
                os.kill(pool.pid(shard.member), signal.SIGKILL)
                pool.until(lambda was=shard: pool.shard.term > was.term, "another member is the primary")
                pause.goes_on(2)
            pause.verify()
            pauses.append(pause.longest_s)
            if kill % 10 == 9 or kill == kills - 1:
                pool.until_up()
            else:
                pool.until(lambda: any(standby.state == "up" for standby in pool.shard.standbys), "the standby is up")
        load.goes_on()  # after the last kill, too
    load.verify()
    pool.check()
    print(f"{kills} primaries killed: pauses of {', '.join(f'{pause:.2f}' for pause in sorted(pauses)[-5:])} s at most, "
          f"{sum(pauses) / len(pauses):.2f} s on average")


def test_killing_the_primary_under_load_loses_nothing_and_nobody_sees_an_error(pool):
    kill_primaries(pool, kills=5, seed=1)
    assert pool.shard.term >= 7


@pytest.mark.soak
def test_killing_the_primary_hundreds_of_times_loses_nothing(pool):
    kill_primaries(pool, kills=200, seed=2)


def test_a_primary_that_was_stopped_for_longer_than_its_lease_does_not_speak_for_the_past(pool):
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
                pool.until(lambda stopped=stopped, was=was: pool.pid(was.member) not in (0, stopped), "it began again")
                pool.until_up()
            pause.verify()
            print(f"primary stopped: pause of {pause.longest_s:.2f} s")
        load.finish()
    load.verify()
    pool.check()


def test_a_standby_that_is_killed_or_stopped_holds_nobody_up_for_long_and_returns(pool):
    with CheckingLoad(pool.mountpoint, threads=3, seed=4) as load, Pauses(pool.mountpoint) as pause:
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            standby, term = pool.shard.standbys[0].member, pool.shard.term
            pid = pool.pid(standby)
            os.kill(pid, number)
            pause.goes_on(20)
            if number == signal.SIGSTOP:
                pool.until(lambda: pool.shard.standbys[0].state == "syncing", "it was taken out")
                os.kill(pid, signal.SIGCONT)
            else:
                pool.until(lambda pid=pid, standby=standby: pool.pid(standby) not in (0, pid), "it began again")
            pool.until_up()
            assert pool.shard.term == term
        load.finish()
    pause.verify()
    print(f"standby killed and stopped: pause of {pause.longest_s:.2f} s")
    end_process(pool.pid(pool.shard.member))  # what it has been given since is all there
    pool.until(lambda: pool.shard.term > term, "the standby is the primary")
    load.verify()
    pool.check()


def test_what_a_standby_needs_is_shown_by_status(pool):
    found = json.loads(nvpool("status", pool.path, "--json").stdout)
    members = {process["member"]: process["in_map"] for process in found["processes"] if process["role"] == "meta"}
    assert members == {0: "primary", 1: "up"} and found["problems"] == []
    standby = pool.pid(1)
    os.kill(standby, signal.SIGSTOP)
    try:
        (pool.mountpoint / "made").touch()
        found = json.loads(nvpool("status", pool.path, "--json").stdout)
        assert any("meta-1.1" in problem for problem in found["problems"]), found["problems"]
    finally:
        os.kill(standby, signal.SIGCONT)
