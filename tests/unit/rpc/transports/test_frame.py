"""Frames of the stream transport: their bytes, and the reader's behaviour with any input."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core.errors import CorruptFrame
from nvpool.rpc.api import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX
from nvpool.rpc.transports import frame as frames_module
from nvpool.rpc.transports.frame import (
    CANCEL,
    EMPTY,
    HEADER,
    HELLO,
    LINEAR_BYTES,
    NARROW_AFTER,
    REPLY,
    REQUEST,
    WIDE_BYTES,
    FrameReader,
)

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "frames.json").read_text())

HEADS = {"plain": (frames_module.pack_head_plain, frames_module.read_head_plain)}
if frames_module.compiled_frame is not None:
    HEADS["compiled"] = (frames_module.compiled_frame.pack_head, frames_module.read_head_compiled)


@pytest.fixture(scope="module", autouse=True, params=HEADS)
def heads(request):
    """Every test with the compiled module and with the Python implementation."""
    before = frames_module.pack_head, frames_module.read_head
    frames_module.pack_head, frames_module.read_head = HEADS[request.param]
    yield
    frames_module.pack_head, frames_module.read_head = before


def pack_head(*fields):
    return frames_module.pack_head(*fields)


frames = st.tuples(
    st.sampled_from([HELLO, REQUEST, REPLY, CANCEL]),
    st.integers(0, 65535),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=300),
    st.one_of(st.binary(max_size=500), st.integers(60_000, 200_000).map(lambda n: bytes([n % 251]) * n)),
)


def packed(frame) -> bytes:
    kind, code, number, deadline_ms, message, payload = frame
    return pack_head(kind, code, number, deadline_ms, message, len(payload)) + payload


def read(stream: bytes, cuts, place=lambda *_: None, widen=(False,)) -> list:
    """The frames that a reader finds when `stream` comes in parts of the sizes in `cuts`, repeated; `widen`: when it is
    asked to expect large payloads."""
    found = []
    reader = FrameReader(lambda *frame: found.append(frame), place)
    at, turn = 0, 0
    while at < len(stream):
        if widen[turn % len(widen)]:
            reader.widen()
        buffer = reader.get_buffer(-1)
        assert len(buffer) > 0
        count = min(len(buffer), cuts[turn % len(cuts)], len(stream) - at)
        buffer[:count] = stream[at : at + count]
        del buffer
        reader.buffer_updated(count)
        at += count
        turn += 1
    return found


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["what"])
def test_frame_matches_the_golden_bytes(case):
    frame = (
        case["kind"],
        case["code"],
        case["number"],
        case["deadline_ms"],
        bytes.fromhex(case["message"]),
        bytes.fromhex(case["payload"]),
    )
    assert packed(frame).hex() == case["bytes"]
    assert read(bytes.fromhex(case["bytes"]), [1]) == [frame]


@settings(max_examples=60, deadline=None)
@given(st.lists(frames, min_size=1, max_size=8), st.lists(st.integers(1, 200_000), min_size=1, max_size=5))
def test_frames_round_trip_in_parts_of_any_size(sent, cuts):
    assert read(b"".join(map(packed, sent)), cuts) == sent


@settings(max_examples=60, deadline=None)
@given(frames, st.data())
def test_flipped_bit_in_header_or_message_is_detected(frame, data):
    stream = bytearray(packed(frame))
    bit = data.draw(st.integers(0, (HEADER.size + len(frame[4])) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFrame):
        read(bytes(stream), [len(stream)])


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=HEADER.size, max_size=2000), st.integers(1, 2000))
def test_invalid_bytes_are_refused(noise, cut):
    with pytest.raises(CorruptFrame):
        read(noise, [cut])


@pytest.mark.parametrize(
    ("message_bytes", "payload_bytes"), [(MESSAGE_BYTES_MAX + 1, 0), (0, PAYLOAD_BYTES_MAX + 1)]
)
def test_too_long_frame_is_refused_at_its_header(message_bytes, payload_bytes):
    head = pack_head(REQUEST, 1, 1, 1, bytes(message_bytes), payload_bytes)[: HEADER.size]
    with pytest.raises(CorruptFrame, match="too long"):
        read(head, [HEADER.size])


@pytest.mark.parametrize("kind", [0, 5, 255])
def test_frame_of_unknown_kind_is_refused(kind):
    with pytest.raises(CorruptFrame, match="unknown kind"):
        read(pack_head(kind, 0, 1, 0, b"", 0), [HEADER.size])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(frames, min_size=1, max_size=12),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_frames_round_trip_with_a_wide_buffer(sent, cuts, widen):
    assert read(b"".join(map(packed, sent)), cuts, widen=widen) == sent


def receive(reader, stream):
    """Sizes of the buffers."""
    at, lengths = 0, []
    while at < len(stream):
        buffer = reader.get_buffer(-1)
        lengths.append(len(buffer))
        count = min(len(buffer), len(stream) - at)
        buffer[:count] = stream[at : at + count]
        del buffer
        reader.buffer_updated(count)
        at += count
    return lengths


def test_wide_buffer_is_narrowed_after_larger_payloads():
    found = []
    reader = FrameReader(lambda *frame: found.append(frame), lambda *_: None)
    large, larger, short = [
        (REPLY, 0, size, 0, b"m" * 158, bytes([9]) * size) for size in (128 << 10, 300 << 10, 4096)
    ]
    receive(reader, packed(short))
    assert len(reader.get_buffer(-1)) == LINEAR_BYTES
    reader.widen()
    assert receive(reader, packed(large) * 4) == [WIDE_BYTES] and reader.empty is not None
    receive(reader, packed(larger) * NARROW_AFTER)
    reader.widen()  # a request for a wide buffer in between
    receive(reader, packed(larger) * NARROW_AFTER)
    assert len(reader.get_buffer(-1)) == WIDE_BYTES
    receive(reader, packed(larger))
    assert len(reader.get_buffer(-1)) == LINEAR_BYTES
    receive(reader, packed(large))
    assert found == [short] + [large] * 4 + [larger] * (2 * NARROW_AFTER + 1) + [large]


def test_widening_within_a_frame_loses_no_bytes():
    found = []
    reader = FrameReader(lambda *frame: found.append(frame), lambda *_: None)
    large = (REPLY, 0, 7, 0, b"m" * 158, bytes(range(256)) * 512)
    stream = packed(large)
    receive(reader, stream[:20])
    reader.widen()
    receive(reader, stream[20:90_000])
    receive(reader, stream[90_000:] + stream)
    assert found == [large, large] and len(reader.get_buffer(-1)) == WIDE_BYTES


def test_buffer_grows_for_a_long_message_and_shrinks():
    found = []
    reader = FrameReader(lambda *frame: found.append(frame), lambda *_: None)
    long, short = (REQUEST, 1, 1, 1, bytes(range(256)) * 4096, b"tail"), (REQUEST, 1, 2, 1, b"short", b"")
    stream = packed(long) + packed(short) * 3
    receive(reader, stream)
    assert found == [long, short, short, short]
    assert len(reader.get_buffer(-1)) == LINEAR_BYTES


@pytest.mark.parametrize("size", [10, 4096, 65536, 65537, 500_000])
def test_payload_is_read_into_the_given_memory(size):
    place = memoryview(bytearray(size))
    content = bytes([7]) * size
    ((*_, payload),) = read(
        packed((REPLY, 0, 9, 0, b"m", content)), [1000], lambda kind, number, count: place
    )
    assert payload is place and place == content


def test_abandoned_memory_is_not_written():
    place = memoryview(bytearray(200_000))
    found = []
    reader = FrameReader(lambda *frame: found.append(frame), lambda *_: place)
    stream = packed((REPLY, 0, 9, 0, b"", b"x" * 200_000)) + packed((REPLY, 0, 10, 0, b"next", b""))
    first = 50_000
    reader.get_buffer(-1)[:first] = stream[:first]
    reader.buffer_updated(first)
    before = bytes(place)
    reader.abandon(9)
    at = first
    while at < len(stream):
        buffer = reader.get_buffer(-1)
        count = min(len(buffer), len(stream) - at)
        buffer[:count] = stream[at : at + count]
        del buffer
        reader.buffer_updated(count)
        at += count
    assert place == before
    assert found[1][4] == b"next"


def test_stalled_reader_keeps_frames_until_it_continues():
    found = []

    def deliver(*frame):
        found.append(frame[2])
        reader.stalled = frame[2] % 2 == 1

    reader = FrameReader(deliver, lambda *_: None)
    stream = b"".join(packed((REQUEST, 1, number, 1, b"", b"")) for number in range(1, 6))
    reader.get_buffer(-1)[: len(stream)] = stream
    reader.buffer_updated(len(stream))
    assert found == [1]
    for expected in ([1, 2, 3], [1, 2, 3, 4, 5]):
        reader.stalled = False
        reader.parse()
        assert found == expected
    assert EMPTY == b""


def of_a_head(read_head, *given):
    try:
        return read_head(*given)
    except CorruptFrame as error:
        return str(error)


@pytest.mark.compiled
@settings(max_examples=200, deadline=None)
@given(
    frames,
    st.integers(0, 40),
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=2),
    st.sampled_from([0, 100, 65536]),
)
def test_compiled_and_python_modules_agree(sent, begin, cut, changes, whole_max):
    kind, code, number, deadline_ms, message, payload = sent
    for form in (bytes, bytearray, memoryview):
        fields = kind, code, number, deadline_ms, form(message), len(payload)
        assert HEADS["plain"][0](*fields) == HEADS["compiled"][0](*fields)
    buffer = bytearray(begin) + packed(sent)
    end = max(begin + HEADER.size, len(buffer) - cut)
    for place, byte in changes:
        buffer[begin + place % (len(buffer) - begin)] = byte
    one, other = [of_a_head(read_head, buffer, begin, end, whole_max) for _, read_head in HEADS.values()]
    assert one == other and type(one) is type(other)


@pytest.mark.compiled
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_checksums_of_both_modules_agree_at_every_length(size):
    message = bytes(number * 7 & 255 for number in range(size))
    assert HEADS["plain"][0](REPLY, 0, 1, 0, message, 0) == HEADS["compiled"][0](REPLY, 0, 1, 0, message, 0)


@pytest.mark.compiled
def test_compiled_module_reads_only_inside_its_buffer():
    buffer = bytearray(packed((REQUEST, 1, 1, 1, b"m", b"")))
    for begin, end in ((-1, 32), (2, 33), (0, 31), (0, len(buffer) + 1), (1 << 40, (1 << 40) + 32)):
        with pytest.raises(ValueError):
            frames_module.compiled_frame.read_head(buffer, begin, end, 65536)
    with pytest.raises(TypeError):
        frames_module.compiled_frame.read_head(bytes(buffer), 0, 32, 65536)


def test_only_a_single_whole_frame_is_taken_directly():
    """Same result as `buffer_updated`; an incomplete frame or extra bytes are left to that method."""
    delivered = []

    def reader_with(stream):
        reader = FrameReader(lambda *frame: delivered.append(frame), lambda *_: None)
        reader.get_buffer(-1)[: len(stream)] = stream
        return reader

    for message, payload in (
        (b"", b""),
        (b"m", b""),
        (b"", b"p"),
        (b"m" * 100, b"p" * 4096),
        (b"m" * 3000, b"p" * 65536),
    ):
        frame = packed((REPLY, 3, 7, 9, message, payload))
        reader = reader_with(frame)
        found = reader.only(len(frame))
        reader_with(frame).buffer_updated(len(frame))
        assert found == delivered.pop() == (REPLY, 3, 7, 9, message, payload) and not delivered
        got = reader.get_buffer(-1)
        got[: len(got)] = bytes(len(got))
        assert found[5] == payload, "the receiver owns the payload"
        for length in {0, 1, 31, 32, len(frame) // 2, len(frame) - 1} - {len(frame)}:
            assert reader_with(frame[:length]).only(length) is None
        for more in (b"x", frame[:60_000]):
            assert reader_with(frame + more).only(len(frame) + len(more)) is None
        reader = reader_with(frame)
        reader.buffer_updated(5)
        assert reader.only(len(frame) - 5) is None
        reader.buffer_updated(len(frame) - 5)
        assert delivered.pop() == found
    for at in range(40):
        changed = bytearray(packed((REPLY, 3, 7, 9, b"message!", b"")))
        changed[at] ^= 1
        with pytest.raises(CorruptFrame):
            reader_with(changed).only(len(changed))
