"""Fair queue for the steps of long requests."""

from __future__ import annotations

import asyncio

from nvpool.rpc.step_queue import StepQueue


async def iterations_of(queue, peers, steps):
    """Run a request of that many steps for each of the peers; (iteration, peer) of each step, in their order."""
    found, iteration, is_over = [], 0, False

    async def count():
        nonlocal iteration
        while not is_over:
            iteration += 1
            await asyncio.sleep(0)

    async def request(peer):
        for _ in range(steps):
            await queue.turn(peer)
            found.append((iteration, peer))

    counting = asyncio.ensure_future(count())
    await asyncio.gather(*[request(peer) for peer in peers])
    is_over = True
    await counting
    return found


def test_one_step_runs_in_an_iteration():
    found = asyncio.run(iterations_of(StepQueue(), ["a"] * 5 + ["b"] * 2, 3))
    iterations = [iteration for iteration, _ in found]
    assert len(found) == 21 and len(set(iterations)) == 21


def test_peers_take_turns_however_many_requests_they_have():
    found = asyncio.run(iterations_of(StepQueue(), ["flood"] * 50 + ["other"], 3))
    places = [at for at, (_, peer) in enumerate(found) if peer == "other"]
    assert places[0] <= 2 and places[-1] <= 8, "every other step at the latest"


def test_step_without_waiting_is_one_an_iteration():
    async def main():
        queue = StepQueue()
        assert [queue.try_begin() for _ in range(3)] == [True, False, False]
        await asyncio.sleep(0)
        assert queue.try_begin()
        waiting = asyncio.ensure_future(queue.turn("a"))
        await asyncio.sleep(0)
        assert not queue.try_begin(), "a step waits, which comes first"
        await waiting

    asyncio.run(main())


def test_turn_of_a_cancelled_request_goes_to_the_next():
    async def main():
        queue = StepQueue()
        first, second = (asyncio.ensure_future(queue.turn(peer)) for peer in "ab")
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(second, 5)
        assert first.cancelled()
        await asyncio.wait_for(queue.turn("c"), 5)

    asyncio.run(main())
