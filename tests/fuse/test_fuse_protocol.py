"""The kernel's FUSE protocol: the bytes of linux/fuse.h, both ways; malformed requests raise Malformed and nothing else."""

import json
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.fuse.protocol import constants, replies, requests
from nvpool.fuse.protocol.constants import Op
from nvpool.fuse.protocol.requests import FORMS, FuseRequest, Malformed
from nvpool.rpc.messages.direntries import DirectoryPage, pack_entry
from nvpool.rpc.v1.meta_pb2 import Attr
from tests.fuse.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden"
BYTES = {
    name: bytes.fromhex(text)
    for name, text in json.loads((GOLDEN / "fuse_protocol.json").read_text()).items()
}
"""The C compiler's layout of each structure, with field number times 0x0101 as values."""

IN = {
    Op.FORGET: "forget_in",
    Op.GETATTR: "getattr_in",
    Op.SETATTR: "setattr_in",
    Op.MKNOD: "mknod_in",
    Op.MKDIR: "mkdir_in",
    Op.RENAME: "rename_in",
    Op.RENAME2: "rename2_in",
    Op.LINK: "link_in",
    Op.OPEN: "open_in",
    Op.OPENDIR: "open_in",
    Op.READ: "read_in",
    Op.READDIR: "read_in",
    Op.READDIRPLUS: "read_in",
    Op.WRITE: "write_in",
    Op.RELEASE: "release_in",
    Op.RELEASEDIR: "release_in",
    Op.FSYNC: "fsync_in",
    Op.FSYNCDIR: "fsync_in",
    Op.GETXATTR: "getxattr_in",
    Op.LISTXATTR: "getxattr_in",
    Op.FLUSH: "flush_in",
    Op.GETLK: "lk_in",
    Op.SETLK: "lk_in",
    Op.SETLKW: "lk_in",
    Op.ACCESS: "access_in",
    Op.CREATE: "create_in",
    Op.TMPFILE: "create_in",
    Op.INTERRUPT: "interrupt_in",
    Op.BMAP: "bmap_in",
    Op.IOCTL: "ioctl_in",
    Op.POLL: "poll_in",
    Op.NOTIFY_REPLY: "notify_retrieve_in",
    Op.BATCH_FORGET: "batch_forget_in",
    Op.FALLOCATE: "fallocate_in",
    Op.LSEEK: "lseek_in",
    Op.COPY_FILE_RANGE: "copy_file_range_in",
    Op.COPY_FILE_RANGE_64: "copy_file_range_in",
    Op.SETUPMAPPING: "setupmapping_in",
    Op.REMOVEMAPPING: "removemapping_in",
    Op.STATX: "new_statx_in",
}


def steps(count):
    return tuple(0x0101 * number for number in range(1, count + 1))


def tail_of(opcode, body):
    """Names and bytes that belong to a body of golden numbers."""
    names = b"".join(b"n%d\0" % number for number in range(FORMS[opcode].names))
    rest = FORMS[opcode].rest
    record = {"forget": "forget_one", "unmap": "removemapping_one"}.get(rest)
    if record:
        return names + BYTES[record] * body.count
    return names + (bytes(getattr(body, rest)) if rest not in ("", "any") else b"")


def headed(opcode, rest, unique=77):
    return requests.HEADER.pack(requests.HEADER_BYTES + len(rest), opcode, unique, 5, 6, 7, 8, 0, 0) + rest


@pytest.mark.parametrize("opcode", IN, ids=lambda opcode: opcode.name)
def test_requests_have_the_kernels_structure(opcode):
    raw = BYTES[IN[opcode]]
    form = FORMS[opcode]
    body = form.body(*form.struct.unpack(raw))
    assert tuple(body) == steps(len(body))
    whole = headed(opcode, raw + tail_of(opcode, body))
    found = requests.decode(bytearray(whole), len(whole))
    assert found.body == body and found[:6] == (opcode, 77, 5, 6, 7, 8)
    assert requests.encode(found) == whole
    if form.rest in ("forget", "unmap"):
        assert found.payload == [(0x0101, 0x0202)] * body.count


def test_headers_have_the_kernels_structure():
    assert requests.HEADER.unpack(BYTES["in_header"]) == (*steps(8), 0)
    assert replies.HEADER.unpack(BYTES["out_header"]) == steps(3)


def test_init_has_64_flags():
    for length, flags in ((16, 0x0404), (64, 0x0404)):
        whole = headed(Op.INIT, BYTES["new_init_in"][:length])
        found = requests.decode(whole, len(whole))
        assert found.body == steps(4) and requests.flags_of(found) == flags
    raw = bytearray(BYTES["new_init_in"])
    raw[12:16] = struct.pack("=I", 1 << 30 | 1)
    whole = headed(Op.INIT, raw)
    assert requests.flags_of(requests.decode(whole, len(whole))) == 0x0505 << 32 | 1 << 30 | 1


def test_setxattr_has_two_forms():
    for raw, extended in ((BYTES["new_setxattr_in"][:8], False), (BYTES["new_setxattr_in"], True)):
        whole = headed(Op.SETXATTR, raw + b"user.x\0" + bytes(0x0101))
        found = requests.decode(whole, len(whole), setxattr_extended=extended)
        assert found.body[:2] == steps(2) and found.names == (b"user.x",) and len(found.payload) == 0x0101
        assert requests.encode(found, setxattr_extended=extended) == whole


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("attr", "attr_out"),
        ("entry", "entry_out"),
        ("open", "new_open_out"),
        ("count", "write_out"),
        ("count", "getxattr_out"),
        ("count", "poll_out"),
        ("space", "statfs_out"),
        ("lock", "lk_out"),
        ("number", "bmap_out"),
        ("number", "lseek_out"),
        ("ioctl", "ioctl_out"),
        ("init", "new_init_out"),
        ("statx", "new_statx_out"),
    ],
)
def test_replies_have_the_kernels_structure(shape, name):
    found = replies.read(shape, BYTES[name])
    assert tuple(found) == steps(len(found))


def test_create_reply_has_an_entry_and_an_open_file():
    found = replies.read("create", BYTES["entry_out"] + BYTES["new_open_out"])
    assert tuple(found) == (*steps(22), *steps(3))


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/usr/include/linux/fuse.h").exists(), reason="no C compiler here"
)
def test_golden_bytes_match_the_local_compiler(tmp_path):
    made = subprocess.run(
        ["cc", "-o", tmp_path / "made", GOLDEN / "fuse_protocol.c"], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("linux/fuse.h here is older than 7.38")
    said = subprocess.run([tmp_path / "made"], check=True, capture_output=True, text=True).stdout
    assert said == (GOLDEN / "fuse_protocol.json").read_text()


ATTR = Attr(
    inode=9,
    mode=0o100640,
    links=2,
    uid=3,
    gid=4,
    size=5 << 40,
    blocks=6,
    atime_ns=-1_500_000_001,
    mtime_ns=1_600_000_000_123_456_789,
    ctime_ns=1,
    rdev=0x12345678,
)


def body_of(answer, unique=77):
    """The body of a reply without an error."""
    found, error, body = replies.parse(answer)
    assert (found, error) == (unique, 0)
    return body


def test_attributes_have_times_before_1970_and_far_ahead():
    found = replies.read("attr", body_of(replies.attributes(77, ATTR, (3, 250))))
    assert (
        found.ino,
        found.size,
        found.blocks,
        found.mode,
        found.nlink,
        found.uid,
        found.gid,
        found.rdev,
    ) == (9, 5 << 40, 6, 0o100640, 2, 3, 4, 0x12345678)
    assert (found.attr_valid, found.attr_valid_nsec) == (3, 250)
    assert (found.atime, found.atimensec) == (-2, 499_999_999)
    assert (found.mtime, found.mtimensec, found.ctime, found.ctimensec) == (1_600_000_000, 123_456_789, 0, 1)


def test_replies_encode_their_arguments():
    entry = replies.read("entry", body_of(replies.entry(77, ATTR, (1, 2), (3, 4))))
    assert (entry.nodeid, entry.generation, entry.ino) == (9, 0, 9)
    assert (entry.entry_valid, entry.entry_valid_nsec, entry.attr_valid, entry.attr_valid_nsec) == (
        1,
        2,
        3,
        4,
    )
    absent = replies.read("entry", body_of(replies.absent(77, (1, 2))))
    assert absent.nodeid == 0 and (absent.entry_valid, absent.entry_valid_nsec) == (1, 2)
    created = replies.read("create", body_of(replies.created(77, ATTR, (1, 2), (3, 4), 1 << 60, 3)))
    assert created[:22] == tuple(entry) and (created.fh, created.open_flags) == (1 << 60, 3)
    assert replies.read("open", body_of(replies.opened(77, 12, 2, 9))) == (12, 2, 9)
    assert replies.read("space", body_of(replies.space(77, 1, 2, 3, 4, 5, 4096, 255))) == (
        1,
        2,
        3,
        4,
        5,
        4096,
        255,
        4096,
    )
    assert replies.read("count", body_of(replies.count(77, 1 << 20))) == (1 << 20,)
    assert replies.read("number", body_of(replies.number(77, 1 << 63))) == (1 << 63,)
    assert replies.read("lock", body_of(replies.lock(77, 1, 2, 3, 4))) == (1, 2, 3, 4)
    assert replies.read("ioctl", body_of(replies.ioctl(77, -1, 2, 3, 4))) == (-1, 2, 3, 4)
    stat = replies.read("statx", body_of(replies.statx(77, ATTR, (1, 2))))
    assert (stat.ino, stat.mode, stat.atime, stat.atimensec, stat.mtime) == (
        9,
        0o100640,
        -2,
        499_999_999,
        1_600_000_000,
    )
    assert (stat.rdev_major, stat.rdev_minor) == (0x456, 0x12378)
    assert body_of(replies.done(77)) == b""
    assert replies.parse(replies.failed(77, 5)) == (77, -5, b"")
    assert replies.data(77, 4096) == replies.HEADER.pack(4112, 0, 77)
    flags = 1 << 41 | 1 << 30 | 5
    init = replies.read(
        "init",
        body_of(
            replies.init(
                77,
                minor=45,
                max_readahead=1,
                flags=flags,
                max_background=2,
                congestion_threshold=3,
                max_write=4,
                max_pages=5,
            )
        ),
    )
    assert (init.major, init.minor, init.flags, init.flags2) == (7, 45, 1 << 30 | 5, 1 << 9)
    assert (init.max_write, init.max_pages, init.time_gran) == (4, 5, 1)


def test_notifications_have_the_kernels_structures():
    unpack = {
        "inval_inode": "=Qqq",
        "inval_entry": "=QII",
        "delete": "=QQI4x",
        "store": "=QQI4x",
        "retrieve": "=QQQI4x",
        "poll_wakeup": "=Q",
    }
    for name, form in unpack.items():
        assert struct.unpack(form, BYTES[f"notify_{name}_out"]) == steps(
            len(struct.unpack(form, BYTES[f"notify_{name}_out"]))
        )
    assert struct.unpack("=I4x8x", BYTES["new_prune_out"]) == steps(1)
    said = {
        notice: replies.parse(notice)[1:]
        for notice in (
            replies.poll_wakeup(1),
            replies.inval_inode(1, -1, 0),
            replies.inval_entry(1, b"ab", expire_only=True),
            replies.delete(1, 2, b"ab"),
            replies.retrieve(1, 2, 3, 4),
            replies.resend(),
            replies.inc_epoch(),
            replies.prune([1, 2]),
        )
    }
    assert all(replies.parse(notice)[0] == 0 for notice in said)
    assert [code for code, _ in said.values()] == [1, 2, 3, 6, 5, 7, 8, 9]
    assert said[replies.inval_entry(1, b"ab", expire_only=True)][1] == struct.pack("=QII", 1, 2, 1) + b"ab\0"
    assert said[replies.prune([1, 2])][1] == struct.pack("=IIQQQ", 2, 0, 0, 1, 2)
    assert replies.parse(replies.store(1, 2, 3) + b"abc")[1:] == (
        4,
        struct.pack("=QQII", 1, 2, 3, 0) + b"abc",
    )


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=255), st.integers(0, (1 << 64) - 1)), max_size=40),
    st.integers(300, 4096),
    st.booleans(),
)
def test_listing_has_only_entries_that_fit(entries, room, plus):
    listing = replies.ReaddirReply(room, plus, (1, 2), (3, 4))
    taken = []
    for name, cursor in entries:
        if not listing.add(name, ATTR, cursor):
            break
        taken.append((name, cursor))
    body = bytes(listing.taken())
    assert len(body) <= room and len(body) % 8 == 0
    found = replies.read_listing(body, plus)
    assert [(name, cursor) for name, _, cursor, _, _ in found] == taken
    assert all(inode == 9 and kind == 0o10 for _, inode, _, kind, _ in found)
    if plus:
        assert all(fields[0] == (0 if name in (b".", b"..") else 9) for name, _, _, _, fields in found)
    form = replies.DIRENT_PLUS_BYTES if plus else replies.DIRENT_BYTES
    if len(taken) < len(entries):
        assert len(body) + (form + len(entries[len(taken)][0]) + 7 & ~7) > room


LISTED_NAMES = st.binary(min_size=1, max_size=255).filter(lambda name: name not in (b".", b".."))


@given(
    st.lists(st.tuples(LISTED_NAMES, st.integers(1, 9), st.integers(-(1 << 62), 1 << 62)), max_size=40),
    st.integers(300, 4096),
    st.booleans(),
    st.sets(st.integers(1, 9)),
    st.integers(0, 3),
)
def test_batched_entries_equal_single_entries(entries, room, plus, unknown, first):
    attrs = [
        Attr(
            inode=inode,
            mode=0o100644,
            links=1,
            uid=2,
            gid=3,
            size=4,
            blocks=5,
            atime_ns=time,
            mtime_ns=6,
            ctime_ns=-time,
            rdev=7,
            change=1,
        )
        for _, inode, time in entries
    ]
    listed = DirectoryPage(
        b"".join(
            pack_entry(at, attr, False, name)
            for at, ((name, _, _), attr) in enumerate(zip(entries, attrs, strict=True))
        )
    )
    one_by_one, together, partly = (replies.ReaddirReply(room, plus, (1, 2), (3, 4)) for _ in range(3))
    until = first = min(first, len(entries))
    while until < len(entries) and one_by_one.add(entries[until][0], attrs[until], until):
        until += 1
    assert together.add_all(listed, first, ()) == until and bytes(together.taken()) == bytes(
        one_by_one.taken()
    )
    assert partly.add_all(listed, first, unknown) == until
    for (name, inode, cursor, kind, fields), entry in zip(
        replies.read_listing(bytes(partly.taken()), plus), list(listed)[first:until], strict=True
    ):
        assert (name, inode, cursor, kind) == (entry.name, entry.inode, entry.cursor, entry.kind)
        assert not plus or fields[0] == (0 if inode in unknown else inode)


# -- any request, whole and broken -------------------------------------------------------------------------------------------

NUMBERS = {
    "I": st.integers(0, (1 << 32) - 1),
    "Q": st.integers(0, (1 << 64) - 1),
    "q": st.integers(-(1 << 63), (1 << 63) - 1),
}
NAMES = st.binary(min_size=1, max_size=300).map(lambda name: name.replace(b"\0", b"0"))


@st.composite
def any_request(draw):
    opcode = draw(st.sampled_from(sorted(FORMS)))
    form = FORMS[opcode]
    letters = [letter for letter in form.struct.format if letter in NUMBERS]
    fields = [draw(NUMBERS[letter]) for letter in letters]
    body = form.body(*fields) if form.body else None
    payload = b""
    if form.rest in ("forget", "unmap"):
        payload = draw(st.lists(st.tuples(NUMBERS["Q"], NUMBERS["Q"]), max_size=20))
        body = body._replace(count=len(payload))
    elif form.rest:
        payload = draw(st.binary(max_size=500))
        if form.rest != "any":
            body = body._replace(**{form.rest: len(payload)})
    extension = draw(st.sampled_from([b"", b"", bytes(8), bytes(24)]))
    return FuseRequest(
        opcode,
        draw(NUMBERS["Q"]),
        draw(NUMBERS["Q"]),
        draw(NUMBERS["I"]),
        draw(NUMBERS["I"]),
        draw(NUMBERS["I"]),
        body,
        tuple(draw(NAMES) for _ in range(form.names)),
        payload,
        extension,
    )


def plain(request):
    payload = request.payload if isinstance(request.payload, list) else bytes(request.payload)
    return request._replace(payload=payload)


@given(any_request())
def test_requests_round_trip(request):
    raw = requests.encode(request)
    assert len(raw) >= requests.LENGTH_MIN[request.opcode]
    assert plain(requests.decode(raw, len(raw))) == request
    assert plain(requests.decode(bytearray(raw) + b"bytes of an older request", len(raw))) == request


SHORT_CUTS = {
    Op.READ: requests.decode_read,
    Op.READDIR: requests.decode_read,
    Op.READDIRPLUS: requests.decode_read,
    Op.GETATTR: requests.decode_getattr,
    Op.OPEN: requests.decode_open,
    Op.OPENDIR: requests.decode_open,
    Op.RELEASE: requests.decode_release,
    Op.RELEASEDIR: requests.decode_release,
    Op.FLUSH: requests.decode_release,
    Op.WRITE: requests.decode_write,
    Op.LOOKUP: requests.decode_lookup,
    Op.UNLINK: requests.decode_lookup,
    Op.RMDIR: requests.decode_lookup,
    Op.REMOVEXATTR: requests.decode_lookup,
    Op.CREATE: requests.decode_create,
    Op.GETXATTR: requests.decode_getxattr,
    Op.FORGET: requests.decode_forget,
}


@settings(max_examples=300)
@given(any_request().filter(lambda request: request.opcode in SHORT_CUTS))
def test_short_decoders_agree_with_decode(request):
    request = request._replace(extension=b"") if request.opcode not in (Op.LOOKUP, Op.CREATE) else request
    raw = requests.encode(request)
    found = SHORT_CUTS[request.opcode](bytearray(raw), len(raw))
    body = request.body or ()
    match request.opcode:
        case Op.LOOKUP | Op.UNLINK | Op.RMDIR | Op.REMOVEXATTR:
            assert found == (
                request.unique,
                request.node,
                request.names[0],
                request.uid,
                request.gid,
                request.pid,
            )
        case Op.CREATE:
            assert (
                found[0][2:7] == request[1:6] and found[0][9:] == tuple(body) and found[1] == request.names[0]
            )
        case Op.READ | Op.READDIR | Op.READDIRPLUS:
            assert found[2:7] == request[1:6] and found[9:] == body[:3]
        case Op.WRITE:
            assert found[2:7] == request[1:6] and found[9:] == (*body[:4], body[5])
            assert raw[requests.WRITE_BYTES :] == bytes(request.payload)
        case Op.GETXATTR:
            assert found == (request.unique, request.node, body.size, request.names[0])
        case Op.RELEASE | Op.RELEASEDIR:
            assert found[2:7] == request[1:6] and found[9:] == tuple(body)
        case Op.FLUSH:
            assert found[2:7] == request[1:6] and (found[9], found[12]) == (body.fh, body.lock_owner)
        case _:
            assert found[2:7] == request[1:6] and found[9:] == tuple(body)


def answerable(error, raw):
    """A malformed request can be answered if its header is complete."""
    return error.unique == (struct.unpack_from("=Q", raw, 8)[0] if len(raw) >= 40 else 0)


@settings(max_examples=300)
@given(any_request(), st.randoms(use_true_random=False))
def test_broken_request_is_malformed(request, chance):
    raw = bytearray(requests.encode(request))
    for _ in range(chance.randint(1, 4)):
        match chance.randrange(4):
            case 0 if raw:
                del raw[chance.randrange(len(raw)) :]
            case 1:
                raw += chance.randbytes(chance.randint(1, 40))
            case 2 if len(raw) >= 4:
                raw[:4] = struct.pack("=I", len(raw))
            case _ if raw:
                place = chance.randrange(len(raw))
                raw[place] = chance.randrange(256)
    for decode in (requests.decode, *set(SHORT_CUTS.values())):
        try:
            decode(raw, len(raw))
        except Malformed as error:
            assert answerable(error, raw)


def test_random_bytes_are_malformed():
    chance = random.Random(5)
    for _ in range(20_000):
        raw = bytearray(chance.randbytes(chance.choice((0, 3, 39, 40, 41, 80, 200))))
        if len(raw) >= 40 and chance.random() < 0.8:
            struct.pack_into("=II", raw, 0, len(raw), chance.randrange(60))
        for decode in (requests.decode, *set(SHORT_CUTS.values())):
            try:
                decode(raw, len(raw))
            except Malformed as error:
                assert answerable(error, raw)


def test_wrong_lengths_are_refused():
    read = headed(Op.READ, BYTES["read_in"])
    for raw, count in ((read, len(read) + 1), (read, len(read) - 1), (read + b"x", len(read) + 1)):
        with pytest.raises(Malformed):
            requests.decode(raw, count)
        with pytest.raises(Malformed):
            requests.decode_read(raw, count)
    for opcode, rest in (
        (Op.LOOKUP, b"no end"),
        (Op.LOOKUP, b"one\0two\0"),
        (Op.LOOKUP, b""),
        (Op.RENAME2, BYTES["rename2_in"] + b"a\0b"),
        (Op.WRITE, BYTES["write_in"] + bytes(5)),
        (Op.BATCH_FORGET, BYTES["batch_forget_in"] + bytes(16)),
        (Op.SETXATTR, struct.pack("=II", 9, 0) + b"user.x\0" + bytes(8)),
    ):
        raw = headed(opcode, rest)
        with pytest.raises(Malformed) as refused:
            requests.decode(raw, len(raw))
        assert refused.value.unique == 77
    with pytest.raises(ValueError, match="8 bytes"):
        requests.encode(FuseRequest(Op.STATFS, 1, 1, 0, 0, 0, extension=b"odd"))


def test_unknown_operation_is_decoded_as_far_as_possible():
    raw = headed(4096, b"whatever")
    found = requests.decode(raw, len(raw))
    assert (found.opcode, found.unique, found.body, found.payload) == (4096, 77, None, b"whatever")
    assert all(opcode in FORMS for opcode in Op) and max(Op) < constants.OP_COUNT


def test_reply_of_wrong_length_is_refused():
    for raw in (b"", b"x" * 15, replies.done(1) + b"x"):
        with pytest.raises(ValueError):
            replies.parse(raw)
    body = body_of(replies.entry(77, ATTR, (0, 0), (0, 0)))
    with pytest.raises(struct.error):
        replies.read("entry", body[:-1])
    listing = replies.ReaddirReply(400, True, (0, 0), (0, 0))
    assert listing.add(b"name", ATTR, 1)
    for cut in (1, 100, len(listing.taken()) - 6):
        with pytest.raises(ValueError):
            replies.read_listing(bytes(listing.taken())[:cut], True)


@pytest.mark.parametrize(
    ("value", "said"), [(0, (0, 0)), (1.5, (1, 500_000_000)), (1e-9, (0, 1)), (3600, (3600, 0))]
)
def test_timeouts_are_seconds_and_nanoseconds(value, said):
    assert replies.seconds(value) == said
