"""Lock ranges of one owner, compared with an array of bytes."""

from hypothesis import given
from hypothesis import strategies as st

from nvpool.core.posix.byte_range_locks import (
    EXCLUSIVE,
    LAST_BYTE,
    SHARED,
    UNLOCKED,
    LockRange,
    laid,
    overlapping,
    pieces,
    weaker,
)

BYTES = 24
RANGES = st.tuples(st.integers(0, BYTES - 1), st.integers(0, BYTES - 1)).map(sorted)
LOCKS = st.lists(st.tuples(RANGES, st.sampled_from([UNLOCKED, SHARED, EXCLUSIVE])), max_size=30)


def made(locks):
    """The ranges, and the mode of each byte."""
    spans, model = [], [UNLOCKED] * BYTES
    for (start, end), mode in locks:
        laid(spans, start, end, mode).apply(spans)
        model[start : end + 1] = [mode] * (end + 1 - start)
    return spans, model


def bytes_of(spans):
    model = [UNLOCKED] * BYTES
    for span in spans:
        assert span.mode and all(not mode for mode in model[span.start : span.end + 1])
        model[span.start : span.end + 1] = [span.mode] * (span.end + 1 - span.start)
    return model


@given(LOCKS)
def test_each_byte_has_its_last_mode_in_the_fewest_ranges(locks):
    spans, model = made(locks)
    assert bytes_of(spans) == model
    assert spans == sorted(spans)
    borders = sum(
        1 for mode, before in zip(model, [UNLOCKED, *model], strict=False) if mode and mode != before
    )
    assert len(spans) == borders


@given(LOCKS, RANGES)
def test_overlapping_ranges_are_found(locks, where):
    spans, model = made(locks)
    found = overlapping(spans, *where)
    assert found == [span for span in spans if span.end >= where[0] and span.start <= where[1]]
    assert [mode for start, end, mode in pieces(spans, *where) for _ in range(start, end + 1)] == model[
        where[0] : where[1] + 1
    ]


@given(LOCKS, LOCKS, RANGES)
def test_weaker_of_two_is_computed_for_each_byte(one, other, where):
    (spans, model), (its, others) = made(one), made(other)
    found = [mode for start, end, mode in weaker(spans, its, *where) for _ in range(start, end + 1)]
    assert found == [min(pair) for pair in zip(model, others, strict=True)][where[0] : where[1] + 1]


def test_lock_to_the_last_byte_is_split_and_merged():
    spans = []
    laid(spans, 0, LAST_BYTE, EXCLUSIVE, 7).apply(spans)
    laid(spans, 100, 199, UNLOCKED).apply(spans)
    assert spans == [LockRange(0, 99, EXCLUSIVE, 7), LockRange(200, LAST_BYTE, EXCLUSIVE, 7)]
    laid(spans, 150, LAST_BYTE, SHARED, 8).apply(spans)
    assert spans == [LockRange(0, 99, EXCLUSIVE, 7), LockRange(150, LAST_BYTE, SHARED, 8)]
    laid(spans, 100, LAST_BYTE, EXCLUSIVE, 9).apply(spans)
    assert spans == [LockRange(0, LAST_BYTE, EXCLUSIVE, 9)]
