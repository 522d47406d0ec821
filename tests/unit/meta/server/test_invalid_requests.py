"""Requests that our clients never send: refused, without changes. Most were found by `make fuzz`."""

from __future__ import annotations

import pytest

from nvpool.core.errors import InvalidRequest, NotADirectory
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.meta.service_auth import ServiceRight
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
