"""Control of nvpool mounts: start a mount, unmount it, and replace its process.

`mount`, `umount`, `dev` and `pool destroy` use this module. No function waits for a dead mount, and none
unmounts a file system that is not nvpool's.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    Damaged,
    DeadlineExceeded,
    InUse,
    InvalidRequest,
    NotFound,
    NvpoolError,
    Refused,
    Unavailable,
)
from nvpool.core.programs import Program, command, command_line, processes, program_of
from nvpool.host.log_files import open_log
from nvpool.host.mountinfo import Mount, look_at, mount_at, mounts, mounts_below, place_of
from nvpool.host.pool_directory import PoolDirectory

_BY_ITSELF_S = 1.0
"""Time for a daemon to exit after its mount is gone; a copy in another name space prevents the exit."""

_DETACH = """import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(sys.argv[1]), int(sys.argv[2])):
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""Program for a lazy unmount: umount(8) accesses the mount first, even with -l, so a hung mount blocks it."""
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8

ALL_PROCESSES = "pid:[4026531836]"
"""The initial PID name space, which sees all processes; PROC_PID_INIT_INO of linux/proc_ns.h."""

_ERROR_LINE = re.compile(r"\S+ \S+ ERROR +\S+ (.*)")


def mount_pool(
    pool: str, mountpoint: str, log: Path, options: tuple[str, ...] = (), wait_s: float = 60.0
) -> int:
    """Start a mount daemon, wait until the mount answers, and return the daemon's pid.

    InUse: an nvpool mount that answers is already there. Refused, Unavailable, Damaged: the daemon exited;
    the text has its log messages. Unavailable: no mount within `wait_s`; the daemon is terminated.
    """
    place = str(place_of(mountpoint))
    before = mount_at(place)
    if (
        before is not None and before.ours and look_at(place) == "alive"
    ):  # the loop would take it for the new one
        raise InUse(
            f"{place} has {before.source} ({before.type}) mounted on it; choose another directory, or unmount that "
            f"with: nvpool umount {place}"
        )
    # systemd's automount blocks all access until the mount is there, except by the mounting process group
    stays = before is not None and before.type == "autofs"
    if stays:
        options = (*options, "--stay-in-group")
    with open_log(log) as said:
        start = said.tell()
        daemon = subprocess.Popen(
            mount_command(pool, place, options),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=not stays,
            cwd="/",
        )
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    try:
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            if (code := daemon.poll()) is not None:
                raise _ended(code, _errors(log, start), log)
            if _mount_of(daemon.pid, place, pool) and look_at(place) == "alive":
                return daemon.pid
            pause(0.05)
        raise Unavailable(
            f"the mount at {mountpoint} was not there within {wait_s:.0f} s; the log of its daemon is {log}"
            + "".join(f"\n  {line}" for line in _errors(log, start))
        )
    except BaseException:
        daemon.terminate()
        raise


def mount_command(pool: str, mountpoint: str, options: tuple[str, ...]) -> list[str]:
    return command(Program.MOUNT, *options, pool, mountpoint)


def _mount_of(pid: int, place: str, pool: str) -> bool:
    """Return whether the daemon with this pid has mounted at `place`.

    With a pool directory, its state file must name the daemon; otherwise any nvpool mount there is enough.
    """
    found = mount_at(place)
    directory = PoolDirectory(pool)
    if found is None or not found.ours or not directory.exists():
        return found is not None and found.ours
    return any(
        state is not None and state.mountpoint == place
        for state in (directory.state_of(f"mount-{pid}"), directory.state_of(f"holder-{pid}"))
    )


def _ended(code: int, errors: list[str], log: Path) -> NvpoolError:
    family = {3: Unavailable, 4: Damaged}.get(code, Refused)
    if len(errors) == 1:
        return family(errors[0])
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return family(
        f"the mount daemon ended ({how}); its log is {log}" + "".join(f"\n  {line}" for line in errors)
    )


def _errors(log: Path, start: int) -> list[str]:
    """Return the daemon's last errors since offset `start`, without time and name; its last lines if none."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = [line for line in file.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR_LINE.match(line))]
    of_libfuse = "; ".join(line for line in lines if line.startswith(("fuse: ", "fusermount3: ")))
    if errors and of_libfuse:
        errors[-1] += f" ({of_libfuse})"
    return errors[-3:] or lines[-3:]


def unmount(mountpoint: str, lazy: bool = False, wait_s: float = 60.0) -> bool:
    """Unmount the nvpool mount at `mountpoint`; return whether the unmount was lazy.

    A mount that is dead or does not answer is unmounted lazily even without `lazy`. If no daemon serves that
    mount any more, system calls that wait in the mount are aborted. Otherwise they could wait for ever: a
    process that was killed while it notified the kernel may keep the kernel's connection open.

    On return the daemon has stored all data and exited, except after a lazy unmount, where nothing waits for
    the daemon. If another mount name space has a copy of the mount, the daemon is requested to exit.

    DeadlineExceeded: the daemon did not exit within `wait_s`, plus LOOK_S for the check of a hung mount; the
    mount point is free. InUse: files are open and `lazy` is not set. NotFound: nothing is mounted there.
    InvalidRequest: the mount is not nvpool's. Unavailable: umount(8) did not finish within `wait_s`.
    """
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    place = str(place_of(mountpoint))
    found = mount_at(place)
    if found is None:
        raise NotFound(f"nothing is mounted at {mountpoint}")
    if not found.ours:
        raise InvalidRequest(f"{mountpoint} is a mount of type {found.type}, not of nvpool; nothing was done")
    daemons, is_served = _daemons_of(place), True
    try:
        if not lazy and look_at(place) != "alive":
            lazy = True
            _ask_to_end(daemons)
            is_served = bool(daemons) or _may_be_served(found)
        _umount(place, lazy, deadline_s, end_calls_of=None if is_served else found.device)
        if not lazy and not _ended_by(daemons, min(deadline_s, SYSTEM_CLOCK.boottime_s() + _BY_ITSELF_S)):
            _ask_to_end(daemons)
            if not _ended_by(daemons, deadline_s):
                raise DeadlineExceeded(
                    f"{mountpoint} is unmounted, but its daemon (process {', '.join(map(str, daemons))}) "
                    f"has not ended within {wait_s:.0f} s: it may still be sending writes"
                )
    finally:
        for pidfd in daemons.values():
            os.close(pidfd)
    return lazy


class Upgraded(NamedTuple):
    """Result of `upgrade`. `pause_ms`: how long no process served; None if no pool directory records it."""

    pid: int
    pause_ms: int | None


def upgrade(mountpoint: str, wait_s: float = 60.0) -> Upgraded:
    """Replace the process that serves the mount by one of the software that is installed now.

    On return the new process serves. Users of the mount see only a pause. NotFound: there is no nvpool mount.
    InvalidRequest: the mount has no holder, so it does not outlive its process. Unavailable: the new process
    did not start; the old one continues. DeadlineExceeded: no new process served within `wait_s`.
    """
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    place = str(place_of(mountpoint))
    found = mount_at(place)
    if found is None or not found.ours:
        raise NotFound(f"no mount of nvpool is at {mountpoint}")
    holders = _daemons_of(place, {Program.MOUNT_HOLDER})
    before = _daemons_of(place, {Program.MOUNT, Program.MOUNT_FORK_SERVER})
    try:
        if len(holders) != 1 or not any(_runs(pid, {Program.MOUNT}) for pid in before):
            raise InvalidRequest(
                f"the mount at {mountpoint} does not outlive its process; unmount it, and mount it again"
            )
        signal.pidfd_send_signal(next(iter(holders.values())), signal.SIGUSR1)
        fork_server = 0
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            now = _daemons_of(place, {Program.MOUNT, Program.MOUNT_FORK_SERVER})
            for pidfd in now.values():
                os.close(pidfd)
            newer = now.keys() - before.keys()
            serving = [pid for pid in newer if _runs(pid, {Program.MOUNT})]
            if serving and not now.keys() & before.keys() and look_at(place) == "alive":
                pid = max(serving)
                return Upgraded(pid, _pause_of(pid))
            if fork_server and fork_server not in now:
                raise Unavailable(
                    f"the new process for {mountpoint} has ended before it could go on; the old one does, and "
                    "the log of the mount has the reason"
                )
            fork_server = fork_server or next(
                (pid for pid in newer if _runs(pid, {Program.MOUNT_FORK_SERVER})), 0
            )
            pause(0.02)
        raise DeadlineExceeded(
            f"the mount at {mountpoint} was not taken over within {wait_s:.0f} s; its log has the reason"
        )
    finally:
        for pidfd in (*holders.values(), *before.values()):
            os.close(pidfd)


def _pause_of(pid: int) -> int | None:
    words = command_line(pid)
    directory = PoolDirectory(words[-2]) if len(words) > 2 else None
    if directory is None or not directory.exists():
        return None
    deadline_s = SYSTEM_CLOCK.boottime_s() + _BY_ITSELF_S
    while (state := directory.state_of(f"mount-{pid}")) is None and SYSTEM_CLOCK.boottime_s() < deadline_s:
        pause(0.02)  # the process writes its state a little after it begins to serve
    return state.pause_ms if state is not None else None


def _ask_to_end(daemons: dict[int, int]) -> None:
    """Send SIGTERM to the holders, which pass it on; to all daemons if there is no holder."""
    holders = [pid for pid in daemons if _runs(pid, {Program.MOUNT_HOLDER})]
    for pidfd in [daemons[pid] for pid in holders] or daemons.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)


def _ended_by(daemons: dict[int, int], deadline_s: float) -> bool:
    return all(
        select.select([pidfd], [], [], max(0.0, deadline_s - SYSTEM_CLOCK.boottime_s()))[0]
        for pidfd in daemons.values()
    )


def _may_be_served(mount: Mount) -> bool:
    """Return whether some daemon may serve the mount, although none was found at its mount point.

    The daemon may belong to another mount point of the same file system, or run in a container whose
    processes this process does not see.
    """
    others = [other for other in mounts() if other.device == mount.device and other.point != mount.point]
    return bool(others) or mount.root != Path("/") or os.readlink("/proc/self/ns/pid") != ALL_PROCESSES


def _umount(place: str, lazy: bool, deadline_s: float, end_calls_of: str | None = None) -> None:
    """Unmount `place`. `end_calls_of`: device of a mount that no daemon serves; its calls are aborted."""
    if os.geteuid():
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), place]
        if end_calls_of is not None and lazy:
            with contextlib.suppress(OSError):  # without fusectl mounted, the calls keep waiting
                Path("/sys/fs/fuse/connections", end_calls_of.partition(":")[2], "abort").write_text("1")
    elif lazy:
        flags = _MNT_DETACH | _UMOUNT_NOFOLLOW | (_MNT_FORCE if end_calls_of is not None else 0)
        command = [sys.executable, "-I", "-S", "-c", _DETACH, place, str(flags)]
    else:
        command = ["umount", place]
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = running.communicate(timeout=max(1.0, deadline_s - SYSTEM_CLOCK.boottime_s()))
    except subprocess.TimeoutExpired:
        running.kill()  # no wait: it cannot exit while the kernel writes pages back through the daemon
        if (mounted := mount_at(place)) is not None and mounted.ours:
            raise Unavailable(
                f"{place} could not be unmounted in time; try: nvpool umount --lazy {place}"
            ) from None
        return
    if running.returncode and (mounted := mount_at(place)) is not None and mounted.ours:
        if "busy" in said:
            raise InUse(
                f"{place} is in use; close what is open there (fuser -vm {place} lists it), or: nvpool umount --lazy "
                f"{place}"
            )
        hint = "; only root and who mounted it may unmount it" if os.geteuid() else ""
        raise Refused(f"{place} could not be unmounted: {said.strip()}{hint}")


def _runs(pid: int, programs: set[Program]) -> bool:
    return program_of(command_line(pid)) in programs


def _daemons_of(place: str, programs: set[Program] | None = None) -> dict[int, int]:
    """Return the processes of `place` that run `programs`: pid -> pidfd, which the caller closes.

    Default programs: the mount daemon and its holder.
    """
    programs = programs or {Program.MOUNT, Program.MOUNT_HOLDER}
    found = {}
    for pid, _ in processes(*programs, naming=place):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        words = command_line(pid)  # again: until the pidfd was open the pid could change owner
        if program_of(words) in programs and place in words:
            found[pid] = pidfd
        else:
            os.close(pidfd)
    return found


def words_of(place: str) -> list[str]:
    """Return the arguments of the process that serves `place`; empty if there is none."""
    daemons = _daemons_of(place)
    try:
        return next((words for pid in daemons if (words := command_line(pid))), [])
    finally:
        for pidfd in daemons.values():
            os.close(pidfd)


def mountpoints_of(directory: PoolDirectory) -> list[str]:
    """Return where this machine has the pool of `directory` mounted, deepest first.

    These are nvpool mounts below the directory, and those whose state files in the directory name them.
    """
    places = {str(mount.point) for mount in mounts_below(directory.path) if mount.ours}
    for state in (*directory.states("mount-").values(), *directory.dead_mounts().values()):
        if state.mountpoint and (found := mount_at(state.mountpoint)) is not None and found.ours:
            places.add(str(found.point))
    return sorted(places, key=len, reverse=True)


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)
