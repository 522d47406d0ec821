"""RealBridge: a bridge of one test, as a process that may be killed, with its mount of a RealPool.

Leaving the `with` block ends it, removes its bind mounts and its mount, and waits until the mount's processes
have ended. Used by tests, the demonstration and benchmarks; never by the product.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvpool.bridge.bind_helper import unbind
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command, processes
from nvpool.host.mountinfo import mount_at, mounts_below
from nvpool.testing.env.docker import PLUGINS
from nvpool.testing.env.pool import end_process

SERVING, HOLDING = Program.MOUNT, Program.MOUNT_HOLDER


class RealBridge:
    """A bridge process for the pool in the directory `pool`.

    `place` is a directory for its files. `driver` is its name for Docker.
    """

    def __init__(
        self, pool: Path, place: Path, *, node: str = "test-host", driver: str = "", settled_s: float = 60.0
    ) -> None:
        self.pool, self.place, self.node, self._settled_s = pool, place, node, settled_s
        self.driver = driver or f"nvpool-{os.getpid()}-{SYSTEM_CLOCK.random().randrange(1 << 32):08x}"
        self.socket = PLUGINS / f"{self.driver}.sock"
        self.log = place / "bridge.log"
        self.mountpoint = place / "state" / "pool"
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> RealBridge:
        self.place.mkdir(parents=True, exist_ok=True)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.kill()
        self.socket.unlink(missing_ok=True)
        for mount in mounts_below(self.place / "state" / "mounts"):
            unbind(str(mount.point), "volumes")
        if mount_at(self.mountpoint) is not None:
            ctypes.CDLL(None).umount2(os.fsencode(self.mountpoint), 2)  # MNT_DETACH
        for pid in self.mount_processes(HOLDING):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline_s = SYSTEM_CLOCK.boottime_s() + 20
        while self.mount_processes() and SYSTEM_CLOCK.boottime_s() < deadline_s:
            select.select([], [], [], 0.1)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.mount_processes():
                end_process(pid, number)

    # -- start and stop --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the bridge. On return it answers."""
        words = command(
            Program.BRIDGE,
            str(self.pool),
            f"--state={self.place}/state",
            f"--docker-socket={self.socket}",
            f"--node={self.node}",
            f"--log={self.log}",
            f"--settled-s={self._settled_s}",
        )
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self.until(self._answers, "the bridge answers")

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (
            f"the bridge has ended\n{self.said()}"
        )
        try:
            return self.ask("/VolumeDriver.Capabilities")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the bridge (kill -9)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None

    # -- requests --------------------------------------------------------------------------------------------------------

    def ask(self, verb: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Send a request as an engine does: (status, reply). OSError."""
        connection = http.client.HTTPConnection("localhost", timeout=70)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.sock.settimeout(70)
            connection.sock.connect(os.fspath(self.socket))
            connection.request("POST", verb, body=json.dumps(fields).encode())
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def mount_processes(self, *programs: Program) -> list[int]:
        """Return the pids of its mount's processes that run one of these programs, or any of them."""
        return sorted(pid for pid, _ in processes(*programs, naming=self.mountpoint))

    def kill_mount(self, program: Program = SERVING) -> int:
        """Kill the process that serves the mount, or another one of it (kill -9). Wait for its successor and
        return its pid."""
        self.until(lambda: self.mount_processes(program), "a process serves the mount")
        pid = self.mount_processes(program)[0]
        os.kill(pid, signal.SIGKILL)
        self.until(
            lambda: [other for other in self.mount_processes(program) if other != pid],
            "another process goes on",
        )
        return pid

    def until(self, holds: Callable[[], object], what: str, wait_s: float = 60.0) -> None:
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        while not holds():
            assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s:.0f} s: {what}\n{self.said()}"
            select.select([], [], [], 0.05)

    def said(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
