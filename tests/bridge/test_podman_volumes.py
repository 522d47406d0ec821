"""Volumes in containers of a real Podman, which uses Docker's volume plugins: shared, limited, in use, and removed."""

from __future__ import annotations

import os

import pytest

from nvpool.core.units import MIB
from nvpool.host.mountinfo import mounts_below
from nvpool.testing.env.bridge import RealBridge
from nvpool.testing.env.podman import PROGRAMS, RealPodman, why_no_podman
from nvpool.testing.env.pool import RealPool

WHY_NOT = why_no_podman() or ("" if os.path.exists("/dev/fuse") else "there is no /dev/fuse")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RealPool(tmp_path_factory.mktemp("podman") / "pool", sizes=(256 * MIB,)) as made:
        made.make()
        made.start()
        yield made


@pytest.fixture(scope="module")
def bridge(pool, tmp_path_factory):
    with RealBridge(pool.path, tmp_path_factory.mktemp("bridge"), settled_s=3.0) as made:
        yield made
        assert not [line for line in made.log.read_text().splitlines() if " ERROR " in line]


@pytest.fixture(scope="module")
def podman(bridge):
    with RealPodman(bridge.driver, bridge.socket) as made:
        yield made
    assert not mounts_below(made.place) and not made.processes(PROGRAMS) and not made.place.exists()


@pytest.fixture
def volume(podman, bridge):
    made = []

    def make(name, *options):
        words = [word for option in options for word in ("--opt", option)]
        assert podman.run("volume", "create", "--driver", bridge.driver, *words, name).stdout == name
        made.append(name)
        return name

    yield make
    podman.run("rm", "--all", "--force", "--time=0")
    there = podman.run("volume", "ls", "--quiet").stdout.split()
    for name in made:
        if name in there:
            podman.run("volume", "rm", name)


def names(pool):
    return {one.name for one in pool.connect().volumes.list()}


def attachments(pool, name):
    return pool.connect().volumes.show(name).attachments


@pytest.mark.smoke
def test_containers_share_a_volume(podman, bridge, pool, volume):
    shared, other = volume("shared", "size=64M"), volume("other")
    assert {shared, other} <= names(pool)
    first = podman.begin("echo of the first > /data/a; while true; do sleep 1; done", "-v", f"{shared}:/data")
    podman.until(
        lambda: podman.inside(first, "cat /data/a", check=False).returncode == 0, "the first one has written"
    )
    assert (
        podman.sh("cat /data/a; echo of the second > /data/b", "-v", f"{shared}:/data").stdout
        == "of the first"
    )
    assert podman.inside(first, "cat /data/b").stdout == "of the second"
    assert pool.connect().read_bytes(f"/volumes/{shared}/b") == b"of the second\n"
    assert podman.sh("ls -A /data", "-v", f"{other}:/data").stdout == ""
    assert attachments(pool, shared) and attachments(pool, shared)[0].startswith("test-host/docker/")
    inspected = podman.run("volume", "inspect", "--format", "{{.Driver}} {{.Status.size}}", shared).stdout
    assert inspected == f"{bridge.driver} 64.0 MiB"


def test_quota_is_enforced_inside_a_container(podman, volume):
    name = volume("small", "size=4M")
    full = podman.sh("dd if=/dev/zero of=/data/big bs=65536 count=200", "-v", f"{name}:/data", check=False)
    assert full.returncode and "quota" in full.stderr.lower(), full


def test_volume_in_use_is_not_removed(podman, pool, volume):
    name = volume("used")
    running = podman.begin("echo here > /data/a; while true; do sleep 1; done", "-v", f"{name}:/data")
    refused = podman.run("volume", "rm", name, check=False)
    assert refused.returncode and "being used" in refused.stderr, refused
    assert name in names(pool) and podman.inside(running, "cat /data/a").stdout == "here"
    podman.run("rm", "--force", "--time=0", running)
    podman.run("volume", "rm", name)
    assert name not in names(pool)
    assert podman.run("volume", "ls", "--quiet", "--filter", f"name={name}").stdout == ""


def test_volume_used_by_another_host_is_not_removed(podman, pool, volume):
    name = volume("elsewhere")
    pool.connect().volumes.attach(name, "another-host/docker/1")
    refused = podman.run("volume", "rm", name, check=False)
    assert refused.returncode and "another-host" in refused.stderr, refused
    assert name in names(pool)
    pool.connect().volumes.detach(name, "another-host/docker/1")


def test_container_does_not_notice_kills_of_bridge_and_mount(podman, bridge, volume):
    name = volume("busy")
    working = podman.begin(
        "n=0; while [ ! -e /data/stop ]; do n=$((n + 1)); echo $n > /data/n || echo FAILED; "
        '[ "$(cat /data/n)" = $n ] || echo FAILED; done; echo rounds $n',
        "-v",
        f"{name}:/data",
    )
    podman.until(lambda: podman.inside(working, "cat /data/n", check=False).returncode == 0, "it works")
    bridge.kill()
    bridge.kill_mount()
    bridge.start()
    assert (
        podman.sh("cat /data/n > /dev/null && touch /data/stop && echo new", "-v", f"{name}:/data").stdout
        == "new"
    )
    podman.until(lambda: "rounds" in podman.run("logs", working).stdout, "it ends")
    assert "FAILED" not in podman.run("logs", working).stdout
