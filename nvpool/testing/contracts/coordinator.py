"""The suite every Coordinator passes: `check_all(make)`; `make` is async and gives a coordinator over `first_map()`.

Called by tests/contract/test_coordinator.py and by authors of other coordinators. Each check gets a coordinator of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from nvpool.base.errors import InvalidRequest, StaleEpoch
from nvpool.cluster.coordinator import Coordinator
from nvpool.logic.placement import build_table
from nvpool.logic.poolmap import Drive, Node, PartitionRange, PoolMap, Settings, Shard, Target, changed

Make = Callable[[], Awaitable[Coordinator]]


def first_map() -> PoolMap:
    targets = tuple(Target(n, n, 1, n << 30, (f"inproc://target-{n}",)) for n in (1, 2))
    return PoolMap(1, "pool-of-the-contract", "test", 1, Settings(), (Node(1, "here", "host", ("inproc://node",)),),
                   tuple(Drive(n, 1, f"/drive/{n}", n << 30) for n in (1, 2)), targets, (build_table(targets, 1),),
                   (Shard(1, 1, ("inproc://meta-1",)),), (PartitionRange(0, 4096, 1),))


async def _refused(error: type[Exception], awaitable: Awaitable) -> None:
    try:
        await awaitable
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


async def a_new_coordinator_has_the_first_map(coordinator: Coordinator) -> None:
    assert coordinator.pool_map == first_map()


async def the_next_map_replaces_the_newest(coordinator: Coordinator) -> None:
    new = changed(coordinator.pool_map, name="renamed")
    await coordinator.replace(new)
    assert coordinator.pool_map == new


async def a_map_that_is_not_the_next_is_stale_and_changes_nothing(coordinator: Coordinator) -> None:
    before = coordinator.pool_map
    for epoch in (0, before.epoch, before.epoch + 2):
        await _refused(StaleEpoch, coordinator.replace(msgspec.structs.replace(before, epoch=epoch, name="late")))
    assert coordinator.pool_map == before


async def of_two_changes_at_once_one_is_stale(coordinator: Coordinator) -> None:
    one, other = (changed(coordinator.pool_map, name=name) for name in ("one", "other"))
    results = await asyncio.gather(coordinator.replace(one), coordinator.replace(other), return_exceptions=True)
    assert sorted(type(result) for result in results if result is not None) == [StaleEpoch]
    assert coordinator.pool_map in (one, other)


async def a_map_that_contradicts_itself_or_is_another_pools_is_refused(coordinator: Coordinator) -> None:
    before = coordinator.pool_map
    await _refused(InvalidRequest, coordinator.replace(msgspec.structs.replace(before, epoch=before.epoch + 1, nodes=())))
    await _refused(InvalidRequest, coordinator.replace(msgspec.structs.replace(before, epoch=before.epoch + 1, pool_id="x")))
    assert coordinator.pool_map == before


async def a_watch_for_an_older_epoch_answers_at_once(coordinator: Coordinator) -> None:
    assert await asyncio.wait_for(coordinator.watch(0, 30), 5) == coordinator.pool_map


async def a_watch_wakes_with_the_next_map_all_who_wait(coordinator: Coordinator) -> None:
    epoch = coordinator.pool_map.epoch
    watches = [asyncio.ensure_future(coordinator.watch(epoch, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    new = changed(coordinator.pool_map, name="awaited")
    await coordinator.replace(new)
    assert await asyncio.wait_for(asyncio.gather(*watches), 5) == [new] * 3


async def a_watch_in_vain_ends_with_nothing(coordinator: Coordinator) -> None:
    assert await coordinator.watch(coordinator.pool_map.epoch, 0) is None
    assert await coordinator.watch(coordinator.pool_map.epoch, 0.01) is None


async def a_cancelled_watch_harms_nobody(coordinator: Coordinator) -> None:
    epoch = coordinator.pool_map.epoch
    gone, stays = (asyncio.ensure_future(coordinator.watch(epoch, 30)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    new = changed(coordinator.pool_map, name="awaited")
    await coordinator.replace(new)
    assert await asyncio.wait_for(stays, 5) == new


async def closing_wakes_those_who_wait(coordinator: Coordinator) -> None:
    watch = asyncio.ensure_future(coordinator.watch(coordinator.pool_map.epoch, 30))
    await asyncio.sleep(0)
    await coordinator.close()
    assert await asyncio.wait_for(watch, 5) is None
    await coordinator.close()


CHECKS: tuple[Callable[[Coordinator], Awaitable[None]], ...] = (
    a_new_coordinator_has_the_first_map,
    the_next_map_replaces_the_newest,
    a_map_that_is_not_the_next_is_stale_and_changes_nothing,
    of_two_changes_at_once_one_is_stale,
    a_map_that_contradicts_itself_or_is_another_pools_is_refused,
    a_watch_for_an_older_epoch_answers_at_once,
    a_watch_wakes_with_the_next_map_all_who_wait,
    a_watch_in_vain_ends_with_nothing,
    a_cancelled_watch_harms_nobody,
    closing_wakes_those_who_wait,
)


async def check_all(make: Make) -> None:
    """Run every check; the first that fails raises."""
    for check in CHECKS:
        coordinator = await make()
        try:
            await check(coordinator)
        finally:
            await coordinator.close()
