"""Handshake of a connection: both sides exchange their name, pool and protocol versions.

The client sends its Hello. The server checks it and answers with its own Hello, or with an error that names
both sides; the client then checks the server's Hello in the same way. The agreed version is the newest that
both know. The transports call this module. The encoding of Hello itself never changes, whatever the version.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from nvpool.core.errors import CorruptFrame, ProtocolMismatch
from nvpool.core.version import VERSION
from nvpool.rpc.api import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Buffer, Greeting
from nvpool.rpc.v1 import wire_pb2

SOFTWARE = f"nvpool {VERSION}"
"""Software name for readers of refusals and logs. The program makes no decision with it."""

HELLO_S = 10.0
"""Time limit for the Hello of a peer.

After it the connection is closed, so that half-open connections do not pile up."""

TEXT_CHARACTERS_MAX = 255
"""Most characters of a text of the other side that logs and errors repeat."""


def encode_hello(greeting: Greeting, offers: Iterable[str] = ()) -> bytes:
    """Encode our Hello. `offers`: transports to which the client can upgrade this connection
    (Hello.transports)."""
    return wire_pb2.Hello(
        version=PROTOCOL_VERSION,
        version_min=PROTOCOL_VERSION_MIN,
        name=greeting.name,
        fingerprint=greeting.fingerprint,
        software=SOFTWARE,
        host_id=greeting.host_id,
        transports=offers,
    ).SerializeToString()


def check_hello(raw: Buffer, greeting: Greeting) -> wire_pb2.Hello:
    """Decode the other side's Hello and check that both sides can communicate.

    Name and software of the result are short and printable, whatever the other side sent.

    ProtocolMismatch   no common version, or another pool; the text names both sides
    CorruptFrame       the bytes are not a Hello
    """
    hello = wire_pb2.Hello()
    try:
        hello.ParseFromString(bytes(raw))
    except DecodeError:
        raise CorruptFrame("the greeting cannot be read") from None
    hello.name, hello.software = printable(hello.name), printable(hello.software)
    theirs = f"{hello.name!r} ({hello.software or 'unknown software'})"
    ours = f"{greeting.name!r} ({SOFTWARE})"
    if hello.version < PROTOCOL_VERSION_MIN or hello.version_min > PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"{theirs} speaks protocol {_span(hello.version_min, hello.version)}, "
            f"{ours} speaks {_span(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)}: update the older of the two"
        )
    if hello.fingerprint and greeting.fingerprint and hello.fingerprint != greeting.fingerprint:
        raise ProtocolMismatch(
            f"{theirs} belongs to pool {printable(hello.fingerprint)}, {ours} to pool {greeting.fingerprint}"
        )
    return hello


def printable(text: str) -> str:
    """Return the beginning of a text of the other side, fit for one line of a log.

    Characters that are not printable, such as line ends and escape sequences of terminals, become "?".
    """
    text = text[:TEXT_CHARACTERS_MAX]
    return text if text.isprintable() else "".join([one if one.isprintable() else "?" for one in text])


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
