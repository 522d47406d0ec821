"""Metadata client: finds the shard, keeps the session, and retries queries and changes.

Guarantees: a change is executed exactly once, however often it is sent. It travels under (session, slot,
sequence), and a retry carries the same numbers; a slot is reused only when the reply has arrived. A session
is renewed at a third of its lease; open files are reported again to a restarted shard and in a new session.
Every operation ends by its deadline.

Used by vfs, the reader, the writer, and the chunk client's renewal of grants. This module never caches a
reply and never decides what an error means to a file.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from nvpool.client.rpc.backoff import at_the_deadline, pause, reason_of
from nvpool.client.rpc.change_fast_path import ChangeSubmitter, OnEnd, SentChange, SubmittedChange, give_back
from nvpool.client.rpc.deferred_close import RENEW_INODES_MAX, DeferredClose
from nvpool.client.rpc.lease_watch import keep_watch
from nvpool.client.rpc.partition_migration import PartitionOwners
from nvpool.client.rpc.primary_connections import PrimaryConnections
from nvpool.client.rpc.slot_journal import PendingSlot, SlotJournal, asking
from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.leases import WATCH_SHARE, Leases
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.client.state.shard_session import ShardSession, ShardSessions
from nvpool.core.clock import Clock
from nvpool.core.errors import (
    DeadlineExceeded,
    Disconnected,
    LockLost,
    NvpoolError,
    Refused,
    Stale,
    StaleEpoch,
    StaleSession,
    Unavailable,
    WrongShard,
)
from nvpool.core.ids import partition_of
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.poolmap.shards.partitions import name_hasher
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.shm.mount_state import KeptMemory, Word

ROOT_ID = 0
_SEQUENCES_PER_LIFE_BITS = 36


_RETURNS_INCARNATION = frozenset((wire_pb2.META_OPEN_SESSION, wire_pb2.META_RENEW_SESSION))
_NEEDS_NO_INCARNATION = _RETURNS_INCARNATION | {wire_pb2.META_CLOSE_SESSION, wire_pb2.META_WATCH}


class MetaClient(DeferredClose):
    """The client of the metadata service: one session for each shard."""

    def __init__(
        self,
        view: PoolView,
        dialer,
        options: ClientOptions,
        clock: Clock,
        events: ClientEvents,
        *,
        name: str,
        kept: KeptMemory | None = None,
    ):
        self.view = view
        self.dialer = dialer
        self.options = options
        self.clock = clock
        self._name = name
        self._identity = int.from_bytes(clock.secret(8), "little") or 1
        self.primaries = PrimaryConnections(view, dialer, clock)
        self.sessions = ShardSessions(view)
        self.shards = self.sessions.by_shard
        self.closed = False
        self._kept = kept
        self.events = events
        self.once = (
            SlotJournal(kept, self.shards, self._give_back, self._give_up) if kept is not None else None
        )
        # hash of names in striped directories; known with the first session
        self.name_hash: Callable[[int, bytes], bytes] | None = None
        self.leases = Leases(clock, options.cached_entries, lambda inode: self.shard_session(inode).watch)
        self.moved = PartitionOwners(self, view.map, self.shards, clock, options.deadline_s, self.sessions.at)
        view.changed.append(self.moved.use_map)
        self.counters = {"questions": 0, "changes": 0, "repeats": 0, "sessions": 0, "renewals": 0}
        self.submitter = ChangeSubmitter(self, clock)

    # -- queries -------------------------------------------------------------------------------------------------------

    async def ask(self, inode: int, method: int, request, reply_type):
        """Send a query about `inode` (for a name: its directory) and return the reply.

        `request` has the fields session and map_epoch, which are set here. May be repeated.

        Refused, or a Stale error about the file (StaleCut, StaleCursor): the service's reply.
        Disconnected, DeadlineExceeded: no reply in time.
        """
        self.counters["questions"] += 1
        deadline_s = self.clock.boottime_s() + self.options.deadline_s
        tries, reason = 0, None
        while True:
            try:
                state = self.shard_session(inode)
                if not state.session:
                    await self.ensure_session(state, deadline_s)
                elif state.watching is None or state.watching.done():
                    self._watch(state)
                request.session = state.session
                request.map_epoch = self.view.map.epoch
                return decoded(reply_type, await self.send(state, method, request, deadline_s))
            except (StaleSession, StaleEpoch, WrongShard, Unavailable) as error:
                tries, reason = tries + 1, reason_of(error, reason)
                await self._mend(inode, error, reason, tries, deadline_s, request.session)

    def is_ready(self, shard: int) -> bool:
        """Whether a query can be sent immediately: there is a session, confirmed over a live connection."""
        state, known = self.shards.get(shard), self.view.map.shard_by_id.get(shard)
        return (
            state is not None
            and state.session != 0
            and known is not None
            and state.watching is not None
            and not state.watching.done()
            and state.met is not None
            and state.met is self.dialer.live(known.endpoints)
        )

    def submit(self, shard: int, method: int, request, on_done: Callable) -> bool:
        """Send a query once, without a task, if the shard `is_ready`. Return whether it was sent.

        False: there was no side effect. `on_done(reply, error)` is called once, later. An error is that of
        this one attempt; `ask` handles such errors.
        """
        if self.closed or not self.is_ready(shard):
            return False
        self.counters["questions"] += 1
        request.session = self.shards[shard].session
        request.map_epoch = self.view.map.epoch
        connection = self.shards[shard].met
        connection.submit(
            method,
            request.SerializeToString(),
            on_done=on_done,
            deadline_s=self.clock.boottime_s() + self.options.deadline_s,
        )
        return True

    async def change(
        self,
        inode: int,
        method: int,
        request,
        reply_type,
        *,
        uid: int = ROOT_ID,
        gid: int = ROOT_ID,
        file: OpenInode | None = None,
        once: bool = False,
        begun: SubmittedChange | None = None,
    ):
        """Execute a change exactly once, starting at the partition of `inode`; return the reply.

        `request.change` is filled in here. `once`: see `client/rpc/slot_journal`. `begun`: see `go_on`.

        Errors as `ask`. After Disconnected or DeadlineExceeded the change may have been executed. LockLost:
        `file`, for which the change is, has lost its locks; the change is not sent in a later session.
        """
        tries, reason, uncertain = 0, None, False
        failed: BaseException | None = None
        if begun is None:
            self.counters["changes"] += 1
            deadline_s = self.clock.boottime_s() + self.options.deadline_s
            state, slot, sequence, generation = None, 0, 0, 0
            unique = asking() if once and self.once is not None else 0
        else:
            deadline_s, unique, failed = begun.deadline_s, begun.unique, begun.take_error()
            state, slot, sequence, generation = begun.state, begun.slot, begun.sequence, begun.generation
        change = request.change
        change.uid, change.gid = uid, gid
        try:
            while True:
                now = (
                    state
                    if failed is not None
                    else (
                        self._asked_first(unique, method, state if uncertain else None, generation)
                        or self.shard_session(inode)
                    )
                )
                if uncertain and (now is not state or state.generation != generation):
                    raise Disconnected("the session ended before the answer to a change came")
                try:
                    if failed is not None:
                        error, failed = failed, None
                        raise error
                    if now is not state or state.generation != generation:
                        self.leave(unique, state, slot, sequence, generation)
                        state = None
                        if not now.session:
                            await self.ensure_session(now, deadline_s)
                        if file is not None and file.lost:
                            raise LockLost()
                        slot, sequence, generation = (
                            self.once.slot_of(unique, now, method) if unique else None
                        ) or await self._take_slot(now, deadline_s)
                        state = now
                        if unique:
                            self.once.note(state.record, slot, sequence, method, unique)
                        change.session, change.slot, change.sequence = state.session, slot, sequence
                    change.map_epoch = self.view.map.epoch
                    return decoded(reply_type, await self.send(state, method, request, deadline_s))
                except (StaleSession, StaleEpoch, WrongShard, Unavailable) as error:
                    if (
                        uncertain
                        and state is not None
                        and (isinstance(error, StaleSession) or state.generation != generation)
                    ):
                        raise Disconnected("the session ended before the answer to a change came") from None
                    if isinstance(error, WrongShard) and state is not None:
                        # The shard refused this request: it was not executed under its id, and never will be.
                        self.leave(unique, state, slot, sequence, generation)
                        state, uncertain = None, False
                    # without a state the failed request was the opening of a session, not the change
                    uncertain = uncertain or (error.may_be_applied and state is not None)
                    tries, reason = tries + 1, reason_of(error, reason)
                    await self._mend(inode, error, reason, tries, deadline_s, change.session, uncertain)
        except (Refused, Stale):
            raise
        except BaseException:
            self.lost_sight()
            raise
        finally:
            self.leave(unique, state, slot, sequence, generation)

    def begin(
        self,
        inode: int,
        method: int,
        request,
        reply_type,
        on_end: OnEnd,
        *,
        uid: int = 0,
        gid: int = 0,
        file=None,
        unique: int = 0,
    ) -> SubmittedChange | None:
        """Submit a change without a task if nothing has to be awaited; else return None.

        None: there was no side effect. `unique`: the number of the kernel's request for which the change is
        made exactly once (see client/rpc/slot_journal). `on_end` gets the errors that `change` raises.
        """
        return self.submitter.begin(inode, method, request, reply_type, on_end, uid, gid, file, unique)

    def go_on_with(
        self,
        sent: SentChange,
        inode: int,
        method: int,
        request_type,
        reply_type,
        on_end: OnEnd,
        unique: int,
    ) -> SubmittedChange:
        """The object that `begin` would have returned for a change sent by another module.

        The caller passes the result of the request to its `answered`.
        """
        begun = SubmittedChange(
            self,
            on_end,
            inode,
            method,
            request_type.FromString(sent.message),
            reply_type,
            None,
            unique,
            sent.state,
            sent.slot,
            sent.sequence,
            sent.deadline_s,
        )
        begun.was_sent(sent)
        return begun

    async def go_on(self, begun: SubmittedChange):
        """Continue a submitted change that met `begun.error`, as `change` does."""
        change = begun.request.change
        return await self.change(
            begun.inode,
            begun.method,
            begun.request,
            begun.reply_type,
            uid=change.uid,
            gid=change.gid,
            file=begun.file,
            begun=begun,
        )

    def give_back_answered(
        self, unique: int, state: ShardSession, slot: int, sequence: int, generation: int
    ) -> None:
        """Release the slot of a change. Its kernel's request, if there is one, has been answered."""
        give_back(self.once if unique else None, state, slot, sequence, generation)

    def lost_sight(self) -> None:
        """End all leases after a change with an unknown outcome.

        The change may have touched any inode at any shard.
        """
        for known in self.shards.values():
            self.leases.end_all(known.watch)

    def _asked_first(
        self, unique: int, method: int, state: ShardSession | None, generation: int
    ) -> ShardSession | None:
        """The shard to which a possibly executed change was sent. Other shards do not know about it."""
        if state is not None and state.generation == generation:
            return state
        shard = self.once.shard_of(unique, method) if unique else 0
        return self.shards.get(shard)

    async def ask_shard(self, shard: int, method: int, request, reply_type):
        """As `ask`, for the shard itself: status, file counts. `request` may lack a session field."""
        deadline_s = self.clock.boottime_s() + self.options.deadline_s
        tries, reason = 0, None
        while True:
            try:
                state = self.sessions.at(shard)
                if hasattr(request, "session"):
                    if not state.session:
                        await self.ensure_session(state, deadline_s)
                    request.session = state.session
                return decoded(reply_type, await self.send(state, method, request, deadline_s))
            except (StaleSession, StaleEpoch, WrongShard, Unavailable) as error:
                if isinstance(error, WrongShard):
                    await self.view.refresh()
                    raise  # its subject is at another shard by now
                tries, reason = tries + 1, reason_of(error, reason)
                if isinstance(error, StaleSession):
                    self.session_lost(self.sessions.at(shard), request.session)
                await self._pause(error, reason, tries, deadline_s)

    async def send(self, state: ShardSession, method: int, request, deadline_s: float):
        """Send a request to the shard's primary; return the encoded reply."""
        shard = self.view.map.shard_by_id.get(state.shard)
        if shard is None:
            raise WrongShard(f"the pool map does not know shard {state.shard}")
        connection = await self.primaries.connection(shard, deadline_s)
        if state.met is not connection and state.session and method not in _NEEDS_NO_INCARNATION:
            await self._meet(state, connection, deadline_s)
        reply = await self.primaries.call(connection, method, request.SerializeToString(), deadline_s)
        if method in _RETURNS_INCARNATION:
            state.met = connection
        return reply.message

    async def _meet(self, state: ShardSession, connection, deadline_s: float) -> None:
        """Confirm the session over a new connection before other requests.

        The other end may be a new process, or another primary. Without standbys it may have lower change
        numbers than this client knows; with standbys it has no leases and opens of the former primary. So it
        must identify itself first.
        """
        if state.meeting is None or state.meeting.done():
            state.meeting = asyncio.create_task(self._renew(state, deadline_s))
            state.meeting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await self._until(state.meeting, deadline_s)
        except StaleSession:
            state.met = connection  # the request itself gets the error and starts another session
        except Unavailable as error:
            error.may_be_applied = False  # the request itself was not sent
            raise

    def shard_of(self, inode: int) -> int:
        """The id of the shard that has the inode and, for a directory, its names."""
        return self.view.map.shard_of_partition[partition_of(inode)]

    def session_of(self, inode: int) -> int:
        """The session at the inode's shard; 0: there is none at the moment."""
        return self.shard_session(inode).session

    def lives(self, session: int) -> bool:
        """Whether the session is one of this client's at any shard: locks move with their partition."""
        return any(state.session == session for state in self.shards.values())

    def was_taken_up(self, inode: int) -> bool:
        """Whether the session at the inode's shard continues that of the previous process."""
        state = self.shard_session(inode)
        return state.taken_up == state.generation

    def shard_session(self, inode: int) -> ShardSession:
        """The session state of the inode's shard; created at its first use."""
        return self.sessions.of(inode)

    async def _mend(
        self,
        inode: int,
        error: NvpoolError,
        reason: NvpoolError,
        tries: int,
        deadline_s: float,
        session: int,
        uncertain: bool = False,
    ) -> None:
        """Handle `error` before a retry, or raise it or DeadlineExceeded when the deadline has passed.

        `session` is the one that was refused: there may be a newer one by now.
        """
        self.counters["repeats"] += 1
        if isinstance(error, StaleSession):
            self.session_lost(self.shard_session(inode), session)
            if tries == 1:
                return
        elif isinstance(error, (StaleEpoch, WrongShard)) and await self.view.refresh():
            return
        await self._pause(error, reason, tries, deadline_s, uncertain)

    async def _pause(
        self, error: NvpoolError, reason: NvpoolError, tries: int, deadline_s: float, uncertain: bool = False
    ) -> None:
        left = deadline_s - self.clock.boottime_s()
        if left <= 0 or self.closed:
            raise at_the_deadline(error, reason, uncertain)
        await pause(error, tries, left, self.view, self.options, self.clock)

    # -- slots ---------------------------------------------------------------------------------------------------------

    async def _take_slot(self, state: ShardSession, deadline_s: float) -> tuple[int, int, int]:
        """A free slot, its next sequence, and the generation of its session."""
        while not state.slots:
            future = asyncio.get_running_loop().create_future()
            state.waiting.append(future)
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self.clock.boottime_s())):
                    await future
            except TimeoutError:
                raise DeadlineExceeded(
                    "all request slots of the session stayed in use", may_be_applied=False
                ) from None
            except BaseException:
                if state.slots:
                    state.wake()  # woken and cancelled at the same time: pass the slot on to the next waiter
                raise
            finally:
                if future in state.waiting:
                    state.waiting.remove(future)
            if not state.session:
                raise StaleSession
        slot, sequence = state.slots.popleft()
        return slot, sequence + 1, state.generation

    def leave(
        self, unique: int, state: ShardSession | None, slot: int, sequence: int, generation: int
    ) -> None:
        """Release the slot, or keep it until the kernel's request for it has been answered."""
        if unique and state is not None and state.generation == generation and sequence:
            self.once.held[unique] = PendingSlot(state, slot, sequence, generation)
        else:
            self._give_back(state, slot, sequence, generation)

    def take_over(self, opened: list[int]) -> None:
        """Continue the sessions of the previous process, which had these inodes open."""
        for shard, (record, session, secret) in self._kept.shards().items():
            state = self.sessions.at(shard)
            state.record, state.earlier = record, (session, secret)
            state.early = self.once.take_over(shard, record)
        for inode in opened:
            self.shard_session(inode).open[inode] = 1

    def _give_back(self, state: ShardSession | None, slot: int, sequence: int, generation: int) -> None:
        if state is not None and state.generation == generation and sequence:
            state.slots.append((slot, sequence))
            state.wake()

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def ensure_session(self, state: ShardSession, deadline_s: float) -> None:
        """Open a session if there is none. On return all open files have been reported in it."""
        if state.opening is None or state.opening.done():
            state.opening = asyncio.create_task(self._open_session(state, deadline_s))
            # callers that wait for the task get its error from there
            state.opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        await self._until(state.opening, deadline_s)

    async def meet(self, inode: int) -> None:
        """Open a session at the inode's shard, so that the next reply can bring a lease.

        Errors as of one attempt of `ask`.
        """
        await self.ensure_session(
            self.shard_session(inode), self.clock.boottime_s() + self.options.deadline_s
        )

    async def _until(self, asked: asyncio.Task, deadline_s: float) -> None:
        """Wait for a task that several callers share, each up to its own deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self.clock.boottime_s())):
                await asyncio.shield(asked)
        except TimeoutError:
            raise DeadlineExceeded(
                "the shard has not confirmed the session yet", may_be_applied=False
            ) from None
        except asyncio.CancelledError:
            if not asked.cancelled() or asyncio.current_task().cancelling():
                raise
            raise WrongShard("the shard has left the pool meanwhile") from None

    async def _open_session(self, state: ShardSession, deadline_s: float) -> None:
        request = meta_pb2.OpenSessionRequest(
            client=self._name, watch=self.options.leases, identity=self._identity
        )
        if state.earlier is not None:
            request.session, request.secret = state.earlier
            request.names_open, request.opened = True, read_write_codec.pack_inodes(list(state.open))
            request.names_slots = True
            request.slots.extend(state.early)
            state.given_up.clear()
        sent_s = self.clock.boottime_s()
        try:
            raw = await self.send(state, wire_pb2.META_OPEN_SESSION, request, deadline_s)
        except StaleSession:
            if state.earlier is None:
                raise
            self._not_taken_up(state)
            await self._open_session(state, deadline_s)
            return
        reply = decoded(meta_pb2.OpenSessionReply, raw)
        state.generation += 1
        state.lease_s = reply.lease_s or 60.0
        if reply.name_key and self.name_hash is None:
            self.name_hash = name_hasher(reply.name_key)
        state.secret = reply.secret
        if state.incarnation not in (0, reply.incarnation):
            self._notify_restart(state.shard)
        state.incarnation = reply.incarnation
        last = list(reply.sequences) or [0] * (reply.slots or SLOTS_PER_SESSION)
        if state.earlier is None:
            state.slots = deque(enumerate(last))
            state.slot_count = len(last)
            state.unnamed = bool(state.open)
        else:
            # Above all sequences that the previous processes may have sent: their requests may still arrive,
            # and must not be taken for ours.
            first = self._kept.word(Word.LIVES) << _SEQUENCES_PER_LIFE_BITS
            state.slots = deque(
                (slot, max(first, sequence)) for slot, sequence in enumerate(last) if slot not in state.early
            )
            state.slot_count = len(last)
            state.earlier, state.unnamed, state.taken_up = None, False, state.generation
            state.unreported.clear()
            if state.given_up:
                self.release_at(state, [])
        if self._kept is not None:
            if state.record < 0:
                state.record = self._kept.add_shard()
            if not request.session:
                self._kept.keep_session(state.record, state.shard, reply.session, reply.secret)
        state.session = reply.session
        self.leases.end_all(state.watch)
        state.watch.number, state.watch.seen = reply.watch, 0
        state.watch.until_s = sent_s + reply.watch_ms * WATCH_SHARE / 1000
        state.watch.linger_s = reply.linger_ms * WATCH_SHARE / 1000
        state.watch.delegates = reply.delegates
        if state.watching is not None:
            state.watching.cancel()
        self._watch(state)
        self.counters["sessions"] += 1
        if state.unnamed:
            await self._renew(state, deadline_s)
        if state.renewal is None or state.renewal.done():
            state.renewal = asyncio.create_task(self._keep(state))
        for _ in range(min(len(state.waiting), len(state.slots))):
            state.wake()

    def _not_taken_up(self, state: ShardSession) -> None:
        """Handle the end of the previous process's session, which cannot be continued."""
        state.session, _ = state.earlier
        state.earlier = None
        self.session_lost(state, state.session)

    def session_lost(self, state: ShardSession, session: int) -> None:
        """Forget a session that the shard does not know any more. The next request opens a new one."""
        if session and state.session == session:
            state.session = 0
            if self.once is not None:
                self.once.lost(state.shard)
            self.leases.end_all(state.watch)
            state.generation += 1
            for listener in self.events.session_lost:
                listener(state.shard)
            state.slots.clear()
            state.released.clear()
            state.given_up.clear()
            state.doubts.clear()
            state.wake_all()

    def _watch(self, state: ShardSession) -> None:
        if not state.watch.number or self.closed:
            return

        async def send(request, deadline_s: float):
            return await self.send(state, wire_pb2.META_WATCH, request, deadline_s)

        async def ended(inodes: list[int]) -> None:
            has_unreported = not state.unreported.keys().isdisjoint(inodes)
            for listener in self.events.leases_recalled:
                await listener(inodes)
            if has_unreported:
                try:
                    await self._report_opens(state)
                except NvpoolError:
                    pass  # the next reader of these files validates first

        async def settled() -> None:
            for listener in self.events.leases_ended:
                await listener(state.shard)

        state.watching = asyncio.create_task(
            keep_watch(
                state.watch,
                state.session,
                send=send,
                leases=self.leases,
                ended=ended,
                newer=self.view.look_for,
                settled=settled,
                options=self.options,
                clock=self.clock,
            )
        )

    async def _keep(self, state: ShardSession) -> None:
        """Renew the session for the client's life; a failed renewal is retried after a second."""
        pause = state.lease_s / 3
        while not self.closed:
            await asyncio.sleep(pause)
            try:
                deadline_s = self.clock.boottime_s() + state.lease_s
                if not state.session:
                    await self.ensure_session(state, deadline_s)
                else:
                    await self._renew(state, deadline_s)
                    await self._look_at_held(state)
                pause = state.lease_s / 3
            except StaleSession:
                self.session_lost(state, state.session)
                pause = 0.0
            except NvpoolError:
                pause = min(1.0, state.lease_s / 6)

    async def _renew(self, state: ShardSession, deadline_s: float) -> None:
        """Renew the session. If the shard lacks our open files, report them until it confirms."""
        again = state.unnamed
        if again:
            # registrations that the shard has forgotten: released now, they would end the new ones that
            # follow
            state.released.clear()
            state.unreported.clear()
            state.arrived.clear()
        opened = [inode for inode, count in state.open.items() for _ in range(count)] if again else []
        session = state.session
        for begin in range(0, max(len(opened), 1), RENEW_INODES_MAX):
            request = meta_pb2.RenewSessionRequest(
                session=session,
                map_epoch=self.view.map.epoch,
                identity=self._identity,
                opened=read_write_codec.pack_inodes(opened[begin : begin + RENEW_INODES_MAX]),
                named=again and begin + RENEW_INODES_MAX >= len(opened),
            )
            raw = await self.send(state, wire_pb2.META_RENEW_SESSION, request, deadline_s)
        self.counters["renewals"] += 1
        if again and state.session == session:
            state.unnamed = False
        reply = decoded(meta_pb2.RenewSessionReply, raw)
        state.lease_s, state.held = reply.lease_s or state.lease_s, reply.held
        if reply.map_epoch > self.view.map.epoch:
            await self.view.refresh()
        if reply.incarnation != state.incarnation:
            state.incarnation = reply.incarnation
            self._notify_restart(state.shard)
            if not again and state.open:
                state.unnamed = True
                await self._renew(state, deadline_s)

    # -- open files ----------------------------------------------------------------------------------------------------

    def opened(self, inode: int) -> None:
        """Record that the service has registered one more open of `inode` for this client."""
        self.shard_session(inode).add_open(inode)

    def report_open_of(self, state: ShardSession, now: bool) -> None:
        """Report the unreported opens of this shard soon; `now`: immediately, in the background.

        They are reported before another client changes the inode in any case. An open that is closed before
        that is never reported.
        """
        if now:
            state.report_now.set()
        if state.reporting is None or state.reporting.done():
            state.reporting = asyncio.create_task(self.report_opens_soon(state))

    async def report_opens_soon(self, state: ShardSession) -> None:
        """Report opens until none is unreported, each time after a delay or when a report is urgent."""
        while state.unreported and not self.closed:
            try:
                async with asyncio.timeout(self.options.report_opens_s):
                    await state.report_now.wait()
            except TimeoutError:
                pass
            state.report_now.clear()
            try:
                await self._report_opens(state)
            except NvpoolError:
                # reported again; a reader without a lease validates first
                await asyncio.sleep(self.options.retry_last_s)

    async def report_opens(self, inode: int) -> None:
        """Report the opens of the inode: on return the service knows all of them. Errors as `ask`."""
        await self._report_opens(self.shard_session(inode))

    async def _report_opens(self, state: ShardSession) -> None:
        """Report the unreported opens. Errors as `ask`; then they are reported again later."""
        unreported, state.unreported = state.unreported, {}
        opened = [inode for inode, count in unreported.items() for _ in range(count)]
        if not opened:
            return
        try:
            if not state.session:
                # opening a session reports all open files
                await self.ensure_session(state, self.clock.boottime_s() + self.options.deadline_s)
                opened = []
            for begin in range(0, len(opened), RENEW_INODES_MAX):
                request = meta_pb2.RenewSessionRequest(
                    opened=read_write_codec.pack_inodes(opened[begin : begin + RENEW_INODES_MAX])
                )
                await self.ask_shard(
                    state.shard, wire_pb2.META_RENEW_SESSION, request, meta_pb2.RenewSessionReply
                )
        except BaseException:
            for inode, count in unreported.items():
                if inode in state.open:
                    state.unreported[inode] = state.unreported.get(inode, 0) + count
            raise
        self.notify_opens_reported(list(unreported))

    def notify_opens_reported(self, inodes: list[int]) -> None:
        """Notify the other parts of the client that the shard knows the opens of these inodes now."""
        for listener in self.events.opens_reported:
            listener(inodes)

    def _notify_restart(self, shard: int) -> None:
        for listener in self.events.shard_restarted:
            listener(shard)

    async def close(self, deadline_s: float, *, say_so: bool = True) -> None:
        """End the sessions, as far as shards answer by `deadline_s`.

        Without `say_so` they expire by themselves.
        """
        self.closed = True
        self.leases.on_end_all = lambda: None
        self.primaries.close()
        self.moved.close()
        for one in self.shards.values():
            self.leases.end_all(one.watch)
            for task in filter(
                None, (one.renewal, one.releasing, one.opening, one.watching, one.reporting, one.meeting)
            ):
                task.cancel()
            if not one.session or not say_so:
                continue
            try:
                request = meta_pb2.CloseSessionRequest(session=one.session)
                await self.send(one, wire_pb2.META_CLOSE_SESSION, request, deadline_s)
            except NvpoolError:
                pass  # the session expires by itself
            one.session = 0
