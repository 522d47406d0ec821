"""Fast path for the most common write: one write within one block.

This path avoids the objects that batches need. `store/server/write_batch` answers the same request with the
same bytes. Made by `store/server/service`.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError
from nvpool.core.ids import RequestId
from nvpool.core.units import BLOCK_BYTES
from nvpool.rpc.api import Call
from nvpool.rpc.messages.read_write_codec import decode_write_request, encode_write_reply
from nvpool.store.chunks.api import ChunkStore, MustWait
from nvpool.store.chunks.read_batch import RESULT
from nvpool.store.replication.role import Replica
from nvpool.store.server.io_stats import IoStats
from nvpool.store.server.map_state import MapState
from nvpool.store.server.serving_lease import ServingLease
from nvpool.store.server.write_batch import WRITE


class SingleWrites:
    """Fast path of a target for one write."""

    def __init__(
        self,
        target: int,
        replica: Replica,
        map_state: MapState,
        *,
        store: ChunkStore,
        grant: Callable[[bytes, int], grants.Grant | None],
        use: IoStats,
        serving_lease: ServingLease,
        clock: Clock,
    ) -> None:
        """`grant` returns the verified grant for its bytes and the time in ms; None if it is not valid."""
        self._target = target
        self._replica = replica
        self._map_state = map_state
        self._store = store
        self._grant = grant
        self._use = use
        self._serving_lease = serving_lease
        self._clock = clock

    def try_write(self, call: Call) -> bool:
        """Try to apply and answer the write; return whether it was answered here.

        This path takes one write within a block, by one grant, with the current map epoch, to a chunk whose
        chain has no other target, for which there is space. Otherwise nothing has happened, and the request
        takes the slow path.
        """
        found = decode_write_request(call.message)
        if found is None or found[0] != self._map_state.epoch or found[1] != self._target or self._use.on:
            return False
        epoch, _, raw, writes, checksums, session, slot = found
        inode, cut, sequence, index, offset, length, number, _ = WRITE.unpack(writes)
        payload, replica = call.payload, self._replica
        if (
            length != len(payload)
            or not length
            or (offset & BLOCK_BYTES - 1) + length > BLOCK_BYTES
            or number
            or not session
            or replica.losing
            or self._store.places_first(offset, length)
        ):
            return False
        grant = self._grant(raw, self._clock.wall_ns() // 1_000_000)
        if (
            grant is None
            or not grant.rights & grants.WRITE
            or grant.rights & (grants.SERVICE | grants.ENCRYPTED)
            or grant.inode != inode
            or cut > grant.cut
            or grant.session != session
        ):
            return False
        status = version = 0
        try:
            if replica.shares and replica.is_shared(grant.table, inode, index):
                return False
            version = replica.write_now(
                inode,
                index,
                offset,
                memoryview(payload),
                checksums,
                cut=cut,
                request=RequestId(session, slot, sequence),
                table=grant.table,
            )
        except MustWait:
            return False
        except NvpoolError as error:
            status = error.wire_code
        if self._serving_lease.shared:
            self._serving_lease.check()
        call.reply(encode_write_reply(epoch, RESULT.pack(status, 0, 0, version)))
        return True
