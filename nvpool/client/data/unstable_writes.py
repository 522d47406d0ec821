"""Unstable writes of this client, which stores may lose in a power failure.

For each inode the table has the chains with its unstable writes, until their commit. A loss is reported once:
to the caller that asks for the commit, and to the files whose bytes are lost. The table is bounded. Of the
inodes beyond the bound only the chains are kept, and are committed once, for the next caller; the same holds
for all chains if it is not known what the previous process wrote. Used by the writer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from nvpool.client.data.commit import Stored, WrittenAt
from nvpool.core.errors import WritesLost

INODES_MAX = 100_000
PLACES_MAX = 400_000
"""Chains in total over all inodes."""


Noted = tuple[int, int]
"""The number of the last write to a chain, and the chain's epoch before the first one."""


class UnstableWrites:
    """The table of unstable writes.

    `changed` is called with whether there are any; `lost` is called with inodes that have lost some.
    """

    def __init__(
        self, chunks, changed: Callable[[bool], None], lost: Callable[[int], None] = lambda inode: None
    ) -> None:
        self._chunks = chunks
        self._changed = changed
        self._lost = lost
        # inode -> chains with unstable writes of this client
        self._recent: OrderedDict[int, dict[WrittenAt, Noted]] = OrderedDict()
        self._places = 0
        self._noted = 0
        self._nameless: dict[WrittenAt, Noted] = {}
        """Chains of inodes that were dropped from the table."""
        self.unknown = False
        """Whether the previous process may have written anything."""

    def __contains__(self, inode: int) -> bool:
        return self._forgotten or inode in self._recent

    def __bool__(self) -> bool:
        return self._forgotten or bool(self._recent)

    @property
    def _forgotten(self) -> bool:
        return self.unknown or bool(self._nameless)

    def note(self, inode: int, stored: Stored) -> None:
        self.note_at(inode, stored.place, stored.epoch)

    def note_at(self, inode: int, place: WrittenAt, epoch: int) -> None:
        self._noted += 1
        places = self._recent.get(inode)
        if places is None:
            places = self._recent[inode] = {}
            self._changed(True)
        self._places += self._put(places, place, self._noted, epoch)
        if len(self._recent) > INODES_MAX or self._places > PLACES_MAX:
            _, forgotten = self._recent.popitem(last=False)
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
            before = {one: dict(places) for one, places in self._recent.items()}
        else:
            before = {inode: dict(self._recent.get(inode, ()))}
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
            places = self._recent.get(one, {})
            self._places -= self._flushed(places, flushed)
            if not places:
                self._recent.pop(one, None)
            if one != inode and lost & flushed.keys():
                self._lost(one)
        if not self:
            self._changed(False)
        if lost & (nameless.keys() | before.get(inode, {}).keys()):
            raise WritesLost

    @staticmethod
    def _flushed(places: dict[WrittenAt, Noted], flushed: Mapping[WrittenAt, Noted]) -> int:
        """Remove the chains without a write since; return their number."""
        gone = [place for place, noted in flushed.items() if places.get(place) == noted]
        for place in gone:
            del places[place]
        return len(gone)
