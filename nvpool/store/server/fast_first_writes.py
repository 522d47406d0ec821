"""The first write of a new small file, answered where it arrives: from the frame of the request to the frame of the answer.

Most of what such a write costs a store is a hundred small decisions: a message and a grant read, a chunk and an inode looked
up that are not there, a block chosen, two records made. Here they are made together, compiled (`_newwrites`).

Only plain sailing: a frame that is whole, one write within the first block of a chunk, by one grant of that inode and session,
of the map of the moment; of an inode of which the index has nothing, which is known without a look into it; by a target that
holds all its chains alone, on a drive and in an index with room, where nobody watches; a block is free in the group that small
writes go to. Whatever else it is goes the way of every request (`writeone`, `writes`), before anything has happened; that way
alone has refusals. What is answered here is answered there with the same bytes, written with the same records, counted the same
and in the same order: bytes to the drive, the change that names them, the answer. What the engine then refuses is answered as
there, and leaves everything as it was.

There is no twin in Python: without a compiler all is decided the ordinary way. Made by store/server/service; asked by the reads
that are answered at once (`_atonce`), to which a listener gives its frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvpool.core.compiled import load_compiled
from nvpool.kv.engine import LmdbKv
from nvpool.store.server import fast_reads

if TYPE_CHECKING:
    from nvpool.store.server.service import StoreService

_fast_first_writes = load_compiled("nvpool.store.server._fast_first_writes")


def answer_new_writes(service: StoreService, secret: bytes) -> None:
    """Have what answers the service's reads at once answer such writes too, where it is compiled and reads a drive."""
    reads, store = service.at_once, service.store
    if _fast_first_writes is None or fast_reads._fast_reads is None or type(reads) is not fast_reads._fast_reads.Reads:
        return
    if type(store.kv) is LmdbKv and store.kv.on_apply is None:  # what is in the index is known by being told of each change
        reads.writes = _fast_first_writes.NewWrites(
            service.target, service._grants, secret, store, service.replica, service.tenure, service.clock
        )
