"""Processors are kept out of deep sleep states while many requests arrive, and only then."""

import asyncio
import os
import struct

import pytest

from nvpool.runtime.cpu_latency import (
    AUTO_PROCESSORS_MAX,
    BURST_MIN,
    LINGER_S,
    NO_LIMIT_US,
    SHALLOW_US,
    CpuLatencyRequest,
)


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    return path


def limits(device) -> list[int]:
    return [limit for (limit,) in struct.iter_unpack("=i", device.read_bytes())]


def burst(awake: CpuLatencyRequest, count: int = BURST_MIN) -> None:
    for _ in range(count):
        awake.touch()


async def until_quiet(awake: CpuLatencyRequest) -> None:
    for _ in range(1000):
        if awake.timer is None:
            return
        await asyncio.sleep(LINGER_S / 5)
    raise AssertionError("processors stay awake forever")


def test_many_requests_keep_processors_awake_while_they_run(device, tmp_path):
    async def work():
        awake = CpuLatencyRequest("auto", device, tmp_path / "no-driver")
        burst(awake, 100)
        await until_quiet(awake)
        assert limits(device) == [SHALLOW_US, NO_LIMIT_US]
        burst(awake)
        awake.end_window()
        burst(awake)
        awake.end_window()
        awake.close()

    asyncio.run(work())
    assert limits(device) == [
        SHALLOW_US,
        NO_LIMIT_US,
        SHALLOW_US,
    ]  # closing withdraws the last one


def test_rare_requests_change_no_kernel_setting(device, tmp_path):
    async def work():
        awake = CpuLatencyRequest("auto", device, tmp_path / "no-driver")
        for _ in range(5):
            awake.touch()
            await until_quiet(awake)
        awake.close()

    asyncio.run(work())
    assert limits(device) == []


@pytest.mark.parametrize(
    "wanted, processors, asked",
    [
        ("auto", AUTO_PROCESSORS_MAX, [0]),
        ("auto", AUTO_PROCESSORS_MAX + 1, []),
        ("always", AUTO_PROCESSORS_MAX + 1, [0]),
    ],
)
def test_guest_limits_depend_on_its_processor_count(device, tmp_path, wanted, processors, asked):
    (tmp_path / "driver").write_text("haltpoll\n")

    async def work():
        awake = CpuLatencyRequest(wanted, device, tmp_path / "driver", processors)
        burst(awake)
        if awake.timer is not None:
            awake.end_window()
        awake.close()

    asyncio.run(work())
    assert limits(device) == asked


@pytest.mark.parametrize("wanted", ["auto", "never"])
def test_requests_are_served_without_the_device_or_option(tmp_path, wanted, device):
    async def work():
        awake = CpuLatencyRequest(
            wanted, tmp_path / "none" if wanted == "auto" else device, tmp_path / "no-driver"
        )
        burst(awake)
        assert awake.timer is None
        awake.close()

    asyncio.run(work())
    assert limits(device) == []


def test_limit_that_the_kernel_refuses_is_dropped(device, tmp_path, caplog):
    async def work():
        awake = CpuLatencyRequest("auto", device, tmp_path / "no-driver")
        os.close(awake.descriptor)
        awake.descriptor = os.open(device, os.O_RDONLY)
        burst(awake)
        awake.end_window()
        assert awake.descriptor == -1
        awake.touch()
        assert awake.timer is None
        awake.close()

    asyncio.run(work())
    assert "cannot be kept awake" in caplog.text
