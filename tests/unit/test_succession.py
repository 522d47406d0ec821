"""Who may lead next, by the signs of life that one candidate sees; on counted time."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.cluster.etcd.election_timing import Sign, Succession

MINE = Sign("1", 5, 5, 2.0, "token")


def test_nobody_leads_in_the_beginning_and_who_leads_does_until_his_lease_is_over_from_when_it_was_seen():
    one = Succession()
    assert one.free_in_s(100.0) == 0 and one.leader(100.0) is None and one.former() is None
    assert one.see(MINE, 100.0)
    assert one.free_in_s(100.5) == 1.5 and one.leader(101.9) == "1"
    assert not one.see(MINE, 101.0), "the same sign, looked at once more, is no sign of life"
    assert one.free_in_s(102.0) == 0 and one.leader(102.0) is None and one.former() == "1"
    assert not one.see(Sign("1", 5, 6, 2.0, "token"), 102.5), "the same one leads"
    assert one.free_in_s(102.5) == 2.0


def test_of_who_has_given_the_lead_up_it_is_not_known_what_he_has_lent():
    one = Succession()
    one.see(MINE, 100.0)
    assert one.see(Sign(), 100.1)
    assert one.free_in_s(100.1) == 0 and one.former() is None


def test_last_sign_says_for_how_long_the_former_has_led():
    one = Succession()
    assert one.led_s(100.0) == 0
    one.see(MINE, 100.0)
    one.see(Sign("1", 5, 6, 2.0, "token", 7.5), 100.4)
    assert one.former() == "1" and one.led_s(102.9) == pytest.approx(10.0)
    one.has_ended("token", None)
    assert one.led_s(102.9) == 0, "what was before it is followed"
    one.see(Sign(), 100.5)
    assert one.led_s(102.9) == 0


def test_one_whose_lead_ends_by_other_means_is_waited_for_until_it_has():
    one = Succession()
    one.see(Sign("1", 5), 100.0)
    assert one.free_in_s(1e9) == inf and one.leader(1e9) == "1"


def test_ones_own_reign_that_is_over_is_not_waited_for_and_what_was_before_it_is_not_forgotten():
    one = Succession()
    one.see(MINE, 100.0)
    one.has_ended("token", "1")
    assert one.free_in_s(100.0) == 0 and one.leader(100.0) is None and one.former() == "1"
    one.has_ended("attempt", None)  # perhaps it has begun; before it the lead had been given up
    assert one.former() == "1"
    one.see(Sign("1", 7, 7, 2.0, "attempt"), 100.1)
    assert one.free_in_s(100.1) == 0 and one.former() is None
    one.see(Sign("2", 8, 8, 2.0, "another"), 100.2)
    assert one.free_in_s(100.2) == 2.0


def test_a_process_that_led_under_a_name_that_is_ours_alone_is_not_waited_for_and_may_have_lent_of_its_time():
    one = Succession("1")
    one.see(MINE, 100.0)
    assert one.free_in_s(100.0) == 0 and one.leader(100.0) is None and one.former() is None
    one.begins("again")
    one.see(Sign("1", 9, 9, 2.0, "again"), 100.1)
    assert one.free_in_s(100.1) == 2.0 and one.leader(100.1) == "1", "this one is ours and lives"
    one.begins("later")  # it is over, and its end could not be told
    assert one.free_in_s(100.2) == 0 and one.former() is None
    one.see(Sign("2", 10, 10, 2.0, "token"), 100.2)
    assert one.free_in_s(100.2) == 2.0, "another's name"
    one.see(Sign("1", 11), 100.3)
    assert one.free_in_s(100.3) == inf, "an earlier version's ends by other means"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3), st.booleans()), max_size=20), st.floats(0.95, 1.05)
)
def test_nobody_follows_before_the_lease_of_who_leads_has_ended_by_his_own_clock(signs, rate):
    """Signs are sent, written and seen with any delays; the leader's clock goes at another rate."""
    one, now_s, ends_s = Succession(), 0.0, 0.0
    for number, (pause_s, delay_s, answered) in enumerate(signs, 1):
        sent_s = now_s + pause_s
        now_s = sent_s + delay_s
        one.see(Sign("1", 1, number, 2.0, "token"), now_s)
        if answered and delay_s * rate < 1.0:
            ends_s = sent_s + 2.0 * 0.95 / rate
    assert now_s + one.free_in_s(now_s) >= ends_s
