"""The first words on a connection, both ways: who speaks, for which pool, in which versions of the protocol.

The asking side sends its Hello, the listening side checks it and answers with its own or with an error that names both; the
asking side checks likewise. The agreed version is the newest that both know. Called by the transports; the coding of Hello
itself never changes, whatever the version.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from nvpool.core.errors import CorruptFrame, ProtocolMismatch
from nvpool.core.version import VERSION
from nvpool.rpc.api import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Greeting
from nvpool.rpc.v1 import wire_pb2

SOFTWARE = f"nvpool {VERSION}"
"""For people who read refusals and logs; nothing is decided by it."""

HELLO_S = 10.0
"""Who has not said hello by then is hung up on: half-open connections must not pile up."""


def encode_hello(greeting: Greeting, offers: Iterable[str] = ()) -> bytes:
    """`offers`: what the asking side may go on to on this connection, as its Hello.transports."""
    return wire_pb2.Hello(version=PROTOCOL_VERSION, version_min=PROTOCOL_VERSION_MIN, name=greeting.name,
                          fingerprint=greeting.fingerprint, software=SOFTWARE, host_id=greeting.host_id,
                          transports=offers).SerializeToString()


def check_hello(raw, greeting: Greeting) -> wire_pb2.Hello:
    """The other side's Hello, when the two can speak to one another.

    ProtocolMismatch   no common version, or another pool; the text names both sides
    CorruptFrame       it is no Hello
    """
    hello = wire_pb2.Hello()
    try:
        hello.ParseFromString(bytes(raw))
    except DecodeError:
        raise CorruptFrame("the greeting can not be read") from None
    theirs = f"{hello.name!r} ({hello.software or 'unknown software'})"
    ours = f"{greeting.name!r} ({SOFTWARE})"
    if hello.version < PROTOCOL_VERSION_MIN or hello.version_min > PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"{theirs} speaks protocol {_span(hello.version_min, hello.version)}, "
            f"{ours} speaks {_span(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)}: update the older of the two")
    if hello.fingerprint and greeting.fingerprint and hello.fingerprint != greeting.fingerprint:
        raise ProtocolMismatch(f"{theirs} belongs to pool {hello.fingerprint}, {ours} to pool {greeting.fingerprint}")
    return hello


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
