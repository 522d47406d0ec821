"""Minimal chunk store service: chunks in a dict, replies as data.proto specifies, faults on request.

For tests of clients: a fault happens exactly when the test requests it. The service checks what a store
checks of a client (grants, truncate numbers, checksums, slots) and nothing else, because it has no drive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.checksum import block_checksums, piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    ChecksumMismatch,
    Disconnected,
    NotSupported,
    NvpoolError,
    StaleCut,
    StaleEpoch,
    StaleGrant,
)
from nvpool.core.grants import READ, WRITE, verify
from nvpool.core.units import BLOCK_BYTES
from nvpool.rpc.api import Call
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import data_pb2, wire_pb2


class PlainStore:
    """`fault(call)` may raise, or return a delay in seconds; `spoil` is called with each read's payload
    before it is sent."""

    def __init__(self, target: int, secret: bytes, clock=SYSTEM_CLOCK, chunks: dict | None = None):
        self.target = target
        self.chunks: dict[tuple[int, int], bytearray] = {} if chunks is None else chunks
        self.cuts: dict[int, int] = {}
        self.done: dict[tuple[int, int, int, int], int] = {}
        self.calls: list[int] = []
        self.reads_per_call: list[int] = []
        self.fault: Callable[[Call], float | None] | None = None
        self.spoil: Callable[[bytearray], None] | None = None
        self.lose_answer = 0
        self.epoch = 0
        self._secret = secret
        self._clock = clock

    def update_map(self, pool_map) -> None:
        self.epoch = pool_map.epoch

    async def start(self) -> None: ...

    async def close(self, drain_s: float = 0.0) -> None: ...

    def handle(self, call: Call) -> None:
        self.calls.append(call.method)
        delay_s = self.fault(call) if self.fault is not None else None
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._answer, call)
        else:
            self._answer(call)

    def _answer(self, call: Call) -> None:
        try:
            message, payload = self._serve(call)
        except NvpoolError as error:
            call.fail(error)
            return
        if self.lose_answer:
            self.lose_answer -= 1
            call.fail(Disconnected("the answer was lost on the way"))
            return
        call.reply(message.SerializeToString(), payload)

    def _serve(self, call: Call):
        if call.method == wire_pb2.DATA_READ:
            return self._read(data_pb2.ReadRequest.FromString(bytes(call.message)))
        if call.method == wire_pb2.DATA_WRITE:
            return self._write(data_pb2.WriteRequest.FromString(bytes(call.message)), call.payload)
        if call.method == wire_pb2.DATA_FLUSH:
            return data_pb2.FlushReply(map_epoch=self.epoch), ()
        if call.method == wire_pb2.DATA_CUT:
            return self._cut(data_pb2.CutRequest.FromString(bytes(call.message)))
        if call.method == wire_pb2.DATA_REMOVE:
            gone = set(
                read_write_codec.unpack_inodes(data_pb2.RemoveRequest.FromString(bytes(call.message)).inodes)
            )
            for key in [key for key in self.chunks if key[0] in gone]:
                del self.chunks[key]
            return data_pb2.RemoveReply(map_epoch=self.epoch), ()
        if call.method == wire_pb2.DATA_STATUS:
            used = sum(map(len, self.chunks.values()))
            return data_pb2.DataStatusReply(
                target=self.target, state="serving", capacity_bytes=1 << 26, used_bytes=used
            ), ()
        raise NotSupported(f"method {call.method}")

    def _check(self, epoch: int, grants, right: int) -> list[int]:
        if epoch < self.epoch:
            raise StaleEpoch
        now_ms = self._clock.wall_ns() // 1_000_000
        found = [verify(raw, self._secret, now_ms) for raw in grants]
        if any(not grant.rights & right for grant in found):
            raise StaleGrant("the grant does not allow this")
        return [grant.inode for grant in found]

    def _read(self, request):
        owners = self._check(request.map_epoch, request.grants, READ)
        entries = read_write_codec.unpack_reads(request.reads, len(owners))
        self.reads_per_call.append(len(entries))
        results, payload = [], bytearray()
        for inode, index, offset, length, grant, _ in entries:
            if owners[grant] != inode:
                results.append((StaleGrant.wire_code, 0, 0, 0))
                continue
            part = bytes(self.chunks.get((inode, index), b"")[offset : offset + length])
            part += bytes(-len(part) % BLOCK_BYTES)
            results.append((0, 0, len(part), 1))
            payload += part
        checksums = block_checksums(payload)
        if self.spoil is not None:
            self.spoil(payload)
        results = read_write_codec.pack_read_results(results)
        return data_pb2.ReadReply(map_epoch=self.epoch, results=results, checksums=checksums), [payload]

    def _write(self, request, payload):
        owners = self._check(request.map_epoch, request.grants, WRITE)
        at = place = 0
        results = []
        for inode, cut, sequence, index, offset, length, grant, _ in read_write_codec.unpack_writes(
            request.writes, len(owners), len(payload), request.checksums
        ):
            if owners[grant] != inode:
                raise StaleGrant
            if cut < self.cuts.get(inode, 0):
                raise StaleCut
            part = payload[at : at + length]
            pieces = read_write_codec.piece_count(offset, length) * 4
            if piece_checksums(part, offset) != request.checksums[place : place + pieces]:
                raise ChecksumMismatch
            at, place = at + length, place + pieces
            slot = inode, index, request.session, request.slot
            if self.done.get(slot, 0) < sequence:
                self.done[slot] = sequence
                chunk = self.chunks.setdefault((inode, index), bytearray())
                if len(chunk) < offset:
                    chunk.extend(bytes(offset - len(chunk)))
                chunk[offset : offset + length] = part
            results.append((0, 0, 0, 1))
        return data_pb2.WriteReply(
            map_epoch=self.epoch, results=read_write_codec.pack_write_results(results)
        ), ()

    def _cut(self, request):
        self.cuts[request.inode] = max(request.cut, self.cuts.get(request.inode, 0))
        for inode, index in list(self.chunks):
            if inode == request.inode:
                chunk, begin = self.chunks[inode, index], max(0, request.size - (index << request.chunk_bits))
                if not request.end:
                    del chunk[begin:]
                elif (end := min(len(chunk), request.end - (index << request.chunk_bits))) > begin:
                    chunk[begin:end] = bytes(end - begin)
        return data_pb2.CutReply(map_epoch=self.epoch), ()
