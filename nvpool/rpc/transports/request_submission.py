"""Submission of a request in one step: its entry in the connection's table, and its frame.

For callers that send thousands of small requests a second, without a task: a client's writes and changes, a store's offers. A
connection that carries frames over TCP or a unix socket and has room gets the frame directly. Every other
connection gets the request by its `submit`; both send the same bytes.
"""

from __future__ import annotations

from typing import Any

from nvpool.core import primitives
from nvpool.rpc import reply_receivers
from nvpool.rpc.api import IN_FLIGHT_MAX
from nvpool.rpc.transports.frame_stream import GATHER_IN_FLIGHT, JOIN_BYTES
from nvpool.rpc.transports.stream import StreamConnection

PAYLOAD_MAX = JOIN_BYTES
"""Largest payload of `submit`: the frame is one buffer, so that a write copies it once."""
_IN_FLIGHT, _GATHER, _LATEST_MS = IN_FLIGHT_MAX, GATHER_IN_FLIGHT, 0xFFFFFFFF


def submit(
    connection: Any,
    method: int,
    message: bytes,
    payload: Any,
    deadline_s: float,
    now_s: float,
    on_done: Any,
) -> int:
    """Submit a request as `Connection.submit` does; return its number, for `give_up`.

    `payload`: a buffer of PAYLOAD_MAX bytes at most, or None. It was copied on return, so its memory may be
    used for something else, whatever becomes of the request. `now_s`: the present time of the connection's
    clock.
    """
    left_ms = (deadline_s - now_s) * 1000
    if (
        left_ms < 1
        or not isinstance(connection, StreamConnection)
        or connection.upgraded
        or connection.closed
        or not connection.writable
        or connection.waiting
    ):
        return _submit_otherwise(connection, method, message, payload, deadline_s, on_done)
    in_flight: dict[int, Any] = connection.in_flight
    in_flight_count = len(in_flight)
    if in_flight_count >= _IN_FLIGHT:
        return _submit_otherwise(connection, method, message, payload, deadline_s, on_done)
    number = reply_receivers.register(connection, in_flight, on_done, deadline_s, 0, method, now_s)
    deadline_ms = _LATEST_MS
    if left_ms < _LATEST_MS:
        deadline_ms = int(left_ms)
    frame = primitives.request_frame(method, number, deadline_ms, message, payload)
    frames: Any = connection.frames
    gather = in_flight_count + 1 >= _GATHER
    if gather or frames.reading or frames.out:
        frames.send(frame, (), 0, gather)
    else:
        transport = frames.transport
        if not transport.is_closing():
            transport.write(frame)
    return number


def _submit_otherwise(
    connection: Any, method: int, message: bytes, payload: Any, deadline_s: float, on_done: Any
) -> int:
    # The connection may send the bytes later, so they are copied: see `submit`.
    parts = (bytes(payload),) if payload is not None else ()
    number: int = connection.submit(method, message, parts, deadline_s=deadline_s, on_done=on_done)
    return number
