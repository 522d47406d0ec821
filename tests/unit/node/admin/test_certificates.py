"""The pool's certificates as operators see them: expiry, failed renewals, and which member has which certificate."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from nvpool.cli import pool_connection
from nvpool.cli.commands import cert
from nvpool.client import certificate_renewal as client_renewing
from nvpool.core.clock import ManualClock
from nvpool.core.errors import Busy, CorruptRecord, NotFound, Unavailable
from nvpool.core.names import SKEW_S
from nvpool.host.pool_directory import PoolDirectory
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.node.admin import certificate_renewal as node_renewal
from nvpool.node.admin import join_server
from nvpool.node.admin.certificate_store import ISSUED_FILE, CertificateStore
from nvpool.node.metrics import measure_certificates
from nvpool.poolmap.certificate_expiry import DAY_S, problems, state_of
from nvpool.poolmap.model import MAP_FORMAT, PoolMap, PoolSettings
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.security import tls as identity_module
from nvpool.security.ca import CertificateAuthority, described, request_certificate
from nvpool.security.tls import ETCD_SECRET, TlsIdentity, is_key_of

POOL = "0123456789abcdef" * 2
NOW_S = 1_000_000_000.0


@pytest.fixture
def clock():
    return ManualClock(start_s=NOW_S)


@pytest.fixture
def authority(clock):
    return CertificateAuthority.make(POOL, clock)


@pytest.fixture
def directory(tmp_path, authority, clock):
    """A pool directory with the pool's CA certificate and a member certificate valid for 90 days."""
    found = PoolDirectory(tmp_path)
    found.secret.mkdir()
    (found.secret / "authority.crt").write_bytes(authority.certificate)
    signed = authority.sign(request_certificate().request, POOL, "node/alpha.1", clock=clock)
    (found.secret / "member.crt").write_bytes(signed)
    return found


def test_certificate_is_described(authority, clock):
    now_s = clock.wall_ns() / 1e9
    one = described(authority.sign(request_certificate().request, POOL, "client/ws1.2", clock=clock))
    assert one.member == "client/ws1.2" and int(one.serial, 16) > 0
    assert one.begins_s < now_s and abs(one.ends_s - now_s - 90 * DAY_S) < 2
    assert described(authority.certificate).member == ""
    with pytest.raises(CorruptRecord):
        described(b"no certificate")


@pytest.mark.parametrize(
    "kind, left_days, state",
    [
        ("member", 31, "well"),
        ("member", 29.5, "well"),
        ("member", 28.9, "notice"),
        ("member", 6.9, "risk"),
        ("member", 0, "ended"),
        ("etcd-member", 29.5, "well"),
        ("authority", 30.1, "well"),
        ("authority", 29.9, "notice"),
        ("authority", 6.9, "risk"),
        ("etcd-authority", -1, "ended"),
    ],
)
def test_certificate_that_expires_soon_is_a_problem(kind, left_days, state):
    ends_s = NOW_S + left_days * DAY_S
    begins_s = ends_s - (90 if kind.endswith("member") else 20 * 365) * DAY_S - SKEW_S
    assert state_of(kind, begins_s, ends_s, NOW_S) == state
    found = problems(
        [{"kind": kind, "begins_s": begins_s, "ends_s": ends_s}],
        NOW_S,
        node=3,
        pool="/srv/p",
        trouble="no answer",
    )
    assert [one.severity for one in found] == {
        "well": [],
        "notice": ["notice"],
        "risk": ["degraded"],
        "ended": ["unavailable"],
    }[state]
    for one in found:
        assert one.remedy and one.node == 3 and one.kind == "certificate"
        assert ("no answer" in one.reason) == kind.endswith("member")


def test_short_lived_certificate_warns_in_its_last_third():
    for left_s, state in ((100, "well"), (35, "well"), (25, "notice"), (9, "risk")):
        assert state_of("member", NOW_S + left_s - 120 - SKEW_S, NOW_S + left_s, NOW_S) == state


def test_own_certificates_are_listed_and_reread(directory, authority, clock):
    certificates = CertificateStore(directory, clock)
    assert [one["kind"] for one in certificates.status()] == ["authority", "member"]
    before = certificates.own()["member"]
    clock.advance(10 * DAY_S)
    (directory.secret / "member.crt").write_bytes(
        authority.sign(request_certificate().request, POOL, "node/alpha.1", clock=clock)
    )
    assert certificates.own()["member"].ends_s == before.ends_s + 10 * DAY_S
    (directory.secret / "member.crt").write_bytes(b"broken")
    assert set(certificates.own()) == {"authority"}


def test_issued_certificates_are_kept_past_their_expiry(directory, authority, clock):
    certificates = CertificateStore(directory, clock)
    for member in ("client/a.1", "client/b.2", "client/a.1"):
        certificates.note_issued(
            member, authority.sign(request_certificate().request, POOL, member, clock=clock)
        )
    assert [one["member"] for one in certificates.issued_status()] == ["client/a.1", "client/b.2"]
    assert (directory.secret / ISSUED_FILE).stat().st_mode & 0o077 == 0
    clock.advance(121 * DAY_S)
    certificates.note_issued(
        "client/c.3", authority.sign(request_certificate().request, POOL, "client/c.3", clock=clock)
    )
    assert set(certificates.issued()) == {"client/c.3"}
    (directory.secret / ISSUED_FILE).write_bytes(b"broken")
    assert certificates.issued() == {}


def test_renewals_of_one_client_are_rate_limited(directory, clock, monkeypatch):
    """Each is signed, written to the drive and recorded, so a client must not ask without end."""
    authority = CertificateAuthority.make(POOL)  # by the time of the certificates that the server signs
    monkeypatch.setattr(join_server, "read_authority", lambda *_: authority)
    certificates, noted = CertificateStore(directory), []
    keeper = SimpleNamespace(relay=SimpleNamespace(pool_map=SimpleNamespace(pool_id=POOL, nodes=())))
    audit = SimpleNamespace(note=lambda event, actor, what: noted.append(what["member"]))
    server = join_server.JoinServer(directory, keeper, None, audit, certificates, clock)
    request = pool_pb2.RenewRequest(request=request_certificate().request).SerializeToString()

    async def renew(member):
        call = SimpleNamespace(message=request, peer=Peer("x", "10.0.0.1:1", False, member))
        answer = await server.answers[wire_pb2.POOL_RENEW](call)
        return described(pool_pb2.RenewReply.FromString(answer).certificate).member

    async def run():
        most, one, other = join_server.RENEWALS_MAX, "client/a.1", "client/b.2"
        assert await asyncio.gather(*(renew(one) for _ in range(most))) == [one] * most
        with pytest.raises(Busy, match="in a minute") as caught:
            await renew(one)
        assert caught.value.retry_after_s == join_server.RENEWAL_S
        assert await renew(other) == other
        clock.advance(join_server.RENEWAL_S)
        assert await renew(one) == one
        with pytest.raises(Busy):
            await renew(one)
        assert len(noted) == most + 2 and set(certificates.issued()) == {one, other}

    asyncio.run(run())


def test_failed_renewal_leaves_its_reason(directory, clock, monkeypatch):
    certificates, answers, noted = CertificateStore(directory, clock), [Unavailable("nobody signs"), True], []

    async def renew_once(*_):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    async def twice(renew, identity):
        with pytest.raises(Unavailable):
            await renew()
        assert certificates.trouble == "nobody signs"
        await renew()

    monkeypatch.setattr(node_renewal, "renew_once", renew_once)
    monkeypatch.setattr(node_renewal.client_renewal, "keep_renewed", twice)
    identity = SimpleNamespace(own_member=lambda: "node/alpha.1")
    audit = SimpleNamespace(note=lambda event, actor, what: noted.append((event, what)))
    asyncio.run(node_renewal.keep_renewed(directory, identity, lambda: None, None, audit, certificates))
    assert certificates.trouble == "" and noted == [("certificate-renew", {"member": "node/alpha.1"})]


def test_seconds_to_expiry_are_a_metric(directory, clock):
    page = Page()
    measure_certificates(page, CertificateStore(directory, clock).own(), clock.wall_ns() / 1e9 + 91 * DAY_S)
    lines = [line for line in page.text().splitlines() if line.startswith(metrics.CERTIFICATE_LEFT.name)]
    assert len(lines) == 2
    member = next(line for line in lines if 'kind="member"' in line)
    assert abs(float(member.split()[-1]) + DAY_S) < 2


@pytest.fixture
def rotating(tmp_path):
    """Directory with keys and certificates of the pool and of etcd, and its identity."""
    directory = PoolDirectory(tmp_path)
    directory.secret.mkdir()
    etcd = directory.secret / ETCD_SECRET
    etcd.mkdir()
    authority, requested = CertificateAuthority.make(POOL), request_certificate()
    for place in (directory.secret, etcd):
        (place / "authority.crt").write_bytes(authority.certificate)
        (place / "authority.key").write_bytes(authority.key)
        (place / "member.key").write_bytes(requested.key)
        (place / "member.crt").write_bytes(authority.sign(requested.request, POOL, "node/alpha.1"))
    return directory, TlsIdentity.load(directory.secret, POOL)


def secrets_of(directory):
    return [
        (place / name).read_bytes()
        for place in (directory.secret, directory.secret / ETCD_SECRET)
        for name in ("member.crt", "member.key")
    ]


def rotated(directory, identity):
    first = PoolMap(
        format=MAP_FORMAT,
        pool_id=POOL,
        name="p",
        epoch=1,
        settings=PoolSettings(1 << 20, 1),
        nodes=(),
        drives=(),
        targets=(),
        tables=(),
        shards=(),
    )
    return asyncio.run(node_renewal.renew_once(directory, identity, first, None, new_key=True))


def test_new_key_replaces_the_old_one(rotating):
    directory, identity = rotating
    before = secrets_of(directory)
    assert rotated(directory, identity)
    after = secrets_of(directory)
    assert not set(before) & set(after) and after[1] == after[3]
    assert identity.shown.key == after[1] and identity.own_member() == "node/alpha.1"
    assert (
        is_key_of(after[0], after[1]) and is_key_of(after[2], after[3]) and not is_key_of(after[0], before[1])
    )
    assert not list(directory.secret.rglob("*.next"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.secret.rglob("member.key"))


@pytest.mark.parametrize("step", range(10))
def test_interrupted_key_change_leaves_a_matching_pair(rotating, monkeypatch, step):
    """Power is lost before each of the writes and renames in turn."""
    directory, identity = rotating
    left = [step]

    class PowerLoss(Exception):
        pass

    def counted(write):
        def instead(*arguments, **named):
            if left[0] == 0:
                raise PowerLoss
            left[0] -= 1
            return write(*arguments, **named)

        return instead

    with monkeypatch.context() as patch:
        patch.setattr(client_renewing, "write_whole", counted(client_renewing.write_whole))
        patch.setattr(identity_module.os, "replace", counted(os.replace))
        try:
            rotated(directory, identity)
        except PowerLoss:
            pass
    found = TlsIdentity.load(directory.secret, POOL)
    assert found.own_member() == "node/alpha.1", "before the supervisor repaired it"
    node_renewal.settle_keys(directory)
    certificate, key, etcd_certificate, etcd_key = secrets_of(directory)
    assert is_key_of(certificate, key) and is_key_of(etcd_certificate, etcd_key)
    assert not list(directory.secret.rglob("*.next"))
    assert rotated(directory, TlsIdentity.load(directory.secret, POOL)), "it can be repeated"


def status(certificates, issued=(), members=("node/a.1", "node/b.2", "client/c.3"), revoked=()):
    nodes = [
        {"node": number, "name": member, "member": member, "endpoints": [f"stream://10.0.0.{number}:1"]}
        for number, member in ((1, "node/a.1"), (2, "node/b.2"))
    ]
    return {
        "members": list(members),
        "nodes": nodes,
        "revoked": list(revoked),
        "certificates": [
            {"kind": kind, "member": member, "serial": serial, "begins_s": NOW_S, "ends_s": ends_s}
            for kind, member, serial, ends_s in certificates
        ],
        "issued": [
            {"member": member, "serial": serial, "begins_s": NOW_S, "ends_s": ends_s}
            for member, serial, ends_s in issued
        ],
    }


END_S = NOW_S + 90 * DAY_S


def test_certificates_of_all_nodes_are_listed_once():
    first = status(
        [
            ("authority", "", "CA", END_S),
            ("member", "node/a.1", "A", END_S),
            ("etcd-member", "node/a.1", "AE", END_S),
        ],
        [("client/c.3", "C1", END_S - 5), ("client/gone.4", "G", END_S)],
        revoked=["node/old.9"],
    )
    second = status(
        [("authority", "", "CA", END_S), ("member", "node/b.2", "B", END_S)], [("client/c.3", "C2", END_S)]
    )
    found = {(one["member"], one["role"]): one for one in cert.certificates([first, second], NOW_S)}
    assert {key: (one["serial"], one["revoked"], one["node"]) for key, one in found.items()} == {
        (None, "authority"): ("CA", False, None),
        ("node/a.1", "node"): ("A", False, 1),
        ("node/a.1", "node, for etcd"): ("AE", False, 1),
        ("node/b.2", "node"): ("B", False, 2),
        ("client/c.3", "client"): ("C2", False, None),
        ("client/gone.4", "client"): ("G", True, None),
        ("node/old.9", "node"): (None, True, None),
    }
    client = found["client/c.3", "client"]
    assert client["days_left"] == 90.0 and client["from"] == "2001-09-09T01:46:40Z"
    assert found["node/old.9", "node"]["to"] is None


@pytest.fixture
def requested(monkeypatch):
    """Admin requests that were sent."""
    changes = []

    async def change(pool, verb, arguments):
        changes.append((verb, arguments))
        return {"epoch": 7}

    async def status_of(pool):
        return status([])

    monkeypatch.setattr(pool_connection, "change", change)
    monkeypatch.setattr(pool_connection, "status_of", status_of)
    return changes


@pytest.mark.parametrize(
    "member, change",
    [
        ("client/c.3", ("member-remove", {"member": "client/c.3"})),
        ("bridge/d.4", ("member-remove", {"member": "bridge/d.4"})),
        ("node/b.2", ("node-remove", {"node": 2, "lost": False, "give_up": False})),
    ],
)
def test_revoke_removes_the_member(requested, member, change):
    done = CliRunner().invoke(cert.revoke, ["/srv/p", member, "--json"])
    assert json.loads(done.output) == {"member": member, "epoch": 7} and requested == [change]


def test_revoking_a_node_names_the_keys_that_it_keeps(requested):
    said = {
        member: CliRunner().invoke(cert.revoke, ["/srv/p", member]).output
        for member in ("node/b.2", "client/c.3")
    }
    assert all(word in said["node/b.2"] for word in ("grant key", "CA's key", "erase secret/"))
    assert said["client/c.3"] == "client/c.3 is not in the pool any more\n"


def test_revoking_an_unknown_member_is_refused(requested):
    assert isinstance(CliRunner().invoke(cert.revoke, ["/srv/p", "node/none.7"]).exception, NotFound)
    assert requested == []
