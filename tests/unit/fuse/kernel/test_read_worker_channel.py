"""Channel between the processes of a mount: whole requests in order, and which open files other processes may read."""

import os
import random
import socket

from nvpool.client.state.vfs_types import Caller
from nvpool.fuse.kernel.read_worker_channel import GO, Channel, word
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.fuse.protocol.requests import HEADER, HEADER_BYTES
from nvpool.shm.mount_state import PUBLISHED, KeptHandles, KeptMemory


def requests_of(count):
    chance = random.Random(1)
    for number in range(count):
        tail = chance.randbytes(chance.choice((0, 40, 5000, 200_000)))
        yield HEADER.pack(HEADER_BYTES + len(tail), 1, number, 0, 0, 0, 0, 0, 0) + tail


def test_requests_arrive_whole_and_in_order_on_a_full_socket():
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, 4096), Channel(theirs, 1 << 20)
    expected, came, was_full = list(requests_of(100)), [], False
    for request in expected:
        sender.send(request)
        was_full |= sender.is_full
    while sender.is_full:
        sender.flush()
        assert receiver.fill()
        for request in receiver.requests():
            came.append(bytes(request))
            break  # the others stay for the next turn
    sender.send(word(GO))
    sender.close()
    is_open = True
    while is_open:
        is_open = receiver.fill()
        came += map(bytes, receiver.requests())
    assert was_full and came == [*expected, word(GO)]
    receiver.close()


def test_closed_peer_is_ignored():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 4096)
    theirs.close()
    channel.send(word(GO))
    assert not channel.is_full and not channel.fill()
    channel.close()


def published(memory):
    found = PublishedFiles(handles := Handles(memory))

    def take(inode):
        number = handles.take(inode, os.O_RDONLY, Caller(0, 0), 1, published=True)
        found.add(inode, number)
        return number

    return found, handles, take


def test_published_and_withdrawn_files_are_visible_to_others():
    descriptor = KeptMemory.make()
    memory, seen = KeptMemory(descriptor), KeptHandles(descriptor)
    found, handles, take = published(memory)
    first, second, other = take(10), take(10), take(11)
    assert [seen.published(one) for one in (first, second, other)] == [10, 10, 11]
    assert not seen.published(first + (1 << 20))  # a number that used this record before
    handles.give_back(second)
    found.closed(10, second)
    assert not seen.published(second)
    found.opened_to_write(10, 99)
    assert found.is_barred(10) and not seen.published(first) and seen.published(other) == 11
    found.bar(10)
    found.unbar(10)
    assert found.is_barred(10)
    found.closed(10, 99)
    assert not found.is_barred(10) and not seen.published(first)
    assert seen.published(take(10)) == 10
    before = {one.number: one for one in handles.before()}
    assert before[other].was_published and not before[first].was_published
    assert not any(one.flags & PUBLISHED for one in before.values())
    os.close(descriptor)
