"""Join client: creates a member's directory and exchanges a token for a certificate.

Used by provision/create (verb "join"). The private key never leaves the directory. Guarantees: the token is
sent only to the CA whose fingerprint it contains. The directory belongs to a pool only when it is complete
and durable (FORMAT last). The same command continues an interrupted join, with the same key, so that the
token is not lost.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config, parse
from nvpool.core.errors import AccessDenied, AlreadyExists, InvalidRequest
from nvpool.host.pool_directory import (
    BEING_MADE_TEXT,
    FORMAT_TEXT,
    Flock,
    PoolDirectory,
    make_passed_through,
    sync_directory,
    write_whole,
)
from nvpool.host.pool_directory_modes import group_number, protect
from nvpool.host.process_identity import host_id
from nvpool.poolmap.model import decode_map
from nvpool.provision.external_etcd import External, check, external, keep
from nvpool.provision.map_location import MapLocation, write_map_location
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.security.ca import (
    MemberRequest,
    fingerprint_of,
    key_of_request,
    request_again,
    request_certificate,
)
from nvpool.security.join_tokens import Token, read_token
from nvpool.security.tls import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    ETCD_SECRET,
    KEY_FILE,
    PLAIN_TEXT,
    JoiningIdentity,
    TlsIdentity,
)

JOIN_S = 90.0
"""Time limit of a join: the first node may have to start etcd."""
JOINING = "being-joined"


async def join(request: dict, endpoints_of: Callable[[Config, str], tuple[str, ...]]) -> dict:
    """Create the directory of a node, a client or a bridge. `endpoints_of` gives the endpoints of a
    supervisor.

        {"verb": "join", "directory", "kind", "address", "token", "name", "host", "config": text}
            -> {"directory", "pool_id", "name", "member", "node"}
    """
    directory, kind = PoolDirectory(request["directory"]), request["kind"]
    token, config = read_token(request["token"], kind), parse(request["config"], "node.toml")
    address = _address(request["address"])
    make_passed_through(directory.path)
    key = _begin(directory)
    lock = Flock.take(directory.lock, f"the pool directory {directory.path}")
    try:
        make_passed_through(directory.run)
        directory.log.mkdir(exist_ok=True)
        if kind == "node":
            for path in (directory.path / "meta", directory.path / "targets"):
                path.mkdir(exist_ok=True)
        protect(directory, group_number(config.access.operators, "access.operators"))
        write_whole(directory.node_toml, request["config"].encode())
        # A unique name: two nodes may use the same directory path, and each would find its own socket there.
        own_name = f"node-{key_of_request(key.request)[:8]}"
        endpoints = endpoints_of(config, own_name) if kind == "node" else ()
        asked = pool_pb2.JoinRequest(
            secret=token.secret,
            kind=kind,
            request=key.request,
            name=request.get("name") or socket.gethostname(),
            host=config.network.host if kind == "node" else "",
            host_id=host_id(),
            endpoints=endpoints,
        )
        given = external(request.get("etcd"))
        if given is not None:
            await check(given)
        answer = await _ask(address, token, asked, config.network.plain_text)
        if kind == "node":
            _keep_external(directory, answer["etcd"], given)
        _keep(directory, kind, answer, key)
        write_whole(directory.format, FORMAT_TEXT.encode())  # last: this makes it a directory of the pool
        (directory.path / JOINING).unlink(missing_ok=True)
    finally:
        lock.release()
    return {"directory": str(directory.path)} | {
        name: answer.get(name, 0) for name in ("pool_id", "name", "member", "node")
    }


def _address(text: str) -> str:
    if "://" in text:
        if not text.startswith("stream://"):
            raise InvalidRequest(f"{text!r}: joining goes over stream://HOST:PORT")
        return text
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidRequest(
            f"{text!r} is not the address of a node; write HOST:PORT, as `nvpool node token POOL` and "
            f"`nvpool client token POOL` print it"
        )
    return f"stream://{text}"


async def _ask(address: str, token: Token, asked: pool_pb2.JoinRequest, plain_text: bool) -> dict:
    """Send the token and return the pool's answer.

    AccessDenied: the server's CA is not the one in the token; the token was not sent.
    """
    identity: TlsIdentity = PLAIN_TEXT if plain_text else JoiningIdentity()
    found = await _call(
        address, identity, wire_pb2.POOL_AUTHORITY, pool_pb2.AuthorityRequest(), pool_pb2.AuthorityReply
    )
    if fingerprint_of(found.certificate) != token.fingerprint:
        raise AccessDenied(
            f"{address} is not the pool that the token is for (its CA is another one); the token was not "
            f"sent there"
        )
    if not plain_text:
        identity = JoiningIdentity(found.pool_id, found.certificate)
    reply = await _call(address, identity, wire_pb2.POOL_JOIN, asked, pool_pb2.JoinReply)
    return json.loads(reply.answer)


async def _call(address: str, identity: TlsIdentity, method: int, request, reply_type):
    dialer = Dialer(Greeting("joining", identity=identity), host_id=host_id())
    try:
        reply = await dialer.call(
            (address,), method, request.SerializeToString(), deadline_s=SYSTEM_CLOCK.boottime_s() + JOIN_S
        )
        return decoded(reply_type, reply.message)
    finally:
        await dialer.close()


def _keep(directory: PoolDirectory, kind: str, answer: dict, key: MemberRequest) -> None:
    """Write the files that make this directory a member."""
    secret = directory.secret
    files: list[tuple[Path, str, int]] = [
        (secret / AUTHORITY_FILE, answer["authority"], 0o644),
        (secret / CERTIFICATE_FILE, answer["certificate"], 0o644),
    ]
    if kind == "node":
        etcd = secret / ETCD_SECRET
        etcd.mkdir(mode=0o700, exist_ok=True)
        write_whole(directory.grant_key, bytes.fromhex(answer["grant_key"]), 0o600)
        files += [
            (etcd / AUTHORITY_FILE, answer["etcd"]["authority"], 0o644),
            (etcd / CERTIFICATE_FILE, answer["etcd"]["certificate"], 0o644),
            (etcd / KEY_FILE, key.key.decode(), 0o600),
        ]
        if "external" not in answer["etcd"]:
            write_map_location(directory, MapLocation("etcd", tuple(answer["etcd"]["members"])))
    for path, text, mode in files:
        write_whole(path, text.encode(), mode)
    decode_map(answer["map"].encode())
    directory.publish(answer["map"].encode())
    write_whole(
        directory.node_json, msgspec.json.encode({"node": answer.get("node", 0), "member": answer["member"]})
    )
    for path in (directory.path, directory.path.parent):
        sync_directory(path)


def _keep_external(directory: PoolDirectory, etcd: dict, given: External | None) -> None:
    """Record the operator's own etcd, as the request or the pool's answer names it.

    InvalidRequest, with the remedy: the answer does not contain the certificate that is needed.
    """
    if "external" not in etcd:
        if given is not None:
            raise InvalidRequest("this pool keeps its map in an etcd of its own: leave --etcd out")
        return
    if given is None:
        if etcd["external"] == "secured":
            raise InvalidRequest(
                f"this pool keeps its map in an etcd of yours ({', '.join(etcd['members'])}): repeat the "
                f"command with --etcd, --etcd-ca, --etcd-cert and --etcd-key"
            )
        given = External(tuple(etcd["members"]), None)
    keep(directory, given)


def _begin(directory: PoolDirectory) -> MemberRequest:
    """Return our key and the request for its certificate: new ones, or those of the interrupted join.

    AlreadyExists: the directory holds anything else.
    """
    found = sorted(entry.name for entry in directory.path.iterdir())
    key_file = directory.secret / KEY_FILE
    if "FORMAT" in found and directory.format.read_bytes() != BEING_MADE_TEXT.encode():
        raise AlreadyExists(
            f"{directory.path} belongs to a pool already; `nvpool status {directory.path}` shows it"
        )
    if found and JOINING not in found:
        raise AlreadyExists(
            f"{directory.path} is not empty; name an empty directory or one that does not exist"
        )
    if key_file.exists():
        return request_again(key_file.read_bytes())
    write_whole(directory.path / JOINING, b"joining a pool; the same command goes on with it\n")
    write_whole(directory.format, BEING_MADE_TEXT.encode())
    directory.secret.mkdir(mode=0o700, exist_ok=True)
    made = request_certificate()
    write_whole(key_file, made.key, 0o600)
    return made
