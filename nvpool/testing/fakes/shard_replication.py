"""Members of a shard in one process: real engines, real map transitions, and links that can be cut and
slowed.

For tests of kv/replication/primary and kv/replication/standby, and of their histories. A member is alive or
dead (its engine is abandoned, as by kill -9); a live one follows the map. Links deliver calls in order, and
lose calls in flight when they are cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Disconnected, NvpoolError, StaleTerm, Unavailable
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.commit_mark import CommitMark
from nvpool.kv.replication.member_engine import MemberKv, whole_term, with_term
from nvpool.kv.replication.primary import Shipping, ShippingOptions
from nvpool.kv.replication.standby import Done, Group, StandbyKv
from nvpool.kv.replication_log import Position, Tail
from nvpool.poolmap.model import MAP_FORMAT, Node, PoolMap, PoolSettings, Shard, StandbyMember
from nvpool.poolmap.shards import members as shard_members

__all__ = ["OPTIONS", "Group", "Link", "Member", "Members"]

OPTIONS = LmdbOptions(
    journal_bytes=1 << 20,
    map_bytes=1 << 20,
    sync_interval_s=30,
    checkpoint_interval_s=0.05,
    layer_entries_max=200,
)
QUICK = ShippingOptions(
    silent_s=0.3,
    heartbeat_s=0.01,
    retry_s=0.005,
    lag_max=50,
    in_flight_max=4,
    group_bytes=2000,
    step_pairs=20,
)
SHARD = 1
QUIET_S = 10.0


class Member:
    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = False
        self.standby: StandbyKv | None = None
        self.kv: MemberKv | None = None
        self.shipping: Shipping | None = None
        self.term = 0  # in which this process is the primary


class Link:
    """Link from one member to another.

    `cut` fails calls in flight and later ones. Each call and each reply takes a random number of loop
    iterations.
    """

    def __init__(self, members: Members, sender: Member, receiver: Member) -> None:
        self._members = members
        self._sender = sender
        self._receiver = receiver
        self._queue: deque[tuple[Group, Done]] = deque()
        self._carrying: asyncio.Task | None = None

    def _there(self) -> StandbyKv:
        pair = (self._sender.number, self._receiver.number)
        if pair in self._members.cuts or not self._receiver.alive or not self._sender.alive:
            raise Disconnected("the link is cut")
        if self._receiver.standby is None:
            raise (
                StaleTerm("it is the primary itself")
                if self._receiver.term > self._sender.term
                else Unavailable("not yet")
            )
        return self._receiver.standby

    async def _call(self, method: str, *arguments):
        await self._way()
        answer = await getattr(self._there(), method)(*arguments)
        await self._way()
        self._there()
        return answer

    async def _way(self) -> None:
        for _ in range(self._members.random.randrange(3)):
            await asyncio.sleep(0)

    async def begin(self, term: int) -> Tail:
        return await self._call("begin", term)

    async def keep(self, term: int, sequence: int) -> None:
        await self._call("keep", term, sequence)

    async def install(self, term: int, position: Position) -> None:
        await self._call("install", term, position)

    async def installed(self, term: int) -> None:
        await self._call("installed", term)

    async def sync(self, term: int) -> int:
        while self._queue:  # noqa: ASYNC110 - keeps the order of the calls
            await asyncio.sleep(0)
        return await self._call("sync", term)

    def ship(self, group: Group, done: Done) -> None:
        self._queue.append((group, done))
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.ensure_future(self._carry())
            self._members.tasks.add(self._carrying)
            self._carrying.add_done_callback(self._members.tasks.discard)

    async def _carry(self) -> None:
        while self._queue:
            await self._way()
            group, done = self._queue[0]
            try:
                self._there().ship(group, partial(self._answer, done))
            except NvpoolError as error:
                done(None, error)
            self._queue.popleft()

    def _answer(self, done: Done, sequence: int | None, error: BaseException | None) -> None:
        try:
            self._there()
        except NvpoolError as lost:
            sequence, error = None, lost
        asyncio.get_running_loop().call_soon(done, sequence, error)


class Members:
    """Members of one shard. `pool_map` is the authoritative map."""

    def __init__(
        self,
        directory: Path,
        count: int = 2,
        options: LmdbOptions = OPTIONS,
        shipping: ShippingOptions = QUICK,
        random=None,
        retain_bytes: int | None = None,
    ) -> None:
        self.directory = directory
        self.options = options
        self.shipping_options = shipping
        self.random = random or SYSTEM_CLOCK.random()
        self.retain_bytes = retain_bytes
        self.members = [Member(number) for number in range(count)]
        self.cuts: set[tuple[int, int]] = set()
        self.manager_away: bool | NvpoolError = False
        """Whether the map cannot be changed; or the error of such an attempt."""
        self.tasks: set[asyncio.Task] = set()
        node = Node(1, "n", "", ())
        shard = Shard(
            SHARD, 1, (), standbys=tuple(StandbyMember(number, 1, ()) for number in range(1, count))
        )
        self.pool_map = PoolMap(MAP_FORMAT, "p", "p", 1, PoolSettings(), (node,), shards=(shard,))

    @property
    def shard(self) -> Shard:
        return self.pool_map.shard_by_id[SHARD]

    @property
    def up(self) -> set[int]:
        return {standby.member for standby in self.shard.standbys if standby.state == "up"}

    @property
    def primary(self) -> Member:
        return self.members[self.shard.member]

    def path(self, member: Member) -> Path:
        return self.directory / f"member-{member.number}"

    def mark(self, member: Member) -> Path:
        return self.directory / f"member-{member.number}.mark"

    async def start(self, number: int, alone: bool = False) -> None:
        """Start a new process of the member: primary or standby, as the map says.

        With `alone` no standby is reachable. Unavailable: a standby may have changes that this primary lacks;
        the process is dead then.
        """
        member = self.members[number]
        member.alive = True
        if self.shard.member == number:
            try:
                self.pool_map = shard_members.primary_began(
                    self.pool_map,
                    SHARD,
                    number,
                    () if alone else None,
                    whole_term=whole_term(self.mark(member), self.path(member)),
                )
            except Unavailable:
                member.alive = False
                raise
            if self.shard.member == number:
                kv = await MemberKv.open_member(
                    self.path(member), with_term(self.options, self.shard.term), **self._more()
                )
                await self._serve(member, kv)
                return
        self.mark(member).unlink(missing_ok=True)
        member.standby = StandbyKv(self.path(member), self.options, retain_bytes=self.retain_bytes)
        await self.follow_map()

    async def start_all(self) -> None:
        for member in self.members:
            await self.start(member.number)

    def _more(self) -> dict:
        return {} if self.retain_bytes is None else {"retain_bytes": self.retain_bytes}

    async def _serve(self, member: Member, kv: MemberKv) -> None:
        member.kv, member.term = kv, self.shard.term
        kv.history.mark_commits(
            CommitMark.begin(self.mark(member), self.path(member), member.term, kv.last.sequence)
        )

        async def ask(number: int, up: bool) -> None:
            epoch = self.shard.epoch
            await asyncio.sleep(0)
            if self.manager_away or not member.alive:
                raise (
                    self.manager_away
                    if isinstance(self.manager_away, NvpoolError)
                    else Unavailable("the manager does not answer")
                )
            if up:
                self.pool_map = shard_members.standby_up(self.pool_map, SHARD, number, member.term, epoch)
            else:
                self.pool_map = shard_members.standby_out(self.pool_map, SHARD, number, member.term)
            await asyncio.sleep(0)

        member.shipping = Shipping(
            kv, clock=SYSTEM_CLOCK, ask=ask, on_deposed=lambda: None, options=self.shipping_options
        )
        member.shipping.use(
            {
                standby.member: (
                    partial(Link, self, member, self.members[standby.member]),
                    standby.state == "up",
                )
                for standby in self.shard.standbys
            }
        )

    async def follow_map(self) -> None:
        """Promote the member that the map calls primary, if it is a standby."""
        member = self.primary
        if member.alive and member.standby is not None and not self.manager_away:
            standby, member.standby = member.standby, None
            await self._serve(member, await standby.promote(self.shard.term))

    async def kill(self, number: int) -> None:
        member = self.members[number]
        member.alive = False
        if member.shipping is not None:
            await member.shipping.close()
        for engine in (member.kv, member.standby):
            if engine is not None:
                await engine.abandon()
        member.kv = member.shipping = member.standby = None

    async def fail_over(self) -> bool:
        """Promote another member because the primary is dead or silent. Return whether one can be."""
        new = shard_members.primary_lost(self.pool_map, SHARD)
        if new is None:
            return False
        self.pool_map = new
        await self.follow_map()
        return True

    def apply(self, effects, on_outcome=None) -> int:
        """Apply a change at the primary; `on_outcome(True)` is called when it is acknowledged."""
        kv = self.primary.kv
        sequence = kv.apply(effects)
        kv.history.when(sequence, on_outcome or (lambda _known: None))
        return sequence

    async def acknowledged(self, effects) -> None:
        """Apply a change and return when it is acknowledged."""
        done = asyncio.get_running_loop().create_future()
        self.apply(effects, lambda known: done.done() or done.set_result(known))
        if not await done:
            raise Unavailable("it is not known")

    async def quiet(self, up: set[int] | None = None) -> None:
        """Wait until all live standbys (or those of `up`) are up and have everything.

        A replaced primary counts as a standby only after its restart.
        """
        wanted = (
            up
            if up is not None
            else {member.number for member in self.members if member.alive and member.standby is not None}
        )
        end_s = SYSTEM_CLOCK.boottime_s() + QUIET_S
        while True:
            if SYSTEM_CLOCK.boottime_s() > end_s:
                raise AssertionError(f"not quiet: {self.description()}")
            kv = self.primary.kv
            there = [self.members[number].standby for number in wanted]
            if (
                wanted <= self.up
                and kv.history.committed == kv.sequence
                and all(
                    standby is not None and standby.last is not None and standby.last.sequence == kv.sequence
                    for standby in there
                )
            ):
                return
            await asyncio.sleep(0.002)

    def description(self) -> str:
        """Describe the state of all members for an error message."""
        lines = [str(self.shard), f"cuts {self.cuts}"]
        for member in self.members:
            standby, kv = member.standby, member.kv
            lines.append(f"member {member.number}: alive {member.alive}")
            if standby is not None:
                lines.append(
                    f"  standby of term {standby.term} at {standby.last}, filling {standby.filling}, ready "
                    f"{standby.ready}, {len(standby.waiting)} wait"
                )
            if kv is not None:
                lines.append(
                    f"  primary of term {member.term} at {kv.last}, committed {kv.history.committed}, kept behind "
                    f"{kv.history.base}, fenced {kv.fenced!r}"
                )
            if member.shipping is not None:
                lines += [f"  {vars(peer)}" for peer in member.shipping.peers.values()]
        return "\n".join(lines)

    async def close(self) -> None:
        for member in self.members:
            await self.kill(member.number)
        for task in list(self.tasks):
            task.cancel()
