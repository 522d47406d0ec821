"""Spill file of a snapshot: an expendable LMDB environment for old values that exceed the memory limit.

The environment is never synced. `close` deletes it; the `snapshot-*` directories of a dead engine are deleted
when the engine is reopened. kv/snapshot calls this module on the thread of the event loop; `put` writes some
thousand pairs to the page cache, which takes milliseconds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import lmdb

from nvpool.core.errors import from_os_error
from nvpool.kv.api import KEY_BYTES_MAX
from nvpool.kv.lmdb_env import from_lmdb_error

_NAME = "snapshot-"
_MAP_BYTES = 1 << 40
"""Reserved address space: the caller and the drive bound the real usage."""


class SpillFile:
    def __init__(self, directory: Path) -> None:
        """Create an empty environment below `directory`.

        NoSpace, DriveFailed and similar errors: as the system reports.
        """
        try:
            self._path = Path(tempfile.mkdtemp(prefix=_NAME, dir=directory))
        except OSError as error:
            raise from_os_error(error, f"make a directory in {directory}") from error
        try:
            self._env = lmdb.open(
                os.fspath(self._path),
                map_size=_MAP_BYTES,
                sync=False,
                metasync=False,
                lock=False,
                readahead=False,
                max_spare_txns=1,
            )
        except lmdb.Error as error:
            shutil.rmtree(self._path, ignore_errors=True)
            raise from_lmdb_error(error, f"open {self._path}") from error

    def put(self, pairs: list[tuple[bytes, bytes | None]]) -> None:
        """Store `pairs` with new keys; NoSpace: nothing was stored."""
        stored = sorted((key, b"" if value is None else b"=" + value) for key, value in pairs)
        try:
            with self._env.begin(write=True) as transaction:
                transaction.cursor().putmulti(stored)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"write {self._path}") from error

    def __contains__(self, key: bytes) -> bool:
        try:
            with self._env.begin() as transaction:
                return transaction.get(key) is not None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self._path}") from error

    def ascend(self, first: bytes, end: bytes) -> Generator[tuple[bytes, bytes | None]]:
        """Yield pairs with first <= key < end; exhaust or close the iterator before the next `put`."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                if cursor.set_range(first[:KEY_BYTES_MAX] or b"\0"):
                    for key, stored in cursor.iternext():
                        if key >= end:
                            return
                        if key >= first:
                            yield key, stored[1:] if stored else None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self._path}") from error

    def close(self) -> None:
        self._env.close()
        shutil.rmtree(self._path, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what a dead owner of `directory` left."""
    for left in directory.glob(_NAME + "*"):
        shutil.rmtree(left, ignore_errors=True)
