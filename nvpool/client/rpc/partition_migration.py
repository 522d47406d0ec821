"""Client side of partition migration: moves the client's state to the new shard.

Open files are reported to the new shard. Leases on both sides end, also those that replies in flight would
start. Locks need no work, because the shards treat all sessions of one client as one. A change without a
reply is retried at the shard to which it was sent first (`MetaClient.change`): only that shard knows whether
the change was executed. The session at a shard without partitions is closed. Made by the metadata client,
called with each newer map; never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from nvpool.client.rpc.deferred_close import RENEW_INODES_MAX
from nvpool.client.rpc.slot_journal import SlotJournal
from nvpool.client.state.leases import Leases
from nvpool.client.state.shard_session import ShardSession
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError
from nvpool.core.ids import partition_of
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partition_moves import is_empty
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import meta_pb2, wire_pb2

LEAVE_S = 60.0
"""Time for a shard without partitions to answer changes in flight, before the session is closed."""
LOOK_S = 0.1


class SessionOwner(Protocol):
    """Interface of the metadata client that a change of owners uses."""

    @property
    def leases(self) -> Leases:
        """Leases of the client on inodes."""

    @property
    def once(self) -> SlotJournal | None:
        """Records of changes in the mount state; None without mount state."""

    async def ensure_session(self, state: ShardSession, deadline_s: float) -> None:
        """Open a session if there is none. On return all open files have been reported in it."""

    async def ask_shard(self, shard: int, method: int, request: Any, reply_type: Any) -> Any:
        """Send a query to the shard itself; return the reply."""

    def notify_opens_reported(self, inodes: list[int]) -> None:
        """Notify the other parts of the client that the shard knows the opens of these inodes now."""

    def release_at(self, state: ShardSession, inodes: list[int]) -> None:
        """Report these closes soon and in a batch."""


class PartitionOwners:
    """The partitions' owners, and the client's work when they change."""

    def __init__(
        self,
        meta: SessionOwner,
        pool_map: PoolMap,
        shards: dict[int, ShardSession],
        clock: Clock,
        deadline_s: float,
        state_of: Callable[[int], ShardSession],
    ) -> None:
        """`shards`: the metadata client's sessions, by shard; `state_of(shard)` makes a missing one."""
        self._meta = meta
        self._state_of = state_of
        self._owners = pool_map.shard_of_partition
        self._shards = shards
        self._clock = clock
        self._deadline_s = deadline_s
        self._tasks: set[asyncio.Task] = set()
        self._leaving: set[int] = set()
        self.count = 0
        """Number of partition moves that were seen."""

    def use_map(self, pool_map: PoolMap) -> None:
        before, now = self._owners, pool_map.shard_of_partition
        self._owners = now
        if before != now:
            moved = {
                partition: new
                for partition, (old, new) in enumerate(zip(before, now, strict=True))
                if old != new
            }
            self.count += len(moved)
            for state in list(self._shards.values()):
                self._carry(state, moved)
        for number, state in list(self._shards.items()):
            if number not in pool_map.shard_by_id:
                self._forget(state)
            elif state.session and is_empty(pool_map, number) and number not in self._leaving:
                self._leaving.add(number)
                self._behind(self._say_goodbye(state))

    def _carry(self, state: ShardSession, moved: dict[int, int]) -> None:
        for inode in [
            inode for inode in state.open if moved.get(partition_of(inode), state.shard) != state.shard
        ]:
            other = self._state_of(moved[partition_of(inode)])
            count = state.open.pop(inode)
            state.unreported.pop(inode, None)
            other.open[inode] = other.open.get(inode, 0) + count
            other.arrived[inode] = other.arrived.get(inode, 0) + count
            if other.naming is None or other.naming.done():
                other.naming = self._behind(self._name_arrived(other))
        for inode in [
            inode for inode in state.released if moved.get(partition_of(inode), state.shard) != state.shard
        ]:
            state.released.remove(inode)
            other = self._state_of(moved[partition_of(inode)])
            if other.session:  # else the shard learns from a renewal that the file is not open
                self._meta.release_at(other, [inode])
        self._meta.leases.end_all(state.watch)  # replies to requests sent before now start no lease

    async def _name_arrived(self, state: ShardSession) -> None:
        while state.arrived:
            arrived, state.arrived = state.arrived, {}
            try:
                await self._name(state, [inode for inode, count in arrived.items() for _ in range(count)])
            except NvpoolError:
                for inode, count in arrived.items():
                    if inode in state.open:
                        state.arrived[inode] = state.arrived.get(inode, 0) + count
                await asyncio.sleep(LOOK_S)

    async def _name(self, state: ShardSession, inodes: list[int]) -> None:
        """Report open files of moved partitions to their new shard."""
        if not state.session:
            await self._meta.ensure_session(state, self._clock.boottime_s() + self._deadline_s)
        else:
            for begin in range(0, len(inodes), RENEW_INODES_MAX):
                request = meta_pb2.RenewSessionRequest(
                    opened=read_write_codec.pack_inodes(inodes[begin : begin + RENEW_INODES_MAX]),
                    named=begin + RENEW_INODES_MAX >= len(inodes),
                )
                await self._meta.ask_shard(
                    state.shard, wire_pb2.META_RENEW_SESSION, request, meta_pb2.RenewSessionReply
                )
        self._meta.notify_opens_reported(inodes)

    async def _say_goodbye(self, state: ShardSession) -> None:
        try:
            until_s = self._clock.boottime_s() + LEAVE_S
            while state.in_use and self._clock.boottime_s() < until_s:  # noqa: ASYNC110  (slots, no event)
                await asyncio.sleep(LOOK_S)
            if not any(shard == state.shard for shard in self._owners):
                await self._meta.ask_shard(
                    state.shard,
                    wire_pb2.META_CLOSE_SESSION,
                    meta_pb2.CloseSessionRequest(),
                    meta_pb2.CloseSessionReply,
                )
                self._forget(state)
        except NvpoolError:
            pass  # the session expires by itself
        finally:
            self._leaving.discard(state.shard)

    def _forget(self, state: ShardSession) -> None:
        """End the session here: no request uses it any more."""
        for task in (state.renewal, state.releasing, state.watching, state.reporting, state.meeting):
            if task is not None:
                task.cancel()
        state.session = 0
        state.generation += 1
        state.slots.clear()
        if self._meta.once is not None:
            self._meta.once.lost(state.shard)
        self._meta.leases.end_all(state.watch)
        state.wake_all()

    def _behind(self, work) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
