"""Directory prefetch: lists a directory after many look-ups of its names in random order.

A data loader reads the files of a directory like that, each once and at random, so no name predicts the next
one. A listing brings all names with attributes, leases and the right to read, for a third of the cost of
look-ups at the shard and the mount, and without waiting. `lookup_prefetch` decides when it is worth it. The
listing runs in the background of the look-ups, in bounded steps, and only for directories that fit into the
cache. Cached data is left as it is, except for a missing right to read. Used by `lookup_batcher`.
"""

from __future__ import annotations

from itertools import compress

from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.lookup_prefetch import LookupPrefetch
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.core.errors import NvpoolError
from nvpool.core.grants import READ
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.v1 import meta_pb2

ENTRIES_MIN = 64
"""A smaller directory saves nothing."""
CACHED_SHARE = 4
"""Fraction of the cached entries that one directory may use: a quarter."""
STEP_NAMES = 128
"""Entries in one reply: 1.5 ms of the shard, in which it answers no other client."""


class DirectoryPrefetch:
    """Prefetches whole directories with attributes, leases and rights."""

    def __init__(
        self, parts: ClientParts, stripes: StripedDirectories, lookup_prefetch: LookupPrefetch
    ) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._cache = parts.cache
        self._leases = parts.leases
        self._tasks = parts.tasks
        self._stripes = stripes
        self._lookup_prefetch = lookup_prefetch

    def look_through(self, parent: int) -> None:
        """Start a prefetch of the directory if it is due.

        Called at intervals while names are looked up singly.
        """
        entries = self._cache.entries_of(parent)
        if (
            ENTRIES_MIN <= entries <= self._options.cached_entries // CACHED_SHARE
            and self._options.leases
            and self._lookup_prefetch.is_to_be_known(parent, entries)
        ):
            self._tasks.start(self._go_through(parent, 2 * entries))

    async def _go_through(self, parent: int, names_max: int) -> None:
        """List the directory. Ends without an error: a later look-up gets the error."""
        request = meta_pb2.ListDirRequest(
            inode=parent, limit=STEP_NAMES, attrs=True, packed=True, rights=READ
        )
        learned = seen = 0
        try:
            while seen < names_max:
                sent_s = self._clock.boottime_s()
                reply = await self._stripes.ask_step(request)
                listed = DirectoryPage(reply.packed)
                learned += self._learn(parent, listed, reply, sent_s)
                seen += len(listed)
                if not reply.more or not reply.grants or not listed.names:
                    return  # without the right to read, each open would need a request anyway
                request.cursor, request.name = listed.cursor(-1), b""
        except NvpoolError:
            pass
        finally:
            self._lookup_prefetch.went_through(parent, learned)

    def _learn(self, parent: int, listed: DirectoryPage, reply: meta_pb2.ListDirReply, sent_s: float) -> int:
        """Cache the entries of which nothing is known here; return how many there were."""
        inodes, opened = listed.inodes, self._cache.open
        if not reply.grants or not reply.lease_ms:
            return 0
        grants = listed.grants(reply.grants)
        outdated = self._leases.outdated(inodes, sent_s)
        new = self._leases.unknown(inodes) - outdated
        if len(new) + len(outdated) < len(inodes):
            for inode, grant in zip(inodes, grants, strict=True):
                if inode not in new and inode not in outdated and self._leases.lacks_grant(inode):
                    # the lease came from a listing that did not ask for grants
                    self._leases.keep_grant(inode, grant)
        wanted = [
            inode in new and inode not in opened and listed.is_promised(at) and bool(listed.changes[at])
            for at, inode in enumerate(inodes)
        ]
        places = list(compress(range(len(inodes)), wanted))
        part = listed.only(places)
        if not places or not self._cache.put_attrs(part):
            return 0
        leases = self._leases.take_all(part.inodes, reply.lease_ms, sent_s, [grants[at] for at in places])
        self._cache.put_entries(parent, part.names, part.inodes, sent_s, leases)
        return len(places)
