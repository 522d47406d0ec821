# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled first WRITE and FLUSH of a small new file.

From the kernel's request to the client, and back. small_writes.py has the contract.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.unistd cimport write

from functools import partial

from nvpool.core.clock import stopwatch_s
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import ASIDE
from nvpool.fuse.ops.setid import SET_IDS
from nvpool.fuse.protocol.constants import WRITE_KILL_SUIDGID, Op

cdef enum:
    HEADER_BYTES = 40           # requests.HEADER_BYTES
    WRITE_BYTES = 80            # requests.WRITE_BYTES
    FLUSH_BYTES = 64            # requests._RELEASE_WHOLE
    DONE_BYTES = 16             # replies.HEADER_BYTES
    COUNT_BYTES = 24

cdef struct Header:             # linux/fuse.h: fuse_in_header, and the first field of WRITE and FLUSH
    uint32_t length, opcode
    uint64_t unique, node
    uint32_t uid, gid, pid
    uint16_t extension_words, zero
    uint64_t handle

cdef struct Counted:            # fuse_out_header, fuse_write_out
    uint32_t length
    int error
    uint64_t unique
    uint32_t size, zero

cdef uint32_t kill_set_ids = WRITE_KILL_SUIDGID
cdef uint32_t set_ids = SET_IDS
cdef uint32_t aside = ASIDE
cdef uint64_t resent = <uint64_t>1 << 63
cdef object flush_key = int(Op.FLUSH), flush_number = Op.FLUSH


cdef class PendingFlush:
    """A pending FLUSH: an entry of the table of pending requests, called when it has ended."""
    cdef SmallWrites writes
    cdef object begun, unique, inode
    cdef double since_s

    def cancel(self):
        return self.begun.cancel()

    def __call__(self, _, error):
        """Do the work of `inline_completions.SubmittedFlush.ended`, and of `PendingRequests.ended`."""
        cdef SmallWrites writes = self.writes
        requests = writes.requests
        writes.changes.count += 1
        if error is not None:
            writes.file_writes.failed(self.inode)
            writes.path.flush_failed(self.unique, error)
            return
        del (<dict>requests.work)[self.unique]
        writes.answer(self.unique, DONE_BYTES, 0)
        requests.spent.add(flush_number, stopwatch_s() - self.since_s)
        if requests.interrupted:
            requests.interrupted.pop(self.unique, None)
        if requests.forwarded:
            requests.forwarded.pop(self.unique, None)
        if requests.held:
            writes.ops.answered(self.unique)
        writes.path.some_ended()


cdef class SmallWrites:
    """Compiled part of WriteFastPath. `plain`: the fast path of the client, see client/write/fast_writes."""
    cdef object path, requests, ops, changes, pages, file_writes, plain, vfs, writer, owners
    cdef dict files, paged
    cdef bytearray buffer
    cdef int fd
    cdef Py_ssize_t in_work_max

    def __init__(self, path, ops, vfs, Py_ssize_t in_work_max):
        requests = path.requests
        self.path, self.requests, self.ops, self.vfs, self.in_work_max = path, requests, ops, vfs, in_work_max
        self.writer, self.plain, self.owners = vfs.writer, vfs.fast_writes, vfs.locks.owners
        self.changes, self.pages, self.file_writes = ops.changes, ops.cached_pages, ops.writes
        self.files, self.paged = ops.files.by_handle, ops.cached_pages.paged
        self.buffer, self.fd = requests.buffer, requests.fd

    cdef int answer(self, uint64_t unique, Py_ssize_t length, uint32_t size) except -1:
        cdef Counted said
        cdef int error
        said.length, said.error, said.unique, said.size, said.zero = <uint32_t>length, 0, unique, size, 0
        if write(self.fd, &said, length) < 0:
            error = errno
            self.path.answer_refused(unique, error, length)
        return 0

    def write(self, Py_ssize_t count):
        """Take and answer the WRITE of `count` bytes in the buffer. False: nothing has happened."""
        cdef const uint8_t *at = <const uint8_t *>PyByteArray_AS_STRING(self.buffer)
        cdef Header head
        cdef uint64_t offset
        cdef uint32_t size, flags, open_flags
        cdef PyObject *found
        memcpy(&head, at, sizeof(Header))
        memcpy(&offset, at + 48, 8)
        memcpy(&size, at + 56, 4)
        memcpy(&flags, at + 60, 4)
        memcpy(&open_flags, at + 72, 4)
        requests = self.requests
        if (count < WRITE_BYTES or head.length != count or WRITE_BYTES + <Py_ssize_t>size != count or offset
                or open_flags & aside or head.unique & resent or requests.forwarded):
            return False
        found = PyDict_GetItem(self.files, head.handle)
        if found is NULL:
            return False
        handle = <object>found
        file = handle.file
        if flags & kill_set_ids and <uint32_t>file.attr.mode & set_ids:
            return False
        try:
            if not self.plain.take_at(handle, self.buffer, WRITE_BYTES, size, head.unique):
                return False
        except Exception as error:
            self.file_writes.failed(file.inode)
            self.path.fail(head.unique, error, "write")
            return True
        requests.written_bytes += size
        if file.inode not in self.paged:
            self.pages.paging(file.inode)
        self.changes.count += 1
        self.answer(head.unique, COUNT_BYTES, size)
        return True

    def flush(self, Py_ssize_t count):
        """Answer the FLUSH in the buffer, or put it into the table of pending requests.

        False: nothing has happened.
        """
        cdef Header head
        cdef PyObject *found
        cdef PendingFlush flushing
        requests = self.requests
        cdef dict work = requests.work
        memcpy(&head, PyByteArray_AS_STRING(self.buffer), sizeof(Header))
        if (count != FLUSH_BYTES or head.length != count or head.unique & resent or requests.forwarded
                or len(work) >= self.in_work_max):
            return False
        found = PyDict_GetItem(self.files, head.handle)
        if found is NULL:
            return False
        handle = <object>found
        file = handle.file
        if file.written is None or file.lost or file.inode in self.owners:
            return False
        flushing = PendingFlush.__new__(PendingFlush)
        flushing.writes, flushing.unique, flushing.inode = self, head.unique, file.inode
        begun = self.writer.begin_flush(file, flushing, partial(self.vfs.data.flush_writes, handle), self.plain)
        if begun is None:
            return False
        if begun is True:
            self.answer(head.unique, DONE_BYTES, 0)
            return True
        flushing.begun = begun
        flushing.since_s = requests.since_s
        work[flushing.unique] = flushing, head.pid, flush_key, flushing.since_s
        requests.deferred += 1
        return True
