"""Fast path for the commonest requests of a mount: from request frame to answer frame in compiled code.

When a file is created or removed, most of a shard's work is a hundred small steps: decode a message, take
records apart and put them together again, encode an answer. In Python, with an object for each step, they
cost more than all the rest of the system's work for the request. Here they run together in compiled code
(`_fast_path`).

The fast path serves CREATE of a file whose name does not exist, UNLINK, REPORT, and LOOKUP and GETATTR of
existing names and inodes. All of the following must hold:

- the shard owns all partitions;
- the files are in no volume (look-ups: in no volume with restricted access) and in no striped directory;
- no record is locked, being truncated or migrated;
- the session is known, the request is new in its slot, and no other client has a lease;
- the engine accepts changes and needs no sync before an answer.

Every other request takes the slow path (`service`, `transaction.View`, `meta/operations`), before anything
has happened; only the slow path refuses requests. The slow path answers what the fast path answers with the
same bytes, writes the same records and counts the same. A change is applied by `Kv.apply` together with its
slot record before it is answered, and an error of the engine is answered in the same way.

There is no Python implementation of the fast path: without a compiler every request takes the slow path, as
do the tests that call `handle`. Created by `service`; the listener of a stream transport calls it through the
handler's `fast_path` (rpc/api).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.core.compiled_loader import load_compiled
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.sessions.table import Session, Slot
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.transports.frame import REPLY, pack_head

compiled = load_compiled("nvpool.meta.server._fast_path")

IS_COMPILED = compiled is not None


FailChange = Callable[[Session, Slot, int, int, Exception], None]
"""Records that the engine did not accept a change: (session, slot, sequence, mark, error)."""


def open_fast_path(parts: ShardParts, fail_change: FailChange) -> Any | None:
    """Fast path of a shard with these parts; None: not compiled."""
    if compiled is None:
        return None
    return compiled.FastPath(parts, partial(_failed, fail_change))


def _failed(
    fail_change: FailChange,
    session: Session,
    slot: Slot,
    sequence: int,
    mark: int,
    error: Exception,
    number: int,
) -> bytes:
    """Error frame for a change that the engine did not accept, with the same effects as in
    `MetaService.handle`."""
    fail_change(session, slot, sequence, mark, error)
    code, message = encode_error(error)
    return pack_head(REPLY, code, number, 0, message, 0)
