"""READs of the kernel that wait for their bytes, and the replies to them.

A READ is a `KernelRead`: its source ends it as any other `Read`, and its end is the reply to the kernel. Used by
read_plan and its sources.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from nvpool.client.data.read_queue import Read, ReadBurst
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core import primitives
from nvpool.core.primitives import ByteWriter, ReceivedReply
from nvpool.core.units import KIB
from nvpool.fuse.protocol.constants import Op

LARGE_BYTES = 128 * KIB
"""Largest read of the fast path, in whole blocks: a wide receive buffer has room for some."""
TURN = 8
"""Replies that are passed on before new requests are taken."""

_REPLY_BYTES = 16
_OPCODE, _OPCODE_KEY = int(Op.READ), int(Op.READ)
_GONE = errno.ENOENT, errno.ENODEV, errno.ECONNABORTED


class KernelRead(Read):
    """A READ of the kernel that waits for its bytes: an entry of the table of pending requests."""

    __slots__ = ("reads", "key", "unique", "skip", "size", "since_s", "is_done")

    def start(self, reads: KernelReads, unique: int, skip: int, size: int, since_s: float) -> None:
        """Set the request, which wants `size` bytes from byte `skip` of the blocks on."""
        self.reads, self.key, self.unique = reads, unique, unique
        self.skip, self.size, self.since_s = skip, size, since_s
        self.burst = reads
        self.is_done = False

    def cancel(self) -> bool:
        """Cancel: the caller dies, or the mount is gone; reply now. False: the read was answered already."""
        if not self._is_pending():
            return False
        self.is_done = True
        self.reads.path.read_ended(self.key, asyncio.CancelledError())
        return True

    def _is_pending(self) -> bool:
        reads: KernelReads = self.reads
        entry = reads.work.get(self.key)
        return entry is not None and entry[0] is self

    def done(self) -> bool:
        """Whether the kernel has its answer."""
        return self.is_done

    def set_result(self, blocks: memoryview) -> None:
        """Reply with the wanted part of these blocks."""
        self.is_done = True
        self.reads.path.read_done(self.key, blocks[self.skip : self.skip + self.size])

    def set_exception(self, error: BaseException) -> None:
        """Reply with an error."""
        self.is_done = True
        self.reads.path.read_ended(self.key, error)

    def take(self, reply: ReceivedReply, first: int, length: int) -> None:
        """Reply with bytes where they were received."""
        if self.is_done:
            return
        if length != self.length:  # a hole
            Read.take(self, reply, first, length)
            return
        reads: KernelReads = self.reads
        try:
            reads.answer(self, reply, first)
        except Exception as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Reply with a bug, unless there was a reply."""
        self.is_done = True
        if self._is_pending():
            self.reads.path.read_ended(self.key, error)


class KernelReads(ReadBurst):
    """The waiting READs of one mount, which are in the table of pending requests."""

    def __init__(self, path: Any) -> None:
        """`path`: see ReadFastPath; the parts of the kernel engine that are needed here."""
        super().__init__(TURN)
        self.path = path
        self.read_bytes = 0
        """Bytes of the replies, since the start."""
        requests = path.requests
        self.work: dict[int, Any] = requests.work
        self.requests: Any = requests
        self._fd = requests.fd
        self._head, self._plain = ByteWriter(), ReceivedReply()
        self._scratch = memoryview(bytearray(LARGE_BYTES))
        self._outside = 0

    def add(self, one: KernelRead, pid: int) -> None:
        """Add a READ of the thread `pid`, in whose place something is pending now."""
        self.work[one.key] = (one, pid, _OPCODE_KEY, one.since_s)
        self.requests.deferred += 1

    def take_back(self, one: KernelRead) -> None:
        """Undo `add`, because of a bug."""
        one.is_done = True
        self.work.pop(one.key, None)
        self.requests.deferred -= 1

    def answer(self, one: KernelRead, reply: ReceivedReply, first: int) -> None:
        """Reply with the wanted part of the read's blocks, which begin at `first` of the payload."""
        one.is_done = True
        file = one.file
        blocks = reply
        if file.key is not None:
            blocks = self.decrypted(file, one.index, one.offset, one.length, reply, first)
            first = 0
        self.write(one.unique, blocks, first + one.skip, one.size)
        del self.work[one.key]
        requests: Any = self.requests
        if requests.interrupted:
            requests.interrupted.pop(one.key, None)
        self._count(requests.spent, primitives.stopwatch_s() - one.since_s)

    def decrypted(
        self, file: OpenInode, index: Any, offset: int, length: int, reply: ReceivedReply, first: int
    ) -> ReceivedReply:
        """Decrypt blocks, which begin at `first` of the payload; the result is valid until the next call."""
        into = self._scratch[:length]
        key: Any = file.key
        key.cipher.decrypt(file.inode, index, offset >> 12, reply.view(first, length), into)
        plain = self._plain
        plain.open(b"", into)
        return plain

    def write(self, unique: int, blocks: ReceivedReply, first: int, size: int) -> None:
        """Write the reply to the request `unique`: `size` bytes of the payload, from `first` on."""
        self.read_bytes += size
        head = self._head
        head.begin()
        head.u32(_REPLY_BYTES + size)
        head.u32(0)
        head.u64(unique)
        code = blocks.write(self._fd, head, first, size)
        if code and code not in _GONE:
            self.path.answer_refused(unique, code, _REPLY_BYTES + size)

    def _count(self, spent: Any, took_s: float) -> None:
        """As `FuseTimes.add`."""
        times: Any = spent.times[_OPCODE]
        if times is None:
            spent.add(_OPCODE_KEY, max(0.0, took_s))
            return
        times.counts[primitives.duration_slot(took_s)] += 1
        times.sum_s += took_s

    def go_on(self) -> None:
        """Take new requests after some replies, before the other replies are handled."""
        self.path.some_ended()
        requests: Any = self.requests
        if self.work and requests.reading and not requests.taking:
            self.path.take_requests()

    def one_came(self) -> None:
        """Continue after a reply that arrived outside a connection's receive buffer: it was a large one."""
        self._outside += 1
        if self._outside & 1:
            self.path.some_ended()
        else:
            self.go_on()
