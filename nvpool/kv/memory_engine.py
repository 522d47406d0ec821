"""In-memory fake of the LMDB engine, which can simulate a power loss.

Fulfils the contract of `kv/api`, except durability over a restart of the process. `crash` simulates a power
loss: unsynced changes are lost, from the last one backwards. Used by tests and by simulations of a whole
pool; it never waits, and has no thread and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from nvpool.core.errors import Fenced, InvalidRequest
from nvpool.kv.api import Effects
from nvpool.kv.journal_record import checked_effects
from nvpool.kv.memtable import OrderedKeys
from nvpool.kv.snapshot import EngineSnapshot, SnapshotSet


class MemoryKv:
    sync_before_answer = False
    full = False
    on_apply: Callable[[dict[bytes, bytes | None]], None] | None = None

    def __init__(self) -> None:
        self._stable: dict[bytes, bytes] = {}
        self._unsynced: list[tuple[int, dict[bytes, bytes | None]]] = []
        self._sequence = self._synced_sequence = 0
        self._fenced = ""
        self._syncs = 0
        self._sync_fails = False
        self._load()

    def _load(self) -> None:
        self._values = dict(self._stable)
        self._keys = OrderedKeys(self._values)
        self._snapshots = SnapshotSet(self)

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        values = self._values
        return [(key, values[key]) for key in islice(self._keys.ascend(first, end), limit)]

    def scan_back(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        values = self._values
        return [(key, values[key]) for key in islice(self._keys.descend(first, end), limit)]

    def apply(self, effects: Effects, *, reclaims: bool = False) -> int:
        if self._fenced:
            raise Fenced(self._fenced)
        changed = checked_effects(effects)
        if self._snapshots:
            self._snapshots.note(changed)
        for key, value in changed.items():
            if value is None:
                if self._values.pop(key, None) is not None:
                    self._keys.remove(key)
            else:
                if key not in self._values:
                    self._keys.add(key)
                self._values[key] = value
        if self.on_apply is not None:
            self.on_apply(changed)
        self._sequence += 1
        self._unsynced.append((self._sequence, changed))
        return self._sequence

    async def sync(self, sequence: int | None = None) -> None:
        if sequence is not None and sequence > self._sequence:
            raise InvalidRequest(f"change {sequence} does not exist; the last is {self._sequence}")
        if self._fenced:
            raise Fenced(self._fenced)
        if self._synced_sequence >= (self._sequence if sequence is None else sequence):
            return
        if self._sync_fails:
            self._fenced = "a sync of the journal failed"
            raise Fenced(self._fenced)
        self._make_stable(self._sequence)
        self._syncs += 1

    def _make_stable(self, last: int) -> None:
        kept = 0
        for sequence, changed in self._unsynced:
            if sequence > last:
                break
            kept += 1
            for key, value in changed.items():
                if value is None:
                    self._stable.pop(key, None)
                else:
                    self._stable[key] = value
            self._synced_sequence = sequence
        del self._unsynced[:kept]

    def crash(self, keep: int | None = None) -> None:
        """Simulate a power loss and a restart; synced changes survive.

        Changes with numbers up to `keep` also survive (default: none), since a drive may have stored more
        than was synced.
        """
        self._make_stable(self._synced_sequence if keep is None else keep)
        self._unsynced.clear()
        self._sequence = self._synced_sequence
        self._fenced, self._sync_fails = "", False
        self._snapshots.end_all()
        self._load()

    def fail_next_sync(self) -> None:
        """Let the next sync fail: the sync and all later changes and syncs raise Fenced, until `crash`."""
        self._sync_fails = True

    async def room(self) -> None:
        if self._fenced:
            raise Fenced(self._fenced)

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def synced_sequence(self) -> int:
        return self._synced_sequence

    async def checkpoint(self) -> None:
        await self.sync()

    def snapshot(self, first: bytes = b"", end: bytes | None = None) -> EngineSnapshot:
        return self._snapshots.begin(first, end)

    def statistics(self) -> dict[str, float]:
        return {
            "entries": len(self._values),
            "layer_entries": 0,
            "syncs": self._syncs,
            "checkpoints": 0,
            "used_bytes": sum(map(len, self._values)) + sum(map(len, self._values.values())),
            "map_bytes": 0,
            "map_bytes_max": 0,
            "journal_bytes": 0,
            "sequence": self._sequence,
            "synced_sequence": self._synced_sequence,
            "fenced": float(bool(self._fenced)),
        }

    async def close(self) -> None:
        if not self._fenced:
            await self.sync()
            self._fenced = "the engine is closed"
        self._snapshots.end_all()
