"""Attributes, extended attributes, permissions, and the sizes of the pool and its volumes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections import Counter

from nvpool.client.state.metadata_cache import XATTR_FLAG
from nvpool.client.state.vfs_types import NOW, Caller, FileHandle, StatFs
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.core.errors import (
    AccessDenied,
    InvalidRequest,
    LockLost,
    NoAttribute,
    RangeTooSmall,
    TooBig,
    Unavailable,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.core.names import ANONYMOUS_ID
from nvpool.core.units import (
    BLOCK_BYTES,
    CHAINS_PER_TABLE,
    NAME_BYTES_MAX,
    XATTR_NAME_BYTES_MAX,
    XATTR_VALUE_BYTES_MAX,
    clamp_time_ns,
)
from nvpool.poolmap.file_layout import layout_of
from nvpool.poolmap.model import Target
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2

STATFS_AGE_S = 1.0
STATFS_SILENT_S = 1.0
"""Wait for a target whose last figures are known: node monitoring calls `df` every few seconds."""
STATFS_KEPT_S = 600.0
"""How long the last figures of a silent target are used. Longer use would hide that the target is gone."""
FULL_SHARE = 0.98
"""Share of a drive beyond which stores refuse to grow.

The rest is reserved for removal, repair and the journals.
"""

_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _ATIME_NOW, _MTIME_NOW, _CTIME = 1, 2, 4, 8, 16, 32, 64, 128, 256
_CHUNK, _REPLICAS, _WIDE = 512, 1024, 2048


class Attributes:
    """The operations on attributes, extended attributes and permissions."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._options = parts.options
        self._meta = parts.meta
        self._cache = parts.cache
        self._leases = parts.leases
        self._reader = parts.reader
        self._writer = parts.writer
        self._inodes = parts.inodes
        self._unreported = parts.unreported

    def lease_until_s(self, inode: int) -> float:
        """When the client's lease on the inode ends (boottime_s of the clock); 0 without a lease.

        Until then the service notifies this client before another client changes the inode.
        """
        lease = self._leases.held(inode)
        return lease.until_s if lease is not None else 0.0

    def is_open(self, inode: int) -> bool:
        return inode in self._cache.open

    def size_here(self, inode: int) -> int | None:
        """The known size of a file that is open on this client. None if the file is not open."""
        file = self._cache.open.get(inode)
        return None if file is None else file.size

    def known_attr(self, inode: int) -> Attr | None:
        """The newest attributes that the client ever received, however old they are."""
        return self._cache.known_attr(inode)

    async def getattr(self, inode: int) -> Attr:
        """The attributes as stat shows them: size and time include this client's own writes."""
        await self._unreported.settle(inode)
        attr = self._cache.attr(inode, self._options.fresh_s)
        if attr is None and (file := self._cache.open.get(inode)) is not None:
            await self._inodes.look(file)  # for an open file a kernel calls this before it reads
            attr = file.attr
        return self._unreported.merged(attr if attr is not None else await self._inodes.fetch(inode))

    async def setattr(
        self,
        inode: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | str | None = None,
        mtime_ns: int | str | None = None,
        ctime_ns: int | None = None,
        caller: Caller,
        handle: FileHandle | None = None,
    ) -> Attr:
        """Change the attributes that are not None; return the new attributes.

        NOW as a time means the service's clock; other times are clamped to the storable range. A new size
        truncates the file or extends it with zeros; own unstored writes behind it are dropped. On return no
        reader on any client sees a truncated byte.
        """
        request = meta_pb2.SetAttrRequest(inode=inode)
        valid = 0
        if mode is not None:
            valid |= _MODE
            request.mode = stat.S_IMODE(mode)
        if uid is not None:
            valid |= _UID
            request.uid = uid
        if gid is not None:
            valid |= _GID
            request.gid = gid
        if atime_ns is not None:
            valid |= _ATIME_NOW if atime_ns == NOW else _ATIME
            request.atime_ns = 0 if atime_ns == NOW else clamp_time_ns(atime_ns)
        if mtime_ns is not None:
            valid |= _MTIME_NOW if mtime_ns == NOW else _MTIME
            request.mtime_ns = 0 if mtime_ns == NOW else clamp_time_ns(mtime_ns)
        if ctime_ns is not None:
            valid |= _CTIME
            request.ctime_ns = clamp_time_ns(ctime_ns)
        file = self._cache.open.get(inode)
        if handle is not None and handle.file.lost:
            raise LockLost()
        if size is not None:
            if size < 0:
                raise InvalidRequest(f"a size of {size} bytes")
            valid |= _SIZE
            request.size = size
        request.valid = valid
        if not valid:
            return await self.getattr(inode)
        if file is None:
            self._cache.forget_attr(inode)
            if size is not None:
                self._reader.forget_content(inode)
            return self._unreported.merged(await self._change(inode, wire_pb2.META_SETATTR, request, caller))
        request.rights = file.grant_rights
        if mtime_ns is not None:
            await self._unreported.settle(inode)  # a later report would overwrite the time that is set here
        if size is None:
            return self._unreported.merged(await self._change(inode, wire_pb2.META_SETATTR, request, caller))
        if size > file.attr.size:
            # Others must not see the new end before they can read the bytes before it; in a volume the bytes
            # must be counted once.
            await self._unreported.settle(inode)
        self._reader.changed(file)
        await self._writer.begin_cut(file, size)
        try:
            if size > file.attr.size:
                await self._writer.settle(file)
            attr = self._inodes.take(
                await self._unreported.grow(
                    file,
                    lambda: self._meta.change(
                        inode,
                        wire_pb2.META_SETATTR,
                        request,
                        meta_pb2.Entry,
                        uid=caller.uid,
                        gid=caller.gid,
                        file=file,
                        once=True,
                    ),
                )
            )
        finally:
            self._writer.end_cut(file)
            self._reader.changed(file)
        return self._unreported.merged(attr)

    async def _change(
        self,
        inode: int,
        method: int,
        request: meta_pb2.SetAttrRequest | meta_pb2.SetXattrRequest | meta_pb2.RemoveXattrRequest,
        caller: Caller,
    ) -> Attr:
        """Send a change of an inode's attributes, and cache the attributes of the reply."""
        return self._inodes.take(
            await self._meta.change(
                inode, method, request, meta_pb2.Entry, uid=caller.uid, gid=caller.gid, once=True
            )
        )

    async def birth_ns(self, inode: int) -> int:
        """Creation time of the inode; 0 if its record has none. The time never changes."""
        request = meta_pb2.GetAttrRequest(inode=inode, birth=True)
        return (await self._meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)).attr.birth_ns

    async def spread(self, inode: int, caller: Caller) -> Attr:
        """Turn an empty directory into a striped directory. DirectoryNotEmpty, NotADirectory."""
        self._cache.forget_attr(inode)
        request = meta_pb2.SetAttrRequest(inode=inode, valid=_WIDE)
        return await self._change(inode, wire_pb2.META_SETATTR, request, caller)

    async def hand_down(self, inode: int, caller: Caller, *, replicas: int = 0, chunk_bytes: int = 0) -> Attr:
        """Set the replicas and chunk size for new files and directories in this directory.

        0 leaves a value unchanged. Existing files stay as they are. InvalidRequest: impossible values.
        NotADirectory.
        """
        request = meta_pb2.SetAttrRequest(
            inode=inode, replicas=replicas, valid=(_REPLICAS if replicas else 0)
        )
        if chunk_bytes:
            request.valid |= _CHUNK
            request.chunk_bits = layout_of(chunk_bytes).chunk_bits
        self._cache.forget_attr(inode)
        return await self._change(inode, wire_pb2.META_SETATTR, request, caller)

    async def access(self, inode: int, mask: int, caller: Caller) -> None:
        """Raise AccessDenied unless the mode gives `mask` (R_OK, W_OK, X_OK) to the caller.

        Considers one group of the caller only; for a mount the kernel checks permissions instead.
        """
        attr = await self.getattr(inode)
        if self._parts.squashes_root and caller.uid == 0:
            caller = Caller(ANONYMOUS_ID, caller.gid or ANONYMOUS_ID)
        if caller.uid == 0:
            if mask & os.X_OK and not attr.mode & 0o111 and not stat.S_ISDIR(attr.mode):
                raise AccessDenied
            return
        shift = 6 if caller.uid == attr.uid else 3 if caller.gid == attr.gid else 0
        if mask & ~(attr.mode >> shift) & 7:
            raise AccessDenied

    # -- extended attributes -------------------------------------------------------------------------------------------

    async def _has_none(self, inode: int) -> bool:
        """Whether the inode surely has no extended attributes; a kernel asks at every write."""
        attr = self._cache.attr(inode, self._options.attr_s)
        return attr is not None and not attr.flags & XATTR_FLAG

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        if await self._has_none(inode):
            raise NoAttribute
        request = meta_pb2.GetXattrRequest(inode=inode, name=name)
        return (await self._meta.ask(inode, wire_pb2.META_GETXATTR, request, meta_pb2.GetXattrReply)).value

    async def setxattr(self, inode: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:
        if not name:
            raise InvalidRequest("an attribute needs a name")
        if len(name) > XATTR_NAME_BYTES_MAX:
            raise RangeTooSmall("an attribute's name has at most 255 bytes")
        if len(value) > XATTR_VALUE_BYTES_MAX:
            raise TooBig("an attribute's value has at most 64 KiB")
        request = meta_pb2.SetXattrRequest(inode=inode, name=name, value=value, flags=flags)
        await self._change(inode, wire_pb2.META_SETXATTR, request, caller)

    async def listxattr(self, inode: int) -> list[bytes]:
        if await self._has_none(inode):
            return []
        request = meta_pb2.ListXattrRequest(inode=inode)
        return list(
            (await self._meta.ask(inode, wire_pb2.META_LISTXATTR, request, meta_pb2.ListXattrReply)).names
        )

    async def removexattr(self, inode: int, name: bytes, caller: Caller) -> None:
        if await self._has_none(inode) and not (self._meta.once and self._meta.once.was_sent()):
            raise NoAttribute
        request = meta_pb2.RemoveXattrRequest(inode=inode, name=name)
        await self._change(inode, wire_pb2.META_REMOVEXATTR, request, caller)


class PoolSpace:
    """The sizes of the pool and its volumes, for statfs(2)."""

    def __init__(self, parts: ClientParts) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._view = parts.view
        self._meta = parts.meta
        self._chunks = parts.chunks
        self._inodes = parts.inodes
        self._known: tuple[StatFs, float] | None = None  # sizes of the pool, and until when they are used
        self._space: dict[int, tuple[int, int, float]] = {}  # target -> capacity, free, time of that status

    def forget(self) -> None:
        """Ask the targets again at the next call, however old the known sizes are."""
        self._known = None

    async def statfs(self, inode: int = ROOT_INODE) -> StatFs:
        """Sizes for statfs(2): quotas of the inode's volume, and for the rest the pool's sizes.

        See `statfs_of_pool`.
        """
        pool = await self.statfs_of_pool()
        volume = 0 if inode == ROOT_INODE else await self._inodes.volume_of(inode)
        if not volume:
            return pool
        state = (
            await self._meta.ask(
                volume, wire_pb2.META_VOLUME, meta_pb2.VolumeRequest(inode=volume), meta_pb2.VolumeReply
            )
        ).volume
        if state.bytes_max:
            free = max(0, state.bytes_max - state.bytes_used) // BLOCK_BYTES
            pool = pool._replace(
                blocks_total=state.bytes_max // BLOCK_BYTES,
                blocks_free=free,
                blocks_available=min(free, pool.blocks_available),
            )
        if state.files_max:
            pool = pool._replace(
                files_total=state.files_max, files_free=max(0, state.files_max - state.files_used)
            )
        return pool

    async def statfs_of_pool(self) -> StatFs:
        """Sizes of the pool, at most STATFS_AGE_S (a second) old.

        A silent target counts with its last figures, for STATFS_KEPT_S. Unavailable: a target with data has
        no such figures; the rest of the pool alone would look like a full pool. A target that holds no data
        at the moment counts as having no free space instead.
        """
        now_s = self._clock.boottime_s()
        if self._known is not None and self._known[1] > now_s:
            return self._known[0]
        pool_map = self._view.map
        table = pool_map.table_by_id.get(pool_map.settings.replicas) or (
            pool_map.tables[0] if pool_map.tables else None
        )
        chains = (
            Counter(target for chain in table.chains for target in chain.targets)
            if table is not None
            else Counter()
        )
        targets = [target for target in pool_map.targets if not target.is_over]
        spaces = await asyncio.gather(*(self._space_of(target, target.id in chains) for target in targets))
        space_by_target = {target.id: space for target, space in zip(targets, spaces, strict=True)}
        capacity = {target: space[0] for target, space in space_by_target.items()}
        free = {target: space[1] for target, space in space_by_target.items()}
        # chunks spread evenly over the chains, so the pool is full when its first target is full
        replicas = max(1, pool_map.settings.replicas)
        available = min(
            (free.get(t, 0) * CHAINS_PER_TABLE // count for t, count in chains.items()), default=0
        )
        available = min(available, sum(free.values()) // replicas)
        replies = await self._inodes.ask_all(
            wire_pb2.META_STATFS, meta_pb2.StatFsReply, meta_pb2.StatFsRequest
        )
        files, files_max = sum(reply.files for reply in replies), sum(reply.files_max for reply in replies)
        found = StatFs(
            sum(capacity.values()) // replicas // BLOCK_BYTES,
            sum(free.values()) // replicas // BLOCK_BYTES,
            available // BLOCK_BYTES,
            BLOCK_BYTES,
            max(files_max, files),
            max(0, files_max - files),
            NAME_BYTES_MAX,
        )
        self._known = found, self._clock.boottime_s() + STATFS_AGE_S
        return found

    async def _space_of(self, target: Target, holds: bool) -> tuple[int, int, float]:
        """(capacity, free bytes, time) of a target. `holds`: whether the target has chunks of the pool."""
        now_s = self._clock.boottime_s()
        known = self._space.get(target.id)
        if known is not None and known[2] + STATFS_KEPT_S < now_s:
            known = None
        if known is None and not holds:
            known = target.capacity_bytes, 0, now_s
        wait_s = min(5.0 if known is None else STATFS_SILENT_S, self._options.deadline_s)
        try:
            raw = await self._chunks.ask_target(
                target.id, wire_pb2.DATA_STATUS, data_pb2.DataStatusRequest(target=target.id), now_s + wait_s
            )
        except Unavailable:
            if known is None:
                raise
            return known
        status = decoded(data_pb2.DataStatusReply, raw)
        free = max(0, int(status.capacity_bytes * FULL_SHARE) - status.used_bytes)
        self._space[target.id] = found = status.capacity_bytes, free, self._clock.boottime_s()
        return found
