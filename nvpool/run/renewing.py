"""Certificates renewed before they end, under the same key and the same name.

Called by the supervisor for its node, and by mounts for a client's directory. Who has the authority's key signs for himself;
others ask a node that has it, and show the certificate that is good still. The files are replaced one by one: each is whole,
and either certificate goes with the key. Whoever uses them sees that by itself (Identity.refresh; etcd reads them anew for each
connection).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nvpool.base.authority import ends_s, request_again
from nvpool.base.clock import SYSTEM_CLOCK, Clock
from nvpool.base.directory import PoolDirectory, write_whole
from nvpool.base.errors import AccessDenied, NvpoolError, Unavailable
from nvpool.base.identities import MEMBER_S, RENEW_S
from nvpool.logic.poolmap import PoolMap
from nvpool.run.tokens import hosts_of, read_authority
from nvpool.wire.codec import decoded
from nvpool.wire.dial import Dialer
from nvpool.wire.identity import CERTIFICATE_FILE, ETCD_SECRET, KEY_FILE, Identity
from nvpool.wire.v1 import pool_pb2, wire_pb2

LOOK_S = min(3600.0, MEMBER_S / 10)
_ASK_S = 10.0

log = logging.getLogger("nvpool.run.renewing")


async def keep_renewed(directory: PoolDirectory, identity: Identity, pool_map: Callable[[], PoolMap], dialer: Dialer) -> None:
    """Look each hour, for ever. What can not be renewed is said in the log and tried again."""
    while True:
        try:
            if await renew_once(directory, identity, pool_map(), dialer):
                log.info("the certificate of %s was renewed", identity.own_member())
        except (NvpoolError, OSError) as error:
            log.error("the certificate of this node can not be renewed: %s", error)
        await asyncio.sleep(LOOK_S)


async def renew_once(directory: PoolDirectory, identity: Identity, pool_map: PoolMap, dialer: Dialer, *,
                     left_s: float = RENEW_S, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Renew the certificate where it lasts for less than `left_s`; whether it was. Unavailable where nobody could sign it."""
    if ends_s((directory.secret / CERTIFICATE_FILE).read_bytes()) - clock.wall_ns() / 1e9 >= left_s:
        identity.refresh()
        return False
    member = identity.own_member()
    asked = request_again((directory.secret / KEY_FILE).read_bytes())
    node = next((one for one in pool_map.nodes if one.member == member), None)
    try:
        signed = [(below, read_authority(directory, below).sign(asked.request, pool_map.pool_id, member, hosts_of(node)))
                  for below in ("", ETCD_SECRET)]
    except AccessDenied:
        reply = await _ask(asked.request, pool_map, dialer, clock)
        signed = [("", reply.certificate), *([(ETCD_SECRET, reply.etcd_certificate)] if reply.etcd_certificate else [])]
    for below, certificate in reversed(signed):  # ours last: while that is old, all of this is done again
        write_whole(directory.secret / below / CERTIFICATE_FILE, certificate)
    identity.refresh()
    return True


async def _ask(request: bytes, pool_map: PoolMap, dialer: Dialer, clock: Clock) -> pool_pb2.RenewReply:
    """The answer of the first node that signs."""
    told = "the pool has no other node"
    for node in pool_map.nodes:
        # Not by unix sockets: it has to see who we are.
        away = tuple(endpoint for endpoint in node.endpoints if not endpoint.startswith("stream+unix"))
        try:
            reply = await dialer.call(away, wire_pb2.POOL_RENEW, pool_pb2.RenewRequest(request=request).SerializeToString(),
                                      deadline_s=clock.boottime_s() + _ASK_S)
            return decoded(pool_pb2.RenewReply, reply.message)
        except NvpoolError as error:
            told = f"node {node.id}: {error}"
    raise Unavailable(f"no node that has the authority's key signs a new certificate: {told}")
