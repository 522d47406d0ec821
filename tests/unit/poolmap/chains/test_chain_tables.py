"""Chain tables of further replica counts: assignment of chains to targets, and refusals."""

from collections import Counter

import pytest
from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import GIB
from nvpool.poolmap.chains.placement import Spread, build_table
from nvpool.poolmap.chains.tables import with_table
from nvpool.poolmap.chains.transitions import joined, only_copies, shared
from nvpool.poolmap.model import Drive, Node, PoolMap, PoolSettings, Target, check_map


def a_pool(capacities, nodes=1):
    targets = tuple(
        Target(n, n, 1 + n % nodes, capacity * GIB, (f"inproc://{n}",))
        for n, capacity in enumerate(capacities, 1)
    )
    return PoolMap(
        2,
        "p",
        "p",
        1,
        PoolSettings(),
        tuple(Node(n, f"n{n}", "", ()) for n in range(1, nodes + 1)),
        tuple(Drive(t.drive, t.node, f"/d/{t.id}", t.capacity_bytes) for t in targets),
        targets,
        (build_table(targets, 1),),
    )


def whole(pool_map, replicas):
    """The map after all targets have joined."""
    for target in pool_map.targets * replicas:
        chains = pool_map.table_by_id[replicas].chains
        pool_map = joined(
            pool_map, target.id, [(replicas, number, chain.epoch) for number, chain in enumerate(chains)]
        )
        pool_map = replace(
            pool_map,
            tables=tuple(
                replace(
                    table,
                    chains=tuple(
                        replace(chain, joining=tuple(t for t in chain.goal if t not in chain.targets))
                        for chain in table.chains
                    ),
                )
                for table in pool_map.tables
            ),
        )
    return pool_map


@pytest.mark.parametrize("replicas, nodes", [(2, 1), (2, 2), (3, 1), (3, 3)])
def test_new_table_is_spread_by_capacity_and_over_nodes(replicas, nodes):
    before = a_pool((4, 4, 4, 8, 8, 8), nodes)
    made = with_table(before, replicas, range(1, 7))
    assert not check_map(made) and [table.id for table in made.tables] == [1, replicas]
    assert made.tables[0] is before.tables[0]
    assert with_table(made, replicas, range(1, 7)) is made
    table = made.table_by_id[replicas]
    node = {target.id: target.node for target in made.targets}
    assert all(
        len(chain.targets) == 1 and {*chain.targets, *chain.joining} == set(chain.goal)
        for chain in table.chains
    )
    assert all(len({node[t] for t in chain.goal}) == min(replicas, nodes) for chain in table.chains)
    assert shared(made) == {1, 2, 3, 4, 5, 6}
    after = whole(made, replicas)
    assert all(
        len(chain.targets) == replicas and not chain.goal for chain in after.table_by_id[replicas].chains
    )
    held = Counter(t for chain in after.table_by_id[replicas].chains for t in chain.targets)
    quota = Spread(after.targets, after.nodes, replicas).quota
    assert all(abs(held[t.id] - quota[t.id]) < 3 for t in after.targets)


def test_new_table_of_one_replica_is_complete():
    before = a_pool((4, 4))
    before = replace(before, tables=(build_table(before.targets, 2),))
    made = with_table(before, 1, (1, 2))
    assert [table.id for table in made.tables] == [1, 2]
    assert all(not chain.goal and not chain.joining for chain in made.table_by_id[1].chains)
    assert only_copies(made, 1, 2) == 0 and only_copies(made, 1) == only_copies(made, 1, 1) == 512


def test_new_chains_start_with_serving_targets():
    made = with_table(a_pool((4, 4, 4)), 2, (2, 3))
    for chain in made.table_by_id[2].chains:
        assert chain.targets[0] != 1 and 1 not in chain.joining and len(chain.goal) == 2


@pytest.mark.parametrize(
    "capacities, nodes, replicas, remedy",
    [
        ((4,), 1, 2, "drive add"),
        ((4, 4), 1, 3, "drive add"),
        ((4, 4, 4, 4), 2, 3, "node token POOL"),
        ((4, 4), 1, 4, "1 to 3"),
        ((4, 4), 1, 0, "1 to 3"),
    ],
)
def test_too_few_drives_or_nodes_are_refused_with_the_remedy(capacities, nodes, replicas, remedy):
    with pytest.raises(InvalidRequest, match=remedy):
        with_table(a_pool(capacities, nodes), replicas, range(1, 9))


def test_drained_drives_do_not_count():
    before = a_pool((4, 4))
    before = replace(before, targets=(before.targets[0], replace(before.targets[1], desired_state="drain")))
    with pytest.raises(InvalidRequest, match="drive add"):
        with_table(before, 2, (1, 2))
