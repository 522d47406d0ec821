"""Table of methods: each method has an entry, and each kind of peer may call only its methods of a service."""

from __future__ import annotations

import asyncio
import os
import struct

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import AccessConfig, Config
from nvpool.core.errors import AccessDenied, InvalidRequest, NotSupported, StaleGrant
from nvpool.core.grants import READ, WRITE, Grant, sign
from nvpool.host.pool_directory import PoolDirectory
from nvpool.kv.memory_engine import MemoryKv
from nvpool.kv.options import LmdbOptions
from nvpool.meta.server.service import MetaService
from nvpool.meta.server.shard_member import MemberOptions, ShardMember
from nvpool.node.supervisor import Supervisor
from nvpool.rpc.access_control import RIGHTS, Callers, LeastRight
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.peer_roles import Credentials, Peer, Role
from nvpool.rpc.v1 import data_pb2, wire_pb2
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.runtime.daemon_process import Stop
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.server.service import StoreService
from nvpool.testing.contracts.coordinator import first_map
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.meta_shard import DirectCall

SECRET = b"s" * 32
OPERATORS = 4711
OTHER_UID = os.geteuid() + 1000
ALICE, MALLORY = "client/alice.0a1b2c3d", "client/mallory.0a1b2c3d"
NODE_AFAR = Peer("n", "10.0.0.1:1", False, "node/alpha")
CLIENT = Peer("c", "10.0.0.2:1", False, ALICE)
ROOT_HERE = Peer("r", "unix", True, "", Credentials(0, frozenset((0,)), 1))
OPERATOR_HERE = Peer("o", "unix", True, "", Credentials(OTHER_UID, frozenset((OTHER_UID, OPERATORS)), 1))
USER_HERE = Peer("u", "unix", True, "", Credentials(OTHER_UID, frozenset((OTHER_UID,)), 1))
BOUND = Peer("b", "10.0.0.4:1", False, "client/bob.0a1b2c3d.u1000-50")
SQUASHED = Peer("q", "10.0.0.5:1", False, "client/eve.0a1b2c3d.squash-root")
UNAUTHENTICATED = Peer("s", "10.0.0.3:1", False)
CLIENTS = {NODE_AFAR, CLIENT, BOUND, SQUASHED, ROOT_HERE, OPERATOR_HERE}
MAY = {
    LeastRight.UNAUTHENTICATED: {*CLIENTS, USER_HERE, UNAUTHENTICATED},
    LeastRight.USER: {*CLIENTS, USER_HERE},
    LeastRight.VOLUME: {*CLIENTS, USER_HERE},
    LeastRight.MEMBER: CLIENTS,
    LeastRight.VOLUME_OF_CLIENT: CLIENTS,
    LeastRight.NODE: {NODE_AFAR, ROOT_HERE, OPERATOR_HERE},
    LeastRight.OPERATOR: {ROOT_HERE, OPERATOR_HERE},
}
METHODS = [method for method in Method.values() if method != wire_pb2.METHOD_NONE]
SERVICE_ONLY = """
DATA_CUT DATA_REMOVE DATA_LIST DATA_SCRUB DATA_PEER_WRITE DATA_VERSIONS DATA_FETCH DATA_SCRUB_ORDER DATA_PULL DATA_USE
META_DUMP META_LOAD META_FSCK META_FSCK_SUMS META_FSCK_CLIMB META_COLLECT META_MOMENT META_SESSIONS
META_SHIP META_FOLLOW META_ALIVE META_STANDBY META_TAKE_RIGHT META_HOLD META_SETTLE META_OUTCOME META_MOVE META_MOVED
POOL_ALIVE POOL_KEYS
""".split()
"""Methods that clients must never be allowed to call, whatever the table says."""
FOR_USERS = """
DATA_READ DATA_WRITE DATA_FLUSH DATA_EXTENTS DATA_COPY DATA_LOCATE DATA_STATUS
META_OPEN_SESSION META_RENEW_SESSION META_CLOSE_SESSION META_RELEASE META_WATCH META_LOCK_WAIT META_LIST META_LOOKUP
META_LOOKUP_MANY META_GETATTR META_GETATTR_MANY META_READLINK META_GETXATTR META_LISTXATTR META_SETXATTR META_REMOVEXATTR
META_STATFS META_SYNC META_LOCK META_LOCKS META_SETATTR META_ALLOCATE META_CREATE META_UNLINK META_RMDIR META_RENAME META_LINK
META_OPEN META_REPORT META_RESERVE META_VOLUME META_VOLUME_ROOM POOL_MAP POOL_AUTHORITY POOL_JOIN
""".split()
"""Methods of local users; the META_* methods among them are also those of a client bound to one user."""


def call_of(method: int, peer: Peer, message: bytes = b"", payload: bytes = b"") -> DirectCall:
    call = DirectCall(method, message, payload)
    call.peer = peer
    return call


async def is_refused(handle, call: DirectCall) -> bool:
    """Whether the call was refused because of its caller; the contents of the message do not matter."""
    try:
        handle(call)
        if call.answer is None:
            await asyncio.sleep(0)
        error = call.answer
    except Exception as raised:
        error = raised
    return isinstance(error, AccessDenied) and str(error).endswith(
        (
            "run the command on a node",
            "a certificate of this pool",
            "do it there",
            "operator group (access.operators)",
        )
    )


async def check_all(methods, handle, peers) -> None:
    for method in methods:
        for peer in peers:
            wanted = peer not in MAY[RIGHTS[method].least] or (
                peer in (BOUND, SQUASHED) and 100 <= method < 200 and Method.Name(method) not in FOR_USERS
            )
            assert await is_refused(handle, call_of(method, peer)) == wanted, (Method.Name(method), peer)


LOCAL_PEERS = (NODE_AFAR, CLIENT, BOUND, SQUASHED, ROOT_HERE, OPERATOR_HERE, USER_HERE)


def test_each_method_has_an_entry():
    assert sorted(RIGHTS) == sorted(METHODS)
    assert all(right.checks for right in RIGHTS.values())


def test_service_only_methods_are_for_nodes():
    assert {RIGHTS[Method.Value(name)].least for name in SERVICE_ONLY} == {LeastRight.NODE}


def test_local_users_may_call_only_their_methods():
    refused = Callers(OPERATORS).of(USER_HERE).refused
    assert {Method.Name(method) for method in METHODS if method not in refused} == set(FOR_USERS)


def test_refused_user_gets_the_reason():
    async def main() -> None:
        callers = Callers()
        for method in (
            wire_pb2.POOL_CHANGE,
            wire_pb2.POOL_STATUS,
            wire_pb2.META_DUMP,
            wire_pb2.PROCESS_METRICS,
        ):
            with pytest.raises(AccessDenied, match=f"user {OTHER_UID} .*{Method.Name(method)}.* root"):
                callers.check(call_of(method, USER_HERE))

    asyncio.run(main())


def test_callers_know_the_user_they_act_as():
    callers = Callers(OPERATORS)
    assert all(
        callers.of(peer).user is None
        for peer in (NODE_AFAR, CLIENT, ROOT_HERE, OPERATOR_HERE, UNAUTHENTICATED)
    )
    assert callers.of(USER_HERE).user == USER_HERE.credentials
    assert callers.of(BOUND)[:2] == (Role.CLIENT, BOUND.member) and callers.of(BOUND).user.uid == 1000


def test_callers_are_named_by_certificate_and_uid():
    callers = Callers(OPERATORS)
    assert [callers.of(peer)[:2] for peer in (NODE_AFAR, CLIENT, ROOT_HERE, OPERATOR_HERE, USER_HERE)] == [
        (Role.NODE, ""),
        (Role.CLIENT, ALICE),
        (Role.NODE, ""),
        (Role.NODE, ""),
        (Role.USER, f"uid/{OTHER_UID}"),
    ]
    assert Callers().of(OPERATOR_HERE).role == Role.USER
    assert (
        callers.of(UNAUTHENTICATED).role == Role.NODE
        and Callers(admit_unauthenticated=True).of(UNAUTHENTICATED).role == Role.UNAUTHENTICATED
    )


def test_long_messages_of_clients_are_refused():
    callers = Callers()
    for method, most in ((Method.META_RELEASE, 136 << 10), (Method.META_LOOKUP_MANY, 384 << 10)):
        callers.check(DirectCall(method, bytes(most), peer=CLIENT))
        callers.check(DirectCall(method, bytes(most + 1), peer=NODE_AFAR))
        for peer in (CLIENT, USER_HERE):
            with pytest.raises(InvalidRequest, match=f"has at most {most} bytes.*send several shorter ones"):
                callers.check(DirectCall(method, bytes(most + 1), peer=peer))
    callers.check(DirectCall(Method.META_OPEN_SESSION, bytes(4 << 20), peer=CLIENT))
    with pytest.raises(InvalidRequest, match="method 250 has at most"):  # which does not exist
        callers.check(DirectCall(250, bytes(1 << 20), peer=CLIENT))


def test_callers_of_many_connections_are_distinguished():
    callers = Callers()
    for number in range(10_000):  # their addresses in memory are reused
        member = f"client/{number % 7}"
        assert callers.of(Peer(str(number), "", False, member)).owner == member


def test_metadata_service_checks_its_callers():
    async def main() -> None:
        service = MetaService(MemoryKv(), grant_secret=SECRET, callers=Callers(OPERATORS))
        await service.start()
        try:
            await check_all(
                [method for method in METHODS if 100 <= method < 200], service.handle, LOCAL_PEERS
            )
        finally:
            await service.close()

    asyncio.run(main())


def test_store_checks_its_callers():
    async def main() -> None:
        service = StoreService(
            MemoryChunkStore(1 << 24), target=1, grant_secret=SECRET, callers=Callers(OPERATORS)
        )
        try:
            await check_all([method for method in METHODS if method < 100], service.handle, LOCAL_PEERS)
        finally:
            await service.close()

    asyncio.run(main())


def test_standby_checks_its_callers(tmp_path):
    async def main() -> None:
        options = MemberOptions(1, 1, 1, tmp_path, LmdbOptions(), SECRET, callers=Callers(OPERATORS))
        member = ShardMember(options, first_map(), None, SYSTEM_CLOCK, None, None)
        member.stand_by()
        try:
            await check_all(
                (wire_pb2.META_SHIP, wire_pb2.META_FOLLOW, wire_pb2.META_STATUS), member.handle, LOCAL_PEERS
            )
        finally:
            await member.close()

    asyncio.run(main())


def test_primary_checks_callers_of_log_shipping(tmp_path):
    async def main() -> None:
        options = MemberOptions(1, 1, 0, tmp_path, LmdbOptions(), SECRET, callers=Callers(OPERATORS))
        member = ShardMember(options, first_map(), None, SYSTEM_CLOCK, None, None)
        await check_all((wire_pb2.META_SHIP, wire_pb2.META_FOLLOW), member._handle_behind_gate, LOCAL_PEERS)

    asyncio.run(main())


def test_supervisor_checks_its_callers(tmp_path):
    async def main() -> None:
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), first_map())
        config = Config(access=AccessConfig(operators=str(OPERATORS)))
        supervisor = Supervisor(PoolDirectory(tmp_path), config, coordinator, Stop(), asyncio.Future())
        methods = [method for method in METHODS if method >= 200]
        try:
            await check_all(methods, supervisor.handle, LOCAL_PEERS)
            await check_all(
                methods, supervisor.handle_secured, (NODE_AFAR, CLIENT, BOUND, SQUASHED, UNAUTHENTICATED)
            )
        finally:
            await supervisor.close()

    asyncio.run(main())


def test_unknown_method_is_refused_for_nodes_and_clients():
    async def main() -> None:
        async with InProcessPool() as pool:
            meta = next(iter(pool.metas.values()))
            for peer in (NODE_AFAR, CLIENT):
                call = call_of(9999, peer)
                meta.handle(call)
                assert isinstance(call.answer, NotSupported)

    asyncio.run(main())


def test_store_describes_chunks_only_with_an_access_token():
    async def main() -> None:
        service = StoreService(MemoryChunkStore(1 << 24), target=1, grant_secret=SECRET)
        ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + 60_000
        try:
            for peer, inode, wanted in (
                (CLIENT, 0, StaleGrant),
                (CLIENT, 6, StaleGrant),
                (CLIENT, 5, None),
                (USER_HERE, 0, AccessDenied),
                (NODE_AFAR, 0, None),
            ):
                grant = sign(Grant(READ | WRITE, 0, 1, inode, 0, ends_ms), SECRET) if inode else b""
                request = data_pb2.DescribeRequest(target=1, inode=5, grant=grant)
                call = call_of(wire_pb2.DATA_DESCRIBE, peer, request.SerializeToString())
                if wanted is None:
                    service.handle(call)
                    assert isinstance(call.answer, tuple)
                else:
                    with pytest.raises(wanted):
                        service.handle(call)
        finally:
            await service.close()

    asyncio.run(main())


def samples(session: int, slot: int, volume: int, inode: int) -> dict[int, object]:
    """A request of each method about entries of a volume, from a caller that knows their numbers."""
    change = pb.Change(session=session, slot=slot, sequence=1)
    return {
        wire_pb2.META_NAMES: pb.NamesRequest(inodes=read_write_codec.pack_inodes([inode]), directory=volume),
        wire_pb2.META_LOOKUP: pb.LookupRequest(session=session, parent=volume, name=b"f", rights=READ),
        wire_pb2.META_GETATTR: pb.GetAttrRequest(session=session, inode=inode, rights=READ),
        wire_pb2.META_SETATTR: pb.SetAttrRequest(change=change, inode=inode, valid=1, mode=0o600),
        wire_pb2.META_READLINK: pb.ReadLinkRequest(session=session, inode=inode),
        wire_pb2.META_CREATE: pb.CreateRequest(
            change=change, parent=volume, name=b"g", mode=0o100644, open=True, rights=READ
        ),
        wire_pb2.META_LINK: pb.LinkRequest(change=change, inode=inode, parent=volume, name=b"g"),
        wire_pb2.META_OPEN: pb.OpenRequest(change=change, inode=inode, rights=READ),
        wire_pb2.META_REPORT: pb.ReportRequest(change=change, inode=inode, end=1000, wrote=True),
        wire_pb2.META_RESERVE: pb.ReserveRequest(change=change, inode=inode, length=10),
        wire_pb2.META_LIST: pb.ListDirRequest(session=session, inode=volume),
        wire_pb2.META_GETXATTR: pb.GetXattrRequest(session=session, inode=inode, name=b"user.x"),
        wire_pb2.META_SETXATTR: pb.SetXattrRequest(change=change, inode=inode, name=b"user.x", value=b"1"),
        wire_pb2.META_LISTXATTR: pb.ListXattrRequest(session=session, inode=inode),
        wire_pb2.META_REMOVEXATTR: pb.RemoveXattrRequest(change=change, inode=inode, name=b"user.x"),
        wire_pb2.META_LOCK: pb.LockRequest(
            change=change, inode=inode, kind=2, owner=1, end=(1 << 63) - 1, mode=2
        ),
        wire_pb2.META_LOCKS: pb.LocksRequest(session=session, inode=inode),
        wire_pb2.META_ALLOCATE: pb.AllocateRequest(change=change, inode=inode, length=1 << 20, grow=True),
        wire_pb2.META_LOOKUP_MANY: pb.LookupManyRequest(
            session=session, directories=[pb.NamesIn(parent=volume, names=[b"f"])]
        ),
        wire_pb2.META_GETATTR_MANY: pb.GetAttrManyRequest(
            session=session, inodes=struct.pack("<Q", inode), rights=READ
        ),
        wire_pb2.META_VOLUME_ROOM: pb.VolumeRoomRequest(
            session=session, inode=volume, bytes=1 << 20, needed=1
        ),
        wire_pb2.META_TRASH: pb.TrashRequest(session=session, inode=volume, action=pb.TrashRequest.LIST),
        wire_pb2.META_RENAME: pb.RenameRequest(
            change=change, parent=volume, name=b"f", new_parent=volume, new_name=b"g"
        ),
        wire_pb2.META_UNLINK: pb.UnlinkRequest(change=change, parent=volume, name=b"h"),
        wire_pb2.META_RMDIR: pb.UnlinkRequest(change=change, parent=volume, name=b"d"),
    }


REVEALS_NOTHING = {
    wire_pb2.META_LOOKUP_MANY: lambda raw: (
        pb.LookupManyReply.FromString(raw).found[0].error == AccessDenied.wire_code
    ),
    wire_pb2.META_GETATTR_MANY: lambda raw: not pb.GetAttrManyReply.FromString(raw).packed,
    wire_pb2.META_NAMES: lambda raw: not pb.NamesReply.FromString(raw).names,
}
"""Methods about many inodes: inodes that the caller may not see are left out."""


def test_client_without_a_volume_right_gets_no_data():
    async def main() -> None:
        async with InProcessPool() as pool:
            client = await pool.client(options=ClientOptions(deadline_s=10.0))
            fs, meta = AsyncFileSystem(client, Caller(0, 0)), next(iter(pool.metas.values()))
            made = await fs.volumes.create("secret")
            await fs.write_bytes("/volumes/secret/f", b"1")
            await fs.mkdir("/volumes/secret/d")
            inode = (await fs.stat("/volumes/secret/f")).st_ino
            await fs.volumes.grant("secret", ALICE, "rw")
            await fs.write_bytes("/volumes/secret/h", b"1")
            answers: dict[str, dict[int, object]] = {}
            for member in (MALLORY, ALICE):
                peer = Peer(member, "", False, member)
                opening = call_of(wire_pb2.META_OPEN_SESSION, peer)
                meta.handle(opening)
                session = pb.OpenSessionReply.FromString((await opening.wait())[0]).session
                answers[member] = {}
                for slot, (method, request) in enumerate(samples(session, 0, made.inode, inode).items()):
                    request = samples(session, slot, made.inode, inode)[method]
                    call = call_of(method, peer, request.SerializeToString())
                    meta.handle(call)
                    try:
                        answers[member][method] = (await call.wait())[0]
                    except Exception as error:
                        answers[member][method] = error
            walked = {
                method
                for method, right in RIGHTS.items()
                if right.least in (LeastRight.VOLUME, LeastRight.VOLUME_OF_CLIENT) and method >= 100
            }
            assert set(answers[MALLORY]) == walked
            for method, answer in answers[MALLORY].items():
                name = Method.Name(method)
                if method in REVEALS_NOTHING:
                    assert REVEALS_NOTHING[method](answer), name
                    assert not REVEALS_NOTHING[method](answers[ALICE][method]), name
                else:
                    assert isinstance(answer, AccessDenied), (name, answer)
                    assert not isinstance(answers[ALICE][method], AccessDenied), (
                        name,
                        answers[ALICE][method],
                    )

    asyncio.run(main())


def test_snapshot_barrier_without_a_number_is_refused():
    async def main() -> None:
        async with InProcessPool() as pool:
            meta = next(iter(pool.metas.values()))
            for stage in (pb.MomentRequest.QUIET, pb.MomentRequest.TAKE, pb.MomentRequest.NONE, 77):
                call = call_of(
                    wire_pb2.META_MOMENT, ROOT_HERE, pb.MomentRequest(stage=stage).SerializeToString()
                )
                meta.handle(call)
                with pytest.raises(InvalidRequest):
                    await call.wait()
                assert not meta.parts.moment.changes_wait and not meta.parts.moment.spans_wait

    asyncio.run(main())
