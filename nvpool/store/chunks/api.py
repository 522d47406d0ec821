"""The contract of a chunk store, and where one is made and opened.

A store keeps the chunks of one target: bytes in blocks of 4 KiB with the checksums of their writers. What it answered survives
the death of its process; what it flushed survives the loss of power; in both cases a chunk holds the old bytes of a write
or the new, never a mixture. Implementations: `store/chunks/block_store` (a data file or raw device, an index in a kv) and
`store/chunks/memory_store` (the twin). Both pass `testing/contracts/chunk_store`. Used by store/server/service on one event
loop.

A store has a directory of its own (`DIR/targets/N`), whatever its drive is:

    FORMAT     text "nvpool chunk store 1\\n"
    lock       flock of the daemon that has it open
    data       the data file, sparse; or a symbolic link to the raw block device
    index/     LmdbKv

An index can not live on a raw device, since LMDB wants a file system; it is small (1 to 2 % of the data at most) and belongs
on one that survives with the device.
"""

from __future__ import annotations

import fcntl
import os
import stat
from array import array
from collections.abc import Callable, Sequence
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
    WrongTarget,
    from_os_error,
)
from nvpool.core.ids import RequestId
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX, MIB
from nvpool.poolmap.chains.chain_set import ChainSet
from nvpool.security.xts import BlockCipher
from nvpool.store.disk.superblock import Superblock, decode_superblock, encode_superblock

if TYPE_CHECKING:
    from nvpool.store.chunks.location_leases import KeptTable, Lender

FORMAT_TEXT = "nvpool chunk store 1\n"
CAPACITY_BYTES_MIN = MIB
ALL_INODES = -1
"""As an owner in read_now: the grant is a service's and covers every inode."""
READ_BATCH_BYTES_MAX = 32 * MIB
NO_INODE = -2
"""As an owner in read_now: the grant is not valid."""
CHUNK_BLOCKS_MAX = CHUNK_BYTES_MAX // BLOCK_BYTES
_REQUESTS_MAX = 16
TABLE_MAX = 8
"""Chain tables that a chunk can be of."""
LOST_CHECKSUM = 0x74736F6C
"""Of a block that did not fit its own when a cut had to keep a part of it. Of the bytes that are left nobody here can tell the
checksum; and the old one would let what the cut has taken away come back from a member that has not cut yet. So the chunk's
version alone says who has the block. Also where bytes have this checksum by chance: then it is only harder to mend."""
UNCHECKED = 1
"""Flag of a read's result: the store has not compared block and checksum itself."""


LEND_S = 5.0
"""Of a location. Long enough that renewals cost little beside reads, short enough that what is freed meanwhile is little, and
that nobody minds the wait of a cut in the first seconds after a crash of supervisor and store."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    direct: bool = False
    """O_DIRECT: the page cache is not used."""
    uring: bool = True
    """Use io_uring where the probe says it works."""
    cached_segments: int = 65_536
    """Decoded index segments in memory, about 1 KiB each; each describes 256 KiB."""
    reserve_share: float = 0.02
    """Of the capacity: kept from what would grow, so that overwriting, repair and removal have room."""
    give_back: bool = True
    """Punch freed runs of 256 KiB and more out of a data file, so that its file system has the space again."""
    replay_bytes_max: int = 512 * MIB
    """Written since the last checkpoint of the index; beyond it one is made, so that a replay has no more to check."""
    lend_s: float = LEND_S
    """Lifetime of locations that are given to clients of the host; 0: none are, nor with `direct`."""
    kept_table: KeptTable | None = None
    """See store/chunks/location_leases."""
    sync_interval_s: float = 0.1
    index_bytes_max: int = 1 << 40
    doubted: bool = False
    """The process before this one could not vouch for what it had not flushed."""


class MustWait(Exception):
    """Raised by `write_now` only, with nothing done: await `until()`, then repeat."""

    def __init__(self, until):
        self.until = until


class Placed:
    """Blocks on the drive that nothing names yet; see ChunkStore.place and prepare. `sums`: of those blocks, which were made
    for `version` of the chunk; None: whatever it is. They are on the drive when `writing` is done."""

    __slots__ = ("transaction", "runs", "sums", "version", "writing")

    def __init__(self, transaction, runs, sums: bytes | None = None, version: int = 0, writing=None):
        self.transaction = transaction
        self.runs = runs
        self.sums = sums
        self.version = version
        self.writing = writing


class HeldChunk(NamedTuple):
    """What a store has of a chunk, without its bytes: see poolmap/chains/protocol.Held."""

    version: int
    floor: int
    cut: int
    requests: tuple[tuple[int, int, int], ...]


Room = Callable[[int], memoryview | None]


class ReadBatch:
    """The outcome of a batch. `results`, `checksums` and `payload` are as ReadReply in data.proto says, once nothing is
    missing: while `missed` is not empty, `begin_finish` or await `finish_read`."""

    __slots__ = ("results", "checksums", "payload", "missed", "work")

    def __init__(self) -> None:
        self.results = bytearray()
        self.checksums = b""
        self.payload: list[memoryview] = []
        self.missed: list[int] = []
        self.work = None


class Located(NamedTuple):
    """The first blocks of a chunk: where they lie (runs as in LocateReply) and their checksums."""

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
    """`version` 0: there is a chunk, and its record can not be read."""

    inode: int
    index: int
    table: int
    version: int
    cut: int
    blocks: int


class InodeCut(NamedTuple):
    """What a store knows of an inode besides its chunks; see records.InodeRecord."""

    inode: int
    cut: int
    floor: int
    chunk_bits: int


class VersionsStep(NamedTuple):
    chunks: list[ChunkVersion]
    inodes: list[InodeCut]
    end: tuple[int, int] | None
    """The last chunk that this step was about, for the next one; None: there is nothing behind it."""


class ChunkState(NamedTuple):
    """What tells whether a chunk was changed since it was looked at: its version, 0 for none, and the cut of its inode."""

    version: int
    cut: int


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """A chunk, or the blocks of it from `first` on, outside a store; with `version` 0 that there is none. `runs` are its blocks
    that are no holes, (first, count), counted from the chunk's beginning; `checksums` four bytes for each of them, as their
    writer summed them; `content` their bytes. Those in `bad` did not fit where they come from, and have zeros in `content`.
    `more`: the chunk has further blocks behind these."""

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
    """InvalidRequest: no record can name this chain table, as one that a later version made; 0 is none."""
    if table > TABLE_MAX:
        raise InvalidRequest(f"chunks of chain table {table} can not be kept here, of {TABLE_MAX} at most")


def check_copy(copy: ChunkCopy) -> None:
    """ChecksumMismatch where bytes that should do so do not fit their checksums, InvalidRequest for what is no chunk."""
    count, end = 0, 0
    for first, blocks in copy.runs:
        if blocks <= 0 or first < end:
            raise InvalidRequest("the runs of a copied chunk are not in order")
        end = first + blocks
        count += blocks
    if end > CHUNK_BLOCKS_MAX or count * 4 != len(copy.checksums) or count * BLOCK_BYTES != len(copy.content) or \
            not 1 <= copy.table <= TABLE_MAX or copy.more or len(copy.requests) > _REQUESTS_MAX or \
            not 0 <= copy.index <= 0xFFFFFFFF or (not copy.version and count) or copy.known.inode not in (0, copy.inode):
        raise InvalidRequest("a copied chunk contradicts itself")
    bad = set(copy.bad)
    at = 0
    for first, blocks in copy.runs:
        for is_bad, group in groupby(range(first, first + blocks), bad.__contains__):
            length = len(list(group))
            if not is_bad and first_bad_block(memoryview(copy.content)[at << 12:at + length << 12],
                                              copy.checksums[at * 4:(at + length) * 4]) >= 0:
                raise ChecksumMismatch(f"chunk {copy.index} of inode {copy.inode} was changed on its way")
            at += length


class BadBlock(NamedTuple):
    inode: int
    index: int
    block: int
    text: str


class ScrubStep(NamedTuple):
    cursor: bytes
    done: bool
    blocks: int
    bad: list[BadBlock]
    problems: list[str]
    mended: list[str]
    """Problems that are none any more."""


class ChunkStore(Protocol):
    def read_now(self, reads: bytes, owners: Sequence[int], verify: bool = False, room: Room | None = None) -> ReadBatch:
        """Read a batch from memory as far as that goes. `reads`: 24 bytes each, see data.proto; `owners[grant]` is the inode
        that grant allows to read, NO_INODE for none, ALL_INODES for all.

        Never raises for a single read: its result has the status. `verify`: every block is checked before it is answered,
        and a bad one is remembered. `room` (Call.room): where the bytes may go when all of them are in memory and none is to
        be checked; the payload is then that memory. Elsewhere it is the store's own.
        InvalidRequest for a batch that is no batch or asks for more than 32 MiB.
        """

    lender: Lender | None
    """None where there is nothing that could be lent."""

    def locate(self, inode: int, index: int, blocks: int, life_s: float) -> tuple[float, int, int, Located] | None:
        """(life, slot, stamp, where the first `blocks` blocks of the chunk lie), for clients of this host that read there
        themselves; None where the chunk has none, or has bad ones, or while space is scarce. For `life` seconds at most, and
        not longer than `life_s`, nothing else is written there. See store/chunks/location_leases.
        """

    async def finish_read(self, batch: ReadBatch) -> None:
        """Wait for the drive until `batch` is complete. Called once when `missed` is not empty."""

    def begin_finish(self, batch: ReadBatch, on_done: Callable[[BaseException | None], None]) -> None:
        """As `finish_read`, without a task: `on_done` is called in a later turn of the loop, once, with None when the batch is
        complete, or with what went wrong with all of it. It must not raise. What it names is not used again before."""

    def places_first(self, offset: int, length: int) -> bool:
        """Whether such a write had better be placed before it is made: it is large, and of whole blocks."""

    async def place(self, inode: int, index: int, offset: int, buffer: memoryview) -> Placed:
        """Bring the bytes to free blocks of the drive without holding up the loop, for a `write_now` that names them. Nobody
        changes the buffer meanwhile. The caller gives the result to that and then, in any case, to `drop_placed`. NoSpace,
        Busy, DriveFailed, Fenced: nothing was done. May be cancelled."""

    async def prepare(self, inode: int, index: int, offset: int, buffer: memoryview, checksums: bytes,
                      cipher: BlockCipher | None = None) -> Placed:
        """Do of a write what can be refused: merge, compare, find room; and begin to bring its bytes to the drive. A
        `write_now` with the result, when its `writing` is done, does not fail for any of that. As `place` in all else, and
        ChecksumMismatch as of `write_now`."""

    def drop_placed(self, placed: Placed) -> None:
        """The blocks are free again, unless a write names them."""

    def held(self, inode: int, index: int) -> HeldChunk:
        """The chunk's version (0: there is none) and last requests, its inode's cut and floor of versions. CorruptRecord."""

    def changing(self, inode: int, index: int) -> None:
        """The chunk may be another one soon, elsewhere perhaps before here: what clients of this host read from now on where it
        lies is thrown away by them."""

    def write_now(self, inode: int, index: int, offset: int, buffer: memoryview, checksums: bytes, *, cut: int = 0,
                  request: RequestId | None = None, epoch: int = 1, version: int = 0, placed: Placed | None = None,
                  table: int = 0, cipher: BlockCipher | None = None) -> int:
        """Make `buffer` part of the chunk; return its new version. offset is in bytes from the start of the chunk and need not
        be aligned; `checksums` has the packed CRC32C of each piece into which block borders divide the buffer.

        On return the bytes survive the death of this process. If this raises, or the process dies, the chunk holds the old
        bytes or the new, never a mixture. A request that was done already, or whose slot has done a later one to this chunk,
        is answered with the chunk's version and changes nothing. `epoch` is the chain's; `version` is given by the head of a
        chain to its successors. `placed`: where `place` has put this buffer. `table` is the chain table of the inode, kept with
        the chunk; 0: as it was, 1 for a new one. `cipher`: of the volume, where that is encrypted, in each write and cut of its
        files: blocks are stored, summed and read as it encrypts them, `buffer` and `checksums` are plain.

        MustWait           nothing was done: await its `until()`, then repeat
        StaleCut           the file was cut since: refresh, send again what still applies
        NoSpace            nothing was done and repeating will not help
        ChecksumMismatch   the buffer is not what its writer summed (send again), or the block to be merged with is bad (EIO)
        DriveFailed        the drive gave an error; nothing was done
        Fenced             a sync failed: nothing is taken until the store is opened anew
        """

    async def write(self, inode: int, index: int, offset: int, buffer: memoryview, checksums: bytes, *, cut: int = 0,
                    request: RequestId | None = None, epoch: int = 1, version: int = 0, table: int = 0,
                    cipher: BlockCipher | None = None) -> int:
        """write_now, repeated after each wait."""

    verifier: int
    """Not 0. Another one, when the store is opened, where what was answered before and not flushed may have been lost."""

    async def flush(self) -> None:
        """On return all that was answered before the call survives the loss of power. All who wait share one sync.

        Fenced when a sync failed, now or before: it is never repeated, the store must be opened anew.
        """

    async def cut(self, inode: int, size: int, cut: int, chunk_bits: int, end: int = 0,
                  cipher: BlockCipher | None = None) -> int:
        """The file ends at `size`, or has a hole from there to `end`: nothing of that is ever read again, not from a partial
        block either; writes that knew a smaller cut are refused from now on. Of a damaged block at an edge the rest is given
        up: it stays bad, see LOST_CHECKSUM. Durable on return. May be repeated; works on a full drive. Returns the bytes of
        the blocks that this call freed.

        StaleCut: a later cut is known here, nothing was done.
        """

    async def remove(self, inodes: Sequence[int]) -> tuple[int, int]:
        """Remove all chunks of the inodes; return (chunks, bytes) freed. May be repeated; works on a full drive. Not
        flushed."""

    def describe(self, inode: int, first: int, limit: int) -> tuple[list[ChunkDescription], bool]:
        """Up to `limit` chunks of the inode from index `first` on, in order, and whether there are more."""

    def extents(self, inode: int, first: int, until: int) -> tuple[list[tuple[int, int, int]], int]:
        """(chunk index, first block, blocks) of what is no hole in chunks from `first` to before `until`, in order, no two of a
        chunk touching; and the chunk before which the answer ends: `until`, or one from which to ask again."""

    async def copy(self, source: tuple[int, int, int], inode: int, index: int, offset: int, length: int, *, cut: int = 0,
                   request: RequestId | None = None, epoch: int = 1,
                   given_up: Callable[[], bool] = bool, table: int = 0) -> tuple[int, int]:
        """Make whole blocks of a chunk part of another, or of the same: `length` bytes from source (inode, index, offset), with
        their checksums, holes as holes. Returns the new version and the bytes that are no holes.

        Guarantees and errors as of `write`; the source's blocks are compared with their checksums first, ChecksumMismatch when
        one is bad. What is copied is what the source held at one moment of the call. Cancelled, with nothing done, when
        `given_up()` says so after a wait.
        """

    def inodes(self, after: int, limit: int) -> tuple[list[int], bool]:
        """Up to `limit` inodes above `after` that have chunks here, in order, and whether there are more."""

    def versions(self, after: tuple[int, int] | None, limit: int, wanted: ChainSet | None = None,
                 until: tuple[int, int] | None = None) -> VersionsStep:
        """Up to `limit` chunks behind (inode, index) `after`, not behind `until`, in that order, with their versions, those
        of `wanted` chains only. And the inodes up to there that were cut. Bounded in what it looks at, so it may end early."""

    def state(self, inode: int, index: int) -> ChunkState:
        """For `install`. CorruptRecord."""

    async def fetch(self, inode: int, index: int, first: int = 0, blocks: int = CHUNK_BLOCKS_MAX) -> ChunkCopy:
        """What makes the chunk, with its blocks from `first` on, `blocks` of the chunk at most; all of one moment of the call.
        Each block is compared with its checksum; a bad one is remembered, and said to be. CorruptRecord, DriveFailed."""

    async def install(self, copies: Sequence[tuple[ChunkCopy, ChunkState]]) -> list[bool]:
        """Make each chunk what its copy says, whatever version is here, provided that its state still is the one given; for
        each, whether that was so. The inode's cut becomes at least the copy's. Blocks that were bad stay so: who reads them
        meets a ChecksumMismatch. May be repeated.

        A chunk is the old or the new, never a mixture, after a loss of power too. Survives the death of this process; not
        flushed. NoSpace, Busy, DriveFailed, ChecksumMismatch (what came is not what was summed), InvalidRequest: those
        before the one that failed may have been done.
        """

    def unreadable(self, inode: int, index: int) -> bool:
        """Whether a record of the chunk can not be read."""

    async def install_over(self, copy: ChunkCopy) -> bool:
        """Make a chunk that is unreadable what its copy says, unless a cut of its inode is known here that the copy does not
        know, or the other way round; whether that was done. As `install` in all else."""

    def note(self) -> bytes:
        """What `keep_note` was last given, b"" for nothing: kept as other changes are."""

    def keep_note(self, raw: bytes) -> None: ...

    async def discard(self, inode: int, index: int, is_wanted: Callable[[], bool] | None = None) -> int:
        """Remove the chunk, also one that can not be read; the bytes that it occupied. The inode's cut stays. Not flushed.

        `is_wanted` is asked in the step that removes, after all waits; nothing is removed when it says no.
        """

    on_bad: Callable[[], None] | None
    """Called for each block that is found to be bad, when it is noted; None at first."""

    def table_of(self, inode: int, index: int) -> int:
        """The chain table that is kept with the chunk, 0 where there is none."""

    async def mend(self, inode: int, index: int, block: int, content: bytes | memoryview, *, checksum: bytes = b"",
                   version: int = 0) -> bool:
        """Write a block of the chunk anew with these bytes, if they fit the checksum that it has; whether they did. Where that
        is LOST_CHECKSUM: if `version`, which the chunk had where they come from, is the chunk's, and they fit `checksum`, which
        they had there; no content then: a hole. The chunk's version stays. Survives what an install survives. NoSpace, Busy,
        DriveFailed: nothing was done."""

    async def raise_cuts(self, inodes: Sequence[InodeCut]) -> None:
        """Know these cuts, where they are newer than what is known; for writes that were not told of them."""

    async def scrub(self, cursor: bytes, blocks: int, repair: bool = False) -> ScrubStep:
        """Check about `blocks` blocks behind the cursor (b"": from the start) against their checksums, and at the end the free
        map against the index. The cursor of an unfinished step is given to the next one. `repair`: the free map is brought in
        line with the index where that is certain, durably when the last step returns. Steps that are asked for at once are
        done one after the other."""

    def bad_blocks(self) -> list[BadBlock]: ...

    def status(self) -> dict:
        """state, fenced_because, capacity_bytes, used_bytes, chunks (-1: not counted), device, kind, read_path, direct (whether
        opened with O_DIRECT), writes (how large ones go: direct, cached), host_full (a sentence when the file system below it
        is full), counters."""

    async def tend(self) -> None:
        """One step of background work: give held space back. Called every second or so; tests call it themselves."""

    async def close(self) -> None:
        """Flush and release. May be called twice."""


def create_chunk_store(path: str | os.PathLike[str], target: int, pool_id: str, capacity_bytes: int = 0, *,
                       device: str | os.PathLike[str] | None = None, clock: Clock = SYSTEM_CLOCK, force: bool = False) -> None:
    """Make the directory `path` a chunk store: on a data file of capacity_bytes in it, or on the block device `device`
    (capacity 0: all of it). Nothing is preallocated.

    AlreadyExists      there is one already; or, without `force`, the device holds one of any pool
    InvalidRequest     the capacity makes no sense
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
                raise InvalidRequest(f"a target needs at least {CAPACITY_BYTES_MIN} bytes, not {capacity_bytes}")
            fd = os.open(data, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, blocks * BLOCK_BYTES)
        else:
            if not stat.S_ISBLK(os.stat(device).st_mode):
                raise InvalidRequest(f"{device} is no block device")
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
        # Last, so that what was interrupted is begun anew and never opened.
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
    """The locked descriptor and the superblock of the store in `path`.

    InUse, WrongFormat, NotFound, CorruptRecord, BadConfiguration: nothing was changed.
    """
    try:
        if path.exists() and not path.is_dir():
            raise BadConfiguration(f"{path} is no directory: name a target by its directory, where `data` links to the device")
        text = (path / "FORMAT").read_text()
        if text != FORMAT_TEXT:
            raise WrongFormat(f"{path} has the format {text.strip()!r}, this nvpool knows {FORMAT_TEXT.strip()!r}; "
                              "use the version of nvpool that made it")
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise NotFound(f"{path} is no chunk store") from None
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
            raise WrongFormat(f"{path}/data has {size} bytes, its superblock says {superblock.block_count * BLOCK_BYTES}")
        return lock, superblock
    except BaseException:
        os.close(lock)
        raise


async def open_chunk_store(path: str | os.PathLike[str], target: int = 0, options: StoreOptions | None = None, *,
                           clock: Clock = SYSTEM_CLOCK, on_fence: Callable[[str], None] | None = None) -> ChunkStore:
    """Open the store in the directory `path`; `target` 0: whichever it is. Blocks named by replayed index records are checked
    before this returns, and what was answered before is durable. `on_fence` is told the reason, once, when the store can not
    vouch for its drive any more: end the process, or open it anew.

    NotFound      there is none: create it
    WrongFormat   of another version: use the nvpool that made it
    WrongTarget   it belongs to another target
    InUse         another process has it open
    CorruptRecord, DriveFailed   the drive needs attention
    """
    from nvpool.store.chunks.block_store import open_block_store  # here, since that module implements this one's contract

    where = Path(path)
    lock, superblock = lock_store(where)
    try:
        if target and superblock.target != target:
            raise WrongTarget(f"{where} is target {superblock.target}, not {target}")
        return await open_block_store(where, superblock, lock, options or StoreOptions(), clock, on_fence)
    except BaseException:
        os.close(lock)
        raise
