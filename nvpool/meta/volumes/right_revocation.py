"""Revocation of rights to volumes: the shard's part, which puts revoked rights into the pool map.

A right is revoked in two steps. First the volume's record changes, durably; from then on the shard gives no
grant by this right. Then the pool map lists the revocation, and the stores refuse earlier grants
(poolmap/grant_revocation). If the second step fails, it stays owed, and the next admin command about the
volume repeats it. If this process ends in between, earlier grants stay valid until they expire.

The locks of clients that were removed from the pool are released when all stores have disconnected those
clients. Used by `meta/requests/volume_handlers` and `meta/server/service`.
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
"""Limit for the map to change and for the stores to receive it. An operator's answer comes within the time in
which the revocation should take effect."""
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


def lost_rights(before: VolumeRecord, after: VolumeRecord) -> dict[str, int]:
    """Rights that `after` no longer gives, by member; the empty name stands for all members."""
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
    """Revocations that the pool map must still list, and removed clients whose locks are still kept."""

    def __init__(
        self, clock: Clock, options: MetaOptions, take_right: TakeRight | None, epoch: Callable[[], int]
    ) -> None:
        """`take_right(request)` asks the pool map's coordinator, and returns the targets unaware of it.

        None: there is no map (tests, tools), and nothing is done. `epoch()`: epoch of the map that this shard
        knows.
        """
        self._clock = clock
        self._take_right = take_right
        self._epoch = epoch
        self._life_s = max(options.grant_s, MetaOptions().grant_s) + 2 * CLOCK_SKEW_S
        self._owed: dict[tuple[int, str], int] = {}
        self._removed: dict[int, int] = {}
        """Sessions of clients that were removed -> epoch of the map that removed them."""

    def owe(self, volume: int, lost: dict[str, int]) -> None:
        """Note rights that the volume's record has revoked and the pool map must list."""
        if self._take_right is not None:
            for member, rights in lost.items():
                self._owed[volume, member] = self._owed.get((volume, member), 0) | rights

    def owes(self, volume: int) -> bool:
        return any(number == volume for number, _ in self._owed)

    async def settle(self, volume: int) -> float:
        """Make the stores refuse earlier grants. Return for how many seconds some store may still accept one.

        0: all stores know the revocation. Unavailable: the map cannot be changed now, so all stores may
        accept them.
        """
        until_s = self._clock.boottime_s() + WAIT_S
        unaware: list[int] = []
        for (number, member), rights in list(self._owed.items()):
            if number != volume:
                continue
            request = TakeRightRequest(
                volume=volume, member=member, rights=rights, life_ms=int(self._life_s * 1000)
            )
            try:
                unaware = await self._ask(request, until_s)
            except InvalidRequest as error:  # the supervisor is of an older version
                _log.warning(
                    "stores are not notified that a right to volume %d was taken back: %s", volume, error
                )
                return self._life_s
            except NvpoolError as error:
                raise Unavailable(
                    f"the right is taken back, but the pool map does not say so yet ({error}): stores take "
                    f"grants from before for up to {self._life_s:.0f} s; repeat it",
                    may_be_applied=True,
                ) from None
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
        """Note the ended session of a client that is no longer in the pool."""
        if self._take_right is not None:
            self._removed[session] = self._epoch()

    async def cut_off(self) -> list[int]:
        """Sessions whose removed clients no store serves any more; each session is returned once."""
        if not self._removed:
            return []
        try:
            if await self._take_right(TakeRightRequest(known=max(self._removed.values()))):
                return []
        except NvpoolError as error:
            _log.info("unknown whether all stores disconnected removed clients: %s", error)
            return []
        sessions, self._removed = list(self._removed), {}
        return sessions
