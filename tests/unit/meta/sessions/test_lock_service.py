"""Lock requests to a shard: durable over crashes, released with sessions, granted in order."""

import asyncio
import json
import struct

import pytest

from nvpool.core import errors
from nvpool.core.clock import ManualClock
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, RECORD, SHARED, UNLOCKED, WHOLE
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.sessions.lock_service import HOLD_BEYOND_GRANTS_S
from nvpool.meta.state import records
from nvpool.meta.state.lock_table import Owner
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall, ShardClient, StoreRecorder, small_map

OPTIONS = MetaOptions(session_lease_s=10, grant_s=20, linger_s=0, tick_s=3600)
HOLD_S = OPTIONS.grant_s + HOLD_BEYOND_GRANTS_S


class Shard:
    """A shard in memory with a manual clock, a file and two clients."""

    def __init__(self):
        self.kv = MemoryKv()
        self.clock = ManualClock()

    async def start(self):
        self.service = MetaService(
            self.kv, grant_secret=b"s" * 32, dialer=StoreRecorder(), clock=self.clock, options=OPTIONS
        )
        self.service.update_map(small_map())
        await self.service.start()
        return self

    async def restart(self, power_lost=False):
        await self.service.close()
        if power_lost:
            self.kv.crash()
        await self.start()
        for client in (self.one, self.two):
            client.service = self.service

    async def pass_time(self, seconds, *living):
        """Advance the clock, and renew the sessions of `living` meanwhile."""
        while seconds > 0:
            self.clock.advance(min(5, seconds))
            seconds -= 5
            for client in living:
                await client.ask("RENEW_SESSION", pb.RenewSessionRequest(session=client.session))
            await self.service.run_once()

    async def fsck(self, client, repair=False):
        self.clock.advance(1)  # an ended check makes room for another after a moment
        return await client.fsck(repair)

    def wait(self, client, *tickets, given_up=()):
        """Send a query of waiting clients; return the call."""
        request = pb.LockWaitRequest(session=client.session, tickets=pack(tickets), given_up=pack(given_up))
        call = DirectCall(
            wire.META_LOCK_WAIT, request.SerializeToString(), deadline_s=self.clock.boottime_s() + 60
        )
        self.service.handle(call)
        return call


def pack(tickets):
    return struct.pack(f"<{len(tickets)}Q", *tickets)


async def turns(call):
    raw = pb.LockWaitReply.FromString((await call.wait())[0]).tickets
    return list(struct.unpack(f"<{len(raw) // 8}Q", raw))


def scenario(function):
    def test():
        async def body():
            shard = await Shard().start()
            shard.one, shard.two = (
                await ShardClient(shard.service).begin(),
                await ShardClient(shard.service).begin(),
            )
            shard.file = (await shard.one.file(ROOT, b"file")).inode
            try:
                await function(shard, shard.one, shard.two, shard.file)
                assert await ShardClient(shard.service).fsck() == []
            finally:
                await shard.service.close()
                assert not shard.service.died.done()

        asyncio.run(body())

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


def records_of(shard):
    return [
        key
        for key, _ in shard.kv.scan(b"", records.END_OF_KEYS, 1000)
        if records.kind_of(key) == records.LOCK
    ]


@scenario
async def test_lock_conflicts_with_another_client_and_names_it(shard, one, two, file):
    reply = await one.lock(file, EXCLUSIVE, 10, 19, owner=7, pid=4711)
    assert reply.granted and reply.attr.inode == file
    assert not (await two.lock(file, SHARED, 19, 30)).granted
    assert (await two.lock(file, SHARED, 20, 30)).granted
    (lock,) = await two.locks(file, SHARED, 0, 100)
    assert (lock.kind, lock.session, lock.owner, lock.start, lock.end, lock.mode, lock.pid, lock.client) == (
        RECORD,
        one.session,
        7,
        10,
        19,
        EXCLUSIVE,
        4711,
        "test",
    )
    assert not await one.locks(file, EXCLUSIVE, 0, 19, owner=7)
    assert not await two.locks(file, SHARED, 20, 100)
    assert len(await two.locks(file)) == 2
    assert (await one.lock(file, UNLOCKED, owner=7)).granted
    assert (await two.lock(file, EXCLUSIVE)).granted
    assert (await one.lock(file, EXCLUSIVE, kind=WHOLE)).granted, "flock and fcntl locks are independent"


@scenario
async def test_lock_and_its_release_survive_crash_and_power_loss(shard, one, two, file):
    for power_lost in (False, True):
        assert (await one.lock(file, EXCLUSIVE, 0, 9)).granted
        await shard.restart(power_lost)
        assert not (await two.lock(file, SHARED, 5, 5)).granted
        assert (await one.lock(file, UNLOCKED, 3, 6)).granted
        await shard.restart(power_lost)
        assert (await two.lock(file, SHARED, 5, 5)).granted
        assert [(lock.start, lock.end) for lock in await two.locks(file, EXCLUSIVE, 0, 2, owner=9)] == [
            (0, 2)
        ]
        for client in (one, two):
            await client.lock(file, UNLOCKED)
        assert not records_of(shard)


@scenario
async def test_replayed_request_gets_its_first_reply(shard, one, two, file):
    request = pb.LockRequest(
        change=one.change(), inode=file, kind=RECORD, owner=1, end=LAST_BYTE, mode=EXCLUSIVE
    )
    assert (await one.ask("LOCK", request)).granted
    await shard.restart()
    assert (await one.ask("LOCK", request)).granted
    release = pb.LockRequest(change=one.change(), inode=file, kind=RECORD, owner=1, end=LAST_BYTE)
    assert (await one.ask("LOCK", release)).granted
    assert (await two.lock(file, EXCLUSIVE)).granted
    assert (await one.ask("LOCK", release)).granted, "the replay releases no lock of another client"
    with pytest.raises(errors.StaleSequence):
        await one.ask("LOCK", request)
    assert len(records_of(shard)) == 1 and (await two.locks(file))[0].session == two.session


@scenario
async def test_replayed_reply_waits_for_the_sync(shard, one, two, file):
    request = pb.LockRequest(
        change=one.change(), inode=file, kind=RECORD, owner=1, end=LAST_BYTE, mode=EXCLUSIVE
    )
    first, second = one.send("LOCK", request), one.send("LOCK", request)
    assert first.answer is None and second.answer is None
    await second.wait()
    assert shard.kv.synced_sequence == shard.kv.sequence


@scenario
async def test_closed_session_releases_its_locks_immediately(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    ticket = (await two.lock(file, EXCLUSIVE, wait=True)).ticket
    call = shard.wait(two, ticket)
    await one.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=one.session))
    assert await turns(call) == [ticket]
    assert (await two.lock(file, EXCLUSIVE, wait=True, ticket=ticket)).granted


@scenario
async def test_locks_of_a_dead_session_are_freed_after_its_grants(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    await one.lock(file, SHARED, kind=WHOLE)
    await shard.pass_time(OPTIONS.session_lease_s + 1, two)
    with pytest.raises(errors.StaleSession):
        await one.lock(file, UNLOCKED)
    await shard.pass_time(HOLD_S - 5, two)
    assert not (await two.lock(file, SHARED)).granted
    assert [lock.client for lock in await two.locks(file)] == ["", ""]
    assert await two.fsck() == []
    await shard.pass_time(10, two)
    assert (await two.lock(file, EXCLUSIVE)).granted and (await two.lock(file, EXCLUSIVE, kind=WHOLE)).granted


@scenario
async def test_restart_resets_the_time_of_a_dead_session(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    await shard.pass_time(OPTIONS.session_lease_s + 1, two)
    await shard.pass_time(HOLD_S - 5, two)
    await shard.restart()
    await shard.pass_time(HOLD_S - 5, two)
    assert not (await two.lock(file, SHARED)).granted
    assert await two.fsck() == []
    await shard.pass_time(10, two)
    assert (await two.lock(file, EXCLUSIVE)).granted


@scenario
async def test_restart_keeps_locks_of_a_living_session(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    await shard.restart()
    await shard.pass_time(3 * HOLD_S, one, two)
    assert not (await two.lock(file, SHARED)).granted


@scenario
async def test_locked_unlinked_file_is_collected_after_the_lock(shard, one, two, file):
    await one.open(file, 3)
    await one.lock(file, EXCLUSIVE)
    await two.unlink(ROOT, b"file")
    await shard.pass_time(OPTIONS.session_lease_s + 1, two)
    await shard.pass_time(HOLD_S - 5, two)
    assert (await two.getattr(file)).attr.links == 0 and records_of(shard)
    await shard.pass_time(HOLD_S, two)
    with pytest.raises(errors.NotFound):
        await two.getattr(file)
    assert not records_of(shard)


@scenario
async def test_waiter_is_notified_and_gets_the_lock_with_its_ticket(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    waiting = await two.lock(file, SHARED, wait=True)
    assert not waiting.granted and waiting.ticket
    call = shard.wait(two, waiting.ticket)
    assert call.answer is None
    await one.lock(file, UNLOCKED)
    assert await turns(call) == [waiting.ticket]
    assert not (await one.lock(file, EXCLUSIVE)).granted, "it is the other client's turn"
    assert (await two.lock(file, SHARED, wait=True, ticket=waiting.ticket)).granted
    assert await turns(shard.wait(two, waiting.ticket)) == [waiting.ticket], "the ticket is used"


@scenario
async def test_second_query_of_a_session_replaces_the_first(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    first = (await two.lock(file, EXCLUSIVE, wait=True)).ticket
    second = (await two.lock(file, EXCLUSIVE, owner=2, wait=True)).ticket
    question = shard.wait(two, first)
    again = shard.wait(two, second, given_up=[first])
    assert await turns(question) == [] and again.answer is None
    await one.lock(file, UNLOCKED)
    assert await turns(again) == [second]
    assert await turns(shard.wait(two, given_up=[second])) == []
    assert (await one.lock(file, EXCLUSIVE)).granted


@scenario
async def test_cancelled_query_and_its_tickets_expire(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    ticket = (await two.lock(file, EXCLUSIVE, wait=True)).ticket
    request = pb.LockWaitRequest(session=two.session, tickets=pack([ticket]))
    call = CancellableCall(wire.META_LOCK_WAIT, request.SerializeToString())
    shard.service.handle(call)
    call.callback()
    assert (await one.status()).counters["lock_waiters"] == 1
    await shard.pass_time(15, one, two)
    assert (await one.status()).counters["lock_waiters"] == 0


@scenario
async def test_lock_query_is_answered_by_a_drain(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    ticket = (await two.lock(file, EXCLUSIVE, wait=True)).ticket
    question = shard.wait(two, ticket)
    assert question.answer is None
    shard.service.begin_drain()
    assert await turns(question) == []


class CancellableCall(DirectCall):
    def on_cancel(self, callback):
        self.callback = callback


@scenario
async def test_tickets_are_unknown_after_a_restart(shard, one, two, file):
    await one.lock(file, EXCLUSIVE)
    ticket = (await two.lock(file, EXCLUSIVE, wait=True)).ticket
    await shard.restart()
    assert await turns(shard.wait(two, ticket)) == [ticket]
    again = await two.lock(file, EXCLUSIVE, wait=True, ticket=ticket)
    assert not again.granted and again.ticket != ticket


@scenario
async def test_deadlock_between_clients_is_refused(shard, one, two, file):
    other = (await one.file(ROOT, b"other")).inode
    await one.lock(file, EXCLUSIVE)
    await two.lock(other, EXCLUSIVE)
    await one.lock(other, EXCLUSIVE, wait=True)
    with pytest.raises(errors.WouldDeadlock):
        await two.lock(file, EXCLUSIVE, wait=True)


@scenario
async def test_invalid_requests_are_refused(shard, one, two, file):
    directory = (await one.mkdir(ROOT, b"dir")).inode
    for inode, fields in (
        (directory, {}),
        (file, {"kind": 3}),
        (file, {"start": 5, "end": 4}),
        (file, {"end": 1 << 63}),
        (file, {"kind": WHOLE, "end": 9}),
    ):
        with pytest.raises(errors.InvalidRequest):
            await one.lock(inode, EXCLUSIVE, **fields)
    with pytest.raises(errors.InvalidRequest):
        await one.lock(file, 3)
    with pytest.raises(errors.NotFound):
        await one.lock(file + 1, EXCLUSIVE)
    with pytest.raises(errors.InvalidRequest):
        await one.ask("LOCK_WAIT", pb.LockWaitRequest(session=one.session, tickets=b"123"))
    with pytest.raises(errors.StaleSession):
        await one.ask("LOCK_WAIT", pb.LockWaitRequest(session=99))
    assert (await one.lock(file, UNLOCKED)).granted, "releasing nothing is no error"


@scenario
async def test_full_shard_can_release_locks_and_lock_for_it(shard, one, two, file):
    await one.lock(file, EXCLUSIVE, 0, 99)
    apply = shard.kv.apply

    def full(effects, *, reclaims=False):
        if not reclaims:
            raise errors.NoSpace()
        return apply(effects, reclaims=reclaims)

    shard.kv.apply = full
    assert (await one.lock(file, UNLOCKED, 10, 19)).granted
    assert (await two.lock(file, EXCLUSIVE, 10, 19)).granted
    assert (await one.lock(file, UNLOCKED)).granted
    del shard.kv.apply


def test_dangling_locks_are_found_and_repaired():
    async def body():
        shard = await Shard().start()
        client = await ShardClient(shard.service).begin()
        file = (await client.file(ROOT, b"file")).inode
        await client.lock(file, EXCLUSIVE, 0, 9)
        table = shard.service.parts.view.locks
        planted = {
            "no inode": [
                (records.lock_key(file + 77, RECORD, client.session, 1, 0), records.encode_lock(9, SHARED, 0))
            ],
            "unknown": [
                (records.lock_key(file, RECORD, client.session, 1, 50), records.encode_lock(60, SHARED, 0))
            ],
            "unreadable": [(records.lock_key(file, RECORD, client.session, 1, 70), b"nonsense")],
            "bad key": [
                (
                    records.lock_key(file, RECORD, client.session, 1, 70)[:-1],
                    records.encode_lock(80, SHARED, 0),
                )
            ],
        }
        for what, effects in planted.items():
            shard.kv.apply(effects)
            (problem,) = await shard.fsck(client)
            assert problem.kind in ("lock", "undecodable") and not problem.repaired, what
            (problem,) = await shard.fsck(client, repair=True)
            assert problem.repaired, what
            assert await shard.fsck(client) == [], what
        assert [(lock.start, lock.end) for lock in await client.locks(file)] == [(0, 9)]
        ghost = Owner(RECORD, 12345, 1)
        step = table.decide(file, ghost, 20, 29, EXCLUSIVE)
        shard.kv.apply(step.effects)
        table.commit(step)
        assert [
            "locked by unknown session" in problem.text for problem in await shard.fsck(client, repair=True)
        ] == [True]
        assert await shard.fsck(client) == []
        await shard.pass_time(HOLD_S + 1, client)
        assert (await client.lock(file, EXCLUSIVE, 20, 29, owner=2)).granted
        await shard.service.close()

    asyncio.run(body())


def test_conflicting_locks_are_found_after_a_restart():
    async def body():
        shard = await Shard().start()
        shard.one, shard.two = (
            await ShardClient(shard.service).begin(),
            await ShardClient(shard.service).begin(),
        )
        file = (await shard.one.file(ROOT, b"file")).inode
        await shard.one.lock(file, EXCLUSIVE)
        shard.kv.apply(
            [(records.lock_key(file, RECORD, shard.two.session, 1, 5), records.encode_lock(9, SHARED, 0))]
        )
        await shard.restart()
        assert ["by another" in problem.text for problem in await shard.fsck(shard.one, repair=True)] == [
            True,
            True,
        ]
        await shard.two.lock(file, UNLOCKED)
        assert await shard.fsck(shard.one) == []
        await shard.service.close()

    asyncio.run(body())


def test_locks_are_not_dumped():
    async def body():
        shard = await Shard().start()
        client = await ShardClient(shard.service).begin()
        await client.lock((await client.file(ROOT, b"file")).inode, EXCLUSIVE)
        reply = await client.ask("DUMP", pb.DumpRequest())
        types = {json.loads(line).get("type") for line in client.payload.splitlines()}
        assert reply.done and types == {None, "inode", "dentry", "identity", "bounds", "counts"}
        await shard.service.close()

    asyncio.run(body())
