"""Inputs and outputs of decisions: a View of the shard's records, and a Draft of one change.

A decision is a plain function (view, request, now) -> Draft; the draft contains the reply. The decision reads
through the view, changes inodes in the draft, and touches nothing else. The service applies all effects of
the draft in one step, or none of them. Nothing here or in `meta/operations` waits: a decision that needs a
wait first raises TruncationInProgress, which only the service sees.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Collection, Container, Iterable
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
from nvpool.core.grants import ENCRYPTED, EPOCH_MASK, WRITE, grant_signer, member_tag, volume_tag
from nvpool.core.ids import COUNTER_BITS
from nvpool.core.posix.acl import Acl, encode_acl
from nvpool.core.primitives import ByteWriter
from nvpool.core.units import NAME_BYTES_MAX, PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta.state import records, striped_dirs
from nvpool.meta.state.append_reservations import AppendOrder
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.quota import QuotaAccount, QuotaLedger, account
from nvpool.meta.state.records import DIVIDED, INODE_FIELDS, TRASHED, WIDE, Inode, Intent
from nvpool.meta.state.striped_dirs import StripeView
from nvpool.meta.state.volume_access import VolumeAccess
from nvpool.meta.state.volume_records import TRASH, Trashed, encode_trashed, volume_key
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partitions import name_hasher, partition_of_name
from nvpool.rpc.messages.meta_messages import Attr, InodeEntry
from nvpool.rpc.v1 import meta_pb2
from nvpool.security.volume_keys import PoolKeys

GRANT_RIGHTS = 3
"""Read and write: the rights that a client may request. The right over all inodes is for services only."""

SEALED_LEASE_MS = 3_600_000
"""Lease time in a sealed volume, whose contents do not change. A change of its rights, and its removal, end
all leases."""

_FLAGS, _SIZE, _BIRTH = map(INODE_FIELDS.index, ("flags", "size", "birth_ns"))
_DIVIDED, _TRASHED, _WIDE, _TOUCHED, _SHOWN = DIVIDED, TRASHED, WIDE, records.TOUCHED, records.SHOWN_FLAGS
_S_IFMT, _S_IFDIR, _S_IFREG = 0o170000, 0o040000, 0o100000
_ORPHAN = records.ORPHAN
_INODE_MAX = (1 << 63) - 1
_NUMBER = struct.Struct(">Q")
_out = ByteWriter()


class TruncationInProgress(Exception):
    """The decision needs the inode's truncation to end first.

    Only the service sees it, waits, and decides again.
    """

    def __init__(self, inode: int) -> None:
        self.inode = inode


class WaitFirst(Exception):
    """The decision must wait for something else. Only the service sees it, waits, and decides again."""

    def __init__(self, wait: Callable[[], Awaitable[Any]]) -> None:
        self.wait = wait


class View:
    """Typed reads of one shard's current records, and other facts that decisions need."""

    def __init__(
        self,
        kv: Kv,
        identity: records.ShardIdentity,
        grant_secret: bytes,
        grant_s: float,
        locks: LockTable,
        *,
        pool_keys: PoolKeys | None = None,
        rooms: QuotaLedger | None = None,
        appends: AppendOrder | None = None,
        lease_ms: int = 0,
        register_leases: Callable[[int, Iterable[int]], Collection[int]] = lambda session, numbers: (),
        register_lease: Callable[[int, int], bool] = lambda session, number: False,
        watching: Container[int] = (),
        is_open: Callable[[int], bool] = lambda inode: False,
        recall_delegation: Callable[[int, int, float], Callable[[], Awaitable] | None] = lambda *_: None,
    ) -> None:
        """`register_leases`, `register_lease`: see `LeaseTable.issue_leases`; `watching`: the sessions that may have leases.

        `is_open(inode)`: whether a session is known to have the inode open. `recall_delegation`: see `LeaseTable`.
        """
        self.locks = locks
        self.get = kv.get
        self.get_many = kv.get_many
        self.scan = kv.scan
        self.snapshot: Callable[[], Any] = kv.snapshot
        """Snapshot of all records as Kv.snapshot, without those of partitions that this shard does not
        own."""
        self.shard = identity.shard
        self.name_key = identity.name_key
        self.name_hash = name_hasher(identity.name_key)
        self.grant_secret = grant_secret
        self._sign = grant_signer(grant_secret)
        self.grant_ms = int(grant_s * 1000)
        self.pool_keys = pool_keys or PoolKeys()
        self.next_number = 0
        """Counter of the next inode number. The service advances it when it applies a draft that used it."""
        self.inode_count = 0
        self.serves: Callable[[int], bool] = lambda partition: True
        """Whether this shard owns the partition, and is not migrating it to another shard."""
        self.check_partition: Callable[[int], None] | None = None
        """Raises if the partition's records are here but closed to requests: see `PartitionOwnership`. None: none is."""
        self.cutting: dict[int, Any] = {}
        """Inodes whose truncation is decided, but not done by all targets yet."""
        self.owners: tuple[int, ...] = ()
        self.shards: tuple[int, ...] = (identity.shard,)
        self.tables: frozenset[int] = frozenset((1,))
        self.map_epoch = 0
        self.lease_ms = lease_ms
        self._register_leases = register_leases
        self._register_lease = register_lease
        self.watching = watching
        self.rooms = rooms
        self.appends = appends
        self.access = VolumeAccess()
        self.trashes: set[int] = set()
        """Volumes whose trash may not be empty."""
        self.is_open = is_open
        self._recall_delegation = recall_delegation

    def check_delegation(self, session: int, number: int, mode: int, birth_ns: int, now_ns: int) -> None:
        """WaitFirst: another session may have data of this empty inode that it has not reported.

        Must be called before the attributes of an inode of 0 bytes are shown to a session, or it is opened.
        """
        if mode & _S_IFMT != _S_IFREG:
            return
        wait = self._recall_delegation(session, number, (now_ns - birth_ns) / 1e9)
        if wait is not None:
            raise WaitFirst(wait)

    def check_delegations(self, session: int, inodes: Iterable[tuple], now_ns: int) -> None:
        """As `check_delegation`, for inodes given by their `inode_fields`, of any size: recalls all at the same time."""
        waits = []
        for fields in inodes:
            if not fields[_SIZE]:
                try:
                    self.check_delegation(session, fields[0], fields[1], fields[_BIRTH], now_ns)
                except WaitFirst as first:
                    waits.append(first.wait)
        if waits:
            raise WaitFirst(partial(_all, waits))

    def issue_lease(self, session: int, inode: Inode) -> int:
        """Give the session a lease on the inode; return its milliseconds, 0 for none.

        There is no lease while the targets truncate the inode.
        """
        # the collector recalls no lease of an unlinked inode, and a stripe changes a divided directory
        # without a recall
        if not inode.links or inode.flags & _DIVIDED or (self.cutting and inode.number in self.cutting):
            return 0
        if session not in self.watching or not self._register_lease(session, inode.number):
            return 0
        if inode.volume and self.access.is_sealed(inode.volume):
            return SEALED_LEASE_MS
        return self.lease_ms

    def issue_leases(self, session: int, inodes: list[tuple]) -> Collection[int]:
        """As `issue_lease`, for many inodes given by their `inode_fields`.

        Return the inodes with a lease of `lease_ms`.
        """
        cutting = self.cutting
        return self._register_leases(
            session,
            [
                fields[0]
                for fields in inodes
                if fields[2] and fields[0] not in cutting and not fields[_FLAGS] & DIVIDED
            ],
        )

    def use_map(self, pool_map: PoolMap) -> None:
        owners = pool_map.shard_of_partition
        mine_alone = not pool_map.partitions or all(owner == self.shard for owner in owners)
        self.owners = () if mine_alone else owners
        self.shards = tuple(shard.id for shard in pool_map.shards) or self.shards
        self.tables = frozenset(pool_map.table_by_id) or self.tables
        self.map_epoch = pool_map.epoch
        self.access.taken = frozenset((one.volume, one.member) for one in pool_map.rights_taken)

    def inode(self, number: int) -> Inode:
        """Read an inode. NotFound: it does not exist. WrongShard: another shard owns its partition."""
        raw = self.get(records.inode_key(number)) if 0 < number <= _INODE_MAX else None
        if raw is None:
            self._check_owner(number >> COUNTER_BITS)
            raise NotFound(f"there is no inode {number}")
        inode = records.decode_inode(number, raw)
        if inode.volume and self.access.restricted:
            self.access.check(inode.volume)
        return inode

    def is_elsewhere(self, partition: int) -> bool:
        """Whether another shard owns the partition."""
        return bool(self.owners) and partition < len(self.owners) and self.owners[partition] != self.shard

    def owner_of(self, partition: int) -> int:
        """Shard that owns the partition."""
        return self.owners[partition] if self.owners else self.shard

    def _check_owner(self, partition: int) -> None:
        if self.is_elsewhere(partition):
            raise WrongShard(f"partition {partition} belongs to shard {self.owners[partition]}")

    def record(self, key: bytes) -> bytes | None:
        """Record under a key of any partition; None if there is none.

        WrongShard: another shard owns the partition.
        """
        self._check_owner(records.partition_of_key(key))
        return self.get(key)

    def xattr(self, number: int, name: bytes) -> bytes | None:
        """Value of an extended attribute; None if there is none.

        WrongShard: another shard owns the partition.
        """
        raw = self.record(records.xattr_key(number, name))
        return records.decode_xattr(raw) if raw is not None else None

    def ancestor(self, number: int) -> Inode:
        """As `inode`, for an ancestor of a directory that is to be moved."""
        return self.inode(number)

    def take_turn(self) -> None:
        """Take the turn before a directory gets another parent.

        Cross-shard transactions do this one at a time in the whole pool. A change that this shard decides by
        its own records alone needs no turn: a cross-shard transaction that moves one of these directories
        must lock it here.
        """

    def number_of_birth(self, partition: int) -> int:
        """New inode number in another shard's partition."""
        raise WrongShard(f"partition {partition} belongs to shard {self.owners[partition]}")

    def directory(self, number: int) -> Inode:
        """Read a directory. NotADirectory: the inode is something else.

        A removed directory is still there while it is open: see `entered`.
        """
        try:
            found = self.inode(number)
        except NotFound:
            raise DirectoryGone(f"there is no directory {number} any more") from None
        if found.mode & _S_IFMT != _S_IFDIR:
            raise NotADirectory(f"inode {number} is not a directory")
        return found

    def holder(self, number: int) -> Inode:
        """Record that counts changes of names in the directory: its inode, or this shard's stripe.

        Errors as of `directory`.
        """
        if self.owners and self.is_elsewhere(number >> COUNTER_BITS):
            found = self._part(number)
            if found is None:
                raise WrongShard(
                    f"directory {number} belongs to another shard, and this one has no part of it"
                )
            return found
        return self._own_holder(number)

    def _own_holder(self, number: int) -> Inode:
        found = self.directory(number)
        return (
            (self._part(number) or striped_dirs.new_part(found, self.shard))
            if found.flags & _DIVIDED
            else found
        )

    def _part(self, number: int) -> StripeView | None:
        key = records.part_key(number, self.shard)
        raw = self.get(key)
        return striped_dirs.decode_part(key, raw) if raw is not None else None

    def counts_of_part(self, number: int) -> striped_dirs.StripeCounts | None:
        """Counts of this shard's stripe of the directory."""
        part = self._part(number)
        return part.counts if part is not None else None

    def parts_of(self, number: int) -> list[StripeView]:
        """Stripes of the directory at all shards. WrongShard: there may be other shards that have one."""
        if any(shard != self.shard for shard in self.shards):
            raise WrongShard(f"other shards have parts of directory {number}")
        part = self._part(number)
        return [part] if part is not None else []

    def has_names(self, directory: Inode) -> bool:
        """Whether the directory has a name; searched, because a count could be wrong.

        WrongShard: other shards own some partitions of a wide directory.
        """
        if not directory.flags & WIDE:
            return self._has_names(directory.number, (directory.number >> COUNTER_BITS,))
        if self.owners:
            raise WrongShard(f"other shards may have names of directory {directory.number}")
        return self._has_names(directory.number, range(PARTITION_COUNT))

    def has_names_here(self, number: int) -> bool:
        """Whether a wide directory has names in this shard's partitions: 3 µs for each partition."""
        return self._has_names(
            number, (partition for partition in range(PARTITION_COUNT) if not self.is_elsewhere(partition))
        )

    def _has_names(self, number: int, partitions: Iterable[int]) -> bool:
        return any(self.scan(*records.dentry_range(partition, number), 1) for partition in partitions)

    def searched(self, number: int, name: bytes, spread: bool) -> Inode:
        """The directory in which a caller looks up a name.

        If it is `spread`, it has only the fields needed for that. SpreadDirectory: the caller did not know
        that it is spread, and another shard owns the name's partition.
        """
        if spread:
            return _spread_directory(number)
        found = self.directory(number)
        if (
            self.owners
            and found.flags & WIDE
            and self.is_elsewhere(partition_of_name(number, True, self.name_hash(number, name)))
        ):
            raise SpreadDirectory(f"directory {number} is wide")
        return found

    def listed(self, number: int, from_hash: bytes, spread: bool) -> Inode:
        """As `searched`, for a listing that starts at that hash."""
        if spread:
            self._check_owner(partition_of_name(number, True, from_hash))
            return _spread_directory(number)
        found = self.directory(number)
        if (
            self.owners
            and found.flags & WIDE
            and self.is_elsewhere(partition_of_name(number, True, from_hash))
        ):
            raise SpreadDirectory(f"directory {number} is wide")
        return found

    def place(self, directory: Inode, name: bytes) -> tuple[int, bytes, bytes]:
        """(partition, hash, key) of a name, whether it exists or not.

        InvalidRequest, NameTooLong: it can be no name.
        """
        if len(name) > NAME_BYTES_MAX:  # first: the other text quotes the name
            raise NameTooLong(f"a name has {NAME_BYTES_MAX} bytes at most, not {len(name)}")
        if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise InvalidRequest(f"{name!r} cannot be a name")
        name_hash = self.name_hash(directory.number, name)
        if directory.flags & _WIDE:
            partition = partition_of_name(directory.number, True, name_hash)
        else:
            partition = directory.number >> 51
        if self.owners:
            self._check_owner(partition)
        return partition, name_hash, records.dentry_key(partition, directory.number, name_hash, name)

    def named(self, directory: Inode, name: bytes) -> tuple[bytes, int, int]:
        """(key, inode number, kind) of an existing name. NotFound: there is no such name."""
        partition, _, key = self.place(directory, name)
        raw = self.get(key)
        if raw is None:
            raise NotFound(f"there is no {name!r} in directory {directory.number}")
        return key, *records.decode_dentry(partition, raw)

    def grant(self, inode: Inode, rights: int, session: int, now_ns: int) -> bytes:
        """Signed access token (grant) for the chunks of a file.

        TruncationInProgress: the grant must wait for a truncation, whose number must not be given to clients before
        the stores know it. For WRITE the inode's flag TOUCHED must be set; the caller sets it first.
        """
        if inode.number in self.cutting:
            raise TruncationInProgress(inode.number)
        return self.signed(
            rights & GRANT_RIGHTS, session, inode.number, inode.cut, inode.table, inode.volume, now_ns
        )

    def signed(
        self, rights: int, session: int, number: int, cut: int, table: int, volume: int, now_ns: int
    ) -> bytes:
        """Grant for a file with these attributes, without any check."""
        # the format is described in core/grants
        epoch = tag = member = 0
        if volume:  # without a volume there is no right that could be revoked
            epoch, tag = self.map_epoch & EPOCH_MASK, volume_tag(volume)
            member = member_tag(self.access.caller or "")
            if volume in self.access.encrypted:
                rights |= ENCRYPTED
        _out.begin()
        _out.u8(1)
        _out.u8(rights)
        _out.u16(0)
        _out.u64(session)
        _out.u64(number)
        _out.u64(cut)
        _out.u64(now_ns // 1_000_000 + self.grant_ms)
        _out.u8(table if table > 1 else 0)
        _out.u8(epoch >> 16)
        _out.u16(epoch)
        _out.u16(tag)
        _out.u16(member)
        return self._sign(_out.take())

    def take_state(self, base: View) -> None:
        """Read the same records as `base` with the same facts, for a view that extends `base`."""
        for name in VIEW_FIELDS:
            setattr(self, name, getattr(base, name))


VIEW_FIELDS = (
    "locks",
    "get",
    "get_many",
    "scan",
    "snapshot",
    "shard",
    "name_key",
    "name_hash",
    "grant_secret",
    "_sign",
    "grant_ms",
    "pool_keys",
    "next_number",
    "inode_count",
    "serves",
    "check_partition",
    "cutting",
    "owners",
    "shards",
    "tables",
    "map_epoch",
    "lease_ms",
    "_register_leases",
    "_register_lease",
    "watching",
    "rooms",
    "appends",
    "access",
    "trashes",
    "is_open",
    "_recall_delegation",
)


async def _all(waits: list[Callable[[], Awaitable[Any]]]) -> None:
    for wait in waits:
        await wait()


def _directory(find: Callable[[int], Inode], number: int) -> Inode:
    try:
        found = find(number)
    except NotFound:
        raise DirectoryGone(f"there is no directory {number} any more") from None
    if found.mode & _S_IFMT != _S_IFDIR:
        raise NotADirectory(f"inode {number} is not a directory")
    return found


def _spread_directory(number: int) -> Inode:
    """Directory as the caller describes it; only the shard of its inode knows whether it exists."""
    if not 0 < number < 1 << 63:
        raise DirectoryGone(f"there is no directory {number} any more")
    return Inode(number, 0o040000, flags=WIDE)


class Draft:
    """One change while it is decided: inodes read (each once), inodes to be written, and other effects."""

    __slots__ = (
        "view",
        "now_ns",
        "inodes",
        "dirty",
        "effects",
        "reply",
        "opened",
        "linked",
        "closed",
        "sized",
        "intent",
        "born",
        "orphans",
        "adds",
        "sync",
        "parent",
        "then",
        "accounts",
    )

    def __init__(self, view: View, now_ns: int) -> None:
        self.begin(view, now_ns)

    def begin(self, view: View, now_ns: int) -> None:
        """Set all attributes of a new draft."""
        self.view = view
        self.now_ns = now_ns
        self.inodes: dict[int, Inode] = {}
        self.dirty: dict[int, Inode] = {}
        self.effects: dict[bytes, bytes | None] = {}
        self.reply: Any = None
        self.opened = 0
        """Inode on which the session gets one more handle."""
        self.linked = 0
        """Inode that has one more name, and on which the session gets a lease."""
        self.closed = 0
        self.sized = 0
        """File whose size the session has set or reported: it is not delegated any more."""
        self.intent: tuple[int, Intent] | None = None
        """Truncation of which the targets must be notified before the answer is sent."""
        self.born = False
        self.orphans: list[int] = []
        self.adds = False
        """Whether the change is refused in a full engine. A change that adds no records always works."""
        self.sync = False
        self.then: Callable[[], None] | None = None
        """Callback that updates memory when the effects are applied."""
        self.parent: Inode | None = None
        """Directory whose attributes go with the first answer, because the kernel asks for them after each
        change of a name. The stored answer does not contain them."""
        self.accounts: dict[int, QuotaAccount] | None = None
        """Accounts of the volumes whose usage changes."""

    def inode(self, number: int) -> Inode:
        found = self.inodes.get(number)
        if found is None:
            found = self.inodes[number] = self.view.inode(number)
        return found

    def directory(self, number: int) -> Inode:
        return _directory(self.inode, number)

    def entered(self, number: int) -> Inode:
        """A directory that can take names. DirectoryGone: it was removed, even if a session has it open."""
        found = self.directory(number)
        if not found.links or found.flags & _TRASHED:
            raise DirectoryGone(f"directory {number} was removed")
        return found

    def holder(self, number: int) -> Inode:
        """As `View.holder`, with each record read once."""
        found = self.inodes.get(number)
        if found is None:
            try:
                found = self.view.holder(number)
            except NotFound:
                raise DirectoryGone(f"there is no directory {number} any more") from None
            self.inodes[number] = found
        elif found.mode & _S_IFMT != _S_IFDIR:  # a request may name a file twice, once as the directory
            raise NotADirectory(f"inode {number} is not a directory")
        return found

    def entered_holder(self, number: int) -> Inode:
        """As `entered`, for a change of names: returns the record that counts them."""
        found = self.holder(number)
        if not found.links or found.flags & _TRASHED:
            raise DirectoryGone(f"directory {number} was removed")
        return found

    def take_parts(self, directory: Inode, at_least: bool = True) -> None:
        """Merge the stripes of all shards into the directory's record; it is divided no more."""
        if not directory.flags & DIVIDED:
            return
        for part in self.view.parts_of(directory.number):
            striped_dirs.take_in(directory, part.counts)
            self.effects[records.part_key(directory.number, part.shard)] = None
        if at_least:  # repairs values that only damage can cause
            directory.size, directory.links = max(0, directory.size), max(2, directory.links)
        directory.flags &= ~DIVIDED
        self.dirty[directory.number] = directory

    def account(self, volume: int) -> QuotaAccount | None:
        """Account of a volume that this change updates; None if it cannot be read."""
        if self.accounts is None:
            self.accounts = {}
        found = self.accounts.get(volume)
        if found is None and (found := account(self.view, volume)) is not None:
            self.accounts[volume] = found
        return found

    def resized(self, inode: Inode, size: int, session: int = 0, reported: bool = False) -> None:
        """Set the file's size, and count the change in its volume if it has one.

        QuotaExceeded. `reported`: as in `QuotaAccount.grow`.
        """
        if inode.volume and size != inode.size and (found := self.account(inode.volume)) is not None:
            grown = size - inode.size
            if not inode.links and not self._counts(inode):
                found.use.files += 1  # a client that had it open writes to it after its last name was removed
                grown = size
                self.effects[records.numbered_key(records.ORPHAN, inode.number)] = records.ORPHAN_COUNTED
            if grown > 0:
                found.grow(grown, session, reported)
            else:
                found.use.bytes += grown
        inode.size = size
        self.sized = inode.number
        if inode.reserved and inode.reserved <= size:
            inode.reserved = 0
            self.then = partial(self.view.appends.ended, inode.number)

    def _counts(self, inode: Inode) -> bool:
        """Whether an inode without a name counts in its volume."""
        key = records.numbered_key(records.ORPHAN, inode.number)
        return (self.effects.get(key) or self.view.get(key)) == records.ORPHAN_COUNTED

    def stamp(self, inode: Inode, content: bool = False) -> None:
        """Set ctime to now (and mtime, if the content changes) and raise the change counter.

        Times never go back.
        """
        now = self.now_ns if self.now_ns > inode.ctime_ns else inode.ctime_ns
        inode.ctime_ns = now
        if content:
            inode.mtime_ns = now
        inode.change += 1
        self.dirty[inode.number] = inode

    def keep(self, inode: Inode) -> None:
        """Write the record of a file in which nothing has changed that clients see."""
        self.effects[records.inode_key(inode.number)] = records.encode_inode(inode)

    def birth(self, partition: int, mode: int, uid: int, gid: int, volume: int) -> Inode:
        """Create an inode with the next number; all its times are now. The caller sets the other fields."""
        view, self.adds = self.view, True
        if view.owners and view.is_elsewhere(partition):
            number = view.number_of_birth(partition)  # the participant that locks the number counts it, too
        else:
            # no record of it has been read: a new directory may choose any partition
            if view.check_partition is not None:
                view.check_partition(partition)
            number = partition << 51 | view.next_number
            self.born = True
            self.effects[records.COUNTS_KEY] = records.encode_counts(view.inode_count + 1)
        born = Inode.__new__(Inode)
        born.number, born.mode, born.links, born.table, born.chunk_bits = number, mode, 1, 1, 20
        born.size = born.blocks = born.cut = born.rdev = born.flags = born.parent = born.punches = (
            born.reserved
        ) = 0
        born.change, born.target = 1, b""
        born.uid, born.gid, born.volume = uid, gid, volume
        born.atime_ns = born.mtime_ns = born.ctime_ns = born.birth_ns = self.now_ns
        if volume and (found := self.account(volume)) is not None:
            found.add_file()
        self.inodes[number] = self.dirty[number] = born
        return born

    def put_acl(self, inode: Inode, name: bytes, acl: Acl) -> None:
        """Store an access control list of the inode, which is to be written."""
        inode.flags |= records.HAS_XATTRS | records.HAS_ACL
        self.adds = True
        self.effects[records.xattr_key(inode.number, name)] = records.XATTR_HEAD + encode_acl(acl)

    def discard(self, inode: Inode, directory: int, name: bytes) -> None:
        """As `drop_name`, for this name.

        The last name puts the inode into its volume's trash, if there is one.
        """
        if inode.volume and (inode.is_directory or inode.links == 1) and inode.number != inode.volume:
            found = self.account(inode.volume)
            record = found.record if found is not None else None
            if record is not None and record.trash_s:
                inode.flags |= TRASHED
                self.stamp(inode)
                entry = Trashed(inode.ctime_ns, inode.ctime_ns + record.trash_s * 10**9, directory, name)
                key = volume_key(TRASH, inode.volume, _NUMBER.pack(inode.number))
                self.effects[key] = encode_trashed(entry)
                self.view.trashes.add(inode.volume)
                return
        self.drop_name(inode)

    def drop_name(self, inode: Inode) -> None:
        """Remove one name of the inode (a directory has only one).

        Without names the inode becomes an orphan, which is kept while a session has it open.
        """
        inode.links = 0 if inode.mode & _S_IFMT == _S_IFDIR else inode.links - 1
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
        """Grant for a file; b"" if none is wanted, or there is nothing to grant."""
        if not rights & 3 or inode.mode & _S_IFMT != _S_IFREG:
            return b""
        if inode.volume and rights & WRITE and self.view.access.restricted:
            self.view.access.check_change(inode.volume)
        if rights & 2 and not inode.flags & _TOUCHED:
            inode.flags |= _TOUCHED
            self.dirty[inode.number] = inode
        if self.intent is not None and self.intent[0] == inode.number:
            # The answer that carries the grant is sent only when all targets have done the truncation.
            return self.view.signed(
                rights & GRANT_RIGHTS,
                session,
                inode.number,
                inode.cut,
                inode.table,
                inode.volume,
                self.now_ns,
            )
        return self.view.grant(inode, rights, session, self.now_ns)

    def cut(self, inode: Inode, size: int) -> None:
        """Truncate the file at `size`, which is not above its present size.

        If there may be chunks, the truncate number is raised, and an intent is stored by which the targets are
        notified even after a crash.
        """
        if inode.number in self.view.cutting:
            raise TruncationInProgress(inode.number)
        self.resized(inode, size)
        # the bytes on their way were written before the truncation, and are removed with the rest
        if inode.reserved:
            inode.reserved = 0
            self.then = partial(self.view.appends.ended, inode.number)
        inode.blocks = min(inode.blocks, records.blocks_of(size))
        if inode.flags & records.TOUCHED:
            inode.punches = 0
            self._intend(inode, size, 0)
        self.stamp(inode, content=True)

    def punch(self, inode: Inode, offset: int, end: int) -> None:
        """Make a hole of [offset, end) in the file; its size stays. Otherwise as `cut`."""
        if inode.number in self.view.cutting:
            raise TruncationInProgress(inode.number)
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
        """All effects of the change; each changed inode is encoded here, once."""
        effects = self.effects
        if self.accounts is not None:
            for changed in self.accounts.values():
                use_key, use = changed.effect()
                effects[use_key] = use
        access = self.view.access if self.view.access.restricted else None
        for inode in self.dirty.values():
            if access is not None and inode.volume:
                access.check_change(inode.volume)
            if type(inode) is Inode:
                effects[records.inode_key(inode.number)] = records.encode_inode(inode)
            else:
                effects.update(striped_dirs.effects_of(inode))
        return effects


Decision = Callable[[View, Any, int], Draft]


def attr_of(inode: Inode) -> Attr:
    """Attributes of an inode as clients see them."""
    attr = Attr.__new__(Attr)
    attr.clear()
    attr.inode, attr.mode, attr.links = inode.number, inode.mode, inode.links
    attr.uid, attr.gid, attr.size, attr.blocks = inode.uid, inode.gid, inode.size, inode.blocks
    attr.atime_ns, attr.mtime_ns, attr.ctime_ns = inode.atime_ns, inode.mtime_ns, inode.ctime_ns
    attr.rdev, attr.table, attr.chunk_bits = inode.rdev, inode.table, inode.chunk_bits
    attr.change, attr.parent, attr.volume = inode.change, inode.parent, inode.volume
    attr.flags = inode.flags & _SHOWN
    attr.cut = inode.cut
    if inode.cut:
        attr.punches = inode.punches
    if inode.flags & _TRASHED:  # the trash entry counts as a link, but is no name
        attr.links = 0 if inode.mode & _S_IFMT == _S_IFDIR else inode.links - 1
    return attr


def fill_attr(message: meta_pb2.Attr, inode: Inode) -> None:
    """As `attr_of`, for an empty protobuf message."""
    attr_of(inode).copy_to(message)


def elsewhere_entry(number: int, kind: int) -> InodeEntry:
    """Entry for an inode of another shard with what its name says: number and kind."""
    return InodeEntry(Attr(inode=number, mode=kind << 12), elsewhere=True)
