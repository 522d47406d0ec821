"""The holder of a mount: `python -m nvpool.run.mount_holder [options] POOL MOUNTPOINT`, with the words of run/mount_daemon.

It starts the serving process (run/mount_daemon), gets from it the descriptors of /dev/fuse and of the memory that outlives
it (base/kept), and keeps them. When the serving process dies in whatever way but an orderly end, another one is started at
once, is given both and goes on: the mount has never been gone. The serving process does the same for the holder. It ends with
the exit code of an orderly end; so the two end together, or not at all.

SIGTERM and SIGINT are passed on. SIGUSR1 replaces the serving process on purpose, by what is installed now: the new one is made
ready first, then the old one finishes what it has in work and leaves; where the new one does not start, nothing happens.

The two talk over a socket: "keep" with descriptors, "ready", "warm" (a successor could go on), "drop", "ended CODE" to here;
"go WHEN", "stop", "leave" from here. Tiny on purpose, of little more than the standard library: what does next to nothing has
nothing to die of.
"""

from __future__ import annotations

import array
import contextlib
import logging
import logging.handlers
import os
import select
import signal
import socket
import subprocess
import sys

from nvpool.base.clock import SYSTEM_CLOCK

QUICK_DEATHS_MAX = 3
"""Serving processes that die before they serve are started again at once so often; after that with a pause that grows."""
PAUSE_S_MAX = 5.0
DEATHS_MAX = 15
"""Before they served, one after another, in some 40 seconds: then the mount ends, and with it the calls that wait in it."""
LEAVE_S = 10.0
"""For what a process has in work when it is replaced on purpose. What is left then its successor is handed."""

DESCRIPTORS_MAX = 253
"""SCM_MAX_FD: what one message can carry."""

log = logging.getLogger("nvpool.run.holder")


class Serving:
    """A serving process: the one that serves, or its heir that waits."""

    def __init__(self, pidfd: int, control: socket.socket, popen: subprocess.Popen | None = None) -> None:
        self.pidfd = pidfd
        self.control = control
        self.popen = popen
        self.ready = popen is None  # adopted: it served
        self.ended: int | None = None
        control.setblocking(False)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.control.send(text.encode())

    def close(self) -> None:
        os.close(self.pidfd)
        self.control.close()


class Holder:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._serving: Serving | None = None
        self._heir: Serving | None = None
        self._descriptors: list[int] = []
        """/dev/fuse and the memory; then for each process that reads for the serving one its own descriptor of /dev/fuse, and
        its pidfd. As the serving process has told them, and so they are passed on."""
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
        self._serving = Serving(pidfd, socket.socket(fileno=control))

    def run(self) -> int:
        if self._serving is None:
            self._serving = self._start()
        while True:
            poll = select.poll()
            for descriptor in (self._signals, *(one for process in (self._serving, self._heir) if process is not None
                                                for one in (process.pidfd, process.control))):
                poll.register(descriptor, select.POLLIN)
            wake_s = min((at_s for at_s in (self._start_s, self._leave_until_s) if at_s), default=0.0)
            poll.poll(max(0.0, wake_s - SYSTEM_CLOCK.boottime_s()) * 1000 + 1 if wake_s else None)
            self._take_signals()
            for process in (self._serving, self._heir):
                if process is not None:
                    self._listen(process)
            if self._heir is not None and _is_gone(self._heir):
                self._heir_died()
            if self._serving is not None and _is_gone(self._serving):
                code = self._died()
                if code is not None:
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
                signal.pidfd_send_signal(self._serving.pidfd, signal.SIGKILL)

    # -- processes -------------------------------------------------------------------------------------------------------

    def _start(self) -> Serving:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            passed = (theirs.fileno(), *self._descriptors)
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "nvpool.run.mount_daemon", f"--held={','.join(map(str, passed))}", *self._words],
                stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
        return Serving(os.pidfd_open(popen.pid), ours, popen)

    def _listen(self, process: Serving) -> None:
        while True:
            numbers = array.array("i")
            try:
                room = socket.CMSG_LEN(DESCRIPTORS_MAX * numbers.itemsize)
                said, more, _, _ = process.control.recvmsg(64, room, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, ConnectionError):
                return
            for level, kind, content in more:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers.frombytes(content[:len(content) - len(content) % numbers.itemsize])
            word, _, value = said.decode(errors="replace").partition(" ")
            if word == "keep" and len(numbers) >= 2:
                self._close_descriptors()
                self._descriptors = list(numbers)
                if self._heir is not None:  # it was given others
                    signal.pidfd_send_signal(self._heir.pidfd, signal.SIGKILL)
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
            elif not said:
                return  # its end is closed; the process itself tells how it has ended

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _died(self) -> int | None:
        """The exit code where that is the end of the mount."""
        process, self._serving = self._serving, None
        self._listen(process)
        code = process.popen.wait() if process.popen is not None else None
        process.close()
        if process.ended is not None:
            return process.ended
        if not self._descriptors:
            return code if code is not None and code >= 0 else 70
        self._leave_until_s = 0.0
        if self._heir is not None:
            self._serving, self._heir = self._heir, None
            self._serving.say(f"go {self._died_s}")
            return None
        self._died_s = SYSTEM_CLOCK.boottime_s()
        self._deaths += 1
        over = self._deaths - QUICK_DEATHS_MAX
        if self._deaths >= DEATHS_MAX:
            log.error("no serving process comes up; the mount is dead now, clean it up with: nvpool umount")
            return code if code is not None and code > 0 else 70
        pause_s = 0.0 if over <= 0 else min(0.1 * 2 ** over, PAUSE_S_MAX)
        self._start_s = SYSTEM_CLOCK.boottime_s() + pause_s
        log.warning("the serving process has died (%s)%s; another one goes on%s", _told(code),
                    "" if process.ready else " before it served", f" in {pause_s:.1f} s" if pause_s else "")
        return None

    def _heir_died(self) -> None:
        heir, self._heir = self._heir, None
        code = heir.popen.wait()
        heir.close()
        log.error("the serving process is not replaced: its successor has ended (%s) before it could go on", _told(code))

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
                self._heir = self._start()


def _is_gone(process: Serving) -> bool:
    poll = select.poll()
    poll.register(process.pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _told(code: int | None) -> str:
    if code is None:
        return "it was adopted, so nobody knows how"
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
    path = ""
    for number, word in enumerate(words):
        if word.startswith("--log="):
            path = word[6:]
        elif word == "--log" and number + 1 < len(words):
            path = words[number + 1]
    handler = logging.handlers.WatchedFileHandler(path) if path else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s holder[%(process)d] %(message)s",
                                           "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level="INFO", handlers=[handler])


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
