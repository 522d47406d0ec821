"""Look-up batching: one message per shard for all look-ups of an event-loop iteration.

No task is created for a look-up. This helps a mount on which many threads open files that are not cached. It
is the fast path: it needs a session, a connection and a watch at the shard, and a name whose inode is at the
same shard, or which does not exist. In every other case, and for every other reply, the look-up takes the
path of a single look-up (`Lookups.find`), which alone retries and reports errors: asking twice changes
nothing. Used by fuse/ops/operations.
"""

from __future__ import annotations

import asyncio

from nvpool.client.state.metadata_cache import DIVIDED_FLAG, typed_attr
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.directory_prefetch import DirectoryPrefetch
from nvpool.client.vfs.namespace import Lookups
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.core.errors import CorruptFrame, DeadlineExceeded, NotFound
from nvpool.core.futures import ImmediateFuture
from nvpool.core.grants import READ, allows
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2, wire_pb2

TOGETHER_MAX = 64
"""Names in one message: they take the shard a millisecond."""


class PendingLookup(ImmediateFuture):
    """A submitted look-up of `name` in `parent`. The outcome is an Attr, or an error of `lookup`."""

    __slots__ = ("parent", "name", "task")

    def __init__(self, parent: int, name: bytes) -> None:
        self.on_end = self.outcome = self.then = None
        self.parent = parent
        self.name = name
        self.task: asyncio.Task | None = None

    def cancel(self) -> bool:
        if self.task is not None:
            self.task.cancel()
        return super().cancel()


class LookupBatcher:
    """The look-up operations that are submitted in batches."""

    def __init__(
        self,
        parts: ClientParts,
        stripes: StripedDirectories,
        lookups: Lookups,
        directories: DirectoryPrefetch,
    ) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._meta = parts.meta
        self._cache = parts.cache
        self._leases = parts.leases
        self._inodes = parts.inodes
        self._tasks = parts.tasks
        self._stripes = stripes
        self._lookups = lookups
        self._lookup_prefetch = lookups.prefetch
        self._directories = directories
        # shard -> (inode that determines the shard, whether by the name, look-up)
        self._gathered: dict[int, list[tuple[int, bool, PendingLookup]]] = {}
        self._holding = False

    def hold(self) -> None:
        """Gather the look-ups that begin before `send`, which is called in the same event-loop iteration."""
        self._holding = True

    def send(self) -> None:
        """Send the gathered look-ups."""
        self._holding = False
        if self._gathered:
            self._send_gathered()

    def begin_lookup(self, parent: int, name: bytes) -> PendingLookup | None:
        """Submit `lookup` without a task, in a batch with the others of this event-loop iteration.

        None: there was no side effect, and the caller must await `lookup`. The caller has tried `lookup_now`
        before.
        """
        if (
            len(name) > NAME_BYTES_MAX
            or self._lookup_prefetch.coming(parent) is not None
            or self._cache.is_missed(parent, name)
        ):
            return None
        found = self._stripes.place_now(parent, name)
        if found is None:
            return None
        place, spread = found
        shard = self._meta.shard_of(place)
        gathered = self._gathered.get(shard)
        if (gathered is None and not self._meta.is_ready(shard)) or not self._lookup_prefetch.missed_alone(
            parent, name
        ):
            return None
        if self._lookup_prefetch.is_time_to_look(parent):
            self._directories.look_through(parent)
        asked = PendingLookup(parent, name)
        if gathered is None:
            if not self._gathered and not self._holding:
                asyncio.get_running_loop().call_soon(self._send_gathered)
            gathered = self._gathered[shard] = []
        gathered.append((place, spread, asked))
        if len(gathered) >= TOGETHER_MAX:
            self._send_names(shard, self._gathered.pop(shard))
        return asked

    def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for shard, names in gathered.items():
            self._send_names(shard, names)

    def _send_names(self, shard: int, names: list[tuple[int, bool, PendingLookup]]) -> None:
        order: dict[tuple[int, bool], list[PendingLookup]] = {}
        for _, spread, asked in names:
            if asked.outcome is None:
                order.setdefault((asked.parent, spread), []).append(asked)
        if not order:
            return
        request = meta_pb2.LookupManyRequest(rights=READ)
        for (parent, spread), some in order.items():
            request.directories.add(parent=parent, names=[asked.name for asked in some], spread=spread)
        all_asked = [asked for some in order.values() for asked in some]
        sent_s = self._clock.boottime_s()

        def answered(reply, error: BaseException | None) -> None:
            self._names_answered(all_asked, sent_s, reply, error)

        if not self._meta.submit(shard, wire_pb2.META_LOOKUP_MANY, request, answered):
            self._names_answered(all_asked, sent_s, None, None)

    def _names_answered(
        self, all_asked: list[PendingLookup], sent_s: float, reply, error: BaseException | None
    ) -> None:
        found = ()
        if reply is not None:
            try:
                found = decoded(meta_pb2.LookupManyReply, reply.message).found
            except CorruptFrame:
                pass  # the single look-ups find the error again, with a reason
        if len(found) != len(all_asked):
            for asked in all_asked:
                if isinstance(error, DeadlineExceeded):
                    asked.end(None, error)
                else:
                    self._ask_alone(asked)
            return
        for asked, one in zip(all_asked, found, strict=True):
            if asked.outcome is not None:
                continue
            try:
                self._believe(asked, one, sent_s)
            except Exception as error:  # concerns this one name
                asked.end(None, error)

    def _believe(self, asked: PendingLookup, one: meta_pb2.FoundName, sent_s: float) -> None:
        code = one.error
        if code == NotFound.wire_code:
            self._cache.put_entry(asked.parent, asked.name, 0, sent_s)
            asked.end(None, NotFound())
            return
        entry = one.entry
        if code or entry.elsewhere:
            self._ask_alone(asked)
            return
        cache, attr = self._cache, typed_attr(entry.attr)
        inode = attr.inode
        if inode in cache.open or attr.flags & DIVIDED_FLAG:
            attr = self._inodes.take(entry)
            cache.put_entry(asked.parent, asked.name, inode, sent_s, self._inodes.take_lease(entry, sent_s))
            file = cache.open.get(inode)
            if file is not None and file.written is not None:
                self._ask_alone(asked)  # the look-up must wait until local writes are reported
                return
        else:  # fast path of the same, for an inode that is not open here
            attr = cache.put_closed(attr, inode, self._leases.now_s())
            lease_ms, lease = entry.lease_ms, None
            if lease_ms:
                grant = entry.grant
                lease = self._leases.take(inode, lease_ms, sent_s, grant if allows(grant, READ) else b"")
            cache.put_entry(asked.parent, asked.name, inode, sent_s, lease)
        asked.end(attr, None)

    def _ask_alone(self, asked: PendingLookup) -> None:
        if asked.outcome is not None:
            return
        asked.task = self._tasks.start(self._find_for(asked))

    async def _find_for(self, asked: PendingLookup) -> None:
        try:
            attr = await self._lookups.find(
                asked.parent, asked.name, self._lookups.name_s, self._options.fresh_s
            )
        except asyncio.CancelledError as error:
            asked.end(None, error)
            raise
        except Exception as error:
            asked.end(None, error)
        else:
            asked.end(attr, None)
