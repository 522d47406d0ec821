"""Files lost with removed drives, for `nvpool status`: the first few, found in a short time and cached.

`nvpool fsck` lists all of them. Used by node/status."""

from __future__ import annotations

import asyncio
import os

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NvpoolError
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.chains.data_loss import losing, ownerless
from nvpool.poolmap.model import PoolMap

LOOK_S = 2.0
FILES_MAX = 20
KEPT_S = 60.0


class LostFiles:
    def __init__(self, directory: PoolDirectory) -> None:
        self._directory = directory
        self._looking = asyncio.Lock()
        self._found: list[str] = []
        self._whole = False
        """Whether all files were checked."""
        self._of_epoch = -1
        self._until_s = 0.0

    async def problems(self, pool_map: PoolMap) -> list[str]:
        """Sentences about lost data. Empty if nothing is lost, or if no file that has lost data is left."""
        chains = losing(pool_map)
        if not chains:
            return []
        count = sum(map(len, chains.values()))
        async with self._looking:
            if self._of_epoch != pool_map.epoch or self._until_s < SYSTEM_CLOCK.boottime_s():
                self._found, self._whole = [], False
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._look()
                        self._whole = True
                except (TimeoutError, NvpoolError):
                    pass  # keep what was found in time
                self._of_epoch, self._until_s = pool_map.epoch, SYSTEM_CLOCK.boottime_s() + KEPT_S
            waiting = ownerless(pool_map)
            sentences = (
                [
                    f"{len(waiting)} chains wait to be reset to empty; writes to them wait until all clients have lost "
                    f"access to the old targets"
                ]
                if waiting
                else []
            )
            if self._whole and not self._found:
                return sentences
            return [
                *sentences,
                f"{count} chains were on lost drives only: what files had in them is gone; `nvpool fsck POOL` names "
                "all",
                *self._found,
            ]

    async def _look(self) -> None:
        # Imported when data is lost: the client is more than half of what a supervisor would load before it
        # can lead.
        from nvpool.client.inode_paths import printable
        from nvpool.client.pool_client import Client
        from nvpool.client.state.options import ClientOptions
        from nvpool.sdk.fsck.lost_files import lost_files

        client = await Client.open(
            os.fspath(self._directory.path), "status", ClientOptions(deadline_s=LOOK_S)
        )
        try:
            async for path, inode, chunks in lost_files(client):
                self._found.append(f"file {printable(path)}, inode {inode}: {chunks} of its chunks are lost")
                if len(self._found) >= FILES_MAX:
                    return
        finally:
            await client.close(0.5)
