"""A member of a shard while another one is its primary: it takes the primary's changes, in order, until it is promoted.

What the primary says to it: `begin` (what have you?), then `keep` (go on behind this change, forget what is behind) or
`install` (be emptied and filled anew), then `ship` after `ship`, and `sync`. Each names the primary's term. Who speaks for an
older term than the last one heard of, or than that of the last change here, gets StaleTerm and changes nothing.

What was answered with its number survives kill -9; what `sync` answered, the loss of power. Nothing is written to LMDB that
the primary has not said to be on all members that count. Called by meta/standby (from the wire) and by tests; one event loop
owns it. It never asks anybody.
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
from nvpool.kv.replication.member import NOTHING, MemberKv, is_whole, peek, records_of, with_term
from nvpool.kv.replication_log import Position, Tail, tail_of

log = logging.getLogger(__name__)

WAITING_MAX = 64
"""Groups that wait for room in the engine; a primary has fewer in flight."""


class Group(NamedTuple):
    """Changes that travel together: `records` as in a journal, one behind the other, perhaps none."""

    term: int
    records: bytes
    committed: int
    pairs: bool = False
    """They are no changes but records as they were after the last change before them: see `install`."""


Done = Callable[[int | None, BaseException | None], None]
"""Given the number of the last change here, or why there is none."""


class StandbyKv:
    """`kv` is the engine, while there is one."""

    def __init__(self, path: Path, options: LmdbOptions, *, term: int = 0, on_fence: Callable[[str], None] | None = None,
                 retain_bytes: int | None = None) -> None:
        self.path = path
        self.term = term
        self.kv: MemberKv | None = None
        self.filling = False
        """It is being filled from nothing, so it can not be promoted."""
        self._options = options
        self._on_fence = on_fence
        self._more = {} if retain_bytes is None else {"retain_bytes": retain_bytes}
        self._one = asyncio.Lock()
        self._waiting: deque[tuple[Group, Done]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._ready = False  # between begin and keep or install nothing is taken
        self._closed = False
        self._damage = ""
        self._looked_at = False

    @property
    def last(self) -> Position | None:
        """Of the last change here; None while the engine is not open."""
        return self.kv.last if self.kv is not None else None

    def hear(self, term: int) -> None:
        """A primary of `term` exists. StaleTerm: there is a later one."""
        if self._closed:
            raise Unavailable("this member is closed")
        if term < self.term:
            raise StaleTerm(f"term {term} of the shard is over, {self.term} has begun")
        if term > self.term:
            self.term = term
            self._ready = False

    async def begin(self, term: int) -> Tail:
        """What is here. From now on nothing of an older term is taken, and nothing at all before `keep` or `install`."""
        self.hear(term)
        async with self._one:
            self.hear(term)
            self._ready = False
            await self._quiet()
            if self.filling:
                return Tail(Position(0, 0))
            found = self._peek() if self.kv is None else tail_of(self.kv.stored, self.kv.history)
            if found.last.term > term:
                raise StaleTerm(f"here are changes of term {found.last.term}, {term} is over")
            return found

    def _peek(self) -> Tail:
        """What is in the directory; nothing where it is damaged, since the primary that asks has everything."""
        try:
            return peek(self.path)
        except CorruptRecord as error:
            if str(error) != self._damage:
                log.error("the records in %s are damaged and will be replaced by the primary's: %s", self.path, error)
            self._damage = str(error)
            return NOTHING

    def state(self) -> tuple[str, str]:
        """`standby`, `filling`, `empty`, `lost` (damaged) or `away` (can not be read), and the reason of the last two. Only a
        `standby` may be promoted."""
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
                return "away", f"its records can not be read: {error}"
            self._looked_at = True
        return ("lost", f"its records are damaged: {self._damage}") if self._damage else ("standby", "")

    async def keep(self, term: int, sequence: int) -> None:
        """Forget what is behind the change `sequence`; go on there. InvalidRequest: it is not here, or LMDB has more."""
        self.hear(term)
        async with self._one:
            self.hear(term)
            await self._quiet()
            if self.kv is None or self.kv.sequence != sequence or self.kv.fenced:
                await self._close_engine()
                self.kv = await MemberKv.open_member(self.path, with_term(self._options, term), keep=sequence,
                                                     on_fence=self._on_fence, **self._more)
            self.kv.history.alone = False
            self._ready = True

    async def install(self, term: int, position: Position) -> None:
        """Be emptied, and wait to be filled with all that the primary had after the change at `position` or has later: groups
        of pairs among those of changes, and at last `installed`."""
        self.hear(term)
        async with self._one:
            self.hear(term)
            await self._quiet()
            await self._close_engine()
            self.filling, self._damage = True, ""
            self.kv = await MemberKv.open_member(self.path, with_term(self._options, term), begin=position,
                                                 on_fence=self._on_fence, **self._more)
            self._ready = True

    async def installed(self, term: int) -> None:
        """All has been sent: make it durable. On return this is a member like others."""
        self.hear(term)
        async with self._one:
            self._check(term)
            if self._working is not None:
                await asyncio.wait([self._working])
                self._check(term)
            await self.kv.finish()
            self.kv.history.alone = False
            self.filling = False

    def ship(self, group: Group, done: Done) -> None:
        """Take changes, those that are here already apart; `done` is told in the order of the calls. Where it is told an error,
        nothing of the group that is not counted in the next `begin` has been taken, and nothing more is until then."""
        try:
            self._check(group.term)
            if not self.filling:
                self.kv.history.advance(group.committed)
            if self._working is None:
                if self._take(group):
                    done(self.kv.sequence, None)
                    return
            elif len(self._waiting) >= WAITING_MAX:
                raise Busy("too much waits here already")
        except NvpoolError as error:
            self._ready = False
            done(None, error)
            return
        self._waiting.append((group, done))
        if self._working is None:
            self._working = asyncio.ensure_future(self._work())

    async def sync(self, term: int) -> int:
        """Make all that is here durable; the last change that is."""
        self._check(term)
        sequence = self.kv.sequence
        await self.kv.sync(sequence)
        return sequence

    async def promote(self, term: int) -> MemberKv:
        """Become the primary of `term`: the engine, which is not ours any more. What was not taken yet never will be.

        Unavailable: this member is being filled, and does not know what was acknowledged. CorruptRecord: it has no whole
        records; nothing is made in their place. StaleTerm.
        """
        self.hear(term)
        async with self._one:
            self.hear(term)
            self._ready = False
            await self._quiet()
            if self.filling:
                raise Unavailable("this member was being filled by the primary that has gone")
            if self.kv is None or self.kv.fenced:
                await self._close_engine()
                if not is_whole(self.path):
                    raise CorruptRecord(f"{self.path} holds no whole records, so this member can not become the primary")
                self.kv = await MemberKv.open_member(self.path, with_term(self._options, term), on_fence=self._on_fence,
                                                     **self._more)
            self.kv.begin_term(term)
            kv, self.kv, self._closed = self.kv, None, True
            return kv

    async def close(self) -> None:
        """What is here is made durable. May be called twice."""
        await self._end(abandon=self.filling)

    async def abandon(self) -> None:
        """As the death of this process."""
        await self._end(abandon=True)

    async def _end(self, abandon: bool) -> None:
        self._closed = True
        self._ready = False
        async with self._one:
            await self._quiet()
            kv, self.kv = self.kv, None
            if kv is not None:
                await (kv.abandon() if abandon else kv.close())

    def _check(self, term: int) -> None:
        self.hear(term)
        if not self._ready or self.kv is None:
            raise Unavailable("begin anew: this member has not been told where to go on")

    def _take(self, group: Group) -> bool:
        """Whether all of the group is in the engine now; what is left waits for room."""
        records = records_of(group.records)
        if group.pairs:
            if self.kv.full:
                return False
            for record in records:
                self.kv.install(record.effects)
            return True
        try:
            for record in records:
                if record.sequence > self.kv.sequence:
                    self.kv.append(record)
        except Busy:
            return False
        return True

    async def _work(self) -> None:
        """Take what waits, as the engine has room."""
        try:
            while self._waiting:
                group, done = self._waiting[0]
                try:
                    self._check(group.term)
                    while not self._take(group):
                        await self.kv.more_room()
                        self._check(group.term)
                except NvpoolError as error:
                    self._ready = False
                    self._waiting.popleft()
                    done(None, error)
                else:
                    self._waiting.popleft()
                    done(self.kv.sequence, None)
        finally:
            self._working = None
            while self._waiting:
                self._waiting.popleft()[1](None, Unavailable("this member began anew"))

    async def _quiet(self) -> None:
        """Nothing waits any more."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _close_engine(self) -> None:
        kv, self.kv = self.kv, None
        if kv is not None:
            await kv.abandon()
