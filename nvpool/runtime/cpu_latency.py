"""CPU latency request: keeps the processors awake while requests arrive.

A request passes through two or three processes, each of which waits for the one before: six wake-ups for a
read, more for a new file. A processor that fell asleep in between needs 2 to 200 µs to wake up, on real
machines from a deep C-state, on virtual ones because of the hypervisor. Measured on two virtual cores whose
guest does not poll before it halts: 1,070 files a second created, written and closed by one thread, and 1,600
to 1,800 with the processors kept awake.

So daemons and mounts hold a request on /dev/cpu_dma_latency (Documentation/power/pm_qos_interface.rst of
Linux) while they receive BURST_MIN or more requests in LINGER_S. The request applies to all processors of the
machine, and costs power and turbo clocks while it is held. In a guest it makes idle virtual processors poll,
which costs the host: so large guests are left alone unless the configuration says otherwise.

Used by the daemons and mounts. Never fails: without the device or the right to use it (containers, other
users than root) the processors sleep as usual, and one log line reports that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from pathlib import Path

LINGER_S = 0.05
BURST_MIN = 8
"""Requests in LINGER_S, 160 a second: a client with fewer requests waits for other things than for
processors."""

AUTO_PROCESSORS_MAX = 16
"""Most processors of a guest that are kept awake with "auto"."""

SHALLOW_US = 2
"""Wake-up time that real processors may need: C1 takes 1 to 2 µs, deeper states 10 to 200 µs."""

NO_LIMIT_US = 2_000_000_000
"""PM_QOS_CPU_LATENCY_DEFAULT_VALUE of Linux."""

_DEVICE = Path("/dev/cpu_dma_latency")
_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")

log = logging.getLogger("nvpool.runtime.cpu_latency")


class CpuLatencyRequest:
    """The latency request of one process.

    Call `touch` for each request, or once for a few that arrive together. `close` withdraws the latency
    request, and so does any end of the process. `wanted` is auto, always or never, as in the configuration.
    """

    def __init__(
        self, wanted: str, device: Path = _DEVICE, driver: Path = _DRIVER, processors: int | None = None
    ) -> None:
        self.descriptor = -1
        self._loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self._touches = 0
        self._holds = False
        if wanted == "never":
            return
        try:
            # haltpoll is the driver of guests: there any sleep goes through the hypervisor, although it
            # reports 1 µs.
            guest = driver.exists() and driver.read_text().strip() == "haltpoll"
            self._limit_us = 0 if guest else SHALLOW_US
            if guest and wanted == "auto" and (processors or os.cpu_count() or 1) > AUTO_PROCESSORS_MAX:
                log.info(
                    'processors may sleep between requests: this guest has many; [processors] awake = "always" keeps '
                    "all of them awake under load"
                )
                return
            self.descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            log.info("processors may sleep between requests: %s: %s", device, error.strerror)

    def touch(self) -> None:
        self._touches += 1
        if self.timer is None and self.descriptor >= 0:
            self.timer = self._loop.call_later(LINGER_S, self.end_window)

    def end_window(self) -> None:
        """End of a time window: expect the next one to be as busy as this one."""
        touches, self._touches = self._touches, 0
        busy = touches >= BURST_MIN
        self.timer = self._loop.call_later(LINGER_S, self.end_window) if busy else None
        if busy != self._holds:
            self._holds = busy
            self._limit(self._limit_us if busy else NO_LIMIT_US)

    def _limit(self, limit_us: int) -> None:
        try:
            os.write(self.descriptor, struct.pack("=i", limit_us))
        except OSError as error:
            log.warning("processors cannot be kept awake: %s", error.strerror)
            self.close()

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._holds = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
