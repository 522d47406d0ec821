# cython: language_level=3
"""C types of creates.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.client.state.shard_session cimport ShardSession
from nvpool.client.state.leases cimport InodeLease, Leases
from nvpool.client.state.metadata_cache cimport MetadataCache, OpenInode
from nvpool.client.state.vfs_types cimport FileHandle
from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteReader
from nvpool.fuse.protocol cimport reply_encoder
from nvpool.rpc cimport reply_receivers
from nvpool.rpc.messages.meta_messages cimport Attr, Change, CreateReply, CreateRequest, InodeEntry
from nvpool.rpc.reply_receivers cimport ReplyBurst, ReplyReceiver
from nvpool.shm.mount_records cimport HandleRecords, SlotRecords

cdef Py_ssize_t _HEAD_BYTES, _NAME_MAX, _GRANT_BYTES, _SLOTS, _IN_FLIGHT, _FREE_MIN, _TOGETHER
cdef Py_ssize_t _SENT_CHANGES_MAX, _SEEN_MAX
cdef uint32_t _S_IFMT, _S_IFREG, _ACCESS, _EXCLUSIVE, _TRUNCATE, _APPEND, _WRITES_ONLY, _READS_AND_WRITES
cdef uint32_t _DIRECT, _DIRECT_IO, _KEEP_CACHE, _NOFLUSH, _READ, _READ_AND_WRITE, _HAS_XATTRS
cdef uint32_t _OPCODE, _METHOD, _GRANT_VERSION
cdef unsigned char _SLASH
cdef uint64_t _FIRST
cdef int _COUNTER_BITS


cdef class PendingCreate(ReplyReceiver):
    cdef Creates creates
    cdef object connection, generation
    cdef ShardSession state
    cdef bytes name, message
    cdef uint64_t parent, unique, sequence
    cdef uint32_t slot, mode, flags, uid, gid, pid, umask, number
    cdef double since_s, sent_s, deadline_s
    cdef bint is_done
    cdef begin(self, Creates creates, connection, ShardSession state, bytes name, bytes message, uint64_t parent, uint64_t unique,
               uint32_t mode, uint32_t flags, uint32_t uid, uint32_t gid, uint32_t pid, uint32_t umask, uint32_t slot,
               uint64_t sequence, double since_s, double sent_s, double deadline_s)
    @cython.locals(creates=Creates)
    cpdef ReplyBurst receive(self, bytes message)
    cdef _go_on_slowly(self)


cdef class Creates(ReplyBurst):
    cdef readonly object path
    cdef readonly uint64_t made
    cdef bytearray _buffer
    cdef dict _work, _files, _appending, _sent_changes, _seen, _barred, _opened
    cdef dict _shards, _counters, _held, _early, _endpoints, _frames
    cdef object _requests, _ops, _published, _handles, _names, _pages, _bypass, _changes, _vfs, _writer, _complete_dirs
    cdef Leases _leases
    cdef MetadataCache _cache
    cdef object _meta, _view, _dialer, _known_map
    cdef tuple _shard_of_partition
    cdef Py_ssize_t _in_work_max, _frame_count
    cdef uint64_t _entry_s, _attr_s, _epoch
    cdef uint32_t _entry_ns, _attr_ns, _left_ms
    cdef double _patience_s
    cdef bint _is_single, _writeback, _keeps_names
    cdef SlotRecords _slot_records
    cdef HandleRecords _handle_records
    cdef CreateRequest _create
    cdef ByteReader _in
    @cython.locals(source=ByteReader, unique=uint64_t, parent=uint64_t, uid=uint32_t, gid=uint32_t, pid=uint32_t,
                   extension_words=uint32_t, flags=uint32_t, mode=uint32_t, umask=uint32_t, name=bytes, in_flight=dict,
                   exclusive=bint, truncate=bint, now_s=double, create=CreateRequest, change=Change, one=PendingCreate, state=ShardSession,
                   frame=bytes, frames=list)
    cpdef bint begin(self, Py_ssize_t count) except -1
    cdef _use_map(self, pool_map)
    @cython.locals(waiting=dict, frames=list)
    cpdef send(self)
    @cython.locals(reply=CreateReply, attr=Attr, state=ShardSession, flags=uint32_t, reads_only=bint,
                   handle=uint64_t, opening=uint32_t)
    cdef bint complete(self, PendingCreate one, bytes message) except -1
    cdef _count(self, spent, double took_s)
    @cython.locals(now_s=double, entry=InodeEntry, attr=Attr, state=ShardSession, reads_only=bint, file=OpenInode,
                   readable=bytes, lease=InodeLease, opened=FileHandle)
    cdef _update_caches(self, PendingCreate one, CreateReply reply, uint64_t handle, inode)
    @cython.locals(cache=MetadataCache)
    cdef _update_directory(self, Attr attr, parent, bytes name, double now_s)
    cdef int go_on(self) except -1
    cpdef report_bug(self, PendingCreate one, error)


@cython.locals(entry=InodeEntry, directory=Attr, attr=Attr, grant=bytes)
cpdef bint is_new_file(CreateReply reply) except -1
