"""Limits of a request's lists, checked before its entries are looked at. Used by `service`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from nvpool.core.errors import InvalidRequest
from nvpool.rpc.messages.read_write_codec import BATCH_ENTRIES_MAX
from nvpool.store.chunks.read_batch import READ

CLIENT_READ_BYTES_MAX = 4 << 20
"""Most bytes that a client reads in several pieces with one request: a millisecond of the event loop. Clients gather
2 MiB (client/data/chunk_client). One piece may be a whole chunk."""


def check_entries(what: str, packed: bytes, entry: struct.Struct) -> None:
    """Check the size of a batch before its entries are looked at; else InvalidRequest."""
    if len(packed) % entry.size:
        raise InvalidRequest(f"{len(packed)} bytes are not whole headers of {what}")
    if len(packed) > BATCH_ENTRIES_MAX * entry.size:
        raise InvalidRequest(
            f"{len(packed) // entry.size} {what} came in one request; send at most {BATCH_ENTRIES_MAX}, and "
            f"more requests"
        )


def check_read_bytes(reads: bytes) -> None:
    """Check how many bytes a client reads with one request; else InvalidRequest."""
    if len(reads) == READ.size:
        return
    total = sum([length for _, _, _, length, _, _ in READ.iter_unpack(reads)])
    if total > CLIENT_READ_BYTES_MAX:
        raise InvalidRequest(
            f"{total} bytes are read in one request; a client may read {CLIENT_READ_BYTES_MAX} in pieces at most: send "
            "more requests"
        )


def check_grants(raws: Sequence[bytes]) -> None:
    """Check the number of grants before they are verified; else InvalidRequest."""
    if len(raws) > BATCH_ENTRIES_MAX:
        raise InvalidRequest(
            f"{len(raws)} grants came in one request; send at most {BATCH_ENTRIES_MAX}, and more requests"
        )
