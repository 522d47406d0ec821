"""Mount points: allowed places, and unmounting of live and dead mounts. Runs on the in-memory floor, without a pool."""

import os
import signal
import subprocess
import sys

import pytest

from nvpool.cli.mount import control as cli_mounts
from nvpool.core.errors import InUse, InvalidRequest, NotADirectory, NotFound
from nvpool.fuse.mount_point import check_mount_point, set_read_ahead, unmount
from nvpool.host.mountinfo import look_at, mount_at, place_of
from tests.fuse.conftest import Mounted, is_mounted

pytestmark = pytest.mark.mount


@pytest.fixture
def floor(tmp_path):
    made = Mounted(None, tmp_path / "m")
    yield made
    made.end(signal.SIGKILL)


def test_empty_directory_is_a_mount_point(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    assert check_mount_point(tmp_path / "m") == tmp_path / "m"
    assert check_mount_point(tmp_path / "link") == tmp_path / "m"


def test_invalid_mount_point_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(NotFound, match="mkdir -p"):
        check_mount_point(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectory, match="empty directory"):
        check_mount_point(tmp_path / "file")
    with pytest.raises(InUse, match="'file' is in it"):
        check_mount_point(tmp_path)


def test_mounted_place_is_refused_also_by_force(floor):
    for force in (False, True):
        with pytest.raises(InUse, match=f"nvpool umount {floor.place}"):
            check_mount_point(floor.place, force=force)
    assert look_at(floor.place) == "alive" and is_mounted(floor.place)


def test_foreign_mount_is_refused(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        with pytest.raises(InUse, match="tmpfs"):
            check_mount_point(tmp_path, force=True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_dead_mount_is_cleaned_by_force_only(floor):
    os.stat(floor.place)  # the kernel has fresh attributes of the mount point
    floor.process.kill()
    floor.process.wait()
    assert is_mounted(floor.place) and look_at(floor.place) == "dead"
    with pytest.raises(InUse, match="dead mount.*--force"):
        check_mount_point(floor.place)
    assert check_mount_point(floor.place, force=True) == floor.place
    assert not is_mounted(floor.place)


def test_hung_mount_is_recognized_without_waiting(floor, monkeypatch):
    monkeypatch.setattr("nvpool.host.mountinfo.LOOK_S", 0.3)
    floor.process.send_signal(signal.SIGSTOP)
    try:
        assert look_at(floor.place) == "hung"
        with pytest.raises(InUse, match="hung mount"):
            check_mount_point(floor.place)
        unmount(floor.place, lazy=True)
        assert not is_mounted(floor.place)
    finally:
        floor.process.send_signal(signal.SIGCONT)


def test_unmount_ends_calls_of_an_unserved_mount(floor, monkeypatch):
    """No daemon serves the floor; stopped, it stands for the remains of a killed one: a process that waits in the kernel
    with a descriptor of the mount, and cannot die.
    """
    monkeypatch.setattr("nvpool.host.mountinfo.LOOK_S", 0.3)
    floor.process.send_signal(signal.SIGSTOP)
    waiting = subprocess.Popen(["ls", floor.place], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert cli_mounts.unmount(str(floor.place))
        assert not is_mounted(floor.place)
        assert waiting.wait(5)
    finally:
        floor.process.send_signal(signal.SIGCONT)
        waiting.wait()


@pytest.mark.parametrize("seen_elsewhere", [False, True])
def test_calls_of_a_mount_served_elsewhere_are_not_ended(floor, tmp_path, monkeypatch, seen_elsewhere):
    """By a daemon in a container, whose processes are not visible from here; or at another place of this machine."""
    monkeypatch.setattr("nvpool.host.mountinfo.LOOK_S", 0.3)
    (copy := tmp_path / "copy").mkdir()
    if seen_elsewhere:
        subprocess.run(["mount", "--bind", floor.place, copy], check=True)
    else:
        monkeypatch.setattr(cli_mounts, "ALL_PROCESSES", "")
    floor.process.send_signal(signal.SIGSTOP)
    waiting = subprocess.Popen(["ls", floor.place], stdout=subprocess.DEVNULL)
    try:
        assert cli_mounts.unmount(str(floor.place))
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
    finally:
        floor.process.send_signal(signal.SIGCONT)
        assert waiting.wait() == 0
        if seen_elsewhere:
            subprocess.run(["umount", "--lazy", copy], check=True)


def test_mount_has_type_and_source(floor):
    found = mount_at(floor.place)
    assert (found.type, found.source) == ("fuse.nvpool", "nvpool:floor")
    assert mount_at(floor.place.parent) is None


def test_odd_names_are_found_in_the_mount_table(tmp_path):
    odd = tmp_path / "a b\tc\\d\ne"
    odd.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", odd], check=True)
    try:
        assert mount_at(odd).type == "tmpfs"
    finally:
        unmount(odd)
    assert mount_at(odd) is None


def test_busy_mount_is_unmounted_lazily_only(floor):
    with open(floor.place / "f", "w"):
        with pytest.raises(InUse, match="--lazy"):
            unmount(floor.place)
        unmount(floor.place, lazy=True)
        assert not is_mounted(floor.place)
    assert floor.process.wait(10) == 0  # the last user has gone, so the daemon ends


def test_unmounting_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="nothing is mounted"):
        unmount(tmp_path)


def test_daemon_ends_after_an_unmount(floor):
    subprocess.run(["umount", floor.place], check=True)
    assert floor.process.wait(10) == 0


def test_mount_is_found_through_symbolic_links(floor, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert place_of(tmp_path / "link" / "m") == floor.place


def test_read_ahead_of_the_kernel_is_set(floor):
    found = mount_at(floor.place)
    assert set_read_ahead(found, 1 << 20)
    with open(f"/sys/class/bdi/{found.device}/read_ahead_kb") as file:
        assert int(file.read()) == 1024


def test_killed_reader_does_not_block_the_others(floor):
    """Its requests vanish from the queue between epoll and read: the loop must not wait for the next one."""
    (floor.place / "f").write_bytes(os.urandom(1 << 20))
    program = """
import mmap, os, sys, threading
fd, page = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
def run():
    while True:
        os.preadv(fd, [page], 0)
[threading.Thread(target=run).start() for _ in range(8)]
print("reads", flush=True)
"""
    for _ in range(5):
        reader = subprocess.Popen([sys.executable, "-c", program, floor.place / "f"], stdout=subprocess.PIPE)
        assert reader.stdout.readline() == b"reads\n"
        reader.kill()
        reader.communicate()
        assert (floor.place / "f").stat().st_size == 1 << 20
    assert "Traceback" not in floor.log.read_text()
