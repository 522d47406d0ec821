from nvpool.rpc.v1 import pool_pb2 as _pool_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoveRequest(_message.Message):
    __slots__ = ("authority", "source", "destination", "term", "attempt", "number", "step", "map", "partitions", "inode_bound", "orphans_wait_ms", "sessions")
    class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[MoveRequest.Step]
        BEGIN: _ClassVar[MoveRequest.Step]
        FILL: _ClassVar[MoveRequest.Step]
        END: _ClassVar[MoveRequest.Step]
    NONE: MoveRequest.Step
    BEGIN: MoveRequest.Step
    FILL: MoveRequest.Step
    END: MoveRequest.Step
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    INODE_BOUND_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    authority: bytes
    source: int
    destination: int
    term: int
    attempt: int
    number: int
    step: MoveRequest.Step
    map: bytes
    partitions: bytes
    inode_bound: int
    orphans_wait_ms: int
    sessions: _containers.RepeatedCompositeFieldContainer[MovedSession]
    def __init__(self, authority: _Optional[bytes] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ..., term: _Optional[int] = ..., attempt: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[_Union[MoveRequest.Step, str]] = ..., map: _Optional[bytes] = ..., partitions: _Optional[bytes] = ..., inode_bound: _Optional[int] = ..., orphans_wait_ms: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[MovedSession, _Mapping]]] = ...) -> None: ...

class MovedSession(_message.Message):
    __slots__ = ("session", "record", "opened")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    session: int
    record: bytes
    opened: bytes
    def __init__(self, session: _Optional[int] = ..., record: _Optional[bytes] = ..., opened: _Optional[bytes] = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("inodes",)
    INODES_FIELD_NUMBER: _ClassVar[int]
    inodes: int
    def __init__(self, inodes: _Optional[int] = ...) -> None: ...

class MovedRequest(_message.Message):
    __slots__ = ("authority", "source", "destination", "term", "partitions", "map_epoch", "forwarded")
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    authority: bytes
    source: int
    destination: int
    term: int
    partitions: bytes
    map_epoch: int
    forwarded: _pool_pb2.Forwarded
    def __init__(self, authority: _Optional[bytes] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ..., term: _Optional[int] = ..., partitions: _Optional[bytes] = ..., map_epoch: _Optional[int] = ..., forwarded: _Optional[_Union[_pool_pb2.Forwarded, _Mapping]] = ...) -> None: ...

class MovedReply(_message.Message):
    __slots__ = ("map",)
    MAP_FIELD_NUMBER: _ClassVar[int]
    map: bytes
    def __init__(self, map: _Optional[bytes] = ...) -> None: ...
