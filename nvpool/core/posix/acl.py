"""POSIX access control lists: their binary form, and how they and the mode of an inode follow one another.

Pure. The form is that of the kernel's extended attributes (linux/posix_acl_xattr.h), the rules are those of its fs/posix_acl.c,
whose functions are named below; the kernel enforces what is kept here. Used by `meta/operations`, `meta/fsck/walker` and
`fuse/ops/operations`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import InvalidRequest, TooBig

ACCESS, DEFAULT = b"system.posix_acl_access", b"system.posix_acl_default"
NAMES = frozenset((ACCESS, DEFAULT))
"""Extended attributes in which they are kept. DEFAULT is a directory's, and inherited by what is made in it."""

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
"""Tags, in the order in which entries come."""
ACL_BYTES_MAX = 4096
"""A FUSE client of Linux reads no more: 511 entries."""

_VERSION = 2
_NO_ID = 0xFFFFFFFF
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")


class Entry(NamedTuple):
    """`id` is that of a named user or group."""

    tag: int
    permissions: int
    id: int = _NO_ID


Acl = tuple[Entry, ...]


def decode_acl(value: bytes) -> Acl:
    """The entries of an attribute's value; none for an empty list, which stands for no list at all.

    InvalidRequest: another version, cut off, or no valid list (`posix_acl_valid`): each of the owner, the owning group and
    others once, named entries between them, a mask where there are any. TooBig.
    """
    if len(value) > ACL_BYTES_MAX:
        raise TooBig(f"an access control list has {ACL_BYTES_MAX} bytes at most, not {len(value)}")
    if len(value) < _HEAD.size or (len(value) - _HEAD.size) % _ENTRY.size or _HEAD.unpack_from(value)[0] != _VERSION:
        raise InvalidRequest(f"{len(value)} bytes are no access control list of version {_VERSION}")
    acl = tuple(Entry(tag, permissions, number if tag in (USER, GROUP) else _NO_ID)
                for tag, permissions, number in _ENTRY.iter_unpack(value[_HEAD.size:]))
    tags = [entry.tag for entry in acl]
    named = USER in tags or GROUP in tags
    needed = [USER_OBJ, GROUP_OBJ, *([MASK] if MASK in tags or named else []), OTHER]
    if acl and (tags != sorted(tags) or [tag for tag in tags if tag not in (USER, GROUP)] != needed
                or any(entry.permissions > 7 or (entry.tag in (USER, GROUP) and entry.id == _NO_ID) for entry in acl)):
        raise InvalidRequest("it is no valid access control list: owner, named users, group, named groups, mask and others, in "
                             "this order; the mask where there are named ones")
    return acl


def encode_acl(acl: Acl) -> bytes:
    return _HEAD.pack(_VERSION) + b"".join([_ENTRY.pack(*entry) for entry in acl])


def mode_of(acl: Acl) -> int:
    """The nine permission bits of the mode that stand for the list (`posix_acl_equiv_mode`): the group's are the mask's."""
    by_tag = {entry.tag: entry.permissions for entry in acl}
    return by_tag[USER_OBJ] << 6 | by_tag.get(MASK, by_tag[GROUP_OBJ]) << 3 | by_tag[OTHER]


def is_minimal(acl: Acl) -> bool:
    """Whether the mode says all that the list does."""
    return len(acl) <= 3


def changed_by_mode(acl: Acl, mode: int) -> Acl:
    """The access list of an inode whose mode is set (`posix_acl_chmod`)."""
    group = MASK if any(entry.tag == MASK for entry in acl) else GROUP_OBJ
    bits = {USER_OBJ: mode >> 6 & 7, group: mode >> 3 & 7, OTHER: mode & 7}
    return tuple(entry._replace(permissions=bits.get(entry.tag, entry.permissions)) for entry in acl)


def inherited(default: Acl, mode: int) -> tuple[int, Acl]:
    """The mode and the access list of what is made with `mode` in a directory with this default list (`posix_acl_create`).
    The umask does not count. No list where the mode says it all."""
    allowed = mode_of(default)
    kept = mode & ~0o777 | mode & allowed
    acl = changed_by_mode(default, kept)
    return kept, () if is_minimal(acl) else acl
