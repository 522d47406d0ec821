"""Registered buffers of one RDMA connection: memory that the server writes payloads to, reused.

A buffer (`Region`) is handed out for one request. It returns by itself when nothing refers to it any more, but
only if the server has confirmed that it no longer writes there; until then the connection keeps a reference.
The memory of a connection that has ended is never handed out again: it is unregistered when its last reader
has released it. The memory is bounded per connection and per process; without free memory the payload travels
over the stream. Fresh memory costs more than the copy that fills it (core/containers/buffer_pool), so the
buffer that was used last is used next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from nvpool.core.units import KIB, MIB
from nvpool.rpc.transports import ucx

PLACE_BYTES_MIN = 4 * KIB
PLACE_BYTES_MAX = 32 * MIB
SLAB_BYTES = 4 * MIB
"""Size of one registration, split into buffers of one size. A larger buffer has its own slab."""
ROOM_BYTES_MAX = 64 * MIB
"""Most bytes of one connection: as many as a store processes for one peer."""
PROCESS_BYTES_MAX = 512 * MIB

in_process = [0]


class RegisteredBuffers:
    """Registered buffers of one connection.

    `send_key(number, slab)` and `forget_key(number)` send the key, or its end, to the server, before any
    other message.
    """

    def __init__(
        self,
        context: Any,
        send_key: Callable[[int, Any], None],
        forget_key: Callable[[int], None],
        *,
        bytes_max: int = ROOM_BYTES_MAX,
    ) -> None:
        self._context = context
        self._send_key = send_key
        self._forget_key = forget_key
        self._bytes_max = bytes_max
        self._free: dict[int, list[tuple[int, Any, int]]] = {}  # by size of the buffers
        self._slabs: dict[int, tuple[Any, int]] = {}  # key number -> (slab, size of its buffers)
        self.byte_count = 0
        self._number = 0
        self._closed = False

    def take(self, byte_count: int) -> Any | None:
        """Return a buffer for that many bytes, or None if no memory is free.

        Its `key` is the number of the key.
        """
        if byte_count > PLACE_BYTES_MAX or self._closed:
            return None
        size = max(PLACE_BYTES_MIN, 1 << (byte_count - 1).bit_length())
        free = self._free.get(size)
        while True:
            if not free:
                if not self._grow(size):
                    return None
                free = self._free[size]
            number, slab, offset = free.pop()
            if number in self._slabs:  # else its key was revoked while a reader still used the memory
                return ucx.Place(slab, offset, byte_count, free, number)

    def _grow(self, size: int) -> bool:
        length = max(size, SLAB_BYTES)
        if self.byte_count + length > self._bytes_max:
            self._shrink(self.byte_count + length - self._bytes_max)
        if self.byte_count + length > self._bytes_max or in_process[0] + length > PROCESS_BYTES_MAX:
            return False
        try:
            slab = ucx.Slab(self._context, length)
        except ucx.Error as error:  # the limit of locked memory or of shared memory
            self._bytes_max = self.byte_count
            ucx.log.warning(
                "no more memory can be registered for RDMA: %s; more answers come as on a stream", error
            )
            return False
        self._number += 1
        self._slabs[self._number] = slab, size
        self.byte_count += length
        in_process[0] += length
        self._send_key(self._number, slab)
        self._free.setdefault(size, []).extend(
            (self._number, slab, offset) for offset in range(length - size, -1, -size)
        )
        return True

    def _shrink(self, wanted: int) -> None:
        """Unregister slabs without used buffers, until `wanted` bytes are free or none is left."""
        for number, (slab, size) in list(self._slabs.items()):
            if wanted <= 0:
                return
            mine = [entry for entry in self._free[size] if entry[0] == number]
            if len(mine) == slab.length // size:
                wanted -= slab.length
                self.revoke(number)

    def revoke(self, number: int) -> None:
        """Revoke a key: the server can no longer write with it, and its free buffers are not handed out
        again."""
        slab, size = self._slabs.pop(number)
        for entry in [entry for entry in self._free[size] if entry[0] == number]:
            self._free[size].remove(entry)  # one by one: other threads return buffers too
        self.byte_count -= slab.length
        in_process[0] -= slab.length
        self._forget_key(number)

    def numbers(self) -> Collection[int]:
        """Numbers of the keys that the server has."""
        return self._slabs.keys()

    def close(self) -> None:
        """Hand out nothing more; call only when nothing can arrive any more.

        Memory that readers still use is released when they release it.
        """
        self._closed = True
        for free in self._free.values():
            free.clear()
        for slab, _ in self._slabs.values():
            in_process[0] -= slab.length
        self._slabs.clear()
        self.byte_count = 0
