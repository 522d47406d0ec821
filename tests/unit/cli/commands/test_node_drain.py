"""`nvpool node drain --stop` on the drained node itself: its daemons stop, and with them the source of its status."""

import asyncio
import json
import os

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nvpool.cli import pool_connection
from nvpool.cli.commands.node import node
from nvpool.core.errors import Unreachable
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import identity_of
from nvpool.poolmap.model import Drive, Node, Target, encode_map
from nvpool.testing.contracts.coordinator import first_map


def write(directory: PoolDirectory, requested: str, chains: bool) -> None:
    """Write the map of a pool whose second node is draining; `chains`: it still has chains."""
    first = first_map()
    now = replace(
        first,
        nodes=(*first.nodes, Node(2, "b", "h", ("stream://10.0.0.2:1",), desired_state=requested)),
        drives=(*first.drives, Drive(9, 2, "/mnt/b", 1 << 30)),
        targets=(*first.targets, Target(9, 9, 2, 1 << 30, (), desired_state="drain")),
    )
    if chains:
        table = now.tables[0]
        now = replace(
            now, tables=(replace(table, chains=(replace(table.chains[0], joining=(9,)), *table.chains[1:])),)
        )
    directory.poolmap.write_bytes(encode_map(now))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Pool directory of node 2, where no daemon replies."""
    one = PoolDirectory(tmp_path)
    one.format.write_text("nvpool pool 1\n")
    one.node_json.write_bytes(msgspec.json.encode({"node": 2, "member": "node/beta.2"}))

    async def status_of(pool, wait_s):
        await asyncio.sleep(wait_s)
        raise Unreachable("nobody")

    async def change(pool, verb, arguments):
        write(one, "stop", chains=False)
        return {
            "node": 2,
            "desired_state": "draining",
            "chains": 3,
            "primaries": [],
            "standbys": [],
            "etcd": False,
            "leads": False,
            "waits_for": [],
        }

    monkeypatch.setattr(pool_connection, "status_of", status_of)
    monkeypatch.setattr(pool_connection, "change", change)
    return one


def drained(directory, *words):
    return CliRunner().invoke(node, ["drain", str(directory.path), "2", *words])


def test_waiting_drain_is_done_when_the_daemons_stop(directory):
    write(directory, "share", chains=True)
    done = drained(directory, "--stop", "--wait", "--json")
    assert done.exit_code == 0, done.output
    assert (shown := json.loads(done.stdout))["desired_state"] == "drained" and shown["state"] == "stopped"


def test_repeated_drain_is_done_only_if_the_map_says_so(directory):
    write(directory, "stop", chains=False)
    assert "its processes have ended" in drained(directory, "--stop", "--wait").stdout
    for requested, chains in (("share", False), ("drain", False), ("stop", True)):
        write(directory, requested, chains)
        assert "3 chains to go" in drained(directory, "--stop").stdout
    write(directory, "stop", chains=False)
    me = identity_of(os.getpid())
    directory.lock.write_text(f"{me.pid} {me.start} {me.boot}\n")
    assert "3 chains to go" in drained(directory, "--stop").stdout, "the supervisor is running"
