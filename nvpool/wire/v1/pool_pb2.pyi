from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

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
    __slots__ = ()
    def __init__(self) -> None: ...

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
