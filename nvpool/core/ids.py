"""Identifiers: inode numbers, chunk ids, versions, sessions, targets.

All identifiers are plain integers on the hot paths (a class instance per read would cost more than the read).
The `NewType`s below are for readers and type checkers. Identifiers with internal structure have functions
that split them.

Inode number, 63 bits, so that it is positive as a signed 64-bit integer everywhere:

    bits 62..51  partition (0..4095)      bits 50..0  counter within the partition, never reused

The root directory is partition 0, counter 1. This is inode number 1, which FUSE requires.

Version of a chunk, 64 bits: chain epoch (32) above a counter (32). Versions of one chunk are ordered as
integers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, NewType

from nvpool.core.units import PARTITION_BITS, PARTITION_COUNT

InodeNumber = NewType("InodeNumber", int)
SessionId = NewType("SessionId", int)
TargetId = NewType("TargetId", int)
ShardId = NewType("ShardId", int)
NodeId = NewType("NodeId", int)
DriveId = NewType("DriveId", int)
Epoch = NewType("Epoch", int)
Version = NewType("Version", int)
Cut = NewType("Cut", int)

COUNTER_BITS = 63 - PARTITION_BITS
COUNTER_MASK = (1 << COUNTER_BITS) - 1
ROOT_INODE = InodeNumber(1)


class ChunkId(NamedTuple):
    """Identifier of a chunk: the inode and the index of the chunk in the file.

    A chunk id never refers to other data later, because inode numbers are never reused.
    """

    inode: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used


LIFE_BITS = 40
"""Width of the sequence counter of one process of a session.

A session may outlive the process that opened it (a mount process is replaced while its session continues).
Sequences of the n-th process begin at n << LIFE_BITS."""


class RequestId(NamedTuple):
    """Permanent identifier of one client request: a session, one of its 64 slots, and the slot's sequence
    number."""

    session: int
    slot: int
    sequence: int


def is_done(done: Iterable[tuple[int, int, int]], request: RequestId) -> bool:
    """Return whether `request` must not be executed any more.

    `done` holds the last executed requests as (session, slot, sequence). The answer is True if `done`
    contains this request, a later request of its slot, or a request of a later process of the session. A
    later process knows everything that the earlier process left unfinished and has already sent it again.
    """
    session, slot, sequence = request
    for its_session, its_slot, last in done:
        if (
            its_session == session
            and sequence <= last
            and (its_slot == slot or sequence >> LIFE_BITS < last >> LIFE_BITS)
        ):
            return True
    return False


def inode_number(partition: int, counter: int) -> InodeNumber:
    if not (0 <= partition < PARTITION_COUNT and 0 < counter <= COUNTER_MASK):
        raise ValueError(f"no inode number has partition {partition} and counter {counter}")
    return InodeNumber(partition << COUNTER_BITS | counter)


def is_inode_number(number: int) -> bool:
    """Return whether an inode can have this number; for unverified numbers in messages."""
    return 0 < number < 1 << 63 and number & COUNTER_MASK != 0


def partition_of(inode: int) -> int:
    return inode >> COUNTER_BITS


def counter_of(inode: int) -> int:
    return inode & COUNTER_MASK


def version(chain_epoch: int, counter: int) -> Version:
    if not (0 <= chain_epoch < 1 << 32 and 0 <= counter < 1 << 32):
        raise ValueError(f"no version has chain epoch {chain_epoch} and counter {counter}")
    return Version(chain_epoch << 32 | counter)


def version_parts(value: int) -> tuple[int, int]:
    """Split a version into (chain epoch, counter)."""
    return value >> 32, value & 0xFFFFFFFF


_INODE_KEY = struct.Struct(">Q")


def inode_key(inode: int) -> bytes:
    """Return the inode number as eight big-endian bytes; keys sort by partition and then by counter."""
    return _INODE_KEY.pack(inode)
