"""Extended attributes: set and remove.

The name spaces are user, trusted and security, and the names of POSIX access control lists.
"""

from __future__ import annotations

import stat

from nvpool.core.errors import (
    AccessDenied,
    AlreadyExists,
    InvalidRequest,
    NoAttribute,
    NoSpace,
    NotSupported,
    RangeTooSmall,
    TooBig,
)
from nvpool.core.posix import acl
from nvpool.core.units import XATTR_NAME_BYTES_MAX, XATTR_VALUE_BYTES_MAX
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, View, fill_attr
from nvpool.rpc.v1 import meta_pb2

CREATE, REPLACE, KILL_SET_GID = 1, 2, 4
XATTRS_MAX = 128
"""Attributes of an inode: the list of their names fits into one message and one step."""
_SPACES = (b"user.", b"trusted.", b"security.")


def check_name(name: bytes) -> None:
    if len(name) > XATTR_NAME_BYTES_MAX:
        raise RangeTooSmall(f"the name of an attribute has {XATTR_NAME_BYTES_MAX} bytes at most")
    if not name.startswith(_SPACES) and name not in acl.NAMES:
        raise NotSupported(f"attributes are kept in user, trusted and security, not as {name!r}")
    if name in _SPACES or b"\0" in name:
        raise InvalidRequest(f"{name!r} cannot be the name of an attribute")


def setxattr(view: View, request: meta_pb2.SetXattrRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    name, value, flags = request.name, request.value, request.flags
    check_name(name)
    if len(value) > XATTR_VALUE_BYTES_MAX:
        raise TooBig(f"an attribute has {XATTR_VALUE_BYTES_MAX} bytes at most, not {len(value)}")
    if name in acl.NAMES:
        flags &= ~KILL_SET_GID
    if flags not in (0, CREATE, REPLACE):
        raise InvalidRequest(f"setxattr does not know the flags {request.flags:#x} together")
    key = records.xattr_key(inode.number, name)
    is_there = view.get(key) is not None
    if not is_there and flags == REPLACE:
        raise NoAttribute(f"there is no attribute {name!r}")
    if is_there and flags == CREATE:
        raise AlreadyExists(f"there is an attribute {name!r} already")
    found = _use_acl(draft, inode, request) if name in acl.NAMES else None
    if found == ():
        if is_there:
            drop_attribute(draft, inode, name)
    else:
        if (
            not is_there
            and inode.flags & records.HAS_XATTRS
            and len(view.scan(*records.xattr_range(inode.number), XATTRS_MAX)) == XATTRS_MAX
        ):
            raise NoSpace(f"an inode has {XATTRS_MAX} attributes at most")
        if found is not None:
            draft.put_acl(inode, name, found)
        else:
            inode.flags |= records.HAS_XATTRS
            draft.adds = True
            draft.effects[key] = records.XATTR_HEAD + value
    draft.stamp(inode)
    draft.reply = meta_pb2.AttrReply()
    fill_attr(draft.reply.attr, inode)
    return draft


def _use_acl(draft: Draft, inode: Inode, request: meta_pb2.SetXattrRequest) -> acl.Acl:
    """The list to store; empty if the mode says the same.

    An access list sets the mode (`posix_acl_update_mode`).
    """
    if inode.is_symlink:
        raise NotSupported("a symbolic link has no access control list")
    found = acl.decode_acl(request.value)
    if request.name == acl.DEFAULT:
        if found and not inode.is_directory:
            raise AccessDenied("only a directory has a default access control list")
    elif found:
        inode.mode = inode.mode & ~0o777 | acl.mode_of(found)
        if request.flags & KILL_SET_GID:
            inode.mode &= ~stat.S_ISGID
        if acl.is_minimal(found):
            found = ()
    if inode.is_directory:
        draft.take_parts(inode)  # stripes have copies of the mode and of the flag HAS_ACL
    return found


def drop_attribute(draft: Draft, inode: Inode, name: bytes) -> None:
    """Remove an existing attribute."""
    view = draft.view
    if len(view.scan(*records.xattr_range(inode.number), 2)) == 1:
        inode.flags &= ~records.HAS_XATTRS
    if name in acl.NAMES and not any(
        view.get(records.xattr_key(inode.number, other)) for other in acl.NAMES - {name}
    ):
        inode.flags &= ~records.HAS_ACL
    draft.effects[records.xattr_key(inode.number, name)] = None


def removexattr(view: View, request: meta_pb2.RemoveXattrRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    check_name(request.name)
    if view.get(records.xattr_key(inode.number, request.name)) is None:
        raise NoAttribute(f"there is no attribute {request.name!r}")
    if inode.is_directory and request.name in acl.NAMES:
        draft.take_parts(inode)
    drop_attribute(draft, inode, request.name)
    draft.stamp(inode)
    draft.reply = meta_pb2.AttrReply()
    fill_attr(draft.reply.attr, inode)
    return draft
