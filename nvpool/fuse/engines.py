"""What an engine is given, what it does, and which one is taken.

`kernel` speaks the kernel's protocol itself (Linux 5.4 and later), `pyfuse3` goes through libfuse. Both stand on
`fuse/ops/operations`. Called by mountd/server and bench; libraries are imported only by the engine that is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from nvpool.core.errors import InvalidRequest
from nvpool.fuse.mount_point import Mount
from nvpool.fuse.ops.operations import FuseOps
from nvpool.metrics.exposition import Page
from nvpool.shm.request_log import Unanswered

ENGINES = ("auto", "kernel", "pyfuse3")
KERNEL_MIN = (5, 4)
"""The first Linux with version 7.31 of the protocol."""
RESEND_MIN = (6, 9)
"""The first Linux that hands out again what a process has not answered; before it fuse/kernel/replay_log does."""


class MountOptions(NamedTuple):
    pool: str
    read_only: bool = False
    allow_other: bool = True
    extra: tuple[str, ...] = ()
    """Further options of mount(8): noexec, suid, dev, …"""
    max_read: int = 0
    """Bytes in one READ; 0: as many as the kernel allows. As the others below, only of engine `kernel`."""
    max_background: int = 128
    """Requests in work that nobody waits for (read-ahead, write-back, large direct I/O); more wait in the kernel."""
    congestion_threshold: int = 0
    """Of those, from how many on the kernel reads less ahead; 0: three quarters of max_background."""
    writeback: bool = False
    """Let the kernel keep written pages and write them later. Only where nobody else changes what is mounted."""
    source: str = ""
    """What /proc/mounts shows as mounted; "": nvpool:POOL."""

    acl: bool = True
    """The kernel enforces access control lists, and asks for them when somebody but the owner wants a right."""

    @property
    def shown(self) -> str:
        return self.source or f"nvpool:{self.pool}"


class Engine(Protocol):
    """One mount. `mount`, then `serve` until it returns, then `close`; `stop` makes `serve` return."""

    name: str

    def mount(self) -> Mount:
        """The mount is in the name space when this returns; requests are answered once `serve` runs.

        InUse, Unavailable, AccessDenied, InvalidRequest   not mounted, and why
        """

    async def serve(self) -> None:
        """Answer requests until the mount is gone or `stop` is called. Unavailable when /dev/fuse fails."""

    def stop(self) -> None:
        """Take no further request; `serve` returns when those in work are answered."""

    def measure(self, page: Page) -> None:
        """Put what it has counted on the page; libfuse is not counted."""

    def close(self) -> None:
        """Close /dev/fuse and take the mount away if it is still there. Does not wait. May be called twice."""


def engine_of(wanted: str, *, writeback: bool = False) -> str:
    """`wanted`, one of ENGINES, or what auto means here. InvalidRequest where it can not do what is asked for."""
    name = wanted if wanted != "auto" else "kernel" if kernel_version() >= KERNEL_MIN else "pyfuse3"
    if writeback and name != "kernel":
        raise InvalidRequest("pages are written back by engine kernel only; mount without --writeback, or with --engine kernel")
    return name


def is_held(wanted: bool | None, engine: str) -> bool:
    """Whether a mount by this engine outlives its process; `wanted` None: where it can. InvalidRequest where it can not and is
    to."""
    can = engine == "kernel" and kernel_version() >= KERNEL_MIN
    if wanted and not can:
        raise InvalidRequest(f"the mount can not outlive its process: its engine is {engine}, on Linux {os.uname().release}; "
                             f"that needs engine kernel, and Linux {KERNEL_MIN[0]}.{KERNEL_MIN[1]}; mount without --holder")
    return can if wanted is None else wanted


def make_engine(wanted: str, ops: FuseOps, mount_point: Path, options: MountOptions,
                on_ready: Callable[[], None] = lambda: None, on_burst: Callable[[], None] = lambda: None,
                keep: Callable[[int], Unanswered] | None = None) -> Engine:
    """`on_ready` is called when the kernel has greeted, `on_burst` whenever requests have come. `keep`: where requests are
    kept, because the kernel does not hand them out again; of engine kernel. InvalidRequest as engine_of."""
    if engine_of(wanted, writeback=options.writeback) == "kernel":
        if keep is not None:
            from nvpool.fuse.kernel.replay_log import KeepingEngine
            return KeepingEngine(ops, mount_point, options, on_ready, on_burst, keep)
        from nvpool.fuse.kernel.connection import KernelEngine
        return KernelEngine(ops, mount_point, options, on_ready, on_burst)
    from nvpool.fuse.pyfuse3_engine import Pyfuse3Engine
    return Pyfuse3Engine(ops, mount_point, options, on_ready, on_burst)


def kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
