"""Role of the process at the other end of a connection, by its certificate or its credentials.

A certificate names a node or a client. A process on this host has the credentials that the kernel gives for a unix socket
(unix(7), SO_PEERCRED and SO_PEERGROUPS): root, the user of the pool's daemons and the members of the operator group have the
rights of a node, each other user has the rights of that user alone. Used by the services and by `rpc/fd_passing`.
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

from nvpool.core.member_names import squashes_root, user_in
from nvpool.rpc.api import BELIEVED_GROUPS, SOMEBODY, Credentials, Peer

_PEERCRED = struct.Struct("iII")
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)


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
    """User and groups as which alone the peer may act: of a local user without the rights of a node, of a client whose
    certificate binds it to one user, and SOMEBODY of one whose root is squashed. None for everybody else, who is trusted to
    say for whom it asks."""
    credentials = peer.credentials
    if peer.member:
        if squashes_root(peer.member):
            return Credentials(SOMEBODY, BELIEVED_GROUPS, 0)
        user = user_in(peer.member)
        return Credentials(user[0], frozenset((user[1],)), 0) if user is not None else None
    return credentials if credentials is not None and credentials.uid and role_of(peer, operators) is Role.USER else None


@lru_cache(maxsize=1024)
def _role(member: str, credentials: Credentials | None, operators: int | None) -> Role:
    if member:
        return Role.NODE if member.startswith("node/") else Role.CLIENT
    if credentials is None or credentials.uid in (0, os.geteuid()) or operators in credentials.gids:
        return Role.NODE
    return Role.USER
