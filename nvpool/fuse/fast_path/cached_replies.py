"""Fast path for replies from the caches: one compiled step from the request to the reply.

Creating or reading a file takes half a dozen requests. Most only repeat what is cached here: attributes of
the directory after each change of it, a name that exists or not, file capabilities before each write, a close
with nothing to flush. In Python such a reply (decode, call `ops`, call the client, encode) takes some 10 µs,
of which 3 are the system calls. Here the loop that reads requests answers them, if the compiled module was
built (`_known`). The reference implementation is the slow path of every request (fuse/dispatch to
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

CachedReplyPath is the part of fuse/kernel/connection that uses this, above fuse/fast_path/small_files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.core.compiled_loader import load_compiled
from nvpool.fuse.fast_path.small_files import SmallFileReadPath

_cached_replies = load_compiled("nvpool.fuse.fast_path._cached_replies")


class CachedReplyPath(SmallFileReadPath):
    """Adds `_known`, which answers the request in `_buffer` if it can.

    `_known` is None without the compiled module, and if the layer below has no caches.
    """

    _known: Any = None

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        below = self._ops.knows_by
        if _cached_replies is not None and below is not None:
            self._known = _cached_replies.CachedReplies(
                self, self._ops, below, self._ops.view.shows_subtree, self._takers()
            )

    def _takers(self) -> tuple[Callable[[int], bool], ...]:
        """The compiled reads that may take a READ, in the order of the attempts."""
        return tuple(reads.take for reads in (self._small, self._plain, self._far) if reads is not None)

    def _on_read(self, count: int) -> None:
        if self._known is None:
            super()._on_read(count)
        else:  # the compiled reads have declined it already
            self._read_uncompiled(count)

    def _following(self, most: int) -> tuple[int, int]:
        known = self._known
        return super()._following(most) if known is None else (known.next_request(most), known.taken)

    def _submit_plain_reads(self) -> None:
        """At the end of a burst: reply to deferred closes, after the creates of this burst have been sent."""
        try:
            super()._submit_plain_reads()
        finally:
            self._answer_put_off()

    def _answer_put_off(self) -> None:
        if self._known is not None:
            self._known.answer_put_off()

    def _not_released(self, late: list[bytes]) -> list[bytes]:
        return late if self._known is None else self._known.release_all(late)

    async def _end_plain_reads(self) -> None:
        self._known = None
        await super()._end_plain_reads()
