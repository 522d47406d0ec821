"""All compiled fast paths of one kernel engine, in their order.

A READ is offered to the paths for small files, for short-circuit reads and for reads from stores, then to its
handler in fuse/dispatch. With cached replies these attempts are made where requests are read, so that a READ
that reaches a handler was declined already. At the end of a burst new files are sent first, then the reads,
then the deferred closes. Made by `fuse/kernel/connection`; without `start` every request takes the slow path.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.fuse.dispatch import KernelRequests
from nvpool.fuse.fast_path.cached_replies import CachedReplyPath
from nvpool.fuse.fast_path.creates import CreateFastPath
from nvpool.fuse.fast_path.read_fallback import ReadFallback
from nvpool.fuse.fast_path.read_plan import ReadFastPath
from nvpool.fuse.fast_path.small_files import SmallFileReadPath
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import PendingRequests
from nvpool.fuse.protocol.constants import Op
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState


class FastPaths:
    """See the module.

    `slow`: the handlers of requests that no path takes. `take_requests` reads and answers the requests that
    wait; `broken` reports a bug to the caller of the request in the buffer.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        pending: PendingRequests,
        slow: KernelRequests,
        take_requests: Callable[[], None],
        broken: Callable[[Exception], None],
    ) -> None:
        fallback = ReadFallback(requests, ops, replies, pending)
        some_ended = pending.some_ended
        self.small_files = SmallFileReadPath(requests, ops, replies, fallback, some_ended)
        self.reads = ReadFastPath(requests, ops, replies, fallback, some_ended, take_requests)
        self.cached_replies = CachedReplyPath(requests, ops, replies, broken)
        self.creates = CreateFastPath(requests, ops, replies, pending, take_requests, slow)
        self._reads = self.small_files, self.reads
        self._takers: tuple[Callable[[int], bool], ...] = ()
        self._slow_read = slow.on_read

    def start(self) -> None:
        """Start the paths that are possible here; call this on the loop, with the descriptor set."""
        self.reads.start()
        self.small_files.start()
        self._takers = self.takers()
        self.cached_replies.start(self._takers)
        self.creates.start()

    def takers(self) -> tuple[Callable[[int], bool], ...]:
        """Functions that may take a READ, in the order of the attempts."""
        return tuple(one.take for one in (self.small_files.compiled, self.reads.plan) if one is not None)

    def put_in(self, table: list[Callable[[int], None]]) -> None:
        """Replace the handlers in `table` of the operations that a path may take."""
        table[Op.READ] = self.on_read
        table[Op.CREATE] = self.creates.on_create

    def on_read(self, count: int) -> None:
        """Handle a READ."""
        if self.cached_replies.replies is None:  # otherwise they have declined it already
            for take in self._takers:
                if take(count):
                    return
        self._slow_read(count)

    def submit(self) -> None:
        """Send or submit the collected requests, at the end of a burst.

        The deferred closes are answered after the creates of this burst have been sent.
        """
        try:
            self.creates.submit()
            if self.small_files.compiled is not None:
                self.small_files.compiled.send()
            self.reads.submit()
        finally:
            self.cached_replies.answer_deferred()

    @property
    def read_bytes(self) -> int:
        """Bytes that were read by the fast paths and are not counted in the state yet."""
        return sum(path.read_bytes for path in self._reads)

    async def stop(self) -> None:
        """Take no more requests, and wait for the drive's reads."""
        self._takers = ()
        self.creates.stop()
        self.cached_replies.stop()
        self.small_files.stop()
        await self.reads.stop()
