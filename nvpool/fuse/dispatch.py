"""Request dispatch of the kernel engine: decode a request, call `fuse/ops/operations`, send the reply.

There is one method `_on_…` for each operation, found by its name. Used by `fuse/kernel/connection`, which
reads the requests and keeps the pending ones. The code here never decides what a request means.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from nvpool.client.state.vfs_types import NOW, Caller
from nvpool.core.clock import stopwatch_s
from nvpool.fuse.metrics import FuseTimes
from nvpool.fuse.notify import ProcessNotifier, ThreadNotifier
from nvpool.fuse.ops.eager_coroutine import WAITS, EagerCoroutine
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import ASIDE
from nvpool.fuse.ops.metadata import ASK
from nvpool.fuse.ops.operations import FuseOps, errno_of
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import (
    FSYNC_DATA_ONLY,
    LOCK_FLOCK,
    OPEN_KILL_SUIDGID,
    RESENT,
    SETXATTR_ACL_KILL_SGID,
    UNANSWERED,
    WRITE_KILL_SUIDGID,
    Op,
    Opening,
    Valid,
)
from nvpool.fuse.protocol.requests import WRITE_BYTES
from nvpool.shm.memfd import fault_in

log = logging.getLogger(__name__)

_DIRECT_IO, _KEEP_CACHE, _NOFLUSH = Opening.DIRECT_IO.value, Opening.KEEP_CACHE.value, Opening.NOFLUSH.value

FIRST = RESENT - 1
"""Mask for the number of a request: removes the RESENT bit."""


class KernelRequests:
    """Handlers of all operations.

    `_buffer` has the current request; a handler keeps no part of it after return.
    """

    def __init__(self, ops: FuseOps, request_bytes_max: int) -> None:
        self._ops = ops
        self.spent = FuseTimes()
        self.read_bytes = self.written_bytes = 0
        self._fd = -1
        # request that a read worker forwarded -> the descriptor that it was read from
        self._from: dict[int, int] = {}
        self._buffer = buffer = fault_in(self._memory(request_bytes_max))
        self._view = memoryview(buffer)
        self._keep_attr = replies.seconds(ops.options.attr_timeout_s)
        self._keep_entry = replies.seconds(ops.options.entry_timeout_s)
        self._keep_absent = replies.seconds(ops.options.negative_timeout_s)
        self.notices: ThreadNotifier | ProcessNotifier = ThreadNotifier()
        """Sender of notifications. The mount daemon may replace it."""
        self._spare: EagerCoroutine
        self._late: list[bytes] = []  # RELEASE requests
        self._since_s = 0.0
        self._kept = 0  # of the requests read since `_since_s`: how many are pending or late
        self._keeps = ops.kept is not None
        self._held = ops.held
        self._setxattr_extended = False  # as agreed with the kernel
        ops.notices.connect(
            invalidate_attributes=self._invalidate_attributes,
            invalidate=self._invalidate,
            drop=self._drop_pages,
            store=self._store_pages,
            forget=self._forget_names,
        )

    def _memory(self, byte_count: int) -> bytearray | memoryview:
        """Allocate the buffer into which requests are read."""
        return bytearray(byte_count)

    def _handlers(self) -> list[Callable[[int], None]]:
        """Table of handlers by operation; each is called with the length of the request."""
        table: list[Callable[[int], None]] = [self._on_unknown] * 256
        for opcode in Op:
            handler = getattr(self, f"_on_{opcode.name.lower()}", None)
            if handler is not None:
                table[opcode] = handler
        return table

    def _keep_in_work(self, step, unique: int, name: str, answer: Callable) -> None:
        """Register `step`, the operation that a pending request waits for; send the reply when it ends."""
        raise NotImplementedError

    def _start(
        self, unique: int, name: str, coroutine: Coroutine, answer: Callable[[int, Any], None]
    ) -> None:
        """Run the coroutine and call answer(unique, its result).

        That happens immediately if the coroutine does not wait.
        """
        step = self._spare
        step.unique = unique & FIRST
        try:
            result = step.begin(coroutine)
        except Exception as error:
            self._fail(unique, error, name)
        else:
            if result is WAITS:
                self._spare = EagerCoroutine(step.loop)
                self._keep_in_work(step, unique, name, answer)
                return
            answer(unique, result)
        if self._held:
            self._ops.answered(unique & FIRST)

    def _send(self, head: bytes, *more) -> None:
        try:
            fd = self._back(head) if self._from else self._fd
            if more:
                os.writev(fd, (head, *more))
            else:
                os.write(fd, head)
        except OSError as error:
            self._not_taken(error, (head, *more))

    def _back(self, head: bytes) -> int:
        """Descriptor to which a reply or notification is written while workers have forwarded requests."""
        return self._from.get(replies.HEADER.unpack_from(head)[2], self._fd)

    def _not_taken(self, error: OSError, parts) -> None:
        """Handle a refused reply: its caller would wait forever, so send EIO instead."""
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
            return  # no caller waits for it any more
        length, _, unique = replies.HEADER.unpack_from(parts[0])
        log.error("an answer of %d bytes was refused by the kernel: %s", length, error)
        if len(parts) > 1 or length > replies.HEADER_BYTES:
            self._send(replies.failed(unique, errno.EIO))

    def _fail(self, unique: int, error: BaseException, name: str) -> None:
        self._send(replies.failed(unique, errno_of(error, name)))

    def _invalidate_attributes(self, inode: int) -> None:
        """Make the kernel mark the attributes as old. Without pages it returns immediately."""
        self._send(replies.inval_inode(inode, -1, 0))

    async def _invalidate(self, names: Iterable[tuple[int, bytes]], inodes: Iterable[int]) -> None:
        notices = [replies.inval_entry(parent, name, expire_only=True) for parent, name in names]
        notices += [replies.inval_inode(inode, 0, 0) for inode in inodes]
        await self.notices.write(self._fd, notices)

    async def _drop_pages(self, inode: int, offset: int, length: int) -> None:
        await self.notices.write(self._fd, [replies.inval_inode(inode, offset, length)])

    async def _store_pages(self, inode: int, offset: int, content: bytes) -> None:
        await self.notices.write(self._fd, [replies.store(inode, offset, len(content)) + content])

    async def _forget_names(self, names: list[tuple[int, bytes]]) -> None:
        await self.notices.write(self._fd, [replies.inval_entry(parent, name) for parent, name in names])

    # -- replies -------------------------------------------------------------------------------------------------------

    def _done(self, unique: int, _result=None) -> None:
        self._send(replies.done(unique))

    def _data(self, unique: int, payload) -> None:
        length = len(payload)
        self.read_bytes += length
        self._send(replies.data(unique, length), payload)

    def _attributes(self, unique: int, attr) -> None:
        self._send(replies.attributes(unique, attr, self._keep_attr))

    def _entry(self, unique: int, attr) -> None:
        if attr is not None:
            keep = self._keep_entry if self._ops.cached_names.name_is_kept else replies.NOT_KEPT
            self._send(replies.entry(unique, attr, keep, self._keep_attr))
        elif self._keep_absent > (0, 0):
            self._send(replies.absent(unique, self._keep_absent))
        else:
            self._send(replies.failed(unique, errno.ENOENT))

    def _opened(self, unique: int, opened) -> None:
        self._send(replies.opened(unique, opened.handle, _opening(opened)))

    def _created(self, unique: int, result) -> None:
        attr, opened = result
        keep = self._keep_entry if self._ops.cached_names.name_is_kept else replies.NOT_KEPT
        self._send(replies.created(unique, attr, keep, self._keep_attr, opened.handle, _opening(opened)))

    def _count(self, unique: int, size: int) -> None:
        self._send(replies.count(unique, size))

    def _space(self, unique: int, space) -> None:
        self._send(
            replies.space(
                unique,
                space.blocks_total,
                space.blocks_free,
                space.blocks_available,
                space.files_total,
                space.files_free,
                space.block_bytes,
                space.name_bytes_max,
            )
        )

    def _value(self, room: int, unique: int, value: bytes) -> None:
        """Reply with an extended attribute, or a list of them.

        `room`: bytes that the caller has for it; 0: the caller requests the size.
        """
        if not room:
            self._count(unique, len(value))
        elif len(value) > room:
            self._send(replies.failed(unique, errno.ERANGE))
        else:
            self._data(unique, value)

    # -- requests, the frequent ones first -----------------------------------------------------------------------------

    def _on_read(self, count: int) -> None:
        _, _, unique, _, _, _, _, _, _, handle, offset, size = requests.decode_read(self._buffer, count)
        found = self._ops.read_now(handle, offset, size)
        if found is not None:
            self._data(unique, found)
            return
        coming = self._ops.begin_read(handle, offset, size)
        if coming is None:
            self._start(unique, "read", self._ops.read(handle, offset, size), self._data)
        elif not coming.done():
            self._keep_in_work(coming, unique, "read", self._data)
        elif coming.outcome[1] is None:
            self._data(unique, coming.outcome[0])
        else:
            self._fail(unique, coming.outcome[1], "read")

    _read_uncompiled = _on_read
    """This `_on_read`, for a READ that the compiled reads of a derived class have declined."""

    def _on_write(self, count: int) -> None:
        _, _, unique, _, uid, gid, pid, _, _, handle, offset, _, flags, open_flags = requests.decode_write(
            self._buffer, count
        )
        drop_set_ids = Caller(uid, gid, pid) if flags & WRITE_KILL_SUIDGID else None
        syncs = bool(open_flags & os.O_DSYNC) and self._ops.syncs_itself(handle)
        if unique > FIRST and (taken := self._ops.written_before(unique & FIRST)) is not None:
            if syncs:
                self._start(unique, "write", self._ops.synced(handle, taken), self._count)
            else:
                self._count(unique, taken)
            return
        payload = self._view[WRITE_BYTES:count]
        self.written_bytes += len(payload)
        if not self._keeps:
            payload = bytes(payload)
        if open_flags & ASIDE and (open_flags & os.O_APPEND or self._ops.has_pages(handle)):
            self._start(
                unique,
                "write",
                self._ops.write(handle, offset, bytes(payload), drop_set_ids, syncs, open_flags),
                self._count,
            )
            return
        try:
            taken = self._ops.write_now(handle, offset, payload, drop_set_ids, unique & FIRST)
        except Exception as error:
            self._fail(unique, error, "write")
            return
        if taken:
            self._count(unique, len(payload))
        else:
            self._start(
                unique,
                "write",
                self._ops.write(handle, offset, bytes(payload), drop_set_ids, syncs, open_flags),
                self._count,
            )

    def _on_lookup(self, count: int) -> None:
        unique, parent, name, _, _, _ = requests.decode_lookup(self._buffer, count)
        found = self._ops.lookup_now(parent, name)
        if found is not ASK:
            self._entry(unique, found)
            return
        asked = self._ops.begin_lookup(parent, name)
        if asked is None:
            self._start(unique, "lookup", self._ops.lookup(parent, name), self._entry)
        elif not asked.done():
            self._keep_in_work(asked, unique, "lookup", self._entry)
        elif asked.outcome[1] is None:
            self._entry(unique, asked.outcome[0])
        else:
            self._fail(unique, asked.outcome[1], "lookup")

    def _on_getattr(self, count: int) -> None:
        _, _, unique, node, *_ = requests.decode_getattr(self._buffer, count)
        found = self._ops.getattr_now(node)
        if found is not None:
            self._attributes(unique, found)
        else:
            self._start(unique, "getattr", self._ops.getattr(node), self._attributes)

    def _on_open(self, count: int) -> None:
        _, _, unique, node, uid, gid, pid, _, _, flags, more = requests.decode_open(self._buffer, count)
        caller = Caller(uid, gid, pid)
        if unique <= FIRST:
            opened = self._ops.open_now(node, flags, caller, unique)
        else:  # continue what the predecessor started for this request
            handle = self._ops.handle_before(unique & FIRST)
            opened = self._ops.open_again(handle) if handle is not None else None
        if opened is not None:
            self._opened(unique, opened)
        else:
            self._start(
                unique,
                "open",
                self._ops.open(node, flags, caller, bool(more & OPEN_KILL_SUIDGID)),
                self._opened,
            )

    def _on_create(self, count: int) -> None:
        fields, name = requests.decode_create(self._buffer, count)
        _, _, unique, node, uid, gid, pid, _, _, flags, mode, umask, _ = fields
        if unique > FIRST and (handle := self._ops.handle_before(unique & FIRST)) is not None:
            self._start(unique, "create", self._ops.create_again(handle), self._created)
            return
        caller = Caller(uid, gid, pid, umask)
        begun = self._ops.begin_create(node, name, mode, flags, caller, unique) if unique <= FIRST else None
        if begun is not None:
            self._keep_in_work(begun, unique, "create", self._created)
        else:
            self._start(unique, "create", self._ops.create(node, name, mode, flags, caller), self._created)

    def _on_tmpfile(self, count: int) -> None:
        """Handle TMPFILE as CREATE; the name has no meaning."""
        (_, _, unique, node, uid, gid, pid, _, _, flags, mode, umask, _), _ = requests.decode_create(
            self._buffer, count
        )
        if unique > FIRST and (handle := self._ops.handle_before(unique & FIRST)) is not None:
            making = self._ops.create_again(handle)
        else:
            making = self._ops.create_unnamed(node, mode, flags, Caller(uid, gid, pid, umask))
        self._start(unique, "tmpfile", making, self._created)

    def _on_flush(self, count: int) -> None:
        fields = requests.decode_release(self._buffer, count)
        unique, handle = fields[2], fields[9]
        begun = self._ops.begin_flush(handle)
        if begun is True:
            self._done(unique)
        elif begun is not None:
            self._keep_in_work(begun, unique, "flush", self._done)
        else:
            self._start(unique, "flush", self._ops.flush(handle, fields[12]), self._done)

    def _on_release(self, count: int) -> None:
        fields = requests.decode_release(self._buffer, count)
        # its locks must end before other clients request theirs
        if fields[2] <= FIRST and not self._ops.is_locked(fields[9]):
            self._late.append(bytes(self._view[:count]))
            self._kept += 1
        else:
            self._start(fields[2], "release", self._ops.release(fields[9], fields[2] > FIRST), self._done)

    def _release_late(self) -> None:
        """Release closed files when no application waits: the kernel sends RELEASE while the application
        continues.

        `_buffer` must not contain a request that is being handled.
        """
        late, self._late = self._late, []
        for request in self._not_released(late):
            since_s = self._since_s = stopwatch_s()
            self._kept = 0
            fields = requests.decode_release(request, len(request))
            unique, handle = fields[2], fields[9]
            try:
                if self._ops.release_now(handle):
                    self._done(unique)
                else:
                    self._view[: len(request)] = request
                    self._start(unique, "release", self._ops.release(handle), self._done)
            except Exception as error:
                self._fail(unique, error, "release")
            if not self._kept:
                self.spent.add(Op.RELEASE, stopwatch_s() - since_s)

    def _not_released(self, late: list[bytes]) -> list[bytes]:
        """Release files in one compiled step if possible; returns the requests that were not handled."""
        return late

    def _on_opendir(self, count: int) -> None:
        fields = requests.decode_open(self._buffer, count)
        if fields[2] > FIRST and (handle := self._ops.handle_before(fields[2] & FIRST)) is not None:
            self._opened_directory(fields[2], handle)
            return
        self._start(fields[2], "opendir", self._ops.opendir(fields[3]), self._opened_directory)

    def _opened_directory(self, unique: int, handle: int) -> None:
        self._send(replies.opened(unique, handle, 0))

    def _on_releasedir(self, count: int) -> None:
        fields = requests.decode_release(self._buffer, count)
        self._start(fields[2], "releasedir", self._ops.releasedir(fields[9], fields[2] > FIRST), self._done)

    def _on_readdirplus(self, count: int) -> None:
        self._list(requests.decode_read(self._buffer, count), True)

    def _on_readdir(self, count: int) -> None:
        self._list(requests.decode_read(self._buffer, count), False)

    def _list(self, fields: tuple, plus: bool) -> None:
        listing = replies.ReaddirReply(
            min(fields[11], len(self._buffer)), plus, self._keep_entry, self._keep_attr
        )
        self._start(
            fields[2],
            "readdir",
            self._ops.readdir(fields[9], fields[10], listing.add, listing.add_all),
            lambda unique, _: self._data(unique, listing.taken()),
        )

    # -- the other requests --------------------------------------------------------------------------------------------

    def _decoded(self, count: int) -> tuple[requests.FuseRequest, Any, Caller]:
        request = requests.decode(self._buffer, count)
        return request, request.body, Caller(request.uid, request.gid, request.pid)

    def _on_setattr(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        valid = body.valid
        atime = NOW if valid & Valid.ATIME_NOW else body.atime * replies.SECOND_NS + body.atimensec
        mtime = NOW if valid & Valid.MTIME_NOW else body.mtime * replies.SECOND_NS + body.mtimensec
        self._start(
            request.unique,
            "setattr",
            self._ops.setattr(
                request.node,
                caller,
                body.fh if valid & Valid.HANDLE else None,
                mode=body.mode if valid & Valid.MODE else None,
                uid=body.uid if valid & Valid.UID else None,
                gid=body.gid if valid & Valid.GID else None,
                size=body.size if valid & Valid.SIZE else None,
                atime_ns=atime if valid & Valid.ATIME else None,
                mtime_ns=mtime if valid & Valid.MTIME else None,
                drop_set_ids=bool(valid & Valid.KILL_SUIDGID),
            ),
            self._attributes,
        )

    def _on_statx(self, count: int) -> None:
        request, _, _ = self._decoded(count)
        self._start(
            request.unique,
            "statx",
            self._ops.statx(request.node),
            lambda unique, found: self._send(replies.statx(unique, found[0], self._keep_attr, found[1])),
        )

    def _on_readlink(self, count: int) -> None:
        request, _, _ = self._decoded(count)
        self._start(request.unique, "readlink", self._ops.readlink(request.node), self._data)

    def _on_symlink(self, count: int) -> None:
        request, _, caller = self._decoded(count)
        name, target = request.names
        self._start(
            request.unique, "symlink", self._ops.symlink(request.node, name, target, caller), self._entry
        )

    def _on_mknod(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        caller = caller._replace(umask=body.umask)
        self._start(
            request.unique,
            "mknod",
            self._ops.mknod(request.node, request.names[0], body.mode, body.rdev, caller),
            self._entry,
        )

    def _on_mkdir(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        caller = caller._replace(umask=body.umask)
        self._start(
            request.unique,
            "mkdir",
            self._ops.mkdir(request.node, request.names[0], body.mode, caller),
            self._entry,
        )

    def _on_unlink(self, count: int) -> None:
        unique, parent, name, *caller = requests.decode_lookup(self._buffer, count)
        begun = self._ops.begin_unlink(parent, name, Caller(*caller), unique) if unique <= FIRST else None
        if begun is not None:
            self._keep_in_work(begun, unique, "unlink", self._done)
        else:
            self._start(unique, "unlink", self._ops.unlink(parent, name, Caller(*caller)), self._done)

    def _on_rmdir(self, count: int) -> None:
        unique, parent, name, *caller = requests.decode_lookup(self._buffer, count)
        self._start(unique, "rmdir", self._ops.rmdir(parent, name, Caller(*caller)), self._done)

    def _on_rename(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        flags = body.flags if request.opcode == Op.RENAME2 else 0
        name, new_name = request.names
        self._start(
            request.unique,
            "rename",
            self._ops.rename(request.node, name, body.newdir, new_name, flags, caller),
            self._done,
        )

    _on_rename2 = _on_rename

    def _on_link(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        self._start(
            request.unique,
            "link",
            self._ops.link(body.oldnodeid, request.node, request.names[0], caller),
            self._entry,
        )

    def _on_fsync(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self._start(
            request.unique,
            "fsync",
            self._ops.fsync(body.fh, bool(body.fsync_flags & FSYNC_DATA_ONLY)),
            self._done,
        )

    def _on_fallocate(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        self._start(
            request.unique,
            "fallocate",
            self._ops.fallocate(body.fh, body.offset, body.length, body.mode, caller),
            self._done,
        )

    def _on_lseek(self, count: int) -> None:
        if self._ops.options.writeback:
            self._on_unknown(count)  # then the whole file counts as data, and the kernel answers so itself
            return
        request, body, _ = self._decoded(count)
        self._start(request.unique, "lseek", self._ops.lseek(body.fh, body.offset, body.whence), self._number)

    def _on_copy_file_range(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        copying = self._ops.copy_file_range(
            body.fh_in, body.off_in, body.fh_out, body.off_out, body.len, body.flags, caller
        )
        wide = request.opcode == Op.COPY_FILE_RANGE_64
        self._start(request.unique, "copy_file_range", copying, self._number if wide else self._count)

    _on_copy_file_range_64 = _on_copy_file_range

    def _number(self, unique: int, value: int) -> None:
        self._send(replies.number(unique, value))

    def _on_fsyncdir(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self._start(request.unique, "fsyncdir", self._ops.fsyncdir(body.fh), self._done)

    def _on_statfs(self, count: int) -> None:
        request, _, _ = self._decoded(count)
        self._start(request.unique, "statfs", self._ops.statfs(request.node), self._space)

    def _on_getxattr(self, count: int) -> None:
        unique, node, room, name = requests.decode_getxattr(self._buffer, count)
        if self._ops.has_no_xattr(node, name):
            self._send(replies.failed(unique, errno.ENODATA))
        else:
            self._start(unique, "getxattr", self._ops.getxattr(node, name), partial(self._value, room))

    def _on_setxattr(self, count: int) -> None:
        extended = self._setxattr_extended
        request = requests.decode(self._buffer, count, setxattr_extended=extended)
        caller, body = Caller(request.uid, request.gid, request.pid), request.body
        kill_set_gid = bool(body.setxattr_flags & SETXATTR_ACL_KILL_SGID) if extended else None
        self._start(
            request.unique,
            "setxattr",
            self._ops.setxattr(
                request.node, request.names[0], bytes(request.payload), body.flags, caller, kill_set_gid
            ),
            self._done,
        )

    def _on_listxattr(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self._start(
            request.unique,
            "listxattr",
            self._ops.listxattr(request.node),
            lambda unique, names: self._value(body.size, unique, b"".join(name + b"\0" for name in names)),
        )

    def _on_removexattr(self, count: int) -> None:
        unique, node, name, *caller = requests.decode_lookup(self._buffer, count)
        self._start(unique, "removexattr", self._ops.removexattr(node, name, Caller(*caller)), self._done)

    def _on_getlk(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self._start(
            request.unique,
            "getlk",
            self._ops.getlk(body.fh, body.owner, body.start, body.end, body.type, body.pid),
            self._lock,
        )

    def _lock(self, unique: int, found: tuple[int, int, int, int]) -> None:
        kind, start, end, pid = found
        self._send(replies.lock(unique, start, end, kind, pid))

    def _on_setlk(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        wait = request.opcode == Op.SETLKW
        if body.lk_flags & LOCK_FLOCK:
            locking = self._ops.flock(body.fh, body.owner, body.type, body.pid, wait)
        else:
            locking = self._ops.setlk(body.fh, body.owner, body.start, body.end, body.type, body.pid, wait)
        self._start(request.unique, "setlk", locking, self._done)

    _on_setlkw = _on_setlk

    def _on_access(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        self._start(request.unique, "access", self._ops.access(request.node, body.mask, caller), self._done)

    def _on_forget(self, count: int) -> None:
        fields = requests.decode_forget(self._buffer, count)
        self._ops.forget(((fields[3], fields[9]),))

    def _on_batch_forget(self, count: int) -> None:
        self._ops.forget(self._decoded(count)[0].payload)

    def _on_notify_reply(self, count: int) -> None:
        """Do nothing: the kernel's pages are never requested."""

    def _on_destroy(self, count: int) -> None:
        self._done(requests.decode(self._buffer, count).unique)

    def _on_ioctl(self, count: int) -> None:
        """Reply ENOTTY: Linux before 6.4 passes ENOSYS on to the program."""
        self._send(replies.failed(requests.decode(self._buffer, count).unique, errno.ENOTTY))

    def _on_unknown(self, count: int) -> None:
        """Reply ENOSYS: the kernel does without the operation, and mostly does not send it again."""
        request = requests.decode(self._buffer, count)
        if request.opcode not in UNANSWERED:
            self._send(replies.failed(request.unique, errno.ENOSYS))


def _opening(opened) -> int:
    return (
        _DIRECT_IO * bool(opened.direct_io)
        | _KEEP_CACHE * bool(opened.keep_cache)
        | _NOFLUSH * bool(opened.no_flush)
    )
