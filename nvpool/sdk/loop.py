"""An event loop in a thread of its own, with a client on it: what stands behind the synchronous face of the SDK.

uvloop where it is installed, asyncio's own loop otherwise. Called by sdk/filesystem only.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from nvpool.client.options import ClientOptions
from nvpool.sdk.asynchronous import AsyncFileSystem


class Runtime:
    """An event loop in a thread, and the client that lives on it."""

    def __init__(self, where, name: str, options: ClientOptions | None):
        self.pid = os.getpid()
        self.loop = _new_loop()
        self.thread = threading.Thread(target=self._run, name="nvpool", daemon=True)
        self.thread.start()
        try:
            self.pool: AsyncFileSystem = self.call(AsyncFileSystem.connect(where, name=name, options=options))
        except BaseException:
            self.stop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # A call of another thread that is still at work would wait for ever for a loop that runs no more.
        for _ in range(3):
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def call(self, work):
        future: Future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: do not leave the work behind
            raise

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5.0)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
