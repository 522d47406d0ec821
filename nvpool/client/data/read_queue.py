"""Queues of reads to targets, the reads themselves, and their wire format.

Used by chunk_client and read/batch.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import lru_cache

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core import errors
from nvpool.core.errors import ChecksumMismatch, NvpoolError, Unavailable
from nvpool.core.futures import BlocksFuture
from nvpool.rpc.v1 import wire_pb2


@lru_cache(maxsize=1024)
def reads_struct(count: int) -> struct.Struct:
    return struct.Struct("<" + "QIIIHH" * count)


@lru_cache(maxsize=1024)
def results_struct(count: int) -> struct.Struct:
    return struct.Struct("<" + "HHIQ" * count)


class ReadQueue:
    """The queue to one target: the reads that wait for the end of this event-loop iteration.

    `endpoints` and `distance` (see Replicas) are those of the newest map. Until `shunned_s` other replicas
    are preferred, because this target did not answer or took much longer than they. `took_s`: average
    latency; 0 before the first reply. `measured_s`: time of the last measurement by compiled reads.
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


class Read:
    """A read of whole blocks of one chunk, in flight. The future's result is exactly `length` bytes."""

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
    )

    def __init__(
        self,
        file: OpenInode,
        index: int,
        offset: int,
        length: int,
        into,
        future: asyncio.Future | BlocksFuture,
        deadline_s: float,
    ):
        self.file = file
        self.index = index
        self.offset = offset
        self.length = length
        self.into = into
        self.future = future
        self.deadline_s = deadline_s
        self.tries = 0
        self.reason: NvpoolError | None = None
        self.verify = False
        self.second = False  # whether it repeats a read that was sent to another replica before
        self.insisted = False  # whether a task asks other replicas until one has answered
        self.tried: tuple[
            ReadQueue, ...
        ] = ()  # replicas that failed, since the last time that all had failed


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
