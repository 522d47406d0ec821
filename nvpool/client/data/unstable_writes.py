"""Unstable writes of this client, which stores may lose in a power failure, and their commit.

For each inode `UnstableWrites` has the chains with its unstable writes, until their commit. A loss is
reported once: to the caller that asks for the commit, and to the files whose bytes are lost. The table is
bounded. Of the inodes beyond the bound only the chains are kept, and are committed once, for the next caller;
the same holds for all chains if it is not known what the previous process wrote. Used by the writer.

`StoreCommit` commits chains, on the targets that are in the chain, or join it, at the time of the commit. A
target that came later has copied the bytes and commits them before it counts as a member; a target that is
gone is not waited for. The map says whether the chain still has the bytes (`Chain.intact`): a chain loses
unstable writes only when its last remaining target does, and that target answers nothing before the map says
so. So a map as new as the replies shows all losses before them. Used by the chunk client.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

from nvpool.client.rpc.backoff import at_the_deadline, reason_of
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import DeadlineExceeded, NvpoolError, Stale, Unavailable, WritesLost
from nvpool.core.futures import abandon
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, wire_pb2

PATIENCE_S = 0.5
"""Time for a reply before the pool map is followed: the target may be gone."""
INODES_MAX = 100_000
PLACES_MAX = 400_000
"""Chains in total over all inodes."""

WrittenAt = tuple[int, int]
"""A chain: table and number."""

Noted = tuple[int, int]
"""The number of the last write to a chain, and the chain's epoch before the first one."""


class Stored(NamedTuple):
    """An unstable write to the chain `place`.

    `epoch`: of the chain, before the write; `cut`: the file's truncate number in the write.
    """

    place: WrittenAt
    epoch: int
    cut: int


class StoreCommit:
    """Commits of chains. `call(target, method, message, deadline_s)` sends one request to a target."""

    def __init__(
        self,
        view: PoolView,
        clock: Clock,
        *,
        call: Callable[..., Awaitable],
        pause: Callable[[NvpoolError, int, float], Awaitable[None]],
    ) -> None:
        self._view = view
        self._clock = clock
        self._call = call
        self._pause = pause

    def _members(self, chains: Collection[WrittenAt]) -> set[int]:
        found: set[int] = set()
        for table, number in chains:
            known = self._view.map.table_by_id.get(table)
            if known is not None:
                chain = known.chains[number]
                found.update(chain.targets, chain.joining)
        return found

    def _lost(self, chains: Mapping[WrittenAt, int | None], epoch: int) -> set[WrittenAt] | None:
        """Chains that have lost unstable writes; None if a map of `epoch` is needed to know."""
        if self._view.map.epoch < epoch:
            return None
        tables = self._view.map.table_by_id
        return {
            place
            for place, since in chains.items()
            if since is not None and place[0] in tables and tables[place[0]].chains[place[1]].intact > since
        }

    async def flush(self, chains: Mapping[WrittenAt, int | None], deadline_s: float) -> set[WrittenAt]:
        """Commit all unstable writes to these chains. Return the chains that have lost some of them.

        On return all other writes to the chains, since they had the given epoch, survive a power loss. For a
        chain without a known epoch no loss is found. Unavailable: the deadline has passed.
        """
        # one request per target, even if it is in many of the chains
        asked: dict[int, asyncio.Task] = {}
        tries, reason = 0, None
        try:
            while True:
                members = self._members(chains)
                for target in members - asked.keys():
                    asked[target] = asyncio.get_running_loop().create_task(self._once(target, deadline_s))
                left = {asked[target] for target in members if not asked[target].done()}
                if left:
                    done, _ = await asyncio.wait(
                        {*left, self._view.next}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not done:
                        self._view.follow()
                    if not done & left and self._clock.boottime_s() < deadline_s:
                        continue
                    left -= done
                failed = {
                    target: asked[target].exception()
                    for target in members
                    if asked[target].done() and asked[target].exception() is not None
                }
                if not failed and not left:
                    lost = self._lost(
                        chains, max((asked[target].result().map_epoch for target in members), default=0)
                    )
                    if lost is not None:
                        return lost
                    left_s = deadline_s - self._clock.boottime_s()
                    if left_s <= 0:
                        raise DeadlineExceeded("the pool map for this flush did not arrive in time")
                    if not await self._view.refresh():
                        tries += 1
                        await self._pause(Unavailable(), tries, left_s)
                    continue
                for target, error in failed.items():
                    if not isinstance(error, Stale | Unavailable):
                        raise error
                    tries, reason = tries + 1, reason_of(error, reason)
                    left_s = deadline_s - self._clock.boottime_s()
                    if left_s <= 0:
                        raise at_the_deadline(error, reason) from None
                    del asked[target]
                if failed and not (isinstance(error, Stale) and await self._view.refresh()):
                    await self._pause(error, tries, left_s)
        finally:
            for task in asked.values():
                abandon(task)

    async def _once(self, target: int, deadline_s: float) -> data_pb2.FlushReply:
        request = data_pb2.FlushRequest(map_epoch=self._view.map.epoch, target=target)
        reply = await self._call(target, wire_pb2.DATA_FLUSH, request.SerializeToString(), deadline_s)
        return decoded(data_pb2.FlushReply, reply.message)


class UnstableWrites:
    """The table of unstable writes.

    `changed` is called with whether there are any; `lost` is called with inodes that have lost some.
    """

    def __init__(
        self, chunks, changed: Callable[[bool], None], lost: Callable[[int], None] = lambda inode: None
    ) -> None:
        self._chunks = chunks
        self.on_change = changed
        self._lost = lost
        # inode -> chains with unstable writes of this client
        self.recent: OrderedDict[int, dict[WrittenAt, Noted]] = OrderedDict()
        self._places = 0
        self._noted = 0
        self._nameless: dict[WrittenAt, Noted] = {}
        """Chains of inodes that were dropped from the table."""
        self.unknown = False
        """Whether the previous process may have written anything."""

    def __contains__(self, inode: int) -> bool:
        return self._forgotten or inode in self.recent

    def __bool__(self) -> bool:
        return self._forgotten or bool(self.recent)

    @property
    def _forgotten(self) -> bool:
        return self.unknown or bool(self._nameless)

    def note(self, inode: int, stored: Stored) -> None:
        self.note_at(inode, stored.place, stored.epoch)

    def note_at(self, inode: int, place: WrittenAt, epoch: int) -> None:
        self._noted += 1
        places = self.recent.get(inode)
        if places is None:
            places = self.recent[inode] = {}
            self.on_change(True)
        self._places += self._put(places, place, self._noted, epoch)
        if len(self.recent) > INODES_MAX or self._places > PLACES_MAX:
            _, forgotten = self.recent.popitem(last=False)
            self._places -= len(forgotten)
            for place, noted in forgotten.items():
                self._put(self._nameless, place, *noted)

    @staticmethod
    def _put(places: dict[WrittenAt, Noted], place: WrittenAt, number: int, epoch: int) -> bool:
        """Record a write; return whether the chain is new in `places`."""
        known = places.get(place)
        if known is not None:
            number, epoch = max(number, known[0]), min(epoch, known[1])
        places[place] = number, epoch
        return known is None

    async def flush(self, inode: int) -> None:
        """Commit the inode's stored bytes: on return they survive a power loss.

        WritesLost, once: some were lost.
        """
        # Writes stay recorded until their commit has ended: callers in the meantime must wait for it too.
        nameless, unknown = dict(self._nameless), self.unknown
        if nameless or unknown:
            before = {one: dict(places) for one, places in self.recent.items()}
        else:
            before = {inode: dict(self.recent.get(inode, ()))}
        wanted: dict[WrittenAt, int | None] = dict.fromkeys(
            self._chunks.replicas.all_places() if unknown else ()
        )
        merged: dict[WrittenAt, Noted] = {}
        for places in (nameless, *before.values()):
            for place, noted in places.items():
                self._put(merged, place, *noted)
        lost = await self._chunks.flush(wanted | {place: epoch for place, (_, epoch) in merged.items()})
        if unknown:
            self.unknown = False
        self._flushed(self._nameless, nameless)
        for one, flushed in before.items():
            places = self.recent.get(one, {})
            self._places -= self._flushed(places, flushed)
            if not places:
                self.recent.pop(one, None)
            if one != inode and lost & flushed.keys():
                self._lost(one)
        if not self:
            self.on_change(False)
        if lost & (nameless.keys() | before.get(inode, {}).keys()):
            raise WritesLost

    @staticmethod
    def _flushed(places: dict[WrittenAt, Noted], flushed: Mapping[WrittenAt, Noted]) -> int:
        """Remove the chains without a write since; return their number."""
        gone = [place for place, noted in flushed.items() if places.get(place) == noted]
        for place in gone:
            del places[place]
        return len(gone)
