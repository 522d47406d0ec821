"""Interface of a compared system, and shared tools.

A subject is used by one thread, in this order: `missing`, `start`, then `forget` before each figure that is cold, `stop` at the
end. All that it makes lies below one directory: files, sockets, logs, the mount. Each of its processes carries a mark in its
environment, so that processes which a daemon has detached are found too, and ended by pid, when the benchmark ends or is
interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

MARK = "NVPOOL_BENCH"
PROBE = "probe"
"""Name of a small file in each mount."""
OWNER = "nvpool-bench-owner"
"""File in a benchmark's directory with its pid. Only directories with this file are ever removed."""
START_S = 60.0
"""Seconds until a daemon serves; all here take less than five on an idle machine."""
END_S = 20.0
KILLED_S = 5.0


class Failed(Exception):
    """A subject did not do what was asked of it. The text is the reason that is printed beside its name."""


class Subject:
    """`name`: unique, used for its directory too. `kind`: drive, floor, nvpool or peer. `notes`: what a reader must know of its
    figures. `file_bytes_max`: a smaller large file for it. `cold`: how `forget` makes it cold, for the table's legend.
    `offers`: by which ways loads reach it (workloads.Load.by). `in_part`: asked only for the loads that are for all.
    `copies`: how many it keeps of each byte. `directory` is None until `start` and after `stop`."""

    name: str
    kind: str
    offers: tuple[str, ...] = ("mount",)
    in_part: bool = False
    notes: str = ""
    cold: str = "mounted again, page cache dropped"
    file_bytes_max: int | None = None

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self.directory: Path | None = None
        self.mount: Path | None = None

    # -- what each subject says --------------------------------------------------------------------------------------------

    def missing(self) -> str | None:
        """Why it cannot be measured on this machine, or None. Starts nothing."""
        return None

    def version(self) -> str:
        return ""

    def start_servers(self) -> None:
        """Start what serves. Failed with the reason where it does not; `stop` is called all the same."""

    def attach(self) -> None:
        """Make `mount` show the subject's files. On return it answers."""

    def detach(self) -> None:
        """Undo `attach`; everything written is with the servers."""
        unmount(self.mount)

    def attached(self) -> bool:
        """Whether `mount` shows the subject's files; else a load would measure the directory below the mount."""
        return str(self.mount) in mounts()

    def stop_servers(self) -> None:
        """In an orderly way; what does not end within its time is ended by `stop`. Called also when `start` failed."""

    # -- what the comparison calls -----------------------------------------------------------------------------------------

    def start(self, directory: Path) -> Path:
        """Start it with everything below `directory`, which is made; the place for files. Failed with the reason."""
        self.directory, self.mount = directory, directory / "mount"
        self.mount.mkdir(parents=True)
        self.start_servers()
        self.attach()
        return self.mount

    def forget(self) -> None:
        """Be as cold as after a start of the machine, but for what servers keep in memory by design: the mount's process is new
        and connected (it has read PROBE, which is in `mount`), and neither the kernel nor it knows any other name or byte."""
        self.detach()
        self.attach()
        self.run("cat", self.mount / PROBE)
        drop_page_cache(self.directory)

    def stop(self) -> None:
        """Nothing of it runs, is mounted or lies below its directory afterwards. May be called at any time and twice."""
        if self.directory is None:
            return
        for step in (self.detach, self.stop_servers, lambda: sweep(self.directory)):
            with contextlib.suppress(Failed, OSError, subprocess.SubprocessError):
                step()
        self.directory = self.mount = None

    # -- tools -------------------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        return os.environ | {MARK: str(self.directory)}

    def daemon(self, *command: object, stdout=None) -> subprocess.Popen:
        """A process of its own session (Ctrl-C at the terminal is for the bench, which then stops it) that inherits nothing: a
        daemon that holds a descriptor of ours would keep its lock."""
        with open(self.directory / f"{Path(str(command[0])).name}.log", "ab") as file:
            return subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout or file,
                stderr=file,
                env=self.environment(),
                start_new_session=True,
                cwd="/",
            )

    def run(self, *command: object, timeout_s: float = START_S, text: str = "") -> str:
        return run(*command, environment=self.environment(), timeout_s=timeout_s, text=text)

    def wait_for_mount(self, process: subprocess.Popen | None = None) -> None:
        """Until `mount` is a mount that answers. Each look is a process of its own, for a broken mount may never answer."""
        wait_until(lambda: str(self.mount) in mounts(), f"{self.name} does not mount", process)
        wait_until(lambda: answers(self.mount), f"the mount of {self.name} does not answer", process)


def run(
    *command: object, environment: dict[str, str] | None = None, timeout_s: float = START_S, text: str = ""
) -> str:
    """Run a program; return its output. Failed, with the end of the output: it failed or took too long.

    The program is killed when it is late or this is interrupted. It is not waited for longer than KILLED_S: a process
    that waits for a dead mount ends only when the server of the mount ends.
    """
    words = [str(word) for word in command]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as error:
        raise Failed(f"{words[0]}: {error.strerror}") from None
    try:
        said, errors = process.communicate(text, timeout_s)
    except BaseException as error:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILLED_S)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"`{' '.join(words[:4])} …` took more than {timeout_s:.0f} s") from None
        raise
    if process.returncode:
        reason = " ".join((errors.strip() or said.strip()).split())
        raise Failed(f"`{' '.join(words[:4])} …` ended with {process.returncode}: {reason[-300:]}")
    return said


def wait_until(
    condition, failure: str, process: subprocess.Popen | None = None, seconds: float = START_S
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise Failed(f"{failure}: its process ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise Failed(f"{failure} within {seconds:.0f} s")
        time.sleep(0.05)


def wait_for_port(host: str, port: int, name: str, process: subprocess.Popen | None = None) -> None:
    def listening() -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((host, port)) == 0

    wait_until(listening, f"{name} does not listen on port {port}", process)


def own_address() -> str | None:
    """An IPv4 address of this machine that is not 127.x, which GlusterFS and MooseFS refuse; what is sent to it goes over the
    loopback device all the same. Asks the routing table only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = probe.getsockname()[0]
    return None if address.startswith(("127.", "0.")) else address


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def write_out(place: Path) -> None:
    """Write all dirty data of the file system of `place` to its drive."""
    run("sync", "-f", place, timeout_s=300)


def drop_page_cache(place: Path) -> None:
    """Write out the file system of `place`, then drop all clean pages, names and inodes of the kernel; needs root."""
    write_out(place)
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def mounts(kind: str = "") -> list[str]:
    """Mount points, of the file systems whose type begins with `kind`, in the order of mounting."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return [line.split(" ")[4] for line in file if line.split(" - ")[-1].startswith(kind)]


def answers(place: Path) -> bool:
    try:
        return subprocess.run(["stat", "-f", str(place)], capture_output=True, timeout=5).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def unmount(place: Path) -> None:
    """A mount that is in use or dead is taken out of sight; nothing where nothing is mounted."""
    deadline = time.monotonic() + END_S
    while str(place) in mounts():
        if subprocess.run(["umount", str(place)], capture_output=True, timeout=60).returncode == 0:
            continue
        if time.monotonic() > deadline:
            subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)
        time.sleep(0.1)


def marked(directory: Path) -> list[int]:
    """The processes whose mark is `directory` or below it, this one excepted."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or not ours to look at
        for variable in variables:
            if variable.startswith(MARK.encode() + b"="):
                place = os.fsdecode(variable.split(b"=", 1)[1])
                if int(pid) != os.getpid() and (place == str(directory) or place.startswith(f"{directory}/")):
                    found.append(int(pid))
    return found


def sweep(directory: Path) -> None:
    """End the processes marked with `directory`, unmount what is mounted below it, last first, and remove it. ValueError, and
    nothing is touched, for what is not a bench's own directory or one in it. What stays mounted keeps its files."""
    if not directory.is_absolute() or not any(
        (place / OWNER).is_file() for place in (directory, directory.parent)
    ):
        raise ValueError(f"{str(directory)!r} is not a directory of a bench")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + END_S
        while marked(directory) and time.monotonic() < deadline:
            time.sleep(0.05)
    for place in reversed(mounted_below(directory)):
        subprocess.run(["umount", "-l", place], check=False, timeout=60)
    if not mounted_below(directory):
        shutil.rmtree(directory, ignore_errors=True)


def sweep_left(directory: Path, prefix: str, say: Callable[[str], None]) -> None:
    """Remove directories with this prefix that a killed benchmark has left there."""
    for left in directory.glob(f"{prefix}*"):
        owner = left / OWNER
        if owner.is_file() and not Path(f"/proc/{owner.read_text()}").exists():
            say(f"removing {left}, left by a bench that was killed")
            sweep(left)


def mounted_below(directory: Path) -> list[str]:
    return [place for place in mounts() if place.startswith(f"{directory}/")]
