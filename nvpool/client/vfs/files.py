"""Open files: open, create, read, write, flush and release.

A read needs no request to the metadata service. A small file that is created, written and closed costs the
service two messages (create, report).

Most operations have two forms. `read_now`, `write_now` and similar never wait: they decline with None or
False when the operation would have to wait. `begin_read`, `begin_create` and similar submit the operation
without a task and call back with the result; they return None to decline. A declined operation has no side
effect, and the caller awaits the plain form (`read`, `write`).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Protocol

from nvpool.client.read.reader import EMPTY
from nvpool.client.rpc.change_fast_path import SentChange, SubmittedChange
from nvpool.client.state.dirty_file import DirtyFile
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.open_handles import OpenHandles
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.locks import FileLocks
from nvpool.client.vfs.namespace import Lookups, NamespaceOperations, check_name, create_request, is_name
from nvpool.client.write.append_reservations import open_end
from nvpool.client.write.handle_writes import HandleWrites
from nvpool.core.errors import (
    BadHandle,
    DeadlineExceeded,
    InvalidRequest,
    LockLost,
    NotFound,
    NvpoolError,
    QuotaExceeded,
    Refused,
    StaleCut,
    WritesLost,
)
from nvpool.core.futures import ImmediateFuture
from nvpool.core.grants import READ, WRITE
from nvpool.poolmap.file_layout import check_range
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.v1 import meta_pb2, wire_pb2

_RIGHTS = {os.O_RDONLY: READ, os.O_WRONLY: READ | WRITE, os.O_RDWR: READ | WRITE}
"""Rights of a grant by access mode. A writer may read too, so a second open for reading needs no request."""
_WANTED = {os.O_RDONLY: READ, os.O_WRONLY: WRITE, os.O_RDWR: READ | WRITE}


def rights_of(flags: int) -> int:
    rights = _RIGHTS.get(flags & os.O_ACCMODE)
    if rights is None:
        raise InvalidRequest(f"open flags {flags:#o} request no known access")
    return rights


def create_and_open_request(
    parent: int, name: bytes, mode: int, flags: int, caller: Caller, rights: int
) -> meta_pb2.CreateRequest:
    """The request that creates and opens a file; without a name it is an unnamed one (O_TMPFILE)."""
    return create_request(
        parent,
        name,
        stat.S_IFREG | stat.S_IMODE(mode),
        caller,
        open=True,
        rights=rights,
        exclusive=bool(flags & os.O_EXCL),
        truncate=bool(name and flags & os.O_TRUNC),
        unnamed=not name,
    )


class CreateCallbacks(Protocol):
    """Callbacks of a submitted create, implemented by the caller of `begin_create`.

    One of these is called: `made` and right after it `opened`; or `found`; or `go_on`; or `failed`.
    """

    def made(self, attr: Attr) -> None:
        """A new file with these attributes is open; no local state exists yet.

        May raise if the caller cannot keep the file open: then the file is released, and `failed` gets the
        error.
        """

    def opened(self, handle: FileHandle) -> None:
        """The new file's handle."""

    def found(self, attr: Attr, handle: FileHandle) -> None:
        """The file existed already and is open now."""

    def go_on(self, opening: Coroutine[None, None, tuple[Attr, FileHandle]]) -> None:
        """The create continues in this coroutine. The caller awaits it; its result is as in `found`."""

    def failed(self, error: BaseException) -> None:
        """The create failed with the error that `create` would raise."""


class Files:
    """The operations that open, create and release files."""

    def __init__(
        self,
        parts: ClientParts,
        lookups: Lookups,
        names: NamespaceOperations,
        locks: FileLocks,
    ) -> None:
        self._parts = parts
        self._options = parts.options
        self._clock = parts.clock
        self._meta = parts.meta
        self._leases = parts.leases
        self._cache = parts.cache
        self._reader = parts.reader
        self._writer = parts.writer
        self._late_closes = parts.late_closes
        self._inodes = parts.inodes
        self._unreported = parts.unreported
        self._lookups = lookups
        self._names = names
        self._locks = locks
        self.handles = OpenHandles(
            parts.meta,
            parts.leases,
            parts.cache,
            parts.reader,
            parts.writer,
            parts.chunks,
            parts.rooms,
            locks.owners,
        )
        self.release_now = self.handles.release_now
        self.let_go = self.handles.let_go

    async def open(self, inode: int, flags: int, caller: Caller) -> FileHandle:
        """Open the inode; return a handle whose attributes are current at the service (close-to-open).

        The attributes come from the service, or from the cache under a lease. `flags` as in open(2): the
        access mode, O_TRUNC and O_APPEND are used. NotFound: the inode is gone.
        """
        rights = rights_of(flags)
        if not self._parts.squashes_root or caller.uid:
            handle = self.open_now(inode, flags)
            if handle is not None:
                return handle
        truncate = bool(flags & os.O_TRUNC)
        file = self._cache.open.get(inode)
        if file is not None:
            rights |= file.grant_rights
            if truncate:
                self._reader.changed(file)
                await self._writer.begin_cut(file, 0)
        if truncate:
            self._reader.forget_content(inode)
        try:
            request = meta_pb2.OpenRequest(
                inode=inode, rights=rights, truncate=truncate, wanted=_WANTED[flags & os.O_ACCMODE]
            )
            sent_s = self._clock.boottime_s()
            entry = await self._meta.change(
                inode, wire_pb2.META_OPEN, request, meta_pb2.Entry, uid=caller.uid, gid=caller.gid, once=True
            )
            return self._opened(entry, flags, sent_s)
        finally:
            if file is not None and truncate:
                self._writer.end_cut(file)
                self._reader.changed(file)

    def open_now(self, inode: int, flags: int) -> FileHandle | None:
        """As `open`, if no request is needed: to read a file under a lease with that right. Else None.

        Must not be called for root if `squashes_root`. The open is reported to the service soon; if the
        handle is still open when another client is about to change the file, before that change.
        """
        return self.handles.open_now(inode, flags, self._clock.boottime_s())

    def _opened(self, entry, flags: int, sent_s: float) -> FileHandle:
        before = self._cache.open.get(entry.attr.inode)
        change = before.attr.change if before is not None else 0
        file = self._cache.hold(entry.attr)
        # opened before with attributes from a listing, which lack the volume
        if entry.attr.volume and not file.volume:
            file.volume, file.paid = entry.attr.volume, file.size
        file.adopt_grant(entry.grant, self._clock.wall_ns() // 1_000_000)
        file.opened += 1
        self._meta.opened(file.inode)
        file.unreported = False
        self._inodes.take_lease(entry, sent_s)
        if flags & os.O_ACCMODE:
            self._late_closes.opened(file)
        if before is not None and file.attr.change != change:
            self._reader.changed(file)
        return FileHandle(file, flags)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attr, FileHandle]:
        """Create the file if it does not exist, and open it. O_EXCL: AlreadyExists if it exists."""
        check_name(name)
        rights = rights_of(flags)
        cut: OpenInode | None = None
        if flags & (os.O_TRUNC | os.O_EXCL) == os.O_TRUNC and self._writer.busy:
            try:
                cut = self._cache.open.get((await self._lookups.lookup(parent, name)).inode)
            except NotFound:
                pass
        if cut is not None:
            self._reader.changed(cut)
            await self._writer.begin_cut(cut, 0)
        try:
            request = create_and_open_request(parent, name, mode, flags, caller, rights)
            reply, sent_s = await self._names.send_create(request, caller)
            handle = self._opened(reply.entry, flags, sent_s) if not reply.entry.elsewhere else None
        finally:
            if cut is not None:
                self._writer.end_cut(cut)
                self._reader.changed(cut)
        if handle is None:
            return await self._open_elsewhere(parent, name, mode, flags, caller, reply.entry.attr.inode)
        self._created(parent, name, handle, sent_s, reply)
        return self._unreported.merged(handle.attr), handle

    async def create_unnamed(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Attr, FileHandle]:
        """Create an open file without a name (O_TMPFILE). Its last close deletes it.

        `link` can give the file a name, unless O_EXCL is set.
        """
        request = create_and_open_request(parent, b"", mode, flags, caller, rights_of(flags))
        reply, sent_s = await self._names.send_create(request, caller)
        handle = self._opened(reply.entry, flags, sent_s)
        return self._unreported.merged(handle.attr), handle

    def _created(self, parent: int, name: bytes, handle: FileHandle, sent_s: float, reply) -> None:
        if reply.created:
            lease = self._leases.held(handle.inode)
            if lease is not None and lease.watch.delegates:
                handle.file.delegation = lease
            self._names.named(parent, name, handle.inode, sent_s, reply, self._leases.held(handle.inode))
        else:
            self._cache.put_own_entry(parent, name, handle.inode, sent_s, self._leases.held(handle.inode))

    def begin_create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        flags: int,
        caller: Caller,
        unique: int,
        making: CreateCallbacks,
    ) -> SubmittedChange | None:
        """Submit `create` without a task if nothing has to be awaited first; else return None.

        None: there was no side effect. `unique`: the number of the kernel's request.
        """
        rights = _RIGHTS.get(flags & os.O_ACCMODE)
        if rights is None or not is_name(name):
            return None
        if flags & (os.O_TRUNC | os.O_EXCL) == os.O_TRUNC and self.may_be_written(parent, name):
            return None
        return self._names.begin_create(
            create_and_open_request(parent, name, mode, flags, caller, rights),
            caller,
            unique,
            partial(self._made, making, parent, name, mode, flags, caller, self._clock.boottime_s()),
        )

    def may_be_written(self, parent: int, name: bytes) -> bool:
        """Whether the name may be a file that is open on this client with local writes."""
        return (
            self._writer.busy
            and self._cache.entry(parent, name, self._options.fresh_s) != 0
            and not self._cache.is_absent(parent, name, self._lookups.absent_s)
        )

    def go_on_creating(
        self,
        sent: SentChange,
        parent: int,
        name: bytes,
        mode: int,
        flags: int,
        caller: Caller,
        unique: int,
        making: CreateCallbacks,
    ) -> SubmittedChange:
        """Continue a create that was already sent, as if `begin_create` had sent it."""
        on_end = partial(self._made, making, parent, name, mode, flags, caller, sent.sent_s)
        return self._names.go_on_creating(sent, parent, unique, on_end)

    def _made(
        self,
        making: CreateCallbacks,
        parent: int,
        name: bytes,
        mode: int,
        flags: int,
        caller: Caller,
        sent_s: float,
        reply,
        error: BaseException | None,
    ) -> None:
        if error is not None:
            making.failed(error)
            return
        entry = reply.entry
        if entry.elsewhere:
            making.go_on(self._open_elsewhere(parent, name, mode, flags, caller, entry.attr.inode))
        elif reply.created and entry.lease_ms and entry.attr.inode not in self._cache.open:
            refused = None
            try:
                making.made(entry.attr)
            except NvpoolError as no_room:
                refused = no_room
            handle = self._opened(entry, flags, sent_s)
            self._created(parent, name, handle, sent_s, reply)
            if refused is None:
                making.opened(handle)
            else:
                self.release_now(handle)
                making.failed(refused)
        else:
            handle = self._opened(entry, flags, sent_s)
            self._created(parent, name, handle, sent_s, reply)
            making.found(self._unreported.merged(handle.attr), handle)

    async def _open_elsewhere(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller, inode: int
    ) -> tuple[Attr, FileHandle]:
        """Open the inode of another shard that the name of a create already stands for."""
        try:
            handle = await self.open(inode, flags, caller)
        except NotFound:  # the inode has just lost its last name, which is this one
            return await self.create(parent, name, mode, flags, caller)
        self._cache.forget_entry(parent, name)
        return self._unreported.merged(handle.attr), handle

    async def release(self, handle: FileHandle) -> None:
        """Release the handle, which must not be used any more.

        Stores remaining data (of a mapping that was written after close) and releases the handle's locks. The
        release itself is reported to the service later.
        """
        if handle.closed:
            return
        handle.closed = True
        file = handle.file
        self._reader.forget(file, handle.ahead)
        try:
            # Again if others opened, wrote and closed the file meanwhile: then they have left this work to
            # us.
            while file.handles == 1 and file.written is not None and file.written.unsettled:
                await self._writer.store(file)
                await self._writer.settle(file)
        except NotFound:
            pass  # the file was removed: no reader can ever see it
        finally:
            try:
                await self._locks.release_handle(handle)
            finally:
                self.let_go(file)


class FileData:
    """The operations on the bytes of open files: read, write, append, flush and fsync."""

    def __init__(self, parts: ClientParts, locks: FileLocks) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._meta = parts.meta
        self._leases = parts.leases
        self._cache = parts.cache
        self._chunks = parts.chunks
        self._reader = parts.reader
        self._writer = parts.writer
        self._rooms = parts.rooms
        self._late_closes = parts.late_closes
        self._inodes = parts.inodes
        self._tasks = parts.tasks
        self._locks = locks
        self.writes = HandleWrites(
            parts.writer,
            parts.reader.changed,
            parts.rooms,
            locks.owners,
            self.flush_writes,
            parts.late_closes,
        )
        """The writes and closes that need no wait."""

    def is_settled(self, handle: FileHandle) -> bool:
        """Whether another client that opens the file now reads the same bytes as this one.

        All writes of this client are at the stores and reported, and no owner on this client has a lock.
        """
        file = handle.file
        return not (
            file.lost
            or self._locks.is_locked(file.inode)
            or (file.written is not None and file.written.unsettled)
        )

    def read_now(self, handle: FileHandle, offset: int, size: int) -> memoryview | None:
        """As `read`, if the bytes are available without waiting; else None and no side effect.

        The bytes come from a short-circuit read of the page cache, or are the cached content of a small file.
        Takes a few microseconds. Never raises what `read` would report: after None, call `read`, which waits.
        """
        file = handle.file
        if not handle.readable or handle.closed or offset < 0 or size <= 0 or file.lost:
            return None
        if not file.located and not self._reader.has_content(file):
            return None
        if file.unreported and not self._leases.keeps_bytes(file.inode):
            return None
        found = self._reader.read_now(file, handle.ahead, offset, size) if file.located else None
        return found if found is not None else self._reader.content_now(file, offset, size)

    def begin_read(self, handle: FileHandle, offset: int, size: int) -> ImmediateFuture | None:
        """Submit the most frequent kinds of `read` without a task. None if the caller must await `read`.

        The caller has tried `read_now` before.
        """
        file = handle.file
        if not handle.readable or handle.closed or offset < 0 or size <= 0 or file.lost:
            return None
        if file.attr.size <= SMALL_BYTES:
            return self._reader.begin_small(file, offset, size, self.unreported_check(handle, offset, size))
        return self._reader.begin(file, handle.ahead, offset, size) if not file.unreported else None

    def unreported_check(self, handle: FileHandle, offset: int, size: int) -> Callable | None:
        """The `then` callback of `ImmediateFuture` for such a read of a small file. None if no check is needed."""
        return partial(self._read_if_unreported, handle, offset, size) if handle.file.unreported else None

    def _read_if_unreported(
        self,
        handle: FileHandle,
        offset: int,
        size: int,
        part: ImmediateFuture,
        found,
        error: BaseException | None,
    ):
        """Repeat the read with `read`, which validates it, if the service may not know the open."""
        if error is not None or not handle.file.unreported or self._leases.keeps_bytes(handle.file.inode):
            return found, error
        task = self._tasks.start(self.read(handle, offset, size))
        task.add_done_callback(partial(_end_as, part))
        return None

    async def read(self, handle: FileHandle, offset: int, size: int) -> memoryview | bytes:
        """Read up to `size` bytes; fewer only at the end of the file. The caller owns the buffer.

        ChecksumMismatch: no replica has good bytes. Disconnected, DeadlineExceeded: the deadline has passed.
        May be repeated.
        """
        if not handle.readable or handle.closed:
            raise BadHandle("the handle is not open for reading")
        if handle.file.lost:
            raise LockLost()
        if offset < 0 or size <= 0:
            if offset < 0 or size < 0:
                raise InvalidRequest(f"{size} bytes at {offset}")
            return EMPTY
        found = await self._reader.read(handle.file, handle.ahead, offset, size)
        if handle.file.unreported and not self._leases.keeps_bytes(handle.inode):
            await self._inodes.confirm(handle.file)
        return found

    async def write(self, handle: FileHandle, offset: int, buffer, append: bool | None = None) -> int:
        """Accept all of `buffer`, or as much as fits into the file's volume. Return the number of bytes.

        The bytes are stored later, at the latest by flush. An error of an earlier write is raised here, once.
        QuotaExceeded: nothing fits, and nothing was accepted.

        For O_APPEND handles the bytes go to the end of the file as the service knows it, and `offset` is
        ignored; `append` overrides the flag if it was changed after the open. An append is accepted as a
        whole or refused. Other clients see the new end of the file when they can read the bytes: after the
        next close or fsync here, at the latest some hundredths of a second later.
        """
        if not handle.writable or handle.closed:
            raise BadHandle("the handle is not open for writing")
        file = handle.file
        if file.lost:
            raise LockLost()
        if not len(buffer):
            return 0
        if handle.append if append is None else append:
            await self._append(file, buffer)
            return len(buffer)
        check_range(file.layout, offset, len(buffer))
        if offset + len(buffer) > file.paid:
            fits = await self._rooms.have(file, offset, offset + len(buffer)) - offset
            if fits < len(buffer):
                buffer = memoryview(buffer)[:fits]
        self._reader.changed(file)
        written = await self._writer.write(file, offset, buffer)
        self._reader.changed(file)  # drop what was fetched while the write waited for buffer space
        return written

    async def append(self, handle: FileHandle, buffer) -> int:
        """Write at the end of the file, whatever the handle's flags; return the first offset."""
        if not handle.writable or handle.closed:
            raise BadHandle("the handle is not open for writing")
        if handle.file.lost:
            raise LockLost()
        return await self._append(handle.file, buffer) if len(buffer) else handle.size

    async def _append(self, file: OpenInode, buffer) -> int:
        length = len(buffer)
        async with self._writer.appended(file).turn:
            self._writer.raise_error(file)
            await self._pay_whole(file, file.size, length)
            offset = await self._reserve(file, length)
            try:
                await self._pay_whole(file, offset, length)
                self._reader.changed(file)
                await self._writer.write(file, offset, buffer)
            except BaseException:
                self._writer.withdraw(file, offset)
                raise
        self._reader.changed(file)
        self._writer.publish(file)
        return offset

    async def _pay_whole(self, file: OpenInode, offset: int, length: int) -> None:
        """Reserve quota for a whole record. QuotaExceeded: only a part of the record fits, or nothing."""
        end = offset + length
        if end > file.paid and await self._rooms.have(file, offset, end) < end:
            raise QuotaExceeded(
                f"a record of {length} bytes does not fit into the volume's quota; remove files and purge its "
                f"trash, if it has one (nvpool trash purge POOL NAME), or: nvpool volume resize POOL NAME "
                "--size SIZE"
            )

    async def _reserve(self, file: OpenInode, length: int) -> int:
        """Reserve a range behind the file's end. The end is published when the stores have the bytes.

        See `client/write/append_reservations`.
        """
        appended = self._writer.appended(file)
        deadline_s = self._clock.boottime_s() + self._options.deadline_s
        ends_before = file.written.end <= max(file.attr.size, appended.end)
        while appended.broken is not None or not ends_before:
            # No write is placed behind a reservation that is given up; other writes behind the end come
            # before this append.
            if self._clock.boottime_s() > deadline_s:
                raise DeadlineExceeded(
                    "a failed append left a hole that could not be removed in time", may_be_applied=False
                )
            await self._writer.store(file)
            await self._writer.settle(file)
            ends_before = True
        losses = self._chunks.ended.losses
        for last in (False, False, True):
            request = meta_pb2.ReserveRequest(
                inode=file.inode, length=length, cut=file.cut, deferred=True, own=open_end(file.written)
            )
            try:
                reply = await self._meta.change(
                    file.inode, wire_pb2.META_RESERVE, request, meta_pb2.ReserveReply, file=file, once=True
                )
                break
            except StaleCut:
                if last:
                    raise
                # another client has truncated the file, so its end has moved
                await self._inodes.refresh(file, WRITE)
            except Refused:
                raise
            except BaseException:
                self._writer.withdraw(file, max(file.attr.size, appended.end), doubtful=True)
                raise
        if reply.HasField("attr"):
            self._cache.put_attr(reply.attr)
        self._chunks.ended.note(file, losses, reply.offset)
        appended.reserve(reply.offset, reply.offset + length, file.attr.size)
        appended.shared = reply.shared
        return reply.offset

    async def flush(self, handle: FileHandle, owner: int | None = None) -> None:
        """Do the work of close(2) for one descriptor.

        The record locks of `owner` on the file are released. On return all bytes written through any handle
        of the inode are at the stores, and all clients can learn the size; or the error of a write is raised
        here, once. With `late_closes` the data of a new file may reach the stores later, but before another
        client sees the file's attributes.
        """
        file = handle.file
        try:
            if (
                file.lost
                or self._locks.is_locked(file.inode)
                or not self._late_closes.begin(file, partial(self.flush_writes, handle))
            ):
                await self.flush_writes(handle)
        finally:
            if owner is not None:
                await self._locks.release_owner(handle, owner)

    async def flush_writes(self, handle: FileHandle) -> None:
        """The part of `flush` that stores and reports the file's writes, and raises an error of a write."""
        file = handle.file
        if file.written is None:
            return
        await self._writer.store(file)
        if file.written is not None:
            try:
                await self._writer.settle(file)
            except NotFound:
                pass  # another client has removed the file: no reader can ever see it
            self._writer.raise_error(file)

    async def fsync(self, handle: FileHandle, datasync: bool) -> None:
        """Make all written data and the size durable: on return both survive a power loss.

        Raises each write error since the handle was opened, or since its last fsync, once: also if fsync,
        write or close has reported the error through another handle.
        """
        file = handle.file
        if file.lost:
            raise LockLost()
        written = file.written
        await self._writer.store(file)
        self._raise_new_error(handle, written)
        try:
            await self._writer.make_durable(file.inode)
        except WritesLost as lost:
            self._raise_new_error(handle, self._writer.meet(file, lost))
        await self._writer.settle(file, sync=True)
        self._raise_new_error(handle, written)

    def _raise_new_error(self, handle: FileHandle, written: DirtyFile | None) -> None:
        """Raise the write error that this handle has not raised yet."""
        if written is not None and written.met is not handle.reported_error:
            handle.reported_error = written.met
            raise self._writer.take_error(written) if written.error is not None else written.met
        self._writer.raise_error(handle.file)

    async def read_many(self, reads, into: memoryview) -> list[int]:
        """Read several (handle, offset, length) ranges into `into`, with one message per target.

        The ranges lie in `into` one after the other, each at the sum of the lengths before it. Returns the
        number of bytes of each range: fewer than its length only at the end of its file. On an error the
        content of `into` is undefined.
        """
        plan = []
        lengths = []
        place = 0
        for handle, offset, length in reads:
            file = handle.file
            if file.lost:
                raise LockLost()
            count = length
            if offset + length > file.size:
                count = await self.up_to_end(file, offset, length)
            if count > 0:
                plan.append((file, offset, count, place))
            lengths.append(count)
            place += length
        if place > len(into):
            raise InvalidRequest(f"{place} bytes are asked for and the buffer has {len(into)}")
        if plan:
            await self._reader.read_many(plan, into)
            for handle, _, _ in reads:
                if handle.file.unreported and not self._leases.keeps_bytes(handle.inode):
                    await self._inodes.confirm(handle.file)
        return lengths

    async def up_to_end(self, file: OpenInode, offset: int, length: int) -> int:
        """How many of the bytes lie before the current end of the file."""
        if (
            file.attr_born_s + self._options.attr_s <= self._clock.boottime_s()
            and self._leases.held(file.inode) is None
        ):
            await self._inodes.look(file)
        return max(0, min(length, file.size - offset))


def _end_as(part: ImmediateFuture, task: asyncio.Task) -> None:
    """End `part` with the outcome of a task that has ended."""
    if task.cancelled():
        part.cancel()
    elif task.exception() is not None:
        part.end(None, task.exception())
    else:
        part.end(task.result(), None)
