"""Reuse of memory buffers: never while a reference exists, and never beyond a bound."""

import sys
import threading

from nvpool.core.containers.buffer_pool import PayloadBuffers


def test_memory_is_reused_only_without_references():
    spares = PayloadBuffers()
    first = spares.take(100_000)
    part = first[5:10]
    memory = id(first.obj)
    second = spares.take(100_000)
    assert second.obj is not first.obj and len(first) == len(second) == 100_000
    del first
    assert id(spares.take(70_000).obj) != memory  # a part is still referenced
    del part
    assert id(spares.take(131_072).obj) == memory


def test_spare_memory_is_bounded():
    spares = PayloadBuffers()
    held = [spares.take(size) for size in (1 << 17, 1 << 20, 3 << 20) for _ in range(40)]
    assert len({id(view.obj) for view in held}) == len(held)
    held.clear()
    for size in (1 << 17, 1 << 20, 3 << 20, 32 << 20):
        spares.take(size)
        kept = sum(len(memory) for memories in spares.kept.values() for memory in memories)
        assert kept == spares.kept_bytes <= PayloadBuffers.BYTES_MAX
        assert all(len(memories) <= PayloadBuffers.COUNT_MAX for memories in spares.kept.values())


def test_threads_never_get_the_same_memory():
    spares = PayloadBuffers()
    wrong = []

    def work(number):
        for turn in range(3000):
            view = spares.take(70_000)
            mark = (number * 3000 + turn).to_bytes(4, "little")
            view[:4] = mark
            other = spares.take(70_000)
            other[:4] = b"\0\0\0\0"
            if view[:4] != mark:
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
