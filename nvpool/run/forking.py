"""A process that begins as a copy of this one: after milliseconds, with all that is imported here.

Called by run/mount_zygote, and by run/readers in what that forks. A copy shows the name of the program that it is (`ps`,
/proc/PID/cmdline), by which the CLI finds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from nvpool.run.daemon import EXIT_BUG

log = logging.getLogger("nvpool.run")


def fork(program: str, work: Callable[[], int], *, own_session: bool = True) -> int:
    """The pid of a copy of this process that does `work` and ends with what that returns, in a session of its own and under
    the name of nvpool/run/`program`. Only before this process has a second thread or an event loop."""
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_BUG
    try:
        if own_session:
            os.setsid()
        show_as(program)
        code = work()
    except BaseException:
        log.critical("ended by an error", exc_info=True)
    finally:
        logging.shutdown()
        os._exit(code)


def show_as(program: str) -> None:
    """Put the module's name of nvpool/run/`program` in the place of the one that this process was started with; both are of
    one length."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])  # proc(5): arg_start, arg_end
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        place = memory.read(end - start).find(b"nvpool.run.mount_")
        memory.seek(start + place)
        memory.write(b"nvpool.run." + program.encode())
