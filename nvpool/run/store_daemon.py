"""The store daemon: `python -m nvpool.run.store_daemon DIR TARGET` serves the chunks of one target until it is told to stop.

Started by the supervisor. Exit codes as in run/daemon.
"""

from __future__ import annotations

import grp
import sys

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.errors import BadConfiguration
from nvpool.run.served import Opened, main, read_map
from nvpool.store.chunkstore import LEND_S, StoreOptions, open_chunk_store
from nvpool.store.service import StoreService
from nvpool.wire.endpoint import parse_endpoint
from nvpool.wire.handover import path_beside


def _group(name: str) -> int | None:
    if not name:
        return None
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise BadConfiguration(f"store.short_cut_group: this system has no group {name}") from None


async def _open(opened: Opened) -> StoreService:
    drive = next(d for d in opened.pool_map.drives if d.id == opened.pool_map.target_by_id[opened.number].drive)
    journal, configured = opened.config.journal, opened.config.store
    options = StoreOptions(direct=configured.direct, uring=configured.reads == "auto", reserve_share=configured.reserve_share,
                           give_back=configured.give_back, lend_s=LEND_S if configured.short_cut else 0.0,
                           sync_interval_s=journal.sync_interval_s,
                           index_bytes_max=journal.map_bytes_max)
    store = await open_chunk_store(opened.directory.store(drive.path, opened.number), target=opened.number, options=options,
                                   clock=SYSTEM_CLOCK, on_fence=opened.fail)
    paths = [parse_endpoint(endpoint).path for endpoint in opened.pool_map.target_by_id[opened.number].endpoints
             if endpoint.startswith("stream+unix://")]
    service = StoreService(store, target=opened.number, grant_secret=opened.grant_secret, clock=SYSTEM_CLOCK,
                           refresh_map=lambda: service.update_map(read_map(opened.directory)),
                           handover_path=path_beside(paths[0]) if paths else "",
                           handover_group=_group(configured.short_cut_group), dialer=opened.dialer,
                           resync_bytes_per_s=configured.resync_bytes_s, on_fail=opened.fail)
    return service


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("usage: python -m nvpool.run.store_daemon DIR TARGET")
    target = int(sys.argv[2])
    sys.exit(main("store", f"target-{target}", sys.argv[1], target,
                  lambda pool_map: pool_map.target_by_id[target].endpoints, _open))
