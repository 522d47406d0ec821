"""Chain replication protocol: the decisions of one member of a chain, as pure values and functions.

The module decides which version a write gets, how a member answers an offered write, and what happens to
pending writes when the chain changes. store/replication/chain_writes carries the decisions out.

The protocol (van Renesse and Schneider: Chain Replication for Supporting High Throughput and Availability,
OSDI 2004; reads at each member as in Terrace and Freedman: Object Storage on CRAQ, USENIX 2009, except that a
member with a pending write delays the read):

* The head gives a write of a chunk the next version (chain epoch, counter) and *offers* the write to its
  successor, which offers it to its own successor. Until the write is decided, it is *pending* on each member,
  and no other write of that chunk begins. The last of targets and joining commits the write, and so decides
  it. The reply travels back, and each member commits what the last member has committed.
* A member that refuses an offer has not applied the write, and neither has any member after it; so each
  member before it discards the write. If the reply is lost, the outcome is unknown, and the write stays
  pending until the successor answers or the chain changes.
* An offer names the chain's epoch: a write involves only members of the same chain, in the same order. When
  the chain changes, a member with a pending write offers the write again to its new successor, under the new
  epoch. The last remaining member of those that were present commits the write. Each member has every pending
  write that a later member has, because writes pass through it. So if a departed member may have committed a
  write, each remaining member before it has the write pending or committed. Members that joined later could
  refuse the write, and are not asked.
* An offer names the version that it builds on. A member whose chunk has another version first synchronises
  the chunk with its predecessor.

The guarantee for each chunk: no version has two contents, and everything that was read or acknowledged is on
every target that survives.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from nvpool.core.errors import (
    ChecksumMismatch,
    InvalidRequest,
    KeyMissing,
    NoSpace,
    NvpoolError,
    StaleCut,
    StaleVersion,
)
from nvpool.core.ids import RequestId, is_done, version_parts
from nvpool.core.ids import version as make_version
from nvpool.poolmap.model import Chain


class ChainPosition(NamedTuple):
    """Position of a target in a chain, at one epoch of the chain.

    `members` receive each write, in this order. The first `full` of them are targets; the rest are joining.
    """

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
        """Next member; not defined for the last one."""
        return self.members[self.number + 1]

    @property
    def predecessor(self) -> int:
        """Previous member; 0 for the head."""
        return self.members[self.number - 1] if self.number else 0


def place_in(chain: Chain, target: int) -> ChainPosition | None:
    """Return the position of a target in a chain; None if the target is not a member."""
    members = (*chain.targets, *chain.joining)
    return (
        ChainPosition(chain.epoch, members, len(chain.targets), members.index(target))
        if target in members
        else None
    )


Deciders = frozenset[int]
"""Members that decide a pending write: those present when the write began, and those that became targets
since. Everything that a departed target had committed, these members have compared with their own chunks."""


class Offer(NamedTuple):
    """A write as one member offers it to the next.

    `epoch` is the chain's epoch known to the sender. `version` is the chunk's version after the write and
    `base` its version before; 0: the chunk does not exist. `last` is the last member that takes part in the
    write; 0: all members.
    """

    sender: int
    epoch: int
    version: int
    base: int
    cut: int
    request: RequestId
    last: int = 0


class MemberChunkState(NamedTuple):
    """State of a chunk on a member.

    `floor` is the version floor of the inode, see `raised`. `cut` is the newest known truncate number of the
    inode, including one that waits for pending writes to be decided. `requests` are the last requests applied
    to the chunk, as (session, slot, sequence). `pending` is the version of the undecided write, or 0.
    """

    version: int
    floor: int = 0
    cut: int = 0
    requests: tuple[tuple[int, int, int], ...] = ()
    pending: int = 0


class Answer(Enum):
    TAKE = auto()  # apply the write, or keep it pending and offer it to the successor
    FETCH = auto()  # as TAKE, after the chunk has been synchronised with the predecessor's
    DONE = auto()  # the write was committed here before
    SAME = auto()  # the write is pending here: the sender gets the outcome of the pending one
    BUSY = auto()  # another write is pending here: offer again later
    TOO_LOW = auto()  # the returned version was issued before: issue a higher one
    CUT = auto()  # the file was truncated since
    OLD_EPOCH = auto()  # the sender's chain is older than ours: the sender must fetch the new pool map
    NEW_EPOCH = auto()  # our chain is older: fetch the new pool map, then judge again
    NOT_OURS = auto()  # the sender is not our predecessor


def judge(place: ChainPosition | None, held: MemberChunkState, offer: Offer) -> tuple[Answer, int]:
    """Return how a member at `place`, whose chunk is in state `held`, answers an offer.

    The number is the version to exceed for TOO_LOW, otherwise 0.
    """
    if place is None or offer.epoch > place.epoch:
        return Answer.NEW_EPOCH, 0
    if offer.epoch < place.epoch:
        return Answer.OLD_EPOCH, 0
    if place.predecessor != offer.sender:
        return Answer.NOT_OURS, 0
    if held.pending:
        return (Answer.SAME if held.pending == offer.version else Answer.BUSY), 0
    if held.version >= offer.version and is_done(held.requests, offer.request):
        return Answer.DONE, 0  # regardless of later changes
    if offer.cut < held.cut:
        return Answer.CUT, 0
    if offer.version <= held.version or not is_above(offer.version, held.floor):
        return Answer.TOO_LOW, next_version(held, version_parts(offer.version)[0]) - 1
    return (Answer.TAKE if offer.base == held.version else Answer.FETCH), 0


COUNTER_MAX = (1 << 31) - 1
"""Highest counter that a head issues. A store marks a chunk with a lost write by setting the next higher bit
(store/chunks/recovery)."""
_OLD_FLOOR_COUNTER = 1 << 30


def raised(floor: int, version: int) -> int:
    """Return the version floor of an inode after a chunk with this version is removed.

    A floor holds the highest epoch and, independently, the highest counter of all removed chunks of the
    inode. The chunks of an inode belong to many chains, each with its own epoch. So a head issues versions of
    its own chain's epoch above the floor's counter, and none of them was issued before, whichever chain the
    floor comes from.
    """
    epoch, counter = version_parts(floor)
    its_epoch, its_counter = version_parts(version)
    return make_version(max(epoch, its_epoch), max(counter, its_counter if its_counter <= COUNTER_MAX else 0))


def is_above(version: int, floor: int) -> bool:
    """Return whether the version was issued to none of the removed chunks that the floor represents."""
    (epoch, counter), (floor_epoch, floor_counter) = version_parts(version), version_parts(floor)
    return epoch > floor_epoch or counter > floor_counter


def of_old_floor(highest: int) -> int:
    """Return the floor for a record or message of an older build.

    Such a record holds the highest version as one number. That number hides the counters of chains with lower
    epochs. The counter of the result is above any that they can have issued.
    """
    epoch, counter = version_parts(highest)
    return (
        make_version(epoch, max(_OLD_FLOOR_COUNTER, counter if counter <= COUNTER_MAX else 0))
        if highest
        else 0
    )


def next_version(held: MemberChunkState, epoch: int, above: int = 0) -> int:
    """Return the next version of a chunk from the head of a chain at this epoch.

    The version is above the chunk's version, its inode's floor and `above`. The version has the chain's
    epoch, unless the chunk, or a member with an older build, already had a later epoch.
    """
    at_epoch, counter = version_parts(max(held.version, above))
    if at_epoch < epoch:
        at_epoch, counter = epoch, 0
    floor_epoch, floor_counter = version_parts(held.floor)
    if at_epoch <= floor_epoch:
        counter = max(counter, floor_counter)
    if counter >= COUNTER_MAX:  # the counters of this epoch are used up
        at_epoch, counter = max(at_epoch, floor_epoch) + 1, 0
    return make_version(at_epoch, counter + 1)


_CUT_STEP = 4


def after_cut(version: int) -> int:
    """Return the version of a chunk after a truncation changes it.

    Each member truncates when it is notified, so this version is not issued by the head. The step is 4 for
    this reason: of two members with the same version, one may have committed two more writes in that epoch.
    These are the write that was pending when the other member left the chain, and the next write, if the head
    did not know yet that the member had left. With the step, later writes and truncations never produce equal
    version numbers on both members.
    """
    return version + _CUT_STEP


def is_refusal(error: NvpoolError) -> bool:
    """Return whether this error of a successor is final: no member from the successor on has applied the
    write, or will.

    Any other error leaves the outcome open: offer the write again.
    """
    return isinstance(error, (NoSpace, StaleCut, StaleVersion, ChecksumMismatch, InvalidRequest, KeyMissing))


class Next(Enum):
    COMMIT = auto()
    OFFER = auto()
    DROP = auto()


def next_step(before: ChainPosition, now: ChainPosition | None, deciders: Deciders) -> Next:
    """Return what a member does with a pending write after the chain has changed.

    The member stood at `before` and stands at `now`; `deciders` are the current ones. OFFER: a decider is
    after this member, so offer the write to the successor. COMMIT: no decider is after this member. A member
    that was after it may have committed the write, and a joining member must not be able to refuse it. DROP:
    the target is no longer a member and cannot know what the others have; or it left and joined again, and
    now stands after other members than before.
    """
    if now is None or (before.number < before.full and now.number >= now.full):
        return Next.DROP
    if not set(now.members[: now.number]) <= set(before.members[: before.number]):
        return Next.DROP
    return Next.COMMIT if taking_part(now, deciders).is_last else Next.OFFER


def deciders_now(before: ChainPosition, now: ChainPosition, deciders: Deciders) -> Deciders:
    """Return the deciders of a pending write at the new position.

    A joining member that was a decider stays one, unless it may have left and returned since the chain was
    last seen.
    """
    kept = deciders.intersection(now.members) if now.epoch <= before.epoch + 1 else frozenset()
    return kept.union(now.members[: now.full])


def gained(deciders: Deciders, now: ChainPosition) -> bool:
    """Return whether a joining member is not a decider.

    A write that is pending on the last target is decided without that member. So the member must not compare
    its chunks with those of the last target before the write is decided.
    """
    return not deciders.issuperset(now.members)


def taking_part(now: ChainPosition, deciders: Deciders) -> ChainPosition:
    """Return `now`, reduced to the members that take part in a pending write.

    From the last target on, only deciders take part. A target before that offers the write to its successor
    as usual; the last target already has the write, or accepts it as any other.
    """
    if now.number < now.full - 1:
        return now
    count = now.number + 1
    while count < len(now.members) and (count < now.full or now.members[count] in deciders):
        count += 1
    return now._replace(members=now.members[:count])


def until(place: ChainPosition, last: int) -> ChainPosition:
    """Return `place` in the chain shortened to end with `last`; unchanged if `last` is not a member."""
    return (
        place._replace(members=place.members[: place.members.index(last) + 1])
        if last in place.members
        else place
    )
