"""Join server: issues join tokens, admits new members and renews certificates.

Used by node/supervisor of a node that has the CA's key. A token is checked before anything else is done for
its holder, and is marked as used in the same map change that admits the holder. So a token works only once,
whatever is lost on the way, and works again for the same key if only the reply was lost. The server never
sends a private key, except those of the CAs, and those only to nodes that keep the map.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from google.protobuf.message import DecodeError

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.containers.rate_limits import RateLimits
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import AccessDenied, Busy, InvalidRequest, from_os_error
from nvpool.core.names import SQUASH_ROOT, new_member
from nvpool.host.pool_directory import PoolDirectory
from nvpool.meta.service_auth import AuthorityCheck
from nvpool.node.admin.certificate_store import CertificateStore
from nvpool.node.coordination.map_backend import MapBackend
from nvpool.poolmap.model import Node, PoolMap, encode_map
from nvpool.poolmap.nodes.etcd_membership import lets_in
from nvpool.poolmap.nodes.membership import joined, token_for, token_given
from nvpool.provision.tokens import (
    KINDS,
    TOKEN_S_MAX,
    address_of,
    hosts_of,
    new_token,
    now_ms,
    read_authority,
)
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.runtime.audit_events import actor_of, audited
from nvpool.runtime.audit_log import AuditLog
from nvpool.runtime.daemon_lifecycle import read_grant_key
from nvpool.security.ca import CertificateAuthority, key_of_request
from nvpool.security.join_tokens import hash_of
from nvpool.security.tls import AUTHORITY_FILE, ETCD_SECRET

log = logging.getLogger("nvpool.node.admin.join_server")

RENEWALS_MAX = 20
RENEWAL_S = 60.0
"""A client or bridge may have its certificate renewed RENEWALS_MAX times in a row, since its processes may do so at
the same time, and once in RENEWAL_S from then on."""


class JoinServer:
    """Join server of one node. `change` changes the pool map (`Leading.change`)."""

    def __init__(
        self,
        directory: PoolDirectory,
        keeper: MapBackend,
        change: Callable[[Callable[[PoolMap], PoolMap]], Awaitable[PoolMap]],
        audit: AuditLog,
        certificates: CertificateStore,
        clock: Clock = SYSTEM_CLOCK,
    ):
        self._renewals = RateLimits(RENEWALS_MAX, 1 / RENEWAL_S, clock)
        self._directory = directory
        self._keeper = keeper
        self._change = change
        self._audit = audit
        self._certificates = certificates
        self.answers = {
            wire_pb2.POOL_AUTHORITY: self._answer_authority,
            wire_pb2.POOL_JOIN: self._answer_join,
            wire_pb2.POOL_RENEW: self._answer_renew,
            wire_pb2.POOL_KEYS: self._answer_keys,
        }

    def _authority(self) -> CertificateAuthority:
        """The pool's CA. AccessDenied: this node does not have its key; the error names the nodes that do."""
        try:
            return read_authority(self._directory)
        except AccessDenied:
            pool_map = self._keeper.relay.pool_map
            others = [address_of(pool_map.node_by_id[node]) for node in sorted(lets_in(pool_map))]
            raise AccessDenied(
                "this node cannot admit members: it does not hold the pool's CA key; these nodes do: "
                f"{', '.join(others) or 'the first node of the pool'}"
            ) from None

    async def make_token(
        self, kind: str, lives_s: float, acts_as: tuple[int, int] | None = None, squash_root: bool = False
    ) -> dict:
        """Create a token; return it with the address to join at.

        InvalidRequest: an argument is invalid, or this node listens on unix sockets only.
        """
        address = address_of(self._keeper.relay.pool_map.node_by_id[self._directory.node])
        if not address:
            raise InvalidRequest(
                "no machine can join: the pool listens only on unix sockets",
                remedy="create a pool with an address: nvpool pool create DIR --drive PATH --host ADDRESS",
            )
        if kind not in KINDS or not 1 <= lives_s <= TOKEN_S_MAX:
            raise InvalidRequest(
                f"a token is for one of {', '.join(KINDS)}, and lives for 1 to {TOKEN_S_MAX:.0f} seconds"
            )
        if acts_as is not None and (
            kind != "client" or not all(0 < number < 0xFFFFFFFF for number in acts_as)
        ):
            raise InvalidRequest(
                "a client may be bound to one user, with numbers of user and group from 1 to 4,294,967,294"
            )
        if squash_root and (kind != "client" or acts_as is not None):
            raise InvalidRequest("root is squashed of clients that are not bound to one user")
        if squash_root and len(self._keeper.relay.pool_map.shards) > 1:
            raise InvalidRequest(
                "root is not squashed in this pool, since its metadata is in several shards",
                remedy="let the client in without --squash-root, or make a pool with one shard for it",
            )
        kept_kind = f"{kind}.{SQUASH_ROOT}" if squash_root else kind
        if acts_as is not None:
            kept_kind = f"client.u{acts_as[0]}-{acts_as[1]}"
        token, kept = new_token(self._authority(), kept_kind, lives_s)
        await self._change(lambda newest: token_given(newest, kept, now_ms()))
        return {"token": token.text(), "kind": kind, "ends_ms": kept.ends_ms, "address": address}

    async def _answer_authority(self, call: Call) -> bytes:
        try:
            certificate = (self._directory.secret / AUTHORITY_FILE).read_bytes()
        except OSError as error:
            raise from_os_error(error, f"read {error.filename}") from error
        return pool_pb2.AuthorityReply(
            certificate=certificate, pool_id=self._keeper.relay.pool_map.pool_id
        ).SerializeToString()

    async def _answer_join(self, call: Call) -> bytes:
        request = _read(pool_pb2.JoinRequest, call)
        what = {"kind": request.kind, "name": request.name, "host": request.host}
        return await audited(self._audit, "join", actor_of(call.peer), what, self._join(request, call, what))

    async def _join(self, request: pool_pb2.JoinRequest, call: Call, what: dict[str, str]) -> bytes:
        """Admit the holder of a token. Adds the name of the new member to `what`, for the audit log."""
        kind, hash, used_by = request.kind, hash_of(request.secret), key_of_request(request.request)
        authority = self._authority()
        relay = self._keeper.relay
        kept = token_for(relay.pool_map, hash, kind, used_by, now_ms())
        node = None
        if kind == "node":
            endpoints = tuple(request.endpoints)
            if not endpoints or len(endpoints) > 8 or not request.host or not request.host_id:
                raise InvalidRequest("a node says what others call it by and where its supervisor listens")
            for endpoint in endpoints:
                parse_endpoint(endpoint)
            await self._keeper.move()
        member = new_member(
            kind,
            request.name,
            acts_as=acts_as_of(kept.kind),
            squash_root=kept.kind == f"{kind}.{SQUASH_ROOT}",
        )
        if kind == "node":
            node = partial(
                Node, name=request.name[:64], host_id=request.host_id, endpoints=endpoints, member=member
            )
        new = await self._change(lambda newest: joined(newest, hash, kind, used_by, member, now_ms(), node))
        member = token_for(new, hash, kind, used_by, now_ms()).member
        what["member"] = member
        log.info("%s has joined the pool, from %s", member, call.peer.address)

        def sign(addresses: tuple[str, ...] = ()) -> bytes:
            certificate = authority.sign(request.request, new.pool_id, member, addresses)
            self._certificates.note_issued(member, certificate)
            return certificate

        answer = {
            "pool_id": new.pool_id,
            "name": new.name,
            "member": member,
            "authority": authority.certificate.decode(),
            "map": encode_map(new).decode(),
        }
        if node is None:
            return _joined(answer | {"certificate": sign().decode()})
        number = next(one.id for one in new.nodes if one.member == member)
        etcd = read_authority(self._directory, ETCD_SECRET)
        if self._keeper.external:
            where = {"members": list(self._keeper.members), "external": self._keeper.external}
        else:
            where = {
                "members": [one.client for one in new.etcd if one.state == "up"] or list(self._keeper.members)
            }
        answer |= {
            "node": number,
            "certificate": sign((request.host,)).decode(),
            "grant_key": self._directory.grant_key.read_bytes().hex(),
            "etcd": where
            | {
                "authority": etcd.certificate.decode(),
                "certificate": etcd.sign(request.request, new.pool_id, member, (request.host,)).decode(),
            },
        }
        return _joined(answer)

    async def _answer_renew(self, call: Call) -> bytes:
        request = _read(pool_pb2.RenewRequest, call)
        member = call.peer.member
        if not member:
            raise AccessDenied("only a member with a certificate of this pool can renew it")
        if not member.startswith("node/") and not self._renewals.take(member):
            raise Busy(
                f"{member} has had its certificate renewed {RENEWALS_MAX} times; try again in a minute",
                retry_after_s=RENEWAL_S,
            )
        pool_map = self._keeper.relay.pool_map
        node = next((one for one in pool_map.nodes if one.member == member), None)
        # in a thread: to sign takes a millisecond, and to note it waits for the drive
        reply = await asyncio.to_thread(self._renewed, request.request, pool_map.pool_id, member, node)
        self._audit.note("certificate-renew", actor_of(call.peer), {"member": member})
        return reply.SerializeToString()

    def _renewed(self, request: bytes, pool_id: str, member: str, node: Node | None) -> pool_pb2.RenewReply:
        hosts = hosts_of(node)
        certificate = read_authority(self._directory).sign(request, pool_id, member, hosts)
        etcd = b""
        if node is not None:
            etcd = read_authority(self._directory, ETCD_SECRET).sign(request, pool_id, member, hosts)
        self._certificates.note_issued(member, certificate)
        return pool_pb2.RenewReply(certificate=certificate, etcd_certificate=etcd)

    async def _answer_keys(self, call: Call) -> bytes:
        """Send the CAs' keys to a node that keeps the map as this one does."""
        request = _read(pool_pb2.KeysRequest, call)
        AuthorityCheck(SYSTEM_CLOCK, read_grant_key(self._directory))(request.right)
        pool_map = self._keeper.relay.pool_map
        node = pool_map.node_by_id.get(request.node)
        if (
            request.node not in lets_in(pool_map)
            or node is None
            or (call.peer.member and call.peer.member != node.member)
        ):
            raise AccessDenied(f"node {request.node} keeps no pool map, and gets no keys")
        authority, etcd = (read_authority(self._directory, below) for below in ("", ETCD_SECRET))
        self._audit.note("authority-keys", actor_of(call.peer), {"node": request.node})
        log.info(
            "node %d gets the keys of the pool's authorities: it lets others in from now on", request.node
        )
        return pool_pb2.KeysReply(authority=authority.key, etcd_authority=etcd.key).SerializeToString()


def acts_as_of(token_kind: str) -> tuple[int, int] | None:
    """User and group to which the token's client is bound, or None."""
    _, bound, numbers = token_kind.partition(".u")
    uid, _, gid = numbers.partition("-")
    return (int(uid), int(gid)) if bound else None


def _joined(answer: dict) -> bytes:
    return pool_pb2.JoinReply(answer=json.dumps(answer).encode()).SerializeToString()


def _read(kind, call: Call):
    try:
        return kind.FromString(bytes(call.message))
    except DecodeError:
        raise InvalidRequest(f"not a {kind.DESCRIPTOR.name}") from None
