"""Registered memory of one connection: places that the other side writes payloads to, and that are used again.

A place is handed out for one request. It comes back by itself when nobody refers to it any more, but only if the other side
has said that it writes no more to it; until then its owner keeps it. The memory of a connection that has ended is never handed
out again: it is unregistered when the last who reads in it has let go. Bounded per connection and per process; where there is
no room left the payload travels as on any stream. Fresh memory costs more than the copy that fills it
(core/containers/buffer_pool), so what was used last is used next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from nvpool.core.units import KIB, MIB
from nvpool.rpc.transports import ucx

PLACE_BYTES_MIN = 4 * KIB
PLACE_BYTES_MAX = 32 * MIB
SLAB_BYTES = 4 * MIB
"""Registered at once, for as many places of one size; larger ones have a slab each."""
ROOM_BYTES_MAX = 64 * MIB
"""Of one connection: as much as a store has in work for one peer."""
PROCESS_BYTES_MAX = 512 * MIB

_in_process = [0]


class Rooms:
    """`tell_key(number, slab)` and `forget_key(number)` tell the other side; both before anything else is sent."""

    def __init__(self, context: Any, tell_key: Callable[[int, Any], None], forget_key: Callable[[int], None], *,
                 bytes_max: int = ROOM_BYTES_MAX) -> None:
        self._context = context
        self._tell_key = tell_key
        self._forget_key = forget_key
        self._bytes_max = bytes_max
        self._free: dict[int, list[tuple[int, Any, int]]] = {}  # by size of places
        self._slabs: dict[int, tuple[Any, int]] = {}            # by number of the key: (slab, size of its places)
        self._bytes = 0
        self._number = 0
        self._closed = False

    def take(self, byte_count: int) -> Any | None:
        """A place for that many bytes, or None where there is no room. Its `key` is (number of the key, size of the place)."""
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
            if number in self._slabs:  # else its key was revoked while somebody read there
                return ucx.Place(slab, offset, byte_count, free, number)

    def _grow(self, size: int) -> bool:
        length = max(size, SLAB_BYTES)
        if self._bytes + length > self._bytes_max:
            self._shrink(self._bytes + length - self._bytes_max)
        if self._bytes + length > self._bytes_max or _in_process[0] + length > PROCESS_BYTES_MAX:
            return False
        try:
            slab = ucx.Slab(self._context, length)
        except ucx.Error as error:  # the limit of locked or of shared memory
            self._bytes_max = self._bytes
            ucx.log.warning("no more memory can be registered for RDMA: %s; more answers come as on a stream", error)
            return False
        self._number += 1
        self._slabs[self._number] = slab, size
        self._bytes += length
        _in_process[0] += length
        self._tell_key(self._number, slab)
        self._free.setdefault(size, []).extend((self._number, slab, offset) for offset in range(length - size, -1, -size))
        return True

    def _shrink(self, wanted: int) -> None:
        """Unregister slabs in which no place is taken, until `wanted` bytes are free or there are none."""
        for number, (slab, size) in list(self._slabs.items()):
            if wanted <= 0:
                return
            mine = [entry for entry in self._free[size] if entry[0] == number]
            if len(mine) == slab.length // size:
                wanted -= slab.length
                self.revoke(number)

    def revoke(self, number: int) -> None:
        """The other side can not write by this key any more; its free places are not handed out again."""
        slab, size = self._slabs.pop(number)
        for entry in [entry for entry in self._free[size] if entry[0] == number]:
            self._free[size].remove(entry)  # one by one: places come back from other threads too
        self._bytes -= slab.length
        _in_process[0] -= slab.length
        self._forget_key(number)

    def numbers(self) -> Collection[int]:
        """Of the keys that the other side has."""
        return self._slabs.keys()

    def close(self) -> None:
        """Hand out nothing more. Memory goes when nobody reads in it any more; called when nothing can arrive any more."""
        self._closed = True
        for free in self._free.values():
            free.clear()
        for slab, _ in self._slabs.values():
            _in_process[0] -= slab.length
        self._slabs.clear()
        self._bytes = 0
