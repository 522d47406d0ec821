"""Health report of a pool: problems, reasons and remedies, derived from a map and the processes' reports."""

import asyncio

import pytest
from msgspec.structs import replace

from nvpool.core.clock import ManualClock
from nvpool.node.health_history import STALLED_S, HealthWatch
from nvpool.poolmap.health_checks import Health, HealthProblem, exit_code, with_since
from nvpool.poolmap.model import (
    Chain,
    ChainTable,
    Drive,
    Node,
    PoolMap,
    PoolSettings,
    RebalanceSettings,
    Shard,
    StandbyMember,
    Target,
)


def a_map(nodes=2, replicas=2, **fields) -> PoolMap:
    """A pool map with a drive on each node; all drives have the two chains of the table."""
    targets = tuple(Target(n, n, n, 1 << 30, (f"stream://n{n}:{n}",)) for n in range(1, nodes + 1))
    holders = tuple(range(1, nodes + 1))[:replicas]
    standby = StandbyMember(1, 2, ("stream://n2:2",), "up", "/d2/nvpool-pool-meta-1.1")
    first = PoolMap(
        6,
        "pool",
        "p",
        7,
        PoolSettings(),
        nodes=tuple(Node(n, f"name{n}", f"h{n}", (f"stream://n{n}:7",)) for n in range(1, nodes + 1)),
        targets=targets,
        drives=tuple(Drive(n, n, f"/d{n}/nvpool-pool-target-{n}", 1 << 30) for n in range(1, nodes + 1)),
        tables=(ChainTable(replicas, (Chain(1, holders), Chain(1, holders))),),
        shards=(Shard(1, 1, ("stream://n1:1",), standbys=(standby,)),),
    )
    return replace(first, **fields)


def seen(pool_map, *, silent=(), stores=None, metas=None, admin_states=None, **named):
    """Problems of the map if all processes serve, except for what the arguments say."""
    stores, metas, admin_states = stores or {}, metas or {}, admin_states or {}
    shard = pool_map.shards[0]
    states = {shard.member: ("primary", shard.node)} | {
        one.member: (one.state, one.node) for one in shard.standbys
    }

    def process(name, node, **more):
        away = {"state": "silent", "reason": "no reply"} if node in silent else {}
        return {"name": name, "node": node, "state": "serving", "pid": 4711} | more | away

    return Health(
        pool_map,
        [
            {
                "node": one.id,
                "name": one.name,
                "desired_state": admin_states.get(one.id, ""),
                "state": "silent" if one.id in silent else "serving",
            }
            | ({"reason": "no reply"} if one.id in silent else {})
            for one in pool_map.nodes
        ],
        [
            process(f"meta-1.{member}", node, shard=1, member=member, in_map=state, **metas.get(member, {}))
            for member, (state, node) in states.items()
        ],
        [
            process(
                f"target-{one.id}",
                one.node,
                target=one.id,
                drive=one.drive,
                path=f"/d{one.id}",
                **stores.get(one.id, {}),
            )
            for one in pool_map.targets
            if not one.is_over
        ],
        pool="/srv/pool",
        replace_after_s=600,
        **named,
    ).problems()


def kinds(problems):
    return {problem.kind: problem for problem in problems}


def with_target(pool_map, number, **fields):
    return replace(
        pool_map,
        targets=tuple(replace(one, **fields) if one.id == number else one for one in pool_map.targets),
    )


def without_copy(pool_map, number, joining=()):
    holders = tuple(one.id for one in pool_map.targets)
    short = Chain(2, tuple(one for one in holders if one != number), joining, goal=holders)
    return replace(pool_map, tables=(ChainTable(len(holders), (short, short)),))


def test_healthy_pool_has_no_problem_and_code_0():
    assert seen(a_map()) == [] and exit_code([]) == 0


def test_dead_node_is_named_once_with_its_processes():
    pool_map = without_copy(with_target(a_map(), 2, state="down"), 2)
    found = kinds(seen(pool_map, silent={2}))
    assert (
        set(found) == {"node-silent", "copies-missing", "shard-no-standby"} and exit_code(found.values()) == 3
    )
    node = found["node-silent"]
    assert node.node == 2 and "target-2" in node.reason and "meta-1.1" in node.reason
    assert "nvpool node remove /srv/pool 2 --lost" in node.remedy
    copies = found["copies-missing"]
    assert (copies.node, copies.target, copies.drive, copies.count) == (
        2,
        2,
        2,
        2,
    ) and "1 of 2" in copies.reason
    assert "start node 2" in copies.remedy


def test_drained_and_stopped_node_is_no_problem():
    pool_map = with_target(a_map(3), 3, state="down", desired_state="drain")
    assert seen(pool_map, silent={3}, admin_states={3: "drained"}) == []
    hangs = {3: {"state": "silent", "reason": "late", "hangs": True}}
    assert set(kinds(seen(pool_map, stores=hangs, admin_states={3: "drained"}))) == {"process-down"}, (
        "it answers"
    )
    assert "node-silent" in kinds(seen(pool_map, silent={3}, admin_states={3: "draining"}))


def test_missing_copies_name_the_cause_and_the_command():
    pool_map = without_copy(with_target(a_map(3, 3), 3, state="down"), 3)
    down = kinds(seen(pool_map, stores={3: {"state": "restarting", "reason": "no chunk store"}}))
    again = kinds(seen(pool_map, stores={3: {"state": "starting", "reason": "no chunk store"}}))
    assert down["copies-missing"].reason == again["copies-missing"].reason, (
        "unchanged between two attempts to start it"
    )
    assert (
        "no chunk store" in down["copies-missing"].reason
        and "no other drive" in down["copies-missing"].reason
    )
    assert "nvpool drive replace /srv/pool 3 NEW_PATH --lost" in down["copies-missing"].remedy
    hangs = kinds(seen(pool_map, stores={3: {"state": "silent", "reason": "late", "hangs": True}}))
    assert "kill -9 4711 on node 3" in hangs["process-down"].remedy

    filled = kinds(seen(without_copy(a_map(3, 3), 3, joining=(3,))))
    assert set(filled) == {"copies-missing"} and "2 are being copied" in filled["copies-missing"].reason
    full = kinds(seen(without_copy(a_map(3, 3), 3, joining=(3,)), stores={3: {"lacks_room": True}}))
    assert "no space" in full["copies-missing"].reason and "nvpool drive add" in full["copies-missing"].remedy


def test_serving_store_left_out_of_the_map_is_reported():
    pool_map = without_copy(with_target(a_map(), 2, state="down"), 2)
    found = kinds(
        seen(pool_map, stores={2: {"refused": "this node does not lead the pool", "serving_pid": 99}})
    )
    left_out = found["target-left-out"]
    assert "serves, but the pool map excludes it" in left_out.reason
    assert "this node does not lead the pool" in left_out.reason and "kill 99 on node 2" in left_out.remedy
    assert left_out.target == 2 and left_out.node == 2


def test_chains_without_a_target_are_unavailable():
    pool_map = replace(a_map(), tables=(ChainTable(1, (Chain(1, (2,)),)),))
    found = seen(pool_map, stores={2: {"state": "stopped"}})
    assert found[0].kind == "data-unavailable" and found[0].severity == "unavailable" and found[0].target == 2
    assert "nvpool drive remove /srv/pool 2 --lost --give-up" in found[0].remedy


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("waiting", "it has no lease: this node does not lead", "no lease"),
        ("silent", "late", "see its log"),
        ("restarting", "/srv/pool/meta/shard-1 is missing", "load a dump"),
    ],
)
def test_shard_without_a_serving_primary_is_unavailable(state, reason, words):
    problem = kinds(seen(a_map(), metas={0: {"state": state, "reason": reason}}))["shard-no-primary"]
    assert problem.severity == "unavailable" and (problem.shard, problem.member, problem.node) == (1, 0, 1)
    assert reason in problem.reason and words in problem.text


def test_primary_that_waits_for_a_standby_names_it():
    problem = kinds(seen(a_map(), silent={2}, metas={0: {"state": "starting"}}))["shard-no-primary"]
    assert "waits for meta-1.1 on node 2" in problem.reason
    assert "nvpool shard standbys /srv/pool 1 0" in problem.remedy


def test_remedy_is_a_command_that_can_succeed():
    pool_map = replace(a_map(), tables=(ChainTable(1, (Chain(1, (2,)),)),))
    found = kinds(
        seen(pool_map, silent={2}, metas={0: {"state": "waiting", "reason": "no lease"}}, can_change=False)
    )
    assert set(found) == {"data-unavailable", "shard-no-primary", "node-silent", "shard-no-standby"}
    assert not any("nvpool node remove" in one.remedy or "--give-up" in one.remedy for one in found.values())
    primary = found["shard-no-primary"]
    assert "waits for" not in primary.reason and "as soon as the pool map can be changed" in primary.remedy


NEEDS_CHANGE = ("nvpool drive", "nvpool shard standbys", "nvpool node", "--lost", "--give-up", "--resume")


def unchangeable():
    """Kind of a problem, map, and arguments of `seen`; the remedy changes the pool map if that is possible."""
    short = without_copy(with_target(a_map(3, 3), 3, state="down"), 3)
    filling = without_copy(a_map(3, 3), 3, joining=(3,))
    alone = replace(a_map().shards[0], standbys=(), standbys_wanted=2)
    yield "node-silent", a_map(3, 3), {"silent": {2, 3}}
    yield "shard-no-primary", a_map(3, 3), {"silent": {2, 3}, "metas": {0: {"state": "starting"}}}
    yield "data-unavailable", replace(a_map(), tables=(ChainTable(1, (Chain(1, (2,)),)),)), {"silent": {2}}
    for kind in ("process-down", "copies-missing"):
        yield kind, short, {"stores": {3: {"state": "restarting", "reason": "no chunk store"}}}
    for kind in ("copies-missing", "drive-no-room"):
        yield kind, filling, {"stores": {3: {"lacks_room": True}}}
    yield "copies-missing", replace(a_map(), tables=(ChainTable(3, (Chain(1, (1, 2)),)),)), {}
    for state in ("lost", "away", "serving", "silent"):
        why = {} if state == "serving" else {"reason": "late"}
        yield "shard-no-standby", syncing(a_map()), {"metas": {1: {"state": state} | why}}
    yield "shard-no-standby", replace(a_map(), shards=(alone,)), {}
    yield "shard-at-risk", a_map(), {"metas": {0: {"reason": "its records are damaged"}}}
    stalled = {"stalled_s": {1: 99.0}}
    yield "drain-stalled", drained(), stalled
    yield "drain-stalled", drained(moving=RebalanceSettings(paused=True)), stalled
    for number, said in (
        (1, {"state": "stopped"}),
        (3, {"lacks_room": True}),
        (3, {"resync_wait": "target 1: late"}),
    ):
        yield "drain-stalled", drained(), stalled | {"stores": {number: said}}
    yield "drive-away", with_target(a_map(), 2, desired_state="away"), {}
    yield "drive-full", a_map(), {"stores": {2: {"capacity_bytes": 1000, "used_bytes": 950}}}


def test_no_remedy_changes_a_map_that_can_not_be_changed():
    for kind, pool_map, said in unchangeable():
        able, unable = (kinds(seen(pool_map, can_change=able, **said)) for able in (True, False))
        assert any(word in able[kind].remedy for word in NEEDS_CHANGE), (kind, said)
        assert unable[kind].remedy, (kind, said)
        wrong = [one.text for one in unable.values() if any(word in one.remedy for word in NEEDS_CHANGE)]
        assert not wrong, (kind, said)


def test_remedy_names_the_nodes_that_keep_the_map_from_changing():
    room = {1: {"lacks_room": True}}
    short = without_copy(a_map(4, 4), 1, joining=(1,))
    found = seen(short, silent={3, 4}, stores=room, can_change=False)
    remedies = [one.remedy for one in found if one.kind == "copies-missing" and one.target == 1]
    assert remedies == [
        "this needs a change of the pool map, which is not possible now; first start node 3 and node 4"
    ]


def syncing(pool_map, state="syncing"):
    shard = pool_map.shards[0]
    return replace(pool_map, shards=(replace(shard, standbys=(replace(shard.standbys[0], state=state),)),))


@pytest.mark.parametrize(
    ("said", "words", "remedy"),
    [
        (
            {"state": "lost", "reason": "its records are gone"},
            "has lost its records: its records are gone",
            "created again within a minute",
        ),
        (
            {"state": "away", "reason": "x"},
            "on a drive that is away",
            "nvpool drive remove /srv/pool 2 --lost",
        ),
        ({"state": "serving"}, "has not received all records yet", "wait"),
        (
            {"state": "silent", "reason": "late", "pid": 8, "hangs": True},
            "is silent: late",
            "kill -9 8 on node 2",
        ),
    ],
)
def test_missing_standby_has_a_reason_and_a_remedy(said, words, remedy):
    problem = kinds(seen(syncing(a_map()), metas={1: said}))["shard-no-standby"]
    assert (
        words in problem.reason
        and remedy in problem.remedy
        and (problem.shard, problem.member, problem.node) == (1, 1, 2)
    )
    assert "nvpool shard standbys /srv/pool 1 0, and then 1" in problem.remedy


def test_too_few_drives_for_the_standbys_are_reported():
    pool_map = a_map()
    shard = replace(pool_map.shards[0], standbys=(), standbys_wanted=2)
    problem = kinds(seen(replace(pool_map, shards=(shard,))))["shard-no-standby"]
    assert (
        "2 drives for 3 members" in problem.reason and "nvpool shard standbys /srv/pool 1 1" in problem.remedy
    )


def drained(**fields):
    pool_map = with_target(a_map(3), 1, desired_state="drain")
    moving = Chain(3, (1, 2), goal=(2, 3))
    return replace(pool_map, tables=(ChainTable(2, (moving, moving)),), **fields)


def test_drain_is_a_problem_only_when_it_stalls():
    assert "drain-stalled" not in kinds(seen(drained()))
    problem = kinds(seen(drained(), stalled_s={1: 75.0}))["drain-stalled"]
    assert (problem.node, problem.target, problem.drive, problem.count) == (1, 1, 1, 2)
    assert "has made no progress for 1 min 15 s" in problem.reason and "--cancel" in problem.remedy


def test_stalled_drain_names_what_it_waits_for():
    paused = kinds(seen(drained(moving=RebalanceSettings(paused=True)), stalled_s={1: 0.0}))["drain-stalled"]
    assert "paused" in paused.reason and paused.remedy == "nvpool pool rebalance /srv/pool --resume"
    down = kinds(seen(with_target(drained(), 3, state="down"), silent={3}, stalled_s={1: 99.0}))[
        "drain-stalled"
    ]
    assert (
        "the destination target 3 (drive 3) on node 3 does not serve" in down.reason
        and "start node 3" in down.remedy
    )
    full = kinds(seen(drained(), stores={3: {"lacks_room": True}}, stalled_s={1: 99.0}))["drain-stalled"]
    assert "no space" in full.reason and "nvpool drive add /srv/pool" in full.remedy


def test_almost_full_drive_is_a_problem():
    room = {"capacity_bytes": 1000}
    assert "drive-full" not in kinds(
        seen(a_map(), stores={2: room | {"used_bytes": 949}, 1: room | {"used_bytes": None}})
    )
    problem = kinds(seen(a_map(), stores={2: room | {"used_bytes": 950}}))["drive-full"]
    assert (problem.drive, problem.severity) == (2, "degraded") and "95%" in problem.reason


def emptied():
    full = Chain(5, (2, 3))
    return replace(drained(), tables=(ChainTable(2, (full, full)),))


def test_drain_that_removes_nothing_names_what_keeps_chunks():
    kept = {"strays_wait": "7 chunks are kept until this target hears from the leading node"}
    problem = kinds(seen(emptied(), stores={1: kept}, stalled_s={1: 99.0}))["drain-stalled"]
    assert problem.reason.endswith(kept["strays_wait"]) and "is not empty" in problem.reason
    repair = {"strays_wait": "4096 bytes belong to no chunk; give them back with: nvpool fsck POOL --repair"}
    problem = kinds(seen(emptied(), stores={1: repair}, stalled_s={1: 99.0}))["drain-stalled"]
    assert problem.remedy == "nvpool fsck /srv/pool --repair"
    problem = kinds(
        seen(drained(), stores={3: {"resync_wait": "target 1: it does not answer"}}, stalled_s={1: 99.0})
    )
    assert (
        "target 3 (drive 3)" in problem["drain-stalled"].reason
        and "target 1: it" in problem["drain-stalled"].reason
    )


def test_drain_stalls_while_the_drive_is_not_emptied():
    clock, used = ManualClock(), [100]

    async def stores():
        return [{"drive": 1, "used_bytes": used[0], "counters": {}}]

    watch = HealthWatch(lambda: emptied(), stores, clock)

    def looked(after_s):
        clock.advance(after_s)
        asyncio.run(watch.run_once())
        return watch.stalled_s()

    assert looked(0) == {} and looked(STALLED_S) == {1: STALLED_S}
    used[0] = 50
    assert looked(1) == {}
    used[0] = 0
    assert looked(1) == {} and looked(2 * STALLED_S) == {}, "the drive is empty"


def test_exit_codes_put_unavailability_before_damage():
    damaged, notice, degraded = (
        HealthProblem("x", "y", severity=one) for one in ("damaged", "notice", "degraded")
    )
    assert (
        exit_code([notice]) == 0 and exit_code([damaged, notice]) == 4 and exit_code([damaged, degraded]) == 3
    )


def test_problem_keeps_its_first_time():
    (first,) = with_since([HealthProblem("x", "one way", target=1)], {}, 1000)
    later = [HealthProblem("x", "another way", target=1), HealthProblem("x", "one way", target=2)]
    again, other = with_since(later, {first.key: 1000}, 5000)
    assert (first.since_ms, again.since_ms, other.since_ms) == (1000, 1000, 5000)


def test_drain_stalls_when_nothing_is_copied():
    clock, maps, copied = ManualClock(), [drained()], [0]

    async def stores():
        return [{"drive": 3, "used_bytes": 7, "counters": {"resync_bytes_copied": float(copied[0])}}]

    watch = HealthWatch(lambda: maps[0], stores, clock)

    def looked(after_s):
        clock.advance(after_s)
        asyncio.run(watch.run_once())
        return watch.stalled_s()

    assert looked(0) == {} and looked(STALLED_S - 1) == {}
    copied[0] = 1 << 20
    assert looked(1) == {}, "bytes of a chain that has not moved yet are copied"
    assert looked(STALLED_S - 1) == {} and looked(1) == {1: STALLED_S}
    maps[0] = replace(maps[0], tables=(ChainTable(2, (Chain(4, (2, 3)), maps[0].tables[0].chains[1])),))
    assert looked(1) == {}
    maps[0] = replace(maps[0], moving=RebalanceSettings(paused=True))
    assert 1 in looked(1), "a pause is reported immediately"


def test_problem_begins_at_the_time_of_the_map_change():
    clock, maps = ManualClock(), [a_map()]

    async def stores():
        return []

    watch = HealthWatch(lambda: maps[0], stores, clock)
    asyncio.run(watch.run_once())
    maps[0] = without_copy(with_target(a_map(), 2, state="down"), 2)
    clock.advance(5)
    asyncio.run(watch.run_once())
    went_ms = clock.wall_ns() // 1_000_000
    clock.advance(100)
    (missing,) = (
        one
        for one in watch.since(seen(maps[0], stores={2: {"state": "stopped"}}))
        if one.kind == "copies-missing"
    )
    assert missing.since_ms == went_ms
