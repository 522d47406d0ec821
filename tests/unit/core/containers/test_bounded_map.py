"""Bounded dictionaries: the oldest entries are dropped first, and never too many."""

import pytest

from nvpool.core.containers.bounded_map import too_old


@pytest.mark.parametrize("count_max", [1, 2, 15, 16, 100, 4096])
def test_oldest_entries_are_dropped_and_the_bound_holds(count_max):
    entries = {}
    for number in range(3 * count_max):
        entries[number] = None
        for old in too_old(entries, count_max):
            del entries[old]
        assert len(entries) <= count_max and next(reversed(entries)) == number
        assert list(entries) == list(range(number + 1 - len(entries), number + 1))
        assert len(entries) >= min(number + 1, count_max - (count_max >> 4))


def test_no_entry_is_dropped_below_the_bound():
    assert list(too_old({1: None, 2: None}, 2)) == []


def test_too_large_a_batch_is_trimmed_in_one_call():
    entries = dict.fromkeys(range(1000))
    assert list(too_old(entries, 160)) == list(range(850))
