"""The view by which a change over several shards is decided: this shard's records, and those of others as they were sent here.

The decisions of `meta/changes` run over it as they do over the view of one shard. What is missing is said by Need; the
coordinator asks for it and decides anew. Pure but for that.
"""

from __future__ import annotations

from nvpool.base.ids import COUNTER_BITS
from nvpool.meta import records
from nvpool.meta.records import Inode
from nvpool.meta.spanning.records import SpanId
from nvpool.meta.view import View

Range = tuple[bytes, bytes, int]


class Need(Exception):
    """The decision needs these of other shards: records to be held, records and ranges to be read, numbers for births; or the
    turn. For the coordinator only."""

    def __init__(self, *, keys: tuple[bytes, ...] = (), looks: tuple[bytes, ...] = (), ranges: tuple[Range, ...] = (),
                 births: tuple[int, ...] = (), turn: bool = False) -> None:
        self.keys = keys
        self.looks = looks
        self.ranges = ranges
        self.births = births
        self.turn = turn


class Span:
    """One change over several shards before it is decided: what was asked for, and who holds something for it."""

    __slots__ = ("id", "order", "identity", "shards", "records", "looks", "ranges", "births", "turn", "decided", "tries")

    def __init__(self, span: SpanId, order: int, identity: int) -> None:
        self.id = span
        self.order = order
        self.identity = identity
        self.decided = False
        self.tries = 0
        self.clear()

    def clear(self) -> None:
        """Nothing is held any more, so nothing is known."""
        self.shards: set[int] = set()
        self.records: dict[bytes, bytes | None] = {}
        self.looks: dict[bytes, bytes | None] = {}
        self.ranges: dict[Range, list[tuple[bytes, bytes]]] = {}
        self.births: dict[int, int] = {}
        self.turn = 0
        """The shard at which we have it; 0: we do not."""


class SpanView(View):
    """Over the view `base` of this shard. Made anew for each attempt."""

    def __init__(self, base: View, span: Span) -> None:
        self.__dict__.update(base.__dict__)
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
        return self.is_elsewhere(records.partition_of_key(key))

    def _check_owner(self, partition: int) -> None:
        """All shards are ours to ask."""

    def ancestor(self, number: int) -> Inode:
        """Not held: under the turn no directory gets another parent, and who has entries is not removed."""
        key = records.inode_key(number)
        if not self._is_others(key) or key in self._span.records:
            return self.inode(number)
        if key not in self._span.looks:
            raise Need(looks=(key,))
        raw = self._span.looks[key]
        return self.inode(number) if raw is None else records.decode_inode(number, raw)

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
