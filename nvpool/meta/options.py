"""What can be set of a metadata service; the defaults are for production. Given by `daemons/meta`."""

from __future__ import annotations

from typing import NamedTuple


class MetaOptions(NamedTuple):
    session_lease_s: float = 60.0
    grant_s: float = 120.0
    linger_s: float = 5.0
    """How long an unlinked inode stays for opens that asked nobody: a client tells of those within less."""
    watch_s: float = 3.0
    """How long a client that is dead or stopped holds up the first change of a file that it may have a lease on. Clients send a
    message every third of it; see `meta/sessions/lease_table`."""
    lease_s: float = 60.0
    """How long a lease on an inode holds without another question about it."""
    tick_s: float = 1.0
    """Between two looks at leases and at the collector's work."""
    sweep_s: float = 3600.0
    """Between two searches of all targets for chunks of inodes that are gone."""
    sessions: int = 10_000
    sessions_per_peer: int = 2000
    """Of clients that are not trusted (rpc/limits), which may have nine tenths of all together."""
    locks_per_peer: int = 262_144
    open_files_per_peer: int = 2_000_000
    """Over all sessions of a peer, as they are weighed once a tick."""
    files_max: int = 1 << 40
    """What statfs shows where the engine has no limit."""
