"""LMDB behind our own door: checked records, whole transactions, a map that grows in time, errors of ours.

`data.mdb` and `lock.mdb` in the engine's directory, main database only. A stored value is followed by the CRC32C of key
and value (u32, little-endian), since LMDB itself would return a flipped bit. The engine's own record, the `Mark`, has
the key KEY_END and the value

    version u16 = 1 · reserved u16, u32 = 0 · sequence u64 · generation u64 · term u64

Readers end within the call that began them: while one lives, no page that is replaced behind it can be used again, and
the map can not grow. LMDB is opened with its syncs on and without writemap, so that a loss of power leaves the last
commit or the one before it. Called by the LMDB engine alone: everything on the thread of its event loop but `write`,
which belongs to one thread of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb

from nvpool.core.checksum import crc32c
from nvpool.core.errors import CorruptRecord, DriveFailed, InvalidRequest, NoSpace, NvpoolError, WrongFormat, from_os_error
from nvpool.core.units import MIB
from nvpool.kv.api import KEY_BYTES_MAX, KEY_END

_MARK = struct.Struct("<HHIQQQ")
_MARK_VERSION = 1
_CRC_BYTES = 4
_CRC_RESIDUE = crc32c(bytes(_CRC_BYTES))
"""CRC32C of anything that is followed by its own CRC32C, little-endian."""

_SLICE_KEYS = 1000
"""Handled by a checkpoint before it lets the event loop run: about a millisecond."""

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc alone keeps what was freed, and has this."""

_READ_FIRST = 16
"""Pairs taken from LMDB before it is looked whether the range has ended; four times as many each time after."""

_RESERVE_BYTES = MIB
"""Room in the file for a checkpoint of any small layer, so that what was taken can be stored on a full drive too."""

_COPY_FACTOR = 4
"""A change of n bytes in the journal is taken to need n times this of new pages, of which it fills the smaller part."""

WRITE_PAGES_MAX = 32_768
"""Pages that a write should change at most: 128 MiB. LMDB has a copy of each in memory until the commit, and keeps that memory
for the next write as long as the environment is open."""

_KEYS_A_NEW_PAGE = 16
"""Of a write, so that pages which are divided are counted too: a page of small records holds some 40 of them when it is."""


class Mark(NamedTuple):
    """The last change that the tree holds, and the journal's generation that ended with it."""

    sequence: int
    generation: int
    term: int


class LmdbTree:
    def __init__(self, directory: Path, map_bytes: int) -> None:
        """Open the file in `directory`, making it where there is none. CorruptRecord, WrongFormat: LMDB can make
        nothing of it; NoSpace, DriveFailed and the like: as the drive says."""
        self.path = directory / "data.mdb"
        self.entries = self.used_bytes = self.file_bytes = self.map_bytes = 0
        """What the last checkpoint left: records, bytes of the pages that they are in, bytes of the file up to the last
        page that was ever used (behind it is a reserve), bytes of the map."""
        self.write_keys_max = 0
        """So many keys, wherever they lie, change WRITE_PAGES_MAX pages at most."""
        self._file = -1
        self._env: lmdb.Environment | None = None
        try:
            # With room for growth at once: the first map of an existing file must hold it.
            file_bytes = self.path.stat().st_size if self.path.exists() else 0
            self._open(max(map_bytes, (file_bytes * 5 // 4 // MIB + 1) * MIB))
            self._env.reader_check()
            self._file = os.open(self.path, os.O_RDWR)
            self._page_bytes = self._env.stat()["psize"]
            self._measure()
        except lmdb.Error as error:
            self.close()
            raise from_lmdb_error(error, f"open {self.path}") from error
        except OSError as error:
            self.close()
            raise from_os_error(error, f"open {self.path}") from error

    def _open(self, map_bytes: int) -> None:
        self._env = lmdb.open(os.fspath(self.path.parent), map_size=map_bytes, subdir=True, mode=0o600, readahead=False,
                              max_spare_txns=1, create=False)

    def renew(self) -> None:
        """Close LMDB's file and open it again: nothing else gives back the memory of a large `write`, first to malloc, then to
        the system. What is mapped has to be faulted in anew, so not while others wait. Errors as of opening it."""
        try:
            self._env.close()
            self._open(self.map_bytes)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"open {self.path}") from error
        if _malloc_trim is not None:
            _malloc_trim(0)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """CorruptRecord when the record, or one that may hide it, is damaged."""
        try:
            transaction = self._env.begin()
            try:
                stored = transaction.get(key)
                if stored is not None:
                    return self._checked((key, stored))[1]
                # A flipped bit in a stored key would hide its record. Such a record stands where the search for it
                # ends: look at the two neighbours before it is believed that there is nothing.
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
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error

    def get_many(self, keys: list[bytes]) -> dict[bytes, bytes | None]:
        """As so many `get`s."""
        if not keys:
            return {}
        try:
            transaction = self._env.begin()
            try:
                stored = transaction.cursor().getmulti(keys)
            finally:
                transaction.abort()
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error
        found = dict(map(self._checked, stored))
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
        """Up to `limit` pairs with first <= key < end, rising."""
        found: list[tuple[bytes, bytes]] = []
        try:
            transaction = self._env.begin()
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
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error
        return found

    def walk(self, first: bytes, end: bytes, forward: bool) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with first <= key < end, rising or falling. To be closed, or read to its end, in the caller's call."""
        try:
            transaction = self._env.begin()
            try:
                cursor = transaction.cursor()
                # A bound that is longer than a key can be lies directly behind its own beginning.
                if forward:
                    if cursor.set_range(first[:KEY_BYTES_MAX] or b"\0"):
                        for item in cursor.iternext():
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
                    for item in cursor.iterprev():
                        if item[0] < first:
                            return
                        yield self._checked(item)
            finally:
                transaction.abort()
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error

    def mark(self) -> Mark | None:
        """None where nothing was ever written. WrongFormat when another program, or another version, wrote it."""
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
            raise WrongFormat(f"{self.path} has the version {version}; this version of nvpool knows {_MARK_VERSION} only")
        return Mark(*_MARK.unpack(value)[3:])

    # -- writing ------------------------------------------------------------------------------------------------------

    def prepare(self, change_bytes: int) -> None:
        """Make room in the map and on the drive for a `write` of changes that weigh `change_bytes` in the journal.

        NoSpace: the drive gives no more. `write` may work nevertheless, with pages that are free inside the file.

        The map grows when less than a tenth of it, or than the changes may need, is free. No transaction is open
        then, as LMDB demands: readers end in the call that began them, and the only writer comes after this. Pages
        that can be used again are not counted as free; a map that is too large costs address space only.
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
        """After MapFullError, before the changes are written again."""
        self._set_map_bytes(2 * self.map_bytes)

    def _set_map_bytes(self, map_bytes: int) -> None:
        try:
            self._env.set_mapsize(map_bytes)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"map {self.path}") from error
        self.map_bytes = map_bytes

    def write(self, values: dict[bytes, bytes | None], mark: Mark, step: Callable[[str], None]) -> bool:
        """Make `values` and `mark` true in one transaction, durably. False: the map was too small, nothing changed.

        Begun and committed by the thread that calls: LMDB's next writer would wait for ever for a lock that another
        thread than its owner has tried to give back. NoSpace: nothing has changed, may be repeated. Anything else:
        nothing has changed as far as is known, and the drive is not to be trusted.
        """
        try:
            transaction = self._env.begin(write=True)
            try:
                step("begun")
                cursor = transaction.cursor()
                # In the order of the changes. Sorted, the names of a directory that is being filled would come in rising order
                # in front of other keys, where each page that LMDB divides leaves a half behind that gets no more: 159 bytes
                # of LMDB a file instead of 151 with 1,000 files a directory, 187 instead of 160 with 100.
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
        """Bring the figures up to date, after a `write`."""
        try:
            self._measure()
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self.path}") from error

    def _measure(self) -> None:
        pages, found = self._env.stat(), self._env.info()
        self.entries = max(0, pages["entries"] - 1)
        self.used_bytes = self._page_bytes * (pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"])
        self.file_bytes = self._page_bytes * (found["last_pgno"] + 1)
        self.map_bytes = found["map_size"]
        self.write_keys_max = keys_within(WRITE_PAGES_MAX, pages["leaf_pages"], pages["branch_pages"])

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def keys_within(pages_max: int, leaves: int, branches: int) -> int:
    """Of how many keys a write changes `pages_max` pages at most in a tree of so many pages, wherever the keys lie: at each
    level one for each key, and no more than there are; and what is divided. A level is the whole tree's share of the one
    below it."""
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
    """LMDB's errors as ours: by type and, where LMDB only passes on what the system said, by errno."""
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
    return from_os_error(OSError(code, os.strerror(code)), doing) if code > 0 else DriveFailed(f"{doing}: {error}")
