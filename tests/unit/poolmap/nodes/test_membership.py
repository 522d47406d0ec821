"""Join tokens and members in the pool map, and renewal of certificates."""

import asyncio
import os
from types import SimpleNamespace

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nvpool.core.clock import ManualClock
from nvpool.core.errors import AccessDenied, InvalidRequest, Unavailable
from nvpool.core.names import MEMBER_S, new_member
from nvpool.host.pool_directory import PoolDirectory
from nvpool.node.admin.certificate_renewal import renew_once
from nvpool.node.admin.join_server import JoinServer, acts_as_of
from nvpool.poolmap.model import EtcdMember, JoinToken, Node, Revoked, decode_map, encode_map
from nvpool.poolmap.nodes.membership import REVOKED_S, joined, node_removed, token_for, token_given
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transport_registry import listen
from nvpool.security.ca import CertificateAuthority, ends_s, request_certificate
from nvpool.security.join_tokens import Token, hash_of, read_token
from nvpool.security.tls import AUTHORITY_FILE, AUTHORITY_KEY_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity
from nvpool.testing.contracts.coordinator import first_map

POOL = "0123456789abcdef" * 2


def node(number: int) -> Node:
    return Node(number, "beta", "host-b", ("stream://10.0.0.2:1",), member=f"node/beta.{number}")


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
def test_token_is_decoded_as_it_was_encoded(secret, fingerprint):
    assert read_token(f"  {Token(secret, fingerprint).text()}\n", "node") == Token(secret, fingerprint)


@given(st.text(max_size=90))
@settings(max_examples=200)
def test_other_text_is_not_a_token(text):
    with pytest.raises(InvalidRequest):
        read_token(text, "node")


@pytest.mark.parametrize("kind", ["node", "client"])
@pytest.mark.parametrize("cut", range(1, 70, 7))
def test_part_of_a_token_is_refused(cut, kind):
    with pytest.raises(InvalidRequest, match=f"`nvpool {kind} token POOL`") as refused:
        read_token(Token(bytes(range(16)), bytes(range(32))).text()[:-cut], kind)
    assert str(refused.value).count(" token POOL") == 1  # the command for no other kind


def test_token_admits_one_key_until_it_expires():
    pool_map = token_given(first_map(), JoinToken("h", "node", 1000), 0)
    assert decode_map(encode_map(pool_map)) == pool_map
    for wrong, kind, now_ms in (("x", "node", 0), ("h", "client", 0), ("h", "node", 1000)):
        with pytest.raises(
            AccessDenied, match=f"nvpool {kind} token"
        ):  # never the command for a token with more rights than were requested
            joined(pool_map, wrong, kind, "key-a", "node/beta.2", now_ms, node)
    after = joined(pool_map, "h", "node", "key-a", "node/beta.2", 500, node)
    assert after.epoch == pool_map.epoch + 1 and after.members == (*pool_map.members, "node/beta.2")
    assert after.node_by_id[2].member == "node/beta.2"
    assert joined(after, "h", "node", "key-a", "node/another.name", 600, node) is after
    assert token_for(after, "h", "node", "key-a", 600).member == "node/beta.2"
    with pytest.raises(AccessDenied, match="used already"):
        joined(after, "h", "node", "key-b", "node/beta.3", 600, node)
    assert token_given(after, JoinToken("i", "node", 9000), 1001).tokens == (JoinToken("i", "node", 9000),)


def test_node_without_data_is_removed_with_its_name():
    pool_map = token_given(first_map(), JoinToken("h", "node", 1000), 0)
    after = joined(pool_map, "h", "node", "k", "node/beta.2", 0, node)
    gone = node_removed(after, 2, 5)
    assert 2 not in gone.node_by_id and "node/beta.2" not in gone.members
    assert gone.revoked == (Revoked("node/beta.2", 5, gone.epoch),)
    for state in ("wanted", "ready", "added", "lost", "up", "leaving"):
        keeping = replace(after, etcd=(EtcdMember(1, "c1", "p1"), EtcdMember(2, "c2", "p2", state)))
        if state in ("up", "leaving"):
            with pytest.raises(InvalidRequest, match="keeps the pool map"):
                node_removed(keeping, 2, 5)
        else:
            assert node_removed(keeping, 2, 5).etcd == keeping.etcd[:1]
    later = node_removed(replace(after, revoked=gone.revoked), 2, 5 + REVOKED_S * 1000)
    assert later.revoked == (Revoked("node/beta.2", 5 + REVOKED_S * 1000, later.epoch),)
    for number, words in ((1, "has drives"), (7, "no node 7")):
        with pytest.raises(InvalidRequest, match=words):
            node_removed(after, number, 5)


def test_number_of_a_node_with_drives_is_never_reused():
    pool_map = token_given(
        token_given(first_map(), JoinToken("h", "node", 1000), 0), JoinToken("i", "node", 1000), 0
    )
    second = joined(pool_map, "h", "node", "k", "node/beta.2", 0, node)
    second = replace(
        second,
        drives=(*second.drives, replace(second.drives[0], id=9, node=2)),
        targets=(*second.targets, replace(second.targets[0], id=9, drive=9, node=2, state="gone")),
    )
    assert joined(node_removed(second, 2, 5), "i", "node", "l", "node/beta.3", 6, node).nodes[-1].id == 3


@settings(max_examples=40, deadline=None)
@given(st.floats(0, MEMBER_S), st.floats(0, 1))
def test_removed_member_has_no_unrevoked_certificate(age_s, hour):
    clock = ManualClock(start_s=1e9 + hour * 86400)
    authority, asked = CertificateAuthority.make(POOL, clock), request_certificate()
    mine, other = (
        x509.load_pem_x509_certificate(authority.sign(asked.request, POOL, member, clock=clock))
        for member in ("node/a.1", "node/b.1")
    )
    clock.advance(age_s)
    listed = x509.load_pem_x509_crl(
        authority.revoke(POOL, [("node/a.1", clock.wall_ns() / 1e9)], clock=clock)
    )
    assert listed.get_revoked_certificate_by_serial_number(mine.serial_number) is not None
    assert listed.get_revoked_certificate_by_serial_number(other.serial_number) is None


def test_member_names_are_unique_and_valid_in_certificates():
    made = request_certificate()
    authority = CertificateAuthority.make(POOL)
    names = {
        new_member("node", name)
        for name in ("a", "a", "ünï cödé", "", "x" * 200, "host.example.org", "a/../b")
    }
    assert len(names) == 7
    for name in names:
        authority.sign(made.request, POOL, name)


@pytest.fixture
def secret(tmp_path):
    """A pool directory with certificates that expire in a minute."""
    place = tmp_path / "pool"
    for below in ("", "etcd"):
        (place / "secret" / below).mkdir(parents=True, exist_ok=True)
        authority, asked = CertificateAuthority.make(POOL), request_certificate()
        for name, content in (
            (AUTHORITY_FILE, authority.certificate),
            (AUTHORITY_KEY_FILE, authority.key),
            (KEY_FILE, asked.key),
            (CERTIFICATE_FILE, authority.sign(asked.request, POOL, "node/alpha.1", lives_s=60)),
        ):
            (place / "secret" / below / name).write_bytes(content)
    return PoolDirectory(place)


def test_certificate_is_renewed_with_the_same_key_and_name(secret):
    identity = TlsIdentity.load(secret.secret, POOL)
    key, before = (secret.secret / KEY_FILE).read_bytes(), (secret.secret / CERTIFICATE_FILE).read_bytes()
    pool_map = replace(first_map(), pool_id=POOL)
    assert not asyncio.run(renew_once(secret, identity, pool_map, None, left_s=10.0))
    assert asyncio.run(renew_once(secret, identity, pool_map, None))
    after = (secret.secret / CERTIFICATE_FILE).read_bytes()
    assert ends_s(after) > ends_s(before) + 86_400 * 80 and identity.shown.certificate == after
    assert identity.own_member() == "node/alpha.1" and (secret.secret / KEY_FILE).read_bytes() == key
    assert ends_s((secret.secret / "etcd" / CERTIFICATE_FILE).read_bytes()) > ends_s(before) + 86_400 * 80
    assert not asyncio.run(renew_once(secret, identity, pool_map, None))


def test_renewal_without_ca_key_and_nodes_is_unavailable(secret):
    os.unlink(secret.secret / AUTHORITY_KEY_FILE)
    identity = TlsIdentity.load(secret.secret, POOL)
    with pytest.raises(Unavailable, match="no node"):
        asyncio.run(renew_once(secret, identity, replace(first_map(), pool_id=POOL, nodes=()), None))


def test_invalid_renewal_reply_is_reported(secret):
    os.unlink(secret.secret / AUTHORITY_KEY_FILE)
    identity = TlsIdentity.load(secret.secret, POOL)

    async def run() -> None:
        greeting = Greeting("test", "")
        listener = await listen("inproc://renewing", greeting, lambda call: call.reply(b"\xff"))
        dialer = Dialer(greeting)
        try:
            there = replace(
                first_map(), pool_id=POOL, nodes=(Node(1, "here", "host", ("inproc://renewing",)),)
            )
            with pytest.raises(Unavailable, match="RenewReply"):
                await renew_once(secret, identity, there, dialer)
        finally:
            await dialer.close()
            await listener.close(0.0)

    asyncio.run(run())


def test_process_uses_the_certificate_another_renewed(secret):
    ours, theirs = (TlsIdentity.load(secret.secret, POOL) for _ in range(2))
    pool_map = replace(first_map(), pool_id=POOL)
    assert asyncio.run(renew_once(secret, theirs, pool_map, None))
    assert ours.shown != theirs.shown
    ours.refresh()
    assert ours.shown == theirs.shown


def test_hash_of_a_token_is_not_its_secret():
    assert hash_of(bytes(16)) != bytes(16).hex() and len(hash_of(bytes(16))) == 64


def test_squash_root_token_is_for_clients():
    pool_map = token_given(first_map(), JoinToken("h", "client.squash-root", 1000), 0)
    found = token_for(pool_map, "h", "client", "key", 500)
    assert found.kind == "client.squash-root" and acts_as_of(found.kind) is None
    with pytest.raises(AccessDenied, match="lets in a client, not a node"):
        token_for(pool_map, "h", "node", "key", 500)


def test_token_bound_to_a_user_is_for_clients():
    pool_map = token_given(first_map(), JoinToken("h", "client.u1000-50", 1000), 0)
    assert acts_as_of(token_for(pool_map, "h", "client", "key", 500).kind) == (1000, 50)
    assert acts_as_of("client") is None
    with pytest.raises(AccessDenied, match="lets in a client, not a node"):
        token_for(pool_map, "h", "node", "key", 500)


def test_squash_root_needs_an_unbound_client_and_one_shard():
    async def main() -> None:
        node = Node(1, "alpha", "host-a", ("stream://10.0.0.1:1",), member="node/alpha.1")
        one = replace(first_map(), nodes=(node,))
        two = replace(one, shards=(*one.shards, replace(one.shards[0], id=2)))
        for pool_map, kind, bound in ((one, "node", None), (one, "client", (5, 5)), (two, "client", None)):
            keeper = SimpleNamespace(relay=SimpleNamespace(pool_map=pool_map))
            reception = JoinServer(SimpleNamespace(node=1), keeper, None, None, None)
            with pytest.raises(InvalidRequest):
                await reception.make_token(kind, 60.0, bound, squash_root=True)

    asyncio.run(main())
