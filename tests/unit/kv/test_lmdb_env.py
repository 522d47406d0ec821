"""The LMDB environment below the engine: what damaged records cost."""

import lmdb
import pytest

from nvpool.core.errors import CorruptRecord
from nvpool.kv.lmdb_env import LmdbTree, Mark

READERS = 126
"""Places for readers in LMDB's table, by default."""


@pytest.fixture
def records(tmp_path):
    """Two good records and a damaged one between them."""
    env = LmdbTree(tmp_path, 1 << 20)
    env.prepare(4096)
    assert env.write({b"a": b"1", b"b": b"2", b"c": b"3"}, Mark(0, 0, 0), lambda step: None)
    env.close()
    with lmdb.open(str(tmp_path)) as raw, raw.begin(write=True) as transaction:
        transaction.put(b"b", b"damaged")
    env = LmdbTree(tmp_path, 1 << 20)
    yield env
    env.close()


@pytest.mark.parametrize(
    "reads",
    [
        lambda env: env.get(b"b"),
        lambda env: env.get(b"bb"),
        lambda env: env.get_many([b"a", b"b"]),
        lambda env: env.read(b"a", b"d", 10),
        lambda env: list(env.walk(b"a", b"d", True)),
        lambda env: list(env.walk(b"a", b"d", False)),
    ],
    ids=["get", "get-neighbour", "get_many", "read", "walk", "walk-back"],
)
def test_kept_errors_of_damaged_records_use_up_no_readers(records, reads):
    kept = []
    for _ in range(2 * READERS):
        with pytest.raises(CorruptRecord) as found:
            reads(records)
        kept.append(found.value)
    assert records.get(b"a") == b"1"
    assert records.read(b"c", b"d", 10) == [(b"c", b"3")]
