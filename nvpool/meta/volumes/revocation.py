"""Revocation of rights to volumes, from the shard's side: the pool map is made to say what was taken back.

A right is taken back in two steps. First the volume's record changes, durably: from then on no grant is given by it. Then the
pool map says so, and stores refuse the grants from before (poolmap/grant_revocation). A step that fails is owed, and done with
the next wish about that volume; where this process ends in between, grants from before live as long as they say. The locks of
clients that were removed from the pool are given on when all stores have hung up on them. Used by `meta/volumes/handlers` and
`meta/server/service`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import InvalidRequest, NvpoolError, Stale, Unavailable
from nvpool.core.grants import CLOCK_SKEW_S, READ, WRITE
from nvpool.meta.options import MetaOptions
from nvpool.meta.state.volume_records import LISTED, SEALED, VolumeRecord
from nvpool.rpc.v1.meta_pb2 import TakeRightRequest

TakeRight = Callable[[TakeRightRequest], Awaitable[list[int]]]
ALL = READ | WRITE
WAIT_S = 4.0
"""For the map to change and for stores to know it: an operator gets an answer within the time in which it is to be in force."""
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


def lost_rights(before: VolumeRecord, after: VolumeRecord) -> dict[str, int]:
    """Whose rights are fewer now, and which; under no name: everybody's."""
    if after.flags & LISTED and not before.flags & LISTED:
        return {"": ALL}
    lost = {"": WRITE} if after.flags & SEALED and not before.flags & SEALED else {}
    if after.flags & LISTED:
        now = dict(after.grants)
        for member, write in before.grants:
            if member not in now:
                lost[member] = ALL
            elif write and not now[member]:
                lost[member] = WRITE
    return lost


class Revocations:
    def __init__(self, clock: Clock, options: MetaOptions, take_right: TakeRight | None, epoch: Callable[[], int]) -> None:
        """`take_right(request)` asks who keeps the map, and returns the targets that do not know it yet; None: there is no map
        (tests, tools), and nothing is done. `epoch()`: of the map that this shard knows."""
        self._clock = clock
        self._take_right = take_right
        self._epoch = epoch
        self._life_s = max(options.grant_s, MetaOptions().grant_s) + 2 * CLOCK_SKEW_S
        self._owed: dict[tuple[int, str], int] = {}
        self._removed: dict[int, int] = {}
        """Sessions of clients that were removed -> epoch of the map that says it."""

    def owe(self, volume: int, lost: dict[str, int]) -> None:
        """These rights were taken back in the volume's record."""
        if self._take_right is not None:
            for member, rights in lost.items():
                self._owed[volume, member] = self._owed.get((volume, member), 0) | rights

    def owes(self, volume: int) -> bool:
        return any(number == volume for number, _ in self._owed)

    async def settle(self, volume: int) -> float:
        """Have stores refuse grants from before. For how many seconds some store may still take one: 0 when all know it.
        Unavailable: the map can not be changed now, so all of them may."""
        until_s = self._clock.boottime_s() + WAIT_S
        unaware: list[int] = []
        for (number, member), rights in list(self._owed.items()):
            if number != volume:
                continue
            request = TakeRightRequest(volume=volume, member=member, rights=rights, life_ms=int(self._life_s * 1000))
            try:
                unaware = await self._ask(request, until_s)
            except InvalidRequest as error:  # its supervisor is of an older version
                _log.warning("stores are not told that a right to volume %d was taken back: %s", volume, error)
                return self._life_s
            except NvpoolError as error:
                raise Unavailable(f"the right is taken back, but the pool map does not say so yet ({error}): stores take "
                                  f"grants from before for up to {self._life_s:.0f} s; repeat it",
                                  may_be_applied=True) from None
            if self._owed.get((number, member)) == rights:
                del self._owed[number, member]
        epoch = self._epoch()
        while unaware and self._clock.boottime_s() < until_s:
            await asyncio.sleep(_PAUSE_S)
            try:
                unaware = await self._take_right(TakeRightRequest(known=epoch))
            except NvpoolError as error:
                _log.info("it is not known which stores know the pool map %d: %s", epoch, error)
        return self._life_s if unaware else 0.0

    async def _ask(self, request: TakeRightRequest, until_s: float) -> list[int]:
        while True:
            try:
                return await self._take_right(request)
            except (Unavailable, Stale):
                if self._clock.boottime_s() >= until_s:
                    raise
                await asyncio.sleep(_PAUSE_S)

    # -- clients that were removed -------------------------------------------------------------------------------------------

    def removed(self, session: int) -> None:
        """The client of this session, which has ended, is in the pool no more."""
        if self._take_right is not None:
            self._removed[session] = self._epoch()

    async def cut_off(self) -> list[int]:
        """Those of the sessions whose clients no store listens to any more. Each is told once."""
        if not self._removed:
            return []
        try:
            if await self._take_right(TakeRightRequest(known=max(self._removed.values()))):
                return []
        except NvpoolError as error:
            _log.info("it is not known which stores have hung up on removed clients: %s", error)
            return []
        sessions, self._removed = list(self._removed), {}
        return sessions
