"""Ends of files since chains lost data (poolmap/chains/data_loss): nothing was lost behind such an end.

Used by the chunk client for writes that change a part of a block, if the store does not know whether the rest
of the block was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.grants import WRITE
from nvpool.core.units import BLOCK_BYTES


class DataLossCheck:
    """The check whether a write may replace lost bytes.

    `renew(file, rights)` fetches an open inode's attributes.
    """

    def __init__(self, view: PoolView, renew: Callable[[OpenInode, int], Awaitable[None]]) -> None:
        self._view = view
        self._renew = renew

    @property
    def losses(self) -> int:
        """Number of losses in the newest map.

        Must be read before the service is asked for the end of a file.
        """
        return len(self._view.map.losses)

    @staticmethod
    def note(file: OpenInode, losses: int, size: int) -> None:
        """Record that the file ended at `size` after that many losses."""
        known, before = file.ended
        if losses > known or (losses == known and size < before):
            file.ended = losses, size

    async def is_all(self, file: OpenInode, start: int, length: int) -> bool:
        """Whether the partly written blocks have no other bytes of the file, now and at the loss.

        Fetches the file's attributes if needed.
        """
        end = start + length
        for ask in (True, False):
            losses, size = file.ended
            if (
                losses >= self.losses
                and (not start % BLOCK_BYTES or size <= start - start % BLOCK_BYTES)
                and (not end % BLOCK_BYTES or size <= end)
            ):
                return True
            if ask:
                losses = self.losses
                await self._renew(file, WRITE)
                self.note(file, losses, file.attr.size)
        return False
