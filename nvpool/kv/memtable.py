"""Memtable: sorted keys, and a layer of newer values above a store.

`OrderedKeys` is a two-level sorted list: an insertion costs a binary search and a short memory move, so a
scan after every change stays cheap with tens of thousands of keys. `Layer` combines such a list with a dict,
and sorts only the keys added since the last scan, because most changes are checkpointed before any scan. Used
by the engines of kv/, by one thread at a time; neither class ever waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice

BUCKET_KEYS = 512
"""Target size of a bucket: moving this many pointers takes about 0.1 µs. A bucket of twice the size is
split."""


class OrderedKeys:
    """Sorted set of byte strings."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.rebuild(keys)

    def rebuild(self, keys: Iterable[bytes]) -> None:
        """Replace the content by `keys`, which are unique and in any order."""
        ordered = sorted(keys)
        self._buckets = [ordered[at : at + BUCKET_KEYS] for at in range(0, len(ordered), BUCKET_KEYS)]
        self._lasts = [bucket[-1] for bucket in self._buckets]

    def add(self, key: bytes) -> None:
        """Add a key that is not in the set."""
        at = bisect_left(self._lasts, key)
        if at == len(self._lasts):
            if not at:
                self._buckets.append([key])
                self._lasts.append(key)
                return
            at -= 1
        bucket = self._buckets[at]
        insort(bucket, key)
        if len(bucket) > 2 * BUCKET_KEYS:
            self._buckets[at : at + 1] = [bucket[:BUCKET_KEYS], bucket[BUCKET_KEYS:]]
            self._lasts[at : at + 1] = [bucket[BUCKET_KEYS - 1], bucket[-1]]
        else:
            self._lasts[at] = bucket[-1]

    def remove(self, key: bytes) -> None:
        """Remove a key that is in the set."""
        at = bisect_left(self._lasts, key)
        bucket = self._buckets[at]
        del bucket[bisect_left(bucket, key)]
        if bucket:
            self._lasts[at] = bucket[-1]
        else:
            del self._buckets[at], self._lasts[at]

    def ascend(self, first: bytes, end: bytes) -> Iterator[bytes]:
        """Yield the keys with first <= key < end. The set must not change during the iteration."""
        at = bisect_left(self._lasts, first)
        if at == len(self._lasts):
            return
        start = bisect_left(self._buckets[at], first)
        for index in range(at, len(self._buckets)):
            bucket = self._buckets[index]
            if self._lasts[index] >= end:
                yield from islice(bucket, start, bisect_left(bucket, end))
                return
            yield from islice(bucket, start, None)
            start = 0

    def descend(self, first: bytes, end: bytes) -> Iterator[bytes]:
        """Yield the keys of `ascend` in descending order."""
        for index in range(min(bisect_left(self._lasts, end), len(self._lasts) - 1), -1, -1):
            bucket = self._buckets[index]
            low, high = bisect_left(bucket, first), bisect_left(bucket, end)
            yield from reversed(bucket[low:high])
            if low:
                return


class Layer:
    """Newer values than the store below: `values` maps a key to its value, or to None if the key was deleted.

    Owners change a layer with `values.update(...)` only. Keys are never removed, so the order of the dict
    shows which keys are not sorted yet.
    """

    __slots__ = ("values", "_keys", "_indexed_count")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes | None] = {}
        self._keys = OrderedKeys()
        self._indexed_count = 0

    def _index(self) -> OrderedKeys:
        new_count = len(self.values) - self._indexed_count
        if new_count:
            if new_count > 64 and new_count * 8 > self._indexed_count:
                self._keys.rebuild(self.values)
            else:
                for key in islice(reversed(self.values), new_count):
                    self._keys.add(key)
            self._indexed_count += new_count
        return self._keys

    def ascend(self, first: bytes, end: bytes) -> Iterator[bytes]:
        return self._index().ascend(first, end)

    def descend(self, first: bytes, end: bytes) -> Iterator[bytes]:
        return self._index().descend(first, end)
