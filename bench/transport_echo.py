"""Cost of a request on each transport, beside two floors.

The floors carry the same bytes between two processes over blocking sockets, and over bare uvloop protocols that know the
length beforehand.

    .venv/bin/python bench/transport_echo.py [--seconds 2] [--json] [scheme …]

Latency: one request at a time, a message of 120 bytes (a read of one block with its grant), an answer with 4 KiB of payload.
Batches: 8 in flight, 64 reads of 4 KiB a message, as the SDK sends them. Large: 4 in flight, 1 MiB of payload each way.
The server is another process. Answers come from memory and are received where the caller wants them.
"""

import argparse
import asyncio
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time

import uvloop

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.rpc import transport_registry
from nvpool.rpc.api import Greeting

READ, WRITE, MANY = 1, 2, 64
READ_BYTES, LARGE_BYTES = 4096, 1 << 20
SMALL_REQUEST, BATCH_REQUEST = bytes(120), bytes(160 + 24 * MANY)
SCHEMES = ("inproc", "stream+unix", "stream", "grpc")


def answer(call) -> None:
    """Reply with as many KiB of payload as the number of the method; 0: with none."""
    call.reply(
        bytes(16 * MANY if call.method > 4 else 16), [PAYLOAD[: call.method << 10]] if call.method else ()
    )


PAYLOAD = memoryview(bytes(LARGE_BYTES))


async def serve(endpoint: str) -> None:
    loop = asyncio.get_running_loop()
    if endpoint.startswith("bare:"):
        endpoint = endpoint[len("bare:") :]
        server = await loop.create_unix_server(BareServer, endpoint)
        print(endpoint, flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()
        return
    listener = await transport_registry.listen(endpoint, Greeting("echo"), answer)
    print(listener.endpoint, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until our parent closes it
    await listener.close()


async def measure(scheme: str, directory: str, seconds: float) -> dict:
    endpoint = {"inproc": "inproc://echo", "stream+unix": f"stream+unix://{directory}/s"}.get(
        scheme, f"{scheme}://127.0.0.1:0"
    )
    child = listener = None
    if scheme == "inproc":
        listener = await transport_registry.listen(endpoint, Greeting("echo"), answer)
    else:
        child, endpoint = server_process(endpoint)
    try:
        connection = await transport_registry.transport(scheme).connect(
            endpoint, Greeting("bench"), deadline_s=deadline()
        )
        await latency(connection, 0.2)
        found = await latency(connection, seconds)
        found["submit_us"] = await submitted(connection, seconds)
        found["calls_per_s_16"] = await in_flight(connection, 16, SMALL_REQUEST, 4, seconds)
        found["reads_per_s"] = MANY * await in_flight(connection, 8, BATCH_REQUEST, 4 * MANY, seconds)
        found["read_mib_per_s"] = await in_flight(connection, 4, SMALL_REQUEST, 1024, seconds)
        found["write_mib_per_s"] = await in_flight(connection, 4, SMALL_REQUEST, 0, seconds, [PAYLOAD])
        await connection.close()
    finally:
        if child is not None:
            child.communicate()
        if listener is not None:
            await listener.close()
    return found


def server_process(endpoint: str) -> tuple[subprocess.Popen, str]:
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return child, child.stdout.readline().decode().strip()


def deadline() -> float:
    return SYSTEM_CLOCK.boottime_s() + 60


async def latency(connection, seconds: float) -> dict:
    took = []
    into = memoryview(bytearray(READ_BYTES))
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await connection.call(4, SMALL_REQUEST, deadline_s=deadline(), into=into)
        took.append(time.perf_counter() - began)
    return percentiles(took)


async def submitted(connection, seconds: float) -> float:
    """Microseconds per request with `submit`; on_done sends the next request, so no task is woken."""
    done = asyncio.get_running_loop().create_future()
    into = memoryview(bytearray(READ_BYTES))
    end = time.perf_counter() + seconds
    count = 0

    def again(reply, error) -> None:
        nonlocal count
        count += 1
        if error is not None:
            done.set_exception(error)
        elif time.perf_counter() < end:
            connection.submit(4, SMALL_REQUEST, deadline_s=deadline(), into=into, on_done=again)
        else:
            done.set_result(None)

    connection.submit(4, SMALL_REQUEST, deadline_s=deadline(), into=into, on_done=again)
    await done
    return seconds / count * 1e6


async def in_flight(connection, width: int, message: bytes, method: int, seconds: float, payload=()) -> float:
    """Requests per second with `width` of them in flight."""
    end = time.perf_counter() + seconds
    count = 0

    async def ask() -> None:
        nonlocal count
        into = memoryview(bytearray(max(1, method << 10)))
        while time.perf_counter() < end:
            await connection.call(method, message, payload, deadline_s=deadline(), into=into)
            count += 1

    await asyncio.gather(*[ask() for _ in range(width)])
    return count / seconds


def percentiles(took: list[float]) -> dict:
    took.sort()
    return {
        "call_us": sum(took) / len(took) * 1e6,
        "p50_us": took[len(took) // 2] * 1e6,
        "p99_us": took[len(took) * 99 // 100] * 1e6,
    }


def floor(family: int, seconds: float) -> dict:
    """The same bytes over blocking sockets between two processes, one request at a time, and 1 MiB answers."""
    ours, theirs = socket.socketpair() if family == socket.AF_UNIX else tcp_pair()
    for sock in (ours, theirs):
        if family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve-floor", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    buffer = memoryview(bytearray(LARGE_BYTES + 48))
    found = {}
    for name, size in (("call_us", READ_BYTES + 48), ("read_mib_per_s", LARGE_BYTES + 48)):
        request = struct.pack("<I", size) + bytes(148)
        took = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            ours.sendall(request)
            received = 0
            while received < size:
                received += ours.recv_into(buffer[received:size])
            took.append(time.perf_counter() - began)
        found |= percentiles(took) if name == "call_us" else {name: len(took) / seconds}
    ours.close()
    child.wait()
    return found


def serve_floor(descriptor: int) -> None:
    sock = socket.socket(fileno=descriptor)
    answer_bytes = memoryview(bytes(LARGE_BYTES + 48))
    request = bytearray(152)
    while sock.recv_into(request) == 152:
        sock.sendall(answer_bytes[: int.from_bytes(request[:4], "little")])


class BareServer(asyncio.Protocol):
    answer = bytes(READ_BYTES + 48)

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data) -> None:
        self.transport.write(self.answer)


class BareClient(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.buffer, self.received = memoryview(bytearray(READ_BYTES + 48)), 0

    def get_buffer(self, hint):
        return self.buffer[self.received :]

    def buffer_updated(self, count) -> None:
        self.received = (self.received + count) % len(self.buffer)
        if not self.received:
            self.answered.set_result(None)


async def floor_of_the_loop(directory: str, seconds: float) -> dict:
    child, path = server_process(f"bare:{directory}/b")
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_unix_connection(BareClient, path)
    request = bytes(152)
    took = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        client.answered = loop.create_future()
        transport.write(request)
        await client.answered
        took.append(time.perf_counter() - began)
    transport.close()
    child.communicate()
    return percentiles(took)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--serve-floor", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_floor is not None:
        serve_floor(options.serve_floor)
        return
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    table = {
        "floor unix": floor(socket.AF_UNIX, options.seconds),
        "floor tcp": floor(socket.AF_INET, options.seconds),
    }
    with tempfile.TemporaryDirectory(prefix="nvpool-bench-") as directory:
        table["floor uvloop"] = uvloop.run(floor_of_the_loop(directory, options.seconds))
    for scheme in options.schemes:
        with tempfile.TemporaryDirectory(prefix="nvpool-bench-") as directory:
            table[scheme] = uvloop.run(measure(scheme, directory, options.seconds))
    if options.json:
        print(json.dumps(table))
        return
    columns = (
        "call_us",
        "p50_us",
        "p99_us",
        "submit_us",
        "calls_per_s_16",
        "reads_per_s",
        "read_mib_per_s",
        "write_mib_per_s",
    )
    print(f"{'':14}" + "".join(f"{name:>16}" for name in columns))
    for name, row in table.items():
        print(
            f"{name:14}"
            + "".join(f"{row[column]:>16,.0f}" if column in row else f"{'-':>16}" for column in columns)
        )


if __name__ == "__main__":
    main()
