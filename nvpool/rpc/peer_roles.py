"""Identity and role of the peer of a connection, from its certificate or its credentials.

A certificate names a node or a client. A process on this host has the credentials that the kernel reports for
a unix socket (unix(7), SO_PEERCRED and SO_PEERGROUPS): root, the user of the pool's daemons and the members
of the operator group have the rights of a node; every other user has only that user's rights. Used by the
services and by `rpc/fd_passing`.
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
from typing import NamedTuple

from nvpool.core.names import squashes_root, user_in

_PEERCRED = struct.Struct("iII")
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)


class TrustedGroups:
    """All groups except root's (gid 0).

    Used for a client whose statements about groups are trusted. BELIEVED_GROUPS is the only instance.
    """

    def __contains__(self, gid: object) -> bool:
        return gid != 0


BELIEVED_GROUPS = TrustedGroups()
ANY_USER_BUT_ROOT = -1
"""User id that means any user of a client except root. The request does not say which one."""


class Credentials(NamedTuple):
    """User and groups of a peer process, or those that a client may act as.

    For a process at the other end of a unix socket they are the values at connect time, as the kernel reports
    them.
    """

    uid: int
    gids: frozenset[int] | TrustedGroups
    """The group of the process and its supplementary groups (reported since Linux 4.13)."""
    pid: int


class Peer(NamedTuple):
    """Identity of the other end of a connection: its greeting, its certificate and its credentials."""

    name: str
    address: str
    local: bool
    """True if the peer is on this host (unix socket or in-process)."""
    member: str = ""
    """Member name from the peer's certificate, like node/alpha.

    Empty in plain text, and for a peer without a certificate where the listener accepts those.
    """
    credentials: Credentials | None = None
    """Credentials of a process on this host; None on all connections except unix sockets."""


class Role(enum.IntEnum):
    """Role of a peer, ordered by rights."""

    UNAUTHENTICATED = 0
    """A peer without a certificate where one is required: may only request how to join."""
    USER = 1
    """A local user without the rights of a node: acts as its own uid and groups."""
    CLIENT = 2
    """A host with a client certificate."""
    NODE = 3
    """A node of the pool, or a process on one with the same rights.

    Also each peer in plain text (`network.plain_text`)."""


def credentials_of(sock: socket.socket) -> Credentials:
    """User and groups of the process that has connected to this unix socket."""
    pid, uid, gid = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    groups = {gid}
    with contextlib.suppress(OSError):  # before Linux 4.13, or more groups than fit: the first counts
        groups.update(array.array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)))
    return Credentials(uid, frozenset(groups), pid)


def with_address(peer: Peer, transport: asyncio.BaseTransport) -> Peer:
    """The peer with the address of the connection and, on a unix socket, its credentials."""
    address = transport.get_extra_info("peername")
    if isinstance(address, tuple):
        return peer._replace(address=f"{address[0]}:{address[1]}")
    return peer._replace(address="unix", credentials=credentials_of(transport.get_extra_info("socket")))


def role_of(peer: Peer, operators: int | None = None) -> Role:
    """Role of the peer. `operators` is the id of the operator group, None if there is none.

    On a connection that admits peers without a certificate (TLS), such a peer must be handled before this is
    called.
    """
    return _role(peer.member, peer.credentials, operators)


def acts_as(peer: Peer, operators: int | None) -> Credentials | None:
    """The only user and groups as which the peer may act, or None.

    A local user without the rights of a node acts as itself. A client whose certificate binds it to one user
    acts as that user. A client whose root is squashed acts as ANY_USER_BUT_ROOT. For every other peer the result is
    None: it is trusted to name the user of each request.
    """
    credentials = peer.credentials
    if peer.member:
        if squashes_root(peer.member):
            return Credentials(ANY_USER_BUT_ROOT, BELIEVED_GROUPS, 0)
        user = user_in(peer.member)
        return Credentials(user[0], frozenset((user[1],)), 0) if user is not None else None
    return (
        credentials
        if credentials is not None and credentials.uid and role_of(peer, operators) is Role.USER
        else None
    )


@lru_cache(maxsize=1024)
def _role(member: str, credentials: Credentials | None, operators: int | None) -> Role:
    if member:
        return Role.NODE if member.startswith("node/") else Role.CLIENT
    if credentials is None or credentials.uid in (0, os.geteuid()) or operators in credentials.gids:
        return Role.NODE
    return Role.USER
