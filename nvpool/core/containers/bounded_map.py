"""Bounded dictionaries that evict their oldest entries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeVar

K = TypeVar("K")


def too_old(entries: dict[K, Any], count_max: int) -> Iterable[K]:
    """Return the keys to evict now: none while there are at most `count_max` entries.

    Above that, the result has the oldest keys: all above `count_max`, and a sixteenth of `count_max` more.
    Evicting in batches is faster than evicting one key per insertion: `next(iter(entries))` scans the slots
    of all removed keys, which takes 16 µs in a dictionary of 16,384 and more in a larger one, until the
    dictionary is resized.
    """
    over = len(entries) - count_max
    return list(islice(entries, over + (count_max >> 4))) if over > 0 else ()
