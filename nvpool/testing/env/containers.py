"""Container operations for tests, for every engine, and the image of their containers.

The image is made of Debian's busybox-static. An engine has its own directory, which also identifies its
processes: nothing of the machine's own engine is touched. Used by `docker` and `podman`.
"""

from __future__ import annotations

import ctypes
import io
import os
import select
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.host.mountinfo import mounts_below
from nvpool.testing.env.pool import end_process

PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
IMAGE = "nvpool-test"
BUSYBOX = Path("/bin/busybox")
_PROGRAMS = (
    "sh",
    "cat",
    "dd",
    "df",
    "echo",
    "ln",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sleep",
    "stat",
    "sync",
    "touch",
    "true",
    "wc",
    "md5sum",
    "cut",
    "date",
    "kill",
    "readlink",
)


def why_no_image() -> str:
    """Reason why `root_file_system` cannot be packed here; empty if it can."""
    if not BUSYBOX.exists() or b"/ld-linux" in BUSYBOX.read_bytes()[:4096]:
        return "/bin/busybox is not there, or not static (Debian: busybox-static; make setup installs it)"
    return ""


def root_file_system() -> bytes:
    """Pack the files of an image by tar: a shell, some programs and an empty /data."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("bin", "data", "tmp", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        tar.add(BUSYBOX.resolve(), "bin/busybox")
        for name in _PROGRAMS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return packed.getvalue()


class Containers:
    """An engine with its own directory `place` below /tmp, because paths of sockets must be short."""

    def __init__(self, prefix: str) -> None:
        self.place = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))

    def run(
        self, *words: str, check: bool = True, stdin: bytes | None = None, timeout_s: float = 150.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the engine's program with these arguments. AssertionError with its output if it fails and
        `check` is set."""
        raise NotImplementedError

    def sh(self, script: str, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the script in a container that is removed before the return."""
        return self.run(
            "run", "--rm", "--network=none", *options, IMAGE, "/bin/sh", "-c", script, check=check
        )

    def begin(self, script: str, *options: str) -> str:
        """Start a container that keeps running, and return its id."""
        return self.run("run", "--detach", "--network=none", *options, IMAGE, "/bin/sh", "-c", script).stdout

    def inside(self, container: str, script: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("exec", container, "/bin/sh", "-c", script, check=check)

    def until(self, holds: Callable[[], object], what: str, wait_s: float = 60.0) -> None:
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        while not holds():
            assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s:.0f} s: {what}\n{self.said()}"
            select.select([], [], [], 0.1)

    def said(self, _lines: int = 15) -> str:
        """Return the last lines of the engine's log, if it has one."""
        return ""

    def processes(self, programs: Iterable[str]) -> list[int]:
        """Return the processes of this engine: those with `place` in their command line."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                words = (
                    Path("/proc", entry, "cmdline").read_bytes().split(b"\0") if entry.isdigit() else [b""]
                )
            except OSError:
                continue
            if os.path.basename(words[0]).decode(errors="replace") in programs and any(
                os.fsencode(str(self.place)) in word for word in words
            ):
                found.append(int(entry))
        return found

    def end_with_children(self, programs: Iterable[str]) -> None:
        """End processes and what runs in their containers.

        A container ends with its first process, which is the child of its shim or monitor.
        """
        for pid in self.processes(programs):
            for child in _children(pid):
                end_process(child)
            end_process(pid)

    def remove_place(self) -> None:
        for mount in mounts_below(self.place):
            ctypes.CDLL(None).umount2(os.fsencode(mount.point), 2)  # MNT_DETACH
        shutil.rmtree(self.place, ignore_errors=True)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
