"""Names and attributes that the kernel caches, and which of them a recall invalidates.

* Names: the kernel may cache a name only under a lease, on the inode or on its directory, by which a recall
  comes before the name can stand for anything else. Without a lease the kernel queries each time. Cached
  names are recorded here, to be invalidated. The kernel is not to cache absent names: they could be
  invalidated only under a lock of their directory, which a request of the kernel itself may hold.
* Overtaken notifications: a notification about a name waits for a lock of its directory, and a look-up that
  is being answered may overtake it. So if the kernel opens an inode whose names were invalidated, before it
  has looked the inode up again, the open fails once with ESTALE. Then the kernel walks the path again without
  its caches. So no open ever uses a name from before a recall.
* Attributes: each recall invalidates them; so does each open that finds a `change` that the kernel was not
  given.

Used by `fuse/ops/operations` and its parts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import repeat
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import DirectoryGone
from nvpool.fuse.ops.kernel_cache.notices import Place
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.messages.meta_messages import Attr

SENT_CHANGES_MAX = 1 << 16
"""Inodes whose `change` is recorded as last given to the kernel: 10 MB at most.

Attributes of an inode that fell out are invalidated at its next open.
"""

NAMED_MAX = 1 << 16
"""Recorded names: 12 MB at most. The kernel uses a name that fell out until its timeout."""
NAMED_TOGETHER = 512
"""Names that are recorded, and dropped, as one group."""

WALK_S = 1.0
WALKING_MAX = 1024
"""Threads that were answered ESTALE and repeat the walk immediately."""
ANSWERED_MAX = 4096
"""Removed directories for which the kernel was answered ESTALE once."""


class NameGroup:
    """Names that the kernel was given within a short time, and may use until `until_s`.

    For each: the inode whose recall invalidates it, its directory, the name, and the inode that it stands
    for.
    """

    __slots__ = ("until_s", "names", "_places", "_placed")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.names: list[tuple[int, int, bytes, int]] = []
        self._places: dict[int, list[tuple[int, bytes, int]]] = {}
        self._placed = 0  # entries of `names` that are indexed in `_places`

    def places_of(self, inode: int) -> list[tuple[int, bytes, int]]:
        """Names that a recall of `inode` invalidates: directory, name, and the inode that it stands for."""
        while self._placed < len(self.names):  # indexed on demand: mostly no recall comes
            cover, parent, name, child = self.names[self._placed]
            self._places.setdefault(cover, []).append((parent, name, child))
            self._placed += 1
        return self._places.get(inode, [])

    def take_back(self, inode: int) -> list[tuple[int, bytes, int]]:
        """Return the names of `places_of` and remove them from the record, for a recall."""
        return self.places_of(inode) and self._places.pop(inode)


class CachedNames:
    """Record of the names and attributes that the kernel of one mount may cache."""

    def __init__(self, vfs: Any, options: FuseOptions, clock: Clock, changes: ChangeCount) -> None:
        self._vfs = vfs
        self._options = options
        self._clock = clock
        self._changes = changes
        self.sent_changes: dict[int, int] = {}
        """inode -> change of the attributes that the kernel was last given."""
        self.groups: deque[NameGroup] = deque()
        """Recorded names, the oldest first."""
        self._count = 0  # of names, in all groups but the newest
        self.naming = NameGroup(0.0)
        """The newest group; names are added to it until `naming_until_s`."""
        self.naming_until_s = 0.0
        self.name_is_kept = False
        """Whether the kernel may cache the name of the last result, for options.entry_timeout_s."""
        self.locked: dict[int, int] = {}
        """directory -> number of pending requests that change names in it."""
        self.withdrawn: dict[int, None] = {}
        """Inodes whose names were invalidated and not given to the kernel since."""
        self._walking: dict[int, float] = {}  # thread for which the kernel repeats a path walk -> since when
        self._answered_stale: dict[int, None] = {}  # removed directories, answered ESTALE once

    # -- what the kernel is given --------------------------------------------------------------------------------------

    def record_attr(self, attr: Attr) -> Attr:
        """Record that the kernel is given these attributes."""
        sent = self.sent_changes
        sent[attr.inode] = attr.change
        if len(sent) > SENT_CHANGES_MAX:
            for old in too_old(sent, SENT_CHANGES_MAX):
                del sent[old]
        return attr

    def record_name(self, parent: int, name: bytes, attr: Attr) -> Attr:
        """Record that the kernel is given these attributes for the name.

        It may cache the name if `name_is_kept` is set on return.
        """
        inode = attr.inode
        cover = self._vfs.name_cover(parent, name, inode) if self._options.entry_timeout_s else 0
        self.name_is_kept = cover != 0
        if cover:
            self.record_cached_name(cover, parent, name, inode)
        if self.withdrawn:
            self.withdrawn.pop(inode, None)
        return self.record_attr(attr)

    def record_cached_name(self, cover: int, parent: int, name: bytes, inode: int) -> None:
        """Record that the kernel caches this name, under the lease of the inode `cover`."""
        if self._clock.boottime_s() >= self.naming_until_s or len(self.naming.names) >= NAMED_TOGETHER:
            self.start_group()
        self.naming.names.append((cover, parent, name, inode))

    def record_moved(self, inode: int, parent: int, name: bytes) -> None:
        """Record the new name of a cached inode, after the kernel has renamed it."""
        if inode and self._options.entry_timeout_s and any(group.places_of(inode) for group in self.groups):
            self.record_cached_name(inode, parent, name, inode)

    def record_page(
        self, parent: int, entries: DirectoryPage, first: int, until: int, untrue: Container[int]
    ) -> None:
        """Record several names at a time: the entries from `first` on and before `until`.

        Works as `record_name`. For inodes in `untrue` the kernel was given nothing that it may cache, and
        no attributes.
        """
        inodes = entries.inodes[first:until]
        if self._options.entry_timeout_s:
            if self._clock.boottime_s() >= self.naming_until_s or len(self.naming.names) >= NAMED_TOGETHER:
                self.start_group()
            added = zip(inodes, repeat(parent), entries.names[first:until], inodes, strict=False)
            self.naming.names += [one for one in added if one[0] not in untrue] if untrue else added
        if self.withdrawn:
            for inode in inodes:
                if inode not in untrue:
                    self.withdrawn.pop(inode, None)
        changes = zip(inodes, entries.changes[first:until], strict=True)
        self.sent_changes.update([one for one in changes if one[0] not in untrue] if untrue else changes)
        for old in too_old(self.sent_changes, SENT_CHANGES_MAX):
            del self.sent_changes[old]

    def start_group(self) -> None:
        """Start a new group of names, and drop the groups that the kernel no longer uses."""
        now_s, groups = self._clock.boottime_s(), self.groups
        self._count += len(self.naming.names)
        while groups and (groups[0].until_s <= now_s or self._count > NAMED_MAX):
            self._count -= len(groups.popleft().names)
        kept_s = self._options.entry_timeout_s
        self.naming, self.naming_until_s = NameGroup(now_s + kept_s + kept_s / 4), now_s + kept_s / 4
        groups.append(self.naming)

    # -- changes by other clients --------------------------------------------------------------------------------------

    def withdraw(self, inodes: Iterable[int]) -> dict[Place, None]:
        """Return the names that a recall of `inodes` invalidates, and remove them from the record."""
        names: dict[Place, None] = {}
        for inode in inodes:
            for group in self.groups:
                for parent, name, child in group.take_back(inode):
                    names[parent, name] = None
                    self.withdrawn[child] = None
        self._drop_old_withdrawn()
        return names

    def withdraw_all(self) -> dict[Place, None]:
        """Return all names, and remove them from the record."""
        names: dict[Place, None] = {}
        for group in self.groups:
            for _, parent, name, child in group.names:
                names[parent, name] = None
                self.withdrawn[child] = None
        self._drop_old_withdrawn()
        self.groups.clear()
        self._count, self.naming, self.naming_until_s = 0, NameGroup(0.0), 0.0
        return names

    def _drop_old_withdrawn(self) -> None:
        for old in too_old(self.withdrawn, SENT_CHANGES_MAX):
            del self.withdrawn[old]

    def is_withdrawn(self, inode: int, pid: int = 0) -> bool:
        """Whether the kernel may have reached the inode by a name from before a recall.

        True once for an inode, since the kernel then walks the path again, and once for a thread: `pid` has
        repeated its walk already, and the inode that it found may have been recalled since.
        """
        if (
            self._walking
            and (since_s := self._walking.pop(pid, None)) is not None
            and (self._clock.boottime_s() - since_s < WALK_S)
        ):
            return False
        if not self.withdrawn or inode not in self.withdrawn:
            return False
        del self.withdrawn[inode]
        if pid:
            self._walking[pid] = self._clock.boottime_s()
            for old in too_old(self._walking, WALKING_MAX):
                del self._walking[old]
        return True

    def is_kept(self, inode: int) -> bool:
        """Whether the kernel may cache a name of the inode."""
        now_s = self._clock.boottime_s()
        return any(group.until_s > now_s and group.places_of(inode) for group in self.groups)

    def is_stale(self, directory: int) -> bool:
        """Whether the kernel has to repeat the path walk to a directory that is gone.

        It has to if it may have used a cached name. True only once for a directory: a process that has it
        open, or works in it, reaches it each time.
        """
        withdrawn = self.is_withdrawn(directory)
        if directory in self._answered_stale or (not withdrawn and not self.is_kept(directory)):
            return False
        self._answered_stale[directory] = None
        for old in too_old(self._answered_stale, ANSWERED_MAX):
            del self._answered_stale[old]
        return True

    # -- changes through this mount ------------------------------------------------------------------------------------

    def lock_directory(self, directory: int) -> None:
        """Note a pending request that changes names in `directory`: the kernel locks it until the reply."""
        self.locked[directory] = self.locked.get(directory, 0) + 1

    def unlock_directory(self, directory: int) -> None:
        """Note that a request for which `lock_directory` was called has its reply."""
        count = self.locked.pop(directory) - 1
        if count:
            self.locked[directory] = count

    def directory_gone(self, error: DirectoryGone, *directories: int) -> DirectoryGone:
        """The error for a request that names an entry of a removed directory; mostly ENOENT, once ESTALE."""
        error.may_be_stale = any([self.is_stale(directory) for directory in directories])
        return error

    @contextlib.contextmanager
    def changing(self, *directories: int) -> Iterator[None]:
        """Lock the directories for a change of names in them, and count the change at the end."""
        for directory in directories:
            self.lock_directory(directory)
        try:
            yield
        except DirectoryGone as error:
            raise self.directory_gone(error, *directories) from None
        finally:
            for directory in directories:
                self.unlock_directory(directory)
            self._changes.count += 1
