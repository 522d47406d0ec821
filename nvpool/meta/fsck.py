"""The check of a shard's records against one another, in bounded steps while it serves, and the repair of what is wrong.

It walks a snapshot (one moment of the whole shard) in key order. What a record says about its neighbours is checked at
once against the records as they are now, which changes can never divide. What needs counting (names of an inode, entries
and subdirectories of a directory) is tallied from the snapshot: an inode whose sums come out even is forgotten at the end
of its partition, so memory holds the directories and what was renamed, not all files. What is left over is wrong by that
difference, whatever changed since, and is mended by it.

Repair loses nothing that can be read: inodes without a name, and entries that can not stay, go to /lost+found under their
number; records that can not be read are laid aside under their key (records.damaged_key). Used by `meta/service`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from nvpool.base.errors import CorruptRecord, NotFound, NvpoolError, WrongShard
from nvpool.base.ids import ROOT_INODE, counter_of, partition_of
from nvpool.base.units import PARTITION_COUNT
from nvpool.kv.contract import Kv
from nvpool.logic.lockranges import Span
from nvpool.meta import records
from nvpool.meta.changes.mend import recounted, to_lost, without_dangling
from nvpool.meta.gc import Collector
from nvpool.meta.leases import Sessions
from nvpool.meta.locks import Owner
from nvpool.meta.parts import part_here
from nvpool.meta.records import HASH_AT, NAME_AT, Inode
from nvpool.meta.spanning.records import decode_decision, decode_held, id_of_key
from nvpool.meta.view import Draft, View
from nvpool.wire.sums import Sum

STEP_LIMIT, STEP_LIMIT_MAX = 500, 5000
"""Records in a step: five hundred hold the event loop for about five milliseconds."""
ROOTED_MAX = 1_000_000
"""Directories remembered as being below the root, so that a climb is short."""
NAMES, SUBDIRS, ENTRIES = range(3)
_NUMBERED = frozenset((records.INODE, records.XATTR, records.ORPHAN, records.COLLECT, records.INTENT, records.LOCK))


Mend = Callable[..., Draft]  # (view, now_ns=)


class Problem(NamedTuple):
    kind: str
    text: str
    repaired: bool
    inode: int = 0


class Fsck:
    """One run. `await step(limit)` until `done`; `problems` of a step are returned by it."""

    def __init__(self, kv: Kv, view: View, sessions: Sessions, collector: Collector,
                 begin_cut: Callable[[int, records.Intent], object], clock_ns: Callable[[], int], repair: bool,
                 walk: bool = True) -> None:
        """`walk` False: only `settle_sums` follows."""
        self._kv = kv
        self._view = view
        self._sessions = sessions
        self._collector = collector
        self._begin_cut = begin_cut
        self._clock_ns = clock_ns
        self._repair = repair
        self._snapshot = view.snapshot() if walk else None
        self._names_of_others: dict[int, bytes] = {}  # inode -> key of a name that it has here
        self.pending: list[tuple[int, Mend]] = []
        """Mends that need other shards, with the places of their problems in this step's list."""
        self.sums: list[Sum] = []
        """Of this step: what one shard of several can not tell to be right."""
        self._problems: list[Problem] = []
        self._sums: dict[int, list[int]] = {}
        self._strays: dict[int, bytes] = {}
        self._rooted: set[int] = {ROOT_INODE}
        self._inodes = 0
        self._counted: int | None = view.inode_count
        self._counted_at_first = view.inode_count
        self._left: list[int] | None = None
        self._unread = 0
        """Records that can not be read: without them no sum is right."""
        self.counter_max = 0
        """The highest inode counter in use that is not below the next to give; 0: none."""
        self.done = False
        self.checked = 0
        self._checks: dict[int, Callable[[bytes, bytes], None]] = {
            records.INODE: self._inode, records.DENTRY: self._dentry, records.XATTR: self._xattr,
            records.ORPHAN: self._orphan, records.COLLECT: self._collect, records.INTENT: self._intent,
            records.LOCK: self._lock, records.SESSION: self._session, records.SLOT: self._slot, records.COUNTS: self._counts,
            records.IDENTITY: lambda key, raw: None, records.BOUNDS: self._bounds, records.PART: self._part,
            records.DAMAGED: lambda key, raw: None, **dict.fromkeys((records.HELD, records.DECIDED), self._spanning)}

    def step(self, limit: int) -> list[Problem]:
        """Check the next records. Without a wait inside: what is read here stays true to the end of the step."""
        limit = min(limit or STEP_LIMIT, STEP_LIMIT_MAX)
        self._problems, self.pending, self.sums = [], [], []
        if self._left is None:
            try:
                pairs = self._snapshot.step(limit)
            except CorruptRecord as error:
                self._unreadable(error)
                return self._problems
            self.checked += len(pairs)
            for key, raw in pairs:
                kind = records.kind_of(key) if len(key) > 1 else -1
                check = self._checks.get(kind)
                if check is None or kind in _NUMBERED and not records.is_numbered(kind, key):
                    self._lay_aside(key, raw, "a record under a key that is not known")
                    continue
                try:
                    check(key, raw)
                except CorruptRecord as error:  # a neighbour that can not be read
                    self._unread += 1
                    self._found("unreadable", f"what belongs to the record {key.hex()} can not be checked: {error}", None)
            if self._snapshot.done:
                self._left = []
                if self._unread:
                    self._found("unreadable", f"{self._unread} records could not be checked, so links are not counted: "
                                              "let repair remove what can not be read, then check again", None)
                else:
                    self._left = sorted(number for number, sums in self._sums.items() if any(sums) or number in self._strays)
        elif self._left:
            part = self._left[:limit]
            del self._left[:limit]
            for number in part:
                if self._view.owners:
                    self.sums.append(Sum(number, *self._sums.pop(number), self._names_of_others.get(number, b"")
                                         or self._strays.get(number, b"")))
                else:
                    self._settle(number)
        else:
            if not self._unread:
                self._settle_count()
            self.done = True
        return self._problems

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()

    def settle_sums(self, sums: list[Sum]) -> list[Problem]:
        """The sums of all shards together, of inodes of this one: what is wrong by them."""
        self._problems, self.pending = [], []
        for one in sums:
            before = len(self._problems)
            self._settle_sum(*one)
            self._problems[before:] = [problem._replace(inode=one.inode) for problem in self._problems[before:]]
        return self._problems

    def _settle_sum(self, number: int, names: int, subdirs: int, entries: int, key: bytes) -> None:
        inode = self._current(number)
        if inode is None:
            if names > 0 and key:
                self._found("dentry", f"entry {key[NAME_AT:]!r} of directory {records.directory_of_key(key)} names inode "
                                      f"{number}, which is not there",
                            lambda: self._decided(partial(without_dangling, number=number, key=key)))
            return
        if key and inode.is_directory and inode.links and inode.parent != records.directory_of_key(key):
            self._strays[number] = key
        self._sums[number] = [names, subdirs, entries]
        self._settle(number)

    # -- reporting and repairing -------------------------------------------------------------------------------------

    def _found(self, kind: str, text: str, mend: Callable[[], list | None] | None) -> None:
        """Note a problem; where repair is wanted, apply what `mend` says, which reads the records as they are now."""
        repaired = False
        if self._repair and mend is not None:
            try:
                effects = mend()
                if effects:
                    self._kv.apply(effects, reclaims=True)
                repaired = effects is not None
            except NvpoolError as error:
                text = f"{text}; not repaired: {error}"
        self._problems.append(Problem(kind, text, repaired))

    def _unreadable(self, error: CorruptRecord) -> None:
        """The next record of the walk is damaged. Repair removes it: nobody can read it, and what it said is lost."""
        self._unread += 1
        self._snapshot.skip(error.key)  # first, since a snapshot reads what changes in front of it
        self._found("unreadable", str(error), lambda: [(error.key, None)])

    def _lay_aside(self, key: bytes, raw: bytes, text: str, more: Callable[[], list] = list) -> None:
        if self._kv.get(key) == raw:
            self._found("undecodable", f"{text} (key {key.hex()})",
                        lambda: [(key, None), (records.damaged_key(key), raw), *more()])

    def _current(self, number: int) -> Inode | None:
        """The inode as it is now; None where there is none or it can not be read."""
        try:
            raw = self._kv.get(records.inode_key(number))
            return records.decode_inode(number, raw) if raw is not None else None
        except CorruptRecord:
            return None

    @staticmethod
    def _put(inode: Inode) -> tuple[bytes, bytes]:
        inode.change += 1
        return records.inode_key(inode.number), records.encode_inode(inode)

    def _sum(self, number: int, which: int, amount: int) -> None:
        if not amount:
            return
        sums = self._sums.get(number)
        if sums is None:
            sums = self._sums[number] = [0, 0, 0]
        sums[which] += amount
        if not any(sums) and number not in self._strays:
            del self._sums[number]

    # -- one record --------------------------------------------------------------------------------------------------

    def _inode(self, key: bytes, raw: bytes) -> None:
        self._inodes += 1
        number = records.inode_of_key(key)
        try:
            inode = records.decode_inode(number, raw)
        except CorruptRecord as error:
            self._inodes -= 1
            self._lay_aside(key, raw, str(error))
            return
        if inode.is_directory:
            self._sum(number, NAMES, -1 if inode.links and number != ROOT_INODE else 0)
            self._sum(number, SUBDIRS, 2 - inode.links if inode.links else 0)
            self._sum(number, ENTRIES, -inode.size)
            if inode.links:
                self._check_rooted(number)
        else:
            self._sum(number, NAMES, -inode.links)
        if counter_of(number) >= self._view.next_number:
            self.counter_max = max(self.counter_max, counter_of(number))
            self._found("number", f"inode {number} has a counter that is not given yet", list)
        now = self._current(number)
        if now is None:
            return
        orphan_key = records.numbered_key(records.ORPHAN, number)
        if not now.links and self._kv.get(orphan_key) is None:
            def queue() -> list:
                self._collector.add(number)
                return [(orphan_key, records.ORPHAN_VALUE)]
            self._found("orphan", f"inode {number} has no name and is not among the orphans", queue)
        if now.flags & records.HAS_XATTRS and not self._kv.scan(*records.xattr_range(number), 1):
            def clear() -> list:
                now.flags &= ~records.HAS_XATTRS
                return [self._put(now)]
            self._found("xattr", f"inode {number} is marked as having attributes and has none", clear)

    def _part(self, key: bytes, raw: bytes) -> None:
        """What is counted here counts with the directory's record, wherever that is."""
        try:
            part = part_here(key, raw, self._view.shard)
            self._sum(part.number, SUBDIRS, -part.counts.subdirectories)
            self._sum(part.number, ENTRIES, -part.counts.entries)
        except CorruptRecord as error:
            self._lay_aside(key, raw, str(error))

    def _dentry(self, key: bytes, raw: bytes) -> None:
        directory, name_hash, name = records.directory_of_key(key), key[HASH_AT:NAME_AT], key[NAME_AT:]
        self._sum(directory, ENTRIES, 1)
        try:
            number, kind = records.decode_dentry(records.partition_of_key(key), raw)
        except CorruptRecord as error:
            self._lay_aside(key, raw, f"entry {name!r} of directory {directory}: {error}",
                            lambda: self._less(directory, False))
            return
        elsewhere = self._view.is_elsewhere(partition_of(number))
        inode = self._current(number) if not elsewhere else None
        if inode is not None:
            kind = inode.kind
        if elsewhere:
            self._names_of_others[number] = key
        self._sum(number, NAMES, 1)
        self._sum(directory, SUBDIRS, 1 if kind == 4 else 0)
        if self._kv.get(key) != raw or elsewhere or self._view.is_elsewhere(partition_of(directory)):
            return  # the sums of all shards tell what is wrong with it
        here = f"entry {name!r} of directory {directory}"
        if inode is None or number == ROOT_INODE:
            self._found("dentry", f"{here} names inode {number}, which is {'not there' if inode is None else 'the root'}",
                        lambda: [(key, None), *self._less(directory, kind == 4)])
            return
        parent = self._current(directory)
        if parent is None or not parent.is_directory or not parent.links:
            self._found("dentry", f"{here} is in a directory that is not there", lambda: self._to_lost(inode, key))
            return
        try:
            _, right_hash, right_key = self._view.place(parent, name)
        except WrongShard as error:
            self._found("place", f"{here} is kept by the wrong shard: {error}", None)
            return
        except NvpoolError as error:
            self._found("dentry", f"{here} has an impossible name: {error}",
                        lambda: [*self._to_lost(inode, key), *self._less(directory, kind == 4)])
            return
        if right_key != key:
            self._found("place", f"{here} is kept under the wrong {'hash' if name_hash != right_hash else 'partition'}",
                        lambda: self._to_place(inode, parent, key, right_key))
            return
        if raw[0] & 15 != inode.kind:
            partition = records.partition_of_key(key)
            self._found("dentry", f"{here} has the wrong kind",
                        lambda: [(key, records.encode_dentry(partition, number, inode.kind))])
        if inode.is_directory and inode.parent != directory:
            self._strays[number] = key
            self._sums.setdefault(number, [0, 0, 0])

    def _xattr(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        try:
            records.decode_xattr(raw)
        except CorruptRecord as error:
            self._lay_aside(key, raw, f"attribute {key[9:]!r} of inode {number}: {error}", lambda: self._one_xattr_less(number))
            return
        inode = self._current(number)
        if self._kv.get(key) is None:
            return
        if inode is None:
            self._found("xattr", f"attribute {key[9:]!r} belongs to inode {number}, which is not there", lambda: [(key, None)])
        elif not inode.flags & records.HAS_XATTRS:
            def mark() -> list:
                inode.flags |= records.HAS_XATTRS
                return [self._put(inode)]
            self._found("xattr", f"inode {number} has attributes and is not marked so", mark)

    def _one_xattr_less(self, number: int) -> list:
        inode = self._current(number)
        if inode is None or len(self._kv.scan(*records.xattr_range(number), 2)) > 1:
            return []
        inode.flags &= ~records.HAS_XATTRS
        return [self._put(inode)]

    def _orphan(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        if (now := self._kv.get(key)) is None:
            return
        inode = self._current(number)
        if inode is None or inode.links:
            def drop() -> list:
                self._collector.orphans.pop(number, None)
                return [(key, None)]
            why = "which is not there" if inode is None else f"which has {inode.links} links"
            self._found("orphan", f"the orphans name inode {number}, {why}", drop)
            return
        if now != records.ORPHAN_VALUE:
            self._found("undecodable", f"the record of orphan {number} can not be read", lambda: [(key, records.ORPHAN_VALUE)])
        if number not in self._collector.orphans:
            def queue() -> list:
                self._collector.add(number)
                return []
            self._found("orphan", f"orphan {number} is not waited for by the collector", queue)

    def _collect(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        if self._kv.get(key) != raw:
            return
        if self._current(number) is not None:
            self._found("collect", f"the chunks of inode {number} are to be removed, and it is there", lambda: [(key, None)])
            return
        try:
            records.decode_collect(raw)
        except CorruptRecord as error:
            usual = records.Collect(*records.Layout())
            self._found("undecodable", f"{error} (inode {number})", lambda: [(key, records.encode_collect(usual))])

    def _intent(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        if self._kv.get(key) != raw:
            return
        inode = self._current(number)
        if inode is None or not inode.is_file:
            self._found("intent", f"inode {number} is to be cut, and it is no file", lambda: [(key, None)])
            return
        try:
            intent = records.decode_intent(raw)
        except CorruptRecord as error:
            def rebuild() -> list:
                # Nothing grows before a cut is done, so the inode itself says where it was to end. Where a hole was to be,
                # nobody knows; who asked for it was not answered.
                if inode.punches:
                    return [(key, None)]
                again = records.Intent(inode.cut, inode.size, inode.table, inode.chunk_bits)
                self._kv.apply([(key, records.encode_intent(again))], reclaims=True)
                self._begin_cut(number, again)
                return []
            self._found("undecodable", f"{error} (inode {number})", rebuild)
            return
        if intent.cut != inode.cut:
            self._found("intent", f"inode {number} is to be cut under number {intent.cut} and has {inode.cut}",
                        lambda: [(key, None)])
        elif number not in self._view.cutting:
            def begin() -> list:
                self._begin_cut(number, intent)
                return []
            self._found("intent", f"inode {number} is to be cut, and nobody does it", begin)

    def _lock(self, key: bytes, raw: bytes) -> None:
        """A lock that nobody holds by our memory hinders nobody, until a restart takes it up."""
        number = records.inode_of_key(key)
        try:
            kind, session, owner, start = records.lock_of_key(key)
            end, mode, pid = records.decode_lock(raw)
        except CorruptRecord as error:
            self._lay_aside(key, raw, f"{error} (inode {number})")
            return
        if self._kv.get(key) != raw:
            return
        inode, locks = self._current(number), self._view.locks
        here, who = f"inode {number} from byte {start} to {end}", Owner(kind, session, owner)
        if inode is None or not inode.is_file:
            def forget() -> list:
                locks.forget(number)
                return [(key, None)]
            self._found("lock", f"{here} is locked, and it is no file", forget)
        elif Span(start, end, mode, pid) not in locks.spans_of(number, who):
            self._found("lock", f"{here} is locked by session {session:#x}, and nobody knows", lambda: [(key, None)])
        elif session not in self._sessions.by_number and session not in locks.dead:
            def end() -> list:
                locks.end_session(session)
                return []
            self._found("lock", f"{here} is locked by session {session:#x}, which does not live", end)
        elif any(not other.waits for other in locks.in_the_way(number, who, start, end, mode)):
            self._found("lock", f"{here} is locked by session {session:#x} and by another: unmount one of them", None)

    def _session(self, key: bytes, raw: bytes) -> None:
        try:
            records.decode_session(raw)
        except CorruptRecord as error:
            self._lay_aside(key, raw, str(error))
            return
        if self._kv.get(key) is not None and records.session_of_key(key) not in self._sessions.by_number:
            self._found("session", f"session {records.session_of_key(key):#x} has a record and does not live",
                        lambda: [(key, None)])

    def _slot(self, key: bytes, raw: bytes) -> None:
        if (now := self._kv.get(key)) is None:
            return
        if records.session_of_key(key) not in self._sessions.by_number:
            self._found("slot", f"a slot belongs to session {records.session_of_key(key):#x}, which does not live",
                        lambda: [(key, None)])
            return
        try:
            records.decode_slot(now)
        except CorruptRecord as error:
            self._found("undecodable", f"{error} (session {records.session_of_key(key):#x})", lambda: [(key, None)])

    def _spanning(self, key: bytes, raw: bytes) -> None:
        """A hold or a decision. One that lives ends by itself, as soon as the shards concerned can be asked."""
        try:
            id_of_key(key)
            (decode_held if records.kind_of(key) == records.HELD else decode_decision)(raw)
        except CorruptRecord as error:
            self._lay_aside(key, raw, str(error))

    def _bounds(self, key: bytes, raw: bytes) -> None:
        try:
            bound = records.decode_bounds(raw).inode
        except CorruptRecord:
            bound = 0
        if bound < self._view.next_number:
            self.counter_max = max(self.counter_max, self._view.next_number)
            self._found("number", f"the bound of inode numbers is {bound}, {self._view.next_number} is the next", list)

    def _counts(self, key: bytes, raw: bytes) -> None:
        try:
            found = records.decode_counts(raw)
        except CorruptRecord:
            found = None
        if found != self._counted_at_first:
            self._counted = found

    # -- sums --------------------------------------------------------------------------------------------------------

    def _settle(self, number: int) -> None:
        """The sums of an inode did not come out even."""
        names, subdirs, entries = self._sums.pop(number, (0, 0, 0))
        inode = self._current(number)
        if inode is None:
            return
        if not inode.is_directory and names:
            self._found("links", f"inode {number} has {names:+} names against its link count",
                        lambda: self._mend_links(inode, names))
        if not inode.is_directory:
            return
        if subdirs or entries:
            self._found("counts", f"directory {number} has {subdirs:+} subdirectories and {entries:+} entries against its "
                                  "counts",
                        lambda: self._decided(partial(recounted, number=number, subdirs=subdirs, entries=entries)))
        stray = self._strays.pop(number, None)
        if names < 0:
            self._found("inode", f"directory {number} has no name", lambda: self._to_lost(self._current(number), None))
        elif names > 0 and not inode.links:
            self._found("links", f"directory {number} is removed and has a name", lambda: self._mend_links(inode, 2))
        elif names > 0 and stray is not None:
            others = self._view.is_elsewhere(records.partition_of_key(stray))
            self._found("dentry", f"directory {number} has {names + 1} names", None if others else
                        lambda: [(stray, None), *self._less(records.directory_of_key(stray), True)])
        elif stray is not None and (self._kv.get(stray) is not None
                                    or self._view.is_elsewhere(records.partition_of_key(stray))):
            def adopt() -> list:
                now = self._current(number)
                now.parent = records.directory_of_key(stray)
                return [self._put(now)]
            self._found("parent", f"directory {number} does not know its parent", adopt)

    def _settle_count(self) -> None:
        if self._counted != self._inodes:
            def recount() -> list:
                self._view.inode_count += self._inodes - self._counted_at_first
                return [(records.COUNTS_KEY, records.encode_counts(self._view.inode_count))]
            self._found("counts", f"{self._inodes} inodes are there, {self._counted} are counted", recount)

    def _mend_links(self, inode: Inode, difference: int) -> list:
        links = inode.links + difference
        if links <= 0:
            inode.links = 1
            return self._to_lost(inode, None)
        effects = []
        if not inode.links:
            effects.append((records.numbered_key(records.ORPHAN, inode.number), None))
            self._collector.orphans.pop(inode.number, None)
        inode.links = links
        return [*effects, self._put(inode)]

    # -- moving entries ----------------------------------------------------------------------------------------------

    def _less(self, directory: int, subdirectory: bool) -> list:
        """The directory has one entry less than was tallied: its counts follow when the sums are settled."""
        self._sum(directory, ENTRIES, -1)
        self._sum(directory, SUBDIRS, -1 if subdirectory else 0)
        if self._left is not None and directory in self._sums and directory not in self._left:
            self._left.append(directory)
        return []

    def _to_place(self, inode: Inode, parent: Inode, key: bytes, right_key: bytes) -> list:
        taken = self._kv.get(right_key)
        if taken is None:
            partition = records.partition_of_key(right_key)
            return [(key, None), (right_key, records.encode_dentry(partition, inode.number, inode.kind))]
        there = records.decode_dentry(records.partition_of_key(right_key), taken)[0]
        if there != inode.number:
            return [*self._to_lost(inode, key), *self._less(parent.number, inode.is_directory)]
        effects = [(key, None), *self._less(parent.number, inode.is_directory)]
        if not inode.is_directory:
            inode.links = max(inode.links - 1, 0)
            effects.append(self._put(inode))
        return effects

    def _to_lost(self, inode: Inode | None, key: bytes | None) -> list:
        """Move the entry `key` (None: it has none) of the inode to /lost+found."""
        if inode is None:
            raise NotFound("it is gone")
        self._rooted.discard(inode.number)
        return self._decided(partial(to_lost, number=inode.number, key=key))

    def _decided(self, decide: Mend) -> list:
        """Make what is decided; where it needs other shards, after this step."""
        try:
            draft = decide(self._view, now_ns=self._clock_ns())
        except WrongShard:
            self.pending.append((len(self._problems), decide))
            return []
        self._kv.apply(list(draft.finish().items()), reclaims=True)
        if draft.born:
            self._view.next_number += 1
            self._view.inode_count += 1
        return []

    def _check_rooted(self, number: int) -> None:
        """Climb from the directory to the root; a loop is cut by moving the directory to /lost+found."""
        path, at = [], number
        while at not in self._rooted:
            inode = self._current(at)
            if inode is None or not inode.is_directory or not inode.links:
                return
            if at in path:
                self._found("loop", f"directory {number} is below itself", lambda: self._cut_loop(number))
                return
            path.append(at)
            at = inode.parent
        if len(self._rooted) > ROOTED_MAX:
            self._rooted = {ROOT_INODE}
        self._rooted.update(path)

    def _cut_loop(self, number: int) -> list | None:
        inode = self._current(number)
        above = self._current(inode.parent)
        if above is None:
            return None
        wide = above.flags & records.WIDE
        for partition in range(PARTITION_COUNT) if wide else (above.number >> records.COUNTER_BITS,):
            first, end = records.dentry_range(partition, above.number)
            while pairs := self._kv.scan(first, end, 1000):
                for key, raw in pairs:
                    if records.decode_dentry(partition, raw)[0] == number:
                        self._to_lost(inode, key)
                        return self._less(above.number, True)
                first = pairs[-1][0] + b"\0"
        return None
