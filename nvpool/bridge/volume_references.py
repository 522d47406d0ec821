"""State file of the bridge: which holders use which volumes on this host.

bridge/volumes uses it. Each method that changes the state returns after the file is replaced and synced, so
the state survives the end of the bridge, of the engine, and a loss of power. The module knows no pool and no
mount. References end with the boot of the machine, as the mounts that they stand for: on open, references of
another boot are marked as ended, and the pool has yet to be notified.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from nvpool.core.errors import CorruptRecord, WrongFormat, from_os_error
from nvpool.host.pool_directory import write_whole

VERSION = 1
_MODE = 0o600


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a volume by a holder: how the holder sees the volume, and since when (boot time)."""

    read_only: bool = False
    subpath: str = ""
    since_s: float = 0.0
    ended: bool = False
    """The holder does not use the volume any more, and the pool may not know yet."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Bind of a volume at a place that the orchestrator chose."""

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
        """Read the file. CorruptRecord, WrongFormat: the file cannot be used. Other errors: of the drive."""
        self._path = path
        self._state = _read(path)
        if self._state.boot != boot:
            ended = {
                name: {
                    holder: msgspec.structs.replace(reference, ended=True)
                    for holder, reference in held.items()
                }
                for name, held in self._state.references.items()
            }
            self._state = _State(boot=boot, references=ended)
            self._save()

    def of(self, name: str) -> dict[str, Reference]:
        """Return the references of a volume that have not ended: holder -> reference."""
        return {
            holder: reference
            for holder, reference in self._state.references.get(name, {}).items()
            if not reference.ended
        }

    def volumes(self) -> list[str]:
        return [name for name in self._state.references if self.of(name)]

    def ended(self) -> list[tuple[str, str]]:
        return [
            (name, holder)
            for name, held in self._state.references.items()
            for holder, reference in held.items()
            if reference.ended
        ]

    def put(self, name: str, holder: str, reference: Reference) -> None:
        self._state.references.setdefault(name, {})[holder] = reference
        self._save()

    def end(self, name: str, holder: str) -> None:
        """Mark a reference as ended; the pool has yet to be notified."""
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
        """Return the places at which volumes are published."""
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
        raise CorruptRecord(
            f"{path} cannot be read ({error}); with no container in use, remove it: what is in use is found "
            "again"
        ) from None
    if state.version != VERSION:
        raise WrongFormat(
            f"{path} has version {state.version}, this nvpool knows {VERSION}; use the nvpool that wrote it"
        )
    return state
