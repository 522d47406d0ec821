"""Reads that complete without an event-loop iteration."""

import asyncio

from nvpool.core.futures import BlocksFuture


def test_listener_is_called_once_and_immediately():
    results = []
    coming = BlocksFuture(10, 20)
    coming.on_end = lambda found, error: results.append((bytes(found), error))
    assert not coming.done()
    coming.set_result(memoryview(bytes(range(64))))
    assert results == [(bytes(range(10, 30)), None)]
    assert coming.done() and not coming.cancel() and len(results) == 1


def test_complete_blocks_are_not_copied():
    blocks = memoryview(bytes(4096))
    coming = BlocksFuture(0, 4096)
    coming.set_result(blocks)
    assert coming.outcome[0] is blocks and coming.outcome[1] is None  # the result came before a listener


def test_cancelled_read_reports_only_its_cancellation():
    results = []
    coming = BlocksFuture(0, 4096)
    coming.on_end = lambda found, error: results.append((found, type(error)))
    assert coming.cancel()
    assert results == [(None, asyncio.CancelledError)] and coming.done()


def test_error_is_the_outcome():
    coming = BlocksFuture(0, 4096)
    error = OSError("no")
    coming.set_exception(error)
    assert coming.outcome == (None, error)
