"""Directories whose names are looked up in no order: when much of one was asked for by name, the rest is asked for at once.

So reads a loader the files of a directory, each once and at random, and no name tells of the next. A listing brings all of them
with attributes, leases and the rights to read, for a third of what a look-up costs shard and mount, and without waiting. When
it is worth it says `siblings`; it goes on beside the look-ups, in bounded steps, and only for directories of which all can be
remembered. What is known already is left as it is, but for the right to read where that is missing. Used by `together`.
"""

from __future__ import annotations

import asyncio
from itertools import compress

from nvpool.client.vfs.names import Names
from nvpool.core.errors import NvpoolError
from nvpool.core.grants import READ
from nvpool.rpc.messages.direntries import Listed
from nvpool.rpc.v1 import meta_pb2

ENTRIES_MIN = 64
"""In a smaller directory there is nothing to be saved."""
CACHED_SHARE = 4
"""Of all entries that may be remembered one directory gets the fourth part."""
STEP_NAMES = 128
"""In one answer: 1.5 ms of the shard, in which nobody else is answered."""


class Through(Names):
    def look_through(self, parent: int) -> None:
        """Called now and then while names of `parent` have to be asked for one by one."""
        entries = self.cache.entries_of(parent)
        if ENTRIES_MIN <= entries <= self.options.cached_entries // CACHED_SHARE and self.options.leases \
                and self.siblings.is_to_be_known(parent, entries):
            task = asyncio.get_running_loop().create_task(self._go_through(parent, 2 * entries))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)

    async def _go_through(self, parent: int, names_max: int) -> None:
        """Ends without an error: who looks up these names meets it."""
        request = meta_pb2.ListDirRequest(inode=parent, limit=STEP_NAMES, attrs=True, packed=True, rights=READ)
        learned = seen = 0
        try:
            while seen < names_max:
                sent_s = self.clock.boottime_s()
                reply = await self._ask_step(request)
                listed = Listed(reply.packed)
                learned += self._learn(parent, listed, reply, sent_s)
                seen += len(listed)
                if not reply.more or not reply.grants or not listed.names:
                    return  # without the right to read each file would be asked for when it is opened
                request.cursor, request.name = listed.cursor(-1), b""
        except NvpoolError:
            pass
        finally:
            self.siblings.went_through(parent, learned)

    def _learn(self, parent: int, listed: Listed, reply: meta_pb2.ListDirReply, sent_s: float) -> int:
        """Believe of these entries what nobody here knows anything of; how many that are."""
        inodes, opened = listed.inodes, self.cache.open
        if not reply.grants or not reply.lease_ms:
            return 0
        grants = listed.grants(reply.grants)
        outdated = self.leases.outdated(inodes, sent_s)
        new = self.leases.unknown(inodes) - outdated
        if len(new) + len(outdated) < len(inodes):
            for inode, grant in zip(inodes, grants, strict=True):
                if inode not in new and inode not in outdated and self.leases.lacks_grant(inode):
                    self.leases.keep_grant(inode, grant)  # from a listing that did not ask for it
        wanted = [inode in new and inode not in opened and listed.is_promised(at) and bool(listed.changes[at])
                  for at, inode in enumerate(inodes)]
        places = list(compress(range(len(inodes)), wanted))
        part = listed.only(places)
        if not places or not self.cache.put_attrs(part):
            return 0
        leases = self.leases.take_all(part.inodes, reply.lease_ms, sent_s, [grants[at] for at in places])
        self.cache.put_entries(parent, part.names, part.inodes, sent_s, leases)
        return len(places)
