"""Reads by the calling thread: same bytes as by the loop, which gets every read that is not plain."""

import asyncio
import os
import random
import signal
import socket
import tempfile
import threading
import time

import pytest

import nvpool
from nvpool.client.read import caller_thread_reads as read_threads
from nvpool.client.state.options import ClientOptions
from nvpool.core import errors
from nvpool.core.units import MIB
from nvpool.rpc.api import Greeting
from nvpool.rpc.transports.stream import StreamTransport, UnixStreamTransport
from nvpool.rpc.transports.sync_stream import BlockingConnection
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from nvpool.testing.fakes.in_process_pool import InProcessPool

BLOCK = 4096
CONTENT = random.Random(7).randbytes(3 * MIB + 5000)


class Served:
    """A pool on drives, served by a loop in a thread: at Unix sockets, or at TCP ports like those of another host."""

    def __init__(self, scheme: str):
        self._place = tempfile.TemporaryDirectory(prefix="nvpool-thread-", dir="/tmp")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._ports: dict[tuple[str, int], int] = {}
        self.scheme = scheme
        self.pool = InProcessPool(self._place.name, endpoints=self._endpoint)
        self.run(self.pool.__aenter__())

    def _endpoint(self, role, number):
        if self.scheme == "stream+unix":
            return f"stream+unix://{self._place.name}/{role}-{number}.sock"
        if (role, number) not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._ports[role, number] = free.getsockname()[1]
        return f"stream://127.0.0.1:{self._ports[role, number]}"

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self):
        self.run(self.pool.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()
        self._place.cleanup()


@pytest.fixture(params=["stream", "stream+unix"])
def served(request):
    found = Served(request.param)
    yield found
    found.close()


@pytest.fixture
def here():
    found = Served("stream+unix")
    yield found
    found.close()


class Case:
    """A client with an open file with CONTENT."""

    def __init__(self, served, **options):
        self.served = served
        options = ClientOptions(deadline_s=20.0, small_bytes=0, **options)
        self.client = nvpool.connect(served.pool.pool_map, options=options)
        with self.client.open("/file", "wb") as file:
            file.write(CONTENT)
        self.file = self.client.open("/file", "rb", buffering=0)
        self.counters = self.client.runtime().reads.counters

    def __enter__(self):
        for index in range(4):  # makes the lanes known
            self.read(index * MIB + 9, 100)
        return self

    def __exit__(self, *_):
        self.file.close()
        self.client.close()

    def read(self, offset, length):
        """A pread that checks its bytes."""
        found = self.file.pread(length, offset)
        assert type(found) is bytes and found == CONTENT[offset : offset + length], (offset, length)

    def by(self, way, reads):
        """Number of these reads (offset, length) that used this path."""
        before = self.counters[way]
        for offset, length in reads:
            self.read(offset, length)
        return self.counters[way] - before

    @property
    def handle(self):
        return self.file.handle_in(self.client)


def at_random(count, seed=1, sizes=(1, 100, 4096, 4097, 65536, 200_000)):
    chance = random.Random(seed)
    return [(chance.randrange(10, len(CONTENT)), chance.choice(sizes)) for _ in range(count)]


def blocks(count, seed=1):
    """Random blocks of the first 3 MiB, no two in sequence."""
    chance, place, found = random.Random(seed), 0, []
    while len(found) < count:
        if (block := chance.randrange(1, 768)) != place + 1:
            found.append((block * BLOCK, BLOCK))
            place = block
    return found


def patched(served, answer):
    """Each DATA_READ goes to answer(original, call) from now on."""

    async def patch():
        for service in served.pool.stores.values():
            original = service.methods[DATA_READ]
            service.methods[DATA_READ] = lambda call, original=original: answer(original, call)

    served.run(patch())


def test_random_reads_use_the_threads_own_connection(served):
    with Case(served, short_circuit=False) as case:
        messages = case.client.runtime().pool.vfs.chunks.counters["messages"]
        assert case.by("lanes", blocks(200)) == 200
        assert case.client.runtime().pool.vfs.chunks.counters["messages"] == messages
        assert case.by("lanes", at_random(200)) > 100
        case.read(len(CONTENT) - 10, 100)
        case.read(len(CONTENT) + 10, 100)


def test_cached_short_circuit_reads_do_not_use_the_loop(here):
    with Case(here) as case:
        until = time.monotonic() + 120
        while case.by("short_circuit", blocks(50)) < 50:
            assert time.monotonic() < until
        assert case.by("short_circuit", at_random(200)) > 100 and not case.counters["lanes"]


def test_connection_is_used_without_short_circuit_reads(served):
    if served.scheme != "stream":
        pytest.skip("over a unix socket it can be had")
    with Case(served) as case:
        case.by("lanes", blocks(20))
        assert case.by("lanes", blocks(20)) == 20


def test_reads_see_local_and_remote_writes(here):
    for short_circuit in (True, False):
        with (
            Case(here, short_circuit=short_circuit) as case,
            case.client.open("/file", "r+b", buffering=0) as writing,
        ):
            for turn in range(200):
                case.by("lanes", blocks(3, turn))
                offset = random.Random(turn).randrange(100, 2 * MIB)
                new = random.Random(turn).randbytes(5000)
                writing.pwrite(new, offset)
                if turn % 3 == 0:
                    writing.flush()
                assert case.file.pread(len(new), offset) == new
                writing.pwrite(CONTENT[offset : offset + len(new)], offset)
                case.read(offset, len(new))
            writing.flush()
            with (
                nvpool.connect(here.pool.pool_map) as other,
                other.open("/file", "r+b", buffering=0) as theirs,
            ):
                theirs.pwrite(b"theirs", 500_000)
                theirs.fsync()
            with case.client.open("/file", "rb", buffering=0) as again:
                assert again.pread(6, 500_000) == b"theirs" and case.file.pread(6, 500_000) == b"theirs"


def test_holes_are_read_as_zeros(served):
    with Case(served, short_circuit=False) as case:
        with case.client.open("/sparse", "wb", buffering=0) as file:
            file.pwrite(b"x" * BLOCK, 0)
            file.pwrite(b"x" * BLOCK, 40 * BLOCK)
            file.truncate(100 * BLOCK)
        with case.client.open("/sparse", "rb", buffering=0) as file:
            file.pread(10, 9000)
            before = case.counters["lanes"]
            for block in (60, 40, 20, 40, 99):
                expected = b"x" if block == 40 else b"\0"
                assert file.pread(BLOCK, block * BLOCK) == expected * BLOCK
            assert file.pread(3 * BLOCK, 39 * BLOCK) == bytes(BLOCK) + b"x" * BLOCK + bytes(BLOCK)
            assert case.counters["lanes"] - before == 6


def test_expired_token_is_renewed_by_the_loop(served):
    with Case(served, short_circuit=False) as case:
        case.handle.file.grant = bytes(60)
        assert case.by("lanes", blocks(1)) == 0 and any(case.handle.file.grant)
        assert case.by("lanes", blocks(20)) == 20


@pytest.mark.parametrize(
    "error", [errors.StaleEpoch, errors.Busy, errors.WrongTarget, errors.Draining, errors.InvalidRequest]
)
def test_refused_read_goes_to_the_loop_and_keeps_the_connection(served, error):
    with Case(served, short_circuit=False) as case:
        case.by("lanes", blocks(5))
        refused = []

        def once(original, call):
            if not refused:
                refused.append(call)
                raise error("not now")
            original(call)

        patched(served, once)
        assert case.by("lanes", blocks(30)) == 29 and refused


def test_wrong_bytes_or_invalid_replies_are_never_returned(served):
    with Case(served, short_circuit=False) as case:
        case.by("lanes", blocks(5))
        spoiling = []

        def spoil(original, call):
            if spoiling:
                spoil_with, reply = spoiling.pop(), call.reply

                class Spoiled:
                    def __getattr__(self, name):
                        return getattr(call, name)

                    def reply(self, message=b"", payload=()):
                        reply(*spoil_with(bytes(message), b"".join(payload)))

                call_to_answer = Spoiled()
            else:
                call_to_answer = call
            original(call_to_answer)

        patched(served, spoil)
        for one in (
            lambda message, payload: (message, [bytes([payload[0] ^ 1]) + payload[1:]]),
            lambda message, payload: (message, [payload[:-1]]),
            lambda message, payload: (message, [payload, payload]),
            lambda message, payload: (message, []),
            lambda message, payload: (b"\xff\xff", [payload]),
            lambda message, payload: (b"", [payload]),
        ):
            spoiling.append(one)
            assert case.by("lanes", blocks(10)) == 9 and not spoiling


def test_read_from_a_silent_store_goes_to_the_loop(served, monkeypatch):
    monkeypatch.setattr(read_threads, "PATIENCE_S", 0.2)
    with Case(served, short_circuit=False) as case:
        held = []
        patched(served, lambda original, call: original(call) if held else held.append(call))
        one_chunk = [(block * BLOCK, BLOCK) for block in (10, 5, 8)]
        assert case.by("lanes", one_chunk) == 0, "the loop reads from this target for a while"
        assert held
        monkeypatch.setattr(read_threads, "SHUN_S", 0.0)
        for way in case.client.runtime().reads.connections.values():
            way.not_before_s = 0.0
        assert case.by("lanes", blocks(10)) == 10


def test_store_restart_causes_no_error_in_concurrent_reads(served):
    with Case(served, short_circuit=False) as case:
        stop, problems = threading.Event(), []

        def reader(seed):
            try:
                while not stop.is_set():
                    seed += 100
                    for offset, length in at_random(10, seed):
                        case.read(offset, length)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            for target in list(served.pool.stores):
                served.run(asyncio.sleep(0.1))
                served.run(served.pool.stop_store(target))
                served.run(served.pool.start_store(target))
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not problems and case.counters["lanes"]
        assert all(
            len(way.idle) == read_threads.LANES_MAX
            for way in case.client.runtime().reads.connections.values()
        )


def test_first_read_detects_a_restarted_store(served, monkeypatch):
    monkeypatch.setattr(read_threads, "SHUN_S", 0.0)
    with Case(served, short_circuit=False) as case:
        one_chunk = [(block * BLOCK, BLOCK) for block in (10, 5, 8, 3, 20, 17)]
        case.by("lanes", one_chunk[:1])
        (way,) = [way for way in case.client.runtime().reads.connections.values() if any(way.idle)]
        connections = [way.idle.popleft() for _ in range(read_threads.LANES_MAX)]
        endpoint = (
            case.client.runtime().pool.client.dialer.live(case.handle.file.lanes[0].endpoints).peer.address
        )
        way.idle.extend(found or BlockingConnection(endpoint, Greeting("me"), 10.0) for found in connections)
        for target in list(served.pool.stores):
            served.run(served.pool.stop_store(target))
            served.run(served.pool.start_store(target))
        case.read(*one_chunk[1])
        assert not any(way.idle)
        assert case.by("lanes", one_chunk[2:]) == 4


def test_connections_of_threads_are_bounded_and_closed(served):
    before = len(os.listdir("/proc/self/fd"))
    with Case(served, short_circuit=False) as case:
        threads = [threading.Thread(target=case.by, args=("lanes", blocks(100, seed))) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        listeners = [listener for (role, _), listener in served.pool.listeners.items() if role == "target"]
        assert all(len(listener.connections) <= read_threads.LANES_MAX + 1 for listener in listeners)
    until = time.monotonic() + 120
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_interrupted_thread_ignores_a_late_reply(here, monkeypatch):
    monkeypatch.setattr(read_threads, "PATIENCE_S", 20.0)
    with Case(here, short_circuit=False) as case:
        case.by("lanes", blocks(5))
        held = []
        patched(here, lambda original, call: original(call) if held else held.append((original, call)))

        def interrupt(*_):
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                case.read(*blocks(1)[0])
        finally:
            signal.signal(signal.SIGALRM, previous)

        async def late():
            original, call = held[0]
            original(call)

        here.run(late())
        assert case.by("lanes", blocks(20, 3)) == 20


# -- the connection ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["stream", "stream+unix"])
def answering(request):
    """(endpoint, list of functions that answer the next calls, in order)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    answers = []

    async def listen(endpoint):
        transport = StreamTransport() if request.param == "stream" else UnixStreamTransport()
        return await transport.listen(
            endpoint, Greeting("server", "pool-a"), lambda call: answers.pop(0)(call)
        )

    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        endpoint = "stream://127.0.0.1:0" if request.param == "stream" else f"stream+unix://{place}/s"
        listener = asyncio.run_coroutine_threadsafe(listen(endpoint), loop).result(10)
        yield listener.endpoint, answers
        asyncio.run_coroutine_threadsafe(listener.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def test_call_returns_the_reply(answering):
    endpoint, answers = answering
    connection = BlockingConnection(endpoint, Greeting("me", "pool-a"), 10.0)
    for count in (0, 1, 4096, 65536, 65537, 3 * MIB):
        answers.append(lambda call, count=count: call.reply(bytes(call.message)[::-1], [CONTENT[:count]]))
        message, payload = connection.call(5, b"question")
        assert (message, payload) == (b"noitseuq", CONTENT[:count])
    answers.append(lambda call: call.fail(errors.NotFound("no such thing")))
    with pytest.raises(errors.NotFound, match="no such thing"):
        connection.call(5, b"")
    answers.append(lambda call: call.reply(b"still"))
    assert connection.call(5, b"")[0] == b"still" and not connection.closed
    connection.close()
    connection.close()


def test_call_without_a_reply_times_out_and_closes(answering):
    endpoint, answers = answering
    connection = BlockingConnection(endpoint, Greeting("me", "pool-a"), 0.2)
    answers.append(lambda call: None)
    with pytest.raises(errors.DeadlineExceeded):
        connection.call(5, b"")
    assert connection.closed


def test_connection_of_another_pool_is_refused(answering):
    with pytest.raises(errors.ProtocolMismatch):
        BlockingConnection(answering[0], Greeting("me", "pool-b"), 10.0)


@pytest.mark.parametrize(
    "endpoint", ["stream://127.0.0.1:1", "stream+unix:///nowhere/s", "grpc://127.0.0.1:1", "nonsense"]
)
def test_endpoint_without_a_listener_is_unreachable(endpoint):
    with pytest.raises(errors.Unreachable):
        BlockingConnection(endpoint, Greeting("me"), 0.5)


@pytest.mark.parametrize("said", [b"", b"x" * 100, None])
def test_peer_with_another_protocol_is_unreachable(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            one, _ = server.accept()
            if said is not None:
                one.sendall(said)
                one.close()
            else:
                gone.wait(10)
                one.close()

        gone = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(errors.Unreachable):
            BlockingConnection(f"stream://127.0.0.1:{server.getsockname()[1]}", Greeting("me"), 0.3)
        gone.set()
        thread.join(10)
