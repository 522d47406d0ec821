"""Volume quotas: usage is counted in the transaction of each change and checked against the limits.

`QuotaLedger` holds the quota reservations of sessions: bytes beside the usage that clients may write before they
report them. Reservations are in the memory of this shard only. After a restart, or after a partition has
migrated here, sessions state their reservations again; until they had the time for that, no new reservation
is made. Called by `transaction.Draft` and `meta/requests/volume_handlers`; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, QuotaExceeded
from nvpool.core.ids import partition_of
from nvpool.core.units import format_bytes
from nvpool.meta.state.volume_records import (
    VolumeRecord,
    VolumeUse,
    decode_use,
    decode_volume,
    encode_use,
    keys_of,
)


class QuotaLedger:
    """Quota reservations of sessions, by volume."""

    def __init__(self, clock: Clock, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self.by_volume: dict[int, dict[int, int]] = {}
        """Volume -> session -> reserved bytes."""
        self._grace_of: dict[int, float] = {}

    def begin_grace(self, partitions: frozenset[int]) -> None:
        """Start the grace period of partitions in which sessions may hold reservations that are not known
        here."""
        self._grace_of.update(dict.fromkeys(partitions, self._clock.boottime_s() + self._grace_s))

    def grace_left_s(self, volume: int) -> float:
        """Seconds for which no new reservation is made in the volume."""
        until_s = self._grace_of.get(partition_of(volume))
        if until_s is None:
            return 0.0
        left_s = until_s - self._clock.boottime_s()
        if left_s <= 0:
            del self._grace_of[partition_of(volume)]
        return max(0.0, left_s)

    def promised(self, volume: int) -> int:
        """Bytes reserved by all sessions together."""
        known = self.by_volume.get(volume)
        return sum(known.values()) if known else 0

    def of(self, volume: int, session: int) -> int:
        known = self.by_volume.get(volume)
        return known.get(session, 0) if known else 0

    def promise(self, volume: int, session: int, byte_count: int) -> None:
        """Set the session's reservation to `byte_count`."""
        known = self.by_volume.setdefault(volume, {})
        if byte_count > 0:
            known[session] = byte_count
        else:
            known.pop(session, None)
        if not known:
            del self.by_volume[volume]

    def spend(self, volume: int, session: int, byte_count: int) -> None:
        """Reduce the session's reservation by bytes that now count as usage."""
        if volume in self.by_volume:
            self.promise(volume, session, self.of(volume, session) - byte_count)

    def end_session(self, session: int) -> None:
        for volume in [volume for volume, known in self.by_volume.items() if session in known]:
            self.promise(volume, session, 0)

    def forget(self, partitions: frozenset[int]) -> None:
        """Drop the reservations in these partitions, which belong to another shard now."""
        for volume in [volume for volume in self.by_volume if partition_of(volume) in partitions]:
            del self.by_volume[volume]


class QuotaRecords(Protocol):
    """Interface of the shard's View that an account uses (meta/state/transaction)."""

    @property
    def get(self) -> Callable[[bytes], bytes | None]:
        """Read one record."""

    @property
    def rooms(self) -> QuotaLedger | None:
        """Quota reservations; None before the service has made them."""


class QuotaAccount:
    """One volume during one change: its limits and its usage, read once."""

    __slots__ = ("number", "record", "use", "_view", "_use_key", "grown")

    def __init__(self, view: QuotaRecords, number: int) -> None:
        self.number = number
        self._view = view
        volume_key, self._use_key = keys_of(number)
        raw = view.get(volume_key)
        self.record: VolumeRecord | None = decode_volume(raw) if raw is not None else None
        raw = view.get(self._use_key)
        self.use = decode_use(raw) if raw is not None else VolumeUse()
        self.grown: tuple[int, int] | None = None

    def effect(self) -> tuple[bytes, bytes | None]:
        """Effect that stores the usage; deletes it if the volume is gone.

        Files that outlive their volume, because a client still has them open, are counted nowhere.
        """
        return self._use_key, encode_use(self.use) if self.record is not None else None

    def add_file(self) -> None:
        """Count one more inode. QuotaExceeded: the volume is full."""
        record, use = self.record, self.use
        if record is not None and record.files_max and use.files >= record.files_max:
            raise QuotaExceeded(
                f"volume {record.name} holds {use.files} files, which is its quota; remove "
                f"some{_purging(record)}, or: nvpool volume resize POOL {record.name} "
                f"--files COUNT"
            )
        use.files += 1

    def grow(self, byte_count: int, session: int, reported: bool) -> None:
        """Count that a file has grown by `byte_count`.

        `reported`: the session has used bytes of its reservation for this, as far as it has one.
        QuotaExceeded: nothing is counted.
        """
        record, use = self.record, self.use
        rooms = self._view.rooms
        if record is not None and record.bytes_max and rooms is not None:
            others = rooms.promised(self.number)
            mine = rooms.of(self.number, session) if reported else 0
            if byte_count > mine and use.bytes + byte_count + others - mine > record.bytes_max:
                raise QuotaExceeded(
                    f"volume {record.name} holds {format_bytes(use.bytes)} of {format_bytes(record.bytes_max)}"
                    f"{f', and {format_bytes(others)} are promised to writers' if others else ''}: "
                    f"{format_bytes(byte_count)} more do not fit; remove files{_purging(record)}, or: nvpool "
                    f"volume resize POOL {record.name} --size SIZE"
                )
            if mine:
                self.grown = session, min(mine, byte_count)
        use.bytes += byte_count


def _purging(record: VolumeRecord) -> str:
    """Advice for an error text if the volume has a trash, in which removed files still count."""
    return f" and purge its trash (nvpool trash purge POOL {record.name})" if record.trash_s else ""


def account(view: QuotaRecords, number: int) -> QuotaAccount | None:
    """Account of a volume; None if its records cannot be read: then nothing is counted, and fsck reports
    it."""
    try:
        return QuotaAccount(view, number)
    except CorruptRecord:
        return None
