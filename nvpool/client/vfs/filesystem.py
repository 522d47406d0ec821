"""The file system of a client: one class with all operations."""

from __future__ import annotations

from nvpool.client.vfs.bulk_operations import BulkOperations
from nvpool.client.vfs.complete_dirs import CompleteDirectories
from nvpool.client.vfs.listing import DirectoryListing
from nvpool.client.vfs.range_operations import RangeOperations
from nvpool.client.vfs.takeover import Takeover


class Vfs(BulkOperations, RangeOperations, DirectoryListing, Takeover, CompleteDirectories):
    """All operations of a client's file system. Made by client/pool_client."""
