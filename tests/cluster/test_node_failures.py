"""Three nodes with two copies of everything, under a checking load on a real mount of a fourth machine.

Each node is killed as a whole, cut off, stopped and slowed down; etcd loses one member or its majority; bits flip on the
drives of a node. The application sees no error and bounded pauses, and a check afterwards is clean. Real processes.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.pool import end_process
from nvpool.testing.loads.data_verification import Pauses
from nvpool.testing.loads.mounted_nodes import LoadedPool, PoolInUse

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse"),
]
AWAY_S = 5.0
"""Longer than any lease."""


@pytest.fixture(scope="module")
def pool():
    switch = Machines(4)
    with switch as hosts:
        made = PoolInUse(switch, hosts)
        first, second, third, _ = made.nodes
        try:
            made.join(second, made.found())
            made.join(third, first.json("node", "token", str(first.path)))
            made.until_whole()
            made.mount_client()
            yield made
        finally:
            made.end()


@pytest.mark.parametrize("number", [3, 2, 1])
def test_killed_node_comes_back(pool, number):
    node = pool.nodes[number - 1]
    leads, primary = pool.lead_and_primary()
    print(f"node {number}: leads {leads is node}, primary {primary is node}")
    with LoadedPool(pool, number) as load:
        load.goes_on()
        node.kill_all()
        load.goes_on()
        node.serve()
        load.goes_on()
    pool.until_whole()
    pool.check()


def test_node_is_cut_off_for_longer_than_its_leases(pool):
    node = pool.lead_and_primary()[1]
    number = pool.nodes.index(node) + 1
    with LoadedPool(pool, 20) as load:
        load.goes_on()
        pool.switch.cut(number)
        try:
            load.goes_on()
            time.sleep(AWAY_S)  # the test needs the node away for so long
        finally:
            pool.switch.cut(number, restore=True)
        load.goes_on()
    pool.until_whole()
    pool.check()


def test_node_is_stopped_for_longer_than_its_leases(pool):
    node = pool.lead_and_primary()[1]
    with LoadedPool(pool, 30) as load:
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


@pytest.mark.smoke
def test_slow_link_breaks_nothing(pool):
    node = pool.lead_and_primary()[1]
    slow = (
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "8mbit",
        "burst",
        "64kb",
        "latency",
        "400ms",
    )
    with LoadedPool(pool, 40) as load:
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


@pytest.mark.parametrize("how_many", [1, 2], ids=["one", "majority"])
def test_etcd_members_are_stopped_for_longer_than_all_leases(pool, how_many):
    leads = pool.lead_and_primary()[0]
    nodes = sorted(pool.nodes[:3], key=lambda node: node is not leads)[:how_many]
    with LoadedPool(pool, 50 + how_many) as load:
        load.goes_on()
        stopped = [node.directory.state_of(f"etcd-{node.directory.node}").pid for node in nodes]
        for pid in stopped:
            end_process(pid, signal.SIGSTOP)
        try:
            if how_many == 1:
                load.goes_on()
            time.sleep(AWAY_S)  # well within the deadline of a call
        finally:
            for pid in stopped:
                end_process(pid, signal.SIGCONT)
        load.goes_on()
    pool.until_whole()
    pool.check()


def test_flipped_bits_on_a_node_reach_no_reader(pool):
    node, words = pool.nodes[1], ("scrub", "start", str(pool.nodes[1].path), "--wait")
    drives = list(node.machine.place.glob("drive-*/**/data"))
    with LoadedPool(pool, 60) as load, Pauses(load.directory, ("read",)) as reader:
        load.goes_on()
        reader.goes_on(100)
        turned = sum(flip_bits(drive) for drive in drives)
        assert turned > 100
        reader.goes_on(1000)  # past the kernel's page cache
        load.goes_on()
        done = node.json(*words)
        load.goes_on()
    reader.verify()
    assert sum(one["last_bad"] for one in done["scrub"]) > 0, "the load alone does not read all of it"
    again = node.json(*words)["scrub"]
    assert [one["last_bad"] for one in again] == [0] * len(again) and sum(
        one["last_blocks"] for one in again
    ) > 0
    pool.until_whole()
    pool.check()


def flip_bits(data: Path) -> int:
    """Flip one bit in every eighth written block; the number of blocks."""
    turned = at = 0
    with open(data, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at += 100
            byte = os.pread(file.fileno(), 1, at)
            if byte:
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
                turned += 1
            at += 8 * 4096 - 100
    return turned
