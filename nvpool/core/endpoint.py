"""Endpoints: the URLs under which a pool map lists where a daemon listens.

    stream://HOST:PORT   stream+unix:///PATH   grpc://HOST:PORT   inproc://NAME   SCHEME://… of a plug-in

`?host=ID` behind any of them names the host that it can be reached from (a unix path of another host may exist here too, and
be another daemon's); without it a unix path is tried wherever it exists. Read by every transport and by the dialer.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from nvpool.core.errors import InvalidRequest

UNIX_PATH_BYTES_MAX = 107
"""sun_path holds 108 bytes with the terminating zero (unix(7))."""


class Endpoint(NamedTuple):
    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    """Of a unix socket, or the name behind inproc://."""
    host_id: str = ""


def parse_endpoint(url: str) -> Endpoint:
    """The parts of an endpoint. InvalidRequest says what is wrong with it; nothing else is raised."""
    try:
        parts = urlsplit(url)
        port = parts.port or 0
        host = parts.hostname or ""
        host_id = parse_qs(parts.query).get("host", [""])[0]
    except ValueError as error:
        raise InvalidRequest(f"{url!r} is not an endpoint: {error}") from None
    scheme, found, _ = url.partition("://")
    if not found or not scheme:
        raise InvalidRequest(f"{url!r} is not an endpoint; write it like stream://host:port or stream+unix:///path")
    if scheme == "inproc":
        return Endpoint(scheme, path=parts.netloc + parts.path, host_id=host_id)
    if scheme.endswith("+unix"):
        path = unquote(parts.path)
        if not path.startswith("/") or len(path.encode()) > UNIX_PATH_BYTES_MAX:
            raise InvalidRequest(f"{url!r}: the path of a unix socket is absolute and at most {UNIX_PATH_BYTES_MAX} bytes long")
        return Endpoint(scheme, path=path, host_id=host_id)
    if not host:
        raise InvalidRequest(f"{url!r} names no host")
    return Endpoint(scheme, host, port, parts.path, host_id)


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_port_url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"
