"""Pools of several nodes, whose map three members of etcd keep: who becomes one, who is lost, who follows. Real processes."""

import time

import pytest
from test_nodes import Node, Pool

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.testing import machines, real_etcd
from nvpool.testing.machines import Machines

pytestmark = [pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or ""),
              pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or "")]


def until(holds, what: str, node: Node, wait_s: float = 90.0):
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while not (found := holds()):
        assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s} s: {what}: {node.map().etcd}\n{node.said()}"
        time.sleep(0.1)
    return found


def members(node: Node) -> set[int]:
    """Of etcd that vote, as this node knows it."""
    return {one.node for one in node.map().etcd if one.state == "up"}


def has_keys(node: Node) -> bool:
    return all((node.path / "secret" / below / "authority.key").exists() for below in (".", "etcd"))


def joined(pool: Pool, node: Node, by: Node) -> None:
    """`node` joins with a token that `by` gives."""
    pool.join(node, by.json("node", "token", str(by.path)))


def test_the_third_node_makes_three_members_and_the_first_may_be_gone():
    with Machines(4) as hosts:
        pool = Pool(hosts, plain=False)
        first, second, third, fourth = pool.nodes
        try:
            pool.join(second, pool.found())
            second.until_all_serve()
            assert members(second) == {1} and not has_keys(second)
            joined(pool, third, by=first)
            until(lambda: members(third) == {1, 2, 3} and has_keys(second) and has_keys(third), "three members", third)
            third.until_all_serve()
            first.kill_all()
            until(lambda: second.nvpool("node", "token", str(second.path), check=False).returncode == 0, "a change", second)
            joined(pool, fourth, by=third)
            until(lambda: 4 in second.map().node_by_id, "the fourth node", second)
            assert not has_keys(fourth)
        finally:
            for node in pool.nodes:
                node.kill_all()
