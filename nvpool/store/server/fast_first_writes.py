"""Fast path for the first write of a new small file, from frame to frame.

Most of the cost of such a write is a hundred small decisions: decode a message and a grant, look up a chunk
and an inode that do not exist, choose a block, make two records. This path makes them together, in compiled
code (`_fast_first_writes`).

The path takes a request only under all of these conditions:

* The frame is complete, with one write within the first block of a chunk, by one grant of that inode and
  session, with the current map epoch.
* The index has nothing of the inode, which is known without a look-up.
* The drive and the index have space, and no client watches the I/O statistics.
* A block is free in the allocation group for small writes.
* The target is the head of the chunk's chain, and its serving lease holds. No write or truncation of the chunk
  waits or runs.

Any other request takes the slow path (`single_write`, `write_batch`), before anything has happened; only the
slow path refuses requests. The slow path gives the same answers with the same bytes, the same records and the
same counts, in the same order: bytes to the drive, the change that names them, the answer. If the kv engine
refuses the change, the answer is that of the slow path, and the state is unchanged.

In a chain with several members the path is the same at each member, and the member before takes the place of
the client. The last member does as above. Each other one puts the bytes on its drive, holds the block, and
offers the write to its successor; a successor offers it on in the same way. The change is applied when the
successor's reply says that all members after it have committed. Meanwhile the write is pending in
`store/replication/chain_writes`, so reads, truncations and other writes of the chunk wait as for any pending
write. Any other reply, an error, a timeout or a changed chain passes the pending write to a task of
`chain_writes`, and its request to the slow path, where the request waits for that write by its name. Offers
and replies that arise together are sent together.

There is no Python implementation: without a compiler, all requests take the slow path. `store/server/service`
creates this path; the reads of the target (`reads`), to which a listener passes its frames, call it.
"""

from __future__ import annotations

from typing import Protocol

from nvpool.core.compiled_loader import load_compiled
from nvpool.core.grants import Grant
from nvpool.kv.engine import LmdbKv
from nvpool.rpc.access_control import Callers
from nvpool.store.disk.device import FileDevice
from nvpool.store.server.map_state import MapState
from nvpool.store.server.reads import Reads
from nvpool.store.server.serving_lease import ServingLease
from nvpool.store.server.write_batch import WriteService

_fast_first_writes = load_compiled("nvpool.store.server._fast_first_writes")


class FirstWriteService(WriteService, Protocol):
    """Interface of the target's service that this path uses."""

    @property
    def target(self) -> int:
        """Number of the target."""

    @property
    def fast_path(self) -> Reads | None:
        """Reads of the target from frame to frame; None if every request takes the slow path."""

    @property
    def known_grants(self) -> dict[bytes, Grant]:
        """Verified grants by their bytes."""

    @property
    def serving_lease(self) -> ServingLease:
        """Lease under which the target answers."""

    @property
    def map_state(self) -> MapState:
        """Pool map of the target."""

    @property
    def callers(self) -> Callers:
        """Callers of the target and their rights."""


def answer_new_writes(service: FirstWriteService, secret: bytes) -> None:
    """Add this fast path to the service's reads.

    Does nothing unless it is compiled and the store is on a file or a drive.
    """
    reads, store = service.fast_path, service.store
    if _fast_first_writes is None or reads is None or type(store.device) is not FileDevice:
        return
    if type(store.kv) is LmdbKv:
        reads.writes = _fast_first_writes.FastFirstWrites(
            service.target,
            service.known_grants,
            secret,
            store,
            service.replica,
            service.serving_lease,
            service.map_state,
            service.callers,
            service.clock,
        )
