# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled fast path for the first write of a new file, from frame to frame, alone or in a chain.

`fast_first_writes.py` describes its conditions and guarantees.
"""

import asyncio
from hashlib import blake2b

from cpython cimport array
import array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from nvpool.core.clock import SystemClock
from nvpool.core.errors import CorruptFrame, NvpoolError, StaleTenure
from nvpool.core.ids import RequestId
from nvpool.core.grants import CLOCK_SKEW_S, ENCRYPTED, SERVICE, WRITE
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.store.disk.allocator import Transaction
from nvpool.store.disk.allocator cimport Allocator
from nvpool.store.chunks.api import Placed
from nvpool.store.chunks.index cimport Chunk, Index
from nvpool.store.disk.index_records import TABLE_MAX
from nvpool.store.disk.index_records cimport IndexSegment, encode_small, segment_key
from nvpool.store.replication.chain_writes import COMMITTED, LED_BYTES_MAX
from nvpool.store.replication.peer_connections import CALL_S, Write
from nvpool.store.disk.unknown_inodes cimport UnknownInodes
from nvpool.core.primitives cimport ByteReader
from nvpool.rpc.messages.peer_messages cimport PeerWriteReply, PeerWriteRequest
from nvpool.rpc.transports._frame cimport ReplyTaker
from nvpool.rpc.transports._head cimport HEADER_BYTES, REPLY, REQUEST, is_head, put_head
from nvpool.rpc.reply_receivers cimport ReplyBurst, register
from nvpool.rpc.transports.frame import EMPTY, pack_head
from nvpool.rpc.transports.stream import GATHER_IN_FLIGHT, StreamConnection
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE, DATA_WRITE

cdef extern from "_chunk_hash.h":
    uint64_t chunk_hash(uint64_t inode, uint32_t index) nogil

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    long long wall_ns() nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    uint64_t get64(const uint8_t *at) nogil
    void put16(uint8_t *at, uint16_t value) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

cdef extern from "unistd.h":
    ssize_t pwrite(int fd, const void *bytes, size_t count, long long offset) nogil

crc_begin(0)

cdef enum:
    MESSAGE_BYTES = 132  # read_write_codec._WRITE_REQUEST
    ENTRY_AT = 75  # offset of the only write in the message
    FRAME_BYTES = HEADER_BYTES + MESSAGE_BYTES
    REPLY_BYTES = 27  # read_write_codec._WRITE_REPLY
    PEER_MESSAGE_MAX = 256  # PeerWriteRequest with one checksum
    PEER_REPLY_BYTES = 18  # PeerWriteReply of a committed write
    BLOCK = 4096
    GRANT_BYTES = 60
    GRANT_BODY = 44
    MAC_BYTES = 16
    SLOT_BITS = 16  # see `location_leases`

cdef uint64_t skew_ms = int(CLOCK_SKEW_S * 1000)
cdef long may_write = WRITE, special = SERVICE | ENCRYPTED, service = SERVICE
cdef uint16_t method_of_writes = DATA_WRITE, method_of_peer_writes = DATA_PEER_WRITE
cdef object method_key = DATA_WRITE, peer_method_key = DATA_PEER_WRITE, zero = 0
cdef double offer_s = CALL_S
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX, gather_from = GATHER_IN_FLIGHT, led_bytes_max = LED_BYTES_MAX
cdef uint64_t chain_count = CHAINS_PER_TABLE
cdef uint32_t table_max = TABLE_MAX
cdef array.array no_places = array.array("Q")


cdef struct Request:
    uint64_t inode, cut, sequence, session, version
    uint64_t chain_epoch, link  # of an offer
    uint32_t number, index, offset, length, slot, table
    uint32_t sender  # of an offer; 0 in a client's request
    uint32_t sent_checksum, checksum  # of the bytes as they came, and of the whole block
    uint32_t deadline_ms, message_bytes
    const uint8_t *payload


# -- offers to the next member of a chain ----------------------------------------------------------------------------


cdef bint is_committed(const uint8_t *message, Py_ssize_t count) noexcept nogil:
    """Whether a PeerWriteReply says that the successor and all members after it have committed the write."""
    return count == PEER_REPLY_BYTES and message[0] == 0x09 and message[9] == 0x19


cdef class FastFirstWrites:
    cdef object _store, _kv, _quarantine, _location_leases, _device, _replica, _serving_lease, _clock, _signing
    cdef object _map_state, _callers, _chain_writes, _peers
    cdef object _peer  # the caller of the last offer, a node
    cdef Index _index
    cdef Allocator _allocator
    cdef UnknownInodes _unknown
    cdef dict _waits  # OfferedWrite -> None
    cdef GatheredReplies replies
    cdef dict _grants
    cdef uint8_t _target
    cdef int _fd
    cdef bint _is_system
    cdef ByteReader _source
    cdef uint8_t[BLOCK] _block

    def __init__(self, target, grants, secret, store, replica, serving_lease, map_state, callers, clock):
        """Create the fast path; see fast_first_writes.py."""
        self._target, self._grants, self._store, self._replica = target, grants, store, replica
        self._serving_lease, self._map_state, self._callers = serving_lease, map_state, callers
        self._index, self._kv, self._allocator, self._quarantine = store.index, store.kv, store.allocator, store.quarantine
        self._location_leases, self._device, self._fd = store.location_leases, store.device, store.device.fd
        self._clock, self._is_system = clock, type(clock) is SystemClock
        self._signing = blake2b(key=secret, digest_size=MAC_BYTES)
        self._unknown = store.index.unknown
        self._chain_writes, self._peers, self._waits = replica.writes, replica.peers, {}
        self.replies, self._source = GatheredReplies(), ByteReader()

    @property
    def waiting(self):
        """Writes that wait for other members of their chains."""
        return len(self._waits)

    cdef double now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    def answer(self, bytearray buffer, Py_ssize_t begin, Py_ssize_t end, uint64_t epoch, dict in_work, reply_stats, list out,
               side=None):
        """Answer the frame at `begin` of the buffer, which has `end` valid bytes.

        `epoch` is that of the served map. Appends the reply to `out` and returns the number of bytes that the
        frame took. 0: the frame takes the slow path, and nothing has happened. With `side`, a write that the
        next member of its chain must have first is answered there, later.
        """
        cdef Request r
        cdef double since_s = self.now_s()
        cdef const uint8_t *frame
        if begin < 0 or end > PyByteArray_GET_SIZE(buffer) or end - begin < FRAME_BYTES or not epoch:
            return 0
        frame = <const uint8_t *>PyByteArray_AS_STRING(buffer) + begin
        cdef bint is_offer = get16(frame + 4) == method_of_peer_writes
        if not (self._taken_offer(frame, end - begin, side, &r) if is_offer else self._taken(frame, end - begin, epoch, &r)):
            return 0
        if in_work and r.number in in_work or not self._is_plain(&r):
            return 0
        cdef object name = (r.inode, r.index), way = None
        if (not self._unknown.has(r.inode) or name in self._index.young or name in self._index.old
                or self._quarantine.chunks and name in self._quarantine.chunks):
            return 0
        cdef object place_in_chain = None
        cdef bint is_last = True
        if is_offer or self._replica.shares:
            place_in_chain = self._position(&r, name)
            if place_in_chain is None:
                return 0
            is_last = len(<tuple?>place_in_chain.members) == <Py_ssize_t>place_in_chain.number + 1
            if not is_last and side is None:
                return 0
        elif not self._is_alone(&r):
            return 0
        if crc_of(r.payload, r.length) != r.checksum:
            return 0
        cdef uint64_t place = self._allocator.find_block()
        if not place:
            return 0
        cdef const uint8_t *content = r.payload
        r.sent_checksum = r.checksum
        if not is_last:
            way = self._way(place_in_chain, r.length)
            if way is None:
                return 0
        if r.length < BLOCK:
            memset(self._block, 0, BLOCK)
            memcpy(self._block + r.offset, r.payload, r.length)
            content = self._block
            r.checksum = crc_of(content, BLOCK)
        # Before the offer: after it, this target must not fail for lack of space below it.
        if pwrite(self._fd, content, BLOCK, <long long>(place << 12)) != BLOCK:
            if way is not None:
                self._peers.release((<tuple>way)[0], r.length)
            return 0  # the slow path writes there again, or reports the error
        self._store.written_bytes += BLOCK
        self._device.note_run(place << 12, (place << 12) + BLOCK)
        reply_stats.begun += 1
        cdef Py_ssize_t length = HEADER_BYTES + r.message_bytes + r.length
        if not is_last:
            self._offer(&r, frame, length, name, place_in_chain, <tuple>way, place, in_work, side, since_s,
                        end - begin - length >= FRAME_BYTES)
            return length
        cdef int status = 0, code = 0
        cdef bytes text
        if is_offer:
            self._chain_writes.counters["followed"] += 1
        try:
            self._name(&r, place, False)
            if not is_offer:
                self._check_lease()
        except NvpoolError as error:
            if is_offer or isinstance(error, StaleTenure):
                code, text = encode_error(error)
            else:
                status = error.wire_code
        except Exception as error:  # a bug, reported like the slow path reports it
            code, text = encode_error(error)
        if code:
            out.append(pack_head(REPLY, code, r.number, 0, text, 0))
        else:
            out.append(self._reply(&r, epoch, status))
        self._count(reply_stats, is_offer, r.length, self.now_s() - since_s, code)
        return length

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
        r.number, r.length, r.deadline_ms = get32(at + 8), get32(at + 20), get32(at + 12)
        r.sender, r.message_bytes = 0, MESSAGE_BYTES
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

    cdef bint _taken_offer(self, const uint8_t *at, Py_ssize_t count, side, Request *r) except -1:
        """Whether the frame is a permitted offer of the first write to a block, to all members of the chain.

        The frame must be complete. Fills in `r`.
        """
        cdef const uint8_t *message = at + HEADER_BYTES
        cdef PeerWriteRequest offer = PeerWriteRequest.__new__(PeerWriteRequest)
        cdef PyObject *found
        r.message_bytes, r.length, r.number, r.deadline_ms = get32(at + 16), get32(at + 20), get32(at + 8), get32(at + 12)
        if (side is None or self._chain_writes is None or not r.deadline_ms or r.message_bytes > PEER_MESSAGE_MAX
                or not 0 < r.length <= BLOCK or count < HEADER_BYTES + <Py_ssize_t>r.message_bytes + <Py_ssize_t>r.length
                or not is_head(at, REQUEST) or crc_of(message, r.message_bytes) != get32(at + 24)):
            return False
        offer.clear()
        self._source.open(PyBytes_FromStringAndSize(<const char *>message, r.message_bytes))
        if (not offer.decode_from(self._source) or offer.target != self._target or offer.map_epoch or offer.base or offer.last
                or offer.wrapped_key or not offer.sender or not 0 < offer.table <= table_max or not offer.session
                or offer.offset + <uint64_t>r.length > BLOCK or not 0 < offer.slot < 128 or not offer.version
                or PyBytes_GET_SIZE(offer.checksums) != 4):
            return False
        r.sender, r.link, r.table, r.chain_epoch = offer.sender, offer.link, offer.table, offer.chain_epoch
        r.version, r.inode, r.index, r.offset, r.cut = offer.version, offer.inode, offer.index, offer.offset, offer.cut
        r.session, r.slot, r.sequence = offer.session, offer.slot, offer.sequence
        r.checksum = get32(<const uint8_t *>PyBytes_AS_STRING(offer.checksums))
        r.payload = message + r.message_bytes
        found = PyDict_GetItem(self._grants, offer.authority)
        if found is NULL:
            return False
        grant = <object>found
        cdef uint64_t ends_ms = grant.ends_ms
        cdef uint64_t now_ms = (wall_ns() if self._is_system else <long long>self._clock.wall_ns()) // 1_000_000
        if not <long>grant.rights & service or now_ms > skew_ms and ends_ms < now_ms - skew_ms:
            return False
        if side.peer is not self._peer:
            if peer_method_key in self._callers.of(side.peer).refused:
                return False
            self._peer = side.peer
        return True

    cdef bint _is_plain(self, Request *r) except -1:
        """Whether the store accepts the write."""
        store, kv = self._store, self._kv
        return not (store.fenced_because or store.closed or kv.frozen is not None and kv.full
                    or 0 < <Py_ssize_t>self._device.direct_write_bytes <= r.length)

    cdef bint _is_alone(self, Request *r) except -1:
        """Whether this target is the only one of the chunk's chain; if so, set the version.

        For a target that shares no chain.
        """
        cdef uint64_t chain_epoch = 1
        replica = self._replica
        if replica.pending or self._serving_lease.shared:
            return False
        epochs = replica.chain_epochs
        if epochs is not None:
            epochs = (<dict?>epochs).get(r.table) or (<dict>epochs)[0]
            if <uint64_t>len(<list?>epochs) != chain_count:
                return False
            chain_epoch = (<list>epochs)[chunk_hash(r.inode, r.index) % chain_count]
        r.version = chain_epoch << 32 | 1
        return chain_epoch and not chain_epoch >> 32

    cdef object _position(self, Request *r, tuple name):
        """Return the target's position in the chunk's chain if it accepts the write now; otherwise None.

        As ChainWrites.try_submit and protocol.judge for a chunk without a state. Sets the version of a client's
        write.
        """
        cdef object place, writes = self._chain_writes
        cdef list places = (<dict?>self._replica.places).get(r.table)
        cdef uint64_t epoch
        if writes is None or places is None or <uint64_t>len(places) != chain_count:
            return None
        place = places[chunk_hash(r.inode, r.index) % chain_count]
        if (place is None or name in <dict?>writes.pending or name in <dict?>writes.turns or writes.cutting
                or name in <dict?>writes.refused_versions):
            return None
        epoch = place.epoch
        if r.sender:
            if (not place.number or epoch != r.chain_epoch or (<tuple?>place.members)[<Py_ssize_t>place.number - 1] != r.sender
                    or (<dict?>writes.links).get(r.sender) != r.link):
                return None
            return place
        if place.number or epoch >> 32 or not epoch or self._serving_lease.shared and not self._serving_lease.holds():
            return None
        if writes.led_bytes and writes.led_bytes + <Py_ssize_t>r.length > led_bytes_max:
            return None
        r.version = epoch << 32 | 1
        return place

    cdef int _check_lease(self) except -1:
        if self._serving_lease.shared:
            self._serving_lease.check()
        return 0

    # -- writes that the next member must have first -------------------------------------------------------------------

    cdef object _way(self, place, uint32_t length):
        """Reserve a place for the offer; None if it cannot be sent now."""
        cdef Py_ssize_t number = place.number
        way = self._peers.try_reserve((<tuple?>place.members)[number + 1], number, length)
        if way is None:
            return None
        connection = (<tuple?>way)[1]
        if (not isinstance(connection, StreamConnection) or connection.upgraded or connection.closed or not connection.writable
                or connection.waiting or len(<dict?>connection.in_flight) >= in_flight_max
                or len(<bytes?>(<tuple>way)[3]) != GRANT_BYTES):
            self._peers.release((<tuple>way)[0], length)
            return None
        return way

    cdef int _offer(self, Request *r, const uint8_t *frame, Py_ssize_t length, tuple name, place_in_chain, tuple way, uint64_t place,
                    dict in_work, side, double since_s, bint is_followed) except -1:
        """Send the offer of a write whose bytes are on the drive, and hold its block."""
        cdef PeerWriteRequest q = PeerWriteRequest.__new__(PeerWriteRequest)
        cdef bytes message, offer
        cdef uint8_t *to
        cdef Py_ssize_t message_bytes
        cdef uint8_t[4] sums
        cdef OfferedWrite one = OfferedWrite.__new__(OfferedWrite)
        cdef double now_s = self.now_s()
        cdef dict in_flight
        connection = way[1]
        in_flight = connection.in_flight
        q.clear()
        q.target, q.authority, q.sender = (<tuple>place_in_chain.members)[<Py_ssize_t>place_in_chain.number + 1], way[3], self._target
        q.link, q.table, q.chain_epoch, q.version = way[2], r.table, place_in_chain.epoch, r.version
        q.inode, q.index, q.offset, q.cut = r.inode, r.index, r.offset, r.cut
        q.session, q.slot, q.sequence = r.session, r.slot, r.sequence
        put32(sums, r.sent_checksum)
        q.checksums = PyBytes_FromStringAndSize(<const char *>sums, 4)
        message = q.SerializeToString()
        message_bytes = PyBytes_GET_SIZE(message)
        one.writes, one.side, one.way, one.connection, one.name = self, side, way[0], connection, name
        one.request, one.since_s, one.place = r[0], since_s, place
        one.request.payload = NULL
        one.message = PyBytes_FromStringAndSize(<const char *>frame + HEADER_BYTES, r.message_bytes)
        one.request_number = register(connection, in_flight, one, now_s + offer_s, zero, peer_method_key, now_s)
        offer = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + message_bytes + r.length)
        to = <uint8_t *>PyBytes_AS_STRING(offer)
        put_head(to, REQUEST, method_of_peer_writes, one.request_number, <uint32_t>(offer_s * 1000), <uint32_t>message_bytes,
                 r.length, crc_of(<const uint8_t *>PyBytes_AS_STRING(message), message_bytes))
        memcpy(to + HEADER_BYTES, PyBytes_AS_STRING(message), message_bytes)
        memcpy(to + HEADER_BYTES + message_bytes, r.payload, r.length)
        one.payload = memoryview(offer)[HEADER_BYTES + message_bytes:]
        self._allocator.hold_block(place)
        write = Write(r.table, r.inode, r.index, r.offset, one.payload, q.checksums, r.cut,
                      RequestId(r.session, r.slot, r.sequence))
        one.pending = self._chain_writes.add(write, r.version, place_in_chain, one)
        in_work[r.number] = one
        self._waits[one] = None
        connection.frames.send(offer, (), 0, is_followed or len(in_flight) >= gather_from)
        return 0

    cdef int end_offer(self, OfferedWrite one) except -1:
        """Stop waiting for the successor's reply; the block stays held for the write."""
        one.has_ended = True
        del self._waits[one]
        self._peers.release(one.way, one.request.length)
        return 0

    cdef int commit(self, OfferedWrite one) except -1:
        """Commit a write that all members after this one have, and answer it.

        As ChainWrites._commit_now. If this is not possible now, the write continues in a task.
        """
        cdef Request *r = &one.request
        cdef bint is_offer = r.sender != 0
        cdef bytes reply
        cdef int code = 0
        self.end_offer(one)
        cdef bint is_named = False
        try:
            if (self._is_plain(r) and self._unknown.has(r.inode) and one.name not in self._index.young
                    and one.name not in self._index.old and not self._allocator.is_used(one.place)):
                self._name(r, one.place, True)
                is_named = True
        except Exception:  # the task does it again, and reports the error or fences the store
            pass
        if not is_named:
            self.carry_on(one, COMMITTED)
            return 0
        self._chain_writes.settled(one.pending)
        if one.cancelled:
            return 0
        side = one.side
        try:
            if not is_offer:
                self._check_lease()
            reply = self._reply(r, self._map_state.epoch, 0)
        except NvpoolError as error:
            code, text = encode_error(error)
            reply = pack_head(REPLY, code, r.number, 0, text, 0)
        del side.in_work[r.number]
        side.frames.out.append(reply)
        side.frames.out_bytes += PyBytes_GET_SIZE(reply)
        self._count(side.reply_stats, is_offer, r.length, self.now_s() - one.since_s, code)
        self.replies.add(side)
        return 0

    cdef int carry_on(self, OfferedWrite one, outcome) except -1:
        """Continue the write in a task, and its request as if it arrived now: it waits for the task."""
        one.place_block()
        self._chain_writes.carry_on(one.pending, outcome)
        asyncio.get_running_loop().call_soon(one.ask_again)
        return 0

    def give_up(self):
        """Continue all waiting writes in tasks, and their requests on the slow path."""
        cdef OfferedWrite one
        for one in list(self._waits):
            one.connection.give_up(one.request_number)
            self.end_offer(one)
            self.carry_on(one, None)

    # -- naming and answering ------------------------------------------------------------------------------------------

    cdef int _name(self, Request *r, uint64_t place, bint is_held) except -1:
        """Apply the one change that names the block, and update the state in memory.

        `is_held` says that the allocator holds the block for this write. If the engine refuses the change, only
        counters have changed.
        """
        cdef object table
        cdef uint8_t[4] sums
        cdef uint64_t slot
        cdef tuple requests = ((r.session, r.slot, r.sequence),)
        put32(sums, r.checksum)
        cdef bytes crcs = PyBytes_FromStringAndSize(<const char *>sums, 4)
        cdef list effects = self._allocator.block_effects(place)
        effects.insert(0, (segment_key(r.inode, r.index, 0), encode_small(r.version, r.cut, r.table, place, 1, requests, crcs)))
        # Before the change: a client that reads the old locations from now on asks again for the locations.
        if self._location_leases.life_s:
            slot = (r.inode * <uint64_t>0x9E3779B97F4A7C15 + r.index * <uint64_t>0xC2B2AE3D27D4EB4F) >> 64 - SLOT_BITS
            table = self._location_leases.stamps
            table[slot] = <uint32_t>(<uint32_t>table[slot] + 1)
        self._kv.apply(effects)
        self._allocator.commit_block(place, is_held)
        cdef array.array disk = array.clone(no_places, 1, False)
        disk.data.as_ulonglongs[0] = place
        cdef IndexSegment segment = IndexSegment.__new__(IndexSegment)
        segment.disk, segment.base, segment.crcs = disk, place, crcs
        cdef Chunk chunk = self._index.add(r.inode, r.index)
        chunk.version, chunk.cut, chunk.requests, chunk.table, chunk.segments = r.version, r.cut, requests, r.table, [segment]
        self._store.was_written()
        return 0

    cdef bytes _reply(self, Request *r, uint64_t epoch, int status):
        """Return the reply frame, with read_write_codec.encode_write_reply of one result or a PeerWriteReply."""
        cdef Py_ssize_t count = PEER_REPLY_BYTES if r.sender else REPLY_BYTES
        cdef bytes frame = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + count)
        cdef uint8_t *to = <uint8_t *>PyBytes_AS_STRING(frame)
        cdef uint8_t *said = to + HEADER_BYTES
        memset(to, 0, HEADER_BYTES + count)
        said[0] = 0x09
        put64(said + 1, epoch)
        if r.sender:
            said[9] = 0x19
            put64(said + 10, r.version)
        else:
            said[9], said[10] = 0x12, 16
            put16(said + 11, <uint16_t>status)
            put64(said + 19, 0 if status else r.version)
        put_head(to, REPLY, 0, r.number, 0, <uint32_t>count, 0, crc_of(said, count))
        return frame

    cdef int _count(self, reply_stats, bint is_offer, Py_ssize_t length, double took_s, int code) except -1:
        cdef object times, counts, key = peer_method_key if is_offer else method_key
        cdef object method_stats = reply_stats.by_method.get(key)
        if method_stats is None or code:
            reply_stats.answered(key, took_s, code, length, 0)
            return 0
        reply_stats.ended += 1
        times = method_stats.times
        counts = times.counts
        counts[slot_of(took_s)] += 1
        times.sum_s += took_s
        method_stats.bytes_in += length
        return 0


cdef class GatheredReplies(ReplyBurst):
    """Replies to writes whose offers were answered together; sent after the last of those answers."""
    cdef list sides

    def __cinit__(self):
        self.sides = []

    cdef int add(self, side) except -1:
        if side not in self.sides:
            self.sides.append(side)
        return 0

    cdef int go_on(self) except -1:
        cdef list sides = self.sides
        self.sides = []
        for side in sides:
            if side.frames.out:
                side.frames.flush()
            if side.on_idle is not None and not side.in_work:
                side.on_idle()
        return 0


cdef class OfferedWrite(ReplyTaker):
    """Write that waits for the next member of its chain.

    It takes the successor's reply. Until the write is decided, it is in the table of the connection whose
    request it answers, in place of an InboundCall. For ChainWrites it is the offer in flight.
    """
    cdef FastFirstWrites writes
    cdef object side, way, connection, request_number
    cdef object pending  # chain_writes.Pending
    cdef tuple name
    cdef bytes message  # of the request
    cdef object payload
    cdef uint64_t place
    cdef Request request
    cdef bint has_ended
    cdef readonly bint cancelled
    cdef readonly int byte_count, payload_bytes
    cdef readonly double since_s

    @property
    def method(self):
        return peer_method_key if self.request.sender else method_key

    def cancel(self):
        """Cancel: the sender of the request has gone or no longer waits. The write continues."""
        self.cancelled = True

    cdef ReplyBurst take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload,
                           Py_ssize_t payload_bytes):
        if self.has_ended or payload_bytes or not is_committed(message, message_bytes):
            return None
        self.writes.commit(self)
        return self.writes.replies

    def __call__(self, reply, error):
        """Handle a reply that `take` has not taken, or the error of the connection."""
        cdef bytes message
        cdef FastFirstWrites writes = self.writes
        if self.has_ended:
            return
        answer = None
        if error is None:
            message = bytes(reply.message)
            if is_committed(<const uint8_t *>PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message)):
                writes.commit(self)
                writes.replies.go_on()
                return
            try:
                answer = decoded(PeerWriteReply, message)
            except CorruptFrame as corrupt:
                error = corrupt
        writes.end_offer(self)
        writes.carry_on(self, (answer, error))

    def give_up(self):
        """As Offered.give_up. The request continues on the slow path, where it waits for the write."""
        self.connection.give_up(self.request_number)
        self.writes.end_offer(self)
        self.place_block()
        asyncio.get_running_loop().call_soon(self.ask_again)

    cdef int place_block(self) except -1:
        """Let the pending write have the block, as ChunkStore.prepare would have placed it."""
        cdef uint8_t[4] sums
        transaction = Transaction()
        transaction.taken.append((self.place, 1))
        put32(sums, self.request.checksum)
        self.pending.placed = Placed(transaction, [(self.place, 1)], PyBytes_FromStringAndSize(<const char *>sums, 4), 0)
        return 0

    def ask_again(self):
        """Pass the request to the slow path, with the time that it has left."""
        cdef double left_s
        if self.cancelled:
            return
        left_s = self.since_s + self.request.deadline_ms / 1000.0 - self.writes.now_s()
        del self.side.in_work[self.request.number]
        self.side.reply_stats.begun -= 1
        self.side.arrived(self.request.number, self.method, max(0, int(left_s * 1000)), self.message, self.payload)
        if self.side.on_idle is not None and not self.side.in_work:
            self.side.on_idle()
