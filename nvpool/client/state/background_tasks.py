"""Background tasks of a client: started by an operation, awaited by no caller.

The event loop keeps only weak references to tasks, so a task without an owner may be collected while it runs.
The owner of these tasks cancels them when the client closes. Used by client/vfs and
client/rpc/inode_attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """The running background tasks of one owner."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task for `work` and keep it until it ends.

        An error of the task is its own affair: `work` handles it, or the caller adds a callback that retrieves it.
        """
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all running tasks. Does not wait for their ends."""
        for task in list(self.running):
            task.cancel()
