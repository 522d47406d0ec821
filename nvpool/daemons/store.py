"""Store daemon: serves the chunks of one target. `python -m nvpool.daemons.store DIR TARGET [DESCRIPTOR
SINCE]`.

Started by the supervisor and runs until it is stopped. DESCRIPTOR is that of memory which the processes of
this target share since the time SINCE; see store/chunks/location_leases. Exit codes as in
runtime/daemon_process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.programs import Program
from nvpool.daemons.store_heartbeat import HeartbeatSender
from nvpool.host.pool_directory import write_whole
from nvpool.host.pool_directory_modes import group_number
from nvpool.rpc.fd_passing import path_beside
from nvpool.runtime.daemon_lifecycle import MapRefresh, ServiceContext, main
from nvpool.store.chunks.api import LOCATION_LEASE_S, StoreOptions
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.location_leases import KeptTable
from nvpool.store.server.service import StoreService
from nvpool.store.server.serving_lease import ServingLease

log = logging.getLogger(__name__)


class StoreDaemon:
    """The store service together with its heartbeats, which end before the service."""

    def __init__(self, service: StoreService, opened: ServiceContext) -> None:
        self._service = service
        self._opened = opened
        self.handle, self.fast_path = service.handle, service.fast_path
        self.update_map, self.measure = service.update_map, service.measure
        node = opened.directory.node
        self._heartbeats = HeartbeatSender(
            service,
            opened.dialer,
            lambda: (service.map_state.pool_map or opened.pool_map).node_by_id[node].endpoints,
        )
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the service and its heartbeats."""
        await self._service.start()
        # If this task ends, the serving lease expires and replicated chunks are no longer served: nothing
        # else is needed.
        self._beating = asyncio.ensure_future(self._heartbeats.run())
        self._beating.add_done_callback(
            lambda ended: (
                ended.cancelled() or self._opened.fail(f"the heartbeats have stopped: {ended.exception()}")
            )
        )

    def begin_drain(self) -> None:
        """Does nothing: no request here waits for other requests."""

    async def close(self, drain_s: float = 0.0) -> None:
        """End the heartbeats, then close the service, and record whether it ended in step with its chains."""
        service = self._service
        if self._beating is not None:
            self._beating.cancel()
        await service.close(drain_s)
        if service.ended_equal:
            write_whole(self._opened.directory.ended(service.target), b"%d" % service.serving_lease.epoch)


async def _open(kept_table: KeptTable | None, opened: ServiceContext) -> StoreDaemon:
    fenced = opened.directory.fenced(opened.number)

    def on_fence(reason: str) -> None:
        opened.fail(reason)
        try:
            fenced.write_text(reason)  # not synced: after a reboot the mark is not needed
        except OSError as error:
            log.warning("could not record that target %d is fenced: %s", opened.number, error)

    drive = next(
        d for d in opened.pool_map.drives if d.id == opened.pool_map.target_by_id[opened.number].drive
    )
    journal, configured = opened.config.journal, opened.config.store
    options = StoreOptions(
        direct=configured.direct,
        uring=configured.reads == "auto",
        reserve_share=configured.reserve_share,
        give_back=configured.give_back,
        location_lease_s=LOCATION_LEASE_S if configured.short_circuit else 0.0,
        kept_table=kept_table,
        sync_interval_s=journal.sync_interval_s,
        index_bytes_max=journal.map_bytes_max,
        doubted=fenced.exists(),
    )
    store = await open_chunk_store(
        opened.directory.store(drive.path, opened.number),
        target=opened.number,
        options=options,
        clock=SYSTEM_CLOCK,
        on_fence=on_fence,
    )
    fenced.unlink(missing_ok=True)
    paths = [
        parse_endpoint(endpoint).path
        for endpoint in opened.pool_map.target_by_id[opened.number].endpoints
        if endpoint.startswith("stream+unix://")
    ]
    service = StoreService(
        store,
        target=opened.number,
        grant_secret=opened.grant_secret,
        clock=SYSTEM_CLOCK,
        refresh_map=MapRefresh(opened.directory, lambda pool_map: service.update_map(pool_map)),
        handover_path=path_beside(paths[0]) if paths else "",
        handover_group=group_number(configured.short_circuit_group, "store.short_circuit_group"),
        dialer=opened.dialer,
        resync_bytes_per_s=configured.resync_bytes_s,
        scrub_interval_s=configured.scrub_interval_s,
        scrub_bytes_per_s=configured.scrub_bytes_s,
        on_fail=opened.fail,
        callers=opened.callers,
        pool_keys=opened.pool_keys,
        serving_lease=ServingLease(
            opened.number, SYSTEM_CLOCK, store.location_leases, verifier=store.verifier
        ),
    )
    return StoreDaemon(service, opened)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 5) or not sys.argv[2].isdigit():
        sys.exit(f"usage: python -m {Program.STORE.module} DIR TARGET [DESCRIPTOR SINCE]")
    target = int(sys.argv[2])
    kept = KeptTable(int(sys.argv[3]), float(sys.argv[4])) if sys.argv[3:] else None
    if kept is not None:
        os.set_inheritable(kept.descriptor, False)
    sys.exit(
        main(
            "store",
            f"target-{target}",
            sys.argv[1],
            target,
            lambda pool_map: pool_map.target_by_id[target].endpoints,
            partial(_open, kept),
        )
    )
