"""The LMDB engine beyond its contract tests: crashes between two steps, full drives, damage, two owners."""

import asyncio
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import lmdb
import pytest

from nvpool.core.errors import (
    Busy,
    CorruptRecord,
    DriveFailed,
    Fenced,
    InUse,
    InvalidRequest,
    NoSpace,
    TooBig,
    TooManyOpen,
    WrongFormat,
)
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.options import EngineRuntime
from nvpool.testing.contracts.kv import everything

QUIET = {"sync_interval_s": 30.0, "checkpoint_interval_s": 30.0}
SMALL = LmdbOptions(journal_bytes=1 << 16, map_bytes=1 << 16, **QUIET)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@asynccontextmanager
async def opened(path, options=SMALL, **hooks):
    kv = await LmdbKv.open(path, options, **hooks)
    try:
        yield kv
    finally:
        await kv.abandon()


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


def copy(path, to):
    """Copy the directory as a successor would find it if the process were killed now."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("lock", "lock.mdb"))


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_crash_between_steps_of_a_checkpoint_loses_nothing(path, tmp_path):
    found = {}

    async def expect(copied, state):
        again = []

        def step(name):  # crash once more, at each step of the checkpoint that ends the replay
            again.append(tmp_path / f"{copied.name}-{name}")
            copy(copied, again[-1])

        async with opened(copied, step=step) as kv:
            assert (everything(kv), kv.sequence) == state, copied.name
            kv.apply([(b"after", b"1")])
        async with opened(copied) as kv:
            assert kv.get(b"after") == b"1" and kv.sequence == state[1] + 1
        for repeated in again:
            async with opened(repeated) as kv:
                assert (everything(kv), kv.sequence) == state, repeated.name
        return {name.name.rsplit("-", 1)[1] for name in again}

    async def main():
        state = [{}, 0]

        def change(kv, changes):
            state[1] = kv.apply(list(changes.items()))
            state[0] = {key: value for key, value in (state[0] | changes).items() if value is not None}

        def step(name):
            if kv is not None:
                if name in ("frozen", "data synced", "stored", "dropped"):  # the steps on the loop's thread
                    change(kv, {b"at " + name.encode(): b"%d" % len(found), b"%d" % len(found): None})
                to = tmp_path / f"died{len(found)} {name}"
                copy(path, to)
                found[to] = (dict(state[0]), state[1])

        kv = None
        async with opened(path, step=step) as kv:  # noqa: F811 - the value that `step` sees before the engine is open
            for round_ in range(3):
                change(kv, {b"%d" % number: b"%d" % round_ * 50 for number in range(40)})
                change(kv, {b"%d" % number: None for number in range(round_, 40, 7)})
                await kv.checkpoint()
        steps = {name.name.split(" ", 1)[1] for name in found}
        assert steps == {"frozen", "data synced", "begun", "put", "committed", "stored", "dropped"}
        for copied, then in found.items():
            assert await expect(copied, then) >= {"frozen", "put", "committed", "dropped"}

    run(main())


def test_torn_last_record_is_dropped(path, tmp_path):
    async def main():
        async with opened(path) as kv:
            kv.apply([(b"kept", b"1")])
            start = kv.journal.offset
            kv.apply([(b"torn", b"2")])
            end = kv.journal.offset
            half = kv.journal.generation & 1
        whole = (path / f"journal-{half}").read_bytes()
        for at in range(start, end):
            for number, damaged in enumerate(
                (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            ):
                copied = tmp_path / f"{at}-{number}"
                copy(path, copied)
                (copied / f"journal-{half}").write_bytes(damaged)
                async with opened(copied) as kv:
                    assert everything(kv) == {b"kept": b"1"} and kv.sequence == 1
                    assert kv.apply([(b"torn", b"3")]) == 2
                async with opened(copied) as kv:
                    assert everything(kv) == {b"kept": b"1", b"torn": b"3"}
                shutil.rmtree(copied)

    run(main())


def punch(file, first, end):
    with file.open("r+b") as opened_file:
        opened_file.seek(first)
        opened_file.write(bytes(end - first))


@pytest.mark.parametrize("hole", range(5))
def test_records_behind_a_lost_record_never_return(path, hole):
    async def main():
        async with opened(path) as kv:
            half, ends = kv.journal.generation & 1, [0]
            for number in range(5):
                kv.apply([(b"%d" % number, b"old")])
                ends.append(kv.journal.offset)
        punch(path / f"journal-{half}", ends[hole], ends[hole + 1])  # its page was lost with the power
        expected = {b"%d" % number: b"old" for number in range(hole)}
        for number in range(hole, 5):
            async with opened(path) as kv:
                assert everything(kv) == expected and kv.sequence == number
                kv.apply([(b"%d" % number, b"new")])
                expected[b"%d" % number] = b"new"
        async with opened(path) as kv:
            assert everything(kv) == expected

    run(main())


@pytest.mark.parametrize("hole", range(3))
def test_records_behind_a_gap_never_return_in_two_generations(path, tmp_path, hole):
    ends, copied = [0], tmp_path / "copied"

    def step(name):
        if name == "frozen" and kv is not None:
            for number in range(1, 4):
                kv.apply([(b"%d" % number, b"old")])
                ends.append(kv.journal.offset)
        if name == "begun" and len(ends) > 1:
            copy(path, copied)  # crashed between a freeze and its commit

    async def main():
        nonlocal kv
        async with opened(path, step=step) as kv:
            kv.apply([(b"0", b"old")])
            await kv.checkpoint()
            half = kv.journal.generation & 1
        punch(copied / f"journal-{half}", ends[hole], ends[hole + 1])
        expected = {b"%d" % number: b"old" for number in range(hole + 1)}
        for number in range(hole + 1, 4):
            async with opened(copied) as kv:
                assert everything(kv) == expected
                kv.apply([(b"%d" % number, b"new")])
                expected[b"%d" % number] = b"new"
        async with opened(copied) as kv:
            assert everything(kv) == expected

    kv = None
    run(main())


WRITER = """
import asyncio, os, sys
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.options import EngineRuntime

async def main():
    kv = await LmdbKv.open(sys.argv[1], LmdbOptions(journal_bytes=1 << 18, map_bytes=1 << 16, layer_entries_max=100,
                                                    sync_interval_s=0.01, checkpoint_interval_s=0.02))
    while True:
        if kv.full:
            await kv.room()
        n = kv.sequence + 1
        kv.apply([(b"n", b"%d" % n), (b"k%d" % (n % 97), b"%d" % n), (b"k%d" % (n % 89 + 97), None), (b"x%d" % n, b"")])
        os.write(1, b".")
        if n % 50 == 0:
            await (kv.sync() if n % 100 else asyncio.sleep(0))

asyncio.run(main())
"""


def state_after(count):
    """State after the writer's first `count` changes."""
    values = {b"x%d" % n: b"" for n in range(1, count + 1)}
    for n in range(max(1, count - 500), count + 1):  # the other keys return within 97 changes
        values |= {b"n": b"%d" % n, b"k%d" % (n % 97): b"%d" % n}
        values.pop(b"k%d" % (n % 89 + 97), None)
    return values


def kill_writers(path, kills, seed=0):
    acknowledged = 0
    for number in range(kills):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        wanted = (number * 7919 + seed) % 1500 + 1
        while wanted > 0 and (piece := os.read(writer.stdout.fileno(), min(wanted, 4096))):
            acknowledged, wanted = acknowledged + len(piece), wanted - len(piece)
        assert wanted == 0, "the writer ended on its own"
        writer.kill()
        acknowledged += len(writer.stdout.read())
        writer.stdout.close()
        writer.wait()

        acknowledged = run(check_killed(path, acknowledged))


async def check_killed(path, acknowledged):
    async with opened(path) as kv:
        assert kv.sequence >= acknowledged
        assert everything(kv) == state_after(kv.sequence)
        return kv.sequence


def test_killed_writer_loses_no_acknowledged_change(path):
    kill_writers(path, 5)


@pytest.mark.soak
def test_hundreds_of_kills_lose_no_acknowledged_change(path):
    kill_writers(path, 300, seed=4711)


def test_background_task_syncs_and_checkpoints(path):
    async def main():
        done = asyncio.Event()
        steps = []

        def step(name):
            steps.append(name)
            if name == "dropped" and steps.count(name) == 2:
                done.set()

        options = LmdbOptions(journal_bytes=1 << 16, sync_interval_s=0.005, checkpoint_interval_s=0.02)
        async with opened(path, options, step=step) as kv:
            kv.apply([(b"a", b"1")])
            await done.wait()
            assert kv.synced_sequence == 1 and kv.statistics()["stored_sequence"] == 1
            while not kv.statistics()["syncs"]:
                kv.apply([(b"a", b"2")])
                await asyncio.sleep(0)

    run(main())


def test_checkpoint_covers_changes_made_during_another(path):
    async def main():
        frozen = asyncio.Event()
        async with opened(path, step=lambda name: name == "data synced" and frozen.set()) as kv:
            kv.apply([(b"a", b"1")])
            frozen.clear()
            first = asyncio.create_task(kv.checkpoint())
            await frozen.wait()
            kv.apply([(b"b", b"1")])
            await kv.checkpoint()
            assert first.done() and kv.statistics()["layer_entries"] == kv.statistics()["frozen_entries"] == 0
            assert kv.statistics()["entries"] == 2 and kv.synced_sequence == 2

    run(main())


# -- replay -----------------------------------------------------------------------------------------------------------


def test_replay_filters_effects_by_the_callback(path):
    async def main():
        async with opened(path) as kv:
            kv.apply([(b"stored", b"0"), (b"a", b"old")])
            await kv.checkpoint()
            kv.apply([(b"a", b"new"), (b"b", b"1")])
            kv.apply([(b"c", b"2")])
            kv.apply([(b"d", b"3")])
        asked = []

        def on_replay(changes, stored):
            assert stored(b"stored") == b"0" and stored(b"b") is None
            asked.extend(dict(effects) for effects in changes)
            return [[effect for effect in effects if effect[0] not in (b"a", b"c")] for effects in changes]

        async with opened(path, on_replay=on_replay) as kv:
            assert asked == [{b"a": b"new", b"b": b"1"}, {b"c": b"2"}, {b"d": b"3"}]
            assert (
                everything(kv) == {b"stored": b"0", b"a": b"old", b"b": b"1", b"d": b"3"} and kv.sequence == 4
            )
        asked.clear()
        async with opened(path, on_replay=on_replay) as kv:
            assert asked == [] and kv.get(b"a") == b"old"

    run(main())


def test_data_is_synced_before_the_memtable_is_stored(path):
    order = []

    async def before_checkpoint():
        order.append("data")
        await asyncio.sleep(0)

    async def main():
        async with opened(path, before_checkpoint=before_checkpoint, step=order.append) as kv:
            assert "data" not in order  # nothing was replayed, so no record names data
            order.clear()
            kv.apply([(b"a", b"1")])
            await kv.checkpoint()
            kv.apply([(b"a", b"2")])
        assert order == ["frozen", "data", "data synced", "begun", "put", "committed", "stored", "dropped"]
        order.clear()
        async with opened(path, before_checkpoint=before_checkpoint, step=order.append):
            assert order[:3] == ["frozen", "data", "data synced"]

    run(main())


# -- fences -----------------------------------------------------------------------------------------------------------


def test_failed_data_sync_fences_the_engine(path):
    fenced = []

    async def before_checkpoint():
        raise DriveFailed("asked for by the test")

    async def main():
        async with opened(path, before_checkpoint=before_checkpoint, on_fence=fenced.append) as kv:
            kv.apply([(b"a", b"1")])
            with pytest.raises(Fenced):
                await kv.checkpoint()
            with pytest.raises(Fenced):
                kv.apply([(b"b", b"1")])
            assert len(fenced) == 1 and "asked for" in fenced[0] and kv.fenced == fenced[0]
            assert kv.get(b"a") == b"1"
            await kv.close()
        async with opened(path) as kv:
            assert everything(kv) == {b"a": b"1"}

    run(main())


def test_failed_append_fences_unless_the_drive_is_full(path, monkeypatch):
    def failing(code):
        def pwrite(*_):
            raise OSError(code, os.strerror(code))

        return pwrite

    async def main():
        async with opened(path) as kv:
            kv.apply([(b"a", b"1")])
            monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
            with pytest.raises(NoSpace):
                kv.apply([(b"b", b"1")])
            monkeypatch.undo()
            assert kv.apply([(b"c", b"1")]) == 2
            monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
            with pytest.raises(DriveFailed):
                kv.apply([(b"d", b"1")])
            monkeypatch.undo()
            with pytest.raises(Fenced):
                kv.apply([(b"e", b"1")])
            assert everything(kv) == {b"a": b"1", b"c": b"1"}
        async with opened(path) as kv:
            assert everything(kv) == {b"a": b"1", b"c": b"1"} and kv.sequence == 2

    run(main())


# -- full -------------------------------------------------------------------------------------------------------------


def test_full_engine_refuses_additions_and_allows_removals(path):
    async def main():
        async with opened(
            path, LmdbOptions(journal_bytes=1 << 20, map_bytes=1 << 16, map_bytes_max=1 << 20, **QUIET)
        ) as kv:
            added = 0
            with pytest.raises(NoSpace):
                while True:
                    kv.apply([(b"%06d" % added, b"v" * 500)])
                    added += 1
                    if added % 50 == 0:
                        await kv.checkpoint()
            assert 300 < added < 2200
            await kv.checkpoint()
            with pytest.raises(NoSpace):
                for _ in range(100):
                    kv.apply([(os.urandom(8), b"v" * 5000)])
            for number in range(added):
                kv.apply([(b"%06d" % number, None), (b"note", b"%d" % number)], reclaims=True)
            await kv.checkpoint()
            assert everything(kv) == {b"note": b"%d" % (added - 1)} or kv.statistics()["entries"] < 110
            for number in range(added // 2):
                kv.apply([(b"%06d" % number, b"v" * 500)])
            await kv.checkpoint()
            assert kv.statistics()["used_bytes"] <= 1 << 20

    run(main())


def test_too_small_map_grows_without_losing_a_change(path, monkeypatch):
    monkeypatch.setattr("nvpool.kv.lmdb_env.LmdbTree.prepare", lambda self, change_bytes: None)

    async def main():
        async with opened(path, LmdbOptions(journal_bytes=1 << 22, map_bytes=1 << 16, **QUIET)) as kv:
            for round_ in range(4):
                kv.apply([(b"%d %d" % (round_, number), b"v" * 1000) for number in range(100)])
                await kv.checkpoint()
            assert len(everything(kv)) == 400 and kv.statistics()["map_bytes"] >= 1 << 19
        async with opened(path) as kv:
            assert len(everything(kv)) == 400

    run(main())


def test_full_drive_refuses_additions_and_recovers(path):
    async def main():
        async with opened(path, LmdbOptions(journal_bytes=1 << 20, map_bytes=1 << 24, **QUIET)) as kv:
            kv.apply([(b"first", b"1")])
            await kv.checkpoint()
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (1 << 20, hard)
            )  # the kernel's EFBIG stands in for ENOSPC
            try:
                taken = 0
                with pytest.raises(NoSpace):
                    while True:
                        kv.apply([(b"%06d %d" % (taken, number), b"v" * 500) for number in range(100)])
                        taken += 1
                        await kv.checkpoint()
                assert taken and kv.statistics()["drive_full"]
                with pytest.raises(NoSpace):
                    kv.apply([(b"more", b"1")])
                sequence = kv.apply([(b"first", None)], reclaims=True)
                await kv.sync(sequence)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert len(everything(kv)) >= 100 * (taken - 1) and kv.get(b"first") is None
            expected = everything(kv)
            await kv.checkpoint()
            assert everything(kv) == expected and not kv.statistics()["drive_full"]
            kv.apply([(b"more", b"1")])
        async with opened(path) as kv:
            assert everything(kv) == expected | {b"more": b"1"}

    run(main())


def test_full_drive_is_detected_as_free_again(path):
    async def main():
        async with opened(
            path, LmdbOptions(journal_bytes=1 << 20, map_bytes=1 << 24, checkpoint_interval_s=0.01)
        ) as kv:
            kv.apply([(b"first", bytes(1 << 16))])
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            try:
                await kv.checkpoint()
                with pytest.raises(NoSpace):
                    kv.apply([(b"more", b"1")])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            for _ in range(500):
                await asyncio.sleep(0.01)
                try:
                    kv.apply([(b"more", b"1")])
                    return
                except NoSpace:
                    continue
            raise AssertionError("refused for ever")

    run(main())


def test_full_memtable_delays_changes(path):
    async def main():
        options = LmdbOptions(journal_bytes=1 << 16, map_bytes=1 << 16, layer_entries_max=10, **QUIET)
        async with opened(path, options) as kv:
            with pytest.raises(Busy):
                for number in range(1000):
                    kv.apply([(b"%d" % number, b"v")])
            assert kv.full and 20 <= kv.sequence <= 40
            for number in range(kv.sequence, 300):
                if kv.full:
                    await kv.room()
                kv.apply([(b"%d" % number, b"v")])
            with pytest.raises(TooBig):
                kv.apply([(b"big", bytes(1 << 14))])
            count = 0
            for number in range(100):
                if kv.full:
                    await kv.room()
                    count += 1
                kv.apply([(b"%d" % number, b"v" * 6000)])
            assert count > 5
        async with opened(path, options) as kv:
            assert len(everything(kv)) == 300 and kv.get(b"99") == b"v" * 6000

    run(main())


def test_memtable_filled_at_the_end_of_a_checkpoint_is_stored(path):
    async def main():
        done = asyncio.Event()
        dropped = []

        def step(name):
            if name == "dropped" and kv is not None:
                dropped.append(name)
                if len(dropped) == 1:
                    kv.apply([(b"%d" % number, b"v") for number in range(20)])
                else:
                    done.set()

        kv = None
        async with opened(
            path, LmdbOptions(journal_bytes=1 << 16, layer_entries_max=10, **QUIET), step=step
        ) as opened_kv:
            kv = opened_kv
            kv.apply([(b"a", b"1")])
            await kv.checkpoint()
            await done.wait()
            assert kv.statistics()["stored_sequence"] == 2

    run(main())


def test_reads_during_checkpoints_and_map_growth_are_current(path):
    async def main():
        options = LmdbOptions(journal_bytes=1 << 20, map_bytes=1 << 16, layer_entries_max=200, **QUIET)
        async with opened(path, options) as kv:
            for number in range(3000):
                if kv.full:
                    await kv.room()
                kv.apply([(b"%05d" % number, b"%d" % number * 20), (b"newest", b"%d" % number)])
                assert kv.get(b"newest") == b"%d" % number
                assert kv.get(b"%05d" % (number * 7919 % (number + 1))) is not None
                if number % 10 == 0:
                    assert kv.scan_back(b"", b"9", 1)[0][0] == b"%05d" % number
                    await asyncio.sleep(0)
            assert kv.statistics()["map_bytes"] > 1 << 20 and kv.statistics()["checkpoints"] > 10

    run(main())


# -- owners, formats, damage ------------------------------------------------------------------------------------------


def test_second_owner_of_a_directory_is_refused(path):
    async def main():
        async with opened(path):
            with pytest.raises(InUse):
                await LmdbKv.open(path, SMALL)
            command = [sys.executable, "-c", WRITER, str(path)]
            other = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=240
            )
            assert other.returncode and "InUse" in other.stderr
        async with opened(path) as kv:
            kv.apply([(b"a", b"1")])

    run(main())


@pytest.mark.parametrize("iterations", range(4))
@pytest.mark.parametrize("end", ["abandon", "close"])
def test_cancelled_close_releases_the_directory(path, end, iterations):
    """A primary that gives up cancels what its standby does, at any moment; the standby must open its records again."""

    async def main():
        kv = await LmdbKv.open(path, SMALL)
        kv.apply([(b"key", b"value")])
        ending = asyncio.ensure_future(getattr(kv, end)())
        for _ in range(iterations):
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])
        await kv.abandon()
        async with opened(path) as again:
            assert again.get(b"key") == b"value"

    asyncio.run(main())


class SlowRelease(EngineRuntime):
    """Threads that take a moment to end."""

    def thread(self, name):
        class Slow(ThreadPoolExecutor):
            def shutdown(self, *arguments, **options):
                time.sleep(0.02)
                super().shutdown(*arguments, **options)

        return Slow(1, name)


@pytest.mark.parametrize("iterations", range(6))
def test_cancelled_failed_opening_releases_the_directory(path, iterations):
    """A primary's next message finds the directory free, whenever the one before was cancelled."""
    reason = "the changes cannot be replayed"

    def refuse(changes, stored):
        raise InvalidRequest(reason)

    async def main():
        options = LmdbOptions(journal_bytes=1 << 16, map_bytes=1 << 16, floor=SlowRelease(), **QUIET)
        async with opened(path) as kv:
            kv.apply([(b"key", b"value")])
            await kv.sync(1)
        opening = asyncio.ensure_future(LmdbKv.open(path, options, on_replay=refuse))
        for _ in range(iterations):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled() or str(opening.exception()) == reason
        async with opened(path) as again:
            assert again.get(b"key") == b"value"

    run(main())


def free_descriptors(count):
    """The smallest numbers that the next opened files get; other tests may have left gaps."""
    taken = {
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if os.path.exists(f"/proc/self/fd/{number}")
    }
    return [number for number in range(len(taken) + count) if number not in taken][:count]


def test_missing_file_descriptors_lose_nothing(path):
    async def main():
        async with opened(path) as kv:
            kv.apply([(b"a", b"1")])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        refusals = 0
        for limit in free_descriptors(30):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                async with opened(path) as kv:
                    assert everything(kv) == {b"a": b"1"}
                    break
            except TooManyOpen:
                refusals += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert 3 < refusals < 30

    run(main())


def test_directory_of_another_version_or_program_is_refused(path, tmp_path):
    async def refused(error, options=SMALL):
        before = (path / "data.mdb").read_bytes() if (path / "data.mdb").exists() else None
        with pytest.raises(error):
            await LmdbKv.open(path, options)
        assert before is None or (path / "data.mdb").read_bytes() == before

    async def main():
        async with opened(path, LmdbOptions(term=3, journal_bytes=1 << 16)) as kv:
            kv.apply([(b"a", b"1")])
            await kv.close()
        await refused(WrongFormat, LmdbOptions(term=2, journal_bytes=1 << 16))
        (path / "FORMAT").write_text("nvpool kv 2\n")
        await refused(WrongFormat)
        (path / "FORMAT").unlink()
        await refused(WrongFormat)
        (path / "FORMAT").write_text("nvpool kv 1\n")
        whole = (path / "data.mdb").read_bytes()
        (path / "data.mdb").write_bytes(b"no database at all" * 1000)
        await refused(WrongFormat)
        (path / "data.mdb").unlink()
        await refused(CorruptRecord)
        (path / "data.mdb").write_bytes(whole)
        async with opened(path, LmdbOptions(term=3)) as kv:
            assert kv.get(b"a") == b"1"
        with pytest.raises(Exception, match="No such"):
            await LmdbKv.open(tmp_path / "no" / "kv")
        shutil.rmtree(path)
        path.mkdir()
        with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"foreign", b"value")
        await refused(WrongFormat)

    run(main())


def test_interrupted_creation_is_repeated(path, tmp_path):
    async def main():
        copies = []

        def step(name):
            copies.append(tmp_path / name)
            copy(path, copies[-1])

        async with opened(path, step=step):
            pass
        for copied in copies:
            assert not (copied / "FORMAT").exists()
            async with opened(copied) as kv:
                kv.apply([(b"a", b"1")])
            async with opened(copied) as kv:
                assert everything(kv) == {b"a": b"1"}

    run(main())


@pytest.mark.parametrize("what", [b"key-50", b"value-50"])
def test_flipped_bit_in_a_stored_record_is_detected(path, what):
    async def main():
        async with opened(path) as kv:
            kv.apply([(b"key-%d" % number, b"value-%d" % number) for number in range(10, 90)])
            await kv.close()
        raw = bytearray((path / "data.mdb").read_bytes())
        at = raw.rindex(what + (b"" if what[:1] == b"v" else b"value-50"))
        raw[at + len(what) - 1] ^= 0x40
        (path / "data.mdb").write_bytes(raw)
        async with opened(path) as kv:
            assert kv.get(b"key-10") == b"value-10"
            with pytest.raises(CorruptRecord):
                kv.get(b"key-50")
            with pytest.raises(CorruptRecord):
                kv.scan(b"key-10", b"z", 100)
            with pytest.raises(CorruptRecord):
                kv.get_many([b"key-10", b"key-50"])
            assert kv.get_many([b"key-10", b"key-11"]) == [b"value-10", b"value-11"]
            assert len(kv.scan(b"key-10", b"key-48", 100)) == 38, (
                "damage behind the end of the scan is not read"
            )
            kv.apply([(b"key-50" if what[:1] == b"v" else b"other", b"written again")])

    run(main())


def test_invalid_options_are_refused():
    for wrong in (
        {"durability": "never"},
        {"map_bytes": 0},
        {"term": 0},
        {"layer_entries_max": 0},
        {"journal_bytes": 100},
        {"checkpoint_interval_s": -1.0},
        {"map_bytes_max": 5},
    ):
        with pytest.raises(InvalidRequest):
            LmdbOptions(**wrong)
    assert LmdbOptions(durability="always").durability == "always"


def test_stored_records_match_the_golden_file(path):
    golden = Path(__file__).parents[2] / "golden" / "kv-stored-record.hex"
    lines = [line.split("#")[0] for line in golden.read_text().splitlines()]
    key, stored, mark = (bytes.fromhex(line) for line in lines if line.strip())

    async def main():
        async with opened(path, LmdbOptions(term=9, journal_bytes=1 << 16)) as kv:
            kv.apply([(key, b"the value")])
            await kv.checkpoint()
            assert kv.sync_before_answer is False
        with lmdb.open(str(path)) as environment, environment.begin() as transaction:
            assert transaction.get(key) == stored
            assert transaction.get(b"\xff" * 511) == mark

    run(main())


# -- space ---------------------------------------------------------------------------------------------------------------


def test_checkpoint_leaves_no_half_empty_pages(path):
    """Keys like names of new directories, which come in no order within a directory: a checkpoint must not sort them."""

    async def fill():
        chance, kept = random.Random(1), 0
        async with opened(path, LmdbOptions(**QUIET)) as kv:
            for group in chance.sample(range(200), 200):
                for _ in range(300):
                    key = group.to_bytes(8, "big") + chance.randbytes(24)
                    kv.apply([(key, bytes(12))])
                    kept += 8 + 2 + len(key) + 12 + 4  # LMDB's node with its offset in the page, the CRC
                await kv.checkpoint()
            return kept / kv.statistics()["used_bytes"]

    assert run(fill()) > 0.62  # two thirds; half when sorted
