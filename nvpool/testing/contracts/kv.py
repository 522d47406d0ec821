"""Contract of a Kv: for each `check` of CHECKS, run `await check(subject)` with a new `KvSubject`.

A subject makes the Kv under test and can simulate its crashes. Used by tests/contract/test_kv.py and by
authors of other engines. Checks raise AssertionError; they never wait for time to pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from nvpool.core.errors import Busy, Fenced, InvalidRequest, NvpoolError, TooBig
from nvpool.kv.api import KEY_BYTES_MAX, KEY_END, VALUE_BYTES_MAX, Kv
from nvpool.kv.id_allocator import NumberBounds


class KvSubject(Protocol):
    kv: Kv
    """An empty one at first."""

    async def restart(self) -> None:
        """Kill the process that owns `kv` (kill -9) and open the data again as `kv`."""

    async def fail_next_sync(self) -> None:
        """Let the next fdatasync of the journal fail."""


Check = Callable[[KvSubject], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def refused(error: type[NvpoolError], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


async def refused_later(error: type[NvpoolError], waiting: Awaitable[object]) -> None:
    try:
        await waiting
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def everything(kv: Kv) -> dict[bytes, bytes]:
    return dict(kv.scan(b"", KEY_END, 1_000_000))


@check
async def each_applied_change_reaches_on_apply_and_no_refused_one(subject: KvSubject) -> None:
    kv, applied = subject.kv, []
    kv.on_apply = applied.append
    kv.apply([(b"a", b"1"), (b"b", None)])
    refused(InvalidRequest, lambda: kv.apply([(b"", b"1")]))
    kv.on_apply = None
    kv.apply([(b"c", b"1")])
    assert applied == [{b"a": b"1", b"b": None}]


@check
async def a_new_one_is_empty(subject: KvSubject) -> None:
    kv = subject.kv
    assert kv.get(b"key") is None and kv.scan(b"", KEY_END, 10) == [] and kv.scan_back(b"", KEY_END, 10) == []
    assert kv.sequence == kv.synced_sequence == 0 and not kv.full
    await kv.sync()
    await kv.room()


@check
async def change_is_visible_immediately_with_next_number(subject: KvSubject) -> None:
    kv = subject.kv
    assert kv.apply([(b"a", b"1"), (b"b", b"")]) == 1
    assert kv.get(b"a") == b"1" and kv.get(b"b") == b"" and kv.get(b"c") is None
    assert kv.apply(iter([(b"a", None), (b"never", None), (b"c", b"3")])) == 2 == kv.sequence
    assert kv.get(b"a") is None and everything(kv) == {b"b": b"", b"c": b"3"}
    assert kv.apply([]) == 3


@check
async def scans_are_ordered_and_bounded_over_all_layers(subject: KvSubject) -> None:
    kv = subject.kv
    keys = [b"%03d" % number for number in range(300)]
    kv.apply([(key, b"old" + key) for key in keys])
    await kv.checkpoint()
    kv.apply([(key, None) for key in keys[::3]])
    kv.apply([(key, b"new" + key) for key in keys[1::3]])
    kv.apply([(key + b"x", b"added") for key in keys[::10]])
    expected = {key: b"old" + key for key in keys[2::3]} | {key: b"new" + key for key in keys[1::3]}
    expected |= {key + b"x": b"added" for key in keys[::10]}
    for _ in range(2):
        for first, end in (
            (b"", KEY_END),
            (b"", b"\xff" * 600),
            (b"100", b"200"),
            (b"100x", b"101"),
            (b"2", b"1"),
            (b"299" * 200, b"3"),
            (b"", b"0" * 600),
            (b"0005", b"0500"),
        ):
            pairs = sorted((key, value) for key, value in expected.items() if first <= key < end)
            for limit in (0, 1, 2, 7, 1000):
                assert kv.scan(first, end, limit) == pairs[:limit], (first, end, limit)
                assert kv.scan_back(first, end, limit) == pairs[::-1][:limit], (first, end, limit)
        for wanted in ([], keys, [*expected, b"no such key", b"100", b"100"]):
            assert kv.get_many(wanted) == [expected.get(key) for key in wanted]
        await kv.checkpoint()


@check
async def the_longest_keys_and_values_are_kept(subject: KvSubject) -> None:
    kv = subject.kv
    longest, last = b"k" * KEY_BYTES_MAX, KEY_END[:-1]
    big = bytes(range(256)) * (VALUE_BYTES_MAX // 256)
    kv.apply([(longest, big), (last, b"last"), (b"\0", b"first")])
    for _ in range(3):
        assert kv.get(longest) == big and kv.get(last) == b"last"
        assert [key for key, _ in kv.scan(b"", KEY_END, 9)] == [b"\0", longest, last]
        assert kv.scan(longest + b"\0", KEY_END, 9) == [(last, b"last")]
        assert [key for key, _ in kv.scan_back(b"", longest + b"\0", 9)] == [longest, b"\0"]
        await kv.checkpoint()
        await subject.restart()
        kv = subject.kv


@check
async def effects_that_make_no_sense_change_nothing(subject: KvSubject) -> None:
    kv = subject.kv
    kv.apply([(b"a", b"1")])
    for effects in (
        [(b"", b"x")],
        [(b"k" * (KEY_BYTES_MAX + 1), b"x")],
        [(KEY_END, b"x")],
        [("text", b"x")],
        [(b"b", "text")],
        [(b"b", b"1"), (b"b", b"2")],
        [(b"b", b"1"), (b"b", None)],
        [(b"b", bytearray(b"x"))],
    ):
        refused(InvalidRequest, lambda effects=effects: kv.apply(effects))
    refused(TooBig, lambda: kv.apply([(b"b", bytes(VALUE_BYTES_MAX + 1))]))
    assert kv.sequence == 1 and everything(kv) == {b"a": b"1"}
    await refused_later(InvalidRequest, kv.sync(2))


@check
async def an_acknowledged_change_survives_the_death_of_the_process(subject: KvSubject) -> None:
    expected = {}
    for round_ in range(4):
        for number in range(10):
            change = {b"%d" % number: b"%d" % round_, b"%d-%d" % (round_, number): b"x" * round_}
            subject.kv.apply(list(change.items()))
            expected |= change
        if round_ == 1:
            await subject.kv.sync()
        if round_ == 2:
            await subject.kv.checkpoint()
        await subject.restart()
        assert everything(subject.kv) == expected and subject.kv.sequence == 10 * (round_ + 1)


@check
async def a_sync_covers_what_was_applied_before_it(subject: KvSubject) -> None:
    kv = subject.kv
    sequences = [kv.apply([(b"%d" % number, b"v")]) for number in range(20)]
    await asyncio.gather(*(kv.sync(sequence) for sequence in sequences), kv.sync())
    assert kv.synced_sequence == kv.sequence == 20
    waiting = asyncio.gather(*(kv.sync(kv.apply([(b"more", b"%d" % number)])) for number in range(20)))
    await waiting
    assert kv.synced_sequence == 40
    kv.apply([(b"a", b"b")])
    await kv.checkpoint()
    assert kv.synced_sequence == 41


@check
async def a_failed_sync_fences_for_ever(subject: KvSubject) -> None:
    kv = subject.kv
    kv.apply([(b"before", b"1")])
    await kv.sync()
    kv.apply([(b"a", b"1")])
    await subject.fail_next_sync()
    await asyncio.gather(*(refused_later(Fenced, kv.sync()) for _ in range(3)))
    refused(Fenced, lambda: kv.apply([(b"b", b"2")]))
    refused(Fenced, lambda: kv.apply([(b"b", None)], reclaims=True))
    await refused_later(Fenced, kv.sync())
    await refused_later(Fenced, kv.room())
    assert kv.get(b"before") == b"1" and kv.sequence == 2 and kv.synced_sequence == 1
    await subject.restart()
    assert subject.kv.get(b"before") == b"1" and subject.kv.get(b"b") is None
    subject.kv.apply([(b"b", b"3")])
    await subject.kv.sync()


@check
async def a_snapshot_is_of_one_moment_while_changes_go_on(subject: KvSubject) -> None:
    kv = subject.kv
    for number in range(40):
        kv.apply([(b"%04d" % (number * 25 + at), b"%d" % number) for at in range(25)])
    await kv.checkpoint()
    expected = everything(kv)
    snapshot, part = kv.snapshot(), kv.snapshot(b"0100", b"0200")
    assert snapshot.sequence == kv.sequence
    seen: list[tuple[bytes, bytes]] = []
    step = 0
    while not snapshot.done:
        pairs = snapshot.step(10)
        assert len(pairs) <= 10
        seen += pairs
        kv.apply(
            [
                (b"%04d" % (999 - step), None),
                (b"%04dx" % (step * 7), b"new"),
                (b"%04d" % (step * 13 % 900), b"changed"),
            ]
        )
        if step % 20 == 0:
            await kv.checkpoint()
        step += 1
    assert step > 90 and seen == sorted(expected.items())
    in_part = [pair async for pairs in part for pair in pairs]
    assert in_part == [pair for pair in seen if b"0100" <= pair[0] < b"0200"]
    assert snapshot.step(10) == []
    assert kv.statistics().get("snapshots", 0) == 0


@check
async def snapshots_are_bounded_and_end_with_the_store(subject: KvSubject) -> None:
    kv = subject.kv
    kv.apply([(b"%d" % number, b"v") for number in range(10)])
    taken = []
    try:
        while len(taken) < 100:
            taken.append(kv.snapshot())
    except Busy:
        pass
    assert 1 <= len(taken) < 100
    taken.pop().close()
    again = kv.snapshot()
    await kv.close()
    refused(Busy, lambda: again.step(1))
    await kv.close()


@check
async def numbers_are_never_given_twice(subject: KvSubject) -> None:
    given: set[int] = set()
    for round_ in range(4):
        numbers = NumberBounds(subject.kv, b"bound", first=5, batch_size=10)
        await numbers.open()
        for _ in range(round_ * 9):
            try:
                number = numbers.take()
            except Busy:
                await numbers.more()
                number = numbers.take()
            assert number not in given and 5 <= number < numbers.bound
            given.add(number)
        assert int.from_bytes(subject.kv.get(b"bound"), "little") >= numbers.bound
        await numbers.close()
        await subject.restart()
    assert len(given) == 9 + 18 + 27
    subject.kv.apply([(b"bound", b"short")])
    await refused_later(NvpoolError, NumberBounds(subject.kv, b"bound").open())


@check
async def without_a_synced_bound_no_number_is_given(subject: KvSubject) -> None:
    numbers = NumberBounds(subject.kv, b"bound", batch_size=4)
    await numbers.open()
    await subject.fail_next_sync()
    given = 0
    try:
        while given < 100:
            numbers.take()
            given += 1
            await asyncio.sleep(0)
    except Busy:
        pass
    assert 0 < given <= 4
    await refused_later(Fenced, numbers.more())


@check
async def statistics_and_closing(subject: KvSubject) -> None:
    kv = subject.kv
    kv.apply([(b"a", b"1")])
    found = kv.statistics()
    for name in (
        "entries",
        "used_bytes",
        "map_bytes",
        "map_bytes_max",
        "journal_bytes",
        "layer_entries",
        "checkpoints",
        "syncs",
        "sequence",
        "synced_sequence",
    ):
        assert isinstance(found[name], int | float), name
    await kv.close()
    await kv.close()
    assert kv.synced_sequence == 1
    refused(Fenced, lambda: kv.apply([(b"b", b"1")]))
    await subject.restart()
    assert everything(subject.kv) == {b"a": b"1"}
