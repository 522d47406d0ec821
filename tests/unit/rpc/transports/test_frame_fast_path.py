"""Replies processed in the receive buffer: same results as replies read one by one, for parts of any size."""

from __future__ import annotations

import asyncio
import random

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Disconnected, NotFound
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.handshake import encode_hello
from nvpool.rpc.reply_receivers import ReplyBurst, ReplyReceiver
from nvpool.rpc.transports import frame_fast_path
from nvpool.rpc.transports.frame import HEADER_BYTES, HELLO, REPLY, pack_head
from nvpool.rpc.transports.stream import StreamConnection

METHOD = 127
GREETING = Greeting("somebody")


@pytest.fixture(params=(pytest.param("compiled", marks=pytest.mark.compiled), "ordinary"), autouse=True)
def way(request, monkeypatch):
    if request.param == "ordinary":
        monkeypatch.setattr(frame_fast_path, "compiled", None)


class Socket:
    """The loop's transport, as a connection sees it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, frame) -> None:
        self.written.append(bytes(frame))

    def writelines(self, frames) -> None:
        self.written.append(b"".join(map(bytes, frames)))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high, low) -> None:
        pass

    def get_extra_info(self, name):
        return None


def scene(work) -> None:
    async def whole() -> None:
        connection = StreamConnection(
            asyncio.get_running_loop(), GREETING, "stream://nowhere:1", False, SYSTEM_CLOCK
        )
        connection.frames.transport = Socket()
        receive(connection, pack_head(HELLO, 0, 0, 0, encode_hello(GREETING), 0))
        await connection.greeted
        await work(connection)
        connection.abandon("over")

    asyncio.run(whole())


def receive(connection, data: bytes, sizes=()) -> None:
    """Deliver `data` as the loop does, in parts of these sizes."""
    sizes = iter(sizes)
    while data:
        room = connection.get_buffer(-1)
        count = min(len(room), next(sizes, len(data)), len(data))
        room[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


def ask(connection, results: list, name, **named) -> int:
    def on_reply(reply, error) -> None:
        results.append((name, reply and (bytes(reply.message), bytes(reply.payload)), type(error)))

    return connection.submit(
        METHOD, b"question", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=on_reply, **named
    )


def reply(number: int, message: bytes = b"", payload: bytes = b"", status: int = 0) -> bytes:
    return pack_head(REPLY, status, number, 0, message, len(payload)) + payload


def test_replies_complete_in_order_in_parts_of_any_size():
    async def work(connection) -> None:
        numbers = random.Random(7)
        for _ in range(60):
            results, wanted, frames = [], [], []
            asked = [ask(connection, results, number) for number in range(numbers.randrange(1, 30))]
            order = list(enumerate(asked))
            numbers.shuffle(order)
            for name, number in order:
                kind = numbers.randrange(6)
                message = numbers.randbytes(numbers.choice((0, 1, 60, 1000, 1024, 1025, 5000)))
                if kind == 0:
                    code, text = encode_error(NotFound("no"))
                    frames.append(reply(number, text, status=code))
                    wanted.append((name, None, NotFound))
                elif kind == 1:
                    payload = numbers.randbytes(numbers.choice((1, 4096, 70_000)))
                    frames.append(reply(number, message, payload))
                    wanted.append((name, (message, payload), type(None)))
                else:
                    frames.append(reply(number, message))
                    wanted.append((name, (message, b""), type(None)))
                if kind == 5:
                    frames.append(reply(number + 1000, message))  # a reply without a request
            receive(
                connection,
                b"".join(frames),
                iter(lambda: numbers.choice((1, 31, 40, 500, 4096, 1 << 17)), None),
            )
            assert results == wanted and not connection.in_flight and not connection.frames.ended

    scene(work)


@pytest.mark.parametrize("place", (0, 4, 17, 25, HEADER_BYTES + 3))
def test_corrupt_reply_ends_the_connection_after_earlier_ones(place):
    async def work(connection) -> None:
        results = []
        first, second, third = (ask(connection, results, name) for name in "abc")
        spoiled = bytearray(reply(second, b"second"))
        spoiled[place] ^= 64
        receive(connection, reply(first, b"first") + spoiled + reply(third, b"third"))
        assert (
            results[0] == ("a", (b"first", b""), type(None))
            and connection.frames.ended
            and connection.frames.transport.closed
        )
        assert sorted(results[1:], key=lambda one: one[0]) == [
            ("b", None, Disconnected),
            ("c", None, Disconnected),
        ]

    scene(work)


def test_requests_of_callbacks_are_sent_together():
    async def work(connection) -> None:
        results = []

        def more(reply, error) -> None:
            results.append(bytes(reply.message))
            connection.submit(
                METHOD, b"more", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=lambda *_: None
            )

        asked = [
            connection.submit(METHOD, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=more)
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        connection.frames.transport.written.clear()
        receive(connection, b"".join(reply(number, b"%d" % number) for number in asked))
        assert (
            results == [b"%d" % number for number in asked] and len(connection.frames.transport.written) == 1
        )
        assert not connection.frames.reading and len(connection.in_flight) == 3

    scene(work)


def test_callback_may_raise_cancel_or_end_the_connection():
    async def work(connection) -> None:
        results, raised = [], []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: raised.append(context["exception"])
        )

        def broken(reply, error) -> None:
            connection.give_up(third)
            raise ValueError("a bug")

        first = connection.submit(METHOD, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=broken)
        second, third = ask(connection, results, "second"), ask(connection, results, "third")
        receive(connection, reply(first) + reply(third, b"late") + reply(second, b"2"))
        assert results == [("second", (b"2", b""), type(None))] and [type(error) for error in raised] == [
            ValueError
        ]
        last = connection.submit(
            METHOD,
            b"",
            deadline_s=SYSTEM_CLOCK.boottime_s() + 10,
            on_done=lambda *_: connection.abandon("enough"),
        )
        behind = ask(connection, results, "behind")
        receive(connection, reply(last) + reply(behind))
        assert results[1:] == [("behind", None, Disconnected)]

    scene(work)


def test_queued_request_is_sent_when_the_socket_is_writable():
    async def work(connection) -> None:
        results = []
        connection.writable = False
        waits = ask(connection, results, "waits")
        connection.writable = True
        first = ask(connection, results, "first")
        assert list(connection.waiting) == [waits, first]
        connection.pump()
        begun = connection.calls.begun, connection.calls.ended
        receive(connection, reply(first) + reply(waits))
        assert [name for name, *_ in results] == ["first", "waits"]
        assert (connection.calls.begun, connection.calls.ended) == (begun[0], begun[1] + 2)

    scene(work)


class Receiver(ReplyReceiver):
    """Takes messages that begin with T."""

    def __init__(self, heard):
        self.heard, self.burst = heard, ReplyBurst()

    def receive(self, message):
        if not message.startswith(b"T"):
            return None
        self.heard.append(("taken", message))
        return self.burst

    def __call__(self, reply, error):
        if error is None and not reply.payload and self.receive(bytes(reply.message)) is not None:
            return
        self.heard.append(("called", None if reply is None else bytes(reply.message), type(error)))


def test_receiver_gets_messages_and_is_called_for_the_others():
    async def work(connection) -> None:
        heard: list = []
        numbers = [
            connection.submit(METHOD, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=Receiver(heard))
            for _ in range(5)
        ]
        code, text = encode_error(NotFound("no"))
        frames = [
            reply(numbers[0], b"T one"),
            reply(numbers[1], b"other"),
            reply(numbers[2], b"T with bytes", b"payload"),
            reply(numbers[3], text, status=code),
            reply(numbers[4], b"T" * 2000),
        ]
        receive(connection, b"".join(frames))
        assert heard == [
            ("taken", b"T one"),
            ("called", b"other", type(None)),
            ("called", b"T with bytes", type(None)),
            ("called", None, NotFound),
            ("taken", b"T" * 2000),
        ]
        assert not connection.in_flight

    scene(work)
