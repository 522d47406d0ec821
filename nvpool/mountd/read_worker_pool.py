"""Pool of read workers (mountd/read_worker): starts them, admits them to the mount, and ends them with it.

Each worker has a cloned descriptor of /dev/fuse, which this process and the holder have too, and a socket to
this process. When a worker dies while it serves, no process will answer the requests that it took from the
kernel, and the kernel can only resend all unanswered requests together. So this process then ends as if
killed, and its successor starts with new workers. A worker that was killed before it was admitted has taken
no request, but nothing would replace it, so it is treated the same way. If a worker ends by itself before it
is admitted, the mount continues without it. Used by mountd/server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from nvpool.core.config import Config
from nvpool.core.errors import NvpoolError
from nvpool.core.programs import Program
from nvpool.fuse.kernel.connection import KernelEngine
from nvpool.fuse.kernel.read_worker_channel import Channel, ForwardedReads, clone
from nvpool.metrics.exposition import Page
from nvpool.mountd import read_worker as mount_worker
from nvpool.mountd.holder_client import HolderClient, has_ended
from nvpool.mountd.process_fork import fork
from nvpool.runtime.daemon_process import EXIT_BUG

END_S = 2.0
"""Time for a worker to complete pending requests before it is killed.

This applies when the mount ends or another process takes over.
"""

log = logging.getLogger("nvpool.mountd.server")


class IdleWorker(NamedTuple):
    """A forked read worker that is not admitted yet."""

    pid: int
    pidfd: int
    connection: socket.socket


def fork_readers(
    count: int, arguments: Namespace, config: Config, held: HolderClient, not_theirs: socket.socket
) -> list[IdleWorker]:
    """Fork `count` read workers, which wait for `ReadWorkerPool.start` or for the end of this process.

    If fewer can be forked, the log has the reason and the result is shorter.
    """
    made: list[IdleWorker] = []
    for _ in range(count):
        ours, theirs = socket.socketpair()

        def read(ours: socket.socket = ours, theirs: socket.socket = theirs) -> int:
            held.close()
            for connection in (ours, not_theirs, *(one.connection for one in made)):
                connection.close()
            return mount_worker.wait_and_read(arguments, config, theirs)

        with theirs:
            try:
                pid = fork(Program.MOUNT_WORKER, read)
                made.append(IdleWorker(pid, os.pidfd_open(pid), ours))
            except OSError as error:
                log.error("this mount has fewer processes than configured: %s", error)
                ours.close()
                break
    return made


class ReadWorkerPool:
    """The read workers of one mount.

    `waiting`: the result of fork_readers. `on_serving` is called with the pid of each worker that starts to
    serve.
    """

    def __init__(
        self,
        held: HolderClient,
        engine: KernelEngine,
        waiting: list[IdleWorker],
        on_serving: Callable[[int], None],
    ) -> None:
        self._held = held
        self._engine = engine
        self._waiting = waiting
        self._on_serving = on_serving
        self._passings: dict[ForwardedReads, IdleWorker] = {}
        self._ending = False

    def start(self) -> None:
        """Start the workers. Each is admitted when the engine has received all that the predecessor left.

        If workers cannot be started, the mount continues without them, and the log says why.
        """
        clones = self._held.clones
        if not self._waiting and not clones:
            return
        pidfds = []
        try:
            while len(clones) < len(self._waiting):
                clones = [*clones, clone(self._engine.descriptor)]
            for reader, descriptor in zip(self._waiting, clones, strict=False):
                # the worker has died; the receiver of its socket notices that
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(reader.connection, [b"."], [descriptor, self._held.memory_descriptor])
                channel = Channel(reader.connection, self._engine.request_bytes_max)
                self._passings[ForwardedReads(channel, descriptor, self._lost)] = reader
                pidfds.append(os.dup(reader.pidfd))
        except (NvpoolError, OSError) as error:
            log.error("this mount has fewer processes than configured: %s", error)
        # Descriptors without a worker are kept too, with any pidfd: requests taken from them may be pending.
        pidfds += [os.pidfd_open(os.getpid()) for _ in clones[len(pidfds) :]]
        self._held.keep_readers(clones, pidfds)
        for passing in self._passings:  # only now: from here on, a successor knows of these workers
            self._engine.let_read(passing, self._come_in)

    def _come_in(self, passing: ForwardedReads) -> None:
        passing.go()
        pid = self._passings[passing].pid
        log.info("process %d reads for this mount too", pid)
        self._on_serving(pid)

    def _lost(self, passing: ForwardedReads) -> None:
        if self._ending:
            return
        reader = self._passings[passing]
        if not passing.serves and self._end_of(reader) >= 0:
            log.error(
                "process %d was to read for this mount and has ended before: it is done without", reader.pid
            )
            return
        log.warning("process %d, which read for this mount, has died: all are replaced", reader.pid)
        logging.shutdown()
        os._exit(EXIT_BUG)

    def _end_of(self, reader: IdleWorker) -> int:
        """Wait for the worker and return its exit code.

        A worker that does not end within `END_S` is killed.
        """
        self._waiting.remove(reader)
        if not has_ended(reader.pidfd, END_S):
            signal.pidfd_send_signal(reader.pidfd, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(reader.pid, 0)[1])

    async def pages(self, wait_s: float) -> list[Page]:
        """The metrics of the workers that answer within `wait_s`."""
        asked = [passing.ask() for passing in self._passings if passing.serves]
        if not asked or self._ending:
            return []
        done, _ = await asyncio.wait(asked, timeout=wait_s)
        return [Page.unpack(one.result()) for one in done]

    def let_go(self) -> None:
        """Have the workers end by themselves, soon."""
        self._ending = True
        for passing in self._passings:
            passing.stop_reading()
        for reader in self._waiting:
            reader.connection.close()

    def end(self) -> None:
        """End all workers; on return none is left.

        Their pending requests are answered or resent to a successor.
        """
        self.let_go()
        for reader in list(self._waiting):
            self._end_of(reader)
