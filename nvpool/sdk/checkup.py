"""fsck of a whole pool, while it serves: the metadata, the metadata against the stores, and every block of the stores.

Three passes. *Metadata*: each shard checks its own records in steps; what they say of one another's inodes is laid together
here. *Chunks*: each target names the inodes that it has chunks of; they must exist, lie in a chain of this target, and not know
a later cut than their inode. What belongs to no inode may be waiting for the collector, so that is run before anything is
called a problem. *Blocks*: each target reads everything and compares checksums, and its index with its free map.

Called by `nvpool fsck`. Without `repair` nothing is changed (the collector only does what it would do anyway). With it shards
mend what they can, and chunks of files that are gone for certain are removed; a bad block can not be mended from one replica:
the file has to be restored. Memory is bounded by the problems found, of which the first are kept, and in a pool of several
shards by the inodes with names on another one (directories, and files that were moved): a hundred bytes each.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from nvpool.base import grants
from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.errors import CorruptRecord, Disconnected, InUse, NotFound, NvpoolError
from nvpool.base.ids import partition_of
from nvpool.client.pathfinder import PathFinder, printable
from nvpool.logic.layout import chain_of
from nvpool.logic.poolmap import Chain
from nvpool.sdk.asking import Asking
from nvpool.sdk.describe import chunks_on
from nvpool.sdk.lost import lost_files
from nvpool.wire.sums import Sum, pack_sums, unpack_sums
from nvpool.wire.v1 import data_pb2, meta_pb2, wire_pb2

RECORDS_A_STEP = 5000
INODES_A_STEP = 1000
BLOCKS_A_STEP = 4096
"""16 MiB: a step that a store can answer between two requests of others."""
ASKED_AT_ONCE = 32
AGAIN_S = 1.0
"""Before shards are walked again: what was under way between them is over by then."""
PROBLEMS_KEPT_MAX = 10_000
COLLECTIONS_MAX = 100
REMOVAL_GRANT_MS = 60_000


class Problem(NamedTuple):
    kind: str
    where: str
    text: str
    repaired: bool = False
    inode: int = 0
    """Of the file that is damaged, where one is."""


@dataclass
class Checkup:
    """What was looked at and found; written by `check`, read by whoever shows progress."""

    stage: str = "metadata"
    records: int = 0
    inodes_on_stores: int = 0
    chunks: int = 0
    blocks: int = 0
    blocks_total: int = 0
    """Of all targets, as they were at the start."""
    problems: list[Problem] = field(default_factory=list)
    found: int = 0
    unrepaired: int = 0

    def note(self, problem: Problem) -> None:
        self.found += 1
        self.unrepaired += not problem.repaired
        if len(self.problems) < PROBLEMS_KEPT_MAX:
            self.problems.append(problem)

    def summary(self) -> dict:
        found = asdict(self)
        del found["stage"], found["blocks_total"]
        found["problems"] = [problem._asdict() for problem in self.problems]
        return found


async def check(client, checkup: Checkup, *, repair: bool = False, scrub: bool = True,
                grant_secret: bytes | None = None) -> None:
    """Run all passes and note every problem in `checkup`. `grant_secret` (secret/grant.key of a node) is what repairs of the
    stores need; without it they are left and said to be.

    Unreachable, DeadlineExceeded, Disconnected: a daemon did not answer; what was noted before holds. May be repeated.
    """
    await _Check(client, checkup, repair, grant_secret).run(scrub)


async def check_metadata(client, checkup: Checkup, *, repair: bool = False) -> None:
    """The first pass alone, as `check` runs it."""
    await _Check(client, checkup, repair, None).metadata()


class _Check:
    def __init__(self, client, checkup: Checkup, repair: bool, grant_secret: bytes | None):
        self._client, self._vfs = client, client.vfs
        self._asking = Asking(client)
        self._paths = PathFinder(lambda: client.pool_map, client.dialer, SYSTEM_CLOCK)
        self._client = client
        self._map = client.pool_map
        self._checkup = checkup
        self._repair = repair
        self._secret = grant_secret

    async def run(self, scrub: bool) -> None:
        targets = [target.id for target in self._map.targets if not target.is_over]
        for target in targets:
            status = await self._asking.target(target, wire_pb2.DATA_STATUS, data_pb2.DataStatusRequest(target=target),
                                               data_pb2.DataStatusReply)
            self._checkup.blocks_total += status.used_bytes >> 12
        await self.metadata()
        self._checkup.stage = "chunks"
        await self._lost()
        for target in targets:
            await self._chunks(target)
        if scrub:
            self._checkup.stage = "blocks"
            for target in targets:
                await self._blocks(target)
            await self._name_files()

    async def _check_rest(self) -> None:
        """InUse while partitions move: what is in none of the shards at one moment, or in two, would be taken for damage."""
        await self._client.refresh_map()
        now = self._client.pool_map
        if now.partitions != self._map.partitions or now.moves and not now.moving.paused:
            raise InUse("parts of the name space move between shards; check when they have come to rest (nvpool shard ls), or "
                        "let them pause (nvpool pool rebalance --pause)")

    async def metadata(self) -> None:
        """Each shard by itself; then what one alone can not tell: the sums that they have of one another's inodes.

        They are walked one after the other while names move between them. So what is found between them is told, and mended,
        where another walk finds it again.
        """
        await self._client.refresh_map()
        self._map = self._client.pool_map
        sums = await self._walk_all(self._repair, tell=True)
        suspects = {(found.inode, found.text) for found in await self._settle(sums, repair=False)}
        if not suspects:
            return
        await asyncio.sleep(AGAIN_S)
        sums = await self._walk_all(repair=False, tell=False)
        again = {found.inode: sums[found.inode] for found in await self._settle(sums, repair=False)
                 if (found.inode, found.text) in suspects}
        for problem in await self._settle(again, self._repair):
            self._checkup.note(problem._replace(inode=0))  # of names, not of bytes

    async def _walk_all(self, repair: bool, tell: bool) -> dict[int, Sum]:
        """The sums of all shards; what they found by themselves is noted where it is to be told."""
        sums: dict[int, Sum] = {}
        before = self._checkup.records if tell else 0
        await self._check_rest()
        for shard in self._map.shards:
            cursor, done, checked = b"", False, 0
            while not done:
                request = meta_pb2.FsckRequest(cursor=cursor, limit=RECORDS_A_STEP, repair=repair)
                reply, _ = await self._asking.shard(shard.id, wire_pb2.META_FSCK, request, meta_pb2.FsckReply)
                checked = reply.checked  # since the beginning of its walk
                for one in unpack_sums(reply.sums):
                    sums[one.inode] = one.plus(sums[one.inode]) if one.inode in sums else one
                if tell:
                    self._checkup.records = before + checked
                    for problem in reply.problems:
                        self._checkup.note(Problem(problem.kind, f"shard {shard.id}", problem.text, problem.repaired))
                cursor, done = reply.cursor, reply.done
            before += checked
        await self._check_rest()
        return sums

    async def _settle(self, sums: dict[int, Sum], repair: bool) -> list[Problem]:
        """What is wrong by the sums, as those say who have the inodes."""
        by_shard: dict[int, list[Sum]] = {}
        owners = self._map.shard_of_partition
        for one in sums.values():
            if partition_of(one.inode) < len(owners):
                by_shard.setdefault(owners[partition_of(one.inode)], []).append(one)
        found = []
        for shard, some in sorted(by_shard.items()):
            for first in range(0, len(some), INODES_A_STEP):
                request = meta_pb2.FsckSumsRequest(sums=pack_sums(some[first:first + INODES_A_STEP]), repair=repair)
                reply, _ = await self._asking.shard(shard, wire_pb2.META_FSCK_SUMS, request, meta_pb2.FsckReply)
                found += [Problem(one.kind, f"shard {shard}", one.text, one.repaired, one.inode) for one in reply.problems]
        return found

    # -- metadata against stores -------------------------------------------------------------------------------------------

    async def _chunks(self, target: int) -> None:
        after, more, gone = 0, True, []
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

    async def _chunks_of(self, target: int, inode: int, attr) -> None:
        table = self._map.table_by_id.get(attr.table)
        async for chunk in chunks_on(self._asking, target, inode):
            self._checkup.chunks += 1
            where = f"target {target}, chunk {chunk.index} of inode {inode}"
            chain = table.chains[chain_of(inode, chunk.index)] if table is not None else None
            if chain is None or not _is_looked_for(target, chain, table.id):
                self._checkup.note(Problem("misplaced", where, "is not in a chain of this target: nobody looks for it here"))
            if chunk.cut > attr.cut:
                # A truncate may be under way: the shard's record is newer by now.
                if chunk.cut > (await self._fresh(inode)).cut:
                    self._checkup.note(Problem("cut", where, f"knows cut {chunk.cut}, its inode only {attr.cut}: metadata went "
                                                             f"back in time"))

    async def _fresh(self, inode: int):
        """The inode's attributes as the shard has them now, past the client's cache."""
        request = meta_pb2.GetAttrRequest(inode=inode)
        return (await self._vfs.meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)).attr

    async def _gone(self, target: int, inodes: list[int]) -> None:
        """Chunks without an inode: the collector's, or nobody's. An inode number is never given twice, so gone is for ever."""
        for shard in self._map.shards:
            for _ in range(COLLECTIONS_MAX):
                await self._asking.shard(shard.id, wire_pb2.META_SYNC, meta_pb2.SyncRequest(), meta_pb2.SyncReply)
                reply, _ = await self._asking.shard(shard.id, wire_pb2.META_COLLECT, meta_pb2.CollectRequest(),
                                                    meta_pb2.CollectReply)
                if not reply.left or not reply.inodes:
                    break
        for inode in inodes:
            left = [chunk async for chunk in chunks_on(self._asking, target, inode)]
            if not left:
                continue
            repaired = await self._remove(target, inode) if self._repair and self._secret else False
            text = f"{len(left)} chunks ({sum(chunk.blocks for chunk in left) * 4} KiB) of a file that does not exist"
            if self._repair and not self._secret:
                text += "; run this on a node of the pool, with its directory as POOL, to remove them"
            self._checkup.note(Problem("leaked", f"target {target}, inode {inode}", text, repaired))

    async def _remove(self, target: int, inode: int) -> bool:
        ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + REMOVAL_GRANT_MS
        authority = grants.sign(grants.Grant(grants.SERVICE, 0, 0, 0, 0, ends_ms), self._secret)
        request = data_pb2.RemoveRequest(map_epoch=self._map.epoch, target=target, authority=authority,
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
