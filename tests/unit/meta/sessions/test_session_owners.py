"""Sessions belong to the caller that opened them, and a request slot to the request that it served."""

from __future__ import annotations

import os

import pytest

from nvpool.core.errors import AccessDenied, AlreadyExists, InvalidRequest, StaleSession
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.meta.operations.setattr import MODE
from nvpool.meta.requests.dispatch_table import CHANGES
from nvpool.meta.sessions.table import Sessions, mark_of
from nvpool.meta.state import records
from nvpool.meta.state.session_records import SessionRecord, decode_session, decode_slot, encode_session
from nvpool.rpc.access_control import RIGHTS
from nvpool.rpc.peer_roles import Credentials
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import PEER, DirectCall, ShardClient
from tests.unit.meta.server.test_metadata_service import Shard, run

UID = os.geteuid() + 1000
ALICE, MALLORY = PEER._replace(member="client/alice.1"), PEER._replace(member="client/mallory.1")
USER, OTHER_USER = (
    PEER._replace(credentials=Credentials(uid, frozenset((uid,)), 1)) for uid in (UID, UID + 1)
)
NODE = PEER._replace(member="node/alpha")
WITH_A_SESSION = {
    wire.META_OPEN_SESSION: pb.OpenSessionRequest,
    wire.META_RENEW_SESSION: pb.RenewSessionRequest,
    wire.META_CLOSE_SESSION: pb.CloseSessionRequest,
    wire.META_LOOKUP: pb.LookupRequest,
    wire.META_GETATTR: pb.GetAttrRequest,
    wire.META_READLINK: pb.ReadLinkRequest,
    wire.META_RELEASE: pb.ReleaseRequest,
    wire.META_LIST: pb.ListDirRequest,
    wire.META_STATFS: pb.StatFsRequest,
    wire.META_GETXATTR: pb.GetXattrRequest,
    wire.META_LISTXATTR: pb.ListXattrRequest,
    wire.META_SYNC: pb.SyncRequest,
    wire.META_LOCK_WAIT: pb.LockWaitRequest,
    wire.META_LOCKS: pb.LocksRequest,
    wire.META_WATCH: pb.WatchRequest,
    wire.META_LOOKUP_MANY: pb.LookupManyRequest,
    wire.META_GETATTR_MANY: pb.GetAttrManyRequest,
    wire.META_PARTS: pb.PartsRequest,
    wire.META_VOLUMES: pb.VolumesRequest,
    wire.META_VOLUME: pb.VolumeRequest,
    wire.META_VOLUME_ROOM: pb.VolumeRoomRequest,
    wire.META_TRASH: pb.TrashRequest,
}
"""Messages with a session number; changes have it in their `change`."""


class Peer(ShardClient):
    """A client with the identity of `peer`."""

    def __init__(self, shard: Shard, peer, session: int = 0, secret: bytes = b"") -> None:
        super().__init__(shard.service, 1000, 100)
        self.peer, self.session, self.secret = peer, session, secret

    def send(self, method, request, payload=b""):
        call = self.last = DirectCall(getattr(wire, "META_" + method), request.SerializeToString(), payload)
        call.peer = self.peer
        self.service.handle(call)
        return call


def scenario(function):
    def test():
        run(function)

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


def requests_of(session: int, secret: bytes):
    """(method, request) of every message that names a session."""
    for method, kind in WITH_A_SESSION.items():
        more = {"secret": secret} if method == wire.META_OPEN_SESSION else {}
        yield method, kind(session=session, **more)
    for method, (kind, _) in CHANGES.items():
        change = pb.Change(session=session, slot=9, sequence=1, uid=1000, gid=100)
        yield method, getattr(pb, kind.__name__)(change=change)


def test_table_covers_every_message_with_a_session():
    named = {method for method, right in RIGHTS.items() if "the session is the caller's own" in right.checks}
    assert named == (WITH_A_SESSION.keys() | CHANGES.keys()) - {wire.META_OPEN_SESSION}


@pytest.mark.parametrize(
    ("owner", "others"),
    [
        pytest.param(ALICE, (MALLORY, USER), id="client"),
        pytest.param(USER, (OTHER_USER, MALLORY), id="local user"),
        pytest.param(PEER, (MALLORY, USER), id="node"),
    ],
)
def test_session_of_another_owner_is_refused_in_each_message(owner, others):
    async def body(shard, _):
        await (await ShardClient(shard.service).begin()).setattr(ROOT, MODE, mode=0o777)
        mine = await Peer(shard, owner).begin(watch=True)
        await mine.file(ROOT, b"f")
        before = shard.kv.sequence
        for other in others:
            not_asked = shard.service.parts.callers.of(other).refused
            for method, request in requests_of(mine.session, mine.secret):
                call = DirectCall(method, request.SerializeToString())
                call.peer = other
                shard.service.handle(call)
                with pytest.raises((StaleSession, AccessDenied)) as raised:
                    await call.wait()
                assert method in not_asked or "belongs to another client" in str(raised.value), raised.value
        assert shard.kv.sequence == before and mine.session in shard.service.parts.sessions.by_number
        await mine.unlink(ROOT, b"f")

    run(body)


@scenario
async def test_node_may_act_for_the_session_of_a_client(shard, client):
    mine = await Peer(shard, ALICE).begin()
    node = Peer(shard, NODE, mine.session, mine.secret)
    await node.begin()
    await node.file(ROOT, b"f")
    assert shard.service.parts.sessions.by_number[mine.session].owner == "client/alice.1"
    await mine.getattr(ROOT)
    await node.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=mine.session))
    with pytest.raises(StaleSession):
        await mine.getattr(ROOT)


@scenario
async def test_owner_of_a_session_survives_a_restart(shard, client):
    mine = await Peer(shard, ALICE).begin()
    await shard.restart()
    mine.service = shard.service
    with pytest.raises(StaleSession):
        await Peer(shard, MALLORY, mine.session).getattr(ROOT)
    await mine.getattr(ROOT)


@scenario
async def test_session_without_an_owner_gets_its_first_user(shard, client):
    mine = await Peer(shard, ALICE).begin()
    key = records.session_key(mine.session)
    record = decode_session(shard.kv.get(key))
    assert record.owner == "client/alice.1"
    shard.kv.apply([(key, encode_session(record._replace(owner=None)))])  # as older software wrote it
    await shard.restart()
    mine.service = shard.service
    for user in (
        USER,
        PEER._replace(member="client/bound.0a1b2c3d.u1000-50"),
    ):  # older software served neither of them
        with pytest.raises(StaleSession):
            await Peer(shard, user, mine.session).getattr(ROOT)
    await mine.getattr(ROOT)
    with pytest.raises(StaleSession):
        await Peer(shard, MALLORY, mine.session).getattr(ROOT)


@scenario
async def test_lock_stays_when_another_ends_the_session(shard, client):
    mine = await Peer(shard, ALICE).begin()
    inode = (await mine.file(ROOT, b"f")).inode
    lock = pb.LockRequest(change=mine.change(), inode=inode, kind=2, owner=1, end=(1 << 63) - 1, mode=2)
    assert (await mine.ask("LOCK", lock)).granted
    with pytest.raises(StaleSession):
        await Peer(shard, MALLORY).ask("CLOSE_SESSION", pb.CloseSessionRequest(session=mine.session))
    theirs = await Peer(shard, MALLORY).begin()
    lock = pb.LockRequest(change=theirs.change(), inode=inode, kind=2, owner=1, end=(1 << 63) - 1, mode=2)
    assert not (await theirs.ask("LOCK", lock)).granted


def test_client_identity_of_another_owner_is_ignored():
    sessions = Sessions(None, 60.0, shard=1)
    arrived = sessions.arrive(
        2 << 48 | 5, SessionRecord(b"s" * 16, 0, "a", False, 77, "client/alice.1"), (5,), 0.0
    )
    for number, owner, brought in ((6, "client/mallory.1", []), (7, "client/alice.1", [arrived])):
        session, _ = sessions.opening(
            1 << 48 | number, SessionRecord(b"t" * 16, 0, "b", False, 77, owner), 0.0
        )
        sessions.add(session)
        assert [came for came, _ in sessions.migrated_duplicates()] == brought
    assert sessions.number_of(77) == 1 << 48 | 7


# -- slots -------------------------------------------------------------------------------------------------------------


async def make_and_steal(client):
    """A change of one name, and a different change with the same slot and sequence."""
    await client.file(ROOT, b"mine")
    client.sequences[0] -= 1
    return pb.CreateRequest(change=client.change(), parent=ROOT, name=b"other", mode=0o100644, exclusive=True)


@scenario
async def test_slot_does_not_answer_another_request(shard, client):
    other = await make_and_steal(client)
    with pytest.raises(InvalidRequest, match="was another one"):
        await client.ask("CREATE", other)
    client.sequences[0] -= 1
    with pytest.raises(InvalidRequest):
        await client.unlink(ROOT, b"mine")
    client.sequences[0] -= 1
    assert (await client.file(ROOT, b"mine")).inode and await client.names(ROOT) == {b"mine"}


@scenario
async def test_slot_distinguishes_requests_after_a_restart(shard, client):
    other = await make_and_steal(client)
    await shard.restart()
    client.service = shard.service
    with pytest.raises(InvalidRequest, match="was another one"):
        await client.ask("CREATE", other)
    client.sequences[0] -= 1
    assert (await client.file(ROOT, b"mine")).inode


@scenario
async def test_slot_does_not_give_a_refusal_to_another_request(shard, client):
    await client.file(ROOT, b"a")
    with pytest.raises(AlreadyExists):
        await client.file(ROOT, b"a")
    client.sequences[0] -= 1
    with pytest.raises(InvalidRequest, match="was another one"):
        await client.file(ROOT, b"b")
    client.sequences[0] -= 1
    with pytest.raises(AlreadyExists):
        await client.file(ROOT, b"a")


@scenario
async def test_slot_of_older_software_is_replayed_unchecked(shard, client):
    await client.file(ROOT, b"mine")
    key = records.slot_key(client.session, 0)
    found = decode_slot(shard.kv.get(key))
    assert found.mark is not None
    shard.kv.apply([(key, shard.kv.get(key)[:-9])])
    assert decode_slot(shard.kv.get(key)) == found._replace(mark=None)
    await shard.restart()
    client.service = shard.service
    client.sequences[0] -= 1
    assert (await client.file(ROOT, b"mine")).inode


@pytest.mark.parametrize(
    ("method", "request_", "same", "other"),
    [
        (wire.META_SETATTR, pb.SetAttrRequest(inode=5, valid=8, size=9), {"rights": 3}, {"size": 10}),
        (wire.META_ALLOCATE, pb.AllocateRequest(inode=5, length=9), {"rights": 3}, {"punch": True}),
        (
            wire.META_RESERVE,
            pb.ReserveRequest(inode=5, length=9, deferred=True),
            {"cut": 2, "own": 7},
            {"length": 10},
        ),
        (
            wire.META_CREATE,
            pb.CreateRequest(parent=5, name=b"f", mode=1),
            {"spread": True},
            {"exclusive": True},
        ),
        (wire.META_UNLINK, pb.UnlinkRequest(parent=5, name=b"f"), {"spread": True}, {"name": b"g"}),
        (
            wire.META_RENAME,
            pb.RenameRequest(parent=5, name=b"f", new_parent=6),
            {"spread": True},
            {"new_parent": 7},
        ),
    ],
)
def test_mark_depends_only_on_the_change(method, request_, same, other):
    def mark(
        epoch: int = 1, uid: int = 1, gid: int = 1, sequence: int = 1, of: int = method, **fields
    ) -> int:
        request = type(request_)(
            change=pb.Change(session=1, sequence=sequence, map_epoch=epoch, uid=uid, gid=gid)
        )
        request.MergeFrom(request_)
        request.MergeFrom(type(request_)(**fields))
        return mark_of(of, request, request.SerializeToString())

    assert mark() == mark(epoch=2) == mark(**same)
    assert len({mark(), mark(**other), mark(uid=2), mark(gid=2), mark(of=wire.META_LINK)}) == 5
