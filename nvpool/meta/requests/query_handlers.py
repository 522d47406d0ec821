"""Handlers of listings, look-ups of many names, statfs and sync. Made by `meta/server/service`.

Long work runs in steps, so that other requests get their turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nvpool.meta.operations import queries as lookup_operations
from nvpool.meta.operations.listing import LIST_LIMIT_MAX, STEP_OF_CLIENT, attributes_in_steps, listing
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire


class QueryHandlers:
    """Requests that change nothing and are not in `meta/requests/dispatch_table`."""

    def __init__(self, parts: ShardParts, replies: CallReplies) -> None:
        self._options = parts.options
        self._clock = parts.clock
        self._callers = parts.callers
        self._counters = parts.status.counters
        self._kv = parts.kv
        self._view = parts.view
        self._sessions = parts.sessions
        self._users = parts.users
        self._replies = replies

    def routes(self) -> dict[int, Callable[[Call], None]]:
        """Handlers by method."""
        return {
            wire.META_LIST: self._list,
            wire.META_LOOKUP_MANY: self._lookup_many,
            wire.META_GETATTR_MANY: self._getattr_many,
            wire.META_PARTS: self._parts,
            wire.META_NAMES: self._names,
            wire.META_STATFS: self.statfs,
            wire.META_SYNC: self._sync,
        }

    def _list(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.ListDirRequest.FromString(bytes(call.message))
        self._sessions.of(request.session, self._callers.owner_of(call))
        user = self._callers.user_of(call)
        shown = user is None or self._users.listed(self._view, user, request)
        steps = listing(
            self._view,
            request,
            self._clock.wall_ns,
            names_alone=not shown,
            entries_per_step=STEP_OF_CLIENT if self._callers.account_of(call) else LIST_LIMIT_MAX,
            note=partial(self._users.note_listing, user, request.inode)
            if user is not None and shown
            else None,
        )
        self._replies.reply_in_steps(
            call, steps if user is None else self._users.listed_in_steps(self._view, user, request, steps)
        )

    def _lookup_many(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.LookupManyRequest.FromString(bytes(call.message))
        self._sessions.of(request.session, self._callers.owner_of(call))
        user = self._callers.user_of(call)
        look_up = (
            partial(
                lookup_operations.lookup_many,
                names_per_step=lookup_operations.LOOKUP_STEP_OF_CLIENT
                if self._callers.account_of(call)
                else lookup_operations.LOOKUP_STEP,
            )
            if user is None
            else partial(self._users.lookup_many, credentials=user)
        )
        self._replies.reply_in_steps(call, look_up(self._view, request=request, now_ns=self._clock.wall_ns))

    def _getattr_many(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.GetAttrManyRequest.FromString(bytes(call.message))
        self._sessions.of(request.session, self._callers.owner_of(call))
        if (user := self._callers.user_of(call)) is not None:
            self._replies.reply_in_steps(
                call, self._users.getattr_many(self._view, request, self._clock.wall_ns, user)
            )
            return
        inodes_per_step = STEP_OF_CLIENT if self._callers.account_of(call) else LIST_LIMIT_MAX
        self._replies.reply_in_steps(
            call, attributes_in_steps(self._view, request, self._clock.wall_ns, inodes_per_step)
        )

    def _parts(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.PartsRequest.FromString(bytes(call.message))
        self._sessions.of(request.session, self._callers.owner_of(call))
        call.reply(lookup_operations.parts(self._view, request).SerializeToString())

    def _names(self, call: Call) -> None:
        call.reply(
            lookup_operations.names(
                self._view, pb.NamesRequest.FromString(bytes(call.message))
            ).SerializeToString()
        )

    def statfs(self, call: Call) -> None:
        """Answer STATFS."""
        self._sessions.of(
            pb.StatFsRequest.FromString(bytes(call.message)).session, self._callers.owner_of(call)
        )
        call.reply(
            lookup_operations.statfs(
                self._view, self._kv.statistics(), self._options.files_max
            ).SerializeToString()
        )

    def _sync(self, call: Call) -> None:
        session = pb.SyncRequest.FromString(bytes(call.message)).session
        if session or self._callers.owner_of(
            call
        ):  # tools that check a pool run on a node and have no session
            self._sessions.of(session, self._callers.owner_of(call))
        self._replies.reply_after(call, self._kv.sync, pb.SyncReply().SerializeToString())
