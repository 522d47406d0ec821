"""Waiting for locks at the metadata service, with one pending request per shard.

A lock request that cannot be granted gets a ticket; `turn` returns when it is time to request the lock again.
`turn` also returns when the state is unknown (the shard has restarted, or does not answer): the new lock
request finds out. Used by `vfs/locks`.
"""

from __future__ import annotations

import asyncio
import struct

from nvpool.client.rpc.meta_client import MetaClient
from nvpool.core.errors import NvpoolError
from nvpool.rpc.v1 import meta_pb2, wire_pb2

_AFTER_ERROR_S = 0.5


class _Waiting:
    """The waiters at one shard."""

    def __init__(self) -> None:
        self.turns: dict[int, tuple[int, asyncio.Future]] = {}  # ticket -> inode, future that ends the wait
        self.given_up: dict[int, int] = {}  # ticket -> inode
        self.changed = asyncio.Event()
        self.asking: asyncio.Task | None = None


class LockTurns:
    """The lock waiters of a client at all shards."""

    def __init__(self, meta: MetaClient) -> None:
        self._meta = meta
        self._shards: dict[int, _Waiting] = {}

    async def turn(self, inode: int, ticket: int) -> None:
        """Wait until the lock should be requested again, without a time limit.

        A caller that stops waiting for another reason must call `give_up`.
        """
        waiting = self._at(inode)
        notified = asyncio.get_running_loop().create_future()
        waiting.turns[ticket] = inode, notified
        self._query_again(waiting)
        try:
            await notified
        finally:
            waiting.turns.pop(ticket, None)

    def give_up(self, inode: int, ticket: int) -> None:
        """Give up a ticket, so that the next waiter can have its turn."""
        waiting = self._at(inode)
        waiting.given_up[ticket] = inode
        self._query_again(waiting)

    def _at(self, inode: int) -> _Waiting:
        return self._shards.setdefault(self._meta.shard_of(inode), _Waiting())

    def _query_again(self, waiting: _Waiting) -> None:
        waiting.changed.set()
        if waiting.asking is None or waiting.asking.done():
            waiting.asking = asyncio.create_task(self._ask(waiting))

    async def _ask(self, waiting: _Waiting) -> None:
        while waiting.turns or waiting.given_up:
            waiting.changed.clear()
            given_up = dict(waiting.given_up)
            tickets = [ticket for ticket in waiting.turns if ticket not in given_up]
            inode = next(iter(waiting.turns.values()))[0] if waiting.turns else next(iter(given_up.values()))
            request = meta_pb2.LockWaitRequest(tickets=_packed(tickets), given_up=_packed(given_up))
            question = asyncio.create_task(
                self._meta.ask(inode, wire_pb2.META_LOCK_WAIT, request, meta_pb2.LockWaitReply)
            )
            changed = asyncio.create_task(waiting.changed.wait())
            try:
                await asyncio.wait((question, changed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
                if not question.done():
                    question.cancel()  # one request at a time: the next one has all tickets again
            if not question.done():
                await asyncio.wait((question,))
            if question.cancelled():
                continue
            try:
                ready = _unpacked(question.result().tickets)
            except NvpoolError:
                await asyncio.sleep(_AFTER_ERROR_S)
                ready = tickets  # a new lock request gets the error, or another ticket
            for ticket in given_up:
                waiting.given_up.pop(ticket, None)
            for ticket in ready:
                found = waiting.turns.pop(ticket, None)
                if found is not None and not found[1].done():
                    found[1].set_result(None)

    def close(self) -> None:
        for waiting in self._shards.values():
            if waiting.asking is not None:
                waiting.asking.cancel()


def _packed(tickets) -> bytes:
    return struct.pack(f"<{len(tickets)}Q", *tickets)


def _unpacked(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) & -8])
