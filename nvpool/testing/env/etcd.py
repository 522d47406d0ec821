"""Members of a real etcd on loopback, for tests: start, kill, stop for a while, and remove with all files."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

from nvpool.cluster.etcd.client import EtcdCertificates, answers_alone
from nvpool.security.ca import CertificateAuthority, request_certificate

START_S = 30.0


def missing() -> str | None:
    """Reason why no etcd can run here; None if it can."""
    return None if shutil.which("etcd") else "etcd is not installed (Debian: etcd-server)"


class RealEtcd:
    """One cluster of `count` members, as a context manager.

    `secured`: it has its own CA, and `files` are CA certificate, certificate and key of a client.
    """

    def __init__(self, count: int = 1, *, secured: bool = False) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="nvpool-etcd-"))
        ports = free_ports(2 * count)
        self.members = [f"127.0.0.1:{port}" for port in ports[:count]]
        self._scheme = "https" if secured else "http"
        self.urls = ",".join(f"{self._scheme}://{member}" for member in self.members)
        self.files = self._certify() if secured else ()
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
        self._running: list[subprocess.Popen | None] = [None] * count

    def _certify(self) -> tuple[Path, ...]:
        authority, asked = CertificateAuthority.make("etcd"), request_certificate()
        made = {
            "authority.crt": authority.certificate,
            "key": asked.key,
            "crt": authority.sign(asked.request, "etcd", "node/etcd", ("127.0.0.1",)),
        }
        for name, content in made.items():
            (self._place / name).write_bytes(content)
        return tuple(self._place / name for name in ("authority.crt", "crt", "key"))

    def __enter__(self) -> RealEtcd:
        try:
            for number in range(len(self.members)):
                self.start(number)
            for number in range(len(self.members)):
                self.wait(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for number in range(len(self.members)):
            self.kill(number)
        shutil.rmtree(self._place)

    def start(self, number: int) -> None:
        """Start the member, with the data that it has on disk."""
        command = [
            "etcd",
            "--name",
            f"m{number}",
            "--data-dir",
            str(self._place / f"m{number}"),
            "--listen-client-urls",
            f"{self._scheme}://{self.members[number]}",
            "--advertise-client-urls",
            f"{self._scheme}://{self.members[number]}",
            "--listen-peer-urls",
            self._peers[number],
            "--initial-advertise-peer-urls",
            self._peers[number],
            "--initial-cluster",
            ",".join(f"m{each}={peer}" for each, peer in enumerate(self._peers)),
            "--initial-cluster-token",
            self._place.name,
            "--log-level",
            "error",
            "--heartbeat-interval",
            "100",
            "--election-timeout",
            "1000",
        ]
        if self.files:
            command += [
                "--client-cert-auth",
                "--trusted-ca-file",
                str(self.files[0]),
                "--cert-file",
                str(self.files[1]),
                "--key-file",
                str(self.files[2]),
            ]
        with open(self._place / f"m{number}.log", "ab") as log:
            self._running[number] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def wait(self, number: int) -> None:
        """Wait until the member serves, which needs a majority."""
        until_s = time.monotonic() + START_S
        while True:
            if self.files:
                shown = EtcdCertificates(*(file.read_bytes() for file in self.files))
                if asyncio.run(answers_alone(self.members[number], shown, 2.0)):
                    return
            try:
                with urllib.request.urlopen(f"http://{self.members[number]}/health", timeout=5) as answer:
                    if b'"true"' in answer.read():
                        return
            except (OSError, HTTPException):
                pass
            if time.monotonic() > until_s:
                raise AssertionError(f"member {number} does not serve: {self._log(number)}")
            time.sleep(0.05)

    def _log(self, number: int) -> str:
        return (self._place / f"m{number}.log").read_text()[-2000:]

    def kill(self, number: int) -> None:
        """Kill the member (SIGKILL); what it has synced stays."""
        process, self._running[number] = self._running[number], None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self, number: int) -> None:
        """Stop the member with its connections open (SIGSTOP)."""
        os.kill(self._running[number].pid, signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        os.kill(self._running[number].pid, signal.SIGCONT)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
