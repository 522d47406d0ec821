"""Requests to write: the form of the most common one and any other form give the same bytes and errors."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from nvpool.core import errors, grants
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import ManualClock
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import MustWait
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.chunks.read_batch import READ
from nvpool.store.server.service import StoreService
from nvpool.store.server.writes import WRITE
from nvpool.testing.fakes.meta_shard import PEER

SECRET = b"k" * 32
BLOCK = bytes(range(256)) * 16


class Call:
    peer = PEER
    deadline_s = math.inf
    cancelled = False

    def __init__(self, method, message, payload=b""):
        self.method, self.message, self.payload = method, message, memoryview(payload)
        self.said = None
        self.ended = asyncio.Event()

    def room(self, byte_count):
        return None

    def reply(self, message=b"", payload=()):
        assert self.said is None
        self.said = bytes(message), b"".join(payload)
        self.ended.set()

    def fail(self, error):
        assert self.said is None
        self.said = type(error)
        self.ended.set()


UNKNOWN = b"\xf8\x01\x01"
"""A field that no version has: with it a message is decoded as any other."""


class Store:
    def __init__(self, is_common: bool) -> None:
        self.is_common = is_common
        self.clock = ManualClock()
        self.store = MemoryChunkStore(1 << 20)
        self.service = StoreService(self.store, target=1, grant_secret=SECRET, clock=self.clock)
        self.service.map_state.epoch = 7

    async def ask(self, method, message, payload=b""):
        call = Call(method, message, payload)
        try:
            self.service.handle(call)
        except errors.NvpoolError as error:
            call.fail(error)
        await asyncio.wait_for(call.ended.wait(), 60)
        return call.said

    async def write(
        self,
        *,
        inode=1,
        cut=0,
        sequence=1,
        index=0,
        offset=0,
        data=BLOCK,
        session=9,
        slot=3,
        epoch=7,
        target=1,
        grant_of=1,
        rights=grants.READ | grants.WRITE,
        grant_session=9,
        grant_cut=5,
        life_s=60,
        secret=SECRET,
        number=0,
        flags=0,
        checksums=None,
        length=None,
    ):
        ends = self.clock.wall_ns() // 1_000_000 + int(life_s * 1000)
        right = grants.sign(grants.Grant(rights, 0, grant_session, grant_of, grant_cut, ends), secret)
        header = WRITE.pack(
            inode, cut, sequence, index, offset, len(data) if length is None else length, number, flags
        )
        message = pb.WriteRequest(
            map_epoch=epoch,
            target=target,
            grants=[right],
            writes=header,
            session=session,
            slot=slot,
            checksums=piece_checksums(data, offset) if checksums is None else checksums,
        )
        raw = message.SerializeToString()
        return await self.ask(Method.DATA_WRITE, raw if self.is_common else raw + UNKNOWN, data)

    async def content(self):
        right = grants.sign(grants.Grant(grants.SERVICE, 0, 9, 0, 0, 1 << 62), SECRET)
        reads = b"".join(READ.pack(inode, index, 0, 16384, 0, 0) for inode in (1, 2) for index in range(2))
        return await self.ask(
            Method.DATA_READ,
            pb.ReadRequest(map_epoch=7, target=1, grants=[right], reads=reads).SerializeToString(),
        )


WRITES = (
    {},
    {"sequence": 2, "data": b"a part"},
    {"sequence": 2, "data": b"a part"},
    {"sequence": 1},
    {"index": 1, "offset": 4096},
    {"offset": (1 << 32) - 4096},
    {"offset": 4095, "data": b"x"},
    {"offset": 100, "data": BLOCK[:3996]},
    {"cut": 5, "sequence": 9},
    {"slot": 127},
    {"cut": 3, "sequence": 10, "slot": 4},
    {"checksums": b"bad!", "sequence": 11},
    {"life_s": -4.9, "sequence": 12},
    {"offset": 4095, "data": b"xy"},
    {"data": BLOCK * 2},
    {"session": 0},
    {"slot": 0},
    {"slot": 128},
    {"epoch": 6},
    {"epoch": 0},
    {"epoch": 8},
    {"target": 2},
    {"grant_of": 2},
    {"rights": grants.READ},
    {"grant_session": 8},
    {"cut": 6},
    {"rights": grants.SERVICE | grants.WRITE},
    {"life_s": -6},
    {"secret": b"z" * 32},
    {"number": 1},
    {"length": 4095},
    {"length": 0},
    {"data": b""},
    {"checksums": b""},
    {"checksums": bytes(8)},
)


async def both(steps):
    other, common = Store(False), Store(True)
    for step in steps:
        expected = await other.write(**step)
        assert await common.write(**step) == expected, step
    assert await common.content() == await other.content()


def test_writes_in_a_row_match_in_both_forms():
    asyncio.run(both(WRITES))


@pytest.mark.parametrize("step", WRITES, ids=str)
def test_write_matches_in_both_forms(step):
    asyncio.run(both([step]))


@pytest.mark.parametrize("seed", range(20))
def test_random_writes_match_in_both_forms(seed):
    dice = random.Random(seed)
    steps = [
        {
            **dice.choice(WRITES),
            "sequence": dice.randrange(1, 60),
            "slot": dice.randrange(1, 4),
        }
        for _ in range(200)
    ]
    asyncio.run(both(steps))


@pytest.mark.parametrize("error", (errors.NoSpace, errors.DriveFailed, errors.Fenced, errors.Busy))
def test_drive_errors_are_reported(error):
    async def scene():
        said = []
        for is_common in (False, True):
            store = Store(is_common)

            def failing(*_, **__):
                raise error()

            store.store.write_now = failing
            said.append(await store.write())
        assert said[0] == said[1]

    asyncio.run(scene())


def test_write_waits_for_space_and_is_done_once():
    async def scene():
        store = Store(True)
        write_now, waited = store.store.write_now, []

        async def room():
            waited.append(True)

        def full(*arguments, **named):
            if len(waited) < 2:
                raise MustWait(room)
            return write_now(*arguments, **named)

        store.store.write_now = full
        said = await store.write()
        assert len(waited) == 2
        assert said == await Store(False).write()

    asyncio.run(scene())
