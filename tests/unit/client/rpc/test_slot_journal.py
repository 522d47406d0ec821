"""Request slot of a change that a kernel request causes, before and after the death of the process that sent it."""

import os

import pytest

from nvpool.client.rpc.slot_journal import PendingSlot, SlotJournal
from nvpool.shm.mount_state import KeptMemory

MKDIR, CHMOD = 1, 2


class Session:
    """The part of metaclient.ShardSession that Once uses."""

    def __init__(self) -> None:
        self.shard, self.record, self.session, self.generation, self.early = 7, 0, 99, 1, {}


@pytest.fixture
def memory():
    descriptor = KeptMemory.make(1 << 24)
    kept = KeptMemory(descriptor)
    kept.keep_session(kept.add_shard(), 7, 99, b"secret")
    yield kept
    os.close(descriptor)


def begin(memory, given_up=lambda state, slot: None):
    """A process: (its SlotJournal, its session, the slots that are free again)."""
    session, free = Session(), []
    once = SlotJournal(
        memory,
        {7: session},
        lambda state, slot, sequence, generation: free.append((slot, sequence)),
        given_up,
    )
    session.early = once.take_over(7, 0)
    return once, session, free


def test_replayed_request_keeps_its_slot_until_answered(memory):
    once, session, free = begin(memory)
    assert once.slot_of(1000, session, MKDIR) is None
    once.note(0, 5, 40, MKDIR, 1000)

    once, session, free = begin(memory)  # killed
    assert session.early == {5: 40}
    assert once.slot_of(1001, session, MKDIR) is None and once.slot_of(1000, session, CHMOD) is None
    assert once.slot_of(1000, session, MKDIR) == (5, 40, 1) and not session.early
    once.note(0, 5, 40, MKDIR, 1000)
    once.held[1000] = PendingSlot(session, 5, 40, 1)
    assert once.slot_of(1000, session, CHMOD) == (5, 41, 1), "its next change uses the same slot"
    once.note(0, 5, 41, CHMOD, 1000)
    once.held[1000] = PendingSlot(session, 5, 41, 1)
    assert begin(memory)[1].early == {5: 41} and not free
    once.answered(1000)
    assert free == [(5, 41)] and begin(memory)[1].early == {}


def test_slot_without_a_replay_is_freed(memory):
    once, session, free = begin(memory)
    for unique, slot in ((1000, 1), (1001, 2), (1002, 3)):
        once.note(0, slot, 40, MKDIR, unique)
    once, session, free = begin(memory)
    once.all_came_again({1001, 1002})
    assert free == [(1, 40)] and set(once.held) == {1001, 1002}
    assert once.slot_of(1001, session, MKDIR) == (2, 40, 1)
    once.answered(1002)  # the request ended without its change
    assert free == [(1, 40), (3, 40)] and session.early == {} and begin(memory)[1].early == {2: 40}


def test_slots_of_an_ended_session_are_not_used(memory):
    once, session, free = begin(memory)
    once.note(0, 1, 40, MKDIR, 1000)
    once, session, free = begin(memory)
    once.lost(7)
    session.generation += 1
    assert once.slot_of(1000, session, MKDIR) is None and not session.early
    once.all_came_again(set())
    assert free == []


def test_service_is_notified_of_changes_without_a_replay(memory):
    once, session, free = begin(memory)
    for unique, slot in ((1000, 1), (1001, 2), (1002, 3)):
        once.note(0, slot, 40, MKDIR, unique)
    given_up = []
    once, session, free = begin(memory, lambda state, slot: given_up.append((state is session, slot)))
    assert once.slot_of(1001, session, MKDIR) == (2, 40, 1)
    once.all_came_again({1001, 1002})
    assert given_up == [(True, 1)]
    once.answered(1002)  # the request ended without its change
    assert given_up == [(True, 1), (True, 3)] and free == [(1, 40), (3, 40)]
