"""Fork a copy of the current process: it starts within milliseconds, with all imports done.

Used by mountd/forkserver, and by mountd/read_worker_pool in the processes that the fork server forks. A copy shows
the title of its program (`ps`, /proc/PID/cmdline), by which the CLI finds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from nvpool.core.programs import Program, set_title
from nvpool.runtime.daemon_process import EXIT_BUG

log = logging.getLogger("nvpool.runtime")


def fork(program: Program, work: Callable[[], int], *, own_session: bool = True) -> int:
    """Fork a copy of this process that runs `work` and exits with its result; return the copy's pid.

    The copy has a session of its own, unless `own_session` is False, and the title of `program`. Call this
    only while the process has one thread and no event loop.
    """
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
