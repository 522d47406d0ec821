"""Standby side of replication: applies the primary's changes in order, until the standby is promoted.

The primary's calls: `begin` (report your changes), then `keep` (continue after this change, discard later
ones) or `install` (be emptied and filled from scratch), then repeated `ship`, and `sync`. Each names the
primary's term. A call for an older term than the last one seen, or than that of the last change here, gets
StaleTerm and changes nothing.

A change whose number was returned survives kill -9; a change whose number `sync` returned survives a power
loss. Only changes that the primary has reported as committed, on all members that count, are written to LMDB.
Called by meta/server/replication_rpc and by tests; one event loop owns a standby. The standby never sends
requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nvpool.core.errors import Busy, CorruptRecord, NvpoolError, StaleTerm, Unavailable
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.member_engine import NOTHING, MemberKv, is_whole, peek, records_of, with_term
from nvpool.kv.replication_log import RETAIN_BYTES, Position, ReplicationHistory, Tail, tail_of

log = logging.getLogger(__name__)

WAITING_MAX = 64
"""Maximum number of groups that wait for space in the engine; a primary has fewer in flight."""


class Group(NamedTuple):
    """Changes that are sent together: `records` as in a journal, one after the other, perhaps none."""

    term: int
    records: bytes
    committed: int
    pairs: bool = False
    """The records are not changes, but current records as of the preceding change: see `install`."""


Done = Callable[[int | None, BaseException | None], None]
"""Callback with the number of the last change here, or with the error."""


class StandbyKv:
    """A standby. `kv` is its engine while the engine is open."""

    def __init__(
        self,
        path: Path,
        options: LmdbOptions,
        *,
        term: int = 0,
        on_fence: Callable[[str], None] | None = None,
        retain_bytes: int | None = None,
    ) -> None:
        self.path = path
        self.term = term
        self.kv: MemberKv | None = None
        self._closing: MemberKv | None = None
        self.filling = False
        """The standby is being filled from scratch, so it cannot be promoted."""
        self._options = options
        self._on_fence = on_fence
        self._retain_bytes = RETAIN_BYTES if retain_bytes is None else retain_bytes
        self._one = asyncio.Lock()
        self.waiting: deque[tuple[Group, Done]] = deque()
        self._working: asyncio.Task[None] | None = None
        self.ready = False  # no changes are accepted between begin and keep or install
        self._closed = False
        self._damage = ""
        self._looked_at = False

    @property
    def last(self) -> Position | None:
        """Position of the last change here; None while the engine is not open."""
        return self.kv.last if self.kv is not None else None

    def hear(self, term: int) -> None:
        """Note that a primary of `term` exists; StaleTerm if there is a later one."""
        if self._closed:
            raise Unavailable("this member is closed")
        if term < self.term:
            raise StaleTerm(f"term {term} of the shard is over, {self.term} has begun")
        if term > self.term:
            self.term = term
            self.ready = False

    async def begin(self, term: int) -> Tail:
        """Return the tail of this member.

        From now on, changes of older terms are rejected, and all changes before `keep` or `install`.
        """
        self.hear(term)
        async with self._one:
            self.hear(term)
            self.ready = False
            await self._quiet()
            if self.filling:
                return Tail(Position(0, 0))
            if self.kv is None:
                await self._close_engine()
            found = self._peek() if self.kv is None else tail_of(self.kv.stored, _history(self.kv))
            if found.last.term > term:
                raise StaleTerm(f"here are changes of term {found.last.term}, {term} is over")
            return found

    def _peek(self) -> Tail:
        """Return the tail of the directory; NOTHING if it is damaged, since the primary has everything."""
        try:
            return peek(self.path)
        except CorruptRecord as error:
            if str(error) != self._damage:
                log.error(
                    "the records in %s are damaged and will be replaced by the primary's: %s",
                    self.path,
                    error,
                )
            self._damage = str(error)
            return NOTHING

    def state(self) -> tuple[str, str]:
        """Return `standby`, `filling`, `empty`, `lost` (damaged) or `away` (unreadable), and the reason of
        the last two.

        Only a `standby` may be promoted.
        """
        if self.filling:
            return "filling", ""
        if self.kv is not None or self._one.locked():
            return "standby", ""
        if not is_whole(self.path):
            return "empty", ""
        if not self._looked_at:
            try:
                self._peek()
            except NvpoolError as error:
                return "away", f"its records cannot be read: {error}"
            self._looked_at = True
        return ("lost", f"its records are damaged: {self._damage}") if self._damage else ("standby", "")

    async def keep(self, term: int, sequence: int) -> None:
        """Discard the changes after `sequence`, and continue there.

        InvalidRequest: this change is not here, or LMDB has later ones.
        """
        self.hear(term)
        async with self._one:
            self.hear(term)
            await self._quiet()
            if self.kv is None or self.kv.sequence != sequence or self.kv.fenced:
                await self._close_engine()
                self.kv = await MemberKv.open_member(
                    self.path,
                    with_term(self._options, term),
                    keep=sequence,
                    on_fence=self._on_fence,
                    retain_bytes=self._retain_bytes,
                )
            _history(self.kv).alone = False
            self.ready = True

    async def install(self, term: int, position: Position) -> None:
        """Empty this member, and wait to be filled.

        The primary sends everything that it had after the change at `position` or has later: groups of pairs
        between groups of changes, and finally `installed`.
        """
        self.hear(term)
        async with self._one:
            self.hear(term)
            await self._quiet()
            await self._close_engine()
            self.filling, self._damage = True, ""
            self.kv = await MemberKv.open_member(
                self.path,
                with_term(self._options, term),
                begin=position,
                on_fence=self._on_fence,
                retain_bytes=self._retain_bytes,
            )
            self.ready = True

    async def installed(self, term: int) -> None:
        """Make the filled records durable, after everything was sent. On return this is a normal standby."""
        self.hear(term)
        async with self._one:
            kv = self._check(term)
            if self._working is not None:
                await asyncio.wait([self._working])
                kv = self._check(term)
            await kv.finish()
            _history(kv).alone = False
            self.filling = False

    def ship(self, group: Group, done: Done) -> None:
        """Apply the changes of a group, except those that are already here; `done` is called in the order of
        the calls.

        If `done` gets an error, the next `begin` reports what was applied; until then, no further changes are
        accepted.
        """
        try:
            kv = self._check(group.term)
            if not self.filling and kv.history is not None:
                kv.history.advance(group.committed)
            if self._working is None:
                if self._take(kv, group):
                    done(kv.sequence, None)
                    return
            elif len(self.waiting) >= WAITING_MAX:
                raise Busy("too much waits here already")
        except NvpoolError as error:
            self.ready = False
            done(None, error)
            return
        self.waiting.append((group, done))
        if self._working is None:
            self._working = asyncio.ensure_future(self._work())

    async def sync(self, term: int) -> int:
        """Make all changes durable; return the number of the last one."""
        kv = self._check(term)
        sequence = kv.sequence
        await kv.sync(sequence)
        return sequence

    async def promote(self, term: int) -> MemberKv:
        """Become the primary of `term`; return the engine, which now belongs to the caller. Pending groups
        are discarded.

        Unavailable: this member is being filled, and does not have every acknowledged change.
        CorruptRecord: this member has no complete records; no empty ones are created instead.
        StaleTerm: there is a later term.
        """
        self.hear(term)
        async with self._one:
            self.hear(term)
            self.ready = False
            await self._quiet()
            if self.filling:
                raise Unavailable("this member was being filled by the primary that has gone")
            if self.kv is None or self.kv.fenced:
                await self._close_engine()
                if not is_whole(self.path):
                    raise CorruptRecord(
                        f"{self.path} holds no whole records, so this member cannot become the primary"
                    )
                self.kv = await MemberKv.open_member(
                    self.path,
                    with_term(self._options, term),
                    on_fence=self._on_fence,
                    retain_bytes=self._retain_bytes,
                )
            self.kv.begin_term(term)
            kv, self.kv, self._closed = self.kv, None, True
            return kv

    async def close(self) -> None:
        """Make all changes durable and close. May be called twice."""
        await self._end(abandon=self.filling)

    async def abandon(self) -> None:
        """Close as the death of this process would."""
        await self._end(abandon=True)

    async def _end(self, abandon: bool) -> None:
        self._closed = True
        self.ready = False
        async with self._one:
            await self._quiet()
            if self.kv is not None and not abandon:
                self._closing, self.kv = self.kv, None
                await self._closing.close()
            await self._close_engine()

    def _check(self, term: int) -> MemberKv:
        """Return the engine; StaleTerm or Unavailable if it accepts nothing from a primary of `term`."""
        self.hear(term)
        if not self.ready or self.kv is None:
            raise Unavailable("begin again: this member does not know yet where the log continues")
        return self.kv

    @staticmethod
    def _take(kv: MemberKv, group: Group) -> bool:
        """Apply a group; return False if the rest of the group has to wait for space."""
        if not group.pairs and kv.try_append_group(group.records):
            return True
        records = records_of(group.records)
        if group.pairs:
            if kv.full:
                return False
            for record in records:
                kv.install(record.effects)
            return True
        try:
            for record in records:
                if record.sequence > kv.sequence:
                    kv.append(record)
        except Busy:
            return False
        return True

    async def _work(self) -> None:
        """Apply waiting groups as the engine has space."""
        try:
            while self.waiting:
                group, done = self.waiting[0]
                try:
                    kv = self._check(group.term)
                    while not self._take(kv, group):
                        await kv.more_room()
                        kv = self._check(group.term)
                except NvpoolError as error:
                    self.ready = False
                    self.waiting.popleft()
                    done(None, error)
                else:
                    self.waiting.popleft()
                    done(kv.sequence, None)
        finally:
            self._working = None
            while self.waiting:
                self.waiting.popleft()[1](None, Unavailable("this member started again"))

    async def _quiet(self) -> None:
        """Cancel the waiting groups, and return when none is left."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _close_engine(self) -> None:
        """Close the engine, or wait for one whose close a cancelled caller began: its directory is locked."""
        if self.kv is not None:
            self._closing, self.kv = self.kv, None
        if self._closing is not None:
            await self._closing.abandon()
            self._closing = None


def _history(kv: MemberKv) -> ReplicationHistory:
    """Return the retained changes of a standby's engine; only a primary may retain none."""
    assert kv.history is not None
    return kv.history
