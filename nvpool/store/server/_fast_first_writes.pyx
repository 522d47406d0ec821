# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled fast path for the first write of a new file, from frame to frame.

`fast_first_writes.py` describes its conditions and guarantees.
"""

from hashlib import blake2b

from cpython cimport array
import array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from nvpool.core.clock import SystemClock
from nvpool.core.errors import NvpoolError
from nvpool.core.grants import CLOCK_SKEW_S, ENCRYPTED, SERVICE, WRITE
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.store.disk.allocator import DELTAS_MAX, ROOMY_BLOCKS, encode_bitmap
from nvpool.store.chunks.index import Chunk
from nvpool.store.disk.index_records import TABLE_MAX, IndexSegment
from nvpool.rpc.transports._head cimport HEADER_BYTES, REPLY, REQUEST, is_head, put_head
from nvpool.rpc.transports.frame import pack_head
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE

cdef extern from "_chunk_hash.h":
    uint64_t chunk_hash(uint64_t inode, uint32_t index) nogil

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    long long wall_ns() nogil

cdef extern from "_fields.h":
    uint8_t *put_varint(uint8_t *at, uint64_t value) nogil

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

cdef extern from "unistd.h":
    ssize_t pwrite(int fd, const void *bytes, size_t count, long long offset) nogil

crc_begin(0)

cdef enum:
    MESSAGE_BYTES = 132  # read_write_codec._WRITE_REQUEST
    ENTRY_AT = 75  # offset of the only write in the message
    FRAME_BYTES = HEADER_BYTES + MESSAGE_BYTES
    REPLY_BYTES = 27  # read_write_codec._WRITE_REPLY
    BLOCK = 4096
    GRANT_BYTES = 60
    GRANT_BODY = 44
    MAC_BYTES = 16
    COUNTER_BITS = 51  # of an inode number; the partition is above them
    PARTITIONS = 1 << 13
    SINCE_MAX = 8192
    GROUP_BITS = 13
    SLOT_BITS = 16  # see `location_leases`
    RECORD_MAX = 64  # record of a one-block file: 2, five numbers, session, checksum

cdef uint64_t skew_ms = int(CLOCK_SKEW_S * 1000), NEVER = 0xFFFFFFFFFFFFFFFF
cdef long may_write = WRITE, special = SERVICE | ENCRYPTED
cdef uint16_t method_of_writes = DATA_WRITE
cdef object method_key = DATA_WRITE
cdef uint64_t chain_count = CHAINS_PER_TABLE
cdef uint32_t table_max = TABLE_MAX
cdef Py_ssize_t deltas_max = DELTAS_MAX, roomy_blocks = ROOMY_BLOCKS
cdef array.array no_places = array.array("Q"), no_deltas = array.array("I")
cdef object new_chunk = Chunk.__new__, new_segment = IndexSegment.__new__


cdef bytes numbered(uint8_t kind, uint64_t inode):
    """Return index_records.segment_key of a file's beginning, or index_records.inode_key."""
    cdef uint8_t key[9]
    key[0] = kind
    put64_big(key + 1, inode)
    return PyBytes_FromStringAndSize(<const char *>key, 9)


cdef bytes numbered_group(uint8_t kind, uint32_t group):
    """Return index_records.delta_key or index_records.group_key."""
    cdef uint8_t key[5]
    key[0], key[1], key[2], key[3], key[4] = kind, group >> 24, group >> 16, group >> 8, group
    return PyBytes_FromStringAndSize(<const char *>key, 5)


cdef class UnknownInodes:
    """Set of inodes of which the index certainly has nothing, known without a look-up.

    The highest inode number of each partition in the index is looked up once. Later inodes are added as the
    kv engine reports them (Kv.on_apply).
    """

    cdef object _kv
    cdef uint64_t *_ends  # by partition: from this number on the index had nothing; 0: not looked up
    cdef set _since

    def __cinit__(self, kv):
        self._kv, self._since = kv, set()
        self._ends = <uint64_t *>calloc(PARTITIONS, sizeof(uint64_t))
        if self._ends is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._ends)

    def record_changes(self, dict changed):
        """Record the effects of a change that the engine has applied."""
        cdef const uint8_t *at
        cdef uint64_t inode, end
        cdef int byte
        for key in changed:
            if PyBytes_GET_SIZE(<bytes?>key) < 9:
                continue
            at = <const uint8_t *>PyBytes_AS_STRING(key)
            if at[0] != c"c" and at[0] != c"i":
                continue
            inode = 0
            for byte in range(1, 9):
                inode = inode << 8 | at[byte]
            end = self._ends[inode >> COUNTER_BITS]
            if end and inode >= end:
                self._since.add(inode)
        if len(self._since) > SINCE_MAX:
            self._forget()

    cdef int _forget(self) except -1:
        """Replace the recorded inodes by a higher end for each partition."""
        cdef uint64_t inode
        for inode in self._since:
            if inode >= self._ends[inode >> COUNTER_BITS]:
                self._ends[inode >> COUNTER_BITS] = inode + 1 if inode < NEVER else NEVER
        self._since.clear()
        return 0

    cdef bint has(self, uint64_t inode) except -1:
        """Whether the index certainly has nothing of the inode."""
        cdef uint64_t end = self._ends[inode >> COUNTER_BITS]
        if not end:
            end = self._ends[inode >> COUNTER_BITS] = self._looked_up(inode >> COUNTER_BITS)
        return end <= inode < NEVER and inode not in self._since

    cdef uint64_t _looked_up(self, uint64_t partition) except? 0:
        cdef uint64_t highest = 0
        cdef uint8_t kind
        cdef bytes end, key
        for kind in (c"c", c"i"):
            end = numbered(kind, partition + 1 << COUNTER_BITS) if partition + 1 < PARTITIONS else bytes((kind + 1,))
            try:
                found = self._kv.scan_back(numbered(kind, partition << COUNTER_BITS), end, 1)
                # A damaged key is sorted at the end of the search range and becomes visible beside a record
                # that does not exist. In this case, and if that record does exist, nothing is certain.
                if self._kv.get(end) is not None:
                    return NEVER
            except NvpoolError:
                return NEVER
            if found:
                key = found[0][0]
                highest = max(highest, <uint64_t>int.from_bytes(key[1:9], "big"))
        return highest + 1 if highest < NEVER else NEVER

    def __contains__(self, uint64_t inode):
        return self.has(inode)


cdef struct Request:
    uint64_t inode, cut, sequence, session, version
    uint32_t number, index, offset, length, slot, table, checksum
    const uint8_t *payload


cdef bytes segment_key(Request *r):
    """Return index_records.segment_key of the chunk's first segment."""
    cdef uint8_t key[14]
    cdef int byte
    key[0] = c"c"
    put64_big(key + 1, r.inode)
    for byte in range(4):
        key[9 + byte] = <uint8_t>(r.index >> 24 - 8 * byte)
    key[13] = 0
    return PyBytes_FromStringAndSize(<const char *>key, 14 if r.index else 9)


cdef bytes small_record(Request *r, uint64_t place):
    """Return index_records.encode_segment of a chunk with its one block at `place`."""
    cdef uint8_t record[RECORD_MAX]
    cdef uint8_t *at
    record[0] = <uint8_t>(2 | r.table - 1 << 4)
    record[1] = 1 | 128
    at = put_varint(record + 2, r.version >> 32)
    at = put_varint(at, r.version & 0xFFFFFFFF)
    at = put_varint(at, r.cut)
    at = put_varint(at, place)
    put64(at, r.session)
    at = put_varint(at + 8, r.slot)
    at = put_varint(at, r.sequence)
    put32(at, r.checksum)
    return PyBytes_FromStringAndSize(<const char *>record, at + 4 - record)


cdef bytes delta_record(array.array deltas, Py_ssize_t count, bint is_longer, uint64_t place, Py_ssize_t used):
    """Return allocator.encode_deltas of the first `count` deltas.

    With `is_longer` the list also has the newly taken block.
    """
    cdef bytes record = PyBytes_FromStringAndSize(NULL, 4 + 4 * (count + is_longer))
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(record)
    cdef Py_ssize_t number
    at[0], at[1] = 1, <uint8_t>(count + is_longer)
    put16(at + 2, <uint16_t>used)
    for number in range(count):
        put32(at + 4 + 4 * number, deltas.data.as_uints[number])
    if is_longer:
        put32(at + 4 + 4 * count, place & (1 << GROUP_BITS) - 1)
    return record


cdef class FastFirstWrites:
    cdef object _store, _index, _kv, _allocator, _quarantine, _location_leases, _device, _replica, _serving_lease, _clock, _signing
    cdef readonly UnknownInodes unknown
    cdef dict _grants
    cdef uint8_t _target
    cdef int _fd
    cdef bint _is_system
    cdef uint8_t[BLOCK] _block

    def __init__(self, target, grants, secret, store, replica, serving_lease, clock):
        """Create the fast path; see fast_first_writes.py."""
        self._target, self._grants, self._store, self._replica = target, grants, store, replica
        self._serving_lease = serving_lease
        self._index, self._kv, self._allocator, self._quarantine = store.index, store.kv, store.allocator, store.quarantine
        self._location_leases, self._device, self._fd = store.location_leases, store.device, store.device.fd
        self._clock, self._is_system = clock, type(clock) is SystemClock
        self._signing = blake2b(key=secret, digest_size=MAC_BYTES)
        self.unknown = UnknownInodes(store.kv)
        store.kv.on_apply = self.unknown.record_changes

    cdef double _now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    def answer(self, bytearray buffer, Py_ssize_t begin, Py_ssize_t end, uint64_t epoch, dict in_work, reply_stats, list out):
        """Answer the frame at `begin` of the buffer, which has `end` valid bytes.

        `epoch` is that of the served map. Appends the reply to `out` and returns the number of bytes that the
        frame took. 0: the frame takes the slow path, and nothing has happened.
        """
        cdef Request r
        cdef double since_s = self._now_s()
        if begin < 0 or end > PyByteArray_GET_SIZE(buffer) or end - begin < FRAME_BYTES or not epoch:
            return 0
        if not self._taken(<const uint8_t *>PyByteArray_AS_STRING(buffer) + begin, end - begin, epoch, &r):
            return 0
        if in_work and r.number in in_work or not self._is_plain(&r):
            return 0
        cdef object name = (r.inode, r.index), group_number, group, used, held, bit
        if (not self.unknown.has(r.inode) or name in <dict?>self._index.young or name in <dict?>self._index.old
                or self._quarantine.chunks and name in self._quarantine.chunks):
            return 0
        if crc_of(r.payload, r.length) != r.checksum:
            return 0
        # Like Allocator.allocate. A free block found here stays free until the change, since nothing waits
        # before it.
        allocator = self._allocator
        group_number = allocator.small_group
        cdef array.array spare = allocator.spare
        group = (<dict?>allocator.cached_groups).get(group_number)
        if (group is None or allocator.available_blocks < 1 or not spare.data.as_ushorts[<Py_ssize_t>group_number]
                or allocator.used_blocks + 1 > allocator.block_count - allocator.reserve_blocks):
            return 0
        used, held = group.used, (<dict?>allocator.held_masks).get(group_number)
        bit = used if held is None else used | held
        bit = ~bit & bit + 1
        cdef Py_ssize_t within = <Py_ssize_t>bit.bit_length() - 1
        if within >> GROUP_BITS:
            return 0
        cdef uint64_t place = <uint64_t>group_number << GROUP_BITS | <uint64_t>within
        cdef const uint8_t *content = r.payload
        if r.length < BLOCK:
            memset(self._block, 0, BLOCK)
            memcpy(self._block + r.offset, r.payload, r.length)
            content = self._block
            r.checksum = crc_of(content, BLOCK)
        if pwrite(self._fd, content, BLOCK, <long long>(place << 12)) != BLOCK:
            return 0  # the slow path writes there again, or reports the error
        reply_stats.begun += 1
        cdef int status = 0, code = 0
        cdef bytes text
        try:
            self._name(&r, name, group_number, group, used, bit, place)
        except NvpoolError as error:
            status = error.wire_code
        except Exception as error:  # a bug, reported like the slow path reports it
            code, text = encode_error(error)
            out.append(pack_head(REPLY, code, r.number, 0, text, 0))
        if not code:
            out.append(self._reply(&r, epoch, status))
        self._count(reply_stats, r.length, self._now_s() - since_s, code)
        return FRAME_BYTES + r.length

    cdef bint _taken(self, const uint8_t *at, Py_ssize_t count, uint64_t epoch, Request *r) except -1:
        """Whether the frame is one permitted write to the first block of a chunk.

        The frame must be complete. Fills in `r`.
        """
        cdef const uint8_t *message = at + HEADER_BYTES
        cdef const uint8_t *entry = message + ENTRY_AT
        cdef const uint8_t *grant = message + 13
        if (get16(at + 4) != method_of_writes or not get32(at + 12) or get32(at + 16) != MESSAGE_BYTES
                or not is_head(at, REQUEST)):
            return False
        r.number, r.length = get32(at + 8), get32(at + 20)
        if not 0 < r.length <= BLOCK or count < FRAME_BYTES + <Py_ssize_t>r.length \
                or crc_of(message, MESSAGE_BYTES) != get32(at + 24):
            return False
        # The message has the layout of read_write_codec.encode_write_request.
        if (message[0] != 0x09 or get64(message + 1) != epoch or message[9] != 0x10 or message[10] != self._target
                or message[11] != 0x1A or message[12] != GRANT_BYTES or message[73] != 0x22 or message[74] != 40
                or message[115] != 0x2A or message[116] != 4 or message[121] != 0x31 or message[130] != 0x38):
            return False
        r.inode, r.cut, r.sequence = get64(entry), get64(entry + 8), get64(entry + 16)
        r.index, r.offset = get32(entry + 24), get32(entry + 28)
        r.checksum, r.session, r.slot = get32(message + 117), get64(message + 122), message[131]
        r.payload = message + MESSAGE_BYTES
        if get32(entry + 32) != r.length or entry[36] or entry[37] or r.offset + <uint64_t>r.length > BLOCK or not r.session \
                or not 0 < r.slot < 128:
            return False
        # The grant is checked like in grants.verify and single_write. A new grant is not cached, since its
        # file is then already written.
        cdef uint64_t now_ms = (wall_ns() if self._is_system else <long long>self._clock.wall_ns()) // 1_000_000
        r.table = grant[36] if grant[36] else 1
        return (grant[0] == 1 and grant[1] & may_write and not grant[1] & special and get64(grant + 12) == r.inode
                and get64(grant + 4) == r.session and r.cut <= get64(grant + 20) and r.table <= table_max
                and (now_ms <= skew_ms or get64(grant + 28) >= now_ms - skew_ms) and self._is_signed(grant))

    cdef bint _is_signed(self, const uint8_t *grant) except -1:
        if PyDict_GetItem(self._grants, PyBytes_FromStringAndSize(<const char *>grant, GRANT_BYTES)) is not NULL:
            return True
        state = self._signing.copy()
        state.update(PyBytes_FromStringAndSize(<const char *>grant, GRANT_BODY))
        cdef bytes mac = state.digest()
        cdef const uint8_t *right = <const uint8_t *>PyBytes_AS_STRING(mac)
        cdef uint8_t other = 0
        for byte in range(MAC_BYTES):  # compares all bytes, whatever the first one is (constant time)
            other |= right[byte] ^ grant[GRANT_BODY + byte]
        return not other

    cdef bint _is_plain(self, Request *r) except -1:
        """Whether the store accepts the write and no other target takes part; if so, set its version."""
        cdef uint64_t chain_epoch = 1
        store, kv, replica = self._store, self._kv, self._replica
        if (store.fenced_because or store.closed or kv.frozen is not None and kv.full or replica.shares or replica.pending
                or self._serving_lease.shared or 0 < <Py_ssize_t>self._device.direct_write_bytes <= r.length):
            return False
        epochs = replica.chain_epochs
        if epochs is not None:
            epochs = (<dict?>epochs).get(r.table) or (<dict>epochs)[0]
            if <uint64_t>len(<list?>epochs) != chain_count:
                return False
            chain_epoch = (<list>epochs)[chunk_hash(r.inode, r.index) % chain_count]
        r.version = chain_epoch << 32 | 1
        return chain_epoch and not chain_epoch >> 32

    cdef int _name(self, Request *r, tuple name, group_number, group, used, bit, uint64_t place) except -1:
        """Apply the one change that names the block, and update the state in memory.

        If the engine refuses the change, only counters have changed.
        """
        cdef object store = self._store, index = self._index, allocator = self._allocator, location_leases = self._location_leases
        cdef object device = self._device, table
        cdef uint64_t offset = place << 12
        used = used | bit
        store.written_bytes += BLOCK
        device.note_run(offset, offset + BLOCK)
        cdef bytes key = segment_key(r), delta = numbered_group(c"d", group_number)
        cdef array.array deltas = group.deltas
        cdef Py_ssize_t count = len(deltas)
        cdef bint is_folded = count >= deltas_max
        cdef list effects = [(key, small_record(r, place))]
        if is_folded:
            effects.append((numbered_group(c"g", group_number), encode_bitmap(used)))
        effects.append((delta, delta_record(deltas, 0 if is_folded else count, not is_folded, place, used.bit_count())))
        # Before the change: a client that reads the old locations from now on asks again for the locations.
        cdef uint64_t slot
        if location_leases.life_s:
            slot = (r.inode * <uint64_t>0x9E3779B97F4A7C15 + r.index * <uint64_t>0xC2B2AE3D27D4EB4F) >> 64 - SLOT_BITS
            table = location_leases.stamps
            table[slot] = <uint32_t>(<uint32_t>table[slot] + 1)
        self._kv.apply(effects)
        # Like Allocator.commit.
        group.used = used
        if is_folded:
            group.deltas = array.copy(no_deltas)
        else:
            deltas.append(place & (1 << GROUP_BITS) - 1)
        allocator.used_blocks += 1
        allocator.available_blocks -= 1
        cdef array.array spare = allocator.spare
        spare.data.as_ushorts[<Py_ssize_t>group_number] -= 1
        if spare.data.as_ushorts[<Py_ssize_t>group_number] < roomy_blocks:
            allocator.count_spare(group_number, 0)
        if allocator.changed_groups is not None:
            allocator.changed_groups[group_number] = allocator.changed_groups.get(group_number, 0) | bit
        # Like Index.chunk and BlockChunkStore.apply_segments.
        cdef array.array disk = array.clone(no_places, 1, False)
        disk.data.as_ulonglongs[0] = place
        segment = new_segment(IndexSegment)
        segment.disk, segment.base = disk, place
        cdef uint8_t[4] sums
        put32(sums, r.checksum)
        segment.crcs = PyBytes_FromStringAndSize(<const char *>sums, 4)
        chunk = new_chunk(Chunk)
        chunk.inode, chunk.index, chunk.version, chunk.cut = name[0], name[1], r.version, r.cut
        chunk.requests, chunk.table, chunk.segments = ((r.session, r.slot, r.sequence),), r.table, [segment]
        if index.weight >= index.generation_max:
            index.old, index.young, index.weight = index.young, {}, 0
        index.weight += 1
        index.young[name] = chunk
        store.was_written()
        return 0

    cdef bytes _reply(self, Request *r, uint64_t epoch, int status):
        """Return the reply frame with read_write_codec.encode_write_reply of one result."""
        cdef bytes frame = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + REPLY_BYTES)
        cdef uint8_t *to = <uint8_t *>PyBytes_AS_STRING(frame)
        cdef uint8_t *said = to + HEADER_BYTES
        memset(to, 0, HEADER_BYTES + REPLY_BYTES)
        said[0] = 0x09
        put64(said + 1, epoch)
        said[9], said[10] = 0x12, 16
        put16(said + 11, <uint16_t>status)
        put64(said + 19, 0 if status else r.version)
        put_head(to, REPLY, 0, r.number, 0, REPLY_BYTES, 0, crc_of(said, REPLY_BYTES))
        return frame

    cdef int _count(self, reply_stats, Py_ssize_t length, double took_s, int code) except -1:
        cdef object times, counts, method_stats = reply_stats.by_method.get(method_key)
        if method_stats is None or code:
            reply_stats.answered(method_key, took_s, code, length, 0)
            return 0
        reply_stats.ended += 1
        times = method_stats.times
        counts = times.counts
        counts[slot_of(took_s)] += 1
        times.sum_s += took_s
        method_stats.bytes_in += length
        return 0
