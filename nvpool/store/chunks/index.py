"""The chunk index in decoded form, with a cache of recently used records.

The cache has two generations: a used entry moves to the young one; when the young one reaches half of the
bound, it replaces the old one and a new, empty one begins. So a hit costs one dict look-up, and nothing is
sorted. The bound counts segments (about 1 KiB each).

An entry belongs to the event loop, and the write that changes the chunk changes the entry in place; no caller
may keep an entry over an await. The users are the block store and its readers.
"""

from __future__ import annotations

from itertools import islice

from nvpool.core.errors import CorruptRecord, WrongFormat
from nvpool.core.units import CHUNK_BYTES_MAX
from nvpool.kv.api import Kv
from nvpool.store.chunks.api import ChunkDescription
from nvpool.store.disk.index_records import (
    NO_BLOCKS,
    SEGMENT_BITS,
    SEGMENT_BLOCKS,
    SEGMENT_MASK,
    Head,
    IndexSegment,
    InodeRecord,
    blocks_there,
    decode_inode,
    decode_segment,
    extent_count,
    inode_end_key,
    inode_key,
    segment_key,
    split_segment_key,
)
from nvpool.store.disk.unknown_inodes import UnknownInodes

SEGMENTS_MAX = CHUNK_BYTES_MAX >> 12 >> SEGMENT_BITS
EXTENT_RECORDS = 1024
"""Records examined for one answer about extents: 256 MiB without holes, three milliseconds."""
_NO_RECORD = InodeRecord()


class Chunk:
    """Cached chunk.

    `version` 0: no such chunk. `segments[n]` None, or after the end of the list: not read yet.
    """

    __slots__ = ("inode", "index", "version", "cut", "requests", "table", "segments")

    def __init__(self, inode: int, index: int):
        self.inode = inode
        self.index = index
        self.version = 0
        self.cut = 0
        self.requests: tuple[tuple[int, int, int], ...] = ()
        self.table = 1
        self.segments: list[IndexSegment | None] = []


class Index:
    """Cached chunk index of a store.

    `young` and `old` are the two generations. `weight` is the size of the young one; from `generation_max` on
    it becomes the old one. `unknown` has the inodes of which the index has nothing.
    """

    def __init__(self, kv: Kv, segments_max: int):
        self._kv = kv
        self.unknown = UnknownInodes(kv)
        self.generation_max = max(16, segments_max // 2)
        self.weight = 0
        self.young: dict[tuple[int, int], Chunk] = {}
        self.old: dict[tuple[int, int], Chunk] = {}
        self._inodes: dict[int, InodeRecord] = {}

    def chunk(self, inode: int, index: int) -> Chunk:
        """Return the chunk. CorruptRecord, WrongFormat: its record is unreadable."""
        name = (inode, index)
        found = self.young.get(name)
        if found is None:
            found = self.old.pop(name, None)
            if found is None:
                if self.unknown.has(inode):
                    return self.add(inode, index)
                key = segment_key(inode, index, 0)
                found = self._decoded(inode, index, key, self._kv.get(key))
            self._keep(name, found)
        return found

    def add(self, inode: int, index: int) -> Chunk:
        """Cache a chunk that does not exist, and return it."""
        chunk = Chunk(inode, index)
        self._keep((inode, index), chunk)
        return chunk

    def look_up(self, names: set[tuple[int, int]]) -> None:
        """Look up those of these chunks (inode, index) that are not cached, in one transaction.

        At most half a generation of chunks is looked up. If a record is damaged, nothing is cached: a later
        look-up of that chunk alone reports the error.
        """
        keys = {
            segment_key(inode, index, 0): (inode, index)
            for inode, index in islice(names, self.generation_max // 2)
            if (inode, index) not in self.young and (inode, index) not in self.old
        }
        if len(keys) < 2:
            return
        try:
            found = [
                self._decoded(*name, key, raw)
                for (key, name), raw in zip(keys.items(), self._kv.get_many(list(keys)), strict=True)
            ]
        except (CorruptRecord, WrongFormat):
            return
        for chunk in found:
            self._keep((chunk.inode, chunk.index), chunk)

    def _keep(self, name: tuple[int, int], chunk: Chunk) -> None:
        if self.weight >= self.generation_max:
            self.old, self.young, self.weight = self.young, {}, 0
        self.weight += 1 + len(chunk.segments)
        self.young[name] = chunk

    @staticmethod
    def _decoded(inode: int, index: int, key: bytes, raw: bytes | None) -> Chunk:
        chunk = Chunk(inode, index)
        if raw is not None:
            segment, head = decode_segment(key, raw)
            if head is None:
                raise CorruptRecord(f"chunk {index} of inode {inode} has no head")
            chunk.version, chunk.cut, chunk.requests, chunk.table = head
            chunk.segments.append(segment)
        return chunk

    def segment(self, chunk: Chunk, number: int) -> IndexSegment:
        segments = chunk.segments
        if number < len(segments):
            found = segments[number]
            if found is not None:
                return found
        elif not chunk.version:
            return NO_BLOCKS
        key = segment_key(chunk.inode, chunk.index, number)
        raw = self._kv.get(key)
        found = decode_segment(key, raw)[0] if raw is not None else NO_BLOCKS
        self.store(chunk, number, found)
        self.weight += 1
        return found

    def places(self, chunk: Chunk, block: int, count: int) -> list[int]:
        """Return the disk blocks of `count` blocks, 0 for each hole."""
        places: list[int] = []
        end = block + count
        while block < end:
            within = block & SEGMENT_MASK
            wanted = min(SEGMENT_BLOCKS - within, end - block)
            found = self.segment(chunk, block >> SEGMENT_BITS).disk[within : within + wanted]
            places += found
            places += [0] * (wanted - len(found))
            block += wanted
        return places

    @staticmethod
    def store(chunk: Chunk, number: int, segment: IndexSegment) -> None:
        """Set the cached state of a segment."""
        segments = chunk.segments
        if number >= len(segments):
            segments.extend([None] * (number + 1 - len(segments)))
        segments[number] = segment

    def forget(self, inode: int, index: int) -> None:
        self.young.pop((inode, index), None)
        self.old.pop((inode, index), None)

    def clear(self) -> None:
        self.young, self.old, self.weight = {}, {}, 0
        self._inodes.clear()

    def inode(self, inode: int) -> InodeRecord:
        found = self._inodes.get(inode)
        if found is None:
            if self.unknown.has(inode):
                return _NO_RECORD
            key = inode_key(inode)
            raw = self._kv.get(key)
            found = decode_inode(key, raw) if raw is not None else _NO_RECORD
            if len(self._inodes) >= self.generation_max:
                self._inodes.clear()
            self._inodes[inode] = found
        return found

    def set_inode(self, inode: int, record: InodeRecord | None) -> None:
        self._inodes[inode] = record or _NO_RECORD

    def records(
        self, inode: int, first: int, limit: int, until: int = 1 << 32
    ) -> list[tuple[tuple[int, int, int], bytes, bytes]]:
        """Return up to `limit` segment records of an inode.

        They are in the chunks from index `first` to before `until`. Each is ((inode, index, segment), key,
        value).
        """
        end = segment_key(inode, until, 0) if until < 1 << 32 else inode_end_key(inode)
        pairs = self._kv.scan(segment_key(inode, min(first, 0xFFFFFFFF), 0), end, limit)
        return [(split_segment_key(key), key, raw) for key, raw in pairs]

    def describe(self, inode: int, first: int, limit: int) -> tuple[list[ChunkDescription], bool]:
        """See ChunkStore.describe."""
        found: list[ChunkDescription] = []
        while True:
            begun = self.records(inode, first, 1)
            if not begun or first > 0xFFFFFFFF:
                return found, False
            if len(found) == limit:
                return found, True
            index = begun[0][0][1]
            blocks = extents = end = 0
            head = Head(0)
            for (_, number, segment), key, raw in self.records(inode, index, SEGMENTS_MAX):
                if number != index:
                    break
                decoded, its_head = decode_segment(key, raw)
                head = its_head or head
                extents += extent_count(raw)
                blocks += len(decoded.disk) - decoded.disk.count(0)
                if decoded.disk:
                    end = (segment << SEGMENT_BITS) + len(decoded.disk) << 12
            found.append(ChunkDescription(index, head.version, blocks, extents, head.cut, end))
            first = index + 1

    def extents(self, inode: int, first: int, until: int) -> tuple[list[tuple[int, int, int]], int]:
        """See ChunkStore.extents."""
        records = self.records(inode, first, EXTENT_RECORDS, until)
        goes_on = until
        if len(records) == EXTENT_RECORDS:
            goes_on = records[-1][0][1]  # the last chunk may be incomplete
        found: list[tuple[int, int, int]] = []
        for (_, index, segment), key, raw in records:
            if index == goes_on:
                break
            for begin, count in blocks_there(key, raw):
                begin += segment << SEGMENT_BITS
                if found and found[-1][0] == index and sum(found[-1][1:]) == begin:
                    found[-1] = index, found[-1][1], found[-1][2] + count
                else:
                    found.append((index, begin, count))
        return found, goes_on

    def inodes(self, after: int, limit: int) -> tuple[list[int], bool]:
        """See ChunkStore.inodes."""
        found: list[int] = []
        while True:
            first = inode_end_key(after) if after else b"c"
            try:
                pairs = self._kv.scan(first, b"d", 1)
                if not pairs:
                    return found, False
                key = pairs[0][0]
            except CorruptRecord as error:  # a damaged record: its inode has something here
                if not first <= error.key < b"d":
                    raise
                key = error.key
            if len(found) == limit:
                return found, True
            after = split_segment_key(key)[0]
            found.append(after)
