"""What one member of a chain decides: which version a write gets, what to do with one that comes from the member before it, and
with those that wait when the chain changes. Values and functions, nothing else; store/replication/chain acts.

The protocol (van Renesse and Schneider: Chain Replication for Supporting High Throughput and Availability, OSDI 2004; reads at
each member as Terrace and Freedman: Object Storage on CRAQ, USENIX 2009, but that a member with a pending write waits):

* The head gives a write of a chunk the next version (chain epoch, counter) and *offers* it to its successor, who offers it to
  his. Until it is decided it is *pending* with each of them, and no other write of that chunk begins. The last of targets and
  joining commits it, and is the one who decides; the word travels back, and each commits what the last one has committed.
* Who refuses an offer has not applied it, and neither has anybody behind him; so each before him forgets it. Where the answer
  is missing nothing is known, and the write stays pending until the successor says, or the chain changes.
* An offer names the chain's epoch: only members of the same chain, in the same order, take part in one. When the chain changes,
  who has a pending write offers it again to the successor that it has then, under the new epoch; the last one that is left of
  those who were there commits it. Who stands before another has each pending write that the other has, since it came through
  it; so what anybody who is gone may have committed, each that stays before his place has pending or has committed too. Who
  has joined since could refuse it, and is not asked.
* An offer names the version that it builds on. Whose chunk has another one brings it in line with its predecessor's first.

So, of a chunk: no version has two contents; what was read or acknowledged is with each target that goes on living.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from nvpool.core.errors import ChecksumMismatch, InvalidRequest, KeyMissing, NoSpace, NvpoolError, StaleCut, StaleVersion
from nvpool.core.ids import RequestId, is_done, version_parts
from nvpool.core.ids import version as make_version
from nvpool.poolmap.model import Chain


class Place(NamedTuple):
    """Where a target stands in a chain, at one epoch of it. `members` get each write, in this order; behind the first `full`
    of them are those that join."""

    epoch: int
    members: tuple[int, ...]
    full: int
    number: int

    @property
    def is_head(self) -> bool:
        return not self.number

    @property
    def is_last(self) -> bool:
        return self.number == len(self.members) - 1

    @property
    def successor(self) -> int:
        """Not of the last one."""
        return self.members[self.number + 1]

    @property
    def predecessor(self) -> int:
        """0: of the head."""
        return self.members[self.number - 1] if self.number else 0


def place_in(chain: Chain, target: int) -> Place | None:
    """Of a target in a chain; None when it is no part of it."""
    members = (*chain.targets, *chain.joining)
    return Place(chain.epoch, members, len(chain.targets), members.index(target)) if target in members else None


Deciders = frozenset[int]
"""Of a pending write: the members that there were when it began, and those that have become targets since. Whatever a target
that is gone had committed, they have compared themselves with."""


class Offer(NamedTuple):
    """A write as one member names it to the next: `epoch` is that of the chain as the sender knows it, `version` what the chunk
    has after the write and `base` what it has before; 0: there is no such chunk. `last` is the member behind whom nobody takes
    part in it; 0: all do."""

    sender: int
    epoch: int
    version: int
    base: int
    cut: int
    request: RequestId
    last: int = 0


class Held(NamedTuple):
    """What a member has of a chunk. `floor`: of the inode, see `raised`; `cut`: of the
    inode, the newest known, or that waits for pending writes to be decided; `requests`: the last that were done to it, as
    (session, slot, sequence); `pending`: the version of the write that is not decided, or 0."""

    version: int
    floor: int = 0
    cut: int = 0
    requests: tuple[tuple[int, int, int], ...] = ()
    pending: int = 0


class Answer(Enum):
    TAKE = auto()           # apply it, or keep it and offer it to the successor
    FETCH = auto()          # as TAKE, when the chunk has been brought in line with the predecessor's
    DONE = auto()           # it was committed here before
    SAME = auto()           # it is pending here: who asks gets that one's outcome
    BUSY = auto()           # another one is pending here: to be offered again
    TOO_LOW = auto()        # the version that is told was given before: give a higher one
    CUT = auto()            # the file was cut since
    OLD_EPOCH = auto()      # the sender's chain is older than ours: he has to learn of the new one
    NEW_EPOCH = auto()      # ours is the older one: learn of the new one, then judge again
    NOT_OURS = auto()       # the sender is not our predecessor


def judge(place: Place | None, held: Held, offer: Offer) -> tuple[Answer, int]:
    """What a member that stands at `place` and has `held` does with an offer; and the version that goes with the answer, where
    one does."""
    if place is None or offer.epoch > place.epoch:
        return Answer.NEW_EPOCH, 0
    if offer.epoch < place.epoch:
        return Answer.OLD_EPOCH, 0
    if place.predecessor != offer.sender:
        return Answer.NOT_OURS, 0
    if held.pending:
        return (Answer.SAME if held.pending == offer.version else Answer.BUSY), 0
    if held.version >= offer.version and is_done(held.requests, offer.request):
        return Answer.DONE, 0  # whatever has changed since
    if offer.cut < held.cut:
        return Answer.CUT, 0
    if offer.version <= held.version or not is_above(offer.version, held.floor):
        return Answer.TOO_LOW, next_version(held, version_parts(offer.version)[0]) - 1
    return (Answer.TAKE if offer.base == held.version else Answer.FETCH), 0


COUNTER_MAX = (1 << 31) - 1
"""Highest counter that a head gives. A store marks a chunk whose write was lost with the bit above it
(store/chunks/recovery)."""
_OLD_FLOOR_COUNTER = 1 << 30


def raised(floor: int, version: int) -> int:
    """The version floor of an inode after a chunk of this version is gone.

    A floor holds the highest epoch and, apart from it, the highest counter of all chunks of the inode that are gone. The chunks
    of an inode belong to many chains, each with its own epoch. So a head gives versions of its own chain's epoch above the
    floor's counter, and none of them was given before, whichever chain the floor comes from.
    """
    epoch, counter = version_parts(floor)
    its_epoch, its_counter = version_parts(version)
    return make_version(max(epoch, its_epoch), max(counter, its_counter if its_counter <= COUNTER_MAX else 0))


def is_above(version: int, floor: int) -> bool:
    """Whether the version was given to none of the chunks that the floor stands for."""
    (epoch, counter), (floor_epoch, floor_counter) = version_parts(version), version_parts(floor)
    return epoch > floor_epoch or counter > floor_counter


def of_old_floor(highest: int) -> int:
    """The floor for a record or message of an older build, which holds the highest version as one number.

    That number hides the counters of chains with lower epochs. The result's counter is above any that they can have given.
    """
    epoch, counter = version_parts(highest)
    return make_version(epoch, max(_OLD_FLOOR_COUNTER, counter if counter <= COUNTER_MAX else 0)) if highest else 0


def next_version(held: Held, epoch: int, above: int = 0) -> int:
    """The version that the head of a chain at this epoch gives: above the chunk's, above its inode's floor and above `above`.

    It carries the chain's epoch, unless the chunk, or a member with an older build, had a later one already.
    """
    at_epoch, counter = version_parts(max(held.version, above))
    if at_epoch < epoch:
        at_epoch, counter = epoch, 0
    floor_epoch, floor_counter = version_parts(held.floor)
    if at_epoch <= floor_epoch:
        counter = max(counter, floor_counter)
    if counter >= COUNTER_MAX:  # this epoch has no more
        at_epoch, counter = max(at_epoch, floor_epoch) + 1, 0
    return make_version(at_epoch, counter + 1)


_CUT_STEP = 4


def after_cut(version: int) -> int:
    """What a chunk that a cut changes has after it. Each member cuts when it is told, so it is not the head who gives this one:
    four more, since of two that had the same version one may have committed two writes more in that epoch: the one that was
    pending when the other left the chain, and the next one, where the head did not know yet that he had. What writes and cuts
    gave from there on is then never the same number on both."""
    return version + _CUT_STEP


def is_refusal(error: NvpoolError) -> bool:
    """Whether a successor that answers so has not applied the write, nor has anybody behind it, and will not: it has judged it.
    Everything else leaves that open: ask again."""
    return isinstance(error, (NoSpace, StaleCut, StaleVersion, ChecksumMismatch, InvalidRequest, KeyMissing))


class Next(Enum):
    COMMIT = auto()
    OFFER = auto()
    DROP = auto()


def next_step(before: Place, now: Place | None, deciders: Deciders) -> Next:
    """What becomes of a write that is pending with a member that stood at `before` and stands at `now`; `deciders` are those of
    now.

    It is offered to the successor, while one of the deciders is behind us. Else it is committed: who was behind us may have
    done so, and whoever joins has no part in that and must not be able to refuse it. Who is no part of the chain any more drops
    it, for what the others have is not his to know; so does who has left it meanwhile and joins it anew: he would stand behind
    others than before."""
    if now is None or (before.number < before.full and now.number >= now.full):
        return Next.DROP
    if not set(now.members[:now.number]) <= set(before.members[:before.number]):
        return Next.DROP
    return Next.COMMIT if taking_part(now, deciders).is_last else Next.OFFER


def deciders_now(before: Place, now: Place, deciders: Deciders) -> Deciders:
    """Of a pending write. One that joined already stays one, unless it can have left and come back since the chain was seen."""
    kept = deciders.intersection(now.members) if now.epoch <= before.epoch + 1 else frozenset()
    return kept.union(now.members[:now.full])


def gained(deciders: Deciders, now: Place) -> bool:
    """Whether somebody joins the chain who is none of the deciders. A write that is pending with its last target is decided
    without him; so he must not compare what he has with what that one has before it is."""
    return not deciders.issuperset(now.members)


def taking_part(now: Place, deciders: Deciders) -> Place:
    """`now`, with those who take part in a pending write: of the last target and those behind it only deciders. A target before
    that offers it to the last one, who has it too, or takes it as any other."""
    if now.number < now.full - 1:
        return now
    count = now.number + 1
    while count < len(now.members) and (count < now.full or now.members[count] in deciders):
        count += 1
    return now._replace(members=now.members[:count])


def until(place: Place, last: int) -> Place:
    """`place`, in a chain that ends with `last`; 0: as it is."""
    return place._replace(members=place.members[:place.members.index(last) + 1]) if last in place.members else place
