"""Role of the process at the other end of a connection, by its certificate or its credentials.

A certificate names a node or a client. A process on this host has the credentials that the kernel gives for a unix socket
(unix(7), SO_PEERCRED and SO_PEERGROUPS): root, the user of the pool's daemons and the members of the operator group have the
rights of a node, each other user has the rights of that user alone. Used by the services and by `wire/handover`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import enum
import os
import socket
import struct
from functools import lru_cache

from nvpool.base.errors import AccessDenied
from nvpool.base.identities import user_in
from nvpool.wire.transport import Credentials, Peer
from nvpool.wire.v1 import wire_pb2 as wire

_PEERCRED = struct.Struct("iII")
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)


USER_METHODS = frozenset((
    wire.POOL_MAP, wire.DATA_READ, wire.DATA_WRITE, wire.DATA_FLUSH, wire.DATA_EXTENTS, wire.DATA_COPY, wire.DATA_LOCATE,
    wire.META_OPEN_SESSION, wire.META_RENEW_SESSION, wire.META_CLOSE_SESSION, wire.META_RELEASE, wire.META_WATCH,
    wire.META_LOCK_WAIT, wire.META_LIST, wire.META_LOOKUP, wire.META_LOOKUP_MANY, wire.META_GETATTR, wire.META_GETATTR_MANY,
    wire.META_READLINK, wire.META_GETXATTR, wire.META_LISTXATTR, wire.META_SETXATTR, wire.META_REMOVEXATTR, wire.META_STATFS,
    wire.META_SYNC, wire.META_LOCK, wire.META_LOCKS, wire.META_SETATTR, wire.META_ALLOCATE, wire.META_CREATE, wire.META_UNLINK,
    wire.META_RMDIR, wire.META_RENAME, wire.META_LINK, wire.META_OPEN, wire.META_REPORT, wire.META_RESERVE, wire.META_VOLUME,
    wire.META_VOLUME_ROOM))
"""What a local user may ask for at all: of stores what a grant allows, of the metadata service what meta/local_users checks."""


class Role(enum.IntEnum):
    """Ordered by rights."""

    STRANGER = 0
    """No certificate where one is needed: may ask how to join."""
    USER = 1
    """A local user without the rights of a node: acts as its own uid and groups."""
    CLIENT = 2
    """A host with the certificate of a client."""
    NODE = 3
    """A node of the pool, or a process on one with the same rights. Also each peer in plain text (`network.plain_text`)."""


def credentials_of(sock: socket.socket) -> Credentials:
    """User and groups of the process that has connected to this unix socket."""
    pid, uid, gid = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    groups = {gid}
    with contextlib.suppress(OSError):  # before Linux 4.13, or more groups than fit: the first counts alone
        groups.update(array.array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)))
    return Credentials(uid, frozenset(groups), pid)


def with_address(peer: Peer, transport: asyncio.BaseTransport) -> Peer:
    """The peer with the address of the connection and, on a unix socket, its credentials."""
    address = transport.get_extra_info("peername")
    if isinstance(address, tuple):
        return peer._replace(address=f"{address[0]}:{address[1]}")
    return peer._replace(address="unix", credentials=credentials_of(transport.get_extra_info("socket")))


def role_of(peer: Peer, operators: int | None = None) -> Role:
    """Rights of the peer. `operators` is the number of the operator group, None without one. For a connection on which a
    stranger may be let in (TLS without a certificate), the listener refuses before this is asked."""
    return _role(peer.member, peer.credentials, operators)


def acts_as(peer: Peer, operators: int | None) -> Credentials | None:
    """User and groups as which alone the peer may act: of a local user without the rights of a node, and of a client whose
    certificate binds it to one user. None for everybody else, who is trusted to say for whom it asks."""
    credentials = peer.credentials
    if peer.member:
        user = user_in(peer.member)
        return Credentials(user[0], frozenset((user[1],)), 0) if user is not None else None
    return credentials if credentials is not None and credentials.uid and role_of(peer, operators) is Role.USER else None


def check_user_may(peer: Peer, method: int, operators: int | None) -> None:
    """AccessDenied where the peer is a local user, and the method is not one of USER_METHODS."""
    if peer.credentials is not None and method not in USER_METHODS and role_of(peer, operators) is Role.USER:
        known = wire.Method.Name(method) if method in wire.Method.values() else f"method {method}"
        raise AccessDenied(f"user {peer.credentials.uid} has not the rights of a node, which {known} needs; ask root, or a "
                           f"member of the operator group (store.short_cut_group)")


@lru_cache(maxsize=1024)
def _role(member: str, credentials: Credentials | None, operators: int | None) -> Role:
    if member:
        return Role.NODE if member.startswith("node/") else Role.CLIENT
    if credentials is None or credentials.uid in (0, os.geteuid()) or operators in credentials.gids:
        return Role.NODE
    return Role.USER
