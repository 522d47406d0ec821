"""Model of a chain of up to four members and one chunk, decided by poolmap/chains/protocol alone.

Events are messages in the order of their connections, broken connections, deaths, members that are wrongly taken for dead,
returns, pool maps that each member learns at another time, and truncations. The content of the chunk is the list of writes
that made it. So a later read begins with what an earlier read returned, and contains all acknowledged writes.
"""

from __future__ import annotations

import struct
from itertools import count
from typing import NamedTuple

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvpool.core.ids import RequestId, is_done, version_parts
from nvpool.core.ids import version as make_version
from nvpool.poolmap.chains.protocol import (
    Answer,
    ChainPosition,
    MemberChunkState,
    Next,
    Offer,
    after_cut,
    deciders_now,
    gained,
    judge,
    next_step,
    next_version,
    place_in,
    raised,
    taking_part,
    until,
)
from nvpool.poolmap.model import Chain

Content = tuple[int, ...]


class Waiting(NamedTuple):
    offer: Offer
    content: Content
    place: ChainPosition
    caller: tuple | None  # (member, number of the request, link)
    client: int | None
    last: bool
    older: bool = False
    whole: ChainPosition | None = None
    deciders: frozenset = frozenset()


class WriteRequest(NamedTuple):
    number: int
    link: int
    offer: Offer
    content: Content  # content after the write: members compute it from their own, and compare


LINKS = 1000
"""Messages from one process to one other."""


class Member:
    def __init__(self, number: int, chain: Chain, process: int = 1):
        self.number = number
        self.process = process
        self.alive = True
        self.chain = chain
        self.version = 0
        self.content: Content = ()
        self.cut = 0
        self.requests: tuple = ()
        self.pending: Waiting | None = None
        self.awaited = 0  # number of the request that our pending write waits for
        self.above = 0
        self.links: dict[int, int] = {}
        self.own_links: dict[int, int] = {}
        self.cut_waits = 0
        self.floor = 0  # both raised by a resync of the inode's chunks in other chains
        self.raised_cut = 0
        # truncated before it was in sync: resync copies such a chunk whatever its version
        self.tainted = False

    @property
    def place(self) -> ChainPosition | None:
        return place_in(self.chain, self.number)

    def held(self) -> MemberChunkState:
        return MemberChunkState(
            self.version,
            self.floor,
            max(self.cut, self.cut_waits, self.raised_cut),
            self.requests,
            self.pending.offer.version if self.pending else 0,
        )


class World:
    def __init__(self, members: int):
        self.chain = Chain(1, tuple(range(1, members + 1)))
        self.members = {number: Member(number, self.chain) for number in self.chain.targets}
        self.wires: dict[tuple[int, int, int], list] = {}  # (from, to, link) -> messages under way, in order
        self.sent_requests: dict[int, WriteRequest] = {}
        self.numbers = count(1)
        self.contents: dict[int, Content] = {}
        self.acknowledged: list[int] = []
        self.seen: Content = ()
        self.open_writes: dict[int, int] = {}  # write -> truncate number that it was made with
        self.made = 0
        self.cut = 0
        self.granted = 0  # truncate number given to writers, once all members have truncated

    # -- members ----------------------------------------------------------------------------------------------------

    def commit(self, member: Member, version: int, content: Content, request: RequestId | None) -> None:
        assert version_parts(version)[0] <= self.chain.epoch, f"version {version:x} is of another chain"
        if not member.tainted:
            known = self.contents.setdefault(version, content)
            assert known == content, f"version {version:x} is {known} and {content}"
        member.version, member.content = version, content
        if request is not None:
            member.requests = (*member.requests, tuple(request))[-16:]

    def offer(self, member: Member) -> None:
        pending = member.pending
        to = pending.place.successor
        link = member.own_links.setdefault(to, member.process * LINKS + 1)
        member.awaited = next(self.numbers)
        last = (
            0
            if pending.whole is None or pending.whole.members == pending.place.members
            else pending.place.members[-1]
        )
        offer = pending.offer._replace(sender=member.number, epoch=pending.place.epoch, last=last)
        self.send(member.number, to, link, WriteRequest(member.awaited, link, offer, pending.content))

    def send(self, sender: int, to: int, link: int, message) -> None:
        self.wires.setdefault((sender, to, link), []).append(message)

    def advance(self, member: Member) -> None:
        """Continue with the pending write at our present position in the chain."""
        pending = member.pending
        if pending.last:
            self.commit(member, pending.offer.version, pending.content, pending.offer.request)
            self.settle(member, 0, None)
        else:
            self.offer(member)

    def settle(self, member: Member, version: int, refusal: Answer | None) -> None:
        pending, member.pending, member.awaited = member.pending, None, 0
        if pending.caller is not None:
            who, number, link = pending.caller
            self.send(member.number, who, -link, (number, version, refusal))
        if pending.client is not None and refusal is None:
            self.acknowledge(pending.client)
        elif pending.client is not None and refusal is Answer.TOO_LOW:
            member.above = version
        if member.cut_waits and member.pending is None:
            self.truncate_chunk(member)

    def acknowledge(self, write: int) -> None:
        if write in self.open_writes:
            del self.open_writes[write]
            self.acknowledged.append(write)

    def client_writes(self, member: Member, write: int) -> None:
        """As ChainWrites._lead: the client retries a write that is not possible now."""
        place = member.place
        if not member.alive or place is None or not place.is_head or member.pending is not None:
            return
        request = RequestId(9, write % 64, write)
        held = member.held()
        if is_done(held.requests, request):
            self.acknowledge(write)
            return
        cut = self.open_writes[write]
        if cut < held.cut:
            self.open_writes[write] = self.granted  # the client fetches it from the metadata service
            return
        version = next_version(held, place.epoch, member.above)
        offer = Offer(0, place.epoch, version, held.version, cut, request)
        member.pending = Waiting(offer, (*member.content, write), place, None, write, place.is_last)
        self.advance(member)

    def receive(self, member: Member, sender: int, message: WriteRequest) -> None:
        def answer(version: int, refusal: Answer | None) -> None:
            self.send(member.number, sender, -message.link, (message.number, version, refusal))

        before = member.links.get(sender, 0)
        if message.link // LINKS == before // LINKS and message.link < before:
            return answer(0, Answer.OLD_EPOCH)
        member.links[sender] = message.link
        held, offer = member.held(), message.offer
        verdict, version = judge(member.place, held, offer)
        if verdict is Answer.NEW_EPOCH:
            self.learn(member)
            if not member.alive:
                return None
            held = member.held()
            verdict, version = judge(member.place, held, offer)
        if verdict is Answer.DONE:
            answer(0, None)
        elif verdict is Answer.SAME:
            who = member.pending.caller
            if who is not None:  # the request before is answered too; here only the last one counts
                member.pending = member.pending._replace(caller=(sender, message.number, message.link))
            else:
                answer(0, Answer.BUSY)
        elif verdict in (Answer.TAKE, Answer.FETCH):
            if verdict is Answer.FETCH and not self.fetch(member, sender, offer):
                return answer(0, Answer.BUSY)
            content = (*member.content, offer.request.sequence)
            place = until(member.place, offer.last)
            member.pending = Waiting(
                offer,
                content,
                place,
                (sender, message.number, message.link),
                None,
                place.is_last,
                whole=member.place,
            )
            self.advance(member)
        else:
            answer(version, verdict)
        return None

    def fetch(self, member: Member, source: int, offer: Offer) -> bool:
        other = self.members[source]
        if not other.alive or other.version != offer.base or other.cut < member.cut:
            return False
        member.version, member.content, member.requests = other.version, other.content, other.requests
        member.cut = max(member.cut, other.cut)
        return True

    def answered(self, member: Member, number: int, version: int, refusal: Answer | None) -> None:
        pending = member.pending
        if pending is None or member.awaited != number:
            return
        if refusal in (Answer.CUT, Answer.TOO_LOW):
            self.settle(member, version, refusal)
        elif refusal is not None:
            if refusal in (Answer.OLD_EPOCH, Answer.NOT_OURS):
                self.learn(member)
            if member.pending is pending and member.awaited == number:
                self.offer(member)
        else:
            self.commit(member, pending.offer.version, pending.content, pending.offer.request)
            self.settle(member, 0, None)

    def learn(self, member: Member) -> None:
        if member.chain is self.chain or not member.alive:
            return
        member.chain = self.chain
        pending = member.pending
        if pending is None or (pending.whole or pending.place) == member.place:
            return
        deciders = pending.deciders or frozenset(pending.place.members)
        if member.place is not None:
            deciders = deciders_now(pending.whole or pending.place, member.place, deciders)
        step = next_step(pending.whole or pending.place, member.place, deciders)
        if step is Next.DROP:
            member.pending, member.awaited = None, 0
            return
        older = pending.older or gained(deciders, member.place)
        member.pending = pending._replace(
            place=taking_part(member.place, deciders),
            whole=member.place,
            deciders=deciders,
            last=step is Next.COMMIT,
            older=older,
        )
        self.advance(member)

    def truncate_chunk(self, member: Member) -> None:
        """The file gets another size; everything of the chunk that counts stays."""
        cut, member.cut_waits = member.cut_waits, 0
        if cut <= member.cut:
            return
        member.cut = cut
        if member.number not in self.chain.targets:
            member.tainted = True
        if member.version:
            self.commit(member, after_cut(member.version), (*member.content, -cut), None)

    # -- events -------------------------------------------------------------------------------------------------------

    def change(self, **fields) -> None:
        self.chain = msgspec.structs.replace(self.chain, epoch=self.chain.epoch + 1, **fields)

    def step(self, kind: int, pick: int) -> None:
        living = [member for member in self.members.values() if member.alive]
        if kind < 3:  # a client writes, or repeats
            if not self.open_writes or (pick % 3 == 0 and len(self.open_writes) < 3):
                self.made += 1
                self.open_writes[self.made] = self.granted
            write = list(self.open_writes)[pick % len(self.open_writes)]
            self.client_writes(
                self.members[self.chain.targets[0]] if pick % 5 else living[pick % len(living)], write
            )
        elif kind < 10:
            self.deliver(pick)
        elif kind < 12:
            self.learn(living[pick % len(living)])
        elif kind == 12:
            self.read(pick)
        elif kind == 13:
            self.break_link(living[pick % len(living)], pick // 8)
        elif kind == 14:
            self.kill_or_isolate(pick)
        elif kind == 15:
            self.restart(pick)
        elif kind == 16:
            self.resynchronize(pick)
        elif kind == 17:
            self.truncate_at(living[pick % len(living)], pick // 8)
        elif kind == 18:
            self.raise_truncate_numbers(living[pick % len(living)], pick)

    def deliver(self, pick: int) -> bool:
        ways = [way for way, queue in self.wires.items() if queue]
        if not ways:
            return False
        sender, to, link = way = ways[pick % len(ways)]
        message = self.wires[way].pop(0)
        member = self.members[to]
        if not member.alive:
            return True
        if isinstance(message, WriteRequest):
            self.receive(member, sender, message)
        elif member.own_links.get(sender, 0) == -link:  # else the connection of the message has ended
            self.answered(member, *message)
        return True

    def break_link(self, member: Member, pick: int) -> None:
        """Requests that were sent may still arrive; replies do not."""
        if not member.own_links:
            return
        to = list(member.own_links)[pick % len(member.own_links)]
        member.own_links[to] += 1
        if member.pending is not None and not member.pending.last and member.pending.place.successor == to:
            self.offer(member)

    def kill_or_isolate(self, pick: int) -> None:
        """A target dies, or is taken for dead and lives on without knowing."""
        if len(self.chain.targets) + len(self.chain.joining) < 2:
            return
        members = (*self.chain.targets, *self.chain.joining)
        number = members[pick % len(members)]
        targets = tuple(t for t in self.chain.targets if t != number)
        if not targets:
            return
        if pick & 8:
            self.members[number].alive = False
        self.change(targets=targets, joining=tuple(t for t in self.chain.joining if t != number))

    def restart(self, pick: int) -> None:
        away = [
            m for m in self.members.values() if m.number not in (*self.chain.targets, *self.chain.joining)
        ]
        if not away:
            return
        member = away[pick % len(away)]
        self.change(joining=(*self.chain.joining, member.number))
        if not member.alive:  # a new process, with the content of its drive
            fresh = Member(member.number, self.chain, member.process + 1)
            fresh.version, fresh.content, fresh.cut, fresh.requests, fresh.tainted = (
                member.version,
                member.content,
                member.cut,
                member.requests,
                member.tainted,
            )
            fresh.floor, fresh.raised_cut = member.floor, member.raised_cut
            self.members[member.number] = fresh

    def resynchronize(self, pick: int) -> None:
        """The first joining member is brought in sync with the tail, which knows the map, and becomes its successor."""
        if not self.chain.joining:
            return
        member, tail = self.members[self.chain.joining[0]], self.members[self.chain.targets[-1]]
        if not member.alive or not tail.alive:
            return
        self.learn(tail)
        self.learn(member)
        if member.pending is not None:
            return
        if (tail.pending is not None and tail.pending.older) or member.cut_waits or tail.cut < member.cut:
            return  # is compared again later
        if member.tainted or (member.version, member.cut) != (tail.version, tail.cut):
            if tail.pending is not None:
                return
            member.version, member.content, member.requests = tail.version, tail.content, tail.requests
            member.cut, member.tainted = tail.cut, False
        self.change(targets=(*self.chain.targets, member.number), joining=self.chain.joining[1:])

    def truncate_at(self, member: Member, pick: int) -> None:
        """The shard notifies each member, and gives the number to writers when all have answered."""
        if pick % 2 and self.granted == self.cut:
            self.cut += 1
        if member.cut < self.cut:
            member.cut_waits = self.cut
            if member.pending is None:
                self.truncate_chunk(member)
        if all(self.members[number].cut >= self.cut for number in (*self.chain.targets, *self.chain.joining)):
            self.granted = self.cut

    def raise_truncate_numbers(self, member: Member, pick: int) -> None:
        """The member learns the inode's truncate number and floor from a target of another chain, older or younger."""
        member.floor = raised(member.floor, make_version(pick % 13, pick % 7))
        if pick & 1:
            member.raised_cut = self.cut

    def read(self, pick: int) -> None:
        """Read at any target of the chain. A client that knows the map asks no other target, and others have no lease."""
        readable = [self.members[t] for t in self.chain.targets if self.members[t].alive]
        if not readable:
            return
        member = readable[pick % len(readable)]
        if member.pending is None and member.place is not None and member.place.number < member.place.full:
            found = tuple(write for write in member.content if write > 0)
            assert found[: len(self.seen)] == self.seen, f"{found} after {self.seen}"
            assert set(self.acknowledged) <= set(found), f"{found} without some of {self.acknowledged}"
            self.seen = found

    def check(self) -> None:
        for number in self.chain.targets:
            member = self.members[number]
            if member.alive:
                assert set(self.acknowledged) <= set(member.content), (
                    number,
                    member.content,
                    self.acknowledged,
                )
        for member in self.members.values():
            writes = [write for write in member.content if write > 0]
            assert len(set(writes)) == len(writes), f"{writes}: one was done twice"

    def quiet(self) -> None:
        for _ in range(200):
            for member in self.members.values():
                self.learn(member)
                if member.alive:
                    self.truncate_at(member, 0)
            for _ in range(100):
                if not self.deliver(0):
                    break
                self.check()
            for write in list(self.open_writes):
                self.client_writes(self.members[self.chain.targets[0]], write)
            if not self.open_writes and not any(self.wires.values()):
                break
        living = [self.members[number] for number in (*self.chain.targets, *self.chain.joining)]
        assert not self.open_writes or not all(member.alive for member in living)
        if all(member.alive for member in living):
            assert not any(member.pending for member in living)
            full = [self.members[number] for number in self.chain.targets]
            assert len({(member.version, member.content) for member in full}) == 1, [
                (m.version, m.content) for m in full
            ]
            assert set(self.acknowledged) <= set(full[0].content)


def run(members: int, choices: bytes) -> World:
    world = World(members)
    for kind, pick in struct.iter_unpack("BB", choices):
        world.step(kind % 19, pick)
        world.check()
    world.quiet()
    return world


@settings(
    max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.integers(2, 4), st.binary(max_size=400).map(lambda raw: raw[: len(raw) & -2]))
def test_acknowledged_writes_and_reads_are_never_lost(members, choices):
    run(members, choices)
