"""Options of a client: bounds and times, one value for all of its parts.

Every queue and cache of the client has its bound here.
"""

from __future__ import annotations

from typing import NamedTuple

from nvpool.core.config import ClientSection
from nvpool.core.units import MIB


class ClientOptions(NamedTuple):
    """The options of a client."""

    deadline_s: float = 60.0
    """Deadline of every operation.

    Longer than any failover, so a restarted daemon causes a pause, not an error.
    """
    attr_s: float = 1.0
    """How long cached attributes and names without a lease are used to walk paths."""
    fresh_s: float = 0.05
    """How long `lookup` and `getattr` use cached data without a lease.

    Short, because a kernel has a cache of its own, whose age adds up.
    """
    cached_entries: int = 200_000
    write_buffer_bytes: int = 64 * MIB
    """Written and not yet stored bytes of all files; a writer waits above this bound."""
    write_flight_bytes: int = 16 * MIB
    """Part of those in flight to the stores: enough for 8 targets to have two pieces each."""
    write_age_s: float = 1.0
    """Older bytes are sent, and sizes reported, without a request by the application."""
    read_ahead_bytes: int = 8 * MIB
    """Read-ahead of one handle: pieces of 1 MiB from several targets at the same time.

    Measured: more brings nothing on one host.
    """
    read_ahead_bytes_max: int = 128 * MIB
    """Read-ahead of all handles together; above this bound reads run without read-ahead."""
    transport: str = "auto"
    """The scheme of the only transport to use, or auto: the best one that both ends have.

    Short-circuit reads are not a transport.
    """
    short_circuit: bool = True
    """Read from drives of this host without their daemon (short-circuit reads), if the daemon allows this."""
    direct_reads: bool = False
    """Let larger short-circuit reads that miss the kernel's page cache of the drive bypass that cache.

    For front ends with a cache of their own, as the kernel has one for a mount; others would read the drive
    again each time.
    """
    locations_bytes: int = 64 * MIB
    """Memory for block locations: about 1.3 KiB for each MiB that was read within the last seconds."""
    rack: str = ""
    """Rack of a client whose host is not a node of the pool. Reads prefer replicas in that rack."""
    retry_first_s: float = 0.01
    retry_last_s: float = 0.5
    release_s: float = 0.1
    """Interval of the batches that report closed handles to the metadata service."""
    leases: bool = True
    """Open, look up and stat without a request while a lease promises notice before any change."""
    report_opens_s: float = 0.2
    """Delay before opens of small files by a lease are reported.

    They are reported in batches, if the files are still open. Larger files are reported immediately: they
    stay open for longer, and must stay readable when the service falls silent.
    """
    late_closes: bool = True
    """Complete the close of a new file before its data is at the stores, if its bytes survive this process.

    For mounts: only those have memory that outlives their process.
    """
    small_bytes: int = 64 * MIB
    """Cache for the contents of small files (64 KiB and less) that were read as a whole."""


def configured(section: ClientSection) -> ClientOptions:
    """The options from a node's configuration: all keys with the same names as here.

    The times of the kernel's caches belong to the mount.
    """
    return ClientOptions(
        **{name: getattr(section, name) for name in ClientOptions._fields if hasattr(section, name)}
    )
