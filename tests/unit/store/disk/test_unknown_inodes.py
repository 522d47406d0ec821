"""Inodes of which the index has nothing: known without a look-up, and never wrongly."""

import asyncio
import random
from array import array

from nvpool.core.clock import ManualClock
from nvpool.core.errors import CorruptRecord
from nvpool.kv.memory_engine import MemoryKv
from nvpool.store.chunks.api import create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.index import Index
from nvpool.store.disk.index_records import Head, IndexSegment, encode_segment, segment_key

PARTITION = 1 << 51
NEVER = (1 << 64) - 1


class CountedKv(MemoryKv):
    """Index that counts its look-ups; the scans of a damaged one fail."""

    gets = 0
    is_damaged = False

    def get(self, key):
        self.gets += 1
        return super().get(key)

    def scan_back(self, first, end, limit):
        if self.is_damaged:
            raise CorruptRecord("a record is damaged")
        return super().scan_back(first, end, limit)


def test_new_inode_costs_the_index_no_look_up():
    kv = CountedKv()
    index = Index(kv, 1000)
    assert not index.chunk(PARTITION + 5, 0).version
    kv.gets = 0
    for inode in range(PARTITION + 6, PARTITION + 50):
        assert not index.chunk(inode, 3).version and not index.inode(inode).floor
    assert not kv.gets


def test_applied_chunk_is_looked_up():
    kv = CountedKv()
    index = Index(kv, 1000)
    assert 5 in index.unknown and 6 in index.unknown
    index.clear()
    kv.apply([(segment_key(5, 0, 0), encode_segment(IndexSegment(array("Q", [20]), bytes(4)), Head(7)))])
    assert 5 not in index.unknown and 6 in index.unknown
    assert index.chunk(5, 0).version == 7


def test_damaged_index_and_the_highest_number_are_certain_of_nothing():
    kv = CountedKv()
    kv.is_damaged = True
    assert 5 not in Index(kv, 1000).unknown
    kv.is_damaged = False
    unknown = Index(kv, 1000).unknown
    assert NEVER - 1 in unknown and NEVER not in unknown
    kv.apply([(segment_key(NEVER - 1, 0, 0), b"something")])
    assert NEVER - 1 not in unknown and NEVER - 2 in unknown


def test_indexed_inode_is_never_reported_as_unknown(tmp_path):
    """For any writer and age of the record."""

    async def scene():
        for seed in range(8):
            dice = random.Random(seed)
            path = tmp_path / str(seed)
            path.mkdir()
            create_chunk_store(path / "t", 1, "pool", 64 << 20)
            for _ in range(3):
                store = await open_chunk_store(path / "t", 1, clock=ManualClock())
                unknown = store.index.unknown
                there = {key[:9] for key, _ in store.kv.scan(b"c", b"j", 1 << 20)}
                for _ in range(300):
                    within = dice.choice((0, PARTITION - 1, dice.randrange(400)))
                    inode = dice.choice((0, 1, 4095, 4096, 8191)) * PARTITION + within
                    kind = dice.choice((b"c", b"i"))
                    key = (
                        segment_key(inode, dice.randrange(2), 0)
                        if kind == b"c"
                        else b"i" + inode.to_bytes(8, "big")
                    )
                    if dice.random() < 0.5:
                        store.kv.apply([(key, b"something"), (b"t" + key, b"of no interest")])
                        there.add(key[:9])
                    elif dice.random() < 0.05:
                        await store.kv.checkpoint()
                    asked = dice.choice((inode, inode + 1, inode + 300)) % (1 << 64)
                    number = asked.to_bytes(8, "big")
                    if asked in unknown:
                        assert b"c" + number not in there and b"i" + number not in there
                await store.kv.checkpoint()
                store.kv.apply([(b"t", None)])
                await store.abandon()

    asyncio.run(scene())


def test_new_inodes_are_remembered_by_their_highest_number(tmp_path):
    async def scene():
        create_chunk_store(tmp_path / "t", 1, "pool", 512 << 20)
        store = await open_chunk_store(tmp_path / "t", 1, clock=ManualClock())
        unknown = store.index.unknown
        for n in range(20_000):
            inode = n % 3 * PARTITION + n + 1
            assert inode in unknown
            store.kv.apply(
                [(segment_key(inode, 0, 0), b"something"), (b"i" + inode.to_bytes(8, "big"), None)]
            )
            assert inode not in unknown
        assert all(n % 3 * PARTITION + n + 1 not in unknown for n in range(20_000))
        assert 3 * PARTITION + 1 in unknown and 30_000 in unknown
        store.kv.apply([(segment_key(n % 3 * PARTITION + n + 1, 0, 0), None) for n in range(20_000)])
        await store.close()

    asyncio.run(scene())
