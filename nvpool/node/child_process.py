"""One supervised process: started, adopted, monitored and restarted.

Used by node/supervisor. Guarantees: no second process is started for a shard or target while any process
holds its lock (run/NAME.lock). A process is signalled only while it is certainly the intended one (pidfd). Each
wait ends when a stop is requested. This module never reads the data that the process stores.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from nvpool.core.clock import Clock
from nvpool.core.config import SupervisorConfig as Timing
from nvpool.core.errors import NvpoolError
from nvpool.host.pool_directory import PoolDirectory, holder_of
from nvpool.host.process_identity import ProcessIdentity, runs
from nvpool.runtime.daemon_process import EXIT_IN_USE, spawn

_LOG_BYTES = 64 << 10
"""Size of the end of a log that is searched: the last error and the traceback after it."""
_READY_POLL_S = 0.05
_READY_POLL_S_MAX = 1.0

log = logging.getLogger("nvpool.node.child_process")


class Child:
    def __init__(
        self,
        directory: PoolDirectory,
        role: str,
        number: int,
        arguments: list[str],
        timing: Timing,
        clock: Clock,
        before_start: Callable[[], Awaitable[None]] | None = None,
        on_death: Callable[[int], None] = lambda pid: None,
        name: str = "",
        keeps_memory: bool = False,
    ):
        """Describe a process; `keep` starts it.

        `before_start` is awaited before a new process is started (not before one is adopted); while it fails,
        no process is started. `on_death` is called with the pid when a process has ended that was not asked
        to. `keeps_memory`: each started process gets a memfd that outlives it; the last two arguments are its
        descriptor and the time since when every process has had that memfd.
        """
        self.name = name or f"{'target' if role == 'store' else role}-{number}"
        self.role = role
        self.number = number
        self.state = "starting"
        self.restarts = 0
        self.adopted = False
        self.since_ms = 0
        self.last_end = ""
        self.reason = ""
        """Reason that the last process gave for its end in its log. Empty once a process serves."""
        self._directory = directory
        self._arguments = arguments
        self._before_start = before_start
        self._on_death = on_death
        self._timing = timing
        self._clock = clock
        self._identity: ProcessIdentity | None = None
        self._pidfd = -1
        self._popen: subprocess.Popen | None = None
        self._serves_since_s = math.inf
        self._keeps_memory = keeps_memory
        self._memory = -1
        self._memory_since_s = 0.0

    @property
    def pid(self) -> int:
        """Process id; 0 when no process runs."""
        return self._identity.pid if self._identity else 0

    async def keep(self, stopping: asyncio.Event) -> None:
        """Keep the process running until `stopping` is set; the process is not stopped on return."""
        delay = self._timing.restart_delay_min_s
        while not stopping.is_set():
            self._serves_since_s = math.inf
            code = await self._run(stopping)
            if self._identity is not None:
                return  # a stop was requested while it runs
            if stopping.is_set():
                break
            if self._clock.boottime_s() - self._serves_since_s >= self._timing.healthy_s:
                delay = self._timing.restart_delay_min_s
            if code == EXIT_IN_USE:
                log.info("%s already runs; another process started it", self.name)
            else:
                self.restarts += 1
                log.warning("%s has ended (%s); starting it again in %.2f s", self.name, self.last_end, delay)
            self.state = "restarting"
            await wait_until_set(stopping, delay)
            delay = min(delay * 2, self._timing.restart_delay_max_s)
        self.state = "stopped"

    def signal(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    async def end(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Ask the process to end, wait `drain_s` (less once `hurry` is set), then kill it.

        It has ended on return.
        """
        if self._identity is None:
            return
        self.state = "draining"
        self.signal(signal.SIGTERM)
        if not await self._gone(drain_s, hurry):
            log.warning("%s did not end within %.0f s and is killed", self.name, drain_s)
            self.signal(signal.SIGKILL)
            await self._gone(30.0, asyncio.Event())
        self._forget()
        self._drop_memory()
        self.state = "stopped"

    async def _run(self, stopping: asyncio.Event) -> int | None:
        """Adopt or start the process; return its exit code once it has ended.

        None: the exit code is unknown, or a stop was requested.
        """
        try:
            if not self._adopt():
                if self._before_start is not None:
                    await self._before_start()
                self._start()
        except (NvpoolError, OSError) as error:
            self.last_end = f"it could not be started: {error}"
            return None
        pid = self.pid
        code = await self._watch(stopping)
        if self._identity is None:
            self._on_death(pid)
        return code

    def _start(self) -> None:
        arguments, passed = self._arguments, ()
        if self._keeps_memory:
            if self._memory < 0:
                self._memory = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.fchmod(self._memory, 0o600)
                self._memory_since_s = self._clock.boottime_s()
            arguments, passed = [*arguments, str(self._memory), str(self._memory_since_s)], (self._memory,)
        popen = spawn(arguments, pass_fds=passed)
        try:
            self._pidfd = os.pidfd_open(popen.pid)
        except OSError:  # no free descriptor: a process that cannot be monitored must not run
            popen.kill()
            popen.wait()
            raise
        self._popen = popen
        self._identity = ProcessIdentity(popen.pid, 0, "")
        self.adopted = False
        self.state = "starting"
        self.since_ms = self._clock.wall_ns() // 1_000_000
        log.info("%s started as process %d", self.name, popen.pid)

    def _adopt(self) -> bool:
        """Adopt the process that holds the lock of this shard or target. Return False if there is none."""
        identity = holder_of(self._directory.run / f"{self.name}.lock")
        if identity is None:
            return False
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return False
        if not runs(identity):  # it ended before the pidfd was opened, which may be another process's
            os.close(pidfd)
            return False
        self._pidfd, self._identity, self._popen = pidfd, identity, None
        self._drop_memory()  # the adopted process has another memfd
        self.adopted = True
        self.state = "starting"
        self.since_ms = self._clock.wall_ns() // 1_000_000
        log.info("%s runs as process %d and is adopted", self.name, identity.pid)
        return True

    def _drop_memory(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    async def _watch(self, stopping: asyncio.Event) -> int | None:
        """Wait for the end of the process, or for `stopping`.

        Returns the exit code if the process has ended and the code is known, else None."""
        ended = self._ended()
        asked = asyncio.ensure_future(stopping.wait())
        poll_s = _READY_POLL_S
        try:
            while not ended.done() and not asked.done():
                timeout = None
                if self.state == "starting":
                    state = self._directory.state_of(self.name)
                    if state is not None and state.pid == self.pid:
                        self.state, self.since_ms, self.reason = "serving", state.since_ms, ""
                        self._serves_since_s = self._clock.boottime_s()
                        continue
                    timeout, poll_s = poll_s, min(poll_s * 1.5, _READY_POLL_S_MAX)
                await asyncio.wait([ended, asked], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return self._forget() if ended.done() else None
        finally:
            asked.cancel()
            self._unwatch()

    async def _gone(self, wait_s: float, hurry: asyncio.Event) -> bool:
        ended = self._ended()
        hurried = asyncio.ensure_future(hurry.wait())
        try:
            await asyncio.wait([ended, hurried], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return ended.done()
        finally:
            hurried.cancel()
            self._unwatch()

    def _ended(self) -> asyncio.Future[None]:
        """Future that is done when the process has ended; its pidfd is then readable."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._pidfd, lambda: ended.done() or ended.set_result(None))
        return ended

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)

    def _forget(self) -> int | None:
        """Collect the exit code of the ended process and close its pidfd."""
        code = None
        if self._popen is not None:
            code = self._popen.wait()
        self.last_end = (
            "exit code unknown: the process was adopted"
            if code is None
            else f"exit code {code}"
            if code >= 0
            else f"killed by {signal.Signals(-code).name}"
        )
        self.reason = last_error(self._directory.log / f"{self.name}.log", self.pid)
        self._unwatch()
        os.close(self._pidfd)
        self._pidfd, self._identity, self._popen = -1, None, None
        return code


def last_error(log_file: Path, pid: int) -> str:
    """Last error that this process wrote to its log. Empty if there is none or the log is unreadable."""
    try:
        with open(log_file, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            errors = re.findall(rf" ERROR +\S+\[{pid}\] (.*)".encode(), file.read())
    except OSError:
        return ""
    return errors[-1].decode(errors="replace") if errors else ""


async def wait_until_set(event: asyncio.Event, wait_s: float) -> None:
    """Return when the event is set, or after `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        pass
