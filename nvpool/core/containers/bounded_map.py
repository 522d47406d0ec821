"""Bounded dictionaries that forget what came first."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeVar

K = TypeVar("K")


def too_old(entries: dict[K, Any], count_max: int) -> Iterable[K]:
    """Keys to remove now: none while there are at most `count_max`, else what is above it and the sixteenth that came first.

    Not one key for each that is added: `next(iter(entries))` looks past all places of removed keys, 16 µs in a dictionary of
    16,384 and more in a larger one, until it grows the next time.
    """
    over = len(entries) - count_max
    return list(islice(entries, over + (count_max >> 4))) if over > 0 else ()
