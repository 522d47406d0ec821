"""A process that begins as a copy of this one: after milliseconds, with all that is imported here.

Called by mountd/forkserver, and by mountd/worker_pool in what that forks. A copy shows the title of the program that it is
(`ps`, /proc/PID/cmdline), by which the CLI finds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from nvpool.core.programs import Program, set_title
from nvpool.runtime.daemon_process import EXIT_BUG

log = logging.getLogger("nvpool.runtime")


def fork(program: Program, work: Callable[[], int], *, own_session: bool = True) -> int:
    """The pid of a copy of this process that does `work` and ends with what that returns, in a session of its own and with the
    title of `program`. Only before this process has a second thread or an event loop."""
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_BUG
    try:
        if own_session:
            os.setsid()
        set_title(program)
        code = work()
    except BaseException:
        log.critical("ended by an error", exc_info=True)
    finally:
        logging.shutdown()
        os._exit(code)
