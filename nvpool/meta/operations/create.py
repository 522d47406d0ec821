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
from nvpool.meta.state.transaction import Draft, View, attr_of, elsewhere_entry
from nvpool.poolmap.shards.partitions import partition_of_directory
from nvpool.rpc.messages.meta_messages import CreateReply, CreateRequest, InodeEntry

_S_ISGID, _S_IFREG, _S_IFDIR, _S_IFLNK = 0o2000, 0o100000, 0o040000, 0o120000
_HAS_ACL, _TOUCHED = records.HAS_ACL, records.TOUCHED
KINDS = frozenset(
    (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
)


def create(view: View, request: CreateRequest, now_ns: int) -> Draft:
    """Create an inode, or open an existing file.

    A new inode has the caller's uid and gid. In a set-gid directory it has the directory's gid, and a new
    directory also the set-gid bit. The layout comes from the directory, access control lists from the
    directory's default list. An existing file is opened (and truncated, if requested) unless `exclusive`.
    """
    draft = Draft.__new__(Draft)
    draft.begin(view, now_ns)
    mode = request.mode
    kind = mode & 0o170000
    if (kind != _S_IFREG and kind not in KINDS) or mode > 0o177777:
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
    if parent.mode & _S_ISGID:
        gid = parent.gid
        if kind == _S_IFDIR:
            mode |= _S_ISGID
    lists: dict[bytes, Acl] | None = None
    if parent.flags & _HAS_ACL and kind != _S_IFLNK:
        mode, lists = _inherited(view, parent, mode, request.masked)
    flags, volume = 0, parent.volume
    if volume and request.wide:
        raise InvalidRequest("a directory in a volume cannot be striped: a volume is on one shard")
    if kind == _S_IFREG:
        if request.open and request.rights & 2:
            flags = _TOUCHED
        born = draft.birth(partition, mode, change.uid, gid, volume)
        born.table, born.chunk_bits, born.flags = parent.table, parent.chunk_bits, flags
    elif kind == _S_IFDIR:
        born = draft.birth(
            partition if volume else partition_of_directory(name_hash), mode, change.uid, gid, volume
        )
        born.links, born.parent = 2, parent.number
        born.table, born.chunk_bits = parent.table, parent.chunk_bits
        if request.wide:
            born.flags = records.WIDE
        parent.links += 1
        if request.HasField("volume"):
            begin_volume(draft, born, request)
    elif kind == _S_IFLNK:
        target = request.target
        if not target or b"\0" in target:
            raise InvalidRequest("a symlink needs a target without NUL")
        if len(target) > SYMLINK_BYTES_MAX:
            raise NameTooLong(
                f"the target of a symlink has {SYMLINK_BYTES_MAX} bytes at most, not {len(target)}"
            )
        born = draft.birth(partition, mode, change.uid, gid, volume)
        born.target, born.size = target, len(target)
    else:
        born = draft.birth(partition, mode, change.uid, gid, volume)
        born.rdev = request.rdev
    if lists:
        for name, acl in lists.items():
            draft.put_acl(born, name, acl)
    draft.effects[key] = records.encode_dentry(partition, born.number, kind >> 12)
    parent.size += 1
    draft.stamp(parent, content=True)
    draft.parent = parent
    entry = InodeEntry.__new__(InodeEntry)
    entry.clear()
    entry.attr = attr_of(born)
    if request.open and kind == _S_IFREG:
        draft.opened = born.number
        entry.grant = draft.grant(born, request.rights, change.session)
    reply = draft.reply = CreateReply.__new__(CreateReply)
    reply.clear()
    reply.entry, reply.created = entry, True
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


def _create_unnamed(draft: Draft, request: CreateRequest) -> Draft:
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
    gid = parent.gid if parent.mode & stat.S_ISGID else change.gid
    born = draft.birth(partition_of(parent.number), mode, change.uid, gid, parent.volume)
    born.links, born.flags = 0, flags
    born.table, born.chunk_bits = parent.table, parent.chunk_bits
    for name, acl in lists.items():
        draft.put_acl(born, name, acl)
    value = records.ORPHAN_COUNTED if born.volume else records.ORPHAN_VALUE
    draft.effects[records.numbered_key(records.ORPHAN, born.number)] = value
    draft.orphans.append(born.number)
    draft.opened = born.number
    entry = InodeEntry.__new__(InodeEntry)
    entry.clear()
    entry.attr = attr_of(born)
    entry.grant = draft.grant(born, request.rights, change.session)
    reply = draft.reply = CreateReply.__new__(CreateReply)
    reply.clear()
    reply.entry, reply.created = entry, True
    return draft


def _open_existing(draft: Draft, request: CreateRequest, number: int, kind: int) -> Draft:
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
        draft.reply = CreateReply(elsewhere_entry(number, kind))
        return draft
    found = draft.inode(number)
    if not found.size:
        draft.view.check_delegation(request.change.session, number, found.mode, found.birth_ns, draft.now_ns)
    entry = InodeEntry.__new__(InodeEntry)
    entry.clear()
    draft.reply = CreateReply(entry)
    if found.is_file:
        if request.truncate:
            draft.cut(found, 0)
        if request.open:
            draft.opened = number
            entry.grant = draft.grant(found, request.rights, request.change.session)
    entry.attr = attr_of(found)
    return draft
