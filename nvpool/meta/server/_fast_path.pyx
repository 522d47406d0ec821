# cython: language_level=3, boundscheck=False, wraparound=False
"""Fast path of the metadata service: the commonest requests of a mount in C, from frame to frame.

See fast_path.py for the guarantees. There is no Python implementation: a request that is left out here, and
every request without a compiler, is decided by `service`, `transaction.View` and `meta/operations`.
"""

import logging
from hashlib import blake2b

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy

from nvpool.core.clock import SystemClock
from nvpool.core.errors import InvariantBroken, NvpoolError
from nvpool.core.grants import ENCRYPTED
from nvpool.rpc.transports._head cimport HEADER_BYTES, REPLY, REQUEST, is_head, put_head
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.v1 import wire_pb2 as wire

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    long long wall_ns() nogil

cdef extern from "_fields.h":
    uint8_t *put_varint(uint8_t *at, uint64_t value) nogil
    uint8_t *put_number(uint8_t *at, uint8_t tag, uint64_t value) nogil
    uint8_t *put_fixed(uint8_t *at, uint8_t tag, uint64_t value) nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    uint64_t get64(const uint8_t *at) nogil
    void put16(uint8_t *at, uint16_t value) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil
    void put64_big(uint8_t *at, uint64_t value) nogil

crc_begin(0)
_log = logging.getLogger(__name__)

cdef uint8_t encrypted = ENCRYPTED

cdef enum:
    OUT_BYTES_MAX = 256 << 10   # rpc/transports/frame_stream.GATHER_BYTES
    MESSAGE_MAX = 1024          # of a request: a name of 255 bytes and some numbers
    NAME_MAX = 255
    ANSWER_MAX = 1024           # header, attributes twice, a grant
    GRANT_BYTES = 60
    GRANT_BODY = 44
    MAC_BYTES = 16
    HASH_BYTES = 7              # hash of a name, poolmap/shards/partitions
    SLOTS = 64
    SYMLINK_MAX = 4095
    COUNTER_BITS = 51
    RECORD_MAX = 176            # inode record without a symlink's target
    LEASE_SLOT_BITS = 20        # size of the lease table: lease_table.SLOT_BITS
    SEVERAL = 0xFFFF
    # records: flags of an inode, and file types
    DIVIDED = 32
    TRASHED = 64
    WIDE = 4
    HAS_ACL = 128
    TOUCHED = 1 << 8
    SHOWN = 0xFF
    S_IFMT = 0o170000
    S_IFDIR = 0o040000
    S_IFREG = 0o100000
    S_IFLNK = 0o120000
    S_ISGID = 0o2000
    # records: bits of a record's head
    SIZE_AT = 8
    OWNER_AT = 10
    LINKS_BIT = 1 << 12
    CTIME_AT = 13
    ATIME_AT = 15
    CUT_BIT = 1 << 17
    BLOCKS_BIT = 1 << 18
    RDEV_BIT = 1 << 19
    LAYOUT_BIT = 1 << 20
    FLAGS_BIT = 1 << 21
    PARENT_BIT = 1 << 22
    CHANGE_BIT = 1 << 23
    TOUCHED_BIT = 1 << 24
    PUNCHES_BIT = 1 << 25
    VOLUME_BIT = 1 << 26
    BIRTH_AT = 27

cdef uint64_t COUNTER_MASK = (<uint64_t>1 << COUNTER_BITS) - 1
cdef uint64_t SCATTER_1 = 0x5851F42D4C957, SCATTER_2 = 0x2545F4914F6CD
cdef uint64_t FILE_BYTES_MAX = <uint64_t>1 << 50
cdef int64_t TIME_MAX = <int64_t>1 << 62
cdef uint64_t NUMBER_MAX = <uint64_t>1 << 63
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX
cdef uint16_t CREATE = wire.META_CREATE, UNLINK = wire.META_UNLINK, REPORT = wire.META_REPORT
cdef uint16_t LOOKUP = wire.META_LOOKUP, GETATTR = wire.META_GETATTR
cdef uint64_t GOLDEN = 0x9E3779B97F4A7C15
cdef uint32_t ANYTHING = 0xFFFFFFFF
cdef uint32_t MARK_METHOD = 0x9E3779B1, MARK_UID = 0x85EBCA6B, MARK_GID = 0xC2B2AE35  # sessions.table.mark_of
cdef bytes COUNTS_KEY = b"\x80\x04", ORPHAN_VALUE = b"\x01"


# -- records, in the format of records.py --------------------------------------------------------------------

cdef struct Inode:
    uint64_t number, size, blocks, change, cut, parent, punches, volume
    int64_t atime, mtime, ctime, birth
    uint32_t mode, links, uid, gid, rdev, table, chunk_bits, flags
    const uint8_t *target
    Py_ssize_t target_bytes


cdef inline uint64_t blocks_of(uint64_t size) noexcept nogil:
    return (size + 4095 >> 12) << 3


cdef bint decode(uint64_t number, bytes raw, Inode *i) noexcept:
    """Decode a record. False if records.decode_inode might raise, or a number is implausibly large."""
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(raw)
    cdef Py_ssize_t left = PyBytes_GET_SIZE(raw), needed = 14
    if left < 15:
        return False
    cdef uint32_t head = get32(at)
    cdef uint32_t size = head >> SIZE_AT & 3, owner = head >> OWNER_AT & 3, ctime = head >> CTIME_AT & 3
    cdef uint32_t atime = head >> ATIME_AT & 3, birth = head >> BIRTH_AT & 3
    if head & 0xFF != 1 or head >= 1 << 29 or ctime > 2 or atime > 2:
        return False
    needed += 8 if head & CHANGE_BIT else 1
    needed += 8 if size == 3 else 2 * size
    needed += 4 if owner == 1 else 8 if owner == 2 else 2 if owner == 3 else 0
    needed += (4 if head & LINKS_BIT else 0) + 4 * ctime + 4 * atime
    needed += (8 if head & CUT_BIT else 0) + (8 if head & BLOCKS_BIT else 0) + (4 if head & RDEV_BIT else 0)
    needed += (2 if head & LAYOUT_BIT else 0) + (2 if head & FLAGS_BIT else 0) + (8 if head & PARENT_BIT else 0)
    needed += (8 if head & PUNCHES_BIT else 0) + (8 if head & VOLUME_BIT else 0)
    needed += 4 if birth == 2 else 8 if birth == 3 else 0
    if left < needed:
        return False
    i.number, i.mode, i.mtime = number, get16(at + 4), <int64_t>get64(at + 6)
    if not -TIME_MAX < i.mtime < TIME_MAX:
        return False
    at += 14
    if head & CHANGE_BIT:
        i.change = get64(at)
        at += 8
    else:
        i.change = at[0]
        at += 1
    i.size = 0
    if size:
        i.size = get16(at) if size == 1 else get32(at) if size == 2 else get64(at)
        at += 8 if size == 3 else 2 * size
    i.uid = i.gid = 0
    if owner == 1:
        i.uid, i.gid = get16(at), get16(at + 2)
        at += 4
    elif owner == 2:
        i.uid, i.gid = get32(at), get32(at + 4)
        at += 8
    elif owner == 3:
        i.uid = i.gid = get16(at)
        at += 2
    i.links = 1
    if head & LINKS_BIT:
        i.links = get32(at)
        at += 4
    i.ctime = i.mtime if not ctime else i.mtime + get32(at) if ctime == 1 else <int64_t>get64(at)
    at += 4 * ctime
    i.atime = i.mtime if not atime else i.mtime - get32(at) if atime == 1 else <int64_t>get64(at)
    at += 4 * atime
    if not -TIME_MAX < i.ctime < TIME_MAX or not -TIME_MAX < i.atime < TIME_MAX:
        return False
    i.cut = 0
    if head & CUT_BIT:
        i.cut = get64(at)
        at += 8
    cdef uint32_t kind = i.mode & S_IFMT
    if head & BLOCKS_BIT:
        i.blocks = get64(at)
        at += 8
    else:
        i.blocks = blocks_of(i.size) if kind == S_IFREG else 0
    i.rdev = 0
    if head & RDEV_BIT:
        i.rdev = get32(at)
        at += 4
    i.table, i.chunk_bits = 1, 20
    if head & LAYOUT_BIT:
        i.table, i.chunk_bits = at[0], at[1]
        at += 2
    i.flags = 0
    if head & FLAGS_BIT:
        i.flags = get16(at)
        at += 2
    i.parent = i.punches = i.volume = 0
    if head & PARENT_BIT:
        i.parent = get64(at)
        at += 8
    if head & PUNCHES_BIT:
        i.punches = get64(at)
        at += 8
    if head & VOLUME_BIT:
        i.volume = get64(at)
        at += 8
    i.birth = 0
    if birth == 1:
        i.birth = i.mtime
    elif birth == 2:
        i.birth = i.mtime - get32(at)
        at += 4
    elif birth == 3:
        i.birth = <int64_t>get64(at)
        at += 8
        if not -TIME_MAX < i.birth < TIME_MAX:
            return False
    if head & TOUCHED_BIT:
        i.flags |= TOUCHED
    i.target, i.target_bytes = at, left - needed
    if not kind or (kind == S_IFLNK) != (i.target_bytes != 0) or i.target_bytes > SYMLINK_MAX:
        return False
    return i.size < NUMBER_MAX and i.change < NUMBER_MAX and i.cut < NUMBER_MAX and i.blocks < NUMBER_MAX


cdef bytes encode(Inode *i):
    cdef uint8_t record[RECORD_MAX]
    cdef uint8_t *at = record + 14
    cdef uint32_t head = 1, flags = i.flags
    cdef int64_t later = i.ctime - i.mtime, earlier = i.mtime - i.atime, since = i.mtime - i.birth
    put16(record + 4, <uint16_t>i.mode)
    put64(record + 6, <uint64_t>i.mtime)
    if i.change > 0xFF:
        head |= CHANGE_BIT
        put64(at, i.change)
        at += 8
    else:
        at[0] = <uint8_t>i.change
        at += 1
    if i.size >> 32:
        head |= 3 << SIZE_AT
        put64(at, i.size)
        at += 8
    elif i.size >> 16:
        head |= 2 << SIZE_AT
        put32(at, <uint32_t>i.size)
        at += 4
    elif i.size:
        head |= 1 << SIZE_AT
        put16(at, <uint16_t>i.size)
        at += 2
    if i.uid or i.gid:
        if i.uid == i.gid and i.gid < 1 << 16:
            head |= 3 << OWNER_AT
            put16(at, <uint16_t>i.uid)
            at += 2
        elif i.uid < 1 << 16 and i.gid < 1 << 16:
            head |= 1 << OWNER_AT
            put16(at, <uint16_t>i.uid)
            put16(at + 2, <uint16_t>i.gid)
            at += 4
        else:
            head |= 2 << OWNER_AT
            put32(at, i.uid)
            put32(at + 4, i.gid)
            at += 8
    if i.links != 1:
        head |= LINKS_BIT
        put32(at, i.links)
        at += 4
    if 0 < later < <int64_t>1 << 32:
        head |= 1 << CTIME_AT
        put32(at, <uint32_t>later)
        at += 4
    elif later:
        head |= 2 << CTIME_AT
        put64(at, <uint64_t>i.ctime)
        at += 8
    if 0 < earlier < <int64_t>1 << 32:
        head |= 1 << ATIME_AT
        put32(at, <uint32_t>earlier)
        at += 4
    elif earlier:
        head |= 2 << ATIME_AT
        put64(at, <uint64_t>i.atime)
        at += 8
    if i.cut:
        head |= CUT_BIT
        put64(at, i.cut)
        at += 8
    if i.blocks != (blocks_of(i.size) if i.mode & S_IFMT == S_IFREG else 0):
        head |= BLOCKS_BIT
        put64(at, i.blocks)
        at += 8
    if i.rdev:
        head |= RDEV_BIT
        put32(at, i.rdev)
        at += 4
    if i.table != 1 or i.chunk_bits != 20:
        head |= LAYOUT_BIT
        at[0], at[1] = <uint8_t>i.table, <uint8_t>i.chunk_bits
        at += 2
    if flags & TOUCHED:
        head |= TOUCHED_BIT
        flags ^= TOUCHED
    if flags:
        head |= FLAGS_BIT
        put16(at, <uint16_t>flags)
        at += 2
    if i.parent:
        head |= PARENT_BIT
        put64(at, i.parent)
        at += 8
    if i.punches:
        head |= PUNCHES_BIT
        put64(at, i.punches)
        at += 8
    if i.volume:
        head |= VOLUME_BIT
        put64(at, i.volume)
        at += 8
    if i.birth:
        if since == 0:
            head |= 1 << BIRTH_AT
        elif 0 < since < <int64_t>1 << 32:
            head |= 2 << BIRTH_AT
            put32(at, <uint32_t>since)
            at += 4
        else:
            head |= <uint32_t>3 << BIRTH_AT
            put64(at, <uint64_t>i.birth)
            at += 8
    put32(record, head)
    cdef Py_ssize_t count = at - record
    if not i.target_bytes:
        return PyBytes_FromStringAndSize(<const char *>record, count)
    cdef bytes whole = PyBytes_FromStringAndSize(NULL, count + i.target_bytes)
    memcpy(PyBytes_AS_STRING(whole), record, count)
    memcpy(PyBytes_AS_STRING(whole) + count, i.target, i.target_bytes)
    return whole


cdef bytes numbered_key(uint32_t kind, uint64_t inode):
    cdef uint8_t key[16]
    cdef uint64_t x = inode * SCATTER_1 & COUNTER_MASK
    x = (x ^ x >> 26) * SCATTER_2 & COUNTER_MASK
    cdef uint32_t head = <uint32_t>(inode >> COUNTER_BITS) << 3 | kind
    put64_big(key + 1, x)
    key[0], key[1] = head >> 8, head & 0xFF
    return PyBytes_FromStringAndSize(<const char *>key, 9)


cdef bytes dentry_key(uint32_t partition, uint64_t directory, const uint8_t *name_hash, const uint8_t *name, Py_ssize_t count):
    cdef bytes key = PyBytes_FromStringAndSize(NULL, 17 + count)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(key)
    cdef uint32_t head = partition << 3 | 1
    at[0], at[1] = head >> 8, head & 0xFF
    put64_big(at + 2, directory)
    memcpy(at + 10, name_hash, 7)
    memcpy(at + 17, name, count)
    return key


cdef bytes encode_dentry(uint32_t kind, uint64_t counter):
    """Value of a directory entry whose inode is in the partition of the name."""
    cdef uint8_t value[9]
    cdef int count = 0
    put64_big(value + 1, counter)
    while count < 8 and not value[1 + count]:
        count += 1
    value[count] = 1 << 4 | kind
    return PyBytes_FromStringAndSize(<const char *>value + count, 9 - count)


cdef uint64_t decode_dentry(uint32_t partition, bytes raw) noexcept:
    """Inode number of a directory entry; 0 if records.decode_dentry might raise."""
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(raw)
    cdef Py_ssize_t count = PyBytes_GET_SIZE(raw), byte
    cdef uint64_t number = 0
    if not 2 <= count <= 9 or at[0] >> 4 != 1 or not 1 << (at[0] & 15) & 0x1556:  # records.KINDS
        return 0
    for byte in range(1, count):
        number = number << 8 | at[byte]
    if not number or number >= NUMBER_MAX:
        return 0
    if count < 9:
        number |= <uint64_t>partition << COUNTER_BITS
    return number


cdef bytes slot_key(uint64_t session, uint32_t slot):
    cdef uint8_t key[11]
    key[0], key[1], key[10] = 0x80, 0x03, slot
    put64_big(key + 2, session)
    return PyBytes_FromStringAndSize(<const char *>key, 11)


cdef bytes encode_slot(uint64_t sequence, bytes answer, uint32_t mark):
    cdef Py_ssize_t count = PyBytes_GET_SIZE(answer)
    cdef bytes value = PyBytes_FromStringAndSize(NULL, 17 + count + 9)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(value)
    at[0] = 1
    put64(at + 1, sequence)
    put64(at + 9, 0)
    memcpy(at + 17, PyBytes_AS_STRING(answer), count)
    put_varint(at + 17 + count, 0xFFFFFFFD)  # session_records: the tag of the mark
    put32(at + 22 + count, mark)
    return value


cdef bytes encode_counts(uint64_t inodes):
    cdef uint8_t value[9]
    value[0] = 1
    put64(value + 1, inodes)
    return PyBytes_FromStringAndSize(<const char *>value, 9)


# -- messages ----------------------------------------------------------------------------------------------------------

cdef struct Field:
    uint32_t number, kind
    uint64_t value
    const uint8_t *bytes
    Py_ssize_t count


cdef bint varint(const uint8_t **at, const uint8_t *end, uint64_t *value) noexcept nogil:
    cdef uint64_t found = 0
    cdef int shift = 0
    cdef uint8_t byte
    while at[0] < end and shift < 63:
        byte = at[0][0]
        found |= <uint64_t>(byte & 127) << shift
        at[0] += 1
        if byte < 128:
            value[0] = found
            return True
        shift += 7
    return False  # truncated, or more than 63 bits, which none of our numbers has


cdef bint take(const uint8_t **at, const uint8_t *end, Field *field) noexcept nogil:
    """Read the next field.

    False: the bytes are no field, or its number is not above the one before; our encoders write fields in
    order.
    """
    cdef uint64_t tag
    if not varint(at, end, &tag) or tag >> 3 <= field.number or tag >> 32:
        return False
    field.number, field.kind = <uint32_t>tag >> 3, tag & 7
    if field.kind == 0:
        return varint(at, end, &field.value)
    if field.kind == 1:
        if end - at[0] < 8:
            return False
        field.value = get64(at[0])
        at[0] += 8
        return True
    if field.kind == 2:
        if not varint(at, end, &field.value) or field.value > <uint64_t>(end - at[0]):
            return False
        field.bytes, field.count = at[0], <Py_ssize_t>field.value
        at[0] += field.count
        return True
    return False


cdef struct Request:
    uint64_t session, sequence, inode, cut, end, blocks_delta
    uint32_t slot, uid, gid, mode, rights, mark
    bint opens, wrote, sync, release
    const uint8_t *name
    Py_ssize_t name_bytes


cdef bint take_change(const uint8_t *at, Py_ssize_t count, Request *r) noexcept nogil:
    cdef const uint8_t *end = at + count
    cdef Field f
    f.number = 0
    while at < end:
        if not take(&at, end, &f):
            return False
        if f.kind == 1 and (f.number == 1 or f.number == 4):
            if f.number == 1:
                r.session = f.value
        elif f.kind != 0:
            return False
        elif f.number == 3:
            r.sequence = f.value
        elif f.value >> 32:
            return False
        elif f.number == 2:
            r.slot = <uint32_t>f.value
        elif f.number == 5:
            r.uid = <uint32_t>f.value
        elif f.number == 6:
            r.gid = <uint32_t>f.value
        else:
            return False
    return True


cdef bint take_request(uint16_t method, const uint8_t *at, Py_ssize_t count, Request *r) noexcept nogil:
    """Read a message that has only fields supported here. False: leave the request to the slow path."""
    cdef const uint8_t *first = at
    cdef const uint8_t *end = at + count
    cdef Field f
    r.session = r.sequence = r.inode = r.cut = r.end = r.blocks_delta = 0
    r.slot = r.uid = r.gid = r.mode = r.rights = r.mark = 0
    r.opens = r.wrote = r.sync = r.release = False
    r.name, r.name_bytes = NULL, 0
    f.number = 0
    while at < end:
        if not take(&at, end, &f):
            return False
        if method == LOOKUP or method == GETATTR:
            if f.number == 1 and f.kind == 1:
                r.session = f.value
            elif f.number == 2 and f.kind == 1:
                pass
            elif f.number == 3 and f.kind == 1:
                r.inode = f.value
            elif f.number == 4 and f.kind == 2 and method == LOOKUP:
                r.name, r.name_bytes = f.bytes, f.count
            elif f.number == (5 if method == LOOKUP else 4) and f.kind == 0 and not f.value >> 32:
                r.rights = <uint32_t>f.value
            else:
                return False
        elif f.number == 1:
            if f.kind != 2 or f.count > 127 or f.bytes != first + 2 or not take_change(f.bytes, f.count, r):
                return False
            r.mark = crc_of(at, end - at) ^ method * MARK_METHOD ^ r.uid * MARK_UID ^ r.gid * MARK_GID
        elif f.number == 2:
            if f.kind != 1:
                return False
            r.inode = f.value
        elif method == REPORT:
            if f.kind != 0 or 5 <= f.number <= 7 and f.value > 1:
                return False
            if f.number == 3:
                r.cut = f.value
            elif f.number == 4:
                r.end = f.value
            elif f.number == 5:
                r.wrote = f.value
            elif f.number == 6:
                r.sync = f.value
            elif f.number == 7:
                r.release = f.value
            elif f.number == 8:
                r.blocks_delta = f.value
            else:
                return False
        elif f.number == 3 and f.kind == 2:
            r.name, r.name_bytes = f.bytes, f.count
        elif method == UNLINK or f.kind != 0 or f.value >> 32:
            return False
        elif f.number == 4:
            r.mode = <uint32_t>f.value
        elif f.number == 8:
            r.rights = <uint32_t>f.value
        # masked: matters only in directories with an access control list, which are left out
        elif f.number == 14:
            pass
        elif f.value > 1:
            return False
        elif f.number == 7:
            r.opens = f.value
        elif f.number != 9 and f.number != 11:  # exclusive, truncate: no difference if the name is new
            return False
    return True


cdef uint8_t *put_attr(uint8_t *at, Inode *i) noexcept nogil:
    """As transaction.fill_attr, for an inode that is in no trash."""
    at = put_fixed(at, 1 << 3 | 1, i.number)
    at = put_number(at, 2 << 3, i.mode)
    at = put_number(at, 3 << 3, i.links)
    at = put_number(at, 4 << 3, i.uid)
    at = put_number(at, 5 << 3, i.gid)
    at = put_number(at, 6 << 3, i.size)
    at = put_number(at, 7 << 3, i.blocks)
    at = put_fixed(at, 8 << 3 | 1, <uint64_t>i.atime)
    at = put_fixed(at, 9 << 3 | 1, <uint64_t>i.mtime)
    at = put_fixed(at, 10 << 3 | 1, <uint64_t>i.ctime)
    at = put_number(at, 11 << 3, i.rdev)
    at = put_number(at, 12 << 3, i.table)
    at = put_number(at, 13 << 3, i.chunk_bits)
    at = put_number(at, 14 << 3, i.cut)
    at = put_number(at, 15 << 3, i.flags & SHOWN)
    if i.change:
        at[0], at[1] = 128, 1  # 16 << 3
        at = put_varint(at + 2, i.change)
    if i.parent:
        at[0], at[1] = 137, 1  # 17 << 3 | 1
        put64(at + 2, i.parent)
        at += 10
    if i.cut and i.punches:
        at[0], at[1] = 144, 1  # 18 << 3
        at = put_varint(at + 2, i.punches)
    if i.volume:
        at[0], at[1] = 153, 1  # 19 << 3 | 1
        put64(at + 2, i.volume)
        at += 10
    return at


cdef uint8_t *put_within(uint8_t *at, uint8_t tag, const uint8_t *message, Py_ssize_t count) noexcept nogil:
    at[0] = tag
    at = put_varint(at + 1, count)
    memcpy(at, message, count)
    return at + count


cdef uint8_t *put_attr_within(uint8_t *at, uint8_t tag, Inode *i) noexcept nogil:
    cdef uint8_t attr[192]
    return put_within(at, tag, attr, put_attr(attr, i) - attr)


cdef inline void stamp(Inode *i, int64_t now, bint content) noexcept nogil:
    """As Draft.stamp."""
    if now < i.ctime:
        now = i.ctime
    i.ctime = now
    if content:
        i.mtime = now
    i.change += 1


# -- answers -----------------------------------------------------------------------------------------------------------

cdef class FastPath:
    """Fast path as described in fast_path.py, bound to `parts` of a shard."""

    cdef object _status, _kv, _view, _sessions, _numbers, _moment, _watches, _collector, _clock, _failed, _raw, _leases_of, _grants
    cdef object _callers, _peer, _owner
    cdef bint _is_user
    cdef dict _by_number, _holders, _restricted, _encrypted, _cutting, _counters
    cdef bint _is_system
    cdef uint64_t _grant_ms
    cdef uint8_t _answer[ANSWER_MAX]
    cdef uint32_t[::1] _leases

    def __init__(self, parts, failed):
        """`failed(session, slot, sequence, mark, error, number)` returns the error frame for a failed
        change."""
        self._callers, self._status = parts.callers, parts.status
        self._kv, self._view, self._sessions = parts.kv, parts.view, parts.sessions
        self._numbers, self._moment, self._watches = parts.numbers, parts.moment, parts.watches
        self._collector, self._clock, self._counters = parts.collector, parts.clock, parts.status.counters
        self._failed = failed
        self._by_number, self._holders = self._sessions.by_number, self._sessions.holders
        self._encrypted = self._view.access.encrypted
        self._restricted, self._cutting = self._view.access.restricted, self._view.cutting
        self._is_system = type(self._clock) is SystemClock
        self._grant_ms = self._view.grant_ms
        self._grants = blake2b(key=parts.secret, digest_size=MAC_BYTES)

    cdef double _now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    cdef long long _now_ns(self) except -1:
        return wall_ns() if self._is_system else self._clock.wall_ns()

    def answer(self, bytearray buffer, Py_ssize_t end, dict in_work, reply_stats, list out, side=None):
        """Answer as many request frames at the beginning of `buffer` as the fast path can.

        `end` is the number of bytes received. One reply frame per request is appended to `out`; the return
        value is the number of bytes that these requests took. `in_work`: numbers of the requests in progress.
        `side`: the connection's server side; without one the peer is unknown, and nothing is answered. A
        caller that acts as one single user also gets no answer here, because `local_users` must check its
        modes and paths.
        """
        if side is None:
            return 0
        peer = side.peer
        if peer is not self._peer:
            caller = self._callers.of(peer)
            self._owner, self._is_user, self._peer = caller.owner, caller.user is not None, peer
        if self._is_user:
            return 0
        if end > PyByteArray_GET_SIZE(buffer):
            raise ValueError("frames lie outside of their buffer")
        cdef Py_ssize_t at = 0, total = 0, message_bytes
        cdef const uint8_t *frame
        cdef uint16_t method
        cdef Request request
        cdef bytes reply
        cdef double since_s, took_s
        cdef uint32_t number
        cdef uint16_t status
        while end - at >= HEADER_BYTES and total < OUT_BYTES_MAX:
            frame = <const uint8_t *>PyByteArray_AS_STRING(buffer) + at
            method = get16(frame + 4)
            message_bytes = get32(frame + 16)
            if (method != CREATE and method != UNLINK and method != REPORT and method != LOOKUP and method != GETATTR
                    or get32(frame + 20) or message_bytes > MESSAGE_MAX or end - at - HEADER_BYTES < message_bytes
                    or not is_head(frame, REQUEST) or crc_of(frame + HEADER_BYTES, message_bytes) != get32(frame + 24)):
                break
            number = get32(frame + 8)
            if len(in_work) >= in_flight_max or in_work and number in in_work:
                break
            if not take_request(method, frame + HEADER_BYTES, message_bytes, &request) or not self._at_ease():
                break
            since_s = self._now_s()
            try:
                if method == CREATE:
                    reply = self._create(&request, number)
                elif method == UNLINK:
                    reply = self._unlink(&request, number)
                elif method == REPORT:
                    reply = self._report(&request, number)
                else:
                    reply = self._entry(&request, number, method == LOOKUP)
            except Exception as error:
                if not isinstance(error, NvpoolError):
                    _log.error("method %d could not be answered on the fast path", method, exc_info=error)
                # the slow path reports the error; if the change was made, it returns the kept answer
                reply = None
            if reply is None:
                break
            at += HEADER_BYTES + message_bytes
            out.append(reply)
            total += PyBytes_GET_SIZE(reply)
            reply_stats.begun += 1
            took_s = self._now_s() - since_s
            status = get16(<const uint8_t *>PyBytes_AS_STRING(reply) + 4)
            method_stats = reply_stats.by_method.get(method)
            if method_stats is None or status:
                reply_stats.answered(method, took_s, status, 0, 0)
                continue
            reply_stats.ended += 1
            times = method_stats.times
            counts = times.counts
            counts[slot_of(took_s)] += 1
            times.sum_s += took_s
        return at

    cdef bint _at_ease(self) except -1:
        """Whether requests of any caller can be decided here by the engine's records alone."""
        return (self._status.state == "serving" and not self._restricted and not self._view.owners
                and self._view.get == self._kv.get and not self._kv.sync_before_answer)

    cdef bytes _reply(self, uint32_t number, uint8_t *end):
        """Complete the reply frame whose message was written behind the space for its header."""
        cdef uint8_t *at = self._answer
        cdef Py_ssize_t message_bytes = end - at - HEADER_BYTES
        put_head(at, REPLY, 0, number, 0, <uint32_t>message_bytes, 0, crc_of(at + HEADER_BYTES, message_bytes))
        return PyBytes_FromStringAndSize(<const char *>at, end - at)

    # -- reads

    cdef bint _inode(self, uint64_t number, Inode *i) except -1:
        """Read an inode. False: it does not exist, or needs the slow path.

        A symlink's target is valid until the next inode is read.
        """
        if not 0 < number < NUMBER_MAX:
            return False
        raw = self._raw = self._view.get(numbered_key(0, number))  # referenced: `i.target` points into it
        return raw is not None and type(raw) is bytes and decode(number, raw, i) and not i.flags & (DIVIDED | TRASHED)

    cdef bytes _name(self, Request *r, Inode *directory):
        """Key of the name in the directory; None if the slow path must decide."""
        cdef const uint8_t *name = r.name
        cdef Py_ssize_t count = r.name_bytes
        if (directory.mode & S_IFMT != S_IFDIR or directory.flags & WIDE or not 0 < count <= NAME_MAX
                or name[0] == c'.' and (count == 1 or count == 2 and name[1] == c'.')
                or memchr(name, c'/', count) is not NULL or memchr(name, 0, count) is not NULL):
            return None
        cdef bytes name_hash = self._view.name_hash(directory.number, PyBytes_FromStringAndSize(<const char *>name, count))
        return dentry_key(<uint32_t>(directory.number >> COUNTER_BITS), directory.number,
                          <const uint8_t *>PyBytes_AS_STRING(name_hash), name, count)

    cdef object _session(self, Request *r):
        """The session; None if it is unknown or belongs to another caller."""
        cdef PyObject *found = PyDict_GetItem(self._by_number, r.session)
        if found is NULL:
            return None
        session = <object>found
        owner = session.owner
        return session if owner == self._owner or owner is not None and not self._owner else None

    cdef object _slot(self, Request *r, session):
        """The slot, if the request is new in it and changes are possible now; else None."""
        if r.slot >= SLOTS:
            return None
        slot = (<list?>session.slots)[r.slot]
        if slot is None or slot.awaited or r.sequence <= <uint64_t>slot.sequence or self._kv.full or self._moment.changes_wait:
            return None
        if <uint64_t>self._view.next_number >= <uint64_t>self._numbers.bounds.inode:
            return None
        return slot

    cdef bint _is_disturbed(self, session, tuple numbers) except -1:
        """Whether leases of other sessions may have to be recalled before these inodes change. See
        LeaseTable.conflict."""
        cdef dict watching = self._watches.by_session
        if not self._watches.unheard and (not watching or len(watching) == 1 and session.number in watching):
            return False
        return not self._watches.is_free(session.number, numbers)

    cdef uint32_t _issue_lease(self, session, Inode *i) except? 0xFFFFFFFF:
        """As View.issue_lease, for an inode that is in no sealed volume and not divided."""
        if not i.links or self._cutting and i.number in self._cutting:
            return 0
        return self._view.lease_ms if self._promised(session.number, i.number) else 0

    cdef bint _promised(self, session, uint64_t number) except -1:
        """As LeaseTable.issue_leases, for one inode."""
        cdef PyObject *found = PyDict_GetItem(<dict?>self._watches.by_session, session)
        if found is NULL:
            return False
        watch, table = <object>found, self._watches.table
        cdef double now_s = self._now_s()
        if <double>watch.until_s <= now_s:
            return False
        if (self._watches.withheld or self._watches.recalls or now_s >= <double>table.turn_s
                or self._watches.cool and number in self._watches.cool):
            return bool(self._watches.issue_leases(session, (number,)))
        if table.new is not self._leases_of:
            self._leases_of = self._leases = table.new
            if self._leases.shape[0] != 1 << LEASE_SLOT_BITS:
                raise InvariantBroken("the table of leases has another size than here")
        cdef uint64_t spread = number * GOLDEN
        cdef uint32_t slot = <uint32_t>(spread >> 64 - LEASE_SLOT_BITS)
        cdef uint32_t mine = <uint32_t>(spread >> 12) & 0xFFFF0000 | <uint32_t>watch.index
        cdef uint32_t held = self._leases[slot]
        if held != mine:
            if held:
                mine = ANYTHING if held >> 16 != mine >> 16 else mine | SEVERAL
            self._leases[slot] = mine
        return True

    cdef uint8_t *_put_grant(self, uint8_t *at, Inode *i, uint32_t rights, uint64_t session, int64_t now_ns) except NULL:
        """As View.grant, for a file that is not being truncated."""
        cdef uint8_t *begin = at + 2
        cdef uint64_t ends_ms = now_ns // 1_000_000 + self._grant_ms
        at[0], at[1] = 2 << 3 | 2, GRANT_BYTES
        begin[0], begin[1], begin[2], begin[3] = 1, rights & 3, 0, 0
        put64(begin + 4, session)
        put64(begin + 12, i.number)
        put64(begin + 20, i.cut)
        put64(begin + 28, ends_ms)
        begin[36] = i.table if i.table > 1 else 0
        cdef uint64_t epoch = 0, tag = 0
        # a volume without restrictions: a shard with a restricted one does not use the fast path
        if i.volume:
            epoch = self._view.map_epoch
            tag = i.volume * GOLDEN >> 48
            tag = tag if tag else 1
            if self._encrypted and i.volume in self._encrypted:
                begin[1] |= encrypted
        begin[37], begin[38], begin[39] = <uint8_t>(epoch >> 16), <uint8_t>epoch, <uint8_t>(epoch >> 8)
        begin[40], begin[41], begin[42], begin[43] = <uint8_t>tag, <uint8_t>(tag >> 8), 0, 0
        state = self._grants.copy()
        state.update(PyBytes_FromStringAndSize(<const char *>begin, GRANT_BODY))
        memcpy(begin + GRANT_BODY, PyBytes_AS_STRING(<bytes>state.digest()), MAC_BYTES)
        return begin + GRANT_BYTES

    # -- changes

    cdef bytes _commit(self, Request *r, session, slot, list effects, bytes answer, bint adds, uint32_t number):
        """Apply the change with its slot record. Return None on success, else the error frame."""
        effects.append((slot_key(r.session, r.slot), encode_slot(r.sequence, answer, r.mark)))
        try:
            self._kv.apply(effects, reclaims=not adds)
        except Exception as error:
            self._counters["requests"] += 1
            return self._failed(session, slot, r.sequence, r.mark, error, number)
        self._counters["requests"] += 1
        self._counters["changes"] += 1
        slot.sequence, slot.waits_for, slot.answer, slot.error = r.sequence, 0, answer, None
        slot.mark = r.mark
        slot.restored, slot.opened = False, 0
        return None

    cdef bytes _create(self, Request *r, uint32_t number):
        """CREATE of a new file, with or without an open."""
        cdef Inode parent, born
        cdef uint8_t *said = self._answer + HEADER_BYTES
        cdef uint8_t *at
        cdef uint8_t entry[320]
        cdef bytes key, answer, failed
        cdef int64_t now_ns
        cdef uint32_t partition, lease_ms
        cdef uint64_t counter
        session = self._session(r)
        if session is None or r.mode & S_IFMT != S_IFREG or r.mode > 0o177777:
            return None
        slot = self._slot(r, session)
        if slot is None or not self._inode(r.inode, &parent) or not parent.links or parent.volume:
            return None
        if parent.flags & HAS_ACL:
            return None
        key = self._name(r, &parent)
        if key is None or self._view.get(key) is not None:
            return None
        if r.opens and len(<dict?>session.opens) >= <Py_ssize_t>session.opens_max or self._is_disturbed(session, (parent.number,)):
            return None
        now_ns = self._now_ns()
        if now_ns < 0:
            return None
        partition = <uint32_t>(parent.number >> COUNTER_BITS)
        counter = self._view.next_number
        born.number = <uint64_t>partition << COUNTER_BITS | counter
        born.mode, born.links, born.uid, born.gid = r.mode, 1, r.uid, r.gid
        if parent.mode & S_ISGID:
            born.gid = parent.gid
        born.size = born.blocks = born.cut = born.parent = born.punches = born.volume = 0
        born.rdev, born.change = 0, 1
        born.atime = born.mtime = born.ctime = born.birth = now_ns
        born.table, born.chunk_bits = parent.table, parent.chunk_bits
        born.flags = TOUCHED if r.opens and r.rights & 2 else 0
        born.target_bytes = 0
        parent.size += 1
        stamp(&parent, now_ns, True)
        at = put_attr_within(entry, 1 << 3 | 2, &born)
        if r.opens and r.rights & 3:
            at = self._put_grant(at, &born, r.rights, r.session, now_ns)
        at = put_within(said, 1 << 3 | 2, entry, at - entry)
        at[0], at[1] = 2 << 3, 1
        at += 2
        answer = PyBytes_FromStringAndSize(<const char *>said, at - said)
        effects = [(COUNTS_KEY, encode_counts(<uint64_t>self._view.inode_count + 1)), (key, encode_dentry(8, counter)),
                   (numbered_key(0, born.number), encode(&born)), (numbered_key(0, parent.number), encode(&parent))]
        failed = self._commit(r, session, slot, effects, answer, True, number)
        if failed is not None:
            return failed
        self._view.next_number += 1
        self._view.inode_count += 1
        if r.opens:
            slot.opened = born.number
            self._open(session, born.number)
        lease_ms = self._issue_lease(session, &born)
        at[0], at[1] = 1 << 3 | 2, 0  # not in the kept answer: a CreateReply with the lease and the directory
        if lease_ms:
            at[1] = <uint8_t>(put_number(at + 2, 3 << 3, lease_ms) - at - 2)
        at = put_attr_within(at + 2 + at[1], 3 << 3 | 2, &parent)
        return self._reply(number, at)

    cdef int _open(self, session, uint64_t inode) except -1:
        """As Sessions.open."""
        cdef dict opens = session.opens
        cdef PyObject *found = PyDict_GetItem(opens, inode)
        if found is NULL:
            self._holders[inode] = self._holders.get(inode, 0) + 1
            opens[inode] = 1
        else:
            opens[inode] = <object>found + 1
        return 0

    cdef bytes _unlink(self, Request *r, uint32_t number):
        """UNLINK of a name of a file that is no directory."""
        cdef Inode parent, victim
        cdef uint8_t *said = self._answer + HEADER_BYTES
        cdef uint8_t *at
        cdef bytes key, answer, failed
        cdef int64_t now_ns
        cdef uint64_t inode
        session = self._session(r)
        if session is None:
            return None
        slot = self._slot(r, session)
        if slot is None or not self._inode(r.inode, &parent) or parent.volume or not parent.size:
            return None
        key = self._name(r, &parent)
        if key is None:
            return None
        raw = self._view.get(key)
        if raw is None:
            return None
        inode = decode_dentry(<uint32_t>(parent.number >> COUNTER_BITS), raw)
        if (not inode or not self._inode(inode, &victim) or victim.mode & S_IFMT == S_IFDIR or victim.volume
                or not victim.links or self._is_disturbed(session, (parent.number, victim.number))):
            return None
        now_ns = self._now_ns()
        if now_ns < 0:
            return None
        parent.size -= 1
        stamp(&parent, now_ns, True)
        victim.links -= 1
        stamp(&victim, now_ns, False)
        at = put_number(put_fixed(said, 1 << 3 | 1, victim.number), 2 << 3, victim.links)
        answer = PyBytes_FromStringAndSize(<const char *>said, at - said)
        effects = [(key, None)]
        if not victim.links:
            effects.append((numbered_key(3, victim.number), ORPHAN_VALUE))
        effects.append((numbered_key(0, parent.number), encode(&parent)))
        effects.append((numbered_key(0, victim.number), encode(&victim)))
        failed = self._commit(r, session, slot, effects, answer, False, number)
        if failed is not None:
            return failed
        if not victim.links:
            self._collector.add(victim.number)
        return self._reply(number, put_attr_within(at, 3 << 3 | 2, &parent))

    cdef bytes _report(self, Request *r, uint32_t number):
        """REPORT of a written file's size, possibly with the close of the file."""
        cdef Inode i
        cdef uint8_t *said = self._answer + HEADER_BYTES
        cdef uint8_t *at
        cdef bytes answer, failed
        cdef int64_t now_ns
        cdef uint64_t grown, most
        session = self._session(r)
        if session is None or r.sync:
            return None
        slot = self._slot(r, session)
        if slot is None or not self._inode(r.inode, &i) or i.volume or i.mode & S_IFMT != S_IFREG:
            return None
        # As operations.open.report: requests that would be refused, or would change nothing, take the slow
        # path.
        if r.cut > i.cut or i.punches > i.cut or r.cut < i.cut - i.punches:
            return None
        if i.chunk_bits > 31 or r.end > min(FILE_BYTES_MAX, <uint64_t>1 << 32 + i.chunk_bits):
            return None
        if r.end <= i.size and not r.wrote or r.blocks_delta >= NUMBER_MAX:
            return None
        if self._is_disturbed(session, (i.number,)):
            return None
        now_ns = self._now_ns()
        if now_ns < 0:
            return None
        i.flags |= TOUCHED
        if r.end > i.size:
            grown = r.blocks_delta or blocks_of(r.end) - blocks_of(i.size)
            i.size = r.end
        else:
            grown = r.blocks_delta
        most = blocks_of(i.size)
        i.blocks = i.blocks + grown if i.blocks + grown < most else most
        stamp(&i, now_ns, True)
        at = put_attr_within(said, 1 << 3 | 2, &i)
        answer = PyBytes_FromStringAndSize(<const char *>said, at - said)
        effects = [(numbered_key(0, i.number), encode(&i))]
        failed = self._commit(r, session, slot, effects, answer, False, number)
        if failed is not None:
            return failed
        if r.release:
            inode = i.number
            self._sessions.close(session, inode)
            for other in <list>session.slots:
                if other is not None:
                    opened = other.opened
                    if opened and opened == inode and not other.awaited:
                        other.opened = 0
        return self._reply(number, at)

    cdef bytes _entry(self, Request *r, uint32_t number, bint by_name):
        """LOOKUP of an existing name, or GETATTR."""
        cdef Inode i
        cdef uint8_t *at = self._answer + HEADER_BYTES
        cdef bytes key
        cdef int64_t now_ns
        cdef uint64_t inode = r.inode
        cdef uint32_t lease_ms
        session = self._session(r)
        if session is None:
            return None
        if by_name:
            if not self._inode(r.inode, &i):
                return None
            key = self._name(r, &i)
            raw = self._view.get(key) if key is not None else None
            if raw is None:
                return None
            inode = decode_dentry(<uint32_t>(r.inode >> COUNTER_BITS), raw)
        if not self._inode(inode, &i) or self._cutting and inode in self._cutting:
            return None
        at = put_attr_within(at, 1 << 3 | 2, &i)
        if r.rights & 3 and i.mode & S_IFMT == S_IFREG:
            if r.rights & 2 and not i.flags & TOUCHED:
                return None
            now_ns = self._now_ns()
            if now_ns < 0:
                return None
            at = self._put_grant(at, &i, r.rights, r.session, now_ns)
        lease_ms = self._issue_lease(session, &i)
        self._counters["requests"] += 1
        return self._reply(number, put_number(at, 3 << 3, lease_ms))


# -- for tests: the codecs above, each by itself -------------------------------------------------------------

def recoded(uint64_t number, bytes raw):
    """Decode a record and encode it again: (record, attributes); None if `decode` refuses it."""
    cdef Inode i
    cdef uint8_t attr[192]
    if not decode(number, raw, &i):
        return None
    return encode(&i), PyBytes_FromStringAndSize(<const char *>attr, put_attr(attr, &i) - attr)


def entry_of(uint32_t partition, bytes raw):
    """Inode number in a directory entry of that partition; 0 if it cannot be decoded."""
    return decode_dentry(partition, raw)


def request_of(uint16_t method, bytes message):
    """Fields of a request; None if the fast path would leave it."""
    cdef Request r
    if not take_request(method, <const uint8_t *>PyBytes_AS_STRING(message), len(message), &r):
        return None
    name = PyBytes_FromStringAndSize(<const char *>r.name, r.name_bytes) if r.name is not NULL else b""
    return {"session": r.session, "slot": r.slot, "sequence": r.sequence, "uid": r.uid, "gid": r.gid, "inode": r.inode,
            "name": name, "mode": r.mode, "open": bool(r.opens), "rights": r.rights, "cut": r.cut, "end": r.end,
            "wrote": bool(r.wrote), "sync": bool(r.sync), "release": bool(r.release), "blocks_delta": r.blocks_delta}
