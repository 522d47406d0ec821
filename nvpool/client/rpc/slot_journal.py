"""Exactly-once execution of kernel requests' changes, even if the mount process is killed.

The kernel hands an unanswered request to the next process again. So before a change is sent, its request,
slot and sequence are recorded in the mount state (shm/mount_state), memory that outlives the process; the
slot is not reused before the request is answered. The successor sends the change under the same numbers and
gets the first reply, if there was one. A request has one slot: if it makes several changes, the last one is
recorded, and earlier ones may be executed again (they remove privileges, and find them gone).

Two kinds of changes need no record: reports of sizes, which state a present value, and locks, which their
owner may acquire twice. Used by the metadata client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from nvpool.shm.mount_state import KeptMemory


def asking() -> int:
    """The number of the kernel request for which the present step or task works; 0: none."""
    return getattr(asyncio.current_task(), "unique", 0)


class PendingSlot(NamedTuple):
    """A slot that is reserved until the kernel's request is answered."""

    state: object
    slot: int
    sequence: int
    generation: int


class _Early(NamedTuple):
    """A change that the previous process sent for a kernel request, which may be replayed."""

    shard: int
    slot: int
    sequence: int
    method: int


class SlotJournal:
    """The record of kernel requests with changes.

    `shards`: the metadata client's sessions, by shard. `give_back(session, slot, sequence, generation)` frees
    a slot. `given_up(session, slot)` is called with a slot of the previous process whose change is not replayed.
    """

    def __init__(
        self,
        memory: KeptMemory,
        shards: dict,
        give_back: Callable,
        given_up: Callable[[Any, int], None],
    ) -> None:
        self._memory = memory
        self._shards = shards
        self._give_back = give_back
        self._given_up = given_up
        self.held: dict[int, PendingSlot | None] = {}
        """Kernel requests with reserved slots (None: reserved by the previous process).

        `answered` must be called when such a request is answered.
        """
        self.early: dict[int, _Early] = {}

    def take_over(self, shard: int, number: int) -> dict[int, int]:
        """Adopt the previous process's records. Return slot -> sequence of those that wait for a replay."""
        found = {}
        for slot, sequence, method, unique in self._memory.slots(number):
            self.early[unique] = _Early(shard, slot, sequence, method)
            found[slot] = sequence
        return found

    def was_sent(self) -> bool:
        """Whether the previous process sent a change for the present kernel request.

        That change may have been executed.
        """
        return asking() in self.early

    def knows(self, unique: int) -> bool:
        """Whether a change was sent for that request before, by this process or the previous one."""
        return unique in self.held or unique in self.early

    def clear(self, number: int, slot: int) -> None:
        """Clear the record of a slot after its request was answered."""
        self._memory.slot_records.clear(number, slot)

    def shard_of(self, unique: int, method: int) -> int:
        """The shard to which the previous process sent such a change for the request; 0: none."""
        early = self.early.get(unique)
        return early.shard if early is not None and early.method == method else 0

    def slot_of(self, unique: int, state, method: int) -> tuple[int, int, int] | None:
        """(slot, sequence, generation) for such a change of a request that has a slot already; else None."""
        held = self.held.pop(unique, None)
        if held is not None:
            if held.state is state and held.generation == state.generation:
                # the old record would describe half of the next change
                self._memory.slot_records.clear(state.record, held.slot)
                return held.slot, held.sequence + 1, held.generation
            self._over(held)
        early = self.early.get(unique)
        if early is None or early.shard != state.shard or early.method != method:
            return None
        del self.early[unique], state.early[early.slot]
        return early.slot, early.sequence, state.generation

    def answered(self, unique: int) -> None:
        held = self.held.pop(unique, None)
        if held is not None:
            self._over(held)
        elif unique in self.early:
            self._forget(unique)

    def _forget(self, unique: int) -> None:
        """Forget the previous process's change for a request that the kernel has an answer to."""
        early = self.early.pop(unique)
        state = self._shards[early.shard]
        del state.early[early.slot]
        self._memory.slot_records.clear(state.record, early.slot)
        if state.session:
            self._give_back(state, early.slot, early.sequence, state.generation)
        self._given_up(state, early.slot)

    def _over(self, held: PendingSlot) -> None:
        if held.state.generation == held.generation:
            self._memory.slot_records.clear(held.state.record, held.slot)
            self._give_back(held.state, held.slot, held.sequence, held.generation)

    def all_came_again(self, in_work: set[int]) -> None:
        """Forget changes of the previous process whose requests are not in `in_work`: they were answered.

        Called when the kernel has replayed every request that the previous process left unanswered.
        """
        for unique in list(self.early):
            if unique not in in_work:
                self._forget(unique)
            elif unique not in self.held:
                self.held[unique] = None

    def note(self, number: int, slot: int, sequence: int, method: int, unique: int) -> None:
        self._memory.slot_records.keep(number, slot, sequence, method, unique)

    def lost(self, shard: int) -> None:
        """Forget the records of a session that has ended."""
        self._shards[shard].early.clear()
        for unique in [unique for unique, early in self.early.items() if early.shard == shard]:
            del self.early[unique]
