"""The file of `nvpool dump`: all metadata records of a pool at one moment, and back.

    line 1     "nvpool dump 1\\n"
    line 2     one JSON object: pool, name, settings, shards, partitions, software, made_ms
    frames     shard u32 · length u32 · CRC32C of the records u32, little-endian · records (docs/internals/formats/dump.md)
    end        0xFFFFFFFF u32 · 8 u32 · CRC32C u32 · count of all records u64

Written whole or not at all; checked whole before the first record of it is loaded. A dump holds no file contents: those are on
the targets, and a load looks at some files whether they are there. Called by `nvpool dump` and `nvpool load`.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from nvpool.core.checksum import crc32c
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import CorruptRecord, InvalidRequest, NvpoolError, WrongFormat, from_os_error
from nvpool.core.version import VERSION
from nvpool.poolmap.layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partition_moves import ranges_of
from nvpool.rpc.api import PAYLOAD_BYTES_MAX
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2
from nvpool.sdk.admin.calls import Asking
from nvpool.sdk.admin.snapshot_barrier import Begun, walk_at_all
from nvpool.sdk.fsck.check import check_metadata
from nvpool.sdk.fsck.report import Checkup, Problem

if TYPE_CHECKING:
    from nvpool.client.session import Client

MAGIC = b"nvpool dump 1\n"
_FRAME = struct.Struct("<III")
_COUNT = struct.Struct("<Q")
END_OF_FRAMES = 0xFFFFFFFF
RECORDS_A_STEP = 5000
HEADER_BYTES_MAX = 1 << 20
SAMPLE_MAX = 64
"""Files whose contents are looked for after a load: enough that a share of a twentieth that is missing hardly hides."""
CHECKS_MAX = 4
"""Fscks after a load, each of which mends what it finds: what one has mended may show the next a sum that is wrong. Two have
always been enough."""


@dataclass
class Loaded:
    """What a load has put into a pool, and what it found of it there."""

    records: int = 0
    problems: list[Problem] = field(default_factory=list)
    """What the records said against one another, all of it mended but for the last `left`."""
    left: int = 0
    files_sampled: int = 0
    files_without_data: int = 0
    """Of those that were sampled: they have a size, and no target has anything of them. They read as zeros."""
    unanswered: str = ""
    """Why some contents could not be looked for."""


class _File(NamedTuple):
    inode: int
    table: int


class _Sample:
    """Up to SAMPLE_MAX files with contents, spread evenly over what it is shown, of however many."""

    def __init__(self) -> None:
        self._kept: list[_File] = []
        self._stride = 0  # lines that are not looked at between two files
        self._left = 0

    def look(self, lines: bytes) -> None:
        for line in lines.splitlines():
            self._left -= 1
            if self._left >= 0:
                continue
            try:
                row = msgspec.json.decode(line, type=dict)
                if row["type"] != "inode" or not stat.S_ISREG(row["mode"]) or not row["links"] or not row["size"] \
                        or not row["blocks"]:
                    continue
                self._kept.append(_File(row["inode"], row["table"]))
            except (msgspec.DecodeError, LookupError, TypeError):
                continue  # the shard says what is wrong with it
            self._left = self._stride
            if len(self._kept) >= 2 * SAMPLE_MAX:
                del self._kept[1::2]
                self._stride = 2 * self._stride + 1

    def files(self) -> list[_File]:
        return [self._kept[at * len(self._kept) // SAMPLE_MAX] for at in range(SAMPLE_MAX)] \
            if len(self._kept) > SAMPLE_MAX else self._kept


async def dump(client: Client, path: str, on_records: Callable[[int], None] = lambda count: None) -> int:
    """Write all metadata of the pool to the file `path`; how many records. It is that of one moment, while the pool serves.

    On return the file is whole and synced under its name; otherwise nothing is there under it. An existing file is replaced.
    A shard that gets another primary meanwhile, or leaves, ends nothing: it is written anew, and `on_records` counts from 0.
    Errors of the shard; NoSpace, AccessDenied, DriveFailed of the local file.
    """
    part, count = f"{path}.part-{os.getpid()}", 0

    async def write(begun: Begun) -> None:
        nonlocal count
        count = await _write(client, begun, file, on_records)

    def anew(reason: str) -> None:
        on_records(0)
        file.seek(0)
        file.truncate()

    try:
        with open(part, "xb") as file:  # noqa: ASYNC230 - a process of its own that does nothing else
            await walk_at_all(client, write, anew, dump=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise from_os_error(error, f"writing {path}") from error
    finally:
        if os.path.exists(part):  # noqa: ASYNC240
            os.unlink(part)
    return count


async def _write(client: Client, begun: Begun, file: BinaryIO, on_records: Callable[[int], None]) -> int:
    pool_map, asking, count = client.pool_map, Asking(client), 0
    header = {"pool": pool_map.pool_id, "name": pool_map.name, "settings": msgspec.to_builtins(pool_map.settings),
              "shards": list(begun.cursors),
              "partitions": _division(begun.holders), "software": f"nvpool {VERSION}",
              "made_ms": SYSTEM_CLOCK.wall_ns() // 1_000_000}
    file.write(MAGIC + json.dumps(header).encode() + b"\n")
    for shard, cursor in begun.cursors.items():
        done = False
        while not done:
            request = meta_pb2.DumpRequest(cursor=cursor, limit=RECORDS_A_STEP)
            reply, records = await asking.shard(shard, wire_pb2.META_DUMP, request, meta_pb2.DumpReply)
            if len(records):
                file.write(_FRAME.pack(shard, len(records), crc32c(records)))
                file.write(records)
            count += reply.records
            on_records(count)
            cursor, done = reply.cursor, reply.done
    end = _COUNT.pack(count)
    file.write(_FRAME.pack(END_OF_FRAMES, len(end), crc32c(end)) + end)
    return count


def frames(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(shard, records) of each frame, checked; then ends if the end mark is there. `file` stands behind the header.

    CorruptRecord when the file is cut short or a frame is not as it was written.
    """
    while True:
        head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            raise CorruptRecord("the dump is cut short")
        shard, length, checksum = _FRAME.unpack(head)
        if length > PAYLOAD_BYTES_MAX:
            raise CorruptRecord("the dump has a frame that is too long to be one")
        records = file.read(length)
        if len(records) < length:
            raise CorruptRecord("the dump is cut short")
        if crc32c(records) != checksum:
            raise CorruptRecord(f"a frame of the dump is not as it was written (before byte {file.tell()})")
        if shard == END_OF_FRAMES:
            if length != _COUNT.size or file.read(1):
                raise CorruptRecord("the dump does not end where it should")
            return
        yield shard, records


def read_header(file: BinaryIO) -> dict[str, Any]:
    """WrongFormat when `file` is no dump of a version that is known here."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise WrongFormat(f"{file.name} is not a metadata dump that this version can read: its first line is not "
                          f"{MAGIC.decode().strip()!r}; make one with: nvpool dump OLD_POOL FILE")
    try:
        header = json.loads(file.readline(HEADER_BYTES_MAX))
        if not isinstance(header, dict) or not isinstance(header.get("shards"), list):
            raise ValueError
    except ValueError:
        raise CorruptRecord(f"the second line of {file.name} can not be read") from None
    return header


async def load(client: Client, path: str, on_records: Callable[[int], None] = lambda count: None) -> Loaded:
    """Put the records of the dump `path` into the pool, which must be empty.

    The pool may be divided over shards in another way than the one that was dumped: then each shard is sent all of it.
    The whole file is checked first: WrongFormat, CorruptRecord, or InvalidRequest when the pool has other settings, and nothing
    is changed. What the shard refuses (a pool that is not empty) comes as its error. When a load is broken off the
    pool is half loaded: destroy it and begin again. Behind the last record the pool serves, and is checked and mended
    (`nvpool fsck --repair` does it again, should this end before), and the contents of some files are looked for.
    """
    pool_map, asking, loaded, sample = client.pool_map, Asking(client), Loaded(), _Sample()
    try:
        with open(path, "rb") as file:  # noqa: ASYNC230
            header = read_header(file)
            begin = file.tell()
            here = msgspec.to_builtins(pool_map.settings)
            if header.get("settings") != here:
                raise InvalidRequest(f"the dump is of a pool with the settings {header.get('settings')}, this one has {here}")
            last: dict[int, int] = {}
            for at, (shard, _) in enumerate(frames(file)):
                last[shard] = at
            if not set(last) <= set(header["shards"]):
                raise CorruptRecord("the dump has records of a shard that its header does not name")
            file.seek(begin)
            taken: dict[int, int] = {}
            alike = _divided_alike(header, pool_map)
            everybody = tuple(shard.id for shard in pool_map.shards)
            end = max(last.values(), default=-1)

            async def give(to: int, records: bytes, at_end: bool) -> None:
                request = meta_pb2.LoadRequest(first=to not in taken, last=at_end)
                taken[to] = taken.get(to, 0)
                reply, _ = await asking.shard(to, wire_pb2.META_LOAD, request, meta_pb2.LoadReply, (records,))
                taken[to] = reply.records  # of the whole load so far

            for at, (shard, records) in enumerate(frames(file)):
                await asyncio.gather(*(give(to, records, at == (last[shard] if alike else end))
                                       for to in ((shard,) if alike else everybody)))
                loaded.records = sum(taken.values())
                on_records(loaded.records)
                sample.look(records)
    except OSError as error:
        raise from_os_error(error, f"reading {path}") from error
    await _settle(client, loaded)
    await asyncio.gather(*[_look_for(asking, file, loaded) for file in sample.files()])
    return loaded


def _divided_alike(header: dict[str, Any], pool_map: PoolMap) -> bool:
    """Whether each shard of the pool has the partitions of the one with its number in the pool that was dumped."""
    if len(pool_map.shards) == 1:
        return bool(header["shards"] == [pool_map.shards[0].id])
    return bool(header["shards"] == [shard.id for shard in pool_map.shards]
                and header.get("partitions") == _division(pool_map.shard_of_partition))


def _division(holders: Sequence[int]) -> list[list[int]]:
    return [[part.first, part.count, part.shard] for part in ranges_of(holders)]


async def _settle(client: Client, loaded: Loaded) -> None:
    """Mend what the records say against one another, until nothing is found."""
    for _ in range(CHECKS_MAX):
        checkup = Checkup()
        await check_metadata(client, checkup, repair=True)
        loaded.left = checkup.found
        if not checkup.found:
            return
        loaded.problems += checkup.problems


async def _look_for(asking: Asking, file: _File, loaded: Loaded) -> None:
    """Whether any target has anything of the file."""
    table = asking.pool_map.table_by_id.get(file.table)
    likely = table.chains[chain_of(file.inode, 0)].targets if table else ()
    others = {target for chain in table.chains for target in chain.targets} - set(likely) if table else ()
    try:
        for target in (*likely, *others):
            request = data_pb2.DescribeRequest(target=target, inode=file.inode, limit=1)
            if (await asking.target(target, wire_pb2.DATA_DESCRIBE, request, data_pb2.DescribeReply)).chunks:
                break
        else:
            loaded.files_without_data += 1
        loaded.files_sampled += 1
    except NvpoolError as error:
        loaded.unanswered = str(error)
