"""Source of a partition migration: gives partitions to another shard while they are served.

The goals in the pool map say which partitions move; they move some at a time:

    copying   the records go to the destination in bounded messages, then the records that have changed since,
              until few are left; meanwhile leases on their inodes are ended, and none is given
    closed    for a moment nobody reads or changes the partitions: the last changes go, then the sessions with
              open files or locks, and the bound of the inode numbers; the destination makes all of it
              durable. All earlier changes here are made durable too: no half of a rename out of them may be
              lost
    asked     the pool map's coordinator makes the destination their owner, or says that it did not. Until the
              answer is known the partitions stay closed

Only the map says who owns them. Before it changes, everything may be dropped and started again, by this
process or the next; after it the destination has all records. The next process of this shard serves in a
later term, in which requests of this one are refused. The records of partitions that were given away are
removed afterwards, in steps.

Owned by `meta/server/service`; `meta/migration/service` supplies `send` and `ask_moved`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence

from nvpool.core.errors import Busy, Fenced, NvpoolError, StaleEpoch, StaleTerm
from nvpool.kv.journal_record import encode
from nvpool.meta.migration.cleanup import PartitionCleanup
from nvpool.meta.migration.sessions import sessions_to_move
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.state.records import INODE, SHARD, prefix
from nvpool.poolmap.model import PoolMap, encode_map
from nvpool.poolmap.shards.partition_moves import next_batch
from nvpool.rpc.v1.moving_pb2 import MoveReply, MoveRequest

MESSAGE_KEYS, MESSAGE_BYTES = 500, 256 * 1024
"""Limits of one message: some milliseconds of the event loop of either shard."""
CLOSE_KEYS = 500
"""Changes that may be left when the partitions are closed: they fit into one message."""
DIRTY_MAX = 200_000
"""Limit of changes not copied yet. Beyond it the copying is given up, and started again when fewer records
change."""
ROUNDS_MAX = 400
QUIET_S = 0.25
"""Limit for truncations and cross-shard transactions in closed partitions to end. After it the partitions are
reopened."""
CLOSED_S = 0.75
"""Limit for the last messages and the destination's sync; after it the partitions are reopened."""
SESSIONS_BYTES = 256 * 1024
RETRY_S, RETRY_S_MAX = 0.05, 0.5
PAUSE_S = 0.5
"""Pause after a failed migration."""

log = logging.getLogger(__name__)

Send = Callable[[int, MoveRequest, bytes], Awaitable[MoveReply]]
AskMoved = Callable[[int, Sequence[int], int], Awaitable[PoolMap]]


class MigrationSource:
    """Source side of migrations; one runs at a time."""

    def __init__(
        self, inside: ShardContext, leaving: PartitionCleanup, *, send: Send, ask_moved: AskMoved, term: int
    ) -> None:
        """`send(destination, request, payload)` returns the destination's reply.

        `ask_moved(destination, partitions, epoch)` asks for the partitions to become the destination's, in a
        migration that started in that epoch. It returns the newest map, whether that agrees or not.
        StaleTerm: we are not the shard's primary any more.
        """
        self._inside = inside
        self._leaving = leaving
        self.term = term
        """Term in which this process serves; 0: the term in the first map."""
        self._send = send
        self._ask_moved = ask_moved
        self._map: PoolMap | None = None
        self._woken = asyncio.Event()
        self._attempt = 0
        self._moving: frozenset[int] = frozenset()
        self._dirty: dict[bytes, None] = {}
        self.given = 0

    def use_map(self, pool_map: PoolMap) -> None:
        self._map = pool_map
        if not self.term and self._inside.shard in pool_map.shard_by_id:
            self.term = pool_map.shard_by_id[self._inside.shard].term
        if pool_map.moves or self._leaving.waiting:
            self._woken.set()

    async def run(self) -> None:
        """Migrate partitions as the map says, and remove those that have left, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                while await self.run_once():
                    pass
            except Fenced:
                raise
            except NvpoolError as error:
                log.info("partitions are not handed over yet: %s", error)
                await asyncio.sleep(max(PAUSE_S, error.retry_after_s))
                self._woken.set()

    async def run_once(self) -> bool:
        """Remove partitions that have left, and migrate the next ones; return whether there were any.

        Raises the errors of the destination and of the pool map's coordinator; the partitions are then served
        as before.
        """
        await self._leaving.run_once()
        pool_map = self._map
        if pool_map is None or pool_map.moving.paused:
            return False
        destination, partitions = next_batch(pool_map, self._inside.shard)
        if not destination:
            return False
        await self._give(pool_map, destination, partitions)
        return True

    async def _give(self, pool_map: PoolMap, destination: int, partitions: tuple[int, ...]) -> None:
        inside = self._inside
        self._attempt += 1
        self._moving, self._dirty = frozenset(partitions), {}
        message = _Messages(destination, inside.shard, self.term, self._attempt, self._send)
        inside.kv.on_apply = self._note
        asked = moved = False
        try:
            await message.send(MoveRequest.BEGIN, map_=pool_map, partitions=partitions)
            for pairs in self._pages(partitions):
                size = await self._fill(message, pairs)
                if pool_map.moving.limit_bytes_s:
                    await asyncio.sleep(size / pool_map.moving.limit_bytes_s)
                self._check_goal(destination, partitions)
            await inside.watches.withdraw(partitions)
            await self._catch_up(message)
            inside.ranges.close(partitions)
            closed_s = inside.clock.boottime_s()
            async with asyncio.timeout(QUIET_S):
                await inside.quiet(self._moving)
            async with asyncio.timeout(CLOSED_S):
                await inside.kv.sync()
                while self._dirty:
                    await self._fill(message, [])
                await self._send_rest(message)
            asked = True
            moved = await self._until_known(destination, partitions, pool_map.epoch)
            asked = False
        except TimeoutError:
            raise Busy(
                "the partitions do not come to rest, or the destination is slow", retry_after_s=1.0
            ) from None
        finally:
            inside.kv.on_apply = None
            self._moving, self._dirty = frozenset(), {}
            if not asked:  # otherwise they stay closed: their owner is unknown, and this process ends
                inside.ranges.open(partitions)
                inside.watches.restore(partitions)
        if moved:
            self.given += len(partitions)
            log.info(
                "%d partitions from %d on were handed over to shard %d, closed for %.0f ms",
                len(partitions),
                partitions[0],
                destination,
                1000 * (inside.clock.boottime_s() - closed_s),
            )
        else:
            raise StaleEpoch("the partitions are not to be handed over any more")

    # -- copying -----------------------------------------------------------------------------------------------------

    def _note(self, changed: dict[bytes, bytes | None]) -> None:
        moving, dirty = self._moving, self._dirty
        for key in changed:
            head = key[0] << 8 | key[1]
            if head < SHARD and head >> 3 in moving:
                dirty[key] = None

    def _pages(self, partitions: tuple[int, ...]) -> Iterator[list[tuple[bytes, bytes]]]:
        """All records of the partitions, each page as it is when read."""
        place = 0
        while place < len(partitions):
            run = place + 1
            while run < len(partitions) and partitions[run] == partitions[run - 1] + 1:
                run += 1
            first, end = prefix(partitions[place], INODE), prefix(partitions[run - 1] + 1, INODE)
            place = run
            while pairs := _bounded(self._inside.kv.scan(first, end, MESSAGE_KEYS)):
                first = pairs[-1][0] + b"\0"
                yield pairs

    async def _fill(self, message: _Messages, pairs: list[tuple[bytes, bytes]]) -> int:
        """Send the pairs, which were read just now, and some changed records with their present values."""
        changes: dict[bytes, bytes | None] = {}
        size = 0
        for key in list(self._dirty):
            del self._dirty[key]
            value = changes[key] = self._inside.kv.get(key)
            size += len(key) + len(value or b"")
            if len(changes) >= MESSAGE_KEYS or size >= MESSAGE_BYTES:
                break
        changes.update(pairs)
        payload = encode(0, 0, 0, changes)
        await message.send(MoveRequest.FILL, payload=payload)
        return len(payload)

    async def _catch_up(self, message: _Messages) -> None:
        rounds = 0
        while len(self._dirty) > CLOSE_KEYS:
            rounds += 1
            if rounds > ROUNDS_MAX or len(self._dirty) > DIRTY_MAX:
                raise Busy("the partitions are changed faster than they can be copied", retry_after_s=5.0)
            await self._fill(message, [])

    def _check_goal(self, destination: int, partitions: tuple[int, ...]) -> None:
        now = self._map
        if len(self._dirty) > DIRTY_MAX:
            raise Busy("the partitions are changed faster than they can be copied", retry_after_s=5.0)
        if now.moving.paused or next_batch(now, self._inside.shard, count_max=1) != (
            destination,
            partitions[:1],
        ):
            raise StaleEpoch("the partitions are not to be handed over any more")

    # -- handing over --------------------------------------------------------------------------------------------------

    async def _send_rest(self, message: _Messages) -> None:
        inside = self._inside
        moved, size = [], 0
        for session in sessions_to_move(inside, self._moving):
            moved.append(session)
            size += session.ByteSize()
            if size >= SESSIONS_BYTES:
                await message.send(MoveRequest.FILL, sessions=moved)
                moved, size = [], 0
        await message.send(
            MoveRequest.END,
            sessions=moved,
            inode_bound=inside.numbers.bounds.inode,
            orphans_wait_ms=int(1000 * inside.collector.waits_s(self._moving)),
        )

    async def _until_known(self, destination: int, partitions: tuple[int, ...], epoch: int) -> bool:
        """Whether the destination owns the partitions now. Fenced: this cannot be known in this term."""
        tries = 0
        while True:
            try:
                new = await self._ask_moved(destination, partitions, epoch)
                break
            except StaleTerm as error:
                raise Fenced(f"the partitions may be another shard's by now: {error}") from None
            except NvpoolError as error:
                tries += 1
                log.info(
                    "whether %d partitions are shard %d's now is not known: %s",
                    len(partitions),
                    destination,
                    error,
                )
                await asyncio.sleep(min(RETRY_S_MAX, RETRY_S * 2 ** min(tries, 8)))
        self._inside.use_map(new)
        if all(new.shard_of_partition[partition] != self._inside.shard for partition in partitions):
            return True
        if tries:
            # An earlier request may still be carried out, but not in a later term, with which the next
            # process starts.
            raise Fenced("whether the partitions are another shard's cannot be known in this term")
        return False


class _Messages:
    """Numbered messages of one migration attempt."""

    def __init__(self, destination: int, source: int, term: int, attempt: int, send: Send) -> None:
        self._destination = destination
        self._send = send
        self._source, self._term, self._attempt, self._number = source, term, attempt, 0

    async def send(
        self,
        step: int,
        *,
        payload: bytes = b"",
        map_: PoolMap | None = None,
        partitions: Sequence[int] = (),
        **fields,
    ) -> MoveReply:
        request = MoveRequest(
            source=self._source,
            destination=self._destination,
            term=self._term,
            attempt=self._attempt,
            number=self._number,
            step=step,
            partitions=packed(partitions),
            **fields,
        )
        if map_ is not None:
            request.map = encode_map(map_)
        reply = await self._send(self._destination, request, payload)
        self._number += 1
        return reply


def packed(partitions: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(partitions)}H", *partitions)


def _bounded(pairs: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    size = 0
    for count, (key, value) in enumerate(pairs, 1):
        size += len(key) + len(value)
        if size >= MESSAGE_BYTES:
            return pairs[:count]
    return pairs
