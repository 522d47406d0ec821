"""Heartbeats of a store: several times per lease the store renews its serving lease.

A heartbeat goes to the manager, through the supervisor of the node. It reports that the store serves, and
what the store has caught up with. Used by daemons/store. A heartbeat waits only for the answer to the one
before. It is sent immediately when a new map is known, because others wait for that report. A late answer is
worth less, because the lease counts from the sending of the heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import Callable

from nvpool.cluster.chain_manager import BEAT_S, EQUAL
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.lease_renewal import LeaseCalls
from nvpool.rpc.v1.pool_pb2 import AliveReply, AliveRequest
from nvpool.rpc.v1.wire_pb2 import POOL_ALIVE
from nvpool.store.replication.reachability import ReachabilityProbe
from nvpool.store.server.service import StoreService

_ANSWER_S = 1.0
_AGAIN_S = 0.15
"""Pause after a heartbeat that nobody accepted, while another node becomes leader."""
_USED_EVERY = 4
"""Heartbeats between two reads of the used bytes, which change slowly."""

log = logging.getLogger("nvpool.daemons.store_heartbeat")


class HeartbeatSender:
    def __init__(
        self,
        service: StoreService,
        dialer: Dialer,
        endpoints: Callable[[], tuple[str, ...]],
        clock: Clock = SYSTEM_CLOCK,
    ):
        """`endpoints`: returns the present endpoints of this node's supervisor."""
        self._service = service
        self._calls = LeaseCalls(dialer, clock)
        self._endpoints = endpoints
        self._clock = clock
        self._news = asyncio.Event()
        service.serving_lease.changed.append(self._news.set)
        peers = service.replica.peers
        self._reach = (
            None
            if peers is None
            else ReachabilityProbe(
                peers, Dialer(dialer.greeting, clock=clock), clock, on_change=self._news.set
            )
        )
        self._used_bytes = 0
        self._count = 0
        self._silent = False

    async def run(self) -> None:
        """Send heartbeats until cancelled. No answer, and no missing answer, ends this."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._beat_on())
            if self._reach is not None:
                parts.create_task(self._reach.run())

    async def _beat_on(self) -> None:
        while True:
            self._news.clear()
            sent_s = self._clock.boottime_s()
            await self.beat()
            next_s = sent_s + BEAT_S - self._clock.boottime_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min(next_s, _AGAIN_S) if self._silent else next_s)):
                    await self._news.wait()
            await asyncio.sleep(0.01)  # of several maps that arrive together report only the last

    async def beat(self) -> None:
        """Send one heartbeat and apply the answer."""
        service, serving_lease = self._service, self._service.serving_lease
        if self._count % _USED_EVERY == 0:
            self._used_bytes = service.store.status()["used_bytes"]
        self._count += 1
        upkeep = getattr(service, "upkeep", None)
        equal = upkeep.resync.equal if upkeep is not None else {}
        request = AliveRequest(
            target=serving_lease.target,
            pid=os.getpid(),
            epoch=serving_lease.epoch,
            used_bytes=self._used_bytes,
            equal=b"".join([EQUAL.pack(*chain, epoch) for chain, epoch in equal.items()]),
            copied_bytes=upkeep.resync.progress.bytes_copied if upkeep is not None else 0,
            verifier=serving_lease.verifier,
            unreachable=sorted(self._reach.unreachable) if self._reach is not None else (),
        )
        sent_s = self._clock.boottime_s()
        try:
            reply = await self._calls.call(
                self._endpoints(), POOL_ALIVE, request.SerializeToString(), deadline_s=sent_s + _ANSWER_S
            )
            answer = AliveReply.FromString(bytes(reply.message))
        except (NvpoolError, struct.error) as error:
            if not self._silent:
                log.warning("target %d: no answer to its heartbeat: %s", serving_lease.target, error)
            self._silent, serving_lease.refused = True, str(error)
            return
        self._silent, serving_lease.refused = (
            False,
            answer.left_out or ("" if answer.lease_s else "the leader gives no lease"),
        )
        serving_lease.renewed(sent_s, answer.lease_s, answer.epoch_min, answer.epoch)
