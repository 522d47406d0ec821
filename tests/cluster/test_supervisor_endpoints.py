"""Daemons that reach their own node's supervisor over TCP, because its unix socket was missing when they started.

They are served as over the unix socket, also while another node leads, and return to it. Three nodes with TLS, real
processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from nvpool.host.process_identity import identity_of
from nvpool.poolmap.shards.members import process_name
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.pool import end_process
from nvpool.testing.loads.mounted_nodes import PoolInUse, until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse"),
]


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


@contextlib.contextmanager
def without_socket(node):
    (socket,) = node.directory.run.glob("node*.sock")
    away = Path(f"{socket}.away")
    socket.rename(away)
    try:
        yield
    finally:
        away.rename(socket)


def is_on_tcp(node, pid):
    """Whether that process of the node has a TCP connection to its own node's supervisor."""
    endpoints = node.directory.state_of("supervisor").endpoints
    ports = {endpoint.rpartition(":")[2] for endpoint in endpoints if "+unix" not in endpoint}
    lines = node.machine.run("ss", "-tnp").stdout.splitlines()
    ends = [[end.rpartition(":") for end in line.split()[3:5]] for line in lines if f"pid={pid}," in line]
    return any(there[2] in ports and here[0] == there[0] for here, there in ends)


def restart_on_tcp(pool, node, name):
    """Kill that process of the node, whose socket is missing, and wait for the next one; its pid."""
    old = node.directory.state_of(name).pid
    end_process(old, signal.SIGKILL)

    def serves():
        state = node.directory.state_of(name)
        return (
            state is not None
            and state.pid != old
            and state.state == "serving"
            and identity_of(state.pid) is not None
            and is_on_tcp(node, state.pid)
            and state.pid
        )

    return until(serves, f"{name} is on TCP", *pool.nodes[:3])


def move_leadership(pool, leads):
    """A killed supervisor may be back and lead before any other one; a stopped one may not."""
    pid = leads.directory.state_of("supervisor").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        others = [node for node in pool.nodes[:3] if node is not leads]
        until(
            lambda: any(
                node["leads"] and node["node"] != leads.directory.node
                for node in pool.seen_by(others[0]).get("nodes", ())
            ),
            "another node leads",
            *others,
        )
    finally:
        os.kill(pid, signal.SIGCONT)


def make(pool, name):
    """Create a file; the time that it took."""
    began = time.monotonic()
    (pool.mount / name).write_bytes(name.encode())
    return time.monotonic() - began


def test_primary_on_tcp_gets_leases_from_another_leader(pool):
    pool.until_whole()
    leads, _ = pool.lead_and_primary()
    shard = leads.map().shards[0]
    if pool.nodes[shard.standbys[0].node - 1] is leads:
        move_leadership(pool, leads)
        pool.until_whole()
        leads, _ = pool.lead_and_primary()
        shard = leads.map().shards[0]
    standby, primary = shard.standbys[0], pool.nodes[shard.node - 1]
    node, name = pool.nodes[standby.node - 1], process_name(shard.id, standby.member)
    assert node is not leads
    make(pool, "before")
    with without_socket(node):
        pid = restart_on_tcp(pool, node, name)
        until(
            lambda: leads.map().shards[0].standbys[0].state == "up",
            "the standby has everything",
            *pool.nodes[:3],
        )
        end_process(primary.directory.state_of(process_name(shard.id, shard.member)).pid, signal.SIGKILL)
        took_s = [make(pool, "first")]
        until(
            lambda: leads.map().shards[0].standbys[0].state == "up",
            "it has a standby of its own",
            *pool.nodes[:3],
        )
        took_s.append(make(pool, "second"))  # this change needs a new lease
        assert leads.map().shards[0].member == standby.member and is_on_tcp(node, pid)
        print(f"files were made within {took_s} s")
    until(lambda: not is_on_tcp(node, pid), "it uses the unix socket again", node)
    make(pool, "third")
    pool.until_whole()
    assert (pool.mount / "second").read_bytes() == b"second" and node.directory.state_of(name).pid == pid


def test_target_on_tcp_is_kept_alive_by_another_leader(pool):
    pool.until_whole()
    leads, _ = pool.lead_and_primary()
    node = next(node for node in pool.nodes[:3] if node is not leads)
    target = next(target.id for target in node.map().targets if target.node == node.directory.node)
    name = f"target-{target}"
    with without_socket(node):
        pid = restart_on_tcp(pool, node, name)
        pool.until_whole()
        assert pool.lead_and_primary()[0] is leads and is_on_tcp(node, pid)
    until(lambda: not is_on_tcp(node, pid), "the target uses the unix socket again", node)
    pool.until_whole()
    assert node.directory.state_of(name).pid == pid
