"""Pools of several machines for tests and benchmarks on one host: real processes and etcd in namespaces.

`Pool` makes the pool on the first machine, lets others and clients join, and has a `NodeMachine` for each,
whose processes can be inspected, killed and started. Used by tests and benchmarks; needs what `missing` of
`namespaces` and `etcd` check.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import identity_of
from nvpool.poolmap.model import decode_map
from nvpool.testing.env.namespaces import Machine
from nvpool.testing.env.pool import end_process

NVPOOL = tuple(command(Program.CLI))
CAPACITY = "192M"
MIB = 1 << 20

SPREAD = """
import asyncio, sys
from msgspec.structs import replace
from nvpool.host.pool_directory import PoolDirectory
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.cluster.etcd.client import EtcdCertificates
from nvpool.cluster.chain_manager import change
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.model import changed
from nvpool.provision.map_location import read_map_location
from nvpool.runtime.daemon_lifecycle import read_map

async def main():
    directory = PoolDirectory(sys.argv[1])
    etcd = directory.secret / "etcd"
    certificates = EtcdCertificates(*((etcd / name).read_bytes() for name in ("authority.crt", "member.crt", "member.key")))
    pool_map = read_map(directory)
    coordinator = await EtcdCoordinator.open(read_map_location(directory).members, pool_map.pool_id,
                                             certificates=None if sys.argv[2] == "plain" else certificates)

    def spread(now):
        table = build_table(now.targets, 1)
        chains = tuple(replace(new, epoch=old.epoch + 1) for new, old in zip(table.chains, now.tables[0].chains))
        return changed(now, tables=(replace(table, chains=chains),))

    await change(coordinator, spread)
    await coordinator.close()

asyncio.run(main())
"""
"""Program that gives chains all targets, in a pool that holds nothing yet."""


class NodeMachine:
    """A machine with a pool directory."""

    def __init__(self, machine: Machine, name: str = "pool"):
        self.machine = machine
        self.path = machine.place / name
        self.directory = PoolDirectory(self.path)

    def nvpool(self, *words: str, check: bool = True):
        return self.machine.run(*NVPOOL, *words, check=check, timeout_s=240)

    def json(self, *words: str):
        """Return the JSON output of a command. `status` may exit with the code of a problem."""
        return json.loads(self.nvpool(*words, "--json", check=words[0] != "status").stdout)

    def drives(self, count: int = 1, capacity: str = CAPACITY) -> list[str]:
        """Return the arguments that add drives, for the command that makes the pool or joins the node."""
        words = []
        for place in (self.machine.place / f"drive-{number}" for number in range(count)):
            place.mkdir(exist_ok=True)
            words += ["--drive", f"{place}:{capacity}"]
        return words

    def serve(self, environment: dict[str, str] | None = None, **more) -> subprocess.Popen:
        return self.machine.popen(
            *command(Program.SUPERVISOR, str(self.path), "--log", "file"), env=environment, **more
        )

    def until_all_serve(self, wait_s: float = 240.0) -> dict:
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        while True:
            done = self.nvpool("status", str(self.path), "--json", check=False)
            if done.stdout.startswith("{") and "error" not in (seen := json.loads(done.stdout)):
                if not seen["problems"] and all(
                    one["state"] == "serving" for one in (*seen["processes"], *seen["nodes"])
                ):
                    return seen
            assert SYSTEM_CLOCK.boottime_s() < deadline_s, (
                f"not all serve: {done.stdout}{done.stderr}{self.said()}"
            )
            time.sleep(0.4)  # each look starts a program, which takes half a second of a processor

    def said(self) -> str:
        return "\n".join(
            f"-- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            for path in sorted(self.directory.log.glob("*.log"))
        )

    def processes(self) -> list[int]:
        """Return all processes of this machine's pool, with etcd and mounts."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path("/proc", entry, "cmdline").read_bytes()
                if os.fsencode(self.machine.place) + b"/" in words and identity_of(int(entry)) is not None:
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def kill_all(self) -> None:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.processes():
                end_process(pid, number)

    def map(self):
        return decode_map(self.directory.poolmap.read_bytes())


class Pool:
    """Pool on several machines. `nodes[0]` makes it; others join. Each node has `drives` of `capacity`."""

    def __init__(self, hosts: list[Machine], plain: bool, *, drives: int = 1, capacity: str = CAPACITY):
        self.nodes = [NodeMachine(machine) for machine in hosts]
        self.plain = ["--plain-text"] if plain else []
        self._drives, self._capacity = drives, capacity

    def found(self, *words: str) -> dict:
        """Make and serve the pool, with further arguments for the command. Return how others join."""
        first = self.nodes[0]
        if self.plain:
            config = first.machine.place / "node.toml"
            config.write_text("[network]\nplain_text = true\n")
            words += ("--config", str(config))
        made = first.json(
            "pool",
            "create",
            str(first.path),
            *first.drives(self._drives, self._capacity),
            "--host",
            first.machine.address,
            *words,
        )
        first.serve()
        first.until_all_serve()
        return made["join"]

    def join(self, node: NodeMachine, join: dict, check: bool = True):
        return node.nvpool(
            "node",
            "join",
            join["address"].removeprefix("stream://"),
            "--dir",
            str(node.path),
            "--token",
            join["token"],
            *node.drives(self._drives, self._capacity),
            *self.plain,
            check=check,
        )

    def client(self, node: NodeMachine) -> None:
        token = self.nodes[0].json("client", "token", str(self.nodes[0].path))
        node.nvpool(
            "client",
            "join",
            token["address"].removeprefix("stream://"),
            str(node.path),
            "--token",
            token["token"],
            *self.plain,
        )

    def spread(self) -> None:
        first = self.nodes[0]
        first.machine.run(
            sys.executable, "-P", "-c", SPREAD, str(first.path), "plain" if self.plain else "secured"
        )
