"""A primary and its standbys, real engines in one process: partitions, kills, promotions, snapshots and rejoins."""

import asyncio
import logging
import os
import random
from dataclasses import replace

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    Busy,
    CorruptRecord,
    DeadlineExceeded,
    InvalidRequest,
    NoSpace,
    NotLeader,
    StaleTerm,
    Unavailable,
    Unreachable,
)
from nvpool.kv.journal_record import adopt, decode, encode
from nvpool.kv.replication.member_engine import MemberKv, peek, records_of
from nvpool.kv.replication.primary import Shipping
from nvpool.kv.replication.standby import Group, StandbyKv
from nvpool.kv.replication_log import Position, ReplicationHistory, Tail, TermRun, runs_of
from nvpool.poolmap.shards import members as shard_members
from nvpool.testing.contracts.kv import everything
from nvpool.testing.fakes.shard_replication import OPTIONS, QUICK, Members

PATIENT = replace(QUICK, silent_s=30.0)
"""For tests that must not fail when a busy machine makes a standby silent for a moment."""


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


def history(base, *terms, retain_bytes=1 << 20):
    made = ReplicationHistory(Position(*base), retain_bytes)
    for sequence, term in enumerate(terms, base[0] + 1):
        made.note(sequence, term, b"x" * 10)
    return made


@pytest.mark.parametrize("iterations", range(1, 5))
@pytest.mark.parametrize("next_call", ["begin", "install", "promote"])
def test_standby_waits_for_a_close_that_was_cancelled(tmp_path, next_call, iterations):
    async def main():
        standby = StandbyKv(tmp_path / "kv", OPTIONS)
        await standby.install(1, Position(0, 0))
        await standby.installed(1)
        filling = asyncio.ensure_future(standby.install(2, Position(0, 0)))
        for _ in range(iterations):
            await asyncio.sleep(0)
        filling.cancel()
        await asyncio.wait([filling])
        if next_call == "begin":
            await standby.begin(3)
        elif next_call == "install":
            await standby.install(3, Position(0, 0))
        elif not standby.filling:
            await (await standby.promote(3)).close()
        await standby.close()

    run(main())


def test_member_without_records_is_not_promoted(tmp_path):
    async def main():
        path = tmp_path / "empty"
        path.mkdir()
        standby = StandbyKv(path, OPTIONS)
        assert standby.state() == ("empty", "")
        with pytest.raises(CorruptRecord, match="holds no whole records"):
            await standby.promote(2)
        assert os.listdir(path) == [], "no records are created instead"

    run(main())


def test_damaged_standby_is_filled_again(tmp_path):
    async def main():
        path = tmp_path / "damaged"
        kv = await MemberKv.open_member(path, OPTIONS)
        kv.apply([(b"a", b"1")])
        await kv.close()
        (path / "data.mdb").write_bytes(b"")
        standby = StandbyKv(path, OPTIONS)
        state, reason = standby.state()
        assert state == "lost" and "damaged" in reason
        assert (await standby.begin(3)).last == Position(0, 0)
        await standby.install(3, Position(7, 3))
        assert standby.state() == ("filling", "")
        await standby.installed(3)
        assert standby.state() == ("standby", "") and standby.last.sequence == 7
        await standby.close()

    run(main())


# -- history ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail, common",
    [
        (Tail(Position(0, 0)), 0),
        (Tail(Position(3, 1)), 3),
        (Tail(Position(1, 1), (TermRun(1, 2, 3), TermRun(2, 4, 4))), 4),
        (Tail(Position(1, 1), (TermRun(1, 2, 9),)), 3),  # a former primary with changes of its own
        (Tail(Position(4, 1), (TermRun(1, 5, 9),)), None),  # … of which LMDB has some
        (Tail(Position(2, 1), (TermRun(1, 3, 3), TermRun(2, 4, 4), TermRun(3, 5, 7))), 4),
        (Tail(Position(6, 4)), 6),
        (Tail(Position(6, 5)), None),
        (Tail(Position(2, 1), (TermRun(1, 3, 3), TermRun(2, 4, 5), TermRun(4, 6, 8))), 6),
    ],
)
def test_last_common_position_of_two_histories(tail, common):
    assert history((0, 0), 1, 1, 1, 2, 2, 4).common(tail) == common


def test_common_position_is_unknown_below_what_is_kept():
    kept = history((4, 2), 2, 4)
    assert kept.common(Tail(Position(4, 2))) == 4
    assert kept.common(Tail(Position(2, 1), (TermRun(1, 3, 3), TermRun(2, 4, 4)))) == 4
    for tail in (Tail(Position(3, 1)), Tail(Position(0, 0)), Tail(Position(2, 1), (TermRun(1, 3, 9),))):
        assert kept.common(tail) is None


def test_history_keeps_uncommitted_and_some_committed_changes():
    kept = history((0, 0), *[1] * 100, retain_bytes=200)
    assert (
        kept.base == Position(80, 1) and len(kept.records(80, 1 << 20)) == 20 and kept.records(79, 100) == []
    )
    assert kept.records(80, 25) == [b"x" * 10] * 2 and kept.records(80, 1) == [b"x" * 10]
    kept.alone = False
    for sequence in range(101, 201):
        kept.note(sequence, 2, b"y" * 10)
    assert kept.base == Position(100, 1) and kept.committed == 100
    results = []
    kept.when(150, lambda known: results.append((150, known)))
    kept.when(200, lambda known: results.append((200, known)))
    kept.advance(180)
    kept.advance(10)
    assert results == [(150, True)] and kept.committed == 180
    kept.end()
    kept.when(200, lambda known: results.append((0, known)))
    assert results == [(150, True), (200, False), (0, False)]


def test_positions_are_grouped_into_runs():
    assert runs_of([]) == ()
    assert runs_of([Position(3, 1), Position(4, 1), Position(5, 7)]) == (TermRun(1, 3, 4), TermRun(7, 5, 5))


# -- one standby ------------------------------------------------------------------------------------------------------


def group(term, first, count, committed=0, generation=1):
    return Group(
        term,
        b"".join(
            encode(term, generation, sequence, {b"%d" % sequence: b"%d of %d" % (sequence, term)})
            for sequence in range(first, first + count)
        ),
        committed,
    )


def test_standby_accepts_only_consecutive_valid_groups(tmp_path):
    async def check():
        standby = StandbyKv(tmp_path / "kv", OPTIONS)
        results = []

        def done(sequence, error):
            results.append(sequence if error is None else type(error))

        standby.ship(group(1, 1, 2), done)  # refused: no start position was agreed
        assert await standby.begin(1) == Tail(Position(0, 0))
        standby.ship(group(1, 1, 2), done)
        await standby.keep(1, 0)
        standby.ship(group(1, 1, 2), done)
        standby.ship(group(1, 1, 4), done)  # two of the records are repeated
        assert results == [Unavailable, Unavailable, 2, 4]
        standby.ship(group(1, 6, 1), done)  # one record is missing: a new start position is needed
        standby.ship(group(1, 5, 1), done)
        assert results[4:] == [InvalidRequest, Unavailable]
        assert (await standby.begin(1)).last == Position(4, 1)
        await standby.keep(1, 4)
        damaged = bytearray(group(1, 5, 3).records)
        damaged[-1] ^= 1
        standby.ship(Group(1, bytes(damaged), 0), done)
        assert results[6:] == [CorruptRecord] and standby.last == Position(4, 1)
        assert await standby.begin(3) == Tail(Position(0, 0), (TermRun(1, 1, 4),))
        for call in (
            standby.begin(2),
            standby.keep(2, 4),
            standby.install(2, Position(0, 0)),
            standby.sync(2),
            standby.promote(2),
        ):
            with pytest.raises(StaleTerm):
                await call
        await standby.keep(3, 3)
        standby.ship(group(3, 4, 1), done)
        assert results[7:] == [4] and everything(standby.kv)[b"4"] == b"4 of 3"
        assert await standby.sync(3) == 4 and standby.kv.synced_sequence == 4
        await standby.close()
        assert peek(tmp_path / "kv").last == Position(4, 3)
        again = StandbyKv(tmp_path / "kv", OPTIONS)  # a restart forgets messages, but not records
        with pytest.raises(StaleTerm):
            await again.begin(2)
        with pytest.raises(InvalidRequest):
            await again.keep(3, 9)
        kv = await again.promote(4)
        assert everything(kv) == {b"1": b"1 of 1", b"2": b"2 of 1", b"3": b"3 of 1", b"4": b"4 of 3"}
        kv.apply([(b"5", b"mine")])
        assert kv.last == Position(5, 4)
        await kv.close()

    run(check())


def test_empty_standby_accepts_changes_of_earlier_terms(tmp_path):
    async def check():
        standby = StandbyKv(tmp_path / "kv", OPTIONS)
        await standby.begin(4)
        await standby.keep(4, 0)
        results = []
        records = encode(2, 1, 1, {b"a": b"1"}) + encode(3, 1, 2, {b"b": b"2"})
        standby.ship(Group(4, records, 0), lambda *answer: results.append(answer))
        assert results == [(2, None)] and standby.last == Position(2, 3)
        await standby.close()

    run(check())


def test_standby_stores_only_committed_changes_in_lmdb(tmp_path):
    async def check():
        standby = StandbyKv(tmp_path / "kv", OPTIONS)
        await standby.begin(1)
        await standby.keep(1, 0)
        results = []
        standby.ship(group(1, 1, 100), lambda *answer: results.append(answer))
        assert results == [(100, None)]
        checkpoint = asyncio.ensure_future(standby.kv.checkpoint())
        await asyncio.wait([checkpoint], timeout=0.2)
        assert not checkpoint.done()
        standby.ship(Group(1, b"", 100), lambda *answer: results.append(answer))
        await checkpoint
        standby.ship(group(1, 101, 5, committed=100), lambda *answer: results.append(answer))
        await standby.close()
        assert peek(tmp_path / "kv") == Tail(Position(100, 1), (TermRun(1, 101, 105),))

    run(check())


def test_groups_wait_for_space_in_order_up_to_a_bound(tmp_path):
    async def check():
        standby = StandbyKv(tmp_path / "kv", OPTIONS)
        await standby.begin(1)
        await standby.keep(1, 0)
        results = []
        big = b"v" * 50_000
        for sequence in range(1, 110):  # more than the journal of 1 MiB
            standby.ship(
                Group(1, encode(1, 1, sequence, {b"k%d" % sequence: big}), sequence - 1),
                lambda *answer: results.append(answer),
            )
        refused = [error for _, error in results if error is not None]
        assert refused and isinstance(refused[0], Busy), results
        await until(lambda: len(results) == 109)
        taken = [sequence for sequence, error in results if error is None]
        assert taken == sorted(taken) and standby.last.sequence == (taken[-1] if taken else 0)
        await standby.close()

    run(check())


async def until(true):
    while not true():  # noqa: ASYNC110  (real engines and links have no event for everything; run() bounds it)
        await asyncio.sleep(0.002)


# -- several members --------------------------------------------------------------------------------------------------


def of(number):
    return [(b"key %d" % (number % 300), b"value %d" % number), (b"last", b"%d" % number)]


async def load(members, changes):
    for effects in changes:
        while members.primary.kv.full:
            await members.primary.kv.room()
        members.apply(effects)


def with_members(tmp_path, check, count=2, **kwargs):
    async def bounded():
        members = Members(tmp_path, count, random=random.Random(1), **kwargs)
        try:
            await members.start_all()
            await check(members)
        finally:
            await members.close()

    run(bounded())


@pytest.mark.parametrize("count", [2, 3])
def test_acknowledged_change_survives_a_failover(tmp_path, count):
    async def check(members):
        await members.quiet()
        assert members.up == set(range(1, count))
        await asyncio.gather(*(members.acknowledged(of(number)) for number in range(1000)))
        expected = everything(members.primary.kv)
        for member in members.members[1:]:
            assert everything(member.standby.kv) == expected
        await members.kill(0)
        assert await members.fail_over()
        assert members.primary.number == 1 and members.shard.term == 3
        assert everything(members.primary.kv) == expected
        await members.acknowledged(of(1000))
        await members.start(0)
        await members.quiet()
        assert everything(members.members[0].standby.kv) == everything(members.primary.kv)

    with_members(tmp_path, check, count, shipping=PATIENT)


def test_restarted_primary_continues_without_its_standby(tmp_path):
    async def check(members):
        await members.quiet()
        members.manager_away = True
        await members.acknowledged(of(1))
        members.cuts.add((0, 1))
        results = []
        members.apply(of(2), results.append)
        await members.kill(0)
        assert results == [False] and members.up == {1}
        members.manager_away = False
        await members.start(0, alone=True)
        assert members.primary.number == 0 and members.up == set() and members.primary.kv.get(b"last") == b"2"
        await members.acknowledged(of(3))
        members.cuts.clear()
        await members.quiet(up={1})
        assert members.members[1].standby.kv.get(b"last") == b"3"

    with_members(tmp_path, check, shipping=PATIENT)


@pytest.mark.parametrize("lost", ["changes", "mark"])
def test_primary_without_proof_waits_for_its_standby(tmp_path, lost):
    """The primary's machine lost power, or its drive was replaced by an older state."""

    async def check(members):
        await members.quiet()
        primary = members.members[0]
        older = [(path, path.read_bytes()) for path in members.path(primary).iterdir()]
        await members.acknowledged(of(1))
        await members.kill(0)
        if lost == "mark":
            members.mark(primary).unlink()
        else:
            for path, content in older:
                path.write_bytes(content)
        with pytest.raises(Unavailable, match="may have changes"):
            await members.start(0, alone=True)
        assert members.up == {1}

    with_members(tmp_path, check, shipping=PATIENT)


def test_change_waits_for_a_standby_unless_the_map_drops_it(tmp_path):
    async def check(members):
        await members.quiet()
        members.manager_away = True
        members.cuts.add((0, 1))
        results = []
        for number in range(50):
            members.apply(of(number), results.append)
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert (
            members.primary.kv.sequence == 50 and results == []
        )  # the standby is up in the map: no change may be acknowledged
        assert members.primary.kv.get(b"last") == b"49"
        members.manager_away = False
        await until(lambda: len(results) == 50)
        assert results == [True] * 50 and members.up == set()
        members.cuts.clear()
        await members.quiet()
        assert members.members[1].standby.kv.get(b"last") == b"49"

    with_members(tmp_path, check)


def test_former_primary_drops_unreplicated_changes(tmp_path):
    async def check(members):
        await members.quiet()
        await members.acknowledged(of(1))
        members.cuts.add((0, 1))
        results = []
        for number in range(2, 30):
            members.apply([(b"lost %d" % number, b"x")], results.append)
        await members.kill(0)
        members.cuts.clear()
        assert await members.fail_over() and results == [False] * 28
        for number in range(30, 60):
            await members.acknowledged(of(number))
        await members.start(0)
        await members.quiet()
        assert members.primary.shipping.filled == 0
        former = everything(members.members[0].standby.kv)
        assert former == everything(members.primary.kv) and not any(key.startswith(b"lost") for key in former)

    with_members(tmp_path, check)


def test_deposed_primary_acknowledges_nothing(tmp_path):
    async def check(members):
        await members.quiet()
        old = members.members[0]
        deposed = []
        old.shipping.on_deposed = lambda: deposed.append(True)
        await members.fail_over()
        assert members.primary.number == 1
        results = []
        old.kv.apply([(b"mine", b"1")])
        old.kv.history.when(old.kv.sequence, results.append)
        syncing = asyncio.ensure_future(old.kv.sync())
        await members.acknowledged(of(1))
        await until(lambda: deposed)
        assert not results and not syncing.done()
        await members.kill(0)
        assert results == [False]
        with pytest.raises(Unavailable):
            await syncing
        await members.start(0)
        await members.quiet()
        assert members.members[0].standby.kv.get(b"mine") is None

    with_members(tmp_path, check, 2)


def test_long_absent_standby_is_filled_during_changes(tmp_path):
    async def check(members):
        await members.quiet()
        await members.kill(1)
        await load(members, ([(b"%05d" % number, b"x" * 20)] for number in range(2000)))
        await load(members, ([(b"%05d" % number, None)] for number in range(0, 2000, 3)))
        await until(lambda: not members.up)
        await members.start(1)
        number = 0
        while not members.up:
            members.apply([(b"%05d" % (number * 7919 % 2500), b"new %d" % number if number % 3 else None)])
            number += 1
            await asyncio.sleep(0.0005)
        assert members.primary.shipping.filled and number > 20
        await members.quiet()
        expected = everything(members.primary.kv)
        assert everything(members.members[1].standby.kv) == expected
        await members.kill(0)
        await members.kill(1)  # what it received is on its drive
        members.pool_map = shard_members.primary_lost(members.pool_map, 1)
        await members.start(1)
        assert members.primary.number == 1 and everything(members.primary.kv) == expected

    with_members(tmp_path, check, retain_bytes=5000)


def test_partly_filled_member_is_never_promoted(tmp_path):
    async def check(members):
        await members.quiet()
        await members.kill(1)
        await load(members, ([(b"%05d" % number, b"x" * 20)] for number in range(1000)))
        await until(lambda: not members.up)
        for _ in range(3):
            await members.start(1)
            standby = members.members[1].standby
            await until(
                lambda standby=standby: (
                    standby.filling and standby.kv and standby.kv.statistics()["layer_entries"]
                )
            )
            with pytest.raises(Unavailable):
                await members.members[1].standby.promote(2)
            await members.kill(1)
            assert (
                peek(members.path(members.members[1])) == Tail(Position(0, 0))
                and not await members.fail_over()
            )
        await members.start(1)
        await members.quiet()
        assert everything(members.members[1].standby.kv) == everything(members.primary.kv)

    with_members(tmp_path, check, retain_bytes=2000)


def test_standby_without_space_is_taken_out(tmp_path):
    async def check(members):
        await members.quiet()
        standby = members.members[1].standby

        def full(record):
            raise NoSpace("asked for by the test")

        standby.kv.journal.append = full
        await members.acknowledged(of(1))
        assert (
            members.up == set() and members.primary.shipping.states()[1]["reason"] == "asked for by the test"
        )
        del standby.kv.journal.append
        await members.quiet()
        assert everything(standby.kv) == everything(members.primary.kv)

    with_members(tmp_path, check)


@pytest.mark.parametrize(
    "error, is_certain",
    [
        (NotLeader(), True),
        (Unreachable(), False),
        (NotLeader(may_be_applied=True), False),
        (DeadlineExceeded(), False),
    ],
)
def test_standby_that_could_not_be_reinstated_is_taken_out(tmp_path, error, is_certain):
    """If the request certainly did not change the map, no request is needed to undo it."""

    async def check(members):
        await members.quiet()
        members.cuts = {(0, 1)}
        await members.acknowledged(of(1))
        assert members.up == set()
        shipping = members.primary.shipping
        members.manager_away, members.cuts = error, set()
        async with asyncio.timeout(20):
            while not any("not called up" in line for line in logged):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.002)
        assert shipping.may_be_replaced != is_certain
        members.cuts = {(0, 1)}  # the standby is lost before it could be reinstated
        change = asyncio.ensure_future(members.acknowledged(of(2)))
        await asyncio.wait([change], timeout=0.5)
        assert (
            change.done() or not is_certain
        )  # otherwise the reply may be lost, and the map may reinstate the standby
        members.manager_away = False
        await change
        members.cuts = set()
        await members.quiet()
        assert everything(members.members[1].standby.kv) == everything(members.primary.kv)

    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    log = logging.getLogger("nvpool.kv.replication.primary")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        with_members(tmp_path, check, shipping=replace(QUICK, call_up_s=0.05))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_demoted_standby_is_reinstated(tmp_path):
    """The leading supervisor demotes a standby that has lost its records."""

    async def check(members):
        await members.quiet()
        assert members.up == {1}
        shipping = members.primary.shipping
        members.pool_map = shard_members.records_lost(members.pool_map, 1, {1})
        assert members.up == set()
        shipping.use({1: (lambda: None, False)})
        async with asyncio.timeout(20):
            while members.up != {1}:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.002)
        assert shipping.taken_out == 1
        await members.acknowledged(of(1))

    with_members(tmp_path, check)


def test_sync_covers_the_standbys(tmp_path):
    async def check(members):
        await members.quiet()
        kv = members.primary.kv
        for round_ in range(5):
            for number in range(20):
                members.apply(of(number + round_))
            sequence = kv.sequence
            await asyncio.gather(*(kv.sync() for _ in range(5)), kv.sync(sequence - 3))
            for member in members.members[1:]:
                assert member.standby.kv.synced_sequence >= sequence

    with_members(tmp_path, check, 3, shipping=PATIENT)


def test_primary_stores_only_replicated_changes_in_lmdb(tmp_path):
    async def check(members):
        await members.quiet()
        members.manager_away = True
        members.cuts.add((0, 1))
        before = members.primary.kv.stored.sequence
        for number in range(500):
            try:
                members.apply(of(number))
            except Busy:
                break
        await asyncio.sleep(0.3)
        kv = members.primary.kv
        committed = kv.history.committed
        assert kv.statistics()["stored_sequence"] <= committed < kv.sequence and before <= committed
        await members.kill(0)
        members.cuts.clear()
        members.manager_away = False
        assert peek(members.path(members.members[0])).stored.sequence <= committed
        assert await members.fail_over()
        await members.start(0)
        await members.quiet()
        assert members.primary.shipping.filled == 0

    with_members(tmp_path, check)


def test_dropped_end_of_a_journal_stays_dropped(tmp_path):
    async def check():
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS)
        for number in range(1, 11):
            kv.apply([(b"%d" % number, b"x")])
        await kv.abandon()
        for wrong in (11, -1):
            with pytest.raises(InvalidRequest):
                await MemberKv.open_member(tmp_path / "kv", OPTIONS, keep=wrong)
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS, keep=6)
        assert kv.sequence == 6 and len(everything(kv)) == 6
        await kv.abandon()
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS)
        assert kv.sequence == 6 and len(everything(kv)) == 6 and kv.history.base == Position(6, 1)
        await kv.close()

    run(check())


def test_shipped_records_equal_the_journals():
    records = [encode(7, 3, sequence, {b"a": b"1", b"b": None}) for sequence in (5, 6)]
    found = records_of(memoryview(b"".join(records)))
    assert [(record.term, record.sequence, record.effects) for record in found] == [
        (7, 5, [(b"a", b"1"), (b"b", None)]),
        (7, 6, [(b"a", b"1"), (b"b", None)]),
    ]
    with pytest.raises(CorruptRecord):
        records_of(b"".join(records)[:-1])


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_adopted_records_equal_decoded_and_encoded_ones(seed):
    draw = random.Random(seed)
    changes = [
        {
            draw.randbytes(draw.randrange(1, 40)): None
            if not draw.randrange(4)
            else draw.randbytes(draw.randrange(300))
            for _ in range(draw.randrange(6))
        }
        for _ in range(8)
    ]
    payload = b"".join(
        encode(5, draw.randrange(99), number, changed) for number, changed in enumerate(changes, 3)
    )
    first = draw.randrange(2, 11)
    records, effects, count = adopt(payload, 5, 77, first)
    later = changes[first - 2 :]
    assert effects == later and count == sum(map(len, later))
    assert records == [encode(5, 77, number, changed) for number, changed in enumerate(later, first + 1)]
    assert adopt(payload, 4, 77, first) is None, "of another term"
    assert adopt(payload, 5, 77, 1) is None, "change 2 is missing"
    for _ in range(200):
        damaged = bytearray(payload)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        assert adopt(bytes(damaged), 5, 77, 2) is None
    for end in range(1, len(payload), 7):
        found = adopt(payload[:end], 5, 77, 2)
        offset, view = 0, memoryview(payload[:end])
        while (record := decode(view, offset)) is not None:
            offset += record.length
        assert (found is not None) == (offset == end)


def test_group_is_appended_to_the_journal_by_one_write(tmp_path):
    async def check():
        standby, writes = StandbyKv(tmp_path / "kv", OPTIONS), []
        await standby.begin(1)
        await standby.keep(1, 0)
        append = standby.kv.journal.append
        standby.kv.journal.append = lambda record: (writes.append(record), append(record))
        results = []
        standby.ship(group(1, 1, 20), lambda *result: results.append(result))
        assert results == [(20, None)] and len(writes) == 1
        standby.ship(group(1, 15, 10), lambda *result: results.append(result))
        assert results[1:] == [(24, None)] and len(writes) == 2
        standby.ship(
            group(1, 25, 400), lambda *result: results.append(result)
        )  # more than fits into the layer
        async with asyncio.timeout(20):
            while len(results) < 3:
                standby.kv.history.advance(standby.kv.sequence)
                await asyncio.sleep(0.01)
        assert results[2:] == [(424, None)] and len(writes) > 100
        assert everything(standby.kv) == {b"%d" % n: b"%d of 1" % n for n in range(1, 425)}
        await standby.abandon()
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS)
        assert kv.sequence == 424 and len(everything(kv)) == 424
        await kv.close()

    run(check())


class SilentStandby:
    """A standby that answers groups when the test says so."""

    def __init__(self):
        self.groups = []

    async def begin(self, term):
        return Tail(Position(0, 0))

    async def keep(self, term, sequence):
        pass

    def ship(self, sent, done):
        if sent.records:
            self.groups.append((records_of(sent.records), done))
        else:
            done(None, None)

    async def sync(self, term):
        return self.groups[-1][0][-1].sequence if self.groups else 0


def test_changes_gather_while_groups_are_in_flight(tmp_path):
    async def check():
        kv = await MemberKv.open_member(tmp_path / "kv", OPTIONS)
        kv.remember(True)
        link = SilentStandby()

        async def ask(number, up):
            pass

        options = replace(PATIENT, gather_changes=100, group_bytes=1 << 20)
        shipping = Shipping(kv, clock=SYSTEM_CLOCK, ask=ask, on_deposed=lambda: None, options=options)
        shipping.use({1: (lambda: link, True)})

        async def change(*counts):
            for count in counts:
                for _ in range(count):
                    kv.apply([(b"%d" % kv.sequence, b"x")])
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        def sizes():
            return [len(records) for records, _ in link.groups]

        while not shipping.states()[1]["counts"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await change(1, 2, 3, 4, 5)
        assert sizes() == [1, 2], "each loop iteration's changes, up to two groups"
        link.groups[0][1](1, None)
        assert sizes() == [1, 2, 12], "the answer to a group sends what has gathered"
        await change(1)
        syncing = asyncio.ensure_future(kv.sync())
        await asyncio.sleep(0.05)
        assert sizes() == [1, 2, 12, 1], "a sync waits for no answer"
        await syncing
        await change(99)
        assert len(link.groups) == 4
        await change(1)
        assert sizes()[4:] == [100], "many changes are sent together"
        for records, done in link.groups[1:]:
            done(records[-1].sequence, None)
        assert kv.history.committed == kv.sequence == 116
        await shipping.close()
        await kv.abandon()

    run(check())
