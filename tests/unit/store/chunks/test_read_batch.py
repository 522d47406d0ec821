"""Batched reads: each read gets its bytes or its own refusal, whatever else is in the batch."""

import asyncio
import random

import pytest

from nvpool.core.checksum import block_checksums
from nvpool.core.errors import CorruptRecord, InvalidRequest
from nvpool.store.chunks.api import (
    ALL_INODES,
    NO_INODE,
    READ_BATCH_BYTES_MAX,
    UNCHECKED,
    create_chunk_store,
)
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.read_batch import READ, RESULT

BLOCK = 4096


async def filled(path):
    """A store with chunks in one run, in many runs, with holes, and of one block; and their contents."""
    create_chunk_store(path, 1, "pool", 256 << 20)
    store = await open_chunk_store(path, 1)
    chance, contents = random.Random(1), {}
    for inode, index, blocks, writes in [
        (1, 0, 256, 1),
        (1, 1, 100, 30),
        (2, 0, 1, 1),
        (2, 7, 200, 3),
        (2**63 + 5, 3, 40, 9),
    ]:
        content = bytearray(256 * BLOCK)
        for _ in range(writes):
            first = 0 if writes == 1 else chance.randrange(blocks)
            count = blocks if writes == 1 else chance.randrange(1, min(8, blocks - first) + 1)
            new = chance.randbytes(count * BLOCK)
            store.write_now(inode, index, first * BLOCK, memoryview(new), block_checksums(new))
            content[first * BLOCK : (first + count) * BLOCK] = new
        contents[inode, index] = bytes(content)
    return store, contents


def some_reads(chance, contents, count):
    for _ in range(count):
        inode, index = chance.choice(
            [(1, 0)] * 20 + [*contents] * 4 + [(1, 9), (77, 0), (2**64 - 1, 2**32 - 1)]
        )
        block, blocks = chance.randrange(256), chance.choice([1, 1, 1, 1, 2, 5, 64, 70])
        offset, length = block * BLOCK, min(blocks, 256 - block) * BLOCK
        if chance.random() < 0.02:
            offset, length = chance.choice(
                [
                    (offset + 1, length),
                    (offset, 0),
                    (offset, length - 7),
                    (2**32 - BLOCK, BLOCK),
                    (0, 2**32 - BLOCK),
                    (2**32 - BLOCK, 2 * BLOCK),
                ]
            )
        yield READ.pack(inode, index, offset, length, chance.choice([0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 65535]), 0)


OWNERS = (ALL_INODES, 1, 2, NO_INODE)


def results_of(store, packed, verify, owners=OWNERS):
    batch = store.read_now(packed, owners, verify)
    for at in batch.missed:
        raise AssertionError(f"read {at} is not in memory")
    return bytes(batch.results), bytes(batch.checksums), b"".join(batch.payload)


def test_holes_count_for_the_size_of_a_batch(tmp_path):
    async def main():
        store, _ = await filled(tmp_path / "t")
        half = READ_BATCH_BYTES_MAX // 2
        most = READ.pack(77, 0, 0, half, 0, 0) * 2
        results, _, payload = results_of(store, most, False)
        assert [status for status, *_ in RESULT.iter_unpack(results)] == [0, 0] and not payload
        with pytest.raises(InvalidRequest, match=str(READ_BATCH_BYTES_MAX)):
            results_of(store, most + READ.pack(77, 1, 0, 2 * BLOCK, 0, 0), False)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("verify", [False, True])
def test_random_batch_gets_the_replies_of_its_reads(tmp_path, verify):
    async def main():
        store, contents = await filled(tmp_path / "t")
        chance, whole, refused = random.Random(2), 0, 0
        for turn in range(400):
            reads = list(some_reads(chance, contents, chance.choice([1, 3, 50, 200])))
            packed = b"".join(reads)
            if turn % 20 == 0:  # the index cache is empty
                store.index.young.clear()
                store.index.old.clear()
            one = results, checksums, payload = results_of(store, packed, verify)
            alone = [results_of(store, read, verify) for read in reads]
            assert tuple(b"".join(parts) for parts in zip(*alone, strict=True)) == one
            at = 0
            for (inode, index, offset, asked, _, _), (status, flags, length, version) in zip(
                READ.iter_unpack(packed), RESULT.iter_unpack(results), strict=True
            ):
                refused += bool(status)
                whole += length == asked
                assert flags == (UNCHECKED if length and not verify else 0) and (not status or not version)
                if length:
                    assert payload[at : at + length] == contents[inode, index][offset : offset + length]
                if not status and (inode, index) in contents:
                    assert not any(contents[inode, index][offset + length : offset + asked])
                at += length
            assert at == len(payload) and block_checksums(payload) == checksums
        assert whole > 5000 and refused > 500
        await store.close()

    asyncio.run(main())


def test_offset_outside_of_a_chunk_is_refused_alone(tmp_path):
    async def main():
        store, contents = await filled(tmp_path / "t")
        packed = b"".join(READ.pack(1, 1, offset, BLOCK, 1, 0) for offset in (0, 2**32 - BLOCK, 0))
        results, _, payload = results_of(store, packed, False)
        assert [status for status, *_ in RESULT.iter_unpack(results)] == [0, InvalidRequest.wire_code, 0]
        assert payload == contents[1, 1][:BLOCK] * (len(payload) // BLOCK)
        await store.close()

    asyncio.run(main())


def test_too_large_batch_is_refused(tmp_path):
    async def main():
        store, _ = await filled(tmp_path / "t")
        results, _, payload = results_of(store, READ.pack(1, 0, 0, 64 * BLOCK, 0, 0) * 130, False)
        assert [status for status, *_ in RESULT.iter_unpack(results)] == [0] * 128 + [
            InvalidRequest.wire_code
        ] * 2
        assert len(payload) == READ_BATCH_BYTES_MAX
        with pytest.raises(InvalidRequest, match=str(READ_BATCH_BYTES_MAX)):
            results_of(store, READ.pack(1, 0, 0, BLOCK, 0, 0) * 8193, False)
        await store.close()

    asyncio.run(main())


def test_headers_that_are_not_whole_are_refused(tmp_path):
    async def main():
        store, _ = await filled(tmp_path / "t")
        for packed in (READ.pack(1, 0, 0, BLOCK, 0, 0)[:-1], READ.pack(1, 0, 0, BLOCK, 0, 0) + b"x"):
            with pytest.raises(InvalidRequest, match="whole"):
                results_of(store, packed, False)
        assert results_of(store, b"", False) == (b"", b"", b"")
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("damaged", [False, True])
def test_unknown_chunks_are_looked_up_in_one_transaction(tmp_path, monkeypatch, damaged):
    async def main():
        create_chunk_store(tmp_path / "t", 1, "pool", 64 << 20)
        store = await open_chunk_store(tmp_path / "t", 1)
        contents = {inode: random.Random(inode).randbytes(BLOCK) for inode in range(1, 101)}
        for inode, content in contents.items():
            store.write_now(inode, 0, 0, memoryview(content), block_checksums(content))
        await store.close()
        store = await open_chunk_store(tmp_path / "t", 1)
        asked, get, get_many = [], store.kv.get, store.kv.get_many

        def many(keys):
            asked.append(len(keys))
            if damaged:
                raise CorruptRecord("one of them")
            return get_many(keys)

        monkeypatch.setattr(store.kv, "get", lambda key: asked.append(1) or get(key))
        monkeypatch.setattr(store.kv, "get_many", many)
        numbers = [*contents, 777, *reversed(contents)]  # a missing one, and each one twice
        packed = b"".join(READ.pack(inode, 0, 0, BLOCK, 0, 0) for inode in numbers)
        results, _, payload = results_of(store, packed, True, (ALL_INODES,))
        assert payload == b"".join(contents.get(inode, b"") for inode in numbers)
        assert not any(status for status, *_ in RESULT.iter_unpack(results))
        # the ends of the partition of inode 777 are looked up twice, and it lies behind them
        assert asked == [101] + [1] * (100 + 2 if damaged else 0), "damaged chunks are looked up one by one"
        asked.clear()
        assert results_of(store, packed, True, (ALL_INODES,))[2] == payload and not asked
        await store.close()

    asyncio.run(main())
