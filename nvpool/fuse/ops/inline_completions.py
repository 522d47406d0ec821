"""Completions of requests that run without a task: reply to the kernel first, then update the caches.

`fuse/ops/operations` makes them; `fuse/kernel/connection` sets `on_end` and may cancel them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import DirectoryGone
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.kernel_cache import FuseOptions
from nvpool.rpc.v1.meta_pb2 import Attr


class OpenReply(NamedTuple):
    """Result of an open, for the kernel.

    direct_io: do not use pages; keep_cache: the cached pages are still current; no_flush: a close of the
    descriptor needs no FLUSH.
    """

    handle: int
    direct_io: bool
    keep_cache: bool
    no_flush: bool = False


class MountOperations(Protocol):
    """Interface of the mount's operations for a completion (ops/operations)."""

    change_count: int
    """Changes made through this mount; counted when they are complete."""
    name_is_kept: bool
    """Whether the kernel may cache the name that was recorded last."""

    @property
    def options(self) -> FuseOptions:
        """Options of the mount."""

    @property
    def handles(self) -> Handles:
        """Numbers of the open files."""

    def failed(self, inode: int) -> None:
        """Note a failed write: the kernel's pages have data that no store has."""

    def lock_directory(self, directory: int) -> None:
        """Note a pending request that changes names in `directory`."""

    def unlock_directory(self, directory: int) -> None:
        """Note that a request for which `lock_directory` was called has its reply."""

    def directory_gone(self, error: DirectoryGone, *directories: int) -> DirectoryGone:
        """The error for a request that names an entry of a removed directory."""

    def record_name(self, parent: int, name: bytes, attr: Attr) -> Attr:
        """Record that the kernel is given these attributes for the name."""

    def record_cached_name(self, cover: int, parent: int, name: bytes, inode: int) -> None:
        """Record that the kernel caches this name, under the lease of the inode `cover`."""

    def record_pages(self, attr: Attr) -> bool:
        """Record that the kernel has current pages of the inode from now on."""

    def register_open(self, handle: int, file: Any, flags: int, caller: Caller) -> bool:
        """Register an open file. Returns whether it is open for appending."""

    def open_reply(self, file: Any, flags: int, caller: Caller, unique: int) -> OpenReply:
        """Register a file that was opened below, and return the reply for the kernel."""


class PendingChange:
    """A pending change whose only result is success or an error.

    `inode`: the file, if the kernel has pages of it that no store has when the change fails. `directory`: the
    directory in which a name changes.
    """

    __slots__ = ("begun", "on_end", "_ops", "_inode", "_directory")

    def __init__(self, ops: MountOperations, inode: int = 0, directory: int = 0) -> None:
        self.begun: Any = None
        self.on_end: Callable[[Any, BaseException | None], None]
        self._ops = ops
        self._inode = inode
        self._directory = directory

    def cancel(self) -> bool:
        return self.begun.cancel()

    def ended(self, _, error: BaseException | None) -> None:
        ops = self._ops
        ops.change_count += 1
        if error is not None and self._inode:
            ops.failed(self._inode)
        if self._directory:
            ops.unlock_directory(self._directory)
            if isinstance(error, DirectoryGone):
                error = ops.directory_gone(error, self._directory)
        self.on_end(None, error)


class Creating:
    """A pending CREATE: the client's `CreateCallbacks` (client/vfs), with the kernel's side of it."""

    __slots__ = (
        "begun",
        "on_end",
        "_ops",
        "_parent",
        "_name",
        "_flags",
        "_caller",
        "_unique",
        "_handle",
        "_task",
        "_locks",
    )

    def __init__(
        self, ops: MountOperations, parent: int, name: bytes, flags: int, caller: Caller, unique: int
    ) -> None:
        self.begun: Any = None
        self.on_end: Callable[[Any, BaseException | None], None]
        self._ops = ops
        self._parent = parent
        self._name = name
        self._flags = flags
        self._caller = caller
        self._unique = unique
        self._handle = 0
        self._task: asyncio.Task | None = None
        self._locks = False

    def hold(self) -> None:
        """Note that the request is pending and changes names in its directory."""
        self._locks = True
        self._ops.lock_directory(self._parent)

    def _let_go(self) -> None:
        if self._locks:
            self._locks = False
            self._ops.unlock_directory(self._parent)

    def cancel(self) -> bool:
        return self._task.cancel() if self._task is not None else self.begun.cancel()

    def made(self, attr) -> None:
        ops, flags = self._ops, self._flags
        ops.change_count += 1
        self._handle = handle = ops.handles.take(attr.inode, flags, self._caller, self._unique)
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        # A new inode: the kernel has no pages of it, and nobody a lock.
        appending = bool(flags & os.O_APPEND) and not reads_only
        self._let_go()
        ops.name_is_kept = True  # a new file comes with a lease
        self.on_end((attr, OpenReply(handle, appending, ops.options.writeback, reads_only)), None)

    def opened(self, file) -> None:
        ops = self._ops
        attr = ops.record_name(self._parent, self._name, file.attr)
        if not ops.name_is_kept and ops.options.entry_timeout_s:
            # `made` has given the kernel the name as cacheable
            ops.record_cached_name(attr.inode, self._parent, self._name, attr.inode)
        ops.name_is_kept = False
        ops.record_pages(file.attr)
        ops.register_open(self._handle, file, self._flags, self._caller)

    def found(self, attr, file) -> None:
        ops = self._ops
        ops.change_count += 1
        self._let_go()
        try:
            result = (
                ops.record_name(self._parent, self._name, attr),
                ops.open_reply(file, self._flags, self._caller, self._unique),
            )
        except Exception as error:
            self.on_end(None, error)
        else:
            self.on_end(result, None)

    def go_on(self, opening: Coroutine) -> None:
        self.begun.leave()  # the slot belongs to the request until the reply
        self._task = asyncio.get_running_loop().create_task(opening)
        # its changes are exactly-once for this request too; see client/rpc/slot_journal
        self._task.unique = self._unique
        self._task.add_done_callback(self._gone_on)

    def _gone_on(self, task: asyncio.Task) -> None:
        if task.cancelled():
            self.failed(asyncio.CancelledError())
        elif task.exception() is not None:
            self.failed(task.exception())
        else:
            self.found(*task.result())

    def failed(self, error: BaseException) -> None:
        self._ops.change_count += 1
        self._let_go()
        self.on_end(
            None, self._ops.directory_gone(error, self._parent) if isinstance(error, DirectoryGone) else error
        )
