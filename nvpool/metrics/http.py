"""GET /metrics over HTTP, for Prometheus and nothing else: what an address is given, one page comes back.

The standard library's streams are enough for that: one method, one path, no body, a connection for each request. So neither
daemons nor mounts pay for a web server. Bounds: CONNECTIONS_MAX at once, HEAD_BYTES_MAX of request, REQUEST_S to send it,
TAKE_S to take the answer; what is beyond is hung up on. There is no encryption and no password: it listens on the loopback
address or a unix socket unless the operator says otherwise; docs/operate/monitor.md tells what to put
before it. Called by node/supervisor,
mountd/server and daemons/bridge.
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
"""Before an address that is in use is tried again: the process before us may still have it."""
WAIT_S = 2.0
"""For a page, where the asker does not say how long he waits."""

log = logging.getLogger("nvpool.metrics.http")

MakePage = Callable[[float], Awaitable[Page]]
"""Given how many seconds it may take."""


async def serve_metrics(address: str, make_page: MakePage, group: int | None = None) -> None:
    """Listen at `address` until cancelled. While it can not be had it is tried again, and the log says so once. A unix socket
    is for its owner and `group`, or ours."""
    host, port = parse_address(address)
    if is_open(address):
        log.warning("metrics are told to whoever reaches %s, without a password: keep it on the loopback address, or put a "
                    "proxy before it", address)
    told = False
    asked: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(asked) >= CONNECTIONS_MAX:
            writer.close()
            return
        asked.add(writer)
        try:
            await _answer(reader, writer, make_page)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or makes no sense
        finally:
            asked.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    while True:
        try:
            server = await (asyncio.start_server(answer, host, port, limit=HEAD_BYTES_MAX) if port
                            else _at_socket(host, answer, group))
        except OSError as error:
            if not told:
                log.warning("metrics can not be served at %s, which is tried again: %s", address, error.strerror or error)
                told = True
            await asyncio.sleep(AGAIN_S)
            continue
        log.info("metrics are served at %s", f"http://{host}:{port}/metrics" if port else f"the socket {host}")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for writer in list(asked):
                writer.close()


async def _at_socket(path: str, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
                     group: int | None) -> asyncio.Server:
    """A socket that a process which has ended left is replaced. OSError where another process listens there."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        raise OSError(errno.EADDRINUSE, "another process listens there")
    server = await asyncio.start_unix_server(answer, path, limit=HEAD_BYTES_MAX)
    os.chmod(path, 0o660)  # before, the umask has kept others from writing, which connecting needs
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
        except Exception:  # the border: what is asked for next time may be there
            log.exception("metrics could not be told")
            status, kind, body = "500 Internal Server Error", "text/plain", b"the log tells why\n"
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                 f"Connection: close\r\n\r\n".encode())
    if method != "HEAD":
        writer.write(body)
    async with asyncio.timeout(TAKE_S):
        await writer.drain()


def _patience(lines: list[str]) -> float:
    """Prometheus says how long it waits; half of that, and not more than WAIT_S, goes to who is asked."""
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() == "x-prometheus-scrape-timeout-seconds":
            with contextlib.suppress(ValueError):
                return min(WAIT_S, max(0.1, float(value) / 2))
    return WAIT_S
