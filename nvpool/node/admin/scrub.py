"""Scrub commands for the targets of all nodes, for the verb `scrub` of POOL_CHANGE. Used by node/supervisor.

Each target stores the command: a pause outlives every restart. A target that does not answer has not received
the command, and the result names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import InvalidRequest, NvpoolError
from nvpool.core.grants import SERVICE, Grant, sign
from nvpool.node.admin.drives import find
from nvpool.poolmap.model import PoolMap, Target
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.v1 import data_pb2, wire_pb2

_CALL_S = 5.0
_RIGHT_MS = 60_000


class ScrubCommands:
    def __init__(
        self, node: int, pool_map: Callable[[], PoolMap], dialer: Dialer, secret: Callable[[], bytes]
    ) -> None:
        self._node = node
        self._pool_map = pool_map
        self._dialer = dialer
        self._secret = secret

    async def order(self, arguments: dict) -> dict:
        """Send {order: start, pause, resume or stop} to one target or to all.

        `drive` (number or path) or `target` in the arguments names one; without them the command goes to all
        targets.
        """
        pool_map = self._pool_map()
        targets = [target for target in pool_map.targets if not target.is_over]
        if arguments.get("drive"):
            targets = [find(pool_map, {"drive": str(arguments["drive"])}, self._node)]
        elif arguments.get("target"):
            targets = [target for target in targets if str(target.id) == str(arguments["target"])]
            if not targets:
                raise InvalidRequest(
                    f"the pool has no target {arguments['target']}; `nvpool drive ls POOL` lists them"
                )
        ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + _RIGHT_MS
        right = sign(Grant(SERVICE, 0, 0, 0, 0, ends_ms), self._secret())
        failures = await asyncio.gather(
            *(self._send_command(pool_map, target, str(arguments.get("order")), right) for target in targets)
        )
        return {
            "targets": sorted(
                target.id for target, reason in zip(targets, failures, strict=True) if not reason
            ),
            "silent": {
                str(target.id): reason for target, reason in zip(targets, failures, strict=True) if reason
            },
        }

    async def _send_command(self, pool_map: PoolMap, target: Target, order: str, right: bytes) -> str:
        """Send the command to a target. Return the reason if it was not received, else ""."""
        request = data_pb2.ScrubOrderRequest(
            map_epoch=pool_map.epoch, target=target.id, authority=right, order=order
        )
        try:
            await self._dialer.call(
                target.endpoints,
                wire_pb2.DATA_SCRUB_ORDER,
                request.SerializeToString(),
                deadline_s=SYSTEM_CLOCK.boottime_s() + _CALL_S,
            )
        except InvalidRequest:
            raise
        except NvpoolError as error:
            return str(error)
        return ""


def scrub_status(scrubbing: data_pb2.Scrubbing) -> dict:
    """Scrub status of a target, for `nvpool status`."""
    return {field.name: getattr(scrubbing, field.name) for field in scrubbing.DESCRIPTOR.fields}
