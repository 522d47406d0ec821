"""The pool map: nodes, drives, targets, chains, shards and their states as one value with an ever-growing epoch.

Whoever changes it makes a new value with the next epoch (functions here and in `placement`); nobody edits one in place.
It travels and is stored as JSON, so that an operator can read it.
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
"""Since 2 a chain has targets that join it and a goal; a map of format 1 is read as one without."""
_FORMATS_READ = (1, 2)

TargetState = Literal["up", "down", "syncing", "draining", "gone"]
TargetWish = Literal["share", "drain", "remove", "lost", "away"]
ShardState = Literal["up", "down"]
ShardWish = Literal["share", "remove"]
StandbyState = Literal["syncing", "up"]
EtcdState = Literal["wanted", "ready", "added", "up", "leaving", "lost"]
NodeWish = Literal["share", "drain", "stop", "lost"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is fixed when a pool is created; `fingerprint` of it is in every greeting."""

    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    replicas: int = 1


class Node(msgspec.Struct, frozen=True):
    """`host_id` tells whether a unix socket of this node can be reached from here (see runtime/daemon_process.host_id). Nodes
    with the same `rack` fail together; without one a node fails alone."""

    id: int
    name: str
    host_id: str
    endpoints: tuple[str, ...]
    rack: str = ""
    member: str = ""
    """Whom its certificate names."""
    wish: NodeWish = "share"
    """What the operator wants of it: its share; to hold nothing (drain), and to end its processes then (stop). lost: it will
    not come back, what it had is made again elsewhere; it is out of the pool when nothing names it any more."""


class JoinToken(msgspec.Struct, frozen=True):
    """A right to join once. `hash`: SHA-256 of the token's secret in hex digits, so that who reads the map can not use it."""

    hash: str
    kind: str
    ends_ms: int
    used_by: str = ""
    """Stands for the key of who has used it: the same may ask again when the answer was lost, until the token ends."""
    member: str = ""
    """Who that became."""


class EtcdMember(msgspec.Struct, frozen=True):
    """A member of the pool's own etcd on a node: host:port for clients and for its peers. Changes:
    poolmap/nodes/etcd_membership.

    wanted: the node is to say where it will listen. ready: it has. added: etcd knows it, as one that learns. up: it votes.
    leaving: it is being taken out. lost: it has lost its data, and is taken out for that."""

    node: int
    client: str
    peer: str
    state: EtcdState = "up"
    generation: int = 0
    """The epoch in which the node was wanted: one that is taken out and in again begins with nothing."""
    id: str = ""
    """Etcd's, in hex digits; empty until it is known."""
    revoked: int = 0
    """Who was removed up to this epoch has no connection to it any more."""


class Revoked(msgspec.Struct, frozen=True):
    """A node that was removed in `epoch`: what it holds of etcd's authority is worth nothing."""

    member: str
    at_ms: int
    epoch: int


class Drive(msgspec.Struct, frozen=True):
    id: int
    node: int
    path: str
    capacity_bytes: int


class Target(msgspec.Struct, frozen=True):
    """The unit of placement. Endpoints are URLs, e.g. stream+unix:///run/t1.sock, stream://10.0.0.1:7711, grpc://10.0.0.1:7712.

    `state` is down while it does not answer and others hold what it holds; gone for ever once it is removed (numbers are given
    once). `wish` is what the operator wants of it: its share of the chains; to hold none (drain), and to leave the pool then
    (remove); lost: what it held is not to be had any more, and is made again from others. away: not the operator's, it has been
    away for so long that others make what it held; it gets its share again when it is back. `verifier`: see
    store/disk/write_verifier; 0 until it is told for the first time.
    """

    id: int
    drive: int
    node: int
    capacity_bytes: int
    endpoints: tuple[str, ...]
    state: TargetState = "up"
    wish: TargetWish = "share"
    verifier: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it is not to be served, nor waited for, any more."""
        return self.state == "gone" or self.wish == "lost"


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """`targets` hold every committed byte of the chain's chunks, from head to tail; a target that fails leaves, the last one
    stays whatever happens to it. `joining` get every write behind the tail, are not read from, and follow when they hold what
    the tail holds. `goal` is who shall hold the chain in the end; empty: who does. `leaving` are those of the targets that are
    not read from any more: they get each write until they, too, know that, and leave then. Never all of them. `epoch` grows
    with every change of targets, joining or leaving, a target's restart included. Whatever comes and goes, those that stay keep
    their order: who stands before another has every pending write that the other has. `intact`: what the chain has answered
    since it had this epoch is there, flushed or not.

    `begun`: the epoch in which it was begun anew with nothing, when all who held it were given up; 0: never. `loss` is what was
    lost then: the number in `PoolMap.losses`, from 1. See poolmap/chains/data_loss."""

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
        """Those that may be read from."""
        return tuple(t for t in self.targets if t not in self.leaving) if self.leaving else self.targets


class ChainTable(msgspec.Struct, frozen=True):
    """`id` is the replica count; a Layout names it."""

    id: int
    chains: tuple[Chain, ...]


class Standby(msgspec.Struct, frozen=True):
    """A member of a shard that is not its primary. "up": it has every change that was ever acknowledged, and no change is
    acknowledged that it does not have; so it can be promoted. "syncing": it is away, or catches up. Without endpoints it is
    still to be made by its node, and `path` is the store beside which it shall lie."""

    member: int
    node: int
    endpoints: tuple[str, ...]
    state: StandbyState = "syncing"
    path: str = ""


class Shard(msgspec.Struct, frozen=True):
    """One LMDB environment on each of its members. node, endpoints, member and path are the primary's; `term` counts the
    primaries, a journal record carries it. `path` is where a member's records are on its node; empty: in the pool's directory.
    `epoch` grows with every change of term or standbys. Changes: poolmap/shards/members. `wish`: to hold its share of the
    partitions, or to give them all away and leave the pool (poolmap/shards/partition_moves)."""

    id: int
    node: int
    endpoints: tuple[str, ...]
    term: int = 1
    state: ShardState = "up"
    member: int = 0
    path: str = ""
    epoch: int = 1
    standbys: tuple[Standby, ...] = ()
    wish: ShardWish = "share"
    standbys_wanted: int | None = None
    """So many it shall have in good places (poolmap/shards/placement); None: as many as it has."""


class ShardWanted(msgspec.Struct, frozen=True):
    """A shard that its node is to make, with so many standbys there; None: as many as the others have."""

    id: int
    node: int
    standbys: int | None = None


class PartitionRange(msgspec.Struct, frozen=True, array_like=True):
    first: int
    count: int
    shard: int


class Births(msgspec.Struct, frozen=True, array_like=True):
    """Inodes of these partitions that had been born at some moment: those with a counter below `below`."""

    first: int
    count: int
    below: int


class Loss(msgspec.Struct, frozen=True, dict=True):
    """What was there when chains were begun anew with nothing: chunks of these inodes may have been in them."""

    births: tuple[Births, ...]

    @cached_property
    def _below(self) -> tuple[int, ...]:
        below = [0] * PARTITION_COUNT
        for part in self.births:
            below[part.first:part.first + part.count] = [part.below] * part.count
        return tuple(below)

    def had(self, inode: int) -> bool:
        """Whether the inode had been born."""
        return counter_of(inode) < self._below[partition_of(inode)]


class Moving(msgspec.Struct, frozen=True):
    """How chains are moved for balance and for drives that are drained. `paused` keeps what begins; copies that are missing are
    made nevertheless. `limit_bytes_s` of each target that is filled; 0: what serving leaves."""

    paused: bool = False
    limit_bytes_s: int = 0


class RightTaken(msgspec.Struct, frozen=True):
    """A right to a volume that was taken back: stores refuse grants of it that were given before the map had `epoch`. Changes:
    poolmap/grant_revocation."""

    volume: int
    """Its inode; 0: each volume."""
    member: str
    """Whose right; empty: everybody's, and those who have one still get a new grant."""
    rights: int
    """READ, WRITE of core/grants."""
    epoch: int
    until_ms: int
    """Wall clock, since 1970: by then each grant that was given before has ended."""


class PoolMap(msgspec.Struct, frozen=True, dict=True):
    format: int
    pool_id: str
    name: str
    epoch: int
    settings: Settings
    nodes: tuple[Node, ...] = ()
    drives: tuple[Drive, ...] = ()
    targets: tuple[Target, ...] = ()
    tables: tuple[ChainTable, ...] = ()
    shards: tuple[Shard, ...] = ()
    partitions: tuple[PartitionRange, ...] = ()
    moving: Moving = Moving()
    members: tuple[str, ...] = ()
    """Who is in: whose certificates are good. None at all: all that the authority has signed."""
    tokens: tuple[JoinToken, ...] = ()
    etcd: tuple[EtcdMember, ...] = ()
    """Where the map is kept; empty: in the embedded coordinator of the first node, or in an etcd that is not the pool's own."""
    moves: tuple[PartitionRange, ...] = ()
    """Partitions that are to change hands, with the shard that is to hold them: poolmap/shards/partition_moves. Until then
    `partitions` holds."""
    moves_since: int = 0
    """The epoch in which `moves` was planned last. Who began to hand over before it asks in vain."""
    shards_given: int = 0
    """The highest number of a shard that has left the pool: none is given twice."""
    revoked: tuple[Revoked, ...] = ()
    """Nodes that were removed and may hold certificates of etcd's authority that have not ended."""
    shards_wanted: tuple[ShardWanted, ...] = ()
    """Shards that nodes are to make."""
    losses: tuple[Loss, ...] = ()
    """What chains have lost for ever, the oldest first; they name it by its number."""
    rights_taken: tuple[RightTaken, ...] = ()
    """Rights to volumes that were taken back not long ago."""

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
            owners[part.first:part.first + part.count] = [part.shard] * part.count
        return tuple(owners)

    @cached_property
    def node_by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    def chain(self, table: int, chain: int) -> Chain:
        return self.table_by_id[table].chains[chain]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that two sides compare before they speak: pool and fixed settings."""
        return hashlib.sha256(self.pool_id.encode() + msgspec.json.encode(self.settings)).hexdigest()[:16]


def encode_map(pool_map: PoolMap) -> bytes:
    return msgspec.json.encode(pool_map)


def decode_map(raw: bytes) -> PoolMap:
    """The map that `raw` holds, checked. WrongFormat for another version, CorruptRecord for anything else wrong."""
    try:
        pool_map = msgspec.json.decode(raw, type=PoolMap)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"the pool map can not be read: {error}") from None
    if pool_map.format not in _FORMATS_READ:
        raise WrongFormat(f"the pool map has format {pool_map.format}, this nvpool knows {MAP_FORMAT}")
    if pool_map.format != MAP_FORMAT:
        pool_map = msgspec.structs.replace(pool_map, format=MAP_FORMAT)
    problems = check_map(pool_map)
    if problems:
        raise CorruptRecord("the pool map contradicts itself: " + "; ".join(problems))
    return pool_map


def check_map(pool_map: PoolMap) -> list[str]:
    """What contradicts itself in the map, as sentences; an empty list for a sound one."""
    wrong = []
    nodes = {node.id for node in pool_map.nodes}
    drives = {drive.id for drive in pool_map.drives}
    here = {target.drive for target in pool_map.targets if not target.is_over}
    for drive in pool_map.drives:
        if drive.node not in nodes and drive.id in here:  # of what is over the number stays, its node may go
            wrong.append(f"drive {drive.id} is on node {drive.node}, which does not exist")
    for target in pool_map.targets:
        if target.drive not in drives or (target.node not in nodes and not target.is_over):
            wrong.append(f"target {target.id} is on drive {target.drive} of node {target.node}, which do not exist")
    for table in pool_map.tables:
        if len(table.chains) != CHAINS_PER_TABLE:
            wrong.append(f"chain table {table.id} has {len(table.chains)} chains")
        unknown = {target for chain in table.chains for target in (*chain.targets, *chain.joining, *chain.goal)}
        unknown -= pool_map.target_by_id.keys()
        if unknown:
            wrong.append(f"chain table {table.id} names targets {sorted(unknown)}, which do not exist")
        for number, chain in enumerate(table.chains):
            members = (*chain.targets, *chain.joining)
            if not chain.targets or len(set(members)) != len(members) or len(set(chain.goal)) != len(chain.goal):
                wrong.append(f"chain {number} of table {table.id} has no target, or one twice")
                break
            if chain.leaving and not set(chain.leaving) < set(chain.targets):
                wrong.append(f"chain {number} of table {table.id} is left by all its targets, or by others")
                break
            if not 0 <= chain.loss <= len(pool_map.losses) or bool(chain.loss) != bool(chain.begun):
                wrong.append(f"chain {number} of table {table.id} has lost something that is not told")
                break
    for shard in pool_map.shards:
        if shard.standbys:
            copies = [shard.member, *(standby.member for standby in shard.standbys)]
            if len(set(copies)) != len(copies) or any(standby.node not in nodes for standby in shard.standbys):
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
    """Why `new` can not come after `now`, as sentences, whatever its epoch; an empty list where it can."""
    if new.fingerprint != now.fingerprint:
        return ["this map is another pool's, or has other fixed settings"]
    return check_map(new)


def changed(pool_map: PoolMap, **fields: Any) -> PoolMap:
    """The same map with `fields` replaced and the next epoch. InvalidRequest, and no map, when it would contradict itself."""
    new = msgspec.structs.replace(pool_map, epoch=pool_map.epoch + 1, **fields)
    problems = check_map(new)
    if problems:
        raise InvalidRequest("; ".join(problems))
    return new
