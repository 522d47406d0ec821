"""What nvpool keeps its records in: ordered keys with durable, all-or-nothing changes.

Used by the metadata service, the chunk index of a store and the embedded coordinator. Implementations: `kv/lmdb_engine`
(journal, memory layer, checkpoints into LMDB) and `kv/memory` (the honest twin, which can forget what was not synced).
Both pass `testing/contracts/kv`.

One thread (the event loop's) calls everything here; nothing but `sync`, `room` and `checkpoint` ever waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

Effect = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete it. Deleting what is not there is no error."""

KEY_BYTES_MAX = 511
"""LMDB's limit."""


class Kv(Protocol):
    def get(self, key: bytes) -> bytes | None:
        """The newest acknowledged value. CorruptRecord when the engine meets a page that makes no sense."""

    def scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs with first <= key < end, in order, as of now.

        A longer range is read in steps: begin the next one behind the last key. No snapshot is held between steps.
        """

    def scan_back(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs with first <= key < end, in falling order."""

    def apply(self, effects: Iterable[Effect], *, reclaims: bool = False) -> int:
        """Make all effects true at once; return the change's sequence number (1, 2, 3, … without a gap).

        On return they survive the death of this process (kill -9), and after `sync` the loss of power. If this raises,
        nothing has changed. A key may occur once.

        NoSpace    the store is at its configured maximum, and `reclaims` (this change frees more than it adds) is not
                   set; or the drive is full: tell the user
        Fenced     an earlier write or sync of the journal failed; nothing more is taken until the engine is opened anew
        Busy       the layer is full: await room(), then repeat
        """

    async def sync(self, sequence: int | None = None) -> None:
        """Return when the change `sequence` (default: all so far) survives the loss of power.

        All who wait share one fdatasync. Fenced when it failed: it is never repeated, since the kernel has forgotten
        the pages; open the engine anew.
        """

    async def room(self) -> None:
        """Return when the layer can take changes again. Called by services before a change when `full` is true."""

    @property
    def full(self) -> bool:
        """Whether changes must wait for a checkpoint."""

    @property
    def sequence(self) -> int:
        """Of the last change applied."""

    @property
    def synced_sequence(self) -> int:
        """Of the last change that survives the loss of power."""

    async def checkpoint(self) -> None:
        """Move everything applied before the call into the long-term store and drop its journal."""

    def statistics(self) -> dict[str, float]:
        """entries, used_bytes, map_bytes, map_bytes_max, journal_bytes, layer_entries, checkpoints, syncs, …"""

    async def close(self) -> None:
        """Sync, checkpoint and release. May be called twice."""
