"""GlusterFS from Debian, a brick for each copy, in a mount namespace where glusterd's directories are below the bench's."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import socket
import subprocess

from subjects.contract import Failed, Subject, mounts, own_address, run, unmount, wait_for_port
from subjects.local import end, no_fuse

PORT = 24007
"""Bricks ask glusterd for their volume at this port, whatever glusterd.vol says."""
VOLUME = "bench"
ELSEWHERE = {"lib": "/var/lib/glusterd", "run": "/run", "log": "/var/log/glusterfs"}
"""Below our directory -> where its programs look; bound for the servers alone."""
CONFIGURATION = f"""volume management
    type mgmt/glusterd
    option working-directory /var/lib/glusterd
    option transport-type socket
    option transport.socket.keepalive-time 10
    option transport.socket.keepalive-interval 2
    option transport.socket.read-fail-log off
    option transport.socket.listen-port {PORT}
    option ping-timeout 0
    option event-threads 1
    option max-port 60999
end-volume
"""
"""glusterd.vol as in Debian's /etc/glusterfs."""


def unescaped(place: str) -> str:
    """A mount point as it is; proc(5) writes blanks, tabs, newlines and backslashes of it as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place)


class GlusterFS(Subject):
    name, kind = "glusterfs", "peer"
    _glusterd: subprocess.Popen | None = None
    _client: subprocess.Popen | None = None

    def __init__(self, copies: int = 1) -> None:
        super().__init__(copies)
        bricks = "one brick" if copies == 1 else f"{copies} bricks on the one drive"
        self.notes = f"{bricks}, replica {copies}, options as `volume create` sets them"

    def missing(self) -> str | None:
        for program in ("glusterd", "gluster", "glusterfs", "nsenter", "unshare"):
            if shutil.which(program) is None:
                return f"{program} is not installed (make bench-peers)"
        address = own_address()
        if address is None:
            return "needs an address of this machine that is not 127.x"
        with socket.socket() as probe:
            if probe.connect_ex((address, PORT)) == 0:
                return f"something listens on port {PORT} already: a GlusterFS of this machine?"
        return no_fuse()

    def version(self) -> str:
        return run("glusterd", "--version").split("\n")[0]

    def start_servers(self) -> None:
        bricks = [f"brick-{number}" for number in range(1, self.copies + 1)]
        for name in (*ELSEWHERE, *bricks):
            (self.directory / name).mkdir()
        configuration = self.directory / "glusterd.vol"
        configuration.write_text(CONFIGURATION)
        # A mount that exists twice lives until both are gone: no FUSE mount of the machine is to be kept by the namespace.
        lines = [f"umount -l {shlex.quote(unescaped(place))}" for place in reversed(mounts("fuse"))] + [
            "set -e"
        ]
        lines += [
            f"mount --bind {shlex.quote(str(self.directory / name))} {place}"
            for name, place in ELSEWHERE.items()
        ]
        lines.append(
            shlex.join(
                ["exec", "glusterd", "-N", "-f", str(configuration), "-p", f"{self.directory}/glusterd.pid"]
            )
        )
        # `exec` keeps the number of the process.
        self._glusterd = self.daemon(
            "unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines)
        )
        wait_for_port(own_address(), PORT, "glusterd", self._glusterd)
        replicas = ["replica", str(self.copies)] if self.copies > 1 else []
        places = [f"{own_address()}:{self.directory / name}" for name in bricks]
        self._command("volume", "create", VOLUME, *replicas, *places, "force")
        self._command("volume", "start", VOLUME)

    def _command(self, *words: str) -> str:
        return self.run("nsenter", "--mount", "-t", self._glusterd.pid, "gluster", "--mode=script", *words)

    def attach(self) -> None:
        self._client = self.daemon(
            "glusterfs",
            "-N",
            f"--volfile-server={own_address()}",
            f"--volfile-id={VOLUME}",
            "--process-name",
            "fuse",
            "-l",
            self.directory / "log" / "client.log",
            self.mount,
        )
        self.wait_for_mount(self._client)

    def detach(self) -> None:
        unmount(self.mount)
        end(self._client)

    def stop_servers(self) -> None:
        if self._glusterd is None or self._glusterd.poll() is not None:
            return
        with contextlib.suppress(
            Failed
        ):  # it never started, or does not answer: its processes are ended all the same
            self._command("volume", "stop", VOLUME, "force")
        self._glusterd.terminate()
        end(self._glusterd)
