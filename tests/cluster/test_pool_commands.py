"""Life of a pool on the command line: created, found again, grown, destroyed; and refused arguments."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import nvpool as nvpool_sdk
from nvpool.cli.pool_connection import ask
from nvpool.client.state.options import ClientOptions
from nvpool.core.errors import AccessDenied
from nvpool.core.programs import Program, command
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import decode_map
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from tests.cluster.test_supervisor import (
    SIZES,
    all_serve,
    clean_up,
    kill,
    kill_all,
    nvpool,
    pids,
    processes_of,
    status,
)

ROOT = os.geteuid() == 0
MOUNTS = ROOT and os.path.exists("/dev/fuse")


@pytest.fixture
def own(tmp_path):
    yield tmp_path / "pool"
    clean_up(tmp_path / "pool")


def test_dev_up_is_idempotent_and_dev_down_leaves_nothing(own):
    nvpool("dev", "up", own, *SIZES)
    before = (pids(own), PoolDirectory(own).poolmap.read_bytes())
    done = nvpool("dev", "up", own, "--drives", "2", "--json")
    assert json.loads(done.stdout)["pool"]["name"] == "pool"
    assert (pids(own), PoolDirectory(own).poolmap.read_bytes()) == before
    sockets = PoolDirectory(own).socket_directory()
    nvpool("dev", "down", own)
    assert processes_of(own) == [] and not own.exists() and not sockets.exists()
    nvpool("dev", "down", own)


def test_restarted_pool_keeps_its_addresses(own):
    nvpool("dev", "up", own, *SIZES)
    first = decode_map(PoolDirectory(own).poolmap.read_bytes())
    kill_all(own)
    nvpool("dev", "up", own)
    all_serve(own)
    again = decode_map(PoolDirectory(own).poolmap.read_bytes())
    assert (again.nodes, again.targets, again.shards) == (first.nodes, first.targets, first.shards)
    for before, after in zip(first.tables[0].chains, again.tables[0].chains, strict=True):
        assert after.targets == before.targets and after.epoch > before.epoch, (
            "two contents never have the same version"
        )
    assert len(processes_of(own)) == 4


def test_volume_grant_needs_a_known_client_or_force(own, tmp_path):
    (tmp_path / "node.toml").write_text('[network]\nhost = "127.0.0.1"\n')
    nvpool("dev", "up", own, "--size", "128M", "--config", tmp_path / "node.toml")
    nvpool("volume", "create", own, "v")
    refused = nvpool("volume", "grant", own, "v", "nobody.0a1b2c3d", "ro", code=1)
    assert f"nvpool client ls {own}" in refused.stderr
    shown = json.loads(nvpool("volume", "show", own, "v", "--json").stdout)
    assert (shown["access"], shown["grants"]) == ("open", {}), "a misspelled name takes access from no client"
    for _ in range(2):
        done = nvpool("volume", "grant", own, "v", "nobody.0a1b2c3d", "ro", "--force", "--json")
        assert json.loads(done.stdout)["grants"] == {"client/nobody.0a1b2c3d": "ro"}
    token = json.loads(nvpool("client", "token", own, "--json").stdout)
    nvpool(
        "client",
        "join",
        token["address"].removeprefix("stream://"),
        tmp_path / "client",
        "--token",
        token["token"],
        "--name",
        "reader",
    )
    (member,) = json.loads(nvpool("client", "ls", own, "--json").stdout)
    done = nvpool("volume", "grant", own, "v", member.removeprefix("client/"), "rw", "--json")
    assert json.loads(done.stdout)["grants"][member] == "rw"
    done = nvpool("volume", "revoke", own, "v", "raeder.0a1b2c3d", "--json")
    assert (
        "client/raeder.0a1b2c3d has no right of its own to volume v; those with one: client/nobody.0a1b2c3d"
        in done.stderr
    )
    assert member in done.stderr and member in json.loads(done.stdout)["grants"]
    done = nvpool("volume", "revoke", own, "v", member, "--json")
    assert not done.stderr and member not in json.loads(done.stdout)["grants"]
    nvpool("dev", "down", own)


@pytest.mark.skipif(not ROOT, reason="only root has more rights than the client")
def test_client_is_bound_to_one_user(own, tmp_path):
    """Over TLS on loopback: over a unix socket root would be known as root."""
    (tmp_path / "node.toml").write_text('[network]\nhost = "127.0.0.1"\n')
    nvpool("dev", "up", own, "--size", "128M", "--config", tmp_path / "node.toml")
    with nvpool_sdk.connect(own) as pool:
        pool.mkdir("/tmp")
        pool.chmod("/tmp", 0o1777)
        pool.write_bytes("/tmp/secret", b"root's")
        pool.chmod("/tmp/secret", 0o600)
    assert "UID:GID" in nvpool("client", "token", own, "--uid", "0", code=2).stderr
    token = json.loads(nvpool("client", "token", own, "--uid", "1234:56", "--json").stdout)
    nvpool(
        "client",
        "join",
        token["address"].removeprefix("stream://"),
        tmp_path / "client",
        "--token",
        token["token"],
    )
    (member,) = json.loads(nvpool("client", "ls", own, "--json").stdout)
    assert member.endswith(".u1234-56")
    with nvpool_sdk.connect(tmp_path / "client", options=ClientOptions(transport="stream")) as pool:
        with pytest.raises(PermissionError):
            pool.read_bytes("/tmp/secret")
        with pytest.raises(PermissionError):
            pool.remove("/tmp/secret")
        pool.write_bytes("/tmp/mine", b"mine")
        assert pool.read_bytes("/tmp/mine") == b"mine"
        assert (pool.stat("/tmp/mine").st_uid, pool.stat("/tmp/mine").st_gid) == (1234, 56)


@pytest.mark.parametrize("name", ["a b%20c #1?x=ü", "x" * 100])
def test_pool_in_a_directory_with_an_unusual_name(tmp_path, name):
    own = tmp_path / name / "pool"
    try:
        nvpool("dev", "up", own, "--size", "128M")
        endpoints = decode_map(PoolDirectory(own).poolmap.read_bytes()).nodes[0].endpoints
        assert endpoints[0].startswith("stream+unix://")
        assert status(endpoints[0])["pool"]["directory"] == str(own)
        sockets = PoolDirectory(own).socket_directory()
    finally:
        clean_up(own)
    assert not own.exists() and not sockets.exists()


def test_interrupted_creation_continues_with_the_same_id(own):
    own.mkdir()
    (own / "FORMAT").write_text("nvpool pool being made\n")
    (own / "being-made").write_text("ab" * 16)
    (own / "targets" / "1").mkdir(parents=True)
    (own / "targets" / "1" / "half").write_text("x")
    assert nvpool("status", own, code=1).stderr.count("again")
    nvpool("dev", "up", own, *SIZES)
    assert status(own)["pool"]["id"] == "ab" * 16
    assert not (own / "being-made").exists()


def test_non_empty_directory_is_refused(own):
    own.mkdir()
    (own / "mine").write_text("precious")
    assert "not empty" in nvpool("dev", "up", own, code=1).stderr
    assert "not empty" in nvpool("pool", "create", own, "--drive", own, code=1).stderr
    assert [path.name for path in own.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--drive", "{tmp}/missing"], "is it mounted?"),
        (["--drive", "{tmp}/file"], "neither a directory nor a block device"),
        (["--drive", "{tmp}/a:1K"], "too little"),
        (["--drive", "{tmp}/a:9999T"], "whole file system"),
        (["--drive", "{tmp}/a:128M", "--drive", "{tmp}/a/../a:128M"], "named twice"),
        (["--drive", "{tmp}/a:128M", "--replicas", "2"], "replicas"),
        (["--drive", "{tmp}/a:128M", "--chunk-size", "3M"], "power of two"),
        (["--drive", "{tmp}/a:128M", "--name", "a b"], "not a name for a pool"),
    ],
)
def test_invalid_pool_is_refused_and_leaves_nothing(own, tmp_path, arguments, said):
    (tmp_path / "a").mkdir()
    (tmp_path / "file").write_text("x")
    words = [word.format(tmp=tmp_path) for word in arguments]
    assert said in nvpool("pool", "create", own, *words, code=1).stderr
    assert list((tmp_path / "a").iterdir()) == [] and not own.exists()
    nvpool("pool", "create", own, "--drive", f"{tmp_path}/a:128M")


def test_pool_on_its_own_drives_grows_and_is_destroyed(own, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "lost+found").mkdir()
    made = json.loads(
        nvpool(
            "pool",
            "create",
            own,
            "--drive",
            f"{tmp_path}/a:128M",
            "--drive",
            f"{tmp_path}/b:192M",
            "--name",
            "training",
            "--standbys",
            "1",
            "--host",
            "127.0.0.1",
            "--plain-text",
            "--json",
        ).stdout
    )
    assert [Path(drive["path"]).parent.name for drive in made["drives"]] == ["a", "b"]
    assert "holds a pool already" in nvpool("pool", "create", own, "--drive", f"{tmp_path}/c", code=1).stderr
    assert "pool destroy" in nvpool("dev", "down", own, code=1).stderr

    daemon = subprocess.Popen(command(Program.CLI, "serve", str(own)), stderr=subprocess.DEVNULL)
    all_serve(own)
    assert "drive 1 is in the pool already" in nvpool("drive", "add", own, f"{tmp_path}/a").stdout
    assert "does not exist" in nvpool("drive", "add", own, f"{tmp_path}/nowhere", code=None).stderr
    address = next(e for e in status(own)["processes"][0]["endpoints"] if e.startswith("stream://"))
    with pytest.raises(AccessDenied, match="unix socket"):
        asyncio.run(
            ask(
                address,
                wire_pb2.POOL_CHANGE,
                pool_pb2.PoolChangeRequest(verb="drive-add", arguments=b"{}"),
                pool_pb2.PoolChangeReply,
                wait_s=5,
            )
        )
    added = json.loads(nvpool("drive", "add", address, f"{tmp_path}/c", "--size", "128M", "--json").stdout)
    assert added["target"] == 3 and added["chains_to_come"] > 0
    assert len(all_serve(own)["drives"]) == 3
    nvpool("pool", "rebalance", own, "--wait")
    assert all(drive["in_use"] and not drive["chains_to_come"] for drive in status(own)["drives"])
    rows = nvpool("drive", "ls", own).stdout.splitlines()
    assert len(rows) == 4 and rows[0].split("\t")[0] == "DRIVE"

    assert "--yes" in nvpool("pool", "destroy", own, code=1).stderr  # prompts, without a terminal
    assert daemon.poll() is None
    nvpool("pool", "destroy", own, "--yes")
    assert daemon.wait(120) == 0 and processes_of(own) == [] and not own.exists()
    assert [path.name for name in ("a", "b", "c") for path in (tmp_path / name).iterdir()] == ["lost+found"]


@pytest.mark.skipif(not ROOT, reason="mounts need root")
def test_dev_down_removes_nothing_below_a_foreign_mount(own):
    nvpool("dev", "up", own, *SIZES)
    (own / "targets" / "mine").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", own / "targets" / "mine"], check=True, timeout=240)
    try:
        (own / "targets" / "mine" / "precious").write_text("x")
        for arguments in (("dev", "down", own), ("pool", "destroy", "--yes", own)):
            assert "Nothing was removed" in nvpool(*arguments, code=1).stderr
        assert (own / "targets" / "mine" / "precious").read_text() == "x"
        all_serve(own)
    finally:
        subprocess.run(["umount", own / "targets" / "mine"], check=True, timeout=240)
    nvpool("dev", "down", own)


def test_dev_down_follows_no_symlink(own, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    nvpool("dev", "up", own, "--size", "128M")
    (own / "link").symlink_to(tmp_path / "elsewhere")
    nvpool("dev", "down", own)
    assert not own.exists() and (tmp_path / "elsewhere" / "precious").read_text() == "x"


def kill_mount(own):
    """Kill holder and serving process together: each alone restarts the other one."""
    both = [process["pid"] for process in status(own)["processes"] if process["role"] in ("mount", "holder")]
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    for pid in both:
        kill(pid)


@pytest.mark.mount
@pytest.mark.skipif(not MOUNTS, reason="needs root and /dev/fuse")
def test_mount_is_created_found_and_removed(own, tmp_path):
    place, other = tmp_path / "mnt", tmp_path / "other"
    other.mkdir()
    nvpool("dev", "up", own, *SIZES, "--mount", place)
    nvpool("dev", "up", own, "--mount", place)
    (place / "file").write_text("kept")
    mounts = [process for process in status(own)["processes"] if process["role"] == "mount"]
    assert [process["mountpoint"] for process in mounts] == [str(place)]
    assert "mounted" in nvpool("mount", own, place, code=1).stderr
    assert "mounted" in nvpool("mount", "127.0.0.1:1", place, code=1).stderr, (
        "the mount point is not taken for a mount of that pool"
    )

    nvpool("mount", own, other)
    assert (other / "file").read_text() == "kept"
    assert "is mounted at" in nvpool("pool", "destroy", "--yes", own, code=1).stderr
    with open(other / "file"):
        assert "--lazy" in nvpool("umount", other, code=1).stderr
    nvpool("umount", other)
    nvpool("umount", other, code=1)
    assert not (other / "file").exists()

    kill_mount(own)
    assert "did not answer" in nvpool("umount", place).stderr
    nvpool("mount", own, place)
    kill_mount(own)
    assert "dead mount" in nvpool("dev", "up", own, "--mount", place).stderr
    assert (place / "file").read_text() == "kept"
    nvpool("dev", "down", own)
    assert not own.exists() and not os.path.ismount(place) and processes_of(own) == []


@pytest.mark.smoke
@pytest.mark.mount
@pytest.mark.skipif(not MOUNTS, reason="needs root and /dev/fuse")
def test_written_files_survive_kills_of_all_processes(own, tmp_path):
    place = tmp_path / "mnt"
    nvpool("dev", "up", own, *SIZES, "--mount", place)
    (place / "directory").mkdir()
    for number in range(20):
        (place / "directory" / f"file{number}").write_bytes(os.urandom(1000) * number * 10)
    contents = {path.name: path.read_bytes() for path in (place / "directory").iterdir()}
    for name, pid in pids(own).items():
        if not name.startswith("mount"):
            kill(pid)
    nvpool("dev", "up", own)
    assert {path.name: path.read_bytes() for path in (place / "directory").iterdir()} == contents
    nvpool("umount", place)


@pytest.mark.skipif(not ROOT, reason="loop devices need root")
def test_block_device_is_a_drive_and_is_erased_with_the_pool(own, tmp_path):
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    looped = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, timeout=240, check=False
    )
    if looped.returncode:
        pytest.skip(f"no loop device: {looped.stderr}")
    device = looped.stdout.strip()
    try:
        with open(device, "r+b") as file:
            file.seek(1024)
            file.write(b"as if a file system were here")
        assert (
            "--force" in nvpool("pool", "create", own, "--drive", device, code=1).stderr and not own.exists()
        )
        nvpool("pool", "create", own, "--drive", device, "--force")
        assert "already" in nvpool("pool", "create", tmp_path / "another", "--drive", device, code=1).stderr
        daemon = subprocess.Popen(command(Program.CLI, "serve", str(own)), stderr=subprocess.DEVNULL)
        store = next(process for process in all_serve(own)["processes"] if process["role"] == "store")
        assert store["path"] == device and store["kind"].startswith("block")
        assert store["capacity_bytes"] == 256 << 20
        nvpool("pool", "destroy", "--yes", own)
        assert daemon.wait(120) == 0
        with open(device, "rb") as file:
            assert file.read(65536) == bytes(65536)
        nvpool("pool", "create", own, "--drive", device)
    finally:
        nvpool("pool", "destroy", "--yes", own, code=None)
        subprocess.run(["losetup", "--detach", device], check=False, timeout=240)
