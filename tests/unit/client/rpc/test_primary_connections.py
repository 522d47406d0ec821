"""Connections of a client to the primaries of shards, also replaced connections on which requests wait."""

import asyncio
from types import SimpleNamespace

from msgspec.structs import replace

from nvpool.client.rpc import primary_connections
from nvpool.client.rpc.primary_connections import PrimaryConnections
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Disconnected
from nvpool.poolmap.model import Shard, changed
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transports.inproc import InprocTransport
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.testing.contracts.transport import RecordingHandler, refused, soon, until
from tests.unit.poolmap.chains.test_chain_placement import a_pool


def a_map():
    found = a_pool((4, 4), 2, nodes=2)
    return replace(found, shards=(Shard(1, 1, ("inproc://first",)),))


def with_silent_primary(check):
    """Run `check(view, connection, waiting)`: a request waits for a silent primary on a connection that was replaced."""

    async def main():
        transport, kept = InprocTransport(), RecordingHandler()
        listener = await transport.listen("inproc://first", Greeting("the primary"), kept)
        dialer = Dialer(Greeting("we"), transports={"inproc": transport})
        view = SimpleNamespace(map=a_map(), changed=[], followed=0)

        def follow():
            view.followed += 1

        view.follow = follow
        asked = PrimaryConnections(view, dialer, SYSTEM_CLOCK)
        shard = view.map.shards[0]
        connection = await asked.connection(shard, soon())
        waiting = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon()))
        await kept.count(1)
        dialer.redial(shard.endpoints)
        try:
            async with asyncio.timeout(60):
                await check(view, connection, waiting)
        finally:
            asked.close()
            await dialer.close()
            await listener.close()

    asyncio.run(main())


def test_silence_on_a_replaced_connection_is_noticed(monkeypatch):
    monkeypatch.setattr(primary_connections, "SILENT_S", 0.1)
    monkeypatch.setattr(primary_connections, "LOOK_S", 0.02)

    async def check(view, connection, waiting):
        await until(lambda: view.followed)
        waiting.cancel()

    with_silent_primary(check)


def test_replaced_connection_to_an_old_primary_is_closed():
    async def check(view, connection, waiting):
        new = changed(view.map, shards=(replace(view.map.shards[0], endpoints=("inproc://second",)),))
        for callback in view.changed:
            callback(new)
        await refused(Disconnected, waiting)
        assert connection.closed

    with_silent_primary(check)


def test_admin_request_ends_when_the_primary_changes(monkeypatch):
    monkeypatch.setattr(primary_connections, "SILENT_S", 0.1)
    monkeypatch.setattr(primary_connections, "LOOK_S", 0.02)

    async def main():
        transport, kept = InprocTransport(), RecordingHandler()
        listener = await transport.listen("inproc://first", Greeting("the primary"), kept)
        dialer = Dialer(Greeting("we"), transports={"inproc": transport})
        view = SimpleNamespace(map=a_map(), changed=[], followed=asyncio.Event())
        view.follow = view.followed.set
        asked = PrimaryConnections(view, dialer, SYSTEM_CLOCK)
        client = SimpleNamespace(
            vfs=SimpleNamespace(meta=SimpleNamespace(primaries=asked)),
            pool_map=view.map,
            dialer=dialer,
            clock=SYSTEM_CLOCK,
        )
        asking = asyncio.ensure_future(
            AdminCalls(client).shard(
                1, wire_pb2.META_STATUS, meta_pb2.MetaStatusRequest(), meta_pb2.MetaStatusReply
            )
        )
        try:
            async with asyncio.timeout(30):
                await view.followed.wait()
                new = changed(view.map, shards=(replace(view.map.shards[0], endpoints=("inproc://second",)),))
                for callback in view.changed:
                    callback(new)
                await refused(Disconnected, asking)
        finally:
            asked.close()
            await dialer.close()
            await listener.close()

    asyncio.run(main())
