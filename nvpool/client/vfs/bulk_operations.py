"""Operations on many files together: walk, look up, open and read whole files.

Requests are batched: one message for each shard and directory level, and one for each target. A bulk look-up
(LOOKUP_MANY) goes to each shard once, whatever directories the names are in; its results are cached like
those of single look-ups. If the result of one name needs more (an inode of another shard, a moved partition,
a refusal with details), that name alone takes the path of a single look-up (Lookups). Used by the SDK.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterable, Sequence

from nvpool.client.state.metadata_cache import DIVIDED_FLAG
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.client.vfs.client_parts import ClientParts
from nvpool.client.vfs.files import Files
from nvpool.client.vfs.namespace import Lookups, check_name
from nvpool.client.vfs.striped_dirs import StripedDirectories
from nvpool.core import errors
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.containers.buffer_pool import PayloadBuffers
from nvpool.core.errors import DeadlineExceeded, NameTooLong, NotFound, NvpoolError, SpreadDirectory
from nvpool.core.grants import READ
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.messages.read_write_codec import pack_inodes
from nvpool.rpc.v1 import meta_pb2, wire_pb2

NAMES_MAX = 1000
"""Names in one message."""
_OPERATIONS_PER_BATCH = 64
"""Concurrent operations where each name needs its own."""
_ELSEWHERE_MAX = 65536
_spares = PayloadBuffers()

Place = tuple[int, bytes]
"""A name: the inode of its directory, and the name itself."""


class BulkOperations:
    """The operations on many files together."""

    def __init__(
        self, parts: ClientParts, stripes: StripedDirectories, lookups: Lookups, files: Files
    ) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._meta = parts.meta
        self._cache = parts.cache
        self._leases = parts.leases
        self._reader = parts.reader
        self._inodes = parts.inodes
        self._stripes = stripes
        self._lookups = lookups
        self._files = files
        # names with inodes of another shard: inode -> mode; and such inodes without attributes and leases so
        # far
        self._elsewhere: dict[int, int] = {}
        self._unlent: dict[int, None] = {}

    # -- walking ---------------------------------------------------------------------------------------------------------

    async def walk_many(self, places: Sequence[Place]) -> list[tuple[int, int] | NvpoolError]:
        """As `walk` for each name; return (inode, mode) or the error of its look-up.

        Only the file type in `mode` is reliable. Unknown names are looked up in bulk. A call of `open_many`
        usually follows.
        """
        found: list = [None] * len(places)
        asked = []
        for number, (parent, name) in enumerate(places):
            try:
                found[number] = self._walked_now(parent, name)
            except NvpoolError as error:
                found[number] = error
                continue
            if found[number] is None:
                asked.append(number)
        if len(asked) == 1:
            await self._walk_one(asked[0], places, found)
        elif asked:
            await self._walk_asked(asked, places, found)
        return found

    def _walked_now(self, parent: int, name: bytes) -> tuple[int, int] | None:
        if len(name) > NAME_BYTES_MAX:
            raise NameTooLong
        inode = self._cache.entry(parent, name, self._options.attr_s)
        if inode == 0:
            raise NotFound
        if inode is None:
            return None
        mode = self._cache.mode(inode) or self._elsewhere.get(inode)
        return None if mode is None else (inode, mode)

    async def _walk_one(self, number: int, places: Sequence[Place], found: list) -> None:
        try:
            attr = await self._lookups.walk(*places[number])
        except NvpoolError as error:
            found[number] = error
        else:
            found[number] = attr.inode, attr.mode

    async def _walk_asked(self, asked: list[int], places: Sequence[Place], found: list) -> None:
        alone = []
        for number, (entry, sent_s) in (await self._ask_names(asked, places)).items():
            parent, name = places[number]
            if isinstance(entry, NvpoolError):
                found[number] = entry
            elif entry is None:
                alone.append(number)
            elif entry.elsewhere:
                inode = entry.attr.inode
                self._cache.put_entry(parent, name, inode, sent_s)
                if self._leases.held(inode) is None:
                    self._unlent[inode] = None
                self._elsewhere[inode] = entry.attr.mode
                found[number] = inode, entry.attr.mode
            else:
                attr = self._learned(parent, name, entry, sent_s)
                found[number] = attr.inode, attr.mode
        for old in too_old(self._elsewhere, _ELSEWHERE_MAX):
            del self._elsewhere[old]
        await _some(alone, lambda number: self._walk_one(number, places, found))

    def _learned(self, parent: int, name: bytes, entry: meta_pb2.Entry, sent_s: float) -> Attr:
        attr = self._inodes.take(entry)
        self._cache.put_entry(parent, name, attr.inode, sent_s, self._inodes.take_lease(entry, sent_s))
        return attr

    async def _learn_unlent(self) -> None:
        """Fetch attributes and leases of directories on other shards than their names.

        The next walk then needs fewer requests.
        """
        unlent, self._unlent = self._unlent, {}
        await self._learn_attrs(unlent, 0)

    async def _learn_attrs(self, inodes: Iterable[int], rights: int) -> None:
        """Fetch attributes, leases and rights of inodes on other shards than their names.

        Sends one request per shard. Errors are ignored: an operation that needs an inode asks again.
        """
        asked: dict[int, list[int]] = {}
        for inode in dict.fromkeys(inodes):
            asked.setdefault(self._meta.shard_of(inode), []).append(inode)
        await _all(
            [
                self._learn_some_attrs(shard, some[first : first + NAMES_MAX], rights)
                for shard, some in asked.items()
                for first in range(0, len(some), NAMES_MAX)
            ]
        )

    async def _learn_some_attrs(self, shard: int, inodes: list[int], rights: int) -> None:
        request = meta_pb2.GetAttrManyRequest(inodes=pack_inodes(inodes), rights=rights)
        try:
            sent_s = await self._met_s(inodes[0])
            reply = await self._meta.ask_shard(
                shard, wire_pb2.META_GETATTR_MANY, request, meta_pb2.GetAttrManyReply
            )
            listed = DirectoryPage(reply.packed)
            grants = listed.grants(reply.grants) if reply.grants else None
        except NvpoolError:
            return
        for at, inode in enumerate(listed.inodes):
            attr = listed.attr(at)
            if not attr.flags & DIVIDED_FLAG and self._leases.is_news(inode, sent_s):
                self._cache.put_attr(attr)
                if listed.is_promised(at):
                    self._leases.take(inode, reply.lease_ms, sent_s, grants[at] if grants else b"")

    # -- bulk look-up --------------------------------------------------------------------------------------------------

    async def _ask_names(
        self, numbers: Iterable[int], places: Sequence[Place]
    ) -> dict[int, tuple[meta_pb2.Entry | NvpoolError | None, float]]:
        """Look up each number's place in bulk. Return (result, time of the request) for each number.

        A result is an entry, an error, or None: then the caller looks up this name alone, which handles
        everything that the reply asks for.
        """
        results: dict[int, tuple[meta_pb2.Entry | NvpoolError | None, float]] = {}
        left = list(numbers)
        for _ in range(2):
            asked: dict[int, list[tuple[int, int, bool]]] = {}
            for number in left:
                # a directory that is not known to be striped: its own shard says if it is
                place, spread = self._stripes.place_now(*places[number]) or (places[number][0], False)
                asked.setdefault(self._meta.shard_of(place), []).append((number, place, spread))
            await _all(
                [
                    self._ask_some(some[first : first + NAMES_MAX], places, results)
                    for some in asked.values()
                    for first in range(0, len(some), NAMES_MAX)
                ]
            )
            left = [number for number in left if isinstance(results[number][0], SpreadDirectory)]
            for number in left:
                self._stripes.learn_wide(places[number][0])
                results[number] = None, 0.0
            if not left:
                break
        return results

    async def _ask_some(
        self, some: list[tuple[int, int, bool]], places: Sequence[Place], results: dict
    ) -> None:
        """Send one bulk look-up to one shard. `some`: numbers with the result of `_place_now`."""
        order: dict[tuple[int, bool], list[int]] = {}
        for number, _, spread in some:
            order.setdefault((places[number][0], spread), []).append(number)
        request = meta_pb2.LookupManyRequest(rights=READ)
        for (parent, spread), numbers in order.items():
            request.directories.add(
                parent=parent, names=[places[number][1] for number in numbers], spread=spread
            )
        place = some[0][1]
        sent_s = self._clock.boottime_s()
        try:
            sent_s = await self._met_s(place)
            reply = await self._meta.ask(place, wire_pb2.META_LOOKUP_MANY, request, meta_pb2.LookupManyReply)
            if len(reply.found) != len(some):
                raise errors.CorruptFrame("a shard's answer to many look-ups does not fit the question")
        except NvpoolError as error:
            results.update((number, (error, sent_s)) for number, _, _ in some)
            return
        answers = iter(reply.found)
        for (parent, _), numbers in order.items():
            for number, one in zip(numbers, answers, strict=False):
                if one.error == NotFound.wire_code:
                    self._cache.put_entry(parent, places[number][1], 0, sent_s)
                    results[number] = NotFound(), sent_s
                elif one.error == SpreadDirectory.wire_code:
                    results[number] = SpreadDirectory(), sent_s
                else:
                    results[number] = None if one.error else one.entry, sent_s

    async def _met_s(self, place: int) -> float:
        """The current time, after a session at the shard exists: earlier requests bring no lease."""
        if self._meta.session_of(place):
            return self._clock.boottime_s()
        try:
            await self._meta.meet(place)
        except DeadlineExceeded:
            raise
        except NvpoolError:
            pass  # the caller's own request handles the error
        return self._clock.boottime_s()

    # -- opening and reading -------------------------------------------------------------------------------------------------

    async def open_many(
        self, places: Sequence[Place], caller: Caller
    ) -> list[FileHandle | Attr | NvpoolError]:
        """Open the named files for reading; the names are current.

        The result for each (directory, name) is a handle, which the caller releases; attributes if it is not
        a regular file; or the error of its look-up. Names and inodes under a lease need no request.
        """
        found: list = []
        asked = []
        for number, (parent, name) in enumerate(places):
            try:
                check_name(name)
            except NvpoolError as error:
                found.append(error)
                continue
            handle = self._known(parent, name)
            found.append(handle)
            if handle is None:
                asked.append(number)
        try:
            works = [self._learn_unlent()] if self._unlent else []
            await _all([*works, self._look_up_many(asked, places, found)])
            # files without a lease, because they are being changed: each is opened by its own message
            others = [
                number for number, one in enumerate(found) if isinstance(one, Attr) and stat.S_ISREG(one.mode)
            ]
            await _some(others, lambda number: self._open_one(number, found, caller))
        except BaseException:
            for one in found:
                if isinstance(one, FileHandle):
                    await self._files.release(one)
            raise
        return found

    def _known(self, parent: int, name: bytes) -> FileHandle | None:
        inode = self._cache.entry(parent, name, 0.0)
        return self._files.open_now(inode, 0) if inode else None

    async def _look_up_many(self, asked: list[int], places: Sequence[Place], found: list) -> None:
        alone, elsewhere = [], []
        for number, (entry, sent_s) in (await self._ask_names(asked, places)).items():
            if isinstance(entry, NvpoolError):
                found[number] = entry
            elif entry is None:
                alone.append(number)
            elif entry.elsewhere:
                elsewhere.append((number, entry.attr.inode, sent_s))
            else:
                attr = self._learned(*places[number], entry, sent_s)
                found[number] = self._files.open_now(attr.inode, 0) or attr
        await _some(alone, lambda number: self._look_up_one(number, places, found))
        if len(elsewhere) > 1:
            await self._learn_attrs((inode for _, inode, _ in elsewhere), READ)
            elsewhere = [one for one in elsewhere if not self._opened_elsewhere(one, places, found)]
        await _some(elsewhere, lambda one: self._look_elsewhere_one(one, places, found))

    async def _look_up_one(self, number: int, places: Sequence[Place], found: list) -> None:
        try:
            attr = await self._lookups.look_up(*places[number])  # handles the error
        except NvpoolError as error:
            found[number] = error
        else:
            found[number] = self._files.open_now(attr.inode, 0) or attr

    def _opened_elsewhere(self, one: tuple[int, int, float], places: Sequence[Place], found: list) -> bool:
        number, inode, sent_s = one
        found[number] = self._files.open_now(inode, 0)
        if found[number] is None:
            return False
        self._cache.put_entry(*places[number], inode, sent_s)
        return True

    async def _look_elsewhere_one(
        self, one: tuple[int, int, float], places: Sequence[Place], found: list
    ) -> None:
        number, inode, sent_s = one
        try:
            attr = await self._inodes.fetch(inode, READ)
        except NotFound:  # the name was removed since, or stands for another inode
            await self._look_up_one(number, places, found)
        except NvpoolError as error:
            found[number] = error
        else:
            self._cache.put_entry(*places[number], inode, sent_s)
            found[number] = self._files.open_now(inode, 0) or attr

    async def _open_one(self, number: int, found: list, caller: Caller) -> None:
        try:
            found[number] = await self._files.open(found[number].inode, 0, caller)
        except NvpoolError as error:
            found[number] = error

    async def read_whole(self, handles: Sequence[FileHandle]) -> list[memoryview]:
        """Read all bytes of each file, at its current size; one message per target.

        The caller may read the buffers but not write to them: some may share memory. Errors as
        ChunkClient.read.
        """
        found: list[memoryview] = []
        sizes = [handle.file.size for handle in handles]
        asked = []
        for number, handle in enumerate(handles):
            content = self._reader.content(handle.file)
            found.append(memoryview(content or b""))
            if content is None and sizes[number]:
                asked.append((self._reader.target_of(handle.file), number))
        asked.sort()  # ranges of one target become adjacent, so they are received directly into their place
        spans = [sizes[number] + 4095 & -4096 for _, number in asked]
        if not asked:
            return found
        into, place, plan = _spares.take(sum(spans)), 0, []
        for (_, number), span in zip(asked, spans, strict=True):
            plan.append((handles[number].file, 0, span, place))
            found[number] = into[place : place + sizes[number]].toreadonly()
            place += span
        await self._reader.read_many(plan, into)
        for _, number in asked:
            file = handles[number].file
            if file.unreported and not self._leases.keeps_bytes(file.inode):
                await self._inodes.confirm(file)
        return found


async def _all(works: list) -> None:
    """Await all coroutines to their ends; then raise the first error."""
    for error in await asyncio.gather(*works, return_exceptions=True):
        if error is not None:
            raise error


async def _some(numbers: Sequence, work) -> None:
    """Await `work` of each number, _OPERATIONS_PER_BATCH at a time."""
    for first in range(0, len(numbers), _OPERATIONS_PER_BATCH):
        await _all([work(number) for number in numbers[first : first + _OPERATIONS_PER_BATCH]])
