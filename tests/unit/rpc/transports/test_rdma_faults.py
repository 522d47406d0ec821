"""RDMA faults: peers that die, stop or fall silent while they write to our memory, and revoked keys."""

import asyncio
import functools
import logging
import os
import signal
import socket
import sys
from ipaddress import ip_network
from pathlib import Path

import pytest
import uvloop

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import DeadlineExceeded, Disconnected, Unavailable, Unreachable
from nvpool.rpc import transport_registry
from nvpool.rpc.transports import rdma, rdma_buffers, ucx
from nvpool.rpc.transports.rdma import RdmaSettings, RdmaTransport, RdmaUnixTransport
from nvpool.testing.contracts.transport import CLIENT, SERVER, RecordingHandler, echo, refused, soon, until

pytestmark = pytest.mark.skipif(bool(ucx.missing()), reason=ucx.missing() or "never")
LOOPBACK = (ip_network("127.0.0.0/8"),)
MIB = 1 << 20
WAYS = {
    "shm": (RdmaUnixTransport, RdmaSettings(local=True), "rdma+unix://{}/s"),
    "tcp": (RdmaTransport, RdmaSettings(networks=LOOPBACK, transports="tcp,self"), "rdma://127.0.0.1:0"),
}

PEER = """
import asyncio, os, signal, sys
from ipaddress import ip_network
from nvpool.rpc.transports import rdma as rdma_transport
from nvpool.rpc.api import Greeting
from nvpool.rpc.transports.rdma import *

class Served(RdmaServed):
    def _write(self, key, offset, payload):
        wanted, first, second = payload
        self.kept = super()._write(key, offset, (wanted, first))  # with what it sends
        if bytes(wanted) == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if bytes(wanted) == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._write(key, offset + len(wanted) + len(first), (second,))

class Listener(RdmaListener):
    def _serve(self):
        return Served(self)

kind, settings, endpoint = (RdmaUnixTransport, RdmaSettings(local=True), sys.argv[2]) if sys.argv[1] == "shm" else (
    RdmaTransport, RdmaSettings(networks=(ip_network("127.0.0.0/8"),), transports="tcp,self"), sys.argv[2])

class Faulty(kind):
    def _listening(self, greeting, handler, identity):
        return Listener(self._settings, greeting, handler, self.local, self._clock, identity)

def handler(call):
    word, letter, count = bytes(call.message).split()
    call.reply(b"", [word, letter * (int(count) // 2), letter * (int(count) // 2)])

async def main():
    listener = await Faulty(settings).listen(endpoint, Greeting("the faulty one", "pool-a"), handler)
    print(listener.endpoint, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await listener.close()

asyncio.run(main())
"""


def on_a_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        async def timed():
            async with asyncio.timeout(60):
                await test(*args, **kwargs)
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(timed())

    return run


class Peer:
    """A store in its own process, which dies or stops in the middle of a write if the request says so."""

    def __init__(self, way, place):
        self._way, self._place = way, place

    async def __aenter__(self):
        kind, settings, endpoint = WAYS[self._way]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PEER,
            self._way,
            endpoint.format(self._place),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.pid = self._process.pid
        said = (await self._process.stdout.readline()).decode().strip()
        self.connection = await kind(settings).connect(said, CLIENT, deadline_s=soon())
        return self

    async def __aexit__(self, *_):
        await self.connection.close()
        for number in (signal.SIGCONT, signal.SIGKILL):
            if self._process.returncode is None:
                self._process.send_signal(number)
        await self._process.wait()

    def ask(self, word, letter, count, deadline_s=None):
        """Future of the payload."""
        future = asyncio.get_running_loop().create_future()
        self.connection.submit(
            1,
            f"{word} {letter} {count}".encode(),
            deadline_s=deadline_s or soon(),
            room=count + 8,
            on_done=lambda reply, error: future.set_exception(error) if error else future.set_result(reply),
        )
        return future

    async def stopped(self):
        await until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


def pair(way, place, handler):
    """(transport, endpoint, handler) of a listener in this process."""
    kind, settings, endpoint = WAYS[way]
    return kind(settings), endpoint.format(place), handler


@pytest.mark.parametrize("way", ["shm"])  # UCX's tcp aborts the reader in this case; node.toml refuses it
@on_a_loop
async def test_memory_of_a_peer_that_died_in_a_write_is_not_reused(way, tmp_path):
    async with Peer(way, tmp_path) as peer:
        good = (await peer.ask("go", "g", MIB)).payload
        assert good[2:] == b"g" * MIB  # the word itself is 2 bytes, see PEER
        before = set(peer.connection.rooms.numbers())
        await refused(Disconnected, peer.ask("die", "d", MIB))
        assert peer.connection.closed and not peer.connection.upgraded and before
        assert peer.connection.rooms.take(4096) is None, "its memory was reused"
        assert peer.connection.turning.closed, "data can still arrive"
        assert good[2:] == b"g" * MIB, "memory with a reader was unmapped"


@pytest.mark.parametrize("way", WAYS)
@on_a_loop
async def test_late_write_of_an_abandoned_connection_is_harmless(way, tmp_path, monkeypatch):
    """The peer stops in the middle of a write; the client gives up and reuses memory with another peer; then the first peer
    continues."""
    monkeypatch.setattr(rdma, "QUARANTINE_S", 0.2)
    async with Peer(way, tmp_path / "a" if way == "tcp" else _made(tmp_path / "a")) as peer:
        asked = peer.ask("stop", "x", 8 * MIB, SYSTEM_CLOCK.boottime_s() + 0.3)
        await peer.stopped()
        (place,) = peer.connection.places.values()
        await refused(DeadlineExceeded, asked)
        assert list(peer.connection.places.values()) == [place], (
            "the buffer is not kept until the store replies"
        )
        other = peer.connection.rooms.take(8 * MIB)
        assert (other.key, other.offset) != (place.key, place.offset)
        del other, place
        await until(lambda: peer.connection.closed)  # the peer never said that it stopped writing
        async with Peer(way, tmp_path / "b" if way == "tcp" else _made(tmp_path / "b")) as another:
            held = [(await another.ask("go", letter, 8 * MIB)).payload for letter in "pqrs"]
            os.kill(peer.pid, signal.SIGCONT)
            held += [(await another.ask("go", letter, 8 * MIB)).payload for letter in "tu"]
            await asyncio.sleep(0.2)
            for letter, payload in zip(b"pqrstu", held, strict=True):
                assert payload[2:] == bytes([letter]) * (8 * MIB), "a foreign byte in reused memory"


def _made(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("way", WAYS)
@on_a_loop
async def test_buffer_is_reused_after_the_store_replies(way, tmp_path):
    kept = RecordingHandler()
    transport, endpoint, handler = pair(way, tmp_path, kept)
    listener = await transport.listen(endpoint, SERVER, handler)
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    number = connection.submit(1, b"", deadline_s=soon(), room=MIB, on_done=lambda *_: None)
    (call,) = await kept.count(1)
    place = connection.places[number]
    where = place.key, place.offset
    del place
    connection.give_up(number)
    assert number in connection.places and number in connection.quarantined
    await until(lambda: number not in connection.places)
    assert call.cancelled and not connection.quarantined
    again = connection.rooms.take(MIB)
    assert (again.key, again.offset) == where
    call.reply(b"", [bytes(MIB)])  # too late: no data may be written
    await connection.close()
    await listener.close()


@pytest.mark.parametrize("way", WAYS)
@on_a_loop
async def test_request_with_a_revoked_key_is_unavailable(way, tmp_path):
    kept = RecordingHandler()
    transport, endpoint, handler = pair(way, tmp_path, kept)
    listener = await transport.listen(endpoint, SERVER, handler)
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    asked = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon(), into=memoryview(bytearray(MIB))))
    (call,) = await kept.count(1)
    connection.revoke_keys()
    again = asyncio.ensure_future(connection.call(2, b"", deadline_s=soon(), into=memoryview(bytearray(MIB))))
    later = (await kept.count(2))[1]
    call.reply(b"", [b"a" * MIB])
    assert "key" in str(await refused(Unavailable, asked))
    later.reply(b"", [b"b" * MIB])
    assert (await again).payload == b"b" * MIB and connection.placed_bytes == MIB
    await connection.close()
    await listener.close()


@on_a_loop
async def test_buffers_of_a_client_that_revokes_or_leaves_are_unused(tmp_path):
    kept = RecordingHandler()
    transport, endpoint, handler = pair("shm", tmp_path, kept)
    listener = await transport.listen(endpoint, SERVER, handler)
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    asked = [
        asyncio.ensure_future(connection.call(1, b"", deadline_s=soon(), into=memoryview(bytearray(MIB))))
        for _ in range(4)
    ]
    filled, late, given_up, left = await kept.count(4)
    rooms_there = [call.room(MIB) for call in (filled, given_up, left)]
    assert all(room is not None for room in rooms_there)
    asked[2].cancel()
    await until(lambda: given_up.cancelled)
    given_up.reply(b"", [rooms_there[1]])
    connection.revoke_keys()
    again = asyncio.ensure_future(connection.call(2, b"", deadline_s=soon(), into=memoryview(bytearray(MIB))))
    later = (await kept.count(5))[4]
    assert late.room(MIB) is None, "the key was revoked"
    for room in rooms_there:
        room[:] = b"x" * MIB  # the memory is still mapped
    filled.reply(b"", [rooms_there[0]])
    late.reply(b"", [b"x" * MIB])
    for future in asked[:2]:
        assert "key" in str(await refused(Unavailable, future))
    room = later.room(MIB)
    room[:] = b"b" * MIB
    later.reply(b"", [room])
    assert (await again).payload == b"b" * MIB and connection.placed_bytes == MIB
    await connection.close()
    await until(lambda: left.cancelled)
    assert left.room(MIB) is None
    rooms_there[2][:] = room[:] = b"y" * MIB  # late writes are harmless
    left.reply(b"", [rooms_there[2]])
    await refused(Disconnected, asked[3])
    await listener.close()
    del rooms_there, room  # after the worker has gone


@pytest.mark.parametrize("way", WAYS)
@on_a_loop
async def test_lost_completion_ends_the_connection(way, tmp_path, monkeypatch):
    monkeypatch.setattr(rdma, "QUARANTINE_S", 0.2)
    monkeypatch.setattr(rdma.RdmaServed, "_written", lambda *_: None)
    transport, endpoint, handler = pair(way, tmp_path, lambda call: call.reply(b"", [b"z" * MIB]))
    listener = await transport.listen(endpoint, SERVER, handler)
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    mine = bytearray(MIB)
    await refused(
        DeadlineExceeded,
        connection.call(1, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 0.2, into=memoryview(mine)),
    )
    assert not connection.closed and connection.places
    other = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon(), into=memoryview(bytearray(MIB))))
    await refused(Disconnected, other)
    assert connection.closed and not any(mine), "the caller's memory was written after it was returned"
    await listener.close()


@on_a_loop
async def test_client_that_disconnects_in_a_write_affects_no_other(tmp_path):
    transport, endpoint, handler = pair("tcp", tmp_path, echo)
    listener = await transport.listen(endpoint, SERVER, handler)
    staying = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    for _ in range(3):
        going = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
        asked = asyncio.ensure_future(
            going.call(1, b"", [bytes(30 * MIB)], deadline_s=soon(), into=memoryview(bytearray(30 * MIB)))
        )
        await until(lambda: asked.done() or any(served.writing_bytes for served in listener.connections))  # noqa: B023
        going.frames.transport.abort()
        await asyncio.wait([asked])
        assert asked.exception() is None or isinstance(asked.exception(), Disconnected)
        reply = await staying.call(1, b"", [b"s" * MIB], deadline_s=soon(), into=memoryview(bytearray(MIB)))
        assert reply.payload == b"s" * MIB
    await until(lambda: not listener.turning.flushes)
    await staying.close()
    await listener.close()


@on_a_loop
async def test_memory_is_bounded_and_replies_fall_back_to_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(rdma_buffers, "ROOM_BYTES_MAX", 8 * MIB)
    monkeypatch.setattr(rdma_buffers.RegisteredBuffers.__init__, "__kwdefaults__", {"bytes_max": 8 * MIB})
    transport, endpoint, handler = pair(
        "shm", tmp_path, lambda call: call.reply(b"", [bytes(call.message) * MIB])
    )
    listener = await transport.listen(endpoint, SERVER, handler)
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    before = rdma_buffers.in_process[0]
    held = [
        await connection.call(1, bytes([n]), deadline_s=soon(), into=memoryview(bytearray(MIB)))
        for n in range(20)
    ]
    asked = [
        asyncio.ensure_future(
            connection.call(1, bytes([n]), deadline_s=soon(), into=memoryview(bytearray(MIB)))
        )
        for n in range(20)
    ]
    for number, answer in enumerate(await asyncio.gather(*asked)):
        assert answer.payload == bytes([number]) * MIB == held[number].payload
    assert connection.rooms.byte_count <= 8 * MIB and rdma_buffers.in_process[0] - before <= 8 * MIB
    assert 20 * MIB <= connection.placed_bytes < 40 * MIB
    placed = connection.placed_bytes
    larger = await connection.call(1, b"k", deadline_s=soon(), into=memoryview(bytearray(2 * MIB)))
    assert (
        larger.payload == b"k" * MIB and connection.placed_bytes == placed + MIB
    )  # replaces an unused buffer
    assert connection.rooms.byte_count <= 8 * MIB
    await connection.close()
    assert rdma_buffers.in_process[0] < before + MIB
    await listener.close()


# -- negotiation


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        (RdmaSettings(), "does not offer"),
        (RdmaSettings(networks=(ip_network("10.0.0.0/8"),), transports="tcp,self"), "does not offer"),
        (RdmaSettings(networks=LOOPBACK, transports="nosuch"), "does not offer"),
        (RdmaSettings(networks=LOOPBACK), "does not offer"),
    ],
)
@on_a_loop
async def test_connection_without_rdma_on_one_side_is_a_stream(offered, why, tmp_path):
    listener = await RdmaTransport(offered).listen("stream://127.0.0.1:0", SERVER, echo)
    assert why in str(
        await refused(Unreachable, RdmaTransport().connect(listener.endpoint, CLIENT, deadline_s=soon()))
    )
    connection = await transport_registry.upgrading("stream").connect(
        listener.endpoint, CLIENT, deadline_s=soon()
    )
    assert not connection.upgraded
    assert (await connection.call(65535, b"m", [b"p"], deadline_s=soon())).payload == b"p"
    await connection.close()
    await listener.close()


@on_a_loop
async def test_failed_device_is_logged_once_and_not_used(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    transport, endpoint, handler = pair("shm", tmp_path, echo)
    listener = await transport.listen(endpoint, SERVER, handler)
    monkeypatch.setattr(
        ucx, "Worker", lambda context: (_ for _ in ()).throw(ucx.Error("the device is on fire"))
    )
    lenient = RdmaUnixTransport(strict=False)
    for _ in range(2):
        connection = await lenient.connect(f"stream+unix://{tmp_path}/s", CLIENT, deadline_s=soon())
        answer = await connection.call(
            1, b"", [b"as ever" * 9999], deadline_s=soon(), into=memoryview(bytearray(70_000))
        )
        assert answer.payload == b"as ever" * 9999 and not connection.placed_bytes
        await connection.close()
    ours = [record.getMessage() for record in caplog.records if "so it is stream+unix" in record.getMessage()]
    assert len(ours) == 1 and "the device is on fire" in ours[0]
    await listener.close()


@on_a_loop
async def test_peer_without_rdma_is_served_over_the_stream(tmp_path):
    transport, endpoint, handler = pair("shm", tmp_path, echo)
    listener = await transport.listen(endpoint, SERVER, handler)
    plain = await transport_registry.transport("stream+unix").connect(
        f"stream+unix://{tmp_path}/s", CLIENT, deadline_s=soon()
    )
    assert (await plain.call(65535, b"m", [b"p"], deadline_s=soon())).payload == b"p"
    await plain.close()
    await listener.close()
    listener = await transport_registry.listen(f"stream+unix://{tmp_path}/s", SERVER, echo)
    asking = await transport_registry.upgrading("stream+unix").connect(
        listener.endpoint, CLIENT, deadline_s=soon()
    )
    assert not asking.upgraded and (await asking.call(1, b"m", [b"p"], deadline_s=soon())).payload == b"p"
    await asking.close()
    await listener.close()


@on_a_loop
async def test_invalid_messages_end_only_their_connection(tmp_path, caplog):
    transport, endpoint, handler = pair("shm", tmp_path, echo)
    listener = await transport.listen(endpoint, SERVER, handler)
    for word, said in (
        (rdma.KEY, b"short"),
        (rdma.TRY, b""),
        (99, b"what"),
        (rdma.FORGET, b""),
        (rdma.BEGIN, b"again"),
    ):
        connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
        connection.say(word, said)
        await until(lambda: connection.closed)  # noqa: B023  awaited immediately
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    connection.say(rdma.KEY, rdma.KEY_HEAD.pack(77, 0, 4096, 4096) + bytes(40))
    assert (await connection.call(1, b"m", [b"p"], deadline_s=soon())).payload == b"p"
    await connection.close()
    await listener.close()


def test_port_without_a_listener_is_unreachable():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    async def main():
        await refused(
            Unreachable, RdmaTransport().connect(f"rdma://127.0.0.1:{port}", CLIENT, deadline_s=soon())
        )

    asyncio.run(main())


@on_a_loop
async def test_forked_child_does_not_use_rdma_of_its_parent(tmp_path):
    transport, endpoint, handler = pair("shm", tmp_path, echo)
    listener = await transport.listen(endpoint, SERVER, handler)
    connection = await transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
    child = os.fork()
    if not child:
        reason = ucx.missing()
        connection.rooms.close()
        connection.turning.worker.close()
        listener.turning.worker.close()
        os._exit(0 if "forked" in reason else 1)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222  the child ends immediately
    assert os.waitstatus_to_exitcode(status) == 0
    into = memoryview(bytearray(MIB))
    assert (await connection.call(1, b"", [b"p" * MIB], deadline_s=soon(), into=into)).payload == b"p" * MIB
    assert connection.placed_bytes == MIB
    await connection.close()
    await listener.close()
