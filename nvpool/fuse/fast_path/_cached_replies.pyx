# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled replies from the caches, from the request to the reply; cached_replies.py has the contract."""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem, PyDict_Size
from cpython.ref cimport Py_DECREF, PyObject
from libc.errno cimport EAGAIN, ECONNABORTED, ENODATA, ENODEV, ENOENT, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset
from posix.unistd cimport read, write

import os

from nvpool.core.clock import SystemClock
from nvpool.core.grants import GRANT_BYTES
from nvpool.core.grants import ENCRYPTED, READ as RIGHT_TO_READ
from nvpool.core.ids import COUNTER_BITS
from nvpool.shm.mount_records cimport HandleRecords
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.client.state.metadata_cache import ACL_FLAG, OpenInode
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.leases import ShardWatch
from nvpool.client.state.vfs_types import ReadAheadState, Caller, FileHandle
from nvpool.client.vfs.lookup_prefetch import _Directory
from nvpool.fuse.fast_path._leases cimport held_lease
from nvpool.fuse.ops.kernel_cache.names import NAMED_TOGETHER, SENT_CHANGES_MAX
from nvpool.fuse.ops.kernel_cache.pages import HAS_XATTRS, SEEN_MAX
from nvpool.fuse.fast_path._slots cimport assign, born_as, get, place
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import Opening
from nvpool.core.posix.acl import ACCESS
from nvpool.poolmap.file_layout import Layout
from nvpool.rpc.messages.direntries import ENTRY_BYTES
from nvpool.rpc.v1.meta_pb2 import Attr

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    double stopwatch() nogil
    long long wall_ns() nogil

cdef extern from "_fields.h":
    uint8_t *put_number(uint8_t *at, uint8_t tag, uint64_t value) nogil
    uint8_t *put_fixed(uint8_t *at, uint8_t tag, uint64_t value) nogil

cdef enum:                      # linux/fuse.h
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    RELEASE = 18
    GETXATTR = 22
    FLUSH = 25
    CREATE = 35
    HEADER_BYTES = 40
    GETATTR_BYTES = 56
    FORGET_BYTES = 48
    OPEN_BYTES = 48
    RELEASE_BYTES = 64          # also of FLUSH
    GETXATTR_BYTES = 48         # before the name
    OUT_BYTES = 16
    ATTR_BYTES = 88
    ATTR_OUT_BYTES = 120
    ENTRY_OUT_BYTES = 144
    OPEN_OUT_BYTES = 32
    SECOND_NS = 1000000000
    ROOT = 1
    OPERATIONS = 64
    ATTR_MAX = 256              # of an Attr as a message
    SLOTS_MAX = 64
    PUT_OFF_MAX = 16            # closes deferred to the end of a burst
    S_IFMT = 0o170000
    S_IFREG = 0o100000
    GRANT_VERSION = 1

cdef struct In:
    uint32_t length, opcode
    uint64_t unique, node
    uint32_t uid, gid, pid
    uint16_t extension_words, padding

cdef struct Seen:               # the attributes of an inode
    uint64_t inode, size, blocks, change
    int64_t atime_ns, mtime_ns, ctime_ns
    uint32_t mode, links, uid, gid, rdev

cdef uint32_t bypasses_pages = os.O_DIRECT
cdef uint32_t leaves_open = os.O_ACCMODE | os.O_TRUNC | bypasses_pages, keeps_cache = Opening.KEEP_CACHE.value, no_flush = Opening.NOFLUSH.value
cdef uint32_t has_xattrs = HAS_XATTRS
cdef long right_to_read = RIGHT_TO_READ
cdef uint64_t small_bytes = SMALL_BYTES
cdef Py_ssize_t sent_changes_max = SENT_CHANGES_MAX, seen_max = SEEN_MAX, named_together = NAMED_TOGETHER
cdef Py_ssize_t name_bytes_max = NAME_BYTES_MAX
cdef Py_ssize_t record_bytes = ENTRY_BYTES
cdef uint32_t block_bytes = replies.BLOCK_BYTES
cdef bytes capability = b"security.capability\0", access_list = ACCESS + b"\0"
cdef uint32_t acl_flag = ACL_FLAG
cdef Py_ssize_t grant_bytes = GRANT_BYTES
cdef int counter_bits = COUNTER_BITS
cdef object attr_from = Attr.FromString

cdef uint8_t encrypted = ENCRYPTED
cdef Py_ssize_t file_inode = place(OpenInode, "inode"), file_layout = place(OpenInode, "layout")
cdef Py_ssize_t file_chunk_bits = place(OpenInode, "chunk_bits"), file_chunk_mask = place(OpenInode, "chunk_mask")
cdef Py_ssize_t file_attr = place(OpenInode, "attr"), file_attr_born_s = place(OpenInode, "attr_born_s")
cdef Py_ssize_t file_cut = place(OpenInode, "cut"), file_truncated = place(OpenInode, "truncated")
cdef Py_ssize_t file_grant = place(OpenInode, "grant"), file_grant_session = place(OpenInode, "grant_session")
cdef Py_ssize_t file_grant_cut = place(OpenInode, "grant_cut"), file_grant_rights = place(OpenInode, "grant_rights")
cdef Py_ssize_t file_grant_half_ms = place(OpenInode, "grant_half_ms"), file_handles = place(OpenInode, "handles")
cdef Py_ssize_t file_opened = place(OpenInode, "opened"), file_lanes = place(OpenInode, "lanes")
cdef Py_ssize_t file_written = place(OpenInode, "written"), file_ahead = place(OpenInode, "ahead")
cdef Py_ssize_t file_located = place(OpenInode, "located"), file_lost = place(OpenInode, "lost")
cdef Py_ssize_t file_unreported = place(OpenInode, "unreported"), file_fetching = place(OpenInode, "fetching")
cdef Py_ssize_t file_volume = place(OpenInode, "volume")
cdef Py_ssize_t handle_file = place(FileHandle, "file"), handle_inode = place(FileHandle, "inode")
cdef Py_ssize_t handle_flags = place(FileHandle, "flags"), handle_append = place(FileHandle, "append")
cdef Py_ssize_t handle_ahead = place(FileHandle, "ahead"), handle_closed = place(FileHandle, "closed")
cdef Py_ssize_t handle_number = place(FileHandle, "number"), ahead_units = place(ReadAheadState, "units")
cdef Py_ssize_t watch_until_s = place(ShardWatch, "until_s"), watch_used = place(ShardWatch, "used")
cdef Py_ssize_t looked_in_hits = place(_Directory, "hits"), looked_in_used = place(_Directory, "used")
cdef Py_ssize_t looked_in_middle = place(_Directory, "middle")


cdef bint is_named(const uint8_t *at, Py_ssize_t count, bytes name) noexcept:
    """Whether a GETXATTR requests that attribute; `name` includes the NUL."""
    return count - GETXATTR_BYTES == PyBytes_GET_SIZE(name) and not memcmp(at + GETXATTR_BYTES, PyBytes_AS_STRING(name),
                                                                           PyBytes_GET_SIZE(name))


cdef class Pattern:
    """Template from which new objects of a class with __slots__ are copied."""
    cdef object pattern
    cdef Py_ssize_t places[SLOTS_MAX]
    cdef Py_ssize_t count

    def __init__(self, pattern):
        names = type(pattern).__slots__
        if len(names) > SLOTS_MAX or type(pattern).__mro__[1:] != (object,):
            raise ImportError(f"{type(pattern).__name__} is not as it was")
        self.pattern, self.count = pattern, len(names)
        for at, name in enumerate(names):
            self.places[at] = place(type(pattern), name)

    cdef object born(self):
        cdef PyObject *born = born_as(<PyObject *>self.pattern, self.places, self.count)
        if born is NULL:
            raise MemoryError
        new = <object>born
        Py_DECREF(new)
        return new


cdef object no_file = OpenInode(Attr())
cdef Pattern a_file = Pattern(no_file), a_handle = Pattern(FileHandle(no_file, os.O_RDONLY)), an_ahead = Pattern(ReadAheadState())


cdef inline uint32_t get32(const uint8_t *at) noexcept:
    cdef uint32_t value
    memcpy(&value, at, 4)
    return value


cdef inline uint64_t get64(const uint8_t *at) noexcept:
    cdef uint64_t value
    memcpy(&value, at, 8)
    return value


cdef inline void put_time(uint8_t *seconds, uint8_t *rest, int64_t ns) noexcept:
    cdef int64_t below = ns < 0     # rounded down without leaving 64 bits: ~ns is not negative then
    cdef int64_t whole = ~(~ns // <int64_t>SECOND_NS) if below else ns // <int64_t>SECOND_NS
    cdef uint32_t left = <uint32_t>(<uint64_t>ns - <uint64_t>whole * <uint64_t>SECOND_NS)
    memcpy(seconds, &whole, 8)
    memcpy(rest, &left, 4)


cdef void put_attr(uint8_t *at, const Seen *seen) noexcept:
    """struct fuse_attr"""
    cdef uint32_t words[7]
    memcpy(at, &seen.inode, 8)
    memcpy(at + 8, &seen.size, 8)
    memcpy(at + 16, &seen.blocks, 8)
    put_time(at + 24, at + 48, seen.atime_ns)
    put_time(at + 32, at + 52, seen.mtime_ns)
    put_time(at + 40, at + 56, seen.ctime_ns)
    words[0], words[1], words[2], words[3], words[4] = seen.mode, seen.links, seen.uid, seen.gid, seen.rdev
    words[5], words[6] = block_bytes, 0
    memcpy(at + 60, words, 28)


cdef int read_attr(object attr, Seen *seen) except -1:
    """Read the attributes from an Attr, or from a record of rpc/messages/direntries."""
    cdef const uint8_t *at
    if type(attr) is bytes:
        if PyBytes_GET_SIZE(attr) != record_bytes:
            raise ValueError("no record of an entry")
        at = <const uint8_t *>PyBytes_AS_STRING(attr)
        memcpy(&seen.inode, at + 8, 8)
        memcpy(&seen.mode, at + 16, 4)
        memcpy(&seen.links, at + 20, 4)
        memcpy(&seen.uid, at + 24, 4)
        memcpy(&seen.gid, at + 28, 4)
        memcpy(&seen.size, at + 32, 8)
        memcpy(&seen.blocks, at + 40, 8)
        memcpy(&seen.atime_ns, at + 48, 8)
        memcpy(&seen.mtime_ns, at + 56, 8)
        memcpy(&seen.ctime_ns, at + 64, 8)
        memcpy(&seen.change, at + 72, 8)
        memcpy(&seen.rdev, at + 88, 4)
        return 0
    seen.inode, seen.size, seen.blocks, seen.change = attr.inode, attr.size, attr.blocks, attr.change
    seen.atime_ns, seen.mtime_ns, seen.ctime_ns = attr.atime_ns, attr.mtime_ns, attr.ctime_ns
    seen.mode, seen.links, seen.uid, seen.gid, seen.rdev = attr.mode, attr.links, attr.uid, attr.gid, attr.rdev
    return 0


cdef object attr_of(const uint8_t *record):
    """Convert a record, as direntries.attr_of does."""
    cdef uint8_t message[ATTR_MAX]
    cdef uint8_t *at = put_fixed(message, 0x09, get64(record + 8))
    cdef uint64_t change = get64(record + 72), parent = get64(record + 96), punches = get64(record + 104)
    at = put_number(at, 0x10, get32(record + 16))
    at = put_number(at, 0x18, get32(record + 20))
    at = put_number(at, 0x20, get32(record + 24))
    at = put_number(at, 0x28, get32(record + 28))
    at = put_number(at, 0x30, get64(record + 32))
    at = put_number(at, 0x38, get64(record + 40))
    at = put_fixed(at, 0x41, get64(record + 48))
    at = put_fixed(at, 0x49, get64(record + 56))
    at = put_fixed(at, 0x51, get64(record + 64))
    at = put_number(at, 0x58, get32(record + 88))
    at = put_number(at, 0x60, record[92] | <uint64_t>record[93] << 8)
    at = put_number(at, 0x68, record[94])
    at = put_number(at, 0x70, get64(record + 80))
    at = put_number(at, 0x78, record[95])
    if change:                  # tags of two bytes
        at[0] = 0x80
        at = put_number(at + 1, 0x01, change)
    if parent:
        at[0] = 0x89
        at = put_fixed(at + 1, 0x01, parent)
    if punches:
        at[0] = 0x90
        at = put_number(at + 1, 0x01, punches)
    return attr_from(PyBytes_FromStringAndSize(<const char *>message, at - message))


cdef class CachedReplies:
    """Compiled part of CachedReplyPath; see cached_replies.py.

    `path.requests` has the buffer, and the list of closed files that are released late.
    """
    cdef object _path, _requests, _cached_names, _pages, _notices, _xattrs, _cache, _leases, _lookup_prefetch, _clock, _spent
    cdef object _owners, _cover
    cdef object _vfs, _meta, _writer, _published
    cdef set _refused
    cdef dict _withdrawn
    cdef dict _files, _sent_changes, _seen, _paged, _open, _attrs, _entries, _whole, _leases_by_inode, _directories
    cdef bytearray _buffer
    cdef int _fd
    cdef bint _is_system, _is_subtree, _opens, _squashes_root, _has_entry_timeout, _has_negative_timeout
    cdef double _fresh_s, _absent_s
    cdef uint64_t _attr_s, _entry_s
    cdef uint32_t _attr_ns, _entry_ns
    cdef tuple _takers
    cdef object _handles, _view, _shards, _known_map, _partition_shards, _published_of, _published_writing
    cdef object _layout, _chunk_bits, _chunk_mask    # of the file that was opened last
    cdef HandleRecords _records
    cdef readonly Py_ssize_t taken
    cdef uint64_t _taken[OPERATIONS]
    cdef uint32_t _maker                            # the thread that created the last file
    cdef int _turns  # Files that another thread created than the file before; so many closes may be deferred.
    cdef uint64_t _put_off[PUT_OFF_MAX]             # `unique` of deferred FLUSH requests
    cdef double _put_off_since_s[PUT_OFF_MAX]
    cdef int _put_off_count

    def __init__(self, path, ops, vfs, bint is_subtree, tuple takers):
        """`takers`: functions that may start a READ in the buffer.

        Each gets the length of the request, and returns whether it has started it.
        """
        cache, requests = vfs.cache, path.requests
        self._path, self._requests = path, requests
        self._cache, self._leases, self._lookup_prefetch = cache, vfs.leases, vfs.lookup_prefetch
        self._cached_names, self._pages, self._notices, self._xattrs = ops.cached_names, ops.cached_pages, ops.notices, ops.xattrs
        self._vfs, self._meta, self._writer, self._published = vfs, vfs.meta, vfs.writer, ops.published
        self._refused = ops.bypass.refused
        self._paged, self._withdrawn = ops.cached_pages.paged, ops.cached_names.withdrawn
        self._opens, self._squashes_root = not ops.options.writeback, vfs.squashes_root
        self._fd, self._buffer, self._spent = requests.fd, requests.buffer, requests.spent
        self._files, self._sent_changes, self._seen, self._owners = ops.files.by_handle, ops.cached_names.sent_changes, ops.cached_pages.seen, vfs.locks.owners
        self._open, self._attrs, self._entries, self._whole = cache.open, cache.attrs, cache.entries, cache.complete_dirs
        self._leases_by_inode, self._directories = vfs.leases.by_inode, vfs.lookup_prefetch.directories
        self._clock = vfs.clock
        self._is_system = type(vfs.clock) is SystemClock
        self._is_subtree = is_subtree
        self._fresh_s, self._absent_s = vfs.options.fresh_s, vfs.lookups.absent_s
        self._has_entry_timeout = ops.options.entry_timeout_s > 0
        self._has_negative_timeout = ops.options.negative_timeout_s > 0
        self._attr_s, self._attr_ns = requests.keep_attr
        self._entry_s, self._entry_ns = requests.keep_entry
        self._takers = takers
        self._view, self._shards = vfs.meta.view, vfs.meta.shards
        self._published_of, self._published_writing = ops.published.handles_of, ops.published.writing
        self._handles, self._layout = ops.handles, Layout(0, 0)
        self._chunk_bits = self._chunk_mask = 0
        self._records = None if ops.kept is None else ops.kept.handle_records

    @property
    def all_taken(self):
        """Number of requests answered, deferred or started here, by operation."""
        return {opcode: self._taken[opcode] for opcode in range(OPERATIONS) if self._taken[opcode]}

    cdef double now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    def next_request(self, Py_ssize_t most):
        """Read requests of the kernel until one cannot be handled here.

        Returns that one's length; it is in the buffer. -1: no request waits. 0: `most` were handled,
        and there may be more. `taken`: how many requests were handled here. Raises OSError.
        """
        cdef ssize_t count
        cdef int error
        self.taken = 0
        while self.taken < most:
            count = read(self._fd, PyByteArray_AS_STRING(self._buffer), PyByteArray_GET_SIZE(self._buffer))
            if count < 0:
                error = errno
                if error == EAGAIN:
                    return -1
                raise OSError(error, os.strerror(error))
            try:
                if not self.take(count):
                    return count
            except Exception as bug:  # report it to the caller
                self._path.broken(bug)
            self.taken += 1
        return 0

    cpdef bint take(self, Py_ssize_t count) except -1:
        """Answer, or start, the request of `count` bytes in the buffer.

        False: nothing has happened.
        """
        cdef const In *head = <const In *>PyByteArray_AS_STRING(self._buffer)
        cdef const uint8_t *at = <const uint8_t *>head
        cdef double since_s
        cdef bint is_done = False
        if count < HEADER_BYTES or head.length != <uint32_t>count or head.unique >> 63 or head.extension_words:
            return False
        cdef uint32_t opcode = head.opcode
        if opcode == READ:
            return self.take_read(count)
        if opcode == CREATE:
            self.makes(head.pid)
            return False
        if self._is_subtree and head.node == ROOT:
            return False
        since_s = stopwatch()
        if opcode == GETATTR:
            is_done = count == GETATTR_BYTES and self.getattr(head.unique, head.node)
        elif opcode == LOOKUP:
            is_done = self.lookup(head.unique, head.node, at, count)
        elif opcode == OPEN:
            is_done = count == OPEN_BYTES and self.open(head, (<const uint32_t *>(at + HEADER_BYTES))[0])
        elif opcode == GETXATTR:
            is_done = self.getxattr(head.unique, head.node, at, count)
        elif count == RELEASE_BYTES and opcode == FLUSH:
            is_done = self.has_nothing_to_flush((<const uint64_t *>(at + HEADER_BYTES))[0])
            if is_done and self.put_off(head.unique, since_s):
                return True
            if is_done:
                self.send_done(head.unique)
        elif count == RELEASE_BYTES and opcode == RELEASE:
            return self.release(at, (<const uint64_t *>(at + HEADER_BYTES))[0])
        elif count == FORGET_BYTES and opcode == FORGET:
            is_done = self.forget(head.node)
        if is_done:
            self._taken[opcode] += 1
            self.count(opcode, stopwatch() - since_s)
        return is_done

    cdef bint take_read(self, Py_ssize_t count) except -1:
        """Take a READ. One that is answered here is counted here, one that is pending when it ends.

        The counters of the run stay unchanged.
        """
        requests = self._requests
        run_s, kept = requests.since_s, requests.deferred
        cdef double since_s = stopwatch()
        requests.since_s = since_s
        try:
            for take in self._takers:
                if take(count):
                    self._taken[READ] += 1
                    if requests.deferred == kept:
                        self.count(READ, stopwatch() - since_s)
                    return True
            return False
        finally:
            requests.since_s, requests.deferred = run_s, kept

    cdef int count(self, uint32_t opcode, double took_s) except -1:
        """Record a latency, as FuseTimes.add does."""
        times = (<list>self._spent.times)[opcode]
        if times is None:
            self._spent.add(opcode, max(0.0, took_s))
            return 0
        times.counts[slot_of(took_s)] += 1
        times.sum_s += took_s
        return 0

    cdef int send(self, uint64_t unique, uint8_t *out, uint32_t length, int32_t failure) except -1:
        """Send the reply; the first bytes of `out` are free for its header."""
        cdef int error
        memcpy(out, &length, 4)
        memcpy(out + 4, &failure, 4)
        memcpy(out + 8, &unique, 8)
        if write(self._fd, out, length) < 0:
            error = errno
            if error not in (ENOENT, ENODEV, ECONNABORTED):
                self._path.answer_refused(unique, error, length)
        return 0

    # -- the caches ----------------------------------------------------------------------------------------------------------

    cdef object lease(self, object inode, double now_s):
        return held_lease(self._leases_by_inode, inode, now_s, ShardWatch, watch_until_s, watch_used)

    cdef bint is_believed(self, double born_s, double age_s, double now_s) except -1:
        cdef double from_s
        if born_s + age_s <= now_s:
            return False
        from_s = self._cache.trusted_from_s
        return born_s >= from_s

    cdef object attr(self, object inode, double age_s, double now_s, bint is_for_kernel):
        """Compiled `MetadataCache.attr`; if `is_for_kernel`, `Lookups.getattr_now`.

        Returns a record if a listing had it.
        """
        cdef PyObject *found = PyDict_GetItem(self._open, inode)
        cdef double born_s
        if found is not NULL:
            file = <object>found
            if type(file) is not OpenInode:
                return None
            attr, written = get(file, file_attr), get(file, file_written)
            if is_for_kernel and written is not None and (written.unsettled or written.end > attr.size):
                return None
            born_s = get(file, file_attr_born_s)
        else:
            found = PyDict_GetItem(self._attrs, inode)
            if found is NULL:
                return None
            attr = (<tuple>found)[0]
            born_s = (<tuple>found)[1]
        if not self.is_believed(born_s, age_s, now_s) and self.lease(inode, now_s) is None:
            return None
        return attr

    cdef object entry(self, object parent, tuple key, double now_s):
        """Compiled `MetadataCache.entry` without an age; sets `_cover` as `MetadataCache.cover` does."""
        cdef PyObject *found = PyDict_GetItem(self._entries, key)
        cdef tuple known
        cdef double sent_s, since_s
        if found is NULL:
            return None
        known = <tuple>found
        inode = known[0]
        sent_s = known[2]
        if inode:
            lease = self.lease(inode, now_s)
            if lease is not None:
                since_s = (<tuple>lease)[1]
                other = known[3]
                if sent_s >= since_s or other is not None and (<tuple>lease)[4] == (<tuple>other)[4]:
                    self._cover = inode
                    return inode
        lease = self.lease(parent, now_s)
        if lease is not None:
            since_s = (<tuple>lease)[1]
            if sent_s >= since_s:
                self._cover = parent
                return inode
        return None

    cdef bint is_absent(self, object parent, bytes name, double now_s) except -1:
        """Compiled `MetadataCache.is_absent`."""
        cdef PyObject *found = PyDict_GetItem(self._whole, parent)
        cdef Seen seen
        cdef uint64_t change
        if found is NULL:
            return False
        whole = <object>found
        if whole.ours is not None or PyBytes_GET_SIZE(name) > name_bytes_max or name in <set>whole.names:
            return False
        attr = self.attr(parent, self._absent_s, now_s, False)
        if attr is None:
            return False
        if type(attr) is bytes:
            read_attr(attr, &seen)
            change = seen.change
        else:
            change = attr.change
        return whole.change == change

    # -- requests ------------------------------------------------------------------------------------------------------------

    cdef bint getattr(self, uint64_t unique, uint64_t node) except -1:
        cdef uint8_t out[ATTR_OUT_BYTES]
        cdef Seen seen
        inode = node
        attr = self.attr(inode, self._fresh_s, self.now_s(), True)
        if attr is None or PyDict_Size(self._sent_changes) > sent_changes_max:
            return False
        read_attr(attr, &seen)
        self._sent_changes[inode] = seen.change
        memcpy(out + 16, &self._attr_s, 8)
        memcpy(out + 24, &self._attr_ns, 4)
        memset(out + 28, 0, 4)
        put_attr(out + 32, &seen)
        self.send(unique, out, ATTR_OUT_BYTES, 0)
        return True

    cdef bint lookup(self, uint64_t unique, uint64_t node, const uint8_t *at, Py_ssize_t count) except -1:
        cdef uint8_t out[ENTRY_OUT_BYTES]
        cdef Py_ssize_t length = count - HEADER_BYTES - 1
        cdef const uint8_t *begin = at + HEADER_BYTES
        cdef double now_s
        cdef Seen seen
        if length < 1 or begin[length] or memchr(begin, 0, length) != NULL or begin[0] == c"." and (
                length == 1 or length == 2 and begin[1] == c"."):
            return False
        cdef bytes name = PyBytes_FromStringAndSize(<const char *>begin, length)
        parent = node
        now_s = self.now_s()
        inode = self.entry(parent, (parent, name), now_s)
        if not inode:
            if self._has_negative_timeout or inode is None and not self.is_absent(parent, name, now_s):
                return False
            self.send(unique, out, OUT_BYTES, -ENOENT)
            return True
        attr = self.attr(inode, self._fresh_s, now_s, True)
        if attr is None or PyDict_Size(self._sent_changes) > sent_changes_max:
            return False
        read_attr(attr, &seen)
        self.hit(parent, name)
        if self._has_entry_timeout:
            cached = self._cached_names
            names = cached.naming.names
            if now_s >= cached.naming_until_s or len(names) >= named_together:
                cached.start_group()
                names = cached.naming.names
            names.append((self._cover, parent, name, inode))
        if PyDict_Size(self._withdrawn):
            self._withdrawn.pop(inode, None)
        self._sent_changes[inode] = seen.change
        memset(out + 16, 0, 16)
        memcpy(out + 16, &seen.inode, 8)
        memcpy(out + 32, &self._entry_s, 8)
        memcpy(out + 40, &self._attr_s, 8)
        memcpy(out + 48, &self._entry_ns, 4)
        memcpy(out + 52, &self._attr_ns, 4)
        put_attr(out + 56, &seen)
        self.send(unique, out, ENTRY_OUT_BYTES, 0)
        return True

    cdef int hit(self, object parent, bytes name) except -1:
        """Compiled `LookupPrefetch.hit`."""
        cdef PyObject *found = PyDict_GetItem(self._directories, parent)
        if found is NULL:
            return 0
        known = <object>found
        if type(known) is not _Directory or name == get(known, looked_in_middle):
            self._lookup_prefetch.hit(parent, name)
            return 0
        assign(known, looked_in_hits, <long>get(known, looked_in_hits) + 1)
        assign(known, looked_in_used, <long>get(known, looked_in_used) + 1)
        return 0

    cdef bint open(self, const In *head, uint32_t flags) except -1:
        """Compiled `OpenFiles.open_now` and `Files.open_now`.

        Only for a file that is not written here, in a mount without read workers.
        """
        cdef uint8_t out[OPEN_OUT_BYTES]
        cdef PyObject *found
        cdef uint64_t change, number, unique = head.unique
        cdef uint32_t said = 0
        cdef bint is_kept
        if flags & leaves_open or not self._opens or self._published.on or not head.uid and self._squashes_root:
            return False
        inode = head.node
        if PyDict_Size(self._withdrawn) and inode in self._withdrawn:
            return False
        cdef double now_s = self.now_s()
        lease = self.lease(inode, now_s)
        if lease is None:
            return False
        found = PyDict_GetItem(self._open, inode)
        if found is not NULL:
            file = <object>found
            attr = file.attr
            if file.written is not None or not <long>file.grant_rights & right_to_read or not attr.links:
                return False
            file.handles += 1
        else:
            file = self.hold_leased(inode, (<tuple>lease)[2], now_s)
            if file is None:
                return False
            attr = get(file, file_attr)
            assign(file, file_unreported, True)
            assign(file, file_opened, 1)
            self.opened_quietly(inode, <uint64_t>attr.size > small_bytes)
        handle = a_handle.born()
        assign(handle, handle_file, file)
        assign(handle, handle_inode, inode)
        assign(handle, handle_flags, flags)
        ahead = an_ahead.born()
        assign(ahead, ahead_units, {})
        assign(handle, handle_ahead, ahead)
        change = attr.change
        changed = change
        found = PyDict_GetItem(self._sent_changes, inode)
        if found is NULL or <uint64_t><object>found != change:
            self._notices.invalidate_attributes(inode)
        before = self._seen.pop(inode, None)
        is_kept = before is not None and <uint64_t>(<tuple>before)[0] == change
        self._seen[inode] = changed, not <uint32_t>attr.flags & has_xattrs
        if PyDict_Size(self._seen) > seen_max:
            self._pages.record_pages(attr)  # drops the oldest
        try:
            key = self.take_number(head, flags)
        # No space: the file is not open, and the kernel does not learn whether its pages are current.
        except Exception:
            self._seen.pop(inode, None)
            handle.closed = True
            self._vfs.files.let_go(file)
            raise
        assign(handle, handle_number, key)
        self._files[key] = handle
        if is_kept:
            said = keeps_cache
            if inode not in self._paged:
                self._pages.paging(inode)
        if inode not in self._owners:
            said |= no_flush
        number = key
        memset(out, 0, OPEN_OUT_BYTES)
        memcpy(out + 16, &number, 8)
        memcpy(out + 24, &said, 4)
        self.send(unique, out, OPEN_OUT_BYTES, 0)
        return True

    cdef object hold_leased(self, object inode, bytes grant, double now_s):
        """Compiled `MetadataCache.hold_leased`, for a file under a lease with that grant.

        None: it cannot be opened so, and nothing has happened.
        """
        cdef PyObject *found = PyDict_GetItem(self._attrs, inode)
        cdef bytes listed
        cdef const uint8_t *record
        cdef const uint8_t *right
        cdef int64_t now_ms, ends_ms
        cdef uint32_t table
        if found is NULL or not grant:
            return None
        attr = (<tuple>found)[0]
        if type(attr) is not bytes:
            file = self._cache.hold_leased(inode)
            if file is None:
                return None
            file.adopt_grant(grant, self._clock.wall_ns() // 1000000)
            if not file.grant:
                self._cache.drop(file)
                return None
            return file
        listed = attr
        record, right = <const uint8_t *>PyBytes_AS_STRING(listed), <const uint8_t *>PyBytes_AS_STRING(grant)
        if (PyBytes_GET_SIZE(listed) != record_bytes or get32(record + 16) & S_IFMT != S_IFREG or not get32(record + 20)
                or PyBytes_GET_SIZE(grant) != grant_bytes or right[0] != GRANT_VERSION or right[1] & encrypted
                or get64(right + 20) < get64(record + 80)):
            return None
        attr = attr_of(record)
        now_ms = wall_ns() // 1000000 if self._is_system else self._clock.wall_ns() // 1000000
        ends_ms = <int64_t>get64(right + 28)
        table = record[92] | <uint32_t>record[93] << 8
        if record[94] != <long>self._chunk_bits or table != <long>(<tuple>self._layout)[0]:
            self._chunk_bits, self._layout = record[94], Layout(table, record[94])
            self._chunk_mask = (<object>1 << self._chunk_bits) - 1
        file = a_file.born()
        assign(file, file_inode, inode)
        assign(file, file_layout, self._layout)
        assign(file, file_chunk_bits, self._chunk_bits)
        assign(file, file_chunk_mask, self._chunk_mask)
        assign(file, file_attr, attr)
        assign(file, file_attr_born_s, now_s)
        assign(file, file_cut, get64(record + 80))
        assign(file, file_truncated, <int64_t>(get64(record + 80) - get64(record + 104)))
        assign(file, file_grant, grant)
        assign(file, file_grant_session, get64(right + 4))
        assign(file, file_grant_cut, get64(right + 20))
        assign(file, file_grant_rights, right[1])
        assign(file, file_grant_half_ms, now_ms + (ends_ms - now_ms >> 1))
        assign(file, file_handles, 1)
        assign(file, file_lanes, {})
        assign(file, file_ahead, set())
        assign(file, file_located, {})
        del self._attrs[inode]
        self._open[inode] = file
        return file

    cdef object state_of(self, uint64_t inode):
        """Compiled `MetaClient.shard_session`; None: there is no state yet."""
        cdef PyObject *found
        pool_map = self._view.map
        if pool_map is not self._known_map:
            self._partition_shards, self._known_map = pool_map.shard_of_partition, pool_map
        found = PyDict_GetItem(<dict>self._shards, (<tuple?>self._partition_shards)[<Py_ssize_t>(inode >> counter_bits)])
        return None if found is NULL else <object>found

    cdef int opened_quietly(self, object inode, bint now) except -1:
        """Compiled `MetaClient.opened_quietly`."""
        cdef PyObject *found
        cdef dict opened, unreported
        state = None if now else self.state_of(inode)
        reporting = None if state is None else state.reporting
        if reporting is None or reporting.done():
            self._meta.opened_quietly(inode, now)
            return 0
        opened, unreported = state.open, state.unreported
        found = PyDict_GetItem(opened, inode)
        opened[inode] = 1 if found is NULL else <object>found + 1
        found = PyDict_GetItem(unreported, inode)
        unreported[inode] = 1 if found is NULL else <object>found + 1
        return 0

    cdef int closed_quietly(self, object inode, object count) except -1:
        """Compiled `MetaClient.release`.

        A file that was opened once, and not reported to the shard, needs no more.
        """
        cdef PyObject *opened_once
        cdef PyObject *unreported_once
        cdef dict opened, unreported
        state = self.state_of(inode)
        if state is not None and count == 1:
            opened, unreported = state.open, state.unreported
            opened_once, unreported_once = PyDict_GetItem(opened, inode), PyDict_GetItem(unreported, inode)
            if (opened_once is not NULL and unreported_once is not NULL and <object>opened_once == 1
                    and <object>unreported_once == 1):
                del opened[inode], unreported[inode]
                return 0
        self._meta.release(inode, count)
        return 0

    cdef object take_number(self, const In *head, uint32_t flags):
        """Compiled `Handles.take`, for an opened file."""
        cdef uint64_t serial
        if self._records is None:
            return self._handles.take(head.node, flags, Caller(head.uid, head.gid, head.pid), head.unique)
        serial = <uint64_t>self._handles.last + 1
        self._handles.last = serial
        return self._records.keep(serial, head.node, flags, head.uid, head.gid, head.pid, head.unique)

    cdef bint getxattr(self, uint64_t unique, uint64_t node, const uint8_t *at, Py_ssize_t count) except -1:
        """Compiled `ExtendedAttributes.has_no_xattr`.

        The kernel queries file capabilities before each write, and an access control list when a user other
        than the owner needs a right.
        """
        cdef uint8_t out[OUT_BYTES]
        cdef PyObject *found
        cdef uint32_t flags
        if is_named(at, count, capability):
            found = PyDict_GetItem(self._seen, node)
            if found is NULL or not (<tuple>found)[1]:
                return False
        elif is_named(at, count, access_list):
            attr = self.attr(node, self._fresh_s, self.now_s(), True) if self._xattrs.keeps_acls else None
            if attr is None:
                return False
            flags = (<const uint8_t *>PyBytes_AS_STRING(attr))[95] if type(attr) is bytes else attr.flags
            if flags & acl_flag:
                return False
        else:
            return False
        self.send(unique, out, OUT_BYTES, -ENODATA)
        return True

    cdef bint has_nothing_to_flush(self, uint64_t handle) except -1:
        """Whether a file was not written and its caller has no locks."""
        cdef PyObject *found = PyDict_GetItem(self._files, handle)
        if found is NULL:
            return False
        file = (<object>found).file
        return (type(file) is OpenInode and get(file, file_written) is None and not get(file, file_lost)
                and get(file, file_inode) not in self._owners)

    cdef void makes(self, uint32_t pid) noexcept:
        self._turns = min(self._turns + 1, <int>PUT_OFF_MAX) if pid != self._maker else 0
        self._maker = pid

    cdef bint put_off(self, uint64_t unique, double since_s) noexcept:
        """Defer the reply to a FLUSH to the end of the burst if several threads create files."""
        if not self._turns or self._put_off_count == PUT_OFF_MAX:
            return False
        self._turns -= 1
        self._put_off[self._put_off_count], self._put_off_since_s[self._put_off_count] = unique, since_s
        self._put_off_count += 1
        return True

    def answer_put_off(self):
        """Reply to the deferred FLUSH requests, at the end of a burst."""
        cdef int at, count = self._put_off_count
        self._put_off_count = 0
        self._taken[FLUSH] += count
        for at in range(count):
            self.send_done(self._put_off[at])
        for at in range(count):
            self.count(FLUSH, stopwatch() - self._put_off_since_s[at])

    cdef int send_done(self, uint64_t unique) except -1:
        cdef uint8_t out[OUT_BYTES]
        return self.send(unique, out, OUT_BYTES, 0)

    cdef bint release(self, const uint8_t *at, uint64_t handle) except -1:
        """Defer a RELEASE, as KernelRequests does.

        Not with locks: they must end before other clients request theirs.
        """
        cdef PyObject *found = PyDict_GetItem(self._files, handle)
        if found is not NULL and (<object>found).file.inode in self._owners:
            return False
        self._requests.late.append(PyBytes_FromStringAndSize(<const char *>at, RELEASE_BYTES))
        self._taken[RELEASE] += 1
        return True

    def release_all(self, list late):
        """Handle deferred RELEASE requests; returns those that were not handled here."""
        cdef list left = []
        cdef bytes request
        for request in late:
            try:
                if not self.release_now(request):
                    left.append(request)
            except Exception as bug:
                self._path.fail((<const In *>PyBytes_AS_STRING(request)).unique, bug, "release")
        return left

    cpdef bint release_now(self, bytes request) except -1:
        """Execute and answer a deferred RELEASE, as OpenFiles.release_now does.

        Only if nothing is left to be stored or to be tracked.
        """
        cdef double since_s = stopwatch()
        cdef PyObject *found
        cdef const In *head = <const In *>PyBytes_AS_STRING(request)
        cdef long handles
        if PyBytes_GET_SIZE(request) != RELEASE_BYTES or self._requests.forwarded:
            return False
        key = (<const uint64_t *>(<const uint8_t *>head + HEADER_BYTES))[0]
        found = PyDict_GetItem(self._files, key)
        if found is NULL:
            return False
        handle = <object>found
        if type(handle) is not FileHandle:
            return False
        file, ahead = get(handle, handle_file), get(handle, handle_ahead)
        if type(file) is not OpenInode or type(ahead) is not ReadAheadState:
            return False
        inode, written = get(file, file_inode), get(file, file_written)
        if (get(handle, handle_closed) or inode in self._owners or get(file, file_located) or get(file, file_volume)
                or get(file, file_lost) or get(handle, handle_append) or <uint32_t>get(handle, handle_flags) & bypasses_pages
                or get(ahead, ahead_units) or self._refused
                or ahead in <set>get(file, file_ahead) or written is not None and written.unsettled):
            return False
        assign(handle, handle_closed, True)
        # As `MetadataCache.drop` does.
        handles = <long>get(file, file_handles) - 1
        assign(file, file_handles, handles)
        if handles <= 0:
            found = PyDict_GetItem(self._open, inode)
            if found is not NULL and <object>found is file:
                del self._open[inode]
                attr = get(file, file_attr)
                if attr.links:
                    self._attrs[inode] = attr, get(file, file_attr_born_s)
            assign(file, file_fetching, None)
            if <long>get(file, file_grant_rights) & right_to_read:
                found = PyDict_GetItem(self._leases_by_inode, inode)
                if found is not NULL and (<tuple><object>found)[2] is not get(file, file_grant):
                    self._leases.keep_grant(inode, get(file, file_grant))
            if written is not None:
                self._writer.forget(file)
            self.closed_quietly(inode, get(file, file_opened))
            self._paged.pop(inode, None)
        del self._files[key]
        if self._records is None:
            self._handles.give_back(key)
        else:
            self._records.drop(key)
        if self._published_of or self._published_writing:
            self._published.closed(inode, key)
        self.send_done(head.unique)
        self.count(RELEASE, stopwatch() - since_s)
        return True

    cdef bint forget(self, uint64_t node) except -1:
        inode = node
        self._seen.pop(inode, None)
        self._sent_changes.pop(inode, None)
        return True
