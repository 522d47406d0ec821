"""Dialer: choice of the endpoint, one shared connection, reconnection; and the in-process transport."""

import asyncio
import os
import socket
from types import SimpleNamespace

import pytest
import uvloop

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    AccessDenied,
    DeadlineExceeded,
    Disconnected,
    InvalidRequest,
    NotFound,
    NotLeader,
    ProtocolMismatch,
    StaleIdentity,
    StaleTerm,
    Unavailable,
    Unreachable,
)
from nvpool.rpc import connection_pool, transport_registry
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.lease_renewal import LeaseCalls
from nvpool.rpc.transports.frame import CANCEL, HELLO, REPLY, REQUEST
from nvpool.rpc.transports.inproc import InprocTransport
from nvpool.testing.contracts.transport import RecordingHandler, echo, refused, soon, until

US, SERVER = Greeting("we", "pool-a"), Greeting("the server", "pool-a")


def run(coroutine) -> None:
    async def timed():
        async with asyncio.timeout(120):
            await coroutine
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(timed())


class Recorder(InprocTransport):
    """An in-process transport under another name, which counts attempts and can fail them."""

    def __init__(self, scheme, rank, failing=None):
        super().__init__()
        self.scheme, self.rank, self.failing, self.attempts = scheme, rank, failing, []

    async def connect(self, endpoint, greeting, *, deadline_s):
        self.attempts.append(endpoint)
        await asyncio.sleep(0)
        if self.failing:
            await asyncio.sleep(self.failing[1])
            raise self.failing[0]
        return await super().connect("inproc://here", greeting, deadline_s=deadline_s)


def test_best_reachable_transport_is_used(tmp_path):
    async def check():
        listeners = [
            await transport_registry.listen(endpoint, SERVER, echo)
            for endpoint in ("grpc://127.0.0.1:0", "stream://127.0.0.1:0", f"stream+unix://{tmp_path}/s")
        ]
        endpoints = (
            "carrier-pigeon://coop:1",
            "not an endpoint",
            *[listener.endpoint for listener in listeners],
        )
        for scheme in ("stream+unix", "stream", "grpc"):
            dialer = Dialer(US)
            connection = await dialer.connect(endpoints, soon())
            assert connection.peer.address.startswith(f"{scheme}://")
            assert connection.peer.local == (scheme == "stream+unix")
            assert (await dialer.call(endpoints, 1, b"hello", deadline_s=soon())).message == b"hello"
            await listeners.pop().close()
            await dialer.close()
        dialer = Dialer(US)
        await refused(Unreachable, dialer.call(endpoints, 1, b"", deadline_s=soon()))
        await refused(Unreachable, dialer.call((), 1, b"", deadline_s=soon()))
        await dialer.close()
        await refused(Unreachable, dialer.call(endpoints, 1, b"", deadline_s=soon()))

    run(check())


@pytest.mark.parametrize(
    "certified, user, scheme",
    [(True, 4711, "stream"), (True, None, "stream+unix"), (False, 4711, "stream+unix")],
)
def test_certified_client_uses_no_unix_socket_of_other_users(tmp_path, monkeypatch, certified, user, scheme):
    """On the socket, the caller would be the user of its process, not the client of its certificate."""

    async def check():
        listeners = [
            await transport_registry.listen(endpoint, SERVER, echo)
            for endpoint in ("stream://127.0.0.1:0", f"stream+unix://{tmp_path}/s")
        ]
        if user is not None:
            monkeypatch.setattr(connection_pool.os, "geteuid", lambda: user)
        dialer = Dialer(US, certified=certified)
        connection = await dialer.connect(tuple(listener.endpoint for listener in listeners), soon())
        assert connection.peer.address.startswith(f"{scheme}://")
        await dialer.close()
        for listener in listeners:
            await listener.close()

    run(check())


def test_unix_path_of_another_host_is_not_tried(tmp_path):
    async def check():
        listener = await transport_registry.listen(f"stream+unix://{tmp_path}/s", SERVER, echo)
        for host_id, reached in (("here", False), ("there", True), ("", True)):
            dialer = Dialer(US, host_id=host_id)
            call = dialer.call((listener.endpoint + "?host=there",), 1, b"", deadline_s=soon())
            if reached:
                await call
            else:
                await refused(Unreachable, call)
            await dialer.close()
        await listener.close()

    run(check())


def test_concurrent_callers_share_one_connection():
    async def check():
        transport = Recorder("a", 1)
        listener = await transport.listen("inproc://here", SERVER, echo)
        dialer = Dialer(US, transports={"a": transport})
        assert dialer.live(("a://x",)) is None
        replies = await asyncio.gather(
            *[dialer.call(("a://x",), 1, b"%d" % n, deadline_s=soon()) for n in range(20)]
        )
        assert [reply.message for reply in replies] == [b"%d" % n for n in range(20)]
        assert transport.attempts == ["a://x"] and dialer.live(("a://x",)) is not None
        await dialer.close()
        await listener.close()

    run(check())


def test_lost_connection_is_dropped_and_opened_again():
    async def check():
        transport = Recorder("a", 1)
        kept = RecordingHandler()
        listener = await transport.listen("inproc://here", SERVER, kept)
        dialer = Dialer(US, transports={"a": transport})
        lost = asyncio.ensure_future(dialer.call(("a://x",), 1, b"", deadline_s=soon()))
        await kept.count(1)
        listener.kill()
        assert dialer.live(("a://x",)) is None
        assert (await refused(Disconnected, lost)).may_be_applied
        await refused(Unreachable, dialer.call(("a://x",), 1, b"", deadline_s=soon()))
        listener = await transport.listen("inproc://here", SERVER, echo)
        assert (await dialer.call(("a://x",), 1, b"again", deadline_s=soon())).message == b"again"
        assert len(transport.attempts) == 3
        await dialer.close()
        await listener.close()

    run(check())


def test_slow_failures_are_tried_last_for_a_time():
    async def check():
        slow = Recorder("slow", 3, (Unreachable("slow"), connection_pool.SLOW_FAILURE_S + 0.05))
        quick = Recorder("quick", 2, (Unreachable("quick"), 0))
        good = Recorder("good", 1)
        listener = await good.listen("inproc://here", SERVER, echo)
        dialer = Dialer(US, transports={"slow": slow, "quick": quick, "good": good})
        endpoints = ("good://x", "quick://x", "slow://x")
        for attempts in ((1, 1, 1), (1, 2, 2)):
            connection = await dialer.connect(endpoints, soon())
            assert (len(slow.attempts), len(quick.attempts), len(good.attempts)) == attempts
            await connection.close()
        await dialer.close()
        await listener.close()

    run(check())


def test_refusal_is_preferred_to_unreachable_errors():
    async def check():
        transports = {
            "a": Recorder("a", 2, (ProtocolMismatch("of another pool"), 0)),
            "b": Recorder("b", 1, (Unreachable("b"), 0)),
        }
        dialer = Dialer(US, transports=transports)
        assert "another pool" in str(
            await refused(ProtocolMismatch, dialer.connect(("a://x", "b://x"), soon()))
        )
        await dialer.close()

    run(check())


def test_refused_identity_is_reported_alone():
    async def check():
        gone = StaleIdentity("client/one is not in the pool any more")
        dialer = Dialer(
            US,
            transports={
                "a": Recorder("a", 50, (Unreachable("no such socket"), 0)),
                "b": Recorder("b", 40, (gone, 0)),
                "c": Recorder("c", 30, (AccessDenied("a strange certificate"), 0)),
            },
        )
        assert str(await refused(StaleIdentity, dialer.connect(("a://1", "b://1", "c://1"), soon()))) == str(
            gone
        )
        await dialer.close()

    run(check())


def test_caller_deadline_does_not_affect_other_callers():
    async def check():
        transport = Recorder("a", 1, (Unreachable("late"), 0.6))
        dialer = Dialer(US, transports={"a": transport})
        patient = asyncio.ensure_future(dialer.connect(("a://x",), soon()))
        error = await refused(
            DeadlineExceeded, dialer.call(("a://x",), 1, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 0.03)
        )
        assert not error.may_be_applied and not patient.done()
        hasty = asyncio.ensure_future(dialer.connect(("a://x",), soon()))
        await asyncio.sleep(0)
        hasty.cancel()
        await refused(Unreachable, patient)
        assert len(transport.attempts) == 1
        waiting = asyncio.ensure_future(dialer.connect(("a://x",), soon()))
        await asyncio.sleep(0.01)
        await dialer.close()
        await refused(Unreachable, waiting)

    run(check())


def test_silent_address_is_left_for_the_next(monkeypatch):
    async def check():
        monkeypatch.setattr(connection_pool, "ATTEMPT_S", 1.0)
        hole = socket.create_server(("127.0.0.1", 0), backlog=1)  # accepts into its backlog, never greets
        listener = await transport_registry.listen("grpc://127.0.0.1:0", SERVER, echo)
        dialer = Dialer(US)
        endpoints = (f"stream://127.0.0.1:{hole.getsockname()[1]}", listener.endpoint)
        assert (await dialer.call(endpoints, 1, b"through", deadline_s=soon())).message == b"through"
        await dialer.close()
        await listener.close()
        hole.close()

    run(check())


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b""])
def test_grpc_client_without_frames_is_disconnected_alone(raw, caplog):
    grpc = pytest.importorskip("grpc")

    async def check():
        listener = await transport_registry.listen("grpc://127.0.0.1:0", SERVER, echo)
        good = await transport_registry.transport("grpc").connect(listener.endpoint, US, deadline_s=soon())
        async with grpc.aio.insecure_channel(listener.endpoint[len("grpc://") :]) as channel:
            stream = channel.stream_stream("/nvpool.v1.Exchange/Frames")()
            await stream.write(raw)
            assert await stream.read() is grpc.aio.EOF
        assert len(caplog.records) == 1
        assert (await good.call(1, b"undisturbed", deadline_s=soon())).message == b"undisturbed"
        await good.close()
        await listener.close()

    run(check())


# -- returning to a better endpoint, and leaving a bad connection


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(connection_pool, "RETURN_LOCAL_S", (0.05, 0.2))
    monkeypatch.setattr(connection_pool, "RETURN_S", (0.05, 0.2))
    monkeypatch.setattr(connection_pool, "RETIRED_LOOK_S", 0.02)


def other_user(owner):
    """Stands for `os` in the connection pool: this process is user 4711, existing sockets belong to `owner()`."""

    def stat(path):
        os.stat(path)
        return SimpleNamespace(st_uid=owner())

    return SimpleNamespace(geteuid=lambda: 4711, stat=stat, path=os.path)


@pytest.mark.parametrize("certified", [False, True])
def test_connection_returns_to_the_better_endpoint(hasty, tmp_path, monkeypatch, certified):
    """A Unix socket that was missing is used again soon; pending requests on TCP are answered there."""
    monkeypatch.setattr(connection_pool, "os", other_user(lambda: 4711))

    async def check():
        kept = RecordingHandler()
        stream = await transport_registry.listen("stream://127.0.0.1:0", SERVER, kept)
        endpoints = (f"stream+unix://{tmp_path}/s?host=here", stream.endpoint)
        dialer = Dialer(US, host_id="here", certified=certified)
        worse = await dialer.connect(endpoints, soon())
        under_way = asyncio.ensure_future(dialer.call(endpoints, 1, b"under way", deadline_s=soon()))
        (call,) = await kept.count(1)
        unix = await transport_registry.listen(f"stream+unix://{tmp_path}/s", SERVER, echo)
        await until(lambda: dialer.live(endpoints).peer.local)
        assert set(dialer.connections(endpoints)) == {dialer.live(endpoints), worse} and not worse.closed
        assert (await dialer.call(endpoints, 1, b"new", deadline_s=soon())).message == b"new"
        call.reply(b"answered there")
        assert (await under_way).message == b"answered there"
        await until(lambda: worse.closed)
        assert list(dialer.connections(endpoints)) == [dialer.live(endpoints)]
        await dialer.close()
        for listener in (stream, unix):
            await listener.close()

    run(check())


@pytest.mark.parametrize("is_missing", [False, True])
def test_certified_client_waits_for_a_socket_of_its_own(hasty, tmp_path, monkeypatch, is_missing):
    """Until then the socket is not used, also if it appears while the client waits for it."""
    owners = [1]
    monkeypatch.setattr(connection_pool, "os", other_user(lambda: owners[0]))
    if not is_missing:
        (tmp_path / "s").touch()

    async def check():
        unix, good = Recorder("stream+unix", 3), Recorder("good", 1)
        best = Recorder("best", 2, (Unreachable("not yet"), 0))
        for transport in (unix, good):
            await transport.listen("inproc://here", SERVER, echo)
        transports = {"stream+unix": unix, "best": best, "good": good}
        dialer = Dialer(US, transports=transports, certified=True)
        endpoints = (f"stream+unix://{tmp_path}/s", "best://x", "good://x")
        worse = await dialer.connect(endpoints, soon())
        await until(lambda: len(best.attempts) >= 2)  # the task that returns to a better endpoint runs
        (tmp_path / "s").touch()
        count = len(best.attempts)
        await until(lambda: len(best.attempts) >= count + 3)
        assert unix.attempts == []
        owners[0] = 4711
        await until(lambda: worse.closed)
        assert len(unix.attempts) == 1 and dialer.live(endpoints) is not worse
        await dialer.close()

    run(check())


def test_better_endpoint_is_tried_with_backoff(hasty):
    async def check():
        best, good = Recorder("best", 3, (Unreachable("not yet"), 0)), Recorder("good", 1)
        for transport in (best, good):
            await transport.listen("inproc://here", SERVER, echo)
        dialer = Dialer(US, transports={"best": best, "good": good})
        endpoints = ("best://x", "good://x")
        worse = await dialer.connect(endpoints, soon())
        await until(lambda: len(best.attempts) >= 4)
        assert dialer.live(endpoints) is worse and len(good.attempts) == 1
        best.failing = None
        await until(lambda: worse.closed)
        assert dialer.live(endpoints) is not worse and len(good.attempts) == 1
        count = len(best.attempts)
        await asyncio.sleep(0.3)
        assert len(best.attempts) == count  # there is no better endpoint than the best
        await dialer.close()

    run(check())


def test_ended_connection_is_not_used_again(hasty):
    async def check():
        best, good = Recorder("best", 3, (Unreachable("not yet"), 0)), Recorder("good", 1)
        listener = await good.listen("inproc://here", SERVER, echo)
        dialer = Dialer(US, transports={"best": best, "good": good})
        worse = await dialer.connect(("best://x", "good://x"), soon())
        await worse.close()
        await until(lambda: not dialer.returning)
        await dialer.close()
        await listener.close()

    run(check())


def test_unix_socket_is_avoided_for_a_shorter_time(tmp_path, monkeypatch):
    async def check():
        monkeypatch.setattr(connection_pool, "ATTEMPT_S", 0.6)
        with socket.socket(
            socket.AF_UNIX
        ) as hole:  # accepts into its backlog, never greets, like a stopped daemon
            hole.bind(f"{tmp_path}/s")
            hole.listen(8)
            stream = await transport_registry.listen("stream://127.0.0.1:0", SERVER, echo)
            dialer = Dialer(US)
            await dialer.connect((f"stream+unix://{tmp_path}/s", stream.endpoint), soon())
            (shunned,) = dialer.shunned.values()
            assert (
                shunned
                <= SYSTEM_CLOCK.boottime_s() + connection_pool.SHUN_LOCAL_S
                < SYSTEM_CLOCK.boottime_s() + connection_pool.SHUN_S / 4
            )
        await dialer.close()
        await stream.close()

    run(check())


def test_redial_does_not_affect_pending_requests(hasty):
    async def check():
        transport, kept = Recorder("a", 1), RecordingHandler()
        listener = await transport.listen("inproc://here", SERVER, kept)
        dialer = Dialer(US, transports={"a": transport})
        first = await dialer.connect(("a://x",), soon())
        under_way = asyncio.ensure_future(dialer.call(("a://x",), 1, b"", deadline_s=soon()))
        (call,) = await kept.count(1)
        dialer.redial(("a://x",))
        dialer.redial(("a://x",))
        assert dialer.live(("a://x",)) is None and not first.closed
        second = await dialer.connect(("a://x",), soon())
        assert second is not first and len(transport.attempts) == 2
        call.reply(b"answered")
        assert (await under_way).message == b"answered"
        await until(lambda: first.closed)
        assert not second.closed
        await dialer.close()
        await listener.close()

    run(check())


@pytest.mark.parametrize(
    "error, other",
    [
        (Unavailable("it takes us for another"), True),
        (AccessDenied(), True),
        (DeadlineExceeded(), True),
        (NotLeader(), False),
        (StaleTerm(), False),
    ],
)
def test_refused_lease_is_renewed_on_another_connection(hasty, error, other):
    async def check():
        transport = Recorder("a", 1)
        answers = []

        def handler(call):
            answers.append(call)
            call.fail(error) if len(answers) < 3 else call.reply(b"renewed")

        listener = await transport.listen("inproc://here", SERVER, handler)
        dialer = Dialer(US, transports={"a": transport})
        calls = LeaseCalls(dialer, SYSTEM_CLOCK)
        for _ in range(2):
            await refused(type(error), calls.call(("a://x",), 1, b"", deadline_s=soon()))
        assert (await calls.call(("a://x",), 1, b"", deadline_s=soon())).message == b"renewed"
        assert len(transport.attempts) == (2 if other else 1)  # and not one per refusal
        await dialer.close()
        await listener.close()

    run(check())


def test_errors_name_the_attempted_endpoints(tmp_path):
    async def check():
        gone = f"stream+unix://{tmp_path}/gone"
        with socket.create_server(("127.0.0.1", 0)) as closed, socket.socket(socket.AF_UNIX) as left:
            port = closed.getsockname()[1]
            left.bind(f"{tmp_path}/left")  # left by a killed daemon
        endpoints = (gone, f"stream+unix://{tmp_path}/left", f"stream://127.0.0.1:{port}")
        dialer = Dialer(US)
        said = str(await refused(Unreachable, dialer.connect(endpoints, soon())))
        assert (
            f"{tmp_path}/left: Connection refused" in said
            and f"127.0.0.1:{port}: " in said
            and gone not in said
        )
        await dialer.close()
        first, second = (
            Recorder("a", 2, (Unreachable("no route"), 0)),
            Recorder("b", 1, (Unreachable("late"), 0.5)),
        )
        dialer = Dialer(US, transports={"a": first, "b": second})
        error = await refused(
            DeadlineExceeded, dialer.connect(("a://x", "b://y"), SYSTEM_CLOCK.boottime_s() + 0.1)
        )
        assert "a://x: no route" in str(error) and "b://y has not answered yet" in str(error)
        await dialer.close()

    run(check())


# -- the in-process transport


def test_inproc_frames_can_be_delayed_and_dropped():
    async def check():
        seen = []
        plan = {}

        def faults(endpoint, kind, code):
            seen.append((endpoint, kind, code))
            return plan.get((kind, code), 0.0)

        def handler(call):
            call.fail(NotFound()) if call.method == 9 else echo(call)

        transport = InprocTransport(faults=faults)
        listener = await transport.listen("inproc://a", SERVER, handler)
        plan[HELLO, 0] = None
        await refused(
            Unreachable, transport.connect("inproc://a", US, deadline_s=SYSTEM_CLOCK.boottime_s() + 0.02)
        )
        plan[HELLO, 0] = 0.01
        connection = await transport.connect("inproc://a", US, deadline_s=soon())
        plan |= {(REQUEST, 1): None, (REQUEST, 2): 0.3, (REPLY, 101): None}
        for method in (1, 9):
            await refused(
                DeadlineExceeded, connection.call(method, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 0.03)
            )
        later, now = [
            asyncio.ensure_future(connection.call(method, b"%d" % method, deadline_s=soon()))
            for method in (2, 3)
        ]
        done, _ = await asyncio.wait([later, now], return_when=asyncio.FIRST_COMPLETED)
        assert done == {now} and (await later).message == b"2"
        assert ("inproc://a", CANCEL, 0) in seen
        await connection.close()
        await listener.close()

    run(check())


def test_inproc_delivers_after_the_senders_loop_iteration():
    async def check():
        kept = RecordingHandler()
        transport = InprocTransport()
        listener = await transport.listen("inproc://a", SERVER, kept)
        connection = await transport.connect("inproc://a", US, deadline_s=soon())
        content = bytearray(b"as it was")
        connection.submit(1, b"", [content], deadline_s=soon(), on_done=lambda *_: None)
        assert not kept.calls
        content[:] = b"scribbled"
        (call,) = await kept.count(1)
        assert call.payload == b"as it was"  # copied when it was submitted
        await connection.close()
        await listener.close()

    run(check())


def test_inproc_listeners_are_private_to_a_transport():
    async def check():
        listener = await InprocTransport().listen("inproc://a", SERVER, echo)
        await refused(Unreachable, InprocTransport().connect("inproc://a", US, deadline_s=soon()))
        await listener.close()
        with pytest.raises(InvalidRequest):
            await InprocTransport().listen("a", SERVER, echo)

    run(check())
