"""Pool membership: issuing and using join tokens, and adding and removing nodes, clients and bridges.

Pure functions of a map, the time and a request, called by node/admin/join_server. A rejected request raises
an error and returns no map.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from nvpool.core.errors import AccessDenied, InvalidRequest
from nvpool.core.names import DAY_S, MEMBER_DAYS
from nvpool.poolmap.model import JoinToken, Node, PoolMap, Revoked, changed
from nvpool.poolmap.shards.partition_moves import not_wanted

TOKENS_MAX = 1000
REVOKED_S = (MEMBER_DAYS + 2) * DAY_S
"""Time after which every certificate signed before a removal has expired."""
NODES_MAX = 1000


def token_given(pool_map: PoolMap, token: JoinToken, now_ms: int) -> PoolMap:
    """Add `token`, and remove the expired ones; InvalidRequest if there are TOKENS_MAX tokens."""
    tokens = tuple(one for one in pool_map.tokens if one.ends_ms > now_ms)
    if len(tokens) >= TOKENS_MAX:
        raise InvalidRequest(f"{TOKENS_MAX} tokens are out already; wait until some end")
    return changed(pool_map, tokens=(*tokens, token))


def token_for(pool_map: PoolMap, hash: str, kind: str, used_by: str, now_ms: int) -> JoinToken:
    """Return the token with this hash.

    AccessDenied: the token is unknown, expired, used by another key, or of another kind.
    """
    found = next((one for one in pool_map.tokens if one.hash == hash), None)
    if found is None:
        raise AccessDenied(f"this token is not one of this pool, or has ended long ago{_again(kind)}")
    if found.ends_ms <= now_ms:
        raise AccessDenied(f"this token has ended{_again(kind)}")
    if found.used_by and found.used_by != used_by:
        raise AccessDenied(f"this token was used already, and works once{_again(kind)}")
    if found.kind.partition(".")[0] != kind:  # after the dot: the user as which a client may act
        raise AccessDenied(f"this token lets in a {found.kind.partition('.')[0]}, not a {kind}{_again(kind)}")
    return found


def _again(kind: str) -> str:
    """Return the remedy for this kind of member; a node token instead would give a client the pool's keys."""
    return f"; make a new one on a node of the pool with: nvpool {kind} token POOL"


def joined(
    pool_map: PoolMap,
    hash: str,
    kind: str,
    used_by: str,
    member: str,
    now_ms: int,
    node: Callable[[int], Node] | None = None,
) -> PoolMap:
    """Add `member` in exchange for the token.

    For a node, also add the Node that `node` creates from its number, which no node with a drive ever had.
    Returns the same map if this key has already joined with this token, because then its reply was lost.
    AccessDenied as in `token_for`.
    """
    token = token_for(pool_map, hash, kind, used_by, now_ms)
    if token.used_by:
        return pool_map
    tokens = tuple(
        replace(one, used_by=used_by, member=member) if one.hash == hash else one for one in pool_map.tokens
    )
    nodes = pool_map.nodes
    if node is not None:
        if len(nodes) >= NODES_MAX:
            raise InvalidRequest(f"the pool has {NODES_MAX} nodes already")
        # Targets keep the numbers of removed nodes.
        taken = (*(one.id for one in nodes), *(target.node for target in pool_map.targets))
        nodes = (*nodes, node(max(taken, default=0) + 1))
    return changed(pool_map, tokens=tokens, members=(*pool_map.members, member), nodes=nodes)


def member_removed(pool_map: PoolMap, member: str) -> PoolMap:
    """Remove a client or bridge and revoke its certificate.

    InvalidRequest: the member is a node, or unknown.
    """
    node = next((node for node in pool_map.nodes if node.member == member), None)
    if node is not None:
        raise InvalidRequest(f"{member} is a node; it is removed with: nvpool node remove POOL {node.id}")
    if member not in pool_map.members:
        raise InvalidRequest(f"{member} is not in the pool; `nvpool client ls POOL` shows who is")
    return changed(pool_map, members=tuple(one for one in pool_map.members if one != member))


def check_removable(pool_map: PoolMap, number: int) -> None:
    """Raise InvalidRequest if the node does not exist, or has drives or metadata of the pool."""
    if number not in pool_map.node_by_id:
        raise InvalidRequest(f"there is no node {number}")
    drives = [target.drive for target in pool_map.targets if target.node == number and not target.is_over]
    shards = [
        shard.id for shard in pool_map.shards if number in (shard.node, *(one.node for one in shard.standbys))
    ]
    if drives:
        raise InvalidRequest(
            f"node {number} has drives of the pool ({', '.join(map(str, drives))}); drain and remove them "
            f"first"
        )
    if shards:
        raise InvalidRequest(
            f"node {number} serves metadata (shard {', '.join(map(str, shards))}), which has to move first"
        )


def node_removed(pool_map: PoolMap, number: int, now_ms: int) -> PoolMap:
    """Remove the node and revoke its certificate.

    Shards that the node should have created are cancelled. A member of etcd that is not yet voting is removed
    too.
    InvalidRequest: the node has data of the pool, or a voting member of etcd (node/coordination/etcd_members
    removes it).
    """
    check_removable(pool_map, number)
    if any(one.node == number and one.state in ("up", "leaving") for one in pool_map.etcd):
        raise InvalidRequest(f"node {number} keeps the pool map (etcd), which has to move first")
    pool_map = node_revoked(pool_map, number, now_ms)
    for wanted in pool_map.shards_wanted:
        if wanted.node == number:  # no other node would create it
            pool_map = not_wanted(pool_map, wanted.id)
    return changed(
        pool_map,
        nodes=tuple(one for one in pool_map.nodes if one.id != number),
        etcd=tuple(one for one in pool_map.etcd if one.node != number),
    )


def node_revoked(pool_map: PoolMap, number: int, now_ms: int) -> PoolMap:
    """Revoke the node's certificates, also for etcd; the map keeps its epoch."""
    member = pool_map.node_by_id[number].member
    revoked = tuple(one for one in pool_map.revoked if one.at_ms + REVOKED_S * 1000 > now_ms)
    if member and all(one.member != member for one in revoked):
        revoked += (Revoked(member, now_ms, pool_map.epoch + 1),)
    return replace(pool_map, revoked=revoked, members=tuple(one for one in pool_map.members if one != member))
