"""Complete directories: learns all names of a directory in which many names are created.

A kernel looks each name up before it creates the name. Only the shard, or a client that knows all names of
the directory (metadata_cache.CompleteDirectory), knows that a name is absent. With such a client, creating a
name is a single request. A directory that this client created is complete from the start; another one is
listed once some names were created in it, when the listing costs less than the requests that it saves.

The listing runs in the background, in bounded steps. This client's own changes meanwhile are recognized by
the directory's change number; a change by another client ends the recording. A part of the file system class
(vfs/filesystem).
"""

from __future__ import annotations

import asyncio

from nvpool.client.state.metadata_cache import DIVIDED_FLAG
from nvpool.client.vfs.namespace import NamespaceOperations
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


class CompleteDirectories(NamespaceOperations):
    """Learns the names of directories in which this client creates names."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        # directory -> (names created since its last listing, names needed for the next one)
        self._made_names: dict[int, tuple[int, int]] = {}

    def _made_in(self, parent: int, entries: int) -> None:
        made, fewest = self._made_names.pop(parent, (0, MADE_MIN))
        made += 1
        is_due = (
            made >= fewest
            and made * NAMES_FOR_ONE >= entries
            and self.options.leases
            and entries <= self.options.cached_entries // WHOLE_SHARE
        )
        # A listing is in vain if other clients, or many threads here, change the directory; so retries get
        # rarer.
        self._made_names[parent] = (0, fewest * 4) if is_due else (made, fewest)
        if len(self._made_names) > DIRECTORIES_MAX:
            del self._made_names[next(iter(self._made_names))]
        if is_due:
            task = asyncio.get_running_loop().create_task(self._learn_names(parent))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)

    async def _learn_names(self, directory: int) -> None:
        """List all names of the directory. Ends without an error: a later look-up gets the error."""
        try:
            attr = await self._fetch_attr(directory)
            if (
                attr.flags & DIVIDED_FLAG
                or await self._is_spread(directory)
                or self.cache.is_whole(directory)
            ):
                return
            whole = self.cache.begin_whole(attr)
            complete = False
            try:
                # without attributes: a name whose inode is missing exists too, and must be looked up
                request = meta_pb2.ListDirRequest(inode=directory, limit=STEP_NAMES)
                while True:
                    reply = await self._ask_step(request)
                    if not self.cache.put_names(directory, whole, [entry.name for entry in reply.entries]):
                        return
                    if not reply.more or not reply.entries:
                        complete = not reply.more
                        return
                    request.cursor = reply.entries[-1].cursor
            finally:
                self.cache.end_whole(directory, whole, complete)
        except NvpoolError:
            pass
