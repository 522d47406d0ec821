"""Worker tasks of a transfer, and the folders in progress.

Many workers copy files in parallel, in no order. A folder gets its mode and times when its last entry is
done, because each new entry would change them. An error of one file is recorded, and the transfer continues.
An unreachable or full pool ends the whole transfer, because every further file would fail the same way. The
job queue is bounded to a few jobs for each worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from nvpool.core.errors import Bug, NoSpace, NvpoolError, QuotaExceeded, Unavailable
from nvpool.sdk.transfer.progress import TransferProgress

_Place = TypeVar("_Place")
_Found = TypeVar("_Found")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Job = Callable[[], Awaitable[object]]

THREADS = 8
"""Threads for blocking calls on local files. They are enough to keep a drive busy, and few enough for two
cores."""


class Folder(Generic[_Place, _Found]):
    """A folder in progress. `left` counts the entries that are not done, plus one for the listing of the
    folder itself."""

    __slots__ = ("parent", "path", "place", "found", "left", "fresh")

    def __init__(
        self, parent: Folder[_Place, _Found] | None, path: bytes, place: _Place, found: _Found, fresh: bool
    ) -> None:
        self.parent = parent
        self.path = path
        """Path in the source."""
        self.place = place
        """Place in the destination: an inode number of the pool, or a local path."""
        self.found = found
        """Attributes in the source: os.stat_result or Attr."""
        self.left = 1
        self.fresh = fresh
        """Whether this transfer created the folder; then nothing has to be looked up in it."""
        if parent is not None:
            parent.left += 1


class Crew(Generic[_Place, _Found]):
    def __init__(
        self,
        progress: TransferProgress,
        parallel: int,
        finish_folder: Callable[[Folder[_Place, _Found]], Awaitable[None]],
    ) -> None:
        self.progress = progress
        self._parallel = parallel
        self._finish_folder = finish_folder
        self._jobs: asyncio.Queue[tuple[Folder[_Place, _Found] | None, bytes, _Job]] = asyncio.Queue(
            4 * parallel
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer")

    async def blocking(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Run a call that may block on a local file in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(function, *arguments, **named)
        )

    def later(self, function: Callable[[], object]) -> None:
        """Run a call in a thread when one is free; its result is not awaited."""
        self._threads.submit(function)

    async def run(self, listing: Awaitable[None]) -> None:
        """Await `listing`, which adds jobs, and then all jobs. Raises the error that ended the transfer."""
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
        """Queue `job` for a worker; waits while the queue is full."""
        if folder is not None:
            folder.left += 1
        await self._jobs.put((folder, path, job))

    async def _work(self) -> None:
        while True:
            folder, path, job = await self._jobs.get()
            self.progress.current = os.fsdecode(path)
            await self.guarded(path, job())
            await self.leave(folder)
            self._jobs.task_done()

    async def guarded(self, path: bytes, work: Awaitable[_Result]) -> _Result | None:
        """Await `work` and return its result. If it fails for a reason that concerns only `path`, record
        the failure and return None."""
        try:
            return await work
        except (Unavailable, NoSpace, QuotaExceeded, Bug):
            raise
        except (NvpoolError, OSError) as error:
            self.progress.fail(path, error)
            return None

    async def leave(self, folder: Folder[_Place, _Found] | None) -> None:
        """Mark one entry of `folder` as done. If it was the last one, finish the folder, and its parents
        in the same way."""
        while folder is not None:
            folder.left -= 1
            if folder.left:
                return
            self.progress.directories += 1
            await self.guarded(folder.path, self._finish_folder(folder))
            folder = folder.parent
