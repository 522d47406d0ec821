"""Location of the pool map on a node, DIR/coordinator.json: the embedded coordinator, etcd, or in transition.

The file is replaced atomically; without the file the map is in the embedded coordinator. Written by
node/coordination/map_backend, which moves the map, and by a node that joins a pool (provision/join,
provision/external_etcd).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from nvpool.core.errors import CorruptRecord
from nvpool.host.pool_directory import PoolDirectory, write_whole

EXTERNAL_SECRET = "external-etcd"
"""Directory below secret/ with the certificate for an operator's own etcd.

The file names are the usual ones.
"""


class OwnMember(msgspec.Struct, frozen=True):
    """The etcd member that this node runs. `cluster`: (node, peer's host:port) of its first cluster."""

    node: int
    client: str
    peer: str
    cluster: tuple[tuple[int, str], ...]
    token: str
    state: Literal["new", "existing"] = "new"
    generation: int = 0
    """Generation number as in the map; each generation has its own directory."""
    alone: bool = False
    """The member is being made the only one, with what it knows: most others are lost for good
    (`recover`)."""

    def data(self, directory: PoolDirectory) -> Path:
        return directory.path / (f"etcd-{self.generation}" if self.generation else "etcd")


class MapLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["embedded", "moving", "etcd"] = "embedded"
    members: tuple[str, ...] = ()
    own: OwnMember | None = None
    external: Literal["", "plain", "secured"] = ""
    """Set for an operator's own etcd (provision/external_etcd): with or without TLS."""


def read_map_location(directory: PoolDirectory) -> MapLocation:
    try:
        return msgspec.json.decode((directory.path / "coordinator.json").read_bytes(), type=MapLocation)
    except FileNotFoundError:
        return MapLocation()
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptRecord(f"{directory.path}/coordinator.json cannot be read: {error}") from None


def write_map_location(directory: PoolDirectory, location: MapLocation) -> None:
    write_whole(directory.path / "coordinator.json", msgspec.json.encode(location))
