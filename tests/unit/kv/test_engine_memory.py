"""Memory of the engine does not grow with its records: pages of a commit, replay, and changes kept for standbys."""

import asyncio
import os
import random
import subprocess
import sys
import weakref
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from nvpool.core.errors import Busy
from nvpool.kv import lmdb_env
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.lmdb_env import LmdbTree, Mark, keys_within
from nvpool.kv.replication.member_engine import MemberKv
from nvpool.kv.replication_log import Position
from nvpool.testing.contracts.kv import everything

OPTIONS = LmdbOptions(journal_bytes=1 << 22, map_bytes=1 << 20, sync_interval_s=30, checkpoint_interval_s=30)
PAGE = 4096


def no_step(_name):
    pass


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


@asynccontextmanager
async def opened(path, options=OPTIONS):
    kv = await LmdbKv.open(path, options)
    try:
        yield kv
    finally:
        await kv.abandon()


def scattered(count, seed):
    chance = random.Random(seed)
    return {chance.randbytes(20): chance.randbytes(40) for _ in range(count)}


def filled(path, count):
    path.mkdir()
    tree = LmdbTree(path, 1 << 26)
    assert tree.write(scattered(count, 1), Mark(1, 1, 1), no_step)
    tree.measure()
    return tree


def pages_of(tree):
    raw = tree.path.read_bytes()
    return [raw[at : at + PAGE] for at in range(0, len(raw), PAGE)]


@pytest.mark.parametrize(
    "leaves, branches",
    [
        (0, 0),
        (1, 0),
        (2, 1),
        (300, 4),
        (36_000, 470),
        (360_000, 4600),
        (3_600_000, 47_000),
        (10, 1000),
        (1 << 40, 1 << 33),
    ],
)
def test_keys_within_a_number_of_changed_pages(leaves, branches):
    """At least as if each key were on its own page, at most as many as the pages of all levels allow, and monotonic."""
    found = [keys_within(pages, leaves, branches) for pages in (1, 10, 1000, 16_384)]
    assert found == sorted(found)
    for pages, keys in zip((1, 10, 1000, 16_384), found, strict=True):
        assert min(keys, leaves) + keys // 16 <= pages
    assert (
        keys_within(16_384, 3_600_000, 47_000)
        < keys_within(16_384, 36_000, 470)
        < keys_within(16_384, 300, 4)
    )
    assert keys_within(16_384, 3_600_000, 47_000) > 16_384 // 5


@pytest.mark.parametrize("count, pages_max", [(3000, 40), (30_000, 100), (30_000, 400), (30_000, 3000)])
def test_write_changes_at_most_the_allowed_pages(tmp_path, monkeypatch, count, pages_max):
    monkeypatch.setattr(lmdb_env, "WRITE_PAGES_MAX", pages_max)
    tree = filled(tmp_path / "kv", count)
    try:
        old = list(scattered(count, 1))
        random.Random(2).shuffle(old)
        keys = tree.write_keys_max
        assert keys >= pages_max // 4
        changes = dict.fromkeys(old[: keys // 3], b"x" * 40) | dict.fromkeys(old[keys // 3 : keys // 2])
        changes |= dict(list(scattered(keys, 3).items())[: keys - len(changes)])
        assert len(changes) == keys or keys > count
        before = pages_of(tree)
        assert tree.write(changes, Mark(2, 2, 1), no_step)
        after = pages_of(tree)
        changed = sum(page != before[at] if at < len(before) else any(page) for at, page in enumerate(after))
        assert changed <= pages_max + 8  # the head page, the page of the mark, and the list of free pages
    finally:
        tree.close()


def test_memtable_size_is_limited_by_the_pages_it_changes(tmp_path, monkeypatch):
    """No frozen memtable has more keys than a write may change, at any rate of changes, and no change is lost."""
    monkeypatch.setattr(lmdb_env, "WRITE_PAGES_MAX", 300)

    async def main():
        wanted = scattered(20_000, 1)
        async with opened(tmp_path / "kv") as kv:
            assert kv.entries_max == keys_within(300, 0, 0) // 2 < OPTIONS.layer_entries_max
            allowed, layers = kv.tree.write_keys_max, []
            write = kv.tree.write

            def seen(values, mark, step):
                layers.append((len(values), allowed))
                return write(values, mark, step)

            kv.tree.write = seen
            for key, value in wanted.items():
                try:
                    kv.apply([(key, value)])
                except Busy:
                    await kv.room()
                    kv.apply([(key, value)])
                allowed = max(kv.tree.write_keys_max, 1)
            await kv.checkpoint()
            assert len(layers) > 10 and 60 < kv.entries_max < 300
            # A memtable may be frozen by the limit that held before the last write to the tree.
            assert all(
                size <= max(before, now) for (size, now), (_, before) in zip(layers[1:], layers, strict=False)
            )
            assert dict(everything(kv)) == wanted
        async with opened(tmp_path / "kv", replace(OPTIONS, layer_entries_max=20)) as kv:
            assert kv.entries_max == 20

    run(main())


def test_small_tree_is_limited_by_the_option_alone(tmp_path):
    async def main():
        async with opened(tmp_path / "kv") as kv:
            kv.apply(scattered(3000, 1).items())
            await kv.checkpoint()
            assert kv.entries_max == OPTIONS.layer_entries_max

    run(main())


def test_reopened_tree_can_be_written(tmp_path):
    tree = filled(tmp_path / "kv", 3000)
    try:
        tree.double_map()
        map_bytes = tree.map_bytes
        tree.renew()
        tree.measure()
        assert tree.map_bytes == map_bytes and tree.mark() == Mark(1, 1, 1)
        assert dict(tree.read(b"", b"\xff" * 30, 5000)) == scattered(3000, 1)
        assert tree.write({b"a": b"1"}, Mark(2, 1, 1), no_step) and tree.get(b"a") == b"1"
    finally:
        tree.close()


REPLAYING = """
import asyncio, re, sys
from pathlib import Path
from nvpool.kv.engine import LmdbKv, LmdbOptions
own = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
async def main():
    before = own()
    kv = await LmdbKv.open(sys.argv[1], LmdbOptions())
    print(own() - before, kv.statistics()["replayed"], kv.get(b"last"))
    await kv.close()
asyncio.run(main())
"""


def test_replay_releases_its_memory(tmp_path):
    """Records in all of a tree of 8,000 pages: 30 MiB are copied to write them."""

    async def main():
        options = replace(OPTIONS, layer_entries_max=1_000_000, journal_bytes=1 << 25)
        async with opened(tmp_path / "kv", options) as kv:
            old = scattered(250_000, 1)
            for part in range(0, 250_000, 25_000):
                kv.apply(list(old.items())[part : part + 25_000])
                await kv.checkpoint()
            kv.start_checkpoint = lambda: None
            kv.entries_max = 1_000_000
            for number, key in enumerate(random.Random(2).sample(list(old), 20_000)):
                kv.apply([(key, b"new"), (b"last", b"%d" % number)])

    run(main())
    done = subprocess.run(
        [sys.executable, "-c", REPLAYING, os.fspath(tmp_path / "kv")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    grown, replayed, last = done.stdout.split()
    assert (float(replayed), last) == (20_000, "b'19999'")
    assert float(grown) < 20


def test_replayed_changes_are_dropped_without_standbys(tmp_path):
    async def main():
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS)
        for number in range(100):
            kv.apply([(b"%d" % number, b"v")])
        await kv.abandon()
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS)
        try:
            assert kv.history.last == Position(100, 1) and len(kv.history.records(0, 1 << 20)) == 100
            kept = weakref.ref(kv.history)
            kv.remember(False)
            assert kept() is None
        finally:
            await kv.abandon()

    run(main())
