"""Fast path for replies from the caches: one compiled step from the request to the reply.

Creating or reading a file takes half a dozen requests. Most only repeat what is cached here: attributes of
the directory after each change of it, a name that exists or not, file capabilities before each write, a close
with nothing to flush. In Python such a reply (decode, call `ops`, call the client, encode) takes some 10 µs,
of which 3 are the system calls. Here the loop that reads requests answers them, if the compiled module was
built (`_cached_replies`). The reference implementation is the slow path of every request (fuse/dispatch to
client/state/metadata_cache), which gives the same replies.

The fast path covers:

* GETATTR and LOOKUP of entries that are fresh or covered by a lease, and LOOKUP of a name that is known to be
  absent;
* OPEN for reading of a file under a lease with a right to read it;
* GETXATTR of file capabilities that are known to be absent;
* FLUSH of a file that was not written;
* RELEASE (deferred, as always) of a file that has no locks and nothing left to store; FORGET.

All other requests, and all that need a query, are declined without side effects: READs go to the compiled
reads (small_files, local_reads, remote_reads), others to their handlers. What the kernel was given is
recorded as on the slow path.

*Deferred closes of new files.* Threads that create files in one directory run one after the other in the
kernel: while one thread gets the reply to its close, the next is on its way to its own CREATE, and both want
the same processor. So if different threads or processes created the last two files, a FLUSH with nothing to
flush is answered at the end of the burst. Mostly the next CREATE has then been sent to its shard,
and this process waits for that anyway. A burst ends when no request arrives within the polling time (some
20 µs), immediately if a request is pending, and after BURST_MAX requests. A thread that creates files alone
gets its reply immediately.

CachedReplyPath is the part of fuse/kernel/connection that uses this (see fuse/fast_path/paths).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState

_cached_replies = load_compiled("nvpool.fuse.fast_path._cached_replies")


class CachedReplyPath:
    """Has `compiled`, which answers the request in the buffer if it can.

    `compiled` is None without the compiled module, and if the layer below has no caches. `broken` reports a
    bug to the caller of the request in the buffer.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        broken: Callable[[Exception], None],
    ) -> None:
        self.requests = requests
        self._ops = ops
        self.compiled: Any = None
        # called by the compiled module
        self.broken = broken
        self.fail = replies.fail
        self.answer_refused = replies.answer_refused

    def start(self, takers: tuple[Callable[[int], bool], ...]) -> None:
        """`takers`: the compiled reads that may take a READ, in the order of the attempts."""
        below = self._ops.knows_by
        if _cached_replies is not None and below is not None:
            self.compiled = _cached_replies.CachedReplies(
                self, self._ops, below, self._ops.view.shows_subtree, takers
            )

    def answer_deferred(self) -> None:
        """Reply to deferred closes, at the end of a burst."""
        if self.compiled is not None:
            self.compiled.answer_put_off()

    def release_all(self, late: list[bytes]) -> list[bytes]:
        """Release files in one compiled step if possible; returns the requests that were not handled."""
        return late if self.compiled is None else self.compiled.release_all(late)

    def stop(self) -> None:
        """Answer no more requests."""
        self.compiled = None
