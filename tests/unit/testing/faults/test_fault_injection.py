"""The fault injection itself: synced data always survives, other data in some states only."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from nvpool.testing.faults.power_loss import PowerLoss
from nvpool.testing.faults.preload import FAIL, LIE, SHORT, SYNC, WRITE, PreloadFaults


@pytest.fixture
def faults(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_bytes(b"o" * 9000)
    made = PreloadFaults.create(root, tmp_path / "work")
    yield made
    made.close()


def run(faults, program, **environment):
    command = [sys.executable, "-c", "import os, errno\n" + textwrap.dedent(program)]
    return subprocess.run(
        command,
        cwd=faults.root,
        env=os.environ | faults.environment() | environment,
        timeout=240,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def states(faults, count=40):
    loss = PowerLoss(faults.root, faults.base, faults.log)
    _, last = loss.times()
    for seed in range(count):
        into = faults.work / "state"
        loss.rebuild(into, last, seed)
        yield into


def test_synced_data_is_in_every_state_other_data_in_some(faults):
    run(
        faults,
        """
        f = os.open("new", os.O_RDWR | os.O_CREAT)
        os.pwrite(f, b"a" * 4096, 0); os.fdatasync(f)
        os.pwrite(f, b"b" * 4096, 4096)
        os.pwrite(f, b"c" * 4096, 8192)
    """,
    )
    seen = set()
    for state in states(faults):
        raw = (state / "new").read_bytes()
        assert raw[:4096] == b"a" * 4096
        seen.add((raw[4096:8192][:1], raw[8192:][:1]))
    assert {(b"", b""), (b"b", b"c"), (b"\0", b"c")} <= seen, seen


def test_unsynced_overwrite_leaves_the_old_or_the_new_page(faults):
    run(
        faults,
        """
        f = os.open("old", os.O_RDWR)
        os.pwrite(f, b"n" * 9000, 0)
        os.ftruncate(f, 5000)
    """,
    )
    seen = set()
    for state in states(faults):
        raw = (state / "old").read_bytes()
        assert set(raw[:4096]) in ({ord("o")}, {ord("n")})
        seen.add((raw[0], len(raw)))
    assert len(seen) >= 4, seen


def test_rename_without_a_directory_sync_may_be_lost(faults):
    run(
        faults,
        """
        f = os.open("tmp", os.O_RDWR | os.O_CREAT); os.write(f, b"x"); os.fsync(f)
        os.rename("tmp", "old")
    """,
    )
    assert {(s / "tmp").exists() for s in states(faults)} == {True, False}
    run(faults, 'd = os.open(".", os.O_RDONLY); os.fsync(d)')
    assert all((s / "old").read_bytes() == b"x" for s in states(faults, 10))


def test_write_with_o_dsync_survives(faults):
    run(faults, 'f = os.open("old", os.O_RDWR | os.O_DSYNC); os.pwrite(f, b"d" * 4096, 4096)')
    assert all((s / "old").read_bytes()[4096:8192] == b"d" * 4096 for s in states(faults, 10))


def test_lying_sync_makes_nothing_durable(faults):
    faults.arm(on=SYNC, action=LIE)
    run(faults, 'f = os.open("old", os.O_RDWR); os.pwrite(f, b"n" * 4096, 0); os.fsync(f)')
    assert {(s / "old").read_bytes()[:1] for s in states(faults)} == {b"o", b"n"}


def test_writes_fail_or_are_short_on_the_named_file(faults):
    faults.arm(on=WRITE, action=FAIL, error=errno.ENOSPC, path="bad", skip=1, count=1)
    faults.arm(on=WRITE, action=SHORT, path="short", slot=1)
    out = run(
        faults,
        """
        f = os.open("bad", os.O_RDWR | os.O_CREAT)
        print(os.write(f, b"1234"))
        try: os.write(f, b"1234")
        except OSError as e: print(errno.errorcode[e.errno])
        print(os.write(f, b"1234"))
        print(os.write(os.open("short", os.O_RDWR | os.O_CREAT), b"1234"))
        print(os.write(os.open("good", os.O_RDWR | os.O_CREAT), b"1234"))
    """,
    )
    assert out.split() == ["4", "ENOSPC", "4", "2", "4"]


def test_direct_writes_are_short_or_fail_at_block_borders(faults):
    out = run(
        faults,
        """
        import mmap, sys
        try: f = os.open("big", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError: sys.exit(print("none"))
        m = mmap.mmap(-1, 33 * 4096); m.write(b"d" * len(m))
        print(os.pwritev(f, [m], 0), os.write(f, m)); os.fdatasync(f)
    """,
    )
    if out == "none\n":
        pytest.skip("no direct writes on this file system")
    assert out.split() == ["135168", "135168"]
    assert all((s / "big").read_bytes() == b"d" * 33 * 4096 for s in states(faults, 3))
    faults.arm(on=WRITE, action=SHORT, path="big", count=1)
    faults.arm(on=WRITE, action=FAIL, error=errno.ENOSPC, path="big", slot=1)
    out = run(
        faults,
        """
        import mmap
        f, m = os.open("big", os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, 33 * 4096)
        print(os.pwritev(f, [m], 0))
        try: os.pwritev(f, [memoryview(m)[65536:]], 65536)
        except OSError as e: print(errno.errorcode[e.errno])
    """,
    )
    assert out.split() == ["65536", "ENOSPC"]


def test_lmdb_survives_power_loss_during_commits(faults):
    run(
        faults,
        """
        import lmdb, time
        e = lmdb.open("db", map_size=1 << 20); os.fsync(os.open(".", os.O_RDONLY))
        for i in range(20):
            with e.begin(write=True) as t: t.put(b"k%02d" % i, b"v" * 500)
            print(time.clock_gettime_ns(time.CLOCK_MONOTONIC), i)
    """,
    )
    import lmdb

    loss = PowerLoss(faults.root, faults.base, faults.log)
    writes = [r.time_ns for r in loss.records if r.path.endswith("data.mdb")][6:]
    for seed, at in enumerate(writes[::3]):
        into = faults.work / "state"
        loss.rebuild(into, at, seed)
        with lmdb.open(str(into / "db"), map_size=1 << 20) as environment, environment.begin() as transaction:
            keys = [k for k, _ in transaction.cursor()]
        assert keys == [b"k%02d" % i for i in range(len(keys))]
