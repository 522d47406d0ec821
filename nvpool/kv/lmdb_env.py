"""LMDB adapter: checksummed records, whole transactions, a growing map, and nvpool's errors.

Uses `data.mdb` and `lock.mdb` in the engine's directory, main database only. A stored value is followed by
the CRC32C of key and value (u32, little-endian), since LMDB itself would return a flipped bit. The engine's
own record, the `Mark`, has the key KEY_END and the value

    version u16 = 1 · reserved u16, u32 = 0 · sequence u64 · generation u64 · term u64

Read transactions end within the call that began them: while one is open, LMDB cannot reuse replaced pages,
and the map cannot grow. LMDB runs with its syncs and without writemap, so after a power loss the file has the
last commit or the one before. Only the LMDB engine uses this module: `write` on a thread of its own,
everything else on the thread of the event loop.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb

from nvpool.core.checksum import crc32c
from nvpool.core.errors import (
    CorruptRecord,
    DriveFailed,
    InvalidRequest,
    NoSpace,
    NvpoolError,
    WrongFormat,
    from_os_error,
)
from nvpool.core.units import MIB
from nvpool.kv.api import KEY_BYTES_MAX, KEY_END

_MARK = struct.Struct("<HHIQQQ")
_MARK_VERSION = 1
_CRC_BYTES = 4
_CRC_RESIDUE = crc32c(bytes(_CRC_BYTES))
"""CRC32C of any bytes followed by their own CRC32C, little-endian."""

_SLICE_KEYS = 1000
"""Number of keys that a checkpoint handles before the event loop may run: about a millisecond."""

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Exists in glibc only, which is also the only one that retains freed memory."""

_READ_FIRST = 16
"""Pairs read from LMDB before the first check for the end of the range; four times as many before each next
check."""

_RESERVE_BYTES = MIB
"""Space in the file for a checkpoint of any small layer, so that acknowledged changes can be stored on a full
drive too."""

_COPY_FACTOR = 4
"""Assumed ratio of new pages to the bytes of a change in the journal; usually far fewer pages are needed."""

WRITE_PAGES_MAX = 32_768
"""Pages that a write should change at most: 128 MiB. LMDB holds a copy of each page in memory until the
commit, and retains that memory for the next write as long as the environment is open."""

_KEYS_A_NEW_PAGE = 16
"""Keys of a write for each page added by splits: a page of small records holds about 40 keys when it is
split."""


class Mark(NamedTuple):
    """The last change that the tree has, and the generation of the journal that ended with it."""

    sequence: int
    generation: int
    term: int


class LmdbTree:
    def __init__(self, directory: Path, map_bytes: int) -> None:
        """Open the file in `directory`; create it if it is missing.

        CorruptRecord, WrongFormat: the file is no valid LMDB file. NoSpace, DriveFailed and similar: as the
        system reports.
        """
        self.path = directory / "data.mdb"
        self.entries = self.used_bytes = self.file_bytes = self.map_bytes = 0
        """State after the last checkpoint: number of records, bytes of their pages, bytes of the file up to
        the last used page (a reserve follows), bytes of the map."""
        self.write_keys_max = 0
        """A write of this many keys, in any position, changes at most WRITE_PAGES_MAX pages."""
        self._file = -1
        try:
            # Larger than the file, so that it can grow: the first map of an existing file must contain it.
            file_bytes = self.path.stat().st_size if self.path.exists() else 0
            self._env = self._opened_env(max(map_bytes, (file_bytes * 5 // 4 // MIB + 1) * MIB))
            try:
                self._env.reader_check()
                self._file = os.open(self.path, os.O_RDWR)
                self._page_bytes = self._env.stat()["psize"]
                self._measure()
            except (lmdb.Error, OSError):
                self.close()
                raise
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"open {self.path}") from error
        except OSError as error:
            raise from_os_error(error, f"open {self.path}") from error

    def _opened_env(self, map_bytes: int) -> lmdb.Environment:
        return lmdb.open(
            os.fspath(self.path.parent),
            map_size=map_bytes,
            subdir=True,
            mode=0o600,
            readahead=False,
            max_spare_txns=1,
            create=False,
        )

    def renew(self) -> None:
        """Reopen LMDB's file, to return the memory of a large `write` to malloc and to the system.

        Nothing else returns this memory. The mapped pages must be faulted in again, so do not call this while
        requests wait. Errors as when opening.
        """
        try:
            self._env.close()
            self._env = self._opened_env(self.map_bytes)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"open {self.path}") from error
        if _malloc_trim is not None:
            _malloc_trim(0)

    # -- reading ------------------------------------------------------------------------------------------------------

    # LMDB has 126 places for readers, and its Python binding gives one back when the transaction object is freed, not when it
    # is aborted. The traceback of an error refers to the variables of the functions it came from, so these forget their
    # transaction, cursor and iterator at the end: otherwise errors that are kept would use up the places.

    def get(self, key: bytes) -> bytes | None:
        """Return a value; CorruptRecord if the record, or a neighbour that may hide it, is damaged."""
        try:
            transaction, cursor = self._env.begin(), None
            try:
                stored = transaction.get(key)
                if stored is not None:
                    return self._checked((key, stored))[1]
                # A flipped bit in a stored key would hide its record. Such a record is where the search for
                # it ends: verify both neighbours before concluding that the key is absent.
                cursor = transaction.cursor()
                if cursor.set_range(key):
                    self._checked(cursor.item())
                    before = cursor.prev()
                else:
                    before = cursor.last()
                if before:
                    self._checked(cursor.item())
                return None
            finally:
                transaction.abort()
                del transaction
                cursor = None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error

    def get_many(self, keys: list[bytes]) -> dict[bytes, bytes | None]:
        """Return the values of several keys, as `get` does."""
        if not keys:
            return {}
        try:
            transaction = self._env.begin()
            try:
                stored = transaction.cursor().getmulti(keys)
            finally:
                transaction.abort()
                del transaction
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error
        found: dict[bytes, bytes | None] = dict(map(self._checked, stored))
        if len(found) < len(keys):
            found.update((key, self.get(key)) for key in keys if key not in found)
        return found

    def _checked(self, item: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        key, stored = item
        if crc32c(stored, crc32c(key)) != _CRC_RESIDUE or len(stored) < _CRC_BYTES:
            error = CorruptRecord(f"the record {key.hex()} in {self.path} is damaged")
            error.key = key
            raise error
        return key, stored[:-_CRC_BYTES]

    def read(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return up to `limit` pairs with first <= key < end, ascending."""
        found: list[tuple[bytes, bytes]] = []
        try:
            transaction, cursor, items = self._env.begin(), None, None
            try:
                cursor = transaction.cursor()
                items = cursor.iternext() if cursor.set_range(first[:KEY_BYTES_MAX] or b"\0") else iter(())
                count = _READ_FIRST
                while len(found) < limit and (part := list(islice(items, min(count, limit - len(found))))):
                    behind = part[-1][0] >= end
                    if behind or part[0][0] < first:
                        part = [item for item in part if first <= item[0] < end]
                    found += map(self._checked, part)
                    if behind:
                        break
                    count *= 4
            finally:
                transaction.abort()
                del transaction
                cursor = items = None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error
        return found

    def walk(self, first: bytes, end: bytes, forward: bool) -> Generator[tuple[bytes, bytes]]:
        """Yield pairs with first <= key < end, ascending or descending.

        The caller must exhaust or close the iterator within its own call.
        """
        try:
            transaction, cursor, items = self._env.begin(), None, None
            try:
                cursor = transaction.cursor()
                # A bound longer than the longest key sorts directly after its own prefix.
                if forward:
                    if cursor.set_range(first[:KEY_BYTES_MAX] or b"\0"):
                        items = cursor.iternext()
                        for item in items:
                            if item[0] >= end:
                                return
                            if item[0] >= first:
                                yield self._checked(item)
                    return
                if cursor.set_range(end[:KEY_BYTES_MAX]):
                    found = cursor.key() < end or cursor.prev()
                else:
                    found = cursor.last()
                if found:
                    items = cursor.iterprev()
                    for item in items:
                        if item[0] < first:
                            return
                        yield self._checked(item)
            finally:
                transaction.abort()
                del transaction
                cursor = items = None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error

    def mark(self) -> Mark | None:
        """Return the mark; None for a new file. WrongFormat: another program or version wrote the file."""
        try:
            with self._env.begin() as transaction:
                stored = transaction.get(KEY_END)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error
        if stored is None:
            if self.used_bytes:
                raise WrongFormat(f"{self.path} was not made by nvpool, or has lost the record that says so")
            return None
        value = self._checked((KEY_END, stored))[1]
        version = int.from_bytes(value[:2], "little")
        if version != _MARK_VERSION or len(value) != _MARK.size:
            raise WrongFormat(
                f"{self.path} has the version {version}; this version of nvpool knows {_MARK_VERSION} only"
            )
        return Mark(*_MARK.unpack(value)[3:])

    # -- writing ------------------------------------------------------------------------------------------------------

    def prepare(self, change_bytes: int) -> None:
        """Reserve space in the map and on the drive for a `write` of `change_bytes` in the journal.

        NoSpace: the drive has no more space. `write` may still succeed, with free pages inside the file.

        The map grows when less than a tenth of it, or than the changes may need, is free. LMDB requires that
        no transaction is open then: read transactions end in the call that began them, and the only writer
        follows later. Reusable pages do not count as free; a map that is too large costs address space only.
        """
        size, used = self.map_bytes, self.file_bytes
        need = _COPY_FACTOR * change_bytes + _RESERVE_BYTES
        wanted = size
        while wanted - used < max(wanted // 10, need):
            wanted *= 2
        if wanted > size:
            self._set_map_bytes(wanted)
        try:
            if os.fstat(self._file).st_size < used + need:
                os.posix_fallocate(self._file, used, need)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise from_os_error(error, f"grow {self.path}") from error
            raise NoSpace(f"grow {self.path}: {error.strerror}") from error

    def double_map(self) -> None:
        """Double the map after MapFullError, before the changes are written again."""
        self._set_map_bytes(2 * self.map_bytes)

    def _set_map_bytes(self, map_bytes: int) -> None:
        try:
            self._env.set_mapsize(map_bytes)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"map {self.path}") from error
        self.map_bytes = map_bytes

    def write(self, values: dict[bytes, bytes | None], mark: Mark, step: Callable[[str], None]) -> bool:
        """Store `values` and `mark` in one transaction, durably; return False if the map is too small, with
        no change.

        The calling thread begins and commits the transaction: LMDB's next writer would wait for ever for a
        lock that a thread other than its owner tried to release.
        NoSpace: nothing has changed; may be repeated.
        Any other error: nothing has changed as far as is known, and the drive is not reliable.
        """
        try:
            transaction = self._env.begin(write=True)
            try:
                step("begun")
                cursor = transaction.cursor()
                # In the order of the changes. In sorted order, the names of a directory that is being filled
                # would arrive in ascending order before other keys; then each page that LMDB splits leaves a
                # half that gets no more keys: 159 bytes of LMDB per file instead of 151 with 1,000 files per
                # directory, 187 instead of 160 with 100.
                for slice_ in _slices(values):
                    puts = []
                    for key in slice_:
                        if (value := values[key]) is None:
                            transaction.delete(key)
                        else:
                            puts.append((key, _with_crc(key, value)))
                    cursor.putmulti(puts)
                transaction.put(KEY_END, _with_crc(KEY_END, _MARK.pack(_MARK_VERSION, 0, 0, *mark)))
                step("put")
            except BaseException:
                transaction.abort()
                raise
            transaction.commit()
        except lmdb.MapFullError:
            return False
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"write {self.path}") from error
        step("committed")
        return True

    def measure(self) -> None:
        """Update the statistics after a `write`."""
        try:
            self._measure()
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error

    def _measure(self) -> None:
        pages, found = self._env.stat(), self._env.info()
        self.entries = max(0, pages["entries"] - 1)
        self.used_bytes = self._page_bytes * (
            pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]
        )
        self.file_bytes = self._page_bytes * (found["last_pgno"] + 1)
        self.map_bytes = found["map_size"]
        self.write_keys_max = keys_within(WRITE_PAGES_MAX, pages["leaf_pages"], pages["branch_pages"])

    def close(self) -> None:
        self._env.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def keys_within(pages_max: int, leaves: int, branches: int) -> int:
    """Return how many keys, in any position, a write may have to change at most `pages_max` pages.

    At each level of the tree, a write changes one page for each key, but not more than the level has; splits
    add more. The size of a level follows from the size of the level below it and the ratio of the whole tree.
    """
    levels = [leaves]
    while branches > 0 and levels[-1] > 1:
        levels.append(max(1, levels[-1] * branches // (leaves + branches)))

    def pages(keys: int) -> int:
        return sum(min(keys, level) for level in levels) + keys // _KEYS_A_NEW_PAGE

    return bisect_right(range(pages_max * _KEYS_A_NEW_PAGE), pages_max, key=pages) - 1


def _slices(values: dict[bytes, bytes | None]) -> Iterator[list[bytes]]:
    keys = iter(values)
    while slice_ := list(islice(keys, _SLICE_KEYS)):
        yield slice_


def _with_crc(key: bytes, value: bytes) -> bytes:
    return value + crc32c(value, crc32c(key)).to_bytes(_CRC_BYTES, "little")


def from_lmdb_error(error: lmdb.Error, doing: str) -> NvpoolError:
    """Translate an LMDB error by type or, if LMDB only passes on a system error, by errno."""
    if isinstance(error, lmdb.MapFullError):
        return NoSpace(f"{doing}: the map is full")
    if isinstance(error, lmdb.BadValsizeError):
        return InvalidRequest(f"{doing}: a key has 1 to {KEY_BYTES_MAX} bytes")
    if isinstance(error, lmdb.VersionMismatchError | lmdb.InvalidError):
        return WrongFormat(f"{doing}: not a file of LMDB that can be read here")
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.PanicError | lmdb.BadTxnError):
        return CorruptRecord(f"{doing}: {error}")
    code = getattr(error, "code", 0)
    if code == errno.EFBIG:
        return NoSpace(f"{doing}: {os.strerror(code)}")
    return (
        from_os_error(OSError(code, os.strerror(code)), doing)
        if code > 0
        else DriveFailed(f"{doing}: {error}")
    )
