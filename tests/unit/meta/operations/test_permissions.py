"""Permission rules of POSIX for an unprivileged user, as the manual pages define them."""

import stat

import pytest

from nvpool.core.errors import AccessDenied, NoAttribute, NotPermitted
from nvpool.core.posix import acl
from nvpool.core.posix.acl import AclEntry
from nvpool.meta.operations import permissions
from nvpool.meta.operations.permissions import READ, SEARCH, WRITE
from nvpool.meta.state.records import Inode
from nvpool.rpc.peer_roles import Credentials

US = Credentials(1000, frozenset({1000, 50}), 1)
OTHERS = Credentials(2000, frozenset({2000}), 1)
MEMBER = Credentials(3000, frozenset({3000, 50}), 1)


def file(mode=0o644, uid=1000, gid=50, kind=stat.S_IFREG):
    return Inode(7, kind | mode, uid=uid, gid=gid)


def allowed(inode, who, access=()):
    bits = {"r": READ, "w": WRITE, "x": SEARCH}
    return "".join(letter for letter, bit in bits.items() if permissions.may(inode, access, who, bit))


@pytest.mark.parametrize(
    "mode, owner, group, other",
    [
        (0o754, "rwx", "rx", "r"),
        (0o077, "", "rwx", "rwx"),
        (0o707, "rwx", "", "rwx"),
        (0o640, "rw", "r", ""),
        (0, "", "", ""),
        (0o421, "r", "w", "x"),
    ],
)
def test_mode_first_class_decides(mode, owner, group, other):
    inode = file(mode)
    assert (allowed(inode, US), allowed(inode, MEMBER), allowed(inode, OTHERS)) == (owner, group, other)
    assert permissions.may(file(0o600), (), US, READ | WRITE) and not permissions.may(
        file(0o400), (), US, READ | WRITE
    )


def listed(owner, group, other, mask, *named):
    return (
        AclEntry(acl.USER_OBJ, owner),
        *(one for one in named if one.tag == acl.USER),
        AclEntry(acl.GROUP_OBJ, group),
        *(one for one in named if one.tag == acl.GROUP),
        AclEntry(acl.MASK, mask),
        AclEntry(acl.OTHER, other),
    )


@pytest.mark.parametrize(
    "access, who, rights",
    [
        (listed(6, 0, 7, 7, AclEntry(acl.USER, 4, 2000)), OTHERS, "r"),  # a named user is not in class other
        (listed(6, 0, 7, 2, AclEntry(acl.USER, 6, 2000)), OTHERS, "w"),  # limited by the mask
        (listed(0, 7, 7, 7, AclEntry(acl.USER, 7, 1000)), US, ""),  # the owner's entry comes first
        (listed(7, 4, 7, 7), MEMBER, "r"),  # of the owning group: not the rights of class other
        (listed(7, 4, 0, 7, AclEntry(acl.GROUP, 2, 3000)), MEMBER, "rw"),  # each right by one of its groups
        (listed(7, 4, 0, 4, AclEntry(acl.GROUP, 2, 3000)), MEMBER, "r"),  # limited by the mask
        (
            listed(7, 0, 7, 7, AclEntry(acl.GROUP, 0, 2000)),
            OTHERS,
            "",
        ),  # a group without rights does not fall back to class other
        (listed(7, 7, 5, 7), OTHERS, "rx"),
    ],
)
def test_access_list_decides_as_acl_5_defines(access, who, rights):
    inode = file(acl.mode_of(access))
    assert allowed(inode, who, access) == rights


def test_access_list_needs_one_entry_for_all_rights():
    access = listed(7, 4, 0, 7, AclEntry(acl.GROUP, 2, 3000))
    assert not permissions.may(file(acl.mode_of(access)), access, MEMBER, READ | WRITE)


def test_access_list_with_empty_mask_is_ignored():
    access = listed(7, 7, 4, 0, AclEntry(acl.USER, 7, 2000))
    assert allowed(file(acl.mode_of(access)), OTHERS, access) == "r"


def test_sticky_directory_keeps_names_of_others():
    tmp = file(0o1777, uid=0, kind=stat.S_IFDIR)
    permissions.check_sticky(tmp, file(uid=1000), US)
    permissions.check_sticky(file(0o1777, uid=2000, kind=stat.S_IFDIR), file(uid=1000), OTHERS)
    permissions.check_sticky(file(0o777, uid=0, kind=stat.S_IFDIR), file(uid=1000), OTHERS)
    with pytest.raises(NotPermitted):
        permissions.check_sticky(tmp, file(uid=1000), OTHERS)


@pytest.mark.parametrize(
    "uid, gid, who, may",
    [
        (None, 50, US, True),
        (1000, None, US, True),
        (None, 1000, US, True),
        (None, 2000, US, False),
        (2000, None, US, False),
        (0, 0, US, False),
        (None, None, OTHERS, False),
        (2000, 2000, OTHERS, False),
    ],
)
def test_owner_may_chgrp_only_to_own_groups(uid, gid, who, may):
    if may:
        permissions.check_new_owner(file(), uid, gid, who)
        return
    with pytest.raises(NotPermitted):
        permissions.check_new_owner(file(), uid, gid, who)


@pytest.mark.parametrize(
    "gid, asked, kept", [(50, 0o2755, 0o2755), (2000, 0o2755, 0o755), (2000, 0o6711, 0o4711)]
)
def test_set_gid_is_set_by_members_of_the_group(gid, asked, kept):
    assert permissions.mode_to_set(gid, asked, US) == kept


@pytest.mark.parametrize(
    "kind, asked, parent, kept",
    [
        (stat.S_IFREG, 0o6755, 0o755, 0o6755),
        (stat.S_IFREG, 0o2755, 0o2775, 0o755),
        (stat.S_IFREG, 0o2744, 0o2775, 0o2744),
        (stat.S_IFDIR, 0o7777, 0o755, 0o1777),
        (stat.S_IFIFO, 0o644, 0o755, 0o644),
    ],
)
def test_mode_of_new_inodes_made_by_users(kind, asked, parent, kept):
    assert (
        permissions.mode_at_birth(file(parent, gid=2000, kind=stat.S_IFDIR), kind | asked, US) == kind | kept
    )


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_only_root_creates_device_nodes(kind):
    with pytest.raises(NotPermitted):
        permissions.mode_at_birth(file(0o777, kind=stat.S_IFDIR), kind | 0o600, US)


def test_write_clears_set_uid():
    assert permissions.mode_after_write(file(0o6755), US) == stat.S_IFREG | 0o755
    assert permissions.mode_after_write(file(0o2745), US) == stat.S_IFREG | 0o2745
    assert permissions.mode_after_write(file(0o2745), OTHERS) == stat.S_IFREG | 0o745


@pytest.mark.parametrize(
    "inode, who, may",
    [
        (file(0o600), US, True),
        (file(0o666), OTHERS, True),
        (file(0o644), OTHERS, False),
        (file(0o4666), OTHERS, False),
        (file(0o2676), OTHERS, False),
        (file(0o666, kind=stat.S_IFIFO), OTHERS, False),
    ],
)
def test_link_to_files_of_others_needs_both_rights(inode, who, may):
    if may:
        permissions.check_link(inode, (), who)
        return
    with pytest.raises(NotPermitted):
        permissions.check_link(inode, (), who)


@pytest.mark.parametrize(
    "inode, name, wanted, error",
    [
        (file(0o644), b"user.a", READ, None),
        (file(0o644), b"user.a", WRITE, AccessDenied),
        (file(0o666), b"user.a", WRITE, None),
        (file(0o600), b"user.a", READ, AccessDenied),
        (file(0o777, kind=stat.S_IFLNK), b"user.a", READ, NoAttribute),
        (file(0o777, kind=stat.S_IFLNK), b"user.a", WRITE, NotPermitted),
        (file(0o1777, kind=stat.S_IFDIR), b"user.a", WRITE, NotPermitted),
        (file(0o1777, kind=stat.S_IFDIR), b"user.a", READ, None),
        (file(0o666), b"trusted.a", READ, NoAttribute),
        (file(0o666), b"trusted.a", WRITE, NotPermitted),
        (file(0), b"security.a", READ, None),
        (file(0o666), b"security.a", WRITE, NotPermitted),
        (file(0), acl.ACCESS, READ, None),
        (file(0o666), acl.ACCESS, WRITE, NotPermitted),
    ],
)
def test_xattrs_of_other_users_by_name_space(inode, name, wanted, error):
    if error is None:
        permissions.check_xattr(inode, (), OTHERS, name, wanted)
        return
    with pytest.raises(error):
        permissions.check_xattr(inode, (), OTHERS, name, wanted)
