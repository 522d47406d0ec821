"""Service manager for nodes in namespaces: restarts a daemon that has ended, like systemd.

It behaves as systemd does with systemd/nvpoold.service: it gives the daemon NOTIFY_SOCKET, so that the
daemon's children leave the restart to the manager, and starts it again RestartSec= after its end, for any
reason. Used by tests and benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.testing.env.multi_node_pool import NodeMachine
from nvpool.testing.env.pool import end_process

RESTART_S = 0.2
"""RestartSec= of systemd/nvpoold.service."""


class ServiceManager:
    """Keeps `nvpoold` of one node running from `start` until `stop`, which leaves the last daemon running."""

    def __init__(self, node: NodeMachine) -> None:
        self._node = node
        self._stopping = threading.Event()
        # A short path: a unix socket may have 107 bytes, and pools of tests have long paths.
        self._place = tempfile.TemporaryDirectory(prefix="nvpool-notify-", ignore_cleanup_errors=True)
        self._path = Path(self._place.name) / "notify"
        self.errors = node.machine.place / "nvpoold.stderr"
        """Output of daemons before they have opened their log."""
        self._thread = threading.Thread(
            target=self._keep, name=f"manager of {node.machine.name}", daemon=True
        )
        self._process: subprocess.Popen | None = None
        self.ended = 0
        """Number of daemons that have ended."""

    def take_over(self, wait_s: float = 120.0) -> None:
        """Stop the daemon that runs there in order, however it was started, and start it under this manager."""
        supervisor = self._node.directory.supervisor()
        if supervisor is not None:
            end_process(supervisor.pid, signal.SIGTERM)
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        while self._node.processes():
            assert SYSTEM_CLOCK.boottime_s() < deadline_s, (
                f"{self._node.machine.name} does not end: {self._node.said()}"
            )
            time.sleep(0.1)
        self.start()

    def start(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(self._path))
        threading.Thread(target=self._receive, daemon=True).start()
        self._thread.start()

    def _receive(self) -> None:
        """Read the notifications, because a full socket blocks the daemon."""
        with contextlib.suppress(OSError):
            while not self._stopping.is_set():
                self._socket.recv(4096)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            with open(self.errors, "ab") as file:
                self._process = self._node.serve(os.environ | {"NOTIFY_SOCKET": str(self._path)}, stderr=file)
            self._process.wait()
            self.ended += 1
            self._stopping.wait(RESTART_S)

    def stop(self) -> None:
        """Start no further daemon."""
        self._stopping.set()

    def close(self) -> None:
        """Release the resources; call it after `stop`, when the last daemon has ended."""
        if self._process is not None:
            self._thread.join(60)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        self._place.cleanup()
