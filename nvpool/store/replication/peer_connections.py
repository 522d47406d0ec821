"""Connections of a chain member to the other stores, with write authorization and flow control.

The guarantee: requests in flight to one store never fill the amount of data that this store receives from us
at a time. Bytes and requests are bounded for each successor and each *hop* (the distance of the sender from
the head). A request on its last hop waits only for a drive, so it ends; then the requests one hop before it
end too. Without this bound, three stores that are each the head for the next could wait for one another
forever. This module never repeats a request: `store/replication/chain_writes` does.

`daemons/store` creates the connections through `store/server/service`. The user is `store/replication/chain_writes`,
on its event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from nvpool.core.clock import Clock
from nvpool.core.errors import (
    CorruptFrame,
    InvalidRequest,
    NvpoolError,
    Unavailable,
    Unreachable,
    WrongTarget,
)
from nvpool.core.grants import SERVICE, Grant, sign
from nvpool.core.ids import RequestId
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.poolmap.chains.protocol import Offer
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.api import Buffer
from nvpool.rpc.messages.peer_messages import PeerWriteReply, PeerWriteRequest
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE
from nvpool.security.volume_keys import VolumeKey

ON_WAY_BYTES = 20 << 20
"""Bytes in flight to one successor on one hop.

Three times this is less than the 64 MiB of one peer that a connection receives at a time.
"""
ON_WAY_MAX = 256
"""Requests in flight to one successor on one hop. Four times this is the limit of a connection."""
HOP_MAX = 2
"""Senders further from the head (joining targets, which are few) share one bound."""
CALL_S = 10.0
"""Timeout of an answer; then the request is repeated."""
SUSPECT_S = 2.0
"""Time without an answer after which store/replication/reachability probes the target."""
AUTHORITY_S = 600.0


Name = tuple[int, int]
"""Inode and index of a chunk."""


class Write:
    """One write to a chunk, as its client sent it."""

    __slots__ = (
        "table",
        "inode",
        "index",
        "offset",
        "buffer",
        "checksums",
        "cut",
        "request",
        "wrapped_key",
        "cipher",
    )

    def __init__(
        self,
        table: int,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        cut: int,
        request: RequestId,
        key: VolumeKey | None = None,
    ):
        """Create a write. `key` is the volume key if the volume is encrypted."""
        self.table = table
        self.inode = inode
        self.index = index
        self.offset = offset
        self.buffer = buffer
        self.checksums = checksums
        self.cut = cut
        self.request = request
        self.wrapped_key = b"" if key is None else key.wrapped
        self.cipher = None if key is None else key.cipher

    @property
    def name(self) -> Name:
        return self.inode, self.index


def peer_write(
    request: PeerWriteRequest, payload: memoryview, key: VolumeKey | None = None
) -> tuple[Offer, Write]:
    """Decode a peer write; `key` is the volume key for its wrapped key.

    InvalidRequest: the sizes make no sense. The store checks the checksums later.
    """
    length = len(payload)
    pieces = (request.offset + length + BLOCK_BYTES - 1) // BLOCK_BYTES - request.offset // BLOCK_BYTES
    if not length or request.offset + length > CHUNK_BYTES_MAX or len(request.checksums) != 4 * pieces:
        raise InvalidRequest(
            f"a peer write of {length} bytes at {request.offset} has checksums of {len(request.checksums)}"
        )
    name = RequestId(request.session, request.slot, request.sequence)
    return (
        Offer(
            request.sender,
            request.chain_epoch,
            request.version,
            request.base,
            request.cut,
            name,
            request.last,
        ),
        Write(
            request.table,
            request.inode,
            request.index,
            request.offset,
            payload,
            request.checksums,
            request.cut,
            name,
            key,
        ),
    )


OnDone = Callable[[PeerWriteReply | None, BaseException | None], None]


class PeerDialer(Protocol):
    def live(self, endpoints: tuple[str, ...]) -> Any: ...

    async def connect(self, endpoints: tuple[str, ...], deadline_s: float) -> Any: ...


class PendingForward:
    """A request that waits for its turn, is in flight, or has ended."""

    __slots__ = ("way", "request", "payload", "on_done", "connection", "number", "ended")

    def __init__(
        self, way: _SuccessorConnection, request: PeerWriteRequest, payload: Buffer, on_done: OnDone
    ) -> None:
        self.way = way
        self.request = request
        self.payload = payload
        self.on_done = on_done
        self.connection = None
        self.number = 0
        self.ended = False


class _SuccessorConnection:
    """Queue to one successor on one hop."""

    __slots__ = ("target", "waiting", "bytes", "count")

    def __init__(self, target: int) -> None:
        self.target = target
        self.waiting: deque[PendingForward] = deque()
        self.bytes = 0
        self.count = 0


class ReplicaPeers:
    def __init__(self, target: int, dialer: PeerDialer, clock: Clock, secret: bytes) -> None:
        self._target = target
        self._dialer = dialer
        self._clock = clock
        self._secret = secret
        self._map: PoolMap | None = None
        self._ways: dict[tuple[int, int], _SuccessorConnection] = {}
        self._process = int.from_bytes(clock.secret(4), "little")
        self._links: dict[int, tuple[object, int]] = {}
        self._tasks: set[asyncio.Task] = set()
        self._authority = b""
        self._authority_ends_ms = 0

    def use_map(self, pool_map: PoolMap) -> None:
        self._map = pool_map

    def write(
        self, to: int, hop: int, request: PeerWriteRequest, payload: Buffer, on_done: OnDone
    ) -> PendingForward:
        """Send a peer write when it is its turn.

        `on_done` is called once, in a later event-loop iteration, with the answer or the error, unless
        `give_up` is called before. The payload must not change until then.
        """
        way = self._ways.get((to, min(hop, HOP_MAX)))
        if way is None:
            way = self._ways[to, min(hop, HOP_MAX)] = _SuccessorConnection(to)
        sending = PendingForward(way, request, payload, on_done)
        way.waiting.append(sending)
        self._pump(way)
        return sending

    def try_reserve(
        self, to: int, hop: int, byte_count: int
    ) -> tuple[_SuccessorConnection, Any, int, bytes] | None:
        """Reserve a place for a request that the caller sends now; `release` gives the place back.

        Returns (place, connection, link, authority). None: the request has to wait, for a connection or for
        its turn; use `write`.
        """
        way = self._ways.get((to, min(hop, HOP_MAX)))
        if (
            way is None
            or way.waiting
            or way.count >= ON_WAY_MAX
            or (way.count and way.bytes + byte_count > ON_WAY_BYTES)
        ):
            return None
        target = self._map.target_by_id.get(to) if self._map is not None else None
        connection = self._dialer.live(target.endpoints) if target is not None else None
        known, number = self._links.get(to, (None, 0))
        if connection is None or connection is not known:
            return None
        way.count += 1
        way.bytes += byte_count
        return way, connection, self._process << 32 | number, self.authority()

    def release(self, way: _SuccessorConnection, byte_count: int) -> None:
        """Give back the place of a request that has ended."""
        way.count -= 1
        way.bytes -= byte_count
        if way.waiting:
            self._pump(way)

    def give_up(self, sending: PendingForward) -> None:
        """Stop waiting: `on_done` is not called any more. The request may have been carried out."""
        if sending.ended:
            return
        sending.ended = True
        if sending.number:
            sending.connection.give_up(sending.number)
        if sending in sending.way.waiting:
            sending.way.waiting.remove(sending)
        else:
            self.release(sending.way, len(sending.payload))

    def suspects(self) -> set[int]:
        """Return targets that may be unreachable.

        These have not answered a peer write for SUSPECT_S, or have a peer write but no connection.
        """
        before_s = self._clock.boottime_s() - SUSPECT_S
        found = set()
        for way in self._ways.values():
            if way.count:
                target = self._map.target_by_id.get(way.target)
                connection = self._dialer.live(target.endpoints) if target is not None else None
                if connection is None or connection.unanswered_since_s() < before_s:
                    found.add(way.target)
        return found

    def elsewhere(self, target: int) -> tuple[str, ...] | None:
        """Return the endpoints of a target on another node.

        None if the pool has no such target on another node.
        """
        known = self._map.target_by_id if self._map is not None else {}
        own, other = known.get(self._target), known.get(target)
        return (
            None
            if own is None or other is None or other.is_over or other.node == own.node
            else other.endpoints
        )

    def _pump(self, way: _SuccessorConnection) -> None:
        while (
            way.waiting
            and way.count < ON_WAY_MAX
            and (not way.count or way.bytes + len(way.waiting[0].payload) <= ON_WAY_BYTES)
        ):
            sending = way.waiting.popleft()
            way.count += 1
            way.bytes += len(sending.payload)
            target = self._map.target_by_id.get(way.target) if self._map is not None else None
            connection = self._dialer.live(target.endpoints) if target is not None else None
            if connection is None:
                task = asyncio.get_running_loop().create_task(self._connect_and_send(sending, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._send(sending, connection)

    async def _connect_and_send(self, sending: PendingForward, target) -> None:
        try:
            if target is None:
                raise WrongTarget(f"the pool map has no target {sending.way.target}")
            connection = await self._dialer.connect(target.endpoints, self._clock.boottime_s() + CALL_S)
        except NvpoolError as error:
            # Nothing was sent. An error of the dialer is not an answer of the other store to this write.
            self._ended(sending, None, error if isinstance(error, Unavailable) else Unreachable(str(error)))
            return
        except BaseException:
            self._ended(sending, None, Unreachable("the store is being closed"))
            raise
        if not sending.ended:
            self._send(sending, connection)

    def _send(self, sending: PendingForward, connection) -> None:
        request = sending.request
        known, number = self._links.get(sending.way.target, (None, 0))
        if known is not connection:
            number += 1
            self._links[sending.way.target] = connection, number
        request.link = self._process << 32 | number
        request.authority = self.authority()
        sending.connection = connection
        sending.number = connection.submit(
            DATA_PEER_WRITE,
            request.SerializeToString(),
            (sending.payload,),
            deadline_s=self._clock.boottime_s() + CALL_S,
            on_done=lambda reply, error: self._answered(sending, reply, error),
        )

    def _answered(self, sending: PendingForward, reply, error: BaseException | None) -> None:
        if error is None:
            try:
                answer = PeerWriteReply.FromString(bytes(reply.message))
            except DecodeError:
                answer, error = None, CorruptFrame("a store's answer to a peer write is none")
            self._ended(sending, answer, error)
        else:
            self._ended(sending, None, error)

    def _ended(
        self, sending: PendingForward, answer: PeerWriteReply | None, error: BaseException | None
    ) -> None:
        if sending.ended:
            return
        sending.ended = True
        sending.on_done(answer, error)
        self.release(sending.way, len(sending.payload))

    def authority(self) -> bytes:
        """Return a service grant over all inodes for the stores of this pool.

        The grant is renewed at half of its lifetime.
        """
        now_ms = self._clock.wall_ns() // 1_000_000
        if self._authority_ends_ms - now_ms < AUTHORITY_S * 500:
            self._authority_ends_ms = now_ms + int(AUTHORITY_S * 1000)
            self._authority = sign(
                Grant(SERVICE, 0, self._target, 0, 0, self._authority_ends_ms), self._secret
            )
        return self._authority

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
