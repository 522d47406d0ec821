"""Queries: look-ups and other reads; the only change is the mark of an inode's first write grant.

Queries are pure like all decisions: (view, request, now in ns) -> Draft. Listings and the search for names
run in bounded steps. Called by `meta/server` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from nvpool.core.errors import (
    AccessDenied,
    CorruptRecord,
    InvalidRequest,
    NoAttribute,
    NotFound,
    Refused,
    Stale,
    WrongShard,
)
from nvpool.core.grants import READ
from nvpool.core.ids import partition_of
from nvpool.core.units import PARTITION_COUNT
from nvpool.meta.operations.listing import LIST_LIMIT_MAX
from nvpool.meta.operations.lock import check_range
from nvpool.meta.operations.lookup import lookup
from nvpool.meta.operations.xattr import XATTRS_MAX, check_name
from nvpool.meta.state import records
from nvpool.meta.state.lock_table import Owner
from nvpool.meta.state.records import NAME_AT
from nvpool.meta.state.transaction import Draft, View
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.meta_messages import LookupRequest
from nvpool.rpc.v1 import meta_pb2

LOCKS_MAX = 1000
"""Locks in a reply: about fifty kilobytes."""
LOOKUP_STEP = 128
"""Names looked up before other requests get their turn: two milliseconds, three if each is looked up
separately."""
LOOKUP_STEP_OF_CLIENT = 16
"""As LOOKUP_STEP, for a client: a quarter of a millisecond."""
NAMES_LIMIT = 1000
"""Entries scanned in one step of a search for names: a millisecond of the event loop (0.7 µs each)."""
NAMES_INODES_MAX = 512
_FLAGS = records.INODE_FIELDS.index("flags")
_MORE_TO_SAY = records.DIVIDED | records.TRASHED
_TYPE, _REGULAR = 0o170000, 0o100000
_BYTES_PER_FILE = 300
"""Bytes of LMDB per file, a careful estimate: 146 with names of 16 bytes."""
EMPTY_SCAN = 4
"""Cost of a scan that finds nothing, in entries."""


def lookup_many(
    view: View,
    request: meta_pb2.LookupManyRequest,
    now_ns: Callable[[], int],
    names_per_step: int = LOOKUP_STEP,
) -> Iterator[meta_pb2.LookupManyReply | None]:
    """Many look-ups, with their errors.

    Yields one reply at the end, and None wherever other requests should get their turn: after `names_per_step`
    names at the latest.
    """
    check_name_count(request)
    reply = meta_pb2.LookupManyReply()
    one = LookupRequest(session=request.session)
    rights = request.rights & READ  # a write grant would mark the inode, which is a change
    for number, some in enumerate(_steps(request.directories, names_per_step)):
        if number:
            yield None
        if _look_up_together(view, request.session, some, rights, now_ns(), reply):
            continue
        for piece in some:  # the names of one directory may need the slow way while the others do not
            if len(some) > 1 and _look_up_together(view, request.session, [piece], rights, now_ns(), reply):
                continue
            directory, names = piece
            one.parent, one.spread = directory.parent, directory.spread
            for name in names:
                one.name, one.rights = name, rights
                try:
                    entry = lookup(view, one, now_ns()).reply
                    entry.copy_to(reply.found.add().entry)
                except (Refused, Stale, CorruptRecord) as error:
                    reply.found.add(error=error.wire_code)
    yield reply


def check_name_count(request: meta_pb2.LookupManyRequest) -> None:
    """InvalidRequest: the request has too many names, or too many directories."""
    directories = request.directories
    if (
        len(directories) > LIST_LIMIT_MAX
        or sum(len(directory.names) for directory in directories) > LIST_LIMIT_MAX
    ):
        raise InvalidRequest(
            f"{LIST_LIMIT_MAX} names at most can be looked up in one request, in as many directories; look up "
            f"the others in the next one"
        )


Piece = tuple[meta_pb2.NamesIn, Sequence[bytes]]
"""Some names in a directory."""


def _steps(directories: Iterable[meta_pb2.NamesIn], names_per_step: int) -> Iterator[list[Piece]]:
    """All names in their order, in groups of at most `names_per_step`."""
    some: list[Piece] = []
    count = 0
    for directory in directories:
        all_names = directory.names
        for first in range(0, len(all_names), names_per_step):
            names = all_names[first : first + names_per_step]
            if count + len(names) > names_per_step:
                yield some
                some, count = [], 0
            some.append((directory, names))
            count += len(names)
    if some:
        yield some


def _look_up_together(
    view: View, session: int, some: list[Piece], rights: int, now_ns: int, reply: meta_pb2.LookupManyReply
) -> bool:
    """As `lookup` of each name, with one read for all entries and one for all inodes.

    A name takes 14 µs instead of 20. Returns False, with nothing added, if one of the names needs more than
    its records.
    """
    if view.owners or view.access.restricted or sum([len(names) for _, names in some]) < 2:
        return False
    try:
        places = []
        for asked, names in some:
            directory = view.directory(asked.parent)
            if not directory.links:
                return False
            places += [view.place(directory, name) for name in names]
        raws = view.get_many([key for _, _, key in places])
        numbers = [
            records.decode_dentry(place[0], raw)[0] if raw is not None else 0
            for place, raw in zip(places, raws, strict=True)
        ]
        there = [number for number in numbers if number]
        inodes = [
            records.inode_fields(number, raw) if raw is not None else None
            for number, raw in zip(there, view.get_many(list(map(records.inode_key, there))), strict=True)
        ]
    except (Refused, Stale, CorruptRecord):
        return False
    if (
        None in inodes
        or not view.cutting.keys().isdisjoint(there)
        or any([fields[_FLAGS] & _MORE_TO_SAY for fields in inodes])
    ):
        return False
    view.check_delegations(session, inodes, now_ns)
    leased = view.issue_leases(session, inodes)
    not_found, lease_ms = NotFound.wire_code, view.lease_ms
    found, remaining = reply.found, iter(inodes)
    for number in numbers:
        if not number:
            found.add(error=not_found)
            continue
        entry = found.add().entry
        attr = entry.attr
        (
            attr.inode,
            attr.mode,
            attr.links,
            attr.uid,
            attr.gid,
            attr.size,
            attr.blocks,
            attr.atime_ns,
            attr.mtime_ns,
            attr.ctime_ns,
            attr.change,
            cut,
            rdev,
            attr.table,
            attr.chunk_bits,
            flags,
            above,
            _,
            punches,
            volume,
            *_,
        ) = next(remaining)
        if cut:
            attr.cut = cut
            if punches:
                attr.punches = punches
        if flags & records.SHOWN_FLAGS:
            attr.flags = flags & records.SHOWN_FLAGS
        if rdev:
            attr.rdev = rdev
        if above:
            attr.parent = above
        if volume:
            attr.volume = volume
        if rights and attr.mode & _TYPE == _REGULAR:
            entry.grant = view.signed(rights, session, number, cut, attr.table, volume, now_ns)
        if number in leased:
            entry.lease_ms = lease_ms
    return True


def parts(view: View, request: meta_pb2.PartsRequest) -> meta_pb2.PartsReply:
    """Counts of this shard's stripes of wide directories."""
    if len(request.inodes) > 8 * LIST_LIMIT_MAX:
        raise InvalidRequest(
            f"the parts of {LIST_LIMIT_MAX} directories at most can be asked for in one request"
        )
    numbers = read_write_codec.unpack_inodes(request.inodes)
    reply = meta_pb2.PartsReply()
    for number in numbers:
        counts = view.counts_of_part(number)
        if counts is not None:
            reply.parts.add(
                inode=number,
                entries=counts.entries,
                subdirectories=counts.subdirectories,
                mtime_ns=counts.mtime_ns,
                ctime_ns=counts.ctime_ns,
                change=counts.change,
            )
    return reply


def readlink(view: View, request: meta_pb2.ReadLinkRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if not inode.is_symlink:
        raise InvalidRequest(f"inode {inode.number} is not a symlink")
    draft.reply = meta_pb2.ReadLinkReply(target=inode.target)
    return draft


def getxattr(view: View, request: meta_pb2.GetXattrRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    check_name(request.name)
    raw = (
        view.get(records.xattr_key(request.inode, request.name)) if inode.flags & records.HAS_XATTRS else None
    )
    if raw is None:
        raise NoAttribute(f"inode {request.inode} has no attribute {request.name!r}")
    draft.reply = meta_pb2.GetXattrReply(value=records.decode_xattr(raw))
    return draft


def listxattr(view: View, request: meta_pb2.ListXattrRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    reply = draft.reply = meta_pb2.ListXattrReply()
    if draft.inode(request.inode).flags & records.HAS_XATTRS:
        reply.names.extend(key[9:] for key, _ in view.scan(*records.xattr_range(request.inode), XATTRS_MAX))
    return draft


def locks(view: View, request: meta_pb2.LocksRequest, now_ns: int) -> Draft:
    """The first lock, by byte, that conflicts with the requested one.

    A request without a mode gets all locks, a thousand at most.
    """
    draft = Draft(view, now_ns)
    draft.inode(request.inode)
    if request.mode:
        check_range(request)
        owner = Owner(request.kind, request.session, request.owner)
        first = min(
            view.locks.in_the_way(request.inode, owner, request.start, request.end, request.mode),
            key=lambda one: one.span.start,
            default=None,
        )
        found = [first] if first is not None else []
    else:
        found = list(islice(view.locks.locks_on(request.inode), LOCKS_MAX + 1))
    reply = draft.reply = meta_pb2.LocksReply(more=len(found) > LOCKS_MAX)
    for owner, span, waits in found[:LOCKS_MAX]:
        reply.locks.add(
            kind=owner.kind,
            session=owner.session,
            owner=owner.owner,
            start=span.start,
            end=span.end,
            mode=span.mode,
            pid=span.pid,
            client=view.locks.client_of(owner.session),
            waits=waits,
        )
    return draft


def statfs(view: View, statistics: dict[str, float], files_max: int) -> meta_pb2.StatFsReply:
    """File counts of the file system. `files_max` is used if the engine has no limit."""
    files, bytes_max = view.inode_count, statistics.get("map_bytes_max", 0)
    if bytes_max:
        files_max = files + int((bytes_max - statistics.get("used_bytes", 0)) / _BYTES_PER_FILE)
    return meta_pb2.StatFsReply(files=files, files_max=max(files, files_max))


def names(view: View, request: meta_pb2.NamesRequest) -> meta_pb2.NamesReply:
    """Find names of inodes among the next entries behind the cursor; the first name found of each.

    Entries are stored by directory and name, so this is a search, one for all of the inodes. It is short at
    its start: an inode is created in the partition of its first name, and most of its later names are there
    too. Unreadable entries are left out (fsck handles them). InvalidRequest: a number can be no inode.
    CorruptRecord: the search cannot continue.
    """
    fits = len(request.inodes) <= 8 * NAMES_INODES_MAX
    wanted = set(read_write_codec.unpack_inodes(request.inodes)) if fits else set()
    if not wanted or not all(0 < number < 1 << 63 for number in (*wanted, request.directory or 1)):
        raise InvalidRequest(f"names of 1 to {NAMES_INODES_MAX} inodes can be asked for")
    reply = meta_pb2.NamesReply()
    if not request.cursor and not request.directory and not request.elsewhere:
        reply.gone = read_write_codec.pack_inodes(
            sorted(number for number in wanted if _is_nameless(view, number))
        )
    # as stored in the value of an entry: short if the entry is in the inode's own partition
    values = {number.to_bytes(8, "big") for number in wanted}
    values.update(records.encode_dentry(partition_of(number), number, 8)[1:] for number in wanted)
    left = min(request.limit or NAMES_LIMIT, NAMES_LIMIT)
    for partition in _partitions_to_search(view, request, wanted):
        start, end = (
            records.dentry_range(partition, request.directory)
            if request.directory
            else (records.prefix(partition, records.DENTRY), records.prefix(partition, records.DENTRY + 1))
        )
        first = max(start, request.cursor)
        if left <= 0:
            reply.cursor = first
            return reply
        pairs, behind = _readable(view, first, end, left)
        left -= max(len(pairs), EMPTY_SCAN)
        for key, raw in pairs:
            if raw[1:] in values:
                _take_name(view, reply, wanted, partition, key, raw)
        if behind:
            reply.cursor = behind
            return reply
    reply.done = True
    return reply


def _partitions_to_search(view: View, request: meta_pb2.NamesRequest, wanted: set[int]) -> Iterable[int]:
    from_partition = records.partition_of_key(request.cursor) if len(request.cursor) > 1 else 0
    if request.directory:
        try:
            wide = bool(view.inode(request.directory).flags & records.WIDE)
        except (NotFound, AccessDenied, WrongShard, CorruptRecord):
            wide = True  # unknown here: it may be wide
        return range(from_partition, PARTITION_COUNT) if wide else (partition_of(request.directory),)
    births = {partition_of(number) for number in wanted}
    if request.elsewhere:
        return (partition for partition in range(from_partition, PARTITION_COUNT) if partition not in births)
    return (partition for partition in sorted(births) if partition >= from_partition)


def _readable(view: View, first: bytes, end: bytes, limit: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The next pairs, and the key to continue from (b"" after the last). An unreadable record is skipped."""
    try:
        pairs = view.scan(first, end, limit)
    except CorruptRecord as error:
        if not first <= error.key < end:
            raise  # the damage is not in a record of this range
        try:
            pairs = view.scan(first, error.key, limit)
        except CorruptRecord:  # the same damaged neighbour again
            pairs = []
        return pairs, error.key + b"\0" if len(pairs) < limit else pairs[-1][0] + b"\0"
    return pairs, pairs[-1][0] + b"\0" if len(pairs) == limit else b""


def _take_name(
    view: View, reply: meta_pb2.NamesReply, wanted: set[int], partition: int, key: bytes, raw: bytes
) -> None:
    try:
        number = records.decode_dentry(partition, raw)[0]
    except CorruptRecord:
        return
    if number not in wanted:
        return
    directory = records.directory_of_key(key)
    try:
        above = view.inode(directory).parent
    except AccessDenied:
        return  # a caller that may not see the directory does not learn names in it
    except (NotFound, WrongShard, CorruptRecord):
        above = 0
    wanted.discard(number)
    reply.names.add(inode=number, directory=directory, name=key[NAME_AT:], above=above)


def _is_nameless(view: View, number: int) -> bool:
    try:
        return not view.inode(number).links
    except NotFound:
        return True
    except (AccessDenied, WrongShard, CorruptRecord):
        return False
