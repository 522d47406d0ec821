"""RDMA meets the contract of a transport over UCX's shared memory and TCP, with one-sided writes of replies where possible."""

import asyncio
import itertools
from ipaddress import ip_network

import pytest
import uvloop

from nvpool.rpc import multiplexer
from nvpool.rpc.stats import RpcStats
from nvpool.rpc.transports import ucx
from nvpool.rpc.transports.rdma import RdmaConnection, RdmaSettings, RdmaTransport, RdmaUnixTransport
from nvpool.testing.contracts.transport import CHECKS, CLIENT, SERVER, TransportSubject, echo, soon

pytestmark = pytest.mark.skipif(bool(ucx.missing()), reason=ucx.missing() or "never")
LOOPBACK = (ip_network("127.0.0.0/8"),)
_number = itertools.count(1)


class RoomProvider(RdmaConnection):
    """Provides room for a reply as long as the request, so that echoed payloads are written one-sidedly."""

    placed_bytes_min = 1

    def _begin(self, method, message, payload, deadline_s, into, on_done, room=0):
        return super()._begin(
            method, message, payload, deadline_s, into, on_done, room or sum(map(len, payload)) or 5000
        )


WAYS = {
    "posix": (
        RdmaUnixTransport,
        RdmaSettings(local=True, transports="posix,self"),
        "rdma+unix://{directory}/s",
    ),
    "sysv": (
        RdmaUnixTransport,
        RdmaSettings(local=True, transports="sysv,self"),
        "rdma+unix://{directory}/s",
    ),
    "polled": (RdmaUnixTransport, RdmaSettings(local=True, poll_us=50), "rdma+unix://{directory}/s"),
    "tcp": (RdmaTransport, RdmaSettings(networks=LOOPBACK, transports="tcp,self"), "rdma://127.0.0.1:0"),
}


def made(way, tmp_path):
    kind, settings, endpoint = WAYS[way]

    class Subclass(kind):
        _asking = RoomProvider

    return TransportSubject(Subclass(settings), endpoint.format(directory=tmp_path))


def run(main):
    async def whole():
        async with asyncio.timeout(60):
            await main
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(left, timeout=5)
        assert not left, f"left behind: {left}"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("way", ["posix", "tcp"])
def test_rdma_meets_the_contract(way, check, tmp_path):
    run(check(made(way, tmp_path)))


@pytest.mark.parametrize("way", ["posix", "tcp"])
def test_requests_are_counted_for_the_transport_in_use(way, tmp_path, monkeypatch):
    stats = RpcStats()  # other tests of this process may have left requests without a reply
    monkeypatch.setattr(multiplexer, "RPC_STATS", stats)

    async def main():
        subject = made(way, tmp_path)
        rdma = subject.transport.scheme
        stream = rdma.replace("rdma", "stream")

        def answered():
            return [stats.over(label).ended for label in (rdma, stream)]

        listener = await subject.transport.listen(subject.endpoint, SERVER, echo)
        connection = await subject.transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
        for _ in range(3):
            await connection.call(1, b"", [b"x" * 9999], deadline_s=soon())
        assert answered() == [3, 0]
        next(iter(listener.connections)).withdraw("for the test")
        for _ in range(2):
            await connection.call(1, b"", [b"x" * 9999], deadline_s=soon())
        assert answered() == [3, 2]
        for counted in map(stats.over, (rdma, stream)):
            assert counted.begun == counted.ended + counted.given_up, "no request is under way"
        await connection.close()
        await listener.close()

    run(main())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [4096, 5000, 1 << 20, 32 << 20])
def test_reply_is_written_into_the_callers_memory(way, count, tmp_path):
    async def main():
        subject = made(way, tmp_path)
        listener = await subject.transport.listen(subject.endpoint, SERVER, echo)
        connection = await subject.transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
        content = [
            bytes([part & 255]) * (count // 4)
            for part in (next(_number), next(_number), next(_number), next(_number))
        ]
        for _ in range(3):
            reply = await connection.call(1, b"what", content, deadline_s=soon())
            assert reply.payload == b"".join(content) and reply.message == b"what"
            into = memoryview(bytearray(count + 10))
            reply = await connection.call(1, b"", content, deadline_s=soon(), into=into)
            assert (
                reply.payload.obj is into.obj and into[:count] == b"".join(content) and not any(into[count:])
            )
        assert connection.placed_bytes == 6 * count
        await connection.close()
        await listener.close()

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_handler_fills_the_callers_memory_if_reachable(way, tmp_path):
    reached = []

    def handler(call):
        count = int(call.method) << 12
        assert call.room(count + (1 << 20)) is None, "more than the caller's buffer holds"
        room = call.room(count)
        reached.append(room is not None)
        content = bytes([call.method]) * count
        if room is None:
            call.reply(b"own", [content])
        elif bytes(call.message) == b"fill":
            room[:] = content
            call.reply(b"filled", [room])
        else:  # replies with a buffer of its own after all
            room[:] = b"!" * count
            call.reply(b"own", [content[:5000], content[5000:]])
        assert call.room(count) is None, "answered already"

    async def main():
        subject = made(way, tmp_path)
        listener = await subject.transport.listen(subject.endpoint, SERVER, handler)
        connection = await subject.transport.connect(listener.endpoint, CLIENT, deadline_s=soon())
        for method, word in itertools.product((5, 60, 255), (b"fill", b"leave")):
            into = memoryview(bytearray(method << 12))
            asked = [connection.call(method, word, deadline_s=soon(), into=part) for part in (into, into[:])]
            for reply in await asyncio.gather(*asked):
                assert reply.message == (b"filled" if way != "tcp" and word == b"fill" else b"own")
                assert reply.payload == bytes([method]) * (method << 12)
        assert reached == [way != "tcp"] * 12 and connection.placed_bytes == 4 * (5 + 60 + 255 << 12)
        await connection.close()
        await listener.close()

    run(main())


def test_early_replies_arrive_while_later_ones_are_made(tmp_path):
    """Though all requests arrive together, and their replies do not go through the stream."""
    come, made_after = [], []

    def handler(call):
        made_after.append(len(come))
        room = call.room(1 << 20)
        room[:] = bytes([call.method]) * (1 << 20)
        call.reply(b"", [room])

    async def main():
        subject = made("posix", tmp_path)
        listener = await subject.transport.listen(subject.endpoint, SERVER, handler)
        connection = await subject.transport.connect(listener.endpoint, CLIENT, deadline_s=soon())

        async def ask(number):
            reply = await connection.call(number, b"", deadline_s=soon(), into=memoryview(bytearray(1 << 20)))
            come.append(number)
            assert reply.payload == bytes([number]) * (1 << 20)

        await asyncio.gather(*map(ask, range(1, 17)))
        assert come == list(range(1, 17))
        assert made_after[-1] > 8, made_after
        await connection.close()
        await listener.close()

    run(main())
