"""Target failure manager: turns heartbeats, deaths and operator requests into new pool maps.

Pure functions decide the next map (poolmap/chains/transitions, poolmap/chains/rebalance); this module decides
when. A pool has one manager, which the leader creates and to which the heartbeats of all nodes go
(node/coordination/leadership): `alive` for each heartbeat, `died` when a process has ended; `run` is the
manager's task.

Guarantees:

* Each map is made from the newest one, and decided again if another change came first. Events that arrive
  together become one map. Except for deaths there are at most a few maps a second.
* A target that serves under a lease is replaced only if its whole lease has passed without a heartbeat, or if
  its process is known to be dead. From that decision on, the target gets no lease until it knows the new map.
* All state in this module can be lost. A new manager gives every target one lease time before it counts as
  silent. Targets on the node that led before, which is probably dead as a whole, get only the rest of their
  lease. The manager grants leases only to targets that know the map of its start.

A lease counts from the sending of a heartbeat at the target and from the arrival here, which is later. So the
lease has ended at the target before anything is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping
from math import inf

from nvpool.cluster.coordinator_api import CoordinatorLease, MapCoordinator
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import Busy, Fenced, InvalidRequest, NvpoolError, StaleEpoch, Unavailable, WrongTarget
from nvpool.poolmap.chains import transitions
from nvpool.poolmap.chains.rebalance import given_up, next_steps, taken_back
from nvpool.poolmap.chains.transitions import ChainName
from nvpool.poolmap.grant_revocation import without_ended
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.nodes.link_failures import BROKEN, cut_off, is_replaceable
from nvpool.rpc.v1.pool_pb2 import AliveReply, AliveRequest

LEASE_S = 2.7
"""Lease of a target.

A silent target is out of its chains within 3 s; a target that busy processors delay for 2 s is not."""
SENT_LEASE_S = LEASE_S * 0.95
"""Lease time that is sent to a target: its clock may be slower than ours by the difference."""
BEAT_S = 0.4
"""Interval of heartbeats: five may be lost."""
OUTLIVES_S = 1.0
"""How long a target's lease may outlive the leader's lease.

That soon after the start of the next leader, no lease of the previous one is left. It is also the time in
which targets find the new leader, so that live targets serve on without a pause."""
EQUAL = struct.Struct("<IIQ")
"""One chain of AliveRequest.equal: table, chain, epoch of the chain."""
_GATHER_S = 0.1
"""Delay before a map that is not urgent.

With it the reports of several targets become one map."""
_PAUSE_S = 0.25
"""Pause between two maps, except for deaths."""
_TICK_S = 0.25
_LATER_S = 0.005
"""Margin, so that a lease that has ended has ended by any rounding."""
_RETRY_S = 1.0
_GIVE_UP_AGAIN_S = 60.0
"""Retry interval when the others had no space for an absent target's data."""
_CHANGE_TRIES_MAX = 100
_EQUAL_MAX = 1 << 16
_UNREACHABLE_MAX = 1024

log = logging.getLogger("nvpool.cluster.chain_manager")


class _Heard:
    """Last heartbeat of a target."""

    __slots__ = ("at_s", "pid", "epoch", "equal", "copied_bytes", "used_bytes", "verifier", "unreachable")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.pid = 0
        self.epoch = 0
        self.equal: dict[ChainName, int] = {}
        self.copied_bytes = 0
        self.used_bytes: int | None = None
        self.verifier = 0
        self.unreachable: frozenset[int] = frozenset()


async def change(
    coordinator: MapCoordinator,
    decide: Callable[[PoolMap], PoolMap],
    leader: CoordinatorLease | None = None,
    *,
    certain: bool = False,
) -> PoolMap:
    """Apply `decide` to the newest map and replace the map; return the newest map afterwards.

    `decide` returns a map of the same epoch (nothing to change) or of the next. It is called again if another
    change came first, and may refuse by raising. `certain`: if nothing is to be changed, read the newest map
    before believing that. Busy: the map changes all the time. Other errors are those of
    MapCoordinator.replace.
    """
    for _ in range(_CHANGE_TRIES_MAX):
        now = coordinator.pool_map
        new = transitions.sealed(now, decide(now))
        if new is None:
            if not certain or (await coordinator.newest()).epoch == now.epoch:
                return now
            continue
        try:
            await coordinator.replace(new, leader)
        except StaleEpoch:
            continue
        return new
    raise Busy("the pool map changes all the time", retry_after_s=1.0)


class Manager:
    def __init__(
        self,
        coordinator: MapCoordinator,
        *,
        clock: Clock = SYSTEM_CLOCK,
        leader: CoordinatorLease | None = None,
        grace_s: float = LEASE_S,
        replace_after_s: float = 0.0,
        gone: int | None = None,
    ):
        """Create the manager of a new leader.

        `leader`: lease under which maps are made and leases granted; None: this process is the only manager.
        `grace_s`: time before a target without any heartbeat counts as silent; at least LEASE_S.
        `replace_after_s`: time before a target that is down is given up, counted from its last heartbeat or
        from the start of this manager; 0: never. `gone`: node that led before and whose leadership lease
        expired completely before ours began.
        """
        self._gone = gone
        self._replace_after_s = replace_after_s or inf
        self._refused = ("", 0.0)
        """Why the last absent target could not be given up, and the next attempt's time."""
        self._grace_s = max(grace_s, LEASE_S)
        self._coordinator = coordinator
        self._clock = clock
        self._leader = leader
        self._began_s = clock.boottime_s()
        self._began_epoch = coordinator.pool_map.epoch
        self._heard: dict[int, _Heard] = {}
        self._dead: dict[int, int] = {}
        """Target -> its process that has ended; kept until another process sends a heartbeat."""
        self._epoch_min: dict[int, int] = {}
        self._withheld: set[int] = set()
        """Targets that are being replaced now, or perhaps were: they get no lease."""
        self._cut_off: dict[int, float] = {}
        """Targets behind a broken link between two nodes -> since when they get no lease.

        They must leave their chains."""
        self._seen = coordinator.pool_map
        self._changed_at: dict[ChainName, int] = {}
        """Chain -> map epoch of its last change, if it changed during this manager's time."""
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()

    # -- events ----------------------------------------------------------------------------------------------

    def alive(self, request: AliveRequest) -> AliveReply:
        """Process a target's heartbeat and return its lease.

        WrongTarget   the target is not in the pool
        Fenced        the target is lost, or this process of it is known to have ended
        Unavailable   this node does not lead any more
        """
        if self._leader is not None and not self._leader.holds:
            raise Unavailable("another one leads this pool now", retry_after_s=0.1)
        pool_map = self._coordinator.pool_map
        target = pool_map.target_by_id.get(request.target)
        if target is None or target.state == "gone":
            raise WrongTarget(f"the pool has no target {request.target}")
        if self._dead.get(request.target) == request.pid or target.desired_state == "lost":
            raise Fenced(f"process {request.pid} of target {request.target} is not listened to any more")
        self._dead.pop(request.target, None)
        heard = self._heard.setdefault(request.target, _Heard(0.0))
        is_back = heard.at_s + LEASE_S < self._clock.boottime_s() or heard.pid != request.pid
        if (
            target.state == "down"
            or is_back
            or (request.epoch != heard.epoch and self._waits_for_knowledge(pool_map))
        ):
            self._news.set()
        heard.at_s, heard.pid, heard.epoch = self._clock.boottime_s(), request.pid, request.epoch
        heard.copied_bytes, heard.used_bytes, heard.verifier = (
            request.copied_bytes,
            request.used_bytes,
            request.verifier,
        )
        if heard.verifier != target.verifier and heard.verifier:  # it serves only once the map has it
            self._urgent.set()
            self._news.set()
        if heard.unreachable != (unreachable := frozenset(request.unreachable[:_UNREACHABLE_MAX])):
            heard.unreachable = unreachable
            self._news.set()
        if request.equal:
            usable = min(len(request.equal) // EQUAL.size, _EQUAL_MAX) * EQUAL.size
            heard.equal = {
                (table, chain): epoch for table, chain, epoch in EQUAL.iter_unpack(request.equal[:usable])
            }
            self._news.set()
        else:
            heard.equal = {}
        without = request.target in self._withheld or (
            request.target in self._cut_off and is_replaceable(pool_map, request.target)
        )
        return AliveReply(
            lease_s=0.0 if without else self._lease_to_send_s(),
            epoch=pool_map.epoch,
            epoch_min=self._epoch_min.get(request.target, self._began_epoch),
            left_out=BROKEN if request.target in self._cut_off else "",
        )

    def _lease_to_send_s(self) -> float:
        return (
            SENT_LEASE_S
            if self._leader is None
            else min(SENT_LEASE_S, self._leader.left_s + OUTLIVES_S * 0.95)
        )

    @staticmethod
    def _waits_for_knowledge(pool_map: PoolMap) -> bool:
        return any(chain.leaving or chain.joining for table in pool_map.tables for chain in table.chains)

    def died(self, targets: Mapping[int, int]) -> None:
        """Report that these processes (target -> pid) have certainly ended: the targets are replaced
        immediately."""
        self._dead |= targets
        self._urgent.set()
        self._news.set()

    def look(self) -> None:
        """Check the map, which another process has changed, for what follows."""
        self._news.set()

    # -- state -----------------------------------------------------------------------------------------------

    def answering(self, target: int) -> bool:
        """Whether the target is known to be neither dead nor silent."""
        return target not in self._dead and self._last_s(target) + LEASE_S >= self._clock.boottime_s()

    def _last_s(self, target: int) -> float:
        heard = self._heard.get(target)
        if heard is not None:
            return max(self._began_s, heard.at_s)
        is_gone = (
            self._gone is not None and self._coordinator.pool_map.target_by_id[target].node == self._gone
        )
        return self._began_s + (OUTLIVES_S if is_gone else self._grace_s) - LEASE_S

    def serving(self) -> frozenset[int]:
        """Targets that have sent a heartbeat within the last lease time."""
        return frozenset(target for target in self._heard if self.answering(target))

    def unaware(self, epoch: int) -> list[int]:
        """Targets that may serve and have not confirmed the map of this epoch.

        A target that serves nothing is left out: it starts with the newest map.
        """
        return [
            target.id
            for target in self._coordinator.pool_map.targets
            if target.state not in ("down", "gone")
            and not target.is_over
            and target.id not in self._dead
            and (target.id not in self._heard or self._heard[target.id].epoch < epoch)
        ]

    def used_bytes(self) -> dict[int, int]:
        """Used bytes of each target that has reported them."""
        return {
            target: heard.used_bytes for target, heard in self._heard.items() if heard.used_bytes is not None
        }

    def copied_bytes(self) -> int:
        """Bytes that all targets together have copied from others during the life of their processes."""
        return sum(heard.copied_bytes for heard in self._heard.values())

    # -- decisions -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make maps when events require them, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._tick_s()):
                    await self._news.wait()
                if not self._urgent.is_set():
                    await self._unless_urgent(_GATHER_S)
            except TimeoutError:
                pool_map = self._coordinator.pool_map
                if not (
                    self._silent(pool_map)
                    or self._away(pool_map)
                    or self._to_leave(pool_map)
                    or without_ended(pool_map, self._clock.wall_ns() // 1_000_000) is not pool_map
                ):
                    continue
            self._news.clear()
            self._urgent.clear()
            try:
                made = await self.run_once()
            except NvpoolError as error:
                log.warning("no new pool map could be made: %s", error)
                self._news.set()
                await asyncio.sleep(_RETRY_S)
                continue
            if made:
                await self._unless_urgent(_PAUSE_S)

    def _tick_s(self) -> float:
        """Time until the next check: when the next lease ends, or _TICK_S."""
        now_s = self._clock.boottime_s()
        ends_s = [
            end_s - now_s
            for target in self._coordinator.pool_map.targets
            if target.state == "up" and (end_s := self._last_s(target.id) + LEASE_S) >= now_s
        ]
        return min([_TICK_S, *(end_s + _LATER_S for end_s in ends_s)])

    async def _unless_urgent(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._urgent.wait()
        except TimeoutError:
            pass

    async def run_once(self) -> bool:
        """Make the map that follows from the present state. Return whether there is a new one.

        Errors are those of MapCoordinator.replace.
        """
        before = self._coordinator.pool_map
        after = await change(self._coordinator, self._decide, self._leader)
        for target in self._withheld:  # replaced by this map, or by one whose result is unknown
            self._epoch_min[target] = after.epoch
        self._withheld.clear()
        if after is before:
            return False
        for target in after.targets:
            old = before.target_by_id.get(target.id)
            if old is not None and old.state != target.state:
                log.info("target %d is %s now (map epoch %d)", target.id, target.state, after.epoch)
        return True

    def _silent(self, pool_map: PoolMap) -> set[int]:
        """Targets under a lease that have sent no heartbeat for the whole lease."""
        now_s = self._clock.boottime_s()
        late = [
            target.id
            for target in pool_map.targets
            if target.state == "up"
            and target.id not in self._dead
            and self._last_s(target.id) + LEASE_S < now_s
        ]
        return transitions.shared(pool_map) & set(late) if late else set()

    def _look_at_links(self, now: PoolMap) -> None:
        """Choose the targets that must leave where two nodes cannot reach one another.

        See poolmap/nodes/link_failures.
        """
        known = now.target_by_id
        reports = {
            target: [other for other in heard.unreachable & known.keys() if self.answering(other)]
            for target, heard in self._heard.items()
            if heard.unreachable
            and self.answering(target)
            and target in known
            and (known[target].state == "up" or target in self._cut_off)
        }
        found = cut_off(now, reports, self._cut_off.keys()) if reports else frozenset()
        if new := found - self._cut_off.keys():
            log.warning(
                "targets %s and others do not reach one another, and leave the chains that they share until they do",
                ", ".join(map(str, sorted(new))),
            )
        now_s = self._clock.boottime_s()
        self._cut_off = {target: self._cut_off.get(target, now_s) for target in found}

    def _to_leave(self, pool_map: PoolMap) -> set[int]:
        """Targets behind a broken link whose leases have ended and that can be replaced."""
        now_s = self._clock.boottime_s()
        return {
            target
            for target, since_s in self._cut_off.items()
            if since_s + LEASE_S < now_s and is_replaceable(pool_map, target)
        }

    def _decide(self, now: PoolMap) -> PoolMap:
        self._observe()
        self._look_at_links(now)
        away = self._silent(now) | (self._dead.keys() & transitions.shared(now)) | self._to_leave(now)
        self._withheld |= away
        new = now
        for target, heard in self._heard.items():
            if heard.verifier:
                new = transitions.vouched(new, target, heard.verifier)
        new = transitions.died(new, away)
        back = (
            {target for target, heard in self._heard.items() if heard.pid and self.answering(target)}
            - self._withheld
            - self._cut_off.keys()
        )
        new = transitions.returned(new, back)
        new = taken_back(new, back)
        if away_long := self._away(new):
            new = self._given_up(new, away_long)
        for target in back:
            equal = [
                (*name, epoch)
                for name, epoch in self._heard[target].equal.items()
                if self._known(now, name, now.chain(*name).targets if name[0] in now.table_by_id else ())
            ]
            if equal:
                new = transitions.joined(new, target, equal)
        new = transitions.departed(
            new, lambda name, target: target in now.chain(*name).leaving and self._known(now, name, (target,))
        )
        serving = self.serving()
        new = next_steps(new, serving=serving)
        return without_ended(transitions.retired(new), self._clock.wall_ns() // 1_000_000)

    def _away(self, pool_map: PoolMap) -> set[int]:
        """Targets that have been down for so long that they are given up."""
        now_s = self._clock.boottime_s()
        if now_s - self._began_s <= self._replace_after_s or now_s < self._refused[1]:
            return set()
        return {
            target.id
            for target in pool_map.targets
            if target.state == "down"
            and target.desired_state == "share"
            and now_s - self._last_s(target.id) > self._replace_after_s
        }

    def _given_up(self, now: PoolMap, away: set[int]) -> PoolMap:
        try:
            new = given_up(now, away, self.used_bytes())
        except InvalidRequest as error:
            if str(error) != self._refused[0]:
                log.warning("what targets %s held is not made again elsewhere: %s", sorted(away), error)
            self._refused = str(error), self._clock.boottime_s() + _GIVE_UP_AGAIN_S
            return now
        self._refused = "", 0.0
        log.warning(
            "targets %s have been away for more than %.0f s: what they held is made again elsewhere",
            sorted(away),
            self._replace_after_s,
        )
        return new

    def _known(self, now: PoolMap, name: ChainName, targets: tuple[int, ...]) -> bool:
        """Whether those of the targets that answer know the chain's present state.

        Silent targets have no lease.
        """
        since = self._changed_at.get(name, self._began_epoch)
        return all(
            not self.answering(target) or self._heard[target].epoch >= since
            if target in self._heard
            else not self.answering(target)
            for target in targets
        )

    def _observe(self) -> None:
        """Record since when the chains are as they are."""
        newest = self._coordinator.pool_map
        if newest is self._seen:
            return
        for table in newest.tables:
            old = self._seen.table_by_id.get(table.id)
            for number, chain in enumerate(table.chains):
                if old is None or old.chains[number].epoch != chain.epoch:
                    self._changed_at[table.id, number] = newest.epoch
        self._seen = newest
