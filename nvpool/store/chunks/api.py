"""The chunk store interface, and the function that creates a store.

A store keeps the chunks of one target: bytes in blocks of 4 KiB, each with the checksum that its writer made.
An acknowledged write survives the death of the store's process. A flushed write survives the loss of power.
In both cases a chunk holds either the old bytes of a write or the new ones, never a mixture.

Implementations: `store/chunks/block_store` (a data file or raw device, with an index in a kv store) and
`store/chunks/memory_store` (the fake for tests). Both pass `testing/contracts/chunk_store`. The caller is
`store/server/service`, on one event loop.

A store has its own directory (`DIR/targets/N`), whatever its drive is:

    FORMAT     text "nvpool chunk store 1\\n"
    lock       flock of the daemon that has the store open
    data       the data file, sparse; or a symbolic link to the raw block device
    index/     LmdbKv

An index cannot live on a raw device, because LMDB needs a file system. The index is small (1 to 2 % of the
data at most). Put the index on a file system that survives together with the device.
"""

from __future__ import annotations

import fcntl
import os
import stat
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nvpool.core.checksum import first_bad_block
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    AlreadyExists,
    BadConfiguration,
    ChecksumMismatch,
    InUse,
    InvalidRequest,
    NotFound,
    WrongFormat,
    from_os_error,
)
from nvpool.core.ids import RequestId
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX, MIB
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.security.xts import BlockCipher
from nvpool.store.chunk_write import ChunkWrite, Placed
from nvpool.store.disk.bad_blocks import BadBlock
from nvpool.store.disk.superblock import Superblock, decode_superblock, encode_superblock

if TYPE_CHECKING:
    from nvpool.store.chunks.location_leases import KeptTable, LocationLeases

FORMAT_TEXT = "nvpool chunk store 1\n"
CAPACITY_BYTES_MIN = MIB
ALL_INODES = -1
"""Owner in `read_now`: the grant belongs to a service and covers every inode."""
READ_BATCH_BYTES_MAX = 32 * MIB
NO_INODE = -2
"""Owner in `read_now`: the grant is not valid."""
CHUNK_BLOCKS_MAX = CHUNK_BYTES_MAX // BLOCK_BYTES
_REQUESTS_MAX = 16
TABLE_MAX = 8
"""Highest number of a chain table that a chunk can belong to."""
LOST_CHECKSUM = 0x74736F6C
"""Marker checksum of a damaged block of which a truncation had to keep a part.

The store cannot know the checksum of the bytes that remain. The old checksum would allow repair to bring the
truncated bytes back from a chain member that has not truncated yet. So only the version of the chunk shows
which member has the block. Bytes may have this checksum by chance; such a block is only harder to repair.
"""
UNCHECKED = 1
"""Flag of a read result: the store has not compared the block with its checksum."""


LOCATION_LEASE_S = 5.0
"""Lifetime of a location lease in seconds.

The lifetime is long enough that renewals cost little compared with the reads. The lifetime is short enough
that little space is freed in the meantime, and that a truncation waits only briefly in the first seconds
after a crash of supervisor and store.
"""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    direct: bool = False
    """Use O_DIRECT, which bypasses the page cache."""
    uring: bool = True
    """Use io_uring if the probe says that io_uring works."""
    cached_segments: int = 65_536
    """Decoded index segments in memory. Each needs about 1 KiB and describes 256 KiB of data."""
    reserve_share: float = 0.02
    """Share of the capacity that new data may not use.

    The share leaves space for overwriting, repair and removal.
    """
    give_back: bool = True
    """Punch freed runs of 256 KiB or more out of a data file.

    This returns the space to the file system.
    """
    replay_bytes_max: int = 512 * MIB
    """Bytes written since the last index checkpoint that trigger the next one.

    The bound limits the data that a replay must check.
    """
    location_lease_s: float = LOCATION_LEASE_S
    """Lifetime of location leases for clients on this host. 0 disables them; `direct` also disables them."""
    kept_table: KeptTable | None = None
    """Persistent lease table; see store/chunks/location_leases."""
    sync_interval_s: float = 0.1
    index_bytes_max: int = 1 << 40
    doubted: bool = False
    """Set if the previous process could not guarantee that its unstable writes reached the drive."""


class MustWait(Exception):
    """Raised by `write_now` only, with nothing done: await `until()`, then repeat the call."""

    def __init__(self, until: Callable[[], Awaitable[object]]) -> None:
        self.until = until


class HeldChunk(NamedTuple):
    """State of a chunk without its bytes; see poolmap/chains/protocol.MemberChunkState."""

    version: int
    floor: int
    cut: int
    requests: tuple[tuple[int, int, int], ...]


BufferSource = Callable[[int], memoryview | None]


class ReadBatch:
    """Result of a read batch.

    `results`, `checksums` and `payload` have the layout of ReadReply in data.proto once the batch is
    complete. While `missed` is not empty, the batch is incomplete: call `begin_finish` or await
    `finish_read`.
    """

    __slots__ = ("results", "checksums", "payload", "missed", "work")

    def __init__(self) -> None:
        self.results = bytearray()
        self.checksums = b""
        self.payload: list[memoryview] = []
        self.missed: list[int] = []
        self.work = None


class LocatedBlocks(NamedTuple):
    """Location and checksums of the first blocks of a chunk. `runs` have the layout of LocateReply."""

    version: int
    blocks: int
    runs: array
    checksums: bytes


class ChunkDescription(NamedTuple):
    index: int
    version: int
    blocks: int
    extents: int
    cut: int
    end: int


class ChunkVersion(NamedTuple):
    """Version and size of one chunk. `version` 0: the chunk exists, but its record cannot be read."""

    inode: int
    index: int
    table: int
    version: int
    cut: int
    blocks: int


class InodeCut(NamedTuple):
    """State of an inode in a store besides its chunks; see records.InodeRecord."""

    inode: int
    cut: int
    floor: int
    chunk_bits: int


class VersionsStep(NamedTuple):
    chunks: list[ChunkVersion]
    inodes: list[InodeCut]
    end: tuple[int, int] | None
    """The last chunk of this step, from which the next step continues. None: no chunk follows."""


class ChunkState(NamedTuple):
    """State for the detection of a concurrent change.

    `version` is that of the chunk, 0 for no chunk. `cut` is the truncate number of the inode.
    """

    version: int
    cut: int


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """A chunk outside a store, or its blocks from `first` on. `version` 0 means that no chunk exists.

    * `runs` are the blocks that are not holes, as (first, count), counted from the beginning of the chunk.
    * `checksums` has four bytes for each of these blocks, as the writer computed them.
    * `content` has the bytes of these blocks.
    * `bad` lists blocks that did not match their checksums in the source store. `content` has zeros for them.
    * `more` says that the chunk has further blocks after these.
    """

    inode: int
    index: int
    version: int = 0
    table: int = 1
    cut: int = 0
    requests: tuple[tuple[int, int, int], ...] = ()
    known: InodeCut = InodeCut(0, 0, 0, 0)
    runs: tuple[tuple[int, int], ...] = ()
    checksums: bytes = b""
    content: bytes | memoryview = b""
    bad: tuple[int, ...] = ()
    more: bool = False


def check_table(table: int) -> None:
    """Check that a record can name this chain table; else InvalidRequest.

    A later version may have made a higher table. 0 means no table and is accepted.
    """
    if table > TABLE_MAX:
        raise InvalidRequest(f"chunks of chain table {table} cannot be kept here, of {TABLE_MAX} at most")


def check_copy(copy: ChunkCopy) -> None:
    """Check a chunk copy before it is installed.

    ChecksumMismatch   bytes of a block outside `bad` do not match their checksum
    InvalidRequest     the copy is malformed or contradicts itself
    """
    count, end = 0, 0
    for first, blocks in copy.runs:
        if blocks <= 0 or first < end:
            raise InvalidRequest("the runs of a copied chunk are not in order")
        end = first + blocks
        count += blocks
    if (
        end > CHUNK_BLOCKS_MAX
        or count * 4 != len(copy.checksums)
        or count * BLOCK_BYTES != len(copy.content)
        or not 1 <= copy.table <= TABLE_MAX
        or copy.more
        or len(copy.requests) > _REQUESTS_MAX
        or not 0 <= copy.index <= 0xFFFFFFFF
        or (not copy.version and count)
        or copy.known.inode not in (0, copy.inode)
    ):
        raise InvalidRequest("a copied chunk contradicts itself")
    bad = set(copy.bad)
    at = 0
    for first, blocks in copy.runs:
        for is_bad, group in groupby(range(first, first + blocks), bad.__contains__):
            length = len(list(group))
            if (
                not is_bad
                and first_bad_block(
                    memoryview(copy.content)[at << 12 : at + length << 12],
                    copy.checksums[at * 4 : (at + length) * 4],
                )
                >= 0
            ):
                raise ChecksumMismatch(f"chunk {copy.index} of inode {copy.inode} was changed on its way")
            at += length


class ScrubStep(NamedTuple):
    cursor: bytes
    done: bool
    blocks: int
    bad: list[BadBlock]
    problems: list[str]
    mended: list[str]
    """Problems that this step repaired."""


class ChunkWriter(Protocol):
    """Writes of a chunk store, for the modules that have a ChunkWrite: the service and the chains."""

    def places_first(self, offset: int, length: int) -> bool:
        """Whether to stage such a write before it is applied: the write is large and covers whole blocks."""

    async def stage(self, write: ChunkWrite) -> Placed:
        """Stage a write: write its bytes to free blocks, for a later `write_now`.

        The call does not block the event loop. The buffer must stay unchanged until return. The caller passes
        the result to `write_now` and then, in every case, to `drop_placed`.

        NoSpace, Busy, DriveFailed, Fenced, and ChecksumMismatch in an encrypted volume: nothing was done. The caller may
        cancel this call.
        """

    async def prepare(self, write: ChunkWrite) -> Placed:
        """Prepare a write: do everything that can fail, and start writing the bytes.

        The call merges partial blocks, compares checksums and finds space. A later `write_now` with the
        result, called when its `writing` is done, does not fail for any of these reasons. Otherwise like
        `stage`; also raises ChecksumMismatch like `write_now`.
        """

    def prepare_now(self, write: ChunkWrite) -> Placed:
        """Prepare a write like `prepare`, without waiting.

        MustWait: nothing was done; call `prepare`. The errors are those of `prepare`.
        """

    def write_now(self, write: ChunkWrite, epoch: int, version: int, placed: Placed | None = None) -> int:
        """Apply a write as ChunkStore.write_now. `placed`: the staged or prepared blocks of this write."""

    def drop_placed(self, placed: Placed) -> None:
        """Free the staged blocks, unless a write has named them."""

    def held(self, inode: int, index: int) -> HeldChunk:
        """See ChunkStore.held."""

    def changing(self, inode: int, index: int) -> None:
        """Invalidate location leases of the chunk: the chunk may change soon.

        The change may come first on another target. From now on, clients of this host discard bytes that they
        read from the leased locations.
        """


class ChunkStore(Protocol):
    def read_now(
        self, reads: bytes, owners: Sequence[int], verify: bool = False, room: BufferSource | None = None
    ) -> ReadBatch:
        """Read a batch as far as memory can answer it.

        `reads` has 24 bytes for each read; see data.proto. `owners[grant]` is the inode that this grant
        allows to read, NO_INODE for none, ALL_INODES for all.

        A failed read never raises an error: its result has the status. With `verify` every block is checked
        before it is returned, and a bad block is recorded. `room` (Call.room) gives memory for the bytes if
        all of them are in memory and none needs a check; the payload is then that memory. Otherwise the
        payload is memory of the store.

        InvalidRequest: the batch is malformed or asks for more than 32 MiB.
        """

    writer: ChunkWriter
    """Writes that the caller has as a ChunkWrite."""
    location_leases: LocationLeases | None
    """The issuer of location leases, or None if this store can issue none."""

    def locate(
        self, inode: int, index: int, blocks: int, life_s: float
    ) -> tuple[float, int, int, LocatedBlocks] | None:
        """Issue a location lease for the first `blocks` blocks of a chunk.

        Returns (life, slot, stamp, location) for clients of this host that read the drive themselves
        (short-circuit reads). Returns None if the chunk has no such blocks, if it has bad ones, or while
        space is scarce. For `life` seconds, at most `life_s`, the store writes nothing else to these blocks.
        See store/chunks/location_leases.
        """

    async def finish_read(self, batch: ReadBatch) -> None:
        """Wait for the drive until `batch` is complete.

        The caller calls this once, if `missed` is not empty.
        """

    def begin_finish(self, batch: ReadBatch, on_done: Callable[[BaseException | None], None]) -> None:
        """Complete `batch` like `finish_read`, without a task.

        The store calls `on_done` once, in a later event-loop iteration: with None if the batch is complete,
        or with the error that failed the whole batch. `on_done` must not raise. The caller must not use the
        batch before that call.
        """

    def held(self, inode: int, index: int) -> HeldChunk:
        """Return the state of a chunk without its bytes.

        The state is the chunk's version (0: no chunk) and last requests, and its inode's truncate number and
        version floor.

        CorruptRecord: the record of the chunk or of the inode cannot be read.
        """

    def write_now(
        self,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        version: int = 0,
        table: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        """Make `buffer` part of the chunk and return the new version of the chunk. See ChunkWriter.write_now.

        `offset` is in bytes from the start of the chunk and need not be aligned. `checksums` has the packed
        CRC32C of each piece into which block borders divide the buffer.

        On return the bytes survive the death of this process. If this raises, or the process dies, the chunk
        holds either the old bytes or the new ones, never a mixture. A replayed request, or one whose slot has
        already done a later request to this chunk, changes nothing and returns the version of the chunk.

        `epoch` is the epoch of the chain. `version` is the version that the head of a chain passes to its
        successors. `table` is the chain table of the inode, stored with the chunk; 0 keeps the current table,
        and a new chunk gets table 1. `cipher` is the cipher of an encrypted volume, given with each write and
        truncation of its files: blocks are stored, summed and read in encrypted form, while `buffer` and
        `checksums` are plain.

        MustWait           nothing was done: await its `until()`, then repeat
        StaleCut           the file was truncated since: refresh, then send again the writes that still apply
        NoSpace            nothing was done and a retry will not help
        ChecksumMismatch   the buffer does not match its writer's checksums (send it again), or the block to
                           merge with is bad (EIO)
        DriveFailed        the drive returned an error; nothing was done
        Fenced             a sync failed: the store accepts nothing until it is reopened
        """

    async def write(
        self,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        version: int = 0,
        table: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        """Call `write_now` and repeat it after each wait."""

    verifier: int
    """Write verifier, not 0. It changes at open if acknowledged but unstable writes may have been lost."""

    async def flush(self) -> None:
        """Make every write that was acknowledged before the call survive the loss of power.

        All concurrent callers share one sync.

        Fenced: a sync failed, now or before. The store never repeats a failed sync; it must be reopened.
        """

    async def cut(
        self,
        inode: int,
        size: int,
        cut: int,
        chunk_bits: int,
        end: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        """Truncate the file to `size`, or punch a hole from `size` to `end`.

        On return the change is durable, and no later read returns the removed bytes, not from a partial block
        either. The store refuses writes with a smaller truncate number from now on. If the block at an edge is
        damaged, its remaining bytes are given up: the block stays bad, see LOST_CHECKSUM. Returns the bytes
        of the blocks that this call freed. The call may be repeated and works on a full drive.

        StaleCut: the store knows a later truncation; nothing was done.
        """

    async def remove(self, inodes: Sequence[int]) -> tuple[int, int]:
        """Remove all chunks of the inodes; return (chunks, bytes) freed.

        The call may be repeated and works on a full drive. The removal is durable only after a flush.
        """

    def describe(self, inode: int, first: int, limit: int) -> tuple[list[ChunkDescription], bool]:
        """List up to `limit` chunks of the inode from index `first` on.

        Returns the chunks in order, and whether more follow.
        """

    def extents(self, inode: int, first: int, until: int) -> tuple[list[tuple[int, int, int]], int]:
        """List the data extents of an inode in the chunks from `first` to before `until`.

        Returns (chunk index, first block, blocks) for everything that is not a hole, in order; extents of one
        chunk do not touch. Also returns the chunk before which the answer ends: `until`, or the chunk from
        which to call again.
        """

    async def copy(
        self,
        source: tuple[int, int, int],
        inode: int,
        index: int,
        offset: int,
        length: int,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        given_up: Callable[[], bool] = bool,
        table: int = 0,
    ) -> tuple[int, int]:
        """Copy whole blocks to a chunk from another chunk, or from the same one.

        The call copies `length` bytes from `source` (inode, index, offset) with their checksums, and holes as
        holes. Returns the new version and the number of bytes that are not holes.

        Guarantees and errors are those of `write`. The blocks of the source are compared with their checksums
        first; ChecksumMismatch if one is bad. The copied bytes are the state of the source at one instant
        during the call.

        Cancelled: `given_up()` returned true after a wait; nothing was done.
        """

    def inodes(self, after: int, limit: int) -> tuple[list[int], bool]:
        """List up to `limit` inodes above `after` that have chunks here.

        Returns the inodes in order, and whether more follow.
        """

    def versions(
        self,
        after: tuple[int, int] | None,
        limit: int,
        wanted: ChainSet | None = None,
        until: tuple[int, int] | None = None,
    ) -> VersionsStep:
        """List up to `limit` chunks with their versions.

        The chunks come after (inode, index) `after`, up to and including `until`, in this order. They belong
        to the `wanted` chains only. The step also has the inodes of this range that were truncated. The
        number of records examined is bounded, so a step may end early.
        """

    def state(self, inode: int, index: int) -> ChunkState:
        """Return the state of a chunk for a later `install`. CorruptRecord: its record cannot be read."""

    async def fetch(
        self, inode: int, index: int, first: int = 0, blocks: int = CHUNK_BLOCKS_MAX
    ) -> ChunkCopy:
        """Read a chunk for transfer, with at most `blocks` blocks from block `first` on.

        All parts of the copy are from one instant during the call. Each block is compared with its checksum;
        a bad block is recorded and listed in the copy.

        CorruptRecord, DriveFailed: the chunk cannot be read.
        """

    async def install(self, copies: Sequence[tuple[ChunkCopy, ChunkState]]) -> list[bool]:
        """Replace each chunk whose state is still the given one with its copy.

        The version of the chunk does not matter. Returns for each chunk whether it was replaced. The truncate
        epoch of the inode becomes at least that of the copy. Blocks that are bad in the copy stay bad: a read
        of them fails with ChecksumMismatch. The call may be repeated.

        A chunk is the old or the new one, never a mixture, also after a loss of power. The change survives
        the death of this process; it is durable only after a flush.

        NoSpace, Busy, DriveFailed, ChecksumMismatch (the received bytes do not match their checksums),
        InvalidRequest: chunks before the failed one may have been replaced.
        """

    def unreadable(self, inode: int, index: int) -> bool:
        """Whether a record of the chunk cannot be read."""

    async def install_over(self, copy: ChunkCopy) -> bool:
        """Replace an unreadable chunk with its copy.

        Returns whether the chunk was replaced. It is not replaced if the store knows a truncation of the
        inode that the copy does not know, or the reverse. Otherwise like `install`.
        """

    def note(self) -> bytes:
        """Return the bytes last given to `keep_note`, or b"". They are as durable as other changes."""

    def keep_note(self, raw: bytes) -> None: ...

    async def discard(self, inode: int, index: int, is_wanted: Callable[[], bool] | None = None) -> int:
        """Remove the chunk, even if it is unreadable; return the bytes that the chunk occupied.

        The truncate number of the inode stays. The removal is durable only after a flush. The store calls
        `is_wanted` in the step that removes, after all waits, and removes nothing if it returns false.
        """

    on_bad: Callable[[], None] | None
    """Callback for each bad block, called when the store records the block; None at first."""

    def table_of(self, inode: int, index: int) -> int:
        """Return the chain table stored with the chunk, 0 if there is no chunk."""

    async def mend(
        self,
        inode: int,
        index: int,
        block: int,
        content: bytes | memoryview,
        *,
        checksum: bytes = b"",
        version: int = 0,
    ) -> bool:
        """Rewrite one block of the chunk with `content` if the bytes match the block's checksum.

        Returns whether they matched. For a block with LOST_CHECKSUM two other conditions hold instead:
        `version`, the chunk's version on the member that supplied the bytes, equals the chunk's version here;
        and the bytes match `checksum`, which they had there. Empty content then means a hole. The version of
        the chunk stays. The repair is as durable as an install.

        NoSpace, Busy, DriveFailed: nothing was done.
        """

    async def raise_cuts(self, inodes: Sequence[InodeCut]) -> None:
        """Raise the stored truncate numbers to these, where these are newer.

        This covers truncations that this store missed.
        """

    async def scrub(self, cursor: bytes, blocks: int, repair: bool = False) -> ScrubStep:
        """Scrub about `blocks` blocks after the cursor: compare them with their checksums.

        The cursor b"" starts at the beginning; pass the cursor of an unfinished step to the next one. At the
        end the step compares the free map with the index. With `repair` the step corrects the free map where
        the index proves it wrong; the correction is durable when the last step returns. Concurrent calls run
        one after the other.
        """

    def bad_blocks(self) -> list[BadBlock]: ...

    def status(self) -> dict:
        """Return the status of the store as a dict.

        Keys: state, fenced_because, capacity_bytes, used_bytes, chunks (-1: not counted), device, kind,
        read_path, direct (whether opened with O_DIRECT), writes (how large writes are made: direct, cached),
        host_full (a sentence if the underlying file system is full), counters.
        """

    async def tend(self) -> None:
        """Run one step of background work: free held space. The service calls this about once a second.

        Tests call this directly.
        """

    async def close(self) -> None:
        """Flush, then release all resources. May be called twice."""


def create_chunk_store(
    path: str | os.PathLike[str],
    target: int,
    pool_id: str,
    capacity_bytes: int = 0,
    *,
    device: str | os.PathLike[str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    force: bool = False,
) -> None:
    """Make the directory `path` a chunk store.

    The data is in a data file of `capacity_bytes` in this directory, or on the block device `device`
    (capacity 0: the whole device). Nothing is preallocated.

    AlreadyExists      `path` is a store already; or, without `force`, the device holds a store of any pool
    InvalidRequest     the capacity is too small or does not fit the device, or `device` is not a block
                       device
    """
    path = Path(path)
    blocks = capacity_bytes // BLOCK_BYTES
    if (path / "FORMAT").exists():
        raise AlreadyExists(f"{path} is a chunk store already")
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = path / "data"
        if device is None:
            if capacity_bytes < CAPACITY_BYTES_MIN:
                raise InvalidRequest(
                    f"a target needs at least {CAPACITY_BYTES_MIN} bytes, not {capacity_bytes}"
                )
            fd = os.open(data, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, blocks * BLOCK_BYTES)
        else:
            if not stat.S_ISBLK(os.stat(device).st_mode):
                raise InvalidRequest(f"{device} is not a block device")
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_EXCL)
            size = os.lseek(fd, 0, os.SEEK_END)
            blocks = min(blocks or 1 << 62, size // BLOCK_BYTES)
            if blocks * BLOCK_BYTES < max(CAPACITY_BYTES_MIN, capacity_bytes // BLOCK_BYTES * BLOCK_BYTES):
                os.close(fd)
                raise InvalidRequest(f"{device} has {size} bytes")
            if not force and os.pread(fd, 8, 0)[:6] == b"NVPOOL":
                os.close(fd)
                raise AlreadyExists(f"{device} holds a chunk store already; destroy it first")
            data.unlink(missing_ok=True)
            data.symlink_to(os.path.abspath(device))
        try:
            superblock = Superblock(target, blocks, clock.secret(16), clock.wall_ns(), pool_id)
            os.pwrite(fd, encode_superblock(superblock) + bytes(15 * BLOCK_BYTES), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        # FORMAT is written last: an interrupted creation has no FORMAT, so it is never opened and can be
        # repeated.
        fd = os.open(path / "FORMAT", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, FORMAT_TEXT.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, f"making a chunk store in {path}") from None


def lock_store(path: Path) -> tuple[int, Superblock]:
    """Lock the store in `path`; return the locked descriptor and the superblock.

    InUse, WrongFormat, NotFound, CorruptRecord, BadConfiguration: nothing was changed.
    """
    try:
        if path.exists() and not path.is_dir():
            raise BadConfiguration(
                f"{path} is not a directory: name a target by its directory, where `data` links to the device"
            )
        text = (path / "FORMAT").read_text()
        if text != FORMAT_TEXT:
            raise WrongFormat(
                f"{path} has the format {text.strip()!r}, this nvpool knows {FORMAT_TEXT.strip()!r}; "
                "use the version of nvpool that made it"
            )
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise NotFound(f"{path} is not a chunk store") from None
    except OSError as error:
        raise from_os_error(error, f"opening the chunk store {path}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(f"{path} is open in another process") from None
        try:
            fd = os.open(path / "data", os.O_RDONLY | os.O_CLOEXEC)
            try:
                raw = os.pread(fd, BLOCK_BYTES, 0)
                size = os.lseek(fd, 0, os.SEEK_END)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"opening {path}/data") from None
        if len(raw) < BLOCK_BYTES:
            raise WrongFormat(f"{path}/data holds no chunk store of nvpool")
        superblock = decode_superblock(raw, f"{path}/data")
        if size < superblock.block_count * BLOCK_BYTES:
            raise WrongFormat(
                f"{path}/data has {size} bytes, its superblock says {superblock.block_count * BLOCK_BYTES}"
            )
        return lock, superblock
    except BaseException:
        os.close(lock)
        raise
