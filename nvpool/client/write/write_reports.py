"""Reports of a client's writes to the metadata service, and this client's view of files with unreported writes.

A report has the end of the stored bytes and how many blocks they use; the reply's attributes go
to the cache. Until then only this client knows the new size: `UnreportedWrites` adds it to attributes, or
reports the writes before the attributes matter. Used by client/vfs and by the writer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nvpool.client.rpc.change_fast_path import ChangeSubmitter, OnEnd, SubmittedChange
from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.metadata_cache import MetadataCache, OpenInode
from nvpool.client.state.vfs_types import FrontEndCallbacks
from nvpool.client.write.quota_reservations import QuotaReservations
from nvpool.client.write.writeback import Writer
from nvpool.core.errors import NotFound
from nvpool.rpc.messages.meta_messages import Attr, ReportRequest
from nvpool.rpc.v1 import meta_pb2, wire_pb2

_METHOD, _REPLY = wire_pb2.META_REPORT, meta_pb2.AttrReply


class WriteReports:
    """Reports writes to the service, and stores the attributes of the replies in the cache."""

    def __init__(self, meta: MetaClient, cache: MetadataCache, callbacks: FrontEndCallbacks) -> None:
        self._meta = meta
        self._submitter: ChangeSubmitter = meta.submitter
        self._cache = cache
        self._callbacks = callbacks

    async def report(
        self, file: OpenInode, end: int, stored: int, wrote: bool, sync: bool, withdrawn: int = 0
    ) -> None:
        """Report the end of the stored bytes; on return the cache has the attributes of the reply.

        `stored`: bytes that stores have beyond those of earlier reports. Raises what MetaClient.change raises.
        """
        request = meta_pb2.ReportRequest(
            inode=file.inode,
            cut=file.cut,
            end=end,
            wrote=wrote,
            sync=sync,
            blocks_delta=(stored + 511) // 512,
            withdrawn=withdrawn,
        )
        self.reported(
            file,
            wrote,
            await self._meta.change(file.inode, wire_pb2.META_REPORT, request, meta_pb2.AttrReply, file=file),
        )

    def begin_report(
        self, file: OpenInode, end: int, stored: int, wrote: bool, on_end: OnEnd
    ) -> SubmittedChange | None:
        """Submit `report` without a task if nothing has to be awaited; else return None and do nothing.

        `on_end(None, error)` is called before the attributes of the reply are cached.
        """
        request = ReportRequest.__new__(ReportRequest)
        request.clear()
        request.inode, request.cut, request.end, request.wrote = file.inode, file.cut, end, wrote
        request.blocks_delta = stored + 511 >> 9
        return self._submitter.begin(
            request.inode,
            _METHOD,
            request,
            _REPLY,
            partial(self._begun_reported, file, wrote, on_end),
            0,
            0,
            file,
            0,
        )

    def _begun_reported(
        self,
        file: OpenInode,
        wrote: bool,
        on_end: OnEnd,
        reply: meta_pb2.AttrReply,
        error: BaseException | None,
    ) -> None:
        """Complete a submitted report. Without an error, `reply` is the service's."""
        on_end(None, error)
        if error is None:
            self.reported(file, wrote, reply)

    def reported(self, file: OpenInode, wrote: bool, reply: meta_pb2.AttrReply) -> None:
        """Cache the attributes of a reply to a report, and notify the front end if the file was written."""
        file.delegation = None
        if reply.HasField("attr"):
            self._cache.put_attr(reply.attr, ours=True)
            if wrote:
                self._callbacks.on_reported(file.inode, reply.attr.change)
        else:
            self._cache.forget_attr(file.inode)


class UnreportedWrites:
    """This client's view of files whose writes the service does not know yet."""

    def __init__(self, cache: MetadataCache, writer: Writer, rooms: QuotaReservations) -> None:
        self._cache = cache
        self._writer = writer
        self._rooms = rooms

    async def settle(self, inode: int) -> None:
        """Report this client's writes to the inode before its attributes are read.

        The service sets the time of a write, and that time must not change again when the file is closed.
        """
        file = self._cache.open.get(inode)
        if file is not None and file.written is not None and file.written.unsettled:
            await self._writer.store(file)
            await self._writer.settle(file)

    def merged(self, attr: Attr) -> Attr:
        """`attr` with this client's unreported writes added. The caller must not modify the result."""
        file = self._cache.open.get(attr.inode)
        if file is None or file.written is None or file.written.end <= attr.size:
            return attr
        seen = Attr.FromString(attr.SerializeToString())
        seen.size = file.written.end
        seen.blocks = max(attr.blocks, (seen.size + 511) // 512)
        return seen

    async def publish(self, file: OpenInode) -> None:
        """Store and report this client's writes, so that the next lock holder can see them."""
        if file.written is not None and file.written.unsettled:
            await self._writer.store(file)
            try:
                await self._writer.settle(file)
            except NotFound:
                pass  # the file was removed: no reader can ever see it

    async def grow(self, file: OpenInode, change: Callable[[], Awaitable[Any]]) -> Any:
        """Await `change`, which may make an open file longer; see QuotaReservations.repeat for retries with quotas."""
        if not file.volume:
            return await change()
        return await self._rooms.repeat(file, file.volume, change, lambda: self._writer.settle(file))
