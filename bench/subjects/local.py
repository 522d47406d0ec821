"""Local subjects: plain directory, FUSE from memory, passthrough in C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from subjects.contract import END_S, START_S, Failed, Subject, drop_page_cache, run, unmount

BENCH = Path(__file__).resolve().parents[1]
PEERS = BENCH.parent / "build" / "peers" / "bin"
"""Programs that install_peers.sh installs from PyPI."""


class PlainDirectory(Subject):
    """The drive, through the kernel's file system alone."""

    name, kind = "plain", "drive"
    cold = "page cache dropped"

    def attached(self) -> bool:
        return True

    def forget(self) -> None:
        drop_page_cache(self.directory)


class FuseFromMemory(Subject):
    """FUSE floor: nvpool's adapter and engine answer from a dictionary."""

    name, kind = "fuse-memory", "floor"
    program = "fuse_floor.py"
    notes = "keeps its files in the memory of its process"
    cold = "page cache dropped; its files stay in its memory"
    file_bytes_max = 256 << 20

    def missing(self) -> str | None:
        return no_fuse()

    def start_servers(self) -> None:
        server = self.daemon(sys.executable, BENCH / self.program, self.mount, stdout=subprocess.PIPE)
        with server.stdout:
            if server.stdout.readline().strip() != b"ready":
                raise Failed(f"{self.program} does not start")

    def forget(self) -> None:
        drop_page_cache(self.directory)


class FuseBare(FuseFromMemory):
    """FUSE floor without nvpool's engine: one file of constant bytes."""

    name, program, offers = "fuse-bare", "fuse_bare.py", ("bare",)
    notes = "fuse_bare.py: two system calls for a read, and nothing else"


class CPassthrough(Subject):
    """FUSE floor without Python: bench/passthrough.c over libfuse, onto a plain directory."""

    name, kind = "c-passthrough", "floor"
    notes = "passthrough.c: libfuse's low-level interface, 16 threads, timeouts of 1 s"
    _server: subprocess.Popen | None = None

    def missing(self) -> str | None:
        return no_fuse() or no_compiler("fuse3")

    def start_servers(self) -> None:
        (self.directory / "files").mkdir()
        flags = run("pkg-config", "--cflags", "--libs", "fuse3").split()
        compile_c(BENCH / "passthrough.c", self.directory / "passthrough", *flags)

    def attach(self) -> None:
        self._server = self.daemon(self.directory / "passthrough", self.directory / "files", self.mount)
        self.wait_for_mount(self._server)

    def detach(self) -> None:
        unmount(self.mount)
        end(self._server)


class CSocket(Subject):
    """Network floor without Python: request and reply over TCP on loopback."""

    name, kind, offers = "c-socket", "floor", ("socket",)
    notes = "socket_floor.c: blocking sockets, 4 KiB from memory"
    cold = ""
    program: Path | None = None

    def missing(self) -> str | None:
        return no_compiler()

    def start_servers(self) -> None:
        self.program = compile_c(BENCH / "socket_floor.c", self.directory / "socket_floor")

    def attached(self) -> bool:
        return True


def compile_c(source: Path, program: Path, *flags: str) -> Path:
    """Compile `source` to `program`. Failed: with the compiler's output."""
    run("cc", "-O2", "-Wall", "-D_GNU_SOURCE", "-pthread", source, "-o", program, *flags)
    return program


def no_fuse() -> str | None:
    return None if os.access("/dev/fuse", os.W_OK) else "there is no /dev/fuse that may be opened here"


def no_compiler(*packages: str) -> str | None:
    try:
        run("cc", "--version")
        if packages:
            run("pkg-config", "--exists", *packages)
    except Failed as failed:
        return (
            f"needs a C compiler{' and the headers of ' + ', '.join(packages) if packages else ''}: {failed}"
        )
    return None


def end(process: subprocess.Popen | None, patience_s: float = 1.0) -> None:
    """Wait for a process that is about to end by itself; signal it when it does not in that time, kill it at last."""
    if process is None:
        return
    for wait_s, number in ((patience_s, signal.SIGTERM), (END_S, signal.SIGKILL)):
        try:
            process.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            process.send_signal(number)
    process.wait(START_S)
