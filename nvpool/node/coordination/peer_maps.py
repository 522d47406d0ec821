"""Asks the other nodes for their newest pool map when etcd is unreachable.

The map, and etcd's members with it, may have changed while this node was offline. Used by
node/coordination/map_backend before an etcd member is started, and by node/coordination/etcd_members while
etcd does not answer.
"""

from __future__ import annotations

import asyncio
import logging

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NvpoolError, StaleIdentity
from nvpool.poolmap.model import Node, PoolMap, decode_map
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import pool_pb2, wire_pb2

ASK_S = 3.0
MORE_S = 1.0
"""Time for the other nodes once one has answered.

Each of them follows the map, so a second answer is rarely newer."""
_NODES_MAX = 16
"""Most nodes asked concurrently, those with etcd members first."""

log = logging.getLogger("nvpool.node.coordination.peer_maps")


def away(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    """Endpoints without unix sockets: those may be another node's, and the node must see our certificate."""
    return tuple(endpoint for endpoint in endpoints if not endpoint.startswith("stream+unix"))


async def newest_elsewhere(pool_map: PoolMap, own: int, dialer: Dialer) -> PoolMap | None:
    """Return the newest map of another node if it is newer than `pool_map`, else None.

    Waits at most ASK_S, and MORE_S after the first answer. StaleIdentity: no node sent its map, and one
    reported that this node is not in the pool.
    """
    keeping = {one.node for one in pool_map.etcd}
    others = sorted(
        (node for node in pool_map.nodes if node.id != own), key=lambda node: node.id not in keeping
    )
    asked = [asyncio.ensure_future(_map_of(node, pool_map.epoch, dialer)) for node in others[:_NODES_MAX]]
    found = await _answers(asked)
    refused = next((one for one in found if isinstance(one, StaleIdentity)), None)
    if refused is not None and not any(isinstance(one, PoolMap) or one is None for one in found):
        raise refused
    return max((one for one in found if isinstance(one, PoolMap)), key=lambda one: one.epoch, default=None)


async def _answers(asked: list[asyncio.Task]) -> list[PoolMap | NvpoolError | None]:
    """Results of the tasks. Tasks that take long after the first map are cancelled and have no result."""
    waiting, until_s = set(asked), None
    try:
        while waiting:
            wait_s = None if until_s is None else max(0.0, until_s - SYSTEM_CLOCK.boottime_s())
            done, waiting = await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if until_s is None and not all(isinstance(one.result(), NvpoolError) for one in done):
                until_s = SYSTEM_CLOCK.boottime_s() + MORE_S
    finally:
        for one in asked:
            one.cancel()
    return [one.result() for one in asked if one.done() and not one.cancelled()]


async def _map_of(node: Node, epoch: int, dialer: Dialer) -> PoolMap | NvpoolError | None:
    """Ask one node; None: it has no newer map."""
    request = pool_pb2.MapRequest(newer_than=epoch).SerializeToString()
    try:
        reply = await dialer.call(
            away(node.endpoints), wire_pb2.POOL_MAP, request, deadline_s=SYSTEM_CLOCK.boottime_s() + ASK_S
        )
        raw = decoded(pool_pb2.MapReply, reply.message).map
        return decode_map(raw) if raw else None
    except NvpoolError as error:
        log.debug("node %d has no newer map for us: %s", node.id, error)
        return error
