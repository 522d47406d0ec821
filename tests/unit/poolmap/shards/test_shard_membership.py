"""Changes of a shard's members in the pool map."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.core.errors import InvalidRequest, StaleMember, StaleTerm, Unavailable
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Node,
    PoolMap,
    PoolSettings,
    Shard,
    StandbyMember,
    decode_map,
    encode_map,
)
from nvpool.poolmap.shards import members as shard_members


def a_map(*states):
    standbys = tuple(
        StandbyMember(number, 1, (f"stream://h:{number}",), state, f"/d{number}")
        for number, state in enumerate(states, 1)
    )
    shard = Shard(1, 1, ("stream://h:100",), 7, path="/d0", epoch=20, standbys=standbys)
    return PoolMap(
        MAP_FORMAT, "p", "p", 1, PoolSettings(), (Node(1, "n", "", ()),), shards=(shard, Shard(2, 1, ()))
    )


def test_shard_with_standbys_is_encoded_as_json():
    there = a_map("up", "syncing")
    assert decode_map(encode_map(there)) == there
    assert msgspec.json.encode(there.shards[0]) == (
        b'{"id":1,"node":1,"endpoints":["stream://h:100"],"term":7,"state":"up","member":0,"path":"/d0","epoch":20,"standbys":['
        b'{"member":1,"node":1,"endpoints":["stream://h:1"],"state":"up","path":"/d1"},'
        b'{"member":2,"node":1,"endpoints":["stream://h:2"],"state":"syncing","path":"/d2"}],"wish":"share","standbys_wanted":null}'
    )


def test_lost_primary_is_followed_by_the_first_up_standby():
    new = shard_members.primary_lost(a_map("syncing", "up", "up"), 1).shard_by_id[1]
    assert (new.member, new.endpoints, new.path, new.term, new.epoch) == (2, ("stream://h:2",), "/d2", 8, 21)
    assert [(other.member, other.state) for other in new.standbys] == [
        (1, "syncing"),
        (3, "up"),
        (0, "syncing"),
    ]
    assert new.standbys[-1].endpoints == ("stream://h:100",) and new.standbys[-1].path == "/d0"
    assert (
        shard_members.primary_lost(a_map("syncing", "syncing"), 1) is None
        and shard_members.primary_lost(a_map(), 1) is None
    )


def test_restarting_primary_yields_to_an_up_standby():
    assert shard_members.primary_began(a_map("up"), 1, 0).shard_by_id[1].member == 1
    alone = shard_members.primary_began(a_map("syncing"), 1, 0).shard_by_id[1]
    assert (alone.member, alone.term, alone.epoch) == (0, 8, 21)
    with pytest.raises(StaleTerm):
        shard_members.primary_began(a_map("up"), 1, 1)


def test_proven_primary_does_not_wait_for_a_silent_standby():
    """A standby that replies still succeeds it; a proof of another term does not count."""
    there = a_map("up", "syncing")
    for term in (0, 6, 8):
        with pytest.raises(Unavailable, match="may have changes"):
            shard_members.primary_began(there, 1, 0, (), whole_term=term)
    new = shard_members.primary_began(there, 1, 0, (), whole_term=7).shard_by_id[1]
    assert (new.member, new.term, shard_members.up_standbys(new)) == (0, 8, frozenset())
    assert shard_members.primary_began(there, 1, 0, (1,), whole_term=7).shard_by_id[1].member == 1


def test_late_request_to_reinstate_a_standby_is_refused():
    there = a_map("syncing")
    out = shard_members.standby_out(there, 1, 1, 7)
    assert (
        out.shard_by_id[1].epoch == 21
        and shard_members.standby_up(there, 1, 1, 7, 20).shard_by_id[1].standbys[0].state == "up"
    )
    with pytest.raises(StaleMember):
        shard_members.standby_up(out, 1, 1, 7, 20)
    for term, error in ((6, StaleTerm), (8, Unavailable)):
        with pytest.raises(error):
            shard_members.standby_up(there, 1, 1, term, 20)
        with pytest.raises(error):
            shard_members.standby_out(there, 1, 1, term)
    for make in (
        lambda: shard_members.standby_out(there, 1, 5, 7),
        lambda: shard_members.standby_out(there, 3, 1, 7),
        lambda: shard_members.standby_removed(there, 1, 0),
        lambda: shard_members.standby_added(there, 1, StandbyMember(0, 1, ())),
    ):
        with pytest.raises(InvalidRequest):
            make()


def test_members_are_added_and_removed():
    there = shard_members.standby_added(a_map(), 1, StandbyMember(3, 1, ("x",), "up"))
    assert there.shard_by_id[1].standbys == (StandbyMember(3, 1, ("x",), "syncing"),) and there.epoch == 2
    assert shard_members.members(there.shard_by_id[1]) == (0, 3) and shard_members.endpoints_of(
        there.shard_by_id[1], 3
    ) == ("x",)
    assert shard_members.standby_removed(there, 1, 3).shard_by_id[1].standbys == ()
    with pytest.raises(InvalidRequest):
        shard_members.standby_added(a_map("up"), 1, StandbyMember(9, 5, ()))  # on a node that does not exist


@given(
    st.lists(
        st.tuples(st.sampled_from(["up", "late up", "out", "lost", "began"]), st.integers(0, 3)), max_size=30
    )
)
def test_terms_and_epochs_grow_and_only_up_standbys_promote(steps):
    there, before = a_map("syncing", "syncing", "syncing"), 20
    for step, member in steps:
        was = there.shard_by_id[1]
        up = {standby.member for standby in was.standbys if standby.state == "up"}
        try:
            if step in ("up", "late up"):
                there = shard_members.standby_up(
                    there, 1, member, was.term, was.epoch if step == "up" else before
                )
            elif step == "out":
                there = shard_members.standby_out(there, 1, member, was.term)
            elif step == "lost":
                there = shard_members.primary_lost(there, 1) or there
            else:
                there = shard_members.primary_began(there, 1, member)
        except (InvalidRequest, StaleMember, StaleTerm):
            continue
        now = there.shard_by_id[1]
        assert sorted(shard_members.members(now)) == [0, 1, 2, 3]
        if now != was:
            assert now.epoch == was.epoch + 1 and now.term - was.term in (0, 1)
        if now.member != was.member:
            assert now.member in up and now.term == was.term + 1
        before = was.epoch
