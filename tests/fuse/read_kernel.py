"""Shared parts of the tests of compiled reads: the test takes the kernel's place, and runs on the fast and the slow path."""

import asyncio
import os
import random

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import KIB, MIB
from nvpool.fuse.protocol.constants import Op
from tests.fuse.test_kernel_engine import Kernel
from tests.unit.client.data.test_short_circuit import BLOCK, run_whole, some

CONTENT = some(5 * MIB + 1234)


class Reading(Kernel):
    """A pool with real stores below the engine, and the test in the place of the kernel."""

    def __init__(self, host, options=None, clock=SYSTEM_CLOCK):
        super().__init__(host.vfs, options, clock=clock)
        self.host, self.vfs = host, host.vfs

    async def receive(self):
        while not (heard := await super().receive())[0]:
            pass  # a notification
        return heard

    async def open_theirs(self, content=CONTENT, name=b"file"):
        """The number of a handle of a file that another client wrote."""
        writer = await self.host.writer()
        theirs = await self.host.file(content, writer, name)
        await writer.fsync(theirs, False)
        opened = await self.request(Op.OPEN, (os.O_RDONLY, 0), node=theirs.inode)
        await writer.release(theirs)
        return int.from_bytes(opened[:8], "little")

    def handle(self, number):
        return self.engine.ops.files.by_handle[number]

    async def read(self, number, offset, size):
        return await self.request(Op.READ, (number, offset, size, 0, 0, 0))

    def send_read(self, number, offset, size, **more):
        return self.send(Op.READ, (number, offset, size, 0, 0, 0), **more)

    async def check_reads(self, asked):
        """Check the replies to these reads, {unique: (offset, length)}."""
        while asked:
            unique, error, answer = await self.receive()
            offset, length = asked.pop(unique)
            assert not error and answer == CONTENT[offset : offset + length]


async def until(is_so):
    """Wait until `is_so()` is true; a busy machine needs a while."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def places(count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        length = chance.choice(
            [1, 100, BLOCK, BLOCK, 2 * BLOCK, 5000, 64 * KIB, 128 * KIB, 128 * KIB + 1, 300 * KIB]
        )
        offset = chance.randrange(len(CONTENT))
        yield (offset - offset % BLOCK if chance.random() < 0.5 else offset), length


class ChunkedTransport:
    """Takes the place of a store's transport; sends the replies in pieces."""

    def __init__(self, transport, chance):
        self._transport, self._chance, self._left, self._running = transport, chance, bytearray(), None

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, content):
        self._left += content
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._drip())

    def writelines(self, parts):
        self.write(b"".join(parts))

    async def _drip(self):
        while self._left:
            count = self._chance.choice([1, 3, 31, 32, 33, 60, 4000, 4161, 5000, 20000, 140000])
            self._transport.write(bytes(self._left[:count]))
            del self._left[:count]
            await asyncio.sleep(0 if self._chance.random() < 0.7 else 0.001)


def replace_transports(host, make_transport):
    """Replace the transport of every store's replies from now on: `make_transport(theirs)`."""
    for (role, _), listener in host.pool.listeners.items():
        if role == "target":
            for served in listener.connections:
                served.frames.transport = make_transport(served.frames.transport)


WAYS = ("ordinary", pytest.param("compiled", marks=pytest.mark.compiled))
"""Parameter sets of a test that runs on both paths."""
TYPED_WAYS = ("ordinary", "compiled")
"""The same for a fast path that also runs interpreted."""


def path_decorators(mounted, ways=WAYS):
    """For `mounted(way)`: decorators of tests, for one given way, for both ways, and for the compiled one only."""

    def on_a_mount(test, *options):
        def run(way):
            async def all_of_it():
                async with mounted(way, *options) as kernel:
                    await test(kernel)

            run_whole(all_of_it(), 300)

        run.__name__ = test.__name__
        return run

    def on_both_paths(test):
        return pytest.mark.parametrize("way", ways)(on_a_mount(test))

    def on_fast_path(test):
        run = on_a_mount(test)

        def alone():
            run("compiled")

        alone.__name__ = test.__name__
        return alone if ways is TYPED_WAYS else pytest.mark.compiled(alone)

    return on_a_mount, on_both_paths, on_fast_path
