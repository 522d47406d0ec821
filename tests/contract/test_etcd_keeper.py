"""What a node tells the others through a real etcd."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from nvpool.base.config import Config
from nvpool.base.directory import PoolDirectory
from nvpool.base.errors import Unavailable
from nvpool.cluster.etcd import EtcdCoordinator
from nvpool.cluster.relay import Relay
from nvpool.logic.poolmap import EtcdMember, Revoked
from nvpool.run import etcd_keeper
from nvpool.testing import real_etcd
from nvpool.testing.contracts.coordinator import first_map

pytestmark = pytest.mark.skipif(real_etcd.missing() is not None, reason=str(real_etcd.missing()))


def test_a_node_that_tells_something_new_keeps_one_lease_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(etcd_keeper, "_LOOK_S", 0.01)

    async def run(members) -> None:
        coordinator = await EtcdCoordinator.found(members, msgspec.structs.replace(first_map(), pool_id="pool-of-the-keeper"))
        maps = SimpleNamespace(relay=Relay(coordinator), own=None, certificates=lambda: None, show_certificates=lambda: None)
        keeper = etcd_keeper.EtcdKeeper(PoolDirectory(tmp_path), Config(), maps, None, None)
        telling = asyncio.ensure_future(keeper._announce())
        try:
            async with asyncio.timeout(60):
                for able in (True, False, True):
                    monkeypatch.setattr(etcd_keeper.shutil, "which", lambda name, able=able: "/etcd" if able else None)
                    while not any(json.loads(says)["able"] == able for says in coordinator.present().values()):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                while len(coordinator._leases) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [json.loads(says)["able"] for says in coordinator.present().values()] == [True]
        finally:
            telling.cancel()
            await coordinator.close()

    with real_etcd.RealEtcd() as etcd:
        asyncio.run(run(etcd.members))


def test_a_member_is_started_again_once_for_a_node_that_was_removed_though_the_map_can_not_be_changed(tmp_path):
    async def run(client: str) -> None:
        found, started = first_map(), []
        pool_map = msgspec.structs.replace(found, revoked=(Revoked("9", 1, 5),),
                                           etcd=(EtcdMember(found.nodes[0].id, client, client),))
        answers = [Unavailable("the map can not be changed"), Unavailable("the map can not be changed"), None]

        async def start_again() -> None:
            started.append(client)

        async def change(decide) -> None:
            answer = answers.pop(0)
            if answer is not None:
                raise answer
            assert decide(pool_map).etcd[0].revoked == 5

        maps = SimpleNamespace(relay=SimpleNamespace(present=dict), certificates=lambda: None, write_revoked=lambda: None,
                               start_again=start_again)
        keeper = etcd_keeper.EtcdKeeper(PoolDirectory(tmp_path), Config(), maps, SimpleNamespace(change=change), None)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await keeper._hang_up(pool_map, pool_map.etcd[0])
        await keeper._hang_up(pool_map, pool_map.etcd[0])
        assert started == [client] and not answers

    with real_etcd.RealEtcd() as etcd:
        asyncio.run(run(etcd.members[0]))
