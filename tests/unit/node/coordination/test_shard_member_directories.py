"""Directories of shard members on a node, with an in-memory coordinator and no processes."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core.config import Config, NetworkConfig
from nvpool.core.errors import Busy, NotFound
from nvpool.host.pool_directory import PoolDirectory
from nvpool.kv.memory_engine import MemoryKv
from nvpool.node.admin.shards import MetaShards
from nvpool.node.coordination import shard_members
from nvpool.node.coordination.leadership import Leading
from nvpool.node.coordination.map_backend import used_ports
from nvpool.node.coordination.shard_members import ShardPlaces
from nvpool.poolmap.model import Drive, Shard, StandbyMember
from nvpool.provision.create import free_ports
from nvpool.testing.contracts.coordinator import first_map


def test_missing_drive_does_not_block_other_members(tmp_path):
    drives = [tmp_path / name / "store" for name in ("away", "here")]
    drives[1].mkdir(parents=True)
    shard = Shard(
        1,
        1,
        ("stream://127.0.0.1:1",),
        standbys=tuple(
            StandbyMember(number, 1, (), path=str(drive)) for number, drive in enumerate(drives, 1)
        ),
    )
    started = []

    async def nothing(name: str) -> None:
        pass

    async def run() -> None:
        first = first_map()
        local = [replace(one, endpoints=("stream+unix:/here",)) for one in (*first.nodes, *first.targets)]
        coordinator = await EmbeddedCoordinator.found(
            MemoryKv(), replace(first, nodes=tuple(local[:1]), targets=tuple(local[1:]), shards=(shard,))
        )
        leading = Leading(coordinator, 1, None, lambda target: None)
        places = ShardPlaces(
            PoolDirectory(tmp_path),
            Config(),
            1,
            leading,
            start=lambda: started.append(leading.pool_map),
            end=nothing,
            again=lambda name: None,
        )
        with pytest.raises(NotFound, match="away"):
            await places.run_once()
        (away, here) = leading.pool_map.shards[0].standbys
        assert here.endpoints and not away.endpoints and (tmp_path / "here").joinpath(here.path).is_dir()
        assert [pool_map.epoch for pool_map in started] == [leading.pool_map.epoch]
        await coordinator.close()

    asyncio.run(run())


def test_removed_standby_directory_is_created_again(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_members, "MADE_AGAIN_S", 0.0)
    store, away = tmp_path / "d1" / "nvpool-pool-target-1", tmp_path / "d2" / "nvpool-pool-target-2"
    store.mkdir(parents=True)
    away.parent.mkdir()

    def at(member, state, drive):
        path = drive.with_name(f"nvpool-pool-meta-1.{member}")
        return StandbyMember(member, 1, (f"stream://127.0.0.1:{10 + member}",), state, str(path))

    standbys = at(1, "syncing", store), at(2, "up", store), at(3, "syncing", away)
    shard = Shard(1, 1, ("stream://127.0.0.1:1",), standbys=standbys)

    async def nothing(name: str) -> None:
        pass

    async def run() -> None:
        first = first_map()
        local = [replace(one, endpoints=("stream+unix:/here",)) for one in (*first.nodes, *first.targets)]
        drives = tuple(Drive(number, 1, str(path), 1 << 30) for number, path in enumerate((store, away), 1))
        targets = tuple(replace(local[1], id=number, drive=number) for number in (1, 2))
        coordinator = await EmbeddedCoordinator.found(
            MemoryKv(),
            replace(
                first, nodes=tuple(local[:1]), drives=drives, targets=targets, shards=(shard,), tables=()
            ),
        )
        places = ShardPlaces(
            PoolDirectory(tmp_path),
            Config(),
            1,
            Leading(coordinator, 1, None, lambda target: None),
            start=lambda: None,
            end=nothing,
            again=lambda name: None,
        )
        await places.run_once()
        await coordinator.close()

    asyncio.run(run())
    made = [Path(one.path).is_dir() for one in standbys]
    assert made == [True, False, False], "not for a member that is up, nor on an unmounted drive"


def test_new_shard_gets_no_port_of_another_process(tmp_path):
    config = Config(network=NetworkConfig(host="127.0.0.1", base_port=23_000))

    class Late(Leading):
        """Another change is applied first."""

        taken: int = 0

        async def change(self, decide):
            if not self.taken:
                self.taken = free_ports(1, config.network, used_ports(self.pool_map))[0]
                await super().change(
                    lambda newest: replace(
                        newest,
                        nodes=tuple(
                            replace(one, endpoints=(f"stream://127.0.0.1:{self.taken}",))
                            for one in newest.nodes
                        ),
                    )
                )
            return await super().change(decide)

    async def run() -> None:
        first = first_map()
        local = [replace(one, endpoints=("stream+unix:/here",)) for one in (*first.nodes, *first.targets)]
        coordinator = await EmbeddedCoordinator.found(
            MemoryKv(),
            replace(
                first,
                nodes=tuple(local[:1]),
                targets=tuple(local[1:]),
                shards=(Shard(1, 1, ("stream://127.0.0.1:1",)),),
            ),
        )
        leading = Late(coordinator, 1, None, lambda target: None)
        shards = MetaShards(PoolDirectory(tmp_path), config, 1, leading, None, start=lambda: None)
        with pytest.raises(Busy, match="ports"):
            await shards.verbs["shard-add"]({})
        assert (await shards.verbs["shard-add"]({}))["shard"] == 2
        at = leading.pool_map.shard_by_id[2].endpoints
        assert not any(endpoint.endswith(f":{leading.taken}") for endpoint in at) and len(at) == 3
        await coordinator.close()

    asyncio.run(run())
