"""Deferred replies: a request that waits is always answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Busy, DeadlineExceeded, WrongShard
from nvpool.meta import deferred_replies
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.testing.fakes.meta_shard import PEER, DirectCall


async def waited(then, deadline_s: float = 1e9) -> DirectCall:
    call, waits = (
        DirectCall(0, b"", deadline_s=deadline_s),
        DeferredReplies(SYSTEM_CLOCK, "shard 1", lambda error: None),
    )
    waits.add(call, lambda: asyncio.sleep(0), lambda: then(call))
    await asyncio.gather(*waits.tasks)
    return call


def test_retry_that_meets_a_locked_record_waits_again():
    async def main():
        hold, tries = SimpleNamespace(done=asyncio.get_running_loop().create_future()), []

        def then(call):
            tries.append(call)
            if not hold.done.done():
                asyncio.get_running_loop().call_soon(hold.done.set_result, None)
                raise LockedRecord(hold)
            call.reply(b"at last")

        assert (await waited(then)).answer == (b"at last", b"") and len(tries) == 2

    asyncio.run(main())


@pytest.mark.parametrize("error", (WrongShard(), ValueError()))
def test_error_after_the_wait_is_the_reply(error):
    def then(call):
        raise error

    assert asyncio.run(waited(then)).answer is error


def test_locked_record_is_waited_for_until_the_deadline():
    def then(call):
        raise LockedRecord(SimpleNamespace(done=asyncio.get_running_loop().create_future()))

    assert isinstance(asyncio.run(waited(then, SYSTEM_CLOCK.boottime_s() + 0.05)).answer, DeadlineExceeded)


def test_waiting_requests_of_one_client_are_bounded(monkeypatch):
    monkeypatch.setattr(deferred_replies, "WAITING_PER_PEER_MAX", 3)

    async def main():
        waits, over = DeferredReplies(SYSTEM_CLOCK, "shard 1", lambda error: None), asyncio.Event()

        def add(member: str, **more) -> None:
            call = DirectCall(0, b"", peer=PEER._replace(member=member))
            waits.add(call, over.wait, lambda: call.reply(b""), **more)

        for _ in range(3):
            add("client/a.1")
        with pytest.raises(
            Busy, match="3 requests of client/a.1 wait at shard 1 already, of 3 .* less in parallel"
        ):
            add("client/a.1")
        add("client/a.1", may_be_applied=True)
        add("client/b.1")
        for _ in range(5):
            add("node/alpha")
        over.set()
        await asyncio.gather(*waits.tasks)
        await asyncio.sleep(0)
        add("client/a.1")
        await asyncio.gather(*waits.tasks)

    asyncio.run(main())
