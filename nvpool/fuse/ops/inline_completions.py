"""Completions of requests that run without a task: reply to the kernel first, then update the caches.

Parts of `fuse/ops/operations` make them; `fuse/kernel/connection` sets `on_end` and may cancel them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.core.errors import DirectoryGone
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.rpc.messages.meta_messages import Attr


class OpenReply(NamedTuple):
    """Result of an open, for the kernel.

    direct_io: do not use pages; keep_cache: the cached pages are still current; no_flush: a close of the
    descriptor needs no FLUSH.
    """

    handle: int
    direct_io: bool
    keep_cache: bool
    no_flush: bool = False


class OpenedFiles(Protocol):
    """Interface of the mount's open files that the completion of a create uses (ops/open_files)."""

    @property
    def options(self) -> FuseOptions:
        """Options of the mount."""

    @property
    def changes(self) -> ChangeCount:
        """Number of changes made through the mount."""

    @property
    def handles(self) -> Handles:
        """Numbers of the open files."""

    @property
    def names(self) -> CachedNames:
        """Names that the kernel caches."""

    @property
    def pages(self) -> CachedPages:
        """Pages that the kernel caches."""

    def register(self, handle: int, file: FileHandle, flags: int, caller: Caller) -> bool:
        """Register an open file. Returns whether it is open for appending."""

    def open_reply(self, file: FileHandle, flags: int, caller: Caller, unique: int) -> OpenReply:
        """Register a file that was opened below, and return the reply for the kernel."""


class PendingChange:
    """A pending change whose only result is success or an error."""

    __slots__ = ("begun", "on_end", "_changes")

    def __init__(self, changes: ChangeCount) -> None:
        self.begun: Any = None
        self.on_end: Callable[[Any, BaseException | None], None]
        self._changes = changes

    def cancel(self) -> bool:
        """Cancel the change if it still can be. False: it ends by itself."""
        return bool(self.begun.cancel())

    def ended(self, _: object, error: BaseException | None) -> None:
        """Pass on the outcome; called by the layer below."""
        self._changes.count += 1
        self.on_end(None, error)


class SubmittedFlush(PendingChange):
    """A pending FLUSH: after an error the kernel has pages of the file that no store has."""

    __slots__ = ("_on_failed", "_inode")

    def __init__(self, changes: ChangeCount, on_failed: Callable[[int], None], inode: int) -> None:
        PendingChange.__init__(self, changes)
        self._on_failed = on_failed
        self._inode = inode

    def ended(self, _: object, error: BaseException | None) -> None:
        """Pass on the outcome; called by the layer below."""
        self._changes.count += 1
        if error is not None:
            self._on_failed(self._inode)
        self.on_end(None, error)


class SubmittedUnlink(PendingChange):
    """A pending UNLINK of a name in `directory`, which the kernel locks until the reply."""

    __slots__ = ("_names", "_directory")

    def __init__(self, changes: ChangeCount, names: CachedNames, directory: int) -> None:
        super().__init__(changes)
        self._names = names
        self._directory = directory

    def ended(self, _: object, error: BaseException | None) -> None:
        """Pass on the outcome; called by the layer below."""
        self._changes.count += 1
        self._names.unlock_directory(self._directory)
        if isinstance(error, DirectoryGone):
            error = self._names.directory_gone(error, self._directory)
        self.on_end(None, error)


class Creating:
    """A pending CREATE: the client's `CreateCallbacks` (client/vfs), with the kernel's side of it."""

    __slots__ = (
        "begun",
        "on_end",
        "files",
        "_parent",
        "_name",
        "_flags",
        "_caller",
        "_unique",
        "handle",
        "_task",
        "_locks",
    )

    def __init__(
        self, files: OpenedFiles, parent: int, name: bytes, flags: int, caller: Caller, unique: int
    ) -> None:
        self.begun: Any = None
        self.on_end: Callable[[Any, BaseException | None], None]
        self.files = files
        self._parent = parent
        self._name = name
        self._flags = flags
        self._caller = caller
        self._unique = unique
        self.handle = 0
        """Number of the open file; 0 until the file is new."""
        self._task: asyncio.Task[tuple[Attr, FileHandle]] | None = None
        self._locks = False

    def hold(self) -> None:
        """Note that the request is pending and changes names in its directory."""
        self._locks = True
        self.files.names.lock_directory(self._parent)

    def _let_go(self) -> None:
        if self._locks:
            self._locks = False
            self.files.names.unlock_directory(self._parent)

    def cancel(self) -> bool:
        """Cancel the create if it still can be. False: it ends by itself."""
        return self._task.cancel() if self._task is not None else bool(self.begun.cancel())

    def made(self, attr: Attr) -> None:
        """The file is new: reply to the kernel."""
        files, flags = self.files, self._flags
        files.changes.count += 1
        self.handle = handle = files.handles.take(attr.inode, flags, self._caller, self._unique)
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        # A new inode: the kernel has no pages of it, and nobody a lock.
        appending = bool(flags & os.O_APPEND) and not reads_only
        self._let_go()
        files.names.name_is_kept = True  # a new file comes with a lease
        self.on_end((attr, OpenReply(handle, appending, files.options.writeback, reads_only)), None)

    def opened(self, file: FileHandle) -> None:
        """Record what the kernel was given, and the open file."""
        files, names = self.files, self.files.names
        attr = names.record_name(self._parent, self._name, file.attr)
        if not names.name_is_kept and files.options.entry_timeout_s:
            # `made` has given the kernel the name as cacheable
            names.record_cached_name(attr.inode, self._parent, self._name, attr.inode)
        names.name_is_kept = False
        files.pages.record_pages(file.attr)
        files.register(self.handle, file, self._flags, self._caller)

    def found(self, attr: Attr, file: FileHandle) -> None:
        """The file existed: reply to the kernel."""
        files = self.files
        files.changes.count += 1
        self._let_go()
        try:
            result = (
                files.names.record_name(self._parent, self._name, attr),
                files.open_reply(file, self._flags, self._caller, self._unique),
            )
        except Exception as error:
            self.on_end(None, error)
        else:
            self.on_end(result, None)

    def go_on(self, opening: Coroutine[Any, Any, tuple[Attr, FileHandle]]) -> None:
        """Continue as a task."""
        self.begun.leave()  # the slot belongs to the request until the reply
        self._task = asyncio.get_running_loop().create_task(opening)
        # its changes are exactly-once for this request too; see client/rpc/slot_journal
        self._task.unique = self._unique  # type: ignore[attr-defined]
        self._task.add_done_callback(self._gone_on)

    def _gone_on(self, task: asyncio.Task[tuple[Attr, FileHandle]]) -> None:
        if task.cancelled():
            self.failed(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.failed(error)
        else:
            self.found(*task.result())

    def failed(self, error: BaseException) -> None:
        """Report the error to the kernel."""
        self.files.changes.count += 1
        self._let_go()
        if isinstance(error, DirectoryGone):
            error = self.files.names.directory_gone(error, self._parent)
        self.on_end(None, error)
