"""The workers of a transfer and the folders that they have under way.

Files are done by many workers at once, in no order. A folder gets its mode and times when the last thing in it is done, since
everything made in it would change them. What one file refuses is noted and the rest goes on; a pool that does not answer, or is
full, ends the whole, since each further file would only fail the same way. Bounded: a queue of a few jobs for each worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from nvpool.core.errors import Bug, NoSpace, NvpoolError, QuotaExceeded, Unavailable
from nvpool.sdk.transfer.progress import Tally

_Place = TypeVar("_Place")
_Found = TypeVar("_Found")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Job = Callable[[], Awaitable[object]]

THREADS = 8
"""For local files, whose calls may block: enough to keep a drive busy, few enough for two cores."""


class Folder(Generic[_Place, _Found]):
    """A folder under way. `left` counts what is not done in it, the listing of itself included."""

    __slots__ = ("parent", "path", "place", "found", "left", "fresh")

    def __init__(self, parent: Folder[_Place, _Found] | None, path: bytes, place: _Place, found: _Found,
                 fresh: bool) -> None:
        self.parent = parent
        self.path = path
        """In the source."""
        self.place = place
        """In the destination: an inode number of the pool, or a local path."""
        self.found = found
        """What the source says of it: os.stat_result or Attr."""
        self.left = 1
        self.fresh = fresh
        """Made by this transfer, so nothing has to be looked up in it."""
        if parent is not None:
            parent.left += 1


class Crew(Generic[_Place, _Found]):
    def __init__(self, tally: Tally, parallel: int,
                 finish_folder: Callable[[Folder[_Place, _Found]], Awaitable[None]]) -> None:
        self.tally = tally
        self._parallel = parallel
        self._finish_folder = finish_folder
        self._jobs: asyncio.Queue[tuple[Folder[_Place, _Found] | None, bytes, _Job]] = asyncio.Queue(4 * parallel)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer")

    async def blocking(self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args,
                       **named: _Arguments.kwargs) -> _Result:
        """Run what may block on a local file in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments, **named))

    def later(self, function: Callable[[], object]) -> None:
        """Run it in a thread, when one is free; nobody waits for it."""
        self._threads.submit(function)

    async def run(self, listing: Awaitable[None]) -> None:
        """Await `listing`, which adds jobs, and all jobs. Raises the error that ended it."""
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work()) for _ in range(self._parallel)]
                await listing
                await self._jobs.join()
                for worker in workers:
                    worker.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def add(self, folder: Folder[_Place, _Found] | None, path: bytes, job: _Job) -> None:
        """Have `job` done by a worker; waits while all have enough to do."""
        if folder is not None:
            folder.left += 1
        await self._jobs.put((folder, path, job))

    async def _work(self) -> None:
        while True:
            folder, path, job = await self._jobs.get()
            self.tally.current = os.fsdecode(path)
            await self.guarded(path, job())
            await self.leave(folder)
            self._jobs.task_done()

    async def guarded(self, path: bytes, work: Awaitable[_Result]) -> _Result | None:
        """The result of `work`, or None where it failed for a reason of `path` alone, which is noted."""
        try:
            return await work
        except (Unavailable, NoSpace, QuotaExceeded, Bug):
            raise
        except (NvpoolError, OSError) as error:
            self.tally.fail(path, error)
            return None

    async def leave(self, folder: Folder[_Place, _Found] | None) -> None:
        """One thing in `folder` is done; finishes it, and the ones above, where it was the last."""
        while folder is not None:
            folder.left -= 1
            if folder.left:
                return
            self.tally.directories += 1
            await self.guarded(folder.path, self._finish_folder(folder))
            folder = folder.parent
