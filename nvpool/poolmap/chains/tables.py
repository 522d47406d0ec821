"""Chain tables, one for each replica count of the pool's directories, and sets of their chains.

A pool starts with the table of its own replica count. Another table is created when a directory first gets
another count. A target uses a chain set to select chunks when it requests chunks from another target.
Pure functions, as in `rebalance`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.chains.placement import Placing, usable
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import Chain, ChainTable, PoolMap

REPLICAS_MAX = 3
TABLE_BYTES = 1 + CHAINS_PER_TABLE // 8
"""Bytes of one table in an encoded chain set."""


def check_replicas(pool_map: PoolMap, replicas: int) -> None:
    """Verify that the pool can store this many copies in separate failure domains.

    Failure domains are nodes, or the drives of a pool on one node. InvalidRequest: there are too few; the
    text has the remedy.
    """
    if not 1 <= replicas <= REPLICAS_MAX:
        raise InvalidRequest(f"1 to {REPLICAS_MAX} replicas can be kept of a file, not {replicas}")
    here = usable(pool_map.targets)
    if len(here) < replicas:
        raise InvalidRequest(
            f"{replicas} replicas need as many drives, and the pool has {len(here)} that can be used; first: "
            f"nvpool drive add POOL PATH"
        )
    nodes = len({target.node for target in here})
    if 1 < nodes < replicas:
        raise InvalidRequest(
            f"{replicas} replicas need as many nodes with drives, and the pool has {nodes}; let one "
            f"join with drives first: nvpool node token POOL"
        )


def with_table(pool_map: PoolMap, replicas: int, answering: Collection[int]) -> PoolMap:
    """Return the map with a chain table for `replicas`; the same map if it has one.

    Each chain starts with one responding target, if there is one. The others join as any new target does,
    although there is nothing to copy: so a target is read only after it knows that it needs a serving lease.
    InvalidRequest as in `check_replicas`.
    """
    if replicas in pool_map.table_by_id:
        return pool_map
    check_replicas(pool_map, replicas)
    none: list[tuple[int, ...]] = [()] * CHAINS_PER_TABLE
    up = {target.id for target in pool_map.targets if target.state == "up" and target.id in answering}
    chains = []
    for goal in Placing(none, none, pool_map.targets, pool_map.nodes, replicas).balance():
        first = next((target for target in goal if target in up), goal[0])
        others = tuple(target for target in goal if target != first)
        joining = tuple(target for target in others if target in up)
        chains.append(Chain(1, (first,), joining, (first, *others) if others else ()))
    tables = sorted((*pool_map.tables, ChainTable(replicas, tuple(chains))), key=lambda table: table.id)
    return replace(pool_map, tables=tuple(tables))


class ChainSet:
    """Set of chains, with a test whether a chunk belongs to one of them."""

    def __init__(self, chains: Iterable[tuple[int, int]] = ()) -> None:
        """Create the set from (table, chain) pairs."""
        self._of_table: dict[int, bytearray] = {}
        for table, chain in chains:
            self._of_table.setdefault(table, bytearray(CHAINS_PER_TABLE))[chain] = 1

    def has_chunk(self, table: int, inode: int, index: int) -> bool:
        """Return whether a chunk with this chain table belongs to one of the chains."""
        flags = self._of_table.get(table)
        return flags is not None and flags[chain_of(inode, index)] > 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for table, flags in self._of_table.items():
            for chain, flag in enumerate(flags):
                if flag:
                    yield table, chain

    def __bool__(self) -> bool:
        return bool(self._of_table)


def encode_chains(chains: ChainSet) -> bytes:
    """Encode a chain set; the encoding is part of the format.

    129 bytes for each table: table u8, then one bit for each of its 1,024 chains, chain n in byte n // 8 as
    bit n % 8.
    """
    masks: dict[int, int] = {}
    for table, chain in chains:
        masks[table] = masks.get(table, 0) | 1 << chain
    return b"".join(
        bytes((table,)) + mask.to_bytes(TABLE_BYTES - 1, "little") for table, mask in sorted(masks.items())
    )


def decode_chains(raw: bytes) -> ChainSet:
    """Decode a chain set; InvalidRequest if its length is impossible."""
    if len(raw) % TABLE_BYTES or len(raw) > 256 * TABLE_BYTES:
        raise InvalidRequest(f"{len(raw)} bytes are no set of chains")
    found = []
    for at in range(0, len(raw), TABLE_BYTES):
        mask = int.from_bytes(raw[at + 1 : at + TABLE_BYTES], "little")
        found += [(raw[at], chain) for chain in range(CHAINS_PER_TABLE) if mask >> chain & 1]
    return ChainSet(found)
