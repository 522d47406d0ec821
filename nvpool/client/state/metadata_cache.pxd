# cython: language_level=3
"""C types of metadata_cache.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.client.state.leases cimport InodeLease, Leases
from nvpool.core.primitives cimport ByteReader
from nvpool.rpc.messages cimport direntries
from nvpool.rpc.messages.meta_messages cimport Attr

cdef Py_ssize_t _GRANT_BYTES, _NAME_MAX, _RENAMED_MAX
cdef uint32_t _GRANT_VERSION, _ENCRYPTED, _S_IFMT, _S_IFREG
cdef uint64_t _NO_END
cdef double _NEVER_S
cdef ByteReader _in


cpdef Attr typed_attr(attr)
cdef uint64_t _change_of(attr) except? 0
cdef Attr _decoded(attr)
@cython.locals(source=ByteReader)
cdef uint64_t _cut_of(bytes grant) except? 0
cdef _trim(dict known, Py_ssize_t count_max)


cdef class OpenInode:
    cdef public uint64_t inode
    cdef public object layout
    cdef public uint32_t chunk_bits
    cdef public uint64_t chunk_mask
    cdef public Attr attr
    cdef public double attr_born_s
    cdef public uint64_t cut
    cdef public int64_t truncated
    cdef public bytes grant
    cdef public uint64_t grant_session, grant_cut
    cdef public uint32_t grant_rights
    cdef public int64_t grant_half_ms
    cdef public bint grant_used
    cdef public Py_ssize_t handles, opened
    cdef public dict lanes
    cdef public object written
    cdef public set ahead
    cdef public object renewal
    cdef public dict located
    cdef public int64_t changes, owes, denied
    cdef public bint missed
    cdef public object looking
    cdef public double looking_s
    cdef public bint foreign, lost, unreported
    cdef public object fetching
    cdef public bint unsure
    cdef public tuple ended
    cdef public uint64_t volume, paid
    cdef public bint encrypted
    cdef public object key
    cdef public InodeLease delegation
    @cython.locals(one=uint64_t, cut=uint64_t)
    cpdef begin(self, Attr attr)
    @cython.locals(source=ByteReader, rights=uint32_t, session=uint64_t, cut=uint64_t, ends_ms=int64_t)
    cpdef adopt_grant(self, bytes raw, int64_t now_ms)


cdef class CompleteDirectory:
    cdef public uint64_t change
    cdef public set names
    cdef public object ours


cdef class MetadataCache:
    cdef readonly Leases leases
    cdef readonly dict open, attrs, entries, renamed_s, complete_dirs
    cdef public double renamed_floor_s, trusted_from_s
    cdef public Py_ssize_t whole_names
    cdef public object name_cover
    cdef readonly object options
    cdef object _events
    cdef Py_ssize_t _cached_max
    cpdef Attr attr(self, inode, double age_s)
    @cython.locals(file=OpenInode, known=tuple)
    cpdef Attr attr_at(self, inode, double age_s, double now_s)
    cdef bint _is_fresh(self, double born_s, double age_s, double now_s) noexcept
    @cython.locals(opened=OpenInode, present=Attr, before=int64_t)
    cdef _put(self, Attr attr, bint ours, double now_s)
    @cython.locals(attrs=dict, known=tuple)
    cpdef Attr put_closed(self, Attr attr, inode, double now_s)
    @cython.locals(whole=CompleteDirectory)
    cdef _note_directory(self, Attr attr, inode)
    cpdef entry(self, parent, bytes name, double age_s)
    @cython.locals(known=tuple)
    cpdef entry_at(self, parent, bytes name, double age_s, double now_s)
    @cython.locals(sent_s=double, held=InodeLease, lease=InodeLease)
    cdef _cover(self, parent, tuple known, double now_s)
    @cython.locals(entries=dict)
    cdef _put_entry(self, parent, bytes name, inode, double sent_s, InodeLease lease, double now_s)
    cdef double _renamed_s(self, parent) except? -1
    @cython.locals(renamed=dict)
    cpdef forget_entry_at(self, parent, bytes name, double now_s)
    cpdef put_own_entry_at(self, parent, bytes name, inode, double sent_s, InodeLease lease, double now_s)
    @cython.locals(whole=CompleteDirectory)
    cpdef named_in_whole(self, parent, inode, bytes name, bint exists)
    cpdef bint is_absent(self, parent, bytes name, double age_s) except -1
    @cython.locals(attr=Attr, whole=CompleteDirectory)
    cpdef bint is_absent_at(self, parent, bytes name, double age_s, double now_s) except -1
    @cython.locals(whole=CompleteDirectory)
    cpdef bint is_missed(self, parent, bytes name) except -1
    @cython.locals(whole=CompleteDirectory)
    cpdef forget_whole(self, inode)
    @cython.locals(opened=OpenInode)
    cpdef OpenInode hold_new(self, Attr attr, inode, double now_s)
    @cython.locals(known=tuple, attr=Attr, opened=OpenInode)
    cpdef OpenInode hold_leased(self, inode, bytes grant, double now_s, int64_t now_ms)
    cpdef bint drop(self, OpenInode opened) except -1
