"""Dispatch table: which decision function serves which method.

It connects the request messages with the functions in `meta/operations`. Used by `meta/server/service`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from nvpool.meta.operations import queries as lookup_operations
from nvpool.meta.operations.create import create
from nvpool.meta.operations.link import link
from nvpool.meta.operations.lock import lock
from nvpool.meta.operations.lookup import getattr as decide_getattr
from nvpool.meta.operations.lookup import lookup
from nvpool.meta.operations.open import open_inode, reserve
from nvpool.meta.operations.rename import rename
from nvpool.meta.operations.report import report
from nvpool.meta.operations.setattr import allocate
from nvpool.meta.operations.setattr import setattr as decide_setattr
from nvpool.meta.operations.unlink import rmdir, unlink
from nvpool.meta.operations.xattr import removexattr, setxattr
from nvpool.meta.state.transaction import Decision
from nvpool.rpc.messages.meta_messages import (
    CreateRequest,
    GetAttrRequest,
    LookupRequest,
    ReportRequest,
    UnlinkRequest,
)
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

CHANGES: dict[int, tuple[Any, Decision]] = {
    wire.META_SETATTR: (pb.SetAttrRequest, decide_setattr),
    wire.META_ALLOCATE: (pb.AllocateRequest, allocate),
    wire.META_CREATE: (CreateRequest, create),
    wire.META_UNLINK: (UnlinkRequest, unlink),
    wire.META_RMDIR: (UnlinkRequest, rmdir),
    wire.META_RENAME: (pb.RenameRequest, rename),
    wire.META_LINK: (pb.LinkRequest, link),
    wire.META_LOCK: (pb.LockRequest, lock),
    wire.META_OPEN: (pb.OpenRequest, open_inode),
    wire.META_REPORT: (ReportRequest, report),
    wire.META_RESERVE: (pb.ReserveRequest, reserve),
    wire.META_SETXATTR: (pb.SetXattrRequest, setxattr),
    wire.META_REMOVEXATTR: (pb.RemoveXattrRequest, removexattr),
}
CROSS_SHARD_CHANGES: dict[int, Callable[[Any], int]] = {
    **dict.fromkeys(
        (wire.META_CREATE, wire.META_UNLINK, wire.META_RMDIR, wire.META_RENAME), attrgetter("parent")
    ),
    wire.META_LINK: attrgetter("inode"),
    **dict.fromkeys((wire.META_SETATTR, wire.META_SETXATTR, wire.META_REMOVEXATTR), attrgetter("inode")),
}
"""Changes that may need records of several shards, each with the inode whose shard coordinates the change."""
QUERIES: dict[int, tuple[Any, Decision]] = {
    wire.META_LOOKUP: (LookupRequest, lookup),
    wire.META_GETATTR: (GetAttrRequest, decide_getattr),
    wire.META_READLINK: (pb.ReadLinkRequest, lookup_operations.readlink),
    wire.META_GETXATTR: (pb.GetXattrRequest, lookup_operations.getxattr),
    wire.META_LISTXATTR: (pb.ListXattrRequest, lookup_operations.listxattr),
    wire.META_LOCKS: (pb.LocksRequest, lookup_operations.locks),
}
