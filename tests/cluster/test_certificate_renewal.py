"""Certificates of two minutes are renewed under service: of nodes, a mounting client, an SDK client and etcd members."""

import signal
import sys
import time
from pathlib import Path

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.security.ca import ends_s
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.etcd_members import members, of_three, token_of, until
from nvpool.testing.env.multi_node_pool import NodeMachine, Pool
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.pool import end_process

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.timeout(1500),
]

LIVES_S = 120


PROGRAM = """
import sys, time, nvpool
with nvpool.connect(sys.argv[1]) as pool:
    count = 0
    while not pool.exists("/end"):
        count += 1
        pool.write_bytes("/program", b"%d" % count)
        assert pool.read_bytes("/program") == b"%d" % count
        time.sleep(0.5)
"""


def certificates(node: NodeMachine) -> list[Path]:
    return [path for below in (".", "etcd") if (path := node.path / "secret" / below / "member.crt").exists()]


def test_pool_outlives_its_first_certificates(monkeypatch):
    monkeypatch.setenv("NVPOOL_CERTIFICATE_S", str(LIVES_S))
    with Machines(3) as hosts:
        pool = Pool(hosts, plain=False)
        first, second, third = pool.nodes
        client, user = NodeMachine(third.machine, "client"), NodeMachine(third.machine, "user")
        try:
            of_three(pool)
            pool.client(client)
            pool.client(user)
            program = third.machine.popen(sys.executable, "-P", "-c", PROGRAM, str(user.path))
            mount = third.machine.place / "mount"
            mount.mkdir()
            third.nvpool("mount", str(client.path), str(mount))
            began = {
                path: path.read_bytes() for node in (*pool.nodes, client, user) for path in certificates(node)
            }
            ended_s = max(ends_s(raw) for raw in began.values()) + 1
            count = 0
            while SYSTEM_CLOCK.wall_ns() / 1e9 < ended_s:
                count += 1
                third.machine.run(
                    "sh",
                    "-c",
                    f"echo {count} > {mount}/file && sync {mount}/file && grep -q {count} {mount}/file",
                )
                time.sleep(0.5)
            assert len(began) == 8 and program.poll() is None
            for path, raw in began.items():
                assert (
                    path.read_bytes() != raw and ends_s(path.read_bytes()) > SYSTEM_CLOCK.wall_ns() / 1e9
                ), path

            # existing connections continue, and new ones succeed: of a supervisor, a store, a member of
            # etcd
            end_process(first.directory.supervisor().pid)
            for node, name in ((first, "target-1"), (second, "etcd-2")):
                end_process(node.directory.state_of(name).pid, signal.SIGKILL)
            third.machine.run(
                "sh", "-c", f"echo again > {mount}/other && sync {mount}/other && grep -q again {mount}/other"
            )
            for node in pool.nodes:
                node.until_all_serve()
                assert members(node) == {1, 2, 3}
            until(lambda: token_of(second).returncode == 0, "a change", second)
            third.machine.run("touch", f"{mount}/end")
            assert program.wait(240) == 0
            third.nvpool("umount", str(mount))
        finally:
            for node in pool.nodes:
                node.kill_all()
