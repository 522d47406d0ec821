"""Runtime of an engine: its threads, journal and LMDB tree.

Simulations replace the runtime (`LmdbOptions.floor`).
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from nvpool.kv.journal import Journal
from nvpool.kv.lmdb_env import LmdbTree


class EngineRuntime:
    """Runtime on the real machine."""

    def thread(self, name: str) -> Executor:
        """Return an executor with one thread, which executes its tasks in order."""
        return ThreadPoolExecutor(1, name)

    def journal(self, directory: Path, capacity_bytes: int) -> Journal:
        return Journal(directory, capacity_bytes)

    def tree(self, directory: Path, map_bytes: int) -> LmdbTree:
        return LmdbTree(directory, map_bytes)


FLOOR = EngineRuntime()
