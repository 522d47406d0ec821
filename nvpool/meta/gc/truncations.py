"""Truncations and holes: make every target remove the bytes, then delete the intent.

Each target that may have such bytes is notified again and again until it has cut them. The truncation is
durable before the first target is notified. So no target removes bytes that a power loss would bring back
into the file. The client is answered, and new grants are given, when all targets have done it. After a
restart the intents in the records are finished. Owned by `meta/server/service`, which spawns the tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from google.protobuf.message import DecodeError

from nvpool.core.errors import CorruptRecord, NvpoolError
from nvpool.kv.api import Effect, Kv
from nvpool.meta.state import records
from nvpool.meta.state.records import Intent
from nvpool.meta.state.transaction import View
from nvpool.meta.store_client import Targets
from nvpool.rpc.v1 import data_pb2, wire_pb2

_log = logging.getLogger(__name__)

PAUSE_S, PAUSE_S_MAX = 0.02, 1.0
"""Pauses between two attempts at a target that does not answer."""


class Truncations:
    """Truncations in progress. `view.cutting` maps inode -> future that is done when all targets have cut."""

    def __init__(
        self, kv: Kv, view: View, targets: Targets, spawn: Callable[[Coroutine], asyncio.Task]
    ) -> None:
        self._kv = kv
        self._view = view
        self._targets = targets
        self._spawn = spawn

    def begin(self, inode: int, intent: Intent) -> asyncio.Future:
        """Carry out an intent that is applied.

        The future never fails; it is cancelled when the service closes.
        """
        done = self._view.cutting[inode] = asyncio.get_running_loop().create_future()
        self._spawn(self._finish(inode, intent, done))
        return done

    def resume(self, partitions: list[int]) -> None:
        """Find the intents that a restart left in these partitions, and carry them out."""
        for partition in partitions:
            first, end = (
                records.prefix(partition, records.INTENT),
                records.prefix(partition, records.INTENT + 1),
            )
            while pairs := self._kv.scan(first, end, 1000):
                for key, raw in pairs:
                    inode = records.inode_of_key(key)
                    try:
                        intent = records.decode_intent(raw)
                    except NvpoolError as error:
                        _log.error("the intent of inode %d is damaged, run fsck: %s", inode, error)
                        continue
                    self.begin(inode, intent)
                first = pairs[-1][0] + b"\0"

    async def _finish(self, inode: int, intent: Intent, done: asyncio.Future) -> None:
        try:
            await self._kv.sync()
            request = data_pb2.CutRequest(
                inode=inode,
                size=intent.size,
                cut=intent.cut,
                chunk_bits=intent.chunk_bits,
                end=intent.end,
                wrapped_key=self._wrapped_key(inode),
            )
            freed = await self._notify_targets(inode, intent, request)
            while self._kv.full:
                await self._kv.room()
            effects: list[Effect] = [(records.numbered_key(records.INTENT, inode), None)]
            if intent.end and freed:
                effects += self._without_blocks(inode, freed // 512)
            self._kv.apply(effects, reclaims=True)
            del self._view.cutting[inode]
            done.set_result(None)
        finally:
            # no effect if it is done; a waiter must never believe that the targets have cut before they have
            done.cancel()

    def _wrapped_key(self, inode: int) -> bytes:
        """Wrapped key of the inode's volume; empty if the inode is in no encrypted volume.

        A removed volume has no key any more; then nobody reads the rest of the truncated block again.
        """
        if not self._view.access.encrypted:
            return b""
        raw = self._kv.get(records.inode_key(inode))
        try:
            found = records.decode_inode(inode, raw) if raw is not None else None
        except CorruptRecord:
            return b""
        return self._view.access.encrypted.get(found.volume, b"") if found is not None else b""

    def _without_blocks(self, inode: int, blocks: int) -> list[Effect]:
        """Subtract the freed blocks of a hole from the inode's block count.

        The count is an estimate, so no client is notified of the change. The record is read from the engine,
        not through the view, which refuses locked or closed records: a migration waits for us, and changes
        that a cross-shard transaction makes meanwhile are included.
        """
        key = records.inode_key(inode)
        raw = self._kv.get(key)
        try:
            found = records.decode_inode(inode, raw) if raw is not None else None
        except CorruptRecord:
            found = None
        if found is None:
            return []  # deleted or damaged since then: nobody needs the count
        found.blocks = max(0, found.blocks - blocks)
        return [(key, records.encode_inode(found))]

    async def _notify_targets(self, inode: int, intent: Intent, request: data_pb2.CutRequest) -> int:
        """Notify all targets; return the bytes that they have freed, as far as their replies arrived.

        A target that catches up may have copied bytes from a target that had not cut yet, after it had cut
        itself, perhaps in an earlier life. So a target that was notified under a map older than the last
        change of its chains is notified again, and a target that is catching up once more after all the
        others.
        """
        first: dict[int, int] = {}  # target -> round in which it has cut first
        truncated: dict[int, tuple[int, int]] = {}  # target -> round of its last cut, and its map epoch then
        pause, number, freed, targets = PAUSE_S, 0, 0, self._targets
        last = (intent.end - 1 >> intent.chunk_bits) + 1
        while True:
            if intent.end:
                wanted = await targets.of_chunks(
                    intent.table, inode, range(intent.size >> intent.chunk_bits, last)
                )
            else:
                wanted = await targets.of_table(intent.table)
            left = {
                target
                for target in wanted
                if target not in truncated or truncated[target][1] < targets.changed_at(target)
            }
            if not left and wanted:
                latest = max(first[target] for target in wanted)
                left = {
                    target
                    for target in wanted & targets.joining(intent.table)
                    if truncated[target][0] <= latest
                }
            newest = max((epoch for _, epoch in truncated.values()), default=0)
            if not left and newest <= targets.epoch:
                return freed
            number += 1
            answers: dict[int, bytes] = {}
            epoch = targets.epoch
            failed = await targets.broadcast(left, wire_pb2.DATA_CUT, request, answers)
            for target, answer in answers.items():
                its_epoch, bytes_ = _answered(answer)
                freed += bytes_
                first.setdefault(target, number)
                truncated[target] = number, its_epoch or epoch
            if (
                failed
                or not left
                or any(truncated[target][1] < targets.changed_at(target) for target in answers)
            ):
                if failed:
                    level = logging.WARNING if pause == PAUSE_S_MAX else logging.DEBUG
                    _log.log(
                        level,
                        "inode %d is not cut yet by targets %s: %s",
                        inode,
                        sorted(failed),
                        next(iter(failed.values())),
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_S_MAX)


def _answered(answer: bytes) -> tuple[int, int]:
    """Contents of a CutReply: epoch of the target's map (0: unknown) and freed bytes by its estimate."""
    try:
        reply = data_pb2.CutReply.FromString(answer)
    except DecodeError:
        return 0, 0
    return reply.map_epoch, reply.bytes
