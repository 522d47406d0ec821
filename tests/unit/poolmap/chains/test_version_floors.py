"""Version floors: no chunk of an inode gets a version twice, and each version has the epoch of its own chain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.core.ids import RequestId, version, version_parts
from nvpool.poolmap.chains.protocol import (
    COUNTER_MAX,
    Answer,
    MemberChunkState,
    Offer,
    after_cut,
    is_above,
    judge,
    next_version,
    of_old_floor,
    place_in,
    raised,
)
from nvpool.poolmap.model import Chain
from nvpool.rpc.v1 import data_pb2
from nvpool.store.chunks.api import ChunkCopy, InodeCut
from nvpool.store.replication.transfer_server import INODE_CUT, decode_copy, decode_versions, encode_copy

REQUEST = RequestId(1, 0, 1)
CHUNKS = 3


def next_of_old_build(held: int, floor: int, epoch: int) -> int:
    """Next version of builds up to 0.1.0: above the highest version of any chain."""
    at_epoch, counter = version_parts(max(held, floor))
    return version(at_epoch, counter + 1) if epoch <= at_epoch else version(epoch, 1)


steps = st.lists(
    st.tuples(st.sampled_from(["write", "cut within", "cut", "epoch"]), st.integers(0, CHUNKS - 1)),
    max_size=60,
)


@given(steps, steps)
def test_versions_are_unique_also_after_an_upgrade(before, after):
    """Each chunk is of its own chain; a floor of an older build is read like its records."""
    epochs, held, floor = [1, 4, 9], [0] * CHUNKS, 0
    given = [set() for _ in range(CHUNKS)]
    for number, (kind, chunk) in enumerate((*before, *after)):
        is_old = number < len(before)
        if number == len(before):
            floor = of_old_floor(floor)
        if kind == "epoch":
            epochs[chunk] += 1
        elif kind == "cut":
            floor = max(floor, held[chunk]) if is_old else raised(floor, held[chunk])
            held[chunk] = 0
        elif kind == "cut within" and held[chunk]:
            held[chunk] = after_cut(held[chunk])
        elif kind == "write":
            new = (
                next_of_old_build(held[chunk], floor, epochs[chunk])
                if is_old
                else next_version(MemberChunkState(held[chunk], floor), epochs[chunk])
            )
            assert new > held[chunk] and new not in given[chunk]
            assert is_old or version_parts(new)[0] == max(epochs[chunk], version_parts(held[chunk])[0])
            held[chunk] = new
        given[chunk].add(held[chunk])


def test_floor_has_the_highest_epoch_and_the_highest_counter():
    floor = raised(version(3, 8), version(5, 2))
    assert floor == version(5, 8)
    assert not is_above(version(5, 8), floor) and not is_above(version(3, 1), floor)
    assert is_above(version(3, 9), floor) and is_above(version(6, 1), floor)
    assert raised(floor, version(4, COUNTER_MAX + 7)) == floor, "no chain head assigned this version"


def test_exhausted_counter_continues_with_the_next_epoch():
    assert next_version(MemberChunkState(version(5, COUNTER_MAX)), 5) == version(6, 1)
    assert next_version(MemberChunkState(0, version(8, COUNTER_MAX)), 5) == version(9, 1)
    assert next_version(MemberChunkState(version(6, 1), version(5, COUNTER_MAX)), 5) == version(6, 2)


@pytest.mark.parametrize(
    "held",
    [
        MemberChunkState(version(12, 5)),
        MemberChunkState(version(12, 5), version(14, 120)),
        MemberChunkState(0, version(12, 9)),
        MemberChunkState(version(13, 2), version(14, 3)),
        MemberChunkState(0, of_old_floor(version(14, 3))),
    ],
)
@pytest.mark.parametrize("old_head", [False, True])
def test_refused_version_is_followed_by_an_accepted_one(held, old_head):
    place = place_in(Chain(12, (1, 2)), 2)
    above = tries = 0
    while True:
        offered = (
            next_of_old_build(version(12, 1), above, 12)
            if old_head
            else next_version(MemberChunkState(version(12, 1)), 12, above)
        )
        answer, its_version = judge(place, held, Offer(1, 12, offered, held.version, 0, REQUEST))
        if answer is Answer.TAKE:
            break
        assert answer is Answer.TOO_LOW
        above, tries = max(above, its_version, offered), tries + 1
        assert tries < 3
    assert version_parts(offered)[0] == max(12, version_parts(held.version)[0])


def test_floors_of_older_builds_are_accepted_on_the_wire():
    reply = data_pb2.VersionsReply(inodes=INODE_CUT.pack(7, 3, version(4, 2), 20))
    assert decode_versions(reply)[1] == [InodeCut(7, 3, of_old_floor(version(4, 2)), 20)]
    reply.split_floors = True
    assert decode_versions(reply)[1] == [InodeCut(7, 3, version(4, 2), 20)]
    copy = ChunkCopy(7, 0, version(3, 1), known=InodeCut(7, 3, version(4, 2), 20))
    sent = encode_copy(copy, False)
    assert decode_copy(sent, memoryview(b"")).known == copy.known
    sent.split_floor = False
    assert decode_copy(sent, memoryview(b"")).known.floor == of_old_floor(version(4, 2))
