"""Writes to replicated chunks: one chain member's part of the protocol in poolmap/chains/protocol.

The head queues the writes to a chunk and runs one at a time. Each member holds the undecided write as
*pending*: its bytes are already on the drive or in memory, partial blocks are merged, checksums compared and
space allocated (ChunkStore.prepare). So the commit, after the successors have committed, does not fail. A
member that nevertheless cannot commit its pending write must not continue: it fences itself.

A pending write exists only in the memory of this process. A process that dies leaves its chains before it
serves again (the manager ensures this), and then copies the state of the other members. So a record on the
drive would help only if all other members died in the moment between, for a write that no client got an
answer for. An acknowledged write is committed by every member.

In the usual case no task runs: the write is prepared and offered in the step that accepts it, and committed
in the callback of the successor's reply. In every other case (a wait for room or for an old block, an error, a
lost reply, a changed chain) `_carry_out` continues the same pending write in a task.

Reads and truncations of a chunk with a pending write wait until the write is decided. These are bounded: the
writes that wait for a chunk, the bytes that a head has in progress, and the bytes on their way to a successor
(store/replication/peer_connections). `store/replication/role` calls this module on the store's event loop.

A head whose serving lease has ended begins no write: it could not acknowledge it, and other targets may have
replaced it already. A write that a successor may have is continued without a lease, since it must be decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import NamedTuple

from nvpool.core import errors
from nvpool.core.clock import Clock
from nvpool.core.errors import (
    Busy,
    ChecksumMismatch,
    CorruptRecord,
    DeadlineExceeded,
    DriveFailed,
    NvpoolError,
    StaleCut,
    StaleEpoch,
    StaleTenure,
    StaleVersion,
    WrongTarget,
)
from nvpool.core.ids import is_done
from nvpool.poolmap.chains.protocol import (
    Answer,
    ChainPosition,
    MemberChunkState,
    Next,
    Offer,
    deciders_now,
    gained,
    is_refusal,
    judge,
    next_step,
    next_version,
    taking_part,
    until,
)
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.messages.peer_messages import PeerWriteReply, PeerWriteRequest
from nvpool.store.chunk_write import ChunkWrite, Name, Placed
from nvpool.store.chunks.api import ChunkStore, MustWait
from nvpool.store.replication.peer_connections import PendingForward, ReplicaPeers

log = logging.getLogger(__name__)

QUEUED_MAX = 256
"""Writes that may wait for their turn at one chunk."""
LED_BYTES_MAX = 256 << 20
"""Bytes of undecided writes that this head has accepted from clients, waiting ones included.

Above this limit clients get Busy.
"""
AGAIN_S, AGAIN_S_MAX = 0.01, 0.5
"""First and longest delay before an offer with an unknown outcome is repeated."""
READ_WAIT_S = 1.0
"""How long a read waits for a pending write.

Then the client may try another replica, which may know the outcome.
"""
CUT_WAIT_S = 3.0
"""How long a truncation waits for a pending write. Then the caller repeats the truncation."""
REFUSED_MAX = 1024
"""Chunks of which a refused version is remembered. One that is forgotten is offered, and refused, once more."""
_TRIES_MAX = 1000
_LED_BYTES_MAX = LED_BYTES_MAX
_new_tuple = tuple.__new__

Outcome = tuple[PeerWriteReply | None, BaseException | None]
"""Outcome of an offer: the successor's reply, or an error that leaves the write undecided."""
OnEnd = Callable[[int], None]
"""Called with the committed version, or with 0 if a task continues the write: then use `ChainWrites.lead`."""
OnDecided = Callable[[int | Exception], None]
"""Called once with the committed version, or with the error."""


class Pending:
    """A write that is not decided on this target yet."""

    __slots__ = (
        "write",
        "version",
        "base",
        "place",
        "whole",
        "deciders",
        "last",
        "older",
        "dropped",
        "is_decided",
        "_decided",
        "listeners",
        "waiter",
        "sending",
        "placed",
        "offered",
        "led_bytes",
        "on_end",
    )

    def __init__(self, write: ChunkWrite, version: int, base: int, place: ChainPosition):
        self.write = write
        self.version = version
        self.base = base
        self.place = place
        """Position in the chain, with the members that take part in this write."""
        self.whole = place
        """Position in the chain of the pool map."""
        self.deciders = frozenset(place.members)
        self.last = place.is_last
        """Whether this target must commit first."""
        self.older = False
        """Whether a member has joined the chain since this write began."""
        self.dropped = False
        self.is_decided = False
        self._decided: asyncio.Future[int] | None = None
        self.listeners: list[OnDecided] | None = None
        """Called when the write is decided."""
        self.waiter: asyncio.Future | None = None
        self.sending: PendingForward | None = None
        self.placed: Placed | None = None
        """Blocks of the write, once it is prepared."""
        self.offered: PendingForward | None = None
        """The offer in flight, while no task carries the write out."""
        self.led_bytes = 0
        """Bytes of a client's write that no task carries out, counted until it is decided."""
        self.on_end: OnEnd | None = None

    def decided(self) -> asyncio.Future[int]:
        """Return the future that completes with the committed version, or with the error."""
        if self._decided is None:
            self._decided = asyncio.get_running_loop().create_future()
        return self._decided

    def listen(self, on_decided: OnDecided) -> None:
        """Call `on_decided` in the step in which the write is decided."""
        if self.listeners is None:
            self.listeners = []
        self.listeners.append(on_decided)

    def decide(self, outcome: int | Exception) -> None:
        """Notify all that wait for the decision."""
        self.is_decided = True
        decided, listeners = self._decided, self.listeners
        if decided is not None:
            if isinstance(outcome, Exception):
                decided.set_exception(outcome)
                decided.exception()  # marks the exception as retrieved: perhaps no caller waits any more
            else:
                decided.set_result(outcome)
        if listeners is not None:
            for listener in listeners:
                listener(outcome)


class ReplicaRepairs(NamedTuple):
    """Repairs of a chunk here from other members, for a write that meets a difference or damage."""

    fetch: Callable[[int, int, int, int], Awaitable[object]]
    """fetch(table, inode, index, target) makes the chunk here equal to that target's chunk."""
    mend: Callable[[int, int, int], Awaitable[bool]]
    """mend(inode, index, block) rewrites a damaged block; returns whether that worked."""
    rebuild: Callable[[int, int, int], Awaitable[bool]]
    """rebuild(inode, index, table) does the same for an unreadable chunk."""


class ChainWrites:
    """Writes of this target to replicated chunks.

    * `place_of(table, inode, index)` returns the position of this target in the chunk's chain.
    * `ask_map` requests a newer pool map, now or soon.
    * `holds_lease` says whether the serving lease of this target holds.
    """

    def __init__(
        self,
        store: ChunkStore,
        target: int,
        peers: ReplicaPeers,
        clock: Clock,
        repairs: ReplicaRepairs,
        *,
        place_of: Callable[[int, int, int], ChainPosition | None],
        ask_map: Callable[[], None],
        holds_lease: Callable[[], bool],
    ):
        self._store, self._writer = store, store.writer
        self._target = target
        self._peers = peers
        self._clock = clock
        self._place_of = place_of
        self._ask_map = ask_map
        self._holds_lease = holds_lease
        self._repairs = repairs
        self._rebuilding: dict[Name, asyncio.Task[bool]] = {}
        self.pending: dict[Name, Pending] = {}
        self.turns: dict[Name, deque[asyncio.Future]] = {}
        """Chunks with a write in `lead`, and the writes that wait for their turn there."""
        self.led_bytes = 0
        """Bytes of clients' writes that are not decided yet."""
        self.cutting: dict[int, list[int]] = {}
        """Truncate numbers of truncations that wait or run, by inode."""
        self.links: dict[int, int] = {}
        """Newest link of each predecessor."""
        self.refused_versions: dict[Name, int] = {}
        """Version that the next write of a chunk has to exceed, since a successor has refused a lower one.

        Kept until a write of the chunk is committed here.
        """
        self._tasks: set[asyncio.Task] = set()
        self.counters = {"led": 0, "followed": 0, "offered_again": 0, "fetched": 0, "reads_waited": 0}

    # -- the head ----------------------------------------------------------------------------------------------------

    def try_submit(self, write: ChunkWrite, on_end: OnEnd) -> bool:
        """Begin a client's write without a task; return whether it was begun.

        `on_end` is called once, later. False: nothing was done; the write must wait, or be refused: use `lead`.
        """
        name, size = write.name, len(write.buffer)
        place = self._place_of(write.table, *name)
        if (
            place is None
            or place.number
            or len(place.members) < 2
            or name in self.turns
            or name in self.pending
            or (self.led_bytes and self.led_bytes + size > _LED_BYTES_MAX)
            or not self._holds_lease()
        ):
            return False
        try:
            held = self._held(name)
        except CorruptRecord:
            return False
        if (held.requests and is_done(held.requests, write.request)) or write.cut < held.cut:
            return False
        placed = self._prepared_now(write)
        if placed is None:
            return False
        above = self.refused_versions.get(name, 0) if self.refused_versions else 0
        if held.version or held.floor or above:
            version = next_version(held, place.epoch, above)
        else:
            version = place.epoch << 32 | 1  # as next_version, for a chunk that never existed
        pending = self._begin(write, version, held.version, place)
        self.counters["led"] += 1
        self.led_bytes += size
        pending.led_bytes, pending.on_end, pending.placed = size, on_end, placed
        self._start(pending)
        return True

    async def lead(self, write: ChunkWrite, deadline_s: float) -> int:
        """Commit a client's write on every member and return the version of the chunk.

        Once it is this write's turn, the write continues even if the caller is cancelled.

        WrongTarget, StaleEpoch   this target is not the head, or no longer: fetch the map, ask the head
        StaleTenure               the serving lease has ended: nothing was done
        Busy, DeadlineExceeded    too many writes wait for the chunk, or waited too long: nothing was done,
                                  unless the write itself is the one that is not decided (may_be_applied)
        NoSpace, StaleCut, ChecksumMismatch, InvalidRequest   from any member: nothing was done
        """
        size, same = len(write.buffer), self._same_pending(write)
        if same is not None:
            # The bytes are counted already; from now on for this call, which ends after that write.
            self.led_bytes -= same.led_bytes
            same.led_bytes = 0
        if self.led_bytes + size > LED_BYTES_MAX and self.led_bytes:
            self._uncount(0, same)
            raise Busy("too many bytes wait for other targets", retry_after_s=0.05)
        self.led_bytes += size
        try:
            await self._wait_turn(write.name, deadline_s)
        except BaseException:
            self._uncount(size, same)
            raise
        task = self._own(self._lead(write, same, deadline_s))
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    def _same_pending(self, write: ChunkWrite) -> Pending | None:
        """Return the pending write with this name and these bytes, which a task continues without its client."""
        pending = self.pending.get(write.name)
        if pending is None or not pending.led_bytes or pending.write.request != write.request:
            return None
        return pending if _memory(pending.write.buffer) is _memory(write.buffer) else None

    def _uncount(self, size: int, same: Pending | None) -> None:
        """Take `size` bytes off `led_bytes`, and count `same` for itself if it is still not decided."""
        self.led_bytes -= size
        if same is not None and not same.is_decided:
            same.led_bytes = len(same.write.buffer)
            self.led_bytes += same.led_bytes

    async def _wait_turn(self, name: Name, deadline_s: float) -> None:
        queue = self.turns.get(name)
        if queue is None:
            self.turns[name] = deque()
            return
        if len(queue) >= QUEUED_MAX:
            raise Busy("too many writes wait for the chunk", retry_after_s=0.05)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.boottime_s())):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._end_turn(name)
            elif turn in queue:
                queue.remove(turn)
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineExceeded(
                "earlier writes of the chunk were not decided in time", may_be_applied=False
            ) from None

    def _end_turn(self, name: Name) -> None:
        queue = self.turns[name]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self.turns[name]

    async def _wait_decided(self, write: ChunkWrite, deadline_s: float) -> None:
        """Wait until no write of the chunk is pending.

        One may be left from a time when this target was not the head, or be continued by a task.
        """
        while (before := self.pending.get(write.name)) is not None:
            left_s = max(0.0, deadline_s - self._clock.boottime_s())
            if not (await asyncio.wait([before.decided()], timeout=left_s))[0]:
                raise DeadlineExceeded(
                    "an earlier write of the chunk was not decided in time",
                    may_be_applied=before.write.request == write.request,
                )

    async def _lead(self, write: ChunkWrite, same: Pending | None, deadline_s: float) -> int:
        try:
            while True:
                await self._wait_decided(write, deadline_s)
                place = self._place_of(write.table, *write.name)
                if place is None or not place.is_head:
                    raise WrongTarget(
                        f"target {self._target} is not the head of the chain of chunk {write.index} of inode "
                        f"{write.inode}"
                    )
                try:
                    held = self._held(write.name)
                except CorruptRecord:
                    if not await self._rebuilt(write):
                        raise
                    continue
                if is_done(held.requests, write.request):
                    return held.version
                if write.cut < held.cut:
                    raise StaleCut(
                        f"inode {write.inode} was cut ({held.cut}) after this write began ({write.cut})"
                    )
                if not self._holds_lease():
                    raise StaleTenure("the serving lease of the head has ended", may_be_applied=False)
                version = next_version(held, place.epoch, self.refused_versions.get(write.name, 0))
                pending = self._begin(write, version, held.version, place)
                self.counters["led"] += 1
                try:
                    return await self._carry_out(pending)
                except StaleVersion:
                    pass  # the next version is higher: refused_versions
        finally:
            self._uncount(len(write.buffer), same)
            self._end_turn(write.name)

    # -- successors --------------------------------------------------------------------------------------------------

    def follow(self, offer: Offer, link: int, write: ChunkWrite, on_decided: OnDecided) -> int:
        """Accept the write that the predecessor offers.

        Returns the version that this target and all its successors committed. If it is 0, `on_decided` is called
        later with the version, or with one of the same errors.

        StaleEpoch, StaleVersion, StaleCut, NoSpace, ChecksumMismatch: nothing was done; see
        poolmap/chains/protocol. Busy: nothing was done; offer the write again.
        """
        if link >> 32 == self.links.get(offer.sender, 0) >> 32 and link < self.links[offer.sender]:
            # An offer over a newer connection has arrived before this one.
            raise StaleEpoch("this came over a connection that was given up")
        self.links[offer.sender] = link
        try:
            place, held = self._place_of(write.table, *write.name), self._held(write.name)
        except CorruptRecord:
            self._rebuilt(write)
            raise Busy("the chunk cannot be read here", retry_after_s=0.1) from None
        answer, version = judge(place, held, offer)
        if answer is Answer.NEW_EPOCH:
            self._ask_map()
            place = self._place_of(write.table, *write.name)
            answer, version = judge(place, held, offer)
        if answer is Answer.DONE:
            return offer.version
        if answer is Answer.SAME:
            self.pending[write.name].listen(on_decided)
            return 0
        if answer is Answer.NEW_EPOCH:
            raise Busy("this target does not know the newest pool map yet", retry_after_s=0.02)
        if answer in (Answer.OLD_EPOCH, Answer.NOT_OURS):
            raise StaleEpoch("the chain has changed: fetch the map")
        if answer is Answer.BUSY:
            raise Busy("another write of the chunk is not decided")
        if answer is Answer.CUT:
            raise StaleCut(f"inode {write.inode} was cut ({held.cut}) after this write began ({write.cut})")
        if answer is Answer.TOO_LOW:
            error = StaleVersion(f"chunk {write.index} of inode {write.inode} has had version {version}")
            error.version = version
            raise error
        self.counters["followed"] += 1
        whole = place
        if offer.last:
            place = until(place, offer.last)
        if (
            answer is Answer.TAKE
            and len(place.members) == place.number + 1
            and not self._writer.places_first(write.offset, len(write.buffer))
        ):
            try:
                return self._write_now(write, offer.version, None)
            except MustWait:
                pass
            except ChecksumMismatch as error:
                if error.damaged is None:
                    raise
            except DriveFailed as error:
                self._cannot(error)
                raise
        pending = self._begin(write, offer.version, offer.base, place)
        pending.whole = whole
        pending.listen(on_decided)
        if answer is Answer.TAKE:
            pending.placed = self._prepared_now(write)
        if pending.placed is not None:
            self._start(pending)
        else:
            self.carry_on(pending, None, offer.sender if answer is Answer.FETCH else 0)
        return 0

    # -- head and successors -----------------------------------------------------------------------------------------

    def _held(self, name: Name) -> MemberChunkState:
        pending = self.pending.get(name)
        version, floor, cut, requests = self._writer.held(name[0], name[1])
        cutting = self.cutting.get(name[0]) if self.cutting else None
        if cutting:
            cut = max(cut, *cutting)
        return _new_tuple(
            MemberChunkState, (version, floor, cut, requests, pending.version if pending is not None else 0)
        )

    def _begin(self, write: ChunkWrite, version: int, base: int, place: ChainPosition) -> Pending:
        pending = Pending(write, version, base, place)
        self.pending[write.name] = pending
        self._writer.changing(write.inode, write.index)
        return pending

    def _prepared_now(self, write: ChunkWrite) -> Placed | None:
        """Prepare a write without waiting. None: this has to wait, or failed; `_carry_out` does it again."""
        try:
            return self._writer.prepare_now(write)
        except (MustWait, NvpoolError):
            return None

    def _start(self, pending: Pending) -> None:
        """Offer a prepared write, or commit it if this target is the last one."""
        place = pending.place
        if pending.last:
            self._commit_now(pending)
            return
        pending.offered = self._peers.write(
            place.successor,
            place.number,
            self._offer_of(pending, place),
            pending.write.buffer,
            partial(self._answered, pending),
        )

    def _answered(self, pending: Pending, reply: PeerWriteReply | None, error: BaseException | None) -> None:
        pending.offered = None
        if error is None and not reply.status:
            self._commit_now(pending)
        else:
            self.carry_on(pending, (reply, error))

    def _commit_now(self, pending: Pending) -> None:
        """Commit a write that this target is the last to have, or that all members after it have."""
        writing, version = pending.placed.writing, 0
        try:
            if writing is None or (
                writing.done() and not writing.cancelled() and writing.exception() is None
            ):
                version = self._write_now(pending.write, pending.version, pending.placed)
        except Exception:  # the task does it again, and reports or fences
            log.debug("target %d: a commit is repeated in a task", self._target, exc_info=True)
        if version:
            self._writer.drop_placed(pending.placed)
            self._end(pending, version)
        else:
            self.carry_on(pending, COMMITTED)

    def carry_on(self, pending: Pending, outcome: Outcome | None, fetch_from: int = 0) -> None:
        """Continue a pending write in a task.

        `outcome` is that of its offer; None: the write was not offered, or the chain has changed since.
        """
        pending.offered = None
        on_end, pending.on_end = pending.on_end, None
        # `last` as it is now: the chain may change before the task begins
        task = self._own(self._carry_out(pending, fetch_from, outcome, pending.last))
        task.add_done_callback(_retrieve)  # callers wait for the decision, if any
        if on_end is not None:
            on_end(0)

    async def _carry_out(
        self,
        pending: Pending,
        fetch_from: int = 0,
        outcome: Outcome | None = None,
        is_first: bool = False,
    ) -> int:
        """Run the pending write until it is decided.

        `is_first`: no other member had committed when `outcome` came.
        """
        try:
            if fetch_from:
                await self._in_line(pending, fetch_from)
            if pending.placed is None:
                pending.placed = await self._prepared(pending.write)
            version = await self._decide(pending, pending.placed, outcome, is_first)
        except BaseException as error:
            if isinstance(error, DriveFailed):
                self._cannot(error)
            self._end(
                pending,
                error if isinstance(error, Exception) else errors.Draining("the store is being closed"),
            )
            raise
        finally:
            if pending.placed is not None:
                self._writer.drop_placed(pending.placed)
        self._end(pending, version)
        return version

    async def _prepared(self, write: ChunkWrite) -> Placed:
        """Call ChunkStore.prepare.

        A damaged block that the write covers in part is repaired first. Both the first and the last block of
        a write may be damaged.
        """
        for _ in range(2):
            try:
                return await self._writer.prepare(write)
            except ChecksumMismatch as error:
                if error.damaged is None or not await self._repairs.mend(*error.damaged):
                    raise
        return await self._writer.prepare(write)

    def _rebuilt(self, write: ChunkWrite) -> asyncio.Task[bool]:
        """Return the rebuild task of this chunk. Concurrent callers share one task."""
        task = self._rebuilding.get(write.name)
        if task is None:
            task = self._rebuilding[write.name] = self._own(self._rebuild(write))
            task.add_done_callback(
                lambda done: (self._rebuilding.pop(write.name), done.cancelled() or done.exception())
            )
        return task

    async def _rebuild(self, write: ChunkWrite) -> bool:
        return await self._repairs.rebuild(write.inode, write.index, write.table)

    def _end(self, pending: Pending, outcome: int | Exception) -> None:
        if self.pending.get(pending.write.name) is pending:
            del self.pending[pending.write.name]
        self.led_bytes -= pending.led_bytes
        pending.led_bytes = 0
        if isinstance(outcome, Exception):
            if isinstance(outcome, StaleVersion) and pending.place.is_head:
                self._remember_refused(pending.write.name, max(outcome.version, pending.version))
            pending.decide(outcome)
            return
        if self.refused_versions:
            self.refused_versions.pop(pending.write.name, None)
        pending.decide(outcome)
        if pending.on_end is not None:
            pending.on_end(outcome)

    def _remember_refused(self, name: Name, version: int) -> None:
        refused = self.refused_versions
        refused[name] = max(version, refused.pop(name, 0))
        if len(refused) > REFUSED_MAX:
            del refused[next(iter(refused))]

    async def _in_line(self, pending: Pending, source: int) -> None:
        """Fetch the chunk from the predecessor: the write builds on its version."""
        write = pending.write
        await self._repairs.fetch(write.table, write.inode, write.index, source)
        self.counters["fetched"] += 1
        found = self._writer.held(write.inode, write.index).version
        if found != pending.base:
            raise Busy(f"this target has version {found} of the chunk, not {pending.base}")

    async def _decide(self, pending: Pending, placed: Placed, outcome: Outcome | None, is_first: bool) -> int:
        tries = 0
        while True:
            if outcome is None:
                if pending.dropped:
                    raise StaleEpoch("this target is no longer part of the chain", may_be_applied=True)
                if pending.last:
                    return await self._commit(pending, placed, True)
                is_first = False
            place = pending.place
            try:
                if outcome is None:
                    committed = await self._offer(pending, place)
                else:
                    ended, outcome = outcome, None
                    committed = _is_committed(*ended)
            except NvpoolError as error:
                if is_refusal(error):
                    raise
                if pending.dropped or pending.last:  # the chain has changed since the offer
                    continue
                if isinstance(error, StaleEpoch | WrongTarget):
                    self._ask_map()
                tries += 1
                self.counters["offered_again"] += 1
                level = logging.WARNING if tries in (8, 64) else logging.DEBUG
                log.log(
                    level,
                    "target %d: chunk %d of inode %d waits for target %d: %s",
                    self._target,
                    pending.write.index,
                    pending.write.inode,
                    place.successor,
                    error,
                )
                await self._pause(
                    pending, max(error.retry_after_s, min(AGAIN_S_MAX, AGAIN_S * 2 ** min(tries, 10)))
                )
                continue
            if committed:
                return await self._commit(pending, placed, is_first)

    async def _pause(self, pending: Pending, pause_s: float) -> None:
        """Wait for `pause_s`, or until the chain changes."""
        pending.waiter = asyncio.get_running_loop().create_future()
        await asyncio.wait([pending.waiter], timeout=pause_s)
        pending.waiter = None

    async def _offer(self, pending: Pending, place: ChainPosition) -> bool:
        """Offer the write to the successor and wait for the outcome.

        Returns True if the successor and all members after it have committed, and False if the chain changed
        in the meantime. Raises the refusal of the successor, or any error that leaves the outcome unknown.
        """
        waiter = pending.waiter = asyncio.get_running_loop().create_future()

        def done(reply: PeerWriteReply | None, error: BaseException | None) -> None:
            if not waiter.done():
                waiter.set_result((reply, error))

        pending.sending = self._peers.write(
            place.successor, place.number, self._offer_of(pending, place), pending.write.buffer, done
        )
        try:
            outcome = await waiter
        finally:
            self._peers.give_up(pending.sending)
            pending.waiter = pending.sending = None
        return outcome is not None and _is_committed(*outcome)

    def _offer_of(self, pending: Pending, place: ChainPosition) -> PeerWriteRequest:
        write = pending.write
        offer: PeerWriteRequest = PeerWriteRequest.__new__(PeerWriteRequest)
        offer.clear()
        offer.target, offer.sender = place.successor, self._target
        offer.table, offer.chain_epoch = write.table, place.epoch
        offer.version, offer.base = pending.version, pending.base
        offer.inode, offer.index, offer.offset, offer.cut = write.inode, write.index, write.offset, write.cut
        offer.session, offer.slot, offer.sequence = write.request
        offer.checksums, offer.wrapped_key = write.checksums, write.wrapped_key
        if place.members != pending.whole.members:
            offer.last = place.members[-1]
        return offer

    async def _commit(self, pending: Pending, placed: Placed, is_first: bool) -> int:
        """Commit the write on this target; `is_first`: no other member has committed it.

        If the first member to commit fails here, no member has done the write. If another member fails here,
        its successors have done the write.
        """
        try:
            if placed.writing is not None:
                await asyncio.shield(placed.writing)
            for _ in range(_TRIES_MAX):
                try:
                    return self._write_now(pending.write, pending.version, placed)
                except MustWait as wait:
                    await wait.until()
            raise Busy("the store did not find room for the write")
        except NvpoolError as error:
            if not is_first:
                self._cannot(error)
            raise

    def _write_now(self, write: ChunkWrite, version: int, placed: Placed | None) -> int:
        return self._writer.write_now(write, 1, version, placed)

    def _cannot(self, error: NvpoolError) -> None:
        """Fence the store: other members have a write that this target cannot write."""
        self._store.fence(f"a write that other targets have could not be carried out: {error}")

    # -- waiting for decisions ---------------------------------------------------------------------------------------

    def undecided(self, names) -> list[asyncio.Future]:
        """Return the futures to await before a read of these chunks.

        A read that begins now may return the state that is committed after them.
        """
        pending = self.pending
        return [pending[name].decided() for name in {*names} if name in pending]

    async def wait_to_read(self, decisions: list[asyncio.Future], deadline_s: float) -> None:
        """Wait for these decisions; raise Busy if they take too long, since another replica may know."""
        self.counters["reads_waited"] += 1
        timeout_s = max(0.0, min(READ_WAIT_S, deadline_s - self._clock.boottime_s()))
        _, undecided = await asyncio.wait(decisions, timeout=timeout_s)
        if undecided:
            raise Busy("the chunk has a pending write; use another target")

    async def begin_cut(self, inodes: list[int], cut: int) -> None:
        """Refuse writes with a smaller truncate number of these inodes from now on until `end_cut`.

        On return no write to them is pending. Busy: this took too long; no write is refused.
        """
        for inode in inodes:
            self.cutting.setdefault(inode, []).append(cut)
        wanted = set(inodes)
        try:
            decisions = [pending.decided() for name, pending in self.pending.items() if name[0] in wanted]
            if decisions and (await asyncio.wait(decisions, timeout=CUT_WAIT_S))[1]:
                raise Busy("writes of the file are not decided", retry_after_s=0.1)
        except BaseException:
            self.end_cut(inodes, cut)
            raise

    def end_cut(self, inodes: list[int], cut: int) -> None:
        for inode in inodes:
            self.cutting[inode].remove(cut)
            if not self.cutting[inode]:
                del self.cutting[inode]

    # -- map changes, closing ----------------------------------------------------------------------------------------

    def map_changed(self) -> None:
        for pending in list(self.pending.values()):
            now = self._place_of(pending.write.table, *pending.write.name)
            if now == pending.whole:
                continue
            deciders = pending.deciders if now is None else deciders_now(pending.whole, now, pending.deciders)
            step = next_step(pending.whole, now, deciders)
            if step is Next.DROP:
                pending.dropped = True
            else:
                pending.deciders = deciders
                pending.older = pending.older or gained(pending.deciders, now)
                pending.place, pending.whole = taking_part(now, pending.deciders), now
                pending.last = step is Next.COMMIT
            if pending.offered is not None:
                pending.offered.give_up()
                self.carry_on(pending, None)
            elif pending.waiter is not None and not pending.waiter.done():
                pending.waiter.set_result(None)

    def settling(self) -> set[tuple[int, int]]:
        """Return chains, as (table, number), in which a new member must not compare chunks yet.

        These chains have a write that was pending before the member joined and that is decided without this
        member.
        """
        return {
            (pending.write.table, chain_of(*name)) for name, pending in self.pending.items() if pending.older
        }

    def _own(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Stop, and drop pending writes like the death of the process would."""
        for pending in list(self.pending.values()):
            if pending.offered is not None:
                pending.offered.give_up()
                pending.on_end = None
                self._writer.drop_placed(pending.placed)
                self._end(pending, errors.Draining("the store is being closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._peers.close()


def _retrieve(done: asyncio.Task) -> None:
    """Retrieve the exception of a task for which no caller may wait any more."""
    if not done.cancelled():
        done.exception()


def _memory(buffer: memoryview) -> object:
    """Return the object that owns the bytes."""
    return memoryview(buffer).obj


COMMITTED: Outcome = PeerWriteReply(), None
"""Outcome of an offer that the successor and all members after it have committed."""


def _is_committed(reply: PeerWriteReply | None, error: BaseException | None) -> bool:
    """Return True for COMMITTED; raise the refusal of the successor, or the error that leaves the outcome open."""
    if error is not None:
        raise error
    if reply.status:
        refused = errors.BY_WIRE_CODE.get(reply.status, Busy)()
        if isinstance(refused, StaleVersion):
            refused.version = reply.version
        raise refused
    return True
