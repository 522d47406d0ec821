"""The synchronous SDK: a pool as a file system of paths, usable from any thread.

The client runs on an event loop in its own thread. Each call here submits work to that loop and waits. Some
reads are an exception: the calling thread completes them by itself (client/read/caller_thread_reads). This gives the
following rules:

* threads: any number of threads may use one FileSystem at the same time. The position of a File is not
  locked, as with io.FileIO; `pread`, `pwrite` and `read_many` do not use the position.
* fork: a child process (for example a DataLoader worker) connects at its first call, as a separate client.
  There, files that were open are opened again by inode number. Bytes that the parent had not stored before
  the fork stay with the parent alone.
* pickle: the pickle holds the data needed to connect, not a connection. The copy connects at its first call,
  as a separate client. So a FileSystem can be part of the arguments that multiprocessing passes to a process,
  with any start method. Open files cannot be pickled.
* exit: at the end of the program, files that are still open are stored and closed.

Errors are OSError with the usual subclasses. `filename` is the path that the caller gave, and `__cause__` is
nvpool's own error, which says more.
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
from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, FileHandle, StatFs
from nvpool.core.units import KIB
from nvpool.poolmap.model import PoolMap
from nvpool.sdk.argument_checks import (
    bytes_of,
    check_opening,
    contiguous,
    flags_of,
    integer,
    mode_of,
    size_of,
    timeout,
)
from nvpool.sdk.async_filesystem import AsyncFileSystem, Entry, InheritedLayout
from nvpool.sdk.connect_argument import Origin, origin_of
from nvpool.sdk.loop_thread import Runtime
from nvpool.sdk.paths import Path, as_os_error, stat_result, write_all
from nvpool.sdk.read_many_checks import check_on_error, reads_of
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
"""Buffer size of buffered files. A call into the loop's thread costs about as much as reading this many
bytes."""
_all: weakref.WeakSet[FileSystem] = weakref.WeakSet()
_abandoned: list[Runtime | None] = []
"""The parent's event loops and clients, in a forked child. They are kept alive because closing one would
unregister the parent's sockets from the epoll instance that both processes share."""


class File(io.RawIOBase):
    """An open file of a pool, compatible with io.FileIO except for `fileno`. FileSystem.open(...,
    buffering=0) returns one; the buffered files that `open` returns otherwise have one below them
    (`.raw`)."""

    def __init__(self, pool: FileSystem, path: Path, flags: int, permissions: int) -> None:
        super().__init__()
        self.name = path
        self._pool = pool
        self._flags = flags
        runtime = pool.runtime()
        with as_os_error(path):
            self._handle: FileHandle = runtime.call(runtime.pool.open_handle(path, flags, permissions))
        self._runtime = runtime
        self._place = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle the open file {self.name!r}; pickle the FileSystem and the path, and open it again"
        )

    def _opened(self) -> tuple[Runtime, FileHandle]:
        """Runtime and handle of the open file in this process. After a fork this opens the file again, by
        inode number."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        runtime = self._pool.runtime()
        if runtime is not self._runtime:
            flags = self._flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
            with as_os_error(self.name):
                self._handle = runtime.call(
                    runtime.pool.vfs.open(self._handle.inode, flags, runtime.pool.caller)
                )
            self._runtime = runtime
        return self._runtime, self._handle

    def handle_in(self, pool: FileSystem) -> FileHandle:
        """Handle of the open file, for a call of `pool`. ValueError: the file is closed, or was opened
        through another connection."""
        if self._pool is not pool:
            raise ValueError(f"the file {self.name!r} was opened through another connection")
        return self._opened()[1]

    def readable(self) -> bool:
        return self._flags & os.O_ACCMODE != os.O_WRONLY

    def writable(self) -> bool:
        return self._flags & os.O_ACCMODE != os.O_RDONLY

    def seekable(self) -> bool:
        return True

    def pread(self, length: int, offset: int) -> bytes:
        """Read up to `length` bytes at `offset`, without moving the position. The result is shorter only
        at the end of the file."""
        return bytes(self._read(offset, length))

    def _read(self, offset: int, length: int) -> memoryview | bytes:
        found: memoryview | bytes | None
        runtime, handle = self._opened()
        try:
            found = runtime.reads.read(handle, offset, length)
        except TypeError:  # an argument is not an int; checked only here, because most reads return above
            found = None
        if found is None:
            offset, length = integer("offset", offset), integer("length", length)
            with as_os_error(self.name):
                found = runtime.call(runtime.pool.vfs.read(handle, offset, length))
        return found

    def pwrite(self, buffer: ReadableBuffer, offset: int) -> int:
        """Write all of `buffer` at `offset`, without moving the position; return the number of bytes.
        EDQUOT: see AsyncFile.write."""
        runtime, handle = self._opened()
        view, offset = bytes_of(buffer), integer("offset", offset)
        with as_os_error(self.name):
            if runtime.is_here():  # the write runs later, and by then the caller has reused the buffer
                view = bytes(view)
            runtime.call(write_all(runtime.pool.vfs, handle, offset, view))
            return len(view)

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._opened()
        if not self.readable():
            raise io.UnsupportedOperation("not open for reading")
        view = contiguous(buffer)
        found = self._read(self._place, len(view))
        view[: len(found)] = found
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
            raise ValueError(f"{whence} is not a whence of seek")
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
            runtime.call(
                runtime.pool.vfs.setattr(handle.inode, size=size, caller=runtime.pool.caller, handle=handle)
            )
        return size

    def punch(self, offset: int, length: int) -> None:
        """Punch a hole, durably: the range reads as zeros and occupies no space. Size and position do not
        change."""
        runtime, handle = self._opened()
        offset, length = integer("offset", offset), integer("length", length)
        with as_os_error(self.name):
            runtime.call(runtime.pool.vfs.fallocate(handle, offset, length, PUNCH_HOLE | KEEP_SIZE))

    def flush(self) -> None:
        """Store all written bytes and publish them. On return the stores have the bytes, and every later
        open sees them."""
        if self.closed or not self.writable():
            return
        runtime, handle = self._opened()
        with as_os_error(self.name):
            runtime.call(runtime.pool.vfs.flush(handle))

    def fsync(self) -> None:
        """Make all written bytes durable. On return they survive a power loss."""
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
            if self._pool.is_served_by(runtime) and runtime.pid == os.getpid():
                with as_os_error(self.name):
                    runtime.call(runtime.pool.vfs.release(self._handle))


class FileSystem:
    """A pool as a file system of paths; made by `nvpool.connect(where)`. Use `with`, or call `close`;
    otherwise the end of the program closes the file system."""

    def __init__(
        self, where: Path | PoolMap, *, name: str = "", options: ClientOptions | None = None
    ) -> None:
        self._begin(origin_of(where, name, options))
        self.runtime()

    def _begin(self, origin: Origin) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._closed = False
        self._runtime: Runtime | None = None
        self.volumes = Volumes(self.runtime)
        _all.add(self)

    def __getstate__(self) -> Origin:
        if self._closed:
            raise ValueError("the connection to the pool is closed")
        return self._origin

    def __setstate__(self, origin: Origin) -> None:
        self._begin(origin)

    def runtime(self) -> Runtime:
        """Event loop and client of this process, for other parts of the SDK. The first call connects.
        ValueError: the file system is closed."""
        runtime = self._runtime
        if runtime is not None:
            return runtime
        with self._lock:
            if self._closed:
                raise ValueError("the connection to the pool is closed")
            if self._runtime is None:
                self._runtime = Runtime(self._origin)
            return self._runtime

    def is_served_by(self, runtime: Runtime | None) -> bool:
        """Whether this is the client that the calls of this process go to; None: whether there is none yet."""
        return runtime is self._runtime

    def forget_parent(self) -> None:
        """Drop the parent's client, in a forked child. The next call connects again."""
        _abandoned.append(self._runtime)
        self._runtime = None
        self._lock = threading.Lock()  # another thread of the parent may hold the old one at the fork

    def _call(
        self,
        method: Callable[Concatenate[AsyncFileSystem, _Arguments], Coroutine[Any, Any, _Result]],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        runtime = self.runtime()
        return runtime.call(method(runtime.pool, *arguments, **named))

    def close(self, timeout_s: float = 10.0) -> None:
        """Store all written bytes and disconnect, within `timeout_s` seconds. A second call does nothing."""
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
    def open(
        self,
        path: Path,
        mode: OpenTextMode = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        permissions: int = 0o644,
    ) -> io.TextIOWrapper: ...

    @overload
    def open(
        self,
        path: Path,
        mode: OpenBinaryMode,
        buffering: Literal[0],
        encoding: None = None,
        errors: None = None,
        newline: None = None,
        permissions: int = 0o644,
    ) -> File: ...

    @overload
    def open(
        self,
        path: Path,
        mode: OpenBinaryModeUpdating,
        buffering: Literal[-1, 1] = -1,
        encoding: None = None,
        errors: None = None,
        newline: None = None,
        permissions: int = 0o644,
    ) -> io.BufferedRandom: ...

    @overload
    def open(
        self,
        path: Path,
        mode: OpenBinaryModeWriting,
        buffering: Literal[-1, 1] = -1,
        encoding: None = None,
        errors: None = None,
        newline: None = None,
        permissions: int = 0o644,
    ) -> io.BufferedWriter[File]: ...

    @overload
    def open(
        self,
        path: Path,
        mode: OpenBinaryModeReading,
        buffering: Literal[-1, 1] = -1,
        encoding: None = None,
        errors: None = None,
        newline: None = None,
        permissions: int = 0o644,
    ) -> io.BufferedReader[File]: ...

    @overload
    def open(
        self,
        path: Path,
        mode: str,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        permissions: int = 0o644,
    ) -> File | io.BufferedRandom | io.BufferedReader[File] | io.BufferedWriter[File] | io.TextIOWrapper: ...

    def open(
        self,
        path: Path,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        permissions: int = 0o644,
    ) -> File | io.BufferedRandom | io.BufferedReader[File] | io.BufferedWriter[File] | io.TextIOWrapper:
        """Open a file like Python's open. Binary modes return a buffered file over a File, or with
        buffering=0 the File itself.

        All arguments are checked first: if one is wrong, no file is created and none is truncated.
        """
        flags, permissions = flags_of(mode), mode_of(permissions, "permissions")
        check_opening(path, mode, buffering, encoding, errors, newline)
        raw = File(self, path, flags, permissions)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else BUFFER_BYTES
        kind = (
            io.BufferedRandom if "+" in mode else io.BufferedReader if raw.readable() else io.BufferedWriter
        )
        if flags & os.O_APPEND:
            raw.seek(0, os.SEEK_END)
        buffered = kind(raw, size)
        return (
            buffered
            if "b" in mode
            else io.TextIOWrapper(
                buffered, encoding or "utf-8", errors, newline, line_buffering=buffering == 1
            )
        )

    @overload
    def read_many(
        self, reads: Iterable[Any], into: None = None, *, on_error: Literal["raise"] = "raise"
    ) -> list[memoryview]: ...

    @overload
    def read_many(
        self, reads: Iterable[Any], into: None = None, *, on_error: str
    ) -> list[memoryview | OSError]: ...

    @overload
    def read_many(
        self, reads: Iterable[Any], into: WriteableBuffer, *, on_error: Literal["raise"] = "raise"
    ) -> list[int]: ...

    @overload
    def read_many(
        self, reads: Iterable[Any], into: WriteableBuffer, *, on_error: str
    ) -> list[int | OSError]: ...

    def read_many(
        self, reads: Iterable[Any], into: WriteableBuffer | None = None, *, on_error: str = "raise"
    ) -> Sequence[memoryview | OSError] | Sequence[int | OSError]:
        """Read many ranges or files in parallel, with one message per target.

        Each read is a path or an open file (all of it), or a tuple (path or open file, offset, length), in
        any mixture. The result is a list of memoryviews, or with `into` a list of lengths. With
        on_error="return" an OSError takes the place of each read that failed. See AsyncFileSystem.read_many
        for the details and the errors.

        The positions of the files do not move. Bytes that a buffered file has not flushed are not seen.
        """
        returns_errors = check_on_error(on_error)
        plan, given = reads_of(reads, self._handle_of)
        buffer = None if into is None else contiguous(into)
        runtime = self.runtime()
        return runtime.call(runtime.pool.read_planned(plan, given, buffer, returns_errors))

    def _handle_of(self, what: Any) -> FileHandle | None:
        if isinstance(what, str | bytes | os.PathLike):
            return None
        raw = what if isinstance(what, File) else getattr(getattr(what, "buffer", what), "raw", what)
        if not isinstance(raw, File):
            return None
        return raw.handle_in(self)

    def read_bytes(self, path: Path) -> bytes:
        return self._call(AsyncFileSystem.read_bytes, path)

    def write_bytes(self, path: Path, content: ReadableBuffer) -> int:
        """Replace the contents of the file with `content` (bytes or another buffer); return its length.
        TypeError: `content` is not a buffer; the file is unchanged."""
        return self._call(AsyncFileSystem.write_bytes, path, content)

    def copy(self, source: Path, target: Path) -> int:
        """Copy the bytes and permissions of a file; return the number of bytes. `target` appears only when
        the copy is complete."""
        return self._call(AsyncFileSystem.copy, source, target)

    # -- names -----------------------------------------------------------------------------------------------------------

    def stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._call(AsyncFileSystem.stat, path, follow_symlinks=follow_symlinks)

    def exists(self, path: Path) -> bool:
        """Check that the path leads to something. Like os.path.exists this returns False also for a path
        that no file can have. An error of the pool is raised."""
        return self._call(AsyncFileSystem.exists, path)

    def is_dir(self, path: Path) -> bool:
        return self._call(AsyncFileSystem.is_dir, path)

    def is_file(self, path: Path) -> bool:
        return self._call(AsyncFileSystem.is_file, path)

    def scan(self, path: Path = "/") -> Iterator[Entry]:
        """Iterate over the entries of a directory, in no particular order. Memory use is bounded, however
        large the directory is."""
        return self._drain(AsyncFileSystem.scan, path)

    def list(self, path: Path = "/") -> list[str]:
        """Names in a directory, sorted."""
        return self._call(AsyncFileSystem.list, path)

    def walk(self, top: Path = "/") -> Iterator[tuple[str, builtins.list[str], builtins.list[str]]]:
        """Walk a tree top down, like os.walk. Symbolic links are listed with the files and are not
        followed."""
        return self._drain(AsyncFileSystem.walk, top)

    def _drain(
        self, method: Callable[[AsyncFileSystem, Path], AsyncIterator[_Result]], path: Path
    ) -> Iterator[_Result]:
        runtime = self.runtime()
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

    def mkdir(
        self,
        path: Path,
        mode: int = 0o755,
        *,
        parents: bool = False,
        exist_ok: bool = False,
        wide: bool = False,
    ) -> None:
        """Create a directory. `wide` makes it a striped directory: its names are spread over all
        partitions, for directories with very many entries."""
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
        """Change the owner. -1 leaves the user or the group unchanged."""
        self._call(AsyncFileSystem.chown, path, uid, gid)

    def utime(self, path: Path, ns: tuple[int, int] | None = None) -> None:
        """Set the access and modification times: `ns` is (atime, mtime) in nanoseconds; None means now."""
        self._call(AsyncFileSystem.utime, path, ns)

    def truncate(self, path: Path, size: int) -> None:
        self._call(AsyncFileSystem.truncate, path, size)

    def getxattr(self, path: Path, name: str) -> bytes:
        return self._call(AsyncFileSystem.getxattr, path, name)

    def setxattr(self, path: Path, name: str, value: ReadableBuffer, flags: int = 0) -> None:
        """Set an extended attribute. `value` is bytes or another buffer; `flags` are those of os.setxattr."""
        self._call(AsyncFileSystem.setxattr, path, name, value, flags)

    def listxattr(self, path: Path) -> builtins.list[str]:
        return self._call(AsyncFileSystem.listxattr, path)

    def removexattr(self, path: Path, name: str) -> None:
        self._call(AsyncFileSystem.removexattr, path, name)

    def layout(self, path: Path) -> InheritedLayout:
        """Layout of a file, or the layout that new files in a directory inherit. See `InheritedLayout`."""
        return self._call(AsyncFileSystem.layout, path)

    def set_layout(self, path: Path, *, replicas: int = 0, chunk_bytes: int = 0) -> None:
        """Set the layout that new files and directories in this directory inherit. An argument of 0 leaves
        that part unchanged. A replica count that no directory of the pool has used yet must be set with
        `nvpool dir set`, on a node of the pool."""
        self._call(AsyncFileSystem.set_layout, path, replicas=replicas, chunk_bytes=chunk_bytes)

    def statfs(self, path: Path = "/") -> StatFs:
        return self._call(AsyncFileSystem.statfs, path)


def connect(where: Path | PoolMap, *, name: str = "", options: ClientOptions | None = None) -> FileSystem:
    """Connect to a pool.

    `where` is the pool's directory on this host, a mount point of the pool, or "host:port" of any of its
    nodes. Without `options` the client uses the [client] section of node.toml in that directory.

    OSError: FileNotFoundError if there is no pool, ConnectionRefusedError if no node can be reached,
    TimeoutError if no reply comes in time.
    """
    return FileSystem(where, name=name, options=options)


def _after_fork_in_child() -> None:
    for pool in list(_all):
        pool.forget_parent()


def _at_exit() -> None:
    for pool in list(_all):
        try:
            pool.close()
        except Exception:  # the program ends; bytes that cannot be stored are lost, as in a killed process
            pass


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
