"""Byte-range locks of several clients on one shard against a map of bytes, with replays, deaths, power losses and ended
sessions.

Two exclusive locks never cover the same byte, an answer holds after any death, and a released lock can be acquired.
"""

import asyncio
import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nvpool.core import errors
from nvpool.core.clock import ManualClock
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, RECORD, SHARED, UNLOCKED
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.sessions.lock_service import HOLD_BEYOND_GRANTS_S
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map

OPTIONS = MetaOptions(session_lease_s=60, grant_s=20, linger_s=0, tick_s=3600)
BYTES = 6
CLIENTS = st.integers(0, 2)
OWNERS = st.integers(1, 2)
PLACES = st.tuples(st.integers(0, BYTES - 1), st.integers(0, BYTES - 1)).map(sorted)


class Locks(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.kv, self.clock = MemoryKv(), ManualClock()
        self.held = {}  # (client, owner) -> mode of each byte
        self.dead = {}  # the same for ended sessions, and when their locks are released
        self.waits = {}  # (client, owner) -> (ticket, start, end, mode)

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def start(self):
        self.service = MetaService(
            self.kv, grant_secret=b"s" * 32, dialer=StoreRecorder(), clock=self.clock, options=OPTIONS
        )
        self.service.update_map(small_map())
        await self.service.start()

    @initialize()
    def begin(self):
        self.run(self.start())
        self.clients = [self.run(ShardClient(self.service).begin()) for _ in range(3)]
        self.file = self.run(self.clients[0].file(ROOT, b"file")).inode
        self.run(self.kv.sync())

    def blocked(self, client, owner, start, end, mode):
        return any(
            one and EXCLUSIVE in (mode, one)
            for others in (self.held, self.dead)
            for who, modes in others.items()
            if who != (client, owner)
            for one in modes[start : end + 1]
        )

    def set_mode(self, client, owner, start, end, mode):
        modes = self.held.setdefault((client, owner), [UNLOCKED] * BYTES)
        modes[start : end + 1] = [mode] * (end + 1 - start)

    def request(self, client, owner, start, end, mode, again=False, **fields):
        caller = self.clients[client]
        request = pb.LockRequest(
            change=caller.change(owner),
            inode=self.file,
            kind=RECORD,
            owner=owner,
            start=start,
            end=end,
            mode=mode,
            **fields,
        )
        reply = self.run(caller.ask("LOCK", request))
        if again:
            assert self.run(caller.ask("LOCK", request)) == reply
        return reply

    @rule(
        client=CLIENTS,
        owner=OWNERS,
        place=PLACES,
        mode=st.sampled_from([UNLOCKED, SHARED, EXCLUSIVE]),
        again=st.booleans(),
    )
    def lock(self, client, owner, place, mode, again):
        blocked = mode and self.blocked(client, owner, *place, mode)
        granted = self.request(client, owner, *place, mode, again).granted
        if granted:
            assert not blocked
            self.set_mode(client, owner, *place, mode)
        else:
            assert blocked or self.waits, "free, and refused"

    @rule(client=CLIENTS, owner=OWNERS, place=PLACES, mode=st.sampled_from([SHARED, EXCLUSIVE]))
    def wait(self, client, owner, place, mode):
        if (client, owner) in self.waits:
            return
        try:
            reply = self.request(client, owner, *place, mode, wait=True)
        except errors.WouldDeadlock:
            return
        if reply.granted:
            assert not self.blocked(client, owner, *place, mode)
            self.set_mode(client, owner, *place, mode)
        else:
            self.waits[client, owner] = reply.ticket, *place, mode

    @rule(number=st.integers(0, 5), patient=st.booleans())
    def poll_or_give_up(self, number, patient):
        """A waiting client polls again, or gives up."""
        if not self.waits:
            return
        client, owner = sorted(self.waits)[number % len(self.waits)]
        ticket, start, end, mode = self.waits.pop((client, owner))
        if not patient:
            self.run(
                self.clients[client].ask(
                    "LOCK_WAIT",
                    pb.LockWaitRequest(
                        session=self.clients[client].session, given_up=struct.pack("<Q", ticket)
                    ),
                )
            )
            return
        try:
            reply = self.request(client, owner, start, end, mode, wait=True, ticket=ticket)
        except errors.WouldDeadlock:
            return
        if reply.granted:
            assert not self.blocked(client, owner, start, end, mode)
            self.set_mode(client, owner, start, end, mode)
        else:
            self.waits[client, owner] = reply.ticket, start, end, mode

    @rule(power_lost=st.booleans())
    def kill_shard(self, power_lost):
        self.run(self.service.close())
        if power_lost:
            self.kv.crash()
        self.run(self.start())
        for client in self.clients:
            client.service = self.service
        self.dead_until = self.clock.now_s + OPTIONS.grant_s + HOLD_BEYOND_GRANTS_S

    @rule(client=CLIENTS, said_so=st.booleans())
    def end_session(self, client, said_so):
        session = self.clients[client].session
        self.waits = {who: place for who, place in self.waits.items() if who[0] != client}
        gone = {who: self.held.pop(who) for who in list(self.held) if who[0] == client}
        if said_so:
            self.run(self.clients[client].ask("CLOSE_SESSION", pb.CloseSessionRequest(session=session)))
        else:
            self.service.session_handlers.end_session(
                self.service.parts.sessions.get(session), OPTIONS.grant_s
            )
            self.dead |= {(session, who): modes for who, modes in gone.items()}
            self.dead_until = self.clock.now_s + OPTIONS.grant_s + HOLD_BEYOND_GRANTS_S
        # The end of a session is as durable as any change: a power loss may undo it.
        self.run(self.kv.sync())
        self.clients[client] = self.run(ShardClient(self.service).begin())
        self.run(self.kv.sync())

    @rule()
    def wait_for_ended_sessions(self):
        if self.dead:
            self.clock.now_s = max(self.clock.now_s, self.dead_until)
        self.clock.advance(1)
        for session in self.service.parts.sessions.by_number.values():
            session.expires_s = self.clock.now_s + 60
        self.run(self.service.run_once())
        self.run(self.kv.sync())  # as above: without it a power loss makes clients wait once more
        self.dead.clear()

    @invariant()
    def shard_holds_the_granted_locks(self):
        if not hasattr(self, "file"):
            return
        seen = {}
        for lock in self.run(self.clients[0].locks(self.file)):
            if not lock.waits:
                client = next((n for n, one in enumerate(self.clients) if one.session == lock.session), None)
                if client is not None:
                    modes = seen.setdefault((client, lock.owner), [UNLOCKED] * BYTES)
                    modes[lock.start : lock.end + 1] = [lock.mode] * (lock.end + 1 - lock.start)
        assert seen == {who: modes for who, modes in self.held.items() if any(modes)}

    def teardown(self):
        if hasattr(self, "file"):
            self.clock.advance(130)
            for session in self.service.parts.sessions.by_number.values():
                session.expires_s = self.clock.now_s + 60
            assert self.run(self.clients[0].fsck()) == []
            self.run(self.service.close())
            assert not self.service.died.done()
        self.loop.close()


TestLocks = Locks.TestCase
TestLocks.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.few(0)
class TestLocksWide(Locks.TestCase):
    settings = settings(TestLocks.settings, max_examples=40)
