"""Contract of a Coordinator: `check_all(make)`; the async `make` returns a coordinator of `first_map()`.

Used by tests/contract/test_embedded_coordinator.py and by authors of other coordinators. Each check gets a new
coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from nvpool.cluster.coordinator_api import MapCoordinator
from nvpool.core.errors import InvalidRequest, StaleEpoch, StaleLease
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Drive,
    Node,
    PartitionRange,
    PoolMap,
    PoolSettings,
    Shard,
    Target,
    changed,
)

Make = Callable[[], Awaitable[MapCoordinator]]


def first_map() -> PoolMap:
    targets = tuple(Target(n, n, 1, n << 30, (f"inproc://target-{n}",)) for n in (1, 2))
    return PoolMap(
        MAP_FORMAT,
        "pool-of-the-contract",
        "test",
        1,
        PoolSettings(),
        (Node(1, "here", "host", ("inproc://node",)),),
        tuple(Drive(n, 1, f"/drive/{n}", n << 30) for n in (1, 2)),
        targets,
        (build_table(targets, 1),),
        (Shard(1, 1, ("inproc://meta-1",)),),
        (PartitionRange(0, 4096, 1),),
    )


async def _refused(error: type[Exception], awaitable: Awaitable) -> None:
    try:
        await awaitable
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


async def a_new_coordinator_has_the_first_map(coordinator: MapCoordinator) -> None:
    assert coordinator.pool_map == first_map()


async def the_next_map_replaces_the_newest(coordinator: MapCoordinator) -> None:
    new = changed(coordinator.pool_map, name="renamed")
    await coordinator.replace(new)
    assert coordinator.pool_map == await coordinator.newest() == new


async def a_map_that_is_not_the_next_is_stale_and_changes_nothing(coordinator: MapCoordinator) -> None:
    before = coordinator.pool_map
    for epoch in (0, before.epoch, before.epoch + 2):
        await _refused(
            StaleEpoch, coordinator.replace(msgspec.structs.replace(before, epoch=epoch, name="late"))
        )
    assert coordinator.pool_map == before


async def one_of_two_concurrent_changes_is_stale(coordinator: MapCoordinator) -> None:
    one, other = (changed(coordinator.pool_map, name=name) for name in ("one", "other"))
    results = await asyncio.gather(
        coordinator.replace(one), coordinator.replace(other), return_exceptions=True
    )
    assert sorted(type(result) for result in results if result is not None) == [StaleEpoch]
    assert coordinator.pool_map in (one, other)


async def a_map_that_contradicts_itself_or_is_another_pools_is_refused(coordinator: MapCoordinator) -> None:
    before = coordinator.pool_map
    await _refused(
        InvalidRequest, coordinator.replace(msgspec.structs.replace(before, epoch=before.epoch + 1, nodes=()))
    )
    await _refused(
        InvalidRequest,
        coordinator.replace(msgspec.structs.replace(before, epoch=before.epoch + 1, pool_id="x")),
    )
    assert coordinator.pool_map == before


async def watch_for_older_epoch_returns_immediately(coordinator: MapCoordinator) -> None:
    assert await asyncio.wait_for(coordinator.watch(0, 30), 5) == coordinator.pool_map


async def a_watch_wakes_with_the_next_map_all_who_wait(coordinator: MapCoordinator) -> None:
    epoch = coordinator.pool_map.epoch
    watches = [asyncio.ensure_future(coordinator.watch(epoch, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    new = changed(coordinator.pool_map, name="awaited")
    await coordinator.replace(new)
    assert await asyncio.wait_for(asyncio.gather(*watches), 5) == [new] * 3


async def a_watch_in_vain_ends_with_nothing(coordinator: MapCoordinator) -> None:
    assert await coordinator.watch(coordinator.pool_map.epoch, 0) is None
    assert await coordinator.watch(coordinator.pool_map.epoch, 0.01) is None


async def a_cancelled_watch_harms_nobody(coordinator: MapCoordinator) -> None:
    epoch = coordinator.pool_map.epoch
    gone, stays = (asyncio.ensure_future(coordinator.watch(epoch, 30)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    new = changed(coordinator.pool_map, name="awaited")
    await coordinator.replace(new)
    assert await asyncio.wait_for(stays, 5) == new


async def closing_wakes_those_who_wait(coordinator: MapCoordinator) -> None:
    watch = asyncio.ensure_future(coordinator.watch(coordinator.pool_map.epoch, 30))
    await asyncio.sleep(0)
    await coordinator.close()
    assert await asyncio.wait_for(watch, 5) is None
    await coordinator.close()


LEASE_S = 2.0


async def who_is_announced_is_present_until_he_goes(coordinator: MapCoordinator) -> None:
    assert coordinator.present() == {}
    lease = await coordinator.announce("node-1", b"here", LEASE_S)
    assert lease.holds and not lease.in_doubt and not lease.lost.done()
    assert await _present(coordinator, {}) == {"node-1": b"here"}
    await coordinator.announce("node-2", b"there", LEASE_S)
    assert await _present(coordinator, {"node-1": b"here"}) == {"node-1": b"here", "node-2": b"there"}
    await lease.release()
    assert not lease.holds and lease.lost.done()
    assert await _present(coordinator, {"node-1": b"here", "node-2": b"there"}) == {"node-2": b"there"}
    await lease.release()


async def _present(coordinator: MapCoordinator, known: dict) -> dict:
    return dict(await asyncio.wait_for(coordinator.watch_present(known, 30), 10))


async def a_lease_holds_longer_than_its_time_without_anybody_doing_anything(
    coordinator: MapCoordinator,
) -> None:
    lease = await coordinator.announce("node-1", b"here", LEASE_S)
    await asyncio.sleep(LEASE_S * 1.5)
    assert lease.holds and not lease.lost.done()
    assert dict(coordinator.present()) == {"node-1": b"here"}


async def a_later_announcement_takes_the_place_of_an_earlier_one(coordinator: MapCoordinator) -> None:
    before = await coordinator.announce("node-1", b"old", LEASE_S)
    await _present(coordinator, {})
    await coordinator.announce("node-1", b"new", LEASE_S)
    assert await _present(coordinator, {"node-1": b"old"}) == {"node-1": b"new"}
    await before.release()
    assert dict(await coordinator.watch_present({"node-1": b"new"}, 0.3)) == {"node-1": b"new"}


async def a_watch_of_who_is_present_ends_in_time(coordinator: MapCoordinator) -> None:
    assert await asyncio.wait_for(coordinator.watch_present({}, 0.01), 5) == {}


async def one_leads_at_a_time(coordinator: MapCoordinator) -> None:
    first = await coordinator.lead("a", LEASE_S, 10)
    assert first is not None and first.holds
    await until(lambda: coordinator.leader() == "a")
    assert await coordinator.lead("b", LEASE_S, 0.3) is None
    waiting = asyncio.ensure_future(coordinator.lead("c", LEASE_S, 30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await first.release()
    second = await asyncio.wait_for(waiting, 10)
    assert second is not None and second.holds and not first.holds
    await until(lambda: coordinator.leader() == "c")


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be so within 10 s")


async def of_many_who_want_to_lead_one_does(coordinator: MapCoordinator) -> None:
    found = await asyncio.gather(*(coordinator.lead(str(number), LEASE_S, 0.5) for number in range(5)))
    assert sum(lease is not None for lease in found) == 1


async def a_map_of_who_led_once_is_refused(coordinator: MapCoordinator) -> None:
    leader = await coordinator.lead("a", LEASE_S, 10)
    await coordinator.replace(changed(coordinator.pool_map, name="by the leader"), leader)
    await leader.release()
    before = coordinator.pool_map
    await _refused(StaleLease, coordinator.replace(changed(before, name="by nobody"), leader))
    again = await coordinator.lead("b", LEASE_S, 10)
    await _refused(StaleLease, coordinator.replace(changed(before, name="by who led"), leader))
    assert coordinator.pool_map == before
    await coordinator.replace(changed(before, name="by who leads"), again)
    assert coordinator.pool_map.name == "by who leads"


async def closing_gives_leases_up(coordinator: MapCoordinator) -> None:
    leases = [await coordinator.announce("node-1", b"", LEASE_S), await coordinator.lead("a", LEASE_S, 10)]
    await coordinator.close()
    assert all(lease.lost.done() and not lease.holds for lease in leases)


CHECKS: tuple[Callable[[MapCoordinator], Awaitable[None]], ...] = (
    a_new_coordinator_has_the_first_map,
    the_next_map_replaces_the_newest,
    a_map_that_is_not_the_next_is_stale_and_changes_nothing,
    one_of_two_concurrent_changes_is_stale,
    a_map_that_contradicts_itself_or_is_another_pools_is_refused,
    watch_for_older_epoch_returns_immediately,
    a_watch_wakes_with_the_next_map_all_who_wait,
    a_watch_in_vain_ends_with_nothing,
    a_cancelled_watch_harms_nobody,
    closing_wakes_those_who_wait,
    who_is_announced_is_present_until_he_goes,
    a_lease_holds_longer_than_its_time_without_anybody_doing_anything,
    a_later_announcement_takes_the_place_of_an_earlier_one,
    a_watch_of_who_is_present_ends_in_time,
    one_leads_at_a_time,
    of_many_who_want_to_lead_one_does,
    a_map_of_who_led_once_is_refused,
    closing_gives_leases_up,
)


async def check_all(make: Make) -> None:
    """Run every check; the first that fails raises."""
    for check in CHECKS:
        coordinator = await make()
        try:
            await check(coordinator)
        finally:
            await coordinator.close()
