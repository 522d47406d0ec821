"""Replica comparison of fsck: finds chunks that differ between the members of their chain.

If one member lacks a chunk or has an older version, a reader of that member gets zeros or old bytes, and no
other check reports that.

A write reaches the members at slightly different times. So a difference is examined again, several times and
for longer than a lease. Only a difference that stays is reported, and only if the chain did not change
meanwhile. The chunks of each target are compared with those of the other members, so a missing chunk is found
unless all members lack it. With the secret, the other members fetch the newest copy (DATA_PULL).

sdk/fsck/check uses this module. Memory use: some hundred bytes for each of SUSPECTS_MAX chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nvpool.core import grants
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import CorruptRecord, Disconnected, NotFound, NvpoolError
from nvpool.core.ids import version_parts
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.chunk_locations import chunks_on
from nvpool.sdk.fsck.report import FsckReport, PoolProblem

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

SUSPECTS_MAX = 1000
LOOKS_S = (0.2, 0.8, 3.0)
"""Pauses before each repeated comparison. Together they last longer than a lease, after which the map
would have changed."""
GRANT_MS = 60_000

Name = tuple[int, int, int]
"""Inode, chunk index, chain table."""


class ReplicaCopy(NamedTuple):
    """One target's copy of a chunk; all zero if there is none."""

    version: int = 0
    blocks: int = 0
    end: int = 0

    def __str__(self) -> str:
        return (
            f"version {'.'.join(map(str, version_parts(self.version)))} of {self.blocks} blocks"
            if self.version
            else "none"
        )


class ChunkReplicas(NamedTuple):
    chain_epoch: int
    copies: dict[int, ReplicaCopy]
    """Copies by target, for the targets that can read their record."""

    @property
    def even(self) -> bool:
        return len(set(self.copies.values())) < 2


def service_right(secret: bytes) -> bytes:
    """Service token: a store then does what it does only for the pool itself."""
    ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + GRANT_MS
    return grants.sign(grants.Grant(grants.SERVICE, 0, 0, 0, 0, ends_ms), secret)


class Copies:
    def __init__(self, client: Client, asking: AdminCalls, checkup: FsckReport, secret: bytes | None) -> None:
        """With `secret`, differences are repaired."""
        self._client = client
        self._asking = asking
        self._checkup = checkup
        self._secret = secret
        self._suspects: dict[Name, ChunkReplicas] = {}
        self._settled: set[Name] = set()
        """The first chunks that were reported: the scan of the next member meets them again."""

    async def look(
        self, target: int, inode: int, table: int, held: Sequence[data_pb2.ChunkDescription]
    ) -> None:
        """Compare these chunks with the copies of the other members of their chains. `held` is in order of
        the chunk indexes."""
        if table < 2 or not held:
            return
        here = {chunk.index: chunk for chunk in held}
        chains = self._client.pool_map.table_by_id[table].chains
        others = {member for index in here for member in chains[chain_of(inode, index)].targets} - {target}
        there = {member: await self._held(member, inode, held[0].index, held[-1].index) for member in others}
        for index, chunk in here.items():
            chain = chains[chain_of(inode, index)]
            copies = {
                member: found.get(index, ReplicaCopy())
                for member in chain.targets
                if (found := there.get(member)) is not None
            }
            seen = ChunkReplicas(
                chain.epoch, copies | {target: ReplicaCopy(chunk.version, chunk.blocks, chunk.end)}
            )
            name = inode, index, table
            if not seen.even and name not in self._settled:
                self._suspects[name] = seen
        if len(self._suspects) >= SUSPECTS_MAX:
            await self.settle()

    async def settle(self) -> None:
        """Compare the suspect chunks again, and report those that still differ."""
        suspects, self._suspects = self._suspects, {}
        for pause_s in LOOKS_S:
            if not suspects:
                return
            await asyncio.sleep(pause_s)
            await self._client.refresh_map()
            again = {name: await self._seen(name) for name in suspects}
            suspects = {
                name: seen for name, seen in again.items() if not seen.even and seen == suspects[name]
            }
        for name, seen in suspects.items():
            if await self._exists(name[0]):
                await self._report(name, seen)

    async def _report(self, name: Name, seen: ChunkReplicas) -> None:
        inode, index, table = name
        if len(self._settled) < SUSPECTS_MAX:
            self._settled.add(name)
        detail = ", ".join(f"target {target} has {copy}" for target, copy in sorted(seen.copies.items()))
        repaired = False
        if self._secret is not None:
            newest = max(seen.copies, key=lambda target: seen.copies[target].version)
            try:
                for target in seen.copies.keys() - {newest}:
                    request = data_pb2.PullRequest(
                        target=target,
                        authority=service_right(self._secret),
                        table=table,
                        inode=inode,
                        index=index,
                        source=newest,
                    )
                    await self._asking.target(target, wire_pb2.DATA_PULL, request, data_pb2.PullReply)
                repaired = (await self._seen(name)).even
            except Disconnected:
                raise
            except NvpoolError as error:
                detail = f"{detail}; not repaired: {error or type(error).__name__}"
        self._checkup.note(
            PoolProblem(
                "copies",
                f"chunk {index} of inode {inode}",
                f"is not the same at all of its chain: {detail}",
                repaired,
                inode,
            )
        )

    async def _seen(self, name: Name) -> ChunkReplicas:
        inode, index, table = name
        chain = self._client.pool_map.table_by_id[table].chains[chain_of(inode, index)]
        copies = {}
        for target in chain.targets:
            found = await self._held(target, inode, index, index)
            if found is not None:
                copies[target] = found.get(index, ReplicaCopy())
        return ChunkReplicas(chain.epoch, copies)

    async def _held(self, target: int, inode: int, first: int, last: int) -> dict[int, ReplicaCopy] | None:
        """Chunks of the target by index. None: the target cannot read its record, which another check
        reports."""
        found = {}
        try:
            async for chunk in chunks_on(self._asking, target, inode, first):
                if chunk.index > last:
                    break
                found[chunk.index] = ReplicaCopy(chunk.version, chunk.blocks, chunk.end)
        except CorruptRecord:
            return None
        return found

    async def _exists(self, inode: int) -> bool:
        request = meta_pb2.GetAttrRequest(inode=inode)
        try:
            await self._client.vfs.meta.ask(inode, wire_pb2.META_GETATTR, request, meta_pb2.Entry)
        except NotFound:
            return False
        return True
