"""nvpool itself, by engine and by transport.

Each line of VARIANTS is a pool of its own, made, mounted and removed by the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from subjects.contract import Failed, Subject, answers, mounts, run, unmount
from subjects.local import no_fuse

CAPACITY = "16G"
"""Of the one drive, a sparse file: room for twenty rounds."""


class Variant(NamedTuple):
    """`column`: which column of the goals it stands in, "same host" or "tcp", or none. `mount`: words for `nvpool mount`;
    `configuration`: TOML of the node; `environment`: of its daemons and its mount. `sockets`: leave the unix sockets where
    clients find them; without them they come over TCP."""

    name: str
    column: str | None = None
    mount: tuple[str, ...] = ()
    configuration: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    sockets: bool = True
    notes: str = ""


VARIANTS = (
    Variant("nvpool", "same host", notes="as it comes: the best way between processes of one host"),
    Variant("nvpool-tcp", "tcp", sockets=False, notes="`stream`, TCP on loopback as the peers"),
)
"""What the goals are compared with: what `nvpool mount` does by itself, and the same over TCP. A variant whose words this
nvpool does not know is named as missing."""


class Pool(Subject):
    kind = "nvpool"

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant, self.name, self.notes = variant, variant.name, variant.notes

    def missing(self) -> str | None:
        known = nvpool("mount", "--help") if self.variant.mount else ""
        for word in self.variant.mount:
            if word.startswith("-") and word.split("=")[0] not in known:
                return f"this nvpool has no `nvpool mount {word}`"
        if self.variant.configuration:
            try:
                run(sys.executable, "-c", "import sys; from nvpool.base.config import parse; parse(sys.argv[1])",
                    self.variant.configuration)
            except Failed:
                return f"this nvpool does not know {self.variant.configuration!r}"
        return no_fuse()

    def version(self) -> str:
        from importlib.metadata import version
        return "nvpool " + version("nvpool")

    def environment(self) -> dict[str, str]:
        return super().environment() | dict(self.variant.environment)

    def start_servers(self) -> None:
        words = []
        if self.variant.configuration:
            (self.directory / "node.toml").write_text(self.variant.configuration)
            words = ["--config", self.directory / "node.toml"]
        self._command("dev", "up", self._pool(), "--size", CAPACITY, *words)
        if not self.variant.sockets:
            from nvpool.base.directory import PoolDirectory
            for path in PoolDirectory(self._pool()).socket_directory().glob("*.sock"):
                path.rename(path.with_suffix(".hidden"))

    def _pool(self) -> Path:
        return self.directory / "pool"

    def _command(self, *words: object) -> str:
        return nvpool(*words, environment=self.environment())

    def attach(self) -> None:
        self._command("mount", self._pool(), self.mount, *self.variant.mount)

    def detach(self) -> None:
        if str(self.mount) in mounts() and answers(self.mount):
            self._command("umount", self.mount)
        unmount(self.mount)

    def stop_servers(self) -> None:
        if self._pool().exists():
            self._command("dev", "down", self._pool())


def nvpool(*words: object, environment: dict[str, str] | None = None) -> str:
    return run(sys.executable, "-P", "-m", "nvpool.cli.main", *words, environment=environment, timeout_s=120)
