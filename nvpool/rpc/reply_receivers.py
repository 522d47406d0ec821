"""Receivers of replies that are sent many at a time, and the entry of their requests in a connection's table.

A reply that reaches a client connection in its receive buffer is passed to its receiver without a Reply object: to
a `ReplyReceiver` as the bytes of a message without payload, to a `PayloadReceiver` in the buffer. The receivers of
one sender return the same `ReplyBurst`. Its `go_on` is called once the replies that arrived together are handled, and
sends the next requests. Where frames are not read by the compiled module (rpc/transports/_frame), a receiver is called
as any other `on_done`. Used by the fast paths of the mount and of the store.
"""

from __future__ import annotations

from typing import Any

from nvpool.core.primitives import ReceivedReply

_NUMBER_MASK = 0xFFFFFFFF


class ReplyBurst:
    """Sender of many requests that continues when some of its replies have been handled.

    `go_on` is called after the last reply that arrived, and also after each `turn` replies if more arrived;
    with `turn` 0 only after the last.
    """

    def __init__(self, turn: int = 0) -> None:
        self.turn = turn

    def go_on(self) -> None:
        """Continue after some replies."""


class ReplyReceiver:
    """An `on_done` that may receive the message of a successful reply. Only for requests without `into`."""

    def receive(self, message: bytes) -> ReplyBurst | None:
        """Handle the reply, and return the burst that continues; None: nothing has happened.

        After None the object is called as any other `on_done`.
        """
        return None


class PayloadReceiver:
    """An `on_done` that may receive a successful reply with its payload, without a copy."""

    __slots__ = ()

    def receive_reply(self, reply: ReceivedReply) -> ReplyBurst | None:
        """Handle the reply, which is valid until return; the result is that of `ReplyReceiver.receive`."""
        return None


def next_number(connection: Any, in_flight: dict[int, Any], deadline_s: float) -> int:
    """Number for a new request; the connection's timer rings at its deadline at the latest."""
    number = int(connection.number) + 1 & _NUMBER_MASK
    while not number or number in in_flight:
        number = number + 1 & _NUMBER_MASK
    connection.number = number
    if deadline_s < connection.timer_s:
        connection.arm(deadline_s)
    return number


def register(
    connection: Any,
    in_flight: dict[int, Any],
    on_done: Any,
    deadline_s: float,
    room: Any,
    method: Any,
    now_s: float,
    into: memoryview | None = None,
) -> int:
    """Add a request that is sent now to the connection's table, `in_flight`, and return its number.

    The caller has checked that the connection is open and writable and has room for it, and sends the frame.
    """
    number = next_number(connection, in_flight, deadline_s)
    in_flight[number] = (on_done, into, deadline_s, room, method, now_s)
    connection.calls.begun += 1
    return number
