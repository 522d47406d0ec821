"""OrderedKeys is a sorted set, and a memtable is a dict that can be scanned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.kv import memtable
from nvpool.kv.memtable import Layer, OrderedKeys

KEY = st.binary(max_size=2)


@pytest.fixture(autouse=True, scope="module")
def _small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memtable, "BUCKET_KEYS", 3)
        yield


def same(keys, expected, first, end):
    within = sorted(key for key in expected if first <= key < end)
    assert list(keys.ascend(first, end)) == within
    assert list(keys.descend(first, end)) == within[::-1]


@given(st.sets(KEY), st.lists(st.tuples(st.booleans(), KEY)), KEY, KEY)
def test_keys_stay_in_order_when_added_and_removed(initial, changes, first, end):
    keys, expected = OrderedKeys(initial), set(initial)
    for add, key in changes:
        if add and key not in expected:
            keys.add(key)
            expected.add(key)
        elif not add and key in expected:
            keys.remove(key)
            expected.remove(key)
    same(keys, expected, first, end)
    same(keys, expected, b"", b"\xff" * 3)


@given(st.lists(st.dictionaries(KEY, st.none() | st.binary(max_size=1), max_size=90), max_size=5), KEY, KEY)
def test_memtable_scans_all_keys_in_order_after_changes(changes, first, end):
    layer = Layer()
    for change in changes:
        layer.values.update(change)
        same(layer, layer.values, first, end)
        same(layer, layer.values, b"", b"\xff" * 3)
