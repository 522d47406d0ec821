"""Certificate revocation list of etcd: secret/etcd/revoked.crl, written by nodes with an etcd member.

node/coordination/map_backend writes it before a member is started, and node/coordination/etcd_members when
the map names a newly removed node. etcd reads the list again for each handshake. An existing connection stays
until the member is restarted, which node/coordination/etcd_members does.
"""

from __future__ import annotations

from nvpool.core.errors import AccessDenied
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.poolmap.model import PoolMap
from nvpool.provision.tokens import read_authority
from nvpool.security.tls import ETCD_SECRET

REVOKED_FILE = "revoked.crl"


def write_revoked(directory: PoolDirectory, pool_map: PoolMap) -> None:
    """Write the list. Without the CA's key an existing list is kept.

    AccessDenied: there is no list either, and without one etcd would admit no peer.
    """
    path = directory.secret / ETCD_SECRET / REVOKED_FILE
    try:
        authority = read_authority(directory, ETCD_SECRET)
    except AccessDenied:
        if path.exists():
            return
        raise
    write_whole(
        path, authority.revoke(pool_map.pool_id, [(one.member, one.at_ms / 1000) for one in pool_map.revoked])
    )
