"""Who reads and writes what at this target, by session and inode, while somebody watches; and what is read past it.

Costs a comparison for a batch while nobody asks. Whoever asks says for how long counting shall go on, so that it ends by itself
when he goes away. The table is bounded: what has no room of its own any more is counted together.

Reads past the store are those of the short cut, which clients of this host tell of when they ask for locations, every few
seconds. Called by store/server/service; asked by `nvpool top`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvpool.core.clock import Clock
from nvpool.rpc.api import Call
from nvpool.rpc.messages.data_codec import PAST_READS, decode_read_request
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.read_batch import READ, RESULT

if TYPE_CHECKING:
    from nvpool.core import grants
    from nvpool.store.chunks.api import ReadBatch
    from nvpool.store.server.write_batch import WriteBatch

ROW = struct.Struct("<QQQQdQQdQQ")
"""See UseReply."""
ROWS_MAX = 4096
FOR_S_MAX = 60.0
PAST_READS_MAX, PAST_BYTES_MAX = 1 << 32, 1 << 50
"""Of one inode in one message of a client; more is a mistake of it, and would make nonsense of the figures of others."""


class Use:
    def __init__(self, clock: Clock, known: dict[bytes, grants.Grant]) -> None:
        """`known`: grants that were verified, by their bytes."""
        self._clock = clock
        self._known = known
        self._rows: dict[tuple[int, int], list] = {}
        self._counting = 0
        self._until_s = 0.0
        self.on = False
        """Whether somebody watches: ask before `read` and `wrote`."""
        self.past_reads = self.past_bytes = 0

    def _row(self, session: int, inode: int) -> list:
        """A session without room for one more inode has a row for all of those; one without any room shares session 0's."""
        row = self._rows.get((session, inode))
        if row is None:
            if len(self._rows) >= ROWS_MAX:
                session = session if (session, 0) in self._rows or len(self._rows) < 2 * ROWS_MAX else 0
                inode = 0
            row = self._rows.setdefault((session, inode), [0, 0, 0.0, 0, 0, 0.0, 0, 0])
        return row

    def _session(self, rights: Sequence[bytes]) -> int:
        """Of a message: whoever sent it has one."""
        grant = self._known.get(bytes(rights[0])) if rights else None
        return grant.session if grant is not None else 0

    def read(self, call: Call, batch: ReadBatch) -> None:
        """A batch of reads is being answered."""
        if not self._watched():
            return
        _, _, rights, reads, _ = decode_read_request(call.message)
        session, took_s = self._session(rights), self._clock.boottime_s() - call.since_s
        for (inode, *_), (_, _, length, _) in zip(READ.iter_unpack(reads), RESULT.iter_unpack(batch.results), strict=False):
            row = self._row(session, inode)
            row[0] += 1
            row[1] += length
            row[2] += took_s

    def wrote(self, call: Call, batch: WriteBatch) -> None:
        if not self._watched():
            return
        took_s = self._clock.boottime_s() - call.since_s
        for inode, _, _, _, _, length, _, _ in batch.headers:
            row = self._row(batch.session, inode)
            row[3] += 1
            row[4] += length
            row[5] += took_s

    def past(self, rights: Sequence[bytes], packed: bytes) -> None:
        """A client has told what it read past this store. What makes no sense is left out."""
        watched = self.on and self._watched()
        session = self._session(rights) if watched else 0
        for inode, reads, count in PAST_READS.iter_unpack(packed[:len(packed) - len(packed) % PAST_READS.size]):
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

    def tell(self, request: pb.UseRequest) -> pb.UseReply:
        now_s = self._clock.boottime_s()
        if not self._watched():
            self._rows.clear()
            self._counting = int.from_bytes(self._clock.secret(8), "little")
        if request.for_s > 0:
            self.on = True
            self._until_s = max(self._until_s, now_s + min(request.for_s, FOR_S_MAX))
        rows = b"".join([ROW.pack(*key, *row) for key, row in self._rows.items()])
        return pb.UseReply(counting=self._counting, now_s=now_s, rows=rows)
