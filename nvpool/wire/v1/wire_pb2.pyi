from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_NONE: _ClassVar[Method]
    DATA_READ: _ClassVar[Method]
    DATA_WRITE: _ClassVar[Method]
    DATA_FLUSH: _ClassVar[Method]
    DATA_CUT: _ClassVar[Method]
    DATA_REMOVE: _ClassVar[Method]
    DATA_DESCRIBE: _ClassVar[Method]
    DATA_LIST: _ClassVar[Method]
    DATA_SCRUB: _ClassVar[Method]
    DATA_STATUS: _ClassVar[Method]
    DATA_LOCATE: _ClassVar[Method]
    DATA_EXTENTS: _ClassVar[Method]
    DATA_COPY: _ClassVar[Method]
    DATA_PEER_WRITE: _ClassVar[Method]
    DATA_VERSIONS: _ClassVar[Method]
    DATA_FETCH: _ClassVar[Method]
    DATA_SCRUB_ORDER: _ClassVar[Method]
    META_OPEN_SESSION: _ClassVar[Method]
    META_RENEW_SESSION: _ClassVar[Method]
    META_CLOSE_SESSION: _ClassVar[Method]
    META_LOOKUP: _ClassVar[Method]
    META_GETATTR: _ClassVar[Method]
    META_SETATTR: _ClassVar[Method]
    META_READLINK: _ClassVar[Method]
    META_CREATE: _ClassVar[Method]
    META_UNLINK: _ClassVar[Method]
    META_RMDIR: _ClassVar[Method]
    META_RENAME: _ClassVar[Method]
    META_LINK: _ClassVar[Method]
    META_OPEN: _ClassVar[Method]
    META_RELEASE: _ClassVar[Method]
    META_REPORT: _ClassVar[Method]
    META_RESERVE: _ClassVar[Method]
    META_LIST: _ClassVar[Method]
    META_STATFS: _ClassVar[Method]
    META_GETXATTR: _ClassVar[Method]
    META_SETXATTR: _ClassVar[Method]
    META_LISTXATTR: _ClassVar[Method]
    META_REMOVEXATTR: _ClassVar[Method]
    META_SYNC: _ClassVar[Method]
    META_LOCK: _ClassVar[Method]
    META_LOCK_WAIT: _ClassVar[Method]
    META_LOCKS: _ClassVar[Method]
    META_ALLOCATE: _ClassVar[Method]
    META_WATCH: _ClassVar[Method]
    META_LOOKUP_MANY: _ClassVar[Method]
    META_GETATTR_MANY: _ClassVar[Method]
    META_DUMP: _ClassVar[Method]
    META_LOAD: _ClassVar[Method]
    META_FSCK: _ClassVar[Method]
    META_STATUS: _ClassVar[Method]
    META_COLLECT: _ClassVar[Method]
    META_NAMES: _ClassVar[Method]
    META_FSCK_SUMS: _ClassVar[Method]
    META_PARTS: _ClassVar[Method]
    META_SHIP: _ClassVar[Method]
    META_FOLLOW: _ClassVar[Method]
    META_ALIVE: _ClassVar[Method]
    META_STANDBY: _ClassVar[Method]
    META_HOLD: _ClassVar[Method]
    META_SETTLE: _ClassVar[Method]
    META_OUTCOME: _ClassVar[Method]
    META_MOVE: _ClassVar[Method]
    META_MOVED: _ClassVar[Method]
    POOL_MAP: _ClassVar[Method]
    POOL_STATUS: _ClassVar[Method]
    POOL_CHANGE: _ClassVar[Method]
    POOL_STOP: _ClassVar[Method]
    POOL_ALIVE: _ClassVar[Method]
    POOL_AUTHORITY: _ClassVar[Method]
    POOL_JOIN: _ClassVar[Method]
    POOL_RENEW: _ClassVar[Method]
    POOL_KEYS: _ClassVar[Method]
METHOD_NONE: Method
DATA_READ: Method
DATA_WRITE: Method
DATA_FLUSH: Method
DATA_CUT: Method
DATA_REMOVE: Method
DATA_DESCRIBE: Method
DATA_LIST: Method
DATA_SCRUB: Method
DATA_STATUS: Method
DATA_LOCATE: Method
DATA_EXTENTS: Method
DATA_COPY: Method
DATA_PEER_WRITE: Method
DATA_VERSIONS: Method
DATA_FETCH: Method
DATA_SCRUB_ORDER: Method
META_OPEN_SESSION: Method
META_RENEW_SESSION: Method
META_CLOSE_SESSION: Method
META_LOOKUP: Method
META_GETATTR: Method
META_SETATTR: Method
META_READLINK: Method
META_CREATE: Method
META_UNLINK: Method
META_RMDIR: Method
META_RENAME: Method
META_LINK: Method
META_OPEN: Method
META_RELEASE: Method
META_REPORT: Method
META_RESERVE: Method
META_LIST: Method
META_STATFS: Method
META_GETXATTR: Method
META_SETXATTR: Method
META_LISTXATTR: Method
META_REMOVEXATTR: Method
META_SYNC: Method
META_LOCK: Method
META_LOCK_WAIT: Method
META_LOCKS: Method
META_ALLOCATE: Method
META_WATCH: Method
META_LOOKUP_MANY: Method
META_GETATTR_MANY: Method
META_DUMP: Method
META_LOAD: Method
META_FSCK: Method
META_STATUS: Method
META_COLLECT: Method
META_NAMES: Method
META_FSCK_SUMS: Method
META_PARTS: Method
META_SHIP: Method
META_FOLLOW: Method
META_ALIVE: Method
META_STANDBY: Method
META_HOLD: Method
META_SETTLE: Method
META_OUTCOME: Method
META_MOVE: Method
META_MOVED: Method
POOL_MAP: Method
POOL_STATUS: Method
POOL_CHANGE: Method
POOL_STOP: Method
POOL_ALIVE: Method
POOL_AUTHORITY: Method
POOL_JOIN: Method
POOL_RENEW: Method
POOL_KEYS: Method

class Hello(_message.Message):
    __slots__ = ("version", "version_min", "name", "fingerprint", "software", "transports", "host_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    version: int
    version_min: int
    name: str
    fingerprint: str
    software: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, version: _Optional[int] = ..., version_min: _Optional[int] = ..., name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., software: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "text", "may_be_applied", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MAY_BE_APPLIED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    may_be_applied: bool
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ..., may_be_applied: _Optional[bool] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("kind", "method", "status", "request", "deadline_ms", "message", "payload")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_NONE: _ClassVar[Frame.Kind]
        HELLO: _ClassVar[Frame.Kind]
        REQUEST: _ClassVar[Frame.Kind]
        REPLY: _ClassVar[Frame.Kind]
        CANCEL: _ClassVar[Frame.Kind]
    KIND_NONE: Frame.Kind
    HELLO: Frame.Kind
    REQUEST: Frame.Kind
    REPLY: Frame.Kind
    CANCEL: Frame.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: Frame.Kind
    method: int
    status: int
    request: int
    deadline_ms: int
    message: bytes
    payload: bytes
    def __init__(self, kind: _Optional[_Union[Frame.Kind, str]] = ..., method: _Optional[int] = ..., status: _Optional[int] = ..., request: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., message: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
