"""Requests that our clients never send: refused, without changes. Most were found by `make fuzz`."""

from __future__ import annotations

import pytest

from nvpool.core.errors import InvalidRequest, NameTooLong, NotADirectory
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.meta.operations.listing import LIST_LIMIT_MAX
from nvpool.meta.service_auth import ServiceRight
from nvpool.meta.sessions.lock_service import TICKETS_MAX
from nvpool.meta.sessions.table import LISTED_INODES_MAX
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall
from tests.unit.meta.server.test_metadata_service import SECRET, scenario


@scenario
async def test_file_is_refused_as_a_directory(shard, client):
    file = await client.file(ROOT, b"f")
    with pytest.raises(NotADirectory):
        await client.link(file.inode, file.inode, b"g")
    assert (await client.getattr(file.inode)).attr.links == 1
    assert not await client.fsck()


@scenario
async def test_lock_of_invalid_records_is_refused(shard, client):
    right = ServiceRight(shard.clock, SECRET, 1)()
    span = pb.SpanId(shard=1, incarnation=1, number=1)
    for request in (
        pb.HoldRequest(id=span, births=[4096]),
        pb.HoldRequest(id=span, keys=[b""]),
        pb.HoldRequest(id=span, looks=[b"x"]),
        pb.HoldRequest(id=span, ranges=[pb.SpanRange(first=b"")]),
        pb.HoldRequest(id=pb.SpanId(shard=1 << 16)),
        pb.HoldRequest(),
        pb.HoldRequest(id=span, named=[(1 << 64) - 1]),
    ):
        request.authority = right
        call = DirectCall(wire.META_HOLD, request.SerializeToString())
        shard.service.handle(call)
        with pytest.raises(InvalidRequest):
            await call.wait()
    assert (await client.file(ROOT, b"f")).inode


@scenario
async def test_walk_from_an_unknown_inode_is_refused(shard, client):
    for request in (pb.FsckClimbRequest(trace=True), pb.FsckClimbRequest(loose=5, parent=(1 << 64) - 1)):
        call = DirectCall(wire.META_FSCK_CLIMB, request.SerializeToString())
        shard.service.handle(call)
        with pytest.raises(InvalidRequest):
            await call.wait()


@scenario
async def test_kept_refusal_does_not_keep_the_request(shard, client):
    name = b"\xff/" * 50_000
    with pytest.raises(NameTooLong):
        await client.file(ROOT, name)
    kept = shard.service.parts.sessions.get(client.session).slots[0].error
    assert isinstance(kept, NameTooLong) and len(str(kept)) < 100
    assert kept.__traceback__ is kept.__context__ is None  # they would lead to the request
    client.sequences[0] -= 1
    with pytest.raises(NameTooLong):
        await client.file(ROOT, name)


@scenario
async def test_kept_refusal_has_a_short_text(shard, client):
    session = shard.service.parts.sessions.get(client.session)
    slot = shard.service.parts.sessions.slot(session, 3)
    shard.service.slot_replays.keep_refusal(
        session, slot, 1, 0, InvalidRequest("x" * 100_000, retry_after_s=2.0)
    )
    assert type(slot.error) is InvalidRequest
    assert len(str(slot.error)) == 2000 and slot.error.retry_after_s == 2.0


@scenario
async def test_lists_beyond_their_limits_are_refused(shard, client):
    session, inodes = client.session, bytes(8 * (LISTED_INODES_MAX + 1))
    tickets, slots = bytes(8 * (TICKETS_MAX + 1)), [0] * (SLOTS_PER_SESSION + 1)
    directories = [pb.NamesIn(parent=ROOT)] * (LIST_LIMIT_MAX + 1)
    for method, request in (
        ("RENEW_SESSION", pb.RenewSessionRequest(session=session, opened=inodes)),
        ("RENEW_SESSION", pb.RenewSessionRequest(session=session, released=inodes)),
        ("RELEASE", pb.ReleaseRequest(session=session, inodes=inodes)),
        ("RELEASE", pb.ReleaseRequest(session=session, slots=slots)),
        ("OPEN_SESSION", pb.OpenSessionRequest(session=session, secret=client.secret, slots=slots)),
        ("LOCK_WAIT", pb.LockWaitRequest(session=session, tickets=tickets)),
        ("LOCK_WAIT", pb.LockWaitRequest(session=session, given_up=tickets)),
        ("LOOKUP_MANY", pb.LookupManyRequest(session=session, directories=directories)),
        ("NAMES", pb.NamesRequest(inodes=(5).to_bytes(8, "little") * 513)),
    ):
        with pytest.raises(InvalidRequest):
            await client.ask(method, request)
    assert not shard.service.parts.sessions.get(session).opens
