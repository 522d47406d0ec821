"""Answers that need no Call: a listener's handler may answer the frames that have just come, from bytes to bytes.

It is asked where nothing stands before them: all that came earlier was taken, answers are being taken, the greeting is over,
nobody drains. What it leaves, from the first frame on that it does not answer, is read as always. See Handler in
rpc/api.
"""

from __future__ import annotations

from nvpool.core.compiled import load_compiled

_frame = load_compiled("nvpool.rpc.transports._frame")


class HearsAtOnce:
    """Beside _End and Asker of stream_transport, before them in the order of bases: answers without an error are told from the
    buffer in which they came in one compiled step (`_frame.hear`), where that is."""

    upgraded = False
    """Whether answers may come by another way than these frames; see rpc/transports/rdma."""

    def buffer_updated(self, count: int) -> None:
        if _frame is not None and not self.upgraded:
            count = _frame.hear(self, self._reader, count)
            if count < 0:
                return
        super().buffer_updated(count)


class AnswersAtOnce:
    """Beside _End and Answerer of stream_transport, before them in the order of bases. Connections of a peer that is not
    trusted take turns; see limits.Share.takes_turn."""

    def buffer_updated(self, count: int) -> None:
        if self._share is not None and count and not self._share.takes_turn():
            self._stop_reading()
            super().buffer_updated(count)  # which keeps them
            return
        at_once = self._at_once
        if at_once is not None and count and not self._out:
            buffer = self._reader.empty
            if buffer is not None and self._greeted and not self.draining:
                out = self._out
                taken = at_once(buffer, count, self._in_work, self._tally, out, self._later)
                if taken:
                    if taken == count and len(out) < 2:
                        if out:
                            self._transport.write(out.pop())
                        return
                    self._out_bytes += sum(map(len, out))
                    self._reader.skip(taken)
        super().buffer_updated(count)

    def take_turn(self) -> None:
        """Go on with what is kept, unless something else than the turn is against it."""
        if self._may_read:
            self._reader.stalled = False
            self.buffer_updated(self._reader.rewind())
            if not self._reader.stalled:
                self._go_on_reading()
