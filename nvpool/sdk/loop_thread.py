"""Runtime of the synchronous SDK: an event loop in its own thread, with a client.

The loop is uvloop if that is installed, otherwise asyncio's own. Only sdk/filesystem uses this module.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from nvpool.client.read.caller_thread_reads import ThreadReads
from nvpool.sdk.async_filesystem import AsyncFileSystem, connected
from nvpool.sdk.connect_argument import Origin

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class LoopCall(Generic[_Result]):
    """One coroutine on the loop for which one thread waits, by a lock. asyncio.run_coroutine_threadsafe
    takes twice as long (23 µs instead of 13), because its future supports any number of waiting threads."""

    __slots__ = ("_loop", "_work", "_task", "_ended")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _Result]) -> None:
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[_Result] | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self) -> _Result:
        """Run the coroutine on the loop; return its result or raise its error. CancelledError of
        concurrent.futures: the loop ended first."""
        try:
            self._loop.call_soon_threadsafe(self._begin)
            self._ended.acquire()
        except RuntimeError:
            self._work.close()  # the loop is closed, so the coroutine never starts
            raise
        except BaseException:  # Ctrl-C: cancel the work, too
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        assert self._task is not None  # the task has ended, so it exists
        if self._task.cancelled():
            raise CancelledError
        return self._task.result()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[_Result]) -> None:
        self._ended.release()

    def _cancel(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


class Runtime:
    """Event loop in its own thread, and the client that runs on it."""

    def __init__(self, origin: Origin) -> None:
        self.pid = os.getpid()
        self.loop = _new_loop()
        self.thread = threading.Thread(target=self._run, name="nvpool", daemon=True)
        self.thread.start()
        self.reads: ThreadReads = None  # type: ignore[assignment]  # only `stop` sees it, if connecting fails
        self._later: asyncio.Task[None] | None = None
        try:
            self.pool: AsyncFileSystem = self.call(_connected(origin))
            self.reads = ThreadReads(self.pool.vfs, self.pool.client.dialer)
        except BaseException:
            self.stop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Cancel running calls: a thread that waits for one would wait forever for a stopped loop.
        for _ in range(3):
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run the coroutine on the loop; return its result or raise its error. The loop's own thread
        cannot wait for itself: there the call returns None, and the coroutine runs later."""
        if self.is_here():
            self._do_later(work)
            return None  # type: ignore[return-value]  # to finalizers, which use no result
        return LoopCall(self.loop, work).wait()

    def is_here(self) -> bool:
        """Whether the calling thread is the loop's thread. Code of the program runs there only in the
        garbage collector, which closes files that the program forgot in whichever thread it happens to
        run."""
        return threading.get_ident() == self.thread.ident

    def _do_later(self, work: Coroutine[Any, Any, object]) -> None:
        before = self._later

        async def do() -> None:
            if before is not None:
                await asyncio.wait([before])  # keep the order: a write runs before the close that follows it
            try:
                await work
            except Exception as error:
                log.warning("closing a file that the program left open: %s", error)

        self._later = self.loop.create_task(do())

    async def done(self) -> None:
        """Wait for the coroutines that `call` deferred in the loop's thread."""
        if self._later is not None:
            await asyncio.wait([self._later])

    def stop(self) -> None:
        if self.reads is not None:
            self.reads.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5.0)


async def _connected(origin: Origin) -> AsyncFileSystem:
    return AsyncFileSystem(*await connected(origin))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
