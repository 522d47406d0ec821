"""Targets that are taken out when links between nodes are broken."""

import pytest
from msgspec.structs import replace

from nvpool.poolmap.chains.transitions import died
from nvpool.poolmap.nodes.link_failures import cut_off, is_replaceable
from tests.unit.poolmap.chains.test_chain_placement import a_pool

POOL = a_pool((4,) * 6, 2)
POOL = replace(
    POOL, targets=tuple(replace(target, node=1 + number // 2) for number, target in enumerate(POOL.targets))
)
"""Targets 1 and 2 on node 1, 3 and 4 on node 2, 5 and 6 on node 3."""


@pytest.mark.parametrize(
    "reports, before, expected",
    [
        ({}, (), ()),
        ({3: (5,)}, (), (5,)),  # the reported target
        ({5: (3,), 6: (3, 4)}, (), (3, 4)),
        ({3: (5,), 5: (3,)}, (), (5,)),  # both reported: the node with the higher number
        ({3: (5,), 5: (3,)}, (3,), (3,)),  # the same target as before
        ({1: (5,), 3: (5,), 5: (1, 3)}, (), (5,)),  # the node with more broken links
        ({1: (3,), 3: (1,), 5: (3,)}, (), (3,)),
        ({1: (2,), 3: (99,)}, (), ()),  # no link: the same node, and a target that does not exist
    ],
)
def test_targets_of_one_node_are_cut_off(reports, before, expected):
    assert cut_off(POOL, reports, before) == frozenset(expected)


def test_only_copy_is_not_replaceable():
    alone = died(a_pool((4, 4), 2), {2})
    assert is_replaceable(a_pool((4, 4), 2), 1) and not is_replaceable(alone, 1)
