"""Primary side of replication: ships changes to all standbys and commits them.

A change is committed when all standbys that *count* have it. A standby starts to count when it has nearly
caught up. When the standby has everything that was ever committed, the primary requests that the pool map
marks the standby as "up". A standby that may be "up" in the map stops counting only after the map says that
it is not. Only standbys that are "up" can be promoted, so a promoted standby has every acknowledged change.
Changes are shipped in groups. The first two are sent immediately, so the commit of one change does not wait for
another change's group; while they are in flight, changes gather for the next group, and more groups are in
flight only if many changes wait.

A standby that is far behind is filled from scratch: the records are read in steps, and each step is sent
after all changes that were made before it was read, so filling needs no snapshot.

`Shipping` gets the engine of the primary (kv/replication/member_engine), one `StandbyLink` for each other member, and
`ask`, which changes the map. Used by meta/server/shard_member. One event loop owns a `Shipping`. A `Shipping` ends with
`close`, or reports through `on_deposed` that a later term has begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar

from nvpool.core.clock import Clock
from nvpool.core.errors import (
    DeadlineExceeded,
    Fenced,
    NoSpace,
    NotLeader,
    NvpoolError,
    StaleTerm,
    Unavailable,
)
from nvpool.core.units import MIB
from nvpool.kv.api import KEY_END
from nvpool.kv.replication.member_engine import MemberKv, as_one_record
from nvpool.kv.replication.standby import Done, Group
from nvpool.kv.replication_log import Position, Tail

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ShippingOptions:
    silent_s: float = 1.5
    """A standby that counts and is silent for this time is removed from the map; until then, changes wait for
    it."""
    heartbeat_s: float = 0.25
    retry_s: float = 0.1
    call_up_s: float = 1.0
    """Delay before a standby counts again after its call-up failed: until then, changes do not wait for
    it."""
    lag_max: int = 2000
    """Maximum lag, in changes, of a standby that starts to count: the changes that are pending then wait for
    the lag."""
    in_flight_max: int = 8
    gather_from: int = 2
    """Groups in flight to a standby from which on changes are gathered until an answer comes."""
    gather_changes: int = 256
    """Gathered changes that are sent without such an answer."""
    group_bytes: int = 256 << 10
    step_pairs: int = 1000
    begin_s: float = 30.0
    """Time limit for opening, replaying or emptying a standby's records."""


class StandbyLink(Protocol):
    """A remote standby, as the primary calls it; kv/replication/standby describes the methods.

    A failed connection raises the errors of its transport.
    """

    async def begin(self, term: int) -> Tail: ...

    async def keep(self, term: int, sequence: int) -> None: ...

    async def install(self, term: int, position: Position) -> None: ...

    async def installed(self, term: int) -> None: ...

    def ship(self, group: Group, done: Done) -> None:
        """Send a group, in the order of the calls.

        `done` is always called before long, perhaps immediately.
        """

    async def sync(self, term: int) -> int: ...


Ask = Callable[[int, bool], Awaitable[None]]
"""ask(member, up): returns when the map has this state. Raises if it does not, or if the result is unknown.
NotLeader without `may_be_applied` proves that no process that could change the map received the request.
Other errors prove nothing: supervisors of version 0.1.0 forward Unreachable after they have asked a former
leader."""


class MemberState(TypedDict):
    """Status of one other member."""

    counts: bool
    behind: int
    """Lag, in changes."""
    filling: bool
    reason: str
    """Why the member is not reachable; empty if it is."""


class _Peer:
    def __init__(self, number: int, standby: StandbyLink, up: bool, now_s: float) -> None:
        self.number = number
        self.standby = standby
        self.counts = self.may_be_up = up
        self.acked = self.sent = self.synced = self.floor = 0
        self.in_flight = 0
        self.stream = 0
        self.streaming = self.filling = self.failed_for_good = False
        self.broken: asyncio.Future[None] | None = None
        self.heard_s = now_s
        self.tasks: set[asyncio.Task[None]] = set()
        self.asking: asyncio.Task[None] | None = None
        self.call_up_after_s = 0.0
        self.one_question = asyncio.Lock()
        self.syncing = False
        self.reason = ""


class Shipping:
    def __init__(
        self,
        kv: MemberKv,
        *,
        clock: Clock,
        ask: Ask,
        on_deposed: Callable[[], None],
        options: ShippingOptions = ShippingOptions(),
    ) -> None:
        assert kv.history is not None, "shipping needs an engine that retains its last changes"
        self._kv = kv
        self._history = kv.history
        self._clock = clock
        self._ask = ask
        self.on_deposed = on_deposed
        self._options = options
        self.peers: dict[int, _Peer] = {}
        self._woken = False
        self._closed = False
        self._sync_waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self.filled = self.taken_out = 0
        self._history.on_change = self._changed
        kv.sync_others = self._sync_others
        self._settle()

    @property
    def term(self) -> int:
        return self._kv.term

    def use(self, members: dict[int, tuple[Callable[[], StandbyLink], bool]]) -> None:
        """Set the other members: for each, how to reach it, and whether the map marks it as up.

        New members are followed from now on; removed members are dropped. For known members, the map has the
        state that we requested, with one exception: another node may demote a standby that has lost its
        records. Then the standby stops counting here too, and is called up when it has everything again.
        """
        for number in [number for number in self.peers if number not in members]:
            self._forget(self.peers.pop(number))
        for number, (reach, up) in members.items():
            if number not in self.peers:
                peer = self.peers[number] = _Peer(number, reach(), up, self._clock.boottime_s())
                for work in (self._run(peer), self._watch(peer)):
                    self._own(peer, work)
            elif (peer := self.peers[number]).may_be_up and not up and not peer.one_question.locked():
                peer.reason = "the map does not call it up any more"
                self._own(peer, self._take_out(peer))
        self._settle()

    @property
    def may_be_replaced(self) -> bool:
        """Whether the map may mark a member as up; such a member could be promoted without our knowledge."""
        return any(peer.may_be_up for peer in self.peers.values())

    def states(self) -> dict[int, MemberState]:
        """Return the status of each member: whether it counts, its lag, and why it is not reachable."""
        return {
            number: {
                "counts": peer.counts,
                "behind": max(0, self._history.last.sequence - peer.acked),
                "filling": peer.filling,
                "reason": peer.reason,
            }
            for number, peer in self.peers.items()
        }

    async def close(self) -> None:
        """Stop shipping.

        Callers that wait for standbys get Unavailable, since the outcome is unknown. The engine stays open.
        """
        self._closed = True
        self._history.on_change = None
        tasks = [task for peer in self.peers.values() for task in self._forget(peer)]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kv.sync_others = None
        for waiter in self._sync_waiters:
            if not waiter.done():
                waiter.set_exception(
                    Unavailable("this member is not the primary any more", may_be_applied=True)
                )
                waiter.exception()
        self._history.end()

    def _own(self, peer: _Peer, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        peer.tasks.add(task)
        task.add_done_callback(partial(self._ended, peer))
        return task

    def _ended(self, peer: _Peer, task: asyncio.Task[None]) -> None:
        peer.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("shipping to member %d broke", peer.number, exc_info=error)
            self._depose()

    @staticmethod
    def _forget(peer: _Peer) -> list[asyncio.Task[None]]:
        peer.counts = peer.streaming = False
        for task in list(peer.tasks):
            task.cancel()
        return list(peer.tasks)

    def _depose(self) -> None:
        if not self._closed:
            self.on_deposed()

    # -- commits ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Recompute which members count, and what is committed."""
        counting = [peer.acked for peer in self.peers.values() if peer.counts]
        history = self._history
        history.alone = not counting and not self._closed
        history.advance(min(counting) if counting else history.last.sequence)
        self._wake_syncs()

    def _changed(self) -> None:
        """Schedule sending after a change, together with other changes of the same event-loop iteration."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._woken = False
        for peer in self.peers.values():
            self._pump(peer)

    def _send_all(self) -> None:
        """Send what is gathered too, as far as groups may be in flight."""
        for peer in self.peers.values():
            self._pump(peer, gathers=False)

    # -- one standby -------------------------------------------------------------------------------------------------

    async def _run(self, peer: _Peer) -> None:
        while True:
            try:
                await self._follow(peer)
            except StaleTerm as error:
                log.warning("member %d: %s", peer.number, error)
                self._depose()
                return
            except NvpoolError as error:
                if str(error) != peer.reason:
                    log.info("member %d is not followed: %s", peer.number, error)
                peer.reason = str(error)
                peer.failed_for_good = isinstance(error, (NoSpace, Fenced))
            finally:
                self._stop(peer)
            await asyncio.sleep(
                self._options.retry_s if not peer.failed_for_good else 10 * self._options.retry_s
            )

    def _stop(self, peer: _Peer) -> None:
        peer.streaming = peer.filling = False
        peer.stream += 1
        peer.in_flight = 0

    async def _follow(self, peer: _Peer) -> None:
        """Resume the standby at the last common change, or fill it; then stream until an error.

        The error is raised.
        """
        standby, history = peer.standby, self._history
        tail = await self._timed(standby.begin(self.term))
        keep = history.common(tail)
        if peer.counts and (keep is None or keep < history.committed):
            await self._take_out(peer)  # the standby has lost changes that it had
        if keep is not None:
            await self._timed(standby.keep(self.term, keep))
            broken = self._start(peer, keep)
        else:
            begin = history.last
            log.info(
                "member %d is filled again from nothing: it has %s, here are changes behind %s",
                peer.number,
                tail.last,
                history.base,
            )
            await self._timed(standby.install(self.term, begin))
            peer.filling = True
            broken = self._start(peer, begin.sequence)
            self._own(peer, self._fill(peer, peer.stream))
        peer.reason, peer.failed_for_good = "", False
        self._pump(peer)
        while not broken.done():
            self._heartbeat(peer)
            self._consider(peer)
            await asyncio.wait([broken], timeout=self._options.heartbeat_s)
        broken.result()

    async def _timed(self, work: Awaitable[_Result]) -> _Result:
        try:
            async with asyncio.timeout(self._options.begin_s):
                return await work
        except TimeoutError:
            raise DeadlineExceeded("a standby did not answer in time") from None

    def _start(self, peer: _Peer, sequence: int) -> asyncio.Future[None]:
        """Stream the changes after `sequence`; return the future that gets the error that ends the stream."""
        peer.stream += 1
        peer.acked = peer.sent = sequence
        peer.synced = 0
        peer.in_flight = 0
        peer.syncing = False
        peer.streaming = True
        broken = peer.broken = self._loop.create_future()
        peer.heard_s = self._clock.boottime_s()
        self._settle()
        return broken

    def _pump(self, peer: _Peer, gathers: bool = True) -> None:
        """Send changes to a standby. With `gathers`, a few changes wait for the answer to an earlier group.

        Under load, each group then has all changes that were made during a round trip.
        """
        history, options = self._history, self._options
        while (
            peer.streaming
            and peer.in_flight < options.in_flight_max
            and (waiting := history.last.sequence - peer.sent) > 0
        ):
            if gathers and peer.in_flight >= options.gather_from and waiting < options.gather_changes:
                return
            records = history.records(peer.sent, options.group_bytes)
            if not records:
                self._break(
                    peer,
                    Unavailable(
                        "the member is further behind than what is kept; it starts again from nothing"
                    ),
                )
                return
            peer.sent += len(records)
            self._ship(peer, Group(self.term, b"".join(records), history.committed))

    def _heartbeat(self, peer: _Peer) -> None:
        if peer.streaming and peer.in_flight < 2 * self._options.in_flight_max:
            self._ship(peer, Group(self.term, b"", self._history.committed))

    def _ship(self, peer: _Peer, group: Group) -> None:
        peer.in_flight += 1
        peer.standby.ship(group, partial(self._answered, peer, peer.stream))

    def _answered(self, peer: _Peer, stream: int, sequence: int | None, error: BaseException | None) -> None:
        if stream != peer.stream or not peer.streaming:
            return
        peer.in_flight -= 1
        if error is not None:
            self._break(peer, error)
            return
        peer.heard_s = self._clock.boottime_s()
        if sequence is not None and sequence > peer.acked:
            peer.acked = sequence
            if peer.counts:
                self._settle()
                self._consider(peer)
        self._pump(peer)

    @staticmethod
    def _break(peer: _Peer, error: BaseException) -> None:
        peer.streaming = False
        if peer.broken is not None and not peer.broken.done():
            peer.broken.set_exception(error if isinstance(error, NvpoolError) else Unavailable(str(error)))
            peer.broken.exception()  # mark as retrieved, in case nothing awaits the future any more

    async def _fill(self, peer: _Peer, stream: int) -> None:
        """Send all records. A step is read and sent without an await in between, after all earlier
        changes."""
        first, options, history = b"", self._options, self._history
        self.filled += 1
        try:
            while first < KEY_END:
                self._pump(peer)
                while peer.sent < history.last.sequence or peer.in_flight >= options.in_flight_max:
                    await asyncio.sleep(0.002)
                    if stream != peer.stream or not peer.streaming:
                        return
                    self._pump(peer)
                pairs = _bounded(self._kv.scan(first, KEY_END, options.step_pairs))
                first = pairs[-1][0] + b"\0" if pairs else KEY_END
                if pairs:
                    self._ship(peer, Group(self.term, as_one_record(pairs), history.committed, pairs=True))
                await asyncio.sleep(0)
                if stream != peer.stream or not peer.streaming:
                    return
            while peer.in_flight:
                await asyncio.sleep(0.002)
                if stream != peer.stream or not peer.streaming:
                    return
            await self._timed(peer.standby.installed(self.term))
        except NvpoolError as error:
            if stream == peer.stream:
                self._break(peer, error)
            return
        if stream == peer.stream:
            log.info("member %d is filled", peer.number)
            peer.filling = False
            self._consider(peer)

    # -- members that count ----------------------------------------------------------------------------------

    def _consider(self, peer: _Peer) -> None:
        """Let a standby count if it has caught up; request its call-up if it has everything."""
        if not peer.streaming or peer.filling or peer.asking is not None:
            return
        history = self._history
        if not peer.counts:
            if (
                history.last.sequence - peer.acked > self._options.lag_max
                or self._clock.boottime_s() < peer.call_up_after_s
            ):
                return
            peer.counts, peer.floor = True, history.committed
            self._settle()
        if not peer.may_be_up and peer.acked >= peer.floor:
            peer.asking = self._own(peer, self._call_up(peer))

    async def _call_up(self, peer: _Peer) -> None:
        try:
            await self._timed(peer.standby.sync(self.term))
            async with peer.one_question:
                if not peer.counts or peer.may_be_up:
                    return
                peer.may_be_up = True  # set before the request, because its reply may be lost
                try:
                    await self._timed(self._ask(peer.number, True))
                except NotLeader as error:
                    if error.may_be_applied:
                        raise
                    self._count_later(peer, error)
                    return
            peer.reason = ""
            log.info("member %d is up", peer.number)
        except StaleTerm:
            self._depose()
        except NvpoolError as error:
            log.info("member %d is not called up: %s", peer.number, error)
            await self._take_out(peer)  # to know the state in the map again
        finally:
            peer.asking = None

    def _count_later(self, peer: _Peer, error: NvpoolError) -> None:
        """Stop counting a standby whose call-up request reached no process that could change the map.

        The map has not marked the standby as up, so changes may continue without it, without another request:
        while no node leads, a request to remove the standby would not be answered either. Streaming to the
        standby continues.
        """
        if str(error) != peer.reason:
            log.info("member %d is not called up: %s", peer.number, error)
        peer.reason = str(error)
        peer.may_be_up = peer.counts = False
        peer.call_up_after_s = self._clock.boottime_s() + self._options.call_up_s
        self._settle()

    async def _watch(self, peer: _Peer) -> None:
        """Remove a standby from the map if it counts but does not respond."""
        while True:
            await asyncio.sleep(self._options.silent_s / 10)
            if not peer.counts:
                continue
            if peer.failed_for_good or self._clock.boottime_s() - peer.heard_s > self._options.silent_s:
                await self._take_out(peer)

    async def _take_out(self, peer: _Peer) -> None:
        """Take a standby out: on return the map does not mark it as up, and it does not count."""
        async with peer.one_question:
            while peer.may_be_up:
                try:
                    await self._timed(self._ask(peer.number, False))
                    peer.may_be_up = False
                except StaleTerm:
                    self._depose()
                    return
                except NvpoolError as error:
                    if peer.reason != str(error):
                        log.warning("member %d cannot be taken out of the map: %s", peer.number, error)
                    peer.reason = str(error)
                    await asyncio.sleep(self._options.retry_s)
            if not peer.counts:
                return
            log.warning("member %d is taken out: %s", peer.number, peer.reason or "it does not answer")
            self.taken_out += 1
            peer.counts = False
            if peer.streaming:
                self._break(peer, Unavailable("the member was taken out; it starts again from nothing"))
            self._settle()

    # -- durability on all members ---------------------------------------------------------------------------

    async def _sync_others(self, sequence: int) -> None:
        """Return when every standby that counts has the change durably.

        Concurrent callers share the requests.
        """
        while True:
            if self._closed:
                raise Unavailable("this member is not the primary any more", may_be_applied=True)
            behind = [peer for peer in self.peers.values() if peer.counts and peer.synced < sequence]
            if not behind:
                return
            self._send_all()  # send the changes before the sync requests
            for peer in behind:
                if peer.streaming and not peer.syncing:
                    peer.syncing = True
                    self._own(peer, self._sync_one(peer, peer.stream))
            waiter = self._loop.create_future()
            self._sync_waiters.append(waiter)
            await waiter

    async def _sync_one(self, peer: _Peer, stream: int) -> None:
        try:
            synced = await self._timed(peer.standby.sync(self.term))
            if stream == peer.stream:
                peer.synced = max(peer.synced, synced)
        except NvpoolError as error:
            if stream == peer.stream and peer.streaming:
                self._break(peer, error)
        finally:
            if stream == peer.stream:
                peer.syncing = False
            self._wake_syncs()

    def _wake_syncs(self) -> None:
        waiters, self._sync_waiters = self._sync_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _bounded(pairs: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the first pairs that fit into one message, at least one."""
    size = 0
    for count, (key, value) in enumerate(pairs):
        size += len(key) + len(value)
        if size > 2 * MIB and count:
            return pairs[:count]
    return pairs
