"""Random writes, holes, sizes and copies with daemon deaths between them, against plain bytes.

Reads, reads of another client and the answers of SEEK_DATA and SEEK_HOLE must agree with the plain bytes.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, Caller
from nvpool.core import errors
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB
from nvpool.testing.env.pool import problems_of
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(0, 0)
BLOCK = 4096
CHUNK = 64 * KIB
END = 6 * CHUNK
OPTIONS = ClientOptions(deadline_s=20.0, fresh_s=0.0, attr_s=0.0, read_ahead_bytes=256 * KIB)

PLACE = st.one_of(
    st.integers(0, END),
    st.integers(0, END // BLOCK).map(lambda n: n * BLOCK),
    st.integers(0, 6).map(lambda n: n * CHUNK),
)
LENGTH = st.one_of(st.integers(1, 3 * CHUNK), st.sampled_from([1, BLOCK, 2 * BLOCK, CHUNK, 2 * CHUNK]))
FILE = st.integers(0, 1)
STEP = st.one_of(
    st.tuples(st.just("write"), FILE, PLACE, LENGTH),
    st.tuples(st.just("write"), FILE, PLACE, LENGTH),
    st.tuples(
        st.just("fallocate"),
        FILE,
        PLACE,
        LENGTH,
        st.sampled_from(
            [0, KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE]
        ),
    ),
    st.tuples(st.just("copy"), FILE, PLACE, FILE, PLACE, LENGTH),
    st.tuples(st.just("copy"), FILE, PLACE, FILE, PLACE, LENGTH),
    st.tuples(st.just("truncate"), FILE, PLACE),
    st.tuples(st.just("settle"), FILE, st.sampled_from(["flush", "fsync", "reopen"])),
    st.tuples(st.just("check_read"), FILE, PLACE, LENGTH),
    st.tuples(st.just("seek"), FILE),
    st.tuples(st.just("check_other_client"), FILE),
    st.tuples(st.just("kill"), st.sampled_from(["store 1", "store 2", "shard"])),
)


class Case:
    """Two files, each with its expected content and the blocks that may not be holes."""

    def __init__(self, pool: InProcessPool, kills: bool):
        self.pool, self.kills = pool, kills
        self.content = [bytearray(), bytearray()]
        self.data: list[set[int]] = [set(), set()]
        self.dice = random.Random(1)

    async def begin(self) -> None:
        self.vfs = (await self.pool.client("first", OPTIONS)).vfs
        self.second = await self.pool.client("second", OPTIONS)
        self.files = [
            (await self.vfs.create(ROOT_INODE, name, 0o644, os.O_RDWR, ME))[1] for name in (b"a", b"b")
        ]

    def wrote(self, file: int, place: int, length: int) -> None:
        self.data[file] |= set(range(place // BLOCK, (place + length - 1) // BLOCK + 1))

    async def write(self, file: int, place: int, length: int) -> None:
        content = self.dice.randbytes(length)
        assert await self.vfs.write(self.files[file], place, content) == length
        model = self.content[file]
        model.extend(bytes(max(0, place + length - len(model))))
        model[place : place + length] = content
        self.wrote(file, place, length)

    async def fallocate(self, file: int, place: int, length: int, mode: int) -> None:
        await self.vfs.fallocate(self.files[file], place, length, mode)
        model, end = self.content[file], place + length
        if mode & (PUNCH_HOLE | ZERO_RANGE):
            model[place : min(end, len(model))] = bytes(max(0, min(end, len(model)) - place))
            self.data[file] -= set(range(-(-place // BLOCK), end // BLOCK))
        if not mode & KEEP_SIZE:
            model.extend(bytes(max(0, end - len(model))))

    async def copy(self, source: int, place: int, target: int, to: int, length: int) -> None:
        call = self.vfs.copy_range(self.files[source], place, self.files[target], to, length)
        there = max(0, min(length, len(self.content[source]) - place))
        if source == target and there and abs(place - to) < there:
            with pytest.raises(errors.InvalidRequest):
                await call
            return
        copied = await call
        assert copied == there
        if there:
            model = self.content[target]
            model.extend(bytes(max(0, to + there - len(model))))
            model[to : to + there] = self.content[source][place : place + there]
            self.wrote(target, to, there)

    async def truncate(self, file: int, size: int) -> None:
        await self.vfs.setattr(self.files[file].inode, size=size, caller=ME)
        model = self.content[file]
        del model[size:]
        model.extend(bytes(size - len(model)))
        self.data[file] = {block for block in self.data[file] if block * BLOCK < size}

    async def settle(self, file: int, how: str) -> None:
        if how == "fsync":
            await self.vfs.fsync(self.files[file], False)
        await self.vfs.flush(self.files[file])
        if how == "reopen":
            await self.vfs.release(self.files[file])
            self.files[file] = await self.vfs.open(self.files[file].inode, os.O_RDWR, ME)

    async def check_read(self, file: int, place: int, length: int) -> None:
        assert (
            bytes(await self.vfs.read(self.files[file], place, length))
            == self.content[file][place : place + length]
        )
        assert (
            self.files[file].size
            == (await self.vfs.getattr(self.files[file].inode)).size
            == len(self.content[file])
        )

    async def seek(self, file: int) -> None:
        await self.check_extents(self.vfs, self.files[file], file)

    async def check_other_client(self, file: int) -> None:
        await self.vfs.flush(self.files[file])
        vfs = self.second.vfs
        handle = await vfs.open(self.files[file].inode, os.O_RDONLY, ME)
        assert handle.size == len(self.content[file])
        assert bytes(await vfs.read(handle, 0, END * 2)) == self.content[file]
        await self.check_extents(vfs, handle, file)
        await vfs.release(handle)

    async def check_extents(self, vfs, handle, file: int) -> None:
        rest = bytearray(self.content[file])
        place, size = 0, len(rest)
        while True:
            try:
                begin = await vfs.seek(handle, place, os.SEEK_DATA)
            except errors.BeyondData:
                break
            assert place <= begin < size
            if begin > place:
                assert begin % BLOCK == 0 and await vfs.seek(handle, place, os.SEEK_HOLE) == place
                assert await vfs.seek(handle, begin - 1, os.SEEK_DATA) == begin
            end = await vfs.seek(handle, begin, os.SEEK_HOLE)
            assert begin < end <= size and (end % BLOCK == 0 or end == size)
            assert set(range(begin // BLOCK, -(-end // BLOCK))) <= self.data[file], (
                "an unwritten block is reported as data"
            )
            rest[begin:end] = bytes(end - begin)
            place = end
        assert not any(rest), "bytes in a hole"
        for beyond in (size, size + 1, -1):
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                with pytest.raises(errors.BeyondData):
                    await vfs.seek(handle, beyond, whence)

    async def kill(self, which: str) -> None:
        if not self.kills:
            return
        if which == "shard":
            await self.pool.stop_shard()
            await self.pool.start_shard()
        else:
            number = int(which[-1])
            await self.pool.stop_store(number)
            await self.pool.start_store(number)

    async def end(self) -> None:
        for file in (0, 1):
            await self.check_read(file, 0, END * 2)
            await self.check_other_client(file)
            await self.vfs.release(self.files[file])
        assert self.vfs.writer.held_bytes() == 0
        assert await problems_of(self.second) == []


async def play(steps, directory=None) -> None:
    async with InProcessPool(directory, chunk_bytes=CHUNK) as pool:
        case = Case(pool, directory is not None)
        await case.begin()
        for kind, *rest in steps:
            await getattr(case, kind)(*rest)
        await case.end()


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(st.lists(STEP, max_size=40))
def test_ranges_match_the_model(steps):
    asyncio.run(play(steps))


@settings(max_examples=5, deadline=None, suppress_health_check=SLOW)
@given(st.lists(STEP, min_size=10, max_size=60))
def test_ranges_on_drives_match_the_model_over_kills(steps):
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(steps, directory))


@pytest.mark.few(0)
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(st.lists(STEP, max_size=40))
def test_ranges_match_the_model_in_more_histories(steps):
    asyncio.run(play(steps))


@pytest.mark.few(0)
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(st.lists(STEP, min_size=10, max_size=60))
def test_ranges_on_drives_match_the_model_over_more_kills(steps):
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(steps, directory))


@pytest.mark.soak
@settings(max_examples=1500, deadline=None, suppress_health_check=SLOW)
@given(st.lists(STEP, max_size=80))
def test_ranges_match_the_model_in_long_histories(steps):
    asyncio.run(play(steps))


@pytest.mark.soak
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
@given(st.lists(STEP, min_size=10, max_size=120))
def test_ranges_on_drives_match_the_model_in_long_histories(steps):
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(steps, directory))
