"""Limits of a listener for every transport: connections, memory, and time for replies, with TLS and without."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys

import pytest
import uvloop

from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import Busy, Unreachable
from nvpool.rpc import transport_registry
from nvpool.rpc.peer_limits import Bounds, Limits
from nvpool.testing.contracts.transport import CLIENT, SERVER, RecordingHandler, echo, refused, soon, until
from tests.contract.test_tls_transport import CLIENT_ID, NODE, identity

MIB = 1 << 20
SCHEMES = ("stream+unix", "stream", "grpc")
FEW = Bounds(connections=64, connections_per_peer=4)
ENDING_S = 5.0


def endpoint_of(scheme, path):
    return f"stream+unix://{path}/s" if scheme == "stream+unix" else f"{scheme}://127.0.0.1:0"


def run(main):
    async def whole():
        async with asyncio.timeout(60):
            await main
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(left, timeout=ENDING_S)
        assert not left, f"left behind: {left}"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


async def listening(scheme, path, limits, handler=echo, member=None):
    return await transport_registry.transport(scheme).listen(
        endpoint_of(scheme, path), SERVER._replace(limits=limits, identity=member), handler
    )


async def connect(scheme, listener, member=None):
    return await transport_registry.transport(scheme).connect(
        listener.endpoint, CLIENT._replace(identity=member), deadline_s=soon()
    )


@pytest.mark.parametrize(
    ("scheme", "secured"), [*((scheme, False) for scheme in SCHEMES), ("stream", True), ("grpc", True)]
)
def test_connections_per_peer_are_limited(scheme, secured, tmp_path):
    mine, server = (CLIENT_ID, NODE) if secured else (None, None)

    async def check():
        listener = await listening(scheme, tmp_path, Limits(FEW, trust=False), member=server)
        connections = [await connect(scheme, listener, mine) for _ in range(4)]
        said = str(await refused(Busy, connect(scheme, listener, mine)))
        assert "the server has 4 connections" in said and "limits.connections_per_peer in node.toml" in said
        if secured:
            connections.append(await connect(scheme, listener, identity("client/ws2")))
        await connections.pop(0).close()
        await until(lambda: len(listener.connections) == len(connections))
        connections.append(await connect(scheme, listener, mine))
        for connection in connections:
            assert (await connection.call(1, b"served", deadline_s=soon())).message == b"served"
            await connection.close()
        await listener.close()

    run(check())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_trusted_peers_have_reserved_connections(scheme, tmp_path):
    async def check():
        limits = Limits(Bounds(connections=8, connections_per_peer=3))
        listener = await listening(scheme, tmp_path, limits)
        mine = [await connect(scheme, listener) for _ in range(3)]
        if scheme == "stream+unix":  # a trusted peer: it runs as the daemons' user
            mine += [await connect(scheme, listener) for _ in range(5)]
        await refused(Busy, connect(scheme, listener))
        for connection in mine:
            await connection.close()
        await listener.close()

    run(check())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_large_requests_of_a_peer_are_serialized(scheme, tmp_path):
    async def check():
        kept = RecordingHandler()
        limits = Limits(Bounds(memory_bytes_per_peer=8 * MIB), trust=False)
        listener = await listening(scheme, tmp_path, limits, kept)
        connections = [await connect(scheme, listener) for _ in range(3)]
        payload = bytes(5 * MIB)
        tasks = [
            asyncio.ensure_future(connection.call(n, b"", [payload], deadline_s=soon()))
            for n in range(4)
            for connection in connections
        ]
        await kept.count(1)
        await asyncio.sleep(0.2)
        assert len(kept.calls) <= (
            len(connections) + 1 if scheme == "grpc" else 1
        )  # gRPC has read them before the limit applies
        for n in range(len(tasks)):
            (await kept.count(n + 1))[n].reply()
        await asyncio.gather(*tasks)
        assert limits.bytes == 0
        for connection in connections:
            await connection.close()
        await listener.close()

    run(check())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_of_large_messages_is_released(scheme, tmp_path):
    async def check():
        limits = Limits(Bounds(memory_bytes_per_peer=MIB), trust=False)
        listener = await listening(scheme, tmp_path, limits)
        connections = [await connect(scheme, listener) for _ in range(3)]
        message = os.urandom(3 * MIB)
        replies = await asyncio.gather(
            *[
                connection.call(1, message, [message], deadline_s=soon())
                for connection in connections
                for _ in range(3)
            ]
        )
        assert all(reply.message == message == reply.payload for reply in replies) and limits.bytes == 0
        for connection in connections:
            await connection.close()
        await listener.close()

    run(check())


NEVER_READS = """
import asyncio, sys, uvloop
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.rpc import transport_registry
from nvpool.rpc.api import Greeting
async def main():
    connection = await transport_registry.transport(sys.argv[1]).connect(sys.argv[2], Greeting("frozen"),
                                                               deadline_s=SYSTEM_CLOCK.boottime_s() + 20)
    for _ in range(100):
        connection.submit(1, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 60, on_done=lambda *_: None)
    await asyncio.sleep(60)
uvloop.run(main())
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_peer_that_never_reads_is_disconnected(scheme, tmp_path):
    async def check():
        kept = RecordingHandler()
        limits = Limits(Bounds(message_s=0.3), trust=False)
        listener = await listening(scheme, tmp_path, limits, kept)
        child = subprocess.Popen(  # noqa: ASYNC220 - returns immediately
            [sys.executable, "-c", NEVER_READS, scheme, listener.endpoint]
        )
        try:
            calls = list(await kept.count(100))
            child.send_signal(signal.SIGSTOP)
            good = await connect(scheme, listener)
            async with asyncio.timeout(
                20
            ):  # gRPC reports a connection to its service after the client may use it
                while len(listener.connections) < 2:  # noqa: ASYNC110 - what is awaited has no event
                    await asyncio.sleep(0.01)
            answer = [bytes(MIB // 8)]
            for call in calls:
                call.reply(b"", answer)
            while len(listener.connections) > 1:
                limits.run_once()
                await asyncio.sleep(0.05)
            kept.calls.clear()
            task = asyncio.ensure_future(good.call(2, b"", deadline_s=soon()))
            (await kept.count(1))[0].reply(b"served")
            assert (await task).message == b"served"
        finally:
            child.kill()
            child.wait()
        await good.close()
        await listener.close()

    run(check())


def test_pending_handshakes_are_counted(tmp_path):
    async def check():
        limits = Limits(FEW)
        listener = await listening("stream", tmp_path, limits, member=NODE)
        where = parse_endpoint(listener.endpoint)
        loop = asyncio.get_running_loop()
        silent = []
        for _ in range(5):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind(("127.0.0.9", 0))
            await loop.sock_connect(sock, (where.host, where.port))
            silent.append(sock)
        assert await loop.sock_recv(silent[4], 1) == b""  # disconnected; the others wait for their handshake
        connection = await connect("stream", listener, CLIENT_ID)
        assert (await connection.call(1, b"served", deadline_s=soon())).message == b"served"
        await connection.close()
        for sock in silent:
            sock.close()
        await listener.close()

    run(check())


def test_refused_handshake_reports_the_reason(tmp_path):
    async def check():
        listener = await listening("stream", tmp_path, Limits(FEW), member=NODE)
        where = parse_endpoint(listener.endpoint)
        silent = [socket.create_connection((where.host, where.port)) for _ in range(4)]
        await asyncio.sleep(0.05)
        said = str(await refused(Unreachable, connect("stream", listener, CLIENT_ID)))
        assert "too many connections" in said, said
        for sock in silent:
            sock.close()
        await listener.close()

    run(check())


def test_unauthenticated_peers_share_a_limit_per_address(tmp_path):
    async def check():
        listener = await transport_registry.transport("stream").listen(
            "stream://127.0.0.1:0",
            SERVER._replace(limits=Limits(FEW), identity=NODE, admit_unauthenticated=True),
            echo,
        )
        where = parse_endpoint(listener.endpoint)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        clients = [await asyncio.open_connection(where.host, where.port, ssl=context) for _ in range(4)]
        await until(lambda: len(listener.connections) == 4)
        with pytest.raises(OSError):
            reader, _ = await asyncio.open_connection(where.host, where.port, ssl=context)
            assert await reader.read() == b""
            raise ConnectionResetError
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: not listener.connections)
        member = await connect("stream", listener, CLIENT_ID)
        await member.close()
        await listener.close()

    run(check())
