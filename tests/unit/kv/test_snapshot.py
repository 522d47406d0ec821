"""Snapshots during many changes: old values are spilled to disk, and a snapshot ends before it needs too much."""

import asyncio
import random

import pytest

from nvpool.core.errors import Busy
from nvpool.kv import snapshot as snapshot_module
from nvpool.kv.api import KEY_END
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.memory_engine import MemoryKv

OPTIONS = LmdbOptions(
    journal_bytes=1 << 20,
    map_bytes=1 << 20,
    layer_entries_max=500,
    sync_interval_s=30,
    checkpoint_interval_s=30,
)


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch):
    monkeypatch.setattr(snapshot_module, "OLD_VALUES_MAX", 100)
    monkeypatch.setattr(snapshot_module, "SPILLED_PER_BATCH", 30)


async def change_much(kv, chance, count):
    for _ in range(count):
        if kv.full:
            await kv.room()
        key = b"%04d" % chance.randrange(3000)
        kv.apply([(key, None if chance.random() < 0.4 else b"new %d" % chance.randrange(1000))])


@pytest.mark.parametrize("seed", range(3))
def test_snapshot_is_consistent_during_many_changes(tmp_path, seed):
    async def main():
        chance = random.Random(seed)
        kv = await LmdbKv.open(tmp_path / "kv", OPTIONS)
        await change_much(kv, chance, 4000)
        then = kv.scan(b"", KEY_END, 10_000)
        snapshot, beside = kv.snapshot(), kv.snapshot(b"1", b"2")
        seen = []
        while not snapshot.done:
            await change_much(kv, chance, 150)
            seen += snapshot.step(chance.randrange(1, 60))
        assert seen == then
        assert [pair async for pairs in beside for pair in pairs] == [
            pair for pair in then if pair[0][:1] == b"1"
        ]
        assert not list((tmp_path / "kv").glob("snapshot-*"))
        left = kv.snapshot()
        await change_much(kv, chance, 500)
        left.step(1)
        assert list((tmp_path / "kv").glob("snapshot-*"))
        await kv.close()
        assert not list((tmp_path / "kv").glob("snapshot-*"))

    asyncio.run(main())


def test_spill_of_a_dead_process_is_removed(tmp_path):
    async def main():
        kv = await LmdbKv.open(tmp_path / "kv", OPTIONS)
        await kv.close()
        (tmp_path / "kv" / "snapshot-abc").mkdir()
        (tmp_path / "kv" / "snapshot-abc" / "data.mdb").write_bytes(b"x")
        await (await LmdbKv.open(tmp_path / "kv", OPTIONS)).close()
        assert not (tmp_path / "kv" / "snapshot-abc").exists()

    asyncio.run(main())


@pytest.mark.parametrize("spilled_max", [0, 200])
def test_snapshot_that_needs_too_much_space_ends(tmp_path, monkeypatch, spilled_max):
    monkeypatch.setattr(snapshot_module, "SPILLED_MAX", spilled_max)

    async def main():
        kv = await LmdbKv.open(tmp_path / "kv", OPTIONS) if spilled_max else MemoryKv()
        snapshot = kv.snapshot()
        await change_much(kv, random.Random(0), 1000)
        with pytest.raises(Busy, match="begin again"):
            snapshot.step(10)
        assert kv.sequence == 1000
        kv.snapshot().close()
        await kv.close()

    asyncio.run(main())
