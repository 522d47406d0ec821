"""Frame stream of one connection: reads frames from the loop's transport and writes frames to it.

Both ends of a stream connection (rpc/transports/stream) have one. Unsent frames that arise while received bytes
are processed, or in the same loop iteration, are written together. A frame that is malformed ends the stream
with one logged reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from nvpool.core.errors import AccessDenied, CorruptFrame, NvpoolError
from nvpool.rpc.transports.frame import FrameReader
from nvpool.rpc.transports.socket_options import set_socket_options
from nvpool.security.tls import refusal_of

if TYPE_CHECKING:
    from nvpool.rpc.api import Buffer
    from nvpool.rpc.peer_limits import MeteredTransport

JOIN_BYTES = 32 << 10
"""Largest frame that is joined into one buffer: the copy costs less than a vectored write adds."""

GATHER_BYTES = 256 << 10
"""Size at which frames that are collected during reading are sent at the latest."""

WRITE_HIGH_BYTES = 1 << 20
WRITE_LOW_BYTES = 256 << 10
"""Unsent bytes in the loop's transport at which we stop adding (high) and resume (low)."""

GATHER_IN_FLIGHT = 4
"""Number of pending requests from which on more are likely in the same loop iteration.

The frames of that iteration are then sent together at its end.
"""


class FrameOwner(Protocol):
    """Connection that gives the frames of a stream their meaning."""

    def deliver(
        self, kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload: memoryview
    ) -> None:
        """Process a received frame. CorruptFrame: the stream ends, and the reason is logged."""

    def place(self, kind: int, number: int, payload_bytes: int) -> memoryview | None:
        """Destination for a payload; see FrameReader."""

    def peer_text(self) -> str:
        """Name of the peer for logs and errors."""

    def log_end(self, reason: str) -> None:
        """Log that the stream ends by the peer's fault."""

    def on_end(self, reason: str) -> None:
        """Called once, when the stream ends."""

    def turned_away(self, error: NvpoolError) -> None:
        """Called before `on_end` if one side's certificate was refused."""


class FrameStream:
    """Frames of one connection, over the transport of an asyncio.BufferedProtocol.

    The protocol passes on the loop's calls: `made`, `receive` and `lost`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: FrameOwner) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | MeteredTransport = None  # type: ignore[assignment]  # see below
        """None until `made`, which the loop calls before anything else."""
        self.reader = FrameReader(owner.deliver, owner.place)
        self.out: list[Buffer] = []
        """Unsent frames; `flush` sends them."""
        self.out_bytes = 0
        self.reading = False
        """Whether received bytes are being processed; at the end of that `out` is sent."""
        self.ended = ""
        """Reason of the end; "" while the stream is open."""
        self.gone: asyncio.Future[None] = loop.create_future()
        """Done when the transport is closed."""
        self._owner = owner
        self._out_scheduled = False

    # -- called by the protocol

    def made(self, transport: asyncio.BaseTransport) -> None:
        """Use this transport from now on."""
        self.transport = stream = cast("asyncio.Transport", transport)
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        set_socket_options(stream.get_extra_info("socket"))

    def receive(self, nbytes: int) -> None:
        """Process the bytes that the loop has just received into the reader's buffer."""
        self.reading = True
        try:
            self.reader.buffer_updated(nbytes)
        except CorruptFrame as error:
            self.end(str(error), logged=True)
        finally:
            self.reading = False
            if self.out:
                self.flush()

    def lost(self, error: Exception | None) -> None:
        """End the stream, if it has not ended yet, and release its memory."""
        refusal = refusal_of(error)
        if refusal:
            self._owner.turned_away(AccessDenied(f"{self._owner.peer_text()}: {refusal}"))
        self.end(
            f"the connection was lost: {error.strerror or error}"
            if isinstance(error, OSError)
            else "the connection was lost"
        )
        self.reader.release()
        # The stream has ended, so the owner is not called again; a reference cycle would keep both.
        self._owner = None  # type: ignore[assignment]  # see above
        if not self.gone.done():
            self.gone.set_result(None)

    # -- reading

    def resume_reading(self) -> None:
        """Deliver frames kept in the buffer, then resume receiving, unless the reader stalls again."""
        if self.ended:
            return
        self.reader.stalled = False
        if not self.reading:
            self.receive(0)
        if not self.reader.stalled and not self.ended:
            self.transport.resume_reading()

    def pause_reading(self) -> None:
        """Deliver and receive nothing more until `resume_reading`."""
        self.reader.stalled = True
        if not self.ended:
            self.transport.pause_reading()

    # -- writing

    def send(self, head: bytes, payload: Sequence[Buffer], payload_bytes: int, gather: bool) -> None:
        """Send a frame; with `gather`, or during reading, together with the frames that follow."""
        out = self.out
        if not payload_bytes:
            out.append(head)
        elif payload_bytes <= JOIN_BYTES:
            out.append(b"".join((head, *payload)))
        else:
            out.append(head)
            out.extend(payload)
        self.out_bytes += len(head) + payload_bytes
        if (self.reading or gather) and self.out_bytes < GATHER_BYTES:
            if not self.reading and not self._out_scheduled:
                self._out_scheduled = True
                self.loop.call_soon(self._flush_gathered)
        else:
            self.flush()

    def _flush_gathered(self) -> None:
        self._out_scheduled = False
        if self.out:
            self.flush()

    def flush(self) -> None:
        """Send all frames of `out`."""
        out, self.out = self.out, []
        total, self.out_bytes = self.out_bytes, 0
        if self.transport.is_closing():
            return
        if len(out) == 1:
            self.transport.write(out[0])
        elif total <= JOIN_BYTES:
            self.transport.write(b"".join(out))
        else:
            self.transport.writelines(out)

    # -- the end

    def end(self, reason: str, logged: bool = False) -> None:
        """Close the stream once.

        Callers get `reason`; with `logged`, for a peer's fault, the log gets it too.
        """
        if self.ended:
            return
        self.ended = reason
        self.reader.stalled = True
        if logged:
            self._owner.log_end(reason)
        if self.out:
            self.flush()
        self.transport.close()
        self._owner.on_end(reason)

    def abandon(self, reason: str) -> None:
        """Close the stream, if it was made at all."""
        if self.transport is not None:
            self.end(reason)

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until everything written has been sent; after timeout_s drop the rest."""
        await asyncio.wait([self.gone], timeout=timeout_s)
        if not self.gone.done():
            self.transport.abort()
            await self.gone
