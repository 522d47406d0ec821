"""The list of those whom etcd lets in no more: secret/etcd/revoked.crl, written by nodes that have a member of it.

Called by node/coordination/map_backend before a member is started, and by node/coordination/etcd_members when the map names
somebody new. etcd reads the list anew for each handshake; who is connected stays so until the member is started again, which
node/coordination/etcd_members sees to.
"""

from __future__ import annotations

from nvpool.core.errors import AccessDenied
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.poolmap.model import PoolMap
from nvpool.provision.tokens import read_authority
from nvpool.security.tls import ETCD_SECRET

REVOKED_FILE = "revoked.crl"


def write_revoked(directory: PoolDirectory, pool_map: PoolMap) -> None:
    """Without the authority's key the list stays as it is; AccessDenied where there is none, since etcd would let nobody in."""
    path = directory.secret / ETCD_SECRET / REVOKED_FILE
    try:
        authority = read_authority(directory, ETCD_SECRET)
    except AccessDenied:
        if path.exists():
            return
        raise
    write_whole(path, authority.revoke(pool_map.pool_id, [(one.member, one.at_ms / 1000) for one in pool_map.revoked]))
