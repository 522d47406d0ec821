"""Socket options, TLS options and error translation of the stream transports.

Used by rpc/transports/stream and rpc/transports/sync_stream. No function here waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import TypedDict

from nvpool.core.errors import (
    AccessDenied,
    BadConfiguration,
    DriveFailed,
    InUse,
    NvpoolError,
    TooManyOpen,
    Unreachable,
    from_os_error,
)
from nvpool.rpc.api import Greeting
from nvpool.rpc.handshake import HELLO_S
from nvpool.security.tls import TlsContext, TlsIdentity, refusal_of

SOCKET_BUFFER_BYTES = 1 << 20
"""Buffer size of unix sockets: with their default of 208 KiB a 1 MiB reply stops four times for its reader.

TCP sizes its buffers itself."""

DEAD_PEER_S = 10
"""Time after which a dead peer is noticed.

Shorter than a client waits, longer than a switch takes to find another path."""

RESENT_S = 1
"""Longest interval between two retransmissions of unacknowledged data.

Without it the intervals double, and a link that was down for five seconds carries nothing for another
five."""
_TCP_RTO_MAX_MS = 44
"""Socket option of tcp(7) in Linux 6.15; not in Python's socket module yet."""

GOODBYE_S = 5.0
"""Time for unsent data and the TLS close message on a connection that is closed."""


class TlsOptions(TypedDict, total=False):
    """TLS arguments for the loop's methods that make connections and servers."""

    ssl: TlsContext
    ssl_handshake_timeout: float
    ssl_shutdown_timeout: float


def is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def set_socket_options(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_PEER_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_PEER_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000)
    with contextlib.suppress(OSError):  # before Linux 6.15
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, RESENT_S * 1000)


def tls_options(identity: TlsIdentity | None, greeting: Greeting, *, serving: bool) -> TlsOptions:
    """TLS arguments for the loop's create_connection and create_server; empty without an identity."""
    if identity is None:
        return {}
    return {
        "ssl": identity.context(serving=serving, admit_unauthenticated=greeting.admit_unauthenticated),
        "ssl_handshake_timeout": HELLO_S,
        "ssl_shutdown_timeout": GOODBYE_S,
    }


def connect_error(error: OSError, endpoint: str) -> NvpoolError:
    if refusal := refusal_of(error):
        return AccessDenied(f"{endpoint}: {refusal}")
    known = from_os_error(error, endpoint)
    if isinstance(known, TooManyOpen):
        return known
    if isinstance(error, ConnectionResetError) and not error.errno:  # raised so by the loop's TLS
        return Unreachable(
            f"{endpoint} hung up in the handshake of TLS: it has too many connections from here "
            f"(limits.connections_per_peer), or speaks plain text (network.plain_text, --plain-text)"
        )
    return Unreachable(f"no reply from {endpoint}: {error.strerror or str(error) or 'timed out'}")


def listen_error(error: OSError, endpoint: str) -> NvpoolError:
    if error.errno in (errno.EADDRINUSE, errno.EAGAIN):  # EAGAIN: its backlog is full
        return InUse(f"{endpoint}: the address is in use")
    known = from_os_error(error, f"listening at {endpoint}")
    if isinstance(known, DriveFailed):  # unknown host, or not an address of this host
        return BadConfiguration(str(known))
    return known
