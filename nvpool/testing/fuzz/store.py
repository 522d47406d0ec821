"""Fuzz target: a chunk store on a data file, with one caller that has few rights and sends random requests.

The caller may write one inode and read another. It has no right for a third one: grants for that are forged,
expired or for something else. At the end the bytes and versions of the last two are unchanged, scrub finds
nothing, and the store opens again with the same content. Descriptors are also requested at the socket for
short-circuit reads. Used by `runner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Any

from nvpool.core import grants
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NvpoolError
from nvpool.poolmap.model import changed
from nvpool.rpc.access_control import Callers
from nvpool.rpc.messages.read_write_codec import (
    LOCATE_ENTRY,
    READ_ENTRY,
    WRITE_ENTRY,
    decode_read_reply,
    encode_read_request,
    encode_write_request,
)
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.store.chunks.api import create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.server.service import StoreService
from nvpool.testing.fakes.meta_shard import DirectCall, small_map
from nvpool.testing.fuzz.connections import FuzzFailure, Witness
from nvpool.testing.fuzz.harness import FuzzTarget
from nvpool.testing.fuzz.messages import REQUESTS

SECRET = b"k" * 32
OURS, SHOWN, CLOSED = 11, 12, 13
SESSION = 9
BLOCKS = 40
PEERS = {
    "client": Peer("fuzz", "192.0.2.1:1", False, "client/fuzz.0a1b2c3d"),
    "user": Peer("fuzz", "unix", True, "", Credentials(1000, frozenset((1000, 50)), 1)),
    "node": Peer("fuzz", "192.0.2.1:1", False, "node/fuzz"),
}
HERE = Peer("check", "inproc", True)
METHODS = [method for method in REQUESTS if 0 < method < 100]
COMMON = (wire.DATA_READ, wire.DATA_WRITE, wire.DATA_COPY, wire.DATA_LOCATE, wire.DATA_EXTENTS)


class StorePlace(FuzzTarget):
    name = "store"

    def __init__(self, kind: str, seed: str, witness: Witness) -> None:
        super().__init__(kind, seed, witness)
        self._sequence = 0

    # -- the store ---------------------------------------------------------------------------------------------------------

    async def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._path = Path(
            tempfile.mkdtemp(
                prefix="nvpool-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            )
        )
        create_chunk_store(self._path / "t", 1, "pool", 64 << 20)
        await self._open()
        data = random.Random(1).randbytes(BLOCKS << 12)
        for inode in (OURS, SHOWN, CLOSED):
            for index in (0, 1):
                self._store.write_now(inode, index, 0, memoryview(data), piece_checksums(data, 0))
        await self._store.flush()
        self._grants = [self._signed(grants.READ | grants.WRITE, OURS), self._signed(grants.READ, SHOWN)]
        good = self._signed(grants.READ | grants.WRITE, CLOSED)
        self._forged = [
            bytes(byte ^ (at == 20) for at, byte in enumerate(good)),
            self._signed(3, CLOSED, life_s=-60.0),
            grants.sign(grants.Grant(3, 0, SESSION, CLOSED, 0, 1 << 60), b"x" * 32),
            b"",
            good[:59],
            good + b"\0",
            self._grants[0][:44] + self._grants[1][44:],
        ]
        self._expected = await self._content()
        self._know()
        self.connect(
            self._service.handle, PEERS[self.kind], self._service.fast_path and self._service.fast_path.answer
        )

    async def _open(self) -> None:
        self._store = await open_chunk_store(self._path / "t", 1)
        self._service = StoreService(
            self._store,
            target=1,
            grant_secret=SECRET,
            callers=Callers(4711),
            handover_path=str(self._path / "t.fd"),
        )
        pool_map = small_map(1)
        self._service.update_map(pool_map)
        self._service.update_map(changed(pool_map))
        await self._service.start()

    def _signed(self, rights: int, inode: int, life_s: float = 3600.0) -> bytes:
        ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + int(life_s * 1000)
        return grants.sign(grants.Grant(rights, 0, SESSION, inode, 0, ends_ms), SECRET)

    async def _ask(self, method: int, request: Any) -> bytes:
        """Send a request with the rights of the pool itself."""
        call = DirectCall(
            method,
            request if isinstance(request, bytes) else request.SerializeToString(),
            deadline_s=SYSTEM_CLOCK.boottime_s() + 30,
            peer=HERE,
        )
        try:
            self._service.handle(call)
            message, self._payload = await call.wait()
        except NvpoolError as error:
            raise FuzzFailure(f"the pool itself is refused {wire.Method.Name(method)}: {error!r}") from error
        return message

    async def _content(self) -> dict[tuple[int, int], tuple[bytes, bytes]]:
        """Return the chunks that no caller here may write, as the pool reads them, and the list of inodes."""
        found: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        for inode in (SHOWN, CLOSED):
            for index in (0, 1):
                read = READ_ENTRY.pack(inode, index, 0, BLOCKS << 12, 0, 0)
                request = encode_read_request(
                    self._service.map_state.epoch, 1, [self._signed(grants.SERVICE, 0)], read
                )
                results, _ = decode_read_reply(await self._ask(wire.DATA_READ, request))
                found[inode, index] = bytes(results), self._payload
        listed = pb.ListReply.FromString(await self._ask(wire.DATA_LIST, pb.ListRequest(target=1, limit=100)))
        found[0, 0] = listed.inodes, b""
        return found

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _know(self) -> None:
        chance, known = self._chance, self._known

        def grant() -> bytes:
            return chance.choice(self._grants if chance.random() < 0.7 else self._forged)

        def entries(layout: Any, fields: Any) -> bytes:
            count = 1 if chance.random() < 0.7 else chance.choice((0, 2, 5, 64, 257))
            raw = b"".join([layout.pack(*fields()) for _ in range(count)])
            return raw if chance.random() < 0.95 else raw[:-1]

        def inode() -> int:
            return chance.choice((OURS, OURS, OURS, SHOWN, CLOSED, 0, 14, chance.getrandbits(64)))

        def offset() -> int:
            return (
                chance.randrange(BLOCKS) << 12
                if chance.random() < 0.8
                else chance.choice((1, 4095, (1 << 32) - 1, 1 << 31))
            )

        def length() -> int:
            return (
                chance.randrange(1, 5) << 12
                if chance.random() < 0.8
                else chance.choice((0, 1, 4097, 1 << 20, (1 << 32) - 1))
            )

        known.draw.update(
            target=lambda: 1,
            inode=inode,
            from_inode=inode,
            map_epoch=lambda: chance.choice((1, 2, 2, 2, 3)),
            grants=grant,
            grant=grant,
            read_grant=grant,
            write_grant=grant,
            index=lambda: chance.randrange(3),
            from_index=lambda: chance.randrange(2),
            offset=offset,
            from_offset=offset,
            length=length,
            first=lambda: chance.randrange(3),
            until=lambda: chance.randrange(5),
            session=lambda: chance.choice((SESSION, SESSION, 8, 0)),
            slot=lambda: chance.randrange(65),
            cut=lambda: chance.randrange(2),
            authority=lambda: (
                self._signed(grants.SERVICE, 0) if self.kind == "node" and chance.random() < 0.3 else grant()
            ),
            token=lambda: (
                self._store.location_leases.token
                if self._store.location_leases is not None and chance.random() < 0.7
                else b"t" * 16
            ),
            reads=lambda: entries(
                READ_ENTRY,
                lambda: (
                    inode(),
                    chance.randrange(3),
                    offset(),
                    length(),
                    chance.randrange(3),
                    chance.randrange(3),
                ),
            ),
            writes=lambda: entries(
                WRITE_ENTRY,
                lambda: (
                    inode(),
                    chance.randrange(2),
                    self._next(),
                    chance.randrange(3),
                    offset(),
                    length(),
                    chance.randrange(3),
                    chance.randrange(3),
                ),
            ),
            entries=lambda: entries(
                LOCATE_ENTRY,
                lambda: (inode(), chance.randrange(3), chance.randrange(70), chance.randrange(3), 0),
            ),
            limit=lambda: chance.choice((0, 1, 100, 1 << 31)),
            blocks=lambda: chance.choice((0, 1, 100, (1 << 32) - 1)),
        )

    def _next(self) -> int:
        self._sequence += 1
        return (
            self._sequence
            if self._chance.random() < 0.95
            else self._chance.choice((0, 1, self._sequence - 1, (1 << 64) - 1))
        )

    def request(self, only: int | None) -> tuple[int, bytes, bytes]:
        """Return method, message and payload."""
        chance = self._chance
        method = only or (chance.choice(COMMON) if chance.random() < 0.6 else chance.choice(METHODS))
        drawn = chance.random()
        if method == wire.DATA_READ and drawn < 0.5:
            read = READ_ENTRY.pack(
                chance.choice((OURS, SHOWN, CLOSED)),
                chance.randrange(2),
                chance.randrange(BLOCKS) << 12,
                4096,
                0,
                0,
            )
            return method, encode_read_request(2, 1, [chance.choice(self._grants)], read), b""
        if method == wire.DATA_WRITE and drawn < 0.7:
            offset, count = chance.randrange(BLOCKS << 12), chance.choice((1, 100, 4096, 8192))
            if drawn < 0.4:
                offset, count = offset & ~4095, 4096
            data = chance.randbytes(count)
            inode, right = chance.choice(((OURS, 0), (OURS, 0), (OURS, 0), (SHOWN, 1), (CLOSED, 0)))
            entry = WRITE_ENTRY.pack(inode, 0, self._next(), chance.randrange(3), offset, count, 0, 0)
            sums = piece_checksums(data, offset) if chance.random() < 0.95 else bytes(4)
            if chance.random() < 0.05:
                data = data[:-1]
            return (
                method,
                encode_write_request(
                    2, 1, self._grants[right], entry, sums, SESSION, chance.randrange(1, 64)
                ),
                data,
            )
        message = self._generator.fill(REQUESTS[method]()).SerializeToString()
        return (
            method,
            message,
            chance.randbytes(chance.choice((1, 4096, 8192))) if chance.random() < 0.1 else b"",
        )

    def may(self, method: int, message: bytes) -> bool:
        return self.kind != "node" or method not in (wire.DATA_CUT, wire.DATA_REMOVE, wire.DATA_PEER_WRITE)

    async def pause(self) -> None:
        if self._chance.random() < 0.01:
            self._take_descriptors()
        await self.iteration()

    def _take_descriptors(self) -> None:
        """Connect to the socket for short-circuit reads, send something or nothing, and close it, with or
        without reading."""
        chance = self._chance
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect(str(self._path / "t.fd"))
                if chance.random() < 0.5:
                    sock.send(chance.randbytes(chance.choice((1, 8, 300))))
                if chance.random() < 0.3:
                    socket.send_fds(sock, [b"x"], [sock.fileno()] * chance.randrange(1, 9))

    # -- data that must not change -----------------------------------------------------------------------------------------

    async def end(self) -> None:
        try:
            await self.answer_all()
            self._wire.hang_up()
            self.check()
            before = _descriptors()
            for _ in range(10):
                self._take_descriptors()
                await asyncio.sleep(0.001)
            if _descriptors() > before + 2:
                raise FuzzFailure(
                    f"descriptors are left open by short-circuit reads: {before} -> {_descriptors()}"
                )
            for again in (False, True):
                await self._judge()
                if not again:
                    await self._service.close(5.0)
                    await self._open()
            self._witness.check()
        finally:
            await self._service.close()

    async def _judge(self) -> None:
        if await self._content() != self._expected:
            raise FuzzFailure(f"{self.kind} has changed chunks without a right to")
        cursor = b""
        while True:
            request = pb.ScrubRequest(target=1, cursor=cursor, blocks=100_000)
            reply = pb.ScrubReply.FromString(await self._ask(wire.DATA_SCRUB, request))
            if reply.bad or reply.problems:
                raise FuzzFailure(f"scrub finds {reply.bad[:3]} {reply.problems[:3]}")
            if reply.done:
                return
            cursor = reply.cursor


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
