"""Inode numbers: one reservation serves several requests, and fails silently when all of them were cancelled."""

import asyncio
import gc

import pytest

from nvpool.core.errors import Unavailable
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.meta.state.id_allocation import RESERVED, Numbers


def test_waiters_share_one_reservation(tmp_path):
    async def main():
        noise, answer = [], asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        kv = await LmdbKv.open(tmp_path / "kv", LmdbOptions())
        try:
            numbers = Numbers(kv)
            first = await numbers.begin()
            before, changes = numbers.bounds, kv.sequence
            await asyncio.gather(*(numbers.more() for _ in range(3)))
            assert numbers.bounds.inode == before.inode + RESERVED == first + 2 * RESERVED
            assert kv.sequence == changes + 1

            kv.sync_others = lambda sequence: answer
            waiting = [asyncio.ensure_future(numbers.more()) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            answer.set_exception(Unavailable("the standby is gone"))
            with pytest.raises(Unavailable):
                await waiting[1]
            assert (
                waiting[0].cancelled() and numbers.bounds.inode == before.inode + RESERVED
            )  # a reservation that is not synced is not used

            alone = asyncio.ensure_future(numbers.more())
            await asyncio.sleep(0)
            alone.cancel()
            await asyncio.wait([numbers.reserving])
            kv.sync_others = None
            await numbers.more()
            del waiting, alone
            gc.collect()
            assert not noise
        finally:
            await kv.close()

    asyncio.run(main())
