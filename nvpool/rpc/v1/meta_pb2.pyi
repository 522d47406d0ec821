from nvpool.rpc.v1 import pool_pb2 as _pool_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Change(_message.Message):
    __slots__ = ("session", "slot", "sequence", "map_epoch", "uid", "gid")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    session: int
    slot: int
    sequence: int
    map_epoch: int
    uid: int
    gid: int
    def __init__(self, session: _Optional[int] = ..., slot: _Optional[int] = ..., sequence: _Optional[int] = ..., map_epoch: _Optional[int] = ..., uid: _Optional[int] = ..., gid: _Optional[int] = ...) -> None: ...

class Attr(_message.Message):
    __slots__ = ("inode", "mode", "links", "uid", "gid", "size", "blocks", "atime_ns", "mtime_ns", "ctime_ns", "rdev", "table", "chunk_bits", "cut", "flags", "change", "parent", "punches", "volume", "birth_ns")
    INODE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ATIME_NS_FIELD_NUMBER: _ClassVar[int]
    MTIME_NS_FIELD_NUMBER: _ClassVar[int]
    CTIME_NS_FIELD_NUMBER: _ClassVar[int]
    RDEV_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BITS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PUNCHES_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    BIRTH_NS_FIELD_NUMBER: _ClassVar[int]
    inode: int
    mode: int
    links: int
    uid: int
    gid: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    rdev: int
    table: int
    chunk_bits: int
    cut: int
    flags: int
    change: int
    parent: int
    punches: int
    volume: int
    birth_ns: int
    def __init__(self, inode: _Optional[int] = ..., mode: _Optional[int] = ..., links: _Optional[int] = ..., uid: _Optional[int] = ..., gid: _Optional[int] = ..., size: _Optional[int] = ..., blocks: _Optional[int] = ..., atime_ns: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., ctime_ns: _Optional[int] = ..., rdev: _Optional[int] = ..., table: _Optional[int] = ..., chunk_bits: _Optional[int] = ..., cut: _Optional[int] = ..., flags: _Optional[int] = ..., change: _Optional[int] = ..., parent: _Optional[int] = ..., punches: _Optional[int] = ..., volume: _Optional[int] = ..., birth_ns: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("attr", "grant", "lease_ms", "elsewhere")
    ATTR_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    attr: Attr
    grant: bytes
    lease_ms: int
    elsewhere: bool
    def __init__(self, attr: _Optional[_Union[Attr, _Mapping]] = ..., grant: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., elsewhere: _Optional[bool] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("client", "session", "secret", "watch", "names_open", "opened", "identity", "names_slots", "slots")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    NAMES_OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NAMES_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    client: str
    session: int
    secret: bytes
    watch: bool
    names_open: bool
    opened: bytes
    identity: int
    names_slots: bool
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client: _Optional[str] = ..., session: _Optional[int] = ..., secret: _Optional[bytes] = ..., watch: _Optional[bool] = ..., names_open: _Optional[bool] = ..., opened: _Optional[bytes] = ..., identity: _Optional[int] = ..., names_slots: _Optional[bool] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("session", "secret", "lease_s", "slots", "sequences", "incarnation", "watch", "watch_ms", "linger_ms", "name_key", "delegates")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    WATCH_MS_FIELD_NUMBER: _ClassVar[int]
    LINGER_MS_FIELD_NUMBER: _ClassVar[int]
    NAME_KEY_FIELD_NUMBER: _ClassVar[int]
    DELEGATES_FIELD_NUMBER: _ClassVar[int]
    session: int
    secret: bytes
    lease_s: float
    slots: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    incarnation: int
    watch: int
    watch_ms: int
    linger_ms: int
    name_key: bytes
    delegates: bool
    def __init__(self, session: _Optional[int] = ..., secret: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., slots: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ..., incarnation: _Optional[int] = ..., watch: _Optional[int] = ..., watch_ms: _Optional[int] = ..., linger_ms: _Optional[int] = ..., name_key: _Optional[bytes] = ..., delegates: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "watch", "seen", "leaves")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    watch: int
    seen: int
    leaves: bool
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., watch: _Optional[int] = ..., seen: _Optional[int] = ..., leaves: _Optional[bool] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("watch", "number", "inodes", "watch_ms", "map_epoch", "delegates")
    WATCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    WATCH_MS_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DELEGATES_FIELD_NUMBER: _ClassVar[int]
    watch: int
    number: int
    inodes: bytes
    watch_ms: int
    map_epoch: int
    delegates: bool
    def __init__(self, watch: _Optional[int] = ..., number: _Optional[int] = ..., inodes: _Optional[bytes] = ..., watch_ms: _Optional[int] = ..., map_epoch: _Optional[int] = ..., delegates: _Optional[bool] = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "released", "opened", "identity", "named")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    released: bytes
    opened: bytes
    identity: int
    named: bool
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., released: _Optional[bytes] = ..., opened: _Optional[bytes] = ..., identity: _Optional[int] = ..., named: _Optional[bool] = ...) -> None: ...

class RenewSessionReply(_message.Message):
    __slots__ = ("lease_s", "map_epoch", "incarnation", "held")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    map_epoch: int
    incarnation: int
    held: bytes
    def __init__(self, lease_s: _Optional[float] = ..., map_epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., held: _Optional[bytes] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "parent", "name", "rights", "spread")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    parent: int
    name: bytes
    rights: int
    spread: bool
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., parent: _Optional[int] = ..., name: _Optional[bytes] = ..., rights: _Optional[int] = ..., spread: _Optional[bool] = ...) -> None: ...

class NamesIn(_message.Message):
    __slots__ = ("parent", "names", "spread")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    parent: int
    names: _containers.RepeatedScalarFieldContainer[bytes]
    spread: bool
    def __init__(self, parent: _Optional[int] = ..., names: _Optional[_Iterable[bytes]] = ..., spread: _Optional[bool] = ...) -> None: ...

class LookupManyRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "directories", "rights")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    directories: _containers.RepeatedCompositeFieldContainer[NamesIn]
    rights: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., directories: _Optional[_Iterable[_Union[NamesIn, _Mapping]]] = ..., rights: _Optional[int] = ...) -> None: ...

class FoundName(_message.Message):
    __slots__ = ("entry", "error")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    entry: Entry
    error: int
    def __init__(self, entry: _Optional[_Union[Entry, _Mapping]] = ..., error: _Optional[int] = ...) -> None: ...

class LookupManyReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedCompositeFieldContainer[FoundName]
    def __init__(self, found: _Optional[_Iterable[_Union[FoundName, _Mapping]]] = ...) -> None: ...

class GetAttrRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "rights", "birth")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    rights: int
    birth: bool
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., rights: _Optional[int] = ..., birth: _Optional[bool] = ...) -> None: ...

class GetAttrManyRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inodes", "rights")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inodes: bytes
    rights: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inodes: _Optional[bytes] = ..., rights: _Optional[int] = ...) -> None: ...

class GetAttrManyReply(_message.Message):
    __slots__ = ("packed", "lease_ms", "grants")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    lease_ms: int
    grants: bytes
    def __init__(self, packed: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., grants: _Optional[bytes] = ...) -> None: ...

class PartsRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inodes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inodes: bytes
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inodes: _Optional[bytes] = ...) -> None: ...

class DirectoryPart(_message.Message):
    __slots__ = ("inode", "entries", "subdirectories", "mtime_ns", "ctime_ns", "change")
    INODE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SUBDIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    MTIME_NS_FIELD_NUMBER: _ClassVar[int]
    CTIME_NS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    inode: int
    entries: int
    subdirectories: int
    mtime_ns: int
    ctime_ns: int
    change: int
    def __init__(self, inode: _Optional[int] = ..., entries: _Optional[int] = ..., subdirectories: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., ctime_ns: _Optional[int] = ..., change: _Optional[int] = ...) -> None: ...

class PartsReply(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[DirectoryPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[DirectoryPart, _Mapping]]] = ...) -> None: ...

class SetAttrRequest(_message.Message):
    __slots__ = ("change", "inode", "valid", "mode", "uid", "gid", "size", "atime_ns", "mtime_ns", "ctime_ns", "chunk_bits", "replicas", "rights")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ATIME_NS_FIELD_NUMBER: _ClassVar[int]
    MTIME_NS_FIELD_NUMBER: _ClassVar[int]
    CTIME_NS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BITS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    valid: int
    mode: int
    uid: int
    gid: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    chunk_bits: int
    replicas: int
    rights: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., valid: _Optional[int] = ..., mode: _Optional[int] = ..., uid: _Optional[int] = ..., gid: _Optional[int] = ..., size: _Optional[int] = ..., atime_ns: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., ctime_ns: _Optional[int] = ..., chunk_bits: _Optional[int] = ..., replicas: _Optional[int] = ..., rights: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("change", "inode", "offset", "length", "punch", "grow", "rights")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PUNCH_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    offset: int
    length: int
    punch: bool
    grow: bool
    rights: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., punch: _Optional[bool] = ..., grow: _Optional[bool] = ..., rights: _Optional[int] = ...) -> None: ...

class ReadLinkRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ...) -> None: ...

class ReadLinkReply(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: bytes
    def __init__(self, target: _Optional[bytes] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("change", "parent", "name", "mode", "rdev", "target", "open", "rights", "exclusive", "wide", "truncate", "spread", "volume", "masked", "unnamed")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    RDEV_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    WIDE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    UNNAMED_FIELD_NUMBER: _ClassVar[int]
    change: Change
    parent: int
    name: bytes
    mode: int
    rdev: int
    target: bytes
    open: bool
    rights: int
    exclusive: bool
    wide: bool
    truncate: bool
    spread: bool
    volume: VolumePolicy
    masked: int
    unnamed: bool
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., parent: _Optional[int] = ..., name: _Optional[bytes] = ..., mode: _Optional[int] = ..., rdev: _Optional[int] = ..., target: _Optional[bytes] = ..., open: _Optional[bool] = ..., rights: _Optional[int] = ..., exclusive: _Optional[bool] = ..., wide: _Optional[bool] = ..., truncate: _Optional[bool] = ..., spread: _Optional[bool] = ..., volume: _Optional[_Union[VolumePolicy, _Mapping]] = ..., masked: _Optional[int] = ..., unnamed: _Optional[bool] = ...) -> None: ...

class CreateReply(_message.Message):
    __slots__ = ("entry", "created", "parent")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    entry: Entry
    created: bool
    parent: Attr
    def __init__(self, entry: _Optional[_Union[Entry, _Mapping]] = ..., created: _Optional[bool] = ..., parent: _Optional[_Union[Attr, _Mapping]] = ...) -> None: ...

class UnlinkRequest(_message.Message):
    __slots__ = ("change", "parent", "name", "spread")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    change: Change
    parent: int
    name: bytes
    spread: bool
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., parent: _Optional[int] = ..., name: _Optional[bytes] = ..., spread: _Optional[bool] = ...) -> None: ...

class UnlinkReply(_message.Message):
    __slots__ = ("inode", "links", "parent")
    INODE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    inode: int
    links: int
    parent: Attr
    def __init__(self, inode: _Optional[int] = ..., links: _Optional[int] = ..., parent: _Optional[_Union[Attr, _Mapping]] = ...) -> None: ...

class RenameRequest(_message.Message):
    __slots__ = ("change", "parent", "name", "new_parent", "new_name", "flags", "spread")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEW_PARENT_FIELD_NUMBER: _ClassVar[int]
    NEW_NAME_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    change: Change
    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    flags: int
    spread: bool
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., parent: _Optional[int] = ..., name: _Optional[bytes] = ..., new_parent: _Optional[int] = ..., new_name: _Optional[bytes] = ..., flags: _Optional[int] = ..., spread: _Optional[bool] = ...) -> None: ...

class RenameReply(_message.Message):
    __slots__ = ("replaced", "inode")
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    replaced: int
    inode: int
    def __init__(self, replaced: _Optional[int] = ..., inode: _Optional[int] = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("change", "inode", "parent", "name")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    parent: int
    name: bytes
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., parent: _Optional[int] = ..., name: _Optional[bytes] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("change", "inode", "rights", "truncate", "wanted")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    rights: int
    truncate: bool
    wanted: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., rights: _Optional[int] = ..., truncate: _Optional[bool] = ..., wanted: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inodes", "slots", "gone")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inodes: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    gone: bytes
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inodes: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., gone: _Optional[bytes] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("change", "inode", "cut", "end", "wrote", "sync", "release", "blocks_delta", "withdrawn")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WROTE_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DELTA_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    cut: int
    end: int
    wrote: bool
    sync: bool
    release: bool
    blocks_delta: int
    withdrawn: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., cut: _Optional[int] = ..., end: _Optional[int] = ..., wrote: _Optional[bool] = ..., sync: _Optional[bool] = ..., release: _Optional[bool] = ..., blocks_delta: _Optional[int] = ..., withdrawn: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("change", "inode", "length", "cut", "deferred", "own")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    length: int
    cut: int
    deferred: bool
    own: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., length: _Optional[int] = ..., cut: _Optional[int] = ..., deferred: _Optional[bool] = ..., own: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("offset", "attr", "shared")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ATTR_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    offset: int
    attr: Attr
    shared: bool
    def __init__(self, offset: _Optional[int] = ..., attr: _Optional[_Union[Attr, _Mapping]] = ..., shared: _Optional[bool] = ...) -> None: ...

class ListDirRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "cursor", "limit", "attrs", "name", "packed", "spread", "rights")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ATTRS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    cursor: int
    limit: int
    attrs: bool
    name: bytes
    packed: bool
    spread: bool
    rights: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., cursor: _Optional[int] = ..., limit: _Optional[int] = ..., attrs: _Optional[bool] = ..., name: _Optional[bytes] = ..., packed: _Optional[bool] = ..., spread: _Optional[bool] = ..., rights: _Optional[int] = ...) -> None: ...

class DirEntry(_message.Message):
    __slots__ = ("name", "cursor", "inode", "kind", "attr", "promised")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ATTR_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    cursor: int
    inode: int
    kind: int
    attr: Attr
    promised: bool
    def __init__(self, name: _Optional[bytes] = ..., cursor: _Optional[int] = ..., inode: _Optional[int] = ..., kind: _Optional[int] = ..., attr: _Optional[_Union[Attr, _Mapping]] = ..., promised: _Optional[bool] = ...) -> None: ...

class ListDirReply(_message.Message):
    __slots__ = ("entries", "more", "lease_ms", "packed", "next", "grants")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[DirEntry]
    more: bool
    lease_ms: int
    packed: bytes
    next: int
    grants: bytes
    def __init__(self, entries: _Optional[_Iterable[_Union[DirEntry, _Mapping]]] = ..., more: _Optional[bool] = ..., lease_ms: _Optional[int] = ..., packed: _Optional[bytes] = ..., next: _Optional[int] = ..., grants: _Optional[bytes] = ...) -> None: ...

class StatFsRequest(_message.Message):
    __slots__ = ("session", "map_epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ...) -> None: ...

class StatFsReply(_message.Message):
    __slots__ = ("files", "files_max")
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILES_MAX_FIELD_NUMBER: _ClassVar[int]
    files: int
    files_max: int
    def __init__(self, files: _Optional[int] = ..., files_max: _Optional[int] = ...) -> None: ...

class GetXattrRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "name")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    name: bytes
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., name: _Optional[bytes] = ...) -> None: ...

class GetXattrReply(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class SetXattrRequest(_message.Message):
    __slots__ = ("change", "inode", "name", "value", "flags")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    name: bytes
    value: bytes
    flags: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., name: _Optional[bytes] = ..., value: _Optional[bytes] = ..., flags: _Optional[int] = ...) -> None: ...

class ListXattrRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ...) -> None: ...

class ListXattrReply(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RemoveXattrRequest(_message.Message):
    __slots__ = ("change", "inode", "name")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    name: bytes
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., name: _Optional[bytes] = ...) -> None: ...

class AttrReply(_message.Message):
    __slots__ = ("attr",)
    ATTR_FIELD_NUMBER: _ClassVar[int]
    attr: Attr
    def __init__(self, attr: _Optional[_Union[Attr, _Mapping]] = ...) -> None: ...

class LockRequest(_message.Message):
    __slots__ = ("change", "inode", "kind", "owner", "start", "end", "mode", "pid", "wait", "ticket")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    change: Change
    inode: int
    kind: int
    owner: int
    start: int
    end: int
    mode: int
    pid: int
    wait: bool
    ticket: int
    def __init__(self, change: _Optional[_Union[Change, _Mapping]] = ..., inode: _Optional[int] = ..., kind: _Optional[int] = ..., owner: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., mode: _Optional[int] = ..., pid: _Optional[int] = ..., wait: _Optional[bool] = ..., ticket: _Optional[int] = ...) -> None: ...

class LockReply(_message.Message):
    __slots__ = ("granted", "ticket", "attr")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ATTR_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    ticket: int
    attr: Attr
    def __init__(self, granted: _Optional[bool] = ..., ticket: _Optional[int] = ..., attr: _Optional[_Union[Attr, _Mapping]] = ...) -> None: ...

class LockWaitRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "tickets", "given_up")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    tickets: bytes
    given_up: bytes
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., tickets: _Optional[bytes] = ..., given_up: _Optional[bytes] = ...) -> None: ...

class LockWaitReply(_message.Message):
    __slots__ = ("tickets",)
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    tickets: bytes
    def __init__(self, tickets: _Optional[bytes] = ...) -> None: ...

class LocksRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "kind", "owner", "start", "end", "mode")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    kind: int
    owner: int
    start: int
    end: int
    mode: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., kind: _Optional[int] = ..., owner: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., mode: _Optional[int] = ...) -> None: ...

class HeldLock(_message.Message):
    __slots__ = ("kind", "session", "owner", "start", "end", "mode", "pid", "client", "waits")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    kind: int
    session: int
    owner: int
    start: int
    end: int
    mode: int
    pid: int
    client: str
    waits: bool
    def __init__(self, kind: _Optional[int] = ..., session: _Optional[int] = ..., owner: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., mode: _Optional[int] = ..., pid: _Optional[int] = ..., client: _Optional[str] = ..., waits: _Optional[bool] = ...) -> None: ...

class LocksReply(_message.Message):
    __slots__ = ("locks", "more")
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    locks: _containers.RepeatedCompositeFieldContainer[HeldLock]
    more: bool
    def __init__(self, locks: _Optional[_Iterable[_Union[HeldLock, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ("session", "map_epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ...) -> None: ...

class SyncReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpRequest(_message.Message):
    __slots__ = ("cursor", "limit")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    limit: int
    def __init__(self, cursor: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class DumpReply(_message.Message):
    __slots__ = ("cursor", "done", "records")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    done: bool
    records: int
    def __init__(self, cursor: _Optional[bytes] = ..., done: _Optional[bool] = ..., records: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: bool
    last: bool
    def __init__(self, first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    def __init__(self, records: _Optional[int] = ...) -> None: ...

class MomentRequest(_message.Message):
    __slots__ = ("id", "stage", "dump", "repair", "drop")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[MomentRequest.Stage]
        QUIET: _ClassVar[MomentRequest.Stage]
        TAKE: _ClassVar[MomentRequest.Stage]
        END: _ClassVar[MomentRequest.Stage]
    NONE: MomentRequest.Stage
    QUIET: MomentRequest.Stage
    TAKE: MomentRequest.Stage
    END: MomentRequest.Stage
    ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    id: int
    stage: MomentRequest.Stage
    dump: bool
    repair: bool
    drop: bytes
    def __init__(self, id: _Optional[int] = ..., stage: _Optional[_Union[MomentRequest.Stage, str]] = ..., dump: _Optional[bool] = ..., repair: _Optional[bool] = ..., drop: _Optional[bytes] = ...) -> None: ...

class MomentReply(_message.Message):
    __slots__ = ("cursor", "partitions", "stood")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    STOOD_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    partitions: bytes
    stood: bool
    def __init__(self, cursor: _Optional[bytes] = ..., partitions: _Optional[bytes] = ..., stood: _Optional[bool] = ...) -> None: ...

class FsckRequest(_message.Message):
    __slots__ = ("cursor", "limit", "repair", "partitions")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    limit: int
    repair: bool
    partitions: bytes
    def __init__(self, cursor: _Optional[bytes] = ..., limit: _Optional[int] = ..., repair: _Optional[bool] = ..., partitions: _Optional[bytes] = ...) -> None: ...

class FsckSumsRequest(_message.Message):
    __slots__ = ("sums", "repair", "uneven")
    SUMS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_FIELD_NUMBER: _ClassVar[int]
    sums: bytes
    repair: bool
    uneven: bytes
    def __init__(self, sums: _Optional[bytes] = ..., repair: _Optional[bool] = ..., uneven: _Optional[bytes] = ...) -> None: ...

class FsckClimbRequest(_message.Message):
    __slots__ = ("inodes", "trace", "loose", "parent")
    INODES_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    LOOSE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    inodes: bytes
    trace: bool
    loose: int
    parent: int
    def __init__(self, inodes: _Optional[bytes] = ..., trace: _Optional[bool] = ..., loose: _Optional[int] = ..., parent: _Optional[int] = ...) -> None: ...

class FsckClimbReply(_message.Message):
    __slots__ = ("above", "way", "loosened")
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    LOOSENED_FIELD_NUMBER: _ClassVar[int]
    above: bytes
    way: bytes
    loosened: bool
    def __init__(self, above: _Optional[bytes] = ..., way: _Optional[bytes] = ..., loosened: _Optional[bool] = ...) -> None: ...

class FsckProblem(_message.Message):
    __slots__ = ("kind", "text", "repaired", "inode")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    repaired: bool
    inode: int
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., repaired: _Optional[bool] = ..., inode: _Optional[int] = ...) -> None: ...

class FsckReply(_message.Message):
    __slots__ = ("cursor", "done", "checked", "problems", "sums", "passed", "above", "copies")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    done: bool
    checked: int
    problems: _containers.RepeatedCompositeFieldContainer[FsckProblem]
    sums: bytes
    passed: bytes
    above: bytes
    copies: bytes
    def __init__(self, cursor: _Optional[bytes] = ..., done: _Optional[bool] = ..., checked: _Optional[int] = ..., problems: _Optional[_Iterable[_Union[FsckProblem, _Mapping]]] = ..., sums: _Optional[bytes] = ..., passed: _Optional[bytes] = ..., above: _Optional[bytes] = ..., copies: _Optional[bytes] = ...) -> None: ...

class MetaStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetaStatusReply(_message.Message):
    __slots__ = ("shard", "state", "pid", "inodes", "sessions", "orphans", "to_collect", "counters", "next_counter", "reason")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    TO_COLLECT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_COUNTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    shard: int
    state: str
    pid: int
    inodes: int
    sessions: int
    orphans: int
    to_collect: int
    counters: _containers.ScalarMap[str, float]
    next_counter: int
    reason: str
    def __init__(self, shard: _Optional[int] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., inodes: _Optional[int] = ..., sessions: _Optional[int] = ..., orphans: _Optional[int] = ..., to_collect: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., next_counter: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ("inodes", "left")
    INODES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    inodes: int
    left: int
    def __init__(self, inodes: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class NamesRequest(_message.Message):
    __slots__ = ("inodes", "directory", "elsewhere", "cursor", "limit")
    INODES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    inodes: bytes
    directory: int
    elsewhere: bool
    cursor: bytes
    limit: int
    def __init__(self, inodes: _Optional[bytes] = ..., directory: _Optional[int] = ..., elsewhere: _Optional[bool] = ..., cursor: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class NamedInode(_message.Message):
    __slots__ = ("inode", "directory", "name", "above")
    INODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    inode: int
    directory: int
    name: bytes
    above: int
    def __init__(self, inode: _Optional[int] = ..., directory: _Optional[int] = ..., name: _Optional[bytes] = ..., above: _Optional[int] = ...) -> None: ...

class NamesReply(_message.Message):
    __slots__ = ("names", "gone", "cursor", "done")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[NamedInode]
    gone: bytes
    cursor: bytes
    done: bool
    def __init__(self, names: _Optional[_Iterable[_Union[NamedInode, _Mapping]]] = ..., gone: _Optional[bytes] = ..., cursor: _Optional[bytes] = ..., done: _Optional[bool] = ...) -> None: ...

class ShipRequest(_message.Message):
    __slots__ = ("shard", "member", "term", "committed", "pairs", "authority")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    shard: int
    member: int
    term: int
    committed: int
    pairs: bool
    authority: bytes
    def __init__(self, shard: _Optional[int] = ..., member: _Optional[int] = ..., term: _Optional[int] = ..., committed: _Optional[int] = ..., pairs: _Optional[bool] = ..., authority: _Optional[bytes] = ...) -> None: ...

class ShipReply(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("shard", "member", "term", "step", "sequence", "sequence_term", "authority")
    class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[FollowRequest.Step]
        BEGIN: _ClassVar[FollowRequest.Step]
        KEEP: _ClassVar[FollowRequest.Step]
        INSTALL: _ClassVar[FollowRequest.Step]
        INSTALLED: _ClassVar[FollowRequest.Step]
        SYNC: _ClassVar[FollowRequest.Step]
    NONE: FollowRequest.Step
    BEGIN: FollowRequest.Step
    KEEP: FollowRequest.Step
    INSTALL: FollowRequest.Step
    INSTALLED: FollowRequest.Step
    SYNC: FollowRequest.Step
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_TERM_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    shard: int
    member: int
    term: int
    step: FollowRequest.Step
    sequence: int
    sequence_term: int
    authority: bytes
    def __init__(self, shard: _Optional[int] = ..., member: _Optional[int] = ..., term: _Optional[int] = ..., step: _Optional[_Union[FollowRequest.Step, str]] = ..., sequence: _Optional[int] = ..., sequence_term: _Optional[int] = ..., authority: _Optional[bytes] = ...) -> None: ...

class FollowRun(_message.Message):
    __slots__ = ("term", "first", "last")
    TERM_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    term: int
    first: int
    last: int
    def __init__(self, term: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("stored", "stored_term", "runs", "synced")
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORED_TERM_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    stored_term: int
    runs: _containers.RepeatedCompositeFieldContainer[FollowRun]
    synced: int
    def __init__(self, stored: _Optional[int] = ..., stored_term: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[FollowRun, _Mapping]]] = ..., synced: _Optional[int] = ...) -> None: ...

class ShardAliveRequest(_message.Message):
    __slots__ = ("shard", "member", "term", "map_epoch", "authority", "whole_term", "forwarded")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TERM_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    shard: int
    member: int
    term: int
    map_epoch: int
    authority: bytes
    whole_term: int
    forwarded: _pool_pb2.Forwarded
    def __init__(self, shard: _Optional[int] = ..., member: _Optional[int] = ..., term: _Optional[int] = ..., map_epoch: _Optional[int] = ..., authority: _Optional[bytes] = ..., whole_term: _Optional[int] = ..., forwarded: _Optional[_Union[_pool_pb2.Forwarded, _Mapping]] = ...) -> None: ...

class ShardAliveReply(_message.Message):
    __slots__ = ("term", "lease_ms", "map")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    term: int
    lease_ms: int
    map: bytes
    def __init__(self, term: _Optional[int] = ..., lease_ms: _Optional[int] = ..., map: _Optional[bytes] = ...) -> None: ...

class StandbyRequest(_message.Message):
    __slots__ = ("shard", "member", "term", "up", "epoch", "authority", "forwarded")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    shard: int
    member: int
    term: int
    up: bool
    epoch: int
    authority: bytes
    forwarded: _pool_pb2.Forwarded
    def __init__(self, shard: _Optional[int] = ..., member: _Optional[int] = ..., term: _Optional[int] = ..., up: _Optional[bool] = ..., epoch: _Optional[int] = ..., authority: _Optional[bytes] = ..., forwarded: _Optional[_Union[_pool_pb2.Forwarded, _Mapping]] = ...) -> None: ...

class StandbyReply(_message.Message):
    __slots__ = ("map",)
    MAP_FIELD_NUMBER: _ClassVar[int]
    map: bytes
    def __init__(self, map: _Optional[bytes] = ...) -> None: ...

class TakeRightRequest(_message.Message):
    __slots__ = ("shard", "authority", "volume", "member", "rights", "life_ms", "known", "forwarded")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    LIFE_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    shard: int
    authority: bytes
    volume: int
    member: str
    rights: int
    life_ms: int
    known: int
    forwarded: _pool_pb2.Forwarded
    def __init__(self, shard: _Optional[int] = ..., authority: _Optional[bytes] = ..., volume: _Optional[int] = ..., member: _Optional[str] = ..., rights: _Optional[int] = ..., life_ms: _Optional[int] = ..., known: _Optional[int] = ..., forwarded: _Optional[_Union[_pool_pb2.Forwarded, _Mapping]] = ...) -> None: ...

class TakeRightReply(_message.Message):
    __slots__ = ("map", "unaware")
    MAP_FIELD_NUMBER: _ClassVar[int]
    UNAWARE_FIELD_NUMBER: _ClassVar[int]
    map: bytes
    unaware: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, map: _Optional[bytes] = ..., unaware: _Optional[_Iterable[int]] = ...) -> None: ...

class SpanId(_message.Message):
    __slots__ = ("shard", "incarnation", "number")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    number: int
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SpanRange(_message.Message):
    __slots__ = ("first", "end", "limit")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    first: bytes
    end: bytes
    limit: int
    def __init__(self, first: _Optional[bytes] = ..., end: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class SpanRecord(_message.Message):
    __slots__ = ("key", "put", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    put: bool
    value: bytes
    def __init__(self, key: _Optional[bytes] = ..., put: _Optional[bool] = ..., value: _Optional[bytes] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("id", "order", "keys", "looks", "ranges", "births", "identity", "authority", "named", "shards")
    ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    BIRTHS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    id: SpanId
    order: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    looks: _containers.RepeatedScalarFieldContainer[bytes]
    ranges: _containers.RepeatedCompositeFieldContainer[SpanRange]
    births: _containers.RepeatedScalarFieldContainer[int]
    identity: int
    authority: bytes
    named: _containers.RepeatedScalarFieldContainer[int]
    shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[SpanId, _Mapping]] = ..., order: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., looks: _Optional[_Iterable[bytes]] = ..., ranges: _Optional[_Iterable[_Union[SpanRange, _Mapping]]] = ..., births: _Optional[_Iterable[int]] = ..., identity: _Optional[int] = ..., authority: _Optional[bytes] = ..., named: _Optional[_Iterable[int]] = ..., shards: _Optional[_Iterable[int]] = ...) -> None: ...

class SpanScan(_message.Message):
    __slots__ = ("pairs",)
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[SpanRecord]
    def __init__(self, pairs: _Optional[_Iterable[_Union[SpanRecord, _Mapping]]] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("records", "scans", "births", "named")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SCANS_FIELD_NUMBER: _ClassVar[int]
    BIRTHS_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[SpanRecord]
    scans: _containers.RepeatedCompositeFieldContainer[SpanScan]
    births: _containers.RepeatedScalarFieldContainer[int]
    named: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, records: _Optional[_Iterable[_Union[SpanRecord, _Mapping]]] = ..., scans: _Optional[_Iterable[_Union[SpanScan, _Mapping]]] = ..., births: _Optional[_Iterable[int]] = ..., named: _Optional[_Iterable[bool]] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("id", "decided", "effects", "authority")
    ID_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    id: SpanId
    decided: bool
    effects: _containers.RepeatedCompositeFieldContainer[SpanRecord]
    authority: bytes
    def __init__(self, id: _Optional[_Union[SpanId, _Mapping]] = ..., decided: _Optional[bool] = ..., effects: _Optional[_Iterable[_Union[SpanRecord, _Mapping]]] = ..., authority: _Optional[bytes] = ...) -> None: ...

class SettleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutcomeRequest(_message.Message):
    __slots__ = ("id", "shard", "authority")
    ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    id: SpanId
    shard: int
    authority: bytes
    def __init__(self, id: _Optional[_Union[SpanId, _Mapping]] = ..., shard: _Optional[int] = ..., authority: _Optional[bytes] = ...) -> None: ...

class OutcomeReply(_message.Message):
    __slots__ = ("outcome", "effects")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNDECIDED: _ClassVar[OutcomeReply.Outcome]
        DECIDED: _ClassVar[OutcomeReply.Outcome]
        NEVER: _ClassVar[OutcomeReply.Outcome]
    UNDECIDED: OutcomeReply.Outcome
    DECIDED: OutcomeReply.Outcome
    NEVER: OutcomeReply.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    outcome: OutcomeReply.Outcome
    effects: _containers.RepeatedCompositeFieldContainer[SpanRecord]
    def __init__(self, outcome: _Optional[_Union[OutcomeReply.Outcome, str]] = ..., effects: _Optional[_Iterable[_Union[SpanRecord, _Mapping]]] = ...) -> None: ...

class VolumePolicy(_message.Message):
    __slots__ = ("bytes_max", "files_max", "trash_s", "table", "chunk_bits", "encrypted")
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FILES_MAX_FIELD_NUMBER: _ClassVar[int]
    TRASH_S_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BITS_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    bytes_max: int
    files_max: int
    trash_s: int
    table: int
    chunk_bits: int
    encrypted: bool
    def __init__(self, bytes_max: _Optional[int] = ..., files_max: _Optional[int] = ..., trash_s: _Optional[int] = ..., table: _Optional[int] = ..., chunk_bits: _Optional[int] = ..., encrypted: _Optional[bool] = ...) -> None: ...

class VolumeGrant(_message.Message):
    __slots__ = ("client", "write")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    client: str
    write: bool
    def __init__(self, client: _Optional[str] = ..., write: _Optional[bool] = ...) -> None: ...

class VolumeState(_message.Message):
    __slots__ = ("inode", "name", "bytes_max", "files_max", "bytes_used", "files_used", "table", "chunk_bits", "sealed", "trash_s", "listed", "grants", "attachments", "removing", "files_removing", "created_ns", "bytes_reserved", "pool_key")
    INODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FILES_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    FILES_USED_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BITS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TRASH_S_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    REMOVING_FIELD_NUMBER: _ClassVar[int]
    FILES_REMOVING_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    POOL_KEY_FIELD_NUMBER: _ClassVar[int]
    inode: int
    name: str
    bytes_max: int
    files_max: int
    bytes_used: int
    files_used: int
    table: int
    chunk_bits: int
    sealed: bool
    trash_s: int
    listed: bool
    grants: _containers.RepeatedCompositeFieldContainer[VolumeGrant]
    attachments: _containers.RepeatedScalarFieldContainer[str]
    removing: bool
    files_removing: int
    created_ns: int
    bytes_reserved: int
    pool_key: str
    def __init__(self, inode: _Optional[int] = ..., name: _Optional[str] = ..., bytes_max: _Optional[int] = ..., files_max: _Optional[int] = ..., bytes_used: _Optional[int] = ..., files_used: _Optional[int] = ..., table: _Optional[int] = ..., chunk_bits: _Optional[int] = ..., sealed: _Optional[bool] = ..., trash_s: _Optional[int] = ..., listed: _Optional[bool] = ..., grants: _Optional[_Iterable[_Union[VolumeGrant, _Mapping]]] = ..., attachments: _Optional[_Iterable[str]] = ..., removing: _Optional[bool] = ..., files_removing: _Optional[int] = ..., created_ns: _Optional[int] = ..., bytes_reserved: _Optional[int] = ..., pool_key: _Optional[str] = ...) -> None: ...

class VolumesRequest(_message.Message):
    __slots__ = ("session", "map_epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ...) -> None: ...

class VolumesReply(_message.Message):
    __slots__ = ("volumes",)
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeState]
    def __init__(self, volumes: _Optional[_Iterable[_Union[VolumeState, _Mapping]]] = ...) -> None: ...

class VolumeRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "action", "bytes_max", "files_max", "trash_s", "listed", "grant", "holder", "force")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SHOW: _ClassVar[VolumeRequest.Action]
        SET: _ClassVar[VolumeRequest.Action]
        SEAL: _ClassVar[VolumeRequest.Action]
        GRANT: _ClassVar[VolumeRequest.Action]
        REVOKE: _ClassVar[VolumeRequest.Action]
        ATTACH: _ClassVar[VolumeRequest.Action]
        DETACH: _ClassVar[VolumeRequest.Action]
        REMOVE: _ClassVar[VolumeRequest.Action]
        KEY: _ClassVar[VolumeRequest.Action]
        REWRAP: _ClassVar[VolumeRequest.Action]
    SHOW: VolumeRequest.Action
    SET: VolumeRequest.Action
    SEAL: VolumeRequest.Action
    GRANT: VolumeRequest.Action
    REVOKE: VolumeRequest.Action
    ATTACH: VolumeRequest.Action
    DETACH: VolumeRequest.Action
    REMOVE: VolumeRequest.Action
    KEY: VolumeRequest.Action
    REWRAP: VolumeRequest.Action
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FILES_MAX_FIELD_NUMBER: _ClassVar[int]
    TRASH_S_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    action: VolumeRequest.Action
    bytes_max: int
    files_max: int
    trash_s: int
    listed: bool
    grant: VolumeGrant
    holder: str
    force: bool
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., action: _Optional[_Union[VolumeRequest.Action, str]] = ..., bytes_max: _Optional[int] = ..., files_max: _Optional[int] = ..., trash_s: _Optional[int] = ..., listed: _Optional[bool] = ..., grant: _Optional[_Union[VolumeGrant, _Mapping]] = ..., holder: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class VolumeReply(_message.Message):
    __slots__ = ("volume", "revoked_in_s", "key", "wrapped_key")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    REVOKED_IN_S_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    volume: VolumeState
    revoked_in_s: int
    key: bytes
    wrapped_key: bytes
    def __init__(self, volume: _Optional[_Union[VolumeState, _Mapping]] = ..., revoked_in_s: _Optional[int] = ..., key: _Optional[bytes] = ..., wrapped_key: _Optional[bytes] = ...) -> None: ...

class VolumeRoomRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "bytes", "needed", "again")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    bytes: int
    needed: int
    again: bool
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., bytes: _Optional[int] = ..., needed: _Optional[int] = ..., again: _Optional[bool] = ...) -> None: ...

class VolumeRoomReply(_message.Message):
    __slots__ = ("bytes", "unlimited", "life_ms", "bytes_max")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    LIFE_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    unlimited: bool
    life_ms: int
    bytes_max: int
    def __init__(self, bytes: _Optional[int] = ..., unlimited: _Optional[bool] = ..., life_ms: _Optional[int] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class TrashRequest(_message.Message):
    __slots__ = ("session", "map_epoch", "inode", "action", "entry", "directory", "name")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LIST: _ClassVar[TrashRequest.Action]
        RESTORE: _ClassVar[TrashRequest.Action]
        PURGE: _ClassVar[TrashRequest.Action]
    LIST: TrashRequest.Action
    RESTORE: TrashRequest.Action
    PURGE: TrashRequest.Action
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session: int
    map_epoch: int
    inode: int
    action: TrashRequest.Action
    entry: int
    directory: int
    name: bytes
    def __init__(self, session: _Optional[int] = ..., map_epoch: _Optional[int] = ..., inode: _Optional[int] = ..., action: _Optional[_Union[TrashRequest.Action, str]] = ..., entry: _Optional[int] = ..., directory: _Optional[int] = ..., name: _Optional[bytes] = ...) -> None: ...

class TrashEntry(_message.Message):
    __slots__ = ("inode", "directory", "name", "removed_ns", "expires_ns", "mode", "size")
    INODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REMOVED_NS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_NS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    inode: int
    directory: int
    name: bytes
    removed_ns: int
    expires_ns: int
    mode: int
    size: int
    def __init__(self, inode: _Optional[int] = ..., directory: _Optional[int] = ..., name: _Optional[bytes] = ..., removed_ns: _Optional[int] = ..., expires_ns: _Optional[int] = ..., mode: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class TrashReply(_message.Message):
    __slots__ = ("entries", "next", "purged")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[TrashEntry]
    next: int
    purged: int
    def __init__(self, entries: _Optional[_Iterable[_Union[TrashEntry, _Mapping]]] = ..., next: _Optional[int] = ..., purged: _Optional[int] = ...) -> None: ...

class SessionsRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: bytes
    def __init__(self, sessions: _Optional[bytes] = ...) -> None: ...

class SessionOwner(_message.Message):
    __slots__ = ("session", "client", "identity")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    session: int
    client: str
    identity: int
    def __init__(self, session: _Optional[int] = ..., client: _Optional[str] = ..., identity: _Optional[int] = ...) -> None: ...

class SessionsReply(_message.Message):
    __slots__ = ("owners",)
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    owners: _containers.RepeatedCompositeFieldContainer[SessionOwner]
    def __init__(self, owners: _Optional[_Iterable[_Union[SessionOwner, _Mapping]]] = ...) -> None: ...
