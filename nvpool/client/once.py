"""Changes that a request of the kernel asks for are carried out once, also when the process that sent them is killed.

The kernel hands a request that was not answered to the next process again. So before a change is sent it is written into the
memory that outlives the process (base/kept) for which request, in which slot and under which sequence it travels; and the slot is
not used again before the request is answered. The successor sends a request's change under the same name, and gets the first
answer if there was one. A request has one slot: where it makes several changes the last one is known, those before it may
be made again (they take away privileges, and find them gone).

What needs none of this: reports of sizes, which say what is, and locks, which their owner may take twice. Used by metaclient.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from nvpool.base.kept import KeptMemory


def asking() -> int:
    """The number of the kernel's request for which the present step or task works; 0: for none."""
    return getattr(asyncio.current_task(), "unique", 0)


class Held(NamedTuple):
    """A slot that waits for a request to be answered."""

    state: object
    slot: int
    sequence: int
    generation: int


class _Early(NamedTuple):
    """What the process before us sent for a request, which may come again."""

    shard: int
    slot: int
    sequence: int
    method: int


class Once:
    def __init__(self, memory: KeptMemory) -> None:
        self._memory = memory
        self.held: dict[int, Held] = {}
        self.early: dict[int, _Early] = {}

    def take_over(self, shard: int, number: int) -> dict[int, int]:
        """slot -> sequence of those that wait for their requests to come again."""
        found = {}
        for slot, sequence, method, unique in self._memory.slots(number):
            self.early[unique] = _Early(shard, slot, sequence, method)
            found[slot] = sequence
        return found

    def earlier(self, unique: int, shard: int, method: int) -> tuple[int, int] | None:
        """(slot, sequence) under which such a change of this request was sent; told once."""
        found = self.early.get(unique)
        if found is None or found.shard != shard or found.method != method:
            return None
        del self.early[unique]
        return found.slot, found.sequence

    def note(self, number: int, slot: int, sequence: int, method: int, unique: int) -> None:
        self._memory.clear_slot(number, slot)  # the mark of a change before would stand for half of this one
        self._memory.keep_slot(number, slot, sequence, method, unique)

    def over(self, number: int, slot: int) -> None:
        self._memory.clear_slot(number, slot)

    def lost(self, shard: int) -> None:
        """The session at the shard has ended."""
        for unique in [unique for unique, early in self.early.items() if early.shard == shard]:
            del self.early[unique]
