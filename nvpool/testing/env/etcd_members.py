"""Queries of tests about the members of the pool's own etcd, and pools with three members. Used by tests."""

from __future__ import annotations

import json
import stat
import time

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.testing.env.multi_node_pool import NodeMachine, Pool


def until(holds, what: str, node: NodeMachine, wait_s: float = 240.0):
    """Return the value of `holds` once it is true. AssertionError, with the logs of `node`, after `wait_s`."""
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while not (found := holds()):
        assert SYSTEM_CLOCK.boottime_s() < deadline_s, (
            f"not within {wait_s} s: {what}: {node.map().etcd}\n{node.said()}"
        )
        time.sleep(0.1)
    return found


def members(node: NodeMachine) -> set[int]:
    """Return the voting members of etcd, as this node knows them."""
    return {one.node for one in node.map().etcd if one.state == "up"}


def has_keys(node: NodeMachine) -> bool:
    """Whether the node can admit members: it has the keys of the pool's CAs.

    AssertionError: other users may read the keys.
    """
    keys = [node.path / "secret" / below / "authority.key" for below in (".", "etcd")]
    try:
        modes = [stat.S_IMODE(key.stat().st_mode) for key in keys]
    except FileNotFoundError:
        return False
    assert modes == [0o600, 0o600], f"{keys} may be read by others: {modes}"
    return True


def token_of(node: NodeMachine):
    """Make a join token on this node, which changes the map."""
    return node.nvpool("node", "token", str(node.path), check=False)


def status_problems(node: NodeMachine) -> str:
    """Return the problems in the status of the node."""
    done = node.nvpool("status", str(node.path), "--json", check=False)
    return "; ".join(json.loads(done.stdout).get("problems", ())) if done.stdout.startswith("{") else ""


def of_three(pool: Pool) -> None:
    """Let three nodes keep the map; the first one has the drive."""
    first, *others = pool.nodes[:3]
    address = pool.found()["address"].removeprefix("stream://")
    for node in others:
        token = first.json("node", "token", str(first.path))["token"]
        node.nvpool("node", "join", address, "--dir", str(node.path), "--token", token, *pool.plain)
    until(
        lambda: members(first) == {1, 2, 3} and all(has_keys(node) for node in pool.nodes[:3]),
        "three members",
        first,
    )
