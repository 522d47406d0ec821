"""fsck of a whole pool in service: metadata, metadata against stores, stored blocks.

The check has three passes:

* Metadata (sdk/fsck/metadata): each shard checks its own records in steps. The facts that the shards report
  about inodes of other shards are compared here.
* Chunks: each target lists the inodes of its chunks. An inode must exist, and the chunk must lie in a chain
  of this target. The chunk must not have a later truncate number than its inode, and must be equal on all
  members of its chain (sdk/fsck/replicas). A chunk without an inode may be waiting for the garbage collector,
  so the collector runs before anything is reported. A chunk that its target will remove by itself, because
  its chain has moved, is no problem.
* Blocks: each target reads all blocks and compares them with their checksums, and its index with its free
  map.

`nvpool fsck` uses this module. Without `repair` nothing is changed; the collector does only its usual work.
With `repair` the shards repair what they can, chunks of files that are certainly deleted are removed, and a
chain member that lacks a chunk fetches it from another member. A bad block cannot be repaired from a single
replica: the file has to be restored.

Memory use is bounded by the problems found, of which only the first ones are kept. A pool of several shards
also needs a hundred bytes for each inode with a name on another shard (directories, and files that were
moved), and for each striped directory.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

from nvpool.client.inode_paths import PathFinder, printable
from nvpool.core.errors import CorruptRecord, Disconnected, NotFound, NvpoolError
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import Chain
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.chunk_locations import CHUNKS_PER_REQUEST, chunks_on
from nvpool.sdk.fsck.lost_files import lost_files
from nvpool.sdk.fsck.metadata import check_names
from nvpool.sdk.fsck.replicas import Copies, service_right
from nvpool.sdk.fsck.report import FsckReport, PoolProblem

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

INODES_A_STEP = 1000
BLOCKS_A_STEP = 4096
"""Blocks per step: 16 MiB. A store can answer that between two requests of other clients."""
INODES_PER_BATCH = 32
COLLECTIONS_MAX = 100


async def check(
    client: Client,
    checkup: FsckReport,
    *,
    repair: bool = False,
    scrub: bool = True,
    grant_secret: bytes | None = None,
) -> None:
    """Run all passes and record every problem in `checkup`.

    `grant_secret` (secret/grant.key of a node) is needed to repair the stores. Without it these problems are
    reported and not repaired.

    A shard that changes its primary or leaves the pool does not stop the check: the metadata pass starts
    again (`checkup.restarts`). Unreachable, DeadlineExceeded, Disconnected: a daemon did not answer; the
    problems recorded so far are valid. The check may be repeated.
    """
    await _Check(client, checkup, repair, grant_secret).run(scrub)


async def check_metadata(client: Client, checkup: FsckReport, *, repair: bool = False) -> None:
    """Run only the first pass, the metadata check, as `check` does."""
    await check_names(client, checkup, repair)


class _Check:
    def __init__(self, client: Client, checkup: FsckReport, repair: bool, grant_secret: bytes | None) -> None:
        self._client, self._vfs = client, client.vfs
        self._asking = AdminCalls(client)
        self._paths = PathFinder(lambda: client.pool_map, client.dialer, client.clock)
        self._map = client.pool_map
        self._checkup = checkup
        self._repair = repair
        self._secret = grant_secret
        self._copies = Copies(client, self._asking, checkup, grant_secret if repair else None)

    async def run(self, scrub: bool) -> None:
        targets = [target.id for target in self._map.targets if not target.is_over]
        for target in targets:
            status = await self._asking.target(
                target,
                wire_pb2.DATA_STATUS,
                data_pb2.DataStatusRequest(target=target),
                data_pb2.DataStatusReply,
            )
            self._checkup.blocks_total += status.used_bytes >> 12
        await check_names(self._client, self._checkup, self._repair)
        self._map = self._client.pool_map
        self._checkup.stage = "chunks"
        await self._lost()
        for target in targets:
            await self._chunks(target)
        if scrub:
            self._checkup.stage = "blocks"
            for target in targets:
                await self._blocks(target)
            await self._name_files()

    # -- metadata against stores -------------------------------------------------------------------------------------------

    async def _chunks(self, target: int) -> None:
        after, more = 0, True
        gone: list[int] = []
        while more:
            reply = await self._asking.target(
                target,
                wire_pb2.DATA_LIST,
                data_pb2.ListRequest(target=target, after=after, limit=INODES_A_STEP),
                data_pb2.ListReply,
            )
            inodes = struct.unpack(f"<{len(reply.inodes) // 8}Q", reply.inodes)
            for begin in range(0, len(inodes), INODES_PER_BATCH):
                gone += filter(
                    None,
                    await asyncio.gather(
                        *(self._inode(target, inode) for inode in inodes[begin : begin + INODES_PER_BATCH])
                    ),
                )
            self._checkup.inodes_on_stores += len(inodes)
            more = reply.more and bool(inodes)
            after = inodes[-1] if inodes else after
        if gone:
            await self._gone(target, gone)
        await self._copies.settle()

    async def _inode(self, target: int, inode: int) -> int | None:
        """Compare the chunks of `inode` on `target` with its record. Return the inode number if there is
        no record."""
        try:
            attr = await self._vfs.getattr(inode)
        except NotFound:
            return inode
        except CorruptRecord:
            return None  # the shard's own check reports it
        try:
            await self._chunks_of(target, inode, attr)
        except CorruptRecord as error:
            self._checkup.note(
                PoolProblem("index", f"target {target}, inode {inode}", str(error), inode=inode)
            )
        return None

    async def _chunks_of(self, target: int, inode: int, attr: Attr | meta_pb2.Attr) -> None:
        table = self._map.table_by_id.get(attr.table)
        held: list[data_pb2.ChunkDescription] = []
        async for chunk in chunks_on(self._asking, target, inode):
            if len(held) >= CHUNKS_PER_REQUEST:
                await self._copies.look(target, inode, attr.table, held)
                held = []
            self._checkup.chunks += 1
            where = f"target {target}, chunk {chunk.index} of inode {inode}"
            chain = table.chains[chain_of(inode, chunk.index)] if table is not None else None
            if chain is not None and target in chain.targets:
                held.append(chunk)
            elif not chunk.leaving and (chain is None or not _is_looked_for(target, chain, attr.table)):
                self._checkup.note(
                    PoolProblem(
                        "misplaced", where, "is not in a chain of this target: nobody looks for it here"
                    )
                )
            if chunk.cut > attr.cut:
                # A truncate may be in progress: then the shard's record is newer by now.
                if chunk.cut > (await self._fresh(inode)).cut:
                    self._checkup.note(
                        PoolProblem(
                            "cut",
                            where,
                            f"knows cut {chunk.cut}, its inode only {attr.cut}: metadata went back in time",
                        )
                    )
        await self._copies.look(target, inode, attr.table, held)

    async def _fresh(self, inode: int) -> meta_pb2.Attr:
        """Current attributes of the inode, read from the shard and not from the client's cache."""
        request = meta_pb2.GetAttrRequest(inode=inode)
        entry: meta_pb2.Entry = await self._vfs.meta.ask(
            inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry
        )
        return entry.attr

    async def _gone(self, target: int, inodes: list[int]) -> None:
        """Report orphan chunks: chunks without an inode that the garbage collector does not remove. An
        inode number is never used again, so a deleted inode cannot come back."""
        for shard in self._map.shards:
            for _ in range(COLLECTIONS_MAX):
                await self._asking.any_primary(
                    shard.id, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply
                )
                reply = await self._asking.any_primary(
                    shard.id, wire_pb2.META_COLLECT, meta_pb2.CollectRequest(), meta_pb2.CollectReply
                )
                if not reply.left or not reply.inodes:
                    break
        for inode in inodes:
            left = [chunk async for chunk in chunks_on(self._asking, target, inode)]
            if not left:
                continue
            repaired = (
                await self._remove(target, inode, self._secret) if self._repair and self._secret else False
            )
            text = f"{len(left)} chunks ({sum(chunk.blocks for chunk in left) * 4} KiB) of a file that does not exist"
            if self._repair and not self._secret:
                text += "; run this on a node of the pool, with its directory as POOL, to remove them"
            self._checkup.note(PoolProblem("leaked", f"target {target}, inode {inode}", text, repaired))

    async def _remove(self, target: int, inode: int, secret: bytes) -> bool:
        request = data_pb2.RemoveRequest(
            map_epoch=self._map.epoch,
            target=target,
            authority=service_right(secret),
            inodes=struct.pack("<Q", inode),
        )
        try:
            await self._asking.target(target, wire_pb2.DATA_REMOVE, request, data_pb2.RemoveReply)
        except Disconnected:
            raise
        except NvpoolError:
            return False
        return not [chunk async for chunk in chunks_on(self._asking, target, inode)]

    async def _lost(self) -> None:
        """Report files whose last copy was on drives that are lost."""
        async for path, inode, chunks in lost_files(self._client):
            self._checkup.note(
                PoolProblem(
                    "lost",
                    f"inode {inode}",
                    f"{chunks} of its chunks were on lost drives only (file {printable(path)})",
                )
            )

    # -- every block -----------------------------------------------------------------------------------------------------

    async def _blocks(self, target: int) -> None:
        cursor, done = b"", False
        while not done:
            reply = await self._asking.target(
                target,
                wire_pb2.DATA_SCRUB,
                data_pb2.ScrubRequest(
                    target=target, cursor=cursor, blocks=BLOCKS_A_STEP, repair=self._repair
                ),
                data_pb2.ScrubReply,
            )
            self._checkup.blocks += reply.blocks
            for bad in reply.bad:
                where = f"target {target}, chunk {bad.index} of inode {bad.inode}, block {bad.block}"
                self._checkup.note(
                    PoolProblem("bad block", where, bad.text or "its checksum does not fit", inode=bad.inode)
                )
            for text in reply.problems:
                self._checkup.note(PoolProblem("index", f"target {target}", text))
            for text in reply.mended:
                self._checkup.note(PoolProblem("index", f"target {target}", text, repaired=True))
            cursor, done = reply.cursor, reply.done

    async def _name_files(self) -> None:
        """Add the paths of the files with bad blocks: a person restores files, not inodes."""
        bad = {problem.inode for problem in self._checkup.problems if problem.inode}
        paths = await self._paths.find(bad) if bad else {}
        for at, problem in enumerate(self._checkup.problems):
            if problem.inode:
                path = paths.get(problem.inode)
                path_text = (
                    "no name of it can be found"
                    if path is None
                    else f"file {printable(path)}"
                    if path
                    else "without a name"
                )
                self._checkup.problems[at] = problem._replace(text=f"{problem.text} ({path_text})")


def _is_looked_for(target: int, chain: Chain, replicas: int) -> bool:
    """Whether clients look for the chain on this target, now or soon. A chain that lacks targets takes an
    absent one back."""
    return (
        target in (*chain.targets, *chain.joining, *chain.goal)
        or len(chain.targets) + len(chain.joining) < replicas
    )
