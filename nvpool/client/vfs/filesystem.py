"""The file system of a client: all its operations in one class."""

from __future__ import annotations

from nvpool.client.lookup.complete_dirs import Wholes
from nvpool.client.vfs.bulk import Many
from nvpool.client.vfs.fallocate import Ranges
from nvpool.client.vfs.listing import Listing
from nvpool.client.vfs.takeover import TakeOver


class Vfs(Many, Ranges, Listing, TakeOver, Wholes):
    """Made by client/session."""
