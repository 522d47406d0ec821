"""Wire encoding: errors, greetings, endpoints, batches; and generated code that matches the .proto files."""

import asyncio
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core import errors
from nvpool.core.checksum import piece_checksums
from nvpool.core.endpoint import Endpoint, host_port_url, parse_endpoint
from nvpool.rpc import handshake, transport_registry
from nvpool.rpc.api import PAYLOAD_BYTES_MAX, Greeting
from nvpool.rpc.error_codec import decode_error, encode_error
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import data_pb2, wire_pb2

ROOT = Path(__file__).parents[3]


# -- errors


@pytest.mark.parametrize("cls", errors.every_error(), ids=lambda cls: cls.__name__)
def test_every_error_round_trips(cls):
    for error in (
        cls(),
        cls("a text"),
        cls("ü" * 5000, may_be_applied=True, retry_after_s=1.5),
        cls("", may_be_applied=False),
    ):
        code, raw = encode_error(error)
        found = decode_error(code, raw)
        assert type(found) is cls and code == cls.wire_code
        assert str(found) == str(error)[:2000]
        assert (found.may_be_applied, found.retry_after_s) == (error.may_be_applied, error.retry_after_s)


@pytest.mark.parametrize(
    ("code", "family"),
    [
        (199, errors.Refused),
        (250, errors.Stale),
        (399, errors.Unavailable),
        (499, errors.Damaged),
        (550, errors.Bug),
        (9999, errors.Bug),
        (1, errors.Bug),
    ],
)
def test_unknown_error_code_is_decoded_as_its_family(code, family):
    raw = wire_pb2.Error(code=code, may_be_applied=True).SerializeToString()
    found = decode_error(code, raw)
    assert type(found) is family and str(code) in str(found) and found.may_be_applied


def test_undecodable_error_keeps_its_class():
    assert type(decode_error(101, b"\xff\xff\xff")) is errors.NotFound


def test_foreign_error_is_encoded_as_bug_and_logged(caplog):
    with caplog.at_level(logging.ERROR):
        code, raw = encode_error(KeyError("k"))
    assert type(decode_error(code, raw)) is errors.Bug and caplog.records[0].exc_info
    code, raw = encode_error(asyncio.CancelledError())
    assert type(decode_error(code, raw)) is errors.Cancelled


def test_error_text_with_lone_surrogates_is_encoded():
    code, raw = encode_error(errors.NotFound("no file \udcff"))
    assert "no file" in str(decode_error(code, raw))


# -- greetings


@pytest.mark.parametrize(
    ("version_min", "version", "fits"), [(1, 1, True), (1, 9, True), (2, 3, False), (0, 0, False)]
)
def test_peer_without_a_common_version_is_refused(version_min, version, fits):
    raw = wire_pb2.Hello(version_min=version_min, version=version, name="the other").SerializeToString()
    if fits:
        assert handshake.check_hello(raw, Greeting("we")).name == "the other"
        return
    with pytest.raises(errors.ProtocolMismatch) as caught:
        handshake.check_hello(raw, Greeting("we"))
    for word in ("the other", "we", str(version), "1"):
        assert word in str(caught.value)


def test_texts_of_a_greeting_are_short_and_printable():
    most = handshake.TEXT_CHARACTERS_MAX
    raw = wire_pb2.Hello(
        version_min=1,
        version=1,
        name="ä\n2026 ERROR \x1b[2J" + "x" * 100_000,
        software="\r\n",
        fingerprint="b",
    ).SerializeToString()
    hello = handshake.check_hello(raw, Greeting("we"))
    assert hello.name == ("ä?2026 ERROR ?[2J" + "x" * most)[:most] and hello.software == "??"
    with pytest.raises(errors.ProtocolMismatch) as caught:
        handshake.check_hello(raw, Greeting("we", "a"))
    assert len(str(caught.value)) < 4 * most and str(caught.value).isprintable()


def test_undecodable_greeting_is_a_corrupt_frame():
    with pytest.raises(errors.CorruptFrame):
        handshake.check_hello(b"\xff\xff", Greeting("we"))


def test_greeting_names_this_software():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"nvpool {project['version']}" == handshake.SOFTWARE


# -- endpoints and the registry


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("stream://10.0.0.1:7711", Endpoint("stream", "10.0.0.1", 7711)),
        ("grpc://[::1]:7712", Endpoint("grpc", "::1", 7712)),
        (
            "stream+unix:///run/a%20b.sock?host=h1",
            Endpoint("stream+unix", path="/run/a b.sock", host_id="h1"),
        ),
        ("inproc://target-1", Endpoint("inproc", path="target-1")),
        ("rdma://node:1/x", Endpoint("rdma", "node", 1, "/x")),
    ],
)
def test_endpoint_is_parsed(url, endpoint):
    assert parse_endpoint(url) == endpoint


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.text(max_size=30),
        st.text(max_size=20).map("stream://".__add__),
        st.text(max_size=20).map("stream+unix://".__add__),
    )
)
def test_invalid_endpoint_is_refused(url):
    try:
        parse_endpoint(url)
    except errors.InvalidRequest:
        pass


def test_too_long_unix_path_is_refused():
    with pytest.raises(errors.InvalidRequest, match="107"):
        parse_endpoint("stream+unix:///" + "x" * 107)
    assert host_port_url("stream", "::1", 5) == "stream://[::1]:5"


def test_registered_transports_are_sorted_best_first():
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        transport_registry.GROUP
    ]
    assert entries | {"inproc": transport_registry.OURS["inproc"]} == transport_registry.OURS
    found = transport_registry.transports()
    assert list(found) == ["inproc", "rdma+unix", "stream+unix", "rdma", "stream", "grpc"]
    assert all(
        transport.scheme == scheme and transport_registry.transport(scheme) is transport
        for scheme, transport in found.items()
    )
    assert transport_registry.transport("carrier-pigeon") is None


def test_stream_transport_does_not_import_grpc():
    program = (
        "import sys; from nvpool.rpc import connection_pool, transport_registry; transport_registry.transport('stream'); "
        "transport_registry.transport('stream+unix'); transport_registry.transport('inproc'); print('grpc' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240).stdout
        == "False\n"
    )


# -- batches

u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
blocks = st.tuples(st.integers(0, 200), st.integers(1, 56)).map(lambda p: (p[0] * 4096, p[1] * 4096))
reads = st.tuples(u64, u32, blocks, st.integers(0, 9), u16).map(lambda t: (t[0], t[1], *t[2], *t[3:]))
writes = st.tuples(
    u64, u64, u64, u32, st.integers(0, 100_000), st.integers(1, 20_000), st.integers(0, 9), u16
)


@settings(max_examples=50, deadline=None)
@given(st.lists(reads, min_size=1, max_size=70))
def test_reads_round_trip(batch):
    raw = read_write_codec.pack_reads(batch)
    assert len(raw) == 24 * len(batch) and read_write_codec.unpack_reads(raw, 10) == batch


@settings(max_examples=50, deadline=None)
@given(st.lists(writes, min_size=1, max_size=20))
def test_writes_round_trip(batch):
    raw = read_write_codec.pack_writes(batch)
    payload = sum(entry[5] for entry in batch)
    checksums = b"".join(piece_checksums(bytes(entry[5]), entry[4]) for entry in batch)
    assert (
        len(raw) == 40 * len(batch) and read_write_codec.unpack_writes(raw, 10, payload, checksums) == batch
    )
    for wrong in (
        (10, payload + 1, checksums),
        (10, payload, checksums[4:]),
        (max(e[6] for e in batch), payload, checksums),
    ):
        with pytest.raises(errors.InvalidRequest):
            read_write_codec.unpack_writes(raw, *wrong)


GOOD_READ = (1, 0, 4096, 8192, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        (1, 0, 4095, 8192, 0, 0),
        (1, 0, 4096, 8191, 0, 0),
        (1, 0, 4096, 0, 0, 0),
        (1, 0, 16 << 20, 4096, 0, 0),
        (1, 0, 0, 0xFFFFF000, 0, 0),
        (1, 0, 4096, 8192, 1, 0),
    ],
)
def test_invalid_read_is_refused(wrong):
    with pytest.raises(errors.InvalidRequest):
        read_write_codec.unpack_reads(read_write_codec.pack_reads([GOOD_READ, wrong]), 1)


@pytest.mark.parametrize(
    "raw", [b"", b"x" * 23, b"x" * 25, bytes(24 * (read_write_codec.BATCH_ENTRIES_MAX + 1))]
)
def test_batch_with_partial_or_too_many_entries_is_refused(raw):
    with pytest.raises(errors.InvalidRequest):
        read_write_codec.unpack_reads(raw, 1)
    with pytest.raises(errors.InvalidRequest):
        read_write_codec.unpack_writes(raw, 1, 0, b"")
    with pytest.raises(errors.CorruptFrame):
        read_write_codec.unpack_read_results(raw, [4096], 0, b"")


def test_reads_larger_than_a_reply_are_refused():
    many = PAYLOAD_BYTES_MAX // (1 << 20) + 1
    with pytest.raises(errors.TooBig):
        read_write_codec.unpack_reads(
            read_write_codec.pack_reads([(1, n, 0, 1 << 20, 0, 0) for n in range(many)]), 1
        )


def test_replies_must_match_their_request():
    results = [(0, 1, 4096, 7), (101, 0, 0, 0), (0, 0, 0, 8)]
    raw = read_write_codec.pack_read_results(results)
    assert read_write_codec.unpack_read_results(raw, [4096, 8192, 4096], 4096, bytes(4)) == results
    for lengths, payload_bytes, checksums in (
        ([4096, 8192], 4096, bytes(4)),
        ([4096, 8192, 4096], 8192, bytes(4)),
        ([4096, 8192, 4096], 4096, bytes(8)),
        ([0, 8192, 4096], 4096, bytes(4)),
    ):
        with pytest.raises(errors.CorruptFrame):
            read_write_codec.unpack_read_results(raw, lengths, payload_bytes, checksums)
    with pytest.raises(errors.CorruptFrame):
        read_write_codec.unpack_read_results(
            read_write_codec.pack_read_results([(101, 0, 4096, 0)]), [4096], 4096, bytes(4)
        )
    raw = read_write_codec.pack_write_results([(0, 0, 0, 7)])
    assert read_write_codec.unpack_write_results(raw, 1) == [(0, 0, 0, 7)]
    with pytest.raises(errors.CorruptFrame):
        read_write_codec.unpack_write_results(raw, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(u64, max_size=20))
def test_inodes_round_trip(inodes):
    assert read_write_codec.unpack_inodes(read_write_codec.pack_inodes(inodes)) == inodes
    with pytest.raises(errors.InvalidRequest):
        read_write_codec.unpack_inodes(read_write_codec.pack_inodes(inodes) + b"1234")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 5000), st.binary(max_size=16))
def test_random_bytes_are_a_batch_or_refused(raw, grants, payload_bytes, checksums):
    for unpack in (
        lambda: read_write_codec.unpack_reads(raw, grants),
        lambda: read_write_codec.unpack_writes(raw, grants, payload_bytes, checksums),
        lambda: read_write_codec.unpack_inodes(raw),
    ):
        try:
            unpack()
        except (errors.InvalidRequest, errors.TooBig):
            pass
    for unpack in (
        lambda: read_write_codec.unpack_read_results(raw, [4096] * grants, payload_bytes, checksums),
        lambda: read_write_codec.unpack_write_results(raw, grants),
    ):
        try:
            unpack()
        except errors.CorruptFrame:
            pass


# -- generated code


def test_generated_code_matches_the_proto_files(tmp_path):
    subprocess.run(
        [ROOT / "proto" / "generate.sh", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
        timeout=240,
        capture_output=True,
    )
    for room in ("rpc/v1", "bridge/v1"):
        made = sorted(path.name for path in (tmp_path / room).iterdir())
        assert made == sorted(path.name for path in (ROOT / "nvpool" / room).glob("*_pb2*"))
        for name in made:
            assert (tmp_path / room / name).read_text() == (ROOT / "nvpool" / room / name).read_text(), (
                "run proto/generate.sh"
            )


# -- reads, with and without protobuf

numbers32, numbers64 = st.integers(0, 2**32 - 1), st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
small_or_32 = st.one_of(st.integers(0, 300), numbers32)
grants_of = st.lists(
    st.one_of(st.binary(min_size=60, max_size=60), st.binary(max_size=70)), min_size=1, max_size=3
)
packed_reads = st.one_of(st.binary(min_size=24, max_size=24), st.binary(max_size=60))


@settings(max_examples=300, deadline=None)
@given(numbers64, st.one_of(st.integers(0, 300), numbers32), grants_of, packed_reads, st.booleans())
def test_read_request_matches_protobuf(epoch, target, rights, reads, verify):
    raw = read_write_codec.encode_read_request(epoch, target, rights, reads, verify)
    request = data_pb2.ReadRequest(map_epoch=epoch, target=target, grants=rights, reads=reads, verify=verify)
    assert raw == request.SerializeToString()
    for form in (bytes, bytearray, memoryview):
        found = read_write_codec.decode_read_request(form(raw))
        assert (*found[:2], list(found[2]), *found[3:]) == (epoch, target, rights, reads, verify)


@settings(max_examples=300, deadline=None)
@given(
    numbers64,
    st.one_of(st.binary(min_size=16, max_size=16), st.binary(max_size=40)),
    st.one_of(st.binary(min_size=4, max_size=4), st.binary(max_size=20)),
)
def test_read_reply_matches_protobuf(epoch, results, checksums):
    raw = read_write_codec.encode_read_reply(epoch, bytearray(results), checksums)
    assert (
        raw == data_pb2.ReadReply(map_epoch=epoch, results=results, checksums=checksums).SerializeToString()
    )
    assert read_write_codec.decode_read_reply(memoryview(raw)) == (results, checksums)


@settings(max_examples=300, deadline=None)
@given(
    numbers64,
    small_or_32,
    st.one_of(st.binary(min_size=60, max_size=60), st.binary(max_size=70)),
    st.one_of(st.binary(min_size=40, max_size=40), st.binary(max_size=90)),
    st.one_of(st.binary(min_size=4, max_size=4), st.binary(max_size=20)),
    numbers64,
    small_or_32,
)
def test_write_request_matches_protobuf(epoch, target, grant, writes, checksums, session, slot):
    raw = read_write_codec.encode_write_request(epoch, target, grant, writes, checksums, session, slot)
    request = data_pb2.WriteRequest(
        map_epoch=epoch,
        target=target,
        grants=[grant],
        writes=writes,
        checksums=checksums,
        session=session,
        slot=slot,
    )
    assert raw == request.SerializeToString()
    found = read_write_codec.decode_write_request(raw)
    assert found in (None, (epoch, target, grant, writes, checksums, session, slot))
    one = 0 < target < 128 and 0 < slot < 128 and epoch and session
    assert (found is not None) >= (
        one and len(grant) == 60 and len(writes) == read_write_codec.WRITE_ENTRY.size and len(checksums) == 4
    )


@settings(max_examples=300, deadline=None)
@given(numbers64, st.one_of(st.binary(min_size=16, max_size=16), st.binary(max_size=40)))
def test_write_reply_matches_protobuf(epoch, results):
    raw = read_write_codec.encode_write_reply(epoch, bytearray(results))
    assert raw == data_pb2.WriteReply(map_epoch=epoch, results=results).SerializeToString()
    for form in (bytes, bytearray, memoryview):
        assert read_write_codec.decode_write_reply(form(raw)) == results


def read_by_protobuf(kind, raw, error):
    try:
        return kind.FromString(raw)
    except Exception:
        return error


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_changed_write_request_is_decoded_like_protobuf(data):
    raw = read_write_codec.encode_write_request(7, 3, bytes(range(60)), bytes(40), bytes(4), 9, 5)
    assert read_write_codec.decode_write_request(raw) is not None
    spoiled = bytearray(raw)
    places = st.sampled_from([0, 9, 10, 11, 12, 73, 74, 115, 116, 121, 130, *range(len(raw))])
    for place in data.draw(st.lists(places, max_size=3)):
        spoiled[place % len(raw)] = data.draw(st.integers(0, 255))
    found = read_write_codec.decode_write_request(bytes(spoiled))
    if found is not None:
        read = data_pb2.WriteRequest.FromString(bytes(spoiled))
        assert found == (
            read.map_epoch,
            read.target,
            *read.grants,
            read.writes,
            read.checksums,
            read.session,
            read.slot,
        )
        assert not read.versions


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_changed_messages_are_decoded_like_protobuf(data):
    request = read_write_codec.encode_read_request(7, 3, [bytes(range(60))], bytes(24))
    reply = read_write_codec.encode_read_reply(7, bytes(16), bytes(4))
    wrote = data_pb2.WriteReply(map_epoch=7, results=bytes(16)).SerializeToString()
    assert len(wrote) == read_write_codec.WRITE_REPLY_BYTES
    assert (
        len(request) == read_write_codec.READ_REQUEST_BYTES
        and len(reply) == read_write_codec.READ_REPLY_BYTES
    )
    for raw, kind, decode, error in (
        (request, data_pb2.ReadRequest, read_write_codec.decode_read_request, errors.InvalidRequest),
        (reply, data_pb2.ReadReply, read_write_codec.decode_read_reply, errors.CorruptFrame),
        (wrote, data_pb2.WriteReply, read_write_codec.decode_write_reply, errors.CorruptFrame),
    ):
        spoiled = bytearray(raw)
        for place in data.draw(
            st.lists(st.sampled_from([0, 9, 10, 11, 12, 27, 28, 73, 74, *range(len(raw))]), max_size=3)
        ):
            spoiled[place % len(raw)] = data.draw(st.integers(0, 255))
        expected = read_by_protobuf(kind, bytes(spoiled), error)
        if expected is error:
            with pytest.raises(error):
                decode(bytes(spoiled))
        elif kind is data_pb2.WriteReply:
            assert decode(bytes(spoiled)) == expected.results
        elif kind is data_pb2.ReadReply:
            assert decode(bytes(spoiled)) == (expected.results, expected.checksums)
        else:
            found = decode(bytes(spoiled))
            assert (*found[:2], list(found[2]), *found[3:]) == (
                expected.map_epoch,
                expected.target,
                list(expected.grants),
                expected.reads,
                expected.verify,
            )
