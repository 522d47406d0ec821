"""The commands of the tutorial about several nodes, run as printed there, on machines in network namespaces."""

import re
import subprocess

import pytest

from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.multi_node_pool import NodeMachine
from nvpool.testing.env.namespaces import Machines
from tests.tutorial_commands import commands, environment, placed

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
]

PRINTED_ADDRESS, PRINTED_PORT, PRINTED_TOKEN = "10.0.0.1", ":17512", "NVPOOL_TOKEN=nvp1.…"
JOIN = re.compile(r"(NVPOOL_TOKEN=\S+) nvpool \w+ join \S+(:\d+) ")


@pytest.fixture
def nodes():
    with Machines(3) as hosts:
        made = {
            host: NodeMachine(machine, "srv/nvpool")
            for host, machine in zip(("first", "second", "client"), hosts, strict=True)
        }
        for node in made.values():
            for name in ("srv", "home", "mnt/nvme0", "mnt/nvme1", "mnt/pool"):
                (node.machine.place / name).mkdir(parents=True)
        try:
            yield made
        finally:
            for node in made.values():
                node.kill_all()


def test_several_nodes_run_as_printed(nodes):
    first, client = nodes["first"], nodes["client"]
    token = port = ""
    for host, _, text in commands("several-nodes.md"):
        node = nodes[host]
        text = placed(text, node.machine.place).replace(PRINTED_ADDRESS, first.machine.address)
        text = text.replace(PRINTED_TOKEN, token).replace(PRINTED_PORT, port)
        if " node join " in text:
            text += f" --dir {node.path}"  # the page uses the default directory
        if " serve " in text:
            node.machine.popen(
                "bash",
                "-c",
                f"exec {text}",
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            node.until_all_serve()
            continue
        done = node.machine.run("bash", "-c", text, timeout_s=400, env=environment())
        if printed := JOIN.match(done.stdout):
            token, port = printed.groups()
    mount = client.machine.place / "mnt" / "pool"
    said = client.machine.run("sh", "-c", f"echo hello > {mount}/greeting && cat {mount}/greeting")
    assert said.stdout == "hello\n", "after the second node was removed"
    assert [node["node"] for node in first.json("node", "ls", str(first.path))] == [1]
    client.nvpool("umount", str(mount))
