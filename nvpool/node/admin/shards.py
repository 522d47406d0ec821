"""Admin commands for metadata shards: add one on this node, or remove one; and removal of empty shards.

Used by node/supervisor for the verbs of POOL_CHANGE. A command is one change of the map. The shards
themselves do the work that follows (meta/migration) and continue after any restart, since its whole state is
in the map. A command may be repeated: what is already done stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.config import Config
from nvpool.core.errors import Busy, InvalidRequest, NotFound, NvpoolError
from nvpool.host.pool_directory import PoolDirectory, holder_of, sync_directory
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.node.coordination.leadership import Leading
from nvpool.node.coordination.map_backend import used_ports
from nvpool.node.coordination.shard_members import members_status
from nvpool.poolmap.model import PoolMap, Shard, ShardWanted, StandbyMember
from nvpool.poolmap.shards import partition_moves
from nvpool.poolmap.shards.members import SHARDS_MAX, STANDBYS_MAX, process_name
from nvpool.provision.create import endpoints_for, free_ports, make_standby_place
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2, wire_pb2

LOOK_S = 0.5
ASK_S = 2.0
EMPTY_S = 60.0
"""How long clients may take to close their sessions with an empty shard.

For that long they may ask it for the result of a change."""

log = logging.getLogger("nvpool.node.admin.shards")


class MetaShards:
    def __init__(
        self,
        directory: PoolDirectory,
        config: Config,
        node: int,
        leading: Leading,
        dialer: Dialer,
        *,
        start: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ):
        """`start` starts the processes that the map requires here."""
        self._directory = directory
        self._config = config
        self._node = node
        self._leading = leading
        self._dialer = dialer
        self._start = start
        self._clock = clock
        self._adding = asyncio.Lock()
        self._empty_since_s: dict[int, float] = {}
        self.verbs: dict[str, Callable[[dict], Awaitable[dict]]] = {
            "shard-add": self._add,
            "shard-remove": self._remove,
        }

    # -- commands --------------------------------------------------------------------------------------------

    async def _add(self, arguments: dict) -> dict:
        """Add a shard, which gets its share of the partitions from the others.

        A shard on another node is made by that node. Does nothing for the number of a shard that exists.
        """
        number, standbys, node = (
            _number(arguments, "shard"),
            _number(arguments, "standbys"),
            _number(arguments, "node"),
        )
        async with self._adding:
            pool_map = self._leading.pool_map
            known = {*pool_map.shard_by_id, *(one.id for one in pool_map.shards_wanted)}
            if number is not None and number in known:
                return self._shard_status(pool_map, number)
            given = partition_moves.shards_given(pool_map)
            if number is not None and number != given + 1:
                raise InvalidRequest(
                    f"the next shard of this pool has the number {given + 1}; none is given twice"
                )
            if len(known) >= SHARDS_MAX:
                raise InvalidRequest(f"a pool has {SHARDS_MAX} shards at most")
            wanted = ShardWanted(
                given + 1, node or partition_moves.node_for_shard(pool_map, self._node), standbys
            )
            if wanted.node != self._node:
                return self._shard_status(
                    await self._leading.change(lambda newest: partition_moves.shard_wanted(newest, wanted)),
                    wanted.id,
                )
            return self._shard_status(await self._add_here(wanted), wanted.id)

    async def _add_here(self, wanted: ShardWanted) -> PoolMap:
        pool_map = self._leading.pool_map
        new = await self._make(pool_map, wanted.id, wanted.standbys)
        ports = used_ports(msgspec.structs.replace(pool_map, targets=(), nodes=(), etcd=(), shards=(new,)))

        def decide(newest: PoolMap) -> PoolMap:
            if new.id in newest.shard_by_id and newest.shard_by_id[new.id].endpoints == new.endpoints:
                return newest  # a retry: the attempt that seemed to fail has succeeded
            if new.id not in newest.shard_by_id and used_ports(newest) & ports:
                raise Busy("the ports were taken meanwhile; the same command finds others", retry_after_s=0.1)
            return partition_moves.shard_added(newest, new)

        after = await self._leading.change(decide)
        self._start()
        log.info("shard %d was added: %d partitions move to it", new.id, partition_moves.left(after, new.id))
        return after

    async def _make_wanted(self) -> None:
        """Make the shards that other nodes have requested on this node."""
        for wanted in self._leading.pool_map.shards_wanted:
            if wanted.node == self._node:
                async with self._adding:
                    if wanted in self._leading.pool_map.shards_wanted:
                        await self._add_here(wanted)

    async def _make(self, pool_map: PoolMap, number: int, standbys: int | None) -> Shard:
        places = [
            Path(drive.path)
            for drive in pool_map.drives
            if drive.node == self._node
            and any(target.drive == drive.id and not target.is_over for target in pool_map.targets)
        ]
        wanted = max(len(shard.standbys) for shard in pool_map.shards) if standbys is None else standbys
        if standbys is not None and not 0 <= standbys <= min(STANDBYS_MAX, len(places)):
            raise InvalidRequest(
                f"{standbys} standbys need as many drives on this node; {STANDBYS_MAX} are possible at most"
            )
        wanted = min(wanted, len(places))
        ports = free_ports(2 * (wanted + 1), self._config.network, used_ports(pool_map))

        def endpoints(member: int) -> tuple[str, ...]:
            return endpoints_for(
                self._directory,
                process_name(number, member),
                self._config.network.host,
                ports[2 * member :][:2],
            )

        path = self._directory.shard(number)
        if path.exists():  # left by an interrupted command: no map names it
            await asyncio.to_thread(shutil.rmtree, path)
        path.mkdir(parents=True)
        await (await LmdbKv.open(path, LmdbOptions())).close()
        await asyncio.to_thread(sync_directory, path.parent)
        own = endpoints(0)
        beside = [str(places[(number - 1 + at) % len(places)]) for at in range(wanted)]
        return Shard(
            number,
            self._node,
            own,
            standbys=tuple(
                StandbyMember(
                    member,
                    self._node,
                    endpoints(member),
                    path=make_standby_place(self._directory, place, pool_map.pool_id, number, member),
                )
                for member, place in enumerate(beside, 1)
            ),
        )

    async def _remove(self, arguments: dict) -> dict:
        """Move the shard's partitions to the others and then remove it.

        Does nothing if it has left already.
        """
        number = _number(arguments, "shard")
        if number is None:
            raise InvalidRequest("shard-remove wants a shard")
        desired_state = "share" if arguments.get("cancel") else "remove"

        def decide(newest: PoolMap) -> PoolMap:
            if any(one.id == number for one in newest.shards_wanted):
                return partition_moves.not_wanted(newest, number) if desired_state == "remove" else newest
            if number not in newest.shard_by_id:
                if desired_state == "remove" and 0 < number <= partition_moves.shards_given(newest):
                    return newest
                raise NotFound(f"the pool has no shard {number}; `nvpool shard ls POOL` lists them")
            return partition_moves.with_desired_state(newest, number, desired_state)

        return self._shard_status(await self._leading.change(decide), number)

    @staticmethod
    def _shard_status(pool_map: PoolMap, number: int) -> dict:
        shard = pool_map.shard_by_id.get(number)
        wanted = next((one for one in pool_map.shards_wanted if one.id == number), None)
        state = state_of(shard) if shard is not None else "removed" if wanted is None else "wanted"
        node = shard.node if shard is not None else wanted.node if wanted is not None else None
        return {
            "shard": number,
            "node": node,
            "state": state,
            "epoch": pool_map.epoch,
            "partitions_to_move": partition_moves.left(pool_map, number),
        }

    # -- removal of empty shards -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Make requested shards and, on the leader, remove empty ones, until cancelled."""
        said = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._make_wanted()
                said = ""
            except NvpoolError as error:
                if str(error) != said:
                    log.warning("a new shard cannot be created yet: %s", error)
                said = str(error)
            if self._leading.manager is None:
                self._empty_since_s.clear()
                continue
            await self.run_once()

    async def run_once(self) -> None:
        pool_map, now_s = self._leading.pool_map, self._clock.boottime_s()
        empty = {
            shard.id: shard
            for shard in pool_map.shards
            if shard.desired_state == "remove" and partition_moves.is_empty(pool_map, shard.id)
        }
        self._empty_since_s = {number: self._empty_since_s.get(number, now_s) for number in empty}
        for number, shard in empty.items():
            try:
                if await self._may_go(shard, now_s - self._empty_since_s[number]):
                    await self._leading.change_as_leader(
                        lambda newest, number=number: partition_moves.shard_removed(newest, number)
                    )
                    log.info("shard %d has left the pool", number)
            except NvpoolError as error:
                log.info("shard %d cannot leave the pool yet: %s", number, error)

    async def _may_go(self, shard: Shard, empty_s: float) -> bool:
        """Whether an empty shard may leave the pool.

        All others must have learned of its changes, no check or dump may be using its former data, and
        clients must have left or have had their time.
        """
        request = meta_pb2.MetaStatusRequest().SerializeToString()
        reply = await self._dialer.call(
            shard.endpoints, wire_pb2.META_STATUS, request, deadline_s=self._clock.boottime_s() + ASK_S
        )
        status = decoded(meta_pb2.MetaStatusReply, reply.message)
        waits_for = "spans_to_tell", "held", "cutting", "parts", "walks"
        if status.state != "serving" or any(status.counters[name] for name in waits_for):
            return False
        return not status.sessions or empty_s > EMPTY_S

    # -- left-over files -------------------------------------------------------------------------------------

    def left_behind(self, pool_map: PoolMap) -> list[Path]:
        """Directories on this node of shards that have left the pool."""
        name = f"nvpool-{pool_map.pool_id[:8]}-meta-"
        found = []
        for path in (
            *(self._directory.path / "meta").glob("*"),
            *(
                path
                for drive in pool_map.drives
                if drive.node == self._node
                for path in Path(drive.path).parent.glob(f"{name}*")
            ),
        ):
            if self._has_left(pool_map, path.name.removeprefix(name).removeprefix("shard-")):
                found.append(path)
        return found

    @staticmethod
    def _has_left(pool_map: PoolMap, member: str) -> bool:
        """Whether `member` belongs to a shard that has left the pool.

        `member` begins with the shard's number; more may follow after a dot."""
        number = member.partition(".")[0]
        return (
            number.isdigit()
            and int(number) not in pool_map.shard_by_id
            and int(number) <= pool_map.shards_given
        )

    async def remove_left(self, pool_map: PoolMap) -> None:
        for path in self.left_behind(pool_map):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            log.info("%s, which was a shard's that has left the pool, is removed", path)
        for path in self._directory.run.glob("meta-*.lock"):
            if self._has_left(pool_map, path.name.removeprefix("meta-")) and holder_of(path) is None:
                path.unlink(missing_ok=True)


def _number(arguments: dict, name: str) -> int | None:
    value = arguments.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{name} is a number, not {value!r}") from None


def state_of(shard: Shard) -> str:
    """State of a shard in admin terms; empty if no command applies to it."""
    return "leaving" if shard.desired_state == "remove" else ""


def shards_status(pool_map: PoolMap, processes: list[dict]) -> list[dict]:
    """Status of each shard. `processes`: status of their members."""
    held = Counter(pool_map.shard_of_partition)
    come = Counter({shard.id: 0 for shard in pool_map.shards})
    go = Counter(come)
    owners = pool_map.shard_of_partition
    for part in pool_map.moves:
        for partition in range(part.first, part.first + part.count):
            come[part.shard] += 1
            go[owners[partition]] += 1
    shards = []
    for shard in pool_map.shards:
        seen = {process["member"]: process for process in processes if process.get("shard") == shard.id}
        primary = seen.get(shard.member, {})
        shards.append(
            {
                "shard": shard.id,
                "node": shard.node,
                "state": primary.get("state", "unknown"),
                "desired_state": state_of(shard),
                "partitions": held[shard.id],
                "partitions_to_come": come[shard.id],
                "partitions_to_go": go[shard.id],
                "inodes": primary.get("inodes"),
                "sessions": primary.get("sessions"),
            }
            | members_status(pool_map, shard)
        )
    return shards + [
        {
            "shard": one.id,
            "node": one.node,
            "state": "wanted",
            "desired_state": "",
            "partitions": 0,
            "partitions_to_come": 0,
            "partitions_to_go": 0,
            "inodes": None,
            "sessions": None,
            "term": 0,
            "standbys_wanted": one.standbys or 0,
            "members": [
                {
                    "member": 0,
                    "node": one.node,
                    "drive": None,
                    "path": "",
                    "state": "primary",
                    "leaves": False,
                }
            ],
        }
        for one in pool_map.shards_wanted
    ]
