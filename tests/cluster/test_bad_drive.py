"""Drives that fail under a whole pool: errors, short writes and lying syncs on every file that a daemon writes. The writer is
told, nothing is half done, daemons begin again from what the drive holds, and everything works once the drive does."""

import asyncio
import errno
import os
import time
from itertools import count
from typing import NamedTuple

import pytest

from nvpool.client.state.types import Caller
from nvpool.sdk.aio import AsyncFileSystem
from nvpool.testing.env.pool import RealPool, opened, problems_of
from nvpool.testing.faults.power_loss import PowerLoss
from nvpool.testing.faults.preload import ALLOCATE, FAIL, LIE, READ, SHORT, SYNC, WRITE, PreloadFaults
from nvpool.testing.loads.crash_history import content

CONFIG = """
[journal]
sync_interval_s = 0.05
checkpoint_interval_s = 0.3
[supervisor]
restart_delay_max_s = 0.3
[store]
reads = "executor"
"""
DEADLINE_S, PATIENT_S = 1.0, 60.0
"""Of the client that is to be told, and of one that must not."""
SMALL_BYTES, LARGE_BYTES = 40_000, 75 * 4096
"""Of the files with even and odd seeds: through the page cache, and past it."""
TOLD = {errno.EIO, errno.ENOSPC, errno.ETIMEDOUT, errno.ECONNREFUSED}


class Case(NamedTuple):
    path: str
    on: int
    action: int = FAIL
    error: int = errno.EIO
    told: bool | None = True
    """Whether writers must notice, or must not; None: both will do."""


DATA, INDEX, SHARD = "targets/1/data", "targets/1/index/", "meta/shard-1/"
QUICK = {
    "data refuses writes": Case(DATA, WRITE),
    "data is full": Case(DATA, WRITE, error=errno.ENOSPC),
    "data refuses to sync": Case(DATA, SYNC),
    "index journal refuses to sync": Case(INDEX + "journal", SYNC),
    "index refuses a checkpoint": Case(INDEX + "data.mdb", WRITE | SYNC),
    "shard's journal refuses writes": Case(SHARD + "journal", WRITE),
    "shard refuses a checkpoint": Case(SHARD + "data.mdb", WRITE | SYNC),
    "shard's drive is full": Case(SHARD, WRITE | ALLOCATE, error=errno.ENOSPC),
    "journals' writes come short": Case("journal", WRITE, SHORT, told=False),
}
LONG = {
    "data's writes come short": Case(DATA, WRITE, SHORT, told=False),
    "data can not be read": Case(DATA, READ, told=None),
    "index journal refuses writes": Case(INDEX + "journal", WRITE),
    "index journal is full": Case(INDEX + "journal", WRITE, error=errno.ENOSPC),
    "index is full": Case(INDEX + "data.mdb", WRITE | ALLOCATE, error=errno.ENOSPC, told=None),
    "shard's journal refuses to sync": Case(SHARD + "journal", SYNC),
    "shard's journal is full": Case(SHARD + "journal", WRITE, error=errno.ENOSPC),
    "the map's journal refuses to sync": Case("map/journal", SYNC, told=False),
    "the map refuses a checkpoint": Case("map/data.mdb", WRITE | SYNC, told=False),
    "everything refuses": Case("", WRITE | SYNC | ALLOCATE),
}


def writes_of(pool):
    """How the targets make large writes; nothing on a file system that has no direct ones."""
    try:
        os.close(os.open(pool.path / "targets/1/data", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return set()
    return {process["writes"] for process in pool.status()["processes"] if process["role"] == "store"}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    top = tmp_path_factory.mktemp("bad")
    with RealPool(top / "pool", config=CONFIG) as pool:
        pool.make()
        faults = PreloadFaults.create(pool.path, top / "work")
        try:
            pool.start(faults.environment(record=False))
            yield pool, faults
        finally:
            faults.close()


def content_of(seed):
    return content(seed, LARGE_BYTES if seed % 2 else SMALL_BYTES)


def write(pool, path, seed):
    with pool.open(path, "wb", buffering=0) as file:
        file.write(content_of(seed))
        file.fsync()


def attempt(pool, path, seed):
    """The errno of writing and syncing a file, 0 when all went well. However it ends, it ends in time."""
    begun = time.monotonic()
    try:
        write(pool, path, seed)
        return 0
    except OSError as error:
        return error.errno
    finally:
        took = time.monotonic() - begun
        assert took < PATIENT_S * 3, f"{took:.1f} s with a deadline of {DEADLINE_S} s"


def start_again(pool, faults):
    """Where every process had to end at once there is none left to start the others: that is systemd's, or the operator's."""
    if not pool.processes():
        pool.launch(faults.environment(record=False))


def suffer(pool, faults, case, name, turns=8):
    """Write under the fault until writers were told or the turns are over; then mend it and look at everything."""
    client, hasty = pool.connect(PATIENT_S), pool.connect(PATIENT_S if case.told is False else DEADLINE_S)
    top = "/" + name.replace(" ", "-").replace("'", "")
    client.mkdir(top)
    held = {f"{top}/before{number}": number for number in range(6)}
    for path, seed in held.items():
        write(client, path, seed)
    faults.arm(on=case.on, action=case.action, error=case.error, path=case.path)
    uncertain, errors, begun = {}, [], time.monotonic()
    for number in count():
        if number >= turns and (not case.told or time.monotonic() - begun > PATIENT_S):
            break
        path = f"{top}/during{number}"
        if problem := attempt(hasty, path, 100 + number):
            uncertain[path] = (None, 100 + number)
            errors.append(problem)
        else:
            held[path] = 100 + number
        path = f"{top}/before{number % 6}"
        if problem := attempt(hasty, path, 200 + number):
            uncertain[path] = (held.pop(path, None) if path in held else uncertain[path][0], 200 + number)
            errors.append(problem)
        else:
            uncertain.pop(path, None)
            held[path] = 200 + number
        if len(errors) > 1:
            break
        time.sleep(0.05)
    assert set(errors) <= TOLD, [errno.errorcode.get(e, e) for e in errors]
    assert case.told is None or bool(errors) == case.told, f"writers were told {errors}"
    faults.disarm()
    pool.until(lambda: pool.serving() or start_again(pool, faults), "all processes serve")
    for path, seed in held.items():
        assert client.read_bytes(path) == content_of(seed), path
    for path in uncertain:
        if client.exists(path):
            client.read_bytes(path)  # whatever of it is there can be read
    pool.until(lambda: attempt(client, f"{top}/after", 300) == 0, "the drive is found to have room again")
    for path in [*held, *uncertain]:
        if client.exists(path):
            client.remove(path)
    assert client.list(top) == ["after"] and client.read_bytes(f"{top}/after") == content_of(300)
    assert pool.fsck() == []
    assert writes_of(pool) <= {"direct"}, "what went wrong did not happen to direct writes"
    client.close()
    hasty.close()


@pytest.mark.parametrize("name", QUICK)
def test_a_failing_drive_is_told_survived_and_gone_on_with(bad, name):
    suffer(*bad, QUICK[name], name)


@pytest.mark.soak
@pytest.mark.parametrize("name", LONG)
def test_a_drive_that_fails_elsewhere_is_told_survived_and_gone_on_with(bad, name):
    suffer(*bad, LONG[name], name)


@pytest.mark.soak
@pytest.mark.parametrize("skip", range(0, 40, 3))
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_a_drive_that_fails_once_in_the_middle_is_survived(bad, name, skip):
    pool, faults = bad
    case = (QUICK | LONG)[name]
    armed = faults.arm

    def once(**rule):
        armed(**rule, skip=skip, count=1)

    faults.arm = once
    try:
        suffer(pool, faults, case._replace(told=None, on=case.on | READ), f"{name} {skip}", turns=12)
    finally:
        faults.arm = armed


@pytest.mark.smoke
def test_a_drive_that_lied_about_its_syncs_gives_errors_and_never_wrong_bytes(tmp_path):
    with RealPool(tmp_path / "pool", config=CONFIG) as pool:
        pool.make()
        faults = PreloadFaults.create(pool.path, tmp_path / "work")
        pool.start(faults.environment())
        client = pool.connect()
        write(client, "/honest", 1)
        faults.arm(on=SYNC, action=LIE, path="targets/1/data")
        faults.arm(on=SYNC, action=LIE, path="targets/2/data", slot=1)
        indexes, begun_ns = (
            [pool.directory.target(target) / "index" / "data.mdb" for target in (1, 2)],
            time.time_ns(),
        )
        for number in range(20):
            write(client, f"/f{number}", number)
        time.sleep(1.0)
        # after a checkpoint the index can not be asked for the old blocks
        pool.until(
            lambda: all(index.stat().st_mtime_ns > begun_ns for index in indexes),
            "a checkpoint of both indexes",
        )
        write(client, "/honest2", 2)
        pool.end()
        faults.close()
    loss = PowerLoss(pool.path, faults.base, faults.log)
    lost = 0
    for seed in range(3):
        loss.rebuild(tmp_path / "state", loss.times()[1], seed)
        lost += asyncio.run(read_after_the_lie(tmp_path / "state"))
    assert lost, "the lie did not show"


async def read_after_the_lie(directory):
    """How many files give an error; each of them is named by fsck."""
    async with opened(directory) as local:
        client = await local.client()
        tree = AsyncFileSystem(client, Caller(0, 0))
        problems = "\n".join(await problems_of(client))
        lost = 0
        for name in await tree.list("/"):
            try:
                found = await tree.read_bytes("/" + name)
            except OSError as error:
                assert error.errno == errno.EIO and f"(file /{name})" in problems
                lost += 1
            else:
                assert name == "honest2" or found == content_of(1 if name == "honest" else int(name[1:])), (
                    name
                )
        return lost
