from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "grants", "reads", "verify")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    grants: _containers.RepeatedScalarFieldContainer[bytes]
    reads: bytes
    verify: bool
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., grants: _Optional[_Iterable[bytes]] = ..., reads: _Optional[bytes] = ..., verify: _Optional[bool] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("map_epoch", "results", "checksums")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    results: bytes
    checksums: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., results: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "grants", "token", "entries", "past")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    grants: _containers.RepeatedScalarFieldContainer[bytes]
    token: bytes
    entries: bytes
    past: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., grants: _Optional[_Iterable[bytes]] = ..., token: _Optional[bytes] = ..., entries: _Optional[bytes] = ..., past: _Optional[bytes] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("map_epoch", "results", "runs", "checksums")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    results: bytes
    runs: bytes
    checksums: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., results: _Optional[bytes] = ..., runs: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "grants", "writes", "checksums", "session", "slot", "versions", "wrapped_key")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    grants: _containers.RepeatedScalarFieldContainer[bytes]
    writes: bytes
    checksums: bytes
    session: int
    slot: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    wrapped_key: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., grants: _Optional[_Iterable[bytes]] = ..., writes: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., session: _Optional[int] = ..., slot: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., wrapped_key: _Optional[bytes] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("map_epoch", "results")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    results: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., results: _Optional[bytes] = ...) -> None: ...

class PeerWriteRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "sender", "link", "table", "chain_epoch", "version", "base", "inode", "index", "offset", "cut", "session", "slot", "sequence", "checksums", "last", "wrapped_key")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    sender: int
    link: int
    table: int
    chain_epoch: int
    version: int
    base: int
    inode: int
    index: int
    offset: int
    cut: int
    session: int
    slot: int
    sequence: int
    checksums: bytes
    last: int
    wrapped_key: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., sender: _Optional[int] = ..., link: _Optional[int] = ..., table: _Optional[int] = ..., chain_epoch: _Optional[int] = ..., version: _Optional[int] = ..., base: _Optional[int] = ..., inode: _Optional[int] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., cut: _Optional[int] = ..., session: _Optional[int] = ..., slot: _Optional[int] = ..., sequence: _Optional[int] = ..., checksums: _Optional[bytes] = ..., last: _Optional[int] = ..., wrapped_key: _Optional[bytes] = ...) -> None: ...

class PeerWriteReply(_message.Message):
    __slots__ = ("map_epoch", "status", "version")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    status: int
    version: int
    def __init__(self, map_epoch: _Optional[int] = ..., status: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("map_epoch", "target")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("map_epoch",)
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    def __init__(self, map_epoch: _Optional[int] = ...) -> None: ...

class CutRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "inode", "size", "cut", "chunk_bits", "end", "wrapped_key")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BITS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    inode: int
    size: int
    cut: int
    chunk_bits: int
    end: int
    wrapped_key: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., inode: _Optional[int] = ..., size: _Optional[int] = ..., cut: _Optional[int] = ..., chunk_bits: _Optional[int] = ..., end: _Optional[int] = ..., wrapped_key: _Optional[bytes] = ...) -> None: ...

class CutReply(_message.Message):
    __slots__ = ("map_epoch", "bytes")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    bytes: int
    def __init__(self, map_epoch: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "inodes")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    inodes: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., inodes: _Optional[bytes] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("map_epoch", "chunks", "bytes")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    chunks: int
    bytes: int
    def __init__(self, map_epoch: _Optional[int] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("target", "inode", "first", "limit", "map_epoch", "grant")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    target: int
    inode: int
    first: int
    limit: int
    map_epoch: int
    grant: bytes
    def __init__(self, target: _Optional[int] = ..., inode: _Optional[int] = ..., first: _Optional[int] = ..., limit: _Optional[int] = ..., map_epoch: _Optional[int] = ..., grant: _Optional[bytes] = ...) -> None: ...

class ChunkDescription(_message.Message):
    __slots__ = ("index", "version", "blocks", "extents", "cut", "end", "leaving")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    index: int
    version: int
    blocks: int
    extents: int
    cut: int
    end: int
    leaving: bool
    def __init__(self, index: _Optional[int] = ..., version: _Optional[int] = ..., blocks: _Optional[int] = ..., extents: _Optional[int] = ..., cut: _Optional[int] = ..., end: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("chunks", "more", "map_epoch")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkDescription]
    more: bool
    map_epoch: int
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkDescription, _Mapping]]] = ..., more: _Optional[bool] = ..., map_epoch: _Optional[int] = ...) -> None: ...

class ExtentsRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "grant", "inode", "first", "until")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    grant: bytes
    inode: int
    first: int
    until: int
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., grant: _Optional[bytes] = ..., inode: _Optional[int] = ..., first: _Optional[int] = ..., until: _Optional[int] = ...) -> None: ...

class ExtentsReply(_message.Message):
    __slots__ = ("map_epoch", "extents", "more", "next")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    extents: bytes
    more: bool
    next: int
    def __init__(self, map_epoch: _Optional[int] = ..., extents: _Optional[bytes] = ..., more: _Optional[bool] = ..., next: _Optional[int] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "read_grant", "write_grant", "from_inode", "from_index", "from_offset", "inode", "index", "offset", "length", "cut", "session", "slot", "sequence")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    READ_GRANT_FIELD_NUMBER: _ClassVar[int]
    WRITE_GRANT_FIELD_NUMBER: _ClassVar[int]
    FROM_INODE_FIELD_NUMBER: _ClassVar[int]
    FROM_INDEX_FIELD_NUMBER: _ClassVar[int]
    FROM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    read_grant: bytes
    write_grant: bytes
    from_inode: int
    from_index: int
    from_offset: int
    inode: int
    index: int
    offset: int
    length: int
    cut: int
    session: int
    slot: int
    sequence: int
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., read_grant: _Optional[bytes] = ..., write_grant: _Optional[bytes] = ..., from_inode: _Optional[int] = ..., from_index: _Optional[int] = ..., from_offset: _Optional[int] = ..., inode: _Optional[int] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., cut: _Optional[int] = ..., session: _Optional[int] = ..., slot: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class CopyReply(_message.Message):
    __slots__ = ("map_epoch", "version", "bytes")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    version: int
    bytes: int
    def __init__(self, map_epoch: _Optional[int] = ..., version: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("target", "after", "limit", "map_epoch")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    target: int
    after: int
    limit: int
    map_epoch: int
    def __init__(self, target: _Optional[int] = ..., after: _Optional[int] = ..., limit: _Optional[int] = ..., map_epoch: _Optional[int] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("inodes", "more", "map_epoch")
    INODES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    inodes: bytes
    more: bool
    map_epoch: int
    def __init__(self, inodes: _Optional[bytes] = ..., more: _Optional[bool] = ..., map_epoch: _Optional[int] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("target", "cursor", "blocks", "map_epoch", "repair")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    target: int
    cursor: bytes
    blocks: int
    map_epoch: int
    repair: bool
    def __init__(self, target: _Optional[int] = ..., cursor: _Optional[bytes] = ..., blocks: _Optional[int] = ..., map_epoch: _Optional[int] = ..., repair: _Optional[bool] = ...) -> None: ...

class BadBlock(_message.Message):
    __slots__ = ("inode", "index", "block", "text")
    INODE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    inode: int
    index: int
    block: int
    text: str
    def __init__(self, inode: _Optional[int] = ..., index: _Optional[int] = ..., block: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ScrubReply(_message.Message):
    __slots__ = ("cursor", "done", "blocks", "bad", "problems", "map_epoch", "mended")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MENDED_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    done: bool
    blocks: int
    bad: _containers.RepeatedCompositeFieldContainer[BadBlock]
    problems: _containers.RepeatedScalarFieldContainer[str]
    map_epoch: int
    mended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cursor: _Optional[bytes] = ..., done: _Optional[bool] = ..., blocks: _Optional[int] = ..., bad: _Optional[_Iterable[_Union[BadBlock, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ..., map_epoch: _Optional[int] = ..., mended: _Optional[_Iterable[str]] = ...) -> None: ...

class VersionsRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "chains", "begun", "after_inode", "after_index", "limit")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_INODE_FIELD_NUMBER: _ClassVar[int]
    AFTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    chains: bytes
    begun: bool
    after_inode: int
    after_index: int
    limit: int
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., chains: _Optional[bytes] = ..., begun: _Optional[bool] = ..., after_inode: _Optional[int] = ..., after_index: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class VersionsReply(_message.Message):
    __slots__ = ("map_epoch", "chunks", "inodes", "more", "end_inode", "end_index", "busy", "used_bytes", "split_floors")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    END_INODE_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FLOORS_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    chunks: bytes
    inodes: bytes
    more: bool
    end_inode: int
    end_index: int
    busy: bool
    used_bytes: int
    split_floors: bool
    def __init__(self, map_epoch: _Optional[int] = ..., chunks: _Optional[bytes] = ..., inodes: _Optional[bytes] = ..., more: _Optional[bool] = ..., end_inode: _Optional[int] = ..., end_index: _Optional[int] = ..., busy: _Optional[bool] = ..., used_bytes: _Optional[int] = ..., split_floors: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "chunks")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    chunks: bytes
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., chunks: _Optional[bytes] = ...) -> None: ...

class FetchedChunk(_message.Message):
    __slots__ = ("inode", "index", "status", "pending", "version", "table", "cut", "requests", "inode_cut", "floor", "chunk_bits", "runs", "checksums", "bad", "more", "split_floor")
    INODE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INODE_CUT_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BITS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FLOOR_FIELD_NUMBER: _ClassVar[int]
    inode: int
    index: int
    status: int
    pending: bool
    version: int
    table: int
    cut: int
    requests: bytes
    inode_cut: int
    floor: int
    chunk_bits: int
    runs: bytes
    checksums: bytes
    bad: _containers.RepeatedScalarFieldContainer[int]
    more: bool
    split_floor: bool
    def __init__(self, inode: _Optional[int] = ..., index: _Optional[int] = ..., status: _Optional[int] = ..., pending: _Optional[bool] = ..., version: _Optional[int] = ..., table: _Optional[int] = ..., cut: _Optional[int] = ..., requests: _Optional[bytes] = ..., inode_cut: _Optional[int] = ..., floor: _Optional[int] = ..., chunk_bits: _Optional[int] = ..., runs: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., bad: _Optional[_Iterable[int]] = ..., more: _Optional[bool] = ..., split_floor: _Optional[bool] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("map_epoch", "chunks", "busy")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    chunks: _containers.RepeatedCompositeFieldContainer[FetchedChunk]
    busy: bool
    def __init__(self, map_epoch: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[FetchedChunk, _Mapping]]] = ..., busy: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "table", "inode", "index", "source")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    table: int
    inode: int
    index: int
    source: int
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., table: _Optional[int] = ..., inode: _Optional[int] = ..., index: _Optional[int] = ..., source: _Optional[int] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("map_epoch", "version")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    version: int
    def __init__(self, map_epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Scrubbing(_message.Message):
    __slots__ = ("state", "began_ms", "blocks", "blocks_total", "bad", "mended", "seconds_left", "next_ms", "last_began_ms", "last_ended_ms", "last_blocks", "last_bad", "last_mended")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEGAN_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    MENDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    NEXT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_BEGAN_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_BAD_FIELD_NUMBER: _ClassVar[int]
    LAST_MENDED_FIELD_NUMBER: _ClassVar[int]
    state: str
    began_ms: int
    blocks: int
    blocks_total: int
    bad: int
    mended: int
    seconds_left: float
    next_ms: int
    last_began_ms: int
    last_ended_ms: int
    last_blocks: int
    last_bad: int
    last_mended: int
    def __init__(self, state: _Optional[str] = ..., began_ms: _Optional[int] = ..., blocks: _Optional[int] = ..., blocks_total: _Optional[int] = ..., bad: _Optional[int] = ..., mended: _Optional[int] = ..., seconds_left: _Optional[float] = ..., next_ms: _Optional[int] = ..., last_began_ms: _Optional[int] = ..., last_ended_ms: _Optional[int] = ..., last_blocks: _Optional[int] = ..., last_bad: _Optional[int] = ..., last_mended: _Optional[int] = ...) -> None: ...

class ScrubOrderRequest(_message.Message):
    __slots__ = ("map_epoch", "target", "authority", "order")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    target: int
    authority: bytes
    order: str
    def __init__(self, map_epoch: _Optional[int] = ..., target: _Optional[int] = ..., authority: _Optional[bytes] = ..., order: _Optional[str] = ...) -> None: ...

class ScrubOrderReply(_message.Message):
    __slots__ = ("map_epoch", "scrubbing")
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCRUBBING_FIELD_NUMBER: _ClassVar[int]
    map_epoch: int
    scrubbing: Scrubbing
    def __init__(self, map_epoch: _Optional[int] = ..., scrubbing: _Optional[_Union[Scrubbing, _Mapping]] = ...) -> None: ...

class DataStatusRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: int
    def __init__(self, target: _Optional[int] = ...) -> None: ...

class DataStatusReply(_message.Message):
    __slots__ = ("target", "state", "capacity_bytes", "used_bytes", "chunks", "device", "kind", "read_path", "bad", "counters", "pid", "fenced_because", "direct", "writes", "host_full", "scrubbing", "lacks_room", "refused", "strays_left", "strays_wait", "resync_wait")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    READ_PATH_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FENCED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    HOST_FULL_FIELD_NUMBER: _ClassVar[int]
    SCRUBBING_FIELD_NUMBER: _ClassVar[int]
    LACKS_ROOM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STRAYS_LEFT_FIELD_NUMBER: _ClassVar[int]
    STRAYS_WAIT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_WAIT_FIELD_NUMBER: _ClassVar[int]
    target: int
    state: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    device: str
    kind: str
    read_path: str
    bad: _containers.RepeatedCompositeFieldContainer[BadBlock]
    counters: _containers.ScalarMap[str, float]
    pid: int
    fenced_because: str
    direct: bool
    writes: str
    host_full: str
    scrubbing: Scrubbing
    lacks_room: bool
    refused: str
    strays_left: int
    strays_wait: str
    resync_wait: str
    def __init__(self, target: _Optional[int] = ..., state: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., device: _Optional[str] = ..., kind: _Optional[str] = ..., read_path: _Optional[str] = ..., bad: _Optional[_Iterable[_Union[BadBlock, _Mapping]]] = ..., counters: _Optional[_Mapping[str, float]] = ..., pid: _Optional[int] = ..., fenced_because: _Optional[str] = ..., direct: _Optional[bool] = ..., writes: _Optional[str] = ..., host_full: _Optional[str] = ..., scrubbing: _Optional[_Union[Scrubbing, _Mapping]] = ..., lacks_room: _Optional[bool] = ..., refused: _Optional[str] = ..., strays_left: _Optional[int] = ..., strays_wait: _Optional[str] = ..., resync_wait: _Optional[str] = ...) -> None: ...

class UseRequest(_message.Message):
    __slots__ = ("target", "for_s")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    target: int
    for_s: float
    def __init__(self, target: _Optional[int] = ..., for_s: _Optional[float] = ...) -> None: ...

class UseReply(_message.Message):
    __slots__ = ("counting", "now_s", "rows")
    COUNTING_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    counting: int
    now_s: float
    rows: bytes
    def __init__(self, counting: _Optional[int] = ..., now_s: _Optional[float] = ..., rows: _Optional[bytes] = ...) -> None: ...
