"""Transports under TLS: the whole contract, and the refusal of every peer without valid identity, over real connections."""

import asyncio
import logging
import socket
import ssl

import pytest
import uvloop

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import (
    AccessDenied,
    BadConfiguration,
    Disconnected,
    InvalidRequest,
    StaleIdentity,
    Unreachable,
)
from nvpool.rpc import transport_registry
from nvpool.security.ca import CertificateAuthority, request_certificate
from nvpool.security.tls import PLAIN_TEXT, TlsIdentity, TlsMaterial, authority_known, leaves_host
from nvpool.testing.contracts.transport import (
    CHECKS,
    CLIENT,
    PATIENCE_S,
    SERVER,
    RecordingHandler,
    TransportSubject,
    echo,
    refused,
    soon,
    until,
)
from nvpool.testing.env.tls_probe import agreed_version

POOL, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
AUTHORITY, OTHER_AUTHORITY = CertificateAuthority.make(POOL), CertificateAuthority.make(POOL)
SCHEMES = ("stream", "grpc")
ENDING_S = 5.0


def shown(
    member: str,
    *,
    pool: str = POOL,
    authority: CertificateAuthority = AUTHORITY,
    knows: CertificateAuthority | None = None,
    lives_s: float = 3600.0,
) -> TlsMaterial:
    made = request_certificate()
    return TlsMaterial(
        (knows or authority).certificate,
        authority.sign(made.request, pool, member, lives_s=lives_s),
        made.key,
    )


def identity(member: str, **other) -> TlsIdentity:
    return TlsIdentity(POOL, shown(member, **other))


NODE, CLIENT_ID = identity("node/alpha"), identity("client/ws1")


class Secured:
    """A transport that greets with certificates, for checks that do not use any."""

    def __init__(self, scheme: str) -> None:
        self._transport = transport_registry.transport(scheme)

    async def connect(self, endpoint, greeting, *, deadline_s):
        return await self._transport.connect(
            endpoint, greeting._replace(identity=CLIENT_ID), deadline_s=deadline_s
        )

    async def listen(self, endpoint, greeting, handler):
        return await self._transport.listen(endpoint, greeting._replace(identity=NODE), handler)


def run(main) -> None:
    async def whole():
        async with asyncio.timeout(60):
            await main
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(left, timeout=ENDING_S)
        assert not left, f"left behind: {left}"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transport_meets_the_contract_under_tls(scheme, check):
    run(check(TransportSubject(Secured(scheme), f"{scheme}://127.0.0.1:0")))


async def _serve(scheme: str, server: TlsIdentity, handler=echo, admit_unauthenticated: bool = False):
    return await transport_registry.transport(scheme).listen(
        f"{scheme}://127.0.0.1:0",
        SERVER._replace(identity=server, admit_unauthenticated=admit_unauthenticated),
        handler,
    )


async def _connect(scheme: str, listener, client: TlsIdentity | None):
    greeting = CLIENT._replace(identity=client)
    return await transport_registry.transport(scheme).connect(listener.endpoint, greeting, deadline_s=soon())


async def _call(scheme: str, listener, client: TlsIdentity | None):
    connection = await _connect(scheme, listener, client)
    reply = await connection.call(1, b"hello", deadline_s=soon())
    assert reply.message == b"hello"
    return connection


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_side_knows_the_peers_member_name(scheme):
    async def main():
        kept = RecordingHandler()
        listener = await _serve(scheme, NODE, kept)
        connection = await _connect(scheme, listener, CLIENT_ID)
        task = asyncio.ensure_future(connection.call(1, b"", deadline_s=soon()))
        (call,) = await kept.count(1)
        assert call.peer.member == "client/ws1" and connection.peer.member == "node/alpha"
        call.reply()
        await task
        await connection.close()
        await listener.close()

    run(main())


WRONG_CLIENTS = {
    "other authority": (
        lambda: _unchecked("client/x", authority=OTHER_AUTHORITY, knows=AUTHORITY),
        "not signed by",
    ),
    "expired": (lambda: _unchecked("client/x", lives_s=-60), "has ended"),
    "other pool": (lambda: _unchecked("client/x", pool=OTHER), "for the pool fedcba98"),
}


def _unchecked(member: str, **other) -> TlsIdentity:
    """With a certificate that the identity itself would not accept as its own."""
    found = identity(member)
    found.replace(shown(member, **other))
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("which", WRONG_CLIENTS)
def test_client_with_a_wrong_certificate_is_refused(scheme, which):
    async def main():
        make, words = WRONG_CLIENTS[which]
        served = []
        listener = await _serve(scheme, NODE, lambda call: served.append(call) or echo(call))
        assert words in str(await refused(AccessDenied, _call(scheme, listener, make())))
        assert not served
        good = await _call(scheme, listener, CLIENT_ID)
        await good.close()
        await listener.close()

    run(main())


SERVERS = {
    "other authority": (
        lambda: _unchecked("node/x", authority=OTHER_AUTHORITY, knows=AUTHORITY),
        "not signed by",
    ),
    "expired": (lambda: _unchecked("node/x", lives_s=-60), "has ended"),
    "other pool": (lambda: _unchecked("node/x", pool=OTHER), "for the pool fedcba98"),
    "client": (lambda: identity("client/x"), ""),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("which", SERVERS)
def test_server_with_a_wrong_certificate_is_sent_nothing(scheme, which):
    async def main():
        make, words = SERVERS[which]
        served = []
        listener = await _serve(scheme, make(), lambda call: served.append(call) or echo(call))
        error = await refused(AccessDenied, _call(scheme, listener, CLIENT_ID))
        assert words in str(error) and not served
        await listener.close()

    run(main())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_member_missing_from_the_map_is_refused(scheme):
    async def main():
        server, client = identity("node/alpha"), identity("client/ws1")
        listener = await _serve(scheme, server)
        server.update_members(["node/alpha"])
        assert "client/ws1" in str(await refused(StaleIdentity, _call(scheme, listener, client)))
        server.update_members(["node/alpha", "client/ws1"])
        client.update_members(["client/ws1", "node/beta"])
        assert "node/alpha" in str(await refused(StaleIdentity, _call(scheme, listener, client)))
        client.update_members(["client/ws1", "node/alpha"])
        await (await _call(scheme, listener, client)).close()
        await listener.close()

    run(main())


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_connection_closes_when_the_peer_leaves_the_map(scheme, side):
    async def main():
        server, client, other = identity("node/alpha"), identity("client/ws1"), identity("client/ws2")
        kept = RecordingHandler()
        listener = await _serve(scheme, server, kept)
        connections = [await _connect(scheme, listener, who) for who in (client, other)]
        tasks = [
            asyncio.ensure_future(connection.call(1, b"", deadline_s=soon())) for connection in connections
        ]
        calls = {call.peer.member: call for call in await kept.count(2)}
        if side == "server":
            server.update_members(["node/alpha", "client/ws2"])
        else:
            client.update_members(["client/ws1"])
        await refused(Disconnected, tasks[0])
        await until(lambda: connections[0].closed and calls["client/ws1"].cancelled)
        calls["client/ws2"].reply(b"still here")
        assert (await tasks[1]).message == b"still here"
        for connection in connections:
            await connection.close()
        await listener.close()

    run(main())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plain_text_and_tls_do_not_mix(scheme):
    async def main():
        listener = await _serve(scheme, NODE)
        error = await refused((Unreachable, AccessDenied), _call(scheme, listener, PLAIN_TEXT))
        assert scheme != "stream" or "does it speak TLS" in str(error)
        await listener.close()
        listener = await _serve(scheme, PLAIN_TEXT)
        assert "plain text" in str(
            await refused((AccessDenied, Unreachable), _call(scheme, listener, CLIENT_ID))
        )
        await listener.close()

    run(main())


def test_peer_without_certificate_needs_explicit_permission(caplog):
    async def main():
        kept = RecordingHandler()
        joiner = identity("client/none")
        joiner.__dict__["_asking"] = authority_known(AUTHORITY.certificate)
        listener = await _serve("stream", NODE, kept)
        await refused(Unreachable, _call("stream", listener, joiner))
        assert not kept.calls
        await listener.close()
        listener = await _serve("stream", NODE, kept, admit_unauthenticated=True)
        task = asyncio.ensure_future(_call("stream", listener, joiner))
        (call,) = await kept.count(1)
        assert call.peer.member == "" and not call.peer.local
        call.reply(b"hello")
        await (await task).close()
        # a wrong certificate is refused also where none is needed
        wrong = _unchecked("client/x", authority=OTHER_AUTHORITY, knows=AUTHORITY)
        await refused(AccessDenied, _call("stream", listener, wrong))
        await listener.close()

    run(main())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_renewed_certificate_is_used_by_new_connections(scheme):
    async def main():
        server, client = _unchecked("node/alpha", lives_s=-60), identity("client/ws1")
        listener = await _serve(scheme, server)
        await refused(AccessDenied, _call(scheme, listener, client))
        server.replace(shown("node/alpha"))
        first = await _call(scheme, listener, client)
        await first.close()
        await listener.close()

    run(main())


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01\x02\x00" + bytes(512)]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_noise_and_half_open_connections_disturb_no_one(scheme, noise, caplog):
    async def main():
        listener = await _serve(scheme, NODE)
        where = parse_endpoint(listener.endpoint)
        socks = [socket.create_connection((where.host, where.port)) for _ in range(5)]
        for sock in socks:
            sock.sendall(noise)
        for sock in socks[1:]:
            sock.close()
        async with asyncio.timeout(PATIENCE_S):
            connection = await _call(scheme, listener, CLIENT_ID)
        socks[0].close()
        await connection.close()
        await listener.close()

    with caplog.at_level(logging.ERROR):
        run(main())
    # gRPC's poller is shared by all loops of a process; it logs this when another loop read the wake-up
    # first
    assert not [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR
        and not (record.exc_info and isinstance(record.exc_info[1], BlockingIOError))
    ]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize(
    ("scheme", "newest"),
    [
        ("stream", ssl.TLSVersion.TLSv1_2),
        ("stream", ssl.TLSVersion.TLSv1_1),
        ("grpc", ssl.TLSVersion.TLSv1_1),
    ],
)
def test_old_versions_of_tls_are_refused(scheme, newest, tmp_path):
    """gRPC has no option for a lowest version: its default is 1.2."""
    known, files = shown("client/ws1"), (tmp_path / "crt", tmp_path / "key")
    files[0].write_bytes(known.certificate)
    files[1].write_bytes(known.key)

    async def main():
        listener = await _serve(scheme, NODE)
        at = parse_endpoint(listener.endpoint)
        there = at.host, at.port, known.authority, *files
        assert await asyncio.to_thread(agreed_version, *there) == "TLSv1.3"
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(agreed_version, *there, newest)
        await listener.close()

    run(main())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plain_text_leaves_the_host_only_if_configured(scheme):
    async def main():
        away = f"{scheme}://192.0.2.1:9"  # TEST-NET-1 (RFC 5737)
        transport = transport_registry.transport(scheme)
        error = await refused(AccessDenied, transport.connect(away, CLIENT, deadline_s=soon()))
        assert "plain_text" in str(error)
        await refused(AccessDenied, transport.listen(f"{scheme}://0.0.0.0:0", SERVER, echo))
        listener = await transport.listen(f"{scheme}://0.0.0.0:0", SERVER._replace(identity=PLAIN_TEXT), echo)
        await listener.close()
        await refused(
            Unreachable,
            transport.connect(
                away, CLIENT._replace(identity=PLAIN_TEXT), deadline_s=SYSTEM_CLOCK.boottime_s() + 0.1
            ),
        )

    run(main())


@pytest.mark.parametrize(
    ("url", "leaves"),
    [
        ("stream://127.0.0.1:1", False),
        ("stream://127.8.0.1:1", False),
        ("stream://[::1]:1", False),
        ("stream://localhost:1", False),
        ("stream://10.0.0.1:1", True),
        ("grpc://[fe80::1]:1", True),
        ("stream://alpha:1", True),
        ("stream://0.0.0.0:1", True),
        ("stream+unix:///run/x", False),
        ("inproc://x", False),
        ("stream://127.0.0.1.example.org:1", True),
    ],
)
def test_loopback_addresses_do_not_leave_the_host(url, leaves):
    assert leaves_host(parse_endpoint(url)) is leaves


def test_authority_refuses_malformed_requests():
    made = request_certificate()
    for member in ("node/", "admin/x", "node/a b", "node/../x", "client/" + "x" * 81):
        with pytest.raises(InvalidRequest):
            AUTHORITY.sign(made.request, POOL, member)
    for wrong in (b"", b"x", made.request.replace(b"A", b"B", 1), made.key):
        with pytest.raises(InvalidRequest):
            AUTHORITY.sign(wrong, POOL, "client/x")


def test_unusable_own_certificate_is_detected():
    with pytest.raises(BadConfiguration, match="has ended"):
        identity("client/x", lives_s=-60).own_member()
    with pytest.raises(BadConfiguration, match="cannot be used"):
        TlsIdentity(POOL, shown("client/x")._replace(key=request_certificate().key)).own_member()
    with pytest.raises(AccessDenied, match="for the pool"):
        identity("client/x", pool=OTHER).own_member()
