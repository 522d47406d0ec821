"""Fast path for new files: one step from the kernel's request to the shard's frame, and one back.

Files that are created by the thousand are small, and half of the mount's work for such a file is its
creation: a dozen layers, each with little to do. Here they are one step. The slow path is that of every
request (fuse/dispatch to client/vfs/files and client/rpc/change_fast_path). Both keep the same order: the slot
is recorded in the mount state (shared memory that outlives this process) before the request is sent, the
handle before the kernel gets the reply, and the kernel gets the reply before the caches here are updated.

The fast path covers a session with a free slot at a shard whose primary is connected by frames, over TCP or a
unix socket. It also needs a reply by which the file is new, in its directory's shard, and not open here. Any
other outcome (an error, a file that existed, a file of another shard, a connection that ends, a deadline, a
caller that dies) is passed to the slow path, as the outcome of a change that was started there. Only the slow
path handles errors.

CreateFastPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from nvpool.client.rpc.change_fast_path import SentChange
from nvpool.client.state.leases import Leases
from nvpool.client.state.metadata_cache import MetadataCache
from nvpool.client.state.shard_session import ShardSession
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.client.vfs.filesystem import Vfs
from nvpool.core import grants, primitives
from nvpool.core.clock import stopwatch_s
from nvpool.core.ids import COUNTER_BITS
from nvpool.core.primitives import ByteReader
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.fuse.dispatch import KernelRequests
from nvpool.fuse.ops.handles import FREE_MIN
from nvpool.fuse.ops.inline_completions import Creating
from nvpool.fuse.ops.kernel_cache.names import NAMED_TOGETHER, SENT_CHANGES_MAX
from nvpool.fuse.ops.kernel_cache.pages import HAS_XATTRS, SEEN_MAX
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX, PendingRequests
from nvpool.fuse.protocol import reply_encoder
from nvpool.fuse.protocol.constants import Op, Opening
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState
from nvpool.rpc import reply_receivers
from nvpool.rpc.api import IN_FLIGHT_MAX
from nvpool.rpc.messages.meta_messages import Attr, CreateReply, CreateRequest
from nvpool.rpc.reply_receivers import ReplyBurst, ReplyReceiver
from nvpool.rpc.transports.stream import StreamConnection
from nvpool.rpc.v1.wire_pb2 import META_CREATE

BURST = 64
"""Frames that wait for the end of a burst."""
TURN = 16
"""Replies that are sent before new requests are taken."""
_HEAD_BYTES, _NAME_MAX = 56, 255
"""Of a CREATE: the bytes before the name, as in protocol/requests, and its longest name."""
_SLASH = 47
_S_IFMT, _S_IFREG = 0o170000, 0o100000
_ACCESS, _EXCLUSIVE, _TRUNCATE, _APPEND = os.O_ACCMODE, os.O_EXCL, os.O_TRUNC, os.O_APPEND
_WRITES_ONLY, _READS_AND_WRITES, _DIRECT = os.O_WRONLY, os.O_RDWR, os.O_DIRECT
_DIRECT_IO, _KEEP_CACHE, _NOFLUSH = Opening.DIRECT_IO.value, Opening.KEEP_CACHE.value, Opening.NOFLUSH.value
_READ, _READ_AND_WRITE = grants.READ, grants.READ | grants.WRITE
_GRANT_BYTES, _GRANT_VERSION, _HAS_XATTRS, _SLOTS, _IN_FLIGHT = (
    grants.GRANT_BYTES,
    1,
    HAS_XATTRS,
    SLOTS_PER_SESSION,
    IN_FLIGHT_MAX,
)
_FIRST, _COUNTER_BITS, _FREE_MIN, _TOGETHER = FIRST, COUNTER_BITS, FREE_MIN, NAMED_TOGETHER
_SENT_CHANGES_MAX, _SEEN_MAX = SENT_CHANGES_MAX, SEEN_MAX
_OPCODE, _METHOD = int(Op.CREATE), int(META_CREATE)


class PendingCreate(ReplyReceiver):
    """A pending CREATE: an entry of the table of pending requests, and the receiver of the shard's reply."""

    __slots__ = (
        "creates",
        "connection",
        "state",
        "generation",
        "name",
        "message",
        "parent",
        "unique",
        "slot",
        "sequence",
        "mode",
        "flags",
        "uid",
        "gid",
        "pid",
        "umask",
        "number",
        "since_s",
        "sent_s",
        "deadline_s",
        "is_done",
    )

    def begin(
        self,
        creates: Creates,
        connection: Any,
        state: Any,
        name: bytes,
        message: bytes,
        parent: int,
        unique: int,
        mode: int,
        flags: int,
        uid: int,
        gid: int,
        pid: int,
        umask: int,
        slot: int,
        sequence: int,
        since_s: float,
        sent_s: float,
        deadline_s: float,
    ) -> None:
        """Begin a request that is sent now in this slot of the session `state`, with `message`.

        The sender sets `number`, the number of the shard's request, before a reply can come.
        """
        self.creates, self.connection, self.state, self.generation = (
            creates,
            connection,
            state,
            state.generation,
        )
        self.name, self.message, self.parent, self.unique = name, message, parent, unique
        self.mode, self.flags, self.uid, self.gid = mode, flags, uid, gid
        self.pid, self.umask = pid, umask
        self.slot, self.sequence, self.number = slot, sequence, 0
        self.since_s, self.sent_s, self.deadline_s = since_s, sent_s, deadline_s
        self.is_done = False

    def cancel(self) -> bool:
        """Cancel: the caller dies, or the mount is gone. False: the request has ended already."""
        if self.is_done:
            return False
        return self._go_on_slowly().cancel()

    def receive(self, message: bytes) -> ReplyBurst | None:
        """Take the reply if it describes a new file; None: the slow path gets it."""
        if self.is_done:
            return None
        creates: Creates = self.creates
        try:
            if not creates.complete(self, message):
                return None
        except Exception as error:
            creates.report_bug(self, error)
        return creates

    def __call__(self, reply: Any, error: BaseException | None) -> None:
        """Handle a reply that was not received as a message, or an error."""
        if self.is_done:
            return
        if error is None and self.receive(bytes(reply.message)) is not None:
            self.creates.path.some_ended()
            return
        self._go_on_slowly().begun.answered(reply, error)

    def _go_on_slowly(self) -> Creating:
        """Continue on the slow path, as if the request had been started there."""
        self.is_done = True
        path: CreateFastPath = self.creates.path
        return path.create_otherwise(
            self.unique,
            self.parent,
            self.name,
            self.mode,
            self.flags,
            Caller(self.uid, self.gid, self.pid, self.umask),
            SentChange(
                self.message,
                self.sent_s,
                self.deadline_s,
                self.connection,
                self.number,
                self.state,
                self.slot,
                self.sequence,
                self.generation,
            ),
        )


class Creates(ReplyBurst):
    """The creates of one mount: from the kernel's requests to the shards, and back.

    `path.requests` has the request in its buffer, and the table of pending ones.
    """

    def __init__(self, path: CreateFastPath, ops: FuseOps, vfs: Vfs, in_work_max: int) -> None:
        super().__init__(TURN)
        meta: Any = vfs.meta
        cache, memory, requests = vfs.cache, ops.kept, path.requests
        assert memory is not None
        self.path = path
        self.made = 0
        """Files that were created."""
        self._requests = requests
        self._buffer: Any = requests.buffer
        self._work: dict[int, Any] = requests.work
        self._in_work_max = in_work_max
        self._entry_s, self._entry_ns = requests.keep_entry
        self._attr_s, self._attr_ns = requests.keep_attr
        self._ops, self._published, self._handles = ops, ops.published, ops.handles
        self._names, self._pages, self._bypass, self._changes = (
            ops.cached_names,
            ops.cached_pages,
            ops.bypass,
            ops.changes,
        )
        self._files, self._appending = ops.files.by_handle, ops.files.appending
        self._sent_changes, self._seen = ops.cached_names.sent_changes, ops.cached_pages.seen
        self._barred = ops.published.barred
        self._writeback, self._keeps_names = ops.options.writeback, bool(ops.options.entry_timeout_s)
        self._vfs, self._writer, self._complete_dirs = vfs, vfs.writer, vfs.complete_dirs
        self._leases: Leases = vfs.leases
        self._cache: MetadataCache = cache
        self._opened = cache.open
        self._meta, self._view, self._dialer, self._shards = meta, meta.view, meta.dialer, meta.shards
        self._counters, self._held, self._early = meta.counters, meta.once.held, meta.once.early
        self._patience_s = meta.options.deadline_s
        self._left_ms = min(int(self._patience_s * 1000), 0xFFFFFFFF)
        self._slot_records, self._handle_records = memory.slot_records, memory.handle_records
        self._known_map: Any = None
        self._shard_of_partition: tuple[int, ...] = ()
        self._endpoints: dict[int, Any] = {}
        self._is_single = False
        self._epoch = 0
        self._frames: dict[Any, list[bytes]] = {}
        self._frame_count = 0
        self._create = CreateRequest(open=True)
        self._in = ByteReader()

    # -- from the kernel to the shard

    def begin(self, count: int) -> bool:
        """Start the CREATE of `count` bytes in the buffer.

        True: the request is in the table of pending requests. False: nothing has happened.
        """
        if not _HEAD_BYTES + 2 <= count <= _HEAD_BYTES + _NAME_MAX + 1 or count > len(self._buffer):
            return False
        source = self._in
        source.open_part(self._buffer, 0, count)
        if source.u32() != count or source.u32() != _OPCODE:
            return False
        unique = source.u64()
        parent = source.u64()
        uid = source.u32()
        gid = source.u32()
        pid = source.u32()
        extension_words = source.u32() & 0xFFFF
        flags = source.u32()
        mode = source.u32()
        umask = source.u32()
        source.u32()
        name = source.rest()
        if name[len(name) - 1] != 0:
            return False
        name = name[:-1]
        if 0 in name or _SLASH in name or name == b"." or name == b"..":
            return False
        if not unique or unique > _FIRST or extension_words:
            return False
        if flags & _ACCESS == _ACCESS or parent >> 63:
            return False
        if self._writeback:  # as FuseOptions.flags_below
            flags &= ~_APPEND
            if flags & _ACCESS == _WRITES_ONLY:
                flags ^= _WRITES_ONLY | _READS_AND_WRITES
        requests: Any = self._requests
        if (
            requests.forwarded
            or requests.stopped
            or requests.leaving
            or len(self._work) + 1 >= self._in_work_max
        ):
            return False
        # The shard, its session and its connection.
        if self._view.map is not self._known_map:
            self._use_map(self._view.map)
        state: Any = self._shards.get(self._shard_of_partition[parent >> _COUNTER_BITS])
        if state is None:
            return False
        session, slots = state.session, state.slots
        if (
            not session
            or not slots
            or state.waiting
            or self._meta.closed
            or state.record < 0
            or state.slot_count > _SLOTS
        ):
            return False
        connection: Any = self._dialer.by_endpoints.get(self._endpoints.get(state.shard))
        if (
            connection is None
            or connection is not state.met
            or connection.closed
            or not isinstance(connection, StreamConnection)
            or connection.upgraded
        ):
            return False
        in_flight: dict[int, Any] = connection.in_flight
        if not connection.writable or connection.waiting or len(in_flight) >= _IN_FLIGHT:
            return False
        key: Any = unique
        if key in self._held or key in self._early or not self._handle_records.has_room(_FREE_MIN):
            return False
        directory: Any = parent
        if not self._is_single and not self._vfs.stripes.is_together(directory):
            return False
        exclusive, truncate = flags & _EXCLUSIVE != 0, flags & _TRUNCATE != 0
        if truncate and not exclusive and self._writer.busy and self._vfs.may_be_written(directory, name):
            return False
        if not self._left_ms:
            return False
        if self._frame_count >= BURST:
            self.send()
        # The request starts here: the rest cannot fail.
        now_s = self._leases.now_s()
        slot, sequence = slots.popleft()
        create = self._create
        change = create.change
        change.session, change.slot, change.sequence = session, slot, sequence + 1
        change.map_epoch, change.uid, change.gid = self._epoch, uid, gid
        create.parent, create.name = parent, name
        create.masked = mode & umask & 0o777  # as Caller.masked
        create.mode = _S_IFREG | mode & 0o7777 ^ create.masked
        create.rights = _READ_AND_WRITE if flags & _ACCESS else _READ
        create.exclusive, create.truncate = exclusive, truncate
        one = PendingCreate.__new__(PendingCreate)
        one.begin(
            self,
            connection,
            state,
            name,
            create.SerializeToString(),
            parent,
            unique,
            mode,
            flags,
            uid,
            gid,
            pid,
            umask,
            slot,
            change.sequence,
            requests.since_s,
            now_s,
            now_s + self._patience_s,
        )
        self._counters["changes"] += 1
        # Before the request is sent: a successor of this process sends it again under this name.
        self._slot_records.keep(state.record, one.slot, one.sequence, _METHOD, unique)
        one.number = reply_receivers.register(
            connection, in_flight, one, one.deadline_s, 0, _METHOD_KEY, now_s
        )
        frame = primitives.request_frame(_METHOD, one.number, self._left_ms, one.message)
        frames = self._frames.get(connection)
        if frames is None:
            self._frames[connection] = [frame]
        else:
            frames.append(frame)
        self._frame_count += 1
        self._cache.forget_entry_at(directory, name, now_s)
        self._work[key] = (one, pid, _OPCODE_KEY, one.since_s)
        requests.deferred += 1
        return True

    def _use_map(self, pool_map: Any) -> None:
        self._known_map = None
        self._shard_of_partition, self._is_single = pool_map.shard_of_partition, len(pool_map.shards) == 1
        self._endpoints = {shard.id: shard.endpoints for shard in pool_map.shards}
        self._epoch = pool_map.epoch
        self._known_map = pool_map

    def send(self) -> None:
        """Send the collected frames to the shards."""
        if not self._frame_count:
            return
        waiting, self._frames, self._frame_count = self._frames, {}, 0
        for connection, frames in waiting.items():
            transport = connection.frames.transport
            if not transport.is_closing():
                transport.write(b"".join(frames))

    # -- from the shard to the kernel

    def complete(self, one: PendingCreate, message: bytes) -> bool:
        """Reply to the kernel if the message says that the file is new, then update the caches.

        False: the message says anything else, and nothing has happened.
        """
        reply = CreateReply.__new__(CreateReply)
        try:
            reply.parsed(message)
        except DecodeError:
            return False
        if not is_new_file(reply):
            return False
        attr = reply.entry.attr
        if reply.parent.inode != one.parent or attr.inode >> _COUNTER_BITS != one.parent >> _COUNTER_BITS:
            return False
        inode: Any = attr.inode
        state: ShardSession = one.state
        if inode in self._opened or state.generation != one.generation or one.parent in self._opened:
            return False
        if self._view.map is not self._known_map:
            self._use_map(self._view.map)
        if self._shards.get(self._shard_of_partition[one.parent >> _COUNTER_BITS]) is not state:
            return False
        waiting: Any = self._work.get(one.unique)
        if waiting is None or waiting[0] is not one or not self._handle_records.has_room(0):
            return False
        one.is_done = True
        # The handle is recorded before the kernel gets it.
        flags, reads_only = one.flags, one.flags & _ACCESS == 0
        serial = self._handles.last + 1
        self._handles.last = serial
        handle = self._handle_records.keep(serial, attr.inode, flags, one.uid, one.gid, one.pid, one.unique)
        opening = _KEEP_CACHE if self._writeback else 0
        if reads_only:
            opening |= _NOFLUSH
        elif flags & _APPEND:
            opening |= _DIRECT_IO
        self._changes.count += 1
        self.path.send_reply(
            reply_encoder.created(
                one.unique,
                attr,
                self._entry_s,
                self._entry_ns,
                self._attr_s,
                self._attr_ns,
                handle,
                opening,
            )
        )
        del self._work[one.unique]
        requests: Any = self._requests
        try:
            self._count(requests.spent, stopwatch_s() - one.since_s)
            if requests.interrupted:
                requests.interrupted.pop(one.unique, None)
            if self._held:
                self._ops.answered(one.unique)
            self._update_caches(one, reply, handle, inode)
        finally:
            # The request is answered, so its slot is free.
            self._slot_records.clear(state.record, one.slot)
            state.slots.append((one.slot, one.sequence))
            if state.waiting:
                state.wake()
        self.made += 1
        return True

    def _count(self, spent: Any, took_s: float) -> None:
        """As `FuseTimes.add`."""
        times: Any = spent.times[_OPCODE]
        if times is None:
            spent.add(_OPCODE_KEY, max(0.0, took_s))
            return
        times.counts[primitives.duration_slot(took_s)] += 1
        times.sum_s += took_s

    def _update_caches(self, one: PendingCreate, reply: CreateReply, handle: int, inode: Any) -> None:
        """Update the caches, as Files._opened and _created and Creating.opened do."""
        now_s = self._leases.now_s()
        parent: Any = one.parent
        number: Any = handle
        entry, state = reply.entry, one.state
        attr = entry.attr
        reads_only = one.flags & _ACCESS == 0
        file = self._cache.hold_new(attr, inode, now_s)
        file.opened = 1
        file.adopt_grant(entry.grant, self._leases.now_ms())
        state.add_open(inode)
        readable = entry.grant if entry.grant[1] & _READ else b""
        lease = self._leases.take_at(state.watch, inode, entry.lease_ms, one.sent_s, readable, now_s)
        if lease is not None and state.watch.delegates:
            file.delegation = lease
        opened = FileHandle(file, one.flags)
        self._cache.put_own_entry_at(parent, one.name, inode, one.sent_s, lease, now_s)
        self._update_directory(reply.parent, parent, one.name, now_s)
        # What the kernel was given.
        if self._keeps_names:
            names: Any = self._names
            if now_s >= names.naming_until_s or len(names.naming.names) >= _TOGETHER:
                names.start_group()
            names.naming.names.append((inode, parent, one.name, inode))
        changed: Any = attr.change
        self._sent_changes[inode] = changed
        if len(self._sent_changes) > _SENT_CHANGES_MAX:
            self._names.record_attr(attr)
        self._seen[inode] = (changed, not attr.flags & _HAS_XATTRS)
        if len(self._seen) > _SEEN_MAX:
            self._pages.record_pages(attr)
        opened.number = number
        self._files[number] = opened
        if one.flags & _DIRECT or (one.flags & _APPEND and not reads_only):  # as page_cache_bypass.bypasses
            self._bypass.opened(inode)
        if not reads_only:
            published: Any = self._published
            published.writing.add(number)
            self._barred[inode] = self._barred.get(inode, 0) + 1
            if published.handles_of:
                published.take_back(inode)
            if one.flags & _APPEND:
                self._appending[number] = Caller(one.uid, one.gid, one.pid)

    def _update_directory(self, attr: Attr, parent: Any, name: bytes, now_s: float) -> None:
        """Cache the attributes of the directory, and the name in the list of its names."""
        cache = self._cache
        if parent in cache.complete_dirs:
            cache.named_in_whole(attr, parent, name, True)
        cache.put_closed(attr, parent, now_s)
        if parent not in cache.complete_dirs:
            self._complete_dirs.made_in(parent, attr.size)

    def go_on(self) -> None:
        """Take new requests after some replies, before the other replies are handled."""
        self.path.some_ended()
        requests: Any = self._requests
        if self._work and requests.reading and not requests.taking:
            self.path.take_requests()

    def report_bug(self, one: PendingCreate, error: BaseException) -> None:
        """Report a bug to the caller that waits."""
        one.is_done = True
        self._meta.lost_sight()
        entry: Any = self._work.get(one.unique)
        if entry is not None and entry[0] is one:
            try:
                self.path.create_failed(one.unique, error)
            finally:
                self._meta.give_back_answered(one.unique, one.state, one.slot, one.sequence, one.generation)
        else:
            self._requests.loop.call_exception_handler(
                {"message": "a new file is missing in the caches of this client", "exception": error}
            )
            self.path.some_ended()


def is_new_file(reply: CreateReply) -> bool:
    """Whether the reply describes an open file that is new, with all data of it and its directory."""
    entry, directory = reply.entry, reply.parent
    if not reply.created or entry is None or directory is None or not directory.inode:
        return False
    attr, grant = entry.attr, entry.grant
    return (
        attr is not None
        and attr.inode != 0
        and attr.mode & _S_IFMT == _S_IFREG
        and not attr.size
        and attr.chunk_bits < 64
        and not entry.elsewhere
        and entry.lease_ms != 0
        and len(grant) == _GRANT_BYTES
        and grant[0] == _GRANT_VERSION
    )


_OPCODE_KEY, _METHOD_KEY = _OPCODE, _METHOD


class CreateFastPath:
    """Handler of CREATE, with `creates`, which takes one in the buffer if it can.

    `creates` is None without a mount state, and if there are no shards below. `slow` handles a CREATE that it
    declines; `take_requests` reads and answers the requests that wait.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        pending: PendingRequests,
        take_requests: Callable[[], None],
        slow: KernelRequests,
    ) -> None:
        self.requests = requests
        self._ops = ops
        self._replies = replies
        self._pending = pending
        self._slow_create = slow.on_create
        self.creates: Creates | None = None
        self._vfs: Vfs
        # called by `creates`, with `create_otherwise` and `create_failed`
        self.send_reply: Callable[[bytes], None] = replies.send
        self.some_ended: Callable[[], None] = pending.some_ended
        self.take_requests = take_requests

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        ops = self._ops
        if not ops.view.is_plain or ops.kept is None:
            return
        vfs = ops.knows_by
        if isinstance(vfs, Vfs) and ops.clock is vfs.clock:
            self._vfs = vfs
            self.creates = Creates(self, ops, vfs, IN_WORK_MAX)

    def on_create(self, count: int) -> None:
        """Handle a CREATE."""
        if self.creates is None or not self.creates.begin(count):
            self._slow_create(count)

    def submit(self) -> None:
        """Send the collected creates."""
        if self.creates is not None:
            self.creates.send()

    def stop(self) -> None:
        """Send what is collected. Replies that arrive later go to the slow path."""
        creates, self.creates = self.creates, None
        if creates is not None:
            creates.send()

    def create_otherwise(
        self, unique: int, parent: int, name: bytes, mode: int, flags: int, caller: Caller, sent: SentChange
    ) -> Creating:
        """Continue, on the slow path, a file creation that was started by `creates`."""
        creating = Creating(self._ops.files, parent, name, flags, caller, unique)
        creating.begun = self._vfs.go_on_creating(sent, parent, name, mode, flags, caller, unique, creating)
        self._pending.replace(unique, creating, "create", self._replies.created)
        creating.hold()
        return creating

    def create_failed(self, unique: int, error: BaseException) -> None:
        """Reply with an error to a CREATE that was started by `creates`."""
        self._pending.ended(unique, "create", self._replies.created, None, error)
