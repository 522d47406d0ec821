"""Volume rights: a client without a right is shown no part of a volume by any request to a shard."""

from __future__ import annotations

import asyncio

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import AccessDenied
from nvpool.core.grants import GRANT_BYTES
from nvpool.core.ids import ROOT_INODE
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.direntries import ENTRY
from nvpool.rpc.peer_roles import Credentials
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.meta_shard import PEER, DirectCall

GRANTED, UNGRANTED, NODE, NOBODY = "client/reader.0a1b2c3d", "client/other.0a1b2c3d", "node/1", ""
WRITER = "client/writer.0a1b2c3d"
LOCAL_USER = Credentials(4711, frozenset((4711,)), 1)
WHOLE = (
    (wire.META_MOMENT, pb.MomentRequest(id=1, stage=pb.MomentRequest.QUIET)),
    (wire.META_DUMP, pb.DumpRequest()),
    (wire.META_FSCK, pb.FsckRequest()),
    (wire.META_FSCK_SUMS, pb.FsckSumsRequest()),
    (wire.META_FSCK_CLIMB, pb.FsckClimbRequest()),
    (wire.META_LOAD, pb.LoadRequest()),
)


async def asked(meta, member: str, method: int, request) -> str:
    """Reply of the shard: "denied", or anything else."""
    call = DirectCall(method, request.SerializeToString())
    call.peer = PEER._replace(member=member)
    meta.handle(call)
    try:
        await call.wait()
    except AccessDenied:
        return "denied"
    except Exception as error:
        return type(error).__name__
    return "done"


async def session_of(meta, member: str) -> int:
    """A new session of that member."""
    call = DirectCall(
        wire.META_OPEN_SESSION, pb.OpenSessionRequest(client=member, watch=True).SerializeToString()
    )
    call.peer = PEER._replace(member=member)
    meta.handle(call)
    return pb.OpenSessionReply.FromString(bytes((await call.wait())[0])).session


async def reported_names(meta, member: str, directory: int, inode: int) -> list[bytes]:
    call = DirectCall(
        wire.META_NAMES,
        pb.NamesRequest(
            inodes=read_write_codec.pack_inodes([inode]), directory=directory
        ).SerializeToString(),
    )
    call.peer = PEER._replace(member=member)
    meta.handle(call)
    return [one.name for one in pb.NamesReply.FromString(bytes((await call.wait())[0])).names]


async def reported_attributes(meta, member: str, session: int, inodes: list[int]) -> list[int]:
    """Inodes of the list whose attributes the member gets, although it knows only their numbers."""
    call = DirectCall(
        wire.META_GETATTR_MANY,
        pb.GetAttrManyRequest(
            session=session, inodes=read_write_codec.pack_inodes(inodes)
        ).SerializeToString(),
    )
    call.peer = PEER._replace(member=member)
    meta.handle(call)
    packed = pb.GetAttrManyReply.FromString(bytes((await call.wait())[0])).packed
    return [ENTRY.unpack_from(packed, at)[1] for at in range(0, len(packed), ENTRY.size)]


def test_client_without_a_right_does_not_see_the_volume():
    async def main() -> None:
        async with InProcessPool() as pool:
            client = await pool.client(options=ClientOptions(deadline_s=10.0))
            fs, meta = AsyncFileSystem(client, Caller(0, 0)), next(iter(pool.metas.values()))
            made = await fs.volumes.create("secret")
            await fs.write_bytes("/volumes/secret/f", b"1")
            await fs.volumes.grant("secret", GRANTED, "ro")
            for method, request in WHOLE:
                for member in (UNGRANTED, GRANTED):
                    assert await asked(meta, member, method, request) == "denied", (method, member)
            for method, request in WHOLE[1:]:
                for member in (NODE, NOBODY):
                    assert await asked(meta, member, method, request) != "denied", (method, member)
            sessions = {member: await session_of(meta, member) for member in (UNGRANTED, GRANTED, NODE)}

            def look(member: str) -> pb.LookupRequest:
                return pb.LookupRequest(session=sessions[member], parent=made.inode, name=b"f")

            assert await asked(meta, UNGRANTED, wire.META_LOOKUP, look(UNGRANTED)) == "denied"
            assert await asked(meta, GRANTED, wire.META_LOOKUP, look(GRANTED)) == "done"
            for member, expected in ((UNGRANTED, []), (GRANTED, [b"f"]), (NODE, [b"f"])):
                assert (
                    await reported_names(
                        meta, member, made.inode, (await fs.stat("/volumes/secret/f")).st_ino
                    )
                    == expected
                )
            inodes = [made.inode, (await fs.stat("/volumes/secret/f")).st_ino]
            for member, expected in ((UNGRANTED, inodes[:1]), (GRANTED, inodes), (NODE, inodes)):
                assert await reported_attributes(meta, member, sessions[member], inodes) == expected
            outside = pb.LookupRequest(session=sessions[UNGRANTED], parent=ROOT_INODE, name=b"volumes")
            assert await asked(meta, UNGRANTED, wire.META_LOOKUP, outside) == "done"
            home = (await fs.stat("/volumes")).st_ino
            for member, session in sessions.items():
                for method, request in (
                    (wire.META_LIST, pb.ListDirRequest(session=session, inode=home, attrs=True)),
                    (wire.META_VOLUMES, pb.VolumesRequest(session=session)),
                ):
                    assert await asked(meta, member, method, request) == "done", (member, method)
            for member, expected in ((UNGRANTED, "denied"), (GRANTED, "done")):
                session = sessions[member]
                for method, request in (
                    (
                        wire.META_VOLUME,
                        pb.VolumeRequest(session=session, inode=made.inode, action=pb.VolumeRequest.SHOW),
                    ),
                    (wire.META_LOOKUP, pb.LookupRequest(session=session, parent=home, name=b"secret")),
                    (wire.META_GETATTR, pb.GetAttrRequest(session=session, inode=made.inode)),
                    (wire.META_LIST, pb.ListDirRequest(session=session, inode=made.inode, attrs=True)),
                ):
                    assert await asked(meta, member, method, request) == expected, (member, method)
            await fs.volumes.revoke("secret", GRANTED)
            assert await asked(meta, GRANTED, wire.META_LOOKUP, look(GRANTED)) == "denied"

    asyncio.run(main())


def test_client_sees_only_its_own_volumes_and_rights():
    async def main() -> None:
        async with InProcessPool() as pool:
            client = await pool.client(options=ClientOptions(deadline_s=10.0))
            fs, meta = AsyncFileSystem(client, Caller(0, 0)), next(iter(pool.metas.values()))
            await fs.volumes.create("free")
            secret = (await fs.volumes.create("secret")).inode
            await fs.volumes.grant("secret", GRANTED, "ro")
            await fs.volumes.grant("secret", WRITER, "rw")
            await fs.volumes.attach("secret", "n1/x")

            async def answer(member: str, method: int, request) -> bytes:
                call = DirectCall(method, request.SerializeToString())
                call.peer = PEER._replace(member=member)
                meta.handle(call)
                return bytes((await call.wait())[0])

            all_rights = {GRANTED: False, WRITER: True}
            for member, rights in (
                (UNGRANTED, None),
                (GRANTED, {GRANTED: False}),
                (WRITER, {WRITER: True}),
                (NODE, all_rights),
                (NOBODY, all_rights),
            ):
                session = await session_of(meta, member)
                raw = await answer(member, wire.META_VOLUMES, pb.VolumesRequest(session=session))
                found = {state.name: state for state in pb.VolumesReply.FromString(raw).volumes}
                assert found.keys() == ({"free"} if rights is None else {"free", "secret"}), member
                if rights is None:
                    continue
                request = pb.VolumeRequest(session=session, inode=secret, action=pb.VolumeRequest.SHOW)
                raw = await answer(member, wire.META_VOLUME, request)
                for state in (found["secret"], pb.VolumeReply.FromString(raw).volume):
                    assert {grant.client: grant.write for grant in state.grants} == rights
                    assert list(state.attachments) == ["n1/x"]
            assert [volume.name for volume in await fs.volumes.list()] == ["free", "secret"]

    asyncio.run(main())


async def reported_tokens(
    meta, member: str, session: int, directory: int, names: list[bytes], inodes: list[int]
) -> tuple[int, int, int]:
    """Read tokens in a listing of the directory, in a look-up of these names together, and with the attributes of their
    inodes."""
    looked = pb.LookupManyRequest(
        session=session, rights=3, directories=[pb.NamesIn(parent=directory, names=names)]
    )
    calls = [
        DirectCall(
            wire.META_LIST,
            pb.ListDirRequest(
                session=session, inode=directory, attrs=True, packed=True, rights=3
            ).SerializeToString(),
        ),
        DirectCall(wire.META_LOOKUP_MANY, looked.SerializeToString()),
        DirectCall(
            wire.META_GETATTR_MANY,
            pb.GetAttrManyRequest(
                session=session, inodes=read_write_codec.pack_inodes(inodes), rights=3
            ).SerializeToString(),
        ),
    ]
    expected = []
    for call in calls:
        call.peer = PEER._replace(member=member)
        meta.handle(call)
        try:
            expected.append(bytes((await call.wait())[0]))
        except AccessDenied:
            expected.append(b"")
    return (
        len(pb.ListDirReply.FromString(expected[0]).grants) // GRANT_BYTES,
        sum(bool(found.entry.grant) for found in pb.LookupManyReply.FromString(expected[1]).found),
        len(pb.GetAttrManyReply.FromString(expected[2]).grants) // GRANT_BYTES,
    )


def test_listings_and_look_ups_carry_no_unauthorized_tokens():
    async def main() -> None:
        async with InProcessPool() as pool:
            client = await pool.client(options=ClientOptions(deadline_s=10.0))
            fs, meta = AsyncFileSystem(client, Caller(0, 0)), next(iter(pool.metas.values()))
            made = await fs.volumes.create("secret")
            names = [b"one", b"two", b"three"]
            for name in names:
                await fs.write_bytes(f"/volumes/secret/{name.decode()}", b"1")
            inodes = [(await fs.stat(f"/volumes/secret/{name.decode()}")).st_ino for name in names]
            asked = made.inode, names, inodes
            sessions = {member: await session_of(meta, member) for member in (UNGRANTED, GRANTED, NODE)}
            assert await reported_tokens(meta, UNGRANTED, sessions[UNGRANTED], *asked) == (
                3,
                3,
                3,
            )  # the volume is open to all
            await fs.volumes.grant("secret", GRANTED, "ro")
            # a listing and attributes carry no tokens then
            for member, expected in ((UNGRANTED, (0, 0, 0)), (GRANTED, (0, 3, 0)), (NODE, (0, 3, 0))):
                assert await reported_tokens(meta, member, sessions[member], *asked) == expected
            await fs.volumes.revoke("secret", GRANTED)
            assert await reported_tokens(meta, GRANTED, sessions[GRANTED], *asked) == (0, 0, 0)

    asyncio.run(main())


def test_local_user_may_only_query_a_volume():
    async def main() -> None:
        async with InProcessPool() as pool:
            client = await pool.client(options=ClientOptions(deadline_s=10.0))
            fs, meta = AsyncFileSystem(client, Caller(0, 0)), next(iter(pool.metas.values()))
            made = await fs.volumes.create("scratch")
            session = 0

            async def result_of(method: int, request) -> tuple[str, bytes]:
                call = DirectCall(method, request.SerializeToString())
                call.peer = PEER._replace(credentials=LOCAL_USER)
                meta.handle(call)
                try:
                    return "done", (await call.wait())[0]
                except AccessDenied:
                    return "denied", b""

            session = pb.OpenSessionReply.FromString(
                (await result_of(wire.META_OPEN_SESSION, pb.OpenSessionRequest()))[1]
            ).session
            for operation in pb.VolumeRequest.Action.values():
                request = pb.VolumeRequest(session=session, inode=made.inode, action=operation)
                looks = operation in (pb.VolumeRequest.SHOW, pb.VolumeRequest.KEY)
                assert (await result_of(wire.META_VOLUME, request))[0] == ("done" if looks else "denied")
            for trash_operation in pb.TrashRequest.Action.values():
                asked = pb.TrashRequest(session=session, inode=made.inode, action=trash_operation)
                assert (await result_of(wire.META_TRASH, asked))[0] == "denied"
            assert (await fs.volumes.list())[0].name == "scratch"

    asyncio.run(main())
