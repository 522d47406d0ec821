"""Revocation of volume rights in the pool map: which access tokens are refused, and for how long."""

import pytest
from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.grants import EPOCH_MASK, READ, SERVICE, WRITE, Grant, member_tag, read, sign, volume_tag
from nvpool.poolmap.grant_revocation import TAKEN_MAX, RevokedRights, taken, without_ended
from nvpool.poolmap.model import MAP_FORMAT, PoolMap, PoolSettings

NOW_MS, LIFE_MS = 1_700_000_000_000, 130_000
ONE, OTHER = "client/one.0a1b2c3d", "client/other.0a1b2c3d"
VOLUME, ANOTHER = 1 << 51 | 7, 2 << 51 | 9


def a_map(epoch=7):
    return PoolMap(MAP_FORMAT, "p", "p", epoch, PoolSettings())


def grant(epoch, volume=VOLUME, member=ONE, rights=READ):
    return Grant(
        rights, 0, 1, 5, 0, NOW_MS + LIFE_MS, 1, epoch & EPOCH_MASK, volume_tag(volume), member_tag(member)
    )


def refuses(pool_map, *grants, now_ms=NOW_MS):
    found = RevokedRights(pool_map.rights_taken, now_ms)
    return [found.refuses(one) for one in grants]


def test_token_keeps_epoch_and_tags():
    one = grant(0x123456, rights=READ | WRITE)
    assert read(sign(one, b"k" * 32)) == one
    assert read(sign(one._replace(epoch=0, volume=0, member=0, table=3), b"k" * 32)).table == 3


def test_older_token_of_member_is_refused():
    new = taken(a_map(), VOLUME, ONE, READ | WRITE, NOW_MS, LIFE_MS)
    assert new.epoch == 8
    assert refuses(new, grant(7), grant(3), grant(8), grant(9)) == [True, True, False, False]
    assert refuses(new, grant(7, member=OTHER), grant(7, member=""), grant(7, volume=ANOTHER)) == [False] * 3


def test_write_right_can_be_revoked_alone():
    new = taken(a_map(), VOLUME, ONE, WRITE, NOW_MS, LIFE_MS)
    assert refuses(new, grant(7), grant(7, rights=READ | WRITE)) == [False, True]


def test_revocation_without_a_name_applies_to_all_members():
    new = taken(a_map(), VOLUME, "", READ | WRITE, NOW_MS, LIFE_MS)
    assert refuses(new, grant(7), grant(7, member=""), grant(8), grant(7, volume=ANOTHER)) == [
        True,
        True,
        False,
        False,
    ]


def test_tokens_outside_of_volumes_are_never_refused():
    new = taken(a_map(), 0, "", READ | WRITE, NOW_MS, LIFE_MS)
    assert refuses(new, grant(3, volume=0, member=""), Grant(SERVICE, 0, 1, 0, 0, NOW_MS)) == [False, False]
    assert refuses(new, grant(7, volume=ANOTHER)) == [True]


def test_epochs_are_compared_beyond_their_24_bits():
    new = taken(a_map(EPOCH_MASK), VOLUME, ONE, READ, NOW_MS, LIFE_MS)
    assert new.epoch == EPOCH_MASK + 1
    assert refuses(new, grant(EPOCH_MASK - 5), grant(EPOCH_MASK + 1), grant(EPOCH_MASK + 9)) == [
        True,
        False,
        False,
    ]


def test_entry_ends_with_the_tokens_before_it():
    new = taken(a_map(), VOLUME, ONE, READ, NOW_MS, LIFE_MS)
    assert without_ended(new, NOW_MS + LIFE_MS - 1) is new
    assert without_ended(new, NOW_MS + LIFE_MS) == replace(new, rights_taken=())
    assert refuses(new, grant(7), now_ms=NOW_MS + LIFE_MS) == [False]
    assert not RevokedRights(new.rights_taken, NOW_MS + LIFE_MS) and RevokedRights(new.rights_taken, NOW_MS)
    later = taken(new, ANOTHER, OTHER, READ, NOW_MS + LIFE_MS, LIFE_MS)
    assert [one.volume for one in later.rights_taken] == [ANOTHER]


def test_right_revoked_twice_is_one_entry():
    new = taken(a_map(), VOLUME, ONE, READ, NOW_MS, LIFE_MS)
    again = taken(new, VOLUME, ONE, WRITE, NOW_MS + 1000, 1000)
    (entry,) = again.rights_taken
    assert (entry.epoch, entry.rights, entry.until_ms) == (9, READ | WRITE, NOW_MS + LIFE_MS)


def test_many_entries_become_one_for_all_volumes():
    new = a_map()
    for number in range(TAKEN_MAX):
        new = taken(new, VOLUME + number, ONE, READ, NOW_MS, LIFE_MS + number)
    assert len(new.rights_taken) == TAKEN_MAX
    new = taken(new, ANOTHER, ONE, READ, NOW_MS, LIFE_MS)
    (entry,) = new.rights_taken
    assert entry.until_ms == NOW_MS + LIFE_MS + TAKEN_MAX - 1 and entry.epoch == new.epoch
    assert refuses(new, grant(7), grant(7, member=OTHER, volume=VOLUME + 3), grant(new.epoch)) == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        (VOLUME, "one", READ, LIFE_MS),
        (VOLUME, ONE, 0, LIFE_MS),
        (VOLUME, ONE, SERVICE, LIFE_MS),
        (VOLUME, ONE, READ, 0),
        (VOLUME, ONE, READ, 1 << 40),
        (-1, ONE, READ, LIFE_MS),
    ],
)
def test_invalid_revocation_is_refused(wrong):
    volume, member, rights, life_ms = wrong
    with pytest.raises(InvalidRequest):
        taken(a_map(), volume, member, rights, NOW_MS, life_ms)
