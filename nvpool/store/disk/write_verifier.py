"""A number that tells clients whether what this target answered and did not flush is still there.

It stays the same over the death of a process: what that wrote is in the page cache, and is read, compared and flushed when the
store is opened. It is another one when that may be lost: after a boot of the machine that found the store not closed, after the
drive refused a sync, or where blocks of answered writes turned out not to be on the drive. As the write verifier of NFS
(RFC 8881, 18.32.3). Kept in the index, under one key.

Called by block_chunkstore when a store is opened and closed.
"""

from __future__ import annotations

import struct

from nvpool.core.clock import Clock
from nvpool.kv.api import Kv

_KEY = b"V"
_RECORD = struct.Struct("<BBQ")
_FORMAT = 1


def opened(kv: Kv, clock: Clock, boot: str, *, lost: bool) -> int:
    """The number from now on; `boot` names the boot of this machine, `lost`: something is known to be lost, or not vouched for.
    Durable with the caller's next flush, before which it answers nothing."""
    raw = kv.get(_KEY)
    before = 0  # which says: not known
    if raw is not None and raw[0] == _FORMAT:
        _, closed, before = _RECORD.unpack_from(raw)
        lost = lost or (not closed and raw[_RECORD.size:].decode() != boot)
    number = before
    while not number or (lost and number == before):
        number = int.from_bytes(clock.secret(8), "little")
    kv.apply([(_KEY, _RECORD.pack(_FORMAT, False, number) + boot.encode())], reclaims=True)
    return number


async def closed(kv: Kv, number: int) -> None:
    """All that was answered is durable, and nothing is answered any more."""
    await kv.room()
    await kv.sync(kv.apply([(_KEY, _RECORD.pack(_FORMAT, True, number))], reclaims=True))
