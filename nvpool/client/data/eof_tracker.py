"""Where files have ended since chains lost what they held (poolmap/chains/data_loss): behind that nothing of them was lost.

Called by chunkclient for writes that change a block in part of which a store can not say whether the rest was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nvpool.client.state.attr_cache import OpenInode
from nvpool.client.state.pool_view import PoolView
from nvpool.core.grants import WRITE
from nvpool.core.units import BLOCK_BYTES


class Ended:
    """`renew(file, rights)` gets new attributes of an open inode."""

    def __init__(self, view: PoolView, renew: Callable[[OpenInode, int], Awaitable[None]]) -> None:
        self._view = view
        self._renew = renew

    @property
    def losses(self) -> int:
        """How many the newest map tells of. To be looked at before the service is asked where a file ends."""
        return len(self._view.map.losses)

    @staticmethod
    def note(file: OpenInode, losses: int, size: int) -> None:
        """The file has ended at `size` after so many losses."""
        known, before = file.ended
        if losses > known or (losses == known and size < before):
            file.ended = losses, size

    async def is_all(self, file: OpenInode, start: int, length: int) -> bool:
        """Whether the file has no other bytes in the blocks that a write changes in part, nor had since they were lost. Asks
        where it ends."""
        end = start + length
        for ask in (True, False):
            losses, size = file.ended
            if losses >= self.losses and (not start % BLOCK_BYTES or size <= start - start % BLOCK_BYTES) \
                    and (not end % BLOCK_BYTES or size <= end):
                return True
            if ask:
                losses = self.losses
                await self._renew(file, WRITE)
                self.note(file, losses, file.attr.size)
        return False
