"""Scheduling of the daemons' and mounts' threads among the other processes of the machine.

A request passes through two to four processes, each of which waits for the one before. On a node whose processors
are busy, as those of GPU nodes are while data loaders decode, each wake-up otherwise waits for the next timer tick
or for the time slice of a computing process: milliseconds for a request that needs microseconds. [processors]
scheduling of node.toml says what a daemon or mount does about it:

    normal      nothing: the kernel's default, or what the service manager has set (Nice=, CPUSchedulingPolicy=)
    responsive  time slices of SLICE_NS instead of the kernel's 1.4 to 3 ms. A thread with short slices that has not used
                up its share runs as soon as it wakes up, and gets no more processor time than before. Needs no right.
                Linux 6.12 or newer (sched_attr.sched_runtime of SCHED_OTHER, Documentation/scheduler/sched-eevdf.rst);
                older kernels ignore it
    priority    also nice NICE: its share is hardly ever used up. Needs CAP_SYS_NICE or RLIMIT_NICE
    realtime    SCHED_RR, priority 1: before every ordinary process. Needs CAP_SYS_NICE or RLIMIT_RTPRIO

All threads of a process get the same, and threads and processes started later inherit it. A thread that computes in
the background may hold the interpreter's lock when a request arrives: with less priority than the event loop it
would make the event loop wait for the other processes of the machine.

Where the kernel shares processors among sessions (sched_autogroup_enabled), the nice value of a session counts beside
other sessions, so a daemon that leads its session sets that too. In a session of other processes it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import struct
from pathlib import Path
from typing import NamedTuple

SLICE_NS = 100_000
"""The shortest time slice that Linux grants (__setparam_fair of its scheduler)."""
NICE = -10
"""Nine times the share of an ordinary thread. With -19 an idle machine created a tenth fewer files a second: a process
that is woken interrupts the one that has woken it."""
REALTIME_PRIORITY = 1
AUTOGROUP = Path("/proc/self/autogroup")

_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""struct sched_attr of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period."""
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
"""Machine -> numbers of the system calls sched_setattr and sched_getattr, which the C library does not offer."""

log = logging.getLogger("nvpool.runtime.scheduling")


class SchedulingAttributes(NamedTuple):
    """Attributes of one thread. `policy`: as in os.SCHED_*; `priority`: of realtime policies; `slice_ns`: 0 where
    the kernel reports none."""

    policy: int
    nice: int
    priority: int
    slice_ns: int


def attributes(thread: int = 0) -> SchedulingAttributes:
    """Return the attributes of a thread, by default the caller's. Raises OSError."""
    buffer = ctypes.create_string_buffer(_SCHED_ATTR.size)
    _call(1, thread, buffer, _SCHED_ATTR.size, 0)
    _, policy, _, nice, priority, runtime, _, _ = _SCHED_ATTR.unpack(buffer.raw)
    return SchedulingAttributes(policy, nice, priority, runtime)


def schedule(wanted: str) -> bool:
    """Apply `wanted`, one of the values above, to all threads of this process. Return whether it holds.

    Never fails: without the right, what needs none is done (`responsive`) and one log line says what is missing. A
    policy other than SCHED_OTHER that an operator has set for this process is left as it is, except by `realtime`.
    """
    if wanted == "normal":
        return True
    try:
        if wanted == "realtime":
            _set_all(os.SCHED_RR, 0, REALTIME_PRIORITY, 0)
            return True
        own = attributes()
        if own.policy != os.SCHED_OTHER:
            return True
        nice = min(own.nice, NICE) if wanted == "priority" else own.nice
        _set_all(os.SCHED_OTHER, nice, 0, SLICE_NS)
        if wanted == "priority" and os.getsid(0) == os.getpid():
            _set_session(nice)
    except OSError as error:
        if wanted != "responsive" and error.errno in (errno.EPERM, errno.EACCES):
            # Each user but root gets this with the default, so that it is not a warning.
            log.log(
                logging.WARNING if wanted == "realtime" else logging.INFO,
                "the kernel does not permit [processors] scheduling = %r (%s): this process may wait longer for a "
                "processor that other programs keep busy. Permit it with %s in the service's unit, or start it as root",
                wanted,
                error.strerror,
                f"LimitNICE={NICE}" if wanted == "priority" else "RestrictRealtime=no and LimitRTPRIO=1",
            )
            schedule("responsive")
        else:
            log.info("the scheduling of this process stays as it is: %s", error.strerror)
        return False
    return True


def _set_all(policy: int, nice: int, priority: int, runtime: int) -> None:
    """Give every thread of this process these attributes, the calling one first."""
    attribute = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, nice, priority, runtime, 0, 0)
    _call(0, 0, attribute, 0)
    for thread in os.listdir("/proc/self/task"):
        try:
            _call(0, int(thread), attribute, 0)
        except ProcessLookupError:
            continue  # it has ended


def _set_session(nice: int) -> None:
    """Set the nice value of this process's session among the sessions of the machine (sched(7), autogroup)."""
    with contextlib.suppress(OSError):  # not there without CONFIG_SCHED_AUTOGROUP; busy after another change
        AUTOGROUP.write_text(str(nice))


def _call(which: int, thread: int, *arguments: object) -> None:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"sched_setattr is not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(numbers[which], thread, *arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
