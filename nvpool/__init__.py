"""One fast, shared file system from the NVMe drives of ordinary servers.

    import nvpool
    pool = nvpool.connect("/srv/pool")          # or "host:port" of any node
    pool.read_many([("/train/a.bin", 0, 4096), …], into=buffer)

Importing this package loads nothing but the version: the client comes with the first use of one of the names below, because
the command line and every daemon import it too.
"""

from nvpool.core.compiled_loader import prefer_sources
from nvpool.core.version import VERSION as __version__

prefer_sources()

TYPE_CHECKING = False
if TYPE_CHECKING:  # type checkers of users see what `__getattr__` gives; they know this name, and `typing` is not loaded for it
    from nvpool.sdk.async_filesystem import AsyncFileSystem, connect_async
    from nvpool.sdk.filesystem import FileSystem, connect

_LAZY = {
    "connect": "nvpool.sdk.filesystem",
    "connect_async": "nvpool.sdk.async_filesystem",
    "FileSystem": "nvpool.sdk.filesystem",
    "AsyncFileSystem": "nvpool.sdk.async_filesystem",
}

__all__ = ["AsyncFileSystem", "FileSystem", "__version__", "connect", "connect_async"]


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'nvpool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
