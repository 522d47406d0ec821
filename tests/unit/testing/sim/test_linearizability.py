"""The checkers of simulated histories agree with a search of all orders."""

from __future__ import annotations

from itertools import permutations
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.testing.sim.linearizability import (
    INITIAL,
    NameCall,
    RegisterOperation,
    SizeCall,
    names_problems,
    register_problems,
    sizes_problems,
    without_looks_at_unanswered_cuts,
    without_what_was_seen_too_early,
)
from nvpool.testing.sim.workloads.file_data import AppendedRecord, records_problems


def explained(accesses: list[RegisterOperation]) -> bool:
    """Try all orders that respect time; writes of unknown outcome may be left out."""
    unknown = [a for a in accesses if a.kind == "write" and a.end == inf]
    for chosen in range(1 << len(unknown)):
        left_out = [a for place, a in enumerate(unknown) if chosen >> place & 1]
        for order in permutations([a for a in accesses if a not in left_out]):
            value = INITIAL
            if any(
                later.end < earlier.begin
                for place, earlier in enumerate(order)
                for later in order[place + 1 :]
            ):
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
            accesses.append(RegisterOperation("write", value, begin, draw(st.sampled_from((end, end, inf)))))
        else:
            accesses.append(RegisterOperation("read", draw(st.integers(0, 3)), begin, end))
    return [a for a in accesses if a.kind == "write" or a.value <= value]


@settings(max_examples=600, deadline=None)
@given(histories())
def test_register_checker_equals_a_search_of_all_orders(history):
    assert (not register_problems(history)) == explained(history)


def test_lost_acknowledged_write_is_found():
    history = [
        RegisterOperation("write", 1, 0, 1),
        RegisterOperation("read", 1, 2, 3),
        RegisterOperation("read", 0, 4, 5),
    ]
    assert register_problems(history)
    assert not register_problems(history[:2])


def call(kind, name, outcome, begin, end, other=b"", inode=7, links=1) -> NameCall:
    return NameCall(kind, name, other, outcome, begin, end, "", inode, links)


def test_two_successful_creates_of_a_name_are_found():
    both = [call("create", b"a", "ok", 0, 5), call("create", b"a", "ok", 1, 4)]
    assert names_problems(both)
    between = [*both, call("unlink", b"a", "ok", 2, 3)]
    assert not names_problems(between)
    assert names_problems([*both, call("unlink", b"a", "ok", 6, 7)])


def test_rename_never_shows_both_names_or_none():
    history = [call("create", b"a", "ok", 0, 1), call("rename", b"a", "ok", 2, 9, b"b")]
    for seen_a, seen_b, fine in (
        ("ok", "missing", True),
        ("missing", "ok", True),
        ("missing", "missing", False),
    ):
        looked = [call("lookup", b"a", seen_a, 3, 4), call("lookup", b"b", seen_b, 5, 6)]
        assert (not names_problems([*history, *looked])) == fine
    backwards = [call("lookup", b"b", "ok", 3, 4), call("lookup", b"a", "ok", 5, 6)]
    assert names_problems([*history, *backwards])


def test_unknown_outcome_may_have_happened_or_not():
    history = [call("create", b"a", "ok", 0, 1), call("unlink", b"a", None, 2, inf)]
    assert not names_problems(history, frozenset())
    assert not names_problems(history, frozenset([(b"a", 7)]))
    assert names_problems(history, frozenset([(b"b", 7)]))
    assert names_problems(history[:1], frozenset())


def test_links_are_counted_and_rename_onto_a_link_is_a_no_op():
    made = [call("create", b"a", "ok", 0, 1), call("link", b"b", "ok", 2, 3)]
    assert not names_problems([*made, call("lookup", b"a", "ok", 4, 5, links=2)])
    assert names_problems([*made, call("lookup", b"a", "ok", 4, 5, links=1)])
    same = [*made, call("replace", b"a", "ok", 4, 5, b"b")]
    assert not names_problems(same, frozenset([(b"a", 7), (b"b", 7)]))
    assert names_problems(same, frozenset([(b"b", 7)]))
    other = [
        call("create", b"a", "ok", 0, 1),
        call("create", b"b", "ok", 2, 3, inode=8),
        call("replace", b"a", "ok", 4, 5, b"b"),
    ]
    assert not names_problems(other, frozenset([(b"b", 7)]))
    assert names_problems(other, frozenset([(b"b", 8)]))
    gone = [
        call("create", b"a", "ok", 0, 1),
        call("unlink", b"a", "ok", 2, 3),
        call("link", b"b", "ok", 4, 5),
    ]
    assert names_problems(gone) and not names_problems([*gone[:2], call("link", b"b", "missing", 4, 5)])


def test_unanswered_create_gets_the_inode_found_later():
    made = call("create", b"a", None, 0, inf, inode=0)
    seen = [call("lookup", b"a", "ok", 1, 2, inode=9), call("lookup", b"a", "ok", 3, 4, inode=9)]
    assert not names_problems([made, *seen], frozenset([(b"a", 9)]))
    assert names_problems([made, seen[0], call("lookup", b"a", "ok", 3, 4, inode=10)])
    assert not names_problems([made], frozenset([(b"a", 9)])) and not names_problems([made], frozenset())


def test_truncated_register_is_checked():
    history = [
        RegisterOperation("write", 1, 0, 1),
        RegisterOperation("write", INITIAL, 2, 3),
        RegisterOperation("read", INITIAL, 4, 5),
    ]
    assert not register_problems(history)
    assert register_problems([*history, RegisterOperation("read", 1, 6, 7)])
    assert not register_problems(
        [history[0], RegisterOperation("write", INITIAL, 2, inf), RegisterOperation("read", 1, 6, 7)]
    )


def test_size_is_the_largest_write_since_the_truncation():
    history = [SizeCall("write", 50, 0, 1), SizeCall("cut", 20, 2, 3), SizeCall("write", 10, 4, 5)]
    assert not sizes_problems([*history, SizeCall("look", 20, 6, 7)])
    assert sizes_problems([*history, SizeCall("look", 50, 6, 7)]) and sizes_problems(
        [*history, SizeCall("look", 10, 6, 7)]
    )


def test_records_do_not_overlap_and_keep_their_order():
    first, second = AppendedRecord(b"<one>", 0, 1, "a"), AppendedRecord(b"<two>", 2, 3, "b")
    assert not records_problems(b"<one><two>", [first, second])
    assert records_problems(b"<one>\0\0\0<two>", [first, second])
    assert not records_problems(b"<one>\0\0\0<two>", [first, second, AppendedRecord(b"<lost>", 2, inf, "b")])
    assert records_problems(b"<two><one>", [first, second])
    assert records_problems(b"<on<two>", [first, second]) and records_problems(
        b"<one><one><two>", [first, second]
    )
    assert records_problems(b"<one>noise<two>", [first, second])
    assert not records_problems(b"<one>", [first, AppendedRecord(b"<two>", 2, inf, "b")])


def test_read_overtaken_by_power_loss_is_ignored():
    write, seen, later = (
        RegisterOperation("write", 1, 0, 9),
        RegisterOperation("read", 1, 1, 2),
        RegisterOperation("read", INITIAL, 6, 7),
    )
    assert register_problems([write, seen, later])
    kept = without_what_was_seen_too_early([write, seen, later], [5], lambda access: access.kind == "write")
    assert kept == [write, later] and not register_problems(kept)
    assert seen in without_what_was_seen_too_early(
        [write, seen, later], [12], lambda access: access.kind == "write"
    )


def test_look_at_an_unanswered_truncation_orders_no_writes():
    cut, look = SizeCall("cut", 10, 1, 9, "one"), SizeCall("look", 10, 3, 4, "three")
    written, seen = SizeCall("write", 50, 5, 9.1, "two"), SizeCall("look", 10, 20, 21, "judge")
    calls = [SizeCall("write", 20, 0, 0.5, "two"), cut, look, written, seen]
    assert sizes_problems(calls)
    assert not sizes_problems(without_looks_at_unanswered_cuts(calls))
    by_itself = [one._replace(who="one") if one is written else one for one in calls]
    assert without_looks_at_unanswered_cuts(by_itself) == by_itself and sizes_problems(by_itself)
    later = [one._replace(begin=9.05) if one is written else one for one in calls]
    assert without_looks_at_unanswered_cuts(later) == later and sizes_problems(later)
