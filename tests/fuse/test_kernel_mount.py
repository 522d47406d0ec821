"""Mounts with the direct engine: options, another user through fusermount3, killed callers, write-back."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from nvpool.core.errors import InvalidRequest
from nvpool.fuse.kernel.connection import KernelEngine
from nvpool.fuse.kernel.mount import attach
from nvpool.fuse.mount_point import MountOptions, mount_at
from nvpool.fuse.ops.operations import FuseOps, FuseOptions
from nvpool.fuse.pending_requests import DYING_LOOK_S
from nvpool.testing.fakes.vfs import MemoryVfs
from tests.fuse.conftest import NO_MOUNT, is_mounted, needs, wait_until


class CountingVfs(MemoryVfs):
    """Counts writes; a lookup of the name `hung` never ends, nor does a read after the first megabyte."""

    def __init__(self):
        super().__init__()
        self.writes = 0
        self.cancelled = 0
        self.flush_hangs = False

    async def write(self, handle, offset, buffer, append=None):
        self.writes += 1
        return await super().write(handle, offset, buffer, append)

    async def hang(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def lookup(self, parent, name):
        if name == b"hung":
            await self.hang()
        return await super().lookup(parent, name)

    async def flush(self, handle, owner=None):
        if self.flush_hangs:
            await self.hang()
        await super().flush(handle, owner)

    async def read(self, handle, offset, size):
        if offset >= 1 << 20:
            await self.hang()
        return await super().read(handle, offset, size)


class Served:
    """The engine over memory, served by a thread of this process."""

    def __init__(self, place, **options):
        self.place = place
        self.vfs = CountingVfs()
        self.engine = KernelEngine(
            FuseOps(self.vfs, FuseOptions(writeback=options.get("writeback", False))),
            place,
            MountOptions("p", **options),
        )
        self.mount = self.engine.mount()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.engine.serve()))
        self.thread.start()

    def close(self):
        subprocess.run(["umount", self.place], check=False, capture_output=True)
        self.thread.join(120)
        self.engine.close()
        assert not self.thread.is_alive() and not is_mounted(self.place)


@pytest.fixture
def served(tmp_path):
    if NO_MOUNT:
        pytest.skip(NO_MOUNT)
    made = []

    def serve(**options):
        place = tmp_path / f"m{len(made)}"
        place.mkdir()
        made.append(Served(place, **options))
        return made[-1]

    yield serve
    for one in made:
        one.close()


pytestmark = pytest.mark.mount


def test_mount_options_are_applied(served):
    found = served(extra=("noexec,dev", "suid"), max_read=65536)
    line = next(
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {found.place} " in line
    )
    options, _, behind = line.partition(" - ")
    assert "noexec" in options and "nosuid" not in options and "nodev" not in options
    assert behind.startswith(
        "fuse.nvpool nvpool:p rw,user_id=0,group_id=0,default_permissions,allow_other,max_read=65536"
    )
    plain = mount_at(served(read_only=True).place)
    assert plain.type == "fuse.nvpool" and plain.source == "nvpool:p"
    with pytest.raises(OSError):
        (plain.point / "x").touch()


def test_unknown_option_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="'bogus' is not an option"):
        attach(tmp_path, MountOptions("p", extra=("noexec,bogus",)))
    assert not is_mounted(tmp_path)


def test_kernel_settings_are_applied(served, tmp_path):
    made = served(max_background=77, congestion_threshold=44)
    made.place.stat()
    connections = tmp_path / "connections"
    connections.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "fusectl", "none", connections], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no fusectl here: {mounted.stderr.strip()}")
    try:
        control = connections / made.mount.device.partition(":")[2]
        assert (control / "max_background").read_text() == "77\n" and (
            control / "congestion_threshold"
        ).read_text() == "44\n"
    finally:
        subprocess.run(["umount", connections], check=True)


def test_caller_of_a_hung_request_can_be_killed(served):
    made = served()
    program = (
        "import os, signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nsys.stdout.write('.')\n"
        "sys.stdout.flush()\nos.stat(sys.argv[1])"
    )
    caller = subprocess.Popen([sys.executable, "-c", program, made.place / "hung"], stdout=subprocess.PIPE)
    caller.stdout.read(1)
    wait_until(lambda: made.engine.requests.work, "the request")
    caller.send_signal(signal.SIGUSR1)  # not fatal: the process keeps waiting, as for a local drive
    wait_until(lambda: made.engine.requests.interrupted, "the interrupt")
    assert caller.poll() is None and made.vfs.cancelled == 0
    caller.kill()
    assert caller.wait(120) == -signal.SIGKILL
    wait_until(lambda: made.vfs.cancelled == 1, "the end of the request")
    assert os.listdir(made.place) == []


def test_killed_writer_stores_its_data_within_a_limit(served, monkeypatch):
    """The exiting process has already taken the signal: it is pending for its process only, no longer for its thread."""
    monkeypatch.setattr("nvpool.fuse.pending_requests.EXIT_S", 120)
    made = served()
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfile = open(sys.argv[1], 'wb', buffering=0)\n"
            "file.write(b'x')\nsys.stdout.write('.')\nsys.stdout.flush()\ntime.sleep(120)",
            made.place / "f",
        ],
        stdout=subprocess.PIPE,
    )
    writer.stdout.read(1)
    made.vfs.flush_hangs = True
    writer.kill()
    wait_until(lambda: made.engine.requests.interrupted, "the interrupt of the flush")
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(2 * DYING_LOOK_S)
    monkeypatch.setattr("nvpool.fuse.pending_requests.EXIT_S", 0.1)
    assert writer.wait(120) == -signal.SIGKILL
    assert made.vfs.cancelled == 1


def test_unmounted_engine_waits_for_no_reads(served):
    made = served()
    with open(made.place / "f", "wb") as file:
        file.truncate(2 << 20)
    reader = subprocess.Popen(
        ["dd", f"if={made.place / 'f'}", "of=/dev/null", "bs=4k", "skip=300", "count=1"],
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: made.engine.requests.work, "the request")
    subprocess.run(["umount", "-l", made.place], check=True)
    reader.kill()  # the last process that uses the mount
    reader.wait(120)
    made.thread.join(120)
    assert not made.thread.is_alive()


def test_writeback_gathers_small_writes_until_close(served):
    through, back = served(), served(writeback=True)
    for made in (through, back):
        with open(made.place / "f", "wb", buffering=0) as file:
            for number in range(256):
                file.write(bytes([number]) * 100)
        assert (made.place / "f").read_bytes() == b"".join(bytes([number]) * 100 for number in range(256))
        assert made.place.joinpath("f").stat().st_size == 25_600
    assert through.vfs.writes >= 256 and back.vfs.writes <= 8
    with open(back.place / "f", "r+b", buffering=0) as file:  # a partly written page is read first
        file.seek(5000)
        file.write(b"middle")
    fd = os.open(back.place / "f", os.O_WRONLY)
    os.pwrite(fd, b"end", 25_000)
    os.close(fd)
    content = bytearray(b"".join(bytes([number]) * 100 for number in range(256)))
    content[5000:5006], content[25_000:25_003] = b"middle", b"end"
    assert (back.place / "f").read_bytes() == content
    node = next(node for node in back.vfs.nodes.values() if node.content)
    assert bytes(node.content) == content


@needs("fusermount3", "unshare")
def test_another_user_mounts_through_fusermount3():
    if NO_MOUNT:
        pytest.skip(NO_MOUNT)
    place = Path(tempfile.mkdtemp(prefix="nvpool-user-"))
    place.chmod(0o755)
    try:
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                sys.executable,
                Path(__file__).with_name("unprivileged_mount.py"),
                place,
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if "unshare failed" in done.stderr or "mount:" in done.stderr:
            pytest.skip(f"a mount namespace cannot be created here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["type"], said["source"], said["left"]) == ("fuse.nvpool", "nvpool:p", False)
        assert "user_allow_other" in said["refused"] or Path("/etc/fuse.conf").read_text().startswith(
            "user_allow_other"
        )
    finally:
        shutil.rmtree(place)
