"""The pool map on its way from the embedded coordinator to etcd, with deaths on that way. A real etcd, with certificates."""

import asyncio
import os
import shutil
import signal

import pytest

from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import load
from nvpool.core.errors import Refused, StaleEpoch, StaleIdentity, Unavailable
from nvpool.core.programs import Program, command_line, program_of
from nvpool.node.coordination import map_backend
from nvpool.node.coordination.map_backend import MapBackend
from nvpool.poolmap.model import EtcdMember, changed, decode_map, encode_map
from nvpool.provision.map_location import read_map_location
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env.pool import TCP, RealPool, end_process

pytestmark = pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or "")


class Died(BaseException):
    """Simulated kill: nothing after this point reaches files or etcd."""


@pytest.fixture
def made(tmp_path):
    with RealPool(tmp_path / "pool", sizes=(64 << 20,), config=TCP) as pool:
        pool.make()
        yield pool
        _end_etcd(pool)


def _etcd_pids(pool) -> list[int]:
    return [int(entry) for entry in filter(str.isdigit, os.listdir("/proc")) if _is_etcd_of(pool, entry)]


def _is_etcd_of(pool, entry: str) -> bool:
    words = command_line(int(entry))
    begins = program_of(words) is Program.ETCD and str(pool.path) in words
    return begins or str(pool.path / "etcd") in words


def _end_etcd(pool) -> None:
    for pid in _etcd_pids(pool):
        end_process(pid, signal.SIGKILL)


async def _opened(pool) -> MapBackend:
    return await MapBackend.open(pool.directory, load(pool.directory.node_toml), lambda reason: None)


async def _rename(keeper: MapBackend, name: str) -> None:
    """Change the map, as soon as that is possible."""
    until_s = SYSTEM_CLOCK.boottime_s() + 60
    while True:
        try:
            await keeper.relay.replace(changed(keeper.relay.pool_map, name=name))
            return
        except (Unavailable, StaleEpoch):
            assert SYSTEM_CLOCK.boottime_s() < until_s
            await asyncio.sleep(0.05)


@pytest.mark.smoke
def test_map_moves_to_etcd_under_the_next_epoch(made):
    async def main():
        keeper = await _opened(made)
        await _rename(keeper, "before")
        epoch = keeper.relay.pool_map.epoch
        watching = asyncio.ensure_future(keeper.relay.watch(epoch, 30))
        await keeper.move()
        found = await watching
        assert (found.epoch, found.name) == (epoch + 1, "before") and found.etcd[0].node == 1
        await keeper.move()
        assert keeper.relay.pool_map == found
        await _rename(keeper, "after")
        assert decode_map(made.directory.poolmap.read_bytes()).name == "after"
        await keeper.close(10.0, asyncio.Event(), stop=True)
        assert not _etcd_pids(made)

        again = await _opened(made)
        await _rename(again, "later")
        assert again.relay.pool_map.epoch == epoch + 3
        await again.close(10.0, asyncio.Event(), stop=False)
        left = _etcd_pids(made)
        assert len(left) == 1

        adopting = await _opened(made)
        await _rename(adopting, "adopted")
        assert _etcd_pids(made) == left
        await adopting.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(main())


STEPS = ["own", "moving", "found", "etcd"]


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_death_at_each_step_leaves_one_map(made, monkeypatch, step, written):
    put, found = map_backend.write_map_location, EtcdCoordinator.found

    def dying_put(directory, what):
        here = step == (what.kind if what.kind != "embedded" else "own")
        if here and not written:
            raise Died
        put(directory, what)
        if here:
            raise Died

    async def dying_found(*arguments, **more):
        if step == "found" and not written:
            raise Died
        coordinator = await found(*arguments, **more)
        if step == "found":
            await coordinator.close()
            raise Died
        return coordinator

    async def die():
        keeper = await _opened(made)
        await _rename(keeper, "before")
        monkeypatch.setattr(map_backend, "write_map_location", dying_put)
        monkeypatch.setattr(EtcdCoordinator, "found", dying_found)
        try:
            await keeper.move()
            raise AssertionError("nobody died")
        except Died:
            pass
        monkeypatch.undo()
        epoch = keeper.relay.pool_map.epoch
        if read_map_location(made.directory).kind == "embedded" and step != "moving":
            await _rename(keeper, "still embedded")
            epoch += 1
        name = keeper.relay.pool_map.name
        keeper.stopping.set()
        await keeper.relay.close()  # this process does not really end, so its records are closed here
        return epoch, name

    epoch, name = asyncio.run(die())
    _end_etcd(made)

    async def continue_after_death():
        keeper = await _opened(made)
        assert keeper.relay.pool_map.epoch >= epoch and keeper.relay.pool_map.name == name
        await keeper.move()
        new = keeper.relay.pool_map
        assert (new.epoch, new.name) == (epoch + 1, name)
        await _rename(keeper, "after")
        await keeper.close(10.0, asyncio.Event(), stop=True)
        return new

    new = asyncio.run(continue_after_death())
    assert new.etcd and read_map_location(made.directory).kind == "etcd"


def test_map_copy_is_served_without_etcd(made):
    async def main():
        keeper = await _opened(made)
        await keeper.move()
        pool_map = keeper.relay.pool_map
        await keeper.close(10.0, asyncio.Event(), stop=True)
        os.rename(made.path / "etcd", made.path / "away")
        (made.path / "etcd").write_bytes(b"not a directory: etcd cannot start")
        keeper = await _opened(made)
        assert keeper.relay.pool_map == pool_map
        with pytest.raises(Unavailable, match="what has a single copy is served"):
            await keeper.relay.replace(changed(pool_map, name="x"))
        os.unlink(made.path / "etcd")
        os.rename(made.path / "away", made.path / "etcd")
        await _rename(keeper, "etcd is back")
        await keeper.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(main())


async def _returned_with(made, change) -> tuple[MapBackend, int]:
    """A node that kept the map in etcd, and now knows a later map than its etcd; the epoch of that map."""
    keeper = await _opened(made)
    await keeper.move()
    pool_map = keeper.relay.pool_map
    await keeper.close(10.0, asyncio.Event(), stop=True)
    later = change(pool_map)
    made.directory.publish(encode_map(later))
    return await _opened(made), later.epoch


def test_removed_member_is_not_started(made):
    """The others continue without it; if restarted, it would begin a second history of the pool."""

    async def main():
        keeper, epoch = await _returned_with(
            made,
            lambda pool_map: changed(
                pool_map, etcd=(EtcdMember(2, "127.0.0.1:9", "127.0.0.1:10"),), name="elsewhere"
            ),
        )
        for _ in range(2):
            with pytest.raises(Unavailable, match="etcd member was removed"):
                await keeper.before_start()
        assert not _etcd_pids(made) and keeper.relay.pool_map.epoch == epoch
        await keeper.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(main())


def test_etcd_with_an_older_map_is_not_followed(made, caplog):
    async def main():
        keeper, epoch = await _returned_with(made, lambda pool_map: changed(pool_map, name="later"))
        until_s = SYSTEM_CLOCK.boottime_s() + 60
        while "an older map" not in caplog.text:
            assert SYSTEM_CLOCK.boottime_s() < until_s
            await asyncio.sleep(0.05)
        assert keeper.relay.pool_map.epoch == epoch and keeper.relay.pool_map.name == "later"
        await keeper.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(main())


def _lose_etcd(pool) -> None:
    _end_etcd(pool)
    shutil.rmtree(pool.path / "etcd")


def test_member_without_data_is_recovered_from_the_map_copy(made):
    async def main():
        keeper = await _opened(made)
        with pytest.raises(Refused, match="no etcd member"):
            await keeper.recover()
        await keeper.move()
        await _rename(keeper, "kept")
        with pytest.raises(Refused, match="nothing to recover"):
            await keeper.recover()
        pool_map = keeper.relay.pool_map
        await keeper.close(10.0, asyncio.Event(), stop=True)
        _lose_etcd(made)
        keeper = await _opened(made)
        assert keeper.own_data_is_lost and not _etcd_pids(made)
        new = await keeper.recover()
        assert new.name == "kept" and new.epoch > pool_map.epoch + 1000 and new.etcd == pool_map.etcd
        await _rename(keeper, "after")
        await keeper.close(10.0, asyncio.Event(), stop=True)
        keeper = await _opened(made)
        await _rename(keeper, "later")
        await keeper.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(main())


def test_removed_node_begins_no_second_history(made, monkeypatch):
    async def main():
        keeper = await _opened(made)
        await keeper.move()
        pool_map = keeper.relay.pool_map
        await keeper.close(10.0, asyncio.Event(), stop=True)
        _lose_etcd(made)
        keeper = await _opened(made)

        async def others_report_a_removal(*_):
            raise StaleIdentity("is not in the pool (any more)")

        async def others_have_another_member(*_):
            return changed(
                pool_map, etcd=(EtcdMember(7, "10.0.0.7:1", "10.0.0.7:2", generation=pool_map.epoch),)
            )

        for elsewhere, message in (
            (others_report_a_removal, "this node was removed from the pool"),
            (others_have_another_member, "removed while the node was away; these nodes have members: 7"),
        ):
            monkeypatch.setattr(map_backend, "newest_elsewhere", elsewhere)
            with pytest.raises(Refused, match=message):
                await keeper.recover()
            assert not _etcd_pids(made) and not read_map_location(made.directory).own.alone
        await keeper.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(main())


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["begun", "done"])
def test_recovery_continues_after_a_death_at_each_step(made, monkeypatch, step, written):
    put = map_backend.write_map_location

    def dying(directory, what):
        here = (step == "begun") == what.own.alone
        if here and not written:
            raise Died
        put(directory, what)
        if here:
            raise Died

    async def die():
        keeper = await _opened(made)
        await keeper.move()
        await _rename(keeper, "kept")
        await keeper.close(10.0, asyncio.Event(), stop=True)
        _lose_etcd(made)
        keeper = await _opened(made)
        monkeypatch.setattr(map_backend, "write_map_location", dying)
        with pytest.raises(Died):
            await keeper.recover()
        monkeypatch.undo()
        keeper.stopping.set()
        await keeper.relay.close()

    asyncio.run(die())
    _end_etcd(made)

    async def continue_after_death():
        keeper = await _opened(made)
        if step == "begun" and not written:
            await keeper.recover()
        await _rename(keeper, "after")
        assert keeper.relay.pool_map.etcd and not read_map_location(made.directory).own.alone
        await keeper.close(10.0, asyncio.Event(), stop=True)

    asyncio.run(continue_after_death())
