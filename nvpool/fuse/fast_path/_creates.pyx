# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled file creation, from the kernel's request to the shard's frame, and back.

creates.py has the contract.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy, memset
from posix.unistd cimport write

import os

from nvpool.core.clock import SystemClock, stopwatch_s
from nvpool.core.ids import COUNTER_BITS, PARTITION_COUNT
from nvpool.shm.mount_records cimport HandleRecords, SlotRecords
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.client.state import metadata_cache as cache_module
from nvpool.client.rpc.change_fast_path import SentChange
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.leases import NEVER_S, WATCH_SHARE, InodeLease
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.fuse.ops.handles import FREE_MIN
from nvpool.fuse.ops.kernel_cache.names import NAMED_TOGETHER, SENT_CHANGES_MAX
from nvpool.fuse.ops.kernel_cache.pages import HAS_XATTRS, SEEN_MAX
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import RESENT, Op, Opening
from nvpool.rpc.transports._head cimport HEADER_BYTES, REQUEST, put_head
from nvpool.rpc.reply_receivers cimport ReplyBurst, ReplyReceiver, register
from nvpool.rpc.messages.direntries import change_of
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transports.stream import StreamConnection
from nvpool.rpc.v1.meta_pb2 import Attr
from nvpool.rpc.v1.wire_pb2 import META_CREATE

cdef extern from "_clock.h":
    double boottime_s() nogil
    long long wall_ns() nogil

cdef extern from "_fields.h":
    uint8_t *put_number(uint8_t *at, uint8_t tag, uint64_t value) nogil
    uint8_t *put_fixed(uint8_t *at, uint8_t tag, uint64_t value) nogil
    const uint8_t *take_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    uint64_t get64(const uint8_t *at) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

crc_begin(0)

cdef enum:
    REQUEST_BYTES = 56          # of CREATE before the name: requests._CREATE_WHOLE
    ANSWER_BYTES = 160          # replies._CREATE_OUT
    FRAME_MAX = 400             # a name of 255 bytes, and some numbers
    NAME_MAX = 255
    GRANT_BYTES = 60
    BURST = 64                  # frames that wait for the end of a burst
    TURN = 16                   # replies sent before new requests are taken
    S_IFMT = 0o170000
    S_IFREG = 0o100000
    READ_RIGHT = 1

cdef uint32_t ACCESS = os.O_ACCMODE, EXCLUSIVE = os.O_EXCL, TRUNCATE = os.O_TRUNC, APPEND = os.O_APPEND
cdef uint32_t DIRECT = os.O_DIRECT
cdef uint32_t WRITES_ONLY = os.O_WRONLY, READS_AND_WRITES = os.O_RDWR

cdef uint64_t FIRST = RESENT - 1
cdef int64_t SECOND_NS = 1_000_000_000
cdef uint32_t opcode_of_creates = Op.CREATE
cdef object opcode_key = int(Op.CREATE), method_key = int(META_CREATE)
cdef uint16_t method_of_creates = META_CREATE
cdef uint32_t block_bytes = replies.BLOCK_BYTES
cdef uint32_t DIRECT_IO = Opening.DIRECT_IO.value, KEEP_CACHE = Opening.KEEP_CACHE.value, NOFLUSH = Opening.NOFLUSH.value
cdef uint32_t has_xattrs = HAS_XATTRS
cdef Py_ssize_t slots_max = SLOTS_PER_SESSION
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX, renamed_max = cache_module._RENAMED_MAX
cdef Py_ssize_t sent_changes_max = SENT_CHANGES_MAX, seen_max = SEEN_MAX
cdef Py_ssize_t named_together = NAMED_TOGETHER, handles_free_min = FREE_MIN
cdef int counter_bits = COUNTER_BITS
cdef double watch_share = WATCH_SHARE
cdef object attr_from = Attr.FromString

assert PARTITION_COUNT == 1 << 63 - COUNTER_BITS


# -- messages --------------------------------------------------------------------------------------------------------------

cdef struct CreateFields:
    uint64_t session, sequence, epoch, parent
    uint32_t slot, uid, gid, mode, rights, masked
    bint exclusive, truncate
    const uint8_t *name
    uint32_t name_bytes


cdef Py_ssize_t pack_request(uint8_t *message, const CreateFields *create) noexcept nogil:
    """Encode a CreateRequest as protobuf does; returns its length. The shard decodes it in one step."""
    cdef uint8_t *at = message + 2
    at = put_fixed(at, 0x09, create.session)
    at = put_number(at, 0x10, create.slot)
    at = put_number(at, 0x18, create.sequence)
    at = put_fixed(at, 0x21, create.epoch)
    at = put_number(at, 0x28, create.uid)
    at = put_number(at, 0x30, create.gid)
    message[0], message[1] = 0x0A, <uint8_t>(at - message - 2)
    at = put_fixed(at, 0x11, create.parent)
    at = put_number(at, 0x1A, create.name_bytes)
    memcpy(at, create.name, create.name_bytes)
    at = put_number(at + create.name_bytes, 0x20, create.mode)
    at = put_number(at, 0x38, 1)
    at = put_number(at, 0x40, create.rights)
    at = put_number(at, 0x48, create.exclusive)
    at = put_number(at, 0x58, create.truncate)
    at = put_number(at, 0x70, create.masked)
    return at - message


cdef struct Shown:
    uint64_t inode, size, blocks, cut, change, parent, punches, volume
    uint64_t atime, mtime, ctime
    uint64_t mode, links, uid, gid, rdev, table, chunk_bits, flags
    const uint8_t *begin
    Py_ssize_t length


cdef struct Born:
    Shown file, parent
    const uint8_t *grant
    uint64_t lease_ms
    bint created


cdef bint take_attr(const uint8_t *at, const uint8_t *end, Shown *a) noexcept nogil:
    """Decode an Attr. False: a field that Attr does not have, or a value out of range."""
    cdef uint64_t tag
    cdef uint64_t *place
    a.begin, a.length = at, end - at
    while at < end:
        at = take_varint(at, end, &tag)
        if at is NULL:
            return False
        if tag == 0x09: place = &a.inode
        elif tag == 0x10: place = &a.mode
        elif tag == 0x18: place = &a.links
        elif tag == 0x20: place = &a.uid
        elif tag == 0x28: place = &a.gid
        elif tag == 0x30: place = &a.size
        elif tag == 0x38: place = &a.blocks
        elif tag == 0x41: place = &a.atime
        elif tag == 0x49: place = &a.mtime
        elif tag == 0x51: place = &a.ctime
        elif tag == 0x58: place = &a.rdev
        elif tag == 0x60: place = &a.table
        elif tag == 0x68: place = &a.chunk_bits
        elif tag == 0x70: place = &a.cut
        elif tag == 0x78: place = &a.flags
        elif tag == 0x80: place = &a.change
        elif tag == 0x89: place = &a.parent
        elif tag == 0x90: place = &a.punches
        elif tag == 0x99: place = &a.volume
        else: return False
        if tag & 7:
            if end - at < 8:
                return False
            place[0] = get64(at)
            at += 8
        else:
            at = take_varint(at, end, place)
            if at is NULL:
                return False
    return (a.inode and a.change and not (a.mode | a.links | a.uid | a.gid | a.rdev | a.table | a.chunk_bits | a.flags) >> 32
            and not (a.atime | a.mtime | a.ctime | a.inode | a.size | a.blocks | a.change | a.cut | a.punches) >> 63)


cdef bint take_entry(const uint8_t *at, const uint8_t *end, Born *b) noexcept nogil:
    cdef uint64_t tag, length
    while at < end:
        at = take_varint(at, end, &tag)
        if at is NULL:
            return False
        at = take_varint(at, end, &length)
        if at is NULL:
            return False
        if tag == 0x18:
            b.lease_ms = length
            continue
        if length > <uint64_t>(end - at):
            return False
        if tag == 0x0A and b.file.begin is NULL:
            if not take_attr(at, at + length, &b.file):
                return False
        elif tag == 0x12 and length == GRANT_BYTES and at[0] == 1:
            b.grant = at
        else:
            return False
        at += length
    return True


cdef bint take_reply(const uint8_t *at, Py_ssize_t count, Born *b) noexcept nogil:
    """Decode a CreateReply. True: it describes a new file with all its data, and nothing else.

    The file must be in its directory's own shard and outside of volumes.
    """
    cdef const uint8_t *end = at + count
    cdef uint64_t tag, length
    memset(b, 0, sizeof(Born))
    while at < end:
        at = take_varint(at, end, &tag)
        if at is NULL:
            return False
        at = take_varint(at, end, &length)
        if at is NULL:
            return False
        if tag == 0x10:
            if length != 1:
                return False
            b.created = True
            continue
        if length > <uint64_t>(end - at):
            return False
        if tag == 0x0A:
            if not take_entry(at, at + length, b):
                return False
        elif tag == 0x1A and b.parent.begin is NULL:
            if not take_attr(at, at + length, &b.parent):
                return False
        else:
            return False
        at += length
    return (b.created and b.file.begin is not NULL and b.parent.begin is not NULL and b.grant is not NULL
            and b.lease_ms and not b.lease_ms >> 32 and b.file.mode & S_IFMT == S_IFREG and not b.file.volume and not b.parent.volume
            and not b.file.size and b.file.chunk_bits < 64)


cdef void pack_answer(uint8_t *at, uint64_t unique, const Shown *a, const uint64_t *seconds, const uint32_t *nanoseconds,
                      uint64_t handle, uint32_t flags) noexcept nogil:
    """Compiled `replies.created`."""
    cdef uint32_t *words = <uint32_t *>at
    cdef uint64_t *wide = <uint64_t *>at
    memset(at, 0, ANSWER_BYTES)
    words[0], wide[1] = ANSWER_BYTES, unique
    wide[2] = a.inode
    wide[4], wide[5] = seconds[0], seconds[1]
    words[12], words[13] = nanoseconds[0], nanoseconds[1]
    wide[7], wide[8], wide[9] = a.inode, a.size, a.blocks
    wide[10], wide[11], wide[12] = a.atime // SECOND_NS, a.mtime // SECOND_NS, a.ctime // SECOND_NS
    words[26], words[27] = <uint32_t>(a.atime % SECOND_NS), <uint32_t>(a.mtime % SECOND_NS)
    words[28], words[29] = <uint32_t>(a.ctime % SECOND_NS), <uint32_t>a.mode
    words[30], words[31], words[32], words[33] = <uint32_t>a.links, <uint32_t>a.uid, <uint32_t>a.gid, <uint32_t>a.rdev
    words[34] = block_bytes
    wide[18] = handle
    words[38] = flags


cdef int trim(dict known, count_max) except -1:
    for old in too_old(known, count_max):
        del known[old]
    return 0


# -- a pending file creation -----------------------------------------------------------------------------------------------

cdef class PendingCreate(ReplyReceiver):
    """A pending CREATE: an entry of the table of pending requests, and the receiver of the reply on the connection."""
    cdef Creates creates
    cdef object connection, state
    cdef bytes name, message
    cdef uint64_t parent, unique
    cdef uint32_t mode, flags, uid, gid, pid, umask, number
    cdef object slot, slot_sequence, generation
    cdef double since_s, sent_s, deadline_s
    cdef bint is_done

    def cancel(self):
        """Cancel: the caller dies, or the mount is gone. False: the request has ended already."""
        if self.is_done:
            return False
        return self.otherwise().cancel()

    cpdef ReplyBurst receive(self, bytes message):
        """Take the reply if it describes a new file; None: the slow path gets it."""
        if self.is_done:
            return None
        try:
            if not self.creates.take_made(self, <const uint8_t *>PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message)):
                return None
        except Exception as error:
            self.creates.broken(self, error)
        return self.creates

    def __call__(self, reply, error):
        """Handle a reply that was not taken from the buffer, or an error."""
        if self.is_done:
            return
        if error is None and self.receive(bytes(reply.message)) is not None:
            self.creates.path.some_ended()
            return
        self.otherwise().begun.answered(reply, error)

    cdef object otherwise(self):
        """Continue on the slow path, as if the request had been started there."""
        self.is_done = True
        return self.creates.path.create_otherwise(
            self.unique, self.parent, self.name, self.mode, self.flags, Caller(self.uid, self.gid, self.pid, self.umask),
            SentChange(self.message, self.sent_s, self.deadline_s, self.connection, self.number, self.state, self.slot,
                 self.slot_sequence, self.generation))


cdef class CreateConnection:
    """A connection, and the frames for it that wait for the end of a burst."""
    cdef object connection
    cdef Py_ssize_t count, filled
    cdef uint8_t[BURST * FRAME_MAX] frames

    cdef int send(self) except -1:
        cdef Py_ssize_t filled = self.filled
        if filled:
            self.count = self.filled = 0
            transport = self.connection.frames.transport
            if not transport.is_closing():
                transport.write(PyBytes_FromStringAndSize(<const char *>self.frames, filled))
        return 0


cdef class Creates(ReplyBurst):
    """Compiled part of CreateFastPath; see creates.py.

    `path.requests` has the request in its buffer, and the table of pending ones.
    """
    cdef readonly object path, requests
    cdef readonly uint64_t made     # files
    cdef object ops, cached_names, pages, bypass, changes, vfs, meta, view, dialer, cache, leases, handles, published, known_map, _clock
    cdef object partition_shards, writer
    cdef dict shards, files, work, held, early, opened, attrs, entries, renamed, complete_dirs, leases_by_inode, seen, ways, endpoints
    cdef dict appending, barred, counters, sent_changes
    cdef bytearray buffer
    cdef list waiting
    cdef HandleRecords handle_records
    cdef SlotRecords slot_records
    cdef uint64_t epoch
    cdef int fd
    cdef bint is_system, is_single, writeback, names_count
    cdef double patience_s
    cdef Py_ssize_t in_work_max, cached_max
    cdef uint64_t[2] keep_s
    cdef uint32_t[2] keep_ns

    def __init__(self, path, ops, vfs, Py_ssize_t in_work_max):
        memory, meta, cache = ops.kept, vfs.meta, vfs.cache
        requests = path.requests
        self.path, self.requests = path, requests
        self.ops, self.vfs, self.meta, self.in_work_max = ops, vfs, meta, in_work_max
        self.cached_names, self.pages, self.bypass, self.changes = ops.cached_names, ops.cached_pages, ops.bypass, ops.changes
        self.fd, self.buffer, self.work = requests.fd, requests.buffer, requests.work
        self.view, self.dialer, self.shards = meta.view, meta.dialer, meta.shards
        self.counters, self.held, self.early = meta.counters, meta.once.held, meta.once.early
        self.cache, self.opened, self.attrs, self.entries = cache, cache.open, cache.attrs, cache.entries
        self.renamed, self.complete_dirs, self.cached_max = cache.renamed_s, cache.complete_dirs, cache.options.cached_entries
        self.leases, self.leases_by_inode, self.writer = vfs.leases, vfs.leases.by_inode, vfs.writer
        self.handles, self.published, self.barred = ops.handles, ops.published, ops.published.barred
        self.files, self.appending, self.sent_changes, self.seen = ops.files.by_handle, ops.files.appending, ops.cached_names.sent_changes, ops.cached_pages.seen
        self._clock = meta.clock
        self.is_system = type(meta.clock) is SystemClock
        self.patience_s = meta.options.deadline_s
        self.writeback, self.names_count = ops.options.writeback, bool(ops.options.entry_timeout_s)
        self.turn = TURN
        self.keep_s[0], self.keep_ns[0] = requests.keep_entry
        self.keep_s[1], self.keep_ns[1] = requests.keep_attr
        self.ways, self.endpoints, self.waiting = {}, {}, []
        self.handle_records, self.slot_records = memory.handle_records, memory.slot_records

    cdef double now_s(self) except -1:
        return boottime_s() if self.is_system else self._clock.boottime_s()

    # -- from the kernel to the shard

    def begin(self, Py_ssize_t count):
        """Start the CREATE of `count` bytes in the buffer.

        True: the request is in the table of pending requests. False: nothing has happened.
        """
        cdef const uint8_t *at = <const uint8_t *>PyByteArray_AS_STRING(self.buffer)
        cdef CreateFields create
        cdef uint64_t unique
        cdef uint32_t flags, mode, pid, umask
        cdef PyObject *found
        if count < REQUEST_BYTES + 2 or count > REQUEST_BYTES + NAME_MAX + 1 or count > PyByteArray_GET_SIZE(self.buffer):
            return False
        memcpy(&unique, at + 8, 8)
        memcpy(&create.parent, at + 16, 8)
        memcpy(&create.uid, at + 24, 4)
        memcpy(&create.gid, at + 28, 4)
        memcpy(&pid, at + 32, 4)
        memcpy(&flags, at + 40, 4)
        memcpy(&mode, at + 44, 4)
        memcpy(&umask, at + 48, 4)
        create.name, create.name_bytes = at + REQUEST_BYTES, <uint32_t>(count - REQUEST_BYTES - 1)
        if (get32(at) != count or get32(at + 4) != opcode_of_creates or not unique or unique > FIRST or get16(at + 36)
                or create.name[create.name_bytes] or memchr(create.name, 0, create.name_bytes) is not NULL
                or memchr(create.name, 47, create.name_bytes) is not NULL
                or create.name[0] == 46 and (create.name_bytes == 1 or create.name_bytes == 2 and create.name[1] == 46)):
            return False
        if flags & ACCESS == ACCESS or create.parent >> 63:
            return False
        if self.writeback:  # as FuseOptions.flags_below
            flags &= ~APPEND
            if flags & ACCESS == WRITES_ONLY:
                flags ^= WRITES_ONLY | READS_AND_WRITES
        requests = self.requests
        if requests.forwarded or requests.stopped or requests.leaving or len(self.work) + 1 >= self.in_work_max:
            return False
        create.rights = 3 if flags & ACCESS else READ_RIGHT
        create.exclusive, create.truncate = (flags & EXCLUSIVE) != 0, (flags & TRUNCATE) != 0
        # The shard, its session and its connection.
        pool_map = self.view.map
        if pool_map is not self.known_map:
            self.use_map(pool_map)
        found = PyDict_GetItem(self.shards, (<tuple>self.partition_shards)[<Py_ssize_t>(create.parent >> counter_bits)])
        if found is NULL:
            return False
        state = <object>found
        session, slots = state.session, state.slots
        if (not session or not slots or state.waiting or self.meta.closed or state.record < 0
                or state.slot_count > slots_max):
            return False
        found = PyDict_GetItem(self.endpoints, state.shard)
        if found is NULL:
            return False
        found = PyDict_GetItem(self.dialer.by_endpoints, <object>found)
        if found is NULL:
            return False
        connection = <object>found
        if (connection is not state.met or connection.closed or not isinstance(connection, StreamConnection)
                or connection.upgraded):
            return False
        cdef dict in_flight = connection.in_flight
        if not connection.writable or connection.waiting or len(in_flight) >= in_flight_max:
            return False
        unique_key = unique
        if unique_key in self.held or unique_key in self.early:
            return False
        if not self.handle_records.has_room(handles_free_min):
            return False
        cdef bytes name = PyBytes_FromStringAndSize(<const char *>create.name, create.name_bytes)
        parent_key = create.parent
        if not self.is_single and not self.vfs.stripes.is_together(parent_key):
            return False
        if create.truncate and not create.exclusive and self.writer.busy and self.vfs.may_be_written(parent_key, name):
            return False
        cdef double now_s = self.now_s(), deadline_s = now_s + self.patience_s
        cdef double left = self.patience_s * 1000
        cdef uint32_t left_ms = <uint32_t>min(left, <double>0xFFFFFFFF)
        if not left_ms:
            return False
        cdef CreateConnection way = self.way_of(connection)
        if way.count == BURST:
            way.send()
        # The request starts here: the rest cannot fail.
        slot, sequence = slots.popleft()
        create.session, create.slot, create.sequence, create.epoch = session, slot, <uint64_t>sequence + 1, self.epoch
        create.masked = mode & umask & 0o777  # as Caller.masked
        create.mode = S_IFREG | mode & 0o7777 ^ create.masked
        cdef PendingCreate one = PendingCreate.__new__(PendingCreate)
        one.creates, one.connection, one.state, one.name = self, connection, state, name
        one.parent, one.unique = create.parent, unique
        one.mode, one.flags, one.uid, one.gid, one.pid, one.umask = mode, flags, create.uid, create.gid, pid, umask
        one.slot, one.slot_sequence, one.generation = slot, create.sequence, state.generation
        one.since_s, one.sent_s, one.deadline_s, one.is_done = requests.since_s, now_s, deadline_s, False
        self.counters["changes"] += 1
        # Before the request is sent: a successor of this process sends it again under this name.
        self.slot_records.keep(state.record, create.slot, create.sequence, method_of_creates, unique)
        cdef uint8_t *frame = way.frames + way.filled
        cdef Py_ssize_t length = pack_request(frame + HEADER_BYTES, &create)
        one.message = PyBytes_FromStringAndSize(<const char *>frame + HEADER_BYTES, length)
        cdef uint32_t number = register(connection, in_flight, one, deadline_s, 0, method_key, now_s)
        one.number = number
        put_head(frame, REQUEST, method_of_creates, number, left_ms, <uint32_t>length, 0, crc_of(frame + HEADER_BYTES, length))
        if not way.count:
            self.waiting.append(way)
        way.count += 1
        way.filled += HEADER_BYTES + length
        self.entries.pop((parent_key, name), None)
        self.renamed_now(parent_key, now_s)
        self.work[unique_key] = one, pid, opcode_key, one.since_s
        requests.deferred += 1
        return True

    cdef int use_map(self, pool_map) except -1:
        self.known_map = None
        self.partition_shards, self.is_single = pool_map.shard_of_partition, len(pool_map.shards) == 1
        self.endpoints = {shard.id: shard.endpoints for shard in pool_map.shards}
        self.epoch = pool_map.epoch
        self.known_map = pool_map
        return 0

    cdef int renamed_now(self, parent, now) except -1:
        """Note a changed name in the directory, as `MetadataCache.forget_entry` does."""
        cdef dict renamed = self.renamed
        renamed.pop(parent, None)
        renamed[parent] = now
        if len(renamed) > renamed_max:
            for old in too_old(renamed, renamed_max):
                self.cache.renamed_floor_s = max(self.cache.renamed_floor_s, renamed.pop(old))
        return 0

    cdef CreateConnection way_of(self, connection):
        cdef PyObject *found = PyDict_GetItem(self.ways, connection)
        cdef CreateConnection way
        if found is not NULL:
            return <CreateConnection><object>found
        for known in list(self.ways):
            if known.closed:
                del self.ways[known]
        way = CreateConnection.__new__(CreateConnection)
        way.connection = connection
        self.ways[connection] = way
        return way

    def send(self):
        """Send the collected frames to the shards."""
        cdef list waiting = self.waiting
        if waiting:
            self.waiting = []
            for way in waiting:
                (<CreateConnection>way).send()

    # -- from the shard to the kernel

    cdef bint take_made(self, PendingCreate one, const uint8_t *message, Py_ssize_t count) except -1:
        """Handle a reply that describes a new file and nothing else: reply to the kernel, then update the
        caches.

        False: the reply is another one, and nothing has happened.
        """
        cdef Born born
        cdef uint8_t[ANSWER_BYTES] answer
        cdef uint64_t handle, serial
        cdef int code
        cdef uint32_t flags = one.flags, open_flags = 0
        cdef PyObject *found
        cdef bint reads_only = flags & ACCESS == 0
        if not take_reply(message, count, &born):
            return False
        cdef object requests = self.requests, state = one.state, inode = born.file.inode
        cdef object handles = self.handles
        if (inode in self.opened or state.generation != one.generation or born.parent.inode != one.parent
                or born.file.inode >> counter_bits != one.parent >> counter_bits):
            return False
        if self.view.map is not self.known_map:
            self.use_map(self.view.map)
        found = PyDict_GetItem(self.shards, (<tuple>self.partition_shards)[<Py_ssize_t>(one.parent >> counter_bits)])
        if found is NULL or <object>found is not state or one.parent in self.opened:
            return False
        found = PyDict_GetItem(self.work, one.unique)
        if found is NULL or (<tuple><object>found)[0] is not one:
            return False
        if not self.handle_records.has_room(0):
            return False
        one.is_done = True
        # The handle is recorded before the kernel gets it.
        serial = <uint64_t>handles.last + 1
        handles.last = serial
        handle = self.handle_records.keep(serial, born.file.inode, flags, one.uid, one.gid, one.pid, one.unique)
        if flags & APPEND and not reads_only:
            open_flags |= DIRECT_IO
        if self.writeback:
            open_flags |= KEEP_CACHE
        if reads_only:
            open_flags |= NOFLUSH
        pack_answer(answer, one.unique, &born.file, self.keep_s, self.keep_ns, handle, open_flags)
        self.changes.count += 1
        if write(self.fd, answer, ANSWER_BYTES) < 0:
            code = errno
            self.path.answer_refused(one.unique, code, ANSWER_BYTES)
        del self.work[one.unique]
        try:
            requests.spent.add(opcode_key, max(0.0, stopwatch_s() - one.since_s))
            if requests.interrupted:
                requests.interrupted.pop(one.unique, None)
            if self.held:
                self.ops.answered(one.unique)
            self.keep_books(one, &born, handle, inode)
        finally:
            # The request is answered, so its slot is free.
            self.slot_records.clear(state.record, one.slot)
            state.slots.append((one.slot, one.slot_sequence))
            if state.waiting:
                state.wake()
        self.made += 1
        return True

    cdef int keep_books(self, PendingCreate one, const Born *born, uint64_t handle, inode) except -1:
        """Update the caches, as Files._opened and _created and Creating.opened do."""
        cdef const Shown *file = &born.file
        cdef const Shown *directory = &born.parent
        cdef PyObject *found
        cdef double now_s = self.now_s(), until_s
        cdef object now = now_s, parent = one.parent, change = file.change, state = one.state, watch, lease = None
        cdef object names = self.cached_names, cache = self.cache, number = handle
        cdef bytes grant = PyBytes_FromStringAndSize(<const char *>born.grant, GRANT_BYTES)
        cdef bint reads_only = one.flags & ACCESS == 0
        cdef dict attrs = self.attrs
        cdef int64_t now_ms, ends_ms
        attr = attr_from(PyBytes_FromStringAndSize(<const char *>file.begin, file.length))
        opened = OpenInode(attr)
        self.opened[inode] = opened
        attrs.pop(inode, None)
        opened.handles = opened.opened = 1
        opened.attr_born_s = now
        if get64(born.grant + 20) >= file.cut:
            now_ms = wall_ns() // 1_000_000 if self.is_system else self._clock.wall_ns() // 1_000_000
            ends_ms = <int64_t>get64(born.grant + 28)
            opened.grant = grant
            opened.grant_session = get64(born.grant + 4)
            opened.grant_cut = get64(born.grant + 20)
            opened.grant_rights = born.grant[1]
            opened.grant_half_ms = now_ms + (ends_ms - now_ms >> 1)
        cdef dict registered = state.open
        found = PyDict_GetItem(registered, inode)
        registered[inode] = 1 if found is NULL else <object>found + 1
        if born.lease_ms:
            watch = state.watch
            if (inode in self.leases_by_inode or one.sent_s <= watch.floor_s
                    or watch.ended and one.sent_s <= watch.ended.get(inode, NEVER_S)):
                lease = self.leases.take(inode, born.lease_ms, one.sent_s, grant if born.grant[1] & READ_RIGHT else b"")
            else:
                until_s = one.sent_s + <double>born.lease_ms * watch_share / 1000
                self.leases.last_number += 1
                lease = tuple.__new__(InodeLease, (until_s, now, grant if born.grant[1] & READ_RIGHT else b"", watch,
                                              self.leases.last_number))
                self.leases_by_inode[inode] = lease
                if len(self.leases_by_inode) > self.leases.count_max:
                    trim(self.leases_by_inode, self.leases.count_max)
                if now_s >= until_s or now_s >= watch.until_s:
                    lease = None
                else:
                    watch.used = True
        opened_file = FileHandle(opened, one.flags)
        # The name and the directory.
        name = one.name
        self.renamed_now(parent, now)
        key = parent, name
        self.entries.pop(key, None)
        self.entries[key] = inode, now, one.sent_s, lease
        if len(self.entries) > self.cached_max:
            trim(self.entries, self.cached_max)
        shown = attr_from(PyBytes_FromStringAndSize(<const char *>directory.begin, directory.length))
        found = PyDict_GetItem(self.complete_dirs, parent)
        if found is not NULL:
            cache.named_in_whole(shown, parent, name, True)
        found = PyDict_GetItem(self.complete_dirs, parent)
        if found is not NULL and shown.change > (<object>found).change:
            cache.forget_whole(parent)
            found = NULL
        held = attrs.pop(parent, None)
        if held is not None:
            before = (<tuple?>held)[0]
            if (change_of(before) if type(before) is bytes else before.change) > shown.change:
                shown = before
        attrs[parent] = shown, now
        if len(attrs) > self.cached_max:
            trim(attrs, self.cached_max)
        if found is NULL:
            self.vfs.complete_dirs.made_in(parent, directory.size)
        # What the kernel was given.
        if self.names_count:
            naming = names.naming
            if now_s >= <double>names.naming_until_s or len(naming.names) >= named_together:
                names.start_group()
                naming = names.naming
            (<list?>naming.names).append((inode, parent, name, inode))
        self.sent_changes[inode] = change
        if len(self.sent_changes) > sent_changes_max:
            names.record_attr(attr)
        self.seen[inode] = change, not file.flags & has_xattrs
        if len(self.seen) > seen_max:
            self.pages.record_pages(attr)
        opened_file.number = number
        self.files[number] = opened_file
        if one.flags & DIRECT or one.flags & APPEND and not reads_only:  # as page_cache_bypass.bypasses
            self.bypass.opened(inode)
        if not reads_only:
            self.published.writing.add(number)
            found = PyDict_GetItem(self.barred, inode)
            self.barred[inode] = 1 if found is NULL else <object>found + 1
            if self.published.handles_of:
                self.published.take_back(inode)
            if one.flags & APPEND:
                self.appending[number] = Caller(one.uid, one.gid, one.pid)
        return 0

    cdef int go_on(self) except -1:
        """Take new requests after some replies, before the other replies are handled."""
        requests, path = self.requests, self.path
        path.some_ended()
        if self.work and requests.reading and not requests.taking:
            path.take_requests()
        return 0

    cdef int broken(self, PendingCreate one, error) except -1:
        """Report a bug to the caller that waits."""
        one.is_done = True
        self.meta.lost_sight()
        entry = self.work.get(one.unique)
        if entry is not None and entry[0] is one:
            try:
                self.path.create_failed(one.unique, error)
            finally:
                self.meta.give_back_answered(one.unique, one.state, one.slot, one.slot_sequence, one.generation)
        else:
            self.requests.loop.call_exception_handler({"message": "what was made is not in our books", "exception": error})
            self.path.some_ended()
        return 0

    def close(self):
        """Send what is collected. Replies that arrive later go to the slow path."""
        self.send()
        self.ways.clear()


# -- for tests: the codecs above, by themselves ----------------------------------------------------------------------------

def request_of(session, slot, sequence, epoch, uid, gid, parent, bytes name, mode, rights, exclusive, truncate, masked=0):
    cdef uint8_t[FRAME_MAX] message
    cdef CreateFields create
    create.session, create.slot, create.sequence, create.epoch = session, slot, sequence, epoch
    create.uid, create.gid, create.parent = uid, gid, parent
    create.name, create.name_bytes = <const uint8_t *>PyBytes_AS_STRING(name), <uint32_t>min(len(name), NAME_MAX)
    create.mode, create.rights, create.exclusive, create.truncate, create.masked = mode, rights, exclusive, truncate, masked
    return PyBytes_FromStringAndSize(<const char *>message, pack_request(message, &create))


def answer_of(bytes message, unique, keep_entry, keep_attr, handle, flags):
    """The reply to the kernel for a CreateReply; None: the fast path declines it."""
    cdef Born born
    cdef uint8_t[ANSWER_BYTES] answer
    cdef uint64_t[2] seconds
    cdef uint32_t[2] nanoseconds
    if not take_reply(<const uint8_t *>PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message), &born):
        return None
    seconds[0], nanoseconds[0] = keep_entry
    seconds[1], nanoseconds[1] = keep_attr
    pack_answer(answer, unique, &born.file, seconds, nanoseconds, handle, flags)
    return PyBytes_FromStringAndSize(<const char *>answer, ANSWER_BYTES)
