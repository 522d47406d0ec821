"""Requests that the kernel hands out again, to a process that goes on after another one: a part of `fuse/ops/operations`.

What the process before us has done and was not heard of is known by the number of the request, and not done again: opens and
writes here, changes of metadata in client/rpc/exactly_once. `kept` is the memory that outlives this process, None where there
is none.
"""

from __future__ import annotations


class AgainOps:
    def __init__(self, vfs) -> None:
        self._vfs = vfs
        self.kept = getattr(vfs, "kept", None)
        self._opened_before: dict[int, int] = {}   # request of the kernel -> handle
        self._written_before: dict[int, int] = {}  # request of the kernel -> bytes

    def handle_before(self, unique: int) -> int | None:
        """The handle that this request has opened already."""
        return self._opened_before.get(unique)

    def written_before(self, unique: int) -> int | None:
        """How many bytes this write has taken already."""
        return self._written_before.get(unique)

    def all_came_again(self, in_work: set[int]) -> None:
        """Whatever the kernel asks from now on it asks for the first time; these requests are being worked at."""
        self._opened_before.clear()
        self._written_before.clear()
        self._vfs.meta.once.all_came_again(in_work)

    @property
    def held(self) -> dict:
        """Requests of the kernel that `answered` is to be called for when they are; empty for ever where nothing is kept."""
        return self._vfs.meta.once.held if self.kept is not None else {}

    def answered(self, unique: int) -> None:
        self._vfs.meta.once.answered(unique)
