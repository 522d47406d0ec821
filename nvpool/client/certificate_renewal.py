"""Our certificate, renewed before it ends under the same key and the same name; under another key where that is asked for.

Called by clients for a client's directory, which nobody else looks after, and by node/admin/certificate_renewal for a node's. A
node of the pool that has the authority's key signs; it is shown the certificate that is good still. The file is replaced whole,
and either certificate goes with the key: so several processes may do the same at once, and whoever else uses the directory sees
it by itself (Identity.refresh).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import AccessDenied, NvpoolError, Unavailable
from nvpool.core.member_names import MEMBER_S, RENEW_S
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.data_codec import decoded
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.security.tls import CERTIFICATE_FILE, ETCD_SECRET, KEY_NEXT_FILE, Identity, read_key, settle_key

LOOK_S = min(3600.0, MEMBER_S / 10)
_ASK_S = 10.0

log = logging.getLogger(__name__)

Signed = list[tuple[str, bytes]]
"""Certificates, each with the directory below secret/ where it belongs; the one that is looked at first."""


async def keep_renewed(renew: Callable[[], Awaitable[bool]], identity: Identity) -> None:
    """`renew`, now and each hour, for ever. What can not be renewed is said in the log and tried again."""
    while True:
        try:
            if await renew():
                log.info("the certificate of %s was renewed", identity.own_member())
        except (NvpoolError, OSError) as error:
            log.error("our certificate can not be renewed: %s", error)
        await asyncio.sleep(LOOK_S)


async def renew_once(directory: PoolDirectory, identity: Identity, pool_map: PoolMap, dialer: Dialer, *,
                     left_s: float = RENEW_S, clock: Clock = SYSTEM_CLOCK, new_key: bool = False,
                     sign: Callable[[bytes], Signed | None] = lambda request: None) -> bool:
    """Renew the certificate where it lasts for less than `left_s`, or, with `new_key`, in any case and under another key;
    whether it was. The caller sees that this is done once at a time where keys change. Who has not signed the request himself,
    by `sign`, asks a node. Unavailable where nobody could; AccessDenied where the files are not ours to write."""
    identity.refresh()
    if not new_key and identity.own_end_s() - clock.wall_ns() / 1e9 >= left_s:
        return False
    if not os.access(directory.secret, os.W_OK):
        raise AccessDenied(f"it ends soon, and {directory.secret} may not be written by us: use the pool as its owner once")
    from nvpool.security.ca import request_again, request_certificate  # large, and needed once in months

    asked = request_certificate() if new_key else request_again(read_key(directory.secret))
    signed = sign(asked.request) or await _ask(asked.request, pool_map, dialer, clock)
    for below, certificate in reversed(signed):  # ours last: while that is old, all of this is done again
        place = directory.secret / below
        if new_key:  # durable before the certificate: with one of the two keys it is good, whatever comes between
            write_whole(place / KEY_NEXT_FILE, asked.key, 0o600)
        write_whole(place / CERTIFICATE_FILE, certificate)
        if new_key:
            settle_key(place)
    identity.refresh()
    return True


async def _ask(request: bytes, pool_map: PoolMap, dialer: Dialer, clock: Clock) -> Signed:
    """What the first node answers that signs."""
    told = "the pool has no other node"
    for node in pool_map.nodes:
        # Not by unix sockets: it has to see who we are.
        away = tuple(endpoint for endpoint in node.endpoints if not endpoint.startswith("stream+unix"))
        try:
            raw = await dialer.call(away, wire_pb2.POOL_RENEW, pool_pb2.RenewRequest(request=request).SerializeToString(),
                                    deadline_s=clock.boottime_s() + _ASK_S)
            reply = decoded(pool_pb2.RenewReply, raw.message)
            return [("", reply.certificate), *([(ETCD_SECRET, reply.etcd_certificate)] if reply.etcd_certificate else [])]
        except NvpoolError as error:
            told = f"node {node.id}: {error}"
    raise Unavailable(f"no node that has the authority's key signs a new certificate: {told}")
