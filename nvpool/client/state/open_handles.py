"""Handles that are opened and closed without a request to the metadata service.

A file under a lease with the right to read is opened from the caches. A handle is closed immediately unless data must
be stored or locks be released first. The service learns of both later, in batches. The functions here never wait.
Used by `vfs/files`, and by the mount's replies from the caches (fuse/fast_path/cached_replies).
"""

from __future__ import annotations

import os
from typing import Any

from nvpool.client.state.leases import Leases
from nvpool.client.state.metadata_cache import MetadataCache, OpenInode
from nvpool.client.state.shard_session import ShardSessions
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.vfs_types import FileHandle
from nvpool.core import grants

_READ, _SMALL_BYTES = grants.READ, SMALL_BYTES
_NOT_TO_READ = os.O_ACCMODE | os.O_TRUNC


class OpenHandles:
    """See the module.

    `meta` reports opens and closes. `owners` has the inodes on which this client has locks. The other
    collaborators drop what they keep of a file when its last handle is closed.
    """

    def __init__(
        self,
        meta: Any,
        leases: Leases,
        cache: MetadataCache,
        reader: Any,
        writer: Any,
        chunks: Any,
        rooms: Any,
        owners: dict[int, int],
    ) -> None:
        self._meta = meta
        self._sessions: ShardSessions = meta.sessions
        self._leases = leases
        self._cache = cache
        self._reader = reader
        self._writer = writer
        self._chunks = chunks
        self._rooms = rooms
        self._owners = owners

    def open_now(self, inode: int, flags: int, now_s: float) -> FileHandle | None:
        """Open a file to read it, under a lease with that right. None: a request is needed.

        The open is reported to the service soon; if the handle is still open when another client is about to
        change the file, before that change. `now_s`: the time of the client's clock.
        """
        if flags & _NOT_TO_READ:
            return None
        lease = self._leases.held_at(inode, now_s)
        if lease is None:
            return None
        file = self._cache.open.get(inode)
        if file is not None:
            if not file.grant_rights & _READ or not file.attr.links:
                return None
            file.handles += 1
            return FileHandle(file, flags)
        file = self._cache.hold_leased(inode, lease.grant, now_s, self._leases.now_ms())
        if file is None:
            return None
        file.unreported = True
        file.opened = 1
        state = self._sessions.of(inode)
        state.add_unreported_open(inode)
        is_large = file.attr.size > _SMALL_BYTES
        if is_large or state.reporting is None or state.reporting.done():
            self._meta.report_open_of(state, is_large)
        return FileHandle(file, flags)

    def release_now(self, handle: FileHandle) -> bool:
        """Release the handle, which must not be used any more; return whether that was possible without waiting.

        False: there was no side effect, because data must be stored or locks must be released.
        """
        file = handle.file
        inode: Any = file.inode
        if handle.closed or inode in self._owners:
            return False
        if file.handles == 1 and file.written is not None and file.written.unsettled:
            return False
        handle.closed = True
        ahead = handle.ahead
        if ahead.units or ahead in file.ahead:
            self._reader.forget(file, ahead)
        self.let_go(file)
        return True

    def let_go(self, file: OpenInode) -> None:
        """Give up one handle's hold on the open inode; with the last one, report the close to the service."""
        if not self._cache.drop(file):
            return
        inode: Any = file.inode
        file.fetching = None  # when the fetched bytes arrive, the file may belong to another client
        if file.located:
            self._chunks.short.forget(file)
        if file.grant_rights & _READ and not file.lost:
            self._leases.keep_grant(inode, file.grant)
        if file.written is not None:
            self._writer.forget(file)
        if file.volume:
            self._rooms.drop(file)
        state = self._sessions.of(inode)
        known = state.remove_opens(inode, file.opened)
        if known:
            self._meta.release_known(state, inode, known)
