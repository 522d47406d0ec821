"""Server of TLS over TCP that counts connections before their handshake.

A loop's own server calls nobody before a handshake is over, so that an address could have any number of unfinished ones. Here
each is counted for its address until its handshake has ended, well or not, within its time; one above the limits is closed
without a word, since nothing can be said before a handshake. Made by rpc/transports/stream; stands for asyncio.Server there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from nvpool.rpc.limits import Limits

_log = logging.getLogger(__name__)

ACCEPTS_A_TURN = 64
PAUSE_S = 1.0
"""Without accepting, when no file descriptor is left."""


class TlsServer:
    """Takes over `sock`, which listens. `options` are those of the loop's connect_accepted_socket."""

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket, options: dict, limits: Limits) -> None:
        self._factory = factory
        self._sock = sock
        self._options = options
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task] = set()
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
        except OSError as error:  # TimeoutError and ssl.SSLError are some
            _log.debug("a handshake of TLS with %s has failed: %s", name, error)
        finally:
            self._limits.has_shaken_hands(name)

    def close(self) -> None:
        """Accept nothing more; end unfinished handshakes."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._handshakes:
            task.cancel()
