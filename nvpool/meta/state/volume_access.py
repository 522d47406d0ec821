"""Access rights in volumes.

They are checked only for volumes that restrict something, so that all other volumes cost nothing.
`restricted` holds the volumes of this shard that are sealed, listed or being removed; `encrypted` those that
are encrypted. Requests about everything that a shard has are for nodes anyway (rpc/access_control). The
service says on whose behalf it decides (`caller`). Its own work (fsck, the collector, removal) has no caller
and may do everything. Used by `meta/state/transaction`; part of `View`.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvpool.core.errors import AccessDenied, CorruptRecord, NotFound, ReadOnly
from nvpool.meta.state.records import OTHER, kind_of
from nvpool.meta.state.volume_records import (
    LISTED,
    REMOVING,
    SEALED,
    VOLUME,
    VolumeRecord,
    decode_volume,
    kind_of_volume_key,
    volume_of_key,
)
from nvpool.rpc.v1 import meta_pb2 as pb

_FOR_READERS = (
    pb.VolumeRequest.SHOW,
    pb.VolumeRequest.ATTACH,
    pb.VolumeRequest.DETACH,
    pb.VolumeRequest.KEY,
)


def right_of(caller: str, record: VolumeRecord) -> bool | None:
    """Whether the caller ("" is a node) may write in the volume; None: not even read."""
    return dict(record.grants).get(caller) if caller and record.flags & LISTED else True


def check_action(caller: str, record: VolumeRecord, request: pb.VolumeRequest) -> None:
    """AccessDenied: the caller may not send this admin command.

    Rights are granted and revoked on nodes of the pool. In a listed volume only clients that may write there
    change anything else, and clients that may read report that they use the volume.
    """
    action = request.action
    if not caller:
        return
    if action == pb.VolumeRequest.REWRAP:
        raise AccessDenied(f"{caller} is a client: keys of volumes are rewrapped on a node of the pool")
    if action in (pb.VolumeRequest.GRANT, pb.VolumeRequest.REVOKE) or request.HasField("listed"):
        raise AccessDenied(
            f"{caller} is a client: rights to volumes are given and taken on a node of the pool"
        )
    right = right_of(caller, record)
    if right is None or (not right and action not in _FOR_READERS):
        raise AccessDenied(
            f"{caller} has no right to do that with volume {record.name}; an operator gives one"
        )


def check_trash(caller: str, record: VolumeRecord, change: bool) -> None:
    """AccessDenied, ReadOnly: the caller may not look into the trash, or may not change it."""
    right = right_of(caller, record)
    if right is None or (change and not right):
        raise AccessDenied(f"{caller} has no right to do that with the trash of volume {record.name}")
    if change and record.flags & SEALED:
        raise ReadOnly(f"volume {record.name} is sealed: what is in it stays as it is")


class VolumeAccess:
    """Access checks of one shard, for the caller on whose behalf the shard decides now."""

    def __init__(self) -> None:
        self.restricted: dict[int, VolumeRecord] = {}
        self.encrypted: dict[int, bytes] = {}
        """Wrapped keys of the encrypted volumes."""
        self.caller: str | None = None
        """Member of the pool on whose behalf the shard decides; "" for rights of a node; None for the shard
        itself."""
        self.taken: frozenset[tuple[int, str]] = frozenset()
        """Volumes and members whose rights were revoked recently; only for the text of a refusal."""

    def note(self, number: int, record: VolumeRecord | None) -> None:
        """Use this record of the volume from now on; None: the volume is gone."""
        if record is not None and record.is_restricted:
            self.restricted[number] = record
        else:
            self.restricted.pop(number, None)
        if record is not None and record.wrapped_key:
            self.encrypted[number] = record.wrapped_key
        else:
            self.encrypted.pop(number, None)

    def note_effects(self, effects: Iterable[tuple[bytes, bytes | None]]) -> None:
        """As `note`, for all volume records among these effects. Unreadable records are left to fsck."""
        for key, raw in effects:
            try:
                if kind_of(key) == OTHER and kind_of_volume_key(key) == VOLUME:
                    self.note(volume_of_key(key), decode_volume(raw) if raw is not None else None)
            except CorruptRecord:
                continue

    def is_sealed(self, number: int) -> bool:
        record = self.restricted.get(number)
        return record is not None and bool(record.flags & SEALED)

    def check(self, number: int) -> None:
        """NotFound, AccessDenied: the caller may not see the contents of the volume."""
        record = self.restricted.get(number)
        if record is None or self.caller is None:
            return
        if record.flags & REMOVING:
            raise NotFound(f"volume {record.name} is being removed")
        if record.flags & LISTED and self.caller and self._granted(record) is None:
            if self._was_taken(number):
                raise AccessDenied(f"the right of {self.caller} to volume {record.name} was taken back")
            raise AccessDenied(
                f"{self.caller} has no right to volume {record.name}; an operator gives one: nvpool volume grant "
                f"POOL {record.name} {self.caller} ro (or rw)"
            )

    def may_see(self, number: int) -> bool:
        """Whether `check` lets the caller pass; number 0 stands for no volume."""
        if number in self.restricted:
            try:
                self.check(number)
            except (NotFound, AccessDenied):
                return False
        return True

    def check_change(self, number: int) -> None:
        """As `check`, for a change of the contents. ReadOnly: the volume is sealed."""
        record = self.restricted.get(number)
        if record is None or self.caller is None:
            return
        self.check(number)
        if record.flags & SEALED:
            raise ReadOnly(f"volume {record.name} is sealed: what is in it stays as it is")
        if record.flags & LISTED and self.caller and not self._granted(record):
            raise AccessDenied(
                f"{self.caller} may only read in volume {record.name}"
                f"{': its right to write was taken back' if self._was_taken(number) else ''}"
            )

    def _was_taken(self, number: int) -> bool:
        return (number, self.caller) in self.taken

    def _granted(self, record: VolumeRecord) -> bool | None:
        """Whether the caller may write; None: not even read."""
        return dict(record.grants).get(self.caller or "")
