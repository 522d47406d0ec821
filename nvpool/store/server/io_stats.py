"""I/O statistics of a target by session and inode, collected only while a client watches.

While no client watches, the cost is one comparison for each batch. Each request for the statistics says for
how long counting continues, so counting ends by itself when the watcher leaves. The table is bounded:
sessions and inodes without a row of their own are counted together.

The statistics include short-circuit reads, which bypass the store. Clients on this host report them when they
request locations, every few seconds. `store/server/service` calls this module; `nvpool top` requests the
statistics.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from nvpool.core.clock import Clock
from nvpool.rpc.api import Call
from nvpool.rpc.messages.read_write_codec import PAST_READS, decode_read_request
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.read_batch import READ, RESULT

if TYPE_CHECKING:
    from nvpool.core import grants
    from nvpool.store.chunks.api import ReadBatch


class _Written(Protocol):
    """Writes of one request, as they are counted."""

    session: int

    @property
    def headers(self) -> list[tuple[int, ...]]: ...


ROW = struct.Struct("<QQQQdQQdQQ")
"""Layout of one row; see UseReply."""
ROWS_MAX = 4096
FOR_S_MAX = 60.0
PAST_READS_MAX, PAST_BYTES_MAX = 1 << 32, 1 << 50
"""Limits for one inode in one client message.

Larger values are a client error and would spoil the figures of other clients.
"""


class IoStats:
    def __init__(self, clock: Clock, known: dict[bytes, grants.Grant]) -> None:
        """Create empty statistics. `known` maps the bytes of verified grants to the grants."""
        self._clock = clock
        self._known = known
        self._rows: dict[tuple[int, int], list] = {}
        self._counting = 0
        self._until_s = 0.0
        self.on = False
        """Whether a client watches; check this before `read` and `wrote`."""
        self.past_reads = self.past_bytes = 0

    def _row(self, session: int, inode: int) -> list:
        """Return the row of a session and inode.

        In a full table, a session has one row for all further inodes. A session without any space for that
        shares the row of session 0.
        """
        row = self._rows.get((session, inode))
        if row is None:
            if len(self._rows) >= ROWS_MAX:
                session = session if (session, 0) in self._rows or len(self._rows) < 2 * ROWS_MAX else 0
                inode = 0
            row = self._rows.setdefault((session, inode), [0, 0, 0.0, 0, 0, 0.0, 0, 0])
        return row

    def _session(self, rights: Sequence[bytes]) -> int:
        """Return the session of a message; every sender has one."""
        grant = self._known.get(bytes(rights[0])) if rights else None
        return grant.session if grant is not None else 0

    def read(self, call: Call, batch: ReadBatch) -> None:
        """Count a batch of reads that is being answered."""
        if not self._watched():
            return
        _, _, rights, reads, _ = decode_read_request(call.message)
        session, took_s = self._session(rights), self._clock.boottime_s() - call.since_s
        for (inode, *_), (_, _, length, _) in zip(
            READ.iter_unpack(reads), RESULT.iter_unpack(batch.results), strict=False
        ):
            row = self._row(session, inode)
            row[0] += 1
            row[1] += length
            row[2] += took_s

    def wrote(self, call: Call, batch: _Written) -> None:
        if not self._watched():
            return
        took_s = self._clock.boottime_s() - call.since_s
        for inode, _, _, _, _, length, _, _ in batch.headers:
            row = self._row(batch.session, inode)
            row[3] += 1
            row[4] += length
            row[5] += took_s

    def past(self, rights: Sequence[bytes], packed: bytes) -> None:
        """Count the short-circuit reads that a client reports. Impossible values are ignored."""
        watched = self.on and self._watched()
        session = self._session(rights) if watched else 0
        for inode, reads, count in PAST_READS.iter_unpack(
            packed[: len(packed) - len(packed) % PAST_READS.size]
        ):
            if reads > PAST_READS_MAX or count > PAST_BYTES_MAX:
                continue
            self.past_reads += reads
            self.past_bytes += count
            if watched:
                row = self._row(session, inode)
                row[6] += reads
                row[7] += count

    def _watched(self) -> bool:
        if self._clock.boottime_s() >= self._until_s:
            self.on = False
            self._rows.clear()
        return self.on

    def report(self, request: pb.UseRequest) -> pb.UseReply:
        now_s = self._clock.boottime_s()
        if not self._watched():
            self._rows.clear()
            self._counting = int.from_bytes(self._clock.secret(8), "little")
        if request.for_s > 0:
            self.on = True
            self._until_s = max(self._until_s, now_s + min(request.for_s, FOR_S_MAX))
        rows = b"".join([ROW.pack(*key, *row) for key, row in self._rows.items()])
        return pb.UseReply(counting=self._counting, now_s=now_s, rows=rows)
