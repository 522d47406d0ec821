"""Create a file, directory, symlink or device node under a name, or open the existing file."""

from __future__ import annotations

import stat

from nvpool.core.errors import AlreadyExists, InvalidRequest, IsADirectory, NameTooLong
from nvpool.core.grants import WRITE
from nvpool.core.ids import partition_of
from nvpool.core.posix.acl import ACCESS, DEFAULT, Acl, decode_acl, inherited
from nvpool.core.units import SYMLINK_BYTES_MAX
from nvpool.meta.operations.volume_requests import begin_volume
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, View, fill_attr, fill_elsewhere
from nvpool.poolmap.shards.partitions import partition_of_directory
from nvpool.rpc.v1 import meta_pb2

KINDS = frozenset(
    (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
)


def create(view: View, request: meta_pb2.CreateRequest, now_ns: int) -> Draft:
    """Create an inode, or open an existing file.

    A new inode has the caller's uid and gid. In a set-gid directory it has the directory's gid, and a new
    directory also the set-gid bit. The layout comes from the directory, access control lists from the
    directory's default list. An existing file is opened (and truncated, if requested) unless `exclusive`.
    """
    draft = Draft(view, now_ns)
    mode = request.mode
    kind = mode & 0o170000
    if kind not in KINDS or mode > 0o177777:
        raise InvalidRequest(f"no file has the mode {mode:#o}")
    if request.unnamed:
        return _create_unnamed(draft, request)
    parent = draft.entered_holder(request.parent)
    partition, name_hash, key = view.place(parent, request.name)
    raw = view.get(key)
    if raw is not None:
        return _open_existing(draft, request, *records.decode_dentry(partition, raw))
    change = request.change
    gid = change.gid
    if parent.mode & stat.S_ISGID:
        gid = parent.gid
        if kind == stat.S_IFDIR:
            mode |= stat.S_ISGID
    lists: dict[bytes, Acl] = {}
    if parent.flags & records.HAS_ACL and kind != stat.S_IFLNK:
        mode, lists = _inherited(view, parent, mode, request.masked)
    flags, volume = 0, parent.volume
    if volume and request.wide:
        raise InvalidRequest("a directory in a volume cannot be striped: a volume is on one shard")
    if kind == stat.S_IFREG:
        if request.open and request.rights & WRITE:
            flags = records.TOUCHED
        born = draft.birth(
            partition,
            mode=mode,
            uid=change.uid,
            gid=gid,
            table=parent.table,
            chunk_bits=parent.chunk_bits,
            flags=flags,
            volume=volume,
        )
    elif kind == stat.S_IFDIR:
        born = draft.birth(
            partition if volume else partition_of_directory(name_hash),
            mode=mode,
            links=2,
            uid=change.uid,
            gid=gid,
            table=parent.table,
            chunk_bits=parent.chunk_bits,
            parent=parent.number,
            flags=records.WIDE if request.wide else 0,
            volume=volume,
        )
        parent.links += 1
        if request.HasField("volume"):
            begin_volume(draft, born, request)
    elif kind == stat.S_IFLNK:
        target = request.target
        if not target or b"\0" in target:
            raise InvalidRequest("a symlink needs a target without NUL")
        if len(target) > SYMLINK_BYTES_MAX:
            raise NameTooLong(
                f"the target of a symlink has {SYMLINK_BYTES_MAX} bytes at most, not {len(target)}"
            )
        born = draft.birth(
            partition, mode=mode, uid=change.uid, gid=gid, target=target, size=len(target), volume=volume
        )
    else:
        born = draft.birth(partition, mode=mode, uid=change.uid, gid=gid, rdev=request.rdev, volume=volume)
    for name, acl in lists.items():
        draft.put_acl(born, name, acl)
    draft.effects[key] = records.encode_dentry(partition, born.number, kind >> 12)
    parent.size += 1
    draft.stamp(parent, content=True)
    draft.parent = parent
    reply = draft.reply = meta_pb2.CreateReply(created=True)
    fill_attr(reply.entry.attr, born)
    if request.open and kind == stat.S_IFREG:
        draft.opened = born.number
        reply.entry.grant = draft.grant(born, request.rights, change.session)
    return draft


def _inherited(view: View, parent: Inode, mode: int, masked: int) -> tuple[int, dict[bytes, Acl]]:
    """Mode and access control lists of a new inode in the directory.

    `mode` has lost the bits `masked` to a umask, which does not apply if the directory has a default list.
    """
    raw = view.xattr(parent.number, DEFAULT)
    if raw is None:
        return mode, {}
    default = decode_acl(raw)
    mode, access = inherited(default, mode | masked & 0o777)
    lists = {ACCESS: access} if access else {}
    if mode & 0o170000 == stat.S_IFDIR:
        lists[DEFAULT] = default
    return mode, lists


def _create_unnamed(draft: Draft, request: meta_pb2.CreateRequest) -> Draft:
    """O_TMPFILE: create an open file without a name.

    It is deleted when it is closed, like a file that has lost its last name. LINK may give it a name, unless
    it was created `exclusive`.
    """
    parent, mode, change = draft.entered(request.parent), request.mode, request.change
    if mode & 0o170000 != stat.S_IFREG or request.name or not request.open:
        raise InvalidRequest("what is made without a name is a regular file, and open")
    lists: dict[bytes, Acl] = {}
    if parent.flags & records.HAS_ACL:
        mode, lists = _inherited(draft.view, parent, mode, request.masked)
    flags = (records.TOUCHED if request.rights & WRITE else 0) | (
        0 if request.exclusive else records.LINKABLE
    )
    born = draft.birth(
        partition_of(parent.number),
        mode=mode,
        links=0,
        uid=change.uid,
        gid=parent.gid if parent.mode & stat.S_ISGID else change.gid,
        table=parent.table,
        chunk_bits=parent.chunk_bits,
        flags=flags,
        volume=parent.volume,
    )
    for name, acl in lists.items():
        draft.put_acl(born, name, acl)
    value = records.ORPHAN_COUNTED if born.volume else records.ORPHAN_VALUE
    draft.effects[records.numbered_key(records.ORPHAN, born.number)] = value
    draft.orphans.append(born.number)
    draft.opened = born.number
    reply = draft.reply = meta_pb2.CreateReply(created=True)
    fill_attr(reply.entry.attr, born)
    reply.entry.grant = draft.grant(born, request.rights, change.session)
    return draft


def _open_existing(draft: Draft, request: meta_pb2.CreateRequest, number: int, kind: int) -> Draft:
    """Open an existing file.

    If its inode is another shard's, the reply says so, and the client opens it there.
    """
    if request.exclusive or request.mode & 0o170000 != stat.S_IFREG:
        raise AlreadyExists(f"{request.name!r} exists already")
    if kind == stat.S_IFDIR >> 12:
        raise IsADirectory(f"{request.name!r} is a directory")
    if kind == stat.S_IFLNK >> 12:
        raise AlreadyExists(f"{request.name!r} is a symlink; open what it points to")
    if draft.view.is_elsewhere(partition_of(number)):
        draft.reply = meta_pb2.CreateReply()
        fill_elsewhere(draft.reply.entry, number, kind)
        return draft
    found = draft.inode(number)
    reply = draft.reply = meta_pb2.CreateReply()
    if found.is_file:
        if request.truncate:
            draft.cut(found, 0)
        if request.open:
            draft.opened = number
            reply.entry.grant = draft.grant(found, request.rights, request.change.session)
    fill_attr(reply.entry.attr, found)
    return draft
