"""The metadata daemon: `python -m nvpool.run.meta_daemon DIR SHARD` serves one shard until it is told to stop.

Started by the supervisor. Exit codes as in run/daemon.
"""

from __future__ import annotations

import sys

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.errors import NotFound
from nvpool.kv.lmdb_engine import LmdbKv, LmdbOptions
from nvpool.meta.service import MetaOptions, MetaService
from nvpool.run.served import Opened, main


class _Shard(MetaService):
    """The service together with its engine, which ends after it: synced, and with nothing to replay."""

    async def close(self, drain_s: float = 0.0) -> None:
        await super().close(drain_s)
        await self._kv.close()


async def _open(opened: Opened) -> MetaService:
    path = opened.directory.shard(opened.number)
    if not path.is_dir():
        raise NotFound(f"{path} is missing: is its file system mounted? An empty shard is never made in its place")
    journal, meta = opened.config.journal, opened.config.meta
    kv = await LmdbKv.open(path, LmdbOptions(
        term=opened.pool_map.shard_by_id[opened.number].term,
        durability=journal.durability, map_bytes_max=journal.map_bytes_max,
        sync_interval_s=journal.sync_interval_s, layer_entries_max=journal.layer_entries_max,
        checkpoint_interval_s=journal.checkpoint_interval_s), on_fence=opened.fail)
    service = _Shard(kv, shard=opened.number, grant_secret=opened.grant_secret, dialer=opened.dialer, clock=SYSTEM_CLOCK,
                     options=MetaOptions(session_lease_s=meta.session_lease_s, grant_s=meta.grant_s))
    service.died.add_done_callback(lambda died: died.cancelled() or opened.fail(f"the service has stopped: {died.exception()}"))
    return service


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("usage: python -m nvpool.run.meta_daemon DIR SHARD")
    shard = int(sys.argv[2])
    sys.exit(main("meta", f"meta-{shard}", sys.argv[1], shard, lambda pool_map: pool_map.shard_by_id[shard].endpoints, _open))
