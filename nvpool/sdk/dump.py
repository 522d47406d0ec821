"""Metadata dump and load: all metadata records of a pool in one file.

    line 1     "nvpool dump 1\\n"
    line 2     one JSON object: pool, name, settings, shards, partitions, software, made_ms
    frames     shard u32 · length u32 · CRC32C of the records u32, little-endian · records (docs/internals/formats/dump.md)
    end        0xFFFFFFFF u32 · 8 u32 · CRC32C u32 · count of all records u64

The records are those of one snapshot barrier. The file is written completely or not at all. A load checks the
whole file before it loads the first record. A dump holds no file contents: those stay on the targets, and a
load checks for some files that they are there. `nvpool dump` and `nvpool load` use this module.
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
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partition_moves import ranges_of
from nvpool.rpc.api import PAYLOAD_BYTES_MAX
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.admin.snapshot_barrier import BarrierCursors, walk_at_all
from nvpool.sdk.fsck.check import check_metadata
from nvpool.sdk.fsck.report import FsckReport, PoolProblem

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

MAGIC = b"nvpool dump 1\n"
FRAME = struct.Struct("<III")
COUNT = struct.Struct("<Q")
END_OF_FRAMES = 0xFFFFFFFF
RECORDS_A_STEP = 5000
HEADER_BYTES_MAX = 1 << 20
SAMPLE_MAX = 64
"""Files whose contents are looked for after a load. With so many, one missing file in twenty hardly stays
unnoticed."""
CHECKS_MAX = 4
"""Runs of fsck after a load. Each one repairs what it finds, and a repair may make a sum wrong that the
next run finds. Two runs have always been enough."""


@dataclass
class Loaded:
    """Result of a load: the records loaded, and the problems found in the pool afterwards."""

    records: int = 0
    problems: list[PoolProblem] = field(default_factory=list)
    """Inconsistencies between the records. All are repaired except the last `left` ones."""
    left: int = 0
    files_sampled: int = 0
    files_without_data: int = 0
    """Sampled files with a size of which no target has any data. They read as zeros."""
    unanswered: str = ""
    """Reason why the contents of some files could not be looked for."""


class _DumpedFile(NamedTuple):
    inode: int
    table: int


class ContentSample:
    """Sample of up to SAMPLE_MAX files with contents, spread evenly over any number of records."""

    def __init__(self) -> None:
        self._kept: list[_DumpedFile] = []
        self._stride = 0  # lines skipped between two sampled files
        self._left = 0

    def look(self, lines: bytes) -> None:
        """Take the records of these lines into account."""
        for line in lines.splitlines():
            self._left -= 1
            if self._left >= 0:
                continue
            try:
                row = msgspec.json.decode(line, type=dict)
                if (
                    row["type"] != "inode"
                    or not stat.S_ISREG(row["mode"])
                    or not row["links"]
                    or not row["size"]
                    or not row["blocks"]
                ):
                    continue
                self._kept.append(_DumpedFile(row["inode"], row["table"]))
            except (msgspec.DecodeError, LookupError, TypeError):
                continue  # the shard reports what is wrong with the line
            self._left = self._stride
            if len(self._kept) >= 2 * SAMPLE_MAX:
                del self._kept[1::2]
                self._stride = 2 * self._stride + 1

    def files(self) -> list[_DumpedFile]:
        """The files of the sample."""
        return (
            [self._kept[at * len(self._kept) // SAMPLE_MAX] for at in range(SAMPLE_MAX)]
            if len(self._kept) > SAMPLE_MAX
            else self._kept
        )


async def dump(client: Client, path: str, on_records: Callable[[int], None] = lambda count: None) -> int:
    """Write all metadata of the pool to the file `path`; return the number of records.

    The records are those of one snapshot barrier, and the pool serves meanwhile. On return the file is
    complete and synced under its name. After an error no new file is there under that name. An existing file
    is replaced.

    If a shard changes its primary or leaves the pool meanwhile, the dump starts again, and `on_records`
    counts from 0 again. Errors: those of the shard; NoSpace, AccessDenied, DriveFailed of the local file.
    """
    part, count = f"{path}.part-{os.getpid()}", 0

    async def write(begun: BarrierCursors) -> None:
        nonlocal count
        count = await _write(client, begun, file, on_records)

    def on_restart(reason: str) -> None:
        on_records(0)
        file.seek(0)
        file.truncate()

    try:
        with open(part, "xb") as file:  # noqa: ASYNC230 - this process does nothing else
            await walk_at_all(client, write, on_restart, dump=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise from_os_error(error, f"writing {path}") from error
    finally:
        if os.path.exists(part):  # noqa: ASYNC240
            os.unlink(part)
    return count


async def _write(
    client: Client, begun: BarrierCursors, file: BinaryIO, on_records: Callable[[int], None]
) -> int:
    pool_map, asking, count = client.pool_map, AdminCalls(client), 0
    header = {
        "pool": pool_map.pool_id,
        "name": pool_map.name,
        "settings": msgspec.to_builtins(pool_map.settings),
        "shards": list(begun.cursors),
        "partitions": _division(begun.holders),
        "software": f"nvpool {VERSION}",
        "made_ms": SYSTEM_CLOCK.wall_ns() // 1_000_000,
    }
    file.write(MAGIC + json.dumps(header).encode() + b"\n")
    for shard, cursor in begun.cursors.items():
        done = False
        while not done:
            request = meta_pb2.DumpRequest(cursor=cursor, limit=RECORDS_A_STEP)
            reply, records = await asking.shard(shard, wire_pb2.META_DUMP, request, meta_pb2.DumpReply)
            if len(records):
                file.write(FRAME.pack(shard, len(records), crc32c(records)))
                file.write(records)
            count += reply.records
            on_records(count)
            cursor, done = reply.cursor, reply.done
    end = COUNT.pack(count)
    file.write(FRAME.pack(END_OF_FRAMES, len(end), crc32c(end)) + end)
    return count


def frames(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Iterate over the frames of a dump: (shard, records), with checked checksums. `file` stands after the
    header. The iteration ends only at the end mark.

    CorruptRecord: the file is truncated, or a frame is damaged.
    """
    while True:
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            raise CorruptRecord("the dump is cut short")
        shard, length, checksum = FRAME.unpack(head)
        if length > PAYLOAD_BYTES_MAX:
            raise CorruptRecord("the dump has a frame that is too long to be one")
        records = file.read(length)
        if len(records) < length:
            raise CorruptRecord("the dump is cut short")
        if crc32c(records) != checksum:
            raise CorruptRecord(f"a frame of the dump is not as it was written (before byte {file.tell()})")
        if shard == END_OF_FRAMES:
            if length != COUNT.size or file.read(1):
                raise CorruptRecord("the dump does not end where it should")
            return
        yield shard, records


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a dump. WrongFormat: `file` is not a dump of a version that this program can
    read."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise WrongFormat(
            f"{file.name} is not a metadata dump that this version can read: its first line is not "
            f"{MAGIC.decode().strip()!r}; make one with: nvpool dump OLD_POOL FILE"
        )
    try:
        header = json.loads(file.readline(HEADER_BYTES_MAX))
        if not isinstance(header, dict) or not isinstance(header.get("shards"), list):
            raise ValueError
    except ValueError:
        raise CorruptRecord(f"the second line of {file.name} cannot be read") from None
    return header


async def load(client: Client, path: str, on_records: Callable[[int], None] = lambda count: None) -> Loaded:
    """Load the records of the dump `path` into the pool, which must be empty.

    The pool may have other shards or another distribution of partitions than the dumped pool: then each shard
    gets all records. The whole file is checked first. WrongFormat, CorruptRecord, or InvalidRequest (the pool
    has other settings): nothing was changed. If a shard refuses the load (the pool is not empty), its error
    is raised. An interrupted load leaves the pool half loaded: destroy the pool and start again.

    After the last record the pool serves. Then a check repairs the pool, and the contents of some files are
    looked for. If this call ends before that, `nvpool fsck --repair` does the same check.
    """
    pool_map, asking, loaded, sample = client.pool_map, AdminCalls(client), Loaded(), ContentSample()
    try:
        with open(path, "rb") as file:  # noqa: ASYNC230
            header = read_header(file)
            begin = file.tell()
            here = msgspec.to_builtins(pool_map.settings)
            if header.get("settings") != here:
                raise InvalidRequest(
                    f"the dump is of a pool with the settings {header.get('settings')}, this one has {here}"
                )
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
                taken[to] = reply.records  # counts the whole load so far

            for at, (shard, records) in enumerate(frames(file)):
                await asyncio.gather(
                    *(
                        give(to, records, at == (last[shard] if alike else end))
                        for to in ((shard,) if alike else everybody)
                    )
                )
                loaded.records = sum(taken.values())
                on_records(loaded.records)
                sample.look(records)
    except OSError as error:
        raise from_os_error(error, f"reading {path}") from error
    await _settle(client, loaded)
    await asyncio.gather(*[_look_for(asking, file, loaded) for file in sample.files()])
    return loaded


def _divided_alike(header: dict[str, Any], pool_map: PoolMap) -> bool:
    """Whether the pool is divided like the dumped pool: equal shard numbers with equal partitions."""
    if len(pool_map.shards) == 1:
        return bool(header["shards"] == [pool_map.shards[0].id])
    return bool(
        header["shards"] == [shard.id for shard in pool_map.shards]
        and header.get("partitions") == _division(pool_map.shard_of_partition)
    )


def _division(holders: Sequence[int]) -> list[list[int]]:
    return [[part.first, part.count, part.shard] for part in ranges_of(holders)]


async def _settle(client: Client, loaded: Loaded) -> None:
    """Repair inconsistencies between the records, until a check finds none."""
    for _ in range(CHECKS_MAX):
        checkup = FsckReport()
        await check_metadata(client, checkup, repair=True)
        loaded.left = checkup.found
        if not checkup.found:
            return
        loaded.problems += checkup.problems


async def _look_for(asking: AdminCalls, file: _DumpedFile, loaded: Loaded) -> None:
    """Look for data of the file on any target, and count the result in `loaded`."""
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
