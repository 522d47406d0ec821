"""Lock operation: acquire, change, release or wait for a lock of fcntl(2) or flock(2)."""

from __future__ import annotations

from functools import partial

from nvpool.core.errors import InvalidRequest
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, RECORD, UNLOCKED, WHOLE
from nvpool.meta.state.lock_table import Owner
from nvpool.meta.state.transaction import Draft, View, fill_attr
from nvpool.rpc.v1 import meta_pb2


def lock(view: View, request: meta_pb2.LockRequest, now_ns: int) -> Draft:
    """Grant the lock, or give the request a place in the queue if it waits, or neither.

    A change is synced before it is answered, so acquired and released locks survive a power loss.
    """
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if not inode.is_file:
        raise InvalidRequest(f"inode {inode.number} is not a file")
    check_range(request)
    owner = Owner(request.kind, request.change.session, request.owner)
    step = view.locks.decide(
        inode.number,
        owner,
        request.start,
        request.end,
        request.mode,
        request.pid,
        request.wait,
        request.ticket,
    )
    draft.effects.update(step.effects)
    draft.then = partial(view.locks.commit, step)
    draft.sync = bool(step.effects)
    reply = draft.reply = meta_pb2.LockReply(granted=step.granted)
    if step.granted and request.mode != UNLOCKED:
        fill_attr(reply.attr, inode)
    elif step.waiter is not None and not step.granted:
        reply.ticket = step.waiter.ticket
    return draft


def check_range(request: meta_pb2.LockRequest | meta_pb2.LocksRequest) -> None:
    """InvalidRequest: kind, mode and bytes do not describe a lock."""
    if request.kind not in (RECORD, WHOLE) or request.mode > EXCLUSIVE:
        raise InvalidRequest(f"there are no locks of kind {request.kind} and mode {request.mode}")
    if not request.start <= request.end <= LAST_BYTE or (
        request.kind == WHOLE and request.end - request.start < LAST_BYTE
    ):
        raise InvalidRequest(f"bytes {request.start} to {request.end} cannot be locked")
