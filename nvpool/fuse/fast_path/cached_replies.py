"""Fast path for replies from the caches: one typed step from the request to the reply.

Creating or reading a file takes half a dozen requests. Most only repeat what is cached here: attributes of
the directory after each change of it, a name that exists or not, file capabilities before each write, a close
with nothing to flush. Through the handlers (fuse/dispatch) such a reply takes some 10 µs, of which 3 are the
system calls. Here the loop that reads requests answers them, from the same caches (client/state/metadata_cache,
client/state/leases, client/state/open_handles).

The fast path covers:

* GETATTR and LOOKUP of entries that are fresh or covered by a lease, and LOOKUP of a name that is known to be
  absent;
* OPEN for reading of a file under a lease with a right to read it;
* GETXATTR of file capabilities and access control lists that are known to be absent;
* FLUSH of a file that was not written;
* RELEASE (deferred, as always) of a file that has no locks and nothing left to store; FORGET.

All other requests, and all that need a query, are declined without side effects: READs go to the compiled
reads (small_files, local_reads, read_plan), others to their handlers. What the kernel was given is
recorded as the handlers do.

*Deferred closes of new files.* Threads that create files in one directory run one after the other in the
kernel: while one thread gets the reply to its close, the next is on its way to its own CREATE, and both want
the same processor. So if different threads or processes created the last two files, a FLUSH with nothing to
flush is answered at the end of the burst. Mostly the next CREATE has then been sent to its shard,
and this process waits for that anyway. A burst ends when no request arrives within the polling time (some
20 µs), immediately if a request is pending, and after BURST_MAX requests. A thread that creates files alone
gets its reply immediately.

CachedReplyPath is the part of fuse/kernel/connection that uses this (see fuse/fast_path/paths).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from nvpool.client.state.leases import Leases
from nvpool.client.state.metadata_cache import ACL_FLAG, MetadataCache
from nvpool.client.state.open_handles import OpenHandles
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.client.vfs.lookup_prefetch import LookupPrefetch
from nvpool.core import primitives
from nvpool.core.posix import acl
from nvpool.core.primitives import ByteReader, ByteWriter
from nvpool.fuse.ops.kernel_cache.names import NAMED_TOGETHER, SENT_CHANGES_MAX
from nvpool.fuse.ops.kernel_cache.pages import HAS_XATTRS, SEEN_MAX
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.ops.setid import CAPABILITY
from nvpool.fuse.protocol import reply_encoder
from nvpool.fuse.protocol.constants import Op, Opening
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.shm.mount_records import HandleRecords

CLOSES_MAX = 16
"""Closes that are deferred to the end of a burst."""
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ = map(int, (Op.LOOKUP, Op.FORGET, Op.GETATTR, Op.OPEN, Op.READ))
_RELEASE, _GETXATTR, _FLUSH, _CREATE = map(int, (Op.RELEASE, Op.GETXATTR, Op.FLUSH, Op.CREATE))
_HEADER_BYTES, _GETATTR_BYTES, _FORGET_BYTES, _OPEN_BYTES = 40, 56, 48, 48
_RELEASE_BYTES, _GETXATTR_BYTES = 64, 48
"""Of a RELEASE or FLUSH; of a GETXATTR before the name."""
_ROOT, _DOT, _FIRST = 1, 46, FIRST
_LEFT_OPEN, _BYPASS = os.O_ACCMODE | os.O_TRUNC | os.O_DIRECT, os.O_DIRECT
_KEEP_CACHE, _NOFLUSH = Opening.KEEP_CACHE.value, Opening.NOFLUSH.value
_HAS_XATTRS, _ACL_FLAG, _SEEN_MAX, _SENT_CHANGES_MAX = HAS_XATTRS, ACL_FLAG, SEEN_MAX, SENT_CHANGES_MAX
_TOGETHER, _CLOSES_MAX = NAMED_TOGETHER, CLOSES_MAX
_CAPABILITY, _ACCESS_LISTS = CAPABILITY + b"\0", frozenset(name + b"\0" for name in acl.NAMES)
_EAGAIN, _ENOENT, _ENODATA = errno.EAGAIN, errno.ENOENT, errno.ENODATA
_NOT_WAITING = frozenset((errno.ENOENT, errno.ENODEV, errno.ECONNABORTED))
"""Errors of a reply for which no caller waits any more."""


class CachedReplies:
    """The replies of one mount from its caches.

    `path.requests` has the buffer, and the list of closed files that are released late. `takers`: functions
    that may start a READ in the buffer; each gets the length of the request, and returns whether it has
    started it.
    """

    def __init__(
        self,
        path: CachedReplyPath,
        ops: FuseOps,
        vfs: Any,
        is_subtree: bool,
        takers: tuple[Callable[[int], bool], ...],
    ) -> None:
        requests, names, pages = path.requests, ops.cached_names, ops.cached_pages
        self._path = path
        self._requests = requests
        self._fd: int = requests.fd
        self._buffer: Any = requests.buffer
        self._times: list[Any] = requests.spent.times
        self._spent = requests.spent
        self._takers = takers
        self._is_subtree = is_subtree
        self._in, self._out = ByteReader(), ByteWriter()
        self._attr_s, self._attr_ns = requests.keep_attr
        self._entry_s, self._entry_ns = requests.keep_entry
        self._leases: Leases = vfs.leases
        self._cache: MetadataCache = vfs.cache
        self._handles: OpenHandles = vfs.files.handles
        self._prefetch: LookupPrefetch = vfs.lookup_prefetch
        self._owners: Any = vfs.locks.owners
        self._fresh_s, self._name_s, self._absent_s = (
            vfs.options.fresh_s,
            vfs.lookups.name_s,
            vfs.lookups.absent_s,
        )
        self._squashes_root = vfs.squashes_root
        self._names, self._sent_changes, self._withdrawn = names, names.sent_changes, names.withdrawn
        self._pages, self._seen, self._paged = pages, pages.seen, pages.paged
        self._notices, self._xattrs, self._published = ops.notices, ops.xattrs, ops.published
        self._refused, self._locked = ops.bypass.refused, ops.bypass.locked
        self._numbers = ops.handles
        self._records: HandleRecords | None = None if ops.kept is None else ops.kept.handle_records
        self._files: dict[int, FileHandle] = ops.files.by_handle
        self._may_open = not ops.options.writeback
        self._keeps_names = ops.options.entry_timeout_s > 0
        self._keeps_absent = ops.options.negative_timeout_s > 0
        self.taken = 0
        """Number of requests that `next_request` has handled the last time."""
        self._counts = [0] * (max(Op) + 1)
        self._maker = 0  # the thread that created the last file
        self._turns = (
            0  # files that another thread created than the file before; so many closes may be deferred
        )
        self._closes: list[tuple[int, float]] = []  # number of the request, and since when

    @property
    def all_taken(self) -> dict[int, int]:
        """Number of requests answered, deferred or started here, by operation."""
        return {opcode: count for opcode, count in enumerate(self._counts) if count}

    def next_request(self, most: int) -> int:
        """Read requests of the kernel until one cannot be handled here.

        Returns that one's length; it is in the buffer. -1: no request waits. 0: `most` were handled,
        and there may be more. `taken`: how many requests were handled here. Raises OSError.
        """
        self.taken = 0
        while self.taken < most:
            count = primitives.receive(self._fd, self._buffer)
            if count < 0:
                if count == -_EAGAIN:
                    return -1
                raise OSError(-count, os.strerror(-count))
            try:
                if not self.take(count):
                    return count
            except Exception as bug:  # report it to the caller
                self._path.broken(bug)
            self.taken += 1
        return 0

    def take(self, count: int) -> bool:
        """Answer, or start, the request of `count` bytes in the buffer.

        False: nothing has happened.
        """
        if count < _HEADER_BYTES:
            return False
        source = self._in
        source.open_part(self._buffer, 0, count)
        length = source.u32()
        opcode = source.u32()
        unique = source.u64()
        node = source.u64()
        uid = source.u32()
        gid = source.u32()
        pid = source.u32()
        extension_words = source.u32() & 0xFFFF
        if length != count or unique > _FIRST or extension_words:
            return False
        if opcode == _READ:
            return self._take_read(count)
        if opcode == _CREATE:
            self._note_maker(pid)
            return False
        if self._is_subtree and node == _ROOT:
            return False
        since_s = primitives.stopwatch_s()
        if opcode == _GETATTR:
            is_done = count == _GETATTR_BYTES and self._getattr(unique, node)
        elif opcode == _LOOKUP:
            is_done = self._lookup(unique, node, count)
        elif opcode == _OPEN:
            is_done = count == _OPEN_BYTES and self._open(unique, node, uid, gid, pid)
        elif opcode == _GETXATTR:
            is_done = count > _GETXATTR_BYTES and self._getxattr(unique, node)
        elif opcode == _FLUSH:
            is_done = count == _RELEASE_BYTES and self._is_flushed()
            if is_done and self._defer_close(unique, since_s):
                return True
            if is_done:
                self._send_status(unique, 0)
        elif opcode == _RELEASE:
            return count == _RELEASE_BYTES and self._release(count)
        elif opcode == _FORGET:
            is_done = count == _FORGET_BYTES and self._forget(node)
        else:
            return False
        if is_done:
            self._counts[opcode] += 1
            self._count(opcode, primitives.stopwatch_s() - since_s)
        return is_done

    def _take_read(self, count: int) -> bool:
        """Take a READ. One that is answered here is counted here, one that is pending when it ends.

        The counters of the run stay unchanged.
        """
        requests: Any = self._requests
        run_s: Any = requests.since_s
        deferred: Any = requests.deferred
        since_s = primitives.stopwatch_s()
        requests.since_s = since_s
        try:
            for take in self._takers:
                if take(count):
                    self._counts[_READ] += 1
                    if requests.deferred == deferred:
                        self._count(_READ, primitives.stopwatch_s() - since_s)
                    return True
            return False
        finally:
            requests.since_s, requests.deferred = run_s, deferred

    def _count(self, opcode: int, took_s: float) -> None:
        """Record a latency, as FuseTimes.add."""
        times: Any = self._times[opcode]
        if times is None:
            self._spent.add(opcode, max(0.0, took_s))
            return
        times.counts[primitives.duration_slot(took_s)] += 1
        times.sum_s += took_s

    def _send(self, unique: int) -> None:
        """Send the reply that was encoded."""
        code = self._out.send(self._fd)
        if code and code not in _NOT_WAITING:
            self._path.answer_refused(unique, code, self._out.size())

    def _send_status(self, unique: int, code: int) -> None:
        reply_encoder.status(self._out, unique, code)
        self._send(unique)

    # -- names and attributes

    def _attr(self, inode: int, now_s: float) -> Attr | None:
        """Attributes for the kernel, as Lookups.getattr_now. None: a query, or data to be merged, is needed."""
        file = self._cache.open.get(inode)
        if file is not None and file.written is not None:
            written: Any = file.written
            if written.unsettled or written.end > file.attr.size:
                return None
        return self._cache.attr_at(inode, self._fresh_s, now_s)

    def _getattr(self, unique: int, node: int) -> bool:
        inode: Any = node
        attr = self._attr(inode, self._leases.now_s())
        if attr is None or len(self._sent_changes) > _SENT_CHANGES_MAX:
            return False
        self._sent_changes[inode] = attr.change
        reply_encoder.attributes(self._out, unique, attr, self._attr_s, self._attr_ns)
        self._send(unique)
        return True

    def _lookup(self, unique: int, node: int, count: int) -> bool:
        size = count - _HEADER_BYTES - 1
        if size < 1:
            return False
        name = self._in.raw(size)
        if self._in.u8() or 0 in name or (name[0] == _DOT and (size == 1 or name == b"..")):
            return False
        parent: Any = node
        now_s = self._leases.now_s()
        inode: Any = self._cache.entry_at(parent, name, self._name_s, now_s)
        if not inode:
            if self._keeps_absent:
                return False
            if inode is None and not self._cache.is_absent_at(parent, name, self._absent_s, now_s):
                return False
            self._send_status(unique, _ENOENT)
            return True
        cover: Any = self._cache.name_cover
        attr = self._attr(inode, now_s)
        if attr is None or len(self._sent_changes) > _SENT_CHANGES_MAX:
            return False
        self._prefetch.hit(parent, name)
        entry_s, entry_ns = self._entry_s, self._entry_ns
        if not self._keeps_names:
            pass
        elif cover:
            names: Any = self._names
            if now_s >= names.naming_until_s or len(names.naming.names) >= _TOGETHER:
                names.start_group()
            names.naming.names.append((cover, parent, name, inode))
        else:
            entry_s = entry_ns = 0
        if self._withdrawn:
            self._withdrawn.pop(inode, None)
        self._sent_changes[inode] = attr.change
        reply_encoder.entry(self._out, unique, attr, entry_s, entry_ns, self._attr_s, self._attr_ns)
        self._send(unique)
        return True

    def _getxattr(self, unique: int, node: int) -> bool:
        """Answer as ExtendedAttributes.has_no_xattr.

        The kernel queries file capabilities before each write, and an access control list when a user other
        than the owner needs a right.
        """
        source = self._in
        source.u64()
        name = source.rest()
        inode: Any = node
        if name == _CAPABILITY:
            seen: Any = self._seen.get(inode)
            if seen is None or not seen[1]:
                return False
        elif name in _ACCESS_LISTS and self._xattrs.keeps_acls:
            attr = self._attr(inode, self._leases.now_s())
            if attr is None or attr.flags & _ACL_FLAG:
                return False
        else:
            return False
        self._send_status(unique, _ENODATA)
        return True

    def _forget(self, node: int) -> bool:
        inode: Any = node
        self._seen.pop(inode, None)
        self._sent_changes.pop(inode, None)
        return True

    # -- open files

    def _open(self, unique: int, node: int, uid: int, gid: int, pid: int) -> bool:
        """Open a file to read it, as OpenFiles.open_now. Not in a mount with read workers."""
        flags = self._in.u32()
        if flags & _LEFT_OPEN or not self._may_open or self._published.on:
            return False
        if not uid and self._squashes_root:
            return False
        inode: Any = node
        if self._withdrawn and inode in self._withdrawn:
            return False
        handle = self._handles.open_now(inode, flags, self._leases.now_s())
        if handle is None:
            return False
        attr = handle.file.attr
        change: Any = attr.change
        sent: Any = self._sent_changes.get(inode)
        if sent is None or sent != change:
            self._notices.invalidate_attributes(inode)
        before: Any = self._seen.pop(inode, None)
        is_kept = before is not None and before[0] == change
        self._seen[inode] = (change, not attr.flags & _HAS_XATTRS)
        if len(self._seen) > _SEEN_MAX:
            self._pages.record_pages(attr)  # drops the oldest
        number: Any = 0
        try:
            number = self._take_number(unique, node, flags, uid, gid, pid)
        # No space: the file is not open, and the kernel does not learn whether its pages are current.
        except Exception:
            self._seen.pop(inode, None)
            handle.closed = True
            self._handles.let_go(handle.file)
            raise
        handle.number = number
        self._files[number] = handle
        opening = 0
        if is_kept:
            opening = _KEEP_CACHE
            if inode not in self._paged:
                self._pages.paging(inode)
        if inode not in self._owners:
            opening |= _NOFLUSH
        reply_encoder.opened(self._out, unique, handle.number, opening)
        self._send(unique)
        return True

    def _take_number(self, unique: int, node: int, flags: int, uid: int, gid: int, pid: int) -> int:
        """As Handles.take."""
        if self._records is None:
            number: int = self._numbers.take(node, flags, Caller(uid, gid, pid), unique)
            return number
        serial = self._numbers.last + 1
        self._numbers.last = serial
        return self._records.keep(serial, node, flags, uid, gid, pid, unique)

    def _is_flushed(self) -> bool:
        """Whether the file of a FLUSH was not written and has no locks."""
        key: Any = self._in.u64()
        handle = self._files.get(key)
        if handle is None:
            return False
        file = handle.file
        inode: Any = file.inode
        return file.written is None and not file.lost and inode not in self._owners

    def _note_maker(self, pid: int) -> None:
        """Note which thread creates a file."""
        if pid == self._maker:
            self._turns = 0
        elif self._turns < _CLOSES_MAX:
            self._turns += 1
        self._maker = pid

    def _defer_close(self, unique: int, since_s: float) -> bool:
        """Defer the reply to a FLUSH to the end of the burst if several threads create files."""
        if not self._turns or len(self._closes) >= _CLOSES_MAX:
            return False
        self._turns -= 1
        self._closes.append((unique, since_s))
        return True

    def answer_closes(self) -> None:
        """Reply to the deferred FLUSH requests, at the end of a burst."""
        closes = self._closes
        if not closes:
            return
        self._closes = []
        self._counts[_FLUSH] += len(closes)
        for unique, _ in closes:
            self._send_status(unique, 0)
        now_s = primitives.stopwatch_s()
        for _, since_s in closes:
            self._count(_FLUSH, now_s - since_s)

    def _release(self, count: int) -> bool:
        """Defer a RELEASE, as KernelRequests does.

        Not with locks: they must end before other clients request theirs.
        """
        source = self._in
        key: Any = source.u64()
        handle = self._files.get(key)
        if handle is not None:
            inode: Any = handle.file.inode
            if inode in self._owners:
                return False
        source.open_part(self._buffer, 0, count)
        self._requests.late.append(source.rest())
        self._counts[_RELEASE] += 1
        return True

    def release_all(self, late: list[bytes]) -> list[bytes]:
        """Handle deferred RELEASE requests; returns those that were not handled here."""
        left = []
        for request in late:
            try:
                if not self.release_now(request):
                    left.append(request)
            except Exception as bug:
                self._path.fail(int.from_bytes(request[8:16], "little"), bug, "release")
        return left

    def release_now(self, request: bytes) -> bool:
        """Execute and answer a deferred RELEASE, as OpenFiles.release_now.

        False: the handler does it. It is one of a file that bypasses pages, or that waits for something first.
        """
        since_s = primitives.stopwatch_s()
        if len(request) != _RELEASE_BYTES or self._requests.forwarded:
            return False
        source = self._in
        source.open(request)
        source.u64()
        unique = source.u64()
        source.u64()
        source.u64()
        source.u64()
        key: Any = source.u64()
        handle = self._files.get(key)
        if handle is None or handle.append or handle.flags & _BYPASS or self._refused:
            return False
        inode: Any = handle.inode
        if inode in self._locked or not self._handles.release_now(handle):
            return False
        del self._files[key]
        if self._records is None:
            self._numbers.give_back(key)
        else:
            self._records.drop(key)
        published: Any = self._published
        if published.handles_of or published.writing:
            published.closed(inode, key)
        if inode in self._paged and inode not in self._cache.open:
            del self._paged[inode]
        self._send_status(unique, 0)
        self._count(_RELEASE, primitives.stopwatch_s() - since_s)
        return True


class CachedReplyPath:
    """Has `replies`, which answers the request in the buffer if it can.

    `replies` is None if the layer below has no caches. `broken` reports a bug to the caller of the request in
    the buffer.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        broken: Callable[[Exception], None],
    ) -> None:
        self.requests = requests
        self._ops = ops
        self.replies: CachedReplies | None = None
        # called by `replies`
        self.broken = broken
        self.fail = replies.fail
        self.answer_refused = replies.answer_refused

    def start(self, takers: tuple[Callable[[int], bool], ...]) -> None:
        """`takers`: the compiled reads that may take a READ, in the order of the attempts."""
        below = self._ops.knows_by
        if below is not None:
            self.replies = CachedReplies(self, self._ops, below, self._ops.view.shows_subtree, takers)

    def answer_deferred(self) -> None:
        """Reply to deferred closes, at the end of a burst."""
        if self.replies is not None:
            self.replies.answer_closes()

    def release_all(self, late: list[bytes]) -> list[bytes]:
        """Release files without their handlers if possible; returns the requests that were not handled."""
        return late if self.replies is None else self.replies.release_all(late)

    def stop(self) -> None:
        """Answer no more requests."""
        self.replies = None
