"""Keep the processors of this machine from sleeping while requests come.

A request crosses two or three processes, each of which waits for the one before: six wake-ups for a read, more for a new file.
A processor that fell asleep in between takes 2 to 200 µs to come back, on real machines out of a deep C-state, in virtual ones
by way of the hypervisor. Measured on two virtual cores whose guest does not poll before it halts: 1,070 files a second created,
written and closed by one thread, and 1,600 to 1,800 with its processors kept awake. So daemons and mounts hold a request on
/dev/cpu_dma_latency (Documentation/power/pm_qos_interface.rst of Linux) while they have BURST_MIN and more requests in
LINGER_S. It holds for all processors of the machine, and costs power, and turbo clocks, while it holds. In a guest it
makes idle virtual processors poll, which its host has to pay: so large guests are left alone unless they are told otherwise.

Called by the programs beside it. Never fails: without the device or the right to it (containers, other users than root)
processors sleep as they like, and one line of the log says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from pathlib import Path

LINGER_S = 0.05
BURST_MIN = 8
"""160 requests a second: who asks less often waits for other things than for processors."""

AUTO_PROCESSORS_MAX = 16
"""A guest with more is left to sleep."""

SHALLOW_US = 2
"""Real processors may sleep so that they are back within this: in C1 (1 to 2 µs), not deeper (10 to 200 µs)."""

NO_LIMIT_US = 2_000_000_000
"""PM_QOS_CPU_LATENCY_DEFAULT_VALUE."""

_DEVICE = Path("/dev/cpu_dma_latency")
_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")

log = logging.getLogger("nvpool.runtime.cpu_latency")


class Awake:
    """The wish of one process. Call `touch` for each request, or for a few that come together; `close` takes the wish back, and
    so does any end of the process. wanted: auto, always or never, as in the configuration."""

    def __init__(self, wanted: str, device: Path = _DEVICE, driver: Path = _DRIVER, processors: int | None = None) -> None:
        self._descriptor = -1
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._touches = 0
        self._holds = False
        if wanted == "never":
            return
        try:
            # haltpoll is the driver of guests: there any sleep is a way through the hypervisor, though it claims 1 µs.
            guest = driver.exists() and driver.read_text().strip() == "haltpoll"
            self._limit_us = 0 if guest else SHALLOW_US
            if guest and wanted == "auto" and (processors or os.cpu_count() or 1) > AUTO_PROCESSORS_MAX:
                log.info("processors may sleep between requests: this guest has many; [processors] awake = \"always\" keeps "
                         "all of them awake under load")
                return
            self._descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            log.info("processors may sleep between requests: %s: %s", device, error.strerror)

    def touch(self) -> None:
        self._touches += 1
        if self._timer is None and self._descriptor >= 0:
            self._timer = self._loop.call_later(LINGER_S, self._look)

    def _look(self) -> None:
        """A window is over: the next one is as busy as this one was."""
        touches, self._touches = self._touches, 0
        busy = touches >= BURST_MIN
        self._timer = self._loop.call_later(LINGER_S, self._look) if busy else None
        if busy != self._holds:
            self._holds = busy
            self._limit(self._limit_us if busy else NO_LIMIT_US)

    def _limit(self, limit_us: int) -> None:
        try:
            os.write(self._descriptor, struct.pack("=i", limit_us))
        except OSError as error:
            log.warning("processors can not be kept awake: %s", error.strerror)
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._holds = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
