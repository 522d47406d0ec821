"""Variants of nvpool, by engine and transport.

Each line of VARIANTS is its own pool; the nvpool command creates, mounts and removes it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from nvpool.core.programs import Program, command
from nvpool.testing.env.pool import PLAIN_TCP
from subjects.contract import Subject, answers, mounts, run, unmount
from subjects.local import BENCH, no_fuse

CAPACITY = "16G"
"""Size of the one drive, a sparse file: room for twenty rounds."""
NEEDS = {"pyfuse3": "pyfuse3", "grpc": "grpc"}
"""Engine or transport -> module that it needs."""


class Variant(NamedTuple):
    """`column`: which column of the goals it stands in, "same host" or "tcp"; without one it is asked for the loads that are
    for all variants. `transport`, `short_circuit` and `engine` as `nvpool mount` knows them; "" is what it does by itself."""

    name: str
    column: str | None = None
    transport: str = ""
    short_circuit: bool = True
    engine: str = ""
    notes: str = ""

    def words(self) -> list[str]:
        """Of transport and short-circuit reads, for `nvpool mount` and sdk_loads.py."""
        return [f"--transport={self.transport}"] * bool(self.transport) + ["--no-short-circuit"] * (
            not self.short_circuit
        )


VARIANTS = (
    Variant(
        "nvpool",
        "same host",
        notes="as it comes: the direct engine, and short-circuit reads from the drives of its own host",
    ),
    Variant(
        "nvpool-tcp",
        "tcp",
        "stream",
        False,
        notes="the direct engine; `stream`, TCP on loopback as the peers",
    ),
    Variant(
        "nvpool-unix",
        None,
        "stream+unix",
        False,
        notes="the direct engine; unix sockets, no short-circuit reads",
    ),
    Variant(
        "nvpool-grpc",
        None,
        "grpc",
        False,
        notes="the direct engine; gRPC on loopback, no short-circuit reads",
    ),
    Variant(
        "nvpool-pyfuse3", None, "", True, "pyfuse3", notes="libfuse through pyfuse3; short-circuit reads"
    ),
)
"""The first two are what the goals are compared with: what `nvpool mount` does by itself, and the same over TCP."""


class Pool(Subject):
    """`targets`: how many, all on the one drive; at least one for each copy. With two copies the metadata has two as well."""

    kind = "nvpool"
    offers = ("mount", "sdk")

    def __init__(self, variant: Variant, targets: int = 1, copies: int = 1) -> None:
        super().__init__(copies)
        self.variant, self.name, self.notes = variant, variant.name, variant.notes
        self.targets = max(targets, copies)
        if copies > 1:
            self.notes += (
                f"; {self.targets} targets on the one drive, replicas {copies}, standbys {copies - 1}"
            )
        self.in_part = variant.column is None

    def missing(self) -> str | None:
        for word in (self.variant.engine, self.variant.transport):
            if word in NEEDS and find_spec(NEEDS[word]) is None:
                return f"needs the Python package {NEEDS[word]}, which is not installed"
        return no_fuse()

    def version(self) -> str:
        from importlib.metadata import version

        return "nvpool " + version("nvpool")

    def start_servers(self) -> None:
        words = [f"--size={CAPACITY}" for _ in range(self.targets)]
        if self.copies > 1:
            words += [f"--replicas={self.copies}", f"--standbys={self.copies - 1}"]
        if self.variant.transport in ("stream", "grpc"):
            config = self.directory / "plain-tcp.toml"
            config.write_text(PLAIN_TCP)
            words += ["--config", str(config)]
        self._command("dev", "up", self.pool(), *words)

    def pool(self) -> Path:
        return self.directory / "pool"

    def _command(self, *words: object) -> str:
        return nvpool(*words, environment=self.environment())

    def attach(self) -> None:
        self._command(
            "mount",
            self.pool(),
            self.mount,
            *self.variant.words(),
            *([f"--engine={self.variant.engine}"] if self.variant.engine else []),
        )

    def detach(self) -> None:
        if str(self.mount) in mounts() and answers(self.mount):
            self._command("umount", self.mount)
        unmount(self.mount)

    def stop_servers(self) -> None:
        if self.pool().exists():
            self._command("dev", "down", self.pool())

    def sdk(self, verb: str, *words: object, seconds: float) -> str:
        """Run sdk_loads.py on this pool, with the transport of the variant."""
        return self.run(*self.sdk_command(verb, *words), "--seconds", seconds, timeout_s=seconds + 120)

    def sdk_command(self, verb: str, *words: object, variant: Variant | None = None) -> list[str]:
        chosen = (
            sys.executable,
            BENCH / "sdk_loads.py",
            *(variant or self.variant).words(),
            verb,
            self.pool(),
            *words,
        )
        return [str(word) for word in chosen]


def nvpool(*words: object, environment: dict[str, str] | None = None) -> str:
    return run(*command(Program.CLI), *words, environment=environment, timeout_s=120)
