"""Speed of the key-value engine beside its floors.

    python bench/kv_layer.py [--dir DIR] [--count N]

A change is like the creation of a small file: four records with 16-byte keys, far apart, and values of 24 to 100 bytes.
Floors of the same run: the journal's own system calls (pwrite of the same bytes, with and without fdatasync), and LMDB
without the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import lmdb

from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.journal_record import encode

SIZES = (24, 40, 100, 60)


def changes(count: int, seed: int) -> list[list[tuple[bytes, bytes]]]:
    chance = random.Random(seed)
    return [[(chance.randbytes(16), bytes(size)) for size in SIZES] for _ in range(count)]


def row(what: str, per_second: float, floor: float | None = None) -> None:
    share = f"{100 * per_second / floor:5.0f} % of its floor" if floor else ""
    print(f"  {what:<58}{per_second:>11,.0f} /s {1e6 / per_second:>8.2f} µs  {share}")


def timed(call, count: int) -> float:
    """Calls per second."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - begin)


def raw_journal(directory: Path, made, sync: bool) -> float:
    descriptor = os.open(directory / "raw", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 64 << 20)
    records = [encode(1, 1, number, dict(effects)) for number, effects in enumerate(made)]
    place = 0
    begin = time.perf_counter()
    for record in records:
        os.pwrite(descriptor, record, place)
        place += len(record)
        if sync:
            os.fdatasync(descriptor)
    rate = len(records) / (time.perf_counter() - begin)
    os.close(descriptor)
    return rate


def raw_lmdb(directory: Path, made, group: int) -> float:
    (directory / f"raw-{group}").mkdir()
    with lmdb.open(str(directory / f"raw-{group}"), map_size=1 << 30) as environment:
        begin = time.perf_counter()
        for at in range(0, len(made), group):
            with environment.begin(write=True) as transaction:
                for effects in made[at : at + group]:
                    for key, value in effects:
                        transaction.put(key, value)
        return len(made) / (time.perf_counter() - begin)


async def apply_all(kv: LmdbKv, made) -> float:
    begin = time.perf_counter()
    for effects in made:
        if kv.full:
            await kv.room()
        kv.apply(effects)
    rate = len(made) / (time.perf_counter() - begin)
    await kv.checkpoint()
    return rate


async def synced_by(kv: LmdbKv, made, tasks: int) -> float:
    waiting = iter(made)

    async def one() -> None:
        for effects in waiting:
            if kv.full:
                await kv.room()
            await kv.sync(kv.apply(effects))

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(tasks)))
    return len(made) / (time.perf_counter() - begin)


async def measure(directory: Path, count: int) -> None:
    made = changes(count, 1)
    few = made[: count // 20]
    print(
        f"creating changes of {len(SIZES)} effects, {len(encode(1, 1, 1, dict(made[0])))} bytes in the journal"
    )
    floor = raw_journal(directory, made, sync=False)
    row("floor: pwrite of the same bytes", floor)
    kv = await LmdbKv.open(directory / "kv", LmdbOptions())
    short = made[:4000]  # less than a layer: no checkpoint runs beside it
    begin = time.perf_counter()
    for effects in short:
        kv.apply(effects)
    row("apply, no checkpoint beside it", len(short) / (time.perf_counter() - begin), floor)
    await kv.checkpoint()
    row("apply, checkpoints in their thread beside it", await apply_all(kv, made[4000:]), floor)
    grouped = raw_lmdb(directory, made, 1000)
    row("floor: LMDB alone, 1,000 changes a synced transaction", grouped)
    floor = raw_journal(directory, few, sync=True)
    row("floor: pwrite + fdatasync, one at a time", floor)
    row("apply + sync, one at a time", await synced_by(kv, changes(len(few), 2), 1), floor)
    row("apply + sync, 16 in parallel", await synced_by(kv, changes(count // 4, 3), 16), floor)
    row("floor: LMDB alone, a synced transaction a change", raw_lmdb(directory, few, 1))
    await kv.checkpoint()
    keys = [effects[0][0] for effects in random.Random(4).sample(made, len(made))]
    with lmdb.open(str(directory / "raw-1000"), map_size=1 << 30, max_spare_txns=1) as environment:
        at = iter(keys)

        def raw_get() -> None:
            transaction = environment.begin()
            transaction.get(next(at))
            transaction.abort()

        floor = timed(raw_get, len(keys))
    print(f"reading {kv.statistics()['entries']:,.0f} records")
    row("floor: LMDB alone, begin + get", floor)
    at = iter(keys)
    row("get from LMDB, CRC checked", timed(lambda: kv.get(next(at)), len(keys)), floor)
    at = iter(keys)
    row("get of what is not there", timed(lambda: kv.get(next(at)[:15] + b"?"), len(keys)), floor)
    for effects in made[:2000]:
        kv.apply(effects)
    newest = made[100][0][0]
    row("get from the layer", timed(lambda: kv.get(newest), count))
    at = iter(keys)
    row(
        "scan of 10, merged with a layer of 8,000",
        timed(lambda: kv.scan(next(at), b"\xff" * 16, 10), count // 4),
    )
    row("scan of 1,000, likewise", timed(lambda: kv.scan(keys[0][:1], b"\xff" * 16, 1000), 50))
    await kv.close()
    begin = time.perf_counter()
    kv = await LmdbKv.open(directory / "kv", LmdbOptions(checkpoint_interval_s=30))
    print(f"  {'open after a clean stop':<58}{(time.perf_counter() - begin) * 1e3:>11.1f} ms")
    for effects in made[:4900]:
        kv.apply(effects)
    await kv.abandon()
    begin = time.perf_counter()
    kv = await LmdbKv.open(directory / "kv", LmdbOptions())
    print(
        f"  {'open after kill -9, replaying 4,900 changes':<58}{(time.perf_counter() - begin) * 1e3:>11.1f} ms"
    )
    await kv.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--dir", default=None, help="where to measure (default: the system's temporary directory)"
    )
    parser.add_argument(
        "--count", type=int, default=40_000, help="changes to make (default 40000, about 8 seconds)"
    )
    chosen = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="nvpool-kv-", dir=chosen.dir))
    try:
        asyncio.run(measure(directory, max(chosen.count, 5000)))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
