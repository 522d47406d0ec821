"""Tree of the shards of this benchmark: its n-th file, and the records that the service would write.

Everything lies in one directory `data` of the root: the files themselves (`one`), or directories of `per_directory` files
each (`many`), made one after the other as an import makes a training set. A file was created with a write grant, written and
closed: owner, size and three different times. Numbers are those that a service without a restart gives: 1 the root, 2 `data`.
"""

from __future__ import annotations

import random
import stat
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence

from nvpool.core.ids import COUNTER_BITS, ROOT_INODE, inode_number, partition_of
from nvpool.meta.state import records
from nvpool.meta.state.id_allocation import RESERVED
from nvpool.meta.state.records import HASH_AT, NAME_AT
from nvpool.poolmap.file_layout import Layout
from nvpool.poolmap.shards.partitions import HASH_BITS, name_hasher, partition_of_directory

HOME = b"data"
OWNER = 1000
FILE_MODE, DIRECTORY_MODE = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755
FILE_KIND, DIRECTORY_KIND = FILE_MODE >> 12, DIRECTORY_MODE >> 12

BORN_NS, EACH_NS, WRITTEN_NS = 1_760_000_000_000_000_000, 100_000, 3_000_000
"""Time of the first creation, time between two, and time between creation and close."""

PER_DIRECTORY = 1000

WRITTEN_CHANGE = 2
_VARYING, _VARYING_AT = struct.Struct("<qBI"), 6
"""Fields of a file's record that differ: time, change, size."""
_PARTITION = -1 << COUNTER_BITS

REGION_FILES = 25_000
"""Files of one directory that are sorted or put together, so that they stay in the processor's cache."""
BATCH_KEYS = 100_000
"""Least keys of a transaction; small regions share one."""

SORTING_SHARE = 0.3
"""Share of sorting in the work for the records of one directory."""

Records = dict[bytes, bytes]


def file_name(number: int) -> bytes:
    return b"%012d.jpg" % number


def directory_name(index: int) -> bytes:
    return b"%08d" % index


def size_of(number: int) -> int:
    """Bytes: from 66 to 246 KB, as photos have."""
    return 66_000 + number * 7919 % 180_000


def shuffled(items: Iterable[int]) -> list[int]:
    """The same order each time."""
    return random.Random(1).sample(found := list(items), len(found))


class Tree:
    """`per_directory` 0: all files in `data`. Names are hashed with `name_key`; directories hand down `layout`."""

    def __init__(self, files: int, per_directory: int, name_key: bytes, layout: Layout) -> None:
        self.files, self.per_directory = files, per_directory
        self.directories = -(-files // per_directory) if per_directory else 0
        self.name_key, self.name_hash = name_key, name_hasher(name_key)
        self.home = inode_number(partition_of_directory(self.name_hash(ROOT_INODE, HOME)), 2)
        self._layout = layout

    @property
    def inode_count(self) -> int:
        return self.files + self.directories + 2

    def directory(self, index: int) -> int:
        """The inode of the directory with this index."""
        partition = partition_of_directory(self.name_hash(self.home, directory_name(index)))
        return inode_number(partition, 3 + index * (self.per_directory + 1))

    def directory_key(self, index: int) -> bytes:
        """Key of its entry in `data`."""
        name = directory_name(index)
        return records.dentry_key(partition_of(self.home), self.home, self.name_hash(self.home, name), name)

    def parent_of(self, number: int) -> int:
        return self.directory(number // self.per_directory) if self.per_directory else self.home

    def inode_of(self, number: int, parent: int) -> int:
        between = number // self.per_directory + 1 if self.per_directory else 0
        return parent & _PARTITION | 3 + number + between

    # -- records ---------------------------------------------------------------------------------------------------------

    def dentry_keys(self, numbers: Iterable[int], parent: int) -> Iterator[bytes]:
        place, _ = records.dentry_range(partition_of(parent), parent)
        name_hash = self.name_hash
        for number in numbers:
            name = file_name(number)
            yield place + name_hash(parent, name) + name

    def dentries(self, numbers: Sequence[int], parent: int) -> Iterator[tuple[bytes, bytes]]:
        partition, inode_of, encode = partition_of(parent), self.inode_of, records.encode_dentry
        for number, key in zip(numbers, self.dentry_keys(numbers, parent), strict=True):
            yield key, encode(partition, inode_of(number, parent), FILE_KIND)

    def inode_keys(self, numbers: Iterable[int], parent: int) -> Iterator[bytes]:
        return (records.inode_key(self.inode_of(number, parent)) for number in numbers)

    def inodes(self, numbers: Sequence[int], parent: int) -> Iterator[tuple[bytes, bytes]]:
        """Records differ in time and size only, which are put in their places: three times as fast as to encode each of them.
        That they are the places is checked with the first of each call."""
        pattern = self._encoded(0, parent)
        before, behind, pack = pattern[:_VARYING_AT], pattern[_VARYING_AT + _VARYING.size :], _VARYING.pack
        for number, key in zip(numbers, self.inode_keys(numbers, parent), strict=True):
            value = (
                before
                + pack(BORN_NS + number * EACH_NS + WRITTEN_NS, WRITTEN_CHANGE, size_of(number))
                + behind
            )
            if number == numbers[0] and value != self._encoded(number, parent):
                raise AssertionError("the records of files are laid out in another way than is believed here")
            yield key, value

    def _encoded(self, number: int, parent: int) -> bytes:
        size, born_ns = size_of(number), BORN_NS + number * EACH_NS
        written_ns = born_ns + WRITTEN_NS
        return records.encode_inode(
            records.Inode(
                self.inode_of(number, parent),
                FILE_MODE,
                1,
                OWNER,
                OWNER,
                size,
                records.blocks_of(size),
                born_ns,
                written_ns,
                written_ns,
                WRITTEN_CHANGE,
                table=self._layout.table,
                chunk_bits=self._layout.chunk_bits,
                flags=records.TOUCHED,
                birth_ns=born_ns,
            )
        )

    def _directory_record(
        self, inode: int, parent: int, first: int, entries: int, directories: int
    ) -> tuple[bytes, bytes]:
        """Made with its first file, changed with each entry; `entries` of which `directories` are directories."""
        born_ns = BORN_NS + first * EACH_NS
        changed_ns = born_ns + max(entries - 1, 0) * EACH_NS
        return records.inode_key(inode), records.encode_inode(
            records.Inode(
                inode,
                DIRECTORY_MODE,
                2 + directories,
                OWNER,
                OWNER,
                entries,
                0,
                born_ns,
                changed_ns,
                changed_ns,
                1 + entries,
                table=self._layout.table,
                chunk_bits=self._layout.chunk_bits,
                parent=parent,
                birth_ns=born_ns,
            )
        )

    def few(self, root: records.Inode) -> Records:
        """Records that exist once: the root, which gets its entry, `data`, and the shard's counts and bounds."""
        root.links, root.size, root.change = root.links + 1, root.size + 1, root.change + 1
        hashed = self.name_hash(ROOT_INODE, HOME)
        bound = 2 + self.inode_count + RESERVED
        entries = self.directories or self.files
        return dict(
            [
                (records.inode_key(ROOT_INODE), records.encode_inode(root)),
                (
                    records.dentry_key(0, ROOT_INODE, hashed, HOME),
                    records.encode_dentry(0, self.home, DIRECTORY_KIND),
                ),
                self._directory_record(self.home, ROOT_INODE, 0, entries, self.directories),
                (records.COUNTS_KEY, records.encode_counts(self.inode_count)),
                (records.BOUNDS_KEY, records.encode_bounds(records.IssuedNumbers(bound, 1))),
            ]
        )

    def batches(self) -> Iterator[tuple[float, Records]]:
        """All the others, a range of keys after the other, each batch with its share of the work.

        Within a range records are in the order in which files are created. A leaf of the B-tree is changed only by keys of
        its own range, so the leaves come out as if all had been put in that order, without touching all of the tree for
        each batch. Ranges come in no order, as new directories do: behind the last key LMDB leaves its pages full.
        """
        batch: Records = {}
        for share, region in self._regions_of_many() if self.per_directory else self._regions_of_one():
            batch.update(region)
            ready = len(batch) >= BATCH_KEYS
            yield share, batch if ready else {}
            if ready:
                batch = {}
        yield 0.0, batch

    def _regions_of_one(self) -> Iterator[tuple[float, Records]]:
        for keys, pairs, place, bits in (
            (self.inode_keys, self.inodes, slice(2, 9), COUNTER_BITS),
            (self.dentry_keys, self.dentries, slice(HASH_AT, NAME_AT), HASH_BITS),
        ):
            count = max(1, self.files // REGION_FILES)
            regions = [array("I") for _ in range(count)]
            for number, key in enumerate(keys(range(self.files), self.home)):
                regions[int.from_bytes(key[place], "big") * count >> bits].append(number)
                if not number % REGION_FILES:
                    yield SORTING_SHARE / 2 * min(REGION_FILES, self.files) / self.files, {}
            for at in shuffled(range(count)):
                numbers, regions[at] = regions[at], array("I")
                yield (1 - SORTING_SHARE) / 2 / count, dict(pairs(numbers, self.home))

    def _regions_of_many(self) -> Iterator[tuple[float, Records]]:
        by_partition: dict[int, list[tuple[int, int]]] = {partition_of(self.home): []}
        for index in range(self.directories):
            directory = self.directory(index)
            by_partition.setdefault(partition_of(directory), []).append((index, directory))
        for partition in shuffled(by_partition):
            region: Records = {}
            if partition == partition_of(self.home):
                for directories in by_partition.values():
                    for index, directory in directories:
                        key = self.directory_key(index)
                        region[key] = records.encode_dentry(partition, directory, DIRECTORY_KIND)
            files = 0
            for index, directory in by_partition[partition]:
                first = index * self.per_directory
                numbers = range(first, min(first + self.per_directory, self.files))
                key, value = self._directory_record(directory, self.home, first, len(numbers), 0)
                region[key] = value
                for pair in zip(
                    self.dentries(numbers, directory), self.inodes(numbers, directory), strict=True
                ):
                    region.update(pair)
                files += len(numbers)
            yield files / self.files, region
