"""Write verifier: a number by which clients know whether their unstable writes are still there.

The verifier stays the same after the death of a process: that process's writes are in the page cache, and the
open of the store reads, compares and flushes them. The verifier changes when writes may be lost: after a
reboot of the machine that found the store not closed, after the drive failed a sync, or if blocks of
acknowledged writes are not on the drive. It corresponds to the write verifier of NFS (RFC 8881, 18.32.3). The
index stores it under one key.

`block_store` calls this module when it opens and closes a store.
"""

from __future__ import annotations

import struct

from nvpool.core.clock import Clock
from nvpool.kv.api import Kv

_KEY = b"V"
_RECORD = struct.Struct("<BBQ")
_FORMAT = 1


def opened(kv: Kv, clock: Clock, boot: str, *, lost: bool) -> int:
    """Return the verifier from now on, and record that the store is open.

    `boot` names the boot of this machine. `lost` says that data is known to be lost or is not guaranteed. The
    record is durable with the caller's next flush; the caller answers no request before that flush.
    """
    raw = kv.get(_KEY)
    before = 0  # 0 means unknown
    if raw is not None and raw[0] == _FORMAT:
        _, closed, before = _RECORD.unpack_from(raw)
        lost = lost or (not closed and raw[_RECORD.size :].decode() != boot)
    number = before
    while not number or (lost and number == before):
        number = int.from_bytes(clock.secret(8), "little")
    kv.apply([(_KEY, _RECORD.pack(_FORMAT, False, number) + boot.encode())], reclaims=True)
    return number


async def closed(kv: Kv, number: int) -> None:
    """Record a clean close: all acknowledged writes are durable, and the store answers no more requests."""
    await kv.room()
    await kv.sync(kv.apply([(_KEY, _RECORD.pack(_FORMAT, True, number))], reclaims=True))
