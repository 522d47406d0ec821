"""TLS server over TCP that counts connections before their handshake.

An event loop's own server reports a connection only after its handshake, so that one address could have any
number of unfinished handshakes. Here each connection counts for its address until its handshake has ended,
successfully or not, within its time limit. A connection above the limits is closed without a message, since
nothing can be sent before a handshake. Made by rpc/transports/stream, where it replaces asyncio.Server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from nvpool.rpc.peer_limits import Limits

if TYPE_CHECKING:
    from nvpool.rpc.transports.socket_options import TlsOptions

_log = logging.getLogger(__name__)

ACCEPTS_A_TURN = 64
PAUSE_S = 1.0
"""Pause in accepting connections when no file descriptor is free."""


class TlsServer:
    """TLS server on `sock`, which listens already and which the server closes.

    `options` are those of the loop's connect_accepted_socket.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        sock: socket.socket,
        options: TlsOptions,
        limits: Limits,
    ) -> None:
        self._factory = factory
        self._sock = sock
        self._options = options
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("no connection can be accepted: %s", error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._listen)
                return
            name = self._limits.shakes_hands(address[0])
            if name is None:
                sock.close()
                continue
            sock.setblocking(False)
            task = self._loop.create_task(self._shake_hands(sock, name))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket, name: str) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, sock, **self._options)
        except OSError as error:  # includes TimeoutError and ssl.SSLError
            _log.debug("a handshake of TLS with %s has failed: %s", name, error)
        finally:
            self._limits.has_shaken_hands(name)

    def close(self) -> None:
        """Stop accepting, and cancel unfinished handshakes."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._handshakes:
            task.cancel()
