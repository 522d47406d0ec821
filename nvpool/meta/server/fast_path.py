"""The commonest requests of a mount, answered where they arrive: from the frame of the request to the frame of the answer.

Of a file that is made, or removed, most of a shard's work is a hundred small decisions: a message read, records taken apart
and put together, an answer written. Made one by one in Python, with an object for each, they cost more than all that the system
does for the request. Here they are made together, compiled (`_atonce`).

Only plain sailing: CREATE of a file whose name is not there, UNLINK, REPORT, LOOKUP and GETATTR of what is there; in a shard
that has all partitions to itself, in no volume (look-ups: in none that restricts anybody) and no wide directory, nothing held,
cut or moved; a session that is known, a request that is new in its slot, nobody else with a lease, an engine that takes changes
and need not be synced before an answer. Whatever else it is goes the way of every request (`service`, `view`, `changes`,
`queries`), before anything has happened; that way alone has refusals. What is answered here is answered there with the same
bytes, written with the same records and counted the same: a change is applied by `Kv.apply` with its slot's record before it is
answered, and what the engine then refuses is answered as there.

There is no twin in Python: without a compiler all is decided the ordinary way, as it is in tests that call `handle`. Made by
`service`; called by a listener of the stream transports through the handler's `at_once` (rpc/api).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvpool.core.compiled import load_compiled
from nvpool.core.errors import Fenced, Refused
from nvpool.meta.sessions.table import Session, Slot
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.transports.frame import REPLY, pack_head

if TYPE_CHECKING:
    from nvpool.meta.server.service import MetaService

_fast_path = load_compiled("nvpool.meta.server._fast_path")

IS_COMPILED = _fast_path is not None


def answers_at_once(service: MetaService) -> Any | None:
    """What answers such requests of the service, by what that reads and keeps at the moment; None: not compiled."""
    if _fast_path is None:
        return None
    return _fast_path.AtOnce(service, _failed)


def _failed(service: MetaService, session: Session, slot: Slot, sequence: int, mark: int, error: Exception,
            number: int) -> bytes:
    """The engine did not take a change: as MetaService.handle says it."""
    if isinstance(error, Refused):
        service._counters["refused"] += 1
        service._keep_refusal(session, slot, sequence, mark, error)
    elif isinstance(error, Fenced):
        service._die(error)
    code, message = encode_error(error)
    return pack_head(REPLY, code, number, 0, message, 0)
