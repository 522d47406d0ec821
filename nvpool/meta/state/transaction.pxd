# cython: language_level=3
"""C types of transaction.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core.primitives cimport ByteWriter
from nvpool.meta.state cimport records
from nvpool.meta.state.records cimport Inode
from nvpool.rpc.messages.meta_messages cimport Attr

cdef ByteWriter _out
cdef uint32_t _DIVIDED, _TRASHED, _WIDE, _TOUCHED, _SHOWN, _S_IFMT, _S_IFDIR, _S_IFREG, _ORPHAN
cdef uint64_t _INODE_MAX


cdef class View:
    cdef public object locks, get, get_many, scan, snapshot, shard, name_key, name_hash, grant_secret, _sign, pool_keys
    cdef public object serves, check_partition, owners, shards, tables, _register_leases, _register_lease, watching, rooms, appends, access, trashes
    cdef public object is_open, _recall_delegation
    cpdef check_delegation(self, session, number, uint32_t mode, int64_t birth_ns, int64_t now_ns)
    cdef public dict cutting
    cdef public uint64_t grant_ms, next_number, map_epoch
    cdef public int64_t inode_count
    cdef public uint32_t lease_ms
    cpdef uint32_t issue_lease(self, session, Inode inode) except? 0xFFFFFFFF
    cpdef Inode inode(self, uint64_t number)
    cpdef Inode directory(self, uint64_t number)
    cpdef Inode holder(self, uint64_t number)
    cpdef Inode _own_holder(self, uint64_t number)
    cpdef Inode searched(self, uint64_t number, bytes name, bint spread)
    cpdef tuple place(self, Inode directory, bytes name)
    cpdef tuple named(self, Inode directory, bytes name)
    cpdef bytes grant(self, Inode inode, uint32_t rights, uint64_t session, int64_t now_ns)
    @cython.locals(epoch=uint64_t, tag=uint64_t, member=uint64_t)
    cpdef bytes signed(self, uint32_t rights, uint64_t session, uint64_t number, uint64_t cut, uint32_t table, uint64_t volume,
                       int64_t now_ns)


cdef class Draft:
    cdef public View view
    cdef public int64_t now_ns
    cdef public dict inodes, dirty, effects, accounts
    cdef public object reply, intent, then
    cdef public uint64_t opened, linked, closed, sized
    cdef public bint born, adds, sync
    cdef public list orphans
    cdef public Inode parent
    cpdef begin(self, View view, int64_t now_ns)
    cpdef Inode inode(self, number)
    cpdef Inode directory(self, number)
    cpdef Inode entered(self, number)
    cpdef Inode holder(self, number)
    cpdef Inode entered_holder(self, number)
    @cython.locals(now=int64_t)
    cpdef stamp(self, Inode inode, bint content=*)
    @cython.locals(view=View, born=Inode, number=uint64_t)
    cpdef Inode birth(self, uint64_t partition, uint32_t mode, uint32_t uid, uint32_t gid, uint64_t volume)
    cpdef discard(self, Inode inode, uint64_t directory, bytes name)
    cpdef drop_name(self, Inode inode)
    cpdef resized(self, Inode inode, int64_t size, uint64_t session=*, bint reported=*)
    cpdef bytes grant(self, Inode inode, uint32_t rights, uint64_t session)
    @cython.locals(inode=Inode)
    cpdef dict finish(self)


@cython.locals(attr=Attr)
cpdef Attr attr_of(Inode inode)
