"""Batch of writes of one request, applied in order as far as possible without waiting.

`store/server/service` calls `go_on`, awaits the returned wait, and calls `go_on` again.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol

from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.core.errors import InvalidRequest, NvpoolError, StaleGrant
from nvpool.core.ids import RequestId
from nvpool.core.units import BLOCK_BYTES
from nvpool.rpc.messages.read_write_codec import ALL_OF_BLOCKS
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.security.volume_keys import VolumeKey
from nvpool.store.chunks.api import ChunkStore, MustWait, Placed
from nvpool.store.chunks.read_batch import RESULT
from nvpool.store.replication.chain_writes import OnEnd
from nvpool.store.replication.peer_connections import Write
from nvpool.store.replication.role import Replica

WRITE = struct.Struct("<QQQIIIHH")
BREATH_BYTES = 256 << 10
"""Bytes written for one call before other calls get a turn: a quarter of a millisecond.

A write counts as one block at least, since it costs as much."""


async def _breathe() -> None:
    await asyncio.sleep(0)


def check_key(grant: grants.Grant, wrapped_key: bytes) -> None:
    """Check that writes to encrypted volumes, and only these, have a volume key; else InvalidRequest."""
    if bool(grant.rights & grants.ENCRYPTED) != bool(wrapped_key):
        raise InvalidRequest(
            "the write brings the key of a volume, and the file is in none that is encrypted"
            if wrapped_key
            else "the file is in an encrypted volume, and the write does not bring the volume's key"
        )


class WriteService(Protocol):
    """Interface of the target's service that a write uses (store/server/service)."""

    @property
    def store(self) -> ChunkStore:
        """Chunks of the target."""

    @property
    def replica(self) -> Replica:
        """Role of the target in its chains."""

    @property
    def clock(self) -> Clock:
        """Clock of the process."""

    @property
    def grant(self) -> Callable[[bytes, int], grants.Grant | None]:
        """Return the verified grant for its bytes and the time in ms; None if it is not valid."""

    def volume_key(self, wrapped: bytes) -> VolumeKey | None:
        """Return the volume key for a request's wrapped key, None if it is empty."""


class ChainWrite:
    """A write of a batch to a chunk with several replicas, as `WriteBatch.go_on` returns it.

    `try_submit` begins it without a task. If that is not possible, it is awaited like any other wait.
    """

    __slots__ = ("_batch", "_number", "_write")

    def __init__(self, batch: WriteBatch, number: int, write: Write) -> None:
        self._batch = batch
        self._number = number
        self._write = write

    def try_submit(self, on_end: OnEnd) -> bool:
        """See ChainWrites.try_submit. After a success, `on_end` passes the version to `ended`."""
        return self._batch.replica.try_submit(self._write, on_end)

    def ended(self, version: int) -> None:
        """Record that the write is committed on every member of its chain."""
        self._batch.led = self._number, version

    async def __call__(self) -> None:
        """Write together with the other targets of the chunk."""
        batch, write = self._batch, self._write
        try:
            self.ended(await batch.replica.lead(write, batch.deadline_s))
        except NvpoolError as error:
            batch.refused[write.name] = error.wire_code


class WriteBatch:
    """Batch of writes and its progress.

    After a refused write to a chunk, the later writes of the batch to that chunk are refused for the same
    reason. So the applied writes to a chunk are always the first ones of the batch.
    """

    def __init__(
        self,
        service: WriteService,
        request: pb.WriteRequest,
        payload: memoryview,
        deadline_s: float,
        verified: list[grants.Grant | None],
    ):
        """Create the batch. `verified`: the grants of the request, None for each that is not valid."""
        self._store = service.store
        self.replica = service.replica
        self.deadline_s = deadline_s
        self._request = request
        self._payload = payload
        self.headers = list(WRITE.iter_unpack(request.writes))
        if request.versions:
            raise InvalidRequest("versions are given by the head of a chain to its successors")
        places, pieces, at, piece = [], [], 0, 0
        for _, _, _, _, offset, length, _, _ in self.headers:
            places.append((at, at + length))
            at += length
            last = piece + (
                (offset + length + BLOCK_BYTES - 1) // BLOCK_BYTES - offset // BLOCK_BYTES if length else 0
            )
            pieces.append((piece * 4, last * 4))
            piece = last
        if at != len(payload) or piece * 4 != len(request.checksums):
            raise InvalidRequest(
                f"{len(payload)} bytes and {len(request.checksums)} of checksums came for writes of {at} and "
                f"{piece * 4}"
            )
        self._places, self._pieces = places, pieces
        self._done = 0
        self._placed: Placed | None = None
        self._placed_for = -1
        self.led: tuple[int, int] = -1, 0  # number, version
        self.refused: dict[tuple[int, int], int] = {}
        self.session = request.session
        self._key = service.volume_key(request.wrapped_key)
        self._cipher = None if self._key is None else self._key.cipher
        self._grants = verified
        self.results = bytearray(RESULT.size * len(self.headers))

    def go_on(self):
        """Write as far as possible without waiting.

        Returns the function to await before the next call, or None when the whole batch is done.
        """
        request, replica = self._request, self.replica
        session, slot = request.session, request.slot
        written = 0
        while self._done < len(self.headers):
            if written > BREATH_BYTES:
                return _breathe
            number = self._done
            inode, cut, sequence, index, offset, _, grant_number, flags = self.headers[number]
            status = version = 0
            try:
                refused = self.refused.get((inode, index))
                if refused:
                    status = refused
                else:
                    table = self._check_grant(grant_number, inode, cut)
                    begin, end = self._places[number]
                    first, last = self._pieces[number]
                    name = RequestId(session, slot, sequence) if session else None
                    if self.led[0] == number:
                        version = self.led[1]
                    elif replica.losing and replica.losing.check_write(
                        table, inode, index, offset, end - begin, bool(flags & ALL_OF_BLOCKS)
                    ):
                        return partial(self._discard, number)
                    elif replica.shares and replica.is_shared(table, inode, index):
                        return self._chain_write(number, table, name)
                    elif self._placed_for != number and self._store.places_first(offset, end - begin):
                        return partial(self._place, number)
                    else:
                        version = replica.write_now(
                            inode,
                            index,
                            offset,
                            self._payload[begin:end],
                            request.checksums[first:last],
                            cut=cut,
                            request=name,
                            placed=self._placed,
                            table=table,
                            cipher=self._cipher,
                        )
            except MustWait as wait:
                return wait.until
            except NvpoolError as error:
                status = self.refused[inode, index] = error.wire_code
            self.drop_placed()
            RESULT.pack_into(self.results, number * RESULT.size, status, 0, 0, version)
            self._done += 1
            written += max(self.headers[number][5], BLOCK_BYTES)
        return None

    async def _discard(self, number: int) -> None:
        """Remove the local chunk, which is older than the reset of its chain."""
        inode, cut, _, index, offset, length, grant_number, flags = self.headers[number]
        losing, table = self.replica.losing, self._check_grant(grant_number, inode, cut)
        try:
            # Checked again at removal: another request may have written the chunk while this one waited.
            await self._store.discard(
                inode,
                index,
                lambda: losing.check_write(table, inode, index, offset, length, bool(flags & ALL_OF_BLOCKS)),
            )
        except NvpoolError as error:
            self.refused[inode, index] = error.wire_code

    async def _place(self, number: int) -> None:
        self._placed_for = number
        inode, _, _, index, offset, *_ = self.headers[number]
        begin, end = self._places[number]
        try:
            if self._cipher is None:
                self._placed = await self._store.place(inode, index, offset, self._payload[begin:end])
            else:
                first, last = self._pieces[number]
                self._placed = await self._store.prepare(
                    inode,
                    index,
                    offset,
                    self._payload[begin:end],
                    self._request.checksums[first:last],
                    self._cipher,
                )
                if self._placed.writing is not None:
                    await asyncio.shield(self._placed.writing)
        except NvpoolError as error:
            self.refused[inode, index] = error.wire_code

    def _chain_write(self, number: int, table: int, name: RequestId | None) -> ChainWrite:
        if name is None:
            raise InvalidRequest("a write of a chunk with several replicas needs a name")
        inode, cut, _, index, offset, *_ = self.headers[number]
        begin, end = self._places[number]
        first, last = self._pieces[number]
        return ChainWrite(
            self,
            number,
            Write(
                table or 1,
                inode,
                index,
                offset,
                self._payload[begin:end],
                self._request.checksums[first:last],
                cut,
                name,
                self._key,
            ),
        )

    def drop_placed(self) -> None:
        placed, self._placed = self._placed, None
        if placed is not None:
            self._store.drop_placed(placed)

    def refuse_rest(self, code: int) -> None:
        for number in range(self._done, len(self.headers)):
            RESULT.pack_into(self.results, number * RESULT.size, code, 0, 0, 0)

    def _check_grant(self, number: int, inode: int, cut: int) -> int:
        """Return the chain table of the grant, 0 for none.

        StaleGrant: the grant does not allow this write.
        """
        grant = self._grants[number] if number < len(self._grants) else None
        if grant is None or not grant.rights & (grants.WRITE | grants.SERVICE):
            raise StaleGrant
        if not grant.rights & grants.SERVICE and (
            grant.inode != inode or cut > grant.cut or grant.session != self.session != 0
        ):
            raise StaleGrant
        if not grant.rights & grants.SERVICE:
            check_key(grant, self._request.wrapped_key)
        return 0 if grant.rights & grants.SERVICE else grant.table
