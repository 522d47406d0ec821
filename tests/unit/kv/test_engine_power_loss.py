"""The engine on a drive that loses power: synced changes survive, and of the others a prefix."""

import asyncio
import errno
import os
import random
import re
import subprocess
import sys

import pytest

from nvpool.core.errors import NvpoolError
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.testing.contracts.kv import everything
from nvpool.testing.faults.power_loss import PowerLoss
from nvpool.testing.faults.preload import FAIL, LIE, SHORT, SYNC, WRITE, PreloadFaults

OPTIONS = LmdbOptions(
    journal_bytes=1 << 16,
    map_bytes=1 << 16,
    sync_interval_s=30,
    checkpoint_interval_s=30,
    layer_entries_max=60,
)

PROGRAM = """
import asyncio, sys, time
from nvpool.kv.engine import LmdbKv, LmdbOptions

def report(kind, sequence):
    print(kind, sequence, time.clock_gettime_ns(time.CLOCK_MONOTONIC), flush=True)

async def main():
    kv = await LmdbKv.open("kv", LmdbOptions(journal_bytes=1 << 16, map_bytes=1 << 16, sync_interval_s=30,
                                             checkpoint_interval_s=30, layer_entries_max=60))
    report("opened", kv.sequence)
    for n in range(kv.sequence + 1, kv.sequence + 301):
        if kv.full:
            await kv.room()
        kv.apply([(b"n", b"%d" % n), (b"k%d" % (n % 40), b"%d " % n * (n % 60)), (b"k%d" % (n * 7 % 40 + 40), None),
                  (b"k%d" % (n * 3 % 40 + 60 + n % 2 * 40), b"%d" % n)])
        if n % 11 == 0:
            await kv.sync()
            report("synced", n)
        if n % 50 == 0:
            await kv.checkpoint()
            report("synced", n)
        if n % 7 == 0:
            await asyncio.sleep(0.0005)
    if sys.argv[1] == "close":
        await kv.close()
    report("synced", kv.synced_sequence)

asyncio.run(main())
"""


def state_after(count):
    values = {}
    for n in range(1, count + 1):
        values |= {b"n": b"%d" % n, b"k%d" % (n % 40): b"%d " % n * (n % 60)}
        values.pop(b"k%d" % (n * 7 % 40 + 40), None)
        values[b"k%d" % (n * 3 % 40 + 60 + n % 2 * 40)] = b"%d" % n
    return values


@pytest.fixture
def faults(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    made = PreloadFaults.create(root, tmp_path / "work")
    yield made
    made.close()


def run(faults, how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=faults.root,
        env=os.environ | faults.environment(),
        timeout=240,
        capture_output=True,
        text=True,
    )
    reports = [
        (kind, int(sequence), int(at))
        for kind, sequence, at in re.findall(r"(\w+) (\d+) (\d+)\n", done.stdout)
    ]
    return done, reports


async def check(into, at_least, at_most):
    """The directory opens, contains a prefix of the history, and can be written and opened again."""
    kv = await LmdbKv.open(into / "kv", OPTIONS)
    count = kv.sequence
    assert at_least <= count <= at_most, (at_least, count, at_most)
    assert everything(kv) == state_after(count)
    kv.apply([(b"later", b"1")])
    await kv.abandon()
    kv = await LmdbKv.open(into / "kv", OPTIONS)
    assert everything(kv) == state_after(count) | {b"later": b"1"}
    await kv.close()
    return count


def lose_power(faults, reports, moments, seed):
    loss = PowerLoss(faults.root, faults.base, faults.log)
    first, last = loss.times()
    chance = random.Random(seed)
    counts = set()
    for number in range(moments):
        at = chance.choice(loss.records).time_ns if number % 2 else chance.randint(first, last)
        at_least = max((sequence for _, sequence, reported in reports if reported <= at), default=0)
        loss.rebuild(faults.work / "state", at, chance.randrange(1 << 30))
        counts.add(asyncio.run(check(faults.work / "state", at_least, reports[-1][1])))
    return counts


def test_synced_change_survives_power_loss_at_any_moment(faults):
    done, reports = run(faults, "close")
    assert not done.returncode, done.stderr
    assert reports[-1][1] == 300
    assert len(lose_power(faults, reports, 40, seed=1)) > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_synced_change_survives_power_loss_at_many_moments(faults, seed):
    _, reports = run(faults, "close")
    lose_power(faults, reports, 300, seed)


def test_failed_sync_fences_and_keeps_synced_changes(faults):
    faults.arm(on=SYNC, action=FAIL, error=5, path="journal", skip=12)
    done, reports = run(faults, "stay")
    assert done.returncode and "Fenced" in done.stderr
    assert 50 < reports[-1][1] < 300
    lose_power(faults, [*reports, ("limit", 300, 1 << 63)], 5, seed=2)


@pytest.mark.parametrize(
    "on, path, skip", [(WRITE, "data.mdb", 12), (SYNC, "data.mdb", 6), (WRITE, "journal", 60)]
)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failing_drive_loses_no_synced_change(faults, on, path, skip, code):
    faults.arm(on=on, action=FAIL, error=code, path=path, skip=skip)
    done, reports = run(faults, "stay")
    assert done.returncode and reports, done.stderr
    assert (
        "NoSpace" if code == errno.ENOSPC else "Fenced" if path == "data.mdb" else "DriveFailed"
    ) in done.stderr
    faults.disarm()
    assert asyncio.run(check(faults.root, reports[-1][1], 300)) >= reports[-1][1]
    lose_power(faults, [*reports, ("limit", 300, 1 << 63)], 5, seed=4)


def test_short_write_is_continued(faults):
    faults.arm(on=WRITE, action=SHORT, path="journal", skip=20)
    done, reports = run(faults, "close")
    assert not done.returncode, done.stderr
    lose_power(faults, reports, 10, seed=5)


def test_checker_detects_a_drive_with_lying_syncs(faults):
    faults.arm(on=SYNC, action=LIE)
    _, reports = run(faults, "stay")
    with pytest.raises((AssertionError, NvpoolError)):
        lose_power(faults, reports, 40, seed=3)
