"""Sessions move with what they have open or locked: under their own numbers, so that locks stay what they are. Where their
client has a session of this shard, or opens one, it gets all that has come.

Used by `giver` and `taker`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nvpool.core.ids import partition_of
from nvpool.meta.migration.shard_context import Inside
from nvpool.meta.state.session_records import encode_session
from nvpool.rpc.v1.moving_pb2 import MovedSession

OPENS_MAX = 16_384
"""Handles in one message."""


def sessions_to_move(inside: Inside, partitions: frozenset[int]) -> Iterator[MovedSession]:
    """The sessions that have files of these partitions open or locked, with what they have open; one with many open files
    comes several times. Others may come and go between two of them."""
    locking = inside.locks.sessions_in(partitions)
    for session in list(inside.sessions.by_number.values()):
        opened = [inode for inode, count in session.opens.items() if partition_of(inode) in partitions for _ in range(count)]
        if not opened and session.number not in locking:
            continue
        record = encode_session(session.record)
        for begin in range(0, max(len(opened), 1), OPENS_MAX):
            part = opened[begin:begin + OPENS_MAX]
            yield MovedSession(session=session.number, record=record, opened=struct.pack(f"<{len(part)}Q", *part))


def bring_all(inside: Inside) -> None:
    """What came with sessions of other shards is that of ours of the same clients. Busy: the engine is full, some are not
    brought yet; repeat."""
    for arrived, session in inside.sessions.strangers():
        effects = inside.locks.bringing(arrived.number, session.number)
        inside.kv.apply([*effects, *inside.sessions.ending(arrived)], reclaims=True)
        inside.locks.bring(arrived.number, session.number)
        inside.sessions.bring(session, arrived)
