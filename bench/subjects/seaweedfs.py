"""SeaweedFS from PyPI: a master, a filer, and a volume server for each copy, over TCP on loopback."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from subjects.contract import END_S, Subject, free_port, run, unmount, wait_for_port, wait_until
from subjects.local import PEERS, end, no_fuse

PROGRAM = PEERS / "weed"
HOST = "127.0.0.1"
PLACEMENT = {1: "000", 2: "001"}
"""Copies -> replication, in SeaweedFS's words: one more copy on another server of the same rack."""
VOLUMES, VOLUME_MIB = 40, 1024
"""Most volumes of a volume server, and size of each. The default is 8 of 30 GB, of which the first files take 7."""
ANSWER_S = 10.0


class Address(NamedTuple):
    """Ports of a server. The default gRPC port is 10,000 above the other one, which may not exist."""

    port: int
    grpc: int

    def __str__(self) -> str:
        return f"{HOST}:{self.port}.{self.grpc}"


class SeaweedFS(Subject):
    name, kind = "seaweedfs", "peer"
    cold = "mounted again, its cache directory removed, page cache dropped"
    _servers: tuple[subprocess.Popen, ...] = ()
    _client: subprocess.Popen | None = None

    def __init__(self, copies: int = 1) -> None:
        super().__init__(copies)
        servers = "one volume server" if copies == 1 else f"{copies} volume servers on the one drive"
        self.notes = (
            f"{servers}, replication {PLACEMENT[copies]}, volumes of {VOLUME_MIB} MiB; one filer keeps the names, in LevelDB; "
            "its fsync does not reach the drive (volume servers do not sync, the default)"
        )

    def missing(self) -> str | None:
        if not os.access(PROGRAM, os.X_OK):
            return "weed is not installed (make bench-peers)"
        return no_fuse()

    def version(self) -> str:
        found = re.search(r"\d+\.\d+\S*", run(PROGRAM, "version"))
        return f"SeaweedFS {found[0] if found else '?'}"

    def environment(self) -> dict[str, str]:
        # Temporary files and logs stay in our directory, and configuration in the home of the user is not read.
        return super().environment() | {"TMPDIR": str(self.directory), "HOME": str(self.directory)}

    def start_servers(self) -> None:
        """Each server is a process of its own. Those of `weed server`, all in one, have sockets with fixed names in /tmp."""
        master = self._serve(
            "master",
            f"-mdir={self._made('master')}",
            f"-volumeSizeLimitMB={VOLUME_MIB}",
            f"-defaultReplication={PLACEMENT[self.copies]}",
            "-telemetry=false",
        )
        for number in range(1, self.copies + 1):
            self._serve(
                "volume",
                f"-dir={self._made(f'volume-{number}')}",
                f"-max={VOLUMES}",
                f"-master={master}",
                "-preStopSeconds=0",
            )
        self._filer = self._serve(
            "filer",
            f"-defaultStoreDir={self._made('filer')}",
            f"-master={master}",
            f"-localSocket={self.directory / 'filer.sock'}",
        )
        wait_until(self._stores, "the filer does not take a file", self._servers[-1])

    def _made(self, name: str) -> Path:
        (self.directory / name).mkdir()
        return self.directory / name

    def _serve(self, role: str, *words: str) -> Address:
        """Start a server of that role; it listens on return."""
        address = Address(free_port(HOST), free_port(HOST))
        where = (f"-ip={HOST}", f"-ip.bind={HOST}", f"-port={address.port}", f"-port.grpc={address.grpc}")
        server = self.daemon(PROGRAM, role, *where, *words)
        self._servers += (server,)
        for port in address:
            wait_for_port(HOST, port, f"weed {role}", server)
        return address

    def _stores(self) -> bool:
        """Whether the filer takes a file with all of its copies and returns it; ports are open seconds before."""
        with contextlib.closing(
            http.client.HTTPConnection(HOST, self._filer.port, timeout=ANSWER_S)
        ) as filer:
            try:
                for verb, body in (("PUT", b"ready"), ("GET", None), ("DELETE", None)):
                    filer.request(verb, "/ready", body)
                    with filer.getresponse() as answer:
                        answer.read()
                        if answer.status >= 300:
                            return False
            except (OSError, http.client.HTTPException):
                return False
        return True

    def _cache(self) -> Path:
        return self.directory / "cache"

    def attach(self) -> None:
        self._cache().mkdir(exist_ok=True)
        self._client = self.daemon(
            PROGRAM,
            "mount",
            f"-filer={self._filer}",
            f"-dir={self.mount}",
            f"-cacheDir={self._cache()}",
            f"-localSocket={self.directory / 'mount.sock'}",
        )
        self.wait_for_mount(self._client)

    def detach(self) -> None:
        unmount(self.mount)
        # It ends with its mount. Signalled before, it would unmount once more, perhaps what is mounted there by then.
        end(self._client, END_S)
        shutil.rmtree(self._cache(), ignore_errors=True)

    def stop_servers(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            end(server)
        self._servers = ()
