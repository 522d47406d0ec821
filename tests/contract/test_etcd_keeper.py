"""What a node tells the others through a real etcd."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from nvpool.base.config import Config
from nvpool.base.directory import PoolDirectory
from nvpool.cluster.etcd import EtcdCoordinator
from nvpool.cluster.relay import Relay
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
