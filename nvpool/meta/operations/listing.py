"""Directory listings: entries in hash order, with attributes, in bounded steps.

Like the other queries (`meta/operations/queries`) a listing changes nothing and does not wait. Called by
`meta/server` only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from stat import S_IFREG

from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongShard
from nvpool.core.grants import READ
from nvpool.core.ids import partition_of
from nvpool.core.units import PARTITION_BITS, PARTITION_COUNT
from nvpool.meta.state import records
from nvpool.meta.state.records import HASH_AT, NAME_AT
from nvpool.meta.state.transaction import View, fill_attr
from nvpool.poolmap.shards.partitions import (
    HASH_BITS,
    cursor_at,
    cursor_behind,
    cursor_parts,
    partition_of_name,
)
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.direntries import ENTRY
from nvpool.rpc.v1 import meta_pb2

S_IFMT = 0o170000
LIST_LIMIT, LIST_LIMIT_MAX = 256, 1024
"""Entries in a reply: a thousand of them with attributes hold the event loop for about five milliseconds."""
STEP_OF_CLIENT = 32
"""Entries or inodes of a reply to a client before other requests get their turn: a quarter of a millisecond."""
_CHANGE, _TARGET, _FLAGS, _VOLUME, _CUT, _TABLE = map(
    records.INODE_FIELDS.index, ("change", "target", "flags", "volume", "cut", "table")
)
WIDE_STEP = 64
"""Partitions of a wide directory that are scanned before other requests get their turn."""


def listing(
    view: View,
    request: meta_pb2.ListDirRequest,
    now_ns: Callable[[], int],
    *,
    names_alone: bool = False,
    entries_per_step: int = LIST_LIMIT_MAX,
    note: Callable[[meta_pb2.ListDirReply], None] | None = None,
) -> Iterator[meta_pb2.ListDirReply | None]:
    """Entries behind the cursor, or from a name on.

    Yields one reply at the end, and None wherever other requests should get their turn: after
    `entries_per_step` entries at the latest. `note` is called with the part of the reply that each step has
    made, so the parts are as consistent as pages of a listing are among one another. A name that exists
    from the first request to the last comes exactly once. Names come in the order of their hashes, which in a
    wide directory is also the order of their partitions. A name whose inode is missing is left out (fsck
    handles it). If more entries follow, the reply has at least one entry, after which the client continues.
    `names_alone`: the reply has no attributes, as for inodes of another shard.
    """
    limit = min(request.limit or LIST_LIMIT, LIST_LIMIT_MAX)
    whole, left, packed, rights = meta_pb2.ListDirReply(), limit, [], []
    while True:
        reply, behind, taken = yield from _part(
            view, request, now_ns, names_alone, min(left, entries_per_step)
        )
        if note is not None:
            note(reply)
        left -= taken
        packed.append(reply.packed)
        rights.append(reply.grants)
        whole.entries.extend(reply.entries)
        whole.lease_ms = whole.lease_ms or reply.lease_ms
        if not reply.more or (left <= 0 and (whole.entries or any(packed))):
            whole.more, whole.next = reply.more, reply.next
            whole.packed, whole.grants = b"".join(packed), b"".join(rights)
            yield whole
            return
        if left <= 0:
            left = limit
        yield None
        request.cursor, request.name = behind, b""


def _part(
    view: View, request: meta_pb2.ListDirRequest, now_ns: Callable[[], int], names_alone: bool, limit: int
) -> Generator[None, None, tuple[meta_pb2.ListDirReply, int, int]]:
    """Reply with up to `limit` entries, the cursor behind all of them, and their count.

    Entries that cannot be shown are left out of the reply, and are counted.
    """
    from_hash, leave_out = cursor_parts(request.cursor)
    if request.name:
        from_hash, leave_out = view.name_hash(request.inode, request.name), 0
    directory = view.listed(request.inode, from_hash, request.spread)
    wide = bool(directory.flags & records.WIDE)
    partition = partition_of_name(directory.number, wide, from_hash)
    last = PARTITION_COUNT - 1 if wide else partition
    found: list[tuple[bytes, bytes]] = []
    skipped = leave_out
    start, end = records.dentry_range(partition, directory.number, from_hash)
    steps = behind = 0
    while True:
        found += view.scan(start, end, limit + 1 + skipped - len(found))
        if len(found) > limit + skipped or partition == last:
            break
        steps += 1
        if not steps % WIDE_STEP:
            yield None
        partition += 1
        if view.owners and view.is_elsewhere(partition):
            behind = partition << HASH_BITS - PARTITION_BITS
            break
        start, end = records.dentry_range(partition, directory.number)
    # other requests may have changed the entries that were found before they got their turn
    reply, cursor, taken = _listed(
        view,
        request,
        found,
        from_hash,
        leave_out,
        limit,
        steps < WIDE_STEP and not names_alone,
        now_ns,
        names_alone,
    )
    if behind and not reply.more:
        reply.next = cursor_at(behind)
    return reply, cursor, taken


def _listed(
    view: View,
    request: meta_pb2.ListDirRequest,
    found: list[tuple[bytes, bytes]],
    from_hash: bytes,
    leave_out: int,
    limit: int,
    issues_leases: bool,
    now_ns: Callable[[], int],
    names_alone: bool,
) -> tuple[meta_pb2.ListDirReply, int, int]:
    reply, behind = meta_pb2.ListDirReply(), request.cursor
    places: list[tuple[bytes, int, int, int]] = []  # name, cursor behind the name, inode, kind
    before, equal = from_hash, 0
    taken = 0
    for key, raw in found:
        name_hash = key[HASH_AT:NAME_AT]
        if name_hash == before:
            equal += 1
            if equal <= leave_out and name_hash == from_hash:
                continue
        else:
            before, equal = name_hash, 1
        if taken >= limit:
            reply.more = True
            break
        taken += 1
        behind = cursor_behind(name_hash, equal)
        try:
            number, kind = records.decode_dentry(records.partition_of_key(key), raw)
        except CorruptRecord:
            continue
        places.append((key[NAME_AT:], behind, number, kind))
    if request.packed or request.attrs:
        found_inodes = (
            [_elsewhere(number, kind) for _, _, number, kind in places]
            if names_alone
            else _inodes(view, [place[2] for place in places])
        )
        if view.owners:
            found_inodes = [
                _elsewhere(number, kind)
                if (fields is None and view.is_elsewhere(partition_of(number)))
                or (fields is not None and fields[_FLAGS] & records.DIVIDED)
                else fields
                for (_, _, number, kind), fields in zip(places, found_inodes, strict=True)
            ]
        places = [place for place, fields in zip(places, found_inodes, strict=True) if fields is not None]
        inodes = [fields for fields in found_inodes if fields is not None]
        if not names_alone:
            view.check_delegations(request.session, inodes, now_ns())
        leased = view.issue_leases(request.session, inodes) if issues_leases and places else ()
        if leased:
            reply.lease_ms = view.lease_ms
        if request.packed:
            reply.packed = _packed(places, inodes, leased)
            # in restricted volumes each grant needs its own request, so that it is checked
            if request.rights & READ and leased and not view.access.restricted:
                reply.grants = _grants(view, request.session, inodes, leased, now_ns())
            return reply, behind, taken
    for at, (name, cursor, number, kind) in enumerate(places):
        entry = reply.entries.add(name=name, cursor=cursor, inode=number, kind=kind)
        if request.attrs and inodes[at][_CHANGE]:
            fill_attr(entry.attr, records.Inode(*inodes[at]))
            entry.promised = number in leased
    return reply, behind, taken


def _grants(view: View, session: int, inodes: list[tuple], leased: Collection[int], now_ns: int) -> bytes:
    """Read grants for the regular files that have a lease, in order."""
    return b"".join(
        [
            view.signed(READ, session, fields[0], fields[_CUT], fields[_TABLE], fields[_VOLUME], now_ns)
            for fields in inodes
            if fields[0] in leased and fields[1] & S_IFMT == S_IFREG
        ]
    )


def attributes(view: View, request: meta_pb2.GetAttrManyRequest, now_ns: int) -> meta_pb2.GetAttrManyReply:
    """Attributes of many inodes of this shard, for a client that has their names from another shard.

    Deleted inodes, and inodes in volumes to which the caller has no right, are left out.
    """
    check_inode_count(request.inodes)
    numbers = read_write_codec.unpack_inodes(request.inodes)
    if not all(0 < number < 1 << 63 for number in numbers):
        raise InvalidRequest(
            "attributes are asked for by the numbers of inodes, which are from 1 to 2**63 - 1"
        )
    for number in numbers:
        if view.is_elsewhere(partition_of(number)):
            raise WrongShard(f"inode {number} belongs to another shard")
    may_see = view.access.may_see
    inodes = [
        fields
        for fields in _inodes(view, list(numbers))
        # the root directory of a volume is visible to all by its name
        if fields is not None and (fields[_VOLUME] == fields[0] or may_see(fields[_VOLUME]))
    ]
    view.check_delegations(request.session, inodes, now_ns)
    leased = view.issue_leases(request.session, inodes) if inodes else ()
    places = [(b"", 0, 0, 0)] * len(inodes)
    reply = meta_pb2.GetAttrManyReply(
        packed=_packed(places, inodes, leased), lease_ms=view.lease_ms if leased else 0
    )
    if request.rights & READ and leased and not view.access.restricted:  # as in a listing
        reply.grants = _grants(view, request.session, inodes, leased, now_ns)
    return reply


def attributes_in_steps(
    view: View,
    request: meta_pb2.GetAttrManyRequest,
    now_ns: Callable[[], int],
    inodes_per_step: int = LIST_LIMIT_MAX,
) -> Iterator[meta_pb2.GetAttrManyReply | None]:
    """As `attributes`. Yields one reply at the end, and None wherever other requests should get their turn."""
    check_inode_count(request.inodes)
    reply, packed, rights = meta_pb2.GetAttrManyReply(), [], []
    for first in range(0, len(request.inodes), 8 * inodes_per_step):
        if first:
            yield None
        some = meta_pb2.GetAttrManyRequest(
            session=request.session,
            inodes=request.inodes[first : first + 8 * inodes_per_step],
            rights=request.rights,
        )
        part = attributes(view, some, now_ns())
        packed.append(part.packed)
        rights.append(part.grants)
        reply.lease_ms = reply.lease_ms or part.lease_ms
    reply.packed, reply.grants = b"".join(packed), b"".join(rights)
    yield reply


def check_inode_count(packed: bytes) -> None:
    """InvalidRequest: the list of inodes is longer than one request may have."""
    if len(packed) > 8 * LIST_LIMIT_MAX:
        raise InvalidRequest(
            f"the attributes of {LIST_LIMIT_MAX} inodes at most can be asked for in one request, not of "
            f"{len(packed) // 8}; ask for the others in the next one"
        )


def _elsewhere(number: int, kind: int) -> tuple:
    """`inode_fields` of an inode of another shard: no links, so it gets no lease, and the change number is
    0."""
    fields = [0] * len(records.INODE_FIELDS)
    fields[0], fields[1], fields[_TARGET] = number, kind << 12, b""
    return tuple(fields)


def _packed(places: list[tuple[bytes, int, int, int]], inodes: list[tuple], leased: Collection[int]) -> bytes:
    pack, shown = ENTRY.pack, records.SHOWN_FLAGS
    parts = []
    for (name, cursor, _, _), (
        number,
        mode,
        links,
        uid,
        gid,
        size,
        blocks,
        atime,
        mtime,
        ctime,
        change,
        cut,
        rdev,
        table,
        chunk_bits,
        flags,
        parent,
        _,
        punches,
        *_,
    ) in zip(places, inodes, strict=True):
        parts.append(
            pack(
                cursor,
                number,
                mode,
                links,
                uid,
                gid,
                size,
                blocks,
                atime,
                mtime,
                ctime,
                change,
                cut,
                rdev,
                table,
                chunk_bits,
                flags & shown,
                parent,
                punches,
                number in leased,
                len(name),
            )
        )
        parts.append(name)
    return b"".join(parts)


def _inodes(view: View, numbers: list[int]) -> list[tuple | None]:
    """`inode_fields` of each inode; None if it does not exist or cannot be read."""
    try:
        raws = view.get_many(list(map(records.inode_key, numbers)))
    except CorruptRecord:  # one record is damaged: the others are shown
        return [_one(view, number) for number in numbers]
    return [_fields(number, raw) for number, raw in zip(numbers, raws, strict=True)]


def _one(view: View, number: int) -> tuple | None:
    try:
        return _fields(number, view.get(records.inode_key(number)))
    except CorruptRecord:
        return None


def _fields(number: int, raw: bytes | None) -> tuple | None:
    try:
        return None if raw is None else records.inode_fields(number, raw)
    except CorruptRecord:
        return None
