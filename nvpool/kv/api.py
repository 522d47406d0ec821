"""Key-value store interface: ordered keys with durable, atomic changes.

Used by the metadata service, the chunk index of a store and the embedded coordinator. Implementations:
`kv/engine` (journal, memtables, checkpoints into LMDB) and `kv/memory_engine` (a fake for tests, which can lose
unsynced changes). Both pass `testing/contracts/kv`.

All calls come from one thread, the one of the event loop. Only `sync`, `room` and `checkpoint` wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

Effect = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete the key. Deleting an absent key is no error."""

Effects = Iterable[Effect] | dict[bytes, bytes | None]
"""The effects of one change: pairs, or a dict that its owner gives away."""

KEY_BYTES_MAX = 511
"""Maximum length of a key, as in LMDB."""

KEY_END = b"\xff" * KEY_BYTES_MAX
"""Upper bound of all keys, the greatest key that LMDB accepts: the engine stores its own record there."""

VALUE_BYTES_MAX = 1 << 20
"""Maximum length of a value, far above any record of nvpool; bounds the size of one change in the journal."""


class Snapshot(Protocol):
    """A consistent view of a Kv at one change, read in bounded steps while changes continue; see
    `kv/snapshot`.

    `async for pairs in snapshot` yields everything in lists of up to a thousand pairs; `step` does the same
    manually.
    """

    sequence: int
    """Number of the last change in the view."""

    done: bool

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Return the next pairs in order, at most `limit`, perhaps none; `done` becomes true at the end.

        Busy: too much changed ahead of the reader, or the Kv was closed; start again with a new snapshot.
        """

    def __aiter__(self) -> AsyncIterator[list[tuple[bytes, bytes]]]: ...

    def close(self) -> None:
        """Release the snapshot; needed only if it is not read to its end. May be called twice."""


class Kv(Protocol):
    on_apply: Callable[[dict[bytes, bytes | None]], None] | None
    """Callback with the effects of each change, called before `apply` returns; must not fail. There is only
    one callback."""

    def get(self, key: bytes) -> bytes | None:
        """Return the newest value of a key, or None; CorruptRecord if a stored page or record is damaged."""

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of several keys; faster than as many calls of `get`."""

    def scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return up to `limit` current pairs with first <= key < end, in order.

        To read a longer range, call again from after the last key. The calls do not share a snapshot.
        """

    def scan_back(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return up to `limit` pairs with first <= key < end, in descending order."""

    def apply(self, effects: Effects, *, reclaims: bool = False) -> int:
        """Apply all effects atomically; return the change's sequence number (1, 2, 3, … without a gap).

        On return the change survives the death of this process (kill -9), and after `sync` also a power loss.
        If this raises, nothing has changed. Each key may occur once. A dict becomes part of the store: the caller must not
        change it any more.

        NoSpace: the store is at its configured maximum and `reclaims` (this change frees more than it adds)
        is not set, or the drive is full; report to the user.
        Fenced: an earlier write or sync of the journal failed; the engine accepts no changes until it is
        reopened.
        Busy: the memtable is full; await room(), then repeat.
        InvalidRequest, TooBig: `kv/journal_record.checked_effects` rejects the effects; a bug of the caller.
        """

    async def sync(self, sequence: int | None = None) -> None:
        """Return when the change `sequence` (default: the last one) survives a power loss.

        All concurrent callers share one fdatasync.
        Fenced: the sync failed. A failed sync is never repeated, because the kernel has dropped the pages;
        reopen the engine.
        """

    async def room(self) -> None:
        """Return when the memtable accepts changes again. Services call this before a change when `full` is
        true."""

    @property
    def full(self) -> bool:
        """Whether changes must wait for a checkpoint."""

    @property
    def sequence(self) -> int:
        """Number of the last applied change."""

    @property
    def synced_sequence(self) -> int:
        """Number of the last change that survives a power loss."""

    async def checkpoint(self) -> None:
        """Move all changes applied so far into the long-term store and discard their journal."""

    @property
    def sync_before_answer(self) -> bool:
        """Whether a change must be acknowledged only after `await sync(sequence)` (durability "always")."""

    def snapshot(self, first: bytes = b"", end: bytes | None = None) -> Snapshot:
        """Return a snapshot of all current pairs with first <= key < end (default: all), read while changes
        continue.

        No read transaction of the long-term store stays open between its steps. Busy: too many snapshots are
        open.
        """

    def statistics(self) -> dict[str, float]:
        """Return entries, used_bytes, map_bytes, map_bytes_max, journal_bytes, layer_entries, checkpoints,
        syncs, …"""

    async def close(self) -> None:
        """Sync, checkpoint and release the store. May be called twice."""
