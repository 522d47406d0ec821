"""The coordinator of a pool on one machine: the pool map in the engine of kv/, and a copy as poolmap.json for all to read.

Called by the supervisor, which alone has DIR/lock. Guarantees the order: a map is durable in the records, then in
poolmap.json, then watchers are told. A crash between leaves a copy that is older by one, which `open` mends.

Keys: b"map" (JSON of logic/poolmap), b"map/" + epoch as u64 big-endian (the last KEPT_MAPS maps, for an operator's eyes).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from nvpool.base.errors import CorruptRecord, InvalidRequest, StaleEpoch, from_os_error
from nvpool.cluster.coordinator import WATCH_S_MAX
from nvpool.kv.contract import Kv
from nvpool.logic.poolmap import PoolMap, check_map, decode_map, encode_map

KEPT_MAPS = 64
_NEWEST = b"map"
_EPOCH = struct.Struct(">Q")


def _kept(epoch: int) -> bytes:
    return b"map/" + _EPOCH.pack(epoch)


class EmbeddedCoordinator:
    def __init__(self, kv: Kv, pool_map: PoolMap, publish: Callable[[bytes], None]):
        self._kv = kv
        self._pool_map = pool_map
        self._publish = publish
        self._turn = asyncio.Lock()
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False

    @classmethod
    async def found(cls, kv: Kv, first: PoolMap, publish: Callable[[bytes], None] = lambda raw: None) -> EmbeddedCoordinator:
        """A coordinator over an empty `kv` that begins with the map `first`. InvalidRequest when there is a map already."""
        if kv.get(_NEWEST) is not None:
            raise InvalidRequest("these records hold a pool map already")
        if problems := check_map(first):
            raise InvalidRequest("; ".join(problems))
        raw = encode_map(first)
        kv.apply([(_NEWEST, raw), (_kept(first.epoch), raw)])
        await kv.sync()
        publish(raw)
        return cls(kv, first, publish)

    @classmethod
    async def open(cls, kv: Kv, publish: Callable[[bytes], None] = lambda raw: None) -> EmbeddedCoordinator:
        """The coordinator over what `kv` holds, and the copy written anew. CorruptRecord when there is no map or a bad one."""
        raw = kv.get(_NEWEST)
        if raw is None:
            raise CorruptRecord("the coordinator's records hold no pool map")
        pool_map = decode_map(raw)
        publish(bytes(raw))
        return cls(kv, pool_map, publish)

    @property
    def pool_map(self) -> PoolMap:
        return self._pool_map

    async def replace(self, new: PoolMap) -> None:
        async with self._turn:
            now = self._pool_map
            if new.epoch != now.epoch + 1:
                raise StaleEpoch(f"the pool map has epoch {now.epoch}, so the next is {now.epoch + 1}, not {new.epoch}")
            if problems := check_map(new):
                raise InvalidRequest("; ".join(problems))
            if new.fingerprint != now.fingerprint:
                raise InvalidRequest("this map is another pool's, or has other fixed settings")
            raw = encode_map(new)
            await self._kv.room()
            # It takes the place of older maps: on a full drive too, since no target is started again without a new map.
            sequence = self._kv.apply([(_NEWEST, raw), (_kept(new.epoch), raw), (_kept(max(0, new.epoch - KEPT_MAPS)), None)],
                                      reclaims=True)
            await self._kv.sync(sequence)
            self._pool_map = new  # durable: from here on only forward, even where the copy can not be written
            try:
                self._publish(raw)
            except OSError as error:
                raise from_os_error(error, "write the copy of the pool map") from error
            finally:
                told, self._next = self._next, asyncio.get_running_loop().create_future()
                told.set_result(None)

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        if self._pool_map.epoch <= newer_than and not self._closed and wait_s > 0:
            await asyncio.wait([self._next], timeout=min(wait_s, WATCH_S_MAX))
        return self._pool_map if self._pool_map.epoch > newer_than else None

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._next.done():
                self._next.set_result(None)
            await self._kv.close()
