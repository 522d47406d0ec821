"""Answers to replayed changes, from the slots of their sessions. Used by `meta/server/service`."""

from __future__ import annotations

import asyncio
from typing import Any

from nvpool.core.errors import InvalidRequest, NvpoolError, StaleSequence
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.sessions.table import Session, Slot
from nvpool.rpc.api import Call
from nvpool.rpc.error_codec import TEXT_CHARACTERS_MAX
from nvpool.rpc.v1 import meta_pb2 as pb


class SlotReplays:
    """Answers of slots to changes that they have served already."""

    def __init__(self, parts: ShardParts, replies: CallReplies) -> None:
        self._counters = parts.status.counters
        self._kv = parts.kv
        self._view = parts.view
        self._sessions = parts.sessions
        self._replies = replies

    def repeat(
        self, call: Call, request: Any, session: Session, slot: Slot, sequence: int, mark: int
    ) -> None:
        """Answer a replayed change with its stored answer, when that may be given.

        InvalidRequest: the slot's request with this sequence was another one. StaleSequence: the slot is
        already beyond it.
        """
        self._counters["repeated"] += 1
        if sequence < slot.sequence:
            raise StaleSequence(f"the slot has served request {slot.sequence}, {sequence} came later")
        if not sequence:
            raise InvalidRequest("sequences begin with 1")
        if slot.mark is not None and slot.mark != mark:
            raise InvalidRequest(
                f"request {sequence} of this slot was another one: each change has a sequence of its own"
            )
        slot.awaited = False
        self._sessions.open_again(session, slot, request)
        if slot.error is not None:
            call.fail(slot.error)
        elif slot.waits_for in self._view.cutting:
            cut = asyncio.shield(self._view.cutting[slot.waits_for])
            self._replies.reply_after(call, lambda: cut, slot.answer)
        elif (
            self._kv.sync_before_answer
            or getattr(request, "sync", False)
            or isinstance(request, pb.LockRequest)
        ):
            self._replies.reply_after(call, self._kv.sync, slot.answer)
        else:
            call.reply(slot.answer)

    def keep_refusal(
        self, session: Session, slot: Slot, sequence: int, mark: int, error: NvpoolError
    ) -> None:
        """Keep the refusal of a change as the answer to its replays."""
        self._sessions.give_up(session, slot)
        slot.sequence, slot.waits_for, slot.answer, slot.restored, slot.opened = sequence, 0, b"", False, 0
        slot.mark = mark
        # A copy: the error itself leads, by its traceback, to the request's message. The text may quote the request.
        slot.error = type(error)(
            str(error)[:TEXT_CHARACTERS_MAX],
            may_be_applied=error.may_be_applied,
            retry_after_s=error.retry_after_s,
        )
