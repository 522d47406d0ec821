"""Scrub rounds: started when due or by order, paused, interrupted by crashes; damage is repaired from replicas."""

from __future__ import annotations

import asyncio
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import InvalidRequest, NoSpace
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.poolmap.file_layout import chain_of
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.maintenance.scrub_schedule import ScrubSchedule
from nvpool.testing.contracts.chunk_store import put, some_bytes
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
FAST = ClientOptions(deadline_s=30.0, short_circuit=False)


async def until(holds) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def a_file(pool, length: int):
    vfs = (await pool.client("first", FAST)).vfs
    _, handle = await vfs.create(ROOT_INODE, b"file", 0o644, 2, ME)
    await vfs.write(handle, 0, random.Random(1).randbytes(length))
    await vfs.fsync(handle, False)
    return handle


def test_round_finds_and_repairs_a_damaged_block():
    async def main():
        async with InProcessPool(capacities=(64 * MIB,) * 2, replicas=2, chunk_bytes=256 * KIB) as pool:
            handle = await a_file(pool, 2 * MIB)
            target = pool.pool_map.table_by_id[2].chains[chain_of(handle.inode, 3)].targets[0]
            store, rounds = pool.stores[target].store, pool.stores[target].upkeep.rounds
            store.flip(handle.inode, 3, 7)
            assert (
                rounds.status().state == "idle"
                and not rounds.status().last_ended_ms
                and rounds.status().next_ms
            )
            rounds.order("start")
            began_ms = rounds.status().began_ms
            rounds.order("start")
            assert rounds.status().state == "running" and rounds.status().began_ms == began_ms
            assert rounds.status().blocks_total == 512
            await until(lambda: rounds.status().state == "idle")
            status = rounds.status()
            assert (status.last_blocks, status.last_bad, status.last_mended) == (
                512,
                1,
                1,
            ) and status.last_ended_ms >= began_ms
            assert not store.bad_blocks()
            with pytest.raises(InvalidRequest, match="start, pause, resume, stop"):
                rounds.order("begin")

    run(main())


def test_block_overwritten_during_repair_is_not_bad(monkeypatch):
    async def main():
        async with InProcessPool(capacities=(64 * MIB,) * 2, replicas=2, chunk_bytes=256 * KIB) as pool:
            handle = await a_file(pool, 2 * MIB)
            vfs = (await pool.client("first", FAST)).vfs
            target = pool.pool_map.table_by_id[2].chains[chain_of(handle.inode, 3)].targets[0]
            store, upkeep = pool.stores[target].store, pool.stores[target].upkeep
            store.flip(handle.inode, 3, 7)
            store.flip(handle.inode, 3, 9)
            asked = []

            async def not_now(bad):
                asked.append(sorted(one.block for one in bad))
                if len(asked) == 1:
                    await vfs.write(handle, 3 * 256 * KIB + 7 * 4 * KIB, bytes(4 * KIB))
                    await vfs.fsync(handle, False)
                return []

            monkeypatch.setattr(upkeep.repair, "repaired", not_now)
            upkeep.rounds.order("start")
            await until(lambda: upkeep.rounds.status().state == "idle")
            status = upkeep.rounds.status()
            assert (status.last_bad, status.last_mended) == (2, 1), "the other block is still bad"
            assert [7, 9] in asked and asked[-1] == [9]

    run(main())


def test_chunk_removed_before_repair_is_not_bad(monkeypatch):
    async def main():
        async with InProcessPool(capacities=(64 * MIB,) * 2, replicas=2, chunk_bytes=256 * KIB) as pool:
            handle = await a_file(pool, 2 * MIB)
            target = pool.pool_map.table_by_id[2].chains[chain_of(handle.inode, 3)].targets[0]
            store, upkeep = pool.stores[target].store, pool.stores[target].upkeep
            store.flip(handle.inode, 3, 7)
            look = store.scrub

            async def then_removed(*words):
                step = await look(*words)
                for one in pool.stores.values() if step.bad else ():
                    await one.store.remove([handle.inode])
                return step

            monkeypatch.setattr(store, "scrub", then_removed)
            upkeep.rounds.order("start")
            await until(lambda: upkeep.rounds.status().last_ended_ms)
            status = upkeep.rounds.status()
            assert (status.last_bad, status.last_mended) == (1, 1) and not store.bad_blocks()

    run(main())


def test_round_and_pause_survive_a_restart():
    async def main():
        async with InProcessPool(capacities=(64 * MIB,) * 2, replicas=2, chunk_bytes=256 * KIB) as pool:
            await a_file(pool, 8 * MIB)
            rounds = pool.stores[1].upkeep.rounds
            rounds.throttle.bytes_per_s = 4 * MIB
            rounds.order("start")
            await until(lambda: rounds.status().blocks >= 512)
            rounds.order("pause")
            done = rounds.status().blocks
            await pool.stop_store(1)
            await pool.start_store(1)
            rounds = pool.stores[1].upkeep.rounds
            assert (
                rounds.status().state == "paused"
                and done <= rounds.status().blocks < 2048
                and not rounds.status().next_ms
            )
            rounds.order("resume")
            await until(lambda: rounds.status().state == "idle")
            assert rounds.status().last_blocks == 2048
            rounds.order("start")
            rounds.order("stop")
            assert (
                rounds.status().state == "idle"
                and rounds.status().last_blocks == 2048
                and not rounds.status().began_ms
            )

    run(main())


def test_failed_save_of_the_round_is_retried(monkeypatch):
    class Full(MemoryChunkStore):
        refusals = 2

        def keep_note(self, raw: bytes) -> None:
            if self.refusals:
                self.refusals -= 1
                raise NoSpace("full")
            super().keep_note(raw)

    async def main():
        store, failed = Full(), []
        await put(store, 1, 0, 0, some_bytes(9000))
        rounds = ScrubSchedule(store, 1, None, SYSTEM_CLOCK, bool, interval_s=0.1, on_fail=failed.append)
        rounds.start()
        await until(lambda: rounds.status().last_ended_ms)
        assert store.note() and not failed
        await rounds.close()

    monkeypatch.setattr("nvpool.store.maintenance.scrub_schedule.RETRY_S", 0.01)
    run(main())


def test_due_round_starts_unless_paused():
    async def main():
        store = MemoryChunkStore()
        for inode in range(1, 20):
            await put(store, inode, 0, 0, some_bytes(9000))
        rounds = ScrubSchedule(store, 1, None, SYSTEM_CLOCK, bool, interval_s=0.1)
        rounds.start()
        await until(lambda: rounds.status().last_ended_ms)
        first = rounds.status().last_ended_ms
        assert rounds.status().last_blocks == 57
        await until(lambda: rounds.status().last_ended_ms > first)
        rounds.order("pause")
        paused = rounds.status().last_ended_ms
        await asyncio.sleep(0.5)
        assert rounds.status().last_ended_ms == paused and rounds.status().state == "paused"
        await rounds.close()
        never = ScrubSchedule(MemoryChunkStore(), 1, None, SYSTEM_CLOCK, bool, interval_s=0)
        assert not never.status().next_ms

    run(main())
