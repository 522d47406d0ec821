"""Contract of a Transport: `check_all(transport, endpoint)` on the running loop; `endpoint()` returns a free
endpoint.

Used by tests/contract/test_transport.py and by authors of plug-ins. Each check listens at its own endpoint
and leaves nothing behind. Together they take a few seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    Bug,
    Busy,
    DeadlineExceeded,
    Disconnected,
    Draining,
    InUse,
    NotFound,
    NvpoolError,
    ProtocolMismatch,
    StaleCut,
    TooBig,
    Unreachable,
)
from nvpool.rpc.api import (
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Call,
    Connection,
    Greeting,
    Handler,
    Listener,
    Transport,
)

PATIENCE_S = 20.0
"""Longer than any step takes on a busy machine; a check that reaches it has failed."""

SERVER = Greeting("the server", "pool-a")
CLIENT = Greeting("the client", "pool-a")


def soon() -> float:
    return SYSTEM_CLOCK.boottime_s() + PATIENCE_S


def echo(call: Call) -> None:
    call.reply(bytes(call.message), [call.payload])


class RecordingHandler:
    """Handler that records every call, so that the check can answer it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._more = asyncio.Event()

    def __call__(self, call: Call) -> None:
        self.calls.append(call)
        self._more.set()

    async def count(self, count: int) -> list[Call]:
        """Wait for `count` calls and return them."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.calls) < count:
                self._more.clear()
                await self._more.wait()
        return self.calls


class TransportSubject:
    """A transport and an endpoint to listen at."""

    def __init__(self, transport: Transport, endpoint: str) -> None:
        self.transport = transport
        self.endpoint = endpoint

    async def listen(self, handler: Handler = echo) -> Listener:
        return await self.transport.listen(self.endpoint, SERVER, handler)

    @asynccontextmanager
    async def pair(self, handler: Handler = echo) -> AsyncIterator[tuple[Connection, Listener]]:
        listener = await self.listen(handler)
        try:
            connection = await self.transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
            try:
                yield connection, listener
            finally:
                await connection.close()
        finally:
            await listener.close()


async def refused(error: type[NvpoolError], awaitable: Awaitable) -> NvpoolError:
    """Return the error that `awaitable` raises; it must be an instance of `error`."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await awaitable
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.001)


# -- content of requests and replies


async def a_request_and_its_answer_arrive_whole(subject: TransportSubject) -> None:
    async with subject.pair() as (connection, _):
        for size in (0, 1, 4096, 65535, 65536, 65537, 1 << 20):
            content = hashlib.shake_128(b"%d" % size).digest(size)
            pieces = [
                content[: size // 3],
                memoryview(content)[size // 3 : size // 2],
                bytearray(content[size // 2 :]),
            ]
            reply = await connection.call(7, b"message %d" % size, pieces, deadline_s=soon())
            assert bytes(reply.message) == b"message %d" % size
            assert reply.payload == content and isinstance(reply.payload, memoryview)


async def the_largest_message_and_payload_are_carried(subject: TransportSubject) -> None:
    async with subject.pair() as (connection, _):
        message = hashlib.shake_128(b"large").digest(4096) * (MESSAGE_BYTES_MAX // 4096)
        payload = bytes(range(256)) * (PAYLOAD_BYTES_MAX // 256)
        reply = await connection.call(1, message, [payload], deadline_s=soon())
        assert reply.message == message and reply.payload == payload


async def what_fits_into_no_frame_is_refused_and_the_connection_stays(subject: TransportSubject) -> None:
    def handler(call: Call) -> None:
        if call.method == 2:
            call.reply(bytes(MESSAGE_BYTES_MAX + 1))
        else:
            echo(call)

    async with subject.pair(handler) as (connection, _):
        await refused(TooBig, connection.call(1, bytes(MESSAGE_BYTES_MAX + 1), deadline_s=soon()))
        await refused(TooBig, connection.call(1, b"", [bytes(PAYLOAD_BYTES_MAX), b"x"], deadline_s=soon()))
        await refused(Bug, connection.call(2, b"", deadline_s=soon()))
        assert (await connection.call(1, b"still", deadline_s=soon())).message == b"still"


async def the_handler_sees_method_deadline_and_peer(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        deadline_s = soon()
        task = asyncio.ensure_future(connection.call(65535, b"m", [b"p"], deadline_s=deadline_s))
        (call,) = await kept.count(1)
        assert (call.method, bytes(call.message), bytes(call.payload)) == (65535, b"m", b"p")
        assert abs(call.deadline_s - deadline_s) < 1.0
        assert call.peer.name == "the client" and connection.peer.name == "the server" and not call.cancelled
        call.reply()
        assert (await task).payload == b""


async def answers_may_come_in_any_order(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        tasks = [asyncio.ensure_future(connection.call(1, b"%d" % n, deadline_s=soon())) for n in range(50)]
        for call in reversed(await kept.count(50)):
            call.reply(b"to " + bytes(call.message))
        assert [reply.message for reply in await asyncio.gather(*tasks)] == [b"to %d" % n for n in range(50)]


async def a_payload_is_received_where_the_caller_wants_it_if_it_fits(subject: TransportSubject) -> None:
    async with subject.pair() as (connection, _):
        for size in (1, 4096, 300_000):
            into = memoryview(bytearray(size + 10))
            content = hashlib.shake_128(b"%d" % size).digest(size)
            reply = await connection.call(1, b"", [content], deadline_s=soon(), into=into)
            assert reply.payload == content and into[:size] == content and reply.payload.obj is into.obj
            small = memoryview(bytearray(size - 1))
            reply = await connection.call(1, b"", [content], deadline_s=soon(), into=small)
            assert reply.payload == content and not any(small)


async def what_was_received_is_not_touched_again(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        replies = []
        for n in range(40):
            content = bytes([n]) * (3000 * n + 1)
            task = asyncio.ensure_future(connection.call(1, b"%d" % n, [content], deadline_s=soon()))
            (await kept.count(n + 1))[n].reply(b"%d" % n, [content])
            replies.append(await task)
        for n, reply in enumerate(replies):
            content = bytes([n]) * (3000 * n + 1)
            assert reply.message == b"%d" % n == bytes(kept.calls[n].message)
            assert reply.payload == content == kept.calls[n].payload


async def many_requests_of_all_sizes_do_not_mix(subject: TransportSubject) -> None:
    def handler(call: Call) -> None:
        call.reply(hashlib.sha256(call.payload).digest(), [call.payload[::-1].tobytes()])

    async def ask(connection: Connection, n: int) -> None:
        content = hashlib.shake_128(b"%d" % n).digest(n * n * 37 % 150_000)
        reply = await connection.call(1, b"", [content], deadline_s=soon())
        assert reply.message == hashlib.sha256(content).digest() and reply.payload == content[::-1]

    async with subject.pair(handler) as (connection, _):
        await asyncio.gather(*[ask(connection, n) for n in range(200)])


# -- errors


async def errors_come_back_as_they_were(subject: TransportSubject) -> None:
    raised = [
        NotFound("no such thing"),
        StaleCut("cut 7 is older"),
        Busy("wait", retry_after_s=0.25),
        Disconnected("the next one", may_be_applied=False),
    ]

    def handler(call: Call) -> None:
        call.fail(raised[call.method])

    async with subject.pair(handler) as (connection, _):
        for method, error in enumerate(raised):
            found = await refused(type(error), connection.call(method, b"", deadline_s=soon()))
            assert (str(found), found.may_be_applied, found.retry_after_s) == (
                str(error),
                error.may_be_applied,
                error.retry_after_s,
            )


async def a_handler_that_raises_has_answered(subject: TransportSubject) -> None:
    def handler(call: Call) -> None:
        if call.method == 1:
            raise NotFound("from the handler")
        raise ZeroDivisionError("not one of ours")

    async with subject.pair(handler) as (connection, _):
        await refused(NotFound, connection.call(1, b"", deadline_s=soon()))
        assert "ZeroDivisionError" in str(await refused(Bug, connection.call(2, b"", deadline_s=soon())))
        await refused(NotFound, connection.call(1, b"", deadline_s=soon()))


async def only_the_first_answer_counts(subject: TransportSubject) -> None:
    def handler(call: Call) -> None:
        call.reply(b"first")
        call.reply(b"second")
        call.fail(NotFound())

    async with subject.pair(handler) as (connection, _):
        for _ in range(3):
            assert (await connection.call(1, b"", deadline_s=soon())).message == b"first"


# -- deadlines and cancellation


async def a_request_ends_with_its_deadline_and_its_late_answer_is_thrown_away(
    subject: TransportSubject,
) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        began_s = SYSTEM_CLOCK.boottime_s()
        into = memoryview(bytearray(8))
        error = await refused(DeadlineExceeded, connection.call(1, b"", deadline_s=began_s + 0.05, into=into))
        assert error.may_be_applied and 0.045 < SYSTEM_CLOCK.boottime_s() - began_s < 2.0
        (call,) = await kept.count(1)
        await until(lambda: call.cancelled)
        call.reply(b"late", [b"late"])
        task = asyncio.ensure_future(connection.call(2, b"", deadline_s=soon()))
        (await kept.count(2))[1].reply(b"in time")
        assert (await task).message == b"in time" and not any(into)


async def each_of_many_deadlines_is_kept(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        began_s = SYSTEM_CLOCK.boottime_s()
        ended: list[tuple[float, float]] = []

        async def ask(after_s: float) -> None:
            await refused(DeadlineExceeded, connection.call(1, b"", deadline_s=began_s + after_s))
            ended.append((after_s, SYSTEM_CLOCK.boottime_s() - began_s))

        late = asyncio.ensure_future(connection.call(2, b"", deadline_s=soon()))
        await asyncio.gather(*[ask(after_s) for after_s in (0.2, 0.02, 0.12, 0.06, 0.061)])
        assert [after_s for after_s, _ in ended] == [0.02, 0.06, 0.061, 0.12, 0.2]
        assert all(took_s >= after_s - 0.002 for after_s, took_s in ended)
        (await kept.count(1))
        next(call for call in kept.calls if call.method == 2).reply(b"patient")
        assert (await late).message == b"patient"


async def a_deadline_in_the_past_sends_nothing(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        error = await refused(
            DeadlineExceeded, connection.call(1, b"", deadline_s=SYSTEM_CLOCK.boottime_s() - 1)
        )
        assert not error.may_be_applied
        task = asyncio.ensure_future(connection.call(2, b"", deadline_s=soon()))
        assert [call.method for call in await kept.count(1)] == [2]
        kept.calls[0].reply()
        await task


async def a_cancelled_task_stops_the_work_at_the_other_side(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        task = asyncio.ensure_future(connection.call(1, b"", [bytes(100_000)], deadline_s=soon()))
        (call,) = await kept.count(1)
        cancelled: list[bool] = []
        call.on_cancel(lambda: cancelled.append(call.cancelled))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until(lambda: bool(cancelled))
        assert cancelled == [True]
        call.reply(b"nobody wants it")
        call.on_cancel(lambda: cancelled.append(True))
        assert cancelled == [True, True]  # registered after the cancellation: called immediately


async def submit_completes_once_and_never_before_it_returned(subject: TransportSubject) -> None:
    def handler(call: Call) -> None:
        call.fail(NotFound()) if call.method == 2 else echo(call)

    async with subject.pair(handler) as (connection, _):
        completions: list[tuple] = []

        def done(reply, error) -> None:
            completions.append((reply and bytes(reply.message), type(error)))

        connection.submit(1, b"a", deadline_s=soon(), on_done=done)
        connection.submit(2, b"b", deadline_s=soon(), on_done=done)
        connection.submit(1, b"c", deadline_s=SYSTEM_CLOCK.boottime_s() - 1, on_done=done)
        connection.submit(1, bytes(MESSAGE_BYTES_MAX + 1), deadline_s=soon(), on_done=done)
        assert not completions
        await until(lambda: len(completions) == 4)
        assert sorted(completions, key=str) == sorted(
            [(b"a", type(None)), (None, NotFound), (None, DeadlineExceeded), (None, TooBig)], key=str
        )
        await connection.close()
        connection.submit(1, b"d", deadline_s=soon(), on_done=done)
        assert len(completions) == 4
        await until(lambda: len(completions) == 5)
        assert completions[4] == (None, Disconnected)


async def a_submitted_request_that_is_given_up_notifies_only_the_other_side(
    subject: TransportSubject,
) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        completions: list = []
        request = connection.submit(
            1, b"", deadline_s=soon(), on_done=lambda *outcome: completions.append(outcome)
        )
        (call,) = await kept.count(1)
        connection.give_up(request)
        await until(lambda: call.cancelled)
        task = asyncio.ensure_future(connection.call(2, b"", deadline_s=soon()))
        (await kept.count(2))[1].reply()
        await task
        connection.give_up(request)
        assert not completions


# -- bounds


async def only_so_many_are_in_flight_and_the_others_wait_for_their_turn(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        more = 300
        tasks = [
            asyncio.ensure_future(connection.call(1, b"%d" % n, deadline_s=soon()))
            for n in range(IN_FLIGHT_MAX + more)
        ]
        await kept.count(IN_FLIGHT_MAX)
        await asyncio.sleep(0.02)
        assert len(kept.calls) == IN_FLIGHT_MAX
        tasks[-1].cancel()  # still queued: never sent
        tasks[0].cancel()  # in flight: frees a place
        await asyncio.wait([tasks[-1], tasks[0]])
        for call in list(kept.calls):
            call.reply(bytes(call.message))
        for call in (await kept.count(IN_FLIGHT_MAX + more - 1))[IN_FLIGHT_MAX:]:
            call.reply(bytes(call.message))
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        assert [bytes(reply.message) for reply in replies[1:-1]] == [
            b"%d" % n for n in range(1, IN_FLIGHT_MAX + more - 1)
        ]
        assert len(kept.calls) == IN_FLIGHT_MAX + more - 1


async def what_waits_also_ends_with_its_deadline_and_was_not_applied(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        tasks = [
            asyncio.ensure_future(connection.call(1, b"", deadline_s=soon())) for _ in range(IN_FLIGHT_MAX)
        ]
        await kept.count(IN_FLIGHT_MAX)
        error = await refused(
            DeadlineExceeded, connection.call(2, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 0.05)
        )
        assert not error.may_be_applied
        await connection.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {Disconnected}
        assert all(call.method == 1 for call in kept.calls)


# -- end of connections


async def closing_fails_what_is_in_flight_and_notifies_the_other_side(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, _):
        task = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon()))
        (call,) = await kept.count(1)
        await connection.close()
        assert connection.closed
        assert (await refused(Disconnected, task)).may_be_applied
        assert not (await refused(Disconnected, connection.call(1, b"", deadline_s=soon()))).may_be_applied
        await until(lambda: call.cancelled)
        call.reply(b"to nobody")
        await connection.close()


async def a_listener_that_closes_ends_its_connections(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, listener):
        task = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon()))
        (call,) = await kept.count(1)
        await listener.close()
        await refused(Disconnected, task)
        await until(lambda: connection.closed)
        assert call.cancelled
        await refused(Unreachable, subject.transport.connect(listener.endpoint, CLIENT, deadline_s=soon()))
        await listener.close()


async def a_draining_listener_answers_what_is_in_work_and_takes_nothing_new(
    subject: TransportSubject,
) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, listener):
        task = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon()))
        (call,) = await kept.count(1)
        closing = asyncio.ensure_future(listener.close(drain_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        await refused(Draining, connection.call(2, b"", deadline_s=soon()))
        assert not closing.done() and not task.done()
        call.reply(b"in peace", [bytes(200_000)])
        reply = await task
        assert reply.message == b"in peace" and len(reply.payload) == 200_000
        await closing
        await until(lambda: connection.closed)


async def draining_ends_after_its_time(subject: TransportSubject) -> None:
    kept = RecordingHandler()
    async with subject.pair(kept) as (connection, listener):
        task = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon()))
        await kept.count(1)
        began_s = SYSTEM_CLOCK.boottime_s()
        await listener.close(drain_s=0.05)
        assert SYSTEM_CLOCK.boottime_s() - began_s < 5
        await refused(Disconnected, task)


# -- handshakes and endpoints


async def another_pool_is_refused_by_name(subject: TransportSubject) -> None:
    listener = await subject.listen()
    other = Greeting("the other client", "pool-b")
    error = await refused(
        ProtocolMismatch, subject.transport.connect(listener.endpoint, other, deadline_s=soon())
    )
    for word in ("the other client", "the server", "pool-a", "pool-b"):
        assert word in str(error)
    newcomer = await subject.transport.connect(listener.endpoint, Greeting("the newcomer"), deadline_s=soon())
    assert (await newcomer.call(1, b"hello", deadline_s=soon())).message == b"hello"
    await newcomer.close()
    await listener.close()


async def where_nobody_listens_is_unreachable(subject: TransportSubject) -> None:
    listener = await subject.listen()
    await listener.close()
    await refused(
        Unreachable,
        subject.transport.connect(listener.endpoint, CLIENT, deadline_s=SYSTEM_CLOCK.boottime_s() + 1),
    )


async def a_place_in_use_is_refused_and_free_again_after_close(subject: TransportSubject) -> None:
    listener = await subject.listen()
    await refused(InUse, subject.transport.listen(listener.endpoint, SERVER, echo))
    await listener.close()
    again = await subject.transport.listen(listener.endpoint, SERVER, echo)
    connection = await subject.transport.connect(again.endpoint, CLIENT, deadline_s=soon())
    assert (await connection.call(1, b"again", deadline_s=soon())).message == b"again"
    await connection.close()
    await again.close()


async def several_connections_do_not_disturb_one_another(subject: TransportSubject) -> None:
    listener = await subject.listen()
    connections = [
        await subject.transport.connect(
            listener.endpoint, CLIENT._replace(name=f"client {n}"), deadline_s=soon()
        )
        for n in range(5)
    ]
    await connections[0].close()
    replies = await asyncio.gather(
        *[c.call(1, b"%d" % n, deadline_s=soon()) for n, c in enumerate(connections) if n]
    )
    assert [bytes(reply.message) for reply in replies] == [b"1", b"2", b"3", b"4"]
    for connection in connections:
        await connection.close()
    await listener.close()


CHECKS: tuple[Callable[[TransportSubject], Awaitable[None]], ...] = (
    a_request_and_its_answer_arrive_whole,
    the_largest_message_and_payload_are_carried,
    what_fits_into_no_frame_is_refused_and_the_connection_stays,
    the_handler_sees_method_deadline_and_peer,
    answers_may_come_in_any_order,
    a_payload_is_received_where_the_caller_wants_it_if_it_fits,
    what_was_received_is_not_touched_again,
    many_requests_of_all_sizes_do_not_mix,
    errors_come_back_as_they_were,
    a_handler_that_raises_has_answered,
    only_the_first_answer_counts,
    a_request_ends_with_its_deadline_and_its_late_answer_is_thrown_away,
    each_of_many_deadlines_is_kept,
    a_deadline_in_the_past_sends_nothing,
    a_cancelled_task_stops_the_work_at_the_other_side,
    submit_completes_once_and_never_before_it_returned,
    a_submitted_request_that_is_given_up_notifies_only_the_other_side,
    only_so_many_are_in_flight_and_the_others_wait_for_their_turn,
    what_waits_also_ends_with_its_deadline_and_was_not_applied,
    closing_fails_what_is_in_flight_and_notifies_the_other_side,
    a_listener_that_closes_ends_its_connections,
    a_draining_listener_answers_what_is_in_work_and_takes_nothing_new,
    draining_ends_after_its_time,
    another_pool_is_refused_by_name,
    where_nobody_listens_is_unreachable,
    a_place_in_use_is_refused_and_free_again_after_close,
    several_connections_do_not_disturb_one_another,
)


async def check_all(transport: Transport, endpoint: Callable[[], str]) -> None:
    for check in CHECKS:
        await check(TransportSubject(transport, endpoint()))
