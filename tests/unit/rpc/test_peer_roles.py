"""Roles of peers by certificate and by credentials."""

import os

import pytest

from nvpool.core.names import member_in, new_member, uri_of, user_in
from nvpool.rpc.peer_roles import Credentials, Peer, Role, acts_as, role_of

OPERATORS = 4711
OTHER_UID = os.geteuid() + 1000


@pytest.mark.parametrize(
    ("member", "credentials", "role"),
    [
        ("node/alpha", None, Role.NODE),
        ("client/alpha.1", None, Role.CLIENT),
        ("", None, Role.NODE),
        ("", Credentials(0, frozenset((0,)), 1), Role.NODE),
        ("", Credentials(os.geteuid(), frozenset((5,)), 1), Role.NODE),
        ("", Credentials(OTHER_UID, frozenset((5,)), 1), Role.USER),
        ("", Credentials(OTHER_UID, frozenset((5, OPERATORS)), 1), Role.NODE),
        ("client/alpha.1", Credentials(0, frozenset((0,)), 1), Role.CLIENT),
    ],
)
def test_role_follows_certificate_then_credentials(member, credentials, role):
    assert role_of(Peer("name", "address", credentials is not None, member, credentials), OPERATORS) == role


def test_role_without_operator_group():
    assert role_of(Peer("name", "unix", True, "", Credentials(OTHER_UID, frozenset((5,)), 1))) == Role.USER


@pytest.mark.parametrize(
    ("member", "credentials", "user"),
    [
        ("client/a.0a1b2c3d.u1000-50", None, (1000, {50})),
        ("client/a.0a1b2c3d", None, None),
        ("node/a.0a1b2c3d.u1000-50", None, None),
        ("client/a.u1000-50", None, None),
        ("", None, None),
        ("", Credentials(0, frozenset((0,)), 1), None),
        ("", Credentials(OTHER_UID, frozenset((5, 6)), 1), (OTHER_UID, {5, 6})),
        ("", Credentials(OTHER_UID, frozenset((OPERATORS,)), 1), None),
    ],
)
def test_only_bound_peers_act_as_one_user(member, credentials, user):
    found = acts_as(Peer("name", "address", credentials is not None, member, credentials), OPERATORS)
    assert (found and (found.uid, found.gids)) == user


def test_members_name_the_user_they_act_as():
    bound = new_member("client", "evil.u0-0", acts_as=(1000, 50))
    assert user_in(bound) == (1000, 50) and user_in(new_member("client", "evil.u0-0")) is None
    assert member_in(uri_of("p", bound)) == ("p", bound)
