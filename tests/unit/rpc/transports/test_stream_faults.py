"""Peers that violate the protocol, die, stall or send wrong data: the connection ends with one logged reason."""

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import os
import random
import signal
import socket
import subprocess
import sys

import pytest
import uvloop

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    BadConfiguration,
    Busy,
    DeadlineExceeded,
    Disconnected,
    InUse,
    NotFound,
    ProtocolMismatch,
    Unreachable,
)
from nvpool.rpc import handshake, peer_limits, transport_registry
from nvpool.rpc.api import IN_FLIGHT_MAX, Greeting
from nvpool.rpc.peer_limits import Bounds, Limits
from nvpool.rpc.transports import stream as stream_transport
from nvpool.rpc.transports.frame import CANCEL, HEADER, HELLO, REPLY, REQUEST, FrameReader, pack_head
from nvpool.rpc.v1 import wire_pb2
from nvpool.security.tls import PLAIN_TEXT
from nvpool.testing.contracts.transport import RecordingHandler, echo, refused, soon, until

US = Greeting("we", "pool-a")
HELLO_FRAME = pack_head(HELLO, 0, 0, 0, handshake.encode_hello(Greeting("the faulty one")), 0)


def on_a_loop(test):
    """Run an async test on the daemons' event loop, with its deadline, and check for tasks left behind."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def timed():
            async with asyncio.timeout(60):
                await test(*args, **kwargs)
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(timed())

    return run


async def serve(path, handler=echo, limits=None):
    return await transport_registry.listen(f"stream+unix://{path}/s", US._replace(limits=limits), handler)


async def connect(path, deadline_s=None):
    transport = transport_registry.transport("stream+unix")
    return await transport.connect(f"stream+unix://{path}/s", US, deadline_s=deadline_s or soon())


async def raw_client(path, hello=HELLO_FRAME):
    reader, writer = await asyncio.open_unix_connection(f"{path}/s")
    writer.write(hello)
    if hello == HELLO_FRAME:
        await read_frame(reader)
    return reader, writer


async def read_frame(reader):
    _, kind, _, code, _, number, _, message_bytes, payload_bytes, _, _ = HEADER.unpack(
        await reader.readexactly(HEADER.size)
    )
    return (
        kind,
        code,
        number,
        await reader.readexactly(message_bytes),
        await reader.readexactly(payload_bytes),
    )


class FaultyServer:
    """Sends a greeting, then handles the first request with the test's coroutine(reader, writer, number)."""

    def __init__(self, fault, hello=HELLO_FRAME):
        self.fault, self.hello = fault, hello

    async def __call__(self, reader, writer):
        writer.write(self.hello)
        try:
            await read_frame(reader)
            _, _, number, _, _ = await read_frame(reader)
            await self.fault(reader, writer, number)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def against(path, fault, hello=HELLO_FRAME):
    """A connection to a server with this fault, and the server."""
    server = await asyncio.start_unix_server(FaultyServer(fault, hello), f"{path}/s")
    return await connect(path), server


def reply(number, payload_bytes=0, message=b"m"):
    return pack_head(REPLY, 0, number, 0, message, payload_bytes)


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


FAULTS = {
    "ends before an answer": (lambda n: b"", False),
    "dies within a header": (lambda n: reply(n)[:20], False),
    "dies within a message": (lambda n: reply(n, message=bytes(1000))[:500], False),
    "dies within a small payload": (lambda n: reply(n, 5000) + bytes(100), False),
    "dies within a large payload": (lambda n: reply(n, 20 << 20) + bytes(3 << 20), False),
    "sends a flipped bit in a header": (lambda n: flipped(reply(n), 18), True),
    "sends a flipped bit in a message": (lambda n: flipped(reply(n, message=bytes(1000)), 500), True),
    "sends a frame of an unknown kind": (lambda n: pack_head(77, 0, n, 0, b"", 0), True),
    "sends a frame that is too long": (lambda n: pack_head(REPLY, 0, n, 0, b"", 1 << 30), True),
    "sends a request": (lambda n: pack_head(REQUEST, 1, n, 0, b"", 0), True),
    "sends a second greeting": (lambda n: HELLO_FRAME, True),
    "sends something else": (lambda n: b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True),
}


@pytest.mark.parametrize("what", FAULTS)
@on_a_loop
async def test_faulty_server_ends_the_connection(what, tmp_path, caplog):
    make, logged = FAULTS[what]

    async def fault(reader, writer, number):
        writer.write(make(number))
        await writer.drain()
        if logged:
            await reader.read()  # the client hangs up, not the server

    connection, server = await against(tmp_path, fault)
    tasks = [
        asyncio.ensure_future(
            connection.call(1, b"", deadline_s=soon(), into=memoryview(bytearray(32 << 20)))
        )
        for _ in range(3)
    ]
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert type(error) is Disconnected and error.may_be_applied
    assert connection.closed
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == logged
    await connection.close()
    server.close()


@on_a_loop
async def test_unexpected_reply_is_discarded(tmp_path):
    async def fault(reader, writer, number):
        writer.write(
            reply(number + 7, 3)
            + b"abc"
            + reply(number + 8, 100_000)
            + bytes(100_000)
            + reply(number, 2)
            + b"ok"
        )
        await reader.read()

    connection, server = await against(tmp_path, fault)
    assert (await connection.call(1, b"", deadline_s=soon())).payload == b"ok"
    await connection.close()
    server.close()


@on_a_loop
async def test_memory_of_an_ended_call_is_not_written(tmp_path):
    go_on, going = asyncio.Event(), asyncio.Event()

    async def fault(reader, writer, number):
        writer.write(reply(number, 4 << 20) + b"x" * (2 << 20))
        await writer.drain()
        going.set()
        await go_on.wait()
        writer.write(b"x" * (2 << 20))
        _, _, number, _, _ = await read_frame(reader)
        while number == 1:  # the cancel of the first request
            _, _, number, _, _ = await read_frame(reader)
        writer.write(reply(number, 4) + b"next")
        await reader.read()

    connection, server = await against(tmp_path, fault)
    into = memoryview(bytearray(4 << 20))
    task = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon(), into=into))
    await going.wait()
    await until(lambda: into[2 << 20 - 1] or into[1000])
    task.cancel()
    await asyncio.wait([task])
    into[:] = bytes(4 << 20)
    go_on.set()
    assert (await connection.call(1, b"", deadline_s=soon())).payload == b"next"
    assert not any(into)
    await connection.close()
    server.close()


@on_a_loop
async def test_server_without_a_greeting_is_unreachable(tmp_path):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, f"{tmp_path}/s")
    await refused(Unreachable, connect(tmp_path, SYSTEM_CLOCK.boottime_s() + 0.1))
    server.close()


@on_a_loop
async def test_server_of_a_newer_version_is_refused(tmp_path):
    hello = wire_pb2.Hello(version=9, version_min=8, name="from the future").SerializeToString()
    server = await asyncio.start_unix_server(
        FaultyServer(None, pack_head(HELLO, 0, 0, 0, hello, 0)), f"{tmp_path}/s"
    )
    error = await refused(ProtocolMismatch, connect(tmp_path))
    assert all(word in str(error) for word in ("from the future", "8 to 9", "'we'", "1"))
    server.close()


REQUESTS = {
    "sends noise": (b"", b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"),
    "asks before it greets": (b"", pack_head(REQUEST, 1, 1, 1000, b"", 0)),
    "greets twice": (HELLO_FRAME, HELLO_FRAME),
    "sends an answer": (HELLO_FRAME, reply(1)),
    "uses a number twice": (HELLO_FRAME, pack_head(REQUEST, 1, 5, 9999, b"", 0) * 2),
    "asks for too much at once": (
        HELLO_FRAME,
        b"".join(pack_head(REQUEST, 1, n, 9999, b"", 0) for n in range(IN_FLIGHT_MAX + 1)),
    ),
    "sends a flipped bit": (HELLO_FRAME, flipped(pack_head(REQUEST, 1, 5, 9999, b"message", 0), 35)),
}


@pytest.mark.parametrize("what", REQUESTS)
@on_a_loop
async def test_faulty_client_is_disconnected(what, tmp_path, caplog):
    hello, request = REQUESTS[what]
    kept = RecordingHandler()
    listener = await serve(tmp_path, kept)
    reader, writer = await raw_client(tmp_path, hello)
    good = await connect(tmp_path)
    writer.write(request)
    assert await reader.read() == b""  # disconnected
    writer.close()
    assert len(caplog.records) == 1
    await until(lambda: all(call.cancelled for call in kept.calls))
    task = asyncio.ensure_future(good.call(2, b"undisturbed", deadline_s=soon()))
    await until(lambda: any(call.method == 2 for call in kept.calls))
    kept.calls[-1].reply(b"yes")
    assert (await task).message == b"yes"
    await good.close()
    await listener.close()


@pytest.mark.parametrize("trusted", [False, True])
@on_a_loop
async def test_faults_of_untrusted_clients_are_logged_once(trusted, tmp_path, caplog):
    listener = await serve(tmp_path, limits=Limits(Bounds(), trust=trusted))
    name = "a\nname" + "x" * 10_000
    hello = pack_head(HELLO, 0, 0, 0, handshake.encode_hello(Greeting(name)), 0)
    for _ in range(20):
        reader, writer = await raw_client(tmp_path, hello)
        await read_frame(reader)
        writer.write(b"GET / HTTP/1.1\r\nHost: us\r\nAccept: nothing\r\n\r\n")
        await hangs_up(reader)
        writer.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (20 if trusted else 1)
    assert all("a?name" in text and text.isprintable() and len(text) < 500 for text in messages)
    await listener.close()


@on_a_loop
async def test_client_without_a_greeting_is_disconnected(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stream_transport, "HELLO_S", 0.05)
    listener = await serve(tmp_path)
    reader, writer = await raw_client(tmp_path, b"")
    assert await reader.read() == b""
    writer.close()
    assert "no greeting" in caplog.text
    await listener.close()


@on_a_loop
async def test_client_beyond_the_limit_gets_busy(tmp_path):
    listener = await serve(tmp_path, limits=Limits(Bounds(connections=8)))
    most = [await connect(tmp_path) for _ in range(8)]
    await refused(Busy, connect(tmp_path))
    for one in most:
        assert (await one.call(1, b"", deadline_s=soon())).message == b""
        await one.close()
    await listener.close()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: pack_head(REQUEST, 1, 1, 1000, bytes(100), 0),
        lambda: pack_head(REQUEST, 1, 1, 1000, b"", 1 << 20) + bytes(200_000),
    ],
)
@on_a_loop
async def test_slow_client_is_disconnected(request_of, tmp_path, caplog):
    bounds = Limits(Bounds(message_s=0.3), trust=False)
    listener = await serve(tmp_path, limits=bounds)
    _, writer = await raw_client(tmp_path)
    good = await connect(tmp_path)
    request = request_of()
    writer.write(request[:-60])
    for byte in request[-60:-1]:
        bounds.run_once()
        await asyncio.sleep(0.05)
        if writer.transport.is_closing():
            break
        writer.write(bytes([byte]))
    assert (
        writer.transport.is_closing() and len(listener.connections) == 1 and "limits.message_s" in caplog.text
    )
    assert (await good.call(1, b"", deadline_s=soon())).message == b""
    writer.close()
    await good.close()
    await listener.close()


@on_a_loop
async def test_cancellations_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_limits, "TURN_S", 0.0)
    turns, next_turn = [], Limits.next_turn
    monkeypatch.setattr(
        Limits, "next_turn", lambda self, account: turns.append(account) or next_turn(self, account)
    )
    listener = await serve(tmp_path, limits=Limits(Bounds(), trust=False))
    reader, writer = await raw_client(tmp_path)
    before = len(turns)
    cancels = b"".join(pack_head(CANCEL, 0, n, 0, b"", 0) for n in range(2, 502))
    writer.write(cancels + pack_head(REQUEST, 1, 1, 60_000, b"", 0))
    assert (await read_frame(reader))[:3] == (REPLY, 0, 1)
    assert len(turns) - before >= 250
    writer.close()
    await listener.close()


@on_a_loop
async def test_long_message_counts_until_it_is_answered(tmp_path):
    bounds = Limits(Bounds(), trust=False)
    kept = RecordingHandler()
    listener = await serve(tmp_path, kept, limits=bounds)
    reader, writer = await raw_client(tmp_path)
    whole = pack_head(REQUEST, 1, 1, 9999, bytes(4 << 20), 0)
    writer.write(whole[:300_000])
    await until(lambda: bounds.bytes == 4 << 20)
    writer.write(whole[300_000:])
    (await kept.count(1))[0].reply(b"so long")
    assert await read_frame(reader) == (REPLY, 0, 1, b"so long", b"") and bounds.bytes == 0
    writer.close()
    await listener.close()


async def hangs_up(reader):
    with contextlib.suppress(ConnectionError):  # if bytes of ours were not read
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "frame", [pack_head(CANCEL, 0, 1, 0, b"", 32 << 20), pack_head(HELLO, 0, 0, 0, b"", 32 << 20)]
)
@on_a_loop
async def test_frame_kinds_without_payload_are_enforced(frame, tmp_path, caplog):
    listener = await serve(tmp_path)
    reader, writer = await raw_client(tmp_path)
    writer.write(frame)
    await hangs_up(reader)
    assert "with a payload" in caplog.text or "out of place" in caplog.text
    writer.close()
    await listener.close()


@on_a_loop
async def test_long_greeting_is_refused(tmp_path, caplog):
    listener = await serve(tmp_path, limits=Limits(Bounds(), trust=False))
    reader, writer = await raw_client(tmp_path, pack_head(HELLO, 0, 0, 0, bytes(4 << 20), 0))
    await hangs_up(reader)
    assert "out of place" in caplog.text
    writer.close()
    await listener.close()


@on_a_loop
async def test_queued_replies_of_an_ended_connection_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_transport, "GOODBYE_S", 0.05)
    listener = await serve(tmp_path, lambda call: call.reply(b"", [bytes(8 << 20)]))
    reader, writer = await raw_client(tmp_path)
    writer.write(pack_head(REQUEST, 1, 1, 9999, b"", 0))
    await until(lambda: any(end.frames.transport.get_write_buffer_size() for end in listener.connections))
    (end,) = listener.connections
    end.revoked(NotFound("gone"))
    async with asyncio.timeout(20):
        await asyncio.shield(end.frames.gone)
    writer.close()
    await listener.close()


@on_a_loop
async def test_client_that_reads_no_replies_is_not_read(tmp_path):
    served = 0
    answer = bytes(1 << 20)

    def handler(call):
        nonlocal served
        served += 1
        call.reply(b"", [answer])

    listener = await serve(tmp_path, handler)
    reader, writer = await raw_client(tmp_path)
    count = 200
    writer.write(b"".join(pack_head(REQUEST, 1, n, 60_000, b"", 0) for n in range(1, count + 1)))
    await until(lambda: served > 0)
    good = await connect(tmp_path)
    assert len((await good.call(1, b"", deadline_s=soon())).payload) == 1 << 20
    assert served - 1 < 10  # its socket buffers, ours, and one frame; not 200 MiB
    for _ in range(count):
        kind, _, _, _, payload = await read_frame(reader)
        assert kind == REPLY and len(payload) == 1 << 20
    assert served == count + 1
    writer.close()
    await good.close()
    await listener.close()


@on_a_loop
async def test_payload_in_progress_of_a_client_is_bounded(tmp_path):
    kept = RecordingHandler()
    listener = await serve(tmp_path, kept)
    connection = await connect(tmp_path)
    piece = bytes(8 << 20)
    tasks = [asyncio.ensure_future(connection.call(1, b"", [piece], deadline_s=soon())) for _ in range(20)]
    await kept.count(9)
    await asyncio.sleep(0.05)
    assert len(kept.calls) == 9  # 72 MiB: the frame that exceeded the limit was the last
    answered = 0
    while answered < 20:
        for call in (await kept.count(answered + 1))[answered:]:
            call.reply()
            answered += 1
    await asyncio.gather(*tasks)
    await connection.close()
    await listener.close()


@on_a_loop
async def test_requests_to_a_stalled_server_end_at_their_deadline(tmp_path):
    async def fault(reader, writer, number):
        writer.transport.pause_reading()
        await asyncio.sleep(600)

    connection, server = await against(tmp_path, fault)
    payload = [bytes(1 << 20)]
    began_s = SYSTEM_CLOCK.boottime_s()
    tasks = [
        asyncio.ensure_future(connection.call(1, b"", payload, deadline_s=began_s + 0.2)) for _ in range(40)
    ]
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(error) for error in errors} == {DeadlineExceeded}
    assert not errors[-1].may_be_applied  # it was still queued on our side
    await connection.close()
    assert SYSTEM_CLOCK.boottime_s() - began_s < 300
    server.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        await asyncio.wait([task])


async def survives_mutated_frames(path, connections, seed):
    """Whatever mutated frames `connections` clients send, another client is not affected."""
    dice = random.Random(seed)
    listener = await serve(path)
    good = await connect(path)
    for _ in range(connections):
        stream = bytearray(HELLO_FRAME)
        for number in range(4):
            size = dice.choice((0, 10, 70_000))
            message = dice.randbytes(dice.randrange(50))
            stream += pack_head(
                dice.choice((REQUEST, CANCEL)), 1, number, 1000, message, size
            ) + dice.randbytes(size)
        for _ in range(dice.randrange(3)):
            at = dice.randrange(len(stream))
            what = dice.randrange(3)
            stream[at : at + what] = dice.randbytes(dice.randrange(3))
        writer = (await asyncio.open_unix_connection(f"{path}/s"))[1]
        writer.write(stream[: dice.randrange(len(stream) + 1)])
        assert (await good.call(1, b"well", deadline_s=soon())).message == b"well"
        writer.close()
    await until(lambda: len(listener.connections) == 1)
    await good.close()
    await listener.close()


@pytest.mark.parametrize("seed", range(3))
@on_a_loop
async def test_mutated_frames_harm_no_other_client(tmp_path, seed):
    await survives_mutated_frames(tmp_path, 50, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 105))
@on_a_loop
async def test_mutated_frames_harm_no_other_client_for_long(tmp_path, seed):
    await survives_mutated_frames(tmp_path, 2000, seed)


SERVER_PROGRAM = """
import asyncio, sys, uvloop
from nvpool.rpc import transport_registry
from nvpool.rpc.api import Greeting
answer = bytes(32 << 20)
async def main():
    listener = await transport_registry.listen(sys.argv[1], Greeting("mortal"), lambda call: call.reply(b"", [answer]))
    print(listener.endpoint, flush=True)
    await asyncio.sleep(60)
uvloop.run(main())
"""


@pytest.mark.parametrize("scheme", ["stream+unix", "stream", "grpc"])
def test_killed_server_is_detected_immediately(scheme, tmp_path):
    endpoint = f"stream+unix://{tmp_path}/s" if scheme == "stream+unix" else f"{scheme}://127.0.0.1:0"
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER_PROGRAM, endpoint], stdout=subprocess.PIPE, text=True
    )
    endpoint = child.stdout.readline().strip()

    @on_a_loop
    async def run():
        connection = await transport_registry.transport(scheme).connect(endpoint, US, deadline_s=soon())
        tasks = [asyncio.ensure_future(connection.call(1, b"", deadline_s=soon())) for _ in range(40)]
        await asyncio.sleep(0.03)
        os.kill(child.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert type(results[-1]) is Disconnected
        assert connection.closed
        await connection.close()
        await refused(
            Unreachable,
            transport_registry.transport(scheme).connect(
                endpoint, US, deadline_s=SYSTEM_CLOCK.boottime_s() + 2
            ),
        )

    try:
        run()
    finally:
        child.kill()
        child.communicate()


@on_a_loop
async def test_tcp_connection_detects_a_vanished_host():
    listener = await transport_registry.listen("stream://127.0.0.1:0", US, echo)
    connection = await transport_registry.transport("stream").connect(
        listener.endpoint, US, deadline_s=soon()
    )
    await connection.call(1, b"", deadline_s=soon())
    for end in (connection, *listener.connections):
        sock = end.frames.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        with contextlib.suppress(OSError):  # before Linux 6.15
            assert sock.getsockopt(socket.IPPROTO_TCP, 44) == 1000, "TCP_RTO_MAX_MS"
        idle, interval, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 10
    await connection.close()
    await listener.close()


@on_a_loop
async def test_stale_socket_file_is_replaced_but_no_other_file(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(f"{tmp_path}/s")
    left.close()
    listener = await serve(tmp_path)
    assert os.stat(f"{tmp_path}/s").st_mode & 0o777 == 0o600
    await listener.close()
    assert not list(tmp_path.iterdir())
    (tmp_path / "s").write_text("precious")
    await refused(InUse, serve(tmp_path))
    assert (tmp_path / "s").read_text() == "precious"
    await refused(NotFound, serve(tmp_path / "nowhere"))


@pytest.mark.parametrize("endpoint", ["stream://192.0.2.1:1", "carrier-pigeon://coop:1"])
@on_a_loop
async def test_foreign_listen_address_is_a_configuration_error(endpoint):
    await refused(
        BadConfiguration, transport_registry.listen(endpoint, US._replace(identity=PLAIN_TEXT), echo)
    )


@on_a_loop
async def test_ended_connection_is_freed_immediately(tmp_path):
    gc.collect()
    gc.disable()
    try:
        listener = await serve(tmp_path)
        for _ in range(20):
            connection = await connect(tmp_path)
            await connection.call(1, b"", [bytes(100_000)], deadline_s=soon())
            await connection.close()
        await until(lambda: not listener.connections)
        await asyncio.sleep(0)
        del connection
        alive = [thing for thing in gc.get_objects() if isinstance(thing, FrameReader) and thing.buffer]
        assert not alive
        await listener.close()
    finally:
        gc.enable()


@on_a_loop
async def test_cancel_of_an_answered_request_is_ignored(tmp_path):
    listener = await serve(tmp_path)
    reader, writer = await raw_client(tmp_path)
    writer.write(
        pack_head(REQUEST, 1, 1, 1000, b"a", 0)
        + pack_head(CANCEL, 0, 1, 0, b"", 0)
        + pack_head(REQUEST, 1, 1, 1000, b"b", 0)
    )
    assert [(await read_frame(reader))[3] for _ in range(2)] == [b"a", b"b"]
    writer.close()
    await listener.close()


@on_a_loop
async def test_flooding_client_does_not_starve_others(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_limits, "TURN_S", 0.0)
    order = []

    def handler(call):
        order.append(call.method)
        call.reply()

    listener = await serve(tmp_path, handler, limits=Limits(Bounds(), trust=False))
    flooding = [await raw_client(tmp_path) for _ in range(5)]
    other = await connect(tmp_path)
    end = next(end for end in listener.connections if end.peer.name == US.name)
    end.share.leave()
    end.entered = end.share = listener.limits.enter(end, end.peer._replace(member="client/other"), "we")
    for _, writer in flooding:
        writer.write(b"".join(pack_head(REQUEST, 1, n, 60_000, b"", 0) for n in range(1, 1001)))
    await until(lambda: order)
    for _ in range(20):
        await other.call(2, b"", deadline_s=soon())
    before = [
        place - number
        for number, place in enumerate(place for place, method in enumerate(order) if method == 2)
    ]
    assert max(after - earlier for earlier, after in itertools.pairwise(before)) < 500, before
    for reader, writer in flooding:
        for _ in range(1000):
            assert (await read_frame(reader))[0] == REPLY
        writer.close()
    assert order.count(1) == 5000
    await other.close()
    await listener.close()
