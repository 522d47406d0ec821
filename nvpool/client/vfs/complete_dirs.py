"""Complete directories: learns all names of a directory in which many names are created.

A kernel looks each name up before it creates the name. Only the shard, or a client that knows all names of
the directory (metadata_cache.CompleteDirectory), knows that a name is absent. With such a client, creating a
name is a single request. A directory that this client created is complete from the start; another one is
listed once some names were created in it, when the listing costs less than the requests that it saves.

The listing runs in the background, in bounded steps. This client's own changes meanwhile are recognized by
the directory's change number; a change by another client ends the recording. Used by vfs/namespace.
"""

from __future__ import annotations

from nvpool.client.state.metadata_cache import DIVIDED_FLAG
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.core.errors import NvpoolError
from nvpool.rpc.v1 import meta_pb2

MADE_MIN = 4
NAMES_FOR_ONE = 16
"""Names that may be listed to save one request for an absent name.

A name costs a shard 2 microseconds in a listing; a request for an absent name costs the shard 20, and the
client 100.
"""
WHOLE_SHARE = 4
"""Fraction of the cached entries that one directory may use: a quarter."""
DIRECTORIES_MAX = 256
STEP_NAMES = 1024


class CompleteDirectories:
    """Learns the names of directories in which this client creates names."""

    def __init__(self, parts: ClientParts, stripes: StripedDirectories) -> None:
        self._options = parts.options
        self._cache = parts.cache
        self._inodes = parts.inodes
        self._tasks = parts.tasks
        self._stripes = stripes
        # directory -> (names created since its last listing, names needed for the next one)
        self.made_names: dict[int, tuple[int, int]] = {}

    def made_in(self, parent: int, entries: int) -> None:
        """Record a name that was created in a directory that is not complete. `entries`: its new size."""
        made, fewest = self.made_names.pop(parent, (0, MADE_MIN))
        made += 1
        is_due = (
            made >= fewest
            and made * NAMES_FOR_ONE >= entries
            and self._options.leases
            and entries <= self._options.cached_entries // WHOLE_SHARE
        )
        # A listing is in vain if other clients, or many threads here, change the directory; so retries get
        # rarer.
        self.made_names[parent] = (0, fewest * 4) if is_due else (made, fewest)
        if len(self.made_names) > DIRECTORIES_MAX:
            del self.made_names[next(iter(self.made_names))]
        if is_due:
            self._tasks.start(self._learn_names(parent))

    async def _learn_names(self, directory: int) -> None:
        """List all names of the directory. Ends without an error: a later look-up gets the error."""
        try:
            attr = await self._inodes.fetch(directory)
            if (
                attr.flags & DIVIDED_FLAG
                or await self._stripes.is_spread(directory)
                or self._cache.is_whole(directory)
            ):
                return
            whole = self._cache.begin_whole(attr)
            complete = False
            try:
                # without attributes: a name whose inode is missing exists too, and must be looked up
                request = meta_pb2.ListDirRequest(inode=directory, limit=STEP_NAMES)
                while True:
                    reply = await self._stripes.ask_step(request)
                    if not self._cache.put_names(directory, whole, [entry.name for entry in reply.entries]):
                        return
                    if not reply.more or not reply.entries:
                        complete = not reply.more
                        return
                    request.cursor = reply.entries[-1].cursor
            finally:
                self._cache.end_whole(directory, whole, complete)
        except NvpoolError:
            pass
