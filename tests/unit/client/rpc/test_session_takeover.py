"""A process that takes over a killed process's sessions leaves no file registered as open that is closed."""

import asyncio
import os

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import MIB
from nvpool.shm.mount_state import KeptMemory
from nvpool.testing.fakes.in_process_pool import run
from tests.unit.client.state.test_small_file_cache import until

ME = Caller(0, 0)
NEVER_S = 1000.0


class Request(asyncio.Task):
    """A request of the kernel, numbered as the engines number it."""

    unique = 0


async def asked(unique, work):
    task = Request(work)
    task.unique = unique
    return await task


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not-answered"])
def test_file_closed_before_a_kill_is_not_open_after_it(answered):
    async def main(pool) -> None:
        descriptor = KeptMemory.make(16 * MIB)

        def process(release_s):
            return Client.open(
                pool.pool_map,
                "mount",
                ClientOptions(release_s=release_s),
                clock=pool.clock,
                kept=KeptMemory(descriptor),
            )

        def opens():
            (session,) = [
                one for one in pool.meta.parts.sessions.by_number.values() if one.client.startswith("mount")
            ]
            return set(session.opens)

        killed = await process(NEVER_S)
        vfs = killed.vfs
        attr, handle = await asked(1000, vfs.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME))
        if answered:
            vfs.meta.once.answered(1000)
            await vfs.release(handle)
        assert opens() == {attr.inode}, "the release is not sent"
        await vfs.meta.close(0.0, say_so=False)

        after = await process(0.01)
        await after.vfs.take_over([])
        await after.vfs.lookup(ROOT_INODE, b"f")
        assert opens() == (set() if answered else {attr.inode}), "the kernel may replay the request"
        if not answered:
            again, handle = await asked(1000, after.vfs.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME))
            after.vfs.meta.once.all_came_again({1000})
            after.vfs.meta.once.answered(1000)
            await asyncio.sleep(0.1)
            assert again.inode == attr.inode and opens() == {attr.inode}
            await after.vfs.release(handle)
            await until(lambda: not opens())
        await after.close()
        await killed.close()
        os.close(descriptor)

    run(main)


def test_open_of_a_vanished_requester_is_closed():
    async def main(pool) -> None:
        descriptor = KeptMemory.make(16 * MIB)

        def process():
            return Client.open(
                pool.pool_map,
                "mount",
                ClientOptions(release_s=0.01),
                clock=pool.clock,
                kept=KeptMemory(descriptor),
            )

        killed = await process()
        attr, _ = await asked(1000, killed.vfs.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME))
        await killed.vfs.meta.close(0.0, say_so=False)
        after = await process()
        await after.vfs.take_over([])
        await after.vfs.lookup(ROOT_INODE, b"f")
        (session,) = pool.meta.parts.sessions.by_number.values()
        assert session.opens == {attr.inode: 1}
        after.vfs.meta.once.all_came_again(set())
        await until(lambda: not session.opens)
        await after.close()
        await killed.close()
        os.close(descriptor)

    run(main)
