"""Watch of submitted writes: they end when a newer map has another head, and the map is followed while replies are late."""

import asyncio
from types import SimpleNamespace

import pytest

from nvpool.client.data import head_watch
from nvpool.client.data.head_watch import HeadWatch
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import StaleEpoch


class SentWrite:
    def __init__(self, watch: HeadWatch) -> None:
        self.watch = watch
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.watch.remove(self)
        self.error = error


class Case:
    def __init__(self) -> None:
        self.heads = {"file": 1, "other": 2}
        self.followed = 0
        self.watch = HeadWatch(SimpleNamespace(follow=self.follow), SYSTEM_CLOCK, self.chain)

    def follow(self) -> None:
        self.followed += 1

    def chain(self, file, index):
        if file not in self.heads:
            raise StaleEpoch("no such table")
        return SimpleNamespace(targets=(self.heads[file], 9))

    def sent(self, file: str) -> SentWrite:
        writing = SentWrite(self.watch)
        self.watch.add(writing, file, 0, self.heads[file])
        return writing


def in_loop(test):
    def run(monkeypatch):
        monkeypatch.setattr(head_watch, "PATIENCE_S", 0.02)
        asyncio.run(asyncio.wait_for(test(Case()), 20))

    return run


@in_loop
async def test_write_ends_when_its_chain_has_another_head(here: Case):
    moved, kept, gone = here.sent("file"), here.sent("other"), here.sent("file")
    here.watch.remove(gone)
    here.heads["file"] = 3
    here.watch.map_changed()
    assert isinstance(moved.error, StaleEpoch) and kept.error is None and gone.error is None
    del here.heads["other"]  # the new map does not know the chain table
    here.watch.map_changed()
    assert isinstance(kept.error, StaleEpoch) and not here.watch.is_watching


@in_loop
async def test_map_is_followed_while_a_reply_is_late(here: Case):
    writing = here.sent("file")
    await asyncio.sleep(0.005)
    assert not here.followed
    while here.followed < 3:  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0.005)
    assert writing.error is None
    here.watch.remove(writing)
    followed = here.followed
    await asyncio.sleep(0.1)
    assert here.followed == followed


@in_loop
async def test_map_is_not_followed_while_replies_come_in_time(here: Case):
    for _ in range(30):
        writing = here.sent("file")
        await asyncio.sleep(0)
        here.watch.remove(writing)
        await asyncio.sleep(0.002)
    assert not here.followed


@pytest.mark.parametrize("waits", [False, True])
def test_closed_watch_has_no_timer(waits):
    async def scene() -> None:
        here = Case()
        if waits:
            here.sent("file")
        here.watch.close()
        here.watch.close()
        assert not here.followed

    asyncio.run(scene())
