"""What decisions read and what they produce: a View of the shard, a Draft of one change.

A decision is a plain function (view, request, now) -> Draft with the reply in it. It reads through the view, changes inodes
in the draft, and touches nothing else: the service applies the draft's effects in one step, or none of them. Nothing here
or in `changes` waits; what has to wait first is said by CutInProgress, which only the service sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from nvpool.core.errors import (
    DirectoryGone,
    InvalidRequest,
    NameTooLong,
    NotADirectory,
    NotFound,
    SpreadDirectory,
    WrongShard,
)
from nvpool.core.grants import ENCRYPTED, EPOCH_MASK, WRITE, Grant, member_tag, sign, volume_tag
from nvpool.core.ids import COUNTER_BITS, inode_number
from nvpool.core.posix.acl import Acl, encode_acl
from nvpool.core.units import NAME_BYTES_MAX, PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta.sessions.append_order import Appends
from nvpool.meta.state import records, striped_dirs
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.quota import Account, Rooms, account
from nvpool.meta.state.records import DIVIDED, TRASHED, WIDE, Inode, Intent
from nvpool.meta.state.striped_dirs import Part
from nvpool.meta.state.volume_access import Access
from nvpool.meta.state.volume_records import TRASH, Trashed, encode_trashed, volume_key
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partitions import name_hasher, partition_of_name
from nvpool.rpc.v1 import meta_pb2
from nvpool.security.volume_keys import PoolKeys

GRANT_RIGHTS = 3
"""Read and write: what a client may ask for. The right over all inodes is the service's own."""

SEALED_LEASE_MS = 3_600_000
"""What is in a sealed volume does not change; a change of its rights, and its removal, end all leases."""

_FLAGS = Inode.__slots__.index("flags")


class CutInProgress(Exception):
    """The decision needs the inode's truncation to end first. For the service only; it waits and decides anew."""

    def __init__(self, inode: int) -> None:
        self.inode = inode


class View:
    """Typed reads of one shard, as of now, and what decisions have to know beside the records."""

    def __init__(self, kv: Kv, identity: records.Identity, grant_secret: bytes, grant_s: float, locks: LockTable) -> None:
        self.locks = locks
        self.get = kv.get
        self.get_many = kv.get_many
        self.scan = kv.scan
        self.snapshot: Callable[[], Any] = kv.snapshot
        """All records of one moment, as Kv.snapshot, but those of partitions that are not ours."""
        self.shard = identity.shard
        self.name_key = identity.name_key
        self.name_hash = name_hasher(identity.name_key)
        self.grant_secret = grant_secret
        self.grant_ms = int(grant_s * 1000)
        self.pool_keys = PoolKeys()
        self.next_number = 0
        """The counter that the next inode gets. Moved on by the service when a draft that used it is applied."""
        self.inode_count = 0
        self.serves: Callable[[int], bool] = lambda partition: True
        """Whether what is here of the partition is ours, and not on its way to another shard."""
        self.check_partition: Callable[[int], None] = lambda partition: None
        """Raises where records of the partition are here and can not be read or written by requests: see Ranges."""
        self.cutting: dict[int, Any] = {}
        """Inodes whose truncation is decided and not yet done by all targets."""
        self.owners: tuple[int, ...] = ()
        self.shards: tuple[int, ...] = (identity.shard,)
        self.tables: frozenset[int] = frozenset((1,))
        self.map_epoch = 0
        self.lease_ms = 0
        self.promise: Callable[[int, Iterable[int]], Collection[int]] = lambda session, numbers: ()
        """See Watches.lend."""
        self.rooms: Rooms | None = None
        self.appends: Appends | None = None
        self.access = Access()
        self.trashes: set[int] = set()
        """Volumes that may have something in their trash."""
        self.is_open: Callable[[int], bool] = lambda inode: False
        """Whether a session has the inode open, as far as it is known."""

    def lend(self, session: int, inode: Inode) -> int:
        """Milliseconds for which the session may rely on what it is told of the inode: 0 also while targets cut it."""
        if not inode.links or inode.number in self.cutting or inode.flags & DIVIDED:  # the collector tells nobody, nor do parts
            return 0
        if not self.promise(session, (inode.number,)):
            return 0
        if inode.volume and self.access.is_sealed(inode.volume):
            return SEALED_LEASE_MS
        return self.lease_ms

    def lend_all(self, session: int, inodes: list[tuple]) -> Collection[int]:
        """As `lend`, of many, by their `inode_fields`: on which of them the session may rely for `lease_ms`."""
        cutting = self.cutting
        return self.promise(session, [fields[0] for fields in inodes if fields[2] and fields[0] not in cutting
                                      and not fields[_FLAGS] & DIVIDED])

    def use_map(self, pool_map: PoolMap) -> None:
        owners = pool_map.shard_of_partition
        mine_alone = not pool_map.partitions or all(owner == self.shard for owner in owners)
        self.owners = () if mine_alone else owners
        self.shards = tuple(shard.id for shard in pool_map.shards) or self.shards
        self.tables = frozenset(pool_map.table_by_id) or self.tables
        self.map_epoch = pool_map.epoch
        self.access.taken = frozenset((one.volume, one.member) for one in pool_map.rights_taken)

    def inode(self, number: int) -> Inode:
        """NotFound when there is none, WrongShard when another shard would know."""
        raw = self.get(records.inode_key(number)) if 0 < number < 1 << 63 else None
        if raw is None:
            self._check_owner(number >> COUNTER_BITS)
            raise NotFound(f"there is no inode {number}")
        inode = records.decode_inode(number, raw)
        if inode.volume and self.access.restricted:
            self.access.check(inode.volume)
        return inode

    def is_elsewhere(self, partition: int) -> bool:
        """Whether the partition belongs to another shard."""
        return bool(self.owners) and partition < len(self.owners) and self.owners[partition] != self.shard

    def owner_of(self, partition: int) -> int:
        """The shard that has the partition."""
        return self.owners[partition] if self.owners else self.shard

    def _check_owner(self, partition: int) -> None:
        if self.is_elsewhere(partition):
            raise WrongShard(f"partition {partition} belongs to shard {self.owners[partition]}")

    def record(self, key: bytes) -> bytes | None:
        """The record under a key of any partition. WrongShard when another shard would know."""
        self._check_owner(records.partition_of_key(key))
        return self.get(key)

    def xattr(self, number: int, name: bytes) -> bytes | None:
        """The value of an extended attribute. WrongShard when another shard would know."""
        raw = self.record(records.xattr_key(number, name))
        return records.decode_xattr(raw) if raw is not None else None

    def ancestor(self, number: int) -> Inode:
        """As `inode`, of a directory above one that is to move."""
        return self.inode(number)

    def take_turn(self) -> None:
        """A directory is to get another parent. Changes that span shards do that one at a time in the pool; what is decided
        by one shard's records alone needs no turn: whoever moves one of these directories has to hold it here."""

    def number_of_birth(self, partition: int) -> int:
        """A new inode number in another shard's partition."""
        raise WrongShard(f"partition {partition} belongs to shard {self.owners[partition]}")

    def directory(self, number: int) -> Inode:
        """NotADirectory when it is something else. One that was removed is there while it is held open: see `entered`."""
        return _directory(self.inode, number)

    def holder(self, number: int) -> Inode:
        """What changes of names in the directory count in: its record, or this shard's part of it. As `directory`."""
        if self.owners and self.is_elsewhere(number >> COUNTER_BITS):
            found = self._part(number)
            if found is None:
                raise WrongShard(f"directory {number} belongs to another shard, and this one has no part of it")
            return found
        return self._own_holder(number)

    def _own_holder(self, number: int) -> Inode:
        found = self.directory(number)
        return (self._part(number) or striped_dirs.new_part(found, self.shard)) if found.flags & DIVIDED else found

    def _part(self, number: int) -> Part | None:
        key = records.part_key(number, self.shard)
        raw = self.get(key)
        return striped_dirs.decode_part(key, raw) if raw is not None else None

    def counts_of_part(self, number: int) -> striped_dirs.Counts | None:
        """Of this shard's part of the directory."""
        part = self._part(number)
        return part.counts if part is not None else None

    def parts_of(self, number: int) -> list[Part]:
        """Those that all shards have of the directory."""
        if any(shard != self.shard for shard in self.shards):
            raise WrongShard(f"other shards have parts of directory {number}")
        part = self._part(number)
        return [part] if part is not None else []

    def has_names(self, directory: Inode) -> bool:
        """Whether there is a name in it: looked up, not believed from a count. WrongShard where others have some of a wide
        directory's partitions."""
        if not directory.flags & WIDE:
            return self._has_names(directory.number, (directory.number >> COUNTER_BITS,))
        if self.owners:
            raise WrongShard(f"other shards may have names of directory {directory.number}")
        return self._has_names(directory.number, range(PARTITION_COUNT))

    def has_names_here(self, number: int) -> bool:
        """Of a wide directory, in the partitions of this shard: 3 µs for each."""
        return self._has_names(number, (partition for partition in range(PARTITION_COUNT) if not self.is_elsewhere(partition)))

    def _has_names(self, number: int, partitions: Iterable[int]) -> bool:
        return any(self.scan(*records.dentry_range(partition, number), 1) for partition in partitions)

    def searched(self, number: int, name: bytes, spread: bool) -> Inode:
        """The directory, for who only looks for a name in it: where it is `spread` only what is needed for that.
        SpreadDirectory: it is, and others have the name's partition."""
        if spread:
            return _spread_directory(number)
        found = self.directory(number)
        if self.owners and found.flags & WIDE and self.is_elsewhere(
                partition_of_name(number, True, self.name_hash(number, name))):
            raise SpreadDirectory(f"directory {number} is wide")
        return found

    def listed(self, number: int, from_hash: bytes, spread: bool) -> Inode:
        """As `searched`, for a listing from that hash on."""
        if spread:
            self._check_owner(partition_of_name(number, True, from_hash))
            return _spread_directory(number)
        found = self.directory(number)
        if self.owners and found.flags & WIDE and self.is_elsewhere(partition_of_name(number, True, from_hash)):
            raise SpreadDirectory(f"directory {number} is wide")
        return found

    def place(self, directory: Inode, name: bytes) -> tuple[int, bytes, bytes]:
        """(partition, hash, key) of a name, whether it exists or not. Refuses what can be no name."""
        if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise InvalidRequest(f"{name!r} can not be a name")
        if len(name) > NAME_BYTES_MAX:
            raise NameTooLong(f"a name has {NAME_BYTES_MAX} bytes at most, not {len(name)}")
        name_hash = self.name_hash(directory.number, name)
        partition = partition_of_name(directory.number, bool(directory.flags & records.WIDE), name_hash)
        if self.owners:
            self._check_owner(partition)
        return partition, name_hash, records.dentry_key(partition, directory.number, name_hash, name)

    def named(self, directory: Inode, name: bytes) -> tuple[bytes, int, int]:
        """(key, inode number, kind) of an existing name; NotFound."""
        partition, _, key = self.place(directory, name)
        raw = self.get(key)
        if raw is None:
            raise NotFound(f"there is no {name!r} in directory {directory.number}")
        return key, *records.decode_dentry(partition, raw)

    def grant(self, inode: Inode, rights: int, session: int, now_ns: int) -> bytes:
        """A signed right to the chunks of a file; waits for a truncation, since its number must not be given before the
        stores know it. An inode whose flag TOUCHED is not set may not get WRITE: the caller sets it first."""
        if inode.number in self.cutting:
            raise CutInProgress(inode.number)
        return self.signed(rights & GRANT_RIGHTS, session, inode.number, inode.cut, inode.table, inode.volume, now_ns)

    def signed(self, rights: int, session: int, number: int, cut: int, table: int, volume: int, now_ns: int) -> bytes:
        """A grant of a file with these attributes to who asks, whatever speaks against one."""
        ends_ms = now_ns // 1_000_000 + self.grant_ms
        if volume in self.access.encrypted:
            rights |= ENCRYPTED
        if not volume:  # then there is no right that could be taken back
            return sign(Grant(rights, 0, session, number, cut, ends_ms, table), self.grant_secret)
        return sign(Grant(rights, 0, session, number, cut, ends_ms, table, self.map_epoch & EPOCH_MASK, volume_tag(volume),
                          member_tag(self.access.asker or "")), self.grant_secret)


def _directory(find: Callable[[int], Inode], number: int) -> Inode:
    try:
        found = find(number)
    except NotFound:
        raise DirectoryGone(f"there is no directory {number} any more") from None
    if not found.is_directory:
        raise NotADirectory(f"inode {number} is not a directory")
    return found


def _spread_directory(number: int) -> Inode:
    """As its asker says; whether there is one only its own shard knows."""
    if not 0 < number < 1 << 63:
        raise DirectoryGone(f"there is no directory {number} any more")
    return Inode(number, 0o040000, flags=WIDE)


class Draft:
    """One change as it is being decided: inodes that were read (each once), those to be written, and other effects."""

    __slots__ = ("view", "now_ns", "inodes", "dirty", "effects", "reply", "opened", "linked", "closed", "intent", "born",
                 "orphans", "adds", "sync", "parent", "then", "accounts")

    def __init__(self, view: View, now_ns: int) -> None:
        self.view = view
        self.now_ns = now_ns
        self.inodes: dict[int, Inode] = {}
        self.dirty: dict[int, Inode] = {}
        self.effects: dict[bytes, bytes | None] = {}
        self.reply: Any = None
        self.opened = 0
        """Inode of which the session gets one more handle."""
        self.linked = 0
        """Inode that has one more name, and of which the session gets a lease."""
        self.closed = 0
        self.intent: tuple[int, Intent] | None = None
        """A truncation that the targets have to be told of before the answer is given."""
        self.born = False
        self.orphans: list[int] = []
        self.adds = False
        """Whether it is to be refused when there is no room. What does not add records works always."""
        self.sync = False
        self.then: Callable[[], None] | None = None
        """What is to be done in memory when the effects are applied."""
        self.parent: Inode | None = None
        """Directory whose attributes go with the first answer (the kernel asks for them after each change of a name), but not
        into the kept one."""
        self.accounts: dict[int, Account] | None = None
        """Of the volumes whose use changes."""

    def inode(self, number: int) -> Inode:
        found = self.inodes.get(number)
        if found is None:
            found = self.inodes[number] = self.view.inode(number)
        return found

    def directory(self, number: int) -> Inode:
        return _directory(self.inode, number)

    def entered(self, number: int) -> Inode:
        """A directory that can take names: one that was removed can not, though somebody has it open."""
        found = self.directory(number)
        if not found.links or found.flags & TRASHED:
            raise DirectoryGone(f"directory {number} was removed")
        return found

    def holder(self, number: int) -> Inode:
        """As View.holder."""
        found = self.inodes.get(number)
        if found is None:
            found = self.inodes[number] = _directory(self.view.holder, number)
        elif not found.is_directory:  # of a request that names a file twice, once as the directory
            raise NotADirectory(f"inode {number} is not a directory")
        return found

    def entered_holder(self, number: int) -> Inode:
        """As `entered`, for a change of names."""
        found = self.holder(number)
        if not found.links or found.flags & TRASHED:
            raise DirectoryGone(f"directory {number} was removed")
        return found

    def take_parts(self, directory: Inode, at_least: bool = True) -> None:
        """All that shards keep of the directory goes into its record, which is to be changed: it is divided no more."""
        if not directory.flags & DIVIDED:
            return
        for part in self.view.parts_of(directory.number):
            striped_dirs.take_in(directory, part.counts)
            self.effects[records.part_key(directory.number, part.shard)] = None
        if at_least:  # what damage has made impossible
            directory.size, directory.links = max(0, directory.size), max(2, directory.links)
        directory.flags &= ~DIVIDED
        self.dirty[directory.number] = directory

    def account(self, volume: int) -> Account | None:
        """To be changed: what it counts is written with this change."""
        if self.accounts is None:
            self.accounts = {}
        found = self.accounts.get(volume)
        if found is None and (found := account(self.view, volume)) is not None:
            self.accounts[volume] = found
        return found

    def resized(self, inode: Inode, size: int, session: int = 0, reported: bool = False) -> None:
        """The file gets this size; where it is in a volume that is counted. QuotaExceeded. `reported`: as Account.grow."""
        if inode.volume and size != inode.size and (found := self.account(inode.volume)) is not None:
            grown = size - inode.size
            if not inode.links and not self._counts(inode):
                found.use.files += 1  # written by who opened it when it had lost its last name already
                grown = size
                self.effects[records.numbered_key(records.ORPHAN, inode.number)] = records.ORPHAN_COUNTED
            if grown > 0:
                found.grow(grown, session, reported)
            else:
                found.use.bytes += grown
        inode.size = size
        if inode.reserved and inode.reserved <= size:
            inode.reserved = 0
            self.then = partial(self.view.appends.ended, inode.number)

    def _counts(self, inode: Inode) -> bool:
        """Whether an inode without a name counts in its volume."""
        key = records.numbered_key(records.ORPHAN, inode.number)
        return (self.effects.get(key) or self.view.get(key)) == records.ORPHAN_COUNTED

    def stamp(self, inode: Inode, content: bool = False) -> None:
        """The inode changes now: ctime (mtime too where its content does) and the change counter. Never backwards."""
        now = self.now_ns if self.now_ns > inode.ctime_ns else inode.ctime_ns
        inode.ctime_ns = now
        if content:
            inode.mtime_ns = now
        inode.change += 1
        self.dirty[inode.number] = inode

    def keep(self, inode: Inode) -> None:
        """Write the record of a file of which nothing has changed that clients see."""
        self.effects[records.inode_key(inode.number)] = records.encode_inode(inode)

    def birth(self, partition: int, **fields) -> Inode:
        """A new inode with the next number; all its times are now."""
        view, self.adds = self.view, True
        if view.owners and view.is_elsewhere(partition):
            number = view.number_of_birth(partition)  # who holds it there counts it, too
        else:
            view.check_partition(partition)  # nothing of it has been read: who makes a directory chooses any
            number = inode_number(partition, view.next_number)
            self.born = True
            self.effects[records.COUNTS_KEY] = records.encode_counts(view.inode_count + 1)
        now = self.now_ns
        born = Inode(number, atime_ns=now, mtime_ns=now, ctime_ns=now, birth_ns=now, **fields)
        if born.volume and (found := self.account(born.volume)) is not None:
            found.add_file()
        self.inodes[number] = self.dirty[number] = born
        return born

    def put_acl(self, inode: Inode, name: bytes, acl: Acl) -> None:
        """Keep an access control list of the inode, which is to be written."""
        inode.flags |= records.HAS_XATTRS | records.HAS_ACL
        self.adds = True
        self.effects[records.xattr_key(inode.number, name)] = records.XATTR_HEAD + encode_acl(acl)

    def discard(self, inode: Inode, directory: int, name: bytes) -> None:
        """As `drop_name`, of this name; with the last the inode goes into the trash of its volume, where that has one."""
        if inode.volume and (inode.is_directory or inode.links == 1) and inode.number != inode.volume:
            found = self.account(inode.volume)
            record = found.record if found is not None else None
            if record is not None and record.trash_s:
                inode.flags |= TRASHED
                self.stamp(inode)
                entry = Trashed(inode.ctime_ns, inode.ctime_ns + record.trash_s * 10**9, directory, name)
                key = volume_key(TRASH, inode.volume, inode.number.to_bytes(8, "big"))
                self.effects[key] = encode_trashed(entry)
                self.view.trashes.add(inode.volume)
                return
        self.drop_name(inode)

    def drop_name(self, inode: Inode) -> None:
        """The inode loses a name (a directory its only one); with the last it becomes an orphan, kept while it is open."""
        inode.links = 0 if inode.is_directory else inode.links - 1
        self.stamp(inode)
        if not inode.links:
            value = records.ORPHAN_VALUE
            if inode.volume and inode.volume != inode.number:
                if inode.is_file and self.view.is_open(inode.number):
                    value = records.ORPHAN_COUNTED
                elif (found := self.account(inode.volume)) is not None:
                    found.use.files -= 1
                    found.use.bytes -= inode.size if inode.is_file else 0
            self.effects[records.numbered_key(records.ORPHAN, inode.number)] = value
            self.orphans.append(inode.number)

    def grant(self, inode: Inode, rights: int, session: int) -> bytes:
        """A grant for a file, b"" where none is wanted or there is nothing to grant."""
        if not rights & GRANT_RIGHTS or not inode.is_file:
            return b""
        if inode.volume and rights & WRITE and self.view.access.restricted:
            self.view.access.check_change(inode.volume)
        if rights & WRITE and not inode.flags & records.TOUCHED:
            inode.flags |= records.TOUCHED
            self.dirty[inode.number] = inode
        if self.intent is not None and self.intent[0] == inode.number:
            # The answer that carries it is given only when all targets have cut.
            return self.view.signed(rights & GRANT_RIGHTS, session, inode.number, inode.cut, inode.table, inode.volume,
                                    self.now_ns)
        return self.view.grant(inode, rights, session, self.now_ns)

    def cut(self, inode: Inode, size: int) -> None:
        """End the file at `size`, which is not above its present one. Where there may be chunks, this raises the cut
        number and leaves an intent, by which the targets are told also after a crash."""
        if inode.number in self.view.cutting:
            raise CutInProgress(inode.number)
        self.resized(inode, size)
        if inode.reserved:  # what is on its way to there was written before, and goes with what is cut
            inode.reserved = 0
            self.then = partial(self.view.appends.ended, inode.number)
        inode.blocks = min(inode.blocks, records.blocks_of(size))
        if inode.flags & records.TOUCHED:
            inode.punches = 0
            self._intend(inode, size, 0)
        self.stamp(inode, content=True)

    def punch(self, inode: Inode, offset: int, end: int) -> None:
        """[offset, end) of the file becomes a hole; its size stays. As `cut` otherwise."""
        if inode.number in self.view.cutting:
            raise CutInProgress(inode.number)
        if inode.flags & records.TOUCHED:
            inode.punches += 1
            self._intend(inode, offset, end)
        self.stamp(inode, content=True)

    def _intend(self, inode: Inode, size: int, end: int) -> None:
        inode.cut += 1
        intent = Intent(inode.cut, size, inode.table, inode.chunk_bits, end)
        self.effects[records.numbered_key(records.INTENT, inode.number)] = records.encode_intent(intent)
        self.intent = inode.number, intent

    def finish(self) -> dict[bytes, bytes | None]:
        """All effects; the changed inodes are encoded here, once each."""
        effects = self.effects
        if self.accounts is not None:
            effects.update(found.effect() for found in self.accounts.values())
        access = self.view.access if self.view.access.restricted else None
        for number, inode in self.dirty.items():
            if access is not None and inode.volume:
                access.check_change(inode.volume)
            if inode.is_directory:
                effects.update(striped_dirs.effects_of(inode))
            else:
                effects[records.inode_key(number)] = records.encode_inode(inode)
        return effects


Decision = Callable[[View, Any, int], Draft]


def fill_attr(attr: meta_pb2.Attr, inode: Inode) -> None:
    """Write an inode into a message in place: no message is made twice on the hot path."""
    attr.inode = inode.number
    attr.mode = inode.mode
    attr.links = inode.links
    attr.uid = inode.uid
    attr.gid = inode.gid
    attr.size = inode.size
    attr.blocks = inode.blocks
    attr.atime_ns = inode.atime_ns
    attr.mtime_ns = inode.mtime_ns
    attr.ctime_ns = inode.ctime_ns
    attr.table = inode.table
    attr.chunk_bits = inode.chunk_bits
    attr.change = inode.change
    if inode.cut:
        attr.cut = inode.cut
        if inode.punches:
            attr.punches = inode.punches
    if inode.flags & records.SHOWN_FLAGS:
        attr.flags = inode.flags & records.SHOWN_FLAGS
        if inode.flags & TRASHED:  # the trash's own is no name
            attr.links = 0 if inode.is_directory else inode.links - 1
    if inode.rdev:
        attr.rdev = inode.rdev
    if inode.parent:
        attr.parent = inode.parent
    if inode.volume:
        attr.volume = inode.volume


def fill_elsewhere(entry: meta_pb2.Entry, number: int, kind: int) -> None:
    """What a name says of an inode of another shard."""
    entry.elsewhere = True
    entry.attr.inode = number
    entry.attr.mode = kind << 12
