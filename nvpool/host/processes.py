"""This host and the processes on it: names that tell them from all others, also across reboots and reused numbers.

Called by everything that registers itself or asks whether another process is still the one that registered. Reads
/proc and /etc/machine-id only; never signals, never waits.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from typing import NamedTuple


class Identity(NamedTuple):
    """A process for ever: its number, when it started (clock ticks since boot), and which boot."""

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
    """16 hex digits of this host, the same after a reboot. Two that are equal may share unix sockets: worth a try, no proof
    (virtual machines get cloned with their machine-id), so whoever tries one compares the pool's fingerprint as well."""
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
    """For people."""
    return socket.gethostname()


def identity_of(pid: int) -> Identity | None:
    """None when no such process runs; one that has ended but was not waited for yet does not run."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # proc(5): the second field may hold spaces and brackets
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Identity(pid, int(fields[19]), boot_id())


def own_identity() -> Identity:
    identity = identity_of(os.getpid())
    return identity if identity is not None else Identity(os.getpid(), 0, boot_id())


def runs(identity: Identity) -> bool:
    return identity_of(identity.pid) == identity
