"""Volume decisions: creation, limits, grants. Pure functions, as all in `meta/operations`.

Called by `meta/operations/create` and `meta/requests/volume_handlers`.
"""

from __future__ import annotations

from functools import partial

from nvpool.core.errors import Busy, InvalidRequest, NotFound, ReadOnly
from nvpool.core.names import check_member, check_volume_name
from nvpool.core.units import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, format_bytes
from nvpool.meta.state.records import Inode, decode_inode, inode_key
from nvpool.meta.state.transaction import Draft, View
from nvpool.meta.state.volume_records import (
    ATTACHED,
    ATTACHMENTS_MAX,
    ENCRYPTED,
    GRANTS_MAX,
    KEY_BYTES,
    LISTED,
    REMOVING,
    SEALED,
    USE,
    VOLUME,
    VolumeRecord,
    VolumeUse,
    attached_range,
    decode_use,
    decode_volume,
    encode_use,
    encode_volume,
    volume_key,
)
from nvpool.rpc.messages.meta_messages import CreateRequest
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.security.volume_keys import wrapped_by

NUMBER_MAX = (1 << 63) - 1
TRASH_S_MAX = (1 << 32) - 1


def begin_volume(draft: Draft, root: Inode, request: CreateRequest) -> None:
    """Make the directory that is being created the root of a new volume, in the same change.

    The service checks that the name is valid for a volume. InvalidRequest.
    """
    policy = request.volume
    try:
        name = check_volume_name(request.name.decode("ascii"))
    except UnicodeDecodeError:
        check_volume_name(repr(request.name))
        raise
    if root.volume:
        raise InvalidRequest("a volume cannot contain volumes")
    if request.wide:
        raise InvalidRequest("a volume cannot be a striped directory: a volume is on one shard")
    check_limits(policy.bytes_max, policy.files_max)
    if policy.table:
        if policy.table not in draft.view.tables:
            if request.change.map_epoch > draft.view.map_epoch:
                raise Busy("this shard does not know the newest pool map yet", retry_after_s=0.1)
            raise InvalidRequest(
                f"the pool has no chains of {policy.table} replicas; make them on one of its "
                f"nodes: nvpool volume create POOL {name} --replicas {policy.table}"
            )
        root.table = policy.table
    if policy.chunk_bits:
        if not CHUNK_BYTES_MIN <= 1 << min(policy.chunk_bits, 63) <= CHUNK_BYTES_MAX:
            raise InvalidRequest(f"a chunk has 64 KiB to 16 MiB, not 2**{policy.chunk_bits} bytes")
        root.chunk_bits = policy.chunk_bits
    root.volume = root.number
    record = VolumeRecord(name, policy.bytes_max, policy.files_max, policy.trash_s, draft.now_ns)
    if policy.encrypted:
        record = record._replace(flags=ENCRYPTED, wrapped_key=draft.view.pool_keys.new())
        draft.then = partial(draft.view.access.note, root.number, record)
    draft.effects[volume_key(VOLUME, root.number)] = encode_volume(record)
    draft.effects[volume_key(USE, root.number)] = encode_use(VolumeUse())


def check_limits(bytes_max: int, files_max: int) -> None:
    if bytes_max > NUMBER_MAX or files_max > NUMBER_MAX:
        raise InvalidRequest(f"a quota is {NUMBER_MAX} at most; 0 is none")


def read_volume(view: View, number: int) -> tuple[VolumeRecord, VolumeUse]:
    """Record and usage of a volume.

    NotFound: it is no volume. WrongShard: another shard owns its partition.
    """
    raw = view.record(volume_key(VOLUME, number)) if 0 < number < 1 << 63 else None
    if raw is None:
        raise NotFound(f"inode {number} is not a volume")
    return decode_volume(raw), use_of(view, number)


def use_of(view: View, number: int) -> VolumeUse:
    raw = view.get(volume_key(USE, number))
    return decode_use(raw) if raw is not None else VolumeUse()


def attachments(view: View, number: int) -> list[str]:
    pairs = view.scan(*attached_range(number), ATTACHMENTS_MAX)
    return [key[KEY_BYTES:].decode(errors="replace") for key, _ in pairs]


def state_of(
    view: View, number: int, record: VolumeRecord, use: VolumeUse, caller: str = ""
) -> pb.VolumeState:
    """State of the volume as the caller sees it: a client ("" is a node) learns no other client's rights."""
    state = pb.VolumeState(
        inode=number,
        name=record.name,
        bytes_max=record.bytes_max,
        files_max=record.files_max,
        bytes_used=use.bytes,
        files_used=use.files,
        sealed=bool(record.flags & SEALED),
        trash_s=record.trash_s,
        listed=bool(record.flags & LISTED),
        removing=bool(record.flags & REMOVING),
        files_removing=record.files_removing,
        created_ns=record.created_ns,
        bytes_reserved=view.rooms.promised(number) if view.rooms is not None else 0,
        attachments=attachments(view, number),
        pool_key=wrapped_by(record.wrapped_key) if record.wrapped_key else "",
    )
    state.grants.extend(
        pb.VolumeGrant(client=member, write=write)
        for member, write in record.grants
        if not caller or member == caller
    )
    raw = view.get(inode_key(number))  # readable by everybody, even if the caller may not enter the volume
    if raw is not None:
        state.table, state.chunk_bits = decode_inode(number, raw).layout
    return state


def limited(record: VolumeRecord, use: VolumeUse, promised: int, request: pb.VolumeRequest) -> VolumeRecord:
    """Record after SET.

    InvalidRequest: the quota would be below the usage. ReadOnly: the volume is sealed.
    """
    if record.flags & SEALED and (request.HasField("bytes_max") or request.HasField("files_max")):
        raise ReadOnly(f"volume {record.name} is sealed, and nothing more comes into it")
    if request.HasField("bytes_max"):
        check_limits(request.bytes_max, 0)
        if 0 < request.bytes_max < use.bytes + promised:
            raise InvalidRequest(
                f"volume {record.name} holds {use.bytes} bytes ({format_bytes(use.bytes)})"
                f"{f' and {promised} are promised to writers' if promised else ''}: a quota of "
                f"{request.bytes_max} bytes ({format_bytes(request.bytes_max)}) would lie below that"
            )
        record = record._replace(bytes_max=request.bytes_max)
    if request.HasField("files_max"):
        check_limits(0, request.files_max)
        if 0 < request.files_max < use.files:
            raise InvalidRequest(
                f"volume {record.name} holds {use.files} files: a quota of {request.files_max} would lie "
                f"below that"
            )
        record = record._replace(files_max=request.files_max)
    if request.HasField("trash_s"):
        record = record._replace(trash_s=request.trash_s)
    if request.HasField("listed"):
        record = record._replace(flags=record.flags & ~LISTED | (LISTED if request.listed else 0))
    return record


def granted(record: VolumeRecord, grant: pb.VolumeGrant) -> VolumeRecord:
    """Record with a right for the client. From then on the volume restricts access to its list of grants."""
    check_member(grant.client)
    grants = {**dict(record.grants), grant.client: grant.write}
    if len(grants) > GRANTS_MAX:
        raise InvalidRequest(f"a volume has {GRANTS_MAX} grants at most")
    return record._replace(grants=tuple(sorted(grants.items())), flags=record.flags | LISTED)


def revoked(record: VolumeRecord, client: str) -> VolumeRecord:
    """Record without a right for the client, even if it had none. The list stays, though it may be empty."""
    check_member(client)
    return record._replace(grants=tuple(pair for pair in record.grants if pair[0] != client))


def attached_key(number: int, holder: bytes) -> bytes:
    return volume_key(ATTACHED, number, holder)
