"""Migration of sessions together with their open files and locks.

A session keeps its number, so that its locks stay valid. If its client has a session at the destination, or
opens one, that session gets everything that has arrived. Used by `source` and `destination`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nvpool.core.ids import partition_of
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.state.session_records import encode_session
from nvpool.rpc.v1.moving_pb2 import MovedSession

OPENS_MAX = 16_384
"""Highest number of handles in one message."""


def sessions_to_move(inside: ShardContext, partitions: frozenset[int]) -> Iterator[MovedSession]:
    """Sessions that have files of these partitions open or locked, with their open inodes.

    A session with many open files comes several times. Sessions may open and end between two of them.
    """
    locking = inside.locks.sessions_in(partitions)
    for session in list(inside.sessions.by_number.values()):
        opened = [
            inode
            for inode, count in session.opens.items()
            if partition_of(inode) in partitions
            for _ in range(count)
        ]
        if not opened and session.number not in locking:
            continue
        record = encode_session(session.record)
        for begin in range(0, max(len(opened), 1), OPENS_MAX):
            part = opened[begin : begin + OPENS_MAX]
            yield MovedSession(
                session=session.number, record=record, opened=struct.pack(f"<{len(part)}Q", *part)
            )


def bring_all(inside: ShardContext) -> None:
    """Merge migrated sessions into this shard's sessions of the same clients.

    Busy: the engine is full, and some sessions are not merged yet; repeat.
    """
    for arrived, session in inside.sessions.migrated_duplicates():
        effects = inside.locks.bringing(arrived.number, session.number)
        inside.kv.apply([*effects, *inside.sessions.ending(arrived)], reclaims=True)
        inside.locks.bring(arrived.number, session.number)
        inside.sessions.bring(session, arrived)
