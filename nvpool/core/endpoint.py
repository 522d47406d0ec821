"""Endpoints: URLs in the pool map at which a daemon listens.

    stream://HOST:PORT   stream+unix:///PATH   grpc://HOST:PORT   inproc://NAME   SCHEME://… of a plug-in

The optional query `?host=ID` names the only host from which the endpoint can be reached: the same unix path
may exist on another host and belong to another daemon. Without `?host=ID`, clients try a unix path wherever
the path exists. Every transport and the dialer parse endpoints with this module.
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
    """Path of a unix socket, or the name after inproc://."""
    host_id: str = ""


def parse_endpoint(url: str) -> Endpoint:
    """Return the parts of an endpoint.

    InvalidRequest: the URL is not an endpoint, and the text says why. Nothing else is raised.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 0
        host = parts.hostname or ""
        host_id = parse_qs(parts.query).get("host", [""])[0]
    except ValueError as error:
        raise InvalidRequest(f"{url!r} is not an endpoint: {error}") from None
    scheme, found, _ = url.partition("://")
    if not found or not scheme:
        raise InvalidRequest(
            f"{url!r} is not an endpoint; write it like stream://host:port or stream+unix:///path"
        )
    if scheme == "inproc":
        return Endpoint(scheme, path=parts.netloc + parts.path, host_id=host_id)
    if scheme.endswith("+unix"):
        path = unquote(parts.path)
        if not path.startswith("/") or len(path.encode()) > UNIX_PATH_BYTES_MAX:
            raise InvalidRequest(
                f"{url!r}: the path of a unix socket is absolute and at most {UNIX_PATH_BYTES_MAX} bytes long"
            )
        return Endpoint(scheme, path=path, host_id=host_id)
    if not host:
        raise InvalidRequest(f"{url!r} names no host")
    return Endpoint(scheme, host, port, parts.path, host_id)


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_port_url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"
