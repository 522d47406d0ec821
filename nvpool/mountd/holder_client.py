"""Holder client: the serving process' connection to the holder of its mount.

It reports to the holder, receives the holder's requests, and starts another holder when the holder has died.
The messages are those of mountd/holder. Used by mountd/server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Unavailable
from nvpool.core.programs import Program, command
from nvpool.shm.mount_state import KeptMemory
from nvpool.shm.request_log import Unanswered

_AGAIN_S = 0.4
"""Shortest time between two starts of holders."""
_ENDED_S = 10.0
"""Time for a killed process to end: it may be transferring bytes of a slow drive."""

log = logging.getLogger("nvpool.mountd.server")


class HolderClient:
    """Connection to the holder, with the descriptors that the holder keeps.

    `descriptors`: a socket to the holder. If a predecessor served the mount, then also /dev/fuse, the mount
    state, two descriptors for each of its read workers, and the request log where there is one
    (shm/request_log). `words`: the command-line arguments, for another holder.
    """

    def __init__(self, descriptors: list[int], words: list[str]) -> None:
        control, *descriptors = descriptors
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self.fuse, self._memory, *readers = descriptors or (-1, -1)
        self._requests = readers.pop() if len(readers) % 2 else -1
        self.clones = readers[::2]
        """Further descriptors of /dev/fuse, one for each read worker."""
        self._readers = readers[1::2]  # pidfds of the predecessor's read workers
        self._words = words
        self._popen: subprocess.Popen | None = None
        self._again_s = 0.0
        self._started_s = 0.0
        self.holder_pid = struct.unpack(
            "3i", self._control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )[0]
        self.serves = False
        """Whether the end of this process is the end of the mount."""
        self.since_s = 0.0
        """When the predecessor died or was asked to leave, in seconds since boot."""
        self.on_stop: Callable[[], None] = lambda: None
        self.left = asyncio.Event()
        """Set when this process has to leave for its successor."""
        self.on_holder: Callable[[], None] = lambda: None
        """Called after another holder has been started."""

    @property
    def goes_on(self) -> bool:
        """Whether this process continues the mount of a predecessor."""
        return self.fuse >= 0

    def memory(self, arena_bytes: int) -> KeptMemory:
        """The mount state of the predecessor, or a new one. Raises WrongFormat, CorruptRecord."""
        if self._memory < 0:
            self._memory = KeptMemory.make(arena_bytes)
        return KeptMemory(self._memory)

    @property
    def has_requests(self) -> bool:
        """Whether the predecessor kept a request log."""
        return self._requests >= 0

    def requests(self, request_bytes: int) -> Unanswered:
        """The request log of the predecessor, or a new one of `request_bytes`.

        Raises WrongFormat, CorruptRecord.
        """
        if self._requests < 0:
            self._requests = Unanswered.make(request_bytes)
        return Unanswered(self._requests)

    def here(self) -> None:
        """Report to the holder which process this is."""
        pidfd = os.pidfd_open(os.getpid())
        self._send(b"here", [pidfd])
        os.close(pidfd)

    def close(self) -> None:
        """Close the inherited descriptors, in a process that does not serve.

        Other processes own the originals.
        """
        self._control.close()
        for descriptor in self._kept() if self.goes_on else ():
            os.close(descriptor)

    async def wait_for_our_turn(self) -> bool:
        """Report that this process is ready, and wait until it has to take over.

        False: it never will be asked to.
        """
        loop = asyncio.get_running_loop()
        self._say("warm")
        while True:
            try:
                said = (await loop.sock_recv(self._control, 64)).decode()
            except OSError:
                return False
            word, _, value = said.partition(" ")
            if word == "go":
                self.since_s = float(value)
                return True
            if not word:
                return False
            if word == "stop":
                self.on_stop()

    def listen(self) -> None:
        """Receive messages of the holder from now on, and notice when the holder dies."""
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    def keep(self, fuse: int) -> None:
        """Hand /dev/fuse and the other descriptors to the holder.

        On return the holder has them, or will find them in its socket.
        """
        self.fuse = fuse
        self._send(b"keep", self._kept())

    def keep_readers(self, clones: list[int], pidfds: list[int]) -> None:
        """Record that these processes read through these descriptors.

        A successor ends the processes first.
        """
        for pidfd in self._readers:
            os.close(pidfd)
        self.clones, self._readers = clones, pidfds
        self.keep(self.fuse)

    def _kept(self) -> tuple[int, ...]:
        pairs = (one for pair in zip(self.clones, self._readers, strict=True) for one in pair)
        return self.fuse, self._memory, *pairs, *(self._requests,) * self.has_requests

    def end_readers(self) -> None:
        """Kill the read workers of the predecessor. On return none of them reads requests any more.

        A request that one of them took later would remain unanswered. Raises Unavailable if one does not end.
        """
        for pidfd in self._readers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in self._readers:
            if not has_ended(pidfd, _ENDED_S):
                raise Unavailable("a process that reads for this mount does not end")

    @property
    def memory_descriptor(self) -> int:
        """The mount state, for the read workers."""
        return self._memory

    def ready(self) -> None:
        self._say("ready")

    def drop(self) -> None:
        """Have the holder close its descriptors.

        Pending calls in the mount end when this process closes them too.
        """
        self._say("drop")

    def ended(self, code: int) -> None:
        """Report an orderly end of this process, and with it of the mount."""
        self._say(f"ended {code}")

    def _say(self, text: str) -> None:
        self._send(text.encode(), ())

    def _send(self, text: bytes, descriptors: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # the holder has died; _hear notices that next
            socket.send_fds(self._control, [text], descriptors)

    def _hear(self) -> None:
        try:
            word = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == b"stop":
            self.on_stop()
        elif word == b"leave":
            self.left.set()
        elif not word:
            self._hold_again()

    def _hold_again(self) -> None:
        """Start another holder after the holder has died; the new one gets all descriptors."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        if self._popen is not None:
            self._popen.wait()
        now_s = SYSTEM_CLOCK.boottime_s()
        if now_s - self._started_s < _AGAIN_S:
            loop.call_later(_AGAIN_S, self._start_holder)
        else:
            self._start_holder()

    def _start_holder(self) -> None:
        self._started_s = SYSTEM_CLOCK.boottime_s()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        pidfd = os.pidfd_open(os.getpid())
        passed = (pidfd, theirs.fileno(), *self._kept())
        try:
            self._popen = subprocess.Popen(
                [*command(Program.MOUNT_HOLDER, f"--adopt={','.join(map(str, passed))}"), *self._words],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,
            )
        except OSError as error:
            log.error("no other holder could be started: %s", error)
            self._control.close()
            asyncio.get_running_loop().call_later(_AGAIN_S, self._start_holder)
            return
        finally:
            theirs.close()
            os.close(pidfd)
        self.holder_pid = self._popen.pid
        log.warning("the holder of this mount has died; process %d is another one", self.holder_pid)
        self.listen()
        self.on_holder()


def has_ended(pidfd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def hand_to_holder(words: list[str]) -> None:
    """Become the holder, which starts a serving process with the same arguments. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command(Program.MOUNT_HOLDER), *words])
