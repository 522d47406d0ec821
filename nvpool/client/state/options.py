"""How a client behaves: bounds and times, one value for all of its parts. Every queue and cache has its bound here."""

from __future__ import annotations

from typing import NamedTuple

from nvpool.core.config import ClientSection
from nvpool.core.units import MIB


class ClientOptions(NamedTuple):
    deadline_s: float = 60.0
    """Every operation ends by then. Longer than any failover, so that a restarted daemon is a pause and not an error."""
    attr_s: float = 1.0
    """For how long paths are walked by attributes and entries that are here, where there is no lease on what they tell of."""
    fresh_s: float = 0.05
    """For how long `lookup` and `getattr` answer from here without a lease: a kernel that asks has a cache of its own, whose
    age adds up."""
    cached_entries: int = 200_000
    write_buffer_bytes: int = 64 * MIB
    """Written and not yet stored, over all files; writers wait above it."""
    write_flight_bytes: int = 16 * MIB
    """Of those, on their way to the stores at once: enough for 8 targets to have two pieces each."""
    write_age_s: float = 1.0
    """What is older is sent, and sizes reported, without anybody asking."""
    read_ahead_bytes: int = 8 * MIB
    """Read-ahead of one handle. 1 MiB pieces from several targets at once; measured, more brings nothing on one host."""
    read_ahead_bytes_max: int = 128 * MIB
    """Read-ahead of all handles together; beyond it reads go without."""
    transport: str = "auto"
    """The scheme of the only one to be used, or auto: the best that both ends have. The short cut is none of them."""
    short_cut: bool = True
    """Read from drives of this host without their daemon, where that lets us."""
    direct_reads: bool = False
    """By the short cut larger reads that the kernel does not have in memory go past its cache of the drive. For who has a cache
    of his own, as the kernel has one of a mount; others would read the drive again each time."""
    locations_bytes: int = 64 * MIB
    """For where blocks lie: some 1.3 KiB for each MiB that was read within the last seconds."""
    rack: str = ""
    """Where this client stands, if its host is no node of the pool: replicas of that rack are read before others."""
    retry_first_s: float = 0.01
    retry_last_s: float = 0.5
    release_s: float = 0.1
    """Closed handles are told to the metadata service in batches this far apart."""
    leases: bool = True
    """Open, look up and stat without a question what the metadata service promises to tell us of before it changes."""
    tell_s: float = 0.2
    """Small files that were opened without a question and are still open after so long are registered, in batches. Larger ones
    are at once: they are kept open for longer, and are to be read on when the service falls silent."""
    small_bytes: int = 64 * MIB
    """Contents of small files (64 KiB and less) that were read as a whole."""


def configured(section: ClientSection) -> ClientOptions:
    """What a node's configuration says: all keys that are named as here. The times of the kernel's caches are the mount's."""
    return ClientOptions(**{name: getattr(section, name) for name in ClientOptions._fields if hasattr(section, name)})
