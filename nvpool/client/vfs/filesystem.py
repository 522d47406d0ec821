"""The file system of a client: all its operations in one class."""

from __future__ import annotations

from nvpool.client.vfs.listing import Listing
from nvpool.client.vfs.many import Many
from nvpool.client.vfs.ranges import Ranges
from nvpool.client.vfs.takeover import TakeOver
from nvpool.client.vfs.wholes import Wholes


class Vfs(Many, Ranges, Listing, TakeOver, Wholes):
    """Made by client/session."""
