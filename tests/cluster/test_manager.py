"""The manager over real processes: who dies leaves its chains, who returns joins them again, who is silent keeps them for a
lease."""

import os
import signal

import pytest

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.units import MIB
from nvpool.cluster.manager import LEASE_S
from nvpool.testing.real_pool import RealPool, end_process


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


def test_a_target_that_is_killed_leaves_its_chains_at_once_and_joins_them_when_it_is_back(pool):
    before = pool.pool_map
    held = len(chains_of(pool, 1))
    end_process(pool.pid("target-1"))
    pool.until(lambda: not chains_of(pool, 1), "it has left")
    assert pool.pool_map.target_by_id[1].state in ("down", "up")
    pool.until(lambda: len(joining(pool, 1)) + len(chains_of(pool, 1)) == held, "it joins all that it held", 30)
    after = pool.pool_map
    assert after.target_by_id[1].state == "up"
    for old, new in zip(before.table_by_id[2].chains, after.table_by_id[2].chains, strict=True):
        assert new.epoch > old.epoch if 1 in old.targets else new == old
    for old, new in zip(before.table_by_id[1].chains, after.table_by_id[1].chains, strict=True):
        assert new.targets == old.targets and (new.epoch > old.epoch) == (1 in old.targets), "nobody else has these"
    assert after.epoch <= before.epoch + 6, "a few maps, not one a chain"
    full(pool)


def full(pool, wait_s=60):
    """Wait until every chain has all that it shall have."""
    pool.until(lambda: all(len(chain.targets) == table.id and not (chain.joining or chain.goal or chain.leaving)
                           for table in pool.pool_map.tables for chain in table.chains), "all chains are full again", wait_s)


def test_a_target_that_is_stopped_keeps_its_chains_for_its_whole_lease_and_serves_none_of_them_after_it(pool):
    pid = pool.pid("target-2")
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = SYSTEM_CLOCK.boottime_s()
        pool.until(lambda: not chains_of(pool, 2), "it has left")
        assert SYSTEM_CLOCK.boottime_s() - began_s > LEASE_S - 1.0, "a sign of life may have been half a second old, no more"
        assert pool.pool_map.target_by_id[2].state == "down" and len(chains_of(pool, 2, 1)) > 0
    finally:
        os.kill(pid, signal.SIGCONT)
    pool.until(lambda: pool.pool_map.target_by_id[2].state == "up" and len(joining(pool, 2)) + len(chains_of(pool, 2)) > 600,
               "it joins them again")
    full(pool)
    assert pool.pid("target-2") == pid, "the same process"


def test_a_manager_that_begins_takes_no_target_for_dead(pool):
    epoch = pool.pool_map.epoch
    end_process(pool.pid("supervisor"))
    pool.wait()
    assert pool.pool_map.epoch == epoch
    assert len(chains_of(pool, 1)) > 600


def test_of_a_pool_that_died_as_a_whole_the_tails_go_on_and_the_others_join_them(pool):
    before = pool.pool_map.table_by_id[2].chains
    pool.end_daemons()
    pool.start()
    pool.until(lambda: all(set(chain.targets) | set(chain.joining) == set(old.targets) for old, chain in
                           zip(before, pool.pool_map.table_by_id[2].chains, strict=True)), "all are there again")
    assert all(chain.targets[0] == old.targets[-1] and chain.epoch > old.epoch for old, chain in
               zip(before, pool.pool_map.table_by_id[2].chains, strict=True))
    full(pool)


def test_a_pool_that_was_stopped_in_order_goes_on_as_it_was(pool):
    before = pool.pool_map.table_by_id[2].chains
    pool.connect().write_bytes("/f", b"x" * 100)
    pool.stop()
    pool.start()
    after = pool.pool_map.table_by_id[2].chains
    assert [chain.targets for chain in after] == [chain.targets for chain in before]
    assert all(new.epoch == old.epoch + 1 and not new.joining for old, new in zip(before, after, strict=True))
    assert pool.connect().read_bytes("/f") == b"x" * 100
