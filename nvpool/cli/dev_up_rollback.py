"""Rollback of a `dev up` that was interrupted or failed.

After an interruption the new pool is removed; if the removal fails, a message names the command that removes
the pool. An interruption is Ctrl-C, SIGTERM or SIGHUP (the terminal was closed). A pool that existed before
is never removed, because it may hold files of users. After an error the new pool stays, with the logs that
explain the error. A second Ctrl-C stops the removal and prints what remains.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from nvpool.cli.output import say
from nvpool.core.errors import NvpoolError
from nvpool.host.pool_directory import PoolDirectory, being_made


class DevUpRollback:
    """Context manager around the work of `dev up`. `mountpoint` is where the pool will be mounted."""

    def __init__(self, directory: PoolDirectory, mountpoint: str | None) -> None:
        self.directory = directory
        self._mountpoint = mountpoint
        path = directory.path
        self._was_there = path.is_dir()
        self._is_ours = (
            not os.path.lexists(path)
            or being_made(directory)
            or (self._was_there and not any(path.iterdir()))
        )
        self._ran = directory.supervisor() is not None
        self._place_was_there = mountpoint is None or os.path.lexists(mountpoint)
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | signal.Handlers | None] = {}

    def __enter__(self) -> DevUpRollback:
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # not in the main thread: a test
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt):
                self._undo()
            elif isinstance(error, Exception):
                self._explain()
        finally:
            for number, before in self._before.items():
                signal.signal(number, before)

    def _undo(self) -> None:
        place = self.directory.path
        if not self._is_ours:
            say(
                f"the pool in {place} was there before and stays"
                + (self._started() if self._is_left_running() else "")
            )
            return
        if not os.path.lexists(place):
            say("nothing was made yet")
            return
        say(f"interrupted; removing the pool in {place} again")
        try:
            self._remove()
        except BaseException as error:
            reason = "" if isinstance(error, KeyboardInterrupt) else f" ({error})"
            how = f"nvpool dev down {place}" if self.directory.exists() else f"rm -r {place}"
            say(f"the pool in {place} is not removed{reason}; remove it with: {how}")
            if not isinstance(error, KeyboardInterrupt | NvpoolError | OSError):
                raise
        else:
            say(f"{place} is as it was before")

    def _explain(self) -> None:
        place = self.directory.path
        if self._is_ours and self.directory.exists() and not being_made(self.directory):
            runs = " and runs" if self._is_left_running() else ""
            say(
                f"the pool in {place} was made{runs}; when the reason below is mended, repeat this command, or remove the pool "
                f"with: nvpool dev down {place}"
            )
        elif not self._is_ours and self._is_left_running():
            say(f"the pool in {place} was there before and stays{self._started()}")

    def _is_left_running(self) -> bool:
        return self.directory.supervisor() is not None and not self._ran

    def _started(self) -> str:
        place = self.directory.path
        text = f"; it was started, and runs; look at it with: nvpool status {place}"
        if (place / "throw-away").exists():  # `dev down` refuses any other pool
            text += f"; to stop and remove it (this destroys its files): nvpool dev down {place}"
        return text

    def _remove(self) -> None:
        from nvpool.cli import pool_lifecycle
        from nvpool.cli.mount.control import mountpoints_of, unmount

        for point in mountpoints_of(self.directory):
            unmount(point, lazy=True)
        self.directory.run.mkdir(exist_ok=True)
        pool_lifecycle.remove(self.directory, pool_lifecycle.stop(self.directory))
        if self._was_there:
            self.directory.path.mkdir()
        if not self._place_was_there and self._mountpoint is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._mountpoint)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
