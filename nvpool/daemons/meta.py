"""Metadata daemon: one member of a shard. `python -m nvpool.daemons.meta DIR SHARD [MEMBER]`.

Started by the supervisor and runs until it is stopped. The pool map decides whether it is primary or standby
(meta/server/shard_member). Exit codes as in runtime/daemon_process.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NotFound
from nvpool.core.programs import Program
from nvpool.host.pool_directory import memory_file
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.member_engine import MemberKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.server.shard_member import MemberOptions, ShardMember
from nvpool.poolmap.shards.members import endpoints_of, node_and_path, process_name
from nvpool.runtime.daemon_lifecycle import ServiceContext, main


async def _open(member: int, opened: ServiceContext) -> ShardMember:
    journal, meta, limits = opened.config.journal, opened.config.meta, opened.config.limits
    if opened.number not in opened.pool_map.shard_by_id:
        raise NotFound(f"shard {opened.number} has left the pool")
    _, place = node_and_path(opened.pool_map.shard_by_id[opened.number], member)
    engine = LmdbOptions(
        durability=journal.durability,
        map_bytes_max=journal.map_bytes_max,
        sync_interval_s=journal.sync_interval_s,
        layer_entries_max=journal.layer_entries_max,
        checkpoint_interval_s=journal.checkpoint_interval_s,
    )

    def make_service(kv: MemberKv) -> MetaService:
        service = MetaService(
            kv,
            shard=opened.number,
            term=kv.term,
            grant_secret=opened.grant_secret,
            dialer=opened.dialer,
            pool_keys=opened.pool_keys,
            options=MetaOptions(
                session_lease_s=meta.session_lease_s,
                grant_s=meta.grant_s,
                sessions=limits.sessions,
                sessions_per_peer=limits.sessions_per_peer,
                locks_per_peer=limits.locks_per_peer,
                open_files_per_peer=limits.open_files_per_peer,
            ),
            take_right=lambda request: made.take_right(request),
            callers=opened.callers,
        )
        service.died.add_done_callback(
            lambda died: died.cancelled() or opened.fail(f"the service has stopped: {died.exception()}")
        )
        return service

    path = Path(place) if place else opened.directory.shard(opened.number)
    options = MemberOptions(
        opened.directory.node,
        opened.number,
        member,
        path,
        engine,
        opened.grant_secret,
        mark=memory_file(opened.pool_map.pool_id, process_name(opened.number, member)),
        callers=opened.callers,
    )
    made = ShardMember(options, opened.pool_map, opened.dialer, SYSTEM_CLOCK, make_service, opened.fail)
    return made


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or not all(number.isdigit() for number in sys.argv[2:]):
        sys.exit(f"usage: python -m {Program.META.module} DIR SHARD [MEMBER]")
    shard, member = int(sys.argv[2]), int((*sys.argv, "0")[3])
    sys.exit(
        main(
            "meta",
            process_name(shard, member),
            sys.argv[1],
            shard,
            lambda pool_map: endpoints_of(pool_map.shard_by_id[shard], member),
            partial(_open, member),
        )
    )
