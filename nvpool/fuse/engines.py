"""FUSE engines: their interface, and the choice between them.

`kernel` speaks the kernel's protocol itself (Linux 5.4 and later), `pyfuse3` goes through libfuse. Both are
built on `fuse/ops/operations`. Used by mountd/server and bench. Each engine's libraries are imported only if
that engine is chosen.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from nvpool.core.errors import InvalidRequest
from nvpool.fuse.mount_point import Mount, MountOptions
from nvpool.fuse.ops.operations import FuseOps
from nvpool.metrics.exposition import Page
from nvpool.shm.request_log import Unanswered

ENGINES = ("auto", "kernel", "pyfuse3")
KERNEL_MIN = (5, 4)
"""The first Linux with version 7.31 of the protocol."""
RESEND_MIN = (6, 9)
"""The first Linux that resends requests that a dead process left unanswered.

On an older one fuse/kernel/replay_engine does that.
"""


class Engine(Protocol):
    """One mount. Call `mount`, then `serve` until it returns, then `close`; `stop` makes `serve` return."""

    name: str

    def mount(self) -> Mount:
        """Mount. On return the mount is in the name space; its requests are answered once `serve` runs.

        InUse, Unavailable, AccessDenied, InvalidRequest: nothing is mounted; the error says why.
        """

    async def serve(self) -> None:
        """Answer requests until the mount is gone or `stop` is called.

        Raises Unavailable if /dev/fuse fails.
        """

    def stop(self) -> None:
        """Accept no further request; `serve` returns when the pending ones are answered."""

    def measure(self, page: Page) -> None:
        """Add this engine's metrics to the page; the pyfuse3 engine has none."""

    def close(self) -> None:
        """Close /dev/fuse and unmount if the mount is still there. Does not wait. May be called twice."""


def engine_of(wanted: str, *, writeback: bool = False) -> str:
    """Resolve `wanted`, one of ENGINES, to an engine's name.

    InvalidRequest: that engine cannot do what is requested.
    """
    name = wanted if wanted != "auto" else "kernel" if kernel_version() >= KERNEL_MIN else "pyfuse3"
    if writeback and name != "kernel":
        raise InvalidRequest(
            "pages are written back by engine kernel only; mount without --writeback, or with --engine kernel"
        )
    if name == "pyfuse3" and importlib.util.find_spec("pyfuse3") is None:
        raise InvalidRequest(
            "engine pyfuse3 needs the library pyfuse3, which is not installed: pip install 'nvpool[pyfuse3]' (a compiler, "
            f"libfuse3-dev), or mount with --engine kernel (Linux {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or newer)"
        )
    return name


def is_held(wanted: bool | None, engine: str) -> bool:
    """Whether a mount by this engine outlives its process, which needs a holder.

    `wanted` None: if possible. InvalidRequest: it is wanted and not possible.
    """
    can = engine == "kernel" and kernel_version() >= KERNEL_MIN
    if wanted and not can:
        raise InvalidRequest(
            f"the mount cannot outlive its process: its engine is {engine}, on Linux {os.uname().release}; "
            f"that needs engine kernel, and Linux {KERNEL_MIN[0]}.{KERNEL_MIN[1]}; mount without --holder"
        )
    return can if wanted is None else wanted


def make_engine(
    wanted: str,
    ops: FuseOps,
    mount_point: Path,
    options: MountOptions,
    on_ready: Callable[[], None] = lambda: None,
    on_burst: Callable[[], None] = lambda: None,
    keep: Callable[[int], Unanswered] | None = None,
) -> Engine:
    """Make the engine `wanted`, which is not mounted yet.

    `on_ready` is called when the kernel has sent its first request (INIT), `on_burst` whenever requests
    arrive. `keep`: opens the request log, for a kernel that does not resend requests; only for engine
    `kernel`. InvalidRequest: as in engine_of.
    """
    if engine_of(wanted, writeback=options.writeback) == "kernel":
        if keep is not None:
            from nvpool.fuse.kernel.replay_engine import ReplayEngine

            return ReplayEngine(ops, mount_point, options, on_ready, on_burst, keep)
        from nvpool.fuse.kernel.connection import KernelEngine

        return KernelEngine(ops, mount_point, options, on_ready, on_burst)
    from nvpool.fuse.pyfuse3_engine import Pyfuse3Engine

    return Pyfuse3Engine(ops, mount_point, options, on_ready, on_burst)


def kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
