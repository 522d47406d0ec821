"""Pools of several nodes with a client's mount, and a checking load on it, for tests of node failures.

Used by tests; needs what `env/namespaces` needs, and /dev/fuse.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.testing.env.multi_node_pool import NodeMachine, Pool
from nvpool.testing.env.namespaces import Machine, Machines
from nvpool.testing.loads.data_verification import CheckingLoad, Pauses

WAIT_S = 120.0


def until(holds: Callable[[], Any], what: str, *nodes: NodeMachine, wait_s: float = WAIT_S) -> Any:
    """Return the value of `holds` once it is true. AssertionError, with the logs of `nodes`, after `wait_s`."""
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while not (found := holds()):
        assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s} s: {what}\n" + "\n".join(
            f"== {node.machine.name}: {node.map().shards} {node.map().etcd}\n{node.said()}" for node in nodes
        )
        time.sleep(0.1)
    return found


class PoolInUse(Pool):
    """Pool of three nodes, with two copies of everything and a client on a fourth machine."""

    def __init__(self, switch: Machines, hosts: list[Machine]):
        super().__init__(hosts, plain=False, drives=2)
        self.switch = switch
        self.client_node = self.nodes[3]

    def found(self, *words: str) -> dict:
        return super().found("--replicas", "2", "--standbys", "1", *words)

    def mount_client(self) -> None:
        client = self.client_node
        self.client(client)
        (client.machine.place / "mount").mkdir()
        client.nvpool("mount", str(client.path), str(client.machine.place / "mount"))

    @property
    def mount(self) -> Path:
        """Path of the mount as this process reaches it."""
        return Path(f"/proc/{self.client_node.machine.pid}/root{self.client_node.machine.place}/mount")

    def seen_by(self, node: NodeMachine) -> dict:
        """Return the status that the node reports; empty if it cannot."""
        done = node.nvpool("status", str(node.path), "--json", check=False)
        seen = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        return {} if "error" in seen else seen

    def until_copied(self, *nodes: NodeMachine) -> None:
        """Wait until every chain has its copies at their places."""

        def copied():
            seen = self.seen_by(nodes[0])
            chains = seen and seen["chains"]
            return (
                seen and chains["full"] == chains["total"] and not chains["to_copy"] and not chains["filling"]
            )

        until(copied, "all is copied", *nodes)

    def until_whole(self) -> None:
        """Wait until all chains, the shard and etcd are complete.

        Every chain has its copies, the shard an up-to-date standby on another node, and etcd its three
        members.
        """

        def whole():
            seen = self.seen_by(self.nodes[0])
            if (
                not seen
                or seen["problems"]
                or seen["chains"]["full"] != seen["chains"]["total"]
                or seen["chains"]["to_copy"]
            ):
                return False
            (found,) = seen["shards"]
            where = {member["state"]: member["node"] for member in found["members"]}
            return (
                len(found["members"]) == 2
                and set(where) == {"primary", "up"}
                and where["primary"] != where["up"]
                and sum(node["etcd"] for node in seen["nodes"]) == 3
                and any(node["leads"] for node in seen["nodes"])
            )

        until(whole, "all is whole", *self.nodes[:3])

    def lead_and_primary(self) -> tuple[NodeMachine, NodeMachine]:
        """Return the node that leads the pool and the node of the shard's primary."""

        def leader_number():
            seen = self.seen_by(self.nodes[1]) or self.seen_by(self.nodes[0])
            return next((node["node"] for node in seen.get("nodes", ()) if node["leads"]), 0)

        leads = until(leader_number, "it is known who leads", *self.nodes[:3])
        return self.nodes[leads - 1], self.nodes[self.nodes[1].map().shards[0].node - 1]

    def check(self, *, moved: bool = False) -> None:
        """Assert that fsck finds nothing.

        If chains have `moved`, chunks are permitted that stay for a while for readers with an older map.
        """
        serving = next(node for node in self.nodes[:3] if self.seen_by(node))
        found = json.loads(serving.nvpool("fsck", str(serving.path), "--json", check=False).stdout)
        problems = [one for one in found["problems"] if not (moved and one["kind"] == "misplaced")]
        assert not problems and found["records"], problems[:20]

    def end(self) -> None:
        self.client_node.nvpool("umount", str(self.client_node.machine.place / "mount"), check=False)
        for node in self.nodes:
            node.kill_all()


class LoadedPool:
    """A checking load with measured pauses; on exit it compares everything that it knows with the pool."""

    def __init__(self, pool: PoolInUse, seed: int):
        self.directory = pool.mount / f"run-{seed}"
        self.directory.mkdir()
        self.load = CheckingLoad(self.directory, threads=2, seed=seed, file_bytes_max=1 << 20)
        self.pause = Pauses(self.directory)

    def __enter__(self):
        self.load.__enter__()
        self.pause.__enter__()
        return self

    def goes_on(self):
        """Return when both loads have made progress.

        Pauses come first, so that their error is reported if both fail.
        """
        self.pause.goes_on(20, WAIT_S)
        self.load.goes_on(10, WAIT_S)

    def __exit__(self, *exc):
        self.pause.__exit__(*exc)
        self.load.finish()
        if exc[0] is None:
            self.pause.verify()
            self.load.verify()
            assert self.pause.longest_s < WAIT_S / 2
            print(
                f"{self.directory.name}: no file could be made for {self.pause.longest_s:.2f} s, no other step took longer "
                f"than {self.load.longest_s:.2f} s ({self.load.longest})"
            )
