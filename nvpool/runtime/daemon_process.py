"""Start and end of every program: event loop, signals, log, limits, and monitoring of the supervisor.

Used by the programs of daemons/ and mountd/, and by node/child_process for `spawn`. Guarantees: SIGTERM or
SIGINT requests an orderly end, and a second one a quick end. An unhandled error ends the program with the
reason in the log and an exit code for the error's family. A lock descriptor never reaches a started program
unless it is passed on purpose. Daemons use uvloop only through this module.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import uvloop

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    BadConfiguration,
    Bug,
    Damaged,
    InUse,
    NvpoolError,
    Refused,
    Unavailable,
    from_os_error,
)
from nvpool.core.programs import Program, command
from nvpool.core.version import VERSION
from nvpool.host.pool_directory import Flock, PoolDirectory
from nvpool.runtime.logging_setup import follow_settings

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_DAMAGED = 4
EXIT_BUG = 70
EXIT_IN_USE = 75
"""Another process holds the lock of this shard or target: the supervisor looks for it and counts no death."""

DESCRIPTORS_MIN = 128
"""Least number of file descriptors: with fewer a daemon would fail during its work instead of at its
start."""

_HEIR_DELAY_S_MAX = 10.0
_SYSTEMD_S = 15.0
"""Time for systemd to restart the supervisor: RestartSec= of the unit, on a busy machine."""

log = logging.getLogger("nvpool.runtime")


class Stop:
    """Request that a program ends. `asked` is set by the first signal (or `ask`), `hurry` by the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.on_signal: dict[int, Callable[[], None]] = {}
        self.why = ""
        """Reason of the first request."""

    def signalled(self, number: int) -> None:
        """Handle a SIGHUP or SIGUSR1."""
        if number == signal.SIGHUP:
            follow_settings()
        if number in self.on_signal:
            self.on_signal[number]()

    def ask(self, why: str) -> None:
        if self.asked.is_set():
            self.hurry.set()
            return
        self.why = why
        log.info("stopping: %s", why)
        self.asked.set()


def exit_code(error: BaseException) -> int:
    for family, code in (
        (BadConfiguration, EXIT_USAGE),
        (Refused, EXIT_REFUSED),
        (Unavailable, EXIT_UNAVAILABLE),
        (Damaged, EXIT_DAMAGED),
        (Bug, EXIT_BUG),
    ):
        if isinstance(error, family):
            return code
    return EXIT_BUG


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one. Return the limit in force.

    The limit is raised to 1 << 20 at most."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted


def notify_ready(text: str = "READY=1", wait_s: float = 1.0) -> None:
    """Send a status to systemd (sd_notify(3)), waiting `wait_s` at most for its queue.

    Does nothing if NOTIFY_SOCKET is not set.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address[0] == "@":
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(wait_s)
            channel.sendto(text.encode(), address)
    except OSError as error:
        log.warning("systemd could not be notified of %s: %s", text, error)


async def keep_alive() -> None:
    """Report to systemd that this loop runs, as often as WatchdogSec= of the unit requires.

    Returns immediately without WatchdogSec=. If the loop is blocked, systemd ends the process with SIGABRT,
    which writes the place of the block to the log, and starts the daemon again."""
    wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not wanted.isdigit() or (pid and pid != str(os.getpid())):
        return
    while True:
        notify_ready("WATCHDOG=1", 0.0)  # no wait: the next report follows soon
        await asyncio.sleep(int(wanted) / 3e6)


def run(main: Callable[[Stop], Awaitable[None]]) -> int:
    """Run `main` on uvloop until it returns; return the exit code.

    `main` drains and returns after `stop.asked`.
    """
    if (limit := raise_descriptor_limit()) < DESCRIPTORS_MIN:
        log.error(
            "only %d file descriptors are allowed, at least %d are needed; raise the limit (ulimit -Hn, LimitNOFILE=)",
            limit,
            DESCRIPTORS_MIN,
        )
        return EXIT_REFUSED

    async def surround() -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: _unhandled(stop, context))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.ask, signal.Signals(number).name)
        for number in (signal.SIGHUP, signal.SIGUSR1):
            loop.add_signal_handler(number, stop.signalled, number)
        log.info("nvpool %s starts", VERSION)
        # Objects that exist now stay, so collections need not scan them; objects of requests are freed by
        # their reference count, so collections need not run after every 700 objects.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        # A checkpointing thread yields to the loop ten times as often as by default: pauses of 4 ms become
        # 0.5 ms.
        sys.setswitchinterval(0.0005)
        await main(stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(surround())
    except KeyboardInterrupt:
        return 130
    except NvpoolError as error:
        log.error("%s", error, exc_info=isinstance(error, Bug))
        return exit_code(error)
    except BaseExceptionGroup as group:
        log.error("ended by an error", exc_info=group)
        return exit_code(_first(group))
    except OSError as error:
        ours = from_os_error(error, f"use {error.filename or 'the system'}")
        log.error("%s", ours, exc_info=error)
        return exit_code(ours)
    except Exception as error:
        log.error("ended by an unexpected error", exc_info=error)
        return EXIT_BUG
    log.info("stopped")
    return EXIT_OK


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _unhandled(stop: Stop, context: dict) -> None:
    """Log the failure of a callback or task that nobody awaits.

    Failures that must stop the daemon occur in a task group, which does so.
    """
    error = context.get("exception")
    log.error("unhandled: %s", context.get("message"), exc_info=error)


def spawn(arguments: list[str], *, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen:
    """Start a program in its own session, with stderr and `pass_fds` as its only descriptors.

    In its own session a Ctrl-C in a terminal reaches only the supervisor.
    """
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        start_new_session=True,
        close_fds=True,
        pass_fds=pass_fds,
        cwd="/",
    )


def keep_supervised(directory: PoolDirectory, stop: Stop) -> None:
    """Wait in a thread for the pool directory's lock; then start a supervisor with it.

    The wait is a blocking flock: the kernel wakes exactly one process when the supervisor has ended in any
    way, also if that supervisor had only adopted us. The lock is passed on in its open file description,
    which the heir has before we close our descriptor. So the lock is never free in between, and there are
    never two supervisors. If systemd started the supervisor, systemd gets some seconds to start the next one,
    which adopts us, so that systemd's unit stays the process that it monitors.
    """
    threading.Thread(
        target=_wait_and_start_heirs, args=(directory, stop), name="supervisor-watch", daemon=True
    ).start()


def _is_restarted(directory: PoolDirectory, pause: threading.Event, wait_s: float) -> bool:
    """Whether another supervisor announces itself within `wait_s`; returns as soon as one does.

    After the death of that supervisor systemd gets the whole time again."""
    end_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while "supervisor" not in directory.states("supervisor"):
        if SYSTEM_CLOCK.boottime_s() > end_s:
            return False
        pause.wait(0.25)
    return True


def _wait_and_start_heirs(directory: PoolDirectory, stop: Stop) -> None:
    pause = threading.Event()
    delay = 0.0
    left_to_systemd = False
    while not stop.asked.is_set():
        try:
            lock = Flock.take(directory.lock, "the pool", wait=not left_to_systemd)
            if os.environ.get("NOTIFY_SOCKET") and not left_to_systemd:
                lock.release()
                left_to_systemd = not _is_restarted(directory, pause, _SYSTEMD_S)
                continue
        except InUse:
            left_to_systemd = False
            continue
        except NvpoolError as error:
            log.warning("the supervisor cannot be watched any more: %s", error)
            return
        try:
            if stop.asked.is_set():
                return
            log.warning("the supervisor is gone; starting another one")
            heir = spawn(
                command(Program.SUPERVISOR, str(directory.path), "--inherit-lock", str(lock.descriptor)),
                pass_fds=(lock.descriptor,),
            )
            heir.wait()  # returns soon: the heir forks
        except OSError as error:
            log.error("no supervisor could be started: %s", error)
        finally:
            lock.release()
        pause.wait(delay)  # an heir that ends early frees the lock, and some process takes it again
        delay = min(max(0.1, delay * 2), _HEIR_DELAY_S_MAX)
