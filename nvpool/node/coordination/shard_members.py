"""Shard members of this node: creates their directories, removes unwanted ones and, on the leader, moves
members.

The map contains the wanted state, which poolmap/shards/placement decides; so interrupted work continues at
the next round. A standby's directory is created only beside an existing store (an unmounted drive is not an
empty one), and removed only when the map does not name it any more. A primary that belongs elsewhere is ended
by its node: a standby that is up replaces it, as after any death, but without a wait. Used by
node/supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from nvpool.core.config import Config
from nvpool.core.errors import Busy, InvalidRequest, NotFound, NvpoolError, from_os_error
from nvpool.host.pool_directory import PoolDirectory, sync_directory
from nvpool.node.coordination.leadership import Leading
from nvpool.node.coordination.map_backend import used_ports
from nvpool.node.coordination.standby_checks import StuckStandbys
from nvpool.poolmap.model import PoolMap, Shard, StandbyMember
from nvpool.poolmap.shards import placement as shard_placement
from nvpool.poolmap.shards.members import (
    endpoints_of,
    members,
    node_and_path,
    process_name,
    shard_of,
    standby_made,
    standbys_wanted,
)
from nvpool.provision.create import endpoints_for, free_ports, make_standby_place

MADE_AGAIN_S = 5.0
"""Delay before a missing directory is created again.

A directory that is being moved can be put back within it."""
HANDED_OVER_S = 10.0
"""Delay before a primary is asked again to end: the standby that was up may not be up any more."""

log = logging.getLogger("nvpool.node.coordination.shard_members")


class ShardPlaces:
    def __init__(
        self,
        directory: PoolDirectory,
        config: Config,
        node: int,
        leading: Leading,
        *,
        start: Callable[[], None],
        end: Callable[[str], Awaitable[None]],
        again: Callable[[str], None],
        stuck: StuckStandbys | None = None,
    ) -> None:
        """Create the task of one node.

        `start` starts the members that the map requires here. `end` stops a process for good; `again` lets it
        end and restart. `stuck` finds standbys that cannot be filled where they are; None: no such search.
        """
        self._directory = directory
        self._config = config
        self._node = node
        self._leading = leading
        self._start = start
        self._end = end
        self._again = again
        self._here: dict[tuple[int, int], str] = {}
        """(shard, member) -> path, for the members that the map placed here."""
        self._handed_over_s: dict[int, float] = {}
        self._stuck = stuck
        self._missing_since_s: dict[tuple[int, int], float] = {}
        """(shard, member) -> since when the directory of a standby here has been missing."""
        self.verbs = {"shard-standbys": self._set_standbys}

    async def run_once(self) -> None:
        """Do what can be done now; called periodically.

        Raises errors of the map and of the drive. An error of a directory that cannot be created is raised
        last, after all other work.
        """
        pool_map, failed = self._leading.pool_map, None
        await self._leave(pool_map)
        for shard in pool_map.shards:
            for standby in shard.standbys:
                if standby.node == self._node and not standby.endpoints:
                    try:
                        await self._make(shard, standby)
                    except NvpoolError as error:
                        failed = error
        await self._make_again(self._leading.pool_map)
        self._start()
        self._hand_over(self._leading.pool_map)
        manager = self._leading.manager
        if manager is not None:
            serving = manager.serving()
            stuck = await self._stuck.look(self._leading.pool_map) if self._stuck is not None else frozenset()
            if (
                shard_placement.next_step(self._leading.pool_map, serving, stuck)
                is not self._leading.pool_map
            ):
                await self._leading.change_as_leader(
                    lambda newest: shard_placement.next_step(newest, serving, stuck)
                )
        elif self._stuck is not None:
            self._stuck.forget()
        if failed is not None:
            raise failed

    async def _make(self, shard: Shard, standby: StandbyMember) -> None:
        """Create a directory, choose ports and record them in the map. An interrupted call starts again."""
        directory, name = self._directory, process_name(shard.id, standby.member)
        if not await asyncio.to_thread(os.path.exists, standby.path):
            raise NotFound(
                f"{standby.path} is not there, so nothing is made beside it: is its drive mounted?"
            )
        await self._end(name)  # the process of an earlier member with this number
        newest = self._leading.pool_map
        try:
            path = await asyncio.to_thread(
                make_standby_place, directory, standby.path, newest.pool_id, shard.id, standby.member
            )
        except OSError as error:
            raise from_os_error(error, f"make a place for {name}") from error
        ports = free_ports(2, self._config.network, used_ports(newest))
        endpoints = endpoints_for(directory, name, self._config.network.host, ports)

        def decide(newest: PoolMap) -> PoolMap:
            if endpoints_of(shard_of(newest, shard.id), standby.member) == endpoints:
                return newest  # a retry: the attempt that seemed to fail has succeeded
            if used_ports(newest) & set(ports):
                raise Busy("the ports were taken meanwhile", retry_after_s=0.1)
            return standby_made(newest, shard.id, standby.member, path, endpoints)

        await self._leading.change(decide)
        log.info("standby %d of shard %d has its place here, at %s", standby.member, shard.id, path)

    async def _make_again(self, pool_map: PoolMap) -> None:
        """Create an empty directory for each standby here whose directory was removed. Its primary fills it.

        Only if the map does not rely on the standby, and the store beside it shows that the drive is mounted.
        """
        now_s, missing = asyncio.get_running_loop().time(), {}
        for shard in pool_map.shards:
            for standby in shard.standbys:
                name = shard.id, standby.member
                if standby.node != self._node or standby.state != "syncing" or not standby.endpoints:
                    continue
                place = Path(standby.path) if standby.path else self._directory.shard(shard.id)
                store = shard_placement.store_beside(pool_map, shard, standby.member)
                if await asyncio.to_thread(_is_removed, place, store):
                    missing[name] = self._missing_since_s.get(name, now_s)
                    if now_s - missing[name] >= MADE_AGAIN_S:
                        log.warning(
                            "the records of %s are gone; %s is made again and filled by the primary",
                            process_name(*name),
                            place,
                        )
                        await asyncio.to_thread(_make_directory, place)
        self._missing_since_s = missing

    async def _leave(self, pool_map: PoolMap) -> None:
        """Stop members that are no longer placed here and remove their directories.

        Directories of a shard that has left the pool are kept: the last of its records must not be removed
        here.
        """
        here = {
            (shard.id, member): node_and_path(shard, member)[1]
            for shard in pool_map.shards
            for member in members(shard)
            if node_and_path(shard, member)[0] == self._node and endpoints_of(shard, member)
        }
        for (shard, member), path in self._here.items():
            if (shard, member) not in here and shard in pool_map.shard_by_id:
                await self._end(process_name(shard, member))
                place = Path(path) if path else self._directory.shard(shard)
                if path not in here.values() and place.is_dir() and self._is_place(place, pool_map):
                    await asyncio.to_thread(shutil.rmtree, place, True)
                    sync_directory(place.parent)
                    log.info(
                        "member %d of shard %d is not here any more; %s is removed", member, shard, place
                    )
        self._here = here

    def _is_place(self, place: Path, pool_map: PoolMap) -> bool:
        return place.parent == self._directory.shard(0).parent or place.name.startswith(
            f"nvpool-{pool_map.pool_id[:8]}-meta-"
        )

    def _hand_over(self, pool_map: PoolMap) -> None:
        now_s = asyncio.get_running_loop().time()
        for shard in pool_map.shards:
            if (
                shard.node == self._node
                and shard_placement.hands_over(pool_map, shard)
                and now_s - self._handed_over_s.get(shard.id, -HANDED_OVER_S) >= HANDED_OVER_S
            ):
                self._handed_over_s[shard.id] = now_s
                log.info(
                    "the primary of shard %d, member %d, ends so that another member follows it",
                    shard.id,
                    shard.member,
                )
                self._again(process_name(shard.id, shard.member))

    # -- admin commands --------------------------------------------------------------------------------------

    async def _set_standbys(self, arguments: dict) -> dict:
        try:
            number, count = int(arguments["shard"]), int(arguments["count"])
        except (KeyError, TypeError, ValueError):
            raise InvalidRequest("shard-standbys wants shard and count") from None

        def decide(newest: PoolMap) -> PoolMap:
            shard = shard_of(newest, number)
            if count > shard_placement.wanted(shard):
                shard_placement.check_room_for(newest, shard, count)
            return standbys_wanted(newest, number, count)

        new = await self._leading.change(decide)
        return {"shard": number, "standbys": count, "epoch": new.epoch}


def _is_removed(place: Path, store: str) -> bool:
    """Whether a directory is missing although its drive, which has this store, is mounted."""
    return not place.exists() and (not store or os.path.exists(store))


def _make_directory(place: Path) -> None:
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
        place.mkdir(mode=0o700)
        sync_directory(place.parent)
    except OSError as error:
        raise from_os_error(error, f"make {place}") from error


def members_status(pool_map: PoolMap, shard: Shard) -> dict:
    """Status of a shard's members: their places and states."""
    states = {standby.member: standby.state for standby in shard.standbys}
    leaving = shard_placement.misplaced(pool_map, shard)
    return {
        "term": shard.term,
        "standbys_wanted": shard_placement.wanted(shard),
        "members": [
            {
                "member": member,
                "node": place.node,
                "drive": place.drive or None,
                "path": node_and_path(shard, member)[1],
                "state": states.get(member, "primary"),
                "leaves": member in leaving,
            }
            for member in members(shard)
            for place in (shard_placement.place_of(pool_map, shard, member),)
        ],
    }
