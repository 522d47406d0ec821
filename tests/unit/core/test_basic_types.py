"""Basic types: ids, sizes, grants (access tokens), checksums."""

import asyncio
import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.core import checksum, grants, ids, units
from nvpool.core.errors import StaleGrant
from nvpool.core.futures import abandon

SECRET = bytes(range(32))


@given(st.integers(0, 4095), st.integers(1, ids.COUNTER_MASK))
def test_inode_number_orders_by_partition_and_counter(partition, counter):
    inode = ids.inode_number(partition, counter)
    assert (ids.partition_of(inode), ids.counter_of(inode)) == (partition, counter)
    assert 0 < inode < 1 << 63
    assert ids.inode_key(inode) < ids.inode_key(inode + 1)


@pytest.mark.parametrize(("partition", "counter"), [(-1, 1), (4096, 1), (0, 0), (0, 1 << 51)])
def test_invalid_inode_number_is_refused(partition, counter):
    with pytest.raises(ValueError, match="no inode number"):
        ids.inode_number(partition, counter)


def test_root_is_inode_one():
    assert ids.inode_number(0, 1) == ids.ROOT_INODE == 1


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
)
def test_version_orders_by_epoch_then_counter(epoch, counter, other_epoch, other_counter):
    rises = (epoch, counter) < (other_epoch, other_counter)
    assert (ids.version(epoch, counter) < ids.version(other_epoch, other_counter)) == rises


GOLDEN_GRANT = "01030200efcdab8967452301010000000000000005000000000000000068e5cf8b0100000000000000000000"
GOLDEN_MAC = "2487fac154de2a4cb7bb7ffeaeede6cc"


def test_grant_encoding_is_stable():
    grant = grants.Grant(
        rights=3, key=2, session=0x0123456789ABCDEF, inode=1, cut=5, ends_ms=1_700_000_000_000
    )
    raw = grants.sign(grant, SECRET)
    assert raw[:44].hex() == GOLDEN_GRANT
    assert raw[44:].hex() == GOLDEN_MAC
    assert grants.verify(raw, SECRET, 1_699_999_999_999) == grant


@given(st.integers(0, grants.GRANT_BYTES - 1), st.integers(1, 255))
def test_grant_with_a_changed_byte_is_refused(place, flip):
    raw = bytearray(grants.sign(grants.Grant(1, 1, 7, 9, 0, 10_000), SECRET))
    raw[place] ^= flip
    with pytest.raises(StaleGrant):
        grants.verify(bytes(raw), SECRET, 5_000)


def test_grant_expires_and_is_bound_to_its_key():
    raw = grants.sign(grants.Grant(1, 1, 7, 9, 0, 10_000), SECRET)
    grants.verify(raw, SECRET, 10_000 + int(grants.CLOCK_SKEW_S * 1000))
    with pytest.raises(StaleGrant, match="ended"):
        grants.verify(raw, SECRET, 10_001 + int(grants.CLOCK_SKEW_S * 1000))
    with pytest.raises(StaleGrant, match="signature"):
        grants.verify(raw, bytes(32), 5_000)
    for wrong in (b"", raw[:-1], raw + b"x"):
        with pytest.raises(StaleGrant):
            grants.verify(wrong, SECRET, 5_000)


def test_checksum_is_crc32c():
    assert checksum.crc32c(b"123456789") == 0xE3069283  # check value of RFC 3720, B.4
    assert checksum.ZERO_BLOCK_CHECKSUM == 0x98F94189


@given(st.integers(0, 11), st.integers(0, 9), st.integers())
def test_compiled_checksums_equal_the_python_ones(count, skip, seed):
    whole = bytearray(random.Random(seed).randbytes(skip + count * 4096))
    for buffer in (memoryview(whole)[skip:], bytes(whole[skip:]), whole[skip:]):
        assert checksum.block_checksums(buffer) == checksum.block_checksums_plain(buffer)
    if count:
        for function in (checksum.block_checksums, checksum.block_checksums_plain):
            with pytest.raises(ValueError, match="whole blocks"):
                function(memoryview(whole)[skip + 1 :])


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4095))
def test_first_bad_block_is_found(count, block, byte):
    buffer = bytearray(bytes(range(256)) * (16 * count))
    sums = checksum.block_checksums(buffer)
    assert checksum.first_bad_block(buffer, sums) == -1
    block %= count
    buffer[block * 4096 + byte] ^= 1
    assert checksum.first_bad_block(buffer, sums) == block


@given(st.integers(0, 20000), st.integers(1, 20000))
def test_pieces_are_split_at_block_boundaries(offset, length):
    buffer = bytes(i * 7 & 255 for i in range(length))
    sums = checksum.piece_checksums(buffer, offset)
    expected, at = b"", 0
    while at < length:
        end = min(length, at + 4096 - (offset + at) % 4096)
        expected += checksum.crc32c(buffer[at:end]).to_bytes(4, "little")
        at = end
    assert sums == expected


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("1MiB", 1 << 20),
        ("1.5G", 3 << 29),
        ("2 tb", 2 << 40),
        ("0", 0),
        (".5K", 512),
        ("1.9", 1),
        ("9007199254740993", (1 << 53) + 1),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_size_is_parsed(text, count):
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "K",
        "-1",
        "12X",
        "1e400",
        "nan",
        "inf",
        "9999999T",
        "0.5",
        "1_000",
        "١٢",
        "1" * 10_000,
        ".",
        "9223372036854775808",
    ],
)
def test_invalid_size_is_refused(text):
    with pytest.raises(ValueError, match="size|range") as said:
        units.parse_bytes(text)
    assert len(str(said.value)) < 200


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (4097, "4097"), (8192, "8KiB"), (3 << 29, "1536MiB"), (1 << 40, "1TiB")]
)
def test_size_in_a_suggested_command_is_exact(count, text):
    assert units.size_argument(count) == text and units.parse_bytes(text) == count


def test_size_is_formatted():
    shown = [units.format_bytes(n) for n in (0, 1023, 1024, 150 << 20, 3 << 40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "150 MiB", "3.00 TiB"]


@pytest.mark.parametrize(
    "make",
    [
        lambda loop: asyncio.gather(asyncio.sleep(60), asyncio.sleep(60), return_exceptions=True),
        lambda loop: loop.create_task(_fails_when_cancelled()),
        lambda loop: _failed(loop),
    ],
    ids=["gather", "task", "failed"],
)
def test_abandoned_future_leaves_no_unseen_error(make):
    unseen = []

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context["message"]))
        future = make(loop)
        await asyncio.sleep(0)
        abandon(future)
        await asyncio.sleep(0.01)
        assert future.done()
        del future
        gc.collect()

    asyncio.run(run())
    assert not unseen


async def _fails_when_cancelled():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise OSError("while it was cancelled") from None


def _failed(loop):
    future = loop.create_future()
    future.set_exception(OSError("before it was abandoned"))
    return future
