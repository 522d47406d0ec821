"""Three nodes with two copies of everything, under a checking load on a real mount of a fourth machine: each node killed as a
whole, cut off, stopped, slowed down. No error at the application, bounded pauses, a clean check afterwards. Real processes."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.testing import machines, real_etcd
from nvpool.testing.load import CheckingLoad, Pauses
from nvpool.testing.machines import Machines
from nvpool.testing.real_nodes import Node, Pool
from nvpool.testing.real_pool import end_process

pytestmark = [pytest.mark.mount, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or ""),
              pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
              pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse")]
WAIT_S = 120.0
AWAY_S = 5.0
"""Longer than any lease."""


def until(holds, what, *nodes, wait_s=WAIT_S):
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while not (found := holds()):
        assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s} s: {what}\n" + "\n".join(
            f"== {node.machine.name}: {node.map().shards} {node.map().etcd}\n{node.said()}" for node in nodes)
        time.sleep(0.1)
    return found


class Three(Pool):
    """Nodes 1 to 3 and a client that has the pool mounted."""

    def __init__(self, hosts, switch):
        super().__init__(hosts, plain=False, drives=2)
        self.hosts = switch
        self.client_node = self.nodes[3]

    def begin(self):
        first, second, third, client = self.nodes
        self.join(second, self.found("--replicas", "2", "--standbys", "1"))
        self.join(third, first.json("node", "token", str(first.path)))
        self.until_whole()
        self.client(client)
        (client.machine.place / "mount").mkdir()
        client.nvpool("mount", str(client.path), str(client.machine.place / "mount"))

    @property
    def mount(self) -> Path:
        """As it is seen from here."""
        return Path(f"/proc/{self.client_node.machine.pid}/root{self.client_node.machine.place}/mount")

    def seen_by(self, node: Node) -> dict:
        done = node.nvpool("status", str(node.path), "--json", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def until_whole(self):
        """Every chain has its copies, the shard a standby on another node that has everything, etcd its three members."""
        def whole():
            seen = self.seen_by(self.nodes[0])
            if not seen or seen["problems"] or seen["chains"]["full"] != seen["chains"]["total"] or seen["chains"]["to_copy"]:
                return False
            found, = seen["shards"]
            where = {member["state"]: member["node"] for member in found["members"]}
            return (len(found["members"]) == 2 and set(where) == {"primary", "up"} and where["primary"] != where["up"]
                    and sum(node["etcd"] for node in seen["nodes"]) == 3 and any(node["leads"] for node in seen["nodes"]))
        until(whole, "all is whole", *self.nodes[:3])

    def lead_and_primary(self) -> tuple[Node, Node]:
        seen = self.seen_by(self.nodes[1]) or self.seen_by(self.nodes[0])
        leads = next(node["node"] for node in seen["nodes"] if node["leads"])
        return self.nodes[leads - 1], self.nodes[self.nodes[1].map().shards[0].node - 1]

    def check(self):
        found = self.client_node.nvpool("fsck", str(self.client_node.path), check=False)
        assert found.returncode == 0, found.stdout + found.stderr

    def end(self):
        self.client_node.nvpool("umount", str(self.client_node.machine.place / "mount"), check=False)
        for node in self.nodes:
            node.kill_all()


@pytest.fixture(scope="module")
def pool():
    switch = Machines(4)
    with switch as hosts:
        made = Three(hosts, switch)
        try:
            made.begin()
            yield made
        finally:
            made.end()


class Under:
    """A load and a look at its pauses; on the way out all that it knows is compared with what is there."""

    def __init__(self, pool: Three, seed: int):
        self.directory = pool.mount / f"run-{seed}"
        self.directory.mkdir()
        self.load = CheckingLoad(self.directory, threads=2, seed=seed, file_bytes_max=1 << 20)
        self.pause = Pauses(self.directory)

    def __enter__(self):
        self.load.__enter__()
        self.pause.__enter__()
        return self

    def goes_on(self):
        """Return when each of them has got further. The first that was waited for longest says what it met."""
        self.pause.goes_on(20, WAIT_S)
        self.load.goes_on(10, WAIT_S)

    def __exit__(self, *exc):
        self.pause.__exit__(*exc)
        self.load.finish()
        if exc[0] is None:
            self.pause.verify()
            self.load.verify()
            assert self.pause.longest_s < WAIT_S / 2
            print(f"{self.directory.name}: no file could be made for {self.pause.longest_s:.2f} s, no other step took longer "
                  f"than {self.load.longest_s:.2f} s ({self.load.longest})")


@pytest.mark.parametrize("number", [3, 2, 1])
def test_all_of_a_node_is_killed_and_comes_back(pool, number):
    node = pool.nodes[number - 1]
    leads, primary = pool.lead_and_primary()
    print(f"node {number}: leads {leads is node}, primary {primary is node}")
    with Under(pool, number) as load:
        load.goes_on()
        node.kill_all()
        load.goes_on()
        node.serve()
        load.goes_on()
    pool.until_whole()
    pool.check()


def test_a_node_is_cut_off_for_longer_than_its_leases(pool):
    node = pool.lead_and_primary()[1]
    number = pool.nodes.index(node) + 1
    with Under(pool, 20) as load:
        load.goes_on()
        pool.hosts.cut(number)
        try:
            load.goes_on()
            time.sleep(AWAY_S)  # what is tested is that it is away for so long
        finally:
            pool.hosts.cut(number, restore=True)
        load.goes_on()
    pool.until_whole()
    pool.check()


def test_all_of_a_node_stands_still_for_longer_than_its_leases(pool):
    node = pool.lead_and_primary()[1]
    with Under(pool, 30) as load:
        load.goes_on()
        stopped = node.processes()
        for pid in stopped:
            end_process(pid, signal.SIGSTOP)
        try:
            load.goes_on()
            time.sleep(AWAY_S)
        finally:
            for pid in stopped:
                end_process(pid, signal.SIGCONT)
        load.goes_on()
    pool.until_whole()
    pool.check()


def test_a_slow_link_slows_down_and_breaks_nothing(pool):
    node = pool.lead_and_primary()[1]
    slow = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "8mbit", "burst", "64kb", "latency", "400ms")
    with Under(pool, 40) as load:
        load.goes_on()
        node.machine.run(*slow)
        try:
            load.goes_on()
            time.sleep(AWAY_S)
        finally:
            node.machine.run("tc", "qdisc", "del", "dev", "eth0", "root")
        load.goes_on()
    pool.until_whole()
    pool.check()
