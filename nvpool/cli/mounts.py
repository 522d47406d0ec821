"""The mounts of this machine, and how one of ours is made and ended.

Called by `mount`, `umount`, `dev` and `pool destroy`. Guarantees that nothing here waits for a dead mount: a look at a path
that may hang is
taken by another program with a deadline. Never unmounts what is not nvpool's.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.directory import PoolDirectory
from nvpool.base.errors import DeadlineExceeded, InUse, InvalidRequest, NotFound, NvpoolError, Refused, Unavailable

_LOOK_S = 5.0


class Mount(NamedTuple):
    path: str
    kind: str
    source: str

    @property
    def ours(self) -> bool:
        return self.kind.startswith("fuse") and "nvpool" in (self.kind + " " + self.source)


def mounts() -> list[Mount]:
    """All mounts in this name space, the topmost of a place last; proc(5), mountinfo."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, source = right.split(" ")[:2]
            found.append(Mount(_plain(left.split(" ")[4]), kind, _plain(source)))
    return found


def _plain(text: str) -> str:
    for escaped, meant in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escaped, meant)
    return text


def mount_at(path: str) -> Mount | None:
    """The topmost mount whose place is `path`. Does not touch the mount: realpath is taken of the parent only."""
    place = real_place(path)
    return next((mount for mount in reversed(mounts()) if mount.path == place), None)


def real_place(path: str) -> str:
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(parent), name)


def mounts_below(path: str) -> list[Mount]:
    """Mounts at or below `path`, the deepest and newest first."""
    place = os.path.realpath(path)
    return [mount for mount in reversed(mounts()) if mount.path == place or mount.path.startswith(place.rstrip("/") + "/")]


def answers(path: str) -> bool:
    """Whether the mount at `path` answers a stat within a few seconds."""
    try:
        return subprocess.run(["stat", "-f", "--", path], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, timeout=_LOOK_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def mount_pool(pool: str, mountpoint: str, log: Path | None, options: tuple[str, ...] = (), wait_s: float = 60.0) -> int:
    """Start a mount daemon and wait until the pool is there; its pid.

    InUse when something is mounted at `mountpoint`, InvalidRequest when it is no directory; Refused with what the daemon said
    when it
    ended, Unavailable when it took longer than wait_s (it is stopped then).
    """
    place = check_mountpoint(mountpoint)
    said = open(log, "ab") if log is not None else subprocess.DEVNULL  # noqa: SIM115
    try:
        start = said.tell() if log is not None else 0
        daemon = subprocess.Popen([sys.executable, "-P", "-m", "nvpool.run.mount_daemon", *options, pool, place],
                                  stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, cwd="/")
    finally:
        if log is not None:
            said.close()
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    try:
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            found = mount_at(place)
            if found is not None and found.ours and answers(place):
                return daemon.pid
            if (code := daemon.poll()) is not None:
                raise _ended(code, _tail(log, start))
            pause(0.05)
        raise Unavailable(f"the mount at {mountpoint} was not there within {wait_s:.0f} s{_tail(log, start)}")
    except BaseException:
        daemon.terminate()
        if (mounted := mount_at(place)) is not None and mounted.ours:
            subprocess.run(["umount", "-l", place], stderr=subprocess.DEVNULL, check=False, timeout=_LOOK_S)
        raise


def _ended(code: int, said: str) -> NvpoolError:
    family = {3: Unavailable}.get(code, Refused)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return family(f"the mount daemon ended ({how}){said}")


def _tail(log: Path | None, start: int) -> str:
    if log is None:
        return ""
    with open(log, "rb") as file:
        file.seek(start)
        lines = [line for line in file.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return f"; its log is {log}"
    telling = [line for line in lines if " ERROR " in line or "Error" in line][-3:] or lines[-3:]
    return "".join(f"\n  {line}" for line in telling) + f"\n  (more in {log})"


def check_mountpoint(mountpoint: str) -> str:
    """The absolute place, when a mount can be made there."""
    place = real_place(mountpoint)
    found = mount_at(place)
    if found is not None:
        whose = "an nvpool mount" if found.ours else f"a mount of type {found.kind}"
        raise InUse(f"{mountpoint} holds {whose} already; unmount it first"
                    + (f" with: nvpool umount {mountpoint}" if found.ours else ""))
    if not os.path.isdir(place):
        raise NotFound(f"{mountpoint} is not a directory; make it with: mkdir -p {mountpoint}")
    if os.listdir(place):
        raise InvalidRequest(f"{mountpoint} is not empty; what is in it would be hidden. Name an empty directory")
    if not os.path.exists("/dev/fuse"):
        raise Unavailable("there is no /dev/fuse here (a plain container?); give it with --device /dev/fuse "
                          "--cap-add SYS_ADMIN, or use the SDK")
    return place


def unmount(mountpoint: str, lazy: bool = False, wait_s: float = 60.0) -> bool:
    """Unmount the nvpool mount at `mountpoint`; True when it had to be taken out of sight while it was in use or dead.

    Returns when its daemon has stored everything and ended, or after wait_s with DeadlineExceeded (the name is free then).
    InUse when
    files are open there and `lazy` is not set, NotFound when nothing of ours is mounted.
    """
    place = real_place(mountpoint)
    found = mount_at(place)
    if found is None:
        raise NotFound(f"nothing is mounted at {mountpoint}")
    if not found.ours:
        raise InvalidRequest(f"{mountpoint} is a mount of type {found.kind}, not of nvpool; nothing was done")
    daemons = _daemons_of(place)
    if not lazy and not answers(place):
        lazy = True
        for pidfd in daemons:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    try:
        _umount(place, lazy)
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        for pidfd in daemons:
            left = max(0.0, deadline_s - SYSTEM_CLOCK.boottime_s())
            if not lazy and not select.select([pidfd], [], [], left)[0]:
                raise DeadlineExceeded(f"{mountpoint} is unmounted, but its daemon has not ended within {wait_s:.0f} s: "
                                       f"it may still be sending writes")
    finally:
        for pidfd in daemons:
            os.close(pidfd)
    return lazy


def _umount(place: str, lazy: bool) -> None:
    if os.geteuid() == 0:
        command = ["umount", *(["-l"] if lazy else []), place]
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), place]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{place} could not be unmounted within 60 s; try: nvpool umount --lazy {place}") from None
    if done.returncode and (mounted := mount_at(place)) is not None and mounted.ours:
        if "busy" in done.stderr:
            raise InUse(f"{place} is in use; close what is open there (fuser -vm {place} lists it), or: nvpool umount --lazy "
                        f"{place}")
        raise Refused(f"{place} could not be unmounted: {done.stderr.strip()}")


def _daemons_of(place: str) -> list[int]:
    """pidfds of the mount daemons that serve `place`."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            pidfd = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        if b"nvpool.run.mount_daemon" in words and os.fsencode(place) in words:
            found.append(pidfd)
        else:
            os.close(pidfd)
    return found


def mountpoints_of(directory: PoolDirectory) -> list[str]:
    """Where this machine has the pool of `directory` mounted, the deepest first: below it, and wherever a mount announced
    itself."""
    places = {mount.path for mount in mounts_below(str(directory.path)) if mount.ours}
    for state in directory.states("mount-").values():
        if state.mountpoint and (found := mount_at(state.mountpoint)) is not None and found.ours:
            places.add(found.path)
    return sorted(places, key=len, reverse=True)


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)
