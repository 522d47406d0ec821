"""A volume grant is revoked on another host, or a client is removed from the pool: its open files are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest

from nvpool.testing.env.multi_node_pool import NodeMachine, Pool
from nvpool.testing.env.namespaces import Machines, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
WRITER = """
import sys, nvpool
with nvpool.connect(sys.argv[1]) as pool:
    pool.write_bytes("/volumes/v/f", bytes(5 << 20))
"""
READER = """
import random, sys, nvpool
pool = nvpool.connect(sys.argv[1])
file = pool.open("/volumes/v/f", "rb")
print("ready", flush=True)
for line in sys.stdin:
    said = []
    for do in (lambda: (file.seek(random.randrange(4 << 20)), file.read(100)), lambda: pool.stat("/volumes/v/f")):
        try:
            do()
            said.append("ok")
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
    print(" | ".join(said), flush=True)
"""


class Reader:
    """A client with a file open, on a host that is no node."""

    def __init__(self, pool: Pool, node: NodeMachine, name: str) -> None:
        self.node = NodeMachine(node.machine, name)
        pool.client(self.node)
        self.member = json.loads(self.node.directory.node_json.read_text())["member"]

    def open(self, stack: ExitStack) -> None:
        words = self.node.machine.command(sys.executable, "-c", READER, str(self.node.path))
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        assert self.process.stdout.readline() == "ready\n"

    def read_and_stat(self) -> list[str]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip().split(" | ")


@pytest.mark.smoke
def test_client_is_refused_its_open_files():
    with Machines(2) as hosts, ExitStack() as stack:
        pool = Pool(hosts, plain=False)
        first, second = pool.nodes
        stack.callback(first.kill_all)
        pool.found()
        where = str(first.path)
        one, other = Reader(pool, second, "one"), Reader(pool, second, "other")
        first.nvpool("volume", "create", where, "v")
        for reader in (one, other):
            first.nvpool("volume", "grant", where, "v", reader.member, "ro")
        first.machine.run(sys.executable, "-c", WRITER, where)
        for reader in (one, other):
            reader.open(stack)
            assert reader.read_and_stat() == ["ok", "ok"]
        assert not first.nvpool("volume", "revoke", where, "v", one.member).stderr
        for said in one.read_and_stat():
            assert said.startswith(
                f"PermissionError [Errno 13] the right of {one.member} to volume v was taken back"
            )
        assert other.read_and_stat() == ["ok", "ok"]
        first.nvpool("client", "remove", where, other.member)
        while (outcome := other.read_and_stat()) == ["ok", "ok"]:
            pass
        assert all(
            said.startswith("PermissionError") and f"{other.member} is not in the pool" in said
            for said in other.read_and_stat()
        ), outcome
