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

from nvpool.core import primitives
from nvpool.core.clock import Clock, SystemClock
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
from nvpool.rpc.reply_receivers import ReplyBurst, ReplyReceiver
from nvpool.rpc.transports import request_submission
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE
from nvpool.security.volume_keys import VolumeKey
from nvpool.store.chunk_write import ChunkWrite

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


_ON_WAY_MAX, _ON_WAY_BYTES, _HOP_MAX, _CALL_S = ON_WAY_MAX, ON_WAY_BYTES, HOP_MAX, CALL_S
_RENEWED_MS, _LIFE_MS = int(AUTHORITY_S * 500), int(AUTHORITY_S * 1000)
_BLOCK_MASK, _CHUNK_BYTES, _SMALL_BYTES = BLOCK_BYTES - 1, CHUNK_BYTES_MAX, request_submission.PAYLOAD_MAX
_METHOD: Any = DATA_PEER_WRITE
_new_tuple = tuple.__new__
_BURST = ReplyBurst()
"""Burst without a continuation: the replies to clients have left."""


def peer_write(
    request: PeerWriteRequest, payload: memoryview, key: VolumeKey | None = None
) -> tuple[Offer, ChunkWrite]:
    """Decode a peer write; `key` is the volume key for its wrapped key.

    InvalidRequest: the sizes make no sense. The store checks the checksums later.
    """
    offset, length = request.offset, len(payload)
    pieces = (offset + length + _BLOCK_MASK >> 12) - (offset >> 12)
    if not length or offset + length > _CHUNK_BYTES or len(request.checksums) != 4 * pieces:
        raise InvalidRequest(
            f"a peer write of {length} bytes at {offset} has checksums of {len(request.checksums)}"
        )
    name: RequestId = _new_tuple(RequestId, (request.session, request.slot, request.sequence))
    fields = (
        request.sender,
        request.chain_epoch,
        request.version,
        request.base,
        request.cut,
        name,
        request.last,
    )
    checksums, cut = request.checksums, request.cut
    write: ChunkWrite
    if key is None:
        write = ChunkWrite.__new__(ChunkWrite)
        write.begin(request.table, request.inode, request.index, offset, payload, checksums, cut, name)
    else:
        write = ChunkWrite(
            request.table, request.inode, request.index, offset, payload, checksums, cut, name, key
        )
    return _new_tuple(Offer, fields), write


OnDone = Callable[[PeerWriteReply | None, BaseException | None], None]


class PeerDialer(Protocol):
    def live(self, endpoints: tuple[str, ...]) -> Any: ...

    async def connect(self, endpoints: tuple[str, ...], deadline_s: float) -> Any: ...


class PendingForward(ReplyReceiver):
    """A request that waits for its turn, is in flight, or has ended. It receives the reply itself."""

    __slots__ = ("way", "request", "payload", "on_done", "connection", "number", "ended", "_peers")

    def __init__(
        self,
        peers: ReplicaPeers,
        way: SuccessorQueue,
        request: PeerWriteRequest,
        payload: Buffer,
        on_done: OnDone,
    ) -> None:
        self._peers = peers
        self.way = way
        self.request = request
        self.payload = payload
        self.on_done = on_done
        self.connection: Any = None
        self.number = 0
        self.ended = False

    def receive(self, message: bytes) -> ReplyBurst | None:
        """Handle a successful reply from the receive buffer; see ReplyReceiver."""
        if self.ended:
            return None
        try:
            answer = PeerWriteReply.FromString(message)
        except DecodeError:
            return None  # `__call__` reports it
        self._peers.end(self, answer, None)
        return _BURST

    def __call__(self, reply: Any, error: BaseException | None) -> None:
        """Handle the reply, or the error of the connection."""
        answer = None
        if error is None:
            try:
                answer = PeerWriteReply.FromString(bytes(reply.message))
            except DecodeError:
                error = CorruptFrame("a store's answer to a peer write is none")
        self._peers.end(self, answer, error)

    def give_up(self) -> None:
        """Stop waiting: `on_done` is not called any more. The request may have been carried out."""
        self._peers.give_up(self)


class SuccessorQueue:
    """Queue to one successor on one hop."""

    __slots__ = ("target", "waiting", "byte_count", "count")

    def __init__(self, target: int) -> None:
        self.target = target
        self.waiting: deque[PendingForward] = deque()
        self.byte_count = 0
        self.count = 0


class ReplicaPeers:
    def __init__(self, target: int, dialer: PeerDialer, clock: Clock, secret: bytes) -> None:
        self._target = target
        self._dialer = dialer
        self._clock = clock
        self._is_system = type(clock) is SystemClock
        self._secret = secret
        self._map: PoolMap | None = None
        self._ways: dict[tuple[int, int], SuccessorQueue] = {}
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
        key = (to, min(hop, _HOP_MAX))
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = SuccessorQueue(to)
        sending = PendingForward(self, way, request, payload, on_done)
        if way.waiting or not self._has_room(way, len(payload)):
            way.waiting.append(sending)
        else:
            self._start(way, sending)
        return sending

    def _has_room(self, way: SuccessorQueue, byte_count: int) -> bool:
        """Whether a request of that size may be in flight now."""
        return way.count < _ON_WAY_MAX and (not way.count or way.byte_count + byte_count <= _ON_WAY_BYTES)

    def _release(self, way: SuccessorQueue, byte_count: int) -> None:
        """Give back the place of a request that has ended."""
        way.count -= 1
        way.byte_count -= byte_count
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
            self._release(sending.way, len(sending.payload))

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

    def _pump(self, way: SuccessorQueue) -> None:
        while way.waiting and self._has_room(way, len(way.waiting[0].payload)):
            self._start(way, way.waiting.popleft())

    def _start(self, way: SuccessorQueue, sending: PendingForward) -> None:
        """Send a request, or connect first."""
        way.count += 1
        way.byte_count += len(sending.payload)
        target = self._map.target_by_id.get(way.target) if self._map is not None else None
        connection = self._dialer.live(target.endpoints) if target is not None else None
        if connection is not None:
            self._send(sending, connection)
            return
        task = asyncio.get_running_loop().create_task(self._connect_and_send(sending, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_and_send(self, sending: PendingForward, target) -> None:
        try:
            if target is None:
                raise WrongTarget(f"the pool map has no target {sending.way.target}")
            connection = await self._dialer.connect(target.endpoints, self._clock.boottime_s() + CALL_S)
        except NvpoolError as error:
            # Nothing was sent. An error of the dialer is not an answer of the other store to this write.
            self.end(sending, None, error if isinstance(error, Unavailable) else Unreachable(str(error)))
            return
        except BaseException:
            self.end(sending, None, Unreachable("the store is being closed"))
            raise
        if not sending.ended:
            self._send(sending, connection)

    def _send(self, sending: PendingForward, connection) -> None:
        request = sending.request
        known, number = self._links.get(sending.way.target, (None, 0))
        if known is not connection:
            number = number + 1
            self._links[sending.way.target] = (connection, number)
        request.link = self._process << 32 | number
        request.authority = self.authority()
        sending.connection = connection
        now_s = primitives.boottime_s() if self._is_system else self._clock.boottime_s()
        message, payload = request.SerializeToString(), sending.payload
        if len(payload) <= _SMALL_BYTES:
            sending.number = request_submission.submit(
                connection, _METHOD, message, payload, now_s + _CALL_S, now_s, sending
            )
        else:
            sending.number = connection.submit(
                _METHOD, message, (payload,), deadline_s=now_s + _CALL_S, on_done=sending
            )

    def end(
        self, sending: PendingForward, answer: PeerWriteReply | None, error: BaseException | None
    ) -> None:
        """Pass the outcome of a request to its `on_done`, and its place to the next one."""
        if sending.ended:
            return
        sending.ended = True
        sending.on_done(answer, error)
        self._release(sending.way, len(sending.payload))

    def authority(self) -> bytes:
        """Return a service grant over all inodes for the stores of this pool.

        The grant is renewed at half of its lifetime.
        """
        now_ms = (primitives.wall_ns() if self._is_system else self._clock.wall_ns()) // 1_000_000
        if self._authority_ends_ms - now_ms < _RENEWED_MS:
            self._authority_ends_ms = now_ms + _LIFE_MS
            self._authority = sign(
                Grant(SERVICE, 0, self._target, 0, 0, self._authority_ends_ms), self._secret
            )
        return self._authority

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
