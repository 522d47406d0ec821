"""Reserved ranges behind a file's end for this client's appends that are not published yet.

The metadata service reserves a range without moving the file's end; the end moves when the writer reports
that stores have the bytes (`meta/state/append_reservations`). Until then other clients that append must wait. So
the bytes are sent and reported PUBLISH_S after the write, immediately if other clients append too, and by
every close and fsync. If bytes cannot be stored, all bytes behind them in the reservation are given up and
the reservation is withdrawn: the file ends before them. Owned by `client/write/writeback`.
"""

from __future__ import annotations

from nvpool.client.state.dirty_file import DirtyFile, UnfairLock

PUBLISH_S = 0.02
"""Delay from an append until it is sent: later appends travel with it.

A reader sees a record this much later.
"""


class AppendReservation:
    """The reserved range [start, end) of one open inode, and its state."""

    __slots__ = ("turn", "start", "end", "broken", "doubtful", "shared", "publishing", "void")

    def __init__(self) -> None:
        self.turn = UnfairLock()  # one append at a time reserves its range and is written
        self.start = 0
        self.end = 0  # all appends are published if this is not above the file's published size
        self.broken: int | None = None  # bytes from here on are given up
        self.doubtful = False  # the service may have made a reservation that this client does not know
        self.shared = False  # other clients append to the file
        self.publishing = False
        self.void: set[int] = set()  # numbers of extents in flight that another client's truncation removed

    def reserve(self, offset: int, end: int, size: int) -> None:
        """Record the reservation [offset, end); `size` is the file's published size."""
        if self.end <= size:
            self.start = offset
        self.end = end

    def close(self) -> None:
        """Record that no reservation is open."""
        self.end, self.broken, self.doubtful = 0, None, False


def open_end(written: DirtyFile | None) -> int:
    """End of the open reservation; 0 if there is none."""
    if written is None or written.appended is None or written.appended.end <= written.file.attr.size:
        return 0
    return written.appended.end
