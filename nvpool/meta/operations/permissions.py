"""Permission rules of POSIX and Linux for a user without privileges.

Pure functions of an inode, its access control list and the credentials of the calling process. They implement
path_resolution(7), chmod(2), chown(2), unlink(2), link(2), utimensat(2), xattr(7) and acl(5), as fs/namei.c,
fs/attr.c and fs/posix_acl.c of the kernel do. For a mount the kernel itself makes all these checks; here they
are made for processes that send requests to the service without a mount. Used by `meta/requests/local_user_permissions`.

If a client's root is squashed, the groups of its users are not known. Credentials with BELIEVED_GROUPS have
the rights that such a user could have in any groups but root's, and ANY_USER_BUT_ROOT has the rights that any such
user could have.
"""

from __future__ import annotations

import stat

from nvpool.core.errors import AccessDenied, NoAttribute, NotPermitted
from nvpool.core.posix import acl
from nvpool.meta.state.records import Inode
from nvpool.rpc.peer_roles import ANY_USER_BUT_ROOT, BELIEVED_GROUPS, Credentials

READ, WRITE, SEARCH = 4, 2, 1
"""Bits as in a mode. SEARCH of a directory is the bit for execution of a file."""
_WORDS = {READ: "read", WRITE: "write", SEARCH: "search"}


def may(inode: Inode, access: acl.Acl, credentials: Credentials, wanted: int) -> bool:
    """Whether mode and access control list allow all that is `wanted` (path_resolution(7), acl(5)).

    An empty `access` means that there is no list. As in the kernel's `acl_permission_check`, only the first
    class that the user is in decides.
    """
    if credentials.uid == inode.uid:
        return not wanted & ~(inode.mode >> 6)
    if credentials.gids is BELIEVED_GROUPS:
        return not wanted & ~_believed(inode, access, credentials.uid)
    if access and inode.mode & 0o070:  # the kernel skips a list whose mask allows nothing
        return _list_allows(access, inode.gid, credentials, wanted)
    return not wanted & ~(inode.mode >> 3 if inode.gid in credentials.gids else inode.mode)


def _list_allows(access: acl.Acl, gid: int, credentials: Credentials, wanted: int) -> bool:
    """`posix_acl_permission` of the kernel, for a user that is not the owner."""
    mask = next((entry.permissions for entry in access if entry.tag == acl.MASK), 7)
    in_group = False
    for entry in access:
        if entry.tag == acl.USER and entry.id == credentials.uid:
            return not wanted & ~(entry.permissions & mask)
        if (entry.tag == acl.GROUP_OBJ and gid in credentials.gids) or (
            entry.tag == acl.GROUP and entry.id in credentials.gids
        ):
            in_group = True
            if not wanted & ~entry.permissions:
                return not wanted & ~mask
        elif entry.tag == acl.OTHER:
            return not in_group and not wanted & ~entry.permissions
    return False


def _believed(inode: Inode, access: acl.Acl, uid: int) -> int:
    """Rights of a user whose groups are unknown: those of the most favourable groups, without the owner's.

    For ANY_USER_BUT_ROOT these are the rights of all users together.
    """
    allowed, above = inode.mode, inode.mode >> 3
    if uid == ANY_USER_BUT_ROOT and inode.uid:
        allowed |= inode.mode >> 6
    if not access or not inode.mode & 0o070:
        return allowed | above if inode.gid else allowed
    for entry in access:  # the group bits of the mode are the list's mask
        if entry.tag == acl.USER and entry.id == uid:
            return entry.permissions & above
        if (
            (entry.tag == acl.GROUP_OBJ and inode.gid)
            or (entry.tag == acl.GROUP and entry.id)
            or (entry.tag == acl.USER and uid == ANY_USER_BUT_ROOT and entry.id)
        ):
            allowed |= entry.permissions & above
    return allowed


def name_of(credentials: Credentials) -> str:
    """Description of the user, with which the text of a refusal begins."""
    return (
        "no user of this client but root, which is squashed,"
        if credentials.uid == ANY_USER_BUT_ROOT
        else f"user {credentials.uid}"
    )


def check(inode: Inode, access: acl.Acl, credentials: Credentials, wanted: int) -> None:
    """AccessDenied: `may` returns False."""
    if not may(inode, access, credentials, wanted):
        words = " and ".join(word for bit, word in _WORDS.items() if wanted & bit)
        raise AccessDenied(
            f"{name_of(credentials)} may not {words} inode {inode.number}, which has the mode "
            f"{inode.mode & 0o7777:04o} and is user {inode.uid}'s"
        )


def check_owner(inode: Inode, credentials: Credentials) -> None:
    """NotPermitted: the user is not the owner."""
    if credentials.uid != inode.uid:
        raise NotPermitted(f"inode {inode.number} is user {inode.uid}'s, not user {credentials.uid}'s")


def check_sticky(directory: Inode, victim: Inode, credentials: Credentials) -> None:
    """NotPermitted: the directory is sticky, and neither it nor the victim belongs to the user.

    See unlink(2). The victim is the inode whose name is to be removed or changed.
    """
    if directory.mode & stat.S_ISVTX and credentials.uid not in (victim.uid, directory.uid):
        raise NotPermitted(
            f"directory {directory.number} is sticky: inode {victim.number} is not user {credentials.uid}'s"
        )


def check_link(inode: Inode, access: acl.Acl, credentials: Credentials) -> None:
    """NotPermitted: the file belongs to another user and is not safe to link.

    A safe file is regular, the user may read and write it, and it has no set-uid and no set-gid with group
    execution. This is `protected_hardlinks` of proc(5), applied whatever the setting of this machine's
    kernel.
    """
    if credentials.uid == inode.uid:
        return
    executable_for_group = inode.mode & (stat.S_ISGID | stat.S_IXGRP) == stat.S_ISGID | stat.S_IXGRP
    if (
        not inode.is_file
        or inode.mode & stat.S_ISUID
        or executable_for_group
        or not may(inode, access, credentials, READ | WRITE)
    ):
        raise NotPermitted(
            f"inode {inode.number} is user {inode.uid}'s; user {credentials.uid} may give it no name"
        )


def mode_at_birth(parent: Inode, mode: int, credentials: Credentials) -> int:
    """Mode of a new inode, derived from the requested mode (open(2), mkdir(2), mknod(2))."""
    kind = stat.S_IFMT(mode)
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        raise NotPermitted("only root makes device nodes")
    if kind == stat.S_IFDIR:
        return mode & ~(stat.S_ISUID | stat.S_ISGID)
    if (
        parent.mode & stat.S_ISGID
        and mode & stat.S_ISGID
        and mode & stat.S_IXGRP
        and parent.gid not in credentials.gids
    ):
        return mode & ~stat.S_ISGID
    return mode


def mode_to_set(gid: int, mode: int, credentials: Credentials) -> int:
    """Mode that the owner may set on an inode of group `gid`: without set-gid if not in the group
    (chmod(2))."""
    return mode if gid in credentials.gids else mode & ~stat.S_ISGID


def check_new_owner(inode: Inode, uid: int | None, gid: int | None, credentials: Credentials) -> None:
    """NotPermitted: the user gives an inode to another user, or to a group that it is not in (chown(2)).

    None: uid or gid stays as it is.
    """
    check_owner(inode, credentials)
    if uid not in (None, inode.uid):
        raise NotPermitted(f"user {credentials.uid} may not give inode {inode.number} to user {uid}")
    if gid not in (None, inode.gid) and gid not in credentials.gids:
        raise NotPermitted(f"user {credentials.uid} is not in the group {gid}")


def mode_after_write(inode: Inode, credentials: Credentials) -> int:
    """Mode of a file after a user without privileges has written to it (write(2), Linux 6.2).

    The file loses set-uid. It loses set-gid if the group may execute it, or the writer is not in the group.
    """
    without_group = inode.mode & stat.S_IXGRP or inode.gid not in credentials.gids
    return inode.mode & ~(stat.S_ISUID | (stat.S_ISGID if without_group else 0))


def check_xattr(inode: Inode, access: acl.Acl, credentials: Credentials, name: bytes, wanted: int) -> None:
    """Check that the user may read (READ) or change (WRITE) the attribute (xattr(7), `xattr_permission`).

    AccessDenied, NotPermitted, NoAttribute: it may not.
    """
    if name in acl.NAMES:
        if wanted == WRITE:
            check_owner(inode, credentials)
    elif name.startswith(b"trusted."):
        if wanted == READ:
            raise NoAttribute(f"{name!r} is shown to root alone")
        raise NotPermitted(f"only root changes {name!r}")
    elif name.startswith(b"security."):
        if wanted == WRITE:
            raise NotPermitted(f"only root changes {name!r}")
    else:
        if not inode.is_file and not inode.is_directory:
            raise (
                NotPermitted("only files and directories have attributes of users")
                if wanted == WRITE
                else NoAttribute("only files and directories have attributes of users")
            )
        if inode.is_directory and inode.mode & stat.S_ISVTX and wanted == WRITE:
            check_owner(inode, credentials)
        check(inode, access, credentials, wanted)
