"""Answers that are told from the buffer in which they came: as those that are read one by one, however they are cut."""

from __future__ import annotations

import asyncio
import random

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Disconnected, NotFound
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.handshake import encode_hello
from nvpool.rpc.transports import fast_replies
from nvpool.rpc.transports.frame import HEADER_BYTES, HELLO, REPLY, pack_head
from nvpool.rpc.transports.stream import StreamConnection

METHOD = 127
GREETING = Greeting("somebody")


@pytest.fixture(params=("compiled", "ordinary"), autouse=True)
def way(request, monkeypatch):
    if request.param == "ordinary":
        monkeypatch.setattr(fast_replies, "_frame", None)
    elif fast_replies._frame is None:
        pytest.skip("it is not compiled here")


class Socket:
    """What the loop's transport is to a connection."""

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
        connection._transport = Socket()
        receive(connection, pack_head(HELLO, 0, 0, 0, encode_hello(GREETING), 0))
        await connection.greeted
        await work(connection)
        connection._end("over")

    asyncio.run(whole())


def receive(connection, data: bytes, sizes=()) -> None:
    """As the loop does, in pieces of these sizes."""
    sizes = iter(sizes)
    while data:
        room = connection.get_buffer(-1)
        count = min(len(room), next(sizes, len(data)), len(data))
        room[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


def ask(connection, told: list, name, **named) -> int:
    def tell(reply, error) -> None:
        told.append((name, reply and (bytes(reply.message), bytes(reply.payload)), type(error)))

    return connection.submit(
        METHOD, b"question", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=tell, **named
    )


def reply(number: int, message: bytes = b"", payload: bytes = b"", status: int = 0) -> bytes:
    return pack_head(REPLY, status, number, 0, message, len(payload)) + payload


def test_answers_of_any_kind_are_told_in_their_order_however_they_are_cut():
    async def work(connection) -> None:
        numbers = random.Random(7)
        for _ in range(60):
            told, wanted, frames = [], [], []
            asked = [ask(connection, told, number) for number in range(numbers.randrange(1, 30))]
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
                    frames.append(reply(number + 1000, message))  # nobody asked that any more
            receive(
                connection,
                b"".join(frames),
                iter(lambda: numbers.choice((1, 31, 40, 500, 4096, 1 << 17)), None),
            )
            assert told == wanted and not connection._in_flight and not connection._ended

    scene(work)


@pytest.mark.parametrize("place", (0, 4, 17, 25, HEADER_BYTES + 3))
def test_an_answer_that_was_changed_on_its_way_ends_the_connection_after_those_before_it(place):
    async def work(connection) -> None:
        told = []
        first, second, third = (ask(connection, told, name) for name in "abc")
        spoiled = bytearray(reply(second, b"second"))
        spoiled[place] ^= 64
        receive(connection, reply(first, b"first") + spoiled + reply(third, b"third"))
        assert (
            told[0] == ("a", (b"first", b""), type(None))
            and connection._ended
            and connection._transport.closed
        )
        assert sorted(told[1:], key=lambda one: one[0]) == [
            ("b", None, Disconnected),
            ("c", None, Disconnected),
        ]

    scene(work)


def test_what_is_asked_by_those_who_are_told_leaves_together_when_all_are():
    async def work(connection) -> None:
        told = []

        def more(reply, error) -> None:
            told.append(bytes(reply.message))
            connection.submit(
                METHOD, b"more", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=lambda *_: None
            )

        asked = [
            connection.submit(METHOD, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=more)
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        connection._transport.written.clear()
        receive(connection, b"".join(reply(number, b"%d" % number) for number in asked))
        assert told == [b"%d" % number for number in asked] and len(connection._transport.written) == 1
        assert not connection._reading and len(connection._in_flight) == 3

    scene(work)


def test_who_is_told_may_raise_give_up_others_or_end_the_connection():
    async def work(connection) -> None:
        told, raised = [], []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: raised.append(context["exception"])
        )

        def broken(reply, error) -> None:
            connection.give_up(third)
            raise ValueError("a bug")

        first = connection.submit(METHOD, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 10, on_done=broken)
        second, third = ask(connection, told, "second"), ask(connection, told, "third")
        receive(connection, reply(first) + reply(third, b"late") + reply(second, b"2"))
        assert told == [("second", (b"2", b""), type(None))] and [type(error) for error in raised] == [
            ValueError
        ]
        last = connection.submit(
            METHOD,
            b"",
            deadline_s=SYSTEM_CLOCK.boottime_s() + 10,
            on_done=lambda *_: connection._end("enough"),
        )
        behind = ask(connection, told, "behind")
        receive(connection, reply(last) + reply(behind))
        assert told[1:] == [("behind", None, Disconnected)]

    scene(work)


def test_who_waits_for_a_place_is_sent_when_one_is_free():
    async def work(connection) -> None:
        told = []
        connection._writable = False
        waits = ask(connection, told, "waits")
        connection._writable = True
        first = ask(connection, told, "first")
        assert list(connection._waiting) == [waits, first]
        connection._pump()
        begun = connection._calls.begun, connection._calls.ended
        receive(connection, reply(first) + reply(waits))
        assert [name for name, *_ in told] == ["first", "waits"]
        assert (connection._calls.begun, connection._calls.ended) == (begun[0], begun[1] + 2)

    scene(work)
