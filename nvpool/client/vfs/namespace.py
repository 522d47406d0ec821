"""Operations on names: look-up, create, remove, rename and link.

Each operation is one message to the metadata service. Look-ups use the cache where a lease covers the name.
"""

from __future__ import annotations

import asyncio
import stat
from functools import partial
from typing import Any

from nvpool.client.rpc.change_fast_path import OnEnd, SentChange, SubmittedChange
from nvpool.client.state.vfs_types import RENAME_EXCHANGE, RENAME_NOREPLACE, Caller
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.complete_dirs import CompleteDirectories
from nvpool.client.vfs.listing import ListingPages
from nvpool.client.vfs.lookup_prefetch import LookupPrefetch
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.core.errors import (
    AccessDenied,
    Damaged,
    InvalidRequest,
    NameTooLong,
    NotFound,
    NvpoolError,
    WritesLost,
)
from nvpool.core.grants import READ
from nvpool.core.units import NAME_BYTES_MAX, SYMLINK_BYTES_MAX
from nvpool.rpc.messages.direntries import NOTHING_LISTED
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.v1 import meta_pb2, wire_pb2

ELSEWHERE_MAX = 4
"""Look-ups of a name whose inode another shard has but does not know any more.

Such a name comes and goes, or it is damaged.
"""
COMING_S = 0.1
"""Wait for a reply in flight that may contain the name. After it, the name is looked up alone.

Such a reply takes four milliseconds.
"""


def is_name(name: bytes) -> bool:
    return (
        0 < len(name) <= NAME_BYTES_MAX
        and b"/" not in name
        and b"\0" not in name
        and name not in (b".", b"..")
    )


def create_request(
    parent: int, name: bytes, mode: int, caller: Caller, **fields: Any
) -> meta_pb2.CreateRequest:
    """The request that creates an inode, with the caller's umask applied to `mode`, which includes the type.

    The umask does not count for symbolic links. `fields`: further fields of the request.
    """
    masked = caller.masked(mode) if not stat.S_ISLNK(mode) else 0
    return meta_pb2.CreateRequest(parent=parent, name=name, mode=mode ^ masked, masked=masked, **fields)


def check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise NameTooLong
    if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise InvalidRequest(f"{name!r} is not a name for an entry of a directory")


class Lookups:
    """Look-ups of single names, from the cache or by a request."""

    def __init__(self, parts: ClientParts, stripes: StripedDirectories, pages: ListingPages) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._cache = parts.cache
        self._inodes = parts.inodes
        self._unreported = parts.unreported
        self._tasks = parts.tasks
        self._stripes = stripes
        self._pages = pages
        self.prefetch = LookupPrefetch(parts.clock, self._look_on)
        # With leases the client is notified before a directory changes, so it knows which names are absent;
        # without leases an absent name is trusted for `fresh_s`.
        self.name_s = self.absent_s = 0.0 if parts.options.leases else parts.options.fresh_s

    async def lookup(self, parent: int, name: bytes) -> Attr:
        """Look up a name; return the attributes of its inode.

        The name is current; for a client without leases it was current within the last `fresh_s`. The
        attributes were current within the last `fresh_s` or are covered by a lease. NotFound, NotADirectory,
        NameTooLong.
        """
        if self._cache.is_absent(parent, name, self.absent_s):
            raise NotFound
        return await self.find(parent, name, self.name_s, self._options.fresh_s)

    def lookup_now(self, parent: int, name: bytes) -> Attr | None:
        """As `lookup`, from the cache alone; None if a request is needed.

        NotFound: the name is known to be absent.
        """
        inode = self._cache.entry(parent, name, self.name_s)
        if inode == 0 or (inode is None and self._cache.is_absent(parent, name, self.absent_s)):
            raise NotFound
        attr = self.getattr_now(inode) if inode is not None else None
        if attr is not None:
            self.prefetch.hit(parent, name)
        return attr

    def name_cover(self, parent: int, name: bytes, inode: int) -> int:
        """The inode whose lease covers a name that was looked up or created just now.

        That is the inode of the name or of the directory. A recall of that lease precedes every change of
        what the name stands for. 0: no lease covers the name.
        """
        return self._cache.cover(parent, name, inode)

    def getattr_now(self, inode: int) -> Attr | None:
        """As `getattr`, from the cache alone; None if a request is needed."""
        file = self._cache.open.get(inode)
        if file is not None and file.written is not None and file.written.unsettled:
            return None
        attr = self._cache.attr(inode, self._options.fresh_s)
        return None if attr is None else self._unreported.merged(attr)

    async def walk(self, parent: int, name: bytes) -> Attr:
        """Look up a component of a path, as `lookup`, from results at most `attr_s` old."""
        return await self.find(parent, name, self._options.attr_s, self._options.attr_s)

    async def look(self, parent: int, name: bytes) -> Attr:
        """Look up a file that is to be opened, as `lookup`. The attributes are current now."""
        return await self.find(parent, name, 0.0, 0.0)

    async def find(self, parent: int, name: bytes, name_s: float, age_s: float) -> Attr:
        """Look up a name. Without a lease the name may be `name_s` old and the attributes `age_s`."""
        if len(name) > NAME_BYTES_MAX:
            raise NameTooLong
        attr = await self._found_here(parent, name, name_s, age_s)
        if attr is None and (coming := self.prefetch.coming(parent)) is not None:
            await asyncio.wait((coming,), timeout=COMING_S)
            attr = await self._found_here(parent, name, name_s, age_s)
        if attr is not None:
            self.prefetch.hit(parent, name)
            return self._unreported.merged(attr)
        count = self.prefetch.missed(parent, name)
        attr = await (self.look_up(parent, name) if count == 1 else self._look_ahead(parent, name, count))
        file = self._cache.open.get(attr.inode)
        if file is not None and file.written is not None:
            await self._unreported.settle(attr.inode)
            attr = file.attr
        return self._unreported.merged(attr)

    async def _found_here(self, parent: int, name: bytes, name_s: float, age_s: float) -> Attr | None:
        """Look up in the cache alone; None if a request is needed.

        NotFound: the name is known to be absent.
        """
        inode = self._cache.entry(parent, name, name_s)
        if inode == 0:
            raise NotFound
        if inode is None:
            return None
        await self._unreported.settle(inode)
        return self._cache.attr(inode, age_s)

    async def look_up(self, parent: int, name: bytes) -> Attr:
        """Look up a name by a request. The result lacks this client's unreported writes. NotFound."""
        if self._cache.is_missed(parent, name):
            # Asking whether the directory has changed costs the same as asking for the name, and brings a
            # lease on the directory, which covers the next look-up.
            await self._inodes.fetch(parent)
            if self._cache.is_absent(parent, name, self._options.fresh_s):
                raise NotFound
        # with the right to read: most callers that look up a file open it next
        request = meta_pb2.LookupRequest(parent=parent, name=name, rights=READ)
        for _ in range(ELSEWHERE_MAX):
            sent_s = self._clock.boottime_s()
            try:
                entry = await self._stripes.ask_name(wire_pb2.META_LOOKUP, request, meta_pb2.Entry)
            except NotFound:
                self._cache.put_entry(parent, name, 0, sent_s)
                raise
            if not entry.elsewhere:
                attr = self._inodes.take(entry)
                self._cache.put_entry(
                    parent, name, attr.inode, sent_s, self._inodes.take_lease(entry, sent_s)
                )
                return attr
            try:
                attr = await self._inodes.fetch(entry.attr.inode, READ)
            except NotFound:
                continue  # the name has gone since, or stands for something else
            # No lease is passed: the directory's lease or an earlier lease on the inode covers the name, but
            # a lease on the inode that began after the request for the name does not.
            self._cache.put_entry(parent, name, attr.inode, sent_s)
            return attr
        raise NotFound

    async def _look_ahead(self, parent: int, name: bytes, count: int) -> Attr:
        """As `look_up`; also fetch the names that follow this one in listing order."""
        request = meta_pb2.ListDirRequest(inode=parent, name=name, limit=count, attrs=True, packed=True)
        listed, more = NOTHING_LISTED, False
        try:
            listed, more, lease_ms, sent_s = await self._pages.fetch(request)
            self._pages.cache_page(parent, listed, lease_ms, sent_s)
            if name in listed.names:
                return listed.attr(listed.names.index(name))
        except (AccessDenied, Damaged):
            # One of the following names is damaged, or the caller may search the directory but not list it:
            # look up this name alone.
            pass
        finally:
            self.prefetch.asked(parent, listed, more)
        return await self.look_up(parent, name)

    def _look_on(self, parent: int, cursor: int, count: int) -> asyncio.Task:
        """Prefetch the names behind those that are looked up in order. The task ends without an error."""

        async def ask() -> None:
            listed, more = NOTHING_LISTED, False
            try:
                request = meta_pb2.ListDirRequest(
                    inode=parent, cursor=cursor, limit=count, attrs=True, packed=True
                )
                listed, more, lease_ms, sent_s = await self._pages.fetch(request)
                self._pages.cache_page(parent, listed, lease_ms, sent_s)
            except NvpoolError:
                pass  # a look-up of these names gets the error
            finally:
                self.prefetch.asked(parent, listed, more)

        return self._tasks.start(ask())


class NamespaceOperations:
    """The operations that create, remove, rename and link names."""

    def __init__(
        self,
        parts: ClientParts,
        stripes: StripedDirectories,
        complete_dirs: CompleteDirectories,
        lookups: Lookups,
    ) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._meta = parts.meta
        self._cache = parts.cache
        self._writer = parts.writer
        self._inodes = parts.inodes
        self._unreported = parts.unreported
        self._stripes = stripes
        self._complete_dirs = complete_dirs
        self._lookups = lookups

    async def readlink(self, inode: int) -> bytes:
        request = meta_pb2.ReadLinkRequest(inode=inode)
        return (await self._meta.ask(inode, wire_pb2.META_READLINK, request, meta_pb2.ReadLinkReply)).target

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attr:
        """Create a regular file, fifo, socket or device node; `mode` includes the type. AlreadyExists."""
        if not stat.S_IFMT(mode):
            mode |= stat.S_IFREG
        return await self._birth(parent, name, mode, caller, rdev=rdev)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller, wide: bool = False) -> Attr:
        """Create a directory. `wide` makes it a striped directory.

        The names of a striped directory are spread over all partitions, for directories with very many names.
        """
        return await self._birth(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller, wide=wide)

    async def make_volume(self, parent: int, name: bytes, mode: int, policy: meta_pb2.VolumePolicy) -> Attr:
        """Create the directory of a new volume, owned by root. AlreadyExists."""
        return await self._birth(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), Caller(0, 0), volume=policy)

    def forget_name(self, parent: int, name: bytes, inode: int) -> None:
        """Drop a name and its inode from the cache.

        For a caller that has removed them by other means than a request of this object.
        """
        self._cache.forget_entry(parent, name)
        self._cache.forget_attr(parent)
        self._cache.forget_attr(inode)
        self._cache.forget_whole(parent)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        if len(target) > SYMLINK_BYTES_MAX:
            raise NameTooLong("a symbolic link holds at most 4,095 bytes")
        if not target:
            raise NotFound("a symbolic link to nothing")
        return await self._birth(parent, name, stat.S_IFLNK | 0o777, caller, target=target)

    async def _birth(self, parent: int, name: bytes, mode: int, caller: Caller, **fields) -> Attr:
        check_name(name)
        request = create_request(parent, name, mode, caller, exclusive=True, **fields)
        reply, sent_s = await self.send_create(request, caller)
        attr = self._inodes.take(reply.entry)
        self.named(parent, name, attr.inode, sent_s, reply, self._inodes.take_lease(reply.entry, sent_s))
        if stat.S_ISDIR(mode) and reply.HasField("parent"):  # not a replayed reply, which may be old
            self._cache.born_directory(attr)
        return attr

    async def send_create(
        self, request: meta_pb2.CreateRequest, caller: Caller
    ) -> tuple[meta_pb2.CreateReply, float]:
        """Create the name at its shard, exactly once. Return the reply and the time of sending.

        The name is dropped from the cache; `named` caches what the reply says of it. An unnamed file is created at
        the shard of its parent.
        """
        place, sent_s = request.parent, self._clock.boottime_s()
        if not request.unnamed:
            self._cache.forget_entry(request.parent, request.name)
            place, request.spread = await self._stripes.place(request.parent, request.name)
        reply = await self._meta.change(
            place,
            wire_pb2.META_CREATE,
            request,
            meta_pb2.CreateReply,
            uid=caller.uid,
            gid=caller.gid,
            once=True,
        )
        return reply, sent_s

    def begin_create(
        self, request: meta_pb2.CreateRequest, caller: Caller, unique: int, on_end: OnEnd
    ) -> SubmittedChange | None:
        """As `send_create`, without a task: `on_end` gets the reply or the error. None: no side effect.

        Declines names of striped directories, and whatever MetaClient.begin declines. `unique`: the number of the
        kernel's request.
        """
        parent = request.parent
        if not self._stripes.is_together(parent):
            return None
        begun = self._meta.begin(
            parent,
            wire_pb2.META_CREATE,
            request,
            meta_pb2.CreateReply,
            on_end,
            uid=caller.uid,
            gid=caller.gid,
            unique=unique,
        )
        if begun is not None:
            self._cache.forget_entry(parent, request.name)
        return begun

    def go_on_creating(self, sent: SentChange, parent: int, unique: int, on_end: OnEnd) -> SubmittedChange:
        """Continue a create in `parent` that was already sent, as if `begin_create` had sent it."""
        return self._meta.go_on_with(
            sent,
            parent,
            wire_pb2.META_CREATE,
            meta_pb2.CreateRequest,
            meta_pb2.CreateReply,
            on_end,
            unique,
        )

    def named(self, parent: int, name: bytes, inode: int, sent_s: float, reply=None, lease=None) -> None:
        """Cache that the name stands for `inode` (0: nothing) after this client's change, sent at `sent_s`.

        The reply may bring the directory's attributes, which a kernel asks for next.
        """
        self._cache.put_own_entry(parent, name, inode, sent_s, lease)
        if reply is not None and reply.HasField("parent"):
            self._cache.named_in_whole(reply.parent, parent, name, inode != 0)
            self._cache.put_attr(reply.parent)
            if inode and not self._cache.is_whole(parent):
                self._complete_dirs.made_in(parent, reply.parent.size)
        else:
            self._cache.named_in_whole(None, parent, name, inode != 0)
            self._cache.forget_attr(parent)

    async def link(self, inode: int, parent: int, name: bytes, caller: Caller) -> Attr:
        check_name(name)
        request = meta_pb2.LinkRequest(inode=inode, parent=parent, name=name)
        self._cache.forget_entry(parent, name)
        self._cache.forget_attr(inode)
        sent_s = self._clock.boottime_s()
        entry = await self._meta.change(
            inode, wire_pb2.META_LINK, request, meta_pb2.Entry, uid=caller.uid, gid=caller.gid, once=True
        )
        self._inodes.take(entry)
        self.named(parent, name, inode, sent_s, lease=self._inodes.take_lease(entry, sent_s))
        return self._unreported.merged(entry.attr)

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        check_name(name)
        await self._remove(parent, name, wire_pb2.META_UNLINK, caller)

    def begin_unlink(
        self, parent: int, name: bytes, caller: Caller, unique: int, on_end: OnEnd
    ) -> SubmittedChange | None:
        """Submit `unlink` without a task if nothing has to be awaited first; else return None.

        None: there was no side effect. `unique`: the number of the kernel's request. `on_end(None, error)` is
        called before the client updates its caches.
        """
        if not is_name(name) or not self._stripes.is_together(parent):
            return None
        request = meta_pb2.UnlinkRequest(parent=parent, name=name)
        begun = self._meta.begin(
            parent,
            wire_pb2.META_UNLINK,
            request,
            meta_pb2.UnlinkReply,
            partial(self._unlinked, parent, name, self._clock.boottime_s(), on_end),
            uid=caller.uid,
            gid=caller.gid,
            unique=unique,
        )
        if begun is not None:
            self._cache.forget_entry(parent, name)
        return begun

    def _unlinked(
        self, parent: int, name: bytes, sent_s: float, on_end: OnEnd, reply, error: BaseException | None
    ) -> None:
        on_end(None, error)
        if error is None:
            self._removed(parent, name, sent_s, reply)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        check_name(name)
        await self._remove(parent, name, wire_pb2.META_RMDIR, caller)

    async def _remove(self, parent: int, name: bytes, method: int, caller: Caller) -> None:
        request = meta_pb2.UnlinkRequest(parent=parent, name=name)
        self._cache.forget_entry(parent, name)
        sent_s = self._clock.boottime_s()
        place, request.spread = await self._stripes.place(parent, name)
        self._removed(
            parent,
            name,
            sent_s,
            await self._meta.change(
                place, method, request, meta_pb2.UnlinkReply, uid=caller.uid, gid=caller.gid, once=True
            ),
        )

    def _removed(self, parent: int, name: bytes, sent_s: float, reply) -> None:
        self._cache.forget_attr(reply.inode)
        self.named(parent, name, 0, sent_s, reply)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> tuple[int, int]:
        """Rename. Return the inode that was moved and the inode that had the new name (0: none).

        If the new name exists, the moved file's bytes are made durable first: after a power loss the new name
        has the old bytes or the new bytes, even without fsync.
        """
        check_name(name)
        check_name(new_name)
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise InvalidRequest(f"rename with flags {flags:#x}")
        if not flags & RENAME_NOREPLACE and self._writer.busy:
            await self._flush_before_replace(parent, name, new_parent, new_name)
        request = meta_pb2.RenameRequest(
            parent=parent, name=name, new_parent=new_parent, new_name=new_name, flags=flags
        )
        for renamed in ((parent, name), (new_parent, new_name)):
            self._cache.forget_entry(*renamed)
        place, request.spread = await self._stripes.place(parent, name)
        reply = await self._meta.change(
            place,
            wire_pb2.META_RENAME,
            request,
            meta_pb2.RenameReply,
            uid=caller.uid,
            gid=caller.gid,
            once=True,
        )
        for inode in (reply.inode, reply.replaced):
            if inode:
                self._cache.forget_attr(inode)
        # The old name may still exist: renaming one of two names of an inode to the other leaves both.
        self._cache.forget_entry(parent, name)
        self._cache.forget_attr(parent)
        self._cache.forget_whole(parent)
        self._cache.forget_whole(new_parent)
        if reply.inode:
            # any time will do: the inode has no lease left that could be older than the change
            self.named(new_parent, new_name, reply.inode, self._clock.boottime_s())
        else:
            self._cache.forget_attr(new_parent)
        return reply.inode, reply.replaced

    async def _flush_before_replace(self, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        moved = self._cache.entry(parent, name, self._options.attr_s)
        if moved is None:
            try:
                moved = (
                    await self._lookups.find(parent, name, self._lookups.name_s, self._options.fresh_s)
                ).inode
            except NotFound:
                return  # the service will say so, or this very request has already been executed
        file = self._cache.open.get(moved)
        if not self._writer.has_unstable_writes(moved) and (
            file is None or file.written is None or file.written.clean
        ):
            return
        try:
            await self._lookups.find(new_parent, new_name, self._lookups.name_s, self._options.fresh_s)
        except NotFound:
            return
        if file is not None:
            await self._writer.store(file)
            await self._writer.settle(file)
        try:
            await self._writer.make_durable(moved)
        except WritesLost as lost:
            if file is not None:
                self._writer.meet(file, lost)
            raise
