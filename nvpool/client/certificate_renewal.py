"""Renewal of this member's certificate before it expires.

The name stays the same; so does the key, unless the caller asks for a new key. A node that holds the key of
the pool's certificate authority (CA) signs the request; the request is authenticated by the certificate that
is still valid. The new file replaces the old one as a whole, and both certificates match the key: so several
processes may renew at the same time, and other users of the directory see the new file by themselves
(TlsIdentity.refresh).

Used by clients for a client's directory, which no other process maintains, and by
node/admin/certificate_renewal for a node's directory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import AccessDenied, NvpoolError, Unavailable
from nvpool.core.names import MEMBER_S, RENEW_S
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.security.tls import (
    CERTIFICATE_FILE,
    ETCD_SECRET,
    KEY_NEXT_FILE,
    TlsIdentity,
    read_key,
    settle_key,
)

LOOK_S = min(3600.0, MEMBER_S / 10)
_ASK_S = 10.0

log = logging.getLogger(__name__)

Signed = list[tuple[str, bytes]]
"""Certificates, each with its directory below secret/. The first is the one whose age is checked."""


async def keep_renewed(renew: Callable[[], Awaitable[bool]], identity: TlsIdentity) -> None:
    """Call `renew` now and each hour (LOOK_S), without end.

    A failure is logged and retried at the next call.
    """
    while True:
        try:
            if await renew():
                log.info("the certificate of %s was renewed", identity.own_member())
        except (NvpoolError, OSError) as error:
            log.error("our certificate cannot be renewed: %s", error)
        await asyncio.sleep(LOOK_S)


async def renew_once(
    directory: PoolDirectory,
    identity: TlsIdentity,
    pool_map: PoolMap,
    dialer: Dialer,
    *,
    left_s: float = RENEW_S,
    clock: Clock = SYSTEM_CLOCK,
    new_key: bool = False,
    sign: Callable[[bytes], Signed | None] = lambda request: None,
) -> bool:
    """Renew the certificate if it expires within `left_s`; return whether it was renewed.

    With `new_key` the renewal is unconditional, and the certificate gets a new key; then the caller makes
    sure that only one renewal runs at a time. `sign` signs the request locally; if it returns None, a node
    signs. Unavailable: no node could sign. AccessDenied: this process may not write the files.
    """
    identity.refresh()
    if not new_key and identity.own_end_s() - clock.wall_ns() / 1e9 >= left_s:
        return False
    if not os.access(directory.secret, os.W_OK):
        raise AccessDenied(
            f"it ends soon, and {directory.secret} may not be written by us: use the pool as its owner once"
        )
    # a large import that is needed once in months
    from nvpool.security.ca import request_again, request_certificate

    asked = request_certificate() if new_key else request_again(read_key(directory.secret))
    signed = sign(asked.request) or await _ask(asked.request, pool_map, dialer, clock)
    # our own last: while it is old, a later call repeats all of this
    for below, certificate in reversed(signed):
        place = directory.secret / below
        # durable before the certificate: after a crash at any point one of the two keys matches it
        if new_key:
            write_whole(place / KEY_NEXT_FILE, asked.key, 0o600)
        write_whole(place / CERTIFICATE_FILE, certificate)
        if new_key:
            settle_key(place)
    identity.refresh()
    return True


async def _ask(request: bytes, pool_map: PoolMap, dialer: Dialer, clock: Clock) -> Signed:
    """The certificates from the first node that signs."""
    reason = "the pool has no other node"
    for node in pool_map.nodes:
        # Not by unix sockets: the node must see our certificate.
        away = tuple(endpoint for endpoint in node.endpoints if not endpoint.startswith("stream+unix"))
        try:
            raw = await dialer.call(
                away,
                wire_pb2.POOL_RENEW,
                pool_pb2.RenewRequest(request=request).SerializeToString(),
                deadline_s=clock.boottime_s() + _ASK_S,
            )
            reply = decoded(pool_pb2.RenewReply, raw.message)
            return [
                ("", reply.certificate),
                *([(ETCD_SECRET, reply.etcd_certificate)] if reply.etcd_certificate else []),
            ]
        except NvpoolError as error:
            reason = f"node {node.id}: {error}"
    raise Unavailable(f"no node that has the CA's key signs a new certificate: {reason}")
