"""How a mount of ours is made and ended, and how its process is replaced.

Called by `mount`, `umount`, `dev` and `pool destroy`. Guarantees that nothing here waits for a dead mount. Never unmounts
what is not nvpool's.
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
from nvpool.core.errors import Damaged, DeadlineExceeded, InUse, InvalidRequest, NotFound, NvpoolError, Refused, Unavailable
from nvpool.core.programs import Program, command, command_line, processes, program_of
from nvpool.host.log_files import open_log
from nvpool.host.mountinfo import Mount, look_at, mount_at, mounts, mounts_below, place_of
from nvpool.host.pool_directory import PoolDirectory

_BY_ITSELF_S = 1.0
"""For a daemon to end because its mount is gone; where a copy of the mount lives on elsewhere, it does not."""

_DETACH = """import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(sys.argv[1]), int(sys.argv[2])):
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""umount(8) looks at the mount first, also when lazy, and so waits for what does not answer."""
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8

_ALL_PROCESSES = "pid:[4026531836]"
"""The first name space of processes, from which all of the machine are seen; PROC_PID_INIT_INO of linux/proc_ns.h."""

_ERROR_LINE = re.compile(r"\S+ \S+ ERROR +\S+ (.*)")


def mount_pool(pool: str, mountpoint: str, log: Path, options: tuple[str, ...] = (), wait_s: float = 60.0) -> int:
    """Start a mount daemon and wait until the pool is there; its pid.

    Refused or Unavailable with what the daemon said when it ended; Unavailable when it took longer than wait_s (it is ended
    then).
    """
    place = str(place_of(mountpoint))
    before = mount_at(place)
    if before is not None and before.ours and look_at(place) == "alive":  # else it would be taken for the one that we make
        raise InUse(f"{place} has {before.source} ({before.type}) mounted on it; choose another directory, or unmount that "
                    f"with: nvpool umount {place}")
    # systemd's automount lets nobody in until it is mounted, but for the group of processes that does it
    stays = before is not None and before.type == "autofs"
    if stays:
        options = (*options, "--stay-in-group")
    with open_log(log) as said:
        start = said.tell()
        daemon = subprocess.Popen(mount_command(pool, place, options), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                  start_new_session=not stays, cwd="/")
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    try:
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            if (code := daemon.poll()) is not None:
                raise _ended(code, _errors(log, start), log)
            if _mount_of(daemon.pid, place, pool) and look_at(place) == "alive":
                return daemon.pid
            pause(0.05)
        raise Unavailable(f"the mount at {mountpoint} was not there within {wait_s:.0f} s; the log of its daemon is {log}"
                          + "".join(f"\n  {line}" for line in _errors(log, start)))
    except BaseException:
        daemon.terminate()
        raise


def mount_command(pool: str, mountpoint: str, options: tuple[str, ...]) -> list[str]:
    return command(Program.MOUNT, *options, pool, mountpoint)


def _mount_of(pid: int, place: str, pool: str) -> bool:
    """Whether the daemon with this pid has mounted at `place`: it says so in a pool directory, else a mount of ours is
    enough."""
    found = mount_at(place)
    directory = PoolDirectory(pool)
    if found is None or not found.ours or not directory.exists():
        return found is not None and found.ours
    return any(state is not None and state.mountpoint == place
               for state in (directory.state_of(f"mount-{pid}"), directory.state_of(f"holder-{pid}")))


def _ended(code: int, errors: list[str], log: Path) -> NvpoolError:
    family = {3: Unavailable, 4: Damaged}.get(code, Refused)
    if len(errors) == 1:
        return family(errors[0])
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return family(f"the mount daemon ended ({how}); its log is {log}" + "".join(f"\n  {line}" for line in errors))


def _errors(log: Path, start: int) -> list[str]:
    """What the daemon said since `start`: its errors, without time and name; where there are none, its last lines."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = [line for line in file.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR_LINE.match(line))]
    of_libfuse = "; ".join(line for line in lines if line.startswith(("fuse: ", "fusermount3: ")))
    if errors and of_libfuse:
        errors[-1] += f" ({of_libfuse})"
    return errors[-3:] or lines[-3:]


def unmount(mountpoint: str, lazy: bool = False, wait_s: float = 60.0) -> bool:
    """Unmount the nvpool mount at `mountpoint`; True when it had to be taken out of sight while it was in use or dead.

    Of a mount that nobody serves any more the calls end that wait in it: a process that was killed while it told the kernel of
    something may keep it from being dead, for ever, and nobody would answer them.

    Returns when its daemon has stored everything and ended, or after wait_s (and the LOOK_S that a look at a hung mount takes)
    with DeadlineExceeded; the name is free then. Also where another mount name space has a copy of the mount: the daemon is
    asked to end. InUse when files are open there and `lazy` is not set, NotFound when nothing of ours is mounted.
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
                raise DeadlineExceeded(f"{mountpoint} is unmounted, but its daemon (process {', '.join(map(str, daemons))}) "
                                       f"has not ended within {wait_s:.0f} s: it may still be sending writes")
    finally:
        for pidfd in daemons.values():
            os.close(pidfd)
    return lazy


class Upgraded(NamedTuple):
    """`pause_ms`: for how long nobody served; None where no pool directory of this machine tells."""

    pid: int
    pause_ms: int | None


def upgrade(mountpoint: str, wait_s: float = 60.0) -> Upgraded:
    """Replace the process that serves the mount at `mountpoint` by one of the software that is installed now; nobody who uses
    the mount sees more than a pause. On return the new one serves.

    NotFound and InvalidRequest where there is no such mount, or it does not outlive its process. Unavailable when the new
    process does not start: the old one goes on. DeadlineExceeded when nothing came of it within wait_s.
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
            raise InvalidRequest(f"the mount at {mountpoint} does not outlive its process; unmount it, and mount it again")
        signal.pidfd_send_signal(next(iter(holders.values())), signal.SIGUSR1)
        zygote = 0
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            now = _daemons_of(place, {Program.MOUNT, Program.MOUNT_FORK_SERVER})
            for pidfd in now.values():
                os.close(pidfd)
            newer = now.keys() - before.keys()
            serving = [pid for pid in newer if _runs(pid, {Program.MOUNT})]
            if serving and not now.keys() & before.keys() and look_at(place) == "alive":
                pid = max(serving)
                return Upgraded(pid, _pause_of(pid))
            if zygote and zygote not in now:
                raise Unavailable(f"the new process for {mountpoint} has ended before it could go on; the old one does, and "
                                  "the log of the mount has the reason")
            zygote = zygote or next((pid for pid in newer if _runs(pid, {Program.MOUNT_FORK_SERVER})), 0)
            pause(0.02)
        raise DeadlineExceeded(f"the mount at {mountpoint} was not taken over within {wait_s:.0f} s; its log has the reason")
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
        pause(0.02)  # it says so when it serves already
    return state.pause_ms if state is not None else None


def _ask_to_end(daemons: dict[int, int]) -> None:
    """The holder, where there is one, passes it on."""
    holders = [pid for pid in daemons if _runs(pid, {Program.MOUNT_HOLDER})]
    for pidfd in [daemons[pid] for pid in holders] or daemons.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)


def _ended_by(daemons: dict[int, int], deadline_s: float) -> bool:
    return all(select.select([pidfd], [], [], max(0.0, deadline_s - SYSTEM_CLOCK.boottime_s()))[0]
               for pidfd in daemons.values())


def _may_be_served(mount: Mount) -> bool:
    """Whether there may be a daemon of it: of another place where it is seen too, or in a container out of our sight."""
    others = [other for other in mounts() if other.device == mount.device and other.point != mount.point]
    return bool(others) or mount.root != Path("/") or os.readlink("/proc/self/ns/pid") != _ALL_PROCESSES


def _umount(place: str, lazy: bool, deadline_s: float, end_calls_of: str | None = None) -> None:
    """`end_calls_of`: the device, of a mount that nobody serves."""
    if os.geteuid():
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), place]
        if end_calls_of is not None and lazy:
            with contextlib.suppress(OSError):  # where that file system is not mounted, they wait on
                Path("/sys/fs/fuse/connections", end_calls_of.partition(":")[2], "abort").write_text("1")
    elif lazy:
        flags = _MNT_DETACH | _UMOUNT_NOFOLLOW | (_MNT_FORCE if end_calls_of is not None else 0)
        command = [sys.executable, "-I", "-S", "-c", _DETACH, place, str(flags)]
    else:
        command = ["umount", place]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = running.communicate(timeout=max(1.0, deadline_s - SYSTEM_CLOCK.boottime_s()))
    except subprocess.TimeoutExpired:
        running.kill()  # not waited for: it can not die while the kernel writes pages back through the daemon
        if (mounted := mount_at(place)) is not None and mounted.ours:
            raise Unavailable(f"{place} could not be unmounted in time; try: nvpool umount --lazy {place}") from None
        return
    if running.returncode and (mounted := mount_at(place)) is not None and mounted.ours:
        if "busy" in said:
            raise InUse(f"{place} is in use; close what is open there (fuser -vm {place} lists it), or: nvpool umount --lazy "
                        f"{place}")
        hint = "; only root and who mounted it may unmount it" if os.geteuid() else ""
        raise Refused(f"{place} could not be unmounted: {said.strip()}{hint}")


def _runs(pid: int, programs: set[Program]) -> bool:
    return program_of(command_line(pid)) in programs


def _daemons_of(place: str, programs: set[Program] | None = None) -> dict[int, int]:
    """The mount daemons and holders of `place`, or those that run these programs: pid -> pidfd."""
    programs = programs or {Program.MOUNT, Program.MOUNT_HOLDER}
    found = {}
    for pid, _ in processes(*programs, naming=place):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        words = command_line(pid)  # again: the first look may have been at another process with this pid
        if program_of(words) in programs and place in words:
            found[pid] = pidfd
        else:
            os.close(pidfd)
    return found


def words_of(place: str) -> list[str]:
    """What the process that serves `place` was started with; nothing where there is none."""
    daemons = _daemons_of(place)
    try:
        return next((words for pid in daemons if (words := command_line(pid))), [])
    finally:
        for pidfd in daemons.values():
            os.close(pidfd)


def mountpoints_of(directory: PoolDirectory) -> list[str]:
    """Where this machine has the pool of `directory` mounted, the deepest first: below it, and wherever a mount announced
    itself."""
    places = {str(mount.point) for mount in mounts_below(directory.path) if mount.ours}
    for state in (*directory.states("mount-").values(), *directory.dead_mounts().values()):
        if state.mountpoint and (found := mount_at(state.mountpoint)) is not None and found.ours:
            places.add(str(found.point))
    return sorted(places, key=len, reverse=True)


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)
