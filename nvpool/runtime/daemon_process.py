"""What every program of nvpool does at its start and its end: event loop, signals, log, limits, and the watch for its
supervisor.

Called by the programs beside it, by nobody else. Guarantees: SIGTERM and SIGINT ask for an orderly end once and a second time
for a quick
one; an error that nobody handled ends the program with its reason in the log and an exit code that says which family it was;
a lock descriptor never reaches a program that is started, unless it is passed on purpose. uvloop has its door here.
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
from nvpool.core.errors import BadConfiguration, Bug, Damaged, InUse, NvpoolError, Refused, Unavailable, from_os_error
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
"""Another process has the lock of this one's shard or target: the supervisor looks who, and does not count it as a death."""

DESCRIPTORS_MIN = 128
"""Below it a daemon would fail in the middle of its work instead of at its start."""

_HEIR_DELAY_S_MAX = 10.0
_SYSTEMD_S = 15.0
"""RestartSec= of the unit, and a machine that is busy."""

log = logging.getLogger("nvpool.runtime")


class Stop:
    """The wish that a program ends. `asked` is set by the first signal (or `ask`), `hurry` by the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.on_signal: dict[int, Callable[[], None]] = {}
        self.why = ""
        """Of the first wish."""

    def signalled(self, number: int) -> None:
        """SIGHUP or SIGUSR1 came."""
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
    for family, code in ((BadConfiguration, EXIT_USAGE), (Refused, EXIT_REFUSED), (Unavailable, EXIT_UNAVAILABLE),
                         (Damaged, EXIT_DAMAGED), (Bug, EXIT_BUG)):
        if isinstance(error, family):
            return code
    return EXIT_BUG


def raise_descriptor_limit() -> int:
    """The soft limit of open files becomes the hard one; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted


def notify_ready(text: str = "READY=1", wait_s: float = 1.0) -> None:
    """Tell systemd (sd_notify(3)), which may have a full queue for `wait_s`; nothing where NOTIFY_SOCKET is not set."""
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
        log.warning("systemd could not be told %s: %s", text, error)


async def keep_alive() -> None:
    """Tell systemd that this loop turns, as often as WatchdogSec= of the unit asks; returns at once where it does not.

    A loop that stands is ended by SIGABRT, which writes where it stood into the log, and the daemon is begun again."""
    wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not wanted.isdigit() or (pid and pid != str(os.getpid())):
        return
    while True:
        notify_ready("WATCHDOG=1", 0.0)  # the next one is soon
        await asyncio.sleep(int(wanted) / 3e6)


def run(main: Callable[[Stop], Awaitable[None]]) -> int:
    """Run `main` on uvloop until it returns; the exit code. `main` drains and returns after `stop.asked`."""
    if (limit := raise_descriptor_limit()) < DESCRIPTORS_MIN:
        log.error("only %d file descriptors are allowed, at least %d are needed; raise the limit (ulimit -Hn, LimitNOFILE=)",
                  limit, DESCRIPTORS_MIN)
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
        # What is there now stays, so collections need not look at it; what requests leave behind dies by its reference
        # count, so they need not come after every 700 objects.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        # A thread that checkpoints gives the loop its turn ten times as often as Python would: pauses of 4 ms become 0.5.
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
        log.error("ended by an error that is none of ours", exc_info=error)
        return EXIT_BUG
    log.info("stopped")
    return EXIT_OK



def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _unhandled(stop: Stop, context: dict) -> None:
    """A callback or task nobody waits for has failed: say so. What must stop the daemon is in a task group and does."""
    error = context.get("exception")
    log.error("unhandled: %s", context.get("message"), exc_info=error)


def spawn(arguments: list[str], *, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen:
    """Start a program in a session of its own (Ctrl-C in a terminal is for the supervisor alone), with no descriptor of ours
    but stderr and `pass_fds`."""
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True,
                            close_fds=True, pass_fds=pass_fds, cwd="/")


def keep_supervised(directory: PoolDirectory, stop: Stop) -> None:
    """Wait, in a thread, until nobody holds the pool directory's lock any more: then start a supervisor that inherits it.

    The waiting is the blocking flock itself: the kernel wakes exactly one process when the supervisor has ended in whatever
    way, also when that supervisor had only adopted us. The lock is handed on inside its open file description, which the heir
    has before we close ours: at no moment is it free, so at no moment are there two supervisors. Where systemd started the
    supervisor, it has some seconds to start the next one, which adopts us, so that its unit stays what it watches over.
    """
    threading.Thread(target=_wait_and_start_heirs, args=(directory, stop), name="supervisor-watch", daemon=True).start()


def _is_restarted(directory: PoolDirectory, pause: threading.Event, wait_s: float) -> bool:
    """Whether another supervisor announces itself within `wait_s`; returns as soon as one does.

    Its next death is an end of its own, after which systemd has the whole time again."""
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
            log.warning("the supervisor can not be watched any more: %s", error)
            return
        try:
            if stop.asked.is_set():
                return
            log.warning("the supervisor is gone; starting another one")
            heir = spawn(command(Program.SUPERVISOR, str(directory.path), "--inherit-lock", str(lock.descriptor)),
                         pass_fds=(lock.descriptor,))
            heir.wait()  # it forks away from us at once
        except OSError as error:
            log.error("no supervisor could be started: %s", error)
        finally:
            lock.release()
        pause.wait(delay)  # an heir that ends at once lets the lock go, and somebody gets it again
        delay = min(max(0.1, delay * 2), _HEIR_DELAY_S_MAX)
