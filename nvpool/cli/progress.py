"""Progress display of long commands, on stderr: a bar on a terminal, a line every few seconds in a pipe.

The commands that move or check much data use this module. The work does not know about the display, which
samples the work from outside: ten times a second for the bar. With --json nothing is shown.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from nvpool.cli.output import say
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import format_bytes

Result = TypeVar("Result")

LOOK_S = 0.1
FIRST_S = 0.5
"""Delay before the bar appears: a request that is refused is refused within this time."""
LINE_S = 5.0
"""Interval of lines in a pipe: short enough to see that the command lives, long enough for a log."""


class ProgressSample(NamedTuple):
    """One sample of the work. `total` is None, or still grows, until the total is known."""

    done: int
    total: int | None
    text: str = ""
    in_bytes: bool = True


async def shown(
    title: str, work: Awaitable[Result], look: Callable[[], ProgressSample], *, quiet: bool = False
) -> Result:
    """Await `work`, show samples of `look` meanwhile, return the result. Cancelled with its caller."""
    task = asyncio.ensure_future(work)
    if quiet:
        return await task
    try:
        return await (_bar if sys.stderr.isatty() else _lines)(title, task, look)
    finally:
        task.cancel()


async def _lines(title: str, task: asyncio.Future[Result], look: Callable[[], ProgressSample]) -> Result:
    began_s = SYSTEM_CLOCK.boottime_s()
    while not task.done():
        await asyncio.wait([task], timeout=LINE_S)
        if task.done() and (task.cancelled() or task.exception() is not None):
            break  # the caller reports its error
        seen = look()
        share = f"{100 * seen.done // seen.total}%, " if seen.total else ""
        amount = format_bytes(seen.done) if seen.in_bytes else f"{seen.done:,}"
        seconds = SYSTEM_CLOCK.boottime_s() - began_s
        say(f"{title}: {share}{amount} in {seconds:.0f} s{', ' + seen.text if seen.text else ''}")
    return await task


async def _bar(title: str, task: asyncio.Future[Result], look: Callable[[], ProgressSample]) -> Result:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    await asyncio.wait([task], timeout=FIRST_S)
    if task.done():
        return await task  # most often an error: there is no progress to show
    in_bytes = look().in_bytes
    amounts = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if in_bytes
        else (TextColumn("{task.completed:,}"),)
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *amounts,
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=None, text="")
        while True:
            done, _ = await asyncio.wait([task], timeout=LOOK_S)
            seen = look()
            progress.update(bar, completed=seen.done, total=seen.total or None, text=seen.text)
            if done:
                return await task
