"""Changes that a request of the kernel asks for are carried out once, also when the process that sent them is killed.

The kernel hands a request that was not answered to the next process again. So before a change is sent it is written into the
memory that outlives the process (shm/mount_state) for which request, in which slot and under which sequence it travels; and the
slot is not used again before the request is answered. The successor sends a request's change under the same name, and gets the
first answer if there was one. A request has one slot: where it makes several changes the last one is known, those before it may
be made again (they take away privileges, and find them gone).

What needs none of this: reports of sizes, which say what is, and locks, which their owner may take twice. Used by metaclient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from nvpool.shm.mount_state import KeptMemory


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
    """`shards`: sessions of the metaclient, by shard; `give_back(session, slot, sequence, generation)`: a slot is free."""

    def __init__(self, memory: KeptMemory, shards: dict, give_back: Callable) -> None:
        self._memory = memory
        self._shards = shards
        self._give_back = give_back
        self.held: dict[int, Held | None] = {}
        """Requests of the kernel for which slots are held (None: since the process before us); `answered` has to be called when
        they are."""
        self._early: dict[int, _Early] = {}
        self.on_given_up: Callable[[object, int], None] = lambda state, slot: None
        """Called with the session and a slot of which a change of the process before us is not asked for again."""

    def take_over(self, shard: int, number: int) -> dict[int, int]:
        """slot -> sequence of those that wait for their requests to come again."""
        found = {}
        for slot, sequence, method, unique in self._memory.slots(number):
            self._early[unique] = _Early(shard, slot, sequence, method)
            found[slot] = sequence
        return found

    def was_sent(self) -> bool:
        """Whether a change for the kernel's present request was sent by the process before us: it may have been carried out."""
        return asking() in self._early

    def knows(self, unique: int) -> bool:
        """Whether a change was sent for that request before, by us or by the process before us."""
        return unique in self.held or unique in self._early

    def clear(self, number: int, slot: int) -> None:
        """The request for which a change was noted there is answered."""
        self._memory.clear_slot(number, slot)

    def shard_of(self, unique: int, method: int) -> int:
        """Where the process before us sent such a change for the request; 0: it sent none."""
        early = self._early.get(unique)
        return early.shard if early is not None and early.method == method else 0

    def slot_of(self, unique: int, state, method: int) -> tuple[int, int, int] | None:
        """(slot, sequence, generation) for such a change of a request that has a slot already."""
        held = self.held.pop(unique, None)
        if held is not None:
            if held.state is state and held.generation == state.generation:
                self._memory.clear_slot(state.record, held.slot)  # its mark would stand for half of what comes next
                return held.slot, held.sequence + 1, held.generation
            self._over(held)
        early = self._early.get(unique)
        if early is None or early.shard != state.shard or early.method != method:
            return None
        del self._early[unique], state.early[early.slot]
        return early.slot, early.sequence, state.generation

    def answered(self, unique: int) -> None:
        held = self.held.pop(unique, None)
        if held is not None:
            self._over(held)
        elif unique in self._early:
            self._forget(unique)

    def _forget(self, unique: int) -> None:
        """The kernel has the answer to it, whatever the process before us sent for it."""
        early = self._early.pop(unique)
        state = self._shards[early.shard]
        del state.early[early.slot]
        self._memory.clear_slot(state.record, early.slot)
        if state.session:
            self._give_back(state, early.slot, early.sequence, state.generation)
        self.on_given_up(state, early.slot)

    def _over(self, held: Held) -> None:
        if held.state.generation == held.generation:
            self._memory.clear_slot(held.state.record, held.slot)
            self._give_back(held.state, held.slot, held.sequence, held.generation)

    def all_came_again(self, in_work: set[int]) -> None:
        """Every request that the process before us left unanswered was handed to us by now, and we work at these: what else it
        sent was answered."""
        for unique in list(self._early):
            if unique not in in_work:
                self._forget(unique)
            elif unique not in self.held:
                self.held[unique] = None

    def note(self, number: int, slot: int, sequence: int, method: int, unique: int) -> None:
        self._memory.keep_slot(number, slot, sequence, method, unique)

    def lost(self, shard: int) -> None:
        """The session at the shard has ended."""
        self._shards[shard].early.clear()
        for unique in [unique for unique, early in self._early.items() if early.shard == shard]:
            del self._early[unique]
