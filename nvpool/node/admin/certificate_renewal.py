"""Renewal of a node's certificates before they expire: the pool's, and etcd's if there is one.

Used by the supervisor. A node with the CA's key signs its own certificate; other nodes ask such a node, as
clients do (client/certificate_renewal). etcd reads its certificate files again for each connection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nvpool.client import certificate_renewal as client_renewal
from nvpool.client.certificate_renewal import Signed
from nvpool.core.errors import AccessDenied, NvpoolError
from nvpool.core.names import RENEW_S
from nvpool.host.pool_directory import PoolDirectory
from nvpool.node.admin.certificate_store import CertificateStore
from nvpool.poolmap.model import PoolMap
from nvpool.provision.tokens import hosts_of, read_authority
from nvpool.rpc.connection_pool import Dialer
from nvpool.runtime.audit_events import ourselves
from nvpool.runtime.audit_log import AuditLog
from nvpool.security.tls import ETCD_SECRET, TlsIdentity, settle_key


async def keep_renewed(
    directory: PoolDirectory,
    identity: TlsIdentity,
    pool_map: Callable[[], PoolMap],
    dialer: Dialer,
    audit: AuditLog,
    certificates: CertificateStore,
) -> None:
    """Renew periodically; see client/certificate_renewal. `certificates` records the reason of a failure."""

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

    await client_renewal.keep_renewed(renew, identity)


def settle_keys(directory: PoolDirectory) -> None:
    """Finish or undo interrupted changes of keys; must precede every use of the keys. OSError."""
    for below in ("", ETCD_SECRET):
        settle_key(directory.secret / below)


async def renew_once(
    directory: PoolDirectory,
    identity: TlsIdentity,
    pool_map: PoolMap,
    dialer: Dialer,
    *,
    left_s: float = RENEW_S,
    new_key: bool = False,
) -> bool:
    """Renew once if due; see client/certificate_renewal."""
    return await client_renewal.renew_once(
        directory,
        identity,
        pool_map,
        dialer,
        left_s=left_s,
        new_key=new_key,
        sign=partial(_sign, directory, identity, pool_map),
    )


def _sign(
    directory: PoolDirectory, identity: TlsIdentity, pool_map: PoolMap, request: bytes
) -> Signed | None:
    member = identity.own_member()
    node = next((one for one in pool_map.nodes if one.member == member), None)
    try:
        return [
            (below, read_authority(directory, below).sign(request, pool_map.pool_id, member, hosts_of(node)))
            for below in ("", ETCD_SECRET)
        ]
    except AccessDenied:
        return None
