"""Set of chains, with a test whether a chunk belongs to one of them.

A target uses a chain set to select chunks when it requests chunks from another target. The encoding is part
of the format, 129 bytes for each table: table u8, then one bit for each of its 1,024 chains, chain n in byte
n // 8 as bit n % 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nvpool.core.errors import InvalidRequest
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.poolmap.file_layout import chain_of

TABLE_BYTES = 1 + CHAINS_PER_TABLE // 8


class ChainSet:
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
