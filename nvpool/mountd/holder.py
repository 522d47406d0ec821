"""The holder of a mount: keeps the mount alive while serving processes die and are replaced.

Run as `python -m nvpool.mountd.holder [options] POOL MOUNTPOINT`, with the arguments of mountd/server.

The serving process is forked off the fork server (mountd/forkserver, here `ForkServer`), which has all modules in
memory. The holder receives from the serving process the descriptors of /dev/fuse and of the mount state
(shared memory, shm/mount_state), and keeps them open. When the serving process dies in any way but an orderly
end, the holder immediately has another one forked, which gets both descriptors and continues: the mount never
disappears. The serving process starts another holder when the holder dies; the holder starts another fork
server when that dies. The holder ends with the exit code of an orderly end of the serving process. So all
processes end together, or none does.

The holder forwards SIGTERM and SIGINT. SIGUSR1 replaces the serving process on purpose, with the software
that is installed now: the holder starts a new fork server and waits until the successor is ready; then the
old process completes its pending requests and leaves. If the successor does not start, nothing changes.

Serving process and holder exchange messages over a socket. From the serving process: "here" with its pidfd,
"keep" with descriptors, "ready", "warm" (a successor is ready to take over), "drop", "ended CODE". From the
holder: "go WHEN", "stop", "leave". The holder sends "serve" to the fork server, with the socket and the
descriptors. The holder is tiny on purpose and uses little more than the standard library: a process that does
almost nothing has almost no reason to die.
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
"""Immediate restarts of serving processes that die before they serve.

Later restarts wait, longer each time.
"""
PAUSE_S_MAX = 5.0
DEATHS_MAX = 15
"""Deaths in a row, before serving, that end the mount. They take some 40 seconds.

The calls that wait in the mount end with it.
"""
FORK_SERVER_PAUSE_S_MAX = 60.0
"""Longest pause between fork servers that die while a process serves.

Without a fork server the next failover would take some 300 ms longer.
"""
LEAVE_S = 10.0
"""Time to complete pending requests when a process is replaced on purpose; its successor gets the rest."""

EXIT_BUG = 70
"""Exit code for a bug, as in runtime/daemon_process."""

DESCRIPTORS_MAX = 253
"""SCM_MAX_FD: descriptors that one message can carry."""

log = logging.getLogger("nvpool.mountd.holder")


class ForkServer:
    """The fork server: the process off which serving processes are forked."""

    def __init__(self, words: list[str]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        with theirs:
            self._popen = subprocess.Popen(
                command(Program.MOUNT_FORK_SERVER, *words),
                stdin=theirs,
                start_new_session="--stay-in-group" not in words,
            )
        self.pidfd = os.pidfd_open(self._popen.pid)
        self.started_s = SYSTEM_CLOCK.boottime_s()

    def serve(self, descriptors: list[int]) -> ServingProcess:
        """Have a serving process forked.

        If that fails, the result is one that has ended without a message.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [b"serve"], [theirs.fileno(), *descriptors])
        return ServingProcess(ours)

    def end(self) -> int:
        """Kill the fork server and return its exit code."""
        self._popen.kill()
        os.close(self.pidfd)
        self.control.close()
        return self._popen.wait()


class ServingProcess:
    """A serving process: the current one, or its successor that waits to take over (the heir)."""

    def __init__(self, control: socket.socket, pidfd: int = -1) -> None:
        self.pidfd = pidfd  # -1 until its "here" has arrived
        self.control = control
        self.is_open = True
        self.ready = pidfd >= 0  # an adopted process serves already
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
        self._serving: ServingProcess | None = None
        self._heir: ServingProcess | None = None
        self._fork_server: ForkServer | None = None
        self._heirs_fork_server: ForkServer | None = None
        self._fork_server_s = 0.0  # when the next fork server may be started
        self._fork_server_pause_s = 0.0
        self._descriptors: list[int] = []
        """Descriptors to keep and to pass on, as the serving process reported them.

        First /dev/fuse and the mount state; then, for each read worker, its own descriptor of /dev/fuse and
        its pidfd; last the log of unanswered requests, where the kernel does not resend them.
        """
        self._stops = 0
        self._deaths = 0
        self._start_s = 0.0  # when to start the next serving process; 0: one is running
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
        """Take over a running serving process with these descriptors; its holder has died."""
        self._descriptors = list(descriptors)
        self._serving = ServingProcess(socket.socket(fileno=control), pidfd)

    def run(self) -> int:
        if self._serving is None:
            self._serving = self._start()
        while True:
            fork_server_s = self._fork_server_s if self._serving is not None else 0.0
            wake_s = min(
                (at_s for at_s in (self._start_s, self._leave_until_s, fork_server_s) if at_s), default=0.0
            )
            self._wait(max(0.0, wake_s - SYSTEM_CLOCK.boottime_s()) if wake_s else None)
            self._take_signals()
            self._look_at_fork_server()
            for process in (self._serving, self._heir):
                if process is not None:
                    self._listen(process)
            if self._heir is not None and self._heir.is_gone:
                self._give_heir_up("its successor has ended before it could go on")
            if self._serving is not None and self._serving.is_gone:
                code = self._died()
                if code is not None:
                    if self._fork_server is not None:
                        self._fork_server.end()
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
        if self._fork_server is not None:
            poll.register(self._fork_server.pidfd, select.POLLIN)
        for process in (self._serving, self._heir):
            if process is not None and process.is_open:
                poll.register(process.control, select.POLLIN)
            if process is not None and process.pidfd >= 0:
                poll.register(process.pidfd, select.POLLIN)
        poll.poll(seconds * 1000 + 1 if seconds is not None else None)

    # -- processes -------------------------------------------------------------------------------------------------------

    def _start(self) -> ServingProcess:
        if self._fork_server is None:
            self._fork_server_s = 0.0
            self._fork_server = ForkServer(self._words)
        return self._fork_server.serve(self._descriptors)

    def _look_at_fork_server(self) -> None:
        """Keep a fork server running while a process serves.

        One that dies early is restarted after a pause that grows.
        """
        now_s = SYSTEM_CLOCK.boottime_s()
        if self._fork_server is not None and _has_ended(self._fork_server.pidfd):
            lived_s = now_s - self._fork_server.started_s
            code = self._fork_server.end()
            self._fork_server = None
            early = lived_s < FORK_SERVER_PAUSE_S_MAX
            self._fork_server_pause_s = (
                min(max(0.1, 2 * self._fork_server_pause_s), FORK_SERVER_PAUSE_S_MAX) if early else 0.1
            )
            self._fork_server_s = now_s + self._fork_server_pause_s
            log.warning("the process that waits to fork has ended (%s)", _exit_text(code))
        if self._fork_server is None and self._serving is not None and now_s >= self._fork_server_s:
            self._fork_server_s = 0.0
            self._fork_server = ForkServer(self._words)

    def _listen(self, process: ServingProcess) -> None:
        while True:
            try:
                said, numbers, _, _ = socket.recv_fds(
                    process.control, 64, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionError:
                said, numbers = b"", []
            if not said:  # the process has closed its end
                process.is_open = False
                return
            word, _, value = said.decode(errors="replace").partition(" ")
            if word == "here" and len(numbers) == 1:
                (process.pidfd,) = numbers
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
        """Handle the death of the serving process.

        Returns the exit code if the mount ends with it, else None.
        """
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
            if self._fork_server is not None:
                self._fork_server.end()
            self._fork_server, self._heirs_fork_server = self._heirs_fork_server, None
            self._serving.say(f"go {self._died_s}")
            return None
        # no serving process was forked: the fork server is at fault
        if process.pidfd < 0 and self._fork_server is not None:
            self._fork_server.end()
            self._fork_server = None
        self._died_s = SYSTEM_CLOCK.boottime_s()
        self._deaths += 1
        over = self._deaths - QUICK_DEATHS_MAX
        if self._deaths >= DEATHS_MAX:
            log.error(
                "no serving process comes up; the mount is dead now, clean it up with: nvpool umount %s",
                self._words[-1],
            )
            return EXIT_BUG
        pause_s = 0.0 if over <= 0 else min(0.1 * 2**over, PAUSE_S_MAX)
        self._start_s = SYSTEM_CLOCK.boottime_s() + pause_s
        log.warning(
            "the serving process has died%s; another one goes on%s",
            "" if process.ready else " before it served",
            f" in {pause_s:.1f} s" if pause_s else "",
        )
        return None

    def _give_heir_up(self, why: str) -> None:
        """Abandon the successor. If it still runs, it ends by itself."""
        self._heir.close()
        self._heirs_fork_server.end()
        self._heir = self._heirs_fork_server = None
        self._leave_until_s = 0.0
        log.error("the serving process is not replaced: %s", why)

    def _may_be_replaced(self) -> bool:
        """Whether SIGUSR1 may replace the serving process.

        Not before it has handed over all its descriptors.
        """
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
            elif (
                number == signal.SIGUSR1
                and self._heir is None
                and self._descriptors
                and self._may_be_replaced()
            ):
                log.info("the serving process is being replaced")
                self._heirs_fork_server = ForkServer(self._words)
                self._heir = self._heirs_fork_server.serve(self._descriptors)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _notify(text: str) -> None:
    """Send a notification to systemd, if systemd started this process; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(1.0)
            channel.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _start_log(words: list[str]) -> None:
    """Log to the place and in the format of the serving process."""
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
