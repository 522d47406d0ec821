"""InProcessPool: what survives a restart of its services, in memory and in a directory."""

from __future__ import annotations

import asyncio
import os

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.core.ids import ROOT_INODE
from nvpool.testing.fakes.in_process_pool import SHARD, InProcessPool

ME = Caller(0, 0)


@pytest.mark.parametrize("kept", ["memory", "directory"])
def test_restarted_services_have_all_acknowledged_data(tmp_path, kept):
    async def main() -> None:
        content = os.urandom(3_000_000)
        async with InProcessPool(tmp_path if kept == "directory" else None) as pool:
            vfs = (await pool.client()).vfs
            _, handle = await vfs.create(ROOT_INODE, b"file", 0o644, os.O_RDWR, ME)
            await vfs.write(handle, 0, content)
            await vfs.fsync(handle, False)
            for target in list(pool.stores):
                await pool.stop_store(target)
                await pool.start_store(target)
            await pool.stop_shard()
            await pool.start_shard()
            other = (await pool.client("second")).vfs
            inode = (await other.lookup(ROOT_INODE, b"file")).inode
            seen = await other.open(inode, os.O_RDONLY, ME)
            assert bytes(await other.read(seen, 0, len(content))) == content
            assert bytes(await vfs.read(handle, 5, 100)) == content[5:105]
            assert pool.pool_map.shard_by_id.keys() == {SHARD}
        if kept == "directory":
            async with InProcessPool(tmp_path) as pool:
                pass

    asyncio.run(asyncio.wait_for(main(), 120))
