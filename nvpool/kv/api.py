"""What nvpool keeps its records in: ordered keys with durable, all-or-nothing changes.

Used by the metadata service, the chunk index of a store and the embedded coordinator. Implementations: `kv/engine`
(journal, memory layer, checkpoints into LMDB) and `kv/memory` (the honest twin, which can forget what was not synced).
Both pass `testing/contracts/kv`.

One thread (the event loop's) calls everything here; nothing but `sync`, `room` and `checkpoint` ever waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from nvpool.core.compiled import load_compiled
from nvpool.core.errors import InvalidRequest, TooBig

Effect = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete it. Deleting what is not there is no error."""

KEY_BYTES_MAX = 511
"""LMDB's limit."""

KEY_END = b"\xff" * KEY_BYTES_MAX
"""Every key lies below this one, the greatest that LMDB takes: the engine keeps its own record there."""

VALUE_BYTES_MAX = 1 << 20
"""Far above any record of ours; a bound for what one change may weigh in the journal."""


def checked_effects_plain(effects: Iterable[Effect]) -> dict[bytes, bytes | None]:
    """The effects of one change by key.

    InvalidRequest  a key is empty, too long, not below KEY_END, or occurs twice; a key or value is not bytes
    TooBig          a value is longer than VALUE_BYTES_MAX
    """
    pairs = effects if type(effects) is list else list(effects)
    changed = dict(pairs)
    if len(changed) != len(pairs):
        raise InvalidRequest("a key occurs twice in one change")
    for key, value in pairs:
        if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX or key == KEY_END:
            raise InvalidRequest(f"a key is 1 to {KEY_BYTES_MAX} bytes and below KEY_END, not {key!r:.80}")
        if value is not None:
            if type(value) is not bytes:
                raise InvalidRequest(f"a value is bytes, not {type(value).__name__}")
            if len(value) > VALUE_BYTES_MAX:
                raise TooBig(f"a value has {VALUE_BYTES_MAX} bytes at most, not {len(value)}")
    return changed


def _checked_compiled(effects: Iterable[Effect]) -> dict[bytes, bytes | None]:
    pairs = effects if type(effects) is list else list(effects)
    changed = _journal_record.checked_effects(pairs)
    return changed if changed is not None else checked_effects_plain(pairs)  # which says what is wrong


_journal_record = load_compiled("nvpool.kv._journal_record")
checked_effects = checked_effects_plain if _journal_record is None else _checked_compiled


class Snapshot(Protocol):
    """One moment of a Kv, read in bounded steps while changes go on; see `kv/snapshot`.

    `async for pairs in snapshot` gives all of it in lists of up to a thousand pairs; `step` is the same by hand.
    """

    sequence: int
    """The last change that it shows."""

    done: bool

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        """The next pairs in order, `limit` at most, perhaps none; `done` says when the walk is over.

        Busy when too much changed in front of the walk, or the Kv was closed: begin again with a new snapshot.
        """

    def __aiter__(self) -> AsyncIterator[list[tuple[bytes, bytes]]]: ...

    def close(self) -> None:
        """Needed only when it is not read to its end. May be called twice."""


class Kv(Protocol):
    on_apply: Callable[[dict[bytes, bytes | None]], None] | None
    """Told of the effects of each change when it is made, before `apply` returns; must not fail. One at a time has it."""

    def get(self, key: bytes) -> bytes | None:
        """The newest acknowledged value. CorruptRecord when the engine meets a page that makes no sense."""

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """As so many `get`s, for less."""

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
        InvalidRequest, TooBig   the effects are not what `checked_effects` takes: a fault of the caller
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

    @property
    def sync_before_answer(self) -> bool:
        """Whether the operator wants `await sync(sequence)` before a change is acknowledged (durability "always")."""

    def snapshot(self, first: bytes = b"", end: bytes | None = None) -> Snapshot:
        """All pairs with first <= key < end (default: all) as they are now, to be read while changes go on.

        Busy when too many are being read already. No reader of the long-term store lives between its steps.
        """

    def statistics(self) -> dict[str, float]:
        """entries, used_bytes, map_bytes, map_bytes_max, journal_bytes, layer_entries, checkpoints, syncs, …"""

    async def close(self) -> None:
        """Sync, checkpoint and release. May be called twice."""
