"""Options of the metadata service; the defaults are for production. Set by `daemons/meta`."""

from __future__ import annotations

from typing import NamedTuple


class MetaOptions(NamedTuple):
    """Options of the metadata service; names ending in _s are seconds."""

    session_lease_s: float = 60.0
    grant_s: float = 120.0
    linger_s: float = 5.0
    """Seconds that an unlinked inode stays for clients that opened it without a request. They report such an
    open sooner."""
    watch_s: float = 3.0
    """Longest delay that a dead or stopped lease holder causes to the first change of a file. A client sends
    a message every third of this time; see `meta/sessions/lease_table`."""
    lease_s: float = 60.0
    """Lifetime of a lease on an inode unless another request about the inode renews it."""
    tick_s: float = 1.0
    """Interval between two checks of the leases and of the collector's work."""
    sweep_s: float = 3600.0
    """Interval between two sweeps of all targets for chunks of deleted inodes."""
    sessions: int = 10_000
    sessions_per_peer: int = 2000
    """Limit for a client that is not trusted (rpc/peer_limits); all such clients together may have nine tenths of
    `sessions`."""
    locks_per_peer: int = 262_144
    open_files_per_peer: int = 2_000_000
    """Limit over all sessions of a peer; the sum is computed once per tick."""
    files_max: int = 1 << 40
    """Number of files that statfs shows if the engine has no limit."""
