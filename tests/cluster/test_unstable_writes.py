"""Real stores that lose unstable writes, while the client that wrote them lives on."""

from __future__ import annotations

import asyncio
import errno
import signal

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.kv.engine import LmdbKv
from nvpool.store.disk import write_verifier
from nvpool.testing.env.pool import RealPool, end_process


def reboot(pool: RealPool) -> None:
    """As if the machine of the targets, whose processes are dead, had rebooted."""

    async def forget() -> None:
        for target in pool.pool_map.targets:
            kv = await LmdbKv.open(pool.directory.target(target.id) / "index")
            write_verifier.opened(kv, SYSTEM_CLOCK, "another boot", lost=False)
            await kv.sync(kv.sequence)
            await kv.close()

    asyncio.run(forget())


@pytest.mark.few(1)
@pytest.mark.smoke
@pytest.mark.parametrize("replicas", [1, 2])
def test_client_is_notified_of_writes_that_stores_lost(tmp_path, replicas):
    with RealPool(tmp_path / "pool", replicas=replicas) as pool:
        pool.make()
        pool.start()
        client = pool.connect(60.0)
        with (
            client.open("/killed", "wb", buffering=0) as killed,
            client.open("/lost", "wb", buffering=0) as lost,
        ):
            killed.write(b"k" * 3_000_000)
            killed.flush()
            for target in (1, 2):
                before = pool.pid(f"target-{target}")
                end_process(before, signal.SIGKILL)
                pool.until(lambda: pool.pid(f"target-{target}") != before, "another process serves", 60)  # noqa: B023
                pool.wait()
            killed.fsync()  # the death of a process loses nothing
            lost.write(b"l" * 3_000_000)
            lost.flush()
            pool.end_daemons()
            reboot(pool)
            pool.start()
            with pytest.raises(OSError) as raised:
                lost.fsync()
            assert raised.value.errno == errno.EIO
            lost.fsync()  # the error is reported once
            killed.fsync()
        assert client.read_bytes("/killed") == b"k" * 3_000_000
        assert pool.fsck() == []
