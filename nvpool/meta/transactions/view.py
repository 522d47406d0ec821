"""View of a cross-shard transaction: this shard's records, and records that other shards have sent.

The decisions of `meta/operations` run over it as over the view of one shard. A missing record raises Need;
the coordinator fetches it and decides again. Pure except for that.
"""

from __future__ import annotations

from nvpool.core.ids import COUNTER_BITS
from nvpool.meta.state import records
from nvpool.meta.state.records import WIDE, Inode
from nvpool.meta.state.striped_dirs import StripeView, decode_part, new_part
from nvpool.meta.state.transaction import View
from nvpool.meta.state.transaction_records import TransactionId

Range = tuple[bytes, bytes, int]


class Need(Exception):
    """The decision needs data of other shards; only the coordinator sees this.

    `keys`: records to lock; `looks`: records to read without a lock; `ranges`: ranges to read; `births`:
    partitions in which a new inode number is needed; `turn`: the turn; `named`: (directory, shard) pairs for
    which we need to know whether the directory has names there.
    """

    def __init__(
        self,
        *,
        keys: tuple[bytes, ...] = (),
        looks: tuple[bytes, ...] = (),
        ranges: tuple[Range, ...] = (),
        births: tuple[int, ...] = (),
        turn: bool = False,
        named: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.keys = keys
        self.looks = looks
        self.ranges = ranges
        self.births = births
        self.turn = turn
        self.named = named


class CrossShardTransaction:
    """A cross-shard transaction before its commit: records fetched so far, and shards with locks for it."""

    __slots__ = (
        "id",
        "order",
        "identity",
        "shards",
        "records",
        "looks",
        "ranges",
        "births",
        "turn",
        "decided",
        "tries",
        "named",
    )

    def __init__(self, span: TransactionId, order: int, identity: int) -> None:
        self.id = span
        self.order = order
        self.identity = identity
        self.decided = False
        self.tries = 0
        self.clear()

    def clear(self) -> None:
        """Forget all fetched records, because their locks are released."""
        self.shards: set[int] = set()
        self.records: dict[bytes, bytes | None] = {}
        self.looks: dict[bytes, bytes | None] = {}
        self.ranges: dict[Range, list[tuple[bytes, bytes]]] = {}
        self.births: dict[int, int] = {}
        self.named: dict[tuple[int, int], bool] = {}
        """By directory and shard whose stripe is locked: whether the directory has names at that shard."""
        self.turn = 0
        """Shard that gave us the turn; 0: we do not have it."""


class TransactionView(View):
    """Extends the view `base` of this shard. Each attempt of a decision creates a new one."""

    def __init__(self, base: View, span: CrossShardTransaction) -> None:
        self.take_state(base)
        self._base = base
        self._span = span
        self.get, self.scan = self._get, self._scan

    def _get(self, key: bytes) -> bytes | None:
        if not self._is_others(key):
            return self._base.get(key)
        if key not in self._span.records:
            raise Need(keys=(key,))
        return self._span.records[key]

    def _scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        if not self._is_others(first):
            return self._base.scan(first, end, limit)
        found = self._span.ranges.get((first, end, limit))
        if found is None:
            raise Need(ranges=((first, end, limit),))
        return found

    def _is_others(self, key: bytes) -> bool:
        if records.is_part_key(key):
            return records.part_of_key(key)[1] != self.shard
        return self.is_elsewhere(records.partition_of_key(key))

    def _check_owner(self, partition: int) -> None:
        """Refuse nothing: a cross-shard transaction may ask all shards."""

    def xattr(self, number: int, name: bytes) -> bytes | None:
        """Read without a lock: an inherited attribute may be the one of a moment ago."""
        key = records.xattr_key(number, name)
        if not self._is_others(key) or key in self._span.records:
            return super().xattr(number, name)
        if key not in self._span.looks:
            raise Need(looks=(key,))
        raw = self._span.looks[key]
        return records.decode_xattr(raw) if raw is not None else None

    def ancestor(self, number: int) -> Inode:
        """Read without a lock.

        Under the turn no other directory gets another parent, and a directory with entries is not removed.
        """
        key = records.inode_key(number)
        if not self._is_others(key) or key in self._span.records:
            return self.inode(number)
        if key not in self._span.looks:
            raise Need(looks=(key,))
        raw = self._span.looks[key]
        return self.inode(number) if raw is None else records.decode_inode(number, raw)

    def holder(self, number: int) -> Inode:
        """As `View.holder`; a new stripe if we have none of a divided directory, or it becomes divided
        now."""
        if not self.is_elsewhere(number >> COUNTER_BITS):
            return self._own_holder(number)
        found = self._part(number)
        if found is None:
            found = self.directory(number)
            if found.flags & WIDE and found.links:
                found = new_part(found, self.shard)
        return found

    def parts_of(self, number: int) -> list[StripeView]:
        keys = [records.part_key(number, shard) for shard in self.shards]
        self._need_held(keys)
        return [decode_part(key, raw) for key in keys if (raw := self.get(key)) is not None]

    def _need_held(self, keys: list[bytes], named: tuple[tuple[int, int], ...] = ()) -> None:
        missing = tuple(key for key in keys if self._is_others(key) and key not in self._span.records)
        if missing or named:
            raise Need(keys=missing, named=named)

    def has_names(self, directory: Inode) -> bool:
        """Whether the directory has a name; each shard checks while its stripe is locked.

        From then on no shard changes names in the directory by itself. Changes from its own shard or from
        ours count there.
        """
        if not directory.flags & WIDE:
            return super().has_names(directory)
        number, named, others = (
            directory.number,
            self._span.named,
            [shard for shard in self.shards if shard != self.shard],
        )
        self._need_held(
            [records.part_key(number, shard) for shard in others],
            tuple((number, shard) for shard in others if (number, shard) not in named),
        )
        return any(named[number, shard] for shard in others) or self._base.has_names_here(number)

    def take_turn(self) -> None:
        if not self._span.turn:
            raise Need(turn=True)

    def number_of_birth(self, partition: int) -> int:
        number = self._span.births.get(partition)
        if number is None:
            raise Need(births=(partition,))
        return number


def partition_of_range(asked: Range) -> int:
    return records.partition_of_key(asked[0])


def partition_of_number(number: int) -> int:
    return number >> COUNTER_BITS
