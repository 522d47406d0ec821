"""The SDK's read_many: a batch of reads of paths and open files, into one buffer.

Files that are named by path are opened for the batch and stay open for later batches, for the client's
`attr_s`. So a data loader that reads the same shard files again and again queries the metadata service once a
second for all of them together, not once for each read. The number of files kept open is bounded; the least
recently used one is closed first. The SDK's file systems use this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.client.vfs.filesystem import Vfs
from nvpool.core.errors import InvalidRequest, IsADirectory, NotFound, NvpoolError, Unavailable
from nvpool.sdk.bulk_path_resolution import PathWalk, read_links, walk_together
from nvpool.sdk.paths import Path, as_os_error, names_of, os_error
from nvpool.sdk.read_many_checks import Read, name_of

KEPT_OPEN = 1024
"""Number of files kept open. Each one costs 2 KiB in this process and a number at the shard."""
READ_BYTES_MAX = (1 << 63) - 1
"""Largest size of a Python buffer, in bytes."""
_READS_PER_BATCH = 64
"""Parallel reads, when a part of the batch failed and its reads are repeated separately."""

_Piece = tuple[FileHandle, int, int]
_Source = Path | FileHandle


class _Wanted:
    """A file to open: the path to its directory, and its name there. Files of one directory share the
    path."""

    __slots__ = ("way", "name", "link", "handle", "error")

    def __init__(self, path: Path, ways: dict[bytes, PathWalk]) -> None:
        names = names_of(path)
        self.handle: FileHandle | None = None
        self.error: NvpoolError | None = None
        self.link = 0
        self.name = names.pop() if names and names[-1] != b".." else b""
        directory = b"/".join(names)
        self.way = ways.get(directory) or ways.setdefault(directory, PathWalk(names))
        if not self.name and not os.fspath(path):
            self.way = PathWalk([])
            self.way.error = NotFound()

    def follow(self, target: bytes | NvpoolError) -> None:
        """Continue at `target`, because the name is a symbolic link."""
        self.way = self.way.branch()
        self.way.follow(target)
        self.name = self.way.take_last()


class Batches:
    def __init__(self, vfs: Vfs, caller: Caller) -> None:
        self._vfs = vfs
        self._caller = caller
        self._kept: OrderedDict[bytes, tuple[FileHandle, float]] = OrderedDict()
        self._running: dict[int, None] = {}  # ascending numbers of the batches in progress
        self._begun = 0
        self._left: deque[tuple[int, FileHandle]] = deque()
        """Handles removed from the cache. Each has the number of the last batch that may still use it."""

    async def read_many(
        self, reads: Sequence[Read], given: Sequence[Any], into: memoryview | None, returns_errors: bool
    ) -> Sequence[memoryview | OSError] | Sequence[int | OSError]:
        """Run all reads, with one message per target.

        With `into` each read goes to the sum of the lengths before it, and the result is the list of lengths.
        Without `into` the reads go to new memory, and the result is a list of views. A read is shorter than
        requested only at the end of its file. The first read that fails raises, or with `returns_errors` its
        error takes the place of its result. After a raised error the contents of `into` are undefined.
        ValueError: `into` is too small, and nothing was read. `given` holds the reads as the caller wrote
        them, for error messages.
        """
        paths: dict[Path, None] = {}
        whole: dict[Path, None] = {}
        has_lengths = True
        for what, _, length in reads:
            if length is None:
                has_lengths = False
            if not isinstance(what, FileHandle):
                (paths if length is not None else whole)[what] = None
        self._begun += 1
        me = self._begun
        self._running[me] = None
        opened: dict[_Source, FileHandle] = {}
        try:
            failed: dict[_Source, NvpoolError] = {}
            found = await self._opened(paths, failed) if paths else {}
            if whole:
                opened = await self._open_whole(whole, failed)
            if failed and not returns_errors:
                number = next(at for at, read in enumerate(reads) if read[0] in failed)
                with as_os_error(name_of(given[number])):
                    raise failed[reads[number][0]]
            if (
                into is None
                and not failed
                and len(opened) == len(reads)
                and not any(read[1] for read in reads)
            ):
                try:
                    return await self._vfs.read_whole([opened[read[0]] for read in reads])
                except Unavailable as error:
                    if not returns_errors:
                        raise _of_batch(error, given) from error
                except NvpoolError:
                    pass  # the separate reads below show which one failed
            pieces: Sequence[_Piece | None] = reads  # type: ignore[assignment]  # replaced below if not
            if has_lengths and not failed and paths:
                # mypy does not see `has_lengths`: no length is None here
                pieces = [
                    (what if type(what) is FileHandle else found[what], offset, length)  # type: ignore[misc]
                    for what, offset, length in reads
                ]
            elif not has_lengths or failed:
                pieces = [_piece(read, found, opened) for read in reads]
            return await self._read(reads, pieces, failed, given, into, returns_errors)
        finally:
            for handle in opened.values():
                await self._vfs.release(handle)
            del self._running[me]
            await self._trim(KEPT_OPEN)

    async def _read(
        self,
        reads: Sequence[Read],
        pieces: Sequence[_Piece | None],
        failed: Mapping[_Source, NvpoolError],
        given: Sequence[Any],
        into: memoryview | None,
        returns_errors: bool,
    ) -> Sequence[memoryview | OSError] | Sequence[int | OSError]:
        if pieces is reads:
            spans: list[int] = [read[2] for read in reads]  # type: ignore[misc]  # as pieces they have lengths
        else:
            spans = [
                piece[2] if piece is not None else read[2] or 0
                for piece, read in zip(pieces, reads, strict=True)
            ]
        total = sum(spans)
        if into is not None and total > len(into):
            raise ValueError(
                f"the buffer to read into has {len(into)} bytes, and the {len(reads)} reads need {total}"
            )
        if total > READ_BYTES_MAX:
            raise ValueError(f"the {len(reads)} reads are of {total} bytes together, which no buffer holds")
        buffer = into if into is not None else _buffer_of(total, len(reads))
        done: Sequence[int | OSError]
        if failed or returns_errors:
            done = await self._read_apart(reads, pieces, spans, failed, given, buffer)
        else:
            try:
                done = await self._vfs.read_many(pieces, buffer)
            except Unavailable as error:  # not read apart: that would take as long again
                raise _of_batch(error, given) from error
            except NvpoolError:
                done = await self._read_apart(reads, pieces, spans, failed, given, buffer)
                for one in done:
                    if isinstance(one, OSError):
                        raise one from one.__cause__
        if into is not None:
            return done
        views: list[memoryview | OSError] = []
        place = 0
        for one, span in zip(done, spans, strict=True):
            views.append(one if isinstance(one, OSError) else buffer[place : place + one])
            place += span
        return views

    async def _read_apart(
        self,
        reads: Sequence[Read],
        pieces: Sequence[_Piece | None],
        spans: Sequence[int],
        failed: Mapping[_Source, NvpoolError],
        given: Sequence[Any],
        buffer: memoryview,
    ) -> list[int | OSError]:
        """Read with one result or one error per read. Adjacent reads run together; if such a run fails,
        each of its reads is repeated separately."""
        done: list[int | OSError] = [0] * len(reads)
        runs: list[tuple[int, int, int, int]] = []  # half-open: first read, end read, first byte, end byte
        place = 0
        for number, (piece, span) in enumerate(zip(pieces, spans, strict=True)):
            if piece is None:
                error = failed[reads[number][0]]
                done[number] = _caused(os_error(error, name_of(given[number])), error)
            elif runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1, runs[-1][2], place + span)
            else:
                runs.append((number, number + 1, place, place + span))
            place += span

        async def read(first: int, last: int, begin: int, end: int) -> bool:
            try:
                done[first:last] = await self._vfs.read_many(pieces[first:last], buffer[begin:end])
            except NvpoolError as error:
                done[first:last] = [
                    _caused(os_error(error, name_of(one)), error) for one in given[first:last]
                ]
                return last - first == 1
            return True

        alone = []
        for (first, last, begin, _), is_known in zip(runs, await _some(read, runs), strict=True):
            for number in () if is_known else range(first, last):
                alone.append((number, number + 1, begin, begin + spans[number]))
                begin += spans[number]
        if alone:
            with contextlib.suppress(TimeoutError):  # the others keep the error of their run
                async with asyncio.timeout(self._vfs.options.deadline_s):
                    await _some(read, alone)
        return done

    async def _open_whole(
        self, paths: Iterable[Path], failed: dict[_Source, NvpoolError]
    ) -> dict[_Source, FileHandle]:
        """Open these files together, without the cache. Reading a whole file needs its current size. The
        caller releases the handles. Errors go to `failed`."""
        ways: dict[bytes, PathWalk] = {}
        wanted = {path: _Wanted(path, ways) for path in paths}
        try:
            await self._open_all(list(wanted.values()))
        except BaseException as error:
            for one in wanted.values():
                if one.handle is not None:
                    await self._vfs.release(one.handle)
            if isinstance(error, NvpoolError):
                raise os_error(error) from error
            raise
        failed.update((path, one.error) for path, one in wanted.items() if one.error is not None)
        return {path: one.handle for path, one in wanted.items() if one.handle is not None}

    async def _open_all(self, wanted: list[_Wanted]) -> None:
        """Open all of these files. On return each one has a handle or an error. Symbolic links at the last
        name are also read together."""
        while wanted:
            await walk_together(self._vfs, list({id(one.way): one.way for one in wanted}.values()))
            plain = []
            for one in wanted:
                one.error = one.way.error or (None if one.name else IsADirectory())
                if one.error is None:
                    plain.append(one)
            opened = await self._vfs.open_many([(one.way.inode, one.name) for one in plain], self._caller)
            wanted = []
            for one, found in zip(plain, opened, strict=True):
                if isinstance(found, FileHandle):
                    one.handle = found
                elif isinstance(found, NvpoolError):
                    one.error = found
                elif stat.S_ISLNK(found.mode):
                    one.link = found.inode
                    wanted.append(one)
                else:
                    one.error = (
                        IsADirectory()
                        if stat.S_ISDIR(found.mode)
                        else InvalidRequest("only regular files can be read")
                    )
            targets = await read_links(self._vfs, {one.link for one in wanted})
            for one in wanted:
                one.follow(targets[one.link])

    async def _opened(
        self, paths: Iterable[Path], failed: dict[_Source, NvpoolError]
    ) -> dict[_Source, FileHandle]:
        """Handles of these files: from the cache while they are recent enough, otherwise opened together.
        Errors go to `failed`."""
        found: dict[_Source, FileHandle] = {}
        ways: dict[bytes, PathWalk] = {}
        wanted: dict[Path, _Wanted] = {}
        now_s = self._vfs.clock.boottime_s()
        for path in paths:
            key = os.fsencode(path)
            kept = self._kept.get(key)
            if kept is not None and kept[1] > now_s:
                self._kept.move_to_end(key)
                found[path] = kept[0]
            else:
                wanted[path] = _Wanted(path, ways)
        if not wanted:
            return found
        try:
            await self._open_all(list(wanted.values()))
        except NvpoolError as error:
            raise os_error(error, next(iter(wanted)) if len(wanted) == 1 else None) from error
        finally:
            for path, one in wanted.items():
                if one.handle is not None:
                    found[path] = one.handle
                    self._keep(os.fsencode(path), one.handle, now_s + self._vfs.options.attr_s)
        failed.update((path, one.error) for path, one in wanted.items() if one.error is not None)
        return found

    def _keep(self, key: bytes, handle: FileHandle, until_s: float) -> None:
        self._leave(key)
        self._kept[key] = handle, until_s

    def _leave(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._left.append((self._begun, kept[0]))

    async def _trim(self, count: int) -> None:
        """Shrink the cache to `count` handles. Removed handles are closed once no running batch can use
        them."""
        while len(self._kept) > count:
            self._leave(next(iter(self._kept)))
        while self._left and self._left[0][0] < next(iter(self._running), self._begun + 1):
            await self._vfs.release(self._left.popleft()[1])

    async def forget(self, paths: Iterable[Path] | None = None) -> None:
        """Remove all handles, or those of `paths`, from the cache. Their names are about to change their
        meaning. Handles that no running batch uses are closed."""
        if paths is None:
            await self._trim(0)
            return
        for path in paths:
            self._leave(os.fsencode(path))
        await self._trim(KEPT_OPEN)


def _piece(
    read: Read, found: Mapping[_Source, FileHandle], opened: Mapping[_Source, FileHandle]
) -> _Piece | None:
    """The read as a piece for the client; None if its file is not open."""
    what, offset, length = read
    handle = what if type(what) is FileHandle else (found if length is not None else opened).get(what)
    if handle is None:
        return None
    return handle, offset, max(0, handle.size - offset) if length is None else length


async def _some(
    read: Callable[..., Awaitable[bool]], runs: Sequence[tuple[int, int, int, int]]
) -> list[bool]:
    found: list[bool] = []
    for first in range(0, len(runs), _READS_PER_BATCH):
        found += await asyncio.gather(*[read(*run) for run in runs[first : first + _READS_PER_BATCH]])
    return found


def _buffer_of(total: int, count: int) -> memoryview:
    try:
        return memoryview(bytearray(total))
    except MemoryError:
        raise MemoryError(
            f"the reads ({count}) need {total} bytes of memory together; ask for less in one call"
        ) from None


def _of_batch(error: NvpoolError, given: Sequence[Any]) -> OSError:
    """OSError for a failed batch. If all reads are of one file, the error names the file."""
    names = {name_of(one) for one in given}
    return os_error(error, names.pop() if len(names) == 1 else None)


def _caused(error: OSError, cause: NvpoolError) -> OSError:
    error.__cause__ = cause
    return error
