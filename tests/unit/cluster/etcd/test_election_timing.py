"""Election timing of the leader, from the heartbeats that one candidate sees, on a counted clock."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.cluster.etcd.election_timing import ElectionTiming, LeaderHeartbeat

MINE = LeaderHeartbeat("1", 5, 5, 2.0, "token")


def test_leader_is_known_until_its_lease_ends():
    one = ElectionTiming()
    assert one.free_in_s(100.0) == 0 and one.leader(100.0) is None and one.former() is None
    assert one.see(MINE, 100.0)
    assert one.free_in_s(100.5) == 1.5 and one.leader(101.9) == "1"
    assert not one.see(MINE, 101.0), "a second read of the same heartbeat is no new heartbeat"
    assert one.free_in_s(102.0) == 0 and one.leader(102.0) is None and one.former() == "1"
    assert not one.see(LeaderHeartbeat("1", 5, 6, 2.0, "token"), 102.5), "the same leader"
    assert one.free_in_s(102.5) == 2.0


def test_released_leadership_leaves_no_former_leader():
    one = ElectionTiming()
    one.see(MINE, 100.0)
    assert one.see(LeaderHeartbeat(), 100.1)
    assert one.free_in_s(100.1) == 0 and one.former() is None


def test_last_heartbeat_gives_the_time_of_the_former_leader():
    one = ElectionTiming()
    assert one.led_s(100.0) == 0
    one.see(MINE, 100.0)
    one.see(LeaderHeartbeat("1", 5, 6, 2.0, "token", 7.5), 100.4)
    assert one.former() == "1" and one.led_s(102.9) == pytest.approx(10.0)
    one.has_ended("token", None)
    assert one.led_s(102.9) == 0, "leadership before the ended one does not count"
    one.see(LeaderHeartbeat(), 100.5)
    assert one.led_s(102.9) == 0


def test_leadership_without_a_lease_is_waited_for():
    one = ElectionTiming()
    one.see(LeaderHeartbeat("1", 5), 100.0)
    assert one.free_in_s(1e9) == inf and one.leader(1e9) == "1"


def test_own_ended_leadership_is_not_waited_for():
    one = ElectionTiming()
    one.see(MINE, 100.0)
    one.has_ended("token", "1")
    assert one.free_in_s(100.0) == 0 and one.leader(100.0) is None and one.former() == "1"
    one.has_ended("attempt", None)  # perhaps it has started; before it the leadership was released
    assert one.former() == "1"
    one.see(LeaderHeartbeat("1", 7, 7, 2.0, "attempt"), 100.1)
    assert one.free_in_s(100.1) == 0 and one.former() is None
    one.see(LeaderHeartbeat("2", 8, 8, 2.0, "another"), 100.2)
    assert one.free_in_s(100.2) == 2.0


def test_former_process_of_the_own_node_is_not_waited_for():
    one = ElectionTiming("1")
    one.see(MINE, 100.0)
    assert one.free_in_s(100.0) == 0 and one.leader(100.0) is None and one.former() is None
    one.begins("again")
    one.see(LeaderHeartbeat("1", 9, 9, 2.0, "again"), 100.1)
    assert one.free_in_s(100.1) == 2.0 and one.leader(100.1) == "1", "this leadership is ours and active"
    one.begins("later")  # it has ended, and its end could not be reported
    assert one.free_in_s(100.2) == 0 and one.former() is None
    one.see(LeaderHeartbeat("2", 10, 10, 2.0, "token"), 100.2)
    assert one.free_in_s(100.2) == 2.0, "the name of another node"
    one.see(LeaderHeartbeat("1", 11), 100.3)
    assert one.free_in_s(100.3) == inf, "a leadership of an earlier version ends by other means"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3), st.booleans()), max_size=20), st.floats(0.95, 1.05)
)
def test_election_waits_for_the_end_of_the_leaders_lease(signs, rate):
    """Heartbeats are sent, written and seen with any delays; the leader's clock runs at another rate."""
    one, now_s, ends_s = ElectionTiming(), 0.0, 0.0
    for number, (pause_s, delay_s, answered) in enumerate(signs, 1):
        sent_s = now_s + pause_s
        now_s = sent_s + delay_s
        one.see(LeaderHeartbeat("1", 1, number, 2.0, "token"), now_s)
        if answered and delay_s * rate < 1.0:
            ends_s = sent_s + 2.0 * 0.95 / rate
    assert now_s + one.free_in_s(now_s) >= ends_s
