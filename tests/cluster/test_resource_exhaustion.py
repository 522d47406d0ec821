"""Exhausted resources: a full drive, file system or metadata map, and no file descriptors.

Operations that need space fail with ENOSPC, none is half done, unlink and truncate always work, and so does everything once
there is space.
"""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time

import pytest

from nvpool.core.units import MIB
from nvpool.testing.env.nvpool_command import NVPOOL, nvpool
from nvpool.testing.env.pool import PLAIN_TCP, RealPool, end_process
from nvpool.testing.loads.crash_history import content
from nvpool.testing.loads.data_verification import FillingLoad

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control"), reason="needs root and loop devices"
)

CONFIG = """
[journal]
checkpoint_interval_s = 0.2
map_bytes_max = "16MiB"
"""
PIECE = 4 * MIB


def fill(client, top, piece=PIECE):
    """Write files until there is no space left; the synced ones, and the one that was refused."""
    held = {}
    for number in range(10_000):
        path = f"{top}/{number}"
        try:
            with client.open(path, "wb", buffering=0) as file:
                file.write(content(number, piece))
                file.fsync()
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return held, path
        held[path] = number
    raise AssertionError("it never fills up")


def hold(client, held, piece=PIECE):
    for path, number in held.items():
        assert client.read_bytes(path) == content(number, piece), path


def space_again(pool, client, held, refused):
    """Unlink and truncate on the full pool; then there is space, and the pool is sound."""
    hold(client, held)
    paths = list(held)
    client.truncate(paths[0], 5)
    assert client.read_bytes(paths[0]) == content(held[paths[0]], PIECE)[:5]
    for path in [*paths[1 : len(paths) // 2], refused]:
        if client.exists(path):
            client.remove(path)
    kept = {path: held[path] for path in paths[len(paths) // 2 :]}

    def writable():
        try:
            client.write_bytes("/again", content(77, 2 * MIB))
            return True
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return False

    pool.until(writable, "there is room again")
    hold(client, kept)
    assert client.read_bytes("/again") == content(77, 2 * MIB) and pool.fsck() == []


@pytest.mark.smoke
def test_full_targets_refuse_and_recover(tmp_path):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start()
        client = pool.connect()
        client.mkdir("/d")
        held, refused = fill(client, "/d")
        assert sum(PIECE for _ in held) > 60 * MIB
        with client.open(next(iter(held)), "r+b", buffering=0) as file:
            file.write(content(0, 8192))  # overwrites use the space reserve
            file.fsync()
        space_again(pool, client, held, refused)


def test_drain_without_space_is_reported_until_cancelled(tmp_path):
    """Space is estimated with the pool's own replica count; the drain finds that directories with more replicas have none."""
    with RealPool(tmp_path / "pool", sizes=(200 * MIB, 100 * MIB, 100 * MIB)) as pool:
        pool.make()
        pool.start()
        client = pool.connect()
        client.mkdir("/twice")
        nvpool("dir", "set", f"{pool.path}:/twice", "--replicas", 2)
        files = [f"/twice/{number}" for number in range(30)]
        for number, path in enumerate(files):
            client.write_bytes(path, content(number, PIECE))
        assert nvpool("drive", "drain", pool.path, 3).returncode == 0, (
            "the estimate with one replica allows the drain"
        )

        def problems():
            return [one for one in pool.status()["problems"] if one.startswith("drive 2 has no space")]

        problem = pool.until(problems, "status names the full drive", 120)[0]
        assert "nvpool drive add" in problem and [
            one["drive"] for one in pool.status()["drives"] if one["lacks_room"]
        ] == [2]
        with subprocess.Popen(
            [NVPOOL, "drive", "drain", str(pool.path), "3", "--wait"], stderr=subprocess.PIPE
        ) as waiting:
            try:
                said = b""
                while b"drive 2 has no space" not in said:
                    assert (some := os.read(waiting.stderr.fileno(), 4096)), said
                    said += some
            finally:
                waiting.send_signal(signal.SIGINT)
        assert nvpool("drive", "drain", pool.path, 3, "--cancel").returncode == 0
        pool.until(lambda: not pool.status()["problems"], "all is well again", 120)
        for number, path in enumerate(files):
            assert client.read_bytes(path) == content(number, PIECE), path
        assert pool.fsck() == []


@contextlib.contextmanager
def loop_device(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    command = ["losetup", "--find", "--show", str(path)]
    device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


@needs_root
def test_full_block_device_refuses_and_recovers(tmp_path):
    with (
        loop_device(tmp_path / "image", 80 * MIB) as device,
        RealPool(tmp_path / "pool", sizes=(), drives=(device,)) as pool,
    ):
        pool.make()
        pool.start()
        client = pool.connect()
        client.mkdir("/d")
        held, refused = fill(client, "/d")
        end_process(pool.pid("target-1"))
        pool.wait()
        space_again(pool, client, held, refused)


@needs_root
@pytest.mark.mount
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse")
def test_mount_load_on_full_devices_sees_only_enospc(tmp_path):
    place = tmp_path / "mount"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        devices = tuple(
            stack.enter_context(loop_device(tmp_path / f"image-{number}", 80 * MIB)) for number in range(2)
        )
        pool = stack.enter_context(RealPool(tmp_path / "pool", sizes=(), drives=devices, replicas=2))
        pool.make()
        pool.start()
        nvpool("mount", pool.path, place)
        stack.callback(nvpool, "umount", place, check=False)
        with FillingLoad(place) as load:
            for _ in range(2):
                load.until_full()
                assert load.held > 20
                load.make_room()
            load.until_full()
            end_process(pool.pid("target-1"))
            pool.wait()
            load.until_full()
            load.make_room()
        load.verify()
        assert pool.fsck() == []


@contextlib.contextmanager
def file_system(tmp_path, size):
    """A small ext4 without a reserve for root."""
    place = tmp_path / "fs"
    place.mkdir()
    with loop_device(tmp_path / "image", size) as device:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", device], check=True)
        subprocess.run(["mount", device, place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=False)


def fill_completely(place):
    """Files that leave no free block, also after writeback: until then the file system reserves blocks for its tables."""
    deadline = time.monotonic() + 60
    free = 1
    while free:
        assert time.monotonic() < deadline, f"{free} blocks stay free"
        for number, size in enumerate((MIB, 4096, 1)):
            with open(place / f"eaten-{number}", "ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
        subprocess.run(["sync", "-f", place], check=True, timeout=60)
        free = os.statvfs(place).f_bavail


@needs_root
def test_full_file_system_below_the_pool_is_survived(tmp_path):
    with (
        file_system(tmp_path, 420 * MIB) as place,
        RealPool(place / "pool", shards=1) as pool,
    ):  # no space for more shards
        pool.make()
        pool.start()
        client = pool.connect(5.0)
        client.mkdir("/d")
        client.mkdir("/e")
        held = {}
        for number in range(4):
            held[f"/d/{number}"] = number
            with client.open(f"/d/{number}", "wb", buffering=0) as file:
                file.write(content(number, PIECE))
                file.fsync()
        fill_completely(place)
        filled, refused = fill(client, "/e", MIB)
        client.truncate("/d/3", 500_001)
        held.pop("/d/3")
        assert client.read_bytes("/d/3") == content(3, PIECE)[:500_001]
        pool.until(
            lambda: any("make room there" in problem for problem in pool.status()["problems"]),
            "status says so",
        )
        for path in filled:
            client.remove(path)
        for name in ("target-1", "target-2", "meta-1", "supervisor"):
            before = pool.pid(name)
            end_process(before)
            pool.until(
                lambda name=name, before=before: pool.serving() and pool.pid(name) != before,
                f"{name} is back",
            )
        hold(client, held)
        pool.stop()
        pool.start()  # a clean stop removed the state files, so the start must create them on the full drive
        client = pool.connect(30.0)
        hold(client, held)
        client.truncate("/d/0", 10)
        client.remove("/d/1")
        for number in range(3):
            (place / f"eaten-{number}").unlink()

        def writable():
            try:
                client.write_bytes("/again", content(9, PIECE))
                return True
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return False

        pool.until(writable, "there is room again")
        assert client.read_bytes("/again") == content(9, PIECE) and client.read_bytes("/d/2") == content(
            2, PIECE
        )
        pool.until(lambda: pool.fsck() == [], "fsck is clean")


def test_full_metadata_map_refuses_growth_and_allows_removal(tmp_path):
    value = bytes(60_000)
    with RealPool(tmp_path / "pool", config=CONFIG) as pool:
        pool.make()
        pool.start()
        client = pool.connect()
        client.mkdir("/d")
        client.write_bytes("/d/first", b"first")
        count = 0
        with pytest.raises(OSError) as refused:
            while True:
                client.write_bytes(f"/d/{count}", b"")
                client.setxattr(f"/d/{count}", "user.large", value)
                count += 1
        assert refused.value.errno == errno.ENOSPC and count > 50
        refusals = 0
        for number in range(2000):  # small records too, until nothing fits
            try:
                client.write_bytes(f"/d/small{number}", b"")
            except OSError as error:
                assert error.errno == errno.ENOSPC
                refusals += 1
                if refusals > 3:
                    break
        end_process(pool.pid("meta-1"))
        pool.wait()
        client = pool.connect()  # a client that connects now can remove too
        assert client.read_bytes("/d/first") == b"first"
        client.truncate("/d/first", 1)
        assert client.read_bytes("/d/first") == b"f"
        names = client.list("/d")
        for name in names[: len(names) // 2]:
            client.remove(f"/d/{name}")

        def writable():
            try:
                client.write_bytes("/again", b"again")
                return True
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return False

        pool.until(writable, "there is room again")
        assert client.getxattr(f"/d/{names[-1]}", "user.large") == value if names[-1].isdigit() else True
        assert pool.fsck() == []


def test_daemons_without_descriptors_keep_serving(tmp_path):
    with RealPool(tmp_path / "pool", config=PLAIN_TCP) as pool:
        pool.make()
        pool.start(prefix=("prlimit", "--nofile=130:130"))
        client = pool.connect(10.0)
        client.write_bytes("/before", content(1, PIECE))
        pids = {name: pool.pid(name) for name in ("supervisor", "meta-1", "target-1", "target-2")}
        daemons = (*pool.pool_map.shards, *pool.pool_map.targets, *pool.pool_map.nodes)
        ports = [
            int(endpoint.rpartition(":")[2])
            for daemon in daemons
            for endpoint in daemon.endpoints
            if endpoint.startswith("stream://")
        ]
        with contextlib.ExitStack() as crowd:
            for port in ports:
                for _ in range(140):
                    newcomer = crowd.enter_context(socket.socket())
                    newcomer.settimeout(2)
                    with contextlib.suppress(OSError):
                        newcomer.connect(("127.0.0.1", port))
            client.write_bytes("/during", content(2, PIECE))
            assert client.read_bytes("/before") == content(1, PIECE) and client.read_bytes(
                "/during"
            ) == content(2, PIECE)
            client.remove("/before")
        assert {name: pool.pid(name) for name in pids} == pids, pool.said()
        other = pool.connect(20.0)
        assert other.list("/") == ["during"]
        end_process(pids["target-1"], signal.SIGKILL)
        pool.wait()
        assert other.read_bytes("/during") == content(2, PIECE)
