"""Announcements of a node through a real etcd."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.cluster.switchable_coordinator import LastKnownMap, Relay
from nvpool.core.config import Config
from nvpool.core.errors import StaleIdentity, Unavailable
from nvpool.host.pool_directory import PoolDirectory
from nvpool.node.coordination import etcd_members
from nvpool.poolmap.model import EtcdMember, Revoked
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transport_registry import listen
from nvpool.testing.contracts.coordinator import first_map
from nvpool.testing.env import etcd as real_etcd

pytestmark = pytest.mark.skipif(real_etcd.missing() is not None, reason=str(real_etcd.missing()))


def test_changed_announcement_keeps_one_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(etcd_members, "LOOK_S", 0.01)

    async def run(members) -> None:
        coordinator = await EtcdCoordinator.found(
            members, msgspec.structs.replace(first_map(), pool_id="pool-of-the-keeper")
        )
        maps = SimpleNamespace(
            relay=Relay(coordinator), own=None, certificates=lambda: None, show_certificates=lambda: None
        )
        keeper = etcd_members.EtcdMembers(PoolDirectory(tmp_path), Config(), maps, None, None)
        announcing = asyncio.ensure_future(keeper.announce())
        try:
            async with asyncio.timeout(60):
                for able in (True, False, True):
                    monkeypatch.setattr(
                        etcd_members.shutil, "which", lambda name, able=able: "/etcd" if able else None
                    )
                    while not any(  # noqa: ASYNC110
                        json.loads(says)["able"] == able for says in coordinator.present().values()
                    ):
                        await asyncio.sleep(0.01)
                while len(coordinator.leases_held) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [json.loads(says)["able"] for says in coordinator.present().values()] == [True]
        finally:
            announcing.cancel()
            await coordinator.close()

    with real_etcd.RealEtcd() as etcd:
        asyncio.run(run(etcd.members))


@pytest.mark.parametrize("in_map", [True, False])
def test_removed_node_reports_its_removal(tmp_path, monkeypatch, in_map):
    monkeypatch.setattr(etcd_members, "RETRY_S", 0.01)

    async def run() -> None:
        listener = await listen(
            f"inproc://removed-{in_map}",
            Greeting("node 2"),
            lambda call: call.fail(StaleIdentity("node/one is not in the pool any more")),
        )
        first = first_map()
        one, two = (
            first.nodes[0],
            msgspec.structs.replace(first.nodes[0], id=2, endpoints=(f"inproc://removed-{in_map}",)),
        )
        held = LastKnownMap(
            msgspec.structs.replace(first, nodes=(one, two) if in_map else (two,)), "etcd is silent"
        )
        maps = SimpleNamespace(
            relay=Relay(held),
            is_in_etcd=True,
            own_data_is_lost=False,
            external="",
            members=(),
            own=None,
            learn=None,
        )
        dialer = Dialer(Greeting("node 1"))
        keeper = etcd_members.EtcdMembers(PoolDirectory(tmp_path), Config(), maps, None, dialer)
        keeper.node = one.id
        learning = asyncio.ensure_future(keeper.learn())
        try:
            async with asyncio.timeout(30):
                while not any("was removed from the pool" in problem for problem in keeper.problems()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            learning.cancel()
            await dialer.close()
            await listener.close()

    asyncio.run(run())


def test_removed_node_restarts_a_member_once(
    tmp_path,
):
    async def run(client: str) -> None:
        found, started = first_map(), []
        pool_map = msgspec.structs.replace(
            found, revoked=(Revoked("9", 1, 5),), etcd=(EtcdMember(found.nodes[0].id, client, client),)
        )
        answers = [Unavailable("the map cannot be changed"), Unavailable("the map cannot be changed"), None]

        async def start_again() -> None:
            started.append(client)

        async def change(decide) -> None:
            answer = answers.pop(0)
            if answer is not None:
                raise answer
            assert decide(pool_map).etcd[0].revoked == 5

        maps = SimpleNamespace(
            relay=SimpleNamespace(present=dict),
            certificates=lambda: None,
            write_revoked=lambda: None,
            start_again=start_again,
        )
        keeper = etcd_members.EtcdMembers(
            PoolDirectory(tmp_path), Config(), maps, SimpleNamespace(change=change), None
        )
        for _ in range(2):
            with pytest.raises(Unavailable):
                await keeper.hang_up(pool_map, pool_map.etcd[0])
        await keeper.hang_up(pool_map, pool_map.etcd[0])
        assert started == [client] and not answers

    with real_etcd.RealEtcd() as etcd:
        asyncio.run(run(etcd.members[0]))


def test_no_member_restarts_while_a_lost_node_counts(tmp_path):
    async def run(client: str) -> None:
        found, started = first_map(), []
        own = EtcdMember(found.nodes[0].id, client, client)
        lost = msgspec.structs.replace(found.nodes[0], id=9, desired_state="lost")
        pool_map = msgspec.structs.replace(
            found,
            revoked=(Revoked("9", 1, 5),),
            nodes=(*found.nodes, lost),
            etcd=(own, EtcdMember(9, "h:1", "h:2")),
        )

        async def start_again() -> None:
            started.append(client)

        async def change(decide) -> None:
            assert decide(pool_map).etcd[0].revoked == 5

        written = []
        maps = SimpleNamespace(
            relay=SimpleNamespace(present=dict),
            certificates=lambda: None,
            write_revoked=lambda: written.append(client),
            start_again=start_again,
        )
        keeper = etcd_members.EtcdMembers(
            PoolDirectory(tmp_path), Config(), maps, SimpleNamespace(change=change), None
        )
        await keeper.hang_up(pool_map, own)
        assert not started and written, "a node that joins again must not be admitted"
        await keeper.hang_up(msgspec.structs.replace(pool_map, etcd=(own,)), own)
        assert started == [client]

    with real_etcd.RealEtcd() as etcd:
        asyncio.run(run(etcd.members[0]))


def test_restarting_member_is_a_problem_after_seconds(tmp_path, monkeypatch):
    now_s, says = [100.0], {"etcd/1": {"able": True, "answers": True}}
    first = first_map()
    pool_map = msgspec.structs.replace(first, etcd=(EtcdMember(first.nodes[0].id, "h:1", "h:2"),))
    relay = SimpleNamespace(
        pool_map=pool_map, present=lambda: {name: json.dumps(status) for name, status in says.items()}
    )
    monkeypatch.setattr(etcd_members, "SYSTEM_CLOCK", SimpleNamespace(boottime_s=lambda: now_s[0]))
    monkeypatch.setattr(etcd_members.EtcdMembers, "etcd", SimpleNamespace(is_silent=False))
    keeper = etcd_members.EtcdMembers(
        PoolDirectory(tmp_path),
        Config(),
        SimpleNamespace(relay=relay, own_data_is_lost=False, is_in_etcd=True),
        None,
        None,
    )
    keeper.node = first.nodes[0].id

    def problems_after(seconds, answers):
        says["etcd/1"]["answers"] = answers
        now_s[0] += seconds
        keeper.look()
        return keeper.problems()

    assert problems_after(0, True) == []
    assert problems_after(2, False) == []
    assert problems_after(etcd_members.SILENT_S - 1, False) == []
    assert problems_after(1, False) == ["etcd on node 1 does not answer"]
    assert problems_after(0, True) == []
    assert problems_after(9, False) == [], "the silence before does not count"
