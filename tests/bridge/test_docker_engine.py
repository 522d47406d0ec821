"""Volumes in containers of a real Docker Engine: shared, isolated, limited, in use, and available while daemons are killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from nvpool.core.units import MIB
from nvpool.host.mountinfo import mounts_below
from nvpool.testing.env.bridge import HOLDING, RealBridge
from nvpool.testing.env.docker import RealDocker, why_no_docker
from nvpool.testing.env.pool import RealPool

WHY_NOT = why_no_docker() or ("" if os.path.exists("/dev/fuse") else "there is no /dev/fuse")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")

KILLS = 4
SETTLED_S = 3.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RealPool(tmp_path_factory.mktemp("docker") / "pool", sizes=(256 * MIB,)) as made:
        made.make()
        made.start()
        yield made


@pytest.fixture(scope="module")
def bridge(pool, tmp_path_factory):
    with RealBridge(pool.path, tmp_path_factory.mktemp("bridge"), settled_s=SETTLED_S) as made:
        yield made
        said = made.log.read_text().splitlines()
        assert not [line for line in said if " ERROR " in line and "which has to end first" not in line]


@pytest.fixture(scope="module")
def docker(bridge):
    with RealDocker() as made:
        yield made
    assert not mounts_below(made.place)


@pytest.fixture
def volume(docker, bridge, request):
    """A factory of volumes; leftover volumes and containers are removed at the end."""
    made = []

    def make(name, *options):
        words = [word for option in options for word in ("-o", option)]
        assert docker.run("volume", "create", "--driver", bridge.driver, *words, name).stdout == name
        made.append(name)
        return name

    yield make
    if found := docker.run("ps", "--all", "--quiet").stdout.split():
        docker.run("rm", "--force", *found)
    for name in made:
        done = docker.run("volume", "rm", "--force", name, check=False)
        # a known gap (docs/internals/bridge.md): opens that a killed mount process had not released
        assert not done.returncode or "are open: mount" in done.stderr, done.stderr


def attachments(pool, name):
    return pool.connect().volumes.show(name).attachments


def test_containers_share_a_volume_and_a_third_sees_nothing(docker, bridge, pool, volume):
    shared, other = volume("shared", "size=64M"), volume("other")
    first = docker.begin("echo of the first > /data/a; while true; do sleep 1; done", "-v", f"{shared}:/data")
    docker.until(
        lambda: docker.inside(first, "cat /data/a", check=False).returncode == 0, "the first one has written"
    )
    assert (
        docker.sh("cat /data/a; echo of the second > /data/b", "-v", f"{shared}:/data").stdout
        == "of the first"
    )
    assert docker.inside(first, "cat /data/b").stdout == "of the second"
    third = docker.sh("ls -a /data /data/..; cat /data/../data/a", "-v", f"{other}:/data", check=False)
    assert "No such file" in third.stderr and " b" not in third.stdout
    assert (
        docker.sh("ls /data/../..; readlink -f /data/../../volumes", "-v", f"{other}:/data").stdout.count(
            "shared"
        )
        == 0
    )
    volume_status = bridge.ask("/VolumeDriver.Get", Name=shared)[1]["Volume"]
    assert volume_status["Status"]["size"] == "64.0 MiB" and len(volume_status["Status"]["used by"]) == 1
    assert pool.connect().volumes.show(shared).attachments[0].startswith("test-host/docker/")


def test_quota_is_enforced_and_freed_inside_a_container(docker, volume):
    name = volume("small", "size=4M", "files=20")
    full = docker.sh("dd if=/dev/zero of=/data/big bs=65536 count=200", "-v", f"{name}:/data", check=False)
    assert full.returncode and "quota" in full.stderr.lower(), full
    again = docker.sh(
        "rm /data/big && dd if=/dev/zero of=/data/big bs=65536 count=40 && echo done", "-v", f"{name}:/data"
    )
    assert again.stdout.endswith("done")
    many = docker.sh(
        "i=0; while [ $i -lt 40 ]; do touch /data/$i || exit 1; i=$((i+1)); done",
        "-v",
        f"{name}:/data",
        check=False,
    )
    assert many.returncode and "quota" in many.stderr.lower(), many


@pytest.mark.smoke
def test_volume_in_use_here_or_elsewhere_is_not_removed(docker, bridge, pool, volume):
    name = volume("used")
    docker.begin("while true; do sleep 1; done", "-v", f"{name}:/data")
    refused = docker.run("volume", "rm", name, check=False)
    assert refused.returncode and "in use" in refused.stderr
    status, reply = bridge.ask("/VolumeDriver.Remove", Name=name)
    assert status == 409 and "stop the containers" in reply["Err"], (
        "another engine, which does not know the container, asks the bridge"
    )
    docker.run("rm", "--force", *docker.run("ps", "--quiet").stdout.split())
    assert attachments(pool, name) == ()
    pool.connect().volumes.attach(name, "another-host/docker/1")
    refused = docker.run("volume", "rm", name, check=False)
    assert refused.returncode and "another-host" in refused.stderr and "stop the containers" in refused.stderr
    pool.connect().volumes.detach(name, "another-host/docker/1")
    docker.run("volume", "rm", name)
    assert name not in docker.run("volume", "ls", "--quiet").stdout.split()


def test_sealed_volume_and_subpath_are_mounted(docker, pool, volume):
    name = volume("models")
    docker.sh("mkdir -p /data/a/b && echo weights > /data/a/b/w && sync", "-v", f"{name}:/data")
    pool.connect().volumes.seal(name)
    seen = docker.sh("cat /data/a/b/w; echo x > /data/new", "-v", f"{name}:/data", check=False)
    assert seen.stdout == "weights" and seen.returncode and "Read-only" in seen.stderr
    assert volume("empty", "sealed=true") and pool.connect().volumes.show("empty").sealed
    below = volume("below", "subpath=train/2024")
    assert docker.sh("echo 1 > /data/x; ls /data", "-v", f"{below}:/data").stdout == "x"
    assert pool.connect().read_bytes(f"/volumes/{below}/train/2024/x") == b"1\n"


@pytest.mark.parametrize("planted", ["/etc", "../../other", "..", "/proc/self/root/etc", "self"])
def test_symlink_in_a_volume_leads_nowhere_outside(docker, bridge, pool, volume, planted):
    victim, name = volume("victim"), volume("planted", "subpath=deep/er")
    docker.sh("echo secret > /data/s", "-v", f"{victim}:/data")
    whole = pool.connect()
    whole.symlink(planted, f"/volumes/{name}/deep")
    status, reply = bridge.ask("/VolumeDriver.Mount", Name=name, ID="x")
    assert status == 400 and "symbolic link" in reply["Err"], reply
    tried = docker.run(
        "run", "--rm", "--network=none", "-v", f"{name}:/data", "nvpool-test", "/bin/true", check=False
    )
    assert tried.returncode and "symbolic link" in tried.stderr
    assert attachments(pool, name) == () and not bridge.ask("/VolumeDriver.Path", Name=name)[1]["Mountpoint"]
    whole.remove(f"/volumes/{name}/deep")
    docker.sh("true", "-v", f"{name}:/data")


@pytest.mark.parametrize(
    "name",
    ["..", "../victim", "/etc", "a/b", "x" * 10_000, "n\u0303", "\u00f1", "-v"],
    ids=lambda name: ascii(name)[:12],
)
def test_unsafe_names_from_docker_are_refused(docker, bridge, pool, name):
    before = {volume.name for volume in pool.connect().volumes.list()}
    assert docker.run("volume", "create", "--driver", bridge.driver, "--name", name, check=False).returncode
    for verb in ("Create", "Mount", "Remove", "Get", "Path", "Unmount"):
        status, reply = bridge.ask(f"/VolumeDriver.{verb}", Name=name, ID="1")
        assert status == 400 and reply["Err"]
    assert {volume.name for volume in pool.connect().volumes.list()} == before


WORK = """
n=0; dd if=/dev/zero of=/data/block bs=65536 count=16 2>/dev/null
while [ ! -e /data/stop ]; do
    n=$((n + 1))
    echo $n > /data/number || echo FAILED write $n
    [ "$(cat /data/number)" = $n ] || echo FAILED read $n
    dd if=/data/block of=/dev/null bs=4096 2>/dev/null || echo FAILED block $n
    mv /data/number /data/moved || echo FAILED rename $n
done
echo rounds $n
"""


def test_containers_do_not_notice_kills_of_bridge_and_mount(docker, bridge, pool, volume):
    name = volume("busy", "size=64M")
    working = docker.begin(WORK, "-v", f"{name}:/data")
    beside = docker.begin(
        "while true; do ls /data > /dev/null || echo FAILED list; done", "-v", f"{name}:/data:ro"
    )
    docker.until(lambda: docker.inside(working, "ls /data/moved", check=False).returncode == 0, "it works")
    for number in range(KILLS):
        bridge.kill()
        bridge.kill_mount()
        time.sleep(0.3)
        bridge.start()
        if number == KILLS // 2:
            bridge.kill_mount(HOLDING)
        assert docker.sh("cat /data/moved > /dev/null && echo new", "-v", f"{name}:/data").stdout == "new"
        assert len(attachments(pool, name)) == 2, "both containers are known, and no other"
    refused = docker.run("volume", "rm", name, check=False)
    assert refused.returncode and "in use" in refused.stderr
    docker.sh("touch /data/stop", "-v", f"{name}:/data")
    docker.until(lambda: "rounds" in docker.run("logs", working).stdout, "it ends")
    said = docker.run("logs", working)
    assert "FAILED" not in said.stdout + said.stderr and int(said.stdout.split()[-1]) > KILLS, said
    assert not docker.run("logs", beside).stdout
    docker.run("rm", "--force", working, beside)
    assert attachments(pool, name) == ()
    assert not mounts_below(bridge.place / "state" / "mounts")


def test_docker_waits_for_a_starting_bridge(docker, bridge, volume):
    name = volume("waited")
    bridge.kill()
    starting = os.fork()
    if not starting:
        time.sleep(1.0)
        os._exit(0)
    os.waitpid(starting, 0)
    bridge.start()
    assert docker.sh("echo here", "-v", f"{name}:/data").stdout == "here"


def test_killed_engine_uses_its_volumes_again(docker, bridge, pool, volume):
    name = volume("engine")
    docker.begin("while true; do sleep 1; done", "-v", f"{name}:/data")
    held = attachments(pool, name)
    docker.kill()
    assert attachments(pool, name) == held
    docker.start()
    assert docker.sh("echo again > /data/a; cat /data/a", "-v", f"{name}:/data").stdout == "again"
    docker.run("rm", "--force", *docker.run("ps", "--all", "--quiet").stdout.split())
    time.sleep(SETTLED_S)  # the killed engine has not reported the end of the first container
    docker.run("volume", "rm", name)


def test_lost_reference_on_either_side_is_repaired(docker, bridge, pool, volume):
    name = volume("lost")
    running = docker.begin("while true; do sleep 1; done", "-v", f"{name}:/data")
    (held,) = attachments(pool, name)
    bridge.kill()
    (bridge.place / "state" / "references.json").unlink()  # all references of the bridge
    pool.connect().volumes.attach(name, "test-host/docker/nobody")  # an attachment without a container
    bridge.start()
    bridge.ask("/Plugin.Activate")
    bridge.until(lambda: "the reference was lost" in bridge.said(), "the bridge looks what is in use")
    status, reply = bridge.ask("/VolumeDriver.Remove", Name=name)
    assert status == 409 and "2 in all" in reply["Err"], (
        "a volume that a container sees is in use, whichever side lost the reference"
    )
    docker.run("rm", "--force", running)
    assert held not in attachments(pool, name)
    time.sleep(SETTLED_S)
    docker.run("volume", "rm", name)
    assert "no container uses volume lost" in bridge.said()


def test_bridge_with_anothers_state_is_refused(bridge):
    other = RealBridge(bridge.pool, bridge.place, driver=f"{bridge.driver}-b")
    with pytest.raises(AssertionError, match="in use by process"):
        other.start()
    assert bridge.ask("/VolumeDriver.Capabilities")[0] == 200


def test_sigterm_ends_the_bridge_and_keeps_the_mount(bridge, docker, volume):
    name = volume("left")
    running = docker.begin("while true; do cat /data/a; sleep 0.05; done", "-v", f"{name}:/data")
    process = bridge.process
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0 and not bridge.socket.exists()
    assert docker.inside(running, "echo x > /data/a && cat /data/a").stdout == "x"
    bridge.start()
