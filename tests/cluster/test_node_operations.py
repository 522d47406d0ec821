"""Operations on nodes and drives under a checking load on an existing mount, some of them interrupted. Real processes.

Nodes join, get racks, are drained and lost; drives are added and removed; interrupted operations continue. The application
sees no error.
"""

import os
import signal
import subprocess

import pytest

from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.multi_node_pool import CAPACITY, NVPOOL
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.pool import end_process
from nvpool.testing.loads.mounted_nodes import LoadedPool, PoolInUse, until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse"),
]


@pytest.fixture(scope="module")
def founded():
    """One node, and a client that has mounted."""
    switch = Machines(4)
    with switch as hosts:
        pool = PoolInUse(switch, hosts)
        try:
            pool.first_token = pool.found()
            pool.mount_client()
            yield pool
        finally:
            pool.end()


@pytest.fixture
def pool(founded):
    if len(founded.nodes[0].map().nodes) == 1:
        join_nodes(founded)
    return founded


def join_nodes(pool):
    first, second, third, _ = pool.nodes
    with LoadedPool(pool, 1) as load:
        load.goes_on()
        pool.join(second, pool.first_token)
        load.goes_on()
        pool.join(third, first.json("node", "token", str(first.path)))
        load.goes_on()
        pool.until_whole()
        load.goes_on()
    pool.check(moved=True)


def node_status(pool, number):
    """The status of a node, as reported by the first one."""
    return next((one for one in pool.seen_by(pool.nodes[0]).get("nodes", ()) if one["node"] == number), {})


def chains_of(pool, node):
    return sum(
        node in {now.target_by_id[target].node for target in chain.targets + chain.joining}
        for now in [pool.nodes[0].map()]
        for table in now.tables
        for chain in table.chains
    )


def interrupted(pool, *words, begun):
    """Start a command; once `begun` holds, kill the leader's supervisor and interrupt the command."""
    first = pool.nodes[0]
    command = first.machine.popen(
        *NVPOOL, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(begun, f"{words} is under way", first)
        end_process(pool.lead_and_primary()[0].directory.supervisor().pid)
        assert command.poll() is None, command.communicate()
        command.send_signal(signal.SIGINT)
        said = command.communicate(timeout=120)[0]
        assert command.returncode != 0 and "Traceback" not in said, said
    finally:
        command.kill()
        command.wait()


BALLAST_BYTES = 48 << 20
"""A seventh of it, and of its copies, moves with a drive: some 14 s at 1 MiB/s, time enough for an interruption."""


def limit_moves(pool):
    """Limit the rate of moves, until `unlimit_moves`."""
    pool.nodes[0].nvpool("pool", "rebalance", str(pool.nodes[0].path), "--limit", "1")


def unlimit_moves(pool):
    pool.nodes[0].nvpool("pool", "rebalance", str(pool.nodes[0].path), "--limit", "0")


def test_nodes_join_unnoticed_by_a_client(founded):
    if len(founded.nodes[0].map().nodes) == 1:
        join_nodes(founded)
    assert len(founded.nodes[0].map().etcd) == 3 and all(
        chains_of(founded, number) > 0 for number in (1, 2, 3)
    )


def test_copies_move_to_other_racks(pool):
    first, path = pool.nodes[0], str(pool.nodes[0].path)
    with LoadedPool(pool, 2) as load:
        load.goes_on()
        for number, rack in ((1, "left"), (2, "right"), (3, "right")):
            first.nvpool("node", "rack", path, str(number), rack, "--wait")
            load.goes_on()
        pool.until_copied(first)
        now = first.map()
        racks = [
            {now.node_by_id[now.target_by_id[target].node].rack for target in chain.targets}
            for chain in now.table_by_id[2].chains
        ]
        assert racks == [{"left", "right"}] * len(racks)
        for number in (1, 2, 3):
            first.nvpool("node", "rack", path, str(number), "", "--wait")
        load.goes_on()
    pool.until_whole()
    pool.check(moved=True)


def test_node_drain_survives_interruptions(pool):
    first, path = pool.nodes[0], str(pool.nodes[0].path)
    before = chains_of(pool, 3)
    with LoadedPool(pool, 3) as load:
        load.goes_on()
        limit_moves(pool)
        interrupted(pool, "node", "drain", path, "3", "--wait", begun=lambda: 0 < chains_of(pool, 3) < before)
        load.goes_on()
        first.nvpool("node", "drain", path, "3", "--cancel")
        until(
            lambda: node_status(pool, 3).get("desired_state") == "",
            "the node shall have its share again",
            first,
        )
        unlimit_moves(pool)
        load.goes_on()
        first.nvpool("node", "drain", path, "3", "--wait")
        one = node_status(pool, 3)
        assert (one["desired_state"], one["chains"], one["etcd"], one["primaries"], one["standbys"]) == (
            "drained",
            0,
            False,
            [],
            [],
        )
        assert chains_of(pool, 3) == 0
        load.goes_on()
        first.nvpool("node", "drain", path, "3", "--cancel", "--wait")
        pool.until_whole()
        load.goes_on()
    assert chains_of(pool, 3) > 0
    pool.check(moved=True)


def test_drive_changes_survive_interruptions(pool):
    first, path = pool.nodes[0], str(pool.nodes[0].path)
    new = first.machine.place / "new"
    new.mkdir()
    ballast = pool.mount / "ballast"
    ballast.write_bytes(os.urandom(BALLAST_BYTES))

    def drive():
        """The added drive."""
        return next((one for one in first.json("drive", "ls", path) if one["path"].startswith(str(new))), {})

    with LoadedPool(pool, 4) as load:
        load.goes_on()
        limit_moves(pool)
        interrupted(
            pool,
            "drive",
            "add",
            path,
            str(new),
            "--size",
            CAPACITY,
            "--wait",
            begun=lambda: (one := drive()) and one["chains"] and one["chains_to_come"],
        )
        load.goes_on()
        unlimit_moves(pool)
        first.nvpool("pool", "rebalance", path, "--wait")
        assert (full := drive())["chains"] and not full["chains_to_come"]
        load.goes_on()
        limit_moves(pool)
        interrupted(
            pool,
            "drive",
            "drain",
            path,
            str(full["drive"]),
            "--wait",
            begun=lambda: 0 < drive()["chains"] < full["chains"],
        )
        load.goes_on()
        unlimit_moves(pool)
        first.nvpool("drive", "drain", path, str(full["drive"]), "--wait")
        assert (drive()["chains"], drive()["desired_state"]) == (0, "drained")
        first.nvpool("drive", "remove", path, str(full["drive"]))
        load.goes_on()
    pool.until_whole()
    ballast.unlink()
    pool.check(moved=True)


def test_lost_node_is_rebuilt(pool):
    first, third = pool.nodes[0], pool.nodes[2]
    with LoadedPool(pool, 5) as load:
        load.goes_on()
        third.kill_all()
        first.nvpool("node", "remove", str(first.path), "3", "--lost", "--wait")
        again = first.nvpool("node", "remove", str(first.path), "3", "--lost", "--wait")
        assert "node 3 is not in the pool any more" in again.stdout
        load.goes_on()
        pool.until_copied(first)
        assert chains_of(pool, 3) == 0
        until(lambda: pool.seen_by(first) and not node_status(pool, 3), "the node is no longer listed", first)
        load.goes_on()
    pool.check(moved=True)
