"""Append reservations at the metadata service: the size changes with the report, one client at a time reserves."""

import asyncio

import pytest

from nvpool.core import errors
from nvpool.core.clock import ManualClock
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.units import WITHDRAW_ANY
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.state import records
from nvpool.meta.state.append_reservations import APPEND_S
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map


class Shard:
    """A shard in memory with a manual clock, two clients `one` and `two`, and a file."""

    async def __aenter__(self):
        self.kv, self.clock, self.stores = MemoryKv(), ManualClock(), StoreRecorder()
        self.service = await self.start()
        self.one, self.two = [await ShardClient(self.service).begin() for _ in range(2)]
        self.inode = (await self.one.create(ROOT, b"log", open=True, rights=2)).entry.attr.inode
        return self

    async def start(self):
        service = MetaService(
            self.kv,
            grant_secret=b"s" * 32,
            dialer=self.stores,
            clock=self.clock,
            options=MetaOptions(tick_s=3600),
        )
        service.update_map(small_map())
        await service.start()
        return service

    async def __aexit__(self, *failure):
        await self.service.close()

    def sending(self, client, length, own=0, cut=0, slot=0):
        return client.send(
            "RESERVE",
            pb.ReserveRequest(
                change=client.change(slot), inode=self.inode, length=length, own=own, cut=cut, deferred=True
            ),
        )

    async def reserve(self, client, length, own=0, cut=0):
        return pb.ReserveReply.FromString((await self.sending(client, length, own, cut).wait())[0])

    async def report(self, client, end, **fields):
        return (
            await client.ask(
                "REPORT",
                pb.ReportRequest(change=client.change(), inode=self.inode, end=end, wrote=True, **fields),
            )
        ).attr

    async def size(self):
        return (await self.two.getattr(self.inode)).attr.size


def scenario(function):
    def test():
        async def body():
            async with Shard() as shard:
                await function(shard)

        asyncio.run(asyncio.wait_for(body(), 60))

    test.__name__ = function.__name__
    return test


@scenario
async def test_reservation_leaves_the_size_until_the_report(shard):
    change = (await shard.two.getattr(shard.inode)).attr.change
    first = await shard.reserve(shard.one, 100)
    second = await shard.reserve(shard.one, 50, own=100)
    assert (first.offset, second.offset, first.attr.size, second.attr.size) == (0, 100, 0, 0)
    seen = (await shard.two.getattr(shard.inode)).attr
    assert (seen.size, seen.change) == (0, change), "no notification of bytes that do not exist yet"
    assert (await shard.report(shard.one, 100)).size == 100
    third = await shard.reserve(shard.one, 7, own=150)
    assert third.offset == 150 and await shard.size() == 100
    assert (await shard.report(shard.one, 157)).size == 157


@scenario
async def test_other_clients_append_after_the_report(shard):
    await shard.reserve(shard.one, 100)
    waiting = shard.sending(shard.two, 10)
    extending = shard.sending(shard.one, 5, own=100, slot=1)
    await asyncio.sleep(0.01)
    assert waiting.answer is None and extending.answer is None, (
        "one client after the other, also the one whose turn it is"
    )
    await shard.report(shard.one, 100)
    reply = pb.ReserveReply.FromString((await waiting.wait())[0])
    assert (reply.offset, reply.shared) == (100, True) and extending.answer is None
    await shard.report(shard.two, 110)
    reply = pb.ReserveReply.FromString((await extending.wait())[0])
    assert (reply.offset, reply.shared) == (110, True)


@scenario
async def test_silent_client_loses_its_turn_but_not_its_place(shard):
    await shard.reserve(shard.one, 100)
    waiting = shard.sending(shard.two, 10)
    await asyncio.sleep(0.01)
    assert waiting.answer is None
    shard.clock.advance(APPEND_S + 1)
    again = shard.sending(shard.two, 10, slot=2)
    reply = pb.ReserveReply.FromString((await again.wait())[0])
    assert reply.offset == 100, "behind the other reservation, which may still be written"
    await shard.report(shard.one, 100)
    assert await shard.size() == 100
    await shard.report(shard.two, 110)
    assert await shard.size() == 110


@scenario
async def test_restart_keeps_reservations_and_their_owner(shard):
    await shard.reserve(shard.one, 100)
    await shard.service.close()
    shard.service = shard.one.service = shard.two.service = await shard.start()
    assert (await shard.reserve(shard.one, 10, own=100)).offset == 100
    other = shard.sending(shard.two, 1)
    await asyncio.sleep(0.01)
    assert other.answer is None
    await shard.report(shard.one, 110)
    assert pb.ReserveReply.FromString((await other.wait())[0]).offset == 110


@scenario
async def test_withdrawn_reservation_leaves_no_bytes(shard):
    await shard.report(shard.one, 40)
    await shard.reserve(shard.one, 100)
    attr = await shard.report(shard.one, 90, withdrawn=140)
    assert attr.size == 90 and attr.cut == 1
    assert {(cut.size, cut.cut) for cut in shard.stores.cuts} == {(90, 1)}, (
        "stores may have bytes behind the end"
    )
    assert (await shard.reserve(shard.two, 5, cut=1)).offset == 90


@scenario
async def test_withdrawal_of_a_reassigned_turn_is_ignored(shard):
    await shard.reserve(shard.one, 100)
    shard.clock.advance(APPEND_S + 1)
    assert (await shard.reserve(shard.two, 10)).offset == 100
    for withdrawn in (100, WITHDRAW_ANY):
        assert (await shard.report(shard.one, 0, withdrawn=withdrawn)).cut == 0
    assert (await shard.report(shard.two, 110)).size == 110


@scenario
async def test_client_withdraws_an_unknown_reservation(shard):
    shard.sending(shard.one, 100)
    assert (await shard.report(shard.one, 0, withdrawn=WITHDRAW_ANY)).size == 0
    assert (await shard.reserve(shard.two, 10, cut=1)).offset == 0


@scenario
async def test_truncation_ends_open_reservations(shard):
    await shard.report(shard.one, 40)
    await shard.reserve(shard.one, 100)
    waiting = shard.sending(shard.two, 10)
    await shard.two.setattr(shard.inode, 8, slot=3, size=10)
    with pytest.raises(errors.StaleCut):
        await waiting.wait()
    assert (await shard.reserve(shard.two, 10, cut=1)).offset == 10
    with pytest.raises(errors.StaleCut):
        await shard.report(shard.one, 140)


@scenario
async def test_growth_over_open_reservations_ends_them(shard):
    await shard.reserve(shard.one, 100)
    waiting = shard.sending(shard.two, 10)
    await asyncio.sleep(0)
    await shard.two.setattr(shard.inode, 8, slot=3, size=4096)
    assert pb.ReserveReply.FromString((await waiting.wait())[0]).offset == 4096


@scenario
async def test_older_client_appends_as_before(shard):
    request = pb.ReserveRequest(change=shard.one.change(), inode=shard.inode, length=100)
    reply = await shard.one.ask("RESERVE", request)
    assert (reply.offset, reply.attr.size) == (0, 100) and await shard.size() == 100


def test_record_without_reservations_is_unchanged():
    inode = records.Inode(5, 0o100644, size=100, atime_ns=1, mtime_ns=1, ctime_ns=1)
    before = records.encode_inode(inode)
    inode.reserved = 100
    assert records.encode_inode(inode) == before
    inode.reserved = 101
    assert records.decode_inode(5, records.encode_inode(inode)).reserved == 101


@scenario
async def test_waiting_append_is_refused_by_a_drain(shard):
    await shard.reserve(shard.one, 100)
    waiting = shard.sending(shard.two, 10)
    await asyncio.sleep(0)
    shard.service.begin_drain()
    with pytest.raises(errors.Draining) as caught:
        await waiting.wait()
    assert not caught.value.may_be_applied
    with pytest.raises(errors.Draining):
        await shard.reserve(shard.two, 10)
    assert (await shard.report(shard.one, 100)).size == 100, "requests in progress are not affected"
