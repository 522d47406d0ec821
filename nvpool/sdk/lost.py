"""Files of which the last copy is gone: those with a chunk in a chain that only drives held which are lost for ever.

No index leads from a chain to its files, so the tree is walked and each file's chunks are looked up: a file is named when one
of its chunks, up to its size, belongs to such a chain; whether that chunk was a hole nobody can say any more. Called by
`nvpool fsck`, which takes the time it needs, and by run/supervisor for `status`, which does not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator

from nvpool.base.errors import NotFound
from nvpool.base.ids import ROOT_INODE
from nvpool.logic.layout import chain_of
from nvpool.logic.poolmap import PoolMap

_LIST_STEP = 1000
_CHUNKS_MAX = 4096
"""Looked up of one file: a file with more meets each of 1,024 chains, but for one in 50."""


def lost_chains(pool_map: PoolMap) -> dict[int, frozenset[int]]:
    """Of each table the chains of which no target is in the pool any more; tables without such are left out."""
    over = {target.id for target in pool_map.targets if target.is_over}
    found = {table.id: frozenset(number for number, chain in enumerate(table.chains) if over.issuperset(chain.targets))
             for table in pool_map.tables} if over else {}
    return {table: numbers for table, numbers in found.items() if numbers}


async def lost_files(client) -> AsyncIterator[tuple[bytes, int, int]]:
    """(path, inode, how many of its chunks are lost) of each such file that the tree has, in no order. What comes and goes
    meanwhile may be missed."""
    chains = lost_chains(client.pool_map)
    waiting = [(ROOT_INODE, b"")] if chains else []
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
                    lost = sum(chain_of(attr.inode, index) in numbers for index in range(count))
                    if lost:
                        yield name, attr.inode, lost
