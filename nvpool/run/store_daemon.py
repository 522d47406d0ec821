"""The store daemon: `python -m nvpool.run.store_daemon DIR TARGET` serves the chunks of one target until it is told to stop.

Started by the supervisor. Exit codes as in run/daemon.
"""

from __future__ import annotations

import sys

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.run.served import Opened, main, read_map
from nvpool.store.chunkstore import StoreOptions, open_chunk_store
from nvpool.store.service import StoreService


async def _open(opened: Opened) -> StoreService:
    drive = next(d for d in opened.pool_map.drives if d.id == opened.pool_map.target_by_id[opened.number].drive)
    journal, configured = opened.config.journal, opened.config.store
    options = StoreOptions(direct=configured.direct, uring=configured.reads == "auto", reserve_share=configured.reserve_share,
                           give_back=configured.give_back, sync_interval_s=journal.sync_interval_s,
                           index_bytes_max=journal.map_bytes_max)
    store = await open_chunk_store(opened.directory.store(drive.path, opened.number), target=opened.number, options=options,
                                   clock=SYSTEM_CLOCK, on_fence=opened.fail)
    service = StoreService(store, target=opened.number, grant_secret=opened.grant_secret, clock=SYSTEM_CLOCK,
                           refresh_map=lambda: service.update_map(read_map(opened.directory)))
    return service


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("usage: python -m nvpool.run.store_daemon DIR TARGET")
    target = int(sys.argv[2])
    sys.exit(main("store", f"target-{target}", sys.argv[1], target,
                  lambda pool_map: pool_map.target_by_id[target].endpoints, _open))
