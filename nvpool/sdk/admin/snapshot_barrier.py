"""Start of a check or a dump on all shards at one snapshot barrier.

The barrier is one point in time for the whole pool (meta/snapshot_barrier). The pool serves meanwhile.
sdk/fsck/metadata and sdk/dump use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, NotFound, NvpoolError, Stale, Unavailable
from nvpool.core.units import PARTITION_COUNT
from nvpool.rpc.messages.fsck_sums import unpack_bits
from nvpool.rpc.v1 import wire_pb2
from nvpool.rpc.v1.meta_pb2 import MomentReply, MomentRequest
from nvpool.sdk.admin.daemon_calls import AWAY_S, AdminCalls

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

_Answer = TypeVar("_Answer")

TRY_S = 60.0
"""Time limit for reaching a barrier. Obstacles are other checks and dumps that start, moving partitions,
and busy shards. One attempt takes milliseconds."""
PAUSE_S = 0.05
FORGET_S = 2.0
RESTARTS_MAX = 10
"""Restarts of one walk. A pool whose shards change more often during a walk needs an operator first."""


class BarrierCursors(NamedTuple):
    cursors: dict[int, bytes]
    """Cursor of the check or dump on each shard."""
    holders: tuple[int, ...]
    """Shard of each partition at the barrier: the walk of that shard covers the partition."""


async def walk_at_all(
    client: Client,
    walk: Callable[[BarrierCursors], Awaitable[None]],
    on_restart: Callable[[str], None],
    *,
    dump: bool = False,
    repair: bool = False,
) -> None:
    """Start a check or a dump on all shards, and run `walk` on it.

    If a shard gets another process meanwhile, or leaves the pool, its part is lost, and another barrier does
    not fit to the parts of the other shards. Then everything starts again, up to RESTARTS_MAX times; `on_restart` is
    called before with the reason. Errors: those of `begin_at_all`, and the error that ended the last walk.
    """
    for times in range(RESTARTS_MAX + 1):
        begun = await begin_at_all(client, dump=dump, repair=repair)
        try:
            return await walk(begun)
        except BaseException as error:
            await _forget(AdminCalls(client), begun)
            if times == RESTARTS_MAX or not isinstance(error, Unavailable | Stale | NotFound):
                raise
            on_restart(str(error) or type(error).__name__)


async def _forget(asking: AdminCalls, begun: BarrierCursors) -> None:
    """End the walks on the shards, to free their slots. A shard that does not get the message frees its
    slot itself after a while."""

    async def forget(shard: int) -> None:
        with suppress(NvpoolError, TimeoutError):
            async with asyncio.timeout(FORGET_S):
                request = MomentRequest(stage=MomentRequest.END, drop=begun.cursors[shard])
                await asking.shard(shard, wire_pb2.META_MOMENT, request, MomentReply)

    await _all(forget, list(begun.cursors))


async def begin_at_all(client: Client, *, dump: bool = False, repair: bool = False) -> BarrierCursors:
    """Start a check or a dump on each shard, at one barrier for all shards.

    Changes of clients wait for some round trips meanwhile, two seconds at most; none is refused.

    Busy  no barrier could be reached within a minute: try again when the pool is less busy
    InUse  too many checks and dumps are running on a shard
    Unreachable, DeadlineExceeded, Disconnected  a shard did not answer for AWAY_S
    """
    since_s = client.clock.boottime_s()
    while True:
        await client.refresh_map()
        try:
            return await _try(AdminCalls(client), client.clock, dump, repair)
        except (Unavailable, Stale) as error:
            if client.clock.boottime_s() - since_s >= (TRY_S if isinstance(error, Busy | Stale) else AWAY_S):
                raise
            await asyncio.sleep(max(PAUSE_S, error.retry_after_s) * (0.5 + client.clock.random().random()))


async def _try(asking: AdminCalls, clock: Clock, dump: bool, repair: bool) -> BarrierCursors:
    number = int.from_bytes(clock.secret(8), "little") | 1
    shards = [shard.id for shard in asking.pool_map.shards]
    begun: dict[int, bytes] = {}

    async def ask(
        shard: int, stage: MomentRequest.Stage, *, dump: bool = False, repair: bool = False, drop: bytes = b""
    ) -> MomentReply:
        request = MomentRequest(id=number, stage=stage, dump=dump, repair=repair, drop=drop)
        return (await asking.shard(shard, wire_pb2.META_MOMENT, request, MomentReply))[0]

    async def take(shard: int) -> list[int]:
        reply = await ask(shard, MomentRequest.TAKE, dump=dump, repair=repair)
        begun[shard] = reply.cursor
        return unpack_bits(reply.partitions)

    async def drop(shard: int) -> None:
        with suppress(NvpoolError):  # the shard resumes by itself, and drops a walk that nobody continues
            await ask(shard, MomentRequest.END, drop=begun.get(shard, b""))

    try:
        await _all(lambda shard: ask(shard, MomentRequest.QUIET), shards)
        parts = await _all(take, shards)
        ended = await _all(lambda shard: ask(shard, MomentRequest.END), shards)
        if not all(reply.stood for reply in ended):
            raise Busy("the shards did not stand still long enough for one moment of all")
        holders = {partition: shard for shard, part in zip(shards, parts, strict=True) for partition in part}
        if len(holders) != PARTITION_COUNT or sum(map(len, parts)) != PARTITION_COUNT:
            raise Busy("partitions were just being handed over")
        return BarrierCursors(begun, tuple(holders[partition] for partition in range(PARTITION_COUNT)))
    except BaseException:
        await _all(drop, shards)
        raise


async def _all(ask: Callable[[int], Awaitable[_Answer]], shards: list[int]) -> list[_Answer]:
    """Call `ask` for all shards and await all calls. Then raise the first error, if any."""
    answers = await asyncio.gather(*map(ask, shards), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]  # no error is among them
