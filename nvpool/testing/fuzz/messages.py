"""Random messages of every kind from their descriptors: random fields, boundary numbers, mutated bytes, and lists
and byte fields that fill a message up to its limit.

All is drawn from one seeded generator, so the seed reproduces a case. `KnownValues` names the values of a
service with which requests go deep (inodes, names, sessions, grants); without them the service would refuse
nearly all early. Used by the fuzz targets of this package.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from nvpool.rpc.api import MESSAGE_BYTES_MAX
from nvpool.rpc.v1 import data_pb2, meta_pb2, moving_pb2, pool_pb2, wire_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

REQUESTS: dict[int, type[Message]] = {}
"""Request message of each method."""


def _find_requests() -> None:
    unlike = {
        wire_pb2.META_GETATTR: meta_pb2.GetAttrRequest,
        wire_pb2.META_SETATTR: meta_pb2.SetAttrRequest,
        wire_pb2.META_RMDIR: meta_pb2.UnlinkRequest,
        wire_pb2.META_READLINK: meta_pb2.ReadLinkRequest,
        wire_pb2.META_LIST: meta_pb2.ListDirRequest,
        wire_pb2.META_STATFS: meta_pb2.StatFsRequest,
        wire_pb2.META_GETXATTR: meta_pb2.GetXattrRequest,
        wire_pb2.META_SETXATTR: meta_pb2.SetXattrRequest,
        wire_pb2.META_LISTXATTR: meta_pb2.ListXattrRequest,
        wire_pb2.META_REMOVEXATTR: meta_pb2.RemoveXattrRequest,
        wire_pb2.META_GETATTR_MANY: meta_pb2.GetAttrManyRequest,
        wire_pb2.META_STATUS: meta_pb2.MetaStatusRequest,
        wire_pb2.META_ALIVE: meta_pb2.ShardAliveRequest,
        wire_pb2.META_MOVE: moving_pb2.MoveRequest,
        wire_pb2.DATA_STATUS: data_pb2.DataStatusRequest,
        wire_pb2.POOL_MAP: pool_pb2.MapRequest,
    }
    modules = {0: data_pb2, 1: meta_pb2, 2: pool_pb2}
    for name, method in wire_pb2.Method.items():
        family = modules.get(method // 100, pool_pb2)
        plain = "".join(word.capitalize() for word in name.split("_")[1:]) + "Request"
        prefixed = name.split("_")[0].capitalize() + plain
        found = (
            unlike.get(method)
            or getattr(family, plain, None)
            or getattr(family, prefixed, None)
            or getattr(moving_pb2, plain, None)
            or getattr(wire_pb2, plain, None)
        )
        if found is not None and method:
            REQUESTS[method] = found


_find_requests()

NUMBERS = {
    bits: (
        0,
        1,
        2,
        3,
        7,
        63,
        64,
        65,
        255,
        4095,
        4096,
        65535,
        (1 << bits - 1) - 1,
        1 << bits - 1,
        (1 << bits) - 1,
    )
    for bits in (31, 32, 63, 64)
}
WIDE = (1 << 32, 1 << 40, (1 << 40) - 1, 1 << 50, (1 << 50) + 1, 1 << 51, (1 << 51) - 1, 1 << 62)
BYTES = (
    b"",
    b"\0",
    b".",
    b"..",
    b"/",
    b"a/b",
    b"x" * 255,
    b"x" * 256,
    b"\xff" * 300,
    b"\0" * 60,
    bytes(range(256)),
    b"user.a",
    b"trusted.b",
    b"security.capability",
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"../../etc/passwd",
    "näme".encode(),
    b"\xc3\x28",
    b"a\nb",
)
STRINGS = (
    "",
    "x",
    "x" * 300,
    "\0",
    "../..",
    "client/x.0a1b2c3d",
    "node/alpha",
    "näme",
    "\U0001f4a9" * 20,
    "drive-add",
    "{}",
)
DOUBLES = (0.0, -0.0, -1.0, 0.01, 1e308, -1e308, float("nan"), float("inf"), -float("inf"))
_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_FIXED64: 64,
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_INT64: 63,
    FieldDescriptor.TYPE_SINT32: 31,
    FieldDescriptor.TYPE_SINT64: 63,
    FieldDescriptor.TYPE_SFIXED32: 31,
    FieldDescriptor.TYPE_SFIXED64: 63,
}
_SIGNED = {
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_SFIXED32,
    FieldDescriptor.TYPE_SFIXED64,
}
_DEEP = 3
"""Depth of nested messages that are filled."""
LARGE_BYTES = (1 << 20, MESSAGE_BYTES_MAX)
"""Sizes of messages with one large field."""
_LARGE_DEEP = 2
"""Depth of nested messages in which a field is made large."""
_HEAD_BYTES = 8
"""Most bytes of the tag and length before a large field."""
_WORD_BITS = (1 << 64) - 1
_LAYOUTS = {
    FieldDescriptor.TYPE_FIXED64: "<Q",
    FieldDescriptor.TYPE_SFIXED64: "<Q",
    FieldDescriptor.TYPE_FIXED32: "<I",
    FieldDescriptor.TYPE_SFIXED32: "<I",
}
_FLOAT_BYTES = {FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FLOAT: 4}

Draw = Callable[[], Any]


class Field(NamedTuple):
    name: str
    repeated: bool
    draw: Draw | None
    """Draws a value; None: the field is a message or a map."""
    below: Descriptor | None
    is_map: bool


class KnownValues:
    """Values that mean something to the service, by field name: `draw[name]()`."""

    def __init__(self) -> None:
        self.draw: dict[str, Draw] = {}
        self.always: set[str] = set()
        """Fields that always have such a value, because all later requests would be refused otherwise."""

    def __getitem__(self, name: str) -> Draw | None:
        return self.draw.get(name)


class Generator:
    def __init__(self, chance: random.Random, known: KnownValues) -> None:
        self.chance = chance
        self.known = known
        self._plans: dict[str, list[Field]] = {}
        self._large_plans: dict[tuple[str, int], list[FieldDescriptor]] = {}

    # -- values ------------------------------------------------------------------------------------------------------------

    def number(self, bits: int, signed: bool = False) -> int:
        chance = self.chance
        drawn = chance.random()
        if drawn < 0.6:
            value = chance.choice(NUMBERS[bits])
        elif drawn < 0.8 or bits < 63:
            value = chance.randrange(1 << chance.randrange(1, bits + 1))
        else:
            value = chance.choice(WIDE)
        return -value if signed and chance.random() < 0.3 else value

    def bytes(self) -> bytes:
        chance = self.chance
        drawn = chance.random()
        if drawn < 0.6:
            return chance.choice(BYTES)
        if drawn < 0.98:
            return chance.randbytes(chance.choice((1, 7, 8, 9, 12, 16, 24, 40, 60, 64, 200)))
        return chance.randbytes(chance.choice((4096, 8192, 65536)))

    def string(self) -> str:
        return self.chance.choice(STRINGS)

    def _draw_of(self, field: FieldDescriptor) -> Draw | None:
        chance = self.chance
        if field.type == field.TYPE_MESSAGE:
            return None
        if field.type == field.TYPE_BYTES:
            return self.bytes
        if field.type == field.TYPE_STRING:
            return self.string
        if field.type == field.TYPE_BOOL:
            return lambda: chance.random() < 0.5
        if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
            return lambda: chance.choice(DOUBLES)
        if field.type == field.TYPE_ENUM:
            count = len(field.enum_type.values)
            return lambda: (
                chance.randrange(count + 1)
                if chance.random() < 0.95
                else chance.choice((-1, 77, (1 << 31) - 1))
            )
        bits, signed = _BITS[field.type], field.type in _SIGNED
        return lambda: self.number(bits, signed)

    def _plan(self, descriptor: Descriptor) -> list[Field]:
        plan = self._plans.get(descriptor.full_name)
        if plan is None:
            plan = [
                Field(
                    field.name,
                    field.is_repeated,
                    self._draw_of(field),
                    field.message_type,
                    field.message_type is not None and field.message_type.GetOptions().map_entry,
                )
                for field in descriptor.fields
            ]
            self._plans[descriptor.full_name] = plan
        return plan

    # -- messages ----------------------------------------------------------------------------------------------------------

    def fill(self, message: Message, depth: int = 0) -> Message:
        """Set most fields, to known or to random values."""
        chance = self.chance
        whole = chance.random() < 0.5
        for field in self._plan(message.DESCRIPTOR):
            known = self.known[field.name]
            if known is None and chance.random() < (0.3 if whole else 0.6):
                continue
            if field.is_map or (field.below is not None and depth >= _DEEP):
                continue
            if field.below is not None:
                if field.repeated:
                    some = getattr(message, field.name)
                    for _ in range(self._count()):
                        self.fill(some.add(), depth + 1)
                elif chance.random() < 0.6 or known is not None:
                    getattr(message, field.name).SetInParent()
                    self.fill(getattr(message, field.name), depth + 1)
                continue
            draw = (
                known
                if known is not None and (chance.random() < 0.93 or field.name in self.known.always)
                else field.draw
            )
            if field.repeated:
                getattr(message, field.name).extend([draw() for _ in range(self._count())])
                continue
            try:
                setattr(message, field.name, draw())
            except (ValueError, TypeError):  # known for another type of the same name
                setattr(message, field.name, field.draw())
        return message

    def _count(self) -> int:
        drawn = self.chance.random()
        return (
            self.chance.randrange(4)
            if drawn < 0.97
            else self.chance.choice((64, 257, 1025))
            if drawn < 0.995
            else 3000
        )

    # -- large messages ----------------------------------------------------------------------------------------------------

    def enlarged(self, descriptor: Descriptor, raw: bytes) -> bytes:
        """Return the message with a field added that fills it up to one of LARGE_BYTES.

        The field is a list, bytes or a string, in the message or in one below it. It is added to the encoded message,
        because millions of values would take seconds to set: a list continues, and another field takes the last value. A
        message without such a field is returned as it is.
        """
        return raw + self._large(descriptor, self.chance.choice(LARGE_BYTES) - len(raw), 0)

    def _large(self, descriptor: Descriptor, room: int, depth: int) -> bytes:
        chance, fields = self.chance, self._large_fields(descriptor, depth)
        if not fields or room <= 2 * _HEAD_BYTES:
            return b""
        field = chance.choice(fields)
        if field.message_type is not None:
            has_large = bool(self._large_fields(field.message_type, depth + 1))
            if has_large and (not field.is_repeated or chance.random() < 0.5):
                inner = self._large(field.message_type, room - _HEAD_BYTES, depth + 1)
                return _delimited(field.number, inner)
            filled = self.fill(GetMessageClass(field.message_type)(), depth + 1)
            return _repeated(_delimited(field.number, filled.SerializeToString()), room)
        if field.type in (field.TYPE_BYTES, field.TYPE_STRING):
            value = self._large_value(field)
            if field.is_repeated and chance.random() < 0.8:
                return _repeated(_delimited(field.number, value), room)
            return _delimited(field.number, _repeated(value or b"x", room - _HEAD_BYTES))
        numbers = b"".join([self._encoded_number(field) for _ in range(8)])
        return _delimited(field.number, _repeated(numbers, room - _HEAD_BYTES))

    def _large_fields(self, descriptor: Descriptor, depth: int) -> list[FieldDescriptor]:
        """Fields of the message that can be made large."""
        found = self._large_plans.get((descriptor.full_name, depth))
        if found is None:
            found = [field for field in descriptor.fields if self._can_be_large(field, depth)]
            self._large_plans[descriptor.full_name, depth] = found
        return found

    def _can_be_large(self, field: FieldDescriptor, depth: int) -> bool:
        below = field.message_type
        if below is None:
            return field.is_repeated or field.type in (field.TYPE_BYTES, field.TYPE_STRING)
        if below.GetOptions().map_entry or depth >= _LARGE_DEEP:
            return False
        return field.is_repeated or bool(self._large_fields(below, depth + 1))

    def _drawn(self, field: FieldDescriptor) -> Any:
        """A known value of the field, or any."""
        draw = self.known[field.name]
        if draw is None or self.chance.random() < 0.3:
            draw = self._draw_of(field)
        return None if draw is None else draw()

    def _large_value(self, field: FieldDescriptor) -> bytes:
        value = self._drawn(field)
        if field.type == field.TYPE_STRING:
            return value.encode() if isinstance(value, str) else b"x"
        return value if isinstance(value, bytes) else self.bytes()

    def _encoded_number(self, field: FieldDescriptor) -> bytes:
        if field.type in _FLOAT_BYTES:
            return self.chance.randbytes(_FLOAT_BYTES[field.type])
        value = self._drawn(field)
        number = value if isinstance(value, int) else self.number(63)
        layout = _LAYOUTS.get(field.type)
        if layout is None:
            return _varint(number & _WORD_BITS)
        return struct.pack(layout, number & (_WORD_BITS if layout == "<Q" else 0xFFFFFFFF))

    # -- bytes -------------------------------------------------------------------------------------------------------------

    def mutated(self, raw: bytes, other: bytes) -> bytes:
        """Return the bytes with an error in them; `other` is a message of another kind to mix in."""
        chance = self.chance
        drawn = chance.randrange(8)
        if not raw or drawn == 0:
            return raw + other
        changed = bytearray(raw)
        if drawn <= 3:
            for _ in range(chance.choice((1, 1, 2, 8))):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        elif drawn == 4:
            del changed[chance.randrange(len(changed)) :]
        elif drawn == 5:
            at = chance.randrange(len(changed))
            changed[at:at] = chance.randbytes(chance.choice((1, 4, 30)))
        elif drawn == 6:
            first, last = sorted((chance.randrange(len(changed)), chance.randrange(len(changed))))
            changed[first:last] = other[: chance.randrange(len(other) + 1)]
        else:
            changed *= 2  # each field twice
        return bytes(changed)

    def packed(self, draw: Callable[[], int], layout: str = "<Q") -> bytes:
        """Return packed numbers, sometimes with an incomplete one."""
        count = self.chance.choice((0, 1, 1, 2, 3, 17, 1024, 1025)) if self.chance.random() < 0.3 else 1
        raw = b"".join([struct.pack(layout, draw() & 0xFFFFFFFFFFFFFFFF) for _ in range(count)])
        return raw[:-1] if self.chance.random() < 0.03 else raw


# -- protobuf encoding (protobuf.dev, Encoding) --------------------------------------------------------------


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _delimited(field: int, value: bytes) -> bytes:
    """The field with its tag and length: bytes, a string, a message or packed numbers."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _repeated(unit: bytes, room: int) -> bytes:
    """The unit as often as it has room."""
    return unit * (room // len(unit))
