"""Coordinator of a pool on one machine: the pool map in the engine of kv/, with a copy in poolmap.json.

Used by the supervisor, which alone holds DIR/lock. The order is guaranteed: a map is first durable in the
records, then in poolmap.json, then watchers are notified. A crash in between leaves a copy that is one map
older; `open` repairs it. Leases here last until they are released, because every holder lives in this
process.

Keys: b"map" (JSON of poolmap/model), b"map/" + epoch as u64 big-endian (the last KEPT_MAPS maps, for
operators to inspect).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from math import inf

from nvpool.cluster.coordinator_api import CoordinatorLease
from nvpool.cluster.map_watchers import MapWatchers
from nvpool.core.errors import CorruptRecord, InvalidRequest, StaleEpoch, StaleLease, from_os_error
from nvpool.kv.api import Kv
from nvpool.poolmap.model import PoolMap, check_map, decode_map, encode_map, problems_of

KEPT_MAPS = 64
_NEWEST = b"map"
_EPOCH = struct.Struct(">Q")


def _kept(epoch: int) -> bytes:
    return b"map/" + _EPOCH.pack(epoch)


class _EmbeddedLease:
    former = None
    former_led_s = 0.0

    def __init__(self, on_end: Callable[[_EmbeddedLease], None]) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end

    @property
    def holds(self) -> bool:
        return not self.lost.done()

    @property
    def in_doubt(self) -> bool:
        return self.lost.done()

    @property
    def left_s(self) -> float:
        return inf if self.holds else 0.0

    async def release(self) -> None:
        self.end()

    def end(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
            self._on_end(self)


class EmbeddedCoordinator:
    def __init__(self, kv: Kv, pool_map: PoolMap, publish: Callable[[bytes], None]):
        self._kv = kv
        self._publish = publish
        self._turn = asyncio.Lock()
        self._watchers = MapWatchers(pool_map)
        self._announced: dict[str, _EmbeddedLease] = {}
        self._leading: _EmbeddedLease | None = None

    @classmethod
    async def found(
        cls, kv: Kv, first: PoolMap, publish: Callable[[bytes], None] = lambda raw: None
    ) -> EmbeddedCoordinator:
        """Create a coordinator over an empty `kv` with `first` as its map.

        InvalidRequest: `kv` already has a map.
        """
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
        """Open the coordinator of the map in `kv` and rewrite the copy.

        CorruptRecord: no map, or an invalid one.
        """
        raw = kv.get(_NEWEST)
        if raw is None:
            raise CorruptRecord("the coordinator's records hold no pool map")
        pool_map = decode_map(raw)
        publish(bytes(raw))
        return cls(kv, pool_map, publish)

    @property
    def pool_map(self) -> PoolMap:
        return self._watchers.pool_map

    async def newest(self) -> PoolMap:
        return self.pool_map

    async def replace(self, new: PoolMap, leader: CoordinatorLease | None = None) -> None:
        async with self._turn:
            if leader is not None and leader is not self._leading:
                raise StaleLease("who asks for this map does not lead any more")
            now = self.pool_map
            if new.epoch != now.epoch + 1:
                raise StaleEpoch(
                    f"the pool map has epoch {now.epoch}, so the next is {now.epoch + 1}, not {new.epoch}"
                )
            if problems := problems_of(now, new):
                raise InvalidRequest("; ".join(problems))
            raw = encode_map(new)
            await self._kv.room()
            # The write replaces older maps, so it is allowed on a full drive: no target restarts without a
            # new map.
            sequence = self._kv.apply(
                [(_NEWEST, raw), (_kept(new.epoch), raw), (_kept(max(0, new.epoch - KEPT_MAPS)), None)],
                reclaims=True,
            )
            await self._kv.sync(sequence)
            self._watchers.pool_map = (
                new  # durable: no way back from here, even if the copy cannot be written
            )
            try:
                self._publish(raw)
            except OSError as error:
                raise from_os_error(error, "write the copy of the pool map") from error
            finally:
                self._watchers.notify()

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        return await self._watchers.watch(newer_than, wait_s)

    async def announce(self, name: str, value: bytes, lease_s: float) -> CoordinatorLease:
        before = self._announced.get(name)
        lease = self._announced[name] = _EmbeddedLease(lambda ended: self._gone(name, ended))
        if before is not None:
            before.end()
        self._watchers.present = {**self._watchers.present, name: value}
        self._watchers.notify()
        return lease

    def _gone(self, name: str, lease: _EmbeddedLease) -> None:
        if self._announced.get(name) is lease:
            del self._announced[name]
            self._watchers.present = {
                other: value for other, value in self._watchers.present.items() if other != name
            }
            self._watchers.notify()

    def present(self) -> Mapping[str, bytes]:
        return self._watchers.present

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        return await self._watchers.watch_present(known, wait_s)

    async def lead(self, name: str, lease_s: float, wait_s: float) -> CoordinatorLease | None:
        if not await self._watchers.wait(lambda: self._leading is None, wait_s):
            return None
        self._leading, self._watchers.leader = _EmbeddedLease(self._resigned), name
        self._watchers.notify()
        return self._leading

    def _resigned(self, lease: _EmbeddedLease) -> None:
        self._leading = self._watchers.leader = None
        self._watchers.notify()

    def leader(self) -> str | None:
        return self._watchers.leader

    async def close(self) -> None:
        if not self._watchers.closed:
            for lease in [*self._announced.values(), *([self._leading] if self._leading else [])]:
                lease.end()
            self._watchers.close()
            await self._kv.close()
