"""Answers to the kernel for which nobody has to be asked, in one compiled step from the request to the answer.

A file that is made or read is half a dozen requests, most of which only repeat what is known here: attributes of the directory
after each change of it, a name that is there or not, file capabilities before each write, a close with nothing to say. In
Python the way of such an answer (unpack, ask `ops`, ask the client, pack) is some 10 µs, of which 3 are the system calls.
Here they are answered in the loop that reads the requests, where a compiler was (`_known`); its twin is the way of every
request (kernel_requests to client/state/attr_cache), which says the same.

Only plain sailing: GETATTR and LOOKUP of what is believed or lent, LOOKUP of a name that is known to be absent, OPEN for
reading of what is lent with a right to read it, GETXATTR of file capabilities that are known not to be there, FLUSH of what was
not written, RELEASE (put off, as always) of what has no locks and nothing left to store, FORGET. Whatever else it is, and
whatever has to be asked, is left before anything has happened: READs to the compiled ones (smallreads, plainreads, farreads),
all others to their handlers. What the kernel was told is noted as always.

*Closes of new files that others wait behind.* Threads that make files in one directory are one behind the other for the kernel:
while one is told that its file is closed, the next one is on its way to its own CREATE, and both want the same processor. So
where the last file was made by another thread or process than the one before it, a FLUSH with nothing to flush is answered at
the end of the burst, mostly when the next CREATE has left for its shard, and this process waits for that anyway. A burst ends
when nothing more comes within the look-out (some 20 µs), at once where something is in work, and after BURST_MAX requests. A
thread that makes files alone is answered at once.

KnownAnswers is what fuse/kernel/connection has of it, above fuse/fast_path/small_files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.core.compiled import load_compiled
from nvpool.fuse.fast_path.small_files import SmallReading
from nvpool.fuse.kernel.dispatch import KernelRequests

_cached_replies = load_compiled("nvpool.fuse.fast_path._cached_replies")


class KnownAnswers(SmallReading):
    """`_known` answers what is in `_buffer`, where it can; None where that can not be here: no compiler, nothing below that
    knows anything."""

    _known: Any = None

    def _begin_plain_reads(self) -> None:
        super()._begin_plain_reads()
        below = self._ops.knows_by
        if _cached_replies is not None and below is not None:
            self._known = _cached_replies.Known(self, self._ops, below, self._ops.shows_subtree, self._takers())

    def _takers(self) -> tuple[Callable[[int], bool], ...]:
        """Who may begin the READ in the buffer, where it is one for compiled reads; the first to be asked first."""
        return tuple(reads.take for reads in (self._small, self._plain, self._far) if reads is not None)

    def _on_read(self, count: int) -> None:
        if self._known is None:
            super()._on_read(count)
        else:  # the compiled ones have left it already
            KernelRequests._on_read(self, count)

    def _following(self, most: int) -> tuple[int, int]:
        known = self._known
        return super()._following(most) if known is None else (known.next_request(most), known.taken)

    def _submit_plain_reads(self) -> None:
        """At the end of a burst: who has closed a file goes on when the creates of this burst have left."""
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
