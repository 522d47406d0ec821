"""Argument of connect(): a pool directory, mount point, address or pool map.

An Origin holds all that is needed to connect again, also in another process. So it is the whole pickle of a
file system: no socket, no session. The SDK's file systems use it.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from nvpool.client.state.options import ClientOptions
from nvpool.core.errors import InvalidRequest, NotADirectory, NotFound
from nvpool.host.mountinfo import mount_over, place_of, pool_of
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import PoolMap, decode_map, encode_map
from nvpool.sdk.argument_checks import text
from nvpool.sdk.paths import as_detailed_os_error

_WANTED = "name the directory of a pool, a mount point of one, or HOST:PORT of any of its nodes"


class Origin(NamedTuple):
    """Data needed to connect to a pool. `where` is a path or an address; `pool_map` replaces it if the
    program passed a PoolMap."""

    where: str = ""
    name: str = ""
    options: ClientOptions | None = None
    pool_map: bytes = b""

    @property
    def place(self) -> str | PoolMap:
        """Argument `where` of Client.open."""
        return decode_map(self.pool_map) if self.pool_map else self.where


def origin_of(where: Any, name: str, options: ClientOptions | None) -> Origin:
    """Check the arguments of connect() and resolve the pool. Paths become absolute; a mount point becomes the
    mounted pool.

    TypeError  `where` is neither text, a path nor a PoolMap, `name` is not text, or `options` is not
               ClientOptions
    OSError    `where` does not name a pool: FileNotFoundError, NotADirectoryError or EINVAL; the text says
               what would
    """
    text("name", name)
    if options is not None and not isinstance(options, ClientOptions):
        raise TypeError(f"options has to be ClientOptions or None, not {type(options).__name__}")
    if isinstance(where, PoolMap):
        return Origin(name=name, options=options, pool_map=encode_map(where))
    if not isinstance(where, str | bytes | os.PathLike):
        raise TypeError(
            f"connect() takes a pool directory, a mount point or HOST:PORT, not {type(where).__name__}"
        )
    with as_detailed_os_error(where):
        return Origin(resolved(os.fsdecode(where)), name, options)


def resolved(place: str) -> str:
    """Absolute directory or address of the pool that `place` names. Errors: NotFound, NotADirectory,
    InvalidRequest."""
    if not place:
        raise NotFound(f"'' names no pool; {_WANTED}")
    if "://" in place:
        return place
    mount = mount_over(place)
    if mount is not None and mount.ours:
        point = str(mount.point)
        if place_of(place) != mount.point:
            raise InvalidRequest(
                f"{place} lies inside the pool that is mounted at {point}; connect to {point}, and name the "
                f"path in the calls"
            )
        behind = pool_of(mount)
        if behind is None:
            raise NotFound(
                f"{place} is a mount of the pool {mount.source}, and the process that serves it cannot be seen "
                f"from here; name the directory of that pool, or HOST:PORT of any of its nodes"
            )
        pool, subtree = behind
        if subtree.strip("/"):
            raise InvalidRequest(
                f"{place} shows the directory {subtree} of the pool {pool}; connect to {pool}, whose paths "
                f"begin at the root of the pool"
            )
        return pool
    if os.path.isdir(place):
        directory = PoolDirectory(place)
        if not directory.poolmap.exists() and not directory.exists():
            raise NotFound(
                f"{place} is a directory, but not one of a pool, and no pool is mounted there; {_WANTED}"
            )
        return str(directory.path)
    if os.path.lexists(place):
        raise NotADirectory(f"{place} is not a directory; {_WANTED}")
    host, _, port = place.rpartition(":")
    if "/" in place or not host:
        raise NotFound(f"{place} does not exist; {_WANTED}")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"{place} is not an address: the port has to be a number from 1 to 65535, as in 10.0.0.1:17512"
        )
    return place
