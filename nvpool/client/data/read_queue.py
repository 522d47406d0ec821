"""Queues of reads to targets, and the reads themselves.

Used by store_reads and read/batch. Requesters of reads that need no future derive from `Read`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core import errors
from nvpool.core.errors import ChecksumMismatch, NvpoolError, Unavailable
from nvpool.core.primitives import ReceivedReply
from nvpool.rpc.reply_receivers import ReplyBurst
from nvpool.rpc.v1 import wire_pb2


class ReadQueue:
    """The queue to one target: the reads that wait for the end of this event-loop iteration.

    `endpoints` and `distance` (see Replicas) are those of the newest map. Until `shunned_s` other replicas
    are preferred, because this target did not answer or took much longer than they. `took_s`: average
    latency; 0 before the first reply. `measured_s`: time of the last measurement.
    """

    __slots__ = (
        "target",
        "endpoints",
        "distance",
        "shunned_s",
        "took_s",
        "measured_s",
        "pending",
        "pending_bytes",
        "scheduled",
        "in_flight",
    )

    def __init__(self, target: int, endpoints: tuple[str, ...], distance: int = 0):
        self.target = target
        self.endpoints = endpoints
        self.distance = distance
        self.shunned_s = 0.0
        self.took_s = 0.0
        self.measured_s = 0.0
        self.pending: list[Read] = []
        self.pending_bytes = 0
        self.scheduled = False
        self.in_flight = 0


class ReadBurst(ReplyBurst):
    """Requester of many reads, which continues when some replies have been handled."""

    def one_came(self) -> None:
        """Continue after a good reply that arrived outside a connection's receive buffer."""


_NO_BURST = ReadBurst()


class Read:
    """A read of whole blocks of one chunk, in flight.

    It ends once: by `take` with the blocks of a reply, by `set_result` with exactly `length` bytes, or by
    `set_exception`. This class passes the outcome to `future`; a derived class overrides the methods.
    """

    __slots__ = (
        "file",
        "index",
        "offset",
        "length",
        "into",
        "future",
        "deadline_s",
        "tries",
        "reason",
        "verify",
        "tried",
        "second",
        "insisted",
        "burst",
    )

    def __init__(
        self,
        file: OpenInode,
        index: int,
        offset: int,
        length: int,
        into: memoryview | None,
        future: Any,
        deadline_s: float,
    ) -> None:
        self.begin(file, index, offset, length, deadline_s)
        self.into = into
        self.future = future

    def begin(self, file: OpenInode, index: int, offset: int, length: int, deadline_s: float) -> None:
        """Set the blocks to read and the deadline."""
        self.file = file
        self.index = index
        self.offset = offset
        self.length = length
        self.deadline_s = deadline_s
        self.into: memoryview | None = None
        self.future: Any = None
        self.tries = 0
        self.reason: NvpoolError | None = None
        self.verify = False
        self.second = False  # whether it repeats a read that was sent to another replica before
        self.insisted = False  # whether a task asks other replicas until one has answered
        # replicas that failed, since the last time that all had failed
        self.tried: tuple[ReadQueue, ...] = ()
        self.burst = _NO_BURST

    def done(self) -> bool:
        """Whether the read has ended."""
        return bool(self.future.done())

    def set_result(self, blocks: memoryview) -> None:
        """End with these bytes, decrypted."""
        self.future.set_result(blocks)

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self.future.set_exception(error)

    def take(self, reply: ReceivedReply, first: int, length: int) -> None:
        """End with payload[first : first + length], which is good; the rest of the read is a hole."""
        if self.done():
            return  # the caller gave up and owns the buffer again
        file, into = self.file, self.into
        if file.key is None and into is None and length == self.length:
            self.set_result(reply.keep(first, length))
            return
        whole = memoryview(bytearray(self.length)) if into is None else into
        if file.key is not None:
            file.key.cipher.decrypt(
                file.inode, self.index, self.offset >> 12, reply.view(first, length), whole[:length]
            )
        else:
            reply.copy_to(whole, first, length)  # nothing moves if the transport received in place
        if into is not None and length != self.length:
            into[length:] = bytes(self.length - length)
        self.set_result(whole)


def submit_into(
    connection,
    lane: ReadQueue,
    message: bytes,
    into: memoryview,
    future: asyncio.Future,
    deadline_s: float,
    on_done,
) -> Callable[[], None]:
    """Submit a read whose bytes are received directly into the caller's memory.

    The caller gets the memory back by cancelling `future`, or by calling the result of this function: nothing
    is received there any more, and `on_done` is not called.
    """
    ended = False

    def done(reply, error) -> None:
        nonlocal ended
        if not ended:
            ended = True
            on_done(reply, error)

    def end() -> None:
        nonlocal ended
        if not ended:
            ended = True
            connection.give_up(number)
            lane.in_flight -= 1

    number = connection.submit(wire_pb2.DATA_READ, message, deadline_s=deadline_s, into=into, on_done=done)
    future.add_done_callback(lambda future: end() if future.cancelled() else None)
    return end


def error_of(status: int, job: Read) -> NvpoolError:
    cls = errors.BY_WIRE_CODE.get(status, Unavailable)
    what = (cls.__doc__ or cls.__name__).split("\n")[0].rstrip(".")
    return cls(f"{what} (inode {job.file.inode}, chunk {job.index}, offset {job.offset})")


def mismatch(job: Read, lane: ReadQueue) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"a block that target {lane.target} sent does not have its checksum (inode {job.file.inode}, "
        f"chunk {job.index}, offset {job.offset}, {job.length} bytes)"
    )
