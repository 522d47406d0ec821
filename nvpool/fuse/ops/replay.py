"""Replayed requests: the kernel resends them to a process that continues a predecessor's mount.

A part of `fuse/ops/operations`. A request that the predecessor executed without a reply is recognised by its
number and not executed again: opens and writes here, changes of metadata in client/rpc/slot_journal. `kept`
is the mount state (shared memory that outlives this process), or None.
"""

from __future__ import annotations


class ReplayOps:
    def __init__(self, vfs) -> None:
        self._vfs = vfs
        self.kept = getattr(vfs, "kept", None)
        self._opened_before: dict[int, int] = {}  # the kernel's request -> handle
        self._written_before: dict[int, int] = {}  # the kernel's request -> bytes

    def handle_before(self, unique: int) -> int | None:
        """The handle that this request has already opened, or None."""
        return self._opened_before.get(unique)

    def written_before(self, unique: int) -> int | None:
        """How many bytes this write has already written, or None."""
        return self._written_before.get(unique)

    def all_came_again(self, in_work: set[int]) -> None:
        """Note that the kernel has resent everything: later requests are new.

        `in_work`: those still pending.
        """
        self._opened_before.clear()
        self._written_before.clear()
        self._vfs.meta.once.all_came_again(in_work)

    @property
    def held(self) -> dict:
        """Requests whose reply must be reported to `answered`. Always empty without a mount state."""
        return self._vfs.meta.once.held if self.kept is not None else {}

    def answered(self, unique: int) -> None:
        self._vfs.meta.once.answered(unique)
