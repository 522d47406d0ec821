"""fsck of a whole pool, while it serves: the metadata, the metadata against the stores, and every block of the stores.

Three passes. *Metadata* (`checkup_names`): each shard checks its own records in steps; what they say of one another's inodes
is laid together. *Chunks*: each target names the inodes that it has chunks of; they must exist, lie in a chain of this
target, not know a later cut than their inode, and be as at the other members of their chain (`checkup_copies`). What belongs
to no inode may be waiting for the collector, so that is run before anything is called a problem; what a target removes by
itself, since its chain has moved, is none. *Blocks*: each target reads everything and compares checksums, and its index with
its free map.

Called by `nvpool fsck`. Without `repair` nothing is changed (the collector only does what it would do anyway). With it shards
mend what they can, chunks of files that are gone for certain are removed, and those that a member of a chain lacks fetched
from another. A bad block can not be mended from one replica: the file has to be restored. Memory is bounded by the problems
found, of which the first are kept, and in a pool of several shards by the inodes with names on another one (directories, and
files that were moved) and by wide directories: a hundred bytes each.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

from nvpool.client.reverse_paths import PathFinder, printable
from nvpool.core.errors import CorruptRecord, Disconnected, NotFound, NvpoolError
from nvpool.poolmap.layout import chain_of
from nvpool.poolmap.model import Chain
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2
from nvpool.sdk.admin.calls import Asking
from nvpool.sdk.file_layout import CHUNKS_AT_ONCE, chunks_on
from nvpool.sdk.fsck.lost_files import lost_files
from nvpool.sdk.fsck.metadata import check_names
from nvpool.sdk.fsck.replicas import Copies, service_right
from nvpool.sdk.fsck.report import Checkup, Problem

if TYPE_CHECKING:
    from nvpool.client.session import Client

INODES_A_STEP = 1000
BLOCKS_A_STEP = 4096
"""16 MiB: a step that a store can answer between two requests of others."""
ASKED_AT_ONCE = 32
COLLECTIONS_MAX = 100


async def check(client: Client, checkup: Checkup, *, repair: bool = False, scrub: bool = True,
                grant_secret: bytes | None = None) -> None:
    """Run all passes and note every problem in `checkup`. `grant_secret` (secret/grant.key of a node) is what repairs of the
    stores need; without it they are left and said to be.

    A shard that gets another primary meanwhile, or leaves, ends nothing: the metadata is begun anew (`checkup.begun_anew`).
    Unreachable, DeadlineExceeded, Disconnected: a daemon did not answer; what was noted before holds. May be repeated.
    """
    await _Check(client, checkup, repair, grant_secret).run(scrub)


async def check_metadata(client: Client, checkup: Checkup, *, repair: bool = False) -> None:
    """The first pass alone, as `check` runs it."""
    await check_names(client, checkup, repair)


class _Check:
    def __init__(self, client: Client, checkup: Checkup, repair: bool, grant_secret: bytes | None) -> None:
        self._client, self._vfs = client, client.vfs
        self._asking = Asking(client)
        self._paths = PathFinder(lambda: client.pool_map, client.dialer, client.clock)
        self._map = client.pool_map
        self._checkup = checkup
        self._repair = repair
        self._secret = grant_secret
        self._copies = Copies(client, self._asking, checkup, grant_secret if repair else None)

    async def run(self, scrub: bool) -> None:
        targets = [target.id for target in self._map.targets if not target.is_over]
        for target in targets:
            status = await self._asking.target(target, wire_pb2.DATA_STATUS, data_pb2.DataStatusRequest(target=target),
                                               data_pb2.DataStatusReply)
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
            reply = await self._asking.target(target, wire_pb2.DATA_LIST, data_pb2.ListRequest(
                target=target, after=after, limit=INODES_A_STEP), data_pb2.ListReply)
            inodes = struct.unpack(f"<{len(reply.inodes) // 8}Q", reply.inodes)
            for begin in range(0, len(inodes), ASKED_AT_ONCE):
                gone += filter(None, await asyncio.gather(*(
                    self._inode(target, inode) for inode in inodes[begin:begin + ASKED_AT_ONCE])))
            self._checkup.inodes_on_stores += len(inodes)
            more = reply.more and bool(inodes)
            after = inodes[-1] if inodes else after
        if gone:
            await self._gone(target, gone)
        await self._copies.settle()

    async def _inode(self, target: int, inode: int) -> int | None:
        """Compare what `target` holds of `inode` with its record; the inode when it has none."""
        try:
            attr = await self._vfs.getattr(inode)
        except NotFound:
            return inode
        except CorruptRecord:
            return None  # the shard's own check has told of it
        try:
            await self._chunks_of(target, inode, attr)
        except CorruptRecord as error:
            self._checkup.note(Problem("index", f"target {target}, inode {inode}", str(error), inode=inode))
        return None

    async def _chunks_of(self, target: int, inode: int, attr: meta_pb2.Attr) -> None:
        table = self._map.table_by_id.get(attr.table)
        held: list[data_pb2.ChunkDescription] = []
        async for chunk in chunks_on(self._asking, target, inode):
            if len(held) >= CHUNKS_AT_ONCE:
                await self._copies.look(target, inode, attr.table, held)
                held = []
            self._checkup.chunks += 1
            where = f"target {target}, chunk {chunk.index} of inode {inode}"
            chain = table.chains[chain_of(inode, chunk.index)] if table is not None else None
            if chain is not None and target in chain.targets:
                held.append(chunk)
            elif not chunk.leaving and (chain is None or not _is_looked_for(target, chain, attr.table)):
                self._checkup.note(Problem("misplaced", where, "is not in a chain of this target: nobody looks for it here"))
            if chunk.cut > attr.cut:
                # A truncate may be under way: the shard's record is newer by now.
                if chunk.cut > (await self._fresh(inode)).cut:
                    self._checkup.note(Problem("cut", where, f"knows cut {chunk.cut}, its inode only {attr.cut}: metadata went "
                                                             f"back in time"))
        await self._copies.look(target, inode, attr.table, held)

    async def _fresh(self, inode: int) -> meta_pb2.Attr:
        """The inode's attributes as the shard has them now, past the client's cache."""
        request = meta_pb2.GetAttrRequest(inode=inode)
        entry: meta_pb2.Entry = await self._vfs.meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        return entry.attr

    async def _gone(self, target: int, inodes: list[int]) -> None:
        """Chunks without an inode: the collector's, or nobody's. An inode number is never given twice, so gone is for ever."""
        for shard in self._map.shards:
            for _ in range(COLLECTIONS_MAX):
                await self._asking.any_primary(shard.id, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply)
                reply = await self._asking.any_primary(shard.id, wire_pb2.META_COLLECT, meta_pb2.CollectRequest(),
                                                       meta_pb2.CollectReply)
                if not reply.left or not reply.inodes:
                    break
        for inode in inodes:
            left = [chunk async for chunk in chunks_on(self._asking, target, inode)]
            if not left:
                continue
            repaired = await self._remove(target, inode, self._secret) if self._repair and self._secret else False
            text = f"{len(left)} chunks ({sum(chunk.blocks for chunk in left) * 4} KiB) of a file that does not exist"
            if self._repair and not self._secret:
                text += "; run this on a node of the pool, with its directory as POOL, to remove them"
            self._checkup.note(Problem("leaked", f"target {target}, inode {inode}", text, repaired))

    async def _remove(self, target: int, inode: int, secret: bytes) -> bool:
        request = data_pb2.RemoveRequest(map_epoch=self._map.epoch, target=target, authority=service_right(secret),
                                         inodes=struct.pack("<Q", inode))
        try:
            await self._asking.target(target, wire_pb2.DATA_REMOVE, request, data_pb2.RemoveReply)
        except Disconnected:
            raise
        except NvpoolError:
            return False
        return not [chunk async for chunk in chunks_on(self._asking, target, inode)]

    async def _lost(self) -> None:
        """Files of which the last copy is gone with its drives."""
        async for path, inode, chunks in lost_files(self._client):
            self._checkup.note(Problem("lost", f"inode {inode}", f"{chunks} of its chunks were on lost drives only (file "
                                                                 f"{printable(path)})"))

    # -- every block -----------------------------------------------------------------------------------------------------

    async def _blocks(self, target: int) -> None:
        cursor, done = b"", False
        while not done:
            reply = await self._asking.target(target, wire_pb2.DATA_SCRUB, data_pb2.ScrubRequest(
                target=target, cursor=cursor, blocks=BLOCKS_A_STEP, repair=self._repair), data_pb2.ScrubReply)
            self._checkup.blocks += reply.blocks
            for bad in reply.bad:
                where = f"target {target}, chunk {bad.index} of inode {bad.inode}, block {bad.block}"
                self._checkup.note(Problem("bad block", where, bad.text or "its checksum does not fit", inode=bad.inode))
            for text in reply.problems:
                self._checkup.note(Problem("index", f"target {target}", text))
            for text in reply.mended:
                self._checkup.note(Problem("index", f"target {target}", text, repaired=True))
            cursor, done = reply.cursor, reply.done

    async def _name_files(self) -> None:
        """Say which files the bad blocks are of: a person restores files, not inodes."""
        bad = {problem.inode for problem in self._checkup.problems if problem.inode}
        paths = await self._paths.find(bad) if bad else {}
        for at, problem in enumerate(self._checkup.problems):
            if problem.inode:
                path = paths.get(problem.inode)
                told = "no name of it can be found" if path is None else f"file {printable(path)}" if path else "without a name"
                self._checkup.problems[at] = problem._replace(text=f"{problem.text} ({told})")


def _is_looked_for(target: int, chain: Chain, replicas: int) -> bool:
    """Whether the target has part in the chain, or may soon: where targets are missing the one that was away comes back."""
    return target in (*chain.targets, *chain.joining, *chain.goal) or len(chain.targets) + len(chain.joining) < replicas
