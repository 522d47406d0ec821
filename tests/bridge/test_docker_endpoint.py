"""Docker's volume protocol over a real socket and a pool in memory: bad requests get an error reply, and every request ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import stat

import pytest

from nvpool.bridge import docker
from nvpool.bridge.docker import BODY_BYTES_MAX, CONTENT_TYPE, DockerFace, status_of
from nvpool.bridge.metrics import BridgeMetrics
from nvpool.bridge.volumes import BridgeVolumes
from nvpool.core.errors import (
    AlreadyExists,
    Bug,
    Damaged,
    InUse,
    NotFound,
    Refused,
    Stale,
    Unavailable,
    every_error,
)
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from tests.bridge.fake_volumes import FakePool, WrittenBinds

pytestmark = pytest.mark.t1


class DockerEndpoint:
    """A plugin endpoint at a socket, called as Docker calls it."""

    def __init__(self, place):
        self.pool = FakePool()
        self.volumes = BridgeVolumes(self.pool, place / "pool", place / "state", node="here")
        self.volumes.binds = WrittenBinds(self.volumes.binds)
        self.path = place / "plugins" / "nvpool.sock"
        self.face = None

    async def __aenter__(self):
        await self.volumes.begin()
        self.counts = BridgeMetrics()
        self.face = DockerFace(self.volumes, deadline_s=5.0, counts=self.counts)
        await self.face.start(self.path)
        return self

    async def __aexit__(self, *_):
        await self.face.close(1.0)

    async def ask(self, verb, body=b"{}", method="POST"):
        return await asyncio.to_thread(self._ask, verb, body, method)

    async def ask_ok(self, verb, **fields):
        status, reply = await self.ask(verb, json.dumps(fields).encode())
        assert status == 200, reply
        return reply

    def _ask(self, verb, body, method):
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(30)
        connection.sock.connect(os.fspath(self.path))
        try:
            connection.request(method, verb, body=body)
            reply = connection.getresponse()
            assert reply.headers["Content-Type"] == CONTENT_TYPE
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()


def scene(tmp_path, play):
    async def whole():
        async with DockerEndpoint(tmp_path) as asked:
            await play(asked)

    asyncio.run(whole())


def test_requests_and_errors_are_counted_by_known_operations(tmp_path):
    async def play(asked):
        await asked.ask_ok("/VolumeDriver.Create", Name="v", Opts={})
        assert (await asked.ask("/VolumeDriver.Get", b'{"Name": "w"}'))[0] == 404
        assert (await asked.ask("/VolumeDriver.Bogus", b"{}"))[0] == 404
        page = Page()
        asked.counts.measure(page)
        assert page.value(metrics.BRIDGE_SECONDS, op="create", transport="docker") == 1
        assert page.value(metrics.BRIDGE_ERRORS, op="get", transport="docker", error="NotFound") == 1
        assert "ogus" not in page.text()

    scene(tmp_path, play)


def test_life_cycle_of_a_volume(tmp_path):
    async def play(asked):
        assert (await asked.ask_ok("/Plugin.Activate")) == {"Implements": ["VolumeDriver"]}
        assert asked.face.activated.is_set()
        assert (await asked.ask_ok("/VolumeDriver.Capabilities")) == {"Capabilities": {"Scope": "global"}}
        assert (await asked.ask_ok("/VolumeDriver.Create", Name="v", Opts={"size": "1G"})) == {"Err": ""}
        assert (await asked.ask_ok("/VolumeDriver.Path", Name="v")) == {"Mountpoint": "", "Err": ""}
        place = (await asked.ask_ok("/VolumeDriver.Mount", Name="v", ID="1"))["Mountpoint"]
        assert place == str(tmp_path / "state/mounts/v/rw")
        for verb in ("Mount", "Unmount"):
            assert (await asked.ask(f"/VolumeDriver.{verb}", b'{"Name": "v", "ID": ""}'))[0] == 400, (
                "without an ID no later request can end it"
            )
        found = (await asked.ask_ok("/VolumeDriver.Get", Name="v"))["Volume"]
        assert (
            found["Name"] == "v"
            and found["Mountpoint"] == place
            and found["CreatedAt"] == "2020-01-01T00:00:00Z"
        )
        assert found["Status"]["size"] == "1.00 GiB" and found["Status"]["used by"] == ["here/docker/1"]
        assert [one["Name"] for one in (await asked.ask_ok("/VolumeDriver.List"))["Volumes"]] == ["v"]
        status, reply = await asked.ask("/VolumeDriver.Remove", b'{"Name": "v"}')
        assert status == 409 and "stop the containers" in reply["Err"]
        await asked.ask_ok("/VolumeDriver.Unmount", Name="v", ID="1")
        await asked.ask_ok("/VolumeDriver.Remove", Name="v")
        status, reply = await asked.ask("/VolumeDriver.Get", b'{"Name": "v"}')
        assert status == 404 and reply["Err"] == "there is no volume v"

    scene(tmp_path, play)


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_is_a_reply_with_a_text(tmp_path, kind):
    async def play(asked):
        asked.pool.faults["show"] = kind()
        status, reply = await asked.ask("/VolumeDriver.Get", b'{"Name": "v"}')
        assert status == status_of(kind()) and reply["Err"] == str(kind())
        family = next(base for base in (Refused, Stale, Unavailable, Damaged, Bug) if issubclass(kind, base))
        assert (status // 100 == 4) == (family is Refused)
        assert (status == 503) == (family in (Stale, Unavailable))

    scene(tmp_path, play)


def test_not_found_and_in_use_have_their_own_status():
    assert [
        status_of(kind()) for kind in (NotFound, AlreadyExists, InUse, Refused, Unavailable, Damaged, Bug)
    ] == [404, 409, 409, 400, 503, 500, 500]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"v"',
        b'{"Name": 5}',
        b'{"Name": "v", "Opts": []}',
        b'{"Name": null}',
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"Name": "a\\u0000b"}',
        b'{"Name": "../v"}',
        b'{"Name": "\\ud800"}',
        b'{"Name": "v", "Opts": {"size": {}}}',
        b"",
        b"{}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_malformed_request_creates_nothing(tmp_path, body):
    async def play(asked):
        status, reply = await asked.ask("/VolumeDriver.Create", body)
        assert status == 400 and reply["Err"], reply
        assert not asked.pool.there
        assert (await asked.ask_ok("/VolumeDriver.List"))["Volumes"] == []

    scene(tmp_path, play)


def test_oversized_body_is_refused(tmp_path):
    async def play(asked):
        status, reply = await asked.ask("/VolumeDriver.Create", b'{"Name": "' + b"x" * BODY_BYTES_MAX + b'"}')
        assert status == 413 and str(BODY_BYTES_MAX) in reply["Err"]

    scene(tmp_path, play)


@pytest.mark.parametrize(
    "verb, method",
    [
        ("/VolumeDriver.Format", "POST"),
        ("/", "POST"),
        ("/VolumeDriver.List", "GET"),
        ("/NetworkDriver.CreateNetwork", "POST"),
        ("/%00", "PUT"),
    ],
)
def test_unknown_request_gets_a_plugin_error(tmp_path, verb, method):
    async def play(asked):
        status, reply = await asked.ask(verb, method=method)
        assert status == 404 and "volume plugin" in reply["Err"]

    scene(tmp_path, play)


def test_requests_end_by_their_deadline(tmp_path):
    async def play(asked):
        asked.face.deadline_s = 0.2

        async def never():
            await asyncio.Event().wait()

        asked.volumes.mounted = never
        await asked.ask_ok("/VolumeDriver.Create", Name="v")
        status, reply = await asked.ask("/VolumeDriver.Mount", b'{"Name": "v", "ID": "1"}')
        assert status == 503 and "within 0 s" in reply["Err"]
        asked.volumes.mounted = None
        reader, writer = await asyncio.open_unix_connection(asked.path)
        writer.write(b"POST /VolumeDriver.List HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b"503" in await reader.readline()
        writer.close()
        await asked.ask_ok("/VolumeDriver.Mount", Name="v", ID="1")
        assert await asked.volumes.holders("v") == ["docker/1"]

    scene(tmp_path, play)


def test_number_of_concurrent_requests_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(docker, "REQUESTS_MAX", 2)

    async def play(asked):
        hold, both, there = asyncio.Event(), asyncio.Event(), []

        async def mounted():
            there.append(1)
            if len(there) == 2:
                both.set()
            await hold.wait()

        asked.volumes.mounted = mounted
        for number in range(2):
            await asked.ask_ok("/VolumeDriver.Create", Name=f"v{number}")
        waiting = [
            asyncio.ensure_future(asked.ask("/VolumeDriver.Mount", b'{"Name": "v%d", "ID": "1"}' % number))
            for number in range(2)
        ]
        async with asyncio.timeout(20):
            await both.wait()
        status, reply = await asked.ask("/VolumeDriver.List")
        assert status == 503 and "already" in reply["Err"]
        hold.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]

    scene(tmp_path, play)


def test_socket_is_private_and_only_a_dead_one_is_replaced(tmp_path):
    async def play(asked):
        assert stat.S_IMODE(asked.path.stat().st_mode) == 0o600
        assert [one.name for one in asked.path.parent.iterdir()] == ["nvpool.sock"]
        with pytest.raises(InUse, match="answers"):
            await DockerFace(asked.volumes).start(asked.path)
        assert (await asked.ask_ok("/VolumeDriver.List"))["Err"] == ""

    dead = tmp_path / "plugins/nvpool.sock"
    dead.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(dead))
    scene(tmp_path, play)
    assert not dead.exists()


def test_closing_bridge_keeps_the_socket_of_its_successor(tmp_path):
    async def play(asked):
        asked.path.unlink()
        later = DockerFace(asked.volumes)
        await later.start(asked.path)
        await asked.face.close(1.0)
        assert (await asked.ask_ok("/VolumeDriver.List"))["Err"] == ""
        await later.close(1.0)
        assert not asked.path.exists()

    scene(tmp_path, play)


def test_bug_is_an_error_reply(tmp_path):
    async def play(asked):
        asked.pool.list = None
        status, reply = await asked.ask("/VolumeDriver.List")
        assert status == 500 and "bug" in reply["Err"]
        await asked.ask_ok("/VolumeDriver.Create", Name="v")

    scene(tmp_path, play)
