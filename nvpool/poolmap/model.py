"""The pool map: nodes, drives, targets, chains, shards and their states.

The map is one immutable value with an ever-growing epoch.

A change creates a new value with the next epoch (functions here and in the other modules of poolmap); values
are never edited in place. The map is sent and stored as JSON, so that an operator can read it. The key of
`desired_state` in JSON is "wish", as all stored maps have it.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, Literal

import msgspec

from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.core.ids import counter_of, partition_of
from nvpool.core.units import CHAINS_PER_TABLE, CHUNK_BYTES_DEFAULT, PARTITION_COUNT

MAP_FORMAT = 2
"""Since format 2 a chain has joining targets and a goal; a map of format 1 is read as a map without them."""
_FORMATS_READ = (1, 2)

TargetState = Literal["up", "down", "syncing", "draining", "gone"]
TargetDesiredState = Literal["share", "drain", "remove", "lost", "away"]
ShardState = Literal["up", "down"]
ShardDesiredState = Literal["share", "remove"]
StandbyState = Literal["syncing", "up"]
EtcdState = Literal["wanted", "ready", "added", "up", "leaving", "lost"]
NodeDesiredState = Literal["share", "drain", "stop", "lost"]


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that are fixed when a pool is created; every greeting contains their `fingerprint`."""

    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    replicas: int = 1


class Node(msgspec.Struct, frozen=True):
    """A node. `host_id` shows whether its unix sockets can be reached from here (see host/process_identity.host_id).

    Nodes with the same `rack` fail together; a node without one fails alone.
    """

    id: int
    name: str
    host_id: str
    endpoints: tuple[str, ...]
    rack: str = ""
    member: str = ""
    """Member named by its certificate."""
    desired_state: NodeDesiredState = msgspec.field(default="share", name="wish")
    """Desired state. share: hold its share. drain: hold nothing. stop: hold nothing, then stop its processes.
    lost: the node will not return, and its copies are recreated elsewhere; the node leaves the pool when
    nothing refers to it any more."""


class JoinToken(msgspec.Struct, frozen=True):
    """A single-use right to join.

    `hash` is the SHA-256 of the token's secret in hex digits, so that a reader of the map cannot use the
    token.
    """

    hash: str
    kind: str
    ends_ms: int
    used_by: str = ""
    """Identifies the key of the joined machine: it may repeat the request if the reply was lost, until the
    token ends."""
    member: str = ""
    """Member name that was issued for the token."""


class EtcdMember(msgspec.Struct, frozen=True):
    """A member of the pool's own etcd on a node: host:port for clients and for etcd peers.

    States: wanted: the node must choose its addresses. ready: the node has chosen them. added: etcd knows the
    member as a learner. up: the member votes. leaving: the member is being removed. lost: the member has lost
    its data and is being removed for that reason. poolmap/nodes/etcd_membership has the changes.
    """

    node: int
    client: str
    peer: str
    state: EtcdState = "up"
    generation: int = 0
    """Epoch in which the member was wanted: a member that is removed and added again starts without data."""
    id: str = ""
    """The member's id in etcd, in hex digits; empty until known."""
    revoked: int = 0
    """Nodes removed up to this epoch have no connection to this member any more."""


class Revoked(msgspec.Struct, frozen=True):
    """A node that was removed in `epoch`: its certificates of etcd's CA are revoked."""

    member: str
    at_ms: int
    epoch: int


class Drive(msgspec.Struct, frozen=True):
    id: int
    node: int
    path: str
    capacity_bytes: int


class Target(msgspec.Struct, frozen=True):
    """A target, the unit of placement.

    Endpoints are URLs, e.g. stream+unix:///run/t1.sock, stream://10.0.0.1:7711, grpc://10.0.0.1:7712.

    `state`: down while the target does not respond and others hold its chains; gone for ever once it is
    removed (numbers are not reused). `desired_state`: share: hold its share of the chains. drain:
    hold none. remove: hold none, then leave the pool. lost: its data is lost and is recreated from other
    copies. The operator sets these. The pool itself sets away: the target was absent for so long that others
    recreate its copies; it gets its share again when it returns. `verifier`: see store/disk/write_verifier; 0
    until it is first reported.
    """

    id: int
    drive: int
    node: int
    capacity_bytes: int
    endpoints: tuple[str, ...]
    state: TargetState = "up"
    desired_state: TargetDesiredState = msgspec.field(default="share", name="wish")
    verifier: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the target is decommissioned or lost: it must not serve, and nothing waits for it."""
        return self.state == "gone" or self.desired_state == "lost"


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """A replication chain.

    `targets` hold every committed byte of the chain's chunks, from head to tail. A failed target leaves; the
    last one stays whatever happens to it. `joining` receive every write after the tail and are not read from;
    they become targets when they hold what the tail holds. `goal` lists the desired holders; empty: the
    current holders. `leaving` are targets that are not read from any more: they receive each write until they
    know this too, and then leave. At least one target is not leaving.

    `epoch` grows with every change of targets, joining or leaving, including a target's restart. Remaining
    members keep their order, so each member has every pending write that a later member has. `intact`: every
    write that the chain has acknowledged since it had this epoch still exists, committed or unstable.

    `begun`: the epoch in which the chain was reset to empty, when all its holders were given up; 0: never.
    `loss` identifies what was lost then: the number in `PoolMap.losses`, from 1. See
    poolmap/chains/data_loss.
    """

    epoch: int
    targets: tuple[int, ...]
    joining: tuple[int, ...] = ()
    goal: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    intact: int = 0
    begun: int = 0
    loss: int = 0

    @property
    def readable(self) -> tuple[int, ...]:
        """Targets that may be read from."""
        return tuple(t for t in self.targets if t not in self.leaving) if self.leaving else self.targets


class ChainTable(msgspec.Struct, frozen=True):
    """Chain table. `id` is the replica count; a Layout refers to it."""

    id: int
    chains: tuple[Chain, ...]


class StandbyMember(msgspec.Struct, frozen=True):
    """A member of a shard that is not its primary.

    up: the standby has every acknowledged change, and no change is acknowledged without it, so it can be
    promoted. syncing: the standby is absent or catching up. A standby without endpoints still has to be
    created by its node, beside the store at `path`.
    """

    member: int
    node: int
    endpoints: tuple[str, ...]
    state: StandbyState = "syncing"
    path: str = ""


class Shard(msgspec.Struct, frozen=True):
    """A metadata shard: one LMDB environment on each of its members.

    node, endpoints, member and path are those of the primary. `term` counts the primaries; journal records
    carry it. `path` is the location of a member's records on its node; empty: the pool directory. `epoch`
    grows with every change of term or standbys (poolmap/shards/members). `desired_state`: to hold
    its share of the partitions, or to migrate all of them away and leave the pool
    (poolmap/shards/partition_moves).
    """

    id: int
    node: int
    endpoints: tuple[str, ...]
    term: int = 1
    state: ShardState = "up"
    member: int = 0
    path: str = ""
    epoch: int = 1
    standbys: tuple[StandbyMember, ...] = ()
    desired_state: ShardDesiredState = msgspec.field(default="share", name="wish")
    standbys_wanted: int | None = None
    """Desired number of standbys in good places (poolmap/shards/placement); None: the current number."""


class ShardWanted(msgspec.Struct, frozen=True):
    """A shard that its node has to create, with this number of standbys.

    With None, the shard gets as many standbys as the other shards.
    """

    id: int
    node: int
    standbys: int | None = None


class PartitionRange(msgspec.Struct, frozen=True, array_like=True):
    first: int
    count: int
    shard: int


class Births(msgspec.Struct, frozen=True, array_like=True):
    """Inodes of these partitions that existed at some point in time: those with a counter below `below`."""

    first: int
    count: int
    below: int


class Loss(msgspec.Struct, frozen=True, dict=True):
    """Inodes that existed when chains were reset to empty: the chains may have held chunks of these
    inodes."""

    births: tuple[Births, ...]

    @cached_property
    def _below(self) -> tuple[int, ...]:
        below = [0] * PARTITION_COUNT
        for part in self.births:
            below[part.first : part.first + part.count] = [part.below] * part.count
        return tuple(below)

    def had(self, inode: int) -> bool:
        """Return whether the inode existed then."""
        return counter_of(inode) < self._below[partition_of(inode)]


class RebalanceSettings(msgspec.Struct, frozen=True):
    """Settings for moving chains, to balance the pool and to drain drives.

    `paused` only defers the start of moves; missing copies are recreated nevertheless. `limit_bytes_s` is for
    each target that is filled; 0: the bandwidth that serving leaves.
    """

    paused: bool = False
    limit_bytes_s: int = 0


class RevokedRight(msgspec.Struct, frozen=True):
    """A revoked right to a volume: stores refuse its grants that were issued before the map had `epoch`.

    poolmap/grant_revocation has the changes.
    """

    volume: int
    """Inode of the volume; 0: every volume."""
    member: str
    """Member whose right is revoked; empty: all members, and those that still have a right get a new
    grant."""
    rights: int
    """READ and WRITE of core/grants."""
    epoch: int
    until_ms: int
    """Wall clock in ms since 1970: by then, all grants issued before have expired."""


class PoolMap(msgspec.Struct, frozen=True, dict=True):
    format: int
    pool_id: str
    name: str
    epoch: int
    settings: PoolSettings
    nodes: tuple[Node, ...] = ()
    drives: tuple[Drive, ...] = ()
    targets: tuple[Target, ...] = ()
    tables: tuple[ChainTable, ...] = ()
    shards: tuple[Shard, ...] = ()
    partitions: tuple[PartitionRange, ...] = ()
    moving: RebalanceSettings = RebalanceSettings()
    members: tuple[str, ...] = ()
    """Members whose certificates are accepted. Empty: all certificates signed by the CA are accepted."""
    tokens: tuple[JoinToken, ...] = ()
    etcd: tuple[EtcdMember, ...] = ()
    """Members of the pool's own etcd, which stores the map. Empty: the map is in the embedded coordinator of
    the first node, or in an external etcd."""
    moves: tuple[PartitionRange, ...] = ()
    """Planned partition migrations, with the destination shard: poolmap/shards/partition_moves. Until a
    migration completes, `partitions` has the owner."""
    moves_since: int = 0
    """Epoch of the last plan of `moves`. A migration that began under an older plan is rejected."""
    shards_given: int = 0
    """Highest number of a shard that has left the pool; shard numbers are not reused."""
    revoked: tuple[Revoked, ...] = ()
    """Removed nodes that may still hold unexpired certificates of etcd's CA."""
    shards_wanted: tuple[ShardWanted, ...] = ()
    """Shards that nodes have to create."""
    losses: tuple[Loss, ...] = ()
    """Permanent data losses of chains, the oldest first; chains refer to them by number."""
    rights_taken: tuple[RevokedRight, ...] = ()
    """Recently revoked rights to volumes."""

    @cached_property
    def target_by_id(self) -> dict[int, Target]:
        return {target.id: target for target in self.targets}

    @cached_property
    def table_by_id(self) -> dict[int, ChainTable]:
        return {table.id: table for table in self.tables}

    @cached_property
    def shard_by_id(self) -> dict[int, Shard]:
        return {shard.id: shard for shard in self.shards}

    @cached_property
    def shard_of_partition(self) -> tuple[int, ...]:
        owners = [0] * PARTITION_COUNT
        for part in self.partitions:
            owners[part.first : part.first + part.count] = [part.shard] * part.count
        return tuple(owners)

    @cached_property
    def node_by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    def chain(self, table: int, chain: int) -> Chain:
        return self.table_by_id[table].chains[chain]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that two peers compare before they communicate: pool id and fixed settings."""
        return hashlib.sha256(self.pool_id.encode() + msgspec.json.encode(self.settings)).hexdigest()[:16]


def encode_map(pool_map: PoolMap) -> bytes:
    return msgspec.json.encode(pool_map)


def decode_map(raw: bytes) -> PoolMap:
    """Decode and verify a pool map.

    WrongFormat: the map has another version.
    CorruptRecord: the map is unreadable or inconsistent.
    """
    try:
        pool_map = msgspec.json.decode(raw, type=PoolMap)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"the pool map cannot be read: {error}") from None
    if pool_map.format not in _FORMATS_READ:
        raise WrongFormat(f"the pool map has format {pool_map.format}, this nvpool knows {MAP_FORMAT}")
    if pool_map.format != MAP_FORMAT:
        pool_map = msgspec.structs.replace(pool_map, format=MAP_FORMAT)
    problems = check_map(pool_map)
    if problems:
        raise CorruptRecord("the pool map contradicts itself: " + "; ".join(problems))
    return pool_map


def check_map(pool_map: PoolMap) -> list[str]:
    """Return the inconsistencies of a map as sentences; an empty list for a consistent map."""
    wrong = []
    nodes = {node.id for node in pool_map.nodes}
    drives = {drive.id for drive in pool_map.drives}
    here = {target.drive for target in pool_map.targets if not target.is_over}
    for drive in pool_map.drives:
        # A gone or lost target keeps its drive number, but its node may leave.
        if drive.node not in nodes and drive.id in here:
            wrong.append(f"drive {drive.id} is on node {drive.node}, which does not exist")
    for target in pool_map.targets:
        if target.drive not in drives or (target.node not in nodes and not target.is_over):
            wrong.append(
                f"target {target.id} is on drive {target.drive} of node {target.node}, which do not exist"
            )
    for table in pool_map.tables:
        if len(table.chains) != CHAINS_PER_TABLE:
            wrong.append(f"chain table {table.id} has {len(table.chains)} chains")
        unknown = {
            target for chain in table.chains for target in (*chain.targets, *chain.joining, *chain.goal)
        }
        unknown -= pool_map.target_by_id.keys()
        if unknown:
            wrong.append(f"chain table {table.id} names targets {sorted(unknown)}, which do not exist")
        for number, chain in enumerate(table.chains):
            members = (*chain.targets, *chain.joining)
            if (
                not chain.targets
                or len(set(members)) != len(members)
                or len(set(chain.goal)) != len(chain.goal)
            ):
                wrong.append(f"chain {number} of table {table.id} has no target, or one twice")
                break
            if chain.leaving and not set(chain.leaving) < set(chain.targets):
                wrong.append(f"chain {number} of table {table.id} is left by all its targets, or by others")
                break
            if not 0 <= chain.loss <= len(pool_map.losses) or bool(chain.loss) != bool(chain.begun):
                wrong.append(f"chain {number} of table {table.id} has a loss that the map does not record")
                break
    for shard in pool_map.shards:
        if shard.standbys:
            copies = [shard.member, *(standby.member for standby in shard.standbys)]
            if len(set(copies)) != len(copies) or any(
                standby.node not in nodes for standby in shard.standbys
            ):
                wrong.append(f"shard {shard.id} has a member twice, or one on a node that does not exist")
    covered = sorted((part.first, part.count) for part in pool_map.partitions)
    place = 0
    for first, count in covered:
        if first != place:
            break
        place += count
    if pool_map.partitions and place != PARTITION_COUNT:
        wrong.append("the partitions are not divided over the shards without gap or overlap")
    if any(part.shard not in pool_map.shard_by_id for part in pool_map.partitions):
        wrong.append("a partition belongs to a shard that does not exist")
    place = 0
    for part in pool_map.moves:
        if part.first < place or part.count < 1 or part.first + part.count > PARTITION_COUNT:
            wrong.append("a partition that does not exist is to move, or one to two shards")
            break
        place = part.first + part.count
    if any(part.shard not in pool_map.shard_by_id for part in pool_map.moves):
        wrong.append("a partition is to move to a shard that does not exist")
    return wrong


def problems_of(now: PoolMap, new: PoolMap) -> list[str]:
    """Return why `new` cannot follow `now`, as sentences, regardless of its epoch.

    The list is empty if `new` can follow.
    """
    if new.fingerprint != now.fingerprint:
        return ["this map is another pool's, or has other fixed settings"]
    return check_map(new)


def changed(pool_map: PoolMap, **fields: Any) -> PoolMap:
    """Return the map with `fields` replaced and the next epoch.

    InvalidRequest: the new map would be inconsistent.
    """
    new = msgspec.structs.replace(pool_map, epoch=pool_map.epoch + 1, **fields)
    problems = check_map(new)
    if problems:
        raise InvalidRequest("; ".join(problems))
    return new
