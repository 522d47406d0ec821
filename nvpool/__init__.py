"""One fast, shared file system from the NVMe drives of ordinary servers."""

from nvpool.base.version import VERSION as __version__

__all__ = ["__version__"]
