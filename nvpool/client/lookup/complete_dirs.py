"""Directories in which names are made one after the other: all of their names get known, so that a new one is one question.

A kernel looks each name up before it makes it, and that it is not there only the shard knows, or who knows all names of the
directory (cache.WholeDirectory). Of a directory that was made here they are known; of another one they are listed once some
names were made in it, when that costs less than the questions that it saves. The listing goes on beside, in bounded steps.
What we change meanwhile is known to be ours by the directory's change number, as later; what anybody else changes ends it.
"""

from __future__ import annotations

import asyncio

from nvpool.client.state.attr_cache import DIVIDED_FLAG
from nvpool.client.vfs.names import Names
from nvpool.core.errors import NvpoolError
from nvpool.rpc.v1 import meta_pb2

MADE_MIN = 4
NAMES_FOR_ONE = 16
"""A name costs a shard 2 microseconds in a listing, a question for one that is not there 20, and who asks 100."""
WHOLE_SHARE = 4
"""Of all entries that may be remembered one directory gets the fourth part."""
DIRECTORIES_MAX = 256
STEP_NAMES = 1024


class Wholes(Names):
    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self._made_names: dict[int, tuple[int, int]] = {}  # directory -> since it was last listed; as many as count

    def _made_in(self, parent: int, entries: int) -> None:
        made, fewest = self._made_names.pop(parent, (0, MADE_MIN))
        made += 1
        is_due = (made >= fewest and made * NAMES_FOR_ONE >= entries and self.options.leases
                  and entries <= self.options.cached_entries // WHOLE_SHARE)
        # where others change it too, or many of us at once, it ends in vain: then it is tried ever more seldom
        self._made_names[parent] = (0, fewest * 4) if is_due else (made, fewest)
        if len(self._made_names) > DIRECTORIES_MAX:
            del self._made_names[next(iter(self._made_names))]
        if is_due:
            task = asyncio.get_running_loop().create_task(self._learn_names(parent))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)

    async def _learn_names(self, directory: int) -> None:
        """Ends without an error: who looks up a name meets it."""
        try:
            attr = await self._fetch_attr(directory)
            if attr.flags & DIVIDED_FLAG or await self._is_spread(directory) or self.cache.is_whole(directory):
                return
            whole = self.cache.begin_whole(attr)
            complete = False
            try:
                # names alone: one whose inode is missing is there too, and is to be asked for
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
