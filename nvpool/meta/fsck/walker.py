"""Fsck: checks a shard's records against one another in bounded steps while it serves, and repairs them.

The walk reads a snapshot in key order. The snapshot shows one point in time of the shard, and of the whole
pool if `meta/snapshot_barrier` took it. A record's statements about related records are checked immediately
against the present records; each change updates such records together, so they never disagree. Facts that
need counting (names of an inode, entries and subdirectories of a directory, the directory that has its name)
are summed up from the snapshot. An inode whose sums are even is forgotten at the end of its partition, so
memory holds the directories and renamed files, not all files. A sum that remains at the end is an error by
exactly that difference, whatever has changed since, and the repair applies the difference.

With several shards, each shard reports the sums that it cannot settle itself, the directories of other
shards that its climbs have reached, and copies of attributes; the client combines them (`sdk/fsck/check`). If
a partition is no longer ours when the walk reaches it, or is closed for migration, its records are only
counted, and it is reported as `passed`. Its new owner is then asked to check this partition alone, in its
state at that time.

A repair loses no readable data. Inodes without a name, and entries that cannot stay, are moved to
/lost+found under their number. Records that cannot be decoded are stored under another key
(records.damaged_key). Used by `meta/server/service`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nvpool.core.errors import CorruptRecord, InvalidRequest, NotFound, NvpoolError, WrongShard
from nvpool.core.ids import ROOT_INODE, counter_of, partition_of
from nvpool.core.posix import acl
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta.fsck.directory_connectivity import Tree
from nvpool.meta.fsck.findings import Effects, Findings, Mend, ShardProblem
from nvpool.meta.fsck.inode_sums import ENTRIES, NAMES, PARENTS, SUBDIRS, InodeSums
from nvpool.meta.fsck.present_inodes import PresentInodes, changed
from nvpool.meta.fsck.record_checks import RecordChecks
from nvpool.meta.fsck.repair import recounted, to_lost, without_dangling
from nvpool.meta.fsck.volumes import VolumeChecks
from nvpool.meta.gc.collector import Collector
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.state import records
from nvpool.meta.state.records import HASH_AT, NAME_AT, Inode
from nvpool.meta.state.striped_dirs import COPIED_FLAGS, part_here
from nvpool.meta.state.transaction import View
from nvpool.meta.state.volume_records import REMOVING
from nvpool.rpc.messages.fsck_sums import MASK, DirectoryCopy, Sum

STEP_LIMIT, STEP_LIMIT_MAX = 500, 5000
"""Records in a step: five hundred of them hold the event loop for about five milliseconds."""
SUMS_MAX = 1000
_NUMBERED = frozenset(
    (records.INODE, records.XATTR, records.ORPHAN, records.COLLECT, records.INTENT, records.LOCK)
)


class _CurrentRecords:
    """Present records of some partitions, read in steps in place of a snapshot."""

    def __init__(
        self, kv: Kv, partitions: tuple[int, ...], is_here: Callable[[int], bool], passed: set[int]
    ) -> None:
        self._kv = kv
        self._left = list(partitions)
        self._first = b""
        self._is_here = is_here
        self._passed = passed
        self.inodes_gone = 0

    @property
    def done(self) -> bool:
        return not self._left

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        while self._left and len(found) < limit:
            partition = self._left[0]
            if not self._is_here(partition):
                self._passed.add(partition)
                pairs = []
            else:
                first, end = self._first or records.prefix(partition, 0), records.prefix(partition + 1, 0)
                try:
                    pairs = self._kv.scan(first, end, limit - len(found))
                except CorruptRecord as error:
                    if error.key <= first and not found:
                        raise
                    if error.key <= first:
                        break
                    found += self._kv.scan(first, error.key, limit - len(found))
                    self._first = error.key
                    break
            found += pairs
            if len(found) < limit:
                del self._left[0]
                self._first = b""
            else:
                self._first = pairs[-1][0] + b"\0"
        return found

    def skip(self, key: bytes) -> None:
        self._first = max(self._first, key) + b"\0"

    def close(self) -> None:
        self._left.clear()


class Fsck:
    """One check. Call `step(limit)` until `done`; each call returns the problems that it found."""

    def __init__(
        self,
        kv: Kv,
        view: View,
        sessions: Sessions,
        collector: Collector,
        begin_cut: Callable[[int, records.Intent], object],
        clock_ns: Callable[[], int],
        repair: bool,
        partitions: tuple[int, ...] | None = None,
    ) -> None:
        """`partitions`: check only the records of these partitions against related records, as they are now.

        An empty tuple if only `settle_sums` or a climb follows.
        """
        self._kv = kv
        self._view = view
        self._collector = collector
        self._clock_ns = clock_ns
        self._inodes = PresentInodes(kv, view)
        self.is_here = self._inodes.is_here
        self._findings = Findings(kv, repair)
        self._sums = InodeSums(partitions is None)
        self._volumes = VolumeChecks(kv, view, self._inodes, self._findings, self._sums)
        self.passed: set[int] = set()
        """Partitions that were not ours, or closed, at this step. Their records must be checked again
        elsewhere."""
        self.copies: list[DirectoryCopy] = []
        """Copies of attributes found in this step."""
        self._walk = (
            view.snapshot()
            if partitions is None
            else _CurrentRecords(kv, partitions, self.is_here, self.passed)
        )
        self.tree = Tree(self._inodes.current, self.is_here)
        # inode of another shard -> key of a name that it has here
        self._names_of_others: dict[int, bytes] = {}
        self.sums: list[Sum] = []
        """Sums of this step that one shard of several cannot settle alone."""
        self._inode_count = 0
        self._counted: int | None = view.inode_count
        self._counted_at_first = view.inode_count
        self._left: list[int] | None = None
        self.counter_max = 0
        """Highest inode counter in use that is not below the next one to give; 0: none."""
        self.done = False
        self.checked = 0
        others = RecordChecks(
            kv,
            view,
            sessions,
            collector,
            begin_cut,
            self._inodes,
            self._findings,
            self._volumes.count_orphan,
        )
        self._checks: dict[int, Callable[[bytes, bytes], None]] = {
            records.INODE: self._inode,
            records.DENTRY: self._dentry,
            records.OTHER: self._volumes.check,
            records.COUNTS: self._counts,
            records.IDENTITY: lambda key, raw: None,
            records.BOUNDS: self._bounds,
            records.PART: self._part,
            records.DAMAGED: lambda key, raw: None,
            **others.checks(),
        }

    @property
    def pending(self) -> list[tuple[int, Mend]]:
        """Repairs that need other shards, with the indexes of their problems in this step's list."""
        return self._findings.pending

    def step(self, limit: int) -> list[ShardProblem]:
        """Check the next records.

        There is no wait inside, so records that are read stay valid to the end of the step.
        """
        limit = min(limit or STEP_LIMIT, STEP_LIMIT_MAX)
        self._begin_step()
        if self._left is None:
            try:
                pairs = self._walk.step(limit)
            except CorruptRecord as error:
                self._unreadable(error)
                return self._findings.problems
            self.checked += len(pairs)
            for key, raw in pairs:
                kind = records.kind_of(key) if len(key) > 1 else -1
                if not kind & records.SHARD and not self.is_here(partition := records.partition_of_key(key)):
                    self.passed.add(partition)
                    self._count_only(kind, key, raw)
                    continue
                check = self._checks.get(kind)
                if check is None or (kind in _NUMBERED and not records.is_numbered(kind, key)):
                    self._findings.lay_aside(key, raw, "a record under a key that is not known")
                    continue
                try:
                    check(key, raw)
                except CorruptRecord as error:  # a related record cannot be read
                    self._findings.unread += 1
                    self._findings.found(
                        "unreadable",
                        f"what belongs to the record {key.hex()} cannot be checked: {error}",
                        None,
                    )
            if self._walk.done:
                self._left = []
                if self._findings.unread:
                    self._findings.found(
                        "unreadable",
                        f"{self._findings.unread} records could not be checked, so links are not counted: "
                        "let repair remove what cannot be read, then check again",
                        None,
                    )
                else:
                    self._left = sorted(
                        number
                        for number, sums in self._sums.by_inode.items()
                        if any(sums) or number in self._sums.misplaced
                    )
        elif self._left:
            part = self._left[:limit]
            del self._left[:limit]
            for number in part:
                if self._view.owners:
                    names, subdirs, entries, parents = self._sums.by_inode.pop(number)
                    self.sums.append(
                        Sum(
                            number,
                            names,
                            subdirs,
                            entries,
                            parents & MASK,
                            self._sums.misplaced.get(number) or self._names_of_others.get(number, b""),
                        )
                    )
                else:
                    self._settle(number)
        else:
            if self._sums.is_whole and not self._findings.unread:
                self._settle_count()
            self.done = True
        return self._findings.problems

    def close(self) -> None:
        self._walk.close()

    def _begin_step(self) -> None:
        self._findings.begin_step()
        self.sums, self.copies = [], []
        self.passed.clear()

    def settle_sums(self, sums: list[Sum], uneven: tuple[int, ...] = ()) -> list[ShardProblem]:
        """Report what is wrong by the sums that all shards together have of inodes of this shard.

        `uneven`: wide directories of which a stripe has other attributes. Inodes in partitions that are
        `passed` are not checked.
        """
        self._begin_step()
        if len(sums) + len(uneven) > SUMS_MAX:
            raise InvalidRequest(f"{SUMS_MAX} inodes at most are summed in one request")
        for one in sums:
            if not self.is_here(partition_of(one.inode)):
                self.passed.add(partition_of(one.inode))
            else:
                self._settle_sum(*one)
        for number in uneven:
            if not self.is_here(partition_of(number)):
                self.passed.add(partition_of(number))
            else:
                self._findings.found(
                    "part",
                    f"parts of the wide directory {number} do not have its attributes",
                    lambda number=number: self._decided(
                        partial(recounted, number=number, subdirs=0, entries=0)
                    ),
                )
        return self._findings.problems

    def _settle_sum(
        self, number: int, names: int, subdirs: int, entries: int, parents: int, key: bytes
    ) -> None:
        inode = self._inodes.current(number)
        if inode is None:
            if names > 0 and key:
                self._findings.found(
                    "dentry",
                    f"entry {key[NAME_AT:]!r} of directory {records.directory_of_key(key)} names inode "
                    f"{number}, which is not there",
                    lambda: self._decided(partial(without_dangling, number=number, key=key)),
                )
            return
        if key and inode.is_directory and inode.links and inode.parent != records.directory_of_key(key):
            self._sums.misplaced[number] = key
        self._sums.by_inode[number] = [names, subdirs, entries, parents]
        self._settle(number)

    # -- reporting and repairing -------------------------------------------------------------------------------------

    def _unreadable(self, error: CorruptRecord) -> None:
        """Report that the walk's next record is damaged.

        A repair deletes it: nobody can read it, and its data is lost.
        """
        self._findings.unread += 1
        self._walk.skip(error.key)  # before the repair: a snapshot reads a record before it is changed
        partition = (
            records.partition_of_key(error.key) if len(error.key) > 1 and not error.key[0] & 0x80 else None
        )
        here = partition is None or self.is_here(partition)
        self._findings.found("unreadable", str(error), (lambda: [(error.key, None)]) if here else None)

    # -- one record --------------------------------------------------------------------------------------------------

    def _count_only(self, kind: int, key: bytes, raw: bytes) -> None:
        """Count a record of the walk's snapshot whose partition is not here.

        The new owner makes the other checks.
        """
        try:
            if not self._sums.is_whole or (kind in _NUMBERED and not records.is_numbered(kind, key)):
                return
            if kind == records.INODE:
                self._inode_count += 1
                self._count_inode(records.decode_inode(records.inode_of_key(key), raw))
            elif kind == records.DENTRY:
                number, child = records.decode_dentry(records.partition_of_key(key), raw)
                self._count_dentry(key, number, child)
                self._names_of_others[number] = key
        except CorruptRecord:
            pass  # reported by the shard that has it

    def _count_inode(self, inode: Inode) -> None:
        # the one name of a trashed inode is an entry of a volume's trash
        number, trashed = inode.number, bool(inode.flags & records.TRASHED)
        if not inode.is_directory:
            self._sums.count(number, NAMES, trashed - inode.links)
            return
        self._sums.count(number, ENTRIES, -inode.size)
        if inode.links:
            self._sums.count(number, SUBDIRS, 2 - inode.links)
            if number != ROOT_INODE and not trashed:
                self._sums.count(number, NAMES, -1)
                self._sums.count(number, PARENTS, -inode.parent)
        if self._sums.is_whole and inode.flags & records.WIDE:
            self._copy(inode, 0)

    def _copy(self, inode: Inode, shard: int) -> None:
        self.copies.append(
            DirectoryCopy(
                inode.number,
                shard,
                inode.flags & COPIED_FLAGS,
                inode.mode,
                inode.uid,
                inode.gid,
                inode.table,
                inode.chunk_bits,
            )
        )

    def _count_dentry(self, key: bytes, number: int, kind: int) -> None:
        directory = records.directory_of_key(key)
        self._sums.count(directory, ENTRIES, 1)
        self._sums.count(number, NAMES, 1)
        if kind == 4:
            self._sums.count(directory, SUBDIRS, 1)
            self._sums.count(number, PARENTS, directory)

    def _inode(self, key: bytes, raw: bytes) -> None:
        self._inode_count += 1
        number = records.inode_of_key(key)
        try:
            inode = records.decode_inode(number, raw)
        except CorruptRecord as error:
            self._inode_count -= 1
            self._findings.lay_aside(key, raw, str(error))
            return
        self._count_inode(inode)
        if inode.volume:
            self._volumes.count_inode(inode)
        if inode.is_directory and inode.links and self.tree.is_loop(number):
            self._findings.found(
                "loop", f"directory {number} is below itself", lambda: self._cut_loop(number)
            )
        if counter_of(number) >= self._view.next_number:
            self.counter_max = max(self.counter_max, counter_of(number))
            self._findings.found("number", f"inode {number} has a counter that is not given yet", list)
        now = self._inodes.current(number)
        if now is None:
            return
        if now.volume:
            self._volumes.check_inode(now, inode)
        orphan_key = records.numbered_key(records.ORPHAN, number)
        if not now.links and self._kv.get(orphan_key) is None:

            def queue() -> Effects:
                self._collector.add(number)
                return [(orphan_key, records.ORPHAN_VALUE)]

            self._findings.found("orphan", f"inode {number} has no name and is not among the orphans", queue)
        if now.flags & records.HAS_XATTRS and not self._kv.scan(*records.xattr_range(number), 1):

            def clear() -> Effects:
                now.flags &= ~records.HAS_XATTRS
                return [changed(now)]

            self._findings.found(
                "xattr", f"inode {number} is marked as having attributes and has none", clear
            )
        if now.flags & records.HAS_ACL and not any(
            self._kv.get(records.xattr_key(number, name)) for name in acl.NAMES
        ):

            def clear_mark() -> Effects:
                now.flags &= ~records.HAS_ACL
                return [changed(now)]

            self._findings.found(
                "acl", f"inode {number} is marked as having an access control list and has none", clear_mark
            )

    def _part(self, key: bytes, raw: bytes) -> None:
        """Count a stripe: its counts belong to the directory's record, whichever shard has that."""
        try:
            part = part_here(key, raw, self._view.shard)
            self._sums.count(part.number, SUBDIRS, -part.counts.subdirectories)
            self._sums.count(part.number, ENTRIES, -part.counts.entries)
            self._copy(part, part.shard)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, str(error))

    def _bounds(self, key: bytes, raw: bytes) -> None:
        try:
            # present value: numbers were given meanwhile
            bound = records.decode_bounds(self._kv.get(key) or raw).inode
        except CorruptRecord:
            bound = 0
        if bound < self._view.next_number:
            self.counter_max = max(self.counter_max, self._view.next_number)
            self._findings.found(
                "number", f"the bound of inode numbers is {bound}, {self._view.next_number} is the next", list
            )

    def _counts(self, key: bytes, raw: bytes) -> None:
        try:
            found = records.decode_counts(raw)
        except CorruptRecord:
            found = None
        if found != self._counted_at_first:
            self._counted = found

    def _dentry(self, key: bytes, raw: bytes) -> None:
        directory, name_hash, name = records.directory_of_key(key), key[HASH_AT:NAME_AT], key[NAME_AT:]
        try:
            number, kind = records.decode_dentry(records.partition_of_key(key), raw)
        except CorruptRecord as error:
            self._sums.count(directory, ENTRIES, 1)
            self._findings.lay_aside(
                key,
                raw,
                f"entry {name!r} of directory {directory}: {error}",
                lambda: self._less(directory, False),
            )
            return
        elsewhere = not self.is_here(partition_of(number))
        inode = self._inodes.current(number)
        if inode is not None:
            kind = inode.kind
        if elsewhere:
            self._names_of_others[number] = key
        self._count_dentry(key, number, kind)
        if self._kv.get(key) != raw or elsewhere or not self.is_here(partition_of(directory)):
            return  # the sums of all shards show what is wrong with it
        here = f"entry {name!r} of directory {directory}"
        if inode is None or number == ROOT_INODE:
            self._sums.count(number, NAMES, -1)  # reported here
            self._sums.count(number, PARENTS, -directory if kind == 4 else 0)
            self._findings.found(
                "dentry",
                f"{here} names inode {number}, which is {'not there' if inode is None else 'the root'}",
                lambda: [(key, None), *self._less(directory, kind == 4)],
            )
            return
        parent = self._inodes.current(directory)
        if parent is None or not parent.is_directory or (not parent.links and not self._is_going(parent)):
            self._findings.found(
                "dentry", f"{here} is in a directory that is not there", lambda: self._to_lost(inode, key)
            )
            return
        try:
            _, right_hash, right_key = self._view.place(parent, name)
        except WrongShard as error:
            self._findings.found("place", f"{here} is kept by the wrong shard: {error}", None)
            return
        except NvpoolError as error:
            self._findings.found(
                "dentry",
                f"{here} has an impossible name: {error}",
                lambda: [*self._to_lost(inode, key), *self._less(directory, kind == 4)],
            )
            return
        if not self.is_here(records.partition_of_key(right_key)):
            return
        if right_key != key:
            self._findings.found(
                "place",
                f"{here} is kept under the wrong {'hash' if name_hash != right_hash else 'partition'}",
                lambda: self._to_place(inode, parent, key, right_key),
            )
            return
        if raw[0] & 15 != inode.kind:
            partition = records.partition_of_key(key)
            self._findings.found(
                "dentry",
                f"{here} has the wrong kind",
                lambda: [(key, records.encode_dentry(partition, number, inode.kind))],
            )
        if inode.is_directory and inode.parent != directory:
            self._sums.misplaced[number] = key
            self._sums.by_inode.setdefault(number, [0, 0, 0, 0])

    def _is_going(self, directory: Inode) -> bool:
        """Whether this is the root of a volume that is being removed.

        It has no name, and its contents are deleted soon.
        """
        record = self._view.access.restricted.get(directory.number)
        return directory.number == directory.volume and record is not None and bool(record.flags & REMOVING)

    # -- sums --------------------------------------------------------------------------------------------------------

    def _settle(self, number: int) -> None:
        """Report an inode whose sums are not even."""
        names, subdirs, entries, parents = self._sums.by_inode.pop(number, (0, 0, 0, 0))
        inode = self._inodes.current(number)
        if inode is None:
            return
        if not inode.is_directory and names:
            self._findings.found(
                "links",
                f"inode {number} has {names:+} names against its link count",
                lambda: self._mend_links(inode, names),
            )
        if not inode.is_directory:
            return
        if (subdirs or entries) and not self._is_going(inode):
            self._findings.found(
                "counts",
                f"directory {number} has {subdirs:+} subdirectories and {entries:+} entries against its "
                "counts",
                lambda: self._decided(partial(recounted, number=number, subdirs=subdirs, entries=entries)),
            )
        misplaced = self._sums.misplaced.pop(number, None)
        if names < 0:
            self._findings.found(
                "inode",
                f"directory {number} has no name",
                lambda: self._to_lost(self._inodes.current(number), None),
            )
        elif names > 0 and not inode.links:
            self._findings.found(
                "links", f"directory {number} is removed and has a name", lambda: self._mend_links(inode, 2)
            )
        elif names > 0:
            here = misplaced is not None and self.is_here(records.partition_of_key(misplaced))
            self._findings.found(
                "dentry",
                f"directory {number} has {names + 1} names",
                None
                if not here
                else lambda: [(misplaced, None), *self._less(records.directory_of_key(misplaced), True)],
            )
        elif misplaced is not None and (
            inode.parent + parents - records.directory_of_key(misplaced) & MASK == 0
            if parents
            else self._kv.get(misplaced) is not None
        ):

            def adopt() -> Effects:
                now = self._inodes.current(number)
                now.parent = records.directory_of_key(misplaced)
                return [changed(now)]

            self._findings.found("parent", f"directory {number} does not know its parent", adopt)

    def _settle_count(self) -> None:
        there = self._inode_count + self._walk.inodes_gone
        if self._counted != there:

            def recount() -> Effects:
                self._view.inode_count += there - self._counted_at_first
                return [(records.COUNTS_KEY, records.encode_counts(self._view.inode_count))]

            self._findings.found("counts", f"{there} inodes are there, {self._counted} are counted", recount)

    def _mend_links(self, inode: Inode, difference: int) -> Effects:
        links = inode.links + difference
        if links <= 0:
            inode.links = 1
            return self._to_lost(inode, None)
        effects = []
        if not inode.links:
            effects.append((records.numbered_key(records.ORPHAN, inode.number), None))
            self._collector.orphans.pop(inode.number, None)
        inode.links = links
        return [*effects, changed(inode)]

    # -- moving entries ----------------------------------------------------------------------------------------------

    def _less(self, directory: int, subdirectory: bool) -> Effects:
        """Count one entry less in the directory; its record is corrected when the sums are settled."""
        self._sums.add(directory, ENTRIES, -1)
        self._sums.add(directory, SUBDIRS, -1 if subdirectory else 0)
        if self._left is not None and directory in self._sums.by_inode and directory not in self._left:
            self._left.append(directory)
        return []

    def _to_place(self, inode: Inode, parent: Inode, key: bytes, right_key: bytes) -> Effects:
        taken = self._kv.get(right_key)
        if taken is None:
            partition = records.partition_of_key(right_key)
            return [(key, None), (right_key, records.encode_dentry(partition, inode.number, inode.kind))]
        there = records.decode_dentry(records.partition_of_key(right_key), taken)[0]
        if there != inode.number:
            return [*self._to_lost(inode, key), *self._less(parent.number, inode.is_directory)]
        effects = [(key, None), *self._less(parent.number, inode.is_directory)]
        if inode.is_directory:
            self._sums.add(inode.number, NAMES, -1)
            self._sums.add(inode.number, PARENTS, -parent.number)
        else:
            inode.links = max(inode.links - 1, 0)
            effects.append(changed(inode))
        return effects

    def _to_lost(self, inode: Inode | None, key: bytes | None) -> Effects:
        """Move the entry `key` of the inode (None: it has none) to /lost+found."""
        if inode is None:
            raise NotFound("it is gone")
        self.tree.moved(inode.number)
        return self._decided(partial(to_lost, number=inode.number, key=key))

    def _decided(self, decide: Mend) -> Effects:
        """Apply a decided repair; if it needs other shards, it is carried out after this step."""
        try:
            draft = decide(self._view, now_ns=self._clock_ns())
        except WrongShard:
            self._findings.postpone(decide)
            return []
        self._kv.apply(draft.finish(), reclaims=True)
        if draft.born:
            self._view.next_number += 1
            self._view.inode_count += 1
        return []

    def _cut_loop(self, number: int) -> Effects | None:
        inode = self._inodes.current(number)
        above = self._inodes.current(inode.parent)
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
