"""Records of cross-shard transactions: golden bytes, round trips, and refusal of invalid records."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.core.errors import CorruptRecord
from nvpool.meta.state.transaction_records import (
    TURN_HERE,
    TURN_KEY,
    Decision,
    TransactionId,
    decided_key,
    decode_decision,
    decode_held,
    encode_decision,
    encode_held,
    held_key,
    id_of_key,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "spanning_records.json"
SPAN = TransactionId(3, 0x1122_3344_5566_7788, 9)
DECISION = Decision(TURN_HERE, {2: [(b"key", b"value"), (b"gone", None), (b"empty", b"")], 1: []})
KEYS = st.binary(min_size=1, max_size=300)


def test_records_match_the_golden_bytes():
    made = {
        "held key": held_key(SPAN),
        "decided key": decided_key(SPAN),
        "turn": TURN_KEY,
        "held": encode_held(1 << 60, [b"key", b"another"]),
        "decided": encode_decision(DECISION),
    }
    assert {name: raw.hex() for name, raw in made.items()} == json.loads(GOLDEN.read_text())


def test_keys_name_the_transaction():
    assert id_of_key(held_key(SPAN)) == id_of_key(decided_key(SPAN)) == SPAN
    with pytest.raises(CorruptRecord):
        id_of_key(held_key(SPAN)[:-1])


@given(st.integers(0, (1 << 64) - 1), st.lists(KEYS))
def test_locks_round_trip(order, keys):
    assert decode_held(encode_held(order, keys)) == (order, keys)


@given(
    st.dictionaries(st.integers(1, 65535), st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=300)))),
    st.integers(0, 2),
)
def test_decisions_round_trip(effects, turn):
    decision = Decision(turn, effects)
    found = decode_decision(encode_decision(decision))
    assert found == decision and list(found.effects) == list(effects)


@given(st.binary(max_size=60))
def test_invalid_record_is_reported_as_corrupt(raw):
    for decode in (decode_held, decode_decision):
        try:
            decode(raw)
        except CorruptRecord:
            pass


@pytest.mark.parametrize("cut", range(1, len(encode_decision(DECISION))))
def test_truncated_decision_is_corrupt(cut):
    raw = encode_decision(DECISION)[:cut]
    try:
        found = decode_decision(raw)
    except CorruptRecord:
        return
    assert list(found.effects.items()) == list(DECISION.effects.items())[: len(found.effects)]
