"""The serving process' side of a mount that outlives it: what it says to its holder and hears from it, and another holder when
that one has died. The words are those of mountd/holder. Called by mountd/server.
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
"""Between the starts of holders."""
_ENDED_S = 10.0
"""For a process that was killed: it may have bytes of a slow drive in its hands."""

log = logging.getLogger("nvpool.mountd.server")


class Held:
    """`descriptors`: a socket to the holder; where there was a process before us, /dev/fuse, the memory, and two for each that
    read beside it, and the requests where those are kept (shm/request_log). `words`: those of the command line, for another
    holder."""

    def __init__(self, descriptors: list[int], words: list[str]) -> None:
        control, *descriptors = descriptors
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self.fuse, self._memory, *readers = descriptors or (-1, -1)
        self._requests = readers.pop() if len(readers) % 2 else -1
        self.clones = readers[::2]
        """Other descriptors of the mount, each for one process that reads."""
        self._readers = readers[1::2]  # pidfds
        self._words = words
        self._popen: subprocess.Popen | None = None
        self._again_s = 0.0
        self._started_s = 0.0
        self.holder_pid = struct.unpack("3i", self._control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.serves = False
        """Whether the end of this process is that of the mount."""
        self.since_s = 0.0
        """When the process before us died or was asked to leave, on the clock that counts from the boot."""
        self.on_stop: Callable[[], None] = lambda: None
        self.left = asyncio.Event()
        """Set when this process is to leave for its successor."""
        self.on_holder: Callable[[], None] = lambda: None
        """Called when there is another holder."""

    @property
    def goes_on(self) -> bool:
        """Whether there was a process before us."""
        return self.fuse >= 0

    def memory(self, arena_bytes: int) -> KeptMemory:
        """That of the process before us, or a new one. WrongFormat, CorruptRecord."""
        if self._memory < 0:
            self._memory = KeptMemory.make(arena_bytes)
        return KeptMemory(self._memory)

    @property
    def has_requests(self) -> bool:
        """Whether the process before us has kept them."""
        return self._requests >= 0

    def requests(self, request_bytes: int) -> Unanswered:
        """Those of the process before us, or room for new ones, of so many bytes. WrongFormat, CorruptRecord."""
        if self._requests < 0:
            self._requests = Unanswered.make(request_bytes)
        return Unanswered(self._requests)

    def here(self) -> None:
        """Tell the holder which process this is."""
        pidfd = os.pidfd_open(os.getpid())
        self._send(b"here", [pidfd])
        os.close(pidfd)

    def close(self) -> None:
        """What this process was given, where it does not serve: the holder's and the mount's are the others'."""
        self._control.close()
        for descriptor in self._kept() if self.goes_on else ():
            os.close(descriptor)

    async def wait_for_our_turn(self) -> bool:
        """Say that we could go on, and wait until we are to. False where nobody will say so any more."""
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
        """From now on hear the holder, and see when it dies."""
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    def keep(self, fuse: int) -> None:
        """The holder has the descriptors when this returns, or finds them in its socket."""
        self.fuse = fuse
        self._send(b"keep", self._kept())

    def keep_readers(self, clones: list[int], pidfds: list[int]) -> None:
        """From now on these processes read through these descriptors: who goes on after this process ends them first."""
        for pidfd in self._readers:
            os.close(pidfd)
        self.clones, self._readers = clones, pidfds
        self.keep(self.fuse)

    def _kept(self) -> tuple[int, ...]:
        pairs = (one for pair in zip(self.clones, self._readers, strict=True) for one in pair)
        return self.fuse, self._memory, *pairs, *(self._requests,) * self.has_requests

    def end_readers(self) -> None:
        """Those of the process before us read nothing any more when this returns: a request that one of them took later nobody
        would answer. Unavailable."""
        for pidfd in self._readers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in self._readers:
            if not has_ended(pidfd, _ENDED_S):
                raise Unavailable("a process that reads for this mount does not end")

    @property
    def memory_descriptor(self) -> int:
        """For who reads beside us."""
        return self._memory

    def ready(self) -> None:
        self._say("ready")

    def drop(self) -> None:
        """Let the holder close what it keeps: calls that are still in the mount end when this process closes it too."""
        self._say("drop")

    def ended(self, code: int) -> None:
        """This was an orderly end, and that of the mount."""
        self._say(f"ended {code}")

    def _say(self, text: str) -> None:
        self._send(text.encode(), ())

    def _send(self, text: bytes, descriptors: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # it has died: then we shall see that next
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
        """The holder has died: start another one, which has what we have."""
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
                stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
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
    """Become the holder, which starts a serving process with the same words. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command(Program.MOUNT_HOLDER), *words])
