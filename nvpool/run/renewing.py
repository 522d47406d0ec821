"""A node's certificates, renewed before they end: that of the pool, and that of etcd where it has one.

Called by the supervisor. Who has the authority's key signs for himself; others ask, as clients do (client/renewing). etcd
reads its files anew for each connection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nvpool.base.directory import PoolDirectory
from nvpool.base.errors import AccessDenied, NvpoolError
from nvpool.base.identities import RENEW_S
from nvpool.client import renewing
from nvpool.client.renewing import Signed
from nvpool.logic.poolmap import PoolMap
from nvpool.run.audit_log import AuditLog
from nvpool.run.auditing import ourselves
from nvpool.run.certificates import Certificates
from nvpool.run.tokens import hosts_of, read_authority
from nvpool.wire.dial import Dialer
from nvpool.wire.identity import ETCD_SECRET, Identity, settle_key


async def keep_renewed(directory: PoolDirectory, identity: Identity, pool_map: Callable[[], PoolMap], dialer: Dialer,
                       audit: AuditLog, certificates: Certificates) -> None:
    """See client/renewing. `certificates` is told why it can not be."""
    async def renew() -> bool:
        try:
            async with certificates.renewing:
                renewed = await renew_once(directory, identity, pool_map(), dialer)
        except (NvpoolError, OSError) as error:
            certificates.trouble = str(error)
            raise
        certificates.trouble = ""
        if renewed:
            audit.note("certificate-renew", ourselves(), {"member": identity.own_member()})
        return renewed

    await renewing.keep_renewed(renew, identity)


def settle_keys(directory: PoolDirectory) -> None:
    """Before anything uses them: finish or undo changes of keys that were interrupted. OSError."""
    for below in ("", ETCD_SECRET):
        settle_key(directory.secret / below)


async def renew_once(directory: PoolDirectory, identity: Identity, pool_map: PoolMap, dialer: Dialer, *,
                     left_s: float = RENEW_S, new_key: bool = False) -> bool:
    """See client/renewing."""
    return await renewing.renew_once(directory, identity, pool_map, dialer, left_s=left_s, new_key=new_key,
                                     sign=partial(_sign, directory, identity, pool_map))


def _sign(directory: PoolDirectory, identity: Identity, pool_map: PoolMap, request: bytes) -> Signed | None:
    member = identity.own_member()
    node = next((one for one in pool_map.nodes if one.member == member), None)
    try:
        return [(below, read_authority(directory, below).sign(request, pool_map.pool_id, member, hosts_of(node)))
                for below in ("", ETCD_SECRET)]
    except AccessDenied:
        return None
