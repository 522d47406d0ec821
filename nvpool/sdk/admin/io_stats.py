"""I/O statistics of a pool: rates by client, volume or target.

The stores report the counters. Each poll queries every target in parallel and asks the store to keep counting
for a while. So a target that nobody polls counts nothing. The metadata shards supply the names of clients and
the volumes of inodes; known answers are cached. `nvpool top` uses this module.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from nvpool.client.pool_client import Client
from nvpool.core.errors import AccessDenied, NvpoolError
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2

ROW = struct.Struct("<QQQQdQQdQQ")
"""Format of one row of `UseReply.rows`."""
ANSWER_S = 2.0
COUNT_MORE_S = 5.0
"""Time that a target keeps counting after the next poll is due. A poll may be late."""
VOLUMES_ASKED_MAX = 256
"""Inodes, the busiest first, whose volume is looked up in one poll."""
KNOWN_MAX = 100_000
OTHERS = "(others)"

By = Literal["client", "volume", "target"]


class Rates(NamedTuple):
    """Rates per second of one client, volume or target. Latencies are means in seconds as the stores
    measure them, from the arrival of a request to its reply. Short-circuit reads bypass the stores: only
    their number and bytes are known, some seconds late."""

    name: str
    reads: float
    read_bytes: float
    read_s: float
    writes: float
    write_bytes: float
    write_s: float
    direct_reads: float
    direct_bytes: float

    @property
    def operations(self) -> float:
        return self.reads + self.writes + self.direct_reads

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes + self.direct_bytes


class IoRates(NamedTuple):
    rates: list[Rates]
    """Rates of each client, volume or target, the busiest first."""
    interval_s: float
    silent: list[int]
    """Targets that did not answer: their traffic is missing from `rates`."""


class _StoreCounters(NamedTuple):
    counting: int
    now_s: float
    rows: dict[tuple[int, int], tuple[float, ...]]


class UseWatch:
    def __init__(self, client: Client, by: By = "client") -> None:
        self._client = client
        self._by = by
        self._before: dict[int, _StoreCounters] = {}
        self._clients: dict[int, str] = {}
        self._volume_of: dict[int, int] = {}
        self._volumes: dict[int, str] = {}

    async def look(self, next_s: float) -> IoRates:
        """Poll all targets; return the rates since the last poll, none the first time. `next_s`: seconds
        until the next poll. AccessDenied: only nodes may see the traffic of all clients."""
        client = self._client
        await client.refresh_map()
        targets = [target for target in client.pool_map.targets if not target.is_over]
        answers = await asyncio.gather(
            *(self._ask(target.id, target.endpoints, next_s) for target in targets)
        )
        grown: dict[tuple[int, int, int], list[float]] = {}  # (target, session, inode) -> rates per second
        silent, intervals = [], []
        for target, counters in zip(targets, answers, strict=True):
            if counters is None:
                silent.append(target.id)
                self._before.pop(target.id, None)
                continue
            before, self._before[target.id] = self._before.get(target.id), counters
            if before is None or before.counting != counters.counting or counters.now_s <= before.now_s:
                continue
            took_s = counters.now_s - before.now_s
            intervals.append(took_s)
            for (session, inode), row in counters.rows.items():
                old = before.rows.get((session, inode), (0,) * 8)
                if row != old:
                    grown[target.id, session, inode] = [
                        (a - b) / took_s for a, b in zip(row, old, strict=True)
                    ]
        names = await self._names(grown)
        summed: dict[str, list[float]] = defaultdict(lambda: [0.0] * 8)
        for key, figures in grown.items():
            summed[names[key]] = [a + b for a, b in zip(summed[names[key]], figures, strict=True)]
        rates = [
            Rates(name, r, rb, rs / r if r else 0.0, w, wb, ws / w if w else 0.0, d, db)
            for name, (r, rb, rs, w, wb, ws, d, db) in summed.items()
        ]
        rates.sort(key=lambda one: (one.bytes, one.operations), reverse=True)
        return IoRates(rates, sum(intervals) / len(intervals) if intervals else 0.0, silent)

    async def _ask(self, target: int, endpoints: tuple[str, ...], next_s: float) -> _StoreCounters | None:
        request = data_pb2.UseRequest(target=target, for_s=next_s + COUNT_MORE_S)
        try:
            reply = decoded(
                data_pb2.UseReply,
                (
                    await self._client.dialer.call(
                        endpoints,
                        wire_pb2.DATA_USE,
                        request.SerializeToString(),
                        deadline_s=self._client.clock.boottime_s() + ANSWER_S,
                    )
                ).message,
            )
        except AccessDenied:
            raise
        except NvpoolError:
            return None
        rows = reply.rows[: len(reply.rows) - len(reply.rows) % ROW.size]
        return _StoreCounters(
            reply.counting, reply.now_s, {row[:2]: row[2:] for row in ROW.iter_unpack(rows)}
        )

    async def _names(self, grown: dict[tuple[int, int, int], list[float]]) -> dict[tuple[int, int, int], str]:
        if self._by == "target":
            return {key: self._target(key[0]) for key in grown}
        if self._by == "client":
            await self._ask_clients({session for _, session, _ in grown} - self._clients.keys() - {0})
            return {
                key: self._clients.get(key[1], f"session {key[1]:#x}") if key[1] else OTHERS for key in grown
            }
        busiest = sorted(grown, key=lambda key: -(grown[key][1] + grown[key][4] + grown[key][7]))
        await self._ask_volumes([inode for _, _, inode in busiest if inode])
        return {key: self._volume(key[2]) for key in grown}

    def _target(self, number: int) -> str:
        pool_map = self._client.pool_map
        target = pool_map.target_by_id.get(number)
        if target is None:
            return f"target {number}"
        drive = next((drive for drive in pool_map.drives if drive.id == target.drive), None)
        node = pool_map.node_by_id.get(target.node)
        return f"target {number} ({node.name if node else target.node}: {drive.path if drive else '?'})"

    async def _ask_clients(self, sessions: set[int]) -> None:
        """Learn the client names of these sessions. Partition moves bring sessions to other shards, so all
        shards are asked."""
        if not sessions:
            return
        if len(self._clients) > KNOWN_MAX:
            self._clients.clear()
        packed = struct.pack(f"<{len(sessions)}Q", *sessions)
        request = meta_pb2.SessionsRequest(sessions=packed[: 8 * 4096]).SerializeToString()

        async def ask(endpoints: tuple[str, ...]) -> None:
            try:
                reply = decoded(
                    meta_pb2.SessionsReply,
                    (
                        await self._client.dialer.call(
                            endpoints,
                            wire_pb2.META_SESSIONS,
                            request,
                            deadline_s=self._client.clock.boottime_s() + ANSWER_S,
                        )
                    ).message,
                )
            except NvpoolError:
                return  # the session's number is shown, and the next poll asks again
            for owner in reply.owners:
                self._clients[owner.session] = owner.client

        await asyncio.gather(*(ask(shard.endpoints) for shard in self._client.pool_map.shards))

    async def _ask_volumes(self, inodes: Iterable[int]) -> None:
        wanted = list(dict.fromkeys(inode for inode in inodes if inode not in self._volume_of))[
            :VOLUMES_ASKED_MAX
        ]
        if len(self._volume_of) > KNOWN_MAX:
            self._volume_of.clear()

        async def ask(inode: int) -> None:
            try:
                entry = await self._client.vfs.meta.ask(
                    inode, wire_pb2.META_GETATTR, meta_pb2.GetAttrRequest(inode=inode), meta_pb2.Entry
                )
                self._volume_of[inode] = entry.attr.volume
            except NvpoolError:
                pass  # the inode is deleted, so it belongs to no volume

        await asyncio.gather(*map(ask, wanted))
        if any(volume and volume not in self._volumes for volume in self._volume_of.values()):
            try:
                replies = await self._client.vfs.ask_all(
                    wire_pb2.META_VOLUMES, meta_pb2.VolumesReply, meta_pb2.VolumesRequest
                )
                self._volumes = {volume.inode: volume.name for reply in replies for volume in reply.volumes}
            except NvpoolError:
                pass  # the volumes' numbers are shown, and the next poll asks again

    def _volume(self, inode: int) -> str:
        volume = self._volume_of.get(inode)
        if not inode or volume is None:
            return OTHERS
        return self._volumes.get(volume, f"volume {volume}") if volume else "(no volume)"
