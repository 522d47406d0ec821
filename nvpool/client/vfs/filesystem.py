"""The file system of a client: one class with all operations."""

from __future__ import annotations

from nvpool.client.lookup.complete_dirs import Wholes
from nvpool.client.vfs.bulk import Many
from nvpool.client.vfs.fallocate import Ranges
from nvpool.client.vfs.listing import Listing
from nvpool.client.vfs.takeover import TakeOver


class Vfs(Many, Ranges, Listing, TakeOver, Wholes):
    """All operations of a client's file system. Made by client/session."""
