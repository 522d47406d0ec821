"""What an engine stands on: its threads, journal and tree. Simulations put another floor under it (`LmdbOptions.floor`)."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from nvpool.kv.journal import Journal
from nvpool.kv.lmdb_env import LmdbTree


class Floor:
    """The machine's own."""

    def thread(self, name: str) -> Executor:
        """One thread: what it is given is done in that order."""
        return ThreadPoolExecutor(1, name)

    def journal(self, directory: Path, capacity_bytes: int) -> Journal:
        return Journal(directory, capacity_bytes)

    def tree(self, directory: Path, map_bytes: int) -> LmdbTree:
        return LmdbTree(directory, map_bytes)


FLOOR = Floor()
