"""Pool maps that a daemon gets from its supervisor, and the endpoints that it listens on."""

import asyncio
import os
import stat
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.config import NetworkConfig
from nvpool.core.errors import AccessDenied, BadConfiguration, NotFound
from nvpool.host.pool_directory import write_whole
from nvpool.poolmap.model import encode_map
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.v1.pool_pb2 import MapReply
from nvpool.runtime import daemon_lifecycle as runtime_service
from nvpool.security.tls import PLAIN_TEXT
from tests.unit.poolmap.chains.test_chain_placement import a_pool


class Supervisor:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def call(self, endpoints, method, message, *, deadline_s):
        answer = self.answers.pop(0) if self.answers else await asyncio.Future()
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(message=answer)


def test_refused_and_broken_maps_do_not_end_a_daemon(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(runtime_service, "MAP_RETRY_S", 0.01)
    first = a_pool((4, 4), 1)
    second = replace(first, epoch=2)
    supervisor = Supervisor(
        AccessDenied("who are you?"),
        AccessDenied("who are you?"),
        b"\xff",
        MapReply(map=b"no map").SerializeToString(),
        MapReply(map=encode_map(second)).SerializeToString(),
    )
    directory = SimpleNamespace(node=1, poolmap=tmp_path / "poolmap.json")
    directory.poolmap.write_bytes(b"neither")
    taken = []

    async def run():
        watching = asyncio.ensure_future(
            runtime_service.watch_map(
                directory, supervisor, first, SimpleNamespace(update_map=taken.append), None
            )
        )
        async with asyncio.timeout(20):
            while not taken:
                assert not watching.done()
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(run())
    assert [one.epoch for one in taken] == [2] and len(caplog.messages) == len(set(caplog.messages))


def test_map_file_is_read_again_once_for_each_change(monkeypatch, tmp_path):
    first, clock, taken, decoded = a_pool((4, 4), 1), ManualClock(), [], []
    directory = SimpleNamespace(poolmap=tmp_path / "poolmap.json")
    read_map = runtime_service.read_map
    monkeypatch.setattr(
        runtime_service, "read_map", lambda directory: decoded.append(1) or read_map(directory)
    )
    refresh = runtime_service.MapRefresh(directory, taken.append, clock)
    with pytest.raises(NotFound):
        refresh()
    write_whole(directory.poolmap, encode_map(first))
    refresh()
    assert not taken, "no second look within REFRESH_S"
    for _ in range(100):
        clock.advance(runtime_service.REFRESH_S)
        refresh()
        refresh()
    assert [one.epoch for one in taken] == [1] and len(decoded) == 1
    write_whole(directory.poolmap, encode_map(replace(first, epoch=22)))
    clock.advance(runtime_service.REFRESH_S)
    refresh()
    assert [one.epoch for one in taken] == [1, 22] and len(decoded) == 2


@pytest.mark.parametrize(
    ("endpoint", "host", "wanted"),
    [
        ("stream+unix:///p/run/node.sock", "", True),
        ("stream://127.0.0.1:1", "", False),
        ("grpc://[::1]:1", "", False),
        ("stream://127.0.0.1:1", "127.0.0.1", True),
        ("stream://localhost:1", "127.0.0.1", False),
        ("stream://10.0.0.1:1", "", True),
    ],
)
def test_loopback_endpoint_is_used_only_when_configured(endpoint, host, wanted):
    assert runtime_service.is_wanted(endpoint, NetworkConfig(host=host)) is wanted


def test_tcp_listener_needs_a_certificate(tmp_path):
    async def listen(identity):
        endpoints = (f"stream+unix://{tmp_path}/s", "stream://127.0.0.1:0")
        for one in await runtime_service.listen_on(
            endpoints, Greeting("us", identity=identity), lambda call: call.reply()
        ):
            await one.close()

    with pytest.raises(BadConfiguration, match="plain_text = true"):
        asyncio.run(listen(None))
    assert not (tmp_path / "s").exists()
    asyncio.run(listen(PLAIN_TEXT))


@pytest.mark.parametrize(("local_users", "mode"), [(True, 0o666), (False, 0o600)])
def test_socket_is_open_to_local_users_when_allowed(tmp_path, local_users, mode):
    asked = []

    def handler(call):
        asked.append(call.peer.credentials.uid)
        call.reply()

    async def look():
        greeting = Greeting("us", local_users=local_users)
        (listener,) = await runtime_service.listen_on((f"stream+unix://{tmp_path}/s",), greeting, handler)
        dialer = Dialer(Greeting("them"))
        try:
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
            await dialer.call((listener.endpoint,), 1, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 20)
        finally:
            await dialer.close()
            await listener.close()

    asyncio.run(look())
    assert asked == [os.geteuid()]
