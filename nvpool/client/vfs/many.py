"""Many files at once: looked up, opened and read whole, in one message for each shard and one for each target."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Sequence

from nvpool.base import errors
from nvpool.base.errors import NotFound, NvpoolError
from nvpool.base.grants import READ
from nvpool.base.spares import Spares
from nvpool.client.vfs.contract import Caller, FileHandle
from nvpool.client.vfs.files import Files
from nvpool.client.vfs.names import check_name
from nvpool.wire.v1 import meta_pb2, wire_pb2
from nvpool.wire.v1.meta_pb2 import Attr

NAMES_MAX = 1000
"""In one message."""
_OPENS_AT_ONCE = 64
_spares = Spares()


class Many(Files):
    async def open_many(self, places: Sequence[tuple[int, bytes]], caller: Caller) -> list[FileHandle | Attr | NvpoolError]:
        """Open for reading what these (directory, name) stand for now. For each a handle, which is the caller's to release;
        attributes where it is no regular file; or the error of its look-up. What there are leases on is not asked for."""
        found: list[FileHandle | Attr | NvpoolError | None] = []
        asked: dict[int, list[int]] = {}
        at: dict[int, tuple[int, bool]] = {}
        for number, (parent, name) in enumerate(places):
            check_name(name)
            handle = self._known(parent, name)
            found.append(handle)
            if handle is None:
                try:
                    at[number] = await self._place(parent, name)
                except NvpoolError as error:
                    found[number] = error
                    continue
                asked.setdefault(self.meta.shard_of(at[number][0]), []).append(number)
        try:
            await _all([self._look_up_many(places, at, numbers[first:first + NAMES_MAX], found)
                        for numbers in asked.values() for first in range(0, len(numbers), NAMES_MAX)])
            # without a lease each is opened by a message of its own: what is being changed
            others = [number for number, one in enumerate(found) if isinstance(one, Attr) and stat.S_ISREG(one.mode)]
            for first in range(0, len(others), _OPENS_AT_ONCE):
                await _all([self._open_one(number, found, caller) for number in others[first:first + _OPENS_AT_ONCE]])
        except BaseException:
            for one in found:
                if isinstance(one, FileHandle):
                    await self.release(one)
            raise
        return found

    def _known(self, parent: int, name: bytes) -> FileHandle | None:
        inode = self.cache.entry(parent, name, 0.0)
        return self.open_now(inode, 0) if inode else None

    async def _look_up_many(self, places, at: dict[int, tuple[int, bool]], numbers: list[int], found: list) -> None:
        by_directory: dict[int, list[int]] = {}
        for number in numbers:
            by_directory.setdefault(places[number][0], []).append(number)
        request = meta_pb2.LookupManyRequest(rights=READ, directories=[
            meta_pb2.NamesIn(parent=parent, names=[places[number][1] for number in some], spread=at[some[0]][1])
            for parent, some in by_directory.items()])
        sent_s = self.clock.boottime_s()
        reply = await self.meta.ask(at[numbers[0]][0], wire_pb2.META_LOOKUP_MANY, request, meta_pb2.LookupManyReply)
        order = [number for some in by_directory.values() for number in some]
        if len(reply.found) != len(order):
            raise errors.CorruptFrame("a shard's answer to many look-ups does not fit the question")
        for number, one in zip(order, reply.found, strict=True):
            parent, name = places[number]
            if one.entry.elsewhere:
                found[number] = await self._looked_up(parent, name)
                continue
            if one.error:
                found[number] = await self._refused(parent, name, one.error, sent_s)
                continue
            attr = self._take(one.entry)
            self.cache.put_entry(parent, name, attr.inode, sent_s, self._leased(one.entry, sent_s))
            found[number] = self.open_now(attr.inode, 0) or attr

    async def _refused(self, parent: int, name: bytes, code: int, sent_s: float) -> Attr | NvpoolError:
        if code == NotFound.wire_code:
            self.cache.put_entry(parent, name, 0, sent_s)
            return NotFound()
        return await self._looked_up(parent, name)

    async def _looked_up(self, parent: int, name: bytes) -> Attr | NvpoolError:
        try:
            return await self._look_up(parent, name)  # which does what the error asks for
        except NvpoolError as error:
            return error

    async def _open_one(self, number: int, found: list, caller: Caller) -> None:
        try:
            found[number] = await self.open(found[number].inode, 0, caller)
        except NvpoolError as error:
            found[number] = error

    async def read_whole(self, handles: Sequence[FileHandle]) -> list[memoryview]:
        """All bytes of each file, as long as it is now. One message for each target; see ChunkClient.read for errors. The
        buffers are the caller's to look at: some may be parts of the same memory."""
        found: list[memoryview] = []
        sizes = [handle.file.size for handle in handles]
        asked = []
        for number, handle in enumerate(handles):
            content = self.reader.content(handle.file)
            found.append(memoryview(content or b""))
            if content is None and sizes[number]:
                asked.append((self.reader.target_of(handle.file), number))
        asked.sort()  # those of one target lie beside one another: they are received where they belong
        spans = [sizes[number] + 4095 & -4096 for _, number in asked]
        if not asked:
            return found
        into, place, plan = _spares.take(sum(spans)), 0, []
        for (_, number), span in zip(asked, spans, strict=True):
            plan.append((handles[number].file, 0, span, place))
            found[number] = into[place:place + sizes[number]].toreadonly()
            place += span
        await self.reader.read_many(plan, into)
        for _, number in asked:
            file = handles[number].file
            if file.untold and not self.leases.keeps_bytes(file.inode):
                await self._confirm(file)
        return found


async def _all(works: list) -> None:
    """All to their ends; then the first error."""
    for error in await asyncio.gather(*works, return_exceptions=True):
        if error is not None:
            raise error
