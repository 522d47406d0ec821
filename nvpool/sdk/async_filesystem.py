"""The asyncio SDK: a pool as a file system of paths.

The guarantees are those of the client: close-to-open consistency between clients, read-your-writes within one
client. Errors are OSError with the usual subclasses. `filename` is the path that the caller gave, and
`__cause__` is nvpool's own error, which says more.

One object belongs to one event loop and one process. An unpickled file system opens its own connection at the
first call that the program awaits. Async programs use this module directly; `sdk/filesystem` is the
synchronous API on top of it.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import inspect
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller, FileHandle, StatFs
from nvpool.core.errors import (
    AlreadyExists,
    InUse,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    NvpoolError,
    Unreachable,
)
from nvpool.core.units import MIB
from nvpool.poolmap.model import PoolMap
from nvpool.sdk.argument_checks import (
    attribute_flags,
    attribute_name,
    bytes_of,
    check_new_names,
    contiguous,
    flags_of,
    layout_of,
    mode_of,
    owner_of,
    size_of,
    timeout,
    times_of,
)
from nvpool.sdk.connect_argument import Origin, origin_of
from nvpool.sdk.open_file import AsyncFile
from nvpool.sdk.paths import (
    Path,
    as_detailed_os_error,
    as_os_error,
    find,
    locate,
    name_bytes,
    stat_result,
)
from nvpool.sdk.read_many import Batches
from nvpool.sdk.read_many_checks import Read, check_on_error, reads_of
from nvpool.sdk.volumes import AsyncVolumes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from nvpool.rpc.messages.meta_messages import Attr

_COPY_BYTES = 4 * MIB
_LIST_STEP = 1000
_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


class Entry(NamedTuple):
    """One directory entry: its name and the result of stat on it. A symbolic link is not followed."""

    name: str
    stat: os.stat_result

    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.stat.st_mode)

    def is_file(self) -> bool:
        return stat.S_ISREG(self.stat.st_mode)

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.stat.st_mode)


class InheritedLayout(NamedTuple):
    """Layout that new files inherit from their directory."""

    replicas: int
    chunk_bytes: int


class AsyncFileSystem:
    """A pool as a file system of paths; made by `await nvpool.connect_async(where)`. Use `async with`, or
    call `close`."""

    def __init__(self, client: Client, caller: Caller, origin: Origin | None = None) -> None:
        self.client = client
        self.vfs = client.vfs
        self.caller = caller
        self.origin = origin
        """The data needed to connect again; None if the program passed its own client."""
        self.read_batches = Batches(client.vfs, caller)
        self.volumes = AsyncVolumes(client)

    @classmethod
    async def connect(
        cls, where: Path | PoolMap, *, name: str = "", options: ClientOptions | None = None
    ) -> AsyncFileSystem:
        """Connect to the pool that `where` names. See `connect_async`."""
        return cls(*await connected(origin_of(where, name, options)))

    def __reduce__(self) -> tuple[type[Unconnected], tuple[Origin]]:
        if self.origin is None:
            raise TypeError(
                "cannot pickle a file system that was made of a client; make it with connect_async"
            )
        return Unconnected, (self.origin,)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Store all written bytes and disconnect, within `timeout_s` seconds."""
        timeout_s = timeout("timeout_s", timeout_s)
        try:
            await self.read_batches.forget()
        except NvpoolError:
            pass  # these handles are read-only; the end of the session releases them
        await self.client.close(timeout_s)

    async def __aenter__(self) -> AsyncFileSystem:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- files -----------------------------------------------------------------------------------------------------------

    async def open_handle(self, path: Path, flags: int, mode: int = 0o666) -> FileHandle:
        """Open a file as open(2) does, without a permission check and without a umask. The caller applies
        both if it needs them."""
        attr: Attr | None
        if flags & os.O_CREAT:
            place = await locate(self.vfs, path, follow=not flags & os.O_EXCL, to_open=True)
            if not place.name:
                raise IsADirectory
            if place.attr is None or flags & os.O_EXCL:
                return (await self.vfs.create(place.parent, place.name, mode, flags, self.caller))[1]
            attr = place.attr
        else:
            attr = (await locate(self.vfs, path, to_open=True)).attr
            if attr is None:
                raise NotFound
        if stat.S_ISDIR(attr.mode):
            raise IsADirectory
        if not stat.S_ISREG(attr.mode):
            raise InvalidRequest("only regular files can be opened through the SDK")
        try:
            return await self.vfs.open(attr.inode, flags, self.caller)
        except NotFound:
            # after our look-up the name was given to another file
            place = await locate(self.vfs, path)
            self.vfs.cache.forget_entry(place.parent, place.name)
            if flags & os.O_CREAT:
                return (await self.vfs.create(place.parent, place.name, mode, flags, self.caller))[1]
            return await self.vfs.open((await find(self.vfs, path)).inode, flags, self.caller)

    async def open(self, path: Path, mode: str = "rb", permissions: int = 0o644) -> AsyncFile:
        """Open a file. The modes are those of Python's open, always binary."""
        flags, permissions = flags_of(mode), mode_of(permissions, "permissions")
        with as_os_error(path):
            return AsyncFile(self.vfs, path, await self.open_handle(path, flags, permissions))

    @overload
    async def read_many(
        self, reads: Iterable[Any], into: None = None, *, on_error: Literal["raise"] = "raise"
    ) -> list[memoryview]: ...

    @overload
    async def read_many(
        self, reads: Iterable[Any], into: None = None, *, on_error: str
    ) -> list[memoryview | OSError]: ...

    @overload
    async def read_many(
        self, reads: Iterable[Any], into: WriteableBuffer, *, on_error: Literal["raise"] = "raise"
    ) -> list[int]: ...

    @overload
    async def read_many(
        self, reads: Iterable[Any], into: WriteableBuffer, *, on_error: str
    ) -> list[int | OSError]: ...

    async def read_many(
        self, reads: Iterable[Any], into: WriteableBuffer | None = None, *, on_error: str = "raise"
    ) -> Sequence[memoryview | OSError] | Sequence[int | OSError]:
        """Read many ranges or files in parallel, with one message per target.

        Each read is a path or an open file (all of the file), or a tuple (path or open file, offset, length).
        A length of None reaches to the end of the file. Paths and open files may be mixed.

        Without `into` the result is a list of memoryviews. With `into` (any writable buffer) the bytes go
        into that buffer: each read starts at the sum of the lengths before it. The length that counts is the
        requested one, or for a whole file its size. The result is then a list of lengths. A read is shorter
        than requested only at the end of its file. The caller must not use `into` during this call.

        Files that are not open yet are looked up and opened with one message per metadata shard. Unknown
        directories on the paths cost one message per shard and directory level, however many directories
        there are. Each symbolic link costs one message.

        TypeError, ValueError  a read is not valid (the error names its index and the reason), or `into` is
            too small or read-only; nothing was read
        OSError  the error of the first read that failed; its `filename` is the path. The contents of `into`
            are then undefined. With on_error="return" the error takes the place of that read's result, and
            all other results are complete
        """
        returns_errors = check_on_error(on_error)
        plan, given = reads_of(reads, self._handle_of)
        return await self.read_planned(
            plan, given, None if into is None else contiguous(into), returns_errors
        )

    async def read_planned(
        self, plan: list[Read], given: Sequence[Any], into: memoryview | None, returns_errors: bool
    ) -> Sequence[memoryview | OSError] | Sequence[int | OSError]:
        """Run `read_many` on reads that are already checked."""
        return await self.read_batches.read_many(plan, given, into, returns_errors)

    def _handle_of(self, what: Any) -> FileHandle | None:
        if not isinstance(what, AsyncFile):
            return None
        if what.vfs is not self.vfs:
            raise ValueError(f"the file {what.path!r} was opened through another connection")
        return what.handle

    async def read_bytes(self, path: Path) -> bytes:
        """Return the contents of a file."""
        async with await self.open(path) as file:
            parts = []
            at = 0
            while len(part := await file.read(at, _COPY_BYTES)):
                parts.append(part)
                at += len(part)
            return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    async def write_bytes(self, path: Path, content: ReadableBuffer) -> int:
        """Replace the contents of the file with `content` (bytes or another buffer); return its length.
        TypeError: `content` is not a buffer; the file is unchanged."""
        content = bytes_of(content)
        async with await self.open(path, "wb") as file:
            return await file.write(0, content)

    async def copy(self, source: Path, target: Path) -> int:
        """Copy the bytes and permissions of a file; return the number of bytes. `target` appears under its
        name only when the copy is complete and stored. The stores copy the data among themselves where
        they can, so those bytes do not pass through this process. Holes stay holes."""
        with as_os_error(source):
            attr = await find(self.vfs, source)
        if stat.S_ISDIR(attr.mode):
            raise IsADirectoryError(errno.EISDIR, "copy takes files", os.fspath(source))
        # In the target's directory, so that rename works; unique, so that parallel copies do not share it.
        name = b".nvpool-copy-" + self.client.clock.secret(8).hex().encode()
        beside = os.path.join(os.path.dirname(name_bytes(target)), name)
        count = 0
        async with await self.open(source) as reading:
            with as_os_error(target):
                writing = AsyncFile(
                    self.vfs, target, await self.open_handle(beside, flags_of("xb"), stat.S_IMODE(attr.mode))
                )
            try:
                async with writing:
                    with as_os_error(source, target):
                        while copied := await self.vfs.copy_range(
                            reading.handle, count, writing.handle, count, 1 << 62
                        ):
                            count += copied
                with as_os_error(target):
                    await self._rename(beside, target)
            except BaseException:
                try:
                    await self.remove(beside)
                except OSError:
                    pass  # renamed, or the pool does not answer: then the file stays; its name explains it
                raise
        return count

    # -- names -----------------------------------------------------------------------------------------------------------

    async def stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        """Attributes of a file or directory, as os.stat gives them."""
        with as_os_error(path):
            attr = await find(self.vfs, path, follow=follow_symlinks)
            return stat_result(await self.vfs.getattr(attr.inode))

    async def exists(self, path: Path) -> bool:
        """Check that the path leads to something. Like os.path.exists this returns False also for a path
        that no file can have. An error of the pool is raised."""
        return await self._kind(path) is not None

    async def is_dir(self, path: Path) -> bool:
        """Check that the path leads to a directory. Errors as for `exists`."""
        return await self._kind(path) == stat.S_IFDIR

    async def is_file(self, path: Path) -> bool:
        """Check that the path leads to a regular file. Errors as for `exists`."""
        return await self._kind(path) == stat.S_IFREG

    async def _kind(self, path: Path) -> int | None:
        """File type bits of the mode (S_IFMT); None if the path leads to nothing."""
        try:
            return stat.S_IFMT((await self.stat(path)).st_mode)
        except ValueError:  # a null character, or text that the file system encoding cannot represent
            return None
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            return None

    async def scan(self, path: Path = "/") -> AsyncIterator[Entry]:
        """Iterate over the entries of a directory, in no particular order. Memory use is bounded, however
        large the directory is."""
        with as_os_error(path):
            directory = await self.vfs.opendir((await find(self.vfs, path)).inode)
        cursor, more = 0, True
        while more:
            with as_os_error(path):
                entries, more = await self.vfs.readdir(directory, cursor, _LIST_STEP)
            for entry in entries:
                cursor = entry.cursor
                yield Entry(os.fsdecode(entry.name), stat_result(entry.attr))

    async def list(self, path: Path = "/") -> list[str]:
        """Names in a directory, sorted."""
        return sorted([entry.name async for entry in self.scan(path)])

    async def walk(
        self, top: Path = "/"
    ) -> AsyncIterator[tuple[str, builtins.list[str], builtins.list[str]]]:
        """Walk a tree top down, like os.walk. Symbolic links are listed with the files and are not
        followed."""
        place = os.fsdecode(top)
        directories: list[str] = []
        files: list[str] = []
        async for entry in self.scan(place):
            (directories if entry.is_dir() else files).append(entry.name)
        yield place, sorted(directories), sorted(files)
        for name in sorted(directories):
            async for found in self.walk(os.path.join(place, name)):
                yield found

    async def mkdir(
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
        mode, wide = mode_of(mode), bool(wide)
        with as_os_error(path):
            check_new_names(path)
            try:
                place = await locate(self.vfs, path)
            except NotFound:
                if not parents:
                    raise
                await self.mkdir(
                    os.path.dirname(os.fsencode(path).rstrip(b"/")) or b"/", parents=True, exist_ok=True
                )
                place = await locate(self.vfs, path)
            if place.attr is None:
                try:
                    await self.vfs.mkdir(place.parent, place.name, mode, self.caller, wide)
                    return
                except AlreadyExists:
                    place = await locate(self.vfs, path)
            if not exist_ok or place.attr is None or not stat.S_ISDIR(place.attr.mode):
                raise AlreadyExists

    async def remove(self, path: Path) -> None:
        """Remove a file, a symbolic link or any other entry that is not a directory."""
        with as_os_error(path):
            place = await locate(self.vfs, path, follow=False)
            if place.attr is None:
                raise NotFound
            if stat.S_ISDIR(place.attr.mode):
                raise IsADirectory
            await self.read_batches.forget([path])
            await self.vfs.unlink(place.parent, place.name, self.caller)

    async def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        with as_os_error(path):
            place = await locate(self.vfs, path, follow=False)
            if place.attr is None:
                raise NotFound
            if not stat.S_ISDIR(place.attr.mode):
                raise NotADirectory
            if not place.name:
                raise InUse("the path ends at the root or in .., and only a name can be removed")
            await self.vfs.rmdir(place.parent, place.name, self.caller)

    async def remove_tree(self, path: Path) -> None:
        """Remove a directory with everything below it. Symbolic links are removed, not followed."""
        names = [entry async for entry in self.scan(path)]
        for entry in names:
            below = os.path.join(os.fsdecode(path), entry.name)
            if entry.is_dir():
                await self.remove_tree(below)
            else:
                await self.remove(below)
        await self.rmdir(path)

    async def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`; an existing `target` is replaced. Also after a power loss `target`
        shows either the old bytes or the new ones."""
        with as_os_error(source, target):
            await self._rename(source, target)

    async def _rename(self, source: Path, target: Path) -> None:
        old = await locate(self.vfs, source, follow=False)
        new = await locate(self.vfs, target, follow=False)
        if old.attr is None:
            raise NotFound
        if not old.name or not new.name:
            raise InUse("a path ends at the root or in .., and only a name can be given to something else")
        await self.read_batches.forget()
        await self.vfs.rename(old.parent, old.name, new.parent, new.name, 0, self.caller)

    async def link(self, source: Path, target: Path) -> None:
        """Create the hard link `target` to the file `source`. FileExistsError: `target` exists."""
        with as_os_error(source, target):
            attr = await find(self.vfs, source, follow=False)
            new = await locate(self.vfs, target, follow=False)
            if new.attr is not None:
                raise AlreadyExists
            await self.vfs.link(attr.inode, new.parent, new.name, self.caller)

    async def symlink(self, target: Path, path: Path) -> None:
        """Create the symbolic link `path`, which points to `target`."""
        with as_os_error(path):
            if not name_bytes(target):
                raise NotFound
            place = await locate(self.vfs, path, follow=False)
            if place.attr is not None:
                raise AlreadyExists
            await self.vfs.symlink(place.parent, place.name, os.fsencode(target), self.caller)

    async def readlink(self, path: Path) -> str:
        """Return the target of a symbolic link."""
        with as_os_error(path):
            attr = await find(self.vfs, path, follow=False)
            if not stat.S_ISLNK(attr.mode):
                raise InvalidRequest("not a symbolic link")
            return os.fsdecode(await self.vfs.readlink(attr.inode))

    # -- attributes --------------------------------------------------------------------------------------------------------

    async def layout(self, path: Path) -> InheritedLayout:
        """Layout of a file, or the layout that new files in a directory inherit."""
        with as_os_error(path):
            attr = await find(self.vfs, path)
            return InheritedLayout(attr.table, 1 << attr.chunk_bits)

    async def set_layout(self, path: Path, *, replicas: int = 0, chunk_bytes: int = 0) -> None:
        """Set the layout that new files and directories in this directory inherit. An argument of 0 leaves
        that part unchanged. A replica count that no directory of the pool has used yet must be set with
        `nvpool dir set`, on a node of the pool."""
        replicas, chunk_bytes = layout_of(replicas, chunk_bytes)
        with as_os_error(path):
            attr = await find(self.vfs, path)
            if replicas and replicas not in self.client.pool_map.table_by_id:
                await self.vfs.view.refresh()
            await self.vfs.hand_down(attr.inode, self.caller, replicas=replicas, chunk_bytes=chunk_bytes)

    async def chmod(self, path: Path, mode: int) -> None:
        """Change the permissions. Symbolic links are followed."""
        mode = mode_of(mode)
        with as_os_error(path):
            await self.vfs.setattr((await find(self.vfs, path)).inode, mode=mode, caller=self.caller)

    async def chown(self, path: Path, uid: int = -1, gid: int = -1) -> None:
        """Change the owner. -1 leaves the user or the group unchanged."""
        user, group = owner_of("uid", uid), owner_of("gid", gid)
        with as_os_error(path):
            await self.vfs.setattr(
                (await find(self.vfs, path)).inode, uid=user, gid=group, caller=self.caller
            )

    async def utime(self, path: Path, ns: tuple[int, int] | None = None) -> None:
        """Set the access and modification times: `ns` is (atime, mtime) in nanoseconds; None means now."""
        atime, mtime = times_of(ns)
        with as_os_error(path):
            await self.vfs.setattr(
                (await find(self.vfs, path)).inode, atime_ns=atime, mtime_ns=mtime, caller=self.caller
            )

    async def truncate(self, path: Path, size: int) -> None:
        """Cut the file to `size` bytes, or extend it with zeros."""
        size = size_of(size)
        with as_os_error(path):
            await self.vfs.setattr((await find(self.vfs, path)).inode, size=size, caller=self.caller)

    async def getxattr(self, path: Path, name: str) -> bytes:
        """Return the value of an extended attribute."""
        raw = attribute_name(name)
        with as_os_error(path):
            return await self.vfs.getxattr((await find(self.vfs, path)).inode, raw)

    async def setxattr(self, path: Path, name: str, value: ReadableBuffer, flags: int = 0) -> None:
        """Set an extended attribute. `value` is bytes or another buffer; `flags` are those of os.setxattr."""
        raw, content, flags = attribute_name(name), bytes(bytes_of(value, "value")), attribute_flags(flags)
        with as_os_error(path):
            await self.vfs.setxattr((await find(self.vfs, path)).inode, raw, content, flags, self.caller)

    async def listxattr(self, path: Path) -> builtins.list[str]:
        """Names of the extended attributes."""
        with as_os_error(path):
            return [
                os.fsdecode(name) for name in await self.vfs.listxattr((await find(self.vfs, path)).inode)
            ]

    async def removexattr(self, path: Path, name: str) -> None:
        """Remove an extended attribute."""
        raw = attribute_name(name)
        with as_os_error(path):
            await self.vfs.removexattr((await find(self.vfs, path)).inode, raw, self.caller)

    async def statfs(self, path: Path = "/") -> StatFs:
        """Capacity and free space at the path. A volume with a quota reports its own, other paths those of
        the whole pool."""
        with as_os_error(path):
            return await self.vfs.statfs((await find(self.vfs, path)).inode)


async def connected(origin: Origin) -> tuple[Client, Caller, Origin]:
    """Open a client of that pool for this process."""
    with as_detailed_os_error(origin.where or None):
        try:
            client = await Client.open(origin.place, origin.name or f"sdk pid {os.getpid()}", origin.options)
        except Unreachable as error:
            raise Unreachable(
                f"{error}. Is the node up, and the port right? `nvpool node ls POOL` on a node of the pool shows "
                f"the addresses"
            ) from error
    return client, Caller(os.getuid(), os.getgid(), os.getpid()), origin


async def connect_async(
    where: Path | PoolMap, *, name: str = "", options: ClientOptions | None = None
) -> AsyncFileSystem:
    """Connect to a pool on the running event loop.

    `where` is the pool's directory on this host, a mount point of the pool, or "host:port" of any of its
    nodes. Without `options` the client uses the [client] section of node.toml in that directory.

    OSError: FileNotFoundError if there is no pool, ConnectionRefusedError if no node can be reached,
    TimeoutError if no reply comes in time.
    """
    return await AsyncFileSystem.connect(where, name=name, options=options)


class Unconnected(AsyncFileSystem):
    """An unpickled file system: it connects at the first awaited call.

    Each coroutine method connects first and then turns the object into an AsyncFileSystem for good. So a
    connected file system pays nothing for this. Only AsyncFileSystem.__reduce__ makes these objects.
    """

    def __init__(self, origin: Origin) -> None:  # does not call the base, which needs a client
        self.origin: Origin = origin
        self.volumes = _UnconnectedVolumes(self)
        self._connecting: asyncio.Task[None] | None = None

    async def ensure_connected(self) -> None:
        """Connect, unless this object has become an AsyncFileSystem already."""
        if type(self) is AsyncFileSystem:
            return
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._become())
        await asyncio.shield(self._connecting)

    async def _become(self) -> None:
        if type(self) is Unconnected:
            made = await connected(self.origin)
            self.__class__ = AsyncFileSystem  # type: ignore[assignment]  # its real class
            AsyncFileSystem.__init__(self, *made)

    def __getattr__(self, name: str) -> Any:
        if name in ("client", "vfs", "caller"):
            raise RuntimeError(
                f"this file system came out of a pickle and is not connected yet; use it in `async with`, or "
                f"await one of its calls, before its .{name}"
            )
        raise AttributeError(name)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Close the file system. Before it has connected there is nothing to close."""
        if type(self) is not Unconnected:
            await AsyncFileSystem.close(self, timeout_s)

    async def __aenter__(self) -> AsyncFileSystem:
        await Unconnected.ensure_connected(self)
        return self


class _UnconnectedVolumes(AsyncVolumes):
    def __init__(self, pool: Unconnected) -> None:  # does not call the base, which needs a client
        self.pool = pool


def _connecting(
    method: Callable[..., Any], of: Callable[[Any], tuple[Unconnected, Callable[[], Any]]]
) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(method):

        @wraps(method)
        async def generate(self: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
            pool, found = of(self)
            await Unconnected.ensure_connected(pool)
            async for one in method(found(), *arguments, **named):
                yield one

        return generate

    @wraps(method)
    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        pool, found = of(self)
        await Unconnected.ensure_connected(pool)
        return await method(found(), *arguments, **named)

    return call


def _cover(cls: type, base: type, of: Callable[[Any], tuple[Unconnected, Callable[[], Any]]]) -> None:
    for name, method in vars(base).items():
        if (
            not name.startswith("_")
            and name not in vars(cls)
            and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method))
        ):
            setattr(cls, name, _connecting(method, of))


_cover(Unconnected, AsyncFileSystem, lambda pool: (pool, lambda: pool))
_cover(_UnconnectedVolumes, AsyncVolumes, lambda volumes: (volumes.pool, lambda: volumes.pool.volumes))
