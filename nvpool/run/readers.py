"""The processes that read for the one that serves a mount (run/mount_reader): started, let in, and ended with it.

Each has a cloned descriptor of /dev/fuse, which this process and the holder have too, and a socket to here. When one of them
dies while it serves, what it had taken from the kernel is in nobody's hands, and the kernel hands requests out again only all
together: so this process then ends as if killed, and its successor begins with new ones. One that dies before it was let in has
taken nothing, and is done without. Called by run/mount_daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable

from nvpool.base.errors import NvpoolError
from nvpool.fuse.kernel_engine import KernelEngine
from nvpool.fuse.passing import Channel, Passing, clone
from nvpool.run.daemon import command
from nvpool.run.held import Held, has_ended

END_S = 2.0
"""For what a reader has in work when the mount ends or another process takes over."""

log = logging.getLogger("nvpool.run.mount")


class Readers:
    """`on_serving`: told of the pid of each that begins."""

    def __init__(self, held: Held, engine: KernelEngine, on_serving: Callable[[int], None]) -> None:
        self._held = held
        self._engine = engine
        self._on_serving = on_serving
        self._popens: list[subprocess.Popen] = []
        self._passings: list[Passing] = []
        self._pidfds: list[int] = []
        self._ending = False

    def start(self, count: int) -> None:
        """Start so many. They come in when the engine has been handed all that the process before this one left. Where that
        can not be the mount goes on without them, and the log says why."""
        clones = self._held.clones
        if not count and not clones:
            return
        try:
            while len(clones) < count:
                clones = [*clones, clone(self._engine.descriptor)]
            for descriptor in clones[:count]:
                self._start(descriptor)
        except (NvpoolError, OSError) as error:
            log.error("this mount has fewer processes than it was to have: %s", error)
        # A descriptor without a reader is kept too, with any pidfd: requests that were taken from it may be in work.
        pidfds = self._pidfds + [os.pidfd_open(os.getpid()) for _ in clones[len(self._pidfds):]]
        self._held.keep_readers(clones, pidfds)
        for passing in self._passings:  # only now: from here on whoever follows us knows of them
            self._engine.let_read(passing, self._come_in)

    def _start(self, descriptor: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            memory, words = self._held.reader_words
            passed = (theirs.fileno(), descriptor, memory)
            popen = subprocess.Popen([*command("mount_reader"), f"--reader={','.join(map(str, passed))}", *words],
                                     stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
        self._popens.append(popen)
        self._pidfds.append(os.pidfd_open(popen.pid))
        self._passings.append(Passing(Channel(ours, self._engine.request_bytes_max), descriptor, self._lost))

    def _come_in(self, passing: Passing) -> None:
        passing.go()
        pid = self._popens[self._passings.index(passing)].pid
        log.info("process %d reads for this mount too", pid)
        self._on_serving(pid)

    def _lost(self, passing: Passing) -> None:
        if self._ending:
            return
        pid = self._popens[self._passings.index(passing)].pid
        if not passing.serves:
            log.error("process %d was to read for this mount and has ended before: it is done without", pid)
            return
        log.warning("process %d, which read for this mount, has died: all are replaced", pid)
        logging.shutdown()
        os._exit(70)

    def let_go(self) -> None:
        """They end by themselves, soon."""
        self._ending = True
        for passing in self._passings:
            passing.stop_reading()
            passing.channel.close()
        self._passings.clear()

    def end(self) -> None:
        """None is left when this returns. What they had in work is answered, or handed out again to whoever follows."""
        self.let_go()
        for popen, pidfd in zip(self._popens, self._pidfds, strict=True):
            if not has_ended(pidfd, END_S):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            popen.wait()
        self._popens.clear()
