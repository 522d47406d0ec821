"""The names of things: inodes, chunks, versions, sessions, targets.

All are plain integers on the hot paths (a class instance per read would cost more than the read); the types below are
`NewType`s for readers and checkers. What has structure has functions that take it apart.

Inode number, 63 bits, so that it is positive as a signed 64-bit integer everywhere:

    bits 62..51  partition (0..4095)      bits 50..0  counter within the partition, never given twice

The root directory is partition 0, counter 1: the inode number 1, as FUSE wants it.

Version of a chunk, 64 bits: chain epoch (32) above a counter (32). Versions of one chunk are ordered as integers.
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
    """A chunk's name: the inode and the index of the chunk in the file. It is never used for other bytes, because
    inode numbers are never given twice."""

    inode: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs


LIFE_BITS = 40
"""A session may outlive the process that began it (a mount's, which is replaced). Sequences of its n-th process begin at
n << LIFE_BITS."""


class RequestId(NamedTuple):
    """Names one request of one client for ever: a session, one of its 64 slots, and that slot's sequence number."""

    session: int
    slot: int
    sequence: int


def is_done(done: Iterable[tuple[int, int, int]], request: RequestId) -> bool:
    """Whether that request is not to be carried out any more where these were, the last ones: it was, or a later one of its
    slot, or one of a later process of the session, which knows all that the earlier one has left and has sent it anew."""
    session, slot, sequence = request
    for its_session, its_slot, last in done:
        if its_session == session and sequence <= last and (its_slot == slot or sequence >> LIFE_BITS < last >> LIFE_BITS):
            return True
    return False


def inode_number(partition: int, counter: int) -> InodeNumber:
    if not (0 <= partition < PARTITION_COUNT and 0 < counter <= COUNTER_MASK):
        raise ValueError(f"no inode number has partition {partition} and counter {counter}")
    return InodeNumber(partition << COUNTER_BITS | counter)


def is_inode_number(number: int) -> bool:
    """Whether an inode can have this number; for numbers in messages that were not checked."""
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
    """(chain epoch, counter)."""
    return value >> 32, value & 0xFFFFFFFF


_INODE_KEY = struct.Struct(">Q")


def inode_key(inode: int) -> bytes:
    """Eight bytes, big-endian, so that keys sort by partition and then by counter."""
    return _INODE_KEY.pack(inode)
