"""Simulated etcd on virtual time, as its clients know it: majority commits, leases, watches that end.

Three processes on simulated nodes, which fail like all others. One of them leads while it reaches a majority;
otherwise another one is elected after a while, and all leases are restarted. A member without a majority does
not answer, or answers that it has no leader, and ends its watches; a call whose member falls silent may have
been executed. Consensus itself is not simulated: a committed change is never lost. `SimCalls` connects
`cluster/etcd/coordinator` to it. Made by `sim/control_plane`.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from nvpool.cluster.etcd.client import CALL_S, NEXT_S, PAUSE_S
from nvpool.core.clock import Clock
from nvpool.core.errors import Unavailable
from nvpool.testing.sim.network import SimulatedNetwork
from nvpool.testing.sim.simulated_process import Killed, Process
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

MEMBERS = 3
TICK_S = 0.05
ELECTION_S = (1.0, 2.0)
LEADERLESS_S = 1.5
"""Time without a leader after which a member ends its watches."""
PUT, DELETE = 0, 1


class _EtcdLease:
    __slots__ = ("ttl_s", "until_s")

    def __init__(self, ttl_s: float, until_s: float) -> None:
        self.ttl_s, self.until_s = ttl_s, until_s


class SimEtcd:
    """`members` are its processes, by name; `on_put(key, value)` is called with each change."""

    def __init__(
        self, loop: VirtualLoop, network: SimulatedNetwork, seed: str, on_put: Callable[[bytes, bytes], None]
    ) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.members: dict[str, Process] = {}
        self.elections = 0
        self.network = network
        self._on_put = on_put
        self._context = contextvars.copy_context()
        self._revision = 1
        self._values: dict[bytes, SimpleNamespace] = {}
        self._history: list[tuple[int, list[SimpleNamespace]]] = []
        self._leases: dict[int, _EtcdLease] = {}
        self._leader: str | None = None
        self._election_s = 0.0
        self._alone_since_s: dict[str, float] = {}
        self._streams: dict[_Stream, None] = {}
        self._tasks: set[asyncio.Task] = set()

    # -- members -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.behind(self._run())

    def _is_up(self, member: str) -> bool:
        process = self.members[member]
        return process.alive and process.held is None

    def _meet(self, one: str, other: str) -> bool:
        return one == other or (
            self._is_up(one) and self._is_up(other) and not self.network.is_cut(one, other)
        )

    def _leads(self, member: str) -> bool:
        return self._is_up(member) and 2 * sum(self._meet(member, other) for other in self.members) > len(
            self.members
        )

    def serves(self, member: str) -> bool:
        """Whether the member can have a change committed now."""
        leader = self._leader
        return (
            leader is not None and self._is_up(member) and self._meet(member, leader) and self._leads(leader)
        )

    def hears(self, process: Process, member: str) -> bool:
        return self._is_up(member) and not self.network.is_cut(process.name, member)

    def delay_s(self) -> float:
        return self.chance.uniform(0.0003, 0.003)

    async def _run(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(TICK_S)

    def _look(self) -> None:
        now_s = self.loop.time()
        if self._leader is not None and not self._leads(self._leader):
            self._leader, self._election_s = None, now_s + self.chance.uniform(*ELECTION_S)
        if self._leader is None and now_s >= self._election_s:
            able = [member for member in self.members if self._leads(member)]
            if able:
                self._leader = self.chance.choice(able)
                self.elections += 1
                for lease in self._leases.values():
                    lease.until_s = now_s + lease.ttl_s
        if self._leader is not None:
            for number in [number for number, lease in self._leases.items() if lease.until_s < now_s]:
                self._end_lease(number)
        for member in self.members:
            if self.serves(member):
                self._alone_since_s.pop(member, None)
            else:
                self._alone_since_s.setdefault(member, now_s)
        for stream in list(self._streams):
            stream.look(now_s - self._alone_since_s.get(stream.member, now_s))

    def behind(self, work) -> asyncio.Task:
        """Run work that is not part of any process."""
        task = self.loop.create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    # -- committed state -----------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        self._commit([(key, value, 0)])

    def get(self, key: bytes) -> bytes:
        return self._values[key].value

    def range(self, request: Any) -> SimpleNamespace:
        first, end = request.key, request.range_end or request.key + b"\0"
        return SimpleNamespace(kvs=self._between(first, end), header=SimpleNamespace(revision=self._revision))

    def _between(self, first: bytes, end: bytes) -> list[SimpleNamespace]:
        return [self._values[key] for key in sorted(self._values) if first <= key < end]

    def ranges(self, ranges: Sequence[tuple[bytes, bytes]]) -> SimpleNamespace:
        return SimpleNamespace(
            responses=[
                SimpleNamespace(response_range=SimpleNamespace(kvs=self._between(first, end)))
                for first, end in ranges
            ],
            header=SimpleNamespace(revision=self._revision),
        )

    def transact(self, request: Any) -> SimpleNamespace:
        """Execute a transaction. Unavailable, as from EtcdCalls.transact: it needs a lease that does not
        exist."""
        succeeded = all(self._holds(one) for one in request.compare)
        changes: list[tuple[bytes, bytes | None, int]] = []
        responses = []
        for one in request.success if succeeded else request.failure:
            kind = one.WhichOneof("request")
            if kind == "request_put":
                if one.request_put.lease and one.request_put.lease not in self._leases:
                    raise Unavailable(
                        "etcd refuses a change: no such lease", retry_after_s=0.1, may_be_applied=True
                    )
                changes.append((one.request_put.key, one.request_put.value, one.request_put.lease))
            elif kind == "request_delete_range":
                changes.append((one.request_delete_range.key, None, 0))
            else:
                responses.append(SimpleNamespace(response_range=self.range(one.request_range)))
        self._commit(changes)
        return SimpleNamespace(
            succeeded=succeeded, responses=responses, header=SimpleNamespace(revision=self._revision)
        )

    def _holds(self, compare: Any) -> bool:
        found, kind = self._values.get(compare.key), compare.WhichOneof("target_union")
        return (getattr(found, kind) if found is not None else 0) == getattr(compare, kind)

    def _commit(self, changes: Sequence[tuple[bytes, bytes | None, int]]) -> None:
        changes = [change for change in changes if change[1] is not None or change[0] in self._values]
        if not changes:
            return
        self._revision += 1
        events = []
        for key, value, lease in changes:
            if value is None:
                del self._values[key]
                events.append(SimpleNamespace(type=DELETE, kv=SimpleNamespace(key=key, value=b"")))
                continue
            before = self._values.get(key)
            created = before.create_revision if before is not None else self._revision
            made = self._values[key] = SimpleNamespace(
                key=key, value=value, create_revision=created, mod_revision=self._revision, lease=lease
            )
            events.append(SimpleNamespace(type=PUT, kv=made))
            self._on_put(key, value)
        self._history.append((self._revision, events))
        for stream in self._streams:
            self.loop.call_later(self.delay_s(), stream.look, 0.0, context=self._context)

    def events_from(self, revision: int) -> list[SimpleNamespace]:
        place = len(self._history)
        while place and self._history[place - 1][0] >= revision:
            place -= 1
        return [event for _, events in self._history[place:] for event in events]

    @property
    def revision(self) -> int:
        return self._revision

    # -- leases --------------------------------------------------------------------------------------------------------

    def grant_lease(self, ttl_s: float) -> int:
        number = 1 + self.chance.getrandbits(62)
        self._leases[number] = _EtcdLease(ttl_s, self.loop.time() + ttl_s)
        return number

    def keep_alive(self, number: int) -> bool:
        lease = self._leases.get(number)
        if lease is not None:
            lease.until_s = self.loop.time() + lease.ttl_s
        return lease is not None

    def _end_lease(self, number: int) -> None:
        if self._leases.pop(number, None) is not None:
            self._commit([(key, None, 0) for key, one in self._values.items() if one.lease == number])

    revoke_lease = _end_lease

    # -- watches -------------------------------------------------------------------------------------------------------

    def watched(self, stream: _Stream) -> None:
        self._streams[stream] = None

    def unwatched(self, stream: _Stream) -> None:
        self._streams.pop(stream, None)


class _Stream:
    """The part of a watch that `cluster/etcd/coordinator` uses."""

    def __init__(self, etcd: SimEtcd, process: Process, member: str) -> None:
        self.member = member
        self._etcd = etcd
        self._process = process
        self._ranges: list[tuple[bytes, bytes]] = []
        self._next = 0
        self._asked = False
        self._said: asyncio.Queue = asyncio.Queue()

    async def write(self, request: Any) -> None:
        if request.WhichOneof("request_union") == "create_request":
            created = request.create_request
            self._ranges.append((created.key, created.range_end))
            self._next = created.start_revision
            self._etcd.watched(self)
        else:
            self._asked = True

    async def read(self) -> SimpleNamespace:
        said = await self._said.get()
        if isinstance(said, Unavailable):
            raise said
        return said

    def look(self, alone_s: float) -> None:
        """Deliver due events to a watcher that can be reached, or end its watch."""
        etcd = self._etcd
        if not self._process.alive:
            self.cancel()
        elif not etcd.network.is_cut(self._process.name, self.member):
            if not etcd.members[self.member].alive or (
                etcd.hears(self._process, self.member) and alone_s > LEADERLESS_S
            ):
                self._say(Unavailable("the member has ended, or lost the others"))
                self.cancel()
            elif etcd.serves(self.member) and (self._asked or self._next <= etcd.revision):
                events = [
                    event
                    for event in etcd.events_from(self._next)
                    if any(first <= event.kv.key < end for first, end in self._ranges)
                ]
                if events or self._asked:
                    self._say(SimpleNamespace(canceled=False, events=events))
                self._next, self._asked = etcd.revision + 1, False

    def _say(self, said: SimpleNamespace | Unavailable) -> None:
        self._said.put_nowait(said)

    def cancel(self) -> None:
        self._etcd.unwatched(self)


class SimCalls:
    """EtcdCalls of one process."""

    def __init__(self, etcd: SimEtcd, process: Process, clock: Clock) -> None:
        self._etcd = etcd
        self._process = process
        self._clock = clock
        self._members = list(etcd.members)
        self._first = self._at = etcd.chance.randrange(len(self._members))

    def elsewhere(self) -> None:
        self._at = (self._at + 1) % len(self._members)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    async def _call(self, done: Callable[[], Any], wait_s: float) -> Any:
        """Call members as EtcdCalls does: while a slow one has not answered, the next one is called too."""
        until_s = self._clock.boottime_s() + wait_s
        asked: dict[asyncio.Future, int] = {}
        at = self._at
        try:
            while True:
                left_s = until_s - self._clock.boottime_s()
                if left_s > PAUSE_S:
                    asking = asyncio.ensure_future(self._ask(at, done, max(0.05, min(CALL_S, left_s))))
                    asking.add_done_callback(lambda one: one.cancelled() or one.exception())
                    asked[asking] = at
                    at = (at + 1) % len(self._members)
                elif not asked:
                    raise Unavailable("etcd does not answer", may_be_applied=True)
                answered, _ = await asyncio.wait(asked, timeout=NEXT_S, return_when=asyncio.FIRST_COMPLETED)
                for one in answered:
                    self._at = asked.pop(one)
                    with suppress(Unavailable):
                        return one.result()
                if answered:
                    await asyncio.sleep(PAUSE_S)
        finally:
            for one in asked:
                one.cancel()

    def _check(self) -> None:
        if not self._process.alive:
            raise Killed(self._process.name)

    async def _ask(self, at: int, done: Callable[[], Any], wait_s: float) -> Any:
        self._check()
        answer = self._etcd.loop.create_future()
        self._etcd.behind(self._serve(self._members[at], done, answer, self._etcd.loop.time() + wait_s))
        try:
            async with asyncio.timeout(wait_s):
                return await answer
        except TimeoutError:
            raise Unavailable("etcd does not answer in time", may_be_applied=True) from None

    async def _serve(
        self, member: str, done: Callable[[], Any], answer: asyncio.Future, until_s: float
    ) -> None:
        """Execute a call at a member. Its reply may be lost."""
        etcd, process = self._etcd, self._process
        await asyncio.sleep(etcd.delay_s())
        if not etcd.members[member].alive:
            _fail(answer, "nobody listens there")
        if etcd.chance.random() < 0.5 and etcd.hears(process, member) and not etcd.serves(member):
            _fail(answer, "etcd has no leader")
        while not answer.done() and not (etcd.hears(process, member) and etcd.serves(member)):
            if etcd.loop.time() > until_s:
                return
            await asyncio.sleep(TICK_S)
        if answer.done():
            return
        await asyncio.sleep(etcd.delay_s())
        if not etcd.serves(member) and etcd.chance.random() < 0.5:
            return  # changes that are not committed are lost with the leader
        try:
            result = done()
        except Unavailable as error:
            _fail(answer, str(error))
            return
        await asyncio.sleep(etcd.delay_s())
        if etcd.hears(process, member) and not answer.done():
            answer.set_result(result)

    async def range(self, request: Any, wait_s: float) -> SimpleNamespace:
        return await self._call(lambda: self._etcd.range(request), wait_s)

    async def ranges(self, ranges: Sequence[tuple[bytes, bytes]], wait_s: float) -> SimpleNamespace:
        return await self._call(lambda: self._etcd.ranges(ranges), wait_s)

    async def transact(self, request: Any, wait_s: float) -> SimpleNamespace:
        return await self._call(lambda: self._etcd.transact(request), wait_s)

    async def grant_lease(self, lease_s: float, wait_s: float) -> int:
        return await self._call(lambda: self._etcd.grant_lease(lease_s), wait_s)

    async def revoke_lease(self, number: int, wait_s: float) -> None:
        await self._call(lambda: self._etcd.revoke_lease(number), wait_s)

    async def keep_alive(self, number: int, wait_s: float) -> bool:
        try:
            return await self._ask(self._at, lambda: self._etcd.keep_alive(number), min(CALL_S, wait_s))
        except Unavailable:
            self.elsewhere()
            raise

    def watch(self, at: int) -> _Stream:
        self._check()
        return _Stream(self._etcd, self._process, self._members[(self._first + at) % len(self._members)])

    async def close(self) -> None:
        pass


def _fail(answer: asyncio.Future, why: str) -> None:
    if not answer.done():
        answer.set_exception(Unavailable(why, may_be_applied=True))
