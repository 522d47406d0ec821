# cython: language_level=3, boundscheck=False, wraparound=False
"""Answers to the kernel that nobody has to be asked for, from the request to the answer. See known.py, which says what is
promised."""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem, PyDict_Size
from cpython.ref cimport PyObject
from libc.errno cimport EAGAIN, ECONNABORTED, ENODATA, ENODEV, ENOENT, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset
from posix.unistd cimport read, write

import os

from nvpool.base.clock import SystemClock
from nvpool.base.grants import READ as RIGHT_TO_READ
from nvpool.base.units import NAME_BYTES_MAX
from nvpool.client.contents import SMALL_BYTES
from nvpool.client.vfs.contract import Caller, FileHandle
from nvpool.fuse._leases cimport held_lease
from nvpool.fuse.cached_ops import HAS_XATTRS, NAMED_TOGETHER, SEEN_MAX, TOLD_MAX
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.numbers import Opening
from nvpool.wire.entries import ENTRY_BYTES

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    double stopwatch() nogil

cdef enum:                      # linux/fuse.h
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    RELEASE = 18
    GETXATTR = 22
    FLUSH = 25
    HEADER_BYTES = 40
    GETATTR_BYTES = 56
    FORGET_BYTES = 48
    OPEN_BYTES = 48
    RELEASE_BYTES = 64          # and of FLUSH
    GETXATTR_BYTES = 48         # before the name
    OUT_BYTES = 16
    ATTR_BYTES = 88
    ATTR_OUT_BYTES = 120
    ENTRY_OUT_BYTES = 144
    OPEN_OUT_BYTES = 32
    SECOND_NS = 1000000000
    ROOT = 1
    OPERATIONS = 64

cdef struct In:
    uint32_t length, opcode
    uint64_t unique, node
    uint32_t uid, gid, pid
    uint16_t extension_words, padding

cdef struct Seen:               # the attributes of an inode
    uint64_t inode, size, blocks, change
    int64_t atime_ns, mtime_ns, ctime_ns
    uint32_t mode, links, uid, gid, rdev

cdef uint32_t leaves_open = os.O_ACCMODE | os.O_TRUNC, keeps_cache = Opening.KEEP_CACHE.value, no_flush = Opening.NOFLUSH.value
cdef uint32_t has_xattrs = HAS_XATTRS
cdef long right_to_read = RIGHT_TO_READ
cdef uint64_t small_bytes = SMALL_BYTES
cdef Py_ssize_t told_max = TOLD_MAX, seen_max = SEEN_MAX, named_together = NAMED_TOGETHER, name_bytes_max = NAME_BYTES_MAX
cdef Py_ssize_t record_bytes = ENTRY_BYTES
cdef uint32_t block_bytes = replies.BLOCK_BYTES
cdef bytes capability = b"security.capability\0"


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
    """Of an Attr, or of a record of wire/entries."""
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


cdef class Known:
    """As known.py says. `engine` has the buffer, and what closed files are kept in until nobody waits."""
    cdef object _engine, _ops, _cache, _leases, _siblings, _clock, _spent
    cdef object _owners
    cdef object _vfs, _meta, _writer, _published
    cdef dict _files, _told, _seen, _paged, _open, _attrs, _entries, _whole, _lent, _directories
    cdef bytearray _buffer
    cdef int _fd
    cdef bint _is_system, _is_subtree, _opens, _names_are_told, _is_absence_told
    cdef double _fresh_s, _absent_s
    cdef uint64_t _attr_s, _entry_s
    cdef uint32_t _attr_ns, _entry_ns
    cdef tuple _takers
    cdef readonly Py_ssize_t taken
    cdef uint64_t _taken[OPERATIONS]

    def __init__(self, engine, ops, vfs, bint is_subtree, tuple takers):
        """`takers`: each says of so many bytes in the buffer whether that READ was begun by it."""
        cache = vfs.cache
        self._engine, self._ops, self._cache, self._leases, self._siblings = engine, ops, cache, vfs.leases, vfs.siblings
        self._vfs, self._meta, self._writer, self._published = vfs, vfs.meta, vfs.writer, ops.published
        self._paged = ops._paged
        self._opens = not ops.options.writeback
        self._fd, self._buffer, self._spent = engine._fd, engine._buffer, engine.spent
        self._files, self._told, self._seen, self._owners = ops._files, ops._told, ops._seen, vfs._owners
        self._open, self._attrs, self._entries, self._whole = cache.open, cache._attrs, cache._entries, cache._whole
        self._lent, self._directories = vfs.leases._leases, vfs.siblings._directories
        self._clock = vfs.clock
        self._is_system = type(vfs.clock) is SystemClock
        self._is_subtree = is_subtree
        self._fresh_s, self._absent_s = vfs.options.fresh_s, vfs._absent_s
        self._names_are_told = ops.options.entry_timeout_s > 0
        self._is_absence_told = ops.options.negative_timeout_s > 0
        self._attr_s, self._attr_ns = engine._keep_attr
        self._entry_s, self._entry_ns = engine._keep_entry
        self._takers = takers

    @property
    def all_taken(self):
        """How many requests were answered, put off or begun here, by operation."""
        return {opcode: self._taken[opcode] for opcode in range(OPERATIONS) if self._taken[opcode]}

    cdef double now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    def next_request(self, Py_ssize_t most):
        """The length of the next request of the kernel, in the engine's buffer, that is not answered or begun here; those before
        it are, and `taken` says how many they were: up to `most`, else 0. -1: none waits. OSError."""
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
            except Exception as bug:  # who waits is told
                self._engine._broken(bug)
            self.taken += 1
        return 0

    cpdef bint take(self, Py_ssize_t count) except -1:
        """Whether the request of `count` bytes in the engine's buffer was answered, or begun, here. Else nothing has happened."""
        cdef const In *head = <const In *>PyByteArray_AS_STRING(self._buffer)
        cdef const uint8_t *at = <const uint8_t *>head
        cdef double since_s
        cdef bint is_done = False
        if count < HEADER_BYTES or head.length != <uint32_t>count or head.unique >> 63 or head.extension_words:
            return False
        cdef uint32_t opcode = head.opcode
        if opcode == READ:
            return self.take_read(count)
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
            is_done = self.flush(head.unique, (<const uint64_t *>(at + HEADER_BYTES))[0])
        elif count == RELEASE_BYTES and opcode == RELEASE:
            return self.release(at, (<const uint64_t *>(at + HEADER_BYTES))[0])
        elif count == FORGET_BYTES and opcode == FORGET:
            is_done = self.forget(head.node)
        if is_done:
            self._taken[opcode] += 1
            self.count(opcode, stopwatch() - since_s)
        return is_done

    cdef bint take_read(self, Py_ssize_t count) except -1:
        """One that is answered on the spot is counted here, one that is begun when it ends; what the engine counts stays."""
        engine = self._engine
        run_s, kept = engine._since_s, engine._kept
        cdef double since_s = stopwatch()
        engine._since_s = since_s
        try:
            for take in self._takers:
                if take(count):
                    self._taken[READ] += 1
                    if engine._kept == kept:
                        self.count(READ, stopwatch() - since_s)
                    return True
            return False
        finally:
            engine._since_s, engine._kept = run_s, kept

    cdef int count(self, uint32_t opcode, double took_s) except -1:
        """As Spent.add."""
        times = (<list>self._spent.times)[opcode]
        if times is None:
            self._spent.add(opcode, max(0.0, took_s))
            return 0
        times.counts[slot_of(took_s)] += 1
        times.sum_s += took_s
        return 0

    cdef int send(self, uint64_t unique, uint8_t *out, uint32_t length, int32_t failure) except -1:
        """The answer, whose first bytes are free for its header."""
        cdef int error
        memcpy(out, &length, 4)
        memcpy(out + 4, &failure, 4)
        memcpy(out + 8, &unique, 8)
        if write(self._fd, out, length) < 0:
            error = errno
            if error not in (ENOENT, ENODEV, ECONNABORTED):
                self._engine.answer_refused(unique, error, length)
        return 0

    # -- what is known -------------------------------------------------------------------------------------------------------

    cdef bint is_believed(self, double born_s, double age_s, double now_s) except -1:
        cdef double from_s
        if born_s + age_s <= now_s:
            return False
        from_s = self._cache._trusted_from_s
        return born_s >= from_s

    cdef object attr(self, object inode, double age_s, double now_s, bint is_told):
        """As Cache.attr, and of what `is_told` to the kernel as Names.getattr_now; a record where it was listed."""
        cdef PyObject *found = PyDict_GetItem(self._open, inode)
        cdef double born_s
        if found is not NULL:
            file = <object>found
            attr = file.attr
            written = file.written
            if is_told and written is not None and (written.unsettled or written.end > attr.size):
                return None
            born_s = file.attr_born_s
        else:
            found = PyDict_GetItem(self._attrs, inode)
            if found is NULL:
                return None
            attr = (<tuple>found)[0]
            born_s = (<tuple>found)[1]
        if not self.is_believed(born_s, age_s, now_s) and held_lease(self._lent, inode, now_s) is None:
            return None
        return attr

    cdef object entry(self, object parent, tuple key, double now_s):
        """As Cache.entry."""
        cdef PyObject *found = PyDict_GetItem(self._entries, key)
        cdef tuple known
        cdef double born_s, sent_s, since_s
        if found is NULL:
            return None
        known = <tuple>found
        inode = known[0]
        born_s, sent_s = known[1], known[2]
        if inode:
            lease = held_lease(self._lent, inode, now_s)
            if lease is not None:
                since_s = (<tuple>lease)[1]
                other = known[3]
                if sent_s >= since_s or other is not None and (<tuple>lease)[4] == (<tuple>other)[4]:
                    return inode
            if self.is_believed(born_s, self._fresh_s, now_s) and self._leases.is_news(inode, sent_s):
                return inode
        lease = held_lease(self._lent, parent, now_s)
        if lease is not None:
            since_s = (<tuple>lease)[1]
            if sent_s >= since_s:
                return inode
        return None

    cdef bint is_absent(self, object parent, bytes name, double now_s) except -1:
        """As Cache.is_absent."""
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
        if attr is None or PyDict_Size(self._told) > told_max:
            return False
        read_attr(attr, &seen)
        self._told[inode] = seen.change
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
            if self._is_absence_told or inode is None and not self.is_absent(parent, name, now_s):
                return False
            self.send(unique, out, OUT_BYTES, -ENOENT)
            return True
        attr = self.attr(inode, self._fresh_s, now_s, True)
        if attr is None or PyDict_Size(self._told) > told_max:
            return False
        read_attr(attr, &seen)
        if PyDict_GetItem(self._directories, parent) is not NULL:
            self._siblings.hit(parent, name)
        ops = self._ops
        if self._names_are_told:
            told = ops._naming.told
            if now_s >= ops._naming_until_s or len(told) >= named_together:
                ops._name_anew()
                told = ops._naming.told
            told.append((inode, parent, name))
        self._told[inode] = seen.change
        memset(out + 16, 0, 16)
        memcpy(out + 16, &seen.inode, 8)
        memcpy(out + 32, &self._entry_s, 8)
        memcpy(out + 40, &self._attr_s, 8)
        memcpy(out + 48, &self._entry_ns, 4)
        memcpy(out + 52, &self._attr_ns, 4)
        put_attr(out + 56, &seen)
        self.send(unique, out, ENTRY_OUT_BYTES, 0)
        return True

    cdef bint open(self, const In *head, uint32_t flags) except -1:
        """As FuseOps.open_now and Files.open_now of what nobody here writes, where no other process of the mount reads."""
        cdef uint8_t out[OPEN_OUT_BYTES]
        cdef PyObject *found
        cdef uint64_t change, number, unique = head.unique
        cdef uint32_t said = 0
        cdef bint is_kept
        if flags & leaves_open or not self._opens or self._published.on:
            return False
        inode = head.node
        lease = held_lease(self._lent, inode, self.now_s())
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
            grant = (<tuple>lease)[2]
            file = self._cache.hold_lent(inode) if grant else None
            if file is None:
                return False
            file.adopt_grant(grant, self._clock.wall_ns() // 1000000)
            if not file.grant:
                self._cache.drop(file)
                return False
            attr = file.attr
            file.untold = True
            file.opened = 1
            self._meta.opened_quietly(inode, <uint64_t>attr.size > small_bytes)
        handle = FileHandle(file, flags)
        change = attr.change
        changed = change
        found = PyDict_GetItem(self._told, inode)
        if found is NULL or <uint64_t><object>found != change:
            self._ops.invalidate_attributes(inode)
        before = self._seen.pop(inode, None)
        is_kept = before is not None and <uint64_t>(<tuple>before)[0] == change
        self._seen[inode] = changed, not <uint32_t>attr.flags & has_xattrs
        if PyDict_Size(self._seen) > seen_max:
            self._ops._keeps_pages(attr)  # forgets the oldest
        try:
            key = self._ops._handles.take(inode, flags, Caller(head.uid, head.gid, head.pid), unique)
        except Exception:  # no room: it is not open, and the kernel was not told whether its pages are those of now
            self._seen.pop(inode, None)
            handle.closed = True
            self._vfs._let_go(file)
            raise
        handle.number = key
        self._files[key] = handle
        if is_kept:
            said = keeps_cache
            if inode not in self._paged:
                self._ops._paging(inode)
        if inode not in self._owners:
            said |= no_flush
        number = key
        memset(out, 0, OPEN_OUT_BYTES)
        memcpy(out + 16, &number, 8)
        memcpy(out + 24, &said, 4)
        self.send(unique, out, OPEN_OUT_BYTES, 0)
        return True

    cdef bint getxattr(self, uint64_t unique, uint64_t node, const uint8_t *at, Py_ssize_t count) except -1:
        """Of a file that has none: the kernel asks before each write whether it makes a program privileged."""
        cdef uint8_t out[OUT_BYTES]
        cdef PyObject *found
        if count - GETXATTR_BYTES != PyBytes_GET_SIZE(capability) or memcmp(
                at + GETXATTR_BYTES, PyBytes_AS_STRING(capability), PyBytes_GET_SIZE(capability)):
            return False
        found = PyDict_GetItem(self._seen, node)
        if found is NULL or not (<tuple>found)[1]:
            return False
        self.send(unique, out, OUT_BYTES, -ENODATA)
        return True

    cdef bint flush(self, uint64_t unique, uint64_t handle) except -1:
        """Of what was not written, by who has no locks."""
        cdef uint8_t out[OUT_BYTES]
        cdef PyObject *found = PyDict_GetItem(self._files, handle)
        if found is NULL:
            return False
        file = (<object>found).file
        if file.written is not None or file.lost or file.inode in self._owners:
            return False
        self.send(unique, out, OUT_BYTES, 0)
        return True

    cdef bint release(self, const uint8_t *at, uint64_t handle) except -1:
        """Put off, as KernelRequests does: its locks end before others ask for theirs."""
        cdef PyObject *found = PyDict_GetItem(self._files, handle)
        if found is not NULL and (<object>found).file.inode in self._owners:
            return False
        self._engine._late.append(PyBytes_FromStringAndSize(<const char *>at, RELEASE_BYTES))
        self._taken[RELEASE] += 1
        return True

    def release_now(self, bytes request):
        """Whether that RELEASE, which was put off, is done and answered, as FuseOps.release_now does it where nothing is left to
        be stored or to be looked after."""
        cdef uint8_t out[OUT_BYTES]
        cdef double since_s = stopwatch()
        cdef PyObject *found
        cdef const In *head = <const In *>PyBytes_AS_STRING(request)
        if PyBytes_GET_SIZE(request) != RELEASE_BYTES or self._engine._from:
            return False
        key = (<const uint64_t *>(<const uint8_t *>head + HEADER_BYTES))[0]
        found = PyDict_GetItem(self._files, key)
        if found is NULL:
            return False
        handle = <object>found
        file = handle.file
        inode = file.inode
        written, ahead = file.written, handle.ahead
        if (handle.closed or inode in self._owners or file.located or file.volume or file.lost or handle.append or ahead.units
                or ahead in file.ahead or written is not None and written.unsettled):
            return False
        handle.closed = True
        if self._cache.drop(file):
            file.fetching = None
            if <long>file.grant_rights & right_to_read:
                self._leases.keep_grant(inode, file.grant)
            if written is not None:
                self._writer.forget(file)
            self._meta.release(inode, file.opened)
            self._paged.pop(inode, None)
        del self._files[key]
        self._ops._handles.give_back(key)
        self._published.closed(inode, key)
        self.send(head.unique, out, OUT_BYTES, 0)
        self.count(RELEASE, stopwatch() - since_s)
        return True

    cdef bint forget(self, uint64_t node) except -1:
        inode = node
        self._seen.pop(inode, None)
        self._told.pop(inode, None)
        return True
