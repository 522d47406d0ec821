"""Watch of a session at its shard: keeps the leases alive and receives recalls.

One request is always pending at the shard, which answers it after a third of the watch's time or when there
is a recall. The next request acknowledges the reply: so it is sent when the recalled leases are dropped here,
and opens by a lease of those files are reported. No caller waits for the watch; if it fails, the leases
expire by themselves. Made by the metadata client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvpool.client.state.leases import NEVER_S, WATCH_SHARE, Leases, ShardWatch
from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, StaleSession
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2

IDLE_S = 60.0
"""Time without use of a lease after which a session gives up all its leases.

Then it stops watching until its next query.
"""
ANSWER_S = 10.0


async def keep_watch(
    watch: ShardWatch,
    session: int,
    *,
    send: Callable[[meta_pb2.WatchRequest, float], Awaitable],
    leases: Leases,
    ended: Callable[[list[int]], Awaitable[None]],
    newer: Callable[[int], None],
    settled: Callable[[], Awaitable[None]],
    options: ClientOptions,
    clock: Clock,
) -> None:
    """Watch until the session is gone or its leases are unused.

    `send(request, deadline_s)` sends a request. `ended(inodes)` is called with recalled inodes, and returns
    when the shard may continue. `newer(epoch)` is called with the epoch of the shard's pool map. `settled()`
    returns when the data of all delegated files is reported: the shard shows them to others once a request has
    a new number of the watch.
    """
    await settled()
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
            return  # the next query gets the same error and opens another session
        except NvpoolError:
            tries += 1
            await asyncio.sleep(
                min(options.retry_last_s / 2, options.retry_first_s * 2 ** min(tries - 1, 16))
            )
            continue
        tries = 0
        newer(reply.map_epoch)
        if reply.watch != request.watch:
            leases.end_all(watch)
            watch.number = reply.watch
            await settled()
        inodes = read_write_codec.unpack_inodes(reply.inodes)
        leases.end(watch, inodes)
        watch.seen = reply.number
        watch.delegates = reply.delegates
        watch.until_s = max(watch.until_s, sent_s + reply.watch_ms * WATCH_SHARE / 1000)
        if inodes:
            await ended(inodes)


async def _leave(
    watch: ShardWatch,
    session: int,
    send: Callable[[meta_pb2.WatchRequest, float], Awaitable],
    leases: Leases,
    deadline_s: float,
) -> None:
    """Give up all leases at the shard.

    A watch that just stopped would delay changes of other clients until its time is over.
    """
    leases.end_all(watch)
    watch.until_s, watch.delegates = NEVER_S, False
    request = meta_pb2.WatchRequest(session=session, watch=watch.number, seen=watch.seen, leaves=True)
    try:
        reply = decoded(meta_pb2.WatchReply, await send(request, deadline_s))
    except NvpoolError:
        return  # the leases end by themselves
    leases.end_all(watch)  # also those of replies that have arrived meanwhile
    watch.number, watch.seen = reply.watch, reply.number
