"""Options of an engine and its runtime: threads, journal and LMDB tree.

The daemons set the options from their configuration. Simulations replace the runtime (`LmdbOptions.floor`).
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import MIB
from nvpool.kv.journal import Journal
from nvpool.kv.lmdb_env import LmdbTree


class EngineRuntime:
    """Runtime on the real machine."""

    def thread(self, name: str) -> Executor:
        """Return an executor with one thread, which executes its tasks in order."""
        return ThreadPoolExecutor(1, name)

    def journal(self, directory: Path, capacity_bytes: int) -> Journal:
        """Open the journal in `directory`; errors as of `Journal`."""
        return Journal(directory, capacity_bytes)

    def tree(self, directory: Path, map_bytes: int) -> LmdbTree:
        """Open the tree in `directory`; errors as of `LmdbTree`."""
        return LmdbTree(directory, map_bytes)


FLOOR = EngineRuntime()


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """Options of one engine. InvalidRequest: an option is out of range."""

    term: int = 1
    map_bytes: int = 64 * MIB
    """Initial address space; it grows by doubling."""
    map_bytes_max: int = 1 << 40
    """Maximum size of the records. LMDB's file can be larger by the pages that two checkpoints rewrite."""
    sync_interval_s: float = 0.1
    durability: str = "interval"
    layer_entries_max: int = 20_000
    checkpoint_interval_s: float = 1.0
    journal_bytes: int = 32 * MIB
    """Size of each of the two files. A checkpoint begins when half of a file is used; one change has at most
    an eighth."""
    floor: EngineRuntime = FLOOR

    def __post_init__(self) -> None:
        if self.durability not in ("interval", "always"):
            raise InvalidRequest(f'durability is "interval" or "always", not {self.durability!r}')
        if (
            min(
                self.map_bytes,
                self.layer_entries_max,
                self.checkpoint_interval_s,
                self.sync_interval_s,
                self.term,
            )
            <= 0
        ):
            raise InvalidRequest("sizes, intervals and the term of an engine are above zero")
        if self.journal_bytes < 4096 or self.map_bytes_max < MIB:
            raise InvalidRequest("an engine needs a journal of 4 KiB and a map of 1 MiB at least")
