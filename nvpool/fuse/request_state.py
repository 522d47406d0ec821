"""State of the kernel's requests that the parts of the kernel engine share.

One object for each engine: the request that is being handled, the pending requests, and whether the engine
reads. The compiled fast paths use its attributes too. It has no behaviour: `fuse/pending_requests` keeps the
table, `fuse/reply_sender` sends the replies, and `fuse/kernel/connection` reads requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from nvpool.fuse.metrics import FuseTimes
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import RESENT

if TYPE_CHECKING:
    from nvpool.fuse.ops.operations import FuseOps

FIRST = RESENT - 1
"""Mask for the number of a request: removes the RESENT bit."""


class Step(Protocol):
    """Operation that a pending request waits for."""

    on_end: Any
    """Called with (result, None) or (None, error)."""

    def cancel(self) -> bool:
        """End with an error soon. False: it has ended."""


class RequestState:
    """See the module. `buffer`: memory into which requests are read."""

    __slots__ = (
        "fd",
        "buffer",
        "view",
        "work",
        "forwarded",
        "interrupted",
        "late",
        "held",
        "since_s",
        "deferred",
        "reading",
        "taking",
        "took",
        "stopped",
        "leaving",
        "setxattr_extended",
        "spent",
        "read_bytes",
        "written_bytes",
        "keep_attr",
        "keep_entry",
        "keep_absent",
        "loop",
    )

    def __init__(self, ops: FuseOps, buffer: bytearray | memoryview) -> None:
        self.fd = -1
        """Descriptor of /dev/fuse."""
        self.buffer = buffer
        """The current request. A handler keeps no part of it after return."""
        self.view = memoryview(buffer)
        self.work: dict[int, tuple[Step, int, int, float]] = {}
        """Pending requests: unique -> (step, pid of the caller, operation, start time)."""
        self.forwarded: dict[int, int] = {}
        """Request that a read worker forwarded -> the descriptor that it was read from."""
        self.interrupted: dict[int, int] = {}
        """unique -> pid, while it must be checked whether the caller dies."""
        self.late: list[bytes] = []
        """RELEASE requests that are handled at the end of the burst."""
        self.held: dict[int, Any] = ops.held
        """Requests whose reply must be reported to `FuseOps.answered`."""
        self.since_s = 0.0
        """Time since which requests are counted together."""
        self.deferred = 0
        """Of the requests read since `since_s`: how many are pending or late."""
        self.reading = False
        self.taking = False
        """Whether requests are being read and answered now."""
        self.took = 0
        """Requests read the last time."""
        self.stopped = False
        self.leaving = False
        self.setxattr_extended = False
        """As agreed with the kernel."""
        self.spent = FuseTimes()
        self.read_bytes = self.written_bytes = 0
        self.keep_attr = replies.seconds(ops.options.attr_timeout_s)
        self.keep_entry = replies.seconds(ops.options.entry_timeout_s)
        self.keep_absent = replies.seconds(ops.options.negative_timeout_s)
        self.loop: asyncio.AbstractEventLoop
