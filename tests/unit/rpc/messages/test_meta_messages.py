"""Typed messages of the metadata service and of chain members: same bytes and same values as protobuf."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from nvpool.rpc.messages import meta_messages, peer_messages
from nvpool.rpc.v1 import data_pb2, meta_pb2

NAMES = [
    "Change",
    "Attr",
    "Entry",
    "LookupRequest",
    "GetAttrRequest",
    "CreateRequest",
    "CreateReply",
    "UnlinkRequest",
    "UnlinkReply",
    "ReportRequest",
    "AttrReply",
]
PEER_NAMES = ["PeerWriteRequest", "PeerWriteReply"]
VALUES = {
    Field.TYPE_UINT32: st.one_of(st.just(0), st.integers(0, 300), st.integers(0, (1 << 32) - 1)),
    Field.TYPE_UINT64: st.one_of(st.just(0), st.integers(0, 300), st.integers(0, (1 << 64) - 1)),
    Field.TYPE_FIXED64: st.one_of(st.just(0), st.integers(0, (1 << 64) - 1)),
    Field.TYPE_SFIXED64: st.one_of(st.just(0), st.integers(-(1 << 63), (1 << 63) - 1)),
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_BYTES: st.binary(max_size=200),
}


def messages_of(name: str) -> st.SearchStrategy:
    proto = data_pb2 if name in PEER_NAMES else meta_pb2
    fields = proto.DESCRIPTOR.message_types_by_name[name].fields
    parts = {
        field.name: st.one_of(st.none(), messages_of(field.message_type.name))
        if field.type == Field.TYPE_MESSAGE
        else VALUES[field.type]
        for field in fields
        if field.type != Field.TYPE_MESSAGE or field.message_type.name in NAMES
    }
    return st.builds(getattr(proto, name), **parts)


def class_of(message) -> type:
    """Typed class of a protobuf message."""
    name = type(message).__name__
    if name in PEER_NAMES:
        return getattr(peer_messages, name)
    return meta_messages.InodeEntry if name == "Entry" else getattr(meta_messages, name)


any_message = st.sampled_from([*NAMES, *PEER_NAMES]).flatmap(messages_of)


def values_of(message, expected):
    """Compare all fields of a typed message with those of a protobuf message."""
    for field in expected.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type != Field.TYPE_MESSAGE:
            assert value == getattr(expected, field.name), field.name
        elif field.message_type.name in NAMES and (value is not None or expected.HasField(field.name)):
            values_of(value, getattr(expected, field.name))


@given(any_message)
def test_decoded_and_encoded_like_protobuf(expected):
    raw = expected.SerializeToString()
    message = class_of(expected).FromString(raw)
    values_of(message, expected)
    copy = type(expected)()
    message.copy_to(copy)
    change = expected.DESCRIPTOR.fields_by_name.get("change")
    if change is None or change.type != Field.TYPE_MESSAGE or expected.HasField("change"):
        assert message.SerializeToString() == raw
        assert copy == expected


@given(
    any_message,
    st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(0, 255), st.sampled_from(("change", "insert", "cut", "double"))
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_broken_message_is_decoded_like_protobuf_or_refused(expected, faults):
    raw = bytearray(expected.SerializeToString())
    for at, byte, what in faults:
        at = at % (len(raw) + 1)
        if what == "change" and at < len(raw):
            raw[at] = byte
        elif what == "insert":
            raw.insert(at, byte)
        elif what == "cut":
            del raw[at : at + byte % 4]
        elif what == "double":
            raw[at:at] = raw[at : at + byte % 12]
    typed = class_of(expected)
    try:
        read = type(expected).FromString(bytes(raw))
    except DecodeError:
        with pytest.raises(DecodeError):
            typed.FromString(bytes(raw))
    else:
        values_of(typed.FromString(bytes(raw)), read)


@given(st.sampled_from(NAMES).flatmap(lambda name: st.lists(messages_of(name), min_size=2, max_size=3)))
def test_joined_messages_decode_as_one(parts):
    """As the shard joins the stored part of a reply, a lease and the directory."""
    raw = b"".join(part.SerializeToString() for part in parts)
    values_of(class_of(parts[0]).FromString(raw), type(parts[0]).FromString(raw))


def test_generated_files_are_up_to_date():
    tool = Path(__file__).parents[4] / "tools" / "generate_codec.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
