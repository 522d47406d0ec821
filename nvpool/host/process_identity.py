"""Identities of this host and of its processes, unique across reboots and reused process numbers.

Used by all code that registers a process or checks whether a registered process still runs. Reads /proc and
/etc/machine-id only; never sends signals, never waits.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from typing import NamedTuple


class ProcessIdentity(NamedTuple):
    """Permanent identity of a process: its number, its start time (clock ticks since boot), and the boot."""

    pid: int
    start: int
    boot: str


@cache
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


@cache
def host_id() -> str:
    """Return 16 hex digits for this host, the same after a reboot.

    Processes with equal host ids may be able to share unix sockets, but equality is no proof: virtual
    machines are cloned with their machine-id. So a client that tries such a socket also compares the pool's
    fingerprint.
    """
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid"):
        try:
            with open(path) as file:
                name = file.read().strip()
        except OSError:
            continue
        if name:
            break
    else:
        name = "host " + socket.gethostname()
    return hashlib.sha256(b"nvpool host " + name.encode()).hexdigest()[:16]


@cache
def host_name() -> str:
    """Return the host name for display."""
    return socket.gethostname()


def identity_of(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process; None if it does not run or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # proc(5): field 2 may contain spaces and ")"
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessIdentity(pid, int(fields[19]), boot_id())


def own_identity() -> ProcessIdentity:
    identity = identity_of(os.getpid())
    return identity if identity is not None else ProcessIdentity(os.getpid(), 0, boot_id())


def runs(identity: ProcessIdentity) -> bool:
    return identity_of(identity.pid) == identity
