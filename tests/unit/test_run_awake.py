"""Processors are kept awake while requests come, and only then."""

import asyncio
import os
import struct

import pytest

from nvpool.run.awake import LINGER_S, NO_LIMIT_US, SHALLOW_US, Awake


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    return path


def limits(device) -> list[int]:
    return [limit for limit, in struct.iter_unpack("=i", device.read_bytes())]


async def until_quiet(awake: Awake) -> None:
    for _ in range(1000):
        if awake._timer is None:
            return
        await asyncio.sleep(LINGER_S / 5)
    raise AssertionError("processors are kept awake for ever")


def test_a_burst_of_requests_keeps_processors_awake_until_it_is_over(device, tmp_path):
    async def burst():
        awake = Awake(True, device, tmp_path / "no-driver")
        assert limits(device) == []
        for _ in range(100):
            awake.touch()
        assert limits(device) == [SHALLOW_US]
        await until_quiet(awake)
        awake.touch()
        awake.touch()
        awake.close()

    asyncio.run(burst())
    assert limits(device) == [SHALLOW_US, NO_LIMIT_US, SHALLOW_US]  # the last is taken back by the closing itself


def test_in_a_guest_no_halt_is_shallow_enough(device, tmp_path):
    (tmp_path / "driver").write_text("haltpoll\n")

    async def burst():
        awake = Awake(True, device, tmp_path / "driver")
        awake.touch()
        awake.close()

    asyncio.run(burst())
    assert limits(device) == [0]


@pytest.mark.parametrize("wanted", [True, False])
def test_without_the_device_or_the_wish_requests_are_served_all_the_same(tmp_path, wanted, device):
    async def burst():
        awake = Awake(wanted, tmp_path / "none" if wanted else device, tmp_path / "no-driver")
        awake.touch()
        assert awake._timer is None
        awake.close()

    asyncio.run(burst())
    assert limits(device) == []


def test_a_wish_that_the_kernel_refuses_is_dropped(device, tmp_path, caplog):
    async def burst():
        awake = Awake(True, device, tmp_path / "no-driver")
        os.close(awake._descriptor)
        awake._descriptor = os.open(device, os.O_RDONLY)
        awake.touch()
        assert awake._descriptor == -1
        awake.touch()
        assert awake._timer is None
        awake.close()

    asyncio.run(burst())
    assert "can not be kept awake" in caplog.text
