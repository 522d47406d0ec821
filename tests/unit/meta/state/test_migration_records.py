"""Records of incoming and outgoing partition migrations: golden bytes, round trips, and refusal of invalid records."""

import contextlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nvpool.core.errors import CorruptRecord
from nvpool.meta.state import migration_records, session_records

GOLDEN = Path(__file__).parents[3] / "golden" / "moving_records.json"
COMING = migration_records.IncomingMigration(3, 2, 77, 12345, True, (0, 7, 4095))
SESSION = session_records.SessionRecord(
    bytes(range(16)), 1_700_000_000_000_000_000, "mount host 4711", True, 0x1122334455667788
)
OWNED = SESSION._replace(owner="client/alice.0a1b2c3d")


def test_records_match_the_golden_bytes():
    made = {
        "coming key": migration_records.coming_key(3),
        "coming": migration_records.encode_coming(COMING),
        "arrived key": migration_records.arrived_key(3, 3 << 48 | 5),
        "gone key": migration_records.gone_key(4095),
        "gone": migration_records.GONE_VALUE,
        "seen key": migration_records.SEEN_KEY,
        "seen": migration_records.encode_seen(99),
        "session with identity": session_records.encode_session(SESSION),
        "session with owner": session_records.encode_session(OWNED),
    }
    assert {name: raw.hex() for name, raw in made.items()} == json.loads(GOLDEN.read_text())


@given(
    st.builds(
        migration_records.IncomingMigration,
        *[st.integers(0, (1 << 64) - 1)] * 4,
        st.booleans(),
        st.lists(st.integers(0, 4095), max_size=300).map(tuple),
    )
)
def test_migration_records_round_trip(coming):
    assert migration_records.decode_coming(migration_records.encode_coming(coming)) == coming
    assert migration_records.source_of_key(migration_records.coming_key(9)) == 9
    assert (
        migration_records.arrived_session_of_key(migration_records.arrived_key(9, coming.term)) == coming.term
    )
    assert migration_records.partition_of_gone_key(migration_records.gone_key(4095)) == 4095
    assert migration_records.decode_seen(migration_records.encode_seen(coming.term)) == coming.term


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=60)


@given(NAMES, st.booleans(), st.integers(0, (1 << 64) - 1), st.none() | NAMES)
def test_session_round_trips_with_and_without_owner(client, watches, identity, owner):
    record = session_records.SessionRecord(bytes(16), 5, client, watches, identity, owner)
    assert session_records.decode_session(session_records.encode_session(record)) == record


@given(st.binary(max_size=80))
def test_invalid_record_is_reported_as_corrupt(raw):
    for read in (
        migration_records.decode_coming,
        migration_records.decode_seen,
        migration_records.source_of_key,
        migration_records.arrived_session_of_key,
        migration_records.partition_of_gone_key,
        session_records.decode_session,
    ):
        with contextlib.suppress(CorruptRecord):
            read(raw)
