"""`mount -t nvpool`, as administrators and /etc/fstab use it: mount(8) itself, with mount.nvpool in its place.

Each test runs in its own mount namespace.
"""

import json
import shlex
import subprocess
import sys

import pytest

from nvpool.core.programs import OF_A_MOUNT, Program, command, processes
from tests.fuse.conftest import FLOOR, NO_MOUNT, needs, nvpool, wait_until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(FLOOR, reason="the floor has no subtrees"),
    needs("unshare", "nsenter"),
]


class Administrator:
    """Runs commands in a mount namespace in which /usr/sbin has only our programs."""

    def __init__(self, place):
        self.place = place
        self.bin = place / "sbin"
        self.bin.mkdir()
        (self.bin / "mount.nvpool").write_text(
            f'#!/bin/sh\nexec {shlex.join(command(Program.MOUNT_COMMAND))} "$@"\n'
        )
        (self.bin / "mount.nvpool").chmod(0o755)
        (self.bin / "mount.fuse.nvpool").symlink_to("mount.nvpool")
        self.space = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                f"mount --bind {self.bin} /usr/sbin && echo up && exec sleep 10000",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.up = self.space.stdout.readline() == "up\n"

    def run(self, *words, check=True, within_s=120):
        done = subprocess.run(
            ["nsenter", f"--mount=/proc/{self.space.pid}/ns/mnt", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def found(self, place):
        done = self.run(
            "findmnt", "--json", "--output", "SOURCE,FSTYPE,OPTIONS", "--mountpoint", place, check=False
        )
        return json.loads(done.stdout)["filesystems"][-1] if done.returncode == 0 else None

    def close(self):
        self.space.kill()
        self.space.wait()
        self.space.stdout.close()


@pytest.fixture(scope="module")
def volume(own):
    """/volumes/x of the pool, with some files."""
    if NO_MOUNT:
        pytest.skip(NO_MOUNT)
    whole = own.mount(own.directory.parent / "tree")
    (whole.place / "volumes" / "x" / "in").mkdir(parents=True)
    (whole.place / "volumes" / "x" / "f").write_bytes(b"of x")
    assert whole.end() == 0


@pytest.fixture
def root(volume, tmp_path):
    made = Administrator(tmp_path)
    if not made.up:
        made.close()
        pytest.skip("a mount namespace cannot be created here")
    yield made
    for name in ("m", "m2"):
        while made.found(tmp_path / name) is not None:
            made.run("umount", "-l", tmp_path / name)
    made.close()
    wait_until(lambda: not any(str(tmp_path) in words for words in command_lines()), "the end of its mounts")


def command_lines():
    for _, words in processes(*OF_A_MOUNT):
        yield "\0".join(words)


def address_of(directory):
    """HOST:PORT of the pool's node."""
    (node,) = json.loads((directory / "poolmap.json").read_bytes())["nodes"]
    return next(one for one in node["endpoints"] if one.startswith("stream://")).removeprefix("stream://")


@pytest.mark.t3
def test_mount_8_mounts_a_subtree_and_umount_8_ends_it(own, root):
    place = root.place / "m"
    place.mkdir()
    source = f"{own.directory}:/volumes/x"
    root.run("mount", "-t", "nvpool", source, place, "-o", "rw,noexec,workers=2,x-systemd.automount,_netdev")
    found = root.found(place)
    assert (found["source"], found["fstype"]) == (source, "fuse.nvpool")
    assert {"rw", "noexec", "nosuid", "nodev"} <= set(found["options"].split(","))
    assert (
        root.run("ls", place).stdout.split() == ["f", "in"] and root.run("cat", place / "f").stdout == "of x"
    )
    assert f"{source} {place} fuse.nvpool " in root.run("cat", "/proc/mounts").stdout
    again = root.run("mount", "-t", "nvpool", source, place, check=False)
    assert again.returncode == 32 and "mounted on it" in again.stderr
    root.run("umount", place)
    assert root.found(place) is None
    wait_until(lambda: not any(str(place) in words for words in command_lines()), "the end of its processes")


@pytest.mark.t3
def test_node_address_is_a_source(own, root):
    """With a client's directory as an option, for the certificate."""
    place = root.place / "m"
    place.mkdir()
    source = f"{address_of(own.directory)}:/volumes/x"
    root.run("mount", "-t", "nvpool", source, place, "-o", f"ro,pool={own.directory}")
    assert root.found(place)["source"] == source and root.run("cat", place / "f").stdout == "of x"


def test_fstab_entries_are_mounted(own, root):
    place, other, table = root.place / "m", root.place / "m2", root.place / "fstab"
    place.mkdir()
    other.mkdir()
    source = f"{own.directory}:/volumes/x"
    table.write_text(
        f"{source}  {place}  nvpool  ro,_netdev,nofail,x-systemd.automount  0 0\n"
        f"{own.directory}:/  {other}  nvpool  noauto,user,_netdev  0 0\n"
    )
    root.run("mount", "-T", table, "-a")
    assert root.found(place)["source"] == source and root.found(other) is None
    assert "ro" in root.found(place)["options"].split(",")
    root.run("mount", "-T", table, "-a")  # finds the mount again
    assert root.run("sh", "-c", f"grep -c ' {place} ' /proc/mounts").stdout == "1\n"
    root.run("mount", "-T", table, other)
    assert {"noexec", "nosuid", "nodev"} <= set(root.found(other)["options"].split(","))
    assert root.run("ls", other / "volumes").stdout == "x\n"
    refused = root.run("mount", "-T", table, "-o", "remount,rw", place, check=False)
    assert refused.returncode == 32 and "was mounted read-only" in refused.stderr
    root.run("umount", place, other)


@pytest.mark.t3
def test_mount_in_use_is_remounted_read_only_and_back(own, root):
    place = root.place / "m"
    place.mkdir()
    root.run("mount", "-t", "nvpool", f"{own.directory}:/volumes/x", place)
    inside = f"/proc/{root.space.pid}/root{place}"
    with open(f"{inside}/in/open", "wb"):
        busy = root.run("mount", "-o", "remount,ro", place, check=False)
        assert busy.returncode == 32 and "open for writing" in busy.stderr, busy.stderr
    root.run("mount", "-o", "remount,ro", place)
    assert "ro" in root.found(place)["options"].split(",")
    assert "Read-only" in root.run("touch", place / "in" / "x", check=False).stderr
    root.run("mount", "-o", "remount,rw", place)
    root.run("touch", place / "in" / "x")
    root.run("rm", place / "in" / "x", place / "in" / "open")


@pytest.mark.t3
def test_errors_have_the_exit_codes_of_mount_8(own, root):
    place = root.place / "m"
    place.mkdir()
    for source, options, code, said in (
        (f"{own.directory}:/volumes/x", "bogus=1", 1, "'bogus=1' is not an option of nvpool; there are"),
        ("nothing", "ro", 1, "is not a source"),
        (f"{own.directory}:/volumes/y", "ro", 32, "/volumes/y does not exist in the pool"),
        (f"{own.directory}-not:/x", "ro", 32, "pool-not"),
        ("127.0.0.1:9:/x", f"ro,wait=20,log={root.place}/log", 32, "127.0.0.1:9"),
    ):
        done = root.run("mount", "-t", "nvpool", source, place, "-o", options, check=False)
        assert done.returncode == code and said in done.stderr, (source, done.returncode, done.stderr)
        assert root.found(place) is None
    assert root.run("mount", "-f", "-t", "nvpool", f"{own.directory}:/volumes/x", place).returncode == 0
    assert root.found(place) is None


AUTOMOUNT = """import ctypes, fcntl, os, struct, subprocess, sys
read, write = os.pipe()
os.setpgid(0, 0)
libc = ctypes.CDLL(None, use_errno=True)
words = f"fd={write},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
if libc.mount(b"systemd-1", os.fsencode(sys.argv[1]), b"autofs", 0, words.encode()):
    sys.exit(f"no autofs here: {os.strerror(ctypes.get_errno())}")
place = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
print("up", flush=True)
_, _, token = struct.unpack("=iiI", os.read(read, 304)[:12])  # a process wants to enter
print("asked", flush=True)
subprocess.run(sys.argv[2:], check=True, timeout=60)  # in this process group, as systemd does it
fcntl.ioctl(place, 0x9360, token)  # AUTOFS_IOC_READY
"""


@pytest.mark.t3
def test_automount_mounts_on_first_access(own, root):
    """As x-systemd.automount does: autofs on the mount point blocks the first process, and mount(8) is called."""
    place = root.place / "m"
    place.mkdir()
    auto = subprocess.Popen(
        [
            "nsenter",
            f"--mount=/proc/{root.space.pid}/ns/mnt",
            sys.executable,
            "-c",
            AUTOMOUNT,
            place,
            "mount",
            "-t",
            "nvpool",
            f"{own.directory}:/volumes/x",
            place,
            "-o",
            "x-systemd.automount",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if auto.stdout.readline() != "up\n":
            pytest.skip(auto.stderr.read().strip())
        comer = root.run("timeout", "90", "ls", place)
        _, said = auto.communicate(timeout=60)
        assert auto.returncode == 0, said
        assert comer.stdout.split() == ["f", "in"] == root.run("ls", place).stdout.split()
        assert root.found(place)["fstype"] == "fuse.nvpool"
        root.run("umount", place)
        assert root.found(place)["fstype"] == "autofs"
    finally:
        if auto.poll() is None:
            auto.kill()
            auto.communicate()
        while root.found(place) is not None:
            root.run("umount", "-l", place)


@pytest.mark.t3
def test_status_lists_the_mount(own, root):
    place = root.place / "m"
    place.mkdir()
    root.run("mount", "-t", "nvpool", f"{own.directory}:/volumes/x", place)
    seen = json.loads(nvpool("status", own.directory, "--json").stdout)
    assert [one for one in seen["processes"] if one["role"] == "mount" and one["mountpoint"] == str(place)]
