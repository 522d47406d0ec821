"""Pools of several nodes whose map is in an etcd of three members: joining, loss and replacement of members. Real processes."""

import shutil
import subprocess
import sys

import pytest

from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.etcd_members import has_keys, members, of_three, status_problems, token_of, until
from nvpool.testing.env.multi_node_pool import NodeMachine, Pool
from nvpool.testing.env.namespaces import Machines

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.timeout(1500),
]


def join_by_token(pool: Pool, node: NodeMachine, by: NodeMachine) -> None:
    """Join `node` with a token of `by`."""
    pool.join(node, by.json("node", "token", str(by.path)))


STAYS_CONNECTED = """
import sys, time
import grpc
from aetcd import rpc
from pathlib import Path
secret = Path(sys.argv[1]) / "secret" / "etcd"
shown = [(secret / name).read_bytes() for name in ("authority.crt", "member.key", "member.crt")]
channel = grpc.secure_channel(sys.argv[2], grpc.ssl_channel_credentials(*shown), (("grpc.max_reconnect_backoff_ms", 500),))
stub, seen_s, count = rpc.KVStub(channel), time.monotonic(), 0
while time.monotonic() < seen_s + float(sys.argv[3]):
    try:
        stub.Range(rpc.RangeRequest(key=b"nvpool/", serializable=True), timeout=2)
        seen_s, count = time.monotonic(), count + 1
        print("in", flush=True)
    except grpc.RpcError:
        pass
    time.sleep(0.1)
print("out", flush=True)
"""
"""Keeps one channel with the node's certificate open until etcd has not answered for the given time."""


def stays_connected(node: NodeMachine, member: str, wait_s: float) -> subprocess.Popen:
    return node.machine.popen(
        sys.executable,
        "-P",
        "-c",
        STAYS_CONNECTED,
        str(node.path),
        member,
        str(wait_s),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_removed_node_leaves_etcd_and_is_refused():
    with Machines(3) as hosts:
        pool = Pool(hosts, plain=False)
        first, second, third = pool.nodes
        asking = []
        try:
            of_three(pool)
            at_first = next(one.client for one in first.map().etcd if one.node == 1)
            asking = [
                stays_connected(node, at_first, wait_s) for node, wait_s in ((second, 90.0), (third, 20.0))
            ]
            assert [each.stdout.readline() for each in asking] == ["in\n", "in\n"]
            first.nvpool("node", "remove", str(first.path), "3")
            assert 3 not in first.map().node_by_id and 3 not in {one.node for one in first.map().etcd}
            until(lambda: all(one.revoked for one in first.map().etcd), "it is revoked", first)
            assert asking[1].communicate(timeout=100)[0].endswith("out\n"), (
                "the removed node is no longer connected"
            )
            again = stays_connected(third, at_first, 5.0).communicate(timeout=100)[0]
            assert again == "out\n", "the removed node is not admitted again"
            assert asking[0].poll() is None, "the other nodes stay connected"
            until(
                lambda: members(first) <= {1, 2} and len(first.map().etcd) == 1,
                "one member for two nodes",
                first,
            )
            until(lambda: token_of(first).returncode == 0, "a change", first)
        finally:
            for each in asking:
                each.kill()
                each.communicate()
            for node in pool.nodes:
                node.kill_all()


@pytest.mark.parametrize("plain", [False, True], ids=["secured", "plain text"])
def test_third_node_makes_three_members(plain):
    with Machines(4) as hosts:
        pool = Pool(hosts, plain=plain)
        first, second, third, fourth = pool.nodes
        try:
            pool.join(second, pool.found())
            second.until_all_serve()
            assert members(second) == {1}
            until(
                lambda: has_keys(second),
                "the second of two nodes has the keys to keep the map when the first is lost",
                second,
            )
            join_by_token(pool, third, by=first)
            until(
                lambda: members(third) == {1, 2, 3} and has_keys(second) and has_keys(third),
                "three members",
                third,
            )
            third.until_all_serve()
            first.kill_all()
            until(
                lambda: second.nvpool("node", "token", str(second.path), check=False).returncode == 0,
                "a change",
                second,
            )
            join_by_token(pool, fourth, by=third)
            until(lambda: 4 in second.map().node_by_id, "the fourth node", second)
            assert not has_keys(fourth)
        finally:
            for node in pool.nodes:
                node.kill_all()


def test_pool_without_a_majority_serves_and_can_recover():
    with Machines(3) as hosts:
        pool = Pool(hosts, plain=False)
        first, second, third = pool.nodes
        try:
            of_three(pool)
            mount = first.machine.place / "mount"
            mount.mkdir()
            first.nvpool("mount", str(first.path), str(mount))
            first.machine.run("sh", "-c", f"echo kept > {mount}/file && sync {mount}/file")
            for node in (second, third):
                node.kill_all()
            until(
                lambda: "most members of etcd do not answer" in status_problems(first),
                "the problem is reported",
                first,
            )
            assert token_of(first).returncode
            first.machine.run(
                "sh", "-c", f"cat {mount}/file && echo new > {mount}/later && sync {mount}/later"
            )

            # recovers by itself
            second.serve()
            until(lambda: token_of(first).returncode == 0, "a change", first)
            refused = first.nvpool("node", "recover-etcd", str(first.path), "--yes", check=False)
            assert refused.returncode == 1 and "nothing to recover" in refused.stderr

            # permanent loss
            second.kill_all()
            until(
                lambda: "most members of etcd do not answer" in status_problems(first),
                "the problem is reported",
                first,
            )
            refused = first.nvpool("node", "recover-etcd", str(first.path), check=False)
            assert refused.returncode == 1 and "--yes" in refused.stderr
            epoch = first.map().epoch
            first.nvpool("node", "recover-etcd", str(first.path), "--yes")
            until(lambda: token_of(first).returncode == 0, "a change", first)
            assert members(first) == {1} and first.map().epoch > epoch + 1000
            first.machine.run(
                "sh", "-c", f"cat {mount}/file {mount}/later && echo more > {mount}/more && sync {mount}/more"
            )

            # the lost nodes return with all their data: first as nodes, then as new members
            generations = {one.node: one.generation for one in second.map().etcd}
            for node in (second, third):
                node.serve()
            until(lambda: members(first) == {1, 2, 3} == members(third), "three members again", first)
            assert all(one.generation > generations[one.node] for one in first.map().etcd if one.node != 1)
            until(lambda: token_of(second).returncode == 0, "a change, by one that was lost", second)
            first.nvpool("umount", str(mount))
        finally:
            for node in pool.nodes:
                node.kill_all()


def test_lost_member_is_replaced_by_another_node():
    with Machines(4) as hosts:
        pool = Pool(hosts, plain=False)
        first, second, third, fourth = pool.nodes
        soon = first.machine.place / "soon.toml"
        soon.write_text("[supervisor]\nreplace_after_s = 20\n")
        try:
            address = pool.found("--config", str(soon))["address"].removeprefix("stream://")
            for node in (second, third, fourth):
                config = node.machine.place / "soon.toml"
                config.write_text(soon.read_text())
                token = first.json("node", "token", str(first.path))["token"]
                node.nvpool(
                    "node",
                    "join",
                    address,
                    "--dir",
                    str(node.path),
                    "--token",
                    token,
                    "--config",
                    str(config),
                    "--host",
                    node.machine.address,
                )
            until(lambda: members(first) == {1, 2, 3}, "three members", first)
            until(lambda: has_keys(third), "the third node lets others in", third)
            third.kill_all()
            until(
                lambda: members(first) == {1, 2, 4} and has_keys(fourth),
                "the fourth node follows the third",
                first,
            )
            third.serve()
            until(
                lambda: not has_keys(third) and not list(third.path.glob("etcd-*")),
                "the third one keeps nothing",
                third,
            )

            second.kill_all()
            (held,) = second.path.glob("etcd-*")
            shutil.rmtree(held)
            second.serve()
            until(
                lambda: (
                    len(members(first)) == 3
                    and all((one.node, one.generation) != (2, int(held.name[5:])) for one in first.map().etcd)
                ),
                "another member",
                first,
            )
            assert not held.exists()
            until(lambda: token_of(first).returncode == 0, "a change", first)
        finally:
            for node in pool.nodes:
                node.kill_all()


@pytest.mark.smoke
def test_second_node_continues_without_the_first():
    with Machines(2) as hosts:
        pool = Pool(hosts, plain=False, drives=2)
        first, second = pool.nodes
        path = str(second.path)
        try:
            pool.join(second, pool.found("--standbys", "1", "--replicas", "2"))
            until(lambda: has_keys(second), "the second node can admit others", second)

            def is_whole():
                seen = second.json("status", path)
                (shard,) = seen["shards"]
                return (
                    not seen["problems"]
                    and seen["chains"]["full"] == 1024
                    and not seen["chains"]["to_copy"]
                    and any(
                        one["node"] == 2 and one["state"] in ("up", "primary") for one in shard["members"]
                    )
                )

            until(is_whole, "all is on both nodes", second)
            mount = second.machine.place / "mount"
            mount.mkdir()
            second.nvpool("mount", path, str(mount))
            second.machine.run("sh", "-c", f"echo kept > {mount}/file && sync {mount}/file")
            refused = second.nvpool("node", "recover-etcd", path, "--yes", "--lost", "1", check=False)
            assert refused.returncode == 1 and "node 1 answers, so it is not lost" in refused.stderr

            first.kill_all()
            for words in ((), ("--lost", "2")):
                refused = second.nvpool("node", "recover-etcd", path, "--yes", *words, check=False)
                assert (
                    refused.returncode == 1
                    and "only cut off" in refused.stderr
                    and "a second pool" in refused.stderr
                )
            epoch = second.map().epoch
            done = second.nvpool("node", "recover-etcd", path, "--yes", "--lost", "1", check=False)
            assert done.returncode == 0, f"{done.stderr}\n{second.said()}"
            until(lambda: token_of(second).returncode == 0, "a change", second)
            assert members(second) == {2} and second.map().epoch > epoch + 1000
            until(
                lambda: (
                    second.machine.run(
                        "sh",
                        "-c",
                        f"cat {mount}/file && echo new > {mount}/later && sync {mount}/later",
                        check=False,
                    ).stdout
                    == "kept\n"
                ),
                "files are there",
                second,
            )

            # with all its data, the first node does not begin a second history: it finds that it no longer
            # keeps the map
            first.serve()
            until(
                lambda: members(first) == {2} and not list(first.path.glob("etcd/member")),
                "the first one follows",
                first,
            )
            until(lambda: second.nvpool("status", path, check=False).returncode == 0, "all is well", second)
            second.nvpool("umount", str(mount))
        finally:
            for node in pool.nodes:
                node.kill_all()
