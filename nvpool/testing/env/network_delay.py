"""A link with latency: two network devices of one namespace that exchange their frames after a delay.

    python -m nvpool.testing.env.network_delay A B DELAY_S_A_TO_B DELAY_S_B_TO_A

makes the taps A and B, prints "ready" and forwards frames until it is killed, which removes both. Frames keep
their order and content; more than FRAMES_MAX in flight are lost, as in any switch. It works below IP, so
existing connections survive and no program has to know of it. Used by Machines.delay of `namespaces`; not
every kernel has netem, which does the same.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import sys
from collections import deque

FRAMES_MAX = 20_000
"""30 MB."""
FRAMES_PER_BATCH = 64
"""Most frames that are taken from one side before the other side has its turn."""
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
"""IFF_TAP, IFF_NO_PI: see tun(4), Documentation/networking/tuntap.rst.

Without IFF_VNET_HDR the kernel delivers frames with their checksums.
"""


def tap(name: str) -> int:
    """Make a network device and return its descriptor. The device ends with the descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


class Direction:
    def __init__(self, source: int, sink: int, delay_s: float) -> None:
        self._source, self._sink, self._delay_s = source, sink, delay_s
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._loop.add_reader(source, self._take)

    def _take(self) -> None:
        arrives_s = self._loop.time() + self._delay_s
        idle = not self._under_way
        for _ in range(FRAMES_PER_BATCH):
            try:
                frame = os.read(self._source, 65536)
            except OSError:
                break  # no more frames, or the device is down
            if len(self._under_way) < FRAMES_MAX:
                self._under_way.append((arrives_s, frame))
        if idle and self._under_way:
            self._loop.call_at(self._under_way[0][0], self._hand_over)

    def _hand_over(self) -> None:
        now_s = self._loop.time()
        while self._under_way and self._under_way[0][0] <= now_s:
            try:
                os.write(self._sink, self._under_way.popleft()[1])
            except OSError:
                continue  # the device is down or full: lost
        if self._under_way:
            self._loop.call_at(self._under_way[0][0], self._hand_over)


async def carry(one: str, other: str, there_s: float, back_s: float) -> None:
    first, second = tap(one), tap(other)
    directions = Direction(first, second, there_s), Direction(second, first, back_s)
    print("ready", flush=True)
    await asyncio.get_running_loop().create_future()
    del directions


if __name__ == "__main__":
    asyncio.run(carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
