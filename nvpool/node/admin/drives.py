"""Admin commands for drives: add, drain, remove, replace; and the progress of moving their chains.

Used by node/supervisor for the verbs of POOL_CHANGE. Each command is one change of the map, and is refused
before anything is changed. The manager does the work that follows and continues after any restart, since its
whole state is in the map. A command may be repeated: what is already done stays as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.config import Config
from nvpool.core.errors import AlreadyExists, Bug, InUse, InvalidRequest, NotFound, Refused, Unavailable
from nvpool.core.programs import Program, command
from nvpool.core.units import format_bytes
from nvpool.host.pool_directory import PoolDirectory
from nvpool.node.coordination.leadership import Leading
from nvpool.node.coordination.map_backend import used_ports
from nvpool.poolmap.chains.rebalance import check_room, standing, with_goals
from nvpool.poolmap.chains.tables import with_table
from nvpool.poolmap.chains.transitions import died, named, only_copies, retired, with_desired_state
from nvpool.poolmap.model import Drive, PoolMap, Target
from nvpool.poolmap.shards.placement import beside, check_places, only_beside
from nvpool.provision.create import endpoints_for, free_ports

_MAKE_DEADLINE_S = 120.0
LIMIT_MAX = 1 << 40
"""Upper bound of the limit for data movement onto each drive, in bytes per second: above what any drive
takes."""
_SAMPLES = 64
_SAMPLE_S = 1.0
"""Interval of samples of the remaining work, from which the speed is computed."""


class Drives:
    def __init__(
        self,
        directory: PoolDirectory,
        config: Config,
        node: int,
        leading: Leading,
        *,
        used: Callable[[], Awaitable[dict[int, int]]],
        start: Callable[[], None],
        end: Callable[[int], Awaitable[None]],
    ):
        """Create the commands.

        `used`: returns the bytes that targets hold, for those that answer. `start`: starts the processes that
        the map requires here. `end`: stops the process of a target for good.
        """
        self._directory = directory
        self._config = config
        self._node = node
        self._leading = leading
        self._used = used
        self._start = start
        self._end = end
        self._adding = asyncio.Lock()
        self.verbs: dict[str, Callable[[dict], Awaitable[dict]]] = {
            "drive-add": self._add,
            "drive-drain": self._drain,
            "drive-remove": self._remove,
            "drive-replace": self._replace,
            "rebalance": self._rebalance,
            "replicas": self._replicas,
        }

    # -- add -------------------------------------------------------------------------------------------------

    async def _add(self, arguments: dict) -> dict:
        new_drive = _drive_of(arguments, "drive-add")
        async with self._adding:  # a repeated request gets the result of the first one
            return self._taken_in(new_drive[0]) or await self._take_in(*new_drive, lambda pool_map: pool_map)

    def _taken_in(self, path: str) -> dict | None:
        """Result of the earlier command that added the drive at `path`, or None.

        Used when a caller repeats the command. The drive must still be wanted. AlreadyExists: the drive is
        being drained.
        """
        pool_map, place = self._leading.pool_map, os.path.realpath(path)
        paths = {drive.id: drive.path for drive in pool_map.drives}
        for target in pool_map.targets:
            if (
                target.node == self._node
                and target.state != "gone"
                and target.desired_state in ("share", "drain")
                and place in map(os.path.realpath, _places(paths[target.drive]))
            ):
                if target.desired_state == "drain":
                    _check_stays(pool_map, self._node)
                    raise AlreadyExists(
                        f"drive {target.drive} is in the pool already, and was drained; it gets its share "
                        f"again with: nvpool drive drain POOL {target.drive} --cancel"
                    )
                return {
                    "drive": target.drive,
                    "target": target.id,
                    "path": paths[target.drive],
                    "capacity_bytes": target.capacity_bytes,
                    "epoch": pool_map.epoch,
                    "chains_to_come": coming(pool_map)[target.id],
                    "was_there": True,
                }
        return None

    async def _take_in(
        self,
        path: str,
        capacity_bytes: int,
        force: bool,
        also: Callable[[PoolMap], PoolMap],
        used: dict[int, int] | None = None,
    ) -> dict:
        """Make a chunk store at `path` with a target, start its process, and assign chains.

        The target gets its share of the chains. The chains move to the target one after the other, each with
        its chunks. `also`: other changes for the same map. `used`: if given, the command is refused if the
        stored data would not fit afterwards. Call with `_adding` held.
        """
        pool_map = self._leading.pool_map
        _check_stays(pool_map, self._node)
        _check_count(also(pool_map))  # first: a refused command leaves no store and uses no number
        make = partial(_make_store, str(self._directory.path), path, capacity_bytes, force, self._node)
        checked = await asyncio.to_thread(make, "check", 0, pool_map)
        if used is not None:
            check_room(with_one_more(also(pool_map), self._node, path, checked["capacity_bytes"]), used)
        pool_map, drive_id, target_id = await self._take_numbers()
        made = await asyncio.to_thread(make, "store", target_id, pool_map)
        endpoints = endpoints_for(
            self._directory,
            f"target-{target_id}",
            self._config.network.host,
            free_ports(2, self._config.network, used_ports(pool_map)),
        )
        drive = Drive(drive_id, self._node, made["path"], made["capacity_bytes"])
        target = Target(target_id, drive_id, self._node, made["capacity_bytes"], endpoints)

        def decide(newest: PoolMap) -> PoolMap:
            return with_goals(
                also(
                    msgspec.structs.replace(
                        newest,
                        drives=tuple(drive if one.id == drive_id else one for one in newest.drives),
                        targets=tuple(target if one.id == target_id else one for one in newest.targets),
                    )
                )
            )

        new = await self._leading.change(decide)
        self._start()
        return {
            "drive": drive_id,
            "target": target_id,
            "path": drive.path,
            "capacity_bytes": drive.capacity_bytes,
            "epoch": new.epoch,
            "chains_to_come": coming(new)[target_id],
            "was_there": False,
        }

    async def _take_numbers(self) -> tuple[PoolMap, int, int]:
        """Reserve a drive number and a target number that are unique in the pool.

        They are in the map with state "gone" until the drive exists.
        """
        numbers = (0, 0)

        def decide(newest: PoolMap) -> PoolMap:
            nonlocal numbers
            if any(one.id == numbers[1] and one.node == self._node for one in newest.targets):
                return newest  # a retry: the attempt that seemed to fail has succeeded
            numbers = (
                max((drive.id for drive in newest.drives), default=0) + 1,
                max((target.id for target in newest.targets), default=0) + 1,
            )
            return msgspec.structs.replace(
                newest,
                drives=(*newest.drives, Drive(numbers[0], self._node, "", 0)),
                targets=(*newest.targets, Target(numbers[1], numbers[0], self._node, 0, (), "gone")),
            )

        return await self._leading.change(decide), *numbers

    # -- drain and remove ------------------------------------------------------------------------------------

    async def _drain(self, arguments: dict) -> dict:
        cancel, used = bool(arguments.get("cancel", False)), await self._used()

        def decide(newest: PoolMap) -> PoolMap:
            target = find(newest, arguments, self._node)
            if target.desired_state == "lost":
                raise InvalidRequest(f"drive {target.drive} is lost; it is being taken out of the pool")
            if cancel:
                if target.desired_state == "share":
                    return newest
                _check_stays(newest, target.node)
                return with_goals(with_desired_state(newest, target.id, "share"))
            if target.desired_state in ("drain", "remove"):
                return newest
            wanted = with_desired_state(newest, target.id, "drain")
            check_room(wanted, used)
            check_places(wanted)
            return with_goals(wanted)

        return self._drive_status(await self._leading.change(decide), arguments)

    async def _remove(self, arguments: dict) -> dict:
        if bool(arguments.get("lost", False)):
            return await self._lose(arguments)

        def decide(newest: PoolMap) -> PoolMap:
            target = find(newest, arguments, self._node, gone=True)
            if target.state == "gone":
                return newest
            if target.id in named(newest):
                raise InUse(
                    f"drive {target.drive} holds, or is to hold, chains of the pool; first: nvpool drive drain POOL "
                    f"{target.drive} --wait   or, when it is broken for good: nvpool drive remove POOL {target.drive} "
                    f"--lost"
                )
            if there := beside(newest, target.drive):
                raise InUse(
                    f"metadata (shard {', '.join(map(str, there))}) lies on drive {target.drive}; it goes when "
                    f"the drive is drained and another has it: nvpool drive drain POOL {target.drive} --wait"
                )
            return retired(with_desired_state(newest, target.id, "remove"))

        return self._drive_status(await self._leading.change(decide), arguments)

    async def _lose(self, arguments: dict) -> dict:
        """Remove a lost drive. Its target ends first, so that it serves nobody while others replace it."""
        used, give_up = await self._used(), bool(arguments.get("give_up", False))

        def decide(newest: PoolMap) -> PoolMap:
            target = find(newest, arguments, self._node, gone=True)
            return (
                newest
                if target.state == "gone" or target.desired_state == "lost"
                else self._without(newest, target, used, give_up)
            )

        target = find(self._leading.pool_map, arguments, self._node, gone=True)
        decide(self._leading.pool_map)
        if target.node == self._node and target.state != "gone":
            await self._end(target.id)
        try:
            return self._drive_status(await self._leading.change(decide), arguments)
        finally:
            self._start()  # in case the command was refused after all

    def _without(self, newest: PoolMap, target: Target, used: Mapping[int, int], give_up: bool) -> PoolMap:
        """Map without the lost target.

        InvalidRequest: stored data would be lost; with `give_up` that is accepted, and chains that only this
        target has stay with it and are not served.
        """
        self._check_metadata(newest, target)
        left = died(newest, {target.id}) if target.node == self._node else newest
        if not give_up:
            self._check_copies(newest, target)
        wanted = with_desired_state(left, target.id, "lost")
        check_room(wanted, {one: count for one, count in used.items() if one != target.id})
        return retired(with_goals(wanted))

    @staticmethod
    def _check_metadata(newest: PoolMap, target: Target) -> None:
        if only := only_beside(newest, target.drive):
            raise InvalidRequest(
                f"drive {target.drive} has the only whole copy of the metadata of shard "
                f"{', '.join(map(str, only))}; bring it back, wait until a standby has it (nvpool shard "
                f"ls POOL), or load a dump into a new pool"
            )

    @staticmethod
    def _check_copies(newest: PoolMap, target: Target) -> None:
        after = died(newest, {target.id})
        only = {
            table.id: count for table in after.tables if (count := only_copies(after, target.id, table.id))
        }
        if only:
            chains = " and ".join(
                f"{count} chains of {replicas} replica{'s' if replicas > 1 else ''}"
                for replicas, count in only.items()
            )
            raise InvalidRequest(
                f"drive {target.drive} has the only copy of {chains}; without it their chunks are lost. "
                f"Bring it back, wait until other drives have them, or drain it while it can be read; to do "
                f"without them for ever: nvpool drive remove POOL {target.drive} --lost --give-up"
            )

    async def _replace(self, arguments: dict) -> dict:
        lost = bool(arguments.get("lost", False))
        new_drive = _drive_of(arguments, "drive-replace")
        old = find(self._leading.pool_map, arguments, self._node, gone=True)
        if old.state == "gone" or old.desired_state in ("remove", "lost"):
            if (there := self._taken_in(new_drive[0])) is not None:
                return there | {"replaces": old.drive}
            find(self._leading.pool_map, arguments, self._node)
            raise InvalidRequest(
                f"drive {old.drive} is being removed already; add the new one with: nvpool drive "
                "add POOL PATH"
            )
        if lost:
            self._check_metadata(self._leading.pool_map, old)
            self._check_copies(self._leading.pool_map, old)
        if lost and old.node == self._node:
            await self._end(old.id)

        def also(newest: PoolMap) -> PoolMap:
            target = find(newest, {"drive": str(old.drive)}, self._node)
            if lost and target.node == self._node:
                newest = died(newest, {target.id})
            return with_desired_state(newest, target.id, "lost" if lost else "remove")

        try:
            async with self._adding:
                used = {
                    target: count
                    for target, count in (await self._used()).items()
                    if not lost or target != old.id
                }
                made = await self._take_in(*new_drive, also, used)
        finally:
            self._start()
        return made | {"replaces": old.drive}

    def _drive_status(self, pool_map: PoolMap, arguments: dict) -> dict:
        target = find(pool_map, arguments, self._node, gone=True)
        drive = next(drive for drive in pool_map.drives if drive.id == target.drive)
        return {
            "drive": target.drive,
            "target": target.id,
            "node": target.node,
            "path": drive.path,
            "state": state_of(pool_map, target),
            "epoch": pool_map.epoch,
            "chains": held(pool_map)[target.id],
            "chains_to_go": going(pool_map)[target.id],
            "waits_for": waits_for(pool_map),
        }

    async def _replicas(self, arguments: dict) -> dict:
        """Create the chain table of a replica count, if there is none."""
        try:
            replicas = int(arguments["replicas"])
        except (KeyError, TypeError, ValueError):
            raise InvalidRequest("replicas wants a number of them") from None
        answering = (await self._used()).keys()
        new = await self._leading.change(lambda newest: with_table(newest, replicas, answering))
        return {"replicas": replicas, "epoch": new.epoch}

    # -- data movement ---------------------------------------------------------------------------------------

    async def _rebalance(self, arguments: dict) -> dict:
        """Pause, resume or limit data movement; with none of these arguments, rebalance the chains."""
        try:
            pause = arguments.get("pause")
            limit = arguments.get("limit_bytes_s")
            limit = None if limit is None else int(limit)
        except (TypeError, ValueError):
            raise InvalidRequest("rebalance wants pause and limit_bytes_s") from None
        if limit is not None and not 0 <= limit <= LIMIT_MAX:
            raise InvalidRequest(f"a limit is at most {format_bytes(LIMIT_MAX)} a second; 0 takes it away")

        def decide(newest: PoolMap) -> PoolMap:
            moving = newest.moving
            if pause is not None:
                moving = msgspec.structs.replace(moving, paused=bool(pause))
            if limit is not None:
                moving = msgspec.structs.replace(moving, limit_bytes_s=limit)
            if pause is None and limit is None:
                return with_goals(newest)
            return msgspec.structs.replace(newest, moving=moving)

        new = await self._leading.change(decide)
        return {
            "epoch": new.epoch,
            "paused": new.moving.paused,
            "limit_bytes_s": new.moving.limit_bytes_s,
            "chains_to_move": sum(coming(new).values()),
        }


class MoveProgress:
    """Progress of data movement, with the speed of the last minute."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK):
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def status(self, pool_map: PoolMap, serving: frozenset[int], used: Mapping[int, int]) -> dict:
        """Status of the chains of all replica counts.

        The remaining bytes are an estimate: used bytes of a target that holds the chain, divided by its
        number of chains.
        """
        seen = standing(pool_map, serving)
        holds = held(pool_map)
        left = 0.0
        for table in pool_map.tables:
            for chain in table.chains:
                missing = sum(target not in chain.targets for target in chain.goal)
                if missing:
                    source = next((t for t in reversed(chain.targets) if t in used), None)
                    left += missing * used[source] / max(1, holds[source]) if source is not None else 0
        now_s = self._clock.boottime_s()
        if not seen.to_copy:
            self._samples.clear()
        elif not self._samples or now_s - self._samples[-1][0] >= _SAMPLE_S:
            if self._samples and seen.to_copy > self._samples[-1][1]:
                self._samples.clear()  # more work was added since
            self._samples.append((now_s, seen.to_copy))
        seconds_left = None
        if len(self._samples) > 1 and (done := self._samples[0][1] - self._samples[-1][1]) > 0:
            seconds_left = round(seen.to_copy * (self._samples[-1][0] - self._samples[0][0]) / done, 1)
        return {
            "replicas": [table.id for table in pool_map.tables],
            "total": seen.chains,
            "full": seen.full,
            "fewer": seen.short,
            "filling": seen.filled,
            "without": seen.without,
            "to_copy": seen.to_copy,
            "bytes_left": int(left),
            "seconds_left": seconds_left,
            "paused": pool_map.moving.paused,
            "limit_bytes_s": pool_map.moving.limit_bytes_s,
        }


# -- values derived from a map -------------------------------------------------------------------------------


def held(pool_map: PoolMap) -> Counter[int]:
    """Number of chains that each target holds."""
    return Counter(target for table in pool_map.tables for chain in table.chains for target in chain.targets)


def coming(pool_map: PoolMap) -> Counter[int]:
    """Number of chains that each target is still to receive."""
    return Counter(
        target
        for table in pool_map.tables
        for chain in table.chains
        for target in chain.goal
        if target not in chain.targets
    )


def waits_for(pool_map: PoolMap) -> list[int]:
    """Drives that are down and are to receive chains.

    These chains wait until the drive returns or is given up."""
    to_come = coming(pool_map)
    return [target.drive for target in pool_map.targets if target.state == "down" and to_come[target.id]]


def going(pool_map: PoolMap) -> Counter[int]:
    """Number of chains that each target is still to give away."""
    return Counter(
        target
        for table in pool_map.tables
        for chain in table.chains
        if chain.goal
        for target in chain.targets
        if target not in chain.goal
    )


def state_of(pool_map: PoolMap, target: Target) -> str:
    """State of a drive in admin terms; empty if no command applies to it."""
    if target.state == "gone":
        return "removed"
    if target.desired_state == "share":
        return ""
    if target.desired_state in ("lost", "away"):
        return target.desired_state
    if target.id in named(pool_map) or beside(pool_map, target.drive):
        return "draining" if target.desired_state == "drain" else "removing"
    return "drained"


def drives_status(pool_map: PoolMap, stores: Mapping[int, dict]) -> list[dict]:
    """Status of each drive. `stores`: status of the targets by target id."""
    holds, come, go = held(pool_map), coming(pool_map), going(pool_map)
    all_chains = max(1, sum(holds.values()))
    drives = []
    for target in pool_map.targets:
        if target.state == "gone":
            continue
        drive = next(drive for drive in pool_map.drives if drive.id == target.drive)
        store = stores.get(target.id, {})
        drives.append(
            {
                "drive": drive.id,
                "target": target.id,
                "node": drive.node,
                "path": drive.path,
                "capacity_bytes": drive.capacity_bytes,
                "used_bytes": store.get("used_bytes"),
                "state": store.get("state", "stopped" if target.desired_state == "lost" else "unknown"),
                "in_use": holds[target.id] > 0,
                "desired_state": state_of(pool_map, target),
                "chains": holds[target.id],
                "share": round(holds[target.id] / all_chains, 4),
                "chains_to_come": come[target.id],
                "chains_to_go": go[target.id],
                "lacks_room": bool(come[target.id] and store.get("lacks_room")),
                "moving_wait": store.get("resync_wait", "")
                or (store.get("strays_wait", "") if target.desired_state != "share" else ""),
                "metadata": beside(pool_map, drive.id),
            }
        )
    return drives


_NAMED_MAX = 12
"""Most drives that an error lists."""


def find(pool_map: PoolMap, arguments: dict, node: int, *, gone: bool = False) -> Target:
    """Find the target of the drive that `arguments` name by number or path.

    A path belongs to `node`, this node, or to another node only if this one never had a drive there. `gone`:
    include removed drives. NotFound; InvalidRequest: several other nodes have a drive at that path.
    """
    name = str(arguments.get("drive", ""))
    paths = {drive.id: drive.path for drive in pool_map.drives}
    found = [target for target in pool_map.targets if name == str(target.drive)]
    if os.path.isabs(name):
        here = {os.path.realpath(name)}
        found = [
            target
            for target in pool_map.targets
            if target.node == node
            and here & {os.path.realpath(path) for path in _places(paths[target.drive])}
        ]
        found = found or [
            target
            for target in pool_map.targets
            if target.node != node and name in _places(paths[target.drive])
        ]
        if len({target.node for target in found}) > 1:
            raise InvalidRequest(
                f"there are drives at {name} on several nodes and none on this one; give the drive's number"
            )
    if not found:
        there = [
            f"{target.drive} ({paths[target.drive]} of node {target.node})"
            for target in pool_map.targets
            if target.state != "gone"
        ]
        more = (
            f" and {len(there) - _NAMED_MAX} more, which `nvpool drive ls POOL` lists"
            if len(there) > _NAMED_MAX
            else ""
        )
        raise NotFound(f"the pool has no drive {name}; its drives are {', '.join(there[:_NAMED_MAX])}{more}")
    target = found[-1]  # of several targets at a path only the last may still exist
    if target.state == "gone" and not gone:
        raise NotFound(f"drive {target.drive} was removed from the pool")
    return target


def _places(path: str) -> tuple[str, ...]:
    """Names of a drive: the path of its store, and the directory on it that the operator named."""
    return (path, os.path.dirname(path)) if os.path.basename(path).startswith("nvpool-") else (path,)


def _check_stays(pool_map: PoolMap, node: int) -> None:
    """Raise InvalidRequest if the node is being drained: new data on it would have to leave again."""
    if node in pool_map.node_by_id and pool_map.node_by_id[node].desired_state != "share":
        raise InvalidRequest(f"node {node} is being drained; first: nvpool node drain POOL {node} --cancel")


def with_one_more(pool_map: PoolMap, node: int, path: str, capacity_bytes: int) -> PoolMap:
    """Map with an additional drive that does not exist yet."""
    drive = max((one.id for one in pool_map.drives), default=0) + 1
    target = max((one.id for one in pool_map.targets), default=0) + 1
    return msgspec.structs.replace(
        pool_map,
        drives=(*pool_map.drives, Drive(drive, node, path, capacity_bytes)),
        targets=(*pool_map.targets, Target(target, drive, node, capacity_bytes, ())),
    )


def _check_count(pool_map: PoolMap) -> None:
    """Raise InvalidRequest if the targets are too few even with one more."""
    most = max((table.id for table in pool_map.tables), default=1)
    if (
        len(
            [
                target
                for target in pool_map.targets
                if target.state != "gone" and target.desired_state == "share"
            ]
        )
        + 1
        < most
    ):
        with_goals(pool_map)


def _drive_of(arguments: dict, verb: str) -> tuple[str, int, bool]:
    try:
        path, capacity_bytes = str(arguments["path"]), int(arguments.get("capacity_bytes", 0))
        force = bool(arguments.get("force", False))
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{verb} wants a path and perhaps capacity_bytes and force") from None
    if not os.path.isabs(path):
        raise InvalidRequest(f"the path of a drive is absolute, {path!r} is not")
    return path, capacity_bytes, force


def _make_store(
    directory: str,
    path: str,
    capacity_bytes: int,
    force: bool,
    node: int,
    verb: str,
    target: int,
    pool_map: PoolMap,
) -> dict:
    """Run provision/create as a separate program.

    Its work on a drive then cannot block this process.

    `verb`: store (make the store) or check (only check for reasons to refuse).
    """
    request = {
        "verb": verb,
        "directory": directory,
        "path": path,
        "capacity_bytes": capacity_bytes,
        "target": target,
        "pool_id": pool_map.pool_id,
        "known": _in_use(pool_map, node),
        "force": force,
    }
    try:
        done = subprocess.run(
            command(Program.POOL_MAKER),
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            timeout=_MAKE_DEADLINE_S,
            check=False,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"no store could be made at {path} within {_MAKE_DEADLINE_S:.0f} s", may_be_applied=True
        ) from None
    except ValueError:
        raise Bug("the program that makes stores gave no answer; its reason is in the log") from None
    if "error" in answer:
        raise Refused(answer["error"])
    return answer


def _in_use(pool_map: PoolMap, node: int) -> list[str]:
    """Paths of this node's drives; other nodes may have drives at the same paths."""
    drives = {target.drive for target in pool_map.targets if target.state != "gone"}
    return [drive.path for drive in pool_map.drives if drive.id in drives and drive.node == node]
