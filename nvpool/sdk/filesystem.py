"""The SDK for ordinary programs: a pool as a file system of paths, from any thread.

The client runs on an event loop in a thread of its own; each call here hands work to it and waits, but for reads that the
calling thread can do by itself (client/read/threads). So:

* threads: one FileSystem may be used by any number of threads at once. One File's position is not guarded, as that of io.FileIO
  is not; `pread`, `pwrite` and `read_many` need none.
* fork: a child process (a DataLoader's worker) connects anew at its first call, as a client of its own. Files that were
  open are opened again there by inode number; what the parent had not stored at the fork stays the parent's alone.
* pickle: what is pickled is how to connect, and no connection. The copy connects at its first call, as a client of its own; so
  a FileSystem can be part of what multiprocessing hands to a process, however that is started. Open files can not be pickled.
* at exit, what is still open is stored and closed.

Errors are OSError with the usual subclasses, the path that the caller gave as `filename`, and nvpool's own error, which says
more, as their cause.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, overload

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.types import KEEP_SIZE, PUNCH_HOLE, FileHandle, StatFs
from nvpool.core.units import KIB
from nvpool.poolmap.model import PoolMap
from nvpool.sdk.aio import AsyncFileSystem, Entry, HandedDown
from nvpool.sdk.argument_checks import bytes_of, check_opening, contiguous, flags_of, integer, mode_of, size_of, timeout
from nvpool.sdk.loop_thread import Runtime
from nvpool.sdk.paths import Path, as_os_error, stat_result, write_all
from nvpool.sdk.pool_origin import Origin, origin_of
from nvpool.sdk.read_requests import check_on_error, reads_of
from nvpool.sdk.volumes import Volumes

if TYPE_CHECKING:
    from _typeshed import (
        OpenBinaryMode,
        OpenBinaryModeReading,
        OpenBinaryModeUpdating,
        OpenBinaryModeWriting,
        OpenTextMode,
        ReadableBuffer,
        WriteableBuffer,
    )

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

BUFFER_BYTES = 128 * KIB
"""Of buffered files: a call into the loop's thread costs about as much as reading that much."""
_all: weakref.WeakSet[FileSystem] = weakref.WeakSet()
_abandoned: list[Runtime | None] = []
"""Loops and clients of the parent, in a forked child. They are kept alive: tearing one down would unregister the parent's
sockets from the epoll instance that both processes share."""


class File(io.RawIOBase):
    """An open file of a pool; compatible with io.FileIO but for fileno. Made by FileSystem.open(..., buffering=0), and below
    the buffered files that open gives otherwise (`.raw`)."""

    def __init__(self, pool: FileSystem, path: Path, flags: int, permissions: int) -> None:
        super().__init__()
        self.name = path
        self._pool = pool
        self._flags = flags
        runtime = pool._running()
        with as_os_error(path):
            self._handle: FileHandle = runtime.call(runtime.pool.open_handle(path, flags, permissions))
        self._runtime = runtime
        self._place = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle the open file {self.name!r}; pickle the FileSystem and the path, and open it again")

    def _opened(self) -> tuple[Runtime, FileHandle]:
        """Where the file is open, in this process."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        runtime = self._pool._running()
        if runtime is not self._runtime:
            flags = self._flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
            with as_os_error(self.name):
                self._handle = runtime.call(runtime.pool.vfs.open(self._handle.inode, flags, runtime.pool.caller))
            self._runtime = runtime
        return self._runtime, self._handle

    def readable(self) -> bool:
        return self._flags & os.O_ACCMODE != os.O_WRONLY

    def writable(self) -> bool:
        return self._flags & os.O_ACCMODE != os.O_RDONLY

    def seekable(self) -> bool:
        return True

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes from `offset`, fewer only at the end of the file. Leaves the position alone."""
        return bytes(self._read(offset, length))

    def _read(self, offset: int, length: int) -> memoryview | bytes:
        found: memoryview | bytes | None
        runtime, handle = self._opened()
        try:
            found = runtime.reads.read(handle, offset, length)
        except TypeError:  # numbers that are none; looked at here only, since most reads end above
            found = None
        if found is None:
            offset, length = integer("offset", offset), integer("length", length)
            with as_os_error(self.name):
                found = runtime.call(runtime.pool.vfs.read(handle, offset, length))
        return found

    def pwrite(self, buffer: ReadableBuffer, offset: int) -> int:
        """Take all of `buffer` as bytes from `offset`. Leaves the position alone. EDQUOT as of AsyncFile.write."""
        runtime, handle = self._opened()
        view, offset = bytes_of(buffer), integer("offset", offset)
        with as_os_error(self.name):
            if runtime.is_here():  # the buffer is used again before it is written
                view = bytes(view)
            runtime.call(write_all(runtime.pool.vfs, handle, offset, view))
            return len(view)

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._opened()
        if not self.readable():
            raise io.UnsupportedOperation("not open for reading")
        view = contiguous(buffer)
        found = self._read(self._place, len(view))
        view[:len(found)] = found
        self._place += len(found)
        return len(found)

    def readall(self) -> bytes:
        parts = []
        while part := self.pread(4096 * KIB, self._place):
            parts.append(part)
            self._place += len(part)
        return b"".join(parts)

    def write(self, buffer: ReadableBuffer) -> int:
        if not self.writable():
            raise io.UnsupportedOperation("not open for writing")
        count = self.pwrite(buffer, self._place)
        self._place = self._opened()[1].size if self._flags & os.O_APPEND else self._place + count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        offset, whence = integer("offset", offset), integer("whence", whence)
        if whence in (os.SEEK_DATA, os.SEEK_HOLE):
            runtime, handle = self._opened()
            with as_os_error(self.name):
                self._place = runtime.call(runtime.pool.vfs.seek(handle, offset, whence))
            return self._place
        base = {os.SEEK_SET: lambda: 0, os.SEEK_CUR: lambda: self._place, os.SEEK_END: self.size}.get(whence)
        if base is None:
            raise ValueError(f"{whence} is no whence of seek")
        place = base() + offset
        if place < 0:
            raise OSError(22, "a negative position")
        self._place = place
        return place

    def tell(self) -> int:
        return self._place

    def size(self) -> int:
        return self.stat().st_size

    def stat(self) -> os.stat_result:
        runtime, handle = self._opened()
        with as_os_error(self.name):
            return stat_result(runtime.call(runtime.pool.vfs.getattr(handle.inode)))

    def truncate(self, size: int | None = None) -> int:
        runtime, handle = self._opened()
        if not self.writable():
            raise io.UnsupportedOperation("not open for writing")
        size = self._place if size is None else size_of(size)
        with as_os_error(self.name):
            runtime.call(runtime.pool.vfs.setattr(handle.inode, size=size, caller=runtime.pool.caller, handle=handle))
        return size

    def punch(self, offset: int, length: int) -> None:
        """Make a hole: zeros that occupy nothing, durably. Size and position stay."""
        runtime, handle = self._opened()
        offset, length = integer("offset", offset), integer("length", length)
        with as_os_error(self.name):
            runtime.call(runtime.pool.vfs.fallocate(handle, offset, length, PUNCH_HOLE | KEEP_SIZE))

    def flush(self) -> None:
        """What was written is at the stores and seen by whoever opens the file from now on."""
        if self.closed or not self.writable():
            return
        runtime, handle = self._opened()
        with as_os_error(self.name):
            runtime.call(runtime.pool.vfs.flush(handle))

    def fsync(self) -> None:
        """What was written survives the loss of power."""
        runtime, handle = self._opened()
        with as_os_error(self.name):
            runtime.call(runtime.pool.vfs.fsync(handle, False))

    def close(self) -> None:
        if self.closed:
            return
        runtime = self._runtime
        try:
            super().close()  # flushes
        finally:
            if runtime is self._pool._runtime and runtime.pid == os.getpid():
                with as_os_error(self.name):
                    runtime.call(runtime.pool.vfs.release(self._handle))


class FileSystem:
    """Made by `nvpool.connect(where)`. A context manager; close it, or leave that to the end of the program."""

    def __init__(self, where: Path | PoolMap, *, name: str = "", options: ClientOptions | None = None) -> None:
        self._begin(origin_of(where, name, options))
        self._running()

    def _begin(self, origin: Origin) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._closed = False
        self._runtime: Runtime | None = None
        self.volumes = Volumes(self)
        _all.add(self)

    def __getstate__(self) -> Origin:
        if self._closed:
            raise ValueError("the connection to the pool is closed")
        return self._origin

    def __setstate__(self, origin: Origin) -> None:
        self._begin(origin)

    def _running(self) -> Runtime:
        runtime = self._runtime
        if runtime is not None:
            return runtime
        with self._lock:
            if self._closed:
                raise ValueError("the connection to the pool is closed")
            if self._runtime is None:
                self._runtime = Runtime(self._origin)
            return self._runtime

    def _call(self, method: Callable[Concatenate[AsyncFileSystem, _Arguments], Coroutine[Any, Any, _Result]],
              *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        runtime = self._running()
        return runtime.call(method(runtime.pool, *arguments, **named))

    def close(self, timeout_s: float = 10.0) -> None:
        """Store what was written, at most for `timeout_s`, and end. May be called twice."""
        timeout_s = timeout("timeout_s", timeout_s)
        with self._lock:
            runtime, self._runtime = self._runtime, None
            self._closed = True
        if runtime is not None and runtime.pid == os.getpid():
            try:
                runtime.call(runtime.done())
                runtime.call(runtime.pool.close(timeout_s))
            finally:
                runtime.stop()

    def __enter__(self) -> FileSystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- files -----------------------------------------------------------------------------------------------------------

    @overload
    def open(self, path: Path, mode: OpenTextMode = "r", buffering: int = -1, encoding: str | None = None,
             errors: str | None = None, newline: str | None = None, permissions: int = 0o644) -> io.TextIOWrapper: ...

    @overload
    def open(self, path: Path, mode: OpenBinaryMode, buffering: Literal[0], encoding: None = None, errors: None = None,
             newline: None = None, permissions: int = 0o644) -> File: ...

    @overload
    def open(self, path: Path, mode: OpenBinaryModeUpdating, buffering: Literal[-1, 1] = -1, encoding: None = None,
             errors: None = None, newline: None = None, permissions: int = 0o644) -> io.BufferedRandom: ...

    @overload
    def open(self, path: Path, mode: OpenBinaryModeWriting, buffering: Literal[-1, 1] = -1, encoding: None = None,
             errors: None = None, newline: None = None, permissions: int = 0o644) -> io.BufferedWriter[File]: ...

    @overload
    def open(self, path: Path, mode: OpenBinaryModeReading, buffering: Literal[-1, 1] = -1, encoding: None = None,
             errors: None = None, newline: None = None, permissions: int = 0o644) -> io.BufferedReader[File]: ...

    @overload
    def open(self, path: Path, mode: str, buffering: int = -1, encoding: str | None = None, errors: str | None = None,
             newline: str | None = None, permissions: int = 0o644
             ) -> File | io.BufferedRandom | io.BufferedReader[File] | io.BufferedWriter[File] | io.TextIOWrapper: ...

    def open(self, path: Path, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
             newline: str | None = None, permissions: int = 0o644
             ) -> File | io.BufferedRandom | io.BufferedReader[File] | io.BufferedWriter[File] | io.TextIOWrapper:
        """As Python's open. Binary modes give a buffered file over a File, or with buffering=0 the File itself.

        All arguments are checked first: where one is wrong, no file was made and none was emptied.
        """
        flags, permissions = flags_of(mode), mode_of(permissions, "permissions")
        check_opening(path, mode, buffering, encoding, errors, newline)
        raw = File(self, path, flags, permissions)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else BUFFER_BYTES
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if raw.readable() else io.BufferedWriter
        if flags & os.O_APPEND:
            raw.seek(0, os.SEEK_END)
        buffered = kind(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline,
                                                             line_buffering=buffering == 1)

    @overload
    def read_many(self, reads: Iterable[Any], into: None = None, *,
                  on_error: Literal["raise"] = "raise") -> list[memoryview]: ...

    @overload
    def read_many(self, reads: Iterable[Any], into: None = None, *, on_error: str) -> list[memoryview | OSError]: ...

    @overload
    def read_many(self, reads: Iterable[Any], into: WriteableBuffer, *,
                  on_error: Literal["raise"] = "raise") -> list[int]: ...

    @overload
    def read_many(self, reads: Iterable[Any], into: WriteableBuffer, *, on_error: str) -> list[int | OSError]: ...

    def read_many(self, reads: Iterable[Any], into: WriteableBuffer | None = None, *,
                  on_error: str = "raise") -> Sequence[memoryview | OSError] | Sequence[int | OSError]:
        """Many reads at once, in one message per target: whole files by path or open file, and parts as (path or open file,
        offset, length), mixed as you like. A list of memoryviews, or of lengths with `into`; with on_error="return" an OSError
        in the place of each that failed. See AsyncFileSystem.read_many, also for what is refused.

        Does not touch the files' positions, and what a buffered file has not flushed is not seen.
        """
        returns_errors = check_on_error(on_error)
        plan, given = reads_of(reads, self._handle_of)
        buffer = None if into is None else contiguous(into)
        runtime = self._running()
        return runtime.call(runtime.pool.read_planned(plan, given, buffer, returns_errors))

    def _handle_of(self, what: Any) -> FileHandle | None:
        if isinstance(what, str | bytes | os.PathLike):
            return None
        raw = what if isinstance(what, File) else getattr(getattr(what, "buffer", what), "raw", what)
        if not isinstance(raw, File):
            return None
        if raw._pool is not self:
            raise ValueError(f"the file {raw.name!r} was opened through another connection")
        return raw._opened()[1]

    def read_bytes(self, path: Path) -> bytes:
        return self._call(AsyncFileSystem.read_bytes, path)

    def write_bytes(self, path: Path, content: ReadableBuffer) -> int:
        """Make `content` (bytes or another buffer) all that the file has; its length. What is no buffer is refused with
        TypeError before the file is touched."""
        return self._call(AsyncFileSystem.write_bytes, path, content)

    def copy(self, source: Path, target: Path) -> int:
        """Copy a file's bytes and permissions; the number of bytes. `target` appears whole."""
        return self._call(AsyncFileSystem.copy, source, target)

    # -- names -----------------------------------------------------------------------------------------------------------

    def stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._call(AsyncFileSystem.stat, path, follow_symlinks=follow_symlinks)

    def exists(self, path: Path) -> bool:
        """False too for a path that can be no name of anything, as of os.path.exists. An error of the pool is raised."""
        return self._call(AsyncFileSystem.exists, path)

    def is_dir(self, path: Path) -> bool:
        return self._call(AsyncFileSystem.is_dir, path)

    def is_file(self, path: Path) -> bool:
        return self._call(AsyncFileSystem.is_file, path)

    def scan(self, path: Path = "/") -> Iterator[Entry]:
        """The entries of a directory in no particular order, in bounded memory however many there are."""
        return self._drain(AsyncFileSystem.scan, path)

    def list(self, path: Path = "/") -> list[str]:
        """The names in a directory, sorted."""
        return self._call(AsyncFileSystem.list, path)

    def walk(self, top: Path = "/") -> Iterator[tuple[str, builtins.list[str], builtins.list[str]]]:
        """As os.walk, top down; symbolic links are listed with the files and not followed."""
        return self._drain(AsyncFileSystem.walk, top)

    def _drain(self, method: Callable[[AsyncFileSystem, Path], AsyncIterator[_Result]], path: Path) -> Iterator[_Result]:
        runtime = self._running()
        source = method(runtime.pool, path)

        async def some() -> list[_Result]:
            found = []
            async for item in source:
                found.append(item)
                if len(found) == 1000:
                    break
            return found

        while found := runtime.call(some()):
            yield from found

    def mkdir(self, path: Path, mode: int = 0o755, *, parents: bool = False, exist_ok: bool = False,
              wide: bool = False) -> None:
        """`wide` spreads the names of a directory that will have very many over all partitions."""
        self._call(AsyncFileSystem.mkdir, path, mode, parents=parents, exist_ok=exist_ok, wide=wide)

    def remove(self, path: Path) -> None:
        self._call(AsyncFileSystem.remove, path)

    def rmdir(self, path: Path) -> None:
        self._call(AsyncFileSystem.rmdir, path)

    def remove_tree(self, path: Path) -> None:
        self._call(AsyncFileSystem.remove_tree, path)

    def rename(self, source: Path, target: Path) -> None:
        self._call(AsyncFileSystem.rename, source, target)

    def link(self, source: Path, target: Path) -> None:
        self._call(AsyncFileSystem.link, source, target)

    def symlink(self, target: Path, path: Path) -> None:
        self._call(AsyncFileSystem.symlink, target, path)

    def readlink(self, path: Path) -> str:
        return self._call(AsyncFileSystem.readlink, path)

    # -- attributes --------------------------------------------------------------------------------------------------------

    def chmod(self, path: Path, mode: int) -> None:
        self._call(AsyncFileSystem.chmod, path, mode)

    def chown(self, path: Path, uid: int = -1, gid: int = -1) -> None:
        """-1 keeps what is there."""
        self._call(AsyncFileSystem.chown, path, uid, gid)

    def utime(self, path: Path, ns: tuple[int, int] | None = None) -> None:
        """`ns` are the times of access and change, in nanoseconds; now without it."""
        self._call(AsyncFileSystem.utime, path, ns)

    def truncate(self, path: Path, size: int) -> None:
        self._call(AsyncFileSystem.truncate, path, size)

    def getxattr(self, path: Path, name: str) -> bytes:
        return self._call(AsyncFileSystem.getxattr, path, name)

    def setxattr(self, path: Path, name: str, value: ReadableBuffer, flags: int = 0) -> None:
        """`value` is bytes or another buffer; `flags` as of os.setxattr."""
        self._call(AsyncFileSystem.setxattr, path, name, value, flags)

    def listxattr(self, path: Path) -> builtins.list[str]:
        return self._call(AsyncFileSystem.listxattr, path)

    def removexattr(self, path: Path, name: str) -> None:
        self._call(AsyncFileSystem.removexattr, path, name)

    def layout(self, path: Path) -> HandedDown:
        """What new files of a directory get: replicas and chunk_bytes; what a file has."""
        return self._call(AsyncFileSystem.layout, path)

    def set_layout(self, path: Path, *, replicas: int = 0, chunk_bytes: int = 0) -> None:
        """What files and directories that are made in the directory from now on get, where not 0. A replica count that no
        directory has had yet is set with `nvpool dir set`, on a node of the pool."""
        self._call(AsyncFileSystem.set_layout, path, replicas=replicas, chunk_bytes=chunk_bytes)

    def statfs(self, path: Path = "/") -> StatFs:
        return self._call(AsyncFileSystem.statfs, path)


def connect(where: Path | PoolMap, *, name: str = "", options: ClientOptions | None = None) -> FileSystem:
    """The pool that `where` names: its directory on this host, a mount point of it, or "host:port" of any of its nodes. Without
    `options` the client behaves as [client] of the directory's node.toml says.

    OSError: FileNotFoundError where there is no pool, ConnectionRefusedError where nobody answers, TimeoutError where no answer
    comes.
    """
    return FileSystem(where, name=name, options=options)


def _after_fork_in_child() -> None:
    for pool in list(_all):
        _abandoned.append(pool._runtime)
        pool._runtime = None
        pool._lock = threading.Lock()  # another thread of the parent may have held it


def _at_exit() -> None:
    for pool in list(_all):
        try:
            pool.close()
        except Exception:  # the program is over; what can not be stored is lost, as with a process that is killed
            pass


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
