"""Who reads and writes at this target, by session, while somebody watches; and what is read past it.

Costs a comparison for a batch while nobody asks. Whoever asks says for how long counting shall go on, so that it ends by itself
when he goes away. The table is bounded: who has no room any more is counted together as session 0.

Reads past the store are those of the short cut, which clients of this host tell of when they ask for locations, every few
seconds. Called by store/service; asked by `nvpool top`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from nvpool.base.clock import Clock
from nvpool.store.reads import RESULT
from nvpool.wire.codec import decode_read_request
from nvpool.wire.transport import Call
from nvpool.wire.v1 import data_pb2 as pb

if TYPE_CHECKING:
    from nvpool.base import grants
    from nvpool.store.chunkstore import ReadBatch
    from nvpool.store.writes import WriteBatch

ROW = struct.Struct("<QQQdQQdQQ")
"""See UseReply."""
SESSIONS_MAX = 1024
FOR_S_MAX = 60.0
TOLD_READS_MAX, TOLD_BYTES_MAX = 1 << 32, 1 << 50
"""In one message of a client; more is a mistake of it, and would make nonsense of the figures of others."""


class Use:
    def __init__(self, clock: Clock, known: dict[bytes, grants.Grant]) -> None:
        """`known`: grants that were verified, by their bytes."""
        self._clock = clock
        self._known = known
        self._rows: dict[int, list] = {}
        self._counting = 0
        self._until_s = 0.0
        self.on = False
        """Whether somebody watches: ask before `read` and `wrote`."""
        self.past_reads = self.past_bytes = 0

    def _row(self, session: int) -> list:
        row = self._rows.get(session)
        if row is None:
            if len(self._rows) >= SESSIONS_MAX:
                session = 0
            row = self._rows.setdefault(session, [0, 0, 0.0, 0, 0, 0.0, 0, 0])
        return row

    def _session(self, rights: list[bytes]) -> int:
        """Of a message: whoever sent it has one."""
        grant = self._known.get(bytes(rights[0])) if rights else None
        return grant.session if grant is not None else 0

    def read(self, call: Call, batch: ReadBatch) -> None:
        """A batch of reads is being answered."""
        if not self._watched():
            return
        _, _, rights, _, _ = decode_read_request(call.message)
        row, count = self._row(self._session(rights)), len(batch.results) // RESULT.size
        row[0] += count
        row[1] += sum(map(len, batch.payload))
        row[2] += (self._clock.boottime_s() - call.since_s) * count

    def wrote(self, call: Call, batch: WriteBatch) -> None:
        if not self._watched():
            return
        row, count = self._row(batch.session), batch.count
        row[3] += count
        row[4] += len(call.payload)
        row[5] += (self._clock.boottime_s() - call.since_s) * count

    def past(self, rights: list[bytes], reads: int, read_bytes: int) -> None:
        """A client has told what it read past this store."""
        if not reads or reads > TOLD_READS_MAX or read_bytes > TOLD_BYTES_MAX:
            return
        self.past_reads += reads
        self.past_bytes += read_bytes
        if self.on and self._watched():
            row = self._row(self._session(rights))
            row[6] += reads
            row[7] += read_bytes

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
            self._until_s = max(self._until_s if self.on else 0.0, now_s + min(request.for_s, FOR_S_MAX))
        rows = b"".join([ROW.pack(session, *row) for session, row in self._rows.items()])
        return pb.UseReply(counting=self._counting, now_s=now_s, rows=rows)
