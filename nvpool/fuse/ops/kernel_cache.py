"""What the kernel keeps of names, attributes and pages, and how it is made to forget: a part of `fuse/ops/operations`.

The kernel answers for itself for as long as it was told to (FuseOptions). What another client changes meanwhile it must not
believe any longer than that, and mostly not that long: the metadata service tells us before it lets others change what there
is a lease on, and we tell the kernel before we say that we know. So the change comes after the kernel has forgotten.

* names are given to the kernel to keep only under a lease, on the inode or on its directory, by which a recall comes before
  the name stands for anything else; without one the kernel asks each time. Names that it keeps are remembered, to be taken
  back; those that are not there it is not to keep (they could be taken back only under a lock of their directory that a
  request of its own may hold).
* a notice about a name waits for a lock of its directory, and a look-up that is being answered may overtake it. So an inode
  whose names were taken back is refused once with ESTALE when it is opened before the kernel has looked it up anew: then the
  kernel walks the path again, without its caches. So no open ever goes by a name from before a recall.
* attributes: each recall invalidates them; each open too, where it finds a `change` that the kernel was not told of.
* pages: at each open the kernel is told to keep them exactly when the inode's `change` is the one under which they were read,
  or written here and nowhere else. While the file is open they are kept as long as there is a lease, which is renewed; where
  there is none, for a second.

Notices go out in a thread and may have to wait there for requests that wait for us, so a recall waits for them for a moment
only. Notice.INC_EPOCH, by which Linux 6.16 forgets all names without a lock, is not used: it unhashes directories, and what is
mounted on top of one (a bind mount, a tmpfs) is then unmounted by the next walk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable
from itertools import repeat
from typing import NamedTuple

from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import DirectoryGone, NvpoolError
from nvpool.fuse.ops.shared_handles import Published
from nvpool.rpc.messages.direntries import Listed
from nvpool.rpc.v1.meta_pb2 import Attr

HAS_XATTRS = 1
"""In Attr.flags."""

SEEN_MAX = 1 << 18
"""Inodes whose pages are remembered: 40 MB at most. The oldest makes room, and loses its pages at its next open."""

TOLD_MAX = 1 << 16
"""Inodes whose last told `change` is remembered, 10 MB at most; attributes that fell out are invalidated at the next open."""

NAMED_MAX = 1 << 16
"""Names that are remembered, 12 MB at most. What fell out the kernel believes for as long as it was told."""
NAMED_TOGETHER = 512
"""Names that are remembered and forgotten as one."""

NOTICE_S = 0.05
"""Mostly it takes 0.1 ms. Longer, and a request is in the way that may itself wait for the change which waits for us. Names in
directories that such a request is known to hold are not waited for: two nodes that remove the names of one directory would wait
for this at each of them."""

NOTICE_LOOKS = 64
"""Times within NOTICE_S that it is looked whether such a request has come meanwhile."""

UNTOLD_S = 1.0
"""For so long at most pages of a file that others may change without our knowledge are kept while it is open."""

LOOK_S = 0.5
"""How often it is looked whether pages of open files are still promised."""
RENEWALS_MAX = 64
"""Leases that are renewed at a time; other pages are dropped, and read anew under a new lease."""

WALK_S = 1.0
WALKING_MAX = 1024
"""Threads that were told ESTALE, and come again at once."""
ANSWERED_MAX = 4096
"""Directories without a name of which the kernel was told once that it is stale."""

Place = tuple[int, bytes]
"""A name: its directory, and itself."""


class FuseOptions(NamedTuple):
    """For how long the kernel answers without asking, in seconds: how old attributes, names and the absence of a name may be
    when another node changed them and could not tell. Changes through this mount are seen at once."""

    attr_timeout_s: float = 1.0
    entry_timeout_s: float = 1.0
    negative_timeout_s: float = 0.0
    """Nobody tells the kernel that a name has come."""
    writeback: bool = False
    """The kernel writes its pages later, and is the only one that changes what is mounted: it reads through any handle, and
    keeps its pages from open to open."""


class _Named:
    """Names that the kernel was told of within a short time, and believes until then: the inode whose recall takes the name
    back, directory, name, and the inode that it stands for."""

    __slots__ = ("until_s", "told", "_places", "_placed")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.told: list[tuple[int, int, bytes, int]] = []
        self._places: dict[int, list[tuple[int, bytes, int]]] = {}
        self._placed = 0  # so many are in there

    def places_of(self, inode: int) -> list[tuple[int, bytes, int]]:
        """Names that its recall takes back: directory, name, and the inode that it stands for."""
        while self._placed < len(self.told):  # mostly nobody ever wants to know
            cover, parent, name, child = self.told[self._placed]
            self._places.setdefault(cover, []).append((parent, name, child))
            self._placed += 1
        return self._places.get(inode, [])

    def take_back(self, inode: int) -> list[tuple[int, bytes, int]]:
        """As `places_of`, for the recall itself: they are not kept any more."""
        return self.places_of(inode) and self._places.pop(inode)


async def _nothing(names: Iterable[Place], inodes: Iterable[int]) -> None:
    """An engine that can not."""


class CachedOps:
    def __init__(self, vfs, options, clock) -> None:
        self._vfs = vfs
        self.options = options
        self._clock = clock
        self._seen: dict[int, tuple[int, bool]] = {}  # inode -> (change of its pages, it had no extended attributes)
        self._told: dict[int, int] = {}  # inode -> change of the attributes that the kernel was last given
        self._named: deque[_Named] = deque()  # the oldest first
        self._named_count = 0
        self._naming = _Named(0.0)  # the last one, to which is added until then
        self._naming_until_s = 0.0
        self.name_is_kept = False
        """Whether the kernel may keep the name that was told last, for options.entry_timeout_s."""
        self._locked: dict[int, int] = {}  # directory -> so many of our requests in work change names in it
        self._withdrawn: dict[int, None] = {}  # inodes whose names were taken back, and not told anew since
        self._walking: dict[int, float] = {}  # thread whose path the kernel walks anew -> since when
        self._answered_stale: dict[int, None] = {}  # directories that are gone
        self._changes = 0  # made through this mount; counted when they are done
        self._paged: dict[int, tuple[float, bool]] = {}  # open inode -> its pages are right until then, by a lease
        self._looking: asyncio.TimerHandle | None = None
        self._renewing = 0
        self._forgetting: set[asyncio.Task] = set()
        self.published = Published()
        vfs.on_recall = self._recalled
        vfs.on_unleased = self._unleased
        vfs.on_lost = self._lost
        vfs.on_reported = self._changed_here

        self.guards_pages = False
        """Set by the engine: the kernel does not look by itself whether pages of open files are old."""
        self.invalidate_attributes: Callable[[int], None] = lambda inode: None
        """Set by the engine: make the kernel ask again for the attributes of an inode. Must not wait."""
        self.invalidate: Callable[[Iterable[Place], Iterable[int]], Awaitable[None]] = _nothing
        """Set by the engine: the kernel asks again for these names, and drops all pages of these inodes. Waits for requests
        that hold the names' directories, and for pages that are being read or written."""

    @property
    def knows_by(self):
        """The client's Vfs, where what is known there may be looked at; None: what is below answers from memory."""
        return self._vfs if hasattr(self._vfs, "cache") else None

    def flags_below(self, flags: int) -> int:
        """The flags of open(2) that count here. A kernel that writes pages back brings them through the handle of any writer,
        and reads through that the rest of a page of which it has a part: so who writes may read. O_APPEND it carries out by
        itself: it alone knows where the file ends, and each of its writes has a place."""
        if self.options.writeback:
            flags &= ~os.O_APPEND
            if flags & os.O_ACCMODE == os.O_WRONLY:
                flags ^= os.O_WRONLY | os.O_RDWR
        return flags

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        """The kernel dropped these inodes (inode, look-ups), and their pages with them."""
        for inode, _ in forgotten:
            self._seen.pop(inode, None)
            self._told.pop(inode, None)

    def _own(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)
        return task

    # -- what it is told -----------------------------------------------------------------------------------------------

    def _telling(self, attr: Attr) -> Attr:
        told = self._told
        told[attr.inode] = attr.change
        if len(told) > TOLD_MAX:
            for old in too_old(told, TOLD_MAX):
                del told[old]
        return attr

    def _telling_name(self, parent: int, name: bytes, attr: Attr) -> Attr:
        """The kernel is told that the name stands for what has these attributes, and keeps that if `name_is_kept`."""
        inode = attr.inode
        cover = self._vfs.name_cover(parent, name, inode) if self.options.entry_timeout_s else 0
        self.name_is_kept = cover != 0
        if cover:
            self._keep_name(cover, parent, name, inode)
        if self._withdrawn:
            self._withdrawn.pop(inode, None)
        return self._telling(attr)

    def _keep_name(self, cover: int, parent: int, name: bytes, inode: int) -> None:
        if self._clock.boottime_s() >= self._naming_until_s or len(self._naming.told) >= NAMED_TOGETHER:
            self._name_anew()
        self._naming.told.append((cover, parent, name, inode))

    def _moving_name(self, inode: int, parent: int, name: bytes) -> None:
        """What the kernel keeps of the inode it keeps by this name from now on, after a rename of its own."""
        if inode and self.options.entry_timeout_s and any(named.places_of(inode) for named in self._named):
            self._keep_name(inode, parent, name, inode)

    def _telling_names(self, parent: int, entries: Listed, first: int, until: int, untrue: Container[int]) -> None:
        """As `_telling_name` of the entries from `first` on and before `until`, all told at once; of those inodes that are
        `untrue` the kernel was told neither what it may keep nor attributes."""
        inodes = entries.inodes[first:until]
        if self.options.entry_timeout_s:
            if self._clock.boottime_s() >= self._naming_until_s or len(self._naming.told) >= NAMED_TOGETHER:
                self._name_anew()
            told = zip(inodes, repeat(parent), entries.names[first:until], inodes, strict=False)
            self._naming.told += [one for one in told if one[0] not in untrue] if untrue else told
        if self._withdrawn:
            for inode in inodes:
                if inode not in untrue:
                    self._withdrawn.pop(inode, None)
        changes = zip(inodes, entries.changes[first:until], strict=True)
        self._told.update([one for one in changes if one[0] not in untrue] if untrue else changes)
        for old in too_old(self._told, TOLD_MAX):
            del self._told[old]

    def _name_anew(self) -> None:
        """Names are remembered apart from those before them; what the kernel has forgotten is forgotten."""
        now_s, all_named = self._clock.boottime_s(), self._named
        self._named_count += len(self._naming.told)
        while all_named and (all_named[0].until_s <= now_s or self._named_count > NAMED_MAX):
            self._named_count -= len(all_named.popleft().told)
        kept_s = self.options.entry_timeout_s
        self._naming, self._naming_until_s = _Named(now_s + kept_s + kept_s / 4), now_s + kept_s / 4
        all_named.append(self._naming)

    # -- what others change --------------------------------------------------------------------------------------------

    async def _recalled(self, inodes: list[int]) -> None:
        """Others are about to change these: on return the kernel knows."""
        names: dict[Place, None] = {}
        paged = []
        for inode in inodes:
            self.published.take_back(inode)
            self.invalidate_attributes(inode)
            for named in self._named:
                for parent, name, child in named.take_back(inode):
                    names[parent, name] = None
                    self._withdrawn[child] = None
            if self._paged.pop(inode, None) is not None:
                paged.append(inode)
        for old in too_old(self._withdrawn, TOLD_MAX):
            del self._withdrawn[old]
        if locked := [place for place in names if place[0] in self._locked]:
            # The kernel takes these back when those requests have ended, which may wait for the very change that waits for us.
            self._own(self.invalidate(locked, ()))
            for place in locked:
                del names[place]
        telling = self._own(self.invalidate(names, ())) if names else None
        dropping = self._own(self.invalidate((), paged)) if paged else None
        if dropping is not None:
            await asyncio.wait((dropping,), timeout=NOTICE_S)
        looks = 0
        while telling is not None and not telling.done() and looks < NOTICE_LOOKS and not any(
                parent in self._locked for parent, _ in names):  # the kernel locks a directory before we hear of the request
            await asyncio.wait((telling,), timeout=NOTICE_S / NOTICE_LOOKS)
            looks += 1

    def _unleased(self) -> None:
        """The leases by which the kernel keeps names have ended, with no recall."""
        names: dict[Place, None] = {}
        for named in self._named:
            for _, parent, name, child in named.told:
                names[parent, name] = None
                self._withdrawn[child] = None
        for old in too_old(self._withdrawn, TOLD_MAX):
            del self._withdrawn[old]
        self._named.clear()
        self._named_count, self._naming, self._naming_until_s = 0, _Named(0.0), 0.0
        if names:
            self._own(self.invalidate(names, ()))

    def _lock(self, directory: int) -> None:
        """A request that changes names in it is in work: the kernel holds its lock until that is answered."""
        self._locked[directory] = self._locked.get(directory, 0) + 1

    def _unlock(self, directory: int) -> None:
        count = self._locked.pop(directory) - 1
        if count:
            self._locked[directory] = count

    def _is_withdrawn(self, inode: int, pid: int = 0) -> bool:
        """Whether the kernel may have come to the inode by a name from before a recall. Once for an inode, since it then walks
        the path anew, and once for a thread: `pid` has walked anew already, and what it found may be changed since."""
        if self._walking and (since_s := self._walking.pop(pid, None)) is not None and (
                self._clock.boottime_s() - since_s < WALK_S):
            return False
        if not self._withdrawn or inode not in self._withdrawn:
            return False
        del self._withdrawn[inode]
        if pid:
            self._walking[pid] = self._clock.boottime_s()
            for old in too_old(self._walking, WALKING_MAX):
                del self._walking[old]
        return True

    def _is_kept(self, inode: int) -> bool:
        """Whether the kernel may keep a name of the inode."""
        now_s = self._clock.boottime_s()
        return any(named.until_s > now_s and named.places_of(inode) for named in self._named)

    def _is_stale(self, directory: int) -> bool:
        """Whether the kernel is to walk the path anew that led to a directory which is gone: it may have gone by a name that it
        keeps. Once: who has it open, or works in it, gets there each time."""
        withdrawn = self._is_withdrawn(directory)
        if directory in self._answered_stale or (not withdrawn and not self._is_kept(directory)):
            return False
        self._answered_stale[directory] = None
        for old in too_old(self._answered_stale, ANSWERED_MAX):
            del self._answered_stale[old]
        return True

    def _gone(self, error: DirectoryGone, *directories: int) -> DirectoryGone:
        """What a request for a name in a directory that is gone is answered: mostly that there is no such name."""
        error.may_be_stale = any([self._is_stale(directory) for directory in directories])
        return error

    @contextlib.contextmanager
    def _changing_names(self, *directories: int):
        for directory in directories:
            self._lock(directory)
        try:
            yield
        except DirectoryGone as error:
            raise self._gone(error, *directories) from None
        finally:
            for directory in directories:
                self._unlock(directory)
            self._changes += 1

    def _told_of_before(self, inodes: Iterable[int]) -> None:
        """Of these open files the kernel may have what we have not told it, and what was changed since."""
        for inode in inodes:
            self.invalidate_attributes(inode)
        if self.guards_pages and inodes:
            self._own(self.invalidate((), inodes))

    def _lost(self, inode: int) -> None:
        """The locks on the inode are gone: who has it open must not even read what the kernel has of it."""
        self._own(self.invalidate((), (inode,)))

    # -- pages -----------------------------------------------------------------------------------------------------------

    def _changed_here(self, inode: int, change: int) -> None:
        """A change of ours, and nothing but the bytes that went through the kernel's pages, has brought the inode to `change`.
        If it is the only one since the pages were read, they are still right."""
        seen = self._seen.get(inode)
        if seen is not None and seen[0] == change - 1:
            self._seen[inode] = change, seen[1]

    def _keeps_pages(self, attr: Attr) -> bool:
        """Whether the pages that the kernel has are those of now; from now on it has such."""
        seen = self._seen
        before = seen.pop(attr.inode, None)
        seen[attr.inode] = attr.change, not attr.flags & HAS_XATTRS
        if len(seen) > SEEN_MAX:
            for inode in too_old(seen, SEEN_MAX):
                del seen[inode]
        return before is not None and before[0] == attr.change

    def _paging(self, inode: int) -> None:
        """The kernel gets pages of the open inode, and asks no more before it reads them again."""
        if not self.guards_pages:
            return
        until_s = self._vfs.lease_until_s(inode)
        if until_s:
            self._paged[inode] = until_s, True
        else:
            self._paged[inode] = self._clock.boottime_s() + min(self.options.attr_timeout_s, UNTOLD_S), False
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_pages)

    def _look_at_pages(self) -> None:
        self._looking = None
        now_s = self._clock.boottime_s()
        dropped = []
        for inode, (until_s, leased) in list(self._paged.items()):
            if until_s > now_s:
                continue
            lease_s = self._vfs.lease_until_s(inode)
            if lease_s > now_s and leased:
                self._paged[inode] = lease_s, True
                continue
            del self._paged[inode]
            self.published.take_back(inode)
            if not self._vfs.is_open(inode):
                continue  # who opens it next compares
            if leased and self._renewing < RENEWALS_MAX:
                self._renewing += 1
                self._own(self._renew(inode))
            else:
                dropped.append(inode)
        if dropped:
            self._own(self.invalidate((), dropped))
        if self._paged:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_pages)

    async def _renew(self, inode: int) -> None:
        """The lease has run out by itself: mostly nothing has changed, and pages need not be read again for that."""
        try:
            attr = await self._vfs.getattr(inode)
            seen = self._seen.get(inode)
            if seen is not None and seen[0] == attr.change and self._vfs.lease_until_s(inode):
                self._paging(inode)
                return
        except NvpoolError:
            pass  # who reads the file meets it
        finally:
            self._renewing -= 1
        await self.invalidate((), (inode,))
