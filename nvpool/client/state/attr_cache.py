"""What this client knows of names and inodes, for a time.

Attributes and entries (negative ones too) carry the time at which they were true; who asks says how old they may be. Own
changes forget them, and both are bounded. What there is a lease on is true now, whatever its age. An
inode that is open has one `OpenInode`, shared by all its handles: its layout, its newest attributes, the grant that every
chunk request carries, and what the writer holds of it. Called by vfs, reader and writer; asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat

from nvpool.client.state.leases import Lease, Leases
from nvpool.client.state.options import ClientOptions
from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.poolmap.layout import Layout
from nvpool.rpc.messages.direntries import Listed, attr_of, change_of
from nvpool.rpc.v1.meta_pb2 import Attr
from nvpool.security.volume_keys import VolumeKey

S_IFMT, S_IFREG = 0o170000, 0o100000
XATTR_FLAG, WIDE_FLAG, DIVIDED_FLAG, ACL_FLAG = 1, 4, 32, 128
NEVER_S = float("-inf")
NO_END = 1 << 63
"""No file ends there."""


class OpenInode:
    """One inode that is open here. `size` is what an application on this client has to see: the service's number merged
    with what was written here and not yet reported."""

    __slots__ = ("inode", "layout", "chunk_bits", "chunk_mask", "attr", "attr_born_s", "cut", "truncated", "grant",
                 "grant_session", "grant_cut", "grant_rights", "grant_half_ms", "grant_used", "handles", "opened", "lanes",
                 "written", "ahead", "renewal", "located", "changes", "owes", "denied", "missed",
                 "looking", "looking_s", "foreign", "lost", "untold", "fetching", "unsure", "ended", "volume",
                 "paid", "encrypted", "key")

    def __init__(self, attr: Attr) -> None:
        self.inode = attr.inode
        self.layout = Layout(attr.table, attr.chunk_bits)
        self.chunk_bits = attr.chunk_bits
        self.chunk_mask = (1 << attr.chunk_bits) - 1
        self.attr = attr
        self.attr_born_s = NEVER_S
        self.volume = attr.volume
        self.paid = attr.size if attr.volume else NO_END  # so long the file may be by what its volume has promised
        self.encrypted = False  # of an encrypted volume, as a grant has told
        self.key: VolumeKey | None = None  # of that, from the first read or write of its bytes on
        self.cut = attr.cut
        self.truncated = attr.cut - attr.punches  # the last cut number that was a truncation; later ones were holes
        self.grant = b""
        self.grant_session = 0
        self.grant_cut = 0
        self.grant_rights = 0
        self.grant_half_ms = 0
        self.grant_used = False
        self.handles = 0
        self.opened = 0         # registrations at the shard to be released with the last handle
        self.lanes: dict = {}   # chunk index -> the chunkclient's lane to its target, of the newest map
        self.written = None     # the writer's state, from the first write on
        self.ahead: set = set()  # handles with read-ahead, to be told of writes
        self.renewal = None     # one question for a new grant at a time
        self.located: dict = {}  # chunk index -> where the shortcut knows it to lie
        self.changes = 0        # grows when nothing of that holds any longer
        self.owes = 0           # chunks that were located and reads that have not hit yet
        self.denied = 0         # misses that could not be located, for that
        self.missed = False     # a read has gone to a store: the first one of many files is the only one
        self.looking = None     # the oldest question for attributes that is out, and since when
        self.looking_s = NEVER_S
        self.foreign = False    # somebody else has changed it since who asks for locks last looked
        self.lost = False       # our locks on it ended before we gave them back: whoever has it open must open it anew
        self.untold = False     # opened by a lease: without it the inode may be gone, and its bytes read as zeros
        self.unsure = False     # its shard may have forgotten changes: the next number counts, lower or not
        self.ended = 0, 0       # losses of chains, and a size that the file had after them: nothing was lost behind it
        self.fetching = None    # the reader's: the whole of a small file, on its way

    @property
    def size(self) -> int:
        return self.attr.size if self.written is None else max(self.attr.size, self.written.end)

    def give_up_grant(self) -> None:
        """Not all of its rights are ours any more: the next grant is used, whatever it allows."""
        self.grant_rights = 0

    def adopt_grant(self, raw: bytes, now_ms: int) -> None:
        """Use `raw` from now on, when it is not weaker than what we have."""
        if not raw:
            return
        rights, session, cut, ends_ms = grants.terms(raw)
        if cut < self.cut or (self.grant_rights & ~rights and cut == self.grant_cut):
            return
        self.grant = raw
        self.grant_session = session
        self.grant_cut = cut
        self.grant_rights = rights & ~grants.ENCRYPTED
        self.encrypted = bool(rights & grants.ENCRYPTED)
        self.grant_half_ms = now_ms + (ends_ms - now_ms) // 2
        self.grant_used = False


class WholeDirectory:
    """All names of a directory, while each of its changes since they were known was ours: its change number tells.

    So the absence of a name is known without asking for it, while the directory has this number: what unpacks or copies a tree
    looks for each name before it makes it. Of a directory that was made here all names are known; of another one they are
    listed (lookup/complete_dirs), and until that is over `ours` has what we have changed meanwhile, of which the listing may
    tell what was.
    """

    __slots__ = ("change", "names", "ours")

    def __init__(self, change: int, ours: set[bytes] | None = None):
        self.change = change
        self.names: set[bytes] = set()
        self.ours = ours


def _change_of(attr: Attr | bytes) -> int:
    return change_of(attr) if type(attr) is bytes else attr.change


_WHOLE_DIRECTORIES_MAX = 64
_RENAMED_MAX = 4096


class Cache:
    """Attributes, entries and open inodes of one client."""

    def __init__(self, options: ClientOptions, clock: Clock, leases: Leases):
        self.leases = leases
        self.open: dict[int, OpenInode] = {}
        self._attrs: dict[int, tuple[Attr | bytes, float]] = {}   # as a record of rpc/messages/direntries where it was listed
        # inode, when it was true, when it was asked for, and the lease on the inode that came with the answer
        self._entries: dict[tuple[int, bytes], tuple[int, float, float, Lease | None]] = {}
        self._renamed_s: dict[int, float] = {}   # directory -> when we last changed a name in it
        self._renamed_floor_s = NEVER_S
        self._whole: dict[int, WholeDirectory] = {}
        self._whole_names = 0
        self._trusted_from_s = NEVER_S
        self._options = options
        self._clock = clock
        self.on_change: Callable[[OpenInode], None] = lambda file: None
        """Told of an open inode that is about to have newer attributes than those that we read by."""
        self.on_cut: Callable[[OpenInode], None] = lambda file: None
        """Told of an open inode with writes of ours that was truncated."""

    # -- attributes ----------------------------------------------------------------------------------------------------

    def attr(self, inode: int, age_s: float) -> Attr | None:
        """The attributes, when they were true no longer than `age_s` ago."""
        opened = self.open.get(inode)
        attr, born_s = (opened.attr, opened.attr_born_s) if opened is not None else self._attrs.get(inode, (None, NEVER_S))
        if attr is None or (not self.is_believed(born_s, age_s) and self.leases.held(inode) is None):
            return None
        if type(attr) is bytes:
            attr = attr_of(attr)
            self._attrs[inode] = attr, born_s
        return attr

    def newer(self, inode: int, change: int) -> Attr | None:
        """The attributes that are here, where they are newer than `change`: an answer with that was overtaken by another."""
        opened = self.open.get(inode)
        held = opened.attr if opened is not None and not opened.unsure else self._attrs.get(inode, (None, NEVER_S))[0]
        if held is None or _change_of(held) <= change:
            return None
        return attr_of(held) if type(held) is bytes else held

    def known_attr(self, inode: int) -> Attr | None:
        """The newest attributes that were ever told, however old they are."""
        opened = self.open.get(inode)
        held = opened.attr if opened is not None else self._attrs.get(inode, (None, NEVER_S))[0]
        return attr_of(held) if type(held) is bytes else held

    def flags(self, inode: int) -> int | None:
        """Those of the attributes, however old they are."""
        opened = self.open.get(inode)
        attr, born_s = (opened.attr, NEVER_S) if opened is not None else self._attrs.get(inode, (None, NEVER_S))
        if type(attr) is bytes:
            attr = attr_of(attr)
            self._attrs[inode] = attr, born_s
        return None if attr is None else attr.flags

    def mode(self, inode: int) -> int | None:
        """That of the attributes, however old they are: the type of an inode does not change."""
        opened = self.open.get(inode)
        attr = opened.attr if opened is not None else self._attrs.get(inode, (None, NEVER_S))[0]
        return None if attr is None else (attr_of(attr) if type(attr) is bytes else attr).mode

    def entries_of(self, directory: int) -> int:
        """How many names the directory had when somebody last heard of it; 0: nobody has."""
        opened = self.open.get(directory)
        attr = opened.attr if opened is not None else self._attrs.get(directory, (None, NEVER_S))[0]
        return 0 if attr is None else (attr_of(attr) if type(attr) is bytes else attr).size

    def is_believed(self, born_s: float, age_s: float) -> bool:
        """Of what was asked for at `born_s`: that it may be used for `age_s`, unless a lock was taken since."""
        return born_s + age_s > self._clock.boottime_s() and born_s >= self._trusted_from_s

    def distrust(self) -> None:
        """Believe nothing that was learned before now and that there is no lease on: what others did until they gave a lock
        back must be seen, and of what there is a lease on we have been told."""
        self._trusted_from_s = self._clock.boottime_s()

    def put_attr(self, attr: Attr, *, ours: bool = False) -> None:
        """Believe `attr`, unless what we have is newer: answers may overtake one another. `ours`: told in answer to a write of
        ours, which is the change where it is the only one."""
        now_s = self._clock.boottime_s()
        whole = self._whole.get(attr.inode)
        if whole is not None and attr.change > whole.change:
            self.forget_whole(attr.inode)
        opened = self.open.get(attr.inode)
        if opened is not None:
            if attr.change >= opened.attr.change or opened.unsure:
                opened.unsure = False
                if attr.change != opened.attr.change:
                    self.on_change(opened)
                if attr.change > opened.attr.change + ours:
                    opened.foreign = True
                opened.attr = attr
                opened.attr_born_s = now_s
                if attr.cut > opened.cut:
                    before, opened.cut, opened.truncated = opened.cut, attr.cut, attr.cut - attr.punches
                    if opened.written is not None and opened.truncated > before:
                        self.on_cut(opened)
                    if opened.volume and opened.truncated > before:
                        opened.paid = opened.size
            return
        self._keep(attr, attr.inode, now_s)

    def put_closed(self, attr: Attr, inode: int) -> Attr:
        """As `put_attr` of an inode that is not open; the newest attributes that are known."""
        whole = self._whole.get(inode) if self._whole else None
        if whole is not None and attr.change > whole.change:
            self.forget_whole(inode)
        newest = self._keep(attr, inode, self._clock.boottime_s())
        return attr_of(newest) if type(newest) is bytes else newest

    def _keep(self, attr: Attr, inode: int, now_s: float) -> Attr | bytes:
        attrs = self._attrs
        newest: Attr | bytes = attr
        held = attrs.pop(inode, None)
        if held is not None and _change_of(held[0]) > attr.change:
            newest = held[0]
        attrs[inode] = (newest, now_s)
        if len(attrs) > self._options.cached_entries:
            for old in too_old(attrs, self._options.cached_entries):
                del attrs[old]
        return newest

    def put_attrs(self, listed: Listed) -> bool:
        """Believe the attributes of all entries. False, and nothing has changed, where one of them has to be looked at by
        itself, with `put_attr`: it is open, or newer here."""
        attrs, inodes = self._attrs, set(listed.inodes)
        if not self.open.keys().isdisjoint(inodes) or not self._whole.keys().isdisjoint(inodes):
            return False
        known = attrs.keys() & inodes
        if known and any(_change_of(attrs[inode][0]) > change
                         for inode, change in zip(listed.inodes, listed.changes, strict=True) if inode in known):
            return False
        for inode in known:
            del attrs[inode]  # the oldest come first
        attrs.update(zip(listed.inodes, zip(listed.records, repeat(self._clock.boottime_s())), strict=False))
        for old in too_old(attrs, self._options.cached_entries):
            del attrs[old]
        return True

    def begin_anew(self, concerns: Callable[[int], bool]) -> None:
        """Of these inodes change numbers may have run backwards: what is told next is believed, whatever its number."""
        for inode in [inode for inode in self._attrs if concerns(inode)]:
            del self._attrs[inode]
            self.leases.forget(inode)
        for inode in [inode for inode in self._whole if concerns(inode)]:
            self.forget_whole(inode)
        for opened in self.open.values():
            if concerns(opened.inode):
                opened.attr_born_s, opened.unsure = NEVER_S, True
                self.leases.forget(opened.inode)

    def forget_attr(self, inode: int) -> None:
        self.leases.forget(inode)
        self.grow_old(inode)

    def grow_old(self, inode: int) -> None:
        """The attributes may not be those of the inode any more."""
        opened = self.open.get(inode)
        if opened is not None:
            opened.attr_born_s = NEVER_S
        held = self._attrs.get(inode)
        if held is not None:
            self._attrs[inode] = (held[0], NEVER_S)  # its change number still tells an older answer

    # -- entries -------------------------------------------------------------------------------------------------------

    def entry(self, parent: int, name: bytes, age_s: float) -> int | None:
        """The inode of the name, 0 when it is known not to exist, None when nothing so young is known. That a name is not there
        is known by a lease on its directory only."""
        inode, born_s, sent_s, lease = self._entries.get((parent, name), (None, NEVER_S, NEVER_S, None))
        if inode is None or (inode and self.is_believed(born_s, age_s) and self.leases.is_news(inode, sent_s)):
            return inode
        return inode if self._cover(parent, inode, sent_s, lease) else None

    def cover(self, parent: int, name: bytes, inode: int) -> int:
        """Inode number of the lease that guards the name of `inode`: its own or the directory's; 0: none."""
        known = self._entries.get((parent, name))
        return self._cover(parent, inode, known[2], known[3]) if known is not None and known[0] == inode else 0

    def _cover(self, parent: int, inode: int, sent_s: float, lease: Lease | None) -> int:
        held = self.leases.held(inode) if inode else None
        if held is not None and (sent_s >= held.since_s or (lease is not None and held.number == lease.number)):
            return inode
        held = self.leases.held(parent)
        return parent if held is not None and sent_s >= held.since_s else 0

    def names_of(self, inode: int) -> list[tuple[int, bytes]]:
        """Names (directory, name) that stand for it, as far as they are known. Looks through all entries: for rare cases."""
        return [place for place, known in self._entries.items() if known[0] == inode]

    def put_entry(self, parent: int, name: bytes, inode: int, sent_s: float, lease: Lease | None = None) -> None:
        """`inode` 0: the name does not exist. Ignored where we have changed names of the directory since `sent_s`, when the
        question was sent. `lease`: the inode's, of the same answer."""
        if sent_s <= self._renamed_s.get(parent, self._renamed_floor_s):
            return
        key = (parent, name)
        self._entries.pop(key, None)
        self._entries[key] = (inode, self._clock.boottime_s(), sent_s, lease)
        if len(self._entries) > self._options.cached_entries:
            for old in too_old(self._entries, self._options.cached_entries):
                del self._entries[old]

    def put_entries(self, parent: int, names: list[bytes], inodes: list[int], sent_s: float,
                    leases: list[Lease | None]) -> None:
        """As `put_entry` of each. Names that are known stay as old as they are, where room is needed."""
        if sent_s <= self._renamed_s.get(parent, self._renamed_floor_s):
            return
        known = zip(inodes, repeat(self._clock.boottime_s()), repeat(sent_s), leases)
        self._entries.update(zip(zip(repeat(parent), names), known, strict=False))
        for old in too_old(self._entries, self._options.cached_entries):
            del self._entries[old]

    def forget_entry(self, parent: int, name: bytes) -> None:
        """We change the name, or have."""
        self._entries.pop((parent, name), None)
        self._renamed_s.pop(parent, None)
        self._renamed_s[parent] = self._clock.boottime_s()
        for old in too_old(self._renamed_s, _RENAMED_MAX):
            self._renamed_floor_s = max(self._renamed_floor_s, self._renamed_s.pop(old))

    def put_own_entry(self, parent: int, name: bytes, inode: int, sent_s: float, lease: Lease | None = None) -> None:
        """By our change, which was sent at `sent_s` and has just been answered, the name stands for `inode`, 0: nothing."""
        self.forget_entry(parent, name)
        self._entries[parent, name] = inode, self._clock.boottime_s(), sent_s, lease
        for old in too_old(self._entries, self._options.cached_entries):
            del self._entries[old]

    # -- directories that are known as a whole ---------------------------------------------------------------------------

    def born_directory(self, attr: Attr) -> None:
        """The directory was made by us, with these attributes: it is empty."""
        self._hold_whole(attr.inode, WholeDirectory(attr.change))

    def begin_whole(self, attr: Attr) -> WholeDirectory:
        """The names of the directory, which has these attributes, are going to be listed: `put_names`, then `end_whole`."""
        whole = WholeDirectory(attr.change, set())
        self._hold_whole(attr.inode, whole)
        return whole

    def _hold_whole(self, inode: int, whole: WholeDirectory) -> None:
        self.forget_whole(inode)
        self._whole[inode] = whole
        self._bound_whole()

    def _bound_whole(self) -> None:
        while len(self._whole) > _WHOLE_DIRECTORIES_MAX or self._whole_names > self._options.cached_entries:
            self.forget_whole(next(iter(self._whole)))

    def put_names(self, inode: int, whole: WholeDirectory, names: Iterable[bytes]) -> bool:
        """These were listed. False where that is of no use any more: others have changed the directory, or there is no room."""
        if self._whole.get(inode) is not whole:
            return False
        self._whole_names -= len(whole.names)
        whole.names.update(name for name in names if name not in whole.ours)
        self._whole_names += len(whole.names)
        self._bound_whole()
        return self._whole.get(inode) is whole

    def end_whole(self, inode: int, whole: WholeDirectory, complete: bool) -> None:
        """Every name was listed, or not."""
        if complete:
            whole.ours = None
        elif self._whole.get(inode) is whole:
            self.forget_whole(inode)

    def is_whole(self, inode: int) -> bool:
        """Whether its names are known, or are being listed."""
        return inode in self._whole

    def named_in_whole(self, parent: Attr | None, inode: int, name: bytes, exists: bool) -> None:
        """The name has come to directory `inode` or gone by our change, after which the directory has the attributes `parent`;
        None: nobody knows. Anything but the next change number means that others change it too."""
        whole = self._whole.get(inode)
        if whole is None:
            return
        if parent is None or parent.change != whole.change + 1:
            self.forget_whole(inode)
            return
        self._whole_names -= len(whole.names)
        if exists:
            whole.names.add(name)
        else:
            whole.names.discard(name)
        if whole.ours is not None:
            whole.ours.add(name)
        self._whole_names += len(whole.names)
        whole.change = parent.change

    def is_absent(self, parent: int, name: bytes, age_s: float) -> bool:
        """Whether the name is known not to be there, by attributes of the directory that are no older than `age_s`, or lent."""
        if not self.is_missed(parent, name):
            return False
        attr = self.attr(parent, age_s)
        return attr is not None and attr.change == self._whole[parent].change

    def is_missed(self, parent: int, name: bytes) -> bool:
        """Whether the directory was known as a whole, and the name is none of its. One that can be nobody's is not missed."""
        whole = self._whole.get(parent)
        return whole is not None and whole.ours is None and name not in whole.names and len(name) <= NAME_BYTES_MAX

    def forget_whole(self, inode: int) -> None:
        whole = self._whole.pop(inode, None)
        if whole is not None:
            self._whole_names -= len(whole.names)

    # -- open inodes ---------------------------------------------------------------------------------------------------

    def hold(self, attr: Attr) -> OpenInode:
        """The open inode of `attr`, with one more handle."""
        opened = self.open.get(attr.inode)
        if opened is None:
            opened = self.open[attr.inode] = OpenInode(attr)
            self._attrs.pop(attr.inode, None)
        opened.handles += 1
        self.put_attr(attr)
        return opened

    def hold_lent(self, inode: int) -> OpenInode | None:
        """As `hold` of a file that is not open, by the attributes that are here and that the caller knows a lease on: they are
        those of now. None where it is no regular file with a name, or there are none."""
        attr, _ = self._attrs.get(inode, (None, NEVER_S))
        if attr is None:
            return None
        if type(attr) is bytes:
            attr = attr_of(attr)
        if attr.mode & S_IFMT != S_IFREG or not attr.links:
            return None
        del self._attrs[inode]
        opened = self.open[inode] = OpenInode(attr)
        opened.attr_born_s = self._clock.boottime_s()
        opened.handles = 1
        return opened

    def drop(self, opened: OpenInode) -> bool:
        """One handle less; whether it was the last, after which the inode is not open any more."""
        opened.handles -= 1
        if opened.handles > 0:
            return False
        if self.open.get(opened.inode) is opened:
            del self.open[opened.inode]
            if opened.attr.links:
                self._attrs[opened.inode] = (opened.attr, opened.attr_born_s)
        return True
