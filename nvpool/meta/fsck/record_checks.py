"""Checks of all records except names: attributes, orphans, truncations, locks, sessions, transactions.

Used by `meta/fsck/walker`, which does the walk.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core.errors import CorruptRecord, InvalidRequest, TooBig
from nvpool.core.posix import acl
from nvpool.core.posix.byte_range_locks import LockRange
from nvpool.kv.api import Kv
from nvpool.meta.fsck.findings import Effects, Findings
from nvpool.meta.fsck.present_inodes import PresentInodes, changed
from nvpool.meta.gc.collector import Collector
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.state import records
from nvpool.meta.state.lock_table import Owner
from nvpool.meta.state.records import Inode
from nvpool.meta.state.session_records import decode_session, decode_slot
from nvpool.meta.state.transaction import View
from nvpool.meta.state.transaction_records import decode_decision, decode_held, id_of_key


class RecordChecks:
    """Checks of records that are neither inodes nor names."""

    def __init__(
        self,
        kv: Kv,
        view: View,
        sessions: Sessions,
        collector: Collector,
        begin_cut: Callable[[int, records.Intent], object],
        inodes: PresentInodes,
        findings: Findings,
        count_orphan: Callable[[int, bytes], None],
    ) -> None:
        """`count_orphan(number, record)` counts an orphan of the walk's snapshot in its volume."""
        self._kv = kv
        self._view = view
        self._sessions = sessions
        self._collector = collector
        self._begin_cut = begin_cut
        self._inodes = inodes
        self._findings = findings
        self._count_orphan = count_orphan

    def checks(self) -> dict[int, Callable[[bytes, bytes], None]]:
        """Checks by kind of record."""
        return {
            records.XATTR: self._xattr,
            records.ORPHAN: self._orphan,
            records.COLLECT: self._collect,
            records.INTENT: self._intent,
            records.LOCK: self._lock,
            records.SESSION: self._session,
            records.SLOT: self._slot,
            **dict.fromkeys((records.HELD, records.DECIDED), self._cross_shard_record),
        }

    def _xattr(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        try:
            records.decode_xattr(raw)
        except CorruptRecord as error:
            self._findings.lay_aside(
                key,
                raw,
                f"attribute {key[9:]!r} of inode {number}: {error}",
                lambda: self._one_xattr_less(number),
            )
            return
        inode = self._inodes.current(number)
        if self._kv.get(key) is None:
            return
        if inode is None:
            self._findings.found(
                "xattr",
                f"attribute {key[9:]!r} belongs to inode {number}, which is not there",
                lambda: [(key, None)],
            )
        elif not inode.flags & records.HAS_XATTRS:

            def mark() -> Effects:
                inode.flags |= records.HAS_XATTRS
                return [changed(inode)]

            self._findings.found("xattr", f"inode {number} has attributes and is not marked so", mark)
        if inode is not None and key[9:] in acl.NAMES:
            self._acl(key, records.decode_xattr(raw), inode)

    def _acl(self, key: bytes, value: bytes, inode: Inode) -> None:
        """Check an access control list.

        A list that the kernel would refuse locks everybody out; one that contradicts the mode gives rights
        that `ls` does not show.
        """
        try:
            found = acl.decode_acl(value)
            if not found or (key[9:] == acl.DEFAULT and not inode.is_directory):
                raise InvalidRequest("only a directory has a default list" if found else "it is empty")
        except (InvalidRequest, TooBig) as error:

            def drop() -> Effects:
                if len(self._kv.scan(*records.xattr_range(inode.number), 2)) == 1:
                    inode.flags &= ~records.HAS_XATTRS
                if not any(
                    self._kv.get(records.xattr_key(inode.number, other)) for other in acl.NAMES - {key[9:]}
                ):
                    inode.flags &= ~records.HAS_ACL
                return [changed(inode), (key, None)]

            self._findings.found(
                "acl",
                f"the access control list {key[9:]!r} of inode {inode.number} is not valid: {error}",
                drop,
            )
            return
        if not inode.flags & records.HAS_ACL:

            def mark() -> Effects:
                inode.flags |= records.HAS_ACL
                return [changed(inode)]

            self._findings.found(
                "acl", f"inode {inode.number} has an access control list and is not marked so", mark
            )
        if key[9:] == acl.ACCESS and acl.mode_of(found) != inode.mode & 0o777:

            def follow() -> Effects:
                return [(key, records.XATTR_HEAD + acl.encode_acl(acl.changed_by_mode(found, inode.mode)))]

            self._findings.found(
                "acl",
                f"the access control list of inode {inode.number} and its mode {inode.mode & 0o777:o} differ",
                follow,
            )

    def _one_xattr_less(self, number: int) -> Effects:
        inode = self._inodes.current(number)
        if inode is None or len(self._kv.scan(*records.xattr_range(number), 2)) > 1:
            return []
        inode.flags &= ~records.HAS_XATTRS
        return [changed(inode)]

    def _orphan(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        self._count_orphan(number, raw)
        if (now := self._kv.get(key)) is None:
            return
        inode = self._inodes.current(number)
        if inode is None or inode.links:

            def drop() -> Effects:
                self._collector.orphans.pop(number, None)
                return [(key, None)]

            why = "which is not there" if inode is None else f"which has {inode.links} links"
            self._findings.found("orphan", f"the orphans name inode {number}, {why}", drop)
            return
        if now not in (records.ORPHAN_VALUE, records.ORPHAN_COUNTED):
            self._findings.found(
                "undecodable",
                f"the record of orphan {number} cannot be read",
                lambda: [(key, records.ORPHAN_VALUE)],
            )
        if number not in self._collector.orphans:

            def queue() -> Effects:
                self._collector.add(number)
                return []

            self._findings.found("orphan", f"orphan {number} is not waited for by the collector", queue)

    def _collect(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        if self._kv.get(key) != raw:
            return
        if self._inodes.current(number) is not None:
            self._findings.found(
                "collect",
                f"the chunks of inode {number} are to be removed, and it is there",
                lambda: [(key, None)],
            )
            return
        try:
            records.decode_collect(raw)
        except CorruptRecord as error:
            usual = records.Collect(*records.Layout())
            self._findings.found(
                "undecodable", f"{error} (inode {number})", lambda: [(key, records.encode_collect(usual))]
            )

    def _intent(self, key: bytes, raw: bytes) -> None:
        number = records.inode_of_key(key)
        if self._kv.get(key) != raw:
            return
        inode = self._inodes.current(number)
        if inode is None or not inode.is_file:
            self._findings.found(
                "intent", f"inode {number} has a truncation intent but is not a file", lambda: [(key, None)]
            )
            return
        try:
            intent = records.decode_intent(raw)
        except CorruptRecord as error:

            def rebuild() -> Effects:
                # No file grows before its truncation is done, so the inode itself has the intended size. For
                # a hole the range is lost; its client has received no answer.
                if inode.punches:
                    return [(key, None)]
                again = records.Intent(inode.cut, inode.size, inode.table, inode.chunk_bits)
                self._kv.apply([(key, records.encode_intent(again))], reclaims=True)
                self._begin_cut(number, again)
                return []

            self._findings.found("undecodable", f"{error} (inode {number})", rebuild)
            return
        if intent.cut != inode.cut:
            self._findings.found(
                "intent",
                f"the truncation intent of inode {number} has number {intent.cut}, the inode has {inode.cut}",
                lambda: [(key, None)],
            )
        elif number not in self._view.cutting:

            def begin() -> Effects:
                self._begin_cut(number, intent)
                return []

            self._findings.found("intent", f"the truncation of inode {number} was never finished", begin)

    def _lock(self, key: bytes, raw: bytes) -> None:
        """Check a stored lock. One that is not in memory blocks nobody now, but a restart would load it."""
        number = records.inode_of_key(key)
        try:
            kind, session, owner, start = records.lock_of_key(key)
            end, mode, pid = records.decode_lock(raw)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, f"{error} (inode {number})")
            return
        if self._kv.get(key) != raw:
            return
        inode, locks = self._inodes.current(number), self._view.locks
        here, who = f"inode {number} from byte {start} to {end}", Owner(kind, session, owner)
        if inode is None or not inode.is_file:

            def forget() -> Effects:
                locks.forget(number)
                return [(key, None)]

            self._findings.found("lock", f"{here} is locked but is not a file", forget)
        elif LockRange(start, end, mode, pid) not in locks.spans_of(number, who):
            self._findings.found(
                "lock",
                f"{here} has a record of a lock of session {session:#x} that is not in force",
                lambda: [(key, None)],
            )
        elif session not in self._sessions.by_number and session not in locks.dead:

            def end() -> Effects:
                locks.end_session(session)
                return []

            self._findings.found("lock", f"{here} is locked by unknown session {session:#x}", end)
        elif any(not other.waits for other in locks.in_the_way(number, who, start, end, mode)):
            self._findings.found(
                "lock", f"{here} is locked by session {session:#x} and by another: unmount one of them", None
            )

    def _session(self, key: bytes, raw: bytes) -> None:
        try:
            decode_session(raw)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, str(error))
            return
        if self._kv.get(key) is not None and records.session_of_key(key) not in self._sessions.by_number:
            self._findings.found(
                "session",
                f"session {records.session_of_key(key):#x} has a record and does not live",
                lambda: [(key, None)],
            )

    def _slot(self, key: bytes, raw: bytes) -> None:
        if (now := self._kv.get(key)) is None:
            return
        if records.session_of_key(key) not in self._sessions.by_number:
            self._findings.found(
                "slot",
                f"a slot belongs to session {records.session_of_key(key):#x}, which does not live",
                lambda: [(key, None)],
            )
            return
        try:
            decode_slot(now)
        except CorruptRecord as error:
            self._findings.found(
                "undecodable", f"{error} (session {records.session_of_key(key):#x})", lambda: [(key, None)]
            )

    def _cross_shard_record(self, key: bytes, raw: bytes) -> None:
        """Check a lock or a decision of a transaction.

        A valid one ends by itself as soon as the shards concerned can be reached.
        """
        try:
            id_of_key(key)
            (decode_held if records.kind_of(key) == records.HELD else decode_decision)(raw)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, str(error))
