"""Allocator for an arena of bytes: sizes are powers of two, carved out of pieces of 1 MiB.

The allocator manages offsets only; `shm/mount_state`, its only user, owns the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvpool.core.errors import CorruptRecord, NoSpace
from nvpool.core.units import MIB

_SMALLEST_BITS = 6
_PIECE_BITS = 20
_KINDS = _PIECE_BITS - _SMALLEST_BITS + 1
_SMALLEST, _PIECE, _LIMIT = _SMALLEST_BITS, _PIECE_BITS, _KINDS


def _kind(length: int) -> int:
    """Size class of an allocation: it has 1 << kind + 6 bytes. _KINDS if there is none of this size."""
    kind = 0
    while kind < _LIMIT and length > 1 << kind + _SMALLEST:
        kind += 1
    return kind


class Arena:
    """Free and used places of an arena.

    `held` lists (place, length) of existing allocations; CorruptRecord if they are not possible allocations.
    """

    def __init__(self, byte_count: int, held: Iterable[tuple[int, int]] = ()) -> None:
        count = byte_count >> _PIECE_BITS
        self._kinds = [-1] * count  # size class of each piece; -1 for an unused piece
        self.used = [0] * count  # allocated places in each piece
        self.fresh = list(range(count - 1, -1, -1))
        self.free: list[list[int]] = [[] for _ in range(_KINDS)]
        self.taken = 0
        places: dict[int, set[int]] = {}
        for place, length in held:
            kind, piece = _kind(length), place >> _PIECE_BITS
            if (
                not 0 < length <= MIB
                or piece >= count
                or place & (1 << kind + _SMALLEST_BITS) - 1
                or self._kinds[piece] not in (-1, kind)
                or place in places.get(piece, ())
            ):
                raise CorruptRecord(f"an allocation of {length} bytes at {place} is invalid")
            self._kinds[piece] = kind
            places.setdefault(piece, set()).add(place)
            self.used[piece] += 1
            self.taken += 1
        for piece, taken in places.items():
            self.free[self._kinds[piece]] += [place for place in self._carved(piece) if place not in taken]
        self.fresh = [piece for piece in self.fresh if self._kinds[piece] < 0]

    def _carved(self, piece: int) -> range:
        return range(piece << _PIECE_BITS, piece + 1 << _PIECE_BITS, 1 << self._kinds[piece] + _SMALLEST_BITS)

    def has_room(self, length: int) -> bool:
        """Return whether `length` bytes can be allocated, in parts of up to 1 MiB each."""
        wanted = (length >> _PIECE) + 2
        if len(self.fresh) < wanted:
            self._gather()
        return len(self.fresh) >= wanted

    def take(self, length: int) -> int:
        """Allocate up to 1 MiB and return its place; NoSpace if the arena is full."""
        kind = _kind(length)
        free: list[int] = self.free[kind]
        if not free:
            if not self.fresh:
                self._gather()
            if not self.fresh:
                raise NoSpace("the mount state has no space for more writes")
            piece = self.fresh.pop()
            self._kinds[piece] = kind
            free += reversed(self._carved(piece))
        place = free.pop()
        self.used[place >> _PIECE] += 1
        self.taken += 1
        return place

    def give_back(self, place: int) -> None:
        piece = place >> _PIECE
        kind: int = self._kinds[piece]
        free: list[int] = self.free[kind]
        free.append(place)
        self.used[piece] -= 1
        self.taken -= 1

    def _gather(self) -> None:
        """Make pieces without allocations available for every size class again."""
        empty = {piece for piece, kind in enumerate(self._kinds) if kind >= 0 and not self.used[piece]}
        for kind in {self._kinds[piece] for piece in empty}:
            self.free[kind] = [place for place in self.free[kind] if place >> _PIECE_BITS not in empty]
        for piece in empty:
            self._kinds[piece] = -1
        self.fresh += empty

    def trim(self) -> bool:
        """Return whether the arena is empty after use; then its pages can be returned to the system."""
        if self.taken or all(kind < 0 for kind in self._kinds):
            return False
        self._gather()
        return True
