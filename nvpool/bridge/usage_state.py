"""What this host has given to whom: the state file of the bridge.

Called by bridge/volumes. Each change is in the file, synced, before the method returns, so that it outlives the bridge, the
engine and the loss of power; the file is replaced as a whole. Knows no pool and no mount. References end with the boot of the
machine in which they were made, as the mounts that they stand for: those of another boot have ended, and the pool is still to
be told.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from nvpool.core.errors import CorruptRecord, WrongFormat, from_os_error
from nvpool.host.pool_directory import write_whole

VERSION = 1
_MODE = 0o600


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A holder's wish: what it sees of a volume, since when (boot time)."""

    read_only: bool = False
    subpath: str = ""
    since_s: float = 0.0
    ended: bool = False
    """The holder has gone, and the pool may not know it yet."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A bind at a place that somebody else named."""

    name: str
    holder: str
    read_only: bool = False
    subpath: str = ""


class _State(msgspec.Struct):
    version: int = VERSION
    boot: str = ""
    references: dict[str, dict[str, Reference]] = {}
    publications: dict[str, Publication] = {}


class References:
    def __init__(self, path: Path, boot: str) -> None:
        """CorruptRecord, WrongFormat, and what the drive says."""
        self._path = path
        self._state = _read(path)
        if self._state.boot != boot:
            ended = {name: {holder: msgspec.structs.replace(reference, ended=True) for holder, reference in held.items()}
                     for name, held in self._state.references.items()}
            self._state = _State(boot=boot, references=ended)
            self._save()

    def of(self, name: str) -> dict[str, Reference]:
        """holder -> reference of a volume, those that have ended excepted."""
        return {holder: reference for holder, reference in self._state.references.get(name, {}).items() if not reference.ended}

    def volumes(self) -> list[str]:
        return [name for name in self._state.references if self.of(name)]

    def ended(self) -> list[tuple[str, str]]:
        return [(name, holder) for name, held in self._state.references.items() for holder, reference in held.items()
                if reference.ended]

    def put(self, name: str, holder: str, reference: Reference) -> None:
        self._state.references.setdefault(name, {})[holder] = reference
        self._save()

    def end(self, name: str, holder: str) -> None:
        """It counts no more; the pool is still to be told."""
        held = self._state.references.get(name, {})
        if holder in held and not held[holder].ended:
            held[holder] = msgspec.structs.replace(held[holder], ended=True)
            self._save()

    def drop(self, name: str, holder: str) -> None:
        held = self._state.references.get(name, {})
        if held.pop(holder, None) is not None:
            if not held:
                del self._state.references[name]
            self._save()

    def publication(self, target: str) -> Publication | None:
        return self._state.publications.get(target)

    def published(self) -> list[str]:
        """Places at which any volume is."""
        return list(self._state.publications)

    def publications_of(self, name: str) -> dict[str, Publication]:
        return {target: found for target, found in self._state.publications.items() if found.name == name}

    def publish(self, target: str, publication: Publication) -> None:
        self._state.publications[target] = publication
        self._save()

    def unpublish(self, target: str) -> None:
        if self._state.publications.pop(target, None) is not None:
            self._save()

    def _save(self) -> None:
        try:
            write_whole(self._path, msgspec.json.encode(self._state), _MODE)
        except OSError as error:
            raise from_os_error(error, f"write {self._path}") from error


def _read(path: Path) -> _State:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _State()
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
    try:
        state = msgspec.json.decode(content, type=_State)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"{path} can not be read ({error}); with no container in use, remove it: what is in use is found "
                            "again") from None
    if state.version != VERSION:
        raise WrongFormat(f"{path} has version {state.version}, this nvpool knows {VERSION}; use the nvpool that wrote it")
    return state
