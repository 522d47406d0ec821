"""Cache of attributes, names and open inodes of one client.

Attributes and names (absent names too) carry the time at which they were true; the caller says how old they
may be. An entry under a lease is current, whatever its age. This client's own changes drop entries, and both
caches are bounded. This module never sends a request.

An open inode has one `OpenInode`, shared by all its handles: its layout, its newest attributes, the grant
(access token) that every chunk request carries, and the writer's state. Used by vfs, the reader and the
writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import repeat
from typing import Any

from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.leases import InodeLease, Leases
from nvpool.client.state.options import ClientOptions
from nvpool.core import grants
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import StaleGrant
from nvpool.core.primitives import ByteReader
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.poolmap.file_layout import Layout
from nvpool.rpc.messages import direntries
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.security.volume_keys import VolumeKey

S_IFMT, S_IFREG = 0o170000, 0o100000
XATTR_FLAG, WIDE_FLAG, DIVIDED_FLAG, ACL_FLAG = 1, 4, 32, 128
NEVER_S = float("-inf")
NO_END = 1 << 63
"""An end that no file reaches."""


_GRANT_BYTES, _GRANT_VERSION, _ENCRYPTED = grants.GRANT_BYTES, 1, grants.ENCRYPTED
_S_IFMT, _S_IFREG, _NEVER_S, _NO_END, _NAME_MAX = S_IFMT, S_IFREG, NEVER_S, NO_END, NAME_BYTES_MAX
_layout_of = lru_cache(maxsize=64)(Layout)
_in = ByteReader()


def typed_attr(attr: Any) -> Attr:
    """These attributes of a reply as the object that the cache holds."""
    return attr if type(attr) is Attr else Attr.FromString(attr.SerializeToString())


class OpenInode:
    """An inode that is open on this client.

    `size` is the size for applications on this client: the service's size merged with unreported local
    writes.
    """

    __slots__ = (
        "inode",
        "layout",
        "chunk_bits",
        "chunk_mask",
        "attr",
        "attr_born_s",
        "cut",
        "truncated",
        "grant",
        "grant_session",
        "grant_cut",
        "grant_rights",
        "grant_half_ms",
        "grant_used",
        "handles",
        "opened",
        "lanes",
        "written",
        "ahead",
        "renewal",
        "located",
        "changes",
        "owes",
        "denied",
        "missed",
        "looking",
        "looking_s",
        "foreign",
        "lost",
        "unreported",
        "fetching",
        "unsure",
        "ended",
        "volume",
        "paid",
        "encrypted",
        "key",
        "delegation",
    )

    def __init__(self, attr: Attr) -> None:
        """`attr`: its present attributes, which may be those of a protobuf message."""
        self.begin(typed_attr(attr))

    def begin(self, attr: Attr) -> None:
        """Set all attributes of a new object; `attr`: the present ones of the inode."""
        one, cut = 1, attr.cut
        self.attr = attr
        self.inode = attr.inode
        self.layout = _layout_of(attr.table, attr.chunk_bits)
        self.chunk_bits = attr.chunk_bits
        self.chunk_mask = (one << (attr.chunk_bits & 63)) - 1
        self.attr_born_s = _NEVER_S
        self.volume = attr.volume
        # the size up to which the volume's quota is reserved for the file
        self.paid = attr.size if attr.volume else _NO_END
        self.encrypted = False  # whether its volume is encrypted, as a grant has said
        self.key: VolumeKey | None = None  # the volume's key, from the first read or write of its bytes on
        self.cut = cut
        # the last truncate number that was a truncation; later ones were punched holes
        self.truncated = cut - attr.punches
        self.grant = b""
        self.grant_session = 0
        self.grant_cut = 0
        self.grant_rights = 0
        self.grant_half_ms = 0
        self.grant_used = False
        self.handles = 0
        self.opened = 0  # registrations at the shard to be released with the last handle
        self.lanes: dict = {}  # chunk index -> the chunk client's queue to its target, by the newest map
        self.written = None  # the writer's state, from the first write on
        self.ahead: set = set()  # read-ahead states of handles; a write drops their bytes
        self.renewal: asyncio.Task[None] | None = None  # the request for a new grant, one at a time
        self.located: dict = {}  # chunk index -> its location for short-circuit reads
        self.changes = 0  # grows when none of the locations is valid any more
        self.owes = 0  # located chunks, minus reads that have used a location
        self.denied = 0  # misses that were not located because of `owes`
        self.missed = False  # a read has gone to a store; for most files that first read is the only one
        # the oldest unanswered request for attributes; `looking_s`: when it was sent
        self.looking: asyncio.Task[None] | None = None
        self.looking_s = _NEVER_S
        self.foreign = False  # another client has changed the inode since the last lock request here
        # its locks ended before this client released them: users must open the file again
        self.lost = False
        # opened under a lease, unreported: the inode may be gone, its bytes read as zeros
        self.unreported = False
        # its shard may have forgotten changes: accept the next change number, even a lower one
        self.unsure = False
        # number of lost chains, and a size of the file after those losses: nothing was lost behind that size
        self.ended = 0, 0
        self.fetching = None  # the reader's read of a whole small file, in flight
        # the lease that came with the create: while it is held, and until its first end, no other client sees the
        # file's attributes before this one has reported its data
        self.delegation: InodeLease | None = None

    @property
    def size(self) -> int:
        return self.attr.size if self.written is None else max(self.attr.size, self.written.end)

    def give_up_grant(self) -> None:
        """Forget the rights of the grant after a revocation, so that the next grant replaces it."""
        self.grant_rights = 0

    def adopt_grant(self, raw: bytes, now_ms: int) -> None:
        """Use the grant `raw` from now on, unless it is weaker than the present one."""
        if not raw:
            return
        if len(raw) != _GRANT_BYTES or raw[0] != _GRANT_VERSION:
            raise StaleGrant("not a grant of a version that is known here")
        source = _in
        source.open(raw)
        source.u8()
        rights = source.u8()
        source.u16()
        session = source.u64()
        source.u64()
        cut = source.u64()
        ends_ms = source.i64()
        if cut < self.cut or (self.grant_rights & ~rights and cut == self.grant_cut):
            return
        self.grant = raw
        self.grant_session = session
        self.grant_cut = cut
        self.grant_rights = rights & ~_ENCRYPTED
        self.encrypted = rights & _ENCRYPTED != 0
        self.grant_half_ms = now_ms + (ends_ms - now_ms >> 1)
        self.grant_used = False


class CompleteDirectory:
    """The complete list of names of a directory.

    The list is valid while all changes of the directory are this client's; the directory's change number
    proves that. While the list is valid, a name that is not in the list does not exist, so no request is
    needed: programs that unpack or copy a tree look for each name before they create it.

    A directory that this client created is complete from the start; another one is listed first (see
    vfs/complete_dirs). Until the listing ends, `ours` has the names that this client changes meanwhile, for
    which the listing may return the old state.
    """

    __slots__ = ("change", "names", "ours")

    def __init__(self, change: int, ours: set[bytes] | None = None):
        self.change = change
        self.names: set[bytes] = set()
        self.ours = ours


def _change_of(attr: Any) -> int:
    """The change number of cached attributes, which may be a record of a listing."""
    if type(attr) is bytes:
        return direntries.change_of(attr)
    change: int = attr.change
    return change


def _cut_of(grant: bytes) -> int:
    """The truncate number in a grant."""
    source = _in
    source.open(grant)
    source.u32()
    source.u64()
    source.u64()
    return source.u64()


def _decoded(attr: Any) -> Attr:
    """Cached attributes, which may be a record of a listing, as an object."""
    return direntries.attr_of(attr) if type(attr) is bytes else attr


_WHOLE_DIRECTORIES_MAX = 64
_RENAMED_MAX = 4096


class MetadataCache:
    """Attributes, entries and open inodes of one client."""

    def __init__(self, options: ClientOptions, leases: Leases, events: ClientEvents):
        self.leases = leases
        self.open: dict[int, OpenInode] = {}
        # an attribute value is a record of rpc/messages/direntries if it came from a listing
        self.attrs: dict[int, tuple[Attr | bytes, float]] = {}
        # (inode, when it was true, when it was requested, the lease on the inode from the same reply)
        self.entries: dict[tuple[int, bytes], tuple[int, float, float, InodeLease | None]] = {}
        # directory -> time of this client's last change of a name in it
        self.renamed_s: dict[int, float] = {}
        self.renamed_floor_s = NEVER_S
        self.complete_dirs: dict[int, CompleteDirectory] = {}
        self.whole_names = 0
        """Number of names in complete directories."""
        self.trusted_from_s = _NEVER_S
        self.name_cover = 0
        """The inode whose lease covers the name that `entry` has found last; 0: there is none."""
        self.options = options
        self._cached_max = options.cached_entries
        self._events = events

    # -- attributes ----------------------------------------------------------------------------------------------------

    def attr(self, inode: int, age_s: float) -> Attr | None:
        """The attributes, if under a lease or true within the last `age_s`; else None."""
        return self.attr_at(inode, age_s, self.leases.now_s())

    def attr_at(self, inode: int, age_s: float, now_s: float) -> Attr | None:
        """As `attr`, for a caller that has just read the clock."""
        file = self.open.get(inode)
        if file is not None:
            if (
                not self._is_fresh(file.attr_born_s, age_s, now_s)
                and self.leases.held_at(inode, now_s) is None
            ):
                return None
            return file.attr
        known = self.attrs.get(inode)
        if known is None:
            return None
        if not self._is_fresh(known[1], age_s, now_s) and self.leases.held_at(inode, now_s) is None:
            return None
        return _decoded(known[0])

    def _is_fresh(self, born_s: float, age_s: float, now_s: float) -> bool:
        return born_s + age_s > now_s and born_s >= self.trusted_from_s

    def newer(self, inode: int, change: int) -> Attr | None:
        """The cached attributes if they are newer than `change`; else None.

        A caller with a reply of number `change` thus sees that another reply has overtaken it.
        """
        opened = self.open.get(inode)
        held = (
            opened.attr
            if opened is not None and not opened.unsure
            else self.attrs.get(inode, (None, NEVER_S))[0]
        )
        return None if held is None or _change_of(held) <= change else _decoded(held)

    def known_attr(self, inode: int) -> Attr | None:
        """The newest attributes that the client ever received, however old they are."""
        opened = self.open.get(inode)
        held = opened.attr if opened is not None else self.attrs.get(inode, (None, NEVER_S))[0]
        return None if held is None else _decoded(held)

    def flags(self, inode: int) -> int | None:
        """The flags of the cached attributes, however old they are."""
        attr = self.known_attr(inode)
        return None if attr is None else attr.flags

    def mode(self, inode: int) -> int | None:
        """The mode of the cached attributes, however old. The type of an inode does not change."""
        attr = self.known_attr(inode)
        return None if attr is None else attr.mode

    def entries_of(self, directory: int) -> int:
        """The last known number of names in the directory; 0 if it is not known."""
        attr = self.known_attr(directory)
        return 0 if attr is None else attr.size

    def is_believed(self, born_s: float, age_s: float) -> bool:
        """Whether data requested at `born_s` may be used for `age_s`.

        False if a lock was acquired since.
        """
        return self._is_fresh(born_s, age_s, self.leases.now_s())

    def distrust(self) -> None:
        """Distrust all data learned before now that is not under a lease.

        Called after a lock was acquired: this client must see what others did before they released the lock.
        Data under a lease needs no distrust, because its lease would have been recalled.
        """
        self.trusted_from_s = self.leases.now_s()

    def put_attr(self, attr: Any, *, ours: bool = False) -> None:
        """Cache `attr`, unless the cached attributes are newer: replies may overtake one another.

        `ours`: the reply to a write of this client. Then a change number that grew by one is not a foreign
        change. The attributes may be those of a protobuf message.
        """
        self._put(typed_attr(attr), ours, self.leases.now_s())

    def _put(self, attr: Attr, ours: bool, now_s: float) -> None:
        inode: Any = attr.inode
        opened = self.open.get(inode)
        if opened is None:
            self.put_closed(attr, inode, now_s)
            return
        self._note_directory(attr, inode)
        present = opened.attr
        if attr.change < present.change and not opened.unsure:
            return
        opened.unsure = False
        if attr.change != present.change:
            self.notify_changed(opened)
        if attr.change > present.change + ours:
            opened.foreign = True
        opened.attr = attr
        opened.attr_born_s = now_s
        if attr.cut > opened.cut:
            before, opened.cut, opened.truncated = opened.cut, attr.cut, attr.cut - attr.punches
            if opened.truncated > before:
                if opened.written is not None:
                    for listener in self._events.file_truncated:
                        listener(opened)
                if opened.volume:
                    opened.paid = opened.size

    def notify_changed(self, file: OpenInode) -> None:
        """Notify the other parts of the client that the open inode has changed."""
        for listener in self._events.file_changed:
            listener(file)

    def put_closed(self, attr: Attr, inode: int, now_s: float) -> Attr:
        """As `put_attr`, for an inode that is not open; return the newest known attributes."""
        self._note_directory(attr, inode)
        newest: Any = attr
        attrs = self.attrs
        known = attrs.pop(inode, None)
        if known is not None and _change_of(known[0]) > attr.change:
            newest = known[0]
        attrs[inode] = (newest, now_s)
        if len(attrs) > self._cached_max:
            _trim(attrs, self._cached_max)
        return _decoded(newest)

    def _note_directory(self, attr: Attr, inode: int) -> None:
        """Forget the complete list of names of a directory that others have changed."""
        if not self.complete_dirs:
            return
        whole = self.complete_dirs.get(inode)
        if whole is not None and attr.change > whole.change:
            self.forget_whole(inode)

    def put_attrs(self, listed: DirectoryPage) -> bool:
        """Cache the attributes of all entries of a listing; return whether this was possible.

        False: nothing has changed, and the caller must call `put_attr` for each entry, because one of the
        inodes is open or has newer attributes here.
        """
        attrs, inodes = self.attrs, set(listed.inodes)
        if not self.open.keys().isdisjoint(inodes) or not self.complete_dirs.keys().isdisjoint(inodes):
            return False
        known = attrs.keys() & inodes
        if known and any(
            _change_of(attrs[inode][0]) > change
            for inode, change in zip(listed.inodes, listed.changes, strict=True)
            if inode in known
        ):
            return False
        for inode in known:
            del attrs[inode]  # reinsert at the end: the first ones of the dict are the oldest
        attrs.update(zip(listed.inodes, zip(listed.records, repeat(self.leases.now_s())), strict=False))
        for old in too_old(attrs, self.options.cached_entries):
            del attrs[old]
        return True

    def reset_inodes(self, concerns: Callable[[int], bool]) -> None:
        """Accept the next attributes of these inodes, whatever their change number.

        Called when a shard's change numbers may have run backwards.
        """
        for inode in [inode for inode in self.attrs if concerns(inode)]:
            del self.attrs[inode]
            self.leases.forget(inode)
        for inode in [inode for inode in self.complete_dirs if concerns(inode)]:
            self.forget_whole(inode)
        for opened in self.open.values():
            if concerns(opened.inode):
                opened.attr_born_s, opened.unsure = NEVER_S, True
                self.leases.forget(opened.inode)

    def forget_attr(self, inode: int) -> None:
        self.leases.forget(inode)
        self.grow_old(inode)

    def grow_old(self, inode: int) -> None:
        """Mark the cached attributes as outdated."""
        opened = self.open.get(inode)
        if opened is not None:
            opened.attr_born_s = NEVER_S
        held = self.attrs.get(inode)
        if held is not None:
            self.attrs[inode] = (held[0], NEVER_S)  # kept, because its change number reveals older replies

    # -- entries -------------------------------------------------------------------------------------------------------

    def entry(self, parent: int, name: bytes, age_s: float) -> int | None:
        """The inode of the name. 0: the name does not exist. None: not known, or older than `age_s`.

        A name is known to be absent only under a lease on its directory.
        """
        return self.entry_at(parent, name, age_s, self.leases.now_s())

    def entry_at(self, parent: int, name: bytes, age_s: float, now_s: float) -> int | None:
        """As `entry`, for a caller that has just read the clock."""
        self.name_cover = 0
        known = self.entries.get((parent, name))
        if known is None:
            return None
        inode: Any = known[0]
        if inode and self._is_fresh(known[1], age_s, now_s) and self.leases.is_news(inode, known[2]):
            return inode
        self.name_cover = self._cover(parent, known, now_s)
        return inode if self.name_cover else None

    def cover(self, parent: int, name: bytes, inode: int) -> int:
        """The inode whose lease covers the name of `inode`: its own or the directory's; 0: none."""
        known = self.entries.get((parent, name))
        if known is None or known[0] != inode:
            return 0
        return self._cover(parent, known, self.leases.now_s())

    def _cover(self, parent: int, known: tuple[int, float, float, InodeLease | None], now_s: float) -> int:
        inode: Any = known[0]
        sent_s = known[2]
        if inode:
            held = self.leases.held_at(inode, now_s)
            if held is not None:
                lease = known[3]
                if sent_s >= held.since_s or (lease is not None and held.number == lease.number):
                    return inode
        held = self.leases.held_at(parent, now_s)
        return parent if held is not None and sent_s >= held.since_s else 0

    def names_of(self, inode: int) -> list[tuple[int, bytes]]:
        """Known names (directory, name) of the inode. Scans all entries, so call this in rare cases only."""
        return [place for place, known in self.entries.items() if known[0] == inode]

    def put_entry(
        self, parent: int, name: bytes, inode: int, sent_s: float, lease: InodeLease | None = None
    ) -> None:
        """Cache the inode of a name. `inode` 0: the name does not exist.

        `lease`: the inode's lease, from the same reply. Ignored if this client has changed names of the
        directory since `sent_s`, the time of the request.
        """
        if sent_s <= self._renamed_s(parent):
            return
        self._put_entry(parent, name, inode, sent_s, lease, self.leases.now_s())

    def _put_entry(
        self, parent: int, name: bytes, inode: int, sent_s: float, lease: InodeLease | None, now_s: float
    ) -> None:
        entries = self.entries
        key = (parent, name)
        entries.pop(key, None)
        entries[key] = (inode, now_s, sent_s, lease)
        if len(entries) > self._cached_max:
            _trim(entries, self._cached_max)

    def _renamed_s(self, parent: int) -> float:
        """When this client has last changed a name in the directory, or may have."""
        known: Any = self.renamed_s.get(parent)
        return self.renamed_floor_s if known is None else known

    def put_entries(
        self,
        parent: int,
        names: list[bytes],
        inodes: list[int],
        sent_s: float,
        leases: list[InodeLease | None],
    ) -> None:
        """As `put_entry` for each name.

        Names that are known already keep their place in the order of eviction.
        """
        if sent_s <= self._renamed_s(parent):
            return
        known = zip(inodes, repeat(self.leases.now_s()), repeat(sent_s), leases)
        self.entries.update(zip(zip(repeat(parent), names), known, strict=False))
        for old in too_old(self.entries, self.options.cached_entries):
            del self.entries[old]

    def forget_entry(self, parent: int, name: bytes) -> None:
        """Drop a name that this client is about to change or has changed."""
        self.forget_entry_at(parent, name, self.leases.now_s())

    def forget_entry_at(self, parent: int, name: bytes, now_s: float) -> None:
        """As `forget_entry`, for a caller that has just read the clock."""
        self.entries.pop((parent, name), None)
        renamed = self.renamed_s
        renamed.pop(parent, None)
        renamed[parent] = now_s
        if len(renamed) > _RENAMED_MAX:
            for old in too_old(renamed, _RENAMED_MAX):
                self.renamed_floor_s = max(self.renamed_floor_s, renamed.pop(old))

    def put_own_entry(
        self, parent: int, name: bytes, inode: int, sent_s: float, lease: InodeLease | None = None
    ) -> None:
        """Cache the result of this client's own change, sent at `sent_s` and just answered.

        `inode` 0: no such name.
        """
        self.put_own_entry_at(parent, name, inode, sent_s, lease, self.leases.now_s())

    def put_own_entry_at(
        self, parent: int, name: bytes, inode: int, sent_s: float, lease: InodeLease | None, now_s: float
    ) -> None:
        """As `put_own_entry`, for a caller that has just read the clock."""
        self.forget_entry_at(parent, name, now_s)
        self._put_entry(parent, name, inode, sent_s, lease, now_s)

    # -- complete directories ------------------------------------------------------------------------------------------

    def born_directory(self, attr: Attr) -> None:
        """Record a directory that this client created with these attributes: it is complete and empty."""
        self._hold_whole(attr.inode, CompleteDirectory(attr.change))

    def begin_whole(self, attr: Attr) -> CompleteDirectory:
        """Start to record the names of a directory. Then call `put_names` and `end_whole`."""
        whole = CompleteDirectory(attr.change, set())
        self._hold_whole(attr.inode, whole)
        return whole

    def _hold_whole(self, inode: int, whole: CompleteDirectory) -> None:
        self.forget_whole(inode)
        self.complete_dirs[inode] = whole
        self._bound_whole()

    def _bound_whole(self) -> None:
        while (
            len(self.complete_dirs) > _WHOLE_DIRECTORIES_MAX or self.whole_names > self.options.cached_entries
        ):
            self.forget_whole(next(iter(self.complete_dirs)))

    def put_names(self, inode: int, whole: CompleteDirectory, names: Iterable[bytes]) -> bool:
        """Add listed names; return whether the recording goes on.

        False: others have changed the directory, or there is no space left.
        """
        if self.complete_dirs.get(inode) is not whole:
            return False
        self.whole_names -= len(whole.names)
        whole.names.update(name for name in names if name not in whole.ours)
        self.whole_names += len(whole.names)
        self._bound_whole()
        return self.complete_dirs.get(inode) is whole

    def end_whole(self, inode: int, whole: CompleteDirectory, complete: bool) -> None:
        """End the recording. `complete`: every name of the directory was listed."""
        if complete:
            whole.ours = None
        elif self.complete_dirs.get(inode) is whole:
            self.forget_whole(inode)

    def is_whole(self, inode: int) -> bool:
        """Whether the directory's names are completely known, or are being listed."""
        return inode in self.complete_dirs

    def named_in_whole(self, parent: Attr | None, inode: int, name: bytes, exists: bool) -> None:
        """Record that this client's change has created or removed a name in the directory `inode`.

        `parent`: the directory's attributes after the change; None: unknown. If the change number is not the
        next one, others have changed the directory too, and the recorded names are dropped.
        """
        whole = self.complete_dirs.get(inode)
        if whole is None:
            return
        if parent is None or parent.change != whole.change + 1:
            self.forget_whole(inode)
            return
        self.whole_names -= len(whole.names)
        if exists:
            whole.names.add(name)
        else:
            whole.names.discard(name)
        if whole.ours is not None:
            whole.ours.add(name)
        self.whole_names += len(whole.names)
        whole.change = parent.change

    def is_absent(self, parent: int, name: bytes, age_s: float) -> bool:
        """Whether the name is known to be absent.

        The directory is completely known, and its attributes are under a lease or at most `age_s` old.
        """
        return self.is_absent_at(parent, name, age_s, self.leases.now_s())

    def is_absent_at(self, parent: int, name: bytes, age_s: float, now_s: float) -> bool:
        """As `is_absent`, for a caller that has just read the clock."""
        if not self.is_missed(parent, name):
            return False
        attr = self.attr_at(parent, age_s, now_s)
        if attr is None:
            return False
        whole = self.complete_dirs[parent]
        return attr.change == whole.change

    def is_missed(self, parent: int, name: bytes) -> bool:
        """Whether the directory was completely known and lacks the name.

        False for a name that is too long.
        """
        whole = self.complete_dirs.get(parent)
        if whole is None or whole.ours is not None:
            return False
        return name not in whole.names and len(name) <= _NAME_MAX

    def forget_whole(self, inode: int) -> None:
        whole = self.complete_dirs.pop(inode, None)
        if whole is not None:
            self.whole_names -= len(whole.names)

    # -- open inodes ---------------------------------------------------------------------------------------------------

    def hold(self, attr: Any) -> OpenInode:
        """Count one more handle of the inode of `attr`; return its open inode."""
        found = typed_attr(attr)
        inode: Any = found.inode
        opened = self.open.get(inode)
        if opened is None:
            opened = self.open[inode] = OpenInode(found)
            self.attrs.pop(inode, None)
        opened.handles += 1
        self._put(found, False, self.leases.now_s())
        return opened

    def hold_new(self, attr: Attr, inode: int, now_s: float) -> OpenInode:
        """As `hold`, for an inode that is not open; `attr` was true at `now_s`, or is under a lease."""
        opened = OpenInode.__new__(OpenInode)
        opened.begin(attr)
        opened.attr_born_s = now_s
        opened.handles = 1
        self.open[inode] = opened
        self.attrs.pop(inode, None)
        return opened

    def hold_leased(self, inode: int, grant: bytes, now_s: float, now_ms: int) -> OpenInode | None:
        """As `hold`, for a file that is not open, with the cached attributes and this grant.

        The caller has a lease on the inode, so the attributes are current. None: no attributes are cached, the
        inode is not a regular file with a name, or the grant is of no use. Then nothing has happened.
        """
        known = self.attrs.get(inode)
        if known is None or len(grant) != _GRANT_BYTES or grant[0] != _GRANT_VERSION:
            return None
        attr = _decoded(known[0])
        if attr.mode & _S_IFMT != _S_IFREG or not attr.links or _cut_of(grant) < attr.cut:
            return None
        opened = self.hold_new(attr, inode, now_s)
        opened.adopt_grant(grant, now_ms)
        return opened

    def drop(self, opened: OpenInode) -> bool:
        """Count one handle less; return whether it was the last one, which closes the inode."""
        opened.handles -= 1
        if opened.handles > 0:
            return False
        inode: Any = opened.inode
        if self.open.get(inode) is opened:
            del self.open[inode]
            if opened.attr.links:
                self.attrs[inode] = (opened.attr, opened.attr_born_s)
        return True


def _trim(known: dict[Any, Any], count_max: int) -> None:
    """Drop the oldest entries."""
    for old in too_old(known, count_max):
        del known[old]
