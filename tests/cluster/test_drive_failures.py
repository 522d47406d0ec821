"""Failing drives under a whole pool: errors, short writes and lying syncs on every file that a daemon writes.

Writers get an error, no operation is half done, daemons restart from the content of the drive, and everything works once
the drive does.
"""

import asyncio
import errno
import os
import time
from itertools import count
from typing import NamedTuple

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.sdk.async_filesystem import AsyncFileSystem
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
"""Deadlines of the client that has to see the error, and of one that must not."""
SMALL_BYTES, LARGE_BYTES = 40_000, 75 * 4096
"""Sizes of files with even and odd seeds: through the page cache, and past it."""
WRITE_ERRNOS = {errno.EIO, errno.ENOSPC, errno.ETIMEDOUT, errno.ECONNREFUSED}


class Case(NamedTuple):
    path: str
    on: int
    action: int = FAIL
    error: int = errno.EIO
    sees_errors: bool | None = True
    """Whether writers must see errors (True) or must not (False). None: both are allowed."""


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
    "journals' writes come short": Case("journal", WRITE, SHORT, sees_errors=False),
}
LONG = {
    "data's writes come short": Case(DATA, WRITE, SHORT, sees_errors=False),
    "data cannot be read": Case(DATA, READ, sees_errors=None),
    "index journal refuses writes": Case(INDEX + "journal", WRITE),
    "index journal is full": Case(INDEX + "journal", WRITE, error=errno.ENOSPC),
    "index is full": Case(INDEX + "data.mdb", WRITE | ALLOCATE, error=errno.ENOSPC, sees_errors=None),
    "shard's journal refuses to sync": Case(SHARD + "journal", SYNC),
    "shard's journal is full": Case(SHARD + "journal", WRITE, error=errno.ENOSPC),
    "the map's journal refuses to sync": Case("map/journal", SYNC, sees_errors=False),
    "the map refuses a checkpoint": Case("map/data.mdb", WRITE | SYNC, sees_errors=False),
    "everything refuses": Case("", WRITE | SYNC | ALLOCATE),
}


def writes_of(pool):
    """How stores make large writes, by their status; empty on a file system without direct I/O."""
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


def write_errno(pool, path, seed):
    """The errno of writing and syncing a file, 0 if all succeeded. It ends within its deadline in any case."""
    begun = time.monotonic()
    try:
        write(pool, path, seed)
        return 0
    except OSError as error:
        return error.errno
    finally:
        took = time.monotonic() - begun
        assert took < PATIENT_S * 3, f"{took:.1f} s with a deadline of {DEADLINE_S} s"


def restart(pool, faults):
    """Start a pool of which no process is left, as systemd or the operator does."""
    if not pool.processes():
        pool.launch(faults.environment(record=False))


def write_under_fault(pool, faults, case, name, turns=8):
    """Write under the fault until writers saw errors or the turns are over; then remove the fault and check everything."""
    client, hasty = (
        pool.connect(PATIENT_S),
        pool.connect(PATIENT_S if case.sees_errors is False else DEADLINE_S),
    )
    top = "/" + name.replace(" ", "-").replace("'", "")
    client.mkdir(top)
    held = {f"{top}/before{number}": number for number in range(6)}
    for path, seed in held.items():
        write(client, path, seed)
    faults.arm(on=case.on, action=case.action, error=case.error, path=case.path)
    uncertain, errors, begun = {}, [], time.monotonic()
    for number in count():
        if number >= turns and (not case.sees_errors or time.monotonic() - begun > PATIENT_S):
            break
        path = f"{top}/during{number}"
        if problem := write_errno(hasty, path, 100 + number):
            uncertain[path] = (None, 100 + number)
            errors.append(problem)
        else:
            held[path] = 100 + number
        path = f"{top}/before{number % 6}"
        if problem := write_errno(hasty, path, 200 + number):
            uncertain[path] = (held.pop(path, None) if path in held else uncertain[path][0], 200 + number)
            errors.append(problem)
        else:
            uncertain.pop(path, None)
            held[path] = 200 + number
        if len(errors) > 1:
            break
        time.sleep(0.05)
    assert set(errors) <= WRITE_ERRNOS, [errno.errorcode.get(e, e) for e in errors]
    assert case.sees_errors is None or bool(errors) == case.sees_errors, f"writers saw {errors}"
    faults.disarm()
    pool.until(lambda: pool.serving() or restart(pool, faults), "all processes serve")
    for path, seed in held.items():
        assert client.read_bytes(path) == content_of(seed), path
    for path in uncertain:
        if client.exists(path):
            client.read_bytes(path)  # the part that exists can be read
    pool.until(lambda: write_errno(client, f"{top}/after", 300) == 0, "the drive is found to have room again")
    for path in [*held, *uncertain]:
        if client.exists(path):
            client.remove(path)
    assert client.list(top) == ["after"] and client.read_bytes(f"{top}/after") == content_of(300)
    assert pool.fsck() == []
    assert writes_of(pool) <= {"direct"}, "what went wrong did not happen to direct writes"
    client.close()
    hasty.close()


@pytest.mark.parametrize("name", QUICK)
def test_failing_drive_is_reported_and_survived(bad, name):
    write_under_fault(*bad, QUICK[name], name)


@pytest.mark.soak
@pytest.mark.parametrize("name", LONG)
def test_other_failing_files_are_reported_and_survived(bad, name):
    write_under_fault(*bad, LONG[name], name)


@pytest.mark.soak
@pytest.mark.parametrize("skip", range(0, 40, 3))
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_single_failure_in_the_middle_is_survived(bad, name, skip):
    pool, faults = bad
    case = (QUICK | LONG)[name]
    armed = faults.arm

    def once(**rule):
        armed(**rule, skip=skip, count=1)

    faults.arm = once
    try:
        write_under_fault(
            pool, faults, case._replace(sees_errors=None, on=case.on | READ), f"{name} {skip}", turns=12
        )
    finally:
        faults.arm = armed


@pytest.mark.smoke
def test_lying_syncs_give_errors_and_never_wrong_bytes(tmp_path):
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
        # after a checkpoint the index no longer has the old block locations
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
    """Number of files that give an error; fsck names each of them."""
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
