"""Prefaulted memory: its content is unchanged, and each page is mapped."""

import mmap
import os
import re

from nvpool.shm.memfd import fault_in, make_sealed

PAGE = mmap.PAGESIZE
SIZE = 40 * PAGE


def resident(name):
    with open("/proc/self/smaps") as file:
        return int(re.search(r"Rss:\s+(\d+) kB", file.read().partition(name)[2])[1]) << 10


def test_each_page_is_mapped_and_unchanged():
    descriptor = make_sealed("nvpool faulted", SIZE, b"head")
    try:
        os.pwrite(descriptor, b"tail", SIZE - 4)
        with mmap.mmap(descriptor, SIZE) as memory:
            assert resident("nvpool faulted") == 0
            view = memoryview(memory)
            assert fault_in(view) is view
            assert resident("nvpool faulted") == SIZE
            assert view[:4] == b"head" and view[-4:] == b"tail" and not any(view[4:-4])
            view.release()
    finally:
        os.close(descriptor)


def test_length_that_is_not_a_multiple_of_the_page_size():
    assert fault_in(bytearray(b"abc")) == b"abc"
    assert fault_in(bytearray(b"x" * (PAGE + 1))) == b"x" * (PAGE + 1)
