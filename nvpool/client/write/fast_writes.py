"""The commonest write and the commonest close in compiled steps: the first bytes of a small new file, kept and on their way to
a store when the write returns; its answer, which sends the report where somebody waits for that; and the report's.

Where a compiler was (`_plainwrites`); the twin is the way of every write: client/write/writeback, sending, writing and begun.
The bytes on the wire, what is kept in the memory that outlives us (and in which order) and the books are the same.

Only plain sailing. Of a write: from 4 to 32 KiB at the beginning of a file without a volume that is empty, in one unit, to a
chunk with one target that is connected, with room in all bounds, in a client that keeps what is written. Of its answer: that it
is stored, and nothing else has happened to the file. Of a report: what begun.Begins wants, and an answer of the service. All
else is left to the ordinary way before anything has happened, or goes on there under the name that it has. Over other
connections than frames over TCP and unix sockets it is submitted as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvpool.core.compiled import load_compiled

_fast_writes = load_compiled("nvpool.client.write._fast_writes")

if TYPE_CHECKING:
    from nvpool.client.vfs.client import Core


def plain_writes(vfs: Core) -> Any:
    """What Writer.plain is for this client; None where that can not be here."""
    return _fast_writes.Writes(vfs) if _fast_writes is not None and vfs.keeping is not None else None
