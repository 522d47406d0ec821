"""Events among the parts of one client.

The parts refer to one another in a circle: the cache notifies the writer of truncations, and the writer reports to
the service through the metadata client, whose replies fill the cache. So each part gets the same `ClientEvents` when
it is made; it calls the listeners of its own events, and adds listeners to the events of other parts in its
constructor. Listeners are called in the order in which they were added.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


class ClientEvents:
    """Listeners of a client's parts, by event. Except for those of leases they must not wait."""

    __slots__ = (
        "file_changed",
        "file_truncated",
        "leases_ended",
        "leases_recalled",
        "opens_reported",
        "session_lost",
        "shard_restarted",
    )

    def __init__(self) -> None:
        self.leases_recalled: list[Callable[[list[int]], Awaitable[None]]] = []
        """Called with inodes whose leases were recalled because another client is about to change them.

        The other client makes its change when all listeners have returned.
        """
        self.leases_ended: list[Callable[[int], Awaitable[None]]] = []
        """Called with a shard that has ended all leases, before this client acknowledges that."""
        self.opens_reported: list[Callable[[list[int]], None]] = []
        """Called with inodes whose opens by a lease are now reported to the shard."""
        self.shard_restarted: list[Callable[[int], None]] = []
        """Called when a shard has restarted, before its replies are used again."""
        self.session_lost: list[Callable[[int], None]] = []
        """Called with a shard whose session, with its locks and opens, has ended, before a new one starts."""
        self.file_changed: list[Callable[[Any], None]] = []
        """Called with an open inode (state/metadata_cache) before attributes of another change replace its own."""
        self.file_truncated: list[Callable[[Any], None]] = []
        """Called with an open inode that was truncated while it has local writes."""
