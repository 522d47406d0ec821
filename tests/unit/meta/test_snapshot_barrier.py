"""Snapshot barrier of the whole pool: waiting changes, its end, and refused barriers (meta/snapshot_barrier,
sdk/admin/snapshot_barrier)."""

from __future__ import annotations

import asyncio

import pytest

from nvpool.core.errors import Busy, StaleCursor
from nvpool.meta import snapshot_barrier as shard_moment
from nvpool.rpc.v1 import wire_pb2
from nvpool.rpc.v1.meta_pb2 import DumpReply, DumpRequest, MomentReply, MomentRequest
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.admin.snapshot_barrier import begin_at_all
from nvpool.sdk.dump import dump, frames, read_header
from nvpool.sdk.fsck.check import check_metadata
from nvpool.sdk.fsck.report import FsckReport
from tests.unit.meta.transactions.test_cross_shard_transactions import ME, CrossShardNames, run

QUIET, TAKE, END = MomentRequest.QUIET, MomentRequest.TAKE, MomentRequest.END


class Stages:
    def __init__(self, names: CrossShardNames, number: int = 1) -> None:
        self.asking = AdminCalls(names.pool.clients[0])
        self.number = number
        self.shards = tuple(names.at)

    async def ask(self, stage: int, *shards: int) -> list[MomentReply]:
        request = MomentRequest(id=self.number, stage=stage, dump=True)
        return [
            (await self.asking.shard(shard, wire_pb2.META_MOMENT, request, MomentReply))[0]
            for shard in shards or self.shards
        ]

    async def dumped(self, shard: int, cursor: bytes) -> bytes:
        return bytes(
            (await self.asking.shard(shard, wire_pb2.META_DUMP, DumpRequest(cursor=cursor), DumpReply))[1]
        )


async def until_a_request_waits(names: CrossShardNames, shard: int) -> None:
    async with asyncio.timeout(60):
        while not names.pool.metas[shard].parts.waits.tasks:  # noqa: ASYNC110 (no notification)
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A slow machine must not end a barrier: the tests decide when it times out."""
    monkeypatch.setattr(shard_moment, "MOMENT_S", 60.0)
    monkeypatch.setattr(shard_moment, "QUIET_S", 30.0)


def test_change_after_one_snapshot_waits_for_all_snapshots():
    async def main(names: CrossShardNames) -> None:
        stages = Stages(names)
        await stages.ask(QUIET)
        (first,) = await stages.ask(TAKE, 2)
        making = asyncio.create_task(names.file(names.at[2], b"early"))
        await until_a_request_waits(names, 2)
        second, third = await stages.ask(TAKE, 1, 3)
        assert not making.done()
        assert [reply.stood for reply in await stages.ask(END)] == [True] * 3
        await making
        assert b"early" not in await stages.dumped(2, first.cursor)
        assert b"early" in await stages.dumped(2, b"")

    run(main)


def test_cross_shard_change_waits_for_the_barrier():
    async def main(names: CrossShardNames) -> None:
        await names.file(names.at[2], b"a")
        stages = Stages(names)
        await stages.ask(QUIET)
        moving = asyncio.create_task(names.vfs.rename(names.at[2], b"a", names.at[3], b"b", 0, ME))
        await until_a_request_waits(names, 2)
        await names.file(names.at[1], b"beside")
        assert not moving.done()
        await stages.ask(TAKE)
        assert not moving.done()
        await stages.ask(END)
        await moving
        assert set(await names.names(names.at[3])) == {b"b"} and not await names.names(names.at[2])

    run(main)


def test_barrier_that_timed_out_is_reported_as_invalid(monkeypatch):
    async def main(names: CrossShardNames) -> None:
        monkeypatch.setattr(shard_moment, "MOMENT_S", 0.05)
        stages = Stages(names)
        await stages.ask(QUIET, 2)
        async with asyncio.timeout(60):
            while names.pool.metas[2].parts.moment.spans_wait:  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.01)
        with pytest.raises(Busy):
            await stages.ask(TAKE, 2)
        assert [reply.stood for reply in await stages.ask(END, 2)] == [False]
        await names.file(names.at[2], b"goes on")

    run(main)


def test_two_concurrent_barriers_both_succeed():
    async def main(names: CrossShardNames) -> None:
        stages = Stages(names, 7)
        await stages.ask(QUIET, 3)
        with pytest.raises(Busy):
            await Stages(names, 8).ask(QUIET, 3)
        beginning = asyncio.create_task(begin_at_all(names.pool.clients[0], dump=True))
        await stages.ask(TAKE, 3)
        assert not beginning.done()
        await stages.ask(END, 3)
        begun = await asyncio.gather(beginning, begin_at_all(names.pool.clients[0]))
        assert begun[0].holders == begun[1].holders == names.pool.pool_map.shard_of_partition
        assert set(begun[0].cursors) == set(names.at)
        assert not any(meta.parts.moment.spans_wait for meta in names.pool.metas.values())

    run(main)


def restart_at_a_step(monkeypatch, names: CrossShardNames, shard: int, method: int) -> list[int]:
    """At its second step, the shard restarts as another process; the list has the requests it received."""
    asked: list[int] = []
    ask = AdminCalls.shard

    async def shard_asked(self, number, wanted, *more):
        if wanted == method and number == shard:
            asked.append(number)
            if len(asked) == 2:
                await names.pool.stop_shard(shard=shard)
                await names.pool.start_shard(shard)
        return await ask(self, number, wanted, *more)

    monkeypatch.setattr(AdminCalls, "shard", shard_asked)
    return asked


@pytest.mark.parametrize("shard", [1, 3])
def test_check_restarts_and_reports_a_new_primary(monkeypatch, shard):
    monkeypatch.setattr("nvpool.sdk.fsck.metadata.RECORDS_A_STEP", 5)

    async def main(names: CrossShardNames) -> None:
        for number in range(10):
            await names.file(names.at[shard], b"f%d" % number)
            await names.vfs.rename(names.at[shard], b"f%d" % number, names.at[2], b"to%d" % number, 0, ME)
        client = names.pool.clients[0]
        quiet = FsckReport()
        await check_metadata(client, quiet)
        assert not quiet.problems and not quiet.restarts
        asked = restart_at_a_step(monkeypatch, names, shard, wire_pb2.META_FSCK)
        found = FsckReport()
        await check_metadata(client, found)
        assert len(asked) > 3 and len(found.restarts) == 1
        assert not found.problems, found.problems
        assert found.records == quiet.records
        assert not any(meta.parts.runs.under_way() for meta in names.pool.metas.values())

    run(main)


def test_dump_continues_after_a_new_primary(monkeypatch, tmp_path):
    monkeypatch.setattr("nvpool.sdk.dump.RECORDS_A_STEP", 5)

    async def main(names: CrossShardNames) -> None:
        for number in range(10):
            await names.file(names.at[3], b"f%d" % number)
        asked = restart_at_a_step(monkeypatch, names, 3, wire_pb2.META_DUMP)
        count = await dump(names.pool.clients[0], str(tmp_path / "dump"))
        assert len(asked) > 3
        with open(tmp_path / "dump", "rb") as file:  # noqa: ASYNC230
            read_header(file)
            records = b"".join(part for _, part in frames(file))
        assert records.count(b"\n") == count + len(
            names.at
        )  # each dump begins with a line that names its shard
        assert all(records.count(b'"f%d"' % number) == 1 for number in range(10))

    run(main)


def test_check_that_never_ends_reports_the_reason(monkeypatch):
    monkeypatch.setattr("nvpool.sdk.admin.snapshot_barrier.RESTARTS_MAX", 2)

    async def main(names: CrossShardNames) -> None:
        ask = AdminCalls.shard

        async def gone(self, number, wanted, *more):
            if wanted == wire_pb2.META_FSCK:
                raise StaleCursor("it is another one")
            return await ask(self, number, wanted, *more)

        monkeypatch.setattr(AdminCalls, "shard", gone)
        found = FsckReport()
        with pytest.raises(StaleCursor):
            await check_metadata(names.pool.clients[0], found)
        assert found.restarts == ["it is another one"] * 2
        assert not any(meta.parts.runs.under_way() for meta in names.pool.metas.values())

    run(main)
