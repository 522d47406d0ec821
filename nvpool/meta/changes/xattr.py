"""Extended attributes: set and remove. Name spaces user, trusted and security; ACLs are not kept."""

from __future__ import annotations

from nvpool.base.errors import AlreadyExists, InvalidRequest, NoAttribute, NoSpace, NotSupported, RangeTooSmall, TooBig
from nvpool.base.units import XATTR_NAME_BYTES_MAX, XATTR_VALUE_BYTES_MAX
from nvpool.meta import records
from nvpool.meta.view import Draft, View, fill_attr
from nvpool.wire.v1 import meta_pb2

CREATE, REPLACE = 1, 2
XATTRS_MAX = 128
"""For an inode: a list of their names is one message and one step."""
_SPACES = (b"user.", b"trusted.", b"security.")


def check_name(name: bytes) -> None:
    if len(name) > XATTR_NAME_BYTES_MAX:
        raise RangeTooSmall(f"the name of an attribute has {XATTR_NAME_BYTES_MAX} bytes at most")
    if not name.startswith(_SPACES):
        raise NotSupported(f"attributes are kept in user, trusted and security, not as {name!r}")
    if name in _SPACES or b"\0" in name:
        raise InvalidRequest(f"{name!r} can not be the name of an attribute")


def setxattr(view: View, request: meta_pb2.SetXattrRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    check_name(request.name)
    if len(request.value) > XATTR_VALUE_BYTES_MAX:
        raise TooBig(f"an attribute has {XATTR_VALUE_BYTES_MAX} bytes at most, not {len(request.value)}")
    if request.flags not in (0, CREATE, REPLACE):
        raise InvalidRequest(f"setxattr does not know the flags {request.flags:#x} together")
    key = records.xattr_key(inode.number, request.name)
    if view.get(key) is None:
        if request.flags == REPLACE:
            raise NoAttribute(f"there is no attribute {request.name!r}")
        if inode.flags & records.HAS_XATTRS and len(view.scan(*records.xattr_range(inode.number), XATTRS_MAX)) == XATTRS_MAX:
            raise NoSpace(f"an inode has {XATTRS_MAX} attributes at most")
    elif request.flags == CREATE:
        raise AlreadyExists(f"there is an attribute {request.name!r} already")
    inode.flags |= records.HAS_XATTRS
    draft.adds = True
    draft.effects[key] = records.XATTR_HEAD + request.value
    draft.stamp(inode)
    draft.reply = meta_pb2.AttrReply()
    fill_attr(draft.reply.attr, inode)
    return draft


def removexattr(view: View, request: meta_pb2.RemoveXattrRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    check_name(request.name)
    key = records.xattr_key(inode.number, request.name)
    if view.get(key) is None:
        raise NoAttribute(f"there is no attribute {request.name!r}")
    if len(view.scan(*records.xattr_range(inode.number), 2)) == 1:
        inode.flags &= ~records.HAS_XATTRS
    draft.effects[key] = None
    draft.stamp(inode)
    draft.reply = meta_pb2.AttrReply()
    fill_attr(draft.reply.attr, inode)
    return draft
