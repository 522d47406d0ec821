"""The manager over real processes: dead targets leave their chains, returning ones join again, silent ones stay for a lease."""

import json
import os
import random
import shutil
import signal
import subprocess
import threading

import pytest

from nvpool.cluster.chain_manager import LEASE_S
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command
from nvpool.core.units import MIB
from nvpool.testing.env.pool import RealPool, end_process


@pytest.fixture
def pool(tmp_path):
    with RealPool(tmp_path / "pool", sizes=(64 * MIB,) * 3, replicas=2) as pool:
        pool.make()
        pool.start()
        yield pool


def chains_of(pool, target, table=2):
    return [chain for chain in pool.pool_map.table_by_id[table].chains if target in chain.targets]


def joining(pool, target, table=2):
    return [chain for chain in pool.pool_map.table_by_id[table].chains if target in chain.joining]


@pytest.mark.smoke
def test_killed_target_leaves_its_chains_and_returns(pool):
    before = pool.pool_map
    held = len(chains_of(pool, 1))
    end_process(pool.pid("target-1"))
    pool.until(lambda: not chains_of(pool, 1), "the target has left its chains")
    assert pool.pool_map.target_by_id[1].state in ("down", "up")
    pool.until(
        lambda: len(joining(pool, 1)) + len(chains_of(pool, 1)) == held,
        "the target joins all its former chains",
    )
    after = pool.pool_map
    assert after.target_by_id[1].state == "up"
    for old, new in zip(before.table_by_id[2].chains, after.table_by_id[2].chains, strict=True):
        assert new.epoch > old.epoch if 1 in old.targets else new == old
    assert after.epoch <= before.epoch + 6, "a few maps, not one a chain"
    wait_until_full(pool)


def wait_until_full(pool, wait_s=60):
    """Wait until every chain has all its replicas."""
    pool.until(
        lambda: all(
            len(chain.targets) == table.id and not (chain.joining or chain.goal or chain.leaving)
            for table in pool.pool_map.tables
            for chain in table.chains
        ),
        "all chains are full again",
        wait_s,
    )


def test_stopped_target_keeps_its_chains_for_its_lease(pool):
    pid = pool.pid("target-2")
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = SYSTEM_CLOCK.boottime_s()
        pool.until(lambda: not chains_of(pool, 2), "the target has left its chains")
        assert SYSTEM_CLOCK.boottime_s() - began_s > LEASE_S - 1.0, (
            "the last heartbeat may have been half a second old, no more"
        )
        assert pool.pool_map.target_by_id[2].state == "down"
    finally:
        os.kill(pid, signal.SIGCONT)
    pool.until(
        lambda: (
            pool.pool_map.target_by_id[2].state == "up"
            and len(joining(pool, 2)) + len(chains_of(pool, 2)) > 600
        ),
        "it joins them again",
    )
    wait_until_full(pool)
    assert pool.pid("target-2") == pid, "the same process"


def test_restarted_manager_takes_no_target_for_dead(pool):
    epoch = pool.pool_map.epoch
    end_process(pool.pid("supervisor"))
    pool.wait()
    assert pool.pool_map.epoch == epoch
    assert len(chains_of(pool, 1)) > 600


def test_pool_that_died_restarts_from_the_chain_tails(pool):
    before = pool.pool_map.table_by_id[2].chains
    pool.end_daemons()
    pool.start()
    pool.until(
        lambda: all(
            set(chain.targets) | set(chain.joining) == set(old.targets)
            for old, chain in zip(before, pool.pool_map.table_by_id[2].chains, strict=True)
        ),
        "all targets are in their chains again",
    )
    assert all(
        chain.targets[0] == old.targets[-1] and chain.epoch > old.epoch
        for old, chain in zip(before, pool.pool_map.table_by_id[2].chains, strict=True)
    )
    wait_until_full(pool)


def test_pool_that_was_stopped_keeps_its_chains(pool):
    before = pool.pool_map.table_by_id[2].chains
    pool.connect().write_bytes("/f", b"x" * 100)
    pool.stop()
    pool.start()
    after = pool.pool_map.table_by_id[2].chains
    assert [chain.targets for chain in after] == [chain.targets for chain in before]
    assert all(new.epoch == old.epoch + 1 and not new.joining for old, new in zip(before, after, strict=True))
    assert pool.connect().read_bytes("/f") == b"x" * 100


def nvpool(pool, *words, code=0):
    done = subprocess.run(
        command(Program.CLI, *words[:2], str(pool.path), *map(str, words[2:])),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, (words, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


def fill(pool, count=40, step=7919):
    """Write files of a few chunks; the content by path."""
    client = pool.connect()
    written = {}
    for number in range(count):
        written[f"/f{number}"] = bytes([number % 251]) * (number * step % (3 * MIB) + 1)
        client.write_bytes(f"/f{number}", written[f"/f{number}"])
    return written


def check_files(pool, written):
    client = pool.connect()
    assert [name for name, content in written.items() if client.read_bytes(name) != content] == []
    client.close()
    # old chunks of moved chains stay a minute, for readers with an older map
    assert pool.fsck() == []


def truncate_files(pool, number, stop, errors):
    """Write and truncate files of several chunks, so of several chains, until `stop`."""
    client, chance = pool.connect(), random.Random(number)
    with client.open(f"/cut-{number}", "w+b", buffering=0) as file:
        while not stop.is_set():
            try:
                for _ in range(4):
                    file.seek(chance.randrange(6 * MIB))
                    file.write(bytes(chance.choice((5000, 70_000))))
                file.fsync()
                file.truncate(chance.randrange(6 * MIB))
            except OSError as error:
                errors.append(error)
    client.close()


def test_drains_complete_under_truncations(pool):
    """The chains have different epochs after the first drain; versions that mixed them kept chunks on the drive."""
    stop, errors = threading.Event(), []
    threads = [
        threading.Thread(target=truncate_files, args=(pool, number, stop, errors)) for number in range(3)
    ]
    for thread in threads:
        thread.start()
    try:
        nvpool(pool, "drive", "drain", 1, "--wait")
        nvpool(pool, "drive", "drain", 1, "--cancel", "--wait")
        nvpool(pool, "drive", "drain", 3, "--wait")
        one = next(one for one in pool.status()["drives"] if one["drive"] == 3)
        assert (one["chains"], one["desired_state"], one["used_bytes"]) == (0, "drained", 0)
        nvpool(pool, "drive", "drain", 3, "--cancel", "--wait")
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert errors == []
    assert not [process for process in pool.status()["processes"] if process.get("restarts")], (
        "no store has fenced itself"
    )
    wait_until_full(pool)
    assert pool.fsck() == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_added_drive_fills_and_drained_drive_empties(tmp_path, replicas):
    with RealPool(tmp_path / "pool", sizes=(192 * MIB,) * 2, replicas=replicas) as pool:
        pool.make()
        pool.start()
        written = fill(pool, step=79193)
        client = pool.connect()
        kept = client.open("/kept", "wb", buffering=0)  # not synced before its target is gone
        written["/kept"] = random.Random(replicas).randbytes(9 * MIB)
        kept.write(written["/kept"])
        client.read_bytes("/kept")  # the written bytes are at the stores
        (tmp_path / "new").mkdir()
        added = json.loads(
            nvpool(pool, "drive", "add", tmp_path / "new", "--size", "192M", "--wait", "--json").stdout
        )
        assert [one["chains_to_come"] + one["chains_to_go"] for one in added["drives"]] == [0, 0, 0]
        wait_until_full(pool)
        shares = [one["share"] for one in added["drives"]]
        assert max(shares) - min(shares) < 0.01
        check_files(pool, written)
        used = [one["used_bytes"] for one in pool.status()["drives"]]
        assert used[2] > 0.15 * sum(used)
        assert "first: nvpool drive drain" in nvpool(pool, "drive", "remove", 1, code=1).stderr
        nvpool(pool, "drive", "drain", 1, "--wait")
        one = next(one for one in pool.status()["drives"] if one["drive"] == 1)
        assert (one["chains"], one["desired_state"], one["used_bytes"]) == (0, "drained", 0)
        check_files(pool, written)
        assert "is empty" in nvpool(pool, "drive", "drain", 1).stdout, "again, the same"
        gone = pool.pid("target-1")
        place = next(drive.path for drive in pool.pool_map.drives if drive.id == 1)
        for _ in range(2):
            assert f"stays at {place}" in nvpool(pool, "drive", "remove", 1).stderr
        pool.until(lambda: gone not in pool.processes(), "its process has ended")
        assert [one["drive"] for one in json.loads(nvpool(pool, "drive", "ls", "--json").stdout)] == [2, 3]
        kept.fsync()
        kept.close()
        client.close()
        check_files(pool, written)
        pool.end_daemons()
        pool.start()
        check_files(pool, written)


def test_lost_drive_is_rebuilt_from_the_others(pool):
    written = fill(pool)
    shutil.rmtree(pool.directory.target(2) / "index")
    end_process(pool.pid("target-2"))
    pool.until(lambda: not chains_of(pool, 2), "the target has left its chains")
    done = json.loads(nvpool(pool, "drive", "remove", 2, "--lost", "--wait", "--json").stdout)
    assert done["state"] in ("lost", "removed") and done["chains"]["fewer"] == 0
    assert {t for chain in pool.pool_map.table_by_id[2].chains for t in chain.targets} == {1, 3}
    check_files(pool, written)
    assert "target-2" not in {process.get("name") for process in pool.status()["processes"]}
    assert (
        "only copy" in nvpool(pool, "drive", "remove", 1, "--lost", code=1).stderr
        or "would be left" in nvpool(pool, "drive", "remove", 1, "--lost", code=1).stderr
    )


def test_drive_with_only_copies_is_not_given_up(tmp_path):
    with RealPool(tmp_path / "pool", replicas=1) as pool:
        pool.make()
        pool.start()
        assert "only copy of" in nvpool(pool, "drive", "remove", 1, "--lost", code=1).stderr
        pool.wait()
        assert pool.pool_map.target_by_id[1].desired_state == "share"


def test_drive_is_replaced_by_a_larger_one(pool, tmp_path):
    written = fill(pool)
    (tmp_path / "new").mkdir()
    done = json.loads(
        nvpool(pool, "drive", "replace", 1, tmp_path / "new", "--size", "96M", "--wait", "--json").stdout
    )
    assert (done["replaces"], done["was_there"]) == (1, False)
    wait_until_full(pool)
    assert {t for table in pool.pool_map.tables for chain in table.chains for t in chain.targets} == {2, 3, 4}
    pool.until(lambda: pool.pool_map.target_by_id[1].state == "gone", "the old drive has left the pool")
    again = json.loads(
        nvpool(pool, "drive", "replace", 1, tmp_path / "new", "--size", "96M", "--wait", "--json").stdout
    )
    assert (again["replaces"], again["drive"], again["was_there"]) == (1, done["drive"], True), (
        "a repeated command finds the new drive"
    )
    assert "was removed" in nvpool(pool, "drive", "replace", 1, tmp_path, code=1).stderr
    check_files(pool, written)


def test_impossible_requests_change_nothing(pool):
    before = pool.pool_map
    fill(pool, 3)
    assert "first: nvpool drive drain" in nvpool(pool, "drive", "remove", 1, code=1).stderr
    assert "no drive 9; its drives are" in nvpool(pool, "drive", "drain", 9, code=1).stderr
    nvpool(pool, "pool", "rebalance", "--pause")
    nvpool(pool, "drive", "drain", 3)
    assert "add a drive" in nvpool(pool, "drive", "drain", 2, code=1).stderr, "two replicas, one drive"
    nvpool(pool, "drive", "drain", 3, "--cancel")
    assert "paused" in nvpool(pool, "pool", "rebalance", "--status").stdout
    nvpool(pool, "pool", "rebalance", "--resume", "--limit", "8")
    nvpool(pool, "pool", "rebalance", "--wait")
    after = pool.pool_map
    assert not after.moving.paused and after.moving.limit_bytes_s == 8 * MIB
    assert [t.desired_state for t in after.targets] == ["share"] * 3 and len(after.drives) == len(
        before.drives
    )
    wait_until_full(pool)
