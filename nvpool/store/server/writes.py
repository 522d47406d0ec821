"""Writes of a target: the requests of clients, and the offers of the previous members of chains.

A request has one write or several, which are applied in order. There is one way for all of them: `WriteBatch.go_on`
applies what need not wait; a chunk with several replicas is passed to `store/replication/chain_writes`, which notifies
the batch in the step in which the write is decided; every other wait is a task, `Writes._finish`. So a write that need
not wait has no task, alone or in a chain.

A request arrives as a call (`write`, `peer_write`), or as a frame that the reads of the target pass on (`answer`,
store/server/reads). A frame becomes a call too (rpc/transports/frame_call), which is answered with the other frames
of the receive buffer.

The serving lease is checked before a write is offered to another member, and before the reply to the client. Without
the first check a head that was replaced could still bring a write to members that do not know the newest map;
without the second a process that was stopped in between would acknowledge a write that the chain has left behind.

Made by `store/server/service`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from nvpool.core import grants, primitives
from nvpool.core.clock import Clock, SystemClock
from nvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NvpoolError,
    StaleGrant,
    StaleVersion,
    WrongTarget,
)
from nvpool.core.ids import RequestId
from nvpool.core.primitives import ByteReader, ByteWriter, RequestFrames
from nvpool.core.units import BLOCK_BYTES
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import IN_FLIGHT_MAX, Call
from nvpool.rpc.messages.peer_messages import PeerWriteReply, PeerWriteRequest
from nvpool.rpc.messages.read_write_codec import ALL_OF_BLOCKS
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transports.frame import SMALL_PAYLOAD_BYTES
from nvpool.rpc.transports.frame_call import FrameCall
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE, DATA_WRITE
from nvpool.security.volume_keys import VolumeKey
from nvpool.store.chunk_write import ChunkWrite, Placed
from nvpool.store.chunks.api import ChunkStore, MustWait
from nvpool.store.replication.peer_connections import peer_write
from nvpool.store.replication.role import Replica
from nvpool.store.server.io_stats import IoStats
from nvpool.store.server.map_state import MapState
from nvpool.store.server.request_limits import check_entries, check_grants
from nvpool.store.server.serving_lease import ServingLease
from nvpool.store.server.verified_grants import VerifiedGrants
from nvpool.store.server.waiting_calls import WaitingCalls

WRITE = struct.Struct("<QQQIIIHH")
BREATH_BYTES = 256 << 10
"""Bytes written for one call before other calls get a turn: a quarter of a millisecond.

A write counts as one block at least, since it costs as much."""
MESSAGE_MAX = 4096
"""Longest message that is taken from a frame: one write within two blocks, or some."""
_BREATH_BYTES, _MESSAGE_MAX, _PAYLOAD_MAX, _IN_FLIGHT_MAX = (
    BREATH_BYTES,
    MESSAGE_MAX,
    SMALL_PAYLOAD_BYTES,
    IN_FLIGHT_MAX,
)
_ENTRY_BYTES, _SINGLE_BYTES, _BLOCK_BYTES, _BLOCK_MASK = WRITE.size, 132, BLOCK_BYTES, BLOCK_BYTES - 1
_WRITE_METHOD, _PEER_METHOD = DATA_WRITE, DATA_PEER_WRITE
_WRITE_KEY: Any = DATA_WRITE
_PEER_KEY: Any = DATA_PEER_WRITE
_ALL_OF_BLOCKS, _MAY_WRITE, _SERVICE, _ENCRYPTED = (
    ALL_OF_BLOCKS,
    grants.WRITE,
    grants.SERVICE,
    grants.ENCRYPTED,
)
_DONE, _WAIT, _OFFER = 0, 1, 2
"""States of a batch: all is done; `until` has to be awaited; a write is to be offered to the chain."""
_in = ByteReader()
_out = ByteWriter()
_new_tuple = tuple.__new__


async def _breathe() -> None:
    await asyncio.sleep(0)


class WriteBatch:
    """Writes of one request and their progress.

    After a refused write to a chunk, the later writes of the batch to that chunk are refused for the same
    reason. So the applied writes to a chunk are always the first ones of the batch.
    """

    __slots__ = (
        "call",
        "epoch",
        "target",
        "rights",
        "session",
        "until",
        "write",
        "_service",
        "_payload",
        "_headers",
        "_checksums",
        "_wrapped_key",
        "_key",
        "_has_versions",
        "_grants",
        "_slot",
        "_count",
        "_number",
        "_begin",
        "_piece",
        "_pieces",
        "_is_decoded",
        "_inode",
        "_cut",
        "_sequence",
        "_index",
        "_offset",
        "_length",
        "_grant",
        "_flags",
        "_placed",
        "_placed_for",
        "_led_for",
        "_version",
        "_status",
        "_refused",
        "_results",
    )

    def begin(self, service: Writes, call: Call, message: bytes, payload: memoryview) -> None:
        """Decode the request. InvalidRequest: the message is none."""
        self._service, self.call, self._payload = service, call, payload
        self.until: Callable[[], Awaitable[Any]] | None = None
        self.write: ChunkWrite = None  # type: ignore[assignment]  # set before it is offered
        self._key: VolumeKey | None = None
        self._grants: list[grants.Grant | None] = []
        self._number = self._begin = self._piece = self._pieces = self._version = self._status = 0
        self._placed_for = self._led_for = -1
        self._placed: Placed | None = None
        self._is_decoded = False
        self._refused: dict[tuple[int, int], int] | None = None
        self._results: list[bytes] = []
        if not self._decode_single(message):
            self._decode(message)
        self._count = len(self._headers) // _ENTRY_BYTES

    def _decode_single(self, message: bytes) -> bool:
        """Decode a request with one grant and one write within a block, as read_write_codec packs it.

        False: the message is another one.
        """
        if len(message) != _SINGLE_BYTES:
            return False
        source = _in
        source.open(message)
        if source.u8() != 0x09:
            return False
        self.epoch = source.u64()
        if source.u8() != 0x10:
            return False
        self.target = source.u8()
        if source.u16() != 0x3C1A:
            return False
        self.rights = [source.raw(60)]
        if source.u16() != 0x2822:
            return False
        self._headers = source.raw(40)
        if source.u16() != 0x042A:
            return False
        self._checksums = source.raw(4)
        if source.u8() != 0x31:
            return False
        self.session = source.u64()
        if source.u8() != 0x38:
            return False
        self._slot = source.u8()
        self._wrapped_key, self._has_versions = b"", False
        return self.target < 128 and self._slot < 128

    def _decode(self, message: bytes) -> None:
        try:
            request = pb.WriteRequest.FromString(message)
        except DecodeError:
            raise InvalidRequest("not a WriteRequest") from None
        self.epoch, self.target, self.session = request.map_epoch, request.target, request.session
        self.rights, self._headers, self._checksums = list(request.grants), request.writes, request.checksums
        self._slot, self._wrapped_key, self._has_versions = (
            request.slot,
            request.wrapped_key,
            bool(request.versions),
        )

    def check_entries(self) -> None:
        """Check the number of writes; else InvalidRequest."""
        if len(self._headers) != _ENTRY_BYTES:
            check_entries("writes", self._headers, WRITE)

    @property
    def headers(self) -> list[tuple[int, ...]]:
        """Fields of all writes, as in WRITE."""
        return list(WRITE.iter_unpack(self._headers))

    def names(self) -> list[tuple[int, int]]:
        """Chunks of all writes."""
        return [(inode, index) for inode, _, _, index, *_ in WRITE.iter_unpack(self._headers)]

    def open(self, rights: list[grants.Grant | None]) -> None:
        """Take the grants, None for each that is not valid, and check the sizes of all writes.

        InvalidRequest: the writes, the payload and the checksums do not fit one another. KeyMissing: the store
        cannot unwrap the volume key.
        """
        self._grants = rights
        if self._has_versions:
            raise InvalidRequest("versions are given by the head of a chain to its successors")
        byte_count = piece_count = 0
        for number in range(self._count):
            self._decode_entry(number)
            byte_count += self._length
            piece_count += self._pieces
        if byte_count != len(self._payload) or piece_count << 2 != len(self._checksums):
            raise InvalidRequest(
                f"{len(self._payload)} bytes and {len(self._checksums)} of checksums came for writes of "
                f"{byte_count} and {piece_count << 2}"
            )
        self._is_decoded = self._count == 1
        if self._wrapped_key:
            self._key = self._service.volume_key(self._wrapped_key)

    def _decode_entry(self, number: int) -> None:
        source, at = _in, number * _ENTRY_BYTES
        source.open(self._headers if self._count == 1 else self._headers[at : at + _ENTRY_BYTES])
        self._inode = source.u64()
        self._cut = source.u64()
        self._sequence = source.u64()
        self._index = source.u32()
        self._offset = source.u32()
        self._length = source.u32()
        self._grant = source.u16()
        self._flags = source.u16()
        self._pieces = 0
        if self._length:
            self._pieces = (self._offset + self._length + _BLOCK_MASK >> 12) - (self._offset >> 12)
        self._is_decoded = True

    # -- progress ----------------------------------------------------------------------------------------------------

    def go_on(self) -> int:
        """Write as far as possible without waiting; return the state of the batch."""
        written = 0
        while self._number < self._count:
            if written > _BREATH_BYTES:
                self.until = _breathe
                return _WAIT
            if not self._is_decoded:
                self._decode_entry(self._number)
            status = version = 0
            try:
                state = self._step()
                if state != _DONE:
                    return state
                status, version = self._status, self._version
            except MustWait as wait:
                self.until = wait.until
                return _WAIT
            except NvpoolError as error:
                status = self._refuse(error)
            self.drop_placed()
            self._end_entry(status, version)
            written += max(self._length, _BLOCK_BYTES)
        return _DONE

    def _step(self) -> int:
        """Do the current write, or return what it needs first. Sets its status and its version."""
        service, replica = self._service, self._service.replica
        inode, index, number = self._inode, self._index, self._number
        self._status = 0
        if self._refused is not None:
            self._status = self._refused.get((inode, index), 0)
            if self._status:
                self._version = 0
                return _DONE
        table = self._check_grant()
        if self._led_for == number:
            return _DONE
        offset, length = self._offset, self._length
        if replica.losing.chains and replica.losing.check_write(
            table, inode, index, offset, length, self._flags & _ALL_OF_BLOCKS != 0
        ):
            self.until = self._discard
            return _WAIT
        is_shared = replica.shares and replica.is_shared(table, inode, index)
        buffer, checksums = self._payload, self._checksums
        if self._count != 1:
            buffer = buffer[self._begin : self._begin + length]
            checksums = checksums[self._piece * 4 : (self._piece + self._pieces) * 4]
        request: RequestId | None = None
        if self.session:
            request = _new_tuple(RequestId, (self.session, self._slot, self._sequence))
        if is_shared:
            if request is None:
                raise InvalidRequest("a write of a chunk with several replicas needs a name")
            table = table or 1
        write: ChunkWrite
        if self._key is None:
            write = ChunkWrite.__new__(ChunkWrite)
            write.begin(table, inode, index, offset, buffer, checksums, self._cut, request)
        else:
            write = ChunkWrite(table, inode, index, offset, buffer, checksums, self._cut, request, self._key)
        self.write = write
        if is_shared:
            return _OFFER
        if self._placed_for != number and service.writer.places_first(offset, length):
            self.until = self._stage
            return _WAIT
        self._version = replica.write_now(write, self._placed)
        return _DONE

    def _check_grant(self) -> int:
        """Return the chain table of the grant, 0 for none.

        StaleGrant: the grant does not allow this write. InvalidRequest: the volume key is missing, or one too many.
        """
        grant = self._grants[self._grant] if self._grant < len(self._grants) else None
        if grant is None:
            raise StaleGrant
        rights, cut, session = grant.rights, grant.cut, grant.session
        if rights & _SERVICE:
            return 0
        if (
            not rights & _MAY_WRITE
            or grant.inode != self._inode
            or self._cut > cut
            or (session != self.session and self.session)
        ):
            raise StaleGrant
        if (rights & _ENCRYPTED != 0) != (len(self._wrapped_key) != 0):
            raise InvalidRequest(
                "the write brings the key of a volume, and the file is in none that is encrypted"
                if self._wrapped_key
                else "the file is in an encrypted volume, and the write does not bring the volume's key"
            )
        table: int = grant.table
        return table

    def _refuse(self, error: NvpoolError) -> int:
        """Refuse the current write, and all later ones to its chunk; return the status."""
        if self._refused is None:
            self._refused = {}
        self._refused[self._inode, self._index] = error.wire_code
        return error.wire_code

    def _end_entry(self, status: int, version: int) -> None:
        """Record the result of the current write, and begin the next one."""
        _out.begin()
        _out.u32(status)
        _out.u32(0)
        _out.u64(version)
        self._results.append(_out.take())
        self._number += 1
        self._begin += self._length
        self._piece += self._pieces
        self._is_decoded = False

    def drop_placed(self) -> None:
        """Free the staged blocks, unless a write has named them."""
        if self._placed is not None:
            placed, self._placed = self._placed, None
            self._service.writer.drop_placed(placed)

    def refuse_rest(self, code: int) -> None:
        """Refuse all writes that are not done."""
        while self._number < self._count:
            self._end_entry(code, 0)

    def reply(self, epoch: int) -> bytes:
        """Encode the reply, as read_write_codec.encode_write_reply."""
        results = self._results[0] if self._count == 1 else b"".join(self._results)
        _out.begin()
        _out.u8(0x09)
        _out.u64(epoch)
        _out.blob(0x12, results)
        return _out.take()

    # -- waits -------------------------------------------------------------------------------------------------------

    def led(self, version: int) -> None:
        """Record that the current write is committed on every member of its chain."""
        self._led_for, self._version = self._number, version

    def ended(self, version: int) -> None:
        """Continue after the write that was offered; see Writes.offer_ended."""
        self._service.offer_ended(self, version)

    async def lead(self) -> None:
        """Write together with the other targets of the chunk."""
        try:
            self.led(await self._service.replica.lead(self.write, self.call.deadline_s))
        except NvpoolError as error:
            self._refuse(error)

    async def _discard(self) -> None:
        """Remove the local chunk, which is older than the reset of its chain."""
        losing, table = self._service.replica.losing, self._check_grant()
        inode, index, offset, length = self._inode, self._index, self._offset, self._length
        is_all = self._flags & _ALL_OF_BLOCKS != 0

        def is_older() -> bool:
            return losing.check_write(table, inode, index, offset, length, is_all)

        try:
            # Checked again at removal: another request may have written the chunk while this one waited.
            await self._service.store.discard(inode, index, is_older)
        except NvpoolError as error:
            self._refuse(error)

    async def _stage(self) -> None:
        self._placed_for = self._number
        try:
            self._placed = await self._service.writer.stage(self.write)
        except NvpoolError as error:
            self._refuse(error)


class Writes:
    """Write requests of one target. `replica`, `store`, `writer` and `volume_key` are for its batches."""

    def __init__(
        self,
        target: int,
        store: ChunkStore,
        replica: Replica,
        map_state: MapState,
        *,
        verified_grants: VerifiedGrants,
        callers: Callers,
        waiting: WaitingCalls,
        serving_lease: ServingLease,
        use: IoStats,
        clock: Clock,
        check_epoch: Callable[[int, Callable[[], Iterable[tuple[int, int]]]], None],
        is_node: Callable[[Call], bool],
        volume_key: Callable[[bytes], VolumeKey | None],
    ) -> None:
        """Create the writes of a target.

        `check_epoch(epoch, chunks)` raises StaleEpoch or Busy for a request with another map. `is_node` says whether a
        caller may use a grant of a service. `volume_key` unwraps the key of a request.
        """
        self.store, self.writer, self.replica = store, store.writer, replica
        self.volume_key = volume_key
        self._target, self._map_state = target, map_state
        self._verified_grants, self._callers, self._waiting = verified_grants, callers, waiting
        self._serving_lease, self._use, self._clock = serving_lease, use, clock
        self._check_epoch, self._is_node = check_epoch, is_node
        self._is_system = type(clock) is SystemClock
        self._frames = RequestFrames()
        self._peer: Any = None
        self._refused_methods: frozenset[int] = frozenset()

    # -- requests of clients -----------------------------------------------------------------------------------------

    def write(self, call: Call) -> None:
        """Answer a request to write, now or later. Errors are raised, or passed to `call.fail`."""
        message: Any = call.message
        payload: Any = call.payload
        work: WriteBatch = WriteBatch.__new__(WriteBatch)
        work.begin(
            self,
            call,
            message if type(message) is bytes else bytes(message),
            payload if type(payload) is memoryview else memoryview(payload),
        )
        if work.target != self._target:
            raise WrongTarget(f"this is target {self._target}, not {work.target}")
        work.check_entries()
        if work.epoch != self._map_state.epoch:
            self._check_epoch(work.epoch, work.names)
        rights = work.rights
        if len(rights) != 1:
            check_grants(rights)
        now_ms = (primitives.wall_ns() if self._is_system else self._clock.wall_ns()) // 1_000_000
        found: list[grants.Grant | None] = []
        for raw in rights:
            grant = self._verified_grants.grant(raw, now_ms)
            if grant is not None and grant.rights & _SERVICE and not self._is_node(call):
                grant = None
            found.append(grant)
        work.open(found)
        self._go_on(work)

    def _go_on(self, work: WriteBatch) -> None:
        """Continue a batch: answer it, offer its next write to the chain, or wait in a task."""
        state = work.go_on()
        if state == _DONE:
            self._answer(work)
        elif state == _WAIT or not self._offer(work):
            self._waiting.later(work.call, self._finish(work, state))

    def _offer(self, work: WriteBatch) -> bool:
        """Begin the chain write of a batch without a task; return whether it was begun."""
        call = work.call
        self._waiting.begin(call)
        is_begun = False
        try:
            is_begun = self.replica.try_submit(work.write, work.ended)
        finally:
            if not is_begun:
                self._waiting.withdraw(call)
        return is_begun

    def offer_ended(self, work: WriteBatch, version: int) -> None:
        """Continue a batch whose chain write is committed. Version 0: a task continues that write."""
        call = work.call
        if not self._waiting.end(call):
            return
        try:
            if not version:  # the repeated request waits for the write of the task, or makes it again
                self._waiting.later(call, self._finish(work, _OFFER))
                return
            work.led(version)
            if call.deadline_s < self._now_s():
                work.refuse_rest(DeadlineExceeded.wire_code)
                self._answer(work)
            elif not call.cancelled:  # else the client may have written again
                self._go_on(work)
        except Exception as error:  # the border: the transport distinguishes nvpool errors from bugs
            call.fail(error)

    async def _finish(self, work: WriteBatch, state: int) -> None:
        """Do a batch that has to wait, and answer it."""
        call = work.call
        try:
            while state != _DONE:
                if call.cancelled:
                    return
                if state == _OFFER:
                    await work.lead()
                elif work.until is not None:
                    await work.until()
                # The client gave up and may have written again: this write must not be applied after that
                # one.
                if call.cancelled:
                    return
                if call.deadline_s < self._now_s():
                    work.refuse_rest(DeadlineExceeded.wire_code)
                    break
                state = work.go_on()
        finally:
            work.drop_placed()
        self._answer(work)

    def _answer(self, work: WriteBatch) -> None:
        """Reply with the results of a batch. StaleTenure: the serving lease has ended."""
        if self._serving_lease.shared:
            self._serving_lease.check()
        call = work.call
        if self._use.on:
            self._use.wrote(call, work)
        call.reply(work.reply(self._map_state.epoch))

    def _now_s(self) -> float:
        return primitives.boottime_s() if self._is_system else self._clock.boottime_s()

    # -- offers of other members -------------------------------------------------------------------------------------

    def peer_write(self, call: Call) -> None:
        """Answer the offer of a write by the previous member of its chain, now or when the write is decided."""
        message: Any = call.message
        try:
            request = PeerWriteRequest.FromString(message if type(message) is bytes else bytes(message))
        except DecodeError:
            raise InvalidRequest("not a PeerWriteRequest") from None
        if request.target != self._target:
            raise WrongTarget(f"this is target {self._target}, not {request.target}")
        self._verified_grants.check_service(request.authority)
        try:
            key = self.volume_key(request.wrapped_key) if request.wrapped_key else None
            offer, write = peer_write(request, call.payload, key)
            version = self.replica.follow(offer, request.link, write, partial(self._peer_decided, call))
        except NvpoolError as error:
            self._refuse_peer(call, error)
            return
        if version:
            self._peer_committed(call, version)

    def _peer_decided(self, call: Call, outcome: int | Exception) -> None:
        if isinstance(outcome, Exception):
            self._refuse_peer(call, outcome)
        else:
            self._peer_committed(call, outcome)

    def _peer_committed(self, call: Call, version: int) -> None:
        reply: PeerWriteReply = PeerWriteReply.__new__(PeerWriteReply)
        reply.map_epoch, reply.status, reply.version = self._map_state.epoch, 0, version
        call.reply(reply.SerializeToString())

    def _refuse_peer(self, call: Call, error: Exception) -> None:
        if isinstance(error, StaleVersion):
            reply = PeerWriteReply(
                map_epoch=self._map_state.epoch, status=error.wire_code, version=error.version
            )
            call.reply(reply.SerializeToString())
        else:
            call.fail(error)

    # -- frames ------------------------------------------------------------------------------------------------------

    def answer(
        self,
        buffer: bytearray,
        at: int,
        end: int,
        in_work: dict[int, Any],
        reply_stats: ReplyStats,
        out: list[Any],
        side: Any,
    ) -> int:
        """Handle the request frame at `at` of the buffer, which has `end` valid bytes, as the service handles a call.

        Returns the number of bytes that the frame took; 0 if it is left to the connection: another method, an
        incomplete frame, a payload that does not fit the receive buffer, or no connection `side` to reply later. A
        reply that is made now is appended to `out`; otherwise the call is one of the requests in progress of `side`.
        """
        if side is None:
            return 0
        frames = self._frames
        message = frames.take(buffer, at, end, _MESSAGE_MAX, _PAYLOAD_MAX)
        if message is None:
            return 0
        method, number, frame_bytes = frames.method, frames.number, frames.frame_bytes
        if (method != _WRITE_METHOD and method != _PEER_METHOD) or not frames.deadline_ms:
            return 0
        if in_work and (len(in_work) >= _IN_FLIGHT_MAX or number in in_work):
            return 0
        key = _WRITE_KEY if method == _WRITE_METHOD else _PEER_KEY
        call: Any = FrameCall.__new__(FrameCall)
        now_s = self._now_s()
        call.begin(
            key,
            message,
            side,
            number,
            now_s,
            now_s + frames.deadline_ms / 1000,
            out,
            reply_stats,
            self._is_system,
            frames.payload,
        )
        try:
            if call.peer is not self._peer or key in self._refused_methods:
                caller = self._callers.check(call)
                self._peer, self._refused_methods = call.peer, caller.refused
            if method == _WRITE_METHOD:
                self.write(call)
            else:
                self.peer_write(call)
        except Exception as error:  # as in the multiplexer: the other replies of the burst are sent
            call.fail(error)
        call.keep()
        return frame_bytes
