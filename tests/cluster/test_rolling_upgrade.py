"""Rolling upgrade of a pool in use. Real processes.

Newer software is installed in place, the daemons of each node in turn are stopped in order and started, then the mount is
upgraded; applications on the mount see no error.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import nvpool
from nvpool.core.programs import Program, command
from nvpool.host.process_identity import identity_of
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.loads.mounted_nodes import LoadedPool, PoolInUse, until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse"),
]

NEWER = f"{nvpool.__version__}+newer"


class Installed:
    """A copy of the package from which all programs run, as an installation that is updated in place."""

    def __init__(self, place: Path) -> None:
        self.place = place
        shutil.copytree(
            Path(nvpool.__file__).parent,
            place / "nvpool",
            ignore=shutil.ignore_patterns("__pycache__", "*.c"),
        )

    def update(self) -> None:
        """Rewrite every file, with another version number."""
        beside = self.place / "newer"
        shutil.copytree(
            Path(nvpool.__file__).parent, beside, ignore=shutil.ignore_patterns("__pycache__", "*.c")
        )
        version = beside / "core" / "version.py"
        text = version.read_text()
        assert f'"{nvpool.__version__}"' in text
        version.write_text(text.replace(f'"{nvpool.__version__}"', f'"{NEWER}"'))
        os.rename(self.place / "nvpool", self.place / "older")
        os.rename(beside, self.place / "nvpool")
        shutil.rmtree(self.place / "older")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    made = Installed(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return made


def software(node):
    """The version of each process of this machine, by name."""
    found = {}
    for path in sorted(node.directory.run.glob("*.json")):
        state = json.loads(path.read_bytes())
        if state.get("software") and identity_of(state["pid"]) is not None:
            found[path.stem] = state["software"]
    return found


def doctor_of(node):
    """The doctor's findings on that machine, by the name of the check."""
    done = node.nvpool("doctor", "--pool", str(node.path), "--json", check=False)
    return {one["name"]: one for one in json.loads(done.stdout)}


def test_rolling_upgrade_is_not_noticed(installed):
    switch = Machines(4)
    with switch as hosts:
        pool = PoolInUse(switch, hosts)
        try:
            first, second, third, client = pool.nodes
            token = pool.found()
            pool.join(second, token)
            pool.join(third, first.json("node", "token", str(first.path)))
            pool.mount_client()
            pool.until_whole()
            found = doctor_of(first)
            assert [one for one in found.values() if one["state"] == "bad"] == []
            assert {
                found[name]["state"] for name in ("nodes", "map", "copies", "versions", "clocks", "ports")
            } == {"ok"}
            assert (
                found["versions"]["seen"] == f"nvpool {nvpool.__version__}"
                and found["clocks"]["seen"].count("node ") == 3
            )
            assert {*software(first).values(), *software(client).values()} == {f"nvpool {nvpool.__version__}"}
            with LoadedPool(pool, 1) as load:
                load.goes_on()
                installed.update()
                for node in pool.nodes[:3]:
                    began_s = time.monotonic()
                    os.kill(node.directory.supervisor().pid, signal.SIGTERM)  # as systemctl stop does
                    until(lambda node=node: not node.processes(), "the node's processes have ended", node)
                    load.goes_on()  # without that node
                    if node is third:
                        found = doctor_of(first)
                        assert found["nodes"]["state"] == "bad" and found["copies"]["state"] == "warn", found
                    node.serve()
                    node.until_all_serve()
                    pool.until_whole()
                    assert set(software(node).values()) == {f"nvpool {NEWER}"}, software(node)
                    if node is first:
                        assert doctor_of(second)["versions"]["state"] == "warn"
                    print(
                        f"{node.machine.name}: away and whole again within {time.monotonic() - began_s:.1f} s"
                    )
                    load.goes_on()
                done = client.json("mount", "upgrade", str(client.machine.place / "mount"))
                print(f"the mount: after a pause of {done['pause_ms']} ms")
                load.goes_on()
                assert software(client)[f"mount-{done['pid']}"] == f"nvpool {NEWER}"
            pool.check(moved=True)
        finally:
            pool.end()


def test_readers_wait_while_a_single_node_restarts(installed):
    """systemctl stop and start: everything ends in order, and a mount waits for the daemons."""
    switch = Machines(2)
    with switch as hosts:
        pool = PoolInUse(switch, [*hosts[:1], *hosts[:1], *hosts[:1], hosts[1]])
        try:
            first = pool.nodes[0]
            super(PoolInUse, pool).found()
            pool.mount_client()
            # by a process that has nothing open on the mount: a child of ours would close the inherited
            # files, which waits for the pool
            starts = f'while read place; do {shlex.join(command(Program.SUPERVISOR))} "$place" --log file </dev/null & done'
            starter = subprocess.Popen(
                first.machine.command("sh", "-c", starts), stdin=subprocess.PIPE, text=True
            )
            with LoadedPool(pool, 2) as load:
                load.goes_on()
                for _ in range(2):
                    supervisor = first.directory.supervisor().pid
                    os.kill(supervisor, signal.SIGTERM)
                    began_s = time.monotonic()
                    until(lambda: not first.processes(), "all has ended", first)
                    print(f"ended within {time.monotonic() - began_s:.1f} s")
                    said = (first.directory.log / "nvpoold.log").read_text()
                    assert "Traceback" not in said, said[-3000:]
                    time.sleep(2.0)  # the mount reaches no daemon
                    starter.stdin.write(f"{first.path}\n")
                    starter.stdin.flush()
                    first.until_all_serve()
                    print(f"serves again after {time.monotonic() - began_s:.1f} s")
                    load.goes_on()
            pool.check()
            starter.communicate("")
        finally:
            pool.end()


def test_programs_run_from_the_copy(installed):
    """Otherwise the tests above would upgrade nothing."""
    installed.update()
    done = subprocess.run(
        command(Program.CLI, "version", "--json"), capture_output=True, text=True, check=False, cwd="/"
    )
    assert NEWER in done.stdout, done.stdout + done.stderr
