"""The contract of the embedded coordinator on both engines, and the behaviour that needs a stored engine."""

import asyncio

import pytest

from nvpool.cluster.embedded_coordinator import KEPT_MAPS, EmbeddedCoordinator
from nvpool.core.errors import CorruptRecord, InvalidRequest, NoSpace
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.memory_engine import MemoryKv
from nvpool.poolmap.model import changed, decode_map, encode_map
from nvpool.testing.contracts.coordinator import CHECKS, first_map


@pytest.fixture(params=["memory", "lmdb"])
def make(request, tmp_path):
    places = iter(range(1000))

    async def fresh():
        kv = (
            MemoryKv()
            if request.param == "memory"
            else await LmdbKv.open(tmp_path / str(next(places)), LmdbOptions())
        )
        return await EmbeddedCoordinator.found(kv, first_map())

    return fresh


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_embedded_coordinator_meets_the_contract(check, make):
    async def run():
        coordinator = await make()
        try:
            await check(coordinator)
        finally:
            await coordinator.close()

    asyncio.run(run())


def test_map_survives_a_restart_and_the_copy_is_repaired(tmp_path):
    async def run():
        copies = []
        coordinator = await EmbeddedCoordinator.found(
            await LmdbKv.open(tmp_path / "map", LmdbOptions()), first_map()
        )
        for number in range(3):
            await coordinator.replace(changed(coordinator.pool_map, name=f"n{number}"))
        last = coordinator.pool_map
        await coordinator.close()
        again = await EmbeddedCoordinator.open(
            await LmdbKv.open(tmp_path / "map", LmdbOptions()), copies.append
        )
        assert again.pool_map == last
        assert [decode_map(raw) for raw in copies] == [last]
        await again.close()

    asyncio.run(run())


def test_map_is_durable_before_copy_and_watchers():
    async def run():
        kv, seen = MemoryKv(), []
        coordinator = await EmbeddedCoordinator.found(
            kv,
            first_map(),
            lambda raw: seen.append((decode_map(raw).epoch, kv.synced_sequence == kv.sequence)),
        )
        watch = asyncio.ensure_future(coordinator.watch(1, 10))
        await asyncio.sleep(0)
        await coordinator.replace(changed(coordinator.pool_map, name="next"))
        assert seen == [(1, True), (2, True)]
        assert (await watch).epoch == 2

    asyncio.run(run())


def test_copy_that_cannot_be_written_keeps_the_map():
    async def run():
        def full(raw):
            if decode_map(raw).epoch > 1:
                raise OSError(28, "No space left on device")

        coordinator = await EmbeddedCoordinator.found(MemoryKv(), first_map(), full)
        with pytest.raises(NoSpace):
            await coordinator.replace(changed(coordinator.pool_map, name="next"))
        assert coordinator.pool_map.epoch == 2, "an epoch is never given to two maps"

    asyncio.run(run())


def test_number_of_old_maps_is_bounded():
    async def run():
        kv = MemoryKv()
        coordinator = await EmbeddedCoordinator.found(kv, first_map())
        for number in range(KEPT_MAPS + 10):
            await coordinator.replace(changed(coordinator.pool_map, name=f"n{number}"))
        assert len(kv.scan(b"map/", b"map0", 1000)) == KEPT_MAPS

    asyncio.run(run())


def test_missing_or_broken_map_record_is_refused():
    async def run():
        with pytest.raises(CorruptRecord):
            await EmbeddedCoordinator.open(MemoryKv())
        kv = MemoryKv()
        kv.apply([(b"map", encode_map(first_map())[:-9])])
        with pytest.raises(CorruptRecord):
            await EmbeddedCoordinator.open(kv)
        with pytest.raises(InvalidRequest):
            await EmbeddedCoordinator.found(kv, first_map())

    asyncio.run(run())
