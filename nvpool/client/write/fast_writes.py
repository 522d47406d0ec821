"""Compiled fast path for the most frequent write and the most frequent close.

The write is the first write of a small new file: its bytes are in the mount state and on their way to a store
when the write returns. The store's reply triggers the report if a close waits for it, and the report's reply
completes the close.

Available where a compiler was at hand (`_fast_writes.pyx`). The reference implementation is the path of every
write: client/write/writeback and sender, client/data/write_fast_path and client/rpc/change_fast_path. Bytes on the
wire, the data in the mount state and its order, and all bookkeeping are the same.

Conditions of a write: 4 to 32 KiB at the start of an empty file outside volumes, in one unit, to a chunk whose
first target (the head of its chain) is connected, within all bounds, in a client with mount state. Condition of its reply: the
bytes are stored, and nothing else has happened to the file. Conditions of a report: those of
MetaClient.begin, and a reply of the service. In every other case the slow path takes over before any side
effect, or continues the request under the same request id. Connections that do not carry plain frames over
TCP or unix sockets are used as always.
"""

from __future__ import annotations

from typing import Any, Protocol

from nvpool.client.write.crash_journal import CrashJournal
from nvpool.core.compiled_loader import load_compiled

compiled = load_compiled("nvpool.client.write._fast_writes")


class JournaledClient(Protocol):
    """A client (vfs/client_parts) that may have a crash journal; the compiled module reads its other parts."""

    @property
    def keeping(self) -> CrashJournal | None:
        """The crash journal. None without mount state."""


def plain_writes(parts: JournaledClient) -> Any:
    """The fast path of this client. None without a compiled module or without mount state."""
    return compiled.FastWrites(parts) if compiled is not None and parts.keeping is not None else None
