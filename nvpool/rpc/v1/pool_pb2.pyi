from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MapRequest(_message.Message):
    __slots__ = ("newer_than", "wait_s")
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    newer_than: int
    wait_s: float
    def __init__(self, newer_than: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class MapReply(_message.Message):
    __slots__ = ("map",)
    MAP_FIELD_NUMBER: _ClassVar[int]
    map: bytes
    def __init__(self, map: _Optional[bytes] = ...) -> None: ...

class PoolStatusRequest(_message.Message):
    __slots__ = ("issued",)
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    issued: bool
    def __init__(self, issued: _Optional[bool] = ...) -> None: ...

class PoolStatusReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    def __init__(self, status: _Optional[bytes] = ...) -> None: ...

class PoolChangeRequest(_message.Message):
    __slots__ = ("verb", "arguments")
    VERB_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    verb: str
    arguments: bytes
    def __init__(self, verb: _Optional[str] = ..., arguments: _Optional[bytes] = ...) -> None: ...

class PoolChangeReply(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    def __init__(self, result: _Optional[bytes] = ...) -> None: ...

class PoolStopRequest(_message.Message):
    __slots__ = ("drain_s",)
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    def __init__(self, drain_s: _Optional[float] = ...) -> None: ...

class PoolStopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthorityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthorityReply(_message.Message):
    __slots__ = ("certificate", "pool_id")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    pool_id: str
    def __init__(self, certificate: _Optional[bytes] = ..., pool_id: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("secret", "kind", "request", "name", "host", "host_id", "endpoints")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    kind: str
    request: bytes
    name: str
    host: str
    host_id: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, secret: _Optional[bytes] = ..., kind: _Optional[str] = ..., request: _Optional[bytes] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., host_id: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: bytes
    def __init__(self, answer: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    def __init__(self, request: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate", "etcd_certificate")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ETCD_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    etcd_certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., etcd_certificate: _Optional[bytes] = ...) -> None: ...

class KeysRequest(_message.Message):
    __slots__ = ("right", "node")
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    right: bytes
    node: int
    def __init__(self, right: _Optional[bytes] = ..., node: _Optional[int] = ...) -> None: ...

class KeysReply(_message.Message):
    __slots__ = ("authority", "etcd_authority")
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    ETCD_AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    authority: bytes
    etcd_authority: bytes
    def __init__(self, authority: _Optional[bytes] = ..., etcd_authority: _Optional[bytes] = ...) -> None: ...

class Forwarded(_message.Message):
    __slots__ = ("node", "hops", "relay")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    node: int
    hops: int
    relay: bool
    def __init__(self, node: _Optional[int] = ..., hops: _Optional[int] = ..., relay: _Optional[bool] = ...) -> None: ...

class Forwardable(_message.Message):
    __slots__ = ("forwarded",)
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    forwarded: Forwarded
    def __init__(self, forwarded: _Optional[_Union[Forwarded, _Mapping]] = ...) -> None: ...

class AliveRequest(_message.Message):
    __slots__ = ("target", "pid", "epoch", "equal", "copied_bytes", "used_bytes", "verifier", "unreachable", "forwarded")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EQUAL_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    target: int
    pid: int
    epoch: int
    equal: bytes
    copied_bytes: int
    used_bytes: int
    verifier: int
    unreachable: _containers.RepeatedScalarFieldContainer[int]
    forwarded: Forwarded
    def __init__(self, target: _Optional[int] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., equal: _Optional[bytes] = ..., copied_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., verifier: _Optional[int] = ..., unreachable: _Optional[_Iterable[int]] = ..., forwarded: _Optional[_Union[Forwarded, _Mapping]] = ...) -> None: ...

class AliveReply(_message.Message):
    __slots__ = ("lease_s", "epoch", "epoch_min", "left_out")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MIN_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    epoch: int
    epoch_min: int
    left_out: str
    def __init__(self, lease_s: _Optional[float] = ..., epoch: _Optional[int] = ..., epoch_min: _Optional[int] = ..., left_out: _Optional[str] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ("node", "wait_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    node: bool
    wait_s: float
    def __init__(self, node: _Optional[bool] = ..., wait_s: _Optional[float] = ...) -> None: ...

class MetricsReply(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: bytes
    def __init__(self, page: _Optional[bytes] = ...) -> None: ...
