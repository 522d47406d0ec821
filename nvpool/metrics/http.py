"""HTTP endpoint GET /metrics, for Prometheus.

The standard library's streams are enough: one method, one path, no body, one connection per request. So
neither daemons nor mounts need a web server. Bounds: CONNECTIONS_MAX simultaneous connections, HEAD_BYTES_MAX
of request, REQUEST_S to send the request, TAKE_S to receive the reply; the server closes a connection that
exceeds a bound. There is no encryption and no password: the endpoint listens on the loopback address or a
unix socket unless the operator configures another address. docs/operate/monitor.md describes a proxy for that
case. Used by node/supervisor, mountd/server and daemons/bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Awaitable, Callable

from nvpool.core.config import is_open, parse_address
from nvpool.metrics.exposition import CONTENT_TYPE, Page

CONNECTIONS_MAX = 16
HEAD_BYTES_MAX = 16 << 10
REQUEST_S = 5.0
TAKE_S = 10.0
AGAIN_S = 5.0
"""Delay before listening is retried on an address that is in use: a previous process may still own the
address."""
WAIT_S = 2.0
"""Time limit for collecting a page, if the scraper does not send its own limit."""

log = logging.getLogger("nvpool.metrics.http")

MakePage = Callable[[float], Awaitable[Page]]
"""Function that collects a page within the given number of seconds."""


async def serve_metrics(address: str, make_page: MakePage, group: int | None = None) -> None:
    """Serve /metrics at `address` until cancelled.

    While listening fails, the function retries and logs one warning. Only the owner and `group` (by default
    the group of this process) may connect to a unix socket.
    """
    host, port = parse_address(address)
    if is_open(address):
        log.warning(
            "everybody who reaches %s can read the metrics, without a password: keep it on the loopback address, or put a "
            "proxy before it",
            address,
        )
    is_logged = False
    asked: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(asked) >= CONNECTIONS_MAX:
            writer.close()
            return
        asked.add(writer)
        try:
            await _answer(reader, writer, make_page)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has disconnected or sent an invalid request
        finally:
            asked.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    while True:
        try:
            server = await (
                asyncio.start_server(answer, host, port, limit=HEAD_BYTES_MAX)
                if port
                else _at_socket(host, answer, group)
            )
        except OSError as error:
            if not is_logged:
                log.warning(
                    "metrics cannot be served at %s, which is tried again: %s",
                    address,
                    error.strerror or error,
                )
                is_logged = True
            await asyncio.sleep(AGAIN_S)
            continue
        log.info(
            "metrics are served at %s", f"http://{host}:{port}/metrics" if port else f"the socket {host}"
        )
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for writer in list(asked):
                writer.close()


async def _at_socket(
    path: str,
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    group: int | None,
) -> asyncio.Server:
    """Listen on a unix socket; replace a socket left by a process that has ended.

    OSError: another process listens on `path`.
    """
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        raise OSError(errno.EADDRINUSE, "another process listens there")
    server = await asyncio.start_unix_server(answer, path, limit=HEAD_BYTES_MAX)
    # Connecting needs write permission, which the umask has denied to other users until now.
    os.chmod(path, 0o660)
    if group is not None:
        os.chown(path, -1, group)
    return server


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, make_page: MakePage) -> None:
    async with asyncio.timeout(REQUEST_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, kind, body = "405 Method Not Allowed", "text/plain", b"only GET\n"
    elif path != "/metrics":
        status, kind, body = "404 Not Found", "text/plain", b"metrics are at /metrics\n"
    else:
        status, kind = "200 OK", CONTENT_TYPE
        try:
            body = (await make_page(_patience(lines))).text().encode()
        except Exception:  # border of the subsystem: the next scrape may succeed
            log.exception("metrics could not be collected")
            status, kind, body = "500 Internal Server Error", "text/plain", b"the log has the reason\n"
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n".encode()
    )
    if method != "HEAD":
        writer.write(body)
    async with asyncio.timeout(TAKE_S):
        await writer.drain()


def _patience(lines: list[str]) -> float:
    """Return the time limit for collecting a page: half of the scraper's own timeout, at most WAIT_S.

    Prometheus sends its timeout in a request header.
    """
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() == "x-prometheus-scrape-timeout-seconds":
            with contextlib.suppress(ValueError):
                return min(WAIT_S, max(0.1, float(value) / 2))
    return WAIT_S
