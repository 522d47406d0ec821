"""The holder of a mount: `python -m nvpool.mountd.holder [options] POOL MOUNTPOINT`, with the words of mountd/server.

It has the serving process forked off one that has all modules in memory (mountd/forkserver), gets from it the descriptors of
/dev/fuse and of the memory that outlives it (shm/mount_state), and keeps them. When the serving process dies in whatever way
but an orderly end, another one is forked at once, is given both and goes on: the mount has never been gone. The serving process
starts another holder when this one dies, and this one another zygote. It ends with the exit code of an orderly end; so all end
together, or not at all.

SIGTERM and SIGINT are passed on. SIGUSR1 replaces the serving process on purpose, by what is installed now: a new zygote is
started, and its process made ready first, then the old one finishes what it has in work and leaves; where the new one does not
start, nothing happens.

Serving process and holder talk over a socket: "here" with its pidfd, "keep" with descriptors, "ready", "warm" (a successor
could go on), "drop", "ended CODE" to here; "go WHEN", "stop", "leave" from here. The zygote is told "serve", with that socket
and the descriptors. Tiny on purpose, of little more than the standard library: what does next to nothing has nothing to die of.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command
from nvpool.runtime.logging_setup import start_log

QUICK_DEATHS_MAX = 3
"""Serving processes that die before they serve are started again at once so often; after that with a pause that grows."""
PAUSE_S_MAX = 5.0
DEATHS_MAX = 15
"""Before they served, one after another, in some 40 seconds: then the mount ends, and with it the calls that wait in it."""
ZYGOTE_PAUSE_S_MAX = 60.0
"""Between zygotes that die while a process serves. Without one the next pause would be some 300 ms longer."""
LEAVE_S = 10.0
"""For what a process has in work when it is replaced on purpose. What is left then its successor is handed."""

EXIT_BUG = 70
"""As in runtime/daemon_process."""

DESCRIPTORS_MAX = 253
"""SCM_MAX_FD: what one message can carry."""

log = logging.getLogger("nvpool.mountd.holder")


class Zygote:
    """The process off which the serving ones are forked."""

    def __init__(self, words: list[str]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        with theirs:
            self._popen = subprocess.Popen(command(Program.MOUNT_FORK_SERVER, *words), stdin=theirs,
                                           start_new_session="--stay-in-group" not in words)
        self.pidfd = os.pidfd_open(self._popen.pid)
        self.started_s = SYSTEM_CLOCK.boottime_s()

    def serve(self, descriptors: list[int]) -> Serving:
        """A process that serves, or is gone before it says anything."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [b"serve"], [theirs.fileno(), *descriptors])
        return Serving(ours)

    def end(self) -> int:
        """The exit code."""
        self._popen.kill()
        os.close(self.pidfd)
        self.control.close()
        return self._popen.wait()


class Serving:
    """A serving process: the one that serves, or its heir that waits."""

    def __init__(self, control: socket.socket, pidfd: int = -1) -> None:
        self.pidfd = pidfd  # -1 until it has told
        self.control = control
        self.is_open = True
        self.ready = pidfd >= 0  # adopted: it served
        self.ended: int | None = None
        control.setblocking(False)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.control.send(text.encode())

    def kill(self) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    @property
    def is_gone(self) -> bool:
        return _has_ended(self.pidfd) if self.pidfd >= 0 else not self.is_open

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.control.close()


class Holder:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._serving: Serving | None = None
        self._heir: Serving | None = None
        self._zygote: Zygote | None = None
        self._heirs_zygote: Zygote | None = None
        self._zygote_s = 0.0      # when the next zygote may be started
        self._zygote_pause_s = 0.0
        self._descriptors: list[int] = []
        """/dev/fuse and the memory; then for each process that reads for the serving one its own descriptor of /dev/fuse, and
        its pidfd; and the requests in work, where the kernel does not hand them out again. As the serving process has told
        them, and so they are passed on."""
        self._stops = 0
        self._deaths = 0
        self._start_s = 0.0      # when the next serving process is to be started; 0: one is there
        self._died_s = 0.0
        self._leave_until_s = 0.0
        self._signals, signals = socket.socketpair()
        self._signals.setblocking(False)
        signals.setblocking(False)
        self._signals_in = signals
        signal.set_wakeup_fd(signals.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def adopt(self, pidfd: int, control: int, *descriptors: int) -> None:
        """That process serves already, with these descriptors; its holder has died."""
        self._descriptors = list(descriptors)
        self._serving = Serving(socket.socket(fileno=control), pidfd)

    def run(self) -> int:
        if self._serving is None:
            self._serving = self._start()
        while True:
            zygote_s = self._zygote_s if self._serving is not None else 0.0
            wake_s = min((at_s for at_s in (self._start_s, self._leave_until_s, zygote_s) if at_s), default=0.0)
            self._wait(max(0.0, wake_s - SYSTEM_CLOCK.boottime_s()) if wake_s else None)
            self._take_signals()
            self._look_at_zygote()
            for process in (self._serving, self._heir):
                if process is not None:
                    self._listen(process)
            if self._heir is not None and self._heir.is_gone:
                self._give_heir_up("its successor has ended before it could go on")
            if self._serving is not None and self._serving.is_gone:
                code = self._died()
                if code is not None:
                    if self._zygote is not None:
                        self._zygote.end()
                    return code
            now_s = SYSTEM_CLOCK.boottime_s()
            if self._serving is None and now_s >= self._start_s:
                self._start_s = 0.0
                self._serving = self._start()
                self._serving.say(f"go {self._died_s}")
                for _ in range(self._stops):
                    self._serving.say("stop")
            if self._leave_until_s and now_s >= self._leave_until_s:
                self._leave_until_s = 0.0
                log.warning("the serving process has not left within %.0f s and is killed", LEAVE_S)
                self._serving.kill()

    def _wait(self, seconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        if self._zygote is not None:
            poll.register(self._zygote.pidfd, select.POLLIN)
        for process in (self._serving, self._heir):
            if process is not None and process.is_open:
                poll.register(process.control, select.POLLIN)
            if process is not None and process.pidfd >= 0:
                poll.register(process.pidfd, select.POLLIN)
        poll.poll(seconds * 1000 + 1 if seconds is not None else None)

    # -- processes -------------------------------------------------------------------------------------------------------

    def _start(self) -> Serving:
        if self._zygote is None:
            self._zygote_s = 0.0
            self._zygote = Zygote(self._words)
        return self._zygote.serve(self._descriptors)

    def _look_at_zygote(self) -> None:
        """There is one while a process serves; those that die early come again with pauses that grow."""
        now_s = SYSTEM_CLOCK.boottime_s()
        if self._zygote is not None and _has_ended(self._zygote.pidfd):
            lived_s = now_s - self._zygote.started_s
            code = self._zygote.end()
            self._zygote = None
            early = lived_s < ZYGOTE_PAUSE_S_MAX
            self._zygote_pause_s = min(max(0.1, 2 * self._zygote_pause_s), ZYGOTE_PAUSE_S_MAX) if early else 0.1
            self._zygote_s = now_s + self._zygote_pause_s
            log.warning("the process that waits to fork has ended (%s)", _told(code))
        if self._zygote is None and self._serving is not None and now_s >= self._zygote_s:
            self._zygote_s = 0.0
            self._zygote = Zygote(self._words)

    def _listen(self, process: Serving) -> None:
        while True:
            try:
                said, numbers, _, _ = socket.recv_fds(process.control, 64, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                said, numbers = b"", []
            if not said:  # its end is closed
                process.is_open = False
                return
            word, _, value = said.decode(errors="replace").partition(" ")
            if word == "here" and len(numbers) == 1:
                process.pidfd, = numbers
            elif word == "keep" and len(numbers) >= 2:
                self._close_descriptors()
                self._descriptors = numbers
                if self._heir is not None:
                    self._give_heir_up("its successor was given what is not in use any more")
            elif word == "drop":
                self._close_descriptors()
            elif word == "ready":
                process.ready, self._deaths = True, 0
                _notify(f"READY=1\nMAINPID={os.getpid()}")
            elif word == "warm" and process is self._heir:
                self._leave_until_s = SYSTEM_CLOCK.boottime_s() + LEAVE_S
                self._died_s = SYSTEM_CLOCK.boottime_s()
                self._serving.say("leave")
            elif word == "ended":
                process.ended = int(value or 0)

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _died(self) -> int | None:
        """The exit code where that is the end of the mount."""
        process, self._serving = self._serving, None
        self._listen(process)
        process.close()
        if process.ended is not None:
            return process.ended
        if not self._descriptors:
            return EXIT_BUG
        self._leave_until_s = 0.0
        if self._heir is not None:
            self._serving, self._heir = self._heir, None
            if self._zygote is not None:
                self._zygote.end()
            self._zygote, self._heirs_zygote = self._heirs_zygote, None
            self._serving.say(f"go {self._died_s}")
            return None
        if process.pidfd < 0 and self._zygote is not None:  # it was never forked
            self._zygote.end()
            self._zygote = None
        self._died_s = SYSTEM_CLOCK.boottime_s()
        self._deaths += 1
        over = self._deaths - QUICK_DEATHS_MAX
        if self._deaths >= DEATHS_MAX:
            log.error("no serving process comes up; the mount is dead now, clean it up with: nvpool umount %s",
                      self._words[-1])
            return EXIT_BUG
        pause_s = 0.0 if over <= 0 else min(0.1 * 2 ** over, PAUSE_S_MAX)
        self._start_s = SYSTEM_CLOCK.boottime_s() + pause_s
        log.warning("the serving process has died%s; another one goes on%s", "" if process.ready else " before it served",
                    f" in {pause_s:.1f} s" if pause_s else "")
        return None

    def _give_heir_up(self, why: str) -> None:
        """It ends by itself where it has not."""
        self._heir.close()
        self._heirs_zygote.end()
        self._heir = self._heirs_zygote = None
        self._leave_until_s = 0.0
        log.error("the serving process is not replaced: %s", why)

    def _may_be_replaced(self) -> bool:
        """Not before all that it wants kept is here."""
        return self._serving is not None and self._serving.ready

    # -- signals ---------------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        try:
            numbers = self._signals.recv(64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stops += 1
                if self._serving is not None:
                    self._serving.say("stop")
            elif number == signal.SIGUSR1 and self._heir is None and self._descriptors and self._may_be_replaced():
                log.info("the serving process is being replaced")
                self._heirs_zygote = Zygote(self._words)
                self._heir = self._heirs_zygote.serve(self._descriptors)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _told(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _notify(text: str) -> None:
    """sd_notify(3), where systemd has started us."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(1.0)
            channel.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _start_log(words: list[str]) -> None:
    """Where the serving process writes too."""
    path, form = "", "text"
    for number, word in enumerate(words):
        if word.startswith("--log="):
            path = word[6:]
        elif word == "--log" and number + 1 < len(words):
            path = words[number + 1]
        elif word.startswith("--log-format="):
            form = word.partition("=")[2]
    start_log("holder", "info", Path(path) if path else None, form=form)


def main(words: list[str]) -> int:
    adopted = words.pop(0).partition("=")[2] if words and words[0].startswith("--adopt=") else ""
    _start_log(words)
    holder = Holder(words)
    if adopted:
        holder.adopt(*map(int, adopted.split(",")))
        log.info("this process holds the mount now, its predecessor has died")
        _notify(f"MAINPID={os.getpid()}")
    return holder.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
