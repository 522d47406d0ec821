"""A InProcessPool that other threads and processes reach by unix sockets, for tests of the SDK.

Its event loop runs in a thread, so a test may block in the synchronous SDK.
"""

from __future__ import annotations

import asyncio
import threading

from nvpool.core.units import MIB
from nvpool.testing.fakes.in_process_pool import InProcessPool


class UnixSocketPool:
    """A InProcessPool that serves at unix sockets until it is closed."""

    def __init__(self, where: str):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.pool = InProcessPool(
            capacities=(128 * MIB, 192 * MIB),
            endpoints=lambda role, number: f"stream+unix://{where}/{role}-{number}.sock",
        )
        self.run(self.pool.__aenter__())

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.run(self.pool.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
