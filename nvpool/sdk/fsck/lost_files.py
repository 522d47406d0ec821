"""Search for lost files: files with chunks in chains whose drives were all given up.

There is no index from a chain to its files, so the whole tree is walked. Of each file that is old enough, the
chunks in such chains are read. A file is reported if one of these chunks, up to the file size, cannot be
read. A hole and a lost chunk look the same by now. `nvpool fsck` runs the search to its end.
node/admin/lost_files stops it after a time limit, for `nvpool status`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import BytesLost, NotFound, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.chains.data_loss import losing, may_have_lost, ownerless
from nvpool.poolmap.file_layout import chain_of

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client
    from nvpool.rpc.messages.meta_messages import Attr

_LIST_STEP = 1000
_CHUNKS_MAX = 4 * CHAINS_PER_TABLE
"""Chunks examined per file. So many chunks lie in each of the 1,024 chains, except for about one chain in
50."""


async def lost_files(client: Client) -> AsyncIterator[tuple[bytes, int, int]]:
    """Iterate over the lost files: (path, inode, number of chunks with lost bytes). They come in no order.
    A file that is created or removed during the walk may be missed."""
    pool_map = client.pool_map
    chains, nobody = losing(pool_map), ownerless(pool_map)
    waiting: list[tuple[int, bytes]] = [(ROOT_INODE, b"")] if chains else []
    while waiting:
        inode, path = waiting.pop()
        try:
            directory = await client.vfs.opendir(inode)
        except NotFound:
            continue
        cursor, more = 0, True
        while more:
            entries, more = await client.vfs.readdir(directory, cursor, _LIST_STEP)
            for entry in entries:
                cursor, attr, name = entry.cursor, entry.attr, path + b"/" + os.fsencode(entry.name)
                if stat.S_ISDIR(attr.mode):
                    waiting.append((attr.inode, name))
                elif stat.S_ISREG(attr.mode) and attr.size and (numbers := chains.get(attr.table)):
                    count = min(_CHUNKS_MAX, (attr.size - 1 >> attr.chunk_bits) + 1)
                    of_table = pool_map.table_by_id[attr.table].chains
                    suspect = [
                        index
                        for index in range(count)
                        if (number := chain_of(attr.inode, index)) in numbers
                        and (
                            (attr.table, number) in nobody
                            or may_have_lost(pool_map, of_table[number], attr.inode)
                        )
                    ]
                    sure = sum((attr.table, chain_of(attr.inode, index)) in nobody for index in suspect)
                    lost = sure + (await _unreadable(client, attr, suspect) if len(suspect) > sure else 0)
                    if lost:
                        yield name, attr.inode, lost


async def _unreadable(client: Client, attr: Attr, indexes: list[int]) -> int:
    """Number of these chunks with lost bytes. Chunks of chains without any owner are not counted here."""
    nobody = ownerless(client.pool_map)
    lost = 0
    try:
        handle = await client.vfs.open(attr.inode, os.O_RDONLY, Caller(0, 0))
    except NotFound:
        return 0
    try:
        for index in indexes:
            start = index << attr.chunk_bits
            if (attr.table, chain_of(attr.inode, index)) in nobody or start >= handle.file.size:
                continue
            try:
                await client.vfs.chunks.read_range(
                    handle.file, start, min(1 << attr.chunk_bits, handle.file.size - start)
                )
            except BytesLost:
                lost += 1
            except NvpoolError:
                continue  # a different problem, which fsck reports
    finally:
        await client.vfs.release(handle)
    return lost
