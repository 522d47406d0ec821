"""Request dispatch of the kernel engine: decode a request, call `fuse/ops/operations`, send the reply.

There is one method for each operation, found by its name: `_on_…`, or `on_…` if a fast path comes first. Those
of WRITE and FLUSH are in `fuse/write_requests`. Used by `fuse/kernel/connection`, which reads the requests, and
by `fuse/fast_path`, for requests that the fast paths decline. The code here never decides what a request means.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from nvpool.client.state.vfs_types import NOW, Caller
from nvpool.core.clock import stopwatch_s
from nvpool.fuse.ops.eager_coroutine import WAITS, EagerCoroutine
from nvpool.fuse.ops.metadata import ASK
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import (
    FSYNC_DATA_ONLY,
    LOCK_FLOCK,
    OPEN_KILL_SUIDGID,
    SETXATTR_ACL_KILL_SGID,
    UNANSWERED,
    Op,
    Valid,
)
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState
from nvpool.fuse.write_requests import WriteRequests


class KernelRequests:
    """Handlers of all operations; each is called with the length of the request in the buffer.

    `keep(step, unique, name, answer)` registers a request that has to wait; see PendingRequests.keep.
    """

    def __init__(
        self,
        ops: FuseOps,
        state: RequestState,
        sender: ReplySender,
        keep: Callable[[Any, int, str, Callable], None],
    ) -> None:
        self._ops = ops
        self._state = state
        self._replies = sender
        self._keep = keep
        self._buffer, self._view = state.buffer, state.view
        self._held = state.held
        writes = WriteRequests(ops, state, sender, keep, self.start)
        self._on_write, self._on_flush = writes.on_write, writes.on_flush
        self._spare: EagerCoroutine

    def begin(self) -> None:
        """Prepare for requests; call this before the first, on the loop."""
        self._spare = EagerCoroutine(self._state.loop)

    def table(self) -> list[Callable[[int], None]]:
        """Table of handlers by operation."""
        table: list[Callable[[int], None]] = [self._on_unknown] * 256
        for opcode in Op:
            name = f"on_{opcode.name.lower()}"
            handler = getattr(self, f"_{name}", None) or getattr(self, name, None)
            if handler is not None:
                table[opcode] = handler
        return table

    def start(self, unique: int, name: str, coroutine: Coroutine, answer: Callable[[int, Any], None]) -> None:
        """Run the coroutine and call answer(unique, its result).

        That happens immediately if the coroutine does not wait.
        """
        step = self._spare
        step.unique = unique & FIRST
        try:
            result = step.begin(coroutine)
        except Exception as error:
            self._replies.fail(unique, error, name)
        else:
            if result is WAITS:
                self._spare = EagerCoroutine(step.loop)
                self._keep(step, unique, name, answer)
                return
            answer(unique, result)
        if self._held:
            self._ops.answered(unique & FIRST)

    # -- requests, the frequent ones first -----------------------------------------------------------------------------

    def on_read(self, count: int) -> None:
        """Handle a READ: from the caches, or when its data has arrived."""
        _, _, unique, _, _, _, _, _, _, handle, offset, size = requests.decode_read(self._buffer, count)
        found = self._ops.read_now(handle, offset, size)
        if found is not None:
            self._replies.data(unique, found)
            return
        coming = self._ops.begin_read(handle, offset, size)
        if coming is None:
            self.start(unique, "read", self._ops.read(handle, offset, size), self._replies.data)
        elif not coming.done():
            self._keep(coming, unique, "read", self._replies.data)
        elif coming.outcome[1] is None:
            self._replies.data(unique, coming.outcome[0])
        else:
            self._replies.fail(unique, coming.outcome[1], "read")

    def _on_lookup(self, count: int) -> None:
        unique, parent, name, _, _, _ = requests.decode_lookup(self._buffer, count)
        found = self._ops.lookup_now(parent, name)
        if found is not ASK:
            self._replies.entry(unique, found)
            return
        asked = self._ops.begin_lookup(parent, name)
        if asked is None:
            self.start(unique, "lookup", self._ops.lookup(parent, name), self._replies.entry)
        elif not asked.done():
            self._keep(asked, unique, "lookup", self._replies.entry)
        elif asked.outcome[1] is None:
            self._replies.entry(unique, asked.outcome[0])
        else:
            self._replies.fail(unique, asked.outcome[1], "lookup")

    def _on_getattr(self, count: int) -> None:
        _, _, unique, node, *_ = requests.decode_getattr(self._buffer, count)
        found = self._ops.getattr_now(node)
        if found is not None:
            self._replies.attributes(unique, found)
        else:
            self.start(unique, "getattr", self._ops.getattr(node), self._replies.attributes)

    def _on_open(self, count: int) -> None:
        _, _, unique, node, uid, gid, pid, _, _, flags, more = requests.decode_open(self._buffer, count)
        caller = Caller(uid, gid, pid)
        if unique <= FIRST:
            opened = self._ops.open_now(node, flags, caller, unique)
        else:  # continue what the predecessor started for this request
            handle = self._ops.handle_before(unique & FIRST)
            opened = self._ops.open_again(handle) if handle is not None else None
        if opened is not None:
            self._replies.opened(unique, opened)
        else:
            self.start(
                unique,
                "open",
                self._ops.open(node, flags, caller, bool(more & OPEN_KILL_SUIDGID)),
                self._replies.opened,
            )

    def on_create(self, count: int) -> None:
        """Handle a CREATE; a resent one opens the same file again."""
        fields, name = requests.decode_create(self._buffer, count)
        _, _, unique, node, uid, gid, pid, _, _, flags, mode, umask, _ = fields
        if unique > FIRST and (handle := self._ops.handle_before(unique & FIRST)) is not None:
            self.start(unique, "create", self._ops.create_again(handle), self._replies.created)
            return
        caller = Caller(uid, gid, pid, umask)
        begun = self._ops.begin_create(node, name, mode, flags, caller, unique) if unique <= FIRST else None
        if begun is not None:
            self._keep(begun, unique, "create", self._replies.created)
        else:
            self.start(
                unique, "create", self._ops.create(node, name, mode, flags, caller), self._replies.created
            )

    def _on_tmpfile(self, count: int) -> None:
        """Handle TMPFILE as CREATE; the name has no meaning."""
        (_, _, unique, node, uid, gid, pid, _, _, flags, mode, umask, _), _ = requests.decode_create(
            self._buffer, count
        )
        if unique > FIRST and (handle := self._ops.handle_before(unique & FIRST)) is not None:
            making = self._ops.create_again(handle)
        else:
            making = self._ops.create_unnamed(node, mode, flags, Caller(uid, gid, pid, umask))
        self.start(unique, "tmpfile", making, self._replies.created)

    def _on_release(self, count: int) -> None:
        fields = requests.decode_release(self._buffer, count)
        # its locks must end before other clients request theirs
        if fields[2] <= FIRST and not self._ops.is_locked(fields[9]):
            self._state.late.append(bytes(self._view[:count]))
            self._state.deferred += 1
        else:
            self.start(
                fields[2], "release", self._ops.release(fields[9], fields[2] > FIRST), self._replies.done
            )

    def release_all(self, late: list[bytes]) -> None:
        """Release closed files when no application waits: the kernel sends RELEASE while the application
        continues.

        The buffer must not contain a request that is being handled.
        """
        state = self._state
        for request in late:
            since_s = state.since_s = stopwatch_s()
            state.deferred = 0
            fields = requests.decode_release(request, len(request))
            unique, handle = fields[2], fields[9]
            try:
                if self._ops.release_now(handle):
                    self._replies.done(unique)
                else:
                    self._view[: len(request)] = request
                    self.start(unique, "release", self._ops.release(handle), self._replies.done)
            except Exception as error:
                self._replies.fail(unique, error, "release")
            if not state.deferred:
                state.spent.add(Op.RELEASE, stopwatch_s() - since_s)

    def _on_opendir(self, count: int) -> None:
        fields = requests.decode_open(self._buffer, count)
        if fields[2] > FIRST and (handle := self._ops.handle_before(fields[2] & FIRST)) is not None:
            self._replies.opened_directory(fields[2], handle)
            return
        self.start(fields[2], "opendir", self._ops.opendir(fields[3]), self._replies.opened_directory)

    def _on_releasedir(self, count: int) -> None:
        fields = requests.decode_release(self._buffer, count)
        self.start(
            fields[2], "releasedir", self._ops.releasedir(fields[9], fields[2] > FIRST), self._replies.done
        )

    def _on_readdirplus(self, count: int) -> None:
        self._list(requests.decode_read(self._buffer, count), True)

    def _on_readdir(self, count: int) -> None:
        self._list(requests.decode_read(self._buffer, count), False)

    def _list(self, fields: tuple, plus: bool) -> None:
        listing = replies.ReaddirReply(
            min(fields[11], len(self._buffer)), plus, self._state.keep_entry, self._state.keep_attr
        )
        self.start(
            fields[2],
            "readdir",
            self._ops.readdir(fields[9], fields[10], listing.add, listing.add_all),
            lambda unique, _: self._replies.data(unique, listing.taken()),
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
        self.start(
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
            self._replies.attributes,
        )

    def _on_statx(self, count: int) -> None:
        request, _, _ = self._decoded(count)
        self.start(
            request.unique,
            "statx",
            self._ops.statx(request.node),
            self._replies.statx,
        )

    def _on_readlink(self, count: int) -> None:
        request, _, _ = self._decoded(count)
        self.start(request.unique, "readlink", self._ops.readlink(request.node), self._replies.data)

    def _on_symlink(self, count: int) -> None:
        request, _, caller = self._decoded(count)
        name, target = request.names
        self.start(
            request.unique,
            "symlink",
            self._ops.symlink(request.node, name, target, caller),
            self._replies.entry,
        )

    def _on_mknod(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        caller = caller._replace(umask=body.umask)
        self.start(
            request.unique,
            "mknod",
            self._ops.mknod(request.node, request.names[0], body.mode, body.rdev, caller),
            self._replies.entry,
        )

    def _on_mkdir(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        caller = caller._replace(umask=body.umask)
        self.start(
            request.unique,
            "mkdir",
            self._ops.mkdir(request.node, request.names[0], body.mode, caller),
            self._replies.entry,
        )

    def _on_unlink(self, count: int) -> None:
        unique, parent, name, *caller = requests.decode_lookup(self._buffer, count)
        begun = self._ops.begin_unlink(parent, name, Caller(*caller), unique) if unique <= FIRST else None
        if begun is not None:
            self._keep(begun, unique, "unlink", self._replies.done)
        else:
            self.start(unique, "unlink", self._ops.unlink(parent, name, Caller(*caller)), self._replies.done)

    def _on_rmdir(self, count: int) -> None:
        unique, parent, name, *caller = requests.decode_lookup(self._buffer, count)
        self.start(unique, "rmdir", self._ops.rmdir(parent, name, Caller(*caller)), self._replies.done)

    def _on_rename(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        flags = body.flags if request.opcode == Op.RENAME2 else 0
        name, new_name = request.names
        self.start(
            request.unique,
            "rename",
            self._ops.rename(request.node, name, body.newdir, new_name, flags, caller),
            self._replies.done,
        )

    _on_rename2 = _on_rename

    def _on_link(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        self.start(
            request.unique,
            "link",
            self._ops.link(body.oldnodeid, request.node, request.names[0], caller),
            self._replies.entry,
        )

    def _on_fsync(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self.start(
            request.unique,
            "fsync",
            self._ops.fsync(body.fh, bool(body.fsync_flags & FSYNC_DATA_ONLY)),
            self._replies.done,
        )

    def _on_fallocate(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        self.start(
            request.unique,
            "fallocate",
            self._ops.fallocate(body.fh, body.offset, body.length, body.mode, caller),
            self._replies.done,
        )

    def _on_lseek(self, count: int) -> None:
        if self._ops.options.writeback:
            self._on_unknown(count)  # then the whole file counts as data, and the kernel answers so itself
            return
        request, body, _ = self._decoded(count)
        self.start(
            request.unique, "lseek", self._ops.lseek(body.fh, body.offset, body.whence), self._replies.number
        )

    def _on_copy_file_range(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        copying = self._ops.copy_file_range(
            body.fh_in, body.off_in, body.fh_out, body.off_out, body.len, body.flags, caller
        )
        wide = request.opcode == Op.COPY_FILE_RANGE_64
        self.start(
            request.unique, "copy_file_range", copying, self._replies.number if wide else self._replies.count
        )

    _on_copy_file_range_64 = _on_copy_file_range

    def _on_fsyncdir(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self.start(request.unique, "fsyncdir", self._ops.fsyncdir(body.fh), self._replies.done)

    def _on_statfs(self, count: int) -> None:
        request, _, _ = self._decoded(count)
        self.start(request.unique, "statfs", self._ops.statfs(request.node), self._replies.space)

    def _on_getxattr(self, count: int) -> None:
        unique, node, room, name = requests.decode_getxattr(self._buffer, count)
        if self._ops.has_no_xattr(node, name):
            self._replies.send(replies.failed(unique, errno.ENODATA))
        else:
            self.start(unique, "getxattr", self._ops.getxattr(node, name), partial(self._replies.value, room))

    def _on_setxattr(self, count: int) -> None:
        extended = self._state.setxattr_extended
        request = requests.decode(self._buffer, count, setxattr_extended=extended)
        caller, body = Caller(request.uid, request.gid, request.pid), request.body
        kill_set_gid = bool(body.setxattr_flags & SETXATTR_ACL_KILL_SGID) if extended else None
        self.start(
            request.unique,
            "setxattr",
            self._ops.setxattr(
                request.node, request.names[0], bytes(request.payload), body.flags, caller, kill_set_gid
            ),
            self._replies.done,
        )

    def _on_listxattr(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self.start(
            request.unique,
            "listxattr",
            self._ops.listxattr(request.node),
            lambda unique, names: self._replies.value(
                body.size, unique, b"".join(name + b"\0" for name in names)
            ),
        )

    def _on_removexattr(self, count: int) -> None:
        unique, node, name, *caller = requests.decode_lookup(self._buffer, count)
        self.start(
            unique, "removexattr", self._ops.removexattr(node, name, Caller(*caller)), self._replies.done
        )

    def _on_getlk(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        self.start(
            request.unique,
            "getlk",
            self._ops.getlk(body.fh, body.owner, body.start, body.end, body.type, body.pid),
            self._replies.lock,
        )

    def _on_setlk(self, count: int) -> None:
        request, body, _ = self._decoded(count)
        wait = request.opcode == Op.SETLKW
        if body.lk_flags & LOCK_FLOCK:
            locking = self._ops.flock(body.fh, body.owner, body.type, body.pid, wait)
        else:
            locking = self._ops.setlk(body.fh, body.owner, body.start, body.end, body.type, body.pid, wait)
        self.start(request.unique, "setlk", locking, self._replies.done)

    _on_setlkw = _on_setlk

    def _on_access(self, count: int) -> None:
        request, body, caller = self._decoded(count)
        self.start(
            request.unique, "access", self._ops.access(request.node, body.mask, caller), self._replies.done
        )

    def _on_forget(self, count: int) -> None:
        fields = requests.decode_forget(self._buffer, count)
        self._ops.forget(((fields[3], fields[9]),))

    def _on_batch_forget(self, count: int) -> None:
        self._ops.forget(self._decoded(count)[0].payload)

    def _on_notify_reply(self, count: int) -> None:
        """Do nothing: the kernel's pages are never requested."""

    def _on_destroy(self, count: int) -> None:
        self._replies.done(requests.decode(self._buffer, count).unique)

    def _on_ioctl(self, count: int) -> None:
        """Reply ENOTTY: Linux before 6.4 passes ENOSYS on to the program."""
        self._replies.send(replies.failed(requests.decode(self._buffer, count).unique, errno.ENOTTY))

    def _on_unknown(self, count: int) -> None:
        """Reply ENOSYS: the kernel does without the operation, and mostly does not send it again."""
        request = requests.decode(self._buffer, count)
        if request.opcode not in UNANSWERED:
            self._replies.send(replies.failed(request.unique, errno.ENOSYS))
