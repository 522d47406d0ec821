"""Fork server of a mount: starts serving processes by forking itself.

Run as `python -m nvpool.mountd.forkserver [options] POOL MOUNTPOINT`, with the arguments of mountd/server and
a socket as stdin. mountd/holder starts it.

The fork server has imported all modules that serving needs and has parsed the command line; then it waits. A
successor is a copy of it: the successor starts within milliseconds, where the start of Python and the imports
take hundreds, and shares its memory. The fork server has one thread and no event loop, keeps nothing open and
caches no state of the pool, so a copy is as good as a new process.
It ends when its holder ends. Signals that a service manager sends to all processes do not end it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from functools import partial

from nvpool.core.config import Config
from nvpool.core.errors import NvpoolError
from nvpool.core.programs import Program
from nvpool.fuse.notify import write_for
from nvpool.mountd.arguments import configured_pool, parse_words, start_mount_log
from nvpool.mountd.holder import DESCRIPTORS_MAX
from nvpool.mountd.holder_client import HolderClient
from nvpool.mountd.process_fork import fork
from nvpool.mountd.server import serve_held
from nvpool.rpc import transport_registry
from nvpool.runtime.scheduling import schedule

LATER = ("nvpool.fuse.kernel.connection", "nvpool.fuse.kernel.replay_engine", "nvpool.fuse.kernel.mount")
"""Modules that are otherwise imported on first use. A mount that outlives its process needs them all."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

log = logging.getLogger("nvpool.mountd.forkserver")


def main(words: list[str]) -> int:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    arguments = parse_words(words)
    start_mount_log("forkserver", arguments)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    for name in LATER:
        importlib.import_module(name)
    transport_registry.transports()
    config = Config()
    with contextlib.suppress(NvpoolError):
        # also so that a copy that reads the same text need not parse it again
        config = configured_pool(arguments)[1]
    schedule(config.processors.scheduling)
    gc.collect()
    gc.freeze()  # pages that the garbage collector never writes to stay shared

    def serve(descriptors: list[int], notices: socket.socket, not_ours: socket.socket) -> int:
        control.close()
        not_ours.close()
        return serve_held(arguments, HolderClient(descriptors, words), notices)

    def notice(connection: socket.socket) -> int:
        control.close()
        schedule(config.processors.scheduling)  # again, for its own session
        return write_for(connection)

    poll, running = select.poll(), {}
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                os.close(ready)
                _look_how(*os.waitpid(running.pop(ready), 0))
                continue
            said, descriptors, _, _ = socket.recv_fds(control, 64, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
            if not said:
                return 0
            theirs, ours = socket.socketpair()
            with ours:
                with theirs:
                    forked = [
                        fork(
                            Program.MOUNT,
                            partial(serve, descriptors, theirs, ours),
                            own_session=not arguments.stay_in_group,
                        )
                    ]
                for descriptor in descriptors:
                    os.close(descriptor)
                forked.append(fork(Program.MOUNT_NOTIFIER, partial(notice, ours)))
            for pid in forked:
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid
                poll.register(pidfd, select.POLLIN)


def _look_how(pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        log.warning("process %d was killed by %s", pid, signal.Signals(-code).name)
    elif code:
        log.warning("process %d has ended with exit code %d", pid, code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
