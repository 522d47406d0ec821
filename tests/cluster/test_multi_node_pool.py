"""Pools of several machines: joining, a file over two nodes, refused and killed machines. Real processes, real etcd."""

import hashlib
import json
import time
from pathlib import Path

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command_line, program_of
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.multi_node_pool import MIB, NodeMachine, Pool
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.pool import end_process

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
]


@pytest.fixture(params=["secured", "plain text"])
def pool(request):
    with Machines(3) as hosts:
        made = Pool(hosts, request.param == "plain text")
        try:
            yield made
        finally:
            for node in made.nodes:
                node.kill_all()


def _write(node: NodeMachine, mount: Path, name: str, megabytes: int) -> str:
    content = hashlib.shake_128(name.encode()).digest(MIB) * megabytes
    source = node.machine.place / "source"
    source.write_bytes(content)
    node.machine.run("sh", "-c", f"cp {source} {mount}/{name} && sync {mount}/{name}")
    return hashlib.sha256(content).hexdigest()


def _sum(node: NodeMachine, mount: Path, name: str) -> str:
    return node.machine.run("sha256sum", f"{mount}/{name}", timeout_s=240).stdout.split()[0]


def _in_use(pool):
    """Two nodes and a client with files on both; the mount, and name -> checksum of each file."""
    first, second, third = pool.nodes
    join = pool.found()
    assert first.map().etcd == () and not (first.path / "coordinator.json").exists()
    epoch = first.map().epoch
    pool.join(second, join)
    seen = second.until_all_serve()
    assert [node["drives"] for node in seen["nodes"]] == [1, 1]
    assert first.map().etcd and first.map().epoch > epoch
    first.until_all_serve()
    pool.spread()
    pool.client(third)
    mount = third.machine.place / "mount"
    mount.mkdir()
    third.nvpool("mount", str(third.path), str(mount))
    sums = {f"file-{number}": _write(third, mount, f"file-{number}", 8) for number in range(3)}
    used = {drive["drive"]: drive["used_bytes"] for drive in first.until_all_serve()["drives"]}
    assert set(used) == {1, 2} and min(used.values()) > 4 * MIB, used
    third.machine.run("sh", "-c", "echo 3 > /proc/sys/vm/drop_caches", check=False)
    assert {name: _sum(third, mount, name) for name in sums} == sums
    return mount, sums


@pytest.mark.few(1)
@pytest.mark.smoke
def test_two_nodes_store_the_files_of_a_client(pool):
    mount, _ = _in_use(pool)
    pool.nodes[2].nvpool("umount", str(mount))


def test_two_nodes_serve_a_client_on_a_third_machine(pool):
    mount, sums = _in_use(pool)
    first, second, third = pool.nodes

    # the second node's supervisor is killed: its child starts another one, and no serving process is
    # touched
    stores = [pid for pid in second.processes() if program_of(command_line(pid)) is Program.STORE]
    end_process(second.directory.supervisor().pid)
    assert {name: _sum(third, mount, name) for name in sums} == sums
    second.until_all_serve()
    assert [pid for pid in second.processes() if program_of(command_line(pid)) is Program.STORE] == stores

    # everything is killed and restarted, in any order; the mount waits
    for node in (first, second):
        node.kill_all()
    second.serve()
    first.serve()
    first.until_all_serve()
    second.until_all_serve()
    assert {name: _sum(third, mount, name) for name in sums} == sums
    sums["later"] = _write(third, mount, "later", 4)
    assert _sum(third, mount, "later") == sums["later"]
    third.nvpool("umount", str(mount))


def test_token_is_valid_once_briefly_and_for_its_pool(pool):
    first, second, third = pool.nodes
    join = pool.found()
    pool.join(second, join)
    assert "used already" in pool.join(third, join, check=False).stderr
    wrong = join | {"token": "nvp1." + "A" * 64}
    assert "another one" in pool.join(NodeMachine(third.machine), wrong, check=False).stderr
    assert "not a whole token" in pool.join(third, join | {"token": join["token"][:-3]}, check=False).stderr
    brief = first.json("node", "token", str(first.path), "--hours", "0.001")
    until_ms = brief["ends_ms"]
    while SYSTEM_CLOCK.wall_ns() // 1_000_000 <= until_ms:
        time.sleep(0.1)
    assert "has ended" in pool.join(third, brief, check=False).stderr
    client = first.json("client", "token", str(first.path))
    assert "lets in a client" in pool.join(third, client, check=False).stderr
    last = first.json("node", "token", str(first.path))
    refused = third.nvpool(
        "node",
        "join",
        last["address"].removeprefix("stream://"),
        "--dir",
        str(third.path),
        "--token",
        last["token"],
        "--drive",
        str(third.machine.place / "missing"),
        *pool.plain,
        check=False,
    )
    assert "is it mounted?" in refused.stderr
    assert len(first.map().nodes) == 2
    pool.join(third, last)
    assert "is in the pool already" in pool.join(third, last).stdout, "the repeated command continues"
    seen = third.until_all_serve()
    assert len(seen["nodes"]) == 3 and [drive["node"] for drive in seen["drives"]] == [1, 2, 3]
    assert "belongs to another pool" in pool.join(third, wrong, check=False).stderr


def test_peer_without_membership_learns_nothing():
    with Machines(3) as hosts:
        pool = Pool(hosts, plain=False)
        try:
            first, second, third = pool.nodes
            join = pool.found()
            address = join["address"].removeprefix("stream://")
            assert "without a certificate" in third.nvpool("status", address, check=False).stderr
            added = second.nvpool(
                "node", "join", address, "--dir", str(second.path), "--token", join["token"]
            )
            assert "as node 2" in added.stdout
            second.until_all_serve()
            second.kill_all()
            pool.client(third)
            pool.client(second_client := NodeMachine(second.machine, "client"))
            seen = third.nvpool("status", str(third.path), check=False)
            assert seen.returncode == 3 and "node 2" in seen.stderr and "does not answer" in seen.stderr
            served = third.nvpool("serve", str(third.path), check=False)
            assert served.returncode == 1 and "nvpool mount" in served.stderr
            first.nvpool("node", "remove", str(first.path), "2")
            assert second.nvpool("status", str(second_client.path)).returncode == 0
            token = first.json("node", "token", str(first.path))["token"]
            again = second.nvpool(
                "node", "join", address, "--dir", str(second.path), "--token", token, check=False
            )
            assert (
                again.returncode == 1
                and "was removed from this pool" in again.stderr
                and "pool destroy" in again.stderr
            )
            # its certificate is still valid, but the pool no longer has it as a member
            (second_client.path / "secret" / "member.crt").write_bytes(
                (second.path / "secret" / "member.crt").read_bytes()
            )
            (second_client.path / "secret" / "member.key").write_bytes(
                (second.path / "secret" / "member.key").read_bytes()
            )
            refused = second.nvpool("status", str(second_client.path), check=False)
            assert refused.returncode and "is not in the pool" in refused.stderr
            (client,) = [
                one
                for one in first.json("client", "ls", str(first.path))
                if one == json.loads(third.directory.node_json.read_text())["member"]
            ]
            first.nvpool("client", "remove", str(first.path), client)
            refused = third.nvpool("status", str(third.path), check=False)
            assert refused.returncode and "is not in the pool" in refused.stderr
            refused = first.nvpool(
                "client", "remove", str(first.path), first.map().nodes[0].member, check=False
            )
            assert refused.returncode and "is a node" in refused.stderr
            refused = first.nvpool("node", "remove", str(first.path), "1", check=False)
            assert (
                refused.returncode == 1
                and "nvpool node drain " in refused.stderr
                and "POOL" not in refused.stderr
            )
        finally:
            for node in pool.nodes:
                node.kill_all()
