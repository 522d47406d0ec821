"""Places behind the end of a file that were reserved for appends of this client, and that are not published yet.

The metadata service gives a place without moving the file's end; the end moves when the writer reports that stores have the
bytes (`meta/sessions/append_order`). Until then other clients that append wait. So the bytes are sent and reported PUBLISH_S
after the write, immediately if other clients append too, and by every close and fsync. Where bytes cannot be stored, all that
lie behind them in the reservation are given up and the reservation is withdrawn: the file ends before them. Kept by
`client/write/writeback`.
"""

from __future__ import annotations

from nvpool.client.state.dirty_file import Turn, WrittenFile

PUBLISH_S = 0.02
"""From an append until it is sent: appends that follow within travel with it. A reader sees a record so much later."""


class Appended:
    """Reserved places of one open inode: [start, end) of the file, given under the cut number `cut`."""

    __slots__ = ("turn", "start", "end", "broken", "doubtful", "shared", "publishing", "void")

    def __init__(self) -> None:
        self.turn = Turn()      # one append at a time asks for its place and is taken
        self.start = 0
        self.end = 0            # nothing is unpublished where the file's published size is not below
        self.broken: int | None = None  # what lies from here on is given up
        self.doubtful = False   # there may be a place that we were not told of
        self.shared = False     # other clients append to the file
        self.publishing = False
        self.void: set[int] = set()  # numbers of segments on their way that a truncation by others took away

    def reserve(self, offset: int, end: int, size: int) -> None:
        """[offset, end) is ours; the published size is `size`."""
        if self.end <= size:
            self.start = offset
        self.end = end

    def close(self) -> None:
        """No reservation is open."""
        self.end, self.broken, self.doubtful = 0, None, False


def open_end(written: WrittenFile | None) -> int:
    """End of the open reservation; 0: there is none."""
    if written is None or written.appended is None or written.appended.end <= written.file.attr.size:
        return 0
    return written.appended.end
