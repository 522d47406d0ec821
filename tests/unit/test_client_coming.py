"""Reads that are told of without a turn of the loop."""

import asyncio

from nvpool.core.futures import BlocksFuture


def test_the_listener_is_told_once_and_at_once():
    told = []
    coming = BlocksFuture(10, 20)
    coming.on_end = lambda found, error: told.append((bytes(found), error))
    assert not coming.done()
    coming.set_result(memoryview(bytes(range(64))))
    assert told == [(bytes(range(10, 30)), None)]
    assert coming.done() and not coming.cancel() and len(told) == 1


def test_whole_blocks_are_not_cut():
    blocks = memoryview(bytes(4096))
    coming = BlocksFuture(0, 4096)
    coming.set_result(blocks)
    assert coming.outcome[0] is blocks and coming.outcome[1] is None  # came before anybody listened


def test_who_gives_up_is_told_so_and_nothing_later():
    told = []
    coming = BlocksFuture(0, 4096)
    coming.on_end = lambda found, error: told.append((found, type(error)))
    assert coming.cancel()
    assert told == [(None, asyncio.CancelledError)] and coming.done()


def test_an_error_is_told():
    coming = BlocksFuture(0, 4096)
    error = OSError("no")
    coming.set_exception(error)
    assert coming.outcome == (None, error)
