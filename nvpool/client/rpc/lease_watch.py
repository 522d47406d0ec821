"""Keeps the watch of a session at its shard: by it leases hold, and by it we are told when they end.

One request is always at the shard, which keeps it for a third of the watch's time or until it has something to tell. The next
one says that the answer was heeded: so it is sent when the leases are gone here and the files that are open and were opened
without a question are registered. Nobody waits for this; where it fails leases end by themselves. Made by metaclient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvpool.client.state.leases import NEVER_S, WATCH_SHARE, Leases, ShardWatch
from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, StaleSession
from nvpool.rpc.messages import data_codec
from nvpool.rpc.messages.data_codec import decoded
from nvpool.rpc.v1 import meta_pb2

IDLE_S = 60.0
"""A session that has used no lease for so long gives all of them up and stops watching until its next question."""
ANSWER_S = 10.0


async def keep_watch(watch: ShardWatch, session: int, *, send: Callable[[meta_pb2.WatchRequest, float], Awaitable],
                     leases: Leases, ended: Callable[[list[int]], Awaitable[None]], newer: Callable[[int], None],
                     options: ClientOptions, clock: Clock) -> None:
    """Until the session is gone or nobody uses its leases. `send(request, deadline_s)`; `ended(inodes)` is told of leases that
    have ended, and returns when the shard may go on; `newer(epoch)` that the shard knows the map of that epoch."""
    used_s = clock.boottime_s()
    tries = 0
    while True:
        sent_s = clock.boottime_s()
        if watch.used:
            watch.used, used_s = False, sent_s
        elif sent_s - used_s > IDLE_S:
            await _leave(watch, session, send, leases, sent_s + ANSWER_S)
            return
        request = meta_pb2.WatchRequest(session=session, watch=watch.number, seen=watch.seen)
        try:
            reply = decoded(meta_pb2.WatchReply, await send(request, sent_s + ANSWER_S))
        except StaleSession:
            return  # who asks next finds out and opens another
        except NvpoolError:
            tries += 1
            await asyncio.sleep(min(options.retry_last_s / 2, options.retry_first_s * 2 ** min(tries - 1, 16)))
            continue
        tries = 0
        newer(reply.map_epoch)
        if reply.watch != request.watch:
            leases.end_all(watch)
            watch.number = reply.watch
        inodes = data_codec.unpack_inodes(reply.inodes)
        leases.end(watch, inodes)
        watch.seen = reply.number
        watch.until_s = max(watch.until_s, sent_s + reply.watch_ms * WATCH_SHARE / 1000)
        if inodes:
            await ended(inodes)


async def _leave(watch: ShardWatch, session: int, send: Callable[[meta_pb2.WatchRequest, float], Awaitable], leases: Leases,
                 deadline_s: float) -> None:
    """Give up all leases at the shard. A watch that only stops holds up changes of other clients until its time is over."""
    leases.end_all(watch)
    watch.until_s = NEVER_S
    request = meta_pb2.WatchRequest(session=session, watch=watch.number, seen=watch.seen, leaves=True)
    try:
        reply = decoded(meta_pb2.WatchReply, await send(request, deadline_s))
    except NvpoolError:
        return  # the leases end by themselves
    leases.end_all(watch)  # also those of answers that have come meanwhile
    watch.number, watch.seen = reply.watch, reply.number
