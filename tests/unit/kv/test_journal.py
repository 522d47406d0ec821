"""The journal's records: they are read back as written, and nothing else is ever read."""

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core.checksum import crc32c
from nvpool.core.errors import DriveFailed, Fenced, InvalidRequest, NoSpace, TooBig
from nvpool.kv.api import KEY_END, VALUE_BYTES_MAX
from nvpool.kv.journal import Journal
from nvpool.kv.journal_record import JournalRecord, adopt, checked_effects, decode, encode

GOLDEN = Path(__file__).parents[2] / "golden" / "kv-journal-record.hex"
GOLDEN_RECORD = (7, 3, 42, {b"inode": b"\x01\x02\x03", b"\xff" * 3: None, b"empty": b""})

EFFECTS = st.dictionaries(st.binary(min_size=1, max_size=20), st.none() | st.binary(max_size=40), max_size=5)


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path, 1 << 16)
    made.begin(1)
    yield made
    made.close()


def replayed(journal, generation=1, sequence=0):
    return [(record.sequence, dict(record.effects)) for record in journal.replay(generation, sequence)]


def golden_bytes():
    lines = (line.split("#")[0] for line in GOLDEN.read_text().splitlines())
    return bytes.fromhex("".join(lines))


def packed(term, generation, sequence, effects):
    """A record by the table of its format, with these pairs."""
    body = b"".join(
        struct.pack("<HI", len(key), 0xFFFFFFFF if value is None else len(value)) + key + (value or b"")
        for key, value in effects
    )
    head = struct.pack("<IQQQII", 40 + len(body), term, generation, sequence, len(effects), 0)
    return struct.pack("<I", crc32c(head + body)) + head + body


def test_record_matches_the_golden_file():
    assert encode(*GOLDEN_RECORD) == golden_bytes()
    term, generation, sequence, effects = GOLDEN_RECORD
    raw = golden_bytes()
    assert decode(memoryview(raw), 0) == JournalRecord(
        term, generation, sequence, list(effects.items()), len(raw)
    )


@given(
    EFFECTS,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=50),
)
def test_record_is_decoded_with_any_bytes_around_it(effects, term, generation, sequence, around):
    raw = encode(term, generation, sequence, effects)
    record = decode(memoryview(around + raw + around), len(around))
    assert record == JournalRecord(term, generation, sequence, list(effects.items()), len(raw))


@given(EFFECTS, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_record_has_its_documented_layout(effects, term, generation, sequence):
    pairs = list(effects.items())
    assert encode(term, generation, sequence, effects) == packed(term, generation, sequence, pairs)


@given(EFFECTS)
def test_accepted_effects_keep_their_order(effects):
    pairs = list(effects.items())
    assert list(checked_effects(pairs).items()) == pairs == list(checked_effects(iter(pairs)).items())
    assert checked_effects(effects) is effects and list(effects.items()) == pairs


@given(st.lists(EFFECTS, max_size=4), st.integers(0, 5), st.integers(0, 2**64 - 1))
def test_adopted_group_has_the_new_generation(changes, sequence, generation):
    group = b"".join(encode(7, 3, number, effects) for number, effects in enumerate(changes, 1))
    wanted = list(enumerate(changes, 1))[sequence:]
    assert adopt(group, 7, generation, sequence) == (
        [encode(7, generation, number, effects) for number, effects in wanted],
        [effects for _, effects in wanted],
        sum(len(effects) for _, effects in wanted),
    )
    if changes:
        assert adopt(group, 6, generation, sequence) is None  # of another term
    assert adopt(encode(7, 3, 2, {}), 7, generation, 0) is None  # not the next one


@given(EFFECTS, st.data())
def test_group_with_a_flipped_bit_or_truncated_is_not_adopted(effects, data):
    raw = bytearray(encode(1, 1, 2, effects))
    before, cut = encode(1, 1, 1, {b"a": b"1"}), data.draw(st.integers(1, len(raw) - 1))
    assert adopt(before + raw[:cut], 1, 1, 0) is None
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert adopt(before + raw, 1, 1, 0) is None


@pytest.mark.parametrize(
    "raw",
    [
        packed(1, 1, 1, [(b"a", b"1"), (b"b", None), (b"a", b"1")]),
        packed(1, 1, 1, [(b"a", b"1"), (b"a", None)]),
    ],
)
def test_record_with_a_key_twice_is_invalid(raw):
    assert decode(memoryview(raw), 0) is None
    assert adopt(raw, 1, 1, 0) is None


def test_record_whose_effects_do_not_fill_it_is_invalid():
    whole = packed(1, 1, 1, [(b"a", b"1"), (b"b", b"2")])
    for count in (0, 1, 3, 2**32 - 1):
        body = whole[4:32] + count.to_bytes(4, "little") + whole[36:]
        raw = crc32c(body).to_bytes(4, "little") + body
        assert decode(memoryview(raw), 0) is None
        assert adopt(raw + packed(1, 1, 2, [(b"c", b"3")]), 1, 1, 0) is None


@pytest.mark.parametrize(
    ("effects", "error"),
    [
        ([(b"a", b"1"), (b"b", None), (b"a", None)], InvalidRequest),
        ([(b"", b"1")], InvalidRequest),
        ([(KEY_END, b"1")], InvalidRequest),
        ([(bytes(512), b"1")], InvalidRequest),
        ([("a", b"1")], InvalidRequest),
        ([(bytearray(b"a"), b"1")], InvalidRequest),
        ([(b"a", "1")], InvalidRequest),
        ([(b"a", bytearray(b"1"))], InvalidRequest),
        ([(b"a", bytes(VALUE_BYTES_MAX + 1))], TooBig),
        ([(b"a",)], ValueError),
        ([b"ab"], InvalidRequest),
    ],
)
def test_invalid_effects_are_refused(effects, error):
    with pytest.raises(error):
        checked_effects(effects)


@pytest.mark.parametrize(
    ("effects", "error"),
    [
        ({b"a": b"1", b"": b"1"}, InvalidRequest),
        ({KEY_END: None}, InvalidRequest),
        ({"a": b"1"}, InvalidRequest),
        ({b"a": "1"}, InvalidRequest),
        ({b"a": bytes(VALUE_BYTES_MAX + 1)}, TooBig),
    ],
)
def test_invalid_effects_of_a_dict_are_refused(effects, error):
    with pytest.raises(error):
        checked_effects(effects)


def test_effects_at_their_limits_are_accepted():
    effects = [(KEY_END[:-1], bytes(VALUE_BYTES_MAX)), (b"\0", b""), (KEY_END[:-1] + b"\xfe", None)]
    assert checked_effects(effects) == checked_effects(dict(effects)) == dict(effects)


def test_first_write_to_a_page_covers_it_completely(tmp_path, monkeypatch):
    capacity = 3 * 4096 + 2000
    journal, writes = Journal(tmp_path, capacity), []
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, some, at: writes.append((at, at + len(some))) or write(file, some, at)
    )
    for generation in (2, 4):  # the second one over records of the first
        journal.begin(generation)
        sequence, begun = 0, set()
        while journal.offset < capacity - 700:
            sequence += 1
            journal.append(encode(1, generation, sequence, {b"k%d" % sequence: bytes(97 * sequence % 600)}))
            ((first, end),) = writes
            writes.clear()
            for page in range(first // 4096, (end - 1) // 4096 + 1):
                if page not in begun and page < 3:
                    assert end >= 4096 * (page + 1), "the first write to a page is partial"
                begun.add(page)
            assert end <= max(capacity, journal.offset)
        assert begun == {0, 1, 2, 3}
        assert [number for number, _ in replayed(journal, generation)] == [*range(1, sequence + 1)]
    assert os.stat(tmp_path / "journal-0").st_size == capacity
    journal.close()


@given(st.binary(max_size=200), st.integers(0, 10))
def test_other_bytes_are_not_a_record(raw, offset):
    assert decode(memoryview(raw), offset) is None


@given(EFFECTS, st.data())
@settings(max_examples=200)
def test_record_with_a_flipped_bit_or_truncated_is_invalid(effects, data):
    raw = bytearray(encode(1, 1, 1, effects))
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert decode(memoryview(raw)[:cut], 0) is None
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode(memoryview(raw), 0) is None


def fill(journal, count, first=1, generation=1):
    ends = []
    for sequence in range(first, first + count):
        journal.append(encode(1, generation, sequence, {b"k%d" % sequence: b"v" * sequence}))
        ends.append(journal.offset)
    return ends


def test_only_the_torn_last_record_is_dropped(journal, tmp_path):
    *_, start, end = fill(journal, 5)
    path = tmp_path / "journal-1"
    whole = path.read_bytes()
    all_five = replayed(journal)
    assert [sequence for sequence, _ in all_five] == [1, 2, 3, 4, 5] and replayed(journal) == all_five
    for at in range(start, end):
        garbled = whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
        for damaged in (whole[:at], whole[:at] + bytes(len(whole) - at), garbled):
            path.write_bytes(damaged)
            assert replayed(journal) == all_five[:4], at
    path.write_bytes(whole)
    assert replayed(journal) == all_five


def test_replay_ends_at_a_gap(journal, tmp_path):
    ends = fill(journal, 5)
    with (tmp_path / "journal-1").open("r+b") as file:
        file.seek(ends[1])
        file.write(bytes(ends[2] - ends[1]))
    assert [sequence for sequence, _ in replayed(journal)] == [1, 2]


def test_replay_needs_the_generation_and_following_numbers(journal):
    fill(journal, 5)
    journal.begin(2)
    fill(journal, 2, first=6, generation=2)
    journal.begin(3)
    fill(journal, 2, first=8, generation=3)
    assert [sequence for sequence, _ in replayed(journal, 2, 5)] == [6, 7]
    assert [sequence for sequence, _ in replayed(journal, 3, 7)] == [8, 9]
    assert replayed(journal, 1, 0) == [] == replayed(journal, 5, 9)
    assert replayed(journal, 3, 6) == [] == replayed(journal, 3, 8)


def test_journal_is_preallocated_and_can_be_reopened(journal, tmp_path):
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        "journal-0": 1 << 16,
        "journal-1": 1 << 16,
    }
    fill(journal, 3)
    again = Journal(tmp_path, 1 << 17)
    assert len(replayed(again)) == 3 and (tmp_path / "journal-0").stat().st_size == 1 << 17
    again.close()


def test_both_files_are_synced_once_after_a_new_generation(journal):
    fill(journal, 1)
    journal.begin(2)
    fill(journal, 1, first=2, generation=2)
    files = journal.take_unsynced()
    assert len(files) == 2 and journal.take_unsynced() == []
    for descriptor in files:
        journal.sync_file(descriptor)


@pytest.mark.parametrize("code, error", [(errno.ENOSPC, NoSpace), (errno.EIO, DriveFailed)])
@pytest.mark.parametrize("written", [0, 3, 20, "all"])
def test_failed_append_leaves_nothing_to_replay(journal, monkeypatch, code, error, written):
    fill(journal, 2)
    real = os.pwrite
    calls = []

    def pwrite(descriptor, buffer, offset):
        calls.append(offset)
        if len(calls) == 1 and written in (3, 20):
            return real(descriptor, buffer[:written], offset)
        if len(calls) == 1 and written == "all":
            real(descriptor, buffer, offset)
        if len(calls) == 1 or (len(calls) == 2 and written in (3, 20)):
            raise OSError(code, os.strerror(code))
        return real(descriptor, buffer, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    before = journal.offset
    with pytest.raises(error):
        journal.append(encode(1, 1, 3, {b"lost": b"x" * 100}))
    monkeypatch.undo()
    assert journal.offset == before
    assert [sequence for sequence, _ in replayed(journal)] == [1, 2]
    fill(journal, 1, first=3)
    assert [sequence for sequence, _ in replayed(journal)] == [1, 2, 3]


def test_short_write_is_continued(journal, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, buffer, offset: real(descriptor, buffer[:7], offset))
    fill(journal, 3)
    assert len(replayed(journal)) == 3


def test_append_that_cannot_be_erased_is_fenced(journal, monkeypatch):
    real = os.pwrite

    def pwrite(descriptor, buffer, offset):
        if offset == journal.offset and any(buffer):
            return real(descriptor, buffer[:10], offset)
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(Fenced):
        journal.append(encode(1, 1, 1, {b"a": b"b"}))
    assert replayed(journal) == []


def test_full_drive_is_no_space_for_the_journal(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(NoSpace):
        Journal(tmp_path, 1 << 16)
