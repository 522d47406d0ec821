"""The judges of simulated histories say what a search over all orders says."""

from __future__ import annotations

from itertools import permutations
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.testing.sim.linear import INITIAL, Access, NameCall, names_problems, register_problems


def explained(accesses: list[Access]) -> bool:
    """By trying all orders that respect time; writes of unknown outcome may be left out."""
    unknown = [a for a in accesses if a.kind == "write" and a.end == inf]
    for chosen in range(1 << len(unknown)):
        left_out = [a for place, a in enumerate(unknown) if chosen >> place & 1]
        for order in permutations([a for a in accesses if a not in left_out]):
            value = INITIAL
            if any(later.end < earlier.begin for place, earlier in enumerate(order) for later in order[place + 1:]):
                continue
            for access in order:
                if access.kind == "write":
                    value = access.value
                elif access.value != value:
                    break
            else:
                return True
    return False


@st.composite
def histories(draw):
    count = draw(st.integers(1, 5))
    accesses, value = [], 0
    for _ in range(count):
        begin = draw(st.integers(0, 12))
        end = begin + 0.5 + draw(st.integers(0, 6))
        if draw(st.booleans()):
            value += 1
            accesses.append(Access("write", value, begin, draw(st.sampled_from((end, end, inf)))))
        else:
            accesses.append(Access("read", draw(st.integers(0, 3)), begin, end))
    return [a for a in accesses if a.kind == "write" or a.value <= value]


@settings(max_examples=600, deadline=None)
@given(histories())
def test_registers_are_judged_as_by_trying_all_orders(history):
    assert (not register_problems(history)) == explained(history)


def test_a_register_that_forgets_what_was_acknowledged_is_found():
    history = [Access("write", 1, 0, 1), Access("read", 1, 2, 3), Access("read", 0, 4, 5)]
    assert register_problems(history)
    assert not register_problems(history[:2])


def call(kind, name, outcome, begin, end, other=b"") -> NameCall:
    return NameCall(kind, name, other, outcome, begin, end)


def test_two_creates_of_a_name_that_both_succeed_are_found():
    both = [call("create", b"a", "ok", 0, 5), call("create", b"a", "ok", 1, 4)]
    assert names_problems(both)
    between = [*both, call("unlink", b"a", "ok", 2, 3)]
    assert not names_problems(between)
    assert names_problems([*both, call("unlink", b"a", "ok", 6, 7)])


def test_a_rename_never_shows_both_names_or_none():
    history = [call("create", b"a", "ok", 0, 1), call("rename", b"a", "ok", 2, 9, b"b")]
    for seen_a, seen_b, fine in (("ok", "missing", True), ("missing", "ok", True), ("missing", "missing", False)):
        looked = [call("lookup", b"a", seen_a, 3, 4), call("lookup", b"b", seen_b, 5, 6)]
        assert (not names_problems([*history, *looked])) == fine
    backwards = [call("lookup", b"b", "ok", 3, 4), call("lookup", b"a", "ok", 5, 6)]
    assert names_problems([*history, *backwards])


def test_what_nobody_knows_the_outcome_of_may_have_happened_or_not_and_the_end_says():
    history = [call("create", b"a", "ok", 0, 1), call("unlink", b"a", None, 2, inf)]
    assert not names_problems(history, frozenset())
    assert not names_problems(history, frozenset([b"a"]))
    assert names_problems(history, frozenset([b"b"]))
    assert names_problems(history[:1], frozenset())
