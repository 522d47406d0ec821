"""MemoryVolumes: a fake of bridge/volumes without a pool and without mounts, for tests of the layers above.

Callers see the behaviour of BridgeVolumes: the same checks of names and options, the same errors in the same
situations; the conformance test of CSI runs on both. A container sees an empty directory where a volume is
published. `silent` makes every request to the pool fail, as if the pool did not answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nvpool.bridge.request_validation import (
    Options,
    checked_holder,
    checked_name,
    checked_subpath,
    parse_options,
)
from nvpool.bridge.volumes import Condition, Stats
from nvpool.core.errors import AlreadyExists, InUse, NotFound, Unreachable
from nvpool.core.units import GIB


class MemoryVolume(NamedTuple):
    """The fields of Volume (sdk/volumes) that the bridge uses."""

    name: str
    bytes_max: int = 0
    files_max: int = 0
    bytes_used: int = 0
    files_used: int = 0
    replicas: int = 1
    sealed: bool = False
    trash_s: int = 0


class _FakeMount(NamedTuple):
    read_only: bool
    subpath: str


class MemoryVolumes:
    def __init__(self, *, node: str = "node-1", pool_bytes: int = 64 * GIB) -> None:
        self.node = node
        self.pool_bytes = pool_bytes
        self.silent = False
        self.elsewhere: set[str] = set()
        """Volumes that are used on another host."""
        self._volumes: dict[str, MemoryVolume] = {}
        self._subpaths: dict[str, str] = {}
        self._held: dict[tuple[str, str], _FakeMount] = {}
        self._published: dict[str, tuple[str, str, bool]] = {}  # target -> volume, holder, read-only

    # -- volumes ---------------------------------------------------------------------------------------------------------

    async def create(self, name: str, options: Options | Mapping[str, Any] | None = None) -> MemoryVolume:
        name = checked_name(name)
        wanted = options if isinstance(options, Options) else parse_options(options)
        self._ask()
        there = self._volumes.setdefault(
            name, MemoryVolume(name, wanted.bytes_max, wanted.files_max, replicas=wanted.replicas or 1)
        )
        for word in ("bytes_max", "files_max", "replicas"):
            if getattr(wanted, word) and getattr(wanted, word) != getattr(there, word):
                raise AlreadyExists(f"the volume {name} is there, with another {word}")
        if wanted.subpath and self._subpaths.setdefault(name, wanted.subpath) != wanted.subpath:
            raise AlreadyExists(f"the volume {name} is there, with another subpath")
        if wanted.sealed:
            self.change(name, sealed=True)
        return self._volumes[name]

    async def remove(self, name: str) -> None:
        name = checked_name(name)
        self._ask()
        if name in self.elsewhere or any(held == name for held, _ in self._held):
            raise InUse(f"the volume {name} is in use")
        self._volumes.pop(name, None)
        self._subpaths.pop(name, None)

    async def get(self, name: str) -> MemoryVolume:
        name = checked_name(name)
        self._ask()
        if name not in self._volumes:
            raise NotFound(f"there is no volume {name}")
        return self._volumes[name]

    async def list(self) -> list[MemoryVolume]:
        self._ask()
        return [self._volumes[name] for name in sorted(self._volumes)]

    async def expand(self, name: str, bytes_max: int) -> MemoryVolume:
        volume = await self.get(name)
        if volume.bytes_max and volume.bytes_max < bytes_max:
            self.change(name, bytes_max=bytes_max)
        return self._volumes[name]

    async def capacity(self) -> int:
        self._ask()
        return max(0, self.pool_bytes - sum(volume.bytes_used for volume in self._volumes.values()))

    async def stats(self, name: str) -> Stats:
        volume, left = await self.get(name), await self.capacity()
        total = volume.bytes_max or volume.bytes_used + left
        return Stats(
            total,
            volume.bytes_used,
            max(0, min(total - volume.bytes_used, left)),
            volume.files_max,
            volume.files_used,
            max(0, volume.files_max - volume.files_used),
        )

    async def condition(self, name: str) -> Condition:
        await self.get(name)
        return Condition(False, "the volume can be used")

    # -- attachments -----------------------------------------------------------------------------------------------------

    async def stage(self, name: str, holder: str, *, read_only: bool = False, subpath: str = "") -> Path:
        name, holder, subpath = checked_name(name), checked_holder(holder), checked_subpath(subpath)
        volume = await self.get(name)
        there = self._held.get((name, holder))
        if there is not None and (read_only > there.read_only or subpath not in ("", there.subpath)):
            raise AlreadyExists(f"{holder} uses the volume {name} already, in another way")
        self._held.setdefault(
            (name, holder), _FakeMount(read_only or volume.sealed, subpath or self._subpaths.get(name, ""))
        )
        return Path("/nowhere") / name

    async def unstage(self, name: str, holder: str) -> None:
        name, holder = checked_name(name), checked_holder(holder)
        if any((held, who) == (name, holder) for held, who, _ in self._published.values()):
            raise InUse(f"the volume {name} is published for {holder}")
        self._held.pop((name, holder), None)

    async def holders(self, name: str) -> list[str]:
        name = checked_name(name)
        return sorted(holder for held, holder in self._held if held == name)

    async def publications(self, name: str) -> dict[str, tuple[str, bool]]:
        name = checked_name(name)
        return {
            target: (holder, read_only)
            for target, (held, holder, read_only) in self._published.items()
            if held == name
        }

    async def publication(self, target: Path) -> str | None:
        there = self._published.get(os.fspath(target))
        return there[0] if there is not None else None

    async def publish(self, name: str, holder: str, target: Path, read_only: bool = False) -> None:
        name, holder = checked_name(name), checked_holder(holder)
        staged = self._held.get((name, holder))
        if staged is None:
            raise NotFound(f"{holder} has not staged the volume {name}")
        wanted = (name, holder, read_only or staged.read_only)
        if self._published.setdefault(os.fspath(target), wanted) != wanted:
            raise AlreadyExists(f"something else is published at {target}")
        os.makedirs(target, exist_ok=True)

    async def unpublish(self, target: Path) -> None:
        self._published.pop(os.fspath(target), None)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(target)

    # -- for tests -------------------------------------------------------------------------------------------------------

    def change(self, name: str, **what: Any) -> None:
        """Change a volume as an operator or a writer on another host does."""
        self._volumes[name] = self._volumes[name]._replace(**what)

    def _ask(self) -> None:
        if self.silent:
            raise Unreachable()
