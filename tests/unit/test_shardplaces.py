"""The places of shards' members on a node, with a coordinator in memory and no processes."""

import asyncio

import pytest
from msgspec.structs import replace

from nvpool.base.config import Config
from nvpool.base.directory import PoolDirectory
from nvpool.base.errors import NotFound
from nvpool.cluster.embedded import EmbeddedCoordinator
from nvpool.kv.memory import MemoryKv
from nvpool.logic.poolmap import Shard, Standby
from nvpool.run.leading import Leading
from nvpool.run.shardplaces import ShardPlaces
from nvpool.testing.contracts.coordinator import first_map


def test_a_drive_that_is_not_there_keeps_no_other_member_from_its_place(tmp_path):
    drives = [tmp_path / name / "store" for name in ("away", "here")]
    drives[1].mkdir(parents=True)
    shard = Shard(1, 1, ("stream://127.0.0.1:1",), standbys=tuple(
        Standby(number, 1, (), path=str(drive)) for number, drive in enumerate(drives, 1)))
    started = []

    async def nothing(name: str) -> None:
        pass

    async def run() -> None:
        first = first_map()
        local = [replace(one, endpoints=("stream+unix:/here",)) for one in (*first.nodes, *first.targets)]
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), replace(first, nodes=tuple(local[:1]),
                                                                          targets=tuple(local[1:]), shards=(shard,)))
        leading = Leading(coordinator, 1, None, lambda target: None)
        places = ShardPlaces(PoolDirectory(tmp_path), Config(), 1, leading, start=lambda: started.append(leading.pool_map),
                             end=nothing, again=lambda name: None)
        with pytest.raises(NotFound, match="away"):
            await places.run_once()
        (away, here) = leading.pool_map.shards[0].standbys
        assert here.endpoints and not away.endpoints and (tmp_path / "here").joinpath(here.path).is_dir()
        assert [pool_map.epoch for pool_map in started] == [leading.pool_map.epoch]
        await coordinator.close()

    asyncio.run(run())
