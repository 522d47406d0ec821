"""POSIX access control lists: binary form, and conversion between a list and an inode's mode.

Pure functions. The binary form is the one of the kernel's extended attributes (linux/posix_acl_xattr.h). The
rules are those of the kernel's fs/posix_acl.c, whose functions are named below. The kernel enforces the
lists; this module only stores and converts them. Used by `meta/operations`, `meta/fsck/walker` and
`fuse/ops/operations`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import InvalidRequest, TooBig

ACCESS, DEFAULT = b"system.posix_acl_access", b"system.posix_acl_default"
NAMES = frozenset((ACCESS, DEFAULT))
"""Extended attributes that store the lists. Only a directory has DEFAULT; new entries of the directory
inherit it."""

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
"""Tags of entries, in the order in which a list stores them."""
ACL_BYTES_MAX = 4096
"""Maximum size of a list: a FUSE client of Linux reads no more (511 entries)."""

_VERSION = 2
_NO_ID = 0xFFFFFFFF
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")


class AclEntry(NamedTuple):
    """One entry of a list; `id` is the id of a named user or group."""

    tag: int
    permissions: int
    id: int = _NO_ID


Acl = tuple[AclEntry, ...]


def decode_acl(value: bytes) -> Acl:
    """Decode the value of an extended attribute; an empty result means that there is no list.

    TooBig: the value has more than ACL_BYTES_MAX bytes.
    InvalidRequest: another version, a truncated value, or an invalid list. A valid list (`posix_acl_valid`)
    has the owner, the owning group and others once each, named entries between them, and a mask if there are
    named entries.
    """
    if len(value) > ACL_BYTES_MAX:
        raise TooBig(f"an access control list has {ACL_BYTES_MAX} bytes at most, not {len(value)}")
    if (
        len(value) < _HEAD.size
        or (len(value) - _HEAD.size) % _ENTRY.size
        or _HEAD.unpack_from(value)[0] != _VERSION
    ):
        raise InvalidRequest(f"{len(value)} bytes are no access control list of version {_VERSION}")
    acl = tuple(
        AclEntry(tag, permissions, number if tag in (USER, GROUP) else _NO_ID)
        for tag, permissions, number in _ENTRY.iter_unpack(value[_HEAD.size :])
    )
    tags = [entry.tag for entry in acl]
    named = USER in tags or GROUP in tags
    needed = [USER_OBJ, GROUP_OBJ, *([MASK] if MASK in tags or named else []), OTHER]
    if acl and (
        tags != sorted(tags)
        or [tag for tag in tags if tag not in (USER, GROUP)] != needed
        or any(entry.permissions > 7 or (entry.tag in (USER, GROUP) and entry.id == _NO_ID) for entry in acl)
    ):
        raise InvalidRequest(
            "it is not a valid access control list: owner, named users, group, named groups, mask and others, in "
            "this order; the mask where there are named ones"
        )
    return acl


def encode_acl(acl: Acl) -> bytes:
    return _HEAD.pack(_VERSION) + b"".join([_ENTRY.pack(*entry) for entry in acl])


def mode_of(acl: Acl) -> int:
    """Return the nine permission bits of the mode that represent the list (`posix_acl_equiv_mode`).

    The group bits are those of the mask if the list has a mask.
    """
    by_tag = {entry.tag: entry.permissions for entry in acl}
    return by_tag[USER_OBJ] << 6 | by_tag.get(MASK, by_tag[GROUP_OBJ]) << 3 | by_tag[OTHER]


def is_minimal(acl: Acl) -> bool:
    """Return whether the mode alone expresses the whole list."""
    return len(acl) <= 3


def changed_by_mode(acl: Acl, mode: int) -> Acl:
    """Return the access list of an inode after its mode is set (`posix_acl_chmod`)."""
    group = MASK if any(entry.tag == MASK for entry in acl) else GROUP_OBJ
    bits = {USER_OBJ: mode >> 6 & 7, group: mode >> 3 & 7, OTHER: mode & 7}
    return tuple(entry._replace(permissions=bits.get(entry.tag, entry.permissions)) for entry in acl)


def inherited(default: Acl, mode: int) -> tuple[int, Acl]:
    """Return mode and access list of a new inode, from the directory's default list (`posix_acl_create`).

    `mode` is the requested mode; the umask is not applied. The list is empty if the mode alone expresses it.
    """
    allowed = mode_of(default)
    kept = mode & ~0o777 | mode & allowed
    acl = changed_by_mode(default, kept)
    return kept, () if is_minimal(acl) else acl
