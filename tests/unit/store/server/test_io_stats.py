"""Use of a store by session: counted while a query is active, in bounded memory, without invalid reports."""

from types import SimpleNamespace

from nvpool.core import grants
from nvpool.core.clock import ManualClock
from nvpool.rpc.messages.read_write_codec import PAST_READS, encode_read_request
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.api import ReadBatch
from nvpool.store.chunks.read_batch import READ, RESULT
from nvpool.store.server import io_stats as module
from nvpool.store.server.io_stats import ROW, IoStats


class Case:
    def __init__(self):
        self.clock = ManualClock()
        self.known = {
            b"mine": grants.Grant(grants.READ, 0, 7, 11, 0, 0),
            b"his": grants.Grant(grants.READ, 0, 8, 12, 0, 0),
        }
        self.use = IoStats(self.clock, self.known)

    def rows(self, for_s=0.0):
        reply = self.use.report(pb.UseRequest(target=1, for_s=for_s))
        return {row[:2]: row[2:] for row in ROW.iter_unpack(reply.rows)}, reply.counting

    def read(self, right, *reads, took_s=0.5):
        """Each read is (inode, bytes)."""
        batch = ReadBatch()
        batch.results = bytearray().join(RESULT.pack(0, 0, length, 0) for _, length in reads)
        headers = b"".join(READ.pack(inode, 0, 0, length, 0, 0) for inode, length in reads)
        self.use.read(
            SimpleNamespace(
                message=encode_read_request(1, 1, [right], headers), since_s=self.clock.now_s - took_s
            ),
            batch,
        )

    def write(self, session, *writes):
        batch = SimpleNamespace(
            session=session, headers=[(inode, 0, 0, 0, 0, length, 0, 0) for inode, length in writes]
        )
        self.use.wrote(SimpleNamespace(since_s=self.clock.now_s - 0.25), batch)


def test_use_is_counted_only_while_queried():
    case = Case()
    assert not case.use.on
    assert case.rows()[0] == {} and not case.use.on, "a query without a duration does not start counting"
    case.rows(for_s=5.0)
    assert case.use.on
    case.read(b"mine", (11, 4096), (11, 8192))
    case.read(b"his", (12, 4096))
    case.write(7, (11, 1000))
    rows, counting = case.rows()
    assert rows == {(7, 11): (2, 12288, 1.0, 1, 1000, 0.25, 0, 0), (8, 12): (1, 4096, 0.5, 0, 0, 0.0, 0, 0)}
    case.clock.advance(5.1)
    case.read(b"mine", (11, 4096))
    assert not case.use.on, "the first request after that time ended the counting"
    again, other = case.rows(for_s=5.0)
    assert again == {} and other != counting, "a later query sees that counting was reset"


def test_repeated_queries_extend_counting_up_to_a_limit():
    case = Case()
    _, counting = case.rows(for_s=2.0)
    for _ in range(5):
        case.clock.advance(1.5)
        case.read(b"mine", (11, 1))
        assert case.rows(for_s=2.0)[1] == counting
    assert case.rows()[0][7, 11][0] == 5
    case.rows(for_s=1e12)
    case.clock.advance(module.FOR_S_MAX + 0.1)
    case.read(b"mine", (11, 1))
    assert not case.use.on


def test_table_is_bounded_and_the_rest_is_counted_together(monkeypatch):
    monkeypatch.setattr(module, "ROWS_MAX", 10)
    case = Case()
    case.rows(for_s=60.0)
    case.write(7, *((inode, 1) for inode in range(1, 101)))
    for session in range(100, 200):
        case.write(session, (1, 1))
    rows, _ = case.rows()
    assert len(rows) <= 22 and sum(row[3] for row in rows.values()) == 200
    assert rows[7, 0][3] == 90, "reads of one session beyond the limit"
    assert rows[0, 0][3] > 0, "reads of sessions beyond the limit"


def test_short_circuit_reads_are_counted_unless_invalid():
    case = Case()
    case.use.past([b"mine"], PAST_READS.pack(11, 3, 12288))
    assert (case.use.past_reads, case.use.past_bytes) == (3, 12288) and case.rows()[0] == {}
    case.rows(for_s=5.0)
    case.use.past(
        [b"mine"],
        PAST_READS.pack(11, 2, 8192)
        + PAST_READS.pack(11, 1 << 40, 1)
        + PAST_READS.pack(12, 1, 1 << 60)
        + b"half",
    )
    case.use.past([], PAST_READS.pack(5, 1, 1))
    case.use.past([b"unknown"], b"")
    assert case.use.past_reads == 6
    assert case.rows()[0] == {(7, 11): (0, 0, 0.0, 0, 0, 0.0, 2, 8192), (0, 5): (0, 0, 0.0, 0, 0, 0.0, 1, 1)}
